"""In which order a sum over ranks is added: the rule for gloo, other rules by name, and adding. numpy only.

A :data:`Tree` says how the contributions to one element are added; an :class:`Order` gives each element its tree. The
reference adds in the order of the backend (:func:`add`), so that sums that round can be compared bit for bit. A
simulated world may add in other orders than gloo: :func:`rule` names them. Nothing here recurses, so trees may be deep.

[Note: gloo]
Measured with torch 2.13 on fp32, fp64, bf16 and fp16, at worlds 2 to 8 and lengths from 1 to 2**23; ``harness doctor``
measures it again. ``all_reduce``, ``reduce`` and ``reduce_scatter_tensor`` add around a ring over W chunks of the
call's elements: chunk c starts with rank c - 1, to which c - 2, c - 3, …, c are added (modulo W). A chunk has
``S * ceil(n / (S W))`` of the n elements, with ``S = max(2, ceil(bytes / (W 2**20)))`` segments of at most 1 MiB;
``reduce`` cuts full segments of 1 MiB instead where there are more than two. ``reduce_scatter`` with a list adds each
of its pieces like an ``all_reduce`` of that length. Each addition is rounded to the dtype of the call.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tree = int | tuple["Tree", "Tree"]
"""A rank (its index in the group), or the sum of two trees."""

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Rounding = Literal["fp32", "bf16", "fp16"]
_ITEMSIZE: Mapping[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

_SEGMENT_BYTES = 2**20
SUMMING_KINDS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
"""Collectives that add, as the log of collectives names them (``reduce_scatter``: of one tensor)."""


class Order(NamedTuple):
    """The order of addition of a run of elements: element e is added as ``trees[labels[e]]``."""

    trees: tuple[Tree, ...]
    labels: NDArray[np.intp]

    @property
    def runs(self) -> list[tuple[Tree, int]]:
        """Neighbours with the same tree: ``(tree, how many elements)``."""
        return [(self.trees[label], length) for label, length in _runs(self.labels)]

    def slice(self, start: int, stop: int) -> Order:
        """The order of the elements from ``start`` to ``stop``."""
        return Order(self.trees, self.labels[start:stop])

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for two orders that give every element the same sum: which summand comes first does not matter."""
        names: dict[Tree, int] = {}
        numbers = [names.setdefault(_canonical(tree), len(names)) for tree in self.trees]
        return tuple(Order(tuple(names), np.array(numbers, np.intp)[self.labels]).runs)


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


# --- rules by name ----------------------------------------------------------------------------------------------------

Rule = Callable[[str, int, int, Dtype], Order]
"""The order of one call, from kind, number of elements, size of its group, and dtype; like :func:`gloo`."""

UNKNOWN = "unknown"
"""Of a backend for which no rule is known: rank order is the first guess, and what it really does has to be found out
by probing. NCCL chooses algorithm, protocol and number of channels by itself, call by call."""

RULES = ("ring", "rank", "tree", "random")
_MOST_RUNS = 4


def rule(name: str, seed: int = 0) -> Rule:
    """How the backend of that name's order adds.

    Args:
        name: ``ring`` is :func:`gloo`; ``rank`` adds in rank order; ``tree`` in a balanced binary tree; ``random`` in
            another tree for each of a few runs of elements, whatever the dtype; :data:`UNKNOWN` is a guess.
        seed: Of ``random``, which is a function of it and of the call's kind, elements and group size alone.

    Raises:
        ValueError: There is no such rule.
    """
    if name == "ring":
        return gloo
    if name in ("rank", UNKNOWN):
        return lambda kind, num_elements, group_size, dtype: in_rank_order(group_size, num_elements)
    if name == "tree":
        return lambda kind, num_elements, group_size, dtype: uniform(balanced(group_size), num_elements)
    if name == "random":
        return lambda kind, num_elements, group_size, dtype: _at_random(seed, kind, num_elements, group_size)
    raise ValueError(f"no order of addition is named {name!r}; known are {', '.join(RULES)}")


def balanced(group_size: int) -> Tree:
    """Neighbours are added, then neighbouring sums, and so on; a last one without a neighbour waits for its turn."""
    nodes: list[Tree] = list(range(group_size))
    while len(nodes) > 1:
        paired: list[Tree] = list(zip(nodes[::2], nodes[1::2], strict=False))
        nodes = paired + nodes[len(paired) * 2 :]
    return nodes[0]


def _at_random(seed: int, kind: str, num_elements: int, group_size: int) -> Order:
    starts, trees = _random_runs(seed, kind, num_elements, group_size)
    labels = np.zeros(num_elements, np.intp)
    for start in starts:
        labels[start:] += 1
    return Order(trees, labels)


