"""ZeroMaster equals the unsharded trainer on real ranks: as a campaign, and as a property over drawn scenarios."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness.evaluate import Conclusion, Evaluator
from harness.launch.pool import RankPool
from harness.scenario import presets
from harness.scenario.generate import scenarios
from harness.scenario.model import Scenario
from harness.subjects.source import parse
from tests.support import Campaigns, repetitions, sampled


@pytest.mark.parametrize("world", sampled([1, 2, 3, 4], every=3))
def test_zero_master_holds_over_a_campaign(world: int, campaigns: Campaigns) -> None:
    result = campaigns.run("zero2", worlds=(world,), examples=32)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.examples.run == 32
    wanted = {"weights", "master", "moments", "gradient", "norm", "clip", "spill", "intake", "storage", "ownership"}
    wanted |= {"memory", "progress", "determinism"} | ({"agreement", "traffic"} if world > 1 else set())
    assert {name for name, count in result.properties.items() if count} >= wanted


def test_the_same_seed_gives_the_same_campaign(campaigns: Campaigns) -> None:
    first, second = (campaigns.run("zero2", worlds=(1, 2), examples=12, seed=11) for _ in range(2))

    assert (first.properties, first.reached, first.oracle) == (second.properties, second.reached, second.oracle)


@settings(
    max_examples=repetitions(24, 60),
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(scenario=scenarios(worlds=(1, 2, 3, 4)))
def test_zero_master_holds_for_any_scenario(scenario: Scenario, scenario_pool: RankPool) -> None:
    evaluation = Evaluator(parse("zero2"), scenario_pool).evaluate(scenario)

    assert evaluation.conclusion is Conclusion.HOLDS, evaluation.divergence


def test_a_real_parameter_list_holds(scenario_pool: RankPool) -> None:
    """The shapes of a small GPT, held, spilled and clipped, with buckets that cut parameters."""
    evaluator = Evaluator(parse("zero2"), scenario_pool)
    seen: Counter[str] = Counter()
    for scenario in presets.campaign(presets.parameters("tiny-gpt"), world=3, bucket=1000, seed=7):
        evaluation = evaluator.evaluate(scenario)
        assert evaluation.conclusion is Conclusion.HOLDS, evaluation.divergence
        seen.update(evaluation.situations)

    assert seen["clipping-active"] == 1
    assert seen["wide-reduced-value"] == 3
    assert seen["wide-partial-sum"] >= 1
