"""The command line as its users run it: a process of its own, in an empty directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


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
