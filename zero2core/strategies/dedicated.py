"""Dedicated matrices: whole on one owner, which alone steps them; all other ranks receive them where they use them.

What a matrix costs a rank, in bytes an element (a step with one part; ``n`` ranks, ``k`` bytes of the compute dtype)::

                        owner           other ranks
    master, momentum    4 + 4           0
    gradient            4               0, once reduced; 4 from its backward on until then
    compute weights     k               k, where it is used ("z3") or from the first forward until the step ("z2")

Mark matrices where the model is built, take them out before FSDP2 shards the rest, and step with the optimizer made
here::

    mark_muon(block.up.weight)
    dedicate(model, compute_dtype=torch.bfloat16)
    fully_shard(model, ...)
    optimizer = build_optimizer(model, torch.optim.AdamW, muon={"lr": 2e-3}, lr=3e-4)

Dedicated matrices are no parameters of the model any more: ``parameters()``, ``named_parameters()`` and
``state_dict()`` do not have them. :func:`dedicated_of` has them by the names they had, :func:`full_state` gives whole
weights to every rank, and the optimizer's ``state_dict`` has what a rank owns. There is no resharding checkpoint of
them, and what walks over ``model.parameters()`` (an exponential moving average, another optimizer) does not see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2core import collectives
from zero2core.agreement import require_agreement
from zero2core.clipping import OwnedGradients, clip_, require_clip_arguments
from zero2core.muon.info import MuonParamInfo
from zero2core.muon.ownership import Whole, assign_owners
from zero2core.strategies.dedicated_optimizer import DedicatedOptimizer
from zero2core.strategies.dedicated_parameter import DedicatedParameter
from zero2core.strategies.dedicated_runtime import DedicatedRuntime, Keep
from zero2core.strategies.marks import mark_muon, marked_parameters
from zero2core.strategies.prepare import optimizer_groups

__all__ = [
    "DedicatedClipStats",
    "DedicatedOptimizer",
    "DedicatedParameter",
    "DedicatedRuntime",
    "build_optimizer",
    "clip_grad_norm_",
    "dedicate",
    "dedicated_of",
    "flush",
    "full_state",
    "load_full_state",
    "mark_muon",
    "no_sync",
    "runtime_of",
]

_ATTRIBUTE = "zero2core_dedicated"


def dedicate(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    infos: Mapping[str, MuonParamInfo | None] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    keep: Keep = "z3",
) -> DedicatedRuntime:
    """Take marked matrices out of ``model`` and give each to an owner, of least Newton-Schulz work so far. Collective.

    Call it when every rank has the same weights (an owner's become those of all), and before anything shards or wraps
    the model. Afterwards the modules still have them, in their forward alone. Tied ones stay tied.

    Every rank must run the same modules in the same order, forward and backward, as FSDP2 demands too; which matrices
    a rank uses in them is its own affair.

    Args:
        group: all ranks that train together, replicas too; None: the default group.
        infos: names of the matrices, with records; None: those that are marked, see :func:`mark_muon`.
        compute_dtype: of forward and backward; None: each parameter's own.
        reduce_dtype: in which gradients are summed over ranks; a rank adds its own parts up in fp32.
        keep: ``"z3"``: weights are given back after each use, and broadcast again for the backward; ``"z2"``: kept from
            the first forward until the step.

    Raises:
        ValueError: nothing is marked, a name is unknown, a parameter is no matrix, or on the meta device, or sharded;
            ``model`` is dedicated already; ``keep`` is unknown; a dtype is no floating-point one.
        TypeError: a record is none.
        RankMismatchError: ranks have other matrices or settings; on all of them.
    """
    if any(_ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has dedicated parameters already: call dedicate once")
    if keep not in ("z2", "z3"):
        raise ValueError(f"keep={keep!r}: must be 'z2' or 'z3'")
    for what, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{what}={dtype}: must be a floating-point dtype")
    marked = marked_parameters(model, infos)
    world = collectives.group_size(group)
    if world > 1:
        facts = [f"{m.name}: shape {tuple(m.parameter.shape)}, {m.parameter.dtype}, {m.info}" for m in marked]
        facts += [f"compute_dtype {compute_dtype}", f"reduce_dtype {reduce_dtype}", f"keep {keep}"]
        require_agreement("dedicate", facts, group=group, device=collectives.group_device(group))
    owners = assign_owners([Whole(m.name, tuple(m.parameter.shape)) for m in marked], world)
    rank = collectives.group_rank(group) if world > 1 else 0
    ranks = collectives.group_ranks(group) or (0,)
    parameters = {
        m.name: DedicatedParameter(
            m.name,
            m.parameter,
            m.info,
            owner=ranks[owner],
            src=owner,
            is_owner=owner == rank,
            compute_dtype=compute_dtype or m.parameter.dtype,
        )
        for m, owner in zip(marked, owners, strict=True)
    }
    runtime = DedicatedRuntime(parameters, group=group, reduce_dtype=reduce_dtype, keep=keep)
    runtime.attach(model, marked)
    model.__dict__[_ATTRIBUTE] = runtime
    return runtime


def runtime_of(model: nn.Module) -> DedicatedRuntime:
    """What runs the dedicated parameters of ``model``; ``ValueError`` where it has none."""
    for module in model.modules():  # what was given to dedicate() may be inside another module by now
        runtime = module.__dict__.get(_ATTRIBUTE)
        if isinstance(runtime, DedicatedRuntime):
            return runtime
    raise ValueError(f"{type(model).__name__} has no dedicated parameters: pass the model that dedicate() was given")


def dedicated_of(model: nn.Module) -> Mapping[str, DedicatedParameter]:
    """Dedicated parameters of ``model`` by name."""
    return runtime_of(model).parameters


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backwards add gradients of dedicated parameters up, in fp32, without reducing them; nests."""
    return runtime_of(model).no_sync()


def flush(model: nn.Module) -> None:
    """Reduce what was added up in :func:`no_sync` and by no backward outside it; nothing if nothing was. Collective."""
    runtime_of(model).flush()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole fp32 weights of dedicated parameters by name, on every rank: new tensors. Collective."""
    return runtime_of(model).full_state()


def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take weights from ``state`` of :func:`full_state`, on every rank; ``ValueError`` where it does not fit."""
    runtime_of(model).load_full_state(state)


def build_optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    muon: Mapping[str, Any] | None = None,
    **settings: Any,  # noqa: ANN401
) -> DedicatedOptimizer:
    """Muon for the dedicated parameters of ``model``, ``optimizer_class`` for all others that take gradients.

    Args:
        muon: ``lr``, ``momentum``, ``nesterov``, ``weight_decay``, ``ns_steps``, ``ns_eps``, ``ns_coefficients``,
            ``ns_dtype`` and ``scale`` of :class:`~zero2core.muon.MuonAdamW`, which has the defaults, too.
        settings: of ``optimizer_class``.
    """
    return DedicatedOptimizer(runtime_of(model), optimizer_groups(model), optimizer_class, muon=muon, **settings)


