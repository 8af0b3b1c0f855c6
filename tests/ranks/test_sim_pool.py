"""Simulated worlds from outside: whatever becomes of the process (which only acts as one), each rank has its report."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.launch.outcome import Activity, Outcome, PoolError, RankEnd, Told, Watch
from harness.sim.pool import SimPool
from harness.sim.turn import Turn
from tests.ranks.test_pool import all_gone

HOURS_S = 3600.0  # Reached by no task here.
LIMIT_S = 1.5
NEVER_S = 1e6
RANKS = [(1, 0), (3, 0), (3, 1), (3, 2)]


@pytest.fixture(scope="module")
def sim() -> Iterator[SimPool]:
    with SimPool("tests.ranks.sim_child:start") as started:
        yield started


def run(sim: SimPool, world: int, watch: Watch | None = None, timeout_s: float = HOURS_S, **order: Any) -> Outcome:
    return sim.run(world, json.dumps({"world": world, **order}).encode(), timeout_s=timeout_s, watch=watch)


def pid(sim: SimPool, world: int = 1) -> int:
    return int((run(sim, world, do="reply").ranks[0].reply or b"").split()[0])


def ends(outcome: Outcome) -> list[RankEnd]:
    return [report.end for report in outcome.ranks]


def require_others_went_along(outcome: Outcome, rank: int, said: str) -> None:
    """All ranks but this one were fine, and it is said why they did not end."""
    assert (outcome.first_failed, outcome.told, outcome.trace) == (rank, None, None)
    for report in outcome.ranks:
        if report.rank != rank:
            assert (report.end, report.reply, report.output) == (RankEnd.ABANDONED, None, "")
            assert said in (report.error or "")


# --- a reply ----------------------------------------------------------------------------------------------------------


def test_every_world_is_run_by_one_process_which_has_no_group(sim: SimPool) -> None:
    process = pid(sim)
    for world in (1, 3, 256):
        outcome = run(sim, world, do="reply")
        assert [report.reply for report in outcome.ranks] == [f"{process} rank {n}".encode() for n in range(world)]
        assert (outcome.world, outcome.replied, outcome.first_failed, outcome.told) == (world, True, None, None)
        assert outcome.trace == "a trace"
    assert run(sim, 1, do="group").ranks[0].reply == b"False none cpu"
    assert {sim.home(world) for world in (1, 3, 256)} == {1}


def test_each_end_that_the_world_reports_is_that_ranks(sim: SimPool) -> None:
    parts = [
        {"end": "replied", "payload": "YQ==", "output": "printed"},
        {"end": "broken", "payload": "Yg==", "error": "e"},
        {"end": "deadlocked", "error": "waits for rank 1", "stacks": "Thread 0x01"},
        {"end": "abandoned"},
        {"end": "muted"},
    ]
    told = {"kind": "deadlock", "message": "nobody comes", "ranks": [1]}

    outcome = run(sim, 5, reply={"ranks": parts, "trace": "t", "first_failed": 1, "told": told})

    assert ends(outcome) == [
        RankEnd.REPLIED,
        RankEnd.BROKEN,
        RankEnd.DEADLOCKED,
        RankEnd.ABANDONED,
        RankEnd.DEADLOCKED,
    ]
    assert [report.reply for report in outcome.ranks] == [b"a", b"b", None, None, None]
    assert outcome.ranks[0].output == "printed"
    assert (outcome.ranks[2].error, outcome.ranks[2].stacks) == ("waits for rank 1", "Thread 0x01")
    assert outcome.ranks[4].error == "keeps its verdict for itself, for ever"
    assert (outcome.first_failed, outcome.trace) == (1, "t")
    assert outcome.told == Told("deadlock", "nobody comes", (1,))


REPLY = {"ranks": [{"end": "replied", "payload": "YQ=="}] * 2, "trace": "t", "first_failed": None, "told": None}


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"raw": "no message"}, "sent makes no sense"),
        ({"reply": {**REPLY, "ranks": [*REPLY["ranks"], {"end": "muted"}]}}, "a reply of 3 ranks: expected 2"),
        ({"reply": {**REPLY, "ranks": [{"end": "replied"}] * 2}}, "rank 0 replied without a payload"),
        ({"reply": {**REPLY, "ranks": [{"end": "muted", "payload": "YQ=="}] * 2}}, "rank 0 muted with a payload"),
        ({"reply": {**REPLY, "ranks": [{"end": "muted"}] * 2}}, r"ranks \[0, 1\] did not reply, and none of them"),
        ({"reply": {**REPLY, "first_failed": 2}}, "it names ranks"),
        ({"reply": {**REPLY, "told": {"kind": "mismatch", "message": "", "ranks": [-1]}}}, "it names ranks"),
    ],
)
def test_a_reply_that_is_none_of_this_world_is_no_verdict(sim: SimPool, order: dict[str, Any], said: str) -> None:
    with pytest.raises(PoolError, match=said):
        run(sim, 2, **order)
    assert run(sim, 2, do="reply").replied


def test_a_process_that_wants_to_be_replaced_is(sim: SimPool) -> None:
    before = pid(sim)

    outcome = run(sim, 2, do="break")

    assert [report.reply for report in outcome.ranks] == [b"kept"] * 2
    assert pid(sim) != before


# --- no reply ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(
    ("do", "end", "error"),
    [
        ("exit", RankEnd.EXITED, "exit code 3"),
        ("kill", RankEnd.KILLED, "signal 9 (SIGKILL)"),
        ("crash", RankEnd.KILLED, "signal 11 (SIGSEGV)"),
    ],
)
def test_the_rank_that_had_its_turn_ended_the_process(
    sim: SimPool, world: int, rank: int, do: str, end: RankEnd, error: str
) -> None:
    outcome = run(sim, world, do=do, rank=rank, event="seen before")

    culprit = outcome.ranks[rank]
    assert (culprit.end, culprit.error, culprit.reply, culprit.events) == (end, error, None, (b"seen before",))
    assert {"exit": "goodbye", "kill": "", "crash": "in crashes"}[do] in culprit.output
    require_others_went_along(outcome, rank, f"in the turn of rank {rank}")
    assert all(report.events == () for report in outcome.ranks if report.rank != rank)
    assert run(sim, world, do="reply").replied


def test_of_a_crash_among_many_threads_the_stack_is_shown(sim: SimPool) -> None:
    """Of all threads faulthandler would show the hundred newest."""
    output = run(sim, 150, do="crash", rank=3).ranks[3].output

    assert "in crashes" in output
    assert "in wait_for_turn" not in output


def test_who_ended_a_process_in_which_no_rank_had_its_turn_is_not_known(sim: SimPool) -> None:
    outcome = run(sim, 2, do="exit", rank=1, nobody=True)

    assert ends(outcome) == [RankEnd.EXITED, RankEnd.ABANDONED]
    assert outcome.ranks[0].error == "exit code 3, while no rank had its turn"


def test_a_turn_of_an_earlier_task_is_forgotten(sim: SimPool) -> None:
    """The process that dies before the ranks begin: nobody's turn, and not the one of last time."""
    assert run(sim, 3, do="exit", rank=2).first_failed == 2

    outcome = run(sim, 3, do="raise")

    assert ends(outcome) == [RankEnd.RAISED, RankEnd.ABANDONED, RankEnd.ABANDONED]
    assert (outcome.ranks[0].error or "").endswith("ZeroDivisionError: planted\n")