@functools.lru_cache(maxsize=128)  # all ranks of a simulated world ask for the same
def _random_runs(seed: int, kind: str, num_elements: int, group_size: int) -> tuple[tuple[int, ...], tuple[Tree, ...]]:
    """Where all runs but the first start, and the tree of each."""
    rng = random.Random(f"{seed} {kind} {num_elements} {group_size}")
    starts = sorted(rng.randint(0, num_elements) for _ in range(rng.randrange(_MOST_RUNS)))
    return tuple(starts), tuple(_random_tree(rng, group_size) for _ in range(len(starts) + 1))


def _random_tree(rng: random.Random, group_size: int) -> Tree:
    """Any two sums are added next, until one is left."""
    nodes: list[Tree] = list(range(group_size))
    while len(nodes) > 1:
        left = nodes.pop(rng.randrange(len(nodes)))
        right = nodes.pop(rng.randrange(len(nodes)))
        nodes.append((left, right))
    return nodes[0]


# --- adding -----------------------------------------------------------------------------------------------------------

_SHORT_CHUNK = 100  # elements; from here on a ring's chunks one after the other cost less


def add(order: Order, rows: Sequence[NDArray[np.float32]], rounding: Rounding = "fp32") -> NDArray[np.float32]:
    """Sum of one row for each rank, fp32 ``[n]``, in the given order; every addition is rounded to ``rounding``.

    Half-width formats are held in fp32: rounding an fp32 sum of two such values once more gives the rounded exact sum
    (24 bits are at least twice 11 and two more). Overflow gives inf, as in a backend.

    Raises:
        ValueError: a row has another length than the order.
    """
    labels = order.labels
    if any(row.shape != labels.shape for row in rows):
        shapes = sorted({row.shape for row in rows})
        raise ValueError(f"rows of shapes {shapes} cannot be added in an order of {labels.size} elements")
    result = np.empty(labels.size, np.float32)
    rounded = _ROUNDED[rounding]
    group_size = len(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        if len(order.trees) == group_size > labels.size / _SHORT_CHUNK and order.trees == ring(group_size):
            return _around_the_ring(labels, np.stack(rows), rounded)
        for label, tree in enumerate(order.trees):
            where: NDArray[np.intp] | slice = slice(None)
            if len(order.trees) > 1:
                where = np.flatnonzero(labels == label)
                if not where.size:
                    continue
            result[where] = _evaluate(tree, [row[where] for row in rows], rounded)
    return result


_Rounded = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def _around_the_ring(labels: NDArray[np.intp], rows: NDArray[np.float32], rounded: _Rounded) -> NDArray[np.float32]:
    """All chunks at once: one by one they are as many small additions as the square of the ranks."""
    group_size, num_elements = rows.shape
    places = np.arange(num_elements)
    total: NDArray[np.float32] = rows[(labels - 1) % group_size, places]
    for hop in range(2, group_size + 1):
        total = rounded(total + rows[(labels - hop) % group_size, places])
    return total


def _evaluate(tree: Tree, rows: Sequence[NDArray[np.float32]], rounded: _Rounded) -> NDArray[np.float32]:
    stack: list[NDArray[np.float32]] = []
    for node in bottom_up(tree):
        if isinstance(node, int):
            stack.append(rows[node])
        else:
            right = stack.pop()
            stack[-1] = rounded(stack[-1] + right)
    return stack[0]


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


# --- trees ------------------------------------------------------------------------------------------------------------


def bottom_up(tree: Tree) -> Iterator[Tree]:
    """All nodes, left before right, and each sum directly after its right side: as a machine with a stack adds."""
    pending: list[tuple[Tree, bool]] = [(tree, False)]
    while pending:
        node, below_done = pending.pop()
        if below_done or isinstance(node, int):
            yield node
        else:
            pending += [(node, True), (node[1], False), (node[0], False)]


def _canonical(tree: Tree) -> Tree:
    """The same sum with the smallest rank's side first everywhere."""
    stack: list[tuple[int, Tree]] = []  # each with its smallest rank
    for node in bottom_up(tree):
        if isinstance(node, int):
            stack.append((node, node))
            continue
        right, left = stack.pop(), stack.pop()
        if right[0] < left[0]:
            left, right = right, left
        stack.append((left[0], (left[1], right[1])))
    return stack[0][1]


def _runs(labels: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Equal neighbours: ``(label, how many)``."""
    if not labels.size:
        return []
    edges = np.flatnonzero(np.diff(labels)) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), labels.size]
    return [(int(labels[start]), stop - start) for start, stop in zip(starts, stops, strict=True)]
