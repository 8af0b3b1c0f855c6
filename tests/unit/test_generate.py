"""The generator: goals are reached by construction, and draws repeat."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import hypothesis
import numpy as np
import pytest

from harness.oracles.contributions import Nesting, reduced_in_order
from harness.oracles.order import in_rank_order
from harness.scenario import systems
from harness.scenario.aims import AIMS, FREE, SPECIALS, SPREADS, Form
from harness.scenario.generate import draw, scenarios, turn
from harness.scenario.model import (
    AdamW,
    Build,
    Domain,
    Extension,
    Load,
    Rate,
    Scenario,
    StepPlan,
    Values,
    check,
    steps,
)
from harness.scenario.situations import GOALS, RUNTIME, Situation, can_hold, reached
from harness.scenario.space import Choices, draw_scenario
from harness.scenario.values import gradient
from tests.support import required

T = TypeVar("T")

WORLDS = (1, 2, 3, 4)
ROOT = Path(__file__).parents[2]


class Recorded(Choices):
    """Random choices, recorded."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.numbers: list[int] = []

    def _number(self, low: int, high: int) -> int:
        self.numbers.append(self._random.randint(low, high))
        return self.numbers[-1]

    def group(self, draw: Callable[[Choices], T]) -> T:
        return draw(self)


class Replayed(Choices):
    """The same choices again, each of which must be allowed."""

    def __init__(self, numbers: list[int]) -> None:
        self.left = list(numbers)

    def _number(self, low: int, high: int) -> int:
        assert low <= self.left[0] <= high
        return self.left.pop(0)

    def group(self, draw: Callable[[Choices], T]) -> T:
        return draw(self)


EVERYTHING = Extension(refresh=True, dtypes=True, strides=True)


def random_scenario(goal: Situation, world: int, seed: int, bucket: int | None = None) -> tuple[Scenario, list[int]]:
    choices = Recorded(Random(seed))
    made = draw_scenario(choices, world, AIMS[goal], seed, bucket, EVERYTHING)
    return made, choices.numbers


@functools.cache
def campaign() -> tuple[Scenario, ...]:
    return tuple(draw(0, index, WORLDS) for index in range(300))


def exact_sum(scenario: Scenario, plan: StepPlan, ranks: Sequence[int]) -> np.ndarray:
    """The sum (fp64) of some ranks' gradients over all parts, without the factor 2**exponent; of the exact domains."""
    total = np.zeros(scenario.numel)
    for part in plan.parts:
        for rank in ranks:
            held = [
                gradient(scenario.seed, part.contributors[rank], plan.index, index, p.numel, scenario.values)
                * (index not in part.none[rank])
                for index, p in enumerate(scenario.parameters)
            ]
            total += np.ldexp(np.concatenate(held, dtype=np.float64), -scenario.values.exponent)
    return total


def is_wide(total: np.ndarray) -> bool:
    """Whether some element needs more than 8 significant bits."""
    mantissa, _ = np.frexp(total)
    return bool(np.any(np.ldexp(mantissa, 8) % 1))


def told_by_sums(scenario: Scenario) -> set[Situation]:
    """What the ranks would report of the sums of all steps, added in rank order: in any domain."""
    found: set[Situation] = set()
    for plan in steps(scenario):
        if plan.discard:
            continue
        for index, parameter in enumerate(scenario.parameters):
            order = in_rank_order(scenario.world, parameter.numel)
            found |= reduced_in_order(scenario, plan, index, order, Nesting.PARTS_INSIDE).shows
    return found


def told_by_integers(scenario: Scenario) -> set[Situation]:
    """What the ranks would report, for the exact domains, from sums in fp64 that owe nothing to the harness."""
    found = set()
    for plan in steps(scenario):
        if plan.discard:
            continue
        total = exact_sum(scenario, plan, range(scenario.world))
        if is_wide(total):
            found.add(Situation.WIDE_REDUCED_VALUE)
        if len(plan.parts) > 1 and is_wide(exact_sum(scenario, plan, [0])):
            found.add(Situation.WIDE_PARTIAL_SUM)
        if plan.clip is not None:
            norm = math.ldexp(math.sqrt(float(total @ total)), scenario.values.exponent)
            active = plan.clip.max_norm / (norm + 1e-6) < 1
            found.add(Situation.CLIPPING_ACTIVE if active else Situation.CLIPPING_INACTIVE)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 11])
def test_each_goal_is_reached_by_construction(world: int) -> None:
    for goal in (goal for goal in GOALS if can_hold(goal, world, extension=EVERYTHING)):
        for seed in range(30):
            made, _ = random_scenario(goal, world, seed)
            assert check(made) is None
            assert goal in RUNTIME or goal in reached(made), (goal, seed)


