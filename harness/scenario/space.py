"""A scenario as a sequence of choices, each a whole number of which the lowest is the simplest.

Knows nothing of who makes the choices (:mod:`harness.scenario.generate` lets Hypothesis make them). Which choices there
are depends on those made before, and on the world as little as can be: so a scenario shrinks to a smaller world.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from harness.faults.language import (
    DISCARDED_STAGES,
    REDUCED_STAGES,
    Corrupt,
    Delay,
    Duplicate,
    Exit,
    Fault,
    Hang,
    Kill,
    Mute,
    Raise,
    Skip,
    Slow,
    Stop,
)
from harness.scenario import aims
from harness.scenario.aims import Aim, Clipping, Form, Kind, Nones, Range, StepAim
from harness.scenario.model import (
    MAX_EXPONENT,
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Operation,
    Parameter,
    Part,
    Scenario,
    Step,
    StepPlan,
    Values,
    steps,
)
from harness.scenario.partition import round_bucket
from harness.scenario.situations import MAX_AIMED_BUCKET
from harness.verdict import Stage

_T = TypeVar("_T")

_NOBODY: frozenset[int] = frozenset()
_SMALL = (Kind.PLAIN, Kind.ONE, Kind.SCALAR)


class Choices(ABC):
    """Makes the choices."""

    @abstractmethod
    def _number(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""

    @abstractmethod
    def group(self, draw: Callable[[Choices], _T]) -> _T:
        """What ``draw`` returns; its choices belong together, to be left out together when a list gets shorter."""

    def number(self, low: int, high: int, narrow: Range | None = None) -> int:
        """A number from ``low`` to ``high``, both included; where given, only one in ``narrow``."""
        if narrow is not None:
            low, high = max(low, narrow[0]), min(high, narrow[1])
        if low > high:
            raise RuntimeError(f"internal error of the generator: no number from {low} to {high} (narrow: {narrow})")
        return self._number(low, high)

    def of(self, table: Sequence[_T], only: Collection[_T] | None = None) -> _T:
        """An entry of a table; where given, only one of ``only``, which stand together in the table."""
        if only is None:
            return table[self.number(0, len(table) - 1)]
        indices = [index for index, entry in enumerate(table) if entry in only]
        return table[self.number(0, len(table) - 1, (indices[0], indices[-1]))]

    def count(self, table: Sequence[int], fewest: int, most: int) -> int:
        """A number from ``fewest`` to ``most`` out of a table in ascending order."""
        return self.of(table, [number for number in table if fewest <= number <= most])


# --- parameters


class _Layout(NamedTuple):
    """What parameters are drawn for: ``size`` is the bucket size really used, ``budget`` is in elements."""

    world: int
    size: int
    budget: int


def _shape(numel: int, form: int) -> tuple[int, ...]:
    """A shape of so many elements, of one dimension (form 0) to many (form 7)."""
    if numel == 0:
        return ((0,), (0, 3), (2, 0), (0, 0), (1, 0), (2, 3, 0), (0, 1, 1), (5, 0, 1, 2))[form]
    low = next(divisor for divisor in range(math.isqrt(numel), 0, -1) if numel % divisor == 0)
    high = numel // low
    factors: list[int] = []
    left, factor = numel, 2
    while left > 1 and len(factors) < 8:
        while left % factor:
            factor = factor + 1 if factor * factor < left else left
        factors.append(factor)
        left //= factor
    return (
        (numel,),
        (low, high),
        (1, numel),
        (numel, 1),
        (high, 1, low),
        (1, 1, low, 1, high),
        (low, *(1,) * 6, high),
        (*factors, left),
    )[form]


def _draw_shape(
    choices: Choices, *, layout: _Layout, before: int, empty: bool | None, kinds: Collection[Kind] | None, plain: Range
) -> tuple[int, ...]:
    """A shape, with ``before`` elements before it; ``empty``, ``kinds`` and ``plain`` (sizes) narrow the choice."""
    if choices.of(aims.EMPTIES, None if empty is None else (empty,)):
        return _shape(0, choices.number(0, 7))
    kind = choices.of(aims.KINDS, kinds)
    if kind is Kind.SCALAR:
        return ()
    to_edge = layout.size - before % layout.size
    if kind is Kind.PLAIN:
        numel = choices.number(*plain)
    elif kind is Kind.ACROSS:
        numel = to_edge + choices.number(1, layout.size)
    elif kind is Kind.LARGER:
        numel = layout.size + choices.number(1, layout.size)
    else:
        numel = {Kind.ONE: 1, Kind.FILL: to_edge, Kind.BUCKET: layout.size}[kind]
    return _shape(numel, choices.number(0, 7))


def _draw_parameters(choices: Choices, layout: _Layout, aim: Aim) -> tuple[Parameter, ...]:
    bears = aim.kind is not None or aim.empty_bearer
    bearer = choices.number(0, 4, (1, 4) if aim.empty_bearer else None)
    fewest = max(bearer + 1 + aim.empty_bearer if bears else 1, 2 if aim.solid_ends else 1)
    count = choices.count(aims.NUM_PARAMETERS, fewest, aims.NUM_PARAMETERS[-1])
    room = aim.room(layout.size, layout.world) if aim.room is not None else None
    drawn: list[Parameter] = []
    before = 0
    for index in range(count):
        last = index == count - 1
        empty: bool | None = None
        kinds: Collection[Kind] | None = None
        plain = (1, max(3, layout.budget - before))
        if before >= layout.budget or layout.size > MAX_AIMED_BUCKET:
            kinds = _SMALL
        if room is not None:
            left = room - before - (aim.last is not None and not last)  # where the last one needs an element
            empty = True if left == 0 else None
            kinds, plain = _SMALL, (1, left)
        if (last and (before == 0 or aim.last is not None)) or (aim.solid_ends and (last or index == 0)):
            empty = False
        if last and aim.last is not None:
            kinds, plain = (Kind.PLAIN,), aim.last(before, layout.size, layout.world)
        if aim.fill_before and index == bearer - 1:
            empty, kinds = False, (Kind.FILL,)
        if bears and index == bearer:
            empty, kinds = aim.empty_bearer, aim.kind
        narrowed = functools.partial(_draw_shape, layout=layout, before=before, empty=empty, kinds=kinds, plain=plain)
        drawn.append(Parameter(f"p{index}", choices.group(narrowed)))
        before += drawn[-1].numel
    return tuple(drawn)


# --- steps


class _Step(NamedTuple):
    parts: tuple[Part, ...]
    discard: bool
    clipping: Clipping
    factor: float  # of the expected norm


def _draw_nones(
    choices: Choices, world: int, parameters: Sequence[Parameter], nones: Nones, *, aimed: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """The ranks and the parameters of a pattern. ``aimed``: of several ranks not all, and only one parameter."""
    if nones is Nones.NOTHING:
        return _NOBODY, _NOBODY
    ranks = frozenset(range(world))
    if nones not in (Nones.ALL_RANKS, Nones.ALL):
        bits = min(world, 8)
        mask = choices.number(1, 2**bits - 1, (1, 2**bits - 2) if aimed and world > 1 else None)
        ranks = frozenset(rank for rank in ranks if mask >> rank % bits & 1)
    if nones in (Nones.RANKS, Nones.ALL):
        return ranks, frozenset(range(len(parameters)))
    filled = [index for index, parameter in enumerate(parameters) if parameter.numel]
    missing = {filled[choices.number(0, len(filled) - 1)]}
    mask = choices.number(0, 255, (0, 0) if aimed else None)
    missing.update(index for index in range(len(parameters)) if mask >> index % 8 & 1)
    return ranks, frozenset(missing)


def _draw_step(
    choices: Choices,
    *,
    world: int,
    parameters: Sequence[Parameter],
    aim: StepAim | None,
    discard: Collection[bool] | None,
) -> _Step:
    """One step; without an aim it is free but for ``discard``, the endings allowed."""
    free = aim is None
    aim = aim or StepAim()
    discarded = choices.of(aims.DISCARDS, discard if free else aim.discard)
    clipping, factor = Clipping.NONE, 0.0
    if not discarded:
        clipping = choices.of(aims.CLIPS, aim.clip)
    if clipping is not Clipping.NONE:
        factor = choices.of(aims.FACTORS[clipping])
    nones = choices.of(aims.STEP_NONES, None if free else (aim.nones,))
    step_ranks, step_missing = _draw_nones(choices, world, parameters, nones, aimed=not free)
    count = choices.count(aims.NUM_PARTS, *aim.parts)
    parts: list[Part] = []
    for index in range(count):
        first, last = index == 0, index == count - 1
        # An announced further part that never comes is only certain to be harmless where the step is discarded.
        lies: Collection[bool] | None = (False,) if last and not discarded else None
        if first and aim.first_is_lie is not None:
            lies = aim.first_is_lie
        narrowed = functools.partial(_draw_part, world=world, parameters=parameters, lies=lies, free=free)
        lie, ranks, missing = choices.group(narrowed)
        of_step = step_missing
        if (nones is Nones.FIRST and not first) or (nones is Nones.LAST and not last):
            of_step = _NOBODY
        none = tuple(
            tuple(sorted((of_step if rank in step_ranks else _NOBODY) | (missing if rank in ranks else _NOBODY)))
            for rank in range(world)
        )
        # Whose gradient it is: never the same on two ranks or in two parts.
        contributors = tuple(range(index * world, (index + 1) * world))
        parts.append(Part(more=lie == last, contributors=contributors, none=none))
    return _Step(tuple(parts), discarded, clipping, factor)


def _draw_part(
    choices: Choices, *, world: int, parameters: Sequence[Parameter], lies: Collection[bool] | None, free: bool
) -> tuple[bool, frozenset[int], frozenset[int]]:
    """Whether the announcement is a lie; on which ranks which gradients are None, beside those of the step."""
    lie = choices.of(aims.LIES, lies)
    nones = choices.of(aims.PART_NONES, None if free else (Nones.NOTHING,))
    return lie, *_draw_nones(choices, world, parameters, nones, aimed=False)


def _draw_steps(choices: Choices, world: int, parameters: Sequence[Parameter], aim: Aim) -> tuple[_Step, ...]:
    bearer = choices.number(0, 2, aim.step_index)
    fewest = aim.num_steps
    if aim.step is not None:
        fewest = max(fewest, bearer + 1 + (aim.last_step is not None))
    count = choices.count(aims.NUM_STEPS, fewest, aims.NUM_STEPS[-1])
    drawn: list[_Step] = []
    for index in range(count):
        last = index == count - 1
        step_aim = aim.step if index == bearer else aim.last_step if last else None
        discard = (False,) if last else aim.discard  # a discard shows most in the step that follows
        drawn.append(
            choices.group(
                functools.partial(_draw_step, world=world, parameters=parameters, aim=step_aim, discard=discard)
            )
        )
    return tuple(drawn)


# --- values and optimizer


def _zigzag(number: int, low: int, high: int) -> int:
    """0, -1, 1, -2, 2, …, for ``low <= 0 <= high``; when one side is used up, on along the other."""
    both = min(-low, high)
    if number > 2 * both:
        return number - both if high > both else both - number
    return -((number + 1) // 2) if number % 2 else number // 2


def _draw_exponent(choices: Choices, low: int, high: int) -> int:
    """Mostly an everyday one; else any, or near one end of what is allowed."""
    where = choices.number(0, 9)
    if where < 7:
        return _zigzag(choices.number(0, 14), -10, 4)
    if where == 7:
        return _zigzag(choices.number(0, high - low), low, high)
    return low + choices.number(0, 3) if where == 8 else high - choices.number(0, 3)


def _draw_general(choices: Choices, max_k: int, aim: Aim) -> Values:
    form = choices.of(aims.FORMS, aim.form)
    spread = choices.of(aims.SPREADS[form], aim.spread)
    exponent = _draw_exponent(choices, -133, MAX_EXPONENT - spread)
    special = choices.of(aims.SPECIALS, aim.special) if form in (Form.EXTREME, Form.NONFINITE) else 0
    return Values(
        Domain.GENERAL,
        max_k,
        exponent,
        spread,
        cancel=form is Form.CANCELLING,
        special=special,
        nonfinite=form is Form.NONFINITE,
    )


def _draw_values(choices: Choices, world: int, numel: int, drawn: Sequence[_Step], aim: Aim) -> Values:
    domain = choices.of(aims.DOMAINS, aim.domain)
    max_k = choices.of(aims.MAX_KS, aim.max_k)
    if domain is Domain.GENERAL:
        return _draw_general(choices, max_k, aim)
    num_contributions = world * max(len(step.parts) for step in drawn)
    if domain is Domain.NORM_EXACT:
        # Largest reduced |k| whose squares, over all elements, still add up exactly (model.exact_sums_problem).
        most = math.isqrt((2**24 - 1) // numel) // num_contributions
        if most >= 1:
            return Values(domain, min(max_k, most), _draw_exponent(choices, -74, 52))
    max_k = min(max_k, (2**24 - 1) // num_contributions)
    return Values(Domain.EXACT, max_k, _draw_exponent(choices, -133, 100))


def _draw_optimizer(choices: Choices, aim: Aim) -> AdamW:
    foreach = choices.of((False, True))
    lr, weight_decay = choices.of(aims.LRS, aim.lr), choices.of(aims.DECAYS, aim.decay)
    beta1, beta2 = choices.of(aims.BETAS)
    return AdamW(lr, beta1, beta2, choices.of(aims.EPS), weight_decay, foreach)


def _expected_norm(values: Values, parameters: Sequence[Parameter], step: _Step) -> float:
    """Root of the expected squared norm of a step's reduced gradient."""
    numel = sum(parameter.numel for parameter in parameters)
    num_elements = sum(
        numel - sum(parameters[index].numel for index in none) for part in step.parts for none in part.none
    )
    square = values.max_k * (values.max_k + 1) / 3
    square *= sum(4.0**s for s in range(values.spread + 1)) / (values.spread + 1)
    return math.ldexp(math.sqrt(square * num_elements), values.exponent)


