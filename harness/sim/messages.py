"""What the process of a simulated world sends: plain data, no torch. Every task is answered with a WorldReply.

A task that is none of a world (to import the subject) is answered as by a world of one rank.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from harness.launch.outcome import Told


class RankPart(Struct, frozen=True, kw_only=True):
    """One rank's part of a task.

    Attributes:
        end: ``replied``, ``broken``: as the handler of a process of its own would have ended, with ``payload``.
            ``deadlocked``: it waited for what never comes. ``abandoned``: it was stopped because of another rank.
            ``muted``: it came to its end and keeps its verdict for itself.
        error: What became of a rank without a payload, to follow "rank 1": "waits in ... for rank 2".
        output: The end of what it printed.
        stacks: Where it was when it was stopped, as faulthandler writes the stack of one thread (most recent call
            first), down to the frame in which the thread began.
    """

    end: Literal["replied", "broken", "deadlocked", "abandoned", "muted"]
    payload: bytes | None = None
    error: str | None = None
    output: str = ""
    stacks: str | None = None


class WorldReply(Struct, frozen=True, kw_only=True):
    """The whole world's part of a task.

    Attributes:
        ranks: One a rank, in order.
        trace: A digest of the interleaving: the same seed must give the same.
        first_failed: The rank that did not reply first; None if all did.
        told: Why the world stopped; None if every rank came to its own end.
    """

    ranks: tuple[RankPart, ...]
    trace: str
    first_failed: int | None
    told: Told | None


class LaneReply(Struct, frozen=True, kw_only=True):
    """One scenario of a lane is done: an interim message of its process.

    Attributes:
        seconds: That it took in that process.
        reply: As if it had been the only one.
    """

    seconds: float
    reply: WorldReply


class RankEvent(Struct, frozen=True):
    """An interim message of one rank: what goes into ``RankContext.emit``, encoded."""

    rank: int
    event: bytes


encode = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(WorldReply).decode
decode_lane_reply = msgspec.msgpack.Decoder(LaneReply).decode
decode_event = msgspec.msgpack.Decoder(RankEvent).decode
