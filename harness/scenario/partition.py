"""Who owns which element: the layout of ``spec/zero_master.md`` ("Layout") as plain integer arithmetic.

Written from the specification and independent of the systems it judges. The parameters lie end to end in a flat vector
of N elements, cut into buckets. A bucket is padded to a multiple of the world W and cut into W equal pieces; rank r
owns the r-th piece of every bucket, and its shard is its pieces in bucket order. All lengths and positions count
elements.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Bucket(NamedTuple):
    """Flat elements ``[start, end)``, padded to ``padded`` elements (padding follows the last element)."""

    start: int
    end: int
    padded: int

    @property
    def length(self) -> int:
        """Elements without padding."""
        return self.end - self.start


class Segment(NamedTuple):
    """Flat elements ``[start, stop)``, which lie in the owner's shard from ``shard_start`` on."""

    start: int
    stop: int
    shard_start: int


def round_bucket(bucket: int, world: int) -> int:
    """The bucket size used for a requested one: rounded down to a multiple of ``world``, never below ``world``."""
    return max(bucket - bucket % world, world)


@dataclass(frozen=True)
class Partition:
    """``numel`` flat elements in ``buckets``, sharded over ``world`` ranks.

    Only of use when :meth:`problem` is None, which it always is for :meth:`from_request`.
    """

    world: int
    numel: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def from_request(cls, numel: int, world: int, bucket: int) -> Partition:
        """The layout the specification prescribes for a requested bucket size.

        Raises:
            ValueError: ``numel``, ``world`` or ``bucket`` is below 1.
        """
        if numel < 1 or world < 1 or bucket < 1:
            raise ValueError(f"numel, world and bucket must be at least 1, got {numel}, {world} and {bucket}")
        size = round_bucket(bucket, world)
        buckets = []
        for start in range(0, numel, size):
            end = min(start + size, numel)
            buckets.append(Bucket(start, end, end - start + (start - end) % world))
        return cls(world, numel, tuple(buckets))

    @classmethod
    def from_subject(cls, numel: int, world: int, buckets: object) -> Partition | None:
        """The layout a subject states in its ``buckets``; None when that is no sequence of three integers each.

        The numbers are taken as they are: ask :meth:`problem` before anything else.
        """
        if not isinstance(buckets, Sequence) or isinstance(buckets, str | bytes):
            return None
        stated = []
        for entry in buckets:
            if not isinstance(entry, Sequence) or len(entry) != 3:
                return None
            try:
                start, end, padded = map(operator.index, entry)
            except TypeError:
                return None
            stated.append(Bucket(start, end, padded))
        return cls(world, numel, tuple(stated))

    def problem(self) -> str | None:
        """Why this is no layout of ``[0, numel)`` over ``world`` ranks; None when it is one.

        Any order of the buckets, and padding in any of them, is a layout.
        """
        for index, bucket in enumerate(self.buckets):
            if bucket.start < 0 or bucket.end < bucket.start:
                return f"bucket {index} runs from {bucket.start} to {bucket.end}"
            if bucket.padded < bucket.length:
                return f"bucket {index} has {bucket.length} elements, but a padded length of {bucket.padded}"
            if bucket.padded % self.world:
                return f"bucket {index} has a padded length of {bucket.padded}, no multiple of {self.world} ranks"
        reached = 0
        for index in self._by_start:
            bucket = self.buckets[index]
            if bucket.start > reached:
                return f"no bucket holds the elements from {reached} to {bucket.start}"
            if bucket.start < reached:
                return f"bucket {index} starts at {bucket.start}, but buckets hold the elements below {reached} already"
            reached = bucket.end
        if reached < self.numel:
            return f"no bucket holds the elements from {reached} to {self.numel}"
        if reached > self.numel:
            return f"the buckets end at {reached}, but there are {self.numel} elements"
        return None

    @cached_property
    def _by_start(self) -> tuple[int, ...]:
        """Indices of the buckets that hold elements, by position in the flat vector."""
        holding = [index for index, bucket in enumerate(self.buckets) if bucket.end != bucket.start]
        return tuple(sorted(holding, key=lambda index: self.buckets[index]))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(self.buckets[index].start for index in self._by_start)

    @cached_property
    def shard_len(self) -> int:
        """Elements of a shard with its padding, the same on every rank."""
        return sum(bucket.padded for bucket in self.buckets) // self.world

    def piece_len(self, bucket: int) -> int:
        """Elements of one piece of bucket number ``bucket``, padding included."""
        return self.buckets[bucket].padded // self.world

    def piece(self, bucket: int, rank: int) -> tuple[int, int]:
        """Flat range ``(start, stop)`` of a rank's piece without padding; ``start == stop`` when it is all padding."""
        cut = self.buckets[bucket]
        size = self.piece_len(bucket)
        start = cut.start + rank * size
        return min(start, cut.end), min(start + size, cut.end)

    def owner(self, flat: int) -> tuple[int, int]:
        """``(bucket, rank)`` of one flat element.

        Raises:
            ValueError: no such element.
        """
        if not 0 <= flat < self.numel:
            raise ValueError(f"element {flat} of {self.numel}")
        index = self._by_start[bisect.bisect_right(self._starts, flat) - 1]
        return index, (flat - self.buckets[index].start) // self.piece_len(index)

    def segments(self, rank: int) -> list[Segment]:
        """The flat ranges a rank owns, padding and empty ones left out, in the order of its shard."""
        found = []
        offset = 0
        for index in range(len(self.buckets)):
            start, stop = self.piece(index, rank)
            if start != stop:
                found.append(Segment(start, stop, offset))
            offset += self.piece_len(index)
        return found

    def padding(self, rank: int) -> list[tuple[int, int]]:
        """The ranges ``(start, stop)`` of a rank's shard that are padding, in order; empty ones left out."""
        found = []
        offset = 0
        for index in range(len(self.buckets)):
            start, stop = self.piece(index, rank)
            size = self.piece_len(index)
            if stop - start < size:
                found.append((offset + stop - start, offset + size))
            offset += size
        return found
