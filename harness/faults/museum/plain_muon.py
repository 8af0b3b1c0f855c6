"""What the exhibits of Muon are variants of: its update with a method for each part of it, and exchangeable buffers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero2core import collectives
from zero2core.muon.buffers import Buffer, FlatBuffer, WholeBuffer
from zero2core.muon.config import MuonShardingConfig
from zero2core.muon.info import MuonParamInfo, cut
from zero2core.muon.inner import MuonAdamW
from zero2core.muon.newton_schulz import Coefficients, newton_schulz
from zero2core.muon.route import Route
from zero2core.muon.sharding import MuonShardingOptimizer


class ByHand(MuonAdamW):
    """Muon's update from the specification alone, with a method for each part of it."""

    @torch.no_grad()
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        """One step of one whole matrix or flat slice."""
        info, group = self.info[name], self.param_groups[0]
        if not info.use_muon:
            super().update(name, master, gradient, state)
            return
        direction = self._direction(state["momentum"], gradient.contiguous(), group)
        step = torch.empty_like(direction)
        for block, out in zip(self._cut(direction, info), self._cut(step, info), strict=True):
            if block.numel():
                out.copy_(self._orthogonal(block, group)).mul_(self._scale(group["scale"], block, direction))
        lr = group["lr"] * info.lr_scale
        decay = group["weight_decay"] if info.weight_decay is None else info.weight_decay
        master.mul_(1 - lr * decay)
        master.add_(step, alpha=-lr)

    def _direction(self, momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()

    def _cut(self, matrix: Tensor, info: MuonParamInfo) -> list[Tensor]:
        return cut(matrix, info)

    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        return newton_schulz(
            block,
            coefficients=self._coefficients(group["ns_coefficients"], group["ns_steps"]),
            steps=group["ns_steps"],
            eps=group["ns_eps"],
            dtype=group["ns_dtype"],
        )

    def _coefficients(self, given: Coefficients, steps: int) -> Coefficients:
        return given

    def _scale(self, rule: str, block: Tensor, whole: Tensor) -> float:
        return self._scale_of(rule, *block.shape[-2:])

    def _scale_of(self, rule: str, rows: int, columns: int) -> float:
        match rule:
            case "original":
                return math.sqrt(max(1, rows / columns))
            case "spectral":
                return math.sqrt(rows / columns)
        return 0.2 * math.sqrt(max(rows, columns))


class OtherBuffers(MuonShardingOptimizer):
    """Right in itself: names the classes of its buffers and of its routes. ``any_class`` comes before both kinds."""

    whole_class: ClassVar[type[WholeBuffer]] = WholeBuffer
    flat_class: ClassVar[type[FlatBuffer]] = FlatBuffer
    any_class: ClassVar[type[Buffer] | None] = None
    route_class: ClassVar[type[Route]] = Route

    def _make_routes(self) -> dict[Hashable, Route]:
        routes = super()._make_routes()
        for route in routes.values():
            route.__class__ = self.route_class
        return routes

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        buffers = super()._make_buffers(routes)
        for buffer in buffers:
            kind: type[Buffer] = self.whole_class if isinstance(buffer, WholeBuffer) else self.flat_class
            buffer.__class__ = type(kind.__name__, (self.any_class, kind), {}) if self.any_class else kind
        return buffers


class TwoHops(OtherBuffers):
    """Goes in two hops, over nodes of two ranks, wherever there are several such nodes, asked to or not."""

    def __init__(
        self, inner: MuonAdamW, group: dist.ProcessGroup | None = None, config: MuonShardingConfig | None = None
    ) -> None:
        config = config or MuonShardingConfig()
        world = collectives.group_world(group) or 1
        if not config.two_hop and world > 2 and world % 2 == 0:
            config = replace(config, two_hop=True, local_world_size=2)
        super().__init__(inner, group, config)
