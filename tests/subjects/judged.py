"""Broken classes that were written from a list of real bugs by someone who had not seen the hypotheses.

``symptom_table.py`` says which symptom each has, or that it has none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain import Gradients, PlainZero

# --- accumulation


class SpillStartsAtZero(PlainZero):
    """What was held is lost when the spill begins."""

    def _begin_spill(self) -> None:
        self._held = None
        super()._begin_spill()


class HalfWeightLaterParts(PlainZero):
    """A part that is added to others counts half."""

    def _add(self, grads: Gradients) -> None:
        if self._host_sum().any():
            grads = [None if grad is None else grad / 2 for grad in grads]
        super()._add(grads)


class CompactsGradients(PlainZero):
    """Held gradients are laid out one after another, with no room for one that is None."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        if self._spilled or self._held is None:
            return super()._fill_gradients(flat, start, end)
        there = torch.cat([grad.float().view(-1) for grad in self._held if grad is not None])
        whole = torch.zeros(self._offsets[-1])
        whole[: len(there)] = there
        flat[: end - start] = whole[start:end]
        return None


# --- reduction


class AllReducesFirst(PlainZero):
    """Reduces what has been reduced."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(flat)
        return super()._reduce(flat)


class OwnTwice(PlainZero):
    """Each rank adds its own piece to what was reduced."""

    def _reduce(self, flat: Tensor) -> Tensor:
        own = flat[self._piece(len(flat))].clone()
        return super()._reduce(flat) + own if self.world > 1 else flat


class MaxForSum(PlainZero):
    """The largest contribution in place of the sum."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return flat[self._piece(len(flat))].clone()


class FactorTwo(PlainZero):
    """Twice the sum, whatever the world and the parts."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) * 2


class FactorWorldSquared(PlainZero):
    """W times W times the sum."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) * self.world**2


class FactorRankPlusOne(PlainZero):
    """Each rank's contribution is weighted by its number."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat * (self.rank + 1))


class SumToFp16(PlainZero):
    """The sum goes through fp16."""

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat).half().float()


class SumTruncated(PlainZero):
    """The sum is cut to bf16."""

    def _reduce(self, flat: Tensor) -> Tensor:
        total = super()._reduce(flat).contiguous()
        return torch.where(total.isfinite(), (total.view(torch.int32) & -65536).view(torch.float32), total)


class InfSaturates(PlainZero):
    """What overflows is the largest finite value."""

    def _reduce(self, flat: Tensor) -> Tensor:
        most = torch.finfo(torch.float32).max
        return super()._reduce(flat).clamp(-most, most)


class BufferOverwritten(PlainZero):
    """A bucket's buffer has the next bucket's values in it when it is reduced, if that is equally long."""

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        if (end, 2 * end - start) in [(first, last) for first, last, _ in self._cuts]:
            start, end = end, 2 * end - start
        super()._fill_gradients(flat, start, end)


# --- norm


class NormOfFirstBucket(PlainZero):
    """Only the first bucket is in it."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return super()._local_sq_norm(grad[self._shard(0)])


# --- weights


class LastElementNotWritten(PlainZero):
    """The last element of each parameter stays as it was."""

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        old = [param.detach().view(-1)[-1:].clone() for param in self.params]
        super()._write_weights(whole, start, end)
        for param, last in zip(self.params, old, strict=True):
            param.detach().view(-1)[-1:] = last


class FirstChunkTwice(PlainZero):
    """Rank 0's piece stands in rank 1's place too."""

    def _gather(self, piece: Tensor) -> Tensor:
        whole = super()._gather(piece)
        if self.world > 1 and piece.dtype is not torch.float32:
            whole[len(piece) : 2 * len(piece)] = whole[: len(piece)]
        return whole


class WritesOneLate(PlainZero):
    """All buckets but the first are written one element late."""

    def _write_weights(self, whole: Tensor, start: int, end: int) -> None:
        super()._write_weights(whole.roll(-1) if start else whole, start, end)


class RoundsAwayFromZero(PlainZero):
    """Rounds to the larger magnitude."""

    def _round(self, piece: Tensor) -> Tensor:
        bits = piece.contiguous().view(torch.int32)
        return ((bits + 0xFFFF) & -65536).view(torch.float32).bfloat16()


class ReversedParameters(PlainZero):
    """The gathered vector is given out to the parameters from the last to the first."""

    def gather_params(self) -> None:
        super().gather_params()
        whole = torch.zeros(self._offsets[-1])
        self._fill(whole, 0, len(whole), self.params)
        at = 0
        for param in reversed(self.params):
            param.detach().view(-1).copy_(whole[at : at + param.numel()])
            at += param.numel()


class MasterShifted(PlainZero):
    """The master starts from weights one element further."""

    def _fill(self, flat: Tensor, start: int, end: int, sources: Gradients) -> None:  # type: ignore[override]
        super()._fill(flat, start, end, sources)
        if all(one is two for one, two in zip(sources, self.params, strict=False)):
            whole = torch.zeros(self._offsets[-1] + 1)
            super()._fill(whole, 0, self._offsets[-1], sources)
            flat[: end - start] = whole[start + 1 : end + 1]
