"""The trees behind a sum, element by element, counted against a rule and put into words. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.oracles import order, probing
from harness.oracles.order import Order, Tree
from harness.oracles.probing import Pair


class Revealed(NamedTuple):
    """Element e was added as ``trees[labels[e]]``; None where its probes fit no tree."""

    trees: tuple[Tree | None, ...]
    labels: NDArray[np.intp]


class Score(NamedTuple):
    """Elements added as predicted, elements that fit no tree, of ``total``."""

    predicted: int
    no_tree: int
    total: int


def reveal(sums: Mapping[Pair, NDArray[np.float32]], world: int) -> Revealed:
    """The tree of each element from the sums of all probes (``[n]`` each).

    Neighbours mostly have the same tree, so that one element of each run is enough, whatever the length; and an
    element without a tree does not hide those of the others.
    """
    wanted = probing.pairs(world)
    stacked = np.stack([sums[pair] for pair in wanted])
    num_elements = stacked.shape[1]
    if num_elements == 0:
        return Revealed((), np.zeros(0, np.intp))
    bits = stacked.view(np.int32)  # a nan, too, is equal to itself
    starts = np.concatenate([[0], np.flatnonzero((bits[:, 1:] != bits[:, :-1]).any(axis=0)) + 1])
    columns, of_run = np.unique(bits[:, starts], axis=1, return_inverse=True)
    trees: list[Tree | None] = []
    for column in columns.T:
        values = np.ascontiguousarray(column).view(np.float32)
        found = probing.reveal({pair: values[index : index + 1] for index, pair in enumerate(wanted)}, world)
        trees.append(None if found is None else found.trees[0])
    labels = np.repeat(of_run.reshape(-1), np.diff(np.append(starts, num_elements)))
    return Revealed(tuple(trees), labels.astype(np.intp))


def score(revealed: Revealed, rule: Order) -> Score:
    """How many elements were added as ``rule`` says; the two summands of an addition may be swapped."""
    shapes = [probing.subtree_sizes(tree) for tree in rule.trees]
    equal = np.zeros((len(revealed.trees), len(shapes)), np.bool_)
    for row, tree in enumerate(revealed.trees):
        if tree is not None:
            sizes = probing.subtree_sizes(tree)
            equal[row] = [sizes == shape for shape in shapes]
    treeless = np.array([tree is None for tree in revealed.trees], np.bool_)
    return Score(
        predicted=int(equal[revealed.labels, rule.labels].sum()),
        no_tree=int(treeless[revealed.labels].sum()),
        total=revealed.labels.size,
    )


def fixed(revealed: Revealed) -> NDArray[np.bool_]:
    """Which elements were added in some fixed order."""
    there = np.array([tree is not None for tree in revealed.trees], np.bool_)
    return there[revealed.labels]


def as_order(revealed: Revealed, world: int) -> Order:
    """The order that was revealed; rank order stands for none."""
    naive = order.fold(range(world))
    return Order(tuple(naive if tree is None else tree for tree in revealed.trees), revealed.labels)


def readable(tree: Tree) -> str:
    """``((1+2)+0)``: the deeper summand first, equals in order of their ranks, since a sum of two commutes."""
    return _normal(tree)[2]


def _normal(tree: Tree) -> tuple[int, int, str]:
    """Depth (negative), smallest rank, text."""
    if isinstance(tree, int):
        return 0, tree, str(tree)
    left, right = sorted((_normal(tree[0]), _normal(tree[1])))
    return min(left[0], right[0]) - 1, min(left[1], right[1]), f"({left[2]}+{right[2]})"


def lines(revealed: Revealed) -> list[str]:
    """One line for each run of elements with one tree: ``chunk 0, elements 0-7: ((1+2)+0)``."""
    labels = revealed.labels
    if not labels.size:
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(labels)) + 1])
    stops = np.append(starts[1:], labels.size)
    found = []
    for chunk, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        tree = revealed.trees[labels[start]]
        text = "no fixed order" if tree is None else readable(tree)
        found.append(f"chunk {chunk}, elements {start}-{stop - 1}: {text}")
    return found
