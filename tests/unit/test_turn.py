"""Whose turn it is, across processes: what is written is read, also after the writer, and nothing else is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from harness.sim import turn
from harness.sim.turn import State, Turn


def test_before_the_first_turn_it_is_nobodys(tmp_path: Path) -> None:
    assert turn.read(tmp_path, 3) == State()
    Turn(tmp_path, 3)
    assert turn.read(tmp_path, 3) == State(None, 0, (0, 0, 0))


def test_the_running_rank_its_thread_and_the_number_of_turns_are_read(tmp_path: Path) -> None:
    mine = threading.get_ident()
    written = Turn(tmp_path, 3)
    seen = []
    for rank in (2, 0, None):
        written.enter(rank)
        seen.append(turn.read(tmp_path, 3))

    assert seen == [State(2, 1, (0, 0, mine)), State(0, 2, (mine, 0, mine)), State(None, 3, (mine, 0, mine))]


def test_a_thread_is_that_which_enters(tmp_path: Path) -> None:
    written = Turn(tmp_path, 2)
    written.enter(0)
    thread = threading.Thread(target=written.enter, args=(1,))
    thread.start()
    thread.join()

    assert turn.read(tmp_path, 2) == State(1, 2, (threading.get_ident(), thread.ident or 0))


def test_worlds_are_kept_apart(tmp_path: Path) -> None:
    Turn(tmp_path, 2).enter(1)
    Turn(tmp_path, 3).enter(2)

    assert (turn.read(tmp_path, 2).rank, turn.read(tmp_path, 3).rank) == (1, 2)


def test_what_was_cleared_is_forgotten_and_the_writer_goes_on(tmp_path: Path) -> None:
    turn.clear(tmp_path, 2)  # nothing is there yet
    written = Turn(tmp_path, 2)
    written.enter(1)
    turn.clear(tmp_path, 2)
    assert turn.read(tmp_path, 2) == State(None, 0, (0, 0))

    written.enter(0)
    assert turn.read(tmp_path, 2) == State(0, 2, (threading.get_ident(), 0))


@pytest.mark.parametrize("data", [b"", b"short", bytes(100)])
def test_a_file_that_is_none_of_this_world_says_nothing(tmp_path: Path, data: bytes) -> None:
    Turn(tmp_path, 2)
    (tmp_path / "turn-world2").write_bytes(data)

    assert turn.read(tmp_path, 2) == State()


def test_a_rank_beyond_the_world_is_none(tmp_path: Path) -> None:
    (tmp_path / "turn-world2").write_bytes((7).to_bytes(8, "little") + (9).to_bytes(8, "little") + bytes(16))

    assert turn.read(tmp_path, 2) == State(None, 7, (0, 0))
