"""Scenarios of distribution strategies on ranks: right classes hold in each, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.errors import UsageError
from harness.evaluate import Conclusion, Evaluator, Pool, start_pool
from harness.scenario.model import Scenario
from harness.scenario.muon import MuonSettings
from harness.scenario.strategy import ROOT, Place
from harness.subjects.source import with_config
from tests.strategy_cases import Domain, Rate, Skip, placed, scenario, step
from tests.support import FULL_TABLE, sampled, subject

SPREAD = {"domain": Domain.GENERAL, "spread": 30, "max_k": 255}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with start_pool("gloo") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def simulated_pool() -> Iterator[Pool]:
    with start_pool("sim") as ranks:
        yield ranks


def accumulated(world: int, mode: str, **strategy: object) -> Scenario:
    """Steps of one, three and two parts."""
    operations = [*step(world), *step(world, 3, clip=0.5), *step(world, 2)]
    return scenario(world, operations, accumulation=mode, **strategy)


def general(world: int, **mesh: object) -> dict[str, Scenario]:
    """Such as any strategy is asked for that adds up in fp32."""
    ends = [*step(world), *step(world, ending=Skip()), Rate(0.3), *step(world, 2, clip=1e9), *step(world, clip=0.25)]
    missing_everywhere = dict.fromkeys(range(world), (1, 2))
    unused = [*step(world, 2, missing=missing_everywhere), *step(world), *step(world, missing={0: (0, 3), 1: (5,)})]
    return {
        "plain": scenario(world, **mesh),
        "ends": scenario(world, ends, **mesh),
        "no_sync": accumulated(world, "no_sync", **mesh),
        "nested": accumulated(world, "nested", **mesh),
        "flush": accumulated(world, "flush", **mesh),
        "frozen": scenario(
            world, model=placed(first_bias=Place(0, frozen=True), head=Place(ROOT, frozen=True)), **mesh
        ),
        "tied": scenario(world, model=placed(first_weight=Place(0, tied=True), head=Place(ROOT, tied=True)), **mesh),
        "unequal": scenario(world, unequal_start=True, **mesh),
        "unused": scenario(world, unused, **mesh),
        "unused in no_sync": scenario(world, unused, accumulation="no_sync", **mesh),
        "sums that round": scenario(world, **SPREAD, **mesh),
        "sums that round, accumulated": accumulated(world, "no_sync", **SPREAD, **mesh),
        "sums that round, flushed": accumulated(world, "flush", **SPREAD, **mesh),
    }


def of_fsdp(world: int, **mesh: object) -> dict[str, Scenario]:
    """The same for FSDP2, and what FSDP2 alone can be asked for."""
    other = {"sharding": "full", **mesh}
    plain = placed(
        first_bias=Place(0, plain=True), embedding=Place(ROOT, plain=True), head=Place(ROOT, plain=True, frozen=True)
    )
    narrow = {"reduce": "bf16", "compute": "bf16", "max_k": 1}
    found = general(world, **other)
    found |= {
        "computes in bf16": scenario(world, compute="bf16", **other),
        "reduces in bf16": scenario(world, **narrow, **other),
        "reduces in bf16 what was computed in fp32": accumulated(world, "no_sync", reduce="bf16", max_k=1, **other),
        "deferred": accumulated(world, "deferred", **other),
        "offloaded": accumulated(world, "no_sync", offload=True, **other),
        "converts": scenario(world, converts=True, **other),
        "plain ones": accumulated(world, "no_sync", model=plain, converts=True, **other),
        "bare root": accumulated(world, "sync", model=plain, converts=True, bare_root=True, **other),
        "plain ones, sums that round": accumulated(world, "sync", model=plain, converts=True, **SPREAD, **other),
        "sums that round in bf16": accumulated(world, "no_sync", reduce="bf16", compute="bf16", **SPREAD, **other),
        "sums that round in bf16 each": accumulated(world, "sync", reduce="bf16", compute="bf16", **SPREAD, **other),
        "sums that round, deferred": accumulated(world, "deferred", reduce="bf16", **SPREAD, **other),
    }
    return found


def of_ddp(world: int) -> dict[str, Scenario]:
    found = general(world, sharding="none")
    found |= {
        "bf16 parameters": scenario(world, dtype="bf16", max_k=1, sharding="none", reduce="bf16"),
        "bf16 parameters, sums that round": accumulated(
            world, "no_sync", dtype="bf16", sharding="none", reduce="bf16", **SPREAD
        ),
        "several buckets": scenario(world, bucket=8, sharding="none"),
    }
    return found


def of_dmuon(world: int) -> dict[str, Scenario]:
    """All of FSDP2's with three matrices dedicated, and what concerns these alone."""
    marked = placed(
        embedding=Place(ROOT, dedicated=True),
        first_weight=Place(0, dedicated=True),
        third_weight=Place(2, dedicated=True),
    )
    other = {"sharding": "full", "model": marked}
    ends = [*step(world), *step(world, ending=Skip()), Rate(0.3), *step(world, 2, clip=1e9), *step(world, clip=0.25)]
    unused = [
        *step(world, 2, missing=dict.fromkeys(range(world), (0, 1, 2))),
        *step(world),
        *step(world, missing={0: (0, 3), 1: (1, 5)}),
    ]
    return {
        "dedicated": scenario(world, ends, **other),
        "dedicated, accumulated": accumulated(world, "no_sync", **other),
        "dedicated, each part": accumulated(world, "sync", **other),
        "dedicated, deferred": accumulated(world, "deferred", **other),
        "dedicated, flushed": accumulated(world, "flush", **other),
        "dedicated, in bf16": accumulated(world, "no_sync", reduce="bf16", compute="bf16", max_k=1, **other),
        "dedicated, unused": scenario(world, unused, accumulation="no_sync", **other),
        "dedicated, converts": scenario(world, converts=True, unequal_start=True, **other),
        "dedicated, products in fp32": scenario(world, muon=MuonSettings(ns_dtype="fp32", nesterov=False), **other),
        "dedicated, sums that round": accumulated(world, "no_sync", **SPREAD, **other),
        "dedicated, sums that round in bf16": accumulated(world, "sync", reduce="bf16", **SPREAD, **other),
    }


