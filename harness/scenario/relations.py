"""Metamorphic relations: two scenarios that differ in what must make no difference (DESIGN.md, section 5).

The reference is held against the subject within one scenario, so a mistake that both share is not seen there: values
that depend on the cut into parameters, say. Two scenarios that are related see it. Only those whose sums are exact in
any order are: elsewhere other layouts may give other bits.
"""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from harness.scenario import muon_relations, strategy_check, strategy_relations
from harness.scenario.layouts import listing, permuted, picked, regrouped, shuffled, traced, with_parts
from harness.scenario.model import (
    MAX_WORLD,
    AdamW,
    Build,
    Domain,
    Extension,
    Parameter,
    Part,
    Scenario,
    Source,
    System,
    World,
    beyond,
    check,
    multiple_of_scenario,
    steps,
)
from harness.scenario.partition import round_bucket
from harness.verdict import Divergence, NormObservation, Property, Stage, WeightsObservation

_T = TypeVar("_T")

DEFAULT_WORLDS = (1, 2, 3, 4)
MAX_BUCKETS = 64  # of a scenario with another bucket size: each is two collectives a step
MAX_MORE_PARTS = 3
MAX_SOURCES = 64  # of one parameter, see the model
# Exponents between which nothing that AdamW works out of a gradient under- or overflows: squares of sums below 2**24
# times 2**30 stay below 2**108; of the other end, squares of what is left of a moment that decays or cancels, with all
# its digits, above 2**-126.
SCALE_EXPONENTS = (-40, 30)
SMALLEST_EPS = 1e-30


class Relation(enum.Enum):
    """What differs between two scenarios; what must then be equal says :data:`SUMMARIES`."""

    BUCKET = "bucket"
    WORLD = "world"
    PARTS = "parts"
    ORDER = "order"
    CUT = "cut"
    JOIN = "join"
    SCALE = "scale"
    PATH = "path"
    OVERLAP = "overlap"
    HOP = "hop"
    FUSION = "fusion"
    OWNER = "owner"
    ACCUMULATION = "accumulation"
    MESH = "mesh"
    BLOCKS = "blocks"
    TIER = "tier"


SUMMARIES = {
    Relation.BUCKET: "another bucket size gives the same weights and norms, bit for bit",
    Relation.WORLD: "the same gradients on another number of ranks give the same weights and norms, bit for bit",
    Relation.PARTS: "the same gradients in other parts give the same weights and norms, bit for bit",
    Relation.ORDER: "the parameters in another order get the same weights and norms, bit for bit",
    Relation.CUT: "a parameter that is cut in two gets the same weights and norms, bit for bit",
    Relation.JOIN: "two neighbouring parameters that are joined get the same weights and norms, bit for bit",
    Relation.SCALE: "gradients and eps times a power of two give the same weights, and norms times its square, "
    "bit for bit",
    Relation.PATH: "gradients that are spilled instead of held give the same weights and norms, bit for bit",
    Relation.OVERLAP: "collectives that start from hooks, or do not, give the same weights and norms, bit for bit",
    Relation.HOP: "one hop and two, over nodes of any size, give the same weights and norms, bit for bit",
    Relation.FUSION: "fused buffers of another size, or none, give the same weights and norms, bit for bit",
    Relation.OWNER: "matrices on other owners get the same weights and norms, bit for bit",
    Relation.ACCUMULATION: "parts that are accumulated in another way give the same weights and norms, bit for bit",
    Relation.MESH: "another number of replicas gives the same weights and norms, bit for bit",
    Relation.BLOCKS: "parameters in other blocks get the same weights and norms, bit for bit",
    Relation.TIER: "a simulated world gives the same weights and norms as real ranks, bit for bit",
}
"""One sentence for each relation, for people: what must be equal."""


