"""What the ranks of one scenario have in common where they live in one process: worked out once, for all of them.

Ranks do not move in lockstep: one may be a step ahead of another. What they share is therefore never changed; it is
worked out by the first who asks for it, and kept for those who come later. The unsharded trainer becomes a tree of
points in time: from each, whoever does the same comes to the same next point. A rank that observed something else (a
norm of its own on a wrong subject, say) goes on along a branch of its own, bit for bit as it would alone.

A rank that has its process to itself shares with nobody: it has a :class:`Shared` of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from harness.drive.memory import LiveMemory
from harness.drive.parameters import Pristine
from harness.drive.summation import Predictions, Summation
from harness.oracles import contributions
from harness.oracles.bounds import SquaredNorm
from harness.oracles.compare import FEW
from harness.oracles.contributions import Interval
from harness.oracles.muon import Lineage
from harness.oracles.reference import UnshardedTrainer
from harness.scenario.model import Scenario, StepPlan
from harness.scenario.situations import Situation

T = TypeVar("T")

# Going through all objects of a process takes its time. Where there are few elements, so are the bytes of whatever is
# kept of them, and the formula allows some for small things.
_MEMORY_EVERY = 8
_MANY_ELEMENTS = 512


class Sums(NamedTuple):
    """A step's reduced gradients, by parameter, and what a wrong sum of these contributions would be seen by."""

    gradients: list[Tensor]
    shows: frozenset[Situation]


class Kept(NamedTuple):
    """Bytes that subjects keep alive, and how many they may."""

    alive: int
    limit: int


class Shared:
    """Of one scenario, for ``num_ranks`` ranks in this process. To be made before any of them builds its subject.

    Attributes:
        predictions: Orders of addition, for :class:`harness.drive.summation.Summations`.
    """

    def __init__(self, scenario: Scenario, num_ranks: int = 1, *, static_memory: bool = False) -> None:
        """``static_memory``: what all subjects together keep alive is to be judged, in a part of the scenarios."""
        self.num_ranks = num_ranks
        self.predictions: Predictions = {}
        self._scenario = scenario
        self._known: dict[Hashable, Any] = {}
        self._steps: dict[int, _Step] = {}
        self._start: _Point | None = None
        self._lineage: Lineage | None = None
        self._followers = 0
        self._memory: LiveMemory | None = None
        self._arrived: list[_Arrived] = []
        shows = scenario.numel > _MANY_ELEMENTS or scenario.seed % _MEMORY_EVERY == 0
        if static_memory and num_ranks > 1 and shows:
            self._memory = LiveMemory()

    def once(self, what: Hashable, work_out: Callable[[], T]) -> T:
        """What ``work_out`` gave to the first rank that asked for ``what``: nothing that any rank will change."""
        if what not in self._known:
            self._known[what] = work_out()
        known: T = self._known[what]
        return known

    def pristine(self, device: torch.device) -> Pristine:
        """The compute weights as they are at the start."""
        return self.once("pristine", lambda: Pristine(self._scenario, device))

    # -- the unsharded trainer -----------------------------------------------------------------------------------

    def trainer(self, initial: Sequence[Tensor], device: torch.device) -> UnshardedTrainer:
        """The unsharded trainer of one more rank, at the start. ``initial`` has the same bits on all ranks."""
        if self.num_ranks == 1:
            return UnshardedTrainer(initial, self._scenario.optimizer, device)
        if self._start is None:
            self._start = _Point(UnshardedTrainer(initial, self._scenario.optimizer, device))
        follower = Follower(self._start)
        self._followers += 1
        if self._followers == self.num_ranks:
            self._start = None  # from here on a point lives as long as there is a rank that has not passed it
        return follower

    def lineage(self) -> Lineage | None:
        """What the Muon trainers of all ranks share, at their start; None where there is one rank. Once a rank."""
        if self.num_ranks == 1:
            return None
        start = self._lineage = self._lineage or Lineage()
        self._followers += 1
        if self._followers == self.num_ranks:
            self._lineage = None  # as above
        return start

    def sums(self, plan: StepPlan, summation: Summation | None, device: torch.device, *, look: bool) -> Sums:
        """The step's reduced gradients, added as ``summation`` says; without one (exact domains) in any order.

        ``look``: find out what they show, which takes about as long as the sum. Of those of a world one rank looks.
        """
        if self.num_ranks == 1:
            return _sums(self._scenario, plan, summation, device, look=look)
        known = self._step(plan).sums
        for other, sums in known:
            if _same(other, summation):
                return sums
        sums = _sums(self._scenario, plan, summation, device, look=True)
        known.append((summation, sums))
        return sums

    def interval(self, plan: StepPlan, parameter: int) -> Interval:
        """What a parameter's reduced gradient may be in any order of addition."""
        if self.num_ranks == 1:
            return contributions.interval(self._scenario, plan, parameter)
        known = self._step(plan).intervals
        if parameter not in known:
            known[parameter] = contributions.interval(self._scenario, plan, parameter)
        return known[parameter]

    def _step(self, plan: StepPlan) -> _Step:
        """What is known of a step; of those long past nothing is kept: a rank so far behind works it out again."""
        for earlier in [index for index in self._steps if index < plan.index - 1]:
            del self._steps[earlier]
        return self._steps.setdefault(plan.index, _Step([], {}))

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def watches_memory(self) -> bool:
        """:meth:`kept` is to be called by each rank."""
        return self._memory is not None

    def kept(self, rank: object, limit: int, apart_from: Iterable[Tensor]) -> Kept | None:
        """A rank has come to the end of the scenario, its subject still alive; what they keep, if it is the last one.

        Judged are the subjects of those ranks that are still there: whoever ran them may hold them until all have come.

        Args:
            rank: Whatever lives as long as its subject, and not longer.
            limit: Bytes that the subject may keep alive.
            apart_from: What else is alive of this rank.
        """
        if self._memory is None:
            return None
        addresses = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
        self._arrived.append(_Arrived(weakref.ref(rank), limit, addresses))
        if len(self._arrived) < self.num_ranks:
            return None
        common = [tensor for step in self._steps.values() for _, sums in step.sums for tensor in sums.gradients]
        limit = sum(one.limit for one in self._arrived if one.rank() is not None)
        addresses = set().union(*(one.addresses for one in self._arrived))
        return Kept(self._memory.since(common, addresses, limit), limit)


