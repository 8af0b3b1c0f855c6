"""Fixtures of the tests of simulated worlds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test: no thread, no process group, and torch's own state of this process in its place."""
    threads, state = set(threading.enumerate()), distributed_c10d._world
    groups, modes = num_registered_groups(), (torch.is_grad_enabled(), torch.get_default_dtype())
    yield
    assert set(threading.enumerate()) <= threads
    assert distributed_c10d._world is state
    assert not dist.is_initialized()
    assert num_registered_groups() == groups
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == modes


def num_registered_groups() -> int:
    """How many of some likely names torch's C++ knows a group of; of the whole process where it is not isolated."""
    found = 0
    for name in map(str, range(4)):
        try:
            torch._C._distributed_c10d._resolve_process_group(name)
        except (RuntimeError, ValueError):
            continue
        found += 1
    return found
