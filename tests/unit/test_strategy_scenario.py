"""A scenario of a strategy: what is wrong with one is said with its place; its file, its words, its gradients."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from harness.errors import CaseError
from harness.oracles.contributions import contribution, frozen, has_gradient, reduced
from harness.report.console import describe
from harness.scenario import codec, presets, strategy_presets
from harness.scenario.model import (
    CONTRACT,
    EXTENSIONS,
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Extension,
    Load,
    Parameter,
    Part,
    Reload,
    Scenario,
    Skip,
    Step,
    Values,
    beyond,
    check,
    multiple_of_scenario,
    steps,
    strategy_of,
)
from harness.scenario.muon import Muon, MuonSettings
from harness.scenario.strategy import DECLARABLE, ROOT, Offer, Place, Strategy
from harness.scenario.strategy_situations import reductions
from harness.scenario.values import gradient_of
from tests.strategies import OFFERS

WORLD = 6
STRATEGY = Strategy(
    places=(Place(), Place(0, tied=True), Place(1, dedicated=True), Place(ROOT, plain=True), Place(1, frozen=True)),
    sharding="hybrid",
    replicas=2,
    accumulation="deferred",
    converts=True,
    bare_root=True,
    multiple=3,
)
SCENARIO = Scenario(
    world=WORLD,
    seed=1,
    parameters=(
        Parameter("weight", (6, 4), "fp32"),
        Parameter("tied", (5,), "fp32"),
        Parameter("matrix", (3, 7), "fp32"),
        Parameter("plain", (2,), "fp32"),
        Parameter("frozen", (4, 1, 2), "fp32"),
    ),
    values=Values(Domain.EXACT, 85, -4),
    optimizer=AdamW(),
    operations=(
        Build(30),
        Part(True, tuple(range(6)), ((), (0, 3), (), (), (), ())),
        Part(False, tuple(range(6, 12)), ((),) * 6),
        Clip(1.0),
        Step(),
        Part(False, tuple(range(6)), ((),) * 6),
        Skip(),
    ),
    system="strategy",
    strategy=STRATEGY,
)
REPLICATED: dict[str, Any] = {
    "sharding": "none",
    "replicas": 1,
    "accumulation": "sync",
    "converts": False,
    "bare_root": False,
    "places": (Place(),) * 5,
}


def changed(**changes: Any) -> Scenario:
    return replace(SCENARIO, strategy=replace(STRATEGY, **changes))


def placed(index: int, **changes: Any) -> Scenario:
    places = list(STRATEGY.places)
    places[index] = replace(places[index], **changes)
    return changed(places=tuple(places))


def parameter(index: int, **changes: Any) -> Scenario:
    parameters = list(SCENARIO.parameters)
    parameters[index] = replace(parameters[index], **changes)
    return replace(SCENARIO, parameters=tuple(parameters))


def with_values(**changes: Any) -> Scenario:
    return replace(SCENARIO, values=replace(SCENARIO.values, **changes))


def operations(*given: Any) -> Scenario:
    return replace(SCENARIO, operations=given)


BF16 = tuple(replace(each, dtype="bf16") for each in SCENARIO.parameters)
ONE_STEP = (Part(False, tuple(range(6)), ((),) * 6), Step())

WRONG: dict[str, tuple[Scenario, str]] = {
    "a place too few": (changed(places=STRATEGY.places[1:]), "strategy.places: 4 places for 5 parameters"),
    "no strategy": (replace(SCENARIO, strategy=None), "strategy: missing, system 'strategy' needs it"),
    "a strategy of another system": (
        replace(SCENARIO, system="zero_master"),
        "strategy: given, but the system is 'zero_master'",
    ),
    "Muon's part too": (replace(SCENARIO, muon=Muon(())), "muon: given, but the system is 'strategy'"),
    "a scalar": (parameter(0, shape=()), "parameters[0].shape: system 'strategy' has no scalars"),
    "no element": (parameter(0, shape=(0, 2)), "parameters[0].shape: system 'strategy' has no parameter without"),
    "not contiguous": (parameter(0, strides="transposed"), "parameters[0].strides: system 'strategy' shards along"),
    "a narrow master": (parameter(2, dtype="bf16"), "parameters[2].dtype: bf16, but with sharding 'hybrid'"),
    "fp16": (replace(changed(**REPLICATED), parameters=parameter(0, dtype="fp16").parameters), "parameters[0].dtype"),
    "several dtypes": (
        replace(changed(**REPLICATED, reduce="bf16"), parameters=(BF16[0], *SCENARIO.parameters[1:])),
        "parameters[1].dtype: fp32, but parameters[0] has bf16: one for all",
    ),
    "bf16 reduced in fp32": (
        replace(changed(**REPLICATED), parameters=BF16),
        "strategy.reduce: gradients of bf16 (parameters[0]) are reduced in 'bf16', not 'fp32'",
    ),
    "plain without conversion": (
        changed(converts=False, bare_root=False),
        "strategy.places[3].plain: needs strategy.converts",
    ),
    "a bare root that shards": (placed(3, plain=False), "strategy.places[3].plain: a parameter of a bare root"),
    "bare without conversion": (
        changed(converts=False, places=(Place(),) * 5),
        "strategy.bare_root: needs strategy.converts",
    ),
    "all frozen": (
        changed(places=(Place(frozen=True),) * 5, bare_root=False),
        "strategy.places: all are frozen, one at least must take a gradient",
    ),
    "a dedicated vector": (placed(1, tied=False, dedicated=True), "strategy.places[1].dedicated: 'tied' has 1 dim"),
    "dedicated and frozen": (placed(2, frozen=True), "strategy.places[2].dedicated: and frozen"),
    "dedicated and plain": (placed(2, plain=True), "strategy.places[2].dedicated: and plain"),
    "dedicated and tied": (placed(2, tied=True), "strategy.places[2].dedicated: and tied"),
    "dedicated, but replicated": (
        changed(**{**REPLICATED, "places": (Place(dedicated=True), *(Place(),) * 4)}),
        "strategy.places[0].dedicated: with sharding 'none' every rank has the whole of it",
    ),
    "no block": (
        changed(places=(Place(ROOT),) * 5, bare_root=False),
        "strategy.places: no parameter is in a block",
    ),
    "a gap between blocks": (placed(0, block=3), "strategy.places: no parameter is in block 2, but one is in block 3"),
    "replicas that do not divide": (changed(replicas=4), "strategy.replicas: 4 replicas do not divide a world of 6"),
    "replicas of a full mesh": (changed(sharding="full"), "strategy.replicas: 2, but with sharding 'full' it is 1"),
    "offloaded without shards": (changed(**REPLICATED, offload=True), "strategy.offload: needs shards"),
    "converted without shards": (changed(**{**REPLICATED, "converts": True}), "strategy.converts: needs shards"),
    "amsgrad": (replace(SCENARIO, optimizer=AdamW(amsgrad=True)), "optimizer.amsgrad: system 'strategy' has none"),
    "maximize": (replace(SCENARIO, optimizer=AdamW(maximize=True)), "optimizer.maximize: system 'strategy' has none"),
    "a rank that uses nothing": (
        operations(Build(1), Part(False, tuple(range(6)), ((),) * 5 + ((0, 1, 2, 3),)), Step()),
        "operations[1].none[5]: the rank uses no parameter that takes a gradient",
    ),
    "special values": (
        with_values(domain=Domain.GENERAL, special=3),
        "values.special: system 'strategy' has no special values",
    ),
    "nine bits of weights": (
        replace(changed(compute="bf16"), values=Values(Domain.EXACT, 86, 0)),
        "strategy.multiple: integers up to 86 x 3 need more than bf16's 8 bits",
    ),
    "nine bits of a sum": (
        replace(changed(reduce="bf16"), values=Values(Domain.EXACT, 8, 0)),
        "values.max_k: sums reach 288, exact in bf16 only up to 256",
    ),
    "no room for halves": (
        replace(changed(compute="bf16"), values=Values(Domain.EXACT, 3, -132)),
        "values.exponent: 2**-132 is halved 2 times, the smallest there is is 2**-133",
    ),
    "a mean that rounds": (changed(multiple=2), "strategy.multiple: 2 is no multiple of 3: a mean over 6 ranks rounds"),
    "rounding that is not known": (
        replace(
            changed(sharding="any", replicas=1),
            values=Values(Domain.GENERAL, 3, 0, spread=3),
        ),
        "values.domain: 'general' needs a sharding that is known",
    ),
    "large sums": (
        replace(changed(multiple=255), values=Values(Domain.NORM_EXACT, 255, 0)),
        "values.max_k: sums of squares reach",
    ),
    "too much of Newton-Schulz": (
        parameter(2, shape=(2**15, 2**15)),
        "strategy.places: 6.33e+15 operations of Newton-Schulz in 1 steps on 6 ranks are too much work",
    ),
    "a second build": (
        operations(*SCENARIO.operations, Build(3), *ONE_STEP),
        "operations[7]: a second build, but a model of system 'strategy' is wrapped once",
    ),
    "loaded weights": (operations(Build(1), Load(1), *ONE_STEP), "operations[1]: a load is no operation of system"),
    "a reload": (operations(Build(1), Reload(), *ONE_STEP), "operations[1]: a reload is no operation of system"),
    "a discard": (
        operations(Build(1), ONE_STEP[0], Discard()),
        "operations[2]: a discard is no operation of system 'strategy'",
    ),
}


def test_a_scenario_of_all_kinds_of_parameters_is_valid() -> None:
    assert check(SCENARIO) is None
    assert check(changed(**REPLICATED)) is None
    assert (
        check(replace(changed(**REPLICATED, reduce="bf16"), parameters=BF16, values=Values(Domain.EXACT, 7, 0))) is None
    )


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_its_place(name: str) -> None:
    wrong, said = WRONG[name]
    assert (check(wrong) or "").startswith(said)


def test_at_the_limit_it_is_right() -> None:
    """One less of what is refused above."""
    assert check(replace(changed(compute="bf16"), values=Values(Domain.EXACT, 85, -131))) is None
    assert check(replace(changed(reduce="bf16"), values=Values(Domain.EXACT, 7, 0))) is None
    assert check(changed(replicas=3)) is None
    assert check(operations(Build(1), Part(False, tuple(range(6)), ((),) * 5 + ((0, 1, 2),)), Step())) is None
    known = changed(sharding="full", replicas=1)
    assert check(replace(known, values=Values(Domain.GENERAL, 3, 0, spread=3))) is None


# --- files and words --------------------------------------------------------------------------------------------------


def test_its_file_says_all_of_it_and_no_other_file_does() -> None:
    data = codec.encode(codec.Case(SCENARIO))
    assert codec.decode(data).scenario == SCENARIO
    other = replace(SCENARIO, system="zero_master", strategy=None)
    assert "strategy" not in json.loads(codec.encode(codec.Case(other)))
    assert "muon" not in json.loads(data)


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("sharding", "'any', 'none', 'full', 'hybrid'"),
        ("reduce", "'fp32', 'bf16'"),
        ("compute", "'fp32', 'bf16'"),
        ("accumulation", "'sync', 'no_sync', 'nested', 'deferred', 'flush'"),
    ],
)
def test_a_wrong_word_in_a_file_is_answered_with_the_right_ones(field: str, choices: str) -> None:
    fields = json.loads(codec.encode(codec.Case(SCENARIO)))
    fields["strategy"][field] = "both"
    with pytest.raises(CaseError) as caught:
        codec.decode(json.dumps(fields).encode())
    assert str(caught.value) == f"case: $.strategy.{field}: expected one of {choices}, got 'both'"


def test_a_wrong_place_in_a_file_is_named() -> None:
    fields = json.loads(codec.encode(codec.Case(SCENARIO)))
    fields["strategy"]["places"][2]["block"] = -2
    with pytest.raises(CaseError, match=r"\$\.strategy\.places\[2\]\.block: expected `int` >= -1"):
        codec.decode(json.dumps(fields).encode())


def test_its_words_say_what_is_special() -> None:
    assert describe(SCENARIO).endswith(
        "skip, mesh 2x3, 2 blocks, reduces in fp32, accumulation deferred, frozen and plain and tied and dedicated "
        "parameters, bare root"
    )
    plain = changed(**REPLICATED)
    assert describe(plain).endswith("exact, clip, skip, replicated, 1 block, reduces in fp32")
    other = Strategy((Place(),) * 5, "full", reduce="bf16", compute="bf16", offload=True, converts=True, multiple=3)
    other = replace(other, unequal_start=True, muon=MuonSettings(ns_steps=3))
    assert describe(replace(SCENARIO, strategy=other)).endswith(
        "fully sharded, 1 block, reduces in bf16, computes in bf16, converts itself, offloaded, unequal start, other "
        "settings of Muon"
    )


# --- gradients --------------------------------------------------------------------------------------------------------


def test_a_gradient_is_a_multiple_and_a_frozen_parameter_has_none() -> None:
    plan = next(steps(SCENARIO))
    assert multiple_of_scenario(SCENARIO) == 3
    assert frozen(SCENARIO) == {4}
    own = contribution(SCENARIO, plan, 2, 1, 0)
    plain = gradient_of(1, 8, 0, SCENARIO.parameters[0], 0, SCENARIO.values)
    assert own is not None
    assert np.array_equal(own, 3 * plain)
    assert contribution(SCENARIO, plan, 1, 0, 0) is None
    assert all(contribution(SCENARIO, plan, rank, part, 4) is None for rank in range(WORLD) for part in range(2))
    assert reduced(SCENARIO, plan, 4).num_contributions == 0
    assert reduced(SCENARIO, plan, 0).num_contributions == 11
    assert has_gradient(SCENARIO, plan, 1, 0)


def test_a_rank_with_gradients_of_frozen_parameters_alone_has_none() -> None:
    alone = operations(Build(1), Part(False, tuple(range(6)), ((),) * 5 + ((0, 1, 2, 3),)), Step())
    assert not has_gradient(alone, next(steps(alone)), 5, 0)
    assert frozen(replace(SCENARIO, system="zero_master", strategy=None)) == frozenset()


def test_only_a_strategys_scenario_has_a_strategy() -> None:
    assert strategy_of(SCENARIO) is STRATEGY
    with pytest.raises(ValueError, match="scenario of system 'zero_master' says nothing of a strategy"):
        strategy_of(replace(SCENARIO, system="zero_master", strategy=None))


# --- what is offered --------------------------------------------------------------------------------------------------


def test_what_is_beyond_an_offer_is_named() -> None:
    asked = beyond(SCENARIO, CONTRACT)
    assert asked == (*("sharding", "reduce", "compute", "unused", "tied", "plain", "deferred", "dedicated"),)
    offered = Offer(
        "hybrid",
        reduce=("fp32",),
        compute=("fp32",),
        unused=True,
        tied=True,
        plain=True,
        deferred=True,
        dedicated=True,
    )
    assert beyond(SCENARIO, Extension(strategy=offered)) == ()
    for name in ("unused", "tied", "plain", "deferred", "dedicated"):
        assert beyond(SCENARIO, Extension(strategy=replace(offered, **{name: False}))) == (name,)
    assert beyond(SCENARIO, Extension(strategy=replace(offered, replicas=3))) == ("replicas",)
    none = placed(2, dedicated=False)
    assert beyond(none, Extension(strategy=offered)) == ("dedicated",)  # which one at least must be
    # Four do not divide six: so two do, as for the subject.
    assert beyond(SCENARIO, Extension(strategy=replace(offered, replicas=4))) == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"offload": True}, "offload"),
        ({"unequal_start": True}, "unequal_start"),
        ({"accumulation": "flush"}, "flush"),
        ({"converts": True}, "plain"),
    ],
)
def test_each_option_is_beyond_the_contract(changes: dict[str, Any], name: str) -> None:
    given = Strategy((Place(),) * 5, reduce="bf16", compute="bf16", multiple=3)
    plain = replace(SCENARIO, strategy=given, operations=(Build(1), *ONE_STEP))
    assert beyond(plain, CONTRACT) == ()
    assert beyond(replace(plain, strategy=replace(given, **changes)), CONTRACT) == (name,)


def test_what_other_systems_take_has_the_same_names_as_before() -> None:
    assert EXTENSIONS == ("refresh", "dtypes", "strides")
    assert set(DECLARABLE) <= set(Offer.__struct_fields__)
    assert beyond(replace(SCENARIO, system="zero_master", strategy=None), CONTRACT) == ()


# --- a given list -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-mlp", "tiny-gpt", "gpt2", "qwen2.5-0.5b"])
@pytest.mark.parametrize("offered", OFFERS)
def test_presets_are_run_as_a_subject_takes_them(name: str, offered: str) -> None:
    listed, offer = presets.parameters(name), OFFERS[offered]
    for world in (1, 2, 3, 4):
        made = strategy_presets.campaign(listed, world, 2**22, 7, 4, offer=offer)
        assert [check(each) for each in made] == [None] * 4
        assert [beyond(each, Extension(strategy=offer)) for each in made] == [()] * 4
        assert [each.seed for each in made] == [7, 8, 9, 10]
        assert {strategy_of(each).reduce for each in made} == {each.sums for each in reductions(offer)}
        assert {any(place.dedicated for place in strategy_of(each).places) for each in made} == {offer.dedicated}
        assert [sum(isinstance(operation, Clip) for operation in each.operations) for each in made] == [0, 0, 1, 0]


def test_blocks_are_the_layers() -> None:
    listed = presets.parameters("tiny-gpt")
    found = dict(zip((each.name for each in listed), strategy_presets.blocks(listed), strict=True))
    assert {found[f"transformer.h.{layer}.ln_1.weight"] for layer in (0, 1)} == {0, 1}
    assert found["transformer.wte.weight"] == found["transformer.ln_f.bias"] == ROOT
    assert {*strategy_presets.blocks(presets.parameters("tiny-mlp"))} == {0, 1, 2}
    assert strategy_presets.blocks([Parameter("weight", (3,))]) == (0,)
    many = [Parameter(f"layers.{layer}.weight", (1,)) for layer in range(300)]
    assert {*strategy_presets.blocks(many)} == {*range(256)}
