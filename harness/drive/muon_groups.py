"""The process groups of a scenario's colours: made once for each set of ranks, since they are dear."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from harness.scenario.model import Scenario, muon_of

# By default group, which in a simulated world is one object for each rank; what a rank that is not in a group gets for
# it is kept as well, so that all ranks agree on which ones there are.
_known: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def groups_of_colors(scenario: Scenario) -> dict[tuple[int, ...], Any]:
    """The group of each set of ranks that a colour names. Collective over all ranks where some are not there yet.

    A set of all ranks is the default group. A rank that is not in a group gets what torch gives it for that.
    """
    everyone = tuple(range(scenario.world))
    wanted = {tuple(ranks) for color in muon_of(scenario).colors for ranks in color.groups}
    known = _known.setdefault(dist.group.WORLD, {})
    for ranks in sorted(wanted):
        if ranks not in known and ranks != everyone:
            known[ranks] = dist.new_group(list(ranks))
    return {ranks: dist.group.WORLD if ranks == everyone else known[ranks] for ranks in wanted}
