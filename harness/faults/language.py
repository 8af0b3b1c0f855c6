"""The faults a scenario can hold: plain data, no torch.

A fault strikes on one rank. All kinds but :class:`Mute` have a *place*: a stage of a step (``step`` None: the
construction), and where in it. ``collective`` n is the n-th collective, from 0, that the rank calls in that stage of
that step: the fault strikes just before it is called. Where it may be None, that is when the subject is first called in
that stage.

Structure is checked by :mod:`harness.scenario.codec`, places by :func:`place_problem`, what a fault must turn into is
in :mod:`harness.faults.expect`.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct

from harness.verdict import Stage

MAX_FAULTS: Final = 16

MAX_MILLISECONDS: Final = 2_000
"""Below what any watchdog takes for a hang: a rank that is only slow must hold."""

Rank = Annotated[int, Meta(ge=0, le=255)]
Number = Annotated[int, Meta(ge=0, le=1_000_000)]
Milliseconds = Annotated[int, Meta(ge=1, le=MAX_MILLISECONDS)]

# Of those numbers that Linux has below the real-time signals: they end a process that does not handle them.
ENDING_SIGNALS: Final = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 25, 26, 27, 29, 30, 31})


class _OnRank(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="fault"):
    rank: Rank


class _InStage(_OnRank, frozen=True, forbid_unknown_fields=True, kw_only=True):
    step: Number | None
    stage: Stage


class _InCall(_InStage, frozen=True, forbid_unknown_fields=True, kw_only=True):
    collective: Number | None = None


class _AtCollective(_InStage, frozen=True, forbid_unknown_fields=True, kw_only=True):
    collective: Number


class Kill(_InCall, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="kill"):
    """The process is ended by a signal."""

    signal: Annotated[int, Meta(ge=1, le=31)] = 9


class Exit(_InCall, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="exit"):
    """The process ends by itself, at once: ``os._exit(code)``."""

    code: Annotated[int, Meta(ge=0, le=255)] = 0


class Raise(_InCall, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="raise"):
    """The subject's call raises."""


class Stop(_InCall, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="stop"):
    """The process is stopped (SIGSTOP), and nobody continues it."""


class Hang(_InCall, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="hang"):
    """The subject's call never returns: it sleeps, loops in Python, or loops in C and holds the GIL."""

    how: Literal["sleep", "python", "native"] = "sleep"


class Mute(_OnRank, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="mute"):
    """The rank drives the scenario to its end and never sends its verdict."""


class Slow(_InStage, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="slow"):
    """The rank is late to every collective of a stage of a step. No fault of anybody's: the scenario must hold."""

    milliseconds: Milliseconds


class Delay(_AtCollective, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="delay"):
    """The rank is late to one collective. No fault of anybody's: the scenario must hold."""

    milliseconds: Milliseconds


class Skip(_AtCollective, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="skip"):
    """The collective is not called; what called it is told that it is finished."""


class Duplicate(_AtCollective, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="duplicate"):
    """The collective is called twice."""


class Corrupt(_AtCollective, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="corrupt"):
    """What the rank contributes to the collective is wrong, in its first elements.

    ``bit``: the highest exponent bit of one element is flipped (of one that is no floating-point number: the one below
    the highest). ``slice``: of a run of elements. ``nan``: one element is nan.
    """

    what: Literal["bit", "slice", "nan"] = "bit"


Fault = Kill | Exit | Raise | Stop | Hang | Mute | Slow | Delay | Skip | Duplicate | Corrupt

KINDS: Final[tuple[str, ...]] = tuple(str(form.__struct_config__.tag) for form in get_args(Fault))
"""Their names, as in a case file."""


class Ending(enum.Enum):
    """How a step ends, in words."""

    STEP = "a whole one"
    SKIP = "a skipped one"
    DISCARD = "a discarded one"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of such a step in which a fault can strike: something of the subject's is called or used."""
        return _STAGES[self]


_STAGES: Final = {
    Ending.STEP: (Stage.COLLECT, Stage.REDUCE, Stage.NORM, Stage.UPDATE, Stage.GATHER),
    Ending.SKIP: (Stage.COLLECT, Stage.REDUCE, Stage.NORM),
    Ending.DISCARD: (Stage.COLLECT, Stage.UPDATE),
}


def kind(fault: Fault) -> str:
    """The name of its kind, as in a case file."""
    return str(type(fault).__struct_config__.tag)


def text(fault: Fault) -> str:
    """In a few words: ``kill on rank 1 in reduce of step 0``, ``skip on rank 2 at collective 0 of norm of step 3``."""
    words = f"{kind(fault)} on rank {fault.rank}"
    if isinstance(fault, Mute):
        return words
    at = f"{fault.stage.value} of step {fault.step}" if fault.step is not None else fault.stage.value
    number = getattr(fault, "collective", None)
    return f"{words} in {at}" if number is None else f"{words} at collective {number} of {at}"


def placed(fault: Fault) -> bool:
    """Whether it strikes at a place, and not after the scenario."""
    return not isinstance(fault, Mute)


def place_problem(fault: Fault, world: int, endings: tuple[Ending, ...]) -> str | None:
    """What is wrong with where a fault is to strike, as ``field: reason``; None when nothing is.

    Args:
        fault: the fault.
        world: of the scenario.
        endings: of each step of the scenario.
    """
    if fault.rank >= world:
        return f"rank: expected a rank below the world of {world}, got {fault.rank}"
    if isinstance(fault, Kill) and fault.signal not in ENDING_SIGNALS:
        return f"signal: expected one that ends a process, got {fault.signal}"
    if isinstance(fault, Mute):
        return None
    if fault.step is None:
        if fault.stage is not Stage.BUILD:
            return f"stage: without a step expected 'build', got {fault.stage.value!r}"
        return None
    if fault.step >= len(endings):
        return f"step: expected a step below {len(endings)}, got {fault.step}"
    ending = endings[fault.step]
    stages = [stage.value for stage in ending.stages]
    if fault.stage.value not in stages:
        step = f"step {fault.step}{f', {ending.value},' if ending is not Ending.STEP else ''}"
        return f"stage: {step} has the stages {', '.join(map(repr, stages))}, got {fault.stage.value!r}"
    return None
