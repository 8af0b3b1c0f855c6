"""Distribution strategies: DDP, FSDP2, hybrid FSDP2 and dedicated-parameter Muon behind one interface."""

from __future__ import annotations

from zero2core.strategies.base import DistributionStrategy
from zero2core.strategies.build import build_strategy
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.ddp import DDPStrategy
from zero2core.strategies.dedicated_parameter import DedicatedParameter
from zero2core.strategies.dmuon import DMuonFSDPStrategy
from zero2core.strategies.fsdp import FSDP2Layout, FSDPStrategy
from zero2core.strategies.marks import mark_muon

__all__ = [
    "DDPStrategy",
    "DMuonFSDPStrategy",
    "DedicatedParameter",
    "DistributionStrategy",
    "FSDP2Layout",
    "FSDPStrategy",
    "StrategyConfig",
    "build_strategy",
    "mark_muon",
]
