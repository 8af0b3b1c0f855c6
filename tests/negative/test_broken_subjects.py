"""Every planted bug must be found, and named at the property and stage where it first shows.

The classes and what to expect of each are in tests/subjects: whole ZeRO classes written from the specification alone,
each with one bug. Property and stage are those of the first difference, so a bug that is noticed too late fails here.
Here some of them on real ranks, the others in test_simulated.py, or by their saved cases in test_regressions.py; with
FULL_TABLE=1 all of them in each.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from harness.evaluate import start_pool
from harness.report.result import Failure, Result
from harness.scenario import codec
from harness.scenario.model import steps
from tests.subjects.catalogue import BROKEN, Broken, on_real_ranks
from tests.support import FULL_TABLE, Campaigns, sampled

EXAMPLES = 150
SHRINK_S = 0.3  # where it first shows does not depend on how small it is


@pytest.mark.parametrize(
    "broken",
    sampled([each for each in BROKEN if FULL_TABLE or on_real_ranks(each)], every=2),
    ids=lambda broken: broken.name,
)
def test_a_broken_subject_is_caught_where_it_first_shows(
    broken: Broken, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = broken.name == "HangsInNorm"
    monkeypatch.setattr("harness.explain.MORE_SCENARIOS", 0)  # symptoms are judged in test_symptoms.py
    if "determinism" not in broken.properties:
        monkeypatch.setattr("harness.explain.REPLAYS", 1)  # one that ends a rank costs a second each time
    with contextlib.ExitStack() as stack:
        if broken.name == "CrashesWhenIdle":  # what it leaves running would end the ranks of the tests that follow
            campaigns = Campaigns(stack.enter_context(start_pool()), campaigns.report)
        result = campaigns.run(
            f"broken.py:{broken.name}",
            worlds=_worlds(broken),
            examples=EXAMPLES,
            timeout_s=3.0 if hangs else None,
            shrink_s=SHRINK_S,
        )

    failure = _violated(result)
    assert failure.property in broken.properties, failure.message
    assert failure.stage in broken.stages, failure.message
    assert failure.message
    assert codec.load(Path(failure.case or "")).scenario.world in _worlds(broken)


def test_a_saved_case_fails_again_and_holds_once_the_class_is_mended(simulated: Campaigns) -> None:
    case = Path(_violated(simulated.run("broken.py:LostFirstPart", worlds=(1, 2, 3, 4), examples=50)).case or "")

    again = simulated.replay(case, "broken.py:LostFirstPart")
    mended = simulated.replay(case, "museum:plain-zero")

    assert _violated(again).case == str(case)
    assert mended.verdict == "holds", mended.reason


def test_a_failing_scenario_is_made_small(simulated: Campaigns) -> None:
    """A sum over parts that loses the first needs one rank, one parameter of one element, one step, two parts."""
    result = simulated.run("broken.py:LostFirstPart", worlds=(4, 3, 2, 1), examples=50, shrink_s=60.0)

    scenario = codec.load(Path(_violated(result).case or "")).scenario
    assert scenario.world == 1
    assert [parameter.numel for parameter in scenario.parameters] == [1]
    assert [len(plan.parts) for plan in steps(scenario)] == [2]


def test_a_wrong_value_names_the_element_and_its_bits(simulated: Campaigns) -> None:
    failure = _violated(simulated.run("museum:mean-for-sum", worlds=(2,), examples=20))

    # Which of the two depends on how small the case was made in its time: a zero is half of itself.
    assert (failure.step, failure.rank) == (0, failure.owner)
    assert failure.bucket is not None
    assert failure.parameter is not None
    assert failure.element is not None
    assert failure.owner in (0, 1)
    assert isinstance(failure.expected, float)
    assert failure.expected == 2 * float(failure.actual or 0.0)
    assert failure.expected_bits != failure.actual_bits
    assert failure.expected_bits is not None
    assert failure.expected_bits.startswith("0x")
    assert (failure.ulps or 0) > 0
    assert (failure.mismatches or 0) > 0


def test_an_intermittent_bug_is_named_as_such(campaigns: Campaigns) -> None:
    failure = _violated(campaigns.run("broken.py:Nondeterministic", worlds=(1, 2), examples=60))

    assert failure.property == "determinism"
    assert "runs of" in (failure.message or "")  # of one case, or of one scenario whose sum came and went


def _worlds(broken: Broken) -> tuple[int, ...]:
    if broken.only_world is not None:
        return (broken.only_world,)
    return tuple(world for world in (1, 2, 3, 4) if world >= broken.min_world)


def _violated(result: Result) -> Failure:
    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    return result.failure
