"""Keeps an event log of a run while it is shown: observers that pass on what they are told, and write it. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TypeVar

from harness.errors import UsageError
from harness.launch.process import default_device
from harness.report import events
from harness.report import result as results
from harness.report.console import ProgressReport, TextConsole, describe
from harness.report.events import EventLog

if TYPE_CHECKING:
    from harness.evaluate import Evaluation
    from harness.explain import Found
    from harness.fuzz.campaign import FuzzOptions, View
    from harness.fuzz.show import FuzzProgress
    from harness.fuzz.state import Finding, RoundRecord
    from harness.museum.campaign import MuseumOptions, WorkerView
    from harness.museum.score import MuseumResult, Outcome
    from harness.museum.show import MuseumProgress
    from harness.report.result import Result
    from harness.runner import CampaignOptions
    from harness.scenario.model import Scenario

SHRINKING_S: Final = 1.0
VIOLATION_S: Final = 2.0
"""A smaller scenario, and the evidence of one, is written down no more often than this."""

_Shown = TypeVar("_Shown", bound=AbstractContextManager[Any])


def open_log(given: str | None) -> EventLog | None:
    """The log that ``--events`` names; None where it is not given.

    Raises:
        UsageError: it cannot be written.
    """
    return None if given is None else EventLog(given, TextConsole(sys.stderr).say)


@contextmanager
def kept(log: EventLog | None) -> Iterator[None]:
    """Inside, a run is written down; an end without a result is too, whatever the reason."""
    if log is None:
        yield
        return
    try:
        yield
    except UsageError as error:
        log.write(events.Ended(at=log.now, exit_code=error.exit_code, reason=str(error)))
        raise
    finally:
        log.close()


def concluded(log: EventLog | None, result: Result | MuseumResult, code: int) -> None:
    """Write the result, and what the process exits with."""
    if log is None:
        return
    if isinstance(result, results.Result):
        log.write(events.Concluded(at=log.now, result=result))
    else:
        log.write(events.Concluded(at=log.now, museum=result))
    log.write(events.Ended(at=log.now, exit_code=code))


class _Recording(Generic[_Shown]):
    def __init__(self, shown: _Shown, log: EventLog) -> None:
        self._shown = shown
        self._log = log

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def _note(self, text: str) -> None:
        self._log.write(events.Note(at=self._log.now, text=text))


class CampaignRecording(_Recording[ProgressReport]):
    """Of `verify` and `replay`; a ``Recorder`` of :mod:`harness.runner`."""

    def __init__(self, shown: ProgressReport, log: EventLog, verb: events.LogVerb, options: CampaignOptions) -> None:
        super().__init__(shown, log)
        log.write(_begun(log, verb, options))
        self._shrunk = self._violated = float("-inf")

    def started(self, options: CampaignOptions) -> None:
        """The campaign begins."""
        self._shown.started(options)

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        """A scenario is about to run."""
        self._shown.example(done, total, world, scenario, rate)

    def shrinking(self, tried: int, best: Scenario) -> None:
        """A failing scenario is being made smaller."""
        self._shown.shrinking(tried, best)
        now = self._log.now
        if now - self._shrunk >= SHRINKING_S:
            self._shrunk = now
            self._log.write(events.Shrinking(at=now, tried=tried, scenario=describe(best)))

    def note(self, text: str) -> None:
        """Something the user should know."""
        self._shown.note(text)
        self._note(text)

    def judged(self, index: int, scenario: Scenario, evaluation: Evaluation) -> None:
        """What came of a scenario."""
        from harness.fuzz.state import scenario_id

        self._log.write(
            events.Judged(
                at=self._log.now,
                index=index,
                id=scenario_id(scenario),
                world=scenario.world,
                scenario=describe(scenario),
                seconds=round(evaluation.seconds, 6),
                conclusion=evaluation.conclusion.value,
            )
        )

    def violated(self, found: Found) -> None:
        """A violation as it is known now."""
        from harness.failures import failure_of

        now = self._log.now
        if now - self._violated >= VIOLATION_S:
            self._violated = now
            self._log.write(events.Violation(at=now, failure=failure_of(found)))


class FuzzRecording(_Recording["FuzzProgress"]):
    """Of `fuzz`; a ``Recorder`` of :mod:`harness.fuzz.campaign`."""

    def __init__(self, shown: FuzzProgress, log: EventLog, options: FuzzOptions) -> None:
        super().__init__(shown, log)
        self._options = options
        log.opening = _begun(log, "fuzz", options.campaign)  # should it end before it has begun

    def began(self, directory: Path, seed: int, workers: int, resumed: int) -> None:
        """It begins, with so many rounds that earlier runs did."""
        self._shown.began(directory, seed, workers, resumed)
        options = self._options
        more = {"directory": str(directory), "workers": workers, "resumed": resumed, "keep_going": options.keep_going}
        more |= {"seconds": options.seconds, "examples": options.examples}
        self._log.write(_begun(self._log, "fuzz", options.campaign, seed=seed, **more))

    def view(self, view: View) -> None:
        """How far it is."""
        self._shown.view(view)

    def note(self, text: str) -> None:
        """Something the user should know."""
        self._shown.note(text)
        self._note(text)

    def round_done(self, record: RoundRecord) -> None:
        """A round is done, and kept."""
        self._log.write(
            events.Round(at=self._log.now, index=record.index, kind=record.kind, examples=record.num_examples)
        )

    def found(self, finding: Finding) -> None:
        """A violation was saved, or saved in a better form."""
        failure = finding.failure
        self._log.write(
            events.Finding(
                at=self._log.now,
                name=finding.name,
                complete=finding.complete,
                property=failure.property,
                stage=failure.stage,
                symptom=failure.symptom,
                scenario=failure.scenario,
                case=failure.case,
            )
        )


class MuseumRecording(_Recording["MuseumProgress"]):
    """Of `museum`; an ``Observer`` of :mod:`harness.museum.campaign`."""

    def __init__(self, shown: MuseumProgress, log: EventLog, options: MuseumOptions) -> None:
        super().__init__(shown, log)
        self._options = options
        log.opening = self._begun(0, 0)  # should it end before it has begun

    def began(self, exhibits: int, workers: int) -> None:
        """So many exhibits are to be run."""
        self._shown.began(exhibits, workers)
        self._log.write(self._begun(exhibits, workers))

    def _begun(self, exhibits: int, workers: int) -> events.Begun:
        options = self._options
        return events.Begun(
            version=events.VERSION,
            at=self._log.now,
            verb="museum",
            subject=None,
            backend=options.backend,
            worlds=options.worlds,
            seed=options.seed,
            versions=results.versions(),
            options={
                "exhibits": exhibits,
                "workers": workers,
                "seconds_per_plant": options.seconds_per_plant,
                "control_examples": options.control_examples,
            },
        )

    def view(self, workers: Sequence[WorkerView]) -> None:
        """What goes on now."""
        self._shown.view(workers)

    def done(self, outcome: Outcome) -> None:
        """What came of an exhibit."""
        self._shown.done(outcome)
        self._log.write(_exhibit(self._log.now, outcome))

    def note(self, text: str) -> None:
        """Something the user should know."""
        self._shown.note(text)
        self._note(text)


def _begun(
    log: EventLog, verb: events.LogVerb, options: CampaignOptions, *, seed: int | None = None, **more: object
) -> events.Begun:
    """The first event of a campaign or a replay."""
    return events.Begun(
        version=events.VERSION,
        at=log.now,
        verb=verb,
        subject=options.subject.given,
        backend=options.backend,
        device=options.device or default_device(options.backend),
        worlds=options.worlds,
        seed=options.seed if seed is None else seed,
        versions=results.versions(),
        options={
            "subject_args": options.subject.args,
            "examples": options.examples,
            "seconds": options.seconds,
            "bucket": options.bucket,
            "timeout_s": options.timeout_s,
            "stall_s": options.stall_s,
            "order": options.order,
            "schedule": options.schedule,
            "report": str(options.report),
            **more,
        },
    )


def _exhibit(now: float, outcome: Outcome) -> events.Exhibit:
    from harness.museum.score import PlantOutcome

    kind: Literal["plant", "control"] = "control"
    said, found_after = "", None
    if isinstance(outcome, PlantOutcome):
        kind = "plant"
        said = "caught" if outcome.caught else "undecided" if outcome.undecided else "missed"
        found_after = None if outcome.found_after is None else round(outcome.found_after.seconds, 4)
    else:
        said = outcome.verdict
    failure = outcome.failure
    return events.Exhibit(
        at=now,
        id=outcome.id,
        kind=kind,
        outcome=said,
        examples=outcome.examples,
        seconds=round(outcome.seconds, 3),
        found_after=found_after,
        told=None if failure is None else f"{failure.property}@{failure.stage}",
        reason=outcome.reason,
    )
