"""Which rank of a simulated world has its turn, kept in a file that outlives the process. No torch.

Where that process dies or hangs, the parent reads here whose doing it was: of its ranks only one ran.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

# The number of turns so far, the running rank plus one (0: none); then the thread of each rank (0: none yet).
_HEADER = struct.Struct("<QQ")
_THREAD = struct.Struct("<Q")


@dataclass(frozen=True)
class State:
    """What the file says.

    Attributes:
        rank: Whose turn it is; None: nobody's.
        num_turns: So far; only that it differs from an earlier one means something.
        threads: ``threading.get_ident()`` of the thread in which each rank ran last; 0 where it has not run.
    """

    rank: int | None = None
    num_turns: int = 0
    threads: tuple[int, ...] = ()


class Turn:
    """The end of the process that holds the world; a store to shared memory for each turn.

    Raises:
        OSError: There is no room for the file.
    """

    def __init__(self, directory: Path, world: int) -> None:
        size = _size(world)
        descriptor = os.open(_path(directory, world), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: on a full disk a store would then end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
        except OSError as error:
            text = f"no room for {size} bytes of a simulated world's state in the directory for temporary files"
            raise OSError(error.errno, f"{text}: {error.strerror}") from None
        finally:
            os.close(descriptor)
        self._count = 0

    def enter(self, rank: int | None) -> None:
        """It is this rank's turn, in the calling thread; None: it is nobody's."""
        self._count += 1
        if rank is None:
            _HEADER.pack_into(self._memory, 0, self._count, 0)
            return
        _THREAD.pack_into(self._memory, _HEADER.size + rank * _THREAD.size, threading.get_ident())
        _HEADER.pack_into(self._memory, 0, self._count, rank + 1)


def clear(directory: Path, world: int) -> None:
    """Forget what earlier tasks left, before the next one begins; a :class:`Turn` goes on writing to the same file."""
    with contextlib.suppress(FileNotFoundError), _path(directory, world).open("r+b", buffering=0) as file:
        file.write(bytes(_size(world)))


def read(directory: Path, world: int) -> State:
    """What a world has left behind so far; that of none where there is no file. Never raises."""
    try:
        data = _path(directory, world).read_bytes()
    except OSError:
        return State()
    if len(data) != _size(world):
        return State()
    count, running = _HEADER.unpack_from(data)
    threads = tuple(thread for (thread,) in _THREAD.iter_unpack(data[_HEADER.size :]))
    return State(running - 1 if 0 < running <= world else None, count, threads)


def lane_directory(directory: Path, lane: int) -> Path:
    """Where a process that runs worlds side by side with others keeps what it leaves behind."""
    return directory / f"lane{lane}"


def _size(world: int) -> int:
    return _HEADER.size + world * _THREAD.size


def _path(directory: Path, world: int) -> Path:
    return directory / f"turn-world{world}"
