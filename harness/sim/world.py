"""A world of ranks in one process, deterministic: the same seed gives the same interleaving and the same bits.

Each rank is a thread, and one runs at a time. Code that calls ``torch.distributed`` runs unchanged: ``get_rank()``, the
default group and sub-groups are the rank's own, and ``get_backend()`` answers ``"gloo"``. Three things that a real
backend leaves to chance are choices here: the order of every sum, which rank runs next, and when an asynchronous
collective really happens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from harness.sim import binding, refusal
from harness.sim.buffers import Buffers, settle
from harness.sim.choices import Schedule, SumOrder, Timing
from harness.sim.collectives import Request
from harness.sim.group import SimGroup
from harness.sim.meeting import DEFAULT_NAME, Channel
from harness.sim.memory import Extents
from harness.sim.scheduler import MAX_WORLD, RankStopped, Scheduler, Stop, Turns
from harness.sim.store import SimStore

T = TypeVar("T")


class Watcher:
    """Is told what happens in a world, in the thread of the rank it happens to; to be derived from."""

    def enter(self, rank: int) -> None:
        """It is this rank's turn."""

    def leave(self, rank: int) -> None:
        """It is not any more, for now or for good."""

    def stopped(self, rank: int) -> None:
        """The world has stopped, and this rank is about to unwind."""

    def launched(self, rank: int, buffers: Buffers) -> None:
        """An asynchronous collective uses these buffers until it is waited for."""

    def waited(self, rank: int, buffers: Buffers) -> None:
        """It is waited for."""

    def raced(self, rank: int, text: str) -> None:
        """A buffer was used before its collective was waited for: what the rank did, without a subject."""


class WorldError(Exception):
    """Not every rank came to its end."""


@dataclass(frozen=True)
class RankEnded:
    """How one rank ended.

    Attributes:
        value: What its function returned.
        error: What it raised; None if it returned, or was stopped.
        detail: The traceback of that.
        stopped: It was still running when the world stopped, and was unwound.
    """

    value: Any = None
    error: BaseException | None = None
    detail: str = ""
    stopped: bool = False


@dataclass(frozen=True)
class WorldOutcome:
    """What became of a run.

    Attributes:
        ranks: In order.
        stop: Why the world stopped before all had ended; None if it did not.
        trace: Digest of the order of turns.
        num_turns: How often it was another rank's turn.
        races: What ranks did to buffers of collectives that were not waited for: rank and text.
        left_behind: A rank that was told to unwind did not; its thread is still in this process.
        refusals: What a rank asked for that a simulated world cannot do, whatever it made of the answer.
    """

    ranks: tuple[RankEnded, ...]
    stop: Stop | None
    trace: str
    num_turns: int
    races: tuple[tuple[int, str], ...]
    left_behind: bool = False
    refusals: tuple[str, ...] = ()

    def values(self) -> list[Any]:
        """What each rank's function returned, in order.

        Raises:
            WorldError: A rank raised, or the world stopped or had to refuse something, or a buffer was used too early.
        """
        for rank, ended in enumerate(self.ranks):
            if ended.error is not None:
                raise WorldError(f"rank {rank} raised {ended.error!r}\n{ended.detail}") from ended.error
        if self.stop is not None:
            places = [f"rank {rank} {place}" for rank, place in self.stop.places().items()]
            raise WorldError("\n  ".join([self.stop.message, *places]))
        if self.refusals:
            raise WorldError("; ".join(self.refusals))
        if self.races:
            raise WorldError("; ".join(f"rank {rank} {text}" for rank, text in self.races))
        return [ended.value for ended in self.ranks]


class SimWorld:
    """A world of ranks in this process; :meth:`run` may be called again and again.

    What ranks have made of ``torch.distributed``, groups for example, outlasts a run, as in processes that live on.

    Args:
        world_size: Ranks, 1 to 256.
        seed: Of everything that is chosen at random.
        order: In which order sums are added.
        schedule: Which rank runs next, and when asynchronous collectives happen.
        watcher: Told what happens.

    Raises:
        ValueError: The size is out of range.
    """

    def __init__(
        self,
        world_size: int,
        seed: int = 0,
        order: SumOrder = SumOrder.RING,
        schedule: Schedule = Schedule.RANDOM,
        *,
        watcher: Watcher | None = None,
    ) -> None:
        if not 1 <= world_size <= MAX_WORLD:
            raise ValueError(f"world_size={world_size}: expected 1 to {MAX_WORLD}")
        self.world_size = world_size
        self.seed = seed
        self.order = SumOrder(order)
        self.schedule = Schedule(schedule)
        self.watcher = watcher or Watcher()
        self.states = [binding.TorchState() for _ in range(world_size)]
        self.channels: dict[str, Channel] = {}
        self.store = SimStore()
        self._run: _Run | None = None

    def run(self, function: Callable[[int], Any], *, seed: int | None = None) -> WorldOutcome:
        """Run ``function(rank)`` on every rank, with the default group in place; returns when all have ended.

        Whatever the ranks do is an outcome, not an exception, except a rank that never comes back: whoever cannot rule
        that out runs this in a process that can be killed. ``seed``: of this run, in place of the world's.

        Raises:
            RuntimeError: A world runs in this process already, or it has a default group of its own.
        """
        self._run = _Run(self, self.seed if seed is None else seed)
        try:
            return self._run.run(function)
        finally:
            self._run = None

    @property
    def num_groups(self) -> int:
        """Of the rank that has most, the default group among them."""
        return max(len(state.pg_map) for state in self.states)

    def was_stopped(self, rank: int) -> bool:
        """Whether this rank of the present run was told to unwind."""
        return self._run is not None and self._run.scheduler.was_stopped(rank)

    def on_calling_thread(self, function: Callable[[], T]) -> T:
        """In a rank's thread: have this called in the thread that called :meth:`run`; outside a run, in this one."""
        return function() if self._run is None else self._run.scheduler.on_calling_thread(function)

    def raise_foreign(self, rank: int) -> None:
        """In a rank's thread: see :meth:`harness.sim.scheduler.Scheduler.raise_foreign`."""
        if self._run is not None:
            self._run.scheduler.raise_foreign(rank)

    def step_aside(self) -> None:
        """In a rank's thread: let the others run as far as they can."""
        if self._run is not None:
            self._run.scheduler.step_aside()


