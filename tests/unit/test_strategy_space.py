"""Scenarios of a strategy: what is drawn is valid, is what a subject offers, and reaches every goal by construction."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import TypeVar

import hypothesis
import numpy as np
import pytest

from harness.errors import UsageError
from harness.scenario import codec
from harness.scenario.generate import draw, scenarios, turn
from harness.scenario.model import Clip, Domain, Extension, Part, Scenario, beyond, check, steps, strategy_of
from harness.scenario.muon import MuonSettings
from harness.scenario.space import Choices
from harness.scenario.strategy import ROOT, Offer
from harness.scenario.strategy_aims import STRATEGY_AIMS, STRATEGY_FREE
from harness.scenario.strategy_situations import GOALS, RUNTIME, StrategySituation, can_hold, reached
from harness.scenario.strategy_space import draw_strategy
from harness.scenario.values import gradient_of
from tests.strategies import EXTENSIONS
from tests.support import paired, repetitions, required, sampled

T = TypeVar("T")
WORLDS = (1, 2, 3, 4)
BY_WORLD = {
    StrategySituation.WORLD_ONE,
    StrategySituation.WORLD_TWO,
    StrategySituation.WORLD_THREE,
    StrategySituation.WORLD_FOUR,
}


class Randomly(Choices):
    """Random choices."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def _number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def group(self, draw: Callable[[Choices], T]) -> T:
        return draw(self)


def made_for(goal: StrategySituation, world: int, seed: int, extension: Extension) -> Scenario:
    return draw_strategy(Randomly(seed), world, STRATEGY_AIMS[goal], seed, None, extension)


def free(world: int, seed: int, offered: str) -> Scenario:
    return draw_strategy(Randomly(seed), world, STRATEGY_FREE, seed, None, EXTENSIONS[offered])


@functools.cache
def campaign(offered: str) -> tuple[Scenario, ...]:
    """As many as there are goals, of a campaign over all worlds."""
    goals = required(WORLDS, extension=EXTENSIONS[offered], system="strategy") - BY_WORLD
    return tuple(
        draw(0, index, WORLDS, extension=EXTENSIONS[offered], system="strategy") for index in range(len(goals))
    )


@pytest.mark.parametrize(("world", "offered"), paired([1, 2, 3, 4, 6, 7, 16], list(EXTENSIONS)))
def test_each_goal_is_reached_by_construction_and_the_case_can_be_saved(offered: str, world: int) -> None:
    extension = EXTENSIONS[offered]
    for goal in (goal for goal in GOALS if can_hold(goal, world, extension=extension)):
        for seed in range(repetitions(2, 3)):
            made = made_for(goal, world, seed, extension)
            assert check(made) is None
            assert beyond(made, extension) == ()
            assert goal in RUNTIME or goal in reached(made), (goal, seed)
            assert codec.decode(codec.encode(codec.Case(made))).scenario == made


@pytest.mark.parametrize("offered", EXTENSIONS)
def test_a_campaign_reaches_every_situation_within_as_many_examples_as_there_are_goals(offered: str) -> None:
    extension, drawn = EXTENSIONS[offered], campaign(offered)
    wanted = required(WORLDS, extension=extension, system="strategy")
    assert wanted - RUNTIME <= frozenset[StrategySituation]().union(*map(reached, drawn))
    aimed = [turn(index, WORLDS, extension=extension, system="strategy") for index in range(len(drawn))]
    assert {each.goal for each in aimed} == wanted - BY_WORLD
    for made, (world, goal) in zip(drawn, aimed, strict=True):
        assert check(made) is None
        assert beyond(made, extension) == ()
        assert (made.world, made.system) == (world, "strategy")
        assert goal in RUNTIME or goal in reached(made)


def test_the_same_seed_gives_the_same_scenario_and_another_one_another() -> None:
    for index in (0, 17):
        one, same, other = (
            draw(seed, index, WORLDS, extension=EXTENSIONS["dmuon hybrid"], system="strategy") for seed in (3, 3, 4)
        )
        assert one == same
        assert one != other


@pytest.mark.parametrize("bucket", [1, 17, 100_000])
def test_each_goal_is_reached_with_a_fixed_bucket(bucket: int) -> None:
    extension = EXTENSIONS["ddp"]
    for goal in (goal for goal in GOALS if can_hold(goal, 2, bucket, extension)):
        made = draw_strategy(Randomly(1), 2, STRATEGY_AIMS[goal], 1, bucket, extension)
        assert check(made) is None
        assert made.bucket == bucket
        assert goal in RUNTIME or goal in reached(made), goal


