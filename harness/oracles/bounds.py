"""Proven rounding bounds, and the judgement of a squared norm by them. Pure functions, no torch.

[Note: gamma]
Every bound rests on one lemma (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1): a result
that went through at most n operations that round to nearest with unit roundoff u carries a factor ``1 + theta`` with
``|theta| <= gamma_n = n u / (1 - n u)``, provided ``n u < 1``. A sum of n terms, whatever the order, passes each term
through at most n - 1 additions, so it is off by at most ``gamma_{n-1} * sum |x_i|``. Additions never lose anything to
underflow (a subnormal sum is exact); a product may, by at most half the smallest subnormal, ``2**-150`` in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from harness.verdict import Oracle

U32 = 2.0**-24  # unit roundoff of fp32
U64 = 2.0**-53  # unit roundoff of fp64
FP32_MAX = float(np.finfo(np.float32).max)
FP32_UNDERFLOW = 2.0**-150  # the most one fp32 product loses to underflow

# Where the proven bound of a norm is wider than the first, it says too little: the second is asked instead.
LOOSE_ABOVE = 2.0**-8
LOOSE_BOUND = 2.0**-5

# The bounds are evaluated in fp64 with a handful of roundings of their own; this covers them many times over.
_SLACK = 1 + 2.0**-40

Accumulation = Literal["fp32", "fp64"]


def gamma(num_roundings: int, unit: float) -> float:
    """Higham's gamma_n: the relative error after n roundings; inf where the lemma does not hold (``n u >= 1/2``)."""
    product = num_roundings * unit
    return product / (1 - product) if product < 0.5 else math.inf


