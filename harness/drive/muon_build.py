"""Construct the two optimizers of a scenario of system ``"muon"`` from the scenario's plain data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from harness.drive.muon_groups import groups_of_colors
from harness.scenario.model import Scenario, muon_of
from harness.scenario.muon import AdaptiveClip, GlobalClip, Mark, Muon

_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DEFAULT_COLOR = -1


def inner_class(cls: Callable[..., Any]) -> Callable[..., Any]:
    """What is built to be wrapped: the class's own ``inner_class``, else zero2core's."""
    from zero2core.muon.inner import MuonAdamW  # a rank that never drives this system need not import it

    chosen: Callable[..., Any] = getattr(cls, "inner_class", MuonAdamW)
    return chosen


def inner_arguments(scenario: Scenario, rates: tuple[float, float]) -> dict[str, Any]:
    """Arguments of the inner optimizer, but for the parameters. ``rates``: the learning rates now, Muon's first."""
    muon, adamw = muon_of(scenario), scenario.optimizer
    settings = muon.settings
    names = [parameter.name for parameter in scenario.parameters]
    return {
        "info": {name: _info(mark) for name, mark in zip(names, muon.marks, strict=True)},
        "lr": rates[0],
        "momentum": settings.beta,
        "nesterov": settings.nesterov,
        "weight_decay": settings.weight_decay,
        "ns_steps": settings.ns_steps,
        "ns_eps": settings.ns_eps,
        "ns_coefficients": settings.coefficients,
        "ns_dtype": _NS_DTYPES[settings.ns_dtype],
        "scale": settings.scale,
        "adamw_lr": rates[1],
        "adamw_betas": (adamw.beta1, adamw.beta2),
        "adamw_eps": adamw.eps,
        "adamw_weight_decay": adamw.weight_decay,
        "grad_clip": _clip(muon),
        "skip_missing": muon.sharding.skip_missing,
    }


def _info(mark: Mark) -> Any:  # noqa: ANN401 (a MuonParamInfo)
    from zero2core.muon.info import MuonParamInfo

    return MuonParamInfo(
        use_muon=mark.muon,
        split=mark.split,
        sizes=tuple(mark.sizes),
        num_heads=mark.num_heads,
        lr_scale=mark.lr_scale,
        weight_decay=mark.weight_decay,
        need_clip=mark.need_clip,
    )


def _clip(muon: Muon) -> Any:  # noqa: ANN401 (a clip of zero2core's)
    from zero2core.muon.clip import ClipGradByAdaptiveNorm, ClipGradByGlobalNorm

    match muon.clip:
        case GlobalClip(max_norm):
            return ClipGradByGlobalNorm(max_norm)
        case AdaptiveClip(ratio, warmup_steps, beta, eps):
            return ClipGradByAdaptiveNorm(ratio, warmup_steps, beta, eps)
    return None


def sharding_config(scenario: Scenario, rank: int, bucket: int) -> Any:  # noqa: ANN401 (a MuonShardingConfig)
    """The configuration for this rank. Collective where groups of colours are not there yet.

    The key of a colour is its index. ``bucket``: elements of a fused buffer.
    """
    from zero2core.muon.config import MuonShardingConfig

    muon = muon_of(scenario)
    sharding, groups = muon.sharding, groups_of_colors(scenario)
    colors = {}
    for parameter, mark in zip(scenario.parameters, muon.marks, strict=True):
        if mark.color is None:
            continue
        choices = [tuple(ranks) for ranks in muon.colors[mark.color].groups]
        # A rank outside hands on what torch gave it for a group that it is not in.
        ranks = next((each for each in choices if rank in each), choices[0])
        colors[parameter.name] = (mark.color, groups[ranks])
    divisors: dict[Hashable, float] = {
        key: color.divisor for key, color in enumerate(muon.colors) if color.divisor is not None
    }
    return MuonShardingConfig(
        comm_buffer_size_mb=bucket * 4 / 2**20 if sharding.fused else 0,
        owner_rule=sharding.owner_rule,
        owner_cap=sharding.owner_cap,
        use_reduce_avg=sharding.use_reduce_avg,
        comm_overlap=sharding.comm_overlap,
        accumulate_steps=sharding.accumulate_steps,
        release_gradients=sharding.release_gradients,
        fuse_optimizer_states=sharding.fuse_optimizer_states,
        two_hop=sharding.two_hop,
        local_world_size=sharding.local_world_size,
        skip_missing=sharding.skip_missing,
        colors=colors,
        color_divisors=divisors,
    )


def color_of_mark(mark: Mark) -> int:
    """A parameter's colour as :attr:`harness.scenario.muon.Muon.release_color` names it: ``-1`` is the default one."""
    return _DEFAULT_COLOR if mark.color is None else mark.color


def frozen_name(names: Iterable[str]) -> str:
    """A name that no parameter has, for the frozen one that is listed beside them."""
    taken, name = set(names), "frozen"
    while name in taken:
        name += "_"
    return name


def frozen_parameter(device: torch.device) -> nn.Parameter:
    """Takes no gradient, and must stay as it is."""
    return nn.Parameter(torch.full((5, 3), 1.5, dtype=torch.bfloat16, device=device), requires_grad=False)
