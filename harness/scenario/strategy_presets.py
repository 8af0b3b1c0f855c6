"""The short campaign that is run on a given list of parameters where the subject is of system ``"strategy"``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from msgspec.structs import replace

from harness.scenario import muon_presets
from harness.scenario.model import AdamW, Build, Clip, Domain, Operation, Parameter, Part, Scenario, Step, Values
from harness.scenario.muon_check import LARGEST_INTEGER
from harness.scenario.muon_groups import multiple_of
from harness.scenario.strategy import ROOT, Accumulation, Offer, Place, Strategy
from harness.scenario.strategy_check import LARGEST_BF16_SUM
from harness.scenario.strategy_situations import Reduction, meshes, reductions

MOST_BLOCKS = 256
_EXPONENT = -8
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def blocks(parameters: Sequence[Parameter]) -> tuple[int, ...]:
    """As is the custom: a block for each layer, which is the first number in a name; what has none is of the root.

    Where no name has one, all are in one block; where there are too many layers, neighbours share a block.
    """
    found = [_LAYER.search(parameter.name) for parameter in parameters]
    layers = sorted({int(match[1]) for match in found if match is not None})
    if not layers:
        return (0,) * len(parameters)
    place = {layer: at * MOST_BLOCKS // max(MOST_BLOCKS, len(layers)) for at, layer in enumerate(layers)}
    return tuple(ROOT if match is None else place[int(match[1])] for match in found)


def campaign(
    parameters: Sequence[Parameter], world: int, bucket: int, seed: int, examples: int = 3, *, offer: Offer
) -> list[Scenario]:
    """Scenarios of one step, in turn: one part, two parts of which the last is reduced, clipped to half of the norm.

    Weights are fp32 where the subject takes that, and reductions take turns where it has several; a hybrid mesh is as
    near to a square as can be; matrices are dedicated, but for embeddings and the output head, where they can be.

    Args:
        parameters: the model.
        world: number of ranks.
        bucket: size of a bucket of DDP's, in elements.
        seed: of the first scenario; the following ones count up.
        examples: number of scenarios.
        offer: what the subject takes.
    """
    forms: tuple[tuple[int, Accumulation, bool], ...] = ((1, "sync", False), (2, "no_sync", False), (1, "sync", True))
    kinds = reductions(offer)
    found = []
    for index in range(examples):
        num_parts, accumulation, clipped = forms[index % len(forms)]
        kind = kinds[index % len(kinds)]
        listed = tuple(replace(each, dtype=kind.weights) for each in parameters)
        strategy = _strategy(parameters, world, offer, kind)
        values = _values(world, num_parts, strategy, kind)
        operations: list[Operation] = [Build(bucket), *_parts(num_parts, world)]
        if clipped:
            operations.append(_clip(values, world, strategy, sum(each.numel for each in parameters)))
        found.append(
            Scenario(
                world=world,
                seed=(seed + index) % 2**63,
                parameters=listed,
                values=values,
                optimizer=AdamW(),
                operations=(*operations, Step()),
                system="strategy",
                strategy=replace(strategy, accumulation=accumulation),
            )
        )
    return found


def _strategy(parameters: Sequence[Parameter], world: int, offer: Offer, kind: Reduction) -> Strategy:
    matrices = [mark.muon for mark in muon_presets.marks(parameters)]
    if not any(matrices):  # by custom; a strategy that is for them needs one at least
        matrices = [len(each.shape) == 2 for each in parameters]
    replicas = min(meshes(world, offer), key=lambda number: abs(number - world / number))
    return Strategy(
        places=tuple(
            Place(block, dedicated=matrix and offer.dedicated)
            for block, matrix in zip(blocks(parameters), matrices, strict=True)
        ),
        sharding=offer.sharding,
        replicas=replicas,
        reduce=kind.sums,
        compute=offer.compute[0],
        multiple=multiple_of([world]),
    )


def _values(world: int, num_parts: int, strategy: Strategy, kind: Reduction) -> Values:
    limits = [LARGEST_INTEGER // strategy.multiple]
    if kind.sums == "bf16":
        limits.append(LARGEST_BF16_SUM // (world * num_parts * strategy.multiple))
    return Values(Domain.EXACT, max(1, min(limits)), _EXPONENT)


def _clip(values: Values, world: int, strategy: Strategy, numel: int) -> Clip:
    # Uniform integers in [-K, K] have the variance K (K + 1) / 3; the mean of W of them one W-th of it.
    variance = values.max_k * (values.max_k + 1) / 3 * strategy.multiple**2 / world
    norm = math.ldexp(math.sqrt(variance * numel), values.exponent)
    return Clip(float(f"{norm / 2:.3g}"))


def _parts(count: int, world: int) -> list[Operation]:
    return [
        Part(index < count - 1, tuple(range(index * world, (index + 1) * world)), none=((),) * world)
        for index in range(count)
    ]
