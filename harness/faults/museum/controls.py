"""Right classes that must pass: each does something another way than :class:`PlainZero`, within what is promised."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.faults.museum.plain import Cut, Gradients, PlainZero

__all__ = ["PlainZero"]


class RoundsBucketUp(PlainZero):
    """Rounds the requested bucket up to a multiple of W instead of down, and says so in ``buckets``."""

    @property
    def buckets(self) -> list[Cut]:
        return self._cuts

    def _cut(self, numel: int, bucket: int) -> list[Cut]:
        return super()._cut(numel, self._padded(bucket))


class PadsToEightPerRank(PlainZero):
    """Pads every bucket to a multiple of 8 W, so that full buckets have padding too; ``buckets`` are lists."""

    @property
    def buckets(self) -> tuple[list[int], ...]:
        return tuple(list(cut) for cut in self._cuts)

    def _padded(self, length: int) -> int:
        return -(-length // (8 * self.world)) * 8 * self.world


class BucketPerParameter(PlainZero):
    """Ignores the requested size: one bucket a parameter, padding between parameters, none for empty ones."""

    @property
    def buckets(self) -> list[Cut]:
        return self._cuts

    def _cut(self, numel: int, bucket: int) -> list[Cut]:
        edges = zip(self._offsets, self._offsets[1:], strict=False)
        return [(first, last, self._padded(last - first)) for first, last in edges if first < last]


class ReducesByAllReduce(PlainZero):
    """All-reduces the whole bucket and keeps its own piece."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(flat)
        return flat[self._piece(len(flat))]


class ReducesByAllToAll(PlainZero):
    """Exchanges pieces by all-to-all and adds them in rank order: another order than the backend's ring."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        total, *others = received.chunk(self.world)
        for piece in others:
            total += piece
        return total


class ReducesByList(PlainZero):
    """A reduce-scatter of a list of pieces, which gloo makes one ``reduce`` a rank: the chunks are those of pieces."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        pieces = list(flat.chunk(self.world))
        mine = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine, pieces)
        return mine


class AddsFromTheLastRank(PlainZero):
    """Exchanges pieces by all-to-all and adds them itself, here from the last rank to the first."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        return self._sum(list(received.chunk(self.world)))

    def _sum(self, pieces: list[Tensor]) -> Tensor:
        return self._left_to_right(pieces[::-1])

    def _left_to_right(self, pieces: list[Tensor]) -> Tensor:
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        return total


class AddsPairwise(AddsFromTheLastRank):
    """Adds neighbours, then neighbouring sums, and so on: a balanced tree."""

    def _sum(self, pieces: list[Tensor]) -> Tensor:
        while len(pieces) > 1:
            pairs = zip(pieces[::2], pieces[1::2], strict=False)
            pieces = [left + right for left, right in pairs] + pieces[len(pieces) & ~1 :]
        return pieces[0]


class AddsOwnFirst(AddsFromTheLastRank):
    """Each rank starts with what it has itself: another order on every rank."""

    def _sum(self, pieces: list[Tensor]) -> Tensor:
        return self._left_to_right(pieces[self.rank :] + pieces[: self.rank])


class AddsHalvesOfTheWorld(PlainZero):
    """Sums over two halves of the world first, each a group of its own, then over the two sums: two hops."""

    _groups: ClassVar[dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]] = {}

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world < 3:
            return super()._reduce(flat)
        if self.world not in self._groups:
            half = self.world // 2
            self._groups[self.world] = (dist.new_group(range(half)), dist.new_group(range(half, self.world)))
        low, high = self._groups[self.world]
        half = self.world // 2
        total = flat.clone()
        dist.all_reduce(total, group=low if self.rank < half else high)
        first, second = total.clone(), total.clone()
        dist.broadcast(first, 0)
        dist.broadcast(second, half)
        return (first + second)[self._piece(len(flat))]


class ChangesOrderEveryStep(AddsFromTheLastRank):
    """Adds in an order that is fixed for each step, and another one in the next: no single tree explains it."""

    _step = 0

    def _sum(self, pieces: list[Tensor]) -> Tensor:
        first = self._step % self.world
        return self._left_to_right(pieces[first:] + pieces[:first])

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._step += 1


class AddsInFloat64(AddsFromTheLastRank):
    """Adds in fp64 and rounds once: nearer to the exact sum than any order of fp32 additions, and equal to none."""

    def _sum(self, pieces: list[Tensor]) -> Tensor:
        return torch.stack(pieces).double().sum(0).float()


class AddsPartsBackward(PlainZero):
    """Keeps copies of a step's parts on the host and adds the last one first."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._parts: list[Gradients] = []

    def _add(self, grads: Gradients) -> None:
        self._parts.append([None if grad is None else grad.clone() for grad in grads])

    def reduce_scatter(self) -> None:
        for grads in reversed(self._parts):
            super()._add(grads)
        super().reduce_scatter()

    def _release(self) -> None:
        super()._release()
        self._parts = []


