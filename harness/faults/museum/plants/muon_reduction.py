"""Plants: how a Muon optimizer takes, sums and averages gradients, clips them, and what a missing one means."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.faults.museum.plain_muon import ByHand, OtherBuffers, TwoHops
from zero2core import collectives
from zero2core.collectives import Work
from zero2core.muon.arguments import local_world_size
from zero2core.muon.buffers import Buffer, FlatBuffer, Member, WholeBuffer
from zero2core.muon.newton_schulz import newton_schulz
from zero2core.muon.route import Flight, Route
from zero2core.muon.sharding import MuonShardingOptimizer, _Own

# --- sums and means


class _RestLocal(WholeBuffer):
    def _sum(self, gradient: Tensor) -> Flight:
        self._local = gradient.clone()
        return super()._sum(gradient)

    def finish(self, *, late: bool) -> None:
        super().finish(late=late)
        if self.mine:
            length = -(-self.plan.numel // self.route.world)
            start, stop = self.route.rank * length, (self.route.rank + 1) * length
            gradient = self.allocated()
            gradient[:start] = self._local[:start]
            gradient[stop:] = self._local[stop:]


class RestOfMatrixStaysLocal(OtherBuffers):
    """Reduces a matrix to its owner in that rank's piece alone, as if it were cut into pieces."""

    whole_class = _RestLocal


class OrthogonalisesEachPart(MuonShardingOptimizer):
    """Orthogonalises each part's gradient where it comes in."""

    def _take(self, member: Member, gradient: Tensor) -> None:
        muon = self.inner.info[member.name].use_muon and gradient.numel()
        super()._take(member, newton_schulz(gradient) if muon else gradient)


class _Twice(Buffer):
    def finish(self, *, late: bool) -> None:
        super().finish(late=late)
        if self.average:
            self._divide()


class DividesTwice(OtherBuffers):
    """Divides by the number of ranks what the collective has averaged."""

    any_class = _Twice


class _Sums(FlatBuffer):
    def _sum(self, gradient: Tensor) -> Flight:
        return self.route.reduce_scatter(self._reduced(), gradient, average=False)


class SlicesAreNotAveraged(OtherBuffers):
    """Sums slices where the collective should average them, and does not divide either."""

    flat_class = _Sums


class AveragesOverTheWorld(MuonShardingOptimizer):
    """Divides by the number of all ranks, whatever the colour."""

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        buffers = super()._make_buffers(routes)
        for buffer in buffers:
            buffer.divisor, buffer.average = float(self.world), False
        return buffers


class IgnoresDivisor(MuonShardingOptimizer):
    """Divides by the size of the group, whatever divisor was given."""

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        buffers = super()._make_buffers(routes)
        for buffer in buffers:
            buffer.divisor, buffer.average = float(buffer.route.world), False
        return buffers


class _Weighted(Buffer):
    weight = 1.0

    def add(self, member: Member, gradient: Tensor) -> None:
        super().add(member, gradient.to(torch.float32) * self.weight)


