"""Plants: what is gathered and written, what a load leaves behind, masters that lose bits, decay, what is kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.faults.museum.plain import PlainZero
from harness.faults.museum.plants.layout import _Loads
from zero2core.flat import write_flat
from zero2core.zero_master import BUCKET, ZeroMaster

# --- stale weights and buffers


class SynchronousGatherNotWritten(ZeroMaster):
    """Writes weights when it waits for a handle; the only bucket, which has nothing to overlap with, has none."""

    @torch.no_grad()
    def gather_params(self) -> None:
        if self.comm and len(self.buckets) == 1:
            for _ in self._gathered(self._wire_dtypes):
                pass
        else:
            super().gather_params()


class SkipsMissingHandles(ZeroMaster):
    """Launches a bucket's gather when the one before it is used; what is used first all the same is left as it is."""

    def _gathered(self, wire_dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, Tensor]]:
        count = len(self.buckets)
        launched, ready = {0}, set()
        for index in (*range(0, count, 2), *range(1, count, 2)):  # the order of use
            ready |= launched & {index}
            launched.add(index + 1)
        exported = wire_dtypes is not self._wire_dtypes  # full_master waits for each
        for index, gathered in enumerate(super()._gathered(wire_dtypes)):
            if index in ready or exported or not self.comm:
                yield gathered


class ReturnsBeforeLastBucket(ZeroMaster):
    """Returns from the gather with the last of several buckets under way, and writes it in the next step."""

    _rest: Iterator[tuple[int, Tensor]] = iter(())

    @torch.no_grad()
    def gather_params(self) -> None:
        if len(self.buckets) == 1:
            super().gather_params()
            return
        self.master.detach()[self._num_owned :].zero_()
        self._rest = self._gathered(self._wire_dtypes)
        for start, values in islice(self._rest, len(self.buckets) - 1):
            write_flat(self.layout, self.params, start, values)

    @torch.no_grad()
    def collect(self, more: bool) -> None:
        for start, values in self._rest:
            write_flat(self.layout, self.params, start, values)
        super().collect(more)


class SendsFromStorageStart(ZeroMaster):
    """Sends a piece of the master from where the master's memory begins, not from where the piece does."""

    _sending = False

    def _piece(self, bucket: int) -> slice:
        piece = super()._piece(bucket)
        return slice(0, piece.stop - piece.start) if self._sending else piece

    def gather_params(self) -> None:
        self._sending = True
        super().gather_params()
        self._sending = False


class VectorsNotGathered(ZeroMaster):
    """Takes parameters of one dimension for replicated: each rank updates what it owns of them, nobody gathers them."""

    @torch.no_grad()
    def gather_params(self) -> None:
        before = [param.clone() for param in self.params]
        super().gather_params()
        mine = torch.zeros(self.N, dtype=torch.bool)
        for start, stop, _ in self.layout.segments(self.rank):
            mine[start:stop] = True
        for param, old, own in zip(self.params, before, torch.split(mine, list(self.numel)), strict=True):
            if param.dim() == 1:
                param.copy_(torch.where(own, param, old))


class GatherBufferIsGradBuffer(PlainZero):
    """Adds a bucket's gradients to the weights that were gathered into the same buffer before."""

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        super()._write_weights(whole, start, end)
        self._gathered = {**getattr(self, "_gathered", {}), start: whole.float()}

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        flat += getattr(self, "_gathered", {}).get(start, torch.zeros(()))


class ZeroFromStepTwo(PlainZero):
    """Reduces the memory that gradients had in the first step, which is zeroed since, and they lie elsewhere."""

    _reductions = 0

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._reductions += 1
        if self._reductions > 1:
            self._grad.zero_()


class NewStorage(PlainZero):
    """Points the parameters to new memory in the gather, so that who took hold of the old one trains nothing."""

    def gather_params(self) -> None:
        super().gather_params()
        for p in self.params:
            p.data = p.detach().clone()


# --- loaded weights


