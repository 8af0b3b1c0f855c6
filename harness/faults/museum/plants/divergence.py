"""Plants: ranks that part ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.faults.museum.plain import Gradients, PlainZero
from zero2core import BUCKET, ZeroMaster
from zero2core.layout import FlatLayout

# --- collectives that only some ranks call


class SkipsWithoutGradient(PlainZero):
    """A rank without gradient does not take part in the reduction."""

    def reduce_scatter(self) -> None:
        if self.world > 1 and not self.has_grad:
            self._grad.zero_()
            self.master.grad = self._grad
            return
        super().reduce_scatter()


class EmptyShardSitsOut(ZeroMaster):
    """A rank without an element of its own has nothing to update, and does not take part in the gather."""

    def gather_params(self) -> None:
        if self._num_owned:
            super().gather_params()


class SkipsNormOnOverflow(ZeroMaster):
    """A rank whose shard of the gradient is not finite knows the norm already, and does not ask the others."""

    def grad_sq_norm(self) -> Tensor:
        grad = self.master.grad
        if grad is not None and not grad.isfinite().all():
            return grad.double().square().sum()
        return super().grad_sq_norm()


class RefusesAlone(ZeroMaster):
    """A rank without an element of its own refuses, while the others wait for it to compare parameters with them."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        layout = FlatLayout(tuple(param.numel() for param in params), world, bucket)
        if layout.num_owned(rank) == 0:
            raise ValueError(f"nothing of {layout.N} elements is left for rank {rank}")
        super().__init__(params, rank, world, bucket)


class MeetsNobodyInItsEnd(PlainZero):
    """The last rank calls a collective in its finaliser, the others do not."""

    def __del__(self) -> None:
        if self.rank == self.world - 1 > 0:
            dist.barrier()


# --- what is sent depends on which gradients a rank has


class _NotesGradients(PlainZero):
    """Right: notes which parameters have had a gradient in this step on this rank, for the plants below."""

    _seen: frozenset[int] = frozenset()

    def _take(self) -> Gradients:
        grads = super()._take()
        self._seen |= {index for index, grad in enumerate(grads) if grad is not None}
        return grads

    def _release(self) -> None:
        super()._release()
        self._seen = frozenset()

    def _present(self, start: int, end: int) -> Tensor:
        """For each element of the flat range, whether its parameter has had one: bool ``[end - start]``."""
        mask = torch.zeros(self._offsets[-1], dtype=torch.bool)
        for index in self._seen:
            mask[self._offsets[index] : self._offsets[index + 1]] = True
        return mask[start:end]


class SkipsBucketsWithoutGradient(_NotesGradients):
    """Passes over buckets in which this rank has no gradient."""

    def reduce_scatter(self) -> None:
        self._grad.zero_()
        super().reduce_scatter()

    def _reduce_order(self) -> Sequence[int]:
        return [index for index, (start, end, _) in enumerate(self._cuts) if self._present(start, end).any()]


class PacksPresentGradients(_NotesGradients):
    """Reduces of a bucket what this rank has gradients for, packed: as much as the others send only if they agree."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        self._there = self._present(start, end).nonzero().view(-1)

    def _reduce(self, flat: Tensor) -> Tensor:
        flat[self._there] = self._sum_over_ranks(flat[self._there])
        return flat[self._piece(len(flat))]


class ZeroFillInParameterDtype(PlainZero):
    """A rank without gradients sends zeros as its parameters are: in bf16, where the others send fp32."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat if self.has_grad else flat.to(self.params[0].dtype))


class RebuildsBucketsLocally(PlainZero):
    """Makes a bucket of each parameter, in the order in which the first gradients came on this rank."""

    _order: Sequence[int] | None = None

    def _take(self) -> Gradients:
        if self._order is None:
            self._order = sorted(range(len(self.params)), key=lambda index: self.params[index].grad is None)
        return super()._take()

    def reduce_scatter(self) -> None:
        whole = torch.zeros(self._offsets[-1])
        self._fill_gradients(whole, 0, len(whole))
        for index in self._order or ():
            self._sum_over_ranks(whole[self._offsets[index] : self._offsets[index + 1]])
        self._held, self._host, self._spilled = None, whole, True
        super().reduce_scatter()

    def _reduce(self, flat: Tensor) -> Tensor:
        return flat[self._piece(len(flat))]


class StacksNormsOfOwnBuckets(PlainZero):
    """Sums a vector of norms over ranks, one for each bucket of which the rank owns an element."""

    def grad_sq_norm(self) -> Tensor:
        norms = []
        for index, (start, end, padded) in enumerate(self._cuts):
            num_owned = len(range(start, end)[self._piece(padded)])
            if num_owned:
                norms.append(self._local_sq_norm(self._reduced()[self._shard(index)]))
        return self._sum_over_ranks(torch.tensor(norms, dtype=torch.float64)).sum()


# --- the same collectives in another order


class SwapsEqualBuckets(PlainZero):
    """The last rank reduces the first two buckets in the other order, if they are equally long."""

    def _reduce_order(self) -> Sequence[int]:
        order = list(super()._reduce_order())
        lengths = [end - start for start, end, _ in self._cuts[:2]]
        if 0 < self.rank == self.world - 1 and len(lengths) == 2 and lengths[0] == lengths[1]:
            order[:2] = [1, 0]
        return order


class SwapsEqualBucketsInGather(PlainZero):
    """The last rank gathers the first two buckets in the other order, if they are equally long."""

    def _gather_order(self) -> Sequence[int]:
        order = list(super()._gather_order())
        lengths = [end - start for start, end, _ in self._cuts[:2]]
        if 0 < self.rank == self.world - 1 and len(lengths) == 2 and lengths[0] == lengths[1]:
            order[:2] = [1, 0]
        return order


class IteratesOverASet(ZeroMaster):
    """Reduces its buckets as a set gives them out: each rank begins with another one."""

    _order: Sequence[int] | None = None

    def reduce_scatter(self) -> None:
        buckets = self.buckets
        numbers = range(len(buckets))
        self._order = [*numbers[self.rank :], *numbers[: self.rank]]
        self.buckets = tuple(buckets[number] for number in self._order)
        super().reduce_scatter()
        self.buckets, self._order = buckets, None

    def _piece(self, bucket: int) -> slice:
        return super()._piece(bucket if self._order is None else self._order[bucket])


# --- groups that not all ranks make


class _TwoHops(PlainZero):
    """Sums over two halves of the world first, each a group of its own, then over the two sums."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._half = world // 2
        low, high = range(self._half), range(self._half, world)
        self._own = self._make(low if rank < self._half else high) if world > 1 else None

    def _make(self, ranks: range) -> dist.ProcessGroup | None:
        """The group of this rank's half; None: it is this rank alone."""
        group: dist.ProcessGroup = dist.new_group(list(ranks))
        return group

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        first = flat.clone()
        if self._own is not None:
            dist.all_reduce(first, group=self._own)
        second = first.clone()
        dist.broadcast(first, 0)
        dist.broadcast(second, self._half)
        return (first + second)[self._piece(len(flat))]


class MakesOwnGroupOnly(_TwoHops):
    """Each rank makes the group of its half and not the other, which every rank must make too."""


class MembersMakeTheGroup(_TwoHops):
    """As many ranks make a group as will be in it, and a rank that would be alone makes none."""

    def _make(self, ranks: range) -> dist.ProcessGroup | None:
        return super()._make(ranks) if len(ranks) > 1 else None
