"""The museum in processes of its own: real campaigns, a label that is wrong, a class that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.faults.museum.catalogue import CONTROLS, PLANTS
from harness.faults.museum.exhibit import Control, Kind, Plant, known, properties, stages
from harness.museum.campaign import WORLDS, MuseumOptions, WorkerView, run_museum
from harness.museum.judging import Naming
from harness.museum.score import MuseumResult, Outcome
from harness.scenario import codec
from harness.scenario.model import Domain, Values
from tests.support import Campaigns, required, sampled

MAX = next(plant for plant in PLANTS if plant.name == "MaxOfNorms")
CONTROL = {control.name: control for control in CONTROLS}


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Plant):
    """A plant whose class is somewhere else."""

    path: str

    @property
    def target(self) -> str:
        return self.path


@dataclass(frozen=True)
class WrongControl(Control):
    """A control whose class is a broken one."""

    path: str = ""

    @property
    def target(self) -> str:
        return self.path


BROKEN = """
import time

from harness.faults.museum.plain import PlainZero


class Halves(PlainZero):
    def _reduce(self, flat):
        return super()._reduce(flat) / 2


class Raises(PlainZero):
    def gather_params(self):
        if self.rank == 1:
            raise RuntimeError("no gather today")
        super().gather_params()


class Waits(PlainZero):
    def reduce_scatter(self):
        time.sleep(3600)
"""


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Elsewhere]:
    """A plant of one of these classes."""
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)

    def plant(name: str, prop: str, stage: str) -> Elsewhere:
        return Elsewhere(
            name=name, module="norm", bugs=("a/b#1",), kind=Kind.REDUCTION, why="a test", properties=properties(prop),
            stages=stages(stage), known=known(2, [2], bucket=2), path=f"{path}:{name}",
        )  # fmt: skip

    return plant


class Watching:
    """Looks at what goes on; ``seen`` is called with each view."""

    def __init__(self, seen: Callable[[Sequence[WorkerView]], None] = lambda workers: None) -> None:
        self.notes: list[str] = []
        self.outcomes: list[Outcome] = []
        self._seen = seen

    def began(self, exhibits: int, workers: int) -> None: ...

    def view(self, workers: Sequence[WorkerView]) -> None:
        self._seen(workers)

    def done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def note(self, text: str) -> None:
        self.notes.append(text)


def museum(tmp_path: Path, watching: Watching, **fields: Any) -> MuseumResult:
    given: dict[str, Any] = {"plants": (), "controls": (), "seed": 1, "workers": 1, "report": tmp_path / "cases"}
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    result = run_museum(MuseumOptions(**{**given, **fields}), watching)
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    return result


# A limit so long that no machine is too slow, where what is looked for is found.
LONG_S = 200.0

# So many scenarios of a control that it passes.
ENOUGH = len(required(WORLDS))


def test_what_is_wrong_is_caught_and_judged_and_what_is_right_passes(
    tmp_path: Path, broken: Callable[..., Elsewhere]
) -> None:
    plants = (MAX, broken("Halves", "gradient spill", "reduce"), broken("Raises", "progress", "update"))
    controls = tuple(sampled((CONTROL["PlainZero"], CONTROL["GathersInFloat32"]), 2))

    result = museum(
        tmp_path,
        Watching(),
        plants=plants,
        controls=controls,
        seconds_per_plant=LONG_S,
        control_examples=ENOUGH,
        workers=2,
    )

    # Two places of three are right: too few.
    assert (result.verdict, result.exit_code, result.not_run) == ("violated", 1, 0)
    assert [(plant.id, plant.caught) for plant in result.plants] == [(plant.id, True) for plant in plants]
    for plant in result.plants:
        assert plant.found_after is not None
        assert 1 <= plant.found_after.examples <= plant.examples
        assert 0 < plant.found_after.seconds <= plant.seconds
        assert plant.failure is not None
        assert plant.case is not None
        saved = codec.load(Path(plant.failure.case or ""))
        assert saved.scenario.world == plant.case.world
        assert saved.subject is not None
        assert saved.subject.given == f"museum:{plant.id}"
    norm, halves, raises = (plant.judgement for plant in result.plants)
    assert norm is not None
    assert (norm.location, norm.naming) == (True, Naming.NONE)
    assert halves is not None
    assert halves.location
    assert raises is not None
    assert not raises.location  # it raises in the gather
    assert result.summary.location.right == 2
    assert [(control.verdict, control.examples) for control in result.controls] == [("holds", ENOUGH)] * len(controls)
    assert result.summary.control_examples == len(controls) * ENOUGH


def test_real_ranks_that_hang_are_caught_and_the_next_plant_finds_others(
    tmp_path: Path, broken: Callable[..., Elsewhere]
) -> None:
    waits = replace(broken("Waits", "progress", "reduce"), processes=True)

    result = museum(tmp_path, Watching(), plants=(waits, MAX), backend="gloo", worlds=(2,), seconds_per_plant=LONG_S)

    hang, norm = result.plants
    assert (result.verdict, hang.caught, norm.caught) == ("holds", True, True)
    assert hang.failure is not None
    assert hang.failure.property == "progress"


def test_instances_that_share_a_gradient_are_no_violation_where_a_rank_owns_only_padding(simulated: Campaigns) -> None:
    """Found by the museum: the ranks did not agree that a second instance tells nothing about the order of addition."""
    values = Values(Domain.GENERAL, max_k=128, exponent=0, spread=19, cancel=True)
    scenario = known(3, [1], bucket=1, values=values, seed=2663235166373161271)
    result = simulated.replay(codec.save(codec.Case(scenario), simulated.report), CONTROL["SharesItsGradient"].subject)

    assert (result.verdict, result.failure) == ("holds", None)