class _Run:
    """One run: who is told of turns and buffers, and who makes groups."""

    def __init__(self, world: SimWorld, seed: int) -> None:
        self._world = world
        self._watcher = world.watcher
        self._seed = seed
        turns: Turns = self
        self.scheduler = Scheduler(world.world_size, seed, world.schedule, turns)
        self._ended: list[RankEnded | None] = [None] * world.world_size
        self._races: list[tuple[int, str]] = []
        self._pending: list[list[Buffers]] = [[] for _ in range(world.world_size)]

    def run(self, function: Callable[[int], Any]) -> WorldOutcome:
        binding.enter(self._make_group)
        refusal.begin()
        try:
            self._world.store.begin(self.scheduler)
            for channel in self._world.channels.values():
                channel.begin(self.scheduler, self._seed)
            self.scheduler.run(lambda rank: self._live(rank, function))
        finally:
            binding.leave()
        ranks = tuple(ended or RankEnded(stopped=True) for ended in self._ended)
        return WorldOutcome(
            ranks,
            self.scheduler.stop,
            self.scheduler.trace,
            self.scheduler.num_turns,
            tuple(self._races),
            self.scheduler.left_behind,
            refusal.said(),
        )

    def _live(self, rank: int, function: Callable[[int], Any]) -> None:
        try:
            with binding.one_thread_of_autograd():
                self._join(rank)
                self._ended[rank] = RankEnded(function(rank))
        except RankStopped:
            self._ended[rank] = RankEnded(stopped=True)
        except BaseException as error:  # noqa: BLE001 (an outcome)
            self._ended[rank] = RankEnded(error=error, detail=traceback.format_exc())
        finally:
            if self.scheduler.was_stopped(rank):
                self._ended[rank] = RankEnded(stopped=True)
            binding.forget_groups()

    def _join(self, rank: int) -> None:
        """Have the default group, and what groups there are from earlier runs, in the rank's thread."""
        state = self._world.states[rank]
        known = state.known(rank)
        for group in known:
            group.pending = self
        if not known:
            everyone = tuple(range(self._world.world_size))
            default = SimGroup(self._channel(DEFAULT_NAME, everyone), rank, self._world.store, self)
            state.default(default, self._world.store, rank)

    # Turns

    def enter(self, rank: int) -> None:
        binding.use(self._world.states[rank])
        self._watcher.enter(rank)

    def leave(self, rank: int) -> None:
        self._watcher.leave(rank)
        binding.use(None)

    def stopped(self, rank: int) -> None:
        self._watcher.stopped(rank)

    # Buffers

    def launch(
        self,
        what: Callable[[], str],
        inputs: list[Tensor],
        outputs: list[Tensor],
        *,
        asynchronous: bool,
        in_place: bool,
    ) -> Buffers | None:
        rank = self._current()
        settle([*inputs, *outputs])
        extents = Extents([*inputs, *outputs]) if self._pending[rank] else None
        for other in self._pending[rank]:
            if (clash := other.clash(what, inputs, outputs, extents)) is not None:
                self._raced(rank, clash)
        if not asynchronous or not (inputs or outputs):
            return None
        buffers = Buffers(what, inputs, outputs, in_place=in_place)
        self._pending[rank].append(buffers)
        self._watcher.launched(rank, buffers)
        return buffers

    def wait(self, buffers: Buffers) -> None:
        rank = self._current()
        self._pending[rank].remove(buffers)
        self._watcher.waited(rank, buffers)
        if (problem := buffers.problem()) is not None:
            self._raced(rank, problem)
        buffers.release()

    def _raced(self, rank: int, text: str) -> None:
        self._races.append((rank, text))
        self._watcher.raced(rank, text)

    def _current(self) -> int:
        if self.scheduler.current is None:
            raise RuntimeError("no rank runs")
        return self.scheduler.current

    # Groups

    def _channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        channel = self._world.channels.get(name)
        if channel is None:
            timings = (Timing.AT_ONCE,) if self._world.schedule is Schedule.LOCKSTEP else tuple(Timing)
            channel = Channel(self.scheduler, name, ranks, self._world.order, self._seed, timings)
            self._world.channels[name] = channel
        return channel

    def _make_group(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Collective over the new group: gloo's ranks connect to each other, so all of them must come."""
        rank = self.scheduler.begin("new_group")
        channel = self._channel(name, ranks)
        if channel.ranks != ranks:
            text = f"rank {rank} makes group {name} of ranks {list(ranks)}, others of ranks {list(channel.ranks)}"
            self.scheduler.halt("mismatch", text, ())
            self.scheduler.begin("new_group")
        group = SimGroup(channel, ranks.index(rank), self._world.store, self)
        group._launch(Request("new_group")).wait()
        return group
