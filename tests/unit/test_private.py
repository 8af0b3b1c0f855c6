"""The private directory: only for this user, gone at the end, and the leftovers of killed processes are removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import UsageError
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


@pytest.mark.parametrize("place", ["missing", "file", "file/deeper", "a\0b"])
def test_a_place_that_cannot_be_used_is_one_line(place: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself would take another place without a word; the line says which it was and what to do."""
    (temporary / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / place))

    with pytest.raises(UsageError, match=r"temporary files in .*; set TMPDIR to") as refused:
        PrivateDirectory()

    assert str(temporary) in str(refused.value)
    assert [path.name for path in temporary.iterdir()] == ["file"]


def test_tmpdir_is_taken_at_its_word(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(temporary / "missing"))

    with pytest.raises(UsageError, match=r"missing: No such file or directory; set TMPDIR"):
        PrivateDirectory()


def test_a_full_disk_is_refused_and_nothing_left_there(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16 * 2**20 - 1))

    with pytest.raises(UsageError, match=r"16\.0 MiB are free, at least 16 are needed"):
        PrivateDirectory()

    assert list(temporary.iterdir()) == []


def test_a_lock_that_nobody_can_have_is_no_reason_to_try_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, or without room for the file."""

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(UsageError, match="No locks available"):
        PrivateDirectory()


def test_a_directory_that_can_be_written_is_no_problem(temporary: Path) -> None:
    """The probe leaves nothing in it; nor is one that has been removed."""
    directory = PrivateDirectory()
    before = sorted(directory.path.iterdir())

    assert directory.problem() is None
    assert sorted(directory.path.iterdir()) == before
    directory.remove()
    assert directory.problem() is None
