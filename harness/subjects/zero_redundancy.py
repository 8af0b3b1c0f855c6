"""DDP with torch's ZeroRedundancyOptimizer: whole parameters and gradients, moments on one rank each (ZeRO-1)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero2core.strategies import DDPStrategy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own, about what this import pulls in
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyStrategy"]


class ZeroRedundancyStrategy(DDPStrategy):
    """``DDPStrategy`` whose optimizer keeps the state of each parameter on one rank, and broadcasts what it updated."""

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """As the strategy's own; the optimizer's step is collective."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return ZeroRedundancyOptimizer(parameters, optimizer_class=optimizer_class, **settings)
