"""What the parent and the ranks of a bench say to each other: plain data, no torch."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from harness.drive.tasks import CheckSubject, SubjectName
from harness.scenario.model import Scenario
from harness.verdict import RankVerdict

# Where the time of a rank goes while it drives a scenario; the last is all that belongs to no other.
SUBJECT, GRADIENTS, REFERENCE, COMPARE, NOTES = "subject", "gradients", "reference", "compare", "notes"
RANK_PARTS = (SUBJECT, GRADIENTS, REFERENCE, COMPARE, NOTES)


class DoNothing(Struct, frozen=True, tag="nothing"):
    """Reply with nothing: what a task costs by itself."""


class RunBare(Struct, frozen=True, tag="bare"):
    """Make the calls of a scenario and nothing else; reply with a :class:`BareReport`."""

    subject: SubjectName
    scenario: Scenario


class RunTimed(Struct, frozen=True, tag="timed"):
    """Drive a scenario as a campaign does; reply with a :class:`TimedVerdict`."""

    subject: SubjectName
    scenario: Scenario
    exchanges: bool = False


class BareReport(Struct, frozen=True, kw_only=True):
    """One rank's bare run.

    Attributes:
        seconds: from the moment when all ranks had their gradients until this one was done.
        collectives: kind and length of each, in order.
        problem: what the subject raised, else None.
    """

    seconds: float = 0.0
    collectives: tuple[tuple[str, int], ...] = ()
    problem: str | None = None


class TimedVerdict(RankVerdict, frozen=True, kw_only=True):
    """The verdict of a campaign's rank, and the seconds of each of ``RANK_PARTS`` (they add up to the rank's time)."""

    parts: dict[str, float] = field(default_factory=dict)


Task = CheckSubject | DoNothing | RunBare | RunTimed

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_bare = msgspec.msgpack.Decoder(BareReport).decode
decode_timed = msgspec.msgpack.Decoder(TimedVerdict).decode
