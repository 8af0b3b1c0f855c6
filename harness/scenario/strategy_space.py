"""A scenario of system ``"strategy"`` as a sequence of choices; see :mod:`harness.scenario.space`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from harness.errors import UsageError
from harness.faults.language import Ending
from harness.scenario import aims, muon_aims, strategy_aims
from harness.scenario.aims import Aim, Clipping, Form, Nones, StepAim
from harness.scenario.model import (
    CONTRACT,
    AdamW,
    Build,
    Clip,
    Domain,
    Extension,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Values,
)
from harness.scenario.muon import MuonSettings
from harness.scenario.muon_check import LARGEST_INTEGER
from harness.scenario.muon_groups import multiple_of
from harness.scenario.space import ENDINGS, Choices, DrawnStep, Fixed, draw_exponent, draw_steps, expected_norm
from harness.scenario.strategy import ROOT, Offer, Place, Reduce, Strategy
from harness.scenario.strategy_aims import Buckets, Rows, Shape, StrategyAim, Treatment, Uses
from harness.scenario.strategy_check import LARGEST_BF16_SUM, trainable
from harness.scenario.strategy_situations import (
    BUCKET_ELEMENT_BYTES,
    ELEMENT_BYTES,
    MOST_PARAMETERS,
    Reduction,
    blocks,
    meshes,
    most_parts,
    reductions,
    shards_of,
)

_T = TypeVar("_T")


class _Frame(NamedTuple):
    """What decides about parameters and steps, so it is drawn before them."""

    world: int
    offer: Offer
    reduction: Reduction
    compute: Reduce
    replicas: int
    converts: bool
    bare_root: bool

    @property
    def shards(self) -> int:
        return shards_of(self.world, Strategy((), self.offer.sharding, self.replicas))

    @property
    def narrow(self) -> bool:
        """Whether a gradient passes through bf16."""
        return "bf16" in {*self.reduction, self.compute}


class _Listed(NamedTuple):
    """A parameter before it has a name."""

    shape: tuple[int, ...]
    place: Place


def draw_strategy(
    choices: Choices, world: int, aim: StrategyAim, seed: int, bucket: int | None, extension: Extension = CONTRACT
) -> Scenario:
    """A scenario.

    Args:
        choices: makes the choices.
        world: number of ranks.
        aim: what is asked of it.
        seed: of its values.
        bucket: fixes the size of a bucket of DDP's (elements).
        extension: what may be drawn; of it only ``strategy`` says anything here.

    Raises:
        UsageError: gradients of so many ranks have no sums that are exact in bf16, in which alone the subject may
            reduce.
    """
    frame = _draw_frame(choices, world, aim, extension.strategy)
    listed = _draw_list(choices, aim, frame)
    parameters = tuple(Parameter(f"p{index}", each.shape, frame.reduction.weights) for index, each in enumerate(listed))
    strategy = _draw_strategy(choices, aim, frame, [each.place for each in listed])
    steps = _draw_steps(choices, aim, frame, parameters, strategy)
    values, multiple = _draw_values(choices, aim, frame, parameters, max(len(step.parts) for step in steps))
    strategy = msgspec.structs.replace(strategy, multiple=multiple)
    optimizer = _draw_optimizer(choices, aim)
    request = _draw_request(choices, aim, frame, parameters, strategy)
    return Scenario(
        world=world,
        seed=seed,
        parameters=parameters,
        values=values,
        optimizer=optimizer,
        operations=(
            Build(request if bucket is None else bucket),
            *_operations(steps, optimizer.lr, lambda parts: _norm(values, parameters, strategy, parts) / world),
        ),
        system="strategy",
        strategy=strategy,
    )


def _draw_frame(choices: Choices, world: int, aim: StrategyAim, offer: Offer) -> _Frame:
    fewest = max(step.parts[0] for step in (aim.common.step, aim.common.last_step, aim.common.rest) if step)
    able = [each for each in reductions(offer) if most_parts(world, each.sums)]
    if not able:
        raise UsageError(
            f"world {world}: sums over {world} ranks of multiples of {multiple_of([world])} need more than the 8 bits "
            "of bf16, in which the subject may reduce; choose worlds with fewer ranks, or a power of two of them"
        )
    asked = [
        each
        for each in able
        if (aim.weights is None or each.weights in aim.weights) and (aim.sums is None or each.sums in aim.sums)
    ] or able
    reduction = choices.of([each for each in asked if most_parts(world, each.sums) >= fewest] or asked)
    replicas = choices.of(_meshes(world, aim, offer))
    converts = choices.of(strategy_aims.QUARTER, aim.converts if offer.plain and offer.sharding != "none" else (False,))
    bare_root = choices.of(strategy_aims.HALF, aim.bare_root if converts else (False,))
    compute = choices.of(_only(offer.compute, aim.compute))
    return _Frame(world, offer, reduction, compute, replicas, converts, bare_root)


def _only(table: Sequence[_T], asked: Collection[_T] | None) -> Sequence[_T]:
    """The entries of a table that are asked for; all where none of them is there."""
    return [entry for entry in table if asked is None or entry in asked] or table


def _meshes(world: int, aim: StrategyAim, offer: Offer) -> list[int]:
    """The numbers of replicas that are asked for, of those that there may be."""
    found = list(meshes(world, offer))
    asked = [
        replicas
        for replicas in found
        if aim.replicas in (None, replicas)
        and (not aim.sharded or replicas < world)
        and (not aim.two_level or replicas > 1)
    ]
    return asked or found


# --- parameters -------------------------------------------------------------------------------------------------------


def _draw_list(choices: Choices, aim: StrategyAim, frame: _Frame) -> list[_Listed]:
    bearers = list(aim.bearers)
    if aim.num_bearers is not None:
        bearers += bearers[-1:] * (aim.num_bearers(frame.world) - len(bearers))
    num_blocks = choices.of(strategy_aims.NUM_BLOCKS, aim.num_blocks)
    # The first of the others is dedicated where one has to be, and none of the bearers is.
    marked = frame.offer.dedicated and not any(each == (Treatment.DEDICATED,) for each in aim.treat)
    fewest = max(len(bearers) + marked, num_blocks + aim.in_root)
    count = choices.count(strategy_aims.NUM_PARAMETERS, fewest, MOST_PARAMETERS)
    root_bearer = len(bearers) - 1 if aim.in_root else None
    listed: list[_Listed] = []
    num_inside = 0  # those before it that are in a block for certain
    for index in range(count):
        bearer = index if index < len(bearers) else None
        mark = marked and index == len(bearers)
        if index == root_bearer:
            allowed = (ROOT, ROOT)
        elif num_inside < num_blocks:
            allowed = (num_inside, num_inside)
        else:
            allowed = (ROOT if bearer is None and not mark else 0, num_blocks - 1)
        only = (Shape.MATRIX,) if mark else aim.others if bearer is None else bearers[bearer]
        treated = (Treatment.DEDICATED,) if mark else aim.treated(bearer)
        narrowed = functools.partial(
            _draw_parameter, aim=aim, frame=frame, bearer=bearer, only=only, treated=treated, allowed=allowed
        )
        listed.append(choices.group(narrowed))
        num_inside += index != root_bearer
    turn = choices.number(0, count - 1)
    listed = _trained(listed)
    return listed[turn:] + listed[:turn]


def _trained(listed: list[_Listed]) -> list[_Listed]:
    """With one that takes a gradient, if there is none: the last, of which no goal asks that it is frozen."""
    if not all(each.place.frozen for each in listed):
        return listed
    *others, last = listed
    return [*others, last._replace(place=msgspec.structs.replace(last.place, frozen=False))]


def _draw_parameter(
    choices: Choices,
    *,
    aim: StrategyAim,
    frame: _Frame,
    bearer: int | None,
    only: Collection[Shape] | None,
    treated: Collection[Treatment] | None,
    allowed: tuple[int, int],
) -> _Listed:
    """``allowed``: the blocks, from the first to the last, in which it may be; -1: the root."""
    shape = choices.of(strategy_aims.SHAPES, only)
    rows = choices.of(strategy_aims.ROWS, aim.rows if bearer == 0 else None)
    side = choices.of(strategy_aims.SIDES)
    sides = [choices.number(2, side) for _ in range(3)]
    more, rest = choices.number(1, 2), choices.number(1, max(1, frame.shards - 1))
    if rows is not Rows.ANY and frame.shards > 1:
        sides[0] = rest if rows is Rows.SHORT else more * frame.shards + rest
    if bearer == 0 and aim.long:
        sides = [8, max(6, sides[1]), 2]
    dimensions = {
        Shape.ONE: (1,) * more,
        Shape.VECTOR: (sides[0],),
        Shape.MATRIX: (sides[0], sides[1]),
        Shape.STACK: (sides[0], sides[1], sides[2]),
    }[shape]
    block = choices.number(*allowed)
    possible = [each for each in strategy_aims.TREATMENTS if _possible(each, frame)]
    treatment = choices.of(possible, treated if treated is None else [each for each in possible if each in treated])
    if treatment is Treatment.DEDICATED and (shape is not Shape.MATRIX or (block == ROOT and frame.bare_root)):
        treatment = Treatment.NONE
    place = Place(
        block=block,
        frozen=treatment is Treatment.FROZEN,
        plain=treatment is Treatment.PLAIN or (block == ROOT and frame.bare_root),
        tied=treatment is Treatment.TIED,
        dedicated=treatment is Treatment.DEDICATED,
    )
    return _Listed(dimensions, place)


def _possible(treatment: Treatment, frame: _Frame) -> bool:
    offer = frame.offer
    return {
        Treatment.NONE: True,
        Treatment.TIED: offer.tied,
        Treatment.FROZEN: True,
        Treatment.PLAIN: frame.converts,
        Treatment.DEDICATED: offer.dedicated and offer.sharding != "none",
    }[treatment]


# --- the strategy -----------------------------------------------------------------------------------------------------


def _draw_strategy(choices: Choices, aim: StrategyAim, frame: _Frame, places: Sequence[Place]) -> Strategy:
    """All of it but the multiple of its values."""
    offer, shards = frame.offer, frame.offer.sharding != "none"
    takes = {"deferred": offer.deferred, "flush": offer.flush}
    accumulations = [each for each in strategy_aims.ACCUMULATIONS if takes.get(each, True)]
    accumulation = choices.of(accumulations, aim.accumulation and _only(accumulations, aim.accumulation))
    offload = choices.of(strategy_aims.QUARTER, aim.offload if offer.offload and shards else (False,))
    unequal = choices.of(strategy_aims.QUARTER, aim.unequal_start if offer.unequal_start else (False,))
    settings = MuonSettings(
        lr=choices.of(strategy_aims.MUON_LRS),
        beta=choices.of(strategy_aims.MUON_BETAS),
        nesterov=not choices.of(strategy_aims.QUARTER),
        weight_decay=choices.of(aims.DECAYS),
        ns_steps=choices.of(strategy_aims.NS_STEPS),
        coefficients=choices.of(muon_aims.COEFFICIENTS),
        ns_dtype=choices.of(muon_aims.NS_DTYPES),
        scale=choices.of(muon_aims.SCALES),
    )
    return Strategy(
        places=tuple(places),
        sharding=offer.sharding,
        replicas=frame.replicas,
        reduce=frame.reduction.sums,
        compute=frame.compute,
        accumulation=accumulation,
        offload=offload,
        converts=frame.converts,
        bare_root=frame.bare_root,
        unequal_start=unequal,
        muon=settings if any(place.dedicated for place in places) else MuonSettings(),
    )


# --- steps ------------------------------------------------------------------------------------------------------------


def _draw_steps(
    choices: Choices, aim: StrategyAim, frame: _Frame, parameters: Sequence[Parameter], strategy: Strategy
) -> list[DrawnStep]:
    """The steps as other systems have them, with as many parts as sums have room for; each rank uses something."""
    most = most_parts(frame.world, frame.reduction.sums)

    def narrowed(step: StepAim) -> StepAim:
        parts = (min(step.parts[0], most), min(step.parts[1], most))
        nones = step.nones if frame.offer.unused else Nones.NOTHING
        plain = replace(step, parts=parts, nones=nones, discard=(False,), lie=(False,), first_is_lie=(False,))
        return replace(plain, load=(False,), rebuild=(False,))

    common: Aim = aim.common
    step, last_step = (each and narrowed(each) for each in (common.step, common.last_step))
    moving = trainable(strategy)
    # Of what takes a gradient alone: what a rank does not use is told by its place among these.
    fixed = Fixed(frame.world, tuple(parameters[index] for index in moving), None, 1, CONTRACT)
    drawn = draw_steps(choices, fixed, replace(common, step=step, last_step=last_step, rest=narrowed(common.rest)))
    named = [_renamed(each, moving) for each in drawn]
    chosen = choices.of(strategy_aims.USES, aim.uses if common.step is None or aim.uses else (Uses.ALL,))
    picks = [choices.number(0, 11) for _ in range(3)]
    at = 0 if aim.uses is not None else picks[2] % len(named)
    if frame.offer.unused:
        named[at] = _without_some(named[at], chosen, strategy, picks)
    return [each._replace(parts=tuple(_used(part, moving) for part in each.parts)) for each in named]


def _renamed(step: DrawnStep, moving: Sequence[int]) -> DrawnStep:
    return step._replace(
        parts=tuple(
            msgspec.structs.replace(part, none=tuple(tuple(moving[at] for at in none) for none in part.none))
            for part in step.parts
        )
    )


def _without_some(step: DrawnStep, uses: Uses, strategy: Strategy, picks: Sequence[int]) -> DrawnStep:
    """The step in which what ``uses`` says is not used; as it was where there is nothing to leave out."""
    moving = trainable(strategy)
    inside = [each for each in blocks(strategy).values() if len(each) < len(moving)]
    parts = list(step.parts)
    world = len(parts[0].none)
    if uses in (Uses.WITHOUT_BLOCK, Uses.WITHOUT_BLOCK_ON_SOME) and inside:
        block, at = inside[picks[0] % len(inside)], picks[1] % len(parts)
        some = uses is Uses.WITHOUT_BLOCK_ON_SOME and world > 1
        without = [rank for rank in range(world) if not some or rank % 2 == picks[2] % 2]
        parts[at] = _changed(parts[at], block, without, (), ())
        if some:
            with_it = [rank for rank in range(world) if rank not in without]
            parts[at] = _changed(parts[at], (), (), block, with_it)
    elif uses in (Uses.EARLIER, Uses.LAST) and len(moving) > 1 and len(parts) > 1:
        index, everyone = moving[picks[0] % len(moving)], range(world)
        user = picks[1] % world
        unused = parts[-1:] if uses is Uses.EARLIER else parts[:-1]
        used = parts[:-1] if uses is Uses.EARLIER else parts[-1:]
        unused = [_changed(part, (index,), everyone, (), ()) for part in unused]
        used[0] = _changed(used[0], (), (), (index,), (user,))
        parts = [*used, *unused] if uses is Uses.EARLIER else [*unused, *used]
    return step._replace(parts=tuple(parts))


def _changed(
    part: Part, unused: Collection[int], without: Collection[int], used: Collection[int], with_it: Collection[int]
) -> Part:
    """Parameters ``unused`` on ranks ``without``, and ``used`` on ranks ``with_it``."""
    none = [
        ({*missing} | ({*unused} if rank in without else set())) - ({*used} if rank in with_it else set())
        for rank, missing in enumerate(part.none)
    ]
    return msgspec.structs.replace(part, none=tuple(tuple(sorted(each)) for each in none))


def _used(part: Part, moving: Sequence[int]) -> Part:
    """The part in which each rank uses something: where it would not, one of what takes a gradient.

    That is one which another rank uses too, where there is one, so that what all ranks leave out stays left out.
    """
    needed = {*moving}
    anywhere = [index for index in moving if any(index not in none for none in part.none)] or list(moving)
    none = [
        tuple(index for index in missing if index != anywhere[0]) if needed <= {*missing} else missing
        for missing in part.none
    ]
    return msgspec.structs.replace(part, none=tuple(none))


def _operations(
    steps: Sequence[DrawnStep], lr: float, norm: Callable[[Sequence[Part]], float]
) -> tuple[Operation, ...]:
    """All but the build; ``norm``: to be expected of a step's mean gradient."""
    operations: list[Operation] = []
    rate = aims.LRS.index(lr)
    for step in steps:
        if step.before.shift:
            rate = (rate + step.before.shift) % len(aims.LRS)
            operations.append(Rate(aims.LRS[rate]))
        operations.extend(step.parts)
        if step.clipping is not Clipping.NONE:
            # The coefficient has 1e-6 added to the norm: without it here, tiny norms would always be clipped.
            operations.append(Clip(step.factor * (norm(step.parts) + 1e-6)))
        operations.append(ENDINGS[Ending.SKIP if step.ending is Ending.SKIP else Ending.STEP])
    return tuple(operations)


