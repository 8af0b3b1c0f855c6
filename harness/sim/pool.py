"""Simulated worlds from outside: one supervised process that runs a whole world, reported as if each rank had its own.

The same interface as :class:`harness.launch.pool.RankPool`; and several such processes (*lanes*), which run other
scenarios side by side (:meth:`SimPool.run_many`). The parent imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from harness.drive import trail
from harness.drive.tasks import RunMany, RunScenario, encode
from harness.launch.outcome import Outcome, PoolError, RankEnd, RankReport, Watch
from harness.launch.pool import RankPool
from harness.launch.rank import NO_GROUP
from harness.sim import messages, turn
from harness.sim.lanes import Batch, balanced
from harness.sim.messages import LaneReply, RankPart, WorldReply

HANDLER = "harness.sim.handler:start"

# The process is the only rank of its set. Lanes are the ranks of another set, of as many as there are of them.
_WORLD = 1
_RANK = 0

_ENDS = {
    "replied": RankEnd.REPLIED,
    "broken": RankEnd.BROKEN,
    "deadlocked": RankEnd.DEADLOCKED,
    "abandoned": RankEnd.ABANDONED,
    # Nothing would ever come of waiting for it; that is known at once, and no time-out.
    "muted": RankEnd.DEADLOCKED,
}
_MUTED = "keeps its verdict for itself, for ever"
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x[0-9a-f]+)", re.MULTILINE)


class SimPool:
    """Worlds of any size in one process, one at a time; a context manager. To be used from one thread.

    Args:
        handler: What the process runs; replies with a :class:`harness.sim.messages.WorldReply`.
        preload: Modules imported once, before the process is forked.
        lanes: How many further processes run tasks side by side where there are several; 1: none.
        device: Where the ranks' tensors belong: ``"cpu"``, or ``"cuda"``: of all processes on the GPUs in turn.

    Attributes:
        backend: ``"sim"``.
        directory: Private, holds what ranks leave behind; removed when the pool closes.
        lanes: As given.

    Raises:
        ValueError: There is to be less than one lane.
        PoolError: Its directory cannot be written, or its first process not started.
    """

    def __init__(
        self, handler: str = HANDLER, *, preload: Sequence[str] = (), lanes: int = 1, device: str = "cpu"
    ) -> None:
        if lanes < 1:
            raise ValueError(f"lanes={lanes}: expected at least 1")
        self.lanes = lanes
        self.backend = "sim"
        self._process = RankPool(handler, backend=NO_GROUP, device=device, preload=preload)
        self.directory = self._process.directory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def incidents(self) -> list[str]:
        """What happened to the process between tasks, one line each; it was replaced."""
        ended = "the process that all ranks of a simulated world share ended after its reply, before the next task"
        return [ended for _ in self._process.incidents]

    def home(self, world: int) -> int:
        """The world by whose number the processes go that run this one: there is one process for all."""
        return _WORLD

    def warm(self, worlds: Iterable[int]) -> None:
        """Start the process now, rather than at the first task.

        Raises:
            PoolError: It did not start.
        """
        if any(True for _ in worlds):
            self._process.warm([_WORLD])

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        """Have a world do a task; see :meth:`harness.launch.pool.RankPool.run`.

        Raises:
            PoolError: The pool itself could not work, or what was sent makes no sense.
        """
        turn.clear(self.directory, world)
        outcome = self._process.run(_WORLD, task, timeout_s=timeout_s, watch=self._watched(world, watch))
        report = outcome.ranks[_RANK]
        if report.reply is None:
            return self._without_reply(world, outcome)
        try:
            return _with_reply(world, outcome.seconds, messages.decode_reply(report.reply), _events(world, report))
        except (msgspec.MsgspecError, ValueError) as error:
            raise PoolError(f"what the process of a simulated world sent makes no sense: {error}") from error

    def check_lanes(self, task: bytes, *, timeout_s: float, watch: Watch) -> bool:
        """Have every lane do the same task, which is none of a world; start them if need be.

        Returns:
            Whether each replied.

        Raises:
            PoolError: The pool itself could not work.
        """
        return self._process.run(self.lanes, task, timeout_s=timeout_s, watch=watch).replied

    def run_many(
        self,
        tasks: Sequence[RunScenario],
        costs: Sequence[float],
        *,
        timeout_s: float,
        blocked_s: float,
        computing_s: float,
    ) -> Batch:
        """Do tasks side by side, some in each lane, one after the other.

        Once a lane has failed all others are ended soon. What has stalled (:class:`harness.launch.outcome.Watch`) is
        told when no lane gets on any more.

        Args:
            tasks: At least one.
            costs: About how long each will take, in any one unit.
            timeout_s: For all of them.
            blocked_s, computing_s: See :class:`harness.launch.outcome.Watch`.

        Raises:
            ValueError: There are no lanes.
            PoolError: The pool itself could not work, or what was sent makes no sense.
        """
        if self.lanes < 2:
            raise ValueError(f"tasks side by side in {self.lanes} lane: expected a pool with at least 2")
        shares = balanced(costs, self.lanes)
        message = encode(RunMany(tuple(tuple(tasks[index] for index in share) for share in shares)))
        worlds = [sorted({tasks[index].scenario.world for index in share}) for share in shares]
        watch = Watch(lambda lane: self._positions(lane, worlds[lane]), blocked_s, computing_s)
        outcome = self._process.run(self.lanes, message, timeout_s=timeout_s, watch=watch)
        done: dict[int, LaneReply] = {}
        died: dict[int, str] = {}
        for share, report in zip(shares, outcome.ranks, strict=True):
            if report.end in (RankEnd.REPLIED, RankEnd.ABANDONED):
                done.update(zip(share, _lane_replies(report), strict=False))
            elif report.end in (RankEnd.EXITED, RankEnd.KILLED, RankEnd.SPOILT):
                # With nothing to do: something that an earlier task had left running ended it.
                at = share[min(len(report.events), len(share) - 1)] if share else 0
                died[at] = report.error or report.end.value
        spent_s = sum(reply.seconds for reply in done.values()) or 1.0
        outcomes: list[Outcome | None] = [None] * len(tasks)
        try:
            for index, said in done.items():
                world, seconds = tasks[index].scenario.world, outcome.seconds * said.seconds / spent_s
                outcomes[index] = _with_reply(world, seconds, said.reply, [()] * world)
        except ValueError as error:
            raise PoolError(f"what the process of a simulated world sent makes no sense: {error}") from error
        return Batch(tuple(outcomes), died, outcome.replied)

    def recycle_lanes(self) -> None:
        """End the processes of all lanes; the next tasks start others. Between tasks.

        Raises:
            PoolError: The pool itself could not work.
        """
        self._process.recycle(self.lanes)

    def _positions(self, lane: int, worlds: Sequence[int]) -> object:
        """Something that differs when a lane has got on since it was last asked for."""
        directory = turn.lane_directory(self.directory, lane)
        states = [(world, turn.read(directory, world)) for world in worlds]
        return [
            (state.num_turns, state.rank, trail.position(directory, world, state.rank or 0)) for world, state in states
        ]

    def recycle(self, world: int) -> None:
        """End the process; the next task starts another. Between tasks.

        Raises:
            PoolError: The pool itself could not work.
        """
        self._process.recycle(_WORLD)

    def log_path(self, world: int, rank: int) -> Path:
        """Where the output of a rank goes, with that of all others."""
        return self._process.log_path(_WORLD, _RANK)

    def close(self) -> None:
        """End and reap the process and remove the directory. Idempotent."""
        self._process.close()

    def _watched(self, world: int, watch: Watch | None) -> Watch | None:
        """The same watch of whichever rank has its turn; that another one gets it is progress too."""
        if watch is None:
            return None

        def moved(_process: int) -> object:
            state = turn.read(self.directory, world)
            return state.num_turns, state.rank, watch.moved(state.rank or 0)

        return replace(watch, moved=moved)

    def _without_reply(self, world: int, outcome: Outcome) -> Outcome:
        """How the process ended is the doing of the rank that ran; the others went with it."""
        state = turn.read(self.directory, world)
        report = outcome.ranks[_RANK]
        running = 0 if state.rank is None else state.rank
        error = report.error
        if state.rank is None and world > 1 and report.end is not RankEnd.RAISED:
            error = f"{error or report.end.value}, while no rank had its turn"
        if report.end in (RankEnd.STALLED, RankEnd.TIMED_OUT):
            fate = f"ended by the harness: rank {running}, which had its turn, did not get on"
        else:
            fate = f"ended with the process that all ranks of a simulated world share, in the turn of rank {running}"
        stacks = _Stacks(report.stacks, state)
        events = _events(world, report)
        ranks = tuple(
            RankReport(rank, report.end, None, events[rank], error, report.output, stacks.running, report.activity)
            if rank == running
            else RankReport(rank, RankEnd.ABANDONED, None, events[rank], fate, "", stacks.of(rank))
            for rank in range(world)
        )
        return Outcome(world, ranks, outcome.seconds, running)


def _lane_replies(report: RankReport) -> list[LaneReply]:
    """Raises PoolError: one makes no sense."""
    try:
        return [messages.decode_lane_reply(message) for message in report.events]
    except msgspec.MsgspecError as error:
        raise PoolError(f"an interim message of a simulated world makes no sense: {error}") from error


def _with_reply(world: int, seconds: float, reply: WorldReply, events: Sequence[tuple[bytes, ...]]) -> Outcome:
    """Raises ValueError: it is not of such a world."""
    if len(reply.ranks) != world:
        raise ValueError(f"a reply of {len(reply.ranks)} ranks: expected {world}")
    ranks = tuple(_report(rank, part, events[rank]) for rank, part in enumerate(reply.ranks))
    named = [*(reply.told.ranks if reply.told is not None else ()), reply.first_failed or 0]
    if any(not 0 <= rank < world for rank in named):
        raise ValueError(f"it names ranks {named}: expected ranks of a world of {world}")
    failed = [report.rank for report in ranks if report.end is not RankEnd.REPLIED]
    if reply.first_failed is None and failed:
        raise ValueError(f"ranks {failed} did not reply, and none of them is said to have failed first")
    return Outcome(world, ranks, seconds, reply.first_failed, reply.told, reply.trace)


def _report(rank: int, part: RankPart, events: tuple[bytes, ...]) -> RankReport:
    end = _ENDS[part.end]
    if (part.payload is None) is (end in (RankEnd.REPLIED, RankEnd.BROKEN)):
        raise ValueError(f"rank {rank} {part.end} with{'out' if part.payload is None else ''} a payload")
    error = _MUTED if part.end == "muted" and part.error is None else part.error
    return RankReport(rank, end, part.payload, events, error, part.output, part.stacks)


def _events(world: int, report: RankReport) -> list[tuple[bytes, ...]]:
    """The interim messages of each rank.

    Raises:
        PoolError: One makes no sense.
    """
    events: list[list[bytes]] = [[] for _ in range(world)]
    for message in report.events:
        try:
            event = messages.decode_event(message)
            events[event.rank].append(event.event)
        except (msgspec.MsgspecError, IndexError) as error:
            raise PoolError(f"an interim message of a simulated world makes no sense: {error}") from error
    return [tuple(each) for each in events]


class _Stacks:
    """The stacks of all threads of the process, by rank.

    Args:
        text: By faulthandler, or another's words where it could not write them; None: nobody asked.
        state: Which thread is which rank's.
    """

    def __init__(self, text: str | None, state: turn.State) -> None:
        self._text, self._state = text, state
        blocks = [block for block in _THREAD.split(text or "") if _THREAD.match(block)]
        self._by_thread = {int(block.split("0x", 1)[1].split(None, 1)[0].rstrip("]"), 16): block for block in blocks}

    def of(self, rank: int) -> str | None:
        """Of one rank; None where they do not show it."""
        return self._by_thread.get(self._state.threads[rank]) if rank < len(self._state.threads) else None

    @property
    def running(self) -> str | None:
        """Of the rank that has its turn; all of the process where nobody has."""
        if self._state.rank is None or not self._by_thread:
            return self._text
        # faulthandler stops after a hundred threads.
        return self.of(self._state.rank) or "its thread is not among those that Python showed"
