"""What a trainer may ask of a distribution strategy, whichever it is."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from zero2core.clipping import ClipMode, OnNonfinite
from zero2core.errors import GradientStateError
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.dedicated_parameter import DedicatedParameter

__all__ = [
    "ClipMode",
    "Defer",
    "DistributionStrategy",
    "OnNonfinite",
    "require_defer",
    "require_outside",
    "require_reduced",
    "require_wrapped",
    "warn_of_muon",
]

Defer = Literal["gradients", "all_reduce"]

_logger = logging.getLogger(__name__)


class DistributionStrategy(ABC):
    """Wraps a model, clips its gradients, accumulates without communication.

    Attributes:
        config: validated copy of what was given.
        device: of the model.
        local_rank: of this process on its node.
        last_grad_clip_stats: of the last clip, see :func:`zero2core.clipping.clip_`; None before, and after one that
            raised.
    """

    def __init__(self, config: StrategyConfig | Mapping[str, Any], *, device: torch.device, local_rank: int) -> None:
        self.config = StrategyConfig.of(config)
        self.device = torch.device(device)
        self.local_rank = local_rank
        self.last_grad_clip_stats: dict[str, Any] | None = None

    @property
    @abstractmethod
    def params_sharded(self) -> bool:
        """Whether a rank holds a part of each parameter."""

    @property
    @abstractmethod
    def shard_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that really shard; those that replicate, whose ranks hold the same, are not in it."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Distribute ``model``, whose weights become those of rank 0 everywhere. Collective."""

    @abstractmethod
    def clip_grad_norm(
        self,
        model: nn.Module,
        max_norm: float | None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        on_nonfinite: OnNonfinite = "propagate",
        clip_mode: ClipMode = "joint",
    ) -> Tensor:
        """Scale all gradients of a wrapped ``model`` by ``min(1, max_norm / (norm + 1e-6))``. Collective.

        The norm is one for all gradients, whatever holds them, and the factor is one for all.

        Args:
            max_norm: the bound; None or infinity: nothing is scaled, the norm is measured.
            optimizer: of parameters that the strategy keeps for itself; others need none.
            on_nonfinite: what becomes of a norm that is infinite or nan, alike on all ranks: ``"raise"`` a
                ``GradientStateError``, ``"skip"``: all gradients are dropped, so that a step changes nothing, or
                ``"propagate"`` it into the gradients. The first two wait for the device.
            clip_mode: ``"segments"`` scales plain, sharded and owned gradients each by a norm of its own, so that the
                joint norm may exceed the bound, and the direction turns. Not what one wants, unless it is.

        Returns:
            The joint norm before scaling: a plain fp32 tensor without dimensions on the strategy's device, the same
            bits on every rank. 0, with a warning in the log and ``num_gradients`` 0 in the stats, without any gradient.

        Raises:
            ValueError: a bound of 0, below, or nan; an unknown word.
            GradientStateError: nothing is wrapped; gradients wait to be reduced.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module, *, defer: Defer = "gradients") -> AbstractContextManager[None]:
        """Inside, backwards add up gradients without reducing them; with ``defer="all_reduce"`` over shards alone.

        Reduced is what was added up by the next backward outside, or by :meth:`flush`. Forward and backward belong
        inside. Blocks nest, and what was set before is set again at the end, also after an exception.
        """

    @abstractmethod
    def flush(self, model: nn.Module) -> None:
        """Reduce what was added up in :meth:`no_sync` and no backward outside it has reduced. Collective.

        Nothing where nothing waits, which all ranks decide alike.
        """

    @abstractmethod
    def discard(self, model: nn.Module) -> None:
        """Forget what was added up in :meth:`no_sync`, or by a failed backward, and not reduced. Local; on every rank.

        ``zero_grad()`` of the wrapped model, and of what :meth:`build_optimizer` gives, does it as well. An optimizer
        that the trainer makes itself sees ``.grad`` alone: who gives up a step calls this, or the model's
        ``zero_grad()``, or else what waits joins the next step.
        """

    def dedicated(self, model: nn.Module) -> Mapping[str, DedicatedParameter]:
        """What the strategy keeps whole on owners, by name; nothing, unless it says otherwise."""
        return {}

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """The optimizer of a wrapped model; ``muon`` are settings of dedicated parameters.

        A strategy that has none warns of them in the log.
        """
        warn_of_muon(self, muon)
        return optimizer_class((p for p in model.parameters() if p.requires_grad), **settings)


# What strategies say in the same words


def require_defer(defer: str) -> None:
    """Raise ``ValueError`` unless ``defer`` is one of :data:`Defer`."""
    if defer not in get_args(Defer):
        raise ValueError(f"defer={defer!r}: valid values are {', '.join(map(repr, get_args(Defer)))}")


def require_wrapped(what: str, model: nn.Module, *wrapped: nn.Module | None) -> None:
    """Raise unless ``model`` is one of those by which the model that was ``wrapped`` is known.

    Args:
        what: the caller, which messages begin with.
        wrapped: nothing but None before ``wrap``.

    Raises:
        GradientStateError: nothing is wrapped yet.
        ValueError: ``model`` is another one.
    """
    known = [one for one in wrapped if one is not None]
    if not known:
        raise GradientStateError(f"{what}: nothing is wrapped yet: call wrap(model) first")
    if not any(model is one for one in known):
        raise ValueError(
            f"{what} was given another {type(model).__name__} than the one that this strategy has wrapped: give it "
            "what wrap returned"
        )


def require_reduced(what: str, *, waiting: bool) -> None:
    """Raise ``GradientStateError`` where gradients are ``waiting``, which is the same on every rank."""
    if waiting:
        raise GradientStateError(
            f"{what}: gradients that were added up in no_sync are not reduced: run the last backward outside "
            "no_sync, or call flush(model) (discard(model) to forget them)"
        )


def require_outside(depth: int) -> None:
    """Raise ``GradientStateError`` in a flush that is called inside ``depth`` blocks of ``no_sync``."""
    if depth:
        raise GradientStateError("flush was called inside no_sync, which it would end: leave no_sync first")


def warn_of_muon(strategy: DistributionStrategy, muon: Mapping[str, Any] | None) -> None:
    """Say in the log that ``muon`` changes nothing, where something was given and nothing is dedicated."""
    if muon is not None:
        _logger.warning(
            "build_optimizer: muon=%r is ignored: %s dedicates no matrices, and all parameters are stepped by the "
            "other optimizer; use build_strategy(..., use_dmuon=True), or leave muon out",
            dict(muon),
            type(strategy).__name__,
        )
