"""What all ranks of one failing scenario saw, as arrays: one *slot* for each value that some rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.oracles import contributions
from harness.scenario.model import Domain, Scenario, StepPlan, steps
from harness.scenario.partition import Bucket, Partition
from harness.verdict import Observation, Quantity

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)

_WHOLE = (Quantity.WEIGHTS, Quantity.FULL_MASTER)
_SIGNED = (Quantity.WEIGHTS, Quantity.FULL_MASTER, Quantity.MASTER)
EVERY_RANK = -1

MOST_SLOTS = 2**14
"""Of more, only some blocks are looked at: see :meth:`Evidence.looked_at`."""

_BLOCK = 64  # slots


@dataclass(frozen=True)
class Slots:
    """Where each value belongs, all ``[n]``.

    Attributes:
        observer: the rank that holds it; :data:`EVERY_RANK` where all hold the same.
        bucket, owner: the piece it is of: of this bucket, owned by this rank.
        place: position in the piece; ``width``: length of the piece with its padding.
        padded: position in all buckets with their padding, end to end; ``base``: of the bucket's first element.
        flat: position in the vector of all elements, which in padding goes on behind the bucket's end.
        parameter: index; -1 in padding.
    """

    observer: Ints
    bucket: Ints
    owner: Ints
    place: Ints
    width: Ints
    padded: Ints
    base: Ints
    flat: Ints
    parameter: Ints

    @property
    def padding(self) -> Bools:
        """Whether it belongs to no parameter."""
        return self.parameter < 0


@dataclass(frozen=True)
class Evidence:
    """Of one scenario: what was expected in each slot and what was there, fp32 ``[n]``.

    Attributes:
        found: what the first rank with a difference observed.
        wrong: where they differ, bool ``[n]``; in the general domain: where no order of addition explains it.
    """

    scenario: Scenario
    partition: Partition
    found: Observation
    slots: Slots
    expected: Floats
    actual: Floats
    wrong: Bools

    def looked_at(self) -> Evidence:
        """This evidence, or of very many slots some blocks, evenly spread: half with wrong values, half without.

        What explains all of these may fail in another place, which is then not the mistake of a kind: they lie in every
        part of the vector.
        """
        if self.wrong.size <= MOST_SLOTS:
            return self
        blocks = np.arange(self.wrong.size) // _BLOCK
        bad = np.unique(blocks[self.wrong])
        good = np.setdiff1d(np.unique(blocks), bad, assume_unique=True)
        most = MOST_SLOTS // _BLOCK // 2
        kept = np.isin(blocks, np.concatenate([_spread(bad, most), _spread(good, most)]))
        slots = Slots(*(getattr(self.slots, column.name)[kept] for column in dataclasses.fields(Slots)))
        return dataclasses.replace(
            self, slots=slots, expected=self.expected[kept], actual=self.actual[kept], wrong=self.wrong[kept]
        )

    @property
    def quantity(self) -> Quantity:
        """What was compared."""
        return self.found.quantity

    @property
    def signed(self) -> bool:
        """Whether the two zeros are different values."""
        return self.quantity in _SIGNED

    @property
    def sums(self) -> bool:
        """Whether these are sums of contributions that can be traced: exact ones."""
        return self.quantity is Quantity.GRADIENT and self.scenario.values.domain is not Domain.GENERAL

    @property
    def vague(self) -> bool:
        """Whether right values are only known within a bound."""
        return self.quantity is Quantity.GRADIENT and self.scenario.values.domain is Domain.GENERAL

    @cached_property
    def reference(self) -> Floats:
        """All N elements, as expected."""
        return np.frombuffer(self.found.expected, np.float32)

    @cached_property
    def plan(self) -> StepPlan | None:
        """The step of the difference; None in the build."""
        return next((plan for plan in steps(self.scenario) if plan.index == self.found.step), None)

    def at(self, vector: NDArray[T]) -> NDArray[T]:
        """A vector of all elements (last axis) as it would be in the slots: zeros in padding."""
        inside = np.where(self.slots.padding, 0, self.slots.flat)
        found: NDArray[T] = np.where(self.slots.padding, vector.dtype.type(0), vector[..., inside])
        return found

    def with_padding(self, vector: NDArray[T]) -> NDArray[T]:
        """All buckets with their padding (zeros), end to end, of a vector of all elements (last axis)."""
        return np.concatenate(
            [
                np.concatenate(
                    [
                        vector[..., one.start : one.end],
                        np.zeros((*vector.shape[:-1], one.padded - one.length), vector.dtype),
                    ],
                    axis=-1,
                )
                for one in self.partition.buckets
            ],
            axis=-1,
        )

    def differs(self, values: Floats, other: Floats) -> Bools:
        """Where two arrays hold different values: bit for bit, nan being one pattern."""
        return np.asarray(bits(values, signed=self.signed) != bits(other, signed=self.signed), np.bool_)

    @cached_property
    def contributions(self) -> NDArray[np.float64]:
        """What each rank has in each part of the step: ``[world, parts, N]``."""
        return step_contributions(self.scenario, self.plan) if self.plan is not None else np.zeros((0, 0, 0))

    @cached_property
    def nones(self) -> Bools:
        """Where a rank has no gradient in a part, by slot: ``[world, parts, n]``; padding counts as one."""
        shape = (self.scenario.world, len(self.plan.parts) if self.plan else 0, self.wrong.size)
        found = np.zeros(shape, np.bool_)
        for part, one in enumerate(self.plan.parts if self.plan else ()):
            for rank, missing in enumerate(one.none):
                found[rank, part] = np.isin(self.slots.parameter, [*missing, -1])
        return found

    def earlier_contributions(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """The same of the steps before, the latest first: ``(step, [world, parts, N])``."""
        earlier = [plan for plan in steps(self.scenario) if self.plan is not None and plan.index < self.plan.index]
        for plan in reversed(earlier[-4:]):
            yield plan.index, step_contributions(self.scenario, plan)


def _spread(blocks: Ints, most: int) -> Ints:
    """At most so many of them, evenly spread, the first among them."""
    if blocks.size <= most:
        return blocks
    return blocks[np.arange(most) * blocks.size // most]


def step_contributions(scenario: Scenario, plan: StepPlan) -> NDArray[np.float64]:
    """What each rank has in each part of a step; zeros where it has none. ``[world, parts, N]``"""
    found = np.zeros((scenario.world, len(plan.parts), scenario.numel))
    for rank in range(scenario.world):
        for part in range(len(plan.parts)):
            start = 0
            for index, parameter in enumerate(scenario.parameters):
                values = contributions.contribution(scenario, plan, rank, part, index)
                if values is not None:
                    found[rank, part, start : start + parameter.numel] = values
                start += parameter.numel
    return found


def bits(values: Floats, *, signed: bool) -> NDArray[np.int32]:
    """Bit patterns: one for every nan, and one for both zeros unless ``signed``."""
    values = np.asarray(values, np.float32)
    if not signed:
        with np.errstate(invalid="ignore"):  # of a nan that signals: memory that was never written
            values = values + np.float32(0.0)
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


def gather(scenario: Scenario, observations: Mapping[int, Observation | None]) -> Evidence | None:
    """What the ranks saw, put together; None where nobody saw values.

    Args:
        scenario: that failed.
        observations: by rank, at the first difference: None of a rank to which all was equal there. Of a rank that is
            not in it nothing is known.
    """
    seen = [(rank, one) for rank, one in sorted(observations.items()) if one is not None]
    seen = [(rank, one) for rank, one in seen if one.quantity is seen[0][1].quantity]
    if not seen or seen[0][1].quantity is Quantity.NORM:
        return None
    found = seen[0][1]
    partition = Partition(scenario.world, scenario.numel, tuple(Bucket(*bucket) for bucket in found.buckets))
    own = dict(seen)
    equal = {rank for rank, one in observations.items() if one is None}
    if found.quantity in _WHOLE:
        slots, actual = _whole(scenario, partition, own, equal, found)
    else:
        slots, actual = _shards(scenario, partition, own, equal, found)
    reference = np.frombuffer(found.expected, np.float32)
    evidence = Evidence(scenario, partition, found, slots, reference, actual, np.zeros(actual.size, np.bool_))
    expected = np.asarray(evidence.at(reference), np.float32)
    wrong = evidence.differs(expected, actual)
    if evidence.vague:
        wrong, expected = _outside(evidence, actual)
    if found.quantity is not Quantity.GRADIENT and not (found.quantity is Quantity.MASTER and found.step is None):
        wrong &= ~slots.padding  # what an update makes of padding is free
    return Evidence(scenario, partition, found, slots, expected, actual, wrong)


def _slots(scenario: Scenario, partition: Partition, padded: Ints, observer: Ints) -> Slots:
    """Of positions in all buckets with their padding."""
    sizes = np.array([one.padded for one in partition.buckets], np.intp)
    starts = np.array([one.start for one in partition.buckets], np.intp)
    ends = np.array([one.end for one in partition.buckets], np.intp)
    bases = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    holding = np.flatnonzero(sizes)
    bucket = holding[np.searchsorted(bases[holding], padded, side="right") - 1]
    inside = padded - bases[bucket]
    width = np.maximum(sizes[bucket] // partition.world, 1)
    flat = starts[bucket] + inside
    offsets = np.cumsum([parameter.numel for parameter in scenario.parameters])
    parameter = np.where(flat < ends[bucket], np.searchsorted(offsets, flat, side="right"), -1)
    return Slots(observer, bucket, inside // width, inside % width, width, padded, bases[bucket], flat, parameter)


def _shards(
    scenario: Scenario, partition: Partition, own: Mapping[int, Observation], equal: set[int], found: Observation
) -> tuple[Slots, Floats]:
    total = sum(one.padded for one in partition.buckets)
    everything = _slots(scenario, partition, np.arange(total), np.zeros(total, np.intp))
    order: list[Ints] = []
    values: list[Floats] = []
    reference = np.frombuffer(found.expected, np.float32)
    for rank in sorted({*own, *equal}):
        mine = np.flatnonzero(everything.owner == rank)
        order.append(mine)
        if rank in own:
            values.append(np.frombuffer(own[rank].actual, np.float32))
        else:
            outside = everything.parameter[mine] < 0
            values.append(np.where(outside, np.float32(0), reference[np.where(outside, 0, everything.flat[mine])]))
    padded = np.concatenate(order)
    return _slots(scenario, partition, padded, everything.owner[padded]), np.concatenate(values)


def _whole(
    scenario: Scenario, partition: Partition, own: Mapping[int, Observation], equal: set[int], found: Observation
) -> tuple[Slots, Floats]:
    everything = np.concatenate(
        [
            base + np.arange(one.length)
            for base, one in zip(
                np.cumsum([0, *(one.padded for one in partition.buckets)]), partition.buckets, strict=False
            )
        ]
    )
    starts = np.concatenate([np.arange(one.start, one.end) for one in partition.buckets])
    everything = everything[np.argsort(starts, kind="stable")].astype(np.intp)  # buckets need not be in order
    rows = {rank: np.frombuffer(one.actual, np.float32) for rank, one in own.items()}
    rows.update({rank: np.frombuffer(found.expected, np.float32) for rank in equal})
    first = next(iter(rows.values()))
    if all(row.tobytes() == first.tobytes() for row in rows.values()):
        rows = {EVERY_RANK: first}
    observer = np.repeat(np.array(sorted(rows), np.intp), everything.size)
    padded = np.tile(everything, len(rows))
    return _slots(scenario, partition, padded, observer), np.concatenate([rows[rank] for rank in sorted(rows)])


def _outside(evidence: Evidence, actual: Floats) -> tuple[Bools, Floats]:
    """Where a gradient is what no order of addition gives, and about what it should be: inf where a sum overflows."""
    centers, limits, overflows = [], [], []
    for index in range(len(evidence.scenario.parameters)):
        if evidence.plan is None:
            continue
        interval = contributions.interval(evidence.scenario, evidence.plan, index)
        centers.append(interval.center)
        limits.append(interval.bound)
        overflows.append(interval.overflows)
    center, bound = evidence.at(np.concatenate(centers)), evidence.at(np.concatenate(limits))
    overflow = evidence.at(np.concatenate(overflows))
    seen = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (seen == center) | (np.isnan(seen) & np.isnan(center)) | (np.abs(seen - center) <= bound)
    overflowed = overflow & (np.isnan(seen) | (np.isinf(seen) & np.isfinite(center)))
    wrong = np.asarray(~(same | overflowed), np.bool_)
    with np.errstate(over="ignore"):
        about = center.astype(np.float32)
    return wrong, np.where(wrong & overflow, np.copysign(np.float32(np.inf), about), about)
