"""A broken distribution strategy is caught at the property and stage where it first shows; the right ones hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from harness.evaluate import Conclusion, Evaluator, Pool, start_pool
from harness.scenario.model import Scenario
from harness.verdict import Property, Stage
from tests.strategy_cases import ROOT, Domain, Place, placed, scenario, step
from tests.support import subject

Make = Callable[[int], Scenario]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with start_pool("gloo") as ranks:
        yield ranks


def accumulated(mode: str) -> Make:
    """Three parts in the first step, so that what goes wrong in it is the first to go wrong."""
    return lambda world: scenario(world, [*step(world, 3), *step(world, 2, clip=0.25)], accumulation=mode)


def clipped(world: int) -> Scenario:
    return scenario(world, [*step(world, clip=0.25), *step(world, clip=0.125)])


def unclipped(world: int) -> Scenario:
    return scenario(world, [*step(world), *step(world)])


def tied(world: int) -> Scenario:
    return scenario(world, model=placed(first_weight=Place(0, tied=True), head=Place(ROOT, tied=True)))


def frozen(world: int) -> Scenario:
    return scenario(world, model=placed(embedding=Place(ROOT, frozen=True)))


def unequal(world: int) -> Scenario:
    return scenario(world, unequal_start=True)


def unused(world: int) -> Scenario:
    return scenario(world, [*step(world, missing=dict.fromkeys(range(world), (1, 5))), *step(world)])


def rounds(sharding: str) -> Make:
    def make(world: int) -> Scenario:
        several = [*step(world), *step(world, 2)]
        general = {"domain": Domain.GENERAL, "spread": 30, "max_k": 255}
        return scenario(world, several, sharding=sharding, accumulation="no_sync", **general)

    return make


BROKEN: dict[str, tuple[Make, Property, Stage]] = {
    "KeepsOwnStart": (unequal, Property.WEIGHTS, Stage.BUILD),
    "BreaksTies": (tied, Property.OWNERSHIP, Stage.BUILD),
    "TrainsFrozen": (frozen, Property.STORAGE, Stage.BUILD),
    "LosesParameter": (unclipped, Property.OWNERSHIP, Stage.BUILD),
    "StaleWeights": (unclipped, Property.WEIGHTS, Stage.COLLECT),
    "SilentZero": (unclipped, Property.NORM, Stage.NORM),
    "SeesOtherWeights": (unclipped, Property.WEIGHTS, Stage.BUILD),
    "SumForMean": (unclipped, Property.GRADIENT, Stage.REDUCE),
    "LeavesOneOut": (unclipped, Property.GRADIENT, Stage.REDUCE),
    "ReducesInBf16": (rounds("full"), Property.GRADIENT, Stage.REDUCE),
    "ZerosForNone": (unused, Property.GRADIENT, Stage.REDUCE),
    "NoSyncReduces": (accumulated("no_sync"), Property.TRAFFIC, Stage.COLLECT),
    "NoSyncReducesUnseen": (accumulated("no_sync"), Property.TRAFFIC, Stage.COLLECT),
    "LosesEarlierParts": (accumulated("no_sync"), Property.SPILL, Stage.REDUCE),
    "InnerEndsOuter": (accumulated("nested"), Property.TRAFFIC, Stage.COLLECT),
    "LocalNorm": (clipped, Property.NORM, Stage.NORM),
    "CountsReplicas": (clipped, Property.NORM, Stage.NORM),
    "ReturnsDTensor": (clipped, Property.NORM, Stage.NORM),
    "NormAfterClipping": (clipped, Property.NORM, Stage.NORM),
    "ClipsBlocksApart": (clipped, Property.CLIP, Stage.NORM),
    "OnlyMeasures": (clipped, Property.CLIP, Stage.NORM),
    "NormalisesAlways": (unclipped, Property.CLIP, Stage.NORM),
    "OtherRate": (unclipped, Property.MASTER, Stage.UPDATE),
    "OtherBetas": (unclipped, Property.MOMENTS, Stage.UPDATE),
    "KeepsGradients": (unclipped, Property.INTAKE, Stage.UPDATE),
    "MovesFrozen": (frozen, Property.STORAGE, Stage.UPDATE),
    "EvaluationDropsGradients": (accumulated("no_sync"), Property.SPILL, Stage.REDUCE),
    "SwallowsRuntimeErrors": (unclipped, Property.PROGRESS, Stage.COLLECT),
    "ReturnsOneBuffer": (clipped, Property.NORM, Stage.NORM),
    "LeavesEvaluationMode": (unclipped, Property.STORAGE, Stage.BUILD),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_strategy_is_caught_where_it_first_shows(pool: Pool, name: str) -> None:
    make, prop, stage = BROKEN[name]

    evaluation = Evaluator(subject(f"strategies_broken.py:{name}"), pool).evaluate(make(2))

    assert evaluation.conclusion is Conclusion.VIOLATED
    assert evaluation.divergence is not None
    assert (evaluation.divergence.property, evaluation.divergence.stage) == (prop, stage), evaluation.divergence


SCENARIOS: dict[str, Make] = {
    "accumulated": accumulated("no_sync"),
    "nested": accumulated("nested"),
    "clipped": clipped,
    "unclipped": unclipped,
    "tied": tied,
    "frozen": frozen,
    "unequal": unequal,
    "unused": unused,
}


@pytest.mark.parametrize("name", ["PlainDDP", "PlainFSDP", "PlainHSDP"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_right_class_holds_in_the_same_scenarios(pool: Pool, name: str, world: int) -> None:
    evaluator = Evaluator(subject(f"strategies.py:{name}"), pool)
    roundings = {"PlainDDP": {"rounds": rounds("none")}, "PlainFSDP": {"rounds": rounds("full")}}

    for case, make in {**SCENARIOS, **roundings.get(name, {})}.items():
        evaluation = evaluator.evaluate(make(world))
        assert evaluation.conclusion is Conclusion.HOLDS, (case, evaluation.divergence)
