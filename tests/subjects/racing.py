"""Classes that use a buffer of an asynchronous collective before its ``wait()``, and ones that do it as it should be.

gloo hides most of this: it has read an input, or not yet written an output, by the time it is used. A simulated world
tells each of them (``harness/sim``).
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.controls import OverlapsCollectives
from harness.faults.museum.plain import PlainZero


class ReusesInputBeforeWait(PlainZero):
    """Bug: the last rank clears the staging buffer, for the next bucket, while its reduction is under way."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        work = dist.reduce_scatter_tensor(out, flat, async_op=True)
        if self.rank < self.world - 1:
            work.wait()
        flat.add_(1.0)
        work.wait()
        return out


class WritesOutputBeforeWait(PlainZero):
    """Bug: the last rank clears the output buffer after the collective was started, where it should have before."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        work = dist.reduce_scatter_tensor(out, flat, async_op=True)
        if self.rank == self.world - 1:
            out.zero_()
        work.wait()
        return out


class PeeksBeforeWait(PlainZero):
    """Bug: the last rank looks at the reduction before it waits for it, to warn of an overflow; nothing comes of it."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        work = dist.reduce_scatter_tensor(out, flat, async_op=True)
        if self.rank == self.world - 1:
            self.overflowed = bool((out > 1e38).any())
        work.wait()
        return out


class NeverWaits(PlainZero):
    """Bug: the last rank takes the returned work for a formality."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        work = dist.reduce_scatter_tensor(out, flat, async_op=True)
        if self.rank < self.world - 1:
            work.wait()
        return out


class ReadsThroughNumpyBeforeWait(PlainZero):
    """Bug: the last rank reads the output before it waits for it, where no operation of torch's is seen."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        seen = out.numpy()
        work = dist.reduce_scatter_tensor(out, flat, async_op=True)
        if self.rank < self.world - 1:
            work.wait()
        early = torch.from_numpy(seen.copy())
        work.wait()
        return early


class GivesOutputOtherMemory(PlainZero):
    """Bug: the last rank gives the output other memory while the collective is under way."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        work = dist.reduce_scatter_tensor(out, flat, async_op=True)
        if self.rank == self.world - 1:
            out.data = torch.zeros_like(out)
        work.wait()
        return out


class WaitsInAThread(PlainZero):
    """Right on real ranks; a simulated world cannot have it, and says so though nobody looks after the thread."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        out = torch.empty(len(flat) // self.world)
        thread = threading.Thread(target=dist.reduce_scatter_tensor(out, flat, async_op=True).wait)
        thread.start()
        thread.join()
        return out


class PreparesViewsBeforeWait(OverlapsCollectives):
    """Right: everything is launched first, views of the outputs are made and inputs are read while it is under way."""

    def gather_params(self) -> None:
        if self.world == 1:
            super().gather_params()
            return
        launched = []
        for index, (start, end, padded) in enumerate(self._cuts):
            whole = torch.empty(padded, dtype=torch.bfloat16)
            own = whole[self._piece(padded)]  # gathered in place: this rank's piece lies in the output
            own.copy_(self.master.detach()[self._shard(index)])
            work = dist.all_gather_into_tensor(whole, own, async_op=True)
            sent = float(own.float().sum())
            launched.append((work, whole[: end - start], sent, start, end))
        for work, whole, _, start, end in launched:
            work.wait()
            self._write_weights(whole, start, end)


class PollsUntilDone(PlainZero):
    """Right: asks until the work says that it is complete (as gloo does of an all-reduce, but not of all others)."""

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return super()._reduce(flat)
        work = dist.all_reduce(flat, async_op=True)
        while not work.is_completed():
            pass
        return flat[self._piece(len(flat))].clone()
