"""What the waiting process itself can see of the machine: versions, cores, memory, temporary files, loopback. No torch.

Each ``measure_*`` returns what it found, also when that is an error; each ``read_*`` says what it means.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from harness.doctor.findings import Finding, Verdict
from harness.launch.process import LOOPBACK
from harness.report.result import versions

MIN_MEMORY = 512 * 2**20  # torch once, and ten ranks that share most of it
LOW_MEMORY = 2 * 2**30
LOW_SHARED_MEMORY = 128 * 2**20
LOW_TEMPORARY = 256 * 2**20
SLOW_ROUND_TRIP_US = 5_000.0
_CGROUP = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_NUM_ROUND_TRIPS = 50
_SOCKET_TIMEOUT_S = 2.0
_WRITTEN_BYTES = 2**20


class Versions(Struct, frozen=True, kw_only=True):
    """Packages as installed, and what they run on."""

    packages: dict[str, str]
    system: str
    machine: str
    libc: str


class Cores(Struct, frozen=True, kw_only=True):
    """``usable`` by this process; ``quota``: as many cores' worth of time as a container allows, None without limit."""

    usable: int
    online: int
    quota: float | None
    load: float


class Memory(Struct, frozen=True, kw_only=True):
    """In bytes; ``limit`` is a container's, None without one."""

    total: int
    available: int
    limit: int | None


class Space(Struct, frozen=True, kw_only=True):
    """A directory that should exist and be writable; in bytes."""

    path: str
    error: str | None = None
    total: int = 0
    free: int = 0


class Loopback(Struct, frozen=True, kw_only=True):
    """``interface``: whether the one gloo is told to use exists; ``round_trip_us``: of one byte and back, median."""

    name: str
    interface: bool
    error: str | None = None
    round_trip_us: float = 0.0


def examine() -> tuple[Finding, ...]:
    """All findings of this module; takes milliseconds."""
    return (
        read_versions(measure_versions()),
        read_cores(measure_cores()),
        read_memory(measure_memory()),
        read_shared_memory(measure_space(_SHARED_MEMORY)),
        read_temporary(measure_temporary()),
        read_loopback(measure_loopback()),
    )


# --- versions ---------------------------------------------------------------------------------------------------------


