"""Whatever a subject does, driving it ends in a verdict that can be sent: never in an error of the harness.

One rank needs no process group, so the whole driver runs here, without other processes.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor, nn

from harness.drive.driver import Driver
from harness.drive.tasks import encode
from harness.drive.trail import Trail
from harness.faults.museum.plain import PlainZero
from harness.launch.rank import RankContext
from harness.launch.tap import CollectiveLog
from harness.scenario.model import AdamW, Build, Clip, Discard, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.builtin import CLASS_SUBJECT
from harness.verdict import Property, RankStatus, RankVerdict, Stage

HELD = Part(False, (0,), ((),))
SCENARIO = Scenario(
    world=1,
    seed=0,
    parameters=(Parameter("w", (3,)), Parameter("v", (2, 2))),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(4), HELD, Step(), Part(True, (0,), ((),)), HELD, Clip(0.5), Step(), HELD, Discard()),
)


def drive(cls: type, directory: Path) -> RankVerdict:
    """The verdict as it reaches the parent."""
    events: list[bytes] = []
    context = RankContext(0, 1, "gloo", "cpu", directory, CollectiveLog(), events.append)
    verdict = Driver(context, cls, {}, CLASS_SUBJECT, SCENARIO, Trail(directory, 1, 0)).run()
    return msgspec.msgpack.decode(encode(verdict), type=RankVerdict)


def found(verdict: RankVerdict) -> tuple[Property, Stage] | None:
    return None if verdict.divergence is None else (verdict.divergence.property, verdict.divergence.stage)


def test_a_right_class_holds(tmp_path: Path) -> None:
    """What the others below are variants of."""
    verdict = drive(PlainZero, tmp_path)

    assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None)
    for checked in ("weights", "master", "moments", "gradient", "norm", "clip", "spill", "intake", "storage"):
        assert verdict.checks[checked] > 0


def test_a_driver_and_what_it_drove_end_with_the_scenario(tmp_path: Path) -> None:
    """Not with the next collection of garbage: on a long list that would be twice the memory."""
    gc.collect()
    gc.disable()
    try:
        context = RankContext(0, 1, "gloo", "cpu", tmp_path, CollectiveLog(), lambda event: None)
        driver = Driver(context, PlainZero, {}, CLASS_SUBJECT, SCENARIO, Trail(tmp_path, 1, 0))
        driver.run()
        left = [weakref.ref(driver), weakref.ref(driver.subject), weakref.ref(driver.reference)]
        del driver
        assert [reference() for reference in left] == [None] * 3
    finally:
        gc.enable()


class TakesTheListApart(PlainZero):
    """Right: the list it is given is its own, to sort, empty or add to."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(list(params), rank, world, bucket)
        params.clear()


def test_the_list_of_parameters_is_the_subjects_to_change(tmp_path: Path) -> None:
    verdict = drive(TakesTheListApart, tmp_path)

    assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None)


class Norm(PlainZero):
    returned: ClassVar[Any]

    def grad_sq_norm(self) -> Tensor:
        return self.returned  # type: ignore[no-any-return]


ODD_NORMS = {
    "None": None,
    "text": "3.0",
    "no element": torch.empty(0),
    "two elements": torch.ones(2),
    "int64": torch.tensor(3),
    "uint8": torch.tensor(1, dtype=torch.uint8),
    "bool": torch.tensor(True),
    "complex": torch.tensor(1 + 0j, dtype=torch.complex128),
}


@pytest.mark.parametrize("returned", ODD_NORMS.values(), ids=ODD_NORMS.keys())
def test_a_norm_that_is_none_is_the_subjects_fault(returned: object, tmp_path: Path) -> None:
    verdict = drive(type("Odd", (Norm,), {"returned": returned}), tmp_path)

    assert verdict.divergence is not None
    assert verdict.divergence.stage is Stage.NORM
    assert verdict.divergence.property in (Property.NORM, Property.PROGRESS)


class NoMasterGradient(PlainZero):
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.master.grad = None


class MasterGradientInFp64(PlainZero):
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.master.grad = None
        self.master.grad_dtype = None
        self.master.grad = torch.ones_like(self.master, dtype=torch.float64)


class MasterGoesAway(PlainZero):
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        del self.master


class ShortMaster(PlainZero):
    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self.master = nn.Parameter(self.master.detach()[:-1].clone())


class HasGradRaises(PlainZero):
    """Before there is anything to say."""

    @property
    def has_grad(self) -> bool:
        raise RuntimeError("planted: nothing collected yet")


class BucketsRaise(PlainZero):
    @property
    def buckets(self) -> object:
        raise RuntimeError("planted: not known yet")


class SparseMasterGradient(PlainZero):
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.master.grad = torch.ones_like(self.master, requires_grad=False).to_sparse()


