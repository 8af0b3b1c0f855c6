"""Lists of thousands of parameters: what the reference keeps for each of them is not the subject's."""

from __future__ import annotations

from harness.evaluate import Conclusion, Evaluator
from harness.launch.pool import RankPool
from harness.scenario import presets
from harness.scenario.model import Parameter
from harness.subjects.source import parse


def test_zero_master_holds_on_three_thousand_parameters(scenario_pool: RankPool) -> None:
    parameters = [Parameter(f"p{index}", (1,)) for index in range(3000)]
    (scenario,) = presets.campaign(parameters, world=2, bucket=1000, seed=1, examples=1)

    evaluation = Evaluator(parse("zero2"), scenario_pool).evaluate(scenario)

    assert evaluation.conclusion is Conclusion.HOLDS, evaluation.divergence
    assert evaluation.checks["memory"] > 0
