"""How one parameter is to be optimised, and into which blocks its matrix is cut before Newton-Schulz.

Weights are ``[out, in]`` as in ``torch.nn.Linear``: rows are outputs, the dimension before the last. Dimensions before
the rows are a stack of matrices (experts), each on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from torch import Tensor

__all__ = ["MuonParamInfo", "Split", "cut", "info_problem"]

Split = Literal["none", "qkv", "heads", "gate_up"]

_NUM_BLOCKS = {"qkv": 3, "gate_up": 2}


@dataclass(frozen=True)
class MuonParamInfo:
    """How one parameter is to be optimised; checked where it meets its parameter, see :func:`info_problem`.

    Attributes:
        use_muon: orthogonalise it as whole matrices; False: element by element, by AdamW.
        split: blocks of rows that are orthogonalised each on its own: the whole matrix; query, key and value; heads of
            as many rows each; gate and up.
        sizes: rows of each block of ``"qkv"`` (three) and ``"gate_up"`` (two; none: two halves).
        num_heads: blocks of ``"heads"``.
        lr_scale: the learning rate of the group times this one is the parameter's.
        weight_decay: None: that of the group.
        need_clip: its gradient is clipped, and counts in the joint norm.
    """

    use_muon: bool = False
    split: Split = "none"
    sizes: tuple[int, ...] = ()
    num_heads: int = 1
    lr_scale: float = 1.0
    weight_decay: float | None = None
    need_clip: bool = True


def cut(matrix: Tensor, info: MuonParamInfo) -> list[Tensor]:
    """Views of ``matrix`` ``[..., rows, cols]`` that cover it, each to be orthogonalised on its own.

    ``"heads"`` gives one view ``[..., num_heads, rows / num_heads, cols]``: a batch. The record must fit the shape.
    """
    if info.split == "none":
        return [matrix]
    if info.split == "heads":
        *stack, rows, cols = matrix.shape
        return [matrix.view(*stack, info.num_heads, rows // info.num_heads, cols)]
    sizes = info.sizes or (matrix.shape[-2] // 2,) * 2
    starts = accumulate(sizes, initial=0)
    return [matrix.narrow(-2, start, size) for start, size in zip(starts, sizes, strict=False)]


def info_problem(name: str, shape: Sequence[int], info: MuonParamInfo) -> str | None:
    """Why a parameter of this name and shape cannot be optimised as ``info`` says; None when it can."""
    where = f"{name}, shape {tuple(shape)},"
    if info.split not in get_args(Split):
        return f"{where} has split={info.split!r}: must be one of {', '.join(map(repr, get_args(Split)))}"
    if not (math.isfinite(info.lr_scale) and info.lr_scale >= 0):
        return f"{where} has lr_scale={info.lr_scale}: must be finite and at least 0"
    if info.weight_decay is not None and not (math.isfinite(info.weight_decay) and info.weight_decay >= 0):
        return f"{where} has weight_decay={info.weight_decay}: must be finite and at least 0, or None for the group's"
    if not info.use_muon:
        return None
    if len(shape) < 2:
        return f"{where} has use_muon=True, but is no matrix: only tensors of 2 dimensions or more can be; unmark it"
    problem = _cut_problem(shape[-2], info)
    return None if problem is None else f"{where} has split={info.split!r}, {problem}"


def _cut_problem(rows: int, info: MuonParamInfo) -> str | None:
    if info.split != "heads" and info.num_heads != 1:
        return f"num_heads={info.num_heads}: num_heads is of split='heads' only"
    if info.split == "heads":
        if info.num_heads < 1 or rows % info.num_heads:
            return f"num_heads={info.num_heads}, which does not divide its {rows} rows"
        return f"sizes={info.sizes}: heads are of equal size, give num_heads only" if info.sizes else None
    if info.split == "none":
        return f"sizes={info.sizes}: say what they are of, split='qkv' or 'gate_up'" if info.sizes else None
    if info.split == "gate_up" and not info.sizes:
        return f"no sizes, and its {rows} rows have no halves: give sizes" if rows % 2 else None
    if len(info.sizes) != _NUM_BLOCKS[info.split]:
        return f"sizes={info.sizes}: needs the rows of {_NUM_BLOCKS[info.split]} blocks"
    if min(info.sizes) < 1 or sum(info.sizes) != rows:
        return f"sizes={info.sizes}, sum {sum(info.sizes)}: must be positive and add up to its {rows} rows"
    return None
