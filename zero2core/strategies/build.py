"""From a configuration to the strategy that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero2core.strategies.base import DistributionStrategy
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.ddp import DDPStrategy
from zero2core.strategies.dmuon import DMuonFSDPStrategy, Runtime
from zero2core.strategies.fsdp import FSDPStrategy

__all__ = ["build_strategy"]


def build_strategy(
    config: StrategyConfig | Mapping[str, Any],
    *,
    device: torch.device,
    local_rank: int,
    use_dmuon: bool = False,
    dmuon_runtime: Runtime = "own",
) -> DistributionStrategy:
    """The strategy that ``config`` asks for; it is copied.

    Args:
        device: of the model, any type that the default process group serves.
        local_rank: of this process on its node.
        use_dmuon: keep matrices that are marked for Muon whole, on one owner each; needs FSDP2.
        dmuon_runtime: ``"own"``: ``zero2core.strategies.dedicated``; ``"dmuon"``: the package of this name.

    Raises:
        ValueError: an unknown key or value, with the valid ones.
        NotImplementedError: ``use_dmuon`` without ``use_fsdp``.
        ImportError: the package ``dmuon`` is asked for and missing.
    """
    use_fsdp = StrategyConfig.of(config).use_fsdp
    if use_dmuon:
        if not use_fsdp:
            raise NotImplementedError(
                "use_dmuon takes matrices out of FSDP2, and use_fsdp is False: set use_fsdp=True, or use "
                "zero2core.MuonShardingOptimizer with a replicated model"
            )
        return DMuonFSDPStrategy(config, device=device, local_rank=local_rank, runtime=dmuon_runtime)
    chosen = FSDPStrategy if use_fsdp else DDPStrategy
    # As it was given, so that DDP sees which keys were.
    return chosen(config, device=device, local_rank=local_rank)
