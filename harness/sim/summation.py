"""What a reduction over ranks gives, in a chosen order of addition; in a ring with the bits of gloo.

Each operation is rounded to the dtype of the call, and is given gloo's operands in gloo's order: what a rank has comes
before what it has received. That matters to the maximum of a nan and of zeros of either sign.

[Note: ring]
Around the ring, chunk c is added from rank c - 1 down to 0 and on from the last rank down to c. With the ranks' rows
turned round by that much in each chunk, a ring is no more than rank order: one operation a rank, on whole rows.

[Note: numpy]
Most calls are of some hundred elements and cost what calling costs, so everything that numpy has (all but the half
formats) is computed there on the memory of the tensors; it takes half the time.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from harness.oracles import order as orders
from harness.oracles.order import Dtype
from harness.sim.choices import SumOrder

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
Rows = Any
"""A row, or one for each rank ``[W, n]``, of numpy or of torch: both have the operators and slices used here."""

_FLOATING: Mapping[torch.dtype, Dtype] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_INTEGER = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_HALF = (torch.bfloat16, torch.float16)
_BITWISE = ("BAND", "BOR", "BXOR")

# Of so many elements (ranks times length) the way of each into its place is kept: 8 bytes for each of them.
_MOST_INDEXED = 2**15


def supported(op: ReduceOp, dtype: torch.dtype) -> str | None:
    """None when ranks can reduce this dtype so; else a sentence that says why not.

    What gloo of torch 2.13 takes, measured: the same in all-reduce, reduce and both forms of reduce-scatter. Beyond it
    ``PREMUL_SUM``, of the dtypes for which NCCL has it. A complex tensor is summed as the real ones it is made of (the
    mean of such views of it, which ``all_reduce`` of torch makes, has not always the bits of its own), and bool is the
    byte that holds it.
    """
    return _problem(_name(op), dtype)


@functools.cache
def _problem(name: str, dtype: torch.dtype) -> str | None:
    shown = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        if name not in ("SUM", "AVG", "PREMUL_SUM"):
            return f"gloo has no {name} of {shown}: complex numbers are summed or averaged, nothing else"
        dtype = dtype.to_real()
    if dtype not in _FLOATING and dtype not in _INTEGER:
        known = ", ".join(str(one).removeprefix("torch.") for one in (*_FLOATING, *_INTEGER))
        return f"gloo reduces no {shown}; it takes {known}, and complex numbers of these"
    if name in _BITWISE and dtype in _FLOATING:
        return f"gloo has no {name} of {shown}: it combines the bits of integers alone"
    if name == "AVG" and dtype not in _FLOATING:
        return f"gloo has no AVG of {shown}: a mean of integers is none; use SUM, and divide"
    if name == "PREMUL_SUM" and dtype not in _FLOATING:
        return f"there is no PREMUL_SUM of {shown}: only floating-point numbers are multiplied by a factor"
    return None


def reduce(kind: str, tensors: Sequence[Tensor], op: ReduceOp, order: SumOrder, seed: int) -> Tensor:
    """The reduction of all elements, flat ``[n]``, of which the caller gives each rank its part.

    Nothing is written to the tensors, and nothing of it is recorded by autograd.

    Args:
        kind: One of :data:`harness.oracles.order.SUMMING_KINDS`; of a list of pieces each tensor holds all, end to end.
        tensors: One for each rank of the group, contiguous, of equal length, dtype and device.
        op: What is computed.
        order: In which order.
        seed: Of :attr:`SumOrder.RANDOM`.

    Raises:
        ValueError: The sentence of :func:`supported`, or ``kind`` is no reduction.
    """
    name = _name(op)
    dtype = tensors[0].dtype
    problem = _problem(name, dtype)
    if problem is not None:
        raise ValueError(problem)
    with torch.no_grad():
        rows = torch.stack(tuple(tensors))
        if dtype.is_complex:
            rows = torch.view_as_real(rows)
        elif dtype is torch.bool:
            rows = rows.view(torch.uint8)
        if rows.dim() != 2:
            rows = rows.view(len(tensors), math.prod(rows.shape[1:]))
        if name == "PREMUL_SUM":
            rows = rows * _factor(op, rows)  # each product is rounded to the dtype
        total = _combined(_COMBINE.get(name, operator.add), kind, rows, order, seed)
        if dtype.is_complex:
            total = torch.view_as_complex(total.view(-1, 2))
        if name == "AVG":
            # By a tensor: some devices divide by a number in multiplying by its reciprocal.
            total = total / torch.tensor(len(tensors), dtype=total.dtype, device=total.device)
        return total.ne(0) if dtype is torch.bool else total


def _name(op: ReduceOp) -> str:
    """``"SUM"``; an operation with a factor is an object of its own."""
    # In this order: torch says of a kind too that it is an instance of ReduceOp.
    kind = op if isinstance(op, dist.ReduceOp.RedOpType) else cast(Any, op).op
    return _NAMES[kind]


_NAMES: Mapping[object, str] = {value: name for name, value in dist.ReduceOp.RedOpType.__members__.items()}


def _factor(op: ReduceOp, like: Tensor) -> Tensor:
    """What each rank's values are multiplied by, rounded to their dtype first."""
    _, factor = cast(Any, op).__getstate__()  # torch 2.11 has no attribute for it
    return factor.to(like) if isinstance(factor, Tensor) else torch.tensor(factor, dtype=like.dtype, device=like.device)


# --- operations -------------------------------------------------------------------------------------------------------

_Combine = Callable[[Any, Any], Any]
"""Of what a rank has received and of its own, both rows of numpy or both of torch; gives a new row."""


def _max(received: Rows, own: Rows) -> Rows:
    where = torch.where if isinstance(own, Tensor) else np.where
    return where(own < received, received, own)


