"""Plants: gradients of several parts, on the host or held, and those that are missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain import Gradients, PlainZero
from zero2core import collectives
from zero2core.zero_master import ZeroMaster

# Parts that are lost.


class RebuildsTheHostSum(ZeroMaster):
    """Lays its host vector out anew before the second part that it ever adds, and does not copy what was in it."""

    _rebuilt = False

    def _add_to_host(self, grads: Sequence[Tensor | None]) -> None:
        if self._on_host and not self._rebuilt:
            self._rebuilt = True
            self.host = torch.zeros(self.N)
        super()._add_to_host(grads)


class CountsPartsItself(ZeroMaster):
    """Expects as many parts in every step as the first one had, and clears the sum where its own count starts over."""

    _parts = 0
    _parts_per_step: int | None = None

    def collect(self, more: bool) -> None:
        if self.host is not None and self._parts_per_step and self._parts % self._parts_per_step == 0:
            self.host.zero_()
        self._parts += 1
        super().collect(more)

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        if self._parts_per_step is None:
            self._parts_per_step = self._parts


class FinalisesEveryPart(ZeroMaster):
    """Takes every part for the last one of a step, so that the next one starts a new sum."""

    def _add_to_host(self, grads: Sequence[Tensor | None]) -> None:
        self._on_host = False
        super()._add_to_host(grads)


class NewestOnly(PlainZero):
    """A part overwrites the host sum, parameter by parameter."""

    def _add(self, grads: Gradients) -> None:
        for grad, first, last in zip(grads, self._offsets, self._offsets[1:], strict=False):
            if grad is not None:
                self._host_sum()[first:last] = grad.view(-1).float()


class OverwritesAtWorldOne(PlainZero):
    """The branch for a group of one copies a part where it should add it."""

    def _add(self, grads: Gradients) -> None:
        if self.world == 1:
            for grad, first, last in zip(grads, self._offsets, self._offsets[1:], strict=False):
                if grad is not None:
                    self._host_sum()[first:last].zero_()
        super()._add(grads)


# The part in which ranks exchange gradients.


class ReducesInEveryPart(ZeroMaster):
    """Does not look at ``more``: reduces the sum so far in each part, and uses the last result alone."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        if more:
            held, on_host, grad = self.held, self._on_host, self.master.grad
            super().reduce_scatter()
            self.held, self._on_host, self.master.grad = held, on_host, grad
            self._collected = True


class BroadcastsInEveryPart(ZeroMaster):
    """Sends rank 0's weights to all in every part, as some wrappers do with a module's buffers."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        for param in self.params if self.comm else ():
            collectives.broadcast(param.detach().contiguous(), src=0, group=self._group)


class ReducesTheRunningSum(PlainZero):
    """Starts the reduction in every part, over the sum so far, and adds up what these give."""

    _early: Tensor | float = 0.0

    def collect(self, more: bool) -> None:
        super().collect(more)
        if more:
            self._early = self._early + torch.cat([self._reduce(flat) for flat in self._filled()])

    def _filled(self) -> list[Tensor]:
        buckets = [self._staging(padded, end - start) for start, end, padded in self._cuts]
        for flat, (start, end, _) in zip(buckets, self._cuts, strict=True):
            self._fill_gradients(flat, start, end)
        return buckets

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._grad += self._early
        self._early = 0.0

    def discard(self) -> None:
        super().discard()
        self._early = 0.0


class ReducesTheSumInPlace(PlainZero):
    """All-reduces the host sum after every part but the last, in place, and adds the next part to that."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        if more and self.world > 1:
            if self._host is None:
                self._host = torch.zeros(self._offsets[-1])
            dist.all_reduce(self._host)


class ReadsTheFlagTooEarly(ZeroMaster):
    """Whether to reduce is decided by the flag as it was when the last part began: that of the part before."""

    _more = False
    _deferred = False

    def collect(self, more: bool) -> None:
        self._deferred, self._more = self._more, more
        super().collect(more)

    def reduce_scatter(self) -> None:
        comm, self.comm = self.comm, self.comm and not self._deferred
        super().reduce_scatter()
        self.comm = comm


# Scales.


