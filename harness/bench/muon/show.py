"""What a person reads of a bench of Muon. No torch."""

from __future__ import annotations

from typing import IO

from harness.bench.muon.campaign import MuonBenchResult, SystemCost
from harness.report.console import TextConsole, duration

_STYLES = {"holds": "bold", "violated": "bold red", "unknown": "bold yellow"}
_NAMES = {"unsharded": "unsharded", "newton_schulz": "sharded, default rule", "numel": "sharded, original rule"}
_MB = 2**20
_HEAD = (
    f"  {'':<24}{'step':>9}  ratio{'CPU':>10}  ratio{'sent':>10}  ratio{'kept':>10}  ratio{'peak':>10}  ratio"
    "  balance  idle"
)


def result_lines(result: MuonBenchResult) -> list[tuple[str, str]]:
    """The result as ``(line, style)`` pairs: a table for each world, what the columns are, what went wrong."""
    lines: list[tuple[str, str]] = []
    for world, costs in result.per_world.items():
        lines += [(f"world {world}, ratios to unsharded", ""), (_HEAD, "")]
        lines += [(_row(_NAMES[system], cost), "") for system, cost in costs.items()]
        lines.append(("", ""))
    lines += [
        ("step: seconds of the slowest rank; CPU: seconds computed by the busiest (ranks share cores)", ""),
        ("sent, kept, peak: MB of one rank, the largest: written to sockets in a step; in tensors between steps;", ""),
        ("  grown by the process; balance: largest cost of matrices against what no plan can be below", ""),
    ]
    verdict = {"holds": "measured"}.get(result.verdict, result.verdict)
    headline = (
        f"{verdict}{', interrupted' if result.interrupted else ''}: {result.preset} ({result.matrices} matrices of "
    )
    headline += f"{result.elements:,} elements in all) on {result.backend}, {_shown(result)}, "
    headline += f"{result.steps} steps each, in {duration(result.seconds)}, seed {result.seed}"
    lines.append((headline, _STYLES[result.verdict]))
    for name, text in (("violation", result.violation), ("reason", result.reason)):
        if text is not None:
            lines.append((f"  {name:<12} {text}", ""))
    return lines


def print_result(stream: IO[str], result: MuonBenchResult) -> None:
    """Print :func:`result_lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in result_lines(result):
        console.say(line, style)


def _shown(result: MuonBenchResult) -> str:
    """``world 2 0.55, world 4 0.31 of an unsharded step``."""
    ratios = {
        world: costs["newton_schulz"].seconds_ratio
        for world, costs in result.per_world.items()
        if "newton_schulz" in costs
    }
    listed = ", ".join(f"world {world} {ratio:.2f}" for world, ratio in ratios.items())
    return f"{listed} of an unsharded step" if listed else "no ratio"


def _row(name: str, cost: SystemCost) -> str:
    cells = [
        f"{cost.seconds:>7.2f} s  {cost.seconds_ratio:5.2f}",
        f"{cost.cpu_seconds:>8.2f} s  {cost.cpu_ratio:5.2f}",
        f"{_mb(cost.sent)}  {_part(cost.sent_ratio)}",
        f"{_mb(cost.kept)}  {cost.kept_ratio:5.2f}",
        f"{_mb(cost.peak)}  {_part(cost.peak_ratio)}",
        f"  {cost.balance:7.2f}  {cost.idle:4}",
    ]
    return f"  {name:<24}" + "".join(cells)


def _mb(size: float | None) -> str:
    return f"{'-':>10}" if size is None else f"{size / _MB:>10,.1f}"


def _part(ratio: float | None) -> str:
    return f"{'-':>5}" if ratio is None else f"{ratio:5.2f}"
