"""Classes for the tests of `train`: what only a training run shows, or shows differently than a campaign."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from zero2core import ZeroMaster


class ForgetsLastElement(ZeroMaster):
    """Bug: the gather leaves the very last weight as it was."""

    def gather_params(self) -> None:
        last = self.params[-1].detach().view(-1)[-1:]
        before = last.clone()
        super().gather_params()
        last.copy_(before)


class ForgetsLastElementOnce(ZeroMaster):
    """Bug: as above, in the third gather only and on rank 1 only, and not for ever: the next gather repairs it."""

    def __init__(self, params: Sequence[nn.Parameter], rank: int, world: int, *, bucket: int) -> None:
        super().__init__(list(params), rank, world, bucket=bucket)
        self.num_gathers = 0

    def gather_params(self) -> None:
        last = self.params[-1].detach().view(-1)[-1:]
        before = last.clone()
        super().gather_params()
        self.num_gathers += 1
        if self.num_gathers == 3 and self.rank == 1:
            last.copy_(before)


class Means(ZeroMaster):
    """Bug: the gradient is divided by the number of ranks."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.grad_buf.div_(self.world)


class ScalesGradients(ZeroMaster):
    """Bug: doubles the gradients while autograd computes them, where only a real backward pass can notice."""

    def __init__(self, params: Sequence[nn.Parameter], rank: int, world: int, *, bucket: int) -> None:
        super().__init__(list(params), rank, world, bucket=bucket)
        for parameter in params:
            parameter.register_hook(lambda gradient: gradient * 2)


class RandomGradients(ZeroMaster):
    """Makes backward passes unrepeatable: what a machine without deterministic kernels does, or a hook that draws."""

    def __init__(self, params: Sequence[nn.Parameter], rank: int, world: int, *, bucket: int) -> None:
        super().__init__(list(params), rank, world, bucket=bucket)
        params[0].register_hook(lambda gradient: gradient + torch.rand_like(gradient))


class WritesWeightsInCollect(ZeroMaster):
    """Bug: changes a compute weight between two gathers, on rank 0 only."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        if self.rank == 0:
            self.params[0].detach().view(-1)[0] += 1


class ExitsAfterReduce(ZeroMaster):
    """Bug: the last rank's process ends, as if all were well, when its second reduction is done."""

    _reductions = 0

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._reductions += 1
        if self._reductions == 2 and self.rank == self.world - 1:
            os._exit(0)
