"""Worker processes that are told what to do one order at a time: started, told, heard, ended and reaped.

``T`` is what a worker is doing, in the words of whoever gave the order; ``R`` what it says, decoded. Orders go out in
frames of kind TASK, all that comes back is in frames of kind EVENT; both are msgpack.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from harness.ending import interruptible
from harness.launch import machine, process
from harness.launch.wire import Channel, Kind, WireError

T = TypeVar("T")
R = TypeVar("R")

END_S = 20.0
"""How long a worker that was told to end may take, with all that it started."""

_LOG_TAIL_BYTES = 2000

_encode = msgspec.msgpack.encode


@dataclass
class Worker(Generic[T]):
    """One worker's process, this end of the connection to it, and what is known of it.

    Attributes:
        number: From 0.
        ready: Whether it can be given orders.
        task: What it does now; None: nothing.
        began: When that was given, on the monotonic clock.
        trouble: Why it ends, in its own words.
    """

    number: int
    process: subprocess.Popen[bytes]
    channel: Channel
    log: Path
    ready: bool = False
    task: T | None = None
    began: float = field(default_factory=time.monotonic)
    trouble: str | None = None

    def order(self, order: object, task: T) -> None:
        """Give it an order."""
        self.task, self.began = task, time.monotonic()
        self.tell(order)

    def tell(self, order: object) -> None:
        """Send it an order; what is the matter with a worker that takes none is known by its end."""
        with suppress(OSError):
            self.channel.send(Kind.TASK, _encode(order))

    def how_it_ended(self) -> str:
        """In words, with the last line it printed. To be asked of one that has ended."""
        if self.trouble is not None:
            return f"worker {self.number}: {self.trouble}"
        code = self.process.returncode
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        with suppress(OSError, ValueError):
            ended = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else ended
        printed = _tail(self.log)
        return f"worker {self.number} ended with {ended}{f': {printed}' if printed else ''}"


class Crew(Generic[T, R]):
    """All workers; a context manager that ends them on every path.

    Args:
        module: Its ``main(descriptor)`` is what a worker runs, in a fresh interpreter.
        decode: What a worker says, from msgpack; raises ``msgspec.MsgspecError``.
    """

    def __init__(self, module: str, decode: Callable[[bytes], R]) -> None:
        self.workers: list[Worker[T]] = []
        self._module = module
        self._decode = decode
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end_all()
        finally:
            self._selector.close()

    def start(self, number: int, log: Path, setup: object) -> Worker[T]:
        """Start a worker; ``setup`` is the first that it is told, what it prints goes to the end of ``log``.

        Raises:
            OSError: the machine does not start another process, in words.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as output:
                started = subprocess.Popen(
                    process.command(self._module, process.import_path(), theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=process.pool_environment({"HYPOTHESIS_STORAGE_DIRECTORY": os.devnull}),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # A Ctrl-C at the terminal is for this process alone.
                )
        except OSError as error:
            ours.close()
            raise OSError(error.errno, machine.describe_refusal(error)) from error
        ours.setblocking(False)
        worker: Worker[T] = Worker(number, started, Channel(ours), log)
        self.workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        worker.tell(setup)
        return worker

    def hear(self, timeout_s: float) -> Iterator[tuple[Worker[T], R | None]]:
        """What workers say, waiting so long for the first word; None once for each that has ended, which is reaped."""
        for key, _ in self._selector.select(timeout_s):
            worker: Worker[T] = key.data
            try:
                frames = worker.channel.receive()
                reports = [self._decode(frame.payload) for frame in frames]
            except (WireError, msgspec.MsgspecError):
                worker.process.kill()  # what it would say further would make no more sense
                reports, worker.channel.ended = [], True
            for report in reports:
                yield worker, report
            if worker.channel.ended:
                self._reap(worker, time.monotonic() + END_S)
                yield worker, None

    def interrupt(self, worker: Worker[T]) -> None:
        """Tell a worker to say what it has and to end."""
        worker.ready = False
        with suppress(ProcessLookupError):
            worker.process.send_signal(signal.SIGINT)

    def end_all(self) -> None:
        """End and reap whoever is left: told first, killed in the end."""
        for worker in self.workers:
            self.interrupt(worker)
        deadline = time.monotonic() + END_S
        while self.workers:
            self._reap(self.workers[0], deadline)

    def kill_all(self) -> None:
        """End and reap whoever is left, at once. What their ranks are ends with them."""
        for worker in self.workers:
            worker.process.kill()
        self.end_all()

    def _reap(self, worker: Worker[T], deadline: float) -> None:
        with suppress(KeyError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        try:
            worker.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        with suppress(ValueError):
            self.workers.remove(worker)


def _tail(log: Path) -> str:
    """The last line that was printed to a log."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(log.stat().st_size - _LOG_TAIL_BYTES, 0))
            lines = stream.read().decode(errors="backslashreplace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


# --- the other end ----------------------------------------------------------------------------------------------------


def serve(descriptor: int, name: str, work: Callable[[Channel], None]) -> None:
    """Be a worker, shown as ``name`` in process listings: ``work`` does what arrives, until it ends or is told to."""
    process.set_name(name)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        with interruptible():
            work(channel)
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        pass  # told to end, or nobody is left to tell anything to


def say(channel: Channel, report: object) -> None:
    """Tell whoever started this worker."""
    channel.send(Kind.EVENT, _encode(report))
