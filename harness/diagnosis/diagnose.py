"""From what ranks saw to one symptom, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.diagnosis import matching, norms
from harness.diagnosis.evidence import Evidence, gather
from harness.diagnosis.matching import Match
from harness.diagnosis.pattern import pattern
from harness.diagnosis.symptoms import SAYS_MORE, Symptom
from harness.scenario.model import Scenario
from harness.verdict import Observation, Quantity, Stage

Observations = Mapping[int, Observation | None]
"""By rank, what it saw at the first difference; None of a rank to which all was equal there."""

# What a symptom must have predicted right, beyond what was chosen to make it fit, before it is named. About a thousand
# guesses are tried, most of them wrong in the first elements: 24 bits leave one in ten thousand to chance.
_ENOUGH_BITS = 24.0
_ENOUGH_ELEMENTS = 3
_MOST_SCENARIOS = 48
_TELLING = 60  # wrong values


@dataclass(frozen=True)
class Diagnosis:
    """What is known of one failing scenario.

    Attributes:
        pattern: where the wrong values lie; None where nobody saw any.
        candidates: the symptoms that explain all of them.
    """

    pattern: str | None
    candidates: Mapping[Symptom, Match]


@dataclass(frozen=True)
class Named:
    """What several failing scenarios show together: at most one symptom, or those that remain.

    ``symptom`` in words, with its details.
    """

    symptom: str | None
    possible: tuple[str, ...] = ()


def diagnose(
    scenario: Scenario, observations: Observations, among: frozenset[Symptom] = frozenset(Symptom)
) -> Diagnosis:
    """One scenario by itself, with the symptoms among those given."""
    evidence = gather(scenario, observations)
    if evidence is None:
        return Diagnosis(None, norms.matches(scenario, observations, among))
    return Diagnosis(pattern(evidence), matching.matches(evidence.looked_at(), among))


@np.errstate(invalid="ignore", over="ignore")  # whatever memory holds that was never written
def where(scenario: Scenario, observations: Observations) -> str | None:
    """The pattern alone."""
    evidence = gather(scenario, observations)
    return None if evidence is None else pattern(evidence)


@np.errstate(invalid="ignore", over="ignore")  # whatever memory holds that was never written
def name(saved: tuple[Scenario, Observations], failing: Sequence[tuple[Scenario, Observations]]) -> Named:
    """The symptom of a violation.

    Args:
        saved: the scenario that is shown, which gives the details if it has them.
        failing: all scenarios that failed, the saved one among them or not; those that failed elsewhere say nothing.
    """
    place = _place(saved[1])
    alike = [each for each in failing if place is not None and _place(each[1]) == place]
    if saved not in alike:
        alike.append(saved)
    if place is None:
        return Named(None)
    alike = _informative(alike)
    alive = frozenset(Symptom)
    bits: dict[Symptom, float] = dict.fromkeys(Symptom, 0.0)
    fitting: dict[Symptom, float] = dict.fromkeys(Symptom, 0.0)  # also where it may not be named for it
    telling: dict[Symptom, int] = dict.fromkeys(Symptom, 0)
    details: dict[Symptom, str] = {}
    most: dict[Symptom, float] = {}
    for scenario, observations in alike:
        found = diagnose(scenario, observations, alive).candidates
        alive &= found.keys()
        if not alive:
            return Named(None)
        for symptom in alive:
            gained = max(found[symptom].bits, 0.0)
            fitting[symptom] += gained
            bits[symptom] += gained if found[symptom].proves else 0.0
            telling[symptom] += found[symptom].telling
            # By how many elements is told best where the most of them are; all else as the saved case shows it.
            clearest = found[symptom].bits > most.get(symptom, -math.inf)
            shown = clearest if symptom is Symptom.SHIFTED else (scenario, observations) == saved
            if shown or symptom not in details:
                details[symptom] = found[symptom].detail
            most[symptom] = max(found[symptom].bits, most.get(symptom, -math.inf))
    proven = {each for each in alive if bits[each] >= _ENOUGH_BITS and telling[each] >= _ENOUGH_ELEMENTS}
    if Symptom.PADDING in alive and all(_only_padding(*each) for each in alike):
        proven.add(Symptom.PADDING)  # that is what was seen, and no guess
    remaining = {each for each in alive if not any(general is each and more in alive for general, more in SAYS_MORE)}
    if len(remaining) == 1 and remaining <= proven:
        (only,) = remaining
        return Named(_phrase(only, details[only]))
    if len(remaining & proven) == 1:
        # The others fit by chance as well: they were never put to the test.
        (only,) = remaining & proven
        if all(fitting[each] < _ENOUGH_BITS / 2 for each in remaining - {only}):
            return Named(_phrase(only, details[only]))
    return Named(None, tuple(sorted(each.value for each in remaining)))


def _phrase(symptom: Symptom, detail: str) -> str:
    return f"{symptom.value} ({detail})" if detail else symptom.value


def _place(observations: Observations) -> tuple[Quantity, Stage] | None:
    """Of what, and where, the first difference is."""
    return next(((one.quantity, one.stage) for _, one in sorted(observations.items()) if one is not None), None)


def _informative(failing: Sequence[tuple[Scenario, Observations]]) -> list[tuple[Scenario, Observations]]:
    """The scenarios to look at. Where right sums are known exactly, no others are needed.

    First those that tell the most for the time they take: few symptoms are left for the others to be asked about.
    """
    evidence = [(each, gather(*each)) for each in failing]
    if all(entry[1] is None for entry in evidence):
        return list(failing)  # a number each: asking all of them costs little, and the first ones may be much alike
    exact = [entry for entry in evidence if entry[1] is None or not entry[1].vague]
    chosen = exact or evidence
    ordered = sorted(chosen, key=lambda entry: abs(math.log((_num_wrong(entry[1]) + 1) / _TELLING)))
    return [each for each, _ in ordered[:_MOST_SCENARIOS]]


def _only_padding(scenario: Scenario, observations: Observations) -> bool:
    evidence = gather(scenario, observations)
    return evidence is not None and bool(evidence.slots.padding[evidence.wrong].all())


def _num_wrong(evidence: Evidence | None) -> int:
    return 0 if evidence is None else int(np.count_nonzero(evidence.wrong))
