"""Plants: where and how a distribution strategy averages gradients, and when it must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from harness.faults.museum.plain_strategies import PlainAllReduce, PlainDDP, PlainFSDP2, PlainHSDP
from zero2core.strategies.private import units_of

# --- no_sync


class SynchronisesEveryPart(PlainFSDP2):
    """Knows the ``no_sync`` of DDP alone, which FSDP2 has not, and does nothing."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        yield


class NoSyncNeedsRoot(PlainFSDP2):
    """Turns the reduction off where the root is an FSDP module, and else does nothing."""

    def _fsdp(self, model: nn.Module) -> list[FSDPModule]:
        return super()._fsdp(model) if isinstance(model, FSDPModule) else []


class NoSyncForRootAlone(PlainFSDP2):
    """Turns the reduction off in the root alone: its blocks go on reducing."""

    def _fsdp(self, model: nn.Module) -> list[FSDPModule]:
        return [model] if isinstance(model, FSDPModule) else []


class InnerEndsOuter(PlainFSDP2):
    """The end of an inner ``no_sync`` turns the reduction on, although the outer one goes on."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self.quiet = 1
        self._reduce(model, on=False)
        try:
            yield
        finally:
            self.quiet = 0
            self._reduce(model, on=True)


class InnerEndsOuterByHand(PlainAllReduce):
    """The same where gradients are averaged by hand: a flag, where a depth is needed."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self.quiet = 1
        try:
            yield
        finally:
            self.quiet = 0


class StaysOff(PlainFSDP2):
    """Turns the reduction off, and never on again."""

    def _reduce(self, model: nn.Module, *, on: bool) -> None:
        if not on:
            super()._reduce(model, on=on)


class StaysOffAfterException(PlainFSDP2):
    """Does not turn it on again where the loop inside raises."""

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self.quiet += 1
        self._reduce(model, on=False)
        yield
        self.quiet -= 1
        if not self.quiet:
            self._reduce(model, on=True)


class InheritsNoSync(PlainDDP):
    """Has the ``no_sync`` of an interface that is not distributed, which is nothing: DDP reduces in every part."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


class CountsPartsByItself(PlainDDP):
    """Has an accumulation of two parts of its own: each first of two is not reduced, whatever the loop does."""

    def __init__(self, config: object = None, *, device: torch.device, local_rank: int) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        self._forwards = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        wrapped.register_forward_pre_hook(self._count)
        return wrapped

    def _count(self, module: Any, arguments: object) -> None:  # noqa: ANN401
        if torch.is_grad_enabled():
            self._forwards += 1
            module.require_backward_grad_sync = self._forwards % 2 == 0


# --- plain gradients


class PlainStaysLocal(PlainFSDP2):
    """Leaves what FSDP2 ignores as each rank has it."""

    def _synchronise(self) -> None:
        pass


class PlainIsSummed(PlainFSDP2):
    """Sums plain gradients over ranks, and does not divide."""

    def _average(self, parameter: nn.Parameter) -> Tensor:
        return super()._average(parameter).mul_(self.world)


class PlainIsSynchronisedInNoSync(PlainFSDP2):
    """Averages plain gradients in every part, whatever ``no_sync`` says."""

    def _backward_begins(self, gradient: Tensor) -> None:
        quiet, self.quiet = self.quiet, 0
        try:
            super()._backward_begins(gradient)
        finally:
            self.quiet = quiet


class ReducesRunningSumAgain(PlainAllReduce):
    """Sums over ranks in every part, whatever ``no_sync`` says, what was summed before, and divides in the last."""

    def _backward_begins(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._synchronise)

    def _average(self, parameter: nn.Parameter) -> Tensor:
        mean = super()._average(parameter)
        return mean.mul_(self.world) if self.quiet else mean


class SynchronisesPlainAfterClip(PlainFSDP2):
    """Averages plain gradients when the step is near: after the norm and the clip."""

    def _backward_begins(self, gradient: Tensor) -> None:
        pass

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, max_norm)
        self._synchronise()
        return norm


class OnlyUsedInLastPart(PlainAllReduce):
    """Averages what the last part used, and leaves local what only an earlier part did."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        self._fresh: set[nn.Parameter] = set()
        for parameter in self.watched:
            parameter.register_post_accumulate_grad_hook(self._fresh.add)  # type: ignore[no-untyped-call]
        wrapped.register_forward_pre_hook(lambda module, arguments: self._fresh.clear())
        return wrapped

    def _present(self) -> Sequence[bool]:
        used = torch.tensor([p in self._fresh for p in self.watched], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return [bool(there) for there in used]


class PacksWhatThereIs(PlainAllReduce):
    """Averages one vector of the gradients that a rank has, end to end: of other parameters on another rank."""

    @torch.no_grad()
    def _synchronise(self) -> None:
        present = [p.grad for p in self.watched if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in present])
        dist.all_reduce(flat)
        means = torch.split(flat.div_(self.world), [g.numel() for g in present])
        for gradient, mean in zip(present, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


class WalksBackwardOnOddRanks(PlainAllReduce):
    """Walks over gradients in an order of a rank's own, as that of a set is."""

    def _to_watch(self, wrapped: nn.Module) -> list[nn.Parameter]:
        return super()._to_watch(wrapped)[:: -1 if self.rank % 2 else 1]


class MeanOverRanksThatHaveIt(PlainAllReduce):
    """Divides by the number of ranks that use a parameter."""

    def _average(self, parameter: nn.Parameter) -> Tensor:
        count = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(count)
        return super()._average(parameter).mul_(self.world / count)


class DropsGradientThatOthersLack(PlainAllReduce):
    """Averages what all ranks use, and drops what only some do."""

    def _present(self) -> Sequence[bool]:
        present = torch.tensor([p.grad is not None for p in self.watched], dtype=torch.int32)
        dist.all_reduce(present, op=dist.ReduceOp.MIN)
        for parameter, there in zip(self.watched, present, strict=True):
            if not there:
                parameter.grad = None
        return [bool(there) for there in present]


class KeepsUnusedGradient(PlainAllReduce):
    """Keeps gradients in buffers of its own, and puts one of the step before where a part has none."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        self._kept: dict[nn.Parameter, Tensor] = {}
        return wrapped

    @torch.no_grad()
    def _synchronise(self) -> None:
        super()._synchronise()
        for parameter in self.watched:
            if parameter.grad is None:
                parameter.grad = self._kept.get(parameter)
            else:
                self._kept[parameter] = parameter.grad.clone()


# --- over which ranks, and divided by what


class _Divides(PlainHSDP):
    """Right but for what FSDP2 divides sums by."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        wrapped = super()._distribute(model)
        for module in self._fsdp(wrapped):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(self._divisor()))
        return wrapped

    def _divisor(self) -> int:
        return self.world


