"""Owners of whole matrices: properties over any list, bounds against brute force, the numbers of real models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero2core.muon.ownership import (
    Load,
    OwnerRule,
    Whole,
    assign_owners,
    load_of,
    lower_bound,
    newton_schulz_cost,
)

RULES: tuple[OwnerRule, ...] = ("newton_schulz", "numel")

sizes = st.integers(1, 40)
shapes = st.one_of(st.tuples(sizes, sizes), st.tuples(st.integers(1, 4), sizes, sizes))


def named(shapes: Sequence[tuple[int, ...]]) -> list[Whole]:
    return [Whole(f"w{index}", shape) for index, shape in enumerate(shapes)]


wholes = st.lists(shapes, max_size=24).map(named)
worlds = st.integers(1, 9)
caps = st.sampled_from([1.0, 1.1, 1.3, 2.0, math.inf])
# So small that most lists begin several buffers: else the original rule uses one rank.
buffers = st.sampled_from([1e-3, 4e-3, 0.5])


def best_load(costs: Sequence[int], world: int) -> int:
    """The least largest load, by trying every assignment."""
    best = sum(costs)
    for owners in itertools.product(range(world), repeat=len(costs)):
        loads = [0] * world
        for cost, owner in zip(costs, owners, strict=True):
            loads[owner] += cost
        best = min(best, max(loads))
    return best


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "cost"),
    [
        ((3, 5), 5 * 3 * 3),
        ((5, 3), 5 * 3 * 3),
        ((4, 4), 64),
        ((7, 3, 5), 7 * 45),
        ((2, 7, 5, 3), 14 * 45),
        ((1, 9), 9),
        ((0, 9), 0),
    ],
)
def test_the_cost_is_that_of_one_product_of_each_matrix(shape: tuple[int, ...], cost: int) -> None:
    assert newton_schulz_cost(shape) == cost
    assert Whole("w", shape).cost == cost
    assert Whole("w", shape).numel == math.prod(shape)


@pytest.mark.parametrize("shape", [(), (7,)])
def test_what_is_no_matrix_has_no_cost(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two dimensions"):
        newton_schulz_cost(shape)


# --- any list ---------------------------------------------------------------------------------------------------------


@given(wholes, worlds, st.sampled_from(RULES), caps, buffers)
def test_every_whole_has_one_owner_and_the_same_each_time(
    wholes: list[Whole], world: int, rule: OwnerRule, cap: float, buffer_mb: float
) -> None:
    owners = assign_owners(wholes, world, rule=rule, cap=cap, buffer_mb=buffer_mb)
    assert len(owners) == len(wholes)
    assert set(owners) <= set(range(world))
    again = [Whole(whole.name, tuple(whole.shape)) for whole in wholes]
    assert assign_owners(again, world, rule=rule, cap=cap, buffer_mb=buffer_mb) == owners
    load = load_of(wholes, owners, world)
    assert sum(load.elements) == sum(whole.numel for whole in wholes)
    assert sum(load.cost) == sum(whole.cost for whole in wholes)


@given(wholes, worlds, caps)
def test_each_in_turn_goes_to_the_least_loaded_rank_that_the_cap_allows(
    wholes: list[Whole], world: int, cap: float
) -> None:
    """The rule followed backwards, from the owners: no step of it could have chosen another rank."""
    owners = assign_owners(wholes, world, cap=cap)
    mean = sum(whole.numel for whole in wholes) / world
    cost, elements = [0] * world, [0] * world
    for index in sorted(range(len(wholes)), key=lambda index: (-wholes[index].cost, index)):
        whole, owner = wholes[index], owners[index]
        fits = [not elements[rank] or elements[rank] + whole.numel <= cap * mean for rank in range(world)]
        assert fits[owner] or not any(fits)
        rivals = [rank for rank in range(world) if fits[rank] or not any(fits)]
        assert (cost[owner], owner) == min((cost[rank], rank) for rank in rivals)
        cost[owner] += whole.cost
        elements[owner] += whole.numel


@given(wholes, worlds)
def test_no_rank_is_over_a_cap_of_two_unless_one_whole_alone_is(wholes: list[Whole], world: int) -> None:
    """Of several ranks one is at or below the mean, and takes any whole of up to the mean: the cap of 2 always leaves
    room for those; a larger whole may have to go beside others."""
    mean = sum(whole.numel for whole in wholes) / world
    if all(whole.numel <= mean for whole in wholes):
        load = load_of(wholes, assign_owners(wholes, world, cap=2.0), world)
        assert max(load.elements) <= 2.0 * mean


def test_the_cap_moves_wide_matrices_off_a_rank_of_little_work() -> None:
    """Thin matrices are many elements and little work: without a cap one rank would hold nearly all of them."""
    listed = named([(64, 64), *[(1, 4096)] * 8])
    free, capped = (load_of(listed, assign_owners(listed, 2, cap=cap), 2) for cap in (math.inf, 1.3))
    assert free.elements == (4096, 8 * 4096)
    assert max(capped.elements) == 5 * 4096  # at most 1.3 times the mean of 4.5
    assert max(capped.cost) > max(free.cost)


def test_an_impossible_cap_is_overstepped_on_the_least_loaded_rank() -> None:
    assert assign_owners(named([(4, 4)] * 3), 2, cap=1.3) == (0, 1, 0)


def test_what_alone_is_over_the_cap_goes_to_a_rank_that_has_nothing_yet() -> None:
    """Though one that has some is less loaded, by what it has of other colours."""
    assert assign_owners(named([(8, 8)] * 2), 3, cap=1.0, loads=[0, 1000, 1000]) == (0, 1)


@given(wholes, worlds, st.data())
def test_what_ranks_have_already_counts(wholes: list[Whole], world: int, data: st.DataObject) -> None:
    """Where one rank has more than all of these together weigh, nothing comes to it, the cap allowing."""
    full = data.draw(st.integers(0, world - 1))
    for rule in RULES:
        loads = [0] * world
        loads[full] = 1 + sum(whole.cost + whole.numel for whole in wholes)
        owners = assign_owners(wholes, world, rule=rule, cap=math.inf, buffer_mb=1e-6, loads=loads)
        assert full not in owners or world == 1
        assert loads[full] == 1 + sum(whole.cost + whole.numel for whole in wholes)  # the caller's list is left alone


@pytest.mark.parametrize("rule", RULES)
def test_equals_go_to_the_ranks_in_order(rule: OwnerRule) -> None:
    assert assign_owners(named([(8, 8)] * 7), 3, rule=rule, cap=2.0, buffer_mb=1e-9) == (0, 1, 2, 0, 1, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"world": 0}, "world=0"),
        ({"world": 2, "cap": 0.99}, "cap=0.99"),
        ({"world": 2, "cap": math.nan}, "cap=nan"),
        ({"world": 2, "loads": [1]}, "1 loads for 2 ranks"),
        ({"world": 2, "rule": "random"}, "rule 'random'"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        assign_owners(named([(2, 2)]), **arguments)  # type: ignore[arg-type]


# --- bounds -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), max_size=7), st.integers(1, 3))
def test_no_assignment_is_below_the_lower_bound_and_the_default_rule_is_near_the_best(
    costs: list[int], world: int
) -> None:
    """Graham: longest first is within 4/3 - 1/(3 W) of the best.

    And within 3/2 of the bound b: when the last matrix on the busiest rank comes to it, that rank has at most the mean
    (of all before it), so its load becomes at most b + c, with c the cost of that matrix. If 2 c > b, at most W
    matrices cost c or more (of W + 1 some rank had two, and the bound were 2 c), so it comes to an empty rank, and the
    load is c <= b itself.
    """
    bound, best = lower_bound(costs, world), best_load(costs, world)
    assert bound <= best
    listed = named([(1, cost) for cost in costs])
    load = load_of(listed, assign_owners(listed, world, cap=math.inf), world)
    assert 3 * world * max(load.cost) <= (4 * world - 1) * best
    assert 2 * max(load.cost) <= 3 * bound
    assert load.lower_bound == bound


@pytest.mark.parametrize(
    ("costs", "world", "bound"),
    [
        ([], 3, 0.0),
        ([5], 3, 5.0),  # the largest
        ([3, 2, 2, 2], 2, 4.5),  # the mean
        ([6, 6, 6, 1], 3, 7.0),  # two of the four largest
        ([4, 4, 4, 4, 4], 2, 12.0),  # three of the five largest
        ([9, 1, 1, 1, 1], 4, 9.0),
    ],
)
def test_the_lower_bound_is_the_largest_of_three(costs: list[int], world: int, bound: float) -> None:
    assert lower_bound(costs, world) == bound
    assert lower_bound(costs[::-1], world) == bound


def test_a_bound_for_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world=0"):
        lower_bound([1], 0)


def test_a_load_in_numbers() -> None:
    load = load_of([Whole("a", (512, 512)), Whole("b", (256, 1024)), Whole("c", (2, 2))], (0, 2, 0), 3)
    assert load.elements == (2**18 + 4, 0, 2**18)
    assert load.megabytes == (1 + 2**-16, 0.0, 1.0)
    assert load.cost == (2**27 + 8, 0, 2**26)
    assert load.lower_bound == 2**27
    assert load.balance == 1 + 2**-24
    assert load.max_over_mean == pytest.approx(2.0)
    assert (load.spread, load.num_idle) == (1.0, 1)


def test_a_load_of_nothing_is_balanced() -> None:
    load = load_of([], (), 2)
    assert load == Load((0, 0), (0, 0), 0.0)
    assert (load.balance, load.max_over_mean, load.spread, load.num_idle) == (1.0, 1.0, 0.0, 2)


# --- the original rule ------------------------------------------------------------------------------------------------


def original_rule(wholes: Sequence[Whole], world: int, buffer_mb: float) -> list[int]:
    """As the specification has it, element by element of the sentence."""
    total_fp32_mb = 4 * sum(whole.numel for whole in wholes) / 2**20
    num_used = min(world, max(1, math.floor(total_fp32_mb / buffer_mb) + 1))
    held = dict.fromkeys(range(num_used), 0)
    owner_of = {}
    for whole in sorted(wholes, key=lambda whole: whole.numel, reverse=True):
        least = min(held.values())
        owner_of[whole.name] = next(rank for rank in range(num_used) if held[rank] == least)
        held[owner_of[whole.name]] += whole.numel
    return [owner_of[whole.name] for whole in wholes]


@given(wholes, worlds, buffers)
def test_the_rule_by_elements_is_the_original_one(wholes: list[Whole], world: int, buffer_mb: float) -> None:
    owners = assign_owners(wholes, world, rule="numel", buffer_mb=buffer_mb)
    assert list(owners) == original_rule(wholes, world, buffer_mb)


def test_the_rule_by_elements_counts_buffers_begun() -> None:
    """A list of exactly one buffer begins a second; unfused means buffers of the default size."""
    one_mb = named([(512, 256)] * 2)
    assert assign_owners(one_mb, 4, rule="numel", buffer_mb=1.0) == (0, 1)
    assert assign_owners(one_mb, 4, rule="numel", buffer_mb=1.01) == (0, 0)
    assert assign_owners(one_mb, 4, rule="numel", buffer_mb=0.0) == (0, 0)


# --- real models ------------------------------------------------------------------------------------------------------


def transformer(hidden: int, layers: int) -> list[Whole]:
    """Matrices of a GPT-2 of that width: 12 * hidden ** 2 elements a layer."""
    of_layer = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    return named(of_layer * layers)


def test_of_45_million_elements_the_original_rule_leaves_seven_of_eight_ranks_idle() -> None:
    """The specification's number: 8.0 times the mean, 1.0 with the default rule."""
    listed = transformer(hidden=560, layers=12)
    assert sum(whole.numel for whole in listed) == pytest.approx(45e6, rel=0.01)
    original = load_of(listed, assign_owners(listed, 8, rule="numel"), 8)
    assert (original.max_over_mean, original.num_idle) == (8.0, 7)
    ours = load_of(listed, assign_owners(listed, 8), 8)
    assert (ours.max_over_mean, ours.num_idle) == (1.0, 0)


@pytest.mark.parametrize(("world", "balance", "idle"), [(8, 1.0, 0), (64, 1.0, 16)])
def test_gpt2_is_balanced_as_far_as_its_matrices_allow(world: int, balance: float, idle: int) -> None:
    listed = transformer(hidden=768, layers=12)
    load = load_of(listed, assign_owners(listed, world), world)
    assert load.balance == balance
    assert load.num_idle == idle  # it has 48 matrices
