"""A campaign that is killed with SIGKILL, at any moment, leaves no process; the next run starts clean.

``HARNESS_KILL_ROUNDS`` is how many times it is done (default 2), ``HARNESS_KILL_SEED`` draws the moments (default 1).
The longest time that anything outlived a campaign is printed (``pytest -s``).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("HARNESS_KILL_ROUNDS", "2"))
SEED = int(os.environ.get("HARNESS_KILL_SEED", "1"))
LATEST_S = 4.0
# On an idle machine they are gone in a few hundredths of a second; one that is busy must only get there.
GONE_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 240.0
MARK = "HARNESS_TEST_MARK"


def campaign(temporary: Path, mark: str, *arguments: str) -> subprocess.Popen[bytes]:
    """``verify``, with a variable in its environment that all it starts inherit."""
    command = [sys.executable, "-m", "harness", "verify", *arguments, "--report", str(temporary / "cases")]
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in [*sys.path, ""])
    environment = os.environ | {MARK: mark, "TMPDIR": str(temporary), "PYTHONPATH": path}
    output = (temporary / "output.txt").open("ab")
    with output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)


def marked(mark: str) -> list[int]:
    """The processes of a campaign. (One that has ended has no environment any more.)"""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                variables = (directory / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in variables:
                found.append(int(directory.name))
    return found


def seconds_until_gone(mark: str) -> float:
    """How long any process of a campaign goes on; at the bound they are ended, and it is infinite."""
    started = time.monotonic()
    while left := marked(mark):
        if time.monotonic() - started > GONE_TIMEOUT_S:
            for pid in left:
                send(pid, signal.SIGKILL)
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - started


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.timeout(ROUNDS * 60 + RUN_TIMEOUT_S)
def test_nothing_survives_a_campaign_that_is_killed_at_any_moment(tmp_path: Path) -> None:
    """Also while some of its ranks are stopped; the next campaign holds, and removes what was left on the disk."""
    draw = random.Random(SEED)
    longest_s = 0.0
    for number in range(ROUNDS):
        mark = f"{os.getpid()}-{number}"
        delay_s = draw.uniform(0.0, LATEST_S)
        stop_some = draw.random() < 0.5
        with campaign(tmp_path, mark, "--world", "2,3", "--examples", "100000") as killed:
            time.sleep(delay_s)
            assert killed.poll() is None, (tmp_path / "output.txt").read_text()
            others = [pid for pid in marked(mark) if pid != killed.pid and is_rank(pid)]
            stopped = draw.sample(others, len(others) // 2) if stop_some else []
            for pid in stopped:
                send(pid, signal.SIGSTOP)
            killed.kill()
            gone_s = seconds_until_gone(mark)
        longest_s = max(longest_s, gone_s)
        assert gone_s < float("inf"), f"killed after {delay_s:.3f} s, {len(stopped)} ranks stopped: some went on"

    # A run in the same place of temporary files finds them as if nothing had been.
    mark = f"{os.getpid()}-last"
    with campaign(tmp_path, mark, "--world", "2", "--examples", "5") as last:
        try:
            code = last.wait(RUN_TIMEOUT_S)
        finally:
            last.kill()
    print(f"{ROUNDS} campaigns killed: all processes gone after at most {longest_s:.2f} s")  # noqa: T201
    assert code == 0, (tmp_path / "output.txt").read_text()
    assert seconds_until_gone(mark) < float("inf")
    assert list(tmp_path.glob("zero2-harness-*")) == []


def is_rank(pid: int) -> bool:
    """By the name that ranks give themselves."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().startswith("z2-rank")
    except OSError:
        return False
