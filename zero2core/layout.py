"""Pure integer arithmetic of the flat layout: buckets, pieces, shards. No tensors, no process groups.

Parameters lie end to end in a flat vector, which is cut into buckets. Every bucket is cut into one equal piece per
rank, and a rank's shard is its pieces in bucket order. Ownership changes at piece edges, not at parameter edges::

    parameters   |--- 0 ---|- 1 -|------- 2 -------|        numel (10, 6, 18), N = 34
    buckets      |----- 0 -----|----- 1 -----|---- 2 --|..  bucket 14 at world 3 -> 12; the last: 10, padded to 12
    pieces       |-0-|-1-|-2-|-0-|-1-|-2-|-0-|-1-|-2-|      4 elements each
    shard of 1   [4, 8) + [16, 20) + [28, 32)

Only the last bucket can be padded, and its padding comes after its elements. So the padding of a shard, if any, is at
the shard's end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Block", "Bucket", "FlatLayout", "Owner", "Segment", "Span", "blocks"]


class Bucket(NamedTuple):
    """Flat range ``[start, end)`` that travels in one collective of ``padded`` elements, a multiple of the world."""

    start: int
    end: int
    padded: int


class Segment(NamedTuple):
    """Flat range ``[start, stop)`` of one rank, without padding; it begins at ``shard_offset`` in the rank's shard."""

    start: int
    stop: int
    shard_offset: int


class Owner(NamedTuple):
    """Where one flat element lives: its bucket, the rank that owns it, its index in that rank's shard."""

    bucket: int
    rank: int
    shard_index: int


class Span(NamedTuple):
    """Elements ``[start, stop)`` of one parameter; they begin at ``offset`` in the flat range that was asked for."""

    parameter: int
    start: int
    stop: int
    offset: int


class Block(NamedTuple):
    """The sub-tensor ``tensor[rows][start:stop]``; it begins at ``offset`` in the range that was asked for."""

    rows: tuple[int, ...]
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """How a flat vector of parameters is dealt out to ranks.

    Attributes:
        numel: elements of each parameter, in list order; zeros are allowed, an empty vector is not.
        world: number of ranks.
        bucket: requested bucket size (elements). Rounded down to a multiple of ``world``, never below ``world``.

    Raises:
        ValueError: no elements at all, a negative count, ``world < 1`` or ``bucket < 1``.
    """

    numel: tuple[int, ...]
    world: int
    bucket: int

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"world={self.world}: at least one rank is needed")
        if self.bucket < 1:
            raise ValueError(f"bucket={self.bucket}: a bucket needs at least one element")
        if any(numel < 0 for numel in self.numel):
            raise ValueError(f"numel={self.numel}: a parameter cannot have a negative number of elements")
        if self.N == 0:
            raise ValueError(f"no elements at all in {len(self.numel)} parameters: nothing to shard")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Prefix sums of ``numel``: parameter i is the flat range ``[offsets[i], offsets[i + 1])``."""
        return tuple(accumulate(self.numel, initial=0))

    @property
    def N(self) -> int:  # noqa: N802 (the specification's name)
        """Elements of the flat vector, without padding."""
        return self.offsets[-1]

    @property
    def bucket_len(self) -> int:
        """Elements of every bucket but the last, which may be shorter."""
        return max(self.bucket // self.world, 1) * self.world

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets in flat order; they cover ``[0, N)`` once."""
        size = self.bucket_len
        cuts = (Bucket(start, min(start + size, self.N), size) for start in range(0, self.N, size))
        *full, last = cuts
        return (*full, last._replace(padded=-(-(last.end - last.start) // self.world) * self.world))

    @property
    def shard_len(self) -> int:
        """Elements of a shard with its padding; the same on every rank."""
        last = len(self.buckets) - 1
        return self.piece_start(last) + self.piece_len(last)

    def piece_len(self, bucket: int) -> int:
        """Elements of one rank's piece of bucket number ``bucket``, padding included."""
        return self.buckets[bucket].padded // self.world

    def piece_start(self, bucket: int) -> int:
        """Where the piece of bucket number ``bucket`` begins in a shard; the same on every rank."""
        return bucket * (self.bucket_len // self.world)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """What ``rank`` owns of ``[0, N)``, in flat order. Pieces that are all padding are left out."""
        owned = []
        for index, (start, end, _) in enumerate(self.buckets):
            length = self.piece_len(index)
            piece = Segment(start + rank * length, min(start + (rank + 1) * length, end), self.piece_start(index))
            if piece.start < piece.stop:
                owned.append(piece)
        return tuple(owned)

    def num_owned(self, rank: int) -> int:
        """Elements of the shard of ``rank`` that are not padding: the shard's first ones."""
        return sum(segment.stop - segment.start for segment in self.segments(rank))

    def owner(self, element: int) -> Owner:
        """Where flat element ``element`` lives. Raises ``IndexError`` outside ``[0, N)``."""
        if not 0 <= element < self.N:
            raise IndexError(f"element {element} is outside the flat vector of {self.N} elements")
        bucket = element // self.bucket_len
        rank, inside = divmod(element - self.buckets[bucket].start, self.piece_len(bucket))
        return Owner(bucket, rank, self.piece_start(bucket) + inside)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The pieces of parameters that make up the flat range ``[start, stop)``, in order; zero-size ones never do."""
        if start >= stop:
            return
        # The last parameter that begins at or before `start`: zero-size ones before it begin there too, and end there.
        parameter = bisect_right(self.offsets, start) - 1
        while parameter < len(self.numel) and self.offsets[parameter] < stop:
            begin = self.offsets[parameter]
            low, high = max(start, begin), min(stop, begin + self.numel[parameter])
            if low < high:
                yield Span(parameter, low - begin, high - begin, low - start)
            parameter += 1


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    """Cut elements ``[start, stop)``, counted in row-major order, of a tensor of ``shape`` into sub-tensors.

    Each is a basic-indexing view whatever the strides, so a range of a transposed tensor is read or written in place,
    without a row-major copy of the whole. At most ``2 * len(shape) - 1`` blocks. ``shape`` has at least one dimension.
    """
    if start >= stop:
        return
    inner = math.prod(shape[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if skipped == 0 and rest == 0:
        yield Block((), first, last, 0)
    elif first == last:
        yield from _inside_row(shape, first, skipped, rest, 0)
    else:
        done = 0
        if skipped:
            yield from _inside_row(shape, first, skipped, inner, 0)
            first, done = first + 1, inner - skipped
        if first < last:
            yield Block((), first, last, done)
        yield from _inside_row(shape, last, 0, rest, done + (last - first) * inner)


def _inside_row(shape: tuple[int, ...], row: int, start: int, stop: int, offset: int) -> Iterator[Block]:
    for block in blocks(shape[1:], start, stop):
        yield Block((row, *block.rows), block.start, block.stop, offset + block.offset)
