"""The private directory of a pool: stores, logs and stacks, removed when the pool ends, also after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "zero2-harness-"
_LOCK = "lock"


class PrivateDirectory:
    """A directory only this user can enter, under ``$TMPDIR``, locked for as long as this process lives.

    The kernel releases the lock however the process ends, so whoever makes the next directory can tell those that
    nobody uses any more, and removes them. (A process number could have been given to another process by then.)
    """

    def __init__(self) -> None:
        _sweep()
        self._lock = -1
        while self._lock < 0:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = _try_lock(self.path, create=True)

    def remove(self) -> None:
        """Delete the directory with all that is in it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.release()

    def release(self) -> None:
        """Give up the directory without deleting it. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _try_lock(directory: Path, *, create: bool) -> int:
    """The descriptor of the directory's lock, now ours; -1 if somebody holds it or the directory is going away."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(descriptor).st_nlink > 0
    except OSError:
        held = False
    if held:
        return descriptor
    os.close(descriptor)
    return -1


def _sweep() -> None:
    """Remove the directories of pools that ended without removing their own."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        descriptor = _try_lock(directory, create=False)
        if descriptor >= 0:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(descriptor)
