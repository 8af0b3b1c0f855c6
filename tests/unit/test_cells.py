"""The table of strategies: which cells there are, what they are tried on, and what is printed of them."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from harness.cells import campaign, show
from harness.cells.campaign import CellResult, CellsResult, Tried, judged_by
from harness.cells.table import (
    GATHERINGS,
    NUM_PARTS,
    REDUCTIONS,
    STRATEGIES,
    Cell,
    exact_cells,
    rounding_cells,
    scenarios,
)
from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, UndecidedError
from harness.report import result as results
from harness.scenario.model import Clip, Domain, Scenario, check, steps, strategy_of
from harness.subjects.builtin import BUILTIN
from harness.verdict import Divergence, Oracle, Property, Stage

WORLDS = (1, 2, 3, 4, 6, 8)
CELLS = [*exact_cells(), *rounding_cells()]


def of(cell: Cell, world: int) -> list[Scenario]:
    return list(scenarios(cell, world, BUILTIN[cell.strategy].capabilities.extension.strategy, seed=3))


def test_there_is_a_cell_for_each_combination() -> None:
    assert len({*CELLS}) == len(CELLS)
    assert Counter(cell.rounds for cell in CELLS) == {
        False: len(STRATEGIES) * len(REDUCTIONS) * len(GATHERINGS) * 2,
        True: len(STRATEGIES) * len(REDUCTIONS),
    }
    assert {name for name, builtin in BUILTIN.items() if builtin.system == "strategy"} - {"strategy"} == {*STRATEGIES}


@pytest.mark.parametrize("world", WORLDS)
def test_each_is_a_valid_scenario_that_has_what_the_cell_says(world: int) -> None:
    for cell in CELLS:
        for scenario in of(cell, world):
            assert check(scenario) is None, (cell, check(scenario))
            strategy, plans = strategy_of(scenario), list(steps(scenario))
            assert strategy.reduce == cell.reduce
            assert (scenario.values.domain is Domain.GENERAL) == cell.rounds
            assert any(isinstance(each, Clip) for each in scenario.operations) == cell.clips
            assert {len(plan.parts) for plan in plans} == {1 if cell.gathering == "none" else NUM_PARTS}
            assert (strategy.accumulation == "sync") == (cell.gathering == "none")
            assert any(place.dedicated for place in strategy.places) == (cell.strategy == "dmuon")


def test_hybrid_strategies_are_tried_on_every_mesh() -> None:
    meshes = {world: [strategy_of(each).replicas for each in of(Cell("hsdp", "fp32"), world)] for world in (3, 4)}
    assert meshes == {3: [1, 3], 4: [1, 2, 4]}
    assert [strategy_of(each).replicas for each in of(Cell("fsdp2", "fp32"), 4)] == [1]


def cell_result(cell: Cell, **tried: Tried) -> CellResult:
    return CellResult(**cell._asdict(), tried={int(name.removeprefix("w")): each for name, each in tried.items()})


EQUAL = Tried(scenarios=1, equal=True, checks={"weights": 9}, oracle={"exact": 3})
WRONG = Tried(scenarios=1, equal=False, message="weights in step 0, gather: the weights differ")
NO_MESH = Tried(scenarios=0, equal=False)


def test_a_cell_is_equal_only_where_something_was_compared() -> None:
    assert cell_result(CELLS[0], w2=EQUAL, w3=NO_MESH).equal
    assert not cell_result(CELLS[0], w2=NO_MESH).equal
    assert not cell_result(CELLS[0], w2=EQUAL, w3=WRONG).equal
    assert not cell_result(CELLS[0]).equal


@pytest.mark.parametrize(
    ("oracle", "rule"),
    [
        ({"exact": 3}, Oracle.EXACT),
        ({"exact": 3, "ordered": 1}, Oracle.ORDERED),
        ({"ordered": 3, "bound": 1, "exact": 2}, Oracle.BOUND),
        ({}, None),
    ],
)
def test_the_weakest_rule_is_what_a_cell_promises(oracle: dict[str, int], rule: Oracle | None) -> None:
    assert judged_by(cell_result(CELLS[0], w2=replace(EQUAL, oracle=oracle)), 2) is rule
    assert judged_by(cell_result(CELLS[0], w2=WRONG), 2) is None


def replace_evaluation(evaluation: Evaluation, **changes: Any) -> Evaluation:
    return dataclasses.replace(evaluation, **changes)


class _Heard:
    def __init__(self) -> None:
        self.cells: list[CellResult] = []

    def done(self, number: int, total: int, cell: CellResult) -> None:
        assert (number, total) == (len(self.cells) + 1, len(CELLS))
        self.cells.append(cell)


COMPARED = dict.fromkeys(("gradient", "master", "moments", "weights", "norm", "clip"), 1)
HOLDS = Evaluation(Conclusion.HOLDS, checks=COMPARED, oracle={"exact": 1}, situations=frozenset({"clipping-active"}))
VIOLATED = Evaluation(
    Conclusion.VIOLATED,
    Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, step=1, rank=0, message="the reduced gradient differs"),
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Scenario], Evaluation]], CellsResult]:
    """A campaign in which ranks answer as they are told."""

    class _Pool:
        def __enter__(self) -> Pool:
            return None  # type: ignore[return-value]

        def __exit__(self, *_: object) -> None: ...

    def tried(answer: Callable[[Scenario], Evaluation]) -> CellsResult:
        monkeypatch.setattr(campaign, "start_pool", _Pool)
        monkeypatch.setattr(Evaluator, "prepare", lambda self, world: None)
        monkeypatch.setattr(Evaluator, "__init__", lambda self, subject, pool: None)
        monkeypatch.setattr(Evaluator, "evaluate", lambda self, scenario: answer(scenario))
        return campaign.run_cells((2, 3), 7, _Heard())

    return tried


Run = Callable[[Callable[[Scenario], Evaluation]], CellsResult]


def test_all_equal_holds(run: Run) -> None:
    result = run(lambda scenario: HOLDS)
    assert (result.verdict, result.exit_code, len(result.cells)) == ("holds", results.EXIT_HOLDS, len(CELLS))
    assert all(row[2:] == ["equal"] * 6 for row in show.exact_rows(result)[1:])


def test_one_wrong_scenario_is_a_violation_at_its_cell(run: Run) -> None:
    def answer(scenario: Scenario) -> Evaluation:
        wrong = strategy_of(scenario).accumulation == "deferred" and scenario.world == 3
        return VIOLATED if wrong else HOLDS

    result = run(answer)
    text = io.StringIO()
    show.print_result(text, result, markdown=False)

    assert (result.verdict, result.exit_code) == ("violated", results.EXIT_VIOLATED)
    assert all(row[2:] == [*["equal"] * 4, *["DIFFERS at 3"] * 2] for row in show.exact_rows(result)[1:])
    assert "ddp, fp32, deferred, world 3: gradient in step 1, reduce: the reduced gradient differs" in text.getvalue()


@pytest.mark.parametrize("conclusion", [Conclusion.UNSUPPORTED, Conclusion.UNHIT])
def test_what_was_not_decided_is_not_equal(run: Run, conclusion: Conclusion) -> None:
    result = run(lambda scenario: Evaluation(conclusion))
    assert (result.verdict, result.exit_code) == ("unknown", results.EXIT_UNKNOWN)
    assert not any(cell.equal for cell in result.cells)
    assert show.exact_rows(result)[1][2:] == ["undecided at 2, 3"] * 6


@pytest.mark.parametrize("left_out", COMPARED)
def test_a_cell_is_undecided_where_something_was_not_compared(run: Run, left_out: str) -> None:
    checks = {name: count for name, count in COMPARED.items() if name != left_out}
    result = run(lambda scenario: replace_evaluation(HOLDS, checks=checks))
    assert (result.verdict, result.exit_code) == ("unknown", results.EXIT_UNKNOWN)
    assert not any(cell.equal for cell in result.cells)


def test_a_cell_that_clips_is_undecided_where_nothing_was_clipped(run: Run) -> None:
    result = run(lambda scenario: replace_evaluation(HOLDS, situations=frozenset()))
    assert result.verdict == "unknown"
    assert {cell.equal for cell in result.cells if cell.clips} == {False}
    assert {cell.equal for cell in result.cells if not cell.clips} == {True}


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (UndecidedError("no ranks"), 3)])
def test_what_was_tried_until_then_is_kept(run: Run, error: BaseException, code: int) -> None:
    calls = 0

    def answer(scenario: Scenario) -> Evaluation:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise error
        return HOLDS

    result = run(answer)
    assert (result.verdict, result.exit_code) == ("unknown", code)
    assert 0 < len(result.cells) < len(CELLS)
    assert result.reason
    assert show.exact_rows(result)[-1][2:] == ["not tried"] * 6


def test_markdown_is_a_table(run: Run) -> None:
    text = io.StringIO()
    show.print_result(text, run(lambda scenario: HOLDS), markdown=True)
    rows = [line for line in text.getvalue().splitlines() if line.startswith("|")]
    assert len(rows) == 2 * (2 + len(STRATEGIES) * len(REDUCTIONS))
    assert {row.count("|") for row in rows} == {9, 5}
