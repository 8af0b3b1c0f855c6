"""The reference of strategies: how sums round, what any order may give, and the unsharded trainer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from harness.drive.strategy_comparison import judge_sums
from harness.drive.strategy_held import Region
from harness.oracles.bounds import SquaredNorm, judge_norm, squared_norm
from harness.oracles.contributions import contribution
from harness.oracles.order import round_bf16
from harness.oracles.strategy import UnshardedStrategy, exact_squares
from harness.oracles.strategy_sums import Sums, sums
from harness.scenario.model import Scenario, StepPlan, steps
from harness.scenario.strategy_check import exact_means
from harness.verdict import Oracle
from tests.strategy_cases import Domain, Place, placed, scenario, step

GENERAL = {"domain": Domain.GENERAL, "spread": 30, "max_k": 255}
F = np.float32


def plans(given: Scenario) -> list[StepPlan]:
    return list(steps(given))


def rows(given: Scenario, plan: StepPlan, parameter: int) -> list[list[Any]]:
    return [
        [contribution(given, plan, rank, part, parameter) for rank in range(given.world)]
        for part in range(len(plan.parts))
    ]


def test_two_shards_are_added_and_divided_in_the_dtype_of_the_reduction() -> None:
    given = scenario(2, step(2, 2), sharding="full", reduce="bf16", accumulation="no_sync", **GENERAL)
    (plan,) = plans(given)
    (first, second) = rows(given, plan, 1)

    waiting = [round_bf16(round_bf16(one) + other) for one, other in zip(first, second, strict=True)]
    wanted = round_bf16(round_bf16(waiting[0] + waiting[1]) / F(2))

    (found,) = sums(given, plan, 1).possible
    assert np.array_equal(found, wanted)


def test_parts_that_are_reduced_by_themselves_are_added_in_fp32() -> None:
    given = scenario(2, step(2, 2), sharding="full", reduce="bf16", accumulation="sync", **GENERAL)
    (plan,) = plans(given)

    means = [round_bf16(round_bf16(one + other) / F(2)) for one, other in rows(given, plan, 1)]

    (found,) = sums(given, plan, 1).possible
    assert np.array_equal(found, means[0] + means[1])
    assert not np.array_equal(found, round_bf16(found))


def test_deferred_replicas_add_up_what_the_shards_were_reduced_to() -> None:
    mesh = {"sharding": "hybrid", "replicas": 2, "reduce": "bf16"}
    given = scenario(4, step(4, 2), accumulation="deferred", **mesh, **GENERAL)
    (plan,) = plans(given)

    partial = []
    for replica in (slice(0, 2), slice(2, 4)):
        means = [round_bf16(round_bf16(sum(part[replica], F(0))) / F(2)) for part in rows(given, plan, 0)]
        partial.append(round_bf16(means[1] + means[0]))
    wanted = round_bf16(round_bf16(partial[0] + partial[1]) / F(2))

    (found,) = sums(given, plan, 0).possible
    assert np.array_equal(found, wanted)


def test_without_replicas_nothing_is_deferred() -> None:
    deferred = scenario(2, step(2, 2), sharding="full", reduce="bf16", accumulation="deferred", **GENERAL)
    by_itself = scenario(2, step(2, 2), sharding="full", reduce="bf16", accumulation="sync", **GENERAL)

    ((one,), (other,)) = (sums(given, plans(given)[0], 1).possible for given in (deferred, by_itself))

    assert np.array_equal(one, other)


def test_more_than_two_ranks_may_be_added_from_any_of_them_on() -> None:
    given = scenario(3, step(3), sharding="full", **GENERAL)
    (plan,) = plans(given)
    ((a, b, c),) = rows(given, plan, 0)

    possible = sums(given, plan, 0).possible

    wanted = [((b + c) + a) / F(3), ((a + c) + b) / F(3), ((a + b) + c) / F(3)]
    assert {found.tobytes() for found in possible} == {each.tobytes() for each in wanted}
    assert len({found.tobytes() for found in possible}) > 1


def test_ddp_divides_first_and_averages_anew_what_earlier_parts_left() -> None:
    given = scenario(4, step(4, 2), sharding="none", accumulation="sync", **GENERAL)
    (plan,) = plans(given)
    first, second = rows(given, plan, 0)

    def mean(terms: list[Any]) -> Any:
        a, b, c, d = (term / F(4) for term in terms)
        return ((d + c) + b) + a  # from rank 3 down, as the ring's first chunk

    before = mean(first)
    wanted = mean([before + term for term in second])

    assert any(np.array_equal(found, wanted) for found in sums(given, plan, 0).possible)


def test_what_nobody_used_in_the_last_part_is_reduced_all_the_same() -> None:
    parts = [step(2)[0], *step(2, missing={0: (1,), 1: (1,)})]
    given = scenario(2, parts, sharding="none", accumulation="no_sync", **GENERAL)
    (plan,) = plans(given)
    one, other = rows(given, plan, 1)[0]

    (found,) = sums(given, plan, 1).possible

    assert np.array_equal(found, one / F(2) + other / F(2))


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("accumulation", ["sync", "no_sync", "flush"])
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_all_that_is_possible_lies_within_the_bound(sharding: str, accumulation: str, reduce: str) -> None:
    dtype = "bf16" if sharding == "none" and reduce == "bf16" else "fp32"
    plain = placed(first_weight=Place(0, plain=sharding == "full"))
    given = scenario(
        3,
        step(3, 3),
        model=plain,
        dtype=dtype,
        sharding=sharding,
        converts=sharding == "full",
        accumulation=accumulation,
        reduce=reduce,
        **GENERAL,
    )
    (plan,) = plans(given)

    for parameter in range(len(given.parameters)):
        found = sums(given, plan, parameter)
        for each in found.possible:
            assert (np.abs(each - found.interval.center) <= found.interval.bound).all()


def judge(seen: list[float], given: Sums) -> tuple[Oracle, int | None, float]:
    return judge_sums(Region(0, ((0, len(seen)),)), torch.tensor(seen), given, (len(seen),), bitwise=False)


def test_an_element_must_be_one_of_the_possible_or_within_the_bound() -> None:
    given = scenario(3, step(3), sharding="full", **GENERAL)
    (plan,) = plans(given)
    found = sums(given, plan, 1)
    shape = given.parameters[1].shape
    everything = Region(1, tuple((0, size) for size in shape))

    mixed = np.where(np.arange(found.possible[0].size) % 2, found.possible[0], found.possible[1])
    near = np.nextafter(found.possible[0], F(np.inf))
    for values, rule in ((mixed, Oracle.ORDERED), (near, Oracle.BOUND)):
        seen = torch.from_numpy(values).view(shape)
        assert judge_sums(everything, seen, found, shape, bitwise=False)[:2] == (rule, None)
        strict = judge_sums(everything, seen, found, shape, bitwise=True)
        assert strict[0] is Oracle.ORDERED
        assert (strict[1] is None) == (rule is Oracle.ORDERED)
    wrong = mixed.copy()
    wrong[5] *= 3
    for bitwise in (False, True):
        assert judge_sums(everything, torch.from_numpy(wrong).view(shape), found, shape, bitwise=bitwise)[1] == 5


def test_where_one_sum_alone_is_possible_its_bits_are_asked_for() -> None:
    given = scenario(2, step(2), sharding="full", **GENERAL)
    (plan,) = plans(given)
    found = sums(given, plan, 2)
    values = found.possible[0].copy()

    assert judge(values.tolist(), found) == (Oracle.ORDERED, None, 0.0)
    values[3] = np.nextafter(values[3], F(np.inf))
    assert judge(values.tolist(), found)[1] == 3


# --- means and norms that are exact -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "num_parts", "max_k", "exact"), [(4, 2, 8, True), (4, 2, 9, False), (4, 1, 64, True), (2, 3, 11, False)]
)
def test_ddp_needs_more_bits_for_each_part(world: int, num_parts: int, max_k: int, exact: bool) -> None:
    given = scenario(world, step(world, num_parts), dtype="bf16", sharding="none", reduce="bf16", max_k=max_k)

    assert exact_means(given, num_parts) is exact


@pytest.mark.parametrize(
    ("world", "num_parts", "sharding", "accumulation", "multiple", "exact"),
    [
        (3, 2, "full", "sync", 3, True),
        (3, 2, "none", "no_sync", 3, True),
        (3, 2, "none", "sync", 3, False),
        (3, 2, "none", "sync", 9, True),
        (3, 1, "any", "sync", 3, True),
        (3, 2, "any", "sync", 3, False),
        (4, 3, "none", "sync", 1, True),
    ],
)
def test_ddp_needs_a_multiple_for_each_part(
    world: int, num_parts: int, sharding: str, accumulation: str, multiple: int, exact: bool
) -> None:
    given = scenario(
        world, step(world, num_parts), sharding=sharding, accumulation=accumulation, multiple=multiple, max_k=1
    )

    assert exact_means(given, len(plans(given)[0].parts)) is exact


def test_small_integers_have_exact_squares() -> None:
    assert exact_squares(scenario(3, step(3)))
    assert not exact_squares(scenario(3, step(3), sharding="full", **GENERAL))


@pytest.mark.parametrize(
    ("observed", "ok"), [(5.0, True), (np.nextafter(F(5), F(9)), False), (5.1, False), (-5.0, False), (math.nan, False)]
)
def test_a_norm_of_exact_squares_is_their_root(observed: float, ok: bool) -> None:
    exact = squared_norm([np.array([3.0, 4.0], np.float32)])

    assert judge_norm(float(observed), exact, kind="fp64", world=2, bitwise=True).ok is ok


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_nothing_rounds_where_a_norm_is_no_number(value: float) -> None:
    exact = SquaredNorm(value, 0.0, 3)

    assert judge_norm(value, exact, kind="fp32", world=2, bitwise=False).ok
    assert not judge_norm(1.0, exact, kind="fp32", world=2, bitwise=False).ok


def test_a_norm_in_fp64_may_be_off_by_its_rounding_and_one_in_fp32_by_that_of_its_sum() -> None:
    exact = squared_norm([np.full(1000, 1.1, np.float32)])
    root = math.sqrt(exact.value)

    def judged(share: float, kind: Any) -> bool:
        return judge_norm(root * (1 + share), exact, kind=kind, world=2, bitwise=False).ok

    assert judged(2.0**-25, "fp64")
    assert not judged(2.0**-21, "fp64")
    assert judged(2.0**-21, "fp32")
    assert not judged(2.0**-10, "fp32")


# --- the unsharded trainer --------------------------------------------------------------------------------------------


def trainer(given: Scenario) -> UnshardedStrategy:
    initial = [torch.full(parameter.shape, 0.5) for parameter in given.parameters]
    return UnshardedStrategy(given, initial, torch.device("cpu"))


def test_what_nobody_used_is_passed_over() -> None:
    given = scenario(2, step(2, missing={0: (1,), 1: (1,)}))
    reference = trainer(given)

    reference.begin(plans(given)[0])
    reference.step()

    assert reference.state(1).num_steps == 0
    assert torch.equal(reference.state(1).master, torch.full((4, 6), 0.5))
    assert reference.state(0).num_steps == 1
    assert not torch.equal(reference.state(0).master, torch.full((9, 5), 0.5))


def test_one_coefficient_scales_all_and_is_worked_out_in_fp32() -> None:
    given = scenario(2, step(2))
    reference = trainer(given)
    reference.begin(plans(given)[0])
    before = [each for each in reference.gradients if each is not None]
    norm = torch.tensor(math.sqrt(reference.squared_norm().value))

    coefficient = reference.coefficient(norm, 0.25)
    reference.clip(coefficient)

    assert coefficient.dtype is torch.float32
    for old, new in zip(before, reference.gradients, strict=True):
        assert torch.equal(new, old * coefficient)  # type: ignore[arg-type]
    assert float(reference.coefficient(norm, 1e9)) == 1.0


def test_a_dedicated_matrix_is_moved_by_muon() -> None:
    given = scenario(2, step(2), sharding="full", model=placed(first_weight=Place(0, dedicated=True)))
    reference = trainer(given)
    reference.begin(plans(given)[0])

    reference.step()

    assert len(reference.state(1).moments) == 1
    assert reference.state(1).master.dtype is torch.float32
    assert len(reference.state(0).moments) == 2
