"""Fused buffers of one rank: where compute weights live, and where gradients are summed and communicated in fp32.

[Note: what a gradient buffer holds]
A part's gradient is added to its slot; the first one of a step overwrites it, so nothing has to be cleared. When the
buffer is launched, slots that nothing was added to, and padding, become zeros. What arrives after that (a hook
fires more often than in any step before) goes to a tensor beside the buffer, is reduced by itself, and added to the sum
before that is divided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zero2core.muon.plan import BufferPlan, Slot
from zero2core.muon.route import Flight, Route

__all__ = ["Buffer", "FlatBuffer", "Member", "WholeBuffer"]


class Member:
    """One parameter in its buffer, and how far its gradient of this step is.

    Attributes:
        touched: the slot holds a gradient of this step.
        fired: how often its hook fired in parts whose gradients count as a step's last.
        expected, expected_last: after how many of these its gradient is complete: of all parts, and of those after the
            last ``no_sync()``. Learned: the most that were seen in one step.
    """

    def __init__(self, name: str, param: nn.Parameter, slot: Slot, buffer: Buffer, *, parts: int) -> None:
        self.name = name
        self.param = param
        self.slot = slot
        self.buffer = buffer
        self.touched = False
        self.fired = 0
        self.expected = parts
        self.expected_last = 1

    def of(self, fused: Tensor) -> Tensor:
        """Its part of a fused tensor, in its shape."""
        return fused[self.slot.start : self.slot.stop].view(self.slot.shape)


class Buffer(ABC):
    """One fused buffer. Parameters are pointed into ``weights`` once, at construction.

    Attributes:
        weights: compute weights, ``[numel]``; padding is zero.
        gradient: fp32 ``[numel]``; None: freed.
        late: what arrived after the launch, fp32 ``[numel]``; None: nothing did.
        launched: its collective is under way, or done.
        reduced: it is done, and own gradients are what :meth:`own_gradient` says.
    """

    def __init__(
        self,
        plan: BufferPlan,
        route: Route,
        params: Sequence[nn.Parameter],
        *,
        divisor: float,
        average: bool,
        parts: int,
    ) -> None:
        self.plan = plan
        self.route = route
        self.divisor = divisor
        self.average = average and route.direct and divisor == route.world
        device = params[0].device
        self.weights = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
        self.gradient: Tensor | None = None
        self.late: Tensor | None = None
        self.launched = False
        self.reduced = False
        self._flight = Flight()
        self.members = [
            Member(slot.name, param, slot, self, parts=parts) for slot, param in zip(plan.slots, params, strict=True)
        ]
        for member in self.members:
            place = member.of(self.weights)
            place.copy_(member.param.detach())
            member.param.data = place
        self._prepare()

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.weights.device

    def allocated(self) -> Tensor:
        """The gradient buffer, allocated where it is not there."""
        if self.gradient is None:
            self.gradient = torch.zeros(self.plan.numel, dtype=torch.float32, device=self.device)
        return self.gradient

    def add(self, member: Member, gradient: Tensor) -> None:
        """Add a part's gradient of one parameter, in fp32."""
        if self.launched:
            if self.late is None:
                self.late = torch.zeros(self.plan.numel, dtype=torch.float32, device=self.device)
            member.of(self.late).add_(gradient.to(torch.float32))
            return
        into = member.of(self.allocated())
        if member.touched:
            # Converted first: added as it is, an fp64 gradient would be added in fp64.
            into.add_(gradient.to(torch.float32))
        else:
            into.copy_(gradient)
            member.touched = True

    def complete(self, *, explicit: bool) -> bool:
        """Whether the last gradient of this step is in, as far as a rank can tell while the backward runs."""
        return all(member.fired >= (member.expected_last if explicit else member.expected) for member in self.members)

    def launch(self) -> None:
        """Start summing over ranks."""
        gradient = self.allocated()
        at = 0
        for member in self.members:
            gradient[at : member.slot.start].zero_()
            if not member.touched:
                member.of(gradient).zero_()
            at = member.slot.stop
        gradient[at:].zero_()
        self.launched = True
        self._flight = self._sum(gradient)

    def finish(self, *, late: bool) -> None:
        """Wait for the sum, add what came late on any rank (``late``, alike on all ranks), divide once."""
        self._flight.wait()
        if late:
            extra = self.late
            if extra is None:
                extra = torch.zeros(self.plan.numel, dtype=torch.float32, device=self.device)
            self._add_late(extra)
        self.late = None
        if not self.average:
            self._divide()
        self.reduced = True

    def send(self) -> None:
        """Round this rank's masters into the compute weights, and start giving them to all ranks."""
        self._flight = self._spread()

    def arrive(self) -> None:
        """Wait for what :meth:`send` started."""
        self._flight.wait()

    def restart(self, *, release: bool) -> None:
        """Forget the gradients, after their collective is over; ``release``: free their storage."""
        self.launched = self.reduced = False
        self.late = None
        for member in self.members:
            member.touched = False
            member.fired = 0
        if release:
            self.gradient = None

    @abstractmethod
    def _prepare(self) -> None:
        """What else one of its kind has."""

    @abstractmethod
    def _sum(self, gradient: Tensor) -> Flight: ...

    @abstractmethod
    def _add_late(self, extra: Tensor) -> None: ...

    @abstractmethod
    def _divide(self) -> None: ...

    @abstractmethod
    def _spread(self) -> Flight: ...

    @abstractmethod
    def own(self) -> Iterator[tuple[Member, int, int]]:
        """What this rank owns of each of its parameters: a flat range of it, not empty."""

    @abstractmethod
    def own_weight(self, member: Member, start: int, stop: int) -> Tensor:
        """The compute weight of an own range: whole in its shape, or a flat slice."""

    @abstractmethod
    def own_gradient(self, member: Member, start: int, stop: int) -> Tensor | None:
        """The reduced gradient of an own range, in the shape of :meth:`own_weight`; None: there is none."""

    @abstractmethod
    def bind(self, member: Member, master: Tensor) -> None:
        """The fp32 master of an own range, which :meth:`send` rounds."""


