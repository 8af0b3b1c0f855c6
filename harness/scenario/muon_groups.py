"""Groups of ranks that a colour may have, and by what gradients are then divided.

A mean is exact where every integer is a multiple of the divisor's odd part; the integers of all contributions must stay
within eight bits. So only such groups are drawn as need a small common multiple.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from harness.scenario.muon import Color
from harness.scenario.muon_check import odd_part

Groups = tuple[tuple[int, ...], ...]

MOST_MULTIPLE: Final = 85
"""So that integers of a gradient are multiples of it from -3 to 3 at least."""


class Layout(enum.IntEnum):
    """How the groups of a colour lie in the world."""

    ALL = 0  # one group of all ranks
    EQUAL = 1  # several of the same size, all ranks in them
    UNEQUAL = 2  # several, not all of the same size, all ranks in them
    OUTSIDE = 3  # a rank is in none


def multiple_of(parts: Iterable[Fraction | int]) -> int:
    """The smallest integer whose mean over each of these divisors is exact."""
    return math.lcm(1, *(odd_part(Fraction(part)) for part in parts))


@functools.lru_cache(maxsize=512)
def layouts(world: int, layout: Layout, multiple: int) -> tuple[Groups, ...]:
    """All groups of a kind that keep the common multiple small, ``multiple`` being what it is without them."""
    most = max(MOST_MULTIPLE, multiple)
    return tuple(
        groups
        for groups in _groups(world)
        if _layout(groups, world) is layout and math.lcm(multiple, multiple_of(map(len, groups))) <= most
    )


def divisors(world: int, multiple: int) -> tuple[float, ...]:
    """Divisors other than the sizes of groups that keep the common multiple small."""
    most = max(MOST_MULTIPLE, multiple)
    candidates = dict.fromkeys((2.0, 1.0, 0.5, float(world), 4.0, 3.0))
    return tuple(each for each in candidates if math.lcm(multiple, multiple_of([Fraction(each)])) <= most)


@functools.lru_cache(maxsize=64)
def _groups(world: int) -> tuple[Groups, ...]:
    """Those that are drawn: two halves at any rank, as many as fit of any size, every n-th, some without the rest."""
    ranks = tuple(range(world))
    found: dict[Groups, None] = {(ranks,): None}
    for size in range(1, world):
        first, second = ranks[:size], ranks[size:]
        chunks = tuple(ranks[start : start + size] for start in range(0, world, size))
        strided = tuple(ranks[start::size] for start in range(size))
        for groups in ((first, second), chunks, strided, (first,), (second,), chunks[:-1], strided[:-1]):
            if groups:
                found[groups] = None
    return tuple(found)


def _layout(groups: Groups, world: int) -> Layout:
    if sum(map(len, groups)) < world:
        return Layout.OUTSIDE
    if len(groups) == 1:
        return Layout.ALL
    return Layout.EQUAL if len({*map(len, groups)}) == 1 else Layout.UNEQUAL


def has(color: Color, world: int, layout: Layout) -> bool:
    """Whether the groups of a colour lie so."""
    return _layout(color.groups, world) is layout
