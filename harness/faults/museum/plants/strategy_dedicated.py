"""Plants: matrices that are dedicated to an owner, which alone has their gradient and steps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain_strategies import Dedicated, Plain, PlainDedicated
from zero2core.muon.inner import MuonAdamW

# --- the gradient


class SumsForOwner(PlainDedicated):
    """The owner gets the sum over ranks, which nobody divides."""

    def _received(self, one: Dedicated, mean: Tensor) -> None:
        super()._received(one, mean * self.world)


class OwnerKeepsItsOwn(PlainDedicated):
    """The owner uses the gradient that it has itself: nothing is sent to it."""

    def _to_owner(self, one: Dedicated) -> None:
        gradient, one.parameter.grad = one.parameter.grad, None
        if one.owner == self.rank and gradient is not None:
            self._received(one, gradient)


class SendsToWrongOwner(PlainDedicated):
    """Sends a gradient to the rank behind its owner, which has partial sums alone."""

    def _to_owner(self, one: Dedicated) -> None:
        parameter = one.parameter
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
        dist.reduce(gradient, dst=(one.owner + 1) % self.world)
        if one.owner == self.rank:
            self._received(one, gradient.div_(self.world))


class KeepsLastPartOnly(PlainDedicated):
    """What arrives at the owner takes the place of what was there, where parts are reduced one by one."""

    def _received(self, one: Dedicated, mean: Tensor) -> None:
        one.grad = mean


class KeepsClearedMeans(PlainDedicated):
    """``zero_grad`` clears gradients of the autograd engine, and not those that the owner has in a field."""

    def build_optimizer(self, *arguments: Any, **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """The optimizer."""
        optimizer = super().build_optimizer(*arguments, **settings)
        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            kept = {name: one.grad for name, one in self.matrices.items()}
            clear(set_to_none=set_to_none)
            for name, one in self.matrices.items():
                one.grad = kept[name]

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        return optimizer


# --- the norm


class LeavesDedicatedOutOfNorm(PlainDedicated):
    """Takes the norm of what is not dedicated, and scales all by it."""

    def _over_owners(self, total: Tensor) -> Tensor:
        return torch.zeros_like(total)


class NormOfOwnMatrices(PlainDedicated):
    """Adds the squares of the matrices that a rank owns, and of no other rank's."""

    def _over_owners(self, total: Tensor) -> Tensor:
        return total


class CountsPartialSums(PlainDedicated):
    """Counts what a reduce to the owner has left on the other ranks."""

    def _to_owner(self, one: Dedicated) -> None:
        gradient = one.parameter.grad
        super()._to_owner(one)
        if one.owner != self.rank and gradient is not None:
            self._left.append(gradient.div_(self.world))

    def __init__(self, config: object = None, *, device: torch.device, local_rank: int) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        self._left: list[Tensor] = []

    def _total(self, gradients: Sequence[Tensor]) -> Tensor:
        left = self._over_owners(self._squares(self._left))
        self._left.clear()
        return super()._total(gradients) + left


class ClipsDedicatedAlone(PlainDedicated):
    """Scales dedicated gradients by their own norm, and all others by theirs; it returns the joint norm."""

    @torch.no_grad()
    def clip_grad_norm(self, model: Any, max_norm: float) -> Tensor:  # noqa: ANN401
        joint = super().clip_grad_norm(model, float("inf"))
        gradients = self._gradients(model)
        owned = self._over_owners(self._squares(self._owned())).sqrt().float()
        others = (joint.double().square() - owned.double().square()).clamp(min=0).sqrt().float()
        Plain._scale(self, gradients, self._coefficient(others, max_norm))
        Plain._scale(self, self._owned(), self._coefficient(owned, max_norm))
        return joint


class StepsUnclipped(PlainDedicated):
    """Counts dedicated gradients in the norm, and scales the others alone."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        Plain._scale(self, gradients, coefficient)


# --- the step


class WeightsStayWithOwner(PlainDedicated):
    """Does not send weights after the step: all but the owner compute with old ones."""

    def _send_weights(self) -> None:
        pass


class SendsBeforeStep(PlainDedicated):
    """Sends weights, and steps them then."""

    @torch.no_grad()
    def step_matrices(self, optimizer: MuonAdamW | None) -> None:
        self._send_weights()
        for one in self.matrices.values():
            if one.grad is not None and optimizer is not None:
                self._step_one(optimizer, one, one.grad)


class SendsFromFirstRank(PlainDedicated):
    """Rank 0 sends all weights, whoever owns them."""

    def _send_weights(self) -> None:
        for one in self.matrices.values():
            dist.broadcast(one.parameter.detach(), src=0)


class SendsInBf16(PlainDedicated):
    """Sends weights in bf16, and the owner keeps what it has sent: masters lose what rounding takes."""

    def _send_weights(self) -> None:
        for one in self.matrices.values():
            weight = one.parameter.detach().bfloat16()
            dist.broadcast(weight, src=one.owner)
            one.parameter.detach().copy_(weight)


class ForgetsMomentum(PlainDedicated):
    """Begins each step with a momentum of zeros."""

    def _step_one(self, optimizer: MuonAdamW, one: Dedicated, gradient: Tensor) -> Tensor:
        one.momentum = None
        return super()._step_one(optimizer, one, gradient)


class StepsBySign(PlainDedicated):
    """Dedicates matrices, and steps them element by element: by the signs of their momentum."""

    def _step_one(self, optimizer: MuonAdamW, one: Dedicated, gradient: Tensor) -> Tensor:
        before = one.parameter.detach().clone()
        momentum = super()._step_one(optimizer, one, gradient)
        one.parameter.detach().copy_(before.sub_(momentum.sign(), alpha=optimizer.param_groups[0]["lr"]))
        return momentum
