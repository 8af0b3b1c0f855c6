"""The coordinator of a museum over workers that do what a test says: what it hands out, keeps and concludes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
from harness.faults.museum.exhibit import known
from harness.museum import campaign
from harness.museum.campaign import MuseumOptions, WorkerView, run_museum, seed_of
from harness.museum.messages import Done, Progress, Ready, RunCampaign, Setup, Trouble
from harness.museum.score import ControlOutcome, MuseumResult, Outcome
from harness.report.result import Examples, Failure, FoundAfter, Result, Verdict
from harness.scenario import codec
from tests.scripted import Behaviour, ScriptedCrew
from tests.support import required

PLANT = next(plant for plant in PLANTS if plant.name == "MaxOfNorms")
CONTROL, OTHER = CONTROLS[:2]


class Watching:
    def __init__(self) -> None:
        self.exhibits = 0
        self.views: list[list[WorkerView]] = []
        self.outcomes: list[Outcome] = []
        self.notes: list[str] = []
        self.later: Callable[[], None] | None = None  # done when what goes on with CONTROL was shown

    def began(self, exhibits: int, workers: int) -> None:
        self.exhibits = exhibits

    def view(self, workers: Sequence[WorkerView]) -> None:
        self.views.append(list(workers))
        if self.later is not None and any(view.doing for view in workers):
            self.later()
            self.later = None

    def done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def note(self, text: str) -> None:
        self.notes.append(text)


def ended(order: RunCampaign, verdict: Verdict, *, run: int = 300, **more: Any) -> Done:
    return Done(
        Result(
            verdict=verdict,
            subject=order.given,
            backend="sim",
            worlds=(1, 2),
            seed=order.seed,
            examples=Examples(run=run),
            seconds=1.0,
            examples_per_second=5.0,
            **more,
        )
    )


def as_they_must(crew: ScriptedCrew, worker: object, order: object) -> list[Any]:
    """Workers that catch every plant and find every control right."""
    if isinstance(order, Setup):
        return [Ready()]
    assert isinstance(order, RunCampaign)
    if order.given == PLANT.subject:
        case = codec.save(codec.Case(known(2, [2], bucket=2)), Path(crew.setups[0].report))
        failure = Failure(property="norm", stage="norm", case=str(case))
        found = FoundAfter(seconds=0.1, examples=5)
        return [Progress(3, "world 2"), ended(order, "violated", failure=failure, found_after=found)]
    return [ended(order, "holds")]


class Runs:
    """Runs museums over scripted workers."""

    def __init__(self, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.report = report
        self.watching = Watching()
        self.crew = ScriptedCrew(as_they_must)
        self._monkeypatch = monkeypatch

    def __call__(self, behaviour: Behaviour = as_they_must, **fields: Any) -> MuseumResult:
        self.watching, self.crew = Watching(), ScriptedCrew(behaviour)
        self._monkeypatch.setattr(campaign, "Crew", lambda *_: self.crew)
        given: dict[str, Any] = {"plants": (PLANT,), "controls": (CONTROL, OTHER), "seed": 1, "report": self.report}
        given |= {"seconds_per_plant": 20.0, "workers": 2}
        result = run_museum(MuseumOptions(**{**given, **fields}), self.watching)
        assert self.crew.ended or not self.crew.setups
        return result


@pytest.fixture
def museum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "cases", monkeypatch)


def on(exhibit: str, *reports: Any) -> Behaviour:
    """Workers that answer so to the order to run this exhibit, and else do as they must."""

    def behave(crew: ScriptedCrew, worker: Any, order: object) -> list[Any]:
        if isinstance(order, RunCampaign) and order.given == f"museum:{exhibit}":
            return [report(order) if callable(report) else report for report in reports]
        return as_they_must(crew, worker, order)

    return behave


def test_every_exhibit_is_run_once_within_its_bounds_from_a_seed_of_its_own(museum: Runs) -> None:
    result = museum(seconds_per_plant=3.0, control_examples=40)

    assert (result.verdict, result.exit_code, result.not_run, result.reason) == ("holds", 0, 0, None)
    orders = {order.given: order for order in museum.crew.orders if isinstance(order, RunCampaign)}
    assert len(museum.crew.orders) == len(orders) == 3
    assert all(order.seconds == 3.0 for order in orders.values())
    assert [orders[each.subject].examples for each in (CONTROL, OTHER)] == [40, 40]
    assert orders[PLANT.subject].examples > 10**6
    assert orders[PLANT.subject].absolute == PLANT.target
    seeds = {order.seed for order in orders.values()}
    assert seeds == {seed_of(1, each.id) for each in (PLANT, CONTROL, OTHER)}
    assert len(seeds) == 3
    assert seed_of(2, PLANT.id) not in seeds
    assert [outcome.seed for outcome in result.controls] == [seed_of(1, each.id) for each in (CONTROL, OTHER)]


def test_an_exhibit_of_a_slower_system_has_more_time(museum: Runs) -> None:
    muon = next(control for control in CONTROLS if control.system == "muon")
    museum(plants=(), controls=(CONTROL, muon), seconds_per_plant=3.0)

    seconds = {order.given: order.seconds for order in museum.crew.orders if isinstance(order, RunCampaign)}
    assert seconds == {CONTROL.subject: 3.0, muon.subject: 9.0}


def test_what_came_of_a_plant_is_judged_by_the_case_that_was_saved(museum: Runs) -> None:
    result = museum()

    (plant,) = result.plants
    assert plant.judgement is not None
    assert (plant.caught, plant.judgement.location) == (True, True)
    assert plant.case is not None
    assert (plant.case.world, plant.case.elements) == (2, 2)
    assert museum.watching.exhibits == len(museum.watching.outcomes) == 3


def test_a_view_has_what_each_worker_does(museum: Runs) -> None:
    """The second exhibit is done only once what goes on with it has been shown."""

    def begun(crew: ScriptedCrew, worker: Any, order: object) -> list[Any]:
        said = as_they_must(crew, worker, order)
        if isinstance(order, RunCampaign) and order.given == CONTROL.subject:
            museum.watching.later = lambda: crew.said.extend((worker, report) for report in said)
            return [Progress(2, "world 1")]
        return said

    result = museum(begun, workers=1)

    shown = [(view.exhibit, view.examples, view.doing) for (view,) in museum.watching.views]
    assert (CONTROL.id, 2, "world 1") in shown
    assert result.not_run == 0


@pytest.mark.parametrize("exhibit", [PLANT.id, CONTROL.id])
@pytest.mark.parametrize("what", ["the other verdict", "undecided", "unusable"])
def test_one_that_is_not_as_it_must_be_fails_the_whole(museum: Runs, exhibit: str, what: str) -> None:
    def answer(order: RunCampaign) -> Done:
        if what == "unusable":
            return Done(None, "cannot be imported")
        if what == "undecided":
            return ended(order, "unknown", run=3, reason="no ranks")
        if exhibit == PLANT.id:
            return ended(order, "holds")
        return ended(order, "violated", failure=Failure(property="norm"))

    result = museum(on(exhibit, answer))

    decided = what == "the other verdict"
    assert (result.verdict, result.exit_code) == (("violated", 1) if decided else ("unknown", 3))
    assert result.not_run == 0
    (wrong,) = (
        each
        for each in museum.watching.outcomes
        if (each.verdict != "holds" if isinstance(each, ControlOutcome) else not each.caught)
    )
    assert wrong.id == exhibit


def test_a_campaign_shorter_than_the_situations_there_are_decides_nothing(museum: Runs) -> None:
    few = len(required(campaign.WORLDS)) - 1

    missed = museum(on(PLANT.id, lambda order: ended(order, "holds", run=few + 1)))
    undecided = museum(on(PLANT.id, lambda order: ended(order, "holds", run=few)))
    passed = museum(on(CONTROL.id, lambda order: ended(order, "holds", run=few)))

    assert [each.exit_code for each in (missed, undecided, passed)] == [1, 3, 3]
    assert [each.reason for each in (missed, undecided, passed)] == [None] * 3
    assert f"only {few} examples in 1.0 s" in (undecided.plants[0].reason or "")
    assert f"only {few} examples in 1.0 s" in (passed.controls[0].reason or "")


def test_a_result_says_where_cases_are_and_which_bugs_are_left_out(museum: Runs) -> None:
    result = museum()
    assert (result.report, result.left_out) == (str(museum.report), LEFT_OUT)


def test_what_a_worker_died_of_is_run_once_more_by_another(museum: Runs) -> None:
    deaths: list[int] = []

    def mortal(crew: ScriptedCrew, worker: Any, order: object) -> list[Any]:
        if isinstance(order, RunCampaign) and order.given == PLANT.subject and not deaths:
            deaths.append(worker.number)
            return [None]
        return as_they_must(crew, worker, order)

    result = museum(mortal)

    assert (result.verdict, result.not_run) == ("holds", 0)
    assert len(museum.crew.setups) == 3
    assert museum.watching.notes == [f"worker {deaths[0]} ended with signal 9 (SIGKILL); another takes its place"]


def test_what_two_workers_died_of_is_not_caught_with_the_reason(museum: Runs) -> None:
    result = museum(on(PLANT.id, Trouble("undecided", "internal error: oh"), None))

    assert (result.verdict, result.exit_code, result.not_run) == ("unknown", 3, 0)
    (plant,) = result.plants
    assert plant.undecided
    assert plant.reason is not None
    assert plant.reason.startswith("2 workers died of it; the last: worker ")
    assert plant.reason.endswith(": internal error: oh")
    assert [control.verdict for control in result.controls] == ["holds", "holds"]


def test_a_campaign_that_does_not_end_is_ended_with_its_worker(museum: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "OVERDUE_S", 0.0)

    result = museum(on(PLANT.id), seconds_per_plant=0.05)

    (plant,) = result.plants
    assert not plant.caught
    assert "it had not ended 0.05 s after max-of-norms was begun" in (plant.reason or "")


def test_workers_that_end_before_they_run_anything_are_given_up(museum: Runs) -> None:
    result = museum(lambda crew, worker, order: [Trouble("undecided", "no room"), None])

    assert (result.verdict, result.exit_code, result.not_run) == ("unknown", 3, 3)
    assert result.reason is not None
    assert result.reason.startswith("3 workers ended before they could run anything; the last: worker ")
    assert result.reason.endswith(": no room")


def test_a_canary_that_passes_ends_it(museum: Runs) -> None:
    result = museum(lambda crew, worker, order: [Trouble("broken", "the harness is broken: canary-bit"), None])

    assert (result.verdict, result.reason, result.not_run) == ("unknown", "the harness is broken: canary-bit", 3)
    assert len(museum.crew.setups) == 2


def test_a_machine_that_starts_no_worker_and_nothing_to_run_are_unknown(
    museum: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(11, "too many processes")

    monkeypatch.setattr(ScriptedCrew, "start", refused)
    result = museum()
    assert (result.verdict, result.reason) == ("unknown", "no worker could be started: too many processes")
    empty = museum(plants=(), controls=())
    assert (empty.verdict, empty.exit_code, empty.reason) == ("unknown", 3, "there is nothing to run")


@pytest.mark.parametrize("unusable", [True, False])
def test_what_ran_no_scenario_at_all_is_unknown_and_nothing_was_missed(museum: Runs, unusable: bool) -> None:
    """As with a time limit in which no scenario begins, or an exhibit alone that does not import."""

    def nothing(crew: ScriptedCrew, worker: Any, order: object) -> list[Any]:
        if isinstance(order, Setup):
            return [Ready()]
        assert isinstance(order, RunCampaign)
        done = ended(order, "unknown", reason="no example was run")
        assert done.result is not None
        none = Done(msgspec.structs.replace(done.result, examples=Examples(run=0)))
        return [Done(None, "no example was run") if unusable else none]

    result = museum(nothing)

    assert (result.verdict, result.exit_code, result.not_run) == ("unknown", 3, 0)
    assert result.reason == "no scenario was run of any exhibit: no example was run"


def test_an_interruption_keeps_what_there_is(museum: Runs) -> None:
    """A campaign that was cut short says something only if it found something."""

    def interrupted(crew: ScriptedCrew, worker: Any, order: object) -> list[Any]:
        if isinstance(order, RunCampaign) and order.given == OTHER.subject:
            crew.raises = KeyboardInterrupt()
            return [ended(order, "unknown", interrupted=True)]
        return as_they_must(crew, worker, order)

    result = museum(interrupted, workers=1)

    assert (result.verdict, result.interrupted, result.exit_code, result.not_run) == ("unknown", True, 130, 1)
    assert [plant.caught for plant in result.plants] == [True]
    assert [control.id for control in result.controls] == [CONTROL.id]
    assert museum.crew.interrupted == [0]


def test_workers_that_do_not_answer_an_interruption_are_killed(museum: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "GRACE_S", 0.05)

    def deaf(crew: ScriptedCrew, worker: Any, order: object) -> list[Any]:
        if isinstance(order, RunCampaign):
            crew.raises = KeyboardInterrupt()
            return []
        return as_they_must(crew, worker, order)

    result = museum(deaf)

    assert museum.crew.killed
    assert (result.exit_code, result.not_run) == (130, 3)
