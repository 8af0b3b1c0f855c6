"""Right distribution strategies, each of which does something another way than those of ``plain_strategies``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness.faults.museum.plain_strategies import (
    Dedicated,
    PlainAllReduce,
    PlainDDP,
    PlainDedicated,
    PlainFSDP2,
    PlainHSDP,
    local_of,
)

__all__ = ["PlainAllReduce", "PlainDDP", "PlainDedicated", "PlainFSDP2", "PlainHSDP"]

# --- clipping


class CoefficientInFloats(PlainFSDP2):
    """Works out the coefficient in Python's floats."""

    def _coefficient(self, norm: Tensor, max_norm: float) -> Any:  # noqa: ANN401
        return min(1.0, max_norm / (float(norm) + 1e-6))


class NormOfWholeGradients(PlainFSDP2):
    """Gathers each gradient, and takes the norm of the whole on every rank."""

    def _total(self, gradients: Sequence[Tensor]) -> Tensor:
        return self._squares(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)


class NormInFp32(PlainFSDP2):
    """Sums squares in fp32, parameter by parameter, through norms."""

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g.full_tensor() if isinstance(g, DTensor) else g) for g in gradients]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


class ScalesOnlyWhereNeeded(PlainAllReduce):
    """Does not touch a gradient that is within the bound."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        if coefficient < 1:
            super()._scale(gradients, coefficient)


class PutsNewGradients(PlainAllReduce):
    """Puts scaled gradients in the place of those that were there, and changes none."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        return super().clip_grad_norm(model, max_norm)


# --- wrapping


class ShardsRootOnly(PlainFSDP2):
    """Makes one unit of the whole model."""

    def _units(self, model: nn.Module) -> Iterable[nn.Module]:
        yield model


class ShardsEveryLeaf(PlainFSDP2):
    """Makes a unit of every module that has parameters of its own, from the leaves up."""

    def _units(self, model: nn.Module) -> Iterable[nn.Module]:
        modules = list(model.modules())[::-1]
        return [module for module in modules if module is model or any(True for _ in module.parameters(False))]


class KeepsWeightsGathered(PlainFSDP2):
    """Does not reshard after a forward: weights are gathered once for a forward and its backward."""

    reshard_after_forward = False


class SendsWeightsEndToEnd(PlainFSDP2):
    """Sends initial weights of one parameter after another as one vector, before it shards."""

    @torch.no_grad()
    def _start_equal(self, model: nn.Module) -> None:
        sent = list(self._sent(model))
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in sent])
        dist.broadcast(flat, src=0)
        for tensor, whole in zip(sent, torch.split(flat, [tensor.numel() for tensor in sent]), strict=True):
            tensor.copy_(whole.view_as(tensor))


# --- sums and means


class FlattensPlainGradients(PlainFSDP2):
    """Averages plain gradients end to end in one vector."""

    @torch.no_grad()
    def _synchronise(self) -> None:
        if not self.watched:
            return
        there = [p for p, present in zip(self.watched, self._present(), strict=True) if present]
        if not there:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in there]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        means = torch.split(flat.div_(self.world), [gradient.numel() for gradient in gradients])
        for parameter, mean in zip(there, means, strict=True):
            parameter.grad = mean.view_as(parameter).clone()


class FlattensAllGradients(FlattensPlainGradients):
    """The same of all gradients, where nothing is sharded."""

    verify_extensions: ClassVar[tuple[str, ...]] = ("unused", "tied", "unequal_start")

    def _distribute(self, model: nn.Module) -> nn.Module:
        return model


class AveragesByHook(PlainDDP):
    """DDP with a communication hook, which sums and divides then."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        wrapped.register_comm_hook(None, lambda state, bucket: self._averaged(bucket))
        return wrapped

    def _averaged(self, bucket: Any) -> Any:  # noqa: ANN401 (not exported)
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(self.world))


class BucketViewsOfDDP(PlainDDP):
    """DDP whose gradients are views of its buckets."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)


class SumsAndDividesByItself(PlainFSDP2):
    """Has FSDP2 sum, and divides what it leaves by the number of ranks."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        wrapped = super()._distribute(model)
        for module in self._fsdp(wrapped):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_all_reduce_hook(self._divide)
        return wrapped

    def _divide(self, total: Tensor) -> None:
        total.div_(self.world)


class ReplicasByHand(PlainHSDP):
    """Shards inside each replica, and sums over replicas in a hook of its own."""

    verify_extensions: ClassVar[tuple[str, ...]] = PlainFSDP2.verify_extensions

    def _mesh(self) -> DeviceMesh:
        return super()._mesh()["shard"]

    def _distribute(self, model: nn.Module) -> nn.Module:
        wrapped = super()._distribute(model)
        group = PlainHSDP._mesh(self)["replicate"].get_group()

        def over_replicas(mean: Tensor) -> None:
            dist.all_reduce(mean, group=group)
            mean.div_(self.replicas)

        for module in self._fsdp(wrapped):
            module.set_all_reduce_hook(over_replicas)
        return wrapped

    def _over_shards(self, total: Tensor) -> Tensor:
        dist.all_reduce(total, group=self._mesh().get_group())
        return total

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:  # type: ignore[override]
        """Gradients wait as they are: there is no second mode."""
        with PlainFSDP2.no_sync(self, model):
            yield


class OneReplicaEach(PlainHSDP):
    """As many replicas as ranks: a mesh of two axes, of which one is of one rank."""

    @property
    def replicas(self) -> int:
        return self.world


# --- dedicated matrices


class DealsFromTheLastRank(PlainDedicated):
    """Deals matrices out from the last rank on."""

    def _owner(self, index: int) -> int:
        return self.world - 1 - index % self.world


class AllReducesDedicated(PlainDedicated):
    """Sums the gradient of a matrix on every rank, and uses the sum on its owner."""

    def _to_owner(self, one: Dedicated) -> None:
        mean = self._average(one.parameter)
        one.parameter.grad = None
        if one.owner == self.rank:
            self._received(one, mean)


class ScalesAllAtOnce(PlainHSDP):
    """Scales by ``foreach``, all pieces at once."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        pieces = [local_of(gradient) for gradient in gradients]
        if pieces:
            torch._foreach_mul_(pieces, coefficient)
