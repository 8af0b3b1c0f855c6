"""What is right in another way must hold: other bucket roundings, other collectives, other orders of addition."""

from __future__ import annotations

import pytest

from tests.subjects.catalogue import RIGHT
from tests.support import Campaigns

SEED = 6  # of a campaign in which each world has scenarios that the refusing classes take
REFUSING = ("RefusesScalars", "RefusesThirdPart")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_variant_holds(name: str, campaigns: Campaigns) -> None:
    file = "plain.py" if name == "PlainZero" else "right.py"
    result = campaigns.run(f"{file}:{name}", worlds=(1, 2, 3, 4), examples=40, seed=SEED)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.examples.run + result.examples.discarded == 40
    assert (result.examples.discarded > 0) == (name in REFUSING)
    assert {world for world, of_world in result.examples.per_world.items() if of_world.count} == {1, 2, 3, 4}


PREDICTED = ("ReducesByAllReduce", "ReducesByAllToAll", "ReducesByList", "ReducesToOwner", "OverlapsCollectives")
PROBED = (
    "ReducesEverythingAtOnce",
    "ReducesEveryPart",
    "AddsInSomeOrder",
    "AddsPairwise",
    "AddsOwnFirst",
    "AddsHalvesOfTheWorld",
)


@pytest.mark.parametrize("name", [*PREDICTED, *PROBED])
def test_whatever_order_it_adds_in_is_followed_bit_for_bit(name: str, campaigns: Campaigns) -> None:
    result = campaigns.run(f"right.py:{name}", worlds=(3, 4), examples=30, seed=SEED)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.reached["order-matters"] > 0
    assert result.oracle["ordered"] > 0
    assert result.oracle["bound"] == 0


@pytest.mark.parametrize("name", ["AddsInFloat64", "ChangesOrderEveryStep", "AddsPartsBackward", "OneInstanceAProcess"])
def test_what_no_fixed_order_explains_is_judged_by_the_bound(name: str, campaigns: Campaigns) -> None:
    """No violation, but said: a wrong order inside a right sum is a difference within the bound."""
    result = campaigns.run(f"right.py:{name}", worlds=(3, 4), examples=40, seed=SEED)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.oracle["bound"] > 0
    assert result.oracle["exact"] > 0
