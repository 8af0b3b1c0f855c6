"""What a rank hands to its collectives, held against what it should hand over: whose fault a wrong sum is.

From a sum alone nobody can tell which rank's contribution was wrong, or that one of them swapped two buckets of equal
size (which no backend notices). Each rank knows its own contribution, though. It takes time, so it is only done when a
scenario that has failed is run once more. What is not recognised (another layout, other units, parts that are reduced
one by one) looks wrong on every rank alike, and then says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.oracles import contributions
from harness.scenario.model import Domain, Scenario, StepPlan
from harness.scenario.partition import Partition
from harness.verdict import Handed, Stage

# A sum of a rank's own parts in fp32, in whatever order, next to one in fp64: far above n u for the few parts there
# are, far below any mistake worth naming.
_RELATIVE = 2.0**-18
# A sum of squares in fp32 over a shard, in any order, may be off by n u; a wrong one is off by far more.
_NORM_RELATIVE = 2.0**-8

_SUMMING = frozenset({"reduce_scatter", "reduce_scatter_list", "all_reduce", "all_to_all"})


class Inspection:
    """Of one scenario on one rank.

    Attributes:
        found: What was handed over wrongly, in order.
    """

    def __init__(
        self, scenario: Scenario, partition: Partition, rank: int, gradient: Callable[[], Tensor | None]
    ) -> None:
        """``gradient``: gives the reduced gradient of this rank's shard."""
        self._gradient = gradient
        self.found: list[Handed] = []
        self._scenario = scenario
        self._partition = partition
        self._rank = rank
        self._plan: StepPlan | None = None
        self._next_bucket: int | None = 0
        self._own: NDArray[np.float64] = np.zeros(0)
        self._magnitude: NDArray[np.float64] = np.zeros(0)

    def begin(self, plan: StepPlan) -> None:
        """From here on collectives belong to this step."""
        self._plan = plan
        self._next_bucket = 0
        self._own = np.zeros(0)

    def called(self, stage: Stage, kind: str, contribution: object) -> None:
        """A collective is about to be called with this contribution."""
        if stage is Stage.REDUCE and kind in _SUMMING:
            self._reduces(contribution)
        elif stage is Stage.NORM and kind == "all_reduce":
            self._sums_norm(contribution)

    def _reduces(self, tensors: object) -> None:
        """In the reduce stage this should be the next bucket, padded with zeros."""
        if self._plan is None or self._next_bucket is None:
            return
        got = _flat(tensors)
        index = self._next_bucket
        if got is None or index >= len(self._partition.buckets) or got.size != self._partition.buckets[index].padded:
            self._next_bucket = None  # not this layout: what follows cannot be told either
            return
        self._next_bucket += 1
        wrong = self._first_difference(got, index)
        if wrong is None:
            return
        size = got.size
        instead = [
            other
            for other, bucket in enumerate(self._partition.buckets)
            if other != index and bucket.padded == size and self._first_difference(got, other) is None
        ]
        # Buckets without any gradient look all alike.
        swapped = instead[0] if instead and np.any(got) else None
        self._note(index, wrong, got, swapped)

    def _sums_norm(self, tensors: object) -> None:
        """In the norm stage this should be the square of this rank's shard."""
        got, gradient = _flat(tensors), self._gradient()
        if self._plan is None or got is None or got.size != 1 or gradient is None:
            return
        wanted = float((gradient.detach().double() ** 2).sum())
        if np.isfinite(wanted) and np.isfinite(got[0]) and abs(got[0] - wanted) <= _NORM_RELATIVE * wanted:
            return
        if not np.isfinite(wanted) and not np.isfinite(got[0]):
            return
        self.found.append(
            Handed(
                step=self._plan.index,
                stage=Stage.NORM,
                message=f"handed {float(got[0])!r} to the all-reduce of the norm, its own shard has {wanted!r}",
            )
        )

    def _note(self, index: int, position: int, got: NDArray[np.float64], swapped: int | None) -> None:
        if self._plan is None:
            return
        parameter, element = self._at(index, position)
        wanted = self._wanted(index)[0][position]
        if swapped is not None:
            message = f"handed over bucket {swapped} where bucket {index} was due"
        else:
            place = "its padding" if parameter is None else f"parameter {parameter}, element {element}"
            message = f"handed {float(got[position])!r} to the sum for {place}, its own gradient is {float(wanted)!r}"
        self.found.append(
            Handed(
                step=self._plan.index,
                stage=Stage.REDUCE,
                message=message,
                bucket=index,
                instead=swapped,
                parameter=parameter,
                element=element,
            )
        )

    def _first_difference(self, got: NDArray[np.float64], index: int) -> int | None:
        wanted, magnitude = self._wanted(index)
        tolerance = 0.0 if self._scenario.values.domain is not Domain.GENERAL else _RELATIVE * magnitude
        with np.errstate(invalid="ignore", over="ignore"):
            same = (got == wanted) | (np.abs(got - wanted) <= tolerance) | ~np.isfinite(wanted)
        different = np.flatnonzero(~same)
        return int(different[0]) if different.size else None

    def _wanted(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """A bucket of the sum of this rank's parts, padded with zeros, and the sum of their magnitudes."""
        if not self._own.size:
            self._own, self._magnitude = self._own_sum()
        bucket = self._partition.buckets[index]
        padding = np.zeros(bucket.padded - bucket.length)
        own = np.concatenate([self._own[bucket.start : bucket.end], padding])
        return own, np.concatenate([self._magnitude[bucket.start : bucket.end], padding])

    def _own_sum(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        total = np.zeros(self._scenario.numel)
        magnitude = np.zeros(self._scenario.numel)
        plan = self._plan
        start = 0
        for index, parameter in enumerate(self._scenario.parameters):
            for part in range(len(plan.parts) if plan is not None else 0):
                values = contributions.contribution(self._scenario, plan, self._rank, part, index)  # type: ignore[arg-type]
                if values is not None:
                    total[start : start + parameter.numel] += values
                    magnitude[start : start + parameter.numel] += np.abs(values)
            start += parameter.numel
        return total, magnitude

    def _at(self, index: int, position: int) -> tuple[str | None, int | None]:
        """The parameter and the element in it at a position of a bucket; None in its padding."""
        bucket = self._partition.buckets[index]
        flat = bucket.start + position
        if position >= bucket.length:
            return None, None
        for parameter in self._scenario.parameters:
            if flat < parameter.numel:
                return parameter.name, flat
            flat -= parameter.numel
        return None, None


def _flat(tensors: object) -> NDArray[np.float64] | None:
    """The elements of a tensor, or of those of a list end to end; None of anything else."""
    given = tensors if isinstance(tensors, Sequence) else [tensors]
    listed = [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    if not listed or len(listed) != len(given):
        return None
    with torch.no_grad():
        return np.concatenate([tensor.detach().reshape(-1).double().cpu().numpy() for tensor in listed])
