"""What a divergence says of itself."""

from __future__ import annotations

import json
import math

import pytest

from harness.verdict import Divergence, Property, Stage

FULL = Divergence(
    property=Property.GRADIENT,
    stage=Stage.REDUCE,
    message="the reduced gradient differs",
    rank=0,
    step=0,
    parameter="p0",
    element=0,
    bucket=0,
    owner=0,
    expected=0.0,
    actual=-0.5,
    expected_bits="0x00000000",
    actual_bits="0xbf000000",
    ulps=0,
    mismatches=1,
)


def test_a_summary_has_what_applies_under_its_own_names() -> None:
    """Zeros apply; None does not. Finite numbers stay numbers."""
    assert FULL.summary() == {
        "property": "gradient",
        "stage": "reduce",
        "message": "the reduced gradient differs",
        "rank": 0,
        "step": 0,
        "parameter": "p0",
        "element": 0,
        "bucket": 0,
        "owner": 0,
        "expected": 0.0,
        "actual": -0.5,
        "expected_bits": "0x00000000",
        "actual_bits": "0xbf000000",
        "ulps": 0,
        "mismatches": 1,
    }
    least = Divergence(property=Property.PROGRESS, stage=Stage.BUILD, message="it hangs")
    assert least.summary() == {"property": "progress", "stage": "build", "message": "it hangs"}


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
@pytest.mark.parametrize("name", ["expected", "actual"])
def test_inf_and_nan_are_words(name: str, value: float, word: str) -> None:
    """JSON has no such numbers: null in a saved case would say that nothing applies."""
    other = {"expected": "actual", "actual": "expected"}[name]
    found = Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, message="differs", **{name: value, other: 1.5})
    summary = found.summary()
    assert summary[name] == word
    assert summary[other] == 1.5
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_what_is_text_already_stays() -> None:
    found = Divergence(property=Property.AGREEMENT, stage=Stage.GATHER, message="m", expected="ab12", actual="nan")
    assert (found.summary()["expected"], found.summary()["actual"]) == ("ab12", "nan")
