"""Worlds that cannot go on: what is told, of whom, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.sim.choices import Schedule
from harness.sim.scheduler import RankStopped, Stop
from harness.sim.world import SimWorld, WorldError, WorldOutcome
from tests.ranks.sim_programs import Program, Run, draw
from tests.renamed import all_gather_single, reduce_scatter_single

pytestmark = pytest.mark.usefixtures("nothing_left")

SEEDS = range(6)
Ranks = Callable[[int], Any]


def stopped(world: int, function: Ranks, seed: int = 0, schedule: Schedule = Schedule.RANDOM) -> Stop:
    """Why it stopped; checked on the way: each rank says so, and the same world runs again, as if nothing had been."""
    simulated = SimWorld(world, seed=seed, schedule=schedule)
    outcome = simulated.run(function)
    stop = outcome.stop
    assert stop is not None
    assert [thread for thread in threading.enumerate() if thread.name.startswith("rank")] == []
    with pytest.raises(WorldError):
        outcome.values()
    again = simulated.run(lambda rank: dist.barrier())
    assert again.stop is None
    assert again.values() == [None] * world
    return stop


def lone_root(rank: int) -> None:
    dist.broadcast(torch.ones(2), src=1 if rank == 2 else 0)


def lone_op(rank: int) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)


def lone_length(rank: int) -> None:
    dist.all_reduce(torch.ones(3 if rank == 2 else 2))


def lone_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.bfloat16 if rank == 2 else torch.float32))


def lone_kind(rank: int) -> None:
    dist.barrier() if rank == 2 else dist.all_reduce(torch.ones(2))


def lone_skip(rank: int) -> None:
    if rank != 2:
        dist.all_reduce(torch.ones(2))
    all_gather_single(torch.empty(8), torch.ones(2))


def lone_async_length(rank: int) -> None:
    dist.all_reduce(torch.ones(3 if rank == 2 else 2), async_op=True).wait()


def lone_coalesced(rank: int) -> None:
    work = dist.distributed_c10d._get_default_group().allreduce_coalesced(
        [torch.ones(2), torch.ones(2 if rank == 2 else 1)]
    )
    work.wait()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("function", "usual", "other"),
    [
        (lone_root, "broadcast fp32[2] root 0", "broadcast fp32[2] root 1"),
        (lone_op, "all_reduce fp32[2]", "all_reduce fp32[2] with MAX"),
        (lone_length, "all_reduce fp32[2]", "all_reduce fp32[3]"),
        (lone_dtype, "all_reduce fp32[2]", "all_reduce bf16[2]"),
        (lone_kind, "all_reduce fp32[2]", "barrier"),
        (lone_skip, "all_reduce fp32[2]", "all_gather fp32[2]"),
        (lone_async_length, "all_reduce fp32[2]", "all_reduce fp32[3]"),
        (lone_coalesced, "all_reduce_coalesced fp32[2+1]", "all_reduce_coalesced fp32[2 x 2]"),
    ],
)
def test_the_one_rank_that_calls_something_else(function: Ranks, usual: str, other: str, seed: int) -> None:
    stop = stopped(4, function, seed)

    assert (stop.kind, stop.ranks) == ("mismatch", (2,))
    assert f"ranks 0, 1, 3 call {usual}" in stop.message
    assert f"rank 2 calls {other}" in stop.message
    assert "collective 1 on the default group" in stop.message
    assert set(stop.stacks) == {0, 1, 2, 3}
    assert all(f"in {function.__name__}" in stack for stack in stop.stacks.values())


def test_of_two_that_differ_nobody_can_tell_who_is_wrong() -> None:
    stop = stopped(2, lambda rank: dist.all_reduce(torch.ones(2 + rank)))

    assert (stop.kind, stop.ranks) == ("mismatch", ())
    assert "rank 0 calls all_reduce fp32[2], rank 1 calls all_reduce fp32[3]" in stop.message


def test_of_ranks_that_all_differ_nobody_can_tell_who_is_wrong() -> None:
    stop = stopped(3, lambda rank: dist.all_reduce(torch.ones(2 + rank)))

    assert (stop.kind, stop.ranks) == ("mismatch", ())


def test_the_message_names_the_group() -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([1, 2, 3])
        if rank:
            dist.all_reduce(torch.ones(1), group=group)
            dist.all_reduce(torch.ones(2 if rank == 3 else 1), group=group)

    stop = stopped(4, ranks)

    assert (stop.kind, stop.ranks) == ("mismatch", (3,))
    assert stop.message == (
        "the ranks call different collectives: ranks 1, 2 call all_reduce fp32[1], rank 3 calls all_reduce fp32[2], "
        "collective 2 on group 1 of ranks 1, 2, 3"
    )


def test_splits_that_do_not_fit() -> None:
    def ranks(rank: int) -> None:
        sent = [1, 2] if rank == 0 else [1, 1]
        received = [1, 1]
        dist.all_to_all_single(torch.empty(2), torch.ones(sum(sent)), received, sent)

    stop = stopped(2, ranks)

    assert (stop.kind, stop.ranks) == ("mismatch", ())
    assert "rank 0 sends 2 elements to rank 1, which expects 1" in stop.message


@pytest.mark.parametrize("seed", SEEDS)
def test_on_another_group(seed: int) -> None:
    """Rank 1 calls it on a group of its own: the others wait for it."""

    def ranks(rank: int) -> None:
        pair = dist.new_group([1, 2])
        dist.all_reduce(torch.ones(2), group=pair if rank == 1 else None)

    stop = stopped(3, ranks, seed)

    assert (stop.kind, stop.ranks) == ("deadlock", ())
    assert stop.waits[1] == "in all_reduce fp32[2] (collective 1 on group 1 of ranks 1, 2) for rank 2"
    assert stop.waits[0] == "in all_reduce fp32[2] (collective 1 on the default group) for rank 1"


@pytest.mark.parametrize("seed", SEEDS)
def test_two_groups_in_another_order(seed: int) -> None:
    def swaps(rank: int) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (one, two) if rank == 0 else (two, one):
            dist.all_reduce(torch.ones(5), group=group)

    stop = stopped(2, swaps, seed)

    assert (stop.kind, stop.ranks) == ("deadlock", ())
    assert stop.waits == {
        0: "in all_reduce fp32[5] (collective 1 on group 1 of ranks 0, 1) for rank 1",
        1: "in all_reduce fp32[5] (collective 1 on group 2 of ranks 0, 1) for rank 0",
    }
    for rank in (0, 1):
        assert f"rank {rank} waits {stop.waits[rank]}" in stop.message
        assert "in swaps" in stop.stacks[rank]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_ends_early(seed: int) -> None:
    def ranks(rank: int) -> None:
        dist.barrier()
        if rank != 1:
            dist.all_reduce(torch.ones(2))

    stop = stopped(3, ranks, seed)

    assert (stop.kind, stop.ranks) == ("deadlock", (1,))
    assert "rank 0 waits in all_reduce fp32[2] (collective 2 on the default group) for rank 1" in stop.message
    assert "rank 1 had ended by then" in stop.message
    assert set(stop.stacks) == set(stop.waits) == {0, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_raises(seed: int) -> None:
    def ranks(rank: int) -> None:
        if rank == 1:
            raise LookupError("no such shard")
        dist.all_reduce(torch.ones(2))

    outcome = SimWorld(3, seed=seed).run(ranks)

    assert outcome.stop is not None
    assert (outcome.stop.kind, outcome.stop.ranks) == ("deadlock", (1,))
    assert [ended.stopped for ended in outcome.ranks] == [True, False, True]
    error = outcome.ranks[1].error
    assert isinstance(error, LookupError)
    assert "in ranks" in outcome.ranks[1].detail
    with pytest.raises(WorldError, match="rank 1 raised LookupError"):
        outcome.values()


def test_a_rank_that_raises_alone_stops_nobody() -> None:
    def ranks(rank: int) -> int:
        dist.barrier()
        if rank == 1:
            raise LookupError("no such shard")
        return rank

    outcome = SimWorld(3).run(ranks)

    assert outcome.stop is None
    assert [ended.value for ended in outcome.ranks] == [0, None, 2]
    assert [type(ended.error) for ended in outcome.ranks] == [type(None), LookupError, type(None)]


def test_a_rank_that_exits() -> None:
    def ranks(rank: int) -> None:
        if rank == 1:
            raise SystemExit(3)

    outcome = SimWorld(2).run(ranks)

    assert isinstance(outcome.ranks[1].error, SystemExit)
    assert not outcome.ranks[1].stopped


@pytest.mark.parametrize("schedule", Schedule)
def test_a_rank_that_swallows_everything_and_goes_on(schedule: Schedule) -> None:
    """It is told again at each call, and it does not count as having come to its end."""
    caught = 0

    def ranks(rank: int) -> str:
        nonlocal caught
        if rank == 2:
            return "ended"
        store = dist.distributed_c10d._get_default_store()
        for call in (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2), async_op=True),
            lambda: dist.send(torch.ones(2), 1 - rank),
            lambda: dist.irecv(torch.ones(2), 1 - rank),
            lambda: dist.new_group([0, 1]),
            lambda: store.get("key"),
            lambda: store.set("key", "value"),
            lambda: dist.barrier(),
        ):
            with contextlib.suppress(RankStopped):
                call()
                return "not told"
            caught += 1
        return "survived"

    outcome = SimWorld(3, schedule=schedule).run(ranks)

    assert outcome.stop is not None
    assert (outcome.stop.kind, outcome.stop.ranks) == ("deadlock", (2,))
    assert [(ended.value, ended.stopped) for ended in outcome.ranks] == [(None, True)] * 2 + [("ended", False)]
    assert caught == 16


def test_what_a_rank_does_on_its_way_out() -> None:
    """Blocks that clean up run; a collective in them is told the same again, and hides nothing."""
    cleaned: list[int] = []

    def ranks(rank: int) -> None:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        try:
            if rank != 1:
                all_gather_single(torch.empty(6), torch.ones(2))
            else:
                dist.barrier()
        finally:
            cleaned.append(rank)
            work.wait()
            dist.barrier()
            cleaned.append(-1)

    stop = stopped(3, ranks)

    assert (stop.kind, stop.ranks) == ("mismatch", (1,))
    assert "all_gather fp32[2]" in stop.message
    assert sorted(cleaned) == [0, 1, 2]


def test_a_refused_call_is_the_ranks_own_error() -> None:
    """One sentence, with what was expected and got; the others then wait for the rank in vain."""
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: dist.all_reduce(torch.ones(4).reshape(2, 2).t()),
            r"all_reduce of a tensor of shape \(2, 2\) with str",
        ),
        (lambda: dist.broadcast(torch.ones(2, dtype=torch.int16), 0), "broadcast of torch.int16: gloo's collectives"),
        (lambda: dist.all_reduce(torch.eye(2).to_sparse()), "all_reduce of a sparse tensor"),
        (lambda: dist.broadcast(torch.ones(2), group_src=5), "broadcast: invalid root 5, expected 0 to 1"),
        (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), "all_gather: expected 2 tensors, one a rank, got 1"),
        (
            lambda: dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2)),
            r"all_gather: expected torch.float32 of shape \(2,\) for rank 1, got torch.float32 of shape \(3,\)",
        ),
        (
            lambda: all_gather_single(torch.ones(5), torch.ones(2)),
            r"all_gather: expected .* got 1|of shape \(5,\)",
        ),
        (
            lambda: reduce_scatter_single(torch.ones(2), torch.ones(3)),
            "reduce_scatter: expected an input of 4 row",
        ),
        (
            lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2)]),
            "reduce_scatter: expected 2 input tensors, one a rank, got 1",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(4), torch.ones(3)),
            "3 input rows do not divide evenly over 2 ranks",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [1, 1]),
            r"expected 2 input splits that add up to 4 rows, got \[1, 1\]",
        ),
        (
            lambda: dist.all_to_all([torch.ones(1), torch.ones(2)], [torch.ones(1), torch.ones(2)]),
            r"all_to_all: gloo takes tensors of one type and shape only, here torch.float32 of shape \(1,\), got",
        ),
        (lambda: dist.send(torch.ones(4)[::2], 1), r"send of a tensor with strides \(2,\)"),
        (lambda: dist.send(torch.ones(2), group_dst=7), "send to rank 7 of a group of 2, expected 0 to 1"),
    ]

    def ranks(rank: int) -> int:
        if rank == 0:
            for call, sentence in refused:
                with pytest.raises((RuntimeError, ValueError), match=sentence):
                    call()
        dist.barrier()
        return len(refused)

    ended = SimWorld(2).run(ranks)
    assert [rank.value for rank in ended.ranks] == [14, 14]
    # What gloo takes is not the class's mistake: whoever caught the sentence has not heard the last of it.
    (sentence,) = ended.refusals
    assert sentence.startswith("all_reduce of a sparse tensor: a simulated world takes dense tensors only")


def test_from_within_a_backward_pass() -> None:
    """A rank without a batch leaves the others in the C++ of DDP: they come out, and where they were is told."""

    def train(rank: int) -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(3):
            if rank == 2 and step == 2:
                return
            model(torch.ones(2, 4)).sum().backward()

    stop = stopped(3, train)

    assert (stop.kind, stop.ranks) == ("deadlock", (2,))
    assert all("all_reduce" in stop.waits[rank] and "in train" in stop.stacks[rank] for rank in (0, 1))


def test_the_first_reason_counts() -> None:
    """Two mismatches, one after the other: the second is a consequence, if anything."""

    def ranks(rank: int) -> None:
        pair = dist.new_group([0, 1])
        try:
            dist.all_reduce(torch.ones(3 if rank == 2 else 2))
        finally:
            if rank < 2:
                dist.all_reduce(torch.ones(rank + 1), group=pair)

    stop = stopped(3, ranks)

    assert (stop.kind, stop.ranks) == ("mismatch", (2,))
    assert "the default group" in stop.message


def test_who_was_woken_already_waits_no_more() -> None:
    """A mismatch while a rank has got what it waited for, but has not had its turn since."""

    def ranks(rank: int) -> None:
        left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=left)
        if rank > 0:
            dist.all_reduce(torch.ones(rank), group=right)

    for seed in range(40):
        stop = stopped(3, ranks, seed)
        assert (stop.kind, stop.ranks) == ("mismatch", ())
        assert "on group 2 of ranks 1, 2" in stop.message
        assert all(text.startswith("in all_reduce fp32") for text in stop.waits.values())


def deviation(seed: int, program: Program, rank: int) -> Program | None:
    """What one rank does instead of the program; None where that would be no error, or one of the rank's own."""
    rng = random.Random(seed)
    steps = copy.deepcopy(program.steps)
    index = rng.randrange(len(steps))
    step, how = steps[index], rng.choice(["skip", "length", "kind", "end"])
    members = program.groups[step.group] if step.group >= 0 else [0, 1, 2, 3]
    if rank not in members or len(members) == 1:
        return None
    if how == "skip":
        del steps[index]
    elif how == "end":
        del steps[index:]
    elif how == "length" and step.kind not in ("barrier", "objects", "all_to_all_uneven"):
        step.length += 1
    elif how == "kind" and step.kind != "all_reduce":
        step.kind = "all_reduce"
    else:
        return None
    return Program(program.groups, steps, program.seed)


