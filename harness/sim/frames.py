"""Whose code a frame is: that of the class, or what it is run by."""

from __future__ import annotations

from pathlib import Path

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
_HARNESS = f"{Path(__file__).parents[1]}/"
_MUSEUM = f"{_HARNESS}faults/museum/"
"""Subjects, though they lie within the harness."""


def is_ours(file: str) -> bool:
    """Whether a file is one of torch or of the harness: not one of a subject."""
    return file.startswith(_TORCH) or (file.startswith(_HARNESS) and not file.startswith(_MUSEUM))
