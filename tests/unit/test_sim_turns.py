"""Turns of a simulated world: one rank runs at a time, the seed says which, and a rank is one thread."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.sim.choices import Schedule, SumOrder
from harness.sim.scheduler import ForeignThreadError
from harness.sim.world import SimWorld, Watcher, WorldOutcome
from tests.renamed import reduce_scatter_single
from tests.support import sampled

pytestmark = pytest.mark.usefixtures("nothing_left")


def outcome(world: int, function: Callable[[int], Any], seed: int = 0, **choices: Any) -> WorldOutcome:
    return SimWorld(world, seed=seed, **choices).run(function)


def mixture(rank: int) -> list[Tensor]:
    """Collectives of many kinds, some on groups, some asynchronous, on data that rounds."""
    generator = torch.Generator().manual_seed(rank)
    groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3, 4])]
    results: list[Tensor] = []
    for step in range(6):
        tensor = torch.randn(40, generator=generator)
        works = [dist.all_reduce(tensor, async_op=True)]
        for number, group in enumerate(groups):
            if dist.get_rank(group) >= 0:
                other = torch.randn(12 * (number + 1), generator=generator)
                works.append(dist.all_reduce(other, group=group, async_op=True))
                results.append(other)
        if rank in (0, 1):
            message = torch.randn(3, generator=generator)
            dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
            results.append(message)
        for work in works if step % 2 else reversed(works):
            work.wait()
        piece = torch.empty(8)
        reduce_scatter_single(piece, tensor)
        results += [tensor, piece]
    return results


def bits(ended: WorldOutcome) -> list[Any]:
    return [[tensor.tolist() for tensor in of_rank] for of_rank in ended.values()]


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("order", SumOrder)
def test_the_same_seed_gives_the_same_turns_and_bits(order: SumOrder, schedule: Schedule) -> None:
    one = outcome(5, mixture, 7, order=order, schedule=schedule)
    two = outcome(5, mixture, 7, order=order, schedule=schedule)

    assert bits(one) == bits(two)
    assert (one.trace, one.num_turns) == (two.trace, two.num_turns)
    assert one.num_turns > 5 * 6


def test_the_same_seed_gives_the_same_turns_in_another_process() -> None:
    """Nothing of it comes from the order of a set, an address or a hash."""
    program = "from tests.unit.test_sim_turns import *; print(outcome(5, mixture, 7).trace)"
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([os.curdir, *sys.path])},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout.strip()
        for seed in sampled(("1", "2"), every=2)
    }
    assert traces == {outcome(5, mixture, 7).trace}


def test_other_seeds_give_other_turns_and_the_same_bits() -> None:
    """In the ring order the bits are gloo's, whoever comes first."""
    runs = [outcome(5, mixture, seed) for seed in range(10)]

    assert len({run.trace for run in runs}) == 10  # Of the many thousand interleavings there are.
    assert all(bits(run) == bits(runs[0]) for run in runs)


def test_in_lockstep_the_seed_changes_nothing() -> None:
    runs = [outcome(5, mixture, seed, schedule=Schedule.LOCKSTEP) for seed in range(3)]

    assert len({run.trace for run in runs}) == 1
    assert all(bits(run) == bits(runs[0]) for run in runs)


def test_in_lockstep_the_next_rank_in_order_runs() -> None:
    turns: list[int] = []

    class Recorder(Watcher):
        def enter(self, rank: int) -> None:
            turns.append(rank)

    def ranks(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))

    world = SimWorld(3, schedule=Schedule.LOCKSTEP, watcher=Recorder())
    assert world.run(ranks).stop is None
    # Rank 2 comes last to the first, goes on to the second, and waits there for the others.
    assert turns == [0, 1, 2, 0, 1, 2, 0] or turns[:5] == [0, 1, 2, 0, 1]


def test_orders_of_sums_differ_where_sums_round() -> None:
    """And each is what it says: rank adds from the first to the last; the seed changes the random one only."""
    rows = [torch.randn(300, generator=torch.Generator().manual_seed(rank)) for rank in range(6)]

    def ranks(rank: int) -> Tensor:
        tensor = rows[rank].clone()
        dist.all_reduce(tensor)
        return tensor

    def total(order: SumOrder, seed: int = 0) -> Tensor:
        values = outcome(6, ranks, seed, order=order).values()
        assert all(torch.equal(value, values[0]) for value in values)
        return values[0]

    in_rank_order = rows[0].clone()
    for row in rows[1:]:
        in_rank_order += row
    results = {order: total(order) for order in SumOrder}
    assert torch.equal(results[SumOrder.RANK], in_rank_order)
    assert len({tuple(result.tolist()) for result in results.values()}) == 4
    for order in SumOrder:
        assert torch.equal(total(order, 1), results[order]) == (order is not SumOrder.RANDOM)
    exact = torch.stack(rows).double().sum(0)
    # Five additions of numbers whose partial sums stay below 32: each errs by at most half a unit of 2^-19.
    assert all((result.double() - exact).abs().max() <= 5 * 2.0**-20 for result in results.values())


def test_one_rank_runs_at_a_time() -> None:
    """A counter that every rank reads, changes slowly and writes, without a lock; and nobody else runs meanwhile."""
    counter, inside = 0, 0

    def ranks(rank: int) -> None:
        nonlocal counter, inside
        for _ in range(1000):
            inside += 1
            seen = counter
            assert inside == 1
            sum(range(50))
            counter = seen + 1
            inside -= 1
            dist.barrier()

    assert outcome(4, ranks).values() == [None] * 4
    assert counter == 4000


