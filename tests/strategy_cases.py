"""Scenarios of system ``"strategy"``, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Domain,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Skip,
    Step,
    Values,
    check,
)
from harness.scenario.strategy import ROOT, Place, Strategy

Missing = dict[int, tuple[int, ...]]
"""Rank -> indices of the parameters that it does not use; others use all."""

MODEL: tuple[tuple[str, tuple[int, ...], Place], ...] = (
    ("embedding", (9, 5), Place(block=ROOT)),
    ("first.weight", (4, 6), Place(0)),
    ("first.bias", (7,), Place(0)),
    ("second.weight", (3, 5), Place(1)),
    ("second.scale", (1,), Place(1)),
    ("third.weight", (8, 2), Place(2)),
    ("head", (5, 3), Place(block=ROOT)),
)
"""Names, shapes and places."""


def placed(**changes: Place) -> list[tuple[str, tuple[int, ...], Place]]:
    """The model with other places for some parameters, by name with dots as underscores."""
    return [(name, shape, changes.get(name.replace(".", "_"), place)) for name, shape, place in MODEL]


def part(world: int, number: int = 0, *, more: bool = False, missing: Missing | None = None) -> Part:
    """A part whose contributors nobody else is."""
    contributors = tuple(1 + rank + world * number for rank in range(world))
    none = tuple((missing or {}).get(rank, ()) for rank in range(world))
    return Part(more=more, contributors=contributors, none=none)


def step(
    world: int,
    num_parts: int = 1,
    *,
    missing: Missing | None = None,
    clip: float | None = None,
    ending: Step | Skip | None = None,
) -> list[Operation]:
    """The operations of one step; what is missing is missing in all of its parts."""
    parts = [part(world, number, more=number < num_parts - 1, missing=missing) for number in range(num_parts)]
    return [*parts, *([] if clip is None else [Clip(clip)]), ending or Step()]


def scenario(
    world: int,
    operations: Sequence[Operation] = (),
    *,
    model: Sequence[tuple[str, tuple[int, ...], Place]] = MODEL,
    dtype: Literal["bf16", "fp32"] = "fp32",
    domain: Domain = Domain.EXACT,
    bucket: int = 64,
    seed: int = 5,
    spread: int = 0,
    max_k: int = 3,
    adamw: AdamW | None = None,
    **strategy: Any,
) -> Scenario:
    """A scenario of three steps, or of these operations. ``strategy``: fields of :class:`Strategy`."""
    default = [*step(world), *step(world, 2, clip=0.5), *step(world)]
    odd = world
    while odd % 2 == 0:
        odd //= 2
    fields = {"multiple": odd if domain is not Domain.GENERAL else 1, **strategy}
    made = Scenario(
        world=world,
        seed=seed,
        parameters=tuple(Parameter(name, shape, dtype) for name, shape, _ in model),
        values=Values(domain=domain, max_k=max_k, exponent=-4, spread=spread),
        optimizer=adamw or AdamW(),
        operations=(Build(bucket), *(operations or default)),
        system="strategy",
        strategy=Strategy(places=tuple(place for _, _, place in model), **fields),
    )
    problem = check(made)
    if problem is not None:
        raise ValueError(problem)
    return made


__all__ = ["MODEL", "ROOT", "AdamW", "Domain", "Place", "Rate", "Skip", "Step", "part", "placed", "scenario", "step"]
