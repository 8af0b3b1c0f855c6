"""A scenario as a sequence of choices, each a whole number of which the lowest is the simplest.

Knows nothing of who makes the choices (:mod:`harness.scenario.generate` lets Hypothesis make them). Which choices there
are depends on those made before, and on the world as little as can be: so under ``@given`` a scenario
shrinks to a smaller world.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from harness.faults.language import (
    Corrupt,
    Delay,
    Duplicate,
    Ending,
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
    CONTRACT,
    MAX_EXPONENT,
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Extension,
    Load,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Step,
    StepPlan,
    Values,
    steps,
)
from harness.scenario.model import Skip as SkipUpdate
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
    choices: Choices,
    *,
    layout: _Layout,
    before: int,
    empty: bool | None,
    kinds: Collection[Kind] | None,
    plain: Range,
    form: Range | None,
) -> tuple[int, ...]:
    """A shape, with ``before`` elements before it; the others (``plain``: sizes) narrow the choice."""
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
    return _shape(numel, choices.number(0, 7, form))


def _draw_parameters(choices: Choices, layout: _Layout, aim: Aim, extension: Extension) -> tuple[Parameter, ...]:
    dtypes = choices.of(aims.DTYPES, aim.dtypes if extension.dtypes else aims.DTYPES[:1])
    strides = choices.of(aims.STRIDES, aim.strides if extension.strides else aims.STRIDES[:1])
    shapes = _draw_shapes(choices, layout, aim)
    filled = [math.prod(shape) > 0 for shape in shapes]
    turns = [sum(filled[:index]) for index in range(len(shapes))]
    return tuple(
        Parameter(f"p{index}", shape, dtypes[turn % len(dtypes)], strides[turn % len(strides)])
        for index, (shape, turn) in enumerate(zip(shapes, turns, strict=True))
    )


def _draw_shapes(choices: Choices, layout: _Layout, aim: Aim) -> list[tuple[int, ...]]:
    bears = aim.kind is not None or aim.empty_bearer
    bearer = choices.number(0, 4, (1, 4) if aim.empty_bearer else None)
    fewest = max(bearer + 1 + aim.empty_bearer if bears else 1, 2 if aim.solid_ends else 1)
    count = choices.count(aims.NUM_PARAMETERS, fewest, aims.NUM_PARAMETERS[-1])
    room = aim.room(layout.size, layout.world) if aim.room is not None else None
    drawn: list[tuple[int, ...]] = []
    before = 0
    for index in range(count):
        last = index == count - 1
        empty: bool | None = None if aim.empties else False
        kinds: Collection[Kind] | None = None
        plain = (1, max(3, layout.budget - before))
        if before >= layout.budget or layout.size > MAX_AIMED_BUCKET:
            kinds = _SMALL
        if room is not None:
            left = room - before - (aim.last is not None and not last)  # where the last one needs an element
            empty = True if left == 0 else empty
            kinds, plain = _SMALL, (1, left)
        if (last and (before == 0 or aim.last is not None)) or (aim.solid_ends and (last or index == 0)):
            empty = False
        if last and aim.last is not None:
            kinds, plain = (Kind.PLAIN,), aim.last(before, layout.size, layout.world)
        if aim.fill_before and index == bearer - 1:
            empty, kinds = False, (Kind.FILL,)
        if bears and index == bearer:
            empty, kinds = aim.empty_bearer, aim.kind
        form = aim.last_form if last else None
        narrowed = functools.partial(
            _draw_shape, layout=layout, before=before, empty=empty, kinds=kinds, plain=plain, form=form
        )
        drawn.append(choices.group(narrowed))
        before += math.prod(drawn[-1])
    return drawn


# --- steps


class _Before(NamedTuple):
    """What comes before a step, in this order."""

    bucket: int | None  # of a rebuild
    version: int | None  # of loaded weights
    shift: int  # of the learning rate, along the table; 0: it stays


class DrawnStep(NamedTuple):
    """One step before its values are known; ``factor``: what it is clipped to, of the expected norm."""

    before: _Before
    parts: tuple[Part, ...]
    ending: Ending
    clipping: Clipping
    factor: float


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


class Fixed(NamedTuple):
    """What is known when steps are drawn. ``bucket``: where the user has fixed it; ``size``: the one really used."""

    world: int
    parameters: tuple[Parameter, ...]
    bucket: int | None
    size: int
    extension: Extension


def _draw_before(choices: Choices, fixed: Fixed, aim: StepAim) -> _Before:
    shift = 0
    if choices.of(aims.RATES, aim.rate):
        shift = choices.number(1, len(aims.LRS) - 1)
    version = None
    if choices.of(aims.LOADS, aim.load if fixed.extension.refresh else (False,)):
        version = choices.of(aims.VERSIONS)
    bucket = None
    if choices.of(aims.REBUILDS, aim.rebuild):
        bucket = fixed.bucket or _draw_other_bucket(choices, fixed, narrow=aim.rebuild is not None)
    return _Before(bucket, version, shift)


def _draw_other_bucket(choices: Choices, fixed: Fixed, *, narrow: bool) -> int:
    """A requested bucket size, of not too many buckets; ``narrow``: one that cuts otherwise than the first."""
    numel = sum(parameter.numel for parameter in fixed.parameters)
    most = aims.REQUESTS[-1]
    fewest = min(-(-numel // aims.MAX_BUCKETS), most)
    other: Range | None = None
    if narrow:
        smaller = fewest < fixed.size and fixed.size % (2 * fixed.world) == 0
        other = (fewest, fixed.size - 1) if smaller else (fixed.size + fixed.world, most)
    return choices.number(fewest, most, other)


def _draw_step(choices: Choices, *, fixed: Fixed, aim: StepAim) -> DrawnStep:
    world, parameters = fixed.world, fixed.parameters
    before = _draw_before(choices, fixed, aim)
    skipped = choices.of(aims.SKIPS, aim.skip)
    discarded = choices.of(aims.DISCARDS, aim.discard)
    # Asked of a discarded step too, which has none: so one ending turns into another and all other choices stay.
    clipping, factor = choices.of(aims.CLIPS, aim.clip), 0.0
    if clipping is not Clipping.NONE:
        factor = choices.of(aims.FACTORS[clipping])
    free = aim.nones is None
    nones = choices.of(aims.STEP_NONES, None if aim.nones is None else (aim.nones,))
    step_ranks, step_missing = _draw_nones(choices, world, parameters, nones, aimed=not free)
    count = choices.count(aims.NUM_PARTS, *aim.parts)
    parts: list[Part] = []
    for index in range(count):
        first, last = index == 0, index == count - 1
        # An announced further part that never comes is only certain to be harmless where the step is discarded.
        lies: Collection[bool] | None = (False,) if last and not discarded else aim.lie
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
    if discarded:
        clipping = Clipping.NONE
    ending = Ending.DISCARD if discarded else Ending.SKIP if skipped else Ending.STEP
    return DrawnStep(before, tuple(parts), ending, clipping, factor)


def _draw_part(
    choices: Choices, *, world: int, parameters: Sequence[Parameter], lies: Collection[bool] | None, free: bool
) -> tuple[bool, frozenset[int], frozenset[int]]:
    """Whether the announcement is a lie; on which ranks which gradients are None, beside those of the step."""
    lie = choices.of(aims.LIES, lies)
    nones = choices.of(aims.PART_NONES, None if free else (Nones.NOTHING,))
    return lie, *_draw_nones(choices, world, parameters, nones, aimed=False)


def draw_steps(choices: Choices, fixed: Fixed, aim: Aim) -> tuple[DrawnStep, ...]:
    """All steps of a scenario."""
    bearer = choices.number(0, 2, aim.step_index)
    fewest = aim.num_steps
    if aim.step is not None:
        fewest = max(fewest, bearer + 1 + (aim.last_step is not None))
    count = choices.count(aims.NUM_STEPS, fewest, max(fewest, aim.most_steps))
    drawn: list[DrawnStep] = []
    for index in range(count):
        last = index == count - 1
        step_aim = aim.step if index == bearer else aim.last_step if last else None
        if step_aim is None:
            # What is left out shows most in the step that follows.
            step_aim = dataclasses.replace(aim.rest, discard=(False,), skip=(False,)) if last else aim.rest
        drawn.append(choices.group(functools.partial(_draw_step, fixed=fixed, aim=step_aim)))
    return tuple(drawn)


# --- values and optimizer


def _zigzag(number: int, low: int, high: int) -> int:
    """0, -1, 1, -2, 2, …, for ``low <= 0 <= high``; when one side is used up, on along the other."""
    both = min(-low, high)
    if number > 2 * both:
        return number - both if high > both else both - number
    return -((number + 1) // 2) if number % 2 else number // 2


def draw_exponent(choices: Choices, low: int, high: int) -> int:
    """Mostly an everyday one; else any, or near one end of what is allowed."""
    where = choices.number(0, 9)
    if where < 7:
        return _zigzag(choices.number(0, 14), -10, 4)
    if where == 7:
        return _zigzag(choices.number(0, high - low), low, high)
    return low + choices.number(0, 3) if where == 8 else high - choices.number(0, 3)


def _for_fp16(values: Values) -> Values:
    """The same, with the exponents that fp16 has, and without the special values, which are those of bf16.

    Not narrowed when drawn: the choices do not depend on dtypes, so that these can be lowered by themselves.
    """
    low, high = aims.FP16_EXPONENTS
    spread = min(values.spread, high - low)
    exponent = min(max(values.exponent, low), high - spread)
    return msgspec.structs.replace(values, exponent=exponent, spread=spread, special=0, nonfinite=False)


def _draw_general(choices: Choices, max_k: int, aim: Aim) -> Values:
    form = choices.of(aims.FORMS, aim.form)
    spread = choices.of(aims.SPREADS[form], aim.spread)
    exponent = draw_exponent(choices, -133, MAX_EXPONENT - spread)
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


def _draw_values(choices: Choices, world: int, parameters: Sequence[Parameter], most_parts: int, aim: Aim) -> Values:
    numel = sum(parameter.numel for parameter in parameters)
    values = _draw_bf16_values(choices, world, numel, most_parts, aim)
    return _for_fp16(values) if any(parameter.dtype == "fp16" for parameter in parameters) else values


def _draw_bf16_values(choices: Choices, world: int, numel: int, most_parts: int, aim: Aim) -> Values:
    domain = choices.of(aims.DOMAINS, aim.domain)
    max_k = choices.of(aims.MAX_KS, aim.max_k)
    if domain is Domain.GENERAL:
        return _draw_general(choices, max_k, aim)
    num_contributions = world * most_parts
    if domain is Domain.NORM_EXACT:
        # Largest reduced |k| whose squares, over all elements, still add up exactly (model.exact_sums_problem).
        most = math.isqrt((2**24 - 1) // numel) // num_contributions
        if most >= 1:
            return Values(domain, min(max_k, most), draw_exponent(choices, -74, 52))
    max_k = min(max_k, (2**24 - 1) // num_contributions)
    return Values(Domain.EXACT, max_k, draw_exponent(choices, -133, 100))


def _draw_optimizer(choices: Choices, aim: Aim) -> AdamW:
    foreach = choices.of((False, True))
    lr, weight_decay = choices.of(aims.LRS, aim.lr), choices.of(aims.DECAYS, aim.decay)
    beta1, beta2 = choices.of(aims.BETAS)
    eps = choices.of(aims.EPS)
    amsgrad, maximize = choices.of(aims.AMSGRADS, aim.amsgrad), choices.of(aims.MAXIMIZES, aim.maximize)
    return AdamW(lr, beta1, beta2, eps, weight_decay, foreach, amsgrad, maximize)


def expected_norm(values: Values, parameters: Sequence[Parameter], parts: Sequence[Part]) -> float:
    """Root of the expected squared norm of a step's reduced gradient."""
    numel = sum(parameter.numel for parameter in parameters)
    num_elements = sum(numel - sum(parameters[index].numel for index in none) for part in parts for none in part.none)
    square = values.max_k * (values.max_k + 1) / 3
    square *= sum(4.0**s for s in range(values.spread + 1)) / (values.spread + 1)
    return math.ldexp(math.sqrt(square * num_elements), values.exponent)


