"""Plants: who owns which element, padding, odd parameters, and what is exported and loaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.faults.museum.plain import Cut, Gradients, PlainZero
from zero2core import collectives
from zero2core.flat import read_flat, write_flat
from zero2core.layout import FlatLayout
from zero2core.zero_master import BUCKET, ZeroMaster

# --- layout


class PiecesOfTheSmallerGroup(PlainZero):
    """Cuts a bucket for all ranks, and takes its piece by its rank in one of two replicas of half as many shards."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world % 2:
            return super()._reduce(flat)
        dist.all_reduce(flat)
        length = len(flat) // self.world
        return flat[self.rank % (self.world // 2) * length :][:length]


class OffsetsOfTheWrongWidth(PlainZero):
    """Finds a bucket's piece in the rounded shard by an address in bytes that counts four for an element."""

    def gather_params(self) -> None:
        shard = self._round(self.master.detach())
        memory = torch.cat([shard, torch.zeros_like(shard)])  # what lies behind is somebody else's
        for index, (start, end, padded) in enumerate(self._cuts):
            first = self._starts[index] * self.master.element_size() // shard.element_size()
            self._write_weights(self._gather(memory[first:][: padded // self.world]), start, end)


class RestOfParameterLost(ZeroMaster):
    """Puts the gradient of a parameter into the bucket where it begins, and not into those where it goes on."""

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        super()._read_waiting(start, end, out)
        first = next(self.layout.spans(start, end))
        if first.start > 0:
            out[: first.stop - first.start].zero_()


class FillCounterNeverCleared(ZeroMaster):
    """Counts what is in a bucket from the first one on, so that all later ones count as full with one element."""

    def _gathered(self, wire_dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, Tensor]]:
        if not self.comm:
            yield from super()._gathered(wire_dtypes)
            return
        for index, (bucket, dtype) in enumerate(zip(self.buckets, wire_dtypes, strict=True)):
            parts = []
            piece = self.master.detach()[self._piece(index)].to(dtype)
            for part in torch.split(piece, 1) if index else [piece]:
                whole = torch.empty(self.world * len(part), dtype=dtype)
                collectives.all_gather(whole, part, group=self._group).wait()
                parts.append(whole.view(self.world, -1))
            yield bucket.start, torch.cat(parts, dim=1).flatten()[: bucket.end - bucket.start]


class ExportsInOrderOfSize(ZeroMaster):
    """Hands out the parameters from the smallest to the largest, where the list of their names is as it was given."""

    def full_master(self) -> Tensor:
        masters = torch.split(super().full_master(), list(self.numel))
        return torch.cat(sorted(masters, key=len))


class GuessesWholeFromShard(ZeroMaster):
    """Takes W times the number of its own elements for the number of all."""

    def full_master(self) -> Tensor:
        whole = super().full_master()
        return pad(whole, (0, self.layout.num_owned(self.rank) * self.world - len(whole)))


class NarrowWhereWhole(ZeroMaster):
    """Takes a parameter that lies in one piece for one that is not sharded, and sums it in its own dtype."""

    def _add_to_host(self, grads: Sequence[Tensor | None]) -> None:
        super()._add_to_host(grads)
        for param, first, end in zip(self.params, self.offsets, self.offsets[1:], strict=False):
            if first < end and self.layout.owner(first)[:2] == self.layout.owner(end - 1)[:2]:
                total = self._writable_host()[first:end]
                total.copy_(total.to(param.dtype))


# --- padding


class StagingNotZeroed(PlainZero):
    """Uses one staging buffer for all buckets, and zeroes it only where gradients will be written."""

    _buffer: Tensor | None = None

    def _staging(self, padded: int, length: int) -> Tensor:
        if not hasattr(self, "_grad"):  # the master is still being built: that is done right
            return super()._staging(padded, length)
        if self._buffer is None or len(self._buffer) < padded:
            self._buffer = torch.zeros(padded)
        self._buffer[:length].zero_()
        return self._buffer[:padded]


class PadsOnlyTheLastBucket(PlainZero):
    """Takes the size of buckets as asked for, and pads the last; of each other the remainder is in no piece."""

    @property
    def buckets(self) -> list[Cut]:
        return self._cuts

    def _cut(self, numel: int, bucket: int) -> list[Cut]:
        size = max(bucket, self.world)
        *full, last = range(0, numel, size)
        cuts = [(start, start + size, size - size % self.world) for start in full]
        return [*cuts, (last, numel, self._padded(numel - last))]

    def _staging(self, padded: int, length: int) -> Tensor:
        return super()._staging(max(padded, length), length)


class PadsByTheRemainder(PlainZero):
    """Pads by what is left over, and not by what is missing: the same at two ranks."""

    def _padded(self, length: int) -> int:
        return length + length % self.world


class HostOffsetsWithPads(PlainZero):
    """Lays parameters on the host at multiples of four, and reads them as if they lay end to end."""

    def _begin_spill(self) -> None:
        if self._host is None:
            self._host = torch.zeros(sum(self._aligned(p.numel()) for p in self.params))
        super()._begin_spill()

    def _add(self, grads: Gradients) -> None:
        first = 0
        for p, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                self._host_sum()[first : first + p.numel()] += grad.view(-1).float()
            first += self._aligned(p.numel())

    def _aligned(self, numel: int) -> int:
        return -(-numel // 4) * 4


class GathersRealPieces(ZeroMaster):
    """Hands the gather its piece without the padding, which other ranks' pieces do not have."""

    _gathering = False

    def _gathered(self, wire_dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, Tensor]]:
        self._gathering = True
        yield from super()._gathered(wire_dtypes)
        self._gathering = False

    def _piece(self, bucket: int) -> slice:
        piece = super()._piece(bucket)
        return slice(piece.start, min(piece.stop, self._num_owned)) if self._gathering else piece


# --- odd parameters


class EmptyShardLeftOut(ZeroMaster):
    """Sorts out shards without an element, and with them what such a rank has on the host for the others."""

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        super()._read_waiting(start, end, out)
        if self._on_host and self._num_owned == 0:
            out.zero_()


class ReadsStridedInMemoryOrder(ZeroMaster):
    """Hands gradients on as they lie in memory, also those of transposed parameters."""

    def collect(self, more: bool) -> None:
        for param in self.params:
            if param.grad is not None:
                param.grad = param.grad.as_strided((param.numel(),), (1,)).view(param.shape)
        super().collect(more)


class WritesStridedInMemoryOrder(ZeroMaster):
    """Writes weights as they lie in memory, also to transposed parameters."""

    @torch.no_grad()
    def gather_params(self) -> None:
        super().gather_params()
        for param in self.params:
            param.as_strided((param.numel(),), (1,)).copy_(param.flatten().clone())


class GathersIntoTemporary(ZeroMaster):
    """Gathers into ``contiguous()`` tensors, which for transposed parameters are copies that nobody copies back."""

    @torch.no_grad()
    def gather_params(self) -> None:
        self.master.detach()[self._num_owned :].zero_()
        targets = [param.contiguous() for param in self.params]
        for start, values in self._gathered(self._wire_dtypes):
            write_flat(self.layout, targets, start, values)


class ForgetsEmptyParameters(PlainZero):
    """Sorts out parameters without an element in one of two lists: weights go to the next parameter but one."""

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        filled = [p for p in self.params if p.numel()]
        for p, first, last in zip(filled, self._offsets, self._offsets[1:], strict=False):
            low, high = max(start, first), min(end, last)
            if low < high:
                into = p.detach().view(-1)[low - first : high - first]
                into.copy_(whole[low - start :][: len(into)])


# --- what is exported and loaded


class ExportsPadding(PlainZero):
    """Hands out whole pieces, with what fills up the last bucket."""

    def full_master(self) -> Tensor:
        shard = self.master.detach()
        return torch.cat([self._gather(shard[self._shard(index)]) for index in range(len(self._cuts))])


class FullMasterWithPadding(PlainZero):
    """Puts the ranks' shards end to end, in which pieces of several buckets lie one after another."""

    def full_master(self) -> Tensor:
        return self._gather(self.master.detach())[: self._offsets[-1]]


class ExportsFromOldHandle(PlainZero):
    """Hands out the master from where it lay before it was moved."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._before = self.master.detach().clone()

    def full_master(self) -> Tensor:
        shard = self._before
        wholes = [self._gather(shard[self._shard(index)]) for index in range(len(self._cuts))]
        return torch.cat([whole[: end - start] for whole, (start, end, _) in zip(wholes, self._cuts, strict=True)])


class MasterOutlivesIt(PlainZero):
    """Keeps the master with a parameter, where the next instance finds it and takes it if it fits."""

    def _initial_master(self) -> Tensor:
        fresh = super()._initial_master()
        kept = getattr(self.params[0], "_kept_master", fresh)
        master = kept if kept.shape == fresh.shape else fresh
        self.params[0]._kept_master = master  # type: ignore[attr-defined]
        return master


class _Loads(ZeroMaster):
    """Tells a load, which the plants do wrong, from construction, which is right."""

    _built = False

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        super().__init__(params, rank, world, bucket)
        self._built = True

    @torch.no_grad()
    def refresh_from_weights(self) -> None:
        if self._built:
            self._load(self.master.detach())
        else:
            super().refresh_from_weights()

    def _load(self, master: Tensor) -> None:
        raise NotImplementedError


class SkipsShortPieces(_Loads):
    """Passes over what has not the length of a whole piece when weights are loaded, without a word."""

    def _load(self, master: Tensor) -> None:
        for index, (start, stop, offset) in enumerate(self.layout.segments(self.rank)):
            if stop - start == self.layout.piece_len(index):
                read_flat(self.layout, self.params, start, master[offset : offset + stop - start])


class LoadsGroupByGroup(_Loads):
    """Reads loaded weights matrices first, then the rest, as its caller's groups are; the master has them in order."""

    def _load(self, master: Tensor) -> None:
        grouped = sorted(self.params, key=lambda param: param.dim() < 2)
        layout = FlatLayout(tuple(param.numel() for param in grouped), self.world, self.layout.bucket)
        for start, stop, offset in self.layout.segments(self.rank):
            read_flat(layout, grouped, start, master[offset : offset + stop - start])


class LoadsAsManyAsRankZero(_Loads):
    """Loads as many parameters on every rank as rank 0 has in its shard."""

    def _load(self, master: Tensor) -> None:
        left = sum(len(list(self.layout.spans(start, stop))) for start, stop, _ in self.layout.segments(0))
        for start, stop, offset in self.layout.segments(self.rank):
            for span in list(self.layout.spans(start, stop))[:left]:
                into = master[offset + span.offset :][: span.stop - span.start]
                read_flat(self.layout, self.params, start + span.offset, into)
                left -= 1


class _Counts(PlainZero):
    """Changes its optimizer's count of steps after each one."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        this = weakref.ref(self)

        def count(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            zero = this()
            if zero is not None and zero.master.grad is not None and zero.master in optimizer.state:
                optimizer.state[zero.master]["step"] += zero._miscounted(zero.master.grad)

        self._hook = register_optimizer_step_post_hook(count)

    def __del__(self) -> None:
        self._hook.remove()

    def _miscounted(self, grad: Tensor) -> int:
        raise NotImplementedError


class StepOfIdleShardNotCounted(_Counts):
    """Counts no step in which its shard has no gradient."""

    def _miscounted(self, grad: Tensor) -> int:
        return 0 if grad.any() else -1


class OneCounterForAllParameters(_Counts):
    """Shares one count of steps between parameters, and each adds to it."""

    def _miscounted(self, grad: Tensor) -> int:
        return len(self.params) - 1
