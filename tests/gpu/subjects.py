"""Subjects that show something on GPUs alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from zero2core import ZeroMaster

# More cycles than any GPU makes in the time that a test has.
FOR_EVER = 2**40


class OnSideStream(ZeroMaster):
    """Right: all it does is queued on a stream of its own, which waits for the caller's and is waited for by it."""

    def _aside(self) -> torch.cuda.Stream:
        stream = self.__dict__.setdefault("_stream", torch.cuda.Stream(self.device))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream

    def _back(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def collect(self, more: bool) -> None:
        with torch.cuda.stream(self._aside()):
            super().collect(more)
        self._back()

    def reduce_scatter(self) -> None:
        with torch.cuda.stream(self._aside()):
            super().reduce_scatter()
        self._back()

    def grad_sq_norm(self) -> Tensor:
        with torch.cuda.stream(self._aside()):
            norm = super().grad_sq_norm()
        self._back()
        return norm

    def gather_params(self) -> None:
        with torch.cuda.stream(self._aside()):
            super().gather_params()
        self._back()


class ReadsBeforeItIsThere(OnSideStream):
    """Bug: the caller's stream does not wait for the reduced gradient; the GPU is slow. First: gradient at reduce."""

    def reduce_scatter(self) -> None:
        self.grad_buf.fill_(torch.nan)
        with torch.cuda.stream(self._aside()):
            torch.cuda._sleep(2**28)
            ZeroMaster.reduce_scatter(self)


class NeverEnds(ZeroMaster):
    """Bug: the last rank queues what the GPU is never done with, and waits for it. First: progress at norm."""

    def grad_sq_norm(self) -> Tensor:
        if self.rank == self.world - 1:
            for _ in range(8):
                torch.cuda._sleep(FOR_EVER)
            torch.cuda.synchronize(self.device)
        return super().grad_sq_norm()


class WaitsForNobody(ZeroMaster):
    """Bug: the last rank asks for one sum more than the others, and waits for them. First: progress or traffic."""

    def gather_params(self) -> None:
        super().gather_params()
        if self.rank == self.world - 1:
            dist.all_reduce(torch.ones(1, device=self.device))
            torch.cuda.synchronize(self.device)


class WrongLastBit(ZeroMaster):
    """Bug: the lowest bit of the first element that a rank owns. First: gradient, spill or ownership at reduce."""

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self.grad_buf[:1].view(torch.int32).bitwise_xor_(1)
