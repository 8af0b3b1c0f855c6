"""The same scenario in a simulated world and on real gloo ranks: the same bits, and the same collectives."""

from __future__ import annotations

import msgspec
import pytest

from harness.drive.tasks import RunScenario, SubjectName, encode
from harness.evaluate import Pool
from harness.scenario import generate
from harness.scenario.model import Scenario
from harness.verdict import RankStatus, RankVerdict
from tests.support import repetitions, sampled, subject

_verdict = msgspec.msgpack.Decoder(RankVerdict)
_NUM_SCENARIOS = repetitions(10, 20)
_WORLDS = (1, 2, 3, 4)


@pytest.fixture
def tiers(simulated_pool: Pool, scenario_pool: Pool) -> tuple[Pool, Pool]:
    """Simulated and real ranks."""
    return simulated_pool, scenario_pool


@pytest.mark.parametrize(
    "name",
    sampled(["zero2", "museum:reduces-by-list", "museum:reduces-by-all-to-all", "museum:reduces-to-owner",
     "museum:overlaps-collectives", "museum:gathers-by-broadcast", "museum:adds-halves-of-the-world"], every=2),
)  # fmt: skip
def test_a_scenario_gives_the_same_bits_and_the_same_collectives(name: str, tiers: tuple[Pool, Pool]) -> None:
    named = subject(name)
    num_compared = 0
    for index in range(_NUM_SCENARIOS if name == "zero2" else _NUM_SCENARIOS // 3):
        scenario = generate.draw(11, index, _WORLDS)
        task = encode(RunScenario(SubjectName(named.absolute, named.args), scenario))
        simulated, real = (_verdicts(pool, scenario, task) for pool in tiers)
        for one, other in zip(simulated, real, strict=True):
            assert one.norms == other.norms, (index, one.rank)
            assert one.weights == other.weights, (index, one.rank)
            assert one.collectives == other.collectives, (index, one.rank)
            assert one.checks.keys() >= other.checks.keys() - {"memory"}
            num_compared += len(one.norms) + len(one.weights)
    assert num_compared > 0


def _verdicts(pool: Pool, scenario: Scenario, task: bytes) -> list[RankVerdict]:
    outcome = pool.run(scenario.world, task, timeout_s=120.0)
    assert outcome.replied, [report.error for report in outcome.ranks]
    verdicts = [_verdict.decode(report.reply or b"") for report in outcome.ranks]
    assert all(verdict.status is RankStatus.DONE and verdict.divergence is None for verdict in verdicts)
    return verdicts
