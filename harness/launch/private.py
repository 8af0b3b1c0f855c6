"""The private directory of a pool: stores, logs and stacks, removed when the pool ends, also after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from harness.errors import UsageError

_PREFIX = "zero2-harness-"
_LOCK = "lock"
# Trails, logs and stores of a few ranks take less than 1 MiB; what subjects print comes on top.
_MIN_FREE_BYTES = 16 * 2**20
_PROBE_BYTES = 65_536
_HINT = "set TMPDIR to a directory that can be written"


class PrivateDirectory:
    """A directory only this user can enter, under ``$TMPDIR``, locked for as long as this process lives.

    The kernel releases the lock however the process ends, so whoever makes the next directory can tell those that
    nobody uses any more, and removes them. (A process number could have been given to another process by then.)

    Raises:
        UsageError: there is no place for temporary files, it cannot be written, or it is full. ``$TMPDIR`` is taken at
            its word: Python would silently go elsewhere.
    """

    def __init__(self) -> None:
        self._lock = -1
        place = tempfile.tempdir or os.environ.get("TMPDIR")
        try:
            place = os.fspath(place or tempfile.gettempdir())
            _sweep(Path(place))
            while self._lock < 0:
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
                self._lock = _try_lock(self.path, create=True)
            free = shutil.disk_usage(self.path).free
        except (OSError, ValueError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise UsageError(f"temporary files in {place or 'any usual place'}: {reason}; {_HINT}") from None
        if free < _MIN_FREE_BYTES:
            self.remove()
            room = f"{free / 2**20:.1f} MiB are free, at least {_MIN_FREE_BYTES // 2**20} are needed"
            raise UsageError(f"temporary files in {place}: {room}; {_HINT}")
        problem = self.problem()  # A quota, or a limit on the size of files, is not in what is free.
        if problem is not None:
            self.remove()
            raise UsageError(problem)

    def problem(self) -> str | None:
        """One line if the directory cannot be written now; tries it. (One that is gone went with the pool.)"""
        probe = self.path / f"probe{os.getpid()}"
        try:
            try:
                probe.write_bytes(bytes(_PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot write logs and stores in {self.path}: {error.strerror}; {_HINT}"
        return None

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
    """The descriptor of the directory's lock, now ours; -1 if somebody holds it or the directory is going away.

    Raises:
        OSError: with ``create``: the lock can be had by nobody.
    """
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except OSError:
        if create:
            raise
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(descriptor).st_nlink > 0
    except BlockingIOError:
        held = False
    except OSError:
        os.close(descriptor)
        if create:
            raise
        return -1
    if held:
        return descriptor
    os.close(descriptor)
    return -1


def _sweep(place: Path) -> None:
    """Remove the directories of pools that ended without removing their own."""
    for directory in place.glob(f"{_PREFIX}*"):
        descriptor = _try_lock(directory, create=False)
        if descriptor >= 0:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(descriptor)
