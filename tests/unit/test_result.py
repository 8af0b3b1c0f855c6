"""The result's JSON is what DESIGN.md, section 7, promises: its fields, valid JSON for any value, its exit code."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from harness.report.result import Examples, Failure, Result, WorldExamples, to_json, versions

RESULT_FIELDS = {
    "schema", "verdict", "subject", "backend", "order", "schedule", "worlds", "seed", "examples", "seconds",
    "examples_per_second", "oracle", "properties", "reached", "changed", "recycled", "versions", "failure", "reason",
    "interrupted", "margin", "missing", "fuzz", "found_after", "system", "device", "verb",
}  # fmt: skip
FAILURE_FIELDS = {
    "property", "step", "stage", "rank", "parameter", "element", "bucket", "owner", "expected", "actual",
    "expected_bits", "actual_bits", "ulps", "mismatches", "symptom",
    "index", "offset", "pattern", "inputs", "symptoms_possible", "case", "test", "replay", "message", "ranks",
    "scenario", "output", "cut_short", "evidence",
}  # fmt: skip


def make_result(**changes: Any) -> Result:
    result = Result(
        verdict="holds",
        subject="zero2",
        backend="gloo",
        worlds=(1, 3),
        seed=2**63 - 1,
        examples=Examples(run=4, discarded=1, per_world={1: WorldExamples(2, 10.5), 3: WorldExamples(2, 4.0)}),
        seconds=1.5,
        examples_per_second=2.75,
    )
    return msgspec.structs.replace(result, **changes)


def test_result_has_exactly_the_promised_fields() -> None:
    """A field that is renamed or lost breaks whoever reads the file; null stands for a failure that is none."""
    written = json.loads(to_json(make_result()))
    assert set(written) == RESULT_FIELDS
    assert written["schema"] == 1
    assert written["failure"] is None
    assert written["seed"] == 2**63 - 1
    assert written["examples"] == {
        "run": 4,
        "discarded": 1,
        "per_world": {"1": {"count": 2, "rate": 10.5}, "3": {"count": 2, "rate": 4.0}},
    }


def test_failure_has_exactly_the_promised_fields_with_null_where_nothing_applies() -> None:
    """All fields are there even when only the property is known."""
    written = json.loads(to_json(make_result(verdict="violated", failure=Failure(property="progress"))))["failure"]
    assert set(written) == FAILURE_FIELDS
    assert {name for name, value in written.items() if value is not None} == {"property"}


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")], ids=["nan", "inf", "-inf"]
)
def test_non_finite_numbers_are_written_as_strings(value: float, text: str) -> None:
    """JSON has no such numbers: a strict reader must accept the file, and null would lose the value."""
    data = to_json(make_result(failure=Failure(property="gradient", expected=value, actual=1.0)))

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    failure = json.loads(data, parse_constant=refuse)["failure"]
    assert failure["expected"] == text
    assert failure["actual"] == 1.0


def test_floats_survive_exactly() -> None:
    """The smallest subnormal and a value without a short decimal form come back bit for bit."""
    for value in (2.0**-149, 0.1, -0.0, 1e308):
        back = json.loads(to_json(make_result(failure=Failure(property="norm", actual=value))))["failure"]["actual"]
        assert math.copysign(1.0, back) == math.copysign(1.0, value)
        assert back == value


def test_text_that_is_no_unicode_is_escaped() -> None:
    """File names and output may hold undecodable bytes (lone surrogates), which JSON cannot carry."""
    data = to_json(make_result(failure=Failure(property="progress", case="caf\udce9.json", output="é\x1b\n")))
    failure = json.loads(data.decode("utf-8"))["failure"]
    assert failure["case"] == "caf\\udce9.json"
    assert failure["output"] == "é\x1b\n"


@pytest.mark.parametrize(
    ("verdict", "interrupted", "code"),
    [
        ("holds", False, 0),
        ("violated", False, 1),
        ("unknown", False, 3),
        ("unknown", True, 130),
        ("violated", True, 130),
    ],
)
def test_exit_code_follows_the_verdict(verdict: str, interrupted: bool, code: int) -> None:
    """2 is never a result's: it means that nothing was run."""
    assert make_result(verdict=verdict, interrupted=interrupted).exit_code == code


def test_versions_name_what_results_depend_on() -> None:
    """Each is a version number: the packages of the project are installed where the tests run."""
    found = versions()
    assert set(found) == {"zero2-harness", "python", "torch", "numpy", "hypothesis", "msgspec"}
    assert all(version[0].isdigit() for version in found.values())


def test_what_does_not_print_is_escaped_and_still_read_back() -> None:
    """Standard output may be a terminal: a control character that JSON lets through would be carried out there."""
    nasty = "a\x1b[2J\x9b31m\x7f\r\n\u202egnp\u2028\U000e0001é😀"
    written = to_json(make_result(subject=nasty))
    assert all(char.isprintable() or char == "\n" for char in written.decode())
    assert "é😀" in written.decode()
    assert json.loads(written)["subject"] == nasty
