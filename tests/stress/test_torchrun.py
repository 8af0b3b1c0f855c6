"""torchrun, its processes and its store ended by force, at different moments; violations made small on two machines."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from harness.launch.outcome import PoolError
from harness.launch.spread import SpreadPool
from tests.cli.test_torchrun import (
    FAILING,
    assert_nothing_is_left,
    end,
    finished,
    free_port,
    launcher,
    said,
)
from tests.ranks.test_pool import LONG_S, within_bound
from tests.spreading import Followers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import CommandLine

ENDLESS = ("verify", "--examples", "1000000")


def named(cli: CommandLine, name: str) -> list[psutil.Process]:
    found = []
    for process in cli.processes():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(name):
                found.append(process)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("delay_s", [1.0, 8.0, 25.0])
def test_a_launcher_that_is_asked_to_end_leaves_nothing(cli: CommandLine, delay_s: float) -> None:
    """While its processes import, while ranks join, in the midst of a campaign."""
    started = launcher(cli, ["--nproc-per-node=3"], *ENDLESS, name="one")
    try:
        time.sleep(delay_s)
        started.send_signal(signal.SIGTERM)
        assert finished(started) != 0
    finally:
        end(started)
    printed, _ = said(cli, "one")
    assert printed.count("\nunknown") <= 1
    assert_nothing_is_left(cli)


@pytest.mark.timeout(600)
def test_a_launcher_that_is_killed_takes_all_along(cli: CommandLine) -> None:
    """Its store goes with it: nobody follows any more, and the first process says so."""
    started = launcher(cli, ["--nproc-per-node=3"], *ENDLESS, name="one")
    assert within_bound(lambda: len(named(cli, "z2-rank")) == 3)
    started.kill()
    started.wait()
    assert within_bound(lambda: cli.processes() == [])
    assert "the store of the launcher" in said(cli, "one")[0]
    assert list(cli.temporary.glob("zero2*")) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["z2-follow2", "z2-zygote", "z2-rank1"])
def test_a_process_that_is_killed_ends_the_campaign_and_leaves_nothing(cli: CommandLine, which: str) -> None:
    """A launched one, the one that forks ranks, a rank: of the last the subject is told, as without torchrun."""
    started = launcher(cli, ["--nproc-per-node=3"], *ENDLESS, name="one")
    try:
        assert within_bound(lambda: len(named(cli, "z2-rank")) == 3)
        assert within_bound(lambda: len(named(cli, which)) > 0)
        named(cli, which)[0].kill()
        assert finished(started) == 1
    finally:
        end(started)
    printed, complained = said(cli, "one")
    assert printed.count("\nviolated: ") + printed.count("\nunknown") == 1, complained
    if which == "z2-rank1":
        assert "rank 1" in printed
        assert "signal 9 (SIGKILL)" in printed or "ended after its reply" in printed
    assert_nothing_is_left(cli)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["kill", "exit-0", "skip-last-reduce-scatter"])
def test_a_violation_is_made_small_on_two_machines(cli: CommandLine, how: str) -> None:
    """Two processes on each; every try that fails ends the ranks on both and starts others."""
    cli.environment["GLOO_SOCKET_IFNAME"] = "lo"
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    args = ("verify", "--examples", "3", "--subject", FAILING, "--subject-arg", f"how={how}", "--subject-arg", "at=3")
    nodes = [launcher(cli, [*options, f"--node-rank={node}"], *args, name=f"node{node}") for node in (0, 1)]
    codes = [finished(node) for node in nodes]
    (printed, complained), (silence, _) = said(cli, "node0"), said(cli, "node1")
    assert codes == [1, 0], complained
    assert printed.count("violated: ") == 1
    assert "  rank         3\n" in printed
    assert "world 4, 1 parameter" in printed
    assert silence == ""
    assert_nothing_is_left(cli)


@pytest.mark.timeout(600)
def test_a_rank_that_cannot_start_is_named_with_the_reason(tmp_path: Path) -> None:
    with (
        Followers(2, tmp_path / "output.txt") as followers,
        SpreadPool(followers.launch, "tests.ranks.handlers:difficult") as pool,
        pytest.raises(PoolError, match=r"(?s)rank 1: .*rank 1 did not start: LookupError: no such optimizer"),
    ):
        pool.run(2, b"", timeout_s=LONG_S)
    assert (tmp_path / "output.txt").read_text() == ""
