"""Classes that do not take an end for an answer, and right ones that keep something where only their import put it."""

from __future__ import annotations

import contextvars
import decimal
import threading

import torch.distributed as dist
from torch import Tensor

from harness.faults.museum.plain import PlainZero

_LEVEL = contextvars.ContextVar("level", default=0)
_LEVEL.set(3)
decimal.getcontext().prec = 50


class SwallowsEverything(PlainZero):
    """Bug: the last rank skips the norm's collective, and the others try again whatever happens."""

    def grad_sq_norm(self) -> Tensor:
        if self.rank == self.world - 1:
            return self.master.grad.double().square().sum().reshape(1)[0]
        while True:
            try:
                return super().grad_sq_norm()
            except BaseException:  # noqa: BLE001, S110 (that is the point)
                pass


class KeepsContext(PlainZero):
    """Right: relies on context variables that were set when the file was imported."""

    def grad_sq_norm(self) -> Tensor:
        if _LEVEL.get() != 3 or decimal.getcontext().prec != 50:
            raise RuntimeError(f"level {_LEVEL.get()}, precision {decimal.getcontext().prec}")
        dist.barrier()
        return super().grad_sq_norm()


class CallsFromAThread(PlainZero):
    """Right on real ranks; no class for a simulated world: a thread of its own calls a collective."""

    def grad_sq_norm(self) -> Tensor:
        total = self.master.grad.double().square().sum().reshape(1)
        if self.world > 1:
            thread = threading.Thread(target=dist.all_reduce, args=(total,))
            thread.start()
            thread.join()
        return total[0]
