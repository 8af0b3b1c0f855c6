"""A scenario of system ``"muon"`` as a sequence of choices; see :mod:`harness.scenario.space`."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import msgspec

from harness.faults.language import Ending
from harness.scenario import aims, muon_aims
from harness.scenario.aims import Aim, Form, StepAim
from harness.scenario.model import (
    CONTRACT,
    AdamW,
    Build,
    Domain,
    Extension,
    Operation,
    Parameter,
    Part,
    Rate,
    Reload,
    Scenario,
    Values,
)
from harness.scenario.muon import AdaptiveClip, Color, GlobalClip, Mark, Muon, MuonSettings, Sharding
from harness.scenario.muon_aims import Buffers, ClipKind, Hop, MuonAim, Shape
from harness.scenario.muon_check import divisors as divisors_of
from harness.scenario.muon_groups import Layout, divisors, layouts, multiple_of
from harness.scenario.muon_situations import MOST_PARAMETERS, subgroup
from harness.scenario.space import ENDINGS, Choices, DrawnStep, Fixed, draw_exponent, draw_steps, expected_norm

_T = TypeVar("_T")

_MOST_SIZE = 2000  # of a buffer, as far as a rebuild asks for another one
_FP16_EXPONENTS = (-23, 4)  # half of each is one too; sums stay far from its largest


class _Flags(NamedTuple):
    """What decides about parameters and steps, so it is drawn before them."""

    assigned: bool
    overlap: bool
    skip_missing: bool


class _Listed(NamedTuple):
    """A parameter and its mark, whose colour is the wanted one, if there will be so many."""

    shape: tuple[int, ...]
    mark: Mark


def draw_muon(
    choices: Choices, world: int, aim: MuonAim, seed: int, bucket: int | None, extension: Extension = CONTRACT
) -> Scenario:
    """A scenario.

    Args:
        choices: makes the choices.
        world: number of ranks.
        aim: what is asked of it.
        seed: of its values.
        bucket: fixes the size of a fused buffer (elements).
        extension: what beyond the contract's space may be drawn; of it only ``dtypes`` says anything here.
    """
    flags = _Flags(
        choices.of(muon_aims.QUARTER, aim.assigned),
        choices.of(muon_aims.OVERLAPS, aim.overlap),
        choices.of(muon_aims.QUARTER, aim.skip_missing),
    )
    listed = _draw_list(choices, world, aim, flags)
    parameters = _typed(choices, [each.shape for each in listed], aim, extension)
    marks, colors = _draw_colors(choices, world, aim, [each.mark for each in listed])
    request, fused = _draw_request(choices, parameters, aim, bucket)
    steps = _draw_steps(choices, Fixed(world, parameters, bucket, min(request, _MOST_SIZE), CONTRACT), aim)
    most_parts = max(len(step.parts) for step in steps)
    sharding, no_sync = _draw_sharding(choices, world, aim, flags, most_parts)
    drawn = Muon(
        marks=marks,
        settings=_draw_settings(choices, aim),
        sharding=msgspec.structs.replace(sharding, fused=fused),
        colors=colors,
        backward="assign" if flags.assigned else "autograd",
        no_sync=no_sync,
        release_color=_draw_release(choices, parameters, marks, aim),
    )
    multiple = multiple_of(divisors_of(world, drawn).values())
    if any(mark.use == "reentrant" for mark in marks) and aim.common.domain is None:
        aim = replace(aim, common=replace(aim.common, domain=aims.EXACT_DOMAINS))  # see muon_check
    values, multiple = _draw_values(choices, world, parameters, most_parts, multiple, aim)
    clip = _draw_clip(choices, world, parameters, marks, steps, values, multiple, aim)
    return Scenario(
        world=world,
        seed=seed,
        parameters=parameters,
        values=values,
        optimizer=_draw_optimizer(choices),
        operations=_operations(request, steps, drawn.settings.lr, _draw_reloads(choices, len(steps), aim)),
        system="muon",
        muon=msgspec.structs.replace(drawn, multiple=multiple, clip=clip),
    )


# --- parameters -------------------------------------------------------------------------------------------------------


def _draw_list(choices: Choices, world: int, aim: MuonAim, flags: _Flags) -> list[_Listed]:
    bearers = list(aim.bearers)
    if aim.num_bearers is not None:
        bearers += bearers[-1:] * (aim.num_bearers(world) - len(bearers))
    first = choices.number(0, 2, (0, min(2, MOST_PARAMETERS - len(bearers))))
    count = choices.count(muon_aims.NUM_PARAMETERS, max(1, first + len(bearers)), MOST_PARAMETERS)
    listed: list[_Listed] = []
    for index in range(count):
        bearer = index - first if 0 <= index - first < len(bearers) else None
        only = aim.others if bearer is None else bearers[bearer]
        narrowed = functools.partial(_draw_parameter, world=world, aim=aim, bearer=bearer, only=only, flags=flags)
        listed.append(choices.group(narrowed))
    return listed


def _draw_parameter(
    choices: Choices, *, world: int, aim: MuonAim, bearer: int | None, only: Collection[Shape] | None, flags: _Flags
) -> _Listed:
    first = bearer == 0
    shape = choices.of(muon_aims.SHAPES, only)
    side = choices.of(muon_aims.SIDES)
    longest = max(side, 8)
    lengths = [choices.number(2, longest, (8, longest) if first and aim.long else (2, side)) for _ in range(2)]
    small = [choices.number(1, 4) for _ in range(3)]
    dimensions, cut = _shape(shape, lengths, small)
    if first and aim.ragged:
        dimensions = (world * small[0] + choices.number(1, world - 1),)
    general = aim.common.domain == (Domain.GENERAL,)
    once = flags.assigned or general or (first and aim.main_grad == (True,))
    used = choices.of(muon_aims.USES, muon_aims.USES[:1] if once else aim.use if first else None)
    main_grad: Collection[bool] | None = aim.main_grad if first or aim.main_grad == (False,) else None
    if flags.skip_missing or used != "once":
        main_grad = (False,)
    need_clip = aim.need_clip if first else (True,) if bearer is not None and aim.need_clip == (False,) else None
    mark = Mark(
        muon=shape >= Shape.SQUARE,
        lr_scale=choices.of(muon_aims.LR_SCALES, aim.lr_scale if first else None),
        weight_decay=choices.of(muon_aims.OWN_DECAYS, aim.own_decay if first else None),
        need_clip=choices.of(muon_aims.NEED_CLIPS, need_clip),
        color=_wanted_color(choices, aim, bearer),
        use=used,
        main_grad=choices.of(muon_aims.MAIN_GRADS, main_grad),
        **cut,
    )
    return _Listed(dimensions, mark)


def _shape(shape: Shape, sides: Sequence[int], small: Sequence[int]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Dimensions and cut of a parameter, from two sides of 2 or more and three numbers from 1 to 4."""
    (one, other), (few, some, more) = sides, small
    stack = few + 1
    match shape:
        case Shape.BIAS:
            return (one,), {}
        case Shape.ONE:
            return (1,) * min(few, 2), {}
        case Shape.SCALAR:
            return (), {}
        case Shape.EMBEDDING:
            return (one, other) if few < 4 else (stack, one, 2), {}
        case Shape.SQUARE:
            return (one, one), {}
        case Shape.WIDE:
            return (one, one + other), {}
        case Shape.TALL:
            return (one + other, one), {}
        case Shape.ONE_ROW:
            return (1, one), {}
        case Shape.ONE_COLUMN:
            return (one, 1), {}
        case Shape.QKV:
            qkv = (one + few, few, few if some < 3 else few + 1)
            return (sum(qkv), other), {"split": "qkv", "sizes": qkv}
        case Shape.HEADS:
            return (stack * some, other), {"split": "heads", "num_heads": stack}
        case Shape.GATE_UP:
            halves = few == 4
            rows = 2 * one if halves else one + some
            return (rows, other), {"split": "gate_up", "sizes": () if halves else (one, some)}
        case Shape.EXPERTS:
            return (stack, one, other), {}
        case Shape.CUT_EXPERTS:
            if more > 2:
                return (2, stack * some, other), {"split": "heads", "num_heads": stack}
            return (2, one + some, other), {"split": "gate_up", "sizes": (one, some)}


