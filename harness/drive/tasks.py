"""What the parent sends to a rank: plain data, no torch."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from harness.scenario.model import Scenario, System
from harness.subjects.source import Scalar


class SubjectName(Struct, frozen=True):
    """Which class to drive; ``path`` is importable from any directory, ``args`` are further constructor arguments.

    ``config``: of the user's, for a distribution strategy; None: none was given.
    """

    path: str
    args: dict[str, Scalar] = {}
    config: dict[str, Any] | None = None


class CheckSubject(Struct, frozen=True, tag="check"):
    """Import the subject and check its interface; reply with a :class:`SubjectCheck`."""

    subject: SubjectName


class RunScenario(Struct, frozen=True, tag="run"):
    """Drive one scenario; reply with a :class:`harness.verdict.RankVerdict`.

    ``exchanges``: after each sum that rounds the ranks tell each other whether it was explained, and search together
    for an order where it was not. Without, such a rank only says so in the end (``unresolved``).
    ``inspect``: each rank also compares what it hands to each collective with what it should hand over, which takes
    time, to tell whose fault a wrong sum is.
    ``order``, ``schedule``: of a simulated world, in what order sums are added and how its ranks take turns
    (``harness.sim.choices``).
    ``rule``: of the backend's order of addition, as far as one is known (:func:`harness.oracles.order.rule`); empty:
    that of ``order``.
    """

    subject: SubjectName
    scenario: Scenario
    exchanges: bool = False
    inspect: bool = False
    order: str = "ring"
    schedule: str = "random"
    rule: str = ""


class RunMany(Struct, frozen=True, tag="many"):
    """Simulated worlds only: each process of the set drives the scenarios of its own lane, one after the other, and
    sends a :class:`harness.sim.messages.LaneReply` after each; the reply is empty."""

    lanes: tuple[tuple[RunScenario, ...], ...]


class SubjectCheck(Struct, frozen=True):
    """``problem`` is None when the class can be driven.

    ``declares``: the names in its ``verify_extensions``: what it takes beyond the contract's space. ``system``: told by
    its interface. ``versions``: of what its rank computes with beside torch, see :mod:`harness.drive.accelerator`.
    """

    problem: str | None
    declares: tuple[str, ...] = ()
    system: System = "zero_master"
    versions: dict[str, str] = {}


Task = CheckSubject | RunScenario

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_sim_task = msgspec.msgpack.Decoder(Task | RunMany).decode
