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

__all__ = [
    "BUCKET",
    "ClipGradByAdaptiveNorm",
    "ClipGradByGlobalNorm",
    "Collective",
    "FlatLayout",
    "GradientStateError",
    "MuonAdamW",
    "MuonParamInfo",
    "MuonShardingConfig",
    "MuonShardingOptimizer",
    "RankMismatchError",
    "SimulationError",
    "Zero2Error",
    "ZeroMaster",
    "broadcast_module",
    "newton_schulz",
    "sharded_static_bytes",
]