# --- scenarios


def draw_scenario(choices: Choices, world: int, aim: Aim, seed: int, bucket: int | None) -> Scenario:
    """The rest of a scenario."""
    request = bucket
    if request is None:
        narrow = aim.request(world) if aim.request is not None else (1, aims.REQUESTS[-1])
        largest = choices.of(aims.REQUESTS, [most for most in aims.REQUESTS if most >= narrow[0]])
        request = choices.number(1, aims.REQUESTS[-1] if aim.unlimited else largest, narrow)
    size = round_bucket(request, world)
    budget = min(choices.of(aims.BUDGETS) * size, aims.MAX_BUDGET)
    if size > MAX_AIMED_BUCKET:
        budget = aims.LARGE_BUCKET_BUDGET
    if aim.unlimited:
        budget = 2 * aims.MAX_BUDGET
    parameters = _draw_parameters(choices, _Layout(world, size, budget), aim)
    drawn = _draw_steps(choices, world, parameters, aim)
    values = _draw_values(choices, world, sum(parameter.numel for parameter in parameters), drawn, aim)
    operations: list[Operation] = [Build(request)]
    for step in drawn:
        operations.extend(step.parts)
        if step.clipping is not Clipping.NONE:
            # The coefficient has 1e-6 added to the norm: without it here, tiny norms would always be clipped.
            operations.append(Clip(step.factor * (_expected_norm(values, parameters, step) + 1e-6)))
        operations.append(Discard() if step.discard else Step())
    optimizer = _draw_optimizer(choices, aim)
    return Scenario(world, seed, parameters, values, optimizer, tuple(operations))


