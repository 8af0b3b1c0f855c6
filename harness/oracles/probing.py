"""How any order of addition over ranks is found out: by probing, from sums alone. numpy only.

Rank i contributes M = 2**120, rank j -M, all others 1.0. A contribution that is added before the two have met is
absorbed (1.0 is far below the last place of M), all later ones count: the sum is W less the number of ranks in the
smallest subtree that holds both. All pairs reveal the tree, element by element. (Xie, Gao, Fan, Li: "FPRev: Revealing
the Order of Floating-Point Summation", 2024.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.oracles.order import Order, Tree, bottom_up

Pair = tuple[int, int]


class Scale(NamedTuple):
    """What a probe cancels, and what all others contribute: absorbed in fp32, on at most 32 ranks, until it is."""

    probe: float
    one: float


WIDE = Scale(2.0**120, 1.0)
"""Exact in bf16 and fp32; one is below the last place even of fp64."""

HALF = Scale(2.0**15, 2.0**-24)
"""Exact in fp16. 30 times one is far below 2**-10, half of the last place of what lies below the probe in fp32."""


def pairs(world: int) -> list[Pair]:
    """The probes that reveal the order of a sum over ``world`` contributions."""
    return list(itertools.combinations(range(world), 2))


def probe(pair: Pair, rank: int, scale: Scale = WIDE) -> float:
    """What ``rank`` contributes to every element in the probe ``pair``."""
    return scale.probe if rank == pair[0] else -scale.probe if rank == pair[1] else scale.one


def reveal(sums: Mapping[Pair, NDArray[np.float32]], world: int) -> Order | None:
    """The order behind the sums of all probes, in ones, fp32 ``[n]`` each; None when some element's fit no tree.

    A sum that was rounded otherwise than after each addition of two (kept exactly, say) fits no tree either.
    """
    if world == 1:
        raise ValueError("a sum over one rank has no order")
    wanted = pairs(world)
    sizes = np.stack([world - sums[pair].astype(np.float64) for pair in wanted], axis=1)
    if not ((sizes >= 2) & (sizes <= world) & (sizes == np.floor(sizes))).all():
        return None
    # As bytes: numpy finds the different rows of a matrix twenty times as slowly as the different entries of a vector.
    rows = np.ascontiguousarray(sizes.astype(np.uint16))
    packed = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1)
    _, first, labels = np.unique(packed, return_index=True, return_inverse=True)
    trees = []
    for row in rows[first]:
        size = {pair: int(value) for pair, value in zip(wanted, row, strict=True)}
        tree = _tree(list(range(world)), size)
        if tree is None or subtree_sizes(tree) != size:
            return None
        trees.append(tree)
    return Order(tuple(trees), labels.reshape(-1).astype(np.intp))


def subtree_sizes(tree: Tree) -> dict[Pair, int]:
    """For each pair of a tree's ranks, how many ranks the smallest subtree that holds both has."""
    sizes: dict[Pair, int] = {}
    stack: list[list[int]] = []
    for node in bottom_up(tree):
        if isinstance(node, int):
            stack.append([node])
            continue
        right, left = stack.pop(), stack.pop()
        for one, other in itertools.product(left, right):
            sizes[min(one, other), max(one, other)] = len(left) + len(right)
        stack.append(left + right)
    return sizes


def _tree(ranks: list[int], size: Mapping[Pair, int]) -> Tree | None:
    """The tree over some ranks: two are on one side of its root when the smallest subtree with both is smaller."""
    done: list[Tree] = []
    pending: list[list[int] | None] = [ranks]  # None: add the last two
    while pending:
        of_node = pending.pop()
        if of_node is None:
            right = done.pop()
            done[-1] = (done[-1], right)
            continue
        first = of_node[0]
        if len(of_node) == 1:
            done.append(first)
            continue
        near = [rank for rank in of_node if rank == first or size[first, rank] < len(of_node)]
        if len(near) == len(of_node):
            return None
        inside = set(near)
        pending += [None, [rank for rank in of_node if rank not in inside], near]
    return done[0]
