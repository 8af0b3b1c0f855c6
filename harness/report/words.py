"""What several renderings of a result say alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.museum import show
from harness.museum.score import LEAST_RIGHT_PERCENT, MuseumResult
from harness.report.console import count, duration, result_lines, visible
from harness.report.reading import Told
from harness.report.result import Failure
from harness.verdict import PROPERTY_SUMMARIES, Property

ORDER: Final = {"violated": 0, "unknown": 1, "holds": 2}
"""What needs a reader first."""


_NOT_KNOWN: Final = ("  checked ", "  not checked ", "  oracles ", "  reached ")


def failing_first(reports: Sequence[Told]) -> list[Told]:
    """In the order in which they should be read; else as they were given."""
    return sorted(reports, key=lambda told: ORDER[told.result.verdict])


def cut(text: str, most: int = 300) -> str:
    """In one line, of at most so many characters and as many more as say how many there were."""
    line = visible(text[: most + 1]).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[:most]}… ({len(text):,} characters)"


def subject_of(told: Told) -> str:
    """What was verified."""
    result = told.result
    if isinstance(result, MuseumResult):
        return "planted bugs and right classes"
    return cut(result.subject, 120)


def ran(told: Told) -> str:
    """How much was run, in a few words."""
    result = told.result
    if isinstance(result, MuseumResult):
        exhibits = count(len(result.plants) + len(result.controls), "exhibit")
        return f"{exhibits} in {duration(result.seconds)}"
    return f"{count(result.examples.run, 'example')} in {duration(result.seconds)}"


def where(told: Told) -> str:
    """On what, in which worlds, from which seed."""
    result = told.result
    worlds = ", ".join(map(str, result.worlds))
    return f"{result.backend}, {'world' if len(result.worlds) == 1 else 'worlds'} {worlds}, seed {result.seed}"


def sentence(told: Told) -> str:
    """The verdict in one sentence."""
    result = told.result
    if isinstance(result, MuseumResult):
        score = result.summary
        said = f"{score.caught} of {count(score.plants, 'plant')} caught"
        said += f", {count(score.false_alarms, 'false alarm')} on {count(score.controls, 'control')}"
        if 100 * score.location.right < LEAST_RIGHT_PERCENT * score.location.of:
            least = f"at least {LEAST_RIGHT_PERCENT} % must be"
            said += f"; property and stage right for {score.location.right} of {score.location.of}, {least}"
        if score.wrong_symptom:
            said += f"; {count(score.wrong_symptom, 'wrong symptom')}"
        if result.not_run:
            said += f"; {count(result.not_run, 'exhibit')} not run"
        return f"{said}; {cut(result.reason)}" if result.reason else said
    if result.failure is not None:
        return violated(result.failure)
    if result.reason is not None:
        return cut(result.reason)
    if result.interrupted:
        return "interrupted before anything was decided"
    return "every property that was checked holds"


def printed(told: Told) -> list[tuple[str, str]]:
    """The result as its verb prints it: ``(line, style)`` pairs, without what a log that was cut off does not say."""
    if isinstance(told.result, MuseumResult):
        return show.result_lines(told.result)
    lines = result_lines(told.result, campaign=told.verb != "replay")
    return [line for line in lines if not (told.partial and line[0].startswith(_NOT_KNOWN))]


def violated(failure: Failure) -> str:
    """What is violated, and where first."""
    places = [
        None if failure.step is None else f"step {failure.step}",
        None if failure.stage is None else f"stage {cut(failure.stage, 40)}",
        None if failure.rank is None else f"rank {failure.rank}",
        None if failure.bucket is None else f"bucket {failure.bucket}",
        None if failure.parameter is None else f"parameter {cut(failure.parameter, 80)}",
        None if failure.element is None else f"element {failure.element}",
    ]
    place = ", ".join(each for each in places if each)
    return f"{cut(failure.property, 60)} is violated{f' first at {place}' if place else ''}"


def summary_of(name: str) -> str:
    """What a property says; empty of one that is not known."""
    try:
        return PROPERTY_SUMMARIES[Property(name)]
    except ValueError:
        return ""
