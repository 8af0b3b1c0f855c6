"""Symptoms from forged observations: what a mistake of a known kind would have made of the values of drawn scenarios.

No ranks and no torch: the sums are rebuilt here, made wrong in one way, and cut into shards as ranks would hold them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.diagnosis import diagnose
from harness.diagnosis.diagnose import Observations
from harness.diagnosis.evidence import bits, gather, step_contributions
from harness.diagnosis.pattern import pattern
from harness.diagnosis.symptoms import Symptom
from harness.oracles.order import round_bf16
from harness.scenario import generate
from harness.scenario.model import Domain, Scenario, StepPlan, steps
from harness.scenario.partition import Partition
from harness.verdict import Observation, Quantity, Stage
from tests.support import sampled

Own = NDArray[np.float64]  # [world, parts, N]
Wrong = Callable[[Scenario, Own], NDArray[np.float64]]

MANY = 16


@functools.cache
def _draw(seed: int, index: int) -> Scenario:
    return generate.draw(seed, index, (2, 3, 4))


def drawn(seed: int, suits: Callable[[Scenario, StepPlan], bool]) -> list[tuple[Scenario, StepPlan]]:
    """Scenarios of exact sums, each with a step that suits."""
    found = []
    for index in itertools.count():
        scenario = _draw(seed, index)
        plan = next((plan for plan in steps(scenario) if not plan.discard and suits(scenario, plan)), None)
        if scenario.values.domain is not Domain.GENERAL and plan is not None:
            found.append((scenario, plan))
            if len(found) == MANY:
                return found
    raise AssertionError


def observed(scenario: Scenario, plan: StepPlan, actual: NDArray[np.float64]) -> Observations:
    """What the ranks would have seen had the reduced gradient been this."""
    expected = step_contributions(scenario, plan).sum(axis=(0, 1)).astype(np.float32)
    partition = Partition.from_request(scenario.numel, scenario.world, scenario.bucket)
    seen: dict[int, Observation | None] = {}
    for rank in range(scenario.world):
        shard, wanted = (np.zeros(partition.shard_len, np.float32) for _ in range(2))
        for part in partition.segments(rank):
            span = slice(part.shard_start, part.shard_start + part.stop - part.start)
            shard[span], wanted[span] = actual[part.start : part.stop], expected[part.start : part.stop]
        seen[rank] = None
        if not np.array_equal(shard, wanted):
            seen[rank] = Observation(
                quantity=Quantity.GRADIENT,
                step=plan.index,
                stage=Stage.REDUCE,
                buckets=tuple((one.start, one.end, one.padded) for one in partition.buckets),
                expected=expected.tobytes(),
                actual=shard.tobytes(),
            )
    return seen


def named(wrong: Wrong, seed: int, suits: Callable[[Scenario, StepPlan], bool]) -> diagnose.Named:
    """What is said of this mistake."""
    failing = []
    for scenario, plan in drawn(seed, suits):
        seen = observed(scenario, plan, wrong(scenario, step_contributions(scenario, plan)))
        if any(seen.values()):
            failing.append((scenario, seen))
    assert failing
    return diagnose.name(min(failing, key=lambda each: each[0].numel), failing)


def anything(scenario: Scenario, plan: StepPlan) -> bool:
    return True


def several_parts(scenario: Scenario, plan: StepPlan) -> bool:
    return len(plan.parts) > 1


def total(own: Own) -> NDArray[np.float64]:
    return np.asarray(own.sum(axis=(0, 1)))


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return round_bf16(values.astype(np.float32)).astype(np.float64)


def first_turned(scenario: Scenario, own: Own) -> NDArray[np.float64]:
    """In the first bucket every rank has the next one's piece."""
    values = total(own)
    partition = Partition.from_request(scenario.numel, scenario.world, scenario.bucket)
    bucket = partition.buckets[0]
    padded = np.zeros(bucket.padded)
    padded[: bucket.length] = values[: bucket.length]
    values[: bucket.length] = np.roll(padded, -partition.piece_len(0))[: bucket.length]
    return values


def one_further(values: NDArray[np.float64], by: int) -> NDArray[np.float64]:
    moved = values.copy()
    moved[:-by] = values[by:]
    return moved


def reduced_in_place(own: Own) -> NDArray[np.float64]:
    """The sum of all ranks takes the place of each one's own sum after every part."""
    found = np.zeros_like(own[:, 0])
    for part in range(own.shape[1]):
        found = np.broadcast_to((found + own[:, part]).sum(axis=0), found.shape)
    return found[0]


