"""Makes failing scenarios of a strategy smaller: what :mod:`harness.scenario.smaller` does not know of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import asdict, replace

from harness.scenario.fewer import lower
from harness.scenario.model import Domain, Parameter, Part, Scenario, steps, strategy_of
from harness.scenario.muon import MuonSettings
from harness.scenario.muon_check import LARGEST_INTEGER
from harness.scenario.muon_groups import multiple_of
from harness.scenario.strategy import ROOT, Place, Strategy
from harness.scenario.strategy_check import LARGEST_BF16_SUM, narrow, trainable

_PLAIN = Strategy(())
_PLAINER_ACCUMULATIONS = {
    "sync": (),
    "no_sync": ("sync",),
    "nested": ("sync", "no_sync"),
    "deferred": ("sync", "no_sync"),
    "flush": ("sync", "no_sync"),
}
_RANKS_OF_ACCUMULATIONS = {"sync": 0, "no_sync": 1, "nested": 2, "deferred": 2, "flush": 2}


def size(strategy: Strategy | None) -> tuple[int | float, ...]:
    """What smaller means, beside what the rest of a scenario says: of two the one whose first difference is lower."""
    if strategy is None:
        return ()
    places = strategy.places
    return (
        max((place.block for place in places), default=0),
        sum(_num_changed(replace(place, block=0), Place()) for place in places),
        sum(place.block != 0 for place in places),
        strategy.replicas,
        _RANKS_OF_ACCUMULATIONS[strategy.accumulation],
        strategy.converts + strategy.bare_root + strategy.offload + strategy.unequal_start,
        (strategy.reduce != _PLAIN.reduce) + (strategy.compute != _PLAIN.compute),
        _num_changed(strategy.muon, MuonSettings()),
    )


def _num_changed(given: Any, plain: Any) -> int:  # noqa: ANN401  (structs of one type)
    fields = asdict(plain)
    return sum(value != fields[name] for name, value in asdict(given).items())


# --- what a change leaves behind --------------------------------------------------------------------------------------


def fitted(scenario: Scenario) -> Scenario:
    """The scenario with what a change to it left behind mended, as far as it follows from the rest.

    Blocks are numbered without gaps; replicas divide the world; each rank uses something; means, and sums in bf16, are
    exact.
    """
    strategy = scenario.strategy
    if strategy is None:
        return scenario
    places = [_fitting(place, parameter, strategy) for place, parameter in _placed(scenario, strategy)]
    strategy = replace(
        strategy,
        places=numbered(places),
        replicas=math.gcd(strategy.replicas, scenario.world),
        bare_root=strategy.bare_root and strategy.converts,
        muon=strategy.muon if any(place.dedicated for place in places) else MuonSettings(),
    )
    mended = replace(scenario, strategy=strategy, operations=_using(scenario, strategy))
    return mended if scenario.values.domain is Domain.GENERAL else _exact(mended, strategy)


def _placed(scenario: Scenario, strategy: Strategy) -> list[tuple[Place, Parameter]]:
    return list(zip(strategy.places, scenario.parameters, strict=True))


def _fitting(place: Place, parameter: Parameter, strategy: Strategy) -> Place:
    bare = strategy.converts and strategy.bare_root and place.block == ROOT
    return replace(
        place,
        plain=(place.plain or bare) and strategy.converts,
        dedicated=place.dedicated and len(parameter.shape) > 1 and not bare,
    )


def numbered(places: Sequence[Place]) -> tuple[Place, ...]:
    """The places with their blocks numbered without gaps; where all are of the root, in one block instead."""
    used = sorted({place.block for place in places} - {ROOT})
    if not used:
        return tuple(replace(place, block=0) for place in places)
    numbers = {block: number for number, block in enumerate(used)} | {ROOT: ROOT}
    return tuple(replace(place, block=numbers[place.block]) for place in places)


def _using(scenario: Scenario, strategy: Strategy) -> tuple[Any, ...]:
    """The operations, of which each rank that would use nothing that takes a gradient uses everything."""
    moving = {*trainable(strategy)}
    return tuple(
        replace(operation, none=tuple(() if moving <= {*none} else none for none in operation.none))
        if isinstance(operation, Part)
        else operation
        for operation in scenario.operations
    )


def _exact(scenario: Scenario, strategy: Strategy) -> Scenario:
    """With a multiple of which means are exact, and integers of which there are few enough bits."""
    needed, multiple = multiple_of([scenario.world]), strategy.multiple
    if multiple % needed:
        multiple = needed
    num_parts = max([1, *(len(plan.parts) for plan in steps(scenario))])  # a candidate may have a step without any
    limits = [scenario.values.max_k]
    if narrow(scenario, strategy):
        limits.append(LARGEST_INTEGER // multiple)
    if strategy.reduce == "bf16":
        limits.append(LARGEST_BF16_SUM // (scenario.world * num_parts * multiple))
    values = replace(scenario.values, max_k=max(1, min(limits)))
    return replace(scenario, values=values, strategy=replace(strategy, multiple=multiple))


# --- one kind of change each ------------------------------------------------------------------------------------------


def blocks(scenario: Scenario) -> Iterator[Scenario]:
    """All in one block; a block less; one parameter in the first block."""
    strategy = strategy_of(scenario)
    places = strategy.places
    yield _changed(scenario, strategy, places=tuple(replace(place, block=0) for place in places))
    for block in range(ROOT, max(place.block for place in places) + 1):
        if block:
            merged = tuple(replace(place, block=0) if place.block == block else place for place in places)
            yield _changed(scenario, strategy, places=merged)
    for index, place in enumerate(places):
        if place.block:
            yield _with_place(scenario, strategy, index, replace(place, block=0))


def places(scenario: Scenario) -> Iterator[Scenario]:
    """Plain places: all at once, all of one field, or a field of one parameter by itself."""
    strategy = strategy_of(scenario)
    yield _changed(scenario, strategy, places=tuple(Place(place.block) for place in strategy.places))
    fields = {name: value for name, value in asdict(Place()).items() if name != "block"}
    for name, value in fields.items():
        changed = tuple(replace(place, **{name: value}) for place in strategy.places)
        if changed != strategy.places:
            yield _changed(scenario, strategy, places=changed)
    for index, place in enumerate(strategy.places):
        for name, value in fields.items():
            if getattr(place, name) != value:
                yield _with_place(scenario, strategy, index, replace(place, **{name: value}))


def shapes(scenario: Scenario) -> Iterator[Scenario]:
    """Parameters of fewer elements, and of fewer dimensions; with values of their own; all of them fp32."""
    for index, parameter in enumerate(scenario.parameters):
        for shape in _plainer(parameter.shape):
            yield _with_parameter(scenario, index, replace(parameter, shape=shape, sources=()))
        yield _with_parameter(scenario, index, replace(parameter, sources=()))
    strategy = strategy_of(scenario)
    masters = replace(scenario, parameters=tuple(replace(each, dtype="fp32") for each in scenario.parameters))
    yield replace(masters, strategy=replace(strategy, reduce=_PLAIN.reduce))
    yield masters


def _plainer(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(shape) > 1:
        yield shape[:1]
        yield shape[-2:]
    for axis, dimension in enumerate(shape):
        for fewer in lower(dimension):
            yield (*shape[:axis], fewer, *shape[axis + 1 :])


def options(scenario: Scenario) -> Iterator[Scenario]:
    """A plain strategy: all of it at once, or each field by itself; fewer replicas; a smaller multiple."""
    strategy = strategy_of(scenario)
    kept: dict[str, Any] = {"places": strategy.places, "sharding": strategy.sharding, "multiple": strategy.multiple}
    plain = {name: value for name, value in asdict(_PLAIN).items() if name not in kept}
    yield replace(scenario, strategy=Strategy(**kept))
    yield replace(scenario, strategy=Strategy(**kept, reduce=strategy.reduce, compute=strategy.compute))
    for name, value in plain.items():
        yield _changed(scenario, strategy, **{name: value})
    for accumulation in _PLAINER_ACCUMULATIONS[strategy.accumulation]:
        yield _changed(scenario, strategy, accumulation=accumulation)
    for replicas in lower(strategy.replicas):
        yield _changed(scenario, strategy, replicas=replicas)
    for name, value in asdict(MuonSettings()).items():
        yield _changed(scenario, strategy, muon=replace(strategy.muon, **{name: value}))
    yield _changed(scenario, strategy, multiple=multiple_of([scenario.world]))


def _changed(scenario: Scenario, strategy: Strategy, **changes: Any) -> Scenario:  # noqa: ANN401  (fields of Strategy)
    return replace(scenario, strategy=replace(strategy, **changes))


def _with_place(scenario: Scenario, strategy: Strategy, index: int, place: Place) -> Scenario:
    return _changed(scenario, strategy, places=(*strategy.places[:index], place, *strategy.places[index + 1 :]))


def _with_parameter(scenario: Scenario, index: int, parameter: Parameter) -> Scenario:
    parameters = (*scenario.parameters[:index], parameter, *scenario.parameters[index + 1 :])
    return replace(scenario, parameters=parameters)
