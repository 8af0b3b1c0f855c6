"""Asynchronous collectives of a simulated world: when they happen, and all ways to wait for them; and the store."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.sim import scheduler
from harness.sim.choices import Schedule
from harness.sim.world import SimWorld, WorldError, WorldOutcome
from tests.renamed import all_gather_single, reduce_scatter_single

pytestmark = pytest.mark.usefixtures("nothing_left")

SEEDS = range(8)


def outcome(world: int, function: Callable[[int], Any], seed: int = 0, **choices: Any) -> WorldOutcome:
    return SimWorld(world, seed=seed, **choices).run(function)


def run(world: int, function: Callable[[int], Any], seed: int = 0) -> list[Any]:
    return outcome(world, function, seed).values()


def default_store() -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("world", [1, 3])
def test_waits_in_any_order_later_or_never(world: int, seed: int) -> None:
    """Each rank launches the same six, and waits in an order of its own; for the last nobody waits."""

    def ranks(rank: int) -> list[Tensor]:
        sums = [torch.full((number + 1,), float(rank + number)) for number in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
        gathered = torch.empty(world)
        works.append(all_gather_single(gathered, torch.tensor([float(rank)]), async_op=True))
        dist.all_reduce(torch.ones(100), async_op=True)
        dist.barrier()
        for number in range(6):
            assert works[(number * (rank + 1) + rank) % 6 if rank in (0, 4) else 5 - number].wait()
        return [*sums, gathered]

    for results in run(world, ranks, seed):
        for number, tensor in enumerate(results[:5]):
            assert torch.equal(tensor, torch.full((number + 1,), sum(range(world)) + float(number * world)))
        assert torch.equal(results[5], torch.arange(float(world)))


def test_waiting_twice_does_nothing_the_second_time() -> None:
    def ranks(rank: int) -> float:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        tensor += 1
        assert work.wait()
        assert work.is_completed()
        return tensor.item()

    assert run(2, ranks) == [3.0, 3.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_futures(seed: int) -> None:
    """Values as gloo's futures have them: a list of the outputs; a gather into one tensor gives its pieces."""

    def ranks(rank: int) -> list[Any]:
        own = torch.tensor([rank + 1.0, 2.0])
        total = dist.all_reduce(own.clone(), async_op=True).get_future().then(lambda future: future.value()[0] * 10)
        pieces = all_gather_single(torch.empty(4), own, async_op=True).get_future()
        nothing = dist.barrier(async_op=True).get_future()
        assert nothing.wait() == []
        return [total.wait(), *pieces.wait()]

    for total, one, two in run(2, ranks, seed):
        assert total.tolist() == [30.0, 40.0]
        assert (one.tolist(), two.tolist()) == ([1.0, 2.0], [2.0, 2.0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("schedule", Schedule)
def test_polling(schedule: Schedule, seed: int) -> None:
    """Ranks that only ask, all at once, and one that others wait for while it asks."""

    def ranks(rank: int) -> tuple[float, bool]:
        first = torch.ones(1)
        work = dist.all_reduce(first, async_op=True)
        while not work.is_completed():
            pass
        second = torch.ones(1)
        if rank == 2:
            other = dist.all_reduce(second, async_op=True)
            while not other.is_completed():
                pass
        else:
            dist.all_reduce(second)
        return first.item() + second.item(), work.is_success()

    assert outcome(3, ranks, seed, schedule=schedule).values() == [(6.0, True)] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_polling_for_what_only_a_late_collective_lets_happen(seed: int) -> None:
    """Two ranks ask for a message of the third, which waits for a collective that may be held back."""

    def ranks(rank: int) -> float:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 2:
            work.wait()
            for other in (0, 1):
                dist.send(tensor, other)
            return tensor.item()
        received = torch.empty(1)
        message = dist.irecv(received, 2)
        while not message.is_completed():
            pass
        work.wait()
        return received.item()

    assert run(3, ranks, seed) == [3.0] * 3


def test_asking_for_ever_for_what_never_comes() -> None:
    def ranks(rank: int) -> None:
        if rank != 1:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            while not work.is_completed():
                pass

    stop = outcome(3, ranks).stop
    assert stop is not None
    assert (stop.kind, stop.ranks) == ("deadlock", (1,))
    assert set(stop.waits) == {0, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_asking_often_is_no_deadlock_as_long_as_somebody_does_something_in_the_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has asked in vain so often that only what rank 1 does can change the answer; then rank 1 does it."""
    monkeypatch.setattr(scheduler, "_MAX_POLLS", 50)

    def ranks(rank: int) -> float:
        tensor = torch.ones(1)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            while not work.is_completed():
                pass
            return tensor.item()
        message = dist.irecv(torch.empty(1), 0)
        for _ in range(50):
            assert not message.is_completed()
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(2, ranks, seed) == [2.0, 2.0]


@pytest.mark.parametrize("schedule", Schedule)
def test_what_is_done_to_buffers_before_the_wait(schedule: Schedule) -> None:
    """An input counts as it was at the call, whenever the collective happens, and an output holds nothing of use."""

    def ranks(rank: int) -> tuple[float, bool]:
        source, whole = torch.ones(1), torch.zeros(2)
        work = all_gather_single(whole, source, async_op=True)
        if rank == 1:
            source += 1
        early = bool(whole.isnan().all())
        work.wait()
        return whole.sum().item(), early

    for seed in SEEDS:
        ended = outcome(2, ranks, seed, schedule=schedule)
        assert [each.value for each in ended.ranks] == [(2.0, True)] * 2
        ((rank, text),) = ended.races
        assert (rank, text) == (
            1,
            "changed the input of its 1st collective, all_gather fp32[1], before wait(): element 0 was 1, is 2",
        )
        with pytest.raises(WorldError, match="rank 1 changed the input of its 1st collective"):
            ended.values()


def test_two_collectives_at_once_on_one_buffer() -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([0, 1])
        piece, whole = torch.empty(2), torch.empty(4)
        first = reduce_scatter_single(piece, torch.ones(4), async_op=True, group=group)
        all_gather_single(whole, piece)
        first.wait()

    races = outcome(2, ranks).races
    assert {rank for rank, _ in races} == {0, 1}
    assert races[0][1] == (
        "handed the output of its 1st collective on group 1 of ranks 0, 1, reduce_scatter fp32[4], to its "
        "1st collective, all_gather fp32[2], before wait()"
    )


# The store


def test_the_store() -> None:
    def ranks(rank: int) -> list[Any]:
        store = default_store()
        if rank == 0:
            store.set("a", "1")
            store.set("b", b"\x00\xff")
        told = [store.get("a"), store.get("b"), store.check(["a", "b"]), store.check(["a", "nothing"])]
        store.add("sum", rank + 1)
        dist.barrier()
        told += [store.add("sum", 0), store.get("sum"), store.compare_set("c", "", "first")]
        dist.barrier()
        told += [store.compare_set("c", "other", "second"), store.compare_set("nothing", "expected", "x")]
        prefixed = dist.PrefixStore("under", store)
        prefixed.set(f"own{rank}", "x")
        prefixed.wait(["own0", "own1"], datetime.timedelta(seconds=1))
        told.append(store.get("under/own1"))
        dist.barrier()
        if rank == 0:
            assert store.delete_key("a")
            assert not store.delete_key("a")
        dist.barrier()
        return [*told, store.check(["a"])]

    both = [b"1", b"\x00\xff", True, False, 3, b"3", b"first", b"first", b"expected", b"x", False]
    assert run(2, ranks) == [both, both]


@pytest.mark.parametrize("seed", SEEDS)
def test_waiting_for_a_key_while_others_change_others(seed: int) -> None:
    """What wakes a rank in vain, an overwritten key or one that is deleted at once, does not let it miss its own."""

    def ranks(rank: int) -> bytes:
        store = default_store()
        mine = dist.new_group([1, 2])
        if rank == 0:
            return bytes(store.get("wanted"))
        store.set("other", "1")
        dist.barrier(group=mine)
        store.set("other", "2")
        if rank == 1:
            store.set("wanted", "early")
            store.delete_key("wanted")
        dist.barrier(group=mine)
        store.set("other", "3")
        if rank == 2:
            store.set("wanted", "late")
        return b""

    assert run(3, ranks, seed)[0] == b"late"


def test_asking_the_store_until_a_key_is_there() -> None:
    def ranks(rank: int) -> int:
        store = default_store()
        if rank == 0:
            while not store.check(["ready"]):
                pass
            while store.add("count", 0) < 2:
                pass
            while store.get("state") != b"done":
                pass
            return int(store.num_keys())
        store.set("state", "begun")
        dist.distributed_c10d._store_based_barrier(rank - 1, store, "of two", 2, datetime.timedelta(seconds=1))
        store.add("count", 1)
        store.set("ready", "1")
        store.set("state", "done")
        return 0

    assert all(run(3, ranks, seed)[0] > 3 for seed in SEEDS)


def test_a_key_that_nobody_sets() -> None:
    def waits(rank: int) -> None:
        default_store().wait(["never", "ever"]) if rank else dist.barrier()

    def asks(rank: int) -> None:
        while not default_store().check(["never", "ever"]):
            pass

    for function, waiting in ((waits, "for the keys never, ever of the store"), (asks, "for the keys never, ever")):
        stop = outcome(2, function).stop
        assert stop is not None
        assert (stop.kind, stop.ranks) == ("deadlock", ())
        assert waiting in stop.waits[1]
        assert f"rank 1 waits {waiting}" in stop.message


def test_a_barrier_over_the_store_without_one_rank() -> None:
    def ranks(rank: int) -> None:
        if rank != 2:
            store = default_store()
            dist.distributed_c10d._store_based_barrier(rank, store, "all", 3, datetime.timedelta(seconds=1))

    stop = outcome(3, ranks).stop
    assert stop is not None
    assert stop.kind == "deadlock"
    assert set(stop.waits) == {0, 1}
    assert "last_worker" in stop.waits[0]
