"""Shard positions in parameter coordinates: every small layout, element by element, against counting on fingers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.drive import shard as shard_module
from harness.drive.shard import Difference, ShardMap
from harness.oracles.bounds import FP32_MAX
from harness.oracles.compare import flat_bytes
from harness.oracles.contributions import Interval, any_order
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.scenario.partition import Partition

CPU = torch.device("cpu")
NAN = math.nan

# Scalars, empty parameters at the ends and between others, one parameter alone, several of a bucket's size.
SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,),),
    ((), (2, 2), ()),
    ((0,), (5,), (0, 3), (0,), (2, 2), (0,)),
    ((13,),),
    ((3,), (3,), (3,)),
    ((2, 1, 2), (7,), (1,)),
)

# Layouts that only a subject states, of 9 elements over 2 ranks: other orders, padding inside, empty buckets.
STATED: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((4, 9, 6), (0, 4, 4)),
    ((8, 9, 2), (4, 8, 4), (0, 4, 8)),
    ((3, 6, 4), (0, 3, 4), (6, 9, 8)),
    ((0, 0, 0), (6, 9, 10), (6, 6, 2), (0, 6, 6), (9, 9, 4)),
)


class Element(NamedTuple):
    """One flat element: where it belongs and where it lies."""

    flat: int
    parameter: int
    element: int
    bucket: int
    owner: int
    position: int  # in the owner's shard


class Case(NamedTuple):
    """One layout with its model: all elements in flat order, and for each rank the padding positions of its shard."""

    scenario: Scenario
    partition: Partition
    elements: list[Element]
    padding: list[list[int]]

    def shard_map(self, rank: int) -> ShardMap:
        return ShardMap(self.scenario, self.partition, rank, CPU)

    def owned(self, rank: int) -> list[Element]:
        """A rank's elements in the order of its shard."""
        return sorted((e for e in self.elements if e.owner == rank), key=lambda e: e.position)

    def parameters(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Every element holds its flat index plus one."""
        flat = torch.arange(1, self.partition.numel + 1, dtype=dtype)
        sizes = [parameter.numel for parameter in self.scenario.parameters]
        return [
            part.clone().view(parameter.shape)
            for part, parameter in zip(torch.split(flat, sizes), self.scenario.parameters, strict=True)
        ]

    def shard(self, rank: int) -> Tensor:
        """The rank's elements of :meth:`parameters`; padding is nan, so that reading it shows."""
        made = torch.full((self.partition.shard_len,), NAN)
        for element in self.owned(rank):
            made[element.position] = element.flat + 1
        return made


def scenario_of(shapes: tuple[tuple[int, ...], ...], world: int, bucket: int) -> Scenario:
    return Scenario(
        world=world,
        seed=0,
        parameters=tuple(Parameter(f"p{index}", shape) for index, shape in enumerate(shapes)),
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(bucket), Part(False, tuple(range(world)), ((),) * world), Step()),
    )


def case_of(scenario: Scenario, partition: Partition) -> Case:
    """The model: walk through every position of every bucket, one at a time."""
    coordinates = [
        (index, element) for index, parameter in enumerate(scenario.parameters) for element in range(parameter.numel)
    ]
    elements = []
    padding: list[list[int]] = [[] for _ in range(partition.world)]
    filled = [0] * partition.world
    for bucket, (start, end, padded) in enumerate(partition.buckets):
        for position in range(padded):
            owner = position // (padded // partition.world)
            flat = start + position
            if flat < end:
                elements.append(Element(flat, *coordinates[flat], bucket, owner, filled[owner]))
            else:
                padding[owner].append(filled[owner])
            filled[owner] += 1
    return Case(scenario, partition, sorted(elements), padding)


def layouts() -> Iterator[Case]:
    for shapes, world, bucket in itertools.product(SHAPES, (1, 2, 3, 4), (1, 4, 6, 20)):
        scenario = scenario_of(shapes, world, bucket)
        yield case_of(scenario, Partition.from_request(scenario.numel, world, bucket))
    for buckets in STATED:
        for shapes in (((3,), (0,), (), (5,)), ((9,),), ((1,),) * 9):
            scenario = scenario_of(shapes, 2, 4)
            partition = Partition.from_subject(scenario.numel, 2, buckets)
            assert partition is not None
            assert partition.problem() is None
            yield case_of(scenario, partition)


