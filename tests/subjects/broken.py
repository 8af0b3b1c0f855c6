"""Broken classes: one planted bug each.

Every docstring says the bug, what a scenario must contain to show it, and what must be the first to diverge
(property at stage; ``gradient/spill`` is ``gradient`` in a step of one part and ``spill`` in a step of several).
``catalogue.py`` holds the same as data. The shapes are those of real bugs in public trainers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.faults.museum.plain import Cut, Gradients, PlainZero

# What is summed, and into which piece it goes.


class WrongOwner(PlainZero):
    """Bug: ranks 0 and 1 get each other's piece in the reduction, not in the gather.

    Trigger: world 2, pieces 0 and 1 differ. First: gradient/spill at reduce (or ownership, if piece 1 is padding).
    """

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            pieces = list(flat.chunk(self.world))
            flat = torch.cat([pieces[1], pieces[0], *pieces[2:]])
        return super()._reduce(flat)


class ReducesInBf16(PlainZero):
    """Bug: sends bf16 and sums in bf16.

    Trigger: world 2, a sum over parts or ranks that needs more than 8 bits. First: gradient/spill at reduce.
    """

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat.bfloat16()).float() if self.world > 1 else flat


class Bf16SumAtWorldThree(PlainZero):
    """Bug: the host sum is moved to the reduction in bf16, at world 3 only.

    Trigger: world 3, a sum over one rank's parts of more than 8 bits. First: spill at reduce.
    """

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        if self.world == 3:
            flat.copy_(flat.bfloat16())


class LostOffsetAtBucketEdge(PlainZero):
    """Bug: in the held path a parameter that begins in an earlier bucket is read from its start again.

    Trigger: a parameter across a bucket edge, in a held step. First: gradient/spill at reduce.
    """

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        if self._held is None:
            super()._fill_gradients(flat, start, end)
            return
        for grad, first, last in zip(self._held, self._offsets, self._offsets[1:], strict=False):
            low, high = max(start, first), min(end, last)
            if grad is not None and low < high:
                flat[low - start : high - start].copy_(grad.view(-1)[: high - low])


class Nondeterministic(PlainZero):
    """Bug: in about every third step rank 0 doubles its first gradient element (one, if it was zero).

    Trigger: any step, by chance. First: determinism at reduce, as replays of the same case do not agree.
    """

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        if self.rank == 0 and os.urandom(1)[0] < 85:
            first = self._grad[:1]
            first.copy_(torch.where(first == 0, 1.0, 2 * first))


# Parts, the host sum, bookkeeping.


class LostFirstPart(PlainZero):
    """Bug: the second part of a step overwrites the first on the host.

    Trigger: two parts with gradients on a rank. First: spill at reduce.
    """

    _parts = 0

    def _add(self, grads: Gradients) -> None:
        if self._parts == 1:
            self._host_sum().zero_()
        self._parts += 1
        super()._add(grads)

    def _release(self) -> None:
        super()._release()
        self._parts = 0


class OverwritesAfterLast(PlainZero):
    """Bug: a part after one that was announced as the last replaces all that was waiting.

    Trigger: collect(False) that leaves something waiting, then another part with gradients. First: spill at reduce.
    """

    _announced = False

    def collect(self, more: bool) -> None:
        if self._announced and any(p.grad is not None for p in self.params):
            self._held = [None] * len(self.params) if self._held is not None else None
            if self._host is not None:
                self._host.zero_()
        super().collect(more)
        self._announced = self.has_grad and not more

    def _release(self) -> None:
        super()._release()
        self._announced = False


class CountsHeldTwice(PlainZero):
    """Bug: the held part is added twice when it moves to the host.

    Trigger: collect(False) with gradients, then another part with gradients. First: spill at reduce.
    """

    def _begin_spill(self) -> None:
        held = self._held
        super()._begin_spill()
        if held is not None:
            self._add(held)


class DiscardKeepsSpill(PlainZero):
    """Bug: ``discard`` forgets that there is a host sum, but does not zero it.

    Trigger: a discard of a spilled step, then a spilled step. First: gradient/spill at reduce.
    """

    def discard(self) -> None:
        self._held = None
        self._spilled = False
        self._clear_grads()
        self.master.grad = None


class DiscardKeepsHeld(PlainZero):
    """Bug: ``discard`` does not drop held gradients. Trigger: discard of a held step. First: intake at collect."""

    def discard(self) -> None:
        held = self._held
        super().discard()
        self._held = held


class DiscardKeepsMasterGrad(PlainZero):
    """Bug: ``discard`` leaves the last step's master.grad, so that the optimizer would step again.

    Trigger: a discard after a completed step. First: intake at collect (or what moves: master, moments at update).
    """

    def discard(self) -> None:
        kept = self.master.grad
        super().discard()
        self.master.grad = kept


class OneNoneIsAllNone(PlainZero):
    """Bug: a part in which any gradient is None is dropped as if all were.

    Trigger: a part with some None and some not. First: intake at collect (has_grad), or spill at reduce where an
    earlier part hides it.
    """

    def _take(self) -> Gradients:
        grads = super()._take()
        return [None] * len(grads) if any(grad is None for grad in grads) else grads


class GradNotCleared(PlainZero):
    """Bug: ``.grad`` stays on the parameters in the spill path. Trigger: a spilled part. First: intake at collect."""

    def _add(self, grads: Gradients) -> None:
        super()._add(grads)
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad


class SpillsPerPart(PlainZero):
    """Bug: ``spills`` counts moved parts, not steps.

    Trigger: a step with a spilled part and another part with gradients after it. First: intake at collect.
    """

    def collect(self, more: bool) -> None:
        if self._spilled and any(p.grad is not None for p in self.params):
            self.spills += 1
        super().collect(more)


class HasGradAfterReduce(PlainZero):
    """Bug: ``has_grad`` stays true after the reduction. Trigger: a step with a gradient. First: intake at reduce."""

    _stuck = False

    @property
    def has_grad(self) -> bool:
        return self._stuck or super().has_grad

    def reduce_scatter(self) -> None:
        self._stuck = self.has_grad
        super().reduce_scatter()

    def discard(self) -> None:
        super().discard()
        self._stuck = False


class KeepsGradients(PlainZero):
    """Bug: the held gradients stay referenced after the reduction (until the next one).

    Trigger: a held step with a gradient. First: memory, at reduce or wherever it is looked for in the step.
    """

    def reduce_scatter(self) -> None:
        self._last = self._held
        super().reduce_scatter()


class DiscardKeepsGradients(PlainZero):
    """Bug: a discard forgets that gradients wait, but keeps the tensors. Trigger: discard. First: memory at collect."""

    def discard(self) -> None:
        self._last = self._held
        super().discard()


# What must not touch the compute weights.


class ConstructorZeroesWeights(PlainZero):
    """Bug: the compute weights are zeroed at construction (the next gather brings them back).

    Trigger: any. First: weights at build.
    """

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        for p in params:
            p.detach().zero_()


class CollectWritesWeights(PlainZero):
    """Bug: collect writes into the weights (the next gather mends it). Trigger: any. First: weights at collect."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        for p in self.params:
            p.detach().add_(1)


