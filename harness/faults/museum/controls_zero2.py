"""Right variants of our own class: each keeps all that ``zero2`` promises, its collectives, norms and memory too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2core import collectives
from zero2core.zero_master import BUCKET, ZeroMaster


class FreshStaging(Sequence[Tensor]):
    """In place of the two staging buffers: a new one at each use, full of nan."""

    def __init__(self, numel: int) -> None:
        self._numel = numel

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: object) -> Tensor:  # type: ignore[override]
        return torch.full((self._numel,), torch.nan)


class StagesInFreshBuffers(ZeroMaster):
    """Fills and empties a new buffer for each bucket, full of nan before: nothing outlives a bucket in staging."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        super().__init__(params, rank, world, bucket)
        if self.comm:
            self._staging = FreshStaging(self.buckets[0].padded)  # type: ignore[assignment]


class OneBucketAtATime(ZeroMaster):
    """Waits for each collective where it is called: nothing overlaps, and one buffer would do."""

    def reduce_scatter(self) -> None:
        """Sum what is waiting, bucket by bucket."""
        if not self.comm:
            super().reduce_scatter()
            return
        for index, bucket in enumerate(self.buckets):
            staging = self._staging[1][: bucket.padded]
            self._read_waiting(bucket.start, bucket.end, staging)
            collectives.reduce_scatter(self.grad_buf[self._piece(index)], staging, group=None).wait()
        self._forget_waiting()
        self.master.grad = self.grad_buf

    def _gathered(self, wire_dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, Tensor]]:
        if not self.comm:
            yield from super()._gathered(wire_dtypes)
            return
        for index, (bucket, dtype) in enumerate(zip(self.buckets, wire_dtypes, strict=True)):
            received = torch.empty(bucket.padded, dtype=dtype)
            collectives.all_gather(received, self.master.detach()[self._piece(index)].to(dtype), group=None).wait()
            yield bucket.start, received[: bucket.end - bucket.start]


class WaitsFromLastToFirst(ZeroMaster):
    """Starts the reduce-scatters of all buckets, each from a tensor of its own, and waits for the last one first."""

    def reduce_scatter(self) -> None:
        """Sum what is waiting, all buckets at once."""
        if not self.comm:
            super().reduce_scatter()
            return
        in_flight = []
        for index, bucket in enumerate(self.buckets):
            flat = torch.empty(bucket.padded)
            self._read_waiting(bucket.start, bucket.end, flat)
            piece = self.grad_buf[self._piece(index)]
            in_flight.append((collectives.reduce_scatter(piece, flat, group=None), flat))
        while in_flight:
            in_flight.pop()[0].wait()
        self._forget_waiting()
        self.master.grad = self.grad_buf


class ReversesPieces(ZeroMaster):
    """Sends each piece of a bucket from its last element to its first, and turns back what it gets."""

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        super()._read_waiting(start, end, out)
        pieces = out.view(self.world, -1)
        pieces.copy_(pieces.flip(1))

    def reduce_scatter(self) -> None:
        """Sum what is waiting, in the order of the shard."""
        super().reduce_scatter()
        for index in range(len(self.buckets)):
            piece = self.grad_buf[self._piece(index)]
            piece.copy_(piece.flip(0))


class DealsOutElements(ZeroMaster):
    """Sends the elements of each piece in a drawn order, the same on all ranks, and puts them back."""

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        super()._read_waiting(start, end, out)
        pieces = out.view(self.world, -1)
        pieces.copy_(pieces[:, self._dealt(pieces.shape[1])])

    def reduce_scatter(self) -> None:
        """Sum what is waiting, in the order of the shard."""
        super().reduce_scatter()
        for index in range(len(self.buckets)):
            piece = self.grad_buf[self._piece(index)]
            piece[self._dealt(len(piece))] = piece.clone()

    def _dealt(self, length: int) -> Tensor:
        """Drawn again each time: to keep it would take more memory than is promised."""
        return torch.randperm(length, generator=torch.Generator().manual_seed(length))


class NormByExactSum(ZeroMaster):
    """Adds the squares of its shard exactly and rounds once: nearer to the norm than any loop of additions."""

    def grad_sq_norm(self) -> Tensor:
        """Squared norm over all ranks."""
        total = torch.tensor([math.fsum(self._reduced().double().square().tolist())], dtype=torch.float64)
        if self.comm:
            collectives.all_reduce_sum(total, group=None)
        return total[0]

    def _reduced(self) -> Tensor:
        if self.master.grad is None:
            raise RuntimeError("grad_sq_norm before reduce_scatter")
        return self.master.grad


