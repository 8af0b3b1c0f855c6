"""Tests on GPUs: ``@pytest.mark.gpus(2)`` says how many a test needs (1 unless it says so); without them it is skipped,
and the last line of the run counts what was."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.evaluate import Pool, start_pool
from tests.gpu import needs
from tests.support import Campaigns

HERE = Path(__file__).parent
_SKIPPED = pytest.StashKey[Counter[int]]()
_GPUS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Markers are strict."""
    config.addinivalue_line("markers", "gpus(number): the test needs so many GPUs")


def _num_gpus(config: pytest.Config) -> int:
    """Asked once, and only where there are tests of this directory."""
    if _GPUS not in config.stash:
        given = os.environ.get(needs.GPUS)
        try:
            config.stash[_GPUS] = int(given) if given is not None else len(needs.visible_gpus().names)
        except needs.UnknownGpusError as error:
            raise pytest.UsageError(f"torch cannot be asked for its GPUs: {error}") from error
    return config.stash[_GPUS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has too few GPUs for."""
    skipped: Counter[int] = config.stash.setdefault(_SKIPPED, Counter())
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        mark = item.get_closest_marker("gpus")
        needed = 1 if mark is None else int(mark.args[0])
        if needed > _num_gpus(config):
            skipped[needed] += 1
            item.add_marker(pytest.mark.skip(reason=needs.reason(needed, _num_gpus(config))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was not covered, in one line."""
    if skipped := config.stash.get(_SKIPPED, Counter()):
        terminalreporter.write_line(needs.not_covered(skipped, _num_gpus(config)))


def _pool(backend: str) -> Iterator[Pool]:
    with start_pool(backend, device="cuda") as pool:
        yield pool


@pytest.fixture(scope="session")
def nccl_pool() -> Iterator[Pool]:
    """A GPU for each rank."""
    yield from _pool("nccl")


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Pool]:
    """Processes that share GPUs."""
    yield from _pool("gloo")


@pytest.fixture(scope="session")
def sim_pool() -> Iterator[Pool]:
    """All ranks in one process, on one GPU."""
    yield from _pool("sim")


@pytest.fixture
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Campaigns:
    """Campaigns on the GPU, on the backend that the test is parametrised with."""
    backend: str = request.param
    return Campaigns(request.getfixturevalue(f"{backend}_pool"), tmp_path, backend, "cuda")
