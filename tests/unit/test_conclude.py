"""What the reports of all ranks mean together: hand-made outcomes, one for every way in which ranks can end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from harness.drive.tasks import CheckSubject, RunScenario, SubjectCheck, SubjectName, decode_task, encode
from harness.drive.trail import Left, Trail
from harness.errors import UsageError
from harness.evaluate import (
    BASE_TIMEOUT_S,
    BLOCKED_S,
    COMPUTING_S,
    Conclusion,
    Evaluation,
    Evaluator,
    UndecidedError,
    conclude,
)
from harness.faults.language import Kill
from harness.launch import machine
from harness.launch.outcome import Outcome, PoolError, RankEnd, RankReport, Watch
from harness.launch.pool import RankPool
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.source import SubjectSource
from harness.verdict import (
    Collective,
    Divergence,
    NormObservation,
    Property,
    RankStatus,
    RankVerdict,
    Stage,
    WeightsObservation,
)

NO_TRAIL = Left()


def verdict(rank: int, status: RankStatus = RankStatus.DONE, **fields: Any) -> RankVerdict:
    return RankVerdict(rank=rank, status=status, **fields)


def diverged(prop: Property, stage: Stage, step: int | None = 0, rank: int | None = None) -> Divergence:
    return Divergence(property=prop, stage=stage, step=step, rank=rank, message=f"{prop.value} by rank {rank}")


def replied(said: RankVerdict, **fields: Any) -> RankReport:
    """A rank that sent its verdict: REPLIED when it was driven to the end, else BROKEN."""
    end = RankEnd.REPLIED if said.status is RankStatus.DONE else RankEnd.BROKEN
    defaults = {"events": (), "error": None, "output": "", "stacks": None}
    return RankReport(rank=said.rank, end=end, reply=msgspec.msgpack.encode(said), **{**defaults, **fields})


def done(rank: int, **fields: Any) -> RankReport:
    return replied(verdict(rank, **fields))


def raised(rank: int, stage: Stage, message: str = "planted", step: int | None = 0) -> RankReport:
    found = Divergence(property=Property.PROGRESS, stage=stage, step=step, rank=rank, message=f"it raised: {message}")
    return replied(verdict(rank, RankStatus.RAISED, divergence=found, detail=f"Traceback: {message}"))


def silent(rank: int, end: RankEnd, error: str | None = None, *events: Divergence, **fields: Any) -> RankReport:
    """A rank that sent no verdict."""
    defaults = {"output": "", "stacks": None}
    sent = tuple(msgspec.msgpack.encode(event) for event in events)
    return RankReport(rank=rank, end=end, reply=None, events=sent, error=error, **{**defaults, **fields})


def killed(rank: int) -> RankReport:
    return silent(rank, RankEnd.KILLED, "signal 9 (SIGKILL)")


def exited(rank: int, code: int = 0) -> RankReport:
    return silent(rank, RankEnd.EXITED, f"exit code {code}")


def timed_out(rank: int) -> RankReport:
    return silent(rank, RankEnd.TIMED_OUT)


def abandoned(rank: int) -> RankReport:
    return silent(rank, RankEnd.ABANDONED)


def concluded(
    *reports: RankReport, first_failed: int | None = None, trails: Mapping[int, Left] | None = None
) -> Evaluation:
    """``first_failed``: by default the lowest rank that did not reply."""
    failed = [report.rank for report in reports if report.end is not RankEnd.REPLIED]
    if first_failed is None and failed:
        first_failed = failed[0]
    outcome = Outcome(len(reports), reports, 0.25, first_failed)
    return conclude(outcome, lambda rank: (trails or {}).get(rank, NO_TRAIL))


def blamed(evaluation: Evaluation) -> tuple[Property, int | None, int | None, Stage]:
    """The property, rank, step and stage of a violation."""
    assert evaluation.conclusion is Conclusion.VIOLATED
    found = evaluation.divergence
    assert found is not None
    return found.property, found.rank, found.step, found.stage


# --- all ranks sent a verdict -----------------------------------------------------------------------------------------


def test_ranks_that_agree_hold_and_all_they_did_is_added_up() -> None:
    norms = (NormObservation(0, 0, "0x3f800000"),)
    weights = (WeightsObservation(0, "aa"),)
    calls = (Collective("all_reduce", "fp64", 1, (0, 1), 0, "norm"),)
    seen: dict[str, Any] = {"norms": norms, "weights": weights, "collectives": calls}
    evaluation = concluded(
        done(0, checks={"master": 2, "norm": 1}, oracle={"exact": 1}, situations=("a", "b"), **seen),
        done(1, checks={"master": 1}, oracle={"exact": 2, "loose": 1}, situations=("b", "c"), **seen),
    )

    assert evaluation.conclusion is Conclusion.HOLDS
    assert evaluation.divergence is None
    # What only both together show counts too: one norm and one digest agree, one call is the same.
    assert evaluation.checks == {"master": 3, "norm": 2, "agreement": 1, "traffic": 1, "progress": 2}
    assert evaluation.oracle == {"exact": 3, "loose": 1}
    assert evaluation.situations == {"a", "b", "c"}
    assert evaluation.seconds == 0.25
    assert not evaluation.hung
    assert evaluation.output == ""


def test_what_one_rank_found_is_a_violation() -> None:
    found = diverged(Property.MASTER, Stage.UPDATE, 1, rank=1)

    evaluation = concluded(done(0), done(1, divergence=found), done(2))

    assert (evaluation.conclusion, evaluation.divergence) == (Conclusion.VIOLATED, found)


def test_what_only_all_ranks_show_is_a_violation() -> None:
    evaluation = concluded(*(done(rank, weights=(WeightsObservation(4, "ab"[rank == 2]),)) for rank in range(3)))

    assert blamed(evaluation) == (Property.AGREEMENT, 2, 4, Stage.GATHER)


def test_a_rank_that_raised_is_a_violation_where_it_did() -> None:
    evaluation = concluded(raised(0, Stage.NORM, step=2), raised(1, Stage.REDUCE, step=2))

    assert blamed(evaluation) == (Property.PROGRESS, 1, 2, Stage.REDUCE)


def test_a_rank_that_only_lost_its_connection_is_not_blamed() -> None:
    lost = raised(0, Stage.REDUCE, "Connection closed by peer [127.0.0.1]:4711")

    assert blamed(concluded(lost, raised(1, Stage.REDUCE, "IndexError"))) == (Property.PROGRESS, 1, 0, Stage.REDUCE)


# --- outside the subject's space, and what is no subject --------------------------------------------------------------


def unsupported(rank: int, **fields: Any) -> RankReport:
    return replied(verdict(rank, RankStatus.UNSUPPORTED, detail="NotImplementedError: planted", **fields))


def test_all_ranks_outside_their_space_are_no_violation() -> None:
    evaluation = concluded(unsupported(0), unsupported(1))

    assert evaluation.conclusion is Conclusion.UNSUPPORTED
    assert evaluation.divergence is None


@pytest.mark.parametrize("other", [done(1), abandoned(1), timed_out(1)], ids=["done", "abandoned", "timed out"])
def test_some_ranks_outside_their_space_are_a_violation(other: RankReport) -> None:
    """The others go on, and in earnest would wait for ever."""
    evaluation = concluded(unsupported(0), other)

    assert blamed(evaluation)[:2] == (Property.PROGRESS, 0)
    assert evaluation.divergence is not None
    assert "rank 0 raised NotImplementedError while rank 1 did not" in evaluation.divergence.message


def test_what_was_found_before_a_refusal_counts() -> None:
    evaluation = concluded(unsupported(0), unsupported(1, divergence=diverged(Property.MASTER, Stage.BUILD, None, 1)))

    assert blamed(evaluation) == (Property.MASTER, 1, None, Stage.BUILD)


def lacking(rank: int) -> RankReport:
    return replied(verdict(rank, RankStatus.INTERFACE, detail="Zero has no attribute spills after construction"))


def test_a_built_object_without_the_interface_is_bad_input() -> None:
    with pytest.raises(UsageError, match="Zero has no attribute spills after construction"):
        concluded(lacking(0), lacking(1))


@pytest.mark.parametrize("other", [done(1), raised(1, Stage.COLLECT)], ids=["done", "raised later"])
def test_an_interface_that_lacks_on_some_ranks_only_is_a_violation(other: RankReport) -> None:
    """The class has it: what it builds depends on the rank."""
    assert blamed(concluded(lacking(0), other))[0] is Property.PROGRESS


# --- ranks without a verdict ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 255])
def test_a_rank_that_exits_is_a_violation_whatever_its_code(code: int) -> None:
    """Exit code 0 is no verdict."""
    evaluation = concluded(done(0), exited(1, code), trails={1: Left(3, Stage.GATHER, ())})

    assert blamed(evaluation) == (Property.PROGRESS, 1, 3, Stage.GATHER)
    assert evaluation.divergence is not None
    assert evaluation.divergence.message == f"rank 1 sent no verdict: exit code {code}"
    assert evaluation.checks["progress"] == 1
    assert not evaluation.hung


def test_a_killed_rank_is_a_violation_where_its_trail_ends() -> None:
    evaluation = concluded(killed(0), done(1), trails={0: Left(0, Stage.NORM, ()), 1: Left(9, Stage.GATHER, ())})

    assert blamed(evaluation) == (Property.PROGRESS, 0, 0, Stage.NORM)
    assert evaluation.divergence is not None
    assert "signal 9 (SIGKILL)" in evaluation.divergence.message


def test_a_rank_that_left_no_trail_ended_before_the_first_step() -> None:
    assert blamed(concluded(killed(0))) == (Property.PROGRESS, 0, None, Stage.BUILD)


def test_a_rank_that_hangs_is_a_violation_and_said_to_hang() -> None:
    evaluation = concluded(done(0), timed_out(1), trails={1: Left(1, Stage.NORM, ())})

    assert blamed(evaluation) == (Property.PROGRESS, 1, 1, Stage.NORM)
    assert evaluation.hung
    assert evaluation.divergence is not None
    assert "still running when its time was up" in evaluation.divergence.message


def test_of_several_that_hang_alike_none_is_named() -> None:
    trails = {0: Left(0, Stage.COLLECT), 1: Left(1, Stage.NORM), 2: Left(1, Stage.NORM)}
    evaluation = concluded(done(0), timed_out(1), timed_out(2), trails=trails)

    assert blamed(evaluation) == (Property.PROGRESS, None, 1, Stage.NORM)
    assert evaluation.divergence is not None
    assert evaluation.divergence.message.startswith("ranks 1, 2 made no progress")


PEER_LOST = "Connection closed by peer"


@pytest.mark.parametrize(
    ("reports", "first_failed", "rank"),
    [
        # One died, the others lost their connections to it: whoever was noticed first.
        ([raised(0, Stage.REDUCE, PEER_LOST), raised(1, Stage.REDUCE, PEER_LOST), killed(2)], 2, 2),
        ([raised(0, Stage.REDUCE, PEER_LOST), raised(1, Stage.REDUCE, PEER_LOST), exited(2)], 0, 2),
        ([killed(0), raised(1, Stage.REDUCE, PEER_LOST), abandoned(2)], 0, 0),
        ([raised(0, Stage.REDUCE, PEER_LOST), abandoned(1), exited(2)], 2, 2),
        # Two died: the first one.
        ([exited(0, 1), killed(1), abandoned(2)], 1, 1),
        ([exited(0, 1), killed(1), abandoned(2)], 0, 0),
        ([abandoned(0), raised(1, Stage.REDUCE, PEER_LOST), killed(2)], 1, 2),
        # One raised: the others waited for it.
        ([abandoned(0), raised(1, Stage.REDUCE), abandoned(2)], 1, 1),
        ([abandoned(0), abandoned(1), raised(2, Stage.REDUCE)], 2, 2),
        # Nobody died or raised: who was still running, not who was ended because of that.
        ([done(0), abandoned(1), timed_out(2)], 2, 2),
    ],
)
def test_who_is_blamed(reports: Sequence[RankReport], first_failed: int, rank: int) -> None:
    trails: dict[int, Left] = dict.fromkeys(range(3), Left(0, Stage.REDUCE, ()))

    evaluation = concluded(*reports, first_failed=first_failed, trails=trails)

    assert blamed(evaluation) == (Property.PROGRESS, rank, 0, Stage.REDUCE)


@pytest.mark.parametrize("end", [RankEnd.KILLED, RankEnd.EXITED, RankEnd.TIMED_OUT, RankEnd.ABANDONED])
def test_a_difference_that_was_told_before_the_end_comes_first(end: RankEnd) -> None:
    """By the rank that then ended itself: the wrong value may well be why it died."""
    found = diverged(Property.GRADIENT, Stage.REDUCE, 1, rank=1)
    evaluation = concluded(done(0), silent(1, end, None, found), trails={1: Left(4, Stage.GATHER, ())})

    assert evaluation.divergence == found


@pytest.mark.parametrize("end", [RankEnd.KILLED, RankEnd.EXITED, RankEnd.TIMED_OUT])
def test_a_difference_that_another_rank_saw_comes_before_a_death(end: RankEnd) -> None:
    found = diverged(Property.GRADIENT, Stage.REDUCE, 1, rank=0)
    evaluation = concluded(done(0, divergence=found), silent(1, end), trails={1: Left(0, Stage.GATHER, ())})

    assert evaluation.divergence == found


def test_of_the_differences_seen_before_a_death_the_earliest_counts() -> None:
    late, early = (diverged(Property.WEIGHTS, Stage.GATHER, step, rank=step) for step in (1, 0))

    assert concluded(silent(0, RankEnd.KILLED, None, early), done(1, divergence=late)).divergence == early
    assert concluded(done(0, divergence=early), silent(1, RankEnd.KILLED, None, late)).divergence == early


# --- trails of ranks without a verdict --------------------------------------------------------------------------------


def call(kind: str, stage: Stage = Stage.REDUCE, step: int | None = 0, length: int = 8) -> Collective:
    return Collective(kind, "fp32", length, (0, 1), step, stage.value)


@pytest.mark.parametrize("end", [RankEnd.TIMED_OUT, RankEnd.KILLED, RankEnd.ABANDONED])
def test_ranks_that_called_different_things_are_told_by_their_trails(end: RankEnd) -> None:
    """Why they hang or die: each waits in a collective that the other never joins."""
    shared = call("all_reduce", step=0, stage=Stage.NORM)
    trails: dict[int, Left] = {
        0: Left(1, Stage.REDUCE, (shared, call("reduce_scatter", step=1))),
        1: Left(1, Stage.REDUCE, (shared, call("all_gather", step=1))),
    }

    evaluation = concluded(timed_out(0), silent(1, end), trails=trails)

    assert blamed(evaluation)[0] is Property.TRAFFIC
    assert blamed(evaluation)[2:] == (1, Stage.REDUCE)
    assert evaluation.divergence is not None
    assert "all_gather fp32[8]" in evaluation.divergence.message
    assert "reduce_scatter fp32[8]" in evaluation.divergence.message


def test_a_trail_is_compared_with_the_calls_in_a_verdict() -> None:
    said = verdict(0, collectives=(call("all_reduce"), call("all_gather")))
    trails: dict[int, Left] = {1: Left(0, Stage.REDUCE, (call("all_reduce"), call("all_gather", length=9)))}

    assert blamed(concluded(replied(said), timed_out(1), trails=trails))[0] is Property.TRAFFIC


def test_a_trail_that_only_ends_earlier_is_no_difference_of_calls() -> None:
    """The rank lacks the rest because it died."""
    said = verdict(0, collectives=(call("all_reduce"), call("all_gather")))
    trails: dict[int, Left] = {1: Left(0, Stage.REDUCE, (call("all_reduce"),))}

    evaluation = concluded(replied(said), killed(1), trails=trails)

    assert blamed(evaluation) == (Property.PROGRESS, 1, 0, Stage.REDUCE)


def test_a_trail_of_a_rank_that_sent_its_verdict_is_not_asked_for() -> None:
    """Its verdict says more; and a trail may already belong to another process."""

    def trails(rank: int) -> Left:
        assert rank == 1
        return Left(0, Stage.NORM, ())

    conclude(Outcome(2, (done(0), killed(1)), 0.0, 1), trails)


# --- the harness failed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [done(0), killed(0), done(0, divergence=diverged(Property.WEIGHTS, Stage.GATHER)), lacking(0)],
    ids=["done", "killed", "found a difference", "lacks the interface"],
)
def test_a_handler_that_raised_says_nothing_about_the_subject(other: RankReport) -> None:
    bug = silent(1, RankEnd.RAISED, "Traceback ...\nKeyError: 'a bug'")

    with pytest.raises(UndecidedError, match=r"the harness failed on rank 1:\nTraceback ...\nKeyError: 'a bug'"):
        concluded(other, bug)


def test_verdicts_that_do_not_fit_together_are_a_failure_of_the_harness() -> None:
    """Both were driven to the end, yet one of them looked at a step that the other did not."""
    with pytest.raises(UndecidedError):
        concluded(done(0, weights=(WeightsObservation(0, "a"),)), done(1))


def test_a_reply_that_is_no_verdict_is_a_failure_of_the_harness() -> None:
    with pytest.raises(UndecidedError):
        concluded(done(0), RankReport(1, RankEnd.REPLIED, b"\xc1", (), None, "", None))


# --- the fingerprint --------------------------------------------------------------------------------------------------


def fingerprint(**changes: Any) -> tuple[object, ...]:
    fields: dict[str, Any] = {"norms": (NormObservation(0, 0, "0x1"),), "weights": (WeightsObservation(0, "a"),)}
    reports = [done(rank, **fields) for rank in range(2)]
    if changes:
        reports[1] = done(1, **{**fields, **changes})
    return concluded(*reports).fingerprint


def test_two_runs_with_the_same_bits_have_one_fingerprint() -> None:
    """Whatever was printed, however long it took, and however often something was compared."""
    fields: dict[str, Any] = {"norms": (NormObservation(0, 0, "0x1"),), "weights": (WeightsObservation(0, "a"),)}
    reports = (
        replied(verdict(0, **fields, checks={"norm": 7}), output="at 12:01"),
        replied(verdict(1, **fields, oracle={"exact": 3}), output="at 12:02"),
    )

    assert conclude(Outcome(2, reports, 99.0, None), lambda _: NO_TRAIL).fingerprint == fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"norms": (NormObservation(0, 0, "0x2"),)},
        {"weights": (WeightsObservation(0, "b"),)},
        {"divergence": diverged(Property.MASTER, Stage.UPDATE, rank=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_bits_have_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize(("seen", "observation"), [("weights", WeightsObservation), ("norms", NormObservation)])
def test_bits_that_changed_on_all_ranks_alike_have_another_fingerprint(seen: str, observation: type) -> None:
    """Each run agrees with itself: only the comparison of the two shows it."""
    place = (0,) if seen == "weights" else (0, 0)
    runs = [concluded(*(done(rank, **{seen: (observation(*place, bits),)}) for rank in range(2))) for bits in "ab"]

    assert [run.conclusion for run in runs] == [Conclusion.HOLDS] * 2
    assert runs[0].fingerprint != runs[1].fingerprint


def test_violations_that_differ_in_their_place_have_different_fingerprints() -> None:
    found = [diverged(Property.MASTER, Stage.UPDATE, step, rank=0) for step in (0, 1)]

    assert len({concluded(done(0, divergence=divergence), done(1)).fingerprint for divergence in found}) == 2


def test_a_crash_is_like_any_other_crash() -> None:
    """Which rank a broken connection reaches first is chance."""
    prints = {
        concluded(killed(0), raised(1, Stage.REDUCE, PEER_LOST)).fingerprint,
        concluded(raised(0, Stage.NORM), abandoned(1)).fingerprint,
        concluded(done(0), timed_out(1)).fingerprint,
    }

    assert len(prints) == 1
    assert prints != {fingerprint()}


# --- what was printed -------------------------------------------------------------------------------------------------


def test_the_output_is_that_of_the_rank_of_the_divergence() -> None:
    first = replied(verdict(0), output="printed by 0")
    second = replied(verdict(1, divergence=diverged(Property.MASTER, Stage.UPDATE, rank=1)), output="printed by 1")

    assert concluded(first, second).output == "printed by 1"


def test_the_output_holds_what_was_raised_and_where_threads_were() -> None:
    assert concluded(raised(0, Stage.NORM, "planted")).output == "Traceback: planted"
    stuck = silent(0, RankEnd.TIMED_OUT, None, output="printed", stacks="File x, line 3")
    assert concluded(stuck).output == "printed\nwhere rank 0 was when it was stopped:\nFile x, line 3"


def test_nothing_is_shown_of_a_run_that_holds() -> None:
    assert concluded(replied(verdict(0), output="chatter")).output == ""


# --- the evaluator ----------------------------------------------------------------------------------------------------

SCENARIO = Scenario(
    world=2,
    seed=1,
    parameters=(Parameter("w", (2, 3)),),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(4), Part(False, (0, 1), ((), ())), Step()),
)
SUBJECT = SubjectSource("zero.py:Zero", "/somewhere/zero.py:Zero", {"factor": 2})


class CannedPool:
    """Stands for the ranks: answers a check of the subject and scenarios with what it is given."""

    backend = "gloo"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.incidents: list[str] = []
        self.check: Callable[[int], RankReport] = lambda rank: checked(rank, None)
        self.run_scenario: Callable[[int], RankReport] = done
        self.tasks: list[tuple[int, CheckSubject | RunScenario, float]] = []
        self.watches: list[Watch] = []
        self.recycled: list[int] = []

    def recycle(self, world: int) -> None:
        self.recycled.append(world)

    def home(self, world: int) -> int:
        return world

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch) -> Outcome:
        decoded = decode_task(task)
        self.watches.append(watch)
        self.tasks.append((world, decoded, timeout_s))
        answer = self.check if isinstance(decoded, CheckSubject) else self.run_scenario
        reports = tuple(answer(rank) for rank in range(world))
        failed = [report.rank for report in reports if report.end is not RankEnd.REPLIED]
        return Outcome(world, reports, 0.5, failed[0] if failed else None)


def checked(rank: int, problem: str | None) -> RankReport:
    return RankReport(rank, RankEnd.REPLIED, encode(SubjectCheck(problem)), (), None, "", None)


@pytest.fixture
def pool(tmp_path: Path) -> CannedPool:
    return CannedPool(tmp_path)


@pytest.fixture
def evaluator(pool: CannedPool) -> Evaluator:
    return Evaluator(SUBJECT, cast(RankPool, pool))


def test_the_subject_is_checked_once_a_world_and_then_driven(pool: CannedPool, evaluator: Evaluator) -> None:
    """By its absolute name and with its arguments; the scenario arrives as it was."""
    evaluations = [evaluator.evaluate(SCENARIO) for _ in range(2)]
    evaluator.prepare(2)
    evaluator.prepare(1)

    assert [evaluation.conclusion for evaluation in evaluations] == [Conclusion.HOLDS] * 2
    name = SubjectName("/somewhere/zero.py:Zero", {"factor": 2})
    assert [(world, task) for world, task, _ in pool.tasks] == [
        (2, CheckSubject(name)),
        (2, RunScenario(name, SCENARIO)),
        (2, RunScenario(name, SCENARIO)),
        (1, CheckSubject(name)),
    ]


def test_ranks_that_were_replaced_import_the_subject_anew(pool: CannedPool, evaluator: Evaluator) -> None:
    pool.run_scenario = killed
    evaluator.evaluate(SCENARIO)
    evaluator.evaluate(SCENARIO)

    assert [type(task) for _, task, _ in pool.tasks] == [CheckSubject, RunScenario] * 2


def test_a_silent_ranks_trail_is_read_from_the_pools_directory(pool: CannedPool, evaluator: Evaluator) -> None:
    Trail(pool.directory, 2, 0).enter(7, Stage.UPDATE)
    pool.run_scenario = killed

    assert blamed(evaluator.evaluate(SCENARIO)) == (Property.PROGRESS, 0, 7, Stage.UPDATE)


def test_a_subject_that_some_rank_cannot_use_is_bad_input(pool: CannedPool, evaluator: Evaluator) -> None:
    pool.check = lambda rank: checked(rank, "planted: no such class" if rank == 1 else None)

    with pytest.raises(UsageError, match="planted: no such class"):
        evaluator.evaluate(SCENARIO)
    assert len(pool.tasks) == 1
    with pytest.raises(UsageError):
        evaluator.prepare(2)


def test_a_subject_that_ends_its_rank_when_imported_is_bad_input(pool: CannedPool, evaluator: Evaluator) -> None:
    """Its last line is shown: mostly it says why."""
    pool.check = lambda rank: checked(0, None) if rank == 0 else replace_output(exited(1, 3), "one\nbad licence\n")

    with pytest.raises(UsageError, match=r"importing the subject ended rank 1: exit code 3 \(bad licence\)"):
        evaluator.prepare(2)


def test_a_crash_when_imported_is_told_by_its_first_line_and_not_by_the_list_of_modules(
    pool: CannedPool, evaluator: Evaluator
) -> None:
    said = (
        'Fatal Python error: Segmentation fault\n\n  File "a.py", line 1 in f\n\nExtension modules: numpy.a, torch.b\n'
    )
    pool.check = lambda rank: checked(0, None) if rank == 0 else replace_output(exited(1, 3), said)

    with pytest.raises(UsageError, match=r"exit code 3 \(Fatal Python error: Segmentation fault\)"):
        evaluator.prepare(2)


def replace_output(report: RankReport, output: str) -> RankReport:
    return RankReport(report.rank, report.end, report.reply, report.events, report.error, output, report.stacks)


def test_a_handler_that_raises_in_the_check_leaves_it_undecided(pool: CannedPool, evaluator: Evaluator) -> None:
    pool.check = lambda rank: silent(rank, RankEnd.RAISED, "KeyError: 'a bug'")

    with pytest.raises(UndecidedError, match="a bug"):
        evaluator.prepare(2)


def test_a_pool_that_cannot_work_leaves_it_undecided(
    pool: CannedPool, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(world: int, task: bytes, *, timeout_s: float, watch: Watch) -> Outcome:
        raise PoolError("the zygote is gone")

    monkeypatch.setattr(pool, "run", fails)

    with pytest.raises(UndecidedError, match="the zygote is gone"):
        evaluator.evaluate(SCENARIO)


def test_a_larger_scenario_may_take_longer_unless_a_limit_is_set(
    pool: CannedPool, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "patience", lambda: 1.0)
    large = replace(SCENARIO, parameters=(Parameter("w", (10**9,)),))
    for scenario in (SCENARIO, large):
        evaluator.evaluate(scenario)
    Evaluator(SUBJECT, cast(RankPool, pool), timeout_s=3.0, stall_s=0.5).evaluate(large)
    limits = [limit for _, task, limit in pool.tasks if isinstance(task, RunScenario)]

    assert BASE_TIMEOUT_S <= limits[0] < BASE_TIMEOUT_S + 1
    assert limits[1] > 1000
    assert limits[2] == 3.0
    stalls = [(watch.blocked_s, watch.computing_s) for watch in pool.watches]
    assert BLOCKED_S <= stalls[1][0] < BLOCKED_S + 1
    assert COMPUTING_S <= stalls[1][1] < COMPUTING_S + 1
    assert all(limit > 10 for limit in stalls[2])
    assert stalls[-1] == (0.5, 0.5)


def test_a_loaded_machine_has_more_time(
    pool: CannedPool, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "patience", lambda: 4.0)
    evaluator.evaluate(SCENARIO)

    assert pool.tasks[-1][2] >= 4 * BASE_TIMEOUT_S


def test_ranks_that_should_not_go_on_are_replaced(pool: CannedPool, evaluator: Evaluator) -> None:
    pool.run_scenario = lambda rank: done(rank, recycle="40 more threads" if rank else None, changed=("umask",))

    evaluation = evaluator.evaluate(SCENARIO)
    evaluator.evaluate(SCENARIO)

    assert evaluation.conclusion is Conclusion.HOLDS
    assert evaluation.recycled == "rank 1: 40 more threads"
    assert evaluation.changed == {"umask"}
    assert pool.recycled == [2, 2]
    assert sum(isinstance(task, CheckSubject) for _, task, _ in pool.tasks) == 2  # fresh ranks import it anew


def test_a_fault_that_never_struck_decides_nothing(pool: CannedPool, evaluator: Evaluator) -> None:
    fault = Kill(rank=1, step=0, stage=Stage.NORM)
    scenario = replace(SCENARIO, faults=(fault,))

    assert evaluator.evaluate(scenario).conclusion is Conclusion.UNHIT

    pool.run_scenario = lambda rank: done(rank, hits=(0,) if rank else ())
    evaluation = evaluator.evaluate(scenario)
    assert (evaluation.conclusion, evaluation.hits) == (Conclusion.HOLDS, {1: (0,)})


# --- sums that are not added in the predicted order ------------------------------------------------------------------


def test_a_run_with_an_unresolved_sum_decides_nothing_whatever_else_was_said() -> None:
    """What other ranks found after it, that a rank raised or died: all may come of a wrong reference."""
    for other in (done(1), raised(1, Stage.GATHER), killed(1)):
        evaluation = concluded(done(0, unresolved=True), other)

        assert (evaluation.conclusion, evaluation.divergence) == (Conclusion.UNRESOLVED, None)


def unresolved_at_first(pool: CannedPool, then: Callable[[int], RankReport]) -> None:
    def run(rank: int) -> RankReport:
        task = pool.tasks[-1][1]
        assert isinstance(task, RunScenario)
        return then(rank) if task.exchanges else done(rank, unresolved=rank == 1)

    pool.run_scenario = run


def test_an_unresolved_run_is_followed_by_one_in_which_the_ranks_search_together(
    pool: CannedPool, evaluator: Evaluator
) -> None:
    """And by no other without: what adds in an order of its own does so in other scenarios too."""
    unresolved_at_first(pool, lambda rank: done(rank, searched=True))

    assert [evaluator.evaluate(SCENARIO).conclusion for _ in range(2)] == [Conclusion.HOLDS] * 2
    runs = [task.exchanges for _, task, _ in pool.tasks if isinstance(task, RunScenario)]
    assert runs == [False, True, True]


def test_a_sum_that_is_as_predicted_in_the_second_run_alone_is_not_determined(
    pool: CannedPool, evaluator: Evaluator
) -> None:
    unresolved_at_first(pool, done)

    evaluation = evaluator.evaluate(SCENARIO)

    assert evaluation.conclusion is Conclusion.VIOLATED
    assert evaluation.divergence is not None
    assert (evaluation.divergence.property, evaluation.divergence.stage) == (Property.DETERMINISM, Stage.REDUCE)


def test_what_the_second_run_finds_is_the_verdict(pool: CannedPool, evaluator: Evaluator) -> None:
    unresolved_at_first(pool, killed)

    assert blamed(evaluator.evaluate(SCENARIO))[:2] == (Property.PROGRESS, 0)