def _wanted_color(choices: Choices, aim: MuonAim, bearer: int | None) -> int | None:
    """Its colour if there are so many; half of the parameters have none."""
    drawn = choices.number(0, 3)
    if bearer is not None and bearer < len(aim.color):
        return aim.color[bearer]
    return drawn - 2 if drawn >= 2 else None


def _typed(
    choices: Choices, shapes: Sequence[tuple[int, ...]], aim: MuonAim, extension: Extension
) -> tuple[Parameter, ...]:
    allowed = aim.dtypes if aim.dtypes is not None else aim.common.dtypes
    if allowed is None and not extension.dtypes:
        allowed = muon_aims.OF_ONE_DTYPE
    dtypes = choices.of(muon_aims.DTYPES, allowed)
    return tuple(Parameter(f"p{index}", shape, dtypes[index % len(dtypes)]) for index, shape in enumerate(shapes))


# --- colours ----------------------------------------------------------------------------------------------------------


def _draw_colors(
    choices: Choices, world: int, aim: MuonAim, marks: Sequence[Mark]
) -> tuple[tuple[Mark, ...], tuple[Color, ...]]:
    """The marks with the colours that there are, and these."""
    count = choices.of(muon_aims.NUM_COLORS, aim.num_colors)
    wanted = [mark.color if mark.color is not None and mark.color < count else None for mark in marks]
    kept = sorted({color for color in wanted if color is not None})
    multiple = multiple_of([world])
    colors: list[Color] = []
    for number in range(len(kept)):
        color = _draw_color(choices, world, aim if number == 0 else muon_aims.MUON_FREE, multiple)
        sizes: list[Fraction | int] = [*map(len, color.groups)]
        multiple = math.lcm(multiple, multiple_of(sizes if color.divisor is None else [Fraction(color.divisor)]))
        colors.append(color)
    places: dict[int | None, int | None] = {color: place for place, color in enumerate(kept)} | {None: None}
    recolored = zip(marks, wanted, strict=True)
    return tuple(msgspec.structs.replace(mark, color=places[color]) for mark, color in recolored), tuple(colors)