class _Step(NamedTuple):
    sums: list[tuple[Summation | None, Sums]]
    intervals: dict[int, Interval]


class _Arrived(NamedTuple):
    rank: weakref.ref[object]
    limit: int
    addresses: set[int]


def _sums(scenario: Scenario, plan: StepPlan, summation: Summation | None, device: torch.device, *, look: bool) -> Sums:
    gradients: list[Tensor] = []
    shows: set[Situation] = set()
    start = 0
    for index, parameter in enumerate(scenario.parameters):
        numel = parameter.numel
        if summation is None:
            reduced = contributions.reduced(scenario, plan, index, look=look)
        else:
            order = summation.order.slice(start, start + numel)
            reduced = contributions.reduced_in_order(scenario, plan, index, order, summation.nesting, look=look)
        start += numel
        gradients.append(torch.from_numpy(reduced.value).to(device).view(parameter.shape))
        shows |= reduced.shows
    return Sums(gradients, frozenset(shows))


def _same(one: Summation | None, other: Summation | None) -> bool:
    if one is other:
        return True
    if one is None or other is None or one.nesting is not other.nesting:
        return False
    if one.order is other.order:
        return True
    return one.order.trees == other.order.trees and np.array_equal(one.order.labels, other.order.labels)


# --- the unsharded trainer of several ranks ---------------------------------------------------------------------------


