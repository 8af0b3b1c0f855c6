"""Run a scenario together with one that is related to it, and compare what must be equal (``invariance``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from harness.errors import UsageError
from harness.evaluate import Conclusion, Evaluation, Evaluator, UndecidedError
from harness.scenario.model import Scenario
from harness.scenario.relations import SUMMARIES, Relation, RelationReference, clips, differs, related
from harness.verdict import Divergence, Property, Stage

MAX_TIER_WORLD = 4
"""Largest number of ranks of which a simulated world is held against real ones."""


class Related(NamedTuple):
    """What came of a scenario and a related one.

    Attributes:
        evaluation: The scenario's own where both gave what they must.
        scenario: That the evaluation is of: the other one, where that is violated by itself.
        compared: The relation applied, and something was compared.
    """

    evaluation: Evaluation
    scenario: Scenario
    compared: bool

    @property
    def broken(self) -> bool:
        """Both hold by themselves, but not together."""
        found = self.evaluation.divergence
        return found is not None and found.property is Property.INVARIANCE


class RelatedEvaluator:
    """Evaluates scenarios as an :class:`harness.evaluate.Evaluator` does, each together with a related one."""

    def __init__(
        self, evaluator: Evaluator, reference: RelationReference, tier: Callable[[], Evaluator] | None = None
    ) -> None:
        """``tier``: gives the same subject's evaluator on the other tier (TIER); without, that relation never applies.

        It may raise :class:`harness.evaluate.UndecidedError`.
        """
        self.reference = reference
        self._evaluator = evaluator
        self._tier = tier

    @property
    def simulated(self) -> bool:
        """Whether all ranks live in one process."""
        return self._evaluator.simulated

    @contextmanager
    def stalling_within(self, stall_s: float) -> Iterator[None]:
        """See :meth:`harness.evaluate.Evaluator.stalling_within`."""
        with self._evaluator.stalling_within(stall_s):
            yield

    def attributed(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        """As it is: between two scenarios no rank is to blame."""
        return evaluation

    def evaluate(self, scenario: Scenario) -> Evaluation:
        """Run both once; raises what :meth:`harness.evaluate.Evaluator.evaluate` does."""
        return self.relate(scenario, self._evaluator.evaluate(scenario)).evaluation

    def relate(self, scenario: Scenario, first: Evaluation) -> Related:
        """What comes of the other one, ``first`` being what came of the scenario itself.

        Raises:
            UsageError, UndecidedError: see :meth:`harness.evaluate.Evaluator.evaluate`.
        """
        unrelated = Related(first, scenario, compared=False)
        other = self.other(scenario) if first.conclusion is Conclusion.HOLDS else None
        second = None if other is None else self._second(other)
        if other is None or second is None or second.conclusion in (Conclusion.UNSUPPORTED, Conclusion.UNHIT):
            return unrelated
        if second.conclusion is not Conclusion.HOLDS:
            if self.reference.name is not Relation.TIER:
                return Related(second, other, compared=True)
            found: Divergence | None = _violated_on_one_tier(second, simulated=not self.simulated)
        else:
            found = differs(
                self.reference.name,
                scenario,
                first.observed,
                other,
                second.observed,
                norms=self._evaluator.exact_norms,
            )
        if found is None:
            return Related(first, scenario, compared=bool(first.observed.weights))
        fingerprints = (
            first.fingerprint[:-1],
            second.fingerprint[:-1],
            (first.fingerprint[-1:], second.fingerprint[-1:]),
        )
        evaluation = dataclasses.replace(
            first, conclusion=Conclusion.VIOLATED, divergence=found, fingerprint=fingerprints, output=second.output
        )
        return Related(evaluation, scenario, compared=True)

    def other(self, scenario: Scenario) -> Scenario | None:
        """The related scenario; None where the relation does not apply."""
        name, pick, worlds = self.reference.name, self.reference.pick, self.reference.worlds
        if name is Relation.TIER and (self._tier is None or scenario.world > MAX_TIER_WORLD):
            return None
        if not self._evaluator.exact_norms and clips(scenario):
            return None  # how a class's norm rounds is its own affair, and the coefficient follows from it
        return related(scenario, name, pick, worlds, self._evaluator.extension)

    def _second(self, other: Scenario) -> Evaluation | None:
        """None: the other tier cannot run it."""
        if self.reference.name is not Relation.TIER or self._tier is None:
            return self._evaluator.evaluate(other)
        try:
            return self._tier().evaluate(other)
        except (UndecidedError, UsageError):
            return None


def _violated_on_one_tier(evaluation: Evaluation, *, simulated: bool) -> Divergence:
    there, here = ("in a simulated world", "on real ranks") if simulated else ("on real ranks", "in a simulated world")
    found = evaluation.divergence
    message = f"{SUMMARIES[Relation.TIER]}; the scenario holds {here}, {there} it does not"
    if found is None:
        return Divergence(property=Property.INVARIANCE, stage=Stage.BUILD, message=message)
    said = f"{message}: {found.property.value} at stage {found.stage.value}: {found.message}"
    return Divergence(property=Property.INVARIANCE, stage=found.stage, step=found.step, rank=found.rank, message=said)
