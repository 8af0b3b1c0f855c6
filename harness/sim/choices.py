"""What a simulated world may choose: how it adds, who runs next, and when a collective happens. No torch."""

from __future__ import annotations

import enum


class SumOrder(enum.Enum):
    """In which order the ranks' contributions to a sum are added.

    RING: as gloo does. RANK: 0, 1, 2, …. TREE: a balanced binary tree. RANDOM: trees that follow from the seed and the
    call's kind and length.
    """

    RING = "ring"
    RANK = "rank"
    TREE = "tree"
    RANDOM = "random"


class Schedule(enum.Enum):
    """Which rank runs next, and when asynchronous collectives happen.

    LOCKSTEP: always the next rank in order that can, and each collective as soon as all ranks have called it.
    RANDOM: both as the seed has it.
    """

    LOCKSTEP = "lockstep"
    RANDOM = "random"


class Timing(enum.Enum):
    """When a collective happens, and who waits for it can go on.

    AT_ONCE: when all ranks have called it. AT_WAIT: when, besides, one of them waits. LATE: when, besides, no rank that
    does not wait for such a collective can run any more.
    """

    AT_ONCE = "at once"
    AT_WAIT = "at wait"
    LATE = "late"


DEFAULT_ORDER = SumOrder.RING.value
DEFAULT_SCHEDULE = Schedule.RANDOM.value
"""Of simulated worlds, unless somebody says otherwise."""
