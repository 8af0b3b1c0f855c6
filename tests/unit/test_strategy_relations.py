"""Scenarios of a strategy that must give the same: valid, offered, and with the same means, weights and places."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from harness.scenario.generate import draw
from harness.scenario.model import CONTRACT, Clip, Domain, Extension, Scenario, beyond, check, steps, strategy_of
from harness.scenario.relations import Relation, related, relations_of
from harness.scenario.strategy import Place
from harness.scenario.strategy_situations import replicas_of
from harness.scenario.values import gradient_of, initial_weight_of
from tests.strategies import EXTENSIONS
from tests.support import paired

STRATEGY = relations_of("strategy")
WORLDS = (1, 2, 3, 4, 6)


@functools.cache
def drawn(offered: str = "dmuon hybrid") -> tuple[Scenario, ...]:
    """Scenarios of every kind whose sums are exact."""
    every = (draw(3, index, WORLDS, extension=EXTENSIONS[offered], system="strategy") for index in range(120))
    return tuple(scenario for scenario in every if scenario.values.domain is not Domain.GENERAL)


def means(scenario: Scenario, step: int) -> dict[str, bytes | None]:
    """By parameter: the exact mean gradient (fp64) of one step; None: nobody has any."""
    strategy, plan = strategy_of(scenario), list(steps(scenario))[step]
    found: dict[str, bytes | None] = {}
    for index, (parameter, place) in enumerate(zip(scenario.parameters, strategy.places, strict=True)):
        each = [
            gradient_of(scenario.seed, part.contributors[rank], step, parameter, index, scenario.values)
            for part in plan.parts
            for rank in range(scenario.world)
            if index not in part.none[rank] and not place.frozen
        ]
        total = np.sum(each, axis=0, dtype=np.float64) * strategy.multiple / scenario.world if each else None
        found[parameter.name] = None if total is None else (total + 0.0).tobytes()
    return found


def treated(scenario: Scenario) -> dict[str, tuple[Place, bytes]]:
    """By parameter: its place, but for the number of its block, and its weights."""
    places = (replace(place, block=0) for place in strategy_of(scenario).places)
    return {
        parameter.name: (place, initial_weight_of(scenario.seed, parameter, index).tobytes())
        for index, (parameter, place) in enumerate(zip(scenario.parameters, places, strict=True))
    }


@pytest.mark.parametrize(("relation", "offered"), paired(STRATEGY, ["dmuon hybrid", "ddp", "class"]))
def test_a_related_scenario_has_the_same_means_weights_and_places(relation: Relation, offered: str) -> None:
    num_related = 0
    for pick, scenario in enumerate(drawn(offered)):
        other = related(scenario, relation, pick, (1, 2, 3, 4, 6), EXTENSIONS[offered])
        if other is None:
            continue
        num_related += 1
        assert check(other) is None
        assert other != scenario
        assert beyond(other, EXTENSIONS[offered]) == ()
        assert (other.values, other.optimizer) == (scenario.values, scenario.optimizer)
        assert treated(other) == treated(scenario)
        assert [plan.clip for plan in steps(other)] == [plan.clip for plan in steps(scenario)]
        assert len(list(steps(other))) == len(list(steps(scenario)))
        for plan in steps(scenario):
            assert means(other, plan.index) == means(scenario, plan.index)
    assert (num_related > 15) is (relation is not Relation.MESH or offered == "dmuon hybrid")


def test_each_relation_changes_what_it_says_and_nothing_else_of_the_strategy() -> None:
    count: Counter[str] = Counter()
    moves: set[tuple[int, int]] = set()
    for pick, scenario in enumerate(drawn()):
        for relation in STRATEGY:
            other = related(scenario, relation, pick, (1, 2, 3, 4, 6))
            if other is None:
                continue
            one, two = strategy_of(scenario), strategy_of(other)
            changes: dict[str, object] = {}
            match relation:
                case Relation.ACCUMULATION:
                    changes = {"accumulation": two.accumulation}
                    count[f"{one.accumulation} to {two.accumulation}"] += 1
                case Relation.MESH:
                    changes = {"replicas": two.replicas}
                    assert two.replicas in replicas_of(scenario.world)
                case Relation.WORLD:
                    assert other.world != scenario.world
                    assert two.multiple * scenario.world == one.multiple * other.world
                    changes = {"replicas": two.replicas, "multiple": two.multiple}
                    moves.add((scenario.world, other.world))
                case Relation.PARTS:
                    numbers = [len(plan.parts) for plan in steps(scenario)], [len(plan.parts) for plan in steps(other)]
                    more = sum(numbers[1]) - sum(numbers[0])
                    assert 0 <= more <= len(numbers[0])
                    count["cut" if more else "dealt"] += 1
                case Relation.BLOCKS | Relation.ORDER:
                    changes = {"places": two.places}
                    names = [parameter.name for parameter in scenario.parameters]
                    ordered = names == [parameter.name for parameter in other.parameters]
                    assert ordered is (relation is Relation.BLOCKS)
                case _:
                    raise AssertionError(relation)
            assert two != one or relation in (Relation.PARTS, Relation.ORDER)
            assert two == replace(one, **changes)
    for accumulation in ("sync", "no_sync", "nested"):
        others = {"sync", "no_sync", "nested", "deferred", "flush"} - {accumulation}
        assert all(count[f"{other} to {accumulation}"] for other in others)
    assert count["cut"] > 10
    assert count["dealt"] > 10
    pairs = ((1, 2), (3, 6), (3, 1), (6, 2), (2, 1), (4, 2), (4, 1), (6, 4))
    assert {*pairs} <= moves


def test_what_is_beyond_an_offer_is_not_related() -> None:
    """A number of replicas that a configuration fixes; parts whose parameters not all are used."""
    fixed = Extension(strategy=replace(EXTENSIONS["dmuon hybrid"].strategy, replicas=2))
    made = [each for each in drawn() if each.world == 4 and strategy_of(each).replicas == 2]
    assert len(made) > 3
    assert all(related(each, Relation.MESH, 0) is not None for each in made)
    assert all(related(each, Relation.MESH, 0, extension=fixed) is None for each in made)
    several = [each for each in drawn("class") if len(each.parameters) > 3]
    assert any(related(each, Relation.PARTS, 0) is not None for each in several)
    assert all(related(each, Relation.PARTS, 0, extension=CONTRACT) is None for each in several)


def test_a_scenario_that_is_beyond_an_offer_already_may_be_related_to_one_that_is() -> None:
    """Such as that of a case which another subject is tried with."""
    made = next(each for each in drawn() if len({place.block for place in strategy_of(each).places}) > 2)
    assert beyond(made, CONTRACT)
    assert related(made, Relation.ORDER, 0, extension=CONTRACT) is not None


def test_relations_of_the_other_systems_do_not_apply() -> None:
    theirs = {*relations_of("muon"), *relations_of("zero_master")} - {*relations_of("strategy")}
    assert all(related(made, relation, 0) is None for made in drawn()[:5] for relation in theirs)


def test_a_clip_needs_a_norm_that_cannot_round() -> None:
    made = next(each for each in drawn() if each.world == 4 and strategy_of(each).reduce == "fp32")
    first = next(at for at, operation in enumerate(made.operations) if operation.__struct_config__.tag == "step")
    clipped = replace(
        made,
        operations=tuple(
            operation
            for at, each in enumerate(made.operations)
            if not isinstance(each, Clip)
            for operation in ([Clip(1.0), each] if at == first else [each])
        ),
    )
    assert check(clipped) is None
    assert related(clipped, Relation.ACCUMULATION, 0) is not None
    long = replace(clipped.parameters[0], shape=(2**26, 64), sources=())
    wide = replace(clipped, parameters=(long, *clipped.parameters[1:]), values=replace(made.values, max_k=255))
    assert related(wide, Relation.ACCUMULATION, 0) is None
