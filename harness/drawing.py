"""Drawing scenarios beside the ranks that run others. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from harness.scenario.model import Scenario

SWITCH_INTERVAL_S = 0.0005
"""How long the thread that draws may keep the one that waits on the ranks: Python's own 5 ms are half a scenario."""


class Drawer:
    """A thread that draws; to be closed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draw")
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def begin(self, draw: Callable[[int], Scenario], index: int) -> Future[Scenario]:
        """Start drawing scenario number ``index``."""
        return self._thread.submit(draw, index)

    def close(self) -> None:
        """Wait for what is being drawn, forget what is not yet. Idempotent."""
        self._thread.shutdown(cancel_futures=True)
        sys.setswitchinterval(self._switch_interval)
