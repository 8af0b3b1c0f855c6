"""What piles up in a rank from scenario to scenario, and when there is so much of it that the rank is replaced."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from harness.scenario import presets
from harness.scenario.model import Scenario


@dataclass(frozen=True)
class Limits:
    """By how much each count may exceed what it was after a rank's second scenario.

    Attributes:
        threads: Each takes a stack and a turn of the scheduler's; a class that starts one or two in every constructor
            gets through dozens of scenarios, one that starts a pool of them does not slow down what follows.
        descriptors: A process may commonly have 1,024, of which gloo needs some for every rank.
        children: Processes that were started and not waited for; the kernel's table of them is the whole machine's.
        groups: Each sub-group has threads and connections of its own, to every one of its ranks.
        tensors: A few dozen for each scenario are a cache or a list of what was seen; thousands are a leak.
        resident_bytes: Beyond what the largest scenario so far explains: allocators keep a part of what was freed.
    """

    threads: int = 64
    descriptors: int = 256
    children: int = 64
    groups: int = 64
    tensors: int = 4096
    resident_bytes: int = 512 * 2**20


# Scenarios between two counts: each takes about 0.3 ms, and no limit is reached so fast that more would do harm.
_EVERY = 4
# The same of looks at all objects of the process, which take some milliseconds.
_TENSORS_EVERY = 64
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WORDS = {
    "threads": "threads",
    "descriptors": "open descriptors",
    "children": "child processes",
    "groups": "process groups",
    "tensors": "live tensors",
}


class Growth:
    """Counts after scenarios of this rank, held against those after the second."""

    def __init__(self, limits: Limits = Limits(), every: int = _EVERY, tensors_every: int = _TENSORS_EVERY) -> None:
        self._limits = limits
        self._every = every
        self._tensors_every = tensors_every
        self._num_scenarios = 0
        self._largest: Scenario | None = None
        self._baseline: dict[str, int] = {}

    def after(self, scenario: Scenario) -> str | None:
        """Count now and then; what there is too much of, None when all is well. To be called once a scenario."""
        self._num_scenarios += 1
        if self._largest is None or scenario.numel > self._largest.numel:
            self._largest = scenario
        if self._num_scenarios < 2 or (self._num_scenarios > 2 and self._num_scenarios % self._every):
            return None
        counts = _counts()
        if self._num_scenarios == 2 or self._num_scenarios % self._tensors_every == 0:
            counts["tensors"] = _num_tensors()
        if self._num_scenarios == 2:
            self._baseline = counts
            return None
        grown = {name: count - self._baseline[name] for name, count in counts.items()}
        for name, words in _WORDS.items():
            if grown.get(name, 0) > getattr(self._limits, name):
                if name == "tensors":
                    gc.collect()
                    grown[name] = _num_tensors() - self._baseline[name]
                    if grown[name] <= self._limits.tensors:
                        continue
                return f"it has {grown[name]:,} more {words} than after its second scenario"
        largest = self._largest
        explained = presets.memory_estimate(largest.parameters, largest.world, largest.bucket) // largest.world
        if grown["resident_bytes"] > explained + self._limits.resident_bytes:
            return (
                f"its memory grew by {grown['resident_bytes'] >> 20:,} MiB since its second scenario; the largest "
                f"scenario since its start explains {explained >> 20:,} MiB"
            )
        return None


def _counts() -> dict[str, int]:
    """All but the tensors."""
    statm = Path("/proc/self/statm").read_bytes().split()
    return {
        "threads": _num_entries("/proc/self/task"),
        "descriptors": _num_entries("/proc/self/fd"),
        "children": _num_children(),
        "groups": _num_groups(),
        "resident_bytes": int(statm[1]) * _PAGE_BYTES,
    }


def _num_entries(directory: str) -> int:
    return len(os.listdir(directory))  # noqa: PTH208 (a Path for each would take longer than all else)


def _num_children() -> int:
    """Of the main thread, which runs the class; 0 where the kernel does not tell."""
    try:
        return len(Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split())
    except OSError:
        return 0


def _num_groups() -> int:
    """Of torch's register, which has no public view; 0 where it is kept in another way."""
    try:
        return len(distributed_c10d._world.pg_map)
    except (AttributeError, TypeError):
        return 0


def _num_tensors() -> int:
    # issubclass(type()): isinstance() would ask objects for __class__, which some answer with work or a warning.
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def default_group() -> object:
    """What is the same as long as the default process group is; None when there is none."""
    return dist.group.WORLD if dist.is_initialized() else None
