"""What is right in another way must hold: other bucket roundings, other collectives, other orders of addition."""

from __future__ import annotations

import pytest

from tests.subjects.catalogue import RIGHT
from tests.support import Campaigns

REFUSING = ("RefusesScalars", "RefusesThirdPart")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_variant_holds(name: str, campaigns: Campaigns) -> None:
    file = "plain.py" if name == "PlainZero" else "right.py"
    result = campaigns.run(f"{file}:{name}", worlds=(1, 2, 3, 4), examples=40)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.examples.run + result.examples.discarded == 40
    assert (result.examples.discarded > 0) == (name in REFUSING)
    assert {world for world, of_world in result.examples.per_world.items() if of_world.count} == {1, 2, 3, 4}


def test_another_order_of_addition_is_judged_by_the_bound(campaigns: Campaigns) -> None:
    """Reducing every part and adding the shards is another order: right, though not bit for bit on general values."""
    result = campaigns.run("right.py:ReducesEveryPart", worlds=(2,), examples=150)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.oracle["bound"] > 0
    assert result.oracle["exact"] > 0
