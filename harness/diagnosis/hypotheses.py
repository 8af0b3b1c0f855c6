"""What each kind of mistake would have made of the values: predictions for every slot.

A :class:`Guess` is one way in which a symptom may have come about, a :class:`Batch` several of one symptom.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.diagnosis.evidence import Bools, Evidence, Floats, Ints
from harness.diagnosis.symptoms import Symptom
from harness.oracles.order import round_bf16
from harness.verdict import Quantity, Stage

_MOST_GUESSES = 2**11  # of one batch
_MOST_VALUES = 2**19  # predicted in one batch
_SAMPLE = 64  # wrong values by which most guesses are ruled out
_MOST_FREE = 8  # elements at the edge of what is shifted, about which nothing is said
_MOST_LENGTHS = 8  # by which the rest may have moved
_FEW = 12  # ranks, or buckets, of which every pair is tried
_SMALLEST_FP16 = 2.0**-24
_BF16_SPACE = np.uint32(0xFFFF0000)


class Batch(NamedTuple):
    """Ways in which one symptom may have come about.

    Attributes:
        details: of each guess, what a symptom's phrase is followed by; may be empty.
        values: what it predicts, fp32 ``[guesses, n]``.
        known: bool ``[guesses, n]``; where a guess predicts nothing; None: everywhere.
        proves: False where another mistake, which has no name, would have made the same: then it may be this one, but
            that has to be shown elsewhere.
        free: bool ``[guesses, n]``; where anything may stand, right or wrong: nobody knows what moves in from outside.
        alike: all wrong values are to be explained by one guess.
        tried: how many guesses there were, where some that explain nothing were left out.
    """

    symptom: Symptom
    details: Sequence[str]
    values: Floats
    known: Bools | None = None
    proves: bool = True
    free: Bools | None = None
    alike: bool = False
    tried: int | None = None


def batches(evidence: Evidence) -> Iterator[Batch]:
    """All hypotheses that can be put to this evidence."""
    yield from _anywhere(evidence)
    yield from _elsewhere(evidence)
    yield from _rounded(evidence)


def truncated(values: Floats) -> Floats:
    """fp32 values rounded to bf16 toward zero; nan and inf as they are."""
    cut = (np.ascontiguousarray(values, np.float32).view(np.uint32) & _BF16_SPACE).view(np.float32)
    return np.where(np.isfinite(values), cut, values)


def _one(symptom: Symptom, values: NDArray[np.generic], detail: str = "", known: Bools | None = None) -> Batch:
    return Batch(symptom, (detail,), np.asarray(values, np.float32)[None], None if known is None else known[None])


def _anywhere(evidence: Evidence) -> Iterator[Batch]:
    expected = evidence.expected
    # Where all are tiny, a narrower format would have made zeros of them as well.
    lost = bool((np.abs(expected[evidence.wrong]) >= _SMALLEST_FP16).any())
    yield _one(Symptom.ZERO, np.zeros_like(expected))._replace(proves=lost)
    small = np.abs(expected) < _smallest_right(evidence)
    smallest = _one(Symptom.ZERO, np.where(small, np.float32(0), expected), "of the smallest magnitude")
    yield smallest._replace(proves=lost)
    for name, vector in _before(evidence):
        symptom = Symptom.UNCLIPPED if name == "before the clip" else Symptom.EARLIER
        yield _one(symptom, evidence.at(vector), "" if symptom is Symptom.UNCLIPPED else name)
        if evidence.sums:
            yield _one(Symptom.EARLIER_ADDED, expected + evidence.at(vector), f"of {name}")
    if evidence.signed:
        yield _one(Symptom.SIGN_OF_ZERO, np.where(expected == 0, -expected, expected))
    # Any finite value may stand where inf or nan was expected.
    swallowed = ~np.isfinite(expected) & np.isfinite(evidence.actual)
    yield _one(Symptom.NONFINITE, np.where(swallowed, evidence.actual, expected))
    padding = evidence.slots.padding
    yield _one(Symptom.PADDING, np.where(padding, evidence.actual, expected), "")
    if evidence.quantity in (Quantity.FULL_MASTER, Quantity.WEIGHTS):
        joined = evidence.with_padding(evidence.reference)
        yield _one(Symptom.PADDING, joined[evidence.slots.flat], "buckets were put together with their padding")


def _smallest_right(evidence: Evidence) -> np.float32:
    """The smallest magnitude, other than zero, that is right."""
    right = np.abs(evidence.expected[~evidence.wrong & (evidence.expected != 0)])
    right = right[np.isfinite(right)]
    return np.float32(right.min()) if right.size else np.float32(np.inf)


def _before(evidence: Evidence) -> Iterator[tuple[str, Floats]]:
    """What stood there at earlier points, of the same kind."""
    for name, held in evidence.found.before:
        vector = np.frombuffer(held, np.float32)
        if evidence.quantity is Quantity.WEIGHTS:
            vector = _as_weights(evidence, vector)
        yield name, vector


def _as_weights(evidence: Evidence, master: Floats) -> Floats:
    """A master rounded to each parameter's dtype, as fp32."""
    rounded = master.copy()
    start = 0
    for parameter in evidence.scenario.parameters:
        span = slice(start, start + parameter.numel)
        if parameter.dtype == "bf16":
            rounded[span] = round_bf16(master[span])
        elif parameter.dtype == "fp16":
            with np.errstate(over="ignore"):
                rounded[span] = master[span].astype(np.float16).astype(np.float32)
        start += parameter.numel
    return rounded


