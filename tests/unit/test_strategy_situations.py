"""Situations of a strategy's scenarios, told by hand-made ones; and which a subject's offer and a world can hold."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.scenario.model import (
    CONTRACT,
    AdamW,
    Build,
    Clip,
    Domain,
    Extension,
    Parameter,
    Part,
    Rate,
    Scenario,
    Skip,
    Step,
    Values,
    check,
    strategy_of,
)
from harness.scenario.strategy import ROOT, Offer, Place, Strategy
from harness.scenario.strategy_situations import (
    GOALS,
    MOST_PARTS,
    RUNTIME,
    StrategySituation,
    can_hold,
    most_parts,
    reached,
)
from harness.scenario.systems import Space, required
from harness.scenario.systems import reached as reached_by_value
from tests.strategies import EXTENSIONS

S = StrategySituation


def parts(*nones: tuple[tuple[int, ...], ...]) -> tuple[Part, ...]:
    """One part for each, of as many ranks as it has entries."""
    world = len(nones[0])
    return tuple(
        Part(index < len(nones) - 1, tuple(range(index * world, (index + 1) * world)), none)
        for index, none in enumerate(nones)
    )


def scenario(
    world: int = 2,
    shapes: tuple[tuple[int, ...], ...] = ((4, 3), (4,)),
    operations: tuple[Any, ...] | None = None,
    optimizer: AdamW = AdamW(),  # noqa: B008  (a frozen value)
    **strategy: Any,
) -> Scenario:
    strategy.setdefault("places", tuple(Place() for _ in shapes))
    given = Scenario(
        world=world,
        seed=1,
        parameters=tuple(Parameter(f"p{index}", shape, "fp32") for index, shape in enumerate(shapes)),
        values=Values(Domain.EXACT, 3, 0),
        optimizer=optimizer,
        operations=(Build(100), *(operations if operations is not None else (*parts(((),) * world), Step()))),
        system="strategy",
        strategy=Strategy(multiple=3 if world % 3 == 0 else 1, **strategy),
    )
    assert check(given) is None
    return given


def test_the_plainest_is_in_what_cannot_be_left_out() -> None:
    assert reached(scenario(1)) == {
        *(S.ONE_BLOCK, S.MATRIX, S.REDUCE_FP32, S.COMPUTE_FP32, S.ONE_PART, S.NO_CLIP, S.WEIGHT_DECAY_ON, S.WORLD_ONE)
    }
    assert reached_by_value(scenario(1)) == {situation.value for situation in reached(scenario(1))}


@pytest.mark.parametrize(
    ("world", "replicas", "situation"),
    [
        (1, 1, S.MESH_1X1),
        (2, 2, S.MESH_2X1),
        (2, 1, S.MESH_1X2),
        (3, 1, S.MESH_1X3),
        (4, 2, S.MESH_2X2),
        (4, 1, S.MESH_1X4),
        (4, 4, S.MESH_4X1),
    ],
)
def test_meshes_are_replicas_by_shards(world: int, replicas: int, situation: S) -> None:
    meshes = {each for each in S if each.value.startswith("mesh-")}
    made = scenario(world, sharding="hybrid", replicas=replicas)
    assert reached(made) & meshes == {situation}
    assert not reached(replace(made, strategy=replace(strategy_of(made), sharding="any", replicas=1))) & meshes
    if replicas == 1:
        assert situation in reached(replace(made, strategy=replace(strategy_of(made), sharding="full")))


def test_the_model_and_how_it_is_wrapped() -> None:
    places = (Place(0, tied=True), Place(1, frozen=True), Place(ROOT, plain=True), Place(1, dedicated=True))
    made = scenario(
        2, ((4,), (1,), (2,), (4, 2)), places=places, sharding="full", converts=True, bare_root=True, offload=True
    )
    wanted = {S.SEVERAL_BLOCKS, S.ROOT_PARAMETER, S.CONVERTS, S.BARE_ROOT, S.PLAIN_AND_SHARDED, S.TIED, S.FROZEN}
    assert wanted | {S.OFFLOAD, S.ONE_ELEMENT_PARAMETER, S.MATRIX} <= reached(made)
    assert not {S.ONE_BLOCK, S.UNEQUAL_START} & reached(made)
    assert S.UNEQUAL_START in reached(scenario(2, unequal_start=True))
    assert S.UNEQUAL_START not in reached(scenario(1, unequal_start=True))
    # A plain parameter beside frozen and dedicated ones alone is not together with a sharded one.
    alone = scenario(2, ((4,), (2,)), places=(Place(frozen=True), Place(plain=True)), converts=True, sharding="full")
    assert S.PLAIN_AND_SHARDED not in reached(alone)


@pytest.mark.parametrize(
    ("rows", "shards", "situation"),
    [
        (5, 2, S.ROWS_NOT_DIVISIBLE),
        (4, 2, None),
        (1, 2, S.FEWER_ROWS_THAN_SHARDS),
        (3, 4, S.FEWER_ROWS_THAN_SHARDS),
        (6, 4, S.ROWS_NOT_DIVISIBLE),
        (5, 1, None),
    ],
)
def test_rows_are_told_by_shards_not_by_ranks(rows: int, shards: int, situation: S | None) -> None:
    both = {S.ROWS_NOT_DIVISIBLE, S.FEWER_ROWS_THAN_SHARDS}
    made = scenario(4, ((rows, 2),), sharding="hybrid", replicas=4 // shards)
    assert reached(made) & both == ({situation} if situation else set())
    whole = replace(strategy_of(made), places=(Place(dedicated=True),))
    assert not reached(replace(made, strategy=whole)) & both
    assert not reached(scenario(4, ((rows, 2),), sharding="none")) & both


def test_buckets_are_told_by_bytes_and_by_what_takes_a_gradient() -> None:
    """20 elements of fp32 are 80 bytes; a bucket of 12 elements has 48, which 8 of bf16 do not fill."""

    def several(bucket: int, dtype: Any = "fp32", frozen: int | None = None) -> bool:
        made = scenario(2, ((12,), (8,)), sharding="none", reduce="fp32" if dtype == "fp32" else "bf16")
        parameters = tuple(replace(each, dtype=dtype) for each in made.parameters)
        places = tuple(Place(frozen=index == frozen) for index in range(2))
        strategy = replace(strategy_of(made), places=places)
        changed = replace(made, parameters=parameters, strategy=strategy)
        changed = replace(changed, operations=(Build(bucket), *made.operations[1:]))
        assert check(changed) is None
        return S.SEVERAL_BUCKETS in reached(changed)

    assert [several(8), several(9), several(4, "bf16"), several(5, "bf16")] == [True, False, True, False]
    assert not several(1, frozen=0)
    assert S.SEVERAL_BUCKETS not in reached(replace(scenario(2), operations=(Build(1), *scenario(2).operations[1:])))


def test_dtypes() -> None:
    narrow = scenario(2, reduce="bf16", compute="bf16")
    assert {S.REDUCE_BF16, S.COMPUTE_BF16} <= reached(narrow)
    assert not {S.REDUCE_FP32, S.COMPUTE_FP32, S.WEIGHTS_BF16} & reached(narrow)
    weights = replace(narrow, parameters=tuple(replace(each, dtype="bf16") for each in narrow.parameters))
    assert S.WEIGHTS_BF16 in reached(weights)


# --- who uses what ----------------------------------------------------------------------------------------------------

USES = {S.UNUSED_ON_ALL_RANKS, S.UNUSED_ON_SOME_RANKS, S.BLOCK_UNUSED, S.BLOCK_UNUSED_ON_SOME_RANKS}
USES |= {S.USED_IN_EARLIER_PART_ONLY, S.USED_IN_LAST_PART_ONLY}
TWO = ((), ())


@pytest.mark.parametrize(
    ("nones", "expected"),
    [
        ((TWO,), set()),
        ((((0,), ()),), {S.UNUSED_ON_SOME_RANKS}),
        ((((0,), (0,)),), {S.UNUSED_ON_ALL_RANKS}),
        ((((0,), (1,)),), {S.UNUSED_ON_SOME_RANKS}),
        ((((2,), (2,)),), {S.UNUSED_ON_ALL_RANKS, S.BLOCK_UNUSED}),
        ((((2,), ()),), {S.UNUSED_ON_SOME_RANKS, S.BLOCK_UNUSED_ON_SOME_RANKS}),
        ((((0, 1), (0, 1)), TWO), {S.BLOCK_UNUSED, S.USED_IN_LAST_PART_ONLY}),
        ((TWO, ((0,), (0,))), {S.USED_IN_EARLIER_PART_ONLY}),
        ((((0,), (0,)), TWO, ((0,), (0,))), {S.USED_IN_EARLIER_PART_ONLY}),
        ((((0,), (0,)), TWO), {S.USED_IN_LAST_PART_ONLY}),
        ((TWO, ((0,), ())), {S.UNUSED_ON_SOME_RANKS}),
        ((((0,), ()), ((), (0,))), {S.UNUSED_ON_SOME_RANKS}),
    ],
)
def test_what_is_not_used(nones: tuple[tuple[tuple[int, ...], ...], ...], expected: set[S]) -> None:
    """Two parameters in one block, one in another; and a frozen one in it, which is never used as these are."""
    made = scenario(
        2,
        ((4,), (2,), (3,), (3,)),
        (*parts(*nones), Step()),
        places=(Place(0), Place(0), Place(1), Place(1, frozen=True)),
        accumulation="no_sync",
    )
    assert reached(made) & USES == expected
    skipped = replace(made, operations=(*made.operations[:-1], Skip()))
    assert reached(skipped) & USES == set()
    synced = replace(made, strategy=replace(strategy_of(made), accumulation="sync"))
    assert reached(synced) & USES == expected - {S.USED_IN_EARLIER_PART_ONLY}


# --- parts and steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulation", "fewest", "situation"),
    [
        ("sync", 2, S.ACCUMULATION_SYNC),
        ("no_sync", 2, S.ACCUMULATION_NO_SYNC),
        ("nested", 3, S.ACCUMULATION_NESTED),
        ("deferred", 2, S.ACCUMULATION_DEFERRED),
        ("flush", 2, S.ACCUMULATION_FLUSH),
    ],
)
def test_accumulation_is_told_by_steps_of_several_parts(accumulation: str, fewest: int, situation: S) -> None:
    def found(count: int, ending: Any) -> frozenset[S]:
        kinds = {each for each in S if each.value.startswith("accumulation-")}
        operations = (*parts(*(TWO,) * count), ending)
        return reached(scenario(2, operations=operations, accumulation=accumulation)) & kinds

    assert found(fewest, Step()) == {situation}
    assert found(fewest - 1, Step()) == found(fewest, Skip()) == set()


def test_deferred_over_replicas_needs_shards_too() -> None:
    def found(replicas: int) -> bool:
        operations = (*parts(*(((),) * 4,) * 2), Step())
        made = scenario(4, operations=operations, accumulation="deferred", sharding="hybrid", replicas=replicas)
        return S.DEFERRED_OVER_REPLICAS in reached(made)

    assert [found(replicas) for replicas in (1, 2, 4)] == [False, True, False]


def test_steps() -> None:
    one = (*parts(TWO), Step())
    skip = (*parts(TWO), Clip(1.0), Skip())
    assert S.SKIP_THEN_STEP in reached(scenario(operations=(*skip, *one)))
    assert S.SKIP_THEN_STEP not in reached(scenario(operations=(*one, *skip)))
    assert S.NO_CLIP not in reached(scenario(operations=(*parts(TWO), Clip(1.0), Step())))
    assert S.LR_CHANGED in reached(scenario(operations=(*one, Rate(0.5), *skip, *one)))
    assert S.LR_CHANGED not in reached(scenario(operations=(Rate(0.5), *one, Rate(0.5), *one)))
    assert S.PARTS_CHANGE in reached(scenario(operations=(*one, *parts(TWO, TWO), Step())))
    assert S.FIVE_STEPS in reached(scenario(operations=one * 5))
    assert S.FIVE_STEPS not in reached(scenario(operations=(*one * 4, *skip)))


def test_settings_are_those_of_what_is_not_dedicated() -> None:
    off = AdamW(weight_decay=0.0, foreach=True)
    assert {S.WEIGHT_DECAY_OFF, S.FOREACH} <= reached(scenario(optimizer=off))
    alone = scenario(2, ((2, 3),), optimizer=off, places=(Place(dedicated=True),))
    assert not {S.WEIGHT_DECAY_OFF, S.FOREACH} & reached(alone)


def test_dedicated_parameters() -> None:
    def found(*dedicated: bool, frozen: bool = False) -> set[S]:
        kinds = {S.DEDICATED_AND_OTHERS, S.DEDICATED_ALONE, S.OWNER_OF_SEVERAL, S.RANK_WITHOUT_DEDICATED}
        places = (*(Place(dedicated=each) for each in dedicated), *([Place(frozen=True)] if frozen else []))
        return reached(scenario(2, ((2, 2),) * len(places), places=places)) & kinds

    assert found(False) == set()
    assert found(True) == {S.DEDICATED_ALONE, S.RANK_WITHOUT_DEDICATED}
    assert found(True, True, frozen=True) == {S.DEDICATED_ALONE}
    assert found(True, True, True, False) == {S.DEDICATED_AND_OTHERS, S.OWNER_OF_SEVERAL}


def test_sums_of_three_round() -> None:
    def found(count: int) -> bool:
        made = scenario(2, operations=(*parts(*(TWO,) * count), Step()), sharding="full")
        return S.SUMS_ROUND in reached(replace(made, values=Values(Domain.GENERAL, 3, 0, spread=4)))

    assert [found(1), found(2)] == [False, True]


def test_a_scenario_of_another_system_has_none() -> None:
    with pytest.raises(ValueError, match="a scenario of system 'zero_master' has no situations of a strategy's"):
        reached(replace(scenario(), system="zero_master", strategy=None))


# --- what can be held -------------------------------------------------------------------------------------------------


def held(world: int, offer: Offer, bucket: int | None = None) -> set[S]:
    return {situation for situation in S if can_hold(situation, world, bucket, Extension(strategy=offer))}


def test_a_class_can_be_in_what_any_strategy_has() -> None:
    assert held(4, Offer()) == {
        *(S.ONE_BLOCK, S.SEVERAL_BLOCKS, S.ROOT_PARAMETER, S.ROWS_NOT_DIVISIBLE, S.FEWER_ROWS_THAN_SHARDS),
        *(S.ONE_ELEMENT_PARAMETER, S.MATRIX, S.FROZEN, S.REDUCE_BF16, S.COMPUTE_BF16, S.ONE_PART, S.PARTS_CHANGE),
        *(S.ACCUMULATION_SYNC, S.ACCUMULATION_NO_SYNC, S.ACCUMULATION_NESTED, S.NO_CLIP, S.SKIP_THEN_STEP),
        *(S.LR_CHANGED, S.FIVE_STEPS, S.WEIGHT_DECAY_ON, S.WEIGHT_DECAY_OFF, S.FOREACH, S.WORLD_FOUR),
        *(S.CLIPPING_ACTIVE, S.CLIPPING_INACTIVE),
    }


@pytest.mark.parametrize(
    ("field", "situations"),
    [
        ("offload", {S.OFFLOAD}),
        ("unused", USES),
        ("tied", {S.TIED}),
        ("plain", {S.CONVERTS, S.BARE_ROOT, S.PLAIN_AND_SHARDED}),
        ("unequal_start", {S.UNEQUAL_START}),
        ("deferred", {S.ACCUMULATION_DEFERRED, S.DEFERRED_OVER_REPLICAS}),
        ("flush", {S.ACCUMULATION_FLUSH}),
        ("dedicated", {S.DEDICATED_AND_OTHERS, S.DEDICATED_ALONE, S.OWNER_OF_SEVERAL, S.RANK_WITHOUT_DEDICATED}),
        ("rounds", {S.SUMS_ROUND}),
    ],
)
def test_each_offer_adds_what_it_is_for(field: str, situations: set[S]) -> None:
    """To those of a hybrid mesh of four ranks; of one rank, those that need two are not among them."""
    plain, offered = Offer("hybrid"), replace(Offer("hybrid"), **{field: True})
    assert held(4, offered) - held(4, plain) == situations
    alone = {S.UNUSED_ON_SOME_RANKS, S.BLOCK_UNUSED_ON_SOME_RANKS, S.UNEQUAL_START, S.RANK_WITHOUT_DEDICATED}
    assert held(1, offered) - held(1, plain) == situations - alone - {S.DEFERRED_OVER_REPLICAS}


def test_meshes_are_those_of_the_sharding_and_the_world() -> None:
    def meshes(world: int, offer: Offer) -> set[str]:
        return {each.value for each in held(world, offer) if each.value.startswith("mesh")}

    assert meshes(4, Offer("full")) == {"mesh-1x4"}
    assert meshes(4, Offer("hybrid")) == {"mesh-1x4", "mesh-2x2", "mesh-4x1"}
    assert meshes(4, Offer("hybrid", 2)) == {"mesh-2x2"}
    assert meshes(2, Offer("hybrid", 2)) == {"mesh-2x1"}
    assert meshes(3, Offer("hybrid", 2)) == {"mesh-1x3"}
    assert meshes(4, Offer("none")) == meshes(4, Offer()) == set()
    assert S.ROWS_NOT_DIVISIBLE not in held(2, Offer("hybrid", 2)) | held(4, Offer("none"))


def test_buckets_are_of_a_replicated_subject_that_can_be_told_their_size() -> None:
    told = Offer("none", configurable=True)
    assert S.SEVERAL_BUCKETS in held(2, told)
    assert S.SEVERAL_BUCKETS not in held(2, told, bucket=5) | held(2, Offer("none")) | held(2, Offer("full"))


def test_dtypes_are_those_that_are_offered() -> None:
    kinds = {S.REDUCE_FP32, S.REDUCE_BF16, S.COMPUTE_FP32, S.COMPUTE_BF16, S.WEIGHTS_BF16, S.WIDE_REDUCED_VALUE}
    assert held(2, Offer("full", reduce=("fp32",))) & kinds == {S.REDUCE_FP32, S.COMPUTE_BF16, S.WIDE_REDUCED_VALUE}
    replicated = Offer("none", reduce=("fp32",), compute=("fp32",), dtypes=("fp32", "bf16"))
    assert held(2, replicated) & kinds == kinds - {S.COMPUTE_BF16}
    assert held(2, replace(replicated, dtypes=("bf16",))) & kinds == {S.REDUCE_BF16, S.WEIGHTS_BF16, S.COMPUTE_FP32}
    assert S.WIDE_REDUCED_VALUE not in held(3, replicated)


def test_sums_in_bf16_have_room_for_few_parts_of_odd_worlds() -> None:
    assert [most_parts(world, "bf16") for world in (1, 4, 7, 9, 15, 17)] == [4, 4, 4, 3, 1, 0]
    assert most_parts(17, "fp32") == MOST_PARTS
    assert S.ACCUMULATION_NO_SYNC not in held(15, Offer())
    assert S.ACCUMULATION_NO_SYNC in held(15, Offer("full", reduce=("fp32", "bf16")))
    assert held(17, Offer()) == set()


@pytest.mark.parametrize("offered", EXTENSIONS)
def test_a_campaign_over_all_worlds_requires_each_world_and_no_goal_that_none_can_hold(offered: str) -> None:
    wanted = required((1, 2, 3, 4), Space("strategy", extension=EXTENSIONS[offered]))
    assert {S.WORLD_ONE, S.WORLD_TWO, S.WORLD_THREE, S.WORLD_FOUR} <= {*wanted}
    assert {*wanted} >= {S.CLIPPING_ACTIVE, S.CLIPPING_INACTIVE, S.ACCUMULATION_NO_SYNC, S.FROZEN}
    assert {*RUNTIME} <= {*GOALS}
    assert required((2,), Space("strategy")) == required((2,), Space("strategy", extension=CONTRACT))
