"""Classes for the tests of `train`: what only a training run shows, or shows differently than a campaign."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero2core import MuonAdamW, MuonParamInfo, MuonShardingConfig, MuonShardingOptimizer, ZeroMaster


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


class MeansTwice(MuonShardingOptimizer):
    """Bug: divides the mean by the number of ranks again; Muon and AdamW hide it from the weights but for a clip."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for shard in self.local_shards():
            if shard.gradient is not None:
                shard.gradient.div_(3.0)


class _CutsNothing(MuonAdamW):
    def __init__(self, named_params: Any, info: Mapping[str, MuonParamInfo], **settings: Any) -> None:
        uncut = {name: replace(one, split="none", sizes=()) for name, one in info.items()}
        super().__init__(named_params, uncut, **settings)


class OrthogonalisesWholeQueryKeyValue(MuonShardingOptimizer):
    """Bug: query, key and value are orthogonalised as one matrix."""

    inner_class = _CutsNothing


class ForgetsPartsOnOneRank(MuonShardingOptimizer):
    """Bug: rank 1 forgets a step's earlier parts."""

    def _take(self, member: Any, gradient: torch.Tensor) -> None:
        if self.rank == 1:
            member.touched = False
        super()._take(member, gradient)


class LeavesOneStale(MuonShardingOptimizer):
    """Bug: in the third step the last weight of the head stays as it was, on rank 1."""

    def __init__(self, inner: MuonAdamW, group: Any = None, config: MuonShardingConfig | None = None) -> None:
        super().__init__(inner, group, config)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:
        last = self.inner.named["head.weight"].detach().view(-1)[-1:]
        before = last.clone()
        super().step(closure)
        self.num_steps += 1
        if self.num_steps == 3 and self.rank == 1:
            last.copy_(before - 1)


class RoundsOtherwise(MuonShardingOptimizer):
    """Right, but for one more rounding somewhere, as if it added in no order: the largest element is off by a place."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for shard in self.local_shards():
            if shard.gradient is not None:
                index = int(shard.gradient.abs().argmax())
                largest = shard.gradient[index : index + 1]
                largest.copy_(torch.nextafter(largest, torch.zeros_like(largest)))
