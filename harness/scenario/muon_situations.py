"""Situations of system ``"muon"``, as :mod:`harness.scenario.situations` has those of the other one."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from harness.faults.language import Ending
from harness.scenario.model import CONTRACT, Build, Domain, Extension, Parameter, Rate, Reload, Scenario, steps
from harness.scenario.muon import AdaptiveClip, Mark, Muon
from harness.scenario.muon_check import colored, group_sizes
from harness.scenario.muon_groups import Layout, divisors, has, layouts, multiple_of
from harness.scenario.situations import RankStep, Situation, instances, of_endings, of_nones, of_parts

MOST_PARAMETERS: Final = 8
"""That the generator draws."""

COEFFICIENT_ROWS: Final = {"simple": 1, "quintic": 5, "polar_express": 8, "aol": 4}
"""Triples of each set, which are taken in turn."""


class MuonSituation(enum.Enum):
    """A required situation. Words used below, beside those of :class:`~harness.scenario.situations.Situation`:

    - matrix: a parameter that is marked for Muon; element-wise: any other.
    - whole: of a matrix that is neither a stack nor cut into blocks.
    - set: the matrices, or the element-wise parameters, of one colour and one dtype: they share buffers and owners.
    - overlap: collectives start from hooks, which only gradients that come out of autograd fire.
    """

    # --- what is marked
    MATRICES_ALONE = "matrices-alone"
    ELEMENTWISE_ALONE = "elementwise-alone"
    BOTH_SETS = "both-sets"
    # Two dimensions or more, all but one above 1, and element-wise.
    ELEMENTWISE_MATRIX = "elementwise-matrix"
    ONE_ELEMENT_PARAMETER = "one-element-parameter"
    SCALAR_PARAMETER = "scalar-parameter"
    MIXED_DTYPES = "mixed-dtypes"
    # A parameter of fp32, which has no master beside it.
    WITHOUT_MASTER = "without-master"

    # --- shapes of whole matrices, and cuts
    WIDE_MATRIX = "wide-matrix"
    SQUARE_MATRIX = "square-matrix"
    TALL_MATRIX = "tall-matrix"
    ONE_ROW = "one-row"
    ONE_COLUMN = "one-column"
    # Not all blocks have the same number of rows.
    QKV_UNEQUAL = "qkv-unequal"
    HEADS = "heads"
    GATE_UP = "gate-up"
    # A stack of two matrices or more, not cut.
    EXPERTS = "experts"
    EXPERTS_CUT = "experts-cut"

    # --- owners of matrices and fused buffers: of a set and its smallest group
    # Fewer matrices than ranks: some rank owns none.
    RANK_WITHOUT_MATRIX = "rank-without-matrix"
    # More matrices than ranks: some rank owns two of them or more, which ...
    OWNER_OF_SEVERAL = "owner-of-several"
    # ... fit into one buffer, all of them; ...
    MATRICES_TOGETHER = "matrices-together"
    # ... or not even two of them do.
    MATRICES_APART = "matrices-apart"
    # Two matrices or more that are not fused.
    UNFUSED = "unfused"
    OWNERS_BY_COST = "owners-by-cost"
    OWNERS_BY_SIZE = "owners-by-size"
    # Element-wise parameters of a group of two ranks or more: more elements than a buffer has, ...
    FLAT_BUFFERS = "flat-buffers"
    # ... fewer than ranks, ...
    RANK_WITHOUT_ELEMENT = "rank-without-element"
    # ... no multiple of the ranks, ...
    FLAT_PADDED = "flat-padded"
    # ... and in one buffer, a parameter longer than a rank's piece.
    PARAMETER_CROSSES_PIECE = "parameter-crosses-piece"

    # --- averages and colours
    MEAN_IN_COLLECTIVE = "mean-in-collective"
    MEAN_AFTER_SUM = "mean-after-sum"
    TWO_COLORS = "two-colors"
    # A colour of matrices and of element-wise parameters, with ...
    # ... a group of two ranks or more that are not all ranks; ...
    SUBGROUP = "subgroup"
    # ... groups of the same size, in which all ranks are; ...
    EQUAL_GROUPS = "equal-groups"
    # ... groups of different sizes; ...
    UNEQUAL_GROUPS = "unequal-groups"
    # ... a rank that is in none; ...
    RANK_OUTSIDE = "rank-outside"
    # ... a divisor that is not the size of some group.
    COLOR_DIVISOR = "color-divisor"

    # --- parts
    ONE_PART = "one-part"
    SEVERAL_PARTS = "several-parts"
    PARTS_CHANGE = "parts-change"
    OVERLAP_OFF = "overlap-off"
    OVERLAP_ON = "overlap-on"
    # With overlap, a reduced step has as many parts as were announced, two or more; ...
    FULL_WINDOW = "full-window"
    # ... or fewer.
    SHORT_WINDOW = "short-window"
    # A reduced step of two parts or more, all but the last in ``no_sync()``.
    NO_SYNC = "no-sync"
    # With overlap, in a reduced step, a parameter with a gradient is used twice; ...
    USED_TWICE = "used-twice"
    # ... or in two re-entrant checkpoints; ...
    REENTRANT = "reentrant"
    # ... or is used by some ranks of its group, and not by others.
    UNUSED_ON_SOME_RANKS = "unused-on-some-ranks"
    ASSIGNED = "assigned"
    MAIN_GRAD = "main-grad"

    # --- None gradients, in a reduced step
    NONE_ON_SOME_RANKS = "none-on-some-ranks"
    NONE_IN_FIRST_PART_ONLY = "none-in-first-part-only"
    NONE_IN_LAST_PART_ONLY = "none-in-last-part-only"
    RANK_WITHOUT_GRADIENT = "rank-without-gradient"
    # On all ranks, while another parameter has a gradient: it counts as zeros, ...
    MISSING_IS_ZERO = "missing-is-zero"
    # ... or is skipped.
    MISSING_IS_SKIPPED = "missing-is-skipped"
    # One that would be skipped, were it not for another rank's gradient.
    MISSING_ON_SOME_IS_ZERO = "missing-on-some-is-zero"

    # --- several steps
    DISCARD_THEN_STEP = "discard-then-step"
    # The same with overlap, where collectives may have begun.
    DISCARD_OVERLAPPED = "discard-overlapped"
    SKIP_THEN_STEP = "skip-then-step"
    FIVE_STEPS = "five-steps"
    LR_CHANGED = "lr-changed"
    REBUILT = "rebuilt"
    RELOADED = "reloaded"

    # --- storage
    # Gradient storage is released, over two reduced steps or more.
    GRADIENTS_RELEASED = "gradients-released"
    STATES_FUSED = "states-fused"
    # Compute weights of a colour are released, and come back in a reduced step; ...
    WEIGHTS_RELEASED = "weights-released"
    # ... one of them without any gradient.
    RELEASED_WITHOUT_GRADIENT = "released-without-gradient"

    # --- two hops
    NODES_OF_ONE = "nodes-of-one"
    ONE_NODE = "one-node"
    # Two nodes or more, of two ranks or more.
    NODES_OF_SEVERAL = "nodes-of-several"

    # --- clips
    GLOBAL_CLIP = "global-clip"
    ADAPTIVE_WARMUP = "adaptive-warmup"
    # A reduced step after the warm-up.
    ADAPTIVE_CLIP = "adaptive-clip"
    # A clip passes over some parameters, and not over others.
    EXCLUDED_FROM_CLIP = "excluded-from-clip"

    # --- settings
    NESTEROV_OFF = "nesterov-off"
    WEIGHT_DECAY_ON = "weight-decay-on"
    WEIGHT_DECAY_OFF = "weight-decay-off"
    OWN_WEIGHT_DECAY = "own-weight-decay"
    OWN_LR = "own-lr"
    SIMPLE = "simple"
    QUINTIC = "quintic"
    POLAR_EXPRESS = "polar-express"
    AOL = "aol"
    # More steps than a set of two triples or more has.
    COEFFICIENTS_CYCLED = "coefficients-cycled"
    NEWTON_SCHULZ_BF16 = "newton-schulz-bf16"
    NEWTON_SCHULZ_FP32 = "newton-schulz-fp32"
    SCALE_ORIGINAL = "scale-original"
    SCALE_SPECTRAL = "scale-spectral"
    SCALE_MATCH_RMS = "scale-match-rms"

    # Sums of three contributions or more that round.
    SUMS_ROUND = "sums-round"
    WORLD_THREE = "world-three"

    # --- told by the ranks
    # A clip scaled a gradient: a factor other than 1.
    CLIPPING_ACTIVE = "clipping-active"
    # A clip left all gradients as they were.
    CLIPPING_INACTIVE = "clipping-inactive"
    # The adaptive clip scaled a gradient after its warm-up.
    ADAPTIVE_CLIP_ACTIVE = "adaptive-clip-active"
    # A mean that needs more than 8 significant bits: a reduction in bf16 would change it.
    WIDE_REDUCED_VALUE = "wide-reduced-value"


RUNTIME = frozenset(
    {
        MuonSituation.CLIPPING_ACTIVE,
        MuonSituation.CLIPPING_INACTIVE,
        MuonSituation.ADAPTIVE_CLIP_ACTIVE,
        MuonSituation.WIDE_REDUCED_VALUE,
    }
)

GOALS = tuple(situation for situation in MuonSituation if situation is not MuonSituation.WORLD_THREE)

_FEWEST_RANKS: dict[MuonSituation, int] = {
    MuonSituation.RANK_WITHOUT_MATRIX: 2,
    MuonSituation.FLAT_BUFFERS: 2,
    MuonSituation.RANK_WITHOUT_ELEMENT: 2,
    MuonSituation.FLAT_PADDED: 2,
    MuonSituation.PARAMETER_CROSSES_PIECE: 2,
    MuonSituation.UNUSED_ON_SOME_RANKS: 2,
    MuonSituation.NONE_ON_SOME_RANKS: 2,
    MuonSituation.MISSING_ON_SOME_IS_ZERO: 2,
    MuonSituation.RANK_WITHOUT_GRADIENT: 2,
    MuonSituation.NODES_OF_ONE: 2,
    MuonSituation.ONE_NODE: 2,
    MuonSituation.SUBGROUP: 3,
}
_LAYOUTS = {
    MuonSituation.EQUAL_GROUPS: Layout.EQUAL,
    MuonSituation.UNEQUAL_GROUPS: Layout.UNEQUAL,
    MuonSituation.RANK_OUTSIDE: Layout.OUTSIDE,
}
_MANY_MATRICES = frozenset(
    {MuonSituation.OWNER_OF_SEVERAL, MuonSituation.MATRICES_TOGETHER, MuonSituation.MATRICES_APART}
)
_OF_BUFFER = frozenset(
    {
        MuonSituation.MATRICES_TOGETHER,
        MuonSituation.MATRICES_APART,
        MuonSituation.FLAT_BUFFERS,
        MuonSituation.PARAMETER_CROSSES_PIECE,
    }
)


def can_hold(situation: MuonSituation, world: int, bucket: int | None = None, extension: Extension = CONTRACT) -> bool:
    """As :func:`harness.scenario.situations.can_hold`; ``bucket``: elements of a fused buffer, where fixed."""
    if world < _FEWEST_RANKS.get(situation, 1):
        return False
    multiple = multiple_of([world])
    match situation:
        case MuonSituation.WORLD_THREE:
            return world == 3
        case MuonSituation.MIXED_DTYPES:
            return extension.dtypes
        case MuonSituation.WIDE_REDUCED_VALUE:  # of multiples of 3 or more, few means are as large
            return multiple == 1
        case MuonSituation.NODES_OF_SEVERAL:
            return any(world % size == 0 for size in range(2, world))
        case MuonSituation.COLOR_DIVISOR:
            return any(divisor != world for divisor in divisors(world, multiple))
        case MuonSituation.SUBGROUP:
            return any(subgroup(groups, world) for groups in layouts(world, Layout.OUTSIDE, multiple))
    if situation in _LAYOUTS:
        return bool(layouts(world, _LAYOUTS[situation], multiple))
    if situation in _MANY_MATRICES and world > MOST_PARAMETERS - 2:
        return False
    return bucket is None or situation not in _OF_BUFFER


def subgroup(groups: Sequence[Sequence[int]], world: int) -> bool:
    """Whether some ranks, but not all, speak to each other."""
    return any(1 < len(group) < world for group in groups)


def reached(scenario: Scenario) -> frozenset[MuonSituation]:
    """The situations that a scenario is in, as far as they can be told without running it (so none of ``RUNTIME``)."""
    muon = scenario.muon
    if muon is None:
        raise ValueError(f"a scenario of system {scenario.system!r} has no situations of Muon's")
    found = {
        *_of_parameters(scenario, muon),
        *_of_matrices(scenario, muon),
        *_of_flat(scenario, muon),
        *_of_colors(scenario, muon),
        *_of_sharding(scenario, muon),
        *_of_settings(scenario, muon),
        *_of_clip(scenario, muon),
        *_of_changes(scenario),
    }
    for plans in instances(scenario):
        found.update(_of_instance(scenario, muon, plans))
    if scenario.world == 3:
        found.add(MuonSituation.WORLD_THREE)
    return frozenset(found)


def _of_parameters(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    kinds = {mark.muon for mark in muon.marks}
    if len(kinds) > 1:
        yield MuonSituation.BOTH_SETS
    else:
        yield MuonSituation.MATRICES_ALONE if True in kinds else MuonSituation.ELEMENTWISE_ALONE
    for parameter, mark in zip(scenario.parameters, muon.marks, strict=True):
        shown = _shape(parameter, mark) if mark.muon else None
        if shown is not None:
            yield shown
        if not mark.muon and sum(dimension > 1 for dimension in parameter.shape) > 1:
            yield MuonSituation.ELEMENTWISE_MATRIX
        if parameter.numel == 1:
            yield MuonSituation.ONE_ELEMENT_PARAMETER if parameter.shape else MuonSituation.SCALAR_PARAMETER
        if parameter.dtype == "fp32":
            yield MuonSituation.WITHOUT_MASTER
        if mark.lr_scale != 1:
            yield MuonSituation.OWN_LR
        general = muon.settings.weight_decay if mark.muon else scenario.optimizer.weight_decay
        if mark.weight_decay not in (None, general):
            yield MuonSituation.OWN_WEIGHT_DECAY
    if len({parameter.dtype for parameter in scenario.parameters}) > 1:
        yield MuonSituation.MIXED_DTYPES


def _shape(parameter: Parameter, mark: Mark) -> MuonSituation | None:
    """The situation of one matrix, by its shape and its cut."""
    rows, columns = parameter.shape[-2:]
    if parameter.numel > rows * columns:
        return MuonSituation.EXPERTS if mark.split == "none" else MuonSituation.EXPERTS_CUT
    if mark.split == "qkv" and len({*mark.sizes}) > 1:
        return MuonSituation.QKV_UNEQUAL
    if mark.split == "heads" and mark.num_heads > 1:
        return MuonSituation.HEADS
    if mark.split == "gate_up":
        return MuonSituation.GATE_UP
    if mark.split != "none":
        return None
    if rows == columns:
        return MuonSituation.SQUARE_MATRIX if rows > 1 else None
    if rows < columns:
        return MuonSituation.ONE_ROW if rows == 1 else MuonSituation.WIDE_MATRIX
    return MuonSituation.ONE_COLUMN if columns == 1 else MuonSituation.TALL_MATRIX


class _Set(NamedTuple):
    """Parameters that share buffers: elements of each, and ranks of each of their groups."""

    sizes: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.sizes)


def _sets(scenario: Scenario, muon: Muon, *, matrices: bool) -> Iterator[_Set]:
    for color in (None, *range(len(muon.colors))):
        groups = group_sizes(scenario.world, muon, color)
        by_dtype: dict[str, list[int]] = {}
        for index in colored(muon, color):
            if muon.marks[index].muon is matrices:
                parameter = scenario.parameters[index]
                by_dtype.setdefault(parameter.dtype, []).append(parameter.numel)
        for sizes in by_dtype.values():
            yield _Set(tuple(sorted(sizes)), groups)


def _of_matrices(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    bucket, fused = scenario.bucket, muon.sharding.fused
    for each in _sets(scenario, muon, matrices=True):
        by_cost = muon.sharding.owner_rule == "newton_schulz"
        yield MuonSituation.OWNERS_BY_COST if by_cost else MuonSituation.OWNERS_BY_SIZE
        smallest = min(each.groups)
        if len(each.sizes) < smallest:
            yield MuonSituation.RANK_WITHOUT_MATRIX
        if not fused and len(each.sizes) > 1:
            yield MuonSituation.UNFUSED
        if len(each.sizes) > smallest:
            yield MuonSituation.OWNER_OF_SEVERAL
            if fused and each.numel <= bucket:
                yield MuonSituation.MATRICES_TOGETHER
            if fused and sum(each.sizes[:2]) > bucket:
                yield MuonSituation.MATRICES_APART


def _of_flat(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    one_buffer_only = not muon.sharding.fused  # then they have 256 MB
    for each in _sets(scenario, muon, matrices=False):
        for size in each.groups:
            if size < 2:
                continue
            one_buffer = one_buffer_only or each.numel <= scenario.bucket
            if not one_buffer:
                yield MuonSituation.FLAT_BUFFERS
            if each.numel < size:
                yield MuonSituation.RANK_WITHOUT_ELEMENT
            if each.numel % size:
                yield MuonSituation.FLAT_PADDED
            if one_buffer and each.sizes[-1] > -(-each.numel // size):
                yield MuonSituation.PARAMETER_CROSSES_PIECE


def _of_colors(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    if len(muon.colors) > 1:
        yield MuonSituation.TWO_COLORS
    for index, color in enumerate(muon.colors):
        if len({muon.marks[each].muon for each in colored(muon, index)}) < 2:
            continue
        if subgroup(color.groups, scenario.world):
            yield MuonSituation.SUBGROUP
        for situation, layout in _LAYOUTS.items():
            if has(color, scenario.world, layout):
                yield situation
        if color.divisor is not None and any(len(group) != color.divisor for group in color.groups):
            yield MuonSituation.COLOR_DIVISOR


def _of_sharding(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    sharding = muon.sharding
    yield MuonSituation.MEAN_IN_COLLECTIVE if sharding.use_reduce_avg else MuonSituation.MEAN_AFTER_SUM
    if sharding.fuse_optimizer_states:
        yield MuonSituation.STATES_FUSED
    if sharding.two_hop and sharding.local_world_size is not None and scenario.world > 1:
        if sharding.local_world_size == 1:
            yield MuonSituation.NODES_OF_ONE
        elif sharding.local_world_size == scenario.world:
            yield MuonSituation.ONE_NODE
        else:
            yield MuonSituation.NODES_OF_SEVERAL
    if muon.backward == "assign":
        yield MuonSituation.ASSIGNED
    else:
        yield MuonSituation.OVERLAP_ON if sharding.comm_overlap else MuonSituation.OVERLAP_OFF
    if any(mark.main_grad for mark in muon.marks):
        yield MuonSituation.MAIN_GRAD


_NAMED: dict[str, MuonSituation] = {
    "simple": MuonSituation.SIMPLE,
    "quintic": MuonSituation.QUINTIC,
    "polar_express": MuonSituation.POLAR_EXPRESS,
    "aol": MuonSituation.AOL,
    "bf16": MuonSituation.NEWTON_SCHULZ_BF16,
    "fp32": MuonSituation.NEWTON_SCHULZ_FP32,
    "original": MuonSituation.SCALE_ORIGINAL,
    "spectral": MuonSituation.SCALE_SPECTRAL,
    "match_rms_adamw": MuonSituation.SCALE_MATCH_RMS,
}


def _of_settings(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    settings = muon.settings
    if any(mark.muon for mark in muon.marks):
        if settings.ns_steps:
            yield from (_NAMED[name] for name in (settings.coefficients, settings.ns_dtype))
        yield _NAMED[settings.scale]
        if settings.ns_steps > COEFFICIENT_ROWS[settings.coefficients] > 1:
            yield MuonSituation.COEFFICIENTS_CYCLED
        if not settings.nesterov:
            yield MuonSituation.NESTEROV_OFF
        if settings.weight_decay == 0:
            yield MuonSituation.WEIGHT_DECAY_OFF
        elif settings.lr > 0:
            yield MuonSituation.WEIGHT_DECAY_ON
    num_parts = max((len(plan.parts) for plan in steps(scenario)), default=0)
    if scenario.values.domain is Domain.GENERAL and scenario.world * num_parts > 2:
        yield MuonSituation.SUMS_ROUND


def _of_clip(scenario: Scenario, muon: Muon) -> Iterator[MuonSituation]:
    if muon.clip is None:
        return
    if len({mark.need_clip for mark in muon.marks}) > 1:
        yield MuonSituation.EXCLUDED_FROM_CLIP
    if not isinstance(muon.clip, AdaptiveClip):
        yield MuonSituation.GLOBAL_CLIP
        return
    for plans in instances(scenario):
        num_steps = sum(plan.reduced for plan in plans)
        if num_steps and muon.clip.warmup_steps:
            yield MuonSituation.ADAPTIVE_WARMUP
        if num_steps > muon.clip.warmup_steps:
            yield MuonSituation.ADAPTIVE_CLIP


def _of_changes(scenario: Scenario) -> Iterator[MuonSituation]:
    """What changes between two reduced steps with parts."""
    muon = scenario.muon
    lr = None if muon is None else muon.settings.lr
    seen = False
    found: set[MuonSituation] = set()
    for plan in steps(scenario):
        for operation in plan.before:
            if isinstance(operation, Rate):
                if operation.lr != lr:
                    found.add(MuonSituation.LR_CHANGED)
                lr = operation.lr
            elif isinstance(operation, Reload):
                found.add(MuonSituation.RELOADED)
            elif isinstance(operation, Build):
                found = {MuonSituation.REBUILT}
        if plan.reduced and RankStep.of(plan, scenario).num_parts:
            if seen:
                yield from found
            found.clear()
            seen = True


_SAME: dict[Situation, MuonSituation] = {
    Situation.ONE_PART: MuonSituation.ONE_PART,
    Situation.TWO_PARTS: MuonSituation.SEVERAL_PARTS,
    Situation.THREE_PARTS: MuonSituation.SEVERAL_PARTS,
    Situation.PARTS_CHANGE: MuonSituation.PARTS_CHANGE,
    Situation.NONE_ON_SOME_RANKS: MuonSituation.NONE_ON_SOME_RANKS,
    Situation.NONE_IN_FIRST_PART_ONLY: MuonSituation.NONE_IN_FIRST_PART_ONLY,
    Situation.NONE_IN_LAST_PART_ONLY: MuonSituation.NONE_IN_LAST_PART_ONLY,
    Situation.RANK_WITHOUT_GRADIENT: MuonSituation.RANK_WITHOUT_GRADIENT,
    Situation.SKIP_THEN_STEP: MuonSituation.SKIP_THEN_STEP,
    Situation.DISCARD_HELD: MuonSituation.DISCARD_THEN_STEP,
    Situation.DISCARD_SPILLED: MuonSituation.DISCARD_THEN_STEP,
}


def _of_instance(scenario: Scenario, muon: Muon, plans: Sequence[RankStep]) -> Iterator[MuonSituation]:
    """What the steps of one instance show."""
    reduced = [plan for plan in plans if plan.reduced]
    filled = frozenset(index for index, parameter in enumerate(scenario.parameters) if parameter.numel)
    common = [*of_parts(reduced), *of_endings(plans), *(each for plan in reduced for each in of_nones(plan, filled))]
    for situation in {_SAME[situation] for situation in common if situation in _SAME}:
        yield situation
        if situation is MuonSituation.DISCARD_THEN_STEP and muon.sharding.comm_overlap and muon.backward == "autograd":
            yield MuonSituation.DISCARD_OVERLAPPED
    if len(reduced) >= 5:
        yield MuonSituation.FIVE_STEPS
    if muon.sharding.release_gradients and sum(bool(plan.num_parts) for plan in reduced) > 1:
        yield MuonSituation.GRADIENTS_RELEASED
    for plan in reduced:
        yield from _of_windows(muon, plan)
        yield from _of_uses(scenario, muon, plan)
        yield from _of_missing(muon, plan, filled)


def _of_windows(muon: Muon, plan: RankStep) -> Iterator[MuonSituation]:
    announced = len(plan.nones)
    if muon.no_sync:
        if announced > 1:
            yield MuonSituation.NO_SYNC
    elif muon.sharding.comm_overlap and muon.backward == "autograd" and plan.ending is Ending.STEP:
        if announced < muon.sharding.accumulate_steps:
            yield MuonSituation.SHORT_WINDOW
        elif announced > 1:
            yield MuonSituation.FULL_WINDOW


def _of_uses(scenario: Scenario, muon: Muon, plan: RankStep) -> Iterator[MuonSituation]:
    """With overlap: what fires hooks more than once, or not on all ranks."""
    if not muon.sharding.comm_overlap or muon.backward != "autograd":
        return
    for index, mark in enumerate(muon.marks):
        if mark.main_grad:
            continue
        ranks = range(scenario.world)
        groups = (tuple(ranks),) if mark.color is None else muon.colors[mark.color].groups
        for group in groups:
            used = {any(index not in part[rank] for part in plan.nones) for rank in group}
            if len(used) > 1:
                yield MuonSituation.UNUSED_ON_SOME_RANKS
            if True in used and mark.use == "twice":
                yield MuonSituation.USED_TWICE
            if True in used and mark.use == "reentrant":
                yield MuonSituation.REENTRANT


def _of_missing(muon: Muon, plan: RankStep, filled: frozenset[int]) -> Iterator[MuonSituation]:
    """Parameters without any gradient in a step: on all ranks, or on some."""
    missing = [frozenset.intersection(*(part[rank] for part in plan.nones)) & filled for rank in range(len(plan.ranks))]
    everywhere = frozenset.intersection(*missing)
    skips = muon.sharding.skip_missing
    if everywhere and everywhere != filled:
        yield MuonSituation.MISSING_IS_SKIPPED if skips else MuonSituation.MISSING_IS_ZERO
    if skips and any(each - everywhere for each in missing):
        yield MuonSituation.MISSING_ON_SOME_IS_ZERO
    if muon.release_color is None:
        return
    yield MuonSituation.WEIGHTS_RELEASED
    released = {*colored(muon, None if muon.release_color == -1 else muon.release_color)}
    if everywhere & released:
        yield MuonSituation.RELEASED_WITHOUT_GRADIENT
