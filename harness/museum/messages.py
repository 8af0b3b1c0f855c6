"""What the process of a museum and its workers tell each other; see :mod:`harness.launch.crew`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from harness.report.result import Result


class Setup(Struct, frozen=True, tag=True, kw_only=True):
    """First of all: where scenarios run, and where cases are saved. ``parent``: whose end is the worker's."""

    parent: int
    backend: str
    worlds: tuple[int, ...]
    report: str


class RunCampaign(Struct, frozen=True, tag=True, kw_only=True):
    """Run a campaign over a class, as :class:`harness.subjects.source.SubjectSource` names it.

    At most so many ``examples``; ``seconds`` for all of it.
    """

    given: str
    absolute: str
    seed: int
    examples: int
    seconds: float


Order = Setup | RunCampaign


class Ready(Struct, frozen=True, tag=True):
    """The ranks are warm, and what must be caught was."""


class Progress(Struct, frozen=True, tag=True):
    """How far the present campaign is: scenarios begun, what it does now in a few words."""

    examples: int
    doing: str


class Done(Struct, frozen=True, tag=True):
    """A campaign has ended. ``result``: None where the class could not be used at all; ``problem`` says why."""

    result: Result | None
    problem: str | None = None


class Trouble(Struct, frozen=True, tag=True):
    """The worker ends: ``broken``, a subject that must fail did not, so no verdict could be trusted; ``undecided``, the
    harness failed."""

    kind: Literal["broken", "undecided"]
    message: str


Report = Ready | Progress | Done | Trouble

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