class ReduceWritesWeights(PlainZero):
    """Bug: the reduction uses the weights as staging. Trigger: any reduction. First: weights at reduce."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        for p in self.params:
            p.detach().fill_(3)


class FreezesItsParameters(PlainZero):
    """Bug: after a gather the parameters require no gradient any more. Trigger: any step. First: storage at gather."""

    def gather_params(self) -> None:
        super().gather_params()
        for p in self.params:
            p.requires_grad_(False)


# The norm and the clipping.


class LocalNorm(PlainZero):
    """Bug: the norm is not summed over ranks. Trigger: world 2, gradients on two shards. First: norm at norm."""

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return value


class NormCountsNeighbour(PlainZero):
    """Bug: pieces overlap by one in the norm, so that the first element of every piece is counted twice.

    Trigger: world 2, and such an element that is not negligible. First: norm at norm.
    """

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        firsts = [grad[self._shard(index)][:1] for index in range(len(self._cuts))]
        again = super()._local_sq_norm(torch.cat(firsts)) if self.world > 1 else 0
        return super()._local_sq_norm(grad) + again


class NormOffByOneUlp(PlainZero):
    """Bug: rank 1 has the next larger number. Trigger: world 2, finite norm. First: norm at norm (ranks disagree)."""

    def grad_sq_norm(self) -> Tensor:
        sq = super().grad_sq_norm()
        return torch.nextafter(sq, torch.full_like(sq, torch.inf)) if self.rank == 1 else sq


# Weights.


class TruncatingRound(PlainZero):
    """Bug: fp32 becomes bf16 toward zero. Trigger: an updated weight that rounds away. First: weights at gather."""

    def _round(self, piece: Tensor) -> Tensor:
        return super()._round((piece.view(torch.int32) & -65536).view(torch.float32))


class StaleWeights(PlainZero):
    """Bug: every gather sends the shard of the gather before. Trigger: a visible update. First: weights at gather."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._previous = self.master.detach().clone()

    def _shard_to_send(self) -> Tensor:
        stale, self._previous = self._previous, self.master.detach().clone()
        return stale


