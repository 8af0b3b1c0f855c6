"""The event log of a run (``--events FILE``): one JSON object a line, written as things happen. No torch.

The first line is ``begun`` and carries the version of the format; the last two are ``result``, the same object as of
``--json``, and ``ended``. A log without them was cut off, by a kill, say: everything before is still of use. Reading is
strict: what this version does not know is refused, with the number of the line.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from harness.errors import UsageError
from harness.museum.score import MuseumResult
from harness.report.result import Failure, Result, plain

VERSION: Final = 1
LARGEST: Final = 2**28
"""Bytes of a log that is read."""

LogVerb = Literal["verify", "replay", "fuzz", "museum"]


class Begun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="begun"):
    """What is run. ``options``: what else the run depends on. ``device``: None where it was not said."""

    version: int
    at: float
    verb: LogVerb
    subject: str | None
    backend: str
    worlds: tuple[int, ...]
    seed: int
    device: str | None = None
    versions: dict[str, str] = {}
    options: dict[str, Any] = {}


class Judged(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="scenario"):
    """A scenario was run. ``conclusion``: holds, violated, unsupported, …; ``seconds``: of its own."""

    at: float
    index: int
    id: str
    world: int
    scenario: str
    seconds: float
    conclusion: str


class Round(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="round"):
    """`fuzz`: a round is done, with so many scenarios."""

    at: float
    index: int
    kind: str
    examples: int


class Note(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="note"):
    """A line for people."""

    at: float
    text: str


class Violation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="violation"):
    """A violation as it is known now, with its evidence: the first as it was seen, the last as small as it became."""

    at: float
    failure: Failure


class Shrinking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="shrinking"):
    """A failing scenario is made smaller: so many were tried, and the smallest that fails so far."""

    at: float
    tried: int
    scenario: str


class Finding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="finding"):
    """`fuzz`: a violation was saved; once more when it was made smaller (``complete``)."""

    at: float
    name: str
    complete: bool
    property: str
    stage: str | None
    symptom: str | None
    scenario: str | None
    case: str | None


class Exhibit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="exhibit"):
    """`museum`: what came of a plant (caught, missed, undecided) or a control (holds, violated, unknown)."""

    at: float
    id: str
    kind: Literal["plant", "control"]
    outcome: str
    examples: int
    seconds: float
    found_after: float | None = None
    told: str | None = None
    reason: str | None = None


class Concluded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="result"):
    """The result, as ``--json`` writes it; of a museum in ``museum``."""

    at: float
    result: Result | None = None
    museum: MuseumResult | None = None


class Ended(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag="ended"):
    """The end. ``reason``: why there is no result, where there is none."""

    at: float
    exit_code: int
    reason: str | None = None


Event = Begun | Judged | Round | Note | Violation | Shrinking | Finding | Exhibit | Concluded | Ended

_decode = msgspec.json.Decoder(Event).decode


class EventLog:
    """Writes a log: a line is there whole as soon as it is written. A failure to write changes nothing but the log.

    Args:
        given: the path, as the user named it; its directories are made, what is there is replaced.
        warn: told once, in one line, when a line could not be written; then no more is.
        clock: in seconds, for the times in the log, which begin at 0.

    Attributes:
        opening: written before anything else, unless what is written first is itself the beginning.

    Raises:
        UsageError: it cannot be written.
    """

    def __init__(self, given: str, warn: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = given
        self._warn = warn
        self._clock = clock
        self._began = clock()
        try:
            if not given or given == "-":
                raise UsageError(f"--events {given!r}: expected a file")
            path = Path(given)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = io.FileIO(path, "wb", opener=_opened)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--events {given!r}: cannot write it: {why}") from None
        self._failed = False
        self.opening: Begun | None = None

    @property
    def now(self) -> float:
        """Seconds since it was begun, to a thousandth."""
        return round(self._clock() - self._began, 3)

    def write(self, event: Event) -> None:
        """Add a line."""
        opening, self.opening = self.opening, None
        if opening is not None and not isinstance(event, Begun):
            self.write(opening)
        if self._failed:
            return
        line = msgspec.json.encode(plain(event)) + b"\n"
        try:
            while line:
                line = line[self._stream.write(line) :]
        except (OSError, ValueError) as error:
            self._failed = True
            why = error.strerror if isinstance(error, OSError) else str(error)
            self._warn(f"--events {self._given}: no more can be written: {why}; the run goes on without its log")

    def close(self) -> None:
        """Nothing is written afterwards."""
        self._failed = True
        self._stream.close()


def _opened(path: str, flags: int) -> int:
    """A pipe that nobody reads is refused, where the run would wait for a reader without end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


@dataclass(frozen=True)
class Log:
    """A log that was read. ``cut``: it ends in the middle of a line, or before its result; how, in words."""

    events: tuple[Event, ...]
    cut: str | None = None

    @property
    def begun(self) -> Begun:
        """The first event."""
        first = self.events[0]
        if not isinstance(first, Begun):
            raise ValueError("a log that does not begin with `begun`")
        return first


def is_log(data: bytes) -> bool:
    """Whether this is meant to be an event log: its first line is an object with a field ``event``."""
    try:
        first = msgspec.json.decode(data.partition(b"\n")[0])
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(first, dict) and "event" in first


def read(data: bytes, name: str) -> Log:
    """A log, from its bytes; ``name`` is what errors call it.

    A last line that is no whole one (a kill, a full disk) is left out, and ``cut`` says so.

    Raises:
        UsageError: any other line is damaged or not known to this version; or it does not begin as a log does.
    """
    lines = data.split(b"\n")
    torn = lines.pop()  # whatever follows the last line break
    if not lines:
        raise UsageError(f"{name}: the event log was cut off in its first line: there is nothing to show")
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        if number == 1:
            _require_version(line, name)
        try:
            event = _decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UsageError(f"{name}: line {number}: not an event of this version: {error}") from None
        if isinstance(event, Begun) is not (number == 1):
            what = "expected `begun`" if number == 1 else "`begun` is the first line alone"
            raise UsageError(f"{name}: line {number}: {what}: a file holds one log")
        events.append(event)
    if torn:
        return Log(tuple(events), f"the log was cut off in the middle of line {len(lines) + 1}")
    if not isinstance(events[-1], Ended):
        return Log(tuple(events), f"the log was cut off after line {len(lines)}: the run was killed, or goes on")
    return Log(tuple(events))


def _require_version(line: bytes, name: str) -> None:
    try:
        first = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{name}: line 1: not JSON: {error}") from None
    if not isinstance(first, dict) or first.get("event") != "begun":
        raise UsageError(f"{name}: line 1: expected the event `begun`, with which a log begins")
    if first.get("version") != VERSION:
        raise UsageError(f"{name}: line 1: a log of version {first.get('version')!r}; this is able to read {VERSION}")


def load(path: Path) -> bytes:
    """The bytes of a file that somebody named.

    Raises:
        UsageError: it cannot be read, is empty, or is too large.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)  # a pipe or a device has no size, and perhaps no end
        if len(data) > LARGEST:
            raise UsageError(f"{path}: more than {LARGEST:,} bytes, which is as much as is read")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: cannot be read: {why}") from None
    if not data.strip():
        raise UsageError(f"{path}: the file is empty")
    return data
