"""How faults strike: where, how often, and what a collective is given. Collectives are made up here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from harness.drive import trail
from harness.drive.driver import Driver
from harness.drive.record import Record
from harness.drive.trail import Trail
from harness.faults.inject import InjectedFault, Injector
from harness.faults.language import Corrupt, Delay, Duplicate, Fault, Raise, Skip, Slow
from harness.faults.museum.plain import PlainZero
from harness.launch.rank import RankContext
from harness.launch.tap import CollectiveLog, PendingCollective
from harness.scenario.model import AdamW, Build, Discard, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.builtin import CLASS_SUBJECT
from harness.verdict import Property, RankStatus, RankVerdict, Stage

HELD = Part(False, (0,), ((),))
SCENARIO = Scenario(
    world=1,
    seed=0,
    parameters=(Parameter("w", (3,)),),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(4), HELD, Step(), HELD, Discard(), HELD, Step()),
)


def context_in(directory: Path) -> RankContext:
    return RankContext(0, 1, "gloo", "cpu", directory, CollectiveLog(), lambda event: None)


class Struck:
    """An injector of rank 0, and the calls it lets through."""

    def __init__(self, directory: Path, *faults: Fault) -> None:
        self.record = Record(context_in(directory), SCENARIO, Trail(directory, 1, 0))
        self.record.enter(0, Stage.REDUCE)
        self.injector = Injector(faults, 0, self.record)
        self.calls: list[inspect.BoundArguments] = []

    def call(self, function: Callable[..., Any], kind: str, contribution: str | None, *args: Any, **kwargs: Any) -> Any:
        """What the caller of a collective gets in return."""

        def through(*args: Any, **kwargs: Any) -> str:
            self.calls.append(signature.bind(*args, **kwargs))
            return f"call {len(self.calls)}"

        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
        return self.injector.intercept(PendingCollective(function.__name__, kind, contribution, bound, (0, 1), through))

    def all_reduce(self, tensor: Tensor, **kwargs: Any) -> Any:
        return self.call(dist.all_reduce, "all_reduce", "tensor", tensor, **kwargs)

    @property
    def hits(self) -> tuple[int, ...]:
        return self.record.verdict(RankStatus.DONE, None).hits


# --- where ------------------------------------------------------------------------------------------------------------


def test_only_the_named_collective_of_the_named_stage_of_the_named_step(tmp_path: Path) -> None:
    struck = Struck(tmp_path, Skip(rank=0, step=1, stage=Stage.REDUCE, collective=1))
    returned = []
    for step, stage in ((0, Stage.REDUCE), (1, Stage.COLLECT), (1, Stage.REDUCE), (1, Stage.NORM)):
        struck.record.enter(step, stage)
        returned += [struck.all_reduce(torch.ones(1)) is None for _ in range(3)]

    assert [index for index, skipped in enumerate(returned) if skipped] == [7]
    assert len(struck.calls) == 11
    assert struck.hits == (0,)


def test_a_fault_of_another_rank_does_not_strike(tmp_path: Path) -> None:
    struck = Struck(tmp_path, Skip(rank=1, step=0, stage=Stage.REDUCE, collective=0))

    assert struck.all_reduce(torch.ones(1)) == "call 1"
    assert struck.hits == ()


def test_without_a_number_it_strikes_at_the_subjects_first_call_in_the_stage_once(tmp_path: Path) -> None:
    struck = Struck(tmp_path, Raise(rank=0, step=0, stage=Stage.NORM))
    struck.injector.subject_called()
    struck.record.enter(0, Stage.NORM)
    with pytest.raises(InjectedFault):
        struck.injector.subject_called()
    struck.injector.subject_called()

    assert struck.hits == (0,)


def test_slow_is_late_to_every_collective_of_the_stage_and_one_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    slow = Slow(rank=0, step=0, stage=Stage.REDUCE, milliseconds=20)
    delay = Delay(rank=0, step=0, stage=Stage.REDUCE, collective=2, milliseconds=500)
    struck = Struck(tmp_path, slow, delay)
    for _ in range(3):
        struck.all_reduce(torch.ones(1))
    struck.record.enter(0, Stage.NORM)
    struck.all_reduce(torch.ones(1))

    assert slept == [0.02, 0.02, 0.02, 0.5]
    assert struck.hits == (0, 1)
    assert len(struck.calls) == 4


def test_a_hit_is_in_the_trail_before_it_strikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the last thing the rank does."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(trail.read(tmp_path, 1, 0).hits))
    struck = Struck(tmp_path, Delay(rank=0, step=0, stage=Stage.REDUCE, collective=0, milliseconds=1))
    struck.all_reduce(torch.ones(1))

    assert seen == [(0,)]


# --- what a collective is given ---------------------------------------------------------------------------------------


def test_a_duplicate_is_called_twice_with_the_same_tensors(tmp_path: Path) -> None:
    struck = Struck(tmp_path, Duplicate(rank=0, step=0, stage=Stage.REDUCE, collective=0))
    tensor = torch.ones(1)

    assert struck.all_reduce(tensor) == "call 2"
    assert [call.arguments["tensor"] is tensor for call in struck.calls] == [True, True]


def test_what_skipped_an_asynchronous_collective_returns_can_be_waited_for(tmp_path: Path) -> None:
    struck = Struck(tmp_path, Skip(rank=0, step=0, stage=Stage.REDUCE, collective=0))
    work = struck.all_reduce(torch.ones(1), async_op=True)

    assert work.wait()
    assert work.is_completed()
    assert work.get_future().done()
    assert struck.calls == []


def test_a_skipped_new_group_is_one_that_this_rank_is_not_in(tmp_path: Path) -> None:
    struck = Struck(tmp_path, Skip(rank=0, step=0, stage=Stage.REDUCE, collective=0))

    assert struck.call(dist.new_group, "new_group", None, [0, 1]) is dist.GroupMember.NON_GROUP_MEMBER


def corrupting(directory: Path, what: Any) -> Struck:
    return Struck(directory, Corrupt(rank=0, step=0, stage=Stage.REDUCE, collective=0, what=what))


def bits(tensor: Tensor) -> list[int]:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    mask = (1 << (8 * tensor.element_size())) - 1
    return [bits & mask for bits in tensor.view(whole).tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize(("what", "num_wrong"), [("bit", 1), ("slice", 16)])
def test_the_bit_below_the_highest_of_the_first_elements_is_flipped(
    dtype: torch.dtype, what: str, num_wrong: int, tmp_path: Path
) -> None:
    struck = corrupting(tmp_path, what)
    tensor = torch.arange(20).to(dtype)
    before = bits(tensor)
    struck.all_reduce(tensor)
    highest = 1 << (8 * tensor.element_size() - 2)

    assert [a ^ b for a, b in zip(before, bits(tensor), strict=True)] == [highest] * num_wrong + [0] * (20 - num_wrong)


def test_nan_takes_the_first_element(tmp_path: Path) -> None:
    struck = corrupting(tmp_path, "nan")
    tensor = torch.ones(3)
    struck.all_reduce(tensor)

    assert tensor.isnan().tolist() == [True, False, False]


def test_what_cannot_be_corrupted_is_no_hit(tmp_path: Path) -> None:
    """Whole numbers cannot be nan, an empty tensor has no element, and a barrier contributes nothing."""
    for number, send in enumerate(
        (
            lambda struck: struck.all_reduce(torch.ones(2, dtype=torch.int32)),
            lambda struck: struck.all_reduce(torch.ones(0)),
            lambda struck: struck.call(dist.barrier, "barrier", None),
            lambda struck: struck.call(dist.recv, "recv", "tensor", torch.ones(2)),
        )
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        struck = corrupting(directory, "nan")
        send(struck)
        assert struck.hits == ()
        assert len(struck.calls) == 1


def test_what_the_collective_only_reads_is_left_as_it_was(tmp_path: Path) -> None:
    """The subject's own buffer is right: only what is sent is wrong."""
    struck = corrupting(tmp_path, "bit")
    mine, output = torch.ones(4), torch.zeros(8)
    struck.call(dist.all_gather_into_tensor, "all_gather", "input_tensor", output, mine)
    (call,) = struck.calls

    assert mine.tolist() == [1.0] * 4
    assert call.arguments["output_tensor"] is output
    sent = call.arguments["input_tensor"]
    assert sent.isinf().tolist() == [True, False, False, False]


