"""Scenarios that run side by side come out as one after the other, whatever becomes of the processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.evaluate import Conclusion, Evaluation, Evaluator, start_pool
from harness.report.result import Result
from harness.scenario import generate
from harness.scenario.model import Scenario
from harness.sim.pool import SimPool
from harness.subjects import source
from harness.verdict import Property
from tests.ranks.test_pool import all_gone
from tests.support import SUBJECTS, Campaigns, sampled

STALL_S = 3.0
HOURS_S = 3600.0
WORLDS = (1, 2, 3)


def _pool(lanes: int) -> SimPool:
    pool = start_pool("sim", lanes)
    assert isinstance(pool, SimPool)
    return pool


@pytest.fixture(scope="module")
def one() -> Iterator[SimPool]:
    with _pool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[SimPool]:
    with _pool(2) as pool:
        yield pool


def scenarios(count: int, worlds: tuple[int, ...] = (2,)) -> list[Scenario]:
    return [generate.draw(3, index, worlds) for index in range(count)]


def evaluator(pool: SimPool, name: str, **limits: float) -> Evaluator:
    given = source.parse(f"{SUBJECTS / 'lanes.py'}:{name}" if name != "zero2" else name, None)
    started = Evaluator(given, pool, **limits)
    started.prepare(2)
    return started


def conclusions(evaluations: list[Evaluation]) -> list[Conclusion]:
    return [evaluation.conclusion for evaluation in evaluations]


def comparable(result: Result) -> Result:
    """Without what is told by a clock, or is the path of a case."""
    per_world = {world: msgspec.structs.replace(each, rate=0.0) for world, each in result.examples.per_world.items()}
    failure, found = result.failure, result.found_after
    return msgspec.structs.replace(
        result,
        found_after=None if found is None else msgspec.structs.replace(found, seconds=0.0),
        examples=msgspec.structs.replace(result.examples, per_world=per_world),
        seconds=0.0,
        examples_per_second=0.0,
        failure=None if failure is None else msgspec.structs.replace(failure, case=None, replay=None),
    )


@pytest.mark.parametrize(
    ("subject", "verdict"),
    sampled(
        [
            ("zero2", "holds"),
            ("museum:refuses-scalars", "holds"),
            ("broken.py:RefusesFewElements", "violated"),  # outside its space, up to a scenario that it refuses wrongly
            ("broken.py:ClampsLargeGradients", "violated"),
            ("museum:adds-pairwise", "holds"),  # in an order of its own, for which the ranks search
            ("museum:swaps-equal-buckets", "violated"),
            ("broken.py:ExitsInReduce", "violated"),
        ],
        every=4,
    ),
)
def test_a_campaign_gives_the_same_in_one_lane_and_in_two(
    subject: str, verdict: str, one: SimPool, two: SimPool, tmp_path: Path
) -> None:
    seed = 1 if subject.endswith(":RefusesFewElements") else 5  # that has fewer elements than ranks soon
    results = [
        Campaigns(pool, tmp_path / str(pool.lanes), "sim").run(
            subject, worlds=WORLDS, examples=30, seed=seed, shrink_s=0.0
        )
        for pool in (one, two)
    ]

    assert results[0].verdict == verdict, results[0].reason
    assert comparable(results[1]) == comparable(results[0])


def test_each_scenario_is_observed_as_by_itself_bit_by_bit(one: SimPool, two: SimPool) -> None:
    """And in the same interleaving, whatever ran in its process before."""
    drawn = scenarios(12, WORLDS)
    alone = [evaluator(one, "zero2").evaluate(scenario) for scenario in drawn]
    beside = list(evaluator(two, "zero2").evaluate_many(drawn))

    assert [each.fingerprint for each in beside] == [each.fingerprint for each in alone]
    assert [each.checks for each in beside] == [each.checks for each in alone]


def test_scenarios_are_shared_between_lanes_and_share_the_time(two: SimPool) -> None:
    """In directories of their own, so that what one leaves behind is not taken for the other's."""
    tasks = [evaluator(two, "zero2")._task(scenario) for scenario in scenarios(5)]

    batch = two.run_many(tasks, [1.0, 1.0, 5.0, 1.0, 1.0], timeout_s=HOURS_S, blocked_s=HOURS_S, computing_s=HOURS_S)

    assert (batch.kept, batch.died) == (True, {})
    assert all(outcome is not None and outcome.replied and outcome.seconds > 0.0 for outcome in batch.outcomes)
    for lane in (0, 1):
        assert {path.name for path in (two.directory / f"lane{lane}").iterdir()} >= {
            "turn-world2",
            "trail-world2-rank1",
        }


def test_one_lane_cannot_run_side_by_side(one: SimPool) -> None:
    with pytest.raises(ValueError, match="expected a pool with at least 2"):
        one.run_many([], [], timeout_s=1.0, blocked_s=1.0, computing_s=1.0)
    with pytest.raises(ValueError, match="lanes=0"):
        SimPool(lanes=0)


def test_a_process_that_ends_only_beside_others_is_no_pass(two: SimPool) -> None:
    """What the other lane had done by then is kept; whatever else ran in that process is run again."""
    evaluations = list(evaluator(two, "DiesAmongOthers").evaluate_many(scenarios(8)))

    violated = [each for each in evaluations if each.conclusion is Conclusion.VIOLATED]
    assert 1 <= len(violated) <= 2  # each process runs four, and ends in its third
    assert conclusions(evaluations).count(Conclusion.HOLDS) == 8 - len(violated)
    for each in violated:
        assert each.divergence is not None
        assert each.divergence.property is Property.PROGRESS
        assert "exit code 3; by itself it does not fail" in each.divergence.message


def test_what_hangs_only_beside_others_is_run_by_itself(two: SimPool) -> None:
    running = evaluator(two, "HangsAmongOthers", stall_s=STALL_S)

    assert conclusions(list(running.evaluate_many(scenarios(6)))) == [Conclusion.HOLDS] * 6
    assert conclusions(list(running.evaluate_many(scenarios(4)))) == [Conclusion.HOLDS] * 4  # in other processes


def test_processes_in_which_threads_pile_up_are_replaced(two: SimPool) -> None:
    running = evaluator(two, "KeepsThreads")
    evaluations = [each for _ in range(3) for each in running.evaluate_many(scenarios(12))]

    assert conclusions(evaluations) == [Conclusion.HOLDS] * 36
    assert any("threads" in (each.recycled or "") for each in evaluations)
    assert running.crashed_when_idle(2) is None


def test_a_lane_that_ends_between_batches_is_told(two: SimPool) -> None:
    running = evaluator(two, "zero2")
    assert conclusions(list(running.evaluate_many(scenarios(4)))) == [Conclusion.HOLDS] * 4
    member = two._process._sets[2].members[1]
    assert member.pid is not None
    os.kill(member.pid, signal.SIGKILL)
    assert all_gone([member.pid])

    crashed = running.crashed_when_idle(2)
    assert crashed is not None
    assert crashed.divergence is not None
    assert "ended after its reply, before the next task" in crashed.divergence.message
    assert conclusions(list(running.evaluate_many(scenarios(4)))) == [Conclusion.HOLDS] * 4
