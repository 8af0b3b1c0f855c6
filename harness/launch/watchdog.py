"""Tells a task that has stalled from one that takes long: by what its ranks do, not by the time that passes.

:class:`Silence` decides and :class:`FunctionsSeen` compares stacks; both know neither processes nor clocks.
:class:`Watchdog` feeds them.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.launch import activity
from harness.launch.activity import Reading
from harness.launch.outcome import Activity, Watch
from harness.launch.rankset import Member, RankSet

# How often a task is looked at.
TICK_S = 0.25
# A task is left alone until it has been quiet for so long.
_LOOK_AFTER_S = 0.5
# Stacks are asked for at most so often, and more often where the limits are small: the first time says nothing yet.
_SAMPLE_S = 2.0
_SAMPLES_PER_LIMIT = 4
_MAX_PROCESSES = 100
# What a process uses that a rank has started, a compiler, say, shows no stacks: it may take so many times longer.
_PATIENCE_WITH_PROCESSES = 4
_FRAME = re.compile(r'^  File "(.*)", line (?:\d+|\?\?\?) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Stall:
    """Why a task counts as hung.

    Attributes:
        rank: The one that used too much processor time; None if all were blocked.
        seconds: Of processor time then, else of waiting.
    """

    rank: int | None
    seconds: float

    def describe(self, rank: int, doing: Activity | None) -> str:
        """What is to be said of a rank that had not ended."""
        if rank == self.rank:
            return f"used {self.seconds:.1f} s of processor time without progress"
        if self.rank is None:
            because = f"no rank made progress for {self.seconds:.1f} s"
        else:
            because = f"no rank made progress while rank {self.rank} used {self.seconds:.1f} s of processor time"
        return f"{_DID[doing]} ({because})"


_DID: dict[Activity | None, str] = {
    None: "was ending",
    Activity.STOPPED: "was stopped by SIGSTOP or a debugger",
    Activity.BLOCKED: "waited without using the processor",
    Activity.COMPUTING: "was computing",
    Activity.DEVICE: "waited for a device",
}


class Silence:
    """The time since any rank got on, and what the ranks did in it.

    Time counts as at most twice the tick between two looks: while this process is suspended, or a busy machine does
    not let it look, the silence is its own.

    Args:
        blocked_s: See :class:`~harness.launch.outcome.Watch`.
        computing_s: The same.
        now_s: Of a monotonic clock.

    Attributes:
        quiet_s: Since any rank got on.
    """

    def __init__(self, blocked_s: float, computing_s: float, now_s: float) -> None:
        self._blocked_limit_s, self._computing_limit_s = blocked_s, computing_s
        self._last_s = now_s
        self.broken()

    def broken(self) -> None:
        """A rank got on: everything is counted from here."""
        self.quiet_s = self._blocked_s = 0.0
        self._used_s: dict[int, float] = {}
        self._spent_s: dict[int, float] = {}  # the same, with all that other processes used
        self._seen: dict[int, Counter[Activity]] = {}
        self._previous: Mapping[int, Reading] = {}

    def passed(self, now_s: float) -> float:
        """Nobody got on until now; returns the seconds that count."""
        step_s = min(now_s - self._last_s, 2 * TICK_S)
        self._last_s = now_s
        self.quiet_s += step_s
        return step_s

    def look(self, step_s: float, readings: Mapping[int, Reading]) -> Stall | None:
        """Take in what the ranks that have not ended did in the last ``step_s``; says whether that is a stall."""
        previous, self._previous = self._previous, readings
        for rank, reading in readings.items():
            self._seen.setdefault(rank, Counter())[reading.activity] += 1
        busiest_s = 0.0
        for rank in readings.keys() & previous.keys():
            # A descendant that was reaped by somebody else takes its time out of the sum. Of many that compute at once
            # one counts: or the time would be up before their stacks were looked at.
            now, before = readings[rank], previous[rank]
            own_s = min(step_s, max(0.0, now.cpu_s - before.cpu_s))
            others_s = min(step_s - own_s, max(0.0, now.descendants_cpu_s - before.descendants_cpu_s))
            self._used_s[rank] = self._used_s.get(rank, 0.0) + own_s + others_s / _PATIENCE_WITH_PROCESSES
            self._spent_s[rank] = self._spent_s.get(rank, 0.0) + own_s + others_s
            busiest_s = max(busiest_s, own_s + others_s)
        waiting = all(reading.activity in (Activity.BLOCKED, Activity.STOPPED) for reading in readings.values())
        if previous and readings and waiting:
            # Whoever waits by looking again and again uses a little time, and must not be taken for one that computes.
            self._blocked_s += max(0.0, step_s - busiest_s)
        if self._blocked_s >= self._blocked_limit_s:
            return Stall(None, self._blocked_s)
        rank, most_s = max(self._used_s.items(), key=lambda item: item[1], default=(-1, 0.0))
        return Stall(rank, self._spent_s[rank]) if most_s >= self._computing_limit_s else None

    def doing(self, rank: int) -> Activity | None:
        """What a rank did most of the time since any got on (at one moment also one that waits may be running)."""
        seen = self._seen.get(rank)
        return seen.most_common(1)[0][0] if seen else None


class FunctionsSeen:
    """The functions that the stacks of each rank have shown."""

    def __init__(self) -> None:
        self._seen: dict[int, set[tuple[str, str]]] = {}

    def add(self, rank: int, stacks: str) -> bool:
        """Whether these stacks, of all threads, show a function that earlier ones of this rank did not."""
        found = set(_FRAME.findall(stacks))
        seen = self._seen.setdefault(rank, set())
        news = bool(seen) and not found <= seen
        seen |= found
        return news

    def forget(self) -> None:
        """Begin anew: the ranks are in another part of their task."""
        self._seen.clear()


class ProcessesSeen:
    """The processes that the ranks have started. A compiler takes minutes, one process after the other."""

    def __init__(self) -> None:
        self._seen: set[int] | None = None

    def add(self, descendants: frozenset[int]) -> bool:
        """Whether there is one that was not there before; whoever starts them without end gets on only so often."""
        if self._seen is None:
            self._seen = set(descendants)
            return False
        news = not descendants <= self._seen and len(self._seen) < _MAX_PROCESSES
        self._seen |= descendants
        return news

    def forget(self) -> None:
        """Begin anew: the ranks are in another part of their task."""
        self._seen = None


@dataclass(frozen=True)
class Sight:
    """What was seen of ranks at one look.

    Attributes:
        got_on: Whether one of them did.
        readings: Of those that have not ended; None if there was no need to look so closely.
    """

    got_on: bool
    readings: Mapping[int, Reading] | None = None


class Lookout:
    """Looks at the ranks of a set while they do one task.

    Args:
        watch: What to look at, and the limits.
        ranks: The set, which has begun the task.
        ask_for_stacks: Has every living rank write its stacks; does not wait for them.
    """

    def __init__(self, watch: Watch, ranks: RankSet, ask_for_stacks: Callable[[], None]) -> None:
        self._watch, self._ranks, self._ask_for_stacks = watch, ranks, ask_for_stacks
        self._functions = FunctionsSeen()
        self._processes = ProcessesSeen()
        self._sample_s = max(TICK_S, min(_SAMPLE_S, min(watch.blocked_s, watch.computing_s) / _SAMPLES_PER_LIMIT))
        self._next_sample_s = self._sample_s  # of quiet time
        self._sizes: dict[int, int] = {}  # of the stacks that were asked for, by rank; empty when none were
        self._marks = self._look_for_marks()

    def look(self, quiet_s: float) -> Sight:
        """What the ranks do now, when for so long none got on."""
        marks = self._look_for_marks()
        if marks != self._marks:
            self._marks = marks
            self._functions.forget()
            self._processes.forget()
            return self._moving()
        if quiet_s < _LOOK_AFTER_S:
            return Sight(got_on=False)
        members = {member.pid: member for member in self._ranks.unfinished if member.pid is not None}
        readings = activity.read(members)
        started = self._processes.add(frozenset().union(*(reading.descendants for reading in readings.values())))
        if self._stacks_show_news() or started:
            # What they have shown stays known: a loop through many functions has shown them all before long.
            return self._moving()
        return Sight(False, {members[pid].rank: reading for pid, reading in readings.items()})

    def sample(self, quiet_s: float) -> None:
        """Ask for the stacks of all ranks if it is time to."""
        if quiet_s < self._next_sample_s:
            return
        self._next_sample_s = quiet_s + self._sample_s
        for member in self._ranks.members:
            member.clear_stacks()
        self._ask_for_stacks()
        self._sizes = {member.rank: 0 for member in self._ranks.unfinished}

    def _look_for_marks(self) -> list[object]:
        """Something that differs if any rank got on in between."""
        marks: list[object] = [member.channel.num_bytes for member in self._ranks.members]
        marks.extend(self._watch.moved(member.rank) for member in self._ranks.unfinished)
        return marks

    def _moving(self) -> Sight:
        self._next_sample_s = self._sample_s
        self._sizes = {}
        return Sight(got_on=True)

    def _stacks_show_news(self) -> bool:
        """Read the stacks that were asked for, once they have stopped growing."""
        news = False
        for rank, previous in list(self._sizes.items()):
            member = self._ranks.member(rank)
            self._sizes[rank] = _size(member)
            if self._sizes[rank] == previous > 0:
                del self._sizes[rank]
                news = self._functions.add(rank, member.read_stacks()) or news
        return news


class Watchdog:
    """Watches one task of a set of ranks.

    Args:
        watch: What to look at, and the limits.
        ranks: The set, which has begun the task.
        ask_for_stacks: Has every living rank write its stacks; does not wait for them.
        now_s: ``time.monotonic()``.
    """

    def __init__(self, watch: Watch, ranks: RankSet, ask_for_stacks: Callable[[], None], now_s: float) -> None:
        self._silence = Silence(watch.blocked_s, watch.computing_s, now_s)
        self._lookout = Lookout(watch, ranks, ask_for_stacks)

    def tick(self, now_s: float) -> Stall | None:
        """To be called every ``TICK_S``; says whether the task has stalled."""
        step_s = self._silence.passed(now_s)
        sight = self._lookout.look(self._silence.quiet_s)
        if sight.got_on:
            self._silence.broken()
            return None
        stall = None if sight.readings is None else self._silence.look(step_s, sight.readings)
        if stall is None:
            self._lookout.sample(self._silence.quiet_s)
        return stall

    def doing(self, rank: int) -> Activity | None:
        """What a rank that has not ended did in the silence until now; None if it was too short to be looked at."""
        return self._silence.doing(rank)


def _size(member: Member) -> int:
    with contextlib.suppress(OSError):
        return member.stacks.stat().st_size
    return 0
