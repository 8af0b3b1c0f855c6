"""Right classes that must pass: each does something another way than :class:`PlainZero`, within what is promised."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.subjects.plain import Cut, PlainZero

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