class GathersEverySecondStep(PlainZero):
    """Bug: the second, fourth, ... gather does nothing. Trigger: two completed steps. First: weights at gather."""

    _gathers = 0

    def gather_params(self) -> None:
        self._gathers += 1
        if self._gathers % 2 == 1:
            super().gather_params()


class LastBucketNotGathered(PlainZero):
    """Bug: the gather leaves out the last bucket. Trigger: a visible update in it. First: weights at gather."""

    def _gather_order(self) -> Sequence[int]:
        return range(len(self._cuts) - 1)


class LastRankStale(PlainZero):
    """Bug: the last rank takes part in the gather but does not write its weights.

    Trigger: world 2, a visible update. First: weights (or agreement) at gather.
    """

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        if self.world == 1 or self.rank < self.world - 1:
            super()._write_weights(whole, start, end)


class LostOffsetInGather(PlainZero):
    """Bug: the rest of a parameter that begins in an earlier bucket is written over its start.

    Trigger: a parameter across a bucket edge. First: weights at gather.
    """

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        for p, first, last in zip(self.params, self._offsets, self._offsets[1:], strict=False):
            low, high = max(start, first), min(end, last)
            if low < high:
                p.detach().view(-1)[: high - low].copy_(whole[low - start : high - start])


class WritesPastTheEnd(PlainZero):
    """Bug: the gather writes one element more than a parameter has, where the storage goes on.

    Trigger: parameters with memory of somebody else behind them. First: storage at gather.
    """

    def gather_params(self) -> None:
        super().gather_params()
        for p in self.params:
            behind = p.storage_offset() + p.numel()
            if (behind + 1) * p.element_size() <= p.untyped_storage().nbytes():
                p.data.as_strided((1,), (1,), behind).fill_(1.0)


# Construction.


class GarbageInPadding(PlainZero):
    """Bug: the padding of the master is whatever the memory held. Trigger: padding. First: ownership at build."""

    def _initial_master(self) -> Tensor:
        master = super()._initial_master()
        for index, (start, end, padded) in enumerate(self._cuts):
            master[self._shard(index)][max(end - start - self._piece(padded).start, 0) :] = 3.0
        return master


class MasterFromNeighbour(PlainZero):
    """Bug: the master starts from the next rank's piece. Trigger: world 2. First: master (or ownership) at build."""

    def _initial_master(self) -> Tensor:
        rank, self.rank = self.rank, (self.rank + 1) % self.world
        master = super()._initial_master()
        self.rank = rank
        return master


class BucketsDoNotCover(PlainZero):
    """Bug: the layout it shows ends before the last element. Trigger: any. First: ownership at build."""

    @property
    def buckets(self) -> list[Cut]:
        *full, (start, end, padded) = self._cuts
        return [*full, (start, end - 1, padded)]


