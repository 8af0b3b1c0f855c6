"""Failing scenarios of a strategy are made smaller: validly, to the end, and to what makes them fail alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from harness.scenario.generate import draw
from harness.scenario.model import CONTRACT, AdamW, Domain, Extension, Part, Scenario, Skip, beyond, check, strategy_of
from harness.scenario.muon import MuonSettings
from harness.scenario.smaller import smallest
from harness.scenario.strategy import ROOT, Offer, Place, Strategy
from harness.scenario.strategy_situations import StrategySituation, reached
from harness.scenario.strategy_smaller import fitted
from tests.strategies import EXTENSIONS

WORLDS = (1, 2, 3, 4, 6)
S = StrategySituation
DRAWN = [draw(5, index, WORLDS, extension=EXTENSIONS["dmuon hybrid"], system="strategy") for index in range(110)]
REPLICATED = [draw(5, index, WORLDS, extension=EXTENSIONS["ddp"], system="strategy") for index in range(60)]
PLAIN = Strategy((Place(),), "hybrid")


def first(fails: Callable[[Scenario], bool], drawn: list[Scenario]) -> Scenario:
    """The largest one that fails, of those that were drawn."""
    return max(filter(fails, drawn), key=lambda made: (made.world, len(made.operations), made.numel))


def shrunk(
    fails: Callable[[Scenario], bool], start: Scenario | None = None, extension: Extension | None = None
) -> Scenario:
    tried: list[Scenario] = []
    begin = first(fails, DRAWN) if start is None else start

    def seen(candidate: Scenario) -> bool:
        assert check(candidate) is None
        assert candidate not in tried
        assert extension is None or {*beyond(candidate, extension)} <= {*beyond(begin, extension)}
        tried.append(candidate)
        return fails(candidate)

    best = smallest(begin, seen, extension=extension)
    assert fails(best)
    assert {each.name for each in best.parameters} <= {each.name for each in begin.parameters}
    assert len(tried) < 1500
    return best


def test_without_any_need_all_is_plain() -> None:
    best = shrunk(lambda made: True)
    assert (best.world, len(best.operations), best.numel, best.bucket, best.seed) == (1, 1, 1, 1, 0)
    assert best.strategy == PLAIN
    assert (best.optimizer, best.parameters[0].shape) == (AdamW(), (1,))


def test_what_is_replicated_becomes_fp32_with_what_it_is_reduced_in() -> None:
    start = first(lambda made: made.parameters[0].dtype == "bf16", REPLICATED)
    best = shrunk(lambda made: True, start, EXTENSIONS["ddp"])
    assert (best.parameters[0].dtype, best.strategy) == ("fp32", Strategy((Place(),), "none"))


def places(fails: Callable[[Place], bool]) -> Callable[[Scenario], bool]:
    return lambda made: any(map(fails, strategy_of(made).places))


def shown(made: Scenario) -> object:
    return made.world, [each.shape for each in made.parameters], made.strategy


FAILURES: dict[str, tuple[Callable[[Scenario], bool], object]] = {
    "a tied parameter": (
        places(lambda place: place.tied),
        (1, [(1,)], Strategy((Place(tied=True),), "hybrid")),
    ),
    "a frozen parameter": (
        places(lambda place: place.frozen),
        (1, [(1,)] * 2, None),
    ),
    "a plain parameter": (
        places(lambda place: place.plain),
        (1, [(1,)], Strategy((Place(plain=True),), "hybrid", converts=True)),
    ),
    "a dedicated parameter": (
        places(lambda place: place.dedicated),
        (1, [(1, 1)], Strategy((Place(dedicated=True),), "hybrid")),
    ),
    "a root parameter": (
        places(lambda place: place.block == ROOT),
        (1, [(1,)] * 2, None),
    ),
    "three blocks": (
        places(lambda place: place.block > 1),
        (1, [(1,)] * 3, None),
    ),
    "a bare root": (
        lambda made: strategy_of(made).bare_root,
        (1, [(1,)], Strategy((Place(),), "hybrid", converts=True, bare_root=True)),
    ),
    "two replicas and two shards": (
        lambda made: 1 < strategy_of(made).replicas < made.world,
        (4, [(1,)], Strategy((Place(),), "hybrid", 2)),
    ),
    "offload": (lambda made: strategy_of(made).offload, (1, [(1,)], replace(PLAIN, offload=True))),
    "reduced in bf16": (lambda made: strategy_of(made).reduce == "bf16", (1, [(1,)], replace(PLAIN, reduce="bf16"))),
    "computed in bf16": (
        lambda made: strategy_of(made).compute == "bf16",
        (1, [(1,)], replace(PLAIN, compute="bf16")),
    ),
    "other settings of Muon": (
        lambda made: strategy_of(made).muon.ns_steps == 1,
        (1, [(1, 1)], Strategy((Place(dedicated=True),), "hybrid", muon=MuonSettings(ns_steps=1))),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_only_what_makes_it_fail_is_left(name: str) -> None:
    fails, expected = FAILURES[name]
    world, shapes, strategy = shown(shrunk(fails))
    assert (world, shapes, strategy if expected[2] is not None else None) == expected


OPERATIONS: dict[S, list[int]] = {
    S.ACCUMULATION_NESTED: [3],
    S.ACCUMULATION_DEFERRED: [2],
    S.ACCUMULATION_FLUSH: [2],
    S.USED_IN_EARLIER_PART_ONLY: [2],
    S.USED_IN_LAST_PART_ONLY: [2],
    S.BLOCK_UNUSED_ON_SOME_RANKS: [1],
    S.SKIP_THEN_STEP: [1, 1],
}


@pytest.mark.parametrize("situation", OPERATIONS)
def test_a_situation_is_left_with_as_many_parts_as_it_needs(situation: S) -> None:
    best = shrunk(lambda made: situation in reached(made))
    counts, count = [], 0
    for operation in best.operations[1:]:
        if isinstance(operation, Part):
            count += 1
        else:
            counts.append(count)
            count = 0
    assert counts == OPERATIONS[situation]
    assert any(isinstance(operation, Skip) for operation in best.operations) is (situation is S.SKIP_THEN_STEP)


def test_accumulation_becomes_the_plainest_that_still_fails() -> None:
    """What shows without a reduction of each part is left with ``no_sync`` rather than with what is nested."""
    best = shrunk(lambda made: strategy_of(made).accumulation != "sync")
    assert best.strategy == replace(PLAIN, accumulation="no_sync")


def test_general_values_become_exact_ones_with_a_multiple_that_fits() -> None:
    start = first(lambda made: made.values.domain is Domain.GENERAL and made.world == 3, DRAWN)
    best = shrunk(lambda made: made.world == 3, start)
    assert best.values.domain is Domain.EXACT
    assert strategy_of(best).multiple == 3


def test_fewer_ranks_are_found_of_a_mesh_that_no_longer_fits() -> None:
    start = first(lambda made: strategy_of(made).replicas == 3 and made.world == 6, DRAWN)
    best = shrunk(lambda made: made.world > 1, start)
    assert (best.world, strategy_of(best).replicas) == (2, 1)


def test_nothing_is_asked_for_that_is_not_offered() -> None:
    """Of a subject that reduces and computes in bf16 alone; and of one whose number of replicas is fixed."""
    narrow = Extension(strategy=Offer("full", unused=True))
    start = next(made for made in (draw(1, at, (4,), extension=narrow, system="strategy") for at in range(30)))
    best = shrunk(lambda made: True, start, narrow)
    assert best.strategy == Strategy((Place(),), "full", reduce="bf16", compute="bf16")
    fixed = EXTENSIONS["hybrid of two"]
    start = next(made for made in (draw(1, at, (4,), extension=fixed, system="strategy") for at in range(30)))
    best = shrunk(lambda made: made.world == 4, start, fixed)
    assert strategy_of(best).replicas == 2
    # A strategy that is for dedicated matrices is left with one.
    best = shrunk(lambda made: True, DRAWN[0], EXTENSIONS["dmuon hybrid"])
    assert (best.parameters[0].shape, best.strategy) == ((1, 1), Strategy((Place(dedicated=True),), "hybrid"))


def test_what_a_scenario_asks_for_already_may_stay() -> None:
    start = first(places(lambda place: place.dedicated), DRAWN)
    best = shrunk(places(lambda place: place.dedicated), start, CONTRACT)
    assert sum(place.dedicated for place in strategy_of(best).places) == 1


def test_every_drawn_one_ends_at_a_valid_one_whatever_fails() -> None:
    """What fails depends on the scenario alone, and on nothing that shrinking aims at."""
    for made in DRAWN[:12]:
        key = (made.numel + len(made.operations) + made.world) % 3

        def fails(candidate: Scenario, key: int = key) -> bool:
            return (candidate.numel + len(candidate.operations) + candidate.world) % 3 == key

        shrunk(fails, made)


def test_what_is_fitted_already_stays() -> None:
    assert all(fitted(made) == made for made in (*DRAWN, *REPLICATED))


def test_a_case_that_must_stay_on_its_ranks_and_bucket_does() -> None:
    made = next(made for made in REPLICATED if made.world == 4)
    best = smallest(made, lambda candidate: True, worlds=(4,), keep_bucket=True)
    assert (best.world, best.bucket) == (4, made.bucket)
