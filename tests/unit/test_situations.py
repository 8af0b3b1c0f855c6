"""Situations: each is told from its near misses, and the layout ones agree with the partition element by element."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Extension,
    Load,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Skip,
    Step,
    Values,
    check,
)
from harness.scenario.partition import Partition, round_bucket
from harness.scenario.situations import GOALS, RUNTIME, Situation, can_hold, reached
from tests.support import required

S = Situation
Nones = Sequence[Sequence[int]]


def scenario(
    world: int = 2,
    shapes: Sequence[tuple[int, ...]] = ((3,), (2,)),
    bucket: int = 4,
    operations: Sequence[Operation] | None = None,
    optimizer: AdamW | None = None,
) -> Scenario:
    parameters = tuple(Parameter(f"p{index}", shape) for index, shape in enumerate(shapes))
    made = Scenario(
        world,
        0,
        parameters,
        Values(Domain.EXACT, 1, 0),
        optimizer or AdamW(),
        (Build(bucket), *(operations or (part(world), Step()))),
    )
    assert check(made) is None
    return made


def part(world: int = 2, none: Nones | None = None, *, more: bool = False) -> Part:
    return Part(more, tuple(range(world)), tuple(map(tuple, none or [()] * world)))


def of_steps(*operations: Operation) -> frozenset[Situation]:
    """What two ranks with two parameters reach by these operations."""
    return reached(scenario(operations=operations))


@pytest.mark.parametrize(
    ("situation", "hit", "miss"),
    [
        (S.PARAMETER_CROSSES_BUCKET_EDGE, ((3,), (2,)), ((4,), (4,))),
        (S.PARAMETER_CROSSES_PIECE_EDGE, ((2,), (1,), (2,), (3,)), ((2,), (2,), (2,), (2,))),
        (S.PARAMETER_LARGER_THAN_BUCKET, ((5,),), ((2,), (4,))),
        (S.PARAMETER_FILLS_BUCKET, ((1,), (3,), (2, 2)), ((1,), (4,), (3,))),
        (S.PARAMETER_FILLS_BUCKET, ((4,),), ((3,),)),
        (S.ONE_ELEMENT_PARAMETER, ((1, 1),), ((),)),
        (S.SCALAR_PARAMETER, ((), (2,)), ((1,), (2,))),
        (S.EMPTY_PARAMETER_BETWEEN, ((1,), (0,), (2, 0), (1,)), ((0,), (1,), (1,), (0, 3))),
    ],
)
def test_parameters(situation: Situation, hit: Sequence[tuple[int, ...]], miss: Sequence[tuple[int, ...]]) -> None:
    assert situation in reached(scenario(shapes=hit))
    assert situation not in reached(scenario(shapes=miss))


@pytest.mark.parametrize(
    ("situation", "hit", "miss"),
    [
        (S.FEWER_ELEMENTS_THAN_RANKS, (3, 2, 4), (3, 3, 4)),
        (S.AS_MANY_ELEMENTS_AS_RANKS, (3, 3, 4), (3, 6, 4)),
        (S.ELEMENTS_NOT_DIVISIBLE_BY_WORLD, (3, 7, 4), (3, 6, 4)),
        (S.LAST_PIECE_ALL_PADDING, (4, 5, 8), (4, 7, 8)),
        (S.LAST_PIECE_ALL_PADDING, (4, 13, 8), (4, 8, 8)),
        (S.MORE_THAN_TWO_BUCKETS, (2, 9, 5), (2, 8, 5)),
        (S.BUCKET_BELOW_WORLD, (3, 5, 2), (3, 5, 3)),
        (S.ONE_BUCKET, (2, 4, 5), (2, 5, 5)),
        (S.WORLD_THREE, (3, 5, 4), (4, 5, 4)),
    ],
)
def test_layout(situation: Situation, hit: tuple[int, int, int], miss: tuple[int, int, int]) -> None:
    """World, elements, requested bucket size."""
    for (world, numel, bucket), expected in ((hit, True), (miss, False)):
        assert (situation in reached(scenario(world, [(numel,)], bucket))) == expected


def test_layout_agrees_with_the_partition_element_by_element() -> None:
    for world, bucket in itertools.product((1, 2, 3, 4), (1, 3, 4, 5, 8)):
        for sizes in itertools.product(range(7), repeat=3):
            if sum(sizes) == 0:
                continue
            found = reached(scenario(world, [(size,) for size in sizes], bucket))
            partition = Partition.from_request(sum(sizes), world, bucket)
            owners = [partition.owner(flat) for flat in range(partition.numel)]
            across_buckets = across_pieces = fills = False
            stop = 0
            for size in sizes:
                start, stop = stop, stop + size
                buckets = {bucket_ for bucket_, _ in owners[start:stop]}
                across_buckets |= len(buckets) > 1
                across_pieces |= len(set(owners[start:stop])) > len(buckets)
                fills |= size == round_bucket(bucket, world) and (start, stop) in {
                    (cut.start, cut.end) for cut in partition.buckets
                }
            last = len(partition.buckets) - 1
            padded = partition.piece(last, world - 1)
            assert (S.PARAMETER_CROSSES_BUCKET_EDGE in found) == across_buckets
            assert (S.PARAMETER_CROSSES_PIECE_EDGE in found) == across_pieces
            assert (S.PARAMETER_FILLS_BUCKET in found) == fills
            assert (S.LAST_PIECE_ALL_PADDING in found) == (padded[0] == padded[1])
            assert (S.MORE_THAN_TWO_BUCKETS in found) == (len(partition.buckets) > 2)
            assert (S.ONE_BUCKET in found) == (len(partition.buckets) == 1)


ALL = (0, 1)  # None for both parameters: no part on this rank


def test_number_of_parts_is_that_of_the_rank_with_the_most() -> None:
    assert S.ONE_PART in of_steps(part(), Step())
    assert {S.ONE_PART, S.TWO_PARTS} & of_steps(part(more=True), part(none=[ALL, ()]), Step()) == {S.TWO_PARTS}
    assert S.THREE_PARTS in of_steps(part(more=True), part(more=True), part(), Step())
    assert S.TWO_PARTS not in of_steps(part(more=True), part(none=[ALL, ALL]), Step())
    assert S.TWO_PARTS not in of_steps(part(more=True), part(), Discard(), part(), Step())


def test_parts_change_only_between_reduced_steps_with_parts() -> None:
    two = (part(more=True), part())
    assert S.PARTS_CHANGE in of_steps(part(), Step(), *two, Step())
    assert S.PARTS_CHANGE not in of_steps(part(), Step(), *two, Discard(), part(), Step())
    assert S.PARTS_CHANGE not in of_steps(part(), Step(), part(none=[ALL, ALL]), Step())


def test_part_after_last_needs_gradients_on_both_sides() -> None:
    assert S.PART_AFTER_LAST in of_steps(part(), part(), Step())
    assert S.PART_AFTER_LAST not in of_steps(part(more=True), part(), Step())
    assert S.PART_AFTER_LAST not in of_steps(part(), part(none=[ALL, ALL]), Step())
    assert S.PART_AFTER_LAST not in of_steps(part(none=[ALL, ()]), part(none=[(), ALL]), Step())


def test_none_on_some_ranks() -> None:
    assert S.NONE_ON_SOME_RANKS in of_steps(part(none=[(1,), ()]), Step())
    assert S.NONE_ON_SOME_RANKS not in of_steps(part(none=[(1,), (1,)]), Step())
    assert S.NONE_ON_SOME_RANKS not in of_steps(part(none=[(1,), ()]), Discard(), part(), Step())
    empty = scenario(shapes=[(3,), (0,)], operations=[part(none=[(1,), ()]), Step()])
    assert S.NONE_ON_SOME_RANKS not in reached(empty)


def test_none_on_all_ranks_in_every_part_while_another_has_a_gradient() -> None:
    assert S.NONE_ON_ALL_RANKS in of_steps(part(none=[(1,), (1,)]), Step())
    assert S.NONE_ON_ALL_RANKS not in of_steps(part(none=[(1,), (1,)], more=True), part(), Step())
    assert S.NONE_ON_ALL_RANKS not in of_steps(part(none=[ALL, ALL]), Step())
    assert S.NONE_ON_ALL_RANKS not in of_steps(part(none=[(1,), (0,)]), Step())


def test_none_in_first_or_last_part_only() -> None:
    first, last, both = S.NONE_IN_FIRST_PART_ONLY, S.NONE_IN_LAST_PART_ONLY, [(1,), (1,)]
    assert {first, last} & of_steps(part(none=both, more=True), part(), Step()) == {first}
    assert {first, last} & of_steps(part(more=True), part(none=[(), (1,)]), Step()) == {last}
    assert not {first, last} & of_steps(part(none=both, more=True), part(none=both), Step())
    assert not {first, last} & of_steps(part(more=True), part(none=both, more=True), part(), Step())
    assert not {first, last} & of_steps(part(none=both), Step())
    # A part of Nones alone is no part: there is one part left, then two.
    assert not {first, last} & of_steps(part(none=[ALL, ALL], more=True), part(none=both), Step())
    assert first in of_steps(part(none=[ALL, ALL], more=True), part(none=both, more=True), part(), Step())


def test_rank_without_gradient_in_any_part_beside_one_that_has_some() -> None:
    assert S.RANK_WITHOUT_GRADIENT in of_steps(part(none=[ALL, ()], more=True), part(none=[ALL, (0,)]), Step())
    assert S.RANK_WITHOUT_GRADIENT not in of_steps(part(none=[ALL, ()], more=True), part(none=[(), ALL]), Step())
    assert S.RANK_WITHOUT_GRADIENT not in of_steps(part(none=[ALL, ALL]), Step())


def test_discards_are_told_by_the_path_and_need_a_later_step_with_gradient() -> None:
    held, spilled, end = S.DISCARD_HELD, S.DISCARD_SPILLED, (part(), Step())
    assert {held, spilled} & of_steps(part(), Discard(), *end) == {held}
    assert {held, spilled} & of_steps(part(more=True), Discard(), *end) == {spilled}
    assert {held, spilled} & of_steps(part(), part(), Discard(), *end) == {spilled}
    # A part of Nones alone, whatever it announces, spills nothing.
    assert {held, spilled} & of_steps(part(none=[ALL, ALL], more=True), part(), Discard(), *end) == {held}
    assert not {held, spilled} & of_steps(part(none=[ALL, ALL]), Discard(), *end)
    assert not {held, spilled} & of_steps(*end, part(), Discard())
    assert not {held, spilled} & of_steps(part(), Discard(), part(none=[ALL, ALL]), Step())


def test_first_and_later_spill_are_counted_per_rank() -> None:
    first, later, spill = S.FIRST_SPILL, S.LATER_SPILL, (part(more=True), part())
    assert {first, later} & of_steps(*spill, Step()) == {first}
    assert {first, later} & of_steps(*spill, Step(), *spill, Step()) == {first, later}
    assert {first, later} & of_steps(*spill, Discard(), *spill, Step()) == {later}
    assert not {first, later} & of_steps(*spill, Discard(), part(), Step())
    only_0, only_1 = [(), ALL], [ALL, ()]
    one = (part(none=only_0, more=True), part(none=only_0), Step())
    other = (part(none=only_1, more=True), part(none=only_1), Step())
    assert {first, later} & of_steps(*one, *other) == {first}
    assert {first, later} & of_steps(*one, *one) == {first, later}


def test_five_steps_are_reduced_steps() -> None:
    step = (part(), Step())
    assert S.FIVE_STEPS in of_steps(*step * 5)
    assert S.FIVE_STEPS not in of_steps(*step * 4, part(), Discard())


def test_five_steps_are_of_one_instance() -> None:
    step = (part(), Step())
    assert S.FIVE_STEPS not in of_steps(*step * 4, Build(4), *step * 4)
    assert S.FIVE_STEPS not in of_steps(*step * 4, part(), Skip())


END = (part(), Step())
NOTHING = part(none=[ALL, ALL])


def test_a_skip_needs_gradients_before_it_and_a_later_step_of_the_same_instance() -> None:
    assert S.SKIP_THEN_STEP in of_steps(part(), Skip(), *END)
    assert S.SKIP_THEN_STEP in of_steps(part(), Skip(), part(), Discard(), *END)
    assert S.SKIP_THEN_STEP not in of_steps(*END, part(), Skip())
    assert S.SKIP_THEN_STEP not in of_steps(NOTHING, Skip(), *END)
    assert S.SKIP_THEN_STEP not in of_steps(part(), Skip(), NOTHING, Step())
    assert S.SKIP_THEN_STEP not in of_steps(part(), Skip(), Build(4), *END)
    assert S.SKIP_THEN_STEP not in of_steps(part(), Discard(), *END)


def test_a_skipped_step_is_no_reduced_step() -> None:
    assert S.TWO_PARTS not in of_steps(part(more=True), part(), Skip(), *END)
    assert S.FIRST_SPILL not in of_steps(part(more=True), part(), Skip(), *END)
    assert S.LATER_SPILL in of_steps(part(more=True), part(), Skip(), part(more=True), part(), Step())


def test_what_a_discard_or_a_spill_leaves_behind_ends_with_the_instance() -> None:
    spill = (part(more=True), part(), Step())
    assert S.DISCARD_HELD not in of_steps(part(), Discard(), Build(4), *END)
    assert S.LATER_SPILL not in of_steps(*spill, Build(4), *spill)
    assert S.PARTS_CHANGE not in of_steps(*spill, Build(4), *END)


def test_a_rate_must_change_between_two_reduced_steps_of_one_instance() -> None:
    lr = AdamW().lr
    assert S.LR_CHANGED in of_steps(*END, Rate(0.5), *END)
    assert S.LR_CHANGED in of_steps(*END, Rate(0.5), part(), Discard(), Rate(lr), *END)
    assert S.LR_CHANGED not in of_steps(*END, Rate(lr), *END)
    assert S.LR_CHANGED not in of_steps(Rate(0.5), *END, Rate(0.5), *END)
    assert S.LR_CHANGED not in of_steps(*END, Rate(0.5), part(), Skip())
    assert S.LR_CHANGED not in of_steps(*END, Rate(0.5), Build(4), *END)
    assert S.LR_CHANGED not in of_steps(*END, Build(4), Rate(0.5), *END)


def test_weights_must_be_loaded_between_two_reduced_steps_of_one_instance() -> None:
    assert S.LOADED in of_steps(*END, Load(1), *END)
    assert S.LOADED not in of_steps(Load(1), *END)
    assert S.LOADED not in of_steps(*END, Load(1), NOTHING, Step())
    assert S.LOADED not in of_steps(*END, Load(1), Build(4), *END)


def test_a_rebuild_must_cut_the_elements_in_another_way_between_two_reduced_steps() -> None:
    assert S.REBUILT in of_steps(*END, Build(2), *END)  # five elements over two ranks, first in buckets of 4
    assert S.REBUILT in of_steps(*END, Build(6), *END)
    assert S.REBUILT in of_steps(*END, Build(2), Build(2), *END)
    assert S.REBUILT in of_steps(*END, Build(2), Rate(0.5), part(), Skip(), *END)
    assert S.REBUILT not in of_steps(*END, Build(5), *END)  # rounded down to 4
    assert S.REBUILT not in of_steps(Build(2), *END)
    assert S.REBUILT not in of_steps(*END, Build(2), part(), Discard())
    one_bucket = scenario(bucket=6, operations=[*END, Build(8), *END])
    assert S.REBUILT not in reached(one_bucket)


def test_amsgrad_needs_two_steps_with_gradients_and_maximize_one() -> None:
    largest, other_sign = AdamW(amsgrad=True), AdamW(maximize=True)
    assert S.AMSGRAD in reached(scenario(operations=[*END, *END], optimizer=largest))
    assert S.AMSGRAD not in reached(scenario(operations=[*END, NOTHING, Step()], optimizer=largest))
    assert S.AMSGRAD not in reached(scenario(operations=[*END, Build(4), *END], optimizer=largest))
    assert S.MAXIMIZE in reached(scenario(operations=END, optimizer=other_sign))
    assert S.MAXIMIZE not in reached(scenario(operations=[NOTHING, Step()], optimizer=other_sign))
    assert not {S.AMSGRAD, S.MAXIMIZE} & of_steps(*END, *END)


def test_weight_decay() -> None:
    for decay, lr, expected in (
        (0.1, 1e-3, {S.WEIGHT_DECAY_ON}),
        (0.0, 1e-3, {S.WEIGHT_DECAY_OFF}),
        (0.1, 0.0, set()),
    ):
        found = reached(scenario(optimizer=AdamW(lr=lr, weight_decay=decay)))
        assert found & {S.WEIGHT_DECAY_ON, S.WEIGHT_DECAY_OFF} == expected


def test_what_only_ranks_can_tell_is_never_reached_here() -> None:
    assert not RUNTIME & of_steps(part(more=True), part(), Clip(1e-9), Step(), part(), Clip(1e9), Step())


def test_required_leaves_out_what_no_world_can_be_in() -> None:
    everything = Extension(refresh=True, dtypes=True, strides=True)
    assert required((1, 2, 3, 4), extension=everything) == frozenset(Situation)
    assert required((2, 4), extension=everything) == frozenset(Situation) - {S.WORLD_THREE}
    assert S.LOADED not in required((1, 2, 3, 4))
    assert S.REBUILT not in required((2, 3), bucket=4)
    assert S.RANK_WITHOUT_GRADIENT not in required((1,))
    assert RUNTIME - required((1,)) == {S.ORDER_MATTERS, S.CANCELLATION}
    assert RUNTIME - required((1, 2)) == {S.ORDER_MATTERS}
    assert not RUNTIME - required((3,))
    assert S.MORE_THAN_TWO_BUCKETS not in required((2, 3), bucket=2**25)
    assert S.BUCKET_BELOW_WORLD not in required((2, 3), bucket=3)
    assert S.BUCKET_BELOW_WORLD in required((2, 4), bucket=3)


def test_every_situation_but_the_world_is_a_goal_that_some_world_can_reach() -> None:
    assert set(GOALS) == set(Situation) - {S.WORLD_THREE}
    everything = Extension(refresh=True, dtypes=True, strides=True)
    assert all(can_hold(goal, 2, extension=everything) for goal in GOALS if goal is not S.ORDER_MATTERS)
    assert [can_hold(S.ORDER_MATTERS, world) for world in (1, 2, 3, 4, 5)] == [False, False, True, True, True]
    assert [can_hold(S.CANCELLATION, world) for world in (1, 2, 3)] == [False, True, True]
    assert all(can_hold(goal, 1) for goal in (S.EXTREME_VALUE, S.NONFINITE_VALUE))
