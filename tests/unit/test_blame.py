"""Which rank is blamed when a world does not get on, and what is told of each: hand-made ends, trails and stacks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from harness import blame
from harness.blame import Stack, without_harness
from harness.drive.trail import Left
from harness.launch.outcome import Activity, Outcome, RankEnd, RankReport
from harness.verdict import Collective, Divergence, Property, RankStatus, RankVerdict, Stage

WORLD = 3
REDUCE = Collective("reduce_scatter", "fp32", 96, (0, 1, 2), 0, "reduce")
NORM = Collective("all_reduce", "fp32", 1, (0, 1, 2), 0, "norm")
BLOCKED_ERROR = "waited without using the processor (no rank made progress for 5.0 s)"

RANK_FRAMES = """\
  File "/x/harness/drive/driver.py", line 300 in _reduce
  File "/x/harness/launch/rank.py", line 130 in _serve
  File "/x/harness/launch/rank.py", line 95 in main
"""
IN_GLOO = f"""\
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007e (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2950 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/my_zero.py", line 41 in reduce_scatter
{RANK_FRAMES}"""
IN_SLEEP = f"""\
Current thread 0x00007e (most recent call first):
  File "/home/u/my_zero.py", line 44 in _pause
  File "/home/u/my_zero.py", line 41 in reduce_scatter
{RANK_FRAMES}"""


def stuck(
    rank: int, activity: Activity = Activity.BLOCKED, stacks: str | None = IN_GLOO, end: RankEnd = RankEnd.STALLED
) -> RankReport:
    return RankReport(rank, end, None, (), BLOCKED_ERROR, "", stacks, activity)


def sent(rank: int) -> RankReport:
    return RankReport(rank, RankEnd.REPLIED, b"", (), None, "", None)


def caused(
    *reports: RankReport,
    lefts: Mapping[int, Left] | None = None,
    found: Divergence | None = None,
    verdicts: Mapping[int, RankVerdict] | None = None,
    first_failed: int | None = None,
) -> Divergence:
    outcome = Outcome(len(reports), reports, 1.0, first_failed)
    return blame.cause(outcome, found, verdicts or {}, lambda rank: (lefts or {}).get(rank, Left()))


def others(rank: int) -> list[int]:
    return [other for other in range(WORLD) if other != rank]


@pytest.mark.parametrize(
    ("status", "found", "state"),
    [
        (RankStatus.DONE, None, "agreed"),
        (RankStatus.DONE, Property.GRADIENT, "differs"),
        (RankStatus.RAISED, Property.GRADIENT, "differs"),  # it could not go on, behind a difference
        (RankStatus.RAISED, Property.OWNERSHIP, "differs"),
        (RankStatus.RAISED, Property.PROGRESS, "raised"),
        (RankStatus.UNSUPPORTED, Property.PROGRESS, "raised"),
        (RankStatus.RAISED, None, "raised"),
    ],
)
def test_a_rank_is_shown_to_have_raised_where_that_is_what_was_seen_first(
    status: RankStatus, found: Property | None, state: str
) -> None:
    first = None if found is None else Divergence(property=found, stage=Stage.REDUCE, step=1, rank=0, message="")
    told = RankVerdict(rank=0, status=status, divergence=first)
    assert blame.place(sent(0), told, None).state == state


@pytest.mark.parametrize("culprit", range(WORLD))
def test_the_rank_that_others_wait_for_is_named_with_what_it_did_not_call(culprit: int) -> None:
    lefts = {rank: Left(0, Stage.NORM, (REDUCE, NORM)) for rank in others(culprit)}
    lefts[culprit] = Left(0, Stage.REDUCE, (REDUCE,))

    found = caused(*(stuck(rank) for rank in range(WORLD)), lefts=lefts)

    assert (found.property, found.rank, found.step, found.stage) == (Property.PROGRESS, culprit, 0, Stage.REDUCE)
    waiting = ", ".join(map(str, others(culprit)))
    assert found.message == (
        f"rank {culprit} made no progress: it {BLOCKED_ERROR}; "
        f"ranks {waiting} wait for its 2nd collective, all_reduce fp32[1] (--stall gives more time)"
    )


@pytest.mark.parametrize("culprit", range(WORLD))
@pytest.mark.parametrize(
    "different",
    [
        {"activity": Activity.STOPPED, "stacks": None},
        {"activity": Activity.COMPUTING},
        {"stacks": IN_SLEEP},
    ],
    ids=["stopped", "computing", "elsewhere"],
)
def test_of_ranks_that_called_the_same_the_one_that_does_not_wait_is_named(
    culprit: int, different: dict[str, object]
) -> None:
    reports = [stuck(rank, **(different if rank == culprit else {})) for rank in range(WORLD)]  # type: ignore[arg-type]

    found = caused(*reports, lefts=dict.fromkeys(range(WORLD), Left(0, Stage.REDUCE, (REDUCE,))))

    assert found.rank == culprit


def test_a_stopped_rank_is_named_before_one_that_is_behind() -> None:
    """What is behind may be so because it waits for the stopped one."""
    lefts = {0: Left(0, Stage.REDUCE, ()), 1: Left(0, Stage.REDUCE, (REDUCE,)), 2: Left(0, Stage.NORM, (REDUCE, NORM))}

    found = caused(stuck(0), stuck(1, Activity.STOPPED), stuck(2), lefts=lefts)

    assert found.rank == 1


def test_a_rank_that_finished_and_says_nothing_is_named_as_such() -> None:
    lefts = {1: Left(0, Stage.GATHER, (REDUCE, NORM), finished=True)}
    verdicts = {rank: RankVerdict(rank=rank, status=RankStatus.DONE, collectives=(REDUCE, NORM)) for rank in (0, 2)}

    found = caused(sent(0), stuck(1, stacks=IN_SLEEP), sent(2), lefts=lefts, verdicts=verdicts)

    assert (found.rank, found.stage) == (1, Stage.GATHER)
    assert found.message.startswith("rank 1 finished the scenario but sent no verdict")


def test_a_rank_that_hung_up_is_not_said_to_need_more_time() -> None:
    said = "closed its connection to the harness, but did not end"
    silent = RankReport(1, RankEnd.TIMED_OUT, None, (), said, "", IN_SLEEP)
    verdicts = {0: RankVerdict(rank=0, status=RankStatus.DONE), 2: RankVerdict(rank=2, status=RankStatus.DONE)}

    found = caused(sent(0), silent, sent(2), lefts={1: Left(finished=True)}, verdicts=verdicts, first_failed=1)

    assert found.rank == 1
    assert found.message == f"rank 1 finished the scenario but sent no verdict: it {said}"


def test_where_all_wait_in_the_same_collective_nobody_is_named() -> None:
    lefts = dict.fromkeys(range(WORLD), Left(0, Stage.REDUCE, (REDUCE,)))

    found = caused(*(stuck(rank) for rank in range(WORLD)), lefts=lefts)

    assert found.rank is None
    assert found.message.startswith("ranks 0, 1, 2 made no progress")
    assert "all of them called their 1st collective, reduce_scatter fp32[96]" in found.message


def test_two_that_do_not_get_on_are_both_told() -> None:
    lefts = {rank: Left(0, Stage.NORM, (REDUCE,)) for rank in (0, 1)}
    lefts[2] = Left(0, Stage.NORM, (REDUCE, NORM))

    found = caused(stuck(0, stacks=IN_SLEEP), stuck(1, stacks=IN_SLEEP), stuck(2), lefts=lefts)

    assert found.rank == 0
    assert found.message == (
        f"ranks 0, 1 made no progress: rank 0: it {BLOCKED_ERROR}; "
        "rank 2 waits for their 2nd collective, all_reduce fp32[1] (--stall gives more time)"
    )


@pytest.mark.parametrize(
    ("waiting", "named", "message"),
    [
        ([0], None, "rank 1 finished the scenario while rank 0 waits in a collective for which nobody comes"),
        ([0, 2], 1, "rank 1 finished the scenario while ranks 0, 2 wait in a collective for which nobody comes"),
        ([2], 2, f"rank 2 made no progress: it {BLOCKED_ERROR} (--stall gives more time)"),
    ],
)
def test_of_ranks_that_wait_and_ranks_that_finished_the_fewer_are_wrong(
    waiting: list[int], named: int | None, message: str
) -> None:
    """In a collective that is not in the logs, as in ``full_master``."""
    world = 2 if waiting == [0] else 3
    done = [rank for rank in range(world) if rank not in waiting]
    verdicts = {rank: RankVerdict(rank=rank, status=RankStatus.DONE, collectives=(REDUCE,)) for rank in done}

    found = caused(
        *(stuck(rank) if rank in waiting else sent(rank) for rank in range(world)),
        lefts=dict.fromkeys(waiting, Left(0, Stage.GATHER, (REDUCE,))),
        verdicts=verdicts,
    )

    assert found.rank == named
    assert found.message.startswith(message)


def test_a_rank_that_others_gave_up_waiting_for_is_named() -> None:
    """By a time-out of the subject's own, before the watchdog's."""
    late = Divergence(
        property=Property.PROGRESS, stage=Stage.NORM, step=0, rank=0, message="Timed out waiting 1000ms for recv"
    )
    verdicts = {0: RankVerdict(rank=0, status=RankStatus.RAISED, divergence=late, collectives=(REDUCE, NORM))}
    reports = [
        RankReport(0, RankEnd.BROKEN, b"", (), None, "", None),
        RankReport(1, RankEnd.ABANDONED, None, (), "ended by the harness: rank 0 had failed", "", IN_SLEEP),
    ]

    found = caused(*reports, found=late, verdicts=verdicts, lefts={1: Left(0, Stage.REDUCE, (REDUCE,))}, first_failed=0)

    assert found.rank == 1
    assert found.message.startswith("rank 1 made no progress: it was still running when rank 0 gave up waiting")


def test_who_only_lost_a_peer_is_not_named_while_another_has_not_ended() -> None:
    """A rank that closed its connections and goes on: the others raise, it is ended after the time of grace."""
    lost = Divergence(property=Property.PROGRESS, stage=Stage.NORM, step=0, rank=0, message="Connection closed by peer")
    verdicts = {0: RankVerdict(rank=0, status=RankStatus.RAISED, divergence=lost, collectives=(REDUCE, NORM))}
    reports = [
        RankReport(0, RankEnd.BROKEN, b"", (), None, "", None),
        RankReport(1, RankEnd.ABANDONED, None, (), "ended by the harness: rank 0 had failed", "", IN_SLEEP),
    ]

    found = caused(*reports, found=lost, verdicts=verdicts, lefts={1: Left(0, Stage.REDUCE, (REDUCE,))}, first_failed=0)

    assert (found.rank, found.stage) == (1, Stage.REDUCE)


def test_a_rank_that_raised_before_another_died_is_the_cause() -> None:
    raised = Divergence(property=Property.PROGRESS, stage=Stage.REDUCE, step=0, rank=0, message="ValueError: planted")
    verdicts = {0: RankVerdict(rank=0, status=RankStatus.RAISED, divergence=raised)}
    reports = [
        RankReport(0, RankEnd.BROKEN, b"", (), None, "", None),
        RankReport(1, RankEnd.KILLED, None, (), "signal 6 (SIGABRT)", "", None),
    ]

    assert caused(*reports, found=raised, verdicts=verdicts, first_failed=0) == raised
    assert caused(*reports, found=raised, verdicts=verdicts, first_failed=1).rank == 1


def test_a_dead_rank_is_told_with_its_last_call() -> None:
    reports = [sent(0), RankReport(1, RankEnd.EXITED, None, (), "exit code 0", "", None), sent(2)]

    found = caused(*reports, lefts={1: Left(0, Stage.NORM, (REDUCE, NORM))}, first_failed=1)

    assert found.message == (
        "rank 1 sent no verdict: exit code 0, after it had called its 2nd collective, all_reduce fp32[1]"
    )


# --- accounts and stacks ----------------------------------------------------------------------------------------------


def test_every_rank_is_accounted_for() -> None:
    calls = (REDUCE,) * 9 + (NORM,)
    verdicts = {0: RankVerdict(rank=0, status=RankStatus.DONE, collectives=calls)}
    found = Divergence(property=Property.PROGRESS, stage=Stage.NORM, step=0, rank=1, message="planted")
    outcome = Outcome(2, (sent(0), stuck(1)), 1.0, None)

    first, second = blame.accounts(outcome, found, verdicts, lambda _: Left(0, Stage.NORM, (REDUCE,)))

    assert (first.cause, first.end, first.num_collectives) == (False, "sent its verdict", 10)
    assert len(first.last_collectives) == 8
    assert first.last_collectives[-1] == "10th: all_reduce fp32[1] among ranks 0, 1, 2 (norm of step 0)"
    assert (second.cause, second.end) == (True, BLOCKED_ERROR)
    assert second.where == "my_zero.py:41 in reduce_scatter"
    assert second.stacks == IN_GLOO


def test_the_thread_that_drives_the_subject_is_found_among_others() -> None:
    in_gloo, in_sleep = Stack.of(IN_GLOO), Stack.of(IN_SLEEP)

    assert in_gloo is not None
    assert in_sleep is not None
    assert (in_gloo.in_collective, in_sleep.in_collective) == (True, False)
    assert in_sleep.subject_frame == "my_zero.py:44 in _pause"
    assert Stack.of('Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n') is None
    assert Stack.of(None) is None


def test_frames_of_the_harness_are_left_out_for_people() -> None:
    assert without_harness(IN_SLEEP).splitlines() == IN_SLEEP.splitlines()[:3]


def test_the_wait_for_an_asynchronous_collective_counts_as_one() -> None:
    waiting = IN_SLEEP.replace("in _pause", "in wait")
    stack = Stack.of(waiting)

    assert stack is not None
    assert stack.in_collective
