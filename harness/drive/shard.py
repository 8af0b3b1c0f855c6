"""Compare one rank's shard with a reference that lies in parameter coordinates, and say where they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.oracles.compare import Mismatch, compare_bits, dense, raw, same_bytes
from harness.oracles.contributions import Interval
from harness.scenario.model import Scenario
from harness.scenario.partition import Partition

# Pieces are put together to vectors of about this many elements before they are compared: few calls for a small
# scenario, bounded temporaries for a large one.
_CHUNK = 2**20


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of one flat parameter, which lie in the shard from ``shard_start`` on."""

    parameter: int
    start: int
    stop: int
    shard_start: int

    @property
    def length(self) -> int:
        """Its number of elements."""
        return self.stop - self.start


class Difference(NamedTuple):
    """Outcome of a comparison in parameter coordinates; ``mismatch`` None: all of ``compared`` elements are equal.

    ``bound`` is the rounding bound that was exceeded, where there is one; ``margin`` the largest error of all elements
    in terms of its bound, where they were compared with bounds.
    """

    compared: int
    mismatch: Mismatch | None = None
    parameter: int | None = None
    element: int | None = None
    bucket: int | None = None
    owner: int | None = None
    bound: float | None = None
    margin: float | None = None

    def fields(self, scenario: Scenario) -> dict[str, Any]:
        """The fields of a :class:`harness.verdict.Divergence` that say where and what."""
        found = self.mismatch
        if found is None or self.parameter is None:
            return {}
        return {
            "parameter": scenario.parameters[self.parameter].name,
            "index": self.parameter,
            "element": self.element,
            "offset": sum(each.numel for each in scenario.parameters[: self.parameter]) + (self.element or 0),
            "bucket": self.bucket,
            "owner": self.owner,
            "expected": found.expected,
            "actual": found.actual,
            "expected_bits": found.expected_bits,
            "actual_bits": found.actual_bits,
            "ulps": found.ulps,
            "mismatches": found.count,
        }


