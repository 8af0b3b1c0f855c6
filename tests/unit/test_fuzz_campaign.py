"""The coordinator of a fuzz campaign over workers that do what a test says: what it hands out, keeps and concludes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.errors import UsageError
from harness.fuzz import campaign, state
from harness.fuzz.campaign import FuzzOptions, View, Worker, run_fuzz
from harness.fuzz.messages import (
    Done,
    Found,
    Gone,
    Key,
    Order,
    Progress,
    Ready,
    Report,
    RunRound,
    RunSaved,
    Setup,
    Slow,
    Trouble,
)
from harness.fuzz.state import Finding
from harness.report.result import Failure, Result
from harness.runner import CampaignOptions
from harness.scenario.situations import Situation
from harness.subjects.source import SubjectSource
from harness.tally import Counts
from harness.verdict import Property
from tests.scripted import Behaviour, ScriptedCrew
from tests.support import required

EVERYTHING = dict.fromkeys((situation.value for situation in Situation), 1)
CHECKED = dict.fromkeys((prop.value for prop in Property), 1)


def counts(number: int) -> Counts:
    return Counts(run={3: number}, seconds={3: 0.1 * number}, checks=CHECKED, reached=EVERYTHING, margin=0.1)


def ids(index: int, limit: int) -> tuple[str, ...]:
    return tuple(f"{index}-{number}" for number in range(limit))


def whole(order: RunRound) -> Done:
    slowest = Slow("id", "world 3", 0.5)
    return Done(
        round=order.index, whole=True, ids=ids(order.index, order.limit), counts=counts(order.limit), slowest=slowest
    )


def part(order: RunRound, number: int = 3) -> Done:
    return Done(round=order.index, whole=False, ids=(), counts=counts(number))


def diligent(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
    if isinstance(order, Setup):
        return [Ready()]
    if isinstance(order, RunSaved):
        return [Done(round=None, whole=True, ids=(), counts=Counts())]
    return [Progress(doing="...", counts=counts(1)), whole(order)]


class Crowd(ScriptedCrew):
    """Of a campaign that is kept in ``directory``."""

    def __init__(self, behaviour: Behaviour, directory: Path) -> None:
        super().__init__(behaviour)
        self.directory = directory

    @property
    def rounds(self) -> list[int]:
        return [order.index for order in self.orders if isinstance(order, RunRound)]


class Watching:
    def __init__(self) -> None:
        self.views: list[View] = []
        self.notes: list[str] = []

    def began(self, directory: Path, seed: int, workers: int, resumed: int) -> None: ...

    def view(self, view: View) -> None:
        self.views.append(view)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Runs:
    """Runs campaigns in one directory over a crowd of such workers."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.observer = Watching()
        self.crowd = Crowd(diligent, directory)
        self._monkeypatch = monkeypatch

    def __call__(self, behaviour: Behaviour = diligent, *, worlds: tuple[int, ...] = (3,), **fields: Any) -> Result:
        self.crowd = Crowd(behaviour, self.directory)
        self.observer = Watching()
        self._monkeypatch.setattr(campaign, "Crew", lambda *_: self.crowd)
        told = CampaignOptions(
            subject=SubjectSource("zero2", "zero2"),
            worlds=worlds,
            backend="sim",
            seed=fields.get("seed") or 1,
            examples=0,
            seconds=None,
            bucket=None,
            parameters=None,
            report=self.directory / "unused",
            timeout_s=None,
        )
        settings = {
            "seed": None,
            "seconds": None,
            "examples": None,
            "workers": 2,
            "directory": self.directory,
            **fields,
        }
        result = run_fuzz(FuzzOptions(told, **settings), self.observer)
        assert self.crowd.ended
        return result


@pytest.fixture
def fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "campaign", monkeypatch)


def save(directory: Path, name: str, *, complete: bool, index: int | None, prop: str = "weights") -> Finding:
    case = directory / "cases" / f"{name}.json"
    case.parent.mkdir(parents=True, exist_ok=True)
    case.write_text("{}")
    failure = Failure(property=prop, stage="gather", case=str(case), message="planted")
    seen = Key(prop, "gather", None)
    found = Finding(name=name, round=index, seen=seen, complete=complete, failure=failure)
    state.save_finding(directory, found)
    return found


