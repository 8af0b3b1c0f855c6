"""Handlers of signals, which only the main thread may install: ranks of a simulated world are other threads."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

from harness.sim.world import SimWorld


class Signals:
    """Stands in for ``signal.signal`` from when it is made; to be made before a class can have taken hold of that.

    Attributes:
        world: Whose ranks may install handlers now; None: this process's main thread alone, as ever.
    """

    def __init__(self) -> None:
        self.world: SimWorld | None = None
        original = signal.signal

        @functools.wraps(original)
        def install(number: int, handler: Any) -> Any:  # noqa: ANN401 (as the original)
            here: Callable[[], Any] = functools.partial(original, number, handler)
            if self.world is None or threading.current_thread() is threading.main_thread():
                return here()
            return self.world.on_calling_thread(here)

        vars(signal)["signal"] = install
