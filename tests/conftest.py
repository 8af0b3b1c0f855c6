"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import profiles
from harness.evaluate import Pool, start_pool
from harness.launch.pool import RankPool
from tests.support import Campaigns

pytest_plugins = ["pytester"]  # for tests/plugin; only this conftest.py may say so

RANKS = 4
"""Of the largest world that most tests have."""

profiles.load()  # a --hypothesis-profile of the command line comes after this


def pytest_configure() -> None:
    """A background job starts with Ctrl-C ignored, and its children too: tests that send it need it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int | None:
    """``-n auto``: each worker has ranks of its own, most often four, which compute at the same time."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist reads it itself
    return max(1, len(os.sched_getaffinity(0)) // RANKS)


@pytest.fixture(scope="session")
def scenario_pool() -> Iterator[RankPool]:
    """Warm ranks that drive scenarios of any subject, for the whole test run."""
    with start_pool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def simulated_pool() -> Iterator[Pool]:
    """A process of simulated worlds for scenarios of any subject, for the whole test run."""
    with start_pool("sim") as pool:
        yield pool


@pytest.fixture
def simulated(simulated_pool: Pool, tmp_path: Path) -> Campaigns:
    """Campaigns in simulated worlds."""
    return Campaigns(simulated_pool, tmp_path, "sim")


@pytest.fixture
def campaigns(scenario_pool: RankPool, tmp_path: Path) -> Campaigns:
    """Campaigns on the shared ranks."""
    return Campaigns(scenario_pool, tmp_path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread: on how many, the bits of a product of matrices may depend."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
