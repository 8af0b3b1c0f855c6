"""The watchdog on real ranks: what hangs is ended for what it does, what only takes long is not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from harness.launch.pool import Activity, Outcome, RankEnd, RankPool, Watch
from tests.ranks.test_pool import all_gone, assert_usable, ends, order, pids, replies

# Reached by no task here: what ends one is the watchdog, or it ends by itself.
HOURS_S = 3600.0
LIMIT_S = 1.5
NEVER_S = 1e6


def watch(moved: object = None, *, blocked_s: float = LIMIT_S, computing_s: float = LIMIT_S) -> Watch:
    return Watch(lambda rank: moved, blocked_s, computing_s)


def run_and_replace(pool: RankPool, world: int, task: bytes, limits: Watch) -> Outcome:
    """The outcome of a task that must stall; its ranks are gone then and the next ones work."""
    before = pids(pool, world)

    outcome = pool.run(world, task, timeout_s=HOURS_S, watch=limits)

    assert all_gone(before)
    assert_usable(pool, world)
    return outcome


@pytest.mark.parametrize(
    ("do", "activity", "error"),
    [
        ("sleep", Activity.BLOCKED, "waited without using the processor"),
        ("hang", Activity.BLOCKED, "waited without using the processor"),
        ("poll", Activity.BLOCKED, "waited without using the processor"),
        ("stop", Activity.STOPPED, "was stopped by SIGSTOP or a debugger"),
    ],
)
def test_a_rank_that_waits_stalls_the_task(pool: RankPool, do: str, activity: Activity, error: str) -> None:
    """Neither a sleep, nor a poll, nor a stopped process computes; the stacks, or the kernel, say where it was."""
    limits = watch(computing_s=NEVER_S)

    outcome = run_and_replace(pool, 2, order(do, ranks=[1]), limits)

    assert ends(outcome) == [RankEnd.REPLIED, RankEnd.STALLED]
    assert outcome.first_failed == 1
    stalled = outcome.ranks[1]
    assert stalled.activity is activity
    assert error in (stalled.error or "")
    assert ("state T" if do == "stop" else f"in _{do}") in (stalled.stacks or "")
    assert "in next_frame" in (outcome.ranks[0].stacks or "")
    assert outcome.ranks[0].activity is None


@pytest.mark.parametrize(("do", "function"), [("loop", "_loop"), ("loop_in_c", "_loop_in_c")])
def test_a_rank_in_an_endless_loop_stalls_the_task(pool: RankPool, do: str, function: str) -> None:
    """Also one that holds the interpreter's lock; the rank that waits for it is told apart."""
    limits = watch(blocked_s=NEVER_S)

    outcome = run_and_replace(pool, 2, order(do, ranks=[0], otherwise={"do": "sum"}), limits)

    assert ends(outcome) == [RankEnd.STALLED, RankEnd.STALLED]
    assert [report.activity for report in outcome.ranks] == [Activity.COMPUTING, Activity.BLOCKED]
    assert "of processor time without progress" in (outcome.ranks[0].error or "")
    assert "no rank made progress while rank 0 used" in (outcome.ranks[1].error or "")
    assert f"in {function}" in (outcome.ranks[0].stacks or "")
    # The last dump alone is in the report, not the samples before.
    assert (outcome.ranks[0].stacks or "").count("in _answer\n") == 1
    assert "in all_reduce" in (outcome.ranks[1].stacks or "")


def test_a_collective_that_a_peer_never_enters_stalls_the_task(pool: RankPool) -> None:
    """All who wait in it are blocked; the one that went past it has replied."""
    task = order("echo", ranks=[1], otherwise={"do": "sum"})

    outcome = run_and_replace(pool, 3, task, watch(computing_s=NEVER_S))

    assert ends(outcome) == [RankEnd.STALLED, RankEnd.REPLIED, RankEnd.STALLED]
    assert [report.activity for report in outcome.ranks] == [Activity.BLOCKED, None, Activity.BLOCKED]
    assert "in next_frame" in (outcome.ranks[1].stacks or "")


def test_a_rank_without_the_signal_for_stacks_is_reported_all_the_same(pool: RankPool) -> None:
    """It is not killed by the question, and what the kernel says stands for its stacks."""
    outcome = run_and_replace(pool, 1, order("loop_deaf"), watch(blocked_s=NEVER_S))

    assert ends(outcome) == [RankEnd.STALLED]
    assert "its stacks could not be had; the kernel says" in (outcome.ranks[0].stacks or "")


