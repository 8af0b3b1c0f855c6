"""Situations of system ``"strategy"``, as :mod:`harness.scenario.situations` has those of the first one."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from harness.scenario.model import CONTRACT, Domain, Extension, Rate, Scenario, StepPlan, steps
from harness.scenario.muon_groups import multiple_of
from harness.scenario.situations import RankStep, Situation, of_endings, of_parts
from harness.scenario.strategy import ROOT, Offer, Place, Reduce, Strategy
from harness.scenario.strategy_check import LARGEST_BF16_SUM, trainable

MOST_PARAMETERS: Final = 6
MOST_PARTS: Final = 4
"""That the generator draws."""

ELEMENT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
BUCKET_ELEMENT_BYTES: Final = 4
"""Of the elements in which ``Build.bucket`` counts."""


class StrategySituation(enum.Enum):
    """A required situation. Words used below, beside those of :class:`~harness.scenario.situations.Situation`:

    - mesh: replicas x shards; of shardings ``"none"`` and ``"any"`` it is not known, so there the world alone counts.
    - sharded: of a parameter that is neither plain nor dedicated, where parameters are sharded or may be.
    - used: by a rank in a part. What follows of it is in a reduced step, of parameters that take a gradient.
    """

    # --- meshes
    MESH_1X1 = "mesh-1x1"
    MESH_2X1 = "mesh-2x1"
    MESH_1X2 = "mesh-1x2"
    MESH_1X3 = "mesh-1x3"
    MESH_2X2 = "mesh-2x2"
    MESH_1X4 = "mesh-1x4"
    MESH_4X1 = "mesh-4x1"

    # --- the model
    ONE_BLOCK = "one-block"
    SEVERAL_BLOCKS = "several-blocks"
    ROOT_PARAMETER = "root-parameter"
    # Of a sharded parameter, where there are two shards or more: dimension 0 is longer, and no multiple of them; ...
    ROWS_NOT_DIVISIBLE = "rows-not-divisible"
    # ... or shorter, so that a rank holds nothing of it.
    FEWER_ROWS_THAN_SHARDS = "fewer-rows-than-shards"
    ONE_ELEMENT_PARAMETER = "one-element-parameter"
    # Two dimensions above 1.
    MATRIX = "matrix"
    CONVERTS = "converts"
    BARE_ROOT = "bare-root"
    # Of parameters that take a gradient: a plain one and a sharded one.
    PLAIN_AND_SHARDED = "plain-and-sharded"
    TIED = "tied"
    FROZEN = "frozen"
    UNEQUAL_START = "unequal-start"
    OFFLOAD = "offload"

    # --- dtypes
    REDUCE_FP32 = "reduce-fp32"
    REDUCE_BF16 = "reduce-bf16"
    COMPUTE_FP32 = "compute-fp32"
    COMPUTE_BF16 = "compute-bf16"
    # All parameters are bf16.
    WEIGHTS_BF16 = "weights-bf16"

    # --- who uses what
    UNUSED_ON_ALL_RANKS = "unused-on-all-ranks"
    UNUSED_ON_SOME_RANKS = "unused-on-some-ranks"
    # In a part, of a block that has parameters which take a gradient, all of them: on all ranks, or on some.
    BLOCK_UNUSED = "block-unused"
    BLOCK_UNUSED_ON_SOME_RANKS = "block-unused-on-some-ranks"
    # Of a step of two parts or more whose last alone is reduced: a parameter is used, but not in the last, on any rank.
    USED_IN_EARLIER_PART_ONLY = "used-in-earlier-part-only"
    # Of a step of two parts or more: used in the last alone.
    USED_IN_LAST_PART_ONLY = "used-in-last-part-only"

    # --- parts
    ONE_PART = "one-part"
    PARTS_CHANGE = "parts-change"
    # How a reduced step of two parts or more, nested three, accumulates.
    ACCUMULATION_SYNC = "accumulation-sync"
    ACCUMULATION_NO_SYNC = "accumulation-no-sync"
    ACCUMULATION_NESTED = "accumulation-nested"
    ACCUMULATION_DEFERRED = "accumulation-deferred"
    # The same where there are replicas, over which the last part alone is reduced, and shards.
    DEFERRED_OVER_REPLICAS = "deferred-over-replicas"
    ACCUMULATION_FLUSH = "accumulation-flush"
    # DDP has two buckets or more, however it fills them.
    SEVERAL_BUCKETS = "several-buckets"

    # --- several steps, the optimizer
    NO_CLIP = "no-clip"
    SKIP_THEN_STEP = "skip-then-step"
    LR_CHANGED = "lr-changed"
    FIVE_STEPS = "five-steps"
    WEIGHT_DECAY_ON = "weight-decay-on"
    WEIGHT_DECAY_OFF = "weight-decay-off"
    FOREACH = "foreach"

    # --- dedicated parameters
    DEDICATED_AND_OTHERS = "dedicated-and-others"
    # All that take a gradient are dedicated.
    DEDICATED_ALONE = "dedicated-alone"
    OWNER_OF_SEVERAL = "owner-of-several"
    RANK_WITHOUT_DEDICATED = "rank-without-dedicated"

    # Sums of three contributions or more that round.
    SUMS_ROUND = "sums-round"
    WORLD_ONE = "world-one"
    WORLD_TWO = "world-two"
    WORLD_THREE = "world-three"
    WORLD_FOUR = "world-four"

    # --- told by the ranks
    # A clip scaled the gradients: a factor other than 1.
    CLIPPING_ACTIVE = "clipping-active"
    # A clip left all gradients as they were.
    CLIPPING_INACTIVE = "clipping-inactive"
    # A mean, summed in fp32, that needs more than 8 significant bits: a reduction in bf16 would change it.
    WIDE_REDUCED_VALUE = "wide-reduced-value"


RUNTIME = frozenset(
    {
        StrategySituation.CLIPPING_ACTIVE,
        StrategySituation.CLIPPING_INACTIVE,
        StrategySituation.WIDE_REDUCED_VALUE,
    }
)

_WORLDS: Final = {
    1: StrategySituation.WORLD_ONE,
    2: StrategySituation.WORLD_TWO,
    3: StrategySituation.WORLD_THREE,
    4: StrategySituation.WORLD_FOUR,
}
_OF_WORLD: Final = frozenset(_WORLDS.values())

GOALS = tuple(situation for situation in StrategySituation if situation not in _OF_WORLD)

MESHES: Final = {
    (1, 1): StrategySituation.MESH_1X1,
    (2, 1): StrategySituation.MESH_2X1,
    (1, 2): StrategySituation.MESH_1X2,
    (1, 3): StrategySituation.MESH_1X3,
    (2, 2): StrategySituation.MESH_2X2,
    (1, 4): StrategySituation.MESH_1X4,
    (4, 1): StrategySituation.MESH_4X1,
}
_REPLICAS: Final = {situation: replicas for (replicas, _), situation in MESHES.items()}
_SIZES: Final = {situation: replicas * shards for (replicas, shards), situation in MESHES.items()}

_ACCUMULATIONS: Final = {
    "sync": StrategySituation.ACCUMULATION_SYNC,
    "no_sync": StrategySituation.ACCUMULATION_NO_SYNC,
    "nested": StrategySituation.ACCUMULATION_NESTED,
    "deferred": StrategySituation.ACCUMULATION_DEFERRED,
    "flush": StrategySituation.ACCUMULATION_FLUSH,
}
_REDUCED_ONCE: Final = ("no_sync", "nested", "flush")

# The name of the field of Offer that says whether it may be drawn.
_NEEDS: Final = {
    StrategySituation.CONVERTS: "plain",
    StrategySituation.BARE_ROOT: "plain",
    StrategySituation.PLAIN_AND_SHARDED: "plain",
    StrategySituation.TIED: "tied",
    StrategySituation.UNEQUAL_START: "unequal_start",
    StrategySituation.OFFLOAD: "offload",
    StrategySituation.UNUSED_ON_ALL_RANKS: "unused",
    StrategySituation.UNUSED_ON_SOME_RANKS: "unused",
    StrategySituation.BLOCK_UNUSED: "unused",
    StrategySituation.BLOCK_UNUSED_ON_SOME_RANKS: "unused",
    StrategySituation.USED_IN_EARLIER_PART_ONLY: "unused",
    StrategySituation.USED_IN_LAST_PART_ONLY: "unused",
    StrategySituation.ACCUMULATION_DEFERRED: "deferred",
    StrategySituation.DEFERRED_OVER_REPLICAS: "deferred",
    StrategySituation.ACCUMULATION_FLUSH: "flush",
    StrategySituation.DEDICATED_AND_OTHERS: "dedicated",
    StrategySituation.DEDICATED_ALONE: "dedicated",
    StrategySituation.OWNER_OF_SEVERAL: "dedicated",
    StrategySituation.RANK_WITHOUT_DEDICATED: "dedicated",
    StrategySituation.SUMS_ROUND: "rounds",
}
_NEEDS_TWO_RANKS: Final = frozenset(
    {
        StrategySituation.UNEQUAL_START,
        StrategySituation.UNUSED_ON_SOME_RANKS,
        StrategySituation.BLOCK_UNUSED_ON_SOME_RANKS,
        StrategySituation.RANK_WITHOUT_DEDICATED,
    }
)
_FEWEST_PARTS: Final = {
    StrategySituation.USED_IN_EARLIER_PART_ONLY: 2,
    StrategySituation.USED_IN_LAST_PART_ONLY: 2,
    StrategySituation.PARTS_CHANGE: 2,
    StrategySituation.ACCUMULATION_SYNC: 2,
    StrategySituation.ACCUMULATION_NO_SYNC: 2,
    StrategySituation.ACCUMULATION_NESTED: 3,
    StrategySituation.ACCUMULATION_DEFERRED: 2,
    StrategySituation.DEFERRED_OVER_REPLICAS: 2,
    StrategySituation.ACCUMULATION_FLUSH: 2,
}
_ROWS: Final = frozenset({StrategySituation.ROWS_NOT_DIVISIBLE, StrategySituation.FEWER_ROWS_THAN_SHARDS})


class Reduction(NamedTuple):
    """Of which dtype all parameters are, and in which gradients are reduced."""

    weights: Reduce
    sums: Reduce


def reductions(offer: Offer) -> tuple[Reduction, ...]:
    """Those that a subject can be asked for; what is bf16 already is reduced in bf16."""
    of_masters = [Reduction("fp32", sums) for sums in offer.reduce] if "fp32" in offer.dtypes else []
    return (*of_masters, *([Reduction("bf16", "bf16")] if "bf16" in offer.dtypes else []))


def meshes(world: int, offer: Offer) -> tuple[int, ...]:
    """The numbers of replicas that a mesh of a hybrid sharding may have, or (1,) of any other sharding."""
    if offer.sharding != "hybrid":
        return (1,)
    if offer.replicas is not None:
        return (math.gcd(offer.replicas, world),)
    return replicas_of(world)


def replicas_of(world: int) -> tuple[int, ...]:
    """All numbers of replicas that a mesh of so many ranks can have."""
    return tuple(number for number in range(1, world + 1) if world % number == 0)


def shards_of(world: int, strategy: Strategy) -> int:
    """The ranks over which a sharded parameter is spread; all where it is not known, one where none is sharded."""
    return 1 if strategy.sharding == "none" else world // strategy.replicas


def most_parts(world: int, sums: Reduce) -> int:
    """Parts that a step may have at most, so that the smallest integers still have exact sums; 0: there are none."""
    if sums == "fp32":
        return MOST_PARTS
    return min(MOST_PARTS, LARGEST_BF16_SUM // (world * multiple_of([world])))


def can_hold(
    situation: StrategySituation, world: int, bucket: int | None = None, extension: Extension = CONTRACT
) -> bool:
    """As :func:`harness.scenario.situations.can_hold`; ``bucket``: elements of a bucket of DDP's, where fixed."""
    offer = extension.strategy
    if situation in _OF_WORLD:
        return _WORLDS.get(world) is situation
    if situation in _NEEDS and not getattr(offer, _NEEDS[situation]):
        return False
    if situation in _NEEDS_TWO_RANKS and world < 2:
        return False
    if not _reducible(situation, world, offer):
        return False
    if situation in _REPLICAS:
        known = offer.sharding in ("full", "hybrid") and world == _SIZES[situation]
        return known and _REPLICAS[situation] in meshes(world, offer)
    if situation in _ROWS:
        # Of two shards one more row than a multiple of them, or one row fewer than two.
        return offer.sharding != "none" and any(world // replicas > 1 for replicas in meshes(world, offer))
    match situation:
        case StrategySituation.SEVERAL_BUCKETS:
            return bucket is None and offer.sharding == "none" and offer.configurable
        case StrategySituation.DEFERRED_OVER_REPLICAS:
            return any(1 < replicas < world for replicas in meshes(world, offer))
        case StrategySituation.OWNER_OF_SEVERAL:
            return world < MOST_PARAMETERS
        case StrategySituation.COMPUTE_FP32 | StrategySituation.COMPUTE_BF16:
            return situation.value.removeprefix("compute-") in offer.compute
        case StrategySituation.SUMS_ROUND:
            return offer.sharding != "any"
        case StrategySituation.WIDE_REDUCED_VALUE:  # of multiples of 3 or more, few means are as large
            return multiple_of([world]) == 1
    return True


def _reducible(situation: StrategySituation, world: int, offer: Offer) -> bool:
    """Whether there is a reduction in which the situation can be, in as many parts as it needs."""
    allowed = {each for each in reductions(offer) if reduction_fits(situation, each)}
    fewest = _FEWEST_PARTS.get(situation, 1)
    return any(most_parts(world, each.sums) >= fewest for each in allowed)


def reduction_fits(situation: StrategySituation | None, reduction: Reduction) -> bool:
    """Whether a scenario with this goal may reduce so."""
    match situation:
        case StrategySituation.REDUCE_FP32 | StrategySituation.WIDE_REDUCED_VALUE:
            return reduction.sums == "fp32"
        case StrategySituation.REDUCE_BF16:
            return reduction.sums == "bf16"
        case StrategySituation.WEIGHTS_BF16:
            return reduction.weights == "bf16"
    return True


# --- what a scenario is in --------------------------------------------------------------------------------------------


def reached(scenario: Scenario) -> frozenset[StrategySituation]:
    """The situations that a scenario is in, as far as they can be told without running it (so none of ``RUNTIME``)."""
    strategy = scenario.strategy
    if strategy is None:
        raise ValueError(f"a scenario of system {scenario.system!r} has no situations of a strategy's")
    found = {
        *_of_mesh(scenario, strategy),
        *_of_model(scenario, strategy),
        *_of_dtypes(scenario, strategy),
        *_of_dedicated(scenario, strategy),
        *_of_steps(scenario, strategy),
    }
    for plan in steps(scenario):
        if plan.reduced:
            found.update(_of_uses(plan, strategy))
            found.update(_of_parts(scenario, strategy, len(plan.parts)))
            if plan.clip is None:
                found.add(StrategySituation.NO_CLIP)
    return frozenset(found)


def _of_mesh(scenario: Scenario, strategy: Strategy) -> Iterator[StrategySituation]:
    world = scenario.world
    mesh = (strategy.replicas, world // strategy.replicas)
    if strategy.sharding in ("full", "hybrid") and mesh in MESHES:
        yield MESHES[mesh]
    if world in _WORLDS:
        yield _WORLDS[world]
    if strategy.unequal_start and world > 1:
        yield StrategySituation.UNEQUAL_START
    if strategy.offload:
        yield StrategySituation.OFFLOAD


def is_sharded(place: Place, strategy: Strategy) -> bool:
    """Whether a parameter is spread over shards, or may be."""
    return strategy.sharding != "none" and not place.plain and not place.dedicated


def _of_model(scenario: Scenario, strategy: Strategy) -> Iterator[StrategySituation]:
    places = strategy.places
    yield StrategySituation.SEVERAL_BLOCKS if max(each.block for each in places) > 0 else StrategySituation.ONE_BLOCK
    shown = {
        StrategySituation.ROOT_PARAMETER: any(place.block == ROOT for place in places),
        StrategySituation.CONVERTS: strategy.converts,
        StrategySituation.BARE_ROOT: strategy.bare_root,
        StrategySituation.TIED: any(place.tied and not place.frozen for place in places),
        StrategySituation.FROZEN: any(place.frozen for place in places),
    }
    yield from (situation for situation, holds in shown.items() if holds)
    moving = [place for place in places if not place.frozen]
    if any(place.plain for place in moving) and any(is_sharded(place, strategy) for place in moving):
        yield StrategySituation.PLAIN_AND_SHARDED
    shards = shards_of(scenario.world, strategy)
    for parameter, place in zip(scenario.parameters, places, strict=True):
        rows = parameter.shape[0]
        if is_sharded(place, strategy) and shards > 1:
            if rows < shards:
                yield StrategySituation.FEWER_ROWS_THAN_SHARDS
            elif rows % shards:
                yield StrategySituation.ROWS_NOT_DIVISIBLE
        if parameter.numel == 1:
            yield StrategySituation.ONE_ELEMENT_PARAMETER
        if sum(dimension > 1 for dimension in parameter.shape) > 1:
            yield StrategySituation.MATRIX
    if strategy.sharding == "none" and surely_several(scenario, strategy):
        yield StrategySituation.SEVERAL_BUCKETS


def surely_several(scenario: Scenario, strategy: Strategy) -> bool:
    """Whether DDP has two buckets or more.

    A bucket is full as soon as it has as many bytes as were asked for, or more: there is another one if all parameters
    but the last of them fill one, whichever comes last.
    """
    sizes = [scenario.parameters[index] for index in trainable(strategy)]
    filled = [parameter.numel * ELEMENT_BYTES[parameter.dtype] for parameter in sizes]
    return sum(filled) - max(filled) >= scenario.bucket * BUCKET_ELEMENT_BYTES


def _of_dtypes(scenario: Scenario, strategy: Strategy) -> Iterator[StrategySituation]:
    in_fp32 = strategy.reduce == "fp32"
    yield StrategySituation.REDUCE_FP32 if in_fp32 else StrategySituation.REDUCE_BF16
    yield StrategySituation.COMPUTE_FP32 if strategy.compute == "fp32" else StrategySituation.COMPUTE_BF16
    if all(parameter.dtype == "bf16" for parameter in scenario.parameters):
        yield StrategySituation.WEIGHTS_BF16
    num_parts = max((len(plan.parts) for plan in steps(scenario) if plan.reduced), default=0)
    if scenario.values.domain is Domain.GENERAL and scenario.world * num_parts > 2:
        yield StrategySituation.SUMS_ROUND


def _of_dedicated(scenario: Scenario, strategy: Strategy) -> Iterator[StrategySituation]:
    count = sum(place.dedicated for place in strategy.places)
    if not count:
        return
    alone = all(place.dedicated or place.frozen for place in strategy.places)
    yield StrategySituation.DEDICATED_ALONE if alone else StrategySituation.DEDICATED_AND_OTHERS
    if count > scenario.world:
        yield StrategySituation.OWNER_OF_SEVERAL
    if count < scenario.world:
        yield StrategySituation.RANK_WITHOUT_DEDICATED


_SAME: Final = {
    Situation.ONE_PART: StrategySituation.ONE_PART,
    Situation.PARTS_CHANGE: StrategySituation.PARTS_CHANGE,
    Situation.SKIP_THEN_STEP: StrategySituation.SKIP_THEN_STEP,
}


def _of_steps(scenario: Scenario, strategy: Strategy) -> Iterator[StrategySituation]:
    """What steps show together, and what is so in all of them."""
    plans = [RankStep.of(plan, scenario) for plan in steps(scenario)]
    reduced = [plan for plan in plans if plan.reduced]
    for situation in (*of_parts(reduced), *of_endings(plans)):
        if situation in _SAME:
            yield _SAME[situation]
    if len(reduced) >= 5:
        yield StrategySituation.FIVE_STEPS
    lr, seen, changed = scenario.optimizer.lr, False, False
    for plan in steps(scenario):
        for operation in plan.before:
            if isinstance(operation, Rate):
                changed = changed or operation.lr != lr
                lr = operation.lr
        if plan.reduced:
            if seen and changed:
                yield StrategySituation.LR_CHANGED
            seen, changed = True, False
    # Of AdamW's, so not where all parameters are dedicated.
    others = [place for place in strategy.places if not place.dedicated and not place.frozen]
    if others and scenario.optimizer.foreach:
        yield StrategySituation.FOREACH
    if others and scenario.optimizer.weight_decay == 0:
        yield StrategySituation.WEIGHT_DECAY_OFF
    elif others and scenario.optimizer.lr > 0:
        yield StrategySituation.WEIGHT_DECAY_ON


def _of_parts(scenario: Scenario, strategy: Strategy, num_parts: int) -> Iterator[StrategySituation]:
    """What a reduced step of so many parts shows."""
    accumulation, replicas = strategy.accumulation, strategy.replicas
    if num_parts < (3 if accumulation == "nested" else 2):
        return
    yield _ACCUMULATIONS[accumulation]
    if accumulation == "deferred" and 1 < replicas < scenario.world:
        yield StrategySituation.DEFERRED_OVER_REPLICAS


def _of_uses(plan: StepPlan, strategy: Strategy) -> Iterator[StrategySituation]:
    """What ranks do not use in one reduced step."""
    indices = frozenset(trainable(strategy))
    missing = [[indices & {*none} for none in part.none] for part in plan.parts]
    nowhere = [frozenset.intersection(*ranks) for ranks in missing]  # of each part: what no rank uses
    if frozenset.intersection(*nowhere):
        yield StrategySituation.UNUSED_ON_ALL_RANKS
    for ranks, by_all in zip(missing, nowhere, strict=True):
        if any(each != by_all for each in ranks):
            yield StrategySituation.UNUSED_ON_SOME_RANKS
        yield from _of_blocks(ranks, strategy)
    if len(plan.parts) < 2:
        return
    before = frozenset.intersection(*nowhere[:-1])
    if nowhere[-1] - before and strategy.accumulation in _REDUCED_ONCE:
        yield StrategySituation.USED_IN_EARLIER_PART_ONLY
    if before - nowhere[-1]:
        yield StrategySituation.USED_IN_LAST_PART_ONLY


def _of_blocks(missing: Sequence[frozenset[int]], strategy: Strategy) -> Iterator[StrategySituation]:
    """``missing``: what each rank does not use in one part, of what takes a gradient."""
    for inside in blocks(strategy).values():
        without = {inside <= each for each in missing}
        if without == {True}:
            yield StrategySituation.BLOCK_UNUSED
        elif True in without:
            yield StrategySituation.BLOCK_UNUSED_ON_SOME_RANKS


def blocks(strategy: Strategy) -> dict[int, frozenset[int]]:
    """The parameters that take a gradient in each block that has any, without the root."""
    found: dict[int, set[int]] = {}
    for index in trainable(strategy):
        if strategy.places[index].block != ROOT:
            found.setdefault(strategy.places[index].block, set()).add(index)
    return {block: frozenset(inside) for block, inside in found.items()}
