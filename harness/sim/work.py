"""What ``torch.distributed`` is handed to wait for, and how results get where they belong."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from harness.sim.buffers import Buffers, deliver, settle
from harness.sim.collectives import Request
from harness.sim.meeting import Channel, Meeting, Message

_Work: Any = Work  # as torch declares it, its methods take and return less than these
_Timeout = datetime.timedelta | None


class Pending(Protocol):
    """The buffers of the asynchronous collectives of the rank whose turn it is, until they are waited for."""

    def launch(
        self,
        what: Callable[[], str],
        inputs: list[Tensor],
        outputs: list[Tensor],
        *,
        asynchronous: bool,
        in_place: bool,
    ) -> Buffers | None:
        """A collective begins to use these; what to hand back when it is waited for, None where that is at once."""

    def wait(self, buffers: Buffers) -> None:
        """It was waited for, and its results are about to be written."""


class End(Protocol):
    """One rank's end of a group.

    Attributes:
        channel: What the ranks of the group share.
        pending: The buffers of asynchronous collectives.
        index: Of the rank in the group.
    """

    channel: Channel
    pending: Pending
    index: int


class SimWork(_Work):  # type: ignore[misc]
    """What a rank waits for."""

    def __init__(self, end: End, meeting: Meeting, request: Request, buffers: Buffers | None) -> None:
        super().__init__()
        self._end = end
        self._meeting = meeting
        self._request = request
        self._buffers = buffers
        self._delivered = False

    def wait(self, timeout: _Timeout = None) -> bool:
        """Until all ranks have called it; then the results are in the outputs."""
        if not self._delivered:
            rank = self._end.channel.scheduler.check_thread("wait()")
            self._meeting.wait(rank)
            self._deliver()
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return at once; lets the other ranks run first."""
        if not self._delivered:
            scheduler = self._end.channel.scheduler
            scheduler.check_thread("is_completed()")
            scheduler.give_way(self._meeting)
            if not self._meeting.happened and not self._meeting.missing():
                self._meeting.happen()
            if self._meeting.happened:
                self._deliver()
        return self._delivered

    def is_success(self) -> bool:
        """As of a collective that has completed."""
        return self.is_completed()

    def synchronize(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def exception(self) -> None:
        """There is none: a world that cannot go on stops."""

    def result(self) -> list[Tensor]:
        """The outputs, complete."""
        self.wait()
        return self._request.outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs, complete: whoever asks for it waits (C++ would wait for it without a turn)."""
        self.wait()
        outputs = self._request.outputs
        if self._request.kind == "all_gather" and len(outputs) == 1:
            outputs = pieces(outputs[0], len(self._end.channel.ranks))  # as gloo has it
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(outputs)
        return future

    def _deliver(self) -> None:
        self._delivered = True
        index = self._end.index
        if self._buffers is not None:
            self._end.pending.wait(self._buffers)
            self._buffers = None
        settle(self._request.outputs)  # the results were worked out by the rank that came last
        for output, result in zip(self._request.outputs, self._meeting.take(index), strict=True):
            put(output, result)
        settle(self._request.outputs)


class Sent(_Work):  # type: ignore[misc]
    """One end of a message."""

    def __init__(self, end: End, message: Message, buffers: Buffers | None) -> None:
        super().__init__()
        self._end = end
        self._message = message
        self._buffers = buffers
        self._delivered = False

    def wait(self, timeout: _Timeout = None) -> bool:
        """Until the other end has come."""
        if not self._delivered:
            self._message.wait(self._end.channel.scheduler.check_thread("wait()"))
            self._deliver()
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return at once; lets the other ranks run first."""
        if not self._delivered:
            self._end.channel.scheduler.check_thread("is_completed()")
            self._end.channel.scheduler.give_way(self._message)
            if self._message.done:
                self._deliver()
        return self._delivered

    def _source_rank(self) -> int:
        return -1 if self._message.peer is None else self._message.peer

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensor, complete."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._message.tensor])
        return future

    def _deliver(self) -> None:
        self._delivered = True
        if self._buffers is not None:
            self._end.pending.wait(self._buffers)
            self._buffers = None
        if not self._message.sends:
            put(self._message.tensor, self._message.received)
            settle([self._message.tensor])


def put(output: Tensor, result: Tensor | None) -> None:
    """Write a result where it belongs; nan, where it means nothing."""
    if result is not None:
        deliver(result, output)
    elif output.is_floating_point():
        deliver(torch.full((), float("nan"), dtype=output.dtype, device=output.device).expand(output.numel()), output)


def pieces(output: Tensor, size: int) -> list[Tensor]:
    """One for each rank, as far as its rows can be divided."""
    return list(output.data.chunk(size)) if output.dim() and output.shape[0] % size == 0 else [output.data]