class MeanOverParts(PlainZero):
    """Averages over the parts of the step."""

    _parts = 0

    def collect(self, more: bool) -> None:
        self._parts += 1
        super().collect(more)

    def _release(self) -> None:
        super()._release()
        self._parts = 0

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) / max(self._parts, 1)


class UndoesAScaleThatWasNone(ZeroMaster):
    """Divides the reduced gradient by a loss scale by which no loss was multiplied."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.grad_buf.div_(65536.0)


class WeighsByLocalCounts(PlainZero):
    """Each rank's sum is weighed by how many parts it had, against the mean of all: right if all had as many."""

    _parts = 0
    _weight = 1.0

    def _take(self) -> Gradients:
        grads = super()._take()
        self._parts += any(grad is not None for grad in grads)
        return grads

    def reduce_scatter(self) -> None:
        own = max(self._parts, 1)
        self._weight = self._sum_over_ranks(torch.tensor(float(own))).item() / self.world / own
        super().reduce_scatter()

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat *= self._weight

    def _release(self) -> None:
        super()._release()
        self._parts = 0


# What outlives its step.


class HostNotZeroed(PlainZero):
    """The host sum is not zeroed when it was consumed."""

    def _release(self) -> None:
        self._held = None
        self._spilled = False


class KeepsSkippedGradient(PlainZero):
    """What was reduced in a step that was then skipped is added to the next one."""

    _skipped: Tensor | None = None

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        if self._skipped is not None:
            self._grad += self._skipped
        self._skipped = self._grad.clone()

    def gather_params(self) -> None:
        super().gather_params()
        self._skipped = None

    def discard(self) -> None:
        super().discard()
        self._skipped = None


class KeepsTheViewOfOldBuckets(PlainZero):
    """After two reductions its buckets are laid out anew, and master.grad stays a view of the old ones."""

    _reductions = 0

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._reductions += 1
        if self._reductions == 2:
            self._view, self._grad = self._grad, self._grad.clone()
        elif self._reductions > 2:
            self.master.grad = self._view


# How the sum is kept.


class HostSumsInBf16(PlainZero):
    """The host sum is rounded to bf16 after every part."""

    def _add(self, grads: Gradients) -> None:
        super()._add(grads)
        self._host_sum().copy_(self._host_sum().bfloat16())


class SeeksHeldFloatsInTheSum(ZeroMaster):
    """Takes fp32 gradients from the fp32 sum also in a step that has none, where they are held as they came."""

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        held = self.held
        if held is not None:
            self.held = [None if grad is not None and grad.dtype == torch.float32 else grad for grad in held]
        super()._read_waiting(start, end, out)
        self.held = held


# Gradients that are missing.


class CountsSeenGradients(PlainZero):
    """On the host a gradient's place is counted over the gradients seen, not taken from its parameter."""

    def _add(self, grads: Gradients) -> None:
        first = 0
        for grad in grads:
            if grad is not None:
                self._host_sum()[first : first + grad.numel()] += grad.view(-1).float()
                first += grad.numel()


class OnlyLastPartsParameters(PlainZero):
    """Only parameters that have a gradient in a rank's last part are reduced from the host."""

    _untouched: Sequence[Tensor | None] = ()

    def _add(self, grads: Gradients) -> None:
        super()._add(grads)
        pairs = zip(self.params, grads, strict=True)
        self._untouched = [torch.zeros(p.numel()) if grad is None else None for p, grad in pairs]

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        if self._spilled:
            self._fill(flat, start, end, self._untouched)


class ExposesZeros(ZeroMaster):
    """A parameter without gradient gets one of zeros where any other had one, as views of one flat gradient would."""

    def collect(self, more: bool) -> None:
        missing = [param for param in self.params if param.grad is None]
        super().collect(more)
        if len(missing) < len(self.params):
            for param in missing:
                param.grad = torch.zeros_like(param)


class NoStepWithoutGradients(PlainZero):
    """When no rank has a gradient, master.grad is None: no decay, and the moments stand still."""

    def reduce_scatter(self) -> None:
        anywhere = self._sum_over_ranks(torch.tensor(float(self.has_grad)))
        super().reduce_scatter()
        if anywhere == 0:
            self.master.grad = None
