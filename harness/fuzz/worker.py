"""A worker of a fuzz campaign: a process with ranks of its own that draws and runs the rounds it is told to.

It ends when the campaign's process does, when told to (SIGINT: what it has seen so far is reported), or when something
is the matter with the harness or the subject, which it says first. It imports no subject.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from harness.canary import BrokenHarnessError, check_canaries
from harness.ending import without_traceback
from harness.errors import UsageError, exception_text
from harness.evaluate import Evaluator, UndecidedError, start_pool
from harness.explain import REPLAYS
from harness.fuzz import messages, rounds, state
from harness.fuzz.examiner import CampaignExaminer, Errand, OutOfTime, RoundOver
from harness.fuzz.messages import Done, Found, Gone, Note, Progress, Ready, Report, RunRound, RunSaved, Setup, Trouble
from harness.launch import crew, process
from harness.launch.wire import Channel
from harness.runner import CampaignOptions
from harness.scenario import codec
from harness.scenario.model import Scenario, beyond
from harness.subjects.source import SubjectSource
from harness.verdict import Property

_REPORT_EVERY_S = 0.25


def main(descriptor: int) -> None:
    """Do what arrives on this socket until it is closed."""
    crew.serve(descriptor, "zero2-fuzz", _serve)


def _serve(channel: Channel) -> None:
    setup = _next(channel)
    if not isinstance(setup, Setup):
        return
    process.die_with_parent(setup.parent)
    line = _Line(channel)
    try:
        with start_pool(setup.backend) as pool:
            evaluator = Evaluator(
                _subject(setup),
                pool,
                timeout_s=setup.timeout_s,
                stall_s=setup.stall_s,
                order=setup.order,
                schedule=setup.schedule,
            )
            evaluator.prepare(setup.worlds[0])
            if setup.canaries:
                check_canaries(pool, setup.worlds[0])
            line.say(Ready(system=evaluator.system, extension=evaluator.extension))
            _Worker(setup, evaluator, line).obey(channel)
    except UsageError as error:
        line.say(Trouble("usage", str(error)))
    except BrokenHarnessError as error:
        line.say(Trouble("broken", without_traceback(str(error))))
    except UndecidedError as error:
        line.say(Trouble("undecided", without_traceback(str(error))))
    except Exception as error:
        line.say(Trouble("undecided", f"internal error: {exception_text(error)}"))
        raise  # its traceback goes to the worker's log


def _next(channel: Channel) -> messages.Order | None:
    frame = channel.next_frame()
    return None if frame is None else messages.decode_order(frame.payload)


class _Line:
    """What is told to the campaign's process; a ``Listener`` of the examiner."""

    def __init__(self, channel: Channel) -> None:
        self.examiner: CampaignExaminer | None = None
        self._channel = channel
        self._said = 0.0

    def say(self, report: Report) -> None:
        crew.say(self._channel, report)

    def progress(self, doing: str) -> None:
        now = time.monotonic()
        if self.examiner is not None and now - self._said >= _REPORT_EVERY_S:
            self._said = now
            self.say(Progress(doing=doing, counts=self.examiner.tally.plain(), slowest=self.examiner.slowest))

    def found(self, finding: state.Finding) -> None:
        self.say(Found(finding.name, finding.complete))

    def note(self, text: str) -> None:
        self.say(Note(text))


