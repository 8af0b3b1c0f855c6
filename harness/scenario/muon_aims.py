"""What the generator can be told to aim at in a scenario of system ``"muon"``, and between what it chooses there.

As :mod:`harness.scenario.aims`, which has what both systems share: steps, parts, None gradients, values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from harness.scenario.aims import (
    ANY_STEP,
    EXACT_DOMAINS,
    FREE,
    MAX_KS,
    NUM_PARTS,
    Aim,
    Dtype,
    Form,
    Nones,
    Range,
    StepAim,
)
from harness.scenario.model import Domain
from harness.scenario.muon import Use
from harness.scenario.muon_groups import Layout
from harness.scenario.muon_situations import MuonSituation

_T = TypeVar("_T")


class Shape(enum.IntEnum):
    """What a parameter is; those from ``SQUARE`` on are marked for Muon."""

    BIAS = 0
    ONE = 1
    SCALAR = 2
    EMBEDDING = 3
    SQUARE = 4
    WIDE = 5
    TALL = 6
    ONE_ROW = 7
    ONE_COLUMN = 8
    QKV = 9
    HEADS = 10
    GATE_UP = 11
    EXPERTS = 12
    CUT_EXPERTS = 13


class Buffers(enum.IntEnum):
    """How much goes into one fused buffer."""

    ANY = 0
    EACH = 1  # no two parameters
    BETWEEN = 2
    ALL = 3  # everything
    UNFUSED = 4


class Hop(enum.IntEnum):
    """Nodes of two hops."""

    NONE = 0
    ONES = 1  # each rank a node
    ONE = 2  # all ranks one node
    SEVERAL = 3


class ClipKind(enum.IntEnum):
    """What clips, and whether it is meant to scale anything."""

    NONE = 0
    ACTIVE = 1
    INACTIVE = 2
    ADAPTIVE = 3


# Tables: the first entry is the simplest, repeats are weights, entries that a goal asks for together stand together.
NUM_PARAMETERS: Final = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
SHAPES: Final = (
    *(Shape.BIAS,) * 3,
    Shape.ONE,
    Shape.SCALAR,
    Shape.EMBEDDING,
    *(Shape.SQUARE,) * 2,
    *(Shape.WIDE,) * 2,
    *(Shape.TALL,) * 2,
    Shape.ONE_ROW,
    Shape.ONE_COLUMN,
    Shape.QKV,
    Shape.HEADS,
    Shape.GATE_UP,
    Shape.EXPERTS,
    Shape.CUT_EXPERTS,
)
MATRICES: Final = tuple(shape for shape in Shape if shape >= Shape.SQUARE)
ELEMENTWISE: Final = tuple(shape for shape in Shape if shape < Shape.SQUARE)
SIDES: Final = (6, 6, 8, 12, 16, 24)  # a side is at most this
DTYPES: Final[tuple[tuple[Dtype, ...], ...]] = (
    *(("bf16",),) * 14,
    ("fp32",),
    ("fp32",),
    ("fp16",),
    ("bf16", "fp32"),
    ("bf16", "bf16", "fp32"),
    ("fp32", "bf16"),
    ("bf16", "fp16"),
)
OF_ONE_DTYPE: Final = tuple(each for each in DTYPES if len({*each}) == 1)
LR_SCALES: Final = (1.0,) * 5 + (0.5, 1.5, 3.0, 0.0)
OWN_DECAYS: Final[tuple[float | None, ...]] = (None,) * 5 + (0.0, 0.25, 0.03)
NEED_CLIPS: Final = (True,) * 3 + (False,)
USES: Final[tuple[Use, ...]] = ("once",) * 4 + ("twice", "reentrant")
MAIN_GRADS: Final = (False,) * 7 + (True,)
NUM_COLORS: Final = (0,) * 4 + (1,) * 2 + (2,)
LAYOUTS: Final = (Layout.ALL, Layout.EQUAL, Layout.EQUAL, Layout.UNEQUAL, Layout.UNEQUAL, Layout.OUTSIDE)
DIVIDED: Final = (False,) * 3 + (True,)
BUFFERS: Final = (Buffers.ANY, *Buffers)
REQUESTS: Final = (8, 32, 100, 400)  # elements of any buffer
OWNERS_BY_COST: Final = (True, True, False)
CAPS: Final = (1.3, 1.3, 1.0, 2.0, 10.0)
OVERLAPS: Final = (False, True)
# Parts announced beyond those of the longest step.
WINDOWS: Final = (0, 0, 0, 1, 2)
HALF: Final = (False, True)
QUARTER: Final = (False, False, False, True)
EIGHTH: Final = (False,) * 7 + (True,)
HOPS: Final = (Hop.NONE,) * 4 + (Hop.ONES, Hop.ONE, Hop.SEVERAL, Hop.SEVERAL)
CLIPS: Final = (ClipKind.NONE,) * 3 + (ClipKind.ACTIVE,) * 2 + (ClipKind.INACTIVE,) + (ClipKind.ADAPTIVE,) * 2
FACTORS: Final = {ClipKind.ACTIVE: (0.5, 0.3, 0.1, 0.05), ClipKind.INACTIVE: (50.0, 100.0, 1e4, 1e6)}
RATIOS: Final = (1.04, 1.04, 1.5, 1.0)
WARMUPS: Final = (0, 1, 2, 3)
CLIP_BETAS: Final = (0.99, 0.5, 0.0, 1.0)
# As many as ``aims.LRS``, along which a new rate is drawn. Never lr * weight_decay = 1, see there.
LRS: Final = (2e-2, 0.1, 1e-2, 2e-3, 0.5, 1.0, 1e-4, 0.0)
BETAS: Final = (0.95, 0.95, 0.9, 0.5, 0.0, 0.99)
NS_STEPS: Final = (5, 5, 5, 5, 3, 1, 0, 8, 10)
NS_EPS: Final = (1e-7, 1e-7, 1e-3, 1e-12)
Coefficients = Literal["simple", "quintic", "polar_express", "aol"]
COEFFICIENTS: Final[tuple[Coefficients, ...]] = ("simple", "simple", "quintic", "polar_express", "aol")
NsDtype = Literal["bf16", "fp32"]
NS_DTYPES: Final[tuple[NsDtype, ...]] = ("bf16", "bf16", "fp32")
Scale = Literal["original", "spectral", "match_rms_adamw"]
SCALES: Final[tuple[Scale, ...]] = ("match_rms_adamw", "match_rms_adamw", "original", "spectral")
DOMAINS: Final = (Domain.EXACT,) * 9 + (Domain.NORM_EXACT,) * 2 + (Domain.GENERAL,)
FORMS: Final = (Form.NORMAL,) * 3 + (Form.WIDE,) + (Form.CANCELLING,)
# Squares of what is normalised neither under- nor overflow, nor those of moments.
EXPONENTS: Final = (-40, 20)


@dataclass(frozen=True)
class MuonAim:
    """What a goal asks of a scenario. The *bearers* are parameters, one after the other, that show the situation.

    Attributes:
        common: what the other system asks for too: of steps, of values and of the optimizer. Parameters are asked for
            here alone.
        bearers: for each, what it may be.
        num_bearers: more of the last one, so that there are so many, from (world).
        others: what all other parameters may be.
        long: the first bearer has a side of 8 or more.
        ragged: it has no multiple of the world's elements.
        color: which each bearer is of; short lists are filled up with what is drawn.
    """

    common: Aim = FREE
    bearers: tuple[Collection[Shape], ...] = ()
    num_bearers: Callable[[int], int] | None = None
    others: Collection[Shape] | None = None
    long: bool = False
    ragged: bool = False
    dtypes: Collection[tuple[Dtype, ...]] | None = None
    color: tuple[int, ...] = ()
    use: Collection[Use] | None = None
    main_grad: Collection[bool] | None = None
    lr_scale: Collection[float] | None = None
    own_decay: Collection[float | None] | None = None
    need_clip: Collection[bool] | None = None
    num_colors: Collection[int] | None = None
    layout: Collection[Layout] | None = None
    subgroup: bool = False
    divided: Collection[bool] | None = None
    buffers: Collection[Buffers] | None = None
    by_cost: Collection[bool] | None = None
    reduce_avg: Collection[bool] | None = None
    assigned: Collection[bool] | None = None
    overlap: Collection[bool] | None = None
    window: Collection[int] | None = None
    no_sync: Collection[bool] | None = None
    release_gradients: Collection[bool] | None = None
    fuse_states: Collection[bool] | None = None
    release: Collection[bool] | None = None
    hop: Collection[Hop] | None = None
    skip_missing: Collection[bool] | None = None
    clip: Collection[ClipKind] | None = None
    warmup: Collection[int] | None = None
    ratio: Collection[float] | None = None
    reload: Collection[bool] | None = None
    nesterov: Collection[bool] | None = None
    ns_steps: Collection[int] | None = None
    coefficients: Collection[Coefficients] | None = None
    ns_dtype: Collection[NsDtype] | None = None
    scale: Collection[Scale] | None = None


_NO = (False,)
_YES = (True,)
_SEVERAL: Final[Range] = (2, NUM_PARTS[-1])
_SAME = replace(ANY_STEP, rebuild=_NO)
_LAST = StepAim(rebuild=_NO)

_ONE = (MATRICES,)
_TWO = (MATRICES, ELEMENTWISE)
_FLAT = MuonAim(bearers=(ELEMENTWISE,), num_colors=(0,), dtypes=OF_ONE_DTYPE)
_STACKED = MuonAim(bearers=_ONE, num_colors=(0,), dtypes=OF_ONE_DTYPE)
_MANY = replace(_STACKED, num_bearers=lambda world: world + 1)
_COLORED = MuonAim(bearers=_TWO, color=(0, 0), num_colors=(1,))
_OVERLAPPED = MuonAim(overlap=_YES, assigned=_NO)
_RELEASED = MuonAim(release=_YES, dtypes=(("bf16",),))
_CLIPPED = MuonAim(
    Aim(step=StepAim(), step_index=(0, 0), domain=EXACT_DOMAINS, max_k=(255, 254, 240, 201, 181, 150)),
    bearers=((Shape.SQUARE,),),
    long=True,
    need_clip=_YES,
    num_colors=(0,),
)


def _of(table: Sequence[_T], *names: object) -> tuple[_T, ...]:
    return tuple(entry for entry in table if entry in names)


def _steps(step: StepAim, **others: object) -> Aim:
    return replace(Aim(step=step), **others)  # type: ignore[arg-type]


def _then(step: StepAim, last: StepAim = _LAST) -> Aim:
    """A step and another one of the same instance."""
    return Aim(step=step, last_step=last, rest=_SAME)


def _shaped(shape: Shape) -> MuonAim:
    return MuonAim(bearers=((shape,),))


MUON_FREE = MuonAim()
MUON_AIMS: dict[MuonSituation, MuonAim] = {
    MuonSituation.MATRICES_ALONE: MuonAim(others=MATRICES),
    MuonSituation.ELEMENTWISE_ALONE: MuonAim(others=ELEMENTWISE),
    MuonSituation.BOTH_SETS: MuonAim(bearers=_TWO),
    MuonSituation.ELEMENTWISE_MATRIX: _shaped(Shape.EMBEDDING),
    MuonSituation.ONE_ELEMENT_PARAMETER: _shaped(Shape.ONE),
    MuonSituation.SCALAR_PARAMETER: _shaped(Shape.SCALAR),
    MuonSituation.MIXED_DTYPES: MuonAim(bearers=(MATRICES, MATRICES, MATRICES), dtypes=DTYPES[len(OF_ONE_DTYPE) :]),
    MuonSituation.WITHOUT_MASTER: MuonAim(dtypes=(("fp32",),)),
    MuonSituation.WIDE_MATRIX: _shaped(Shape.WIDE),
    MuonSituation.SQUARE_MATRIX: _shaped(Shape.SQUARE),
    MuonSituation.TALL_MATRIX: _shaped(Shape.TALL),
    MuonSituation.ONE_ROW: _shaped(Shape.ONE_ROW),
    MuonSituation.ONE_COLUMN: _shaped(Shape.ONE_COLUMN),
    MuonSituation.QKV_UNEQUAL: _shaped(Shape.QKV),
    MuonSituation.HEADS: _shaped(Shape.HEADS),
    MuonSituation.GATE_UP: _shaped(Shape.GATE_UP),
    MuonSituation.EXPERTS: _shaped(Shape.EXPERTS),
    MuonSituation.EXPERTS_CUT: _shaped(Shape.CUT_EXPERTS),
    MuonSituation.RANK_WITHOUT_MATRIX: replace(_STACKED, others=ELEMENTWISE),
    MuonSituation.OWNER_OF_SEVERAL: _MANY,
    MuonSituation.MATRICES_TOGETHER: replace(_MANY, buffers=(Buffers.ALL,)),
    MuonSituation.MATRICES_APART: replace(_MANY, buffers=(Buffers.EACH,)),
    MuonSituation.UNFUSED: replace(_STACKED, num_bearers=lambda world: 2, buffers=(Buffers.UNFUSED,)),
    MuonSituation.OWNERS_BY_COST: MuonAim(bearers=_ONE, by_cost=_YES),
    MuonSituation.OWNERS_BY_SIZE: MuonAim(bearers=_ONE, by_cost=_NO),
    MuonSituation.FLAT_BUFFERS: replace(_FLAT, num_bearers=lambda world: 3, buffers=(Buffers.EACH,)),
    MuonSituation.RANK_WITHOUT_ELEMENT: replace(_FLAT, bearers=((Shape.ONE,),), others=MATRICES),
    MuonSituation.FLAT_PADDED: replace(_FLAT, bearers=((Shape.BIAS,),), others=MATRICES, ragged=True),
    MuonSituation.PARAMETER_CROSSES_PIECE: replace(
        _FLAT, bearers=((Shape.EMBEDDING,),), long=True, others=MATRICES, buffers=(Buffers.ALL,)
    ),
    MuonSituation.MEAN_IN_COLLECTIVE: MuonAim(reduce_avg=_YES),
    MuonSituation.MEAN_AFTER_SUM: MuonAim(reduce_avg=_NO),
    MuonSituation.TWO_COLORS: MuonAim(bearers=_TWO, color=(0, 1), num_colors=(2,)),
    MuonSituation.SUBGROUP: replace(_COLORED, layout=(Layout.OUTSIDE,), subgroup=True),
    MuonSituation.EQUAL_GROUPS: replace(_COLORED, layout=(Layout.EQUAL,)),
    MuonSituation.UNEQUAL_GROUPS: replace(_COLORED, layout=(Layout.UNEQUAL,)),
    MuonSituation.RANK_OUTSIDE: replace(_COLORED, layout=(Layout.OUTSIDE,)),
    MuonSituation.COLOR_DIVISOR: replace(_COLORED, layout=(Layout.ALL,), divided=_YES),
    MuonSituation.ONE_PART: MuonAim(_steps(StepAim(parts=(1, 1)))),
    MuonSituation.SEVERAL_PARTS: MuonAim(_steps(StepAim(parts=_SEVERAL))),
    MuonSituation.PARTS_CHANGE: MuonAim(_then(StepAim(parts=(1, 1)), StepAim(parts=_SEVERAL, rebuild=_NO))),
    MuonSituation.OVERLAP_OFF: MuonAim(overlap=_NO, assigned=_NO),
    MuonSituation.OVERLAP_ON: _OVERLAPPED,
    MuonSituation.FULL_WINDOW: replace(
        _OVERLAPPED, common=_steps(StepAim(parts=_SEVERAL), step_index=(0, 0), most_steps=1), window=(0,), no_sync=_NO
    ),
    MuonSituation.SHORT_WINDOW: replace(_OVERLAPPED, common=_steps(StepAim()), window=(1, 2), no_sync=_NO),
    MuonSituation.NO_SYNC: replace(_OVERLAPPED, common=_steps(StepAim(parts=_SEVERAL)), no_sync=_YES),
    MuonSituation.USED_TWICE: replace(
        _OVERLAPPED, common=_steps(StepAim()), bearers=(tuple(Shape),), use=_of(USES, "twice")
    ),
    MuonSituation.REENTRANT: replace(
        _OVERLAPPED, common=_steps(StepAim()), bearers=(tuple(Shape),), use=_of(USES, "reentrant")
    ),
    MuonSituation.UNUSED_ON_SOME_RANKS: replace(
        _OVERLAPPED, common=_steps(StepAim(nones=Nones.SOME)), num_colors=(0,), main_grad=_NO
    ),
    MuonSituation.ASSIGNED: MuonAim(assigned=_YES),
    MuonSituation.MAIN_GRAD: MuonAim(bearers=(tuple(Shape),), main_grad=_YES, skip_missing=_NO),
    MuonSituation.NONE_ON_SOME_RANKS: MuonAim(_steps(StepAim(nones=Nones.SOME))),
    MuonSituation.NONE_IN_FIRST_PART_ONLY: MuonAim(
        _steps(StepAim(parts=_SEVERAL, nones=Nones.FIRST)), bearers=(tuple(Shape),) * 2
    ),
    MuonSituation.NONE_IN_LAST_PART_ONLY: MuonAim(
        _steps(StepAim(parts=_SEVERAL, nones=Nones.LAST)), bearers=(tuple(Shape),) * 2
    ),
    MuonSituation.RANK_WITHOUT_GRADIENT: MuonAim(_steps(StepAim(nones=Nones.RANKS))),
    MuonSituation.MISSING_IS_ZERO: MuonAim(
        _steps(StepAim(nones=Nones.ALL_RANKS)), bearers=(tuple(Shape),) * 2, skip_missing=_NO
    ),
    MuonSituation.MISSING_IS_SKIPPED: MuonAim(
        _steps(StepAim(nones=Nones.ALL_RANKS)), bearers=(tuple(Shape),) * 2, skip_missing=_YES
    ),
    MuonSituation.MISSING_ON_SOME_IS_ZERO: MuonAim(_steps(StepAim(nones=Nones.SOME)), skip_missing=_YES),
    MuonSituation.DISCARD_THEN_STEP: MuonAim(_then(StepAim(discard=_YES))),
    MuonSituation.DISCARD_OVERLAPPED: replace(_OVERLAPPED, common=_then(StepAim(discard=_YES))),
    MuonSituation.SKIP_THEN_STEP: MuonAim(_then(StepAim(skip=_YES))),
    MuonSituation.FIVE_STEPS: MuonAim(Aim(num_steps=5, rest=replace(_SAME, discard=_NO, skip=_NO))),
    MuonSituation.LR_CHANGED: MuonAim(_then(StepAim(), StepAim(rate=_YES, rebuild=_NO))),
    MuonSituation.REBUILT: MuonAim(Aim(step=StepAim(), last_step=StepAim(rebuild=_YES), rest=_SAME)),
    MuonSituation.RELOADED: MuonAim(_then(StepAim()), reload=_YES),
    MuonSituation.GRADIENTS_RELEASED: MuonAim(_then(StepAim()), release_gradients=_YES),
    MuonSituation.STATES_FUSED: MuonAim(fuse_states=_YES),
    MuonSituation.WEIGHTS_RELEASED: _RELEASED,
    MuonSituation.RELEASED_WITHOUT_GRADIENT: replace(
        _RELEASED,
        common=_steps(StepAim(nones=Nones.ALL_RANKS)),
        bearers=(tuple(Shape),) * 2,
        num_colors=(0,),
    ),
    MuonSituation.NODES_OF_ONE: MuonAim(hop=(Hop.ONES,)),
    MuonSituation.ONE_NODE: MuonAim(hop=(Hop.ONE,)),
    # With sums that need more bits than bf16 has already inside a node: what is rounded between two hops shows.
    MuonSituation.NODES_OF_SEVERAL: MuonAim(
        Aim(step=StepAim(parts=(2, 4)), domain=(Domain.EXACT,), max_k=_of(MAX_KS, 255, 254, 240, 201), lr=LRS[:-1]),
        bearers=_ONE,
        num_colors=(0,),
        hop=(Hop.SEVERAL,),
    ),
    MuonSituation.GLOBAL_CLIP: MuonAim(clip=(ClipKind.ACTIVE, ClipKind.INACTIVE)),
    MuonSituation.ADAPTIVE_WARMUP: MuonAim(_steps(StepAim()), clip=(ClipKind.ADAPTIVE,), warmup=(1, 2, 3)),
    MuonSituation.ADAPTIVE_CLIP: MuonAim(_then(StepAim()), clip=(ClipKind.ADAPTIVE,), warmup=(0, 1)),
    MuonSituation.EXCLUDED_FROM_CLIP: MuonAim(
        bearers=(tuple(Shape),) * 2, need_clip=_NO, clip=(ClipKind.ACTIVE, ClipKind.INACTIVE, ClipKind.ADAPTIVE)
    ),
    MuonSituation.NESTEROV_OFF: MuonAim(bearers=_ONE, nesterov=_NO),
    MuonSituation.WEIGHT_DECAY_ON: MuonAim(Aim(decay=(0.1, 0.01, 0.5), lr=LRS[:-1]), bearers=_ONE),
    MuonSituation.WEIGHT_DECAY_OFF: MuonAim(Aim(decay=(0.0,)), bearers=_ONE),
    MuonSituation.OWN_WEIGHT_DECAY: MuonAim(bearers=(tuple(Shape),), own_decay=(0.25, 0.03)),
    MuonSituation.OWN_LR: MuonAim(bearers=(tuple(Shape),), lr_scale=(0.5, 1.5, 3.0, 0.0)),
    MuonSituation.SIMPLE: MuonAim(bearers=_ONE, coefficients=_of(COEFFICIENTS, "simple"), ns_steps=(5, 3, 1)),
    MuonSituation.QUINTIC: MuonAim(bearers=_ONE, coefficients=_of(COEFFICIENTS, "quintic"), ns_steps=(5, 3, 1)),
    MuonSituation.POLAR_EXPRESS: MuonAim(
        bearers=_ONE, coefficients=_of(COEFFICIENTS, "polar_express"), ns_steps=(5, 3, 1)
    ),
    MuonSituation.AOL: MuonAim(bearers=_ONE, coefficients=_of(COEFFICIENTS, "aol"), ns_steps=(5, 3, 1)),
    MuonSituation.COEFFICIENTS_CYCLED: MuonAim(
        bearers=_ONE, coefficients=_of(COEFFICIENTS, "quintic", "polar_express", "aol"), ns_steps=(10,)
    ),
    MuonSituation.NEWTON_SCHULZ_BF16: MuonAim(bearers=_ONE, ns_dtype=_of(NS_DTYPES, "bf16"), ns_steps=(5, 3, 1)),
    MuonSituation.NEWTON_SCHULZ_FP32: MuonAim(bearers=_ONE, ns_dtype=_of(NS_DTYPES, "fp32"), ns_steps=(5, 3, 1)),
    MuonSituation.SCALE_ORIGINAL: MuonAim(bearers=_ONE, scale=_of(SCALES, "original")),
    MuonSituation.SCALE_SPECTRAL: MuonAim(bearers=_ONE, scale=_of(SCALES, "spectral")),
    MuonSituation.SCALE_MATCH_RMS: MuonAim(bearers=_ONE, scale=_of(SCALES, "match_rms_adamw")),
    MuonSituation.SUMS_ROUND: MuonAim(
        Aim(step=StepAim(parts=(3, NUM_PARTS[-1])), domain=(Domain.GENERAL,)), dtypes=(("bf16",),)
    ),
    MuonSituation.CLIPPING_ACTIVE: replace(_CLIPPED, clip=(ClipKind.ACTIVE,)),
    MuonSituation.CLIPPING_INACTIVE: replace(_CLIPPED, clip=(ClipKind.INACTIVE,)),
    # A tracked norm of less than a gradient's own is what the second of two steps meets, mostly.
    MuonSituation.ADAPTIVE_CLIP_ACTIVE: replace(
        _CLIPPED,
        common=replace(_CLIPPED.common, last_step=_LAST, rest=_SAME, num_steps=4),
        clip=(ClipKind.ADAPTIVE,),
        ratio=(1.0,),
        warmup=(0,),
    ),
    MuonSituation.WIDE_REDUCED_VALUE: replace(
        _CLIPPED, common=replace(_CLIPPED.common, step=StepAim(parts=(4, 4)), domain=(Domain.EXACT,))
    ),
}
