"""What is right in another way must hold: other bucket roundings, other collectives, other orders of addition."""

from __future__ import annotations

import pytest

from harness.faults.museum.catalogue import CONTROLS
from harness.faults.museum.exhibit import Control
from tests.support import FULL_TABLE, Campaigns, sampled

EXAMPLES = 16
SEED = 3  # of a campaign in which each world has what the refusing classes take, and sums that depend on the order
REFUSING = ("RefusesScalars", "RefusesThirdPart")

# Right within rounding, but added in no order that is fixed, or in none that can be found out.
WITHIN_THE_BOUND = (
    "AddsInFloat64",
    "ChangesOrderEveryStep",
    "AddsPartsBackward",
    "OneInstanceAProcess",
    "SharesItsGradient",
)


# What refuses scenarios and what is held against the bound is looked at here alone; of the others each twelfth.
CHOSEN = [
    control
    for index, control in enumerate(CONTROLS)
    if control.system == "zero_master"
    if FULL_TABLE or index % 24 == 0 or control.name in (*REFUSING, *WITHIN_THE_BOUND)
]


MUON = sampled([control for control in CONTROLS if control.system == "muon"], 6)
STRATEGIES = sampled([control for control in CONTROLS if control.system == "strategy"], 12)


@pytest.mark.parametrize("control", CHOSEN, ids=lambda control: control.id)
def test_a_right_variant_holds(control: Control, campaigns: Campaigns) -> None:
    """Bit for bit in whatever order it adds; what no order explains is said to be within the bound."""
    result = campaigns.run(control.subject, worlds=(1, 2, 3, 4), examples=EXAMPLES, seed=SEED)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.examples.run + result.examples.discarded == EXAMPLES
    assert (result.examples.discarded > 0) == (control.name in REFUSING)
    assert {world for world, of_world in result.examples.per_world.items() if of_world.count} == {1, 2, 3, 4}
    assert result.reached["order-matters"] > 0
    assert result.oracle["exact"] > 0
    assert result.oracle["ordered"] > 0
    assert (result.oracle["bound"] > 0) == (control.name in WITHIN_THE_BOUND)


@pytest.mark.parametrize("control", MUON, ids=lambda control: control.id)
def test_a_right_variant_of_muon_holds(control: Control, campaigns: Campaigns) -> None:
    result = campaigns.run(control.subject, worlds=(1, 2, 3), examples=EXAMPLES, seed=SEED)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.examples.run == EXAMPLES
    assert result.oracle["exact"] > 0


@pytest.mark.parametrize("control", STRATEGIES, ids=lambda control: control.id)
def test_a_right_strategy_holds(control: Control, campaigns: Campaigns) -> None:
    result = campaigns.run(control.subject, worlds=(1, 2, 3), examples=EXAMPLES, seed=SEED)

    assert result.verdict == "holds", (result.reason, result.failure)
    assert result.examples.run == EXAMPLES
    assert result.oracle["exact"] > 0
