"""Merging the verdicts of all ranks: which divergence is the first, and what only all ranks together show."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections.abc import Mapping

import pytest

from harness.oracles import judge
from harness.oracles.judge import Judgement, merge
from harness.verdict import (
    Collective,
    Divergence,
    NormObservation,
    Property,
    RankStatus,
    RankVerdict,
    Stage,
    WeightsObservation,
)


def fp32(value: float) -> str:
    return "0x" + struct.pack(">f", value).hex()


def diverged(prop: Property, step: int | None, stage: Stage, rank: int | None = None) -> Divergence:
    return Divergence(property=prop, stage=stage, step=step, rank=rank, message=f"{prop.value} at {step} {stage.value}")


def ranks(*verdicts: Mapping[str, object]) -> list[RankVerdict]:
    """One verdict per entry, DONE unless it says otherwise."""
    return [RankVerdict(**{"rank": rank, "status": RankStatus.DONE, **fields}) for rank, fields in enumerate(verdicts)]  # type: ignore[arg-type]


def norms(*values: float) -> tuple[NormObservation, ...]:
    return tuple(NormObservation(step, 0, fp32(value)) for step, value in enumerate(values))


def log(*calls: tuple[str, str, int], group: tuple[int, ...] = (0, 1, 2, 3), step: int = 0) -> tuple[Collective, ...]:
    return tuple(Collective(*call, group, step, "reduce") for call in calls)


REDUCE = ("reduce_scatter", "fp32", 96)
GATHER = ("all_gather", "bf16", 48)


# --- the first divergence ---------------------------------------------------------------------------------------------


def test_ranks_that_agree_give_no_divergence_and_their_comparisons_are_counted() -> None:
    same = {"norms": norms(1.0, 2.0), "weights": (WeightsObservation(0, "aa"),), "collectives": log(REDUCE, GATHER)}

    assert merge(ranks(same, same, same, same), 4) == Judgement(None, {"norm": 2, "agreement": 1, "traffic": 2})


def test_one_rank_alone_has_nothing_to_agree_with() -> None:
    alone = {"norms": norms(1.0), "weights": (WeightsObservation(0, "a"),), "collectives": log(REDUCE, group=(0,))}

    assert merge(ranks(alone), 1) == Judgement(None, {})


def test_the_earliest_step_and_stage_wins_whatever_the_rank() -> None:
    verdicts = ranks(
        {"divergence": diverged(Property.WEIGHTS, 1, Stage.GATHER, 0)},
        {"divergence": diverged(Property.MASTER, 1, Stage.UPDATE, 1)},
        {"divergence": diverged(Property.GRADIENT, 1, Stage.REDUCE, 2)},
        {"divergence": diverged(Property.NORM, 2, Stage.NORM, 3)},
    )

    assert merge(verdicts, 4).divergence == verdicts[2].divergence
    assert merge(verdicts[::-1], 4).divergence == verdicts[2].divergence


def test_the_build_comes_before_every_step() -> None:
    verdicts = ranks(
        {"divergence": diverged(Property.INTAKE, 0, Stage.COLLECT, 0)},
        {"divergence": diverged(Property.OWNERSHIP, None, Stage.BUILD, 1)},
    )

    assert merge(verdicts, 2).divergence == verdicts[1].divergence


def test_at_one_stage_the_lowest_rank_wins_and_is_named() -> None:
    verdicts = ranks({}, *({"divergence": diverged(Property.GRADIENT, 0, Stage.REDUCE)} for _ in range(3)))

    found = merge(verdicts, 4).divergence

    assert found is not None
    assert (found.rank, found.property) == (1, Property.GRADIENT)


@pytest.mark.parametrize("present", [[0, 1], [0, 1, 1], [0, 1, 2, 3], []])
def test_a_missing_or_doubled_verdict_is_never_a_pass(present: list[int]) -> None:
    verdicts = [RankVerdict(rank=rank, status=RankStatus.DONE) for rank in present]

    with pytest.raises(ValueError, match="3 ranks"):
        merge(verdicts, 3)


# --- norms and weights ------------------------------------------------------------------------------------------------


def test_a_norm_that_differs_on_one_rank_is_found_with_its_bits() -> None:
    odd = struct.unpack(">f", struct.pack(">I", 0x40000001))[0]

    judgement = merge(ranks(*({"norms": norms(1.0, value)} for value in (2.0, 2.0, odd, 2.0))), 4)

    found = judgement.divergence
    assert found is not None
    assert (found.property, found.stage, found.step, found.rank) == (Property.NORM, Stage.NORM, 1, 2)
    assert (found.expected, found.actual, found.ulps) == (2.0, odd, 1)
    assert (found.expected_bits, found.actual_bits) == ("0x40000000", "0x40000001")
    assert "ranks 0, 1, 3 got 0x40000000, rank 2 0x40000001" in found.message
    assert judgement.checks == {"norm": 2}


def test_the_norm_after_clipping_is_another_observation() -> None:
    first, second = NormObservation(0, 0, fp32(4.0)), NormObservation(0, 1, fp32(1.0))
    other = NormObservation(0, 1, fp32(1.5))

    found = merge(ranks({"norms": (first, second)}, {"norms": (first, other)}), 2).divergence

    assert found is not None
    assert "after clipping" in found.message
    assert (found.rank, found.expected, found.actual) == (1, 1.0, 1.5)  # a tie: what rank 0 has is expected


def test_nan_norms_agree_with_each_other_only() -> None:
    nan = {"norms": (NormObservation(0, 0, "nan"),)}
    number = {"norms": norms(1.0)}

    assert merge(ranks(nan, nan, nan), 3) == Judgement(None, {"norm": 1})
    found = merge(ranks(nan, nan, number), 3).divergence
    assert found is not None
    assert (found.rank, found.expected_bits, found.ulps) == (2, "nan", None)
    assert math.isnan(float(found.expected or 0))


def test_norms_of_other_precision_differ() -> None:
    wide = {"norms": (NormObservation(0, 0, "0x4000000000000000"),)}

    found = merge(ranks({"norms": norms(2.0)}, {"norms": norms(2.0)}, wide), 3).divergence

    assert found is not None
    assert (found.rank, found.expected, found.actual, found.ulps) == (2, 2.0, 2.0, None)


def test_weights_of_a_group_of_ranks_are_compared_within_it() -> None:
    def with_pair(digest: str, group: tuple[int, int]) -> dict[str, object]:
        return {"weights": (WeightsObservation(0, "all"), WeightsObservation(0, digest, group))}

    one, other, alone = with_pair("a", (0, 1)), with_pair("b", (2, 3)), {"weights": (WeightsObservation(0, "all"),)}
    agreed = merge(ranks(one, one, other, other, alone), 5)
    split = merge(ranks(one, one, other, with_pair("c", (2, 3)), alone), 5).divergence

    assert agreed.divergence is None
    assert agreed.checks["agreement"] == 3
    assert split is not None
    assert (split.property, split.rank) == (Property.AGREEMENT, 3)
    assert "rank 2 have digest b" in split.message


def test_weights_that_differ_between_ranks_violate_agreement() -> None:
    def weights(*digests: str) -> dict[str, object]:
        return {"weights": tuple(WeightsObservation(step, one) for step, one in enumerate(digests))}

    judgement = merge(ranks(weights("a", "x"), weights("a", "b"), weights("a", "b")), 3)

    found = judgement.divergence
    assert found is not None
    assert (found.property, found.stage, found.step, found.rank) == (Property.AGREEMENT, Stage.GATHER, 1, 0)
    assert (found.expected, found.actual) == ("b", "x")
    assert judgement.checks == {"agreement": 2}


def test_what_a_rank_found_itself_comes_before_a_disagreement_at_the_same_stage() -> None:
    own = diverged(Property.WEIGHTS, 0, Stage.GATHER, 2)
    right, wrong = {"weights": (WeightsObservation(0, "a"),)}, {"weights": (WeightsObservation(0, "b"),)}

    assert merge(ranks(right, right, {**wrong, "divergence": own}), 3).divergence == own


def test_an_early_disagreement_comes_before_a_late_divergence() -> None:
    late = diverged(Property.WEIGHTS, 0, Stage.GATHER, 0)

    found = merge(ranks({"norms": norms(1.0), "divergence": late}, {"norms": norms(2.0)}), 2).divergence

    assert found is not None
    assert found.property is Property.NORM


def test_ranks_that_finished_must_have_observed_the_same_steps() -> None:
    """A rank that ended well but did not look is a mistake of the harness, not agreement."""
    with pytest.raises(ValueError, match="rank 1 finished without observing squared norms"):
        merge(ranks({"norms": norms(1.0, 2.0)}, {"norms": norms(1.0)}), 2)
    with pytest.raises(ValueError, match="rank 0 finished without observing weights"):
        merge(ranks({}, {"weights": (WeightsObservation(0, "a"),)}), 2)


# --- how ranks end ----------------------------------------------------------------------------------------------------


def raised(step: int, stage: Stage, rank: int, text: str) -> dict[str, object]:
    divergence = Divergence(property=Property.PROGRESS, stage=stage, step=step, rank=rank, message=text)
    return {"status": RankStatus.RAISED, "divergence": divergence, "detail": f"Traceback ...\n{text}"}


def test_a_rank_that_raised_violates_progress() -> None:
    found = merge(ranks({}, raised(2, Stage.GATHER, 1, "ValueError: no")), 2).divergence

    assert found is not None
    assert (found.property, found.step, found.rank) == (Property.PROGRESS, 2, 1)


def test_a_raise_without_a_place_is_not_lost() -> None:
    found = merge(ranks({}, {"status": RankStatus.RAISED, "detail": "RuntimeError: odd"}), 2).divergence

    assert found is not None
    assert (found.property, found.rank) == (Property.PROGRESS, 1)
    assert "RuntimeError: odd" in found.message


def test_the_rank_that_raised_first_hand_is_named_not_those_that_lost_their_peer() -> None:
    lost = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    verdicts = ranks(
        raised(1, Stage.REDUCE, 0, lost),
        raised(1, Stage.REDUCE, 1, lost),
        raised(1, Stage.REDUCE, 2, "IndexError: out of range"),
    )

    found = merge(verdicts, 3).divergence
    assert found is not None
    assert found.rank == 2
    found = merge(verdicts[:2], 2).divergence
    assert found is not None
    assert found.rank == 0


def test_what_a_rank_saw_before_it_raised_comes_first() -> None:
    seen = diverged(Property.GRADIENT, 0, Stage.REDUCE, 1)
    verdicts = ranks(
        raised(1, Stage.COLLECT, 0, "boom"), {"status": RankStatus.RAISED, "divergence": seen, "detail": "boom"}
    )

    assert merge(verdicts, 2).divergence == seen


def test_a_scenario_outside_the_space_of_all_ranks_is_unsupported_and_no_violation() -> None:
    refused = {"status": RankStatus.UNSUPPORTED, "detail": "NotImplementedError"}

    assert merge(ranks(refused, refused), 2) == Judgement(None, {}, unsupported=True)


def test_a_refusal_does_not_hide_what_differed_before() -> None:
    seen = diverged(Property.NORM, 0, Stage.NORM, 1)
    refused = {"status": RankStatus.UNSUPPORTED, "norms": norms(1.0)}

    judgement = merge(ranks(refused, {**refused, "divergence": seen}), 2)
    assert (judgement.divergence, judgement.unsupported) == (seen, False)
    judgement = merge(ranks(refused, {**refused, "norms": norms(2.0)}), 2)
    assert judgement.divergence is not None
    assert judgement.divergence.property is Property.NORM


@pytest.mark.parametrize("status", [RankStatus.UNSUPPORTED, RankStatus.INTERFACE])
def test_a_refusal_on_some_ranks_only_violates_progress(status: RankStatus) -> None:
    judgement = merge(ranks({}, {"status": status, "detail": "NotImplementedError: scalar"}, {}), 3)

    found = judgement.divergence
    assert found is not None
    assert not judgement.unsupported
    assert judgement.interface is None
    assert (found.property, found.rank) == (Property.PROGRESS, 1)
    assert "rank 1" in found.message
    assert "while ranks 0, 2 did not: NotImplementedError: scalar" in found.message


def test_a_missing_interface_on_all_ranks_is_told_apart() -> None:
    lacks = {"status": RankStatus.INTERFACE, "detail": "no attribute spills"}

    assert merge(ranks(lacks, lacks), 2) == Judgement(None, {}, interface="no attribute spills")


# --- collectives ------------------------------------------------------------------------------------------------------


def traffic(*logs: tuple[Collective, ...], **fields: object) -> Judgement:
    return merge(ranks(*({"collectives": one, **fields} for one in logs)), len(logs))


def test_another_collective_on_one_rank_is_named_with_its_place() -> None:
    six = [REDUCE] * 6
    logs = [log(*six, GATHER) for _ in range(4)]
    logs[2] = log(*six, REDUCE)

    found = traffic(*logs).divergence

    assert found is not None
    assert (found.property, found.stage, found.step, found.rank) == (Property.TRAFFIC, Stage.REDUCE, 0, 2)
    assert found.message == (
        "rank 2 called reduce_scatter fp32[96] as its 7th collective while ranks 0, 1, 3 called all_gather bf16[48]"
    )


@pytest.mark.parametrize(
    "other", [("all_reduce", "fp32", 96), ("reduce_scatter", "bf16", 96), ("reduce_scatter", "fp32", 97)]
)
def test_kind_dtype_and_length_all_count(other: tuple[str, str, int]) -> None:
    found = traffic(log(REDUCE), log(other), log(REDUCE), log(REDUCE)).divergence

    assert found is not None
    assert f"rank 1 called {other[0]} {other[1]}[{other[2]}] as its 1st collective" in found.message


@pytest.mark.parametrize(("rank", "logs"), [(1, (2, 1, 2, 2)), (3, (1, 1, 1, 2))])
def test_a_missing_or_an_extra_call_is_named(rank: int, logs: tuple[int, ...]) -> None:
    found = traffic(*(log(*[REDUCE, GATHER][:size]) for size in logs)).divergence

    assert found is not None
    assert found.rank == rank
    if rank == 1:
        assert found.message.startswith("rank 1 called nothing as its 2nd collective while ranks 0, 2, 3 called all_g")
    else:
        assert found.message.endswith(
            "as its 2nd collective while ranks 0, 1, 2 called nothing: rank 3 called one too many"
        )


def test_the_same_calls_in_another_order_differ() -> None:
    """Two buckets swapped on one rank: no backend reports it."""
    short = ("reduce_scatter", "fp32", 8)

    found = traffic(log(REDUCE, short), log(short, REDUCE), log(REDUCE, short), log(REDUCE, short)).divergence

    assert found is not None
    assert found.message.startswith("rank 1 called reduce_scatter fp32[8] as its 1st collective")


def test_a_call_that_differs_comes_before_the_wrong_values_it_causes() -> None:
    values = diverged(Property.GRADIENT, 0, Stage.REDUCE, 0)
    early = diverged(Property.INTAKE, 0, Stage.COLLECT, 0)
    logs = [log(REDUCE, group=(0, 1)), log(GATHER, group=(0, 1))]

    def found(own: Divergence) -> Divergence | None:
        return merge(ranks({"collectives": logs[0], "divergence": own}, {"collectives": logs[1]}), 2).divergence

    assert (found(values) or values).property is Property.TRAFFIC
    assert found(early) == early


def test_a_rank_that_stopped_early_lacks_no_calls() -> None:
    """Its log ends because it raised: progress, not traffic; a call that differs before counts all the same."""
    stopped = raised(3, Stage.COLLECT, 1, "boom")
    whole = {"collectives": log(REDUCE, GATHER)}

    found = merge(ranks(whole, {**stopped, "collectives": log(REDUCE)}, whole, whole), 4).divergence
    assert found is not None
    assert found.property is Property.PROGRESS
    found = merge(ranks(whole, {**stopped, "collectives": log(GATHER)}, whole, whole), 4).divergence
    assert found is not None
    assert found.property is Property.TRAFFIC
    lacking = {"collectives": log(REDUCE)}
    found = merge(ranks(lacking, {**stopped, "collectives": log(REDUCE, GATHER)}, whole, whole), 4).divergence
    assert found is not None
    assert (found.property, found.rank) == (Property.TRAFFIC, 0)


def test_point_to_point_calls_are_left_out() -> None:
    send, receive = ("send", "fp32", 8), ("recv", "fp32", 8)

    judgement = traffic(log(send, REDUCE), log(receive, receive, REDUCE), log(REDUCE), log(REDUCE))

    assert judgement == Judgement(None, {"traffic": 1})


def test_uneven_exchanges_may_have_other_lengths() -> None:
    logs = [log(("all_to_all", "fp32", size), REDUCE) for size in (1, 2, 3, 4)]

    assert traffic(*logs) == Judgement(None, {"traffic": 2})
    logs[3] = log(REDUCE, ("all_to_all", "fp32", 4))
    assert traffic(*logs).divergence is not None


def test_groups_of_some_ranks_are_compared_among_their_members() -> None:
    """Two groups may do different things; members of one may not, nor order two shared groups differently."""
    everyone, left, right = (0, 1, 2, 3), (0, 1), (2, 3)
    pair = log(REDUCE, group=left), log(GATHER, group=right)
    together = log(REDUCE, group=everyone)

    good = traffic(pair[0] + together, pair[0] + together, pair[1] + together, pair[1] + together)
    assert good.divergence is None
    assert good.checks["traffic"] == 8  # pairs (0, 1) and (2, 3) share two calls, the other four share one

    odd = log(("reduce_scatter", "fp32", 97), group=left)
    found = traffic(pair[0] + together, odd + together, pair[1] + together, pair[1] + together).divergence
    assert found is not None
    assert found.message == (
        "rank 1 called reduce_scatter fp32[97] among ranks 0, 1 as its 1st collective while rank 0 called "
        "reduce_scatter fp32[96] among ranks 0, 1: two logs alone do not tell which of them is wrong"
    )
    assert found.rank is None

    swapped = traffic(pair[0] + together, together + pair[0], pair[1] + together, pair[1] + together).divergence
    assert swapped is not None
    assert swapped.property is Property.TRAFFIC


def test_the_earliest_of_several_differences_is_reported() -> None:
    late, early = ("all_reduce", "fp32", 1), ("all_reduce", "fp32", 2)
    calls = log(REDUCE, step=0) + log(REDUCE, step=1)
    one_late = log(REDUCE, step=0) + log(late, step=1)
    one_early = log(early, step=0) + log(REDUCE, step=1)

    found = traffic(calls, one_late, calls, one_early).divergence

    assert found is not None
    assert (found.step, found.rank) == (0, 3)


def test_judging_imports_no_torch() -> None:
    """The parent never pays for torch, and must not hold its threads when it forks nothing but waits."""
    code = "import sys, harness.oracles.judge; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


OWN_FRAME = '  File "/home/u/my_zero.py", line 7, in collect\n    {source}\n'
TORCH_FRAME = (
    '  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3, in f\n    {source}\n'
)
LOST = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:1234\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("detail", "lost", "late"),
    [
        (TORCH_FRAME.format(source="work.wait()") + LOST, True, False),
        (OWN_FRAME.format(source="group.allreduce([t]).wait()") + LOST, True, False),
        (TORCH_FRAME.format(source="raise RuntimeError(text)") + LOST, True, False),
        (TORCH_FRAME.format(source="work.wait()") + "RuntimeError: Timed out waiting 1000ms for recv\n", True, True),
        (
            OWN_FRAME.format(source="dist.monitored_barrier()")
            + "RuntimeError: Rank 2 failed to pass monitoredBarrier in 1000 ms\n",
            True,
            True,
        ),
        # Wrapped by the class: the backend's is behind it.
        (
            TORCH_FRAME.format(source="work.wait()")
            + LOST
            + CAUSE
            + OWN_FRAME.format(source="raise ValueError(a) from e")
            + "ValueError: reduction failed\n",
            True,
            False,
        ),
        # Of a connection of the class's own.
        (
            OWN_FRAME.format(source="socket.connect(a)") + "ConnectionRefusedError: [Errno 111] Connection refused\n",
            False,
            False,
        ),
        (OWN_FRAME.format(source="raise RuntimeError(text)") + LOST, False, False),
        (OWN_FRAME.format(source="if gone: raise RuntimeError(text)") + LOST, False, False),
        (OWN_FRAME.format(source="file.write(b)  # broken pipe") + "ValueError: I/O on closed file\n", False, False),
    ],
)
def test_a_lost_peer_is_told_from_a_connection_of_the_subjects_own(detail: str, lost: bool, late: bool) -> None:
    found = Divergence(property=Property.PROGRESS, stage=Stage.COLLECT, step=0, rank=0, message="Zero.collect raised")
    said = RankVerdict(rank=0, status=RankStatus.RAISED, divergence=found, detail=f"Traceback ...\n{detail}")

    assert (judge.peer_lost(said), judge.peer_late(said)) == (lost, late)
