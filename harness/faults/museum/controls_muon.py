"""Right variants of our Muon optimizer: each keeps all that ``muon`` promises."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain_muon import ByHand, OtherBuffers, TwoHops
from zero2core import collectives
from zero2core.muon.buffers import Buffer
from zero2core.muon.config import MuonShardingConfig
from zero2core.muon.inner import MuonAdamW
from zero2core.muon.newton_schulz import triples_of
from zero2core.muon.plan import MuonShardingPlan
from zero2core.muon.route import Flight, Route
from zero2core.muon.sharding import MuonShardingOptimizer, _Own

# --- the update


class UpdatesByHand(MuonShardingOptimizer):
    """Updates matrices by code of its own, written from the specification."""

    inner_class = ByHand


class _OneByOne(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        if block.dim() == 2:
            return super()._orthogonal(block, group)
        return torch.stack([self._orthogonal(each, group) for each in block])


class OrthogonalisesOneByOne(MuonShardingOptimizer):
    """Orthogonalises heads and experts in a loop, and not as a batch: products have another shape."""

    inner_class = _OneByOne


class _ColumnsFirst(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        return super()._orthogonal(block.mT.contiguous().mT, group)


class OrthogonalisesColumnsFirst(MuonShardingOptimizer):
    """Hands Newton-Schulz a matrix whose columns lie end to end: products take another path."""

    inner_class = _ColumnsFirst


class _LongSide(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        if block.shape[-2] <= block.shape[-1]:
            return super()._orthogonal(block, group)
        norm = torch.linalg.vector_norm(block, dim=(-2, -1), keepdim=True)
        x = (block / (norm + group["ns_eps"])).to(group["ns_dtype"])
        for a, b, c in islice(cycle(triples_of(group["ns_coefficients"])), group["ns_steps"]):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        orthogonal: Tensor = x.to(torch.float32)
        return orthogonal


class OrthogonalisesTallMatrices(MuonShardingOptimizer):
    """Does not transpose a matrix with more rows than columns: the same polynomial by larger products."""

    inner_class = _LongSide


class _OutOfPlace(ByHand):
    def _direction(self, momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        moved = torch.lerp(momentum, gradient, 1 - group["momentum"])
        momentum.copy_(moved)
        return torch.lerp(gradient, moved, group["momentum"]) if group["nesterov"] else moved


class MovesMomentumOutOfPlace(MuonShardingOptimizer):
    """Makes the new momentum beside the old one."""

    inner_class = _OutOfPlace


# --- buffers, owners, collectives


class OneBufferAMatrix(MuonShardingOptimizer):
    """Fuses no matrices, whatever size of buffers is asked for."""

    def __init__(
        self, inner: MuonAdamW, group: dist.ProcessGroup | None = None, config: MuonShardingConfig | None = None
    ) -> None:
        super().__init__(inner, group, replace(config or MuonShardingConfig(), comm_buffer_size_mb=0.0))


class StartsFromHooks(MuonShardingOptimizer):
    """Always starts collectives from hooks."""

    def __init__(
        self, inner: MuonAdamW, group: dist.ProcessGroup | None = None, config: MuonShardingConfig | None = None
    ) -> None:
        super().__init__(inner, group, replace(config or MuonShardingConfig(), comm_overlap=True))


class DividesAfterTheSum(MuonShardingOptimizer):
    """Never averages in a collective."""

    def __init__(
        self, inner: MuonAdamW, group: dist.ProcessGroup | None = None, config: MuonShardingConfig | None = None
    ) -> None:
        super().__init__(inner, group, replace(config or MuonShardingConfig(), use_reduce_avg=False))


class OwnsFromTheLastRank(MuonShardingOptimizer):
    """Gives matrices to the same number of ranks, counted from the last one."""

    def _make_plan(self) -> MuonShardingPlan:
        plan = super()._make_plan()
        colors, owners = [], dict(plan.owners)
        for color in plan.colors:
            last = len(color.ranks) - 1
            buffers = [
                buffer if buffer.owner is None else replace(buffer, owner=last - buffer.owner)
                for buffer in color.buffers
            ]
            owners |= {
                slot.name: color.ranks[buffer.owner]
                for buffer in buffers
                if buffer.owner is not None
                for slot in buffer.slots
            }
            colors.append(replace(color, buffers=tuple(buffers)))
        return replace(plan, colors=tuple(colors), owners=owners)


class _Fresh(Buffer):
    def allocated(self) -> Tensor:
        if self.gradient is None:
            self.gradient = torch.full((self.plan.numel,), torch.nan, device=self.device)
        return self.gradient

    def restart(self, *, release: bool) -> None:
        super().restart(release=True)


class FreshBuffersEveryStep(OtherBuffers):
    """Takes new memory, full of nan, for the gradients of each step."""

    any_class = _Fresh


class WalksBuffersBackward(MuonShardingOptimizer):
    """Communicates the last buffer first, on every rank."""

    def _make_buffers(self, routes: Mapping[Any, Route]) -> list[Buffer]:
        return super()._make_buffers(routes)[::-1]

    def _launch_complete(self) -> None:
        """Nothing is started from hooks: a backward completes the last buffer of this order last."""


class SendsOneByOne(MuonShardingOptimizer):
    """Waits for the weights of each buffer before the next one is sent."""

    def _send(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            super()._send([buffer])


class _AllReduce(Route):
    def reduce(self, tensor: Tensor, owner: int, *, average: bool) -> Flight:
        if self.world == 1 or self._grid is not None:
            return super().reduce(tensor, owner, average=average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return Flight(lambda: dist.all_reduce(tensor, op=op, group=self._group, async_op=True))


class AllReducesMatrices(OtherBuffers):
    """Sums matrices on every rank, and uses the sum on their owners."""

    route_class = _AllReduce


class AlwaysTwoHops(TwoHops):
    """Goes in two hops wherever there are several nodes of two ranks."""


class _Broadcasts(Route):
    def all_gather(self, output: Tensor, source: Tensor, *, block: Tensor | None = None) -> Flight:
        if self.world == 1 or self._grid is not None:
            return super().all_gather(output, source, block=block)
        pieces = list(output.view(self.world, -1))
        pieces[self.rank].copy_(source)
        for rank, piece in enumerate(pieces):
            collectives.broadcast(piece, src=rank, group=self._group)
        return Flight()


class GathersSlicesByBroadcast(OtherBuffers):
    """Every rank broadcasts its piece of a buffer of slices."""

    route_class = _Broadcasts


# --- norms and state


class NormOfElements(MuonShardingOptimizer):
    """Adds squares from the last element to the first."""

    def _own_sq_norm(self, one: _Own) -> Tensor:
        gradient = one.gradient
        if gradient is None:
            return super()._own_sq_norm(one)
        return gradient.reshape(-1).double().square().flip(0).sum()


class SavesToAFile(MuonShardingOptimizer):
    """Saves what ``torch.save`` writes and ``torch.load`` reads."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, through bytes."""
        file = io.BytesIO()
        torch.save(super().state_dict(), file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=False)
        return loaded


class SavesCopies(MuonShardingOptimizer):
    """Saves copies, so that what is saved stays as it is while training goes on."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state."""
        return copy.deepcopy(super().state_dict())
