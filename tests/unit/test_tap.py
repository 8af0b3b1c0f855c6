"""The record of collectives, where no group is needed: what it leaves out is told all the same."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.launch import tap


def all_reduce(tensor: Tensor, group: object = None) -> Tensor:
    """Stands for the backend's."""
    return tensor


def test_a_call_that_is_not_recorded_is_told() -> None:
    """Or a rank that is slow in what the harness asks of its subject would seem to hang."""
    log = tap.CollectiveLog()
    told: list[int] = []
    log.unrecorded = lambda: told.append(len(log.entries))
    call = tap._tapped(log, all_reduce, "all_reduce", "all_reduce", "tensor")

    with log.paused():
        call(torch.zeros(3))
        call(torch.zeros(3))

    assert told == [0, 0]
    assert log.entries == []
