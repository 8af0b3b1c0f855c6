"""What each fault must turn into: plain data, no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from harness.faults.language import Corrupt, Delay, Duplicate, Fault, Skip, Slow
from harness.scenario.model import Scenario
from harness.verdict import Property, Stage


@dataclass(frozen=True)
class Expectation:
    """What a scenario with a fault must come to.

    Attributes:
        properties: one of them is violated; empty: the scenario holds.
        rank: that is named; None where it holds.
    """

    properties: frozenset[str]
    rank: int | None


HOLDS: Final = Expectation(frozenset(), None)


def _named(*properties: Property) -> frozenset[str]:
    return frozenset(item.value for item in properties)


_STOPS = _named(Property.PROGRESS)
_CALLS_OTHERS = _named(Property.TRAFFIC, Property.PROGRESS)
_VALUES = _named(
    Property.GRADIENT,
    Property.SPILL,
    Property.NORM,
    Property.CLIP,
    Property.MASTER,
    Property.MOMENTS,
    Property.WEIGHTS,
    Property.AGREEMENT,
    Property.OWNERSHIP,
)
# Where a wrong contribution is first compared. In padding (a run of elements may reach it) nobody owns it.
_SHOWN_IN = {
    Stage.REDUCE: _named(Property.GRADIENT, Property.SPILL, Property.OWNERSHIP),
    Stage.NORM: _named(Property.NORM, Property.CLIP),
    Stage.GATHER: _named(Property.WEIGHTS, Property.AGREEMENT),
}


def expectation(fault: Fault, scenario: Scenario) -> Expectation:
    """What ``scenario`` must come to, with ``fault`` as its only one, on a right subject."""
    if fault.rank >= scenario.world:
        raise ValueError(f"{fault}: expected a rank of world {scenario.world}")
    match fault:
        case Slow() | Delay():
            return HOLDS
        case Skip() | Duplicate():
            return Expectation(_CALLS_OTHERS, fault.rank)
        case Corrupt():
            return Expectation(_SHOWN_IN.get(fault.stage, _VALUES), fault.rank)
        case _:
            return Expectation(_STOPS, fault.rank)


def unhit(scenario: Scenario, hits_by_rank: Mapping[int, Collection[int]]) -> list[Fault]:
    """The faults that never struck although nothing kept them from it: then the run shows nothing.

    Args:
        scenario: what was run.
        hits_by_rank: for each rank, the indices of the faults that struck it.
    """
    struck = [index in hits_by_rank.get(fault.rank, ()) for index, fault in enumerate(scenario.faults)]
    for hit, fault in zip(struck, scenario.faults, strict=True):
        if hit and expectation(fault, scenario) != HOLDS:
            return []  # what comes after it may never be reached
    return [fault for hit, fault in zip(struck, scenario.faults, strict=True) if not hit]
