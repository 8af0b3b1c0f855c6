"""In which order a sum over ranks is added: the rule for gloo, and how any order is found out by probing. numpy only.

A :data:`Tree` says how the contributions to one element are added; an :class:`Order` gives each element its tree. The
reference adds in the order of the backend (:func:`add`), so that sums that round can be compared bit for bit.

[Note: gloo]
Measured with torch 2.13 on fp32, fp64, bf16 and fp16, at worlds 2 to 5 and lengths from 1 to 2**23; ``harness doctor``
measures it again. ``all_reduce``, ``reduce`` and ``reduce_scatter_tensor`` add around a ring over W chunks of the
call's elements: chunk c starts with rank c - 1, to which c - 2, c - 3, …, c are added (modulo W). A chunk has
``S * ceil(n / (S W))`` of the n elements, with ``S = max(2, ceil(bytes / (W 2**20)))`` segments of at most 1 MiB;
``reduce`` cuts full segments of 1 MiB instead where there are more than two. ``reduce_scatter`` with a list adds each
of its pieces like an ``all_reduce`` of that length. Each addition is rounded to the dtype of the call.

[Note: probing]
Rank i contributes M = 2**120, rank j -M, all others 1.0. A contribution that is added before the two have met is
absorbed (1.0 is far below the last place of M), all later ones count: the sum is W less the number of ranks in the
smallest subtree that holds both. All pairs reveal the tree, element by element. (Xie, Gao, Fan, Li: "FPRev: Revealing
the Order of Floating-Point Summation", 2024.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tree = int | tuple["Tree", "Tree"]
"""A rank (its index in the group), or the sum of two trees."""

Pair = tuple[int, int]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Rounding = Literal["fp32", "bf16", "fp16"]
_ITEMSIZE: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

PROBE = 2.0**120
"""What a probe cancels: exact in bf16 and fp32, and 1.0 is below the last place even of fp64."""

_SEGMENT_BYTES = 2**20
SUMMING_KINDS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
"""Collectives that add, as the log of collectives names them (``reduce_scatter``: of one tensor)."""


class Order(NamedTuple):
    """The order of addition of a run of elements: element e is added as ``trees[labels[e]]``."""

    trees: tuple[Tree, ...]
    labels: NDArray[np.intp]

    def slice(self, start: int, stop: int) -> Order:
        """The order of the elements from ``start`` to ``stop``."""
        return Order(self.trees, self.labels[start:stop])

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for two orders that give every element the same sum: which summand comes first does not matter."""
        names: dict[Tree, int] = {}
        numbers = [names.setdefault(_canonical(tree), len(names)) for tree in self.trees]
        trees = list(names)
        labels = np.array(numbers, np.intp)[self.labels]
        return tuple((trees[label], length) for label, length in _runs(labels))


def fold(ranks: Sequence[int]) -> Tree:
    """The tree that adds ranks one after the other."""
    tree: Tree = ranks[0]
    for rank in ranks[1:]:
        tree = (tree, rank)
    return tree


def uniform(tree: Tree, num_elements: int) -> Order:
    """Every element is added in the same order."""
    return Order((tree,), np.zeros(num_elements, np.intp))


def in_rank_order(world: int, num_elements: int) -> Order:
    """Rank 0, plus rank 1, plus rank 2, …: what a trainer without shards, or a sum over gathered rows, would do."""
    return uniform(fold(range(world)), num_elements)


def joined(orders: Sequence[Order]) -> Order:
    """The order of several runs of elements, end to end."""
    trees: dict[Tree, int] = {}
    labels = []
    for order in orders:
        numbers = [trees.setdefault(tree, len(trees)) for tree in order.trees]
        labels.append(np.array(numbers, np.intp)[order.labels])
    return Order(tuple(trees), np.concatenate(labels) if labels else np.zeros(0, np.intp))


# --- the rule for gloo ------------------------------------------------------------------------------------------------


@functools.cache
def ring(group_size: int) -> tuple[Tree, ...]:
    """For each chunk of a ring over ``group_size`` ranks, the tree of its elements."""
    return tuple(fold([(chunk - hop) % group_size for hop in range(1, group_size + 1)]) for chunk in range(group_size))


