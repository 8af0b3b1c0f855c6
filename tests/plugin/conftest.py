"""The plugin as its users have it: pytest runs of their own, with files of their own."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A directory in which the plugin is loaded once, whether this checkout is installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("PYTEST_ADDOPTS", "PYTEST_RANKS_BACKEND", "PYTEST_RANKS_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    # As pytest looks: in all distributions, also where one hides another of the same name.
    points = (point for each in importlib.metadata.distributions() for point in each.entry_points)
    if not any((point.group, point.name) == ("pytest11", "zero2_harness") for point in points):
        monkeypatch.setenv("PYTEST_ADDOPTS", "-p harness.pytest_plugin")
    return pytester
