"""What each rank of a process prints: one log for all, and who printed which part of it."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress

_MAX_BYTES = 65_536
_HIGH = 512  # above the numbers that a class's own descriptors get


class Log:
    """Where descriptor 1 of this process leads to when this is made, by a descriptor of its own."""

    def __init__(self) -> None:
        low = os.open("/proc/self/fd/1", os.O_RDONLY)  # which itself is open for writing only
        try:
            self._descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        finally:
            os.close(low)
        self._identity = self._status()[:2]

    def size(self) -> int | None:
        """Bytes in it; None once this descriptor was closed, most likely with all others."""
        with suppress(OSError):
            device, inode, size = self._status()
            if (device, inode) == self._identity:
                return size
        return None

    def read(self, start: int, end: int) -> bytes:
        """A part of it, as far as it is still there."""
        with suppress(OSError):
            return os.pread(self._descriptor, end - start, start)
        return b""

    def _status(self) -> tuple[int, int, int]:
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino, status.st_size


class Printed:
    """Of the ranks of one run. What is written to the log in a rank's turn is that rank's.

    Attributes:
        closed_by: The rank in whose turn the log was closed; None if none.
    """

    def __init__(self, log: Log, world: int) -> None:
        self.closed_by: int | None = None
        self._log = log
        self._parts: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        self._end = log.size() or 0

    def turn_ends(self, rank: int) -> None:
        """All that was written since the last turn ended is this rank's."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError, OSError):  # a class may have closed or replaced it
                stream.flush()
        end = self._log.size()
        if end is None:
            self.closed_by = rank if self.closed_by is None else self.closed_by
            return
        if end > self._end:
            parts = self._parts[rank]
            if parts and parts[-1][1] == self._end:
                parts[-1] = (parts[-1][0], end)
            else:
                parts.append((self._end, end))
        self._end = end  # smaller than before: the log had grown too long and was cut to nothing

    def of(self, rank: int) -> str:
        """The end of what a rank has printed."""
        left = _MAX_BYTES
        found: list[bytes] = []
        for start, end in reversed(self._parts[rank]):
            if left <= 0:
                break
            length = min(left, end - start)
            found.append(self._log.read(end - length, end))
            left -= length
        text = b"".join(reversed(found)).decode(errors="replace")
        missing = sum(end - start for start, end in self._parts[rank]) - (_MAX_BYTES - left)
        return text if missing <= 0 else f"[{missing} bytes before this are left out]\n{text}"