class ExpandedMasterGradient(PlainZero):
    """One element seen as many: it cannot be scaled in place."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.master.grad = torch.ones(1).expand(self.master.shape)


class MasterFreed(PlainZero):
    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.master.grad.untyped_storage().resize_(0)  # type: ignore[union-attr]


class SpillsIsHuge(PlainZero):
    def collect(self, more: bool) -> None:
        super().collect(more)
        self.spills = 10**400


class SpillsIsNone(PlainZero):
    def collect(self, more: bool) -> None:
        super().collect(more)
        self.spills = None  # type: ignore[assignment]


class CutsWeightsShort(PlainZero):
    def gather_params(self) -> None:
        super().gather_params()
        self.params[0].data = self.params[0].data[:1]


class QuantisesWeights(PlainZero):
    def gather_params(self) -> None:
        super().gather_params()
        self.params[0].data = self.params[0].data.to(torch.int8)


class ForgetsItsParameters(PlainZero):
    def gather_params(self) -> None:
        super().gather_params()
        self.params.clear()


@pytest.mark.parametrize(
    ("cls", "stages"),
    [
        (NoMasterGradient, {Stage.REDUCE}),
        (MasterGradientInFp64, {Stage.REDUCE}),
        (MasterGoesAway, {Stage.NORM}),
        (ShortMaster, {Stage.BUILD}),
        (HasGradRaises, {Stage.BUILD, Stage.COLLECT}),
        (BucketsRaise, {Stage.BUILD}),
        (SpillsIsNone, {Stage.COLLECT}),
        (SpillsIsHuge, {Stage.COLLECT}),
        (SparseMasterGradient, {Stage.REDUCE}),
        (ExpandedMasterGradient, {Stage.REDUCE, Stage.NORM}),
        (MasterFreed, {Stage.REDUCE}),
        (CutsWeightsShort, {Stage.GATHER}),
        (QuantisesWeights, {Stage.GATHER}),
        (ForgetsItsParameters, {Stage.COLLECT}),
    ],
)
def test_odd_state_is_a_violation_where_it_shows(cls: type, stages: set[Stage], tmp_path: Path) -> None:
    verdict = drive(cls, tmp_path)

    assert verdict.divergence is not None
    assert verdict.divergence.stage in stages


class LocalError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("planted: no text")


@pytest.mark.parametrize(
    "error",
    [ValueError("planted"), SystemExit(0), LocalError(), AssertionError(), BaseException("planted"), StopIteration()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    ("method", "stage"),
    [
        ("__init__", Stage.BUILD),
        ("collect", Stage.COLLECT),
        ("reduce_scatter", Stage.REDUCE),
        ("grad_sq_norm", Stage.NORM),
        ("gather_params", Stage.GATHER),
        ("discard", Stage.COLLECT),
    ],
)
def test_whatever_a_method_raises_is_told_with_its_name(
    method: str, stage: Stage, error: BaseException, tmp_path: Path
) -> None:
    def raises(self: object, *_: object, **__: object) -> None:
        raise error

    verdict = drive(type("Raises", (PlainZero,), {method: raises}), tmp_path)

    assert verdict.status is RankStatus.RAISED
    assert found(verdict) == (Property.PROGRESS, stage)
    assert verdict.divergence is not None
    assert verdict.divergence.message.startswith(f"Raises.{method} raised ")
    assert type(error).__name__ in verdict.divergence.message
    assert "Traceback" in (verdict.detail or "")


def test_not_implemented_is_no_violation_but_outside_its_space(tmp_path: Path) -> None:
    def refuses(self: object, more: bool) -> None:
        raise NotImplementedError("planted: no spills")

    verdict = drive(type("Refuses", (PlainZero,), {"_begin_spill": lambda self: refuses(self, True)}), tmp_path)

    assert verdict.status is RankStatus.UNSUPPORTED
    # Where it was, in case that other ranks do not refuse.
    assert verdict.divergence is not None
    assert (verdict.divergence.property, verdict.divergence.stage) == (Property.PROGRESS, Stage.COLLECT)
    assert "planted: no spills" in (verdict.detail or "")


def test_a_message_that_is_no_unicode_can_be_sent(tmp_path: Path) -> None:
    """It may quote what ``os.fsdecode`` makes of odd bytes in a file's name."""

    def raises(self: object) -> None:
        raise ValueError("planted: \udcff")

    verdict = drive(type("Odd", (PlainZero,), {"reduce_scatter": raises}), tmp_path)

    assert found(verdict) == (Property.PROGRESS, Stage.REDUCE)
    assert "planted: " in (verdict.detail or "")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("master", [[1.0]]),
        ("master", torch.zeros(7)),
        ("master", nn.Parameter(torch.zeros(7, dtype=torch.float64))),
        ("master", nn.Parameter(torch.zeros(1, 7))),
    ],
    ids=["a list", "no parameter", "fp64", "2-D"],
)
def test_a_master_of_another_kind_is_no_interface(attribute: str, value: object, tmp_path: Path) -> None:
    def built(self: Any, params: list[nn.Parameter], rank: int, world: int, bucket: int) -> None:
        PlainZero.__init__(self, params, rank, world, bucket)
        delattr(self, attribute)
        setattr(self, attribute, value)

    verdict = drive(type("Odd", (PlainZero,), {"__init__": built}), tmp_path)

    assert verdict.status is RankStatus.INTERFACE
    assert "Odd.master must be a 1-D fp32 nn.Parameter" in (verdict.detail or "")


def test_a_missing_attribute_is_named(tmp_path: Path) -> None:
    def built(self: Any, params: list[nn.Parameter], rank: int, world: int, bucket: int) -> None:
        PlainZero.__init__(self, params, rank, world, bucket)
        del self.spills

    verdict = drive(type("Odd", (PlainZero,), {"__init__": built}), tmp_path)

    assert verdict.status is RankStatus.INTERFACE
    assert verdict.detail == "Odd has no attribute spills after construction"
