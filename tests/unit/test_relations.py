"""Related scenarios have the same gradients and weights, put together in another way; what differs is told."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.faults.language import Mute
from harness.oracles.contributions import reduced
from harness.scenario import generate, relations
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Extension,
    Parameter,
    Part,
    Scenario,
    Source,
    Step,
    Values,
    check,
    sources,
    steps,
)
from harness.scenario.partition import round_bucket
from harness.scenario.relations import Observed, Relation, differs, related, relations_of
from harness.scenario.values import initial_weight_of
from harness.verdict import NormObservation, Property, Stage, WeightsObservation

ALL = Extension(refresh=True, dtypes=True, strides=True)
LAYOUTS = [each for each in relations_of("zero_master") if each not in (Relation.TIER, Relation.SCALE)]

# Two ranks; the first step in two parts, of which the second is None but for one parameter on one rank.
SCENARIO = Scenario(
    world=2,
    seed=9,
    parameters=(Parameter("a", (2, 3)), Parameter("b", (5,)), Parameter("c", ()), Parameter("d", (4,), "fp32")),
    values=Values(Domain.NORM_EXACT, 3, -2),
    optimizer=AdamW(),
    operations=(
        Build(6),
        Part(True, (0, 1), ((), (3,))),
        Part(False, (2, 3), ((0, 1, 2), (0, 1, 2, 3))),
        Step(),
        Part(False, (0, 1), ((), ())),
        Step(),
    ),
)


@functools.cache
def drawn() -> tuple[Scenario, ...]:
    """Scenarios of every kind whose sums are exact."""
    every = (generate.draw(3, index, (1, 2, 3, 4), extension=ALL) for index in range(32))
    return tuple(scenario for scenario in every if scenario.values.domain is not Domain.GENERAL)


def by_stream(
    scenario: Scenario, of_parameter: Callable[[int], NDArray[np.float32]]
) -> dict[int, list[tuple[int, bytes]]]:
    """What the parameters hold, cut into the elements of the streams."""
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for index, parameter in enumerate(scenario.parameters):
        values, at = of_parameter(index), 0
        for source in sources(parameter, index):
            for place in range(source.start, source.stop):
                found[source.stream].append((place, (values[at] + np.float32(0)).tobytes()))
                at += 1
    return {stream: sorted(places) for stream, places in found.items()}


def gradients(scenario: Scenario, factor: float = 1.0) -> list[tuple[bool, dict[int, list[tuple[int, bytes]]]]]:
    """Of each step: how it ends, and the reduced gradients."""
    return [
        (plan.discard, by_stream(scenario, lambda index, plan=plan: reduced(scenario, plan, index).value * factor))
        for plan in steps(scenario)
    ]


def weights(scenario: Scenario) -> dict[int, list[tuple[int, bytes]]]:
    return by_stream(scenario, lambda index: initial_weight_of(scenario.seed, scenario.parameters[index], index))


@pytest.mark.parametrize("relation", LAYOUTS)
def test_a_related_scenario_has_the_same_gradients_and_weights(relation: Relation) -> None:
    """Added up independently, element by element of the streams that both are cut from."""
    num_related = 0
    for pick, scenario in enumerate((SCENARIO, *drawn())):
        other = related(scenario, relation, pick)
        if other is None:
            continue
        num_related += 1
        assert check(other) is None
        assert other != scenario
        assert gradients(other) == gradients(scenario)
        assert weights(other) == weights(scenario)
    assert num_related > 5


def test_a_scaled_scenario_has_gradients_times_a_power_of_two() -> None:
    factors = set()
    for pick in range(8):
        other = related(SCENARIO, Relation.SCALE, pick)
        assert other is not None
        power = other.values.exponent - SCENARIO.values.exponent
        factors.add(power)
        assert math.ldexp(SCENARIO.optimizer.eps, power) == other.optimizer.eps
        assert gradients(other) == gradients(SCENARIO, 2.0**power)
        assert weights(other) == weights(SCENARIO)
    assert len(factors) > 3
    assert 0 not in factors


@pytest.mark.parametrize("relation", Relation)
def test_the_same_pick_gives_the_same_scenario(relation: Relation) -> None:
    for pick in range(4):
        assert related(SCENARIO, relation, pick) == related(SCENARIO, relation, pick)


def test_every_relation_applies_to_a_plain_scenario() -> None:
    for relation in relations_of("zero_master"):
        assert (related(SCENARIO, relation, 0) is SCENARIO) == (relation is Relation.TIER)
        assert related(SCENARIO, relation, 0) is not None


def test_what_each_relation_changes() -> None:
    bucket = related(SCENARIO, Relation.BUCKET, 1)
    assert bucket is not None
    assert round_bucket(bucket.bucket, 2) != round_bucket(SCENARIO.bucket, 2)
    world = related(SCENARIO, Relation.WORLD, 1, worlds=(2, 4))
    assert world is not None
    assert world.world == 4
    assert related(SCENARIO, Relation.WORLD, 1, worlds=(2,)) is None
    parts = related(SCENARIO, Relation.PARTS, 0)
    assert parts is not None
    assert [len(plan.parts) for plan in steps(parts)] != [len(plan.parts) for plan in steps(SCENARIO)]
    path = related(SCENARIO, Relation.PATH, 0)
    assert path is not None
    held = [plan.parts[0].more for plan in steps(SCENARIO)]
    assert (held, [plan.parts[0].more for plan in steps(path)]) == ([True, False], [True, True])
    cut = related(SCENARIO, Relation.CUT, 1)
    assert cut is not None
    assert [parameter.numel for parameter in cut.parameters][:1] == [6]
    assert len(cut.parameters) == 5
    joined = related(SCENARIO, Relation.JOIN, 0)
    assert joined is not None
    assert [parameter.numel for parameter in joined.parameters] == [11, 1, 4]
    order = related(SCENARIO, Relation.ORDER, 0)
    assert order is not None
    assert [parameter.name for parameter in order.parameters] != ["a", "b", "c", "d"]


def test_parts_are_merged_where_ranks_have_room() -> None:
    """Three gradients on two ranks in two parts: they fit into no fewer; of two, one part is enough."""
    first = related(SCENARIO, Relation.PARTS, 0)
    assert first is not None
    sparse = replace(
        SCENARIO,
        operations=(Build(6), Part(True, (0, 1), ((), (0, 1, 2, 3))), Part(False, (2, 3), ((0, 1, 2, 3), ())), Step()),
    )
    merged = related(sparse, Relation.PARTS, 0)
    assert merged is not None
    (plan,) = steps(merged)
    assert len(plan.parts) == 1
    assert plan.parts[0].contributors == (0, 3)
    assert not plan.parts[0].more


def test_neighbours_of_other_dtypes_or_nones_are_not_joined() -> None:
    """c is bf16 and d fp32; a and b are None together, b and c too."""
    names = {related(SCENARIO, Relation.JOIN, pick).parameters[pick % 2].name for pick in range(4)}  # type: ignore[union-attr]
    assert names == {"a + b", "b + c"}
    apart = replace(SCENARIO, operations=(Build(6), Part(False, (0, 1), ((0, 2), ())), Step()))
    assert related(apart, Relation.JOIN, 0) is None


def test_names_stay_different() -> None:
    named = replace(SCENARIO, parameters=(Parameter("a", (4,)), Parameter("a (begin)", ()), Parameter("a (end)", ())))
    named = replace(named, operations=(Build(6), Part(False, (0, 1), ((), ())), Step()))
    cut = related(named, Relation.CUT, 0)
    assert cut is not None
    assert len({parameter.name for parameter in cut.parameters}) == 4


def test_a_relation_of_a_relation_still_knows_the_streams() -> None:
    other: Scenario | None = SCENARIO
    for relation in (Relation.ORDER, Relation.CUT, Relation.CUT, Relation.JOIN, Relation.ORDER):
        assert other is not None
        other = related(other, relation, 3)
    assert other is not None
    assert any(len(parameter.sources) > 1 for parameter in other.parameters) or len(other.parameters) > 4
    assert gradients(other) == gradients(SCENARIO)


@pytest.mark.parametrize("relation", Relation)
def test_none_where_sums_round_or_something_is_to_go_wrong(relation: Relation) -> None:
    assert related(replace(SCENARIO, values=Values(Domain.GENERAL, 3, -2)), relation, 0) is None
    assert related(replace(SCENARIO, faults=(Mute(rank=0),)), relation, 0) is None


def test_a_clip_needs_a_norm_that_cannot_round_and_is_not_scaled() -> None:
    clipped = replace(SCENARIO, operations=(*SCENARIO.operations[:3], Clip(0.5), *SCENARIO.operations[3:]))
    assert related(clipped, Relation.BUCKET, 0) is not None
    assert related(clipped, Relation.SCALE, 0) is None
    wide = replace(
        clipped,
        parameters=(Parameter("a", (2**30,)),),
        values=Values(Domain.EXACT, 255, 0),
        operations=(
            Build(2**28),
            *(Part(True, (0, 1), ((), ())) for _ in range(7)),
            Part(False, (0, 1), ((), ())),
            Clip(0.5),
            Step(),
        ),
    )
    assert check(wide) is None
    assert related(wide, Relation.WORLD, 0) is None


def test_a_scale_that_would_under_or_overflow_does_not_apply() -> None:
    for exponent in (-133, -41, 31, 100):
        far = replace(SCENARIO, values=Values(Domain.EXACT, 3, exponent))
        assert related(far, Relation.SCALE, 0) is None
    large = replace(SCENARIO, optimizer=AdamW(eps=1.0))
    for pick in range(8):
        other = related(large, Relation.SCALE, pick)
        assert other is not None
        assert other.optimizer.eps < 1


# --- what must be equal


def seen(*weights: str, norms: tuple[str, ...] = ("0x40800000", "0x40800000")) -> Observed:
    return Observed(
        tuple(NormObservation(step, 0, bits) for step, bits in enumerate(norms)),
        tuple(WeightsObservation(step, digest) for step, digest in enumerate(weights)),
    )


OTHER = related(SCENARIO, Relation.BUCKET, 0)
assert OTHER is not None


@pytest.mark.parametrize("relation", LAYOUTS)
def test_equal_observations_are_no_violation(relation: Relation) -> None:
    assert differs(relation, SCENARIO, seen("aa", "bb"), OTHER, seen("aa", "bb")) is None


def test_the_first_difference_is_told_with_the_sentence_and_both_values() -> None:
    found = differs(Relation.BUCKET, SCENARIO, seen("aa", "bb", "cc"), OTHER, seen("aa", "xx", "yy"))
    assert found is not None
    assert (found.property, found.step, found.stage) == (Property.INVARIANCE, 1, Stage.GATHER)
    assert (found.expected, found.actual) == ("bb", "xx")
    assert found.message.startswith(relations.SUMMARIES[Relation.BUCKET])
    assert "bb" in found.message
    assert "xx" in found.message


def test_a_norm_that_differs_comes_before_the_weights_of_its_step() -> None:
    found = differs(
        Relation.CUT, SCENARIO, seen("aa", "bb"), OTHER, seen("xx", "bb", norms=("0x40800001", "0x40800000"))
    )
    assert found is not None
    assert (found.step, found.stage) == (0, Stage.NORM)
    later = differs(
        Relation.CUT, SCENARIO, seen("aa", "bb"), OTHER, seen("xx", "bb", norms=("0x40800000", "0x40800001"))
    )
    assert later is not None
    assert (later.step, later.stage) == (0, Stage.GATHER)


def test_something_that_only_one_of_them_showed_is_a_difference() -> None:
    assert differs(Relation.CUT, SCENARIO, seen("aa", "bb"), OTHER, seen("aa")) is not None
    assert differs(Relation.CUT, SCENARIO, seen("aa"), OTHER, seen("aa", "bb")) is not None
    assert differs(Relation.CUT, SCENARIO, seen("aa"), OTHER, seen("aa", norms=("0x40800000",))) is not None


def test_norms_that_may_round_are_not_compared() -> None:
    other = seen("aa", norms=("0x40800001", "0x40800000"))
    assert differs(Relation.CUT, SCENARIO, seen("aa"), OTHER, other, norms=False) is None
    exact = replace(SCENARIO, values=replace(SCENARIO.values, domain=Domain.EXACT))
    assert differs(Relation.CUT, exact, seen("aa"), replace(OTHER, values=exact.values), other) is None


@pytest.mark.parametrize(
    ("bits", "scaled"), [("0x40800000", "0x42000000"), ("0x4010000000000000", "0x4040000000000000"), ("0x0", "0x0")]
)
def test_norms_of_scaled_gradients_are_scaled_twice(bits: str, scaled: str) -> None:
    power = {"0x40800000": 3, "0x4010000000000000": 3, "0x0": 0}[bits]
    larger = replace(SCENARIO, values=replace(SCENARIO.values, exponent=SCENARIO.values.exponent + power))
    twice = relations._scaled(bits, power)
    assert twice == scaled
    again = relations._scaled(twice, power)
    one, other = seen("aa", norms=(bits, bits)), seen("aa", norms=(again, again))
    assert differs(Relation.SCALE, SCENARIO, one, larger, other) is None
    if power:
        assert differs(Relation.SCALE, SCENARIO, one, larger, seen("aa", norms=(twice, again))) is not None


def test_a_discarded_step_is_regrouped_too() -> None:
    discarded = replace(SCENARIO, operations=(*SCENARIO.operations[:3], Discard(), *SCENARIO.operations[4:]))
    other = related(discarded, Relation.WORLD, 0)
    assert other is not None
    assert [plan.discard for plan in steps(other)] == [True, False]
    assert gradients(other) == gradients(discarded)


def test_slices_of_sources_are_cut_where_they_meet() -> None:
    whole = (Source(4, 10, 13), Source(2, 0, 2))
    assert relations._sliced(whole, 0, 5) == whole
    assert relations._sliced(whole, 1, 4) == (Source(4, 11, 13), Source(2, 0, 1))
    assert relations._sliced(whole, 3, 3) == ()
