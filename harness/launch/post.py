"""What a launched process does with the one rank that it looks after, step by step, as the first of them orders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace as changed

from harness.launch.orders import Answer, Do, Form, Sighting, Stop
from harness.launch.outcome import RankEnd, Watch
from harness.launch.pool import PoolError, RankPool
from harness.launch.rankset import Member, Phase, RankSet
from harness.launch.torchrun import Launch
from harness.launch.watchdog import TICK_S, Lookout

_DIED = (RankEnd.EXITED, RankEnd.KILLED, RankEnd.RAISED)


class Post(RankPool):
    """A pool that holds one rank of a world whose other ranks are held by other processes.

    It does not wait for the task to end, nor decide what becomes of it: whoever gives the orders sees all ranks.

    Args:
        launch: Which rank, and where the others are.
        form: The first order, which says what ranks are to run.

    Raises:
        PoolError: From every method: the pool itself could not work.
    """

    def __init__(self, launch: Launch, form: Form) -> None:
        super().__init__(
            form.handler, form.setup, backend=form.backend, device=form.device, preload=form.preload, launch=launch
        )
        self.rank, self.world = launch.rank, launch.world
        self._ranks: RankSet | None = None
        self._asked = 0.0  # when the rank was, on the monotonic clock
        self._lookout: Lookout | None = None
        self._sighting = Sighting(0)
        self._quiet_s = self._looked = 0.0
        self._running: list[Member] = []

    @property
    def usable(self) -> bool:
        """The pool has not failed for good: every further call would raise what it failed with."""
        return self._broken is None

    @property
    def waits(self) -> bool:
        """The rank does something whose end is waited for."""
        if self._ranks is None or not self.usable:
            return False
        return self._ranks.phase is Phase.JOINING or (self._ranks.phase is Phase.BUSY and not self._ranks.finished)

    @property
    def joined(self) -> bool:
        """The rank is in its group and ready for a task."""
        return self._ranks is not None and self._ranks.phase is Phase.IDLE

    @property
    def finished(self) -> bool:
        """The rank's part of the task has ended."""
        return self._ranks is not None and self._ranks.phase is Phase.BUSY and self._ranks.finished

    @property
    def lost(self) -> bool:
        """The rank has ended."""
        return self._ranks is not None and bool(self._ranks.lost)

    @property
    def failed_at(self) -> float | None:
        """``time.time()`` when the rank's failure was seen."""
        if self._ranks is None or self._ranks.failed_at is None:
            return None
        return time.time() - (time.monotonic() - self._ranks.failed_at)

    def form(self, generation: int) -> None:
        """End the rank, if there is one, and start one of this generation; :meth:`attend` until it has joined."""
        self.disband()
        with self._failing_with_the_zygote():
            self._num_started = generation - 1  # so the ranks of a generation meet under one name
            self._ranks = self._start_set(self.world)
            self._asked = time.monotonic()

    def attend(self, timeout_s: float) -> None:
        """Wait until something happens, at most so long, and take it in.

        Raises:
            PoolError: Also if the rank cannot join.
        """
        with self._failing_with_the_zygote():
            self._pump(timeout_s)
            ranks = self._ranks
            if ranks is None or ranks.phase is not Phase.JOINING:
                return
            if ranks.joined and not ranks.failures:
                ranks.phase = Phase.IDLE
            elif ranks.failures or self._join_time_left(self._asked) <= 0:
                self._ranks = None
                raise PoolError(self._end_unjoined(ranks))

    def begin(self, order: Do, number: int) -> None:
        """Have the rank do a task; :meth:`attend` until it has."""
        with self._failing_with_the_zygote():
            ranks = self._known()
            for member in ranks.begin(order.task):
                self._flush_later(ranks, member)
            self._sighting, self._quiet_s, self._looked = Sighting(number), 0.0, time.monotonic()
            self._lookout = None
            if order.limits is not None:
                watch = Watch(lambda _rank: self._left_size(), *order.limits)
                self._lookout = Lookout(watch, ranks, partial(self._ask_for_stacks, ranks))

    def look(self) -> Sighting:
        """What the rank does now; to be called every ``TICK_S`` while it does a task."""
        with self._failing_with_the_zygote():
            ranks, now = self._known(), time.monotonic()
            ranks.bound_logs()
            # As long as two looks at most: while this process is suspended the silence is its own.
            self._quiet_s += min(now - self._looked, 2 * TICK_S)
            self._looked = now
            before = self._sighting
            seen = Sighting(before.order, before.number + 1, before.progress, failed_at=self.failed_at)
            if self._lookout is not None:
                sight = self._lookout.look(self._quiet_s)
                if sight.got_on:
                    self._quiet_s = 0.0
                    seen = changed(seen, progress=before.progress + 1)
                elif sight.readings is not None:
                    self._lookout.sample(self._quiet_s)
                    seen = changed(seen, looked=True, reading=sight.readings.get(self.rank))
            self._sighting = seen
            return seen

    def answer(self) -> Answer:
        """What became of the task, which the rank has finished."""
        ranks = self._known()
        return Answer(
            at=time.time(),
            report=ranks.member(self.rank).report(),
            reusable=ranks.reusable,
            failed_at=self.failed_at,
        )

    def stop(self, order: Stop) -> Answer:
        """The task has failed: decide what is said of the rank, which is not ended yet."""
        with self._failing_with_the_zygote():
            ranks = self._known()
            self._pump(0.0)
            answer = Answer(time.time(), failed_at=self.failed_at)
            self._running = self._decide(ranks, order.stall, order.doing.get, look=order.look, first=order.first)
            return answer

    def end(self) -> Answer:
        """End the rank after a :meth:`stop`; what became of its part, and what it left."""
        with self._failing_with_the_zygote():
            ranks = self._known()
            self._end(ranks, self._running)
            report = ranks.member(self.rank).report()
            answer = Answer(time.time(), report=report, files=left_by(self.directory, self.rank))
            self._forget(ranks)
            self._ranks = None
            # A disk that is full makes ranks fail in many ways.
            problem = self._private.problem() if report.end in _DIED else None
            return answer if problem is None else changed(answer, problem=problem)

    def disband(self) -> None:
        """End the rank, if there is one."""
        if self._ranks is not None:
            with self._failing_with_the_zygote():
                ranks, self._ranks = self._ranks, None
                self._discard(ranks)

    def _known(self) -> RankSet:
        if self._ranks is None:
            raise PoolError(f"rank {self.rank} was asked for something while it does not run")
        return self._ranks

    def _left_size(self) -> int:
        return sum(map(len, left_by(self.directory, self.rank).values()))


def left_by(directory: Path, rank: int) -> dict[str, bytes]:
    """The files that what runs in a rank keeps in its pool's directory, whose names end with its number.

    Without the zeros at their end, which fill up what is mapped into memory.
    """
    found = {}
    for path in directory.glob(f"*-rank{rank}"):
        with contextlib.suppress(OSError):
            found[path.name] = path.read_bytes().rstrip(b"\0")
    return found


def keep_left(directory: Path, rank: int, files: Mapping[str, bytes]) -> None:
    """Put there what a rank left in the directory of another pool, maybe on another machine; what was there goes."""
    for path in directory.glob(f"*-rank{rank}"):
        path.unlink(missing_ok=True)
    for name, content in files.items():
        # A name and not a way to elsewhere.
        (directory / Path(name).name).write_bytes(content)