def _draw_color(choices: Choices, world: int, aim: MuonAim, multiple: int) -> Color:
    layout = choices.of(muon_aims.LAYOUTS, aim.layout)
    found = [
        groups for groups in layouts(world, layout, multiple) if not aim.subgroup or subgroup(groups, world)
    ] or layouts(world, Layout.ALL, multiple)
    groups = found[choices.number(0, len(found) - 1)]
    others = [each for each in divisors(world, multiple) if each not in {*map(len, groups)}]
    divided = choices.of(muon_aims.DIVIDED, aim.divided)
    return Color(groups, choices.of(others) if divided and others else None)


# --- buffers and steps ------------------------------------------------------------------------------------------------


def _draw_request(
    choices: Choices, parameters: Sequence[Parameter], aim: MuonAim, bucket: int | None
) -> tuple[int, bool]:
    """Elements of a fused buffer, and whether matrices are fused."""
    kind = choices.of(muon_aims.BUFFERS, aim.buffers)
    any_size = choices.number(1, choices.of(muon_aims.REQUESTS))
    sizes = sorted(parameter.numel for parameter in parameters)
    numel, two = sum(sizes), sum(sizes[:2])
    if kind is Buffers.EACH and len(sizes) > 1:
        any_size = choices.number(1, two - 1)
    elif kind is Buffers.BETWEEN and two < numel:
        any_size = choices.number(two, numel - 1)
    elif kind is Buffers.ALL:
        any_size = numel + choices.number(0, 100)
    return (any_size if bucket is None else bucket), kind is not Buffers.UNFUSED


