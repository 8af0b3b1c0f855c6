"""Draws scenarios with Hypothesis.

Goal-directed: each example of a campaign takes one situation as its goal, in turn, which narrows some of its choices
(:mod:`harness.scenario.aims`); the rest is drawn at random. Making a failing one smaller is another matter
(:mod:`harness.scenario.smaller`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random
from typing import NamedTuple, TypeVar, cast

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, configuration, find, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.scenario.aims import Aim, for_fault
from harness.scenario.model import CONTRACT, Extension, Scenario, System
from harness.scenario.space import Choices, draw_fault
from harness.scenario.systems import GOALS, Goal, Narrow, Space, aimed, can_hold

_T = TypeVar("_T")

# Hypothesis begins with the simplest example, for which every choice is the lowest. The first choice is there to tell
# it from the next one, which is random: that has the lowest one time in a million, so there may be a few more.
_MOST = 2**20
_MAX_EXAMPLES = 9  # below ten Hypothesis does not try small ones either

# Numbers are drawn far from zero and shifted back: evenly distributed there. Near zero Hypothesis now and then takes a
# constant out of the source of an imported module instead, so that one more import would give other scenarios for the
# same seed.
_SHIFT = 1 << 170


@functools.lru_cache(maxsize=4096)
def _numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(_SHIFT + low, _SHIFT + high)


class _HypothesisChoices(Choices):
    """Choices made by Hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def _number(self, low: int, high: int) -> int:
        return self._draw(_numbers(low, high)) - _SHIFT

    def group(self, draw: Callable[[Choices], _T]) -> _T:
        _next_group.draw = draw
        return cast(_T, self._draw(_GROUP))


# Hypothesis groups choices by the strategy that makes them. One strategy for all groups, which is told what to draw
# beside it: making a new one for each would be two fifths of the time of drawing a scenario.
class _NextGroup(threading.local):
    draw: Callable[[Choices], object]


_next_group = _NextGroup()


@st.composite
def _group(draw: st.DrawFn) -> object:
    return _next_group.draw(_HypothesisChoices(draw))


_GROUP = _group()


@st.composite
def _drawn(draw: st.DrawFn, make: Callable[[Choices], _T]) -> _T:
    return make(_HypothesisChoices(draw))


def strategy(make: Callable[[Choices], _T]) -> st.SearchStrategy[_T]:
    """A strategy for what ``make`` returns of the choices that it is given."""
    return _drawn(make)


class Turn(NamedTuple):
    """What one example of a campaign is for."""

    world: int
    goal: Goal


def _checked(worlds: Sequence[int]) -> Sequence[int]:
    if not worlds or min(worlds) < 1:
        raise ValueError(f"worlds: expected numbers of ranks from 1 up, got {list(worlds)}")
    return worlds


def as_is(aim: Aim) -> Aim:
    """Asks nothing more."""
    return aim


@st.composite
def _example(draw: st.DrawFn, this: Turn, seed: int, space: Space, fault: bool, narrow: Narrow) -> Scenario | None:
    """None: the simplest example, of which nothing more is drawn."""
    choices = _HypothesisChoices(draw)
    if choices.number(0, _MOST) == 0:
        return None
    exact: Narrow = for_fault if fault else as_is
    scenario = aimed(choices, this.goal, this.world, seed, space, lambda aim: exact(narrow(aim)))
    if fault:
        scenario = msgspec.structs.replace(scenario, faults=(draw_fault(choices, scenario),))
    return scenario


@st.composite
def _scenarios(draw: st.DrawFn, worlds: tuple[int, ...], space: Space) -> Scenario:
    choices = _HypothesisChoices(draw)
    world = choices.of(worlds)
    goal = choices.of((None, *GOALS[space.system]))
    if goal is not None and not can_hold(goal, world, space):
        goal = None
    return aimed(choices, goal, world, choices.number(0, 2**31), space, as_is)


def scenarios(
    worlds: Sequence[int] = (1, 2, 3, 4),
    *,
    bucket: int | None = None,
    extension: Extension = CONTRACT,
    system: System = "zero_master",
) -> st.SearchStrategy[Scenario]:
    """A strategy for use under ``@given``: any world of ``worlds``, any goal or none.

    Args:
        worlds: numbers of ranks to choose from.
        bucket: fixes the requested bucket size (elements).
        extension: what beyond the contract's space may be drawn.
        system: which kind of system they are of.
    """
    return _scenarios(tuple(sorted(set(_checked(worlds)))), Space(system, bucket, extension))


