"""A small soak on real ranks: of the built-in system, and of a subject that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.launch.pool import RankPool
from harness.report.result import EXIT_HOLDS, EXIT_UNKNOWN
from harness.scenario import codec
from harness.soak.campaign import SoakOptions, run_soak
from harness.subjects.source import parse
from tests.support import repetitions


class Quiet:
    def example(self, *_: Any) -> None: ...

    def note(self, text: str) -> None: ...


def test_verdicts_are_right_and_nothing_is_left_behind(scenario_pool: RankPool, tmp_path: Path) -> None:
    """Without the kinds that hang: each would take a time-out. Seed and numbers are such that none is drawn."""
    options = SoakOptions(subject=parse("zero2"), examples=repetitions(12, 24), every=4, seed=41, report=tmp_path)
    result = run_soak(options, Quiet(), scenario_pool)

    assert (result.exit_code, result.reason, result.wrong) == (EXIT_HOLDS, None, None)
    assert result.run == options.examples
    assert sum(outcome.count for kind, outcome in result.kinds.items() if kind != "no fault") == result.run // 4
    assert not [name for name, grown in result.growth.items() if grown.excessive]


def test_over_a_wrong_subject_a_soak_reports_itself_broken(scenario_pool: RankPool, tmp_path: Path) -> None:
    """What the wrong subject breaks is a verdict that is not as it must be, and is saved as a case."""
    options = SoakOptions(subject=parse("canary-bit"), worlds=(2,), examples=3, every=100, seed=1, report=tmp_path)
    result = run_soak(options, Quiet(), scenario_pool)

    assert result.exit_code == EXIT_UNKNOWN
    assert result.reason is not None
    assert result.reason.startswith("the subject is not right (see `verify`), or the harness is broken")
    assert result.wrong is not None
    assert result.wrong.case is not None
    case = codec.load(Path(result.wrong.case))
    assert case.subject is not None
    assert case.subject.given == "canary-bit"
