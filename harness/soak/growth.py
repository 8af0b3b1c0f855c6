"""What this process holds, and whether it has grown over a soak. No torch.

[Note: limits]
Descriptors, threads and child processes may not grow at all: both times the ranks of all worlds run and nothing else
does. Memory has no such exact value. A leak of every scenario would keep its verdicts, at least: decoded, one of a rank
takes 8 KiB in the mean (of 150, at worlds 2 and 3), so those of a scenario 20 KiB. What grows without a leak, tables of
Hypothesis and of the allocator, does so less and less: 2.4 MiB in all over 1,900 scenarios. So the limit is half of
such a leak, and a few times as much as was seen for a soak that is so short that this is all.
"""

from __future__ import annotations

import gc
from typing import Final, NamedTuple

import psutil
from msgspec import Struct

ALLOWANCE_BYTES: Final = 8 * 2**20
BYTES_PER_SCENARIO: Final = 10 * 2**10


class Usage(NamedTuple):
    """What the process holds. ``rss`` in bytes; ``processes``: descendants that are not yet reaped."""

    rss: int
    descriptors: int
    threads: int
    processes: int


class Growth(Struct, frozen=True):
    """One kind of thing, before and after, and what it may be at most afterwards; memory in bytes."""

    before: int
    after: int
    limit: int

    @property
    def excessive(self) -> bool:
        """It has grown beyond the limit."""
        return self.after > self.limit


def usage() -> Usage:
    """What this process holds now, garbage apart."""
    gc.collect()
    process = psutil.Process()
    return Usage(
        rss=process.memory_info().rss,
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        processes=len(process.children(recursive=True)),
    )


def growth(before: Usage, after: Usage, num_scenarios: int) -> dict[str, Growth]:
    """Each kind of thing over so many scenarios; see [Note: limits]."""
    limits = before._replace(rss=before.rss + ALLOWANCE_BYTES + num_scenarios * BYTES_PER_SCENARIO)
    held = zip(Usage._fields, before, after, limits, strict=True)
    return {name: Growth(was, now, limit) for name, was, now, limit in held}
