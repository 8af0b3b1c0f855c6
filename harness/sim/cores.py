"""Keep threads that take turns on one core: going from core to core costs a third more than the work itself."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_libc = ctypes.CDLL(None)


@contextmanager
def on_one_core(lane: int | None = None) -> Iterator[None]:
    """Threads that this one starts stay on one core; afterwards it may go anywhere it might before.

    It is the one where this thread is now: the system has chosen it just before, and chooses anew for the next time. Of
    processes that do this side by side each has a number, ``lane``, and a core by that: chosen at the same moment, one
    core would do for several of them, while others have nothing to do.
    """
    before = os.sched_getaffinity(0)
    core = _libc.sched_getcpu() if lane is None else sorted(before)[lane % len(before)]
    if core in before:
        with suppress(OSError):  # not allowed in this container
            os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