@pytest.mark.parametrize("bucket", [1, 7, 1024, 2**25])
def test_each_goal_is_reached_with_a_fixed_bucket_size(bucket: int) -> None:
    for world in (1, 3):
        for goal in (goal for goal in GOALS if can_hold(goal, world, bucket)):
            for seed in range(10):
                made, _ = random_scenario(goal, world, seed, bucket)
                assert check(made) is None
                assert made.bucket == bucket
                assert made.numel < 10_000
                assert goal in RUNTIME or goal in reached(made), (goal, seed)


@pytest.mark.parametrize("goal", sorted(RUNTIME, key=lambda goal: goal.value))
def test_goals_that_only_ranks_can_tell_are_reached_by_the_values(goal: Situation) -> None:
    """By every draw, not only by most: a step that is reduced has them, with enough elements to show them."""
    worlds = [world for world in WORLDS if can_hold(goal, world)]
    assert worlds == {Situation.ORDER_MATTERS: [3, 4], Situation.CANCELLATION: [2, 3, 4]}.get(goal, [1, 2, 3, 4])
    for world in worlds:
        for seed in range(20):
            made, _ = random_scenario(goal, world, seed)
            told = told_by_sums(made)
            if made.values.domain is not Domain.GENERAL:
                counted = told_by_integers(made)
                assert counted - {Situation.CLIPPING_ACTIVE, Situation.CLIPPING_INACTIVE} <= told
                told |= counted
            assert goal in told, (world, seed)


def test_a_full_campaign_shows_what_sums_tell_several_times_and_extremes_only_by_general_values() -> None:
    clipping = {Situation.CLIPPING_ACTIVE, Situation.CLIPPING_INACTIVE}
    only_general = {Situation.ORDER_MATTERS, Situation.EXTREME_VALUE, Situation.NONFINITE_VALUE}
    count: Counter[Situation] = Counter()
    for made in campaign():
        told = told_by_sums(made)
        count.update(told)
        assert made.values.domain is Domain.GENERAL or not only_general & told, made
    assert all(count[goal] >= 5 for goal in RUNTIME - clipping)


def test_what_a_subject_does_not_take_is_not_drawn_and_choices_without_it_stay() -> None:
    """The choices of a scenario that nothing was drawn for beyond the contract give it whatever is allowed."""
    loads = 0
    for seed in range(200):
        choices = Recorded(Random(seed))
        made = draw_scenario(choices, 2, FREE, seed, None)
        assert not any(isinstance(operation, Load) for operation in made.operations)
        assert draw_scenario(Replayed(choices.numbers), 2, FREE, seed, None, EVERYTHING) == made
        wider = draw_scenario(Recorded(Random(seed)), 2, FREE, seed, None, EVERYTHING)
        loads += any(isinstance(operation, Load) for operation in wider.operations)
    assert loads > 10


def test_what_stands_between_steps_is_there_now_and_then() -> None:
    """About one scenario in six has a new rate, one a rebuild, one a skip; a rate that is set is another one."""
    count: Counter[str] = Counter()
    for made in campaign():
        lr = made.optimizer.lr
        for operation in made.operations[1:]:
            if isinstance(operation, Rate):
                assert operation.lr != lr
                lr = operation.lr
        count.update({operation.__struct_config__.tag for operation in made.operations[1:]})
        count.update(name for name in ("amsgrad", "maximize") if getattr(made.optimizer, name))
    for name in ("rate", "build", "skip", "amsgrad", "maximize"):
        assert 15 <= count[name] <= 90, name


def test_a_rebuild_cuts_into_no_more_buckets_than_a_rank_can_take() -> None:
    for made in campaign():
        for operation in made.operations[1:]:
            if isinstance(operation, Build):
                assert made.numel <= 24 * operation.bucket


def test_drawn_scenarios_are_valid_and_of_the_intended_world_and_goal() -> None:
    for index, made in enumerate(campaign()):
        world, goal = turn(index, WORLDS)
        assert check(made) is None
        assert made.world == world == WORLDS[index % 4]
        assert goal in RUNTIME or goal in reached(made), index


def test_a_full_campaign_reaches_every_situation_several_times_and_aims_at_each_at_several_worlds() -> None:
    count = Counter(situation for made in campaign() for situation in reached(made))
    assert all(count[situation] >= 5 for situation in required(WORLDS) - RUNTIME)
    aimed = Counter(turn(index, WORLDS) for index in range(300))
    places = [(world, goal) for goal in GOALS for world in WORLDS if can_hold(goal, world)]
    assert len(places) < 180
    assert all(aimed[place] >= 1 for place in places)
    assert sum(aimed[place] >= 2 for place in places) > 0.6 * len(places)
    of_contract = [goal for goal in GOALS if any(can_hold(goal, world) for world in WORLDS)]
    assert all(sum(aimed[world, goal] for world in WORLDS) >= 6 for goal in of_contract)