@overload
def any_order_sum_bound(num_terms: int, abs_sum: float) -> float: ...
@overload
def any_order_sum_bound(num_terms: int, abs_sum: NDArray[np.float64]) -> NDArray[np.float64]: ...
def any_order_sum_bound(num_terms: int, abs_sum: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
    """How far an fp32 sum of ``num_terms`` fp32 terms, added in any order, is from the fp64 sum of the same terms.

    ``abs_sum`` is the sum of their magnitudes, added in fp64, a number or one per element. By [Note: gamma] the fp32
    sum is within ``gamma_{n-1}(2**-24) * abs_sum`` of the exact sum, the fp64 one within ``gamma_{n-1}(2**-53) *
    abs_sum``, and the computed ``abs_sum`` itself is off by a relative ``gamma_{n-1}(2**-53)``, which ``1 + 2 gamma``
    makes up for. One term is not rounded at all. Overflow is not covered.
    """
    roundings = max(num_terms - 1, 0)
    own = gamma(roundings, U64)
    return (gamma(roundings, U32) + own) * (1 + 2 * own) * _SLACK * abs_sum


@dataclass(frozen=True)
class SquaredNorm:
    """A reference squared norm: ``value`` in fp64, within a relative ``error`` of the exact one; may be inf or nan."""

    value: float
    error: float
    num_elements: int


@dataclass(frozen=True)
class NormJudgement:
    """How a squared norm was judged; ``error`` and ``bound`` are relative to the reference."""

    ok: bool
    oracle: Oracle
    error: float
    bound: float


def squared_norm(chunks: Sequence[NDArray[np.float32]]) -> SquaredNorm:
    """Squared L2 norm of fp32 arrays.

    The square of an fp32 value has at most 48 significant bits and lies between 2**-298 and 2**256: exact in fp64. Up
    to 2**12 elements the exact sum is rounded once (fsum). Above, runs of 2**16 elements are folded in halves: each
    square passes through at most 16 additions before the one rounding of fsum, so the relative error is at most
    ``gamma_17(2**-53)`` (all terms are non-negative). Sums that need no rounding come out exact either way.
    """
    num_elements = sum(chunk.size for chunk in chunks)
    if num_elements <= _FSUM_MAX and len(chunks) > 1:  # the sum is exact before it is rounded, however it is cut
        chunks = [np.concatenate([chunk.reshape(-1) for chunk in chunks])]
    sums: list[float] = []
    for chunk in chunks:
        flat = chunk.reshape(-1)
        for start in range(0, flat.size, _FOLD):
            squares = flat[start : start + _FOLD].astype(np.float64)
            squares *= squares
            if num_elements <= _FSUM_MAX:
                sums.extend(squares.tolist())
            else:
                sums.append(_fold(squares))
    return SquaredNorm(math.fsum(sums), gamma(1 if num_elements <= _FSUM_MAX else 17, U64), num_elements)


_FSUM_MAX = 2**12
_FOLD = 2**16


def _fold(values: NDArray[np.float64]) -> float:
    """Sum of at most 2**16 values by adding halves, in place: a tree of depth 16."""
    length = values.size
    while length > 1:
        half = (length + 1) // 2
        values[: length - half] += values[half:length]
        length = half
    return float(values[0])


def squared_norm_bound(
    kind: Accumulation, *, num_elements: int, shard_len: int, world: int, exact: SquaredNorm
) -> tuple[float, float]:
    """Bounds ``(relative, absolute)`` of a right system's squared norm: off by at most relative * norm + absolute.

    ``fp64``: squares and sums in fp64. Each square passes through its own rounding, fewer than ``shard_len`` additions
    on its rank and at most ``world`` across ranks. Nothing underflows: squares of fp32 values stay far above fp64's
    subnormals.
    ``fp32``: the same in fp32, and a system may take the root of its shard's sum and square it again: an error d of
    a root doubles in its square, so this costs three roundings, and storing the sum one more: ``shard_len + world + 4``
    terms. A square that underflows loses at most ``2**-150``; so does one that is squared again on each rank.
    The reference's own error is part of the relative bound.
    """
    unit = U64 if kind == "fp64" else U32
    own = gamma(shard_len + world + 4, unit)
    relative = (own + exact.error) / (1 - exact.error) * _SLACK
    absolute = 0.0 if kind == "fp64" else (num_elements + 2 * world) * FP32_UNDERFLOW
    return relative, absolute


def judge_squared_norm(
    observed: float,
    exact: SquaredNorm,
    *,
    kind: Accumulation,
    shard_len: int,
    world: int,
    bitwise: bool,
) -> NormJudgement:
    """Judge the squared norm that a rank observed against the reference's.

    Args:
        observed: what the system returned, as a Python float.
        exact: the squared norm of the gradient it was computed from (after clipping: of the clipped one).
        kind: how the system accumulates; ``fp32`` unless it promises fp64.
        shard_len: elements of one rank's shard, padding included.
        world: number of ranks.
        bitwise: the data's sum of squares is exact in ``kind`` and the system adds nothing but squares: an unclipped
            norm-exact gradient and a system that promises fp64.
    """
    reference = exact.value
    if math.isnan(reference) or math.isinf(reference) or reference == 0.0:
        # Nothing rounds here: a nan stays, an infinite square wins over all finite ones, zeros square to zeros.
        same = observed == reference or (math.isnan(observed) and math.isnan(reference))
        return NormJudgement(same, Oracle.EXACT, 0.0 if same else math.inf, 0.0)
    error = abs(observed - reference) / reference
    if bitwise:
        return NormJudgement(observed == reference, Oracle.EXACT, error, 0.0)
    relative, absolute = squared_norm_bound(
        kind, num_elements=exact.num_elements, shard_len=shard_len, world=world, exact=exact
    )
    oracle = Oracle.BOUND
    if relative > LOOSE_ABOVE:
        relative, oracle = LOOSE_BOUND, Oracle.LOOSE
    bound = relative + absolute / reference * _SLACK
    # Rounded up, the sum may already leave fp32's range where the exact one does not quite.
    overflow = kind == "fp32" and observed == math.inf and reference * (1 + bound) > FP32_MAX
    return NormJudgement(overflow or error <= bound, oracle, error, bound)


def judge_norm(observed: float, exact: SquaredNorm, *, kind: Accumulation, world: int, bitwise: bool) -> NormJudgement:
    """Judge a norm (the root of a squared norm), an fp32 number, that a rank observed.

    The root of ``s (1 + t)`` is ``sqrt(s) (1 + t')`` with ``|t'| <= |t|``. Beside the roundings of the sum there are
    those of the root, of a scalar that is squared again where it travels between ranks or kinds of gradients (a few:
    4 are allowed), and the last one to fp32. The sum of squares may lie on one rank.

    Args:
        observed: what the system returned.
        exact: the squared norm of the gradient it was computed from.
        kind: how the system accumulates squares: ``fp64`` rounds to fp32 once, at the end.
        world: number of ranks.
        bitwise: the sum of squares is exact in ``kind``: the norm is then the root of it, rounded. A root in fp64 need
            not be rounded correctly on every machine (vector libraries promise less than one unit in the last place).
    """
    root = math.sqrt(exact.value) if exact.value >= 0 else math.nan
    if math.isnan(root) or math.isinf(root) or root == 0.0:
        same = observed == root or (math.isnan(observed) and math.isnan(root))
        return NormJudgement(same, Oracle.EXACT, 0.0 if same else math.inf, 0.0)
    error = abs(observed - root) / root
    if bitwise:
        roots = (math.nextafter(root, 0.0), root, math.nextafter(root, math.inf))
        return NormJudgement(observed in {_to_fp32(each) for each in roots}, Oracle.EXACT, error, 0.0)
    unit = U64 if kind == "fp64" else U32
    sums = gamma(exact.num_elements + world + 8, unit)
    relative, oracle = (sums + exact.error + 2 * U32) / (1 - exact.error) * _SLACK, Oracle.BOUND
    if relative > LOOSE_ABOVE:
        relative, oracle = LOOSE_BOUND, Oracle.LOOSE
    absolute = 0.0 if kind == "fp64" else math.sqrt((exact.num_elements + 2 * world) * FP32_UNDERFLOW)
    bound = relative + (absolute + FP32_UNDERFLOW) / root * _SLACK
    largest = FP32_MAX if kind == "fp64" else math.sqrt(FP32_MAX)
    overflow = observed == math.inf and root * (1 + bound) > largest
    return NormJudgement(overflow or error <= bound, oracle, error, bound)


def _to_fp32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
