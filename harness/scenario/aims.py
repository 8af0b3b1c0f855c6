"""What a generated scenario is chosen from, and what each goal asks of these choices.

A goal *narrows* a choice to some of its values; it never adds or removes a choice, so that what it does not speak of is
drawn as without it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from harness.faults.language import Corrupt, Delay, Duplicate, Exit, Hang, Kill, Mute, Raise, Skip, Slow, Stop
from harness.scenario.model import Domain
from harness.scenario.situations import MAX_AIMED_BUCKET, Situation

Range = tuple[int, int]  # both ends included
Dtype = Literal["bf16", "fp16", "fp32"]
Strides = Literal["contiguous", "transposed"]

# Elements of all parameters that the generator rarely exceeds, and where the bucket size is fixed and large.
MAX_BUDGET = 5000
LARGE_BUCKET_BUDGET = 600
# Elements at which a sum needs more than 8 bits somewhere, and a norm is near its mean, for all practical purposes.
ENOUGH = 48


class Kind(enum.IntEnum):
    """How the size of a parameter that is not empty is chosen. "Edge" is the next edge between two buckets."""

    PLAIN = 0  # any size within the budget
    ONE = 1
    SCALAR = 2
    FILL = 3  # up to the edge; a whole bucket where one starts
    BUCKET = 4  # as many elements as a bucket
    ACROSS = 5  # over the edge
    LARGER = 6  # more elements than a bucket


class Nones(enum.IntEnum):
    """Which gradients are None in a step or a part."""

    NOTHING = 0
    SOME = 1  # some parameters on some ranks
    FIRST = 2  # the same in the first part alone
    LAST = 3  # the same in the last part alone
    RANKS = 4  # all parameters on some ranks
    ALL_RANKS = 5  # some parameters on all ranks
    ALL = 6  # all parameters on all ranks


class Clipping(enum.IntEnum):
    """What a clip is meant to do."""

    NONE = 0
    ACTIVE = 1
    INACTIVE = 2


class Form(enum.IntEnum):
    """What gradients of the general domain look like."""

    NORMAL = 0  # exponents differ by a few
    WIDE = 1  # by many
    CANCELLING = 2  # contributions of large magnitude cancel, small ones are lost or left
    EXTREME = 3  # some are subnormal, zeros of either sign, or of the largest magnitude there is
    NONFINITE = 4  # some are inf or nan too


# Tables: the first entry is the simplest, repeats are weights, entries that a goal asks for together stand together.
REQUESTS = (8, 24, 80, 250, 900, 4000)  # the requested bucket size is at most this
NUM_PARAMETERS = (1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 10, 12)
NUM_STEPS = (1, 1, 2, 2, 3, 3, 4, 5, 6)
NUM_PARTS = (1, 1, 1, 2, 2, 3, 4)
BUDGETS = (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6, 10, 20)  # buckets
KINDS = tuple(Kind)
# Taken in turn by the parameters that are not empty. What two of them show comes together, what needs fp16 last.
DTYPES: tuple[tuple[Dtype, ...], ...] = (
    *(("bf16",),) * 40,
    ("fp32",),
    ("bf16", "bf16", "fp32"),
    ("fp32", "bf16"),
    ("bf16", "fp32"),
    ("bf16", "fp32", "fp16"),
    ("bf16", "fp16"),
    ("fp16",),
)
STRIDES: tuple[tuple[Strides, ...], ...] = (
    *(("contiguous",),) * 14,
    ("contiguous", "transposed"),
    ("transposed",),
)
# Exponents of gradients that an fp16 parameter can hold (model.check).
FP16_EXPONENTS = (-24, 8)
EMPTIES = (False,) * 4 + (True,)
DISCARDS = (False,) * 5 + (True,)
# Each of what follows comes up in one scenario of eight or so, which has two or three steps that can have it.
SKIPS = (False,) * 15 + (True,)
RATES = (False,) * 17 + (True,)
LOADS = (False,) * 17 + (True,)
REBUILDS = (False,) * 17 + (True,)
MAX_BUCKETS = 24  # of a rebuild: each costs two collectives a step
VERSIONS = (1, 2, 3)  # of loaded weights
LIES = (False,) * 3 + (True,)
STEP_NONES = (Nones.NOTHING,) * 7 + (Nones.SOME, Nones.FIRST, Nones.LAST, Nones.RANKS, Nones.ALL_RANKS)
PART_NONES = (Nones.NOTHING,) * 7 + (Nones.SOME, Nones.RANKS, Nones.ALL)
CLIPS = (Clipping.NONE,) * 3 + (Clipping.ACTIVE,) * 2 + (Clipping.INACTIVE,)
FACTORS = {Clipping.ACTIVE: (0.5, 0.3, 0.1, 0.05), Clipping.INACTIVE: (50.0, 100.0, 1e4, 1e6)}  # of the expected norm
DOMAINS = (Domain.EXACT,) * 6 + (Domain.NORM_EXACT,) * 2 + (Domain.GENERAL,) * 4
MAX_KS = (255, 255, 254, 240, 201, 181, 150, 128, 127, 113, 100, 31, 3, 1)
FORMS = (Form.NORMAL,) * 3 + (Form.WIDE,) * 2 + (Form.CANCELLING,) * 2 + (Form.EXTREME,) * 2 + (Form.NONFINITE,)
SPREADS = {
    Form.NORMAL: (18, 8, 19, 14),
    Form.WIDE: (20, 40, 30, 60),
    Form.CANCELLING: (20, 12, 30, 40),
    Form.EXTREME: (8, 0, 60, 20),
    Form.NONFINITE: (8, 0, 60, 20),
}
SPECIALS = (64, 16, 256, 4)  # of 1024 elements
# Never lr * weight_decay = 1: it would make weights of -0.0, and the sign of a zero is not promised everywhere.
LRS = (1e-3, 0.1, 1e-2, 3e-4, 0.5, 1.0, 1e-5, 0.0)
DECAYS = (0.1, 0.01, 0.5, 0.0, 0.0)
BETAS = ((0.9, 0.95), (0.9, 0.999), (0.5, 0.95), (0.8, 0.5), (0.95, 0.98), (0.0, 0.95), (0.9, 0.0), (0.0, 0.0))
FAULTS_ALONE = (Kill, Exit, Raise, Stop, Hang, Mute)  # need no other rank
FAULTS = (*FAULTS_ALONE, Slow, Delay, Skip, Duplicate, Corrupt)
SIGNALS = (9, 11, 6, 15)
HANGS: tuple[Literal["sleep", "python", "native"], ...] = ("sleep", "python", "native")
CORRUPTIONS: tuple[Literal["bit", "slice", "nan"], ...] = ("bit", "slice", "nan")
SLOWS_MS = (1, 3, 10)  # before each of what may be dozens
DELAYS_MS = (1, 10, 100)
AMSGRADS = (False,) * 7 + (True,)
MAXIMIZES = (False,) * 7 + (True,)
EPS = (1e-8, 1e-6, 1e-3, 1e-12, 1.0)  # never 0: an element without gradient would become nan


@dataclass(frozen=True)
class StepAim:
    """What a goal asks of one step."""

    discard: Collection[bool] | None = (False,)
    parts: Range = (1, NUM_PARTS[-1])
    first_is_lie: Collection[bool] | None = None
    lie: Collection[bool] | None = None  # of the other parts
    nones: Nones | None = Nones.NOTHING  # this pattern and no other; None: any, and in each part another
    clip: Collection[Clipping] | None = None
    skip: Collection[bool] | None = (False,)
    rate: Collection[bool] | None = None
    load: Collection[bool] | None = None
    rebuild: Collection[bool] | None = None


ANY_STEP = StepAim(discard=None, nones=None, skip=None)


@dataclass(frozen=True)
class Aim:
    """What a goal asks of a scenario. The *bearer* is the parameter, or the step, that shows the situation.

    Attributes:
        request: requested bucket size, from (world).
        kind: of the bearer.
        fill_before: the parameter before the bearer ends at an edge between buckets.
        empty_bearer: the bearer is empty; needs ``solid_ends``.
        solid_ends: two parameters or more, the first and the last not empty.
        last: size of the last parameter, from (elements before it, bucket size, world).
        last_form: how the last parameter's elements are laid out: 1 is a matrix (``space._shape``).
        room: most elements of all parameters, from (bucket size, world).
        dtypes, strides: of the parameters.
        step: the bearer, of index ``step_index``.
        last_step: the last step, which then comes after the bearer.
        rest: all other steps.
        num_steps: at least.
        most_steps: at most, where no more are needed.
        empties: whether there may be empty parameters that are not needed.
    """

    request: Callable[[int], Range] | None = None
    kind: Collection[Kind] | None = None
    fill_before: bool = False
    empty_bearer: bool = False
    solid_ends: bool = False
    last: Callable[[int, int, int], Range] | None = None
    last_form: Range | None = None
    room: Callable[[int, int], int | None] | None = None
    dtypes: Collection[tuple[Dtype, ...]] | None = None
    strides: Collection[tuple[Strides, ...]] | None = None
    step: StepAim | None = None
    step_index: Range = (0, 2)
    last_step: StepAim | None = None
    rest: StepAim = ANY_STEP
    num_steps: int = 1
    most_steps: int = NUM_STEPS[-1]
    empties: bool = True
    domain: Collection[Domain] | None = None
    max_k: Collection[int] | None = None
    form: Collection[Form] | None = None
    spread: Collection[int] | None = None
    special: Collection[int] | None = None
    lr: Collection[float] | None = None
    decay: Collection[float] | None = None
    amsgrad: Collection[bool] | None = None
    maximize: Collection[bool] | None = None


def _not_divisible(before: int, size: int, world: int) -> Range:
    low = -before % world + 1
    return low, low + world - 2


def _last_bucket_below_world(before: int, size: int, world: int) -> Range:
    if size > MAX_AIMED_BUCKET:  # too large to fill: all elements have to do, and ``room`` sees to it
        return 1, world - 1 - before
    low = -before % size + 1
    return low, low + world - 2


def _over_half_of_last_bucket(before: int, size: int, world: int) -> Range:
    """More than half of the elements in the last bucket, so more than a piece of it: it lies in two."""
    inside = before % size
    low, high = inside + 2, size - inside
    if low > high:
        low, high = size - inside + 2, 2 * size - inside
    return low, min(high, low + LARGE_BUCKET_BUDGET)


def _third_bucket(before: int, size: int, world: int) -> Range:
    low = max(1, 2 * size + 1 - before)
    return low, low + size - 1


def _enough(before: int, size: int, world: int) -> Range:
    low = max(1, ENOUGH - before)
    return low, low + ENOUGH


_SEVERAL = (2, NUM_PARTS[-1])
_NO = (False,)
_YES = (True,)
# The last step, and all that are free, of the instance that the bearer is of.
_SAME = replace(ANY_STEP, rebuild=_NO)
_LAST = StepAim(rebuild=_NO)
_LAST_SEVERAL = StepAim(parts=_SEVERAL, rebuild=_NO)
_PLENTY = Aim(request=lambda world: (ENOUGH // 2, REQUESTS[-1]), last=_enough)
_WIDE = replace(
    _PLENTY, domain=(Domain.EXACT,), max_k=tuple(k for k in MAX_KS if k > 200), step=StepAim(parts=_SEVERAL)
)
_GENERAL = replace(_PLENTY, domain=(Domain.GENERAL,), max_k=tuple(k for k in MAX_KS if k > 100), step=StepAim())
_SPECIAL = replace(_GENERAL, special=(256,), dtypes=tuple(each for each in DTYPES if "fp16" not in each))
# In one part: over several, it is often a rank's own sum that cancels.
_CANCELLING = replace(_GENERAL, form=(Form.CANCELLING,), step=StepAim(parts=(1, 1)))
_CLIPPED = replace(_PLENTY, domain=(Domain.EXACT, Domain.NORM_EXACT))

FREE = Aim()
EXACT_DOMAINS = (Domain.EXACT, Domain.NORM_EXACT)
AIMS: dict[Situation, Aim] = {
    Situation.PARAMETER_CROSSES_BUCKET_EDGE: Aim(kind=(Kind.ACROSS, Kind.LARGER)),
    Situation.PARAMETER_CROSSES_PIECE_EDGE: Aim(last=_over_half_of_last_bucket),
    Situation.PARAMETER_LARGER_THAN_BUCKET: Aim(kind=(Kind.LARGER,)),
    Situation.PARAMETER_FILLS_BUCKET: Aim(kind=(Kind.FILL,), fill_before=True),
    Situation.ONE_ELEMENT_PARAMETER: Aim(kind=(Kind.ONE,)),
    Situation.SCALAR_PARAMETER: Aim(kind=(Kind.SCALAR,)),
    Situation.EMPTY_PARAMETER_BETWEEN: Aim(empty_bearer=True, solid_ends=True),
    Situation.MIXED_DTYPES: Aim(solid_ends=True, dtypes=tuple(each for each in DTYPES if len({*each[:2]}) > 1)),
    # 3 x 4: transposed it has other dimensions too.
    Situation.NOT_CONTIGUOUS: Aim(
        last=lambda before, size, world: (12, 12), last_form=(1, 1), strides=(("transposed",),)
    ),
    Situation.FEWER_ELEMENTS_THAN_RANKS: Aim(room=lambda size, world: world - 1),
    Situation.AS_MANY_ELEMENTS_AS_RANKS: Aim(
        room=lambda size, world: world, last=lambda before, size, world: (world - before, world - before)
    ),
    Situation.ELEMENTS_NOT_DIVISIBLE_BY_WORLD: Aim(last=_not_divisible),
    Situation.LAST_PIECE_ALL_PADDING: Aim(
        room=lambda size, world: world - 1 if size > MAX_AIMED_BUCKET else None, last=_last_bucket_below_world
    ),
    Situation.MORE_THAN_TWO_BUCKETS: Aim(last=_third_bucket),
    Situation.BUCKET_BELOW_WORLD: Aim(request=lambda world: (1, world - 1)),
    Situation.ONE_BUCKET: Aim(room=lambda size, world: min(size, LARGE_BUCKET_BUDGET)),
    Situation.ONE_PART: Aim(step=StepAim(parts=(1, 1))),
    Situation.TWO_PARTS: Aim(step=StepAim(parts=(2, 2))),
    Situation.THREE_PARTS: Aim(step=StepAim(parts=(3, NUM_PARTS[-1]))),
    Situation.PARTS_CHANGE: Aim(step=StepAim(parts=(1, 1)), last_step=_LAST_SEVERAL, rest=_SAME),
    Situation.PART_AFTER_LAST: Aim(step=StepAim(parts=_SEVERAL, first_is_lie=(True,))),
    Situation.NONE_ON_SOME_RANKS: Aim(step=StepAim(nones=Nones.SOME)),
    Situation.NONE_ON_ALL_RANKS: Aim(step=StepAim(nones=Nones.ALL_RANKS), solid_ends=True),
    Situation.NONE_IN_FIRST_PART_ONLY: Aim(step=StepAim(parts=_SEVERAL, nones=Nones.FIRST), solid_ends=True),
    Situation.NONE_IN_LAST_PART_ONLY: Aim(step=StepAim(parts=_SEVERAL, nones=Nones.LAST), solid_ends=True),
    Situation.RANK_WITHOUT_GRADIENT: Aim(step=StepAim(nones=Nones.RANKS)),
    Situation.DISCARD_HELD: Aim(
        step=StepAim(discard=_YES, parts=(1, 1), first_is_lie=_NO), last_step=_LAST, rest=_SAME
    ),
    Situation.DISCARD_SPILLED: Aim(step=StepAim(discard=_YES, parts=_SEVERAL), last_step=_LAST, rest=_SAME),
    Situation.FIRST_SPILL: Aim(step=StepAim(parts=_SEVERAL), step_index=(0, 0)),
    Situation.LATER_SPILL: Aim(
        step=StepAim(discard=(False, True), parts=_SEVERAL), last_step=_LAST_SEVERAL, rest=_SAME
    ),
    Situation.FIVE_STEPS: Aim(num_steps=5, rest=replace(_SAME, discard=_NO, skip=_NO)),
    Situation.SKIP_THEN_STEP: Aim(step=StepAim(skip=_YES), last_step=_LAST, rest=_SAME),
    Situation.REBUILT: Aim(
        request=lambda world: (1, REQUESTS[3]),
        last=_third_bucket,
        step=StepAim(rebuild=_NO),
        last_step=StepAim(rebuild=_YES),
        rest=_SAME,
    ),
    Situation.LOADED: Aim(step=StepAim(), last_step=StepAim(load=_YES, rebuild=_NO), rest=_SAME),
    Situation.LR_CHANGED: Aim(step=StepAim(), last_step=StepAim(rate=_YES, rebuild=_NO), rest=_SAME),
    Situation.WEIGHT_DECAY_ON: Aim(lr=tuple(lr for lr in LRS if lr), decay=tuple(decay for decay in DECAYS if decay)),
    Situation.WEIGHT_DECAY_OFF: Aim(decay=(0.0,)),
    Situation.AMSGRAD: Aim(amsgrad=_YES, step=StepAim(), last_step=_LAST, rest=_SAME),
    Situation.MAXIMIZE: Aim(maximize=_YES, step=StepAim()),
    Situation.CLIPPING_ACTIVE: replace(_CLIPPED, step=StepAim(clip=(Clipping.ACTIVE,))),
    Situation.CLIPPING_INACTIVE: replace(_CLIPPED, step=StepAim(clip=(Clipping.INACTIVE,))),
    Situation.WIDE_PARTIAL_SUM: _WIDE,
    Situation.WIDE_REDUCED_VALUE: _WIDE,
    # Where exponents differ by 20, a quarter of the sums over three or four ranks depend on the order; by 12, none.
    Situation.ORDER_MATTERS: replace(_CANCELLING, spread=(20,)),
    Situation.CANCELLATION: _CANCELLING,
    Situation.EXTREME_VALUE: replace(_SPECIAL, form=(Form.EXTREME,)),
    Situation.NONFINITE_VALUE: replace(_SPECIAL, form=(Form.NONFINITE,)),
}


def for_fault(aim: Aim) -> Aim:
    """The same aim on sums that are exact, where every fault shows; an aim that needs others is dropped."""
    if aim.domain is None:
        return replace(aim, domain=EXACT_DOMAINS)
    return aim if Domain.GENERAL not in aim.domain else replace(FREE, domain=EXACT_DOMAINS)
