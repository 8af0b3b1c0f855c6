"""Sums in a given order, and what any order can give, against additions written out one by one in plain Python."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.oracles.contributions import (
    Interval,
    Nesting,
    Reduced,
    any_order,
    contribution,
    interval,
    reduced,
    reduced_in_order,
)
from harness.oracles.order import Order, Tree, fold, in_rank_order, round_bf16
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, StepPlan, Values, check, steps
from harness.scenario.situations import Situation
from harness.scenario.values import gradient

few = settings(max_examples=80, deadline=None, database=None)

FP32_MAX = (2 - 2.0**-23) * 2.0**127
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127

SHAPES = ((3, 7), (), (0, 2), (12,))
FORMS = {
    "exact": Values(Domain.EXACT, 255, -4),
    "normal": Values(Domain.GENERAL, 255, -3, 16),
    "wide": Values(Domain.GENERAL, 255, -20, 40),
    "subnormal": Values(Domain.GENERAL, 255, -133, 9),
    "cancelling": Values(Domain.GENERAL, 255, -3, 20, cancel=True),
    "extreme": Values(Domain.GENERAL, 255, 90, 8, special=500),
    "nonfinite": Values(Domain.GENERAL, 255, -3, 8, special=300, nonfinite=True),
    "all": Values(Domain.GENERAL, 255, -133, 30, cancel=True, special=200, nonfinite=True),
}


def make(world: int, none: Sequence[Sequence[tuple[int, ...]]], values: Values, seed: int) -> tuple[Scenario, StepPlan]:
    """One step with one part for each entry of ``none``; every (part, rank) is its own contributor."""
    parts = [
        Part(part + 1 < len(none), tuple(part * world + rank for rank in range(world)), tuple(missing))
        for part, missing in enumerate(none)
    ]
    parameters = tuple(Parameter(f"p{index}", shape) for index, shape in enumerate(SHAPES))
    scenario = Scenario(world, seed, parameters, values, AdamW(), (Build(4), *parts, Step()))
    problem = check(scenario)
    if problem is not None:
        raise ValueError(problem)
    return scenario, next(steps(scenario))


def random_tree(random: Random, leaves: Sequence[int]) -> Tree:
    """Any shape, any order of the leaves."""
    if len(leaves) == 1:
        return leaves[0]
    left = random.sample(leaves, random.randrange(1, len(leaves)))
    return random_tree(random, left), random_tree(random, [leaf for leaf in leaves if leaf not in left])


def fp32(value: float) -> float:
    """Rounded to fp32, beyond its range to inf. The fp64 sum of two fp32 values is rounded twice without harm."""
    return float(ctypes.c_float(value).value)


def evaluate(tree: Tree, leaf: Callable[[int], float]) -> float:
    if isinstance(tree, int):
        return leaf(tree)
    return fp32(evaluate(tree[0], leaf) + evaluate(tree[1], leaf))


def same(one: float, other: float) -> bool:
    """Equal, where the zeros are one value and so are all nans."""
    return one == other or (math.isnan(one) and math.isnan(other))


class Model:
    """One parameter of one step, an element at a time."""

    def __init__(self, scenario: Scenario, plan: StepPlan, parameter: int) -> None:
        arrays = [
            [contribution(scenario, plan, rank, part, parameter) for part in range(len(plan.parts))]
            for rank in range(scenario.world)
        ]
        self.by_rank = [[None if array is None else array.tolist() for array in row] for row in arrays]
        self.world = scenario.world
        self.numel = scenario.parameters[parameter].numel
        self.general = scenario.values.domain is Domain.GENERAL

    @property
    def num_contributions(self) -> int:
        return sum(array is not None for row in self.by_rank for array in row)

    def parts(self, rank: int, element: int) -> list[float]:
        return [array[element] for array in self.by_rank[rank] if array is not None]

    def own(self, rank: int, element: int) -> float:
        parts = self.parts(rank, element)
        return evaluate(fold(range(len(parts))), parts.__getitem__) if parts else 0.0

    def total(self, tree: Tree, nesting: Nesting, element: int) -> float:
        if nesting is Nesting.PARTS_INSIDE:
            return evaluate(tree, lambda rank: self.own(rank, element))

        def leaf(part: int) -> float:
            rows = [row[part] for row in self.by_rank]
            return evaluate(tree, lambda rank: 0.0 if rows[rank] is None else rows[rank][element])

        return evaluate(fold(range(len(self.by_rank[0]))), leaf)

    def shows(self, totals: Sequence[float]) -> set[Situation]:
        found = set()
        for element, total in enumerate(totals):
            rows = [self.own(rank, element) for rank in range(self.world)]
            for rank in range(self.world):
                parts = self.parts(rank, element)
                partial = [evaluate(fold(range(n)), parts.__getitem__) for n in range(2, len(parts) + 1)]
                if any(map(is_wide, partial)):
                    found.add(Situation.WIDE_PARTIAL_SUM)
                if self.general and any(0 < abs(x) < 2.0**-126 or abs(x) == LARGEST_BF16 for x in parts):
                    found.add(Situation.EXTREME_VALUE)
            if is_wide(total):
                found.add(Situation.WIDE_REDUCED_VALUE)
            if not math.isfinite(total):
                found.add(Situation.NONFINITE_VALUE)
            elif self.world > 1 and abs(total) < 2.0**-10 * sum(map(abs, rows)):
                found.add(Situation.CANCELLATION)
            there = evaluate(fold(range(self.world)), rows.__getitem__)
            back = evaluate(fold(range(self.world)[::-1]), rows.__getitem__)
            if self.world > 2 and not same(there, back):
                found.add(Situation.ORDER_MATTERS)
        return found


def is_wide(value: float) -> bool:
    """Needs more than 8 significant bits; what is not finite does not."""
    return math.isfinite(value) and math.frexp(value)[0] * 256 % 1 != 0


# --- in a given order -------------------------------------------------------------------------------------------------


def drawn(name: str, seed: int) -> tuple[Scenario, StepPlan]:
    """Worlds 1 to 5, one to three parts, every third gradient None, now and then all of a rank or a parameter."""
    random = Random(f"{name} {seed}")
    world, num_parts = 1 + seed % 5, random.randint(1, 3)
    idle, absent = random.choice((None, *range(world))), random.choice((None, None, 0, 3))
    none = [
        [
            tuple(p for p in range(len(SHAPES)) if rank == idle or p == absent or random.random() < 0.3)
            for rank in range(world)
        ]
        for _ in range(num_parts)
    ]
    return make(world, none, FORMS[name], seed)


@pytest.mark.parametrize("name", FORMS)
def test_each_element_is_added_in_its_own_order(name: str) -> None:
    seen: set[Situation] = set()
    for seed in range(15):
        scenario, plan = drawn(name, seed)
        random = Random(seed)
        for parameter in range(len(SHAPES)):
            model = Model(scenario, plan, parameter)
            trees = tuple(random_tree(random, range(scenario.world)) for _ in range(4))
            labels = np.array([random.randrange(4) for _ in range(model.numel)], np.intp)
            for nesting in Nesting:
                result = reduced_in_order(scenario, plan, parameter, Order(trees, labels), nesting)
                expected = [
                    model.total(trees[label], nesting, element) for element, label in enumerate(labels.tolist())
                ]
                where = (seed, parameter, nesting)
                assert result.value.dtype == np.float32
                assert result.value.shape == (model.numel,)
                assert all(map(same, result.value.tolist(), expected)), where
                assert result.num_contributions == model.num_contributions
                assert result.shows == model.shows(expected), where
                seen |= result.shows
    wanted = {
        "exact": {Situation.WIDE_PARTIAL_SUM, Situation.WIDE_REDUCED_VALUE},
        "wide": {Situation.ORDER_MATTERS},
        "subnormal": {Situation.EXTREME_VALUE},
        "cancelling": {Situation.CANCELLATION, Situation.ORDER_MATTERS},
        "extreme": {Situation.EXTREME_VALUE, Situation.NONFINITE_VALUE},  # by overflow
        "nonfinite": {Situation.NONFINITE_VALUE},
    }
    assert wanted.get(name, set()) <= seen


def test_the_two_nestings_and_two_orders_give_other_bits_where_sums_round() -> None:
    """One part or one rank nests in one way only."""

    def values(world: int, num_parts: int) -> list[Reduced]:
        scenario, plan = make(world, [[()] * world] * num_parts, FORMS["cancelling"], 5)
        back = Order((fold(range(world)[::-1]),), np.zeros(21, np.intp))
        return [
            reduced_in_order(scenario, plan, 0, order, nesting)
            for order in (in_rank_order(world, 21), back)
            for nesting in Nesting
        ]

    def patterns(world: int, num_parts: int) -> int:
        return len({(result.value + np.float32(0)).tobytes() for result in values(world, num_parts)})

    assert patterns(3, 2) == 4
    assert patterns(3, 1) == 2
    assert patterns(1, 3) == 1


@pytest.mark.parametrize("domain", [Domain.EXACT, Domain.GENERAL])
def test_whoever_does_not_look_has_the_same_sum_and_sees_nothing(domain: Domain) -> None:
    values = Values(domain, 255, -4) if domain is Domain.EXACT else Values(domain, 255, -4, 20, special=200)
    scenario, plan = make(3, [((),) * 3] * 2, values, 5)
    order = in_rank_order(3, scenario.parameters[0].numel)
    pairs = [
        (reduced(scenario, plan, 0), reduced(scenario, plan, 0, look=False)),
        *(
            (
                reduced_in_order(scenario, plan, 0, order, nesting),
                reduced_in_order(scenario, plan, 0, order, nesting, look=False),
            )
            for nesting in Nesting
        ),
    ]
    for seen, unseen in pairs:
        assert seen.shows
        assert not unseen.shows
        assert seen.value.tobytes() == unseen.value.tobytes()
        assert seen.num_contributions == unseen.num_contributions


@pytest.mark.parametrize("name", ["exact", "normal", "wide", "cancelling"])
def test_in_rank_order_it_is_what_a_trainer_without_shards_adds(name: str) -> None:
    for seed in range(10):
        scenario, plan = drawn(name, seed)
        for parameter in range(len(SHAPES)):
            order = in_rank_order(scenario.world, scenario.parameters[parameter].numel)
            ordered = reduced_in_order(scenario, plan, parameter, order, Nesting.PARTS_INSIDE)
            plain = reduced(scenario, plan, parameter)
            assert np.array_equal(ordered.value, plain.value)
            assert ordered.num_contributions == plain.num_contributions
            assert plain.shows <= ordered.shows
            only_ordered = {Situation.ORDER_MATTERS, Situation.CANCELLATION, Situation.NONFINITE_VALUE}
            assert ordered.shows - plain.shows <= only_ordered


def test_a_contribution_is_not_changed_by_adding_to_it() -> None:
    scenario, plan = make(2, [[(), ()], [(), ()]], FORMS["normal"], 3)
    order = in_rank_order(2, 21)
    first = reduced_in_order(scenario, plan, 0, order, Nesting.PARTS_INSIDE).value.copy()
    reduced_in_order(scenario, plan, 0, order, Nesting.RANKS_INSIDE)
    assert np.array_equal(first, reduced_in_order(scenario, plan, 0, order, Nesting.PARTS_INSIDE).value)


# --- in any order -----------------------------------------------------------------------------------------------------


def inside(value: float, center: float, bound: float, overflows: bool) -> bool:
    if math.isnan(value) or math.isinf(value):
        beyond_range = overflows and (math.isnan(value) or math.isfinite(center))
        return same(value, center) or beyond_range
    return abs(value - center) <= bound


def around(found: Interval) -> list[tuple[float, float, bool]]:
    """Center, bound and possible overflow of each element."""
    return list(zip(found.center.tolist(), found.bound.tolist(), found.overflows.tolist(), strict=True))


def all_trees(leaves: Sequence[int]) -> Iterator[Tree]:
    """Every way of adding some terms two by two; which of two comes first does not matter."""
    if len(leaves) == 1:
        yield leaves[0]
    first, *rest = leaves
    for size in range(len(rest)):
        for beside in itertools.combinations(rest, size):
            others = [leaf for leaf in rest if leaf not in beside]
            yield from itertools.product(all_trees([first, *beside]), all_trees(others))


def terms_of(columns: Sequence[Sequence[float]]) -> list[NDArray[np.float32]]:
    """Rows, one a term, from columns, one an element."""
    return [np.array(row, np.float32) for row in zip(*columns, strict=True)]


ORDINARY = st.integers(-255, 255).flatmap(lambda k: st.integers(-12, 12).map(lambda e: math.ldexp(k, e)))
EXTREMES = st.sampled_from(
    (
        *(math.inf, -math.inf, math.nan, FP32_MAX, -FP32_MAX, LARGEST_BF16, -LARGEST_BF16),
        *(2.0**127, -(2.0**127), 2.0**104, -(2.0**103), 2.0**-149, -(2.0**-126), 0.0, -0.0, 1.0),
    )
)
FLOATS = st.floats(width=32)


@st.composite
def columns(draw: st.DrawFn) -> list[list[float]]:
    """A few elements of one to seven terms: ordinary ones, any floats, and many extremes."""
    num_terms = draw(st.integers(1, 7))
    kinds = st.sampled_from([ORDINARY, FLOATS, EXTREMES, ORDINARY | EXTREMES, st.just(FP32_MAX) | EXTREMES])
    return [draw(st.lists(draw(kinds), min_size=num_terms, max_size=num_terms)) for _ in range(draw(st.integers(1, 4)))]


@few
@given(columns(), st.randoms(use_true_random=False))
def test_every_order_of_additions_lies_within(made: list[list[float]], random: Random) -> None:
    """Sequences and trees alike; the bound is tight everywhere, overflow possible only near the range's end."""
    found = any_order(terms_of(made), len(made))
    assert found.center.shape == found.bound.shape == found.overflows.shape == (len(made),)
    assert found.overflows.dtype == np.bool_
    assert np.isfinite(found.bound).all()
    assert (found.bound >= 0).all()
    assert not found.bound[~np.isfinite(found.center)].any()
    num_terms = len(made[0])
    for column, (center, bound, overflows) in zip(made, around(found), strict=True):
        finite = math.fsum(abs(term) for term in column if math.isfinite(term))
        assert bound <= num_terms * 2.0**-23 * finite
        assert not overflows or finite > FP32_MAX * (1 - 2.0**-20)
        assert not overflows or num_terms > 2
        assert bound == 0.0 or num_terms > 2
        for _ in range(4):
            order = random.sample(range(num_terms), num_terms)
            for tree in (fold(order), random_tree(random, order)):
                value = evaluate(tree, column.__getitem__)
                assert inside(value, center, bound, overflows), (column, tree, value, center, bound, overflows)


