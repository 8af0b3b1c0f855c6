"""What is made of the campaign of an exhibit, and how outcomes add up to a score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum.exhibit import ONE, TWO, Control, Kind, Plant, known, properties, stages
from harness.faults.museum.places import last_rank
from harness.museum.judging import Judgement, Naming
from harness.museum.score import (
    CaseSize,
    ControlOutcome,
    MuseumResult,
    PlantOutcome,
    Share,
    control_outcome,
    not_judged,
    plant_outcome,
    summarise,
    verdict_of,
)
from harness.report.result import Examples, Failure, FoundAfter, Result, Verdict, to_json

PLANT = Plant(
    name="AnyOf",
    module="norm",
    bugs=("a/b#1", "a/b#2"),
    kind=Kind.NORM,
    why="a test",
    properties=properties("norm gradient"),
    stages=stages("norm reduce"),
    symptoms=frozenset({Symptom.FACTOR_WORLD}),
    place=last_rank,
    known=known(2, [2], bucket=2),
)
CONTROL = Control("PlainZero", "a test")


SITUATIONS = 40


def campaign(verdict: Verdict = "violated", *, run: int = SITUATIONS, discarded: int = 0, **more: Any) -> Result:
    return Result(
        verdict=verdict,
        subject="museum:any-of",
        backend="sim",
        worlds=(1, 2),
        seed=3,
        examples=Examples(run=run, discarded=discarded),
        seconds=2.0,
        examples_per_second=20.0,
        **more,
    )


def told(**fields: Any) -> Failure:
    given: dict[str, Any] = {"property": "norm", "stage": "norm", "symptom": Symptom.FACTOR_WORLD.value, "rank": 1}
    return Failure(**{**given, **fields})


def caught(name: str, *, judgement: Judgement | None, symptoms: tuple[str, ...] = (), **fields: Any) -> PlantOutcome:
    given: dict[str, Any] = {"kind": "layout", "bugs": (), "properties": (), "stages": (), "seed": 1, "caught": True}
    return PlantOutcome(id=name, symptoms=symptoms, judgement=judgement, **{**given, **fields})


def test_a_plants_outcome_has_what_was_told_how_large_the_case_is_and_what_is_right() -> None:
    scenario = known(2, [3, (2, 2)], bucket=5, operations=[*TWO, *ONE])
    found = FoundAfter(seconds=0.25, examples=4)

    outcome = plant_outcome(PLANT, 9, campaign(failure=told(), found_after=found), scenario, SITUATIONS)

    assert (outcome.id, outcome.kind, outcome.bugs, outcome.seed) == ("any-of", "norm and clipping", PLANT.bugs, 9)
    assert (outcome.properties, outcome.stages) == (("gradient", "norm"), ("reduce", "norm"))
    assert outcome.symptoms == ("W times too large",)
    assert (outcome.caught, outcome.found_after, outcome.examples, outcome.seconds) == (True, found, 40, 2.0)
    assert outcome.case == CaseSize(world=2, parameters=2, elements=7, bucket=5, steps=2, parts=3)
    assert outcome.judgement == Judgement(location=True, naming=Naming.RIGHT, place=True)


@pytest.mark.parametrize(
    ("failure", "judgement"),
    [
        (told(rank=0), Judgement(location=True, naming=Naming.RIGHT, place=False)),
        (told(stage="gather", symptom=None), Judgement(location=False, naming=Naming.MISSED, place=True)),
        (told(property="weights"), Judgement(location=False, naming=Naming.RIGHT, place=True)),
        (told(symptom="a part is missing (part 2)"), Judgement(location=True, naming=Naming.WRONG, place=True)),
    ],
)
def test_what_was_told_is_held_against_the_label(failure: Failure, judgement: Judgement) -> None:
    assert plant_outcome(PLANT, 9, campaign(failure=failure), PLANT.known, SITUATIONS).judgement == judgement


def test_of_a_plant_without_a_symptom_none_may_be_named() -> None:
    without = replace(PLANT, symptoms=frozenset())
    silent, named = (
        plant_outcome(without, 9, campaign(failure=told(symptom=symptom)), PLANT.known, SITUATIONS).judgement
        for symptom in (None, Symptom.FACTOR_WORLD.value)
    )
    assert silent is not None
    assert named is not None
    assert (silent.naming, named.naming) == (Naming.NONE, Naming.WRONG)


def test_what_was_not_found_is_not_caught_and_not_judged() -> None:
    holds = plant_outcome(PLANT, 9, campaign("holds"), None, SITUATIONS)
    undecided = plant_outcome(PLANT, 9, campaign("unknown", reason="nothing was compared"), None, SITUATIONS)
    lost = not_judged(PLANT, 9, "2 workers died of it")

    assert [each.caught for each in (holds, undecided, lost) if isinstance(each, PlantOutcome)] == [False] * 3
    assert [each.reason for each in (holds, undecided, lost)] == [None, "nothing was compared", "2 workers died of it"]
    assert (holds.judgement, holds.case, holds.examples) == (None, None, 40)


def test_a_violation_whose_case_was_not_saved_is_caught_but_not_judged() -> None:
    outcome = plant_outcome(PLANT, 9, campaign(failure=told()), None, SITUATIONS)
    assert (outcome.caught, outcome.judgement, outcome.case) == (True, None, None)


def test_a_control_passes_only_if_it_holds() -> None:
    alarm = control_outcome(CONTROL, 9, campaign(failure=told()), SITUATIONS)
    assert (alarm.id, alarm.verdict, alarm.failure) == ("plain-zero", "violated", told())
    outcomes = [alarm, control_outcome(CONTROL, 9, campaign("holds"), SITUATIONS)]
    outcomes += [control_outcome(CONTROL, 9, campaign("unknown", reason="no example was run"), SITUATIONS)]
    lost = not_judged(CONTROL, 9, "the class cannot be imported")
    assert isinstance(lost, ControlOutcome)

    summary = summarise([], [*outcomes, lost], 0)

    assert (summary.controls, summary.false_alarms, summary.undecided_controls) == (4, 1, 2)
    assert summary.control_examples == 3 * SITUATIONS
    assert verdict_of(summary, complete=True) == "violated"
    verdicts = [verdict_of(summarise([], [each], 0), complete=True) for each in (*outcomes, lost)]
    assert verdicts == ["violated", "holds", "unknown", "unknown"]


def test_what_a_control_declined_was_tried_on_it_too() -> None:
    result = campaign("holds", run=SITUATIONS - 1)
    declined = campaign("holds", run=SITUATIONS - 1, discarded=1)

    assert control_outcome(CONTROL, 9, result, SITUATIONS).verdict == "unknown"
    assert control_outcome(CONTROL, 9, declined, SITUATIONS).verdict == "holds"


def test_what_was_not_found_in_too_few_scenarios_is_undecided() -> None:
    few, enough = (
        plant_outcome(PLANT, 9, campaign("holds", run=run), None, SITUATIONS) for run in (SITUATIONS - 1, SITUATIONS)
    )
    assert (few.undecided, few.missed, enough.undecided, enough.missed) == (True, False, False, True)
    why = "only {} in 2.0 s, fewer than the 40 situations there are; more --seconds-per-plant"
    assert few.reason == why.format("39 examples")
    found = plant_outcome(
        PLANT, 9, campaign(run=1, failure=told(cut_short="it took too long")), PLANT.known, SITUATIONS
    )
    assert (found.caught, found.undecided, found.reason, found.cut_short) == (True, False, None, True)

    passed = control_outcome(CONTROL, 9, campaign("holds", run=1), SITUATIONS)
    assert (passed.verdict, passed.reason) == ("unknown", why.format("1 example"))
    assert control_outcome(CONTROL, 9, campaign("violated", run=1), SITUATIONS).verdict == "violated"
    own = plant_outcome(PLANT, 9, campaign("unknown", run=0, reason="no example was run"), None, SITUATIONS)
    assert (own.undecided, own.reason) == (True, "no example was run")


def verdict_on(*plants: PlantOutcome, controls: tuple[ControlOutcome, ...] = (), complete: bool = True) -> Verdict:
    return verdict_of(summarise(plants, controls, 0), complete=complete)


def test_the_verdict_is_violated_before_it_is_unknown_before_it_holds() -> None:
    right = caught("a", judgement=Judgement(location=True, naming=Naming.MISSED, place=True), symptoms=("x",))
    wrong = caught("b", judgement=Judgement(location=True, naming=Naming.WRONG, place=None))
    missed = caught("c", judgement=None, caught=False)
    undecided = msgspec.structs.replace(missed, undecided=True)
    unread = caught("d", judgement=None)
    alarm, passed = (ControlOutcome(id="e", seed=1, verdict=verdict) for verdict in ("violated", "holds"))

    assert verdict_on(right, controls=(passed,)) == "holds"
    assert verdict_on(right, complete=False) == verdict_on(right, undecided) == verdict_on(right, unread) == "unknown"
    assert verdict_on(right, undecided, missed) == verdict_on(wrong, undecided, complete=False) == "violated"
    assert verdict_on(undecided, controls=(alarm, passed)) == "violated"


def test_the_verdict_needs_the_right_property_and_stage_for_95_percent() -> None:
    fine = Judgement(location=True, naming=Naming.NONE, place=True)
    right = caught("a", judgement=fine)
    elsewhere = caught("b", judgement=msgspec.structs.replace(fine, location=False))
    other_rank = caught("c", judgement=msgspec.structs.replace(fine, place=False))
    assert verdict_on(*[right] * 19, elsewhere) == "holds"
    assert verdict_on(*[right] * 18, elsewhere) == "violated"
    assert verdict_on(right, other_rank) == "holds"  # told, and no part of it


def test_the_score_counts_each_kind_of_mistake_by_itself() -> None:
    right = Judgement(location=True, naming=Naming.RIGHT, place=True)
    size = CaseSize(world=2, parameters=1, elements=3, bucket=4, steps=1, parts=2)
    some = ("W times too large",)
    plants = [
        caught("a", judgement=right, symptoms=some, bugs=("x/y#1", "x/y#2"), case=size),
        caught("b", judgement=Judgement(location=True, naming=Naming.MISSED, place=None), symptoms=some),
        caught("c", judgement=Judgement(location=False, naming=Naming.WRONG, place=False), symptoms=some),
        caught("d", judgement=Judgement(location=True, naming=Naming.NONE, place=None), bugs=("x/y#1",)),
        caught("e", judgement=Judgement(location=True, naming=Naming.WRONG, place=True)),
        caught("f", judgement=None, caught=False, bugs=("x/y#3",)),
    ]

    summary = summarise(plants, [], left_out=7)

    assert (summary.plants, summary.caught, summary.bugs, summary.left_out) == (6, 5, 3, 7)
    assert summary.location == Share(right=4, of=5)
    assert summary.symptom == Share(right=1, of=3)
    assert summary.unnamed == Share(right=1, of=2)
    assert (summary.missed_symptom, summary.wrong_symptom) == (1, 2)
    assert summary.place == Share(right=2, of=3)
    assert summary.case == size
    assert (summary.missed, summary.undecided_plants, summary.not_judged) == (1, 0, 0)


def test_medians_are_of_the_plants_that_were_caught() -> None:
    times = [FoundAfter(seconds=seconds, examples=examples) for seconds, examples in ((3.0, 9), (0.5, 2), (1.0, 1))]
    sizes = [CaseSize(world=n, parameters=1, elements=10 * n, bucket=5, steps=1, parts=1) for n in (1, 2)]
    plants = [caught(str(number), judgement=None, found_after=found) for number, found in enumerate(times)]
    plants = [msgspec.structs.replace(plant, case=size) for plant, size in zip(plants, [*sizes, None], strict=True)]
    plants.append(caught("missed", judgement=None, caught=False, seconds=20.0, examples=400))

    summary = summarise(plants, [], 0)

    assert (summary.seconds, summary.slowest_seconds, summary.examples) == (1.0, 3.0, 2)
    assert summary.case == CaseSize(world=1.5, parameters=1, elements=15, bucket=5, steps=1, parts=1)
    nothing = summarise([], [], 0)
    assert (nothing.seconds, nothing.slowest_seconds, nothing.examples, nothing.case) == (None,) * 4


@pytest.mark.parametrize(
    ("verdict", "interrupted", "code"),
    [("holds", False, 0), ("violated", False, 1), ("unknown", False, 3), ("violated", True, 130)],
)
def test_the_exit_code_is_the_verdicts(verdict: Verdict, interrupted: bool, code: int) -> None:
    result = MuseumResult(
        verdict=verdict,
        backend="sim",
        worlds=(1,),
        seed=1,
        workers=1,
        seconds_per_plant=20.0,
        examples_per_control=300,
        seconds=1.0,
        summary=summarise([], [], 0),
        plants=(plant_outcome(PLANT, 9, campaign(failure=told(actual=float("nan"))), PLANT.known, SITUATIONS),),
        interrupted=interrupted,
    )
    assert result.exit_code == code
    written = msgspec.json.decode(to_json(result))
    assert written["plants"][0]["judgement"] == {"location": True, "naming": "right", "place": True}
    assert written["plants"][0]["failure"]["actual"] == "nan"
