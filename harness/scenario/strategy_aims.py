"""What the generator can be told to aim at in a scenario of system ``"strategy"``, and between what it chooses there.

As :mod:`harness.scenario.aims`, which has what all systems share: steps, parts, None gradients, values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from harness.scenario.aims import ANY_STEP, EXACT_DOMAINS, FREE, LRS, NUM_PARTS, Aim, Clipping, Form, Nones, StepAim
from harness.scenario.model import Domain
from harness.scenario.strategy import Accumulation, Reduce
from harness.scenario.strategy_situations import StrategySituation

_T = TypeVar("_T")


class Shape(enum.IntEnum):
    """What a parameter is; a matrix can be dedicated."""

    ONE = 0
    VECTOR = 1
    MATRIX = 2
    STACK = 3  # three dimensions


class Rows(enum.IntEnum):
    """How long dimension 0 of a parameter is."""

    ANY = 0
    UNEVEN = 1  # longer than there are shards, and no multiple of them
    SHORT = 2  # shorter than there are shards


class Treatment(enum.IntEnum):
    """What is special about a parameter: at most one thing."""

    NONE = 0
    TIED = 1
    FROZEN = 2
    PLAIN = 3
    DEDICATED = 4


class Uses(enum.IntEnum):
    """What is not used in one step, beside what may be None in any step of any system."""

    ALL = 0  # nothing is unused
    WITHOUT_BLOCK = 1  # in a part no rank uses a block
    WITHOUT_BLOCK_ON_SOME = 2  # in a part some ranks do not
    EARLIER = 3  # a parameter is used in an earlier part, but not in the last
    LAST = 4  # a parameter is used in the last part alone


class Buckets(enum.IntEnum):
    """How much goes into one bucket of DDP's."""

    ANY = 0
    SEVERAL = 1
    ONE = 2


# Tables: the first entry is the simplest, repeats are weights, entries that a goal asks for together stand together.
NUM_BLOCKS: Final = (1, 1, 1, 2, 2, 3, 4)
NUM_PARAMETERS: Final = (1, 2, 2, 3, 3, 4, 4, 5, 6)
SHAPES: Final = (Shape.ONE, *(Shape.VECTOR,) * 3, *(Shape.MATRIX,) * 5, Shape.STACK)
SIDES: Final = (4, 8, 8)  # a side is at most this
ROWS: Final = (*(Rows.ANY,) * 3, Rows.UNEVEN, Rows.SHORT)
# Dedicated parameters are what a subject that has them is for.
TREATMENTS: Final = (
    *(Treatment.NONE,) * 6,
    Treatment.TIED,
    Treatment.FROZEN,
    Treatment.PLAIN,
    *(Treatment.DEDICATED,) * 5,
)
USES: Final = (*(Uses.ALL,) * 6, *(each for each in Uses if each is not Uses.ALL))
ACCUMULATIONS: Final[tuple[Accumulation, ...]] = ("sync", "deferred", "no_sync", "nested", "flush")
BUCKETS: Final = (Buckets.ANY, Buckets.SEVERAL, Buckets.SEVERAL, Buckets.ONE)
HALF: Final = (False, True)
QUARTER: Final = (False, False, False, True)
DOMAINS: Final = (Domain.EXACT,) * 7 + (Domain.NORM_EXACT,) * 2 + (Domain.GENERAL,) * 2
FORMS: Final = (Form.NORMAL,) * 3 + (Form.WIDE,) + (Form.CANCELLING,)
# Squares of what is normalised neither under- nor overflow, nor those of moments.
EXPONENTS: Final = (-40, 20)
# Of dedicated parameters.
MUON_LRS: Final = (2e-2, 0.1, 1e-2, 2e-3)
MUON_BETAS: Final = (0.95, 0.95, 0.9, 0.0)
NS_STEPS: Final = (5, 5, 3, 1, 0)


