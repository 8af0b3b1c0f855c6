"""What all that makes scenarios smaller begins with: fewer of some things, lower numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def without_some(items: Sequence[_T]) -> Iterator[list[_T]]:
    """Without half of them, a quarter, …, without one."""
    length = (len(items) + 1) // 2
    while length:
        for start in range(0, len(items), length):
            yield [*items[:start], *items[start + length :]]
        length //= 2


def lower(number: int) -> list[int]:
    """Some numbers from 1 on that are lower, the lowest first."""
    return sorted({lower for lower in (1, 2, 3, number // 4, number // 2, number - 1) if 1 <= lower < number})
