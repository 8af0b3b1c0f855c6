"""Every plant of the bug museum trips on the scenario that is known for it, and what it is a variant of does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
from harness.faults.museum.exhibit import Control, Plant, kebab
from harness.museum.judging import Naming, judge
from harness.report.result import Result
from harness.runner import CampaignOptions, replay_case
from harness.scenario import codec
from harness.scenario.model import Extension, beyond
from harness.scenario.strategy import Offer
from harness.subjects import source
from harness.subjects.builtin import BUILTIN, CLASS_SUBJECT, capabilities
from harness.subjects.load import declared, load_class
from tests.support import Campaigns, Silent, repetitions, sampled
from zero2core import DDPStrategy, FSDPStrategy
from zero2core.muon.sharding import MuonShardingOptimizer
from zero2core.zero_master import ZeroMaster

PUBLIC = frozenset((Path(__file__).parents[1] / "subjects" / "public_bugs.txt").read_text().split())
"""The bugs that the museum was made from."""

RIGHT = "museum:plain-zero"

BUILTIN_OF = {"zero_master": "zero2", "muon": "muon"}
OURS: dict[str, type | tuple[type, ...]] = {
    "zero_master": ZeroMaster,
    "muon": MuonShardingOptimizer,
    "strategy": (FSDPStrategy, DDPStrategy),
}
STRATEGIES = [plant for plant in PLANTS if plant.system == "strategy"]
OTHERS = [plant for plant in PLANTS if plant.system != "strategy"]
RIGHT_STRATEGIES = [control for control in CONTROLS if control.system == "strategy"]
EVERY = repetitions(10, 1)
"""A control is run on each so-manieth of the known scenarios that it takes, each on others."""


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


@pytest.mark.parametrize("plant", OTHERS, ids=lambda plant: plant.id)
def test_a_plant_trips_on_its_known_scenario(plant: Plant, simulated: Campaigns) -> None:
    _assert_right(plant, on_known(plant, simulated, plant.subject))


@pytest.mark.parametrize("plant", sampled(STRATEGIES, 2), ids=lambda plant: plant.id)
def test_a_strategy_trips_on_its_known_scenario(plant: Plant, campaigns: Campaigns) -> None:
    """On real ranks, where FSDP2 and DDP run as in a training."""
    _assert_right(plant, on_known(plant, campaigns, plant.subject))


def _assert_right(plant: Plant, result: Result) -> None:
    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    judgement = judge(plant, result.failure, plant.known)
    told = (result.failure.property, result.failure.stage, result.failure.message)
    assert judgement.location, told
    assert judgement.naming is not Naming.WRONG, (result.failure.symptom, result.failure.pattern)
    assert judgement.place is not False, (result.failure.rank, result.failure.parameter, result.failure.bucket)


@pytest.mark.parametrize("plant", sampled(OTHERS, 8), ids=lambda plant: plant.id)
def test_what_it_is_a_variant_of_holds_there(plant: Plant, simulated: Campaigns) -> None:
    result = on_known(plant, simulated, BUILTIN_OF[plant.system] if plant.own else RIGHT)
    assert result.verdict == "holds", (result.reason, result.failure)


@pytest.mark.parametrize("plant", sampled(STRATEGIES, 8), ids=lambda plant: plant.id)
def test_the_strategy_that_it_is_a_variant_of_holds_there(plant: Plant, campaigns: Campaigns) -> None:
    result = on_known(plant, campaigns, plant.builtin or f"museum:{kebab(_plain_of(plant))}")
    assert result.verdict == "holds", (result.reason, result.failure)


def _plain_of(plant: Plant) -> str:
    """The right class that a plant is a variant of, which is a control."""
    bases = load_class(plant.target).__mro__
    return next(base.__name__ for base in bases if base.__module__.endswith(".plain_strategies"))


@pytest.mark.parametrize("control", RIGHT_STRATEGIES, ids=lambda control: control.id)
def test_a_right_strategy_holds_where_others_trip(control: Control, campaigns: Campaigns) -> None:
    """On scenarios that are known for a plant, as far as it takes them."""
    names = declared(load_class(control.target))
    offer = Offer(**dict.fromkeys(names, True))
    taken = [plant for plant in STRATEGIES if not plant.own and not beyond(plant.known, Extension(strategy=offer))]
    for plant in taken[RIGHT_STRATEGIES.index(control) % EVERY :: EVERY]:
        result = on_known(plant, campaigns, control.subject)
        assert result.verdict == "holds", (plant.id, result.reason, result.failure)


@pytest.mark.parametrize(
    "plant", sampled([plant for plant in PLANTS if plant.processes], 9), ids=lambda plant: plant.id
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
        BUILTIN[exhibit.builtin or BUILTIN_OF[exhibit.system]].capabilities if exhibit.own else CLASS_SUBJECT
    )


def test_names_are_unique_and_labels_are_written() -> None:
    ids = [each.id for each in (*PLANTS, *CONTROLS)]
    assert len(set(ids)) == len(ids)
    assert len(PLANTS) >= 60
    assert len(CONTROLS) >= 15
    assert sum(plant.system == "muon" for plant in PLANTS) >= 20
    assert sum(control.system == "muon" for control in CONTROLS) >= 8
    assert len(STRATEGIES) >= 26
    assert len(RIGHT_STRATEGIES) >= 8
    for plant in PLANTS:
        # Of the others the specification names mistakes that nobody has reported.
        assert plant.bugs or plant.system != "zero_master"
        assert plant.properties
        assert plant.stages
        assert len(plant.why.split()) > 5
