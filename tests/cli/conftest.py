"""The command line as its users run it: a process of its own, in an empty directory; or in this process, for less."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from harness import cli as command_line
from harness import runner
from harness.launch.pool import RankPool
from harness.soak import campaign as soak
from tests.cli.canned import CANNED

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280  # for what never ends: a busy machine takes many times what an idle one does


class CommandLine:
    """Runs ``python -m harness`` in an empty directory; with ``canned``, over a runner of known outcome."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.temporary = directory.parent / "tmp"
        self.temporary.mkdir()
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        self.environment.pop("FORCE_COLOR", None)

    def command(self, *args: str, canned: str | None = None) -> list[str]:
        """The words to execute."""
        if canned is not None:
            return [sys.executable, str(Path(__file__).parent / "canned.py"), canned, *args]
        return [sys.executable, "-m", "harness", *args]

    def run(self, *args: str, canned: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run to the end with output captured."""
        return subprocess.run(
            self.command(*args, canned=canned),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def processes(self) -> list[psutil.Process]:
        """Those that have inherited its place for temporary files."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.temporary):
                    found.append(process)
        return found

    def shell(self, script: str, *args: str, canned: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a bash script in which ``"$@"`` is the command line, for redirections."""
        return subprocess.run(
            ["bash", "-c", script, "bash", *self.command(*args, canned=canned)],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    """A command line in an empty directory ``work`` of its own."""
    work = tmp_path / "work"
    work.mkdir()
    return CommandLine(work)


class InProcess:
    """Runs command lines in this process, from an empty directory: where the process is not what is tested."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.temporary = directory.parent / "tmp"
        self.temporary.mkdir()
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setattr(tempfile, "tempdir", None)  # asked for again
        monkeypatch.setattr(sys, "argv", ["harness/__main__.py"])
        self.go_to(directory)

    def go_to(self, directory: Path) -> None:
        """Make it the current directory."""
        self.directory = directory
        self._monkeypatch.chdir(directory)

    def run(self, *args: str, canned: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run to the end with output captured; with ``canned``, campaigns have a known outcome."""
        if canned is not None:
            self._monkeypatch.setattr(runner, "run_campaign", CANNED[canned])
        self._capfd.readouterr()
        code = command_line.main(args)
        printed, complained = self._capfd.readouterr()
        return subprocess.CompletedProcess(args, code, printed, complained)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> InProcess:
    """A command line of this process, in an empty directory ``work``."""
    work = tmp_path / "work"
    work.mkdir()
    return InProcess(work, monkeypatch, capfd)


@pytest.fixture
def warm(inside: InProcess, scenario_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """The same, whose campaigns, replays and soaks on gloo run on ranks that are there already."""
    monkeypatch.setattr(runner, "run_campaign", partial(runner.run_campaign, pool=scenario_pool))
    monkeypatch.setattr(runner, "replay_case", partial(runner.replay_case, pool=scenario_pool))
    monkeypatch.setattr(soak, "run_soak", partial(soak.run_soak, pool=scenario_pool))
    return inside


@pytest.fixture
def start(cli: CommandLine) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command line that the test talks to while it runs; it is ended and reaped with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*args: str, canned: str | None = None) -> subprocess.Popen[str]:
        # A child inherits an ignored SIGINT, as in a shell's background job; a handler is reset to the default.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                cli.command(*args, canned=canned),
                cwd=cli.directory,
                env=cli.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
