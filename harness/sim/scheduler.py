"""Ranks as threads of which one runs at a time: who runs next, who waits for whom, and what if nobody can run.

Knows no collectives. A rank that has to wait for others calls :meth:`Scheduler.wait`, and the turn goes to another one
that can run; whoever brings about what a rank waits for calls :meth:`Scheduler.wake`. When no rank can run any more,
that is a fact, known at once.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import queue
import random
import re
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import NoReturn, Protocol, TypeVar

from harness.sim.choices import Schedule
from harness.sim.frames import is_ours
from harness.sim.refusal import HINT, Refused

MAX_WORLD = 256
# For ranks to notice that the world was interrupted.
_GRACE_S = 10.0
# Of calls of a rank that was told to unwind: whoever goes on so long never ends.
_MAX_REFUSALS = 1_000
# Of calls of is_completed() while no other rank could run: whoever asks so often asks for ever.
_MAX_POLLS = 10_000


T = TypeVar("T")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Wait(Protocol):
    """What a rank can wait for.

    Attributes:
        late: Those who wait for this run only when no other rank can; :meth:`happen` is called then.
    """

    @property
    def late(self) -> bool:
        """See above."""

    def happen(self) -> None:
        """Nobody else can run: now it happens, if it can."""

    def describe(self, rank: int) -> str:
        """What the rank waits for, in words: ``in all_reduce fp32[4], for rank 2``."""

    def missing(self) -> tuple[int, ...]:
        """The ranks without which it cannot come about."""


class Phase(enum.Enum):
    """Of a rank. READY: it can run. RUNNING: it is its turn. WAITING: for what others do. ENDED: its thread has."""

    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


class RankStopped(BaseException):
    """Raised in a rank that waits, or would have to, when the world has stopped: it unwinds and ends."""


class ForeignThreadError(Refused):
    """A collective was called from a thread that is not the rank's own."""


@dataclass(frozen=True)
class Stop:
    """Why a world stopped before all ranks had ended.

    Attributes:
        kind: ``mismatch``: ranks called different collectives, or the same with other arguments; ``deadlock``: no rank
            could run any more.
        message: In words, with who waits for what.
        ranks: Whose doing it is; empty where that cannot be told.
        waits: What each rank that waited then waited for.
        stacks: Where each of them was, the innermost call first.
    """

    kind: str
    message: str
    ranks: tuple[int, ...]
    waits: dict[int, str]
    stacks: dict[int, str]

    def places(self) -> dict[int, str]:
        """Where each rank that had not ended was, of code that is neither torch's nor the harness's: ``at …``."""
        found: dict[int, str] = {}
        for rank, stack in self.stacks.items():
            for file, line, function in _FRAME.findall(stack):
                if not is_ours(file) and "/lib/python3" not in file:
                    found[rank] = f"at {PurePath(file).name}:{line} in {function}"
                    break
        return found


class Turns(Protocol):
    """Told of changes of turn, in the thread of the rank in question."""

    def enter(self, rank: int) -> None:
        """It is this rank's turn."""

    def leave(self, rank: int) -> None:
        """It is not any more, for now or for good."""

    def stopped(self, rank: int) -> None:
        """The world has stopped, and this rank is about to unwind."""


class _Rank:
    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = Phase.READY
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None
        self.wait: Wait | None = None
        self.stopped = False
        # How often it has only asked, since it last did something that others could notice.
        self.polls = 0
        self.refusals = 0


class _Aside:
    """A rank waits for nothing but that the others cannot run. A Wait."""

    late = True

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self.over = False
        self._scheduler = scheduler
        self._rank = rank

    def happen(self) -> None:
        self.over = True
        self._scheduler.wake(self._rank)

    def describe(self, rank: int) -> str:
        return "for the others to run"

    def missing(self) -> tuple[int, ...]:
        return ()


