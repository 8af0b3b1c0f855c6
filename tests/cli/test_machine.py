"""A machine that lacks something: one clear line and exit code 2 where the user can help it, else 3; no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import sampled

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, InProcess

SHORT = ("verify", "--world", "1", "--examples", "1", "--seed", "7")


def check_one_line(done: subprocess.CompletedProcess[str], said: str) -> None:
    """Exit code 2, and a complaint of one line after the seed."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert done.stdout in ("", "seed 7\n")


@pytest.mark.parametrize("verb", [SHORT, ("train", "--steps", "1"), ("bench", "--seed", "7", "--world", "2")], ids=str)
def test_no_place_for_temporary_files(cli: CommandLine, verb: tuple[str, ...]) -> None:
    """Python would silently take another place."""
    cli.environment["TMPDIR"] = "/nowhere"
    done = cli.run(*verb)
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (2, False)
    assert "error: temporary files in /nowhere: No such file or directory; set TMPDIR" in done.stderr


@pytest.mark.parametrize(
    "verb",
    sampled([SHORT, ("train",), ("doctor",), ("bench",), ("replay", "/dev/null")], every=2),
    ids=lambda verb: verb[0],
)
def test_a_current_directory_that_is_gone(cli: CommandLine, verb: tuple[str, ...]) -> None:
    done = cli.shell('mkdir gone; cd gone; rmdir ../gone; "$@"', *verb)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "the current directory cannot be used" in done.stderr


@pytest.mark.parametrize(
    "verb", sampled(["verify --world 1,2,3,4", "doctor", "bench", "train", "replay case.json"], every=2)
)
def test_more_ranks_than_descriptors(cli: CommandLine, verb: str) -> None:
    """Refused with the estimate, before any process is started."""
    (cli.directory / "case.json").write_text(json.dumps(CASE))
    done = cli.shell('ulimit -n 30; "$@"', *verb.split())
    check_one_line(done, "30 are allowed: raise it with `ulimit -n`")


def test_a_disk_that_is_full_when_ranks_start(cli: CommandLine) -> None:
    """Not taken for a crash of the subject: it is tried whether the directory for temporary files can be written."""
    done = cli.shell('ulimit -f 32; "$@"', *SHORT)
    assert done.returncode == 2
    assert "File too large; set TMPDIR to a directory that can be written" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_violation_is_reported_though_its_case_cannot_be_saved(warm: InProcess) -> None:
    """The directory is there when the campaign begins and gone when the case is written: exit 1, and a note."""
    report = warm.directory / "report"
    report.mkdir()
    subject = warm.directory / "removes.py"
    subject.write_text(REMOVES_THE_REPORT.format(report=str(report)))
    done = warm.run(*SHORT, "--subject", "removes.py:Broken", "--report", "report")
    assert done.returncode == 1
    assert "(the case could not be saved: " in done.stdout
    assert "replay " not in done.stdout


def test_a_full_target_of_the_json(cli: CommandLine) -> None:
    """A device is written as it is; that nothing could be written is exit 3, or 1 where there was a violation."""
    holds = cli.run("verify", "--json", "/dev/full", canned="holds")
    violated = cli.run("verify", "--json", "/dev/full", canned="violated")
    assert (holds.returncode, violated.returncode) == (3, 1)
    for done in (holds, violated):
        assert done.stderr.splitlines()[-1].startswith("error: --json /dev/full: the result could not be written: No s")


def test_files_of_the_names_of_modules_are_not_imported(cli: CommandLine) -> None:
    """``-m`` puts the current directory first: a ``torch.py`` there would be taken for torch in every rank."""
    for name in ("torch", "numpy", "random", "json", "signal", "socket", "typing", "click", "zero2core"):
        (cli.directory / f"{name}.py").write_text("raise SystemExit('the wrong file')\n")
    done = cli.run(*SHORT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_closed_streams_and_no_home_do_not_matter(cli: CommandLine) -> None:
    cli.environment["HOME"] = "/nowhere"
    done = cli.shell('"$@" <&- >&- 2>&-', *SHORT, "--json", "result.json")
    assert done.returncode == 0
    assert json.loads((cli.directory / "result.json").read_text())["verdict"] == "holds"


def test_an_interruption_while_modules_are_loaded_is_quiet(cli: CommandLine) -> None:
    """At whatever moment it comes: 130, and at most the one word. (Of Python's own start nothing can be said.)"""
    (cli.directory / "slow").mkdir()
    (cli.directory / "slow" / "click.py").write_text(SLOW_IMPORT)
    cli.environment["PYTHONPATH"] = f"{cli.directory / 'slow'}{os.pathsep}{cli.environment['PYTHONPATH']}"
    process = subprocess.Popen(
        cli.command("list"), cwd=cli.directory, env=cli.environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while not (cli.directory / "importing").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        printed, complained = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, printed, complained) == (130, b"", b"interrupted\n")


SLOW_IMPORT = """
import pathlib, time
pathlib.Path("importing").touch()
time.sleep(600)
"""

REMOVES_THE_REPORT = """
import pathlib
from zero2core import ZeroMaster

class Broken(ZeroMaster):
    def reduce_scatter(self):
        report = pathlib.Path({report!r})
        if report.is_dir():
            report.rmdir()
            report.touch()
        raise ValueError("broken")
"""

CASE = {
    "version": 1,
    "system": "zero_master",
    "world": 1,
    "seed": 5,
    "parameters": [{"name": "w", "shape": [2, 3]}],
    "values": {"domain": "exact", "max_k": 3, "exponent": 0},
    "optimizer": {},
    "operations": [
        {"op": "build", "bucket": 4},
        {"op": "part", "more": False, "contributors": [0], "none": [[]]},
        {"op": "step"},
    ],
}