def _draw_steps(choices: Choices, fixed: Fixed, aim: MuonAim) -> tuple[DrawnStep, ...]:
    """The steps as the other system has them, without clips and announcements of its kind."""

    def narrowed(step: StepAim) -> StepAim:
        return replace(step, clip=(aims.Clipping.NONE,), lie=(False,), first_is_lie=(False,))

    common: Aim = aim.common
    step, last_step = (each and narrowed(each) for each in (common.step, common.last_step))
    return draw_steps(choices, fixed, replace(common, step=step, last_step=last_step, rest=narrowed(common.rest)))


def _draw_reloads(choices: Choices, num_steps: int, aim: MuonAim) -> list[bool]:
    """Before which steps the state is saved and loaded; never before the first."""
    drawn = [choices.of(muon_aims.EIGHTH, aim.reload if index == num_steps - 1 else None) for index in range(num_steps)]
    return [index > 0 and reload for index, reload in enumerate(drawn)]


def _operations(request: int, steps: Sequence[DrawnStep], lr: float, reloads: Sequence[bool]) -> tuple[Operation, ...]:
    operations: list[Operation] = [Build(request)]
    rate = muon_aims.LRS.index(lr)
    for step, reload in zip(steps, reloads, strict=True):
        if step.before.bucket is not None:
            operations.append(Build(step.before.bucket))
        if reload:
            operations.append(Reload())
        if step.before.shift:
            rate = (rate + step.before.shift) % len(muon_aims.LRS)
            operations.append(Rate(muon_aims.LRS[rate]))
        operations.extend(step.parts)
        operations.append(ENDINGS[step.ending])
    return tuple(operations)


# --- sharding and settings --------------------------------------------------------------------------------------------


def _draw_sharding(choices: Choices, world: int, aim: MuonAim, flags: _Flags, most_parts: int) -> tuple[Sharding, bool]:
    """The configuration, and whether parts but the last run in ``no_sync()``."""
    by_cost = choices.of(muon_aims.OWNERS_BY_COST, aim.by_cost)
    hop = choices.of(muon_aims.HOPS, aim.hop)
    middle = [size for size in range(2, world) if world % size == 0]
    nodes = {Hop.ONES: [1], Hop.ONE: [world], Hop.SEVERAL: middle}.get(hop, [])
    node = choices.number(0, 11)
    no_sync = choices.of(muon_aims.QUARTER, aim.no_sync)
    sharding = Sharding(
        owner_rule="newton_schulz" if by_cost else "numel",
        owner_cap=choices.of(muon_aims.CAPS),
        use_reduce_avg=choices.of(muon_aims.HALF, aim.reduce_avg),
        comm_overlap=flags.overlap,
        accumulate_steps=most_parts + choices.of(muon_aims.WINDOWS, aim.window),
        release_gradients=choices.of(muon_aims.QUARTER, aim.release_gradients),
        fuse_optimizer_states=choices.of(muon_aims.QUARTER, aim.fuse_states),
        two_hop=bool(nodes),
        local_world_size=nodes[node % len(nodes)] if nodes else None,
        skip_missing=flags.skip_missing,
    )
    return sharding, no_sync


def _draw_release(choices: Choices, parameters: Sequence[Parameter], marks: Sequence[Mark], aim: MuonAim) -> int | None:
    """A colour whose compute weights are released; -1: the default group. None: of none."""
    release, pick = choices.of(muon_aims.EIGHTH, aim.release), choices.number(0, 2)
    with_masters: dict[int, bool] = {}
    for parameter, mark in zip(parameters, marks, strict=True):
        color = -1 if mark.color is None else mark.color
        with_masters[color] = with_masters.get(color, True) and parameter.dtype != "fp32"
    colors = sorted(color for color, all_of_it in with_masters.items() if all_of_it)
    return colors[pick % len(colors)] if release and colors else None