class OneInstanceAProcess(AddsFromTheLastRank):
    """Adds from the last rank to the first, and cannot be built twice at a time: its order cannot be probed."""

    _alive: ClassVar[weakref.WeakSet[OneInstanceAProcess]] = weakref.WeakSet()

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        gc.collect()
        if len(self._alive):
            raise RuntimeError("one instance a process")
        super().__init__(params, rank, world, bucket)
        self._alive.add(self)


class SharesItsGradient(AddsFromTheLastRank):
    """Adds from the last rank to the first, into a buffer that all instances of a process share: not to be probed."""

    _buffers: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._grad = self._buffers.setdefault(self._grad.numel(), self._grad)


class ReducesEverythingAtOnce(PlainZero):
    """One all-reduce of the whole flat vector, buckets or not: chunks of the ring that no bucket shows."""

    def reduce_scatter(self) -> None:
        flat = torch.zeros(self._offsets[-1])
        self._fill_gradients(flat, 0, self._offsets[-1])
        if self.world > 1:
            dist.all_reduce(flat)
        for index, (start, end, padded) in enumerate(self._cuts):
            bucket = self._staging(padded, end - start)
            bucket[: end - start] = flat[start:end]
            self._grad[self._shard(index)].copy_(bucket[self._piece(padded)])
        self.master.grad = self._grad
        self._release()


class ReducesToOwner(PlainZero):
    """One ``reduce`` per piece to its owner; what the other ranks are left with is garbage and is not used."""

    def _reduce(self, flat: Tensor) -> Tensor:
        pieces = [piece.clone() for piece in flat.chunk(self.world)]
        if self.world > 1:
            for owner, piece in enumerate(pieces):
                dist.reduce(piece, dst=owner)
        return pieces[self.rank]


class GathersByBroadcast(PlainZero):
    """Every owner broadcasts its piece; uses ``all_gather`` with a list for the full master."""

    def _gather(self, piece: Tensor) -> Tensor:
        if self.world == 1:
            return piece
        pieces = [piece.clone() for _ in range(self.world)]
        if piece.dtype == torch.float32:
            dist.all_gather(pieces, piece.contiguous())
        else:
            for owner, received in enumerate(pieces):
                dist.broadcast(received, src=owner)
        return torch.cat(pieces)


class GathersInFloat32(PlainZero):
    """All-gathers the fp32 shard and rounds on every rank."""

    def _round(self, piece: Tensor) -> Tensor:
        return piece


class NormByVectorNorm(PlainZero):
    """fp32 norm of the shard, rooted and squared again."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(grad)
        return norm**2


class NormBySumOfSquares(PlainZero):
    """fp32 squares and sum; overflows where the square of the norm does not fit."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return grad.pow(2).sum()