def test_a_rank_is_asked_to_end_before_it_is_killed(pool: RankPool) -> None:
    """What a handler of SIGTERM prints is in the output."""
    outcome = run_and_replace(pool, 1, order("loop_farewell"), watch(blocked_s=NEVER_S))

    assert ends(outcome) == [RankEnd.STALLED]
    assert outcome.ranks[0].output == "last words\n"


def test_a_computation_that_moves_may_take_long(pool: RankPool) -> None:
    """Several times the limit of processor time in one function, with signs of life in between."""
    sign = pool.directory / "moved"
    limits = Watch(lambda rank: sign.read_text() if sign.exists() else None, NEVER_S, LIMIT_S)

    outcome = pool.run(1, order("compute_and_move", steps=8, step_s=LIMIT_S / 3), timeout_s=HOURS_S, watch=limits)

    assert replies(outcome) == [b"done"]


def test_a_computation_in_new_functions_may_take_long(pool: RankPool) -> None:
    """Its stacks alone show that it gets on; a collective in which a rank is asked for its own is not disturbed."""
    task = order("compute_in_new_functions", steps=6, step_s=0.75, ranks=[1], otherwise={"do": "sum"})

    outcome = pool.run(2, task, timeout_s=HOURS_S, watch=watch(blocked_s=NEVER_S, computing_s=3.0))

    assert replies(outcome) == [b"3", b"3"]


def test_who_waits_for_a_child_that_computes_is_not_blocked(pool: RankPool) -> None:
    """The child's time counts as the rank's: as computing, and against that limit."""
    good = pool.run(
        1, order("wait_for_child", cpu_s=2.0 * LIMIT_S), timeout_s=HOURS_S, watch=watch(computing_s=NEVER_S)
    )
    bad = run_and_replace(
        pool, 1, order("wait_for_child", cpu_s=NEVER_S), watch(blocked_s=NEVER_S, computing_s=LIMIT_S / 2)
    )

    assert replies(good) == [b"done"]
    assert ends(bad) == [RankEnd.STALLED]
    assert bad.ranks[0].activity is Activity.COMPUTING
    assert "in _wait_for_child" in (bad.ranks[0].stacks or "")


def test_a_failure_comes_before_a_stall(pool: RankPool) -> None:
    """Who hangs after another rank has failed is left behind by it, and the failed one is the first."""
    task = order("raise", ranks=[1], otherwise={"do": "sleep"})

    outcome = run_and_replace(pool, 2, task, watch(blocked_s=0.1, computing_s=0.1))

    assert ends(outcome) == [RankEnd.ABANDONED, RankEnd.RAISED]
    assert outcome.first_failed == 1
    assert outcome.ranks[0].activity is not None  # looked at; what it did depends on whether it slept already


def test_the_silence_of_a_parent_that_pauses_is_its_own(pool: RankPool) -> None:
    """While it does not look, nothing counts against the ranks that wait, nor for the deadline."""
    resumed = pool.directory / "resumed"
    calls: list[float] = []

    def moved(rank: int) -> int:
        calls.append(time.monotonic())
        if len(calls) == 4:
            time.sleep(8.0)
            resumed.touch()
        return 0

    outcome = pool.run(1, order("rest"), timeout_s=8.0, watch=Watch(moved, 5.0, NEVER_S))

    assert replies(outcome) == [b"rested"]
    assert len(calls) > 4


def test_recycled_ranks_are_replaced_without_an_incident(pool: RankPool) -> None:
    """The next task is done by others; a world without ranks may be recycled; other worlds are left alone."""
    first, other = pids(pool, 2), pids(pool, 3)
    noted = len(pool.incidents)

    pool.recycle(2)
    pool.recycle(2)
    pool.recycle(7)

    assert all_gone(first)
    assert pids(pool, 3) == other
    assert not set(pids(pool, 2)) & set(first)
    assert len(pool.incidents) == noted


def test_a_rank_that_died_before_it_was_recycled_is_noted(pool: RankPool) -> None:
    """Recycling hides no death."""
    first = pids(pool, 2)
    noted = len(pool.incidents)
    os.kill(first[1], signal.SIGKILL)
    assert all_gone(first[1:])

    pool.recycle(2)

    assert pool.incidents[noted:] == ["world 2: rank 1 ended after its reply, before the next task"]
    assert all_gone(first)
    assert_usable(pool, 2)
