"""How tests on GPUs are counted, named and refused. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu import needs, session

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(0, ()), (1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (7, (1, 2, 3, 4)), (8, (1, 2, 3, 4, 8))],
)
def test_worlds_have_a_gpu_for_each_rank(num_gpus: int, expected: tuple[int, ...]) -> None:
    assert needs.worlds_of(num_gpus) == expected


@pytest.mark.parametrize(
    ("skipped", "num_gpus", "line"),
    [
        ({2: 6, 4: 3}, 1, "not covered: 6 tests need 2 GPUs, 3 need 4; this machine has 1"),
        ({4: 1, 2: 1}, 1, "not covered: 1 test needs 2 GPUs, 1 needs 4; this machine has 1"),
        ({1: 2}, 0, "not covered: 2 tests need 1 GPU; this machine has 0"),
        ({8: 5, 4: 0}, 4, "not covered: 5 tests need 8 GPUs; this machine has 4"),
        ({}, 8, "covered: every test had the GPUs it needs"),
    ],
)
def test_what_is_not_covered_is_said_in_one_line(skipped: dict[int, int], num_gpus: int, line: str) -> None:
    assert needs.not_covered(skipped, num_gpus) == line


def junit(path: Path, *messages: str | None) -> Path:
    """A file of one test for each of these: run, or skipped with a message."""
    cases = [
        '<testcase name="t"/>' if message is None else f'<testcase name="t"><skipped message="{message}"/></testcase>'
        for message in messages
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_skips_are_counted_by_what_they_need(tmp_path: Path) -> None:
    found = needs.counts(
        junit(tmp_path / "x", None, needs.reason(2, 1), needs.reason(4, 1), None, needs.reason(2, 1), "rain")
    )
    assert found == (2, Counter({2: 2, 4: 1, None: 1}))
    with pytest.raises(ValueError, match="cannot be read"):
        needs.counts(tmp_path / "absent")


def test_a_run_without_a_test_is_a_failure() -> None:
    nothing = needs.Counts(0, Counter({2: 3}))
    assert needs.verdict(nothing, 1, 0)[0] == 1
    assert needs.verdict(nothing, 1, 0)[1][-1] == "no test was run: nothing was shown"
    assert needs.verdict(nothing, 1, 5)[0] == 5


def test_the_exit_code_is_that_of_the_tests_unless_something_was_left_out_without_need() -> None:
    some = needs.Counts(7, Counter({2: 3}))
    code, lines = needs.verdict(some, 1, 0)
    assert code == 0
    assert lines == ["7 tests run on 1 GPU", "not covered: 3 tests need 2 GPUs; this machine has 1"]
    assert needs.verdict(some, 1, 1)[0] == 1
    code, lines = needs.verdict(needs.Counts(7, Counter({None: 2})), 1, 0)
    assert code == 1
    assert lines[-1] == "skipped for other reasons: 2"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a session starts; nothing is."""
    started: list[str] = []
    monkeypatch.setattr(session.subprocess, "run", lambda command, **_: started.append(" ".join(command)))
    return started


@pytest.mark.parametrize(
    ("visible", "sentence"),
    [
        (needs.Visible(True, ()), "no GPU is visible to torch here"),
        (needs.Visible(False, ()), "was built without CUDA: give the Python of one that was (NO_VENV=1 PYTHON=...)"),
    ],
)
def test_without_a_gpu_there_is_one_sentence_and_no_test(
    visible: needs.Visible,
    sentence: str,
    seen: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(needs, "visible_gpus", lambda: visible)
    assert session.main(str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert not seen


def test_what_cannot_be_imported_is_named(
    seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "REQUIRED", ("torch", "no_such_module_here"))
    assert session.main(str(tmp_path)) == 2
    assert "cannot import no_such_module_here" in capsys.readouterr().err
    assert not seen


def test_what_the_session_needs_is_what_the_project_depends_on() -> None:
    import tomllib

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {dependency.split(">")[0].replace("pytest-xdist", "xdist").replace("-", "_") for dependency in dependencies}
    assert set(session.REQUIRED) == names


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\necho "a line of an import"\necho "cuda: 12.8"\necho "gpus:"\necho "One"\necho "Two words"\n'
    )
    fake.chmod(0o755)
    assert needs.visible_gpus(str(fake)) == needs.Visible(True, ("One", "Two words"))

    fake.write_text('#!/bin/sh\necho "no such driver" >&2\nexit 3\n')
    with pytest.raises(needs.UnknownGpusError, match="no such driver"):
        needs.visible_gpus(str(fake))


def test_on_its_own_pytest_skips_and_counts_what_it_cannot_run() -> None:
    """All of tests/gpu, as on a machine without a GPU."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", needs.GPUS: "0"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("not covered: ")]
    assert line.endswith("; this machine has 0")
    assert "passed" not in run.stdout.splitlines()[-1]
