"""Messages between the launched processes of one job, pinned up by name in the store that torchrun keeps for it.

The only module of the parent's side that imports torch, whose client speaks the store's language; it joins no group.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from harness.launch import machine
from harness.launch.torchrun import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECT_S = 60.0
_KNOCK_S = 0.2
_BEAT_S = 1.0
# Nobody who lives is silent for so long, nor takes so long to begin.
_SILENT_S = 20.0
_BEGIN_S = 120.0
_LEFT = -(2**62)  # added to a count of beats when no more will come
_MAX_VALUE_BYTES = 4 * 2**20  # the store refuses 8 MiB
_WHOLE, _IN_PARTS = b"\0", b"\1"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BoardGone(Exception):  # noqa: N818 (an event, which the pool turns into its error)
    """The store does not answer: the launcher that keeps it has ended, or cannot be reached."""


class Board:
    """A connection to the store; all names are of this job's present attempt. To be used from one thread, and made in
    the main one.

    Raises:
        BoardGone: from every method.
    """

    def __init__(self, launch: Launch) -> None:
        with _quiet_torch(), _answering(launch):
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            if not launch.hosts_store:
                _reach(launch)
            timeout = datetime.timedelta(seconds=_CONNECT_S)
            store = TCPStore(
                launch.host,
                launch.port,
                is_master=launch.hosts_store,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
            self._store: Store = PrefixStore(launch.prefix, store)
        self._launch = launch
        self._num_parts: dict[str, int] = {}  # of what this process has put up

    def put(self, name: str, message: bytes) -> None:
        """Pin up a message, in place of the one of this name."""
        with _answering(self._launch):
            if len(message) < _MAX_VALUE_BYTES:
                self._store.set(name, _WHOLE + message)  # type: ignore[arg-type]  # (bytes are taken as they are)
                return
            starts = range(0, len(message), _MAX_VALUE_BYTES)
            for index, start in enumerate(starts):
                self._store.set(f"{name}.{index}", message[start : start + _MAX_VALUE_BYTES])  # type: ignore[arg-type]
            self._num_parts[name] = len(starts)
            self._store.set(name, _IN_PARTS + str(len(starts)).encode())  # type: ignore[arg-type]

    def get(self, name: str) -> bytes | None:
        """A message; None if there is none of this name."""
        with _answering(self._launch):
            if not self._store.check([name]):
                return None
            value = self._store.get(name)
            if value[:1] == _WHOLE:
                return value[1:]
            return b"".join(self._store.get(f"{name}.{index}") for index in range(int(value[1:])))

    def take(self, name: str) -> bytes | None:
        """The same, and it is no longer there."""
        message = self.get(name)
        if message is not None:
            parts = 0 if len(message) < _MAX_VALUE_BYTES else -(-len(message) // _MAX_VALUE_BYTES)
            self._remove(name, parts)
        return message

    def remove(self, name: str) -> None:
        """Take down what this process has put up."""
        self._remove(name, self._num_parts.pop(name, 0))

    def wait(self, names: Sequence[str], timeout_s: float) -> bool:
        """Wait until there are messages of all these names, at most so long; whether there are."""
        from torch.distributed import DistStoreError

        with _answering(self._launch):
            if timeout_s < 1e-3:  # the store would take less than a millisecond for no limit at all
                return self._store.check(list(names))
            try:
                self._store.wait(list(names), datetime.timedelta(seconds=timeout_s))
            except DistStoreError:
                return False
            return True

    def count(self, name: str, more: int = 0) -> int:
        """A number that begins with 0, after ``more`` is added to it."""
        with _answering(self._launch):
            return self._store.add(name, more)

    def _remove(self, name: str, num_parts: int) -> None:
        with _answering(self._launch):
            for each in (name, *(f"{name}.{index}" for index in range(num_parts))):
                self._store.delete_key(each)


class Heart:
    """Shows the others that this process lives, also while it computes; a context manager.

    One that is left by an exception shows that this process goes away.
    """

    def __init__(self, launch: Launch) -> None:
        self._board = Board(launch)
        self._name = _beat_of(launch.rank)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_BEAT_S)
        if kind is not None and not self._thread.is_alive():
            with contextlib.suppress(BoardGone):
                self._board.count(self._name, _LEFT)

    def _beat(self) -> None:
        with contextlib.suppress(BoardGone):  # that is told where somebody waits for an answer
            while True:
                self._board.count(self._name, 1)
                if self._ended.wait(_BEAT_S):
                    return


class Pulses:
    """Whether other processes of the job live."""

    def __init__(self, board: Board, ranks: Sequence[int]) -> None:
        self._board = board
        self._beats = dict.fromkeys(ranks, 0)
        self._changed_s = dict.fromkeys(ranks, time.monotonic())
        self._looked_s = 0.0

    def lost(self) -> tuple[int, float | None] | None:
        """One that has been silent for too long, and for how many seconds; None: it has left. Cheap to ask often."""
        now = time.monotonic()
        if now < self._looked_s + _BEAT_S:
            return None
        if now > self._looked_s + _SILENT_S / 2:
            # Nobody has asked for a while, or this process was stopped: nothing is known of the time between.
            self._changed_s = dict.fromkeys(self._changed_s, now)
        self._looked_s = now
        for rank, before in self._beats.items():
            beats = self._board.count(_beat_of(rank))
            if beats < 0:
                return rank, None
            if beats != before:
                self._beats[rank], self._changed_s[rank] = beats, now
            silent_s = now - self._changed_s[rank]
            if silent_s > (_SILENT_S if beats else _BEGIN_S) * machine.patience():
                return rank, silent_s
        return None


def _beat_of(rank: int) -> str:
    return f"beat/{rank}"


def _reach(launch: Launch) -> None:
    """Wait until somebody listens where the store is to be: torch waits more than twice as long as it is told.

    Raises:
        OSError: nobody does, for a long time.
    """
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            socket.create_connection((launch.host, launch.port), _CONNECT_S).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_KNOCK_S)
        else:
            return


@contextlib.contextmanager
def _answering(launch: Launch) -> Iterator[None]:
    from torch.distributed import DistError

    try:
        yield
    except (DistError, OSError) as error:
        said = str(error).partition("\n")[0]
        raise BoardGone(f"the store of the launcher, {launch.host}:{launch.port}, does not answer: {said}") from error


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Import torch so that its store does not print a page whenever somebody has waited in vain, or cannot be had."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = before or "FATAL"
    try:
        with _uninterrupted():
            import torch.distributed  # noqa: F401

        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait: a torch that was imported by half cannot be imported again, to say good-bye to the others."""
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in before:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
