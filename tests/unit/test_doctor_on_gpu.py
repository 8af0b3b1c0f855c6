"""What `doctor` measures and says of ranks on GPUs, as far as that can be seen without one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from harness.doctor import numerics, readings, trees
from harness.doctor.findings import Verdict
from harness.doctor.messages import AdamWReport, CpuReport, MeasureAdamW, decode_report, encode
from harness.oracles import order
from tests.unit.test_doctor import ADAMW, CALL, ORDER

TASK = MeasureAdamW(num_cases=1, seed=3)


def changed(report: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(report, **fields)


class Gpu:
    """Stands in for a device: what is moved there stays on the CPU, but the report says how it compares with it."""

    type = "cuda"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of which there is less."""
    monkeypatch.setattr(numerics, "_SHORTEST", 500)
    monkeypatch.setattr(numerics, "_LONGEST", 800)
    monkeypatch.setattr(numerics, "_SPECIAL_ELEMENTS", 200)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    real = Tensor.to
    monkeypatch.setattr(
        Tensor, "to", lambda tensor, *where: tensor if isinstance(where[0], Gpu) else real(tensor, *where)
    )
    return Gpu()


def test_on_the_cpu_nothing_is_compared_with_it() -> None:
    assert numerics.measure_adamw(TASK).on_cpu is None


def test_a_gpu_that_rounds_like_the_cpu_is_equal(as_on_a_gpu: Any) -> None:
    report = numerics.measure_adamw(TASK, as_on_a_gpu)
    assert report.on_cpu == CpuReport()
    assert decode_report(encode(report)) == report
    assert readings.read_adamw_on_cpu(report).verdict is Verdict.OK


def test_elements_that_come_out_otherwise_on_a_gpu_are_counted(
    as_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(self: Any) -> Any:
        self.weights[:2].view(torch.int32).bitwise_xor_(1)
        return self

    monkeypatch.setattr(numerics._Trained, "on_cpu", fetched)
    report = numerics.measure_adamw(TASK, as_on_a_gpu)
    assert report.on_cpu is not None
    assert (report.on_cpu.differing, report.on_cpu.cases) == (2, 1)
    assert 1 <= report.on_cpu.special_differing <= 2  # one of the two may be nan on both
    finding = readings.read_adamw_on_cpu(report)
    assert finding.verdict is Verdict.NOTE
    assert "elements differ in 1 of 1 cases" in finding.measured
    assert not finding.relied_on


def test_without_the_comparison_nothing_is_said() -> None:
    assert isinstance(ADAMW, AdamWReport)
    assert readings.read_adamw_on_cpu(ADAMW).verdict is Verdict.UNKNOWN


# --- NCCL's order -----------------------------------------------------------------------------------------------------

REVEALED = trees.Revealed((((0, 1), 2), None, ((1, 2), 0)), np.array([0, 0, 1, 2], np.intp))


def test_only_elements_with_a_fixed_order_can_be_added_in_it() -> None:
    assert trees.fixed(REVEALED).tolist() == [True, True, False, True]
    found = trees.as_order(REVEALED, 3)
    assert found.trees == (((0, 1), 2), order.fold(range(3)), ((1, 2), 0))
    assert trees.score(REVEALED, found) == (3, 1, 4)
    assert trees.fixed(trees.Revealed((), np.zeros(0, np.intp))).tolist() == []


def test_of_nccl_no_order_is_expected() -> None:
    reports = [changed(ORDER, calls=(changed(CALL, predicted=20, no_tree=4),))]
    gloo, nccl = readings.read_order(3, reports), readings.read_order(3, reports, "nccl")
    assert (gloo.verdict, nccl.verdict) == (Verdict.PROBLEM, Verdict.NOTE)
    assert "probing finds an order of 83.33 % of 24 elements" in nccl.measured
    assert "4 added in no fixed order" in nccl.measured
    assert "bound of any" in nccl.meaning


def test_sums_of_nccl_that_probing_does_not_explain_are_a_note() -> None:
    wrong = {3: [changed(ORDER, calls=(changed(CALL, sums_wrong=1),))]}
    assert readings.read_sums(wrong).verdict is Verdict.PROBLEM
    assert readings.read_sums(wrong, "nccl").verdict is Verdict.NOTE
    assert "nccl's" in readings.read_sums(wrong, "nccl").measured
    right = readings.read_sums({3: [ORDER]}, "nccl")
    assert right.verdict is Verdict.OK
    assert "reproduces nccl's sums" in right.meaning
