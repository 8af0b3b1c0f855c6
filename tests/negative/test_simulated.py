"""What is found on real ranks is found in a simulated world too, where it first shows, and what is right holds there.

Property and stage are those of the first difference, as on gloo. A rank that parts ways is told at once there: a
collective is only paired with its own kind, so that what gloo shows later, or as a hang, is a wrong sequence here.
"""

from __future__ import annotations

import contextlib

import pytest

from harness.evaluate import start_pool
from harness.faults.museum.catalogue import CONTROLS
from harness.faults.museum.exhibit import Control
from tests.negative.test_right_variants import CHOSEN
from tests.subjects import catalogue
from tests.subjects.catalogue import BROKEN, Broken
from tests.support import FULL_TABLE, Campaigns, repetitions, sampled

EXAMPLES = 150
SHRINK_S = 0.3  # where it first shows does not depend on how small it is


@pytest.mark.parametrize(
    "broken",
    sampled([each for each in BROKEN if FULL_TABLE or catalogue.simulated(each)], every=2),
    ids=lambda broken: broken.name,
)
def test_a_broken_subject_is_caught_where_it_first_shows(
    broken: Broken, simulated: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = broken.name == "HangsInNorm"
    monkeypatch.setattr("harness.explain.MORE_SCENARIOS", 0)  # symptoms are judged in test_symptoms.py
    if "determinism" not in broken.properties:
        monkeypatch.setattr("harness.explain.REPLAYS", 1)
    worlds = (broken.only_world,) if broken.only_world is not None else (1, 2, 3, 4)
    with contextlib.ExitStack() as stack:
        if broken.name == "CrashesWhenIdle":  # what it leaves running would end the process of the tests that follow
            pool = stack.enter_context(start_pool("sim"))
            simulated = Campaigns(pool, simulated.report, "sim")
        result = simulated.run(
            f"broken.py:{broken.name}",
            worlds=worlds,
            examples=EXAMPLES,
            timeout_s=3.0 if hangs else None,
            shrink_s=SHRINK_S,
        )

    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    assert result.failure.property in broken.properties, result.failure.message
    assert result.failure.stage in broken.stages, result.failure.message


# To look at every operation of a scenario takes as long as several scenarios.
LOOKED_AT = sampled(CONTROLS, every=8)


@pytest.mark.parametrize(
    "control",
    sampled([each for each in CONTROLS if FULL_TABLE or each not in CHOSEN], every=4),
    ids=lambda control: control.id,
)
def test_a_right_variant_holds(control: Control, simulated: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every operation is looked at; of the last scenario of some, of that of all with FULL_TABLE."""
    examples = repetitions(4, 8)
    monkeypatch.setattr("harness.runner.CLOSELY_EVERY", examples if control in LOOKED_AT else examples + 1)
    result = simulated.run(control.subject, worlds=(1, 2, 3, 4), examples=examples)

    assert result.verdict == "holds", (result.reason, result.failure)
