"""Several processes that run simulated worlds side by side: who runs what, and what became of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.launch.outcome import Outcome

MAX_LANES = 8
"""The one thread that draws scenarios and judges what came of them keeps so many busy, not more."""


@dataclass(frozen=True)
class Batch:
    """What became of tasks that ran side by side.

    Attributes:
        outcomes: One a task, in order; None where it did not finish, or is not to be trusted: its process ended, or did
            not get on. Their seconds add up to those that the batch took: each has the share of what its process spent
            on it in what all spent on theirs.
        died: By task (its index), with what error the process ended by itself in which it ran.
        kept: The processes live on.
    """

    outcomes: tuple[Outcome | None, ...]
    died: Mapping[int, str]
    kept: bool


def balanced(costs: Sequence[float], num_lanes: int) -> list[list[int]]:
    """Tasks (their indices, in order) by lane, so that all lanes take about as long; ``costs`` in any one unit."""
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    loads = [0.0] * num_lanes
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        lane = loads.index(min(loads))
        lanes[lane].append(index)
        loads[lane] += costs[index]
    return [sorted(lane) for lane in lanes]
