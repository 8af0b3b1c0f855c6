"""`fuzz` as its users run it: the same seed gives the same, it goes on where it stopped, and nothing found is lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from harness.fuzz.rounds import round_of, run_round
from harness.fuzz.state import scenario_id
from harness.subjects.builtin import capabilities
from tests.cli.conftest import ROOT
from tests.examining import Judging

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

Start = Callable[..., subprocess.Popen[str]]

# Waits end with what they wait for; this is for what never comes.
PATIENCE_S = 240

SLOW_AND_WRONG = f"""
import sys, time
sys.path.append({str(ROOT)!r})
from harness.faults.museum.plain import PlainZero

class Wrong(PlainZero):
    def reduce_scatter(self):
        super().reduce_scatter()
        if self.world > 1:
            time.sleep(0.02)
            self.master.grad.mul_(2)

class Waits(PlainZero):
    def reduce_scatter(self):
        while True:
            pass
"""


@pytest.fixture
def wrong(cli: CommandLine) -> str:
    """A subject that is wrong in every scenario of two ranks, and takes its time to be made smaller."""
    (cli.directory / "slow.py").write_text(SLOW_AND_WRONG)
    return "slow.py"


def read(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


def await_line(running: subprocess.Popen[str], part: str) -> None:
    assert running.stderr is not None
    for line in running.stderr:  # ends with the process
        if part in line:
            return
    raise AssertionError(f"ended without a line with {part!r}")


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def test_killed_processes_lose_nothing_and_leave_nothing(cli: CommandLine, start: Start) -> None:
    words = ("fuzz", "--world", "1", "--seed", "3", "--workers", "1", "--dir", "d", "--json", "r.json")
    running = start(*words, "--minutes", "30")
    await_line(running, "reached ")
    (worker,) = (each for each in psutil.Process(running.pid).children() if each.is_running())
    beneath = worker.children(recursive=True)
    worker.kill()
    await_line(running, "another takes its place")
    assert gone(beneath)
    await_line(running, "reached ")
    everything = psutil.Process(running.pid).children(recursive=True)
    running.kill()
    assert gone(everything)
    running.communicate(timeout=PATIENCE_S)

    done = cli.run(*words, "--examples", "50")
    assert done.returncode == 0, done.stderr
    ids = (cli.directory / "d" / "ids" / "000000.txt").read_text().split()
    extension = capabilities("zero2").extension
    alone = Judging(lambda scenario: False)
    run_round(round_of(3, 0), seed=3, worlds=(1,), bucket=None, examiner=alone, extension=extension)
    assert ids == [scenario_id(scenario) for scenario in alone.examined]


def test_it_ends_in_time_whatever_the_subject_does(cli: CommandLine, wrong: str) -> None:
    done = cli.run("fuzz", "--subject", f"{wrong}:Waits", "--world", "2", "--minutes", "0.1", "--workers", "1")
    assert done.returncode in (1, 3)
    assert done.stdout.startswith(("violated: ", "unknown: "))


def test_real_ranks_and_a_subject_that_cannot_be_used(cli: CommandLine) -> None:
    done = cli.run("fuzz", "--backend", "gloo", "--world", "2", "--examples", "5", "--seed", "1", "--workers", "1")
    assert done.returncode == 0, done.stderr
    (place,) = (each for each in (cli.directory / ".zero2-fuzz").iterdir() if each.is_dir())
    assert len((place / "ids" / "000000.txt").read_text().split()) == 5

    (cli.directory / "bad.py").write_text("class Bad: ...\n")
    bad = cli.run("fuzz", "--subject", "bad.py:Bad", "--world", "1", "--examples", "5")
    assert bad.returncode == 2
    assert "bad.py:Bad" in bad.stderr.splitlines()[-1]
    both = cli.run("fuzz", "--seed", "1", "--hypothesis-seed", "2")
    assert both.returncode == 2
