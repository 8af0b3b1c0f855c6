"""Plants: who owns what, how weights get from a Muon optimizer's masters to all ranks, what is saved and loaded."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.faults.museum.plain_muon import OtherBuffers, TwoHops
from zero2core import collectives
from zero2core.muon.buffers import Buffer, FlatBuffer, Member
from zero2core.muon.route import Flight, Route
from zero2core.muon.sharding import MuonShardingOptimizer

# --- owners


class _NobodysRest(FlatBuffer):
    def own(self) -> Iterator[tuple[Member, int, int]]:
        length = self.members[-1].slot.stop // self.route.world
        for member, start, stop in super().own():
            end = min(stop, self._begin + length - member.slot.start)
            if start < end:
                yield member, start, end


class NobodyOwnsTheRest(OtherBuffers):
    """Rounds the length of a piece down, where the buffer was padded for it to be rounded up."""

    flat_class = _NobodysRest


# --- weights on their way


class _NextRank(Route):
    def broadcast(self, tensor: Tensor, owner: int) -> Flight:
        return super().broadcast(tensor, (owner + 1) % self.world)


class BroadcastsFromNextRank(OtherBuffers):
    """Gives all ranks the matrix of the rank behind its owner."""

    route_class = _NextRank


class _RankOfTheWorld(Route):
    def broadcast(self, tensor: Tensor, owner: int) -> Flight:
        return super().broadcast(tensor, min(self._ranks[owner], self.world - 1))


class CountsOwnersInTheWorld(OtherBuffers):
    """Counts a matrix's owner among all ranks where the collective counts within the group."""

    route_class = _RankOfTheWorld


class _OwnersNodeOnly(Route):
    def broadcast(self, tensor: Tensor, owner: int) -> Flight:
        if self.world == 1 or self._grid is None:
            return super().broadcast(tensor, owner)
        node, local = self._grid.place(self._ranks[owner])
        if node != self._node:
            return Flight()
        return Flight(lambda: collectives.launch_broadcast(tensor, src=local, group=self._inside))


class SendsInsideOwnersNode(TwoHops):
    """Leaves out the hop of a broadcast that goes to other nodes."""

    route_class = _OwnersNodeOnly


class LastBufferLags(MuonShardingOptimizer):
    """Returns from a step before its last buffer is sent, and sends that when the next step's gradients are summed."""

    _rest: tuple[Buffer, ...] = ()

    def _send(self, buffers: Iterable[Buffer]) -> None:
        sent = list(buffers)
        self._rest = tuple(sent[-1:])
        super()._send(sent[:-1])

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        super()._send(self._rest)
        self._rest = ()
        super().reduce_gradients()


class _FirstSlot(Buffer):
    def send(self) -> None:
        super().send()
        self._flight.wait()
        length = self.members[0].slot.stop
        for member in self.members[1:]:
            if member.slot.stop - member.slot.start == length:
                member.of(self.weights).view(-1).copy_(self.weights[:length])


class ReadsFromBufferStart(OtherBuffers):
    """What is as large as the first tensor of a buffer is read from there."""

    any_class = _FirstSlot


class NewStorageEveryStep(MuonShardingOptimizer):
    """Points parameters at new tensors after each step: who holds the old ones has old weights."""

    def _send(self, buffers: Iterable[Buffer]) -> None:
        super()._send(buffers)
        for member in self._members.values():
            member.param.data = member.of(member.buffer.weights).clone()


class MissingStaysReleased(MuonShardingOptimizer):
    """Sends the buffers in which any rank had a gradient, and no others, also where storage was given up before."""

    _quiet: tuple[Buffer, ...] = ()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        quiet: list[Buffer] = []
        for color in self.plan.colors:
            buffers = [buffer for buffer in self._buffers if buffer.plan.color == color.key]
            told = torch.tensor([any(m.touched for m in buffer.members) for buffer in buffers], dtype=torch.uint8)
            if buffers and len(color.ranks) > 1:
                collectives.all_reduce_max(told, group=self._groups[color.key][0])
            quiet += [buffer for buffer, there in zip(buffers, told.tolist(), strict=True) if not there]
        self._quiet = tuple(quiet)

    def _send(self, buffers: Iterable[Buffer]) -> None:
        super()._send(buffer for buffer in buffers if buffer not in self._quiet)


class GivesBackOldWeights(MuonShardingOptimizer):
    """Keeps a copy of the weights whose storage is given up, and gives that back."""

    _kept: Mapping[int, Tensor] = {}

    def clear_param_storage(self, color: Hashable = None) -> None:
        kept = {
            id(buffer): buffer.weights.clone() for buffer in self._buffers if buffer.weights.untyped_storage().size()
        }
        super().clear_param_storage(color)
        freed = [buffer for buffer in self._buffers if not buffer.weights.untyped_storage().size()]
        self._kept = {**self._kept, **{id(buffer): kept[id(buffer)] for buffer in freed if id(buffer) in kept}}

    def _send(self, buffers: Iterable[Buffer]) -> None:
        super()._send(buffers)
        for buffer in self._buffers:
            if id(buffer) in self._kept:
                buffer.weights.copy_(self._kept[id(buffer)])
        self._kept = {}


# --- counters and state


class CounterWaitsForOwnGradient(MuonShardingOptimizer):
    """Counts the steps of a slice only where this rank has had a gradient for its parameter itself."""

    def _send(self, buffers: Iterable[Buffer]) -> None:
        for one in self._own:
            if "step" in one.state and one.name not in self._missing and not one.member.touched:
                one.state["step"] -= 1
        super()._send(buffers)


class SavesMomentumOfRankZero(MuonShardingOptimizer):
    """What is saved has the momentum of rank 0's matrices, and zeros for all others."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        if self.rank:
            for name, state in saved["state"].items():
                if "momentum" in state:
                    saved["state"][name] = state | {"momentum": torch.zeros_like(state["momentum"])}
        return saved


class ResumesFromRoundedMaster(MuonShardingOptimizer):
    """Makes masters from the weights when it loads, which have lost what the masters were kept for."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for one in self._own:
            one.master.copy_(one.master.to(one.member.param.dtype))


class LosesClipState(MuonShardingOptimizer):
    """Saves no norms that the adaptive clip has tracked."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        if saved["grad_clip"]:
            saved["grad_clip"] = {"step": 0, "norms": {}}
        return saved


class RestartsCounter(MuonShardingOptimizer):
    """Begins to count steps anew where state is loaded: bias correction is that of a first step."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for one in self._own:
            if "step" in one.state:
                one.state["step"] = 0
