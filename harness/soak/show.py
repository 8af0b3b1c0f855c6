"""What a person reads of a soak. No torch."""

from __future__ import annotations

from typing import IO

from harness.report.console import TextConsole, duration
from harness.soak.campaign import SoakResult

_STYLES = {"holds": "bold green", "violated": "bold red", "unknown": "bold yellow"}


def result_lines(result: SoakResult) -> list[tuple[str, str]]:
    """The result as ``(line, style)`` pairs: verdicts by kind of fault, growth, and what went wrong last."""
    lines: list[tuple[str, str]] = []
    if result.kinds:
        lines.append((f"{'fault':<11} {'number':>7} {'right':>7} {'wrong':>7} {'median':>9} {'longest':>9}", ""))
        for kind, outcome in result.kinds.items():
            times = f"{outcome.median_s:>7.2f} s {outcome.longest_s:>7.2f} s"
            counts = f"{outcome.count:>7,} {outcome.right:>7,} {outcome.wrong:>7,}"
            lines.append((f"{kind:<11} {counts} {times}", "red" if outcome.wrong else ""))
        lines.append(("", ""))
    if result.growth:
        title = f"this process, from after {result.warm_up} scenarios to the end"
        lines.append((f"{title}\n{'':<11} {'before':>11} {'after':>11} {'limit':>11}", ""))
        for name, grown in result.growth.items():
            shown = [_amount(name, value) for value in (grown.before, grown.after, grown.limit)]
            lines.append((f"{name:<11} " + " ".join(f"{text:>11}" for text in shown), "red" if grown.excessive else ""))
        lines.append(("", ""))
    verdict = "interrupted" if result.interrupted else {"holds": "all right"}.get(result.verdict, result.verdict)
    discarded = f", {result.discarded} outside the subject's space" if result.discarded else ""
    headline = f"{verdict}: {result.subject} on {result.backend}, world {','.join(map(str, result.worlds))}, "
    headline += f"{result.run:,} scenarios{discarded} in {duration(result.seconds)}, seed {result.seed}"
    lines.append((headline, _STYLES[result.verdict]))
    if result.reason is not None and not result.interrupted:
        lines.append((f"  reason       {result.reason}", ""))
    if result.wrong is not None:
        for name in ("scenario", "problem", "case", "replay"):
            value = getattr(result.wrong, name)
            if value is not None:
                lines.append((f"  {name:<12} {value}", ""))
    return lines


def print_result(stream: IO[str], result: SoakResult) -> None:
    """Print :func:`result_lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in result_lines(result):
        console.say(line, style)


def _amount(name: str, value: int) -> str:
    return f"{value / 2**20:,.1f} MiB" if name == "rss" else f"{value:,}"