@dataclass(frozen=True)
class DedicatedClipStats:
    """What :func:`clip_grad_norm_` found.

    Attributes:
        total_norm: of all dedicated gradients before clipping, over all ranks; fp32, 0-dim, the same on every rank.
        max_norm: the bound; None: there was none.
        coefficient: what they were multiplied by; fp32, 0-dim.
        num_gradients: of this rank.
    """

    total_norm: Tensor
    max_norm: float | None
    coefficient: Tensor
    num_gradients: int

    def as_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)


def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float | None) -> DedicatedClipStats:
    """Scale *dedicated* gradients by ``min(1, max_norm / (norm + 1e-6))``, of their own norm. Collective.

    Other gradients are neither counted nor scaled: clipped apart, all together can have up to sqrt(2) times the bound.
    A strategy's ``clip_grad_norm`` has one norm for all. ``None`` and inf only measure. Records with
    ``need_clip=False`` are left out.

    Raises:
        TypeError: ``optimizer`` is no :class:`DedicatedOptimizer`.
        ValueError: ``max_norm`` is 0, negative or nan.
        GradientStateError: gradients wait to be reduced.
    """
    if not isinstance(optimizer, DedicatedOptimizer):
        raise TypeError(f"clip_grad_norm_ got a {type(optimizer).__name__}: pass what build_optimizer gave")
    require_clip_arguments(max_norm, "propagate", "joint")
    runtime = optimizer.runtime
    runtime.require_reduced("clip_grad_norm_")
    gradients = runtime.clipped_gradients()
    device = next(iter(runtime.parameters.values())).leaf.device
    clipped = clip_([], max_norm, owned=[OwnedGradients(gradients, runtime.group)], device=device)
    return DedicatedClipStats(clipped.norm, max_norm, clipped.stats["coefficient"], len(gradients))
