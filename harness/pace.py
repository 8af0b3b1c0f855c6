"""How many scenarios are handed out at once, where several run side by side. No clocks, no torch."""

from __future__ import annotations

CHUNK_S = 2.0
"""About how long the scenarios that are handed out at once may take: nothing is told in between."""

CHUNK_PER_LANE = 8
"""How many may be handed out at once: of a few the last ones leave lanes with nothing to do."""


class Pace:
    """Begins with one scenario, so that what fails at once is told at once.

    Args:
        lanes: How many scenarios run at the same time; of 1, they are handed out one by one.

    Attributes:
        largest: The most scenarios that are ever handed out at once.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.largest = 1 if lanes == 1 else CHUNK_PER_LANE * lanes
        self._size = 0
        self._per_cost_s = 0.0  # in the last chunk that took any time
        self._costs = self._seconds = 0.0  # of the present one

    def next_size(self) -> int:
        """The most scenarios that are to be in the next chunk."""
        if self._costs:
            self._per_cost_s = self._seconds / self._costs
        self._costs = self._seconds = 0.0
        self._size = 1 if self._size == 0 else min(max(2 * self._size, self._lanes), self.largest)
        return self._size

    def ran(self, cost: float, seconds: float) -> None:
        """A scenario of the present chunk was responsible for so many seconds of it."""
        self._costs += cost
        self._seconds += seconds

    def expected_s(self, costs: float) -> float:
        """How long scenarios that cost so much together will take, as the last chunk went."""
        return self._per_cost_s * costs
