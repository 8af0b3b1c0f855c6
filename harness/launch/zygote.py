"""The zygote: one process with torch imported and one thread, from which ranks are forked in milliseconds.

It is the parent of all ranks, so only it may signal them (a process number stays theirs until it has reaped them) and
it knows how each ended. It serves one control connection, and when that ends, or its parent does, it kills every rank
with all that ranks started, removes the pool's private directory, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import psutil

from harness.launch import activity, machine, process, rank, wire

# How often it looks whether its parent still lives, for the case that somebody else holds the other end open.
_PARENT_CHECK_S = 0.5
# A killed process ends at once, except in an uninterruptible system call; then there is nothing more to do for it.
_END_TIMEOUT_S = 5.0
_MAX_REASON_CHARS = 32_768


def main(descriptor: int) -> NoReturn:
    """Serve the control connection ``descriptor`` until it ends."""
    control = socket.socket(fileno=descriptor)
    faulthandler.register(process.STACKS_SIGNAL, all_threads=True, chain=False)
    # A Ctrl-C is the parent's to handle: it ends the ranks when it wants to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.set_name("z2-zygote")
    first = wire.receive_control(control)
    if first is None or not isinstance(first[0], wire.Configure):
        os._exit(0)
    _Zygote(control, first[0]).serve()


class _Zygote:
    def __init__(self, control: socket.socket, configuration: wire.Configure) -> None:
        self.control = control
        self.configuration = configuration
        self.ranks: dict[int, tuple[int, int]] = {}  # process -> (set, rank), until reaped
        self.selector = selectors.DefaultSelector()
        self.wakeup, self.wakeup_writer = socket.socketpair()
        self.wakeup.setblocking(False)
        self.wakeup_writer.setblocking(False)

    def serve(self) -> NoReturn:
        """Warm up, then obey until the parent is gone."""
        if self.configuration.bind_to_main_thread:
            process.die_with_parent(self.configuration.parent)
        with self._reporting():
            self._warm_up()
            self._tell(wire.Warmed())
        # From here on the end of the parent is noticed, and more than the kernel would is cleaned up.
        process.outlive_parent()
        with self._reporting():
            self._loop()
        try:
            self._end_all()
        finally:
            shutil.rmtree(self.configuration.directory, ignore_errors=True)
            os._exit(0)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (passed on to the parent)
            first = machine.describe_refusal(error) if isinstance(error, OSError) else rank.summary(error)
            self._tell(wire.Unusable(f"{first}\n{traceback.format_exc()[-_MAX_REASON_CHARS:]}"))

    def _warm_up(self) -> None:
        process.adopt_orphans()
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_writer.fileno(), warn_on_full_buffer=False)
        if self.configuration.execute:
            return  # Each rank imports for itself.
        import numpy  # noqa: F401 (only to have it)
        import torch
        import torch.distributed

        from harness.launch import tap

        torch.set_num_threads(1)
        tap.install()
        for module in self.configuration.preload:
            importlib.import_module(module)
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate())
            raise RuntimeError(
                f"importing {', '.join(self.configuration.preload)} started threads ({names}), which a forked rank "
                'would lack: start the pool with start="exec", or do not preload that module'
            )
        # Collect once, then keep the collector off these objects: it would write to, and so copy, every shared page.
        gc.collect()
        gc.freeze()

    def _loop(self) -> None:
        """Handle messages and ends of children; returns when the parent is gone."""
        self.selector.register(self.control, selectors.EVENT_READ)
        self.selector.register(self.wakeup, selectors.EVENT_READ)
        while os.getppid() == self.configuration.parent:
            for key, _ in self.selector.select(_PARENT_CHECK_S):
                if key.fileobj is self.wakeup:
                    self._drain_wakeup()
                    self._reap()
                else:
                    received = wire.receive_control(self.control)
                    if received is None:
                        return
                    self._obey(*received)

    def _drain_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass

    def _obey(self, message: wire.Control, descriptors: list[int]) -> None:
        match message:
            case wire.Fork():
                if not descriptors:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # The kernel dropped it for that.
                pid = self._start(message, descriptors[0])
                os.close(descriptors[0])
                self.ranks[pid] = (message.group, message.rank)
                self._tell(wire.Forked(message.group, message.rank, pid))
            case wire.Kill():
                self._signal(message.group, signal.SIGKILL)
            case wire.Terminate():
                self._signal(message.group, signal.SIGTERM)
            case wire.Dump():
                self._signal(message.group, process.STACKS_SIGNAL)

    def _start(self, request: wire.Fork, descriptor: int) -> int:
        """Start one rank on its connection; returns its process."""
        if self.configuration.execute:
            os.set_inheritable(descriptor, True)
            argv = process.command("harness.launch.rank", sys.path, descriptor)
            return os.posix_spawn(argv[0], argv, os.environ, setsid=True, setsigdef=[signal.SIGINT, signal.SIGCHLD])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # Or the rank would write it a second time.
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            for mine in (self.selector, self.control, self.wakeup, self.wakeup_writer):
                mine.close()
            rank.main(descriptor)
        finally:
            os._exit(70)

    def _signal(self, group: int, number: int) -> None:
        """Signal every living rank of a set; a kill goes to all that is in its process group."""
        for pid, (of_group, _) in self.ranks.items():
            if of_group != group:
                continue
            if number == signal.SIGKILL:
                _kill_group(pid)
            # A rank that has not installed its handler yet, or has lost it, would die of the request for its stacks.
            elif number != process.STACKS_SIGNAL or activity.catches(pid, number):
                os.kill(pid, number)

    def _reap(self) -> None:
        """Report every rank that has ended, with what it left behind killed first."""
        reaped = False
        while (child := _ended_child()) is not None:
            reaped = True
            if child in self.ranks:
                # Before it is reaped, while its number is certainly still the number of its process group.
                _kill_group(child)
            _, status = os.waitpid(child, 0)
            if child in self.ranks:
                group, number = self.ranks.pop(child)
                self._tell(wire.Ended(group, number, os.waitstatus_to_exitcode(status)))
        if reaped:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what ranks have started and what lost its parent since; its own children come to us in turn."""
        for child in psutil.Process().children():
            if child.pid not in self.ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    def _end_all(self) -> None:
        """Kill every rank and descendant and wait for their ends, within a bound."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        self.control.close()
        while time.monotonic() < deadline:
            for pid in self.ranks:
                _kill_group(pid)
            while (child := _ended_child()) is not None:
                if child in self.ranks:
                    _kill_group(child)
                    del self.ranks[child]
                os.waitpid(child, 0)
            self._kill_orphans()
            if not psutil.Process().children():
                return
            time.sleep(0.002)

    def _tell(self, message: wire.Control) -> None:
        # A parent that is gone is noticed by the loop.
        with contextlib.suppress(OSError):
            wire.send_control(self.control, message)


def _ended_child() -> int | None:
    """A child that has ended and is not reaped yet; it stays so."""
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return result.si_pid if result is not None else None


def _kill_group(leader: int) -> None:
    # The group may not exist yet: a child that has just been forked makes it.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
