"""The coordinator of a fuzz campaign: hands rounds to workers, keeps what is done, and ends in time.

This process draws nothing, runs nothing and imports no torch: it waits on its workers, so that a time-out, a Ctrl-C and
a worker that dies are always served.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from harness.errors import UsageError
from harness.fuzz import rounds, state
from harness.fuzz.messages import (
    Done,
    Found,
    Gone,
    Key,
    Note,
    Progress,
    Ready,
    Report,
    RunRound,
    RunSaved,
    Setup,
    Slow,
    Trouble,
    decode_report,
)
from harness.fuzz.schedule import Schedule
from harness.fuzz.state import Finding, Identity, RoundRecord, State
from harness.launch import crew as crews
from harness.report import result as results
from harness.report.result import Failure, FuzzSummary, Result, Slowest
from harness.runner import FULL_CAMPAIGN, CampaignOptions, result_of, undecided_reason
from harness.scenario.model import CONTRACT, System
from harness.scenario.systems import Space, required
from harness.subjects.builtin import known_system
from harness.tally import Tally

TICK_S = 0.2
"""How often the workers' state is shown, at least."""

LATE_S = 2.0
"""After the end of its time a worker may finish what it is running; then it is told to end."""

GRACE_S = 6.0
"""After it was told to end a worker may take so long to report; then it is killed: what it found is saved already."""

MAX_LOSSES = 3
"""So many workers may be lost one after the other, with no round done in between."""


@dataclass(frozen=True)
class FuzzOptions:
    """What to fuzz and how long.

    Attributes:
        campaign: what is fuzzed; its ``examples`` and ``seconds`` are not looked at.
        seed: what was asked for; None: the seed of the campaign that is resumed, else ``campaign.seed``.
        seconds: upper bound of the whole; None: none.
        examples: how many scenarios in all, those of earlier runs counted; None: as many as there is time for.
        workers: how many processes run rounds.
        directory: where the campaign is kept; None: a place of its own in the current directory.
        report: where cases are saved; None: in the campaign's directory.
        fresh: begin again at the first round.
        keep_going: go on after a violation.
        merge: directories of other campaigns whose findings and examples are taken over.
    """

    campaign: CampaignOptions
    seed: int | None
    seconds: float | None
    examples: int | None
    workers: int
    directory: Path | None = None
    report: Path | None = None
    fresh: bool = False
    keep_going: bool = False
    merge: tuple[Path, ...] = ()


@dataclass(frozen=True)
class WorkerView:
    """One worker: the round it runs ("" for none), scenarios of it so far, these per second, and what it does now."""

    number: int
    round: str
    examples: int
    rate: float
    doing: str


@dataclass(frozen=True)
class View:
    """How far the campaign is, for people.

    Attributes:
        rounds: done, with those of earlier runs.
        examples: scenarios, with those of earlier runs; ``rate`` of this run, in examples per second.
        num_reached: how many of the required situations; ``missing``: the others.
        left_s: of its time; None: no bound.
    """

    workers: tuple[WorkerView, ...]
    rounds: int
    examples: int
    rate: float
    num_reached: int
    num_required: int
    missing: tuple[str, ...]
    slowest: Slow | None
    margin: float | None
    findings: int
    left_s: float | None


class Observer(Protocol):
    """Told what a campaign does, for display."""

    def began(self, directory: Path, seed: int, workers: int, resumed: int) -> None:
        """It begins, with so many rounds that earlier runs did."""

    def view(self, view: View) -> None:
        """How far it is."""

    def note(self, text: str) -> None:
        """Something the user should know."""


@runtime_checkable
class Recorder(Protocol):
    """An observer that is told too what is done and found, to keep it."""

    def round_done(self, record: RoundRecord) -> None:
        """A round is done, and kept."""

    def found(self, finding: Finding) -> None:
        """A violation was saved, or saved in a better form."""


@dataclass
class _Doing:
    """What a worker carries out: a round of this ``kind``, or (``round`` None) what was saved; its last word on it."""

    kind: str
    round: int | None = None
    limit: int = 0
    progress: Progress | None = None


Worker = crews.Worker[_Doing]
Crew = crews.Crew[_Doing, Report]