@pytest.mark.parametrize(
    ("column", "sums"),
    [
        ([FP32_MAX, FP32_MAX, -FP32_MAX, -FP32_MAX], {0.0, math.inf, -math.inf, math.nan}),
        ([FP32_MAX, -FP32_MAX, FP32_MAX], {FP32_MAX, math.inf}),
        ([FP32_MAX, FP32_MAX, 1.0], {math.inf}),
        ([-FP32_MAX, -(2.0**103), 2.0**103], {-FP32_MAX, 2.0**104 - FP32_MAX, -math.inf}),
        ([math.inf, -FP32_MAX, -FP32_MAX], {math.inf, math.nan}),
        ([-math.inf, FP32_MAX, FP32_MAX, 3.0], {-math.inf, math.nan}),
        ([math.inf, -math.inf, FP32_MAX, FP32_MAX], {math.nan}),
    ],
)
def test_each_order_that_overflows_lies_within(column: list[float], sums: set[float]) -> None:
    """All orders there are; what they add up to is written down here, so that overflow is known to be among it."""
    ((center, bound, overflows),) = around(any_order(terms_of([column]), 1))
    assert overflows
    values = [evaluate(tree, column.__getitem__) for tree in all_trees(range(len(column)))]
    assert len(values) == {3: 3, 4: 15}[len(column)]
    assert {str(value) for value in values} <= {str(value) for value in sums} | {"-0.0"}
    assert all(any(same(value, wanted) for value in values) for wanted in sums)
    assert all(inside(value, center, bound, overflows) for value in values)
    assert bound <= len(column) * 2.0**-23 * 4 * FP32_MAX


