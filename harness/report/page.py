"""One self-contained HTML page: no script, nothing from elsewhere, light and dark, for a phone as for a screen.

Whatever comes from a file is escaped by the template engine, and what does not print (control characters, marks that
turn the direction of text) is spelled out first. jinja2 is imported when a page is made: it is the extra ``report``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from harness.errors import UsageError
from harness.museum.judging import Naming
from harness.museum.score import MuseumResult, PlantOutcome
from harness.museum.show import done_line, problems
from harness.report import pictures, words
from harness.report.console import count, duration, failure_lines, visible
from harness.report.evidence import Evidence
from harness.report.reading import Told
from harness.report.result import Failure, Result
from harness.scenario.systems import PROPERTIES
from harness.verdict import Oracle

if TYPE_CHECKING:
    from jinja2 import Environment

PIP: Final = "pip install 'zero2-harness[report]'"
TEMPLATES: Final = Path(__file__).parent / "templates"

GLYPHS: Final = {"violated": "✗", "unknown": "?", "holds": "✓"}
ORACLES: Final = {
    Oracle.EXACT: "bit for bit, on data whose sums are exact in any order",
    Oracle.ORDERED: "bit for bit, adding in the backend's own order",
    Oracle.BOUND: "within the proven bound of rounding, not bit for bit",
    Oracle.LOOSE: "within a bound that is too wide to say much",
}


def render(reports: Sequence[Told]) -> str:
    """The page of one or more results, those that failed first.

    Raises:
        UsageError: jinja2 is not installed.
    """
    template = environment().get_template("report.html.j2")
    ordered = words.failing_first(reports)
    return template.render(reports=[_context(told, f"r{number}") for number, told in enumerate(ordered)])


@functools.cache
def environment() -> Environment:
    """The template engine, with everything escaped.

    Raises:
        UsageError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise UsageError(f"--html: jinja2 is not installed: {PIP}") from None

    def printable(value: object) -> object:
        return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=printable,
    )
    engine.filters.update(
        cut=words.cut, count=count, duration=duration, summary=words.summary_of, percent=lambda share: f"{share:.3f}%"
    )
    engine.globals.update(glyphs=GLYPHS, states=pictures.GLYPHS, meanings=pictures.MEANINGS)
    return engine


def _context(told: Told, anchor: str) -> dict[str, Any]:
    result = told.result
    shared = {
        "id": anchor,
        "told": told,
        "verdict": result.verdict,
        "subject": words.subject_of(told),
        "ran": words.ran(told),
        "where": words.where(told),
        "sentence": words.sentence(told),
        "versions": result.versions,
    }
    if isinstance(result, MuseumResult):
        return {**shared, "museum": _museum(result), "failure": None, "campaign": None}
    failure = None if result.failure is None else _failure(result.failure)
    seen = told.seen if told.seen is not None and told.seen.scenario != _scenario_of(result) else None
    more = result.fuzz.findings[1:] if result.fuzz is not None else ()
    return {
        **shared,
        "museum": None,
        "failure": failure,
        "seen": None if seen is None or seen.evidence is None else {**_failure(seen), "told": seen},
        "more": [{"told": each, "lines": "\n".join(failure_lines(each)[1:])} for each in more],
        "campaign": _campaign(told, result),
    }


def _scenario_of(result: Result) -> str | None:
    return None if result.failure is None else result.failure.scenario


# --- a failure --------------------------------------------------------------------------------------------------------


def _failure(failure: Failure) -> dict[str, Any]:
    evidence = failure.evidence
    rows: list[tuple[str, object]] = [
        ("step", failure.step),
        ("stage", failure.stage),
        ("rank", failure.rank),
        ("parameter", None if failure.parameter is None else words.cut(failure.parameter, 200)),
        ("element", failure.element),
        ("bucket", failure.bucket),
        ("owner", None if failure.owner is None else f"rank {failure.owner}"),
        ("mismatches", None if failure.mismatches is None else count(failure.mismatches, "element")),
        ("pattern", failure.pattern),
        ("inputs", failure.inputs),
        ("symptom", failure.symptom),
        ("could be", None if not failure.symptoms_possible else ", ".join(failure.symptoms_possible)),
        ("scenario", failure.scenario),
        ("case", failure.case),
    ]
    return {
        "told": failure,
        "rows": [(label, words.cut(str(value), 2000)) for label, value in rows if value is not None],
        "bits": pictures.bit_pairs(failure.expected_bits, failure.actual_bits),
        "message": failure.message,
        **_pictures(evidence),
    }


def _pictures(evidence: Evidence | None) -> dict[str, Any]:
    if evidence is None:
        return {"map": None, "no_map": "nothing was kept of this failure", "ulps": [], "stages": None}
    found, timeline = evidence.map, evidence.timeline
    rows = [] if found is None else pictures.bucket_rows(found, evidence.world)
    return {
        "map": found,
        "no_map": evidence.no_map,
        "world": evidence.world,
        "buckets": rows,
        "not_drawn": 0 if found is None else len(found.buckets) + found.buckets_left_out - len(rows),
        "ulps": [] if found is None else pictures.ulp_bars(found.ulps),
        "timeline": timeline,
        "stages": None if timeline is None else pictures.stage_rows(timeline),
        "timeline_words": pictures.timeline_words(evidence),
    }


# --- a campaign -------------------------------------------------------------------------------------------------------


def _campaign(told: Told, result: Result) -> dict[str, Any]:
    names = [item.value for item in PROPERTIES[result.system]]
    return {
        "result": result,
        "properties": [
            (name, result.properties.get(name, 0), words.summary_of(name))
            for name in sorted(set(names) | {name for name, number in result.properties.items() if number})
        ],
        "oracles": [(rule.value, result.oracle.get(rule.value, 0), text) for rule, text in ORACLES.items()],
        "situations": pictures.situation_bars(result.reached, result.missing),
        "reached": sum(1 for number in result.reached.values() if number),
        "stopped": result.failure is not None,
        "replay": told.verb == "replay",
        "partial": told.partial,
    }


# --- the museum -------------------------------------------------------------------------------------------------------


def _museum(result: MuseumResult) -> dict[str, Any]:
    wrong = [plant for plant in result.plants if not plant.caught or _misjudged(plant)]
    return {
        "result": result,
        "summary": result.summary,
        "wings": pictures.wings(result),
        "catches": pictures.catch_bars(result),
        "wrong": [(plant, done_line(plant), problems(plant)) for plant in wrong],
        "alarms": [(control, done_line(control)) for control in result.controls if control.verdict != "holds"],
        "plants": result.plants,
        "controls": result.controls,
    }


def _misjudged(plant: PlantOutcome) -> bool:
    judgement = plant.judgement
    return judgement is not None and not (
        judgement.location and judgement.naming is not Naming.WRONG and judgement.place is not False
    )
