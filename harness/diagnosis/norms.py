"""What is wrong with a squared norm: a number a rank, so that only several scenarios together say much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from harness.diagnosis.matching import Match
from harness.diagnosis.symptoms import Symptom
from harness.oracles.order import round_bf16
from harness.scenario.model import Scenario, steps
from harness.scenario.partition import Bucket, Partition
from harness.verdict import Observation, Quantity

# A right norm is rounded a few times, in fp32 at worst; what is closer than this is the same number.
_SAME = 2.0**-16
# And what is further apart than this is another one. What is rounded to bf16 is off by up to 2**-8.
_OTHER = 2.0**-8
_ROUNDED = 2.0**-12
_BITS = 8.0
# The smallest square that fp16 holds.
_SMALLEST = 2.0**-24


def matches(
    scenario: Scenario, observations: Mapping[int, Observation | None], among: frozenset[Symptom]
) -> dict[Symptom, Match]:
    """The symptoms, among those given, that explain what every rank got."""
    seen = {rank: one for rank, one in observations.items() if one is not None and one.quantity is Quantity.NORM}
    if not seen:
        return {}
    found = next(iter(seen.values()))
    squares = np.frombuffer(found.expected, np.float32).astype(np.float64) ** 2
    expected = float(math.fsum(squares.tolist())) if np.isfinite(squares).all() else float(squares.sum())
    got = {
        rank: (seen[rank].norm if rank in seen else expected)
        for rank, one in observations.items()
        if rank in seen or one is None
    }
    guesses: dict[Symptom, Match] = {}
    for symptom, detail, by_rank in _guesses(scenario, found, expected, squares):
        if symptom not in among or not all(_same(value, by_rank[rank]) for rank, value in got.items()):
            continue
        # Ranks that got one number say it once.
        apart = _ROUNDED if symptom is Symptom.BF16_AFTER else _OTHER
        telling = len({value for rank, value in got.items() if _other(by_rank[rank], expected, apart)})
        # Squares of what is small may be zero for being too small: that is no proof.
        match = Match(_BITS * telling, telling, detail, symptom is not Symptom.ZERO or expected >= _SMALLEST)
        if symptom not in guesses or guesses[symptom].bits < match.bits:
            guesses[symptom] = match
    return guesses


def _guesses(
    scenario: Scenario, found: Observation, expected: float, squares: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Iterator[tuple[Symptom, str, list[float]]]:
    world = scenario.world
    partition = Partition(world, scenario.numel, tuple(Bucket(*bucket) for bucket in found.buckets))
    own = [
        float(sum(squares[part.start : part.stop].sum() for part in partition.segments(rank))) for rank in range(world)
    ]
    alike: list[tuple[Symptom, str, float]] = [
        (Symptom.TWICE, "", 2 * expected),
        (Symptom.ROOT, "", math.sqrt(expected) if expected >= 0 else math.nan),
        (Symptom.ZERO, "", 0.0),
        (Symptom.BF16_AFTER, "", float(round_bf16(np.array([expected], np.float32))[0])),
    ]
    if world > 1:
        # Of the sum of squares, or of the gradient that it is taken of.
        for factor in (world, world**2):
            alike.append((Symptom.FACTOR_WORLD, "", expected * factor))
            alike.append((Symptom.FACTOR_ONE_OVER_WORLD, "", expected / factor))
        yield Symptom.LOCAL, "", own
        yield Symptom.TWICE, "what other ranks have", [2 * expected - of_rank for of_rank in own]
    parts = next((len(plan.parts) for plan in steps(scenario) if plan.index == found.step), 1)
    if parts > 1:
        alike.append((Symptom.FACTOR_PARTS, "", expected * parts**2))
        alike.append((Symptom.FACTOR_ONE_OVER_PARTS, "", expected / parts**2))
    starts = itertools.accumulate((parameter.numel for parameter in scenario.parameters), initial=0)
    for parameter, start in zip(scenario.parameters, starts, strict=False):
        again = float(squares[start : start + parameter.numel].sum())
        alike.append((Symptom.TWICE, parameter.name, expected + again))
    for name, value in found.before_norms:
        symptom = Symptom.UNCLIPPED if name == "before the clip" else Symptom.EARLIER
        alike.append((symptom, "", value))
    for symptom, detail, value in alike:
        yield symptom, detail, [value] * world
    if not math.isfinite(expected):
        finite = float(squares[np.isfinite(squares)].sum())
        yield Symptom.NONFINITE, "", [finite] * world


def _same(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    if math.isinf(one) or math.isinf(other):
        return one == other
    return abs(one - other) <= _SAME * max(abs(one), abs(other))


def _other(one: float, expected: float, apart: float) -> bool:
    """Whether a prediction differs from what is right by more than rounding may."""
    if not math.isfinite(one) or not math.isfinite(expected):
        return not _same(one, expected)
    return abs(one - expected) > apart * max(abs(one), abs(expected))
