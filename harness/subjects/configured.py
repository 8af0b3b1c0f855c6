"""The subject ``strategy``: whatever ``zero2core.build_strategy`` makes of the user's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.subjects.strategy_offers import USE_DMUON
from zero2core.strategies import DistributionStrategy, StrategyConfig, build_strategy
from zero2core.strategies.mesh import local_world, mesh_shape

__all__ = ["Configured", "problem"]


class Configured(DistributionStrategy):
    """Constructing it gives the strategy that the configuration names."""

    def __new__(  # type: ignore[misc]
        cls, config: Mapping[str, Any], *, device: torch.device, local_rank: int, use_dmuon: bool = False
    ) -> DistributionStrategy:
        """What ``build_strategy`` gives; ``use_dmuon`` may be a key of the configuration."""
        keys = dict(config)
        use_dmuon = use_dmuon or bool(keys.pop(USE_DMUON, False))
        return build_strategy(keys, device=device, local_rank=local_rank, use_dmuon=use_dmuon)


def problem(
    config: Mapping[str, Any], args: Mapping[str, Any], *, device: torch.device, world: int | None = None
) -> str | None:
    """Why our own strategies refuse this configuration, which is bad usage; None: they take it.

    ``world``: of the ranks that will use it, where that is known.
    """
    keys = {key: value for key, value in config.items() if key != USE_DMUON}
    use_dmuon = bool(config.get(USE_DMUON, False)) or bool(args.get(USE_DMUON, False))
    try:
        build_strategy(keys, device=device, local_rank=device.index or 0, use_dmuon=use_dmuon)
    except (ValueError, NotImplementedError) as error:
        return f"the configuration cannot be used: {error}"
    try:
        if world is not None:
            mesh_shape(StrategyConfig.of(keys), world, local_world())
    except ValueError as error:
        return f"the configuration cannot be used at world {world} (--world says at which it is): {error}"
    return None
