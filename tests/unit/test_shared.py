"""Ranks in one process that share what is the same for all of them find exactly what each would find alone."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from harness.drive.driver import Driver
from harness.drive.shared import Shared
from harness.drive.tasks import encode
from harness.drive.trail import Trail
from harness.faults.museum import controls, controls_zero2
from harness.faults.museum.plain import PlainZero
from harness.faults.museum.plants import gather, norm, reduction
from harness.oracles import contributions
from harness.oracles.reference import UnshardedTrainer
from harness.scenario import generate
from harness.scenario.model import AdamW, Build, Clip, Domain, Parameter, Part, Scenario, Step, StepPlan, Values, steps
from harness.subjects.builtin import BUILTIN, CLASS_SUBJECT, Capabilities
from harness.verdict import Property, RankVerdict
from tests.lockstep import Lockstep
from tests.subjects import broken
from tests.support import paired
from zero2core.zero_master import ZeroMaster

WORLD = 3
SCENARIOS = [generate.draw(11, index, (WORLD,)) for index in range(8)]
CPU = torch.device("cpu")


def drive(
    cls: type,
    scenario: Scenario,
    directory: Path,
    shared: Shared | None,
    capabilities: Capabilities = CLASS_SUBJECT,
    **options: bool,
) -> list[RankVerdict]:
    """The verdicts of all ranks, whose drivers (and subjects) live until the last one is done."""
    world = Lockstep(scenario.world, directory)
    drivers = [
        Driver(
            world.contexts[rank],
            cls,
            {},
            capabilities,
            scenario,
            Trail(directory, scenario.world, rank),
            shared=shared,
            **options,
        )
        for rank in range(scenario.world)
    ]
    return world.run(lambda rank: drivers[rank].run())


SUBJECTS = {
    "right": (PlainZero, False),
    "right, with an order of its own": (controls.AddsPairwise, False),
    "right, within the bound only": (controls.AddsPartsBackward, False),
    "another norm on each rank": (broken.LocalNorm, True),
    "a norm that one rank has otherwise": (broken.NormOffByOneUlp, True),
    "a wrong sum": (reduction.MeanForSum, True),
    "another gradient from the norm on": (norm.NormOfSavedCopy, True),
    "another master": (gather.MasterRounded, True),
    "other weights on one rank": (broken.LastRankStale, True),
    "raises": (broken.RaisesInGather, True),
    "another refusal on one rank": (broken.OneRankRefusesInNorm, True),
}


WAYS: dict[str, dict[str, bool]] = {"plain": {}, "predicted": {"exchanges": False}, "inspect": {"inspect": True}}


@pytest.mark.parametrize(("name", "way"), paired(SUBJECTS, list(WAYS)))
def test_every_rank_finds_what_it_finds_alone(name: str, way: str, tmp_path: Path) -> None:
    (cls, wrong), options = SUBJECTS[name], WAYS[way]
    found = set()
    for scenario in SCENARIOS:
        alone = drive(cls, scenario, tmp_path, None, **options)
        together = drive(cls, scenario, tmp_path, Shared(scenario, WORLD), **options)

        assert [_without_lines(verdict) for verdict in together] == [_without_lines(verdict) for verdict in alone]
        found |= {verdict.divergence is not None for verdict in together}
    assert (True in found) == wrong


def _without_lines(verdict: RankVerdict) -> bytes:
    """A traceback tells where in the harness it passed."""
    return encode(replace(verdict, detail=None))


# --- the unsharded trainer --------------------------------------------------------------------------------------------

INITIAL = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([[0.25]], dtype=torch.bfloat16)]


def gradients(scale: float) -> list[Tensor]:
    return [torch.tensor([1.0, 2.0, -3.0]) * scale, torch.tensor([[0.125]]) * scale]


def scenario_of(world: int, seed: int = 0, steps: int = 1) -> Scenario:
    held = Part(False, tuple(range(world)), ((),) * world)
    return Scenario(
        world=world,
        seed=seed,
        parameters=(Parameter("w", (40,)), Parameter("v", (3, 2))),
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(16), *(held, Clip(0.5), Step()) * steps),
    )


def state_of(trainer: UnshardedTrainer) -> list[list[float]]:
    """All that is compared, at a point with moments."""
    moments = [moment for index in range(len(INITIAL)) for moment in trainer.moments(index)]
    masters = [trainer.master(index) for index in range(len(INITIAL))]
    return [tensor.float().reshape(-1).tolist() for tensor in (*trainer.weights, *masters, *moments)]


def train(trainer: UnshardedTrainer, given: list[Tensor], coefficient: float) -> None:
    trainer.set_gradients(given)
    trainer.scale_gradients(coefficient)
    trainer.step()
    trainer.gather()


def test_ranks_that_do_the_same_come_to_the_same_trainer_and_others_go_their_own_way() -> None:
    coefficients = [(0.5, 1.0), (0.5, 1.0), (0.5, 0.25), (math.nan, 1.0)]
    scenario = scenario_of(4)
    shared = Shared(scenario, 4)
    together = [shared.trainer(INITIAL, CPU) for _ in coefficients]
    alone = [UnshardedTrainer(INITIAL, scenario.optimizer) for _ in coefficients]

    for step, scale in enumerate((1.0, 3.0)):
        common = gradients(scale)
        for rank, coefficient in enumerate(coefficients):
            train(together[rank], common, coefficient[step])
            train(alone[rank], gradients(scale), coefficient[step])

    assert [repr(state_of(one)) for one in together] == [repr(state_of(one)) for one in alone]
    assert together[0].weights is together[1].weights
    assert [one.num_steps for one in together] == [2] * 4
    assert together[2].weights is not together[0].weights


def test_a_new_rate_a_load_and_a_rebuild_are_those_of_a_trainer_alone() -> None:
    """Whoever is behind, or goes another way, sees nothing of them."""
    shared = Shared(scenario_of(2), 2)
    one, other = (shared.trainer(INITIAL, CPU) for _ in range(2))
    alone = [UnshardedTrainer(INITIAL, AdamW()) for _ in range(2)]
    common, loaded = gradients(1.0), [torch.tensor([3.0, 0.5, -1.0]), torch.tensor([[4.0]], dtype=torch.bfloat16)]

    def change(trainer: UnshardedTrainer, given: list[Tensor]) -> None:
        trainer.set_rate(0.25)
        train(trainer, given, 0.5)
        trainer.load(loaded)
        train(trainer, gradients(2.0), 1.0)
        trainer.rebuild()
        train(trainer, gradients(3.0), 1.0)

    change(one, common)
    train(other, common, 0.5)
    change(alone[0], gradients(1.0))
    train(alone[1], gradients(1.0), 0.5)

    assert state_of(one) == state_of(alone[0])
    assert state_of(other) == state_of(alone[1]) != state_of(alone[0])
    assert (one.num_steps, other.num_steps) == (1, 1)
    change(other, gradients(1.0))
    change(alone[1], gradients(1.0))
    assert state_of(other) == state_of(alone[1])


def test_a_rank_that_is_ahead_changes_nothing_for_one_that_is_behind() -> None:
    shared = Shared(scenario_of(2), 2)
    ahead, behind = (shared.trainer(INITIAL, CPU) for _ in range(2))
    alone = UnshardedTrainer(INITIAL, AdamW())
    steps = [gradients(1.0), gradients(2.0)]
    for given in steps:
        train(ahead, given, 0.5)

    for scale, given in zip((1.0, 2.0), steps, strict=True):
        behind.set_gradients(given)
        alone.set_gradients(gradients(scale))
        assert behind.squared_norm() == alone.squared_norm()
        assert behind.flat_gradient() == alone.flat_gradient()
        assert behind.flat_master() == alone.flat_master()
        for trainer in (behind, alone):
            trainer.scale_gradients(0.5)
            trainer.step()
            trainer.gather()
        assert behind.flat_moments() == alone.flat_moments()
        assert state_of(behind) == state_of(alone)


def test_what_all_ranks_have_passed_is_freed() -> None:
    shared = Shared(scenario_of(2), 2)
    ranks = [shared.trainer(INITIAL, CPU) for _ in range(2)]
    first = weakref.ref(ranks[0].weights[0])
    given = gradients(1.0)
    gc.disable()
    try:
        train(ranks[0], given, 0.5)
        assert first() is not None
        train(ranks[1], given, 0.5)
        assert first() is None
    finally:
        gc.enable()


def test_sums_are_added_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    original = contributions.reduced

    def counted(scenario: Scenario, plan: StepPlan, parameter: int, **options: Any) -> Any:
        added.append((plan.index, parameter))
        return original(scenario, plan, parameter, **options)

    monkeypatch.setattr(contributions, "reduced", counted)
    scenario = scenario_of(2, steps=4)
    shared = Shared(scenario, 2)
    plans = list(steps(scenario))

    once = [shared.sums(plan, None, CPU, look=False) for plan in plans[:2]]
    again = [shared.sums(plan, None, CPU, look=True) for plan in plans[:2]]

    assert added == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(one is other for one, other in zip(once, again, strict=True))
    for plan in plans[2:]:
        shared.sums(plan, None, CPU, look=False)
    late = shared.sums(plans[0], None, CPU, look=False)  # whoever is that late has it added again
    assert [one.tolist() for one in late.gradients] == [one.tolist() for one in once[0].gradients]


# --- probing ---------------------------------------------------------------------------------------------------------


def test_an_order_is_found_out_where_gradients_are_narrow(tmp_path: Path) -> None:
    """Each parameter is probed with what its dtype can hold."""
    rounds = replace(
        scenario_of(WORLD),
        parameters=(Parameter("w", (400,), dtype="fp16"), Parameter("v", (3, 2)), Parameter("u", (9,), dtype="fp32")),
        values=Values(Domain.GENERAL, 255, -20, spread=28),
    )
    verdicts = drive(controls_zero2.DealsOutElements, rounds, tmp_path, Shared(rounds, WORLD), OWN)

    assert all(verdict.searched for verdict in verdicts)
    assert [verdict.divergence for verdict in verdicts] == [None] * WORLD
    assert [verdict.oracle.get("bound", 0) for verdict in verdicts] == [0] * WORLD


# --- memory -----------------------------------------------------------------------------------------------------------

OWN = BUILTIN["zero2"].capabilities
STATIC_MEMORY = dataclasses.replace(CLASS_SUBJECT, static_memory=True)


class Hoards(ZeroMaster):
    """Its last rank keeps more than all ranks together may."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket=bucket)
        self.hoard = torch.zeros(100_000) if rank == world - 1 else None


