"""What tests and campaigns found, as Markdown for the page of a CI run: ``make summary``.

``python -m ci.summary JUNIT_DIR EVENTS_DIR``: a table of the JUnit files, what failed and why tests were skipped, then
the campaigns as ``harness report`` shows them. Exit codes: 0; 1: a file cannot be read, which the summary says too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from harness.errors import UsageError
from harness.report import markdown
from harness.report.reading import read

MAX_FAILURES = 30
MAX_TEXT = 200
MAX_BYTES = 900_000
"""GitHub shows none of a summary of more than 1 MiB."""


@dataclass
class Tier:
    """One JUnit file."""

    name: str
    seconds: float = 0.0
    passed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def read_tier(path: Path) -> Tier:
    """The numbers of one JUnit file.

    Raises:
        ElementTree.ParseError: it holds something else, or was not written to its end.
        OSError: it cannot be read.
        ValueError, LookupError: a number in it is none, or its encoding is not known.
    """
    tier = Tier(path.stem)
    root = ElementTree.parse(path).getroot()
    tier.seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    for test in root.iter("testcase"):
        name = ".".join(filter(None, (test.get("classname"), test.get("name"))))
        wrong = next((child for child in test if child.tag in ("failure", "error")), None)
        skip = test.find("skipped")
        if wrong is not None:
            tier.failures.append((name, wrong.get("message") or wrong.tag))
        elif skip is not None:
            tier.skipped[skip.get("message") or "no reason given"] += 1
        else:
            tier.passed += 1
    return tier


def code(text: str) -> str:
    """Text as inline code, of one line, short, that neither ends itself nor a cell of a table."""
    line = " ".join(text.split()).replace("`", "'").replace("|", "¦")
    return f"`{line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + '…'}`"


def tests_markdown(tiers: Sequence[Tier]) -> str:
    """The tests: a table, the failures, the reasons of skips."""
    lines = ["## Tests", "", "| tier | passed | failed | skipped | seconds |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {code(tier.name)} | {tier.passed} | {len(tier.failures)} | {tier.skipped.total()} | {tier.seconds:.0f} |"
        for tier in tiers
    ]
    failures = [failure for tier in tiers for failure in tier.failures]
    if failures:
        lines += ["", "### Failed", ""]
        lines += [f"- {code(name)}: {code(message)}" for name, message in failures[:MAX_FAILURES]]
        if len(failures) > MAX_FAILURES:
            lines.append(f"- and {len(failures) - MAX_FAILURES} more")
    skipped: Counter[str] = Counter()
    for tier in tiers:
        skipped.update(tier.skipped)
    if skipped:
        lines += ["", "### Skipped", ""]
        lines += [f"- {number}: {code(reason)}" for reason, number in skipped.most_common()]
    return "\n".join([*lines, ""])


def cut(text: str) -> str:
    """What GitHub shows of a long summary: its beginning, and a line that says so."""
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    return data[:MAX_BYTES].decode(errors="ignore") + "\n\nThe rest is too long for this page: see the artifacts.\n"


def campaigns_markdown(events: Sequence[Path]) -> tuple[str, int]:
    """What `harness report` makes of the event logs that can be read, and 1 where one cannot."""
    readable, parts = [], []
    for path in events:
        try:
            readable.append(read(path))
        except UsageError as error:
            parts.append(f"An event log could not be rendered: {code(str(error))}\n")
    status = 1 if parts else 0
    return "\n".join([*([markdown.render(readable)] if readable else []), *parts]), status


def main(arguments: list[str]) -> int:
    """Print the summary; the exit code."""
    if len(arguments) != 2:
        sys.exit("usage: python -m ci.summary JUNIT_DIR EVENTS_DIR")
    junit, events = (Path(each) for each in arguments)
    parts: list[str] = []
    status = 0
    tiers = []
    for path in sorted(junit.glob("*.xml")):
        try:
            tiers.append(read_tier(path))
        except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:
            parts.append(f"{code(str(path))} cannot be read: {code(str(error))}\n")
            status = 1
    if tiers:
        parts.insert(0, tests_markdown(tiers))
    # An empty one is of a run that was refused, or killed, before it began.
    logs = sorted(path for path in events.glob("*.jsonl") if not path.is_file() or path.stat().st_size)
    if logs:
        text, bad = campaigns_markdown(logs)
        parts.append(text)
        status |= bad
    if not parts:
        parts.append(f"Nothing ran: no tests in {code(str(junit))}, no campaigns in {code(str(events))}.\n")
    print(cut("\n".join(parts)), end="")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
