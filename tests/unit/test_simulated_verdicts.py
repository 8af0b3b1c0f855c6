"""What the reports of a simulated world mean: deadlocks and mismatches that the world itself tells, at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace as with_fields
from pathlib import Path

import msgspec
import pytest

from harness import evaluate
from harness.blame import Stack, without_harness
from harness.drive.tasks import CheckSubject, RunScenario, SubjectCheck, SubjectName, decode_task, encode
from harness.drive.trail import Left
from harness.evaluate import BASE_TIMEOUT_S, Conclusion, Evaluation, Evaluator, conclude, start_pool
from harness.launch import machine
from harness.launch.outcome import Outcome, RankEnd, RankReport, Told, Watch
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.source import SubjectSource
from harness.verdict import Collective, Divergence, Property, RankStatus, RankVerdict, Stage

REDUCE = Collective("reduce_scatter", "fp32", 96, (0, 1, 2), 0, "reduce")
NORM = Collective("all_reduce", "fp64", 1, (0, 1, 2), 0, "norm")
GATHER = Collective("all_gather", "bf16", 48, (0, 1, 2), 0, "gather")
AT_NORM = Left(0, Stage.NORM, (REDUCE, NORM))
STACKS = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/x/harness/sim/world.py", line 210 in _hand_over
  File "/x/harness/sim/group.py", line 88 in allreduce
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2950 in all_reduce
  File "/home/u/my_zero.py", line 41 in grad_sq_norm
  File "/x/harness/sim/handler.py", line 60 in _rank
  File "/usr/lib/python3.11/threading.py", line 982 in run
"""


def done(rank: int, **fields: object) -> RankReport:
    said = RankVerdict(rank=rank, status=RankStatus.DONE, **fields)  # type: ignore[arg-type]
    return RankReport(rank, RankEnd.REPLIED, msgspec.msgpack.encode(said), (), None, "", None)


def raised(rank: int, message: str) -> RankReport:
    found = Divergence(property=Property.PROGRESS, stage=Stage.COLLECT, step=0, rank=rank, message=message)
    said = RankVerdict(rank=rank, status=RankStatus.RAISED, divergence=found, detail=f"Traceback: {message}")
    return RankReport(rank, RankEnd.BROKEN, msgspec.msgpack.encode(said), (), None, "", None)


def deadlocked(rank: int, error: str | None = "waits in all_reduce fp64[1] for rank 1") -> RankReport:
    return RankReport(rank, RankEnd.DEADLOCKED, None, (), error, f"printed by {rank}", STACKS)


def concluded(
    *reports: RankReport, told: Told | None = None, trails: Mapping[int, Left] | None = None, trace: str = "t"
) -> Evaluation:
    failed = [report.rank for report in reports if report.end is not RankEnd.REPLIED]
    outcome = Outcome(len(reports), reports, 0.25, failed[0] if failed else None, told, trace)
    return conclude(outcome, lambda rank: (trails or {}).get(rank, Left()))


def found_in(evaluation: Evaluation) -> Divergence:
    assert evaluation.conclusion is Conclusion.VIOLATED
    assert evaluation.divergence is not None
    return evaluation.divergence


@pytest.mark.parametrize(("kind", "prop"), [("mismatch", Property.TRAFFIC), ("deadlock", Property.PROGRESS)])
@pytest.mark.parametrize("ranks", [(), (1,), (1, 2)])
def test_what_the_world_tells_is_the_failure(kind: str, prop: Property, ranks: tuple[int, ...]) -> None:
    """Where the logs are equal: they hold no sends, say. The rank, if any, is the first of those whose doing it is."""
    told = Told(kind, "ranks 1, 2 wait for each other in recv", ranks)  # type: ignore[arg-type]
    trails = {0: Left(0, Stage.GATHER, (REDUCE, NORM)), 1: AT_NORM, 2: AT_NORM}

    evaluation = concluded(*map(deadlocked, range(3)), told=told, trails=trails)

    found = found_in(evaluation)
    assert (found.property, found.rank, found.step, found.stage) == (prop, (*ranks, None)[0], 0, Stage.NORM)
    assert found.message == "ranks 1, 2 wait for each other in recv"
    assert not evaluation.hung
    assert [account.cause for account in evaluation.accounts] == [rank == (*ranks, None)[0] for rank in range(3)]
    assert {account.end for account in evaluation.accounts} == {"waits in all_reduce fp64[1] for rank 1"}
    assert {account.where for account in evaluation.accounts} == {"my_zero.py:41 in grad_sq_norm"}


