"""What the ranks of test_order_on_gloo.py do: a task is JSON ``{"do": name, **arguments}``, the reply JSON.

Each reply counts what was really compared, so that the test can refuse an empty pass, and what was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from harness.launch.rank import RankContext
from harness.oracles import order, probing
from harness.oracles.order import Order

F32 = NDArray[np.float32]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 65521
"""Long rows repeat one block of this length: prime, so that no chunk is a multiple of it."""


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""

    def work(task: bytes) -> bytes:
        arguments = json.loads(task)
        function = globals()[arguments.pop("do")]
        return json.dumps(function(context, **arguments)).encode()

    return work


def probe(
    context: RankContext, kind: str, dtype: str, lengths: list[int], roots: list[int], most: int
) -> dict[str, Any]:
    """Reveal the order of the elements this rank gets (of each result at most so many), and hold it against the rule.

    Revealing millions would take minutes.
    """
    wrong: list[str] = []
    compared = in_rank_order = 0
    for length in lengths:
        for root in roots:
            sums: dict[probing.Pair, F32] = {}
            for pair in probing.pairs(context.world):
                value = probing.probe(pair, context.rank)
                part, sums[pair] = collective(context, kind, torch.full((length,), value, dtype=DTYPES[dtype]), root)
            expected = order.gloo(kind, length, context.world, dtype).slice(part.start, part.stop)
            if not expected.labels.size:
                continue
            kept = sample(expected, most)
            expected = Order(expected.trees, expected.labels[kept])
            revealed = probing.reveal({pair: row[kept] for pair, row in sums.items()}, context.world)
            if revealed is None:
                wrong.append(f"{kind} of {length}, root {root}: no tree explains the sums")
                continue
            compared += expected.labels.size
            wrong += [
                f"{kind} of {length}, root {root}: {number} elements are {found}, expected {tree}"
                for found, tree, number in differences(revealed, expected)
            ]
            unordered = order.in_rank_order(context.world, expected.labels.size)
            in_rank_order += unordered.labels.size - sum(number for _, _, number in differences(revealed, unordered))
    return {"wrong": wrong, "compared": compared, "in_rank_order": in_rank_order}


def sample(expected: Order, most: int) -> NDArray[np.intp]:
    """Of a short run every element; of a long one those around each edge of a chunk, the last, and some between."""
    num = expected.labels.size
    if num <= most:
        return np.arange(num)
    edges = np.flatnonzero(np.diff(expected.labels))
    around = (edges[:, None] + np.arange(-2, 4)).reshape(-1)
    between = np.random.default_rng(num).integers(0, num, most - around.size - 1)
    return np.clip(np.concatenate([around, between, [num - 1]]), 0, num - 1)


def differences(one: Order, other: Order) -> list[tuple[order.Tree, order.Tree, int]]:
    """Pairs of trees that add some elements of the two orders differently, and how many elements."""
    if one.labels.size != other.labels.size:
        raise ValueError(f"orders of {one.labels.size} and {other.labels.size} elements")
    found = []
    both, numbers = np.unique(np.stack([one.labels, other.labels]), axis=1, return_counts=True)
    for (mine, its), number in zip(both.T.tolist(), numbers.tolist(), strict=True):
        # Both summands of an addition may be named first.
        if probing.subtree_sizes(one.trees[mine]) != probing.subtree_sizes(other.trees[its]):
            found.append((one.trees[mine], other.trees[its], number))
    return found


def compare(
    context: RankContext, kind: str, dtype: str, lengths: list[int], roots: list[int], seed: int
) -> dict[str, Any]:
    """Collectives on random data, bit for bit against adding in the order of the rule, and in rank order."""
    wrong: list[str] = []
    compared = rank_order_differs = nonfinite = 0
    for length in lengths:
        for root in roots:
            rows = random_rows(context.world, length, DTYPES[dtype], seed + length)
            part, result = collective(context, kind, rows[context.rank], root)
            if not result.size:
                continue
            inputs = [row[part].float().numpy() for row in rows]
            predicted = order.gloo(kind, length, context.world, dtype).slice(part.start, part.stop)
            differs = differing(result, order.add(predicted, inputs, dtype))
            if differs.size:
                wrong.append(f"{kind} of {length}, root {root}: {differs.size} elements differ, first {differs[0]}")
            by_rank = order.add(order.in_rank_order(context.world, result.size), inputs, dtype)
            rank_order_differs += differing(result, by_rank).size
            nonfinite += int(np.count_nonzero(~np.isfinite(result)))
            compared += result.size
    return {
        "wrong": wrong,
        "compared": compared,
        "rank_order_differs": rank_order_differs,
        "nonfinite": nonfinite,
    }


def differing(one: F32, other: F32) -> NDArray[np.intp]:
    """Where two rows differ in a bit; nan is equal to nan, whatever its bits."""
    if one.shape != other.shape:
        raise ValueError(f"rows of shape {one.shape} and {other.shape}")
    return np.flatnonzero((one.view(np.int32) != other.view(np.int32)) & ~(np.isnan(one) & np.isnan(other)))


def collective(context: RankContext, kind: str, row: Tensor, root: int) -> tuple[slice, F32]:
    """Sum over the ranks by one call: which of the row's elements this rank gets, and their sums."""
    piece = row.numel() // context.world
    mine = slice(context.rank * piece, (context.rank + 1) * piece)
    if kind == "reduce_scatter":
        result = row.new_empty(piece)
        # The name before 2.13 gives a FutureWarning in 2.13.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(result, row)
    elif kind == "reduce_scatter_list":
        result = row.new_empty(piece)
        dist.reduce_scatter(result, list(row.chunk(context.world)))
    elif kind == "reduce":
        result = row.clone()
        dist.reduce(result, dst=root)
        mine = slice(0, row.numel() if context.rank == root else 0)
        result = result[mine]  # What is left on the others is no sum.
    elif kind == "all_reduce":
        result = row.clone()
        dist.all_reduce(result)
        mine = slice(0, row.numel())
    else:
        raise ValueError(kind)
    return mine, result.float().numpy()


def random_rows(world: int, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One row for each rank, the same wherever they are made.

    The exponents of an element are within a few of each other, so that sums round; over the elements they are all that
    there are, subnormal ones too. Between them inf, nan, zeros, the largest finite and the smallest values.
    """
    rng = np.random.default_rng(seed)
    num = min(length, BLOCK)
    limits = torch.finfo(dtype)
    lowest, highest = (int(np.log2(limit)) for limit in (limits.tiny, limits.max))
    exponents = rng.integers(lowest - 8, highest - 3, num) + rng.integers(-3, 4, (world, num))
    values = np.ldexp(rng.uniform(-2.0, 2.0, (world, num)), exponents)
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, limits.max, -limits.max, limits.smallest_normal]
    special += [float(limits.smallest_normal) * float(limits.eps) * sign for sign in (1, -1)]
    # Whole elements of large values or of zeros too: one summand in ten alone would seldom meet its like.
    chosen = rng.random((world, num)) < rng.choice([0.0, 0.1, 1.0], num, p=[0.8, 0.15, 0.05])
    values = np.where(chosen, rng.choice(special, (world, num)), values)
    block = torch.from_numpy(values).to(dtype)
    return list(block.repeat(1, -(-length // num))[:, :length].contiguous())