class SumsGradients(_Divides):
    """Has FSDP2 divide by 1: a mean was asked for, and it is a sum."""

    def _divisor(self) -> int:
        return 1


class DividesMeansAgain(_Divides):
    """Divides by the number of ranks what is a mean already."""

    def _divisor(self) -> int:
        return self.world**2


class DividesByShards(_Divides):
    """Divides by the number of shards, and sums over replicas."""

    def _divisor(self) -> int:
        return self.world // self.replicas


class DividesByParts(PlainAllReduce):
    """Divides by the number of parts, as the loop does too that hands in each part's loss."""

    def __init__(self, config: object = None, *, device: torch.device, local_rank: int) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        self._parts = 0

    def _backward_begins(self, gradient: Tensor) -> None:
        self._parts += 1
        super()._backward_begins(gradient)

    def _average(self, parameter: nn.Parameter) -> Tensor:
        return super()._average(parameter).div_(self._parts)

    def _synchronise(self) -> None:
        super()._synchronise()
        self._parts = 0


class ReplicasGoTheirOwnWay(PlainHSDP):
    """Shards inside each replica, on a mesh of that replica's ranks, and leaves out the sum over replicas."""

    def _mesh(self) -> DeviceMesh:
        return super()._mesh()["shard"]

    def _over_shards(self, total: Tensor) -> Tensor:
        dist.all_reduce(total, group=self._mesh().get_group())
        return total


class NoSumOverReplicasOfOneShard(PlainHSDP):
    """Where a replica is one rank, nothing is sharded, and it takes that for one rank in all."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        return model if self.replicas == self.world else super()._distribute(model)

    def _to_watch(self, wrapped: nn.Module) -> list[nn.Parameter]:
        return [] if self.replicas == self.world else super()._to_watch(wrapped)

    def _over_shards(self, total: Tensor) -> Tensor:
        return total if self.replicas == self.world else super()._over_shards(total)


# --- what is deferred


class DeferredIsNeverDone(PlainHSDP):
    """Leaves the sum over replicas off when the last part begins."""

    def _reduce_over_replicas(self, model: nn.Module, *, on: bool) -> None:
        if not on:
            super()._reduce_over_replicas(model, on=on)


class DropsDeferredSums(PlainHSDP):
    """Forgets the sums that wait for the replicas where ``no_sync`` ends: the last part alone is left."""

    def _reduce_over_replicas(self, model: nn.Module, *, on: bool) -> None:
        super()._reduce_over_replicas(model, on=on)
        for unit in units_of(model) if on else ():
            unit._group._partial_reduce_output = None


class FlushDividesOnly(PlainAllReduce):
    """Divides what was added up by the number of ranks, where a loop ends inside ``no_sync``, and sums nothing."""

    @torch.no_grad()
    def flush(self, model: nn.Module) -> None:
        for parameter in self.watched:
            if parameter.grad is not None:
                parameter.grad.div_(self.world)


class FlushIsForgotten(PlainAllReduce):
    """Leaves all to the next backward that synchronises."""

    def flush(self, model: nn.Module) -> None:
        pass