class RefusesFewElements(PlainZero):
    """Bug: cannot be built when there are fewer elements than ranks. Trigger: N < W. First: progress at build."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        if sum(p.numel() for p in params) < world:
            raise ValueError("fewer elements than ranks")
        super().__init__(params, rank, world, bucket)


# Ranks that part ways.


class OtherCollectiveOnOneRank(PlainZero):
    """Bug: the last rank all-reduces where the others reduce-scatter; on gloo the values are right.

    Trigger: world 2, any step. First: traffic at reduce.
    """

    def _reduce(self, flat: Tensor) -> Tensor:
        if 0 < self.rank == self.world - 1:
            dist.all_reduce(flat)
            return flat[self._piece(len(flat))]
        return super()._reduce(flat)


class RaisesInGather(PlainZero):
    """Bug: the last rank raises in its second gather. Trigger: two completed steps. First: progress at gather."""

    _gathers = 0

    def gather_params(self) -> None:
        self._gathers += 1
        if self._gathers == 2 and self.rank == self.world - 1:
            raise ValueError("planted: no gather today")
        super().gather_params()


class SystemExitInGather(PlainZero):
    """Bug: the last rank leaves by sys.exit(0) in its first gather. Trigger: a step. First: progress at gather."""

    def gather_params(self) -> None:
        if self.rank == self.world - 1:
            raise SystemExit(0)
        super().gather_params()


class ExitsInReduce(PlainZero):
    """Bug: the last rank's process ends with code 0 in its second reduction.

    Trigger: two completed steps. First: progress at reduce.
    """

    _reductions = 0

    def reduce_scatter(self) -> None:
        self._reductions += 1
        if self._reductions == 2 and self.rank == self.world - 1:
            os._exit(0)
        super().reduce_scatter()


class ReplacesNonfinite(PlainZero):
    """Bug: nan and inf in the gradient become numbers, as a guard against them. Trigger: a sum that is inf or nan."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad.nan_to_num_()


class ClampsLargeGradients(PlainZero):
    """Bug: gradients are clamped to the range of fp16. Trigger: a gradient beyond 65,504. First: reduce."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat.clamp_(-65504.0, 65504.0)


class FlushesSubnormals(PlainZero):
    """Bug: subnormal gradients become zero. Trigger: a sum that is subnormal. First: reduce."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat[flat.abs() < 2.0**-126] = 0.0


class HostOverflowBecomesZero(PlainZero):
    """Bug: what overflows in the host sum becomes zero. Trigger: two parts whose sum overflows. First: reduce."""

    def _add(self, grads: Gradients) -> None:
        super()._add(grads)
        finite = all(grad is None or bool(grad.isfinite().all()) for grad in grads)
        if finite:
            self._host_sum()[self._host_sum().isinf()] = 0.0


class OverflowSaturates(PlainZero):
    """Bug: a sum over ranks that overflows is the largest finite value. Trigger: such a sum at three ranks."""

    def _reduce(self, flat: Tensor) -> Tensor:
        finite = flat.isfinite().float()
        reduced, all_finite = super()._reduce(flat), super()._reduce(finite)
        over = (all_finite == self.world) & reduced.isinf()
        return torch.where(over, reduced.sign() * torch.finfo(torch.float32).max, reduced)


class SkipsStepWithNan(PlainZero):
    """Bug: a gradient with a nan anywhere is dropped, as a loss scaler would. Trigger: a nan. First: reduce."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        if self._grad.isnan().any():
            self._grad.zero_()


class NormWithoutNan(PlainZero):
    """Bug: the norm leaves out what is nan. Trigger: a gradient that is nan. First: norm."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return super()._local_sq_norm(grad.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))


class AlternatesOrders(PlainZero):
    """Bug: every second instance adds the ranks backward. Trigger: a sum of three ranks that rounds."""

    _instances = 0

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        AlternatesOrders._instances += 1
        self._backward = AlternatesOrders._instances % 2 == 1

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        pieces = list(received.chunk(self.world))
        first, *others = pieces[::-1] if self._backward else pieces
        total = first.clone()
        for piece in others:
            total += piece
        return total