def identity_of(options: CampaignOptions) -> Identity:
    """What makes this campaign the same as another."""
    return Identity(
        subject=options.subject.absolute,
        args=options.subject.args,
        config=options.subject.config,
        worlds=options.worlds,
        backend=options.backend,
        order=options.order,
        schedule=options.schedule,
        seed=options.seed,
        code=state.code_of(options.subject),
        versions=results.versions(),
    )


def run_fuzz(options: FuzzOptions, observer: Observer) -> Result:
    """Fuzz until the first violation (or on and on), the number of examples, or the time is up.

    Raises:
        UsageError: the subject cannot be used, or the directory.
    """
    began = time.monotonic()
    identity = identity_of(options.campaign)
    directory = options.directory or state.default_directory(identity)
    with state.opened(directory, identity, seed=options.seed, fresh=options.fresh) as kept:
        for path in kept.damaged:
            observer.note(f"{path}: cannot be read: of what was found there only the case is left, in {kept.cases}")
        if options.merge:
            num_rounds, num_findings = state.merge(kept, options.merge)
            num_examples = sum(
                rounds.merge(other / kept.examples.name, kept.examples)
                for other in options.merge
                if (other / kept.examples.name).is_dir()
            )
            observer.note(f"merged: {num_rounds} rounds, {num_findings} findings, {num_examples} kept examples")
        return _Campaign(options, kept, observer, began).run()


@dataclass
class _Outcome:
    """What ends a campaign beside its rounds."""

    reason: str | None = None
    interrupted: bool = False
    losses: int = 0
    late: bool = False
    tally: Tally = field(default_factory=Tally)  # of rounds of which only a part was run
    started: int = 0


