"""Distribution strategies with one thing wrong in each, made from the right ones of strategies.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parent))  # as a class of the user's, it is imported by its path

from strategies import PlainDDP, PlainFSDP, PlainHSDP, scale


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# --- wrapping ---------------------------------------------------------------------------------------------------------


class KeepsOwnStart(PlainFSDP):
    """Every rank shards the weights that it happens to have."""

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = self.mesh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class BreaksTies(PlainDDP):
    """A parameter with two names becomes two."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if name.endswith("_tied") and parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
        return super().wrap(model)


class TrainsFrozen(PlainDDP):
    """Everything takes a gradient afterwards."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(model.requires_grad_(True))


class LosesParameter(PlainDDP):
    """A bias becomes a buffer."""

    def wrap(self, model: nn.Module) -> nn.Module:
        block = model.blocks[0]
        name, parameter = list(block._parameters.items())[-1]
        del block._parameters[name]
        block.register_buffer(name, parameter.detach().clone())
        return super().wrap(model)


class StaleWeights(PlainFSDP):
    """Parameters stay whole after a backward, and the step does not reach what the next forward computes with."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)
        self.sharded = list(wrapped.parameters())
        return wrapped

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.sharded, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class SilentZero(StaleWeights):
    """The same, and the norm is taken of the whole parameters, which have no gradients."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        return PlainFSDP.clip_grad_norm(self, model, max_norm)


class SeesOtherWeights(PlainDDP):
    """The last rank computes with a weight that is off by one unit in the last place, and puts it back."""

    def wrap(self, model: nn.Module) -> nn.Module:
        if dist.get_rank() == dist.get_world_size() - 1:
            model.register_forward_pre_hook(self.shift)
            model.register_forward_hook(self.shift_back)
        return super().wrap(model)

    @torch.no_grad()
    def shift(self, model: nn.Module, _: Any) -> None:
        self.kept = next(model.parameters()).detach().clone()
        next(model.parameters()).copy_(torch.nextafter(self.kept, torch.full_like(self.kept, torch.inf)))

    @torch.no_grad()
    def shift_back(self, model: nn.Module, _: Any, __: Any) -> None:
        next(model.parameters()).copy_(self.kept)


# --- gradients --------------------------------------------------------------------------------------------------------


class SumForMean(PlainFSDP):
    """Nothing divides."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return wrapped


class LeavesOneOut(PlainDDP):
    """DDP is told to ignore one parameter."""

    def wrap(self, model: nn.Module) -> nn.Module:
        # Of a module below the root: there its name alone is not enough.
        name = next(name for name, parameter in model.named_parameters() if parameter.requires_grad and "." in name)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        return super().wrap(model)


class ReducesInBf16(PlainFSDP):
    """Gradients are added up in bf16."""

    def wrap(self, model: nn.Module) -> nn.Module:
        policy, mesh = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), self.mesh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)


class ZerosForNone(PlainDDP):
    """A parameter that nobody used gets a gradient of zeros, so that the optimizer decays it."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        return super().clip_grad_norm(model, max_norm)

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        wrapped.register_forward_hook(self.fill)
        return wrapped

    def fill(self, model: nn.Module, _: Any, __: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None and torch.is_grad_enabled():
                parameter.grad = torch.zeros_like(parameter)


# --- no_sync ----------------------------------------------------------------------------------------------------------


class NoSyncReduces(PlainFSDP):
    """It does nothing."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


class NoSyncReducesUnseen(PlainDDP):
    """The same, where the reduction is in C++ and in no log."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


class LosesEarlierParts(PlainDDP):
    """What was added up is dropped when no_sync ends."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with model.no_sync():
            yield
        for parameter in model.parameters():
            parameter.grad = None


class InnerEndsOuter(PlainFSDP):
    """The end of an inner no_sync ends the outer one."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


# --- norm and clip ----------------------------------------------------------------------------------------------------


class LocalNorm(PlainFSDP):
    """Of what is on this rank alone."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        gradients = [local(gradient) for gradient in gradients_of(model)]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        scale(gradients, norm, max_norm)
        return norm


class CountsReplicas(PlainHSDP):
    """Squares are added over all ranks, also over those that hold the same."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        gradients = [local(gradient) for gradient in gradients_of(model)]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        scale(gradients, norm, max_norm)
        return norm


class ReturnsDTensor(PlainFSDP):
    """As torch's own function does."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class NormAfterClipping(PlainDDP):
    """The norm is taken of what was clipped already."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, max_norm)
        return torch.minimum(norm, torch.tensor(max_norm))


class ClipsBlocksApart(PlainDDP):
    """Each block by its own norm; the norm that is returned is the joint one."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        joint = super().clip_grad_norm(model, float("inf"))
        for module in model.modules():
            gradients = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
            if gradients:
                norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
                scale(gradients, norm, max_norm)
        return joint


class OnlyMeasures(PlainFSDP):
    """Gradients are never scaled."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        return super().clip_grad_norm(model, float("inf"))


class NormalisesAlways(PlainDDP):
    """Gradients are scaled up to the bound, too, and to 1 where none is given."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, float("inf"))
        wanted = 1.0 if max_norm == float("inf") else max_norm
        for gradient in gradients_of(model):
            gradient.mul_(wanted / (norm + 1e-6))
        return norm


# --- optimizer --------------------------------------------------------------------------------------------------------


class OtherRate(PlainDDP):
    """The learning rate is off by a percent."""

    def build_optimizer(self, model: nn.Module, optimizer_class: Any, **settings: Any) -> Any:
        settings["lr"] *= 1.01
        return optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)


class OtherBetas(PlainFSDP):
    """A beta is another one."""

    def build_optimizer(self, model: nn.Module, optimizer_class: Any, **settings: Any) -> Any:
        settings["betas"] = (settings["betas"][0], 0.99)
        return optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)


class KeepsGradients(PlainDDP):
    """``zero_grad()`` does nothing."""

    def build_optimizer(self, model: nn.Module, optimizer_class: Any, **settings: Any) -> Any:
        optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)
        optimizer.zero_grad = lambda set_to_none=True: None
        return optimizer


class MovesFrozen(PlainDDP):
    """The step decays what is frozen."""

    def build_optimizer(self, model: nn.Module, optimizer_class: Any, **settings: Any) -> Any:
        optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        optimizer.register_step_post_hook(lambda *_: [each.data.mul_(0.5) for each in frozen])
        return optimizer


# --- what a trainer does beside a step --------------------------------------------------------------------------------


class EvaluationDropsGradients(PlainDDP):
    """A forward without gradients forgets those that are there."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)

        def forget(module: nn.Module, _: Any) -> None:
            if not torch.is_grad_enabled():
                for parameter in module.parameters():
                    parameter.grad = None

        wrapped.register_forward_pre_hook(forget)
        return wrapped


class SwallowsRuntimeErrors(PlainDDP):
    """Out of memory inside ``no_sync`` is nobody's affair."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        try:
            with super().no_sync(model):
                yield
        except RuntimeError:
            pass


class ReturnsOneBuffer(PlainDDP):
    """Each norm is written where the last one was."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, max_norm)
        buffer = self.__dict__.setdefault("buffer", torch.zeros(()))
        return buffer.copy_(norm)


class LeavesEvaluationMode(PlainDDP):
    """Wraps a model in evaluation mode, and leaves it so."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(model.eval())
