"""Classes that add contributions as a backend may that promises no order: all gather, and each adds for itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from harness.faults.museum.plain import PlainZero


class _Adds(PlainZero):
    """Gathers the ranks' pieces; ``_total`` adds them."""

    _calls = 0

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        self._calls += 1
        return self._total(torch.stack(received.chunk(self.world)))

    def _total(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


class AnotherOrderEachCall(_Adds):
    """Right: adds around a ring that begins one rank further at each call."""

    def _total(self, rows: Tensor) -> Tensor:
        return _in_turn(rows.roll(self._calls, 0))


class AnotherOrderEachElement(_Adds):
    """Right: begins at another rank for each element, and for the same element at another one at each call."""

    def _total(self, rows: Tensor) -> Tensor:
        places = torch.arange(rows.shape[1])
        first = (places * 7 + self._calls) % self.world
        ranks = (first + torch.arange(self.world)[:, None]) % self.world
        return _in_turn(rows.gather(0, ranks))


class WrongLastBitInAnyOrder(AnotherOrderEachElement):
    """Bug: the lowest bit of the first element. First: gradient or spill at reduce."""

    def _total(self, rows: Tensor) -> Tensor:
        total = super()._total(rows)
        total[:1].view(torch.int32).bitwise_xor_(1)
        return total


class LosesARankInAnyOrder(AnotherOrderEachElement):
    """Bug: leaves out the last rank. First: gradient or spill at reduce."""

    def _total(self, rows: Tensor) -> Tensor:
        rows[-1] = 0
        return super()._total(rows)


def _in_turn(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