# --- sums and means ---------------------------------------------------------------------------------------------------


def contributions(scenario: Scenario, step: int, index: int) -> list[np.ndarray]:
    """Of one parameter in one step, each as fp64. Written anew from the words of the scenario."""
    strategy, plan = strategy_of(scenario), list(steps(scenario))[step]
    if strategy.places[index].frozen:
        return []
    listed = scenario.parameters[index]
    return [
        gradient_of(scenario.seed, part.contributors[rank], step, listed, index, scenario.values).astype(np.float64)
        * strategy.multiple
        for part in plan.parts
        for rank in range(scenario.world)
        if index not in part.none[rank]
    ]


def fits(values: np.ndarray, bits: int) -> bool:
    """Whether each has no more significant bits, and is not below the smallest subnormal number of so many."""
    mantissa, exponent = np.frexp(values)
    lowest = {8: -133, 24: -149}[bits]
    return bool(np.all(np.ldexp(mantissa, bits) % 1 == 0)) and bool(np.all(exponent[values != 0] > lowest))


@pytest.mark.parametrize("offered", ["class", "ddp", "fsdp2", "bf16 alone", "dmuon hybrid"])
def test_sums_and_means_are_exact_in_the_dtype_in_which_they_are_reduced(offered: str) -> None:
    """Of exact domains: of whatever some contributions add up to, and of that divided by the world; halves too."""
    seen: Counter[str] = Counter()
    for world in sampled((1, 2, 3, 4, 5, 6, 7, 8, 12), every=2):
        for seed in range(16):
            made = free(world, seed, offered)
            strategy = strategy_of(made)
            if made.values.domain is Domain.GENERAL:
                continue
            seen[strategy.reduce] += 1
            bits = 24 if strategy.reduce == "fp32" else 8
            narrow = "bf16" in {strategy.reduce, strategy.compute, made.parameters[0].dtype}
            for index in range(len(made.parameters)):
                each = contributions(made, 0, index)
                if not each:
                    continue
                assert all(fits(values / 2, 8 if narrow else 24) for values in each)
                largest = math.ldexp(made.values.max_k * strategy.multiple, made.values.exponent) * len(each)
                sums = np.array([*np.cumsum(each, axis=0).flat, largest])
                assert fits(sums, bits)
                assert all(
                    Fraction(float(np.float32(value / world))) == Fraction(float(value)) / world for value in sums[:-1]
                )
                assert fits(sums[:-1] / world, bits)
    assert seen["bf16"] > 10
    assert offered not in ("fsdp2", "ddp") or seen["fp32"] > 10


@pytest.mark.parametrize("world", [1, 2, 3, 4, 16])
def test_goals_of_clips_scale_what_they_are_meant_to(world: int) -> None:
    """The expected norm is near the real one: half of it clips, 50 times it does not."""
    goals = ((StrategySituation.CLIPPING_ACTIVE, True), (StrategySituation.CLIPPING_INACTIVE, False))
    for goal, active in goals:
        for offered in ("class", "dmuon"):
            for seed in range(10):
                made = made_for(goal, world, seed, EXTENSIONS[offered])
                plan = next(steps(made))
                assert isinstance(plan.clip, Clip)
                assert (plan.clip.max_norm < norm_of(made) + 1e-6) is active, (goal, offered, seed)


def norm_of(scenario: Scenario) -> float:
    """Of the first step's mean gradient."""
    square = 0.0
    for index in range(len(scenario.parameters)):
        each = contributions(scenario, 0, index)
        if each:
            square += float(np.sum((np.sum(each, axis=0) / scenario.world) ** 2))
    return math.sqrt(square)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_goal_of_wide_means_is_reached_by_the_values(world: int) -> None:
    for seed in range(10):
        made = made_for(StrategySituation.WIDE_REDUCED_VALUE, world, seed, EXTENSIONS["fsdp2"])
        assert strategy_of(made).reduce == "fp32"
        means = [np.sum(contributions(made, 0, index), axis=0) / world for index in range(len(made.parameters))]
        assert not all(fits(np.asarray(each), 8) for each in means)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offered", EXTENSIONS)
