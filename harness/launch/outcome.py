"""What became of one task: a report for every rank, also for those that did not answer."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


class RankEnd(enum.Enum):
    """How a rank's part of a task ended. Only REPLIED is good; no reply is never one.

    REPLIED: the handler returned a reply, and the process lived until all ranks had ended.
    BROKEN: the handler raised RankBroken; its payload is the report's ``reply``.
    RAISED: the handler raised anything else: a mistake in the handler.
    SPOILT: something wrote to its connection what is no message of it.
    EXITED: the process ended by itself, with any exit code, 0 too.
    KILLED: the process ended by a signal that this pool did not send (a crash; the kernel, out of memory; a person).
    TIMED_OUT: the rank had not ended at the deadline, nor had any other rank failed before.
    STALLED: no rank of the world got on any more (see :class:`Watch`), and this one had not ended.
    DEADLOCKED: the rank can never end, which is known (in a simulated world, see :mod:`harness.sim`), not a time-out.
    ABANDONED: the pool ended the rank because another one had failed and this one did not end in the time of grace.
    """

    REPLIED = "replied"
    BROKEN = "broken"
    RAISED = "raised"
    SPOILT = "spoilt"
    EXITED = "exited"
    KILLED = "killed"
    TIMED_OUT = "timed out"
    STALLED = "stalled"
    DEADLOCKED = "deadlocked"
    ABANDONED = "abandoned"


class Activity(enum.Enum):
    """What a rank's process was doing when the pool gave it up, by the kernel's account of it and of its children.

    STOPPED: by a signal (SIGSTOP) or a debugger. BLOCKED: every thread waits, and uses no time. COMPUTING: it uses, or
    wants, a processor. DEVICE: it waits for a disk, or for memory to be read back (uninterruptible).
    """

    STOPPED = "stopped"
    BLOCKED = "blocked"
    COMPUTING = "computing"
    DEVICE = "waiting for a device"


@dataclass(frozen=True)
class Watch:
    """When a task counts as hung: not by the time that passes, but when no rank gets on.

    A rank gets on while ``moved(rank)`` changes, while it sends something, while its stacks show functions that they
    have not shown since, and while it starts processes.

    Attributes:
        moved: Something that differs when a rank has got on since it was last asked; cheap, never raises.
        blocked_s: The task has stalled when for so many seconds no rank that has not ended got on, and none used or
            wanted a processor or a device.
        computing_s: Or when since anybody got on one of them has used so many seconds of processor time, alone or with
            its children (of which, and of its threads, one at a time counts). Processor time, so that a busy machine is
            not taken for a hang.
    """

    moved: Callable[[int], object]
    blocked_s: float
    computing_s: float


@dataclass(frozen=True)
class RankReport:
    """One rank's part of a task.

    Attributes:
        rank: Its number.
        end: How it ended.
        reply: What the handler returned, or the payload of its RankBroken; None if it gave neither.
        events: Its interim messages, in order.
        error: What went wrong, as text ("exit code 3", "signal 9 (SIGKILL)", a traceback); None if nothing did.
        output: The end (at most 64 KiB) of what the rank printed during the task.
        stacks: Where every thread of the rank was when the pool ended the task because a rank had not; also of ranks
            that had replied. Of one that could not say it, what the kernel says. None if it was not running then.
        activity: What the process of a rank that had not ended was doing then; None for others.
    """

    rank: int
    end: RankEnd
    reply: bytes | None
    events: tuple[bytes, ...]
    error: str | None
    output: str
    stacks: str | None
    activity: Activity | None = None


@dataclass(frozen=True)
class Told:
    """What a simulated world itself knows when it had to stop.

    Attributes:
        kind: The requests of one collective did not match, no rank could run any more, or a rank asked for what a
            simulated world cannot do: nothing can be said of the class.
        message: A sentence.
        ranks: Whose doing it is; empty where nobody can tell.
    """

    kind: Literal["mismatch", "deadlock", "refusal"]
    message: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """One task on one world.

    Attributes:
        world: Number of ranks.
        ranks: One report a rank, in order.
        seconds: From the sending of the task until the last rank had ended.
        first_failed: The rank that failed first; the failures of others may be its consequences. None if all replied.
        told: Why a simulated world stopped, where it had to.
        trace: A digest of the order in which the ranks of a simulated world ran, where it came to its end.
    """

    world: int
    ranks: tuple[RankReport, ...]
    seconds: float
    first_failed: int | None
    told: Told | None = None
    trace: str | None = None

    @property
    def replied(self) -> bool:
        """Whether every rank replied."""
        return all(report.end is RankEnd.REPLIED for report in self.ranks)


class PoolError(Exception):
    """The pool itself could not do its work: its ranks did not start or join, or its zygote is gone.

    Not a statement about what the ranks ran. The message holds what is known: tracebacks, the end of the logs.
    """