CASES = list(layouts())


@pytest.fixture(params=[(2**20, True), (2**20, False), (3, False)], ids=["bytes first", "whole", "chunks of 3"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many elements are put together for one comparison, and whether bytes are looked at first: no result may
    depend on it."""
    size: int = request.param[0]
    monkeypatch.setattr(shard_module, "_CHUNK", size)
    if not request.param[1]:
        monkeypatch.setattr(shard_module, "dense", lambda tensor, numel: False)
    return size


def where(found: Difference) -> tuple[int | None, int | None, int | None, int | None]:
    return found.parameter, found.element, found.bucket, found.owner


# --- compare ----------------------------------------------------------------------------------------------------------


def test_an_equal_shard_has_each_of_its_elements_compared_and_none_of_its_padding(chunk: int) -> None:
    for case in CASES:
        parameters = case.parameters()
        for rank in range(case.partition.world):
            found = case.shard_map(rank).compare(case.shard(rank), parameters.__getitem__, signed_zeros=True)

            assert found == Difference(len(case.owned(rank))), (case.partition, rank)


def test_each_position_of_a_shard_is_the_right_element_of_the_right_parameter(chunk: int) -> None:
    """One position is wrong at a time: parameter, element, bucket and owner are those of the model, values too."""
    for case in CASES:
        parameters = case.parameters()
        for rank in range(case.partition.world):
            shard_map, shard = case.shard_map(rank), case.shard(rank)
            for element in case.owned(rank):
                shard[element.position] = -7
                found = shard_map.compare(shard, parameters.__getitem__, signed_zeros=True)
                shard[element.position] = element.flat + 1

                assert where(found) == element[1:5], (case.partition, element)
                assert found.mismatch is not None
                assert found.mismatch.count == 1
                assert (found.mismatch.expected, found.mismatch.actual) == (element.flat + 1, -7)
                assert found.compared == len(case.owned(rank))


def test_the_first_of_several_differences_is_the_first_of_the_shard_and_all_are_counted(chunk: int) -> None:
    for case in CASES:
        parameters = case.parameters()
        for rank in range(case.partition.world):
            owned = case.owned(rank)
            for first in range(len(owned)):
                shard = case.shard(rank)
                wrong = [element for element in owned[first:] if (element.position - owned[first].position) % 2 == 0]
                shard[[element.position for element in wrong]] = NAN
                found = case.shard_map(rank).compare(shard, parameters.__getitem__, signed_zeros=True)

                assert where(found) == owned[first][1:5], (case.partition, rank)
                assert found.mismatch is not None
                assert found.mismatch.count == len(wrong)


@pytest.mark.parametrize("signed", [True, False])
def test_a_look_at_all_expected_bytes_finds_what_a_look_at_the_tensors_finds(signed: bool) -> None:
    for case in layouts():
        expected = case.parameters()
        flat = flat_bytes(expected)
        assert flat is not None
        for rank in range(case.partition.world):
            shard_map, shard = case.shard_map(rank), case.shard(rank)
            for position in (None, *range(case.partition.shard_len)):
                seen = shard.clone()
                if position is not None:
                    seen[position] = -0.0
                closely = shard_map.compare(seen, expected.__getitem__, signed_zeros=signed)
                assert shard_map.compare(seen, expected.__getitem__, signed_zeros=signed, flat=flat) == closely


@pytest.mark.parametrize(("signed", "count"), [(True, 1), (False, 0)])
def test_zeros_of_both_signs_differ_only_where_signs_count(signed: bool, count: int, chunk: int) -> None:
    case = case_of(scenario_of(((2, 2), (3,)), 1, 4), Partition.from_request(7, 1, 4))
    parameters = [torch.zeros(2, 2), torch.zeros(3)]
    shard = torch.zeros(7)
    shard[5] = -0.0

    found = case.shard_map(0).compare(shard, parameters.__getitem__, signed_zeros=signed)

    assert found.compared == 7
    assert (0 if found.mismatch is None else found.mismatch.count) == count
    assert where(found) == ((1, 1, 1, 0) if count else (None,) * 4)


def test_a_rank_of_padding_alone_compares_nothing() -> None:
    """One element over three ranks: the last two have nothing to look at, and say so."""
    case = case_of(scenario_of(((1,),), 3, 3), Partition.from_request(1, 3, 3))

    compared = [
        case.shard_map(rank).compare(case.shard(rank), case.parameters().__getitem__, signed_zeros=True).compared
        for rank in range(3)
    ]

    assert compared == [1, 0, 0]


# --- compare_whole ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float32, torch.bfloat16, torch.bfloat16)])
def test_whole_parameters_are_compared_in_every_element(dtypes: tuple[torch.dtype, ...], chunk: int) -> None:
    """One element is wrong at a time, in any rank's piece; neighbours of another dtype do not disturb."""
    for case in CASES:
        expected = [tensor.to(dtypes[index % len(dtypes)]) for index, tensor in enumerate(case.parameters())]
        actual = [tensor.clone() for tensor in expected]
        shard_map = case.shard_map(0)
        assert shard_map.compare_whole(actual, expected) == Difference(case.partition.numel)
        for element in case.elements:
            flat = actual[element.parameter].view(-1)
            flat[element.element] = -7
            found = shard_map.compare_whole(actual, expected)
            flat[element.element] = element.flat + 1

            assert where(found) == element[1:5], (case.partition, element)
            assert found.mismatch is not None
            assert found.mismatch.count == 1
            assert (found.mismatch.expected, found.mismatch.actual) == (element.flat + 1, -7)


def test_the_first_difference_of_whole_parameters_comes_first_in_their_order(chunk: int) -> None:
    """Even where the subject's buckets are in another order."""
    for case in CASES:
        expected = case.parameters()
        for first in range(0, len(case.elements), 2):
            actual = [tensor.clone() for tensor in expected]
            for element in case.elements[first::2]:
                actual[element.parameter].view(-1)[element.element] = NAN
            found = case.shard_map(0).compare_whole(actual, expected)

            assert where(found) == case.elements[first][1:5], case.partition
            assert found.mismatch is not None
            assert found.mismatch.count == len(case.elements[first::2])


def test_the_sign_of_a_zero_weight_counts() -> None:
    case = case_of(scenario_of(((3,),), 1, 4), Partition.from_request(3, 1, 4))

    found = case.shard_map(0).compare_whole([torch.tensor([0.0, -0.0, 0.0])], [torch.zeros(3)])

    assert where(found) == (0, 1, 0, 0)


# --- beyond -----------------------------------------------------------------------------------------------------------


def intervals_of(case: Case, bound: float) -> list[Interval]:
    return [
        Interval(
            tensor.double().view(-1).numpy().copy(), np.full(tensor.numel(), bound), np.zeros(tensor.numel(), np.bool_)
        )
        for tensor in case.parameters()
    ]


def test_each_element_outside_its_interval_is_found_where_it_is() -> None:
    for case in CASES:
        intervals = intervals_of(case, 0.25)
        for rank in range(case.partition.world):
            shard_map, shard = case.shard_map(rank), case.shard(rank)
            assert shard_map.beyond(shard, intervals.__getitem__) == Difference(len(case.owned(rank)), margin=0.0)
            for element in case.owned(rank):
                shard[element.position] += 0.5
                found = shard_map.beyond(shard, intervals.__getitem__)
                shard[element.position] = element.flat + 1

                assert where(found) == element[1:5], (case.partition, element)
                assert found.mismatch is not None
                assert found.mismatch.count == 1
                assert (found.mismatch.expected, found.mismatch.actual) == (element.flat + 1, element.flat + 1.5)


def test_the_first_element_outside_is_told_and_all_are_counted() -> None:
    for case in CASES:
        intervals = intervals_of(case, 0.25)
        for rank in range(case.partition.world):
            owned = case.owned(rank)
            for first in range(len(owned)):
                shard = case.shard(rank)
                shard[[element.position for element in owned[first:]]] -= 1
                found = case.shard_map(rank).beyond(shard, intervals.__getitem__)

                assert where(found) == owned[first][1:5]
                assert found.mismatch is not None
                assert found.mismatch.count == len(owned) - first


@pytest.mark.parametrize(
    ("offset", "inside"), [(0.25, True), (-0.25, True), (0.5, False), (-0.5, False), (NAN, False), (math.inf, False)]
)
def test_an_interval_holds_its_ends_and_no_nan(offset: float, inside: bool) -> None:
    case = case_of(scenario_of(((4,),), 1, 4), Partition.from_request(4, 1, 4))
    shard = case.shard(0)
    shard[2] += offset

    found = case.shard_map(0).beyond(shard, intervals_of(case, 0.25).__getitem__)

    assert (found.mismatch is None) == inside
    assert found.element == (None if inside else 2)


# Center, bound and possible overflow; what may be seen there, and whether it is inside.
JUDGED = [
    (math.inf, 0.0, False, {math.inf: True, -math.inf: False, NAN: False, 3e38: False, 0.0: False}),
    (-math.inf, 0.0, False, {-math.inf: True, math.inf: False, NAN: False, -3e38: False}),
    (NAN, 0.0, False, {NAN: True, math.inf: False, -math.inf: False, 0.0: False}),
    (5.0, 0.0, False, {5.0: True, NAN: False, math.inf: False, -math.inf: False, 5.0000005: False}),
    (5.0, 0.5, False, {5.5: True, 4.5: True, 5.625: False, NAN: False, math.inf: False}),
    (0.0, 0.0, False, {-0.0: True, 2.0**-149: False}),
    # An inf that met a partial sum of the other side is nan, and never inf of that side.
    (math.inf, 0.0, True, {math.inf: True, NAN: True, -math.inf: False, 3e38: False, 0.0: False}),
    (-math.inf, 0.0, True, {-math.inf: True, NAN: True, math.inf: False, -3e38: False, 0.0: False}),
    (NAN, 0.0, True, {NAN: True, math.inf: False, -math.inf: False, 0.0: False, 3e38: False}),
    # Partial sums that overflowed never become finite again: what is finite is as near as ever.
    (5.0, 0.5, True, {NAN: True, math.inf: True, -math.inf: True, 5.5: True, 4.5: True, 5.625: False, 0.0: False}),
    (2.0**127, 2.0**105, True, {2.0**127 + 2.0**105: True, 2.0**127 + 2.0**106: False, FP32_MAX: False, NAN: True}),
    (6e38, 1e32, True, {math.inf: True, -math.inf: True, NAN: True, FP32_MAX: False, -FP32_MAX: False}),
]


@pytest.mark.parametrize(("center", "bound", "overflows", "seen"), JUDGED)
def test_an_element_is_held_against_its_center_its_bound_and_its_overflow(
    center: float, bound: float, overflows: bool, seen: dict[float, bool]
) -> None:
    """In every position of a shard, among elements that are right; the difference says what was seen there."""
    case = case_of(scenario_of(((2, 2), (3,)), 2, 4), Partition.from_request(7, 2, 4))
    for element in case.elements:
        intervals = intervals_of(case, 0.25)
        intervals[element.parameter].center[element.element] = center
        intervals[element.parameter].bound[element.element] = bound
        intervals[element.parameter].overflows[element.element] = overflows
        shard_map = case.shard_map(element.owner)
        for value, inside in seen.items():
            shard = case.shard(element.owner)
            shard[element.position] = value

            found = shard_map.beyond(shard, intervals.__getitem__)

            assert found.compared == len(case.owned(element.owner))
            assert (found.mismatch is None) == inside, (element, value)
            if found.mismatch is not None:
                assert where(found) == element[1:5]
                assert found.mismatch.count == 1
                assert found.bound == bound
                with np.errstate(over="ignore"):
                    told = np.array([center, value], np.float64).astype(np.float32)
                assert np.array_equal([found.mismatch.expected, found.mismatch.actual], told, equal_nan=True)


def test_overflow_of_one_element_excuses_no_other() -> None:
    """Even next to it, in the same piece."""
    for case in CASES:
        for element in case.elements:
            intervals = intervals_of(case, 0.25)
            for interval in intervals:
                interval.overflows[:] = True
            intervals[element.parameter].overflows[element.element] = False
            for value in (math.inf, -math.inf, NAN):
                shard = case.shard(element.owner)
                shard[[owned.position for owned in case.owned(element.owner)]] = value

                found = case.shard_map(element.owner).beyond(shard, intervals.__getitem__)

                assert where(found) == element[1:5]
                assert found.mismatch is not None
                assert found.mismatch.count == 1


def beyond_any_order(terms: Sequence[float], value: float) -> bool:
    """Whether one element is judged to be no sum of these."""
    case = case_of(scenario_of(((1,),), 1, 1), Partition.from_request(1, 1, 1))
    interval = any_order([np.array([term], np.float32) for term in terms], 1)
    found = case.shard_map(0).beyond(torch.tensor([value], dtype=torch.float32), lambda _: interval)
    assert found.compared == 1
    return found.mismatch is not None


TWO = [(1.0, 2.0**-30), (0.1, 0.7), (-3.0, 3.0), (FP32_MAX, -1.0), (2.0**-149, 2.0**-140), (FP32_MAX, FP32_MAX), (7.0,)]


@pytest.mark.parametrize("terms", TWO)
def test_of_two_terms_one_unit_in_the_last_place_is_outside(terms: tuple[float, ...]) -> None:
    """On either side; with a third term that rounds there is room for some."""
    with np.errstate(over="ignore"):
        total = np.add.reduce(np.array(terms, np.float32))
        near = [value for side in (math.inf, -math.inf) if (value := np.nextafter(total, np.float32(side))) != total]
    assert near
    assert not beyond_any_order(terms, float(total))
    assert not beyond_any_order(terms[::-1], float(total))
    assert all(beyond_any_order(terms, float(value)) for value in near)
    assert beyond_any_order(terms, NAN)


def test_of_three_terms_one_unit_in_the_last_place_may_be_the_order() -> None:
    above = float(np.nextafter(np.float32(1.0), np.float32(2.0)))
    assert not beyond_any_order((1.0, 2.0**-24, 2.0**-24), 1.0)
    assert not beyond_any_order((1.0, 2.0**-24, 2.0**-24), above)
    assert beyond_any_order((1.0, 2.0**-24, 2.0**-24), 1.0 + 4 * 2.0**-23)


@pytest.mark.parametrize(
    ("terms", "possible", "impossible"),
    [
        # The bound is a little more than 2**-23 of the magnitudes' sum.
        ((FP32_MAX, -FP32_MAX, 1.0), (0.0, 1.0, 1e31), (1e33, -1e33, FP32_MAX)),
        ((FP32_MAX, FP32_MAX, -FP32_MAX), (FP32_MAX, math.inf, NAN), (FP32_MAX / 2, 0.0, -FP32_MAX)),
        ((FP32_MAX, FP32_MAX, FP32_MAX), (math.inf,), (FP32_MAX, -FP32_MAX, 0.0)),
        ((math.inf, -FP32_MAX, -FP32_MAX), (math.inf, NAN), (-math.inf, FP32_MAX, -FP32_MAX, 0.0)),
        ((-math.inf, 1.0, FP32_MAX, FP32_MAX), (-math.inf, NAN), (math.inf, FP32_MAX, 0.0)),
        ((math.inf, -3.0, 4.0), (math.inf,), (-math.inf, NAN, 1.0)),
        ((math.inf, -math.inf, FP32_MAX, FP32_MAX), (NAN,), (math.inf, -math.inf, 0.0)),
        ((2.0**126, -(2.0**126), 2.0**100), (0.0, 2.0**100), (math.inf, -math.inf, NAN, 2.0**110)),
    ],
)
def test_of_sums_that_may_overflow_nothing_is_inside_that_overflow_does_not_give(
    terms: tuple[float, ...], possible: tuple[float, ...], impossible: tuple[float, ...]
) -> None:
    assert [value for value in possible if beyond_any_order(terms, value)] == []
    assert [value for value in impossible if not beyond_any_order(terms, value)] == []


def test_several_elements_that_are_not_finite_are_counted_together() -> None:
    case = case_of(scenario_of(((6,),), 1, 6), Partition.from_request(6, 1, 6))
    interval = Interval(np.array([math.inf, NAN, 1.0, -math.inf, NAN, 2.0]), np.zeros(6), np.zeros(6, np.bool_))
    right = torch.tensor([math.inf, NAN, 1.0, -math.inf, NAN, 2.0])
    wrong = torch.tensor([math.inf, math.inf, 1.0, NAN, 1.0, math.inf])

    assert case.shard_map(0).beyond(right, lambda _: interval) == Difference(6, margin=0.0)
    found = case.shard_map(0).beyond(wrong, lambda _: interval)
    assert found.compared == 6
    assert found.element == 1
    assert found.mismatch is not None
    assert found.mismatch.count == 4


# --- assemble, padding, fields ----------------------------------------------------------------------------------------


def test_the_shards_of_all_ranks_give_the_parameters_back() -> None:
    for case in CASES:
        world = case.partition.world
        parameters = case.parameters()
        put_together = case.shard_map(world - 1).assemble([case.shard(rank) for rank in range(world)], parameters)

        assert len(put_together) == len(parameters)
        for made, wanted in zip(put_together, parameters, strict=True):
            assert made.shape == wanted.shape
            assert torch.equal(made, wanted), case.partition


def test_the_shards_of_all_ranks_give_one_flat_vector() -> None:
    """In the order of the parameters, whatever that of the buckets, and without padding."""
    for case in CASES:
        world = case.partition.world
        shards = [case.shard(rank) for rank in range(world)]

        flats = [case.shard_map(rank).flat(shards) for rank in range(world)]

        assert all(torch.equal(flat, torch.arange(1.0, case.partition.numel + 1)) for flat in flats)
        assert {flat.dtype for flat in flats} == {torch.float32}
        flats[0].fill_(-1)  # a new vector: no shard is written
        assert all(torch.equal(s.nan_to_num(), case.shard(rank).nan_to_num()) for rank, s in enumerate(shards))


def test_the_number_of_elements_is_that_of_a_shard_without_its_padding() -> None:
    for case in CASES:
        for rank in range(case.partition.world):
            shard_map = case.shard_map(rank)
            assert shard_map.num_elements == len(case.owned(rank))
            assert shard_map.num_elements == case.partition.shard_len - len(case.padding[rank])


@pytest.mark.parametrize("value", [1.0, -(2.0**-149), NAN, math.inf])
def test_each_padding_position_that_is_not_zero_is_found(value: float) -> None:
    """nan is not zero; what the elements hold does not matter."""
    for case in CASES:
        for rank, padding in enumerate(case.padding):
            shard_map = case.shard_map(rank)
            for position in padding:
                shard = torch.full((case.partition.shard_len,), NAN)
                shard[padding] = 0.0
                assert shard_map.nonzero_padding(shard) is None
                shard[[later for later in padding if later >= position]] = value

                assert shard_map.nonzero_padding(shard) == position, (case.partition, rank)


def test_no_padding_and_zeros_of_both_signs_are_no_complaint() -> None:
    without = case_of(scenario_of(((4,),), 2, 4), Partition.from_request(4, 2, 4))
    padded = case_of(scenario_of(((3,),), 2, 4), Partition.from_request(3, 2, 4))

    assert without.shard_map(1).nonzero_padding(torch.full((2,), NAN)) is None
    assert padded.padding == [[], [1]]
    assert padded.shard_map(1).nonzero_padding(torch.tensor([NAN, -0.0])) is None


def test_the_model_meets_every_kind_of_layout() -> None:
    """Padding, pieces of padding alone, buckets out of order, parameters across buckets and pieces: all are there."""
    assert any(len(padding) > 1 for case in CASES for padding in case.padding)
    assert any(not case.owned(rank) for case in CASES for rank in range(case.partition.world))
    assert any(list(case.partition.buckets) != sorted(case.partition.buckets) for case in CASES)
    for across in ("bucket", "owner"):
        assert any(
            one.parameter == other.parameter and getattr(one, across) != getattr(other, across)
            for case in CASES
            for one, other in itertools.pairwise(case.elements)
        )


def test_a_difference_names_the_parameter_and_what_was_expected() -> None:
    case = case_of(scenario_of(((2,), (2,)), 2, 4), Partition.from_request(4, 2, 4))
    shard = torch.tensor([3.0, 4.0])
    shard[1] = torch.tensor(4.0).nextafter(torch.tensor(5.0))

    found = case.shard_map(1).compare(shard, case.parameters().__getitem__, signed_zeros=True)

    assert found.fields(case.scenario) == {
        "parameter": "p1",
        "index": 1,
        "element": 1,
        "offset": 3,
        "bucket": 0,
        "owner": 1,
        "expected": 4.0,
        "actual": float(shard[1]),
        "expected_bits": "0x40800000",
        "actual_bits": "0x40800001",
        "ulps": 1,
        "mismatches": 1,
    }
    assert Difference(4).fields(case.scenario) == {}
