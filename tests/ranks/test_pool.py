"""The pool: what each way of ending a rank is reported as, that nothing survives, and that the next task works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.launch import rankset
from harness.launch.pool import Activity, Outcome, PoolError, RankEnd, RankPool
from tests.support import sampled

LONG_S = 60.0  # Reached by no task that works.
SHORT_S = 2.0  # For the tasks that are stuck on purpose.
HANDLER = "tests.ranks.handlers:simple"


def order(do: str, **more: Any) -> bytes:
    return json.dumps({"do": do, **more}).encode()


def replies(outcome: Outcome) -> list[bytes | None]:
    assert outcome.replied, outcome
    return [report.reply for report in outcome.ranks]


def ends(outcome: Outcome) -> list[RankEnd]:
    return [report.end for report in outcome.ranks]


def pids(pool: RankPool, world: int) -> list[int]:
    return [int(reply or b"") for reply in replies(pool.run(world, order("pid"), timeout_s=LONG_S))]


def within_bound(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true, looking again and again for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_gone(processes: Iterable[int]) -> bool:
    """Whether these processes have ended, or do so within a bound. (Who must reap one may be the machine's init.)"""

    def ended(pid: int) -> bool:
        try:
            # The first thread may be gone while others still are, and with them the process's connections.
            num_threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
            return num_threads <= 1 and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return True

    return within_bound(lambda: all(ended(pid) for pid in processes))


def assert_usable(pool: RankPool, world: int) -> None:
    """The next task of that world is done, with a working group."""
    total = str(world * (world + 1) // 2).encode()
    assert replies(pool.run(world, order("sum"), timeout_s=LONG_S)) == [total] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_answers_in_its_place(pool: RankPool, world: int) -> None:
    """A task reaches every rank of the world, which knows its rank, its world and the setup."""
    outcome = pool.run(world, order("echo"), timeout_s=LONG_S)

    expected = [json.dumps([rank, world, "the setup"]).encode() for rank in range(world)]
    assert replies(outcome) == expected
    assert outcome.first_failed is None
    assert [report.error for report in outcome.ranks] == [None] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_default_group_is_exactly_the_world(pool: RankPool, world: int) -> None:
    """An all-reduce on the default group adds over the ranks of the world and no others."""
    assert_usable(pool, world)


def test_processes_stay_from_task_to_task(pool: RankPool) -> None:
    """Two tasks that go well are done by the same processes, also with another world's task in between."""
    first = pids(pool, 2)
    other = pids(pool, 3)

    assert pids(pool, 2) == first
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    ("bad", "end", "error"),
    [
        (order("exit", code=0, ranks=[1]), RankEnd.EXITED, "exit code 0"),
        (order("exit", code=3, ranks=[1]), RankEnd.EXITED, "exit code 3"),
        (order("sys_exit", code=0, ranks=[1]), RankEnd.EXITED, "exit code 0"),
        (order("sys_exit", code="farewell", ranks=[1]), RankEnd.EXITED, "exit code 1"),
        (order("signal_itself", signal=9, ranks=[1]), RankEnd.KILLED, "signal 9 (SIGKILL)"),
        (order("signal_itself", signal=6, ranks=[1]), RankEnd.KILLED, "signal 6 (SIGABRT)"),
        (order("raise", ranks=[1]), RankEnd.RAISED, "ZeroDivisionError: planted"),
        (order("return_text", ranks=[1]), RankEnd.RAISED, "the handler returned str: it must return bytes"),
        (order("signal_itself", signal=2, ranks=[1]), RankEnd.RAISED, "KeyboardInterrupt"),
        (order("write_garbage", ranks=[1]), RankEnd.SPOILT, "GET / HTTP"),
        (order("close_connection", hang=False, ranks=[1]), RankEnd.EXITED, "exit code 70"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else "",
)
def test_a_rank_that_does_not_reply_is_reported(pool: RankPool, bad: bytes, end: RankEnd, error: str) -> None:
    """However a rank ends without a reply, it is named with the cause, and the next task works on new processes."""
    before = pids(pool, 2)

    outcome = pool.run(2, bad, timeout_s=LONG_S)

    assert not outcome.replied
    assert outcome.first_failed == 1
    assert ends(outcome) == [RankEnd.REPLIED, end]
    assert outcome.ranks[1].reply is None
    assert error in (outcome.ranks[1].error or "")
    assert all_gone(before)
    assert_usable(pool, 2)


def test_the_report_of_a_broken_rank_arrives(pool: RankPool) -> None:
    """RankBroken's payload stands in for the reply, and does not count as one."""
    outcome = pool.run(2, order("break", reusable=False, ranks=[0]), timeout_s=LONG_S)

    assert ends(outcome) == [RankEnd.BROKEN, RankEnd.REPLIED]
    assert outcome.ranks[0].reply == b"rank 0"
    assert outcome.first_failed == 0
    assert_usable(pool, 2)


def test_ranks_are_kept_only_if_all_say_they_are_in_step(pool: RankPool) -> None:
    """A reusable RankBroken on every rank keeps the processes; on some, or not reusable, it does not."""
    first = pids(pool, 2)
    pool.run(2, order("break", reusable=True), timeout_s=LONG_S)
    second = pids(pool, 2)
    pool.run(2, order("break", reusable=True, ranks=[0]), timeout_s=LONG_S)
    third = pids(pool, 2)
    pool.run(2, order("break", reusable=False), timeout_s=LONG_S)
    fourth = pids(pool, 2)

    assert second == first
    assert not set(third) & set(second)
    assert not set(fourth) & set(third)


def test_the_rank_that_died_is_named_before_those_it_left(pool: RankPool) -> None:
    """A rank whose peer dies in a collective fails as a consequence; the dead one is the first."""
    for victim in (0, 1) * 5:
        task = order("signal_itself", signal=9, ranks=[victim], otherwise={"do": "sum_or_break"})
        outcome = pool.run(2, task, timeout_s=LONG_S)

        assert outcome.ranks[victim].end is RankEnd.KILLED
        assert outcome.ranks[1 - victim].end is RankEnd.BROKEN
        assert outcome.first_failed == victim


def test_a_stuck_world_is_ended_at_the_deadline_with_its_stacks(pool: RankPool) -> None:
    """At the time-out every rank that still runs says where it is, in Python or in a collective, then is killed."""
    before = pids(pool, 2)

    outcome = pool.run(2, order("hang", ranks=[1], otherwise={"do": "sum"}), timeout_s=SHORT_S)

    assert ends(outcome) == [RankEnd.TIMED_OUT, RankEnd.TIMED_OUT]
    assert "in all_reduce" in (outcome.ranks[0].stacks or "")
    assert "in _hang" in (outcome.ranks[1].stacks or "")
    # A single look, which may catch a thread of gloo's that runs for a moment.
    assert outcome.ranks[0].activity in (Activity.BLOCKED, Activity.COMPUTING)
    assert outcome.ranks[1].activity is not None
    assert all_gone(before)
    assert_usable(pool, 2)


def test_a_skipped_collective_leaves_the_others_stuck_not_passed(pool: RankPool) -> None:
    """The rank that skipped has replied, the one that waits for it has not: the task has failed, at that rank."""
    outcome = pool.run(2, order("echo", ranks=[1], otherwise={"do": "sum"}), timeout_s=SHORT_S)

    assert ends(outcome) == [RankEnd.TIMED_OUT, RankEnd.REPLIED]
    assert outcome.first_failed == 0
    assert_usable(pool, 2)


def test_who_waits_for_a_failed_rank_is_abandoned_after_the_grace(pool: RankPool) -> None:
    """A rank that never ends after another has failed is ended long before the deadline and not blamed."""
    outcome = pool.run(2, order("raise", ranks=[1], otherwise={"do": "sum"}), timeout_s=LONG_S)

    assert ends(outcome) == [RankEnd.ABANDONED, RankEnd.RAISED]
    assert outcome.first_failed == 1
    assert outcome.seconds < LONG_S
    assert "rank 1 had failed" in (outcome.ranks[0].error or "")
    assert "in all_reduce" in (outcome.ranks[0].stacks or "")
    assert "in next_frame" in (outcome.ranks[1].stacks or "")  # It waits for another task.
    assert outcome.ranks[0].activity in (Activity.BLOCKED, Activity.COMPUTING)  # see above
    assert outcome.ranks[1].activity is None
    assert_usable(pool, 2)


def test_a_stopped_rank_cannot_hold_up_the_pool(pool: RankPool) -> None:
    """A rank that does not even read its task, nor writes its stacks, is ended at the deadline."""
    stopped = pids(pool, 2)[1]
    os.kill(stopped, signal.SIGSTOP)

    outcome = pool.run(2, bytes(20_000_000), timeout_s=5 * SHORT_S)  # The other rank must get its reply through.

    assert ends(outcome) == [RankEnd.REPLIED, RankEnd.TIMED_OUT]
    assert "state T (stopped by a signal)" in (outcome.ranks[1].stacks or "")
    assert outcome.ranks[1].activity is Activity.STOPPED
    assert all_gone([stopped])
    assert_usable(pool, 2)


def test_a_rank_that_hangs_up_is_ended_at_the_end_of_the_grace(pool: RankPool) -> None:
    """A rank that closed its connection but goes on is blamed, not abandoned."""
    outcome = pool.run(2, order("close_connection", hang=True, ranks=[1]), timeout_s=LONG_S)

    assert ends(outcome) == [RankEnd.REPLIED, RankEnd.TIMED_OUT]
    assert outcome.first_failed == 1
    assert "closed its connection" in (outcome.ranks[1].error or "")
    assert_usable(pool, 2)


def test_events_arrive_in_order_also_from_a_rank_that_dies(pool: RankPool) -> None:
    """What a rank emitted before its end is in its report."""
    good = pool.run(1, order("emit"), timeout_s=LONG_S)
    bad = pool.run(1, order("emit", then="exit", code=5), timeout_s=LONG_S)

    assert replies(good)
    assert good.ranks[0].events == bad.ranks[0].events == (b"event 0", b"event 1", b"event 2")
    assert bad.ranks[0].error == "exit code 5"


def test_output_is_captured_for_each_rank_and_task(pool: RankPool) -> None:
    """What a rank prints is in its report, whichever way it was written, and not in the next one."""
    first = pool.run(2, order("print"), timeout_s=LONG_S)
    second = pool.run(2, order("echo"), timeout_s=LONG_S)

    for rank, report in enumerate(first.ranks):
        assert sorted(report.output.splitlines()) == ["to descriptor 1", "to stderr", f"to stdout {rank}"]
    assert [report.output for report in second.ranks] == ["", ""]


def test_only_the_end_of_much_output_is_kept(pool: RankPool) -> None:
    """Megabytes of output neither block the rank nor fill the report, which says what is missing."""
    outcome = pool.run(1, order("print_much"), timeout_s=LONG_S)

    assert replies(outcome) == [b""]
    first_line, rest = outcome.ranks[0].output.split("\n", 1)
    assert first_line == f"[{(4 << 20) + len('the end') - 65536} bytes before this are left out]"
    assert len(rest) == 65536
    assert rest.endswith("xthe end")


def test_endless_output_does_not_fill_the_disk(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that grows too large during a task is cut."""
    monkeypatch.setattr(rankset, "_MAX_LOG_BYTES", 100_000)

    assert replies(pool.run(1, order("print_until_cut"), timeout_s=LONG_S)) == [b"cut"]


def test_a_closed_stdout_does_not_cost_the_reply(pool: RankPool) -> None:
    """A subject may close sys.stdout."""
    assert replies(pool.run(1, order("close_stdout"), timeout_s=LONG_S)) == [b"closed"]


def test_the_death_of_a_rank_shows_its_python_stack(pool: RankPool) -> None:
    """A crash in native code leaves the Python stack in the rank's output."""
    outcome = pool.run(1, order("signal_itself", signal=int(signal.SIGSEGV)), timeout_s=LONG_S)

    assert outcome.ranks[0].error == "signal 11 (SIGSEGV)"
    assert "in _signal_itself" in outcome.ranks[0].output


def test_large_messages_arrive_whole_both_ways(pool: RankPool) -> None:
    """50 MB go to two ranks at once and come back unchanged."""
    task = bytes(range(256)) * (50 * 4096)

    outcome = pool.run(2, task, timeout_s=LONG_S)

    assert [reply == task for reply in replies(outcome)] == [True, True]


def test_what_a_rank_started_ends_with_it(pool: RankPool) -> None:
    """Neither a child of a rank that ended nor a daemon that left its session survives the task."""
    outcome = pool.run(2, order("start_sleepers", ranks=[1]), timeout_s=LONG_S)

    sleepers = json.loads(outcome.ranks[1].events[0])
    assert outcome.ranks[1].error == "exit code 0"
    assert len(sleepers) == 2
    assert all_gone(sleepers)


def test_a_fork_of_the_subject_cannot_answer_for_the_rank(pool: RankPool) -> None:
    """A child that returns from the task is silenced; the rank's own reply is the only one."""
    assert replies(pool.run(2, order("fork_and_return"), timeout_s=LONG_S)) == [b"parent", b"parent"]
    assert_usable(pool, 2)


def test_a_rank_that_dies_between_tasks_is_replaced_and_noted(pool: RankPool) -> None:
    """Nobody's task is blamed for it, and it is not forgotten either."""
    first = pids(pool, 2)
    os.kill(first[0], signal.SIGKILL)
    assert all_gone(first[:1])
    noted = len(pool.incidents)

    assert_usable(pool, 2)

    assert pool.incidents[noted:] == ["world 2: rank 0 ended after its reply, before the next task"]
    assert all_gone(first)


def test_an_interrupt_ends_the_task_and_leaves_the_pool_usable(pool: RankPool) -> None:
    """KeyboardInterrupt comes out of run(); the interrupted ranks are gone."""
    before = pids(pool, 2)

    with pytest.raises(KeyboardInterrupt):
        pool.run(2, order("interrupt", parent=os.getpid(), ranks=[0], otherwise={"do": "hang"}), timeout_s=LONG_S)

    assert all_gone(before)
    assert_usable(pool, 2)


def test_ranks_see_the_environment_torchrun_gives(pool: RankPool) -> None:
    """The variables of a single-node job, one thread, and a session of their own."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]

    outcome = pool.run(2, order("environment", names=names), timeout_s=LONG_S)

    for rank, reply in enumerate(replies(outcome)):
        values, threads, own_session = json.loads(reply or b"")
        assert values == dict(zip(names, [str(rank), str(rank), "2", "2", "127.0.0.1", "1"], strict=True))
        assert threads == 1
        assert own_session


def test_a_fork_of_the_parent_cannot_end_the_pool(pool: RankPool) -> None:
    """close() in a child process that inherited the pool lets go of it without touching the ranks."""
    before = pids(pool, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process may have threads. The child
        child = os.fork()  # does so little that it cannot matter.
    if child == 0:
        pool.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)

    assert status == 0
    assert pids(pool, 2) == before
    assert pool.directory.is_dir()


def test_two_pools_do_not_disturb_each_other(pool: RankPool) -> None:
    """A second pool has its own processes, failures and end."""
    mine = pids(pool, 2)
    with RankPool(HANDLER, b"other") as other:
        theirs = pids(other, 2)
        failed = other.run(2, order("exit", code=1), timeout_s=LONG_S)
        assert_usable(other, 2)
        assert pids(pool, 2) == mine
        directory = other.directory

    assert not failed.replied
    assert not set(mine) & set(theirs)
    assert not directory.exists()
    assert pids(pool, 2) == mine


def test_a_zygote_that_a_subject_has_stopped_still_cleans_up() -> None:
    """It ends by itself, and is not killed in the end with its work undone."""
    with RankPool("tests.ranks.handlers:simple") as started:
        started.run(1, order("echo"), timeout_s=LONG_S)
        zygote = started._zygote
        os.kill(zygote.pid, signal.SIGSTOP)

    assert zygote._process.returncode == 0


def test_close_leaves_nothing_behind() -> None:
    """After close() no process and no directory is left; it may be called again, a task may not be run."""
    pool = RankPool(HANDLER, env={"MY_SETTING": "17"})
    pool.warm([1, 2])
    ranks = pids(pool, 1) + pids(pool, 2)
    zygote = psutil.Process(ranks[0]).ppid()
    setting = pool.run(1, order("environment", names=["MY_SETTING"]), timeout_s=LONG_S)
    in_use = pool.log_path(2, 1).exists()

    pool.close()
    pool.close()

    assert json.loads(replies(setting)[0] or b"")[0] == {"MY_SETTING": "17"}
    assert in_use
    assert not any(psutil.pid_exists(pid) for pid in [zygote, *ranks])
    assert not pool.directory.exists()
    with pytest.raises(PoolError, match="closed"):
        pool.run(1, b"", timeout_s=LONG_S)


def test_the_death_of_the_zygote_is_an_error_of_the_pool() -> None:
    """Its ranks die with it, and run() says so, now and later."""
    with RankPool(HANDLER) as pool:
        ranks = pids(pool, 2)
        os.kill(psutil.Process(ranks[0]).ppid(), signal.SIGKILL)

        with pytest.raises(PoolError, match="zygote process has ended, with code -9"):
            pool.run(2, order("hang"), timeout_s=LONG_S)
        with pytest.raises(PoolError, match="failed before"):
            pool.run(2, b"", timeout_s=LONG_S)

        assert all_gone(ranks)
        assert not pool.directory.exists()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("tests.ranks.no_such_module", "ModuleNotFoundError: No module named 'tests.ranks.no_such_module'"),
        ("tests.ranks.starts_a_thread", "importing tests.ranks.starts_a_thread started threads"),
    ],
)
def test_a_preload_that_cannot_be_is_an_error_of_the_pool(module: str, message: str) -> None:
    """The traceback of the import is in the message; a module that starts threads is refused."""
    with RankPool(HANDLER, preload=[module]) as pool, pytest.raises(PoolError, match="Traceback") as caught:
        pool.run(1, b"", timeout_s=LONG_S)

    assert message in str(caught.value)


def test_a_preload_that_takes_too_long_is_an_error_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up at the join time-out, and the message shows where it was."""
    with RankPool(HANDLER, preload=["tests.ranks.never_imported"]) as pool:
        assert within_bound(lambda: "this import does not end" in (pool.directory / "zygote.log").read_text())
        monkeypatch.setattr(pool, "_join_timeout_s", 0.1)
        with pytest.raises(PoolError, match=r"importing torch, .* took longer than join_timeout_s=0.1") as caught:
            pool.warm([1])

    assert "never_imported.py" in str(caught.value)


def test_a_handler_that_cannot_set_up_is_an_error_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the rank and has the traceback, or the stack of one that hangs; the pool stays usable.

    On a busy machine it has more time to join: the limit grows with the load, and is bounded all the same.
    """
    with RankPool("tests.ranks.handlers:difficult") as pool:
        with pytest.raises(PoolError, match="world 2: rank 1 did not start") as raised:
            pool.run(2, b"", timeout_s=LONG_S)
        before = pids(pool, 1)
        monkeypatch.setattr(pool, "_join_timeout_s", SHORT_S)
        with pytest.raises(PoolError, match=r"world 3: rank 2 did not start: .*join_timeout_s=2.0") as hung:
            pool.run(3, b"", timeout_s=LONG_S)
        left = psutil.Process(pool._zygote.pid).children()

        assert pids(pool, 1) == before

        cores = len(os.sched_getaffinity(0))
        monkeypatch.setattr(os, "getloadavg", lambda: (1e6 * cores, 0.0, 0.0))
        monkeypatch.setattr(pool, "_join_timeout_s", 0.5)
        with pytest.raises(PoolError, match=r"join_timeout_s=0.5 \(10.0 times that, for the load of the machine\)"):
            pool.run(3, b"", timeout_s=LONG_S)

    assert "LookupError: no such optimizer" in str(raised.value)
    assert "in difficult" in str(hung.value)
    assert [process.pid for process in left] == before


@pytest.mark.parametrize(
    ("module", "message"),
    [("tests.ranks.no_fork", "starts no more processes"), ("tests.ranks.no_descriptors", "too many open files")],
)
def test_what_the_machine_refuses_is_said_in_the_first_line(module: str, message: str) -> None:
    """A limit on processes or open files is named, with what to do, before any traceback."""
    with RankPool(HANDLER, preload=[module]) as pool, pytest.raises(PoolError) as caught:
        pool.run(2, b"", timeout_s=LONG_S)

    first, *rest = str(caught.value).splitlines()
    assert message in first
    assert "or use fewer ranks" in first
    assert any(line.startswith("Traceback") for line in rest)


def in_a_process_of_its_own(code: str, **environment: str) -> str:
    """What a script prints that uses a pool, after an import of it."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in [*sys.path, ""])
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, resource\nfrom harness.errors import *\nfrom harness.launch.pool import *\n"
            + textwrap.dedent(code),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """From the start, or when it fills up: one line says what to do."""
    text = in_a_process_of_its_own(
        """
        pool = RankPool("tests.ranks.handlers:simple")
        pool.warm([1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        ends = []
        for start in (lambda: pool.run(1, b'{"do": "raise"}', timeout_s=60), lambda: RankPool("a:b")):
            try:
                ends.append(start())
            except (PoolError, UsageError) as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(pool.run(1, b"", timeout_s=60).replied, ends)
        pool.close()
        """,
        TMPDIR=str(tmp_path),
    )

    first, second, third = text.splitlines()
    for line in (first, second):
        assert line.startswith(f"cannot write logs and stores in {tmp_path}/zero2-harness-")
        assert "set TMPDIR" in line
    assert third == "True []"
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_gets_no_descriptors_says_so(tmp_path: Path) -> None:
    """Of this process; it leaves nothing behind."""
    text = in_a_process_of_its_own(
        """
        num_open = len(os.listdir("/proc/self/fd")) - 1
        for more in (2, 8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + more, 4096))
            try:
                with RankPool("tests.ranks.handlers:simple") as pool:
                    pool.run(4, b"", timeout_s=60)
            except PoolError as error:
                print(str(error).splitlines()[0])
        """,
        TMPDIR=str(tmp_path),
    )

    assert [line.split(" (")[0] for line in text.splitlines()] == ["too many open files"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"handler": "no_colon"}, "expected 'package.module:function'"),
        ({"handler": HANDLER, "start": "spawn"}, "expected one of fork, exec"),
        ({"handler": HANDLER, "backend": "nccl", "start": "fork"}, "CUDA does not survive a fork"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match=message):
        RankPool(**arguments)


def test_ranks_can_be_fresh_interpreters() -> None:
    """start="exec" gives the same pool: tasks, a failure, new processes."""
    with RankPool(HANDLER, b"fresh", start="exec", preload=["colorsys"]) as pool:
        before = pids(pool, 2)
        failed = pool.run(2, order("signal_itself", signal=9, ranks=[1]), timeout_s=LONG_S)

        assert ends(failed) == [RankEnd.REPLIED, RankEnd.KILLED]
        assert all_gone(before)
        assert_usable(pool, 2)
        last = pids(pool, 2)

    assert all_gone(last)


# A parent of its own, to be killed. Says its processes, then waits in a task.
PARENT = """
import json, os, signal, sys
import psutil
from harness.launch.pool import RankPool

def interrupted(number, frame):
    alive = sum(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ranks if psutil.pid_exists(pid))
    print(json.dumps(alive), flush=True)
    raise KeyboardInterrupt

with RankPool("tests.ranks.handlers:simple") as pool:
    ask = b'{"do": "pid"}'
    ranks = [int(report.reply) for world in (1, 2) for report in pool.run(world, ask, timeout_s=60).ranks]
    zygote = psutil.Process(ranks[0]).ppid()
    signal.signal(signal.SIGINT, interrupted)
    print(json.dumps([[zygote, *ranks], str(pool.directory)]), flush=True)
    pool.run(2, b'{"do": "hang"}', timeout_s=600)
"""


def start_parent() -> tuple[subprocess.Popen[str], list[int], Path]:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in [*sys.path, ""])},
    )
    assert parent.stdout is not None
    processes, directory = json.loads(parent.stdout.readline())
    return parent, processes, Path(directory)


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGTERM], every=2))
def test_nothing_survives_a_parent_that_is_killed(number: signal.Signals) -> None:
    """Without a chance to clean up in the parent, its processes end and its directory goes."""
    parent, processes, directory = start_parent()
    with parent:
        parent.send_signal(number)

        assert parent.wait(20) == -number
        assert all_gone(processes)
        assert not directory.exists()


def test_an_interrupt_at_the_terminal_is_the_parents_alone() -> None:
    """SIGINT to the foreground process group finds all ranks alive in the parent's handler; then all end with it."""
    parent, processes, directory = start_parent()
    with parent:
        os.killpg(parent.pid, signal.SIGINT)
        out, err = parent.communicate(timeout=20)

    assert json.loads(out) == len(processes) - 1
    assert "KeyboardInterrupt" in err
    assert all_gone(processes)
    assert not directory.exists()


def test_the_parent_does_not_import_torch() -> None:
    """The pool, as the parent uses it, costs no import of torch (and a parent without torch cannot join a group)."""
    code = "import sys, harness.launch.pool, harness.launch.rank; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.split() == ["False", "False"]