def chunk_length(kind: str, num_elements: int, group_size: int, dtype: Dtype = "fp32") -> int:
    """How many elements of an ``all_reduce``, ``reduce_scatter`` or ``reduce`` call make one chunk of the ring."""
    itemsize = _ITEMSIZE[dtype]
    if kind == "reduce":
        segment = max(1, min(_ceil(num_elements, 2 * group_size), _SEGMENT_BYTES // itemsize))
        return segment * max(2, _ceil(num_elements, segment * group_size))
    num_segments = max(2, _ceil(num_elements * itemsize, group_size * _SEGMENT_BYTES))
    return num_segments * _ceil(num_elements, num_segments * group_size)


def gloo(kind: str, num_elements: int, group_size: int, dtype: Dtype = "fp32") -> Order:
    """The order in which gloo adds the ``num_elements`` elements that each rank hands to one call.

    Args:
        kind: one of :data:`SUMMING_KINDS`.
        num_elements: the whole input; of a reduce-scatter all ranks' pieces.
        group_size: ranks in the call's group; trees name them by their index in it.
        dtype: of the call.

    Raises:
        ValueError: no summing collective, or a list of pieces that does not divide.
    """
    if kind not in SUMMING_KINDS:
        raise ValueError(f"{kind!r} adds nothing; known are {', '.join(SUMMING_KINDS)}")
    if kind == "reduce_scatter_list":
        piece, rest = divmod(num_elements, group_size)
        if rest:
            raise ValueError(f"{num_elements} elements are no list of {group_size} equal pieces")
        return joined([gloo("all_reduce", piece, group_size, dtype)] * group_size)
    length = max(1, chunk_length(kind, num_elements, group_size, dtype))
    return Order(ring(group_size), np.arange(num_elements, dtype=np.intp) // length)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


# --- adding -----------------------------------------------------------------------------------------------------------


def add(order: Order, rows: Sequence[NDArray[np.float32]], rounding: Rounding = "fp32") -> NDArray[np.float32]:
    """Sum of one row for each rank, fp32 ``[n]``, in the given order; every addition is rounded to ``rounding``.

    Half-width formats are held in fp32: rounding an fp32 sum of two such values once more gives the rounded exact sum
    (24 bits are at least twice 11 and two more). Overflow gives inf, as in a backend.

    Raises:
        ValueError: a row has another length than the order.
    """
    if any(row.shape != order.labels.shape for row in rows):
        shapes = sorted({row.shape for row in rows})
        raise ValueError(f"rows of shapes {shapes} cannot be added in an order of {order.labels.size} elements")
    result = np.empty(order.labels.size, np.float32)
    rounded = _ROUNDED[rounding]
    with np.errstate(over="ignore", invalid="ignore"):
        for label, tree in enumerate(order.trees):
            where: NDArray[np.intp] | slice = slice(None)
            if len(order.trees) > 1:
                where = np.flatnonzero(order.labels == label)
                if not where.size:
                    continue
            result[where] = _evaluate(tree, [row[where] for row in rows], rounded)
    return result


def _evaluate(
    tree: Tree, rows: Sequence[NDArray[np.float32]], rounded: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    if isinstance(tree, int):
        return rows[tree]
    # Down the long side without recursion: a fold over 256 ranks is 255 levels deep.
    pending: list[Tree] = []
    while not isinstance(tree, int):
        tree, right = tree
        pending.append(right)
    total = rows[tree]
    for right in reversed(pending):
        total = rounded(total + _evaluate(right, rows, rounded))
    return total


def round_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """fp32 values rounded to bf16 (nearest, ties to even), as fp32; nan stays nan."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded &= np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.float32(np.nan), rounded.view(np.float32))


_ROUNDED: Mapping[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "fp32": lambda values: values,
    "bf16": round_bf16,
    "fp16": lambda values: values.astype(np.float16).astype(np.float32),
}


# --- probing ----------------------------------------------------------------------------------------------------------


def pairs(world: int) -> list[Pair]:
    """The probes that reveal the order of a sum over ``world`` contributions."""
    return list(itertools.combinations(range(world), 2))


def probe(pair: Pair, rank: int) -> float:
    """What ``rank`` contributes to every element in the probe ``pair``."""
    return PROBE if rank == pair[0] else -PROBE if rank == pair[1] else 1.0


def reveal(sums: Mapping[Pair, NDArray[np.float32]], world: int) -> Order | None:
    """The order behind the sums of all probes, fp32 ``[n]`` each; None when some element's sums fit no tree.

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

    def visit(node: Tree) -> list[int]:
        if isinstance(node, int):
            return [node]
        left, right = visit(node[0]), visit(node[1])
        for one, other in itertools.product(left, right):
            sizes[min(one, other), max(one, other)] = len(left) + len(right)
        return left + right

    visit(tree)
    return sizes


def _canonical(tree: Tree) -> Tree:
    """The same sum with the smallest rank's side first everywhere."""
    if isinstance(tree, int):
        return tree
    left, right = _canonical(tree[0]), _canonical(tree[1])
    return (left, right) if _smallest(left) < _smallest(right) else (right, left)


def _smallest(tree: Tree) -> int:
    """The smallest rank of a canonical tree: it is on the first side of every sum."""
    while not isinstance(tree, int):
        tree = tree[0]
    return tree


def _tree(ranks: list[int], size: Mapping[Pair, int]) -> Tree | None:
    """The tree over some ranks: two are on one side of its root when the smallest subtree with both is smaller."""
    if len(ranks) == 1:
        return ranks[0]
    first = ranks[0]
    near = [rank for rank in ranks if rank == first or size[first, rank] < len(ranks)]
    far = [rank for rank in ranks if rank not in near]
    if not far:
        return None
    left, right = _tree(near, size), _tree(far, size)
    return None if left is None or right is None else (left, right)


def _runs(labels: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Equal neighbours: ``(label, how many)``."""
    if not labels.size:
        return []
    edges = np.flatnonzero(np.diff(labels)) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), labels.size]
    return [(int(labels[start]), stop - start) for start, stop in zip(starts, stops, strict=True)]