def test_of_a_list_the_first_tensor_with_an_element_is_wrong(tmp_path: Path) -> None:
    struck = corrupting(tmp_path, "nan")
    given = [torch.zeros(0), torch.ones(2), torch.ones(2)]
    struck.call(dist.reduce_scatter, "reduce_scatter_list", "input_list", torch.zeros(2), given)
    sent = struck.calls[0].arguments["input_list"]

    assert [tensor.isnan().tolist() for tensor in sent] == [[], [True, False], [False, False]]
    assert not given[1].isnan().any()


@pytest.mark.parametrize(("root", "struck_here"), [(0, True), (1, False)])
def test_of_a_broadcast_only_the_source_contributes(
    root: int, struck_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    struck = corrupting(tmp_path, "nan")
    tensor = torch.ones(2)
    struck.call(dist.broadcast, "broadcast", "tensor", tensor, group_src=root)

    assert not tensor.isnan().any()
    assert bool(struck.calls[0].arguments["tensor"].isnan().any()) is struck_here
    assert struck.hits == ((0,) if struck_here else ())


# --- a whole scenario on one rank -------------------------------------------------------------------------------------


def drive(directory: Path, *faults: Fault) -> RankVerdict:
    scenario = replace(SCENARIO, faults=faults)
    return Driver(context_in(directory), PlainZero, {}, CLASS_SUBJECT, scenario, Trail(directory, 1, 0)).run()


@pytest.mark.parametrize(
    ("step", "stage", "call"),
    [
        (None, Stage.BUILD, "__init__"),
        (0, Stage.COLLECT, "collect"),
        (0, Stage.REDUCE, "reduce_scatter"),
        (0, Stage.NORM, "grad_sq_norm"),
        (0, Stage.UPDATE, "master.grad"),
        (2, Stage.GATHER, "gather_params"),
        (1, Stage.COLLECT, "collect"),
        (1, Stage.UPDATE, "master.grad"),
    ],
)
def test_in_every_stage_of_every_step_the_subject_can_be_made_to_raise(
    step: int | None, stage: Stage, call: str, tmp_path: Path
) -> None:
    verdict = drive(tmp_path, Raise(rank=0, step=step, stage=stage))

    assert verdict.status is RankStatus.RAISED
    assert verdict.divergence is not None
    assert (verdict.divergence.property, verdict.divergence.step, verdict.divergence.stage) == (
        Property.PROGRESS,
        step,
        stage,
    )
    assert verdict.divergence.message.startswith(f"PlainZero.{call} raised InjectedFault")
    assert verdict.hits == trail.read(tmp_path, 1, 0).hits == (0,)
    assert not trail.read(tmp_path, 1, 0).finished


def test_a_scenario_without_a_hit_finishes_and_says_so(tmp_path: Path) -> None:
    verdict = drive(tmp_path, Skip(rank=0, step=0, stage=Stage.REDUCE, collective=0))

    assert (verdict.status, verdict.divergence, verdict.hits) == (RankStatus.DONE, None, ())
    assert trail.read(tmp_path, 1, 0).finished


def test_without_faults_nothing_intercepts(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    Driver(context, PlainZero, {}, CLASS_SUBJECT, SCENARIO, Trail(tmp_path, 1, 0)).run()
    assert context.collectives.intercept is None

    with_one = replace(SCENARIO, faults=(Raise(rank=0, step=0, stage=Stage.NORM),))
    Driver(context, PlainZero, {}, CLASS_SUBJECT, with_one, Trail(tmp_path, 1, 0)).run()
    assert context.collectives.intercept is not None
    context.collectives.begin()
    assert context.collectives.intercept is None