def test_one_rank_of_a_random_program_does_something_else() -> None:
    """It always stops, nobody else is accused, and nobody sees an error that is not one."""
    named = told = 0
    for seed in range(120):
        program, deviating = draw(seed, 4, 12), seed % 4
        for step in program.steps:
            step.length = min(step.length, 8)
        other = deviation(seed, program, deviating)
        if other is None:
            continue

        def ranks(rank: int, program: Program = program, other: Program = other, deviating: int = deviating) -> None:
            Run(other if rank == deviating else program, rank).run()

        outcome = SimWorld(4, seed=seed).run(ranks)
        assert [ended.error for ended in outcome.ranks] == [None] * 4, seed
        assert outcome.stop is not None, seed
        assert set(outcome.stop.ranks) <= {deviating}, (seed, outcome.stop.message)
        told += 1
        named += bool(outcome.stop.ranks)
    assert told > 50
    assert named > told / 3


def test_a_deadlock_of_256_ranks() -> None:
    def ranks(rank: int) -> None:
        dist.barrier()
        if rank != 200:
            dist.barrier()

    stop = stopped(256, ranks)

    assert (stop.kind, stop.ranks) == ("deadlock", (200,))
    assert len(stop.stacks) == 255


def test_a_world_that_is_interrupted() -> None:
    """As by Ctrl-C: the ranks unwind first."""
    unwound: list[int] = []

    def ranks(rank: int) -> None:
        if rank == 0:
            dist.barrier()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            for _ in range(100_000):
                dist.barrier()
        except RankStopped:
            unwound.append(rank)
            raise

    with pytest.raises(KeyboardInterrupt):
        SimWorld(3).run(ranks)

    assert sorted(unwound) in ([0, 1, 2], [1, 2])
    assert SimWorld(3).run(lambda rank: dist.barrier()).stop is None


def test_a_world_without_enough_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    ran: list[int] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name == "rank2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="a world of 4 ranks needs as many threads; there is none for rank 2"):
        SimWorld(4).run(ran.append)
    monkeypatch.undo()

    assert ran == []
    outcome: WorldOutcome = SimWorld(4).run(lambda rank: rank)
    assert outcome.values() == [0, 1, 2, 3]
