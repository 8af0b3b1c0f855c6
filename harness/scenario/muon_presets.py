"""The short campaign that is run on a given list of parameters where the subject is of system ``"muon"``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.scenario.model import AdamW, Build, Domain, Operation, Parameter, Part, Scenario, Step, Values
from harness.scenario.muon import GlobalClip, Mark, Muon, Sharding
from harness.scenario.muon_check import LARGEST_INTEGER
from harness.scenario.muon_groups import multiple_of
from harness.scenario.presets import PRESETS

_ENDS = frozenset(name for preset in PRESETS.values() for name in preset.ends)
_END_WORDS = ("embed", "wte", "wpe", "lm_head")
_EXPONENT = -8


def marks(parameters: Sequence[Parameter]) -> tuple[Mark, ...]:
    """As is the custom: every matrix is Muon's but embeddings and the output head, which are told by their names."""
    return tuple(
        Mark(muon=len(each.shape) == 2 and 0 not in each.shape and not _is_end(each.name)) for each in parameters
    )


def _is_end(name: str) -> bool:
    return name in _ENDS or any(word in name for word in _END_WORDS)


def campaign(parameters: Sequence[Parameter], world: int, bucket: int, seed: int, examples: int = 3) -> list[Scenario]:
    """Scenarios of one step, in turn: one part, two parts with overlap, clipped to half of the norm to be expected.

    Args:
        parameters: the model.
        world: number of ranks.
        bucket: size of a fused buffer, in elements.
        seed: of the first scenario; the following ones count up.
        examples: number of scenarios.
    """
    multiple = multiple_of([world])
    values = Values(Domain.EXACT, max(1, LARGEST_INTEGER // multiple), _EXPONENT)
    numel = sum(parameter.numel for parameter in parameters)
    # Uniform integers in [-K, K] have the variance K (K + 1) / 3; the mean of W of them one W-th of it.
    variance = values.max_k * (values.max_k + 1) / 3 * multiple**2 / world
    norm = 2.0**_EXPONENT * math.sqrt(variance * numel)
    plain = Muon(marks(parameters), multiple=multiple)
    forms = (
        (1, plain),
        (2, Muon(plain.marks, sharding=Sharding(comm_overlap=True, accumulate_steps=2), multiple=multiple)),
        (1, Muon(plain.marks, clip=GlobalClip(float(f"{norm / 2:.3g}")), multiple=multiple)),
    )
    return [
        Scenario(
            world=world,
            seed=(seed + index) % 2**63,
            parameters=tuple(parameters),
            values=values,
            optimizer=AdamW(),
            operations=(Build(bucket), *_parts(forms[index % len(forms)][0], world), Step()),
            system="muon",
            muon=forms[index % len(forms)][1],
        )
        for index in range(examples)
    ]


def _parts(count: int, world: int) -> list[Operation]:
    return [
        Part(index < count - 1, tuple(range(index * world, (index + 1) * world)), none=((),) * world)
        for index in range(count)
    ]
