"""Plants: how a distribution strategy wraps a model: initial weights, ties, frozen parameters, the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.faults.museum.plain_strategies import PlainAllReduce, PlainFSDP2, PlainHSDP, local_of

# --- how weights start


class StartsAsEachRankIs(PlainFSDP2):
    """Sends no initial weights."""

    def _start_equal(self, model: nn.Module) -> None:
        pass


class SendsInsideNodes(PlainAllReduce):
    """The first rank of each node (of two ranks) sends its weights to that node alone."""

    def _send(self, tensor: Tensor) -> None:
        for first in range(0, self.world, 2):
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(whole, src=first)
            if first == self.rank - self.rank % 2:
                tensor.copy_(whole)


class SendsInsideReplicas(PlainHSDP):
    """The first rank of each replica sends its weights to that replica: replicas start apart."""

    def _send(self, tensor: Tensor) -> None:
        mesh = self._mesh()
        group = mesh["shard"].get_group()
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
        tensor.copy_(whole)


class SendsTrainableOnly(PlainAllReduce):
    """Sends the weights that take a gradient: frozen ones stay as each rank has them."""

    def _sent(self, model: nn.Module) -> Iterable[Tensor]:
        return [p for p in model.parameters() if p.requires_grad]


class SendsShards(PlainFSDP2):
    """Sends weights after it has sharded them: every rank gets the piece of rank 0."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = self._distribute(model.to(self.device))
        self.watched = self._to_watch(wrapped)
        wrapped.register_forward_hook(self._after_forward)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                piece = local_of(parameter.detach())
                sent = [torch.empty(0)] * self.world
                dist.all_gather_object(sent, piece.clone())
                first = sent[0].reshape(-1)[: piece.numel()]
                piece.view(-1)[: first.numel()].copy_(first)
        return wrapped


# --- what wrapping must leave as it is


class MakesMastersBf16(PlainAllReduce):
    """Rounds the parameters themselves to bf16, where only what a forward computes with may be."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(model.to(torch.bfloat16))


class RoundsWeightsToBf16(PlainFSDP2):
    """Rounds the values of the masters to bf16 as they come in."""

    def _send(self, tensor: Tensor) -> None:
        super()._send(tensor)
        tensor.copy_(tensor.bfloat16())


class UntiesWeights(PlainAllReduce):
    """Gives a tied weight a parameter of its own under its second name."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        seen: set[nn.Parameter] = set()
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter in seen:
                    module.register_parameter(name, copy.deepcopy(parameter))
                elif parameter is not None:
                    seen.add(parameter)
        return model


class ThawsFrozen(PlainAllReduce):
    """Lets every parameter take a gradient."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        return model.requires_grad_(True)


# --- weights that are used, weights that are stepped


class NeverReshards(PlainFSDP2):
    """Keeps gathered weights over the step, and computes with them in the next forward."""

    reshard_after_forward = False

    def _distribute(self, model: nn.Module) -> nn.Module:
        wrapped = super()._distribute(model)
        for module in self._fsdp(wrapped):
            module.set_reshard_after_backward(False, recurse=False)
        return wrapped


class EvaluatesOldWeights(PlainAllReduce):
    """Computes without grad with a copy of the weights, which is as old as the last forward with grad."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        self._copies = [p.detach().clone() for p in wrapped.parameters()]
        self._current: list[Tensor] = []
        wrapped.register_forward_pre_hook(self._before_forward)
        return wrapped

    def _before_forward(self, module: nn.Module, arguments: object) -> None:
        now = [p.detach().clone() for p in module.parameters()]
        if torch.is_grad_enabled():
            self._copies = now
        else:
            self._current = now
            self._put(module, self._copies)

    def _after_forward(self, module: nn.Module, arguments: object, output: object) -> None:
        super()._after_forward(module, arguments, output)
        if self._current:
            self._put(module, self._current)
            self._current = []

    @torch.no_grad()
    def _put(self, module: nn.Module, weights: list[Tensor]) -> None:
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(weight)


class StepsOldParameters(PlainFSDP2):
    """Makes the optimizer of the parameters that it saw before it wrapped the model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self._listed = [p for p in model.parameters() if p.requires_grad]
        return super().wrap(model)

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        return optimizer_class(self._listed, **settings)


class LeavesPlainUnstepped(PlainFSDP2):
    """Makes the optimizer of sharded parameters alone."""

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        listed = [p for p in model.parameters() if p.requires_grad]
        plain = set(self.watched)
        sharded = [p for p in listed if p not in plain]
        return optimizer_class(sharded or listed, **settings)


class DecaysFrozen(PlainAllReduce):
    """Lists frozen parameters too, with gradients of zeros: they decay."""

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        optimizer = optimizer_class(model.parameters(), **settings)
        optimizer.register_step_pre_hook(lambda *arguments: self._fill(model))
        return optimizer

    def _fill(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class DecaysNoVectors(PlainAllReduce):
    """Makes groups of its own, without decay for what has one dimension, although one was asked for."""

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        listed = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in listed if p.dim() > 1]},
            {"params": [p for p in listed if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return optimizer_class([group for group in groups if group["params"]], **settings)


class FillsMissingWithZeros(PlainAllReduce):
    """Gives zeros to what no rank used: AdamW decays it, and its moments move."""

    @torch.no_grad()
    def _synchronise(self) -> None:
        super()._synchronise()
        for parameter in self.watched:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _BuildsIts(PlainAllReduce):
    """Right: builds the optimizer by itself."""

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        return optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)


class ZerosInsteadOfNone(_BuildsIts):
    """Has ``zero_grad`` leave zeros: what a later step does not use decays."""

    def build_optimizer(self, *arguments: Any, **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """The optimizer."""
        optimizer = super().build_optimizer(*arguments, **settings)
        clear = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=False: clear(set_to_none=False)  # type: ignore[method-assign]
        return optimizer


class KeepsFirstRate(_BuildsIts):
    """Sets the learning rate that it began with before each step: a schedule changes nothing."""

    def build_optimizer(self, *arguments: Any, **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """The optimizer."""
        optimizer = super().build_optimizer(*arguments, **settings)
        first = settings["lr"]

        def reset(*_: object) -> None:
            for group in optimizer.param_groups:
                group["lr"] = first

        optimizer.register_step_pre_hook(reset)
        return optimizer


class RoundsMoments(_BuildsIts):
    """Rounds moments to bf16 after each step, to save memory."""

    def build_optimizer(self, *arguments: Any, **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """The optimizer."""
        optimizer = super().build_optimizer(*arguments, **settings)

        def narrow(*_: object) -> None:
            for state in optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].copy_(state[name].bfloat16())

        optimizer.register_step_post_hook(narrow)
        return optimizer


class DecaysByGradient(_BuildsIts):
    """Adds decay to the gradient, as Adam does, where AdamW was asked for."""

    def build_optimizer(self, model: nn.Module, *arguments: Any, **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """The optimizer."""
        return super().build_optimizer(model, torch.optim.Adam, **settings)
