"""What kinds of systems there are, and what of a campaign depends on the kind: situations, goals, what is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.scenario import muon_situations, situations
from harness.scenario.aims import AIMS, FREE, Aim
from harness.scenario.model import CONTRACT, Extension, Scenario, System
from harness.scenario.muon_aims import MUON_AIMS, MUON_FREE
from harness.scenario.muon_situations import MuonSituation
from harness.scenario.muon_space import draw_muon
from harness.scenario.situations import Situation
from harness.scenario.space import Choices, draw_scenario
from harness.verdict import Property

Goal = Situation | MuonSituation

SITUATIONS: dict[System, type[Situation] | type[MuonSituation]] = {"zero_master": Situation, "muon": MuonSituation}
"""All that a campaign over a system of this kind counts, in the order in which they are shown."""

GOALS: dict[System, tuple[Goal, ...]] = {"zero_master": situations.GOALS, "muon": muon_situations.GOALS}
"""What the generator can aim at, in the order in which a campaign takes its goals."""

RUNTIME: dict[System, frozenset[Goal]] = {
    "zero_master": frozenset(situations.RUNTIME),
    "muon": frozenset(muon_situations.RUNTIME),
}
"""What only the running ranks can tell."""

# Muon's subjects promise no formula for what they keep alive.
_NOT_OF_MUON = frozenset({Property.MEMORY})

PROPERTIES: dict[System, tuple[Property, ...]] = {
    "zero_master": tuple(Property),
    "muon": tuple(prop for prop in Property if prop not in _NOT_OF_MUON),
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
    if isinstance(goal, MuonSituation):
        return muon_situations.can_hold(goal, world, space.bucket, space.extension)
    return situations.can_hold(goal, world, space.bucket, space.extension)


def required(worlds: Sequence[int], space: Space) -> tuple[Goal, ...]:
    """The situations that a full campaign over these worlds must reach, in order."""
    everything: Iterable[Goal] = SITUATIONS[space.system]
    return tuple(goal for goal in everything if any(can_hold(goal, world, space) for world in worlds))


def reached(scenario: Scenario) -> frozenset[str]:
    """The situations, by value, that a scenario is in, as far as they can be told without running it."""
    found: Iterable[Goal] = situations.reached(scenario) if scenario.muon is None else muon_situations.reached(scenario)
    return frozenset(goal.value for goal in found)


def aimed(choices: Choices, goal: Goal | None, world: int, seed: int, space: Space, narrow: Narrow) -> Scenario:
    """A scenario with a goal, or (None) a free one."""
    if space.system == "zero_master":
        aim = AIMS[goal] if isinstance(goal, Situation) else FREE
        return draw_scenario(choices, world, narrow(aim), seed, space.bucket, space.extension)
    muon_aim = MUON_AIMS[goal] if isinstance(goal, MuonSituation) else MUON_FREE
    muon_aim = dataclasses.replace(muon_aim, common=narrow(muon_aim.common))
    return draw_muon(choices, world, muon_aim, seed, space.bucket, space.extension)
