"""Every plant of the bug museum trips on the scenario that is known for it, and what it is a variant of does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
from harness.faults.museum.exhibit import Control, Plant
from harness.museum.judging import Naming, judge
from harness.report.result import Result
from harness.runner import CampaignOptions, replay_case
from harness.scenario import codec
from harness.subjects import source
from harness.subjects.builtin import BUILTIN, CLASS_SUBJECT, capabilities
from harness.subjects.load import load_class
from tests.support import Campaigns, Silent, sampled
from zero2core.muon.sharding import MuonShardingOptimizer
from zero2core.zero_master import ZeroMaster

PUBLIC = frozenset((Path(__file__).parents[1] / "subjects" / "public_bugs.txt").read_text().split())
"""The bugs that the museum was made from."""

RIGHT = "museum:plain-zero"

BUILTIN_OF = {"zero_master": "zero2", "muon": "muon"}
OURS: dict[str, type] = {"zero_master": ZeroMaster, "muon": MuonShardingOptimizer}


@pytest.fixture(autouse=True)
def _run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of five times; what comes and goes is run as often as ever."""
    monkeypatch.setattr("harness.explain.REPLAYS", 1)


def on_known(plant: Plant, campaigns: Campaigns, subject: str) -> Result:
    case = codec.Case(plant.known)
    options = CampaignOptions(
        subject=source.parse(subject),
        worlds=(plant.known.world,),
        backend=campaigns.backend,
        seed=0,
        examples=1,
        seconds=None,
        bucket=None,
        parameters=None,
        report=campaigns.report,
        timeout_s=None,
    )
    return replay_case(case, Path("case"), options, Silent(), campaigns.pool)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.id)
def test_a_plant_trips_on_its_known_scenario(plant: Plant, simulated: Campaigns) -> None:
    result = on_known(plant, simulated, plant.subject)

    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    judgement = judge(plant, result.failure, plant.known)
    told = (result.failure.property, result.failure.stage, result.failure.message)
    assert judgement.location, told
    assert judgement.naming is not Naming.WRONG, (result.failure.symptom, result.failure.pattern)
    assert judgement.place is not False, (result.failure.rank, result.failure.parameter, result.failure.bucket)


@pytest.mark.parametrize("plant", sampled(PLANTS, 3), ids=lambda plant: plant.id)
def test_what_it_is_a_variant_of_holds_there(plant: Plant, simulated: Campaigns) -> None:
    result = on_known(plant, simulated, BUILTIN_OF[plant.system] if plant.own else RIGHT)
    assert result.verdict == "holds", (result.reason, result.failure)


@pytest.mark.parametrize(
    "plant", sampled([plant for plant in PLANTS if plant.processes], 6), ids=lambda plant: plant.id
)
def test_what_needs_processes_trips_there_too(plant: Plant, campaigns: Campaigns) -> None:
    result = on_known(plant, campaigns, plant.subject)

    assert result.failure is not None, result.reason
    assert judge(plant, result.failure, plant.known).location, (result.failure.property, result.failure.stage)


def test_every_public_bug_is_planted_or_left_out_with_a_reason() -> None:
    planted = {bug for plant in PLANTS for bug in plant.bugs}
    assert not planted & LEFT_OUT.keys()
    assert planted | LEFT_OUT.keys() == PUBLIC
    assert all(len(why.split()) > 4 for why in LEFT_OUT.values())


@pytest.mark.parametrize("exhibit", [*PLANTS, *CONTROLS], ids=lambda exhibit: exhibit.id)
def test_a_variant_of_our_own_class_is_judged_as_that_is(exhibit: Plant | Control) -> None:
    """And no other is: what only a built-in system promises is not asked of a user's class."""
    ours = issubclass(load_class(exhibit.target), OURS[exhibit.system])
    # What multiplies matrices in another way than ours is held against a bound, as a class of the user's is.
    assert ours == exhibit.own or (exhibit.system == "muon" and isinstance(exhibit, Control))
    assert capabilities(source.parse(exhibit.subject).absolute) == (
        BUILTIN[BUILTIN_OF[exhibit.system]].capabilities if exhibit.own else CLASS_SUBJECT
    )


def test_names_are_unique_and_labels_are_written() -> None:
    ids = [each.id for each in (*PLANTS, *CONTROLS)]
    assert len(set(ids)) == len(ids)
    assert len(PLANTS) >= 60
    assert len(CONTROLS) >= 15
    assert sum(plant.system == "muon" for plant in PLANTS) >= 20
    assert sum(control.system == "muon" for control in CONTROLS) >= 8
    for plant in PLANTS:
        assert plant.bugs or plant.system == "muon"  # whose specification names mistakes that nobody has reported
        assert plant.properties
        assert plant.stages
        assert len(plant.why.split()) > 5
