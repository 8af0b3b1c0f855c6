"""What a rank hands to its collectives, held against what it should hand over: whose fault a wrong result is.

From a sum alone nobody can tell which rank's contribution was wrong, or that one of them swapped two buckets of equal
size (which no backend notices). Each rank knows its own contribution, though. It takes time, so it is only done when a
scenario that has failed is run once more. What is not recognised (another layout, other units, parts that are reduced
one by one) is not judged: a rank with zeros, or with one part, would look right in any form, and the others wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.oracles import contributions
from harness.oracles.bounds import FP32_MAX
from harness.scenario.model import Domain, Scenario, StepPlan
from harness.scenario.partition import Partition
from harness.verdict import Handed, Stage

# A sum of a rank's own parts in fp32, in whatever order, next to one in fp64: far above n u for the few parts there
# are, far below any mistake worth naming.
_RELATIVE = 2.0**-18
# A sum of squares in fp32 over a shard, in any order, may be off by n u; a wrong one is off by far more.
_NORM_RELATIVE = 2.0**-8

_SUMMING = frozenset({"reduce_scatter", "reduce_scatter_list", "all_reduce", "all_to_all"})

_Values = NDArray[np.float64]


class _Given(NamedTuple):
    """What a rank contributes to a collective: all its elements, and their dtype."""

    values: _Values
    dtype: torch.dtype


class Inspection:
    """Of one scenario on one rank.

    Args:
        scenario: What is run.
        partition: The subject's layout.
        rank: This one.
        gradient: Gives the reduced gradient of this rank's shard, as the subject holds it.
        masters: Gives the reference's master weights, one tensor a parameter.

    Attributes:
        found: What was handed over wrongly, in order.
        num_compared: How many contributions to reductions were as they should be; 0 if any was not recognised.
    """

    def __init__(
        self,
        scenario: Scenario,
        partition: Partition,
        rank: int,
        gradient: Callable[[], Tensor | None],
        masters: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.found: list[Handed] = []
        self._num_equal = 0
        self._unrecognised = False
        self._scenario = scenario
        self._partition = partition
        self._rank = rank
        self._gradient = gradient
        self._masters = masters
        self._plan: StepPlan | None = None
        self._next: dict[Stage, int | None] = {}  # the bucket that is due; None: this is not the layout
        self._parts: _Values | None = None

    @property
    def num_compared(self) -> int:
        """See above."""
        return 0 if self._unrecognised else self._num_equal

    def begin(self, plan: StepPlan) -> None:
        """From here on collectives belong to this step."""
        self._plan = plan
        self._next = {Stage.REDUCE: 0, Stage.GATHER: 0}
        self._parts = None

    def called(self, stage: Stage, kind: str, contribution: object) -> None:
        """A collective is about to be called with this contribution: a tensor or a list of them."""
        given = _given(contribution)
        if self._plan is None or given is None:
            return
        if stage is Stage.REDUCE and kind in _SUMMING:
            self._bucket(self._plan, stage, given, self._due_in_sum)
        elif stage is Stage.GATHER and kind == "all_gather":
            self._bucket(self._plan, stage, given, self._due_in_gather)
        elif stage is Stage.NORM and kind == "all_reduce" and given.values.size == 1:
            self._norm(self._plan, float(given.values[0]))

    def _bucket(
        self,
        plan: StepPlan,
        stage: Stage,
        given: _Given,
        due: Callable[[int, torch.dtype], tuple[_Values, _Values, int]],
    ) -> None:
        """Compare with what of the next bucket is due: values, tolerances, and where in the bucket they begin."""
        index = self._next[stage]
        if index is None:
            return
        buckets = self._partition.buckets
        if index >= len(buckets) or due(index, given.dtype)[0].size != given.values.size:
            self._next[stage] = None  # what follows cannot be told either
            self._unrecognised |= stage is Stage.REDUCE
            return
        self._next[stage] = index + 1
        wanted, tolerance, offset = due(index, given.dtype)
        position = _first_difference(given.values, wanted, tolerance)
        if position is None:
            self._num_equal += stage is Stage.REDUCE
            return
        instead = next((other for other in range(len(buckets)) if other != index and _is(given, due, other)), None)
        if instead is None and stage is Stage.REDUCE and self._has_other_form(given.values, index):
            self._next[stage] = None
            self._unrecognised = True
            return
        parameter, element = self._at(index, offset + position)
        if instead is not None and np.any(given.values):  # buckets without any gradient look all alike
            message = f"handed over bucket {instead} where bucket {index} was due"
        else:
            instead = None
            place = "its padding" if parameter is None else f"parameter {parameter}, element {element}"
            message = (
                f"handed over {float(given.values[position])!r} for {place} of bucket {index}, "
                f"where it has {float(wanted[position])!r}"
            )
        self.found.append(
            Handed(
                step=plan.index,
                stage=stage,
                message=message,
                bucket=index,
                instead=instead,
                parameter=parameter,
                element=element,
            )
        )

    def _norm(self, plan: StepPlan, given: float) -> None:
        """In the norm stage this should be the square of this rank's shard."""
        gradient = self._gradient()
        if gradient is None:
            return
        wanted = float((gradient.detach().double() ** 2).sum())
        finite = np.isfinite(wanted), np.isfinite(given)
        if not any(finite) or (all(finite) and abs(given - wanted) <= _NORM_RELATIVE * wanted):
            return
        message = f"handed {given!r} to the all-reduce of the norm, where its shard has {wanted!r}"
        self.found.append(Handed(step=plan.index, stage=Stage.NORM, message=message))

    def _due_in_sum(self, index: int, _dtype: torch.dtype) -> tuple[_Values, _Values, int]:
        """A bucket of the sum of this rank's parts, padded with zeros."""
        parts = self._own_parts(index)
        exact = self._scenario.values.domain is not Domain.GENERAL
        magnitude = np.abs(parts).sum(axis=0)
        with np.errstate(invalid="ignore"):
            # Where a sum of the rank's own may overflow in fp32, anything may be handed over.
            wanted = np.where(magnitude > FP32_MAX * (1 - _RELATIVE), np.nan, parts.sum(axis=0))
        return wanted, magnitude * (0.0 if exact else _RELATIVE), 0

    def _has_other_form(self, given: _Values, index: int) -> bool:
        """Whether it is a mean over ranks or parts or both (as good a contribution, or a mistake of all ranks), or one
        part alone."""
        parts = self._own_parts(index)
        world, number = self._scenario.world, len(parts)
        forms = [*parts, *(parts.sum(axis=0) / count for count in (world, number, world * number) if count > 1)]
        # Twice the rounding of bf16: a mean may well be taken in the parameters' own dtype. Zeros have no form.
        return any(np.any(form) and _first_difference(given, form, np.abs(form) * 2.0**-7) is None for form in forms)

    def _own_parts(self, index: int) -> _Values:
        """A bucket of each of this rank's parts, padded with zeros: ``[parts, padded length]``."""
        if self._parts is None:
            number = 0 if self._plan is None else len(self._plan.parts)
            self._parts = np.stack([self._own_part(part) for part in range(number)])
        bucket = self._partition.buckets[index]
        return np.pad(self._parts[:, bucket.start : bucket.end], ((0, 0), (0, bucket.padded - bucket.length)))

    def _own_part(self, part: int) -> _Values:
        """What this rank has in a part, over all elements."""
        whole = np.zeros(self._scenario.numel)
        start = 0
        for index, parameter in enumerate(self._scenario.parameters):
            if self._plan is not None:
                values = contributions.contribution(self._scenario, self._plan, self._rank, part, index)
                if values is not None:
                    whole[start : start + parameter.numel] = values
            start += parameter.numel
        return whole

    def _due_in_gather(self, index: int, dtype: torch.dtype) -> tuple[_Values, _Values, int]:
        """This rank's piece of a bucket of the master weights, rounded; what is in its padding is free (nan)."""
        bucket = self._partition.buckets[index]
        length = bucket.padded // self._partition.world
        offset = self._rank * length
        start, end = min(bucket.start + offset, bucket.end), min(bucket.start + offset + length, bucket.end)
        flat = torch.cat([master.detach().reshape(-1) for master in self._masters()])[start:end].cpu()
        values = np.full(length, np.nan)
        values[: end - start] = flat.to(dtype).double().numpy()
        return values, np.zeros(length), offset

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


def _is(given: _Given, due: Callable[[int, torch.dtype], tuple[_Values, _Values, int]], index: int) -> bool:
    wanted, tolerance, _ = due(index, given.dtype)
    comparable = wanted.size == given.values.size and bool(np.isfinite(wanted).any())
    return comparable and _first_difference(given.values, wanted, tolerance) is None


def _first_difference(got: _Values, wanted: _Values, tolerance: _Values) -> int | None:
    """Where the first differs; what should be inf or nan passes."""
    with np.errstate(invalid="ignore", over="ignore"):
        same = (got == wanted) | (np.abs(got - wanted) <= tolerance) | ~np.isfinite(wanted)
    different = np.flatnonzero(~same)
    return int(different[0]) if different.size else None


def _given(contribution: object) -> _Given | None:
    """A tensor's elements, or those of a list of them end to end; None of anything else."""
    listed = contribution if isinstance(contribution, Sequence) else [contribution]
    tensors = [tensor for tensor in listed if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    if not tensors or len(tensors) != len(listed):
        return None
    with torch.no_grad():
        values = np.concatenate([tensor.detach().reshape(-1).double().cpu().numpy() for tensor in tensors])
    return _Given(values, tensors[0].dtype)