def memory_found(cls: type, scenario: Scenario, directory: Path) -> tuple[int, list[Property | None]]:
    """How often the memory of a world was judged, and what its ranks found."""
    gc.collect()
    without = drive(cls, scenario, directory, Shared(scenario, WORLD), STATIC_MEMORY)
    gc.collect()
    verdicts = drive(cls, scenario, directory, Shared(scenario, WORLD, static_memory=True), STATIC_MEMORY)
    judged = [sum(said.checks.get("memory", 0) for said in each) for each in (verdicts, without)]
    return judged[0] - judged[1], [None if said.divergence is None else said.divergence.property for said in verdicts]


def test_the_memory_of_a_world_is_judged_once_in_one_scenario_of_eight(tmp_path: Path) -> None:
    assert memory_found(ZeroMaster, scenario_of(WORLD, 8), tmp_path) == (1, [None] * WORLD)
    assert memory_found(ZeroMaster, scenario_of(WORLD, 9), tmp_path) == (0, [None] * WORLD)


def test_what_one_rank_of_a_world_hoards_is_found(tmp_path: Path) -> None:
    judged, found = memory_found(Hoards, scenario_of(WORLD, 8), tmp_path)

    assert judged == 1
    assert found.count(Property.MEMORY) == 1
    assert found.count(None) == WORLD - 1


