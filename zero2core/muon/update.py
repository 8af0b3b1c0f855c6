"""What Muon does to one whole matrix in a step, and the settings it takes. Nothing here knows of other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from zero2core.muon.info import MuonParamInfo, cut
from zero2core.muon.newton_schulz import NS_DTYPES, Coefficients, newton_schulz, triples_of

__all__ = [
    "MUON_SETTINGS",
    "SCALES",
    "Scale",
    "muon_settings",
    "rate_and_decay",
    "require_at_least_0",
    "require_below_1",
    "update_muon",
]

Scale = Literal["original", "spectral", "match_rms_adamw"]

SCALES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
        "spectral": lambda rows, cols: math.sqrt(rows / cols),
        "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    }
)
"""What an orthogonalised block is multiplied by, from its rows (outputs) and columns (inputs)."""

MUON_SETTINGS = (
    "lr", "momentum", "nesterov", "weight_decay", "ns_steps", "ns_eps", "ns_coefficients", "ns_dtype", "scale",
)  # fmt: skip
"""Names of what :func:`muon_settings` takes and gives."""


def muon_settings(
    *,
    lr: float = 2e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    ns_eps: float = 1e-7,
    ns_coefficients: Coefficients = "simple",
    ns_dtype: torch.dtype = torch.bfloat16,
    scale: Scale = "match_rms_adamw",
) -> dict[str, Any]:
    """What a parameter group of Muon holds, by the names of the arguments; see :class:`~zero2core.muon.MuonAdamW`.

    Raises:
        ValueError: one of them is out of range or unknown.
    """
    require_at_least_0(lr=lr, weight_decay=weight_decay, ns_steps=ns_steps, ns_eps=ns_eps)
    require_below_1(momentum=momentum)
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}: must be one of {', '.join(map(repr, SCALES))}")
    if ns_dtype not in NS_DTYPES:
        raise ValueError(f"ns_dtype={ns_dtype}: must be one of {', '.join(map(str, NS_DTYPES))}")
    if not isinstance(ns_coefficients, str):
        ns_coefficients = triples_of(ns_coefficients)
    triples_of(ns_coefficients)
    settings: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    settings |= {"ns_steps": ns_steps, "ns_eps": ns_eps, "ns_coefficients": ns_coefficients, "ns_dtype": ns_dtype}
    return settings | {"scale": scale}


def rate_and_decay(info: MuonParamInfo, group: Mapping[str, Any]) -> tuple[float, float]:
    """Learning rate and weight decay of a parameter, from its record and its group."""
    weight_decay = group["weight_decay"] if info.weight_decay is None else info.weight_decay
    return float(group["lr"]) * info.lr_scale, weight_decay


@torch.no_grad()
def update_muon(
    master: Tensor, gradient: Tensor, momentum: Tensor, info: MuonParamInfo, group: Mapping[str, Any]
) -> None:
    """One step of one whole matrix ``[..., rows, cols]``: moves ``master`` and ``momentum``, all fp32.

    Args:
        gradient: of the same shape; left as it is.
        info: into which blocks the matrix is cut, and what it has of its own.
        group: of :func:`muon_settings`.
    """
    lr, weight_decay = rate_and_decay(info, group)
    gradient = gradient.contiguous()  # products of the same layout, whatever that of the parameter
    beta = group["momentum"]
    momentum.lerp_(gradient, 1 - beta)
    direction = gradient.lerp(momentum, beta) if group["nesterov"] else momentum.clone()
    update = torch.empty_like(direction)
    for block, out in zip(cut(direction, info), cut(update, info), strict=True):
        if block.numel() == 0:
            continue
        orthogonal = newton_schulz(
            block,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["ns_eps"],
            dtype=group["ns_dtype"],
        )
        out.copy_(orthogonal).mul_(SCALES[group["scale"]](block.shape[-2], block.shape[-1]))
    master.mul_(1 - lr * weight_decay)
    master.add_(update, alpha=-lr)


def require_at_least_0(**settings: float) -> None:
    """``ValueError`` naming a setting that is negative or not finite."""
    for name, value in settings.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value}: must be finite and at least 0")


def require_below_1(**settings: float) -> None:
    """``ValueError`` naming a setting outside [0, 1)."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value}: must be in [0, 1)")
