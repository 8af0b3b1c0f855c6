"""The workers of a fuzz campaign, from its own process: started, told what to do, heard, ended and reaped."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from harness.fuzz import messages
from harness.fuzz.messages import Order, Progress, Report
from harness.launch import machine, process
from harness.launch.wire import Channel, Kind, WireError

END_S = 20.0
"""How long a worker that was told to end may take, with all that it started."""

_LOG_TAIL_BYTES = 2000


@dataclass
class Worker:
    """One worker's process, this end of the connection to it, and what is known of it.

    Attributes:
        number: From 0.
        round: The order that it carries out now: a round's index, or None.
        busy: Whether it carries out an order.
        ready: Whether it can be given orders.
        progress: Of the present order.
        began: When the present order was given, on the monotonic clock.
        trouble: Why it ends, in its own words.
    """

    number: int
    process: subprocess.Popen[bytes]
    channel: Channel
    log: Path
    ready: bool = False
    busy: bool = False
    round: int | None = None
    limit: int = 0
    kind: str = ""
    began: float = field(default_factory=time.monotonic)
    progress: Progress | None = None
    trouble: str | None = None

    def tell(self, order: Order) -> None:
        """Give it an order; what is the matter with a worker that takes none is known by its end."""
        with suppress(OSError):
            self.channel.send(Kind.TASK, messages.encode(order))

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


class Crew:
    """All workers; a context manager that ends them on every path."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
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

    def start(self, number: int, log: Path, setup: messages.Setup) -> Worker:
        """Start a worker.

        Raises:
            OSError: the machine does not start another process, in words.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as output:
                started = subprocess.Popen(
                    process.command("harness.fuzz.worker", process.import_path(), theirs.fileno()),
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
        worker = Worker(number, started, Channel(ours), log)
        self.workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        worker.tell(setup)
        return worker

    def hear(self, timeout_s: float) -> Iterator[tuple[Worker, Report | None]]:
        """What workers say, waiting so long for the first word; None once for each that has ended, which is reaped."""
        for key, _ in self._selector.select(timeout_s):
            worker: Worker = key.data
            try:
                frames = worker.channel.receive()
                reports = [messages.decode_report(frame.payload) for frame in frames]
            except (WireError, msgspec.MsgspecError):
                worker.process.kill()  # what it would say further would make no more sense
                reports, worker.channel.ended = [], True
            for report in reports:
                yield worker, report
            if worker.channel.ended:
                self._reap(worker, time.monotonic() + END_S)
                yield worker, None

    def interrupt(self, worker: Worker) -> None:
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

    def _reap(self, worker: Worker, deadline: float) -> None:
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
