"""Scenarios of Muon on ranks: the right class holds in each, and every broken one is caught where it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.errors import UsageError
from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, start_pool
from harness.faults.language import Corrupt, Fault, Mute, Raise
from harness.scenario.model import Operation, Scenario
from harness.scenario.muon import AdaptiveClip
from harness.subjects.source import parse
from harness.verdict import Property, Stage
from tests.muon_cases import (
    MODEL,
    Build,
    Color,
    Discard,
    Domain,
    GlobalClip,
    Mark,
    MuonSettings,
    Rate,
    Reload,
    Sharding,
    Skip,
    scenario,
    step,
)
from tests.support import paired, sampled

BROKEN = Path(__file__).parent.parent / "subjects" / "muon_broken.py"
FP32 = MuonSettings(ns_dtype="fp32")


@pytest.fixture(scope="module", params=["sim", "gloo"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with start_pool(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def sim() -> Iterator[Pool]:
    with start_pool("sim") as ranks:
        yield ranks


def with_marks(**fields: tuple[Any, ...]) -> list[tuple[str, tuple[int, ...], Mark]]:
    """The model, with these fields of the marks in turn."""
    changed = []
    for index, (name, shape, mark) in enumerate(MODEL):
        given = {field: choices[index % len(choices)] for field, choices in fields.items()}
        changed.append((name, shape, msgspec.structs.replace(mark, **given)))
    return changed


def all_missing(world: int, *indices: int) -> dict[int, tuple[int, ...]]:
    return dict.fromkeys(range(world), indices)


def cases(world: int) -> dict[str, Scenario]:
    """One for each way in which a scenario may go."""
    missing: list[Operation] = [
        *step(world, missing={0: (0, 1, 2)}),
        *step(world, 2, missing=all_missing(world, 0, 1, 2, 5)),
        *step(world),
    ]
    ends: list[Operation] = [
        *step(world),
        *step(world, 2, ending=Discard()),
        *step(world),
        *step(world, ending=Skip()),
        *step(world),
    ]
    between: list[Operation] = [*step(world), Rate(0.3), Reload(), *step(world), Rate(0.1), Build(17), *step(world, 2)]
    overlapped = Sharding(comm_overlap=True, accumulate_steps=2)
    return {
        "plain": scenario(world),
        "fp32 weights and products": scenario(world, dtype="fp32", settings=FP32),
        "clipped": scenario(world, clip=GlobalClip(0.5)),
        "not quite clipped": scenario(world, clip=GlobalClip(1e9)),
        "adaptively clipped": scenario(world, clip=AdaptiveClip(ratio=0.5)),
        "overlapped": scenario(world, sharding=Sharding(comm_overlap=True), no_sync=True),
        "accumulated": scenario(world, [*step(world, 2), *step(world), *step(world, 2)], sharding=overlapped),
        "assigned": scenario(world, backward="assign"),
        "not fused": scenario(world, sharding=Sharding(fused=False)),
        "gradients released": scenario(world, sharding=Sharding(release_gradients=True), clip=GlobalClip(0.5)),
        "storage released": scenario(world, release_color=-1),
        "two hops": scenario(world, sharding=Sharding(two_hop=True, local_world_size=2 - world % 2)),
        "other rules": scenario(
            world, sharding=Sharding(fuse_optimizer_states=True, owner_rule="numel", use_reduce_avg=False)
        ),
        "discarded and skipped": scenario(world, ends),
        "discarded while under way": scenario(world, ends, sharding=Sharding(comm_overlap=True), no_sync=True),
        "reloaded and rebuilt": scenario(world, between, clip=AdaptiveClip(warmup_steps=0)),
        "missing": scenario(world, missing),
        "missing and skipped": scenario(world, missing, sharding=Sharding(skip_missing=True), clip=GlobalClip(0.5)),
        "used twice": scenario(
            world, model=with_marks(use=("once", "twice", "reentrant"), main_grad=(False, False, False, True))
        ),
        "sums that round": scenario(world, domain=Domain.GENERAL, spread=6, multiple=1, max_k=255),
        "sums that round, clipped": scenario(
            world, domain=Domain.GENERAL, spread=6, multiple=1, max_k=255, clip=GlobalClip(0.5)
        ),
    }


def colored(world: int, **muon: Any) -> Scenario:
    """A colour with two groups, another with a divisor of its own and a rank outside, and the default one."""
    halves = Color((tuple(range(world // 2)), tuple(range(world // 2, world))))
    last = Color((tuple(range(1, world)),), divisor=2.0)
    return scenario(world, model=with_marks(color=(None, 0, 1)), colors=(halves, last), **muon)


def run(pool: Pool, subject: str, given: Scenario) -> Evaluation:
    return Evaluator(parse(subject), pool).evaluate(given)


def shown(evaluation: Evaluation) -> str:
    return f"{evaluation.divergence}\n{evaluation.output[-3000:]}"


@pytest.mark.parametrize(("name", "world"), sampled(paired(cases(2), [3, 2, 1]), every=2))
def test_the_right_one_holds(pool: Pool, world: int, name: str) -> None:
    evaluation = run(pool, "muon", cases(world)[name])

    assert evaluation.conclusion is Conclusion.HOLDS, shown(evaluation)
    assert set(evaluation.checks) >= {
        "weights", "master", "moments", "gradient", "intake", "storage", "ownership", "progress",
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "muon",
    [{}, {"clip": GlobalClip(0.5)}, {"clip": AdaptiveClip(warmup_steps=0)}, {"release_color": 0}, {"release_color": 1}],
    ids=["plain", "clipped", "adaptive", "released", "released where one is outside"],
)
def test_colors_have_groups_of_their_own(pool: Pool, world: int, muon: dict[str, Any]) -> None:
    evaluation = run(pool, "muon", colored(world, **muon))

    assert evaluation.conclusion is Conclusion.HOLDS, shown(evaluation)


def test_what_only_running_tells_is_told(sim: Pool) -> None:
    adaptive = scenario(2, clip=AdaptiveClip(ratio=0.5, warmup_steps=0))
    none = scenario(2, clip=GlobalClip(1e9))
    wide = scenario(2, max_k=80)

    assert run(sim, "muon", adaptive).situations == {"adaptive-clip-active", "clipping-active"}
    assert run(sim, "muon", none).situations == {"clipping-inactive"}
    assert run(sim, "muon", wide).situations == {"wide-reduced-value"}


def test_norms_and_gradients_are_compared_exactly_where_they_are_exact(sim: Pool) -> None:
    evaluation = run(sim, "muon", scenario(3, clip=GlobalClip(0.5)))

    assert evaluation.margin is None
    assert set(evaluation.oracle) == {"exact"}
    assert evaluation.checks["norm"] > 3


# --- other products ---------------------------------------------------------------------------------------------------


def test_other_products_are_within_the_bound(pool: Pool) -> None:
    evaluation = run(pool, f"{BROKEN}:WithOtherProducts", scenario(3, settings=FP32))

    assert evaluation.conclusion is Conclusion.HOLDS, shown(evaluation)
    assert evaluation.searched
    assert evaluation.oracle["bound"] > 0
    assert evaluation.margin is not None
    assert 0 < evaluation.margin < 1


def test_in_bf16_the_bound_says_little_and_the_result_says_so(sim: Pool) -> None:
    evaluation = run(sim, f"{BROKEN}:WithOtherProducts", scenario(2))

    assert evaluation.conclusion is Conclusion.HOLDS, shown(evaluation)
    assert evaluation.oracle["loose"] > 0


def test_equal_products_are_compared_bit_for_bit_also_of_a_class(pool: Pool) -> None:
    evaluation = run(pool, f"{BROKEN}:Right", scenario(2))

    assert evaluation.conclusion is Conclusion.HOLDS, shown(evaluation)
    assert set(evaluation.oracle) == {"exact"}
    assert not evaluation.searched


# --- what is wrong ----------------------------------------------------------------------------------------------------


def reload_after_rate(world: int) -> list[Operation]:
    return [*step(world), Rate(0.4), Reload(), *step(world)]


WRONG = {
    "WithWrongCoefficient": (Property.MASTER, Stage.UPDATE, {"settings": FP32}),
    "WithMissingStep": (Property.MASTER, Stage.UPDATE, {"settings": FP32}),
    "WithWrongScale": (Property.MASTER, Stage.UPDATE, {"settings": FP32}),
    "HidesAMatrix": (Property.OWNERSHIP, Stage.BUILD, {}),
    "TwoOwners": (Property.OWNERSHIP, Stage.BUILD, {}),
    "MasterOfZeros": (Property.MASTER, Stage.BUILD, {}),
    "NoState": (Property.MOMENTS, Stage.BUILD, {}),
    "MeanTwice": (Property.GRADIENT, Stage.REDUCE, {}),
    "OneMatrixUnreduced": (Property.SPILL, Stage.REDUCE, {"operations": step(2, 2)}),
    "KeepsGrad": (Property.INTAKE, Stage.REDUCE, {}),
    "NeverForgets": (Property.GRADIENT, Stage.REDUCE, {"operations": [*step(2, 1, ending=Discard()), *step(2)]}),
    "LocalNorm": (Property.NORM, Stage.NORM, {"clip": GlobalClip(0.5)}),
    "ClipsTheExcluded": (Property.CLIP, Stage.NORM, {"clip": GlobalClip(0.5)}),
    "ForgetsMomentum": (Property.MOMENTS, Stage.UPDATE, {}),
    "RoundsTheMaster": (Property.MASTER, Stage.UPDATE, {}),
    "UpdatesWhatIsMissing": (
        Property.MOMENTS,
        Stage.UPDATE,
        {"sharding": Sharding(skip_missing=True), "operations": [*step(2), *step(2, missing=all_missing(2, 0, 1))]},
    ),
    "StaleOnLastRank": (Property.WEIGHTS, Stage.GATHER, {}),
    "Repoints": (Property.STORAGE, Stage.GATHER, {}),
    "TouchesTheFrozen": (Property.STORAGE, Stage.GATHER, {}),
    "GivesZerosBack": (Property.WEIGHTS, Stage.REDUCE, {"release_color": -1, "operations": [*step(2), *step(2)]}),
    "KeepsWhatIsSetToZero": (
        Property.INTAKE,
        Stage.COLLECT,
        {"operations": [*step(2), *step(2, 1, ending=Discard()), *step(2)], "backward": "assign"},
    ),
    "GivesNothingUp": (Property.STORAGE, Stage.REDUCE, {"release_color": -1}),
    "KeepsGradients": (Property.MEMORY, Stage.UPDATE, {"sharding": Sharding(release_gradients=True)}),
    "LosesMomentum": (Property.MOMENTS, Stage.BUILD, {"operations": reload_after_rate(2)}),
    "LosesTheRate": (Property.MASTER, Stage.UPDATE, {"operations": reload_after_rate(2), "settings": FP32}),
    "OneMoreCollective": (Property.TRAFFIC, Stage.GATHER, {}),
    "RaisesInStep": (Property.PROGRESS, Stage.UPDATE, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught_where_it_is(sim: Pool, name: str) -> None:
    prop, stage, settings = WRONG[name]

    evaluation = run(sim, f"{BROKEN}:{name}", scenario(2, **settings))

    assert evaluation.conclusion is Conclusion.VIOLATED
    assert evaluation.divergence is not None
    assert (evaluation.divergence.property, evaluation.divergence.stage) == (prop, stage), shown(evaluation)


@pytest.mark.parametrize("name", ["MeanTwice", "LocalNorm", "StaleOnLastRank", "TwoOwners"])
def test_real_ranks_tell_the_same(pool: Pool, name: str) -> None:
    prop, stage, settings = WRONG[name]

    evaluation = run(pool, f"{BROKEN}:{name}", scenario(2, **settings))

    assert evaluation.divergence is not None
    assert (evaluation.divergence.property, evaluation.divergence.stage) == (prop, stage), shown(evaluation)


FAULTS = [
    (Corrupt(rank=1, step=1, stage=Stage.REDUCE, collective=0, what="bit"), Property.SPILL, Stage.REDUCE),
    (Corrupt(rank=0, step=0, stage=Stage.GATHER, collective=0, what="bit"), Property.WEIGHTS, Stage.GATHER),
    (Corrupt(rank=1, step=0, stage=Stage.NORM, collective=1, what="bit"), Property.NORM, Stage.NORM),
    (Raise(rank=1, step=0, stage=Stage.GATHER, collective=0), Property.PROGRESS, Stage.GATHER),
    (Mute(rank=0), Property.PROGRESS, None),
]


@pytest.mark.parametrize(("fault", "prop", "stage"), FAULTS, ids=["reduce", "gather", "norm", "raise", "mute"])
def test_faults_strike_in_the_stage_that_they_name(
    sim: Pool, fault: Fault, prop: Property, stage: Stage | None
) -> None:
    """Of the three stages that are one call of ``step()`` too."""
    given = msgspec.structs.replace(scenario(2, clip=GlobalClip(0.5)), faults=(fault,))

    evaluation = run(sim, "muon", given)

    assert evaluation.hits == {fault.rank: (0,)}
    assert evaluation.divergence is not None
    assert evaluation.divergence.property is prop, shown(evaluation)
    assert stage is None or evaluation.divergence.stage is stage


def test_a_scenario_may_be_refused(sim: Pool) -> None:
    assert run(sim, f"{BROKEN}:Refuses", scenario(2)).conclusion is Conclusion.UNSUPPORTED


@pytest.mark.parametrize(
    ("subject", "given", "said"),
    [
        ("muon", msgspec.structs.replace(scenario(1), system="zero_master", muon=None), "system 'zero_master'"),
        ("zero2", scenario(1), "system 'muon'"),
        (f"{BROKEN}:NoShards", scenario(1), "lacks local_shards"),
        (f"{BROKEN}:NoStateDict", scenario(1), "no method no_sync"),
        (f"{BROKEN}:TakesNoConfig", scenario(1), "cannot be constructed as Class(inner, group=..., config="),
    ],
    ids=["another system", "the other way round", "no interface", "half an interface", "no configuration"],
)
def test_what_cannot_be_driven_is_bad_usage(sim: Pool, subject: str, given: Scenario, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(sim, subject, given)

    assert said in str(refused.value)


def test_the_system_of_a_class_is_known_once_it_was_imported(sim: Pool) -> None:
    evaluator = Evaluator(parse(f"{BROKEN}:Right"), sim)
    with pytest.raises(ValueError, match="only after prepare"):
        _ = evaluator.system
    evaluator.prepare(1)

    assert evaluator.system == "muon"
    assert Evaluator(parse("muon"), sim).system == "muon"
    assert Evaluator(parse("zero2"), sim).system == "zero_master"
