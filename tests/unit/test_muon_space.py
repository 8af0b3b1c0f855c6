"""Scenarios of a Muon optimizer: what is drawn is valid, and every goal is reached by construction."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import TypeVar

import hypothesis
import numpy as np
import pytest

from harness.scenario import codec
from harness.scenario.generate import draw, scenarios, turn
from harness.scenario.model import Domain, Extension, Scenario, check, muon_of, steps
from harness.scenario.muon import AdaptiveClip, GlobalClip
from harness.scenario.muon_aims import MUON_AIMS, MUON_FREE
from harness.scenario.muon_groups import Layout, layouts, multiple_of
from harness.scenario.muon_situations import GOALS, RUNTIME, MuonSituation, can_hold, reached
from harness.scenario.muon_space import draw_muon
from harness.scenario.space import Choices
from harness.scenario.values import gradient_of
from tests.support import required

T = TypeVar("T")
WORLDS = (1, 2, 3, 4)
DTYPES = Extension(dtypes=True)


class Randomly(Choices):
    """Random choices."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def _number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def group(self, draw: Callable[[Choices], T]) -> T:
        return draw(self)


def free(world: int, seed: int, bucket: int | None = None) -> Scenario:
    return draw_muon(Randomly(seed), world, MUON_FREE, seed, bucket, DTYPES)


@functools.cache
def campaign(worlds: tuple[int, ...]) -> tuple[Scenario, ...]:
    return tuple(draw(0, index, worlds, extension=DTYPES, system="muon") for index in range(200))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 15, 16])
def test_each_goal_is_reached_by_construction_and_the_case_can_be_saved(world: int) -> None:
    for goal in (goal for goal in GOALS if can_hold(goal, world, extension=DTYPES)):
        for seed in range(6):
            made = draw_muon(Randomly(seed), world, MUON_AIMS[goal], seed, None, DTYPES)
            assert check(made) is None
            assert goal in RUNTIME or goal in reached(made), (goal, seed)
            assert codec.decode(codec.encode(codec.Case(made))).scenario == made


@pytest.mark.parametrize("bucket", [1, 17, 100_000])
def test_each_goal_is_reached_with_a_fixed_buffer_size(bucket: int) -> None:
    for world in (1, 4):
        for goal in (goal for goal in GOALS if can_hold(goal, world, bucket)):
            for seed in range(3):
                made = draw_muon(Randomly(seed), world, MUON_AIMS[goal], seed, bucket)
                assert check(made) is None
                assert made.bucket == bucket
                assert goal in RUNTIME or goal in reached(made), (goal, seed)


@pytest.mark.parametrize("worlds", [WORLDS, (8, 16)])
def test_a_campaign_reaches_every_situation_within_as_many_examples_as_there_are_goals(worlds: tuple[int, ...]) -> None:
    goals = required(worlds, extension=DTYPES, system="muon") - {MuonSituation.WORLD_THREE}
    found = frozenset[MuonSituation]().union(*(reached(made) for made in campaign(worlds)[: len(goals)]))
    assert goals - RUNTIME <= found
    aimed = [turn(index, worlds, extension=DTYPES, system="muon").goal for index in range(len(goals))]
    assert {*aimed} == goals


def test_drawn_scenarios_are_valid_and_of_the_intended_world_and_goal() -> None:
    for index, made in enumerate(campaign(WORLDS)):
        world, goal = turn(index, WORLDS, extension=DTYPES, system="muon")
        assert check(made) is None
        assert (made.world, made.system) == (world, "muon")
        assert goal in RUNTIME or goal in reached(made), index
        assert 1 <= len(made.parameters) <= 8


def test_only_what_a_subject_takes_is_drawn() -> None:
    """Parameters of several dtypes are for those that say so."""
    drawn = [draw(1, index, WORLDS, system="muon") for index in range(120)]
    assert all(len({parameter.dtype for parameter in made.parameters}) == 1 for made in drawn)
    assert {parameter.dtype for made in drawn for parameter in made.parameters} >= {"bf16", "fp32"}


def means(scenario: Scenario) -> list[tuple[np.ndarray, Fraction, list[np.ndarray]]]:
    """Of the first reduced step: exact sums of each parameter's first group, its divisor, and the contributions.

    Written anew from the words of the scenario: what is added, and what it is divided by.
    """
    muon = muon_of(scenario)
    plan = next(plan for plan in steps(scenario) if plan.reduced)
    found = []
    for index, (parameter, mark) in enumerate(zip(scenario.parameters, muon.marks, strict=True)):
        color = None if mark.color is None else muon.colors[mark.color]
        ranks = range(scenario.world) if color is None else color.groups[0]
        divisor = len(ranks) if color is None or color.divisor is None else color.divisor
        each = [
            gradient_of(scenario.seed, part.contributors[rank], plan.index, parameter, index, scenario.values).astype(
                np.float64
            )
            * muon.multiple
            for part in plan.parts
            for rank in ranks
            if index not in part.none[rank]
        ]
        if each:
            found.append((np.sum(each, axis=0), Fraction(divisor), each))
    return found


def is_fp32(values: np.ndarray) -> bool:
    return bool(np.array_equal(values.astype(np.float32).astype(np.float64), values))


def in_bf16(values: np.ndarray) -> bool:
    mantissa, exponent = np.frexp(values)
    return bool(np.all(np.ldexp(mantissa, 8) % 1 == 0)) and bool(np.all(exponent > -133))


