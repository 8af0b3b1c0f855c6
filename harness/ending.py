"""How the command ends whatever happens: by a signal, with an internal error, with nobody left to read."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO, cast

_TRACE = "Traceback (most recent call last):"
_CHAINED = ("another exception occurred:", "direct cause of the following exception:")


def internal_error(error: Exception) -> str:
    """Name an unexpected exception in one line, and keep its traceback in a file."""
    trace = "".join(traceback.format_exception(error))
    path = _keep(trace)
    if path is None:
        sys.stderr.write(trace)
    where = "traceback above" if path is None else f"traceback in {path}"
    return f"internal error: {type(error).__name__}: {error} ({where})"


def without_traceback(text: str) -> str:
    """A message in one line: of a traceback in it only the exception is left, and all of it is kept in a file.

    Ranks report what they could not do with the traceback; a full disk is told without one.
    """
    head, trace, rest = text.partition(_TRACE)
    if not trace:
        return text
    first, *others = rest.split(_TRACE)
    for other in others:
        if not first.rstrip().endswith(_CHAINED):
            break  # in what was printed besides
        first = other
    raised = next((line for line in first.splitlines() if line and not line[0].isspace()), "an exception")
    path = _keep(text)
    where = "no room for its traceback" if path is None else f"traceback in {path}"
    return f"{head.rstrip()} {raised} ({where})".strip()


def _keep(trace: str) -> str | None:
    """The file that ``trace`` was written to; None if none could be."""
    path = None
    try:
        handle, path = tempfile.mkstemp(prefix="zero2-harness-", suffix=".traceback.txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(trace)
    except OSError:
        if path is not None:
            Path(path).unlink(missing_ok=True)
        return None
    return path


_interrupted = False


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt again when a signal asked for the end and Python lost the first one.

    What a handler raises inside a callback of the garbage collector or a ``__del__`` is printed and ignored: a long
    run asks here now and then.
    """
    if _interrupted:
        raise KeyboardInterrupt


@contextmanager
def interruptible(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does: everything started is ended, the partial result is written."""
    last = float("-inf")

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        global _interrupted
        nonlocal last
        _interrupted = True
        now, before = clock(), last
        last = now
        # coreutils' `timeout` signals its child and then the whole group: the second must not break the clean-up.
        if now - before > 1.0:
            raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored by who started us (nohup, a shell's &)
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        global _interrupted
        _interrupted = False
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Unbreakable:
    """A text stream that takes any text, and drops what nobody can read any more (a broken pipe, a full disk)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def unbreakable_streams() -> Iterator[None]:
    """Make ``sys.stdout`` and ``sys.stderr`` safe to print to: whether somebody reads must not decide the exit code.

    Otherwise a reader that has gone away would end a campaign, or turn its exit code into 1 (click, rich) or 120
    (Python). A stream that was closed from the start (None) leads nowhere.
    """
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        safe = [cast(TextIO, _Unbreakable(stream or nowhere)) for stream in before]
        sys.stdout, sys.stderr = safe
        try:
            yield
        finally:
            for stream in safe:
                stream.flush()
            sys.stdout, sys.stderr = before
