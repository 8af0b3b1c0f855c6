"""DistributedDataParallel behind the interface of a strategy: every rank has the whole model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero2core.clipping import ClipMode, OnNonfinite, clip_, require_clip_arguments
from zero2core.errors import GradientStateError
from zero2core.strategies.base import (
    Defer,
    DistributionStrategy,
    require_defer,
    require_outside,
    require_reduced,
    require_wrapped,
)
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.mesh import require_served
from zero2core.strategies.plain import mean_over_ranks
from zero2core.strategies.prepare import prepare, require_still_frozen, tensors_in, zero_grad_too
from zero2core.strategies.private import at_end_of_backward, backward_id

__all__ = ["DDPStrategy"]

_logger = logging.getLogger(__name__)

# torch 2.13 warns of the older name.
_NAMES = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


_Left = Literal["reduced", "waiting", "unended"]
"""What the last backward left in ``.grad``: means, what is not reduced, or some of each."""


class DDPStrategy(DistributionStrategy):
    """DDP. Nothing is cast: DDP computes in the dtype of the parameters, and reduces in it.

    Gradients become means over all ranks: DDP divides by the world, then sums. ``.grad`` are views of its buckets.
    What was added up in :meth:`no_sync` is reduced with the next part outside. Without ``find_unused_parameters`` that
    part must use every parameter that takes a gradient; DDP would leave those it does not use, and others of their
    bucket, unreduced without a word until the next forward: here the backward raises. DDP reduces in one backward after
    a forward, or after several: a second one, which it leaves unreduced as well, raises too.

    Attributes:
        find_unused_parameters, broadcast_buffers, bucket_cap_mb: what DDP is given. Buffers are rank 0's after
            wrapping, also where they are not broadcast in each forward.
    """

    def __init__(self, config: StrategyConfig | Mapping[str, Any], *, device: torch.device, local_rank: int) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        asked = [key for key in ("use_mixed_precision", "bf16") if isinstance(config, Mapping) and key in config]
        # Of a StrategyConfig it is not known what was given: fp16 was, for it is no default.
        if self.config.compute_dtype is not None and (asked or not self.config.bf16):
            _logger.warning(
                "%s is ignored: DDP casts nothing, and computes in the dtype of the parameters; cast the model, use "
                "torch.autocast, or set use_fsdp=True",
                " and ".join(f"{key}={getattr(self.config, key)}" for key in asked or ["bf16"]),
            )
        self.find_unused_parameters = self.config.find_unused_parameters
        self.broadcast_buffers = self.config.broadcast_buffers
        self.bucket_cap_mb = self.config.bucket_cap_mb
        self._model: DistributedDataParallel | None = None
        # What the last backward left, never what this rank has: ranks may differ in what they use.
        self._left: _Left = "reduced"
        self._depth = 0  # of no_sync
        self._armed: int | None = None  # the backward that is followed
        self._trained: dict[str, nn.Parameter] = {}  # those that DDP reduces, and those that it does not
        self._frozen: dict[str, nn.Parameter] = {}
        self._arrived: set[str] = set()  # of that backward
        self._reduces = False  # whether that backward goes through a forward outside no_sync
        self._prepared = False  # DDP has prepared one reduction, in a forward, that no backward has used yet

    @property
    def params_sharded(self) -> bool:
        """False: every rank has every parameter."""
        return False

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def wrap(self, model: nn.Module) -> nn.Module:
        """``DistributedDataParallel`` around ``model``, which is moved to the device. Collective. Once.

        Raises:
            ValueError: the model is distributed already, or has nothing to train; there is no process group for the
                device.
            RankMismatchError: on all ranks, where models or configurations differ.
        """
        what = f"{type(self).__name__}.wrap"
        if self._model is not None:
            raise ValueError(f"{what}: this strategy has wrapped a model already: make another strategy")
        require_served(self.device)
        prepare(what, model, self.config, self.device)
        on_gpu = self.device.type == "cuda"
        sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: self.broadcast_buffers}
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.local_rank] if on_gpu else None,
            output_device=self.local_rank if on_gpu else None,
            find_unused_parameters=self.find_unused_parameters,
            **sync_buffers,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        wrapped.register_forward_hook(self._after_forward)
        for name, parameter in model.named_parameters():
            (self._trained if parameter.requires_grad else self._frozen)[name] = parameter
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, name=name: self._arrived.add(name)
                )
        self._model = wrapped
        zero_grad_too(wrapped, self._zeroed)
        return wrapped

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """See :meth:`DistributionStrategy.build_optimizer`."""
        wrapped = self._wrapped("build_optimizer", model)
        optimizer = super().build_optimizer(wrapped, optimizer_class, muon=muon, **settings)
        zero_grad_too(optimizer, self._zeroed)
        return optimizer

    def _zeroed(self, _set_to_none: bool) -> None:
        """All gradients are gone, so that none waits."""
        if self._model is not None:  # it is: this is called through it
            self.discard(self._model)

    def clip_grad_norm(
        self,
        model: nn.Module,
        max_norm: float | None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        on_nonfinite: OnNonfinite = "propagate",
        clip_mode: ClipMode = "joint",
    ) -> Tensor:
        """See :meth:`DistributionStrategy.clip_grad_norm`. Nothing is communicated: every rank has every gradient."""
        self.last_grad_clip_stats = None
        require_clip_arguments(max_norm, on_nonfinite, clip_mode)
        parameters = list(self._wrapped("clip_grad_norm", model).parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._require_ended("clip_grad_norm")
        require_reduced("clip_grad_norm", waiting=self._left == "waiting")
        clipped = clip_(gradients, max_norm, on_nonfinite=on_nonfinite, clip_mode=clip_mode, device=self.device)
        self.last_grad_clip_stats = clipped.stats
        if clipped.skipped:
            for parameter in parameters:
                parameter.grad = None
        return clipped.norm

    @contextmanager
    def no_sync(self, model: nn.Module, *, defer: Defer = "gradients") -> Iterator[None]:
        """See :meth:`DistributionStrategy.no_sync`. All ranks are replicas: both ways to defer are one."""
        require_defer(defer)
        wrapped = self._wrapped("no_sync", model)
        self._depth += 1
        try:
            with wrapped.no_sync():
                yield
        finally:
            self._depth -= 1

    @torch.no_grad()
    def flush(self, model: nn.Module) -> None:
        """See :meth:`DistributionStrategy.flush`. Reduces in fp32: summed, then divided, then rounded once.

        Every rank calls it, whether or not something waits on it. A parameter that has a gradient on some ranks alone
        counts as zeros on the others.
        """
        wrapped = self._wrapped("flush", model)
        require_outside(self._depth)
        self._require_ended("flush")
        if self._left == "reduced":
            return
        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        means = mean_over_ranks([parameter.grad for parameter in parameters], parameters, group=None)
        for parameter, mean in zip(parameters, means, strict=True):
            if mean is None:
                continue
            if parameter.grad is None:
                parameter.grad = mean.to(parameter.dtype)
            else:
                parameter.grad.copy_(mean)
        self._left = "reduced"

    def discard(self, model: nn.Module) -> None:
        """See :meth:`DistributionStrategy.discard`. DDP adds up in ``.grad``, also on reduced ones: all are dropped."""
        wrapped = self._wrapped("discard", model)
        if self._left != "reduced":
            for parameter in wrapped.parameters():
                parameter.grad = None
        self._left = "reduced"

    def _after_forward(self, wrapped: DistributedDataParallel, _args: object, output: object) -> None:
        """Follow each backward through ``output``; DDP decides in the forward whether it reduces."""
        if not torch.is_grad_enabled():
            return
        require_still_frozen(self._frozen)
        reduces = bool(wrapped.require_backward_grad_sync)
        self._prepared = self._prepared or reduces

        def follow(_: Tensor) -> None:
            backward = backward_id()
            if self._armed != backward:
                self._armed = backward
                self._arrived.clear()
                self._reduces = False
                self._left = "waiting"
                at_end_of_backward(self._backward_ended)
            if reduces:
                self._reduces, self._left = True, "unended"

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(follow)  # type: ignore[no-untyped-call]

    def _backward_ended(self) -> None:
        """DDP has reduced what it had prepared for, also in a backward of ``no_sync`` that came before its own."""
        if not self._reduces and not self._prepared:
            return
        if self._arrived and not self._prepared:
            self._left = "waiting"
            raise GradientStateError(
                "DDP has not reduced the gradients of this backward: it reduces in one backward after a forward, and "
                "an earlier one was that. Add up the losses of several forwards and call backward once, or run each "
                "backward before the next forward; what is there is dropped by zero_grad()"
            )
        if self._reduces and not self.find_unused_parameters:
            self._require_all()
        if self._arrived:  # not of torch.autograd.grad, which DDP does not see
            self._prepared = False
        self._left = "reduced"

    def _require_ended(self, what: str) -> None:
        if self._left == "unended":
            raise GradientStateError(
                f"{what}: the last backward did not end, so that DDP has reduced some gradients and not others, and "
                "takes no further forward: make model and strategy anew"
            )

    def _require_all(self) -> None:
        """By what took gradients when DDP made its buckets: it waits for what was frozen since, too."""
        missing = [name for name in self._trained if name not in self._arrived]
        frozen = [name for name in missing if not self._trained[name].requires_grad]
        if not self._arrived and len(frozen) == len(missing):
            return  # all is frozen for the time being, and the gradient of the input alone is asked for
        if missing:
            what = frozen[0] if frozen else missing[0]
            raise GradientStateError(
                f"{what} (and {len(missing) - 1} other parameters) had no gradient in this backward, so that DDP "
                "has not reduced all gradients: set find_unused_parameters=True"
                + (", or freeze what is not to be trained before wrap" if frozen else "")
            )

    def _wrapped(self, what: str, model: nn.Module) -> DistributedDataParallel:
        require_wrapped(what, model, self._model, None if self._model is None else self._model.module)
        return cast(DistributedDataParallel, self._model)