class RelationReference(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A relation and which of its other scenarios, as a case file says it: see :func:`related`."""

    name: Relation
    pick: Annotated[int, Meta(ge=0, le=2**31)] = 0
    worlds: Annotated[tuple[World, ...], Meta(max_length=MAX_WORLD)] = DEFAULT_WORLDS


class Observed(NamedTuple):
    """What one rank saw of a scenario that held: norms, and digests of the weights by stream, step by step."""

    norms: tuple[NormObservation, ...] = ()
    weights: tuple[WeightsObservation, ...] = ()


NOTHING_OBSERVED = Observed()


def related(
    scenario: Scenario,
    relation: Relation,
    pick: int,
    worlds: Sequence[int] = DEFAULT_WORLDS,
    extension: Extension | None = None,
) -> Scenario | None:
    """The other scenario; None where the relation does not apply to this one.

    Args:
        scenario: the one.
        relation: what is to differ.
        pick: which of the possible ones; any whole number from 0 on. The same one gives the same scenario.
        worlds: other numbers of ranks to choose from (WORLD).
        extension: what the subject takes: the other scenario asks for nothing beyond it, but for what this one does;
            None: it may ask for anything.
    """
    if scenario.values.domain is Domain.GENERAL or scenario.faults:
        return None
    if clips(scenario) and not _exact_squares(scenario):
        return None  # the coefficient depends on how the norm rounds
    if relation is Relation.TIER:
        return scenario if scenario.system in _SIMULATED else None
    maker = _MAKERS[scenario.system].get(relation)
    other = None if maker is None else maker(scenario, pick, worlds)
    if other is None or other == scenario or check(other) is not None:
        return None
    if scenario.strategy is not None and not (_exact_means(scenario) and _exact_means(other)):
        return None
    if extension is not None and not {*beyond(other, extension)} <= {*beyond(scenario, extension)}:
        return None
    if relation is not Relation.SCALE and other.values != scenario.values:
        raise AssertionError("only a scale changes values")
    return other


def _exact_means(scenario: Scenario) -> bool:
    return all(strategy_check.exact_means(scenario, len(plan.parts)) for plan in steps(scenario))


def clips(scenario: Scenario) -> bool:
    """Whether gradients are scaled by what is worked out of their norm."""
    if scenario.muon is not None and scenario.muon.clip is not None:
        return True
    return any(plan.clip is not None for plan in steps(scenario))


def differs(
    relation: Relation,
    scenario: Scenario,
    observed: Observed,
    other: Scenario,
    other_observed: Observed,
    *,
    norms: bool = True,
) -> Divergence | None:
    """What must be equal and is not, where it differs first; None when all is equal.

    Norms are compared on norm-exact data alone: elsewhere they round, as the layout has it.

    Args:
        relation: between the two.
        scenario: the one.
        observed: what was seen of it.
        other: what :func:`related` gave.
        other_observed: what was seen of that.
        norms: whether the subject's norms are exact where they can be: those of a class may round as it likes.
    """
    found = [*_weights_differ(relation, observed, other_observed)]
    if norms and scenario.values.domain is Domain.NORM_EXACT:
        exponent = 2 * (other.values.exponent - scenario.values.exponent)
        found += _norms_differ(relation, observed, other_observed, exponent)
    return min(found, key=lambda divergence: divergence.when, default=None)


def _weights_differ(relation: Relation, observed: Observed, other: Observed) -> Iterable[Divergence]:
    for one, another in itertools.zip_longest(observed.weights, other.weights):
        expected, actual = ("nothing" if seen is None else seen.digest for seen in (one, another))
        # Of a group: that may have other ranks there.
        if expected == actual:
            continue
        seen = one or another
        yield _divergence(relation, seen.step, Stage.GATHER, "the digest of the weights", expected, actual)


def _norms_differ(relation: Relation, observed: Observed, other: Observed, exponent: int) -> Iterable[Divergence]:
    """``exponent``: the other's norms must be so many powers of two larger. After a clip a norm rounds."""
    ones, others = ([seen for seen in each.norms if seen.call == 0] for each in (observed, other))
    for one, another in itertools.zip_longest(ones, others):
        expected = None if one is None else _scaled(one.bits, exponent)
        actual = None if another is None else another.bits
        if expected != actual:
            seen = one or another
            yield _divergence(
                relation, seen.step, Stage.NORM, "the squared norm", expected or "nothing", actual or "nothing"
            )


def _divergence(relation: Relation, step: int, stage: Stage, what: str, expected: str, actual: str) -> Divergence:
    return Divergence(
        property=Property.INVARIANCE,
        stage=stage,
        step=step,
        expected=expected,
        actual=actual,
        message=f"{SUMMARIES[relation]}; of step {step} {what} should be {expected}, it is {actual}",
    )


def _scaled(bits: str, exponent: int) -> str:
    """The bits of a value times ``2**exponent``: of fp32 and fp64 those of a power of two more."""
    digits = bits.removeprefix("0x")
    code = {8: ">f", 16: ">d"}.get(len(digits))
    if exponent == 0 or code is None:
        return bits
    value = struct.unpack(code, bytes.fromhex(digits))[0]
    return f"0x{struct.pack(code, math.ldexp(value, exponent)).hex()}"


def _exact_squares(scenario: Scenario) -> bool:
    """Whether sums of squares of reduced gradients are exact in fp64."""
    num_parts = max((len(plan.parts) for plan in steps(scenario)), default=0)
    largest = scenario.world * num_parts * scenario.values.max_k * multiple_of_scenario(scenario)
    return scenario.numel * largest**2 < 2**53


# --- layout


def _another_bucket(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    world, numel = scenario.world, scenario.numel
    used = round_bucket(scenario.bucket, world)
    fewest = -(-numel // MAX_BUCKETS)
    requests = (1, world + 1, 2 * world + 1, numel // 3, numel // 2, numel, used + world, 2 * used, 7, numel + world)
    sizes = {round_bucket(max(request, fewest, 1), world): max(request, fewest, 1) for request in requests}
    # Of sizes that hold all elements one is as good as another.
    others = [request for size, request in sizes.items() if min(size, numel) != min(used, numel)]
    bucket = picked(others, pick)
    if bucket is None:
        return None
    return replace(scenario, operations=(Build(bucket), *scenario.operations[1:]))


# --- ranks and parts


def _another_world(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    world = picked([world for world in worlds if world != scenario.world and 1 <= world <= MAX_WORLD], pick)
    if world is None:
        return None
    return regrouped(scenario, world, lambda num_slots, num_parts: max(1, -(-num_slots // world)))


def _other_parts(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """As few parts as there can be, or more than there were."""
    world = scenario.world

    def num_parts(num_slots: int, before: int) -> int:
        fewest = max(1, -(-num_slots // world))
        counts = [*range(fewest, before), *range(before + 1, before + 1 + MAX_MORE_PARTS)]
        chosen: int = counts[pick % len(counts)]
        return chosen

    return regrouped(scenario, world, num_parts)


def _spilled(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """Every part announces another one, and the one that comes last holds nothing."""
    nothing = tuple(range(len(scenario.parameters)))
    changed = False

    def change(parts: Sequence[Part]) -> list[Part]:
        nonlocal changed
        ranks = ([part for part in parts if len(part.none[rank]) < len(nothing)] for rank in range(scenario.world))
        if not any(len(own) == 1 and not own[0].more for own in ranks):
            return list(parts)
        changed = True
        last = replace(parts[-1], more=False, none=(nothing,) * scenario.world)
        return [*(replace(part, more=True) for part in parts), last]

    operations = with_parts(scenario, change)
    return replace(scenario, operations=operations) if changed else None


# --- the list of parameters


def _permuted(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    order = shuffled(len(scenario.parameters), pick)
    return None if order is None else permuted(scenario, order)


def _cut(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    index = picked([index for index, each in enumerate(scenario.parameters) if each.numel > 1], pick)
    if index is None:
        return None
    listed = traced(scenario.parameters)
    whole = listed[index]
    at = 1 + Random(pick).randrange(whole.numel - 1)
    names = (_unused(f"{whole.name} ({half})", scenario.parameters) for half in ("begin", "end"))
    halves = [
        Parameter(name, (stop - start,), whole.dtype, sources=_sliced(whole.sources, start, stop))
        for name, start, stop in zip(names, (0, at), (at, whole.numel), strict=True)
    ]
    return listing(
        scenario,
        [*listed[:index], *halves, *listed[index + 1 :]],
        lambda none: [
            *(each + (each > index) for each in none),
            *(each + 1 for each in none if each == index),
        ],
    )


def _joined(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    listed = traced(scenario.parameters)
    parts = [operation for operation in scenario.operations if isinstance(operation, Part)]

    def alike(index: int) -> bool:
        one, other = listed[index], listed[index + 1]
        return (
            one.dtype == other.dtype
            and len(one.sources) + len(other.sources) <= MAX_SOURCES
            and all((index in none) == (index + 1 in none) for part in parts for none in part.none)
        )

    index = picked([index for index in range(len(listed) - 1) if alike(index)], pick)
    if index is None:
        return None
    one, other = listed[index : index + 2]
    name = _unused(f"{one.name} + {other.name}"[:150], scenario.parameters)
    whole = Parameter(name, (one.numel + other.numel,), one.dtype, sources=(*one.sources, *other.sources))
    return listing(
        scenario,
        [*listed[:index], whole, *listed[index + 2 :]],
        lambda none: [each - (each > index) for each in none if each != index + 1],
    )


def _sliced(each: Sequence[Source], start: int, stop: int) -> tuple[Source, ...]:
    """Elements ``[start, stop)`` of what comes from these sources."""
    found, begin = [], 0
    for source in each:
        end = begin + source.stop - source.start
        first, last = max(start, begin), min(stop, end)
        if first < last:
            found.append(Source(source.stream, source.start + first - begin, source.start + last - begin))
        begin = end
    return tuple(found)


def _unused(name: str, parameters: Sequence[Parameter]) -> str:
    taken = {parameter.name for parameter in parameters}
    base, name, number = name[-180:], name[-180:], 1
    while name in taken:
        number += 1
        name = f"{base} {number}"
    return name


# --- values


def _scaled_gradients(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    if any(plan.clip is not None for plan in steps(scenario)):
        return None  # the coefficient has a constant added to the norm
    low, high = SCALE_EXPONENTS
    values, optimizer = scenario.values, scenario.optimizer

    def fits(exponent: int, eps: float) -> bool:
        return low <= exponent <= high and (eps == 0 or SMALLEST_EPS <= eps <= 1)

    if not fits(values.exponent, optimizer.eps):
        return None
    powers = [
        power
        for power in (1, -1, 3, -3, 10, -10, 25, -25)
        if fits(values.exponent + power, math.ldexp(optimizer.eps, power))
    ]
    others = [_times(scenario, optimizer, power) for power in powers]
    return picked([other for other in others if check(other) is None], pick)


def _times(scenario: Scenario, optimizer: AdamW, power: int) -> Scenario:
    values = replace(scenario.values, exponent=scenario.values.exponent + power)
    return replace(scenario, values=values, optimizer=replace(optimizer, eps=math.ldexp(optimizer.eps, power)))


_Maker = Callable[[Scenario, int, Sequence[int]], Scenario | None]
_MAKERS: dict[System, dict[Relation, _Maker]] = {
    "zero_master": {
        Relation.BUCKET: _another_bucket,
        Relation.WORLD: _another_world,
        Relation.PARTS: _other_parts,
        Relation.ORDER: _permuted,
        Relation.CUT: _cut,
        Relation.JOIN: _joined,
        Relation.SCALE: _scaled_gradients,
        Relation.PATH: _spilled,
    },
    "muon": {
        Relation.OVERLAP: muon_relations.overlap,
        Relation.HOP: muon_relations.hop,
        Relation.WORLD: muon_relations.another_world,
        Relation.FUSION: muon_relations.fusion,
        Relation.PARTS: muon_relations.parts,
        Relation.OWNER: muon_relations.owner,
        Relation.ORDER: muon_relations.order,
    },
    "strategy": {
        Relation.ACCUMULATION: strategy_relations.accumulation,
        Relation.MESH: strategy_relations.mesh,
        Relation.WORLD: strategy_relations.another_world,
        Relation.PARTS: strategy_relations.parts,
        Relation.BLOCKS: strategy_relations.blocks,
        Relation.ORDER: strategy_relations.order,
    },
}


# Of strategies it is DDP and FSDP2 that communicate, which look for a backend of their own.
_SIMULATED: frozenset[System] = frozenset({"zero_master", "muon"})


def relations_of(system: System) -> tuple[Relation, ...]:
    """Those that a campaign over such a system takes in turn; a simulated world against real ranks comes last."""
    return (*_MAKERS[system], *([Relation.TIER] if system in _SIMULATED else []))