class WholeBuffer(Buffer):
    """Whole matrices of one owner: reduced to it, broadcast from it."""

    def _prepare(self) -> None:
        if self.plan.owner is None:
            raise ValueError("a buffer of whole matrices has an owner")
        self.owner = self.plan.owner
        self._masters: list[tuple[Member, Tensor]] = []

    @property
    def mine(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.route.rank

    def _sum(self, gradient: Tensor) -> Flight:
        return self.route.reduce(gradient, self.owner, average=self.average)

    def _add_late(self, extra: Tensor) -> None:
        self.route.reduce(extra, self.owner, average=self.average).wait()
        if self.mine:
            self.allocated().add_(extra)

    def _divide(self) -> None:
        if self.mine and self.divisor != 1:
            self.allocated().div_(self.divisor)

    def finish(self, *, late: bool) -> None:
        """See :class:`Buffer`."""
        super().finish(late=late)
        if not self.mine:
            # What a reduction leaves on the other ranks is defined nowhere: whoever reads it is to notice.
            self.allocated().fill_(torch.nan)

    def _spread(self) -> Flight:
        for member, master in self._masters:
            place = member.of(self.weights)
            if place.data_ptr() != master.data_ptr():
                place.copy_(master)
        return self.route.broadcast(self.weights, self.owner)

    def own(self) -> Iterator[tuple[Member, int, int]]:
        """See :class:`Buffer`."""
        for member in self.members if self.mine else ():
            yield member, 0, member.slot.stop - member.slot.start

    def own_weight(self, member: Member, start: int, stop: int) -> Tensor:
        """See :class:`Buffer`."""
        return member.of(self.weights)

    def own_gradient(self, member: Member, start: int, stop: int) -> Tensor | None:
        """See :class:`Buffer`."""
        return member.of(self.allocated()) if self.reduced else None

    def bind(self, member: Member, master: Tensor) -> None:
        """See :class:`Buffer`."""
        self._masters.append((member, master))


class FlatBuffer(Buffer):
    """Element-wise parameters end to end, cut into equal pieces whatever they are: reduce-scatter, all-gather."""

    def _prepare(self) -> None:
        self._length = self.plan.numel // self.route.world
        self._begin = self.route.piece * self._length
        self._piece: Tensor | None = None  # the reduced gradient, fp32 [length]
        self._sent = torch.zeros(self._length, dtype=self.plan.dtype, device=self.device)  # a piece on its way
        self._reduced_half: Tensor | None = None  # between two hops
        self._sent_half = self.route.between(self._sent)
        self._masters: list[tuple[int, Tensor]] = []

    def _reduced(self) -> Tensor:
        if self._piece is None:
            self._piece = torch.empty(self._length, dtype=torch.float32, device=self.device)
            self._reduced_half = self.route.between(self._piece)
        return self._piece

    def _sum(self, gradient: Tensor) -> Flight:
        piece = self._reduced()
        return self.route.reduce_scatter(piece, gradient, average=self.average, block=self._reduced_half)

    def _add_late(self, extra: Tensor) -> None:
        piece = torch.empty_like(self._reduced())
        self.route.reduce_scatter(piece, extra, average=self.average).wait()
        self._reduced().add_(piece)

    def _divide(self) -> None:
        if self.divisor != 1:
            self._reduced().div_(self.divisor)

    def restart(self, *, release: bool) -> None:
        """See :class:`Buffer`."""
        super().restart(release=release)
        if release:
            self._piece = self._reduced_half = None

    def _spread(self) -> Flight:
        for at, master in self._masters:
            self._sent[at : at + master.numel()].copy_(master)
        return self.route.all_gather(self.weights, self._sent, block=self._sent_half)

    def own(self) -> Iterator[tuple[Member, int, int]]:
        """See :class:`Buffer`."""
        stop = self._begin + self._length
        for member in self.members:
            first, last = max(member.slot.start, self._begin), min(member.slot.stop, stop)
            if first < last:
                yield member, first - member.slot.start, last - member.slot.start

    def _at(self, member: Member, start: int) -> int:
        """Where an own range begins in this rank's piece."""
        return member.slot.start + start - self._begin

    def own_weight(self, member: Member, start: int, stop: int) -> Tensor:
        """See :class:`Buffer`."""
        at = member.slot.start + start
        return self.weights[at : at + stop - start]

    def own_gradient(self, member: Member, start: int, stop: int) -> Tensor | None:
        """See :class:`Buffer`."""
        if not self.reduced or self._piece is None:
            return None
        at = self._at(member, start)
        return self._piece[at : at + stop - start]

    def bind(self, member: Member, master: Tensor) -> None:
        """See :class:`Buffer`."""
        offset = next(start for own, start, _ in self.own() if own is member)
        self._masters.append((self._at(member, offset), master))
