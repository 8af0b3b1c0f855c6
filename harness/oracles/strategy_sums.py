"""How the gradients of a distribution strategy are added up and divided, where the sums round. numpy only.

[Note: schedule]
Of a mesh of R replicas of S shards each (``full``: R = 1), a gradient that FSDP2 reduces goes this way. Parts that are
not reduced by themselves are added on their rank in the dtype in which gradients are reduced. What is reduced is added
over the S ranks of a replica and divided by S, in that dtype; where replicas are deferred, such sums are added to each
other, and the next is added to them; then they are added over the replicas and divided by R. The result becomes fp32,
and is added to what earlier parts of the step left, in fp32.

DDP divides each rank's gradient by the world and then adds them, in the gradients' own dtype. A gradient of a part that
is not the first of its step is that of all parts so far: the mean of the earlier ones is divided and added with it.
What is flushed instead is added in fp32, divided, and rounded to that dtype.

Plain parameters and dedicated ones are added up over parts on their rank in fp32 where a part is not reduced; what is
reduced is added over all ranks, plain ones in fp32, dedicated ones in the dtype of the reduction, and divided once, in
fp32.

gloo adds around a ring that begins at any of its ranks, depending on where an element lies in a buffer that is the
subject's affair ([Note: gloo] in :mod:`harness.oracles.order`). Up to two ranks have one sum; of more, each element
must be one of as many sums as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.oracles.bounds import FP32_MAX, gamma
from harness.oracles.contributions import Interval, contribution
from harness.oracles.order import Rounding, add, ring, round_bf16, uniform
from harness.scenario.model import Scenario, StepPlan, strategy_of
from harness.scenario.strategy import Strategy

Treatment = Literal["sharded", "replicated", "plain", "dedicated"]
"""How a parameter's gradient is reduced: by FSDP2, by DDP, beside FSDP2 over all ranks, to one owner."""

_Row = NDArray[np.float32]
_UNITS: dict[Rounding, float] = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_SMALLEST: dict[Rounding, float] = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}


@dataclass(frozen=True)
class Sums:
    """What one parameter's reduced gradient may be.

    Attributes:
        possible: in each element it is that of one of these, fp32 ``[numel]`` each, where the schedule is kept.
        interval: where it is whatever the order of additions.
    """

    possible: tuple[_Row, ...]
    interval: Interval


def treatment(strategy: Strategy, parameter: int) -> Treatment:
    """How the gradient of this parameter is reduced; where the sharding is not known, as DDP would, for one."""
    place = strategy.places[parameter]
    if place.dedicated:
        return "dedicated"
    if strategy.sharding in ("none", "any"):
        return "replicated"
    return "plain" if place.plain else "sharded"


def sums(scenario: Scenario, plan: StepPlan, parameter: int) -> Sums:
    """What the mean of a step's gradients of one parameter may be, of which some rank has one at least."""
    strategy = strategy_of(scenario)
    how = treatment(strategy, parameter)
    given = [
        [contribution(scenario, plan, rank, part, parameter) for rank in range(scenario.world)]
        for part in range(len(plan.parts))
    ]
    numel = scenario.parameters[parameter].numel
    own: Rounding = "bf16" if scenario.parameters[parameter].dtype == "bf16" else "fp32"
    schedule = _Schedule(strategy, scenario.world, numel, own)
    with np.errstate(over="ignore", invalid="ignore"):
        possible = tuple(getattr(schedule, how)(given))
    reduces = how in ("sharded", "dedicated") or strategy.sharding == "any"
    roundings: tuple[Rounding, ...] = (own, strategy.reduce) if reduces else (own,)
    return Sums(possible, _interval(given, numel, scenario.world, roundings))