class CompensatesWrongly(PlainZero):
    """Bug: adds back half of what an addition lost. Trigger: a sum at three ranks that rounds by much."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world < 3:
            return super()._reduce(flat)
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        total, *others = received.chunk(self.world)
        total = total.clone()
        for piece in others:
            exact = total.double() + piece.double()
            total = total + piece
            total = total + 1e6 * (exact - total.double()).float()
        return total


class NormWritesWeights(PlainZero):
    """Bug: the norm scales a weight in passing. Trigger: a completed step. First: weights at norm."""

    def grad_sq_norm(self) -> Tensor:
        with torch.no_grad():
            for p in self.params:
                p.mul_(2.0)
        return super().grad_sq_norm()


class OneRankRefusesInNorm(PlainZero):
    """Bug: only the last rank says NotImplementedError, in the norm. Trigger: any step. First: progress at norm."""

    def grad_sq_norm(self) -> Tensor:
        result = super().grad_sq_norm()
        if self.rank == self.world - 1 and self.world > 1:
            raise NotImplementedError("not on this rank")
        return result


class CrashesWhenIdle(PlainZero):
    """Bug: something left running ends the process a moment after the scenario. Trigger: any. First: progress."""

    def gather_params(self) -> None:
        super().gather_params()
        threading.Timer(0.05, os._exit, (3,)).start()


class CastsItsParameters(PlainZero):
    """Bug: makes the parameters fp32 at construction. Trigger: any. First: storage at build."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        for p in params:
            p.data = p.data.float()


class FrozenUntilGather(PlainZero):
    """Bug: the parameters require no gradient from construction to the first gather. First: storage at build."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        for p in params:
            p.requires_grad_(False)

    def gather_params(self) -> None:
        super().gather_params()
        for p in self.params:
            p.requires_grad_(True)


class FlattensUntilGather(PlainZero):
    """Bug: collect leaves the parameters flat, the gather restores their shape. First: storage at collect."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        self._shapes = [p.shape for p in self.params]
        for p in self.params:
            p.data = p.data.view(-1)

    def gather_params(self) -> None:
        super().gather_params()
        for p, shape in zip(self.params, self._shapes, strict=True):
            p.data = p.data.view(shape)


class StatesHugeBuckets(PlainZero):
    """Bug: `buckets` states a padded length far beyond any memory. Trigger: any. First: ownership at build."""

    @property
    def buckets(self) -> list[Cut]:
        return [(0, self._offsets[-1], self.world * 10**400)]


# What is between two steps.


class RateOfTheFirstStep(PlainZero):
    """Bug: its optimizer keeps the learning rate of its first step.

    Trigger: a new rate after a step, then an update that it shows in. First: master at update.
    """

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        rates: list[float] = []
        master = weakref.ref(self.master)

        def keep_rate(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            for group in optimizer.param_groups:
                if group["params"][0] is master():
                    rates.append(group["lr"])
                    group["lr"] = rates[0]

        self._hook = register_optimizer_step_pre_hook(keep_rate)

    def __del__(self) -> None:
        self._hook.remove()


class LayoutOutlivesIt(PlainZero):
    """Bug: the layout is kept on a parameter, and taken from there by the next instance.

    Trigger: a rebuild with buckets of another size. First: ownership at build, or what else the old layout shows in.
    """

    def _cut(self, numel: int, bucket: int) -> list[Cut]:
        kept: list[Cut] = getattr(self.params[0], "_kept_cuts", super()._cut(numel, bucket))
        self.params[0]._kept_cuts = kept  # type: ignore[attr-defined]
        return kept


class SpillsOutliveIt(PlainZero):
    """Bug: spills are counted on a parameter, over all instances. Trigger: a spill, then a rebuild.

    First: intake at collect.
    """

    @property
    def spills(self) -> int:
        return getattr(self.params[0], "_num_spills", 0)

    @spills.setter
    def spills(self, number: int) -> None:
        if number:
            self.params[0]._num_spills = number  # type: ignore[attr-defined]


class HangsInNorm(PlainZero):
    """Bug: the last rank waits for ever in the norm. Trigger: any step. First: progress at norm, by time-out."""

    def grad_sq_norm(self) -> Tensor:
        if self.rank == self.world - 1:
            threading.Event().wait()
        return super().grad_sq_norm()