# --- faults

_COMMUNICATING = (Stage.REDUCE, Stage.NORM, Stage.GATHER)


def draw_fault(choices: Choices, scenario: Scenario) -> Fault:
    """One fault that every run of ``scenario`` on a right subject must show.

    Only the first collective of a stage is named: how many there are is the subject's affair.

    Args:
        choices: makes the choices.
        scenario: of an exact domain, where any wrong contribution shows; its last step is no discard.
    """
    plans = list(steps(scenario))
    # With one rank nothing is communicated, so only what needs no collective strikes.
    kinds = aims.FAULTS if scenario.world > 1 else aims.FAULTS_ALONE
    kind = choices.of(aims.FAULTS, kinds)
    rank = choices.number(0, scenario.world - 1)
    if kind is Mute:
        return Mute(rank=rank)
    if kind in aims.FAULTS_ALONE:
        return _draw_ending(choices, kind, rank, plans[choices.number(0, len(plans) - 1)], scenario.world)
    reduced = [plan.index for plan in plans if not plan.discard]
    step = reduced[choices.number(0, len(reduced) - 1)]
    if kind is Corrupt:
        return _draw_corrupt(choices, rank, step, scenario)
    stage = choices.of(_COMMUNICATING)
    if kind is Slow:
        return Slow(rank=rank, step=step, stage=stage, milliseconds=choices.of(aims.SLOWS_MS))
    if kind is Delay:
        return Delay(rank=rank, step=step, stage=stage, collective=0, milliseconds=choices.of(aims.DELAYS_MS))
    return (Skip if kind is Skip else Duplicate)(rank=rank, step=step, stage=stage, collective=0)


