"""What a person reads of the table of cells: as text, or as Markdown for a guide. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Final

from harness.cells.campaign import CellResult, CellsResult, judged_by
from harness.cells.table import GATHERINGS, REDUCTIONS, STRATEGIES, Gathering
from harness.report.console import TextConsole, count, duration
from harness.verdict import Oracle

_STYLES: Final = {"holds": "bold green", "violated": "bold red", "unknown": "bold yellow"}
_GATHERINGS: Final[dict[Gathering, str]] = {"none": "one part", "no_sync": "no_sync", "deferred": "deferred"}
_RULES: Final = {
    Oracle.EXACT: "bit for bit",
    Oracle.ORDERED: "bit for bit",
    Oracle.BOUND: "within rounding",
}
_RING: Final = "bit for bit, ring"
_EXACT_TITLE: Final = "Gradients whose sums are exact: every bit of gradients, norms, moments and weights"
_ROUNDS_TITLE: Final = "Gradients whose sums round: against one process that rounds where the strategy does"


class CellsProgress:
    """Hears of progress; a line for each strategy that is done."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = TextConsole(stream)
        self._strategy: str | None = None

    def done(self, number: int, total: int, cell: CellResult) -> None:
        """One more cell."""
        if cell.strategy != self._strategy:
            self._strategy = cell.strategy
            self._console.say(f"{number - 1}/{total} cells, now {cell.strategy}")
        if not cell.equal:
            self._console.say(f"  {title(cell)}: {_field(cell)}")


def title(cell: CellResult) -> str:
    """A cell in a few words."""
    words = [cell.strategy, cell.reduce, _GATHERINGS[cell.gathering]]
    words += ["clipped"] if cell.clips else []
    words += ["rounding"] if cell.rounds else []
    return ", ".join(words)


def _field(cell: CellResult | None) -> str:
    if cell is None:
        return "not tried"
    if cell.equal:
        return "equal"
    wrong = [str(world) for world, tried in cell.tried.items() if tried.message is not None]
    if wrong:
        return f"DIFFERS at {', '.join(wrong)}"
    undecided = [str(world) for world, tried in cell.tried.items() if tried.undecided is not None]
    return f"undecided at {', '.join(undecided)}" if undecided else "no such mesh"


def exact_rows(result: CellsResult) -> list[list[str]]:
    """The first table: head, then a row for each strategy and reduction."""
    found = {(c.strategy, c.reduce, c.gathering, c.clips): c for c in result.cells if not c.rounds}
    columns = [(gathering, clips) for gathering in GATHERINGS for clips in (False, True)]
    heads = [f"{_GATHERINGS[gathering]}{', clipped' if clips else ''}" for gathering, clips in columns]
    rows = [["strategy", "reduced in", *heads]]
    for strategy in STRATEGIES:
        for reduce in REDUCTIONS:
            cells = [found.get((strategy, reduce, gathering, clips)) for gathering, clips in columns]
            rows.append([strategy, reduce, *map(_field, cells)])
    return rows


def rounding_rows(result: CellsResult) -> list[list[str]]:
    """The second table: head, then a row for each strategy and reduction."""
    found = {(cell.strategy, cell.reduce): cell for cell in result.cells if cell.rounds}
    rows = [["strategy", "reduced in", *(f"{count(world, 'rank')}" for world in result.worlds)]]
    for strategy in STRATEGIES:
        for reduce in REDUCTIONS:
            cell = found.get((strategy, reduce))
            rows.append([strategy, reduce, *(_promise(cell, world) for world in result.worlds)])
    return rows


def _promise(cell: CellResult | None, world: int) -> str:
    tried = None if cell is None else cell.tried.get(world)
    if cell is None or tried is None:
        return "not tried"
    if not tried.scenarios:
        return "no such mesh"
    rule = judged_by(cell, world)
    if rule is None:
        return "DIFFERS"
    return _RING if rule is Oracle.ORDERED and world > 2 else _RULES[rule]  # two add in one order


def lines(result: CellsResult, *, markdown: bool) -> Iterator[tuple[str, str]]:
    """The result as ``(line, style)`` pairs."""
    for heading, rows in ((_EXACT_TITLE, exact_rows(result)), (_ROUNDS_TITLE, rounding_rows(result))):
        yield heading, "bold"
        yield "", ""
        for line in _markdown(rows) if markdown else _plain(rows):
            yield line, ""
        yield "", ""
    for cell in result.cells:
        for world, tried in cell.tried.items():
            wrong = tried.message or tried.undecided
            if wrong is not None:
                yield f"{title(cell)}, world {world}: {wrong}", ""
    yield _headline(result), _STYLES[result.verdict]
    if result.reason is not None:
        yield f"  {'reason':<12} {result.reason}", ""


def _headline(result: CellsResult) -> str:
    num_equal = sum(cell.equal for cell in result.cells)
    tried = sum(each.scenarios for cell in result.cells for each in cell.tried.values())
    worlds = ",".join(map(str, result.worlds))
    return (
        f"{result.verdict}: {num_equal} of {len(result.cells)} cells equal, {count(tried, 'scenario')} on gloo, "
        f"world {worlds}, in {duration(result.seconds)}, seed {result.seed}"
    )


def _plain(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def print_result(stream: IO[str], result: CellsResult, *, markdown: bool) -> None:
    """Print :func:`lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in lines(result, markdown=markdown):
        console.say(line, style)