# --- scenarios

ENDINGS: dict[Ending, Operation] = {Ending.STEP: Step(), Ending.SKIP: SkipUpdate(), Ending.DISCARD: Discard()}


def _draw_layout(choices: Choices, world: int, aim: Aim, bucket: int | None) -> tuple[int, _Layout]:
    """The requested bucket size, and what it means for the parameters."""
    request = bucket
    if request is None:
        narrow = aim.request(world) if aim.request is not None else (1, aims.REQUESTS[-1])
        largest = choices.of(aims.REQUESTS, [most for most in aims.REQUESTS if most >= narrow[0]])
        request = choices.number(1, largest, narrow)
    size = round_bucket(request, world)
    budget = min(choices.of(aims.BUDGETS) * size, aims.MAX_BUDGET)
    if size > MAX_AIMED_BUCKET:
        budget = aims.LARGE_BUCKET_BUDGET
    return request, _Layout(world, size, budget)


class Beginning(NamedTuple):
    """All of a scenario but what is done in it."""

    world: int
    seed: int
    request: int
    parameters: tuple[Parameter, ...]
    values: Values
    optimizer: AdamW


def draw_beginning(
    choices: Choices,
    world: int,
    aim: Aim,
    seed: int,
    bucket: int | None,
    extension: Extension = CONTRACT,
    *,
    most_parts: int,
) -> Beginning:
    """All of a scenario but what is done in it; ``most_parts``: no step will have more."""
    request, layout = _draw_layout(choices, world, aim, bucket)
    parameters = _draw_parameters(choices, layout, aim, extension)
    values = _draw_values(choices, world, parameters, most_parts, aim)
    return Beginning(world, seed, request, parameters, values, _draw_optimizer(choices, aim))


