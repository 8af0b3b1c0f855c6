"""Scenarios side by side: who runs what, how many at once, and what counts of what came of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from harness import evaluate, runner
from harness.drive.tasks import CheckSubject, RunScenario, SubjectCheck, decode_task, encode
from harness.evaluate import Conclusion, Evaluation, Evaluator, UndecidedError
from harness.launch.outcome import Outcome, PoolError, RankEnd, RankReport, Told, Watch
from harness.pace import CHUNK_PER_LANE, CHUNK_S, Pace
from harness.report.result import EXIT_INTERRUPTED, Result
from harness.runner import CampaignOptions, run_campaign
from harness.scenario import codec
from harness.scenario.model import Scenario
from harness.sim.cores import on_one_core
from harness.sim.lanes import Batch, balanced
from harness.sim.pool import SimPool
from harness.subjects.source import SubjectSource
from harness.verdict import Property, RankStatus, RankVerdict
from tests.unit.test_runner import Watcher, differs, draw, fine, refuses, silent, verdict

SUBJECT = SubjectSource("zero.py:Zero", "/somewhere/zero.py:Zero", {})
WORLDS = (1, 2, 3)

Answer = Callable[[Scenario, int, int], RankReport]


# --- who runs what ----------------------------------------------------------------------------------------------------


def test_each_task_is_in_one_lane_in_order_and_no_lane_has_much_more_than_another() -> None:
    costs = [5.0, 1.0, 1.0, 9.0, 2.0, 2.0, 4.0]
    lanes = balanced(costs, 3)

    assert sorted(index for lane in lanes for index in lane) == list(range(7))
    assert all(lane == sorted(lane) for lane in lanes)
    loads = [sum(costs[index] for index in lane) for lane in lanes]
    assert max(loads) == 9.0  # the largest task alone, which no other way makes smaller


def test_there_may_be_less_tasks_than_lanes() -> None:
    assert balanced([1.0], 3) == [[0], [], []]


def test_each_lane_has_a_core_of_its_own() -> None:
    before = os.sched_getaffinity(0)
    seen = []
    for lane in range(2 * len(before)):
        with on_one_core(lane):
            seen.append(os.sched_getaffinity(0))

    assert seen == [{core} for core in sorted(before)] * 2
    assert os.sched_getaffinity(0) == before


# --- how many at once -------------------------------------------------------------------------------------------------


def test_chunks_begin_with_one_scenario_and_grow() -> None:
    pace = Pace(4)
    assert [pace.next_size() for _ in range(7)] == [1, 4, 8, 16, 32, 32, 32]
    assert pace.largest == 4 * CHUNK_PER_LANE == 32


def test_in_one_lane_scenarios_are_handed_out_one_by_one() -> None:
    pace = Pace(1)
    assert [pace.next_size() for _ in range(4)] == [1] * 4
    assert pace.largest == 1


def test_what_a_chunk_will_take_is_told_by_the_last_one_that_took_time() -> None:
    pace = Pace(2)
    assert pace.expected_s(1e9) == 0.0
    pace.next_size()
    pace.ran(10.0, 5.0)
    pace.next_size()
    assert pace.expected_s(4.0) == 2.0
    pace.ran(10.0, 1.0)
    pace.ran(30.0, 3.0)
    pace.next_size()
    pace.next_size()
    assert pace.expected_s(4.0) == 0.4


# --- what counts ------------------------------------------------------------------------------------------------------


class CannedLanes(SimPool):
    """Stands for the processes; ``alone`` answers single tasks, ``beside`` those of a batch, of a rank each."""

    def __init__(self, directory: Path, lanes: int = 2) -> None:
        self.backend = "sim"
        self.directory = directory
        self.lanes = lanes
        self.alone: Answer = fine
        self.beside: Answer = fine
        self.batches: list[list[Scenario]] = []
        self.singles: list[Scenario] = []
        self.calls: list[str] = []
        self.given: list[str] = []  # incidents
        self.exchanges: list[bool] = []
        self.changed: Callable[[Batch], Batch] = lambda batch: batch
        self.limits: list[tuple[float, float, float]] = []
        self.lanes_reply = True
        self.raises: BaseException | None = None
        self.seconds = 1e-3  # that each scenario takes

    def __enter__(self) -> CannedLanes:
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def incidents(self) -> list[str]:
        return self.given

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        decoded = decode_task(task)
        if isinstance(decoded, CheckSubject):
            report = RankReport(0, RankEnd.REPLIED, encode(SubjectCheck(None)), (), None, "", None)
            return Outcome(1, (report,), 0.1, None)
        self.singles.append(decoded.scenario)
        return answered(self.alone, decoded.scenario, len(self.singles), self.seconds)

    def check_lanes(self, task: bytes, *, timeout_s: float, watch: Watch) -> bool:
        self.calls.append("check")
        return self.lanes_reply

    def recycle(self, world: int) -> None:
        self.calls.append("recycle the one")

    def recycle_lanes(self) -> None:
        self.calls.append("recycle")

    def run_many(
        self,
        tasks: Sequence[RunScenario],
        costs: Sequence[float],
        *,
        timeout_s: float,
        blocked_s: float,
        computing_s: float,
    ) -> Batch:
        if self.raises is not None:
            raise self.raises
        assert len(costs) == len(tasks)
        self.limits.append((timeout_s, blocked_s, computing_s))
        self.exchanges.append(tasks[0].exchanges)
        self.batches.append([task.scenario for task in tasks])
        outcomes = tuple(answered(self.beside, task.scenario, index, self.seconds) for index, task in enumerate(tasks))
        return self.changed(Batch(outcomes, {}, kept=True))


def answered(answer: Answer, scenario: Scenario, run: int, seconds: float) -> Outcome:
    reports = tuple(answer(scenario, rank, run) for rank in range(scenario.world))
    failed = [report.rank for report in reports if report.end is not RankEnd.REPLIED]
    return Outcome(scenario.world, reports, seconds, failed[0] if failed else None, trace="t")


@pytest.fixture
def pool(tmp_path: Path) -> CannedLanes:
    return CannedLanes(tmp_path)


def scenarios(count: int) -> list[Scenario]:
    return [draw(7, index, WORLDS) for index in range(count)]


def evaluated(pool: CannedLanes, count: int = 4, evaluator: Evaluator | None = None) -> list[Evaluation]:
    return list((evaluator or Evaluator(SUBJECT, pool)).evaluate_many(scenarios(count)))


def conclusions(evaluations: list[Evaluation]) -> list[Conclusion]:
    return [evaluation.conclusion for evaluation in evaluations]


def at(index: int, other: Answer, otherwise: Answer = fine) -> Answer:
    """Another answer for the scenario of this number."""
    wanted = draw(7, index, WORLDS)
    return lambda scenario, rank, run: (other if scenario == wanted else otherwise)(scenario, rank, run)


def test_what_holds_side_by_side_holds(pool: CannedLanes) -> None:
    evaluator = Evaluator(SUBJECT, pool)
    for _ in range(2):
        assert conclusions(evaluated(pool, 4, evaluator)) == [Conclusion.HOLDS] * 4

    assert (pool.singles, pool.batches) == ([], [scenarios(4)] * 2)
    assert pool.calls == ["check"]
    assert evaluator.lanes == 2


def test_what_is_outside_the_subjects_space_side_by_side_is(pool: CannedLanes) -> None:
    pool.beside = at(2, refuses)

    expected = [Conclusion.HOLDS, Conclusion.HOLDS, Conclusion.UNSUPPORTED, Conclusion.HOLDS]
    assert conclusions(evaluated(pool)) == expected
    assert pool.singles == []


def test_one_scenario_needs_no_lane(pool: CannedLanes) -> None:
    assert conclusions(evaluated(pool, 1)) == [Conclusion.HOLDS]
    assert (pool.singles, pool.batches, pool.calls) == (scenarios(1), [], [])


def test_in_one_lane_each_is_run_by_itself(tmp_path: Path) -> None:
    pool = CannedLanes(tmp_path, lanes=1)
    assert conclusions(evaluated(pool)) == [Conclusion.HOLDS] * 4
    assert (pool.singles, pool.batches) == (scenarios(4), [])


def unexplained(scenario: Scenario, rank: int, run: int) -> RankReport:
    return _said(verdict(scenario, rank, unresolved=True))


def _said(said: RankVerdict) -> RankReport:
    return RankReport(said.rank, RankEnd.REPLIED, msgspec.msgpack.encode(said), (), None, "", None)


NOT_HOLDING: dict[str, Answer] = {
    "a difference": lambda scenario, rank, run: differs(scenario, rank),
    "no reply": lambda scenario, rank, run: silent(rank, RankEnd.DEADLOCKED),
    "unresolved": unexplained,
    "nonsense": lambda scenario, rank, run: RankReport(rank, RankEnd.REPLIED, b"?", (), None, "", None),
    "raised": lambda scenario, rank, run: RankReport(rank, RankEnd.RAISED, None, (), "planted", "", None),
    "no interface": lambda scenario, rank, run: _said(
        RankVerdict(rank=rank, status=RankStatus.INTERFACE, detail="lacks collect")
    ),
}


@pytest.mark.parametrize("name", NOT_HOLDING)
def test_anything_else_is_run_again_by_itself_and_that_counts(name: str, pool: CannedLanes) -> None:
    pool.beside = at(1, NOT_HOLDING[name])

    assert conclusions(evaluated(pool)) == [Conclusion.HOLDS] * 4
    assert pool.singles == [draw(7, 1, WORLDS)]


def test_a_world_that_stopped_is_run_again_also_where_each_rank_replied(pool: CannedLanes) -> None:
    def told(batch: Batch) -> Batch:
        first, *others = batch.outcomes
        assert first is not None
        return replace(batch, outcomes=(replace(first, told=Told("deadlock", "planted", ())), *others))

    pool.changed = told
    assert conclusions(evaluated(pool)) == [Conclusion.HOLDS] * 4
    assert pool.singles == scenarios(1)


def test_a_violation_is_found_by_itself_and_nothing_after_it_is_run(pool: CannedLanes) -> None:
    pool.beside = at(1, silent_at_all, at(3, silent_at_all))
    pool.alone = lambda scenario, rank, run: differs(scenario, rank)
    evaluations = Evaluator(SUBJECT, pool).evaluate_many(scenarios(4))

    assert conclusions([next(evaluations), next(evaluations)]) == [Conclusion.HOLDS, Conclusion.VIOLATED]
    assert pool.singles == [draw(7, 1, WORLDS)]


def silent_at_all(scenario: Scenario, rank: int, run: int) -> RankReport:
    return silent(rank, RankEnd.ABANDONED)


def test_from_the_first_sum_in_another_order_on_all_are_run_as_in_one_lane(pool: CannedLanes) -> None:
    """That is, with a search from the beginning: those of this batch by themselves, those of the next beside others."""

    def sums_otherwise(scenario: Scenario, rank: int, run: int) -> RankReport:
        return unexplained(scenario, rank, run) if run == 1 else _said(verdict(scenario, rank, searched=True))

    pool.beside, pool.alone = at(1, unexplained), sums_otherwise
    evaluator = Evaluator(SUBJECT, pool)
    assert conclusions(evaluated(pool, 4, evaluator)) == [Conclusion.HOLDS] * 4
    assert pool.singles == [draw(7, index, WORLDS) for index in (1, 1, 2, 3)]
    pool.beside = fine
    evaluated(pool, 4, evaluator)
    assert pool.exchanges == [False, True]
    assert len(pool.singles) == 4


def died(index: int) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        outcomes = tuple(None if number >= index else outcome for number, outcome in enumerate(batch.outcomes))
        return Batch(outcomes, {index: "exit code 3"}, kept=False)

    return change


def test_a_process_that_died_is_a_violation_that_is_explained_by_itself(pool: CannedLanes) -> None:
    pool.changed, pool.alone = died(2), lambda scenario, rank, run: differs(scenario, rank)

    found = next(iter(evaluated(pool)[2:])).divergence
    assert found is not None
    assert found.message == "planted"


def test_a_process_that_died_is_no_pass_even_if_that_never_happens_again(pool: CannedLanes) -> None:
    pool.changed = died(2)
    evaluator = Evaluator(SUBJECT, pool)

    evaluations = evaluated(pool, 4, evaluator)
    found = evaluations[2].divergence
    assert conclusions(evaluations) == [*[Conclusion.HOLDS] * 2, Conclusion.VIOLATED, Conclusion.HOLDS]
    assert found is not None
    assert (found.property, found.rank) == (Property.PROGRESS, None)
    assert found.message == (
        "the process that ran this scenario after others ended: exit code 3; by itself it does not fail"
    )
    evaluated(pool, 4, evaluator)
    assert pool.calls == ["check", "check"]  # other processes


def test_a_process_that_died_between_batches_is_a_violation(pool: CannedLanes) -> None:
    def gone(batch: Batch) -> Batch:
        pool.given.append("planted: it ended")
        return batch

    pool.changed = gone
    found = evaluated(pool)[0].divergence
    assert found is not None
    assert (found.property, found.message) == (Property.PROGRESS, "after a scenario, planted: it ended")


def test_a_process_that_died_after_its_last_scenario_is_a_violation(pool: CannedLanes) -> None:
    evaluator = Evaluator(SUBJECT, pool)
    evaluator.prepare(2)
    evaluated(pool, 4, evaluator)
    assert evaluator.crashed_when_idle(2) is None

    def check(task: bytes, *, timeout_s: float, watch: Watch) -> bool:
        pool.given.append("planted: it ended")
        return True

    pool.check_lanes = check  # type: ignore[method-assign]
    crashed = evaluator.crashed_when_idle(2)
    assert crashed is not None
    assert crashed.conclusion is Conclusion.VIOLATED


def test_lanes_in_which_something_piled_up_are_replaced_and_what_held_there_counts(pool: CannedLanes) -> None:
    pool.beside = at(1, lambda scenario, rank, run: _said(verdict(scenario, rank, recycle="40 more threads")))
    evaluator = Evaluator(SUBJECT, pool)

    evaluations = evaluated(pool, 4, evaluator)
    assert conclusions(evaluations) == [Conclusion.HOLDS] * 4
    assert [evaluation.recycled for evaluation in evaluations] == [None, "rank 0: 40 more threads", None, None]
    assert pool.singles == []
    evaluated(pool, 4, evaluator)
    assert pool.calls[:3] == ["check", "recycle", "check"]


def test_lanes_that_cannot_import_the_subject_are_not_used(pool: CannedLanes) -> None:
    pool.lanes_reply = False
    assert conclusions(evaluated(pool)) == [Conclusion.HOLDS] * 4
    assert (pool.singles, pool.batches) == (scenarios(4), [])


def test_a_pool_that_cannot_go_on_decides_nothing(pool: CannedLanes) -> None:
    pool.raises = PoolError("the zygote is gone")
    with pytest.raises(UndecidedError, match="the zygote is gone"):
        evaluated(pool)


def test_the_limits_of_a_batch_are_those_of_its_largest_scenario(
    pool: CannedLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate.machine, "patience", lambda: 1.0)
    evaluated(pool)
    evaluated(pool, 4, Evaluator(SUBJECT, pool, timeout_s=3.0, stall_s=2.0))

    most = max(scenario.numel * scenario.world * len(scenario.operations) for scenario in scenarios(4))
    timeout_s, blocked_s, computing_s = pool.limits[0]
    assert timeout_s <= evaluate.BASE_TIMEOUT_S + max(WORLDS) + most * 1e-6 + evaluate.BATCH_S + 1e-6
    assert blocked_s == evaluate.BLOCKED_S + most * 1e-8
    assert computing_s == evaluate.COMPUTING_S + most * 1e-6
    assert pool.limits[1] == (3.0 + evaluate.BATCH_S, 2.0, 2.0)


# --- campaigns --------------------------------------------------------------------------------------------------------


def campaign(pool: CannedLanes, tmp_path: Path, watcher: Watcher | None = None, **changes: object) -> Result:
    fields = {"examples": 40, "seconds": None, "shrink_s": 0.0, **changes}
    options = CampaignOptions(
        subject=SUBJECT,
        worlds=WORLDS,
        backend="sim",
        seed=7,
        bucket=None,
        parameters=None,
        report=tmp_path / "cases",
        timeout_s=None,
        **fields,  # type: ignore[arg-type]
    )
    try:
        return run_campaign(options, watcher or Watcher(), pool)
    except KeyboardInterrupt:  # would end the whole test run
        pytest.fail("the interruption was not handled")


@pytest.fixture(autouse=True)
def _draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RELATE_EVERY", 10**9)
    monkeypatch.setattr(runner, "generate", SimpleNamespace(draw=draw))


def test_a_campaign_runs_each_scenario_once_in_growing_chunks(pool: CannedLanes, tmp_path: Path) -> None:
    """And one of twenty twice."""
    watcher = Watcher()
    result = campaign(pool, tmp_path, watcher)

    assert (result.verdict, result.examples.run) == ("holds", 40)
    assert [len(batch) for batch in pool.batches] == [2, 4, 8, 16, 9]
    assert [scenario for batch in pool.batches for scenario in batch] == scenarios(40)[1:]
    first, *twice = [scenarios(40).index(scenario) for scenario in pool.singles]
    assert first == 0
    assert [index // 20 for index in twice] == [0, 1]
    assert result.properties["determinism"] == 2
    assert [example[:2] for example in watcher.examples] == [(index, 40) for index in range(40)]


def test_the_first_scenario_that_fails_is_the_one_that_is_told(pool: CannedLanes, tmp_path: Path) -> None:
    """Whatever else came up beside it, and sooner; and what came after it was not run."""

    def wrong(scenario: Scenario, rank: int, run: int) -> RankReport:
        return differs(scenario, rank, Property.MASTER if scenario == draw(7, 4, WORLDS) else Property.WEIGHTS)

    pool.beside = pool.alone = at(4, wrong, at(6, wrong))
    result = campaign(pool, tmp_path)

    assert result.failure is not None
    assert result.failure.property == "master"
    assert result.examples.run == 5
    assert draw(7, 6, WORLDS) not in pool.singles
    assert codec.load(Path(result.failure.case or "")).scenario == draw(7, 4, WORLDS)


def test_a_campaign_that_fails_at_once_starts_no_lanes(pool: CannedLanes, tmp_path: Path) -> None:
    pool.alone = lambda scenario, rank, run: differs(scenario, rank)

    assert campaign(pool, tmp_path).verdict == "violated"
    assert (pool.calls, pool.batches) == ([], [])


def test_long_scenarios_are_handed_out_few_at_once(
    pool: CannedLanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And held back in order: what one chunk has no time for is the first of the next. Here all cost the same."""
    monkeypatch.setattr(runner, "cost", lambda _scenario: 1.0)
    pool.seconds = CHUNK_S / 2
    result = campaign(pool, tmp_path, examples=12)

    assert result.examples.run == 12
    assert [len(batch) for batch in pool.batches] == [2] * 5
    ran = [scenario for batch in pool.batches for scenario in batch] + pool.singles
    assert sorted(map(repr, ran)) == sorted(map(repr, scenarios(12)))


def test_a_campaign_whose_time_is_up_begins_no_chunk(pool: CannedLanes, tmp_path: Path) -> None:
    watcher = Watcher()
    result = campaign(pool, tmp_path, watcher, seconds=1e-9)

    assert result.examples.run == 0
    assert watcher.notes == ["time is up after 0 of 40 examples"]


def test_a_campaign_that_is_interrupted_in_a_batch_gives_what_it_has(pool: CannedLanes, tmp_path: Path) -> None:
    pool.raises = KeyboardInterrupt()
    result = campaign(pool, tmp_path)

    assert (result.verdict, result.interrupted, result.exit_code) == ("unknown", True, EXIT_INTERRUPTED)
    assert result.examples.run == 1


def test_all_processes_are_asked_at_the_end_whether_they_live(pool: CannedLanes, tmp_path: Path) -> None:
    campaign(pool, tmp_path, examples=3)

    assert pool.calls == ["check"] * (1 + len(WORLDS))
