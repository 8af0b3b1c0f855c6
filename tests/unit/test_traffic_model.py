"""The collectives that the layout implies, written out by hand from zero_master.md; every deviation is found."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.drive.traffic import implied, problem
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Operation,
    Parameter,
    Part,
    Scenario,
    Skip,
    Step,
    Values,
)
from harness.verdict import Collective, Stage

# Seven elements over two ranks in buckets of 5: rounded down to 4, so [0, 4) and [4, 7), which is padded to 4 too.
# Step 0 is held, step 1 discarded, step 2 has two parts and clips.
PART = Part(False, (0, 1), ((), ()))
MORE = Part(True, (2, 3), ((), ()))


def scenario_of(
    *operations: Operation, world: int = 2, bucket: int = 5, dtypes: tuple[str, str] = ("bf16", "bf16")
) -> Scenario:
    return Scenario(
        world=world,
        seed=0,
        parameters=(Parameter("a", (3,), dtypes[0]), Parameter("b", (2, 2), dtypes[1])),  # type: ignore[arg-type]
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(bucket), *operations),
    )


SCENARIO = scenario_of(PART, Step(), PART, Discard(), MORE, PART, Clip(1.0), Step())


def call(step: int | None, stage: Stage | None, kind: str, dtype: str, length: int) -> Collective:
    return Collective(kind, dtype, length, (0, 1), step, None if stage is None else stage.value)


def reduced_step(step: int, num_norms: int, gathered: tuple[str, str] = ("bf16", "bf16")) -> list[Collective]:
    return [
        call(step, Stage.REDUCE, "reduce_scatter", "fp32", 4),
        call(step, Stage.REDUCE, "reduce_scatter", "fp32", 4),
        *[call(step, Stage.NORM, "all_reduce", "fp64", 1)] * num_norms,
        *(call(step, Stage.GATHER, "all_gather", dtype, 2) for dtype in gathered),
    ]


WANTED = [*reduced_step(0, 1), *reduced_step(2, 2)]


def test_what_the_layout_implies_is_no_problem() -> None:
    """One reduce-scatter and one all-gather a bucket, one all-reduce a norm; a discarded step sends nothing."""
    assert problem(SCENARIO, WANTED) is None


def test_a_skipped_step_reduces_and_gathers_nothing() -> None:
    skipped = scenario_of(PART, Skip(), PART, Step())
    wanted = [*reduced_step(0, 1)[:3], *reduced_step(1, 1)]

    assert problem(skipped, wanted) is None
    assert problem(skipped, [*reduced_step(0, 1), *reduced_step(1, 1)]) is not None
    assert implied(skipped)(0, "gather") == []


def test_a_rebuild_changes_what_is_called_from_there_on() -> None:
    """What the construction itself calls is not fixed, also where it belongs to a step."""
    rebuilt = scenario_of(PART, Step(), Build(100), PART, Step())
    whole = [
        call(1, Stage.BUILD, "all_gather", "uint8", 32),
        call(1, Stage.REDUCE, "reduce_scatter", "fp32", 8),
        call(1, Stage.NORM, "all_reduce", "fp64", 1),
        call(1, Stage.GATHER, "all_gather", "bf16", 4),
    ]

    assert problem(rebuilt, [*reduced_step(0, 1), *whole]) is None
    assert problem(rebuilt, [*reduced_step(0, 1), *reduced_step(1, 1)]) is not None
    assert implied(rebuilt)(1, "build") is None
    assert implied(rebuilt)(1, "reduce") == [("reduce_scatter", "fp32", 8)]


@pytest.mark.parametrize(
    ("world", "bucket", "reduced", "gathered"),
    [
        (3, 5, [3, 3, 3], [1, 1, 1]),  # 5 down to 3: [0, 3), [3, 6), [6, 7) padded to 3
        (3, 7, [6, 3], [2, 1]),
        (4, 1, [4, 4], [1, 1]),  # never below the world
        (4, 100, [8], [2]),
    ],
)
def test_lengths_follow_world_and_bucket(world: int, bucket: int, reduced: list[int], gathered: list[int]) -> None:
    part = Part(False, tuple(range(world)), ((),) * world)
    observed = [
        *(call(0, Stage.REDUCE, "reduce_scatter", "fp32", length) for length in reduced),
        call(0, Stage.NORM, "all_reduce", "fp64", 1),
        *(call(0, Stage.GATHER, "all_gather", "bf16", length) for length in gathered),
    ]

    assert problem(scenario_of(part, Step(), world=world, bucket=bucket), observed) is None


@pytest.mark.parametrize(
    ("dtypes", "gathered"),
    [
        (("fp16", "fp16"), ("fp16", "fp16")),
        (("fp32", "fp32"), ("fp32", "fp32")),
        (("bf16", "fp16"), ("fp32", "fp16")),
        (("fp32", "bf16"), ("fp32", "bf16")),
    ],
)
def test_a_bucket_of_one_dtype_travels_in_it_and_a_mixed_one_unrounded(
    dtypes: tuple[str, str], gathered: tuple[str, str]
) -> None:
    """ZeroMaster decides it bucket by bucket: the first holds both parameters, the second only the last one."""
    scenario = scenario_of(PART, Step(), dtypes=dtypes)
    observed = reduced_step(0, 1, gathered)

    assert problem(scenario, observed) is None
    observed[-1] = replace(observed[-1], dtype="fp64")
    assert problem(scenario, observed) == (
        0,
        Stage.GATHER,
        f"collective 1 of this stage is all_gather fp64[2], expected all_gather {gathered[1]}[2]",
    )


def test_one_rank_sends_nothing() -> None:
    scenario = scenario_of(Part(False, (0,), ((),)), Clip(1.0), Step(), world=1)

    assert problem(scenario, []) is None
    assert problem(scenario, [call(0, Stage.NORM, "all_reduce", "fp64", 1)]) == (
        0,
        Stage.NORM,
        "collective 0 of this stage is all_reduce fp64[1], expected missing",
    )


def test_what_construction_sends_is_free() -> None:
    digest = call(None, Stage.BUILD, "all_gather", "int64", 4)

    assert problem(SCENARIO, [digest, *WANTED]) is None


@pytest.mark.parametrize("index", range(len(WANTED)))
def test_each_missing_doubled_or_different_call_is_found_at_its_step_and_stage(index: int) -> None:
    entry = WANTED[index]
    before, after = WANTED[:index], WANTED[index + 1 :]
    for instead in (
        [],
        [entry, entry],
        [replace(entry, kind="broadcast")],
        [replace(entry, dtype="fp8")],
        [replace(entry, length=entry.length + 1)],
        [replace(entry, step=None)],
    ):
        found = problem(SCENARIO, [*before, *instead, *after])

        assert found is not None, instead
        assert (found[0], found[1].value) == (entry.step, entry.stage), instead


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("stage", [Stage.COLLECT, Stage.UPDATE])
def test_neither_collecting_nor_updating_sends_anything(step: int, stage: Stage) -> None:
    found = problem(SCENARIO, [*WANTED, call(step, stage, "barrier", "", 0)])

    assert found == (step, stage, "collective 0 of this stage is barrier [0], expected missing")


@pytest.mark.parametrize("stage", [Stage.COLLECT, Stage.REDUCE, Stage.NORM, Stage.UPDATE, Stage.GATHER])
def test_a_discarded_step_sends_nothing_in_any_stage(stage: Stage) -> None:
    found = problem(SCENARIO, [*WANTED, call(1, stage, "all_reduce", "fp64", 1)])

    assert found is not None
    assert found[:2] == (1, stage)


def test_the_position_within_the_stage_and_both_calls_are_told() -> None:
    lacking = [entry for entry in WANTED if entry is not WANTED[-1]]
    assert problem(SCENARIO, lacking) == (
        2,
        Stage.GATHER,
        "collective 1 of this stage is missing, expected all_gather bf16[2]",
    )


def test_the_first_of_several_problems_is_told() -> None:
    observed = [entry for entry in WANTED if (entry.step, entry.stage) not in ((0, "gather"), (2, "reduce"))]

    found = problem(SCENARIO, observed)

    assert found is not None
    assert found[:2] == (0, Stage.GATHER)
    assert problem(SCENARIO, []) == (
        0,
        Stage.REDUCE,
        "collective 0 of this stage is missing, expected reduce_scatter fp32[4]",
    )
