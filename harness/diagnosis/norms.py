"""What is wrong with a squared norm: a number a rank, so that only several scenarios together say much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from harness.diagnosis.matching import Match
from harness.diagnosis.symptoms import Symptom
from harness.scenario.model import Scenario
from harness.scenario.partition import Bucket, Partition
from harness.verdict import Observation, Quantity

# A right norm is rounded a few times, in fp32 at worst; what is closer than this is the same number.
_SAME = 2.0**-16
# And what is further apart than this is another one.
_OTHER = 2.0**-8
_BITS = 8.0


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
        telling = len({value for rank, value in got.items() if _other(by_rank[rank], expected)})
        match = Match(_BITS * telling, telling, detail)
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
    ]
    if world > 1:
        alike.append((Symptom.FACTOR_WORLD, "", expected * world))
        alike.append((Symptom.FACTOR_ONE_OVER_WORLD, "", expected / world))
        yield Symptom.LOCAL, "", own
        yield Symptom.TWICE, "what other ranks have", [2 * expected - of_rank for of_rank in own]
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


def _other(one: float, expected: float) -> bool:
    """Whether a prediction differs from what is right by more than rounding may."""
    if not math.isfinite(one) or not math.isfinite(expected):
        return not _same(one, expected)
    return abs(one - expected) > _OTHER * max(abs(one), abs(expected))
