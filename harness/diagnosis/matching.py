"""Holding hypotheses against evidence: which symptoms explain every wrong value and touch no right one.

A mistake need not be everywhere: it may be confined to some ranks, buckets, pieces or parameters, or to one run of
elements. Such a *region* is made of whole units, and within those that hold a wrong value a hypothesis has to be right
about every element, also about those that are as they should be.

How much a match is worth is counted in bits: what it predicted right and would hardly have by chance, less what was
chosen to make it fit (which guess, which region).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.diagnosis import hypotheses, sums
from harness.diagnosis.evidence import Bools, Evidence, Ints, bits
from harness.diagnosis.hypotheses import Batch
from harness.diagnosis.symptoms import Symptom
from harness.verdict import Quantity

# A guess of its own for each unit is only believed where a unit has so many elements that tell.
_TELLING_PER_UNIT = 3
# What a single element can be worth: values are not as improbable as they are many.
_MOST_BITS = 8.0
_MAGNITUDE = np.int32(2**31 - 1)


@dataclass(frozen=True)
class Match:
    """A symptom explains a scenario.

    Attributes:
        bits: what that is worth as evidence; none if it might as well be chance.
        telling: how many elements it predicts to be other than expected.
        detail: how, in words; empty where there is nothing to be said.
        proves: it may be named because of this; else it only shows that another one need not be right.
    """

    bits: float
    telling: int
    detail: str
    proves: bool = True


class _Family(NamedTuple):
    """One way to cut the slots into units. ``cost`` in bits of choosing some of them."""

    name: str
    units: Ints  # [n]
    cost: float


def matches(evidence: Evidence, among: frozenset[Symptom]) -> dict[Symptom, Match]:
    """The symptoms, among those given, that explain everything in this evidence."""
    judged = _judged(evidence)
    found: dict[Symptom, Match] = {}
    if not evidence.wrong.any():
        return found
    families = _families(evidence)
    probability = _probability(evidence, judged)
    for batch in _batches(evidence, among):
        match = _matched(evidence, batch, judged, families, probability)
        known = found.get(batch.symptom)
        if match is not None and (known is None or (known.proves, known.bits) < (match.proves, match.bits)):
            found[batch.symptom] = match
    return found


def testable(evidence: Evidence) -> frozenset[Symptom]:
    """The symptoms that this evidence can say something about."""
    if evidence.vague:
        return frozenset({Symptom.ZERO, Symptom.NONFINITE})
    return frozenset(Symptom)


def _batches(evidence: Evidence, among: frozenset[Symptom]) -> Iterator[Batch]:
    asked = among & testable(evidence)
    for batch in hypotheses.batches(evidence):
        if batch.symptom in asked:
            yield batch
    if evidence.sums and evidence.plan is not None:
        for batch in sums.batches(evidence, asked):
            if batch.symptom in asked:
                yield batch


def _judged(evidence: Evidence) -> Bools:
    """Where values are compared at all: what an update makes of padding is free."""
    built = evidence.quantity is Quantity.MASTER and evidence.found.step is None
    if evidence.quantity is Quantity.GRADIENT or built:
        return np.ones(evidence.wrong.size, np.bool_)
    return ~evidence.slots.padding


def _families(evidence: Evidence) -> list[_Family]:
    slots = evidence.slots
    wrong = slots.padded[evidence.wrong]
    run = ((slots.padded >= wrong.min()) & (slots.padded <= wrong.max())).astype(np.intp)
    keys: dict[str, tuple[Ints, ...]] = {
        "all": (np.zeros(slots.flat.size, np.intp),),
        "ranks": (slots.observer,),
        "owners": (slots.owner,),
        "buckets": (slots.bucket,),
        "pieces": (slots.bucket, slots.owner),
        "buckets of ranks": (slots.observer, slots.bucket),
        "owners of ranks": (slots.observer, slots.owner),
        "parameters": (slots.parameter,),
        "parameters in buckets": (slots.parameter, slots.bucket),
        "parameters in pieces": (slots.parameter, slots.bucket, slots.owner),
        "parameters of ranks": (slots.parameter, slots.observer),
        "last of parameters": (_edge(slots.parameter, slots.padded, slots.observer, -1),),
        "first of parameters": (_edge(slots.parameter, slots.padded, slots.observer, 1),),
    }
    found = []
    seen: set[bytes] = set()
    for name, columns in keys.items():
        _, units = np.unique(np.stack(columns), axis=1, return_inverse=True)
        units = units.reshape(-1).astype(np.intp)
        if units.tobytes() not in seen:
            seen.add(units.tobytes())
            found.append(_Family(name, units, float(units.max() + 1) if units.max() else 0.0))
    found.append(_Family("run", run, 2 * math.log2(slots.flat.size + 1)))
    return found


def _edge(groups: Ints, padded: Ints, observer: Ints, side: int) -> Ints:
    """1 for the first (``side`` 1) or last (-1) element of each group of an observer's, else 0."""
    order = np.lexsort((padded, groups, observer))[::side]
    column = np.stack([groups[order], observer[order]])
    found = np.zeros(groups.size, np.intp)
    found[order] = np.any(np.diff(column, prepend=-2), axis=0)
    return found