def _min(received: Rows, own: Rows) -> Rows:
    where = torch.where if isinstance(own, Tensor) else np.where
    return where(received < own, received, own)


_COMBINE: Mapping[str, _Combine] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MAX": _max,
    "MIN": _min,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def _combined(combine: _Combine, kind: str, rows: Tensor, order: SumOrder, seed: int) -> Tensor:
    """The rows ``[W, n]``, one for each rank, made one."""
    group_size, num_elements = rows.shape
    if group_size == 1:
        return rows[0]
    dtype = _FLOATING.get(rows.dtype)
    if dtype is None:
        order, dtype = SumOrder.RANK, "fp32"  # integers give the same bits in any order
    seed = seed if order is SumOrder.RANDOM else 0  # one plan for all seeds
    plan = _plan(order, seed, kind, num_elements, group_size, dtype)
    if not rows.is_cpu:
        return cast(Tensor, plan.followed(combine, plan.turned(rows), torch.cat))
    if rows.dtype not in _HALF:
        with np.errstate(all="ignore"):
            return torch.from_numpy(plan.followed(combine, plan.turned(rows.numpy()), np.concatenate))
    bits = plan.turned(rows.view(torch.int16).numpy())  # numpy moves them, torch adds
    return cast(Tensor, plan.followed(combine, torch.from_numpy(bits).view(rows.dtype), torch.cat))


# --- orders -----------------------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """How rows are turned so that rank order is a ring: in each chunk of each piece alike."""

    num_pieces: int
    chunk_length: int
    origins: NDArray[np.intp] | None  # where each element comes from, if they are few


class _Plan(NamedTuple):
    """An order of addition, ready to be followed.

    Attributes:
        turn: What is done to the rows first; None where nothing is.
        runs: For each run of elements where it ends, and its tree as :func:`harness.oracles.order.bottom_up` has it: a
            row is put on the stack, or (None) the last two are combined.
    """

    turn: _Turn | None
    runs: tuple[tuple[int, tuple[int | None, ...]], ...]

    def turned(self, rows: Rows) -> Rows:
        """The rows ``[W, n]`` as they are combined."""
        if self.turn is None:
            return rows
        num_pieces, chunk_length, origins = self.turn
        if origins is not None and isinstance(rows, np.ndarray):
            return rows.take(origins)
        return _turned(rows, num_pieces, chunk_length)

    def followed(self, combine: _Combine, rows: Rows, concatenate: Callable[[Any], Any]) -> Rows:
        """All rows combined into one."""
        each = list(rows)
        if len(self.runs) == 1:
            return _followed(self.runs[0][1], each, combine)
        pieces, start = [], 0
        for end, steps in self.runs:
            pieces.append(_followed(steps, [row[start:end] for row in each], combine))
            start = end
        return concatenate(pieces)


def _followed(steps: Sequence[int | None], rows: Sequence[Rows], combine: _Combine) -> Rows:
    stack: list[Rows] = []
    for rank in steps:
        if rank is None:
            own = stack.pop()
            stack[-1] = combine(stack[-1], own)
        else:
            stack.append(rows[rank])
    return stack[0]


@functools.lru_cache(maxsize=128)
def _plan(order: SumOrder, seed: int, kind: str, num_elements: int, group_size: int, dtype: Dtype) -> _Plan:
    if kind not in orders.SUMMING_KINDS:
        raise ValueError(f"{kind!r} reduces nothing; known are {', '.join(orders.SUMMING_KINDS)}")
    num_pieces = group_size if kind == "reduce_scatter_list" else 1
    piece, rest = divmod(num_elements, num_pieces)
    if rest:
        raise ValueError(f"{num_elements} elements are no list of {group_size} equal pieces")
    if order is not SumOrder.RING:
        rule = orders.rule(order.value, seed)
        return _Plan(None, _runs(rule(kind, num_elements, group_size, dtype)))
    of_piece = "all_reduce" if kind == "reduce_scatter_list" else kind
    chunk_length = max(1, orders.chunk_length(of_piece, piece, group_size, dtype))
    origins = None
    if group_size * num_elements <= _MOST_INDEXED:
        places = np.arange(group_size * num_elements, dtype=np.intp)
        origins = _turned(places.reshape(group_size, num_elements), num_pieces, chunk_length)
    runs = _runs(orders.in_rank_order(group_size, num_elements))
    return _Plan(_Turn(num_pieces, chunk_length, origins), runs)


def _runs(order: orders.Order) -> tuple[tuple[int, tuple[int | None, ...]], ...]:
    runs, end = [], 0
    # Of no elements too there is a (shortest possible) row.
    for tree, length in order.runs or [(order.trees[0], 0)]:
        end += length
        runs.append((end, tuple(node if isinstance(node, int) else None for node in orders.bottom_up(tree))))
    return tuple(runs)


def _turned(rows: Rows, num_pieces: int, chunk_length: int) -> Rows:
    """Of all ranks' rows ``[W, n]``, rows in the order in which each chunk of each piece is added."""
    group_size, num_elements = rows.shape
    length = num_elements // num_pieces
    last_first = rows.flip(0) if isinstance(rows, Tensor) else rows[::-1]
    last_first = last_first.reshape(group_size, num_pieces, length)
    turned: Rows = torch.empty_like(last_first) if isinstance(rows, Tensor) else np.empty_like(last_first, order="C")
    for chunk in range(group_size):
        start = chunk * chunk_length
        if start >= length:
            break
        of_chunk = slice(start, min(start + chunk_length, length))
        turned[:chunk, :, of_chunk] = last_first[group_size - chunk :, :, of_chunk]
        turned[chunk:, :, of_chunk] = last_first[: group_size - chunk, :, of_chunk]
    return turned.reshape(group_size, num_elements)
