"""Where a rank is and what it has called, kept in a file that outlives it. No torch.

A rank that dies or hangs sends no verdict. The parent then reads here which step and stage it had entered, which
collectives it had called, which faults of the scenario had struck it, and whether it had come to the end, to tell a
rank that failed from those that only lost their connection to it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.verdict import Collective, Stage


class _Mark(Struct, frozen=True, tag="mark", array_like=True):
    step: int | None
    stage: Stage


class _Call(Struct, frozen=True, tag="call", array_like=True):
    collective: Collective


class _Moved(Struct, frozen=True, tag="moved", array_like=True):
    pass


_MOVED = msgspec.json.encode(_Moved())


class _Hit(Struct, frozen=True, tag="hit", array_like=True):
    fault: int


class _Driven(Struct, frozen=True, tag="driven", array_like=True):
    pass


class _Finished(Struct, frozen=True, tag="finished", array_like=True):
    pass


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Mark | _Call | _Moved | _Hit | _Driven | _Finished).decode


@dataclass(frozen=True)
class Left:
    """What a rank left behind of its scenario.

    Attributes:
        step, stage: the last stage it entered.
        collectives: all it called, in order.
        hits: which of the scenario's faults struck it (their indices), in order.
        driven: it did all operations of the scenario; what is left are the harness's own questions.
        finished: it has only to send its verdict.
    """

    step: int | None = None
    stage: Stage = Stage.BUILD
    collectives: tuple[Collective, ...] = ()
    hits: tuple[int, ...] = ()
    driven: bool = False
    finished: bool = False


_ROOM = 2**16  # bytes; more where a scenario needs it


class Trail:
    """The rank's end: one line for each stage entered, each collective called and each fault, in the file at once.

    The file is memory that the rank shares with whoever reads it: a store, and not a call of the system's, for each of
    the many entries. What follows the last line is zeros.
    """

    def __init__(self, directory: Path, world: int, rank: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(_path(directory, world, rank), flags, 0o600)
        self._end = 0
        self._full: OSError | None = None
        self._memory = self._map(_ROOM)

    def begin(self) -> None:
        """Forget the previous scenario.

        Raises:
            OSError: there was no room for all of its entries.
        """
        if self._full is not None:
            raise self._full
        self._memory[: self._end] = bytes(self._end)
        self._end = 0

    def enter(self, step: int | None, stage: Stage) -> None:
        """The rank enters a stage."""
        self._append(_encode(_Mark(step, stage)))

    def call(self, collective: Collective) -> None:
        """The rank is about to call a collective."""
        self._append(_encode(_Call(collective)))

    def move(self) -> None:
        """The rank makes progress in what is not told: a call into the subject, a collective that is not compared."""
        self._append(_MOVED)

    def hit(self, fault: int) -> None:
        """A fault of the scenario, by its index, is about to strike the rank."""
        self._append(_encode(_Hit(fault)))

    def drive(self) -> None:
        """The rank has done all operations of the scenario."""
        self._append(_encode(_Driven()))

    def finish(self) -> None:
        """The rank has only to send its verdict."""
        self._append(_encode(_Finished()))

    def _append(self, entry: bytes) -> None:
        end = self._end + len(entry) + 1
        if self._full is not None:
            return
        if end >= len(self._memory):
            try:
                self._memory = self._map(2 * end)
            except OSError as error:  # not raised here, in the midst of the subject's call, which is not at fault
                self._full = error
                return
        self._memory[self._end : end] = entry + b"\n"
        self._end = end

    def _map(self, size: int) -> mmap.mmap:
        # Not ftruncate: on a full disk a store to what only seems to be there would end the rank with SIGBUS.
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            text = f"no room for {size} bytes of a rank's trail in the directory for temporary files"
            raise OSError(error.errno, f"{text}: {error.strerror}") from None
        return mmap.mmap(self._descriptor, size)


def read(directory: Path, world: int, rank: int) -> Left:
    """What a rank has left behind of its scenario so far; nothing where there is no trail."""
    step: int | None = None
    stage = Stage.BUILD
    collectives: list[Collective] = []
    hits: list[int] = []
    driven = finished = False
    try:
        lines = _path(directory, world, rank).read_bytes().rstrip(b"\0").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            entry = _decode(line)
        except msgspec.MsgspecError:  # the last line of a rank that was killed while it wrote
            break
        match entry:
            case _Mark():
                step, stage = entry.step, entry.stage
            case _Call():
                collectives.append(entry.collective)
            case _Hit():
                hits.append(entry.fault)
            case _Driven():
                driven = True
            case _Finished():
                finished = True
    return Left(step, stage, tuple(collectives), tuple(hits), driven, finished)


def position(directory: Path, world: int, rank: int) -> int:
    """A number that differs when the rank has got on since it was last asked for; never raises."""
    try:
        return len(_path(directory, world, rank).read_bytes().rstrip(b"\0"))
    except OSError:
        return 0


def _path(directory: Path, world: int, rank: int) -> Path:
    return directory / f"trail-world{world}-rank{rank}"
