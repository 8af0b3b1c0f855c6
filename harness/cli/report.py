"""`report`: a saved result, as text, a page, a job summary, or a file for machines that show tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness import inputs
from harness.cli.running import complain
from harness.errors import UsageError
from harness.report import result as results
from harness.report.console import TextConsole

if TYPE_CHECKING:
    from harness.report.reading import Told

REPORT_EXAMPLES = """\b
Examples:
  zero2-harness verify --events run.jsonl; zero2-harness report run.jsonl --html run.html
  zero2-harness report result.json
  zero2-harness report --markdown - --junit build/results.xml build/events/*.jsonl
"""

REPORT_EXIT_CODES = """\b
Exit codes:
  0    rendered, whatever the verdict is
  2    bad usage or bad input: a file that cannot be read, is damaged or is no result; one line says which
  3    a file could not be written after all
"""


@click.command(
    short_help="Render a saved result: text, HTML, Markdown, JUnit.",
    epilog=REPORT_EXAMPLES + "\n" + REPORT_EXIT_CODES,
)
@click.argument("files", metavar="RESULT...", nargs=-1, required=True)
@click.option("--html", metavar="FILE", help="Write one page, with pictures, that needs nothing else to be read.")
@click.option(
    "--markdown",
    metavar="FILE|-",
    help="Write a job summary (GitHub: $GITHUB_STEP_SUMMARY); with - to standard output.",
)
@click.option("--junit", metavar="FILE", help="Write a JUnit file (xunit1): a test for each property, plant, control.")
def report(*, files: tuple[str, ...], html: str | None, markdown: str | None, junit: str | None) -> int:
    """Render what a run left: the log of --events, or the result of --json, of verify, replay, fuzz or museum.

    Several RESULTs go into one document, those that failed first. Without an option each is printed as its verb did.
    """
    from harness.report.reading import read

    wanted = (("--html", html), ("--markdown", markdown), ("--junit", junit))
    inputs.check_apart(wanted, [("a RESULT", file) for file in files])
    outputs = [(option, _output(option, given)) for option, given in wanted if given is not None]
    reports = [read(Path(file)) for file in files]
    for told in reports:
        if told.cut is not None:
            TextConsole(sys.stderr).say(f"{told.name}: {told.cut}")
    rendered = [(option, output, _render(option, reports)) for option, output in outputs]
    for option, output, text in rendered:
        try:
            output.write(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            return complain(f"error: {option} {output.given}: cannot write it: {error.strerror}", results.EXIT_UNKNOWN)
    if not outputs:
        _print(reports)
    return results.EXIT_HOLDS


def _output(option: str, given: str) -> inputs.JsonOutput:
    if given == "-" and option != "--markdown":
        raise UsageError(f"{option} -: expected a file")
    with suppress(OSError, ValueError):  # what is the matter is said below
        Path(given).parent.mkdir(parents=True, exist_ok=True)
    return inputs.JsonOutput(given, option)


def _render(option: str, reports: Sequence[Told]) -> str:
    if option == "--html":
        from harness.report import page

        return page.render(reports)
    if option == "--markdown":
        from harness.report import markdown

        return markdown.render(reports)
    from harness.report import junit

    return junit.render(reports)


def _print(reports: Sequence[Told]) -> None:
    from harness.report import words

    console = TextConsole(sys.stdout)
    for number, told in enumerate(reports):
        if len(reports) > 1:
            console.say(f"{'' if number == 0 else chr(10)}{told.name}:", "bold")
        for line, style in words.printed(told):
            console.say(line, style)
