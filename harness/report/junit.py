"""JUnit's XML (the xunit1 form), for machines that show tests: a suite for each result, a test for each thing checked.

What failed carries the message, the replay command and all that the console shows. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.etree import ElementTree as Tree

from harness.museum import show
from harness.museum.judging import Naming
from harness.museum.score import ControlOutcome, MuseumResult, Outcome, PlantOutcome
from harness.report import words
from harness.report.console import failure_lines, visible
from harness.report.reading import Told
from harness.report.result import Failure, Result
from harness.scenario.systems import PROPERTIES

_TEXT_CHARS: Final = 100_000
_KINDS: Final = ("failure", "error", "skipped")


def render(reports: Sequence[Told]) -> str:
    """One document of one or more results, those that failed first."""
    root = Tree.Element("testsuites", name="zero2-harness")
    for told in words.failing_first(reports):
        suite = _suite(told)
        counts = {kind: sum(1 for test in suite if test.find(kind) is not None) for kind in _KINDS}
        suite.set("tests", str(len(suite.findall("testcase"))))
        suite.set("failures", str(counts["failure"]))
        suite.set("errors", str(counts["error"]))
        suite.set("skipped", str(counts["skipped"]))
        root.append(suite)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    Tree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"


def _suite(told: Told) -> Tree.Element:
    result = told.result
    name = f"zero2-harness {told.verb} {words.subject_of(told)}"
    suite = Tree.Element("testsuite", name=_clean(name), time=f"{max(result.seconds, 0.0):.3f}")
    facts = {
        "result": told.name,
        "verdict": result.verdict,
        "backend": result.backend,
        "worlds": ",".join(map(str, result.worlds)),
        "seed": str(result.seed),
        **{f"version {package}": version for package, version in sorted(result.versions.items())},
    }
    properties = Tree.SubElement(suite, "properties")
    for key, value in facts.items():
        Tree.SubElement(properties, "property", name=_clean(key), value=_clean(value))
    if isinstance(result, MuseumResult):
        _museum(suite, told, result)
    else:
        _campaign(suite, told, result)
    return suite


def _test(suite: Tree.Element, told: Told, name: str, seconds: float = 0.0) -> Tree.Element:
    classname = f"zero2-harness.{told.verb}.{words.subject_of(told).replace('.', '_')}"
    return Tree.SubElement(
        suite,
        "testcase",
        classname=_clean(classname),
        name=_clean(words.cut(name, 200)),
        time=f"{max(seconds, 0.0):.3f}",
    )


def _say(test: Tree.Element, kind: str, message: str, what: str = "", text: str = "") -> None:
    said = Tree.SubElement(test, kind, message=_clean(words.cut(message, 2000)))
    if what:
        said.set("type", _clean(what))
    if text:
        said.text = _clean(text[:_TEXT_CHARS])


def _campaign(suite: Tree.Element, told: Told, result: Result) -> None:
    failures = [result.failure] if result.failure is not None else []
    if result.fuzz is not None and result.fuzz.findings:
        failures = list(result.fuzz.findings)
    broken = {failure.property for failure in failures}
    for name in [item.value for item in PROPERTIES[result.system]]:
        checks = result.properties.get(name, 0)
        if name in broken or told.partial:  # of a log that was cut off it is not known what was checked
            continue
        test = _test(suite, told, name)
        if not checks:
            _say(test, "skipped", "not checked before the failure" if failures else "not checked")
    for number, failure in enumerate(failures):
        more = f" ({number})" if any(other.property == failure.property for other in failures[:number]) else ""
        _say_failure(_test(suite, told, f"{failure.property}{more}"), failure)
    if result.verdict == "unknown" or result.interrupted:
        _say(_test(suite, told, "verdict"), "error", words.sentence(told), "unknown")


def _say_failure(test: Tree.Element, failure: Failure) -> None:
    message = words.violated(failure)
    if failure.message:
        message += f": {failure.message}"
    if failure.replay:
        message += f" (replay: {failure.replay})"
    _say(test, "failure", message, failure.property, "\n".join(failure_lines(failure)))


def _museum(suite: Tree.Element, told: Told, result: MuseumResult) -> None:
    outcomes: list[Outcome] = [*result.plants, *result.controls]
    for outcome in outcomes:
        test = _test(suite, told, outcome.id, outcome.seconds)
        text = "" if outcome.failure is None else "\n".join(failure_lines(outcome.failure))
        line = show.done_line(outcome)
        if isinstance(outcome, ControlOutcome):
            if outcome.verdict != "holds":
                _say(test, "failure" if outcome.verdict == "violated" else "error", line, outcome.verdict, text)
        elif _must_be_told(outcome):
            problems = "; ".join(show.problems(outcome))
            _say(test, "error" if outcome.undecided else "failure", f"{line}: {problems}", "plant", text)
    if result.verdict != "holds":
        test = _test(suite, told, "score")
        _say(test, "failure" if result.verdict == "violated" else "error", words.sentence(told), result.verdict)


def _must_be_told(plant: PlantOutcome) -> bool:
    """What counts against the score by itself: rank and parameter are told, and no part of it."""
    judgement = plant.judgement
    return not plant.caught or judgement is None or not judgement.location or judgement.naming is Naming.WRONG


def _clean(text: str) -> str:
    """What XML can hold: control characters, lone surrogates and marks of direction are spelled out."""
    return visible(text)
