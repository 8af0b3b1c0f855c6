"""What a person sees of a fuzz campaign while it runs: a live table on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.fuzz.campaign import View
from harness.report.console import LINE_INTERVAL_S, TextConsole, count, duration, live_display, visible

MISSING_SHOWN = 6


class FuzzProgress:
    """An ``Observer`` of :mod:`harness.fuzz.campaign` and a context manager."""

    def __init__(self, stream: IO[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = TextConsole(stream)
        self._clock = clock
        self._last_line: float | None = None
        self._live = live_display(self._console, Text("starting workers"))

    def __enter__(self) -> Self:
        """Start the live table, if there is one."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it and give the terminal back as it was."""
        if self._live is not None:
            self._live.stop()

    def began(self, directory: Path, seed: int, workers: int, resumed: int) -> None:
        """It begins, with so many rounds that earlier runs did."""
        after = f", going on after {count(resumed, 'round')} of before" if resumed else ""
        self._console.say(f"seed {seed}")
        self._console.say(f"{count(workers, 'worker')}, in {directory}{after}")

    def view(self, view: View) -> None:
        """How far it is."""
        if self._live is not None:
            self._live.update(Group(table(view), *(Text(visible(line), no_wrap=True) for line in lines(view))))
            return
        now = self._clock()
        if self._last_line is None or now - self._last_line >= LINE_INTERVAL_S:
            self._last_line = now
            self._console.say(line_of(view))

    def note(self, text: str) -> None:
        """A line worth reading now, above the table."""
        self._console.say(text)


def table(view: View) -> Table:
    """A row for each worker."""
    rows = Table(box=None, pad_edge=False)
    for title in ("worker", "round", "examples", "rate", "now"):
        rows.add_column(title, no_wrap=True, overflow="ellipsis", justify="right" if title == "rate" else "left")
    for worker in view.workers:
        rate = f"{worker.rate:.1f}/s" if worker.examples else ""
        cells = (str(worker.number), worker.round, str(worker.examples), rate, worker.doing)
        rows.add_row(*(Text(visible(cell)) for cell in cells))
    return rows


def lines(view: View) -> list[str]:
    """What holds for all workers together, in a few lines."""
    left = "" if view.left_s is None else f", {duration(view.left_s)} left"
    shown = [f"{view.rounds:,} rounds, {view.examples:,} examples, {view.rate:.1f}/s{left}, {_findings(view)}"]
    if view.num_required:
        shown.append(f"reached {_reached(view)}")
    if view.slowest is not None:
        shown.append(f"slowest {view.slowest.seconds:.2f} s: {view.slowest.scenario}")
    if view.margin is not None:
        shown.append(f"worst rounding margin {view.margin:.3g} of its bound")
    return shown


def line_of(view: View) -> str:
    """The same in one line."""
    words = [f"{view.examples:,} examples, {view.rate:.1f}/s"]
    if not view.num_required:
        words = ["the workers start and import the subject"]
    if view.left_s is not None:
        words.append(f"{duration(view.left_s)} left")
    if view.num_required:
        words.append(f"reached {_reached(view)}")
    words.append(_findings(view))
    if view.margin is not None:
        words.append(f"margin {view.margin:.3g}")
    return ", ".join(words)


def _reached(view: View) -> str:
    missing = list(view.missing[:MISSING_SHOWN])
    more = len(view.missing) - len(missing)
    names = ", ".join([*missing, *([f"{more} more"] if more else [])])
    return f"{view.num_reached} of {view.num_required}{f' (missing: {names})' if names else ''}"


def _findings(view: View) -> str:
    return count(view.findings, "finding")