def measure_versions() -> Versions:
    """From package metadata: nothing is imported."""
    return Versions(
        packages=versions(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip() or "unknown libc",
    )


def read_versions(found: Versions) -> Finding:
    """A problem when something the ranks import is not installed."""
    absent = [name for name in ("torch", "numpy") if found.packages.get(name, "not installed") == "not installed"]
    listed = ", ".join(f"{name} {version}" for name, version in found.packages.items())
    return Finding(
        name="versions",
        verdict=Verdict.PROBLEM if absent else Verdict.OK,
        measured=f"{listed}; {found.system} {found.machine}, {found.libc}",
        meaning=f"Ranks need {' and '.join(absent)}: install it in this interpreter."
        if absent
        else "What follows was measured with these; another version of torch may differ.",
        relied_on=True,
        values=_plain(found),
    )


# --- cores and memory -------------------------------------------------------------------------------------------------


def measure_cores(cgroup: Path = _CGROUP) -> Cores:
    """What this process may use."""
    usable = len(os.sched_getaffinity(0))
    return Cores(
        usable=usable, online=os.cpu_count() or usable, quota=_cpu_quota(cgroup / "cpu.max"), load=os.getloadavg()[0]
    )


def read_cores(found: Cores) -> Finding:
    """Never a problem: few cores are slow, not wrong."""
    effective = found.usable if found.quota is None else min(float(found.usable), found.quota)
    quota = "" if found.quota is None else f", limited to {found.quota:g} cores' worth of time"
    verdict, meaning = Verdict.OK, "Ranks take turns where there are fewer cores than ranks: slower, the same bits."
    if effective < 2:
        verdict, meaning = Verdict.NOTE, "All ranks share one core: campaigns are slow, and time-outs come closer."
    elif found.load > 2 * effective:
        verdict, meaning = Verdict.NOTE, "The machine is busy: campaigns are slow, and time-outs come closer."
    return Finding(
        name="cores",
        verdict=verdict,
        measured=f"{found.usable} usable of {found.online}{quota}, load {found.load:.1f}",
        meaning=meaning,
        values=_plain(found),
    )


def measure_memory(cgroup: Path = _CGROUP) -> Memory:
    """Of the machine, and the limit of the container."""
    memory = psutil.virtual_memory()
    return Memory(total=memory.total, available=memory.available, limit=_number(cgroup / "memory.max"))


def read_memory(found: Memory) -> Finding:
    """A problem when ranks can hardly be started."""
    available = found.available if found.limit is None else min(found.available, found.limit)
    limit = "" if found.limit is None else f", limited to {size(found.limit)}"
    verdict, meaning = Verdict.OK, "Enough for drawn scenarios; a preset states its own need and is refused if too big."
    if available < MIN_MEMORY:
        verdict, meaning = Verdict.PROBLEM, f"Less than {size(MIN_MEMORY)}: ranks will be killed by the kernel."
    elif available < LOW_MEMORY:
        verdict, meaning = Verdict.NOTE, "Enough for drawn scenarios, not for the presets of real models."
    return Finding(
        name="memory",
        verdict=verdict,
        measured=f"{size(found.available)} available of {size(found.total)}{limit}",
        meaning=meaning,
        relied_on=True,
        values=_plain(found),
    )


def _cpu_quota(path: Path) -> float | None:
    """``max 100000`` or ``150000 100000`` (microseconds in each period)."""
    try:
        allowed, period = path.read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


# --- places -----------------------------------------------------------------------------------------------------------


def measure_space(path: Path) -> Space:
    """Whether a file can be written there, and how much space is left."""
    try:
        usage = shutil.disk_usage(path)
        with tempfile.TemporaryFile(dir=path) as stream:
            stream.write(bytes(_WRITTEN_BYTES))
            stream.flush()
    except OSError as error:
        return Space(path=str(path), error=error.strerror or str(error))
    return Space(path=str(path), total=usage.total, free=usage.free)


def measure_temporary() -> Space:
    """The directory that ``$TMPDIR`` or the system names."""
    try:
        directory = tempfile.gettempdir()
    except OSError as error:
        return Space(path=os.environ.get("TMPDIR", "/tmp"), error=error.strerror or str(error))
    return measure_space(Path(directory))


def read_shared_memory(found: Space) -> Finding:
    """Never a problem: the harness and gloo do without it."""
    if found.error is not None:
        verdict, measured = Verdict.NOTE, f"{found.path} cannot be used: {found.error}"
    else:
        verdict = Verdict.NOTE if found.free < LOW_SHARED_MEMORY else Verdict.OK
        measured = f"{found.path}: {size(found.free)} free of {size(found.total)}"
    meaning = "The harness and gloo do not use it."
    if verdict is Verdict.NOTE:
        meaning += " NCCL and DataLoader workers do: expect them to fail here (containers: --shm-size)."
    return Finding(name="shared memory", verdict=verdict, measured=measured, meaning=meaning, values=_plain(found))


def read_temporary(found: Space) -> Finding:
    """A problem when nothing can be written: ranks meet through a file there."""
    verdict, measured = Verdict.OK, f"{found.path}: writable, {size(found.free)} free"
    meaning = "Ranks meet, and log, in a private directory there."
    if found.error is not None:
        verdict, measured = Verdict.PROBLEM, f"{found.path} cannot be used: {found.error}"
        meaning = "Ranks meet in a private directory there: set TMPDIR to one that can be written."
    elif found.free < LOW_TEMPORARY:
        verdict = Verdict.NOTE
        meaning += " What ranks print may fill it: free some space, or set TMPDIR."
    return Finding(
        name="temporary files",
        verdict=verdict,
        measured=measured,
        meaning=meaning,
        relied_on=True,
        values=_plain(found),
    )


# --- loopback ---------------------------------------------------------------------------------------------------------


def measure_loopback() -> Loopback:
    """Bind, connect and talk on 127.0.0.1."""
    name = LOOPBACK["GLOO_SOCKET_IFNAME"]
    try:
        interface = name in (entry for _, entry in socket.if_nameindex())
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_SOCKET_TIMEOUT_S)
            with socket.create_connection(server.getsockname(), timeout=_SOCKET_TIMEOUT_S) as client:
                peer, _ = server.accept()
                with peer:
                    return Loopback(name=name, interface=interface, round_trip_us=_round_trip_us(client, peer))
    except OSError as error:
        return Loopback(name=name, interface=False, error=error.strerror or str(error))


def _round_trip_us(client: socket.socket, peer: socket.socket) -> float:
    for end in (client, peer):
        end.settimeout(_SOCKET_TIMEOUT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(_NUM_ROUND_TRIPS):
        began = time.perf_counter()
        client.sendall(b"?")
        peer.sendall(peer.recv(1))
        if client.recv(1) != b"?":
            raise OSError("what was sent did not come back")
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def read_loopback(found: Loopback) -> Finding:
    """A problem when ranks could not reach each other."""
    verdict, meaning = Verdict.OK, "Ranks can talk to each other."
    measured = f"TCP on 127.0.0.1 binds and connects, {found.round_trip_us:.0f} us for one byte and back"
    if found.error is not None:
        verdict, measured = Verdict.PROBLEM, f"TCP on 127.0.0.1 fails: {found.error}"
        meaning = "Ranks cannot talk to each other: bring the loopback interface up."
    elif not found.interface:
        verdict, measured = Verdict.PROBLEM, f"{measured}, but there is no interface named {found.name}"
        meaning = f"gloo is told to use {found.name}, and will not find it."
    elif found.round_trip_us > SLOW_ROUND_TRIP_US:
        verdict, meaning = Verdict.NOTE, "Ranks can talk to each other, slowly: campaigns take longer."
    return Finding(
        name="loopback", verdict=verdict, measured=measured, meaning=meaning, relied_on=True, values=_plain(found)
    )


def size(num_bytes: int) -> str:
    """``23.5 GiB``, ``64 MiB``."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def _plain(found: Struct) -> dict[str, object]:
    plain: Mapping[str, object] = msgspec.to_builtins(found)
    return dict(plain)
