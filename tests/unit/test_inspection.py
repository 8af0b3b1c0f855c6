"""What a rank hands to its collectives, looked at: right contributions pass, each kind of wrong one is noted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import blame
from harness.drive.inspection import Inspection
from harness.oracles import contributions
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values, steps
from harness.scenario.partition import Partition
from harness.verdict import Divergence, Handed, Property, RankStatus, RankVerdict, Stage

WORLD, RANK = 3, 1
SCENARIO = Scenario(
    world=WORLD,
    seed=11,
    parameters=(Parameter("a", (4, 2)), Parameter("b", (9,))),  # 17 elements: buckets of 6, 6 and 5 (padded to 6)
    values=Values(Domain.EXACT, 100, 0),
    optimizer=AdamW(),
    operations=(Build(6), Part(True, (0, 1, 2), ((), (0,), ())), Part(False, (3, 4, 5), ((), (), ())), Step()),
)
PARTITION = Partition.from_request(17, WORLD, 6)
GRADIENT = torch.tensor([3.0, 4.0])
MASTERS = [torch.linspace(1.0, 2.0, 8).view(4, 2), torch.linspace(3.0, 4.0, 9)]


@pytest.fixture
def inspection() -> Inspection:
    inspection = Inspection(SCENARIO, PARTITION, RANK, lambda: GRADIENT, lambda: MASTERS)
    inspection.begin(next(steps(SCENARIO)))
    return inspection


def own(index: int) -> Tensor:
    """What this rank should hand over for a bucket."""
    plan = next(steps(SCENARIO))
    flat = np.zeros(18, np.float32)
    for part in range(2):
        start = 0
        for parameter, numel in enumerate((8, 9)):
            values = contributions.contribution(SCENARIO, plan, RANK, part, parameter)
            flat[start : start + numel] += 0 if values is None else values
            start += numel
    return torch.from_numpy(flat[6 * index : 6 * index + 6].copy())


def piece(index: int) -> Tensor:
    flat = torch.cat([master.reshape(-1) for master in MASTERS] + [torch.zeros(1)])
    return flat[6 * index + 2 * RANK : 6 * index + 2 * RANK + 2].bfloat16()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce", "reduce_scatter_list"])
def test_what_is_due_passes_in_each_stage(inspection: Inspection, kind: str) -> None:
    for index in range(3):
        bucket = own(index)
        inspection.called(Stage.REDUCE, kind, list(bucket.chunk(WORLD)) if kind.endswith("list") else bucket)
    inspection.called(Stage.NORM, "all_reduce", torch.tensor([25.0]))
    for index in range(3):
        inspection.called(Stage.GATHER, "all_gather", piece(index))

    assert inspection.found == []


def test_a_wrong_element_is_noted_with_its_place(inspection: Inspection) -> None:
    inspection.called(Stage.REDUCE, "reduce_scatter", own(0))
    wrong = own(1)
    wrong[3] += 1.0
    inspection.called(Stage.REDUCE, "reduce_scatter", wrong)

    (note,) = inspection.found
    assert (note.stage, note.bucket, note.instead, note.parameter, note.element) == (Stage.REDUCE, 1, None, "b", 1)
    assert repr(float(wrong[3])) in note.message


def test_something_in_the_padding_is_noted(inspection: Inspection) -> None:
    for index in range(2):
        inspection.called(Stage.REDUCE, "reduce_scatter", own(index))
    wrong = own(2)
    wrong[5] = 1.0
    inspection.called(Stage.REDUCE, "reduce_scatter", wrong)

    (note,) = inspection.found
    assert (note.bucket, note.parameter) == (2, None)
    assert "its padding" in note.message


def test_swapped_buckets_are_told(inspection: Inspection) -> None:
    for index in (1, 0, 2):
        inspection.called(Stage.REDUCE, "reduce_scatter", own(index))
    for index in (0, 2, 1):
        inspection.called(Stage.GATHER, "all_gather", piece(index))

    assert [(note.stage, note.bucket, note.instead) for note in inspection.found] == [
        (Stage.REDUCE, 0, 1),
        (Stage.REDUCE, 1, 0),
        (Stage.GATHER, 1, 2),
        (Stage.GATHER, 2, 1),
    ]


def test_a_norm_that_is_not_of_this_shard_is_noted(inspection: Inspection) -> None:
    inspection.called(Stage.NORM, "all_reduce", torch.tensor(25.05))  # a sum in fp32 may be off
    assert inspection.found == []

    inspection.called(Stage.NORM, "all_reduce", torch.tensor(5.0))
    assert [note.stage for note in inspection.found] == [Stage.NORM]


@pytest.mark.parametrize("count", [WORLD, 2, 2 * WORLD])
def test_a_mean_is_not_judged(inspection: Inspection, count: int) -> None:
    """All ranks may take it, and then one without gradients would look as if it alone were right."""
    inspection.called(Stage.REDUCE, "reduce_scatter", own(0) / count)

    assert inspection.found == []


def test_one_part_alone_is_not_judged(inspection: Inspection) -> None:
    plan = next(steps(SCENARIO))
    last = [contributions.contribution(SCENARIO, plan, RANK, 1, parameter) for parameter in range(2)]
    part = torch.from_numpy(np.concatenate([values for values in last if values is not None])[6:12])
    assert not torch.equal(part, own(1))
    for bucket in (own(0), part, own(0)):  # nor what follows
        inspection.called(Stage.REDUCE, "reduce_scatter", bucket)

    assert inspection.found == []


def test_zeros_for_gradients_are_a_mistake_in_any_form(inspection: Inspection) -> None:
    """Also where one part has no gradient in that bucket."""
    inspection.called(Stage.REDUCE, "reduce_scatter", torch.zeros(6))

    assert [note.bucket for note in inspection.found] == [0]


def test_another_layout_is_not_judged(inspection: Inspection) -> None:
    inspection.called(Stage.REDUCE, "reduce_scatter", torch.zeros(18))
    inspection.called(Stage.REDUCE, "reduce_scatter", torch.zeros(6))
    inspection.called(Stage.GATHER, "all_gather", torch.zeros(5))
    inspection.called(Stage.REDUCE, "barrier", None)

    assert inspection.found == []


# --- whose doing ------------------------------------------------------------------------------------------------------


def wrong_at(rank: int, **fields: object) -> RankVerdict:
    note = Handed(step=0, stage=Stage.REDUCE, message="handed over 1.0 for …", **fields)  # type: ignore[arg-type]
    return RankVerdict(rank=rank, status=RankStatus.DONE, handed=(note,))


def swapped(rank: int, *buckets: int) -> RankVerdict:
    """Each of these buckets was handed over where the one before it was due, the first where the last was."""
    notes = [
        Handed(step=0, stage=Stage.REDUCE, message="handed over another", bucket=bucket, instead=instead)
        for bucket, instead in zip(buckets, buckets[1:] + buckets[:1], strict=True)
    ]
    return RankVerdict(rank=rank, status=RankStatus.DONE, handed=tuple(notes))


def fine(rank: int) -> RankVerdict:
    return RankVerdict(rank=rank, status=RankStatus.DONE)


FOUND = Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, step=0, rank=0, message="it differs", owner=0)


def test_a_wrong_sum_is_put_at_the_rank_that_gave_a_wrong_value() -> None:
    found = blame.attributed(FOUND, [fine(0), fine(1), wrong_at(2)])

    assert (found.property, found.rank, found.owner) == (Property.GRADIENT, 2, 0)
    assert found.message == "it differs: rank 2 handed over 1.0 for …"


def test_a_swap_is_a_matter_of_traffic() -> None:
    found = blame.attributed(FOUND, [fine(0), swapped(1, 0, 1), fine(2)])

    assert (found.property, found.rank, found.stage, found.bucket) == (Property.TRAFFIC, 1, Stage.REDUCE, 0)
    assert "unlike ranks 0, 2" in found.message


def test_ranks_that_were_wrong_too_are_not_among_those_that_were_right() -> None:
    found = blame.attributed(FOUND, [fine(0), swapped(1, 0, 1), swapped(2, 0, 2, 1)])

    assert found.rank == 1
    assert "unlike rank 0 (rank 2 handed over something wrong too)" in found.message


def test_a_bucket_that_was_handed_over_twice_is_a_wrong_value_and_no_swap() -> None:
    found = blame.attributed(FOUND, [fine(0), wrong_at(1, bucket=0, instead=1), fine(2)])

    assert (found.property, found.rank, found.stage) == (Property.GRADIENT, 1, Stage.REDUCE)


def test_what_looks_wrong_on_all_ranks_or_later_says_nothing() -> None:
    assert blame.attributed(FOUND, [wrong_at(0), wrong_at(1)]) == FOUND
    early = Divergence(property=Property.SPILL, stage=Stage.COLLECT, step=0, rank=0, message="it differs")
    assert blame.attributed(early, [fine(0), wrong_at(1)]) == early


def test_weights_that_all_ranks_see_wrong_alike_come_from_their_owner() -> None:
    found = Divergence(
        property=Property.WEIGHTS, stage=Stage.GATHER, step=0, rank=0, message="w", owner=2, parameter="a", element=1
    )
    seen = [RankVerdict(rank=rank, status=RankStatus.DONE, divergence=found) for rank in range(3)]

    assert blame.attributed(found, seen).rank == 2
    assert blame.attributed(found, [*seen[:2], fine(2)]) == found