MISTAKES: list[tuple[Symptom, Wrong, Callable[[Scenario, StepPlan], bool]]] = [
    (Symptom.FACTOR_WORLD, lambda scenario, own: total(own) * scenario.world, anything),
    (Symptom.FACTOR_ONE_OVER_WORLD, lambda scenario, own: total(own) / scenario.world, anything),
    (Symptom.FACTOR_PARTS, lambda scenario, own: total(own) * own.shape[1], several_parts),
    (Symptom.FACTOR_ONE_OVER_PARTS, lambda scenario, own: total(own) / own.shape[1], several_parts),
    (Symptom.PART_MISSING, lambda scenario, own: total(own[:, 1:]), several_parts),
    (Symptom.PART_TWICE, lambda scenario, own: total(own) + total(own[:, -1:]), several_parts),
    (
        Symptom.PART_TWICE,
        lambda scenario, own: sum(total(own[:, : end + 1]) for end in range(own.shape[1])),
        several_parts,
    ),
    (Symptom.PART_TWICE, lambda scenario, own: reduced_in_place(own), several_parts),
    (Symptom.RANK_MISSING, lambda scenario, own: total(own[:-1]), anything),
    (Symptom.RANK_TWICE, lambda scenario, own: total(own) + total(own[:1]), anything),
    (Symptom.OTHER_RANK, first_turned, anything),
    (Symptom.SHIFTED, lambda scenario, own: one_further(total(own), 1), lambda scenario, plan: scenario.numel > 8),
    (Symptom.ZERO, lambda scenario, own: 0 * total(own), anything),
    (Symptom.BF16_BEFORE, lambda scenario, own: rounded(own.sum(axis=1)).sum(axis=0), several_parts),
    (Symptom.BF16_AFTER, lambda scenario, own: rounded(total(own)), anything),
]


@pytest.mark.parametrize(
    ("symptom", "wrong", "suits"), MISTAKES, ids=[f"{entry[0].name}-{at}" for at, entry in enumerate(MISTAKES)]
)
@pytest.mark.parametrize("seed", sampled([1, 2], every=2))
def test_a_mistake_of_a_known_kind_is_named(
    symptom: Symptom, wrong: Wrong, suits: Callable[[Scenario, StepPlan], bool], seed: int
) -> None:
    found = named(wrong, seed, suits)

    assert found.symptom is not None, found.possible
    assert found.symptom.startswith(symptom.value)


def test_gradients_in_the_room_of_those_that_are_none_are_shifted() -> None:
    failing = []
    for scenario, plan in drawn(1, lambda scenario, plan: any(any(part.none) for part in plan.parts)):
        own = step_contributions(scenario, plan)
        values = np.zeros(scenario.numel)
        for (number, part), rank in itertools.product(enumerate(plan.parts), range(scenario.world)):
            there = [
                np.full(each.numel, index not in part.none[rank]) for index, each in enumerate(scenario.parameters)
            ]
            closed_up = own[rank, number, np.concatenate(there)]
            values[: closed_up.size] += closed_up
        seen = observed(scenario, plan, values)
        if any(seen.values()):
            failing.append((scenario, seen))

    found = diagnose.name(min(failing, key=lambda each: each[0].numel), failing)

    assert found.symptom is not None, found.possible
    assert found.symptom.startswith(Symptom.SHIFTED.value)


def noisy(scenario: Scenario, own: Own) -> NDArray[np.float64]:
    return (
        total(own) + np.random.default_rng(scenario.seed).integers(-1, 2, own.shape[2]) * 2.0**scenario.values.exponent
    )


def shuffled(scenario: Scenario, own: Own) -> NDArray[np.float64]:
    return np.random.default_rng(scenario.seed).permutation(total(own))


def mixed(scenario: Scenario, own: Own) -> NDArray[np.float64]:
    """Two mistakes, each of them known."""
    return total(own[1:]) * scenario.world


OTHERS: dict[str, Wrong] = {
    "half": lambda scenario, own: total(own) / 2,
    "threefold": lambda scenario, own: total(own) * 3,
    "sign": lambda scenario, own: -total(own),
    "largest": lambda scenario, own: own.sum(axis=1).max(axis=0),
    "magnitude": lambda scenario, own: np.abs(total(own)),
    "noise": noisy,
    "shuffled": shuffled,
    "two mistakes": mixed,
    "positive ones": lambda scenario, own: np.maximum(total(own), 0.0),
    "rank less another": lambda scenario, own: total(own) - 2 * total(own[:1]),
}


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "positive ones"])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_other_mistake_has_no_symptom(name: str, seed: int) -> None:
    assert named(OTHERS[name], seed, anything).symptom is None


def test_a_small_case_alone_names_nothing() -> None:
    """Of one or two wrong elements many mistakes are possible."""
    scenario, plan = min(drawn(3, anything), key=lambda each: each[0].numel)
    own = step_contributions(scenario, plan)
    actual = total(own)
    actual[0] += 2.0**scenario.values.exponent
    seen = observed(scenario, plan, actual)

    assert diagnose.name((scenario, seen), []).symptom is None