class Scheduler:
    """The ranks of one world, for one run.

    Args:
        world_size: 1 to 256.
        seed: Of what is chosen at random.
        schedule: How the next rank is chosen.
        turns: Told of changes of turn.

    Attributes:
        random: The source of all choices.
        stop: Why the world stopped; None as long as it has not.
        current: The rank whose turn it is; None before the first and after the last.
        left_behind: The thread of a rank that would not unwind is still there.
    """

    def __init__(self, world_size: int, seed: int, schedule: Schedule, turns: Turns) -> None:
        self.random = random.Random(seed)
        self.stop: Stop | None = None
        self.current: int | None = None
        self.left_behind = False
        self._schedule = schedule
        self._turns = turns
        self._ranks = [_Rank(number) for number in range(world_size)]
        self._ready = list(range(world_size))
        self._parked: list[_Rank] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._interrupted = False
        self._failure: BaseException | None = None
        self._trace = bytearray()
        self._foreign: dict[int, str] = {}

    def run(self, function: Callable[[int], None]) -> None:
        """Run ``function(rank)`` for every rank, each in a thread of its own; returns when all have ended.

        ``function`` and those who are told of turns must not raise: it is raised here in the end. When what waits here
        is interrupted (Ctrl-C, a test's time-out), the ranks are first told to unwind, at their next collective.

        Raises:
            RuntimeError: There is no thread for one of them; none has run.
        """
        self._start(function)
        first = self._next(None)
        if first is not None:
            first.baton.release()
        try:
            self._serve()
        except BaseException:
            self._interrupted = True
            with contextlib.suppress(queue.Empty):
                self._serve(_GRACE_S)
                self._join()
            raise
        self._join()

    def _serve(self, timeout_s: float | None = None) -> None:
        """Do what ranks ask of this thread, until the last of them has ended."""
        while (call := self._calls.get(timeout=timeout_s)) is not None:
            call()

    def on_calling_thread(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the thread that called :meth:`run`, and wait for it: some things only it may do.

        In the thread of the rank whose turn it is.
        """
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 (raised where it was asked for)
                errors.append(error)
            done.set()

        self._calls.put(call)
        done.wait()
        if errors:
            raise errors[0]
        return results[0]

    def _start(self, function: Callable[[int], None]) -> None:
        for rank in self._ranks:
            rank.thread = threading.Thread(
                target=self._live, args=(rank, function), name=f"rank{rank.number}", daemon=True
            )
            try:
                rank.thread.start()
            except RuntimeError as error:
                rank.thread = None
                self._abandon(rank.number)
                raise RuntimeError(
                    f"a world of {len(self._ranks)} ranks needs as many threads; there is none for rank "
                    f"{rank.number} ({error}): raise the limits of this process, or choose a smaller world"
                ) from error

    def _abandon(self, num_started: int) -> None:
        """Only so many ranks have a thread: let those end without having run."""
        self.stop = Stop("interrupted", "not every rank got a thread", (), {}, {})
        self._ready = list(range(num_started))
        for rank in self._ranks[num_started:]:
            rank.phase = Phase.ENDED
        first = self._next(None)
        if first is not None:
            first.baton.release()
            self._serve()
            self._join()

    def _join(self) -> None:
        for rank in self._ranks:
            if rank.thread is not None:
                rank.thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def trace(self) -> str:
        """Digest of the order in which ranks had their turns."""
        return hashlib.blake2b(self._trace, digest_size=8).hexdigest()

    @property
    def num_turns(self) -> int:
        """How often it was another rank's turn."""
        return len(self._trace)

    def ended(self, rank: int) -> bool:
        """Whether a rank's function has returned."""
        return self._ranks[rank].phase is Phase.ENDED

    def was_stopped(self, rank: int) -> bool:
        """Whether a rank was told to unwind."""
        return self._ranks[rank].stopped

    def check_thread(self, what: str) -> int:
        """The rank whose thread this is.

        Raises:
            ForeignThreadError: None's whose turn it is.
        """
        if self.current is not None:
            thread = self._ranks[self.current].thread
            if thread is not None and thread.ident == threading.get_ident():
                return self.current
        text = (
            f"{what} was called from a thread that is not the rank's own: a simulated world gives each rank one "
            f"thread; {HINT}"
        )
        if self.current is not None:
            self._foreign.setdefault(self.current, text)
        raise ForeignThreadError(text)

    def raise_foreign(self, rank: int) -> None:
        """Once more, in the rank's own thread: what is raised in a thread of the class's may reach nobody.

        Raises:
            ForeignThreadError: One was, in a turn of this rank, since this was asked last.
        """
        if (text := self._foreign.pop(rank, None)) is not None:
            raise ForeignThreadError(text)

    def begin(self, what: str) -> int:
        """The rank whose turn it is does something that others can notice: it calls a collective, sends, sets a key.

        Raises:
            ForeignThreadError: This is not its thread.
            RankStopped: The world has stopped.
        """
        number = self.check_thread(what)
        rank = self._ranks[number]
        self._raise_if_stopped(rank)
        rank.polls = 0
        self._unpark()
        return number

    def wait(self, wait: Wait, over: Callable[[], bool]) -> None:
        """Hand the turn on until ``over()``. To be called in the rank's own thread.

        Raises:
            RankStopped: The world has stopped.
        """
        rank = self._running()
        rank.polls = 0
        while not over():
            self._raise_if_stopped(rank)
            rank.wait, rank.phase = wait, Phase.WAITING
            self._hand_on(rank)
            rank.wait = None
            self._raise_if_stopped(rank)

    def give_way(self, wait: Wait) -> None:
        """Let the others run until it is this rank's turn again: it only asked, and can go on.

        Raises:
            RankStopped: The world has stopped, or nobody else can run and this rank does nothing but ask.
        """
        rank = self._running()
        self._raise_if_stopped(rank)
        rank.polls += 1
        if self._all_only_ask():
            self._let_something_happen()
        if rank.polls > _MAX_POLLS and self._all_only_ask():
            # Until somebody does something, it would be told the same again.
            rank.wait, rank.phase = wait, Phase.WAITING
            self._parked.append(rank)
        else:
            self._make_ready(rank)
        self._hand_on(rank)
        rank.wait = None
        self._raise_if_stopped(rank)

    def step_aside(self) -> None:
        """Let the others run until no other can.

        Raises:
            RankStopped: The world has stopped.
        """
        aside = _Aside(self, self._running().number)
        self.wait(aside, lambda: aside.over)

    def _all_only_ask(self) -> bool:
        """Whether the other ranks that could run are only asking, too."""
        return all(self._ranks[number].polls for number in self._ready)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for rank in parked:
            if rank.phase is Phase.WAITING:
                self._make_ready(rank)

    def wake(self, rank: int) -> None:
        """What a rank waited for has come about."""
        self._unpark()
        if self._ranks[rank].phase is Phase.WAITING:
            self._make_ready(self._ranks[rank])

    def halt(self, kind: str, message: str, ranks: tuple[int, ...]) -> None:
        """Stop the world: every rank that waits, or will, unwinds. The first reason counts."""
        if self.stop is not None:
            return
        living = [rank for rank in self._ranks if rank.phase is not Phase.ENDED]
        # Who was woken, and has not run since, waits no more.
        waiting = [rank for rank in living if rank.phase is Phase.WAITING]
        waits = {rank.number: rank.wait.describe(rank.number) for rank in waiting if rank.wait is not None}
        stacks = {rank.number: _stack(rank) for rank in living}
        self.stop = Stop(kind, message, ranks, waits, stacks)
        for rank in living:
            if rank.phase is Phase.WAITING:
                self._make_ready(rank)

    def _running(self) -> _Rank:
        if self.current is None:
            raise RuntimeError("no rank runs")
        return self._ranks[self.current]

    def _raise_if_stopped(self, rank: _Rank) -> None:
        if self._interrupted:
            self.halt("interrupted", "whoever ran the world was interrupted", ())
        if self.stop is not None:
            if not rank.stopped:
                rank.stopped = True
                self._turns.stopped(rank.number)
            rank.refusals += 1
            if rank.refusals > _MAX_REFUSALS:
                self._give_up(rank)
            raise RankStopped(self.stop.message)

    def _give_up(self, rank: _Rank) -> NoReturn:
        """A rank that was told to unwind, and goes on calling all the same, has ended; its thread stays behind."""
        self.left_behind = True
        rank.thread = None
        self._end(rank)
        while True:
            rank.baton.acquire()  # which nobody hands to it any more

    def _live(self, rank: _Rank, function: Callable[[int], None]) -> None:
        rank.baton.acquire()
        try:
            self._enter(rank)
            if self.stop is None:
                function(rank.number)
        except BaseException as error:  # noqa: BLE001 (raised where the world is run)
            self._failure = self._failure or error
        finally:
            self._end(rank)

    def _end(self, rank: _Rank) -> None:
        rank.phase = Phase.ENDED
        try:
            self._turns.leave(rank.number)
        except BaseException as error:  # noqa: BLE001 (raised where the world is run)
            self._failure = self._failure or error
        following = self._next(rank)
        if following is None:
            self.current = None
            self._calls.put(None)
        else:
            following.baton.release()

    def _hand_on(self, rank: _Rank) -> None:
        following = self._next(rank)
        if following is None:
            raise RuntimeError(f"rank {rank.number} waits, and nobody is left who could run")
        if following is rank:
            rank.phase = Phase.RUNNING
            return
        self._turns.leave(rank.number)
        following.baton.release()
        rank.baton.acquire()
        self._enter(rank)

    def _enter(self, rank: _Rank) -> None:
        rank.phase = Phase.RUNNING
        self.current = rank.number
        self._trace.append(rank.number)
        self._turns.enter(rank.number)

    def _make_ready(self, rank: _Rank) -> None:
        rank.phase = Phase.READY
        self._ready.append(rank.number)

    def _next(self, last: _Rank | None) -> _Rank | None:
        """Take the rank whose turn it is now; None when all have ended."""
        if not self._ready and not self._interrupted:
            self._let_something_happen()
        if not self._ready:
            if all(rank.phase is Phase.ENDED for rank in self._ranks):
                return None
            self._deadlock()
        if self._schedule is Schedule.LOCKSTEP:
            start = -1 if last is None else last.number
            number = min(self._ready, key=lambda each: (each <= start, each))
            self._ready.remove(number)
        else:
            index = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
            self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
            number = self._ready.pop()
        return self._ranks[number]

    def _let_something_happen(self) -> None:
        """No rank can run: one of the collectives that were held back as long as possible takes place."""
        waits = {id(rank.wait): rank.wait for rank in self._ranks if rank.phase is Phase.WAITING and rank.wait}
        late = [wait for wait in waits.values() if wait.late]
        while late and self._all_only_ask():
            try:
                late.pop(self.random.randrange(len(late))).happen()
            except BaseException as error:  # noqa: BLE001 (raised where the world is run; this may be any rank's thread)
                self._failure = self._failure or error
                self.halt("interrupted", f"a collective could not take place: {error!r}", ())

    def _deadlock(self) -> None:
        waiting = [rank for rank in self._ranks if rank.phase is Phase.WAITING]
        needed = [set(rank.wait.missing()) if rank.wait else set() for rank in waiting]
        ended = {rank.number for rank in self._ranks if rank.phase is Phase.ENDED}
        gone = sorted(set().union(*needed) & ended)
        texts = [f"rank {rank.number} waits {rank.wait.describe(rank.number)}" for rank in waiting if rank.wait]
        if gone:
            texts += [f"rank {number} had ended by then" for number in gone]
        self.halt("deadlock", "no rank can go on: " + "; ".join(texts), tuple(gone))


def _stack(rank: _Rank) -> str:
    """Where a rank's thread is, as faulthandler writes it: the innermost call first."""
    ident = rank.thread.ident if rank.thread is not None else None
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return ""
    lines = [
        f'  File "{entry.f_code.co_filename}", line {number} in {entry.f_code.co_name}'
        for entry, number in traceback.walk_stack(frame)
    ]
    # Not by its address, which differs from run to run.
    return "\n".join([f"Thread of rank {rank.number} (most recent call first):", *lines])