def _draw_settings(choices: Choices, aim: MuonAim) -> MuonSettings:
    return MuonSettings(
        lr=choices.of(muon_aims.LRS, aim.common.lr),
        beta=choices.of(muon_aims.BETAS),
        nesterov=not choices.of(
            muon_aims.QUARTER, None if aim.nesterov is None else [not each for each in aim.nesterov]
        ),
        weight_decay=choices.of(aims.DECAYS, aim.common.decay),
        ns_steps=choices.of(muon_aims.NS_STEPS, aim.ns_steps),
        ns_eps=choices.of(muon_aims.NS_EPS),
        coefficients=choices.of(muon_aims.COEFFICIENTS, aim.coefficients),
        ns_dtype=choices.of(muon_aims.NS_DTYPES, aim.ns_dtype),
        scale=choices.of(muon_aims.SCALES, aim.scale),
    )


def _draw_optimizer(choices: Choices) -> AdamW:
    """Settings of the element-wise set."""
    lr, weight_decay = choices.of(aims.LRS), choices.of(aims.DECAYS)
    beta1, beta2 = choices.of(aims.BETAS)
    return AdamW(lr, beta1, beta2, choices.of(aims.EPS), weight_decay)


def _draw_clip(
    choices: Choices,
    world: int,
    parameters: Sequence[Parameter],
    marks: Sequence[Mark],
    steps: Sequence[DrawnStep],
    values: Values,
    multiple: int,
    aim: MuonAim,
) -> GlobalClip | AdaptiveClip | None:
    kind = choices.of(muon_aims.CLIPS, aim.clip)
    ratio, beta = choices.of(muon_aims.RATIOS, aim.ratio), choices.of(muon_aims.CLIP_BETAS)
    warmup = choices.of(muon_aims.WARMUPS, aim.warmup)
    factor = choices.of((0, 1, 2, 3))
    if kind is ClipKind.NONE:
        return None
    if kind is ClipKind.ADAPTIVE:
        return AdaptiveClip(ratio, warmup, beta)
    excluded = tuple(index for index, mark in enumerate(marks) if not mark.need_clip)
    first = next(step.parts for step in steps if step.ending is Ending.STEP)
    norm = expected_norm(values, parameters, [_without(part, excluded) for part in first])
    # The coefficient has 1e-6 added to the norm: without it here, tiny norms would always be clipped.
    return GlobalClip(muon_aims.FACTORS[kind][factor] * (norm * multiple / world + 1e-6))


def _without(part: Part, indices: Sequence[int]) -> Part:
    """The part in which these parameters have no gradient."""
    return msgspec.structs.replace(part, none=tuple(tuple({*none, *indices}) for none in part.none))


def _draw_values(
    choices: Choices, world: int, parameters: Sequence[Parameter], most_parts: int, multiple: int, aim: MuonAim
) -> tuple[Values, int]:
    """The values, and what their integers are multiplied by, given what exact means need."""
    domain = choices.of(muon_aims.DOMAINS, aim.common.domain)
    max_k = choices.of(aims.MAX_KS, aim.common.max_k)
    form = choices.of(muon_aims.FORMS, aim.common.form)
    spread = choices.of(aims.SPREADS[form], aim.common.spread)
    low, high = muon_aims.EXPONENTS
    if any(parameter.dtype == "fp16" for parameter in parameters):
        low, high = _FP16_EXPONENTS
        spread = min(spread, high - low)
    if domain is Domain.GENERAL:
        exponent = _exponent(choices, low, high - spread)
        return Values(domain, max_k, exponent, spread, cancel=form is Form.CANCELLING), 1
    exponent = _exponent(choices, low, high)
    num_contributions = world * most_parts * multiple
    max_k = min(max_k, 255 // multiple, (2**24 - 1) // num_contributions)
    numel = sum(parameter.numel for parameter in parameters)
    most = math.isqrt((2**24 - 1) // numel) // num_contributions
    if domain is Domain.NORM_EXACT and most >= 1:
        return Values(domain, min(max_k, most), exponent), multiple
    return Values(Domain.EXACT, max_k, exponent), multiple


def _exponent(choices: Choices, low: int, high: int) -> int:
    """One from ``low`` to ``high``, mostly an everyday one."""
    return min(max(draw_exponent(choices, low, max(low, high)), low), high)
