"""Rounding bounds: what correct arithmetic gives lies inside, what a mistake gives lies outside.

Inside is tried with the arithmetic that real systems use (any order, roots, torch's kernels), exact values with
fractions; outside with the mistakes that a norm or a sum really shows.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.oracles.bounds import (
    FP32_MAX,
    FP32_UNDERFLOW,
    LOOSE_BOUND,
    U32,
    Accumulation,
    SquaredNorm,
    any_order_sum_bound,
    gamma,
    judge_squared_norm,
    squared_norm,
    squared_norm_bound,
)
from harness.verdict import Oracle

F32 = NDArray[np.float32]


def exact_square_sum(values: F32) -> Fraction:
    return sum((Fraction(float(value)) ** 2 for value in values.tolist()), Fraction(0))


def wide_values(rng: np.random.Generator, num: int, spread: int) -> F32:
    return (rng.integers(-255, 256, num) * 2.0 ** rng.integers(-spread, spread + 1, num)).astype(np.float32)


def judge(
    observed: float,
    values: F32,
    *,
    kind: Accumulation = "fp32",
    shard_len: int | None = None,
    world: int = 1,
    bitwise: bool = False,
) -> tuple[bool, Oracle]:
    length = math.ceil(values.size / world) if shard_len is None else shard_len
    judgement = judge_squared_norm(
        observed, squared_norm([values]), kind=kind, shard_len=length, world=world, bitwise=bitwise
    )
    if judgement.oracle is not Oracle.EXACT and math.isfinite(observed):
        assert judgement.ok == (judgement.error <= judgement.bound)
    return judgement.ok, judgement.oracle


# --- sums -------------------------------------------------------------------------------------------------------------


def test_gamma_is_highams_and_ends_where_the_lemma_does() -> None:
    assert gamma(0, U32) == 0
    assert gamma(1, 0.25) == 0.25 / 0.75
    assert gamma(2**23, U32) == math.inf
    assert gamma(2**23 - 1, U32) < 1


def test_sums_in_every_order_stay_within_the_bound() -> None:
    """Random values with cancellation, added in random orders and random trees: the exact error is below the bound."""
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(1000):
        values = wide_values(rng, int(rng.integers(1, 13)), int(rng.integers(0, 30)))
        terms = list(values)
        while len(terms) > 1:
            one = terms.pop(int(rng.integers(len(terms))))
            other = terms.pop(int(rng.integers(len(terms))))
            terms.append(np.float32(one + other))
        center = float(np.sum(values.astype(np.float64)))
        bound = any_order_sum_bound(values.size, float(np.abs(values.astype(np.float64)).sum()))
        assert abs(float(terms[0]) - center) <= bound
        if bound:
            worst = max(worst, abs(float(terms[0]) - center) / bound)

    assert worst > 0.1  # the bound is not a mile wide: real errors come within a factor of ten


def test_a_lost_or_doubled_term_is_outside_the_bound() -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(1, 256, 8).astype(np.float64) * 2.0 ** rng.integers(0, 5, 8)
    bound = any_order_sum_bound(8, float(values.sum()))

    assert all(value > bound for value in values)


def test_one_term_or_none_is_exact() -> None:
    assert any_order_sum_bound(0, 0.0) == 0
    assert any_order_sum_bound(1, 1e30) == 0
    assert any_order_sum_bound(2, 1.0) > 2.0**-24


def test_bounds_are_elementwise() -> None:
    bounds = any_order_sum_bound(3, np.array([0.0, 1.0, 2.0]))

    assert bounds[0] == 0
    assert bounds[2] == 2 * bounds[1] > 0


def test_a_sum_of_too_many_terms_has_no_bound() -> None:
    assert any_order_sum_bound(2**22, 1.0) < 1
    assert any_order_sum_bound(2**24, 1.0) == math.inf


# --- the reference's squared norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 100, 4096, 4097, 65537, 150_001])
def test_the_reference_is_within_its_own_error(num: int) -> None:
    values = wide_values(np.random.default_rng(num), num, 30)
    reference = squared_norm([values[: num // 3], values[num // 3 :].reshape(1, -1)])
    exact = exact_square_sum(values)

    assert reference.num_elements == num
    assert 0 < reference.error < 2.0**-48
    assert abs(Fraction(reference.value) - exact) <= Fraction(reference.error) * exact


def test_the_reference_is_exact_where_the_sum_is() -> None:
    """Small integers: the folded sum of a large array equals the integer sum, at the edges of its exponents too."""
    integers = np.random.default_rng(3).integers(-3, 4, 200_000)
    for exponent in (-74, -5, 0, 52):
        values = (integers * 2.0**exponent).astype(np.float32)
        assert Fraction(squared_norm([values]).value) == int((integers**2).sum()) * Fraction(4) ** exponent


def test_the_reference_neither_underflows_nor_overflows() -> None:
    assert squared_norm([np.array([2.0**-149], np.float32)]).value == 2.0**-298
    assert squared_norm([np.array([FP32_MAX] * 3, np.float32)]).value == pytest.approx(3 * FP32_MAX**2, rel=1e-15)


def test_special_gradients_give_special_norms() -> None:
    with np.errstate(all="raise"):
        assert squared_norm([np.array([1.0, np.inf], np.float32)]).value == math.inf
        assert squared_norm([np.array([1.0, -np.inf] * 4000, np.float32)]).value == math.inf
        assert math.isnan(squared_norm([np.array([np.inf, np.nan], np.float32)]).value)
    assert squared_norm([np.zeros(4, np.float32)]).value == 0


# --- judging: right systems pass --------------------------------------------------------------------------------------


def systems(values: F32, world: int) -> dict[str, float]:
    """Squared norms in fp32 as classes compute them: over shards, then all-reduced."""
    shards = [torch.from_numpy(shard) for shard in np.array_split(values, world)]

    def reduce(partial: list[torch.Tensor]) -> float:
        total = partial[0].clone()
        for one in partial[1:]:
            total += one
        return float(total)

    return {
        "squares": reduce([(shard * shard).sum() for shard in shards]),
        "pow": reduce([shard.pow(2).sum() for shard in shards]),
        "dot": reduce([torch.dot(shard, shard) for shard in shards]),
        "root": reduce([torch.linalg.vector_norm(shard) ** 2 for shard in shards]),
        "one by one": reduce([(shard * shard).cumsum(0)[-1] for shard in shards]),
    }


def test_fp32_systems_pass_at_every_scale() -> None:
    """Any scale: also where squares underflow to zero, where they are subnormal, and where the sum overflows."""
    rng = np.random.default_rng(4)
    for exponent in (-140, -100, -80, -76, -74, -70, -20, 0, 40, 52, 57, 62, 100):
        for num in (1, 2, 7, 60, 1000):
            for world in (1, 2, 3, 4):
                if num < world:
                    continue
                values = (wide_values(rng, num, 3) * np.float32(2.0**exponent)).astype(np.float32)
                with np.errstate(over="ignore"):
                    observations = systems(values, world)
                for name, observed in observations.items():
                    ok, oracle = judge(observed, values, world=world)
                    assert ok, (exponent, num, world, name)
                    assert oracle is (Oracle.BOUND if values.any() else Oracle.EXACT)


def test_fp64_systems_pass_and_fp32_ones_do_not() -> None:
    """A system that promises fp64 is held to it: a sum in fp32 is outside, by orders of magnitude."""
    values = wide_values(np.random.default_rng(5), 5000, 8)
    shards = np.array_split(values, 3)
    in_fp64 = sum(float((shard.astype(np.float64)[::-1] ** 2).cumsum()[-1]) for shard in shards)
    in_fp32 = systems(values, 3)["squares"]

    assert judge(in_fp64, values, kind="fp64", world=3) == (True, Oracle.BOUND)
    assert judge(in_fp32, values, kind="fp64", world=3) == (False, Oracle.BOUND)
    assert judge(in_fp32, values, kind="fp32", world=3) == (True, Oracle.BOUND)


# --- judging: wrong systems fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "fp64"])
def test_mistakes_are_outside(kind: Accumulation) -> None:
    """The norm instead of its square, one rank's own, a factor of the world, one lost element, a sign, nothing."""
    rng = random.Random(6)
    for num in (4, 64, 1024):
        values = np.array([rng.choice([-1, 1]) * rng.randint(64, 255) for _ in range(num)], np.float32)
        right = squared_norm([values]).value
        lost = right - float(values[0]) ** 2
        wrong = (math.sqrt(right), right / 4, right * 4, right * 16, right / 2, lost, -right, 0.0, math.nan, math.inf)
        assert judge(right, values, kind=kind, world=4)[0]
        assert [judge(observed, values, kind=kind, world=4)[0] for observed in wrong] == [False] * len(wrong)


