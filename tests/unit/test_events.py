"""The event log: what is written is read back; cut off it is of use, damaged it is refused by its line."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import msgspec
import pytest

from harness.errors import UsageError
from harness.report import events
from harness.report.events import EventLog
from harness.report.evidence import Evidence, Timeline
from harness.report.result import Examples, Failure, Result

BEGUN = events.Begun(
    version=1, at=0.0, verb="verify", subject="zero2", backend="sim", worlds=(1, 2), seed=3, options={"examples": 4}
)
JUDGED = events.Judged(
    at=0.5, index=0, id="ab", world=2, scenario="world 2, \u202e", seconds=0.1, conclusion="violated"
)
FAILURE = Failure(
    property="gradient",
    actual=math.nan,
    output="caf\udce9\x1b[31m\n",
    evidence=Evidence(world=2, no_map="why", timeline=Timeline(columns=(), rows=())),
)
RESULT = Result(
    verdict="violated",
    subject="zero2",
    backend="sim",
    worlds=(1, 2),
    seed=3,
    examples=Examples(run=1),
    seconds=1.0,
    examples_per_second=1.0,
    failure=FAILURE,
)
ALL: tuple[events.Event, ...] = (
    BEGUN,
    JUDGED,
    events.Note(at=0.6, text="a note"),
    events.Violation(at=0.6, failure=FAILURE),
    events.Shrinking(at=0.7, tried=3, scenario="world 1"),
    events.Round(at=0.8, index=1, kind="aimed", examples=17),
    events.Finding(
        at=0.9, name="r-0", complete=True, property="norm", stage="norm", symptom=None, scenario="w", case="c.json"
    ),
    events.Exhibit(at=1.0, id="max-of-norms", kind="plant", outcome="caught", examples=3, seconds=0.5, found_after=0.1),
    events.Concluded(at=1.1, result=RESULT),
    events.Ended(at=1.2, exit_code=1),
)


def never(text: str) -> None:
    raise AssertionError(text)


def written(path: Path, *some: events.Event) -> bytes:
    log = EventLog(str(path), never)
    for event in some:
        log.write(event)
    log.close()
    return path.read_bytes()


def test_every_event_is_a_line_and_comes_back(tmp_path: Path) -> None:
    """What JSON cannot carry (nan, lone surrogates) comes back as text."""
    data = written(tmp_path / "log.jsonl", *ALL)
    assert data.endswith(b"\n")
    assert [json.loads(line)["event"] for line in data.splitlines()] == [
        "begun", "scenario", "note", "violation", "shrinking", "round", "finding", "exhibit", "result", "ended"
    ]  # fmt: skip
    log = events.read(data, "log")
    assert log.cut is None
    there = msgspec.structs.replace(FAILURE, actual="nan", output="caf\\udce9\x1b[31m\n")
    for event, back in zip(ALL, log.events, strict=True):
        if isinstance(event, events.Violation):
            assert back == msgspec.structs.replace(event, failure=there)
        elif isinstance(event, events.Concluded):
            assert back == msgspec.structs.replace(event, result=msgspec.structs.replace(RESULT, failure=there))
        else:
            assert back == event


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """Nobody closes the log of a process that is killed."""
    path = tmp_path / "not" / "there" / "log.jsonl"
    log = EventLog(str(path), never)
    log.write(BEGUN)
    log.write(JUDGED)
    assert events.read(path.read_bytes(), "log").events == (BEGUN, JUDGED)
    log.close()


def test_times_begin_at_zero(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "log"), never, clock=itertools.count(100.0, 2.0).__next__)
    assert [log.now, log.now] == [2.0, 4.0]
    log.close()


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_log_is_read_up_to_the_last_whole_line(tmp_path: Path, cut: int) -> None:
    """A kill in the middle of a write, or a full disk."""
    data = written(tmp_path / "log", BEGUN, JUDGED)
    log = events.read(data[:-cut], "log")
    assert log.events == (BEGUN,)
    assert log.cut == "the log was cut off in the middle of line 2"


def test_a_log_without_its_end_says_so(tmp_path: Path) -> None:
    log = events.read(written(tmp_path / "log", BEGUN, JUDGED), "log")
    assert log.cut == "the log was cut off after line 2: the run was killed, or goes on"


LINE = msgspec.json.encode(BEGUN) + b"\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (LINE[:-1], "cut off in its first line"),
        (LINE + b'{"event":"note","at":0,"text":"x"\n' + LINE, "line 2: not an event"),
        (LINE + b"\n", "line 2: not an event"),
        (LINE + b'{"event":"party","at":0}\n', "line 2: not an event of this version: Invalid value 'party'"),
        (LINE + b'{"event":"note","at":0,"text":"x","colour":1}\n', "line 2: .* unknown field `colour`"),
        (LINE + b'{"event":"note","at":0,"text":1}\n', r"line 2: .*Expected `str`, got `int` - at `\$.text`"),
        (LINE + LINE, "line 2: `begun` is the first line alone"),
        (LINE.replace(b'"version":1', b'"version":2'), "line 1: a log of version 2; this is able to read 1"),
        (LINE.replace(b'"version":1,', b""), "line 1: a log of version None"),
        (b'{"event":"note","at":0,"text":"x"}\n', "line 1: expected the event `begun`"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (LINE + b"[" * 100_000 + b"\n", "line 2: not an event"),
        (LINE.replace(b'"zero2"', b'"zero\xff2"'), "line 1: not"),
    ],
)
def test_what_is_damaged_is_named_by_its_line(data: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        events.read(data, "run.jsonl")
    assert str(caught.value).startswith("run.jsonl: ")
    assert "\n" not in str(caught.value)


def test_a_failure_to_write_is_told_once_and_changes_nothing_else() -> None:
    """/dev/full takes no byte: as a disk without room."""
    told: list[str] = []
    log = EventLog("/dev/full", told.append)
    log.write(BEGUN)
    log.write(JUDGED)
    log.close()
    assert told == [
        "--events /dev/full: no more can be written: No space left on device; the run goes on without its log"
    ]


@pytest.mark.parametrize("given", ["", "-", ".", "file/log", "a\0b"])
def test_what_cannot_be_a_log_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UsageError, match="--events"):
        EventLog(given, never)


def test_a_pipe_without_a_reader_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot write it: No such device or address"):
        EventLog(str(tmp_path / "pipe"), never)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(str(tmp_path / "pipe"), never)
    log.write(JUDGED)
    log.close()
    assert os.read(reader, 1000).endswith(b"}\n")
    os.close(reader)


def test_a_log_is_told_from_a_result() -> None:
    assert events.is_log(LINE)
    assert events.is_log(b'{"event": 1}\nrubbish')
    assert not events.is_log(b'{"schema": 1}\n')
    assert not events.is_log(b"\xff\n")
    assert not events.is_log(b"[1]")
