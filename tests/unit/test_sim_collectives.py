"""Every collective of a simulated world, against what plain torch says it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.sim.choices import Schedule, SumOrder
from harness.sim.world import SimWorld
from tests.renamed import all_gather_single, reduce_scatter_single

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    # Both names of a collective are tested, the one before 2.13 too.
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

WORLDS = [1, 2, 3, 5]
LENGTHS = [0, 1, 2, 7]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
OPS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, lambda rows: rows.sum(0, dtype=rows.dtype)),
    "max": (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    "min": (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0, dtype=rows.dtype)),
}


def row(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's data: small integers, whose sums and products are exact in every type here."""
    return ((torch.arange(length) * 3 + rank * 5) % 4 + (rank == 1)).to(dtype)


def rows(world: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Those of all ranks, one a row."""
    return torch.stack([row(rank, length, dtype) for rank in range(world)])


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def run(world: int, function: Callable[[int], Any], **choices: Any) -> list[Any]:
    return SimWorld(world, seed=world, **choices).run(function).values()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce_and_reduce(op: str, world: int) -> None:
    operation, plain = OPS[op]

    def ranks(rank: int) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for length, dtype in itertools.product(LENGTHS, DTYPES):
            expected = plain(rows(world, length, dtype))
            tensor = row(rank, length, dtype)
            dist.all_reduce(tensor, operation)
            pairs.append((tensor, expected))
            root = (length + 1) % world
            tensor = row(rank, length, dtype)
            dist.reduce(tensor, root, operation)
            if rank == root:
                pairs.append((tensor, expected))
        return pairs

    pairs = [pair for of_rank in run(world, ranks) for pair in of_rank]
    assert len(pairs) == len(LENGTHS) * len(DTYPES) * (world + 1)
    assert all(same(*pair) for pair in pairs)


def test_what_a_reduce_leaves_on_the_others_is_no_number() -> None:
    def ranks(rank: int) -> Tensor:
        tensor = row(rank, 3)
        dist.reduce(tensor, 2)
        return tensor

    first, _, root = run(3, ranks)
    assert first.isnan().all()
    assert same(root, rows(3, 3).sum(0))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_gathering_and_scattering(length: int, world: int) -> None:
    everything = rows(world, length)

    def ranks(rank: int) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        pieces = [torch.empty(length) for _ in range(world)]
        dist.all_gather(pieces, row(rank, length))
        pairs.append((torch.stack(pieces), everything))
        for gather in (all_gather_single, dist.all_gather_into_tensor):
            whole = torch.empty(world * length)
            gather(whole, row(rank, length))
            pairs.append((whole, everything.reshape(-1)))
        root = length % world
        pieces = [torch.empty(length) for _ in range(world)]
        dist.gather(row(rank, length), pieces if rank == root else None, dst=root)
        if rank == root:
            pairs.append((torch.stack(pieces), everything))
        own = torch.empty(length)
        dist.scatter(own, list(everything.unbind(0)) if rank == root else None, src=root)
        pairs.append((own, everything[rank]))
        tensor = row(rank, length)
        dist.broadcast(tensor, src=root)
        pairs.append((tensor, everything[root]))
        return pairs

    pairs = [pair for of_rank in run(world, ranks) for pair in of_rank]
    assert len(pairs) == 5 * world + 1
    assert all(same(*pair) for pair in pairs)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_scatter(length: int, world: int) -> None:
    totals = rows(world, length * world).sum(0).reshape(world, length)

    def ranks(rank: int) -> list[Tensor]:
        whole, outputs = row(rank, length * world), [torch.empty(length) for _ in range(4)]
        reduce_scatter_single(outputs[0], whole)
        dist.reduce_scatter_tensor(outputs[1], whole)
        dist.reduce_scatter(outputs[2], list(whole.reshape(world, length).unbind(0)))
        reduce_scatter_single(outputs[3].reshape(1, length), whole.reshape(world, length))
        return outputs

    results = run(world, ranks)
    assert all(same(output, totals[rank]) for rank, outputs in enumerate(results) for output in outputs)


def test_reduce_scatter_of_pieces_of_different_length() -> None:
    def ranks(rank: int) -> Tensor:
        output = torch.empty(rank + 1)
        dist.reduce_scatter(output, [row(rank, piece + 1) for piece in range(3)])
        return output

    assert all(same(output, rows(3, rank + 1).sum(0)) for rank, output in enumerate(run(3, ranks)))


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all(world: int) -> None:
    """Even, uneven (rank i sends i + j rows to rank j) and as a list."""

    def ranks(rank: int) -> list[Tensor]:
        even = torch.empty(world * 2)
        dist.all_to_all_single(even, row(rank, world * 2))
        sent, received = [rank + other for other in range(world)], [other + rank for other in range(world)]
        uneven = torch.empty(sum(received), 2)
        dist.all_to_all_single(uneven, row(rank, sum(sent) * 2).reshape(-1, 2), received, sent)
        listed = [torch.empty(2) for _ in range(world)]
        dist.all_to_all(listed, list(row(rank, world * 2).split(2)))
        return [even, uneven, torch.cat(listed)]

    for rank, (even, uneven, listed) in enumerate(run(world, ranks)):
        pieces = [row(other, world * 2).reshape(world, 2)[rank] for other in range(world)]
        assert same(even, torch.cat(pieces))
        lengths = [[other + one for one in range(world)] for other in range(world)]
        parts = [row(other, sum(of) * 2).reshape(-1, 2).split(of)[rank] for other, of in enumerate(lengths)]
        assert same(uneven, torch.cat(parts))
        assert same(listed, even)


def test_coalesced() -> None:
    def ranks(rank: int) -> list[Tensor]:
        one, two = row(rank, 3), row(rank, 5)
        dist.all_reduce_coalesced([one, two])
        outputs = [[torch.empty(2), torch.empty(1)] for _ in range(3)]
        dist.all_gather_coalesced(outputs, [row(rank, 2), row(rank, 1)])
        return [one, two, *(torch.cat(of_rank) for of_rank in outputs)]

    for one, two, *gathered in run(3, ranks):
        assert same(one, rows(3, 3).sum(0))
        assert same(two, rows(3, 5).sum(0))
        assert same(torch.stack(gathered), torch.cat([rows(3, 2), rows(3, 1)], 1))


@pytest.mark.parametrize("world", WORLDS)
def test_objects(world: int) -> None:
    def ranks(rank: int) -> tuple[Any, ...]:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 100})
        lists: list[Any] = [rank, [rank] * 3]
        dist.broadcast_object_list(lists, src=world - 1)
        gathered: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(("of", rank), gathered, dst=0)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [f"for {each}" for each in range(world)] if rank == 0 else None, src=0)
        return everyone, lists, gathered, scattered

    for rank, (everyone, lists, gathered, scattered) in enumerate(run(world, ranks)):
        assert everyone == [{"rank": each, "text": "x" * each * 100} for each in range(world)]
        assert lists == [world - 1, [world - 1] * 3]
        assert gathered == ([("of", each) for each in range(world)] if rank == 0 else None)
        assert scattered == [f"for {rank}"]


def test_barriers() -> None:
    """No rank leaves before the last has come."""
    for barrier in (dist.barrier, dist.monitored_barrier):
        came: list[int] = []

        def ranks(rank: int, barrier: Callable[[], None] = barrier, came: list[int] = came) -> int:
            came.append(rank)
            barrier()
            return len(came)

        assert run(4, ranks) == [4] * 4


@pytest.mark.parametrize("order", SumOrder)
@pytest.mark.parametrize("schedule", Schedule)
def test_exact_sums_are_the_same_in_every_order(order: SumOrder, schedule: Schedule) -> None:
    def ranks(rank: int) -> list[Tensor]:
        tensor, piece, listed = row(rank, 35), torch.empty(7), torch.empty(7)
        dist.all_reduce(tensor)
        reduce_scatter_single(piece, row(rank, 35))
        dist.reduce_scatter(listed, list(row(rank, 35).split(7)))
        return [tensor, piece, listed]

    total = rows(5, 35).sum(0)
    for rank, (tensor, piece, listed) in enumerate(run(5, ranks, order=order, schedule=schedule)):
        assert same(tensor, total)
        assert same(piece, total[rank * 7 :][:7])
        assert same(listed, piece)


def test_in_place_all_gather() -> None:
    """The input is a part of the output."""

    def ranks(rank: int) -> Tensor:
        whole = torch.zeros(12)
        mine = whole[rank * 4 : rank * 4 + 4]
        mine.copy_(row(rank, 4))
        all_gather_single(whole, mine)
        return whole

    assert all(same(whole, rows(3, 4).reshape(-1)) for whole in run(3, ranks))


def test_views_and_strides() -> None:
    """gloo reads and writes strided tensors of these collectives by their elements."""

    def ranks(rank: int) -> list[Tensor]:
        strided = torch.stack([row(rank, 4), torch.zeros(4)], 1)[:, 0]
        grid = torch.zeros(4, 6)
        dist.all_gather([grid[:, 2 * each] for each in range(3)], strided)
        whole = torch.zeros(2, 12).t()[:, 0]
        all_gather_single(whole, strided)
        return [grid, whole]

    for grid, whole in run(3, ranks):
        assert same(grid[:, ::2].t(), rows(3, 4))
        assert not grid[:, 1::2].any()
        assert same(whole, rows(3, 4).reshape(-1))


def test_autograd_does_not_see_it() -> None:
    """A leaf that requires grad, and a tensor of inference mode, may be communicated."""

    def ranks(rank: int) -> tuple[Tensor, Tensor, int]:
        leaf = row(rank, 4).requires_grad_()
        version = leaf._version
        dist.all_reduce(leaf)
        (leaf * 2).sum().backward()
        with torch.inference_mode():
            tensor = row(rank, 4)
            dist.all_reduce(tensor)
            pieces = [torch.empty(4) for _ in range(3)]
            dist.all_gather(pieces, tensor)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full((4,), 2.0))
        return leaf.detach(), pieces[2], leaf._version - version

    total = rows(3, 4).sum(0)
    assert all(torch.equal(leaf, total) and torch.equal(piece, total) for leaf, piece, _ in run(3, ranks))


def test_other_names_for_the_root() -> None:
    """By its rank in the group, as well as by its rank in the world."""

    def ranks(rank: int) -> Tensor | None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        tensor = row(rank, 3)
        dist.broadcast(tensor, group=group, group_src=1)
        dist.reduce(tensor, group=group, group_dst=0)
        return tensor if rank == 1 else None

    assert torch.equal(run(3, ranks)[1], row(2, 3) * 2)


def test_a_world_of_256() -> None:
    def ranks(rank: int) -> tuple[Tensor, Tensor]:
        tensor, piece = torch.full((256,), float(rank)), torch.empty(1)
        dist.all_reduce(tensor)
        reduce_scatter_single(piece, torch.arange(256.0) + rank)
        return tensor, piece

    total = float(sum(range(256)))
    for rank, (tensor, piece) in enumerate(run(256, ranks)):
        assert torch.equal(tensor, torch.full((256,), total))
        assert piece.item() == 256 * rank + total


@pytest.mark.parametrize("world_size", [0, -1, 257])
def test_a_world_of_an_impossible_size(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size={world_size}: expected 1 to 256"):
        SimWorld(world_size)
