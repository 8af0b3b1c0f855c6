"""A pool whose ranks are looked after by other processes tells the same as one that holds them all itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from harness.launch import board, job, machine
from harness.launch import spread as spreading
from harness.launch.outcome import Activity, PoolError, RankEnd, RankReport, Watch
from harness.launch.pool import RankPool
from harness.launch.rank import NO_GROUP
from harness.launch.spread import SpreadPool
from tests.ranks.test_pool import HANDLER, LONG_S, SHORT_S, all_gone, ends, order, replies, within_bound
from tests.spreading import Followers
from tests.support import sampled

WORLD = 3
GRACE_S = 0.3
WATCH = Watch(lambda _rank: None, 1.5, 1.5)


class Spread(NamedTuple):
    """The pool, and the processes that follow."""

    pool: SpreadPool
    followers: Followers


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    """One job for all these tests: what one of them breaks is repaired for the next."""
    output = tmp_path_factory.mktemp("spread") / "output.txt"
    with Followers(WORLD, output) as followers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_LEAVE_S", 2.0)  # the last test ends one that cannot say good-bye
        with SpreadPool(followers.launch, HANDLER, b"the setup", grace_s=GRACE_S) as pool:
            yield Spread(pool, followers)
        assert followers.codes() in ([0, 0], [0, -signal.SIGKILL])
    assert output.read_text() == ""


def pids(pool: SpreadPool) -> list[int]:
    return [int(reply or b"") for reply in replies(pool.run(WORLD, order("pid"), timeout_s=LONG_S))]


def assert_usable(pool: SpreadPool) -> None:
    assert replies(pool.run(WORLD, order("sum"), timeout_s=LONG_S)) == [b"6"] * WORLD


def told(report: RankReport) -> tuple[object, ...]:
    """What is said of a rank, without what differs from run to run."""
    said = (report.error or "").strip().splitlines()
    return report.rank, report.end, report.reply, report.events, said[-1:], report.output


def test_each_rank_answers_in_its_place_from_a_process_that_stays(spread: Spread) -> None:
    expected = [json.dumps([rank, WORLD, "the setup"]).encode() for rank in range(WORLD)]
    assert replies(spread.pool.run(WORLD, order("echo"), timeout_s=LONG_S)) == expected
    assert_usable(spread.pool)
    assert pids(spread.pool) == pids(spread.pool)


def test_ranks_are_children_of_different_processes(spread: Spread) -> None:
    """Two generations up: the process between forks ranks."""
    parents = [psutil.Process(pid).parents()[1].pid for pid in pids(spread.pool)]
    assert parents == [os.getpid(), *(process.pid for process in spread.followers.processes)]


def test_ranks_see_what_the_launcher_set(spread: Spread) -> None:
    names = sorted(spread.followers.environment)
    outcome = spread.pool.run(WORLD, order("environment", names=names), timeout_s=LONG_S)
    for rank, reply in enumerate(replies(outcome)):
        values, threads, own_session = json.loads(reply or b"")
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        assert values == spread.followers.environment | own
        assert (threads, own_session) == (1, True)


def test_a_task_and_replies_that_the_store_takes_only_in_parts(spread: Spread) -> None:
    large = bytes(range(256)) * 40_000  # 10 MB
    assert replies(spread.pool.run(WORLD, large, timeout_s=LONG_S)) == [large] * WORLD
    assert_usable(spread.pool)


FAILURES = {
    "exits": order("exit", code=0, ranks=[1], otherwise={"do": "hang"}),
    "raises": order("raise", ranks=[1]),
    "killed": order("signal_itself", signal=9, ranks=[2], otherwise={"do": "hang"}),
    "broken": order("break", reusable=False, ranks=[2]),
    "events": order("emit", then="exit", code=3, ranks=[1]),
    "prints": order("print", ranks=[0, 1], otherwise={"do": "exit", "code": 1}),
    "in-turn": order("exit", code=3, ranks=[2], otherwise={"do": "exit", "code": 4, "after_s": 0.1}),
}


@pytest.mark.parametrize("failure", sampled(FAILURES, 2))
def test_what_fails_is_told_as_by_a_pool_that_holds_all_ranks(spread: Spread, pool: RankPool, failure: str) -> None:
    before = pids(spread.pool)

    apart, one = (each.run(WORLD, FAILURES[failure], timeout_s=LONG_S) for each in (spread.pool, pool))

    assert [told(report) for report in apart.ranks] == [told(report) for report in one.ranks]
    assert apart.first_failed == one.first_failed
    assert [report.stacks is None for report in apart.ranks] == [report.stacks is None for report in one.ranks]
    assert all_gone(before)
    assert_usable(spread.pool)


def test_ranks_that_all_know_where_they_are_go_on(spread: Spread) -> None:
    before = pids(spread.pool)
    outcome = spread.pool.run(WORLD, order("break", reusable=True), timeout_s=LONG_S)
    assert ends(outcome) == [RankEnd.BROKEN] * WORLD
    assert pids(spread.pool) == before


@pytest.mark.parametrize(
    ("bad", "activity"),
    [
        (order("hang", ranks=[2]), Activity.BLOCKED),
        (order("loop", ranks=[1]), Activity.COMPUTING),
        (order("stop", ranks=[0]), Activity.STOPPED),
    ],
    ids=["waits", "computes", "stopped"],
)
def test_a_rank_that_does_not_get_on_is_found_wherever_it_is(spread: Spread, bad: bytes, activity: Activity) -> None:
    (at,) = json.loads(bad)["ranks"]

    outcome = spread.pool.run(WORLD, bad, timeout_s=LONG_S, watch=WATCH)

    assert ends(outcome) == [RankEnd.STALLED if rank == at else RankEnd.REPLIED for rank in range(WORLD)]
    assert outcome.first_failed == at
    report = outcome.ranks[at]
    assert report.activity is activity
    assert "by SIGSTOP" in (report.error or "") if at == 0 else "handlers.py" in (report.stacks or "")
    assert all(other.stacks for other in outcome.ranks if other.rank != at)
    assert_usable(spread.pool)


def test_one_rank_that_gets_on_is_enough(spread: Spread) -> None:
    """The others wait for it; it computes for twice the limit, in functions that are always new."""
    task = order("compute_in_new_functions", steps=4, step_s=0.75, ranks=[2], otherwise={"do": "sum"})
    assert replies(spread.pool.run(WORLD, task, timeout_s=LONG_S * 4, watch=WATCH)) == [b"6"] * WORLD


def test_time_is_up_on_all_machines_at_once(spread: Spread) -> None:
    outcome = spread.pool.run(WORLD, order("hang"), timeout_s=SHORT_S)
    assert ends(outcome) == [RankEnd.TIMED_OUT] * WORLD
    assert [report.error for report in outcome.ranks] == ["no reply at the deadline"] * WORLD
    assert outcome.first_failed == 0
    assert_usable(spread.pool)


@pytest.mark.parametrize("at", [0, 2])
def test_one_that_ends_between_tasks_is_replaced_and_told(spread: Spread, at: int) -> None:
    before, incidents = pids(spread.pool), len(spread.pool.incidents)
    os.kill(before[at], signal.SIGKILL)
    assert all_gone([before[at]])

    assert within_bound(lambda: set(pids(spread.pool)).isdisjoint(before))
    assert spread.pool.incidents[incidents:] == [
        f"world {WORLD}: rank {at} ended after its reply, before the next task"
    ]


def test_what_a_rank_leaves_is_brought_to_the_first_process_when_its_task_fails(spread: Spread) -> None:
    """As the trail of a scenario; of a later task what it leaves then, or nothing."""
    left = spread.pool.directory / "note-rank2"
    spread.pool.run(WORLD, order("leave", name="note-rank2", text="here", ranks=[2]), timeout_s=LONG_S)
    assert not left.exists()

    spread.pool.run(WORLD, order("leave", name="note-rank2", text="there", then="raise", ranks=[2]), timeout_s=LONG_S)

    assert left.read_bytes() == b"there"
    assert not (spread.pool.directory / "note-rank1").exists()


def test_an_interrupted_task_is_ended_everywhere(spread: Spread) -> None:
    before = pids(spread.pool)
    with pytest.raises(KeyboardInterrupt):
        spread.pool.run(
            WORLD, order("interrupt", parent=os.getpid(), ranks=[0], otherwise={"do": "hang"}), timeout_s=LONG_S
        )
    assert_usable(spread.pool)
    assert all_gone(before)


def test_another_world_than_the_jobs_cannot_be_had(spread: Spread) -> None:
    with pytest.raises(ValueError, match="torchrun started 3 processes"):
        spread.pool.run(2, b"", timeout_s=LONG_S)


def test_a_process_whose_ranks_cannot_be_forked_any_more_says_so_at_once(tmp_path: Path) -> None:
    """It failed between two tasks: the next one is answered, and meanwhile the process waits without computing."""
    with (
        Followers(2, tmp_path / "output.txt") as followers,
        SpreadPool(followers.launch, HANDLER, b"", grace_s=GRACE_S) as pool,
    ):
        replies(pool.run(2, order("sum"), timeout_s=LONG_S))
        follower = psutil.Process(followers.processes[0].pid)
        (zygote,) = follower.children()
        zygote.kill()
        assert within_bound(lambda: not follower.children())  # it was seen, and reaped
        with pytest.raises(PoolError, match=r"rank 1: .*zygote process has ended"):
            pool.run(2, order("sum"), timeout_s=LONG_S)


def test_a_process_that_lives_and_never_answers_is_waited_for_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "_START_S", 0.5)
    monkeypatch.setattr(job, "_LEAVE_S", 0.1)
    with (
        Followers(1, Path(os.devnull)) as alone,
        board.Heart(replace(alone.launch, rank=1, world=2)),
        SpreadPool(replace(alone.launch, world=2), HANDLER, b"", backend=NO_GROUP) as pool,
        pytest.raises(PoolError, match=r"rank 1: its process has not started it for 0\.5 s"),
    ):
        pool.run(2, order("echo"), timeout_s=LONG_S)


def test_a_process_that_dies_is_told_and_takes_its_rank_along(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last in this file: nothing runs without it. Not the ranks' doing, so the pool fails, in bounded time."""
    monkeypatch.setattr(board, "_BEAT_S", 0.1)
    monkeypatch.setattr(board, "_SILENT_S", 3.0)
    monkeypatch.setattr(machine, "patience", lambda: 1.0)
    before = pids(spread.pool)
    spread.followers.kill(2)

    said = r"rank 2: the process that torchrun launched for it has not been heard of for \d+ s"
    with pytest.raises(PoolError, match=said):
        spread.pool.run(WORLD, order("sum"), timeout_s=LONG_S)
    assert all_gone([before[2]])
