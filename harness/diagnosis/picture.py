"""What the pictures of a failure show, worked out of what the ranks saw and of how far they came. numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from harness.diagnosis.evidence import EVERY_RANK, Bools, Evidence, Floats, Ints, gather
from harness.report import evidence as pictures
from harness.report.evidence import (
    Column,
    MapBucket,
    MapParameter,
    Place,
    RankUlps,
    Row,
    Timeline,
    WrongRun,
    WrongValue,
)
from harness.scenario.model import Scenario, steps
from harness.verdict import STAGE_ORDER, Divergence, Observation, Property, Quantity, Stage

MOST_PARAMETERS: Final = 200
MOST_BUCKETS: Final = 100
MOST_RUNS: Final = 400
MOST_VALUES: Final = 8
MOST_STEPS: Final = 4
MOST_RANKS: Final = 32
NAME_CHARS: Final = 200

_BF16_SHIFT = 16


@np.errstate(invalid="ignore", over="ignore")  # whatever memory holds that was never written
def evidence_of(
    scenario: Scenario, found: Divergence, observations: Mapping[int, Observation | None], places: Sequence[Place]
) -> pictures.Evidence:
    """What can be drawn of a violation.

    Args:
        scenario: that failed.
        found: the first difference.
        observations: as of :func:`harness.diagnosis.evidence.gather`.
        places: how far each rank came; empty where that is not known.
    """
    seen = gather(scenario, observations)
    return pictures.Evidence(
        world=scenario.world,
        map=None if seen is None else _map(seen),
        no_map=None if seen is not None else _why_no_map(scenario, found, observations),
        timeline=_timeline(scenario, found, places) if places else None,
    )


def _why_no_map(scenario: Scenario, found: Divergence, observations: Mapping[int, Observation | None]) -> str:
    if found.property in (Property.PROGRESS, Property.TRAFFIC):
        return "no values were compared: what failed is how the ranks ran, not what they computed"
    if found.property is Property.NORM or any(
        one is not None and one.quantity is Quantity.NORM for one in observations.values()
    ):
        return "a norm is one number: there is no element that is wrong by itself"
    if found.property in (Property.DETERMINISM, Property.INVARIANCE):
        return "two runs are compared by digests and norms: no single element is known"
    if scenario.system == "muon":
        return "of Muon, whose matrices lie whole on their owners, ranks keep no values that could be mapped"
    if scenario.system == "strategy":
        return "of a distribution strategy, whose layout is its own, ranks keep no values that could be mapped"
    return "the ranks kept no values of this failure: it is not one of values, or the scenario is too large"


# --- the map ----------------------------------------------------------------------------------------------------------


def _map(seen: Evidence) -> pictures.Map:
    slots, wrong = seen.slots, seen.wrong
    runs = _runs(seen)
    buckets = _first_of(len(seen.partition.buckets), sorted({run.bucket for run in runs}), MOST_BUCKETS)
    used = [index for index, one in enumerate(seen.scenario.parameters) if one.numel]
    hit = np.unique(slots.parameter[wrong & ~slots.padding]).tolist()
    parameters = _first_of(len(used), [used.index(index) for index in hit[:MOST_PARAMETERS]], MOST_PARAMETERS)
    offsets = np.cumsum([0, *(one.numel for one in seen.scenario.parameters)]).tolist()
    kept = _some_of_each([run for run in runs if run.bucket in set(buckets)])
    wrong_in = Counter[int](slots.bucket[wrong].tolist())
    away, unit = _ulps(seen)
    return pictures.Map(
        quantity=seen.quantity.value,
        numel=seen.scenario.numel,
        compared=int((~slots.padding).sum()),
        wrong=int((wrong & ~slots.padding).sum()),
        wrong_padding=int((wrong & slots.padding).sum()),
        whole=bool(slots.observer.size and (slots.observer != slots.owner).any()),
        parameters=tuple(_parameter(seen, used[each], offsets[used[each]]) for each in parameters),
        parameters_left_out=len(used) - len(parameters),
        buckets=tuple(MapBucket(index, *seen.partition.buckets[index], wrong=wrong_in[index]) for index in buckets),
        buckets_left_out=len(seen.partition.buckets) - len(buckets),
        runs=tuple(kept),
        runs_left_out=len(runs) - len(kept),
        values=_values(seen, away),
        ulps=_histogram(seen, away),
        unit=unit,
    )


def _first_of(total: int, needed: Sequence[int], most: int) -> list[int]:
    """At most so many of ``range(total)``, in order: those that are needed, then the first of the others."""
    kept = list(needed[:most])
    others = (index for index in range(total) if index not in set(kept))
    kept += [index for index, _ in zip(others, range(most - len(kept)), strict=False)]
    return sorted(kept)


def _some_of_each(runs: Sequence[WrongRun]) -> list[WrongRun]:
    """At most so many runs. Buckets take turns, and in each its ranks: what is wrong does not look clean while another
    bucket is drawn in full."""
    of_rank, of_bucket = Counter[tuple[int, int | None]](), Counter[int]()
    turns = []
    for number, run in enumerate(runs):
        turns.append((of_rank[run.bucket, run.rank], number))
        of_rank[run.bucket, run.rank] += 1
    order = []
    for _, number in sorted(turns):
        order.append((of_bucket[runs[number].bucket], number))
        of_bucket[runs[number].bucket] += 1
    return [runs[number] for number in sorted(number for _, number in sorted(order)[:MOST_RUNS])]


def _parameter(seen: Evidence, index: int, offset: int) -> MapParameter:
    parameter = seen.scenario.parameters[index]
    return MapParameter(_name(parameter.name), offset, parameter.numel)


def _name(name: str) -> str:
    return name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS]}…"


def _rank(observer: int) -> int | None:
    return None if observer == EVERY_RANK else observer


def _runs(seen: Evidence) -> list[WrongRun]:
    """Wrong values that lie side by side, on one rank in one bucket: of a piece that follows another the run goes on
    only where the same rank holds both."""
    slots = seen.slots
    at = np.flatnonzero(seen.wrong)
    if not at.size:
        return []
    place = slots.padded[at] - slots.base[at]
    order = np.lexsort((place, slots.observer[at], slots.bucket[at]))
    at, place = at[order], place[order]
    same = (np.diff(slots.bucket[at]) == 0) & (np.diff(slots.observer[at]) == 0) & (np.diff(place) == 1)
    starts = np.concatenate([[0], 1 + np.flatnonzero(~same)])
    lengths = np.diff(np.concatenate([starts, [at.size]]))
    return [
        WrongRun(_rank(int(slots.observer[at[start]])), int(slots.bucket[at[start]]), int(place[start]), int(length))
        for start, length in zip(starts, lengths, strict=True)
    ]


def _ulps(seen: Evidence) -> tuple[Ints, str]:
    """How many units of the last place each value is off, -1 where one of the two is not finite; and of which dtype.

    Weights are bf16 that were widened to fp32: all their low bits are zero.
    """
    both = np.concatenate([_pattern(seen.expected), _pattern(seen.actual)])
    narrow = seen.quantity is Quantity.WEIGHTS and not (both & ((1 << _BF16_SHIFT) - 1)).any()
    shift = _BF16_SHIFT if narrow else 0
    away = np.abs(_ordered(seen.expected, shift) - _ordered(seen.actual, shift))
    finite: Bools = np.isfinite(seen.expected) & np.isfinite(seen.actual)
    return np.where(finite, away, -1).astype(np.intp), "bf16" if narrow else "fp32"


def _pattern(values: Floats) -> Ints:
    return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.intp)


def _ordered(values: Floats, shift: int) -> Ints:
    """Integers that are in the order of the values, neighbours one apart; both zeros are 0."""
    pattern = _pattern(values)
    magnitude = (pattern & 0x7FFFFFFF) >> shift
    return np.where(pattern >> 31 == 1, -magnitude, magnitude)


def _histogram(seen: Evidence, away: Ints) -> tuple[RankUlps, ...]:
    found = []
    for observer in np.unique(seen.slots.observer[seen.wrong]).tolist():
        mine = away[seen.wrong & (seen.slots.observer == observer)]
        # A zero of the other sign is no ulp away, and counts as the smallest difference there is.
        powers = np.floor(np.log2(np.maximum(mine[mine >= 0], 1))).astype(int)
        bins, counts = np.unique(powers, return_counts=True)
        found.append(
            RankUlps(
                rank=_rank(observer),
                bins=dict(zip(bins.tolist(), counts.tolist(), strict=True)),
                not_finite=int((mine < 0).sum()),
            )
        )
    return tuple(found)


def _values(seen: Evidence, away: Ints) -> tuple[WrongValue, ...]:
    """The first wrong values in the order of the vector."""
    slots = seen.slots
    at = np.flatnonzero(seen.wrong)
    at = at[np.lexsort((slots.observer[at], slots.flat[at]))][:MOST_VALUES]
    offsets = np.cumsum([0, *(one.numel for one in seen.scenario.parameters)])
    found = []
    for slot in at.tolist():
        index = int(slots.parameter[slot])
        name = None if index < 0 else _name(seen.scenario.parameters[index].name)
        found.append(
            WrongValue(
                rank=_rank(int(slots.observer[slot])),
                parameter=name,
                element=int(slots.flat[slot] - offsets[index]) if index >= 0 else int(slots.flat[slot]),
                expected=repr(float(seen.expected[slot])),
                actual=repr(float(seen.actual[slot])),
                ulps=int(away[slot]) if away[slot] >= 0 else None,
            )
        )
    return tuple(found)


# --- the timeline -----------------------------------------------------------------------------------------------------


def _timeline(scenario: Scenario, found: Divergence, places: Sequence[Place]) -> Timeline:
    """Each rank at each stage, up to the last place that something is known of."""
    places = _with_the_first(found, places)
    stopped = [_when(place.step, place.stage) for place in places if place.state != "agreed"]
    last = max([*stopped, found.when])[0]
    columns = [Column(None, Stage.BUILD.value)]
    first = max(0, last + 1 - MOST_STEPS)
    for plan in steps(scenario):
        if first <= plan.index <= last:
            stages = [stage.value for stage in Stage if stage is not Stage.BUILD]
            columns += [Column(plan.index, stage) for stage in (stages if plan.reduced else stages[:1])]
    known = {_when(column.step, column.stage) for column in columns}
    # A stage that this kind of step is not known to have: something was seen there all the same.
    for place in places:
        when = _when(place.step, place.stage)
        if place.state != "agreed" and when not in known and when[0] >= first:
            known.add(when)
            columns.append(Column(place.step, place.stage))
    columns.sort(key=lambda column: _when(column.step, column.stage))
    shown = _few(places)
    return Timeline(
        columns=tuple(columns),
        rows=tuple(Row(place.rank, tuple(_state(place, column) for column in columns)) for place in shown),
        steps_left_out=first,
        ranks_left_out=len(places) - len(shown),
    )


def _when(step: int | None, stage: str) -> tuple[int, int]:
    return (-1 if step is None else step, STAGE_ORDER[Stage(stage)])


def _with_the_first(found: Divergence, places: Sequence[Place]) -> list[Place]:
    """What only all ranks together show is on no rank's own account: it is that of the rank named, or of all."""
    if any(place.state != "agreed" and _when(place.step, place.stage) <= found.when for place in places):
        return list(places)
    here = found.step, found.stage.value
    return [
        Place(place.rank, *here, "differs")
        if found.rank in (None, place.rank) and (place.state == "agreed" or _when(place.step, place.stage) > found.when)
        else place
        for place in places
    ]


def _few(places: Sequence[Place]) -> list[Place]:
    """Of very many ranks those that tell something come first."""
    telling = [place for place in places if place.state != "agreed"]
    others = [place for place in places if place.state == "agreed"]
    return sorted((telling + others)[:MOST_RANKS], key=lambda place: place.rank)


def _state(place: Place, column: Column) -> pictures.State:
    if place.state == "agreed":
        return "agreed"
    here, there = _when(column.step, column.stage), _when(place.step, place.stage)
    return "agreed" if here < there else place.state if here == there else "after"
