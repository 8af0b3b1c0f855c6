"""What a person reads of a bench. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from harness.bench.campaign import PARTS, BenchResult, SizeCost, WorldCost
from harness.report.console import TextConsole, duration

_STYLES = {"holds": "bold", "violated": "bold red", "unknown": "bold yellow"}
_MEANINGS = {
    "subject": "the subject's calls, and their waiting for ranks that still compare",
    "gradients": "drawing this rank's gradients and weights",
    "reference": "the unsharded trainer and all ranks' contributions",
    "compare": "comparisons and digests",
    "notes": "all else in a rank",
    "draw": "waiting for the next scenario",
    "send": "round trip of an empty task",
    "judge": "verdicts of all ranks put together",
    "rest": "the difference",
}


def result_lines(result: BenchResult) -> list[tuple[str, str]]:
    """The result as ``(line, style)`` pairs: costs of each world with their parts, the tables, what went wrong."""
    lines: list[tuple[str, str]] = []
    for world, cost in result.per_world.items():
        lines += [(line, "") for line in _world_lines(world, cost)]
    for title, costs in (("elements", result.by_elements), ("buckets", result.by_buckets)):
        if costs:
            lines += [(line, "") for line in _table_lines(f"cost against {title}, world {result.table_world}", costs)]
    verdict = {"holds": "measured"}.get(result.verdict, result.verdict)
    headline = f"{verdict}{', interrupted' if result.interrupted else ''}: {result.subject} on {result.backend}, "
    shown = ", ".join(f"world {world} {cost.ratio:.2f}" for world, cost in result.per_world.items()) or "no ratio"
    headline += f"{shown} times bare (aim {result.aim:g}) in {duration(result.seconds)}, seed {result.seed}"
    lines.append((headline, _STYLES[result.verdict]))
    for name, text in (("violation", result.violation), ("reason", result.reason)):
        if text is not None:
            lines.append((f"  {name:<12} {text}", ""))
    return lines


def print_result(stream: IO[str], result: BenchResult) -> None:
    """Print :func:`result_lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in result_lines(result):
        console.say(line, style)


def _world_lines(world: int, cost: WorldCost) -> list[str]:
    declined = f", {cost.discarded} outside the subject's space" if cost.discarded else ""
    lines = [
        f"world {world}: {cost.ratio:.2f} times bare (rounds from {cost.lowest:.2f} to {cost.highest:.2f}), "
        f"{cost.scenarios} scenarios{declined}",
        f"  {'bare':<12}{cost.bare * 1e3:8.2f} ms  1.00",
        f"  {'full':<12}{cost.full * 1e3:8.2f} ms  {cost.ratio:.2f}, of which",
    ]
    for name in PARTS:
        seconds = cost.parts[name]
        meaning = _MEANINGS[name]
        if name == "draw":
            meaning += f" ({cost.drawing * 1e3:.1f} ms of drawing beside the ranks)"
        lines.append(f"    {name:<10}{seconds * 1e3:8.2f} ms  {seconds / cost.bare:.2f}  {meaning}")
    return [*lines, ""]


def _table_lines(title: str, costs: Sequence[SizeCost]) -> list[str]:
    lines = [title, f"  {'elements':>9}  {'buckets':>7}  {'bare':>10}  {'full':>10}  ratio"]
    lines += [
        f"  {cost.numel:>9,}  {cost.buckets:>7}  {cost.bare * 1e3:>7.2f} ms  {cost.full * 1e3:>7.2f} ms"
        f"  {cost.ratio:5.2f}"
        for cost in costs
    ]
    return [*lines, ""]
