"""The parent's end of the zygote: its process and the control connection to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.launch import process, wire

_SEND_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 30.0


class ZygoteGone(Exception):  # noqa: N818 (an event, which the pool turns into its error)
    """The zygote does not answer any more."""


class ZygoteLink:
    """Starts the zygote; sends it orders and collects what it reports. The zygote ends when the link closes.

    Args:
        directory: The pool's private directory; the zygote removes it when it ends.
        execute: Start ranks as fresh interpreters.
        preload: What the zygote imports.
        environment: Of the zygote and the ranks.

    Raises:
        OSError: The machine does not start another process.
        ZygoteGone: It ended at once.
    """

    def __init__(
        self, directory: Path, *, execute: bool, preload: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.log = directory / "zygote.log"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo:
            undo.callback(self._control.close)
            with theirs, self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    process.command("harness.launch.zygote", process.import_path(), theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # A Ctrl-C at the terminal is for this process alone.
                )
            undo.callback(self.close, serving=False)
            self.pid = self._process.pid
            in_main_thread = threading.current_thread() is threading.main_thread()
            self.tell(wire.Configure(os.getpid(), str(directory), execute, list(preload), in_main_thread))
            undo.pop_all()

    def fileno(self) -> int:
        """The control connection, for a selector."""
        return self._control.fileno()

    def tell(self, message: wire.Control, passed: socket.socket | None = None) -> None:
        """Send an order, with a copy of a socket.

        Raises:
            ZygoteGone: It does not take it.
        """
        self._control.settimeout(_SEND_TIMEOUT_S)
        try:
            wire.send_control(self._control, message, [passed.fileno()] if passed is not None else [])
        except OSError as error:
            raise ZygoteGone(f"its zygote process does not take orders: {error}") from error

    def hear(self) -> wire.Control | None:
        """The next report, without waiting; None if there is none now.

        Raises:
            ZygoteGone: It has ended.
        """
        self._control.setblocking(False)
        try:
            received = wire.receive_control(self._control)
        except BlockingIOError:
            return None
        if received is not None:
            return received[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        raise ZygoteGone(f"its zygote process has ended, with code {self._process.returncode}")

    def ask_for_stacks(self) -> None:
        """Have the zygote write to its log where it is."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(process.STACKS_SIGNAL)

    def close(self, *, serving: bool) -> None:
        """End the connection, at which a zygote that is serving ends its ranks and then itself, and wait for that.

        Args:
            serving: False for one that is still importing: it has no ranks, would not look up, and is killed.
        """
        self.abandon()
        self._process.send_signal(signal.SIGCONT)  # A subject can stop its parent.
        if not serving:
            self._process.kill()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT_S)

    def abandon(self) -> None:
        """Let go of the connection only; what is left to do in a fork of the process that started the zygote."""
        self._control.close()