def test_norm_exact_data_is_judged_bitwise() -> None:
    values = np.arange(1, 20, dtype=np.float32)
    right = float((values.astype(np.float64) ** 2).sum())

    assert judge(right, values, kind="fp64", bitwise=True) == (True, Oracle.EXACT)
    assert judge(math.nextafter(right, math.inf), values, kind="fp64", bitwise=True) == (False, Oracle.EXACT)
    assert judge(math.nextafter(right, math.inf), values, kind="fp64") == (True, Oracle.BOUND)


def test_a_zero_gradient_has_norm_zero_exactly() -> None:
    zeros = np.zeros(10, np.float32)

    assert judge(0.0, zeros) == (True, Oracle.EXACT)
    assert not judge(2.0**-149, zeros)[0]
    assert not judge(math.nan, zeros)[0]


def test_nan_and_infinite_gradients_must_show() -> None:
    nan = np.array([1.0, np.nan], np.float32)
    infinite = np.array([1.0, np.inf], np.float32)

    assert judge(math.nan, nan) == (True, Oracle.EXACT)
    assert judge(math.inf, infinite) == (True, Oracle.EXACT)
    for observed in (0.0, 1.0, math.inf):
        assert not judge(observed, nan)[0]
    for observed in (0.0, FP32_MAX, math.nan):
        assert not judge(observed, infinite)[0]


