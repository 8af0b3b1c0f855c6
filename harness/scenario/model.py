"""The scenario: one complete, serialisable input of one run of a sharded system.

A scenario is a header (world, parameters, values, optimizer, seed) and a list of operations that every rank carries
out in the same order. Everything a rank needs is in it: gradients are not sent, each rank rebuilds them from
``(seed, contributor, step, parameter)`` (see :mod:`harness.scenario.values`).

Pure data: this module imports neither torch nor the code that draws scenarios. Structure (types, unknown fields,
sizes) is checked by :mod:`harness.scenario.codec`, meaning (an operation in its right place) by
:func:`harness.scenario.model.check`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from harness.faults.language import MAX_FAULTS, Ending, Fault, Slow, place_problem
from harness.scenario import muon_check, strategy_check, strategy_offer
from harness.scenario.muon import Muon
from harness.scenario.partition import round_bucket
from harness.scenario.strategy import Offer, Strategy

SCHEMA_VERSION: Final = 1

# What a case file may ask for at most. Far above what any machine runs; the machine's own limit is checked later.
MAX_WORLD = 256
MAX_ELEMENTS = 2**40

# What fits a small file, and memory, may still keep ranks busy for days. Each limit is a few hours on two cores, by
# what was measured there, and far above real use:
# gradient elements over all parts and ranks, 28 ns each (1.2 billion elements at 64 ranks, held and spilled: 2**37.8);
MAX_GRADIENT_ELEMENTS = 2**38
# gradient tensors over all parts and ranks, some 100 us each (100,000 parameters, 2 parts, 256 ranks: 2**25.6);
MAX_GRADIENT_TENSORS = 2**26
# buckets over all steps and ranks, 2 collectives each, some 2 ms (a million elements in buckets of 4, 4 ranks: 2**20).
MAX_BUCKET_VISITS = 2**22
MAX_SLOW_MILLISECONDS = 600_000  # of one fault that slows every collective of a stage

# 255 * 2**100 and sums of thousands of them stay far below the largest finite bf16 and fp32 values.
MAX_EXPONENT = 100

World = Annotated[int, Meta(ge=1, le=MAX_WORLD)]
Count = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
Index = Annotated[int, Meta(ge=0, le=2**31)]


class Domain(enum.Enum):
    """What is promised about the sums of a scenario's gradients (DESIGN.md, section 5).

    EXACT: small integers times one power of two; every partial sum, in any order, is exact in fp32.
    NORM_EXACT: in addition every sum of squares of reduced gradients is exact in fp32.
    GENERAL: exponents differ from element to element; sums round, so the order of addition matters.
    """

    EXACT = "exact"
    NORM_EXACT = "norm-exact"
    GENERAL = "general"


class Source(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements ``[start, stop)`` of one stream of values."""

    stream: Index
    start: Count
    stop: Count


