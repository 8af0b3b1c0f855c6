"""FSDP2 behind the interface of a strategy: one mesh of shards, or replicas of shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zero2core import collectives
from zero2core.clipping import OwnedGradients, clip_, require_clip_arguments
from zero2core.errors import GradientStateError
from zero2core.strategies import private
from zero2core.strategies.base import (
    ClipMode,
    Defer,
    DistributionStrategy,
    OnNonfinite,
    require_defer,
    require_outside,
    require_reduced,
    require_wrapped,
    warn_of_muon,
)
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.mesh import agreed_mesh_shape, device_mesh, require_served
from zero2core.strategies.plain import PlainGradients
from zero2core.strategies.prepare import (
    before_steps,
    names_of,
    optimizer_groups,
    prepare,
    require_still_frozen,
    tensors_in,
    zero_grad_too,
)
from zero2core.strategies.shardable import blocks_of, require_shardable, require_sound

__all__ = ["FSDP2Layout", "FSDPStrategy"]


class FSDP2Layout(NamedTuple):
    """How a model was wrapped.

    Attributes:
        mesh: of axes ``("dp",)``, or ``("replicate", "shard")``.
        dp_process_group: of a one-dimensional mesh; else None.
        shard_process_group, replicate_process_group: of a hybrid mesh; else None.
        trainer_process_group: all ranks, which is the default group; None at world 1.
        mp_policy, offload_policy: as FSDP2 takes them.
        reshard_after_forward: whether units but the root are; the root, which a backward needs first, never is.
    """

    mesh: DeviceMesh
    dp_process_group: dist.ProcessGroup | None
    shard_process_group: dist.ProcessGroup | None
    replicate_process_group: dist.ProcessGroup | None
    trainer_process_group: dist.ProcessGroup | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool


class FSDPStrategy(DistributionStrategy):
    """FSDP2, also hybrid. Gradients become means over all ranks, part by part; parts add up.

    A model with ``convert_to_fsdp(mesh=, mp_policy=, offload_policy=, reshard_after_forward=, use_dmuon=)`` wraps
    itself; of any other, each block of the ``ModuleList`` with the most elements is one unit, and the rest, with the
    root, is another. Parameters that FSDP2 is told to ignore stay whole on every rank, and this class reduces their
    gradients, in fp32, at the end of each backward that reduces.

    The forward of the model itself must be called, on every rank, and both forward and backward lie inside
    :meth:`no_sync` or both outside. All ranks run the same units, with the gradient flowing through each; with
    ``unused_parameters`` they may differ in which parameters of a unit they use. What no rank has used in any part
    keeps its ``.grad``.

    A forward without gradients reshards when it ends: parameters that stayed whole would be old after the next step.

    Attributes:
        layout: how the model was wrapped; None before.
    """

    uses_dmuon = False  # what ``convert_to_fsdp`` is told

    def __init__(self, config: StrategyConfig | Mapping[str, Any], *, device: torch.device, local_rank: int) -> None:
        super().__init__(config, device=device, local_rank=local_rank)
        private.require_supported()
        self.layout: FSDP2Layout | None = None
        self._model: nn.Module | None = None
        self._units: list[private.Unit] = []
        self._plain: PlainGradients | None = None
        self._frozen_plain: dict[str, nn.Parameter] = {}  # nobody reduces their gradients
        self._depth = 0  # of no_sync
        self._armed: int | None = None  # the backward at whose end gradients are reduced
        # A backward has begun whose end did not reduce all that units and plain parameters have. Never from what this
        # rank has: ranks may differ in what they use, and those that raise would leave the others in a collective.
        self._waiting = False
        self._before_steps = False  # whether any optimizer's step is preceded by _before_step

    # ---- what a strategy that keeps some parameters for itself replaces

    def to_take_out(self, model: nn.Module) -> set[nn.Parameter]:
        """Parameters that :meth:`take_out` will take. Local; changes nothing, so that :meth:`wrap` can refuse a model.

        Raises:
            ValueError: nothing can be taken.
        """
        return set()

    def take_out(self, model: nn.Module) -> set[nn.Parameter]:
        """Parameters that neither FSDP2 nor the reduction of plain ones may touch. Collective.

        Called once by :meth:`wrap`, when all ranks have rank 0's values and nothing is sharded. May replace parameters
        by placeholders; returns what is to be left alone from then on.
        """
        return set()

    def reduce_own(self, model: nn.Module) -> None:
        """Reduce what was taken out. Collective; after everything else, whenever gradients are reduced."""

    def owned_gradients(self, model: nn.Module) -> Sequence[OwnedGradients]:
        """Reduced gradients of what was taken out, for the joint norm."""
        return ()

    def drop_owned(self, model: nn.Module) -> None:
        """Forget reduced gradients of what was taken out."""

    def has_pending(self, model: nn.Module) -> bool:
        """Whether gradients may wait to be reduced; the same on every rank. An override also asks its base."""
        return self._waiting and (bool(self._units) or self._has_plain)

    def arm(self) -> None:
        """To be called in a backward: at its end gradients are reduced, unless in :meth:`no_sync`.

        Called for each backward through outputs of the wrapped model; somebody who takes parameters out needs it only
        where a backward might not pass those.
        """
        if self._armed is None:
            self._arm(None)

    @property
    def accumulating(self) -> bool:
        """Whether this is inside :meth:`no_sync`, of either kind: gradients of this rank are only added up."""
        return self._depth > 0

    # ---- the interface

    @property
    def params_sharded(self) -> bool:
        """True: a rank holds a part of each parameter."""
        return True

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Of ``layout.mesh``, those over which more than one rank shards; ``GradientStateError`` before wrapping."""
        layout = self._require_layout("shard_axes")
        names = layout.mesh.mesh_dim_names or ()
        sizes = dict(zip(names, layout.mesh.shape, strict=True))
        return tuple(name for name in names if name != "replicate" and sizes[name] > 1)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` in place and return it (or what its ``convert_to_fsdp`` returns). Collective. Once.

        ``zero_grad()`` of what is returned, and of what :meth:`build_optimizer` gives, also drops gradients that wait
        to be reduced, as :meth:`discard` does. An optimizer that the trainer makes itself does not know of those: a
        step that is given up then needs ``zero_grad()`` of the model, or :meth:`discard`.

        Raises:
            ValueError: the model cannot be wrapped: distributed already, nothing to train, a scalar parameter, dtypes
                mixed within a unit, weights tied across units, or ranks that the mesh does not fit.
            RankMismatchError: on all ranks, where models or configurations differ.
        """
        what = f"{type(self).__name__}.wrap"
        if self._model is not None:
            raise ValueError(f"{what}: this strategy has wrapped a {type(self._model).__name__} already: make another")
        layout = self._make_layout()
        prepare(what, model, self.config, self.device)
        tied = [names for names in names_of(model).values() if len(names) > 1]
        convert = getattr(model, "convert_to_fsdp", None)
        others = self.to_take_out(model)
        blocks = blocks_of(model, others)
        if not callable(convert):  # before anything is taken out: who mends what is refused can wrap the model again
            require_shardable(what, model, blocks, others)
        taken = self.take_out(model)
        if callable(convert):
            converted = convert(
                mesh=layout.mesh,
                mp_policy=layout.mp_policy,
                offload_policy=layout.offload_policy,
                reshard_after_forward=layout.reshard_after_forward,
                use_dmuon=self.uses_dmuon,
            )
            wrapped = converted if isinstance(converted, nn.Module) else model
        else:
            _shard_blocks_and_root(model, blocks, layout, taken)
            wrapped = model
        self._units = private.units_of(wrapped)
        require_sound(what, wrapped, self._units, tied, converts=callable(convert))
        for unit in self._units:
            unit.mend()
            unit.fills = self.config.unused_parameters
        plain = {
            name: parameter
            for name, parameter in wrapped.named_parameters()
            if not isinstance(parameter, DTensor) and parameter not in taken
        }
        trained = {name: parameter for name, parameter in plain.items() if parameter.requires_grad}
        self._frozen_plain = {name: parameter for name, parameter in plain.items() if name not in trained}
        self._plain = PlainGradients(trained, group=None, arrived=self.arm)
        wrapped.register_forward_hook(self._after_forward)
        self.layout, self._model = layout, wrapped
        zero_grad_too(wrapped, self._zero_hidden)
        self._before_steps = before_steps(self, FSDPStrategy._before_step)
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
        """See :meth:`DistributionStrategy.clip_grad_norm`. Parameters that are whole are resharded first."""
        self.last_grad_clip_stats = None
        require_clip_arguments(max_norm, on_nonfinite, clip_mode)
        self._require_wrapped("clip_grad_norm", model)
        require_reduced("clip_grad_norm", waiting=self.has_pending(model))
        self.reshard()
        parameters = list(model.parameters())
        clipped = clip_(
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            max_norm,
            owned=self.owned_gradients(model),
            on_nonfinite=on_nonfinite,
            clip_mode=clip_mode,
            device=self.device,
        )
        self.last_grad_clip_stats = clipped.stats
        if clipped.skipped:
            for parameter in parameters:
                parameter.grad = None
            self.drop_owned(model)
        return clipped.norm

    @contextmanager
    def no_sync(self, model: nn.Module, *, defer: Defer = "gradients") -> Iterator[None]:
        """See :meth:`DistributionStrategy.no_sync`.

        Applies to every unit of the tree, whether or not the root is one. With ``defer="all_reduce"`` the sharded
        gradients of a hybrid mesh are summed over shards in each part, and over replicas at the end alone: less memory
        than ``"gradients"``, fewer bytes than outside. Without replicas nothing of them is deferred. Plain parameters
        wait until the end with either.
        """
        require_defer(defer)
        self._require_wrapped("no_sync", model)
        before = [unit.flags for unit in self._units]
        hybrid = self._require_layout("no_sync").replicate_process_group is not None
        for unit, flags in zip(self._units, before, strict=True):
            changed = replace(flags, reshard=flags.reshard and self.config.reshard_after_backward)
            if defer == "gradients":
                changed = replace(changed, reduce=False)
            elif hybrid:
                changed = replace(changed, all_reduce=False)
            unit.flags = changed
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            for unit, flags in zip(self._units, before, strict=True):
                unit.flags = flags

    @torch.no_grad()
    def flush(self, model: nn.Module) -> None:
        """See :meth:`DistributionStrategy.flush`. Every rank calls it, whether or not something waits on it."""
        self._require_wrapped("flush", model)
        require_outside(self._depth)
        if not self.has_pending(model):
            return
        for unit in self._units:
            unit.flush()
        self._finish()
        self._waiting = False
        self.reduce_own(model)

    def discard(self, model: nn.Module) -> None:
        """See :meth:`DistributionStrategy.discard`."""
        self._require_wrapped("discard", model)
        for unit in self._units:
            unit.discard()
        if self._plain is not None:
            self._plain.discard()
        self._waiting = False

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """See :meth:`DistributionStrategy.build_optimizer`; of the sharded parameters, which each step reshards.

        A step changes sharded parameters: those that were whole at that time would be computed with once more.
        """
        self._require_wrapped("build_optimizer", model)
        warn_of_muon(self, muon)
        self.reshard()
        optimizer = optimizer_class(optimizer_groups(model), **settings)
        self.serve(optimizer)
        return optimizer

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a step of ``optimizer`` reshard first, and its ``zero_grad()`` drop what waits to be reduced. Local."""
        if not self._before_steps:
            optimizer.register_step_pre_hook(lambda *_: self.reshard())
        zero_grad_too(optimizer, lambda _: None if self._model is None else self.discard(self._model))

    def reshard(self) -> None:
        """Let go of whole parameters, so that the module shows the sharded ones with their gradients. Local."""
        model = self._model
        if model is None:
            return
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- how it is done

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reshard before a step of sharded parameters by whomever: whole ones would be old in the next forward.

        Not in a backward, which needs them and reshards at its end; nor for optimizers of other models.
        """
        if private.backward_id() >= 0:
            return
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(parameter in stepped for unit in self._units for parameter in unit.sharded):
            self.reshard()

    def _zero_hidden(self, set_to_none: bool) -> None:
        """What ``zero_grad`` of the model does not see: gradients that wait, and those that whole parameters hide."""
        if self._model is not None:  # it is: this is called through it
            self.discard(self._model)
        for unit in self._units:
            for parameter in unit.sharded:
                if parameter.grad is not None and set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

    def _make_layout(self) -> FSDP2Layout:
        require_served(self.device)
        world = collectives.group_size(None)
        mesh = device_mesh(self.device, agreed_mesh_shape(f"{type(self).__name__}.wrap", self.config, world))
        compute = self.config.compute_dtype
        offload = (
            CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
            if self.config.fsdp_cpu_offload
            else OffloadPolicy()
        )
        hybrid = mesh.ndim == 2
        return FSDP2Layout(
            mesh=mesh,
            dp_process_group=None if hybrid else mesh.get_group("dp"),
            shard_process_group=mesh.get_group("shard") if hybrid else None,
            replicate_process_group=mesh.get_group("replicate") if hybrid else None,
            trainer_process_group=collectives.default_group() if world > 1 else None,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute,
                reduce_dtype=self.config.reduce_dtype,
                cast_forward_inputs=self.config.cast_forward_inputs,
            ),
            offload_policy=offload,
            reshard_after_forward=self.config.reshard_after_forward,
        )

    def _after_forward(self, _module: nn.Module, _args: object, output: object) -> None:
        """Look for the end of each backward through ``output``."""
        if private.backward_id() < 0:
            self._armed = None  # one that has raised never came to its end
        if not torch.is_grad_enabled():
            self.reshard()
            return
        require_still_frozen(self._frozen_plain)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._arm)  # type: ignore[no-untyped-call]

    def _arm(self, _gradient: Tensor | None) -> None:
        backward = private.backward_id()
        if self._armed != backward:
            self._armed = backward
            self._waiting = True
            private.at_end_of_backward(self._end_of_backward)

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        self._armed = None
        defers = self._defers()
        if not self._depth or not defers:
            self._finish()
            self._waiting = defers
        if not self._depth and self._model is not None:  # it is: nothing is armed before
            self.reduce_own(self._model)

    def _defers(self) -> bool:
        """Whether a backward that ends now leaves gradients unreduced, but those taken out; the same on every rank.

        ``no_sync`` of replicas alone defers nothing where there are none. A user may have set flags of units himself.
        """
        return any(unit.defers for unit in self._units) or (self._depth > 0 and self._has_plain)

    @property
    def _has_plain(self) -> bool:
        return self._plain is not None and bool(self._plain.parameters)

    @torch.no_grad()
    def _finish(self) -> None:
        """After FSDP2 has reduced what it has: the rest, but what was taken out."""
        self._reduce_left_out()
        if self._plain is not None:
            self._plain.reduce()
        self._drop_unused()

    def _reduce_left_out(self) -> None:
        """Reduce units that have gradients of earlier parts, and that the backward which ends did not come to.

        FSDP2 looks for them from the root on; where the root is no unit, each block is on its own.
        """
        waits = [unit.pending and not unit.defers for unit in self._units]
        for unit, anywhere in zip(self._units, self._on_any_rank(waits), strict=True):
            if anywhere:
                unit.flush()

    def _drop_unused(self) -> None:
        """Take away sums of zeros: gradients of parameters that no rank has used."""
        used = [unit.used() for unit in self._units]
        flags = iter(self._on_any_rank([flag for flags in used for flag in flags]))
        for unit, here in zip(self._units, used, strict=True):
            unit.drop_unused([next(flags) for _ in here])

    def _on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which of these are set on some rank. Collective where ranks may differ in what they use."""
        if not self.config.unused_parameters or not flags:
            return list(flags)
        flat = torch.tensor(flags, dtype=torch.uint8, device=collectives.group_device(None))
        collectives.all_reduce_max(flat, group=None)
        return [bool(flag) for flag in flat.tolist()]

    def _require_layout(self, what: str) -> FSDP2Layout:
        if self.layout is None:
            raise GradientStateError(f"{what}: nothing is wrapped yet: call wrap(model) first")
        return self.layout

    def _require_wrapped(self, what: str, model: nn.Module) -> None:
        require_wrapped(what, model, self._model)


def _shard_blocks_and_root(
    model: nn.Module, blocks: Sequence[nn.Module], layout: FSDP2Layout, ignored: set[nn.Parameter]
) -> None:
    """What FSDP2 does with a model that does not know how to convert itself."""
    options: dict[str, Any] = {
        "mesh": layout.mesh,
        "mp_policy": layout.mp_policy,
        "offload_policy": layout.offload_policy,
        "ignored_params": ignored,
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=layout.reshard_after_forward, **options)
    # Torch's own default for a root: not after forward, for its backward comes at once.
    fully_shard(model, reshard_after_forward=None if layout.reshard_after_forward else False, **options)
