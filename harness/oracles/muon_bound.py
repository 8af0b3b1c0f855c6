"""How far rounding can take a master that was updated through Newton-Schulz, whatever the order of its products.

Needed where a system computes the products of Newton-Schulz by other operations than the reference (fused, batched, not
transposed), on inputs that are known to be the reference's bit for bit. What was observed is held against the update in
exact arithmetic (fp64 here), so that rounding counts once.

[Note: Newton-Schulz]
``u`` is the unit roundoff of the iterate (2**-24 in fp32, 2**-8 in bf16), ``v = 2**-24`` that of what products
accumulate in, fp32 or better. Norms are Frobenius norms, ``|.|2`` the largest singular value.

One step takes ``X`` to ``p(X) = a X + b X X' X + c (X X')^2 X``: the odd polynomial ``p(s) = a s + b s^3 + c s^5`` of
each singular value. Its Frechet derivative, in the basis of the singular vectors, multiplies by divided differences of
``p`` at ``s_i`` and ``s_j``, at ``s_i`` and ``-s_j``, and, where one side is longer, at ``s_i`` and 0 (Noferini, "A
formula for the Frechet derivative of a generalized matrix function", 2017). A divided difference is a value of ``p'``
in between, and ``p'`` is even: with all singular values in [0, S] the derivative's norm is at most
``L(S) = max |p'| over [0, S]``. On the way from the exact ``Z`` to the computed ``X``, with ``|X - Z| <= E``, no matrix
has singular values above ``S = |Z|2 + E``. So

    E' <= L(S) E + R,     R: the rounding of this step.

R: let ``n`` be the longer side of the matrix (no product sums more terms, transposed or not), ``x = |Z| + E``,
``w = |Z Z'| + (2 |Z|2 + E) E``, ``g = (1 + gamma_n(v)) (1 + u) - 1`` the relative error of a product of matrices of
absolute values, ``h = gamma_3(u)`` that of what is multiplied by a coefficient, added and rounded. By [Note: gamma] of
:mod:`harness.oracles.bounds`, and since the norm of a product of absolute values is at most that of the factors:

    A = X X'             dA <= g x^2
    A A                  dQ <= g (w + dA)^2 + (2 S^2 + dA) dA
    B = b A + c A A      dB <= |b| dA + |c| dQ + h (|b| (w + dA) + |c| (S^2 w + dQ))
    p = a X + B X        R  <= dB S + g (|B| + dB) x + h (|a| x + (|B| + dB) S),  |B| <= |b| w + |c| S^2 w

The iterate that comes first is ``G / (|G| + eps)``, of norm 1 at most. The root of a sum of ``N`` squares in fp32, in
any order, is off by ``gamma_{N+2}(v) |G|``, and by ``sqrt(N) 2**-75`` where squares underflow; the sum with eps, the
quotient and the conversion to the iterate's dtype are rounded once each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.oracles.bounds import FP32_MAX, U32, gamma
from harness.oracles.newton_schulz import Triple, blocks, scale_of, triples
from harness.scenario.muon import Mark, MuonSettings
from harness.verdict import Oracle

UNITS = {"bf16": 2.0**-8, "fp32": U32}

LOOSE_ABOVE = 2.0**-4
"""Of the norm of the orthogonalised matrix: a wider bound says too little."""

# All coefficient sets keep singular values below this.
_LARGEST = 2.0
# Of the norm. What fp64 itself loses is far less: no singular value grows by more than 2**13 in all steps of any set.
_FP64 = 2.0**-36
# An error as small as this says much, also of zeros.
_NOTHING = 2.0**-30
_SMALLEST = 2.0**-149
# Elements that underflow lose at most 2**-134 each, in bf16, a few times in a step.
_UNDERFLOW = 2.0**-120


@dataclass(frozen=True)
class Iterated:
    """Newton-Schulz of one matrix in fp64, and how far a computed one may be from that, in the Frobenius norm.

    ``error`` is inf where rounding may do anything; ``lost``: already the first iterate, since the norm that it is
    divided by over- or underflows in fp32, or nothing is finite.
    """

    value: Tensor
    error: float
    lost: bool = False

    @property
    def loose(self) -> bool:
        """The error says too little."""
        return not self.error <= max(LOOSE_ABOVE * float(torch.linalg.vector_norm(self.value)), _NOTHING)


def iterated(matrix: Tensor, settings: MuonSettings) -> Iterated:
    """Of one fp32 matrix ``[rows, columns]``; see the note of this module."""
    unit = UNITS[settings.ns_dtype]
    value = matrix.double()
    rows, columns = value.shape
    norm = float(torch.linalg.vector_norm(value))
    if not math.isfinite(norm) or norm * norm > FP32_MAX:
        return Iterated(torch.zeros_like(value), math.inf, lost=True)
    divisor = norm + settings.ns_eps
    error = _first_error(value.numel(), norm, divisor, unit)
    if error == math.inf:
        return Iterated(torch.zeros_like(value), math.inf, lost=True)
    value = value / divisor
    singular = torch.linalg.svdvals(value) if value.numel() else torch.zeros(0, dtype=torch.float64)
    longer = max(rows, columns)
    for coefficients in triples(settings):
        error = _next_error(coefficients, singular, error, longer, unit)
        value = _polynomial(coefficients, value)
        singular = _of_singular(coefficients, singular).abs()
        if not math.isfinite(error):
            break
    return Iterated(value, error + _FP64 * float(torch.linalg.vector_norm(value)))


def _first_error(numel: int, norm: float, divisor: float, unit: float) -> float:
    off = (gamma(numel + 2, U32) * norm + math.sqrt(numel) * 2.0**-75) / divisor if divisor else math.inf
    if not off < 0.5:
        return math.inf
    relative = (1 + off / (1 - off)) * (1 + U32) ** 2 * (1 + unit) - 1
    return norm / divisor * relative * (1 + U32) + math.sqrt(numel) * 2.0**-133


def _next_error(coefficients: Triple, singular: Tensor, error: float, longer: int, unit: float) -> float:
    """E' of the note."""
    first, third, fifth = (abs(coefficient) for coefficient in coefficients)
    largest = float(singular.max()) if singular.numel() else 0.0
    reach = largest + error
    if not reach < 2.0**20:
        return math.inf
    size = float(torch.linalg.vector_norm(singular)) + error
    gram = float(torch.linalg.vector_norm(singular**2)) + (2 * largest + error) * error
    product = (1 + gamma(longer, U32)) * (1 + unit) - 1
    sum_ = gamma(3, unit)
    off_gram = product * size**2
    off_square = product * (gram + off_gram) ** 2 + (2 * reach**2 + off_gram) * off_gram
    polynomial = third * gram + fifth * reach**2 * gram
    off_polynomial = (
        third * off_gram
        + fifth * off_square
        + sum_ * (third * (gram + off_gram) + fifth * (reach**2 * gram + off_square))
    )
    whole = polynomial + off_polynomial
    rounding = off_polynomial * reach + product * whole * size + sum_ * (first * size + whole * reach)
    return steepest(coefficients, reach) * error + rounding + longer * _UNDERFLOW