@pytest.mark.parametrize(
    ("rank", "do", "activity", "error"),
    [
        (0, "wait", Activity.BLOCKED, "waited without using the processor"),
        (2, "loop", Activity.COMPUTING, "of processor time without progress"),
        (1, "stop", Activity.STOPPED, "was stopped by SIGSTOP or a debugger"),
    ],
)
def test_the_rank_that_has_its_turn_has_stalled(
    sim: SimPool, rank: int, do: str, activity: Activity, error: str
) -> None:
    """Each rank is told where it is, by its own thread alone."""
    outcome = run(sim, 3, Watch(lambda _: None, LIMIT_S, LIMIT_S), do=do, rank=rank)

    stalled = outcome.ranks[rank]
    assert (stalled.end, stalled.activity) == (RankEnd.STALLED, activity)
    assert error in (stalled.error or "")
    require_others_went_along(outcome, rank, f"ended by the harness: rank {rank}, which had its turn, did not get on")
    others = [report.stacks for report in outcome.ranks if report.rank != rank]
    if do == "stop":
        assert "state T" in (stalled.stacks or "")
        assert others == [None, None]
    else:
        function = {"wait": "in waits_alone", "loop": "in loops"}[do]
        assert function in (stalled.stacks or "")
        assert "in rank_waits" not in (stalled.stacks or "")
        assert all("in wait_for_turn" in (text or "") and function not in (text or "") for text in others)


