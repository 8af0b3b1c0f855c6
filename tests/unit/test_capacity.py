"""What the machine can hold is known before the first rank is started."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness import capacity
from harness.capacity import available_memory, available_threads, check_ranks, check_simulation, simulation_lanes
from harness.errors import UsageError

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 GiB of memory, no limits, and a group ``/outer/inner`` whose files the tests write below what is returned."""
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    read_text = Path.read_text

    def in_the_group(path: Path, *args: str, **kwargs: str) -> str:
        return "0::/outer/inner\n" if str(path) == "/proc/self/cgroup" else read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", in_the_group)
    monkeypatch.setattr(capacity, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    limit(monkeypatch)
    return tmp_path


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Limits of resources; all others are infinite."""

    def getrlimit(which: int) -> tuple[int, int]:
        found = next((value for name, value in limits.items() if getattr(resource, name) == which), None)
        return (resource.RLIM_INFINITY if found is None else found), resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", getrlimit)


def test_the_largest_world_is_taken_where_nothing_is_short() -> None:
    check_ranks((256,))
    check_ranks((1, 2, 3, 4))


def test_too_little_memory_is_told_with_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of all worlds live together: 10 of 32 MiB, and 384 MiB once."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=(384 + 320) * 2**20))
    check_ranks((1, 2, 3, 4))
    with pytest.raises(UsageError, match=r"--world 1,2,3,5: 11 ranks need about 0\.7 GiB .* 0\.7 GiB are available"):
        check_ranks((1, 2, 3, 5))


def test_too_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has one for each of its peers, this process one for each rank."""
    limit(monkeypatch, RLIMIT_NOFILE=256 + 32)
    check_ranks((256,))
    check_ranks((100, 156))
    with pytest.raises(UsageError, match=r"257 ranks need about 289 open files in a process, 288 are allowed"):
        check_ranks((1, 256))


def test_too_few_processes_for_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads count; root is not limited."""
    limit(monkeypatch, RLIMIT_NPROC=1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match=r"world 2: 2 ranks need about 24 threads, 0 more may be started"):
        check_ranks((2,))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_ranks((2,))


def test_the_narrowest_group_of_a_container_counts(machine: Path) -> None:
    """An outer group limits as well as the own one; cached files do not count as used; "max" is no limit."""
    inner, outer = machine / "outer" / "inner", machine / "outer"
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (outer / "memory.max").write_text(f"{2 * GIB}\n")
    (outer / "memory.current").write_text(f"{GIB}\n")
    assert available_memory() == GIB
    (outer / "memory.stat").write_text("anon 1\nactive_file 100\ninactive_file 20\n")
    assert available_memory() == GIB + 120
    (inner / "memory.max").write_text("4\n")
    assert available_memory() == 0


def test_too_few_processes_for_the_container(machine: Path) -> None:
    assert available_threads() is None
    (machine / "outer" / "pids.max").write_text("100\n")
    (machine / "outer" / "pids.current").write_text("60\n")
    check_ranks((6,))
    with pytest.raises(UsageError, match="7 ranks need about 44 threads, 40 more may be started"):
        check_ranks((7,))


# --- simulated worlds: one process, one world at a time --------------------------------------------------------------


def test_simulated_ranks_share_the_memory_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """384 MiB once, 32 for the process and 4 for each rank of the largest world."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=(384 + 32 + 4 * 256) * 2**20))
    check_simulation((1, 2, 255, 256))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=(384 + 32 + 4 * 256) * 2**20 - 1))
    check_simulation((1, 2, 255))
    with pytest.raises(UsageError, match=r"world 256 on --backend sim needs about 1\.4 GiB of memory"):
        check_simulation((1, 256))


def test_too_few_descriptors_for_simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has two for its trail, and the trails of all worlds stay open."""
    limit(monkeypatch, RLIMIT_NOFILE=2 * 256 + 32)
    check_simulation((256,))
    with pytest.raises(UsageError, match=r"world 256 on --backend sim needs about 546 open files in a process"):
        check_simulation((1, 256))


def test_too_few_threads_for_simulated_ranks(machine: Path) -> None:
    (machine / "outer" / "pids.max").write_text("100\n")
    (machine / "outer" / "pids.current").write_text("60\n")
    check_simulation((20, 20))
    with pytest.raises(UsageError, match="world 21 on --backend sim needs about 41 threads, 40 more may be started"):
        check_simulation((21,))


# --- simulated worlds side by side -----------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 2, 5, 7})


def test_there_is_a_lane_for_each_core(cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to eight."""
    assert simulation_lanes((1, 256)) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert simulation_lanes((1, 2)) == 8


def test_there_are_only_so_many_lanes_as_the_memory_holds(cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds as much as the process that is there anyway, and 384 MiB are needed once."""
    each = 32 + 4 * 8 + 1000
    for free, lanes in ((5 * each, 4), (5 * each - 1, 3), (3 * each, 2), (2 * each, 1), (0, 1)):
        available = (384 + free) * 2**20
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        assert simulation_lanes((2, 8), 1000 * 2**20) == lanes


def test_there_are_only_so_many_lanes_as_threads_may_be_started(cores: None, machine: Path) -> None:
    (machine / "outer" / "pids.current").write_text("0\n")
    for threads, lanes in ((16 + 3 * 24, 2), (16 + 3 * 24 - 1, 1), (1, 1)):
        (machine / "outer" / "pids.max").write_text(f"{threads}\n")
        assert simulation_lanes((1, 20)) == lanes
