"""What the ranks of test_sim_sums_as_gloo.py do: a task is JSON ``{"do": name, **arguments}``, the reply JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.launch.rank import RankContext
from harness.sim.choices import SumOrder
from harness.sim.summation import reduce, supported
from tests.ranks.order_handler import random_rows

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""

    def work(task: bytes) -> bytes:
        arguments = json.loads(task)
        function = globals()[arguments.pop("do")]
        # Some names of functions are of an older torch, some dtypes of complex numbers are said to be unfinished.
        with warnings.catch_warnings(action="ignore"):
            return json.dumps(function(context, **arguments)).encode()

    return work


def compare(
    context: RankContext, cases: list[tuple[str, str, str, int, int]], seed: int, others: bool = False
) -> dict[str, Any]:
    """gloo against the simulated world, bit for bit, nan being equal to nan.

    A case is ``(kind, dtype, op, elements, root)``. With ``others`` the reply's ``otherwise`` counts the elements that
    rank order, or in a maximum or minimum keeping nan, would have given other bits.
    """
    wrong: list[str] = []
    compared = otherwise = nans = 0
    for number, (kind, dtype, op, length, root) in enumerate(cases):
        rows = rows_of(context.world, length, getattr(torch, dtype), seed + number)
        reduction = getattr(dist.ReduceOp, op)
        real = collective(context, kind, rows[context.rank], reduction, root)
        mine = part_of_rank(context, length, kind, root)
        result, expected = real[: mine.stop - mine.start], simulated(kind, rows, reduction, SumOrder.RING)[mine]
        equal = same(result, expected)
        if not equal.all():
            places = (~equal).nonzero()
            first = int(places[0])
            wrong.append(
                f"{kind} of {dtype}[{length}], {op}, root {root}: {len(places)} elements differ, first {first}: "
                f"gloo {result[first].item()}, simulated {expected[first].item()}"
            )
        compared += result.numel()
        if others:
            keeps_nan = op in ("MAX", "MIN")
            other = kept_nan(rows, op) if keeps_nan else simulated(kind, rows, reduction, SumOrder.RANK)
            otherwise += int((~same(expected, other[mine])).sum())
        if result.is_floating_point():
            nans += int(result.isnan().sum())
    return {"wrong": wrong, "compared": compared, "otherwise": otherwise, "nans": nans}


def kept_nan(rows: list[Tensor], op: str) -> Tensor:
    """The maximum or minimum that is nan wherever there is one."""
    return torch.stack(rows).amax(0) if op == "MAX" else torch.stack(rows).amin(0)


def refusals(context: RankContext, kind: str, dtypes: list[str], ops: list[str]) -> dict[str, Any]:
    """What gloo refuses and what the simulated world does, as far as the two disagree."""
    wrong: list[str] = []
    refused = 0
    for dtype in dtypes:
        for op in ops:
            row = torch.ones(context.world).to(getattr(torch, dtype))
            reduction = getattr(dist.ReduceOp, op)
            said = supported(reduction, row.dtype)
            try:
                collective(context, kind, row, reduction, 0)
            except (RuntimeError, ValueError) as error:
                refused += 1
                if said is None:
                    wrong.append(f"{op} of {dtype}: gloo says {error}")
            else:
                if said is not None:
                    wrong.append(f"{op} of {dtype}: gloo takes it, but {said}")
    return {"wrong": wrong, "refused": refused}


def same(one: Tensor, other: Tensor) -> Tensor:
    """Which elements have equal bits, or are nan in both."""
    if one.dtype != other.dtype or one.shape != other.shape:
        raise AssertionError(f"{one.dtype}{list(one.shape)} against {other.dtype}{list(other.shape)}")
    if one.is_complex():
        both = same(torch.view_as_real(one).reshape(-1), torch.view_as_real(other).reshape(-1))
        return both.view(-1, 2).all(1)
    if one.dtype is torch.bool:  # any byte but 0 is true
        return one.view(torch.uint8).ne(0) == other.view(torch.uint8).ne(0)
    if not one.is_floating_point():
        return one == other
    width = BITS[one.itemsize]
    return (one.view(width) == other.view(width)) | (one.isnan() & other.isnan())


def part_of_rank(context: RankContext, length: int, kind: str, root: int) -> slice:
    """Which elements of the reduction this rank gets."""
    if kind == "reduce":
        return slice(0, length if context.rank == root else 0)
    piece = length // context.world
    return slice(context.rank * piece, (context.rank + 1) * piece) if "scatter" in kind else slice(0, length)


def simulated(kind: str, rows: list[Tensor], op: Any, order: SumOrder) -> Tensor:
    """What the simulated world computes; the rows must stay as they are."""
    kept = [row.clone() for row in rows]
    if kind == "all_reduce" and rows[0].is_complex():  # torch hands them to the group as real ones
        total = torch.view_as_complex(reduce(kind, [torch.view_as_real(row) for row in rows], op, order, 0).view(-1, 2))
    else:
        total = reduce(kind, rows, op, order, 0)
    if not all(same(row, before).all() for row, before in zip(rows, kept, strict=True)):
        raise AssertionError(f"{kind}, {op} of {rows[0].dtype}: an input was changed")
    return total


def collective(context: RankContext, kind: str, row: Tensor, op: Any, root: int) -> Tensor:
    """What this rank gets of one call; the row stays as it is."""
    if kind.startswith("reduce_scatter"):
        result = row.new_empty(row.numel() // context.world)
        if kind == "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(result, row, op)
        else:
            dist.reduce_scatter(result, list(row.chunk(context.world)), op)
        return result
    result = row.clone()
    if kind == "reduce":
        dist.reduce(result, root, op)
    else:
        dist.all_reduce(result, op)
    return result


def rows_of(world: int, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One row for each rank, the same wherever they are made: whatever there is of the dtype."""
    if dtype.is_complex:
        parts = random_rows(world, 2 * length, dtype.to_real(), seed)
        return [torch.view_as_complex(row.view(-1, 2)) for row in parts]
    if dtype.is_floating_point:
        return [row.clone() for row in random_rows(world, length, dtype, seed)]
    rng = np.random.default_rng(seed)
    if dtype is torch.bool:
        return list(torch.from_numpy(rng.random((world, length)) < 0.5))
    limits = torch.iinfo(dtype)
    numbers = rng.integers(limits.min, limits.max, (world, length), np.int64, endpoint=True)
    few = rng.integers(0, 4, (world, length))  # products of these are not all zero
    values = np.where(rng.random((world, length)) < 0.5, numbers, few)
    return list(torch.from_numpy(values).to(dtype))