@dataclass(frozen=True)
class StrategyAim:
    """What a goal asks of a scenario. The *bearers* are parameters, the first of the list when it is drawn.

    Attributes:
        common: what other systems ask for too: of steps, of values and of the optimizer. Parameters are asked for here
            alone.
        bearers: for each, what it may be.
        num_bearers: more of the last one, so that there are so many, from (world).
        treat: for each bearer, what may be special about it; the last entry stands for all further ones.
        others: what all other parameters may be; ``others_treat``: what may be special about them.
        in_root: the last bearer is a parameter of the root.
        rows: of the first bearer.
        long: it has 48 elements or more, so that its norm is near its mean.
        sharded: the mesh has two shards or more.
        two_level: it has two replicas or more, too.
        uses: of the first step.
        weights: dtype of all parameters; ``sums``: in which gradients are reduced.
    """

    common: Aim = FREE
    num_blocks: Collection[int] | None = None
    bearers: tuple[Collection[Shape], ...] = ()
    num_bearers: Callable[[int], int] | None = None
    treat: tuple[Collection[Treatment], ...] = ()
    others: Collection[Shape] | None = None
    others_treat: Collection[Treatment] | None = None
    in_root: bool = False
    rows: Collection[Rows] | None = None
    long: bool = False
    replicas: int | None = None
    sharded: bool = False
    two_level: bool = False
    weights: Collection[Reduce] | None = None
    sums: Collection[Reduce] | None = None
    compute: Collection[Reduce] | None = None
    accumulation: Collection[Accumulation] | None = None
    offload: Collection[bool] | None = None
    converts: Collection[bool] | None = None
    bare_root: Collection[bool] | None = None
    unequal_start: Collection[bool] | None = None
    foreach: Collection[bool] | None = None
    buckets: Collection[Buckets] | None = None
    uses: Collection[Uses] | None = None

    def treated(self, bearer: int | None) -> Collection[Treatment] | None:
        """What may be special about a bearer, or (None) about any other parameter."""
        if bearer is None:
            return self.others_treat
        return self.treat[min(bearer, len(self.treat) - 1)] if self.treat else None


_NO = (False,)
_YES = (True,)
_SEVERAL = (2, NUM_PARTS[-1])
_LAST = StepAim()

_FP32: Final[tuple[Reduce, ...]] = ("fp32",)
_BF16: Final[tuple[Reduce, ...]] = ("bf16",)
_ANY_SHAPE = tuple(Shape)
_MATRICES = (Shape.MATRIX,)
_NONE = (Treatment.NONE,)
_MOVING = (Treatment.NONE, Treatment.TIED)
_DEDICATED = (Treatment.DEDICATED,)
_OF_ADAMW = StrategyAim(bearers=(_ANY_SHAPE,), treat=(_MOVING,))


def _steps(step: StepAim, **others: object) -> Aim:
    return replace(Aim(step=step), **others)  # type: ignore[arg-type]


def _then(step: StepAim, last: StepAim = _LAST) -> Aim:
    return Aim(step=step, last_step=last)


def _mesh(situation: StrategySituation, replicas: int) -> dict[StrategySituation, StrategyAim]:
    return {situation: StrategyAim(replicas=replicas)}


def _accumulated(accumulation: Accumulation, fewest: int = 2) -> StrategyAim:
    return StrategyAim(_steps(StepAim(parts=(fewest, NUM_PARTS[-1]))), accumulation=(accumulation,))


def _used(uses: Uses, *, fewest: int = 1, accumulation: Sequence[Accumulation] | None = None) -> StrategyAim:
    """Two parameters that take a gradient, each in a block of its own; in the first step something is not used."""
    return StrategyAim(
        _steps(StepAim(parts=(fewest, NUM_PARTS[-1])), step_index=(0, 0)),
        num_blocks=(2, 3, 4),
        bearers=(_ANY_SHAPE,) * 2,
        treat=(_MOVING,),
        accumulation=accumulation,
        uses=(uses,),
    )


def _missing(nones: Nones) -> StrategyAim:
    return StrategyAim(_steps(StepAim(nones=nones)), bearers=(_ANY_SHAPE,) * 2, treat=(_MOVING,))


