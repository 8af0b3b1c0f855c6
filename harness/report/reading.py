"""A RESULT that somebody names, an event log or what ``--json`` wrote: what every rendering starts from. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from harness.errors import UsageError, one_line
from harness.museum.score import ControlOutcome, MuseumResult, PlantOutcome, summarise
from harness.report import events
from harness.report.result import SCHEMA, Examples, Failure, FoundAfter, Result, WorldExamples

VERBS: Final = "verify, replay, fuzz or museum"

_MUSEUM_FIELDS = {"plants", "controls", "summary"}
_RESULT_FIELDS = {"examples", "oracle", "properties", "reached"}

result_of_json = msgspec.json.Decoder(Result).decode
museum_of_json = msgspec.json.Decoder(MuseumResult).decode


@dataclass(frozen=True)
class Told:
    """One RESULT.

    Attributes:
        name: of its file, as it was given.
        result: of a log that was cut off put together from what is there.
        notes: lines for people that the run printed.
        cut: what is missing at the end of the log; None: nothing.
        seen: the violation as it was first seen, before it was made smaller, where a log has it.
        slowest: the scenarios that took longest, where a log has them.
        partial: the result is not the run's own: what was checked, and which situations came up, is not known.
    """

    name: str
    verb: events.LogVerb
    result: Result | MuseumResult
    notes: tuple[str, ...] = ()
    cut: str | None = None
    seen: Failure | None = None
    slowest: tuple[events.Judged, ...] = ()
    partial: bool = False


def read(path: Path) -> Told:
    """What a file tells.

    Raises:
        UsageError: it cannot be read, is neither a log nor a result that can be rendered, or is damaged.
    """
    data, name = events.load(path), str(path)
    if events.is_log(data):
        return _of_log(events.read(data, name), name)
    return _of_json(data, name)


def _of_json(data: bytes, name: str) -> Told:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{name}: neither an event log nor JSON: {error}") from None
    fields = set(found) if isinstance(found, dict) else set()
    if not (fields >= _MUSEUM_FIELDS or fields >= _RESULT_FIELDS):
        raise UsageError(f"{name}: not a result that can be rendered: expected --events or --json of {VERBS}")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"{name}: a result of schema {found.get('schema')!r}; this version is able to read {SCHEMA}")
    try:
        if fields >= _MUSEUM_FIELDS:
            return Told(name, "museum", museum_of_json(data))
        result = result_of_json(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{name}: not a result of this version: {error}") from None
    return Told(name, result.verb, result)


def _of_log(log: events.Log, name: str) -> Told:
    begun = log.begun
    concluded = next((each for each in log.events if isinstance(each, events.Concluded)), None)
    violations = [each.failure for each in log.events if isinstance(each, events.Violation)]
    judged = sorted((each for each in log.events if isinstance(each, events.Judged)), key=lambda each: -each.seconds)
    result: Result | MuseumResult | None = None
    if concluded is not None:
        result = concluded.museum if begun.verb == "museum" else concluded.result
        if result is None:
            raise UsageError(f"{name}: the result is not one of {begun.verb}, which the log begins with")
    if result is None:
        result = _museum_so_far(log) if begun.verb == "museum" else _so_far(log, violations)
    return Told(
        name=name,
        verb=begun.verb,
        result=result,
        notes=tuple(each.text for each in log.events if isinstance(each, events.Note)),
        cut=log.cut,
        seen=violations[0] if violations else None,
        slowest=tuple(judged[:5]),
        partial=concluded is None,
    )


def _why_no_result(log: events.Log) -> str:
    last = log.events[-1]
    if isinstance(last, events.Ended):
        return f"the run ended with exit code {last.exit_code} and no result: {last.reason or 'no reason was given'}"
    return log.cut or "the log has no result"


def _so_far(log: events.Log, violations: list[Failure]) -> Result:
    """What a log without a result shows: scenarios, and the violation if one was seen."""
    begun, ran = log.begun, [each for each in log.events if isinstance(each, events.Judged)]
    rounds = [each for each in log.events if isinstance(each, events.Round)]
    failure = violations[-1] if violations else None
    found = [each for each in log.events if isinstance(each, events.Finding)]
    if failure is None and found:
        last = found[-1]
        failure = Failure(
            property=last.property, stage=last.stage, symptom=last.symptom, scenario=last.scenario, case=last.case
        )
    counts, spent = Counter(each.world for each in ran), Counter[int]()
    for each in ran:
        spent[each.world] += each.seconds  # type: ignore[assignment]  # a Counter adds floats too
    seconds = log.events[-1].at
    num_run = len(ran) + sum(each.examples for each in rounds)
    options = begun.options
    return Result(
        verdict="unknown" if failure is None else "violated",
        subject=begun.subject or "",
        backend=begun.backend,
        worlds=begun.worlds,
        seed=begun.seed,
        examples=Examples(
            run=num_run,
            per_world={
                world: WorldExamples(counts[world], counts[world] / max(spent[world], 1e-9)) for world in counts
            },
        ),
        seconds=seconds,
        examples_per_second=num_run / max(seconds, 1e-9),
        versions=begun.versions,
        failure=failure,
        reason=one_line(_why_no_result(log)),
        order=_text(options, "order") if begun.backend == "sim" else None,
        schedule=_text(options, "schedule") if begun.backend == "sim" else None,
        device=begun.device or "cpu",
        verb=begun.verb if begun.verb != "museum" else "verify",
    )


def _museum_so_far(log: events.Log) -> MuseumResult:
    """What a log without a result shows: what came of exhibits, unjudged."""
    begun, exhibits = log.begun, [each for each in log.events if isinstance(each, events.Exhibit)]
    plants = tuple(
        PlantOutcome(
            id=each.id,
            kind="of a log that was cut off",
            bugs=(),
            properties=(),
            stages=(),
            symptoms=(),
            seed=begun.seed,
            caught=each.outcome == "caught",
            undecided=each.outcome == "undecided",
            found_after=None
            if each.found_after is None
            else FoundAfter(seconds=each.found_after, examples=each.examples),
            examples=each.examples,
            seconds=each.seconds,
            reason=each.reason,
        )
        for each in exhibits
        if each.kind == "plant"
    )
    controls = tuple(
        ControlOutcome(
            id=each.id,
            seed=begun.seed,
            verdict="violated" if each.outcome == "violated" else "holds" if each.outcome == "holds" else "unknown",
            examples=each.examples,
            seconds=each.seconds,
            reason=each.reason,
        )
        for each in exhibits
        if each.kind == "control"
    )
    options = begun.options
    return MuseumResult(
        verdict="unknown",
        backend=begun.backend,
        worlds=begun.worlds,
        seed=begun.seed,
        workers=int(_number(options, "workers")),
        seconds_per_plant=_number(options, "seconds_per_plant"),
        examples_per_control=int(_number(options, "control_examples")),
        seconds=log.events[-1].at,
        summary=summarise(plants, controls, 0),
        plants=plants,
        controls=controls,
        not_run=max(0, int(_number(options, "exhibits")) - len(exhibits)),
        versions=begun.versions,
        reason=one_line(_why_no_result(log)),
    )


def _number(options: Mapping[str, object], name: str) -> float:
    """One of a log's options, which may be of any type in a file that comes from elsewhere; 0 where it is no number."""
    value = options.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


def _text(options: Mapping[str, object], name: str) -> str | None:
    value = options.get(name)
    return value if isinstance(value, str) else None
