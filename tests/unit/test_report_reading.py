"""Which files can be rendered, and what a log tells that was cut off before its result."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from harness.errors import UsageError
from harness.report import events
from harness.report.reading import read
from harness.report.result import Result, to_json
from tests import reports

BEGUN = events.Begun(
    version=1, at=0.0, verb="verify", subject="mine", backend="sim", worlds=(1, 2), seed=3, versions={"torch": "2"},
    options={"order": "ring", "schedule": "random", "exhibits": 5},
)  # fmt: skip


def judged(index: int, world: int, seconds: float) -> events.Judged:
    return events.Judged(
        at=1.0 + index, index=index, id=f"{index:016x}", world=world, scenario=f"number {index}", seconds=seconds,
        conclusion="holds",
    )  # fmt: skip


def log_file(path: Path, *some: events.Event) -> Path:
    log = events.EventLog(str(path), lambda text: None)
    for event in some:
        log.write(event)
    log.close()
    return path


@pytest.mark.parametrize("result", [reports.HOLDS, reports.VIOLATED, reports.UNKNOWN])
def test_a_result_of_json_comes_back_whole(tmp_path: Path, result: Result) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(to_json(result))
    assert read(path).result == result
    assert read(path).verb == "verify"


def test_a_museum_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "museum.json"
    result = reports.museum(reports.CAUGHT, reports.MISSED, controls=(reports.ALARM,))
    path.write_bytes(to_json(result))
    assert (read(path).result, read(path).verb) == (result, "museum")


def test_a_log_has_the_same_result_and_more(tmp_path: Path) -> None:
    seen = msgspec.structs.replace(reports.FAILURE, scenario="as it was found")
    path = log_file(
        tmp_path / "log",
        BEGUN,
        judged(0, 1, 0.25),
        judged(1, 2, 0.5),
        events.Violation(at=3.0, failure=seen),
        events.Note(at=4.0, text="a note"),
        events.Violation(at=5.0, failure=reports.FAILURE),
        events.Concluded(at=6.0, result=reports.VIOLATED),
        events.Ended(at=6.0, exit_code=1),
    )
    found = read(path)
    assert (found.result, found.notes, found.cut, found.seen) == (reports.VIOLATED, ("a note",), None, seen)
    assert [each.index for each in found.slowest] == [1, 0]


def test_a_log_that_was_cut_off_tells_what_had_been_judged(tmp_path: Path) -> None:
    found = read(log_file(tmp_path / "log", BEGUN, judged(0, 1, 0.25), judged(1, 1, 0.25), judged(2, 2, 2.0)))
    result = found.result
    assert isinstance(result, Result)
    assert (result.verdict, result.subject, result.worlds, result.seed, result.order) == (
        "unknown", "mine", (1, 2), 3, "ring"
    )  # fmt: skip
    assert (result.examples.run, result.examples.per_world[1].count, result.examples.per_world[1].rate) == (3, 2, 4.0)
    assert found.cut == "the log was cut off after line 4: the run was killed, or goes on"
    assert result.reason == found.cut


def test_a_violation_that_was_seen_is_one_though_the_log_was_cut_off(tmp_path: Path) -> None:
    path = log_file(tmp_path / "log", BEGUN, judged(0, 1, 0.1), events.Violation(at=2.0, failure=reports.FAILURE))
    result = read(path).result
    assert isinstance(result, Result)
    assert (result.verdict, result.failure) == ("violated", reports.FAILURE)


def test_of_a_fuzz_log_without_a_result_rounds_and_findings_are_told(tmp_path: Path) -> None:
    begun = msgspec.structs.replace(BEGUN, verb="fuzz")
    finding = events.Finding(
        at=3.0, name="r", complete=False, property="norm", stage="norm", symptom="s", scenario="w", case="c.json"
    )
    result = read(
        log_file(tmp_path / "log", begun, events.Round(at=2.0, index=0, kind="aimed", examples=17), finding)
    ).result
    assert isinstance(result, Result)
    assert (result.verb, result.verdict, result.examples.run) == ("fuzz", "violated", 17)
    assert result.failure is not None
    assert (result.failure.property, result.failure.case) == ("norm", "c.json")


def test_of_a_museum_log_without_a_result_the_exhibits_are_counted(tmp_path: Path) -> None:
    begun = msgspec.structs.replace(BEGUN, verb="museum", subject=None)
    kinds = [("plant", "caught"), ("plant", "missed"), ("control", "holds"), ("control", "violated")]
    exhibits = [
        events.Exhibit(at=1.0, id=f"e{number}", kind=kind, outcome=outcome, examples=3, seconds=1.0, found_after=0.5)  # type: ignore[arg-type]
        for number, (kind, outcome) in enumerate(kinds)
    ]
    result = read(log_file(tmp_path / "log", begun, *exhibits)).result
    assert not isinstance(result, Result)
    score = result.summary
    assert (score.caught, score.missed, score.controls, score.false_alarms) == (1, 1, 2, 1)
    assert (result.verdict, result.not_run) == ("unknown", 1)


@pytest.mark.parametrize("verb", ["verify", "museum"])
@pytest.mark.parametrize("value", ["five", [5], {}, None, float("inf")])
def test_options_of_a_log_may_be_of_any_type(tmp_path: Path, verb: events.LogVerb, value: object) -> None:
    names = ("order", "schedule", "exhibits", "workers", "seconds_per_plant", "control_examples")
    begun = msgspec.structs.replace(BEGUN, verb=verb, options=dict.fromkeys(names, value))
    result = read(log_file(tmp_path / "log", begun)).result
    assert result.verdict == "unknown"
    to_json(result)


def test_a_run_that_ended_without_a_result_says_why(tmp_path: Path) -> None:
    path = log_file(tmp_path / "log", BEGUN, events.Ended(at=1.0, exit_code=2, reason="mine lacks `collect`"))
    result = read(path).result
    assert isinstance(result, Result)
    assert result.reason == "the run ended with exit code 2 and no result: mine lacks `collect`"


RESULT = json.loads(to_json(reports.HOLDS))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (b"not json", "neither an event log nor JSON"),
        (b"\xff\xfe\x00", "neither an event log nor JSON"),
        (b"[" * 50_000, "neither an event log nor JSON"),
        (b"[]", "expected --events or --json of verify, replay, fuzz or museum"),
        (b'{"verdict": "holds", "schema": 1, "findings": []}', "expected --events or --json of verify"),
        (json.dumps({**RESULT, "schema": 2}).encode(), "a result of schema 2; this version is able to read 1"),
        (json.dumps({**RESULT, "colour": 1}).encode(), "unknown field `colour`"),
        (json.dumps({**RESULT, "verdict": "fine"}).encode(), r"Invalid enum value 'fine' - at `\$.verdict`"),
        (json.dumps({**RESULT, "seconds": None}).encode(), r"at `\$.seconds`"),
        (json.dumps(RESULT).encode()[:-1], "neither an event log nor JSON"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(UsageError, match="cannot be read"):
            read(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LARGEST", 10)
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    with pytest.raises(UsageError, match="more than 10 bytes, which is as much as is read"):
        read(path)


def test_of_a_device_without_an_end_only_so_much_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LARGEST", 10)
    with pytest.raises(UsageError, match="/dev/zero: more than 10 bytes"):
        read(Path("/dev/zero"))


def test_a_log_that_was_cut_off_tells_the_device(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    begun = events.Begun(
        version=1, at=0, verb="verify", subject="zero2", backend="nccl", worlds=(1,), seed=1, device="cuda"
    )
    path.write_bytes(msgspec.json.encode(begun) + b"\n")
    result = read(path).result
    assert isinstance(result, Result)
    assert result.device == "cuda"
