"""The gradient of a step as the unsharded trainer sees it, rebuilt from the scenario alone (numpy, no torch).

Everything works on one parameter at a time, so that nothing needs memory for all elements of all ranks. Without an
order given, contributions are added as a trainer without shards would meet them: each rank adds its parts in order in
fp32, then the ranks are added in rank order. In the exact domains every order gives the same bits, and at most two
ranks have only one order; elsewhere the caller says how the backend adds (:mod:`harness.oracles.order`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from harness.oracles.bounds import FP32_MAX, FP32_UNDERFLOW, U32, any_order_sum_bound
from harness.oracles.order import Order, add, fold, uniform
from harness.scenario.model import Domain, Scenario, StepPlan, multiple_of_scenario
from harness.scenario.situations import Situation
from harness.scenario.values import gradient_of

# The low half of an fp32 pattern: zero exactly when the value is a bf16 one (8 significant bits), subnormals included.
_BELOW_BF16 = np.int32(0xFFFF)
_SMALLEST_NORMAL = np.float32(2.0**-126)
_LARGEST = np.float32(float.fromhex("0x1.fep127"))  # of bf16
_CANCELLED = 2.0**-10
_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Reduced:
    """One parameter's reduced gradient.

    Attributes:
        value: fp32 ``[numel]``; zeros where no rank had a gradient.
        num_contributions: how many (rank, part) gradients went into it.
        shows: what a wrong sum of these contributions would be seen by.
    """

    value: NDArray[np.float32]
    num_contributions: int
    shows: frozenset[Situation]


@dataclass(frozen=True)
class Share:
    """Whose gradients are added up, and what their sum is divided by, once: of a mean over some of the ranks."""

    ranks: tuple[int, ...]
    divisor: float


class Nesting(enum.Enum):
    """How a sum over parts and ranks is nested.

    PARTS_INSIDE: each rank adds its parts, then the ranks are added. RANKS_INSIDE: each part is added over the ranks,
    then the parts are added.
    """

    PARTS_INSIDE = "parts inside"
    RANKS_INSIDE = "ranks inside"


@dataclass(frozen=True)
class Interval:
    """What any order of fp32 additions can give: within ``bound`` of ``center``, both fp64 ``[numel]``.

    Around a center that is inf or nan the bound is 0. Where ``overflows``, bool ``[numel]``, some order may also give
    nan and, if the center is finite, inf of either sign.
    """

    center: NDArray[np.float64]
    bound: NDArray[np.float64]
    overflows: NDArray[np.bool_]


def contribution(
    scenario: Scenario, step: StepPlan, rank: int, part: int, parameter: int
) -> NDArray[np.float32] | None:
    """The gradient that ``rank`` has for ``parameter`` in the ``part``-th part of a step; None where it has none.

    fp32 ``[numel]``, a new array; exact in the parameter's dtype as long as the scenario's exponents fit that dtype.
    Of systems ``"muon"`` and ``"strategy"`` each is a multiple of their ``multiple``; a frozen parameter has none.
    """
    plan = step.parts[part]
    if parameter in plan.none[rank] or parameter in frozen(scenario):
        return None
    contributor, listed = plan.contributors[rank], scenario.parameters[parameter]
    gradient = gradient_of(scenario.seed, contributor, step.index, listed, parameter, scenario.values)
    multiple = multiple_of_scenario(scenario)
    if multiple != 1:
        gradient *= np.float32(multiple)
    return gradient


def frozen(scenario: Scenario) -> frozenset[int]:
    """The indices of the parameters that take no gradient: of system ``"strategy"`` alone."""
    if scenario.strategy is None:
        return _NOTHING
    return frozenset(index for index, place in enumerate(scenario.strategy.places) if place.frozen)


def has_gradient(scenario: Scenario, step: StepPlan, rank: int, part: int) -> bool:
    """Whether ``rank`` has a gradient for any parameter at all in this part."""
    missing = {*step.parts[part].none[rank], *frozen(scenario)}
    return any(parameter not in missing for parameter in range(len(scenario.parameters)))


def reduced(
    scenario: Scenario, step: StepPlan, parameter: int, share: Share | None = None, *, look: bool = True
) -> Reduced:
    """Sum of all ranks' and parts' gradients of one parameter, added in fp32: parts in order, then ranks in order.

    ``share``: of these ranks alone, and divided once. Without ``look`` nothing is said in ``shows``: to find it out
    takes about as long as the sum.
    """
    total: NDArray[np.float32] | None = None
    num_contributions = 0
    shows: set[Situation] | None = set() if look else None
    for rank in range(scenario.world) if share is None else share.ranks:
        own, count = _own_sum(scenario, step, rank, parameter, shows)
        num_contributions += count
        if own is None:
            continue  # zeros: adding them changes no bit but the sign of a zero, and gradients' zeros compare equal
        if total is None:
            total = own
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # of the general domain
                total += own
    if total is None:
        total = np.zeros(scenario.parameters[parameter].numel, np.float32)
    if share is not None:
        total /= np.float32(share.divisor)
    if shows is not None and _wide(total):
        shows.add(Situation.WIDE_REDUCED_VALUE)
    return Reduced(total, num_contributions, frozenset(shows or ()))


def reduced_in_order(
    scenario: Scenario, step: StepPlan, parameter: int, order: Order, nesting: Nesting, *, look: bool = True
) -> Reduced:
    """The same sum, with the ranks of each element added as ``order`` says: one label for each of the elements.

    Sums that overflow, and those with inf or nan in them, come out as in a backend.
    """
    zeros = np.zeros(scenario.parameters[parameter].numel, np.float32)
    num_contributions = 0
    shows: set[Situation] | None = set() if look else None
    rows = []
    for rank in range(scenario.world):
        own, count = _own_sum(scenario, step, rank, parameter, shows)
        num_contributions += count
        rows.append(zeros if own is None else own)
    if nesting is Nesting.PARTS_INSIDE:
        total = add(order, rows)
    else:
        total = zeros.copy()
        for part in range(len(step.parts)):
            terms = [contribution(scenario, step, rank, part, parameter) for rank in range(scenario.world)]
            with np.errstate(over="ignore", invalid="ignore"):
                total += add(order, [zeros if term is None else term for term in terms])
    if shows is not None:
        shows |= _seen_by(rows, total)
    return Reduced(total, num_contributions, frozenset(shows or ()))


def _own_sum(
    scenario: Scenario, step: StepPlan, rank: int, parameter: int, shows: set[Situation] | None
) -> tuple[NDArray[np.float32] | None, int]:
    """A rank's sum over its parts in order (None: it has no gradient), and of how many; adds to ``shows``, if given."""
    own: NDArray[np.float32] | None = None
    count = 0
    for part in range(len(step.parts)):
        array = contribution(scenario, step, rank, part, parameter)
        if array is None:
            continue
        count += 1
        if shows is not None and scenario.values.domain is Domain.GENERAL and _extreme(array):
            shows.add(Situation.EXTREME_VALUE)
        if own is None:
            own = array
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            own += array
        if shows is not None and _wide(own):
            shows.add(Situation.WIDE_PARTIAL_SUM)
    return own, count


