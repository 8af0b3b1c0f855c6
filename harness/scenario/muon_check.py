"""What is wrong with the meaning of a scenario of system ``"muon"``: the part of ``model.check`` that it alone has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from harness.scenario.muon import Color, Mark, Muon

if TYPE_CHECKING:
    from harness.scenario.model import Parameter, Scenario

LARGEST_INTEGER: Final = 255
"""Of a gradient's integers, with their multiple: what bf16 holds exactly."""

LOWEST_EXPONENTS: Final = {"bf16": -133, "fp16": -24, "fp32": -149}
"""Of the smallest power of two that each dtype has."""

MAX_NEWTON_SCHULZ: Final = 2**48
"""Multiplications and additions of all orthogonalisations of a scenario, on every rank's reference: some hours."""


def problem(scenario: Scenario, muon: Muon, most_parts: int) -> str | None:
    """What is wrong, as ``path: reason``; None when nothing is. ``most_parts``: of any step."""
    if len(muon.marks) != len(scenario.parameters):
        return f"muon.marks: {len(muon.marks)} marks for {len(scenario.parameters)} parameters, one each is needed"
    found = _first(
        _parameters_problem(scenario, muon),
        _colors_problem(scenario, muon),
        _sharding_problem(scenario, muon, most_parts),
        _values_problem(scenario, muon, most_parts),
    )
    return found or _work_problem(scenario, muon)


def _first(*problems: Iterable[str]) -> str | None:
    return next((each for found in problems for each in found), None)


def colored(muon: Muon, color: int | None) -> list[int]:
    """The indices of the parameters of one colour; None: of the default group."""
    return [index for index, mark in enumerate(muon.marks) if mark.color == color]


def group_sizes(world: int, muon: Muon, color: int | None) -> tuple[int, ...]:
    """Ranks of each group of one colour; None: of the default group."""
    return (world,) if color is None else tuple(map(len, muon.colors[color].groups))


def divisors(world: int, muon: Muon) -> dict[str, Fraction]:
    """What sums of gradients are divided by: where it is said -> the divisor, of colours that parameters have."""
    found: dict[str, Fraction] = {}
    if colored(muon, None):
        found["world"] = Fraction(world)
    for index, color in enumerate(muon.colors):
        if color.divisor is not None:
            found[f"muon.colors[{index}].divisor"] = Fraction(color.divisor)
        else:
            for number, group in enumerate(color.groups):
                found[f"muon.colors[{index}].groups[{number}]"] = Fraction(len(group))
    return found


def odd_part(divisor: Fraction) -> int:
    """What is left of a divisor without its powers of two: the integers that it divides exactly are its multiples."""
    number = divisor.numerator
    return number >> ((number & -number).bit_length() - 1)


def _parameters_problem(scenario: Scenario, muon: Muon) -> Iterator[str]:
    for index, (parameter, mark) in enumerate(zip(scenario.parameters, muon.marks, strict=True)):
        if parameter.strides != "contiguous":
            yield f"parameters[{index}].strides: of system 'muon' parameters lie in buffers, so they are contiguous"
        wrong = _mark_problem(parameter, mark, muon)
        if wrong is not None:
            yield f"muon.marks[{index}]{wrong}"


def _mark_problem(parameter: Parameter, mark: Mark, muon: Muon) -> str | None:
    if mark.color is not None and mark.color >= len(muon.colors):
        return f".color: no colour {mark.color}, there are {len(muon.colors)}"
    if mark.use != "once" and muon.backward != "autograd":
        return f".use: {mark.use!r} needs muon.backward 'autograd'"
    if mark.use != "once" and mark.main_grad:
        return f".use: {mark.use!r} with main_grad, which no backward fills"
    if mark.main_grad and muon.sharding.skip_missing:
        return ".main_grad: with skip_missing, but one that nothing was added to looks like one of zeros"
    if not mark.muon:
        if (mark.split, mark.sizes, mark.num_heads) != ("none", (), 1):
            return ".split: an element-wise parameter is not cut"
        return None
    if len(parameter.shape) < 2:
        return f".muon: {parameter.name!r} has {len(parameter.shape)} dimensions, Muon needs 2 or more"
    if 0 in parameter.shape:
        return f".muon: {parameter.name!r} has no elements"
    return _cut_problem(mark, parameter.shape[-2])


def _cut_problem(mark: Mark, rows: int) -> str | None:
    """``rows``: of the matrix."""
    if mark.num_heads != 1 and mark.split != "heads":
        return f".num_heads: {mark.num_heads} with split {mark.split!r}"
    if mark.split == "heads" and rows % mark.num_heads:
        return f".num_heads: {mark.num_heads} heads do not divide {rows} rows"
    if mark.split in ("none", "heads"):
        return f".sizes: with split {mark.split!r} there are none" if mark.sizes else None
    if mark.split == "gate_up" and not mark.sizes:
        return f".sizes: {rows} rows have no halves" if rows % 2 else None
    wanted = 3 if mark.split == "qkv" else 2
    if len(mark.sizes) != wanted:
        return f".sizes: split {mark.split!r} has {wanted} blocks, got {len(mark.sizes)}"
    if sum(mark.sizes) != rows:
        return f".sizes: blocks of {sum(mark.sizes)} rows together, the matrix has {rows}"
    return None


