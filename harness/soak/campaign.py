"""A soak: many scenarios on one pool, a fault in some of them, and every verdict held against what it must be."""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from harness.drawing import Drawer
from harness.ending import raise_if_interrupted
from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, UndecidedError, start_pool
from harness.faults import language
from harness.faults.expect import HOLDS, expectation
from harness.report import result as results
from harness.scenario import codec, generate
from harness.scenario.model import Scenario
from harness.scenario.smaller import smallest
from harness.soak.growth import Growth, Usage, growth, usage
from harness.subjects.source import SubjectSource

WARM_UP: Final = 100
"""After so many scenarios (or half of them all) what comes later counts as growth."""

WITHOUT_FAULT: Final = "no fault"


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to run.

    Attributes:
        examples: scenarios in all.
        every: each such one has a fault.
        seconds: upper bound of the whole.
        report: where the first case with a wrong verdict is saved, made small.
        shrink_s: upper bound of the time spent on that.
        timeout_s, stall_s: limits of one scenario; None: as in a campaign.
    """

    subject: SubjectSource
    worlds: tuple[int, ...] = (2, 3)
    examples: int = 2000
    every: int = 20
    seed: int = 0
    seconds: float | None = None
    report: Path
    backend: str = "gloo"
    timeout_s: float | None = None
    stall_s: float | None = None
    shrink_s: float = 60.0


class KindOutcome(Struct, frozen=True, kw_only=True):
    """The verdicts on scenarios with one kind of fault, and the seconds from sending a scenario to its verdict."""

    count: int
    right: int
    wrong: int
    median_s: float
    longest_s: float


class WrongVerdict(Struct, frozen=True, kw_only=True):
    """One verdict that was not as it must be: the scenario in a file, and the command that runs it again."""

    scenario: int
    fault: str | None
    problem: str
    case: str | None
    replay: str | None


class SoakResult(Struct, frozen=True, kw_only=True):
    """The outcome; fields that :class:`harness.report.result.Result` has too mean the same here.

    Attributes:
        verdict: ``holds``: every verdict was right and nothing grew; else ``unknown``: the harness is broken.
        run: scenarios judged; ``discarded``: drawn, but outside the subject's space.
        kinds: by kind of fault; ``no fault`` are the scenarios without.
        growth: of this process, from after ``warm_up`` scenarios to the end; empty where it ended before.
        wrong: the first wrong verdict.
    """

    verdict: results.Verdict
    subject: str
    backend: str
    worlds: tuple[int, ...]
    seed: int
    examples: int
    every: int
    run: int
    discarded: int
    seconds: float
    kinds: dict[str, KindOutcome] = {}
    warm_up: int = 0
    growth: dict[str, Growth] = {}
    wrong: WrongVerdict | None = None
    versions: dict[str, str] = {}
    reason: str | None = None
    interrupted: bool = False
    schema: int = results.SCHEMA

    @property
    def exit_code(self) -> int:
        """What the process exits with."""
        return results.exit_code(self.verdict, interrupted=self.interrupted)


class Observer(Protocol):
    """Told what a soak does, for progress display."""

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        """A scenario is about to run; ``rate`` in scenarios per second so far."""

    def note(self, text: str) -> None:
        """Something the user should know."""


@dataclass
class _Tally:
    began: float = field(default_factory=time.monotonic)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_wrong: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    discarded: int = 0
    warm: tuple[int, Usage] | None = None
    growth: dict[str, Growth] = field(default_factory=dict)
    first_wrong: WrongVerdict | None = None
    wrong_scenario: Scenario | None = None  # of that one

    @property
    def run(self) -> int:
        return sum(map(len, self.seconds.values()))

    def kinds(self) -> dict[str, KindOutcome]:
        order = [WITHOUT_FAULT, *language.KINDS]
        return {
            kind: KindOutcome(
                count=len(seconds),
                right=len(seconds) - self.num_wrong[kind],
                wrong=self.num_wrong[kind],
                median_s=statistics.median(seconds),
                longest_s=max(seconds),
            )
            for kind, seconds in sorted(self.seconds.items(), key=lambda item: order.index(item[0]))
        }


def run_soak(options: SoakOptions, observer: Observer, pool: Pool | None = None) -> SoakResult:
    """Run the scenarios one after the other; ``pool`` is one of :func:`harness.evaluate.start_pool`, left running.

    Raises:
        UsageError: the subject cannot be imported or lacks the interface.
    """
    tally = _Tally()
    reason: str | None = None
    interrupted = False
    try:
        with nullcontext(pool) if pool is not None else start_pool(options.backend) as ranks:
            evaluator = Evaluator(options.subject, ranks, timeout_s=options.timeout_s, stall_s=options.stall_s)
            _soak(options, observer, evaluator, tally)
    except UndecidedError as error:
        reason = str(error)
    except KeyboardInterrupt:
        interrupted, reason = True, "interrupted"
    reason = _broken(tally) or reason
    if reason is None and not tally.run:
        reason = "no scenario was run"
    if reason is None and not tally.seconds.keys() - {WITHOUT_FAULT}:
        reason = "no scenario had a fault: a smaller --every, or more --examples"
    return SoakResult(
        verdict="unknown" if reason else "holds",
        subject=options.subject.given,
        backend=options.backend,
        worlds=options.worlds,
        seed=options.seed,
        examples=options.examples,
        every=options.every,
        run=tally.run,
        discarded=tally.discarded,
        seconds=time.monotonic() - tally.began,
        kinds=tally.kinds(),
        warm_up=tally.warm[0] if tally.warm is not None else 0,
        growth=tally.growth,
        wrong=tally.first_wrong,
        versions=results.versions(),
        reason=reason,
        interrupted=interrupted,
    )


def _soak(options: SoakOptions, observer: Observer, evaluator: Evaluator, tally: _Tally) -> None:
    warm_up = min(WARM_UP, options.examples // 2)
    done = 0
    with closing(_Scenarios(options)) as scenarios:
        for index, scenario in scenarios:
            raise_if_interrupted()
            elapsed = time.monotonic() - tally.began
            if options.seconds is not None and elapsed >= options.seconds:
                observer.note(f"time is up after {index} of {options.examples} scenarios")
                break
            if index == warm_up:
                tally.warm = index, _all_ranks_running(options, evaluator)
            observer.example(index, options.examples, scenario.world, scenario, tally.run / max(elapsed, 1e-9))
            _judge(options, observer, evaluator, tally, index, scenario)
            done = index + 1
        if tally.warm is not None and done > tally.warm[0]:
            since, before = tally.warm
            tally.growth = growth(before, _all_ranks_running(options, evaluator), done - since)
    if tally.first_wrong is not None:
        _shrink(options, observer, evaluator, tally)


def _shrink(options: SoakOptions, observer: Observer, evaluator: Evaluator, tally: _Tally) -> None:
    """Make the first scenario with a wrong verdict smaller, within a bound, and save it in place of the first."""
    first, drawn = tally.first_wrong, tally.wrong_scenario
    if first is None or drawn is None:
        return
    deadline = time.monotonic() + options.shrink_s
    best: tuple[Scenario, str] | None = None

    def still_wrong(scenario: Scenario) -> bool:
        nonlocal best
        raise_if_interrupted()
        if time.monotonic() > deadline:
            raise _TimeUpError
        evaluation = evaluator.evaluate(scenario)
        if evaluation.conclusion is Conclusion.UNHIT:
            return False  # of a smaller one that need not mean a mistake
        problem = wrong_verdict(scenario, evaluator.attributed(scenario, evaluation))
        if problem is not None:
            best = scenario, problem
        return problem is not None

    try:
        smallest(drawn, still_wrong, worlds=options.worlds)
    except (_TimeUpError, UndecidedError) as error:
        observer.note(f"the case may not be the smallest: {error or 'shrinking took too long'}")
    if best is not None:
        tally.first_wrong = _saved(options, first.scenario, *best)


class _TimeUpError(Exception):
    """Shrinking has taken long enough."""


def _drawn_as(options: SoakOptions, index: int) -> tuple[int, bool]:
    """The number that the scenario in this place is drawn by, and whether with a fault."""
    number, place = divmod(index, options.every)
    if place < options.every - 1:
        return index, False
    # Numbered by themselves, after all others: as every K-th they could all be of one world.
    return options.examples + number, True


def _all_ranks_running(options: SoakOptions, evaluator: Evaluator) -> Usage:
    """What this process holds when the ranks of all worlds run."""
    for world in options.worlds:
        evaluator.prepare(world)
    return usage()


class _Scenarios:
    """The scenarios in order, the next one drawn while the ranks run the last; to be closed."""

    def __init__(self, options: SoakOptions) -> None:
        self._options = options
        self._drawer = Drawer()

    def __iter__(self) -> Iterator[tuple[int, Scenario]]:
        ahead: Future[Scenario] | None = None
        for index in range(self._options.examples):
            ahead = ahead or self._drawer.begin(self._draw, index)
            scenario = ahead.result()
            ahead = self._drawer.begin(self._draw, index + 1) if index + 1 < self._options.examples else None
            yield index, scenario

    def close(self) -> None:
        self._drawer.close()

    def _draw(self, index: int) -> Scenario:
        number, fault = _drawn_as(self._options, index)
        return generate.draw(self._options.seed, number, self._options.worlds, fault=fault)


def _judge(
    options: SoakOptions, observer: Observer, evaluator: Evaluator, tally: _Tally, index: int, scenario: Scenario
) -> None:
    """Run a scenario and count its verdict; the first wrong one is saved.

    Raises:
        UndecidedError: there was none.
    """
    fault = scenario.faults[0] if scenario.faults else None
    kind = WITHOUT_FAULT if fault is None else language.kind(fault)
    undecided: UndecidedError | None = None
    began = time.monotonic()
    try:
        evaluation = evaluator.evaluate(scenario)
        seconds = evaluation.seconds
        problem = wrong_verdict(scenario, evaluator.attributed(scenario, evaluation))
    except UndecidedError as error:
        undecided, seconds, problem = error, time.monotonic() - began, f"there was no verdict: {error}"
    else:
        if evaluation.conclusion is Conclusion.UNSUPPORTED:
            tally.discarded += 1
            return
    tally.seconds[kind].append(seconds)
    if problem is not None:
        tally.num_wrong[kind] += 1
        observer.note(f"scenario {index}: {problem}")
        if tally.first_wrong is None:
            tally.first_wrong, tally.wrong_scenario = _saved(options, index, scenario, problem), scenario
    if undecided is not None:
        raise undecided


def wrong_verdict(scenario: Scenario, evaluation: Evaluation) -> str | None:
    """What is wrong with the verdict on a scenario with one fault or none; None when nothing is."""
    expected = expectation(scenario.faults[0], scenario) if scenario.faults else HOLDS
    found = evaluation.divergence
    if found is None:
        got = evaluation.conclusion.value
        if expected == HOLDS and evaluation.conclusion in (Conclusion.HOLDS, Conclusion.UNSUPPORTED):
            return None
    else:
        got = f"{found.property.value} at rank {found.rank}: {found.message}"
        if found.property.value in expected.properties and found.rank == expected.rank:
            return None
    wanted = "a scenario that holds"
    if expected != HOLDS:
        wanted = f"{' or '.join(sorted(expected.properties))} at rank {expected.rank}"
    fault = f", with {language.text(scenario.faults[0])}" if scenario.faults else ""
    return f"expected {wanted}{fault}; got {got}"


def _saved(options: SoakOptions, index: int, scenario: Scenario, problem: str) -> WrongVerdict:
    subject = codec.SubjectReference(
        options.subject.given, options.subject.absolute, options.subject.args, options.subject.config
    )
    path: Path | None = None
    try:
        path = codec.save(codec.Case(scenario, subject, {"message": problem}), options.report)
    except (OSError, ValueError) as error:
        problem += f" (the case could not be saved: {error})"
    words = ["python", "-m", "harness", "replay", os.fspath(path or "")]
    if options.timeout_s is not None:
        words += ["--timeout", f"{options.timeout_s:g}"]
    if options.backend != "gloo":
        words += ["--backend", options.backend]
    return WrongVerdict(
        scenario=index,
        fault=language.text(scenario.faults[0]) if scenario.faults else None,
        problem=problem,
        case=None if path is None else os.fspath(path),
        replay=None if path is None else shlex.join(words),
    )


def _broken(tally: _Tally) -> str | None:
    """Why the harness is broken, as far as was seen."""
    num_wrong = sum(tally.num_wrong.values())
    problems = [f"{num_wrong} of {tally.run} verdicts are wrong"] if num_wrong else []
    problems += [
        f"{name} grew from {it.before:,} to {it.after:,}, limit {it.limit:,}"
        for name, it in tally.growth.items()
        if it.excessive
    ]
    if not problems:
        return None
    # A wrong class fails without a fault as well, and then the rest says little.
    whose = "the subject is not right (see `verify`), or " if tally.num_wrong[WITHOUT_FAULT] else ""
    return f"{whose}the harness is broken: {'; '.join(problems)}"
