"""Several command lines at the same time, in the same directory; afterwards nothing of them may be left."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

# Not what it takes, but what a machine that is busy with other things may take, for each of them.
_TIMEOUT_EACH_S = 120

Done = subprocess.CompletedProcess[str]


def run_together(cli: CommandLine, command_lines: Sequence[Sequence[str]]) -> list[Done]:
    """Start all at once and wait until all have ended; every process that they started has then ended too."""
    marker = f"crowd-{secrets.token_hex(8)}"
    with ExitStack() as stack:
        started = []
        for number, line in enumerate(command_lines):
            outputs = [stack.enter_context((cli.directory.parent / f"{name}{number}").open("w+")) for name in "oe"]
            process = subprocess.Popen(
                cli.command(*line),
                cwd=cli.directory,
                env={**cli.environment, "CROWD": marker},
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
            )
            stack.callback(_end, process)
            started.append((process, outputs))
        deadline = time.monotonic() + _TIMEOUT_EACH_S * len(started)
        done = []
        for process, outputs in started:
            code = process.wait(max(deadline - time.monotonic(), 1.0))
            for output in outputs:
                output.seek(0)
            done.append(Done(process.args, code, outputs[0].read(), outputs[1].read()))
    assert _wait_until_gone(marker) == []
    return done


def check_nothing_left(cli: CommandLine) -> None:
    """No private directory of a pool, no file that was being written."""
    assert list(cli.temporary.glob("zero2*")) == []
    assert list(cli.directory.rglob(".*")) == []


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait_until_gone(marker: str) -> list[str]:
    """The command lines of the processes with the marker in their environment, when there are none or time is up."""
    deadline = time.monotonic() + 60
    while (found := _marked(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _marked(marker: str) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (directory / "environ").read_bytes():
                found.append((directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
