"""What a worker makes of findings of earlier runs, and of other campaigns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.evaluate import Evaluator
from harness.fuzz import state
from harness.fuzz.examiner import CampaignExaminer
from harness.fuzz.messages import Gone, Key, Report, RunSaved, Setup
from harness.fuzz.rounds import Seen, Smaller
from harness.fuzz.state import Finding
from harness.fuzz.worker import _Line, _Worker
from harness.report.result import Failure
from harness.scenario import codec, generate
from harness.scenario.model import CONTRACT, Extension, Load, Scenario, beyond

PLAIN = generate.draw(1, 0, (2,))
LOADS = next(
    scenario
    for scenario in (generate.draw(1, index, (2,), extension=Extension(refresh=True)) for index in range(400))
    if any(isinstance(operation, Load) for operation in scenario.operations)
)


class Examining:
    """Sees what it is told to, one after the other."""

    def __init__(self, *seen: bool) -> None:
        self.seen = list(seen)
        self.explained: list[Scenario] = []

    def examine(self, _: Scenario) -> Seen:
        return Seen(self.seen.pop(0))

    def explain(self, scenario: Scenario, _: Smaller) -> bool:
        self.explained.append(scenario)
        return True


class Told:
    def __init__(self) -> None:
        self.said: list[Report] = []
        self.found_again: list[str] = []
        self.examiner: CampaignExaminer | None = None

    def say(self, report: Report) -> None:
        self.said.append(report)

    def found(self, finding: Finding) -> None:
        self.found_again.append(finding.name)


def tried(
    directory: Path, *seen: bool, scenario: Scenario = PLAIN, prop: str = "weights", foreign: bool = False
) -> Any:
    """What is left to see, what was explained, what was said, when this finding is tried again."""
    (directory / "findings").mkdir()
    path = codec.save(codec.Case(scenario), directory)
    failure = Failure(property=prop, case=str(path))
    finding = Finding(
        name="one", round=None, seen=Key(prop, None, None), complete=True, failure=failure, foreign=foreign
    )
    state.save_finding(directory, finding)
    setup = cast(
        Setup,
        SimpleNamespace(
            directory=str(directory), report=str(directory), given="zero2", absolute="zero2", args={}, config=None,
            worlds=(1, 2), backend="sim", seed=1, timeout_s=None, shrink_s=1.0, stall_s=None,
            order="ring", schedule="random", keep_going=True, deadline=None,
        ),
    )  # fmt: skip
    told, examining = Told(), Examining(*seen)
    worker = _Worker(
        setup, cast(Evaluator, SimpleNamespace(extension=CONTRACT, system="zero_master")), cast(_Line, told)
    )
    worker._examiner = cast(CampaignExaminer, examining)
    assert worker._saved(RunSaved(("one",), database=False))
    return SimpleNamespace(left=examining.seen, explained=examining.explained, said=told.said, found=told.found_again)


def test_what_still_fails_is_found_and_what_does_not_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    still, mended = tried(tmp_path / "a", True), tried(tmp_path / "b", False)
    assert (still.found, still.said) == (["one"], [])
    assert (mended.found, mended.said) == ([], [Gone("one")])


@pytest.mark.parametrize("seen", [(False, False, True), (False,) * 5])
def test_what_comes_and_goes_is_tried_several_times_and_stays(tmp_path: Path, seen: tuple[bool, ...]) -> None:
    came_and_went = tried(tmp_path, *seen, prop="determinism")
    assert (came_and_went.found, came_and_went.said, came_and_went.left) == (["one"], [], [])


def test_what_another_campaign_found_is_told_as_it_is_seen_here(tmp_path: Path) -> None:
    adopted = tried(tmp_path, True, foreign=True)
    assert (adopted.explained, adopted.found, adopted.said) == ([PLAIN], [], [Gone("one")])


def test_what_this_subject_does_not_take_is_not_tried(tmp_path: Path) -> None:
    assert beyond(LOADS, CONTRACT) == ("refresh",)
    assert beyond(LOADS, Extension(refresh=True)) == ()
    passed_over = tried(tmp_path, scenario=LOADS, foreign=True)
    assert (passed_over.explained, passed_over.said) == ([], [Gone("one")])
