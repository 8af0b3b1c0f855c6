"""What kinds of systems there are, and what of a campaign depends on the kind: situations, goals, what is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.scenario import muon_situations, situations, strategy_situations
from harness.scenario.aims import AIMS, FREE, Aim
from harness.scenario.model import CONTRACT, Extension, Scenario, System
from harness.scenario.muon_aims import MUON_AIMS, MUON_FREE
from harness.scenario.muon_situations import MuonSituation
from harness.scenario.muon_space import draw_muon
from harness.scenario.situations import Situation
from harness.scenario.space import Choices, draw_scenario
from harness.scenario.strategy_aims import STRATEGY_AIMS, STRATEGY_FREE
from harness.scenario.strategy_situations import StrategySituation
from harness.scenario.strategy_space import draw_strategy
from harness.verdict import Property

Goal = Situation | MuonSituation | StrategySituation

SITUATIONS: dict[System, type[Situation] | type[MuonSituation] | type[StrategySituation]] = {
    "zero_master": Situation,
    "muon": MuonSituation,
    "strategy": StrategySituation,
}
"""All that a campaign over a system of this kind counts, in the order in which they are shown."""

GOALS: dict[System, tuple[Goal, ...]] = {
    "zero_master": situations.GOALS,
    "muon": muon_situations.GOALS,
    "strategy": strategy_situations.GOALS,
}
"""What the generator can aim at, in the order in which a campaign takes its goals."""

RUNTIME: dict[System, frozenset[Goal]] = {
    "zero_master": frozenset(situations.RUNTIME),
    "muon": frozenset(muon_situations.RUNTIME),
    "strategy": frozenset(strategy_situations.RUNTIME),
}
"""What only the running ranks can tell."""

# Subjects of these promise no formula for what they keep alive.
_NOT_OF: dict[System, frozenset[Property]] = {
    "zero_master": frozenset(),
    "muon": frozenset({Property.MEMORY}),
    "strategy": frozenset({Property.MEMORY}),
}

PROPERTIES: dict[System, tuple[Property, ...]] = {
    system: tuple(prop for prop in Property if prop not in left_out) for system, left_out in _NOT_OF.items()
}
"""What every subject of this kind is asked for, so what a full campaign must have checked at least once."""

Narrow = Callable[[Aim], Aim]
"""Asks more of a scenario than its goal does, never anything that the goal cannot have."""


class Space(NamedTuple):
    """Which scenarios are drawn: of which kind of system, with what beyond the contract.

    ``bucket``: fixes the requested bucket size (elements).
    """

    system: System = "zero_master"
    bucket: int | None = None
    extension: Extension = CONTRACT


def can_hold(goal: Goal, world: int, space: Space) -> bool:
    """Whether a scenario of this world can be drawn that has the goal."""
    if isinstance(goal, StrategySituation):
        return strategy_situations.can_hold(goal, world, space.bucket, space.extension)
    if isinstance(goal, MuonSituation):
        return muon_situations.can_hold(goal, world, space.bucket, space.extension)
    return situations.can_hold(goal, world, space.bucket, space.extension)


def required(worlds: Sequence[int], space: Space) -> tuple[Goal, ...]:
    """The situations that a full campaign over these worlds must reach, in order."""
    everything: Iterable[Goal] = SITUATIONS[space.system]
    return tuple(goal for goal in everything if any(can_hold(goal, world, space) for world in worlds))


def reached(scenario: Scenario) -> frozenset[str]:
    """The situations, by value, that a scenario is in, as far as they can be told without running it."""
    found: Iterable[Goal]
    if scenario.strategy is not None:
        found = strategy_situations.reached(scenario)
    elif scenario.muon is not None:
        found = muon_situations.reached(scenario)
    else:
        found = situations.reached(scenario)
    return frozenset(goal.value for goal in found)


def aimed(choices: Choices, goal: Goal | None, world: int, seed: int, space: Space, narrow: Narrow) -> Scenario:
    """A scenario with a goal, or (None) a free one."""
    if space.system == "zero_master":
        aim = AIMS[goal] if isinstance(goal, Situation) else FREE
        return draw_scenario(choices, world, narrow(aim), seed, space.bucket, space.extension)
    if space.system == "strategy":
        strategy_aim = STRATEGY_AIMS[goal] if isinstance(goal, StrategySituation) else STRATEGY_FREE
        strategy_aim = dataclasses.replace(strategy_aim, common=narrow(strategy_aim.common))
        return draw_strategy(choices, world, strategy_aim, seed, space.bucket, space.extension)
    muon_aim = MUON_AIMS[goal] if isinstance(goal, MuonSituation) else MUON_FREE
    muon_aim = dataclasses.replace(muon_aim, common=narrow(muon_aim.common))
    return draw_muon(choices, world, muon_aim, seed, space.bucket, space.extension)
