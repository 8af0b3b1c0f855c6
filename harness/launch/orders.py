"""What the launched processes of one job tell each other: orders of the first, and what the others answer."""

from __future__ import annotations

from msgspec import Struct

from harness.launch.activity import Reading
from harness.launch.outcome import Activity, RankReport
from harness.launch.watchdog import Stall


class Form(Struct, frozen=True, tag="form"):
    """Start a rank anew and let it join the others of this generation; whatever ran before ends."""

    generation: int
    handler: str
    setup: bytes
    backend: str
    device: str
    preload: list[str]


class Do(Struct, frozen=True, tag="do"):
    """Have the rank do a task; with limits, look at it (see :class:`harness.launch.outcome.Watch`)."""

    task: bytes
    limits: tuple[float, float] | None


class Stop(Struct, frozen=True, tag="stop"):
    """The task has failed: decide what is said of the rank, before any is ended, which others would notice.

    Attributes:
        stall: if it counts as hung.
        first: the rank that failed first, where one did.
        doing: what ranks did in the time before, as far as they were looked at.
        look: some rank has not ended, so take down where each of them is.
    """

    stall: Stall | None
    first: int | None
    doing: dict[int, Activity]
    look: bool


class End(Struct, frozen=True, tag="end"):
    """End the rank, and report what became of its part of the task."""


class Disband(Struct, frozen=True, tag="disband"):
    """End the rank, which does nothing."""


Order = Form | Do | Stop | End | Disband


class Answer(Struct, frozen=True):
    """To an order, once it is carried out.

    Attributes:
        at: ``time.time()``.
        problem: why it could not be; nothing is said of what the rank was to do.
        lost: the rank had ended before the task came.
        report: of the task.
        reusable: the rank may go on.
        failed_at: ``time.time()`` when its failure was seen, before anybody ended it.
        files: what it left in the pool's directory, if the task failed.
    """

    at: float
    problem: str | None = None
    lost: bool = False
    report: RankReport | None = None
    reusable: bool = False
    failed_at: float | None = None
    files: dict[str, bytes] = {}


class Sighting(Struct, frozen=True):
    """What is seen of a rank while it does a task.

    Attributes:
        order: the number of the order to do it.
        number: of this look; one that does not change is an old one.
        progress: how often it was seen to have got on.
        looked: whether ``reading`` was taken.
        reading: of its process; None if that has ended.
        failed_at: see :class:`Answer`.
    """

    order: int
    number: int = 0
    progress: int = 0
    looked: bool = False
    reading: Reading | None = None
    failed_at: float | None = None


CLOSED = "closed"
"""The name under which the first process says that it is over."""


def order_name(number: int) -> str:
    """Under which an order is found; numbers follow each other, from 0."""
    return f"order/{number}"


def answer_name(number: int, rank: int) -> str:
    """Under which a rank's answer to it is."""
    return f"answer/{number}/{rank}"


def sight_name(rank: int) -> str:
    """Under which the last sighting of a rank is."""
    return f"sight/{rank}"


def bye_name(rank: int) -> str:
    """Under which a process says that it has ended all that it started."""
    return f"bye/{rank}"
