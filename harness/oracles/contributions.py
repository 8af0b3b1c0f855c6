"""The gradient of a step as the unsharded trainer sees it, rebuilt from the scenario alone (numpy, no torch).

Everything works on one parameter at a time, so that nothing needs memory for all elements of all ranks. The order of
addition is the one in which a trainer without shards would meet the contributions: each rank adds its parts in order
in fp32, then the ranks are added in rank order. In the exact domains every order gives the same bits, and at most two
ranks have only one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.oracles.bounds import any_order_sum_bound
from harness.scenario.model import Scenario, StepPlan
from harness.scenario.values import gradient

# The low half of an fp32 pattern: zero exactly when the value is a bf16 one (8 significant bits), subnormals included.
_BELOW_BF16 = np.int32(0xFFFF)


@dataclass(frozen=True)
class Reduced:
    """One parameter's reduced gradient.

    Attributes:
        value: fp32 ``[numel]``; zeros where no rank had a gradient.
        num_contributions: how many (rank, part) gradients went into it.
        wide_partial_sum: some rank's own sum over its parts holds a value that is not a bf16 one, so that a spill that
            rounds to bf16 shows.
        wide_reduced_value: ``value`` holds a value that is not a bf16 one, so that a reduction in bf16 shows.
    """

    value: NDArray[np.float32]
    num_contributions: int
    wide_partial_sum: bool
    wide_reduced_value: bool


@dataclass(frozen=True)
class Interval:
    """What any order of fp32 additions can give: within ``bound`` of ``center``, both fp64 ``[numel]``."""

    center: NDArray[np.float64]
    bound: NDArray[np.float64]


def contribution(
    scenario: Scenario, step: StepPlan, rank: int, part: int, parameter: int
) -> NDArray[np.float32] | None:
    """The gradient that ``rank`` has for ``parameter`` in the ``part``-th part of a step; None where it has none.

    fp32 ``[numel]``, a new array; exact in the parameter's dtype as long as the scenario's exponents fit that dtype.
    """
    plan = step.parts[part]
    if parameter in plan.none[rank]:
        return None
    numel = scenario.parameters[parameter].numel
    return gradient(scenario.seed, plan.contributors[rank], step.index, parameter, numel, scenario.values)


def has_gradient(scenario: Scenario, step: StepPlan, rank: int, part: int) -> bool:
    """Whether ``rank`` has a gradient for any parameter at all in this part."""
    missing = set(step.parts[part].none[rank])
    return any(parameter not in missing for parameter in range(len(scenario.parameters)))


def reduced(scenario: Scenario, step: StepPlan, parameter: int) -> Reduced:
    """Sum of all ranks' and parts' gradients of one parameter, added in fp32: parts in order, then ranks in order."""
    total: NDArray[np.float32] | None = None
    num_contributions = 0
    wide_partial = False
    for rank in range(scenario.world):
        own: NDArray[np.float32] | None = None
        for part in range(len(step.parts)):
            array = contribution(scenario, step, rank, part, parameter)
            if array is None:
                continue
            num_contributions += 1
            if own is None:
                own = array
            else:
                own += array
                wide_partial = wide_partial or _wide(own)
        if own is None:
            continue  # zeros: adding them changes no bit but the sign of a zero, and gradients' zeros compare equal
        if total is None:
            total = own
        else:
            total += own
    if total is None:
        total = np.zeros(scenario.parameters[parameter].numel, np.float32)
    return Reduced(total, num_contributions, wide_partial, _wide(total))


def interval(scenario: Scenario, step: StepPlan, parameter: int) -> Interval:
    """Center and rounding bound of one parameter's reduced gradient over every order of fp32 additions.

    The center is a sum in fp64; its own rounding error is part of the bound. No order can overflow: the scenario's
    exponents (:data:`harness.scenario.model.MAX_EXPONENT`) keep every sum far inside fp32's range.
    """
    numel = scenario.parameters[parameter].numel
    center = np.zeros(numel, np.float64)
    abs_sum = np.zeros(numel, np.float64)
    num_contributions = 0
    for rank in range(scenario.world):
        for part in range(len(step.parts)):
            array = contribution(scenario, step, rank, part, parameter)
            if array is not None:
                num_contributions += 1
                center += array
                abs_sum += np.abs(array)
    return Interval(center, any_order_sum_bound(num_contributions, abs_sum))


def _wide(array: NDArray[np.float32]) -> bool:
    return bool((array.view(np.int32) & _BELOW_BF16).any())