@few
@given(st.lists(st.tuples(FLOATS | EXTREMES | ORDINARY, FLOATS | EXTREMES | ORDINARY), min_size=1, max_size=6))
def test_two_terms_have_one_sum(pairs: list[tuple[float, float]]) -> None:
    """That of fp32, in either order, and nothing beside it: the bound is 0 and nothing is said to overflow."""
    for rows in (pairs, [(one, other) for other, one in pairs]):
        found = any_order(terms_of(rows), len(pairs))
        assert not found.bound.any()
        assert not found.overflows.any()
        for (one, other), center in zip(pairs, found.center.tolist(), strict=True):
            assert same(center, fp32(one + other))


@pytest.mark.parametrize(
    ("column", "center", "bound"),
    [
        ([math.inf, 1.0, -5.0], math.inf, 0.0),
        ([-1.0, -math.inf, -math.inf], -math.inf, 0.0),
        ([math.inf, 3.0, -math.inf], math.nan, 0.0),
        ([math.nan, 3.0], math.nan, 0.0),
        ([math.nan, math.inf], math.nan, 0.0),
        ([math.inf, FP32_MAX, FP32_MAX], math.inf, 0.0),  # nan cannot come of it, but that is not looked at
        ([math.inf, -FP32_MAX, -FP32_MAX], math.inf, 0.0),  # or nan when the other two are added first
        ([-math.inf, FP32_MAX, FP32_MAX], -math.inf, 0.0),
        ([math.inf, -math.inf, FP32_MAX, FP32_MAX], math.nan, 0.0),
        ([math.nan, FP32_MAX, FP32_MAX], math.nan, 0.0),
        ([FP32_MAX, FP32_MAX], math.inf, 0.0),
        ([-FP32_MAX, -FP32_MAX], -math.inf, 0.0),
        ([FP32_MAX, 2.0**103], math.inf, 0.0),  # half a unit in the last place too much
        ([FP32_MAX, 2.0**102], FP32_MAX, 0.0),
        ([math.inf, -math.inf], math.nan, 0.0),
        ([1.0, 2.0**-24], 1.0, 0.0),  # a tie
        ([1.0, 2.0**-23], 1.0 + 2.0**-23, 0.0),
        ([2.0**-149, 2.0**-149], 2.0**-148, 0.0),
        ([FP32_MAX], FP32_MAX, 0.0),
        ([math.inf], math.inf, 0.0),
        ([-0.0], 0.0, 0.0),
        ([0.0, -0.0], 0.0, 0.0),
    ],
)
def test_what_decides_every_order_is_the_center(column: list[float], center: float, bound: float) -> None:
    """Alone, and beside elements that do not share its fate; overflow is possible where three terms may do it."""
    can_overflow = len(column) > 2 and sum(map(abs, filter(math.isfinite, column))) > FP32_MAX
    for neighbours in ([], [[1.0] * len(column), [FP32_MAX] * len(column)]):
        found = any_order(terms_of([column, *neighbours]), 1 + len(neighbours))
        assert found.bound[0] == bound
        assert same(float(found.center[0]), center)
        assert bool(found.overflows[0]) == can_overflow
        if neighbours:
            assert found.center[1] == len(column)
            assert found.bound[1] < 1e-5 if len(column) > 2 else found.bound[1] == 0.0
            assert found.overflows[1:].tolist() == [False, len(column) > 2]