def _seen_by(rows: Sequence[NDArray[np.float32]], total: NDArray[np.float32]) -> set[Situation]:
    """What the ranks' own sums and their total show."""
    shows = set()
    if _wide(total):
        shows.add(Situation.WIDE_REDUCED_VALUE)
    finite = np.isfinite(total)
    if not finite.all():
        shows.add(Situation.NONFINITE_VALUE)
    if len(rows) > 1:
        with np.errstate(over="ignore", invalid="ignore"):
            magnitude = np.sum(np.abs(rows), axis=0, dtype=np.float64)
            if (finite & (np.abs(total) < _CANCELLED * magnitude)).any():
                shows.add(Situation.CANCELLATION)
    if len(rows) > 2:
        ranks = range(len(rows))
        forward = add(uniform(fold(ranks), total.size), rows)
        backward = add(uniform(fold(ranks[::-1]), total.size), rows)
        if not np.array_equal(forward, backward, equal_nan=True):
            shows.add(Situation.ORDER_MATTERS)
    return shows


def _extreme(array: NDArray[np.float32]) -> bool:
    magnitude = np.abs(array)
    subnormal = (magnitude > 0) & (magnitude < _SMALLEST_NORMAL)
    return bool((subnormal | ((magnitude >= _LARGEST) & np.isfinite(magnitude))).any())


def interval(
    scenario: Scenario, step: StepPlan, parameter: int, share: Share | None = None, *, averages: bool = False
) -> Interval:
    """Center and rounding bound of one parameter's reduced gradient over every order of fp32 additions.

    The center is a sum in fp64; its own rounding error is part of the bound. ``share``: as for :func:`reduced`.
    ``averages``: the division may be the backend's own affair, see :func:`averaged`.
    """
    terms = []
    for rank in range(scenario.world) if share is None else share.ranks:
        for part in range(len(step.parts)):
            array = contribution(scenario, step, rank, part, parameter)
            if array is not None:
                terms.append(array)
    if averages and share is not None:
        return averaged(terms, scenario.parameters[parameter].numel, share.divisor)
    found = any_order(terms, scenario.parameters[parameter].numel)
    return found if share is None else divided(found, share.divisor, exact=len(terms) <= 2)


