"""Which parameters of the model are Muon's. No torch."""

from __future__ import annotations

from harness.scenario.muon import Mark

_NOT_HIDDEN = ("bytes.weight", "positions.weight", "head.weight")
"""Matrices of :class:`harness.train.model.ByteModel` whose rows or columns are single bytes or places."""


def mark_of(name: str, shape: tuple[int, ...]) -> Mark:
    """How a parameter of the model is treated."""
    if len(shape) != 2 or name in _NOT_HIDDEN:
        return Mark()
    if name.endswith("query_key_value.weight"):
        return Mark(muon=True, split="qkv", sizes=(shape[0] // 3,) * 3)
    return Mark(muon=True)
