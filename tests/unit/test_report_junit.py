"""The JUnit file, read back as XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree as Tree

import msgspec

from harness.museum.score import MuseumResult
from harness.report import junit
from harness.report.result import FuzzSummary, Result
from harness.scenario.systems import PROPERTIES
from tests import reports


def suite(*results: Result | MuseumResult) -> Tree.Element:
    """The first suite of the file, the counts of all being right."""
    text = junit.render([reports.told(result) for result in results])
    assert text.startswith("<?xml version")
    root = Tree.fromstring(text.encode())
    assert root.tag == "testsuites"
    assert len(root) == len(results)
    for each in root:
        cases = each.findall("testcase")
        found = [sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")]
        assert [int(each.get(name, "")) for name in ("tests", "failures", "errors", "skipped")] == [len(cases), *found]
        assert all(case.get("classname") and case.get("name") and case.get("time") for case in cases)
        assert all(len(case) <= 1 for case in cases)
    return root[0]


def names(found: Tree.Element, kind: str) -> list[str]:
    return [case.get("name", "") for case in found.findall("testcase") if case.find(kind) is not None]


def test_each_property_that_was_checked_is_a_test() -> None:
    found = suite(reports.HOLDS)
    wanted = [item.value for item in PROPERTIES["zero_master"]]
    assert [case.get("name") for case in found.findall("testcase")] == wanted
    assert not [case for case in found.findall("testcase") if len(case)]
    facts = {each.get("name"): each.get("value") for each in found.iter("property")}
    assert (facts["seed"], facts["backend"], facts["worlds"]) == ("77", "gloo", "1,3")
    assert (facts["verdict"], facts["version torch"]) == ("holds", "2.13.0")


def test_a_violation_is_a_failure_with_its_message_and_its_replay_command() -> None:
    result = msgspec.structs.replace(reports.VIOLATED, properties={"weights": 3, "gradient": 1})
    found = suite(result)
    assert names(found, "failure") == ["gradient"]
    failure = found.find(".//failure")
    assert failure is not None
    assert failure.get("type") == "gradient"
    assert "the reduced gradient differs (replay: python -m harness replay cases/c.json" in failure.get("message", "")
    assert "expected     1.5 (bits 0x3fc00000)" in (failure.text or "")
    assert len(names(found, "skipped")) == len(PROPERTIES["zero_master"]) - 2


def test_of_several_findings_each_is_a_test_of_its_own() -> None:
    other = msgspec.structs.replace(reports.FAILURE, message="another")
    norm = msgspec.structs.replace(reports.FAILURE, property="norm")
    fuzz = FuzzSummary(
        rounds=1, workers=1, resumed=0, ids_digest="", findings=(reports.FAILURE, norm, other), slowest=None,
        required=0, directory="d",
    )  # fmt: skip
    found = suite(msgspec.structs.replace(reports.VIOLATED, fuzz=fuzz, verb="fuzz"))
    assert names(found, "failure") == ["gradient", "norm", "gradient (2)"]


def test_what_is_undecided_is_an_error_and_no_pass() -> None:
    found = suite(reports.UNKNOWN)
    assert names(found, "error") == ["verdict"]
    assert len(names(found, "skipped")) == len(PROPERTIES["zero_master"])


def test_an_interrupted_run_is_no_pass() -> None:
    assert names(suite(msgspec.structs.replace(reports.HOLDS, interrupted=True)), "error") == ["verdict"]


def test_each_exhibit_of_a_museum_is_a_test() -> None:
    undecided = msgspec.structs.replace(reports.MISSED, id="too-short", undecided=True, reason="too few")
    found = suite(reports.museum(reports.CAUGHT, reports.MISSED, undecided, controls=(reports.CONTROL, reports.ALARM)))
    assert names(found, "failure") == ["never-seen", "plain-zero", "score"]
    assert names(found, "error") == ["too-short"]
    assert len(found.findall("testcase")) == 6


def test_hostile_text_is_valid_xml() -> None:
    """Control characters have no place in XML, not even escaped."""
    text = junit.render([reports.told(reports.hostile(), reports.HOSTILE), reports.told(reports.HOLDS)])
    assert not re.search("[\u202e\x00\x1b]", text)
    assert reports.hostile().verdict == "violated"
    assert r"\u202e\x00\x1b[31m" in text
    root = Tree.fromstring(text.encode())
    assert root.get("failures") == "1"
    assert len(text) < 400_000


def test_what_failed_comes_first() -> None:
    assert suite(reports.HOLDS, reports.VIOLATED).get("name") == "zero2-harness verify ./mine.py:Zero2"
