"""How the ranks of one colour's group communicate: directly, or in two hops, inside a node and across nodes.

Two hops of a reduction: every node adds up what its ranks have, then one rank of each node adds up the nodes' sums.
Weights go the other way round: across the nodes first, then inside each. Always sums, and one scale at the end: a mean
of means is the mean only where all groups are equal.

[Note: pieces in two hops]
Of ``N`` nodes of ``L`` ranks each, a buffer that is cut into ``N * L`` pieces goes in blocks of ``N`` pieces: the l-th
rank of each node gets the l-th block of its node's sum, and of that the n-th piece is node n's. So rank (n, l) owns
piece ``l * N + n``, where in one hop it owns piece ``n * L + l``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zero2core import collectives
from zero2core.collectives import Work

__all__ = ["Flight", "Hops", "Route", "get_same_card_rank", "get_trainer_ranks", "hops"]


def get_trainer_ranks(rank: int, local_world_size: int) -> tuple[int, range]:
    """The node of ``rank``, and all ranks of that node; ``ValueError`` for a rank or a size below 0 or 1."""
    if rank < 0 or local_world_size < 1:
        raise ValueError(f"rank={rank}, local_world_size={local_world_size}: expected at least 0 and 1")
    node = rank // local_world_size
    return node, range(node * local_world_size, (node + 1) * local_world_size)


def get_same_card_rank(ranks: Sequence[int], rank: int, local_world_size: int) -> int:
    """The member of ``ranks`` on the same node as ``rank`` (the first, where there are several); -1: there is none."""
    _, node = get_trainer_ranks(rank, local_world_size)
    return next((member for member in ranks if member in node), -1)


@dataclass(frozen=True)
class Hops:
    """The ranks of a group as a grid: ``nodes[n][l]``, as the default group counts them."""

    nodes: tuple[tuple[int, ...], ...]

    def place(self, rank: int) -> tuple[int, int]:
        """Node and place in the node of a rank."""
        for node, members in enumerate(self.nodes):
            if rank in members:
                return node, members.index(rank)
        raise ValueError(f"rank {rank} is in no node of {self.nodes}")

    def across(self, local: int) -> tuple[int, ...]:
        """The ranks at one place of every node."""
        return tuple(members[local] for members in self.nodes)

    def groups(self) -> list[tuple[int, ...]]:
        """All groups that two hops communicate in."""
        return [*self.nodes, *(self.across(local) for local in range(len(self.nodes[0])))]


def hops(ranks: Sequence[int], local_world_size: int) -> Hops | None:
    """How a group is spread over nodes; None where one hop does as well, or its nodes are not alike."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // local_world_size, []).append(rank)
    sizes = {len(members) for members in nodes.values()}
    if len(nodes) == 1 or sizes == {1} or len(sizes) > 1:
        return None
    return Hops(tuple(tuple(members) for _, members in sorted(nodes.items())))


class Flight:
    """A communication under way: the first hop is launched at once, each later one when the one before has arrived.

    A rank that has no part in a hop passes None in its place: on every rank the first hops of all flights are launched
    before any second one, so that each group sees its collectives in one order.
    """

    def __init__(self, *hops: Callable[[], Work] | None) -> None:
        self._hops = list(hops)
        self._work = self._launch()

    def _launch(self) -> Work | None:
        hop = self._hops.pop(0) if self._hops else None
        return None if hop is None else hop()

    def wait(self) -> None:
        """Launch what is left, and wait for all of it."""
        while self._work is not None or self._hops:
            if self._work is not None:
                self._work.wait()
            self._work = self._launch()


class Route:
    """One colour's group as this rank sees it. Tensors are contiguous; neither may be touched before ``wait()``.

    Attributes:
        world: ranks of the group.
        rank: this one's place in it.
        piece: which piece of a buffer that is cut is this rank's.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: tuple[int, ...], grid: Hops | None) -> None:
        self._group = group
        self._ranks = ranks
        self.world = len(ranks)
        self.rank = max(collectives.group_rank(group), 0) if self.world > 1 else 0
        self.piece = self.rank
        self._grid = grid
        if grid is not None:
            self._node, self._local = grid.place(ranks[self.rank])
            self._inside = collectives.subgroup(grid.nodes[self._node])
            self._across = collectives.subgroup(grid.across(self._local))
            self.piece = self._local * len(grid.nodes) + self._node

    @property
    def direct(self) -> bool:
        """One hop: the only one in which a collective may average."""
        return self._grid is None

    def reduce(self, tensor: Tensor, owner: int, *, average: bool) -> Flight:
        """Sum into the owner's tensor (its place in the group); garbage in all others."""
        if self.world == 1:
            return Flight()
        if self._grid is None:
            return Flight(lambda: collectives.reduce(tensor, dst=owner, group=self._group, average=average))
        node, local = self._grid.place(self._ranks[owner])
        return Flight(
            lambda: collectives.reduce(tensor, dst=local, group=self._inside),
            (lambda: collectives.reduce(tensor, dst=node, group=self._across)) if self._local == local else None,
        )

    def broadcast(self, tensor: Tensor, owner: int) -> Flight:
        """The owner's tensor to all."""
        if self.world == 1:
            return Flight()
        if self._grid is None:
            return Flight(lambda: collectives.launch_broadcast(tensor, src=owner, group=self._group))
        node, local = self._grid.place(self._ranks[owner])
        return Flight(
            (lambda: collectives.launch_broadcast(tensor, src=node, group=self._across))
            if self._local == local
            else None,
            lambda: collectives.launch_broadcast(tensor, src=local, group=self._inside),
        )

    def between(self, piece: Tensor) -> Tensor | None:
        """What two hops of a buffer with pieces like ``piece`` need in between; None: one hop needs nothing."""
        return None if self._grid is None else piece.new_empty(piece.numel() * len(self._grid.nodes))

    def reduce_scatter(self, output: Tensor, source: Tensor, *, average: bool, block: Tensor | None = None) -> Flight:
        """Sum ``source``; this rank's piece of it into ``output``; ``block``: of :meth:`between`, else a new one."""
        if self.world == 1:
            output.copy_(source)
            return Flight()
        if self._grid is None:
            return Flight(lambda: collectives.reduce_scatter(output, source, group=self._group, average=average))
        between = output.new_empty(output.numel() * len(self._grid.nodes)) if block is None else block
        return Flight(
            lambda: collectives.reduce_scatter(between, source, group=self._inside),
            lambda: collectives.reduce_scatter(output, between, group=self._across),
        )

    def all_gather(self, output: Tensor, source: Tensor, *, block: Tensor | None = None) -> Flight:
        """Every rank's piece, end to end in the order of pieces, into ``output``; ``block``: of :meth:`between`."""
        if self.world == 1:
            output.copy_(source)
            return Flight()
        if self._grid is None:
            return Flight(lambda: collectives.all_gather(output, source, group=self._group))
        between = source.new_empty(source.numel() * len(self._grid.nodes)) if block is None else block
        return Flight(
            lambda: collectives.all_gather(between, source, group=self._across),
            lambda: collectives.all_gather(output, between, group=self._inside),
        )
