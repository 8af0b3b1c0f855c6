"""Situations a scenario can be in: the list that a full campaign must have reached, so that nothing passes vacuously.

:func:`reached` decides from the scenario alone, without running it. What only the running ranks can tell is in
``RUNTIME``; ranks report those by value (``Situation.CLIPPING_ACTIVE.value``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.faults.language import Ending
from harness.scenario.model import CONTRACT, Build, Extension, Load, Rate, Scenario, StepPlan, steps
from harness.scenario.partition import round_bucket

# Above this bucket size (elements) the generator aims at nothing that needs more than one bucket: such a scenario
# would cost more than it shows. It only matters when the user has fixed the bucket size.
MAX_AIMED_BUCKET = 1024


class Situation(enum.Enum):
    """A required situation. Words used below:

    - bucket size: the one really used, the request rounded down to a multiple of the world W, at least W.
    - reduced step: one that ends in a step operation, not in a discard nor in a skip.
    - one instance: steps without a rebuild between them. Where two steps are spoken of, they are of one instance,
      unless something else is said.
    - a rank's parts: those in which it holds at least one gradient. A part whose gradients are all None on a rank is
      no part on this rank.
    - a rank spills: it has two parts or more in the step, or its first one was announced with ``more=True``.
      It holds: it has exactly one, announced with ``more=False``.
    - parts of a step: those of the rank that has the most.
    - empty: of zero elements. None on an empty parameter shows nothing, so only non-empty ones count below.
    """

    # --- parameters
    # Elements in two buckets or more.
    PARAMETER_CROSSES_BUCKET_EDGE = "parameter-crosses-bucket-edge"
    # Elements in two pieces or more of one bucket, so of two ranks.
    PARAMETER_CROSSES_PIECE_EDGE = "parameter-crosses-piece-edge"
    # More elements than the bucket size.
    PARAMETER_LARGER_THAN_BUCKET = "parameter-larger-than-bucket"
    # Starts where a bucket starts and has exactly the bucket size.
    PARAMETER_FILLS_BUCKET = "parameter-fills-bucket"
    # One element in one dimension or more: (1,), (1, 1), ...
    ONE_ELEMENT_PARAMETER = "one-element-parameter"
    # Shape ().
    SCALAR_PARAMETER = "scalar-parameter"
    # An empty parameter with non-empty ones on both sides, not necessarily next to it.
    EMPTY_PARAMETER_BETWEEN = "empty-parameter-between"

    # Parameters of two dtypes that are not empty.
    MIXED_DTYPES = "mixed-dtypes"
    # A parameter whose elements do not lie in row-major order.
    NOT_CONTIGUOUS = "not-contiguous"

    # --- layout of all N elements
    FEWER_ELEMENTS_THAN_RANKS = "fewer-elements-than-ranks"
    AS_MANY_ELEMENTS_AS_RANKS = "as-many-elements-as-ranks"
    ELEMENTS_NOT_DIVISIBLE_BY_WORLD = "elements-not-divisible-by-world"
    # In the last bucket the piece of the last rank holds no element.
    LAST_PIECE_ALL_PADDING = "last-piece-all-padding"
    # Three buckets or more.
    MORE_THAN_TWO_BUCKETS = "more-than-two-buckets"
    # The requested size is below W.
    BUCKET_BELOW_WORLD = "bucket-below-world"
    ONE_BUCKET = "one-bucket"

    # --- parts, in a reduced step
    ONE_PART = "one-part"
    TWO_PARTS = "two-parts"
    # Three or more.
    THREE_PARTS = "three-parts"
    # Two reduced steps of one instance with different numbers of parts, none of them 0.
    PARTS_CHANGE = "parts-change"
    # On some rank: a part, announced as the last (``more=False``), and then another part.
    PART_AFTER_LAST = "part-after-last"

    # --- None gradients, in a reduced step
    # In one part a parameter is None on a rank and not None on another.
    NONE_ON_SOME_RANKS = "none-on-some-ranks"
    # A parameter is None in every part on every rank, while another has a gradient somewhere.
    NONE_ON_ALL_RANKS = "none-on-all-ranks"
    # Of a rank's two parts or more a parameter is None in the first, and not None in all others.
    NONE_IN_FIRST_PART_ONLY = "none-in-first-part-only"
    # The same with the last.
    NONE_IN_LAST_PART_ONLY = "none-in-last-part-only"
    # A rank has no parts, another has.
    RANK_WITHOUT_GRADIENT = "rank-without-gradient"

    # --- several steps
    # In a discarded step a rank holds; a later reduced step has parts.
    DISCARD_HELD = "discard-held"
    # In a discarded step a rank spills; a later reduced step has parts.
    DISCARD_SPILLED = "discard-spilled"
    # In a reduced step a rank spills that has not spilled before.
    FIRST_SPILL = "first-spill"
    # In a reduced step a rank spills that has spilled in an earlier step, reduced or discarded.
    LATER_SPILL = "later-spill"
    # Five reduced steps or more.
    FIVE_STEPS = "five-steps"
    # In a skipped step some rank has parts; so has some rank in a later reduced step.
    SKIP_THEN_STEP = "skip-then-step"
    # Between two reduced steps with parts: the learning rate becomes another one.
    LR_CHANGED = "lr-changed"
    # Between two reduced steps with parts: other weights are loaded.
    LOADED = "loaded"
    # Between two reduced steps with parts, of two instances: a rebuild that cuts the elements into other buckets.
    REBUILT = "rebuilt"

    # --- optimizer and world
    # A weight decay and a learning rate above 0.
    WEIGHT_DECAY_ON = "weight-decay-on"
    # A weight decay of 0.
    WEIGHT_DECAY_OFF = "weight-decay-off"
    # The largest second moments count, and there are two reduced steps with parts.
    AMSGRAD = "amsgrad"
    # The gradient enters with the other sign, in a reduced step with parts.
    MAXIMIZE = "maximize"
    # Sums of two commute: only from three ranks on does the order of addition show.
    WORLD_THREE = "world-three"

    # --- told by the ranks
    # A clip scaled the gradient: coefficient below 1.
    CLIPPING_ACTIVE = "clipping-active"
    # A clip left the gradient as it was: coefficient 1.
    CLIPPING_INACTIVE = "clipping-inactive"
    # A rank's own sum, over two of its parts or more, that needs more than 8 significant bits: a spill that rounds to
    # bf16 would change it.
    WIDE_PARTIAL_SUM = "wide-partial-sum"
    # A reduced gradient that needs more than 8 significant bits: a reduction in bf16 would change it.
    WIDE_REDUCED_VALUE = "wide-reduced-value"
    # A reduced gradient that would have other bits if its ranks had been added in another order.
    ORDER_MATTERS = "order-matters"
    # A reduced gradient below 2**-10 of its ranks' sums' magnitudes: most of their digits cancel.
    CANCELLATION = "cancellation"
    # A contribution that is subnormal, or of the largest finite value.
    EXTREME_VALUE = "extreme-value"
    # A reduced gradient that is inf or nan.
    NONFINITE_VALUE = "nonfinite-value"


RUNTIME = frozenset(
    {
        Situation.CLIPPING_ACTIVE,
        Situation.CLIPPING_INACTIVE,
        Situation.WIDE_PARTIAL_SUM,
        Situation.WIDE_REDUCED_VALUE,
        Situation.ORDER_MATTERS,
        Situation.CANCELLATION,
        Situation.EXTREME_VALUE,
        Situation.NONFINITE_VALUE,
    }
)

# What the generator can aim at, in the order in which a campaign takes its goals. A world is given, not aimed at.
GOALS = tuple(situation for situation in Situation if situation is not Situation.WORLD_THREE)

_NEEDS_TWO_RANKS = frozenset(
    {
        Situation.PARAMETER_CROSSES_PIECE_EDGE,
        Situation.FEWER_ELEMENTS_THAN_RANKS,
        Situation.ELEMENTS_NOT_DIVISIBLE_BY_WORLD,
        Situation.LAST_PIECE_ALL_PADDING,
        Situation.BUCKET_BELOW_WORLD,
        Situation.NONE_ON_SOME_RANKS,
        Situation.RANK_WITHOUT_GRADIENT,
        Situation.CANCELLATION,
    }
)
_NEEDS_SMALL_BUCKET = frozenset(
    {
        Situation.PARAMETER_CROSSES_BUCKET_EDGE,
        Situation.PARAMETER_LARGER_THAN_BUCKET,
        Situation.PARAMETER_FILLS_BUCKET,
        Situation.MORE_THAN_TWO_BUCKETS,
    }
)

# The name of the field of Extension that says whether it may be drawn.
_NEEDS_EXTENSION = {
    Situation.LOADED: "refresh",
    Situation.MIXED_DTYPES: "dtypes",
    Situation.NOT_CONTIGUOUS: "strides",
}


def can_hold(situation: Situation, world: int, bucket: int | None = None, extension: Extension = CONTRACT) -> bool:
    """Whether a generated scenario of this world (and of this requested bucket size, where fixed) can be in it.

    ``extension``: what beyond the contract's space may be drawn.
    """
    if situation in _NEEDS_EXTENSION and not getattr(extension, _NEEDS_EXTENSION[situation]):
        return False
    if situation in _NEEDS_TWO_RANKS and world < 2:
        return False
    if situation is Situation.WORLD_THREE:
        return world == 3
    if situation is Situation.ORDER_MATTERS and world < 3:
        return False
    if bucket is None:
        return True
    if situation is Situation.BUCKET_BELOW_WORLD:
        return bucket < world
    if situation is Situation.REBUILT:
        return False
    return situation not in _NEEDS_SMALL_BUCKET or round_bucket(bucket, world) <= MAX_AIMED_BUCKET


def reached(scenario: Scenario) -> frozenset[Situation]:
    """The situations that a scenario is in, as far as they can be told without running it (so none of ``RUNTIME``)."""
    filled = frozenset(index for index, parameter in enumerate(scenario.parameters) if parameter.numel)
    found = {*_of_parameters(scenario), *_of_layout(scenario), *_of_changes(scenario)}
    for plans in instances(scenario):
        reduced = [plan for plan in plans if plan.reduced]
        found.update(of_parts(reduced))
        found.update(_of_spills(plans))
        found.update(of_endings(plans))
        for plan in reduced:
            found.update(of_nones(plan, filled))
        if len(reduced) >= 5:
            found.add(Situation.FIVE_STEPS)
        num_with_parts = sum(bool(plan.num_parts) for plan in reduced)
        if scenario.optimizer.amsgrad and num_with_parts > 1:
            found.add(Situation.AMSGRAD)
        if scenario.optimizer.maximize and num_with_parts:
            found.add(Situation.MAXIMIZE)
    if scenario.optimizer.weight_decay == 0:
        found.add(Situation.WEIGHT_DECAY_OFF)
    elif scenario.optimizer.lr > 0:
        found.add(Situation.WEIGHT_DECAY_ON)
    if scenario.world == 3:
        found.add(Situation.WORLD_THREE)
    return frozenset(found)


class _RankPart(NamedTuple):
    """One part on one rank, which holds at least one gradient."""

    more: bool
    missing: frozenset[int]  # parameters whose gradient is None


class RankStep(NamedTuple):
    """One step as each rank lives it."""

    ending: Ending
    nones: tuple[tuple[frozenset[int], ...], ...]  # for each part as announced, for each rank: what is None
    ranks: tuple[tuple[_RankPart, ...], ...]  # for each rank: its parts

    @classmethod
    def of(cls, plan: StepPlan, scenario: Scenario) -> RankStep:
        """One step of a scenario."""
        nones = tuple(tuple(map(frozenset, part.none)) for part in plan.parts)
        ranks = []
        for rank in range(scenario.world):
            parts = (_RankPart(part.more, none[rank]) for part, none in zip(plan.parts, nones, strict=True))
            ranks.append(tuple(part for part in parts if len(part.missing) < len(scenario.parameters)))
        return cls(plan.ending, nones, tuple(ranks))

    @property
    def reduced(self) -> bool:
        """Whether it ends in a step operation."""
        return self.ending is Ending.STEP

    @property
    def num_parts(self) -> int:
        """Those of the rank that has the most."""
        return max(len(parts) for parts in self.ranks)

    def spilled(self) -> set[int]:
        """The ranks that spill."""
        return {rank for rank, parts in enumerate(self.ranks) if len(parts) > 1 or (parts and parts[0].more)}

    def holds(self) -> bool:
        """Whether some rank holds."""
        return any(len(parts) == 1 and not parts[0].more for parts in self.ranks)


def instances(scenario: Scenario) -> Iterator[list[RankStep]]:
    """The steps of each instance of the subject, in order."""
    plans: list[RankStep] = []
    for plan in steps(scenario):
        if plans and any(isinstance(operation, Build) for operation in plan.before):
            yield plans
            plans = []
        plans.append(RankStep.of(plan, scenario))
    yield plans


def _of_changes(scenario: Scenario) -> Iterator[Situation]:
    """What changes between two reduced steps with parts."""
    lr, cut = scenario.optimizer.lr, _cut(scenario, scenario.bucket)
    before, of_this_instance = False, False  # whether there was such a step
    found: set[Situation] = set()
    for plan in steps(scenario):
        for operation in plan.before:
            match operation:
                case Rate():
                    if of_this_instance and operation.lr != lr:
                        found.add(Situation.LR_CHANGED)
                    lr = operation.lr
                case Load():
                    if of_this_instance:
                        found.add(Situation.LOADED)
                case Build():
                    new = _cut(scenario, operation.bucket)
                    if (before and new != cut) or Situation.REBUILT in found:
                        found = {Situation.REBUILT}
                    else:
                        found.clear()
                    cut, of_this_instance = new, False
        if plan.reduced and RankStep.of(plan, scenario).num_parts:
            yield from found
            found.clear()
            before = of_this_instance = True


def _cut(scenario: Scenario, bucket: int) -> int:
    """The bucket size really used, as far as it cuts anything: what is as long as all elements cuts nothing."""
    return min(round_bucket(bucket, scenario.world), scenario.numel)


def _of_parameters(scenario: Scenario) -> Iterator[Situation]:
    world, numel = scenario.world, scenario.numel
    size = round_bucket(scenario.bucket, world)
    stop = 0
    for parameter in scenario.parameters:
        start, stop = stop, stop + parameter.numel
        if start == stop:
            if 0 < start < numel:
                yield Situation.EMPTY_PARAMETER_BETWEEN
            continue
        first, last = start // size, (stop - 1) // size
        if first != last:
            yield Situation.PARAMETER_CROSSES_BUCKET_EDGE
        # A parameter that covers a whole bucket crosses its piece edges, if it has any: three buckets decide.
        for index in range(first, min(last, first + 2) + 1):
            begin = index * size
            piece = -(-min(size, numel - begin) // world)
            if (max(start, begin) - begin) // piece != (min(stop, begin + size) - 1 - begin) // piece:
                yield Situation.PARAMETER_CROSSES_PIECE_EDGE
        if parameter.numel > size:
            yield Situation.PARAMETER_LARGER_THAN_BUCKET
        if parameter.numel == size and start % size == 0:
            yield Situation.PARAMETER_FILLS_BUCKET
        if parameter.numel == 1:
            yield Situation.ONE_ELEMENT_PARAMETER if parameter.shape else Situation.SCALAR_PARAMETER
        if parameter.strides == "transposed" and sum(dim > 1 for dim in parameter.shape) > 1:
            yield Situation.NOT_CONTIGUOUS
    if len({parameter.dtype for parameter in scenario.parameters if parameter.numel}) > 1:
        yield Situation.MIXED_DTYPES


def _of_layout(scenario: Scenario) -> Iterator[Situation]:
    world, numel = scenario.world, scenario.numel
    size = round_bucket(scenario.bucket, world)
    num_buckets = -(-numel // size)
    if numel < world:
        yield Situation.FEWER_ELEMENTS_THAN_RANKS
    if numel == world:
        yield Situation.AS_MANY_ELEMENTS_AS_RANKS
    if numel % world:
        yield Situation.ELEMENTS_NOT_DIVISIBLE_BY_WORLD
    length = numel - (num_buckets - 1) * size
    if (world - 1) * -(-length // world) >= length > 0:
        yield Situation.LAST_PIECE_ALL_PADDING
    if num_buckets > 2:
        yield Situation.MORE_THAN_TWO_BUCKETS
    if num_buckets == 1:
        yield Situation.ONE_BUCKET
    if scenario.bucket < world:
        yield Situation.BUCKET_BELOW_WORLD


def of_parts(reduced: Sequence[RankStep]) -> Iterator[Situation]:
    """What the numbers of parts of some reduced steps of one instance show."""
    counts = {plan.num_parts for plan in reduced} - {0}
    if 1 in counts:
        yield Situation.ONE_PART
    if 2 in counts:
        yield Situation.TWO_PARTS
    if any(count > 2 for count in counts):
        yield Situation.THREE_PARTS
    if len(counts) > 1:
        yield Situation.PARTS_CHANGE
    if any(not part.more for plan in reduced for parts in plan.ranks for part in parts[:-1]):
        yield Situation.PART_AFTER_LAST


def of_nones(plan: RankStep, filled: frozenset[int]) -> Iterator[Situation]:
    """What the None gradients of one reduced step show; ``filled``: the parameters that are not empty."""
    for part in plan.nones:
        if len({filled & missing for missing in part}) > 1:
            yield Situation.NONE_ON_SOME_RANKS
    for parts in plan.ranks:
        if len(parts) < 2:
            continue
        first, last = parts[0].missing & filled, parts[-1].missing & filled
        if first.difference(*(part.missing for part in parts[1:])):
            yield Situation.NONE_IN_FIRST_PART_ONLY
        if last.difference(*(part.missing for part in parts[:-1])):
            yield Situation.NONE_IN_LAST_PART_ONLY
    if len({bool(parts) for parts in plan.ranks}) > 1:
        yield Situation.RANK_WITHOUT_GRADIENT
    somewhere = frozenset[int]().union(*(filled - part.missing for parts in plan.ranks for part in parts))
    if somewhere and somewhere != filled:
        yield Situation.NONE_ON_ALL_RANKS


def _of_spills(plans: Sequence[RankStep]) -> Iterator[Situation]:
    earlier: set[int] = set()
    for plan in plans:
        spilled = plan.spilled()
        if plan.reduced and spilled - earlier:
            yield Situation.FIRST_SPILL
        if plan.reduced and spilled & earlier:
            yield Situation.LATER_SPILL
        earlier |= spilled


def of_endings(plans: Sequence[RankStep]) -> Iterator[Situation]:
    """What an ending without an update may leave behind for a later step of the same instance."""
    for index, plan in enumerate(plans):
        if plan.reduced or not any(later.num_parts and later.reduced for later in plans[index + 1 :]):
            continue
        if plan.ending is Ending.SKIP:
            if plan.num_parts:
                yield Situation.SKIP_THEN_STEP
            continue
        if plan.holds():
            yield Situation.DISCARD_HELD
        if plan.spilled():
            yield Situation.DISCARD_SPILLED
