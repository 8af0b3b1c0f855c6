"""What `train` concludes from the ranks' reports: canned ones here, so that every odd combination can be had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from harness.launch.outcome import Outcome, PoolError, RankEnd, RankReport, Watch
from harness.launch.pool import RankPool
from harness.train.campaign import TrainOptions, TrainResult, run_training
from harness.train.messages import RunStep, StepReport, decode_task, encode
from harness.verdict import Divergence, NormObservation, Property, RankStatus, Stage, WeightsObservation

Reports = Callable[[int, int], StepReport]  # of a rank and a step


class CannedPool:
    """Stands for the ranks: answers each step with reports made here."""

    def __init__(self, directory: Path, report: Reports) -> None:
        self.directory = directory
        self.tasks: list[RunStep] = []
        self._report = report

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch) -> Outcome:
        del timeout_s, watch
        self.tasks.append(decode_task(task))
        ranks = []
        for rank in range(world):
            report = self._report(rank, self.tasks[-1].step)
            end = RankEnd.REPLIED if report.status is RankStatus.DONE else RankEnd.BROKEN
            ranks.append(RankReport(rank, end, encode(report), (), None, "", None))
        return Outcome(world, tuple(ranks), 0.1, None)


def _report(rank: int, step: int, **changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "rank": rank,
        "status": RankStatus.DONE,
        "checks": {"gradient": 1, "spill": 1, "norm": 2, "weights": 1},
        "norms": (NormObservation(step, 0, "0x1"), NormObservation(step, 1, "0x1")),
        "weights": (WeightsObservation(step, "abc"),),
        "losses": (2.0,),
        "unsharded_losses": (2.0, 2.0),
        "norm_squared": 4.0,
        "unsharded_norm_squared": 4.0,
        "norm_ok": True,
    }
    return StepReport(**{**fields, **changes})


def _divergence(stage: Stage, prop: Property = Property.GRADIENT, step: int = 0) -> Divergence:
    return Divergence(property=prop, stage=stage, message="differs", rank=1, step=step, parameter="p")


@pytest.fixture
def train(tmp_path: Path) -> Callable[[Reports], TrainResult]:
    def run(report: Reports) -> TrainResult:
        pool = CannedPool(tmp_path, report)
        result = run_training(TrainOptions(world=2, steps=3), lambda record: None, pool=cast(RankPool, pool))
        assert [task.step for task in pool.tasks] == list(range(len(pool.tasks)))
        assert [task.setup is not None for task in pool.tasks] == [True] + [False] * (len(pool.tasks) - 1)
        return result

    return run


Train = Callable[[Reports], TrainResult]


def test_equal_reports_of_every_step_hold(train: Train) -> None:
    result = train(_report)

    assert (result.verdict, result.reason, len(result.records)) == ("holds", None, 3)
    assert result.records[0].norm == 2.0


@pytest.mark.parametrize("missing", ["gradient", "spill", "norm", "weights"])
def test_a_rank_that_compared_nothing_makes_the_run_undecided(train: Train, missing: str) -> None:
    checks = {name: 1 for name in ("gradient", "spill", "norm", "weights") if name != missing}

    result = train(lambda rank, step: _report(rank, step, checks=checks if rank == 1 else {**checks, missing: 1}))

    assert (result.verdict, result.failure) == ("unknown", None)
    assert str(result.reason).endswith(f"rank 1 compared nothing for {missing}")


def test_a_divergence_of_a_rank_is_a_violation_and_the_last_record(train: Train) -> None:
    def report(rank: int, step: int) -> StepReport:
        found = _divergence(Stage.GATHER, Property.WEIGHTS, step) if (rank, step) == (1, 1) else None
        return _report(rank, step, divergence=found)

    result = train(report)

    assert result.verdict == "violated"
    assert [record.equal_bits for record in result.records] == [True, False]
    assert result.failure is not None
    assert (result.failure.property, result.failure.step, result.failure.parameter) == ("weights", 1, "p")


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_step_judged_by_the_bound_on_any_rank_has_no_equal_bits(train: Train, ranks: tuple[int, ...]) -> None:
    """It is no violation, and says nothing of the steps before and after."""

    def report(rank: int, step: int) -> StepReport:
        return _report(rank, step, oracle={"exact": 1, "bound": 2} if step == 1 and rank in ranks else {"ordered": 3})

    result = train(report)

    assert (result.verdict, result.failure) == ("holds", None)
    assert [record.equal_bits for record in result.records] == [True, False, True]
    assert [record.within_bound for record in result.records] == [False, True, False]


def test_a_bound_that_judged_nothing_leaves_equal_bits(train: Train) -> None:
    result = train(lambda rank, step: _report(rank, step, oracle={"ordered": 1, "bound": 0, "loose": 1}))

    assert [(record.equal_bits, record.within_bound) for record in result.records] == [(True, False)] * 3


def test_a_divergence_beyond_the_bound_is_a_violation_too(train: Train) -> None:
    result = train(lambda rank, step: _report(rank, step, oracle={"bound": 1}, divergence=_divergence(Stage.REDUCE)))

    assert result.verdict == "violated"
    assert [(record.equal_bits, record.divergence is None) for record in result.records] == [(False, False)]


def test_ranks_with_different_norms_are_a_violation(train: Train) -> None:
    norms = (NormObservation(0, 0, "0x2"), NormObservation(0, 1, "0x1"))

    result = train(lambda rank, step: _report(rank, step, norms=norms) if rank == 1 else _report(rank, step))

    assert result.verdict == "violated"
    assert result.failure is not None
    assert (result.failure.property, result.failure.rank) == ("norm", 1)
    assert not result.records[0].norm_ok


def test_ranks_with_different_weights_are_a_violation(train: Train) -> None:
    result = train(lambda rank, step: _report(rank, step, weights=(WeightsObservation(step, f"digest {rank}"),)))

    assert result.verdict == "violated"
    assert result.failure is not None
    assert result.failure.property == "agreement"


@pytest.mark.parametrize(
    ("stage", "verdict"), [(Stage.COLLECT, "violated"), (Stage.REDUCE, "unknown"), (Stage.GATHER, "unknown")]
)
def test_passes_that_do_not_repeat_excuse_what_differs_later_but_not_before(
    train: Train, stage: Stage, verdict: str
) -> None:
    doubt = "step 0: passes differ"
    result = train(lambda rank, step: _report(rank, step, unrepeatable=doubt, divergence=_divergence(stage)))

    assert result.verdict == verdict


def test_passes_that_do_not_repeat_make_the_run_undecided(train: Train) -> None:
    result = train(lambda rank, step: _report(rank, step, unrepeatable="step 0: passes differ" if rank else None))

    assert (result.verdict, result.failure) == ("unknown", None)
    assert str(result.reason).startswith("step 0: passes differ")
    assert "cannot be compared" in str(result.reason)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_recorded_and_undecided(train: Train, loss: float) -> None:
    result = train(lambda rank, step: _report(rank, step, losses=(loss,), unsharded_losses=(loss, loss)))

    assert result.verdict == "unknown"
    assert len(result.records) == 1
    assert f"loss {loss}" in str(result.reason)


def test_a_subject_that_refuses_the_run_leaves_it_undecided(train: Train) -> None:
    result = train(
        lambda rank, step: _report(rank, step, status=RankStatus.UNSUPPORTED, detail="NotImplementedError: too long")
    )

    assert (result.verdict, result.failure) == ("unknown", None)
    assert "too long" in str(result.reason)


def test_a_pool_that_cannot_work_leaves_the_run_undecided(train: Train) -> None:
    def report(rank: int, step: int) -> StepReport:
        raise PoolError("the ranks did not join")

    result = train(report)

    assert (result.verdict, result.reason, result.records) == ("unknown", "the ranks did not join", ())