def _norm(values: Values, parameters: Sequence[Parameter], strategy: Strategy, parts: Sequence[Part]) -> float:
    """The expected norm of a step's summed gradient."""
    frozen = [index for index, place in enumerate(strategy.places) if place.frozen]
    moving = [
        msgspec.structs.replace(part, none=tuple(tuple({*none, *frozen}) for none in part.none)) for part in parts
    ]
    return strategy.multiple * expected_norm(values, parameters, moving)


# --- values and settings ----------------------------------------------------------------------------------------------


def _draw_values(
    choices: Choices, aim: StrategyAim, frame: _Frame, parameters: Sequence[Parameter], num_parts: int
) -> tuple[Values, int]:
    """The values, and what their integers are multiplied by so that means are exact; ``num_parts``: the most."""
    rounds = frame.offer.rounds and frame.offer.sharding != "any"
    domain = choices.of(strategy_aims.DOMAINS, aim.common.domain)
    max_k = choices.of(aims.MAX_KS, aim.common.max_k)
    form = choices.of(strategy_aims.FORMS, aim.common.form)
    spread = choices.of(aims.SPREADS[form], aim.common.spread)
    low, high = strategy_aims.EXPONENTS
    if domain is Domain.GENERAL and rounds:
        exponent = _exponent(choices, low, high - spread)
        return Values(domain, max_k, exponent, spread, cancel=form is Form.CANCELLING), 1
    exponent = _exponent(choices, low, high)
    # Of multiples of the whole world fewer ranks can have the same means (strategy_relations).
    whole = choices.of(strategy_aims.HALF, (False,) if aim.common.max_k is not None else None)
    multiple = multiple_of([frame.world])
    if whole and _largest_k(frame, num_parts, frame.world) >= 1:
        multiple = frame.world
    max_k = min(max_k, _largest_k(frame, num_parts, multiple))
    numel = sum(parameter.numel for parameter in parameters)
    most = math.isqrt((2**24 - 1) // numel) // (frame.world * num_parts * multiple)
    if domain is Domain.NORM_EXACT and most >= 1:
        return Values(domain, min(max_k, most), exponent), multiple
    return Values(Domain.EXACT, max_k, exponent), multiple


def _largest_k(frame: _Frame, num_parts: int, multiple: int) -> int:
    """The largest integer of whose multiples gradients and their sums are exact; 0: there is none."""
    num_contributions = frame.world * num_parts * multiple
    limits = [(2**24 - 1) // num_contributions]
    if frame.narrow:
        limits.append(LARGEST_INTEGER // multiple)
    if frame.reduction.sums == "bf16":
        limits.append(LARGEST_BF16_SUM // num_contributions)
    return min(limits)


def _exponent(choices: Choices, low: int, high: int) -> int:
    """One from ``low`` to ``high``, mostly an everyday one."""
    return min(max(draw_exponent(choices, low, max(low, high)), low), high)


def _draw_optimizer(choices: Choices, aim: StrategyAim) -> AdamW:
    foreach = choices.of(strategy_aims.HALF, aim.foreach)
    lr, weight_decay = choices.of(aims.LRS, aim.common.lr), choices.of(aims.DECAYS, aim.common.decay)
    beta1, beta2 = choices.of(aims.BETAS)
    return AdamW(lr, beta1, beta2, choices.of(aims.EPS), weight_decay, foreach)


def _draw_request(
    choices: Choices, aim: StrategyAim, frame: _Frame, parameters: Sequence[Parameter], strategy: Strategy
) -> int:
    """Elements of a bucket; of a subject that has none as many as there are."""
    kind, pick = choices.of(strategy_aims.BUCKETS, aim.buckets), choices.number(0, 999)
    numel = sum(parameter.numel for parameter in parameters)
    if frame.offer.sharding != "none" or not frame.offer.configurable:
        return numel
    sizes = [parameters[index].numel * ELEMENT_BYTES[parameters[index].dtype] for index in trainable(strategy)]
    if kind is Buckets.ONE:
        return numel
    most = numel if kind is Buckets.ANY else (sum(sizes) - max(sizes)) // BUCKET_ELEMENT_BYTES
    return 1 + pick % max(1, most)
