"""What the exhibits of distribution strategies are variants of: small classes as trainers have them, right each.

Every part has a method of its own, so that an exhibit changes one: the initial broadcast, the mesh, the wrap,
``no_sync``, the synchronisation of plain gradients, the norm, the coefficient, the scaling, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zero2core.muon.info import MuonParamInfo
from zero2core.muon.inner import MuonAdamW
from zero2core.strategies.mesh import device_mesh  # made once a shape: groups are dear

MARK: Final = "zero2core_muon"
"""The attribute by which ``mark_muon`` marks a parameter."""


def local_of(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient, whichever kind it is: a view."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class Plain:
    """What all of them have in common: equal weights at the start, averaged gradients, one norm, one coefficient.

    Attributes:
        quiet: how many ``no_sync`` are open.
        watched: parameters whose gradients this class averages by itself, at the end of each backward.
    """

    verify_extensions: ClassVar[tuple[str, ...]] = ("unused", "tied", "unequal_start")

    def __init__(self, config: object = None, *, device: torch.device, local_rank: int) -> None:
        self.device, self.local_rank = torch.device(device), local_rank
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.quiet = 0
        self.watched: list[nn.Parameter] = []

    # --- wrapping

    def wrap(self, model: nn.Module) -> nn.Module:
        """Distribute the model, whose weights become those of rank 0."""
        model = model.to(self.device)
        self._start_equal(model)
        wrapped = self._distribute(model)
        self.watched = self._to_watch(wrapped)
        wrapped.register_forward_hook(self._after_forward)
        return wrapped

    @torch.no_grad()
    def _start_equal(self, model: nn.Module) -> None:
        for tensor in self._sent(model):
            self._send(tensor)

    def _sent(self, model: nn.Module) -> Iterable[Tensor]:
        yield from model.parameters()
        yield from model.buffers()

    def _send(self, tensor: Tensor) -> None:
        """The same strides on all ranks: the storage may be sent as it lies."""
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)

    def _distribute(self, model: nn.Module) -> nn.Module:
        return model

    def _to_watch(self, wrapped: nn.Module) -> list[nn.Parameter]:
        return [p for p in wrapped.parameters() if p.requires_grad and not isinstance(p, DTensor)]

    # --- gradients

    def _after_forward(self, module: nn.Module, arguments: object, output: object) -> None:
        """Every rank that runs a backward begins it at the output, whichever parameters it uses."""
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, gradient: Tensor) -> None:
        if not self.quiet:
            Variable._execution_engine.queue_callback(self._synchronise)

    @torch.no_grad()
    def _synchronise(self) -> None:
        """Average the gradients of watched parameters; one that no rank has stays None."""
        if not self.watched:
            return
        for parameter, there in zip(self.watched, self._present(), strict=True):
            if there:
                self._average(parameter)

    def _present(self) -> Sequence[bool]:
        """Which of the watched parameters have a gradient on any rank."""
        present = torch.tensor([p.grad is not None for p in self.watched], dtype=torch.int32, device=self.device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        return [bool(there) for there in present]

    def _average(self, parameter: nn.Parameter) -> Tensor:
        """Averages its gradient in place, and returns it."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        dist.all_reduce(gradient)
        return gradient.div_(self.world)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Add up gradients without reducing them."""
        return self._quietly()

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    # --- clipping

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale all gradients down to the bound; returns the norm before."""
        gradients = self._gradients(model)
        norm = self._norm(gradients)
        if math.isfinite(max_norm):
            self._scale(gradients, self._coefficient(norm, max_norm))
        return norm

    def _parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return model.parameters()

    def _gradients(self, model: nn.Module) -> list[Tensor]:
        return [p.grad for p in self._parameters(model) if p.grad is not None]

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return self._total(gradients).sqrt().float()

    def _total(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of all squares, fp64: of shards over the ranks that have others, of plain gradients once."""
        sharded = self._squares([g.to_local() for g in gradients if isinstance(g, DTensor)])
        plain = self._squares([g for g in gradients if not isinstance(g, DTensor)])
        return self._over_shards(sharded) + self._of_plain(plain)

    def _squares(self, tensors: Iterable[Tensor]) -> Tensor:
        return sum((self._square(t) for t in tensors), torch.zeros((), dtype=torch.float64, device=self.device))

    def _square(self, tensor: Tensor) -> Tensor:
        return tensor.double().square().sum()

    def _over_shards(self, total: Tensor) -> Tensor:
        """Summed over ranks that hold other elements."""
        return total

    def _of_plain(self, total: Tensor) -> Tensor:
        return total

    def _coefficient(self, norm: Tensor, max_norm: float) -> Tensor:
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        for gradient in gradients:
            local_of(gradient).mul_(coefficient)


class PlainDDP(Plain):
    """DistributedDataParallel, and a clip."""

    def _start_equal(self, model: nn.Module) -> None:
        """DDP sends the weights of rank 0 by itself."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True)

    def _to_watch(self, wrapped: nn.Module) -> list[nn.Parameter]:
        return []

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """DDP's own."""
        return model.no_sync()  # type: ignore[operator, no-any-return]


class PlainAllReduce(Plain):
    """Data parallelism by hand: nothing is sharded, and all gradients are averaged at the end of a backward."""

    verify_extensions: ClassVar[tuple[str, ...]] = (*Plain.verify_extensions, "flush")

    def flush(self, model: nn.Module) -> None:
        """Average what was added up in ``no_sync``."""
        self._synchronise()


class PlainFSDP2(Plain):
    """Each block of the largest list, and then the root, by ``fully_shard``, on a mesh of one axis."""

    verify_extensions: ClassVar[tuple[str, ...]] = ("tied", "plain", "unequal_start")
    reshard_after_forward = True

    def _mesh(self) -> DeviceMesh:
        return device_mesh(self.device, (self.world,))

    def _distribute(self, model: nn.Module) -> nn.Module:
        if hasattr(model, "convert_to_fsdp"):
            return self._convert(model)
        for module in self._units(model):
            self._shard(module)
        return model

    def _convert(self, model: Any) -> nn.Module:  # noqa: ANN401 (the model is whose it is)
        from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

        converted = model.convert_to_fsdp(
            mesh=self._mesh(),
            mp_policy=MixedPrecisionPolicy(),
            offload_policy=OffloadPolicy(),
            reshard_after_forward=self.reshard_after_forward,
            use_dmuon=False,
        )
        return model if converted is None else converted  # type: ignore[no-any-return]

    def _units(self, model: nn.Module) -> Iterable[nn.Module]:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        yield from max(lists, key=len, default=())
        yield model

    def _shard(self, module: nn.Module) -> None:
        fully_shard(module, mesh=self._mesh(), reshard_after_forward=self.reshard_after_forward)

    def _fsdp(self, model: nn.Module) -> list[FSDPModule]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Turns the reduction off in every FSDP module; the outermost turns it on again."""
        self.quiet += 1
        self._reduce(model, on=False)
        try:
            yield
        finally:
            self.quiet -= 1
            if not self.quiet:
                self._reduce(model, on=True)

    def _reduce(self, model: nn.Module, *, on: bool) -> None:
        for module in self._fsdp(model):
            module.set_requires_gradient_sync(on, recurse=False)

    def _over_shards(self, total: Tensor) -> Tensor:
        dist.all_reduce(total)
        return total


class PlainHSDP(PlainFSDP2):
    """Shards over the last axis of a mesh of two, and replicates over the first: two replicas, if these can be had."""

    verify_extensions: ClassVar[tuple[str, ...]] = (*PlainFSDP2.verify_extensions, "deferred")

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return 2 if self.world % 2 == 0 else 1

    def _mesh(self) -> DeviceMesh:
        return device_mesh(self.device, (self.replicas, self.world // self.replicas))

    @contextmanager
    def no_sync(self, model: nn.Module, defer: str = "gradients") -> Iterator[None]:
        """With ``defer="all_reduce"`` gradients are reduced over shards, and the sum over replicas waits."""
        if defer == "gradients":
            with super().no_sync(model):
                yield
            return
        self.quiet += 1
        self._reduce_over_replicas(model, on=False)
        try:
            yield
        finally:
            self.quiet -= 1
            self._reduce_over_replicas(model, on=True)

    def _reduce_over_replicas(self, model: nn.Module, *, on: bool) -> None:
        for module in self._fsdp(model):
            module.set_requires_all_reduce(on, recurse=False)

    def _over_shards(self, total: Tensor) -> Tensor:
        dist.all_reduce(total, group=self._mesh()["shard"].get_group())
        return total


@dataclass
class Dedicated:
    """One dedicated matrix: ``weight``, ``grad`` and ``momentum`` are its owner's alone."""

    name: str
    parameter: nn.Parameter
    owner: int
    weight: Tensor | None = None
    grad: Tensor | None = None
    momentum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the whole matrix."""
        return self.parameter.shape


class PlainDedicated(PlainFSDP2):
    """Matrices that are marked for Muon stay whole, out of FSDP2; each has an owner, which alone steps it.

    All ranks keep a copy of the weights. The gradient's mean goes to the owner at the end of a backward, into a field
    of its own; after the step the owner sends the weights.
    """

    verify_extensions: ClassVar[tuple[str, ...]] = ("tied", "unequal_start", "dedicated")

    def __init__(self, config: object = None, *, device: torch.device, local_rank: int) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        self.matrices: dict[str, Dedicated] = {}

    def dedicated(self, model: nn.Module) -> Mapping[str, Dedicated]:
        """Dedicated matrices by name."""
        return self.matrices

    def _distribute(self, model: nn.Module) -> nn.Module:
        marked = [(name, p) for name, p in model.named_parameters() if hasattr(p, MARK) and p.requires_grad]
        for index, (name, parameter) in enumerate(marked):
            one = self.matrices[name] = Dedicated(name, parameter, self._owner(index))
            one.weight = parameter.detach() if one.owner == self.rank else None
        return super()._distribute(model)

    def _owner(self, index: int) -> int:
        return index % self.world

    def _shard(self, module: nn.Module) -> None:
        kept = {one.parameter for one in self.matrices.values()}
        fully_shard(module, mesh=self._mesh(), reshard_after_forward=self.reshard_after_forward, ignored_params=kept)

    def _to_watch(self, wrapped: nn.Module) -> list[nn.Parameter]:
        kept = {one.parameter for one in self.matrices.values()}
        return [p for p in super()._to_watch(wrapped) if p not in kept]

    @torch.no_grad()
    def _synchronise(self) -> None:
        super()._synchronise()
        matrices = self.matrices.values()
        present = torch.tensor(
            [one.parameter.grad is not None for one in matrices], dtype=torch.int32, device=self.device
        )
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        for one, there in zip(matrices, present, strict=True):
            if there:
                self._to_owner(one)

    def _to_owner(self, one: Dedicated) -> None:
        parameter = one.parameter
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
        dist.reduce(gradient, dst=one.owner)
        if one.owner == self.rank:
            self._received(one, gradient.div_(self.world))

    def _received(self, one: Dedicated, mean: Tensor) -> None:
        one.grad = mean if one.grad is None else one.grad + mean

    # --- clipping

    def _owned(self) -> list[Tensor]:
        """Gradients of dedicated matrices that this rank has."""
        return [one.grad for one in self.matrices.values() if one.grad is not None]

    def _total(self, gradients: Sequence[Tensor]) -> Tensor:
        return super()._total(gradients) + self._over_owners(self._squares(self._owned()))

    def _over_owners(self, total: Tensor) -> Tensor:
        dist.all_reduce(total)
        return total

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        super()._scale([*gradients, *self._owned()], coefficient)

    # --- the step

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """Muon for what this rank owns, and this class for all that is not dedicated."""
        kept = {one.parameter for one in self.matrices.values()}
        others = [p for p in model.parameters() if p.requires_grad and p not in kept]
        inner = optimizer_class(others, **settings) if others else None
        return Both(self, inner, dict(muon or {})) if self.matrices or inner is None else inner

    @torch.no_grad()
    def step_matrices(self, optimizer: MuonAdamW | None) -> None:
        """Step what this rank owns, and send all weights."""
        if optimizer is not None:
            for one in self.matrices.values():
                if one.grad is not None:
                    self._step_one(optimizer, one, one.grad)
        self._send_weights()

    def _step_one(self, optimizer: MuonAdamW, one: Dedicated, gradient: Tensor) -> Tensor:
        """Step one matrix, and return its momentum."""
        momentum = torch.zeros_like(one.parameter) if one.momentum is None else one.momentum
        optimizer.update(one.name, one.parameter.detach(), gradient, {"momentum": momentum})
        one.momentum = momentum
        return momentum

    def _send_weights(self) -> None:
        for one in self.matrices.values():
            dist.broadcast(one.parameter.detach(), src=one.owner)


class Both(torch.optim.Optimizer):
    """The optimizer of a :class:`PlainDedicated`: groups of the inner one, then that of the dedicated matrices."""

    def __init__(self, strategy: PlainDedicated, inner: torch.optim.Optimizer | None, muon: dict[str, Any]) -> None:
        self.strategy, self.inner = strategy, inner
        named = [(name, one.parameter) for name, one in strategy.matrices.items()]
        self.muon = MuonAdamW(named, {name: MuonParamInfo(use_muon=True) for name, _ in named}, **muon)
        super().__init__([p for _, p in named], {})
        self.param_groups = [*([] if inner is None else inner.param_groups), self.muon.param_groups[0]]
        self.state = self.muon.state if inner is None else inner.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both."""
        if self.inner is not None:
            self.inner.step()
        self.strategy.step_matrices(self.muon)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both."""
        if self.inner is not None:
            self.inner.zero_grad(set_to_none=set_to_none)
        for one in self.strategy.matrices.values():
            one.parameter.grad = one.grad = None
