"""Broken classes whose bug needs several conditions at once, so that few scenarios show it."""

from __future__ import annotations

from torch import Tensor

from harness.faults.museum.plain import PlainZero


class LosesTheRestAfterDiscard(PlainZero):
    """Bug: what a parameter has in a later bucket is left out of the first step that spills after a discard.

    Trigger, all in one scenario: world 3 or more; a parameter that goes on in a later bucket; a step that spills, with
    a discard before it and no other reduced step in between. First: gradient/spill at reduce.
    """

    _discarded = False

    def discard(self) -> None:
        super().discard()
        self._discarded = True

    def _fill_gradients(self, flat: Tensor, start: int, end: int) -> None:
        super()._fill_gradients(flat, start, end)
        if self.world < 3 or not self._spilled or not self._discarded:
            return
        for first, last in zip(self._offsets, self._offsets[1:], strict=False):
            if first < start < last:
                flat[: min(last, end) - start].zero_()

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        self._discarded = False