class _Schedule:
    """[Note: schedule] for one parameter. ``own``: dtype of the parameter, and so of its gradient."""

    def __init__(self, strategy: Strategy, world: int, numel: int, own: Rounding) -> None:
        self.strategy = strategy
        self.world = world
        self.numel = numel
        self.own = own
        self.accumulation = strategy.accumulation
        if strategy.accumulation == "deferred" and strategy.sharding != "hybrid":
            # Without replicas there is nothing to defer, and where all ranks are replicas nothing else.
            self.accumulation = "sync" if strategy.sharding == "full" else "no_sync"
        self.replicas = strategy.replicas
        self.shards = world // strategy.replicas

    def sharded(self, given: Sequence[Sequence[_Row | None]]) -> Iterator[_Row]:
        """All that FSDP2 may come to."""
        for rotation in product(_rotations(self.shards), _rotations(self.replicas)):
            yield self._fsdp(given, *rotation)

    def _fsdp(self, given: Sequence[Sequence[_Row | None]], over_shards: int, over_replicas: int) -> _Row:
        reduce = self.strategy.reduce
        waiting: list[_Row | None] = [None] * self.world
        partial: list[_Row | None] = [None] * self.replicas
        total: _Row | None = None
        for number, part in enumerate(given):
            waiting = [_added(old, new, reduce) for old, new in zip(waiting, part, strict=True)]
            last = number == len(given) - 1
            if not (last or self.accumulation in ("sync", "deferred")):
                continue
            if any(row is not None for row in waiting):
                for replica in range(self.replicas):
                    rows = waiting[replica * self.shards : (replica + 1) * self.shards]
                    mean = _mean(self._full(rows), over_shards, reduce)
                    partial[replica] = _added(partial[replica], mean, reduce)
                waiting = [None] * self.world
            if (last or self.accumulation == "sync") and any(row is not None for row in partial):
                mean = _mean(self._full(partial), over_replicas, reduce)
                total = _added(total, mean, self.own)
                partial = [None] * self.replicas
        return self._full([total])[0]

    def replicated(self, given: Sequence[Sequence[_Row | None]]) -> Iterator[_Row]:
        """All that DDP may come to: it divides by the world, or multiplies by one over it.

        Which of the two may change with the second reduction of a step, from which on gradients lie in its buckets.
        """
        if self.accumulation == "flush":
            for rotation in _rotations(self.world):
                yield self._flushed(given, rotation)
            return
        ways = [(False, True), (True, True), (False, False)] if self.world & (self.world - 1) else [(True, True)]
        for rotation, (first, later) in product(_rotations(self.world), ways):
            yield self._ddp(given, rotation, first=first, later=later)

    def _flushed(self, given: Sequence[Sequence[_Row | None]], rotation: int) -> _Row:
        """Added up on each rank as by autograd, then as a plain one."""
        each: list[_Row | None] = [None] * self.world
        for part in given:
            each = [_added(old, new, self.own) for old, new in zip(each, part, strict=True)]
        return _ROUNDED[self.own](_mean(self._full(each), rotation, "fp32"))

    def _ddp(self, given: Sequence[Sequence[_Row | None]], rotation: int, *, first: bool, later: bool) -> _Row:
        """``first``, ``later``: whether it divides, in the first reduction of the step and in those that follow."""
        each: list[_Row | None] = [None] * self.world
        divides, fresh = first, False
        for number, part in enumerate(given):
            each = [_added(old, new, self.own) for old, new in zip(each, part, strict=True)]
            fresh = fresh or any(row is not None for row in part)
            reduced = number == len(given) - 1 or self.strategy.accumulation == "sync"
            if reduced and fresh:
                factor = np.float32(1.0) / np.float32(self.world)
                scaled = [
                    _ROUNDED[self.own](row / np.float32(self.world) if divides else row * factor)
                    for row in self._full(each)
                ]
                each = [_sum(scaled, rotation, self.own)] * self.world
                divides, fresh = later, False
        return self._full(each)[0]

    def plain(self, given: Sequence[Sequence[_Row | None]]) -> Iterator[_Row]:
        """All that a reduction beside FSDP2 may come to, in fp32."""
        for rotation in _rotations(self.world):
            yield self._over_all(given, rotation, "fp32")

    def dedicated(self, given: Sequence[Sequence[_Row | None]]) -> Iterator[_Row]:
        """All that an owner may be sent."""
        for rotation in _rotations(self.world):
            yield self._over_all(given, rotation, self.strategy.reduce)

    def _over_all(self, given: Sequence[Sequence[_Row | None]], rotation: int, reduce: Rounding) -> _Row:
        waiting: list[_Row | None] = [None] * self.world
        total: _Row | None = None
        for number, part in enumerate(given):
            waiting = [_added(old, new, "fp32") for old, new in zip(waiting, part, strict=True)]
            reduced = number == len(given) - 1 or self.strategy.accumulation == "sync"
            if reduced and any(row is not None for row in waiting):
                rounded = [_ROUNDED[reduce](row) for row in self._full(waiting)]
                total = _added(total, _sum(rounded, rotation, reduce) / np.float32(self.world), "fp32")
                waiting = [None] * self.world
        return self._full([total])[0]

    def _full(self, rows: Sequence[_Row | None]) -> list[_Row]:
        return [np.zeros(self.numel, np.float32) if row is None else row for row in rows]


def _rotations(group_size: int) -> range:
    """Where a ring may begin, as far as that makes a difference."""
    return range(group_size if group_size > 2 else 1)


def _added(total: _Row | None, more: _Row | None, rounding: Rounding) -> _Row | None:
    if more is None:
        return total
    return _ROUNDED[rounding](more if total is None else total + more)


def _sum(rows: Sequence[_Row], rotation: int, rounding: Rounding) -> _Row:
    if len(rows) == 1:
        return rows[0]
    return add(uniform(ring(len(rows))[rotation], rows[0].size), rows, rounding)


def _mean(rows: Sequence[_Row], rotation: int, rounding: Rounding) -> _Row:
    return _ROUNDED[rounding](_sum(rows, rotation, rounding) / np.float32(len(rows)))


_ROUNDED: dict[Rounding, Callable[[_Row], _Row]] = {
    "fp32": lambda values: values,
    "bf16": round_bf16,
    "fp16": lambda values: values.astype(np.float16).astype(np.float32),
}


def _interval(
    given: Sequence[Sequence[_Row | None]], numel: int, world: int, roundings: Sequence[Rounding]
) -> Interval:
    """Around the mean in fp64, by [Note: gamma] in :mod:`harness.oracles.bounds`.

    Whatever the nesting, a contribution passes at most one rounding into each dtype it meets, an addition for each part
    and for each rank, and a division (or two) in each part that follows: ``n = 2 parts * (world + 4)`` covers every
    schedule of this module many times over, in the coarsest dtype there is. Each may lose half the smallest subnormal
    on top. Where that is too many for the lemma, the bound is infinite, and says nothing.
    """
    terms = [row.astype(np.float64) for part in given for row in part if row is not None]
    center = sum(terms, np.zeros(numel)) / world
    magnitude = sum((np.abs(term) for term in terms), np.zeros(numel)) / world
    num_roundings = 2 * len(given) * (world + 4)
    unit = max(_UNITS[rounding] for rounding in roundings)
    smallest = max(_SMALLEST[rounding] for rounding in roundings)
    # The center and the magnitudes are themselves sums in fp64.
    own = gamma(len(terms) + 1, 2.0**-53)
    bound = (gamma(num_roundings, unit) + own) * (1 + 2 * own) * magnitude + num_roundings * smallest
    return Interval(center, bound, magnitude * world + bound > FP32_MAX)
