"""Draws and shrinks scenarios with Hypothesis.

Goal-directed: each example of a campaign takes one situation as its goal, in turn, which narrows some of its choices
(:mod:`harness.scenario.aims`); the rest is drawn at random.

The first two choices are there for shrinking: a *slot*, of which the lowest mean the smaller worlds of the campaign and
all others the intended world, and whether the goal is aimed at. Drawing passes over the few examples that miss.
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

from harness.scenario.aims import AIMS, ANYTHING, FREE, for_fault
from harness.scenario.model import Scenario
from harness.scenario.situations import GOALS, Situation, can_hold
from harness.scenario.space import Choices, draw_fault, draw_scenario

_T = TypeVar("_T")

# Few of the slots mean another world and one of them drops the goal: so nine examples always hold one that does not
# miss, and below ten Hypothesis does not try small ones first. A range up to 127 is drawn evenly.
_LAST_SLOT = 127
_MAX_SMALLER_WORLDS = 6
_MAX_EXAMPLES = 9

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


class Turn(NamedTuple):
    """What one example of a campaign is for."""

    world: int
    goal: Situation


def _checked(worlds: Sequence[int]) -> Sequence[int]:
    if not worlds or min(worlds) < 1:
        raise ValueError(f"worlds: expected numbers of ranks from 1 up, got {list(worlds)}")
    return worlds


class _Attempt(NamedTuple):
    intended: bool
    scenario: Scenario


@st.composite
def _attempts(
    draw: st.DrawFn, turn: Turn, worlds: tuple[int, ...], seed: int, bucket: int | None, fault: bool
) -> _Attempt:
    choices = _HypothesisChoices(draw)
    smaller = sorted({world for world in worlds if world < turn.world})[:_MAX_SMALLER_WORLDS]
    slot = choices.number(0, _LAST_SLOT)
    aimed = choices.number(0, _LAST_SLOT) > 0
    world = smaller[slot] if slot < len(smaller) else turn.world
    aim = AIMS[turn.goal] if aimed and can_hold(turn.goal, world, bucket) else ANYTHING
    scenario = draw_scenario(choices, world, for_fault(aim) if fault else aim, seed, bucket)
    if fault:
        scenario = msgspec.structs.replace(scenario, faults=(draw_fault(choices, scenario),))
    return _Attempt(aimed and world == turn.world, scenario)


@st.composite
def _scenarios(draw: st.DrawFn, worlds: tuple[int, ...], bucket: int | None) -> Scenario:
    choices = _HypothesisChoices(draw)
    world = choices.of(worlds)
    goal = choices.of((None, *GOALS))
    aim = AIMS[goal] if goal is not None and can_hold(goal, world, bucket) else FREE
    return draw_scenario(choices, world, aim, choices.number(0, 2**31), bucket)


def scenarios(worlds: Sequence[int] = (1, 2, 3, 4), *, bucket: int | None = None) -> st.SearchStrategy[Scenario]:
    """A strategy for use under ``@given``: any world of ``worlds``, any goal or none.

    Args:
        worlds: numbers of ranks to choose from.
        bucket: fixes the requested bucket size (elements).
    """
    return _scenarios(tuple(sorted(set(_checked(worlds)))), bucket)


def turn(index: int, worlds: Sequence[int], *, bucket: int | None = None) -> Turn:
    """The world and the goal of example number ``index``: worlds go round, and each world goes through all goals.

    The worlds start at different goals, so that a short campaign aims at as many different ones as it can.
    """
    lap, place = divmod(index, len(_checked(worlds)))
    world = worlds[place]
    goals = [goal for goal in GOALS if can_hold(goal, world, bucket)]
    return Turn(world, goals[(lap + place * len(goals) // len(worlds)) % len(goals)])


@contextlib.contextmanager
def _nothing_stored() -> Iterator[None]:
    """Hypothesis stores constants that it finds in source files under ``.hypothesis``: here where nothing can be."""
    before = getattr(configuration, "__hypothesis_home_directory", None)
    configuration.set_hypothesis_home_dir(os.devnull)
    try:
        yield
    finally:
        configuration.set_hypothesis_home_dir(before)


def _find(
    condition: Callable[[_Attempt], bool],
    phases: Collection[Phase],
    seed: int,
    index: int,
    worlds: Sequence[int],
    bucket: int | None,
    fault: bool,
) -> Scenario:
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=16).digest()
    data_seed = int.from_bytes(digest[:8], "big") >> 1
    strategy = _attempts(turn(index, worlds, bucket=bucket), tuple(worlds), data_seed, bucket, fault)
    # Everything is said, so that neither a profile nor the environment (CI) changes anything.
    quiet = settings(
        max_examples=_MAX_EXAMPLES,
        derandomize=False,
        database=None,
        verbosity=Verbosity.quiet,
        phases=phases,
        stateful_step_count=1,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )
    random = Random(int.from_bytes(digest[8:], "big"))
    with _nothing_stored():
        return find(strategy, condition, settings=quiet, random=random).scenario


def draw(
    seed: int,
    index: int,
    worlds: Sequence[int],
    *,
    bucket: int | None = None,
    fault: bool = False,
) -> Scenario:
    """Example number ``index`` of the campaign ``seed``: the same arguments give the same scenario.

    Args:
        seed: of the campaign.
        index: from 0.
        worlds: of the campaign, in the order in which they take turns.
        bucket: fixes the requested bucket size (elements).
        fault: with one fault, on exact sums (:func:`harness.scenario.space.draw_fault`).

    Raises:
        ValueError: no worlds, or one below 1.
    """

    def condition(attempt: _Attempt) -> bool:
        if attempt.intended:
            raise _Found(attempt.scenario)
        return False

    try:
        return _find(condition, [Phase.generate], seed, index, worlds, bucket, fault)
    except _Found as found:
        return found.scenario


class _Found(BaseException):
    """Carries a scenario out through Hypothesis, which would otherwise draw it once more: a third of the time."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.scenario = scenario