def steepest(coefficients: Triple, reach: float) -> float:
    """``max |p'(s)|`` for s in [0, reach]: ``p'`` is a quadratic in s^2, largest at an end or where it turns."""
    first, third, fifth = coefficients
    places = [0.0, reach**2]
    if fifth:
        turn = -3 * third / (10 * fifth)
        if 0 < turn < reach**2:
            places.append(turn)
    return max(abs(first + 3 * third * t + 5 * fifth * t * t) for t in places)


def _polynomial(coefficients: Triple, value: Tensor) -> Tensor:
    first, third, fifth = coefficients
    transposed = value.shape[0] > value.shape[1]
    if transposed:
        value = value.mT
    gram = value @ value.mT
    value = first * value + (third * gram + fifth * (gram @ gram)) @ value
    return value.mT if transposed else value


def _of_singular(coefficients: Triple, singular: Tensor) -> Tensor:
    first, third, fifth = coefficients
    square = singular**2
    return singular * (first + square * (third + square * fifth))


@dataclass(frozen=True)
class Judged:
    """How an updated master was judged; ``margin``: the largest error in terms of its bound."""

    ok: bool
    oracle: Oracle
    margin: float
    text: str


def judge_update(
    observed: Tensor,
    master: Tensor,
    update: Tensor,
    mark: Mark,
    settings: MuonSettings,
    *,
    lr: float,
    weight_decay: float,
) -> Judged:
    """Judge a master after a step of Muon, matrix by matrix.

    ``m (1 - lr decay) - lr s O`` is rounded six times at most on its way: the factor of the master, its product, ``s``,
    ``s O``, ``lr s O`` and the sum.

    Args:
        observed: the master as it is now, fp32, whole.
        master: as it was before.
        update: what was orthogonalised: the momentum, or the gradient moved towards it.
        mark, settings: how.
        lr, weight_decay: of this parameter.
    """
    oracle, margin, text, ok = Oracle.BOUND, 0.0, "", True
    for seen, before, matrix in zip(
        _matrices(observed, mark), _matrices(master, mark), _matrices(update, mark), strict=True
    ):
        if not seen.numel():
            continue
        one = _judge_matrix(seen, before, matrix, settings, lr, weight_decay)
        oracle = Oracle.LOOSE if one.oracle is Oracle.LOOSE else oracle
        ok = ok and one.ok
        if one.margin >= margin or not one.ok:
            margin, text = one.margin, one.text
        if not ok:
            break
    return Judged(ok, oracle, margin, text)


def _judge_matrix(
    seen: Tensor, before: Tensor, matrix: Tensor, settings: MuonSettings, lr: float, weight_decay: float
) -> Judged:
    rows, columns = matrix.shape
    exact = iterated(matrix, settings)
    step = lr * scale_of(rows, columns, settings)
    expected = before.double() * (1 - lr * weight_decay) - step * exact.value
    oracle, error = Oracle.BOUND, exact.error
    if exact.loose:
        oracle = Oracle.LOOSE
        # Rounding may make anything of it, but a matrix of such singular values.
        error = 2 * _LARGEST * math.sqrt(min(rows, columns))
    size = float(torch.linalg.vector_norm(exact.value)) + error
    rounding = gamma(6, U32) * (float(torch.linalg.vector_norm(before.double())) + step * size)
    bound = step * error + rounding + math.sqrt(matrix.numel()) * _SMALLEST
    off = float(torch.linalg.vector_norm(seen.double() - expected))
    text = f"off by {off:.3g} in the Frobenius norm, bound {bound:.3g} ({oracle.value})"
    return Judged(exact.lost or off <= bound, oracle, off / bound if bound else math.inf, text)


def _matrices(tensor: Tensor, mark: Mark) -> Iterator[Tensor]:
    """Every matrix that is orthogonalised by itself."""
    for block in blocks(tensor, mark):
        if block.numel():
            yield from block.reshape(-1, *block.shape[-2:]).unbind(0)
