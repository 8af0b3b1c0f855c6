"""What a worker does with the scenarios of a round, over an evaluator that answers as it is told."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from harness.evaluate import Conclusion, Evaluation, Evaluator
from harness.fuzz import state
from harness.fuzz.examiner import CampaignExaminer, Errand, OutOfTime, RoundOver
from harness.fuzz.messages import Key
from harness.fuzz.state import Finding, scenario_id
from harness.runner import CampaignOptions
from harness.scenario import codec, generate
from harness.scenario.model import CONTRACT, Scenario
from harness.scenario.relations import Observed, Relation, RelationReference, related
from harness.subjects.source import SubjectSource
from harness.verdict import Divergence, Property, Stage, WeightsObservation

SCENARIOS = [generate.draw(1, index, (2, 3)) for index in range(4)]
HOLDS = Evaluation(Conclusion.HOLDS, situations=frozenset({"first-spill"}), margin=0.5, checks={"weights": 1})


def violated(prop: Property = Property.MASTER) -> Evaluation:
    found = Divergence(property=prop, stage=Stage.UPDATE, message="planted", rank=0)
    return Evaluation(Conclusion.VIOLATED, found, fingerprint=(prop,))


class Canned:
    simulated = True
    exact_norms = True
    extension = CONTRACT

    def __init__(self, answers: dict[Scenario, Evaluation]) -> None:
        self.answers = answers

    def evaluate(self, scenario: Scenario) -> Evaluation:
        return self.answers.get(scenario, HOLDS)

    def closely(self, _: Scenario, evaluation: Evaluation) -> Evaluation:
        return evaluation

    attributed = closely


class Listener:
    def __init__(self) -> None:
        self.told: list[Finding] = []
        self.notes: list[str] = []
        self.cases: list[str] = []

    def progress(self, doing: str) -> None: ...

    def found(self, finding: Finding) -> None:
        self.told.append(finding)
        assert finding.failure.case is not None
        self.cases.append(Path(finding.failure.case).read_text())  # it is there when it is told

    def note(self, text: str) -> None:
        self.notes.append(text)


Make = Callable[..., tuple[CampaignExaminer, Listener]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    for name in ("findings", "cases"):
        (tmp_path / name).mkdir()

    def made(answers: dict[Scenario, Evaluation] | None = None, **fields: Any) -> tuple[CampaignExaminer, Listener]:
        options = CampaignOptions(
            subject=SubjectSource("zero2", "zero2"),
            worlds=(2, 3),
            backend="sim",
            seed=1,
            examples=1,
            seconds=None,
            bucket=None,
            parameters=None,
            report=tmp_path / "cases",
            timeout_s=None,
        )
        listener = Listener()
        settings = {"directory": tmp_path, "keep_going": False, "deadline": None, **fields}
        examiner = CampaignExaminer(options, cast(Evaluator, Canned(answers or {})), listener, **settings)
        examiner.begin(Errand(4, 100))
        return examiner, listener

    return made


def offers(*scenarios: Scenario) -> Callable[[Callable[[Scenario], bool]], None]:
    def smaller(fails: Callable[[Scenario], bool]) -> None:
        for scenario in scenarios:
            fails(scenario)

    return smaller


def test_a_scenario_is_counted_with_its_id(make: Make) -> None:
    examiner, _ = make()
    seen = examiner.examine(SCENARIOS[0])
    assert (seen.violated, seen.margin, "first-spill" in seen.reached) == (False, 0.5, True)
    assert "world-three" not in seen.reached
    assert "world-three" in examiner.examine(SCENARIOS[1]).reached  # what the scenario itself shows
    assert examiner.ids == [scenario_id(each) for each in SCENARIOS[:2]]
    assert len({*examiner.ids}) == 2
    assert (examiner.tally.num_run, examiner.tally.margin) == (2, 0.5)
    examiner.begin(Errand(5, 100))
    assert (examiner.ids, examiner.tally.num_run) == ([], 0)


def test_a_round_ends_after_so_many_and_when_time_is_up(make: Make) -> None:
    examiner, _ = make()
    examiner.begin(Errand(0, 1))
    examiner.examine(SCENARIOS[0])
    with pytest.raises(RoundOver):
        examiner.examine(SCENARIOS[1])
    assert len(examiner.ids) == 1
    late, _ = make(deadline=time.monotonic() - 1)
    with pytest.raises(OutOfTime):
        late.examine(SCENARIOS[0])


def test_a_violation_is_saved_before_it_is_told_then_replaced_by_the_smaller(make: Make, tmp_path: Path) -> None:
    examiner, listener = make({SCENARIOS[0]: violated(), SCENARIOS[1]: violated()})
    assert examiner.examine(SCENARIOS[0]).violated

    assert not examiner.explain(SCENARIOS[0], offers(SCENARIOS[1]))

    assert [finding.complete for finding in listener.told] == [False, False, False, False, False, True]
    saved = [codec.decode(text.encode()).scenario for text in listener.cases]
    assert saved == [SCENARIOS[0], SCENARIOS[0], *[SCENARIOS[1]] * 4]
    (finding,) = (state.load_finding(tmp_path, path.stem) for path in (tmp_path / "findings").iterdir())
    assert finding == listener.told[-1]
    assert [path.name for path in (tmp_path / "cases").iterdir()] == [Path(finding.failure.case or "").name]


def test_a_case_of_an_interrupted_run_is_replaced_too(make: Make, tmp_path: Path) -> None:
    examiner, listener = make({SCENARIOS[0]: violated(), SCENARIOS[1]: violated()})
    examiner.examine(SCENARIOS[0])

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examiner.explain(SCENARIOS[0], interrupted)
    assert not listener.told[-1].complete
    again, _ = make({SCENARIOS[0]: violated(), SCENARIOS[1]: violated()})
    again.examine(SCENARIOS[0])
    again.explain(SCENARIOS[0], offers(SCENARIOS[1]))
    assert len(list((tmp_path / "cases").iterdir())) == 1
    assert len(list((tmp_path / "findings").iterdir())) == 1


def test_what_the_end_of_the_campaign_cut_short_is_not_complete(make: Make) -> None:
    examiner, listener = make({SCENARIOS[0]: violated()}, deadline=time.monotonic() + 1e6)
    examiner.examine(SCENARIOS[0])
    examiner._deadline = time.monotonic()  # it passes while the violation is looked into

    examiner.explain(SCENARIOS[0], offers(SCENARIOS[1]))

    assert not listener.told[-1].complete
    assert "may not be the smallest" in listener.notes[-1]


def test_of_each_kind_one_is_looked_into(make: Make) -> None:
    answers = {SCENARIOS[0]: violated(), SCENARIOS[1]: violated(), SCENARIOS[2]: violated(Property.NORM)}
    examiner, listener = make({**answers, SCENARIOS[3]: violated(Property.CLIP)}, keep_going=True)
    examiner.begin(Errand(4, 100, frozenset({Key("clip", "update", None)})))
    for scenario in SCENARIOS:
        assert examiner.examine(scenario).violated
        assert examiner.explain(scenario, offers())

    assert {finding.failure.property for finding in listener.told} == {"master", "norm"}
    assert len({finding.name for finding in listener.told}) == 2
    assert examiner.again == 2


def looking(prop: Property, symptom: str | None, possible: tuple[str, ...] | None = None) -> Evaluation:
    evaluation = violated(prop)
    assert evaluation.divergence is not None
    found = msgspec.structs.replace(evaluation.divergence, symptom=symptom, symptoms_possible=possible)
    return dataclasses.replace(evaluation, divergence=found)


def test_mistakes_of_one_place_are_told_apart_by_their_symptom_without_its_details(make: Make) -> None:
    looks = [
        looking(Property.MASTER, "a part is missing (part 0)"),
        looking(Property.MASTER, "a part is missing (part 1)"),
        looking(Property.MASTER, "averaged over parts"),
        looking(Property.MASTER, None, ("averaged over parts", "counted twice")),
        looking(Property.MASTER, None),
    ]
    scenarios = [*SCENARIOS, generate.draw(1, len(SCENARIOS), (2, 3))]
    examiner, listener = make(dict(zip(scenarios, looks, strict=True)), keep_going=True)
    for scenario in scenarios:
        examiner.examine(scenario)
        assert examiner.explain(scenario, offers())

    assert {finding.seen.symptom for finding in listener.told} == {"a part is missing", "averaged over parts", None}
    assert examiner.again == 2


def test_a_case_does_not_become_that_of_another_mistake_when_it_is_made_smaller(make: Make) -> None:
    looks = [
        looking(Property.MASTER, "averaged over parts"),
        looking(Property.MASTER, "counted twice"),
        looking(Property.MASTER, None, ("counted twice", "averaged over parts")),
        looking(Property.MASTER, None),
    ]
    examiner, listener = make(dict(zip(SCENARIOS, looks, strict=True)))
    examiner.examine(SCENARIOS[0])
    examiner.explain(SCENARIOS[0], offers(*SCENARIOS[1:4]))
    assert codec.decode(listener.cases[-1].encode()).scenario == SCENARIOS[2]


def test_what_is_found_in_a_round_does_not_replace_what_was_found_there_before(make: Make, tmp_path: Path) -> None:
    """A round that was interrupted is run again, and what is known by then is not looked into a second time."""
    answers = {SCENARIOS[0]: violated(), SCENARIOS[1]: violated(Property.NORM)}
    first, told = make(answers, keep_going=True)
    first.examine(SCENARIOS[0])
    first.explain(SCENARIOS[0], offers())

    again, _ = make(answers, keep_going=True)
    again.begin(Errand(4, 100, frozenset({told.told[-1].key})))
    for scenario in SCENARIOS[:2]:
        again.examine(scenario)
        again.explain(scenario, offers())

    found = [state.load_finding(tmp_path, path.stem) for path in (tmp_path / "findings").iterdir()]
    assert {each.failure.property for each in found if each is not None} == {"master", "norm"}


def test_two_scenarios_that_should_give_the_same_are_one_case_with_its_relation(make: Make) -> None:
    scenario = next(each for each in map(exact, range(20)) if related(each, *BUCKET))
    other = related(scenario, *BUCKET)
    assert other is not None
    same, different = (
        dataclasses.replace(HOLDS, observed=Observed((), (WeightsObservation(0, digest),)), fingerprint=(digest, None))
        for digest in ("aa", "bb")
    )
    reference = RelationReference(*BUCKET)
    examiner, listener = make({scenario: same, other: different})
    assert examiner.relate(scenario, reference).violated
    assert examiner.ids == [scenario_id(scenario)]

    assert not examiner.explain(scenario, offers())

    finding = listener.told[-1]
    assert (finding.failure.property, finding.complete) == ("invariance", True)
    assert codec.decode(listener.cases[-1].encode()) == codec.load(Path(finding.failure.case or ""))
    assert codec.decode(listener.cases[-1].encode()).relation == reference

    fine, _ = make({scenario: same, other: same})
    assert not fine.relate(scenario, reference).violated
    assert fine.tally.checks["invariance"] == 1


def test_a_related_scenario_that_is_wrong_by_itself_is_the_case(make: Make) -> None:
    scenario = next(each for each in map(exact, range(20)) if related(each, *BUCKET))
    other = related(scenario, *BUCKET)
    assert other is not None
    examiner, listener = make({other: violated()})
    assert examiner.relate(scenario, RelationReference(*BUCKET)).violated
    examiner.explain(scenario, offers())

    case = codec.decode(listener.cases[-1].encode())
    assert (case.scenario, case.relation) == (other, None)
    assert listener.told[-1].failure.property == "master"


def exact(index: int) -> Scenario:
    return msgspec.structs.replace(generate.draw(1, index, (2,), fault=True), faults=())


BUCKET = (Relation.BUCKET, 0, (2,))


def test_ids_tell_scenarios_apart_and_stay_what_they_are() -> None:
    ids = [scenario_id(scenario) for scenario in SCENARIOS]
    assert len(set(ids)) == len(ids)
    assert scenario_id(msgspec.structs.replace(SCENARIOS[0])) == ids[0]
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in ids)
