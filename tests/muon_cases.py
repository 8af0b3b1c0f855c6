"""Scenarios of system ``"muon"``, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from harness.scenario.model import (
    AdamW,
    Build,
    Discard,
    Domain,
    Operation,
    Parameter,
    Part,
    Rate,
    Reload,
    Scenario,
    Skip,
    Step,
    Values,
)
from harness.scenario.muon import Color, GlobalClip, Mark, Muon, MuonSettings, Sharding

Missing = dict[int, tuple[int, ...]]
"""Rank -> indices of the parameters that it has no gradient of; others have all."""

MODEL: tuple[tuple[str, tuple[int, ...], Mark], ...] = (
    ("embedding", (9, 6), Mark()),
    ("wide", (4, 10), Mark(muon=True)),
    ("bias", (7,), Mark(weight_decay=0.0)),
    ("tall", (12, 5), Mark(muon=True, lr_scale=0.5)),
    ("qkv", (12, 6), Mark(muon=True, split="qkv", sizes=(6, 4, 2))),
    ("experts", (3, 4, 6), Mark(muon=True)),
    ("heads", (8, 6), Mark(muon=True, split="heads", num_heads=2)),
    ("scale", (), Mark(need_clip=False)),
    ("gate_up", (6, 4), Mark(muon=True, split="gate_up", weight_decay=0.5)),
)
"""Names, shapes and marks, of every kind."""


def part(world: int, number: int = 0, *, more: bool = False, missing: Missing | None = None) -> Part:
    """A part whose contributors nobody else is."""
    contributors = tuple(1 + rank + world * number for rank in range(world))
    none = tuple((missing or {}).get(rank, ()) for rank in range(world))
    return Part(more=more, contributors=contributors, none=none)


def step(
    world: int, num_parts: int = 1, *, missing: Missing | None = None, ending: Step | Skip | Discard | None = None
) -> list[Operation]:
    """The operations of one step; what is missing is missing in all of its parts."""
    parts = [part(world, number, more=number < num_parts - 1, missing=missing) for number in range(num_parts)]
    return [*parts, ending or Step()]


def scenario(
    world: int,
    operations: Sequence[Operation] = (),
    *,
    model: Sequence[tuple[str, tuple[int, ...], Mark]] = MODEL,
    dtype: Literal["bf16", "fp32"] = "bf16",
    domain: Domain = Domain.EXACT,
    bucket: int = 64,
    seed: int = 5,
    spread: int = 0,
    max_k: int = 7,
    multiple: int = 12,
    adamw: AdamW | None = None,
    **muon: Any,
) -> Scenario:
    """A scenario of three steps, or of these operations. ``muon``: fields of :class:`harness.scenario.muon.Muon`."""
    default = [*step(world), *step(world, 2), *step(world)]
    values = Values(domain=domain, max_k=max_k, exponent=-4, spread=spread)
    return Scenario(
        world=world,
        seed=seed,
        parameters=tuple(Parameter(name, shape, dtype) for name, shape, _ in model),
        values=values,
        optimizer=adamw or AdamW(),
        operations=(Build(bucket), *(operations or default)),
        system="muon",
        muon=Muon(marks=tuple(mark for _, _, mark in model), multiple=multiple, **muon),
    )


__all__ = [
    "MODEL",
    "AdamW",
    "Build",
    "Color",
    "Discard",
    "Domain",
    "GlobalClip",
    "Mark",
    "MuonSettings",
    "Rate",
    "Reload",
    "Sharding",
    "Skip",
    "Step",
    "part",
    "scenario",
    "step",
]