class _PredicateError(BaseException):
    """Carries an error out through Hypothesis, which would take it for a failure of the example."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def shrink(
    seed: int,
    index: int,
    worlds: Sequence[int],
    fails: Callable[[Scenario], bool],
    *,
    bucket: int | None = None,
    fault: bool = False,
) -> Scenario:
    """The simplest scenario found that still fails, from the one that :func:`draw` gives for the same arguments.

    Args:
        seed: as for :func:`draw`, like ``index``, ``worlds`` and ``bucket``.
        index: see there.
        worlds: see there.
        fails: whether a scenario fails. Called once for each scenario tried, not for the first, which is taken to
            fail. Whatever it raises ends the shrinking and passes through; the caller then knows the best so far.
        bucket: see there.
        fault: see there; every scenario tried has a fault too.
    """
    first = draw(seed, index, worlds, bucket=bucket, fault=fault)
    verdicts = {first: True}
    met_first = False

    def condition(attempt: _Attempt) -> bool:
        nonlocal met_first
        scenario = attempt.scenario
        if attempt.intended and not met_first:
            met_first = True
            if scenario != first:
                raise _PredicateError(RuntimeError(f"internal error: example {index} of seed {seed} was drawn anew"))
        if scenario not in verdicts:
            # The examples that drawing passes over are tried too: they are simple ones, and an answer that changed
            # later would look to Hypothesis like a test that depends on chance.
            try:
                verdicts[scenario] = fails(scenario)
            except Exception as error:
                raise _PredicateError(error) from error
        return verdicts[scenario]

    try:
        return _find(condition, [Phase.generate, Phase.shrink], seed, index, worlds, bucket, fault)
    except _PredicateError as carrier:
        raise carrier.error from carrier.error.__cause__
