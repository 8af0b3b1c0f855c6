"""In which order a subject adds gradients: predicted from its collectives, and found out by probing where that fails.

Everything here that is collective runs outside the log of collectives.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.drive.parameters import ComputeWeights
from harness.drive.shard import ShardMap
from harness.launch.rank import RankContext
from harness.oracles import probing
from harness.oracles.contributions import Nesting
from harness.oracles.order import Order, Rule, gloo
from harness.oracles.prediction import Call, predict, summing_calls
from harness.scenario.model import Scenario, StepPlan
from harness.scenario.partition import Partition
from harness.verdict import Collective, Stage

# Above this many elements no separate instance is built: it would take as much memory as the subject itself.
MAX_PROBED = 2**21
# Nor for more ranks: their pairs are 496, and each is a step of its own.
MAX_PROBED_WORLD = 32


class Summation(NamedTuple):
    """How contributions are added: ``order`` of the ranks for each flat element, and how parts and ranks nest."""

    order: Order
    nesting: Nesting


Predictions = dict[tuple[frozenset[Call], Partition], Order]
"""By the summing calls of a step, and the layout."""


class Summations:
    """Candidates for the order in which one subject adds, most likely first. One for each scenario.

    ``rule``: how the backend adds. ``predictions``: what was predicted already, for other ranks of this scenario; is
    added to.
    """

    def __init__(
        self, scenario: Scenario, shard: ShardMap, rule: Rule = gloo, predictions: Predictions | None = None
    ) -> None:
        self._scenario = scenario
        self._shard = shard
        self._rule = rule
        self._predictions: Predictions = {} if predictions is None else predictions
        self._revealed: dict[tuple[bool, ...], Order | None] = {}
        self._explained: Summation | None = None

    def candidates(
        self, plan: StepPlan, calls: frozenset[Call], probe: Callable[[], Order | None]
    ) -> Iterator[Summation]:
        """What may explain a step in which the subject made these calls.

        ``probe`` finds out an order in such a step; it is asked last, and once for each way of announcing parts.
        """
        if self._explained is not None:
            yield self._explained
        predicted = self.predicted(calls).order
        nestings = list(Nesting) if len(plan.parts) > 1 else [Nesting.PARTS_INSIDE]
        for nesting in nestings:
            yield Summation(predicted, nesting)
        if self._scenario.world < 3:
            return  # a sum of two commutes
        revealed = self._reveal(plan, probe)
        if revealed is not None and revealed.signature != predicted.signature:
            for nesting in nestings:
                yield Summation(revealed, nesting)

    def predicted(self, calls: frozenset[Call]) -> Summation:
        """What the calls alone say: each rank adds its parts, then the ranks are added."""
        key = calls, self._shard.partition
        order = self._predictions.get(key)
        if order is None:
            order = self._predictions[key] = predict(calls, self._shard.partition, self._rule)
        return Summation(order, Nesting.PARTS_INSIDE)

    def explained_by(self, summation: Summation) -> None:
        """This is tried first from now on."""
        self._explained = summation

    def _reveal(self, plan: StepPlan, probe: Callable[[], Order | None]) -> Order | None:
        way = tuple(part.more for part in plan.parts)  # held and spilled gradients may be added in different ways
        if way not in self._revealed:
            affordable = self._scenario.numel <= MAX_PROBED and self._scenario.world <= MAX_PROBED_WORLD
            self._revealed[way] = probe() if affordable else None
        return self._revealed[way]


def calls_of_step(collectives: tuple[Collective, ...], step: int | None, world: int) -> frozenset[Call]:
    """The summing calls that a rank logged since the step began; a construction before it is none of it."""
    of_step = []
    for call in reversed(collectives):
        if call.step != step or call.stage == Stage.BUILD.value:
            break
        of_step.append(call)
    return summing_calls(of_step, world)


def fingerprint(calls: frozenset[Call]) -> int:
    """Equal for equal calls, on all ranks."""
    return zlib.crc32(repr(sorted(calls)).encode())


class Prober:
    """Probes a separate instance of the subject, built once. Collective."""

    def __init__(
        self,
        context: RankContext,
        build: Callable[[list[torch.nn.Parameter]], Any],
        scenario: Scenario,
        shard: ShardMap,
    ) -> None:
        self._context = context
        self._build = build
        self._scenario = scenario
        self._shard = shard
        self._device = torch.device(context.device)
        self._instance: Any = None
        self._parameters: list[torch.nn.Parameter] = []

    def __call__(self, plan: StepPlan) -> Order | None:
        """The order in which it adds the ranks' first parts in such a step; None when no fixed tree explains it.

        Raises:
            Exception: whatever the subject raises for these gradients, which are as good as any.
        """
        world = self._scenario.world
        with self._context.collectives.paused():
            first = self._instance is None
            if not self._built():
                return None
            if first:
                self._reduced(plan, None)  # some do their first step in a way of its own
            shards = [self._reduced(plan, pair) for pair in probing.pairs(world)]
            own = torch.stack(shards)
            gathered = [torch.empty_like(own) for _ in range(world)]
            torch.distributed.all_gather(gathered, own)
        ones = np.concatenate([np.full(each.numel(), _scale(each).one, np.float32) for each in self._parameters])
        sums = {}
        for number, pair in enumerate(probing.pairs(world)):
            whole = self._shard.flat([of_rank[number] for of_rank in gathered])
            sums[pair] = whole.cpu().numpy() / ones
        return probing.reveal(sums, world)

    def forget(self) -> None:
        """Let go of the instance, if there is one, so that what it keeps alive is not taken for the subject's."""
        if self._instance is not None:
            self._instance, self._parameters = None, []
            gc.collect()

    def _built(self) -> bool:
        """Whether there is an instance on every rank: some classes allow one in a process."""
        if self._instance is None:
            self._parameters = ComputeWeights(self._scenario, self._device).parameters
            try:
                self._instance = self._build(list(self._parameters))
            except BaseException:  # noqa: BLE001 (said on all ranks: there is no order to find then)
                self._instance = False
        usable = torch.tensor([int(self._usable())], device=self._device)
        torch.distributed.all_reduce(usable, torch.distributed.ReduceOp.MIN)
        return bool(usable.item())

    def _usable(self) -> bool:
        master = getattr(self._instance, "master", None)
        return isinstance(master, Tensor) and master.numel() == self._shard.partition.shard_len

    def _reduced(self, plan: StepPlan, pair: probing.Pair | None) -> Tensor:
        """This rank's shard of a sum to which its first part contributes a probe, or ones, the others zeros."""
        for number, part in enumerate(plan.parts):
            for parameter in self._parameters:
                scale = _scale(parameter)
                value = scale.one if pair is None else probing.probe(pair, self._context.rank, scale)
                parameter.grad = torch.full_like(parameter, 0.0 if number else value)
            self._instance.collect(part.more)
        self._instance.reduce_scatter()
        reduced: Tensor = self._instance.master.grad.detach().to(torch.float32).reshape(-1)
        if reduced.numel() != self._shard.partition.shard_len:
            raise ValueError(f"master.grad has {reduced.numel()} elements")
        return reduced.clone()


def _scale(parameter: Tensor) -> probing.Scale:
    """What gradients of its dtype can hold."""
    return probing.HALF if parameter.dtype == torch.float16 else probing.WIDE
