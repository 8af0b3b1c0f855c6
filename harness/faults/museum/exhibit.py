"""What is written on the label of an exhibit, and a short way to write down a scenario by hand. No torch."""

from __future__ import annotations

import enum
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from harness.diagnosis.symptoms import Symptom
from harness.report.result import Failure
from harness.scenario.model import (
    AdamW,
    Between,
    Build,
    Clip,
    Discard,
    Domain,
    Operation,
    Parameter,
    Part,
    Scenario,
    Skip,
    Step,
    System,
    Values,
    check,
)
from harness.scenario.muon import Muon
from harness.scenario.strategy import Strategy
from harness.verdict import Property, Stage

PREFIX: Final = "museum"
"""Of the names of subjects: ``museum:max-of-norms``."""

_HERE: Final = Path(__file__).parent


class Kind(enum.Enum):
    """What goes wrong in a bug."""

    ACCUMULATION = "accumulation"
    SPILL = "host spill"
    MISSING = "missing gradients"
    REDUCTION = "reduction"
    ROUNDING = "rounding and dtype"
    DETERMINISM = "determinism"
    NORM = "norm and clipping"
    LAYOUT = "layout"
    PADDING = "padding"
    ODD = "odd parameters"
    STALE = "stale weights"
    LOADING = "initial and loaded weights"
    DECAY = "weight decay"
    RACE = "order and races"
    DIVERGENCE = "ranks part ways"
    RESOURCES = "memory and traffic"
    CHECKPOINT = "checkpoint"
    ORTHOGONAL = "orthogonalisation"
    OWNERS = "owners and groups"
    SYNC = "no_sync and deferred sums"
    WRAP = "wrapping a model"


Place = Callable[[Scenario, Failure], bool]
"""Whether a failure names a rank or a parameter where the bug is: see :mod:`harness.faults.museum.places`."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One planted bug.

    Attributes:
        name: the class; ``module``: of ``harness.faults.museum.plants``, and of ``labels``, where it is.
        bugs: public bugs of which this is the mechanism, as ``owner/repository#number``; empty: none of them, but a
            mistake that the specification of its system names.
        why: what is wrong, and why it shows where it does, in a sentence or two.
        properties: a verifier must name one of these first ...
        stages: ... at one of these stages.
        symptoms: any one of these is the right name for it; empty: none describes it, and naming one would be wrong.
        known: the smallest scenario that shows it, found by hand.
        place: what the rank and the parameter that are named must be; None: any is right, since all are wrong.
        own: a variant of a class of ours that is judged by all that the built-in system promises (``zero2``: traffic,
            memory, fp64 norms, loads, dtypes, strides), and not by the contract of classes alone.
        builtin: of ``own``: the built-in system of which it is a variant; empty where its kind of system has one alone.
        processes: it is about processes (it ends or stops one, or the backend's own behaviour is a part of it), so
            that it is to be shown on real ranks too.
        timing: whether and where it shows on real ranks depends on time; in a simulated world it always does.
    """

    name: str
    module: str
    bugs: tuple[str, ...]
    kind: Kind
    why: str
    properties: frozenset[Property]
    stages: frozenset[Stage]
    known: Scenario
    symptoms: frozenset[Symptom] = frozenset()
    place: Place | None = None
    own: bool = False
    builtin: str = ""
    processes: bool = False
    timing: bool = False

    @property
    def id(self) -> str:
        """Its name in commands: ``max-of-norms``."""
        return kebab(self.name)

    @property
    def system(self) -> System:
        """What it is a class of."""
        return self.known.system

    @property
    def subject(self) -> str:
        """As ``--subject`` has it."""
        return f"{PREFIX}:{self.id}"

    @property
    def target(self) -> str:
        """Where the class is: a file of its own, so that each rank of a simulated world has a copy."""
        return f"{_HERE / 'plants' / self.module}.py:{self.name}"


@dataclass(frozen=True)
class Control:
    """A right class that does something another way: never a violation.

    Attributes:
        name: the class.
        way: what it does, in a few words.
        module: of ``harness.faults.museum``, where the class is.
        own, builtin: a variant of a class of ours, judged as :class:`Plant` has it.
        system: what it is a class of.
    """

    name: str
    way: str
    module: str = "controls"
    own: bool = False
    builtin: str = ""
    system: System = "zero_master"

    @property
    def id(self) -> str:
        """Its name in commands."""
        return kebab(self.name)

    @property
    def subject(self) -> str:
        """As ``--subject`` has it."""
        return f"{PREFIX}:{self.id}"

    @property
    def target(self) -> str:
        """Where the class is."""
        return f"{_HERE / self.module}.py:{self.name}"


