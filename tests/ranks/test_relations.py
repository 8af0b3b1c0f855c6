"""Related scenarios in simulated worlds and on real ranks: what only the two together show, saved and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import runner
from harness.evaluate import start_pool
from harness.scenario import codec
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.scenario.relations import SUMMARIES, Relation, RelationReference, relations_of
from harness.verdict import Property
from tests.support import Campaigns, repetitions

PLAIN = Scenario(
    world=2,
    seed=5,
    parameters=(Parameter("a", (3, 4)), Parameter("b", (5,)), Parameter("c", (7,))),
    values=Values(Domain.NORM_EXACT, 3, -2),
    optimizer=AdamW(lr=0.1),
    operations=(
        Build(6),
        Part(True, (0, 1), ((), (2,))),
        Part(False, (2, 3), ((), ())),
        Step(),
        Part(False, (0, 1), ((), ())),
        Step(),
    ),
)


def test_a_mistake_that_subject_and_reference_share_shows_between_two_scenarios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks of its own: what the class's file does to the harness stays in their process."""
    monkeypatch.setattr(runner, "RELATE_EVERY", 1)
    with start_pool("sim") as pool:
        _expect_the_shared_mistake(Campaigns(pool, tmp_path, "sim"))


def _expect_the_shared_mistake(simulated: Campaigns) -> None:
    result = simulated.run("conspiring.py:SharesAMistake", worlds=(1, 2), examples=200, shrink_s=2.0)

    assert result.verdict == "violated"
    failure = result.failure
    assert failure is not None
    assert failure.property == "invariance"
    assert failure.stage == "gather"
    assert failure.case is not None
    case = codec.load(Path(failure.case))
    assert case.relation is not None
    assert case.relation.name in (Relation.CUT, Relation.JOIN)
    assert SUMMARIES[case.relation.name] in (failure.message or "")
    assert failure.expected != failure.actual
    again = simulated.replay(Path(failure.case), "conspiring.py:SharesAMistake")
    assert again.verdict == "violated"
    assert again.failure is not None
    assert again.failure.property == "invariance"


@pytest.mark.parametrize("relation", [each for each in relations_of("zero_master") if each is not Relation.TIER])
def test_a_right_class_holds_and_the_relation_was_checked(
    relation: Relation, simulated: Campaigns, tmp_path: Path
) -> None:
    path = codec.save(codec.Case(PLAIN, relation=RelationReference(relation, 1)), tmp_path)

    result = simulated.replay(path, "zero2")

    assert result.verdict == "holds"
    assert result.properties[Property.INVARIANCE.value] == 1


def test_a_simulated_world_gives_the_bits_of_real_ranks(simulated: Campaigns, tmp_path: Path) -> None:
    path = codec.save(codec.Case(PLAIN, relation=RelationReference(Relation.TIER)), tmp_path)

    result = simulated.replay(path, "zero2")

    assert result.verdict == "holds"
    assert result.properties[Property.INVARIANCE.value] == 1


def test_a_race_that_gloo_hides_is_a_difference_between_tiers(campaigns: Campaigns, tmp_path: Path) -> None:
    path = codec.save(codec.Case(PLAIN, relation=RelationReference(Relation.TIER)), tmp_path)
    result = campaigns.replay(path, "museum:reads-before-wait")

    assert result.verdict == "violated"
    assert result.failure is not None
    if result.failure.property == "invariance":  # else gloo did not hide it
        assert "holds on real ranks, in a simulated world it does not" in (result.failure.message or "")


def test_what_a_class_declares_is_drawn(simulated: Campaigns) -> None:
    result = simulated.run("extended.py:TakesAll", worlds=(1, 2), examples=repetitions(36, 60))

    assert result.verdict == "holds", result.failure
    assert result.reached["mixed-dtypes"] > 0
    assert result.reached["not-contiguous"] > 0


def test_what_a_class_does_not_declare_is_not_drawn(simulated: Campaigns) -> None:
    result = simulated.run("museum:plain-zero", worlds=(1, 2), examples=repetitions(36, 60))

    assert result.verdict == "holds", result.failure
    assert not result.reached["mixed-dtypes"]
    assert not result.reached["not-contiguous"]


@pytest.mark.parametrize("name", ["RoundsToFirstDtype", "WritesInMemoryOrder"])
def test_a_class_that_is_wrong_there_alone_is_found(name: str, simulated: Campaigns) -> None:
    result = simulated.run(f"extended.py:{name}", worlds=(1, 2), examples=150)

    assert result.verdict == "violated"
    assert result.failure is not None
    assert (result.failure.property, result.failure.stage) == ("weights", "gather")


def test_an_extension_that_nobody_knows_is_named(simulated: Campaigns) -> None:
    with pytest.raises(runner.UsageError, match="'stride', which is no extension"):
        simulated.run("extended.py:MisspellsAnExtension", worlds=(1,), examples=1)