def draw_scenario(
    choices: Choices, world: int, aim: Aim, seed: int, bucket: int | None, extension: Extension = CONTRACT
) -> Scenario:
    """The rest of a scenario.

    ``extension``: what beyond the contract's space may be drawn. Without it the same choices are made, each with the
    simplest outcome alone.
    """
    request, layout = _draw_layout(choices, world, aim, bucket)
    parameters = _draw_parameters(choices, layout, aim, extension)
    drawn = draw_steps(choices, Fixed(world, parameters, bucket, layout.size, extension), aim)
    most_parts = max(len(step.parts) for step in drawn)
    values = _draw_values(choices, world, parameters, most_parts, aim)
    optimizer = _draw_optimizer(choices, aim)
    operations: list[Operation] = [Build(request)]
    rate = aims.LRS.index(optimizer.lr)
    for step in drawn:
        if step.before.bucket is not None:
            operations.append(Build(step.before.bucket))
        if step.before.version is not None:
            operations.append(Load(step.before.version))
        if step.before.shift:
            rate = (rate + step.before.shift) % len(aims.LRS)
            operations.append(Rate(aims.LRS[rate]))
        operations.extend(step.parts)
        if step.clipping is not Clipping.NONE:
            # The coefficient has 1e-6 added to the norm: without it here, tiny norms would always be clipped.
            operations.append(Clip(step.factor * (expected_norm(values, parameters, step.parts) + 1e-6)))
        operations.append(ENDINGS[step.ending])
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
    reduced = [plan.index for plan in plans if plan.reduced]
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
    stages = (*plan.ending.stages, Stage.BUILD)
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
