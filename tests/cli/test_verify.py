"""Whole runs of every verb, with real ranks: few examples, because campaigns have tests of their own."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import sampled

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, InProcess

SUBJECTS = Path(__file__).parents[1] / "subjects"
RIGHT = "museum:plain-zero"
BROKEN = "museum:overwrites-at-world-one"


def test_a_right_class_holds(cli: CommandLine) -> None:
    """Exit 0 with evidence: examples were run at each world, weights were compared; nothing is left behind."""
    done = cli.run("verify", "--subject", RIGHT, "--world", "1,2", "--examples", "4", "--seed", "1", "--json", "-")
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"], result["failure"]) == (0, "holds", None)
    assert {world: counted["count"] for world, counted in result["examples"]["per_world"].items()} == {"1": 2, "2": 2}
    assert result["properties"]["weights"] > 0
    assert list(cli.directory.iterdir()) == []
    assert list(cli.temporary.glob("zero2*")) == []


def test_a_violation_is_saved_and_replays_from_anywhere(warm: InProcess) -> None:
    """The saved case shows the same failure again, from another directory; another class passes it.

    The class lies in neither directory, so that it has to be named: the printed command does.
    """
    found = warm.run(
        "verify",
        "--subject",
        BROKEN,
        "--world",
        "1",
        "--examples",
        "20",
        "--seed",
        "1",
        "--report",
        "out",
        "--json",
        "r.json",
    )
    assert found.returncode == 1
    failure = json.loads((warm.directory / "r.json").read_text())["failure"]
    assert found.stdout.splitlines()[-1].endswith(failure["replay"])
    [case] = (warm.directory / "out").glob("*.json")
    assert failure["case"] == f"out/{case.name}"

    (warm.directory / "elsewhere").mkdir()
    warm.go_to(warm.directory / "elsewhere")
    command = shlex.split(failure["replay"])
    assert command[5:] == ["--subject", BROKEN]
    again = warm.run("replay", str(case), *command[5:], "--json", "-")
    assert again.returncode == 1
    repeated = json.loads(again.stdout)["failure"]
    for field in ("property", "step", "stage", "rank", "parameter", "element", "expected_bits", "actual_bits"):
        assert repeated[field] == failure[field], field
    other = warm.run("replay", str(case), "--subject", RIGHT)
    assert other.returncode == 0, other.stderr


def test_a_preset_is_three_examples(warm: InProcess) -> None:
    """Held, spilled and clipped over the model's parameters."""
    done = warm.run("verify", "--preset", "tiny-mlp", "--world", "2", "--json", "-")
    result = json.loads(done.stdout)
    assert (done.returncode, result["examples"]["run"]) == (0, 3)
    assert "not reached" not in done.stderr


def test_a_model_too_large_for_the_machine_is_refused_with_the_estimate(cli: CommandLine) -> None:
    """1.2 billion elements at world 256 need terabytes."""
    done = cli.run("verify", "--preset", "llama-3.2-1b", "--world", "256")
    assert done.returncode == 2
    assert "GiB" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("subject", "said"),
    [("fails.py:A", "boom"), (f"{SUBJECTS}/unusual.py:LacksDiscard", "discard")],
    ids=["raises", "no-method"],
)
def test_a_subject_that_cannot_be_driven_is_bad_input(warm: InProcess, subject: str, said: str) -> None:
    """The ranks find out; stderr is one line that says what is wrong, without a traceback."""
    (warm.directory / "fails.py").write_text("raise RuntimeError('boom')\n")
    done = warm.run("verify", "--subject", subject, "--world", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize("subject", sampled(["package.mine:Forgets", "package/mine.py:Forgets"], every=2))
def test_a_saved_case_of_ones_own_project_replays_without_more(cli: CommandLine, subject: str) -> None:
    """A file or a module of the current directory needs no --subject; elsewhere the case alone is refused."""
    (cli.directory / "package").mkdir()
    (cli.directory / "package" / "mine.py").write_text(FORGETS)
    done = cli.run("verify", "--subject", subject, "--world", "1", "--examples", "9", "--seed", "1", "--json", "-")
    assert done.returncode == 1
    words = shlex.split(json.loads(done.stdout)["failure"]["replay"])
    assert words[:4] == ["python", "-m", "harness", "replay"]
    assert len(words) == 5

    here = cli.run(*words[3:], "--json", "-")
    (cli.directory / "elsewhere").mkdir()
    elsewhere = cli.shell('cd elsewhere; "$@"', "replay", str(cli.directory / words[4]))

    assert here.returncode == 1
    assert json.loads(here.stdout)["failure"]["replay"] == shlex.join(words)
    assert elsewhere.returncode == 2
    assert "is not in the current directory or below" in elsewhere.stderr


FORGETS = """
from zero2core import ZeroMaster

class Forgets(ZeroMaster):
    def gather_params(self):
        pass
"""


def test_an_interruption_ends_every_process(cli: CommandLine, start: Callable[..., subprocess.Popen[str]]) -> None:
    """SIGTERM in the middle of a campaign: partial result, exit 130, no rank and no private directory left."""
    process = start("verify", "--world", "2", "--examples", "1000000", "--json", "-")
    assert process.stderr is not None
    assert any("/1000000 examples" in line for line in process.stderr)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(printed)["interrupted"] is True
    assert children
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert list(cli.temporary.glob("zero2*")) == []  # torch leaves an empty directory of its own there


def test_training_writes_its_result(cli: CommandLine) -> None:
    """Two steps on two ranks, equal bits at both."""
    done = cli.run("train", "--world", "2", "--steps", "2", "--json", "-")
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"], len(result["records"])) == (0, "holds", 2)
