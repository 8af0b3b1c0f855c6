"""Cases with bytes changed at random: one line, or a verdict. ``make stress`` tries a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch.pool import RankPool
from tests.mutations import check_mutations, mutated_cases, replay_in_process, saved_cases
from tests.support import repetitions


def test_a_mutated_case_is_refused_or_runs(
    scenario_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = check_mutations(
        replay_in_process(scenario_pool, monkeypatch, capsys), tmp_path, count=repetitions(16, 30), seed=1
    )

    assert codes[2] > 0
    assert codes.total() > codes[2]  # some are still valid


def test_what_is_not_mutated_runs_to_the_verdict_it_should(
    scenario_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or the mutations would start from what is refused anyway."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.explain.REPLAYS", 1)
    replay = replay_in_process(scenario_pool, monkeypatch, capsys)
    codes = []
    for number, data in enumerate(saved_cases(tmp_path)):
        path = tmp_path / f"case{number}.json"
        path.write_bytes(data)
        codes.append(replay(path))

    assert codes == [0, 0, 0, 0, 0, 1, 1, 1]


def test_mutations_repeat_with_their_seed_and_change_something(tmp_path: Path) -> None:
    originals = saved_cases(tmp_path)
    first, second, other = ([path.read_bytes() for path in mutated_cases(tmp_path, 24, seed)] for seed in (1, 1, 2))

    assert first == second != other
    assert sum(data in originals for data in first) < len(first) / 4