class NormFromLastBucket(NormByExactSum):
    """Adds one fp64 norm a bucket, from the last bucket to the first, each of them a dot product."""

    def grad_sq_norm(self) -> Tensor:
        """Squared norm over all ranks."""
        grad = self._reduced().double()
        total = torch.zeros(1, dtype=torch.float64)
        for index in reversed(range(len(self.buckets))):
            piece = grad[self._piece(index)]
            total += torch.dot(piece, piece)
        if self.comm:
            collectives.all_reduce_sum(total, group=None)
        return total[0]


class ZeroesHostFirst(ZeroMaster):
    """Zeroes the host vector when a step's first part comes, and adds this one too, instead of overwriting."""

    def _add_to_host(self, grads: Sequence[Tensor | None]) -> None:
        if not self._on_host:
            self._writable_host().zero_()
            self._on_host = True
        super()._add_to_host(grads)


class AddsPartsWhenReduced(ZeroMaster):
    """Keeps copies of a spilled step's parts, and adds them on the host only when the sum is wanted."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        self._parts: list[list[Tensor | None]] = []
        super().__init__(params, rank, world, bucket)

    @property
    def has_grad(self) -> bool:
        """A gradient is waiting on this rank."""
        return super().has_grad or len(self._parts) > 0

    def _spill(self, grads: Sequence[Tensor | None]) -> None:
        self.spills += not self._parts
        for part in (self.held, grads):
            if part is not None:
                self._parts.append([None if grad is None else grad.clone() for grad in part])
        self.held = None

    def reduce_scatter(self) -> None:
        """Sum what is waiting."""
        for grads in self._parts:
            self._add_to_host(grads)
        super().reduce_scatter()

    def _forget_waiting(self) -> None:
        super()._forget_waiting()
        self._parts = []


class TalksInItsOwnGroup(ZeroMaster):
    """Hands the constructor a group of its own, of all ranks, made once a process."""

    _groups: ClassVar[dict[int, dist.ProcessGroup]] = {}

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        if world > 1 and world not in self._groups:
            self._groups[world] = dist.new_group(range(world))
        super().__init__(params, rank, world, bucket, group=self._groups.get(world))


class RefreshesFromWholeVector(ZeroMaster):
    """Lays all weights end to end in one fp32 vector and cuts its shard out of that."""

    def refresh_from_weights(self) -> None:
        """Rebuild the master from the compute weights."""
        flat = torch.cat([param.detach().float().reshape(-1) for param in self.params])
        master = self.master.detach()
        for start, stop, shard_offset in self.layout.segments(self.rank):
            master[shard_offset : shard_offset + stop - start] = flat[start:stop]


class WritesWholeParameters(ZeroMaster):
    """Gathers all buckets into one fp32 vector first, and then writes each parameter with one copy."""

    @torch.no_grad()
    def gather_params(self) -> None:
        """Put every rank's updated shard, rounded, into the weights."""
        self.master[self._num_owned :] = 0.0
        flat = torch.empty(self.N)
        for start, values in self._gathered(self._wire_dtypes):
            flat[start : start + values.numel()] = values
        for param, begin, numel in zip(self.params, self.offsets, self.numel, strict=False):
            param.copy_(flat[begin : begin + numel].view(param.shape))


class LeavesCyclesBehind(ZeroMaster):
    """Leaves as much as the whole master in a reference cycle after each gather: garbage, not collected yet."""

    def gather_params(self) -> None:
        """Put every rank's updated shard, rounded, into the weights."""
        super().gather_params()
        garbage: list[object] = [torch.zeros(self.N)]
        garbage.append(garbage)


class KeepsAllInOneArena(ZeroMaster):
    """Cuts master, gradient and staging out of one allocation: all of them are views that begin somewhere in it."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        super().__init__(params, rank, world, bucket)
        staged = [buffer.numel() for buffer in self._staging]
        arena = torch.zeros(2 * self.shard_len + sum(staged))
        gradient, master, *staging = torch.split(arena, [self.shard_len, self.shard_len, *staged])
        master.copy_(self.master.detach())
        self.grad_buf, self.master, self._staging = gradient, nn.Parameter(master), tuple(staging)
