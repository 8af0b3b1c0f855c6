"""`report` and `--events` as users have them: files in, files out, one line where something is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Tree

import pytest

import harness
from harness import explain, runner
from harness.report.result import to_json
from tests import reports

if TYPE_CHECKING:
    from harness.evaluate import Pool
    from tests.cli.conftest import InProcess


@pytest.mark.parametrize("outcome", ["holds", "violated", "unknown"])
def test_what_is_rendered_of_a_log_or_a_result_is_what_the_verb_printed(inside: InProcess, outcome: str) -> None:
    done = inside.run("verify", "--seed", "5", "--events", "log/run.jsonl", "--json", "run.json", canned=outcome)
    printed = done.stdout.partition("seed 5\n")[2]
    for name in ("log/run.jsonl", "run.json"):
        shown = inside.run("report", name)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, printed, "")


def test_a_log_ends_with_the_result_of_json_and_the_exit_code(inside: InProcess) -> None:
    done = inside.run("verify", "--events", "run.jsonl", "--json", "run.json", canned="violated")
    lines = [json.loads(line) for line in (inside.directory / "run.jsonl").read_text().splitlines()]
    assert lines[-1]["exit_code"] == done.returncode == 1
    assert lines[-2]["result"] == json.loads((inside.directory / "run.json").read_text())


def test_a_log_begins_with_what_is_run(inside: InProcess) -> None:
    inside.run("verify", "--events", "run.jsonl", "--world", "1,2", "--seed", "7", canned="holds")
    begun = json.loads((inside.directory / "run.jsonl").read_text().splitlines()[0])
    assert (begun["event"], begun["version"], begun["verb"]) == ("begun", 1, "verify")
    assert (begun["worlds"], begun["seed"], begun["options"]["examples"]) == ([1, 2], 7, 300)
    assert begun["versions"]["torch"]


def test_a_run_without_a_result_leaves_its_reason(inside: InProcess) -> None:
    """A subject that only ranks find out to be none."""
    assert inside.run("verify", "--events", "run.jsonl", canned="bad_subject").returncode == 2
    shown = inside.run("report", "run.jsonl")
    assert shown.returncode == 0
    assert "unknown: zero2 on gloo" in shown.stdout
    assert "the run ended with exit code 2 and no result: my.py:Zero2 lacks `collect`" in shown.stdout


def test_a_log_that_cannot_be_written_does_not_change_the_verdict(inside: InProcess) -> None:
    done = inside.run("verify", "--events", "/dev/full", canned="violated")
    assert done.returncode == 1
    assert done.stderr.count("--events /dev/full: no more can be written") == 1


@pytest.mark.parametrize(
    ("args", "lost"),
    [
        (("verify", "--json", "x.json", "--events", "./x.json"), "--json"),
        (("verify", "--params", "params.json", "--events", "params.json"), "--params"),
        (("verify", "--params", "params.json", "--json", "params.json"), "--params"),
        (("replay", "case.json", "--events", "case.json"), "the case"),
        (("replay", "case.json", "--json", "link.json"), "the case"),
    ],
)
def test_what_is_written_never_replaces_what_is_read_or_written_besides(
    inside: InProcess, args: tuple[str, ...], lost: str
) -> None:
    case = Path(harness.__file__).parent / "regressions/local-norm.json"
    shutil.copy(case, inside.directory / "case.json")
    (inside.directory / "link.json").symlink_to("case.json")
    (inside.directory / "params.json").write_text('[{"name": "a", "shape": [2]}]')
    before = {path.name: path.read_bytes() for path in inside.directory.iterdir()}
    done = inside.run(*args, canned="holds")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"that is the file of {lost}, which would be lost" in done.stderr
    assert {path.name: path.read_bytes() for path in inside.directory.iterdir()} == before


@pytest.mark.parametrize("given", ["-", ".", "file/run.jsonl"])
def test_a_log_that_cannot_be_one_is_refused_before_anything_runs(inside: InProcess, given: str) -> None:
    (inside.directory / "file").touch()
    done = inside.run("verify", "--events", given, canned="violated")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --events ")


def test_a_killed_run_leaves_a_log_that_is_of_use(inside: InProcess) -> None:
    """Cut in the middle of its last lines: what the run had judged is told, and that it was cut off."""
    inside.run("verify", "--seed", "5", "--events", "run.jsonl", canned="holds")
    whole = (inside.directory / "run.jsonl").read_bytes()
    (inside.directory / "run.jsonl").write_bytes(whole[: whole.index(b'"result"')])
    shown = inside.run("report", "run.jsonl")
    assert shown.returncode == 0
    assert shown.stdout.startswith("unknown: zero2 on gloo")
    assert "checked" not in shown.stdout  # what was checked is not known, which is not nothing
    inside.run("report", "run.jsonl", "--html", "page.html", "--junit", "x.xml", "--markdown", "x.md")
    assert "is known only of a run that has ended" in (inside.directory / "page.html").read_text()
    assert [case.get("name") for case in Tree.parse(inside.directory / "x.xml").iter("testcase")] == ["verdict"]
    assert "not checked" not in (inside.directory / "x.md").read_text()
    assert shown.stderr == "run.jsonl: the log was cut off in the middle of line 2\n"


def test_all_documents_of_several_results_at_once(inside: InProcess) -> None:
    """As in CI: one summary, one page, one JUnit file; their directories are made."""
    for number, result in enumerate([reports.HOLDS, reports.VIOLATED, reports.museum(reports.CAUGHT)]):
        (inside.directory / f"{number}.json").write_bytes(to_json(result))
    files = ("0.json", "1.json", "2.json")
    done = inside.run("report", *files, "--html", "a/page.html", "--markdown", "b/summary.md", "--junit", "c/x.xml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (inside.directory / "a/page.html").read_text().count("<article") == 3
    assert (inside.directory / "b/summary.md").read_text().startswith("## ❌ zero2-harness: violated")
    assert len(Tree.parse(inside.directory / "c/x.xml").getroot()) == 3
    shown = inside.run("report", *files)
    assert [line for line in shown.stdout.splitlines() if line.endswith(".json:")] == ["0.json:", "1.json:", "2.json:"]
    assert "1 of 1 plant caught" in shown.stdout


def test_a_summary_goes_to_standard_output(inside: InProcess) -> None:
    (inside.directory / "0.json").write_bytes(to_json(reports.HOLDS))
    done = inside.run("report", "--markdown", "-", "0.json")
    assert done.stdout.startswith("## ✅ zero2-harness: holds\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "Missing argument 'RESULT...'"),
        (("none.json",), "none.json: cannot be read: No such file or directory"),
        (("empty",), "empty: the file is empty"),
        (("doctor.json",), "doctor.json: not a result that can be rendered: expected --events or --json of verify"),
        (("run.json", "empty"), "empty: the file is empty"),
        (("run.json", "--html", "-"), "--html -: expected a file"),
        (("run.json", "--junit", "."), "--junit '.': expected a file, got a directory"),
        (("run.json", "--html", ""), "--html '': expected a file, got no name"),
        (
            ("run.json", "--html", "./run.json"),
            "--html './run.json': that is the file of a RESULT, which would be lost",
        ),
        (
            ("run.json", "--html", "a", "--junit", "./a"),
            "--junit './a': that is the file of --html, which would be lost",
        ),
        (("run.json", "--html", "empty/page.html"), "--html 'empty/page.html': cannot write it: Not a directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    inside: InProcess, args: tuple[str, ...], says: str
) -> None:
    (inside.directory / "empty").touch()
    (inside.directory / "doctor.json").write_text('{"verdict": "holds", "findings": [], "schema": 1}')
    (inside.directory / "run.json").write_bytes(to_json(reports.HOLDS))
    done = inside.run("report", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in inside.directory.iterdir()} == {"empty", "doctor.json", "run.json"}


def test_a_document_that_cannot_be_written_after_all_is_told(inside: InProcess) -> None:
    (inside.directory / "run.json").write_bytes(to_json(reports.HOLDS))
    done = inside.run("report", "run.json", "--markdown", "/dev/full")
    assert done.returncode == 3
    assert "--markdown /dev/full: cannot write it: No space left on device" in done.stderr


def test_a_real_campaign_is_logged_and_drawn(
    inside: InProcess, simulated_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that is wrong, in a simulated world: the map and the timeline are of what its ranks saw."""
    real = runner.run_campaign
    monkeypatch.setattr(explain, "MORE_S", 0.0)  # that it is explained well is not what is tested here
    monkeypatch.setattr(
        runner,
        "run_campaign",
        lambda options, observer: real(replace(options, shrink_s=0.2), observer, simulated_pool),
    )
    campaign = ("--subject", "museum:staging-not-zeroed", "--backend", "sim", "--world", "3", "--seed", "3")
    assert inside.run("verify", *campaign, "--events", "run.jsonl").returncode == 1
    lines = [json.loads(line) for line in (inside.directory / "run.jsonl").read_text().splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds[:2] == ["begun", "scenario"]
    assert kinds[-2:] == ["result", "ended"]
    assert lines[kinds.index("violation") - 1]["conclusion"] == "violated"
    evidence = lines[-2]["result"]["failure"]["evidence"]
    found = evidence["map"]
    assert 0 < found["wrong"] + found["wrong_padding"] == sum(run["length"] for run in found["runs"])
    assert "differs" in {state for row in evidence["timeline"]["rows"] for state in row["states"]}
    assert inside.run("report", "run.jsonl", "--html", "page.html").returncode == 0
    assert 'class="wrong"' in (inside.directory / "page.html").read_text()