def test_infinity_is_allowed_only_where_fp32_ends() -> None:
    """An exact sum above fp32's range may be inf in fp32, but never in fp64, and never where the range suffices."""
    large = np.array([2.0**64, 2.0**64], np.float32)
    fits = np.array([2.0**63, 2.0**63], np.float32)

    assert judge(math.inf, large, kind="fp32")[0]
    assert judge(2.0**129, large, kind="fp32")[0]  # a class may accumulate in fp64 all the same
    assert not judge(FP32_MAX, large, kind="fp32")[0]
    assert not judge(math.inf, large, kind="fp64")[0]
    assert not judge(math.inf, fits, kind="fp32")[0]
    assert not judge(math.nan, large, kind="fp32")[0]


def test_underflowing_squares_are_allowed_to_vanish_but_not_to_grow() -> None:
    tiny = np.full(8, 2.0**-80, np.float32)

    assert judge(0.0, tiny, kind="fp32")[0]
    assert not judge(0.0, tiny, kind="fp64")[0]
    assert not judge(8 * 2.0**-149, tiny, kind="fp32", shard_len=8)[0]


def test_a_bound_too_wide_to_say_much_becomes_the_loose_rule() -> None:
    """From about 2**16 elements of a shard on, a relative 2**-5 is asked, and said to be loose."""
    exact = SquaredNorm(1000.0, 2.0**-52, 2**20)

    def at(observed: float, shard_len: int) -> tuple[bool, Oracle, float]:
        found = judge_squared_norm(observed, exact, kind="fp32", shard_len=shard_len, world=2, bitwise=False)
        return found.ok, found.oracle, found.bound

    assert at(1000.0 * (1 + 2.0**-9), 2**16 - 2**12)[:2] == (True, Oracle.BOUND)
    assert at(1000.0 * (1 + 2.0**-7), 2**16 - 2**12)[:2] == (False, Oracle.BOUND)
    assert at(1000.0 * (1 + 2.0**-6), 2**17)[:2] == (True, Oracle.LOOSE)
    assert at(1000.0 * (1 + 2.0**-4), 2**17)[:2] == (False, Oracle.LOOSE)
    assert at(1000.0, 2**40)[:2] == (True, Oracle.LOOSE)
    assert LOOSE_BOUND <= at(1000.0, 2**40)[2] < LOOSE_BOUND * 1.0001


def test_the_bound_counts_shard_world_and_underflow() -> None:
    exact = SquaredNorm(1.0, 0.0, 100)

    relative, absolute = squared_norm_bound("fp32", num_elements=100, shard_len=25, world=4, exact=exact)

    assert relative == pytest.approx(gamma(25 + 4 + 4, U32), rel=1e-11)
    assert absolute == (100 + 8) * FP32_UNDERFLOW
    assert squared_norm_bound("fp64", num_elements=100, shard_len=25, world=4, exact=exact)[1] == 0
