"""Whether what a verifier said of a plant is right. No torch."""

from __future__ import annotations

import enum

from msgspec import Struct

from harness.diagnosis.symptoms import Symptom, named_by
from harness.faults.museum.exhibit import Plant
from harness.report.result import Failure
from harness.scenario.model import Scenario


class Naming(enum.Enum):
    """What became of the symptom.

    RIGHT: one of those of the plant was named. MISSED: it has some, and none was named. NONE: it has none, and none
    was named. WRONG: one was named that is not the plant's.
    """

    RIGHT = "right"
    MISSED = "missed"
    NONE = "none"
    WRONG = "wrong"


class Judgement(Struct, frozen=True, kw_only=True):
    """What is right in what was said of a plant.

    ``location``: the property and the stage. ``naming``: the symptom. ``place``: the rank and the parameter; None where
    any is right.
    """

    location: bool
    naming: Naming
    place: bool | None


def judge(plant: Plant, failure: Failure, scenario: Scenario) -> Judgement:
    """Hold the failure that was told of a plant, with the scenario that it was told of, against its label."""
    properties = {prop.value for prop in plant.properties}
    stages = {stage.value for stage in plant.stages}
    return Judgement(
        location=failure.property in properties and failure.stage in stages,
        naming=_naming(plant.symptoms, failure.symptom),
        place=None if plant.place is None else plant.place(scenario, failure),
    )


def _naming(right: frozenset[Symptom], symptom: str | None) -> Naming:
    if symptom is None:
        return Naming.MISSED if right else Naming.NONE
    return Naming.RIGHT if named_by(symptom) in right else Naming.WRONG
