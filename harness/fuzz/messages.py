"""What the process of a fuzz campaign and its workers tell each other; see :mod:`harness.launch.crew`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from harness.scenario.model import CONTRACT, Extension, System
from harness.subjects.source import Scalar
from harness.tally import Counts


class Key(Struct, frozen=True, array_like=True):
    """What makes two violations the same finding. ``symptom``: without its details (:func:`kind_of`)."""

    property: str
    stage: str | None
    symptom: str | None


def kind_of(symptom: str | None) -> str | None:
    """A symptom without its details: "a part is missing (part 2)" is the same as any other part."""
    return None if symptom is None else symptom.partition(" (")[0]


class Setup(Struct, frozen=True, tag=True, kw_only=True):
    """First of all: what is fuzzed. ``parent``: whose end is the worker's; ``canaries``: check the harness first.

    ``deadline``: on the monotonic clock that all processes share (seconds); None: no bound.
    """

    parent: int
    directory: str
    report: str
    given: str
    absolute: str
    args: dict[str, Scalar]
    worlds: tuple[int, ...]
    backend: str
    order: str
    schedule: str
    seed: int
    timeout_s: float | None
    stall_s: float | None
    shrink_s: float
    deadline: float | None
    keep_going: bool
    canaries: bool
    config: dict[str, Any] | None = None


class RunRound(Struct, frozen=True, tag=True, kw_only=True):
    """Run a round, at most ``limit`` scenarios of it; ``known`` findings are not looked into again."""

    index: int
    limit: int
    known: tuple[Key, ...] = ()


class RunSaved(Struct, frozen=True, tag=True):
    """Run what earlier runs had found: the findings of these names, and what is kept in the example database."""

    names: tuple[str, ...]
    database: bool


Order = Setup | RunRound | RunSaved


class Slow(Struct, frozen=True, array_like=True):
    """A scenario that took long: its id, in a few words, and seconds."""

    id: str
    scenario: str
    seconds: float


class Ready(Struct, frozen=True, tag=True, kw_only=True):
    """The ranks are warm, the subject can be used.

    ``system``, ``extension``: what kind of system the subject is, and what it takes beyond the contract.
    """

    system: System = "zero_master"
    extension: Extension = CONTRACT


class Progress(Struct, frozen=True, tag=True, kw_only=True):
    """How far the present order is; ``doing``: in a few words."""

    doing: str
    counts: Counts
    slowest: Slow | None = None


class Done(Struct, frozen=True, tag=True, kw_only=True):
    """An order is done: a round with its ids, or a part of it where time was up or the worker was told to end."""

    round: int | None
    whole: bool
    ids: tuple[str, ...]
    counts: Counts
    slowest: Slow | None = None


class Found(Struct, frozen=True, tag=True):
    """A violation has been saved, or saved better; see :class:`harness.fuzz.state.Finding` of that name."""

    name: str
    complete: bool


class Gone(Struct, frozen=True, tag=True):
    """A finding of an earlier run does not fail any more."""

    name: str


class Note(Struct, frozen=True, tag=True):
    """Something for the user to know."""

    text: str


class Trouble(Struct, frozen=True, tag=True):
    """The worker ends: ``usage``, the subject cannot be used; ``broken``, a subject that must fail did not, so no
    verdict could be trusted; ``undecided``, the harness failed."""

    kind: Literal["usage", "broken", "undecided"]
    message: str


Report = Ready | Progress | Done | Found | Gone | Note | Trouble

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
