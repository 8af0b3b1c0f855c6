"""A short way to write down a scenario of a Muon optimizer by hand. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from harness.faults.museum.exhibit import ONE, VISIBLE, Written, known
from harness.scenario.model import AdamW, Domain, Scenario, Values
from harness.scenario.muon import AdaptiveClip, Color, GlobalClip, Mark, Muon, MuonSettings, Sharding

MEANS: Final = Values(Domain.EXACT, max_k=15, exponent=-6)
"""Sums are exact, and so are means over up to four ranks: integers are multiplied by what these divide by."""

MATRIX: Final = Mark(muon=True)
VECTOR: Final = Mark()

VISIBLE_MUON: Final = MuonSettings(lr=0.1)
"""Updates are large enough to be seen in bf16."""

DEFAULT: Final = Sharding()


def known_muon(
    world: int,
    shapes: Sequence[int | tuple[int, ...]],
    operations: Sequence[Written] = ONE,
    *,
    marks: Mapping[int, Mark] | None = None,
    bucket: int = 64,
    settings: MuonSettings = VISIBLE_MUON,
    sharding: Sharding = DEFAULT,
    colors: Sequence[Color] = (),
    clip: GlobalClip | AdaptiveClip | None = None,
    backward: bool = False,
    no_sync: bool = False,
    release_color: int | None = None,
    values: Values = MEANS,
    multiple: int | None = None,
    optimizer: AdamW = VISIBLE,
    parameters: Mapping[int, Mapping[str, str]] | None = None,
) -> Scenario:
    """A scenario of parameters ``a``, ``b``, … of these shapes; those of two or more dimensions are Muon's.

    Args:
        world: number of ranks.
        shapes: of the parameters.
        operations: after the build.
        marks: of some parameters, by index, in place of the ones above.
        bucket: size of a fused buffer, in elements.
        settings, sharding, colors, clip, no_sync, release_color: of :class:`harness.scenario.muon.Muon`.
        backward: gradients come out of autograd, which fires hooks; else they are assigned.
        values: how gradients are drawn, before they are multiplied.
        multiple: what they are multiplied by; None: what means over any number of these ranks divide by.
        optimizer: settings of the element-wise set.
        parameters: further fields of some parameters, by index.

    Raises:
        ValueError: it is none.
    """
    given = marks or {}
    listed = tuple(
        given.get(index, VECTOR if isinstance(shape, int) or len(shape) < 2 else MATRIX)
        for index, shape in enumerate(shapes)
    )
    muon = Muon(
        marks=listed,
        settings=settings,
        sharding=sharding,
        colors=tuple(colors),
        clip=clip,
        multiple=math.lcm(*range(1, world + 1)) if multiple is None else multiple,
        backward="autograd" if backward else "assign",
        no_sync=no_sync,
        release_color=release_color,
    )
    return known(
        world, shapes, bucket, operations, values=values, optimizer=optimizer, parameters=parameters, muon=muon
    )