def test_what_is_seen_elsewhere_in_the_campaign_decides() -> None:
    """At world 2 a mean over ranks and a half are one thing; at world 3 they are not."""
    twos = [
        (scenario, observed(scenario, plan, total(step_contributions(scenario, plan)) / 2))
        for scenario, plan in drawn(4, lambda scenario, plan: len(plan.parts) != 2)
    ]
    two = next(each for each in twos if each[0].world == 2 and any(each[1].values()))
    alone = [each for each in twos if each[0].world == 2 and any(each[1].values())]

    assert diagnose.name(two, alone).symptom == Symptom.FACTOR_ONE_OVER_WORLD.value
    assert diagnose.name(two, twos).symptom is None


def test_a_nan_that_signals_is_compared_without_a_warning() -> None:
    """As memory may hold that was never written."""
    signalling = np.array([0x7F800001, 0x80000000], np.uint32).view(np.float32)

    assert bits(signalling, signed=False).tolist() == [0x7FC00000, 0]


def test_the_pattern_says_where() -> None:
    scenario, plan = next(
        (scenario, plan)
        for scenario, plan in drawn(5, anything)
        if len(Partition.from_request(scenario.numel, scenario.world, scenario.bucket).buckets) > 2
    )
    actual = total(step_contributions(scenario, plan))
    partition = Partition.from_request(scenario.numel, scenario.world, scenario.bucket)
    bucket = partition.buckets[1]
    actual[bucket.start] += 1024.0 * 2.0**scenario.values.exponent
    evidence = gather(scenario, observed(scenario, plan, actual))

    assert evidence is not None
    text = pattern(evidence)
    assert text.startswith(f"1 of {scenario.numel:,} elements, on rank 0, in 1 of {len(partition.buckets)} buckets (1)")


# --- the norm ---------------------------------------------------------------------------------------------------------


def norm_named(
    wrong: Callable[[Scenario, StepPlan, NDArray[np.float64]], float], seed: int, *, exponent: int = 0
) -> diagnose.Named:
    """What is said where this is made of the squares of a reduced gradient on the grid 2**exponent, on every rank."""
    failing: list[tuple[Scenario, Observations]] = []
    for scenario, plan in drawn(seed, several_parts):
        scale = 2.0 ** (exponent - scenario.values.exponent)
        expected = (step_contributions(scenario, plan).sum(axis=(0, 1)) * scale).astype(np.float32)
        squares = expected.astype(np.float64) ** 2
        norm = wrong(scenario, plan, squares)
        if abs(norm - squares.sum()) <= 2.0**-20 * squares.sum():
            continue
        partition = Partition.from_request(scenario.numel, scenario.world, scenario.bucket)
        found = Observation(
            quantity=Quantity.NORM,
            step=plan.index,
            stage=Stage.NORM,
            buckets=tuple((one.start, one.end, one.padded) for one in partition.buckets),
            expected=expected.tobytes(),
            norm=norm,
        )
        failing.append((scenario, dict.fromkeys(range(scenario.world), found)))
    assert failing
    return diagnose.name(failing[0], failing)


NORMS: dict[str, tuple[Callable[[Scenario, StepPlan, NDArray[np.float64]], float], Symptom | None]] = {
    "times W": (lambda scenario, plan, squares: squares.sum() * scenario.world, Symptom.FACTOR_WORLD),
    "of the gradient times W": (
        lambda scenario, plan, squares: squares.sum() * scenario.world**2,
        Symptom.FACTOR_WORLD,
    ),
    "of the mean over ranks": (
        lambda scenario, plan, squares: squares.sum() / scenario.world**2,
        Symptom.FACTOR_ONE_OVER_WORLD,
    ),
    "of the gradient times the parts": (
        lambda scenario, plan, squares: squares.sum() * len(plan.parts) ** 2,
        Symptom.FACTOR_PARTS,
    ),
    "of the mean over parts": (
        lambda scenario, plan, squares: squares.sum() / len(plan.parts) ** 2,
        Symptom.FACTOR_ONE_OVER_PARTS,
    ),
    "a parameter twice": (
        lambda scenario, plan, squares: squares.sum() + squares[: scenario.parameters[0].numel].sum(),
        Symptom.TWICE,
    ),
    "all twice": (lambda scenario, plan, squares: 2 * squares.sum(), Symptom.TWICE),
    "nothing": (lambda scenario, plan, squares: 0.0, Symptom.ZERO),
    "rounded": (
        lambda scenario, plan, squares: float(round_bf16(np.array([squares.sum()], np.float32))[0]),
        Symptom.BF16_AFTER,
    ),
    "a little more": (lambda scenario, plan, squares: squares.sum() * (1 + 2.0**-9), None),
    "three times and a half": (lambda scenario, plan, squares: 3.5 * squares.sum(), None),
}


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_done_to_a_norm_is_named(case: str, seed: int) -> None:
    wrong, symptom = NORMS[case]
    told = norm_named(wrong, seed).symptom
    assert (told or "").partition(" (")[0] == ("" if symptom is None else symptom.value)


def test_squares_that_are_too_small_for_a_format_are_no_missing_ones() -> None:
    assert norm_named(lambda scenario, plan, squares: 0.0, 0, exponent=-80).symptom is None
