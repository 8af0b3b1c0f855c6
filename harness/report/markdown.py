"""A Markdown job summary: the verdict first, what failed before what passed, details folded away. No torch.

GitHub shows a summary of at most 1 MiB of a step and nothing of a larger one: this one stays well below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.museum import show
from harness.museum.score import MuseumResult, Outcome, PlantOutcome
from harness.report import words
from harness.report.console import count, failure_lines, visible
from harness.report.reading import Told
from harness.report.result import Failure

MOST_BYTES: Final = 700_000
MOST_ROWS: Final = 200
_DETAIL_BYTES: Final = 60_000
_ALARM_BYTES: Final = 2_000  # of one of many failures
_ROOM: Final = 500  # bytes, for saying what was left out

_SYMBOLS: Final = {"violated": "❌", "unknown": "❔", "holds": "✅"}


def render(reports: Sequence[Told]) -> str:
    """One summary of one or more results."""
    ordered = words.failing_first(reports)
    blocks = [_head(ordered)] + [_section(told) for told in ordered]
    kept: list[str] = []
    room = MOST_BYTES - _ROOM
    for number, block in enumerate(blocks):
        size = len(block.encode())
        if size > room:
            left = count(len(blocks) - max(number, 1), "result")
            kept.append(
                f"_{left} left out: a summary has room for {MOST_BYTES:,} bytes. `harness report` renders all._\n"
            )
            break
        room -= size
        kept.append(block)
    return "\n".join(kept)


def _head(ordered: Sequence[Told]) -> str:
    worst = ordered[0].result.verdict
    lines = [f"## {_SYMBOLS[worst]} zero2-harness: {worst}", ""]
    if len(ordered) > 1:
        lines += ["| verdict | run | what | where | how much | result |", "|---|---|---|---|---|---|"]
        lines += [_row(told) for told in ordered[:MOST_ROWS]]
        if len(ordered) > MOST_ROWS:
            lines.append(f"\n_{count(len(ordered) - MOST_ROWS, 'more result')}_")
        lines.append("")
    return "\n".join(lines)


def _row(told: Told) -> str:
    verdict = told.result.verdict
    name = words.cut(told.name, 80)
    cells = (told.verb, words.subject_of(told), words.where(told), words.ran(told), name)
    return f"| {_SYMBOLS[verdict]} {verdict} | {' | '.join(map(escaped, cells))} |"


def _section(told: Told) -> str:
    result = told.result
    title = f"{_SYMBOLS[result.verdict]} {result.verdict}: {told.verb} of {words.subject_of(told)}"
    lines = [escaped(words.sentence(told)) + ".", ""]
    if told.cut is not None:
        lines += [f"> {escaped(told.cut)}", ""]
    if isinstance(result, MuseumResult):
        lines += _museum(result)
    elif result.failure is not None:
        lines += _failure(result.failure)
    text = "\n".join(line for line, _ in words.printed(told))
    lines += [_folded("everything that was printed", fenced(text))]
    body = "\n".join(lines)
    if result.verdict == "holds":
        return _folded(f"{title} ({words.ran(told)}, {words.where(told)})", body)
    return f"### {escaped(title)}\n\n{escaped(words.where(told))}: {escaped(words.ran(told))}\n\n{body}"


def _failure(failure: Failure) -> list[str]:
    rows = [
        ("expected", failure.expected, failure.expected_bits),
        ("actual", failure.actual, failure.actual_bits),
        ("mismatches", failure.mismatches, None),
        ("pattern", failure.pattern, None),
        ("symptom", failure.symptom, None),
        ("message", failure.message, None),
        ("scenario", failure.scenario, None),
        ("case", failure.case, None),
    ]
    lines = []
    if failure.replay is not None:
        lines += ["See it again:", "", fenced(words.cut(failure.replay, 2000)), ""]
    lines += ["| first difference | |", "|---|---|"]
    for label, value, bits in rows:
        if value is not None:
            more = "" if bits is None else f" (bits {bits})"
            lines.append(f"| {label} | {escaped(words.cut(f'{value}{more}', 600))} |")
    lines.append("")
    if failure.test is not None:
        lines.append(_folded("a test to paste", fenced(failure.test, "python")))
    if failure.output and failure.output.strip():
        lines.append(_folded("output of the ranks", fenced(failure.output[-_DETAIL_BYTES:])))
    return lines


def _museum(result: MuseumResult) -> list[str]:
    lines = []
    wrong = [plant for plant in result.plants if show.problems(plant)]
    alarms = [control for control in result.controls if control.verdict != "holds"]
    outcomes: list[Outcome] = [*wrong, *alarms]
    for outcome in outcomes[:MOST_ROWS]:
        problems = show.problems(outcome) if isinstance(outcome, PlantOutcome) else []
        lines.append(f"- {escaped(words.cut('; '.join([show.done_line(outcome), *problems]), 600))}")
        if outcome.failure is not None and outcome in alarms:
            lines.append(_folded("the failure", fenced("\n".join(failure_lines(outcome.failure)), most=_ALARM_BYTES)))
    return [*lines, ""] if lines else []


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>\n\n{body}\n\n</details>\n"


def fenced(text: str, language: str = "", *, most: int = _DETAIL_BYTES) -> str:
    """``text`` as it is, in a fence that nothing in it ends; the middle of what is longer than ``most`` bytes is left
    out, what does not print having become longer than it was."""
    shown = visible(text if len(text) <= 2 * most else text[:most] + text[-most:])
    data = shown.encode("utf-8", "backslashreplace")
    if len(data) > most:
        first, last = (part.decode(errors="ignore") for part in (data[: most // 2], data[-(most // 2) :]))
        shown = f"{first}\n[... of {len(text):,} characters the middle is left out ...]\n{last}"
    longest = run = 0
    for char in shown:
        run = run + 1 if char == "`" else 0
        longest = max(longest, run)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown.rstrip()}\n{fence}"


_SPECIAL: Final = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "|": "&#124;",
    "@": "&#64;",
    "\n": " ",
    **{char: f"\\{char}" for char in "\\`*_[]#~!$"},
}


def escaped(text: str) -> str:
    """``text`` in one line that Markdown shows as it is, also in a cell of a table and as a title in HTML."""
    return "".join(_SPECIAL.get(char, char) for char in visible(text))