def violating(index: int, *, keeps_on: bool = False) -> Behaviour:
    """Workers one of which finds something in this round and makes it smaller at once."""

    def behave(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if not isinstance(order, RunRound) or order.index != index:
            return diligent(crowd, worker, order)
        save(crowd.directory, "it", complete=True, index=index)
        return [Found("it", False), Found("it", True), whole(order) if keeps_on else part(order)]

    return behave


def test_so_many_examples_are_run_in_whole_rounds_and_kept(fuzz: Runs) -> None:
    result = fuzz(examples=120)

    assert (result.verdict, result.exit_code, result.examples.run) == ("holds", 0, 120)
    assert result.fuzz is not None
    assert (result.fuzz.rounds, result.fuzz.resumed, result.fuzz.findings) == (3, 0, ())
    assert result.fuzz.required == len(required((3,)))
    assert "world-three" not in result.missing
    assert result.fuzz.slowest is not None
    assert result.margin == 0.1
    assert fuzz.crowd.rounds == [0, 1, 2]
    assert (fuzz.directory / "ids" / "000002.txt").read_text().split() == list(ids(2, 20))
    assert fuzz.observer.views[-1].num_required == len(required((3,)))


def test_a_campaign_goes_on_where_it_stopped_and_comes_to_the_same(fuzz: Runs, tmp_path: Path) -> None:
    fuzz(examples=60, seed=5)
    resumed = fuzz(examples=200)
    assert fuzz.crowd.rounds == [1, 2, 3]  # 1 had been cut short
    assert resumed.seed == 5
    fuzz.directory = tmp_path / "other"
    at_once = fuzz(examples=200, seed=5)

    assert resumed.fuzz is not None
    assert at_once.fuzz is not None
    assert resumed.fuzz.ids_digest == at_once.fuzz.ids_digest
    assert (resumed.fuzz.resumed, at_once.fuzz.resumed) == (2, 0)
    assert resumed.examples == at_once.examples
    assert resumed.properties == at_once.properties


def test_the_first_violation_ends_it(fuzz: Runs) -> None:
    result = fuzz(violating(1))

    assert (result.verdict, result.exit_code) == ("violated", 1)
    assert result.failure is not None
    assert result.fuzz is not None
    assert result.fuzz.findings == (result.failure,)
    assert result.examples.run < 10 * 50  # it was endless
    assert state.load_finding(fuzz.directory, "it") is not None


def test_it_may_go_on_and_tells_workers_what_is_known(fuzz: Runs) -> None:
    result = fuzz(violating(1, keeps_on=True), examples=300, keep_going=True, workers=1)

    assert (result.verdict, result.examples.run) == ("violated", 300)
    known = {order.index: order.known for order in fuzz.crowd.orders if isinstance(order, RunRound)}
    assert (known[0], known[1], known[2]) == ((), (), (Key("weights", "gather", None),))


def test_what_was_found_is_tried_first_and_told_if_it_still_fails(fuzz: Runs) -> None:
    fuzz(violating(1))

    def still(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunSaved):
            return [Found(order.names[0], True), Done(round=None, whole=False, ids=(), counts=Counts())]
        return diligent(crowd, worker, order)

    result = fuzz(still)
    assert (result.verdict, fuzz.crowd.rounds) == ("violated", [])


def test_what_does_not_fail_any_more_is_forgotten(fuzz: Runs) -> None:
    fuzz(violating(1))

    def mended(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunSaved):
            return [*(Gone(name) for name in order.names), Done(round=None, whole=True, ids=(), counts=Counts())]
        return diligent(crowd, worker, order)

    result = fuzz(mended, examples=100)
    assert (result.verdict, result.examples.run) == ("holds", 100)


def test_an_interruption_leaves_what_was_found_and_the_next_run_takes_it_up_first(fuzz: Runs) -> None:
    def interrupted(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index == 3:
            save(crowd.directory, "it", complete=False, index=3)
            crowd.raises = KeyboardInterrupt()
            return [Found("it", False), part(order)]
        return diligent(crowd, worker, order)

    result = fuzz(interrupted)
    assert (result.verdict, result.interrupted, result.exit_code) == ("violated", True, 130)
    assert result.failure is not None
    assert "goes on when `fuzz` is started again" in (result.failure.message or "")
    assert set(fuzz.crowd.interrupted) == {0, 1}

    def completes(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index == 3:
            save(crowd.directory, "it", complete=True, index=3)
            return [Found("it", True), part(order)]
        return diligent(crowd, worker, order)

    result = fuzz(completes)
    assert fuzz.crowd.rounds[0] == 3
    assert result.verdict == "violated"
    assert result.failure is not None
    assert result.failure.message == "planted"


def test_what_an_earlier_run_saw_and_its_round_does_not_show_is_tried_by_itself(fuzz: Runs) -> None:
    fuzz(examples=50)
    save(fuzz.directory, "it", complete=False, index=3)

    def mended(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunSaved):
            return [*(Gone(name) for name in order.names), Done(round=None, whole=True, ids=(), counts=Counts())]
        return diligent(crowd, worker, order)

    result = fuzz(mended, examples=300, workers=1)
    assert [order for order in fuzz.crowd.orders if isinstance(order, RunSaved)] == [RunSaved(("it",), False)]
    assert result.verdict == "holds"


def test_the_round_of_a_worker_that_is_lost_is_run_by_another(fuzz: Runs) -> None:
    lost: list[int] = []

    def mortal(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index in (1, 4) and order.index not in lost:
            lost.append(order.index)
            return [None]
        return diligent(crowd, worker, order)

    result = fuzz(mortal, examples=400)
    assert (result.verdict, result.examples.run, lost) == ("holds", 400, [1, 4])
    assert sorted(fuzz.crowd.rounds) == [0, 1, 1, 2, 3, 4, 4, 5, 6, 7]
    assert any("signal 9 (SIGKILL); another takes its place" in note for note in fuzz.observer.notes)
    # The harness itself is checked once.
    assert [setup.canaries for setup in fuzz.crowd.setups] == [True, False, False, False]


def test_a_violation_whose_worker_is_lost_is_looked_for_again_at_once(fuzz: Runs) -> None:
    lost: list[int] = []

    def mortal(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index == 2:
            if not lost:
                lost.append(worker.number)
                save(crowd.directory, "it", complete=False, index=2)
                return [Found("it", False), None]
            save(crowd.directory, "it", complete=True, index=2)
            return [Found("it", True), part(order)]
        return diligent(crowd, worker, order)

    result = fuzz(mortal, workers=1)
    assert (result.verdict, fuzz.crowd.rounds) == ("violated", [0, 1, 2, 2])


def test_workers_that_only_end_make_it_unknown_and_say_why(fuzz: Runs) -> None:
    def useless(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        return [Trouble("undecided", "its zygote is gone"), None]

    result = fuzz(useless)
    assert (result.verdict, result.exit_code) == ("unknown", 3)
    assert result.reason == "4 workers ended before they had done a round; the last: worker 1: its zygote is gone"


def test_a_harness_that_is_broken_ends_it_and_a_bad_subject_is_bad_usage(fuzz: Runs) -> None:
    result = fuzz(lambda *_: [Trouble("broken", "the harness is broken: canary-bit holds")])
    assert (result.verdict, result.reason) == ("unknown", "the harness is broken: canary-bit holds")
    with pytest.raises(UsageError, match="lacks `collect`"):
        fuzz(lambda *_: [Trouble("usage", "Zero lacks `collect`")])


def test_time_ends_it_and_a_worker_that_does_not_answer_is_killed(fuzz: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "LATE_S", 0.05)
    monkeypatch.setattr(campaign, "GRACE_S", 0.05)

    def busy(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index == 2:
            save(crowd.directory, "it", complete=False, index=2)
            return [Found("it", False)]
        return diligent(crowd, worker, order)

    result = fuzz(busy, seconds=0.5)
    assert (fuzz.crowd.killed, result.verdict, result.interrupted) == (True, "violated", False)
    assert result.failure is not None
    assert "may not be the smallest" in (result.failure.message or "")


def test_rounds_of_which_a_part_was_run_count_but_are_not_done(fuzz: Runs) -> None:
    def slow(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index >= 2:
            crowd.raises = KeyboardInterrupt()
            return [part(order)]
        return diligent(crowd, worker, order)

    result = fuzz(slow, workers=1)
    assert (result.verdict, result.interrupted, result.examples.run) == ("unknown", True, 103)
    assert result.fuzz is not None
    assert result.fuzz.rounds == 2


def test_a_full_campaign_that_reached_too_little_is_unknown_and_a_short_one_holds(fuzz: Runs) -> None:
    def narrow(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound):
            said = whole(order)
            run = Counts(run={3: order.limit}, checks=CHECKED, reached={"world-three": 1})
            return [Done(round=said.round, whole=True, ids=said.ids, counts=run)]
        return diligent(crowd, worker, order)

    short = fuzz(narrow, worlds=(3, 4), examples=100)
    assert short.verdict == "holds"
    assert short.fuzz is not None
    assert "five-steps" in short.missing
    assert "world-three" not in short.missing
    assert short.fuzz.required == len(required((3, 4)))
    full = fuzz(narrow, worlds=(3, 4), examples=300)
    assert (full.verdict, full.exit_code) == ("unknown", 3)
    assert "never reached: " in (full.reason or "")
    assert "five-steps" in (full.reason or "")


def test_of_one_kind_the_smaller_is_told(fuzz: Runs) -> None:
    def twice(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if isinstance(order, RunRound) and order.index == 1:
            save(crowd.directory, "late", complete=False, index=1)
            save(crowd.directory, "another", complete=False, index=1, prop="norm")
            return [Found("late", False), Found("another", False), part(order)]
        return violating(0)(crowd, worker, order)

    result = fuzz(twice)
    assert result.fuzz is not None
    assert [failure.property for failure in result.fuzz.findings] == ["weights", "norm"]
    assert not (fuzz.directory / "cases" / "late.json").exists()
    assert (fuzz.directory / "cases" / "another.json").exists()


def test_what_was_found_elsewhere_counts_only_once_it_is_seen_here(fuzz: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "LATE_S", 0.05)  # the worker that was told to try it never says anything
    monkeypatch.setattr(campaign, "GRACE_S", 0.05)
    (fuzz.directory / "findings").mkdir(parents=True)
    elsewhere = msgspec.structs.replace(save(fuzz.directory, "merged-1", complete=True, index=None), foreign=True)
    state.save_finding(fuzz.directory, elsewhere)

    def untried(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        return [] if isinstance(order, RunSaved) else diligent(crowd, worker, order)

    result = fuzz(untried, seconds=0.5, keep_going=True)
    assert result.verdict != "violated"
    assert result.fuzz is not None
    assert result.fuzz.findings == ()
    assert not any(order.known for order in fuzz.crowd.orders if isinstance(order, RunRound))
    assert state.load_finding(fuzz.directory, "merged-1") == elsewhere  # the next run tries it


def test_no_more_workers_are_started_than_there_are_rounds_to_run(fuzz: Runs) -> None:
    result = fuzz(workers=8, examples=60)
    assert len(fuzz.crowd.setups) == 2
    assert result.fuzz is not None
    assert result.fuzz.workers == 2


def test_two_that_come_to_the_same_smallest_case_are_one_unless_their_symptoms_differ(fuzz: Runs) -> None:
    looks = {"a": ("x", None), "b": ("x", "averaged over parts"), "c": ("x", "counted twice"), "d": ("y", None)}

    def several(crowd: Crowd, worker: Worker, order: Order) -> list[Report | None]:
        if not isinstance(order, RunRound) or order.index > 0:
            return diligent(crowd, worker, order)
        for number, (name, (scenario, symptom)) in enumerate(looks.items()):
            found = save(crowd.directory, name, complete=True, index=0)
            failure = msgspec.structs.replace(found.failure, scenario=scenario, symptom=symptom)
            seen = Key("weights", "gather", f"first look {number}")
            state.save_finding(crowd.directory, msgspec.structs.replace(found, seen=seen, failure=failure))
        return [*(Found(name, True) for name in looks), whole(order)]

    result = fuzz(several, examples=100, keep_going=True)
    assert result.fuzz is not None
    told = [(failure.scenario, failure.symptom) for failure in result.fuzz.findings]
    assert told == [("x", "averaged over parts"), ("x", "counted twice"), ("y", None)]