def test_no_terms_add_up_to_zero_and_nothing_else() -> None:
    found = any_order([], 3)
    assert found.center.tolist() == [0.0] * 3
    assert found.bound.tolist() == [0.0] * 3
    assert found.overflows.tolist() == [False] * 3
    for num_terms in (2, 3):
        nothing = any_order([np.zeros(0, np.float32)] * num_terms, 0)
        assert nothing.center.size == nothing.bound.size == nothing.overflows.size == 0


def test_terms_are_not_changed_by_adding_them() -> None:
    for num_terms in (1, 2, 3):
        terms = terms_of([[1.5] * num_terms, [FP32_MAX] * num_terms, [math.inf] * num_terms])
        any_order(terms, 3)
        assert all(term.tolist() == [1.5, FP32_MAX, math.inf] for term in terms)


@pytest.mark.parametrize("num_terms", [3, 4, 8])
@pytest.mark.parametrize("spread", [0, 3, 8])
def test_a_partial_sum_rounded_to_bf16_is_outside(num_terms: int, spread: int) -> None:
    """In every element in which that rounding changed anything; sums in fp32 are inside in all of them."""
    for seed in range(5):
        rows = [
            gradient(seed, contributor, 0, 0, 400, Values(Domain.GENERAL, 255, -7, spread))
            for contributor in range(num_terms)
        ]
        found = any_order(rows, 400)
        for position in range(2, num_terms + 1):
            partial = [np.zeros(400, np.float32), *itertools.accumulate(rows)][position]
            rounded = round_bf16(partial)
            changed = rounded != partial
            assert changed.mean() > 0.05
            wrong, right = rounded.copy(), partial.copy()
            for row in rows[position:]:
                wrong += row
                right += row
            assert (np.abs(right - found.center) <= found.bound).all()
            assert (np.abs(wrong - found.center) > found.bound)[changed].all()


@pytest.mark.parametrize("name", FORMS)
def test_the_interval_of_a_step_is_that_of_its_contributions(name: str) -> None:
    """Without the gradients that are None; whatever the nesting and the order, the step's sum lies within."""
    for seed in range(10):
        scenario, plan = drawn(name, seed)
        random = Random(seed)
        for parameter in range(len(SHAPES)):
            model = Model(scenario, plan, parameter)
            found = interval(scenario, plan, parameter)
            rows = [array for row in model.by_rank for array in row if array is not None]
            alone = any_order([np.array(row, np.float32) for row in rows], model.numel)
            assert np.array_equal(found.center, alone.center, equal_nan=True)
            assert np.array_equal(found.bound, alone.bound)
            assert np.array_equal(found.overflows, alone.overflows)
            for nesting in Nesting:
                tree = random_tree(random, range(scenario.world))
                order = Order((tree,), np.zeros(model.numel, np.intp))
                value = reduced_in_order(scenario, plan, parameter, order, nesting).value
                assert all(inside(v, *at) for v, at in zip(value.tolist(), around(found), strict=True))
