"""Profiles of Hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from harness import profiles


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    profiles.load()


@pytest.mark.parametrize("name", profiles.NAMES)
def test_no_profile_loses_what_failed(name: str, tmp_path: Path) -> None:
    """Hypothesis' own profile for CI has no database and draws the same every time."""
    profiles.load(name, tmp_path)
    loaded = settings.get_profile(name)
    assert loaded.database == DirectoryBasedExampleDatabase(tmp_path)
    assert not loaded.derandomize
    assert loaded.print_blob
    assert settings.get_current_profile_name() == name


@pytest.mark.parametrize(
    ("profile", "ci", "wanted"),
    [("", "", "dev"), ("", "true", "ci"), ("debug", "true", "debug"), ("fuzz", "", "fuzz")],
)
def test_the_environment_chooses(profile: str, ci: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPOTHESIS_PROFILE", profile)
    monkeypatch.setenv("CI", ci)
    assert profiles.chosen() == wanted


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "fast")
    with pytest.raises(ValueError, match="expected one of dev, ci, fuzz, debug, got 'fast'"):
        profiles.chosen()
