"""Other layouts of the same gradients: on other ranks, in other parts, in a list in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from harness.scenario.model import Clip, Discard, Operation, Parameter, Part, Scenario, Skip, Step, sources

_T = TypeVar("_T")


def picked(choices: Sequence[_T], pick: int) -> _T | None:
    """One of them; None where there are none."""
    return choices[pick % len(choices)] if choices else None


class _Slot(NamedTuple):
    """What one rank holds in one part."""

    contributor: int
    none: tuple[int, ...]


def regrouped(scenario: Scenario, world: int, num_parts: Callable[[int, int], int]) -> Scenario:
    """The gradients of each step laid anew on ranks and parts: ``num_parts`` of (gradients, parts before)."""
    nothing = tuple(range(len(scenario.parameters)))

    def change(parts: Sequence[Part]) -> list[Part]:
        slots = [
            _Slot(part.contributors[rank], part.none[rank])
            for rank in range(scenario.world)
            for part in parts
            if len(part.none[rank]) < len(nothing)
        ]
        count = num_parts(len(slots), len(parts))
        cells = [_Slot(0, nothing)] * (world * count)
        for number, slot in enumerate(slots):
            cells[number * len(cells) // len(slots)] = slot  # in order, over all ranks
        return [
            Part(
                more=index < count - 1,
                contributors=tuple(cells[rank * count + index].contributor for rank in range(world)),
                none=tuple(cells[rank * count + index].none for rank in range(world)),
            )
            for index in range(count)
        ]

    return replace(scenario, world=world, operations=with_parts(scenario, change))


def with_parts(scenario: Scenario, change: Callable[[Sequence[Part]], Sequence[Part]]) -> tuple[Operation, ...]:
    """The operations, with the parts of each step changed together."""
    operations: list[Operation] = []
    parts: list[Part] = []
    for operation in scenario.operations:
        if isinstance(operation, Part):
            parts.append(operation)
            continue
        if parts and isinstance(operation, Step | Skip | Discard | Clip):
            operations += change(parts)
            parts = []
        operations.append(operation)
    return tuple(operations)


def traced(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The same, saying where their values come from, which stays so wherever they stand in a list."""
    return [replace(parameter, sources=sources(parameter, index)) for index, parameter in enumerate(parameters)]


def listing(
    scenario: Scenario, parameters: Sequence[Parameter], renamed: Callable[[tuple[int, ...]], list[int]]
) -> Scenario:
    """The scenario with another list; ``renamed`` says which indices there are what was None."""
    operations = tuple(
        replace(operation, none=tuple(tuple(sorted(renamed(none))) for none in operation.none))
        if isinstance(operation, Part)
        else operation
        for operation in scenario.operations
    )
    return replace(scenario, parameters=tuple(parameters), operations=operations)


def shuffled(count: int, pick: int) -> list[int] | None:
    """Indices in another order; None where there is none."""
    order = list(range(count))
    Random(pick).shuffle(order)
    if order == sorted(order):
        order.reverse()
    return order if count > 1 else None


def permuted(scenario: Scenario, order: Sequence[int]) -> Scenario:
    """With the parameters in this order, each with the values that it had."""
    listed = traced(scenario.parameters)
    place = {old: new for new, old in enumerate(order)}
    return listing(scenario, [listed[old] for old in order], lambda none: [place[index] for index in none])