_CLIPPED = StrategyAim(
    Aim(step=StepAim(), step_index=(0, 0), domain=EXACT_DOMAINS),
    bearers=(_MATRICES,),
    treat=(_NONE,),
    long=True,
    uses=(Uses.ALL,),
)


def _clipped(clipping: Clipping) -> StrategyAim:
    step = StepAim(clip=(clipping,))
    return replace(_CLIPPED, common=replace(_CLIPPED.common, step=step))


STRATEGY_FREE = StrategyAim()
STRATEGY_AIMS: dict[StrategySituation, StrategyAim] = {
    **_mesh(StrategySituation.MESH_1X1, 1),
    **_mesh(StrategySituation.MESH_2X1, 2),
    **_mesh(StrategySituation.MESH_1X2, 1),
    **_mesh(StrategySituation.MESH_1X3, 1),
    **_mesh(StrategySituation.MESH_2X2, 2),
    **_mesh(StrategySituation.MESH_1X4, 1),
    **_mesh(StrategySituation.MESH_4X1, 4),
    StrategySituation.ONE_BLOCK: StrategyAim(num_blocks=(1,)),
    StrategySituation.SEVERAL_BLOCKS: StrategyAim(num_blocks=(2, 3, 4)),
    StrategySituation.ROOT_PARAMETER: StrategyAim(bearers=(_ANY_SHAPE,), in_root=True, bare_root=_NO),
    StrategySituation.ROWS_NOT_DIVISIBLE: StrategyAim(
        bearers=((Shape.VECTOR, Shape.MATRIX),), treat=(_MOVING,), rows=(Rows.UNEVEN,), sharded=True
    ),
    StrategySituation.FEWER_ROWS_THAN_SHARDS: StrategyAim(
        bearers=((Shape.ONE, Shape.VECTOR, Shape.MATRIX),), treat=(_MOVING,), rows=(Rows.SHORT,), sharded=True
    ),
    StrategySituation.ONE_ELEMENT_PARAMETER: StrategyAim(bearers=((Shape.ONE,),), rows=(Rows.ANY,)),
    StrategySituation.MATRIX: StrategyAim(bearers=(_MATRICES,), rows=(Rows.ANY,)),
    StrategySituation.CONVERTS: StrategyAim(converts=_YES),
    StrategySituation.BARE_ROOT: StrategyAim(
        bearers=(_ANY_SHAPE,), in_root=True, treat=((Treatment.PLAIN,),), converts=_YES, bare_root=_YES
    ),
    StrategySituation.PLAIN_AND_SHARDED: StrategyAim(
        bearers=(_ANY_SHAPE,) * 2, treat=((Treatment.PLAIN,), _MOVING), converts=_YES
    ),
    StrategySituation.TIED: StrategyAim(bearers=(_ANY_SHAPE,), treat=((Treatment.TIED,),)),
    StrategySituation.FROZEN: StrategyAim(bearers=(_ANY_SHAPE,) * 2, treat=((Treatment.FROZEN,), _MOVING)),
    StrategySituation.UNEQUAL_START: StrategyAim(unequal_start=_YES),
    StrategySituation.OFFLOAD: StrategyAim(offload=_YES),
    StrategySituation.REDUCE_FP32: StrategyAim(sums=_FP32),
    StrategySituation.REDUCE_BF16: StrategyAim(sums=_BF16),
    StrategySituation.COMPUTE_FP32: StrategyAim(compute=_FP32),
    StrategySituation.COMPUTE_BF16: StrategyAim(compute=_BF16),
    StrategySituation.WEIGHTS_BF16: StrategyAim(weights=_BF16),
    StrategySituation.UNUSED_ON_ALL_RANKS: _missing(Nones.ALL_RANKS),
    StrategySituation.UNUSED_ON_SOME_RANKS: _missing(Nones.SOME),
    StrategySituation.BLOCK_UNUSED: _used(Uses.WITHOUT_BLOCK),
    StrategySituation.BLOCK_UNUSED_ON_SOME_RANKS: _used(Uses.WITHOUT_BLOCK_ON_SOME),
    StrategySituation.USED_IN_EARLIER_PART_ONLY: _used(
        Uses.EARLIER, fewest=2, accumulation=("no_sync", "nested", "flush")
    ),
    StrategySituation.USED_IN_LAST_PART_ONLY: _used(Uses.LAST, fewest=2),
    StrategySituation.ONE_PART: StrategyAim(_steps(StepAim(parts=(1, 1)))),
    StrategySituation.PARTS_CHANGE: StrategyAim(_then(StepAim(parts=(1, 1)), StepAim(parts=_SEVERAL))),
    StrategySituation.ACCUMULATION_SYNC: _accumulated("sync"),
    StrategySituation.ACCUMULATION_NO_SYNC: _accumulated("no_sync"),
    StrategySituation.ACCUMULATION_NESTED: _accumulated("nested", fewest=3),
    StrategySituation.ACCUMULATION_DEFERRED: _accumulated("deferred"),
    StrategySituation.DEFERRED_OVER_REPLICAS: replace(_accumulated("deferred"), sharded=True, two_level=True),
    StrategySituation.ACCUMULATION_FLUSH: _accumulated("flush"),
    StrategySituation.SEVERAL_BUCKETS: StrategyAim(
        bearers=((Shape.VECTOR,), (Shape.VECTOR,)), treat=(_MOVING,), buckets=(Buckets.SEVERAL,)
    ),
    StrategySituation.NO_CLIP: StrategyAim(_steps(StepAim(clip=(Clipping.NONE,)))),
    StrategySituation.SKIP_THEN_STEP: StrategyAim(_then(StepAim(skip=_YES))),
    StrategySituation.LR_CHANGED: StrategyAim(_then(StepAim(), StepAim(rate=_YES))),
    StrategySituation.FIVE_STEPS: StrategyAim(Aim(num_steps=5, rest=replace(ANY_STEP, skip=_NO))),
    StrategySituation.WEIGHT_DECAY_ON: replace(
        _OF_ADAMW, common=Aim(lr=tuple(lr for lr in LRS if lr), decay=(0.1, 0.01, 0.5))
    ),
    StrategySituation.WEIGHT_DECAY_OFF: replace(_OF_ADAMW, common=Aim(decay=(0.0,))),
    StrategySituation.FOREACH: replace(_OF_ADAMW, foreach=_YES),
    StrategySituation.DEDICATED_AND_OTHERS: StrategyAim(bearers=(_MATRICES, _ANY_SHAPE), treat=(_DEDICATED, _MOVING)),
    StrategySituation.DEDICATED_ALONE: StrategyAim(
        bearers=(_MATRICES,), treat=(_DEDICATED,), others=_MATRICES, others_treat=_DEDICATED, bare_root=_NO
    ),
    StrategySituation.OWNER_OF_SEVERAL: StrategyAim(
        num_blocks=(1, 2), bearers=(_MATRICES,), num_bearers=lambda world: world + 1, treat=(_DEDICATED,)
    ),
    StrategySituation.RANK_WITHOUT_DEDICATED: StrategyAim(
        bearers=(_MATRICES,), treat=(_DEDICATED,), others_treat=(Treatment.NONE, Treatment.TIED, Treatment.FROZEN)
    ),
    StrategySituation.SUMS_ROUND: StrategyAim(
        _steps(StepAim(parts=(3, NUM_PARTS[-1])), domain=(Domain.GENERAL,)), bearers=(_MATRICES,), treat=(_NONE,)
    ),
    StrategySituation.CLIPPING_ACTIVE: _clipped(Clipping.ACTIVE),
    StrategySituation.CLIPPING_INACTIVE: _clipped(Clipping.INACTIVE),
    StrategySituation.WIDE_REDUCED_VALUE: replace(
        _CLIPPED,
        common=Aim(
            step=StepAim(parts=(4, 4)), step_index=(0, 0), domain=(Domain.EXACT,), max_k=(255, 254, 240, 201, 181, 150)
        ),
        sums=_FP32,
    ),
}
