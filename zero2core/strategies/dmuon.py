"""FSDP2 with dedicated matrices: those that are marked stay whole on owners, which step them by Muon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from zero2core.clipping import ClipMode, OnNonfinite, OwnedGradients, require_clip_arguments
from zero2core.errors import GradientStateError
from zero2core.strategies.base import Defer
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.dedicated import (
    DedicatedOptimizer,
    DedicatedParameter,
    DedicatedRuntime,
    build_optimizer,
    dedicate,
)
from zero2core.strategies.dmuon_package import DMuonPackage
from zero2core.strategies.fsdp import FSDPStrategy
from zero2core.strategies.marks import marked_parameters

__all__ = ["DMuonFSDPStrategy", "Runtime"]

Runtime = Literal["own", "dmuon"]


class DMuonFSDPStrategy(FSDPStrategy):
    """:class:`FSDPStrategy` for all parameters but those marked by ``mark_muon``, which one rank of all owns whole.

    Owners are ranks of the whole world, on a hybrid mesh too: a replica more means no second master. The gradient is
    reduced to the owner from all ranks at once, in ``fsdp_reduce_dtype``; ``no_sync`` of either kind, and on any mesh,
    defers all of it. Weights are given back after a forward where FSDP2 reshards there (``"z3"``), else kept until the
    step (``"z2"``). ``fsdp_cpu_offload`` leaves them on the device.

    Step with what :meth:`build_optimizer` gives, and hand it to :meth:`clip_grad_norm`.

    Args:
        runtime: ``"own"``: :mod:`zero2core.strategies.dedicated`; ``"dmuon"``: an installed package of that name, see
            :mod:`zero2core.strategies.dmuon_package`.

    Raises:
        NotImplementedError: the configuration has no ``use_fsdp``, or computes in fp16: a ``GradScaler`` does not see
            gradients of owners, and would leave them scaled.
        DMuonUnavailableError: ``runtime="dmuon"``, and the package is missing or lacks a function.
    """

    uses_dmuon = True

    def __init__(
        self,
        config: StrategyConfig | Mapping[str, Any],
        *,
        device: torch.device,
        local_rank: int,
        runtime: Runtime = "own",
    ) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        if not self.config.use_fsdp:
            raise NotImplementedError(
                "dedicated parameters are taken out of FSDP2, and the configuration has use_fsdp=False: set "
                "use_fsdp=True, or do without use_dmuon"
            )
        if self.config.compute_dtype == torch.float16:
            raise NotImplementedError(
                "bf16=False with dedicated parameters: a GradScaler does not see the gradients of owners, and would "
                "leave them scaled. Use bf16=True, or use_mixed_precision=False"
            )
        if runtime not in get_args(Runtime):
            raise ValueError(f"runtime={runtime!r}: valid values are {', '.join(map(repr, get_args(Runtime)))}")
        self._runtime: DedicatedRuntime | None = None
        self._package = DMuonPackage.load() if runtime == "dmuon" else None
        self._package_optimizer: torch.optim.Optimizer | None = None  # while gradients of it are clipped

    def dedicated(self, model: nn.Module) -> Mapping[str, DedicatedParameter]:
        """Dedicated parameters of the wrapped ``model``, by the names they had; empty with another runtime."""
        self._require_wrapped("dedicated", model)
        return {} if self._runtime is None else self._runtime.parameters

    # ---- what FSDPStrategy asks

    def to_take_out(self, model: nn.Module) -> set[nn.Parameter]:
        """See :meth:`FSDPStrategy.to_take_out`."""
        return {found.parameter for found in marked_parameters(model)}

    def take_out(self, model: nn.Module) -> set[nn.Parameter]:
        """See :meth:`FSDPStrategy.take_out`."""
        settings: dict[str, Any] = {
            "compute_dtype": self.config.compute_dtype,
            "reduce_dtype": self.config.reduce_dtype,
            "keep": "z3" if self.config.reshard_after_forward else "z2",
        }
        if self._package is not None:
            marked = {found.parameter for found in marked_parameters(model)}
            self._package.dedicate(model, **settings)
            return marked & set(model.parameters())
        self._runtime = dedicate(model, **settings)
        self._runtime.driver = self.arm
        return set()

    def reduce_own(self, model: nn.Module) -> None:
        """See :meth:`FSDPStrategy.reduce_own`; another runtime has done it by itself."""
        if self._runtime is not None:
            self._runtime.reduce()

    def owned_gradients(self, model: nn.Module) -> Sequence[OwnedGradients]:
        """See :meth:`FSDPStrategy.owned_gradients`."""
        if self._package is not None and self._package_optimizer is not None:
            return (OwnedGradients(self._package.gradients(self._package_optimizer)),)
        if self._runtime is None or not self._runtime.reduced:
            return ()
        return (OwnedGradients(self._runtime.clipped_gradients()),)

    def drop_owned(self, model: nn.Module) -> None:
        """See :meth:`FSDPStrategy.drop_owned`."""
        if self._runtime is not None:
            self._runtime.drop_reduced()
        if self._package_optimizer is not None:
            self._package_optimizer.zero_grad()

    def has_pending(self, model: nn.Module) -> bool:
        """See :meth:`FSDPStrategy.has_pending`."""
        own = self._runtime is not None and self._runtime.pending
        return own or super().has_pending(model)

    # ---- the interface

    def wrap(self, model: nn.Module) -> nn.Module:
        """See :meth:`FSDPStrategy.wrap`; ``ValueError`` also where nothing is marked."""
        wrapped = super().wrap(model)
        if self._runtime is not None and wrapped is not model:
            self._runtime.clear_with(wrapped)  # what convert_to_fsdp returned, whose zero_grad is another
        return wrapped

    def clip_grad_norm(
        self,
        model: nn.Module,
        max_norm: float | None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        on_nonfinite: OnNonfinite = "propagate",
        clip_mode: ClipMode = "joint",
    ) -> Tensor:
        """See :meth:`DistributionStrategy.clip_grad_norm`; ``optimizer`` is that of :meth:`build_optimizer`.

        Raises:
            GradientStateError: no ``optimizer``, and owners have gradients: they would not be clipped.
            ValueError: ``optimizer`` is of another model.
        """
        self.last_grad_clip_stats = None
        require_clip_arguments(max_norm, on_nonfinite, clip_mode)
        self._require_wrapped("clip_grad_norm", model)
        self._require_optimizer(optimizer)
        package = self._package
        # Its own clip knows its own norm alone: asked for that, it scales nothing.
        stats = package.stats(optimizer) if package is not None and optimizer is not None else None
        self._package_optimizer = None if package is None else optimizer
        try:
            norm = super().clip_grad_norm(
                model, max_norm, optimizer=optimizer, on_nonfinite=on_nonfinite, clip_mode=clip_mode
            )
        finally:
            self._package_optimizer = None
        if stats is not None:
            self.last_grad_clip_stats = {**(self.last_grad_clip_stats or {}), "dmuon": stats}
        return norm

    @contextmanager
    def no_sync(self, model: nn.Module, *, defer: Defer = "gradients") -> Iterator[None]:
        """See :meth:`FSDPStrategy.no_sync`; gradients of dedicated parameters wait until the end with either."""
        with ExitStack() as stack:
            stack.enter_context(super().no_sync(model, defer=defer))
            if self._package is not None:
                stack.enter_context(self._package.no_sync(model))
            yield

    def flush(self, model: nn.Module) -> None:
        """See :meth:`FSDPStrategy.flush`; ``NotImplementedError`` where the other runtime cannot."""
        if self._package is not None:
            self._package.flush(model)
        super().flush(model)

    def discard(self, model: nn.Module) -> None:
        """See :meth:`FSDPStrategy.discard`."""
        super().discard(model)
        if self._runtime is not None:
            self._runtime.discard()

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """See :func:`zero2core.strategies.dedicated.build_optimizer`; a step reshards first."""
        self._require_wrapped("build_optimizer", model)
        self.reshard()
        optimizer: torch.optim.Optimizer
        if self._package is not None:
            optimizer = self._package.build_optimizer(model, optimizer_class, muon=muon, **settings)
        else:
            optimizer = build_optimizer(model, optimizer_class, muon=muon, **settings)
        self.serve(optimizer)
        return optimizer

    def _require_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None and (self._package is not None or (self._runtime is not None and self._runtime.reduced)):
            raise GradientStateError(
                "clip_grad_norm: owners may have gradients of dedicated parameters, and no optimizer was given: pass "
                "optimizer=, the one that build_optimizer gave"
            )
        if optimizer is None or self._package is not None:
            return
        if not isinstance(optimizer, DedicatedOptimizer) or optimizer.runtime is not self._runtime:
            raise ValueError(
                f"clip_grad_norm was given a {type(optimizer).__name__} that does not step the dedicated parameters of "
                "this model: pass the one that build_optimizer(model) gave"
            )
