"""What is done about a violation once it was seen: confirm it, make the scenario smaller, say whose doing it is."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from harness.diagnosis import diagnose
from harness.diagnosis.symptoms import Symptom
from harness.ending import raise_if_interrupted
from harness.errors import UsageError
from harness.evaluate import Conclusion, Evaluation, UndecidedError
from harness.scenario.model import Scenario
from harness.scenario.relations import RelationReference
from harness.verdict import Divergence, Property, Stage

REPLAYS = 4
"""How often a failing scenario is run again before it counts as failing every time."""

SHRINK_S = 60.0
"""Default bound of the time spent on making a failing scenario smaller."""

SHORT_STALL_S = 2.0
"""While a hang of a simulated world is made smaller: how long without progress each try may be."""

MORE_SCENARIOS = 12
MORE_S = 5.0
"""How many further scenarios of a campaign are run, and for how long, to see a violation in other settings."""

_MOST_OBSERVED = 2**21
"""Of about so many elements in all, what ranks saw is kept: for each rank up to some 30 bytes an element."""

_HANG_AGAIN_S = 10.0
"""The smallest hang is run once more with the time that hangs are told by; about as long as that takes."""

Fails = Callable[[Scenario], bool]
Smaller = Callable[[Fails], object]
"""Offers smaller and smaller scenarios to what it is given; keeps nothing itself."""


class Observer(Protocol):
    """Told what becomes of a failing scenario."""

    def shrinking(self, tried: int, best: Scenario) -> None:
        """A failing scenario is being made smaller."""

    def note(self, text: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True)
class Found:
    """A violation: the smallest scenario that showed it, and how it showed there.

    ``relation``: to the other scenario with which alone it shows (``invariance``). ``cut_short``: why it may not be
    the smallest.
    """

    scenario: Scenario
    evaluation: Evaluation
    relation: RelationReference | None = None
    cut_short: str | None = None


class Runs(Protocol):
    """What runs scenarios: :class:`harness.evaluate.Evaluator`, :class:`harness.relate.RelatedEvaluator`."""

    @property
    def simulated(self) -> bool:
        """Whether all ranks live in one process."""

    def stalling_within(self, stall_s: float) -> AbstractContextManager[None]:
        """Inside, a scenario counts as hung after at most so long without progress."""

    def evaluate(self, scenario: Scenario) -> Evaluation:
        """Run a scenario once."""

    def attributed(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        """A violation with the rank whose doing it is, where one more run can tell; else as it is."""


class Explainer:
    """Explains violations of one subject.

    Args:
        observer: Told about progress.
        evaluator: Runs scenarios.
        checks: Where comparisons of repeated runs are counted.
        shrink_s: Upper bound of the time spent on making one scenario smaller.
        better: Told whenever more is known: the violation as it was seen, a smaller one, whose doing it is.
        same: Whether a smaller scenario that violates the same property shows the same mistake; None: any does.
        relation: Together with which ``evaluator`` runs scenarios.

    Attributes:
        best: The best that is known of the present violation; there also after an error or an interruption.
        cut_short: Why the scenario may not be the smallest, as words for people; None when shrinking came to its end.
    """

    def __init__(
        self,
        observer: Observer,
        evaluator: Runs,
        checks: Counter[str],
        *,
        shrink_s: float = SHRINK_S,
        better: Callable[[Found], None] | None = None,
        same: Callable[[Scenario, Evaluation], bool] | None = None,
        relation: RelationReference | None = None,
    ) -> None:
        self.best: Found | None = None
        self.cut_short: str | None = None
        self._observer = observer
        self._evaluator = evaluator
        self._checks = checks
        self._shrink_s = shrink_s
        self._better = better
        self._same = same
        self._relation = relation
        self._failing: list[Found] = []

    def explain(
        self,
        scenario: Scenario,
        evaluation: Evaluation,
        smaller: Smaller,
        *,
        others: Iterable[Scenario] = (),
        limit_s: float = math.inf,
    ) -> Found:
        """The violation in its smallest form.

        Args:
            scenario: That is violated.
            evaluation: The violation.
            smaller: Offers smaller scenarios.
            others: Further scenarios, which may fail in the same way; a few are run to learn more.
            limit_s: What is left of the campaign's time: after it a scenario is confirmed by one run, and no smaller
                one is tried.

        Raises:
            UsageError, UndecidedError: see :meth:`harness.evaluate.Evaluator.evaluate`.
        """
        self.cut_short = None
        self._failing = []
        best = self._smallest(scenario, evaluation, smaller, others, time.monotonic() + limit_s)
        self.best = dataclasses.replace(best, cut_short=self.cut_short)
        return self.best

    def _smallest(
        self, scenario: Scenario, evaluation: Evaluation, smaller: Smaller, others: Iterable[Scenario], deadline: float
    ) -> Found:
        best = self._keep(Found(scenario, evaluation))
        if evaluation.hung:
            return self._explain_hang(best, smaller, deadline)
        if property_of(evaluation) is Property.DETERMINISM:  # it has been run twice
            return best
        confirmed = repeated(self._evaluator, scenario, evaluation, self._checks, deadline=deadline)
        best = self._keep(Found(scenario, confirmed))
        if property_of(confirmed) is not Property.DETERMINISM:
            best = self._shrink(best, smaller, deadline)
        best = self._keep(Found(best.scenario, self._evaluator.attributed(best.scenario, best.evaluation)))
        return self._keep(self._diagnosed(best, others, deadline))

    def _diagnosed(self, best: Found, others: Iterable[Scenario], deadline: float) -> Found:
        """With the symptom, if all that was seen of this violation leaves one: in a small case many look alike."""
        if not best.evaluation.observations:
            return Found(best.scenario, diagnosed(best.scenario, best.evaluation, []))
        deadline = min(deadline, time.monotonic() + MORE_S)
        for scenario in itertools.islice(others, MORE_SCENARIOS):
            raise_if_interrupted()
            if time.monotonic() > deadline:
                break
            try:
                evaluation = self._evaluator.evaluate(scenario)
            except (UndecidedError, UsageError):
                break  # the violation has been seen, and is what is to be told
            if evaluation.observations:
                self._failing.append(Found(scenario, evaluation))
            if evaluation.hung:
                break
        return Found(best.scenario, diagnosed(best.scenario, best.evaluation, self._failing))

    def _keep(self, found: Found) -> Found:
        found = dataclasses.replace(found, relation=self._relation)
        self.best = found
        room = sum(known.scenario.numel for known in self._failing) < _MOST_OBSERVED
        if found.evaluation.observations and room and all(known.scenario != found.scenario for known in self._failing):
            self._failing.append(found)
        if self._better is not None:
            self._better(found)
        return found

    def _explain_hang(self, first: Found, smaller: Smaller, deadline: float) -> Found:
        """A hang is not confirmed beforehand: each try of it costs the whole time by which it is told."""
        if not self._evaluator.simulated:
            self._observer.note(
                "a hang is neither run again nor made smaller: each try would take as long; try `replay`"
            )
            return first
        if deadline - time.monotonic() < _HANG_AGAIN_S:
            self._cut("the hang is not made smaller: there is no time left")
            return first
        with self._evaluator.stalling_within(SHORT_STALL_S):
            best = self._shrink(first, smaller, deadline - _HANG_AGAIN_S)
        if best is first:
            return first
        # What takes its time and what never ends look alike to so little patience.
        again = self._evaluator.evaluate(best.scenario)
        if again.hung:
            return self._keep(Found(best.scenario, again))
        self._cut("a smaller scenario was only slow: the hang is shown as it was found")
        return self._keep(first)

    def _shrink(self, first: Found, smaller: Smaller, deadline: float) -> Found:
        """Make it smaller, as long as it violates the same property and the rank can still be told, if it could be."""
        best = first
        prop, told, hung = property_of(first.evaluation), _names_a_rank(first.evaluation), first.evaluation.hung
        deadline = min(deadline, time.monotonic() + self._shrink_s)
        tried = 0

        def fails(scenario: Scenario) -> bool:
            nonlocal tried, best
            raise_if_interrupted()
            if time.monotonic() > deadline:
                raise _TimeUp
            tried += 1
            evaluation = self._evaluator.evaluate(scenario)
            if evaluation.conclusion is not Conclusion.VIOLATED or property_of(evaluation) is not prop:
                return False
            if hung and not evaluation.hung:
                return False
            if told and not _names_a_rank(evaluation):
                return False  # of two ranks whose collectives differ nobody can tell which is wrong
            if self._same is not None and not self._same(scenario, evaluation):
                return False
            best = self._keep(Found(scenario, evaluation))
            self._observer.shrinking(tried, scenario)
            if evaluation.hung and not hung:
                raise _TimeUp
            return True

        try:
            smaller(fails)
        except _TimeUp:
            self._cut(f"shrinking stopped after {tried} tries: the case may not be the smallest")
        return best

    def _cut(self, why: str) -> None:
        self.cut_short = why
        self._observer.note(why)


class _TimeUp(BaseException):
    """Raised to end shrinking; no Exception, so that nothing on the way takes it for an answer."""


_UPDATED = "agreed: the gradient, and the master and the moments before the update, were right"
_GIVEN = {
    (Property.NORM, Stage.NORM): "agreed: the gradient that the norm is taken of was right",
    (Property.CLIP, Stage.NORM): "agreed: the gradient before the clip, and its norm, were right",
    (Property.MASTER, Stage.UPDATE): _UPDATED,
    (Property.MOMENTS, Stage.UPDATE): _UPDATED,
    (Property.WEIGHTS, Stage.GATHER): "agreed: the master was right before the gather",
}
"""What had been compared before on every rank, and was equal: this is where something differs first."""


def diagnosed(scenario: Scenario, evaluation: Evaluation, failing: Iterable[Found]) -> Evaluation:
    """A violation with its pattern, its inputs and its symptom, as far as they can be told.

    ``failing``: all scenarios in which it was seen.
    """
    found = evaluation.divergence
    if found is None or not evaluation.observations:
        return evaluation
    saved = scenario, evaluation.observations
    named = diagnose.name(saved, [(one.scenario, one.evaluation.observations) for one in failing])
    found = msgspec.structs.replace(
        found,
        pattern=diagnose.where(*saved),
        inputs=found.inputs or _GIVEN.get((found.property, found.stage)),
        symptom=named.symptom,
        symptoms_possible=named.possible or None,
    )
    return dataclasses.replace(evaluation, divergence=found)


def repeated(
    evaluator: Runs,
    scenario: Scenario,
    first: Evaluation,
    checks: Counter[str],
    times: int | None = None,
    *,
    settling: int = 1,
    deadline: float = math.inf,
) -> Evaluation:
    """Run a scenario again: ``first`` when every run gives the same, else a violation of ``determinism``.

    ``settling``: in how many runs it may make what it makes once and keeps; two, where ``first`` ran in another process
    than what follows. ``deadline``, on the monotonic clock: no run begins after it but the first, since a rank that
    ends takes each run the time to start others.
    """
    if first.conclusion is Conclusion.UNSUPPORTED:
        return first
    runs = [first]
    for _ in range(REPLAYS if times is None else times):
        if len(runs) > 1 and time.monotonic() > deadline:
            break
        again = evaluator.evaluate(scenario)
        runs.append(again)
        checks[Property.DETERMINISM.value] += 1
        if again.fingerprint == first.fingerprint:
            continue
        if settling and len(runs) == 2 and first.fingerprint[:-1] and again.fingerprint[:-1] == first.fingerprint[:-1]:
            # The same bits, and ranks that waited elsewhere: as when a class makes its groups the first time that it
            # needs them. From then on they are to wait in the same places.
            return repeated(evaluator, scenario, again, checks, times, settling=settling - 1, deadline=deadline)
        return _unsteady(runs)
    return first


def _unsteady(runs: list[Evaluation]) -> Evaluation:
    failed = [run for run in runs if run.conclusion is Conclusion.VIOLATED]
    if failed and failed[0].divergence is not None:
        found = failed[0].divergence
        if len(failed) < len(runs):
            text = f"failed {len(failed)} of {len(runs)} runs of one case"
        else:
            text = f"{len(runs)} runs of one case failed in different ways"
        message = f"{text}; one of them: {found.property.value} at stage {found.stage.value}: {found.message}"
        found = msgspec.structs.replace(found, property=Property.DETERMINISM, message=message)
        return Evaluation(Conclusion.VIOLATED, found, output=failed[0].output)
    if all(run.fingerprint[:-1] == runs[0].fingerprint[:-1] for run in runs):
        # A simulated world chooses by the seed alone; what the ranks do is up to the subject.
        message = f"{len(runs)} runs of one case gave the same bits, but their ranks did not wait in the same places"
        symptom = None
    else:
        message = f"{len(runs)} runs of one case gave different bits, each within what rounding allows"
        symptom = Symptom.ORDER.value
    found = Divergence(property=Property.DETERMINISM, stage=Stage.NORM, message=message, symptom=symptom)
    return Evaluation(Conclusion.VIOLATED, found)


def property_of(evaluation: Evaluation) -> Property | None:
    """What is violated; None if nothing is."""
    return None if evaluation.divergence is None else evaluation.divergence.property


def _names_a_rank(evaluation: Evaluation) -> bool:
    return evaluation.divergence is not None and evaluation.divergence.rank is not None
