"""What a scenario of system ``"strategy"`` asks of a subject, and what is offered: whether the one has the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.scenario.strategy import Offer, Strategy

if TYPE_CHECKING:
    from harness.scenario.model import Scenario


def beyond(scenario: Scenario, strategy: Strategy, offer: Offer) -> tuple[str, ...]:
    """The names, as :class:`Offer` has them, of where ``scenario`` asks for something else than ``offer`` holds."""
    places = strategy.places
    unused = any(any(getattr(operation, "none", ())) for operation in scenario.operations)
    plain = strategy.converts or any(place.plain for place in places)
    excluded = {
        "sharding": strategy.sharding != offer.sharding,
        # Where they do not divide the world, as many as do.
        "replicas": offer.replicas is not None and strategy.replicas != math.gcd(offer.replicas, scenario.world),
        "reduce": not _has(scenario, strategy.reduce, offer),
        "compute": strategy.compute not in offer.compute,
        "dtypes": any(parameter.dtype not in offer.dtypes for parameter in scenario.parameters),
        "offload": strategy.offload and not offer.offload,
        "unused": unused and not offer.unused,
        "tied": any(place.tied for place in places) and not offer.tied,
        "plain": plain and not offer.plain,
        "unequal_start": strategy.unequal_start and not offer.unequal_start,
        "deferred": strategy.accumulation == "deferred" and not offer.deferred,
        "flush": strategy.accumulation == "flush" and not offer.flush,
        "dedicated": any(place.dedicated for place in places) is not offer.dedicated,
        "rounds": scenario.values.domain.value == "general" and not offer.rounds,
    }
    return tuple(name for name, holds in excluded.items() if holds)


def _has(scenario: Scenario, reduce: str, offer: Offer) -> bool:
    """Whether it reduces in that dtype: in one that it has, or in that of parameters that it does not cast."""
    return reduce in offer.reduce or any(parameter.dtype == reduce == "bf16" for parameter in scenario.parameters)
