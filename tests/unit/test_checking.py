"""``harness.check_case`` over canned ranks: what it takes, and what it raises for which verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness
from harness.checking import check_case
from harness.errors import CaseError, UsageError
from harness.evaluate import UndecidedError
from harness.launch.outcome import PoolError
from harness.scenario import codec
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from tests.unit.test_runner import CannedPool, differs, fine, refuses

SCENARIO = Scenario(
    world=2,
    seed=3,
    parameters=(Parameter("w", (4,)),),
    values=Values(Domain.EXACT, 7, 0),
    optimizer=AdamW(),
    operations=(Build(4), Part(False, (0, 1), ((), ())), Step()),
)
CASE = codec.Case(SCENARIO, codec.SubjectReference("zero2", "zero2"))
TEXT = codec.encode(CASE).decode()


@pytest.fixture
def pool(tmp_path: Path) -> CannedPool:
    return CannedPool(tmp_path, fine)


def test_it_is_what_the_package_offers() -> None:
    assert harness.check_case is check_case
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = harness.nothing_like_it  # type: ignore[attr-defined]


def test_a_path_a_text_and_a_dictionary_are_the_same_case(pool: CannedPool, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(TEXT)

    for case in (path, str(path), TEXT, f"\n{TEXT}", json.loads(TEXT)):
        check_case(case, pool=pool)

    assert len(pool.scenarios) % 5 == 0
    assert set(map(codec.encode, map(codec.Case, pool.scenarios))) == {codec.encode(codec.Case(SCENARIO))}


def test_a_violation_is_an_assertion_that_says_all(pool: CannedPool, tmp_path: Path) -> None:
    """With the command that replays it where it has a file; without the test, which the reader has before him."""
    pool.answer = lambda scenario, rank, run: differs(scenario, rank)
    path = tmp_path / "case.json"
    path.write_text(TEXT)

    with pytest.raises(AssertionError, match="planted") as of_file:
        check_case(path, pool=pool)
    with pytest.raises(AssertionError, match="planted") as of_text:
        check_case(TEXT, pool=pool)

    assert f"replay       python -m harness replay {path}" in str(of_file.value)
    for raised in (of_file, of_text):
        assert str(raised.value).startswith("violated: zero2 on sim, world 2, 1 parameter of 4")
        assert "property     master" in str(raised.value)
        assert "check_case" not in str(raised.value)
    assert "replay" not in str(of_text.value)


def test_no_verdict_is_no_pass(pool: CannedPool) -> None:
    pool.answer = refuses
    with pytest.raises(UndecidedError, match="outside its space"):
        check_case(TEXT, pool=pool)
    pool.raises = {len(pool.scenarios): PoolError("no room")}
    with pytest.raises(UndecidedError, match="no room"):
        check_case(TEXT, pool=pool)


def test_an_interruption_stays_one(pool: CannedPool) -> None:
    pool.raises = {0: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        check_case(TEXT, pool=pool)


def test_what_cannot_be_used_is_said_before_anything_runs(pool: CannedPool) -> None:
    elsewhere = {**json.loads(TEXT), "subject": {"given": "x", "absolute": "/nowhere/zero.py:Zero"}}
    with pytest.raises(UsageError, match="no such file"):
        check_case(elsewhere, pool=pool)
    with pytest.raises(CaseError, match=r"the case: \$: object missing required field"):
        check_case({"version": 1}, pool=pool)
    with pytest.raises(UsageError, match="--order ring"):
        check_case(TEXT, backend="gloo", order="ring", pool=pool)
    with pytest.raises(CaseError, match="no such file"):
        check_case("missing.json", pool=pool)
    assert pool.scenarios == []
