"""Fixtures of all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.evaluate import start_pool
from harness.launch.pool import RankPool
from tests.support import Campaigns


def pytest_configure() -> None:
    """A background job starts with Ctrl-C ignored, and its children too: tests that send it need it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def scenario_pool() -> Iterator[RankPool]:
    """Warm ranks that drive scenarios of any subject, for the whole test run."""
    with start_pool() as ranks:
        yield ranks


@pytest.fixture
def campaigns(scenario_pool: RankPool, tmp_path: Path) -> Campaigns:
    """Campaigns on the shared ranks."""
    return Campaigns(scenario_pool, tmp_path)
