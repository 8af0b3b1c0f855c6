"""Makes failing scenarios of system ``"muon"`` smaller: what :mod:`harness.scenario.smaller` does not know of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import asdict, replace

from harness.scenario.fewer import lower
from harness.scenario.model import Domain, Parameter, Scenario, muon_of, steps
from harness.scenario.muon import Color, GlobalClip, Mark, Muon, MuonSettings, Sharding
from harness.scenario.muon_check import LARGEST_INTEGER, divisors
from harness.scenario.muon_groups import multiple_of

_PLAIN_CLIP = GlobalClip(1.0)


def size(muon: Muon | None) -> tuple[int | float, ...]:
    """What smaller means, beside what the rest of a scenario says: of two the one whose first difference is lower."""
    if muon is None:
        return ()
    sharding = muon.sharding
    return (
        sum(len(color.groups) for color in muon.colors),
        sum(color.divisor is not None for color in muon.colors),
        _num_changed(sharding, Sharding()),
        sharding.accumulate_steps + (sharding.local_world_size or 0),
        _num_changed(muon.settings, MuonSettings()),
        (muon.clip is not None) + (muon.clip not in (None, _PLAIN_CLIP)),
        muon.no_sync + (muon.release_color is not None) + (muon.backward != "autograd"),
        sum(_num_changed(mark, Mark()) for mark in muon.marks),
        sum(mark.num_heads for mark in muon.marks),
    )


def _num_changed(given: Any, plain: Any) -> int:  # noqa: ANN401  (structs of one type)
    fields = asdict(plain)
    return sum(value != fields[name] for name, value in asdict(given).items())


def fitted(scenario: Scenario) -> Scenario:
    """The scenario with what a change to it left behind mended, as far as it follows from the rest.

    Colours that no parameter has go; nodes divide the world; windows are long enough; means are exact.
    """
    muon = scenario.muon
    if muon is None:
        return scenario
    muon = _without_unused_colors(muon)
    sharding = muon.sharding
    if sharding.local_world_size is not None:
        sharding = replace(sharding, local_world_size=math.gcd(sharding.local_world_size, scenario.world))
    most_parts = max((len(plan.parts) for plan in steps(scenario)), default=0)
    if sharding.comm_overlap and not muon.no_sync:
        sharding = replace(sharding, accumulate_steps=max(sharding.accumulate_steps, most_parts))
    values, multiple = scenario.values, muon.multiple
    needed = multiple_of(divisors(scenario.world, muon).values())
    if values.domain is not Domain.GENERAL and multiple % needed:
        multiple = needed
        values = replace(values, max_k=max(1, min(values.max_k, LARGEST_INTEGER // needed)))
    return replace(scenario, values=values, muon=replace(muon, sharding=sharding, multiple=multiple))


def _without_unused_colors(muon: Muon) -> Muon:
    used = sorted({mark.color for mark in muon.marks if mark.color is not None and mark.color < len(muon.colors)})
    places: dict[int | None, int | None] = {color: place for place, color in enumerate(used)}
    released = muon.release_color
    if released is not None and released >= 0:
        released = places.get(released)
    if released == -1 and all(mark.color is not None for mark in muon.marks):
        released = None
    return replace(
        muon,
        marks=tuple(replace(mark, color=places.get(mark.color)) for mark in muon.marks),
        colors=tuple(muon.colors[color] for color in used),
        release_color=released,
    )


def of_ranks(muon: Muon, ranks: Sequence[int]) -> Muon:
    """With these ranks alone, renumbered; a colour of which none is left is the default one."""
    places = {rank: place for place, rank in enumerate(ranks)}
    colors: list[Color] = []
    numbers: dict[int | None, int | None] = {}
    for index, color in enumerate(muon.colors):
        groups = (tuple(sorted(places[rank] for rank in group if rank in places)) for group in color.groups)
        left = tuple(group for group in groups if group)
        if left:
            numbers[index] = len(colors)
            colors.append(replace(color, groups=left))
    marks = tuple(replace(mark, color=numbers.get(mark.color)) for mark in muon.marks)
    released = muon.release_color
    if released is not None and released >= 0:
        released = numbers.get(released)
    return replace(muon, marks=marks, colors=tuple(colors), release_color=released)


# --- one kind of change each ------------------------------------------------------------------------------------------


def colors(scenario: Scenario) -> Iterator[Scenario]:
    """Without colours, without one, with groups of all ranks, with divisors of their own sizes."""
    muon = muon_of(scenario)
    if not muon.colors:
        return
    everyone = Color((tuple(range(scenario.world)),))
    yield _changed(scenario, muon, marks=tuple(replace(mark, color=None) for mark in muon.marks))
    for index, color in enumerate(muon.colors):
        marks = tuple(replace(mark, color=None if mark.color == index else mark.color) for mark in muon.marks)
        yield _changed(scenario, muon, marks=marks)
        for plainer in (everyone, replace(color, divisor=None), replace(color, groups=color.groups[:1])):
            yield _changed(scenario, muon, colors=(*muon.colors[:index], plainer, *muon.colors[index + 1 :]))


def shapes(scenario: Scenario) -> Iterator[Scenario]:
    """Parameters of fewer elements, with the cuts that these leave; without stacks; of bf16."""
    muon = muon_of(scenario)
    for index, (parameter, mark) in enumerate(zip(scenario.parameters, muon.marks, strict=True)):
        for changed, marked in _plainer(parameter, mark):
            if changed != parameter or marked != mark:
                parameters = (*scenario.parameters[:index], changed, *scenario.parameters[index + 1 :])
                marks = (*muon.marks[:index], marked, *muon.marks[index + 1 :])
                yield _changed(replace(scenario, parameters=parameters), muon, marks=marks)


def _plainer(parameter: Parameter, mark: Mark) -> Iterator[tuple[Parameter, Mark]]:
    shape = parameter.shape
    if len(shape) > 2:
        yield replace(parameter, shape=shape[-2:], sources=()), mark
    if not mark.muon:
        for numel in (*lower(parameter.numel), parameter.numel):
            yield replace(parameter, shape=(numel,), sources=()), mark
    for axis, dimension in enumerate(shape):
        for fewer in lower(dimension):
            recut = _recut(mark, fewer) if axis == len(shape) - 2 else mark
            if recut is not None:
                yield replace(parameter, shape=(*shape[:axis], fewer, *shape[axis + 1 :]), sources=()), recut
    for block, rows in enumerate(mark.sizes):
        for fewer in lower(rows):
            sizes = (*mark.sizes[:block], fewer, *mark.sizes[block + 1 :])
            shorter = (*shape[:-2], sum(sizes), shape[-1])
            yield replace(parameter, shape=shorter, sources=()), replace(mark, sizes=sizes)
    yield replace(parameter, dtype="bf16"), mark
    yield replace(parameter, sources=()), mark


def _recut(mark: Mark, rows: int) -> Mark | None:
    """The mark of a matrix of so many rows, fewer than it had; None: it cannot be cut into as many blocks."""
    if mark.split == "heads":
        heads = math.gcd(mark.num_heads, rows)
        return replace(mark, num_heads=heads) if heads > 1 else None
    if mark.split == "none" or (not mark.sizes and rows % 2 == 0):
        return mark
    sizes = list(mark.sizes) or [rows, rows]
    while sum(sizes) > rows:
        largest = sizes.index(max(sizes))
        sizes[largest] -= 1
        if not sizes[largest]:
            return None
    return replace(mark, sizes=tuple(sizes))


def marks(scenario: Scenario) -> Iterator[Scenario]:
    """Plain marks: all at once, or a field of one parameter by itself."""
    muon = muon_of(scenario)
    yield _changed(scenario, muon, marks=tuple(Mark(muon=mark.muon, color=mark.color) for mark in muon.marks))
    for index, mark in enumerate(muon.marks):
        fields = {name: value for name, value in asdict(Mark()).items() if name not in ("split", "sizes", "num_heads")}
        changes: list[dict[str, Any]] = [
            {"split": "none", "sizes": (), "num_heads": 1},
            {"muon": False, "split": "none", "sizes": (), "num_heads": 1},
            *({name: value} for name, value in fields.items()),
        ]
        for change in changes:
            changed = replace(mark, **change)
            if changed != mark:
                yield _changed(scenario, muon, marks=(*muon.marks[:index], changed, *muon.marks[index + 1 :]))


def options(scenario: Scenario) -> Iterator[Scenario]:
    """Plain settings and a plain configuration: all at once, or each field by itself; no clip, or a plain one."""
    muon = muon_of(scenario)
    yield _changed(
        scenario, muon, sharding=Sharding(), settings=MuonSettings(), clip=None, no_sync=False, release_color=None
    )
    plain: dict[str, Any] = {"clip": None, "no_sync": False, "release_color": None, "backward": "autograd"}
    for name, value in plain.items():
        yield _changed(scenario, muon, **{name: value})
    yield _changed(scenario, muon, sharding=Sharding())
    yield _changed(scenario, muon, sharding=replace(muon.sharding, two_hop=False, local_world_size=None))
    for name, value in asdict(Sharding()).items():
        yield _changed(scenario, muon, sharding=replace(muon.sharding, **{name: value}))
    for fewer in lower(muon.sharding.accumulate_steps):
        yield _changed(scenario, muon, sharding=replace(muon.sharding, accumulate_steps=fewer))
    yield _changed(scenario, muon, settings=MuonSettings())
    for name, value in asdict(MuonSettings()).items():
        yield _changed(scenario, muon, settings=replace(muon.settings, **{name: value}))
    if muon.clip is not None:
        yield _changed(scenario, muon, clip=_PLAIN_CLIP)
    needed = multiple_of(divisors(scenario.world, muon).values())
    yield _changed(scenario, muon, multiple=needed)


def _changed(scenario: Scenario, muon: Muon, **changes: Any) -> Scenario:  # noqa: ANN401  (fields of Muon)
    return replace(scenario, muon=replace(muon, **changes))
