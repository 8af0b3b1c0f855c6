"""A pool whose ranks are spread over the processes that torchrun launched, one for each, on one machine or several.

The process of rank 0 leads: it gives orders, decides when a task has failed and why, and tells what came of it, as
:class:`harness.launch.pool.RankPool` does for ranks that are all its own. The others follow
(:mod:`harness.launch.follow`). Orders and answers go through the launcher's store; no file is shared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from harness.launch import machine
from harness.launch.attempt import OWN, Attempt
from harness.launch.board import BoardGone
from harness.launch.job import Job
from harness.launch.orders import Answer, Disband, Form
from harness.launch.outcome import Outcome, PoolError, Watch
from harness.launch.post import Post, keep_left
from harness.launch.torchrun import Launch
from harness.launch.watchdog import TICK_S

_MAX_GENERATIONS = 3  # of ranks that end before they are given anything to do
# For every process to begin and to start a rank that joins: more than the sum of the limits that each has of its own.
_START_S = 300.0
_LAST_WORDS_S = 1.0  # for what others have to say of why ranks could not start


class SpreadPool:
    """Warm ranks under torchrun, of one world: that of the job. A context manager, to be used from one thread.

    Args:
        launch: This process's place, which is that of rank 0.
        handler, setup, backend, device, preload: As of :class:`harness.launch.pool.RankPool`.
        grace_s: How long the other ranks may go on once one has failed.

    Attributes:
        backend: As given.
        directory: Private; what any rank left behind of a task that failed lies there too.
        incidents: What happened to ranks between tasks, one line each; they were replaced.
    """

    def __init__(
        self,
        launch: Launch,
        handler: str,
        setup: bytes = b"",
        *,
        backend: str = "gloo",
        device: str = "cpu",
        preload: Sequence[str] = (),
        grace_s: float = 2.0,
    ) -> None:
        self.incidents: list[str] = []
        self.backend = backend
        self._launch = launch
        self._order = Form(0, handler, setup, backend, device, list(preload))
        self._grace_s = grace_s
        self._post = Post(launch, self._order)
        self.directory: Path = self._post.directory
        self._job: Job | None = None
        self._generation = 0
        self._formed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def home(self, world: int) -> int:
        """The world by whose number the processes go that run this one: there is one."""
        return world

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        """As :meth:`harness.launch.pool.RankPool.run`.

        Whether a rank gets on is seen in the files that it keeps, on its own machine, in place of ``watch.moved``.

        Raises:
            PoolError: The pool itself could not work.
        """
        if world != self._launch.world:
            raise ValueError(f"world={world}: torchrun started {self._launch.world} processes")
        with self._talking() as job:
            for _ in range(_MAX_GENERATIONS):
                if not self._formed:
                    self._start(job)
                outcome = self._attempt(job, task, timeout_s, watch)
                if outcome is not None:
                    return outcome
        raise PoolError(f"ranks ended {_MAX_GENERATIONS} times before they began: {self.incidents[-1]}")

    def recycle(self, world: int) -> None:
        """End the ranks; the next task starts fresh ones. Between tasks.

        Raises:
            PoolError: The pool itself could not work.
        """
        if self._formed:
            with self._talking() as job:
                self._disband(job)

    def close(self) -> None:
        """End everything, here and where others follow. Idempotent, also after a failure."""
        try:
            self._post.close()
        finally:
            job, self._job = self._job, None
            if job is not None:
                job.close()

    def _start(self, job: Job) -> None:
        """Start the ranks of the next generation and wait until all have joined."""
        self._generation += 1
        number = job.tell(replace(self._order, generation=self._generation))
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + _START_S * machine.patience()
        try:
            self._post.form(self._generation)
            while not (job.collect(number, answers) and self._post.joined):
                if any(answer.problem is not None for answer in answers.values()):
                    break
                if self._post.joined:
                    job.wait(number, answers, TICK_S)
                self._post.attend(0.0 if self._post.joined else TICK_S)
                job.require_alive()
                if time.monotonic() >= deadline:
                    late = next((rank for rank in job.followers if rank not in answers), OWN)
                    raise PoolError(f"rank {late}: its process has not started it for {_START_S:g} s")
        except PoolError as error:
            answers[OWN] = Answer(time.time(), problem=str(error))
            job.wait(number, answers, _LAST_WORDS_S)
            job.collect(number, answers)
        problems = [(answer.at, answer.problem) for answer in answers.values() if answer.problem is not None]
        if problems:
            self._disband(job)
            raise PoolError(min(problems)[1])
        job.tidy()
        self._formed = True

    def _attempt(self, job: Job, task: bytes, timeout_s: float, watch: Watch | None) -> Outcome | None:
        """One task; None if a rank had ended before it came."""
        self._post.attend(0.0)
        lost: tuple[int, ...] = (OWN,) if self._post.lost else ()
        if not lost:
            attempt = Attempt(job, self._post, self._grace_s)
            self._formed = False  # whatever happens meanwhile: the next generation ends who is left in this one
            ended = attempt.run(task, timeout_s, watch)
            self._formed = ended.kept
            if ended.outcome is not None:
                for rank, files in ended.files.items():
                    keep_left(self.directory, rank, files)
                return ended.outcome
            lost = ended.lost
        gone = ", ".join(map(str, lost))
        self.incidents.append(f"world {self._launch.world}: rank {gone} ended after its reply, before the next task")
        self._disband(job)
        return None

    def _disband(self, job: Job) -> None:
        self._formed = False
        job.tell(Disband())
        self._post.disband()

    @contextlib.contextmanager
    def _talking(self) -> Iterator[Job]:
        try:
            if self._job is None:
                self._job = Job(self._launch)
            yield self._job
        except BoardGone as error:
            self._formed = False
            raise PoolError(str(error)) from error
