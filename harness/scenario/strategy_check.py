"""What is wrong with the meaning of a scenario of system ``"strategy"``: the part of ``model.check`` it alone has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from harness.scenario.muon_check import LARGEST_INTEGER, LOWEST_EXPONENTS, newton_schulz_problem, odd_part
from harness.scenario.strategy import ROOT, Place, Strategy

if TYPE_CHECKING:
    from harness.scenario.model import Parameter, Scenario

LARGEST_BF16_SUM: Final = 256
"""Sums of integers up to it are exact in bf16, in any order and any nesting: each partial sum is one of them too."""


def problem(scenario: Scenario, strategy: Strategy, most_parts: int) -> str | None:
    """What is wrong, as ``path: reason``; None when nothing is. ``most_parts``: of any step."""
    places = strategy.places
    if len(places) != len(scenario.parameters):
        return f"strategy.places: {len(places)} places for {len(scenario.parameters)} parameters, one each is needed"
    return _first(
        _parameters_problem(scenario, strategy),
        _places_problem(scenario, strategy),
        _blocks_problem(strategy),
        _mesh_problem(scenario, strategy),
        _uses_problem(scenario, strategy),
        _values_problem(scenario, strategy, most_parts),
        _work_problem(scenario, strategy),
    )


def _first(*problems: Iterable[str]) -> str | None:
    return next((each for found in problems for each in found), None)


def trainable(strategy: Strategy) -> list[int]:
    """The indices of the parameters that take a gradient."""
    return [index for index, place in enumerate(strategy.places) if not place.frozen]


def narrow(scenario: Scenario, strategy: Strategy) -> bool:
    """Whether a gradient passes through bf16 on its way: of weights, of their cast, or where it is reduced."""
    dtypes = {parameter.dtype for parameter in scenario.parameters}
    return "bf16" in {*dtypes, strategy.compute, strategy.reduce}


def exact_means(scenario: Scenario, num_parts: int) -> bool:
    """Whether the gradients of a step of so many parts come out the same however they are added and divided.

    In the exact domains sums do not round, and a mean over the world does not. But DDP, where each part is reduced by
    itself, averages what earlier parts left with each part anew. After n parts of a world of ``q 2**a`` ranks, q odd,
    that needs integers that are multiples of ``q ** n``, and takes a bits more of what they add up to for each part
    after the first. Of a class whose way of reducing is not known the same is asked, in the coarser of its dtypes.
    """
    strategy = scenario.strategy
    if strategy is None or scenario.values.domain.value == "general":
        return False
    if strategy.sharding not in ("none", "any") or strategy.accumulation != "sync":
        return True
    world = scenario.world
    odd: int = odd_part(Fraction(world))
    dtypes = {scenario.parameters[0].dtype, strategy.reduce if strategy.sharding == "any" else "fp32"}
    largest: int = world * num_parts * scenario.values.max_k * strategy.multiple * (world // odd) ** (num_parts - 1)
    divides: bool = strategy.multiple % odd**num_parts == 0
    return divides and largest <= (LARGEST_BF16_SUM if "bf16" in dtypes else 2**24)


def _parameters_problem(scenario: Scenario, strategy: Strategy) -> Iterator[str]:
    for index, parameter in enumerate(scenario.parameters):
        path = f"parameters[{index}]"
        if not parameter.shape:
            yield f"{path}.shape: system 'strategy' has no scalars, which have no dimension to shard"
        if parameter.numel == 0:
            yield f"{path}.shape: system 'strategy' has no parameter without elements"
        if parameter.strides != "contiguous":
            yield f"{path}.strides: system 'strategy' shards along rows, so parameters are contiguous"
        if parameter.dtype == "fp16" or (parameter.dtype != "fp32" and strategy.sharding not in ("none", "any")):
            yield f"{path}.dtype: {parameter.dtype}, but with sharding {strategy.sharding!r} a parameter is a master"
        if parameter.dtype != scenario.parameters[0].dtype:
            yield f"{path}.dtype: {parameter.dtype}, but parameters[0] has {scenario.parameters[0].dtype}: one for all"
        if parameter.dtype == "bf16" and strategy.reduce != "bf16":
            yield f"strategy.reduce: gradients of bf16 ({path}) are reduced in 'bf16', not {strategy.reduce!r}"


def _places_problem(scenario: Scenario, strategy: Strategy) -> Iterator[str]:
    for index, (parameter, place) in enumerate(zip(scenario.parameters, strategy.places, strict=True)):
        wrong = _place_problem(parameter, place, strategy)
        if wrong is not None:
            yield f"strategy.places[{index}].{wrong}"
    if not trainable(strategy):
        yield "strategy.places: all are frozen, one at least must take a gradient"


def _place_problem(parameter: Parameter, place: Place, strategy: Strategy) -> str | None:
    if place.plain and not strategy.converts:
        return "plain: needs strategy.converts, which alone leaves parameters out"
    if place.block == ROOT and strategy.bare_root and not place.plain:
        return "plain: a parameter of a bare root is in no FSDP module, so it is plain"
    if not place.dedicated:
        return None
    if strategy.sharding == "none":
        return "dedicated: with sharding 'none' every rank has the whole of it"
    for name in ("frozen", "plain", "tied"):
        if getattr(place, name):
            return f"dedicated: and {name}, but a dedicated parameter is neither frozen, plain nor tied"
    if len(parameter.shape) < 2:
        return f"dedicated: {parameter.name!r} has {len(parameter.shape)} dimensions, Muon needs 2 or more"
    return None


def _blocks_problem(strategy: Strategy) -> Iterator[str]:
    used = {place.block for place in strategy.places} - {ROOT}
    if not used:
        yield "strategy.places: no parameter is in a block, one at least must be"
    for number in range(len(used)):
        if number not in used:
            yield f"strategy.places: no parameter is in block {number}, but one is in block {max(used)}"


def _mesh_problem(scenario: Scenario, strategy: Strategy) -> Iterator[str]:
    world, replicas, sharding = scenario.world, strategy.replicas, strategy.sharding
    if sharding != "hybrid" and replicas != 1:
        yield f"strategy.replicas: {replicas}, but with sharding {sharding!r} it is 1"
    if world % replicas:
        yield f"strategy.replicas: {replicas} replicas do not divide a world of {world}"
    if sharding == "none":
        if strategy.offload:
            yield "strategy.offload: needs shards, which alone are offloaded"
        if strategy.converts:
            yield "strategy.converts: needs shards, it converts to FSDP2"
    if strategy.bare_root and not strategy.converts:
        yield "strategy.bare_root: needs strategy.converts"
    for name in ("amsgrad", "maximize"):
        if getattr(scenario.optimizer, name):
            yield f"optimizer.{name}: system 'strategy' has none"


def _uses_problem(scenario: Scenario, strategy: Strategy) -> Iterator[str]:
    """Parts in which a rank uses nothing that takes a gradient: it has no loss to go back from."""
    indices = trainable(strategy)
    for number, operation in enumerate(scenario.operations):
        for rank, missing in enumerate(getattr(operation, "none", ())):
            if {*indices} <= {*missing}:
                yield f"operations[{number}].none[{rank}]: the rank uses no parameter that takes a gradient"


def _values_problem(scenario: Scenario, strategy: Strategy, most_parts: int) -> Iterator[str]:
    values, world = scenario.values, scenario.world
    if values.special:
        yield "values.special: system 'strategy' has no special values"
    is_narrow = narrow(scenario, strategy)
    if is_narrow and values.max_k * strategy.multiple > LARGEST_INTEGER:
        yield (
            f"strategy.multiple: integers up to {values.max_k} x {strategy.multiple} need more than bf16's 8 bits, "
            f"at most {LARGEST_INTEGER}"
        )
    lowest = LOWEST_EXPONENTS["bf16" if is_narrow else "fp32"]
    odd = odd_part(Fraction(world))
    # Halves of a gradient where it is tied, then its mean: of powers of two each takes one off the exponent.
    halves = int(any(place.tied for place in strategy.places)) + (world // odd).bit_length() - 1
    if values.exponent - halves < lowest:
        yield f"values.exponent: 2**{values.exponent} is halved {halves} times, the smallest there is is 2**{lowest}"
    if values.domain.value == "general":
        if strategy.sharding == "any":
            yield "values.domain: 'general' needs a sharding that is known, which says how sums round"
        return
    if strategy.multiple % odd:
        yield f"strategy.multiple: {strategy.multiple} is no multiple of {odd}: a mean over {world} ranks rounds"
    largest = world * most_parts * values.max_k * strategy.multiple
    if strategy.reduce == "bf16" and largest > LARGEST_BF16_SUM:
        yield f"values.max_k: sums reach {largest}, exact in bf16 only up to {LARGEST_BF16_SUM}"


def _work_problem(scenario: Scenario, strategy: Strategy) -> Iterator[str]:
    shapes = [
        parameter.shape
        for parameter, place in zip(scenario.parameters, strategy.places, strict=True)
        if place.dedicated
    ]
    wrong = newton_schulz_problem(scenario, shapes, strategy.muon.ns_steps)
    if wrong is not None:
        yield f"strategy.places: {wrong}"