CASES = {
    "dmuon": of_dmuon,
    "ddp": of_ddp,
    "fsdp2": of_fsdp,
    "fsdp2_zero2": of_fsdp,
    "hsdp": lambda world: of_fsdp(world, sharding="hybrid", replicas=2 if world % 2 == 0 else world),
    "hsdp_zero2": lambda world: of_fsdp(world, sharding="hybrid", replicas=2 if world % 2 == 0 else 1),
}


REFUSED = {
    "unknown value": ({"use_fsdp": True, "fsdp_sharding_strategy": "full_shrad"}, "did you mean 'full_shard'"),
    "unknown key": ({"usefsdp": True}, "unknown key 'usefsdp'"),
    "replicas": (
        {"use_fsdp": True, "fsdp_sharding_strategy": "hybrid_shard", "fsdp_hsdp_replicate_size": 3},
        "must divide 2",
    ),
}


@pytest.mark.parametrize("config", list(REFUSED))
def test_a_configuration_that_our_own_refuse_is_bad_usage(pool: Pool, config: str) -> None:
    given, says = REFUSED[config]

    with pytest.raises(UsageError, match=says):
        Evaluator(with_config(subject("strategy"), given), pool).evaluate(scenario(2, sharding="full"))


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        ({}, {"sharding": "none"}),
        (
            {"use_fsdp": True, "fsdp_reduce_dtype": "bf16", "use_mixed_precision": True},
            {"sharding": "full", "reduce": "bf16", "compute": "bf16", "max_k": 1},
        ),
    ],
)
def test_what_a_configuration_makes_holds(pool: Pool, config: dict[str, Any], strategy: dict[str, Any]) -> None:
    evaluation = Evaluator(with_config(subject("strategy"), config), pool).evaluate(scenario(2, **strategy))

    assert evaluation.conclusion is Conclusion.HOLDS, evaluation.divergence


WORLDS = (3, 4, 2, 1)


SIMULATED = list(CASES) if FULL_TABLE else ["ddp", "hsdp", "dmuon"]


@pytest.mark.parametrize(
    ("name", "backend"), sampled([*((name, "gloo") for name in CASES), *((name, "sim") for name in SIMULATED)], every=3)
)
def test_our_own_hold_in_every_scenario(request: pytest.FixtureRequest, name: str, backend: str) -> None:
    """Each of them at one world, in turn, another one in each kind of world; with FULL_TABLE at all."""
    evaluator = Evaluator(subject(name), request.getfixturevalue("pool" if backend == "gloo" else "simulated_pool"))
    wrong = {}
    for place, world in enumerate(WORLDS):
        shift = place if backend == "gloo" else place + 2
        for number, (case, given) in enumerate(CASES[name](world).items()):
            if not FULL_TABLE and number % len(WORLDS) != shift % len(WORLDS):
                continue
            evaluation = evaluator.evaluate(given)
            if evaluation.conclusion is not Conclusion.HOLDS:
                wrong[world, case] = evaluation.divergence
    assert not wrong, wrong