def test_the_logs_of_most_ranks_come_before_what_the_world_tells() -> None:
    """They tell who skipped what, not only who waits."""
    told = Told("deadlock", "ranks 0, 2 wait for rank 1", (0, 2))
    trails = {0: AT_NORM, 1: Left(0, Stage.GATHER, (REDUCE, GATHER)), 2: AT_NORM}

    found = found_in(concluded(*map(deadlocked, range(3)), told=told, trails=trails))

    assert (found.property, found.rank, found.stage) == (Property.TRAFFIC, 1, Stage.NORM)
    assert "rank 1 skipped that collective" in found.message


def test_a_difference_that_was_seen_before_comes_first() -> None:
    told = Told("deadlock", "nobody comes", ())
    wrong = Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, step=0, rank=2, message="planted")
    event = msgspec.msgpack.encode(wrong)
    reports = [deadlocked(0), deadlocked(1), with_fields(deadlocked(2), events=(event,))]

    assert found_in(concluded(*reports, told=told)) == wrong


def test_who_raised_is_the_cause_of_the_deadlock_of_the_others() -> None:
    told = Told("deadlock", "ranks 0, 2 wait for rank 1, which has ended", (1,))

    found = found_in(concluded(deadlocked(0), raised(1, "it raised: planted"), deadlocked(2), told=told))

    assert (found.property, found.rank, found.message) == (Property.PROGRESS, 1, "it raised: planted")


def test_a_world_that_stopped_is_no_pass_even_if_every_rank_replied() -> None:
    found = found_in(concluded(done(0), done(1), told=Told("mismatch", "planted", (1,))))

    assert (found.property, found.rank, found.message) == (Property.TRAFFIC, 1, "planted")


def test_a_rank_that_keeps_its_verdict_is_named_without_talk_of_time() -> None:
    mute = deadlocked(1, "keeps its verdict for itself, for ever")
    trails = {1: Left(0, Stage.GATHER, (), finished=True)}

    evaluation = concluded(done(0), mute, done(2), trails=trails)

    found = found_in(evaluation)
    assert (found.property, found.rank, found.stage) == (Property.PROGRESS, 1, Stage.GATHER)
    assert found.message == (
        "rank 1 finished the scenario but sent no verdict: it keeps its verdict for itself, for ever"
    )
    assert not evaluation.hung


@pytest.mark.parametrize("error", ["waits in barrier for rank 0", None])
def test_no_more_time_is_advised_for_a_deadlock(error: str | None) -> None:
    found = found_in(concluded(deadlocked(0, error), deadlocked(1, error), trails={0: AT_NORM, 1: AT_NORM}))

    assert "--" not in found.message
    assert (error or "it waits for what never comes") in found.message


def test_the_output_of_a_deadlock_has_the_stack_without_the_harness() -> None:
    evaluation = concluded(*map(deadlocked, range(3)), told=Told("deadlock", "nobody comes", (2,)))

    assert evaluation.output.startswith("printed by 2\nwhere rank 2 was when it was stopped:\nThread 0x")
    assert "line 41 in grad_sq_norm" in evaluation.output
    assert "/harness/sim/" not in evaluation.output


def test_the_frames_of_the_simulation_are_the_harness() -> None:
    stack = Stack.of(STACKS)

    assert stack is not None
    assert stack.subject_frame == "my_zero.py:41 in grad_sq_norm"
    assert "group.py" not in without_harness(STACKS)


