"""Two subjects that must fail: a campaign that passes one of them shows that the harness is broken."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from zero2core.zero_master import ZeroMaster


class WrongBit(ZeroMaster):
    """On the last rank the lowest bit of one element of the reduced gradient is wrong."""

    def reduce_scatter(self) -> None:
        """Reduce, then flip the bit."""
        super().reduce_scatter()
        if self.rank == self.world - 1:
            _flip_lowest_bit(self.grad_buf[:1])


class Silent(ZeroMaster):
    """The last rank ends in the gather as if all were well, with exit code 0."""

    def gather_params(self) -> None:
        """End, or gather."""
        if self.rank == self.world - 1:
            os._exit(0)
        super().gather_params()


def _flip_lowest_bit(element: Tensor) -> None:
    element.view(torch.int32).bitwise_xor_(1)