def _colors_problem(scenario: Scenario, muon: Muon) -> Iterator[str]:
    used = {mark.color for mark in muon.marks}
    for index, color in enumerate(muon.colors):
        wrong = _groups_problem(color, scenario.world)
        if wrong is not None:
            yield f"muon.colors[{index}].{wrong}"
        if index not in used:
            yield f"muon.colors[{index}]: no parameter is of it"
    if muon.release_color is None:
        return
    released = None if muon.release_color == -1 else muon.release_color
    indices = colored(muon, released)
    if not indices:
        yield f"muon.release_color: no parameter is of colour {muon.release_color}"
    for index in indices:
        if scenario.parameters[index].dtype == "fp32":
            yield f"muon.release_color: parameters[{index}] of that colour is fp32: it has no master to come back from"


def _groups_problem(color: Color, world: int) -> str | None:
    seen: set[int] = set()
    for number, group in enumerate(color.groups):
        if list(group) != sorted(set(group)):
            return f"groups[{number}]: expected ranks in ascending order, none twice"
        if group[-1] >= world:
            return f"groups[{number}]: no rank {group[-1]} in a world of {world}"
        if seen & {*group}:
            return f"groups[{number}]: rank {min(seen & {*group})} is in an earlier group already"
        seen.update(group)
    return None


def _sharding_problem(scenario: Scenario, muon: Muon, most_parts: int) -> Iterator[str]:
    sharding, local = muon.sharding, muon.sharding.local_world_size
    if sharding.two_hop and local is None:
        yield "muon.sharding.local_world_size: two hops need the number of ranks of a node"
    if local is not None and scenario.world % local:
        yield f"muon.sharding.local_world_size: nodes of {local} ranks do not make a world of {scenario.world}"
    if sharding.comm_overlap and not muon.no_sync and most_parts > sharding.accumulate_steps:
        yield (
            f"muon.sharding.accumulate_steps: {sharding.accumulate_steps} with overlap, but a step has {most_parts} "
            "parts: at most so many, or no_sync"
        )
    for name in ("foreach", "amsgrad", "maximize"):
        if getattr(scenario.optimizer, name):
            yield f"optimizer.{name}: system 'muon' has none"


def _values_problem(scenario: Scenario, muon: Muon, most_parts: int) -> Iterator[str]:
    values = scenario.values
    if values.special:
        yield "values.special: system 'muon' has no special values"
    if values.max_k * muon.multiple > LARGEST_INTEGER:
        yield (
            f"muon.multiple: integers up to {values.max_k} x {muon.multiple} need more than bf16's 8 bits, "
            f"at most {LARGEST_INTEGER}"
        )
    for index, (parameter, mark) in enumerate(zip(scenario.parameters, muon.marks, strict=True)):
        lowest = LOWEST_EXPONENTS[parameter.dtype] + (mark.use != "once")
        if values.exponent < lowest:
            half = "half of " if mark.use != "once" else ""
            yield f"values.exponent: {half}2**{values.exponent} is none of {parameter.dtype} (parameters[{index}])"
    if values.domain.value == "general":
        # Each of its backwards adds one half to what there is: a sum that no order of whole gradients gives.
        for index, mark in enumerate(muon.marks):
            if mark.use == "reentrant":
                yield f"muon.marks[{index}].use: 'reentrant' gives halves, whose sums round in domain 'general'"
        return
    largest = scenario.world * most_parts * values.max_k * muon.multiple
    for path, divisor in divisors(scenario.world, muon).items():
        odd = odd_part(divisor)
        # A divisor comes from a file as fp64, so its denominator is a power of two.
        if muon.multiple % odd:
            mean = f"a mean over {float(divisor):g} ({path}) rounds"
            yield f"muon.multiple: {muon.multiple} is no multiple of {odd}: {mean}"
        power = math.log2(float(divisor / odd))
        if values.exponent - power < LOWEST_EXPONENTS["fp32"]:
            yield f"values.exponent: 2**{values.exponent} over {float(divisor):g} ({path}) underflows"
        if largest / divisor * Fraction(2) ** values.exponent >= 2**127:
            yield f"values.exponent: sums over {float(divisor):g} ({path}) overflow"


def newton_schulz_work(scenario: Scenario, muon: Muon) -> int:
    """Multiplications and additions of one step's orthogonalisations of whole matrices."""
    return _matrices_work(_matrices(scenario, muon), muon.settings.ns_steps)


def _matrices(scenario: Scenario, muon: Muon) -> list[tuple[int, ...]]:
    return [each.shape for each, mark in zip(scenario.parameters, muon.marks, strict=True) if mark.muon]


def _matrices_work(shapes: Iterable[tuple[int, ...]], ns_steps: int) -> int:
    work = 0
    for *stack, rows, columns in shapes:
        small, large = sorted((rows, columns))
        work += math.prod(stack) * (4 * large * small**2 + 2 * small**3) * ns_steps
    return work


def newton_schulz_problem(scenario: Scenario, shapes: Iterable[tuple[int, ...]], ns_steps: int) -> str | None:
    """Why orthogonalising matrices of these shapes in every step would take longer than anybody waits; or None."""
    num_steps = sum(operation.__struct_config__.tag == "step" for operation in scenario.operations)
    work = num_steps * scenario.world * _matrices_work(shapes, ns_steps)
    if work > MAX_NEWTON_SCHULZ:
        return (
            f"{work:.3g} operations of Newton-Schulz in {num_steps} steps on {scenario.world} ranks are "
            f"too much work, at most {MAX_NEWTON_SCHULZ:.3g} in all"
        )
    return None


def _work_problem(scenario: Scenario, muon: Muon) -> str | None:
    wrong = newton_schulz_problem(scenario, _matrices(scenario, muon), muon.settings.ns_steps)
    return None if wrong is None else f"muon.marks: {wrong}"
