"""`museum` as its users run it: one JSON object, a table and a headline, and the exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from harness import runner
from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
from tests.support import repetitions

if TYPE_CHECKING:
    from harness.evaluate import Pool
    from tests.cli.conftest import CommandLine, InProcess

PATIENCE_S = 240  # for what never comes


def test_one_plant_is_caught_scored_and_written(
    inside: InProcess, simulated_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = inside.run("museum", "--plant", "MaxOfNorms", "--seed", "3", "--seconds-per-plant", "200", "--json", "-")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["seed"], result["not_run"], result["controls"]) == ("holds", 3, 0, [])
    (plant,) = result["plants"]
    assert (plant["id"], plant["caught"], plant["judgement"]["naming"]) == ("max-of-norms", True, "none")
    assert plant["case"]["world"] == 2
    assert (result["summary"]["caught"], result["summary"]["false_alarms"]) == (1, 0)
    assert result["left_out"] == LEFT_OUT
    lines = done.stderr.splitlines()
    assert lines[0] == "seed 3"
    assert any(line.startswith("1/1 max-of-norms: caught after ") for line in lines)
    assert lines[-1].startswith("holds: 1 of 1 plant caught (median ")
    replay = plant["failure"]["replay"].split()
    monkeypatch.setattr(runner, "replay_case", partial(runner.replay_case, pool=simulated_pool))
    assert inside.run(*replay[3:]).returncode == 1


def test_too_little_time_decides_nothing(cli: CommandLine) -> None:
    done = cli.run("museum", "--plant", "max-of-norms", "--seed", "3", "--seconds-per-plant", "0.000001")

    assert done.returncode == 3
    assert "undecided" in done.stdout
    again = "python -m harness museum --plant max-of-norms --backend sim --seed 3 --seconds-per-plant 3e-06"
    assert again in done.stdout
    assert done.stdout.splitlines()[-1].startswith("unknown: 0 of 1 plant caught, 1 undecided; ")


def test_an_exhibit_is_looked_up_without_a_campaign(inside: InProcess) -> None:
    done = inside.run(
        "museum", "--show", "max_of_norms", "--show", "https://github.com/facebookresearch/fairscale/pull/167"
    )

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    plants = [plant for plant in PLANTS if "facebookresearch/fairscale#167" in plant.bugs or plant.id == "max-of-norms"]
    assert [line.split(" (")[0] for line in lines if line and line[0] != " "] == [plant.id for plant in plants]
    for word in (
        "  bugs         https://github.com/facebookresearch/fairscale/issues/167",
        "  subject      museum:max-of-norms",
        "  property     norm",
        "  stage        norm",
    ):
        assert word in lines
    assert any(line.startswith("  why ") for line in lines)
    assert any(line.startswith("  known        world 2, ") for line in lines)
    assert any(line.startswith("  class ") and line.endswith("plants/norm.py:MaxOfNorms") for line in lines)
    assert any(line.startswith("  label ") and line.endswith("labels/norm.py") for line in lines)
    control = inside.run("museum", "--show", "plain-zero").stdout
    assert "plain-zero (control" in control
    assert CONTROLS[0].way.split()[0] in control


def test_a_plant_of_no_public_bug_says_so(inside: InProcess) -> None:
    shown = inside.run("museum", "--show", "divides-twice").stdout
    assert "  bugs         none is public: the specification of its system names the mistake" in shown.splitlines()
    assert "  subject      museum:divides-twice" in shown.splitlines()


def test_all_exhibits_are_listed_within_80_columns(inside: InProcess) -> None:
    done = inside.run("museum", "--list")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    words = done.stdout.replace(",", " ").split()
    assert {each.id for each in (*PLANTS, *CONTROLS)} <= set(words)
    assert {bug for plant in PLANTS for bug in plant.bugs} | set(LEFT_OUT) <= set(words)


def test_ctrl_c_ends_it_with_what_it_has_and_leaves_nothing(start: Callable[..., subprocess.Popen[str]]) -> None:
    running = start("museum", "--seed", "1", "--workers", str(repetitions(1, 2)), "--json", "-")
    assert running.stderr is not None
    for line in running.stderr:  # ends with the process
        if line.startswith("1/"):
            break
    beneath = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate(timeout=PATIENCE_S)

    assert running.returncode == 130
    result = json.loads(printed)
    assert result["interrupted"]
    assert result["not_run"] > 0
    assert len(result["plants"]) >= 1
    assert len(beneath) >= 2
    assert not psutil.wait_procs(beneath, timeout=PATIENCE_S)[1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--plant", "max-of-norm"), "did you mean max-of-norms"),
        (("--plant", "plain-zero"), "that is a control"),
        (("--all",), "--all: on sim every plant is run anyway"),
        (("--show", "plain-zer"), "did you mean plain-zero"),
        (("--show", "plain-zero", "--json", "-"), "--show and --list run nothing"),
        (("--list", "--plant", "max-of-norms"), "--show and --list run nothing"),
        (("--seconds-per-plant", "0"), "not a number of seconds above zero"),
        (("--workers", "0"), "not a whole number from 1 to"),
        (("--backend", "mpi"), "'mpi' is not one of"),
        (("--json", "/"), "a directory"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(inside: InProcess, words: tuple[str, ...], complaint: str) -> None:
    done = inside.run("museum", *words)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
