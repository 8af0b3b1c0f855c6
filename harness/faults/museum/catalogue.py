"""All exhibits of the bug museum, and which of the public bugs none was made of, and why. No torch."""

from __future__ import annotations

from functools import cache
from typing import Final

from harness.faults.museum.exhibit import Control, Plant
from harness.faults.museum.labels import accumulation, controls, divergence, gather, layout, norm, reduction

__all__ = ["CONTROLS", "LEFT_OUT", "PLANTS", "exhibit", "is_variant_of_zero2"]

_ROOMS: Final = (accumulation, layout, reduction, norm, gather, divergence)

PLANTS: Final[tuple[Plant, ...]] = tuple(plant for room in _ROOMS for plant in room.PLANTS)

CONTROLS: Final[tuple[Control, ...]] = controls.CONTROLS

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


@cache
def _variants_of_zero2() -> frozenset[str]:
    exhibits: tuple[Plant | Control, ...] = (*PLANTS, *CONTROLS)
    return frozenset(each.target for each in exhibits if each.own)


def is_variant_of_zero2(target: str) -> bool:
    """Whether this class, as ``SubjectSource.absolute`` has it, is to be judged by what ``zero2`` promises."""
    return target in _variants_of_zero2()
