"""What `train` refuses before it starts a rank, and what a person reads of its result."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.report.console import BOUND_LINE
from harness.report.result import Failure
from harness.subjects.source import SubjectSource
from harness.train.campaign import StepRecord, TrainOptions, TrainResult, replay_command, run_training
from harness.train.show import TrainProgress, loss_curves, print_result, record_line
from harness.verdict import Divergence, Property, Stage


def _record(step: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step, "num_parts": 2, "sharded_loss": 5.0 - step / 10, "unsharded_loss": 5.0 - step / 10, "norm": 1.5,
        "unsharded_norm": 1.5, "norm_ok": True, "coefficient": 1.0, "spilled": True, "equal_bits": True,
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


def _result(records: list[StepRecord], **changes: Any) -> TrainResult:
    fields: dict[str, Any] = {
        "verdict": "holds", "subject": "zero2", "backend": "gloo", "worlds": (2,), "seed": 4, "steps": 20,
        "text": "a.txt", "seconds": 1.0, "records": tuple(records),
    }  # fmt: skip
    return TrainResult(**{**fields, **changes})


def _printed(result: TrainResult) -> str:
    stream = io.StringIO()
    print_result(stream, result)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world": 65}, r"--world 65: expected 1 to 64 ranks"),
        ({"world": 0}, r"--world 0"),
        ({"steps": 0}, r"--steps 0: expected 1 to"),
        ({"seed": 2**63}, r"--seed 9223372036854775808: expected 0 to"),
        ({"text": Path("/nonexistent/a.txt")}, r"no such file"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_bad_usage_before_any_rank_is_started(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_training(TrainOptions(**changes), lambda record: None)


def test_a_text_too_short_for_one_step_is_bad_usage(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("to be or not to be")

    with pytest.raises(UsageError, match=r"short\.txt: 18 bytes, but the batches of one step take 3120"):
        run_training(TrainOptions(text=path), lambda record: None)


def test_the_replay_command_names_all_that_was_chosen() -> None:
    subject = SubjectSource("z.py:Z", "/somewhere/z z.py:Z", {"overlap": True})
    options = TrainOptions(subject=subject, world=1, steps=9, seed=5, text=Path("t.txt"))

    assert replay_command(options) == (
        "python -m harness train --world 1 --steps 9 --seed 5 --text t.txt --subject '/somewhere/z z.py:Z' "
        "--subject-arg overlap=true"
    )


def test_equal_curves_are_drawn_as_one_from_the_highest_loss_to_the_lowest() -> None:
    lines = loss_curves([_record(step) for step in range(20)])

    marks = "".join(lines[1:-1])
    assert marks.count("*") == 20
    assert "s" not in marks
    assert "5.000 |*" in lines[1]
    assert lines[-2].split("|")[1].rstrip().endswith("*")
    assert "3.100" in lines[-2]


def test_curves_that_part_are_drawn_with_a_mark_each() -> None:
    records = [_record(step, unsharded_loss=5.0 + step) for step in range(4)]

    marks = "".join(line.split("|")[1] for line in loss_curves(records)[1:-1])

    assert sorted(marks.replace(" ", "")) == ["*", "s", "s", "s", "u", "u", "u"]


@pytest.mark.parametrize("records", [[], [_record(0)], [_record(0, sharded_loss=float("nan")), _record(1)]], ids=len)
def test_fewer_than_two_finite_losses_are_no_curve(records: list[StepRecord]) -> None:
    assert loss_curves(records) == []


def test_a_flat_curve_is_drawn() -> None:
    assert "*" in "".join(loss_curves([_record(step, sharded_loss=2.0, unsharded_loss=2.0) for step in range(3)])[1:])


def test_the_result_says_the_verdict_how_many_steps_were_equal_and_both_losses() -> None:
    printed = _printed(_result([_record(step) for step in range(20)]))

    assert "holds: zero2 on gloo, world 2, trained on a.txt, equal bits at 20 of 20 steps in 1.0 s, seed 4" in printed
    assert "sharded      loss 5.000000 to 3.100000" in printed
    assert "unsharded    loss 5.000000 to 3.100000" in printed


def test_steps_that_were_only_within_the_bound_are_said_apart_and_explained() -> None:
    bound = [_record(step, equal_bits=False, within_bound=True) for step in (3, 7, 8)]
    records = [_record(step) for step in range(3)]

    printed = _printed(_result([*records, *bound]))

    said = "equal bits at 3 of 20 steps, 3 within the rounding bound in 1.0 s, seed 4"
    assert f"holds: zero2 on gloo, world 2, trained on a.txt, {said}" in printed.splitlines()
    assert BOUND_LINE in printed.splitlines()


def test_a_run_of_equal_bits_says_nothing_of_a_bound() -> None:
    """Nor does one in which a step differs beyond it."""
    printed = _printed(_result([_record(0), _record(1, equal_bits=False)]))

    assert "equal bits at 1 of 20 steps in 1.0 s" in printed
    assert "bound" not in printed


def test_a_failure_is_printed_with_its_replay_command_last() -> None:
    failure = Failure(property="weights", step=3, parameter="head.weight", replay="python -m harness train --world 2")

    printed = _printed(_result([_record(0)], verdict="violated", failure=failure)).rstrip().splitlines()

    assert printed[-1].split() == ["replay", "python", "-m", "harness", "train", "--world", "2"]
    assert any(line.split() == ["parameter", "head.weight"] for line in printed)


def test_progress_without_a_terminal_is_some_plain_lines_and_always_the_last_step() -> None:
    stream = io.StringIO()

    with TrainProgress(stream, 200) as progress:
        for step in range(200):
            progress(_record(step))

    lines = stream.getvalue().splitlines()
    assert 15 <= len(lines) <= 25
    assert lines[-1].startswith("step  199  spilled 2  loss ")
    assert "\x1b" not in stream.getvalue()


def test_a_step_that_differs_is_always_shown_with_what_differs() -> None:
    stream = io.StringIO()
    divergence = Divergence(property=Property.NORM, stage=Stage.NORM, message="off")

    with TrainProgress(stream, 200) as progress:
        progress(_record(7, divergence=divergence, equal_bits=False, norm_ok=False))

    assert "UNPROVEN" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("DIFFERS: norm at norm")


def test_a_run_with_muon_says_whose_parameters_are_muons_and_nothing_of_spills() -> None:
    printed = _printed(_result([_record(0, spilled=None), _record(1, spilled=None)], muon=("a.weight", "b.weight")))

    assert "  Muon         a.weight, b.weight; AdamW: all other parameters\n" in printed
    assert record_line(_record(3, spilled=None)).startswith("step    3  parts   2  loss ")
    assert "AdamW: all other" not in _printed(_result([_record(0)]))