class MeanOfMeans(OtherBuffers):
    """Takes the mean over each node's ranks (pairs, unless told otherwise), and the mean of these."""

    any_class = _Weighted

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        buffers = super()._make_buffers(routes)
        size = local_world_size(self.config) if self.config.two_hop else 2
        for buffer in buffers:
            nodes = [rank // size for rank in self._groups[buffer.plan.color][1]]
            own = nodes.count(self.rank // size)
            buffer.weight = len(nodes) / (len(set(nodes)) * own)  # type: ignore[attr-defined]
        return buffers


class _InsideOnly(Route):
    def reduce(self, tensor: Tensor, owner: int, *, average: bool) -> Flight:
        if self.world == 1 or self._grid is None:
            return super().reduce(tensor, owner, average=average)
        _, local = self._grid.place(self._ranks[owner])
        return Flight(lambda: collectives.reduce(tensor, dst=local, group=self._inside))


class ReducesInsideNodesOnly(TwoHops):
    """Leaves out the second hop of a reduction to an owner."""

    route_class = _InsideOnly


class _NarrowAcross(Route):
    def reduce(self, tensor: Tensor, owner: int, *, average: bool) -> Flight:
        if self._grid is None:
            return super().reduce(tensor, owner, average=average)
        node, local = self._grid.place(self._ranks[owner])

        def across() -> Work:
            tensor.copy_(tensor.to(torch.bfloat16))
            return collectives.reduce(tensor, dst=node, group=self._across)

        inside = partial(collectives.reduce, tensor, dst=local, group=self._inside)
        return Flight(inside, across if self._local == local else None)


class RoundsBetweenHops(OtherBuffers):
    """Sends the sum of a node to the owner's node in bf16."""

    route_class = _NarrowAcross


class PiecesInOrderOfRanks(TwoHops):
    """Takes the piece that has a rank's own number for what two hops leave there, which is another one."""

    def _make_routes(self) -> dict[Hashable, Route]:
        routes = super()._make_routes()
        for route in routes.values():
            route.piece = route.rank
        return routes


# --- gradients of one step


class _Touched(Buffer):
    def restart(self, *, release: bool) -> None:
        touched = [member.touched for member in self.members]
        super().restart(release=release)
        for member, before in zip(self.members, touched, strict=True):
            member.touched = before


class AddsToLastStepsGradient(OtherBuffers):
    """Begins a step with what the last one has left in the buffers."""

    any_class = _Touched


class _LaunchesAsItIs(Buffer):
    def launch(self) -> None:
        self.launched = True
        self._flight = self._sum(self.allocated())


class MissingKeepsLastGradient(OtherBuffers):
    """Does not zero what nothing was added to."""

    any_class = _LaunchesAsItIs


class KeepsClearedGradients(MuonShardingOptimizer):
    """Clears ``.grad`` alone, and not the fp32 sums that it was added to."""

    def clear_grad(self, set_to_zero: bool = False) -> None:
        kept = [member for member in self._members.values() if member.touched and not member.buffer.launched]
        super().clear_grad(set_to_zero)
        for member in kept:
            member.touched = True


class ReplacesWhatFiredBefore(MuonShardingOptimizer):
    """Takes one more firing than there are parts for the first of the next step."""

    def _arrived(self, member: Member) -> None:
        if member.fired >= self.config.accumulate_steps and not member.buffer.launched:
            member.touched = False
        super()._arrived(member)


class MainGradStays(MuonShardingOptimizer):
    """Adds ``main_grad`` to the step's gradients, and does not zero it: the next step adds it once more."""

    def _take_what_lies_there(self) -> None:
        mains = [
            (main, main.clone())
            for p in self.inner.named.values()
            if (main := getattr(p, "main_grad", None)) is not None
        ]
        super()._take_what_lies_there()
        for main, before in mains:
            main.copy_(before)

    def clear_grad(self, set_to_zero: bool = False) -> None:
        mains = [(p, main) for p in self.inner.named.values() if (main := getattr(p, "main_grad", None)) is not None]
        for param, _ in mains:
            param.main_grad = None  # type: ignore[attr-defined]
        super().clear_grad(set_to_zero)
        for param, main in mains:
            param.main_grad = main  # type: ignore[attr-defined]


class _LaunchedTwice(Buffer):
    def add(self, member: Member, gradient: Tensor) -> None:
        if not self.launched:
            super().add(member, gradient)
            return
        self._flight.wait()
        if isinstance(self, FlatBuffer):  # as where a piece is summed in its own place
            self.allocated()[self._begin :][: self._length] = self._reduced()
        self.launched = False
        super().add(member, gradient)
        self.launch()


class LaunchesTwice(OtherBuffers):
    """Launches a buffer again where something comes after its launch."""

    any_class = _LaunchedTwice


class _LosesLate(Buffer):
    def add(self, member: Member, gradient: Tensor) -> None:
        if not self.launched:
            super().add(member, gradient)


class LosesLateGradient(OtherBuffers):
    """Drops what comes after the launch."""

    any_class = _LosesLate


class _Unsent(WholeBuffer):
    overlaps = False

    def _sum(self, gradient: Tensor) -> Flight:
        if self.overlaps and not self.complete(explicit=False):
            return Flight()
        return super()._sum(gradient)


class ShortWindowStaysLocal(OtherBuffers):
    """With overlap reduces no matrices of which fewer gradients came than a step should have."""

    whole_class = _Unsent

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        buffers = super()._make_buffers(routes)
        for buffer in buffers:
            buffer.overlaps = self.config.comm_overlap  # type: ignore[attr-defined]
        return buffers


# --- ranks that part ways


class _SkipsEmpty(Buffer):
    def _sum(self, gradient: Tensor) -> Flight:
        if any(member.touched for member in self.members):
            return super()._sum(gradient)  # type: ignore[safe-super]
        return Flight()


class SkipsBufferWithoutGradient(OtherBuffers):
    """A rank that has no gradient for any parameter of a buffer goes on to the next one."""

    any_class = _SkipsEmpty


class WalksBackwardOnOneRank(MuonShardingOptimizer):
    """The last rank walks its buffers from the last to the first."""

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        buffers = super()._make_buffers(routes)
        return buffers[::-1] if self.rank == self.world - 1 else buffers


# --- norm and clip


class DropsWhatIsNotClipped(MuonShardingOptimizer):
    """Goes on with the parameters that are clipped, and with no others."""

    def _clip(self) -> None:
        super()._clip()
        if self.inner.grad_clip is not None:
            self._missing |= {name for name, info in self.inner.info.items() if not info.need_clip}


class ClipsWhatIsExcluded(MuonShardingOptimizer):
    """Counts and scales all parameters, also those that are excluded from clipping."""

    def _clip(self) -> None:
        info = dict(self.inner.info)
        self.inner.info.update({name: replace(record, need_clip=True) for name, record in info.items()})
        super()._clip()
        self.inner.info.update(info)


class _LeavesGarbage(WholeBuffer):
    def finish(self, *, late: bool) -> None:
        Buffer.finish(self, late=late)


class CountsGarbageInNorm(OtherBuffers):
    """Counts the gradients of all matrices on every rank, after they were reduced to their owners."""

    whole_class = _LeavesGarbage

    def _clip(self) -> None:
        own = self._own
        others = [
            _Own(buffer, member, 0, member.slot.stop - member.slot.start, {})
            for buffer in self._buffers
            if isinstance(buffer, WholeBuffer) and not buffer.mine
            for member in buffer.members
        ]
        self._own = [*own, *others]
        super()._clip()
        self._own = own


class _OnesBehind(FlatBuffer):
    def _sum(self, gradient: Tensor) -> Flight:
        gradient[self.members[-1].slot.stop :] = 1.0
        return super()._sum(gradient)


class CountsPaddingInNorm(OtherBuffers):
    """Padding behind the last slice is not zero, and is counted with it."""

    flat_class = _OnesBehind

    def _own_sq_norm(self, one: _Own) -> Tensor:
        total = super()._own_sq_norm(one)
        if isinstance(one.buffer, FlatBuffer) and one.member is one.buffer.members[-1]:
            behind = one.buffer._reduced()[one.buffer._at(one.member, one.stop) :]
            total += behind.double().square().sum()
        return total


class NormOfOneSet(MuonShardingOptimizer):
    """Counts whole matrices alone."""

    def _own_sq_norm(self, one: _Own) -> Tensor:
        total = super()._own_sq_norm(one)
        return total.zero_() if isinstance(one.buffer, FlatBuffer) else total


class NormOverOneColour(MuonShardingOptimizer):
    """Sums the joint norm over the group of the last colour that a rank has parameters of."""

    def _clip(self) -> None:
        group = self.group
        colors = [buffer.plan.color for buffer in self._buffers]
        self.group = self._groups[colors[-1]][0] if colors else group
        super()._clip()
        self.group = group


class AdaptsToNormsOfSlices(MuonShardingOptimizer):
    """Takes the norm of a rank's own slice for that of the parameter."""

    def _sq_norms(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**super()._sq_norms(own), **own}


# --- skipped steps and missing gradients


class _MovesNoMomentum(ByHand):
    def _direction(self, momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()


class MomentumMovesBeforeStep(MuonShardingOptimizer):
    """Moves momentum where gradients are reduced."""

    inner_class = _MovesNoMomentum

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for one in self._own:
            if "momentum" in one.state and one.gradient is not None and one.name not in self._missing:
                one.state["momentum"].lerp_(one.gradient, 1 - self.param_groups[0]["momentum"])


class DecaysMissingMatrices(MuonShardingOptimizer):
    """Skips slices without a gradient whole, and of matrices all but the decay."""

    def _clip(self) -> None:
        super()._clip()
        group = self.param_groups[0]
        for one in self._own:
            if one.name in self._missing and "momentum" in one.state:
                info = self.inner.info[one.name]
                decay = group["weight_decay"] if info.weight_decay is None else info.weight_decay
                one.master.mul_(1 - group["lr"] * info.lr_scale * decay)


class DecidesMissingByItself(MuonShardingOptimizer):
    """Skips what has no gradient on this rank, whatever the others have."""

    def _told(self) -> list[bool]:
        late = super()._told()
        if self.config.skip_missing:
            self._missing = frozenset(name for name, member in self._members.items() if not member.touched)
        return late