class _Campaign:
    def __init__(self, options: FuzzOptions, kept: State, observer: Observer, began: float) -> None:
        self.state = kept
        self.observer = observer
        self.recorder = observer if isinstance(observer, Recorder) else None
        self.options = options
        self.campaign = replace(options.campaign, seed=kept.identity.seed, report=options.report or kept.cases)
        self.began = began
        self.deadline = None if options.seconds is None else began + options.seconds
        self.resumed = len(kept.rounds)
        self.known = {finding.name: finding for finding in kept.findings()}
        unfinished = [each.round for each in self.known.values() if not each.complete and each.round is not None]
        self.saved = tuple(finding.name for finding in self.known.values() if finding.complete)
        # What is kept in the database is not as small as the rounds in which it was found can make it.
        self.database = not unfinished and kept.examples.is_dir()
        self.saved_tried = not self.saved and not self.database
        self.saved_begun = False
        self._round = functools.lru_cache(maxsize=1024)(functools.partial(rounds.round_of, kept.identity.seed))
        # Of a class of the user's not known until a worker says what it is.
        self.system: System = known_system(self.campaign.subject.absolute) or "zero_master"
        self.schedule = Schedule(kept.rounds, self._size, options.examples, tuple(unfinished))
        self.done = _total(kept.rounds.values())
        self.slowest = _slowest(kept.rounds.values())
        self.before = self.done.num_run
        self.outcome = _Outcome()
        self.required: tuple[str, ...] = ()
        self.extension = CONTRACT
        self.found: list[str] = []  # the names of what was found, or found again, by this run
        self.shown = 0.0

    def run(self) -> Result:
        self.observer.began(self.state.directory, self.campaign.seed, self._num_workers(), self.resumed)
        with Crew("harness.fuzz.worker", decode_report) as crew:
            try:
                self._work(crew)
            except KeyboardInterrupt:
                self.outcome.interrupted = True
                self.observer.note("interrupted: waiting for what the workers have")
            self._wind_down(crew)
        return self._result()

    # --- what goes on -------------------------------------------------------------------------------------------------

    def _work(self, crew: Crew) -> None:
        for number in range(self._num_workers()):
            self._start(crew, number)
        while not self._over(crew):
            for worker, report in crew.hear(TICK_S):
                if report is None:
                    self._lost(crew, worker)
                else:
                    self._heard(worker, report)
            self._hand_out(crew)
            self._show(crew)

    def _num_workers(self) -> int:
        """No more than there are rounds to run at once, at the most; one, to try what was found before."""
        examples = self.options.examples
        if examples is None:
            return self.options.workers
        return max(1, min(self.options.workers, -(-examples // self._size(0))))

    def _over(self, crew: Crew) -> bool:
        if not crew.workers and self.outcome.reason is None:
            self.outcome.reason = "no worker is left"
        if self.outcome.reason is not None:
            return True
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.outcome.late = True
            return True
        if not self.options.keep_going and any(self.known[name].complete for name in self.found):
            return True
        return self.saved_tried and self.schedule.finished

    def _of_round(self, name: str, index: int) -> bool:
        finding = self.known.get(name)
        return finding is not None and finding.round == index and not finding.complete

    def _start(self, crew: Crew, number: int) -> None:
        options, campaign = self.options, self.campaign
        self.outcome.started += 1
        setup = Setup(
            parent=os.getpid(),
            directory=os.fspath(self.state.directory.absolute()),
            report=os.fspath(campaign.report),
            given=campaign.subject.given,
            absolute=campaign.subject.absolute,
            args=campaign.subject.args,
            config=campaign.subject.config,
            worlds=campaign.worlds,
            backend=campaign.backend,
            order=campaign.order,
            schedule=campaign.schedule,
            seed=campaign.seed,
            timeout_s=campaign.timeout_s,
            stall_s=campaign.stall_s,
            shrink_s=campaign.shrink_s,
            deadline=self.deadline,
            keep_going=options.keep_going,
            canaries=self.outcome.started == 1 and (options.examples or math.inf) >= FULL_CAMPAIGN,
        )
        try:
            crew.start(number, self.state.log(number), setup)
        except OSError as error:
            if not crew.workers:
                self.outcome.reason = f"no worker could be started: {error.strerror}"
            self.observer.note(f"worker {number} could not be started: {error.strerror}")

    def _lost(self, crew: Crew, worker: Worker) -> None:
        """A worker has ended by itself; what it was doing is done again."""
        doing = worker.task
        if doing is not None and doing.round is not None:
            lost = [name for name in self.found if self._of_round(name, doing.round)]
            self.schedule.ended(doing.round, urgent=bool(lost))
            self.found = [name for name in self.found if name not in lost]
        elif doing is not None:
            self.saved_begun = False
        if self.outcome.reason is not None:
            return
        self.outcome.losses += 1
        said = worker.how_it_ended()
        if self.outcome.losses > MAX_LOSSES:
            self.outcome.reason = f"{self.outcome.losses} workers ended before they had done a round; the last: {said}"
            return
        self.observer.note(f"{said}; another takes its place")
        self._start(crew, worker.number)

    def _heard(self, worker: Worker, report: Report) -> None:
        match report:
            case Ready(system=system, extension=extension):
                wanted = required(self.campaign.worlds, Space(system, self.campaign.bucket, extension))
                self.required = tuple(situation.value for situation in wanted)
                self.system, self.extension, worker.ready = system, extension, True
            case Progress():
                if worker.task is not None:
                    worker.task.progress = report
            case Done():
                self._done(worker, report)
            case Found(name=name):
                self._found(name)
            case Gone(name=name):
                self.state.forget(name)
                self.known.pop(name, None)
                self.found = [each for each in self.found if each != name]
            case Note(text=text):
                self.observer.note(text)
            case Trouble(kind="usage", message=message):
                raise UsageError(message)
            case Trouble(kind="broken", message=message):
                self.outcome.reason = message
            case Trouble(message=message):
                worker.ready, worker.trouble = False, message

    def _done(self, worker: Worker, done: Done) -> None:
        doing, worker.task = worker.task, None
        if done.round is None or doing is None:
            self.saved_tried = True
            return
        self.schedule.ended(done.round)
        if not done.whole:
            self.outcome.tally.merge(done.counts.tally())
            return
        self.outcome.losses = 0
        record = RoundRecord(
            index=done.round,
            kind=doing.kind,
            limit=doing.limit,
            num_examples=len(done.ids),
            counts=done.counts,
            slowest=done.slowest,
        )
        again = done.round in self.state.rounds
        try:
            self.state.keep(record, done.ids)
        except OSError as error:
            self.outcome.reason = f"{self.state.directory}: a round could not be kept: {error.strerror}"
        if self.recorder is not None:
            self.recorder.round_done(record)
        if again:  # it had been cut short
            self.done = _total(self.state.rounds.values())
        else:
            self.done.merge(done.counts.tally())
        self.slowest = _slower(self.slowest, done.slowest)
        # What an earlier run saw in this round and this one did not is tried by itself: it may come and go.
        missed = [name for name in self.known if self._of_round(name, done.round) and name not in self.found]
        if missed:
            self.saved, self.database = tuple(missed), False
            self.saved_begun = self.saved_tried = False

    def _found(self, name: str) -> None:
        finding = state.load_finding(self.state.directory, name)
        if finding is None:
            return
        if name not in self.found:
            self.found.append(name)
            self.observer.note(
                f"violated: {finding.failure.property} at stage {finding.failure.stage}, in {finding.failure.scenario}"
            )
        self.known[name] = finding
        if self.recorder is not None:
            self.recorder.found(finding)

    def _hand_out(self, crew: Crew) -> None:
        for worker in crew.workers:
            if not worker.ready or worker.task is not None:
                continue
            if self._first_violation():
                return  # the others go on only until it is explained
            if not self.saved_tried:
                if not self.saved_begun:
                    self.saved_begun = True
                    worker.order(RunSaved(self.saved, self.database), _Doing("saved"))
                    continue
                if not self.options.keep_going:
                    return  # what was found before is told before anything is searched for
            due = self.schedule.next()
            if due is None:
                return
            known = tuple({key for finding in self._here() if finding.complete for key in _keys(finding)})
            order = RunRound(index=due.index, limit=due.limit, known=known)
            worker.order(order, _Doing(self._round(due.index, self.system).kind.value, due.index, due.limit))

    def _here(self) -> list[Finding]:
        """What is known to be wrong with this subject, as it is now."""
        return [finding for finding in self.known.values() if not finding.foreign]

    def _first_violation(self) -> bool:
        """Whether a violation has been seen that ends the campaign once it is explained."""
        return not self.options.keep_going and bool(self.found)

    def _wind_down(self, crew: Crew) -> None:
        """Hear what the workers have to say in the end; one that does not say it in time is killed."""
        now = time.monotonic()
        told_at = now + LATE_S if self.outcome.late else now
        killed_at = told_at + GRACE_S
        told = False
        try:
            while any(worker.task for worker in crew.workers) and time.monotonic() < killed_at:
                if not told and time.monotonic() >= told_at:
                    told = True
                    for worker in crew.workers:
                        crew.interrupt(worker)
                for worker, report in crew.hear(TICK_S):
                    if report is not None and not isinstance(report, Ready | Trouble):
                        self._heard(worker, report)
            if any(worker.task for worker in crew.workers):
                crew.kill_all()
        except KeyboardInterrupt:
            self.outcome.interrupted = True
            crew.kill_all()

    # --- what is shown and told ---------------------------------------------------------------------------------------

    def _size(self, index: int) -> int:
        return self._round(index).size

    def _tally(self) -> Tally:
        tally = self.done.plain().tally()
        tally.merge(self.outcome.tally)
        tally.system, tally.extension = self.system, self.extension
        return tally

    def _show(self, crew: Crew) -> None:
        now = time.monotonic()
        if now - self.shown < TICK_S:
            return
        self.shown = now
        tally, rows, slowest = self._tally(), [], self.slowest
        for worker in crew.workers:
            doing, seconds = worker.task, max(now - worker.began, 1e-9)
            if doing is None:
                rows.append(WorkerView(worker.number, "", 0, 0.0, "" if worker.ready else "starting"))
                continue
            progress, count = doing.progress, 0
            if progress is not None:
                part = progress.counts.tally()
                count = part.num_run + part.discarded
                if doing.round is not None:
                    tally.merge(part)
                slowest = _slower(slowest, progress.slowest)
            what = doing.kind if doing.round is None else f"{doing.kind} {doing.round}"
            rows.append(WorkerView(worker.number, what, count, count / seconds, progress.doing if progress else ""))
        reached = [name for name in self.required if tally.reached[name]]
        self.observer.view(
            View(
                workers=tuple(rows),
                rounds=len(self.state.rounds),
                examples=tally.num_run,
                rate=(tally.num_run - self.before) / max(now - self.began, 1e-9),
                num_reached=len(reached),
                num_required=len(self.required),
                missing=tuple(name for name in self.required if not tally.reached[name]),
                slowest=slowest,
                margin=tally.margin,
                findings=len(_distinct(self._here())),
                left_s=None if self.deadline is None else max(self.deadline - now, 0.0),
            )
        )

    def _settled(self) -> list[Finding]:
        """One finding of each kind; of the others what was not made smaller is forgotten, with its case."""
        findings = [finding for finding in self.state.findings() if not finding.foreign]
        distinct = _distinct(findings)
        for finding in findings:
            if finding not in distinct and not finding.complete:
                self.state.forget(finding.name)
                if finding.failure.case is not None:
                    Path(finding.failure.case).unlink(missing_ok=True)
        return distinct

    def _result(self) -> Result:
        tally = self._tally()
        findings = self._settled()
        reason = self.outcome.reason
        if not findings and reason is None and not self.outcome.interrupted:
            reason = undecided_reason(self.campaign, tally)
            if self.outcome.late and tally.num_run == 0:
                reason = "no worker had run an example when the time was up: give more --minutes"
        result = result_of(self.campaign, tally, None, reason, self.outcome.interrupted)
        seconds = time.monotonic() - self.began
        slowest = self.slowest
        failures = tuple(_told(finding) for finding in findings)
        return msgspec.structs.replace(
            result,
            verb="fuzz",
            verdict="violated" if findings else result.verdict,
            failure=failures[0] if failures else None,
            seconds=seconds,
            examples_per_second=max(tally.num_run - self.before, 0) / max(seconds, 1e-9),
            fuzz=FuzzSummary(
                rounds=len(self.state.rounds),
                workers=self._num_workers(),
                resumed=self.resumed,
                ids_digest=self.state.ids_digest,
                findings=failures,
                slowest=None
                if slowest is None
                else Slowest(id=slowest.id, scenario=slowest.scenario, seconds=slowest.seconds),
                required=sum(tally.reached[name] > 0 or not tally.declined[name] for name in self.required),
                directory=os.fspath(self.state.directory),
            ),
        )


def _told(finding: Finding) -> Failure:
    if finding.complete:
        return finding.failure
    note = "the case may not be the smallest: its shrinking goes on when `fuzz` is started again"
    return msgspec.structs.replace(finding.failure, message=f"{finding.failure.message} ({note})", cut_short=note)


def _keys(finding: Finding) -> tuple[Key, Key]:
    return finding.seen, finding.key


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    """One of each kind: what is as small as it gets before what is not, the earlier round before the later."""
    first: list[Finding] = []
    known: set[Key] = set()
    ordered = sorted(findings, key=lambda each: not each.complete)
    for finding in sorted(ordered, key=lambda each: (not each.complete, each.failure.symptom is None)):
        if finding.key in known or (not finding.complete and finding.seen in known):
            continue
        if any(_alike(finding, other) for other in first):
            continue
        first.append(finding)
        known |= set(_keys(finding))
    return [finding for finding in ordered if finding in first]


def _alike(one: Finding, other: Finding) -> bool:
    """Whether two have come to the same smallest case, and no symptom tells them apart."""
    mine, theirs = one.failure, other.failure
    same = (mine.property, mine.stage, mine.scenario) == (theirs.property, theirs.stage, theirs.scenario)
    return same and mine.scenario is not None and (mine.symptom is None or theirs.symptom is None)


def _total(records: Iterable[RoundRecord]) -> Tally:
    total = Tally()
    for record in records:
        total.merge(record.counts.tally())
    return total


def _slowest(records: Iterable[RoundRecord]) -> Slow | None:
    found: Slow | None = None
    for record in records:
        found = _slower(found, record.slowest)
    return found


def _slower(one: Slow | None, other: Slow | None) -> Slow | None:
    known = [each for each in (one, other) if each is not None]
    return max(known, key=lambda each: each.seconds, default=None)
