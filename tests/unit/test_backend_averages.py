"""Means that a backend works out in its collective, as NCCL does: summands are multiplied by a rounded reciprocal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.drive.strategy_comparison import judge_sums
from harness.drive.strategy_held import Region
from harness.oracles.contributions import Interval, any_order, averaged, divided, keeps_exact_means
from harness.oracles.strategy_sums import Sums
from harness.verdict import Oracle

SPECIAL = np.array(
    [1e-45, 3e-45, -1e-45, 1.2e-38, 3.4e38, 3e38, -3.4e38, np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32
)
NUM = 6000


def rows(world: int, seed: int) -> list[NDArray[np.float32]]:
    """Values of many magnitudes, some of them extreme."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(world):
        row = np.ldexp(rng.standard_normal(NUM, np.float32), rng.integers(-20, 20, NUM)).astype(np.float32)
        found.append(
            np.where(rng.random(NUM) < 0.3, SPECIAL[rng.integers(0, SPECIAL.size, NUM)], row).astype(np.float32)
        )
    return found


def premultiplied(terms: list[NDArray[np.float32]], seed: int) -> NDArray[np.float32]:
    """As NCCL's sources have it, in some order."""
    factor = np.float32(1.0) / np.float32(len(terms))
    order = np.random.default_rng(seed).permutation(len(terms))
    with np.errstate(all="ignore"):
        total = terms[order[0]] * factor
        for index in order[1:]:
            total = total + terms[index] * factor
    return np.asarray(total, np.float32)


def outside(values: NDArray[np.float32], interval: Interval) -> int:
    """How many are not allowed."""
    seen = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (seen == interval.center) | (np.isnan(seen) & np.isnan(interval.center))
        overflowed = interval.overflows & ~np.isfinite(seen)
        return int((~(same | overflowed | (np.abs(seen - interval.center) <= interval.bound))).sum())


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8])
def test_a_mean_of_multiplied_summands_is_within_its_bound_in_any_order(world: int) -> None:
    for seed in range(4):
        terms = rows(world, seed)
        assert outside(premultiplied(terms, seed), averaged(terms, NUM, float(world))) == 0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sum_that_is_divided_once_is_within_it_too(world: int) -> None:
    terms = rows(world, 5)
    with np.errstate(all="ignore"):
        mean = np.asarray(sum(terms[1:], terms[0]) / np.float32(world), np.float32)
    assert outside(mean, averaged(terms, NUM, float(world))) == 0


@pytest.mark.parametrize("world", [2, 3])
def test_that_bound_is_needed(world: int) -> None:
    """The one of a sum that is divided once condemns what NCCL does."""
    terms = rows(world, 6)
    assert outside(premultiplied(terms, 6), divided(any_order(terms, NUM), float(world), exact=world <= 2)) > 0


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_it_is_narrow_enough_for_what_is_wrong(world: int) -> None:
    terms = [np.abs(np.nan_to_num(row, nan=1.0, posinf=1.0, neginf=1.0)).clip(1e-3, 1e3) for row in rows(world, 7)]
    right = averaged(terms, NUM, float(world))
    assert outside(premultiplied(terms, 7), right) == 0
    lost = premultiplied([*terms[:-1], np.zeros_like(terms[-1])], 7)
    summed = premultiplied(terms, 7) * np.float32(world)
    nudged = premultiplied(terms, 7) * np.float32(1 + 2.0**-18)
    for wrong in (lost, summed, nudged):
        assert outside(wrong.astype(np.float32), right) > NUM // 2


@pytest.mark.parametrize("world", range(1, 33))
def test_a_mean_that_is_exact_is_so_on_nccl_unless_the_reciprocal_is_too_far_off(world: int) -> None:
    """Of a multiple of the divisor, for which the exact domains see to it; all beginnings of a number are tried."""
    integers = np.arange(1, 2**14, dtype=np.float32)
    multiplied = (integers * np.float32(world)) * (np.float32(1.0) / np.float32(world))
    assert keeps_exact_means("nccl", [float(world)]) == bool((multiplied == integers).all())
    assert keeps_exact_means("gloo", [float(world)])


def test_means_over_seven_ranks_round_on_nccl() -> None:
    assert keeps_exact_means("nccl", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
    assert not keeps_exact_means("nccl", [1.0, 7.0])


def test_one_possible_sum_of_a_strategy_is_the_only_one_unless_the_backend_averages() -> None:
    possible = np.array([1.0, 2.0, np.inf], np.float32)
    interval = Interval(np.array([1.0, 2.0, 3e38]), np.array([1e-6, 1e-6, 1e33]), np.array([False, False, True]))
    seen = torch.tensor([1.0, 2.0, 3e38])
    region = Region(0, ((0, 3),))
    sums = Sums((possible,), interval)
    assert judge_sums(region, seen, sums, (3,), bitwise=False)[:2] == (Oracle.ORDERED, 2)
    assert judge_sums(region, seen, sums, (3,), bitwise=False, averages=True)[:2] == (Oracle.BOUND, None)
    wrong = torch.tensor([1.0, 2.1, 3e38])
    assert judge_sums(region, wrong, sums, (3,), bitwise=False, averages=True)[:2] == (Oracle.BOUND, 1)