def divided(sums: Interval, divisor: float, *, exact: bool) -> Interval:
    """Where the quotients of such sums are, each divided once in fp32 by ``divisor`` (above 0).

    A sum ``s`` within ``bound`` of its center ``c`` gives ``fl(s / d)``, off from ``s / d`` by at most ``u |s / d|``,
    or ``2**-150`` where the quotient is subnormal: within ``bound / d + u (|c| + bound) / d + 2**-150`` of ``c / d``.
    ``c / d`` is itself rounded in fp64, and ``d`` may be no fp32 number: both are relative errors of ``2 u`` at most.

    ``exact``: all of ``sums`` are fp32 numbers, known exactly, so that their quotients are known too.
    """
    if exact:
        with np.errstate(over="ignore", invalid="ignore"):
            quotients = sums.center.astype(np.float32) / np.float32(divisor)
        return Interval(quotients.astype(np.float64), np.zeros_like(sums.bound), sums.overflows)
    with np.errstate(over="ignore", invalid="ignore"):
        center = sums.center / divisor
        largest = (np.abs(sums.center) + sums.bound) / divisor
        finite = np.isfinite(center)
        bound = np.where(finite, sums.bound / divisor + 3 * U32 * largest + FP32_UNDERFLOW, 0.0)
    return Interval(center, bound, sums.overflows | (finite & (largest > FP32_MAX)))


def any_order(terms: Sequence[NDArray[np.float32]], numel: int) -> Interval:
    """Where any order of fp32 additions puts the sums of some terms, fp32 ``[numel]`` each.

    The sum of two terms is rounded once, whatever adds them. Of more, a partial sum may overflow, and becomes finite
    never again: a finite sum is within the rounding bound all the same. A term that is inf or nan decides the sum, but
    for an inf that meets a partial sum which overflowed to the other side.
    """
    if len(terms) <= 2:
        total = np.zeros(numel, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for term in terms:
                total += term
        return Interval(total.astype(np.float64), np.zeros(numel), np.zeros(numel, np.bool_))
    center, abs_sum, special = _in_fp64(terms, numel)
    bound = any_order_sum_bound(len(terms), abs_sum)
    overflows = abs_sum + bound > FP32_MAX  # no partial sum is larger
    decided = ~np.isfinite(special)
    center[decided] = special[decided]
    bound[decided] = 0.0
    return Interval(center, bound, overflows)


def averaged(terms: Sequence[NDArray[np.float32]], numel: int, divisor: float) -> Interval:
    """Where the mean of some terms is, fp32 ``[numel]`` each, of a backend that averages by itself.

    NCCL, by its sources, multiplies each term by ``1 / divisor``, rounded to fp32, before it adds: a term passes two
    roundings more than in a sum, and may lose ``2**-150`` to underflow. To sum and divide once is within this bound
    too. An overflow of the sum, in whatever order, is none of the mean.
    """
    center, abs_sum, special = _in_fp64(terms, numel)
    num_terms = len(terms)
    bound = any_order_sum_bound(num_terms + 3, abs_sum) / divisor + (num_terms + 1) * FP32_UNDERFLOW
    overflows = abs_sum + any_order_sum_bound(num_terms + 3, abs_sum) > FP32_MAX
    center /= divisor
    decided = ~np.isfinite(special)
    center[decided] = special[decided]
    bound[decided] = 0.0
    return Interval(center, bound, overflows)


def keeps_exact_means(backend: str, divisors: Iterable[float]) -> bool:
    """Whether means that are exact (of sums of multiples of the divisor) come out as such on a backend.

    Not where NCCL averages over 7 ranks, say, see :func:`averaged`: of ``k d`` it makes ``k (1 + e)``, where
    ``e = d fl(1 / d) - 1``, and that is rounded to ``k``, whatever it is, only up to ``|e| = 2**-25``.
    """
    if backend != "nccl":
        return True
    return all(
        abs(Fraction(float(np.float32(1 / divisor))) * Fraction(divisor) - 1) <= Fraction(1, 2**25)
        for divisor in divisors
    )


def _in_fp64(
    terms: Sequence[NDArray[np.float32]], numel: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The sum of what is finite, the sum of its magnitudes, and what the rest adds up to."""
    center = np.zeros(numel, np.float64)
    abs_sum = np.zeros(numel, np.float64)
    special = np.zeros(numel, np.float64)  # what the terms that are not finite add up to
    for term in terms:
        finite = np.isfinite(term)
        values = np.where(finite, term, 0.0).astype(np.float64)
        center += values
        abs_sum += np.abs(values)
        with np.errstate(invalid="ignore"):
            special += np.where(finite, 0.0, term)
    return center, abs_sum, special


def _wide(array: NDArray[np.float32]) -> bool:
    return bool((array.view(np.int32) & _BELOW_BF16).any())
