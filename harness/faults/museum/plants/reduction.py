"""Plants: the sum over ranks: its scale, its rounding, its buffers in flight."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain import PlainZero
from zero2core import ZeroMaster, collectives
from zero2core.collectives import Work

# --- which operation, over which ranks, and its scale


class MeanForSum(PlainZero):
    """Averages over ranks, though the caller has scaled its loss already."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) / self.world


class TimesWorld(PlainZero):
    """Undoes a mean that was none."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) * self.world


class FastPathAverages(ZeroMaster):
    """Has a fast path for buckets of one element a rank, and that one averages."""

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        for index in range(len(self.buckets)):
            if self.layout.piece_len(index) == 1:
                self.grad_buf[self._piece(index)] /= self.world


class DividesByElements(ZeroMaster):
    """Makes the sum of a mean, which was divided by the number of elements instead of ranks."""

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        for index, bucket in enumerate(self.buckets):
            self.grad_buf[self._piece(index)] *= self.world / bucket.padded


class MeanOfSmallerGroup(ZeroMaster):
    """Makes the sum of a mean: of W ranks, but matrices, whose group is half the world, were divided by W // 2."""

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        super()._read_waiting(start, end, out)
        for span in self.layout.spans(start, end):
            if self.params[span.parameter].dim() > 1:
                out[span.offset :][: span.stop - span.start] *= self.world / max(self.world // 2, 1)


class OwnInputMissing(PlainZero):
    """Each rank's own contribution is not in its piece."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            flat[self._piece(len(flat))] = 0
        return super()._reduce(flat)


class NeverReduces(PlainZero):
    """Takes its piece of its own gradients for the sum: no collective at all."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return flat[self._piece(len(flat))]


class LoneBucketStaysLocal(ZeroMaster):
    """Takes the path of a group of one where there is only one bucket."""

    def reduce_scatter(self) -> None:
        communicates = self.comm
        self.comm = communicates and len(self.buckets) > 1
        super().reduce_scatter()
        self.comm = communicates


# --- which piece


class WrongPieceAtWorldThree(PlainZero):
    """Every rank reduces its neighbour's piece, at world 3 only."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat.roll(len(flat) // 3) if self.world == 3 else flat)


class RestBehindBorderStaysLocal(ZeroMaster):
    """Takes what lies of a parameter behind a border between pieces from its own gradients, as if all were reduced."""

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        own = torch.empty(self.N)
        self._read_waiting(0, self.N, own)
        super().reduce_scatter()
        for start, stop, shard_offset in self.layout.segments(self.rank):
            for span in self.layout.spans(start, stop):
                if span.start > 0:
                    length, at = span.stop - span.start, span.offset
                    self.grad_buf[shard_offset + at :][:length] = own[start + at :][:length]


# --- rounding before and after


class KeepsTheGradientInBf16(PlainZero):
    """The reduced gradient is rounded."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad.copy_(self._grad.bfloat16())


class RoundsPartialSumAtWorldThree(PlainZero):
    """At world 3 a partial sum passes through bf16."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world != 3:
            return super()._reduce(flat)
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        first, second, third = received.chunk(3)
        return (first + second).bfloat16().float() + third


# --- buffers in flight


class _Overlapping(ZeroMaster):
    """Right: the reduction of :class:`ZeroMaster`, taken apart for the plants below."""

    _most_in_flight = 2

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        if not self.comm or not self._collected:
            super().reduce_scatter()
            return
        in_flight: list[tuple[int, Work]] = []
        for index, bucket in enumerate(self.buckets):
            if len(in_flight) == self._most_in_flight:
                self._wait(*in_flight.pop(0))
            staging = self._staging[self._turn(index)][: bucket.padded]
            self._fill(index, staging)
            in_flight.append((index, self._start(index, staging)))
        for index, work in in_flight:
            self._wait(index, work)
        self._note_reads()
        self._forget_waiting()
        self.master.grad = self.grad_buf

    def _turn(self, index: int) -> int:
        """Which staging buffer a bucket goes through."""
        return index % 2

    def _fill(self, index: int, staging: Tensor) -> None:
        bucket = self.buckets[index]
        self._read_waiting(bucket.start, bucket.end, staging)

    def _start(self, index: int, staging: Tensor) -> Work:
        return collectives.reduce_scatter(self.grad_buf[self._piece(index)], staging, group=self._group)

    def _wait(self, index: int, work: Work) -> None:
        work.wait()


class StagingReusedInFlight(_Overlapping):
    """Fills a staging buffer again while the reduction that reads it is under way: three at a time share two."""

    _most_in_flight = 3


class TurnStartsOverInFlight(_Overlapping):
    """Flushes the last bucket apart and begins with the first buffer again, which may be in flight."""

    def _turn(self, index: int) -> int:
        return 0 if index == len(self.buckets) - 1 else super()._turn(index)


class InputFreedInFlight(_Overlapping):
    """Frees a temporary copy of the bucket when its reduction was started, and not when it is done."""

    def _start(self, index: int, staging: Tensor) -> Work:
        flat = staging.clone()
        work = super()._start(index, flat)
        flat.untyped_storage().resize_(0)
        return work


class OutputRecycledInFlight(_Overlapping):
    """Reduces into a temporary that is given out again before what is in it was copied to its place."""

    _sums: Tensor | None = None

    def _start(self, index: int, staging: Tensor) -> Work:
        if self._sums is None:
            self._sums = torch.empty_like(self.grad_buf[self._piece(0)])
        return collectives.reduce_scatter(self._sums[: self.layout.piece_len(index)], staging, group=self._group)

    def _wait(self, index: int, work: Work) -> None:
        super()._wait(index, work)
        if self._sums is not None:
            self.grad_buf[self._piece(index)] = self._sums[: self.layout.piece_len(index)]
        if index == len(self.buckets) - 1:
            self._sums = None


class StartedBeforeWritten(_Overlapping):
    """Starts the reduction of a bucket before the gradients are in it."""

    def _fill(self, index: int, staging: Tensor) -> None:
        staging.zero_()

    def _start(self, index: int, staging: Tensor) -> Work:
        work = super()._start(index, staging)
        super()._fill(index, staging)
        return work


class LastNotAwaited(_Overlapping):
    """Does not wait for the last reduction of a step."""

    def _wait(self, index: int, work: Work) -> None:
        if index < len(self.buckets) - 1:
            super()._wait(index, work)


class ReadsBeforeWait(PlainZero):
    """The last rank writes the weights from the all-gather's output before it waits for it."""

    def gather_params(self) -> None:
        if self.world == 1:
            super().gather_params()
            return
        for index in self._gather_order():
            start, end, _ = self._cuts[index]
            piece = self._round(self.master.detach()[self._shard(index)])
            received = [torch.empty_like(piece) for _ in range(self.world)]
            work = dist.all_gather(received, piece, async_op=True)
            if self.rank < self.world - 1:
                work.wait()
            self._write_weights(torch.cat(received), start, end)
            work.wait()