@pytest.mark.parametrize("told", [None, Told("deadlock", "nobody comes", ())])
def test_another_interleaving_is_another_result(told: Told | None) -> None:
    """Also of runs that fail alike: by the seed the same ranks wait in the same places."""
    reports = [deadlocked(0), deadlocked(1)] if told else [done(0), done(1)]
    first, again, other = (concluded(*reports, told=told, trace=trace) for trace in ("a", "a", "b"))

    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


# --- the evaluator over one process for all worlds --------------------------------------------------------------------

PART = Part(False, (0, 1), ((), ()))
SCENARIO = Scenario(2, 5, (Parameter("w", (3, 4)),), Values(Domain.EXACT, 255, -3), AdamW(), (Build(4), PART, Step()))
SUBJECT = SubjectSource("zero.py:Zero", "/somewhere/zero.py:Zero", {})


class OneProcess:
    """Stands for a SimPool."""

    backend = "sim"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.incidents: list[str] = []
        self.recycled: list[int] = []
        self.tasks: list[tuple[int, CheckSubject | RunScenario, float]] = []
        self.run_scenario: Callable[[int], RankReport] = done

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def home(self, world: int) -> int:
        return 1

    def recycle(self, world: int) -> None:
        self.recycled.append(world)

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        decoded = decode_task(task)
        self.tasks.append((world, decoded, timeout_s))
        if isinstance(decoded, CheckSubject):
            return Outcome(
                1, (RankReport(0, RankEnd.REPLIED, encode(SubjectCheck(None)), (), None, "", None),), 0.1, None
            )
        reports = tuple(self.run_scenario(rank) for rank in range(world))
        failed = [report.rank for report in reports if report.end is not RankEnd.REPLIED]
        return Outcome(world, reports, 0.5, failed[0] if failed else None)


def test_the_subject_is_checked_once_for_all_worlds_and_driven_as_chosen(tmp_path: Path) -> None:
    pool = OneProcess(tmp_path)
    evaluator = Evaluator(SUBJECT, pool, order="tree", schedule="lockstep")

    evaluator.prepare(3)
    assert evaluator.evaluate(SCENARIO).conclusion is Conclusion.HOLDS
    assert evaluator.crashed_when_idle(4) is None

    name = SubjectName("/somewhere/zero.py:Zero", {})
    assert [(world, task) for world, task, _ in pool.tasks] == [
        (1, CheckSubject(name)),
        (2, RunScenario(name, SCENARIO, order="tree", schedule="lockstep")),
        (1, CheckSubject(name)),
    ]


def test_a_process_that_was_replaced_imports_the_subject_anew(tmp_path: Path) -> None:
    pool = OneProcess(tmp_path)
    evaluator = Evaluator(SUBJECT, pool)
    pool.run_scenario = lambda rank: done(rank, recycle="40 more threads")
    evaluator.evaluate(SCENARIO)
    pool.run_scenario = deadlocked
    evaluator.evaluate(SCENARIO)
    evaluator.prepare(3)

    assert pool.recycled == [2]
    assert [type(task) for _, task, _ in pool.tasks] == [CheckSubject, RunScenario] * 2 + [CheckSubject]


def test_ranks_that_take_turns_have_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "patience", lambda: 1.0)
    pool = OneProcess(tmp_path)
    Evaluator(SUBJECT, pool).evaluate(SCENARIO)

    assert BASE_TIMEOUT_S + 2.0 <= pool.tasks[-1][2] < BASE_TIMEOUT_S + 3.0


def test_sim_starts_one_process_with_its_handler_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[tuple[str, ...], int, str]] = []

    def sim_pool(*, preload: tuple[str, ...], lanes: int, device: str) -> str:
        started.append((preload, lanes, device))
        return "a pool"

    monkeypatch.setattr(evaluate, "SimPool", sim_pool)

    assert start_pool("sim") == "a pool"
    assert start_pool("sim", 4) == "a pool"
    assert start_pool("sim", device="cuda") == "a pool"
    preload = (*evaluate.PRELOAD, "harness.sim.handler")
    assert started == [(preload, 1, "cpu"), (preload, 4, "cpu"), (preload, 1, "cuda")]
