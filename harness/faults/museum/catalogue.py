"""All exhibits of the bug museum, and which of the public bugs none was made of, and why. No torch."""

from __future__ import annotations

from functools import cache
from typing import Final

from harness.faults.museum.exhibit import Control, Plant
from harness.faults.museum.labels import (
    accumulation,
    controls,
    controls_muon,
    controls_strategies,
    divergence,
    gather,
    layout,
    muon_reduction,
    muon_update,
    muon_weights,
    norm,
    reduction,
    strategy_clip,
    strategy_dedicated,
    strategy_own,
    strategy_sync,
    strategy_weights,
)

__all__ = ["CONTROLS", "LEFT_OUT", "PLANTS", "builtin_of", "exhibit"]

_ROOMS: Final = (
    accumulation, layout, reduction, norm, gather, divergence,
    muon_update, muon_reduction, muon_weights,
    strategy_clip, strategy_sync, strategy_weights, strategy_dedicated, strategy_own,
)  # fmt: skip

PLANTS: Final[tuple[Plant, ...]] = tuple(plant for room in _ROOMS for plant in room.PLANTS)

CONTROLS: Final[tuple[Control, ...]] = (*controls.CONTROLS, *controls_muon.CONTROLS, *controls_strategies.CONTROLS)

LEFT_OUT: Final[dict[str, str]] = {bug: why for room in _ROOMS for bug, why in room.LEFT_OUT.items()}
"""Public bug, as ``owner/repository#number`` -> why no plant was made of it."""


@cache
def _by_id() -> dict[str, Plant | Control]:
    exhibits: tuple[Plant | Control, ...] = (*PLANTS, *CONTROLS)
    return {each.id: each for each in exhibits}


def exhibit(name: str) -> Plant | Control | None:
    """The exhibit of this id; None if there is none."""
    return _by_id().get(name)


def names() -> list[str]:
    """The ids of all exhibits."""
    return list(_by_id())


_BUILTIN: Final = {"zero_master": "zero2", "muon": "muon"}
"""System -> the built-in subject of it, of which variants are, where there is one alone."""


@cache
def _variants() -> dict[str, str]:
    exhibits: tuple[Plant | Control, ...] = (*PLANTS, *CONTROLS)
    return {each.target: each.builtin or _BUILTIN[each.system] for each in exhibits if each.own}


def builtin_of(target: str) -> str | None:
    """The built-in subject whose promises this class, as ``SubjectSource.absolute`` has it, is to be judged by; None
    where it is judged by the contract of classes alone."""
    return _variants().get(target)
