"""What a person reads of `doctor`: each finding as soon as it is there, and the verdict. No torch."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from types import TracebackType
from typing import IO, Self

from rich.status import Status
from rich.text import Text

from harness.doctor.findings import DoctorResult, Finding, Verdict
from harness.report.console import TextConsole, duration, visible

COLUMNS = 100
_NAME = 9  # where the name begins; the verdict is before it
_TEXT = 29  # where all else begins

_STYLES = {
    Verdict.OK: "bold green",
    Verdict.NOTE: "bold cyan",
    Verdict.PROBLEM: "bold red",
    Verdict.UNKNOWN: "bold yellow",
}
_OVERALL = {"ok": "bold green", "problem": "bold red", "unknown": "bold yellow"}


class FindingsReport:
    """Prints findings as they come, and on a terminal what is being measured; a context manager."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = TextConsole(stream)
        self._status: Status | None = None
        if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            self._status = self._console.status("looking at the machine")

    def __enter__(self) -> Self:
        """Start the status line, if there is one."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the status line."""
        if self._status is not None:
            self._status.stop()

    def measuring(self, what: str) -> None:
        """``what`` is measured from now on."""
        if self._status is not None:
            self._status.update(f"measuring: {what}")

    def found(self, finding: Finding) -> None:
        """Print one finding."""
        first, *rest = finding_lines(finding)
        width = len(finding.verdict)
        self._console.print(Text.assemble((first[:width], _STYLES[finding.verdict]), first[width:]))
        for line in rest:
            self._console.say(line)


def finding_lines(finding: Finding) -> list[str]:
    """Verdict, name and what was measured; under it the details, and what that means. At most ``COLUMNS`` wide."""
    head = f"{finding.verdict:<{_NAME}}{finding.name:<{_TEXT - _NAME}}"
    lines = _wrapped(finding.measured, head)
    lines += [" " * _TEXT + visible(line) for line in finding.details]
    return lines + _wrapped(finding.meaning, " " * (_TEXT - 2) + "> ")


def result_lines(result: DoctorResult) -> list[str]:
    """The verdict over all, and what is in its way."""
    verdict = f"{result.verdict}, interrupted" if result.interrupted else result.verdict
    counts = Counter(finding.verdict for finding in result.findings)
    listed = ", ".join(f"{counts[item]} {item}" for item in Verdict if counts[item])
    worlds = ",".join(map(str, result.worlds))
    backend = result.backend if result.device == "cpu" else f"{result.backend} on {result.device}"
    lines = [f"{verdict}: {backend}, world {worlds}, {listed or 'no finding'}, in {duration(result.seconds)}"]
    problems = [item.name for item in result.findings if item.verdict is Verdict.PROBLEM]
    unknown = [item.name for item in result.findings if item.verdict is Verdict.UNKNOWN and item.relied_on]
    if problems:
        lines.append(
            f"  problem      verdicts of the harness cannot be trusted here, or it will fail: {'; '.join(problems)}"
        )
    if unknown:
        lines.append(f"  unknown      verdicts rest on what could not be measured: {'; '.join(unknown)}")
    return lines


def print_result(stream: IO[str], result: DoctorResult) -> None:
    """Print :func:`result_lines`, the verdict coloured where ``stream`` is a terminal."""
    console = TextConsole(stream)
    console.say()
    first, *rest = result_lines(result)
    console.say(first, _OVERALL[result.verdict])
    for line in rest:
        console.say(line)


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        visible(text),
        COLUMNS,
        initial_indent=head,
        subsequent_indent=" " * _TEXT,
        break_long_words=False,
        break_on_hyphens=False,
    )
