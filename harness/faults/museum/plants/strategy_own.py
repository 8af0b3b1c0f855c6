"""Plants: variants of our own strategies, which are judged by all that the built-in ones promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zero2core.clipping import OwnedGradients
from zero2core.strategies import DDPStrategy, FSDP2Layout, FSDPStrategy
from zero2core.strategies.base import Defer
from zero2core.strategies.dedicated_parameter import DedicatedParameter
from zero2core.strategies.dedicated_runtime import DedicatedRuntime
from zero2core.strategies.dmuon import DMuonFSDPStrategy

# --- DDP


class CompressesToBf16(DDPStrategy):
    """Sends gradients in bf16, by a hook that was meant for slow networks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped: Any = super().wrap(model)
        wrapped.register_comm_hook(None, lambda state, bucket: self._summed(bucket))
        return wrapped  # type: ignore[no-any-return]

    def _summed(self, bucket: Any) -> Any:  # noqa: ANN401 (not exported)
        sent = bucket.buffer().bfloat16()
        work: Any = dist.all_reduce(sent, async_op=True)
        world = dist.get_world_size()
        return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]).div_(world))


class NeverLooksForUnused(DDPStrategy):
    """Ignores ``find_unused_parameters``."""

    def __init__(self, config: Any, *, device: torch.device, local_rank: int) -> None:  # noqa: ANN401
        super().__init__(config, device=device, local_rank=local_rank)
        self.find_unused_parameters = False


# --- FSDP2


class ReducesInBf16(FSDPStrategy):
    """Reduces in bf16, which was the default once, whatever dtype is asked for."""

    def _make_layout(self) -> FSDP2Layout:
        layout = super()._make_layout()
        return layout._replace(mp_policy=replace(layout.mp_policy, reduce_dtype=torch.bfloat16))


class ComputesInBf16(FSDPStrategy):
    """Casts weights to bf16 although no mixed precision is asked for."""

    def _make_layout(self) -> FSDP2Layout:
        layout = super()._make_layout()
        return layout._replace(mp_policy=replace(layout.mp_policy, param_dtype=torch.bfloat16))


class IgnoresMixedPrecision(FSDPStrategy):
    """Computes in fp32 although bf16 is asked for."""

    def _make_layout(self) -> FSDP2Layout:
        layout = super()._make_layout()
        return layout._replace(mp_policy=replace(layout.mp_policy, param_dtype=None))


class SwapsAxes(FSDPStrategy):
    """Takes the number of replicas for that of shards."""

    def _make_layout(self) -> FSDP2Layout:
        asked = self.config
        world = dist.get_world_size()
        self.config = replace(asked, fsdp_hsdp_replicate_size=world // max(1, asked.fsdp_hsdp_replicate_size))
        try:
            return super()._make_layout()
        finally:
            self.config = asked


class HoldsPartialSumsInBf16(FSDPStrategy):
    """Keeps what waits for the sum over replicas in bf16."""

    def _end_of_backward(self) -> None:
        super()._end_of_backward()
        for unit in self._units:
            partial = unit._group._partial_reduce_output
            if partial is not None:
                partial.copy_(partial.bfloat16())


class AddsUpInBf16(FSDPStrategy):
    """Keeps what waits in ``no_sync`` in bf16, whatever it is reduced in."""

    def _end_of_backward(self) -> None:
        super()._end_of_backward()
        for held in (each for unit in self._units for each in unit._group.fsdp_params):
            waiting = held.unsharded_accumulated_grad
            if waiting is None and hasattr(held, "_unsharded_param"):
                waiting = held._unsharded_param.grad
            if waiting is not None:
                waiting.copy_(waiting.bfloat16())


class SetsFlagsToTrue(FSDPStrategy):
    """Ends ``no_sync`` with all flags at True, whatever they were before."""

    @contextmanager
    def no_sync(self, model: nn.Module, *, defer: Defer = "gradients") -> Iterator[None]:
        with super().no_sync(model, defer=defer):
            yield
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)


class KeepsZerosOfUnused(FSDPStrategy):
    """Leaves the zeros that were reduced for parameters that no rank has used: AdamW decays them."""

    def _drop_unused(self) -> None:
        pass


# --- dedicated matrices


class ReducesDedicatedInBf16(DMuonFSDPStrategy):
    """Reduces dedicated gradients in bf16, whatever dtype is asked for."""

    def take_out(self, model: nn.Module) -> set[nn.Parameter]:
        asked = self.config
        self.config = replace(asked, fsdp_reduce_dtype="bf16")
        try:
            return super().take_out(model)
        finally:
            self.config = asked


class DedicatedStayWide(DMuonFSDPStrategy):
    """Casts what FSDP2 has to bf16, and computes with dedicated matrices in fp32."""

    def take_out(self, model: nn.Module) -> set[nn.Parameter]:
        asked = self.config
        self.config = replace(asked, use_mixed_precision=False)
        try:
            return super().take_out(model)
        finally:
            self.config = asked


class _AskedOfOwner(DedicatedRuntime):
    def _used_by_any(self, parameters: Sequence[DedicatedParameter]) -> list[bool]:
        used = torch.tensor([parameter.waiting is not None for parameter in parameters], dtype=torch.uint8)
        for index, parameter in enumerate(parameters):
            dist.broadcast(used[index : index + 1], src=parameter.owner)
        return [bool(flag) for flag in used]


class OwnersMissingCountsForAll(DMuonFSDPStrategy):
    """Takes a matrix that its owner did not use for one that nobody used."""

    def take_out(self, model: nn.Module) -> set[nn.Parameter]:
        taken = super().take_out(model)
        if self._runtime is not None:
            self._runtime.__class__ = _AskedOfOwner
        return taken


class OwnersLeftOutOfNorm(DMuonFSDPStrategy):
    """Hands the clip what FSDP2 has and nothing else."""

    def owned_gradients(self, model: nn.Module) -> tuple[OwnedGradients, ...]:
        return ()
