"""The private directory: only for this user, gone at the end, and the leftovers of killed processes are removed."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from harness.launch.private import PrivateDirectory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own place for temporary files, so that other pools on the machine are out of sight."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_the_user_may_enter(temporary: Path) -> None:
    """The directory is made under the place for temporary files, with mode 0700."""
    directory = PrivateDirectory()

    assert directory.path.parent == temporary
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.remove()


def test_removal_takes_everything_and_may_be_repeated(temporary: Path) -> None:
    """Also files within directories."""
    directory = PrivateDirectory()
    (directory.path / "sub").mkdir()
    (directory.path / "sub" / "file").write_text("x")

    directory.remove()
    directory.remove()

    assert list(temporary.iterdir()) == []


def test_a_directory_that_nobody_holds_is_removed_by_the_next(temporary: Path) -> None:
    """A process that was killed leaves a directory and no lock; who comes next removes that, and no others."""
    living = PrivateDirectory()
    foreign = temporary / "something-else"
    foreign.mkdir()
    PrivateDirectory().release()
    left = set(temporary.iterdir())

    mine = PrivateDirectory()

    assert len(left) == 3
    assert set(temporary.iterdir()) == {living.path, foreign, mine.path}
    living.remove()
    mine.remove()


def test_letting_go_leaves_the_directory() -> None:
    """release() is for a fork of the owner: it deletes nothing."""
    directory = PrivateDirectory()

    directory.release()
    directory.remove()

    assert directory.path.is_dir()