class ShardMap:
    """Which elements of which parameters a rank's shard holds, and where; ``num_elements`` without padding."""

    def __init__(self, scenario: Scenario, partition: Partition, rank: int, device: torch.device) -> None:
        self.partition = partition
        self.rank = rank
        self.device = device
        self._offsets = [0, *accumulate(parameter.numel for parameter in scenario.parameters)]
        self._pieces = list(self._cut())
        self.num_elements = sum(piece.length for piece in self._pieces)
        self._chunks = list(_chunks(self._pieces))
        self._byte_spans = [
            (4 * at, 4 * (at + stop - start), 4 * start, 4 * stop)
            for start, stop, at in ((one.start, one.stop, one.shard_start) for one in partition.segments(rank))
        ]
        padding = [position for span in partition.padding(rank) for position in range(*span)]
        self._padding = torch.tensor(padding, dtype=torch.int64, device=device) if padding else None

    def _cut(self) -> Iterator[Piece]:
        parameter = 0
        for segment in self.partition.segments(self.rank):
            position = segment.start
            while position < segment.stop:
                while self._offsets[parameter + 1] <= position:
                    parameter += 1
                while self._offsets[parameter] > position:  # buckets need not be in order
                    parameter -= 1
                first = self._offsets[parameter]
                stop = min(segment.stop, self._offsets[parameter + 1], position + _CHUNK)
                yield Piece(parameter, position - first, stop - first, segment.shard_start + position - segment.start)
                position = stop

    def compare(
        self, shard: Tensor, expected: Callable[[int], Tensor], *, signed_zeros: bool, flat: bytes | None = None
    ) -> Difference:
        """Compare a shard-sized vector with ``expected(parameter index)`` (any shape), bit by bit, padding apart.

        ``flat``: the bytes of everything that is expected, end to end (fp32), where they are there: a quicker look.
        """
        same = self._same_bytes(shard, expected) if flat is None else self._same_flat(shard, flat)
        if same:
            return Difference(self.num_elements)
        compared = count = 0
        first: tuple[Mismatch, Piece, int] | None = None
        for chunk in self._chunks:
            wanted = _joined([expected(piece.parameter).view(-1)[piece.start : piece.stop] for piece in chunk])
            seen = _joined([shard[piece.shard_start : piece.shard_start + piece.length] for piece in chunk])
            outcome = compare_bits(wanted, seen, signed_zeros=signed_zeros)
            compared += outcome.compared
            if outcome.mismatch is not None:
                count += outcome.mismatch.count
                if first is None:
                    first = (outcome.mismatch, *_locate(chunk, outcome.mismatch.index))
        if first is None:
            return Difference(compared)
        mismatch, piece, element = first
        bucket, owner = self.partition.owner(self._offsets[piece.parameter] + element)
        return Difference(compared, dataclasses.replace(mismatch, count=count), piece.parameter, element, bucket, owner)

    def _same_bytes(self, shard: Tensor, expected: Callable[[int], Tensor]) -> bool:
        """Whether all is equal and nothing needs a closer look; also False where it cannot be told in this way."""
        if not dense(shard, self.partition.shard_len):
            return False
        for piece in self._pieces:
            parameter = expected(piece.parameter)
            numel = self._offsets[piece.parameter + 1] - self._offsets[piece.parameter]
            if not dense(parameter, numel) or parameter.dtype != shard.dtype:
                return False
            if not same_bytes(parameter, piece.start, shard, piece.shard_start, piece.length):
                return False
        return True

    def _same_flat(self, shard: Tensor, flat: bytes) -> bool:
        """The same, given all of the expected bytes."""
        if shard.dtype != torch.float32 or not dense(shard, self.partition.shard_len):
            return False
        seen = raw(shard, 0, self.partition.shard_len)
        return all(seen[begin:end] == flat[first:last] for begin, end, first, last in self._byte_spans)

    def compare_whole(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Difference:
        """Compare all parameters, whole, bit by bit (signed zeros count)."""
        if _all_same_bytes(actual, expected):
            return Difference(self.partition.numel)
        compared = count = 0
        first: tuple[Mismatch, int, int] | None = None
        for run in _runs(expected):
            wanted = _joined([expected[index].view(-1) for index in run])
            seen = _joined([actual[index].detach().reshape(-1) for index in run])
            outcome = compare_bits(wanted, seen, signed_zeros=True)
            compared += outcome.compared
            if outcome.mismatch is not None:
                count += outcome.mismatch.count
                if first is None:
                    whole = [Piece(index, 0, expected[index].numel(), 0) for index in run]
                    piece, element = _locate(whole, outcome.mismatch.index)
                    first = (outcome.mismatch, piece.parameter, element)
        if first is None:
            return Difference(compared)
        mismatch, parameter, element = first
        bucket, owner = self.partition.owner(self._offsets[parameter] + element)
        return Difference(compared, dataclasses.replace(mismatch, count=count), parameter, element, bucket, owner)

    def beyond(self, shard: Tensor, intervals: Callable[[int], Interval]) -> Difference:
        """Compare with what any order of addition can give: the first element outside its interval."""
        compared = count = 0
        margin = 0.0
        found: tuple[Piece, int, float, float, float] | None = None
        for piece in self._pieces:
            interval = intervals(piece.parameter)
            center = torch.from_numpy(interval.center[piece.start : piece.stop])
            bound = torch.from_numpy(interval.bound[piece.start : piece.stop])
            overflows = torch.from_numpy(interval.overflows[piece.start : piece.stop])
            seen = shard[piece.shard_start : piece.shard_start + piece.length].cpu().double()
            same = (seen == center) | (seen.isnan() & center.isnan())
            overflowed = overflows & (seen.isnan() | (seen.isinf() & center.isfinite()))
            errors = (seen - center).abs()
            outside = ~(same | overflowed | (errors <= bound))
            shares = (errors / bound)[(bound > 0) & errors.isfinite()]
            margin = max(margin, float(shares.max()) if shares.numel() else 0.0)
            compared += piece.length
            inside_count = int(outside.sum())
            if inside_count and found is None:
                at = int(outside.to(torch.uint8).argmax())
                found = (piece, piece.start + at, float(center[at]), float(seen[at]), float(bound[at]))
            count += inside_count
        if found is None:
            return Difference(compared, margin=margin)
        piece, element, center_value, seen_value, limit = found
        bucket, owner = self.partition.owner(self._offsets[piece.parameter] + element)
        bits = compare_bits(
            torch.tensor([center_value], dtype=torch.float32),
            torch.tensor([seen_value], dtype=torch.float32),
            signed_zeros=False,
        ).mismatch
        mismatch = None if bits is None else dataclasses.replace(bits, count=count)
        return Difference(compared, mismatch, piece.parameter, element, bucket, owner, limit, margin)

    def flat(self, shards: Sequence[Tensor]) -> Tensor:
        """All ranks' shards put back together: a new fp32 vector of all elements."""
        flat = torch.empty(self.partition.numel, dtype=torch.float32, device=self.device)
        for rank, shard in enumerate(shards):
            for segment in self.partition.segments(rank):
                length = segment.stop - segment.start
                flat[segment.start : segment.stop] = shard[segment.shard_start : segment.shard_start + length]
        return flat

    def assemble(self, shards: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """The same, as new tensors shaped like the parameters."""
        flat = self.flat(shards)
        return [
            flat[start:stop].view(tensor.shape)
            for start, stop, tensor in zip(self._offsets, self._offsets[1:], like, strict=False)
        ]

    def nonzero_padding(self, shard: Tensor) -> int | None:
        """Position in the shard of the first padding element that is not zero (nan is not); None when there is none."""
        if self._padding is None or self._has_zero_bytes(shard):
            return None
        wrong = shard[self._padding] != 0
        if not bool(wrong.any()):
            return None
        return int(self._padding[int(wrong.to(torch.uint8).argmax())])

    def _has_zero_bytes(self, shard: Tensor) -> bool:
        """Whether the padding is all +0.0; also False where it cannot be told in this way."""
        if shard.dtype != torch.float32 or not dense(shard, self.partition.shard_len):
            return False
        spans = self.partition.padding(self.rank)
        return not any(any(raw(shard, start, stop - start)) for start, stop in spans)


def _all_same_bytes(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        seen.dtype == wanted.dtype
        and dense(seen, numel := wanted.numel())
        and dense(wanted, numel)
        and same_bytes(seen, 0, wanted, 0, numel)
        for seen, wanted in zip(actual, expected, strict=True)
    )


def _chunks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        if chunk and size + piece.length > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(piece)
        size += piece.length
    if chunk:
        yield chunk


def _runs(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of neighbours that can be joined: one dtype, about a chunk of elements together."""
    run: list[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        if run and (tensors[run[0]].dtype != tensor.dtype or size + tensor.numel() > _CHUNK):
            yield run
            run, size = [], 0
        run.append(index)
        size += tensor.numel()
    if run:
        yield run


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _locate(chunk: Sequence[Piece], index: int) -> tuple[Piece, int]:
    """The piece that holds position ``index`` of the joined chunk, and the flat element inside its parameter."""
    for piece in chunk:
        if index < piece.length:
            return piece, piece.start + index
        index -= piece.length
    raise AssertionError(f"position {index} lies behind the chunk")
