"""The cases of ``harness/regressions`` hold on a class that is right, and still show the bug that each came from.

Those that ``make regressions`` brought were found in the class itself: no other one shows their bug any more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.regressions import FOUND, identity
from harness import check_case
from harness.checking import REGRESSIONS
from harness.evaluate import Pool
from harness.scenario import codec
from harness.scenario.model import MAX_WORLD
from harness.subjects.builtin import BUILTIN
from tests.subjects.catalogue import SAVED, wrong
from tests.support import sampled, subject

CASES = sorted(REGRESSIONS.glob("*.json"))
PLANTED = [path for path in CASES if not path.name.startswith(FOUND)]


@pytest.fixture(autouse=True)
def _run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of five times."""
    monkeypatch.setattr("harness.explain.REPLAYS", 1)


def test_every_case_has_a_class_that_it_came_from() -> None:
    assert {path.stem for path in PLANTED} == set(SAVED)
    assert len(PLANTED) >= 20
    for path in PLANTED:
        case = codec.load(path)
        assert case.subject == codec.SubjectReference("zero2", "zero2")
        assert case.scenario.world <= 4 < MAX_WORLD
        assert case.scenario.numel <= 16


def test_no_case_is_another_one() -> None:
    cases = [codec.load(path) for path in CASES]
    assert len({identity(case) for case in cases}) == len(cases)
    assert all(case.subject is not None and case.subject.absolute in BUILTIN for case in cases)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_it_holds_in_a_simulated_world(path: Path, simulated_pool: Pool) -> None:
    check_case(path, pool=simulated_pool)


@pytest.mark.parametrize("path", sampled(PLANTED, 3), ids=lambda path: path.stem)
def test_zero_master_holds_on_real_ranks(path: Path, scenario_pool: Pool) -> None:
    check_case(path, backend="gloo", pool=scenario_pool)


@pytest.mark.parametrize("path", PLANTED, ids=lambda path: path.stem)
def test_the_class_that_it_came_from_is_still_wrong(path: Path, simulated_pool: Pool) -> None:
    """A case that shows nothing any more is no regression test."""
    expected = wrong(SAVED[path.stem])
    with pytest.raises(AssertionError) as raised:
        check_case(path, subject=subject(expected.subject).given, pool=simulated_pool)

    lines = dict(line.split(maxsplit=1) for line in str(raised.value).splitlines() if len(line.split(maxsplit=1)) == 2)
    assert lines["property"] in expected.properties
    assert lines["stage"] in expected.stages
