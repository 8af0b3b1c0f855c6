"""The coordinator of a museum: hands exhibits to workers, hears what came of each, and works out the score.

This process runs nothing itself and imports no torch: it waits on its workers, so that a Ctrl-C, a worker that dies and
one that does not come to an end are always served.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from harness.ending import raise_if_interrupted
from harness.errors import UsageError
from harness.faults.museum.catalogue import LEFT_OUT
from harness.faults.museum.exhibit import Control, Plant
from harness.launch import crew as crews
from harness.museum.messages import Done, Progress, Ready, Report, RunCampaign, Setup, Trouble, decode_report
from harness.museum.score import (
    ControlOutcome,
    MuseumResult,
    Outcome,
    PlantOutcome,
    control_outcome,
    not_judged,
    plant_outcome,
    summarise,
    verdict_of,
)
from harness.report import result as results
from harness.report.result import Result
from harness.scenario import codec
from harness.scenario.model import Scenario, System
from harness.scenario.systems import Space, required

WORLDS: Final = (1, 2, 3, 4)
"""As of an ordinary campaign."""

CONTROL_EXAMPLES: Final = 100

NO_BOUND: Final = 2**31
"""Examples of a plant's campaign: its time alone ends it."""

SLOWNESS: Final[dict[System, int]] = {"zero_master": 1, "muon": 3, "strategy": 3}
"""A scenario of this system takes so many times as long, and its exhibits get as many times the seconds."""

TICK_S: Final = 0.2
GRACE_S: Final = 10.0
"""After a Ctrl-C a worker may take so long to say what it has; then it is killed."""

OVERDUE_S: Final = 300.0
"""So long after the end of its time a campaign that has not ended is ended with its worker: the last scenario may hang,
and what hangs is known after a while that depends on its size."""

MAX_TRIES: Final = 2
"""So often an exhibit is begun, should the worker that runs it die."""

MAX_LOSSES: Final = 3
"""So many workers may end before they could be given anything, one after the other."""


@dataclass(frozen=True, kw_only=True)
class MuseumOptions:
    """What to run.

    Attributes:
        plants, controls: one campaign of its own each, in this order.
        seed: of the whole; each exhibit's own is made from it and its id.
        seconds_per_plant: no scenario of a campaign's search begins later; what was found is explained for a while
            longer. Of a slower system three times as many, see :data:`SLOWNESS`.
        control_examples: scenarios of a control, at most.
        workers: how many processes run campaigns.
        report: where failing cases are saved.
    """

    plants: tuple[Plant, ...]
    controls: tuple[Control, ...]
    seed: int
    seconds_per_plant: float
    workers: int
    report: Path
    backend: str = "sim"
    worlds: tuple[int, ...] = WORLDS
    control_examples: int = CONTROL_EXAMPLES


@dataclass(frozen=True)
class WorkerView:
    """One worker: what it runs ("" for nothing), scenarios of it so far, for how long, and what it does now."""

    number: int
    exhibit: str
    examples: int
    seconds: float
    doing: str


class Observer(Protocol):
    """Told what a museum does, for display."""

    def began(self, exhibits: int, workers: int) -> None:
        """So many exhibits are to be run."""

    def view(self, workers: Sequence[WorkerView]) -> None:
        """What goes on now."""

    def done(self, outcome: Outcome) -> None:
        """What came of an exhibit."""

    def note(self, text: str) -> None:
        """Something the user should know."""


@dataclass
class _Doing:
    """What a worker runs, and its last word on it."""

    exhibit: Plant | Control
    progress: Progress | None = None


Worker = crews.Worker[_Doing]
Crew = crews.Crew[_Doing, Report]