def test_a_time_out_is_the_running_ranks(sim: SimPool) -> None:
    outcome = run(sim, 2, timeout_s=LIMIT_S, do="loop", rank=1)

    assert ends(outcome) == [RankEnd.ABANDONED, RankEnd.TIMED_OUT]
    assert "in loops" in (outcome.ranks[1].stacks or "")


@pytest.mark.parametrize("rank", [3, 255])
def test_a_rank_among_hundreds_is_told_as_well(sim: SimPool, rank: int) -> None:
    """Python shows the stacks of the hundred newest threads."""
    outcome = run(sim, 256, Watch(lambda _: None, LIMIT_S, NEVER_S), do="wait", rank=rank)

    stacks = outcome.ranks[rank].stacks or ""
    require_others_went_along(outcome, rank, f"rank {rank}, which had its turn")
    assert ("in waits_alone" in stacks) == (rank == 255)
    assert ("its thread is not among those that Python showed" in stacks) == (rank == 3)


def test_progress_is_another_turn_or_that_of_whoever_has_it(sim: SimPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    seen: list[Watch] = []
    process = sim._process
    assert run(sim, 3, do="reply").replied
    turn = Turn(sim.directory, 3)

    def canned(world: int, task: bytes, *, timeout_s: float, watch: Watch) -> Any:
        seen.append(watch)
        return process_run(world, task, timeout_s=timeout_s)

    process_run = process.run
    monkeypatch.setattr(process, "run", canned)
    outcome = run(sim, 3, Watch(lambda rank: asked.append(rank) or len(asked), 2.0, 3.0), do="reply")
    assert outcome.replied
    watch = seen[0]
    moved = []
    for rank in (0, 2, None):
        turn.enter(rank)
        moved.append(watch.moved(0))

    assert (watch.blocked_s, watch.computing_s) == (2.0, 3.0)
    assert asked == [0, 2, 0]
    assert len(set(moved)) == 3


# --- between tasks ----------------------------------------------------------------------------------------------------


def test_a_process_that_ends_after_its_reply_is_an_incident(sim: SimPool) -> None:
    before, num_before = pid(sim), len(sim.incidents)

    os.kill(before, signal.SIGKILL)
    assert all_gone([before])
    assert pid(sim, 2) != before

    assert sim.incidents[num_before:] == [
        "the process that all ranks of a simulated world share ended after its reply, before the next task"
    ]


def test_a_recycled_process_is_replaced_without_an_incident(sim: SimPool) -> None:
    before, num_before = pid(sim), len(sim.incidents)

    sim.recycle(3)
    sim.warm([])
    sim.warm([2, 3])

    assert sim.log_path(3, 1).exists()
    assert pid(sim, 3) != before
    assert len(sim.incidents) == num_before


def test_nothing_is_left_of_a_pool_that_was_closed() -> None:
    with SimPool("tests.ranks.sim_child:start") as pool:
        process = pid(pool)
        directory = pool.directory
    pool.close()

    assert not directory.exists()
    assert not Path(f"/proc/{process}/cmdline").exists()
    with pytest.raises(PoolError, match="this pool is closed"):
        run(pool, 1, do="reply")
