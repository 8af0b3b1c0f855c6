"""Messages from rank to rank in a simulated world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.sim.world import SimWorld, WorldOutcome

pytestmark = pytest.mark.usefixtures("nothing_left")

SEEDS = range(5)


def outcome(world: int, function: Callable[[int], Any], seed: int = 0) -> WorldOutcome:
    return SimWorld(world, seed=seed).run(function)


def run(world: int, function: Callable[[int], Any], seed: int = 0) -> list[Any]:
    return outcome(world, function, seed).values()


@pytest.mark.parametrize("seed", SEEDS)
def test_in_a_ring(seed: int) -> None:
    def ranks(rank: int) -> Tensor:
        received = torch.empty(3)
        if rank % 2:
            dist.recv(received, (rank - 1) % 4)
            dist.send(torch.full((3,), float(rank)), (rank + 1) % 4)
        else:
            dist.send(torch.full((3,), float(rank)), (rank + 1) % 4)
            dist.recv(received, (rank - 1) % 4)
        return received

    assert [received.tolist() for received in run(4, ranks, seed)] == [[(rank - 1.0) % 4] * 3 for rank in range(4)]


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_keep_their_order(seed: int) -> None:
    """Of equal tags; others are told apart by their tag, whichever was sent first."""

    def ranks(rank: int) -> list[float] | None:
        if rank == 0:
            works = [
                dist.isend(torch.tensor([float(number)]), 1, tag=tag) for number, tag in enumerate((7, 7, 9, 7, 9))
            ]
            for work in reversed(works):
                work.wait()
            return None
        received = [torch.empty(1) for _ in range(5)]
        for tensor, tag in zip(received, (9, 7, 7, 9, 7), strict=True):
            dist.recv(tensor, 0, tag=tag)
        return [tensor.item() for tensor in received]

    assert run(2, ranks, seed)[1] == [2.0, 0.0, 1.0, 4.0, 3.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_receives_that_were_posted_first(seed: int) -> None:
    def ranks(rank: int) -> list[float] | None:
        if rank == 1:
            received = [torch.empty(1) for _ in range(3)]
            works = [dist.irecv(tensor, 0) for tensor in received]
            dist.barrier()
            for work in reversed(works):
                work.wait()
            return [tensor.item() for tensor in received]
        dist.barrier()
        for number in range(3):
            dist.send(torch.tensor([float(number)]), 1)
        return None

    assert run(2, ranks, seed)[1] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_from_any_rank(seed: int) -> None:
    def ranks(rank: int) -> list[tuple[int, float]] | None:
        if rank:
            dist.send(torch.tensor([float(rank)]), 0)
            return None
        received = []
        for _ in range(3):
            tensor = torch.empty(1)
            received.append((dist.recv(tensor), tensor.item()))
        return received

    received = run(4, ranks, seed)[0]
    assert sorted(received) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_which_of_several_comes_first_is_a_choice() -> None:
    def ranks(rank: int) -> int | None:
        if rank:
            dist.send(torch.tensor([float(rank)]), 0)
            return None
        sources = [dist.recv(torch.empty(1)) for _ in range(3)]
        return sources[0]

    first = {run(4, ranks, seed)[0] for seed in range(30)}
    assert first == {1, 2, 3}  # Each of them one in three: all thirty miss one with a chance of 1.6e-5.


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch(seed: int) -> None:
    """Each rank sends to all others and receives from all others, in one batch."""

    def ranks(rank: int) -> list[float]:
        others = [other for other in range(4) if other != rank]
        received = {other: torch.empty(2) for other in others}
        operations = [dist.P2POp(dist.isend, torch.full((2,), rank * 10.0 + other), other) for other in others]
        operations += [dist.P2POp(dist.irecv, received[other], other) for other in reversed(others)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [received[other][1].item() for other in others]

    for rank, received in enumerate(run(4, ranks, seed)):
        assert received == [other * 10.0 + rank for other in range(4) if other != rank]


def test_of_any_type_and_of_no_elements() -> None:
    def ranks(rank: int) -> list[Tensor]:
        tensors = []
        for dtype in (torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.bfloat16):
            tensor = torch.ones(2, 3).to(dtype) if rank == 0 else torch.zeros(2, 3).to(dtype)
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
            tensors.append(tensor.to(torch.complex64).real)
        empty = torch.empty(0)
        dist.send(empty, 1) if rank == 0 else dist.recv(empty, 0)
        return tensors

    assert all(torch.equal(tensor, torch.ones(2, 3)) for tensor in run(2, ranks)[1])


def test_within_a_group() -> None:
    """By rank of the world, and by rank of the group."""

    def ranks(rank: int) -> float | None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        tensor = torch.tensor([float(rank)])
        if rank == 1:
            dist.send(tensor, 2, group=group)
            dist.recv(tensor, group=group, group_src=1)
        else:
            other = torch.empty(1)
            dist.recv(other, 1, group=group)
            dist.send(other * 10, group=group, group_dst=0)
        return tensor.item()

    assert run(3, ranks) == [None, 10.0, 2.0]


def test_groups_and_messages_are_told_apart() -> None:
    """A message on one group is none on another, though of the same ranks."""

    def ranks(rank: int) -> list[float] | None:
        group = dist.new_group([0, 1])
        if rank == 0:
            works = [dist.isend(torch.tensor([1.0]), 1), dist.isend(torch.tensor([2.0]), 1, group=group)]
            for work in works:
                work.wait()
            return None
        received = torch.empty(2)
        dist.recv(received[:1], 0, group=group)
        dist.recv(received[1:], 0)
        return received.tolist()

    assert run(2, ranks)[1] == [2.0, 1.0]


def test_objects() -> None:
    def ranks(rank: int) -> list[Any]:
        objects = [{"a": 1}, "two"] if rank == 0 else [None, None]
        dist.send_object_list(objects, 1) if rank == 0 else dist.recv_object_list(objects, 0)
        return objects

    assert run(2, ranks)[1] == [{"a": 1}, "two"]


def test_polling() -> None:
    def ranks(rank: int) -> float | None:
        if rank == 0:
            dist.barrier()
            work = dist.isend(torch.tensor([4.0]), 1)
            while not work.is_completed():
                pass
            return None
        tensor = torch.empty(1)
        work = dist.irecv(tensor, 0)
        assert not work.is_completed()
        dist.barrier()
        while not work.is_completed():
            pass
        return tensor.item()

    assert all(run(2, ranks, seed)[1] == 4.0 for seed in SEEDS)


def test_a_message_of_another_length_or_type() -> None:
    def lengths(rank: int) -> None:
        dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.empty(4), 0)

    def types(rank: int) -> None:
        dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.empty(3, dtype=torch.int32), 0)

    for function, sent, received in ((lengths, "fp32[3]", "fp32[4]"), (types, "fp32[3]", "int32[3]")):
        for seed in SEEDS:
            stop = outcome(2, function, seed).stop
            assert stop is not None
            assert (stop.kind, stop.ranks) == ("mismatch", ())
            assert f"rank 0 calls send {sent}" in stop.message or f"rank 0 send {sent}" in stop.message
            assert f"rank 1 calls recv {received}" in stop.message or f"rank 1 recv {received}" in stop.message


def test_a_send_that_nobody_receives() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=5)

    stop = outcome(2, ranks).stop
    assert stop is not None
    assert (stop.kind, stop.ranks) == ("deadlock", (1,))
    assert "rank 0 waits in send fp32[3] to rank 1, tag 5" in stop.message
    assert "rank 1 had ended by then" in stop.message


def test_ranks_that_wait_for_each_others_message() -> None:
    def ranks(rank: int) -> None:
        dist.recv(torch.empty(2), 1 - rank)

    stop = outcome(2, ranks).stop
    assert stop is not None
    assert (stop.kind, stop.ranks) == ("deadlock", ())
    assert set(stop.waits) == {0, 1}
    assert stop.waits[0].startswith("in recv fp32[2] from rank 1")


@pytest.mark.parametrize("sends", [True, False])
def test_the_buffer_of_a_message_belongs_to_it_until_the_wait(sends: bool) -> None:
    """What was changed before it was sent, or read before it was received."""

    def ranks(rank: int) -> None:
        tensor = torch.ones(3)
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        if (rank == 0) is sends:
            tensor[1] = 7.0
        work.wait()

    for seed in SEEDS:
        ((rank, text),) = outcome(2, ranks, seed).races
        assert rank == (0 if sends else 1)
        assert ("isend" if sends else "irecv") in text or ("send" if sends else "recv") in text
