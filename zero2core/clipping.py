"""One joint norm over plain, sharded and owner-only gradients, and one factor for all of them.

A gradient's squares are summed in fp64 (fp32 where a device has no fp64), whatever its dtype. What ranks hold of one
gradient is put together by gathering the sums, which each rank then adds up alike, so that every rank has the same
bits, whatever the topology; over the axes of a mesh that shard, never over those that replicate. Only these sums
travel, to the device that a group serves: gradients on the CPU under NCCL stay there, but for partial ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from zero2core import collectives
from zero2core.errors import GradientStateError

__all__ = ["ClipMode", "Clipped", "OnNonfinite", "OwnedGradients", "clip_", "joint_norm", "require_clip_arguments"]

OnNonfinite = Literal["raise", "skip", "propagate"]
ClipMode = Literal["joint", "segments"]

_logger = logging.getLogger(__name__)
# Elements that are squared at a time: no fp64 copy of a whole gradient, in few kernels where a launch costs.
_FP32_ZERO = 2.0**-150  # half of the least number above 0, and rounded to 0
_CHUNK_CPU, _CHUNK = 2**18, 2**25


class OwnedGradients(NamedTuple):
    """Gradients that one rank each holds, whole.

    Attributes:
        gradients: those of this rank, which may be none.
        group: the ranks among which gradients are owned, each of which gives its own; None: the default group.
    """

    gradients: Sequence[Tensor]
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Clipped:
    """What :func:`clip_` did.

    Attributes:
        norm: the joint norm before: fp32, no dimensions.
        skipped: whether the gradients are to be dropped, because the norm is not finite.
        stats: see :func:`clip_`.
    """

    norm: Tensor
    skipped: bool = False
    stats: dict[str, Any] = field(default_factory=dict)


def require_clip_arguments(max_norm: float | None, on_nonfinite: str, clip_mode: str) -> None:
    """``ValueError`` unless the bound is positive, infinite or None, and the words are known.

    A bound is a number, or a tensor without dimensions; the factor is computed in fp32, where it must not be 0 either.
    """
    if max_norm is not None:
        _require_bound(max_norm)
    for name, given, valid in (
        ("on_nonfinite", on_nonfinite, get_args(OnNonfinite)),
        ("clip_mode", clip_mode, get_args(ClipMode)),
    ):
        if given not in valid:
            raise ValueError(f"{name}={given!r}: valid values are {', '.join(map(repr, valid))}")


def _require_bound(max_norm: object) -> None:
    number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if isinstance(max_norm, Tensor):
        number = max_norm.dim() == 0 and max_norm.dtype != torch.bool and not max_norm.dtype.is_complex
    if not number:
        what = f"a tensor of shape {tuple(max_norm.shape)}" if isinstance(max_norm, Tensor) else repr(max_norm)
        raise ValueError(f"max_norm is {what}, a {type(max_norm).__name__}: must be a number above 0, or None")
    try:
        bound = float(cast("float", max_norm))
    except OverflowError:
        raise ValueError("max_norm is too large for a float: None or infinity to measure only") from None
    if not bound > 0:
        raise ValueError(
            f"max_norm={max_norm}: must be above 0; None or infinity to measure only (a negative bound would turn "
            "every gradient around)"
        )
    if bound <= _FP32_ZERO:
        raise ValueError(
            f"max_norm={max_norm}: is 0 in fp32, so that every gradient would be lost: must be above 1e-45"
        )


def joint_norm(
    gradients: Iterable[Tensor], owned: Iterable[OwnedGradients] = (), *, device: torch.device | None = None
) -> Tensor:
    """The norm of all gradients together: fp32, no dimensions, the same bits on every rank. Collective.

    Args:
        gradients: plain ones, the same on every rank, counted once; DTensors of any mesh and placements.
        owned: gradients that other ranks do not have.
        device: where the result lies; by default where the first gradient does.

    Raises:
        ValueError: a sparse gradient, one that is not of floating point, or one partial in another way than a sum or
            a mean.
    """
    sums = _sums_of_squares(list(gradients), list(owned), device)
    return torch.stack(list(sums.values())).sum().sqrt().float()


@torch.no_grad()
def clip_(
    gradients: Iterable[Tensor],
    max_norm: float | None,
    *,
    owned: Iterable[OwnedGradients] = (),
    on_nonfinite: OnNonfinite = "propagate",
    clip_mode: ClipMode = "joint",
    device: torch.device | None = None,
) -> Clipped:
    """Scale all gradients in place by ``min(1, max_norm / (norm + 1e-6))``. Collective.

    One factor, computed in fp32, with one rounding for each element. The host waits for the device only where
    ``on_nonfinite`` asks for a decision, or gradients lie on another device than the factor.

    The arguments are those of :func:`joint_norm` and of
    :meth:`zero2core.strategies.base.DistributionStrategy.clip_grad_norm`. ``on_nonfinite="skip"`` scales nothing: the
    caller drops the gradients where the result says ``skipped``.

    Returns:
        The joint norm, and stats: ``total_norm`` and ``coefficient`` (0-dim fp32 tensors, so that nobody waits for the
        device who does not read them; with ``clip_mode="segments"`` the coefficient is a dict), ``max_norm`` (a number
        or None), ``clip_mode``, ``norms`` (a dict of 0-dim fp32 tensors for ``plain``, ``sharded`` and ``owned``),
        ``num_gradients`` (on this rank), ``skipped``.

    Raises:
        ValueError: see :func:`require_clip_arguments` and :func:`joint_norm`.
        GradientStateError: the norm is not finite, and ``on_nonfinite="raise"``; on all ranks; nothing is scaled.
    """
    require_clip_arguments(max_norm, on_nonfinite, clip_mode)
    gradients, owned = list(gradients), list(owned)
    own = [gradient for held in owned for gradient in held.gradients]
    classes: dict[str, list[Tensor]] = {
        "plain": [gradient for gradient in gradients if not isinstance(gradient, DTensor)],
        "sharded": [gradient for gradient in gradients if isinstance(gradient, DTensor)],
        "owned": own,
    }
    sums = _sums_of_squares(gradients, owned, device)
    norm = torch.stack(list(sums.values())).sum().sqrt().float()
    norms = {name: total.sqrt().float() for name, total in sums.items()}
    num_gradients = len(gradients) + len(own)
    if not num_gradients and not owned:
        _logger.warning("no parameter has a gradient: the norm is 0 and a step will change nothing")
    skipped = False
    if on_nonfinite != "propagate" and not math.isfinite(norm.item()):
        if on_nonfinite == "raise":
            raise GradientStateError(
                f"the norm of all gradients is {norm.item()}: some gradient is not finite, on some rank (of "
                + ", ".join(f"{name}: {value.item()}" for name, value in norms.items())
                + "); on_nonfinite='skip' drops them"
            )
        skipped = True
    factors = {name: _factor(norms[name] if clip_mode == "segments" else norm, max_norm) for name in classes}
    if not skipped and max_norm is not None and max_norm != math.inf:
        for name, members in classes.items():
            _scale_(members, factors[name])
    stats: dict[str, Any] = {
        "total_norm": norm,
        "coefficient": factors if clip_mode == "segments" else factors["plain"],
        "max_norm": max_norm,
        "clip_mode": clip_mode,
        "norms": norms,
        "num_gradients": num_gradients,
        "skipped": skipped,
    }
    return Clipped(norm, skipped, stats)


def _factor(norm: Tensor, max_norm: float | None) -> Tensor:
    if max_norm is None or max_norm == math.inf:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place, with one rounding: a factor rounded to 16 bits first would be up to 0.4 % off."""
    on = {factor.device: factor}  # it travels to another device once, for which the host waits
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.device not in on:
            on[local.device] = factor.to(local.device)
        if local.element_size() < factor.element_size():
            local.copy_(local.float().mul_(on[local.device]))
        else:
            local.mul_(on[local.device])


