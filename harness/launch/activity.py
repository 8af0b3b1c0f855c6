"""What the kernel knows of a process: whether it computes, waits or is stopped, and the processor time it has used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.launch.outcome import Activity

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED = frozenset("Tt")
_ENDED = frozenset("ZXx")
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting, uninterruptible",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended, not reaped",
    "I": "idle",
}


@dataclass(frozen=True)
class Reading:
    """One process with its descendants, at one moment.

    Attributes:
        activity: By the states of all threads.
        cpu_s: The processor time that the process itself has used.
        descendants: Their process numbers.
        descendants_cpu_s: The processor time that they have used, also those that were reaped.
    """

    activity: Activity
    cpu_s: float
    descendants: frozenset[int] = frozenset()
    descendants_cpu_s: float = 0.0


@dataclass(frozen=True)
class _Stat:
    """Some fields of ``/proc/PID/stat``."""

    state: str
    parent: int
    cpu_s: float
    reaped_cpu_s: float


def read(pids: Iterable[int]) -> dict[int, Reading]:
    """A reading of each of these processes that has not ended."""
    processes = {pid: stat for pid in _numbers(_PROC) if (stat := _stat(_PROC / str(pid) / "stat")) is not None}
    children: dict[int, list[int]] = {}
    for pid, stat in processes.items():
        children.setdefault(stat.parent, []).append(pid)
    readings = {}
    for pid in pids:
        own = _thread_states(pid)
        if not own:
            continue
        family = _with_descendants(pid, children)
        states = own.union(*(_thread_states(member) for member in family[1:]))
        known = [processes[member] for member in family if member in processes]
        cpu_s = processes[pid].cpu_s if pid in processes else 0.0
        others_s = sum(stat.cpu_s + stat.reaped_cpu_s for stat in known) - cpu_s
        readings[pid] = Reading(_activity(own, states), cpu_s, frozenset(family[1:]), others_s)
    return readings


def in_words(pid: int) -> str | None:
    """The state of a process's main thread, and where in the kernel it waits if that may be read; None if it ended."""
    stat = _stat(_PROC / str(pid) / "stat")
    if stat is None or stat.state in _ENDED:
        return None
    try:
        where = (_PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        where = ""
    place = f", in the kernel's {where}" if where not in ("", "0") else ""
    return f"the kernel says of its main thread: state {stat.state} ({_STATES.get(stat.state, 'unknown')}){place}"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, and is not ended by it."""
    try:
        for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False


def _activity(own: set[str], states: set[str]) -> Activity:
    """By the states of the process's own threads and of all threads.

    A descendant that was stopped may well be waited for, a process that was stopped does nothing itself.
    """
    if own <= _STOPPED:
        return Activity.STOPPED
    if "R" in states:
        return Activity.COMPUTING
    return Activity.DEVICE if "D" in states else Activity.BLOCKED


def _with_descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    family = [pid]
    for member in family:  # Grows as it is walked.
        family.extend(child for child in children.get(member, ()) if child not in family)
    return family


def _thread_states(pid: int) -> set[str]:
    """Of the threads that have not ended; a running one says enough, the rest of hundreds is not looked at."""
    tasks = _PROC / str(pid) / "task"
    states: set[str] = set()
    for thread in _numbers(tasks):
        state = _state(f"{tasks}/{thread}/stat")
        if state is not None:
            states.add(state)
        if state == "R":
            break
    return states - _ENDED


def _numbers(directory: Path) -> Iterator[int]:
    try:
        names = os.listdir(directory)  # noqa: PTH208 (called four times a second, for every process of the machine)
    except OSError:
        return
    yield from (int(name) for name in names if name.isdecimal())


def _stat(path: Path) -> _Stat | None:
    try:
        text = path.read_bytes()
    except OSError:
        return None
    fields = _after_name(text).split()
    own_s, reaped_s = (sum(map(int, pair)) / _TICKS_PER_S for pair in (fields[11:13], fields[13:15]))
    return _Stat(fields[0].decode(), int(fields[1]), own_s, reaped_s)


def _state(path: str) -> str | None:
    """Only the state, by as few calls as can be: there may be hundreds of threads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _after_name(os.read(descriptor, 4096))[:1].decode() or None
    except OSError:  # it ended in between
        return None
    finally:
        os.close(descriptor)


def _after_name(text: bytes) -> bytes:
    return text[text.rfind(b")") + 2 :]  # The name before may hold anything, also brackets.
