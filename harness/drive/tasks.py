"""What the parent sends to a rank: plain data, no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from harness.scenario.model import Scenario
from harness.subjects.source import Scalar
from harness.verdict import Stage


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


def position_path(directory: Path, world: int, rank: int) -> Path:
    """The file in which a rank keeps where it is."""
    return directory / f"position-world{world}-rank{rank}"


def read_position(directory: Path, world: int, rank: int) -> tuple[int | None, Stage]:
    """``(step, stage)`` a rank had entered last; the build when it never got that far."""
    try:
        step, stage = position_path(directory, world, rank).read_text().split()
        return None if step == "-" else int(step), Stage(stage)
    except (OSError, ValueError):
        return None, Stage.BUILD
