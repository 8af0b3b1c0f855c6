"""An examiner of rounds that runs scenarios on a pool, as a worker of a campaign does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool
from harness.explain import Explainer, Found
from harness.fuzz.rounds import Seen, Smaller
from harness.relate import RelatedEvaluator
from harness.scenario.model import Scenario
from harness.scenario.relations import RelationReference
from harness.scenario.systems import reached
from tests.support import Silent, subject


class Examining:
    """Keeps what it was given, in order, and what it found.

    Args:
        pool: runs the scenarios.
        name: the subject, as :func:`tests.support.subject` has it.
        shrink_s: upper bound of the time spent on making a violation smaller.
        go_on: whether a round goes on after a violation.
    """

    def __init__(self, pool: Pool, name: str, *, shrink_s: float = 20.0, go_on: bool = False) -> None:
        self.evaluator = Evaluator(subject(name), pool)
        self.examined: list[Scenario] = []
        self.found: list[Found] = []
        self.checks: Counter[str] = Counter()
        self.shrink_s = shrink_s
        self.go_on = go_on
        self._last: Evaluation | None = None
        self._runs: Evaluator | RelatedEvaluator = self.evaluator

    def examine(self, scenario: Scenario) -> Seen:
        self._runs = self.evaluator
        return self._run(scenario)

    def _run(self, scenario: Scenario) -> Seen:
        self.examined.append(scenario)
        self._last = self._runs.evaluate(scenario)
        shown = reached(scenario) | self._last.situations
        return Seen(self._last.conclusion is Conclusion.VIOLATED, frozenset(shown))

    def relate(self, scenario: Scenario, relation: RelationReference) -> Seen:
        self._runs = RelatedEvaluator(self.evaluator, relation)
        return self._run(scenario)

    def explain(self, scenario: Scenario, smaller: Smaller) -> bool:
        assert self._last is not None
        explainer = Explainer(Silent(), self._runs, self.checks, shrink_s=self.shrink_s)
        self.found.append(explainer.explain(scenario, self._last, smaller))
        return self.go_on


class Judging:
    """Runs nothing: ``fails`` says whether a scenario is a violation. Keeps what it was given, and the smallest."""

    def __init__(self, fails: Callable[[Scenario], bool], *, go_on: bool = False) -> None:
        self.fails = fails
        self.go_on = go_on
        self.examined: list[Scenario] = []
        self.relations: list[RelationReference] = []
        self.by_themselves: set[Scenario] = set()
        self.smallest: list[Scenario] = []
        self.tried = 0

    def examine(self, scenario: Scenario) -> Seen:
        self.examined.append(scenario)
        self.by_themselves.add(scenario)
        return Seen(self.fails(scenario), reached(scenario))

    def relate(self, scenario: Scenario, relation: RelationReference) -> Seen:
        self.relations.append(relation)
        seen = self.examine(scenario)
        self.by_themselves.discard(scenario)
        return seen

    def explain(self, scenario: Scenario, smaller: Smaller) -> bool:
        self.smallest.append(scenario)

        def fails(tried: Scenario) -> bool:
            self.tried += 1
            failed = self.fails(tried)
            if failed:
                self.smallest[-1] = tried
            return failed

        smaller(fails)
        return self.go_on
