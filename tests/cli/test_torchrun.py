"""The real torchrun: one report, one exit code, nothing left behind, on one machine and on what it takes for two."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest

from harness.launch import follow, job
from harness.launch.torchrun import Launch
from tests.cli.conftest import ROOT, TIMEOUT_S, CommandLine, InProcess
from tests.ranks.test_pool import within_bound
from tests.spreading import environment_of
from tests.support import SUBJECTS

FAILING = f"{SUBJECTS / 'failing.py'}:Failing"
CASE = str(ROOT / "harness" / "regressions" / "bf16-sum-at-world-three.json")
STARTS = (sys.executable, "-m", "torch.distributed.run")


def launcher(cli: CommandLine, options: list[str], *args: str, name: str) -> subprocess.Popen[str]:
    """torchrun, whose output and that of all it starts goes to files of this name."""
    with (cli.directory / f"{name}.out").open("w") as out, (cli.directory / f"{name}.err").open("w") as err:
        return subprocess.Popen(
            [*STARTS, *options, "-m", "harness", *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            cwd=cli.directory,
            env=cli.environment,
        )


def finished(started: subprocess.Popen[str]) -> int:
    """The exit code; a launcher that does not end is ended, with what it started."""
    try:
        return started.wait(TIMEOUT_S)
    finally:
        end(started)


def end(started: subprocess.Popen[str]) -> None:
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)  # it ends its processes, which a SIGKILL would not
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def said(cli: CommandLine, name: str) -> tuple[str, str]:
    return (cli.directory / f"{name}.out").read_text(), (cli.directory / f"{name}.err").read_text()


def assert_nothing_is_left(cli: CommandLine) -> None:
    assert within_bound(lambda: cli.processes() == [])
    assert list(cli.temporary.glob("zero2*")) == []


def test_a_right_class_holds_on_the_ranks_that_torchrun_starts(cli: CommandLine) -> None:
    """Exit code 0, and one report, with the world of the job."""
    started = launcher(cli, ["--nproc-per-node=2"], "verify", "--examples", "4", "--json", "-", name="one")
    assert finished(started) == 0, said(cli, "one")[1]

    printed, complained = said(cli, "one")
    result = json.loads(printed)  # one, and nothing else
    assert (result["verdict"], result["worlds"], result["examples"]["run"]) == ("holds", [2], 4)
    assert complained.count("holds: zero2 on gloo, world 2") == 1
    assert_nothing_is_left(cli)


def test_two_machines_tell_one_story_of_the_rank_that_fails(cli: CommandLine) -> None:
    """Two launchers, with one process each. Rank 1, on the second, is stopped; the report is the first one's alone."""
    cli.environment["GLOO_SOCKET_IFNAME"] = "lo"
    port = free_port()
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    args = ("verify", "--examples", "2", "--subject", FAILING, "--subject-arg", "how=stop", "--subject-arg", "at=1")
    args += ("--stall", "2", "--seed", "3")

    nodes = [launcher(cli, [*options, f"--node-rank={node}"], *args, name=f"node{node}") for node in (0, 1)]
    codes = [finished(node) for node in nodes]

    (printed, complained), (silence, other) = said(cli, "node0"), said(cli, "node1")
    assert codes[0] == 1, complained
    assert printed.count("violated: ") == 1
    assert "rank 1 made no progress: it was stopped by SIGSTOP or a debugger (no rank made progress for 2." in printed
    assert "rank 1 !     step 0, reduce: was stopped by SIGSTOP" in printed
    assert "rank 0 waits for its 2nd collective, reduce_scatter" in printed  # from what rank 1 left on its machine
    assert "traceback : violated: rank 1 made no progress" in complained  # torchrun's own table
    assert complained.count("exitcode  :") == 1
    assert silence == ""
    assert codes[1] == 0, other
    assert "harness" not in other
    assert_nothing_is_left(cli)


@pytest.mark.parametrize("args", [["list"], ["verify", "--help"], ["fuzz"]])
def test_a_process_that_is_not_the_first_leaves_at_once_where_there_is_nothing_to_do(
    cli: CommandLine, args: list[str]
) -> None:
    """Without a word, and without asking for the store, which is not there."""
    cli.environment |= environment_of(1, 3, 1)
    done = cli.run(*args)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--version"], 0, "zero2-harness "),
        (["list", "--json", "-"], 0, '"subjects"'),
        (["verify", "--help"], 0, "torchrun --nproc-per-node=4 -m harness verify"),
        (["fuzz"], 2, "error: fuzz: only verify and replay run on the ranks of torchrun; start it without torchrun"),
    ],
)
def test_the_first_process_says_what_needs_no_ranks(
    inside: InProcess, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, says: str
) -> None:
    launch(monkeypatch, 3)
    done = inside.run(*args)
    assert done.returncode == code
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "world", "says"),
    [
        (
            ["verify", "--world", "2"],
            3,
            "--world 2: torchrun started 3 processes (--nproc-per-node times --nnodes), and each looks after one rank; "
            "start 2 of them, or do without torchrun",
        ),
        (
            ["verify", "--world", "1,2"],
            1,
            "--world 1,2: torchrun started 1 process (--nproc-per-node times --nnodes), and each looks after one rank; "
            "leave --world out, or do without torchrun",
        ),
        (
            ["verify", "--backend", "sim"],
            3,
            "--backend sim: all its ranks live in one process, and torchrun started 3 processes; "
            "start it without torchrun",
        ),
        (["replay", CASE], 4, "a case of world 3: torchrun started 4 processes"),
        (["replay", CASE, "--backend", "sim"], 3, "--backend sim: all its ranks live in one process"),
        (["verify", "--subject", "nowhere:Class", "--examples", "none"], 3, "--examples"),
    ],
    ids=["world", "worlds", "simulated", "case", "simulated-case", "option"],
)
def test_what_torchrun_cannot_run_is_refused_and_the_others_are_sent_home(
    inside: InProcess, monkeypatch: pytest.MonkeyPatch, args: list[str], world: int, says: str
) -> None:
    sent: list[Launch] = []
    monkeypatch.setattr(job, "dismiss", sent.append)
    launch(monkeypatch, world)
    done = inside.run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert [each.world for each in sent] == [world] * (world > 1)


@pytest.mark.parametrize(("rank", "code"), [(0, 2), (1, 0)])
def test_a_job_that_is_started_again_does_nothing(
    inside: InProcess, monkeypatch: pytest.MonkeyPatch, rank: int, code: int
) -> None:
    """A violation that is found by chance would else be followed by a campaign that holds, and exit code 0."""
    for name, value in environment_of(rank, 3, 1, attempt=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(follow, "be_silent", lambda: None)  # these are the streams of the tests
    done = inside.run("verify", "--subject", "nowhere:Class")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("error: torchrun started this again (--max-restarts)") == (rank == 0)


def test_simulated_ranks_are_no_business_of_a_launcher_of_one(
    inside: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, 1)
    done = inside.run("verify", "--backend", "sim", "--examples", "1", "--world", "2", "--preset", "nothing")
    assert "torchrun" not in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False), ("x", True)])
def test_variables_that_make_no_sense_are_told_by_one(
    inside: InProcess, monkeypatch: pytest.MonkeyPatch, rank: str, speaks: bool
) -> None:
    launch(monkeypatch, 3)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE" if rank != "x" else "ROLE_NAME")
    done = inside.run("verify")
    assert done.returncode == 2
    assert done.stderr.count("error: torchrun's ") == speaks


def launch(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Let this process be the first of a job."""
    for name, value in environment_of(0, world, 1).items():
        monkeypatch.setenv(name, value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
