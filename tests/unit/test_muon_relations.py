"""Scenarios of a Muon optimizer that must give the same: valid, and with the same means, weights and marks."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from harness.scenario.generate import draw
from harness.scenario.model import Domain, Extension, Scenario, check, muon_of, steps
from harness.scenario.muon import GlobalClip, Mark
from harness.scenario.relations import SUMMARIES, Relation, related, relations_of
from harness.scenario.values import gradient_of, initial_weight_of

MUON = [relation for relation in relations_of("muon") if relation is not Relation.TIER]
WORLDS = (1, 2, 3, 4, 6)


@functools.cache
def drawn() -> tuple[Scenario, ...]:
    """Scenarios of every kind whose sums are exact."""
    every = (draw(3, index, WORLDS, extension=Extension(dtypes=True), system="muon") for index in range(100))
    return tuple(scenario for scenario in every if scenario.values.domain is not Domain.GENERAL)


Means = dict[tuple[str, int], bytes | None]


def means(scenario: Scenario, step: int) -> Means:
    """By parameter and number of its group: the exact mean gradient (fp64) of one step; None: nobody has any."""
    muon, plan = muon_of(scenario), list(steps(scenario))[step]
    found: Means = {}
    for index, (parameter, mark) in enumerate(zip(scenario.parameters, muon.marks, strict=True)):
        color = None if mark.color is None else muon.colors[mark.color]
        groups = (tuple(range(scenario.world)),) if color is None else color.groups
        for number, group in enumerate(groups):
            divisor = len(group) if color is None or color.divisor is None else color.divisor
            each = [
                gradient_of(scenario.seed, part.contributors[rank], step, parameter, index, scenario.values)
                for part in plan.parts
                for rank in group
                if index not in part.none[rank]
            ]
            total = np.sum(each, axis=0, dtype=np.float64) * muon.multiple / divisor if each else None
            found[parameter.name, number] = None if total is None else (total + 0.0).tobytes()
    return found


def treated(scenario: Scenario) -> dict[str, tuple[Mark, bytes]]:
    """By parameter: its mark, but for the number of its colour, and its weights."""
    marks = (replace(mark, color=None) for mark in muon_of(scenario).marks)
    return {
        parameter.name: (mark, initial_weight_of(scenario.seed, parameter, index).tobytes())
        for index, (parameter, mark) in enumerate(zip(scenario.parameters, marks, strict=True))
    }


@pytest.mark.parametrize("relation", MUON)
def test_a_related_scenario_has_the_same_means_weights_and_marks(relation: Relation) -> None:
    num_related = 0
    for pick, scenario in enumerate(drawn()):
        other = related(scenario, relation, pick, (1, 2, 3, 4))
        if other is None:
            continue
        num_related += 1
        assert check(other) is None
        assert other != scenario
        assert (other.values, muon_of(other).multiple) == (scenario.values, muon_of(scenario).multiple)
        assert (other.optimizer, muon_of(other).settings) == (scenario.optimizer, muon_of(scenario).settings)
        assert muon_of(other).clip == muon_of(scenario).clip
        assert treated(other) == treated(scenario)
        assert len(list(steps(other))) == len(list(steps(scenario)))
        for plan in steps(scenario):
            assert means(other, plan.index) == means(scenario, plan.index)
    assert num_related > 20


def test_each_relation_changes_what_it_says_and_the_plan_with_it() -> None:
    count: Counter[str] = Counter()
    for pick, scenario in enumerate(drawn()):
        for relation in MUON:
            other = related(scenario, relation, pick, (1, 2, 3, 4))
            if other is None:
                continue
            one, two = muon_of(scenario).sharding, muon_of(other).sharding
            match relation:
                case Relation.OVERLAP:
                    assert one.comm_overlap is not two.comm_overlap
                case Relation.HOP:
                    assert one.two_hop is not two.two_hop
                    count[f"nodes of {two.local_world_size}"] += 1
                case Relation.FUSION:
                    assert (one.fused, scenario.bucket) != (two.fused, other.bucket)
                    count["fused" if two.fused else "unfused"] += 1
                case Relation.OWNER:
                    assert (one.owner_rule, one.owner_cap) != (two.owner_rule, two.owner_cap)
                    count["rule" if one.owner_rule != two.owner_rule else "cap"] += 1
                case Relation.WORLD:
                    assert other.world != scenario.world
                    count[f"world {other.world}"] += 1
                case Relation.PARTS:
                    assert [len(plan.parts) for plan in steps(other)] != [len(plan.parts) for plan in steps(scenario)]
                case Relation.ORDER:
                    names = [parameter.name for parameter in scenario.parameters]
                    assert [parameter.name for parameter in other.parameters] != names
                case _:
                    raise AssertionError(relation)
    seen = {"nodes of 1", "nodes of 2", "nodes of 3", "nodes of 4", "nodes of None", "fused", "unfused", "rule", "cap"}
    assert {*count} >= seen | {f"world {world}" for world in (1, 2, 3, 4)}


def test_a_mean_on_another_world_is_divided_by_the_same_number() -> None:
    plain = next(made for made in drawn() if made.world == 3 and not muon_of(made).colors)
    other = related(plain, Relation.WORLD, 0, (1,))
    assert other is not None
    assert [(color.groups, color.divisor) for color in muon_of(other).colors] == [(((0,),), 3.0)]


def test_groups_of_some_ranks_are_not_regrouped() -> None:
    apart = [made for made in drawn() if any(len(color.groups) > 1 for color in muon_of(made).colors)]
    assert len(apart) > 5
    for relation in (Relation.WORLD, Relation.PARTS):
        assert all(related(made, relation, 0) is None for made in apart)


def test_relations_of_one_kind_of_system_do_not_apply_to_the_other() -> None:
    ours, theirs = {*relations_of("muon")}, {*relations_of("zero_master")}
    assert ours | theirs | {*relations_of("strategy")} == {*SUMMARIES} == {*Relation}
    assert all(related(made, relation, 0) is None for made in drawn()[:5] for relation in theirs - ours)


def test_a_clip_needs_a_norm_that_cannot_round() -> None:
    made = next(made for made in drawn() if made.world == 4)
    clipped = replace(made, muon=replace(muon_of(made), clip=GlobalClip(1.0)))
    assert related(clipped, Relation.OWNER, 0) is not None
    long = replace(clipped.parameters[0], shape=(2**26, 64), sources=())
    wide = replace(clipped, parameters=(long, *clipped.parameters[1:]), values=replace(made.values, max_k=255))
    assert related(wide, Relation.OWNER, 0) is None
