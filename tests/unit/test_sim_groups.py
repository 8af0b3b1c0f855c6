"""Groups of a simulated world: who makes them, what they are called, and that they do not get into each other's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from harness.sim.choices import Schedule
from harness.sim.world import SimWorld, WorldError, WorldOutcome
from tests.renamed import reduce_scatter_single

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]


def outcome(world: int, function: Callable[[int], Any], seed: int = 0) -> WorldOutcome:
    return SimWorld(world, seed=seed).run(function)


def run(world: int, function: Callable[[int], Any], seed: int = 0) -> list[Any]:
    return outcome(world, function, seed).values()


def total(rank: int, group: Any = None) -> float:
    """Sum of the ranks of a group, plus one each."""
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_what_a_rank_is_told_about_its_world() -> None:
    def ranks(rank: int) -> tuple[Any, ...]:
        group = dist.group.WORLD
        return (
            dist.is_initialized(),
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_backend(),
            dist.get_backend_config(),
            group.rank(),
            group.size(),
            group.name(),
            group.group_name,
            group.group_desc,
            dist.get_process_group_ranks(group),
            dist.get_global_rank(group, rank),
            dist.get_group_rank(group, rank),
            group._device_types == [torch.device("cuda"), torch.device("cpu")],
            isinstance(group, dist.ProcessGroup),
        )

    # As a real gloo group answers (the config: with backend "gloo" asked for, as a rank of a pool does).
    for rank, told in enumerate(run(3, ranks)):
        assert told == (
            *(True, rank, 3, "gloo", "cpu:gloo,cuda:gloo", rank, 3, "gloo", "0", "default_pg", [0, 1, 2], rank, rank),
            *(True, True),
        )


@pytest.mark.parametrize("seed", range(4))
def test_groups_that_overlap(seed: int) -> None:
    """All make all groups; each rank then uses its own in another order than others, asynchronously."""
    members = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2, 3], [1]]

    def ranks(rank: int) -> dict[int, float]:
        groups = [dist.new_group(each) for each in members]
        mine = [number for number, each in enumerate(members) if rank in each]
        works = {}
        for number in mine if rank % 2 else reversed(mine):
            tensor = torch.tensor([rank + 1.0])
            works[number] = tensor, dist.all_reduce(tensor, group=groups[number], async_op=True)
        for _, work in works.values():
            work.wait()
        return {number: tensor.item() for number, (tensor, _) in works.items()}

    for rank, sums in enumerate(run(4, ranks, seed)):
        assert sums == {number: sum(each) + len(each) for number, each in enumerate(members) if rank in each}


def test_a_group_of_others_is_none_of_ones_business() -> None:
    def ranks(rank: int) -> tuple[Any, ...]:
        group = dist.new_group([0, 2])
        return group is dist.GroupMember.NON_GROUP_MEMBER, dist.get_rank(group), dist.get_world_size(group)

    assert run(3, ranks) == [(False, 0, 2), (True, -1, -1), (False, 1, 2)]


def test_a_group_that_only_its_members_make() -> None:
    def ranks(rank: int) -> float | None:
        if rank == 1:
            return None
        group = dist.new_group([0, 2], use_local_synchronization=True)
        return total(rank, group)

    assert run(3, ranks) == [4.0, None, 4.0]


def test_members_in_another_order() -> None:
    """torch sorts them, unless it is told to keep the order."""

    def ranks(rank: int) -> tuple[int, list[int]]:
        group = dist.new_group([2, 0, 1])
        pieces = [torch.empty(1) for _ in range(3)]
        dist.all_gather(pieces, torch.tensor([float(rank)]), group=group)
        return dist.get_rank(group), [int(piece.item()) for piece in pieces]

    assert run(3, ranks) == [(rank, [0, 1, 2]) for rank in range(3)]


def test_groups_of_one_rank() -> None:
    def ranks(rank: int) -> list[float]:
        groups = [dist.new_group([each]) for each in range(3)]
        tensor, piece = torch.tensor([5.0]), torch.empty(1)
        reduce_scatter_single(piece, tensor, group=groups[rank])
        dist.broadcast(tensor, src=rank, group=groups[rank])
        dist.barrier(group=groups[rank])
        return [total(rank, groups[rank]), piece.item(), tensor.item()]

    assert run(3, ranks) == [[rank + 1.0, 5.0, 5.0] for rank in range(3)]


def test_subgroups() -> None:
    def ranks(rank: int) -> tuple[float, float]:
        mine, _ = dist.new_subgroups(2)
        other, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        return total(rank, mine), total(rank, other)

    assert run(4, ranks) == [(3.0, 5.0), (3.0, 5.0), (7.0, 5.0), (7.0, 5.0)]


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout:UserWarning")
def test_what_gloo_cannot_do_with_groups_says_so() -> None:
    def split(rank: int) -> None:
        dist.split_group(split_ranks=[[0], [1]])

    def other_backend(rank: int) -> None:
        dist.new_group([0, 1], backend="nccl")

    def nothing_of_it(function: Callable[[int], None]) -> str:
        error = outcome(2, function).ranks[0].error
        assert isinstance(error, RuntimeError)
        return str(error)

    assert "split" in nothing_of_it(split)
    assert nothing_of_it(other_backend) == (
        "new_group with backend nccl: a simulated world does as gloo does, and no other"
    )


def test_ranks_that_make_different_groups() -> None:
    def ranks(rank: int) -> None:
        dist.new_group([0, 1] if rank < 2 else [0, 2])

    stop = outcome(3, ranks).stop
    assert stop is not None
    # Rank 0 makes its group with 1; 2 waits for it in another of the same name, as nobody can tell who is wrong.
    assert (stop.kind, stop.ranks) == ("mismatch", ())
    assert "[0, 1]" in stop.message
    assert "[0, 2]" in stop.message


def test_a_group_that_one_member_does_not_make() -> None:
    def ranks(rank: int) -> None:
        if rank != 2:
            dist.new_group([0, 1, 2])

    stop = outcome(3, ranks).stop
    assert stop is not None
    assert (stop.kind, stop.ranks) == ("deadlock", (2,))
    assert "new_group" in stop.message


def test_a_group_that_ended() -> None:
    def ranks(rank: int) -> str:
        group = dist.new_group([0, 1])
        total(rank, group)
        dist.destroy_process_group(group)
        assert total(rank) == 3.0
        dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            dist.all_reduce(torch.ones(1))
        return "ended"

    assert run(2, ranks) == ["ended"] * 2


def test_no_second_default_group() -> None:
    def at_an_address(rank: int) -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=rank, world_size=2)

    def over_a_store(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    for function in (at_an_address, over_a_store):
        for ended in outcome(2, function).ranks:
            assert isinstance(ended.error, RuntimeError)
            assert "cannot be made again" in str(ended.error)
            assert "verify this class with --backend gloo" in str(ended.error)


def test_a_group_object_of_another_rank() -> None:
    """Such as one in a module of a library, which all ranks of the process share."""
    kept: dict[int, Any] = {}

    def ranks(rank: int) -> None:
        kept[rank] = dist.group.WORLD
        dist.barrier()
        if rank == 1:
            for call in (
                lambda: kept[0].allreduce([torch.ones(1)]),
                lambda: kept[0].send([torch.ones(1)], 1, 0),
            ):
                with pytest.raises(RuntimeError, match="rank 1 uses a group object of rank 0, on the default"):
                    call()
        dist.barrier()

    ended = outcome(2, ranks)
    assert [(rank.error, rank.stopped) for rank in ended.ranks] == [(None, False)] * 2
    assert len(ended.refusals) == 2
    with pytest.raises(WorldError, match="uses a group object of rank 0"):
        ended.values()


def test_no_group_of_no_ranks() -> None:
    error = outcome(2, lambda rank: dist.new_group([])).ranks[1].error
    assert isinstance(error, ValueError)
    assert "no ranks" in str(error)


def test_a_default_group_is_there_already() -> None:
    def ranks(rank: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=2)

    error = outcome(2, ranks).ranks[0].error
    assert isinstance(error, ValueError)
    assert "twice" in str(error)


def test_sequence_numbers() -> None:
    """Of collectives, one after the other, on each group."""

    def ranks(rank: int) -> list[int]:
        group = dist.new_group([0, 1])
        numbers = [group._get_sequence_number_for_group()]
        for _ in range(3):
            total(rank, group)
            numbers.append(group._get_sequence_number_for_group())
        return numbers

    assert run(2, ranks) == [[0, 1, 2, 3]] * 2


def test_meshes() -> None:
    def ranks(rank: int) -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
        sums = total(rank, mesh.get_group("outer")), total(rank, mesh["inner"].get_group())
        return (
            *sums,
            list(mesh.get_coordinate() or ()),
            mesh["inner"].get_local_rank(),
            mesh["outer", "inner"]._flatten().size(),
        )

    for rank, (outer, inner, coordinate, local, flat) in enumerate(run(6, ranks)):
        row, column = divmod(rank, 3)
        assert (outer, inner) == (2 * column + 5, 9 * row + 6)
        assert (coordinate, local, flat) == ([row, column], column, 6)


def test_functional_collectives() -> None:
    def ranks(rank: int) -> list[Tensor]:
        group = dist.group.WORLD
        own = torch.arange(6.0) + rank
        results = [
            functional.all_reduce(own, "sum", group),
            functional.all_reduce(own, "max", group) * 2,
            functional.all_gather_tensor(own, 0, group),
            functional.all_gather_tensor(own.reshape(2, 3), 1, group).reshape(-1),
            functional.reduce_scatter_tensor(own, "sum", 0, group),
            functional.all_to_all_single(own, None, None, group),
        ]
        results += functional.all_reduce_coalesced([own, own[:2] * 3], "sum", group)
        results += functional.all_gather_into_tensor_coalesced([own, own[:1]], group)
        results += functional.reduce_scatter_tensor_coalesced([own, own[:3] * 2], "sum", [0, 0], group)
        results.append(functional.broadcast(own, 1, group))
        return [functional.wait_tensor(result).clone() for result in results]

    everyone = torch.stack([torch.arange(6.0) + rank for rank in range(3)])
    sums = everyone.sum(0)
    for rank, results in enumerate(run(3, ranks)):
        expected = [
            sums,
            everyone.amax(0) * 2,
            everyone.reshape(-1),
            torch.cat(list(everyone.reshape(3, 2, 3)), 1).reshape(-1),
            sums[rank * 2 : rank * 2 + 2],
            everyone[:, rank * 2 : rank * 2 + 2].reshape(-1),
            sums,
            sums[:2] * 3,
            everyone.reshape(-1),
            everyone[:, 0],
            sums[rank * 2 : rank * 2 + 2],
            sums[rank : rank + 1] * 2,
            everyone[1],
        ]
        assert len(results) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_functional_collectives_that_autograd_follows() -> None:
    def ranks(rank: int) -> Tensor:
        own = (torch.arange(4.0) + rank).requires_grad_()
        gathered = functional.all_gather_tensor_autograd(own, 0, dist.group.WORLD)
        (gathered * torch.arange(8.0)).sum().backward()
        assert own.grad is not None
        return own.grad

    # The backward pass of a gather is a reduce-scatter of what each rank's output got.
    for rank, gradient in enumerate(run(2, ranks)):
        assert torch.equal(gradient, 2 * torch.arange(8.0)[rank * 4 : rank * 4 + 4])


def test_distributed_tensors() -> None:
    def ranks(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        whole = torch.arange(30.0).reshape(6, 5)
        tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        other = tensor.redistribute(placements=[Shard(1), Replicate()])
        partial = DTensor.from_local(torch.full((5, 2), rank + 1.0), mesh, [Partial(), Partial()])
        product = (other @ partial).redistribute(placements=[Replicate(), Replicate()])
        return [tensor.full_tensor(), other.full_tensor(), partial.full_tensor(), product.to_local()]

    whole = torch.arange(30.0).reshape(6, 5)
    factor = torch.full((5, 2), 10.0)
    for tensor, other, partial, product in run(4, ranks):
        assert torch.equal(tensor, whole)
        assert torch.equal(other, whole)
        assert torch.equal(partial, factor)
        assert torch.equal(product, whole @ factor)


def test_worlds_know_nothing_of_each_other_and_a_world_keeps_what_it_has() -> None:
    """Groups and keys outlast a run, as they outlast a task of real ranks; a rank can go on using its group."""
    kept: dict[int, Any] = {}

    def ranks(rank: int) -> tuple[str, float, bool]:
        store = dist.distributed_c10d._get_default_store()
        fresh = not store.check(["mark"])
        total(rank)
        store.set("mark", "1")
        kept[rank] = dist.new_group([0, 2])
        return kept[rank].group_name if rank != 1 else "", total(rank), fresh

    def later(rank: int) -> float:
        return total(rank, kept[rank]) if rank != 1 else 0.0

    worlds = [SimWorld(3, seed=1, schedule=Schedule.RANDOM) for _ in range(2)]
    for world in worlds:
        first = world.run(ranks)
        assert first.values() == [("1", 6.0, True), ("", 6.0, True), ("1", 6.0, True)]
        assert [value for _, value, _ in world.run(ranks).values()] == [6.0] * 3
        assert [told[2] for told in world.run(ranks).values()] == [False] * 3
        assert world.run(later).values() == [4.0, 0.0, 4.0]
        assert (first.trace, first.num_turns) == ((again := SimWorld(3, seed=1).run(ranks)).trace, again.num_turns)


def test_after_a_stop_a_group_is_as_good_as_before() -> None:
    """What was pending on it when the world stopped is forgotten, messages too."""
    kept: dict[int, Any] = {}

    def stops(rank: int) -> None:
        kept[rank] = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=kept[rank], async_op=True)
            dist.isend(torch.full((1,), 9.0), 1 - rank, group=kept[rank])
        if rank == 0:
            dist.all_reduce(torch.ones(7), group=kept[rank])

    def later(rank: int) -> float:
        if rank == 2:
            return 0.0
        received = torch.empty(1)
        works = [
            dist.isend(torch.full((1,), float(rank)), 1 - rank, group=kept[rank]),
            dist.irecv(received, 1 - rank, group=kept[rank]),
        ]
        for work in works:
            work.wait()
        return total(rank, kept[rank]) + 10 * received.item()

    for seed in range(6):
        world = SimWorld(3, seed=seed)
        assert world.run(stops).stop is not None
        assert world.run(later).values() == [13.0, 3.0, 0.0]


def test_one_world_at_a_time() -> None:
    def ranks(rank: int) -> None:
        SimWorld(2).run(lambda inner: None)

    error = outcome(2, ranks).ranks[0].error
    assert isinstance(error, RuntimeError)
    assert "one at a time" in str(error)
