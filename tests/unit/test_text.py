"""The text a training run reads: where it comes from, what is refused, and how batches are cut from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UsageError
from harness.train import text as text_module
from harness.train.text import Text, draw_batch, load_text, require_text

CONTENT = bytes(range(256)) * 4


def _batch(
    content: bytes = CONTENT,
    *,
    seed: int = 5,
    contributor: int = 0,
    step: int = 0,
    num_windows: int = 3,
    length: int = 9,
) -> np.ndarray:
    return draw_batch(content, seed=seed, contributor=contributor, step=step, num_windows=num_windows, length=length)


def test_the_default_text_is_the_english_help_of_python() -> None:
    text = load_text(None)

    assert text.source == "pydoc_data.topics"
    assert len(text.content) > 100_000
    assert text.content.count(b" the ") > 1000


def test_the_default_text_is_the_same_each_time() -> None:
    assert load_text(None) == load_text(None)


def test_a_python_without_help_topics_points_to_the_text_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)

    with pytest.raises(UsageError, match=r"no pydoc_data\.topics.*--text FILE"):
        load_text(None)


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(CONTENT)

    assert load_text(path) == Text(str(path), CONTENT)


def test_only_the_head_of_a_huge_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "MAX_TEXT_BYTES", 100)
    path = tmp_path / "text.bin"
    path.write_bytes(CONTENT)

    assert load_text(path).content == CONTENT[:100]


def test_a_missing_file_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--text .*nothing\.txt: no such file"):
        load_text(tmp_path / "nothing.txt")


def test_a_directory_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        load_text(tmp_path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(UsageError, match="not a regular file"):
        load_text(path)


def test_a_text_shorter_than_one_step_is_bad_usage() -> None:
    require_text(Text("short.txt", CONTENT[:50]), 50)

    with pytest.raises(UsageError, match=r"short\.txt: 50 bytes, but the batches of one step take 51.*--text FILE"):
        require_text(Text("short.txt", CONTENT[:50]), 51)


def test_a_text_of_one_repeated_byte_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="all bytes are the same"):
        require_text(Text("zeros", bytes(100)), 10)


def test_every_window_is_a_run_of_the_text() -> None:
    content = b"the quick brown fox jumps over the lazy dog"

    batch = _batch(content, num_windows=50, length=7)

    assert batch.shape == (50, 7)
    assert batch.dtype == np.int64
    assert all(bytes(window.tolist()) in content for window in batch)


def test_windows_may_start_at_the_first_and_at_the_last_place_that_fits() -> None:
    starts = {int(window[0]) for window in _batch(bytes(range(12)), num_windows=200, length=9)}

    assert starts == {0, 1, 2, 3}


def test_a_text_of_one_window_gives_that_window() -> None:
    assert _batch(bytes(range(9)), num_windows=2).tolist() == [list(range(9))] * 2


def test_the_same_numbers_give_the_same_batch() -> None:
    assert np.array_equal(_batch(), _batch())


@pytest.mark.parametrize("changed", [{"seed": 6}, {"contributor": 1}, {"step": 1}], ids=str)
def test_another_seed_contributor_or_step_gives_another_batch(changed: dict[str, int]) -> None:
    assert not np.array_equal(_batch(num_windows=8), _batch(num_windows=8, **changed))