def test_contributions_are_exact_in_bf16_and_their_means_in_fp32() -> None:
    """Of exact domains: also half a contribution, where a parameter is used twice, and sums in any order."""
    wide = 0
    for world in (1, 2, 3, 5, 6, 7, 12, 15):
        for seed in range(25):
            made = free(world, seed)
            if made.values.domain is Domain.GENERAL:
                continue
            for total, divisor, each in means(made):
                assert all(in_bf16(values / 2) for values in each)
                assert is_fp32(np.sum(np.abs(each), axis=0))
                exact = [Fraction(float(value)) / divisor for value in total.flat]
                assert all(Fraction(float(np.float32(float(value)))) == value for value in exact)
                wide += not in_bf16(total)
    assert wide > 150


def test_goals_of_clips_scale_what_they_are_meant_to() -> None:
    """The expected norm is near the real one: half of it clips, 50 times it does not."""
    for goal, active in ((MuonSituation.CLIPPING_ACTIVE, True), (MuonSituation.CLIPPING_INACTIVE, False)):
        for world in (1, 3, 4, 16):
            for seed in range(15):
                made = draw_muon(Randomly(seed), world, MUON_AIMS[goal], seed, None, DTYPES)
                clip = muon_of(made).clip
                assert isinstance(clip, GlobalClip)
                norms = [norm_of(made, index) for index, plan in enumerate(steps(made)) if plan.reduced]
                assert any((clip.max_norm < norm + 1e-6) is active for norm in norms), (goal, world, seed)


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_goals_of_what_only_ranks_can_tell_are_reached_by_the_values(world: int) -> None:
    """Of wide means, and of a norm that grows from one step to a later one."""
    wide = grown = 0
    for seed in range(30):
        made = draw_muon(Randomly(seed), world, MUON_AIMS[MuonSituation.WIDE_REDUCED_VALUE], seed, None)
        values = [total / float(divisor) for total, divisor, _ in means(made)]
        wide += not all(in_bf16(each) for each in values)
        made = draw_muon(Randomly(seed), world, MUON_AIMS[MuonSituation.ADAPTIVE_CLIP_ACTIVE], seed, None)
        norms = [norm_of(made, index) for index, plan in enumerate(steps(made)) if plan.reduced]
        grown += any(one < later for one, later in itertools.pairwise(norms))
    assert wide == 30
    assert grown > 20


def norm_of(scenario: Scenario, step: int) -> float:
    """The joint norm of what is clipped in one step, over all groups."""
    muon = muon_of(scenario)
    plan = list(steps(scenario))[step]
    square = 0.0
    for index, (parameter, mark) in enumerate(zip(scenario.parameters, muon.marks, strict=True)):
        color = None if mark.color is None else muon.colors[mark.color]
        groups = (tuple(range(scenario.world)),) if color is None else color.groups
        for group in groups:
            divisor = len(group) if color is None or color.divisor is None else color.divisor
            each = [
                gradient_of(scenario.seed, part.contributors[rank], step, parameter, index, scenario.values)
                for part in plan.parts
                for rank in group
                if index not in part.none[rank]
            ]
            if each and mark.need_clip:
                square += float(np.sum((np.sum(each, axis=0, dtype=np.float64) * muon.multiple / divisor) ** 2))
    return math.sqrt(square)


def test_the_input_space_is_covered() -> None:
    """What no situation stands for."""
    drawn = [free(world, seed) for world in (1, 2, 3, 4, 8, 16) for seed in range(150)]
    muons = [muon_of(made) for made in drawn]
    domains = Counter(made.values.domain for made in drawn)
    assert domains[Domain.EXACT] > 0.6 * len(drawn)
    assert 0.03 < domains[Domain.GENERAL] / len(drawn) < 0.15
    assert domains[Domain.NORM_EXACT] > 30
    assert {dimension for made in drawn for each in made.parameters for dimension in each.shape} >= {*range(1, 25)}
    assert {len(made.parameters) for made in drawn} == {*range(1, 9)}
    assert {len(plan.parts) for made in drawn for plan in steps(made)} == {1, 2, 3, 4}
    assert {parameter.dtype for made in drawn for parameter in made.parameters} == {"bf16", "fp16", "fp32"}
    assert {type(muon.clip) for muon in muons} == {type(None), GlobalClip, AdaptiveClip}
    assert {len(muon.colors) for muon in muons} == {0, 1, 2}
    assert {made.muon.sharding.local_world_size for made in drawn if made.muon and made.world == 16} >= {1, 2, 4, 8, 16}
    assert {made.muon.settings.lr for made in drawn if made.muon} >= {0.0, 2e-2, 1.0}
    overlapped = [made for made in drawn if muon_of(made).sharding.comm_overlap]
    assert 0.3 < len(overlapped) / len(drawn) < 0.7
    assert any(muon.release_color == -1 for muon in muons)
    assert any(muon.release_color not in (None, -1) for muon in muons)


def test_groups_lie_as_they_are_said_to_and_need_a_small_multiple() -> None:
    for world in range(1, 33):
        own = multiple_of([world])
        for layout in Layout:
            for groups in layouts(world, layout, own):
                ranks = [rank for group in groups for rank in group]
                assert len({*ranks}) == len(ranks) <= world
                assert (len(ranks) < world) is (layout is Layout.OUTSIDE)
                assert all(list(group) == sorted(group) for group in groups)
                assert math.lcm(own, multiple_of(map(len, groups))) <= 85
        assert layouts(world, Layout.ALL, own)


@hypothesis.settings(max_examples=15, database=None, deadline=None)
@hypothesis.given(scenarios((2, 3), bucket=50, system="muon"))
def test_the_strategy_serves_given(made: Scenario) -> None:
    assert check(made) is None
    assert (made.system, made.bucket) == ("muon", 50)
    assert made.world in (2, 3)


def test_faults_are_drawn_for_the_other_system() -> None:
    with pytest.raises(ValueError, match="faults are drawn for system 'zero_master' alone"):
        draw(0, 0, (2,), fault=True, system="muon")
