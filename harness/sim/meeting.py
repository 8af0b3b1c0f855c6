"""Where the ranks of a group meet: collectives in the order of their calls, and messages from one rank to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from harness.sim import collectives
from harness.sim.buffers import Buffers, Unseen
from harness.sim.choices import SumOrder, Timing
from harness.sim.collectives import Request
from harness.sim.scheduler import Scheduler


class Meeting:
    """One collective: what each rank has called so far, and the results once it has happened. A Wait.

    Attributes:
        late: See :class:`harness.sim.scheduler.Wait`.
        happened: The results are there.
        results: By rank of the group, for each of its outputs.
    """

    def __init__(self, channel: Channel, number: int, timing: Timing) -> None:
        self.happened = False
        self.results: collectives.Results = []
        self._channel = channel
        self._number = number
        self._timing = timing
        self._requests: list[Request | None] = [None] * len(channel.ranks)
        self._copies: list[list[Tensor]] = [[] for _ in channel.ranks]
        self._num_called = 0
        self._waiting: list[int] = []

    @property
    def late(self) -> bool:
        """It is held back as long as another rank can run."""
        return self._timing is Timing.LATE

    def call(self, index: int, request: Request, buffers: Buffers | None) -> None:
        """The rank of the group with this index calls it."""
        self._requests[index] = request
        self._copies[index] = buffers.inputs if buffers is not None else request.inputs
        self._num_called += 1
        if self._num_called < len(self._requests):
            return
        problem = collectives.disagreement(self._requests, self._channel.ranks)
        if problem is not None:
            self._channel.scheduler.halt("mismatch", f"{problem[0]}, {self._ordinal()}", problem[1])
        elif self._timing is Timing.AT_ONCE or (self._waiting and not self.late):
            self._take_place()

    def wait(self, rank: int) -> None:
        """The rank, by its number in the world, waits for the results."""
        if self.happened:
            return
        self._waiting.append(rank)
        if self._num_called == len(self._requests) and not self.late and self._channel.scheduler.stop is None:
            self._take_place()
            return
        self._channel.scheduler.wait(self, lambda: self.happened)

    def take(self, index: int) -> list[Tensor | None]:
        """The results of the rank of this index; once."""
        results, self.results[index] = self.results[index], []
        return results

    def happen(self) -> None:
        """Nobody else can run."""
        if not self.happened and self._num_called == len(self._requests):
            self._take_place()

    def describe(self, rank: int) -> str:
        """What the rank waits in, and for whom."""
        request = self._requests[self._channel.ranks.index(rank)]
        text = "a collective" if request is None else request.text()
        missing = self.missing()
        for_whom = f" for {_ranks(missing)}" if missing else ""
        return f"in {text} ({self._ordinal()}){for_whom}"

    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        return tuple(rank for rank, request in zip(self._channel.ranks, self._requests, strict=True) if request is None)

    def _ordinal(self) -> str:
        if self._number < 0:
            return self._channel.title
        return f"collective {self._number + 1} on {self._channel.title}"

    def _take_place(self) -> None:
        requests = [request for request in self._requests if request is not None]
        with Unseen():
            self.results = collectives.perform(
                requests,
                [[tensor.data for tensor in own] for own in self._copies],
                self._channel.order,
                self._channel.seed,
            )
        self.happened = True
        # Of a work that somebody keeps, no more than of a real one stays in memory.
        self._copies, self._requests = [], []
        self._channel.forget(self._number)
        for rank in self._waiting:
            self._channel.scheduler.wake(rank)


class Message:
    """One end of a message from rank to rank: done when the other end has come. A Wait."""

    late = False

    def __init__(self, channel: Channel, tensor: Tensor, peer: int | None, tag: int, *, sends: bool) -> None:
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.sends = sends
        self.done = False
        self.received: Tensor | None = None
        self._channel = channel
        self._waiting: int | None = None

    def wait(self, rank: int) -> None:
        """The rank, by its number in the world, waits for the other end."""
        self._waiting = rank
        self._channel.scheduler.wait(self, lambda: self.done)

    def match(self, peer: int) -> None:
        """The other end, of this rank of the group, has come."""
        self.peer, self.done = peer, True
        if self._waiting is not None:
            self._channel.scheduler.wake(self._waiting)

    def happen(self) -> None:
        """A message is never held back."""

    def text(self) -> str:
        """``send fp32[4]``."""
        name = "send" if self.sends else "recv"
        return f"{name} {collectives.dtype_name(self.tensor.dtype)}[{self.tensor.numel()}]"

    def describe(self, rank: int | None = None) -> str:
        """To or from whom; of a rank that waits for it, in what."""
        whom = "any rank" if self.peer is None else f"rank {self._channel.ranks[self.peer]}"
        tag = f", tag {self.tag}" if self.tag else ""
        text = f"{self.text()} {'to' if self.sends else 'from'} {whom}{tag} on {self._channel.title}"
        return text if rank is None else f"in {text}"

    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        return () if self.peer is None else (self._channel.ranks[self.peer],)


@dataclass(eq=False)
class Channel:
    """What the ranks of one group share.

    Attributes:
        name: Of the group, the same on all ranks.
        ranks: Global, in the order of the group.
        order, seed: Of sums.
    """

    scheduler: Scheduler
    name: str
    ranks: tuple[int, ...]
    order: SumOrder
    seed: int
    timings: Sequence[Timing]
    _open: dict[int, Meeting] = field(default_factory=dict)
    _num_calls: dict[int, int] = field(default_factory=dict)
    _messages: dict[int, deque[Message]] = field(default_factory=dict)

    def begin(self, scheduler: Scheduler, seed: int) -> None:
        """A run begins: nothing is under way."""
        self.scheduler, self.seed = scheduler, seed
        self._open, self._num_calls, self._messages = {}, {}, {}

    @property
    def is_default(self) -> bool:
        """Whether it is the world's default group."""
        return self.name == DEFAULT_NAME

    @property
    def title(self) -> str:
        """``the default group``, or with its ranks."""
        if self.is_default:
            return "the default group"
        return f"group {self.name[:12]} of {_ranks(self.ranks)}"

    def call(self, index: int, request: Request, buffers: Buffers | None) -> Meeting:
        """The rank of this index makes its next call; the making of the group is none that counts."""
        number = -1 if request.kind == "new_group" else self._num_calls.get(index, 0)
        self._num_calls[index] = number + 1
        meeting = self._open.get(number)
        if meeting is None:
            timing = self.timings[0] if len(self.timings) == 1 else self.scheduler.random.choice(self.timings)
            meeting = self._open[number] = Meeting(self, number, timing)
        meeting.call(index, request, buffers)
        return meeting

    def ordinal(self, index: int) -> int:
        """The number, from 1, of the next collective of this rank on this group."""
        return self._num_calls.get(index, 0) + 1

    def forget(self, number: int) -> None:
        """This collective has happened; whoever waits for it holds it."""
        self._open.pop(number, None)

    def message(self, index: int, end: Message) -> None:
        """One end of a message, of the rank of this index; matched with the oldest fitting other end, if there is."""
        for other_index, queue in self._messages.items():
            other = next((each for each in queue if _fit(index, end, other_index, each)), None)
            if other is not None:
                self._check(index, end, other_index, other)
                queue.remove(other)
                sender, receiver = (end, other) if end.sends else (other, end)
                receiver.received = sender.tensor.data.clone()
                end.match(other_index)
                other.match(index)
                return
        self._messages.setdefault(index, deque()).append(end)

    def _check(self, index: int, end: Message, other_index: int, other: Message) -> None:
        if (end.tensor.dtype, end.tensor.numel()) != (other.tensor.dtype, other.tensor.numel()):
            one, two = self.ranks[index], self.ranks[other_index]
            self.scheduler.halt(
                "mismatch", f"rank {one} calls {end.text()}, rank {two} {other.text()}, on {self.title}", ()
            )


DEFAULT_NAME = "0"


def _fit(index: int, end: Message, other_index: int, other: Message) -> bool:
    return (
        end.sends != other.sends
        and end.tag == other.tag
        and end.peer in (None, other_index)
        and other.peer in (None, index)
    )


def _ranks(members: Sequence[int]) -> str:
    return f"{'rank' if len(members) == 1 else 'ranks'} {', '.join(map(str, members))}"