def _probability(evidence: Evidence, judged: Bools) -> dict[int, float]:
    """Of the values expected here, by their bits, how often each comes up."""
    values, counts = np.unique(bits(evidence.expected[judged], signed=evidence.signed), return_counts=True)
    return dict(zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True))


def _matched(
    evidence: Evidence, batch: Batch, judged: Bools, families: list[_Family], probability: dict[int, float]
) -> Match | None:
    values = bits(batch.values, signed=evidence.signed)
    known = judged if batch.known is None else batch.known & judged
    right = (values == bits(evidence.actual, signed=evidence.signed)) | ~known
    if evidence.vague:  # a right value is only known within a bound
        right |= ~evidence.wrong & (values == bits(evidence.expected, signed=False))
    right &= known | ~evidence.wrong
    if batch.free is not None:
        right |= batch.free
    kept = np.flatnonzero(right[:, evidence.wrong].any(axis=1))
    if not right[:, int(np.flatnonzero(evidence.wrong)[0])].any():
        return None
    right, values = right[kept], values[kept]
    telling = values != bits(evidence.expected, signed=evidence.signed)
    telling &= judged if batch.known is None else known[kept]
    if batch.free is not None:
        telling &= ~batch.free[kept]
    details = [batch.details[index] for index in kept.tolist()]
    worth = _worth(values, probability)
    zeros = (values & _MAGNITUDE) == 0
    best: Match | None = None
    for family in families:
        match = _in_family(
            evidence, family, right, telling, worth, details, batch.tried or len(batch.details), batch.alike, zeros
        )
        if match is not None:
            cost = family.cost + math.log2(len(families))
            match = Match(match.bits - cost, match.telling, match.detail, batch.proves)
            if best is None or match.bits > best.bits:
                best = match
    return best


def _worth(values: NDArray[np.int32], probability: dict[int, float]) -> NDArray[np.float64]:
    """In bits, how improbable each value would have been."""
    found, where = np.unique(values, return_inverse=True)
    worths = [min(_MOST_BITS, -math.log2(probability.get(value, 2.0**-_MOST_BITS))) for value in found.tolist()]
    return np.array(worths)[where].reshape(values.shape)


def _in_family(
    evidence: Evidence,
    family: _Family,
    right: Bools,
    telling: Bools,
    worth: NDArray[np.float64],
    details: list[str],
    num_guesses: int,
    alike: bool,
    zeros: Bools,
) -> Match | None:
    """The best guess, or guesses, for the units that hold a wrong value; without the family's own cost."""
    wrong_units = np.unique(family.units[evidence.wrong])
    inside = np.isin(family.units, wrong_units)
    order = np.flatnonzero(inside)[np.argsort(family.units[inside], kind="stable")]
    starts = np.flatnonzero(np.diff(family.units[order], prepend=-1))
    explained = np.add.reduceat((~right[:, order]).astype(np.intp), starts, axis=1) == 0  # [guesses, wrong units]
    told = np.add.reduceat(telling[:, order].astype(np.intp), starts, axis=1)
    gained = np.add.reduceat(np.where(telling, worth, 0.0)[:, order], starts, axis=1)
    price = math.log2(max(num_guesses, 1))
    everywhere = np.flatnonzero(explained.all(axis=1))
    if everywhere.size:
        chosen = everywhere[int(np.argmax(gained[everywhere].sum(axis=1)))]
        return Match(float(gained[chosen].sum()) - price, int(told[chosen].sum()), details[chosen])
    if alike or not explained.any(axis=0).all():
        return None
    picks = np.argmax(np.where(explained, gained, -1.0), axis=0)
    across = np.arange(wrong_units.size)
    # Zeros are found in many places: which of them was taken they do not tell.
    distinct = np.add.reduceat((telling & (worth > 0) & ~zeros)[:, order].astype(np.intp), starts, axis=1)
    enough = bool((distinct[picks, across] >= _TELLING_PER_UNIT).all())
    number = int(told[picks, across].sum())
    texts = sorted({details[pick] for pick in picks.tolist()} - {""})
    detail = texts[0] if len(texts) == 1 else ""
    worth_of_all = float(gained[picks, across].sum()) - price * wrong_units.size
    return Match(worth_of_all if enough else 0.0, number, detail)
