"""What a worker does with each scenario of a round: evaluate, count, and where it fails explain and save it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from harness.ending import raise_if_interrupted
from harness.errors import UsageError
from harness.evaluate import Conclusion, Evaluation, Evaluator, UndecidedError
from harness.explain import Explainer, Found, diagnosed, property_of, repeated
from harness.failures import saved_failure
from harness.fuzz import state
from harness.fuzz.messages import Key, Slow, kind_of
from harness.fuzz.rounds import Seen, Smaller
from harness.fuzz.state import Finding, scenario_id
from harness.relate import RelatedEvaluator
from harness.report.console import describe
from harness.runner import CLOSELY_EVERY, REPEAT_EVERY, CampaignOptions
from harness.scenario import generate
from harness.scenario.model import Scenario
from harness.scenario.relations import RelationReference
from harness.scenario.systems import reached
from harness.tally import Tally
from harness.verdict import Property

FURTHER = 2**40
"""From this number on scenarios are drawn that no round has: some more evidence of what a violation looks like."""


class RoundOver(BaseException):
    """As many scenarios of the round were run as were asked for."""


class OutOfTime(BaseException):
    """The campaign's time is up."""


class Listener(Protocol):
    """Told what the examiner does."""

    def progress(self, doing: str) -> None:
        """A scenario was run."""

    def found(self, finding: Finding) -> None:
        """A violation has been saved, or saved in a better form."""

    def note(self, text: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True)
class Errand:
    """What the examiner is to do next: at most ``limit`` scenarios, for round ``index`` or, None, what was saved."""

    index: int | None
    limit: int
    known: frozenset[Key] = frozenset()