def turn(
    index: int,
    worlds: Sequence[int],
    *,
    bucket: int | None = None,
    extension: Extension = CONTRACT,
    system: System = "zero_master",
) -> Turn:
    """The world and the goal of example number ``index``: worlds go round, and each takes the goal most in need.

    That is one that was aimed at least often so far, of those that the world can have. So the campaign has aimed at
    every goal after as many examples as there are goals, and at any time about as often at one as at another; and each
    world goes through all of its goals, again and again.
    """
    cycle = _cycle(tuple(_checked(worlds)), Space(system, bucket, extension))
    return cycle[index % len(cycle)]


# How often, at least, each world takes each of its goals before the turns begin again.
_ROUNDS = 3
# At most this many times as often as another does a world take one of its goals. Otherwise what few of many worlds can
# have would be all that these ever take.
_MOST_OFTEN = 8


@functools.lru_cache(maxsize=64)
def _cycle(worlds: tuple[int, ...], space: Space) -> tuple[Turn, ...]:
    """All turns, up to where they begin again: so few that the turn of any example is at hand."""
    # Goals by their place in the list: it decides between those equally in need.
    goals = GOALS[space.system]
    places = range(len(goals))
    held = {world: [place for place in places if can_hold(goals[place], world, space)] for world in worlds}
    for world in (world for world in held if not held[world]):
        raise UsageError(
            f"world {world}: no scenario can be drawn for this subject and so many ranks, whose smallest sums need "
            "more bits than it may have; choose worlds with fewer ranks, or a power of two of them"
        )
    num_worlds = [sum(place in held[world] for world in held) for place in places]
    aimed_at = [0] * len(goals)
    taken = {world: [0] * len(goals) for world in worlds}
    cycle: list[Turn] = []
    while any(taken[world][place] < _ROUNDS for world in held for place in held[world]):
        for world in worlds:
            mine = taken[world]
            most = _MOST_OFTEN * (1 + min(mine[place] for place in held[world]))
            needs = ((aimed_at[at], mine[at], num_worlds[at], at) for at in held[world] if mine[at] < most)
            *_, place = min(needs)
            aimed_at[place] += 1
            mine[place] += 1
            cycle.append(Turn(world, goals[place]))
    return tuple(cycle)


@contextlib.contextmanager
def nothing_stored() -> Iterator[None]:
    """Hypothesis stores constants that it finds in source files under ``.hypothesis``: here where nothing can be."""
    before = getattr(configuration, "__hypothesis_home_directory", None)
    configuration.set_hypothesis_home_dir(os.devnull)
    try:
        yield
    finally:
        configuration.set_hypothesis_home_dir(before)


def quietly(examples: int, phases: Collection[Phase], rules: int = 1) -> settings:
    """Settings in which everything is said, so that neither a profile nor the environment (CI) changes anything.

    Args:
        examples: at most.
        phases: of Hypothesis.
        rules: of a state machine, at most.
    """
    return settings(
        max_examples=examples,
        derandomize=False,
        database=None,
        verbosity=Verbosity.quiet,
        phases=phases,
        stateful_step_count=rules,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


def draw(
    seed: int,
    index: int,
    worlds: Sequence[int],
    *,
    bucket: int | None = None,
    fault: bool = False,
    extension: Extension = CONTRACT,
    narrow: Narrow = as_is,
    system: System = "zero_master",
) -> Scenario:
    """Example number ``index`` of the campaign ``seed``: the same arguments give the same scenario.

    Args:
        seed: of the campaign.
        index: from 0.
        worlds: of the campaign, in the order in which they take turns.
        bucket: fixes the requested bucket size (elements).
        fault: with one fault, on exact sums (:func:`harness.scenario.space.draw_fault`).
        extension: what beyond the contract's space may be drawn.
        narrow: what is asked of the scenario beside its goal.
        system: which kind of system it is of.

    Raises:
        ValueError: no worlds, or one below 1; or a fault in a scenario of a system that none are drawn for.
    """
    if fault and system != "zero_master":
        raise ValueError(f"faults are drawn for system 'zero_master' alone, not for {system!r}")
    space = Space(system, bucket, extension)
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=16).digest()
    data_seed = int.from_bytes(digest[:8], "big") >> 1
    this = turn(index, worlds, bucket=bucket, extension=extension, system=system)
    example = _example(this, data_seed, space, fault, narrow)
    random = Random(int.from_bytes(digest[8:], "big"))

    def found(scenario: Scenario | None) -> bool:
        if scenario is not None:
            raise _Found(scenario)
        return False

    with nothing_stored():
        try:
            find(example, found, settings=quietly(_MAX_EXAMPLES, [Phase.generate]), random=random)
        except _Found as carrier:
            return carrier.scenario
    raise RuntimeError("internal error: Hypothesis drew no scenario")


class _Found(BaseException):
    """Carries a scenario out through Hypothesis, which would otherwise draw it once more: a third of the time."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.scenario = scenario
