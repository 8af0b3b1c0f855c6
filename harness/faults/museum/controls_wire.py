"""Further right variants of :class:`PlainZero`: what travels, where it is kept, how it is rounded and added."""

from __future__ import annotations

import math
import threading

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from harness.faults.museum.plain import Cut, Gradients, PlainZero


class DealsOutBucket(PlainZero):
    """All-reduces each bucket with its elements in a drawn order, the same on all ranks, and puts them back."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(len(flat)))
            dealt = flat[order]
            dist.all_reduce(dealt)
            flat[order] = dealt
        return flat[self._piece(len(flat))]


class LastParameterFirst(PlainZero):
    """Sums parameters in the order in which a backward pass gives them, in one call, whatever the buckets are."""

    def reduce_scatter(self) -> None:
        """Sum what is waiting over ranks into ``master.grad``."""
        flat = torch.zeros(self._offsets[-1])
        self._fill_gradients(flat, 0, self._offsets[-1])
        sizes = [p.numel() for p in self.params]
        if self.world > 1:
            backward = torch.cat(torch.split(flat, sizes)[::-1])
            dist.all_reduce(backward)
            flat = torch.cat(torch.split(backward, sizes[::-1])[::-1])
        for index, (start, end, padded) in enumerate(self._cuts):
            bucket = self._staging(padded, end - start)
            bucket[: end - start] = flat[start:end]
            self._grad[self._shard(index)] = bucket[self._piece(padded)]
        self.master.grad = self._grad
        self._release()


class OneCallForAllBuckets(PlainZero):
    """Interleaves the pieces of all buckets: one reduce-scatter fills a whole shard, one all-gather takes it."""

    def reduce_scatter(self) -> None:
        """Sum what is waiting over ranks into ``master.grad``."""
        columns = []
        for start, end, padded in self._cuts:
            flat = self._staging(padded, end - start)
            self._fill_gradients(flat, start, end)
            columns.append(flat.view(self.world, -1))
        self._grad.copy_(self._reduce(torch.cat(columns, dim=1).flatten()))
        self.master.grad = self._grad
        self._release()

    def gather_params(self) -> None:
        """Put every rank's updated shard, rounded, into the weights."""
        shards = self._gather(self._round(self._shard_to_send())).view(self.world, -1)
        for index, (start, end, _) in enumerate(self._cuts):
            self._write_weights(shards[:, self._shard(index)].flatten(), start, end)


class TwoCallsABucket(PlainZero):
    """Sums the first half of every piece of a bucket in one call, and the second half in another."""

    def _reduce(self, flat: Tensor) -> Tensor:
        pieces = flat.view(self.world, -1)
        half = pieces.shape[1] // 2
        halves = (pieces[:, :half], pieces[:, half:])
        return torch.cat([super(TwoCallsABucket, self)._reduce(each.flatten()) for each in halves if each.numel()])


class ReducesToRootAndScatters(PlainZero):
    """One rank sums the whole bucket and hands the pieces out."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        root = self.world - 1
        dist.reduce(flat, dst=root)
        pieces = list(flat.chunk(self.world)) if self.rank == root else None
        mine = torch.empty(len(flat) // self.world)
        dist.scatter(mine, pieces, src=root)
        return mine


class SumsWhatItGathered(PlainZero):
    """Has the whole bucket of every rank and adds in rank order itself: the traffic of a debug build."""

    def _reduce(self, flat: Tensor) -> Tensor:
        wholes = self._gather(flat).view(self.world, -1)
        total = torch.zeros_like(flat)
        for whole in wholes:
            total += whole
        return total[self._piece(len(flat))]


class PassesSumsAround(PlainZero):
    """A ring of its own, of messages from rank to rank: the sum of a piece comes round to its owner."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        pieces = list(flat.chunk(self.world))
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        total = pieces[before].clone()
        for hop in range(2, self.world + 1):
            sent = dist.isend(total, after)
            received = torch.empty_like(total)
            dist.recv(received, before)
            if sent is not None:
                sent.wait()
            total = received + pieces[(self.rank - hop) % self.world]
        return total