CAMPAIGNS = [
    (WORLDS, None, Extension()),
    (WORLDS, None, EVERYTHING),
    ((4, 3, 2, 1), None, EVERYTHING),
    ((1,), None, Extension()),
    ((2,), None, EVERYTHING),
    ((1, 2), None, EVERYTHING),
    ((3, 1), None, Extension()),
    ((2, 3), None, EVERYTHING),
    ((1, 2, 3), None, Extension()),
    (tuple(range(1, 9)), None, EVERYTHING),
    ((1, 2, 4, 8), 7, EVERYTHING),
    (WORLDS, 1, Extension()),
    (WORLDS, 1024, Extension()),
    ((1, 3), 2**25, EVERYTHING),
]


@pytest.mark.parametrize(("worlds", "bucket", "extension"), CAMPAIGNS)
def test_a_campaign_aims_at_every_goal_first_and_then_at_each_as_often(
    worlds: tuple[int, ...], bucket: int | None, extension: Extension
) -> None:
    goals = {goal for goal in GOALS if any(can_hold(goal, world, bucket, extension) for world in worlds)}
    turns = [turn(index, worlds, bucket=bucket, extension=extension) for index in range(300)]
    assert {goal for _, goal in turns[: len(goals)]} == goals
    # The last ones are few where they begin again.
    for num_turns in range(len(goals), 300):
        aimed = Counter(goal for _, goal in turns[:num_turns])
        assert min(aimed[goal] for goal in goals) >= num_turns // len(goals) - 1
        assert max(aimed.values()) <= num_turns // len(goals) + 2


@pytest.mark.parametrize(("worlds", "bucket", "extension"), CAMPAIGNS)
def test_worlds_go_round_and_each_goes_through_all_of_its_goals_whatever_the_place(
    worlds: tuple[int, ...], bucket: int | None, extension: Extension
) -> None:
    for begin in (0, 1000, 2**40 + 1):  # the last as where others than a campaign's own are asked for
        turns = [turn(begin + number, worlds, bucket=bucket, extension=extension) for number in range(3000)]
        first = worlds.index(turns[0].world)
        assert [this.world for this in turns] == [worlds[(first + at) % len(worlds)] for at in range(3000)]
        held = {(world, goal) for world in worlds for goal in GOALS if can_hold(goal, world, bucket, extension)}
        assert set(turns) == held
    assert [turn(index, worlds, bucket=bucket, extension=extension).world for index in range(8)] == [
        worlds[index % len(worlds)] for index in range(8)
    ]


def test_worlds_that_alone_can_have_a_goal_have_others_too() -> None:
    """Of 64 worlds only the largest has a bucket below it: one goal in 46, which would take all of its turns."""
    worlds = tuple(range(1, 65))
    goals = Counter(turn(index, worlds, bucket=63).goal for index in range(63, 64 * 8 * len(GOALS), 64))
    assert set(goals) == {goal for goal in GOALS if can_hold(goal, 64, 63)}
    assert goals[Situation.BUCKET_BELOW_WORLD] == max(goals.values())


def test_a_campaign_over_one_world_goes_through_its_goals_in_order() -> None:
    goals = [goal for goal in GOALS if can_hold(goal, 1)]
    assert [turn(index, (1,)).goal for index in range(200)] == [goals[index % len(goals)] for index in range(200)]


def test_no_two_ranks_or_parts_of_a_step_have_the_same_contributor() -> None:
    for made in campaign():
        for plan in steps(made):
            contributors = [contributor for part in plan.parts for contributor in part.contributors]
            assert len(set(contributors)) == made.world * len(plan.parts)