def test_what_a_probed_instance_keeps_is_not_the_subjects(tmp_path: Path) -> None:
    """An order of its own is found out from a second instance, as large as the first."""
    rounds = replace(
        scenario_of(WORLD, 8),
        parameters=(Parameter("w", (30_000,)),),
        values=Values(Domain.GENERAL, 255, 0, spread=20),
        operations=(Build(900), *scenario_of(WORLD).operations[1:]),
    )
    gc.collect()
    shared = Shared(rounds, WORLD, static_memory=True)
    verdicts = drive(controls.AddsFromTheLastRank, rounds, tmp_path, shared, STATIC_MEMORY)

    assert all(verdict.searched for verdict in verdicts)
    assert [verdict.divergence for verdict in verdicts] == [None] * WORLD


def test_a_rank_that_is_gone_is_allowed_nothing() -> None:
    """Its subject may keep nothing any more: what is judged are those that are still there."""
    gc.collect()
    gc.freeze()
    try:
        shared = Shared(scenario_of(2, 8), 2, static_memory=True)
        kept = torch.zeros(500)
        own = torch.zeros(300)
        gone, there = Rank(), Rank()
        assert shared.kept(gone, 1000, []) is None
        del gone
        judged = shared.kept(there, 700, [own])
    finally:
        gc.unfreeze()

    assert judged is not None
    assert (judged.alive, judged.limit) == (4 * kept.numel(), 700)


class Rank:
    """Something that can be referred to weakly."""