def seed_of(seed: int, exhibit: str) -> int:
    """The seed of an exhibit's own campaign: whichever others are run beside it."""
    digest = hashlib.blake2b(f"{seed} {exhibit}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def run_museum(options: MuseumOptions, observer: Observer) -> MuseumResult:
    """Run a campaign over each exhibit, several at a time, and say what came of each."""
    with tempfile.TemporaryDirectory(prefix="zero2-museum-") as logs:
        return _Museum(options, observer, Path(logs)).run()


@dataclass
class _State:
    """What is known so far. ``losses``: workers that ended before they could be given anything, one after the other."""

    waiting: deque[Plant | Control]
    tries: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    losses: int = 0
    reason: str | None = None
    interrupted: bool = False


class _Museum:
    def __init__(self, options: MuseumOptions, observer: Observer, logs: Path) -> None:
        self.options = options
        self.observer = observer
        self.logs = logs
        self.began = time.monotonic()
        self.state = _State(deque((*options.plants, *options.controls)))
        self.num_workers = max(1, min(options.workers, len(self.state.waiting)))
        self.situations: dict[System, int] = {
            system: len(required(options.worlds, Space(system))) for system in SLOWNESS
        }

    def run(self) -> MuseumResult:
        state = self.state
        if not state.waiting:
            state.reason = "there is nothing to run"
            return self._result()
        self.observer.began(len(state.waiting), self.num_workers)
        with Crew("harness.museum.worker", decode_report) as crew:
            try:
                self._work(crew)
            except KeyboardInterrupt:
                state.interrupted = True
                self.observer.note("interrupted: waiting for what the workers have")
                self._wind_down(crew)
        return self._result()

    # --- what goes on -------------------------------------------------------------------------------------------------

    def _work(self, crew: Crew) -> None:
        for number in range(self.num_workers):
            self._start(crew, number)
        while self.state.reason is None and (self.state.waiting or self._busy(crew)):
            raise_if_interrupted()
            for worker, report in crew.hear(TICK_S):
                if report is None:
                    self._lost(crew, worker)
                else:
                    self._heard(worker, report)
            self._hand_out(crew)
            self._end_overdue(crew)
            self.observer.view([_view(worker) for worker in crew.workers])

    def _busy(self, crew: Crew) -> bool:
        return any(worker.task is not None for worker in crew.workers)

    def _start(self, crew: Crew, number: int) -> None:
        options = self.options
        setup = Setup(
            parent=os.getpid(), backend=options.backend, worlds=options.worlds, report=os.fspath(options.report)
        )
        try:
            crew.start(number, self.logs / f"worker-{number}.log", setup)
        except OSError as error:
            if not crew.workers:
                self.state.reason = f"no worker could be started: {error.strerror}"
            self.observer.note(f"worker {number} could not be started: {error.strerror}")

    def _hand_out(self, crew: Crew) -> None:
        for worker in crew.workers:
            if worker.ready and worker.task is None and self.state.waiting:
                exhibit = self.state.waiting.popleft()
                self.state.tries[exhibit.id] += 1
                worker.order(self._order(exhibit), _Doing(exhibit))

    def _order(self, exhibit: Plant | Control) -> RunCampaign:
        options = self.options
        return RunCampaign(
            given=exhibit.subject,
            absolute=exhibit.target,
            seed=seed_of(options.seed, exhibit.id),
            examples=options.control_examples if isinstance(exhibit, Control) else NO_BOUND,
            seconds=self._seconds(exhibit),
        )

    def _seconds(self, exhibit: Plant | Control) -> float:
        return self.options.seconds_per_plant * SLOWNESS[exhibit.system]

    def _end_overdue(self, crew: Crew) -> None:
        for worker in crew.workers:
            if worker.task is None:
                continue
            limit_s = self._seconds(worker.task.exhibit) + OVERDUE_S
            if time.monotonic() - worker.began > limit_s:
                worker.trouble = f"it had not ended {limit_s:g} s after {worker.task.exhibit.id} was begun"
                worker.process.kill()

    def _lost(self, crew: Crew, worker: Worker) -> None:
        """A worker has ended by itself; what it ran is run once more, by another."""
        state, said = self.state, worker.how_it_ended()
        if worker.task is None:
            state.losses += 1
            if state.losses >= MAX_LOSSES and state.reason is None:
                state.reason = f"{state.losses} workers ended before they could run anything; the last: {said}"
        else:
            exhibit, tries = worker.task.exhibit, state.tries[worker.task.exhibit.id]
            if tries < MAX_TRIES:
                state.waiting.appendleft(exhibit)
            else:
                seed = seed_of(self.options.seed, exhibit.id)
                self._keep(not_judged(exhibit, seed, f"{tries} workers died of it; the last: {said}"))
        if state.waiting and state.reason is None:
            self.observer.note(f"{said}; another takes its place")
            self._start(crew, worker.number)

    def _heard(self, worker: Worker, report: Report) -> None:
        match report:
            case Ready():
                worker.ready, self.state.losses = True, 0
            case Progress():
                if worker.task is not None:
                    worker.task.progress = report
            case Done():
                if worker.task is not None:
                    self._done(worker.task.exhibit, report)
                worker.task = None
            case Trouble(kind="broken", message=message):
                self.state.reason = message
            case Trouble(message=message):
                worker.ready, worker.trouble = False, message

    def _done(self, exhibit: Plant | Control, done: Done) -> None:
        seed, result = seed_of(self.options.seed, exhibit.id), done.result
        if result is None:
            self._keep(not_judged(exhibit, seed, done.problem or "no result"))
        elif not result.interrupted or result.verdict == "violated":
            if isinstance(exhibit, Plant):
                self._keep(plant_outcome(exhibit, seed, result, _case_of(result), self.situations[result.system]))
            else:
                self._keep(control_outcome(exhibit, seed, result, self.situations[result.system]))

    def _keep(self, outcome: Outcome) -> None:
        self.state.outcomes[outcome.id] = outcome
        self.observer.done(outcome)

    def _wind_down(self, crew: Crew) -> None:
        """Hear what the workers have to say in the end; one that does not say it in time is killed."""
        deadline = time.monotonic() + GRACE_S
        try:
            for worker in crew.workers:
                crew.interrupt(worker)
            while self._busy(crew) and time.monotonic() < deadline:
                for worker, report in crew.hear(TICK_S):
                    if report is None:
                        worker.task = None
                    else:
                        self._heard(worker, report)
            if self._busy(crew):
                crew.kill_all()
        except KeyboardInterrupt:
            crew.kill_all()

    # --- what is told -------------------------------------------------------------------------------------------------

    def _result(self) -> MuseumResult:
        options, state = self.options, self.state
        outcomes = self._outcomes((*options.plants, *options.controls))
        plants = [each for each in outcomes if isinstance(each, PlantOutcome)]
        controls = [each for each in outcomes if isinstance(each, ControlOutcome)]
        summary = summarise(plants, controls, len(LEFT_OUT))
        if state.reason is None and not state.interrupted and not any(each.examples for each in outcomes):
            # Nor does that count as missed: nothing was looked at.
            state.reason = _why_nothing_ran(outcomes)
        not_run = len(options.plants) + len(options.controls) - len(state.outcomes)
        complete = not state.interrupted and not not_run
        # With a reason nothing is to be trusted: what must be caught was not, or no worker lives.
        verdict = verdict_of(summary, complete=complete) if state.reason is None else "unknown"
        return MuseumResult(
            verdict=verdict,
            backend=options.backend,
            worlds=options.worlds,
            seed=options.seed,
            workers=self.num_workers,
            seconds_per_plant=options.seconds_per_plant,
            examples_per_control=options.control_examples,
            seconds=time.monotonic() - self.began,
            summary=summary,
            plants=tuple(plants),
            controls=tuple(controls),
            not_run=not_run,
            left_out=LEFT_OUT,
            report=os.fspath(options.report),
            versions=results.versions(),
            reason=state.reason,
            interrupted=state.interrupted,
        )

    def _outcomes(self, exhibits: Sequence[Plant | Control]) -> list[Outcome]:
        return [self.state.outcomes[each.id] for each in exhibits if each.id in self.state.outcomes]


def _why_nothing_ran(outcomes: Sequence[Outcome]) -> str:
    said = next((outcome.reason for outcome in outcomes if outcome.reason), "nothing more is known")
    return f"no scenario was run of any exhibit: {said}"


def _view(worker: Worker) -> WorkerView:
    if worker.task is None:
        return WorkerView(worker.number, "", 0, 0.0, "" if worker.ready else "starting")
    progress, seconds = worker.task.progress, time.monotonic() - worker.began
    examples, doing = (0, "") if progress is None else (progress.examples, progress.doing)
    return WorkerView(worker.number, worker.task.exhibit.id, examples, seconds, doing)


def _case_of(result: Result) -> Scenario | None:
    """The scenario of the case that a campaign saved; None if there is none."""
    if result.failure is None or result.failure.case is None:
        return None
    try:
        return codec.load(Path(result.failure.case)).scenario
    except UsageError:
        return None  # the failure's own message says that it could not be saved
