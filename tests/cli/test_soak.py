"""`soak` as its users run it: one JSON object, a table, and the exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import InProcess


def test_the_json_is_one_object_and_the_table_is_on_stderr(warm: InProcess) -> None:
    words = ("--world", "2", "--examples", "6", "--every", "6", "--seed", "1")
    done = warm.run("soak", *words, "--json", "-")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["run"], result["kinds"]["no fault"]["right"]) == ("holds", 6, 5)
    assert set(result["growth"]) == {"rss", "descriptors", "threads", "processes"}
    assert "no fault          5       5       0" in done.stderr
    assert "all right: zero2 on gloo, world 2, 6 scenarios in " in done.stderr


def test_a_wrong_verdict_is_exit_code_3_and_its_replay_is_the_last_line(warm: InProcess) -> None:
    done = warm.run(
        "soak", "--subject", "canary-bit", "--world", "1", "--examples", "2", "--every", "100", "--seed", "1"
    )

    assert done.returncode == 3
    assert "the subject is not right (see `verify`), or the harness is broken: 2 of 2 verdicts are wrong" in done.stdout
    last = done.stdout.splitlines()[-1].split()
    assert last[:5] == ["replay", "python", "-m", "harness", "replay"]
    replayed = warm.run(*last[4:])
    assert replayed.returncode == 1


def test_ctrl_c_ends_it_with_what_it_saw(start: Callable[..., subprocess.Popen[str]]) -> None:
    running = start("soak", "--world", "1", "--examples", "100000", "--seed", "1", "--every", "100000", "--json", "-")
    assert running.stderr is not None
    for line in running.stderr:  # ends with the process
        if line.startswith("0/"):
            break
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=120)

    assert running.returncode == 130
    assert json.loads(out)["interrupted"] is True
