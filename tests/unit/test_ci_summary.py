"""``make summary``: what ran, what failed and what was skipped, whatever state the files are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import gpus, summary
from harness.report.result import to_json
from tests import reports

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" time="12.6">
<testcase classname="tests.unit.test_a" name="test_right" time="1"/>
<testcase classname="tests.unit.test_a" name="test_wrong[a|b]" time="1">
<failure message="AssertionError: assert `x` == 'a|b'&#10;second line">trace</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_broken"><error message="fixture"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_later"><skipped message="needs 2 GPUs"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_last"><skipped message="needs 2 GPUs"/></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("junit", "events"):
        (tmp_path / name).mkdir()
    return tmp_path


def run(place: Path) -> int:
    return summary.main([str(place / "junit"), str(place / "events")])


def test_tests_are_counted_and_what_failed_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "junit" / "unit.xml").write_text(JUNIT)
    assert run(place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| `unit` | 1 | 2 | 2 | 13 |" in lines
    assert "- `tests.unit.test_a.test_wrong[a¦b]`: `AssertionError: assert 'x' == 'a¦b' second line`" in lines
    assert "- `tests.unit.test_a.test_broken`: `fixture`" in lines
    assert "- 2: `needs 2 GPUs`" in lines


def test_a_file_that_was_not_written_to_its_end_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "junit" / "ranks.xml").write_text(JUNIT[:-40])
    (place / "junit" / "unit.xml").write_text(JUNIT)
    assert run(place) == 1
    said = capsys.readouterr().out
    assert "ranks.xml` cannot be read" in said
    assert "| `unit` | 1 |" in said


def test_where_nothing_ran_it_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place) == 0
    assert capsys.readouterr().out.startswith("Nothing ran")


def test_an_event_log_that_is_none_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "events" / "verify.jsonl").write_text("no event\n")
    (place / "events" / "empty.jsonl").touch()
    assert run(place) == 1
    assert "could not be rendered: `" in capsys.readouterr().out


def test_a_damaged_log_hides_no_other(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "events" / "a.jsonl").write_text('{"event": "begun"')
    (place / "events" / "gone.jsonl").symlink_to("nowhere")
    (place / "events" / "z.jsonl").write_bytes(to_json(reports.VIOLATED))
    assert run(place) == 1
    said = capsys.readouterr().out
    assert "zero2-harness: violated" in said
    assert said.count("could not be rendered: `") == 2
    assert "a.jsonl: the event log was cut off" in said or "a.jsonl: neither an event log nor JSON" in said


@pytest.mark.parametrize(
    "text",
    [
        '<?xml version="1.0" encoding="none"?><a/>',
        '<testsuite time="a"/>',
        '<?xml version="1.0" encoding="utf-7"?><a/>',
    ],
)
def test_a_junit_file_of_any_kind_of_damage_is_told(place: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (place / "junit" / "bad.xml").write_text(text)
    (place / "junit" / "unit.xml").write_text(JUNIT)
    assert run(place) == 1
    said = capsys.readouterr().out
    assert "bad.xml` cannot be read" in said
    assert "| `unit` | 1 |" in said


def test_many_failures_and_long_texts_are_cut(place: Path) -> None:
    tier = summary.Tier("unit", failures=[(f"test_{number}", "x" * 1000) for number in range(50)])
    said = summary.tests_markdown([tier])
    assert "test_29" in said
    assert "test_30" not in said
    assert "- and 20 more" in said
    assert max(map(len, said.splitlines())) < 300
    long = summary.cut("é" * summary.MAX_BYTES)
    assert len(long.encode()) < 2**20
    assert long.endswith("see the artifacts.\n")
    assert summary.cut("short") == "short"


def test_a_runner_with_fewer_gpus_than_promised_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpus.main(["1000"]) == 1
    assert "1000 GPUs are needed" in capsys.readouterr().err
    assert gpus.main(["0"]) == 0
