"""Muon, unsharded and sharded: whole matrices on owner ranks, everything else element by element."""

from __future__ import annotations

from zero2core.muon.clip import ClipGradByAdaptiveNorm, ClipGradByGlobalNorm
from zero2core.muon.config import MuonShardingConfig
from zero2core.muon.info import MuonParamInfo
from zero2core.muon.inner import MuonAdamW
from zero2core.muon.newton_schulz import COEFFICIENTS, newton_schulz
from zero2core.muon.plan import MuonShardingPlan
from zero2core.muon.route import get_same_card_rank, get_trainer_ranks
from zero2core.muon.shard import Shard
from zero2core.muon.sharding import MuonShardingOptimizer

__all__ = [
    "COEFFICIENTS",
    "ClipGradByAdaptiveNorm",
    "ClipGradByGlobalNorm",
    "MuonAdamW",
    "MuonParamInfo",
    "MuonShardingConfig",
    "MuonShardingOptimizer",
    "MuonShardingPlan",
    "Shard",
    "get_same_card_rank",
    "get_trainer_ranks",
    "newton_schulz",
]
