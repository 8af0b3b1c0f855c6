"""Sharded optimizers for torch.distributed, small enough to read in an evening.

Train with fp32 master weights, AdamW moments and gradients sharded over data-parallel ranks (ZeRO-2)::

    broadcast_module(model)
    params = [p for p in model.parameters() if p.requires_grad]
    zero = ZeroMaster(params, dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.AdamW([zero.master], lr=3e-4)
    for batch in batches:
        (model(batch) / zero.world).backward()  # gradients are summed over ranks: scale the loss for a mean
        zero.collect(more=False)
        zero.reduce_scatter()
        zero.master.grad.mul_((max_norm / (zero.grad_sq_norm().sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        zero.gather_params()

Every bit of the weights equals what an unsharded trainer computes from the same summed gradients.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zero2core.broadcast import broadcast_module
from zero2core.collectives import Collective
from zero2core.errors import GradientStateError, RankMismatchError, SimulationError, Zero2Error
from zero2core.layout import FlatLayout
from zero2core.memory import sharded_static_bytes
from zero2core.muon import (
    ClipGradByAdaptiveNorm,
    ClipGradByGlobalNorm,
    MuonAdamW,
    MuonParamInfo,
    MuonShardingConfig,
    MuonShardingOptimizer,
    newton_schulz,
)
from zero2core.zero_master import BUCKET, ZeroMaster

if TYPE_CHECKING:
    from zero2core.strategies import (
        DDPStrategy,
        DistributionStrategy,
        DMuonFSDPStrategy,
        FSDP2Layout,
        FSDPStrategy,
        StrategyConfig,
        build_strategy,
        mark_muon,
    )

__all__ = [
    "BUCKET",
    "ClipGradByAdaptiveNorm",
    "ClipGradByGlobalNorm",
    "Collective",
    "DDPStrategy",
    "DMuonFSDPStrategy",
    "DistributionStrategy",
    "FSDP2Layout",
    "FSDPStrategy",
    "FlatLayout",
    "GradientStateError",
    "MuonAdamW",
    "MuonParamInfo",
    "MuonShardingConfig",
    "MuonShardingOptimizer",
    "RankMismatchError",
    "SimulationError",
    "StrategyConfig",
    "Zero2Error",
    "ZeroMaster",
    "broadcast_module",
    "build_strategy",
    "mark_muon",
    "newton_schulz",
    "sharded_static_bytes",
]

_STRATEGIES = frozenset(
    {
        "DDPStrategy",
        "DMuonFSDPStrategy",
        "DistributionStrategy",
        "FSDP2Layout",
        "FSDPStrategy",
        "StrategyConfig",
        "build_strategy",
        "mark_muon",
    }
)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 (whatever the name stands for)
    # FSDP2 takes half a second to import, which who shards an optimizer alone need not wait for.
    if name in _STRATEGIES:
        return getattr(importlib.import_module("zero2core.strategies"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
