"""A short way to write down a scenario of a distribution strategy by hand. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

from harness.faults.museum.exhibit import ONE, VISIBLE, Written, known
from harness.scenario.model import AdamW, Domain, Scenario, Values
from harness.scenario.muon import MuonSettings
from harness.scenario.muon_check import odd_part
from harness.scenario.strategy import ROOT, Accumulation, Place, Reduce, Sharding, Strategy

SMALL_SUMS: Final = Values(Domain.EXACT, max_k=7, exponent=-4)
"""Sums over four ranks and two parts are exact in bf16 too."""

BLOCK: Final = Place()
AT_ROOT: Final = Place(block=ROOT)
PLAIN: Final = Place(plain=True)
DEDICATED: Final = Place(dedicated=True)

VISIBLE_MUON: Final = MuonSettings(lr=0.1, ns_dtype="fp32")
"""Updates are large enough to be seen in bf16, and rounding in Newton-Schulz is not, whose operations are known of no
class of the user's."""


def known_strategy(
    world: int,
    shapes: Sequence[int | tuple[int, ...]],
    operations: Sequence[Written] = ONE,
    *,
    places: Mapping[int, Place] | None = None,
    sharding: Sharding = "any",
    replicas: int = 1,
    reduce: Reduce = "bf16",
    compute: Reduce = "bf16",
    accumulation: Accumulation = "no_sync",
    converts: bool | None = None,
    bare_root: bool = False,
    unequal_start: bool = False,
    offload: bool = False,
    values: Values = SMALL_SUMS,
    optimizer: AdamW = VISIBLE,
    muon: MuonSettings = VISIBLE_MUON,
    bucket: int = 64,
) -> Scenario:
    """A scenario of fp32 parameters ``a``, ``b``, … of these shapes, in one block; the defaults are those of the
    contract of classes.

    Args:
        world: number of ranks.
        shapes: of the parameters.
        operations: after the build.
        places: of some parameters, by index.
        converts: None: where a parameter is plain.
        sharding, replicas, reduce, compute, accumulation, bare_root, unequal_start, offload, muon: of
            :class:`harness.scenario.strategy.Strategy`.
        values: how gradients are drawn, before they are multiplied by what means over these ranks divide by.
        optimizer: settings of AdamW.
        bucket: of DDP's, in elements.

    Raises:
        ValueError: it is none.
    """
    given = places or {}
    strategy = Strategy(
        places=tuple(given.get(index, BLOCK) for index in range(len(shapes))),
        sharding=sharding,
        replicas=replicas,
        reduce=reduce,
        compute=compute,
        accumulation=accumulation,
        offload=offload,
        converts=any(place.plain for place in given.values()) if converts is None else converts,
        bare_root=bare_root,
        unequal_start=unequal_start,
        multiple=odd_part(Fraction(world)),
        muon=muon,
    )
    fp32 = {index: {"dtype": "fp32"} for index in range(len(shapes))}
    return known(
        world, shapes, bucket, operations, values=values, optimizer=optimizer, parameters=fp32, strategy=strategy
    )
