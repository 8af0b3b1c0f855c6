"""Try every cell on real ranks, and say what came of it. No torch: ranks do the work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from harness.cells.table import Cell, Gathering, exact_cells, rounding_cells, scenarios
from harness.ending import raise_if_interrupted
from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, UndecidedError, start_pool
from harness.report import result as results
from harness.scenario.strategy import Reduce
from harness.scenario.strategy_situations import StrategySituation
from harness.subjects.builtin import BUILTIN
from harness.subjects.source import parse
from harness.verdict import Divergence, Oracle, Property


class Tried(Struct, frozen=True, kw_only=True):
    """What came of one cell at one world.

    Attributes:
        scenarios: how many meshes it was tried on; 0 where its strategy has none of so many ranks.
        equal: all of them compared equal, in all that a cell is about.
        checks: property -> how many times it was compared.
        oracle: by which rules gradients were judged.
        message: what differed first; None where nothing did.
        undecided: why nothing can be said; None where it can.
    """

    scenarios: int
    equal: bool
    checks: dict[str, int] = {}
    oracle: dict[str, int] = {}
    message: str | None = None
    undecided: str | None = None


class CellResult(Struct, frozen=True, kw_only=True):
    """One field of the table; see :class:`harness.cells.table.Cell`. ``tried``: by number of ranks."""

    strategy: str
    reduce: Reduce
    gathering: Gathering
    clips: bool
    rounds: bool
    tried: dict[int, Tried]

    @property
    def equal(self) -> bool:
        """At every number of ranks at which it was tried, and it was at one at least."""
        tried = [each for each in self.tried.values() if each.scenarios]
        return bool(tried) and all(each.equal for each in tried)


class CellsResult(Struct, frozen=True, kw_only=True):
    """All of the table. ``reason``: why it is not whole."""

    verdict: results.Verdict
    worlds: tuple[int, ...]
    seed: int
    cells: tuple[CellResult, ...]
    seconds: float
    versions: dict[str, str]
    reason: str | None = None
    interrupted: bool = False
    schema: int = results.SCHEMA

    @property
    def exit_code(self) -> int:
        """As of every verb that judges."""
        if self.interrupted:
            return results.EXIT_INTERRUPTED
        return {"holds": results.EXIT_HOLDS, "violated": results.EXIT_VIOLATED}.get(self.verdict, results.EXIT_UNKNOWN)


class Observer(Protocol):
    """Hears of progress."""

    def done(self, number: int, total: int, cell: CellResult) -> None:
        """One more cell."""


@dataclass
class _State:
    cells: list[CellResult] = field(default_factory=list)
    reason: str | None = None
    interrupted: bool = False


def run_cells(worlds: Sequence[int], seed: int, observer: Observer) -> CellsResult:
    """Try all cells at each of these worlds on gloo ranks, which are ended on every path.

    Raises:
        UsageError: a strategy cannot be used at all.
    """
    began, state = time.monotonic(), _State()
    cells = [*exact_cells(), *rounding_cells()]
    try:
        with start_pool() as pool:
            _run(pool, cells, worlds, seed, observer, state)
    except KeyboardInterrupt:
        state.reason, state.interrupted = f"interrupted after {len(state.cells)} of {len(cells)} cells", True
    except UndecidedError as error:
        state.reason = str(error)
    return CellsResult(
        verdict=_verdict(state, len(cells)),
        worlds=tuple(worlds),
        seed=seed,
        cells=tuple(state.cells),
        seconds=time.monotonic() - began,
        versions=results.versions(),
        reason=state.reason,
        interrupted=state.interrupted,
    )


def _verdict(state: _State, total: int) -> results.Verdict:
    if any(each.message for cell in state.cells for each in cell.tried.values()):
        return "violated"
    whole = len(state.cells) == total and all(cell.equal for cell in state.cells)
    return "holds" if whole and state.reason is None else "unknown"


def _run(
    pool: Pool, cells: Sequence[Cell], worlds: Sequence[int], seed: int, observer: Observer, state: _State
) -> None:
    evaluators: dict[str, Evaluator] = {}
    for number, cell in enumerate(cells, 1):
        if cell.strategy not in evaluators:
            evaluators[cell.strategy] = Evaluator(parse(cell.strategy), pool)
        tried = {world: _try(evaluators[cell.strategy], cell, world, seed) for world in worlds}
        found = CellResult(**cell._asdict(), tried=tried)
        state.cells.append(found)
        observer.done(number, len(cells), found)


def _try(evaluator: Evaluator, cell: Cell, world: int, seed: int) -> Tried:
    offer = BUILTIN[cell.strategy].capabilities.extension.strategy
    listed = list(scenarios(cell, world, offer, seed))
    oracle: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    for scenario in listed:
        raise_if_interrupted()
        evaluator.prepare(world)
        evaluation = evaluator.evaluate(scenario)
        if evaluation.divergence is not None:
            return Tried(scenarios=len(listed), equal=False, message=_message(evaluation.divergence))
        missing = _missing(cell, evaluation)
        if missing is not None:
            return Tried(scenarios=len(listed), equal=False, undecided=missing)
        oracle.update(evaluation.oracle)
        checks.update(evaluation.checks)
    return Tried(scenarios=len(listed), equal=bool(listed), checks=dict(checks), oracle=dict(oracle))


_COMPARED = (Property.GRADIENT, Property.MASTER, Property.MOMENTS, Property.WEIGHTS, Property.NORM, Property.CLIP)


def _missing(cell: Cell, evaluation: Evaluation) -> str | None:
    """What of a run of this cell was not looked at; None where all of it was."""
    if evaluation.conclusion is not Conclusion.HOLDS:
        return f"nothing was decided: {evaluation.conclusion.value}"
    unchecked = [prop.value for prop in _COMPARED if not evaluation.checks.get(prop.value)]
    if unchecked:
        return f"never compared: {', '.join(unchecked)}"
    if cell.clips and StrategySituation.CLIPPING_ACTIVE.value not in evaluation.situations:
        return "nothing was clipped"
    return None


def _message(found: Divergence) -> str:
    where = "at construction" if found.step is None else f"in step {found.step}"
    return f"{found.property.value} {where}, {found.stage.value}: {found.message}"


def judged_by(cell: CellResult, world: int) -> Oracle | None:
    """The weakest rule by which gradients of a cell were judged at a world; None where nothing was."""
    tried = cell.tried.get(world)
    if tried is None or not tried.equal:
        return None
    rules = [rule for rule in (Oracle.BOUND, Oracle.ORDERED, Oracle.EXACT) if tried.oracle.get(rule.value)]
    return rules[0] if rules else None
