"""The canaries are caught, in every world and in the first scenarios of a campaign."""

from __future__ import annotations

import pytest

from harness.evaluate import Conclusion, Evaluator
from harness.launch.pool import RankPool
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.source import parse
from harness.verdict import Property, Stage
from tests.support import Campaigns

WORLDS = (1, 2, 3)


def scenario(world: int) -> Scenario:
    """The smallest there is on exact sums; from two ranks on the last rank's shard is padding alone."""
    part = Part(False, tuple(range(world)), ((),) * world)
    values = Values(Domain.EXACT, 255, 0)
    return Scenario(world, 7, (Parameter("w", (1,)),), values, AdamW(), (Build(4), part, Step()))


@pytest.mark.parametrize("world", WORLDS)
def test_a_wrong_bit_is_caught_where_it_is(world: int, scenario_pool: RankPool) -> None:
    evaluation = Evaluator(parse("canary-bit"), scenario_pool).evaluate(scenario(world))

    assert evaluation.conclusion is Conclusion.VIOLATED
    found = evaluation.divergence
    assert found is not None
    assert found.property is (Property.GRADIENT if world == 1 else Property.OWNERSHIP)
    assert (found.rank, found.step, found.stage) == (world - 1, 0, Stage.REDUCE)


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_ends_with_exit_code_0_is_caught(world: int, scenario_pool: RankPool) -> None:
    evaluation = Evaluator(parse("canary-exit"), scenario_pool).evaluate(scenario(world))

    assert evaluation.conclusion is Conclusion.VIOLATED
    found = evaluation.divergence
    assert found is not None
    assert (found.property, found.rank, found.step, found.stage) == (Property.PROGRESS, world - 1, 0, Stage.GATHER)
    assert "exit code 0" in found.message


@pytest.mark.parametrize("canary", ["canary-bit", "canary-exit"])
def test_a_campaign_over_a_canary_is_violated(canary: str, campaigns: Campaigns) -> None:
    assert campaigns.run(canary, worlds=WORLDS, examples=12, shrink_s=0.0).verdict == "violated"