def kebab(name: str) -> str:
    """``MaxOfNorms`` as ``max-of-norms``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


# --- scenarios by hand ------------------------------------------------------------------------------------------------

INTEGERS: Final = Values(Domain.EXACT, max_k=255, exponent=-8)
"""Sums are exact; that of two may need more than the 8 bits of bf16."""

SMALL: Final = Values(Domain.NORM_EXACT, max_k=15, exponent=-4)
"""Sums of squares are exact in fp32 too, for a few elements."""

ROUNDING: Final = Values(Domain.GENERAL, max_k=255, exponent=-8, spread=20)
"""Sums round, so that the order of addition shows."""

SPECIAL: Final = Values(Domain.GENERAL, max_k=255, exponent=-8, special=512, nonfinite=True)
"""Every second element is the largest finite, subnormal, zero, inf or nan."""

VISIBLE: Final = AdamW(lr=0.1)
"""Updates are large enough to be seen in bf16."""


class Draft(NamedTuple):
    """A part without its contributors: these are numbered as they come."""

    more: bool
    none: Mapping[int, Sequence[int]]


Written = Draft | Clip | Step | Discard | Skip | Between
"""An operation of a scenario that is written by hand."""


def part(more: bool = False, none: Mapping[int, Sequence[int]] | None = None) -> Draft:
    """A part that announces ``more``; ``none``: for some ranks, the parameters (by index) without a gradient."""
    return Draft(more, none or {})


ONE: Final = (part(), Step())
"""A step of one part."""

TWO: Final = (part(more=True), part(), Step())
"""A step of two parts."""


def known(
    world: int,
    shapes: Sequence[int | tuple[int, ...]],
    bucket: int,
    operations: Sequence[Written] = ONE,
    *,
    values: Values = INTEGERS,
    optimizer: AdamW = VISIBLE,
    parameters: Mapping[int, Mapping[str, str]] | None = None,
    seed: int = 0,
    muon: Muon | None = None,
    strategy: Strategy | None = None,
) -> Scenario:
    """A scenario of parameters ``a``, ``b``, … of these shapes (``4`` is ``(4,)``).

    Args:
        world: number of ranks.
        shapes: of the parameters.
        bucket: requested bucket size, in elements.
        operations: after the build.
        values: how gradients are drawn.
        optimizer: its settings.
        parameters: further fields of some of them, by index: ``{0: {"strides": "transposed"}}``.
        seed: of all values.
        muon: of a scenario of a Muon optimizer; see :func:`harness.faults.museum.muon.known_muon`.
        strategy: of one of a distribution strategy; see :func:`harness.faults.museum.strategies.known_strategy`.

    Raises:
        ValueError: it is none.
    """
    given = parameters or {}
    listed = tuple(
        Parameter(string.ascii_lowercase[index], (shape,) if isinstance(shape, int) else shape, **given.get(index, {}))  # type: ignore[arg-type]
        for index, shape in enumerate(shapes)
    )
    system: System = "muon" if muon is not None else "strategy" if strategy is not None else "zero_master"
    numbered = _numbered(world, bucket, operations)
    scenario = Scenario(world, seed, listed, values, optimizer, numbered, system=system, muon=muon, strategy=strategy)
    problem = check(scenario)
    if problem is not None:
        raise ValueError(problem)
    return scenario


def _numbered(world: int, bucket: int, operations: Sequence[Written]) -> tuple[Operation, ...]:
    """The operations with the build before them, and with contributors."""
    whole: list[Operation] = [Build(bucket)]
    contributors = 0
    for operation in operations:
        if isinstance(operation, Draft):
            numbers = tuple(range(contributors, contributors + world))
            missing = tuple(tuple(operation.none.get(rank, ())) for rank in range(world))
            whole.append(Part(operation.more, numbers, missing))
            contributors += world
        else:
            whole.append(operation)
    return tuple(whole)


def properties(names: str) -> frozenset[Property]:
    """Properties by their names, which spaces separate."""
    return frozenset(map(Property, names.split()))


def stages(names: str) -> frozenset[Stage]:
    """Stages by their names, which spaces separate."""
    return frozenset(map(Stage, names.split()))
