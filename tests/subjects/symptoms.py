"""Broken classes whose mistake is known in the words of :mod:`harness.diagnosis.symptoms`, or is none of these.

``symptom_table.py`` says which. They were written from the list of symptoms, to measure how often a named one is right.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain import Gradients, PlainZero

# --- the reduced gradient


class DividesBeforeTheSum(PlainZero):
    """Each rank divides its own by W."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat / self.world)


class _CountsParts(PlainZero):
    _parts = 0

    def collect(self, more: bool) -> None:
        self._parts += 1
        super().collect(more)

    def _release(self) -> None:
        super()._release()
        self._parts = 0


class TimesParts(_CountsParts):
    """Multiplies by the number of parts."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) * max(self._parts, 1)


class DropsTheSecondPart(PlainZero):
    """Of several parts with gradients, the second is not added on any rank."""

    _added = 0

    def _add(self, grads: Gradients) -> None:
        self._added += 1
        if self._added != 2:
            super()._add(grads)

    def _release(self) -> None:
        super()._release()
        self._added = 0


class AddsTheLastAnnouncedTwice(PlainZero):
    """A spilled part that is announced as the last is added once more."""

    def collect(self, more: bool) -> None:
        grads: Gradients = [p.grad for p in self.params]
        super().collect(more)
        if not more and self._spilled:
            self._add(grads)


class RankZeroLeftOut(PlainZero):
    """Rank 0 contributes zeros where there are others."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(torch.zeros_like(flat) if self.world > 1 and self.rank == 0 else flat)


class LastRankTwice(PlainZero):
    """The last rank of several contributes twice."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat * 2 if 0 < self.rank == self.world - 1 else flat)


class EverySecondReductionLost(PlainZero):
    """What a second reduction gives is not written to master.grad."""

    _reductions = 0

    def reduce_scatter(self) -> None:
        self._reductions += 1
        kept = self._grad.clone()
        super().reduce_scatter()
        if self._reductions % 2 == 0:
            self._grad.copy_(kept)


class AddsToTheLastGradient(PlainZero):
    """Adds what was reduced to the gradient of the step before."""

    def reduce_scatter(self) -> None:
        kept = self._grad.clone()
        super().reduce_scatter()
        self._grad += kept


class SpillKeptAfterASpill(PlainZero):
    """Rank 0 does not zero its host sum."""

    def _release(self) -> None:
        self._held = None
        self._spilled = False
        if self._host is not None and self.rank:
            self._host.zero_()


class FirstBucketForAll(PlainZero):
    """Buckets as long as the first get its gradients."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        first = self._cuts[0][1]
        super()._fill_gradients(flat, *((0, first) if end - start == first else (start, end)))


class ReadsOneTooFar(PlainZero):
    """Every element gets the gradient of the one behind it; the last keeps its own."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        whole = torch.zeros(self._offsets[-1])
        super()._fill_gradients(whole, 0, self._offsets[-1])
        whole[:-1] = whole[1:].clone()
        flat[: end - start].copy_(whole[start:end])


class PadsWithOnes(PlainZero):
    """What is behind the elements of a bucket is one, on every rank."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat[end - start :] = 1.0


class CutsTheGradient(PlainZero):
    """Reduced gradients lose their low bits."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad.view(torch.int32).bitwise_and_(-65536)


class SendsBf16(PlainZero):
    """Each rank's sum is rounded before it is added to the others'."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat.bfloat16().float())


class LastBucketZero(PlainZero):
    """The last of several buckets is not reduced."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        if end < self._offsets[-1] or start == 0:
            super()._fill_gradients(flat, start, end)


class ZeroWhereItHadNone(PlainZero):
    """A rank drops what others have for parameters of which it has no gradient itself, in its own shard."""

    def reduce_scatter(self) -> None:
        held = self._held
        super().reduce_scatter()
        if held is None:
            return
        for index, (start, end, padded) in enumerate(self._cuts):
            keep = torch.ones(padded)
            for grad, first, last in zip(held, self._offsets, self._offsets[1:], strict=False):
                low, high = max(start, first), min(end, last)
                if grad is None and low < high:
                    keep[low - start : high - start] = 0.0
            self._grad[self._shard(index)].mul_(keep[self._piece(padded)])


class NanBecomesZero(PlainZero):
    """A guard that hides nan."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad.copy_(torch.where(self._grad.isnan(), 0.0, self._grad))


# --- construction and weights


class MasterOneTooFar(PlainZero):
    """The master is made from weights that lie one further."""

    def _initial_master(self) -> Tensor:
        kept = [p.detach().clone() for p in self.params]
        flat = torch.cat([p.detach().reshape(-1) for p in self.params])
        flat[:-1] = flat[1:].clone()
        for p, first, last in zip(self.params, self._offsets, self._offsets[1:], strict=False):
            p.detach().view(-1).copy_(flat[first:last])
        master = super()._initial_master()
        for p, before in zip(self.params, kept, strict=True):
            p.detach().copy_(before)
        return master


class MasterStartsAtZero(PlainZero):
    """The master is not made from the weights."""

    def _initial_master(self) -> Tensor:
        return torch.zeros_like(super()._initial_master())


class GathersTurned(PlainZero):
    """Pieces are put together one rank too far."""

    def _gather(self, piece: Tensor) -> Tensor:
        whole = super()._gather(piece)
        return whole.roll(len(piece)) if self.world > 1 else whole


