"""The parent's view of one set of ranks: what each has sent, whether its process lives, how its task ended."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.launch.outcome import Activity, RankEnd, RankReport
from harness.launch.wire import Channel, Frame, Kind, WireError

_MAX_OUTPUT_BYTES = 65_536
_MAX_STACKS_BYTES = 1_048_576  # of at most a hundred threads, which is where faulthandler stops
# A log that grows beyond this is cut to nothing: a subject that prints without end must not fill the disk.
_MAX_LOG_BYTES = 64 * 1024 * 1024
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*$", re.MULTILINE)


class Phase(enum.Enum):
    """Where a set is in its life; it goes from BUSY back to IDLE for as long as all goes well."""

    STARTING = "its processes are being asked for"
    JOINING = "its processes run and form their group"
    IDLE = "waiting for a task"
    BUSY = "doing a task"
    ENDING = "how the task ended is decided, the processes are being killed"


@dataclass
class Member:
    """One rank of a set."""

    rank: int
    channel: Channel
    log: Path
    stacks: Path
    forked: bool = False  # its process was asked for
    pid: int | None = None
    joined: bool = False
    code: int | None = None  # of the process, once it has been reaped; negative: minus the number of a signal
    start_error: str | None = None
    # Of the present task:
    end: RankEnd | None = None
    reply: bytes | None = None
    reusable: bool = False
    error: str | None = None
    events: list[bytes] = field(default_factory=list)
    activity: Activity | None = None  # when it was given up
    where: str | None = None  # its stacks when the task was ended, or why there are none

    @property
    def gone(self) -> bool:
        """Its process has ended, or its connection has."""
        return self.code is not None or self.channel.ended

    def clear_stacks(self) -> None:
        """Before they are asked for."""
        with contextlib.suppress(OSError):
            os.truncate(self.stacks, 0)

    def read_stacks(self) -> str:
        """What it has written last, or nothing if that was before they were cleared."""
        return last_stacks(tail(self.stacks, _MAX_STACKS_BYTES))

    def report(self) -> RankReport:
        """What became of its task; reads its log."""
        if self.end is None:
            raise RuntimeError(f"rank {self.rank} has not ended: its report is not complete")
        output = tail(self.log, _MAX_OUTPUT_BYTES)
        events = tuple(self.events)
        return RankReport(self.rank, self.end, self.reply, events, self.error, output, self.where, self.activity)


class RankSet:
    """The ranks of one world, from start to end, and the state of their present task.

    Attributes:
        identity: Number of this set; never used twice in a pool.
        world: Number of ranks.
        held: Those of them that this process looks after: all, unless a launcher gave others to other processes.
        members: One for each of those, in order.
        phase: Where the set is in its life.
        failures: The ranks whose start or task went wrong, in order of time.
        failed_at: ``time.monotonic()`` of the first of these.
    """

    def __init__(self, identity: int, world: int, held: Sequence[int] | None = None) -> None:
        self.identity = identity
        self.world = world
        self.held = range(world) if held is None else held
        self.members: list[Member] = []
        self.phase = Phase.STARTING
        self.failures: list[int] = []
        self.failed_at: float | None = None

    @property
    def joined(self) -> bool:
        """Every rank is in its group and ready for a task."""
        return len(self.members) == len(self.held) and all(member.joined for member in self.members)

    def member(self, rank: int) -> Member:
        """A rank by its number."""
        return self.members[self.held.index(rank)]

    @property
    def lost(self) -> list[Member]:
        """The ranks that have ended."""
        return [member for member in self.members if member.gone]

    @property
    def unfinished(self) -> list[Member]:
        """The ranks whose part of the present task has not ended."""
        return [member for member in self.members if member.end is None]

    @property
    def finished(self) -> bool:
        """The present task has ended on every rank, and of every process that ended it is known how."""
        return all(
            member.end is not None and (member.code is not None or not member.channel.ended) for member in self.members
        )

    @property
    def reusable(self) -> bool:
        """After a finished task: every rank lives, and its group is in step with the others'."""
        return not self.lost and (
            all(member.end is RankEnd.REPLIED for member in self.members)
            or all(member.reusable for member in self.members)
        )

    def begin(self, task: bytes) -> list[Member]:
        """Send a task to every rank; returns those whose socket did not take all of it yet."""
        self.failures, self.failed_at, self.phase = [], None, Phase.BUSY
        slow = []
        for member in self.members:
            member.end, member.reply, member.error = None, None, None
            member.reusable, member.activity, member.where, member.events = False, None, None, []
            if not member.channel.send(Kind.TASK, task):
                slow.append(member)
        return slow

    def receive(self, arrived: list[Member]) -> None:
        """Take in what these ranks have sent, and which of their connections have ended."""
        read = [(member, self._read(member)) for member in arrived]
        # First those that have ended: what the others say may be a consequence of that.
        for member, frames in sorted(read, key=lambda item: not item[0].channel.ended):
            self._take_all(member, frames)

    def ended(self, member: Member, code: int) -> None:
        """The zygote has reaped a rank. Its last words are read first; a reply among them does not excuse the end."""
        if member.channel.fileno() >= 0:
            self._take_all(member, self._read(member))
        member.code = code
        if self.phase is Phase.BUSY and member.end in (None, RankEnd.REPLIED):
            self._fail(member, RankEnd.EXITED if code >= 0 else RankEnd.KILLED, describe_code(code))
        else:
            self._note_failure(member)

    def bound_logs(self) -> None:
        """Cut what has grown too long."""
        for member in self.members:
            with contextlib.suppress(FileNotFoundError):
                if member.log.stat().st_size > _MAX_LOG_BYTES:
                    os.truncate(member.log, 0)

    def give_up(self, stalled: Mapping[int, str] | None = None, first: int | None = None) -> None:
        """Decide for every rank that has not ended: stuck at the deadline, or left behind by one that failed.

        Args:
            stalled: By rank, what is to be said if neither is so, but the task has stalled.
            first: The rank that failed first, where that may be one that is held elsewhere.
        """
        if first is None and self.failures:
            first = self.failures[0]
        for member in self.unfinished:
            if stalled is not None:
                self._fail(member, RankEnd.STALLED, stalled[member.rank])
            elif member.channel.ended:
                self._fail(member, RankEnd.TIMED_OUT, "closed its connection to the harness, but did not end")
            elif first is None:
                self._fail(member, RankEnd.TIMED_OUT, "no reply at the deadline")
            else:
                member.end = RankEnd.ABANDONED
                member.error = f"ended by the harness: rank {first} had failed"
        self.phase = Phase.ENDING

    def _read(self, member: Member) -> list[Frame]:
        try:
            return member.channel.receive()
        except WireError as error:
            member.channel.ended = True  # What follows cannot be told apart any more.
            if self.phase is Phase.BUSY:
                self._fail(member, RankEnd.SPOILT, f"something wrote to the harness's connection to it: {error}")
            return []

    def _take_all(self, member: Member, frames: list[Frame]) -> None:
        for frame in frames:
            self._take(member, frame.kind, frame.payload)
        if member.channel.ended:
            # How it ended the zygote will say; when it did is now.
            self._note_failure(member)

    def _take(self, member: Member, kind: Kind, payload: bytes) -> None:
        match kind:
            case Kind.READY:
                member.joined = True
            case Kind.UNREADY:
                member.start_error = payload.decode(errors="replace")
                self._note_failure(member)
            case Kind.EVENT:
                member.events.append(payload)
            case _ if self.phase is not Phase.BUSY or member.end is not None:
                pass  # Too late: how this rank ended is decided already.
            case Kind.REPLY:
                member.end, member.reply = RankEnd.REPLIED, payload
            case Kind.BROKEN | Kind.BROKEN_REUSABLE:
                member.reply, member.reusable = payload, kind is Kind.BROKEN_REUSABLE
                self._fail(member, RankEnd.BROKEN, None)
            case _:
                self._fail(member, RankEnd.RAISED, payload.decode(errors="replace"))

    def _fail(self, member: Member, end: RankEnd, error: str | None) -> None:
        member.end, member.error = end, error
        self._note_failure(member)

    def _note_failure(self, member: Member) -> None:
        if self.phase in (Phase.IDLE, Phase.ENDING) or member.rank in self.failures:
            return
        self.failures.append(member.rank)
        if self.failed_at is None:
            self.failed_at = time.monotonic()


def describe_code(code: int | None) -> str:
    """``3`` as "exit code 3", ``-11`` as "signal 11 (SIGSEGV)"."""
    if code is None or code >= 0:
        return f"exit code {code}"
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = signal.strsignal(number) or "unknown"
    return f"signal {number} ({name})"


def last_stacks(text: str) -> str:
    """Of what faulthandler has written, one request after another, what it wrote last: each thread is in it once."""
    seen: set[str] = set()
    start = 0
    for header in reversed(list(_THREAD.finditer(text))):
        if header[1] in seen:
            return text[start:]
        seen.add(header[1])
        start = header.start()
    return text


def tail(path: Path, limit: int) -> str:
    """The last ``limit`` bytes of a file as text, after a line that says how much is missing; empty without a file."""
    try:
        size = path.stat().st_size
        if size == 0:
            return ""
        with path.open("rb") as file:
            file.seek(max(0, size - limit))
            text = file.read(limit).decode(errors="replace")
    except OSError:
        return ""
    return text if size <= limit else f"[{size - limit} bytes before this are left out]\n{text}"
