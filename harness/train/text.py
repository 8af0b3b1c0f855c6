"""The text a training run reads, and the batches that are cut from it. No torch.

The model works on bytes, so any file is a text. Every batch follows from ``(seed, contributor, step)`` alone: nothing
but the text itself is sent to the ranks, and any rank can cut any other rank's batch.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from harness.errors import UsageError

MAX_TEXT_BYTES = 16 * 2**20  # what is read of a longer file: each rank holds its own copy
DEFAULT_MODULE = "pydoc_data.topics"

# The third word of a Philox counter that belongs to batches; a contributor and a step fill the other two.
_BATCHES = 0x7E87


class Text(msgspec.Struct, frozen=True):
    """``content`` is what is trained on, ``source`` names where it is from, for people."""

    source: str
    content: bytes


def load_text(path: Path | None) -> Text:
    """The first ``MAX_TEXT_BYTES`` of a file, or for None the English text of Python's own help topics.

    Raises:
        UsageError: no such regular file, unreadable, or this Python came without its help topics.
    """
    if path is None:
        return _help_topics()
    if not path.is_file():
        # A pipe or a device would be read once or without end; a run must read the same text when it is repeated.
        raise UsageError(f"--text {path}: {'not a regular file' if path.exists() else 'no such file'}")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"--text {path}: cannot be read: {error.strerror or error}") from error
    return Text(str(path), content)


def require_text(text: Text, num_bytes: int) -> None:
    """Refuse a text too small or too dull to tell the ranks' batches apart.

    Raises:
        UsageError: fewer than ``num_bytes`` bytes, or all bytes the same.
    """
    if len(text.content) < num_bytes:
        raise UsageError(
            f"{text.source}: {len(text.content)} bytes, but the batches of one step take {num_bytes}; "
            "name a longer text with --text FILE"
        )
    if text.content.count(text.content[:1]) == len(text.content):
        raise UsageError(
            f"{text.source}: all bytes are the same, so every rank would train on equal data and a lost or doubled "
            "gradient could not be seen; name another text with --text FILE"
        )


def draw_batch(
    content: bytes, *, seed: int, contributor: int, step: int, num_windows: int, length: int
) -> npt.NDArray[np.int64]:
    """``num_windows`` windows of ``length`` consecutive bytes, shape (num_windows, length), as token numbers 0 to 255.

    A window may start anywhere it fits (drawn with numpy's Philox; the bias of the modulo is below 2**-39).
    """
    generator = np.random.Philox(key=seed, counter=(0, contributor, step, _BATCHES))
    starts = generator.random_raw(num_windows) % np.uint64(len(content) - length + 1)
    positions = starts.astype(np.int64)[:, None] + np.arange(length)
    batch: npt.NDArray[np.int64] = np.frombuffer(content, dtype=np.uint8)[positions].astype(np.int64)
    return batch


def _help_topics() -> Text:
    try:
        topics = importlib.import_module(DEFAULT_MODULE).topics
    except ImportError as error:
        raise UsageError(
            f"this Python has no {DEFAULT_MODULE}, whose text is trained on by default; name a text with --text FILE"
        ) from error
    return Text(DEFAULT_MODULE, "\n".join(topics[name] for name in sorted(topics)).encode()[:MAX_TEXT_BYTES])