def test_each_rank_has_a_state_of_torch_of_its_own() -> None:
    """Whoever's turn it is finds its own groups, and gradient modes stay in their thread."""

    def ranks(rank: int) -> bool:
        modes: list[Any] = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]
        with modes[rank]():
            for _ in range(20):
                assert dist.get_rank() == rank
                assert dist.group.WORLD.rank() == rank
                assert torch.is_grad_enabled() == (rank == 0)
                assert torch.is_inference_mode_enabled() == (rank == 2)
                dist.barrier()
        return True

    assert outcome(3, ranks).values() == [True] * 3


def test_a_collective_from_a_thread_of_the_class() -> None:
    """None that starts in a rank may call one, whoever's turn it is."""
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), async_op=True),
        lambda: dist.barrier(),
        lambda: dist.isend(torch.ones(1), 1),
        lambda: dist.distributed_c10d._get_default_store().set("key", "value"),
        lambda: dist.distributed_c10d._get_default_store().get("key"),
        lambda: dist.distributed_c10d._get_default_store().check(["key"]),
    ]

    def ranks(rank: int) -> list[BaseException]:
        caught: list[BaseException] = []

        def elsewhere() -> None:
            for call in calls:
                try:
                    call()
                except BaseException as error:  # noqa: BLE001
                    caught.append(error)

        if rank == 0:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        dist.barrier()
        return caught

    ended = outcome(2, ranks)
    caught = ended.ranks[0].value
    assert len(caught) == len(calls)
    assert ended.refusals == tuple(dict.fromkeys(map(str, caught)))
    for error in caught:
        assert isinstance(error, ForeignThreadError)
        assert "was called from a thread that is not the rank's own" in str(error)
        assert "verify this class with --backend gloo" in str(error)


def test_waiting_in_a_thread_of_the_class() -> None:
    def ranks(rank: int) -> str:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        told: queue.SimpleQueue[str] = queue.SimpleQueue()

        def elsewhere() -> None:
            try:
                work.wait()
            except ForeignThreadError as error:
                told.put(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        work.wait()
        return told.get_nowait()

    ended = outcome(2, ranks)
    assert all(rank.value.startswith("wait() was called from a thread") for rank in ended.ranks)
    assert ended.refusals == (ended.ranks[0].value,)


def test_threads_of_the_class_that_call_none() -> None:
    """One that prepares the next batch, and one that lives on through several turns."""

    def ranks(rank: int) -> float:
        batches: queue.Queue[Tensor | None] = queue.Queue(maxsize=2)

        def prepare() -> None:
            for step in range(20):
                batches.put(torch.full((3,), float(rank + step)))
            batches.put(None)

        thread = threading.Thread(target=prepare)
        thread.start()
        total = 0.0
        while (batch := batches.get()) is not None:
            dist.all_reduce(batch)
            total += batch[0].item()
        thread.join()
        return total

    assert outcome(3, ranks).values() == [3.0 * sum(range(20)) + 20 * 3] * 3


def test_backward_passes_stay_in_the_ranks_thread() -> None:
    """Hooks may call collectives, also where several devices' engines would have threads of their own."""

    def ranks(rank: int) -> bool:
        threads: set[int] = set()
        weight = nn.Parameter(torch.ones(3))

        def reduce(gradient: Tensor) -> Tensor:
            threads.add(threading.get_ident())
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            return gradient

        weight.register_hook(reduce)
        (weight * (rank + 1.0)).sum().backward()
        assert weight.grad is not None
        return threads == {threading.get_ident()} and weight.grad.tolist() == [6.0] * 3

    assert outcome(3, ranks).values() == [True] * 3


def test_generators_of_the_process_are_not_the_schedulers() -> None:
    """The world's choices come from its own seed, and draw from nothing else."""
    random.seed(5)
    torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()

    outcome(5, mixture, 3)

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("at", ["enter", "leave"])
def test_an_error_of_a_watcher_is_no_hang(at: str) -> None:
    class Broken(Watcher):
        def enter(self, rank: int) -> None:
            if at == "enter" and rank == 1:
                raise LookupError("no such driver")

        def leave(self, rank: int) -> None:
            if at == "leave" and rank == 1:
                raise LookupError("no such driver")

    with pytest.raises(LookupError, match="no such driver"):
        SimWorld(3, watcher=Broken()).run(lambda rank: None)
    assert outcome(3, lambda rank: rank).values() == [0, 1, 2]


def test_a_watcher_is_told_of_turns_in_the_ranks_thread() -> None:
    current: list[int] = []
    told: list[str] = []

    class Recorder(Watcher):
        def enter(self, rank: int) -> None:
            assert threading.current_thread().name == f"rank{rank}"
            assert not current
            current.append(rank)

        def leave(self, rank: int) -> None:
            assert dist.get_rank() == rank
            assert current.pop() == rank

        def stopped(self, rank: int) -> None:
            told.append(f"stopped {rank}")

    def ranks(rank: int) -> None:
        dist.barrier()
        if rank:
            dist.barrier()

    ended = SimWorld(3, seed=2, watcher=Recorder()).run(ranks)
    assert ended.stop is not None
    assert ended.stop.ranks == (0,)
    assert not current
    assert sorted(told) == ["stopped 1", "stopped 2"]