def test_the_input_space_is_covered() -> None:
    """What no situation stands for: domains, exponents, optimizer settings, shapes, announcements, costs."""
    drawn = campaign()
    values = [made.values for made in drawn]
    assert {v.domain for v in values} == set(Domain)
    general = Counter(made.world for made in drawn if made.values.domain is Domain.GENERAL)
    assert all(15 <= general[world] <= 40 for world in WORLDS)
    assert min(v.exponent for v in values) == -133
    assert max(v.exponent for v in values) == 100
    wide = [v.max_k >= 100 for v in values if v.domain is Domain.EXACT]
    assert sum(wide) > 0.7 * len(wide)
    assert {made.optimizer.foreach for made in drawn} == {False, True}
    assert any(made.optimizer.beta1 == 0 for made in drawn)
    assert any(made.optimizer.beta2 == 0 for made in drawn)
    assert {len(p.shape) for made in drawn for p in made.parameters} >= {0, 1, 2, 3, 4, 5, 8}
    assert any(part.more for made in drawn for plan in steps(made) if plan.discard for part in plan.parts[-1:])
    assert not any(plan.parts[-1].more for made in drawn for plan in steps(made) if not plan.discard)
    assert {len(list(steps(made))) for made in drawn} == set(range(1, 7))
    assert {len(plan.parts) for made in drawn for plan in steps(made)} == {1, 2, 3, 4}
    clipped = [plan.clip is not None for made in drawn for plan in steps(made) if not plan.discard]
    assert 0.2 < sum(clipped) / len(clipped) < 0.8
    num_buckets = sorted(math.ceil(made.numel / max(made.bucket, made.world)) for made in drawn)
    assert num_buckets[len(drawn) * 8 // 10] <= 6


def form_of(values: Values) -> Form:
    """What general values look like, from their fields alone."""
    if values.special:
        return Form.NONFINITE if values.nonfinite else Form.EXTREME
    if values.cancel:
        return Form.CANCELLING
    return Form.WIDE if values.spread >= 20 else Form.NORMAL


def test_general_values_of_every_form_appear_at_every_world() -> None:
    """With every width and every rate of special values that the tables have for a form."""
    for world in WORLDS:
        drawn = [draw_scenario(Recorded(Random(seed)), world, FREE, seed, None).values for seed in range(600)]
        general = [values for values in drawn if values.domain is Domain.GENERAL]
        assert 0.25 < len(general) / len(drawn) < 0.42
        count = Counter(form_of(values) for values in general)
        assert all(count[form] > 0.05 * len(general) for form in Form), (world, count)
        for form in Form:
            assert {v.spread for v in general if form_of(v) is form} == set(SPREADS[form])
            specials = {v.special for v in general if form_of(v) is form}
            assert specials == (set(SPECIALS) if form in (Form.EXTREME, Form.NONFINITE) else {0})
        assert min(v.exponent for v in general) < -100
        assert max(v.exponent + v.spread for v in general) == 100


@pytest.mark.parametrize("world", WORLDS)
def test_a_campaign_over_one_world_has_general_values_too(world: int) -> None:
    domains = {draw(1, index, (world,)).values.domain for index in range(40)}
    assert Domain.GENERAL in domains
    assert Domain.EXACT in domains


def test_each_draw_is_the_random_one_and_not_the_simplest_that_hypothesis_tries_first() -> None:
    """Which is told from it by one choice, so that nothing is drawn in vain."""
    drawn = 0
    real = systems.draw_scenario

    def counted(*given: Any) -> Scenario:
        nonlocal drawn
        drawn += 1
        return real(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "draw_scenario", counted)
        made = [draw(21, index, (1,)) for index in range(60)]
    assert drawn == 60
    assert len(set(made)) == 60
    # The simplest choice of each is one of several: half of the scenarios or so have it.
    for simple in (
        lambda one: len(one.parameters) == 1,
        lambda one: len(list(steps(one))) == 1,
        lambda one: one.values.domain is Domain.EXACT,
        lambda one: one.optimizer == AdamW(),
    ):
        assert sum(map(simple, made)) < 48


def test_worlds_are_checked() -> None:
    for worlds in ((), (0, 1)):
        with pytest.raises(ValueError, match="worlds: expected numbers of ranks from 1 up"):
            draw(0, 0, worlds)


@hypothesis.settings(max_examples=20, database=None, deadline=None)
@hypothesis.given(scenarios((2, 3), bucket=5))
def test_the_strategy_serves_given(made: Scenario) -> None:
    assert check(made) is None
    assert made.world in (2, 3)
    assert made.bucket == 5


PROGRAM = """
import hashlib, sys
if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
    import constants
    import hypothesis
    hypothesis.settings.register_profile("mine", max_examples=1, derandomize=True, verbosity=hypothesis.Verbosity.debug)
    hypothesis.settings.load_profile("mine")
from harness.scenario.generate import draw
drawn = [draw(7, index, (1, 2, 3, 4)) for index in range(25)]
print(hashlib.sha256(repr(drawn).encode()).hexdigest())
"""


def test_other_processes_draw_the_same_whatever_their_hash_seed_imports_profile_and_environment(tmp_path: Path) -> None:
    """Also: nothing but the digest is printed, and no example database appears."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "constants.py").write_text("\n".join(f"C{i} = {i}" for i in range(900)))
    digests = []
    for arguments, extra in (([], {"PYTHONHASHSEED": "1"}), ([str(modules)], {"PYTHONHASHSEED": "2", "CI": "true"})):
        environment = {name: value for name, value in os.environ.items() if name != "CI"} | extra
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert ended.stderr == ""
        digests.append(ended.stdout)
    assert digests[0] == digests[1]
    assert len(digests[0]) == 65
    assert [path.name for path in tmp_path.iterdir()] == ["modules"]
