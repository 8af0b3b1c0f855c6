"""What a person reads of a training run: its progress, and both loss curves. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from harness.report.console import BOUND_LINE, TextConsole, duration, failure_lines
from harness.train.campaign import StepRecord, TrainResult

PLOT_COLUMNS = 60
PLOT_ROWS = 12
PLAIN_LINES = 20

_STYLES = {"holds": "bold green", "violated": "bold red", "unknown": "bold yellow"}


class TrainProgress:
    """Shows steps while they happen: a bar on a terminal, elsewhere about ``PLAIN_LINES`` lines; a context manager."""

    def __init__(self, stream: IO[str], num_steps: int) -> None:
        self._console = TextConsole(stream)
        self._num_steps = num_steps
        self._bar: Progress | None = None
        if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            columns = (TextColumn("train"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(
                *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._bar.add_task("starting ranks", total=num_steps)

    def __enter__(self) -> Self:
        """Start the bar, if there is one."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar and give the terminal back as it was."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, record: StepRecord) -> None:
        """One more step is finished."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step + 1, description=record_line(record))
            return
        every = max(1, self._num_steps // PLAIN_LINES)
        if record.step % every == 0 or record.step + 1 == self._num_steps or record.divergence is not None:
            self._console.say(record_line(record))


def record_line(record: StepRecord) -> str:
    """One step in a line."""
    kept = "parts" if record.spilled is None else "spilled" if record.spilled else "held"
    path = f"{kept:<7} {record.num_parts}"
    losses = f"loss {record.sharded_loss:.6f} / {record.unsharded_loss:.6f}"
    norm = f"norm {record.norm:.4f} {'in bound' if record.norm_ok else 'UNPROVEN'}"
    clipped = f"clipped {record.coefficient:.3f}" if record.coefficient != 1.0 else "unclipped    "
    found = record.divergence
    bits = "within the bound" if record.within_bound else "equal bits"
    if found is not None:
        bits = f"DIFFERS: {found.property.value} at {found.stage.value}"
    return f"step {record.step:>4}  {path}  {losses}  {norm}  {clipped}  {bits}"


def loss_curves(records: Sequence[StepRecord]) -> list[str]:
    """Both loss curves over the steps, plotted in characters; empty when fewer than two steps have finite losses."""
    finite = [record for record in records if math.isfinite(record.sharded_loss + record.unsharded_loss)]
    if len(finite) < 2:
        return []
    columns = min(PLOT_COLUMNS, len(finite))
    shown = [finite[column * (len(finite) - 1) // max(columns - 1, 1)] for column in range(columns)]
    curves = {"s": [record.sharded_loss for record in shown], "u": [record.unsharded_loss for record in shown]}
    low = min(map(min, curves.values()))
    high = max(map(max, curves.values()))
    grid = [[" "] * columns for _ in range(PLOT_ROWS)]
    for mark, losses in curves.items():
        for column, loss in enumerate(losses):
            row = round((high - loss) / (high - low or 1.0) * (PLOT_ROWS - 1))
            grid[row][column] = mark if grid[row][column] == " " else "*"
    labels = {0: f"{high:.3f}", PLOT_ROWS - 1: f"{low:.3f}"}
    lines = ["  loss, nats a byte (* both trainers, s sharded, u unsharded)"]
    lines += [f"  {labels.get(row, ''):>7} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    lines.append(f"  {'':>7} +{'-' * columns} steps {finite[0].step} to {finite[-1].step}")
    return lines


def result_lines(result: TrainResult) -> list[tuple[str, str]]:
    """The result as ``(line, style)`` pairs: curves, verdict, what was checked, a failure and its replay command."""
    lines = [(line, "") for line in loss_curves(result.records)]
    verdict = f"{result.verdict}, interrupted" if result.interrupted else result.verdict
    equal = sum(record.equal_bits for record in result.records)
    bound = sum(record.within_bound for record in result.records)
    within = f", {bound} within the rounding bound" if bound else ""
    headline = (
        f"{verdict}: {result.subject} on {result.backend}, world {result.worlds[0]}, trained on {result.text}, "
        f"equal bits at {equal} of {result.steps} steps{within} in {duration(result.seconds)}, seed {result.seed}"
    )
    lines.append((headline, _STYLES[result.verdict]))
    if result.reason is not None:
        lines.append((f"  reason       {result.reason}", ""))
    if result.records:
        for name in ("sharded", "unsharded"):
            losses = [getattr(record, f"{name}_loss") for record in (result.records[0], result.records[-1])]
            lines.append((f"  {name:<12} loss {losses[0]:.6f} to {losses[1]:.6f}", ""))
    if result.muon:
        lines.append((f"  Muon         {', '.join(result.muon)}; AdamW: all other parameters", ""))
    for label, counts in (("checked", result.properties), ("oracles", result.oracle), ("reached", result.reached)):
        counted = ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "nothing"
        lines.append((f"  {label:<12} {counted}", ""))
    if bound:
        lines.append((BOUND_LINE, ""))
    if result.failure is not None:
        lines.append(("", ""))
        lines.extend((line, "") for line in failure_lines(result.failure))
    return lines


def print_result(stream: IO[str], result: TrainResult) -> None:
    """Print :func:`result_lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in result_lines(result):
        console.say(line, style)