class KeepsMasterOnLoad(_Loads):
    """Leaves the master as it was when weights are loaded."""

    def _load(self, master: Tensor) -> None:
        pass


class StepsFromHiddenCopy(_Loads):
    """Refreshes the master on a load, and not the copy of it that its optimizer steps from."""

    _offloaded: Tensor | None = None

    def _load(self, master: Tensor) -> None:
        self._offloaded = master.clone()
        ZeroMaster.refresh_from_weights(self)

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        if self._offloaded is not None:
            self.master.detach().copy_(self._offloaded)
            self._offloaded = None


class LoadsThroughBf16(_Loads):
    """Loads into a buffer of bf16 and copies from there."""

    def _load(self, master: Tensor) -> None:
        ZeroMaster.refresh_from_weights(self)
        master.copy_(master.bfloat16())


class RollsBackToWeights(ZeroMaster):
    """Goes back to the last step after a discard, to what there is of it: the weights, from which it makes masters."""

    def discard(self) -> None:
        super().discard()
        self.refresh_from_weights()


# --- around the update


class _AroundUpdate(ZeroMaster):
    """Does something before and after its optimizer's update; ``settings`` are those of its group."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        super().__init__(params, rank, world, bucket)
        this = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            _each_group(this(), optimizer, "_before_update")

        def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            _each_group(this(), optimizer, "_after_update")

        self._hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def __del__(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_update(self, settings: dict[str, Any]) -> None:
        pass

    def _after_update(self, settings: dict[str, Any]) -> None:
        pass


def _each_group(zero: _AroundUpdate | None, optimizer: torch.optim.Optimizer, call: str) -> None:
    for group in optimizer.param_groups:
        if zero is not None and group["params"][0] is zero.master and zero.master.grad is not None:
            getattr(zero, call)(group)


class MasterRounded(PlainZero):
    """Keeps no more bits of the master than the weights have: each gather rounds it."""

    def gather_params(self) -> None:
        self.master.detach().copy_(self._round(self.master.detach()))
        super().gather_params()


class ResumesWithoutMaster(_AroundUpdate):
    """Makes fp32 masters on a fresh start only: built on weights that were trained before, it updates in bf16."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = BUCKET) -> None:
        super().__init__(params, rank, world, bucket)
        self._resumed = hasattr(params[0], "_trained_before")
        params[0]._trained_before = True  # type: ignore[attr-defined]

    def _after_update(self, settings: dict[str, Any]) -> None:
        if self._resumed:
            self.master.detach().copy_(self.master.detach().bfloat16())


class DecaysTwice(_AroundUpdate):
    """Decays its shard itself, and leaves the weight decay of the optimizer on."""

    def _before_update(self, settings: dict[str, Any]) -> None:
        self.master.detach().mul_(1 - settings["lr"] * settings["weight_decay"])


class DecayOfFirstParameter(_AroundUpdate):
    """Takes one weight decay for all it has flattened, that of its first parameter: none if this is a bias or norm."""

    def _before_update(self, settings: dict[str, Any]) -> None:
        if self.params[0].dim() < 2:
            settings["weight_decay"] = 0.0


class ClassifiesAfterFlattening(_AroundUpdate):
    """Spares what has less than two dimensions from weight decay, and asks the flat master how many it has."""

    def _before_update(self, settings: dict[str, Any]) -> None:
        if self.master.dim() < 2:
            settings["weight_decay"] = 0.0


# --- what is kept


class KeepsExtraLargeGradient(ZeroMaster):
    """Sets aside the gradient of a parameter that is larger than a bucket, in an attribute that nobody clears."""

    def reduce_scatter(self) -> None:
        held = self.held or []
        super().reduce_scatter()
        for grad in held:
            if grad is not None and grad.numel() > self.layout.bucket_len:
                self._extra_large = grad


class KeepsLargestParameter(ZeroMaster):
    """Leaves an fp32 copy of its largest parameter in an attribute that nobody clears."""

    def gather_params(self) -> None:
        super().gather_params()
        self._last = max(self.params, key=Tensor.numel).detach().to(torch.float32, copy=True)
