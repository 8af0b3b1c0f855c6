"""What a rank keeps of a scenario, so that it can say what it saw where the first difference is.

Of a small scenario (:data:`harness.oracles.compare.FEW`) only references to bytes that were compared anyway are kept,
and copies are made when something differs: observing costs nothing as long as all is right. Of a larger one what a
later symptom may need is copied at each step. Of more elements than :data:`MOST` nothing
is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.oracles.reference import UnshardedTrainer
from harness.scenario.partition import Partition
from harness.verdict import Observation, Quantity, Stage

MOST = 2**18
"""Elements of a scenario that is observed: about as many times 4 bytes are sent for each vector of a rank's."""

MOMENTS = (Quantity.EXP_AVG, Quantity.EXP_AVG_SQ, Quantity.MAX_EXP_AVG_SQ)
"""In the order of :func:`harness.oracles.reference.moment_names`; the last one with amsgrad alone."""

_BEFORE = "the previous step"
_START = "before the first step"
_UNCLIPPED = "before the clip"
_PREVIOUS_UNCLIPPED = "the previous step before its clip"


class Witness:
    """Of one rank in one scenario; to be told when something was compared that may show again later."""

    def __init__(self, partition: Partition, reference: UnshardedTrainer, master: bytes | None = None) -> None:
        """``master``: of the instance before this one."""
        self._partition = partition
        self._reference = reference
        self._last: dict[Quantity, bytes | None] = {Quantity.MASTER: master}
        self._masters: tuple[tuple[str, bytes], ...] = ()
        self._reduced: bytes | None = None
        self._previous: tuple[tuple[str, bytes], ...] = ()
        self._norms: dict[int, float] = {}
        self._previous_norms: dict[int, float] = {}

    @property
    def master(self) -> bytes | None:
        """The whole master as it should be since the last step; None of a large one."""
        return self._last[Quantity.MASTER]

    def start(self) -> None:
        """Something was built: what was held before says nothing any more."""
        self._last = {Quantity.MASTER: self._reference.flat_master(MOST)}
        self._masters = _known([(_START, self.master)])
        self._reduced, self._previous = None, ()
        self._norms, self._previous_norms = {}, {}

    def reduced(self) -> None:
        """The reference has this step's gradient."""
        self._reduced = self._reference.flat_gradient(MOST)
        self._norms = {}

    def normed(self, call: int, expected: float) -> None:
        """What is expected of a squared norm: 0 before, 1 after clipping."""
        self._norms[call] = expected

    def updating(self) -> None:
        """The reference is about to drop its gradient."""
        kept = [(_BEFORE, self._reference.flat_gradient(MOST)), (_PREVIOUS_UNCLIPPED, self._reduced)]
        self._previous = _known(kept)
        self._previous_norms, self._norms = self._norms, {}

    def stepped(self) -> None:
        """A step is over."""
        self._masters = (*_known([(_BEFORE, self.master)]), *self._masters[-1:])
        moments = zip(MOMENTS, self._reference.flat_moments(MOST) or (), strict=False)
        self._last = {Quantity.MASTER: self._reference.flat_master(MOST), **dict(moments)}

    def shard(self, quantity: Quantity, actual: Tensor, step: int | None, stage: Stage) -> Observation | None:
        """A vector with the padding of this rank's pieces differs."""
        reference = self._reference
        expected: bytes | None
        if quantity in (Quantity.GRADIENT, Quantity.CLIPPED):
            expected = reference.flat_gradient(MOST)
            before = list(self._previous)
            if quantity is Quantity.CLIPPED and self._reduced is not None:
                before.insert(0, (_UNCLIPPED, self._reduced))
        else:
            moments = reference.flat_moments(MOST) if quantity is not Quantity.MASTER else None
            if quantity is Quantity.MASTER:
                expected = reference.flat_master(MOST)
            else:
                expected = None if moments is None else moments[MOMENTS.index(quantity)]
            before = list(_known([(_BEFORE, self._last.get(quantity))]))
        return self._observation(quantity, step, stage, expected, lambda: _bytes([actual]), before)

    def whole(self, quantity: Quantity, actual: Sequence[Tensor], step: int | None, stage: Stage) -> Observation | None:
        """All elements of all parameters differ: the compute weights, or the whole master."""
        master = self._reference.flat_master(MOST)
        before = _known([(_BEFORE, self.master)])
        if quantity is Quantity.FULL_MASTER:
            before = self._masters
        elif stage is not Stage.GATHER:
            before = ()  # only a gather may change them: they are the previous step's
        expected = master
        if quantity is Quantity.WEIGHTS:
            expected = None if master is None else _bytes(self._reference.weights)
        found = self._observation(quantity, step, stage, expected, lambda: _bytes(actual), before)
        if found is None or quantity is not Quantity.WEIGHTS:
            return found
        return Observation(
            quantity=quantity,
            step=step,
            stage=stage,
            buckets=found.buckets,
            expected=found.expected,
            actual=found.actual,
            before=found.before,
            master=master,
        )

    def norm(self, call: int, observed: float, bound: float, step: int | None, stage: Stage) -> Observation | None:
        """A squared norm is not what it should be."""
        gradient = self._reference.flat_gradient(MOST)
        if gradient is None:
            return None
        before = [(_UNCLIPPED, self._norms[0])] if call and 0 in self._norms else []
        before += [(_BEFORE, value) for value in self._previous_norms.values()]
        return Observation(
            quantity=Quantity.NORM,
            step=step,
            stage=stage,
            buckets=self._buckets(),
            expected=gradient,
            norm=observed,
            bound=bound,
            before_norms=tuple(before),
        )

    def _observation(
        self,
        quantity: Quantity,
        step: int | None,
        stage: Stage,
        expected: bytes | None,
        actual: Callable[[], bytes],
        before: Sequence[tuple[str, bytes]],
    ) -> Observation | None:
        if expected is None:
            return None
        return Observation(
            quantity=quantity,
            step=step,
            stage=stage,
            buckets=self._buckets(),
            expected=expected,
            actual=actual(),
            before=tuple(before),
        )

    def _buckets(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((one.start, one.end, one.padded) for one in self._partition.buckets)


def _known(kept: Sequence[tuple[str, bytes | None]]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, value) for name, value in kept if value is not None)


def _bytes(tensors: Sequence[Tensor]) -> bytes:
    """The values as fp32, end to end. A copy: what numpy has seen of a tensor's memory cannot be resized any more."""
    flat = torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors])
    return flat.clone().numpy().tobytes()
