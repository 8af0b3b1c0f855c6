"""What this machine can start: refuse ranks that it cannot hold, with the estimate, before the first of them exists."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from harness.errors import UsageError
from harness.scenario.presets import PROCESS_BYTES
from harness.sim.lanes import MAX_LANES

# Measured with torch 2.13 on the CPU: the process that ranks are forked from (294 MiB), and this one (37 MiB).
_BASE_BYTES = 384 * 2**20
# A worker of a campaign or a museum, which draws.
_WORKER_BYTES = 128 * 2**20
# A rank has 4 threads, and a descriptor for each other rank and 12 more; the rest is for what the subject opens.
_RANK_THREADS = 4
_MORE_THREADS = 16
_MORE_DESCRIPTORS = 32

# A simulated rank is a thread with the objects of a scenario, and two descriptors of the file of its trail.
_SIMULATED_RANK_BYTES = 4 * 2**20
_SIMULATED_RANK_DESCRIPTORS = 2

_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def check_ranks(worlds: Sequence[int]) -> None:
    """Refuse what this machine cannot start. The ranks of all worlds live at the same time.

    Raises:
        UsageError: too little memory, or too low a limit of open files or of processes.
    """
    what = f"--world {','.join(map(str, worlds))}" if len(worlds) > 1 else f"world {worlds[0]}"
    num_ranks, widest = sum(worlds), max(worlds)
    needed, available = _BASE_BYTES + num_ranks * PROCESS_BYTES, available_memory()
    if needed > available:
        raise UsageError(
            f"{what}: {num_ranks} ranks need about {needed / 2**30:.1f} GiB of memory before they hold any tensor, "
            f"{available / 2**30:.1f} GiB are available: use fewer or smaller worlds"
        )
    descriptors = max(widest, num_ranks) + _MORE_DESCRIPTORS  # of a rank; of this process
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and descriptors > limit:
        raise UsageError(
            f"{what}: {num_ranks} ranks need about {descriptors} open files in a process, {limit} are allowed: "
            "raise it with `ulimit -n`, or use fewer or smaller worlds"
        )
    threads, left = num_ranks * _RANK_THREADS + _MORE_THREADS, available_threads()
    if left is not None and threads > left:
        raise UsageError(
            f"{what}: {num_ranks} ranks need about {threads} threads, {left} more may be started "
            "(`ulimit -u`, pids.max of the container): use fewer or smaller worlds"
        )


def check_simulation(worlds: Sequence[int]) -> None:
    """The same of simulated worlds, which live in one process, one world at a time.

    That there is more than one such process (:func:`simulation_lanes`) is not required.

    Raises:
        UsageError: too little memory, or too low a limit of open files or of threads.
    """
    world = max(worlds)
    what = f"world {world} on --backend sim"
    needed, available = _BASE_BYTES + PROCESS_BYTES + world * _SIMULATED_RANK_BYTES, available_memory()
    if needed > available:
        raise UsageError(
            f"{what} needs about {needed / 2**30:.1f} GiB of memory before it holds any tensor, "
            f"{available / 2**30:.1f} GiB are available: use smaller worlds"
        )
    descriptors = sum(worlds) * _SIMULATED_RANK_DESCRIPTORS + _MORE_DESCRIPTORS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and descriptors > limit:
        raise UsageError(
            f"{what} needs about {descriptors} open files in a process, {limit} are allowed: "
            "raise it with `ulimit -n`, or use smaller worlds"
        )
    threads, left = world + _RANK_THREADS + _MORE_THREADS, available_threads()
    if left is not None and threads > left:
        raise UsageError(
            f"{what} needs about {threads} threads, {left} more may be started "
            "(`ulimit -u`, pids.max of the container): use smaller worlds"
        )


def simulation_lanes(worlds: Sequence[int], scenario_bytes: int = 0) -> int:
    """How many processes may run simulated worlds side by side: one a core, as far as memory and threads suffice.

    Args:
        worlds: Any of these may run in each.
        scenario_bytes: What the largest scenario holds in tensors; 0: too little to count.

    Returns:
        At least 1, which is the process of :func:`check_simulation` itself; else it is there beside so many.
    """
    cores, world = len(os.sched_getaffinity(0)), max(worlds)
    held = PROCESS_BYTES + world * _SIMULATED_RANK_BYTES + scenario_bytes
    fits = [cores, MAX_LANES, (available_memory() - _BASE_BYTES) // held - 1]
    left = available_threads()
    if left is not None:
        fits.append((left - _MORE_THREADS) // (world + _RANK_THREADS) - 1)
    return max(1, min(fits))


def worker_processes(backend: str, worlds: Sequence[int], asked: int | None) -> int:
    """How many processes that run campaigns, or parts of one, may work side by side, each with ranks of its own.

    Args:
        backend: ``sim``, or one whose ranks are processes.
        worlds: Any of these may run in each.
        asked: What the user wants; None: as many as cores and memory suffice for, at least 1.

    Raises:
        UsageError: there is not enough memory for so many as were asked for.
    """
    cores, world = len(os.sched_getaffinity(0)), max(worlds)
    if backend == "sim":
        ranks, wanted = PROCESS_BYTES + world * _SIMULATED_RANK_BYTES, cores
    else:
        ranks, wanted = sum(worlds) * PROCESS_BYTES, cores // world
    each, available = _BASE_BYTES + _WORKER_BYTES + ranks, available_memory()
    if asked is None:
        return max(1, min(wanted, available // each))
    if asked > 1 and asked * each > available:
        raise UsageError(
            f"--workers {asked}: they need about {asked * each / 2**30:.1f} GiB of memory before they hold any tensor, "
            f"{available / 2**30:.1f} GiB are available: use fewer"
        )
    return asked


def available_memory() -> int:
    """Bytes that processes started here may still take: of the machine, or of the control groups this one is in."""
    left = [psutil.virtual_memory().available]
    for group in _control_groups():
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            left.append(max(limit - used + _reclaimable(group), 0))
    return min(left)


def available_threads() -> int | None:
    """How many more threads this user, or the control groups this process is in, may have; None: no limit is known."""
    left = []
    for group in _control_groups():
        limit, used = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and used is not None:
            left.append(max(limit - used, 0))
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # the limit does not hold for root
        left.append(max(limit - _own_threads(), 0))
    return min(left, default=None)


def _own_threads() -> int:
    total, user = 0, os.getuid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user:
                total += process.num_threads()
    return total


def _control_groups() -> Iterator[Path]:
    """The directory of this process's group and those around it (version 2; none where there is no such)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = _CONTROL_GROUPS / line.removeprefix("0::/")
                yield own
                yield from (path for path in own.parents if path.is_relative_to(_CONTROL_GROUPS))


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, or it says "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _reclaimable(group: Path) -> int:
    """Bytes of cached files, which count as used but are given back when memory is short."""
    with suppress(OSError, ValueError):
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
    return 0