def _draw_ending(choices: Choices, kind: type, rank: int, plan: StepPlan, world: int) -> Fault:
    """What ends or stops the rank, anywhere in a step or in the construction."""
    stages = (*(DISCARDED_STAGES if plan.discard else REDUCED_STAGES), Stage.BUILD)
    stage = choices.of(stages)
    collective = choices.of((None, 0)) if stage in _COMMUNICATING and world > 1 else None
    step = None if stage is Stage.BUILD else plan.index
    if kind is Kill:
        signal = choices.of(aims.SIGNALS)
        return Kill(rank=rank, step=step, stage=stage, collective=collective, signal=signal)
    if kind is Exit:
        return Exit(rank=rank, step=step, stage=stage, collective=collective, code=choices.of((0, 1, 3, 255)))
    if kind is Hang:
        how = choices.of(aims.HANGS)
        return Hang(rank=rank, step=step, stage=stage, collective=collective, how=how)
    return (Raise if kind is Raise else Stop)(rank=rank, step=step, stage=stage, collective=collective)


def _draw_corrupt(choices: Choices, rank: int, step: int, scenario: Scenario) -> Fault:
    """A wrong contribution that reaches an element, and not only padding, and that no rounding hides.

    The first element of a reduction is the first of all elements, on every rank. Of what is gathered, only rank 0's
    piece of a bucket always begins with an element; of a norm, a number can be too small to matter: only nan is not.
    A flipped exponent bit makes 2.0 of a zero: what is added up must be small enough to be changed by it.
    """
    stage = choices.of((Stage.REDUCE, Stage.NORM, *((Stage.GATHER,) if rank == 0 else ())))
    num_parts = max(len(plan.parts) for plan in steps(scenario))
    values = scenario.values
    largest = math.ldexp(scenario.world * num_parts * values.max_k, values.exponent)
    everything = stage is Stage.GATHER or (stage is Stage.REDUCE and largest < 2.0**25)
    what = choices.of(aims.CORRUPTIONS, aims.CORRUPTIONS if everything else aims.CORRUPTIONS[-1:])
    return Corrupt(rank=rank, step=step, stage=stage, collective=0, what=what)