class GathersTheFirstBucketTwice(PlainZero):
    """The second bucket, if it is as long as the first, gets its weights."""

    def gather_params(self) -> None:
        shard = self._shard_to_send()
        for index, (start, end, padded) in enumerate(self._cuts):
            source = 0 if index == 1 and padded == self._cuts[0][2] else index
            self._write_weights(self._gather(self._round(shard[self._shard(source)])), start, end)


class RankZeroNotWritten(PlainZero):
    """Rank 0 of several does not write the weights of the first bucket."""

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        if start or self.rank or self.world == 1:
            super()._write_weights(whole, start, end)


class JoinsWithPadding(PlainZero):
    """Weights are read from buckets put together with their padding."""

    def gather_params(self) -> None:
        shard = self._shard_to_send()
        wholes = [self._gather(self._round(shard[self._shard(index)])) for index in range(len(self._cuts))]
        self._write_weights(torch.cat(wholes), 0, self._offsets[-1])

    @property
    def buckets(self) -> list[tuple[int, int, int]]:
        return self._cuts

    def _padded(self, length: int) -> int:
        return -(-length // self.world) * self.world + self.world


class CutsTheWeights(PlainZero):
    """Weights are rounded toward zero on the last rank's pieces."""

    def _round(self, piece: Tensor) -> Tensor:
        cut = (piece.view(torch.int32) & -65536).view(torch.float32)
        return super()._round(cut if self.rank == self.world - 1 else piece)


# --- the norm


class NormTimesWorld(PlainZero):
    """The sum over ranks is taken of what is summed already."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return super()._sum_over_ranks(super()._sum_over_ranks(value))


class NormOfThisRank(PlainZero):
    """Each rank returns its own."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        super()._sum_over_ranks(value.clone())
        return value


class NormNotSquared(PlainZero):
    """The root is taken."""

    def grad_sq_norm(self) -> Tensor:
        return super().grad_sq_norm().sqrt()


class NormOfTheStepBefore(PlainZero):
    """Every reduction forgets the norm only after it was asked for once more."""

    _fresh = True
    _norm: Tensor | None = None

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._fresh = True

    def grad_sq_norm(self) -> Tensor:
        norm = super().grad_sq_norm()
        stale, self._norm = self._norm, norm
        if self._fresh and stale is not None:
            norm = stale
        self._fresh = False
        return norm


class NormDoubled(PlainZero):
    """Counts everything twice."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return super()._local_sq_norm(grad) * 2


# --- mistakes that no symptom describes


class HalvesTheGradient(PlainZero):
    """A factor that has nothing to do with ranks or parts."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) / 2


class LargestOfTheRanks(PlainZero):
    """The maximum where the sum belongs."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        rows = torch.empty(self.world * len(flat))
        torch.distributed.all_gather_into_tensor(rows, flat)
        return rows.view(self.world, -1).amax(0)[self._piece(len(flat))]


class AddsOne(PlainZero):
    """One is added to every element."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad += (self._grad != 0).float()


class NegatesTheGradient(PlainZero):
    """The wrong sign."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(-flat)


class TurnsBucketsAround(PlainZero):
    """The elements of a bucket in the opposite order."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat[: end - start] = flat[: end - start].flip(0)


class OverWorldLessOne(PlainZero):
    """A mean as of a sample: over W - 1."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) / max(self.world - 1, 1)


class RoundsToFp16(PlainZero):
    """The reduced gradient is rounded to fp16."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad.copy_(self._grad.half())


class AbsoluteGradient(PlainZero):
    """The sign is lost."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad.abs_()


class SubtractsTheMean(PlainZero):
    """Each parameter's gradient is centred, on the rank that has it."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat[: end - start] -= flat[: end - start].mean()


class WeightsOneUlpUp(PlainZero):
    """Weights are the next larger bf16."""

    def _round(self, piece: Tensor) -> Tensor:
        rounded = super()._round(piece)
        return torch.nextafter(rounded, torch.full_like(rounded, torch.inf))


class WeightsAwayFromZero(PlainZero):
    """Weights are rounded away from zero."""

    def _round(self, piece: Tensor) -> Tensor:
        bits = piece.view(torch.int32)
        return super()._round(torch.where(bits & 65535 != 0, (bits & -65536) + 65536, bits).view(torch.float32))


class NormOfMagnitudes(PlainZero):
    """The sum of magnitudes instead of squares."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return grad.double().abs().sum()


class NormWithoutTheFirstElement(PlainZero):
    """An element of every shard is forgotten."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return super()._local_sq_norm(grad[1:])


class TransposesMatrices(PlainZero):
    """Gradients of matrices are read column by column."""

    def _take(self) -> Gradients:
        grads = super()._take()
        return [g.t().contiguous() if g is not None and g.dim() == 2 else g for g in grads]


# --- what only signs, or only the order, can tell


class MasterOfMinusZeros(PlainZero):
    """Takes the weights from zero and turns the sign: where one is zero, -0.0 is left."""

    def _initial_master(self) -> Tensor:
        return -(0.0 - super()._initial_master())


class PairsAtRandom(PlainZero):
    """Four ranks' contributions are added in pairs, and which those are changes from run to run."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world != 4:
            return super()._reduce(flat)
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        one, *others = received.chunk(4)
        random.SystemRandom().shuffle(others)
        return (one + others[0]) + (others[1] + others[2])
