"""The trail of a rank: what it wrote is read back, whatever became of the rank while it wrote."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from pathlib import Path

import pytest

from harness.drive.trail import Left, Trail, position, read
from harness.verdict import Collective, Stage

NOTHING = Left()
DIGEST = Collective("all_gather_object", "", 0, (0, 1), None, "build")
REDUCE = Collective("reduce_scatter", "fp32", 96, (0, 1), 0, "reduce")
GATHER = Collective("all_gather", "bf16", 48, (1,), 3, "gather")


def file_of(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def write_all(trail: Trail) -> None:
    trail.begin()
    trail.enter(None, Stage.BUILD)
    trail.call(DIGEST)
    trail.enter(0, Stage.REDUCE)
    trail.call(REDUCE)
    trail.enter(3, Stage.GATHER)
    trail.call(GATHER)


def test_the_last_stage_and_all_calls_are_read_back(tmp_path: Path) -> None:
    write_all(Trail(tmp_path, 2, 1))

    assert read(tmp_path, 2, 1) == Left(3, Stage.GATHER, (DIGEST, REDUCE, GATHER))


def test_a_call_that_is_not_told_shows_that_the_rank_gets_on_and_nothing_else(tmp_path: Path) -> None:
    trail = Trail(tmp_path, 2, 1)
    write_all(trail)
    before, left = position(tmp_path, 2, 1), read(tmp_path, 2, 1)

    trail.move()

    assert position(tmp_path, 2, 1) > before
    assert read(tmp_path, 2, 1) == left


def test_every_entry_can_be_read_at_once(tmp_path: Path) -> None:
    """A rank that is killed in a stage or in a call has written it before: nothing waits in a buffer."""
    trail = Trail(tmp_path, 1, 0)
    assert read(tmp_path, 1, 0) == NOTHING
    for stage in Stage:
        trail.enter(5, stage)
        assert read(tmp_path, 1, 0) == Left(5, stage)
    trail.call(REDUCE)
    assert read(tmp_path, 1, 0) == Left(5, Stage.GATHER, (REDUCE,))


def test_faults_that_struck_and_the_end_are_read_back(tmp_path: Path) -> None:
    """Each at once: a fault may end the rank, and a rank that has finished may still send no verdict."""
    trail = Trail(tmp_path, 2, 1)
    trail.enter(0, Stage.REDUCE)
    trail.hit(2)
    assert read(tmp_path, 2, 1) == Left(0, Stage.REDUCE, hits=(2,))
    trail.call(REDUCE)
    trail.hit(0)
    trail.finish()
    assert read(tmp_path, 2, 1) == Left(0, Stage.REDUCE, (REDUCE,), hits=(2, 0), finished=True)

    trail.begin()
    assert read(tmp_path, 2, 1) == NOTHING


def test_a_new_scenario_forgets_the_one_before(tmp_path: Path) -> None:
    trail = Trail(tmp_path, 2, 0)
    write_all(trail)
    trail.begin()
    assert read(tmp_path, 2, 0) == NOTHING

    trail.enter(0, Stage.COLLECT)

    assert read(tmp_path, 2, 0) == Left(0, Stage.COLLECT)
    assert file_of(tmp_path).read_bytes().count(b"\n") == 1


def test_a_new_process_in_the_ranks_place_forgets_the_old_ones_trail(tmp_path: Path) -> None:
    write_all(Trail(tmp_path, 2, 0))

    Trail(tmp_path, 2, 0)

    assert read(tmp_path, 2, 0) == NOTHING


def test_each_rank_of_each_world_has_its_own(tmp_path: Path) -> None:
    places = [(2, 0), (2, 1), (12, 0), (1, 20), (1, 2), (12, 11)]
    for step, place in enumerate(places):
        Trail(tmp_path, *place).enter(step, Stage.NORM)

    assert [read(tmp_path, *place).step for place in places] == [0, 1, 2, 3, 4, 5]
    assert read(tmp_path, 3, 0) == NOTHING


def test_a_long_trail_is_kept_whole_and_forgotten_whole(tmp_path: Path) -> None:
    trail = Trail(tmp_path, 2, 0)
    for _ in range(5000):
        trail.call(REDUCE)
    assert read(tmp_path, 2, 0) == Left(None, Stage.BUILD, (REDUCE,) * 5000)

    trail.begin()
    trail.call(GATHER)
    assert read(tmp_path, 2, 0) == Left(None, Stage.BUILD, (GATHER,))


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    Trail(tmp_path, 1, 0)

    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) & 0o077 == 0


def test_no_trail_is_an_empty_one(tmp_path: Path) -> None:
    """The rank died before it could begin one, or its directory is gone."""
    assert read(tmp_path, 4, 3) == NOTHING
    assert read(tmp_path / "gone", 4, 3) == NOTHING


def test_a_trail_cut_anywhere_gives_what_was_whole(tmp_path: Path) -> None:
    """A rank killed while it writes leaves a part of a line: what came before is read, the part is left out."""
    write_all(Trail(tmp_path, 2, 1))
    path = file_of(tmp_path)
    data = path.read_bytes().rstrip(b"\0")
    marks = [(None, Stage.BUILD), (0, Stage.REDUCE), (3, Stage.GATHER)]
    calls = (DIGEST, REDUCE, GATHER)
    ends = [index for index, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) == 6
    for size in range(len(data)):
        path.write_bytes(data[:size] + bytes(7))
        whole = sum(end <= size for end in ends)  # a line that lacks but its end is whole
        step, stage = marks[(whole - 1) // 2] if whole else (None, Stage.BUILD)

        assert read(tmp_path, 2, 1) == Left(step, stage, calls[: whole // 2]), data[:size]


@pytest.mark.parametrize("rest", [b"\xff\xfe\n", b"{}\n", b'["mark",0]\n', b'["mark",0,"lunch"]\n', b"null\n"])
def test_what_is_no_entry_ends_the_trail(rest: bytes, tmp_path: Path) -> None:
    trail = Trail(tmp_path, 2, 1)
    trail.enter(0, Stage.REDUCE)
    trail.call(REDUCE)
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes().rstrip(b"\0") + rest + b'["mark",9,"gather"]\n')

    assert read(tmp_path, 2, 1) == Left(0, Stage.REDUCE, (REDUCE,))


def test_each_entry_changes_the_position_and_so_does_the_next_scenario(tmp_path: Path) -> None:
    trail = Trail(tmp_path, 2, 0)
    seen = [position(tmp_path, 2, 0)]
    for act in (lambda: trail.enter(0, Stage.COLLECT), lambda: trail.call(REDUCE), trail.finish, trail.begin):
        act()
        seen.append(position(tmp_path, 2, 0))

    assert all(one != other for one, other in itertools.pairwise(seen))
    assert position(tmp_path, 5, 0) == 0


def full_disk(_descriptor: int, _offset: int, _length: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_its_file_is_all_there_before_it_is_written(tmp_path: Path) -> None:
    """A store to a page for which the disk has no room would end the process with SIGBUS."""
    trail = Trail(tmp_path, 1, 0)
    write_all(trail)
    held = file_of(tmp_path).stat()

    assert held.st_blocks * 512 >= held.st_size > 0


def test_a_full_disk_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_disk)

    with pytest.raises(OSError, match=r"no room for 65536 bytes of a rank's trail.*: No space left on device"):
        Trail(tmp_path, 1, 0)


def test_a_disk_that_fills_up_is_told_before_the_next_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the midst of a collective of the subject, which would be blamed; what was written is kept."""
    trail = Trail(tmp_path, 1, 0)
    write_all(trail)
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    for _ in range(2000):
        trail.call(REDUCE)

    left = read(tmp_path, 1, 0)
    assert (left.step, left.stage) == (3, Stage.GATHER)
    assert 0 < len(left.collectives) < 2000
    with pytest.raises(OSError, match="no room"):
        trail.begin()
