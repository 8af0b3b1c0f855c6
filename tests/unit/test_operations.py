"""Skips, new rates, loaded weights, rebuilds, amsgrad and maximize: right classes hold, and each mistake shows where.

Three ranks are threads of this process that take turns.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.drive.driver import Driver
from harness.drive.shared import Shared
from harness.drive.trail import Trail
from harness.faults.museum.controls import OneInstanceAProcess, Refreshes
from harness.faults.museum.plain import PlainZero
from harness.faults.museum.plants.accumulation import KeepsSkippedGradient
from harness.faults.museum.plants.layout import MasterOutlivesIt
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Load,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Skip,
    Step,
    Values,
    check,
)
from harness.subjects.builtin import CLASS_SUBJECT, Capabilities, capabilities
from harness.verdict import Property, RankStatus, RankVerdict, Stage
from tests.lockstep import Lockstep
from tests.subjects.broken import LayoutOutlivesIt, RateOfTheFirstStep, SpillsOutliveIt
from zero2core.zero_master import ZeroMaster

WORLD = 3
HELD = Part(False, tuple(range(WORLD)), ((),) * WORLD)
MORE = Part(True, tuple(range(WORLD, 2 * WORLD)), ((),) * WORLD)
ALL = (HELD, Step(), Load(2), Rate(0.1), MORE, HELD, Clip(0.5), Skip(), Build(12), HELD, Discard(), MORE, HELD, Step(),
       Build(3), Load(1), Rate(0.01), HELD, Step(), Load(0), HELD, Skip(), HELD, Step())  # fmt: skip


def scenario_of(
    operations: Sequence[Operation], optimizer: AdamW | None = None, domain: Domain = Domain.EXACT, seed: int = 0
) -> Scenario:
    values = Values(domain, 255, -4, 18 if domain is Domain.GENERAL else 0)
    made = Scenario(
        world=WORLD,
        seed=seed,
        parameters=(Parameter("w", (4, 5)), Parameter("none", (0,)), Parameter("b", (3,))),
        values=values,
        optimizer=optimizer or AdamW(lr=0.01),
        operations=(Build(6), *operations),
    )
    assert check(made) is None
    return made


def drive(
    cls: type,
    scenario: Scenario,
    directory: Path,
    *,
    shared: bool = False,
    can: Capabilities = CLASS_SUBJECT,
    inspect: bool = False,
) -> list[RankVerdict]:
    world = Lockstep(WORLD, directory)
    together = Shared(scenario, WORLD, static_memory=can.static_memory) if shared else None
    drivers = [
        Driver(
            world.contexts[rank],
            cls,
            {},
            can,
            scenario,
            Trail(directory, WORLD, rank),
            shared=together,
            inspect=inspect,
        )
        for rank in range(WORLD)
    ]
    return world.run(lambda rank: drivers[rank].run())


def first(verdicts: Sequence[RankVerdict]) -> tuple[Property, int | None, Stage] | None:
    found = [verdict.divergence for verdict in verdicts if verdict.divergence is not None]
    earliest = min(found, key=lambda divergence: divergence.when, default=None)
    return None if earliest is None else (earliest.property, earliest.step, earliest.stage)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("domain", [Domain.EXACT, Domain.GENERAL])
@pytest.mark.parametrize("optimizer", [AdamW(), AdamW(amsgrad=True, maximize=True, foreach=True)], ids=["", "amsgrad"])
def test_the_built_in_holds_through_all_of_them(shared: bool, domain: Domain, optimizer: AdamW, tmp_path: Path) -> None:
    """Its traffic and its memory as the layout says, after each rebuild too.

    Memory where the ranks know of each other: else each takes what the others hold in this process for its subject's.
    """
    can = dataclasses.replace(capabilities("zero2"), static_memory=shared)
    verdicts = drive(ZeroMaster, scenario_of(ALL, optimizer, domain), tmp_path, shared=shared, can=can)

    assert [verdict.status for verdict in verdicts] == [RankStatus.DONE] * WORLD
    assert first(verdicts) is None, verdicts
    for verdict in verdicts:
        assert verdict.checks["traffic"] == 1
        assert verdict.checks["ownership"] >= 3  # once for each instance
        assert verdict.checks["moments"] >= (3 if optimizer.amsgrad else 2) * 5


def test_a_right_class_holds_through_all_of_them(tmp_path: Path) -> None:
    assert first(drive(Refreshes, scenario_of(ALL), tmp_path)) is None


def test_without_a_refresh_a_load_is_outside_the_space_of_the_class(tmp_path: Path) -> None:
    verdicts = drive(PlainZero, scenario_of((HELD, Step(), Load(1), HELD, Step())), tmp_path)

    assert {verdict.status for verdict in verdicts} == {RankStatus.UNSUPPORTED}
    assert "refresh_from_weights" in (verdicts[0].detail or "")


def test_the_old_instance_is_gone_when_the_new_one_is_built(tmp_path: Path) -> None:
    """Also one in a reference cycle: with nobody looking for garbage meanwhile."""
    alive: list[int] = []
    instances: list[weakref.ref[Any]] = []

    class Cyclic(PlainZero):
        def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
            if rank == 0:
                alive.append(sum(instance() is not None for instance in instances))
                instances.append(weakref.ref(self))
            super().__init__(params, rank, world, bucket)
            self.me = self

    gc.disable()
    try:
        drive(Cyclic, scenario_of((HELD, Step(), Build(9), HELD, Step(), Build(3), HELD, Step())), tmp_path)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_a_skip_leaves_weights_master_and_moments_as_they_are(tmp_path: Path) -> None:
    class UpdatesInNorm(PlainZero):
        """Moves its master as soon as it knows the norm."""

        def grad_sq_norm(self) -> torch.Tensor:
            with torch.no_grad():
                self.master += self._piece_of_one
            return super().grad_sq_norm()

        _piece_of_one = 2.0**-10

    operations = (HELD, Skip(), HELD, Step())

    assert first(drive(UpdatesInNorm, scenario_of(operations), tmp_path)) == (Property.MASTER, 0, Stage.UPDATE)
    assert first(drive(PlainZero, scenario_of(operations), tmp_path)) is None


def test_what_was_handed_over_wrongly_before_a_rebuild_stays_found(tmp_path: Path) -> None:
    class AddsOneAtFirst(PlainZero):
        def _reduce(self, flat: torch.Tensor) -> torch.Tensor:
            first = not hasattr(self.params[0], "_stepped")
            return super()._reduce(flat + 1.0 if first and self.rank == 1 else flat)

        def gather_params(self) -> None:
            super().gather_params()
            self.params[0]._stepped = True  # type: ignore[attr-defined]

    verdicts = drive(AddsOneAtFirst, scenario_of((*STEPS, Build(12), *STEPS)), tmp_path, inspect=True)

    assert first(verdicts) == (Property.GRADIENT, 0, Stage.REDUCE)
    in_sums = [{found.step for found in verdict.handed if found.stage is Stage.REDUCE} for verdict in verdicts]
    assert in_sums == [set(), {0}, set()]


STEPS = (HELD, Step(), HELD, Step())
EXPECTED = {
    KeepsSkippedGradient: ((HELD, Skip(), *STEPS), (Property.GRADIENT, 1, Stage.REDUCE)),
    RateOfTheFirstStep: ((HELD, Step(), Rate(0.5), HELD, Step()), (Property.MASTER, 1, Stage.UPDATE)),
    MasterOutlivesIt: ((*STEPS, Build(6), *STEPS), (Property.MASTER, 2, Stage.BUILD)),
    LayoutOutlivesIt: ((*STEPS, Build(12), *STEPS), (Property.MASTER, 2, Stage.BUILD)),
    SpillsOutliveIt: ((MORE, HELD, Step(), Build(6), *STEPS), (Property.INTAKE, 1, Stage.COLLECT)),
}


@pytest.mark.parametrize("cls", EXPECTED, ids=lambda cls: cls.__name__)
def test_a_mistake_shows_where_it_is_made(cls: type, tmp_path: Path) -> None:
    operations, expected = EXPECTED[cls]

    assert first(drive(cls, scenario_of(operations), tmp_path)) == expected
    assert first(drive(cls, scenario_of(STEPS), tmp_path)) is None  # and only with what triggers it


class ForgetsToRefresh(Refreshes):
    def refresh_from_weights(self) -> None:
        """The next gather writes the old weights over the loaded ones."""


class RefreshesFromTheStart(Refreshes):
    """Has kept the weights of its construction."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._start = self.master.detach().clone()

    def refresh_from_weights(self) -> None:
        with torch.no_grad():
            self.master.copy_(self._start)