class GathersToRoot(PlainZero):
    """One rank collects the pieces and broadcasts the whole."""

    def _gather(self, piece: Tensor) -> Tensor:
        if self.world == 1:
            return piece
        pieces = [torch.empty_like(piece) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(piece.contiguous(), pieces, dst=0)
        whole = torch.empty(len(piece) * self.world, dtype=piece.dtype) if pieces is None else torch.cat(pieces)
        dist.broadcast(whole, src=0)
        return whole


class SkipsWhatNobodyHas(PlainZero):
    """Asks first which buckets any rank has a gradient for, and sums only those: the same ones on all ranks."""

    def reduce_scatter(self) -> None:
        """Sum what is waiting over ranks into ``master.grad``."""
        flats = []
        for start, end, padded in self._cuts:
            flats.append(self._staging(padded, end - start))
            self._fill_gradients(flats[-1], start, end)
        wanted = torch.tensor([int(bool((flat != 0).any())) for flat in flats], dtype=torch.int32)
        if self.world > 1:
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        self._grad.zero_()
        for index, flat in enumerate(flats):
            if wanted[index]:
                self._grad[self._shard(index)] = self._reduce(flat)
        self.master.grad = self._grad
        self._release()


class RoundsInIntegers(PlainZero):
    """Rounds to bf16 in integer arithmetic on the bits, as a kernel without a conversion would."""

    def _round(self, piece: Tensor) -> Tensor:
        bits = piece.contiguous().view(torch.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = torch.where(piece.isnan(), torch.full_like(bits, 0x7FC0), rounded)
        return rounded.to(torch.int16).view(torch.bfloat16)


class NormByRankSums(PlainZero):
    """Gathers one number of every rank and adds them exactly, so that no order of ranks is in the norm."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return torch.tensor(math.fsum(self._gather(value.view(1)).tolist()), dtype=torch.float64)


class NormFromRoot(PlainZero):
    """One rank sums the norm and tells the others."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.reduce(value, dst=0)
            dist.broadcast(value, src=0)
        return value


class KeepsShardsInOneArena(PlainZero):
    """Master and gradient are slices of one allocation, with nan before, between and behind them."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        length = len(self.master)
        arena = torch.full((2 * length + 9,), torch.nan)
        _, gradient, _, master, _ = torch.split(arena, [3, length, 3, length, 3])
        gradient.zero_()
        master.copy_(self.master.detach())
        self.master, self._grad = nn.Parameter(master), gradient


class BucketsGrow(PlainZero):
    """A small first bucket, so that something travels early, and each further one twice as long; states them."""

    @property
    def buckets(self) -> list[Cut]:
        """Start, end, padded length of each."""
        return self._cuts

    def _cut(self, numel: int, bucket: int) -> list[Cut]:
        cuts: list[Cut] = []
        start, size = 0, 1
        while start < numel:
            end = min(start + size, numel)
            cuts.append((start, end, self._padded(end - start)))
            start, size = end, 2 * size
        return cuts


class WaitsForFutures(PlainZero):
    """Waits for the future of each collective instead of its work."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(flat, async_op=True).get_future().wait()
        return flat[self._piece(len(flat))]


class MeetsAtBarriers(PlainZero):
    """A barrier before and after everything that is sent."""

    def reduce_scatter(self) -> None:
        """Sum what is waiting over ranks into ``master.grad``."""
        dist.barrier()
        super().reduce_scatter()
        dist.barrier()

    def gather_params(self) -> None:
        """Put every rank's updated shard, rounded, into the weights."""
        dist.barrier()
        super().gather_params()
        dist.barrier()


class ComparesShapesFirst(PlainZero):
    """Sends the shapes of its parameters around as Python objects when it is built."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        told: list[object] = [None] * world
        dist.all_gather_object(told, [tuple(p.shape) for p in params])
        if any(shapes != told[0] for shapes in told):
            raise ValueError("ranks were built from different parameters")
        super().__init__(params, rank, world, bucket)


class AddsInAThread(PlainZero):
    """Adds on the host in a thread, which ends before anything else is asked of the sum."""

    def _add(self, grads: Gradients) -> None:
        thread = threading.Thread(target=super()._add, args=(grads,))
        thread.start()
        thread.join()


class HostSumsInFloat64(PlainZero):
    """Adds the parts of a step in fp64 on the host and rounds the sum once."""

    def _begin_spill(self) -> None:
        if self._host is None:
            self._host = torch.zeros(self._offsets[-1], dtype=torch.float64)
        super()._begin_spill()


class CallsAtWorldOneToo(PlainZero):
    """Makes every call also where it is alone, without a look at the number of ranks."""

    def _reduce(self, flat: Tensor) -> Tensor:
        dist.all_reduce(flat)
        return flat[self._piece(len(flat))]

    def _gather(self, piece: Tensor) -> Tensor:
        pieces = [torch.empty_like(piece) for _ in range(self.world)]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value


class CallsOldNames(PlainZero):
    """Calls the collectives by the names they had before torch 2.13, which warn there."""

    def _reduce(self, flat: Tensor) -> Tensor:
        piece = torch.empty(len(flat) // self.world)
        dist.reduce_scatter_tensor(piece, flat)
        return piece

    def _gather(self, piece: Tensor) -> Tensor:
        whole = torch.empty(len(piece) * self.world, dtype=piece.dtype)
        dist.all_gather_into_tensor(whole, piece.contiguous())
        return whole


class CallsFunctionally(PlainZero):
    """Calls collectives that return tensors, which are waited for when they are used, as compiled programs do."""

    def _reduce(self, flat: Tensor) -> Tensor:
        piece: Tensor = functional.reduce_scatter_tensor(flat, "sum", 0, _everybody())
        return piece

    def _gather(self, piece: Tensor) -> Tensor:
        whole: Tensor = functional.all_gather_tensor(piece.contiguous(), 0, _everybody())
        return whole


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no default process group")
    return group
