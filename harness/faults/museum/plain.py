"""A ZeRO-2 class as a user would have one in a trainer: synchronous, one bucket at a time, no refusals.

It has the interface of a class subject (``spec/zero_master.md``) and shares no code with ``zero2core``. The variants
in ``controls`` and ``plants`` override single methods of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

Cut = tuple[int, int, int]
Gradients = list[Tensor | None]


class PlainZero:
    """fp32 master, moments and gradient of ``params`` (contiguous, one dtype), sharded over the default group."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        self.params = params
        self.rank = rank
        self.world = world
        self._offsets = list(accumulate((p.numel() for p in params), initial=0))
        self._cuts = self._cut(self._offsets[-1], bucket)
        self._starts = list(accumulate((padded // world for _, _, padded in self._cuts), initial=0))
        self.master = nn.Parameter(self._initial_master())
        self._grad = torch.zeros_like(self.master, requires_grad=False)
        self._held: Gradients | None = None
        self._host: Tensor | None = None
        self._spilled = False
        self.spills = 0

    # Layout: a bucket is (start, end, padded length); rank r owns the r-th of `world` equal pieces of each.

    def _cut(self, numel: int, bucket: int) -> list[Cut]:
        size = max(bucket - bucket % self.world, self.world)
        cuts = []
        for start in range(0, numel, size):
            end = min(start + size, numel)
            cuts.append((start, end, self._padded(end - start)))
        return cuts

    def _padded(self, length: int) -> int:
        return -(-length // self.world) * self.world

    def _piece(self, padded: int) -> slice:
        """Where this rank's piece lies in a padded bucket."""
        length = padded // self.world
        return slice(self.rank * length, (self.rank + 1) * length)

    def _shard(self, index: int) -> slice:
        """Where this rank's piece of a bucket lies in its shard."""
        return slice(self._starts[index], self._starts[index + 1])

    def _fill(self, flat: Tensor, start: int, end: int, sources: Sequence[Tensor | None]) -> None:
        """Copy what lies in [start, end) of the flat vector into ``flat``; a missing source leaves it as it is."""
        for source, first, last in zip(sources, self._offsets, self._offsets[1:], strict=False):
            low, high = max(start, first), min(end, last)
            if source is not None and low < high:
                flat[low - start : high - start].copy_(source.detach().view(-1)[low - first : high - first])

    def _initial_master(self) -> Tensor:
        pieces = []
        for start, end, padded in self._cuts:
            flat = self._staging(padded, end - start)
            self._fill(flat, start, end, self.params)
            pieces.append(flat[self._piece(padded)])
        return torch.cat(pieces)

    def _staging(self, padded: int, length: int) -> Tensor:
        """A zeroed bucket; ``length`` of its elements will be filled."""
        return torch.zeros(padded, device=self.params[0].device)

    # Gradients

    @property
    def has_grad(self) -> bool:
        """A gradient is waiting on this rank."""
        return self._held is not None or self._spilled

    def collect(self, more: bool) -> None:
        """Take every ``.grad`` into this step's sum; ``more``: further parts follow."""
        grads = self._take()
        if all(grad is None for grad in grads):
            return
        if not more and not self.has_grad:
            self._held = grads
            return
        if not self._spilled:
            self._begin_spill()
        self._add(grads)

    def _take(self) -> Gradients:
        grads: Gradients = [p.grad for p in self.params]
        self._clear_grads()
        return grads

    def _clear_grads(self) -> None:
        for p in self.params:
            p.grad = None

    def _begin_spill(self) -> None:
        self.spills += 1
        self._spilled = True
        if self._host is None:
            self._host = torch.zeros(self._offsets[-1])
        held, self._held = self._held, None
        if held is not None:
            self._add(held)

    def _host_sum(self) -> Tensor:
        if self._host is None:
            raise RuntimeError("nothing was moved to the host yet")
        return self._host

    def _add(self, grads: Gradients) -> None:
        """Add one part to the host sum."""
        for grad, first, last in zip(grads, self._offsets, self._offsets[1:], strict=False):
            if grad is not None:
                self._host_sum()[first:last] += grad.view(-1).cpu().float()

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        if self._spilled:
            flat[: end - start].copy_(self._host_sum()[start:end])
        elif self._held is not None:
            self._fill(flat, start, end, self._held)

    def reduce_scatter(self) -> None:
        """Sum what is waiting over ranks into ``master.grad``."""
        for index in self._reduce_order():
            start, end, padded = self._cuts[index]
            flat = self._staging(padded, end - start)
            self._fill_gradients(flat, start, end)
            self._grad[self._shard(index)].copy_(self._reduce(flat))
        self.master.grad = self._grad
        self._release()

    def _reduce_order(self) -> Sequence[int]:
        return range(len(self._cuts))

    def _reduce(self, flat: Tensor) -> Tensor:
        """Sum a padded bucket over ranks; returns this rank's piece."""
        if self.world == 1:
            return flat
        piece = torch.empty_like(flat[: len(flat) // self.world])
        if hasattr(dist, "reduce_scatter_single"):  # torch 2.13; the older name warns there
            dist.reduce_scatter_single(piece, flat)
        else:
            dist.reduce_scatter_tensor(piece, flat)
        return piece

    def _release(self) -> None:
        """Forget what was waiting; the host vector is kept, zeroed."""
        self._held = None
        self._spilled = False
        if self._host is not None:
            self._host.zero_()

    def discard(self) -> None:
        """Forget what is waiting, and what was reduced."""
        self._release()
        self._clear_grads()
        self.master.grad = None

    def grad_sq_norm(self) -> Tensor:
        """Squared norm of ``master.grad`` over all ranks, 0-dim."""
        return self._sum_over_ranks(self._local_sq_norm(self._reduced()))

    def _reduced(self) -> Tensor:
        if self.master.grad is None:
            raise RuntimeError("grad_sq_norm before reduce_scatter")
        return self.master.grad

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return grad.double().square().sum()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value

    # Weights

    def gather_params(self) -> None:
        """Put every rank's updated shard, rounded, into the weights."""
        shard = self._shard_to_send()
        for index in self._gather_order():
            start, end, _ = self._cuts[index]
            whole = self._gather(self._round(shard[self._shard(index)]))
            self._write_weights(whole, start, end)

    def _gather_order(self) -> Sequence[int]:
        return range(len(self._cuts))

    def _shard_to_send(self) -> Tensor:
        return self.master.detach()

    def _round(self, piece: Tensor) -> Tensor:
        return piece.to(self.params[0].dtype)

    def _gather(self, piece: Tensor) -> Tensor:
        """The padded bucket, from every rank's piece."""
        if self.world == 1:
            return piece
        whole = torch.empty(len(piece) * self.world, dtype=piece.dtype, device=piece.device)
        if hasattr(dist, "all_gather_single"):
            dist.all_gather_single(whole, piece)
        else:
            dist.all_gather_into_tensor(whole, piece)
        return whole

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        for p, first, last in zip(self.params, self._offsets, self._offsets[1:], strict=False):
            low, high = max(start, first), min(end, last)
            if low < high:
                p.detach().view(-1)[low - first : high - first].copy_(whole[low - start : high - start])

    def full_master(self) -> Tensor:
        """The whole fp32 vector, without padding, on every rank."""
        shard = self.master.detach()
        wholes = [self._gather(shard[self._shard(index)]) for index in range(len(self._cuts))]
        return torch.cat([whole[: end - start] for whole, (start, end, _) in zip(wholes, self._cuts, strict=True)])
