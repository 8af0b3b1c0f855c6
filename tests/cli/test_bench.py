"""`bench` as its users run it: one JSON object, and a sentence where a subject cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import sampled

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, InProcess

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
            pytest.param("muon", 2, "`bench muon` measures", id="of another system"),
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


def test_the_json_of_muon_is_one_object_with_ratios(cli: CommandLine) -> None:
    done = cli.run("bench", "muon", "--preset", "tiny-gpt", "--world", "2", "--steps", "1", "--json", "-")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["preset"], result["worlds"]) == ("holds", "tiny-gpt", [2])
    costs = result["per_world"]["2"]
    assert list(costs) == ["unsharded", "newton_schulz", "numel"]
    for cost in costs.values():
        assert cost["seconds_ratio"] == pytest.approx(cost["seconds"] / costs["unsharded"]["seconds"])
    assert "measured: tiny-gpt" in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("bench", "--world", "2", "muon"), "options of `bench muon` go after its name"),
        (("bench", "muon", "--preset", "gpt-2"), "no preset 'gpt-2'"),
        (("bench", "muon", "--steps", "0"), "0 is not a whole number from 1"),
        (("bench", "newton"), "No such command 'newton'"),
    ],
)
def test_a_bench_of_muon_that_cannot_be_is_refused(inside: InProcess, args: tuple[str, ...], says: str) -> None:
    done = inside.run(*args)

    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_help_of_muon_says_what_is_measured(inside: InProcess) -> None:
    done = inside.run("bench", "muon", "--help")

    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--world", "--preset", "--steps", "--seed", "--json"))
    assert "zero2-harness bench muon" in done.stdout
    assert "Exit codes:" in done.stdout
    assert "  muon " in inside.run("bench", "--help").stdout