def _sums_of_squares(
    gradients: Sequence[Tensor], owned: Sequence[OwnedGradients], device: torch.device | None
) -> dict[str, Tensor]:
    """Joint sums of squares of the plain, the sharded and the owned gradients, on ``device``. Collective."""
    if device is None:
        first = next(iter(gradients), None)
        device = first.device if first is not None else torch.device("cpu")
    dtype = _square_dtype(device)
    sums = {name: torch.zeros((), dtype=dtype, device=device) for name in ("plain", "sharded", "owned")}
    # By the groups over which they are cut, in the order in which these first occur: the same on every rank.
    cut: dict[tuple[int, ...], tuple[list[dist.ProcessGroup], Tensor]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            sums["plain"] += _square_sum(gradient, device)
            continue
        groups = _sharding_groups(gradient)
        key = tuple(map(id, groups))
        total = cut[key][1] if key in cut else torch.zeros((), dtype=dtype, device=device)
        cut[key] = (groups, total + _square_sum(_without_partial(gradient), device))
    for groups, total in cut.values():
        for group in groups:
            total = _over_ranks(total, group)
        sums["sharded"] += total
    for held in owned:
        total = torch.zeros((), dtype=dtype, device=device)
        for gradient in held.gradients:
            total += _square_sum(gradient, device)
        sums["owned"] += _over_ranks(total, held.group)
    return sums


def _square_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _square_sum(gradient: Tensor, device: torch.device) -> Tensor:
    """Sum of the squares of a local tensor, no dimensions, on ``device``."""
    if gradient.layout != torch.strided or not gradient.dtype.is_floating_point:
        raise ValueError(
            f"a gradient of {gradient.dtype} and layout {gradient.layout}: norms are of dense floating-point gradients"
        )
    dtype = _square_dtype(gradient.device)
    flat = gradient.detach().reshape(-1)
    total = torch.zeros((), dtype=dtype, device=gradient.device)
    chunk = _CHUNK_CPU if gradient.device.type == "cpu" else _CHUNK
    for start in range(0, flat.numel(), chunk):
        total += flat[start : start + chunk].to(dtype).square().sum()
    return total.to(device)


def _sharding_groups(gradient: DTensor) -> list[dist.ProcessGroup]:
    """The groups of the axes over which the ranks hold different elements."""
    mesh = gradient.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not isinstance(placement, (Replicate, Partial)) and mesh.size(axis) > 1
    ]


def _without_partial(gradient: DTensor) -> Tensor:
    """This rank's elements, summed over the axes along which the gradient is partial."""
    local = gradient.to_local()
    for axis, placement in enumerate(gradient.placements):
        if not isinstance(placement, Partial):
            continue
        if placement.reduce_op not in ("sum", "avg"):
            raise ValueError(f"a gradient is partial by {placement.reduce_op!r}: only 'sum' and 'avg' can be scaled")
        group = gradient.device_mesh.get_group(axis)
        dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
        summed = local.detach().to(collectives.group_device(group), dtype=dtype, copy=True).contiguous()
        collectives.all_reduce_sum(summed, group=group)
        if placement.reduce_op == "avg":
            summed.div_(gradient.device_mesh.size(axis))
        local = summed
    return local


def _over_ranks(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of ``total`` over the ranks of a group, the same bits on each."""
    world = collectives.group_size(group)
    if world == 1:
        return total
    sent = total.to(collectives.group_device(group)).reshape(1)
    gathered = torch.empty(world, dtype=sent.dtype, device=sent.device)
    collectives.all_gather(gathered, sent, group=group).wait()
    return gathered.sum().to(total.device)
