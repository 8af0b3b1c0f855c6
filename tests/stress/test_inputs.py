"""A thousand mutated cases: one line, or a verdict. ``STRESS_CASES`` and ``STRESS_PROCESSES`` change how many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.launch.pool import RankPool
from tests.mutations import check_answer, check_mutations, replay_in_process

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

CASES = int(os.environ.get("STRESS_CASES", "1000"))
PROCESSES = int(os.environ.get("STRESS_PROCESSES", "30"))
SEED = int(os.environ.get("STRESS_SEED", "20250"))


@pytest.mark.timeout(3600)
def test_mutated_cases_in_one_process(
    scenario_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the same warm ranks, which must bear all of them."""
    monkeypatch.chdir(tmp_path)
    codes = check_mutations(replay_in_process(scenario_pool, monkeypatch, capsys), tmp_path, CASES, SEED)

    with capsys.disabled():
        print(f"\n{CASES} mutated cases, seed {SEED}: exit codes {dict(sorted(codes.items()))}")  # noqa: T201
    assert codes[2] > 0
    assert codes.total() > codes[2]


@pytest.mark.timeout(3600)
def test_mutated_cases_each_in_a_process_of_its_own(cli: CommandLine) -> None:
    def replay(path: Path) -> int:
        done = cli.run("replay", path.name)
        lines = done.stderr.splitlines(keepends=True)
        progress = [line for line in lines if line.startswith("0/1 examples")]
        check_answer(done.returncode, done.stdout, "".join(line for line in lines if line not in progress))
        return done.returncode

    codes = check_mutations(replay, cli.directory, PROCESSES, SEED + 1)

    assert codes[2] > 0
    assert list(cli.temporary.glob("zero2*")) == []
