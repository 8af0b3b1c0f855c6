"""What is taken down of ranks before they are ended: what their processes do, and where every thread is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.launch import activity
from harness.launch.outcome import Activity
from harness.launch.rankset import Member, RankSet
from harness.launch.watchdog import Stall

_STACKS_TIMEOUT_S = 2.0


def look(ranks: RankSet, stall: Stall | None, known: Callable[[int], Activity | None]) -> list[Member]:
    """Note what the ranks do that have not ended; returns all, also others, that run and can be spoken to.

    ``known``: what a rank has done in the time before, if it was looked at.
    """
    readings = activity.read(member.pid for member in ranks.members if member.pid is not None)
    doing = {member.rank: readings[member.pid].activity for member in ranks.members if member.pid in readings}
    for member in ranks.unfinished:
        member.activity = doing.get(member.rank)
        if stall is not None and stall.rank == member.rank:
            member.activity = Activity.COMPUTING
        elif member.activity not in (None, Activity.STOPPED):
            # That says more than one moment: a rank that waits is now and then seen running.
            member.activity = known(member.rank) or member.activity
    return [member for member in ranks.members if doing.get(member.rank) not in (None, Activity.STOPPED)]


def collect_stacks(
    ranks: RankSet, ask: Callable[[], None], members: Sequence[Member], running: Sequence[Member]
) -> None:
    """Have ranks write where they are; for one that cannot (stopped, or deep in the kernel) the kernel speaks.

    Args:
        ranks: All of the set write.
        ask: Has them do so.
        members: Whose stacks are wanted.
        running: Those of them to wait for, within a bound.
    """
    for member in ranks.members:
        member.clear_stacks()
    ask()
    wait_for_texts([member.stacks for member in running])
    for member in members:
        member.where = member.read_stacks() or None
        if member.where is None and member.pid is not None and (state := activity.in_words(member.pid)):
            member.where = f"its stacks could not be had; {state}"


def wait_for_texts(paths: Sequence[Path]) -> None:
    """Wait, within a bound, until files that other processes were told to write have text and grow no more."""
    deadline = time.monotonic() + _STACKS_TIMEOUT_S
    previous: list[int] = []
    num_same = 0
    while paths and num_same < 5 and time.monotonic() < deadline:
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        num_same = num_same + 1 if all(sizes) and sizes == previous else 0
        previous = sizes
        time.sleep(0.01)