class NormByBucket(PlainZero):
    """Adds one fp32 norm per bucket in a Python float, as trainers with per-bucket hooks do."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        squares = (float(torch.dot(grad[self._shard(i)], grad[self._shard(i)])) for i in range(len(self._cuts)))
        return torch.tensor(sum(squares), dtype=torch.float64)


class AlwaysOnHost(PlainZero):
    """Moves every gradient to the host at once, but counts a spill only where the specification does."""

    _counted = False

    def collect(self, more: bool) -> None:
        grads = self._take()
        if all(grad is None for grad in grads):
            return
        if not self._counted and (more or self.has_grad):
            self.spills += 1
            self._counted = True
        if self._host is None:
            self._host = torch.zeros(self._offsets[-1])
        self._spilled = True
        self._add(grads)

    def _release(self) -> None:
        super()._release()
        self._counted = False


class ReducesEveryPart(PlainZero):
    """Reduces in ``collect``, part by part, and adds the reduced shards: parts outside, ranks inside the sum."""

    _waiting = False
    _counted = False

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._total = torch.zeros_like(self._grad)

    @property
    def has_grad(self) -> bool:
        return self._waiting

    def collect(self, more: bool) -> None:
        grads = self._take()
        # A rank without gradient takes part all the same: every rank is called for every part.
        for index, (start, end, padded) in enumerate(self._cuts):
            flat = self._staging(padded, end - start)
            self._fill(flat, start, end, grads)
            self._total[self._shard(index)] += self._reduce(flat)
        if all(grad is None for grad in grads):
            return
        if not self._counted and (more or self._waiting):
            self.spills += 1
            self._counted = True
        self._waiting = True

    def reduce_scatter(self) -> None:
        self._grad.copy_(self._total)
        self.master.grad = self._grad
        self._release()

    def _release(self) -> None:
        self._waiting = self._counted = False
        self._total.zero_()


class OverlapsCollectives(PlainZero):
    """Starts the collectives of all buckets asynchronously and waits for them in order; fresh gradient every step."""

    def reduce_scatter(self) -> None:
        launched = [self._launch_reduce(flat) for flat in self._gradient_buckets()]
        pieces = []
        for piece, work, _flat in launched:
            if work is not None:
                work.wait()
            pieces.append(piece)
        self.master.grad = torch.cat(pieces)
        self._release()

    def _gradient_buckets(self) -> Iterator[Tensor]:
        for start, end, padded in self._cuts:
            flat = self._staging(padded, end - start)
            self._fill_gradients(flat, start, end)
            yield flat

    def _launch_reduce(self, flat: Tensor) -> tuple[Tensor, dist.Work | None, Tensor]:
        # The input travels along: it must stay alive until the wait.
        if self.world == 1:
            return flat, None, flat
        work = dist.all_reduce(flat, async_op=True)
        return flat[self._piece(len(flat))], work, flat

    def gather_params(self) -> None:
        if self.world == 1:
            super().gather_params()
            return
        sent = [self._round(self.master.detach()[self._shard(index)]) for index in range(len(self._cuts))]
        received = [[torch.empty_like(piece) for _ in range(self.world)] for piece in sent]
        works = [dist.all_gather(out, piece, async_op=True) for out, piece in zip(received, sent, strict=True)]
        for work, pieces, (start, end, _) in zip(works, received, self._cuts, strict=True):
            work.wait()
            self._write_weights(torch.cat(pieces), start, end)


class WalksBackward(PlainZero):
    """Walks the buckets from last to first in both directions, as a backward pass would; the same on all ranks."""

    def _reduce_order(self) -> range:
        return range(len(self._cuts) - 1, -1, -1)

    def _gather_order(self) -> range:
        return self._reduce_order()


class RefusesScalars(PlainZero):
    """Says NotImplementedError for scalar parameters: those scenarios are outside its space."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        if any(p.dim() == 0 for p in params):
            raise NotImplementedError("scalar parameters are not supported")
        super().__init__(params, rank, world, bucket)


class RefusesThirdPart(PlainZero):
    """Says NotImplementedError, on every rank, at the third ``collect`` of a step."""

    _parts = 0

    def collect(self, more: bool) -> None:
        self._parts += 1
        if self._parts > 2:
            raise NotImplementedError("at most two parts a step")
        super().collect(more)

    def _release(self) -> None:
        super()._release()
        self._parts = 0


class Refreshes(PlainZero):
    """Takes weights that were loaded from outside, and says so."""

    verify_extensions: ClassVar[tuple[str, ...]] = ("refresh",)

    def refresh_from_weights(self) -> None:
        with torch.no_grad():
            self.master.copy_(self._initial_master())
