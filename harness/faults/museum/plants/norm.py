"""Plants: the norm of the gradient, and clipping by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain import PlainZero
from zero2core import collectives
from zero2core.errors import GradientStateError
from zero2core.zero_master import ZeroMaster


class _NormInTwoSteps(ZeroMaster):
    """Right: the sum over a rank's own elements, and the sum over ranks, in methods of their own."""

    @torch.no_grad()
    def grad_sq_norm(self) -> Tensor:
        if self.master.grad is None:
            raise GradientStateError("grad_sq_norm without a reduced gradient")
        return self._over_ranks(self._of_shard(self.master.grad[: self._num_owned]).reshape(1))[0]

    def _of_shard(self, grad: Tensor) -> Tensor:
        return self._squares(grad)

    def _squares(self, grad: Tensor) -> Tensor:
        return grad.double().square().sum()

    def _over_ranks(self, total: Tensor) -> Tensor:
        if self.comm:
            collectives.all_reduce_sum(total, group=self._group)
        return total

    def _by_parameter(self, grad: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What this rank owns of each parameter, with the parameter's index."""
        for start, stop, offset in self.layout.segments(self.rank):
            for span in self.layout.spans(start, stop):
                yield span.parameter, grad[offset + span.offset :][: span.stop - span.start]


# Over which ranks it is summed.


class MaxOfNorms(PlainZero):
    """Takes the largest of the ranks' squared norms for the total."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value


class NormReducedTwice(PlainZero):
    """Summed over ranks twice."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return super()._sum_over_ranks(super()._sum_over_ranks(value))


class NormOverReplicasToo(PlainZero):
    """Sees two rows of ranks from world 4 on, and adds up the totals of both, as if each had only its own."""

    _columns: ClassVar[dict[int, list[dist.ProcessGroup]]] = {}

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        super()._sum_over_ranks(value)
        half = self.world // 2
        if self.world == 2 * half > 2:
            if self.world not in self._columns:
                self._columns[self.world] = [dist.new_group([rank, rank + half]) for rank in range(half)]
            dist.all_reduce(value, group=self._columns[self.world][self.rank % half])
        return value


class UnreducedOnFlatMesh(PlainZero):
    """Takes the gradient for whole where the ranks form no mesh of two full axes, and sums the norm over none."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return super()._sum_over_ranks(value) if self.world == 4 else value


class NormOnRootOnly(PlainZero):
    """Sums the norm to rank 0 with ``reduce``, and every rank uses what it is left with."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.reduce(value, dst=0)
        return value


class NormByColour(_NormInTwoSteps):
    """Parameters at odd indices have a group of their own, this rank alone, over which their share is summed."""

    def grad_sq_norm(self) -> Tensor:
        shared = super().grad_sq_norm()
        own = [self._squares(part) for index, part in self._by_parameter(self.grad_buf) if index % 2 == 1]
        return shared + sum(own)

    def _of_shard(self, grad: Tensor) -> Tensor:
        even = [self._squares(part) for index, part in self._by_parameter(grad) if index % 2 == 0]
        return torch.stack([*even, torch.zeros((), dtype=torch.float64)]).sum()


class ReadsNormBeforeWait(_NormInTwoSteps):
    """Copies the total before the all-reduce that makes it is waited for."""

    def _over_ranks(self, total: Tensor) -> Tensor:
        if not self.comm:
            return total
        work = dist.all_reduce(total, group=self._group, async_op=True)
        copy = total.clone()
        work.wait()
        return copy


# What is counted.


class CountsReplicasInNorm(PlainZero):
    """Keeps a short last bucket whole on every rank, and adds up the ranks' norms as if each had a part of it."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        start, end, _ = self._cuts[-1]
        if len(self._cuts) == 1 or end - start == self._cuts[0][1]:
            return super()._local_sq_norm(grad)
        sharded, replicated = grad[: self._starts[-2]], self._gather(grad[self._starts[-2] :])
        return super()._local_sq_norm(sharded) + super()._local_sq_norm(replicated)


class CountsVectorsOnRankZero(_NormInTwoSteps):
    """Takes parameters of one dimension for replicated, and counts them on rank 0 alone."""

    def _of_shard(self, grad: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index, part in self._by_parameter(grad):
            if self.rank == 0 or self.params[index].dim() != 1:
                total += self._squares(part)
        return total


class CountsTiedWeightTwice(_NormInTwoSteps):
    """Counts the first parameter once more, as a head that is tied to it."""

    def _of_shard(self, grad: Tensor) -> Tensor:
        total = super()._of_shard(grad)
        for index, part in self._by_parameter(grad):
            if index == 0:
                total += self._squares(part)
        return total


class NormSkipsLastBucket(PlainZero):
    """The left-over bucket is not in the norm."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return super()._local_sq_norm(grad[: self._starts[-2]] if len(self._cuts) > 1 else grad)


class FirstBucketDecidesFinite(PlainZero):
    """Looks for inf and nan in the first bucket alone, and where there is none, leaves out those of the others."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        finite = grad[self._shard(0)].isfinite().all().float()
        if self.world > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return super()._local_sq_norm(grad[grad.isfinite()] if finite else grad)


class CountsLeftoversOfReduce(PlainZero):
    """Reduces every piece to its owner, and counts what it is left with of the others' pieces too."""

    def reduce_scatter(self) -> None:
        self._leftovers: list[Tensor] = []
        super().reduce_scatter()

    def _reduce(self, flat: Tensor) -> Tensor:
        pieces = list(flat.clone().chunk(self.world))
        if self.world > 1:
            for owner, piece in enumerate(pieces):
                dist.reduce(piece, dst=owner)
        own = pieces.pop(self.rank)
        self._leftovers += pieces
        return own

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return super()._local_sq_norm(torch.cat([grad, *self._leftovers]))


class NormOfAGenerator(_NormInTwoSteps):
    """Walks the pieces of a reduction by one generator, which the second question finds used up."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._pieces = (self.grad_buf[self._piece(index)] for index in range(len(self.buckets)))

    def _of_shard(self, grad: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for piece in self._pieces:
            total += self._squares(piece)
        return total


# Powers, roots, scales.


class NormOfTheMean(_NormInTwoSteps):
    """Takes the norm as of the mean over parts, where the gradient is their sum."""

    _parts = 0
    _reduced_parts = 1

    def collect(self, more: bool) -> None:
        super().collect(more)
        self._parts += 1

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._reduced_parts, self._parts = self._parts, 0

    def discard(self) -> None:
        super().discard()
        self._parts = 0

    def grad_sq_norm(self) -> Tensor:
        return super().grad_sq_norm() / self._reduced_parts**2


class InfinityRoot(ZeroMaster):
    """Takes a p-th root at the end, with p infinite."""

    def grad_sq_norm(self) -> Tensor:
        return super().grad_sq_norm() ** (1 / math.inf)


class NormRoot(PlainZero):
    """The norm, not its square."""

    def grad_sq_norm(self) -> Tensor:
        return super().grad_sq_norm().sqrt()


class NormalisesByLargest(PlainZero):
    """Divides by a shard's largest magnitude so that no square overflows; a shard of zeros has none."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        largest = grad.double().abs().max()
        return (grad / largest).square().sum() * largest.square()


# How it is rounded, and in which order it is added.


class SquaresInFloat32(_NormInTwoSteps):
    """Squares in fp32, which overflow from 2**64 on."""

    def _squares(self, grad: Tensor) -> Tensor:
        return grad.square().sum().double()


class SumsSquaresInBf16(_NormInTwoSteps):
    """Squares and sums in bf16."""

    def _of_shard(self, grad: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.bfloat16)
        for part in torch.split(grad, 64):
            total += part.bfloat16().square().sum()
        return total.double()


class NormRoundedToBf16(ZeroMaster):
    """The norm comes in bf16, the dtype of the weights, and with it the factor that fp32 gradients are scaled by."""

    def grad_sq_norm(self) -> Tensor:
        return super().grad_sq_norm().bfloat16()


class AddsOwnNormFirst(PlainZero):
    """Adds the ranks' fp32 norms in an order that begins with its own: another one on every rank."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return grad.square().sum()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return functools.reduce(torch.add, self._gather(value.reshape(1)).roll(-self.rank).unbind())


class NormInArrivalOrder(PlainZero):
    """Adds squares one by one in fp32, from whichever comes first: at every call another one."""

    _calls: ClassVar[int] = 0

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        NormInArrivalOrder._calls += 1
        squares = grad.square().roll(NormInArrivalOrder._calls)
        return torch.from_numpy(squares.numpy().cumsum()[-1:])


# What a clip changes.


class NormOfSavedCopy(PlainZero):
    """The norm is taken from a copy made in the reduction, so that clipping does not change it."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._saved = self._grad.clone()

    def _reduced(self) -> Tensor:
        super()._reduced()
        return self._saved


class ClipUndone(PlainZero):
    """The second ``grad_sq_norm`` of a step returns the right value, but puts the unclipped gradient back."""

    _saved: Tensor | None = None

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._saved = None

    def grad_sq_norm(self) -> Tensor:
        sq = super().grad_sq_norm()
        if self._saved is None:
            self._saved = self._grad.clone()
        else:
            self._restore(self._saved)
        return sq

    def _restore(self, saved: Tensor) -> None:
        self._grad.copy_(saved)


class ClipsOnRankZeroOnly(ClipUndone):
    """The clip is undone on all ranks but the first."""

    def _restore(self, saved: Tensor) -> None:
        if self.rank > 0:
            super()._restore(saved)
