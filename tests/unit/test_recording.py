"""What the verbs write into a log, over workers and ranks that do what a test says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from harness import recording
from harness.cli import main
from harness.evaluate import Conclusion, Evaluation
from harness.explain import Found as Explained
from harness.faults.museum.catalogue import PLANTS
from harness.fuzz import campaign as fuzz
from harness.fuzz import messages, state
from harness.museum import campaign as museum
from harness.museum import messages as told
from harness.recording import CampaignRecording
from harness.report import events
from harness.report.console import ProgressReport
from harness.report.events import EventLog
from harness.report.result import Examples, Failure, FoundAfter, Result
from harness.runner import CampaignOptions, Recorder
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.source import SubjectSource
from harness.tally import Counts
from harness.verdict import Divergence, Property, Stage
from tests.scripted import ScriptedCrew

SCENARIO = Scenario(
    world=1,
    seed=1,
    parameters=(Parameter("w", (2, 3)),),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(4), Part(more=False, contributors=(0,), none=((),)), Step()),
)
OPTIONS = CampaignOptions(
    subject=SubjectSource("zero2", "zero2"),
    worlds=(1,),
    backend="sim",
    seed=5,
    examples=7,
    seconds=None,
    bucket=None,
    parameters=None,
    report=Path("cases"),
    timeout_s=None,
)
FOUND = Explained(
    SCENARIO,
    Evaluation(Conclusion.VIOLATED, Divergence(property=Property.NORM, stage=Stage.NORM, step=0, message="differs")),
)
PLANT = PLANTS[0]


def read(path: Path) -> tuple[events.Event, ...]:
    log = events.read(path.read_bytes(), "log")
    assert log.cut is None
    return log.events


def kinds(found: tuple[events.Event, ...]) -> list[str]:
    return [type(each).__name__ for each in found]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_campaign_is_shown_and_kept(tmp_path: Path) -> None:
    """What comes thick and fast (smaller scenarios) is thinned out; nothing else is."""
    clock, shown = Clock(), io.StringIO()
    log = EventLog(str(tmp_path / "log"), pytest.fail, clock=clock)
    kept = CampaignRecording(ProgressReport(shown, clock=clock), log, "verify", OPTIONS)
    assert isinstance(kept, Recorder)
    with kept:
        kept.started(OPTIONS)
        kept.example(0, 7, 1, SCENARIO, 0.0)
        kept.judged(0, SCENARIO, Evaluation(Conclusion.HOLDS, seconds=0.25))
        for tried in range(5):
            clock.now = 0.4 * tried
            kept.shrinking(tried, SCENARIO)
            kept.violated(FOUND)
        kept.note("a note")
    log.close()
    found = events.read((tmp_path / "log").read_bytes(), "log").events
    assert kinds(found) == ["Begun", "Judged", "Shrinking", "Violation", "Shrinking", "Note"]
    begun, judged, violation = found[0], found[1], found[3]
    assert isinstance(begun, events.Begun)
    assert (begun.subject, begun.seed, begun.options["examples"]) == ("zero2", 5, 7)
    assert isinstance(judged, events.Judged)
    assert (judged.id, judged.seconds, judged.conclusion) == (state.scenario_id(SCENARIO), 0.25, "holds")
    assert isinstance(violation, events.Violation)
    assert (violation.failure.property, violation.failure.message, violation.failure.case) == ("norm", "differs", None)
    assert violation.failure.evidence is not None
    assert "a note" in shown.getvalue()
    assert "0/7 examples" in shown.getvalue()


def test_the_evidence_of_smaller_scenarios_is_kept_now_and_then(tmp_path: Path) -> None:
    clock = Clock()
    log = EventLog(str(tmp_path / "log"), pytest.fail, clock=clock)
    kept = CampaignRecording(ProgressReport(io.StringIO()), log, "verify", OPTIONS)
    for _ in range(10):
        kept.violated(FOUND)
        clock.now += recording.VIOLATION_S / 2
    log.close()
    assert kinds(events.read((tmp_path / "log").read_bytes(), "log").events).count("Violation") == 5


def diligent(directory: Path) -> Any:
    """Workers that do every round, and find something in the first."""

    def behave(crew: ScriptedCrew, worker: Any, order: Any) -> list[Any]:
        if isinstance(order, messages.Setup):
            return [messages.Ready()]
        if isinstance(order, messages.RunSaved):
            return [messages.Done(round=None, whole=True, ids=(), counts=Counts())]
        failure = Failure(property="weights", stage="gather", symptom="late", scenario="w", case="c.json")
        seen = messages.Key("weights", "gather", "late")
        finding = state.Finding(name="f", round=order.index, seen=seen, complete=True, failure=failure)
        state.save_finding(directory, finding)
        ids = tuple(map(str, range(order.limit)))
        counts = Counts(run={1: order.limit})
        done = messages.Done(round=order.index, whole=True, ids=ids, counts=counts)
        return [messages.Note("a note"), done, messages.Found("f", complete=True)]

    return behave


def test_fuzz_keeps_rounds_findings_and_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    crew = ScriptedCrew(diligent(Path("kept")))
    monkeypatch.setattr(fuzz, "Crew", lambda *_: crew)
    code = main(
        ["fuzz", "--examples", "10", "--workers", "1", "--seed", "3", "--dir", "kept", "--events", "logs/f.jsonl"]
    )
    found = read(tmp_path / "logs/f.jsonl")
    assert kinds(found) == ["Begun", "Note", "Round", "Note", "Finding", "Concluded", "Ended"]
    begun, done, finding, concluded, ended = found[0], found[2], found[4], found[5], found[6]
    assert isinstance(begun, events.Begun)
    assert (begun.verb, begun.seed, begun.options["directory"]) == ("fuzz", 3, "kept")
    assert isinstance(done, events.Round)
    assert (done.index, done.examples) == (0, 10)
    assert isinstance(finding, events.Finding)
    assert (finding.property, finding.case, finding.complete) == ("weights", "c.json", True)
    assert isinstance(concluded, events.Concluded)
    assert concluded.result is not None
    assert (concluded.result.verb, concluded.result.verdict) == ("fuzz", "violated")
    assert isinstance(ended, events.Ended)
    assert ended.exit_code == code == 1


def test_a_fuzz_campaign_that_cannot_begin_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["fuzz", "--examples", "10", "--dir", "file", "--events", "f.jsonl"]) == 2
    found = read(tmp_path / "f.jsonl")
    assert kinds(found) == ["Begun", "Ended"]
    assert isinstance(found[1], events.Ended)
    assert "--dir file: cannot be used" in (found[1].reason or "")


def catching(crew: ScriptedCrew, worker: Any, order: Any) -> list[Any]:
    """Workers that catch what they are given."""
    if isinstance(order, told.Setup):
        return [told.Ready()]
    result = Result(
        verdict="violated",
        subject=order.given,
        backend="sim",
        worlds=(1,),
        seed=order.seed,
        examples=Examples(run=300),
        seconds=1.0,
        examples_per_second=5.0,
        failure=Failure(property="norm", stage="norm"),
        found_after=FoundAfter(seconds=0.125, examples=5),
    )
    return [told.Done(result)]


def test_a_museum_keeps_each_exhibit_and_the_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    crew = ScriptedCrew(catching)
    monkeypatch.setattr(museum, "Crew", lambda *_: crew)
    code = main(["museum", "--plant", PLANT.id, "--seed", "3", "--events", "m.jsonl"])
    found = read(tmp_path / "m.jsonl")
    assert kinds(found) == ["Begun", "Exhibit", "Concluded", "Ended"]
    begun, exhibit, concluded, ended = found
    assert isinstance(begun, events.Begun)
    assert (begun.verb, begun.subject, begun.options["exhibits"]) == ("museum", None, 1)
    assert isinstance(exhibit, events.Exhibit)
    assert (exhibit.id, exhibit.kind, exhibit.outcome, exhibit.found_after, exhibit.told) == (
        PLANT.id, "plant", "caught", 0.125, "norm@norm"
    )  # fmt: skip
    assert isinstance(concluded, events.Concluded)
    assert concluded.museum is not None
    assert concluded.museum.summary.caught == 1
    assert isinstance(ended, events.Ended)
    assert ended.exit_code == code


def test_what_runs_nothing_keeps_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["museum", "--list", "--events", "m.jsonl"]) == 2
    assert list(tmp_path.iterdir()) == []
