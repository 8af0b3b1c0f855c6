"""What the parent sends to a rank: plain data, no torch."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from harness.scenario.model import Scenario
from harness.subjects.source import Scalar


class SubjectName(Struct, frozen=True):
    """Which class to drive; ``path`` is importable from any directory, ``args`` are further constructor arguments."""

    path: str
    args: dict[str, Scalar] = {}


class CheckSubject(Struct, frozen=True, tag="check"):
    """Import the subject and check its interface; reply with a :class:`SubjectCheck`."""

    subject: SubjectName


class RunScenario(Struct, frozen=True, tag="run"):
    """Drive one scenario; reply with a :class:`harness.verdict.RankVerdict`."""

    subject: SubjectName
    scenario: Scenario


class SubjectCheck(Struct, frozen=True):
    """``problem`` is None when the class can be driven."""

    problem: str | None


Task = CheckSubject | RunScenario

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