class CampaignExaminer:
    """Examines the scenarios of one round after the other; an ``Examiner`` of :mod:`harness.fuzz.rounds`.

    Args:
        options: Of the campaign; failing cases go to ``options.report``.
        evaluator: Runs scenarios.
        listener: Told what happens.
        directory: Of the campaign; findings are saved there.
        keep_going: Go on after a violation.
        deadline: On the monotonic clock; None: no bound.

    Attributes:
        tally, ids, slowest: Of the present errand.
        last: The scenario that was examined last, whatever the errand.
        again: Of the present errand, how many violations were of a known kind.
    """

    def __init__(
        self,
        options: CampaignOptions,
        evaluator: Evaluator,
        listener: Listener,
        *,
        directory: Path,
        keep_going: bool,
        deadline: float | None,
    ) -> None:
        self._options = options
        self._evaluator = evaluator
        self._listener = listener
        self._directory = directory
        self._keep_going = keep_going
        self._deadline = deadline
        self._known: set[Key] = set()
        self.last: Scenario | None = None
        self._evaluation: Evaluation | None = None
        self._runs: RelatedEvaluator | None = None  # what it came of, where it shows together with another alone
        self.begin(Errand(None, 0))

    def begin(self, errand: Errand) -> None:
        """Start counting anew."""
        self._errand = errand
        self._known |= errand.known
        self.tally = Tally()
        self.ids: list[str] = []
        self.slowest: Slow | None = None
        self.again = 0

    def examine(self, scenario: Scenario) -> Seen:
        """Evaluate a scenario and count it.

        Raises:
            RoundOver, OutOfTime: before it is run.
            UsageError, UndecidedError: see :meth:`harness.evaluate.Evaluator.evaluate`.
        """
        raise_if_interrupted()
        if len(self.ids) >= self._errand.limit:
            raise RoundOver
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise OutOfTime
        evaluation = self._evaluator.evaluate(scenario)
        self._count(scenario, evaluation)
        self.last, self._runs = scenario, None
        self._evaluation = self._looked_at_twice(scenario, evaluation)
        self._listener.progress(describe(scenario))
        return _seen(scenario, self._evaluation)

    def relate(self, scenario: Scenario, relation: RelationReference) -> Seen:
        """The same, together with the scenario that is related to it: only the first of them is counted.

        Raises:
            RoundOver, OutOfTime, UsageError, UndecidedError: see :meth:`examine`.
        """
        seen = self.examine(scenario)
        if seen.violated or self._evaluation is None:
            return seen
        runs = RelatedEvaluator(self._evaluator, relation)
        both = runs.relate(scenario, self._evaluation)
        if both.compared:
            self.tally.checks[Property.INVARIANCE.value] += 1
        if both.evaluation.conclusion is not Conclusion.VIOLATED:
            return seen
        self._evaluation, self._runs = both.evaluation, runs
        return seen._replace(violated=True)

    def _count(self, scenario: Scenario, evaluation: Evaluation) -> None:
        name = scenario_id(scenario)
        self.ids.append(name)
        self.tally.add(scenario, evaluation)
        if self.slowest is None or evaluation.seconds > self.slowest.seconds:
            self.slowest = Slow(name, describe(scenario), evaluation.seconds)

    def _looked_at_twice(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        """Now and then a scenario is run again, as in any campaign; which ones depends on the round alone."""
        number = (self._errand.index or 0) * 17 + len(self.ids)
        if evaluation.conclusion is Conclusion.HOLDS and number % REPEAT_EVERY == 0:
            evaluation = repeated(self._evaluator, scenario, evaluation, self.tally.checks, times=1)
        if number % CLOSELY_EVERY == 0:
            evaluation = self._evaluator.closely(scenario, evaluation)
        return evaluation

    def explain(self, scenario: Scenario, smaller: Smaller) -> bool:
        """What was examined or related last is a violation: confirm it, make it smaller, save it. Whether to go on."""
        if self._evaluation is None or self.last != scenario:
            raise ValueError("explain: expected the scenario that was examined last")
        return self.violation(scenario, self._evaluation, smaller, self._runs)

    def violation(
        self, scenario: Scenario, evaluation: Evaluation, smaller: Smaller, runs: RelatedEvaluator | None = None
    ) -> bool:
        """The same for a violation that was seen elsewhere; ``runs``: together with a related scenario."""
        look = _Look.at(scenario, evaluation)
        if any(look.may_be(known) for known in self._known):
            self.again += 1
            return self._keep_going
        seen = look.key
        keeper = _Keeper(self._options, self._directory, self._name(seen), self._errand.index, seen)

        def better(found: Found) -> None:
            self._listener.found(keeper.keep(found, complete=False))

        explainer = Explainer(
            _Explaining(self._listener),
            self._evaluator if runs is None else runs,
            self.tally.checks,
            shrink_s=self._options.shrink_s,
            better=better,
            same=look.alike,
            relation=None if runs is None else runs.reference,
        )
        left_s = float("inf") if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        try:
            others = self._others() if runs is None else ()
            explained = explainer.explain(scenario, evaluation, smaller, others=others, limit_s=left_s)
            found = self._of_one(explained, runs)
        except (UndecidedError, UsageError) as error:
            found = explainer.best or Found(scenario, evaluation)
            self._listener.note(f"a violation was found, but its case could not be made smaller: {error}")
        # What the campaign's end cut short is taken up by the next run; what took too long would do so again.
        in_time = explainer.cut_short is None or self._deadline is None or time.monotonic() < self._deadline
        finding = keeper.keep(found, complete=in_time)
        self._known |= {seen, finding.key}
        self._listener.found(finding)
        return self._keep_going

    def _name(self, seen: Key) -> str:
        """Of a finding: it takes the place of what an interrupted run saw of the same, and of nothing else."""
        place = "saved" if self._errand.index is None else f"round-{self._errand.index:06}"
        for number in itertools.count():
            earlier = state.load_finding(self._directory, f"{place}-{number}")
            if earlier is None or (earlier.seen == seen and not earlier.complete):
                return f"{place}-{number}"
        raise AssertionError

    def _others(self) -> Iterator[Scenario]:
        """Scenarios of no round, drawn when they are asked for."""
        given = self._options
        for index in itertools.count(FURTHER):
            yield generate.draw(
                given.seed,
                index,
                given.worlds,
                bucket=given.bucket,
                extension=self._evaluator.extension,
                system=self._evaluator.system,
            )

    def _of_one(self, found: Found, runs: RelatedEvaluator | None) -> Found:
        """Where the related scenario is wrong by itself: the case is that one alone."""
        if runs is None or property_of(found.evaluation) in (Property.INVARIANCE, Property.DETERMINISM):
            return found
        other = runs.other(found.scenario)
        return found if other is None else Found(other, self._evaluator.attributed(other, found.evaluation))


def _seen(scenario: Scenario, evaluation: Evaluation) -> Seen:
    violated = evaluation.conclusion is Conclusion.VIOLATED
    return Seen(violated, reached(scenario) | evaluation.situations, evaluation.margin or 0.0)


class _Keeper:
    """Saves one violation, each time in a better form, and removes the case of the form before."""

    def __init__(self, options: CampaignOptions, directory: Path, name: str, index: int | None, seen: Key) -> None:
        self._options, self._directory = options, directory
        self._name, self._index, self._seen = name, index, seen
        self._before: str | None = None
        earlier = state.load_finding(directory, name)
        if earlier is not None and not earlier.complete:
            self._before = earlier.failure.case  # of the run that was interrupted

    def keep(self, found: Found, *, complete: bool) -> Finding:
        failure = saved_failure(self._options, found)
        finding = Finding(name=self._name, round=self._index, seen=self._seen, complete=complete, failure=failure)
        state.save_finding(self._directory, finding)
        if self._before is not None and self._before != failure.case:
            Path(self._before).unlink(missing_ok=True)
        self._before = failure.case
        return finding


class _Explaining:
    """Passes on what an explainer tells."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.note: Callable[[str], None] = listener.note

    def shrinking(self, tried: int, best: Scenario) -> None:
        self._listener.progress(f"shrinking: {tried} tried, smallest so far: {describe(best)}")


@dataclass(frozen=True)
class _Look:
    """What one scenario alone shows of a violation: its key, and where no symptom is sure those that may be."""

    key: Key
    possible: tuple[str, ...] = ()

    @classmethod
    def at(cls, scenario: Scenario, evaluation: Evaluation) -> Self:
        found = diagnosed(scenario, evaluation, []).divergence
        if found is None:
            raise ValueError("a violation without a divergence")
        return cls(
            Key(found.property.value, found.stage.value, kind_of(found.symptom)),
            found.symptoms_possible or (),
        )

    def may_be(self, known: Key) -> bool:
        """Whether this is, for all that can be told, the same as what is known."""
        if (self.key.property, self.key.stage) != (known.property, known.stage):
            return False
        return self.key.symptom == known.symptom or known.symptom in self.possible

    def alike(self, scenario: Scenario, evaluation: Evaluation) -> bool:
        """Whether a smaller scenario, which violates the same property, may show the same mistake."""
        return self.key.symptom is None or _Look.at(scenario, evaluation).shows(self.key.symptom)

    def shows(self, symptom: str) -> bool:
        return symptom == self.key.symptom or symptom in self.possible