class Parameter(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One trainable parameter: its name, its shape (``()`` is a scalar) and the dtype of its compute weights.

    Attributes:
        strides: how its elements lie in memory; ``"transposed"``: with the dimensions in reverse order.
        sources: where its values (initial weights, gradients) come from, end to end in row-major order of its shape;
            empty: all of the stream that has its index in the list. So the same values can be cut into other
            parameters, or lie in another order.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    strides: Literal["contiguous", "transposed"] = "contiguous"
    sources: Annotated[tuple[Source, ...], Meta(max_length=64)] = ()

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """The product of its dimensions other than 0: torch computes with it even where there is no element."""
        return math.prod(dim or 1 for dim in self.shape)


def sources(parameter: Parameter, index: int) -> tuple[Source, ...]:
    """Where the values of the parameter at ``index`` of the list come from, end to end."""
    return parameter.sources or (Source(index, 0, parameter.numel),)


class Values(Struct, frozen=True, forbid_unknown_fields=True):
    """How gradients are drawn: ``k * 2**(exponent + s)``, integer ``|k| <= max_k``, ``0 <= s <= spread`` per element.

    What follows ``exponent`` is for the general domain alone.

    Attributes:
        cancel: of any three contributors in a row, one has ``k * 2**(exponent + spread)``, one the same with the other
            sign, and one ``k' * 2**exponent``: sums lose most of their digits, or all that the third adds.
        special: so many of 1024 elements are special values instead: the largest finite bf16 values, the smallest
            subnormal and normal ones, zeros of either sign.
        nonfinite: the special values include inf, -inf and nan.
    """

    domain: Domain
    max_k: Annotated[int, Meta(ge=1, le=255)]
    exponent: Annotated[int, Meta(ge=-133, le=MAX_EXPONENT)]
    spread: Annotated[int, Meta(ge=0, le=60)] = 0
    cancel: bool = False
    special: Annotated[int, Meta(ge=0, le=1024)] = 0
    nonfinite: bool = False


class AdamW(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``torch.optim.AdamW``, the same for the subject's master and for the reference.

    ``lr`` is the one it starts with, see :class:`Rate`.
    """

    lr: Annotated[float, Meta(ge=0, le=10)] = 1e-3
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.1
    foreach: bool = False
    amsgrad: bool = False
    maximize: bool = False


class Build(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="build"):
    """Construct the system under verification with this requested bucket size (elements).

    A later one, between two steps, drops the system and its optimizer and constructs both anew on the parameters as
    they are: masters are made from the compute weights, moments begin at nothing.
    """

    bucket: Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]


class Part(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="part"):
    """One forward/backward: fill ``.grad`` and call ``collect(more)``.

    Attributes:
        more: what is announced: further parts follow in this step.
        contributors: for each rank, whose gradients it holds. Two runs of the same contributors on other worlds or
            in other parts must give the same sums.
        none: for each rank, the indices of the parameters whose ``.grad`` is None in this part.
    """

    more: bool
    contributors: tuple[Index, ...]
    none: tuple[tuple[Index, ...], ...]


class Clip(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="clip"):
    """Clip this step's gradient to ``max_norm``; stands between the last part and the step."""

    max_norm: Annotated[float, Meta(gt=0)]


class Step(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="step"):
    """Reduce, take the norm, clip if a clip precedes, update, gather."""


class Discard(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="discard"):
    """Forget what was collected, on all ranks; ends the step without a reduction."""


class Skip(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="skip"):
    """End the step after the reduction and its norm: no update and no gather, as when the norm is not finite."""


class Rate(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="rate"):
    """Between two steps: set the learning rate of the optimizer."""

    lr: Annotated[float, Meta(ge=0, le=10)]


class Load(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="load"):
    """Between two steps: put other compute weights into the parameters, then ``refresh_from_weights()``.

    ``version``: which; 0 are those of the beginning. Masters become the new weights, moments stay.
    """

    version: Annotated[int, Meta(ge=0, le=255)]


class Reload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="reload"):
    """Between two steps, of system ``"muon"``: save the state, construct both optimizers anew, and load it there."""


Between = Build | Rate | Load | Reload
"""What may stand between two steps."""

Operation = Build | Part | Clip | Step | Discard | Skip | Rate | Load | Reload


System = Literal["zero_master", "muon", "strategy"]
"""What kind of system a scenario drives."""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """One complete input.

    ``operations``: a build; then, per step, parts, an optional clip, and a step or a discard. ``faults``: what some
    ranks are to do wrong in it (:mod:`harness.faults.language`). ``muon``, ``strategy``: of the system of that name
    alone.
    """

    world: World
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    parameters: Annotated[tuple[Parameter, ...], Meta(min_length=1, max_length=100_000)]
    values: Values
    optimizer: AdamW
    operations: Annotated[tuple[Operation, ...], Meta(min_length=1, max_length=100_000)]
    version: Literal[1] = SCHEMA_VERSION
    system: System = "zero_master"
    faults: Annotated[tuple[Fault, ...], Meta(max_length=MAX_FAULTS)] = ()
    muon: Muon | None = None
    strategy: Strategy | None = None

    @property
    def numel(self) -> int:
        """N: elements of all parameters together."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def bucket(self) -> int:
        """The requested bucket size of the build (elements)."""
        for operation in self.operations:
            if isinstance(operation, Build):
                return operation.bucket
        raise ValueError("scenario has no build operation")


def muon_of(scenario: Scenario) -> Muon:
    """What a scenario of system ``"muon"`` has beside all others; raises ValueError for one of another system."""
    if scenario.muon is None:
        raise ValueError(f"scenario of system {scenario.system!r} says nothing of Muon")
    return scenario.muon


def strategy_of(scenario: Scenario) -> Strategy:
    """What a scenario of system ``"strategy"`` has beside all others; raises ValueError for one of another system."""
    if scenario.strategy is None:
        raise ValueError(f"scenario of system {scenario.system!r} says nothing of a strategy")
    return scenario.strategy


def multiple_of_scenario(scenario: Scenario) -> int:
    """What every integer of a gradient is multiplied by, so that means are exact; 1 where sums are not divided."""
    averaging = scenario.muon or scenario.strategy
    return 1 if averaging is None else averaging.multiple


class Extension(Struct, frozen=True, omit_defaults=True):
    """What a subject takes beyond the contract's space; a class says so in ``verify_extensions``, by name.

    Attributes:
        refresh: ``refresh_from_weights()``: a :class:`Load` may be drawn.
        dtypes: parameters of several dtypes.
        strides: parameters that are not contiguous.
        strategy: of a subject of system ``"strategy"``: what of a strategy may be drawn for it.
    """

    refresh: bool = False
    dtypes: bool = False
    strides: bool = False
    strategy: Offer = Offer()


EXTENSIONS: Final = ("refresh", "dtypes", "strides")
"""The names of those that a class of any other system than ``"strategy"`` may declare."""

CONTRACT: Final = Extension()
"""Nothing beyond the contract's space."""


def beyond(scenario: Scenario, extension: Extension) -> tuple[str, ...]:
    """What a scenario asks of a subject that takes ``extension``, and that is not in it."""
    asked = Extension(
        refresh=any(isinstance(operation, Load) for operation in scenario.operations),
        dtypes=len({parameter.dtype for parameter in scenario.parameters}) > 1,
        strides=any(parameter.strides != "contiguous" for parameter in scenario.parameters),
    )
    found = tuple(name for name in EXTENSIONS if getattr(asked, name) and not getattr(extension, name))
    if scenario.strategy is None:
        return found
    return (*found, *strategy_offer.beyond(scenario, scenario.strategy, extension.strategy))


class StepPlan(Struct, frozen=True):
    """The operations of one step, gathered: what :func:`steps` yields.

    ``before``: what comes between the step before and this one, without the first build. ``discard``, ``skip``: how
    it ends, if not by a step. ``bucket``: requested by the last build before it.
    """

    index: int
    parts: tuple[Part, ...]
    clip: Clip | None
    discard: bool
    skip: bool = False
    before: tuple[Between, ...] = ()
    bucket: int = 1

    @property
    def ending(self) -> Ending:
        """How it ends."""
        return Ending.DISCARD if self.discard else Ending.SKIP if self.skip else Ending.STEP

    @property
    def reduced(self) -> bool:
        """Whether it is carried out whole: reduced, updated, gathered."""
        return not self.discard and not self.skip


def steps(scenario: Scenario) -> Iterator[StepPlan]:
    """The scenario's steps in order; a discarded step counts and is numbered like any other."""
    parts: list[Part] = []
    before: list[Between] = []
    clip: Clip | None = None
    bucket = scenario.bucket
    index = 0
    for position, operation in enumerate(scenario.operations):
        if isinstance(operation, Part):
            parts.append(operation)
        elif isinstance(operation, Clip):
            clip = operation
        elif isinstance(operation, Step | Discard | Skip):
            discard, skip = isinstance(operation, Discard), isinstance(operation, Skip)
            yield StepPlan(index, tuple(parts), clip, discard, skip, tuple(before), bucket)
            parts, before, clip, index = [], [], None, index + 1
        elif position:
            before.append(operation)
            bucket = operation.bucket if isinstance(operation, Build) else bucket


def check(scenario: Scenario) -> str | None:
    """What is wrong with the meaning of a well-formed scenario, as ``path: reason``; None when nothing is."""
    if scenario.numel == 0:
        return "parameters: no elements at all"
    if scenario.numel > MAX_ELEMENTS:
        return f"parameters: {scenario.numel} elements, at most {MAX_ELEMENTS}"
    first_use: dict[str, int] = {}
    for index, parameter in enumerate(scenario.parameters):
        if parameter.extent > MAX_ELEMENTS:
            return f"parameters[{index}].shape: dimensions other than 0 multiply to more than {MAX_ELEMENTS}"
        problem = _sources_problem(parameter)
        if problem is not None:
            return f"parameters[{index}].sources{problem}"
        first = first_use.setdefault(parameter.name, index)
        if first != index:
            return f"parameters[{index}].name: {parameter.name!r} is the name of parameters[{first}] already"
    if scenario.values.exponent + scenario.values.spread > MAX_EXPONENT:
        return f"values.spread: exponent + spread is more than {MAX_EXPONENT}, sums would overflow"
    narrow = any(parameter.dtype == "fp16" for parameter in scenario.parameters)
    if narrow and not -24 <= scenario.values.exponent <= scenario.values.exponent + scenario.values.spread <= 8:
        return "values.exponent: gradients of fp16 parameters need exponents from -24 to 8, spread included"
    if scenario.values.domain is not Domain.GENERAL:
        for name, value in (
            ("spread", scenario.values.spread),
            ("cancel", scenario.values.cancel),
            ("special", scenario.values.special),
        ):
            if value:
                return f"values.{name}: must be {type(value)()!r} in domain {scenario.values.domain.value!r}"
    if narrow and scenario.values.special:
        return "values.special: the special values are those of bf16, which an fp16 parameter cannot hold"
    if scenario.values.nonfinite and not scenario.values.special:
        return "values.nonfinite: without special values there are none that are not finite"
    if not isinstance(scenario.operations[0], Build):
        return "operations[0]: the first operation must be a build"
    return (
        _system_problem(scenario)
        or _operations_problem(scenario)
        or _faults_problem(scenario)
        or _own_problem(scenario)
        or exact_sums_problem(scenario)
        or _work_problem(scenario)
    )


def _operations_problem(scenario: Scenario) -> str | None:
    num_parts = 0
    clipped = False
    for index, operation in enumerate(scenario.operations):
        path = f"operations[{index}]"
        if isinstance(operation, _NOT_OF[scenario.system]):
            tag = operation.__struct_config__.tag
            return f"{path}: a {tag} is no operation of system {scenario.system!r}"
        if isinstance(operation, Build | Rate | Load | Reload):
            if num_parts:
                return f"{path}: a {operation.__struct_config__.tag} within a step"
            if isinstance(operation, Build) and index and scenario.system == "strategy":
                return f"{path}: a second build, but a model of system 'strategy' is wrapped once"
        elif isinstance(operation, Part):
            if clipped:
                return f"{path}: a part after the clip of its step"
            if len(operation.contributors) != scenario.world or len(operation.none) != scenario.world:
                return f"{path}: contributors and none need one entry for each of {scenario.world} ranks"
            for rank, missing in enumerate(operation.none):
                if missing and max(missing) >= len(scenario.parameters):
                    return f"{path}.none[{rank}]: no such parameter"
                if len(set(missing)) < len(missing):
                    return f"{path}.none[{rank}]: a parameter stands twice"
            num_parts += 1
        elif isinstance(operation, Clip):
            if num_parts == 0:
                return f"{path}: a clip before any part of its step"
            if clipped:
                return f"{path}: a second clip in one step"
            clipped = True
        else:
            if num_parts == 0:
                return f"{path}: a step without any part"
            if isinstance(operation, Discard) and clipped:
                return f"{path}: a discarded step cannot clip"
            num_parts, clipped = 0, False
    if len(scenario.operations) > 1 and not isinstance(scenario.operations[-1], Step | Discard | Skip):
        return "operations: the last step is not finished by a step, a skip or a discard"
    return None


_NOT_OF: dict[str, tuple[type, ...]] = {
    "zero_master": (Reload,),
    "muon": (Clip, Load),
    "strategy": (Load, Reload, Discard),
}
"""Operations that a system does not have: Muon clips by itself, and masters alone say what its weights are; a strategy
has neither weights to refresh nor a state of its own, and forgets gradients after the reduction alone (``Skip``)."""


def _system_problem(scenario: Scenario) -> str | None:
    for system, given in (("muon", scenario.muon), ("strategy", scenario.strategy)):
        if scenario.system == system and given is None:
            return f"{system}: missing, system {system!r} needs it"
        if scenario.system != system and given is not None:
            return f"{system}: given, but the system is {scenario.system!r}"
    return None


def _own_problem(scenario: Scenario) -> str | None:
    """What is wrong with what the scenario's system alone has."""
    if scenario.muon is not None:
        return muon_check.problem(scenario, scenario.muon, _most_parts(scenario))
    if scenario.strategy is not None:
        return strategy_check.problem(scenario, scenario.strategy, _most_parts(scenario))
    return None


def _most_parts(scenario: Scenario) -> int:
    """Parts of the step that has the most."""
    return max((len(step.parts) for step in steps(scenario)), default=0)


def _sources_problem(parameter: Parameter) -> str | None:
    for number, source in enumerate(parameter.sources):
        if source.stop < source.start:
            return f"[{number}]: stops at {source.stop}, before its start at {source.start}"
    given = sum(source.stop - source.start for source in parameter.sources)
    if parameter.sources and given != parameter.numel:
        return f": {given} elements in all, the parameter has {parameter.numel}"
    return None


def _faults_problem(scenario: Scenario) -> str | None:
    endings = tuple(plan.ending for plan in steps(scenario)) if scenario.faults else ()
    for index, fault in enumerate(scenario.faults):
        problem = place_problem(fault, scenario.world, endings)
        if problem is not None:
            return f"faults[{index}].{problem}"
    return None


def _work_problem(scenario: Scenario) -> str | None:
    """Why the scenario would run for longer than anybody waits; None when it does not."""
    num_parts = sum(isinstance(operation, Part) for operation in scenario.operations)
    num_steps = sum(isinstance(operation, Step | Skip) for operation in scenario.operations)
    builds = {at: operation.bucket for at, operation in enumerate(scenario.operations) if isinstance(operation, Build)}
    smallest = min(builds, key=builds.__getitem__)
    num_buckets = -(-scenario.numel // round_bucket(builds[smallest], scenario.world))
    of_ranks = f"on {scenario.world} ranks"
    limits = (
        ("operations", num_parts, "parts", scenario.numel, "elements", MAX_GRADIENT_ELEMENTS),
        ("operations", num_parts, "parts", len(scenario.parameters), "parameters", MAX_GRADIENT_TENSORS),
        (f"operations[{smallest}].bucket", num_steps, "steps", num_buckets, "buckets", MAX_BUCKET_VISITS),
    )
    for path, times, what, size, unit, limit in limits:
        if times * size * scenario.world > limit:
            return f"{path}: {times} {what} x {size} {unit} {of_ranks} are too much work, at most {limit} in all"
    for index, fault in enumerate(scenario.faults):
        if isinstance(fault, Slow) and fault.milliseconds * num_buckets > MAX_SLOW_MILLISECONDS:
            late = f"{fault.milliseconds} ms at each of {num_buckets} buckets"
            return f"faults[{index}].milliseconds: {late} are too long, at most {MAX_SLOW_MILLISECONDS} ms in all"
    return None


def exact_sums_problem(scenario: Scenario) -> str | None:
    """Why the scenario's domain does not hold for its values (guarantees.md, "Values"); None when it does."""
    values = scenario.values
    if values.domain is Domain.GENERAL:
        return None
    total = scenario.world * _most_parts(scenario) * values.max_k * multiple_of_scenario(scenario)
    if total >= 2**24:
        return f"values.max_k: sums reach {total}, exact in fp32 only below 2**24"
    if values.domain is Domain.NORM_EXACT:
        if scenario.numel * total * total >= 2**24:
            return f"values.max_k: sums of squares reach {scenario.numel * total * total}, exact only below 2**24"
        if not -74 <= values.exponent <= 52:
            return f"values.exponent: {values.exponent} lets squares under- or overflow (norm-exact: -74 to 52)"
    return None
