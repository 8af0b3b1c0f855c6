"""Faults on real ranks: each kind strikes where it should, ends in a verdict, and leaves nothing for the next scenario.

Who is named is checked by those who decide that; here the trails show on which rank, and where, a fault struck.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.drive import trail
from harness.evaluate import Conclusion, Evaluation, Evaluator
from harness.faults.expect import HOLDS, expectation, unhit
from harness.faults.language import (
    Corrupt,
    Delay,
    Duplicate,
    Exit,
    Fault,
    Hang,
    Kill,
    Mute,
    Raise,
    Skip,
    Slow,
    Stop,
    kind,
)
from harness.launch.pool import RankPool
from harness.scenario.model import AdamW, Build, Clip, Discard, Domain, Parameter, Part, Scenario, Step, Values, check
from harness.subjects.source import parse
from harness.verdict import Stage
from tests.support import sampled

WORLD = 3
HANG_S = 10.0  # how long a scenario may take that hangs for ever


def part(number: int, *, more: bool) -> Part:
    return Part(more, tuple(range(number * WORLD, (number + 1) * WORLD)), ((),) * WORLD)


SCENARIO = Scenario(
    world=WORLD,
    seed=4,
    parameters=(Parameter("a", (20,)), Parameter("b", (5, 3))),  # three buckets
    values=Values(Domain.EXACT, 255, 0),
    optimizer=AdamW(),
    operations=(
        *(Build(12), part(0, more=False), Step()),
        *(part(0, more=True), part(1, more=False), Clip(100.0), Step()),
        *(part(0, more=False), Discard(), part(0, more=False), Step()),
    ),
)
# What each stage calls: the agreement on the parameters; three buckets; two norms round a clip; three buckets.
BEFORE_STEP_1 = 1 + 3 + 1 + 3


@pytest.fixture(scope="module")
def evaluator(scenario_pool: RankPool) -> Evaluator:
    return Evaluator(parse("zero2"), scenario_pool)


@pytest.fixture(scope="module")
def impatient(scenario_pool: RankPool) -> Evaluator:
    """For scenarios that hang."""
    return Evaluator(parse("zero2"), scenario_pool, timeout_s=HANG_S)


def evaluate(evaluator: Evaluator, *faults: Fault) -> Evaluation:
    scenario = replace(SCENARIO, faults=faults)
    assert check(scenario) is None
    return evaluator.evaluate(scenario)


def left(pool: RankPool, rank: int) -> trail.Left:
    return trail.read(pool.directory, WORLD, rank)


def all_hit(pool: RankPool, *faults: Fault) -> bool:
    return not unhit(replace(SCENARIO, faults=faults), {rank: left(pool, rank).hits for rank in range(WORLD)})


def as_expected(evaluation: Evaluation, *faults: Fault) -> bool:
    """The violation is one that a fault must turn into."""
    wanted = {name for fault in faults for name in expectation(fault, SCENARIO).properties}
    return evaluation.divergence is not None and evaluation.divergence.property.value in wanted


ENDING: list[tuple[Fault, int, str]] = [
    (Kill(rank=2, step=0, stage=Stage.REDUCE, collective=1), 1 + 1, "SIGKILL"),
    (Kill(rank=0, step=None, stage=Stage.BUILD, signal=15), 0, "SIGTERM"),
    (Kill(rank=1, step=2, stage=Stage.UPDATE, signal=2), BEFORE_STEP_1 + 8, "SIGINT"),
    (Kill(rank=1, step=1, stage=Stage.NORM, signal=11), BEFORE_STEP_1 + 3, "SIGSEGV"),
    (Exit(rank=1, step=1, stage=Stage.NORM, collective=1), BEFORE_STEP_1 + 4, "exit code 0"),
    (Exit(rank=0, step=3, stage=Stage.COLLECT, code=3), BEFORE_STEP_1 + 8, "exit code 3"),
    (Raise(rank=2, step=1, stage=Stage.GATHER, collective=2), BEFORE_STEP_1 + 7, "InjectedFault"),
]


@pytest.mark.parametrize(("fault", "num_called", "said"), sampled(ENDING, every=2), ids=lambda value: str(value)[:40])
def test_what_ends_a_rank_strikes_there_and_names_it(
    fault: Fault, num_called: int, said: str, evaluator: Evaluator, scenario_pool: RankPool
) -> None:
    evaluation = evaluate(evaluator, fault)
    assert not isinstance(fault, Mute)

    assert as_expected(evaluation, fault)
    found = evaluation.divergence
    assert found is not None
    assert (found.rank, found.step, found.stage) == (fault.rank, fault.step, fault.stage)
    assert said in found.message
    assert left(scenario_pool, fault.rank).hits == (0,)
    assert len(left(scenario_pool, fault.rank).collectives) == num_called
    assert evaluate(evaluator).conclusion is Conclusion.HOLDS


def test_ranks_that_hang_in_each_way_are_told_and_replaced(impatient: Evaluator, scenario_pool: RankPool) -> None:
    faults = (
        Hang(rank=0, step=0, stage=Stage.REDUCE, collective=1, how="sleep"),
        Hang(rank=1, step=0, stage=Stage.REDUCE, how="native"),
        Hang(rank=2, step=0, stage=Stage.REDUCE, how="python"),
    )
    evaluation = evaluate(impatient, *faults)

    assert as_expected(evaluation, *faults)
    assert all_hit(scenario_pool, *faults)
    assert [left(scenario_pool, rank).hits for rank in range(WORLD)] == [(0,), (1,), (2,)]
    assert [len(left(scenario_pool, rank).collectives) for rank in range(WORLD)] == [2, 1, 1]
    assert evaluate(impatient).conclusion is Conclusion.HOLDS


def test_a_stopped_rank_is_told_and_replaced(impatient: Evaluator, scenario_pool: RankPool) -> None:
    fault = Stop(rank=1, step=0, stage=Stage.NORM)
    evaluation = evaluate(impatient, fault)

    assert as_expected(evaluation, fault)
    where = left(scenario_pool, 1)
    assert (where.step, where.stage, where.hits, where.finished) == (0, Stage.NORM, (0,), False)
    assert evaluate(impatient).conclusion is Conclusion.HOLDS


def test_a_rank_that_sends_no_verdict_has_finished(impatient: Evaluator, scenario_pool: RankPool) -> None:
    """The trail tells it from one that hangs in its last stage."""
    evaluation = evaluate(impatient, Mute(rank=2))

    assert as_expected(evaluation, Mute(rank=2))
    assert evaluation.divergence is not None
    assert evaluation.divergence.rank == 2
    assert left(scenario_pool, 2).finished
    assert left(scenario_pool, 2).hits == (0,)


LATE: list[Fault] = [
    Slow(rank=0, step=0, stage=Stage.REDUCE, milliseconds=20),
    Delay(rank=2, step=1, stage=Stage.GATHER, collective=2, milliseconds=50),
]


@pytest.mark.parametrize("fault", LATE, ids=kind)
def test_a_rank_that_is_only_late_holds(fault: Fault, evaluator: Evaluator, scenario_pool: RankPool) -> None:
    assert expectation(fault, SCENARIO) == HOLDS
    assert evaluate(evaluator, fault).conclusion is Conclusion.HOLDS
    assert all_hit(scenario_pool, fault)


CORRUPT: list[Fault] = [
    Corrupt(rank=2, step=1, stage=Stage.REDUCE, collective=0, what="bit"),
    Corrupt(rank=1, step=0, stage=Stage.REDUCE, collective=2, what="slice"),
    Corrupt(rank=0, step=3, stage=Stage.REDUCE, collective=1, what="nan"),
    Corrupt(rank=2, step=1, stage=Stage.NORM, collective=0, what="nan"),
    Corrupt(rank=0, step=1, stage=Stage.GATHER, collective=0, what="bit"),
    Corrupt(rank=0, step=1, stage=Stage.GATHER, collective=0, what="slice"),
    Corrupt(rank=1, step=0, stage=Stage.GATHER, collective=1, what="nan"),
]


@pytest.mark.parametrize("fault", sampled(CORRUPT, every=2), ids=lambda fault: f"{fault.stage.value}-{fault.what}")
def test_a_wrong_contribution_is_seen_in_the_stage_in_which_it_is_made(
    fault: Fault, evaluator: Evaluator, scenario_pool: RankPool
) -> None:
    evaluation = evaluate(evaluator, fault)
    assert isinstance(fault, Corrupt)

    assert as_expected(evaluation, fault)
    assert evaluation.divergence is not None
    assert (evaluation.divergence.step, evaluation.divergence.stage) == (fault.step, fault.stage)
    assert all_hit(scenario_pool, fault)


REDUCED = [("reduce_scatter", 12)] * 3
# What the rank of the fault, and another, call in the stage of the fault. Without the exchange of 32-byte digests the
# construction goes on to that of the messages why they differ.
OTHER_CALLS: list[tuple[Fault, list[tuple[str, int]], list[tuple[str, int]]]] = [
    (Skip(rank=2, step=None, stage=Stage.BUILD, collective=0), [("all_gather", 8)], [("all_gather", 32)]),
    (Skip(rank=2, step=1, stage=Stage.NORM, collective=0), [("all_reduce", 1)], [("all_reduce", 1)] * 2),
    (Duplicate(rank=0, step=1, stage=Stage.REDUCE, collective=2), [*REDUCED, ("reduce_scatter", 12)], REDUCED),
]


@pytest.mark.parametrize(("fault", "here", "there"), OTHER_CALLS, ids=["construction", "skip", "duplicate"])
def test_a_collective_too_few_or_too_many_is_seen_in_the_calls(
    fault: Fault,
    here: list[tuple[str, int]],
    there: list[tuple[str, int]],
    impatient: Evaluator,
    scenario_pool: RankPool,
) -> None:
    evaluation = evaluate(impatient, fault)
    assert isinstance(fault, Skip | Duplicate)

    assert as_expected(evaluation, fault)
    assert evaluation.divergence is not None
    assert evaluation.divergence.rank == fault.rank
    assert all_hit(scenario_pool, fault)
    for rank, called in ((fault.rank, here), (1, there)):
        calls = [call for call in left(scenario_pool, rank).collectives if call.step == fault.step]
        assert [(call.kind, call.length) for call in calls if call.stage == fault.stage.value] == called
    assert evaluate(impatient).conclusion is Conclusion.HOLDS