class _Worker:
    def __init__(self, setup: Setup, evaluator: Evaluator, line: _Line) -> None:
        self._setup = setup
        self._evaluator = evaluator
        self._line = line
        self._directory = Path(setup.directory)
        self._database = self._directory / state.EXAMPLES
        self._options = _options(setup)
        self._examiner = line.examiner = CampaignExaminer(
            self._options,
            evaluator,
            line,
            directory=self._directory,
            keep_going=setup.keep_going,
            deadline=setup.deadline,
        )

    def obey(self, channel: Channel) -> None:
        """Carry out one order after the other."""
        while (order := _next(channel)) is not None:
            match order:
                case RunRound(index=index, limit=limit, known=known):
                    self._examiner.begin(Errand(index, limit, frozenset(known)))
                    self._carry_out(index, functools.partial(self._round, order))
                case RunSaved():
                    self._examiner.begin(Errand(None, 2**31))
                    self._carry_out(None, functools.partial(self._saved, order))
                case Setup():
                    raise ValueError("a second set-up")

    def _carry_out(self, index: int | None, run: Callable[[], bool]) -> None:
        whole = False
        try:
            whole = run()
        except RoundOver:
            whole = True
        except OutOfTime:
            pass
        finally:  # also when told to end: what was run was run
            examiner = self._examiner
            self._line.say(
                Done(
                    round=index,
                    whole=whole,
                    ids=tuple(examiner.ids) if whole else (),
                    counts=examiner.tally.plain(),
                    slowest=examiner.slowest,
                )
            )

    def _round(self, order: RunRound) -> bool:
        setup = self._setup
        whole = rounds.run_round(
            rounds.round_of(setup.seed, order.index, self._evaluator.system),
            seed=setup.seed,
            worlds=setup.worlds,
            bucket=None,
            examiner=self._examiner,
            extension=self._evaluator.extension,
            database=self._database,
        )
        return whole and self._ended_well()

    def _ended_well(self) -> bool:
        """A rank may also end when it has sent its last verdict."""
        for world in self._setup.worlds:
            evaluation = self._evaluator.crashed_when_idle(world)
            if evaluation is not None and self._examiner.last is not None:
                return self._examiner.violation(self._examiner.last, evaluation, _nothing_smaller)
        return True

    def _saved(self, order: RunSaved) -> bool:
        """Try what earlier runs had found: whatever does not fail any more is no finding any more."""
        for name in order.names:
            finding = state.load_finding(self._directory, name)
            if finding is None or finding.failure.case is None:
                continue
            try:
                case = codec.load(Path(finding.failure.case))
            except UsageError as error:
                self._line.note(f"a case that was found before cannot be run again: {error}")
                continue
            if finding.foreign and not self._takes(case.scenario):
                self._line.say(Gone(name))
            elif not self._still(finding, case):
                return False
        return not order.database or rounds.replay_saved(self._database, self._examiner, self._takes)

    def _takes(self, scenario: Scenario) -> bool:
        """Whether it could be a scenario of this campaign: it may come from another subject's."""
        if scenario.system != self._evaluator.system or scenario.world > max(self._setup.worlds):
            return False
        return not beyond(scenario, self._evaluator.extension)

    def _still(self, finding: state.Finding, case: codec.Case) -> bool:
        """Try one of them. Whether to go on."""
        examiner = self._examiner
        unsteady = finding.failure.property == Property.DETERMINISM.value
        for _ in range(1 + REPLAYS if unsteady else 1):
            if case.relation is None:
                seen = examiner.examine(case.scenario)
            else:
                seen = examiner.relate(case.scenario, case.relation)
            if seen.violated:
                break
        if finding.foreign:  # what is told of it is of another campaign or of other code
            on = not seen.violated or examiner.explain(case.scenario, _nothing_smaller)
            self._line.say(Gone(finding.name))
            return on
        if seen.violated or unsteady:  # what comes and goes is there, though this time it did not come
            self._line.found(finding)
            return self._setup.keep_going
        self._line.say(Gone(finding.name))
        return True


def _nothing_smaller(fails: object) -> None:
    """Of a crash between scenarios nobody knows which one brought it about."""


def _subject(setup: Setup) -> SubjectSource:
    return SubjectSource(setup.given, setup.absolute, setup.args, setup.config)


def _options(setup: Setup) -> CampaignOptions:
    return CampaignOptions(
        subject=_subject(setup),
        worlds=setup.worlds,
        backend=setup.backend,
        seed=setup.seed,
        examples=2**31,
        seconds=None,
        bucket=None,
        parameters=None,
        report=Path(setup.report),
        timeout_s=setup.timeout_s,
        shrink_s=setup.shrink_s,
        stall_s=setup.stall_s,
        order=setup.order,
        schedule=setup.schedule,
    )
