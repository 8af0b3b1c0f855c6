"""One warm pool for all tests of the pool: what one test breaks, the pool must have repaired for the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.launch.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that do what :mod:`tests.ranks.handlers` says."""
    with RankPool("tests.ranks.handlers:simple", b"the setup", grace_s=2.0) as started:
        yield started
