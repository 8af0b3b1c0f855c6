"""One task on ranks that several launched processes hold: begun, watched, and if it fails ended everywhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.launch import machine
from harness.launch.job import Job
from harness.launch.orders import Answer, Do, End, Order, Sighting, Stop
from harness.launch.outcome import Activity, Outcome, PoolError, RankEnd, RankReport, Watch
from harness.launch.post import Post
from harness.launch.watchdog import TICK_S, Silence, Stall

OWN = 0
"""The rank that the leading process looks after itself."""

_PAUSE_S = 1.0  # What this process oversleeps beyond that is not counted against the ranks.
_STOP_S = 60.0  # for each process to end its rank and tell what became of it


@dataclass(frozen=True)
class Ended:
    """What became of an attempt.

    Attributes:
        outcome: None if ranks had ended before they were given the task.
        lost: those.
        kept: the ranks go on.
        files: by rank, what those left that were ended.
    """

    outcome: Outcome | None
    lost: tuple[int, ...] = ()
    kept: bool = False
    files: dict[int, dict[str, bytes]] = field(default_factory=dict)


class Attempt:
    """One task.

    Args:
        job: The other processes.
        post: The rank of this one.
        grace_s: How long the other ranks may go on once one has failed.
    """

    def __init__(self, job: Job, post: Post, grace_s: float) -> None:
        self._job, self._post, self._grace_s = job, post, grace_s
        self._answers: dict[int, Answer] = {}
        self._failed: dict[int, float] = {}  # the ranks whose failure is known, and when it was seen, by time.time()
        self._vigil: Vigil | None = None

    def run(self, task: bytes, timeout_s: float, watch: Watch | None) -> Ended:
        """Have every rank do it.

        Raises:
            PoolError: A process could not do its part.
            BoardGone: The store is gone.
        """
        order = Do(task, None if watch is None else (watch.blocked_s, watch.computing_s))
        number = self._job.tell(order)
        self._post.begin(order, number)
        started = time.monotonic()
        self._vigil = None if order.limits is None else Vigil(*order.limits, started)
        stall = self._wait(number, started, started + timeout_s)
        lost = tuple(rank for rank, answer in self._answers.items() if answer.lost)
        if lost:
            return Ended(None, lost)
        finished = self._post.finished and len(self._answers) == len(self._job.followers)
        if finished:
            self._answers[OWN] = self._post.answer()
            reports = self._reports(self._answers)
            if all(report.end is RankEnd.REPLIED for report in reports) or self._in_step():
                self._job.tidy()
                return Ended(Outcome(self._post.world, reports, time.monotonic() - started, self._first()), kept=True)
        files, reports = self._end(stall, look=not finished)
        first = self._first()
        if first is None:
            first = next((report.rank for report in reports if report.end is not RankEnd.REPLIED), None)
        return Ended(Outcome(self._post.world, reports, time.monotonic() - started, first), files=files)

    def _in_step(self) -> bool:
        """All ranks failed, and each knows that it waits for no other."""
        return all(answer.reusable for answer in self._answers.values())

    def _wait(self, number: int, started: float, deadline: float) -> Stall | None:
        """Until all have ended or a rank is lost, at most until the deadline or the end of the grace, or a stall."""
        tick = started + TICK_S
        expected = started
        failure_seen: float | None = None
        while True:
            now = time.monotonic()
            if now > expected + _PAUSE_S:
                # This process was stopped, or got no processor, and could not hear that a rank had ended.
                deadline += now - expected
            ticks = now >= tick
            if ticks or self._post.finished:
                complete = self._job.collect(number, self._answers)
                self._require_done()
                if any(answer.lost for answer in self._answers.values()) or (complete and self._post.finished):
                    return None
            sightings = self._look(number) if ticks else {}
            failure_seen = failure_seen or (now if self._failed else None)
            end = deadline if failure_seen is None else min(deadline, failure_seen + self._grace_s * machine.patience())
            if now >= end:
                return None
            if ticks:
                tick = now + TICK_S
                self._job.require_alive()
                # Once a rank has failed the others have their time of grace.
                if self._vigil is not None and failure_seen is None:
                    stall = self._vigil.tick(now, sightings)
                    if stall is not None:
                        return stall
            waiting = time.monotonic()  # what the store took until now is no pause: or the deadline would run away
            expected = max(waiting, min(end, tick))
            if self._post.finished:
                self._job.wait(number, self._answers, expected - waiting)
            self._post.attend(0.0 if self._post.finished else expected - waiting)

    def _look(self, number: int) -> dict[int, Sighting]:
        """What is seen of the ranks that have not ended; notes who has failed."""
        sightings = self._job.sightings(number, self._answers)
        own = self._post.look()
        if not self._post.finished:
            sightings[OWN] = own
        failed = {rank: answer.failed_at for rank, answer in self._answers.items()}
        failed |= {rank: sighting.failed_at for rank, sighting in sightings.items()}
        failed[OWN] = self._post.failed_at
        self._failed |= {rank: at for rank, at in failed.items() if at is not None}
        return sightings

    def _end(self, stall: Stall | None, *, look: bool) -> tuple[dict[int, dict[str, bytes]], tuple[RankReport, ...]]:
        """End every rank. What is said of each is decided before: the others notice when one ends."""
        if self._post.failed_at is not None:
            self._failed[OWN] = self._post.failed_at
        self._note(self._answers)
        doing = {} if self._vigil is None else self._vigil.doing()
        stop = Stop(stall, self._first(), doing, look)
        number = self._job.tell(stop)
        self._answers = {OWN: self._post.stop(stop)}
        self._gather(number, stop)
        self._note(self._answers)
        number = self._job.tell(End())
        self._answers = {OWN: self._post.end()}
        self._gather(number, End())
        self._job.tidy()
        files = {rank: answer.files for rank, answer in self._answers.items() if rank != OWN}
        return files, self._reports(self._answers)

    def _gather(self, number: int, order: Order) -> None:
        """Wait until everybody has carried out an order."""
        deadline = time.monotonic() + _STOP_S * machine.patience()
        while not self._job.collect(number, self._answers):
            self._require_done()
            self._job.wait(number, self._answers, TICK_S)
            self._post.attend(0.0)
            self._job.require_alive()
            if time.monotonic() >= deadline:
                late = next(rank for rank in self._job.followers if rank not in self._answers)
                what = type(order).__name__.lower()
                raise PoolError(f"rank {late}: its process has not obeyed ({what}) for {_STOP_S} s")
        self._require_done()

    def _require_done(self) -> None:
        problems = [(answer.at, answer.problem) for answer in self._answers.values() if answer.problem is not None]
        if problems:
            raise PoolError(min(problems)[1])

    def _note(self, answers: Mapping[int, Answer]) -> None:
        self._failed |= {rank: answer.failed_at for rank, answer in answers.items() if answer.failed_at is not None}

    def _first(self) -> int | None:
        """The rank whose failure was seen first, of those known."""
        return min(self._failed, key=lambda rank: (self._failed[rank], rank), default=None)

    def _reports(self, answers: Mapping[int, Answer]) -> tuple[RankReport, ...]:
        reports = [answers[rank].report for rank in sorted(answers)]
        if any(report is None for report in reports):
            raise PoolError("a process answered without a report of its rank")
        return tuple(report for report in reports if report is not None)


class Vigil:
    """Tells whether a task has stalled: whether no rank gets on, whoever looks after it.

    Args:
        blocked_s: See :class:`~harness.launch.outcome.Watch`.
        computing_s: The same.
        now_s: Of a monotonic clock.
    """

    def __init__(self, blocked_s: float, computing_s: float, now_s: float) -> None:
        self._silence = Silence(blocked_s, computing_s, now_s)
        self._progress: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def tick(self, now_s: float, sightings: Mapping[int, Sighting]) -> Stall | None:
        """To be called every ``TICK_S`` with what is seen of each rank that has not ended."""
        numbers = {rank: sighting.number for rank, sighting in sightings.items()}
        if any(self._numbers.get(rank) == number for rank, number in numbers.items()):
            return None  # one was not looked at since: nothing is known of this time
        self._numbers = numbers
        step_s = self._silence.passed(now_s)
        progress = {rank: sighting.progress for rank, sighting in sightings.items()}
        if progress != self._progress:
            self._progress = progress
            self._silence.broken()
            return None
        if not all(sighting.looked for sighting in sightings.values()):
            return None
        readings = {rank: sighting.reading for rank, sighting in sightings.items() if sighting.reading is not None}
        return self._silence.look(step_s, readings)

    def doing(self) -> dict[int, Activity]:
        """What ranks did in the silence until now, as far as they were looked at."""
        known = {rank: self._silence.doing(rank) for rank in self._progress}
        return {rank: activity for rank, activity in known.items() if activity is not None}
