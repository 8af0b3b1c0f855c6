"""What is found on real ranks is found in a simulated world too, where it first shows, and what is right holds there.

Property and stage are those of the first difference, as on gloo. A rank that parts ways is told at once there: a
collective is only paired with its own kind, so that what gloo shows later, or as a hang, is a wrong sequence here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from harness.evaluate import start_pool
from tests.subjects.catalogue import BROKEN, RIGHT, Broken
from tests.support import Campaigns

EXAMPLES = 150
# Each third class, with FULL_TABLE=1 in the environment (`make stress`) all: on real ranks all of them run every time.
EACH = 1 if os.environ.get("FULL_TABLE") else 3
SHRINK_S = 0.3  # where it first shows does not depend on how small it is


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaigns]:
    """Campaigns in simulated worlds."""
    with start_pool("sim") as pool:
        yield Campaigns(pool, tmp_path_factory.mktemp("cases"), "sim")


@pytest.mark.parametrize("broken", BROKEN[::EACH], ids=lambda broken: broken.name)
def test_a_broken_subject_is_caught_where_it_first_shows(broken: Broken, simulated: Campaigns) -> None:
    hangs = broken.name == "HangsInNorm"
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


@pytest.mark.parametrize("name", RIGHT[::EACH])
def test_a_right_variant_holds(name: str, simulated: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every operation is looked at."""
    monkeypatch.setattr("harness.runner.CLOSELY_EVERY", 6)
    result = simulated.run(f"right.py:{name}", worlds=(1, 2, 3, 4), examples=24)

    assert result.verdict == "holds", (result.reason, result.failure)