class RefreshesFirstBucket(Refreshes):
    def refresh_from_weights(self) -> None:
        with torch.no_grad():
            self.master[self._shard(0)] = self._initial_master()[self._shard(0)]


class RefreshesIntoAnother(Refreshes):
    """The optimizer keeps the parameter that it was given."""

    def refresh_from_weights(self) -> None:
        self.master = nn.Parameter(self._initial_master())


class RefreshesInOldLayout(Refreshes):
    """What is whose was worked out when the parameters were first seen; a shard is as long in both layouts here."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self._first_cuts = getattr(params[0], "_first_cuts", self._cuts)
        params[0]._first_cuts = self._first_cuts  # type: ignore[attr-defined]

    def refresh_from_weights(self) -> None:
        cuts, self._cuts = self._cuts, self._first_cuts
        super().refresh_from_weights()
        self._cuts = cuts


class RefreshWritesWeights(Refreshes):
    def refresh_from_weights(self) -> None:
        super().refresh_from_weights()
        with torch.no_grad():
            self.params[0].zero_()


@pytest.mark.parametrize(
    ("cls", "prop"),
    [
        (ForgetsToRefresh, Property.MASTER),
        (RefreshesFromTheStart, Property.MASTER),
        (RefreshesFirstBucket, Property.MASTER),
        (RefreshesIntoAnother, Property.MASTER),
        (RefreshWritesWeights, Property.WEIGHTS),
    ],
)
def test_a_wrong_refresh_shows_at_once(cls: type, prop: Property, tmp_path: Path) -> None:
    assert first(drive(cls, scenario_of((*STEPS, Load(1), *STEPS)), tmp_path)) == (prop, 2, Stage.BUILD)
    assert first(drive(cls, scenario_of(STEPS), tmp_path)) is None


def test_a_refresh_in_the_layout_of_an_earlier_instance_shows_at_once(tmp_path: Path) -> None:
    rebuilt = (*STEPS, Build(12), *STEPS)

    assert first(drive(RefreshesInOldLayout, scenario_of((*rebuilt, Load(1), *STEPS)), tmp_path)) == (
        Property.MASTER,
        4,
        Stage.BUILD,
    )
    assert first(drive(RefreshesInOldLayout, scenario_of((*STEPS, Load(1), *rebuilt)), tmp_path)) is None


def test_versions_of_the_weights_differ_and_the_first_is_the_beginning(tmp_path: Path) -> None:
    """A class that ignores a load of the weights that are there already makes no mistake."""
    assert first(drive(ForgetsToRefresh, scenario_of((Load(0), *STEPS)), tmp_path)) is None
    assert first(drive(ForgetsToRefresh, scenario_of((Load(3), *STEPS)), tmp_path)) is not None


def test_a_class_that_allows_one_instance_at_a_time_can_be_rebuilt(tmp_path: Path) -> None:
    made = scenario_of((HELD, Step(), Build(9), HELD, Step()))
    alone = Scenario(**{**_fields(made), "world": 1, "operations": _alone(made)})
    world = Lockstep(1, tmp_path)
    driver = Driver(world.contexts[0], OneInstanceAProcess, {}, CLASS_SUBJECT, alone, Trail(tmp_path, 1, 0))

    assert first(world.run(lambda rank: driver.run())) is None


def _fields(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in scenario.__struct_fields__}


def _alone(scenario: Scenario) -> tuple[Operation, ...]:
    return tuple(
        Part(one.more, one.contributors[:1], one.none[:1]) if isinstance(one, Part) else one
        for one in scenario.operations
    )
