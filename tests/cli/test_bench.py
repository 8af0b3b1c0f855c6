"""`bench` as its users run it: one JSON object, and a sentence where a subject cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import sampled

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

SUBJECTS = Path(__file__).parents[1] / "subjects"


def test_the_json_is_one_object_with_ratios_parts_and_tables(cli: CommandLine) -> None:
    done = cli.run("bench", "--world", "1", "--examples", "2", "--seed", "1", "--json", "-")

    assert done.returncode == 0
    result = json.loads(done.stdout)
    cost = result["per_world"]["1"]
    assert sum(cost["parts"].values()) == pytest.approx(cost["full"])
    assert cost["ratio"] == pytest.approx(cost["full"] / cost["bare"])
    assert [row["numel"] for row in result["by_elements"]] == [1_000, 10_000, 100_000, 1_000_000]
    assert [row["buckets"] for row in result["by_buckets"]] == [1, 4, 16, 64]
    assert "measured: zero2 on gloo, world 1" in done.stderr


@pytest.mark.parametrize(
    ("subject", "code", "words"),
    sampled(
        [
            pytest.param(f"{SUBJECTS}/broken.py:LostFirstPart", 1, "violation    world 1", id="wrong"),
            pytest.param(f"{SUBJECTS}/unusual.py:LacksDiscard", 2, "discard", id="incomplete"),
            pytest.param("nothing", 2, "no built-in system of that name", id="unknown"),
        ],
        every=2,
    ),
)
def test_a_subject_that_cannot_be_measured_ends_in_a_sentence(
    cli: CommandLine, subject: str, code: int, words: str
) -> None:
    done = cli.run("bench", "--subject", subject, "--world", "1", "--examples", "20", "--seed", "1")

    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