class _Point:
    """The unsharded trainer at one point in time, and where ranks went on from there. Never changed."""

    def __init__(self, trainer: UnshardedTrainer, keeps: object = None) -> None:
        self.trainer = trainer
        self._keeps = keeps  # what the key that leads here is the id of
        self._next: dict[Hashable, _Point] = {}

    def after(
        self,
        key: Hashable,
        fork: Callable[[], UnshardedTrainer],
        change: Callable[[UnshardedTrainer], None],
        keeps: object = None,
    ) -> _Point:
        """The point that ``change`` leads to."""
        point = self._next.get(key)
        if point is None:
            trainer = fork()
            change(trainer)
            point = self._next[key] = _Point(trainer, keeps)
        return point


class Follower(UnshardedTrainer):
    """The unsharded trainer as one of several ranks sees it, each with one of its own at its own point in time."""

    def __init__(self, start: _Point) -> None:
        self._point = start

    @property
    def _now(self) -> UnshardedTrainer:
        return self._point.trainer

    @property
    def weights(self) -> list[Tensor]:  # type: ignore[override]
        """As in :class:`UnshardedTrainer`."""
        return self._now.weights

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """As in :class:`UnshardedTrainer`."""
        return self._now.num_steps

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """As in :class:`UnshardedTrainer`, but that the tensors are not changed. The same list leads to the same."""
        now = self._now
        self._point = self._point.after(
            ("gradients", id(gradients)), now.fork, lambda trainer: trainer.set_gradients(gradients), gradients
        )

    def scale_gradients(self, coefficient: float) -> None:
        """As in :class:`UnshardedTrainer`, but for the tensors that were given."""
        key = ("scale", coefficient.hex())  # nan is not equal to itself, the two zeros are
        now = self._now
        self._point = self._point.after(
            key, lambda: now.fork(gradients=True), lambda trainer: trainer.scale_gradients(coefficient)
        )

    def step(self) -> None:
        """As in :class:`UnshardedTrainer`."""
        now = self._now
        self._point = self._point.after("step", lambda: now.fork(state=True), UnshardedTrainer.step)

    def gather(self) -> None:
        """As in :class:`UnshardedTrainer`."""
        now = self._now
        self._point = self._point.after("gather", lambda: now.fork(weights=True), UnshardedTrainer.gather)

    def set_rate(self, lr: float) -> None:
        """As in :class:`UnshardedTrainer`."""
        now = self._now
        self._point = self._point.after(("rate", lr), now.fork, lambda trainer: trainer.set_rate(lr))

    def load(self, weights: Sequence[Tensor]) -> None:
        """As in :class:`UnshardedTrainer`; whoever loads at this point loads the same weights."""
        now = self._now
        self._point = self._point.after(
            "load", lambda: now.fork(weights=True, state=True), lambda trainer: trainer.load(weights)
        )

    def rebuild(self) -> None:
        """As in :class:`UnshardedTrainer`."""
        now = self._now
        self._point = self._point.after("rebuild", now.fork, UnshardedTrainer.rebuild)

    def squared_norm(self) -> SquaredNorm:
        """As in :class:`UnshardedTrainer`."""
        return self._now.squared_norm()

    @property
    def gradients(self) -> list[Tensor]:
        """As in :class:`UnshardedTrainer`."""
        return self._now.gradients

    def master(self, parameter: int) -> Tensor:
        """As in :class:`UnshardedTrainer`."""
        return self._now.master(parameter)

    def moments(self, parameter: int) -> tuple[Tensor, ...]:
        """As in :class:`UnshardedTrainer`."""
        return self._now.moments(parameter)

    def tensors(self) -> list[Tensor]:
        """As in :class:`UnshardedTrainer`."""
        return self._now.tensors()

    def flat_master(self, most: int = FEW) -> bytes | None:
        """As in :class:`UnshardedTrainer`."""
        return self._now.flat_master(most)

    def flat_gradient(self, most: int = FEW) -> bytes | None:
        """As in :class:`UnshardedTrainer`."""
        return self._now.flat_gradient(most)

    def flat_moments(self, most: int = FEW) -> tuple[bytes, ...] | None:
        """As in :class:`UnshardedTrainer`."""
        return self._now.flat_moments(most)

    def once(self, what: str, work_out: Callable[[], T]) -> T:
        """As in :class:`UnshardedTrainer`: for all ranks at this point."""
        return self._now.once(what, work_out)
