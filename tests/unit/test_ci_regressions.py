"""``make regressions``: a patch that git takes, with each new case once, under a name that stays."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from ci import regressions
from harness.fuzz import state
from harness.fuzz.messages import Key
from harness.report.result import Failure
from harness.scenario import codec
from tests.unit.test_fuzz_state import IDENTITY

THERE = sorted(Path("harness/regressions").glob("*.json"))[0]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one regression in it, as the current directory."""
    (tmp_path / regressions.REGRESSIONS).mkdir(parents=True)
    shutil.copy(THERE.absolute(), tmp_path / regressions.REGRESSIONS)
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True, timeout=60)
    return tmp_path


def case(seed: int, subject: str | None = "zero2", **fields: object) -> codec.Case:
    """One that is not there, found in a class of this name."""
    scenario = msgspec.structs.replace(codec.load(_there()).scenario, seed=seed)
    named = None if subject is None else codec.SubjectReference(subject, subject)
    return msgspec.structs.replace(codec.Case(scenario, named, {"property": "weights"}), **fields)


def _there() -> Path:
    return next(iter(regressions.REGRESSIONS.glob(THERE.name)))


def run(*places: str) -> int:
    return regressions.main(["build/regressions.patch", *places])


def test_git_adds_what_the_patch_holds_and_then_nothing_is_new(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        codec.save(case(seed), root / "cases")
    assert run("cases", "missing") == 0
    assert "adds 2 to harness/regressions" in capsys.readouterr().out
    subprocess.run(["git", "apply", "--check", "build/regressions.patch"], check=True, timeout=60)
    subprocess.run(["git", "apply", "build/regressions.patch"], check=True, timeout=60)
    added = sorted(regressions.REGRESSIONS.glob("found-zero2-*.json"))
    assert [codec.load(path) for path in added] == sorted(
        (msgspec.structs.replace(case(seed), failure=None) for seed in (1, 2)),
        key=lambda each: f"found-zero2-{regressions.identity(each)}.json",
    )
    assert run("cases") == 0
    assert capsys.readouterr().out.splitlines() == [
        "left out, 2: in harness/regressions already",
        "no new case in cases; no patch is written",
    ]
    assert not Path("build/regressions.patch").exists()


def test_a_case_that_was_found_twice_is_there_once(root: Path) -> None:
    codec.save(case(1), root / "one")
    codec.save(case(1, failure={"property": "norm"}), root / "two")
    codec.save(case(1, "mine.py:Zero2"), root / "two")
    files, left_out, damaged = regressions.collected([Path("one"), Path("two")], regressions.REGRESSIONS)
    assert len(files) == 1
    assert not left_out
    assert not damaged


def test_one_that_is_there_already_is_known_by_what_it_runs(root: Path) -> None:
    known = codec.load(_there())
    codec.save(msgspec.structs.replace(known, subject=None, failure={"property": "norm"}), root / "cases")
    files, left_out, _ = regressions.collected([Path("cases")], regressions.REGRESSIONS)
    assert not files
    assert left_out == {"in harness/regressions already": 1}


@pytest.mark.parametrize("subject", ["museum:stale", "canary-bit"])
def test_a_planted_bug_is_no_finding(root: Path, subject: str) -> None:
    codec.save(case(1, subject), root / "cases")
    files, left_out, _ = regressions.collected([Path("cases")], regressions.REGRESSIONS)
    assert not files
    assert left_out == {"found in a class whose bug is planted": 1}


def test_a_strategy_of_ones_own_has_no_stand_in() -> None:
    mine = case(1, "mine.py:Mine")
    strategy = msgspec.structs.replace(mine, scenario=msgspec.structs.replace(mine.scenario, system="strategy"))
    with pytest.raises(regressions.LeftOutError, match="nothing here is known to stand in"):
        regressions.regression(strategy)
    built_in = msgspec.structs.replace(strategy, subject=codec.SubjectReference("ddp", "ddp", {}, {"a": 1}))
    assert regressions.regression(built_in).subject == built_in.subject


def test_what_cannot_be_read_is_named_and_the_others_are_in_the_patch(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = codec.save(case(1), root / "cases")
    (root / "cases" / "case-0.json").write_text(saved.read_text().replace('"world": ', '"world": -'))
    assert run("cases") == 2
    said = capsys.readouterr()
    assert "cases/case-0.json: $.world" in said.err
    assert "adds 1 to" in said.out


def test_of_a_fuzz_campaign_the_findings_count_and_not_what_has_been_mended(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with state.opened(Path("build/fuzz/zero2"), IDENTITY, seed=7, fresh=False) as kept:
        codec.save(case(1), kept.cases)
        path = codec.save(case(2), kept.cases)
        failure = Failure(property="weights", stage="gather", actual=0.0, expected=1.0, case=f"elsewhere/{path.name}")
        seen = Key("weights", "gather", None)
        state.save_finding(kept.directory, state.Finding(name="it", round=1, seen=seen, complete=True, failure=failure))
        (kept.directory / "findings" / "torn.json").write_text("{")
    assert run("build/fuzz") == 2
    said = capsys.readouterr()
    assert f"found-zero2-{regressions.identity(regressions.regression(case(2)))}.json" in said.out
    assert "adds 1 to" in said.out
    assert "findings/torn.json" in said.err


def test_a_text_without_a_last_newline_keeps_what_it_has(root: Path) -> None:
    Path("p").write_bytes(regressions.patch({"a.json": b"one\ntwo"}, Path("harness/regressions")))
    subprocess.run(["git", "apply", "p"], check=True, timeout=60)
    assert (root / "harness/regressions/a.json").read_bytes() == b"one\ntwo"