def test_each_rank_uses_something_in_each_part(offered: str) -> None:
    extension, num_unused = EXTENSIONS[offered], 0
    for world in (1, 2, 3, 4):
        for seed in range(repetitions(20, 40)):
            made = free(world, seed, offered)
            moving = {index for index, place in enumerate(strategy_of(made).places) if not place.frozen}
            for part in (each for each in made.operations if isinstance(each, Part)):
                assert all(moving - {*none} for none in part.none)
                assert all({*none} <= moving for none in part.none)
                num_unused += sum(map(len, part.none))
    assert bool(num_unused) is extension.strategy.unused


def test_a_class_is_asked_for_what_any_strategy_has() -> None:
    drawn = [free(world, seed, "class") for world in WORLDS for seed in range(60)]
    for made in drawn:
        strategy = strategy_of(made)
        assert made.values.domain is not Domain.GENERAL
        assert (strategy.sharding, strategy.replicas, strategy.reduce, strategy.compute) == ("any", 1, "bf16", "bf16")
        assert strategy.accumulation in ("sync", "no_sync", "nested")
        flags = (strategy.offload, strategy.converts, strategy.bare_root, strategy.unequal_start)
        assert flags == (False,) * 4
        assert not any(place.plain or place.tied or place.dedicated for place in strategy.places)
        assert {parameter.dtype for parameter in made.parameters} == {"fp32"}
    assert {strategy_of(made).accumulation for made in drawn} == {"sync", "no_sync", "nested"}
    assert any(place.frozen for made in drawn for place in strategy_of(made).places)


def test_the_input_space_is_covered() -> None:
    drawn = [free(world, seed, "dmuon hybrid") for world in (1, 2, 3, 4, 6) for seed in range(150)]
    strategies = [strategy_of(made) for made in drawn]
    domains = Counter(made.values.domain for made in drawn)
    assert domains[Domain.EXACT] > 0.5 * len(drawn)
    assert 0.1 < domains[Domain.GENERAL] / len(drawn) < 0.3
    assert domains[Domain.NORM_EXACT] > 30
    assert {len(made.parameters) for made in drawn} == {*range(1, 7)}
    assert {max(place.block for place in each.places) for each in strategies} == {0, 1, 2, 3}
    assert {len(plan.parts) for made in drawn for plan in steps(made)} == {1, 2, 3, 4}
    assert {each.accumulation for each in strategies} == {"sync", "no_sync", "nested", "deferred", "flush"}
    assert {each.replicas for each in strategies} == {1, 2, 3, 4, 6}
    assert {(each.reduce, each.compute) for each in strategies} == {
        (one, other) for one in ("fp32", "bf16") for other in ("fp32", "bf16")
    }
    assert any(place.block == ROOT and place.dedicated for each in strategies for place in each.places)
    assert all(each.muon == MuonSettings() for each in strategies if not any(place.dedicated for place in each.places))
    assert len({each.muon for each in strategies}) > 50
    assert {dimension for made in drawn for each in made.parameters for dimension in each.shape} >= {*range(1, 12)}


def test_a_world_whose_sums_need_more_bits_than_there_are_is_refused() -> None:
    """17 gradients, multiples of 17 each, add up to 289 at least; where fp32 is offered, they do so in fp32."""
    with pytest.raises(UsageError, match="world 17: sums over 17 ranks of multiples of 17 need more than the 8 bits"):
        free(17, 0, "class")
    with pytest.raises(UsageError, match="world 17: no scenario can be drawn for this subject and so many ranks"):
        draw(0, 0, (4, 17), system="strategy")
    assert all(strategy_of(free(17, seed, "fsdp2")).reduce == "fp32" for seed in range(10))
    assert check(free(16, 0, "class")) is None


def test_replicas_that_are_fixed_are_kept_where_they_divide_the_world() -> None:
    made = {world: strategy_of(free(world, 1, "hybrid of two")).replicas for world in (1, 2, 3, 4, 6)}
    assert made == {1: 1, 2: 2, 3: 1, 4: 2, 6: 2}


@hypothesis.settings(max_examples=15, database=None, deadline=None)
@hypothesis.given(scenarios((2, 3), extension=Extension(strategy=Offer(unused=True, tied=True)), system="strategy"))
def test_the_strategy_serves_given(made: Scenario) -> None:
    assert check(made) is None
    assert made.system == "strategy"
    assert made.world in (2, 3)


def test_faults_are_drawn_for_the_first_system() -> None:
    with pytest.raises(ValueError, match="faults are drawn for system 'zero_master' alone"):
        draw(0, 0, (2,), fault=True, system="strategy")
