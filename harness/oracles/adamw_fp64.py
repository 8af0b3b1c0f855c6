"""AdamW once more, in numpy fp64 on a sample of elements, with a running bound on what fp32 may differ by.

The bitwise reference is torch's own optimizer; so is the subject's. This second reference, written from the paper
(Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2), guards against an error that both
share: a wrong formula, not a wrong bit.

[Note: running error]
Next to each fp64 value x stands e with ``|x32 - x| <= e``, where x32 is the value that fp32 arithmetic holds. With
``u = 2**-24`` and ``h = 2**-150`` every fp32 operation returns its exact result z with an error of at most
``u |z| + h`` (h only where something can underflow: not where z is certainly zero). fp64's own roundings, and those of
evaluating the bounds, are covered by adding ``2**-48 |z|`` as well. Scalars reach a kernel rounded to fp32 or not: the
distance of the two is the scalar's error. The steps, each with all its possible orders and with or without fused
multiply-add (which only removes roundings):

- decay ``p * s``: ``e' = |s| e + ds (|p| + e)``, one rounding;
- first moment ``m + w (g - m)`` or ``g - (g - m) (1 - w)``: in exact arithmetic ``(1 - w) m + w g``, so
  ``e' = (1 - w) e + dw D + 2 u w D`` with ``D = |g - m| + e``, one rounding more;
- second moment ``(v b) + (a g) g``: each product and the sum rounded;
- with amsgrad the largest second moment so far takes the place of the second moment in what follows: of two values the
  larger one is off by no more than the error of either, and choosing rounds nothing;
- with maximize the gradient enters with the other sign, exactly;
- denominator ``sqrt(v) / c + eps``: ``|sqrt(v32) - sqrt(v)| <= e / (sqrt(v) + sqrt(max(v - e, 0)))``, and never more
  than ``sqrt(e)``; a division by a scalar may be a product with its rounded reciprocal: two roundings;
- update ``p - a m / d`` as ``(a m) / d`` or ``a (m / d)``: the quotient's propagated error is
  ``em / dl + |m| ed / (d dl)`` with ``dl = d - ed``, two roundings, an underflow of the first operation scaled by the
  second, and one rounding of the sum.

An element any of whose intermediate values can leave fp32's range, or whose denominator cannot be told from zero, is
not judged from then on; it is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.oracles.bounds import FP32_MAX, FP32_UNDERFLOW, U32
from harness.scenario.model import AdamW

_Array = NDArray[np.float64]
_OWN = 2.0**-48  # this module's fp64 roundings, relative


@dataclass(frozen=True)
class FormulaViolation:
    """An element whose fp32 value lies outside what rounding explains. ``sample`` is its position in the sample."""

    sample: int
    name: str  # "master", or a moment's
    expected: float
    actual: float
    bound: float


@dataclass(frozen=True)
class FormulaJudgement:
    """``num_judged`` elements were compared, ``num_unjudged`` could not be (overflow, a denominator near zero)."""

    violation: FormulaViolation | None
    num_judged: int
    num_unjudged: int


def choose(numels: Sequence[int], limit: int = 64) -> list[NDArray[np.int64]]:
    """A fixed sample of at most ``limit`` elements: for each parameter the flat indices, ascending, maybe none.

    First and last element of every parameter, or of evenly spaced ones where there are too many; then elements evenly
    spaced over all of them.
    """
    filled = [index for index, numel in enumerate(numels) if numel]
    wanted: list[set[int]] = [set() for _ in numels]
    if filled:
        num_ends = min(len(filled), limit // 2)
        for at in np.linspace(0, len(filled) - 1, num_ends, dtype=np.int64).tolist():
            parameter = filled[at]
            wanted[parameter] |= {0, numels[parameter] - 1}
        ends = np.cumsum(np.array(numels, np.int64))
        room = limit - sum(map(len, wanted))
        for flat in np.linspace(0, int(ends[-1]) - 1, room, dtype=np.int64).tolist():
            parameter = int(np.searchsorted(ends, flat, side="right"))
            wanted[parameter].add(flat - int(ends[parameter]) + numels[parameter])
    return [np.array(sorted(indices), np.int64) for indices in wanted]


class AdamWFp64:
    """AdamW on a sample of elements in fp64.

    Attributes:
        judged: bool ``[n]``, the elements about which something can still be said.
        num_steps: steps taken.
    """

    def __init__(self, settings: AdamW, weights: NDArray[np.float32]) -> None:
        """``weights``: initial masters of the sampled elements, fp32 ``[n]``."""
        self._settings = settings
        self._master = weights.astype(np.float64)
        self._exp_avg = np.zeros_like(self._master)
        self._exp_avg_sq = np.zeros_like(self._master)
        self._master_error = np.zeros_like(self._master)
        self._exp_avg_error = np.zeros_like(self._master)
        self._exp_avg_sq_error = np.zeros_like(self._master)
        self._largest = np.zeros_like(self._master)  # max_exp_avg_sq
        self._largest_error = np.zeros_like(self._master)
        self.judged = np.isfinite(self._master)
        self.num_steps = 0

    def step(self, gradients: NDArray[np.float32]) -> None:
        """One step from the sampled elements' gradients, fp32 ``[n]``, the very values the optimizer is given."""
        with np.errstate(all="ignore"):
            self.num_steps += 1
            gradient = gradients.astype(np.float64) * (-1.0 if self._settings.maximize else 1.0)
            self.judged &= np.isfinite(gradient)
            self._decay()
            self._first_moment(gradient)
            self._second_moment(gradient)
            self._update()

    def set_rate(self, lr: float) -> None:
        """The learning rate from the next step on."""
        self._settings = replace(self._settings, lr=lr)

    def load(self, weights: NDArray[np.float32]) -> None:
        """Other masters of the sampled elements, fp32 ``[n]``; moments stay."""
        self._master = weights.astype(np.float64)
        self._master_error = np.zeros_like(self._master)
        self.judged &= np.isfinite(self._master)

    def judge(self, master: NDArray[np.float32], *moments: NDArray[np.float32]) -> FormulaJudgement:
        """Compare the sampled elements of an optimizer's state, each fp32 ``[n]``, with the fp64 ones.

        ``moments``: ``exp_avg``, ``exp_avg_sq`` and, with amsgrad, ``max_exp_avg_sq``.
        """
        num_judged = int(self.judged.sum())
        known = [
            ("exp_avg", self._exp_avg, self._exp_avg_error),
            ("exp_avg_sq", self._exp_avg_sq, self._exp_avg_sq_error),
        ]
        if self._settings.amsgrad:
            known.append(("max_exp_avg_sq", self._largest, self._largest_error))
        known.append(("master", self._master, self._master_error))
        for (name, expected, bound), values in zip(known, (*moments, master), strict=True):
            actual = values.astype(np.float64)
            with np.errstate(all="ignore"):
                outside = self.judged & ~(np.abs(actual - expected) <= bound)
            if outside.any():
                at = int(outside.argmax())
                violation = FormulaViolation(at, name, float(expected[at]), float(actual[at]), float(bound[at]))
                return FormulaJudgement(violation, num_judged, self.judged.size - num_judged)
        return FormulaJudgement(None, num_judged, self.judged.size - num_judged)

    def _decay(self) -> None:
        if self._settings.weight_decay == 0:
            return
        scale = 1 - self._settings.lr * self._settings.weight_decay
        error = abs(scale) * self._master_error + _cast_error(scale) * (np.abs(self._master) + self._master_error)
        self._master *= scale
        self._master_error = self._rounded(self._master, error)

    def _first_moment(self, gradient: _Array) -> None:
        weight = 1 - self._settings.beta1
        distance = np.abs(gradient - self._exp_avg) + self._exp_avg_error
        self._in_range(distance, 0.0)
        error = (1 - weight) * self._exp_avg_error + (_cast_error(weight) + 2.001 * U32 * weight) * distance
        error += np.where(distance > 0, 2 * FP32_UNDERFLOW, 0.0)
        self._exp_avg = (1 - weight) * self._exp_avg + weight * gradient
        # The terms may cancel: what fp64 rounds is relative to them, not to their sum.
        error += _OWN * distance
        self._exp_avg_error = self._rounded(self._exp_avg, error)

    def _second_moment(self, gradient: _Array) -> None:
        beta2 = self._settings.beta2
        error = beta2 * self._exp_avg_sq_error
        error += _cast_error(beta2) * (self._exp_avg_sq + self._exp_avg_sq_error)
        kept = beta2 * self._exp_avg_sq
        kept_error = self._rounded(kept, error)

        weight = 1 - beta2
        magnitude = np.abs(gradient)
        scaled = weight * magnitude
        scaled_error = self._rounded(scaled, _cast_error(weight) * magnitude)
        added = scaled * magnitude
        added_error = self._rounded(added, scaled_error * magnitude)

        self._exp_avg_sq = kept + added
        self._exp_avg_sq_error = self._rounded(self._exp_avg_sq, kept_error + added_error)
        if self._settings.amsgrad:
            self._largest = np.maximum(self._largest, self._exp_avg_sq)
            self._largest_error = np.maximum(self._largest_error, self._exp_avg_sq_error)

    def _update(self) -> None:
        settings = self._settings
        bias1 = 1 - settings.beta1**self.num_steps
        bias2_root = (1 - settings.beta2**self.num_steps) ** 0.5
        step_size = settings.lr / bias1

        square, square_error = self._exp_avg_sq, self._exp_avg_sq_error
        if settings.amsgrad:
            square, square_error = self._largest, self._largest_error
        root = np.sqrt(square)
        least = np.sqrt(np.maximum(square - square_error, 0.0))
        sum_of_roots = np.where(root + least > 0, root + least, 1.0)
        error = np.minimum(np.sqrt(square_error), square_error / sum_of_roots)
        error = self._rounded(root, np.where(root + least > 0, error, np.sqrt(square_error)))
        relative = _cast_error(bias2_root) / bias2_root
        divided = root / bias2_root
        error = error / bias2_root * (1 + 2 * relative) + 2 * relative * divided
        error = self._rounded(divided, self._rounded(divided, error))
        denominator = divided + settings.eps
        error = self._rounded(denominator, error + _cast_error(settings.eps))

        least = denominator - error
        self.judged &= least > 0
        least = np.where(self.judged, least, 1.0)
        safe = np.where(self.judged, denominator, 1.0)
        numerator = np.abs(self._exp_avg)
        quotient = numerator / safe
        quotient_error = self._exp_avg_error / least + numerator * error / (safe * least)
        scale = step_size + _cast_error(step_size)
        # Either product may come first, and either may leave the range.
        self._in_range(scale * numerator, scale * self._exp_avg_error)
        self._in_range(quotient, quotient_error)
        change = step_size * quotient
        change_error = scale * quotient_error + _cast_error(step_size) * quotient
        change_error += np.where(numerator + self._exp_avg_error > 0, FP32_UNDERFLOW * (scale + 1 / least), 0.0)
        change_error = self._rounded(change, self._rounded(change, change_error))

        self._master -= step_size * (self._exp_avg / safe)
        self._master_error = self._rounded(self._master, self._master_error + change_error + _OWN * change)

    def _rounded(self, value: _Array, error: _Array) -> _Array:
        """The error after one more fp32 rounding of ``value``, which was off by ``error`` before."""
        magnitude = np.abs(value) + error
        self._in_range(magnitude, 0.0)
        return error + (U32 + _OWN) * magnitude + np.where(magnitude > 0, FP32_UNDERFLOW, 0.0)

    def _in_range(self, value: _Array, error: _Array | float) -> None:
        """Stop judging elements whose value can overflow; comparisons with nan are false, so these go as well."""
        self.judged &= value + error < FP32_MAX / 2


def _cast_error(scalar: float) -> float:
    """How far a Python float moves when it is rounded to fp32."""
    return abs(float(np.float32(scalar)) - scalar)