# --- values of other places -------------------------------------------------------------------------------------------


class Mover:
    """Predicts what a vector would be like if some of its values had been taken from somewhere else.

    ``rest`` is added to what is moved: what other contributors have, who did nothing wrong.
    """

    def __init__(
        self, evidence: Evidence, moved: NDArray[np.float64], rest: NDArray[np.float64] | None, whose: str
    ) -> None:
        self._evidence = evidence
        self._moved = moved
        self._padded = evidence.with_padding(moved)
        self._rest = np.float64(0) if rest is None else np.asarray(evidence.at(rest), np.float64)
        self._whose = whose

    def batches(self) -> Iterator[Batch]:
        """Another rank's piece, another bucket, a shift."""
        yield from self._ranks()
        yield from self.buckets()
        yield from self._shifts()

    def _batch(
        self,
        symptom: Symptom,
        details: Sequence[str],
        values: NDArray[np.float64],
        known: Bools,
        free: Bools | None = None,
    ) -> Batch:
        with np.errstate(over="ignore", invalid="ignore"):
            total = (values + self._rest).astype(np.float32)
        return Batch(symptom, [f"{detail}{self._whose}" for detail in details], total, known, free=free)

    def _ranks(self) -> Iterator[Batch]:
        slots, world = self._evidence.slots, self._evidence.partition.world
        if world == 1:
            return
        orders = [np.roll(np.arange(world), -turn) for turn in range(1, world)]
        details = [f"{turn} further" if world > 2 else "" for turn in range(1, world)]
        for one, other in _pairs(world) if world > 2 else ():
            orders.append(_exchanged(world, one, other))
            details.append(f"ranks {one} and {other} exchanged")
        there = slots.base + np.array(orders)[:, slots.owner] * slots.width + slots.place
        yield self._batch(Symptom.OTHER_RANK, details, self._padded[there], np.ones(there.shape, np.bool_))

    def buckets(self) -> Iterator[Batch]:
        """Another bucket alone."""
        slots, partition = self._evidence.slots, self._evidence.partition
        details, there, known = [], [], []
        bases = np.cumsum([0, *(one.padded for one in partition.buckets)])
        for other, bucket in list(enumerate(partition.buckets))[: _MOST_GUESSES // 4]:
            if not bucket.padded:
                continue
            width = bucket.padded // partition.world
            for inside, fits in (
                (slots.owner * width + slots.place, slots.place < width),
                (slots.owner * slots.width + slots.place, slots.owner * slots.width + slots.place < bucket.padded),
            ):
                details.append(f"bucket {other}")
                there.append(bases[other] + np.where(fits, inside, 0))
                known.append(fits & (slots.bucket != other))
        for one, another in _pairs(len(partition.buckets)):
            first, second = partition.buckets[one], partition.buckets[another]
            if first.padded == second.padded:
                inside = slots.padded - slots.base
                order = _exchanged(len(partition.buckets), one, another)
                details.append(f"buckets {one} and {another} exchanged")
                there.append(bases[order[slots.bucket]] + np.minimum(inside, first.padded - 1))
                known.append((slots.bucket == one) | (slots.bucket == another))
        if len(partition.buckets) > 1:
            # Where a guess says nothing, in its own bucket and behind the other's end, nothing is to be wrong either.
            at, where = np.array(there), np.array(known)
            yield self._batch(Symptom.OTHER_BUCKET, details, self._padded[at], where)

    def _shifts(self) -> Iterator[Batch]:
        slots, numel = self._evidence.slots, self._moved.size
        room = max(1, min(_MOST_GUESSES, _MOST_VALUES // max(slots.flat.size, 1)) // 2)
        most = min(numel, room)  # in the smallest vectors all of it may have moved in from outside
        steps = np.array(sorted({*range(1, most + 1), *range(-most, 0), *self._lengths(most)}, key=abs))
        buckets = self._evidence.partition.buckets
        offsets = np.cumsum([0, *(each.numel for each in self._evidence.scenario.parameters)])
        of_parameter = np.where(slots.padding, 0, slots.parameter)
        # Anywhere; within one bucket; and within one parameter, where each may be off by another number.
        for low, high, alike in (
            (np.zeros_like(slots.flat), np.full_like(slots.flat, numel), True),
            (
                np.array([one.start for one in buckets])[slots.bucket],
                np.array([one.end for one in buckets])[slots.bucket],
                True,
            ),
            (offsets[of_parameter], offsets[of_parameter + 1], False),
        ):
            yield from self._shifted(steps, low, high, alike=alike)

    def _shifted(self, steps: NDArray[np.intp], low: Ints, high: Ints, *, alike: bool) -> Iterator[Batch]:
        """What comes from outside ``[low, high)`` is not known."""
        slots, tried = self._evidence.slots, steps.size
        wrong = np.flatnonzero(self._evidence.wrong)
        if slots.flat.size > _SAMPLE:  # most steps can be ruled out by a few values
            steps = steps[self._possible(steps, wrong[:: max(1, wrong.size // _SAMPLE)], low, high, alike=alike)]
        if not steps.size:
            return
        there = slots.flat + steps[:, None]
        known = (there >= low) & (there < high) & ~slots.padding
        free = ~known & ~slots.padding & (np.abs(steps) <= _MOST_FREE)[:, None] if alike else None
        values = self._moved[np.where(known, there, 0)]
        details = [f"k = {step}" for step in steps.tolist()]
        batch = self._batch(Symptom.SHIFTED, details, values, known, free)
        yield batch._replace(alike=alike, tried=tried)

    def _possible(self, steps: NDArray[np.intp], sample: Ints, low: Ints, high: Ints, *, alike: bool) -> Bools:
        """Which steps may explain all of some wrong values; or, unless they are ``alike``, any of them."""
        evidence = self._evidence
        there = evidence.slots.flat[sample] + steps[:, None]
        known = (there >= low[sample]) & (there < high[sample]) & ~evidence.slots.padding[sample]
        rest = np.broadcast_to(self._rest, evidence.slots.flat.shape)[sample]
        with np.errstate(over="ignore", invalid="ignore"):
            values = (self._moved[np.where(known, there, 0)] + rest).astype(np.float32)
        right = known & ~evidence.differs(values, evidence.actual[sample])
        if not alike:
            return np.asarray(right.any(axis=1), np.bool_)
        outside = ~known & (np.abs(steps) <= _MOST_FREE)[:, None]
        # The mistake may be confined to some ranks or buckets, but wherever something is wrong it is the same one.
        return np.asarray((right | outside).all(axis=1), np.bool_)

    def _lengths(self, most: int) -> set[int]:
        """Of parameters, and of buckets, that are longer: whatever is left out moves the rest by its length."""
        lengths = {each.numel for each in self._evidence.scenario.parameters}
        lengths |= {each.length for each in self._evidence.partition.buckets}
        found = sorted(each for each in lengths if most < each < self._moved.size)[:_MOST_LENGTHS]
        return {*found, *(-each for each in found)}


def _pairs(count: int) -> list[tuple[int, int]]:
    """Of few all pairs; of many neighbours."""
    if count <= _FEW:
        return list(itertools.combinations(range(count), 2))
    return [(first, first + 1) for first in range(min(count - 1, _MOST_GUESSES // 2))]


def _exchanged(count: int, one: int, other: int) -> NDArray[np.intp]:
    order = np.arange(count)
    order[[one, other]] = other, one
    return order


def _elsewhere(evidence: Evidence) -> Iterator[Batch]:
    yield from Mover(evidence, evidence.reference.astype(np.float64), None, "").batches()


# --- rounding ---------------------------------------------------------------------------------------------------------


def _rounded(evidence: Evidence) -> Iterator[Batch]:
    if evidence.quantity is Quantity.WEIGHTS:
        if evidence.found.stage is Stage.GATHER and evidence.found.master is not None:
            yield from _rounded_weights(evidence, np.frombuffer(evidence.found.master, np.float32))
        return
    yield _one(Symptom.BF16_AFTER, round_bf16(evidence.expected))
    yield _one(Symptom.TOWARD_ZERO, truncated(evidence.expected), "to bf16")


def _rounded_weights(evidence: Evidence, master: Floats) -> Iterator[Batch]:
    dtypes = np.concatenate([np.full(one.numel, one.dtype) for one in evidence.scenario.parameters])
    toward = master.copy()
    bf16, fp16 = dtypes == "bf16", dtypes == "fp16"
    toward[bf16] = truncated(master[bf16])
    with np.errstate(over="ignore", invalid="ignore"):
        half = master[fp16].astype(np.float16)
        away = np.abs(half.astype(np.float32)) > np.abs(master[fp16])
        toward[fp16] = np.where(away, np.nextafter(half, np.float16(0)), half).astype(np.float32)
    yield _one(Symptom.TOWARD_ZERO, evidence.at(toward))
    if not bf16.all():
        yield _one(Symptom.BF16_AFTER, evidence.at(np.where(bf16, _as_weights(evidence, master), round_bf16(master))))


# --- subsets ----------------------------------------------------------------------------------------------------------


def subsets(items: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """All subsets but the empty one; of many items the single ones, all but one, and all."""
    if len(items) <= most:
        found: Iterable[tuple[int, ...]] = itertools.chain.from_iterable(
            itertools.combinations(items, count) for count in range(1, len(items) + 1)
        )
        return list(found)
    singles = [(item,) for item in items]
    return [*singles, *(tuple(other for other in items if other != item) for item in items), tuple(items)]
