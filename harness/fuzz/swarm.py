"""Features of scenarios that a round of a campaign goes without.

A scenario that has everything in it hides what only shows where something is missing: a step that clears what the last
one left behind, a discard before every spill. So each round leaves out some features, drawn anew.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any, Final

from harness.scenario.aims import DTYPES, EXACT_DOMAINS, STRIDES, Aim, Clipping, Form, Nones, Range, StepAim


class Feature(enum.Enum):
    """What a round can go without."""

    DISCARDS = "discards"
    LIES = "lies"
    NONES = "nones"
    CLIPS = "clips"
    SEVERAL_PARTS = "several-parts"
    MANY_STEPS = "many-steps"
    EMPTIES = "empties"
    LARGE_BUCKETS = "large-buckets"
    GENERAL_VALUES = "general-values"
    SPECIAL_VALUES = "special-values"
    SKIPS = "skips"
    RATES = "rates"
    LOADS = "loads"
    REBUILDS = "rebuilds"
    AMSGRAD = "amsgrad"
    MAXIMIZE = "maximize"
    DTYPES = "dtypes"
    STRIDES = "strides"


FEW_STEPS: Final = 2
SMALL_REQUEST: Final[Range] = (1, 24)

# What is still allowed without a feature, where a goal does not say otherwise.
_NO = (False,)
_FIELDS: tuple[tuple[Feature, str, Any], ...] = (
    (Feature.GENERAL_VALUES, "domain", EXACT_DOMAINS),
    (Feature.SPECIAL_VALUES, "form", (Form.NORMAL, Form.WIDE, Form.CANCELLING)),
    (Feature.AMSGRAD, "amsgrad", _NO),
    (Feature.MAXIMIZE, "maximize", _NO),
    (Feature.DTYPES, "dtypes", DTYPES[:1]),
    (Feature.STRIDES, "strides", STRIDES[:1]),
)
_STEP_FIELDS: tuple[tuple[Feature, str, Any], ...] = (
    (Feature.DISCARDS, "discard", _NO),
    (Feature.SKIPS, "skip", _NO),
    (Feature.LIES, "lie", _NO),
    (Feature.NONES, "nones", Nones.NOTHING),
    (Feature.CLIPS, "clip", (Clipping.NONE,)),
    (Feature.RATES, "rate", _NO),
    (Feature.LOADS, "load", _NO),
    (Feature.REBUILDS, "rebuild", _NO),
)


def drawn(seed: int, index: int) -> frozenset[Feature]:
    """What round number ``index`` goes without: in one of four nothing, else each with probability 1/2."""
    digest = hashlib.blake2b(f"{seed} swarm {index}".encode(), digest_size=16).digest()
    random = Random(int.from_bytes(digest, "big"))
    if random.randrange(4) == 0:
        return frozenset()
    return frozenset(feature for feature in Feature if random.randrange(2))


def narrowed(aim: Aim, off: Collection[Feature]) -> Aim:
    """The same aim without these features, where it does not need them."""
    if not off:
        return aim
    narrow = replace(
        aim,
        step=None if aim.step is None else _without(aim.step, off),
        last_step=None if aim.last_step is None else _without(aim.last_step, off),
        rest=_without(aim.rest, off),
        empties=aim.empties and Feature.EMPTIES not in off,
    )
    if Feature.MANY_STEPS in off:
        narrow = replace(narrow, most_steps=FEW_STEPS)
    if Feature.LARGE_BUCKETS in off and aim.request is None:
        narrow = replace(narrow, request=lambda _world: SMALL_REQUEST)
    for feature, field, allowed in _FIELDS:
        if feature in off and getattr(narrow, field) is None:
            narrow = replace(narrow, **{field: allowed})
    return narrow


def _without(step: StepAim, off: Collection[Feature]) -> StepAim:
    if Feature.SEVERAL_PARTS in off:
        step = replace(step, parts=(step.parts[0], step.parts[0]))
    for feature, field, allowed in _STEP_FIELDS:
        if feature in off and _open(step, field):
            step = replace(step, **{field: allowed})
    return step


def _open(step: StepAim, field: str) -> bool:
    """Whether a goal leaves it open what a field is to be."""
    asked = getattr(step, field)
    return asked is None or asked == (False, True)
