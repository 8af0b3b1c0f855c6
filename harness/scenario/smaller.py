"""Makes a failing scenario smaller, whatever drew it.

Works on the scenario itself: leaves out ranks, steps, parts, parameters, then elements, then all that is not plain.
A try costs a run on the ranks, so what takes most away is tried first, and nothing is tried twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import asdict, replace

from harness.faults.language import Corrupt, Fault, Mute, Slow
from harness.scenario import muon_smaller, strategy_smaller
from harness.scenario.fewer import lower, without_some
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Extension,
    Load,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Skip,
    Step,
    Values,
    beyond,
    check,
    multiple_of_scenario,
)
from harness.verdict import STAGE_ORDER, Stage

_ENDS = (Step, Discard, Skip)

LARGE: Final = 100_000
"""From so many elements on shorter parameters are tried before all else: each try takes seconds."""

# The simplest of their kind. A clip to 1 is active or not as a larger or smaller gradient wants it.
_PLAIN_CLIP = Clip(1.0)
_PLAIN_RATE = Rate(1e-2)
_PLAIN_LOAD = Load(1)


def smallest(
    scenario: Scenario,
    fails: Callable[[Scenario], bool],
    *,
    worlds: Collection[int] | None = None,
    keep_bucket: bool = False,
    extension: Extension | None = None,
) -> Scenario:
    """The smallest scenario found that still fails.

    Parameters keep their names. Faults stay, each on a rank and in a step that stay too.

    Args:
        scenario: one that fails.
        fails: whether another one does; called once for each. Whatever it raises ends the search and passes through.
        worlds: numbers of ranks that it may have, beside its own; None: any.
        keep_bucket: whether to ask for no other bucket sizes.
        extension: what the subject takes: nothing is asked for beyond it, but for what the scenario asks for already;
            None: anything may be.
    """
    best = scenario
    tried = {scenario}
    asked = {*beyond(scenario, extension)} if extension is not None else set()

    def wanted(candidate: Scenario) -> bool:
        if worlds is not None and candidate.world not in {scenario.world, *worlds}:
            return False
        if keep_bucket and not {*_requests(candidate)} <= {*_requests(scenario)}:
            return False
        if extension is not None and not {*beyond(candidate, extension)} <= asked:
            return False
        return check(candidate) is None and all(_strikes(fault, candidate) for fault in candidate.faults)

    before: Scenario | None = None
    while best != before:
        before = best
        passes = _PASSES[best.system]
        if best.numel >= LARGE and best.muon is None:
            passes = (_sizes, *passes)
        for candidates in passes:
            best = _improved(best, candidates, fails, wanted, tried)
    return best


def _improved(
    best: Scenario,
    candidates: Callable[[Scenario], Iterator[Scenario]],
    fails: Callable[[Scenario], bool],
    wanted: Callable[[Scenario], bool],
    tried: set[Scenario],
) -> Scenario:
    """The best that one kind of change leads to."""
    while True:
        size = _size(best)
        for candidate in map(_fitted, candidates(best)):
            if candidate in tried or _size(candidate) >= size or not wanted(candidate):
                continue
            tried.add(candidate)
            if fails(candidate):
                best = candidate
                break
        else:
            return best


def _fitted(scenario: Scenario) -> Scenario:
    """With what a change left behind mended, as the scenario's system has it."""
    return strategy_smaller.fitted(muon_smaller.fitted(scenario))


def _size(scenario: Scenario) -> tuple[int | float, ...]:
    """What smaller means: of two scenarios the one whose first difference is lower."""
    operations = scenario.operations
    parts = [operation for operation in operations if isinstance(operation, Part)]
    values, plain = scenario.values, AdamW()
    plain_dtype = "bf16" if scenario.strategy is None else "fp32"  # of which a strategy's parameters are, mostly
    return (
        scenario.world,
        sum(isinstance(operation, _ENDS) for operation in operations),
        len(operations),
        len(scenario.parameters),
        scenario.numel,
        sum(len(missing) for part in parts for missing in part.none),
        sum(_requests(scenario)),
        sum(not isinstance(operation, Step) for operation in operations),
        sum(len(parameter.shape) + (parameter.dtype != plain_dtype) for parameter in scenario.parameters),
        sum((parameter.strides != "contiguous") + len(parameter.sources) for parameter in scenario.parameters),
        *muon_smaller.size(scenario.muon),
        *strategy_smaller.size(scenario.strategy),
        sum(part.more for part in parts) + _lies(operations),
        (values.domain is Domain.GENERAL) + (values.domain is not Domain.EXACT),
        values.special + values.spread + values.cancel + values.nonfinite,
        multiple_of_scenario(scenario),
        abs(values.exponent),
        sum(value != asdict(plain)[name] for name, value in asdict(scenario.optimizer).items()),
        sum(_plain(operation) != operation for operation in operations),
        sum(sum(_complexity(fault)) for fault in scenario.faults),
        sum(sum(part.contributors) for part in parts),
        scenario.seed,
    )


# --- one kind of change each ------------------------------------------------------------------------------------------


def _worlds(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer ranks: the first ones, the last, those from one with a fault on, or all but one."""
    world = scenario.world
    faulty = [fault.rank for fault in scenario.faults]
    for fewer in range(1, world):
        for start in sorted({min(rank, world - fewer) for rank in (0, world, *faulty)}):
            yield from _of_ranks(scenario, range(start, start + fewer))
    for left_out in range(1, world - 1):
        yield from _of_ranks(scenario, [rank for rank in range(world) if rank != left_out])


def _of_ranks(scenario: Scenario, ranks: Sequence[int]) -> Iterator[Scenario]:
    """The scenario on these ranks alone, if all its faults are on them."""
    if not {fault.rank for fault in scenario.faults} <= {*ranks}:
        return
    operations = tuple(
        replace(
            operation,
            contributors=tuple(operation.contributors[rank] for rank in ranks),
            none=tuple(operation.none[rank] for rank in ranks),
        )
        if isinstance(operation, Part)
        else operation
        for operation in scenario.operations
    )
    faults = tuple(replace(fault, rank=ranks.index(fault.rank)) for fault in scenario.faults)
    muon = scenario.muon and muon_smaller.of_ranks(scenario.muon, ranks)
    yield replace(scenario, world=len(ranks), operations=operations, faults=faults, muon=muon)


def _steps(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer steps, with all in which a fault strikes."""
    steps: list[tuple[Operation, ...]] = []
    begun: list[Operation] = []
    for operation in scenario.operations[1:]:
        begun.append(operation)
        if isinstance(operation, _ENDS):
            steps.append(tuple(begun))
            begun = []
    needed = {_step(fault) for fault in scenario.faults} - {None}
    for kept in without_some(range(len(steps))):
        if needed <= {*kept}:
            operations = (scenario.operations[0], *(operation for index in kept for operation in steps[index]))
            places = {index: place for place, index in enumerate(kept)}
            faults = tuple(_moved(fault, places) for fault in scenario.faults)
            yield replace(scenario, operations=operations, faults=faults)


def _operations(scenario: Scenario) -> Iterator[Scenario]:
    """Without one operation: a part, a clip, what stands between steps; or steps that end plainly."""
    operations = scenario.operations
    for index in range(1, len(operations)):
        if not isinstance(operations[index], _ENDS):
            yield _announced(scenario, (*operations[:index], *operations[index + 1 :]))
    for index, operation in enumerate(operations):
        if isinstance(operation, Discard | Skip):
            yield _announced(scenario, (*operations[:index], Step(), *operations[index + 1 :]))


def _announced(scenario: Scenario, operations: Sequence[Operation]) -> Scenario:
    """With these operations, of which only parts of discarded steps may announce more than comes."""
    mended = list(operations)
    for index, operation in enumerate(mended[:-1]):
        following = mended[index + 1]
        if isinstance(operation, Part) and operation.more and isinstance(following, Step | Skip | Clip):
            mended[index] = replace(operation, more=False)
    return replace(scenario, operations=tuple(mended))


def _parameters(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer parameters: without some; or two neighbours as one, None where the first one was or where either was."""
    count = len(scenario.parameters)
    for kept in without_some(range(count)):
        parameters = tuple(scenario.parameters[index] for index in kept)
        fewer = _renumbered(scenario, parameters, {index: place for place, index in enumerate(kept)})
        if scenario.muon is not None:
            marks = tuple(scenario.muon.marks[index] for index in kept)
            fewer = replace(fewer, muon=replace(scenario.muon, marks=marks))
        if scenario.strategy is not None:
            places = tuple(scenario.strategy.places[index] for index in kept)
            fewer = replace(fewer, strategy=replace(scenario.strategy, places=places))
        yield fewer
    for index in range(count - 1) if scenario.system == "zero_master" else ():
        first, second = scenario.parameters[index : index + 2]
        joined = Parameter(first.name, (first.numel + second.numel,), first.dtype)
        parameters = (*scenario.parameters[:index], joined, *scenario.parameters[index + 2 :])
        either = {old: old - (old > index) for old in range(count)}
        yield _renumbered(scenario, parameters, {old: place for old, place in either.items() if old != index + 1})
        yield _renumbered(scenario, parameters, either)


def _renumbered(scenario: Scenario, parameters: tuple[Parameter, ...], places: dict[int, int]) -> Scenario:
    """With these parameters; ``places``: where those that stay have gone."""
    operations = tuple(
        replace(
            operation,
            none=tuple(
                tuple(sorted({places[index] for index in missing if index in places})) for missing in operation.none
            ),
        )
        if isinstance(operation, Part)
        else operation
        for operation in scenario.operations
    )
    return replace(scenario, parameters=parameters, operations=operations)


def _sizes(scenario: Scenario) -> Iterator[Scenario]:
    """All parameters shorter by the same factor, and all buckets, so that what crosses an edge still does."""
    for factor in (64, 8, 2):
        flat = tuple(
            Parameter(parameter.name, (-(-parameter.numel // factor),), parameter.dtype)
            for parameter in scenario.parameters
        )
        shaped = tuple(
            replace(parameter, shape=_narrower(parameter.shape, factor), sources=())
            for parameter in scenario.parameters
        )
        operations = tuple(
            Build(max(1, operation.bucket // factor)) if isinstance(operation, Build) else operation
            for operation in scenario.operations
        )
        for parameters in (flat, shaped):
            yield replace(scenario, parameters=parameters, operations=operations)
            yield replace(scenario, parameters=parameters)


def _narrower(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """With the largest dimension divided."""
    if not shape:
        return shape
    axis = max(range(len(shape)), key=shape.__getitem__)
    return (*shape[:axis], -(-shape[axis] // factor), *shape[axis + 1 :])


def _shapes(scenario: Scenario) -> Iterator[Scenario]:
    """Parameters of fewer elements, of one dimension, of bf16, contiguous, with values of their own."""
    for index, parameter in enumerate(scenario.parameters):
        plain = Parameter(parameter.name, (parameter.numel,), parameter.dtype)
        for changed in (
            *(replace(plain, shape=(numel,)) for numel in lower(parameter.numel)),
            plain,
            replace(plain, dtype="bf16"),
            *(
                replace(parameter, shape=(*parameter.shape[:axis], fewer, *parameter.shape[axis + 1 :]), sources=())
                for axis, dimension in enumerate(parameter.shape)
                for fewer in lower(dimension)
            ),
            replace(parameter, dtype="bf16"),
            replace(parameter, strides="contiguous"),
            replace(parameter, sources=()),
        ):
            if changed != parameter:
                parameters = (*scenario.parameters[:index], changed, *scenario.parameters[index + 1 :])
                yield replace(scenario, parameters=parameters)


def _buckets(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller buckets, each by itself."""
    for index, operation in enumerate(scenario.operations):
        if isinstance(operation, Build):
            for bucket in lower(operation.bucket):
                yield _with_operation(scenario, index, Build(bucket))


def _gradients(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer gradients that are None: everywhere, in a part, on a rank; and parts that are announced as they come."""
    present = ((),) * scenario.world
    parts = [(index, part) for index, part in enumerate(scenario.operations) if isinstance(part, Part)]
    operations = list(scenario.operations)
    for index, part in parts:
        operations[index] = replace(part, none=present)
    yield replace(scenario, operations=tuple(operations))
    for index, part in parts:
        yield _with_operation(scenario, index, replace(part, none=present))
        for rank, missing in enumerate(part.none):
            for fewer in without_some(missing) if missing else ():
                none = (*part.none[:rank], tuple(fewer), *part.none[rank + 1 :])
                yield _with_operation(scenario, index, replace(part, none=none))
        last = not isinstance(scenario.operations[index + 1], Part)
        yield _with_operation(scenario, index, replace(part, more=not last))


def _values(scenario: Scenario) -> Iterator[Scenario]:
    """Plain values, and a plain optimizer: all at once, or each setting by itself.

    Integers stay as large as they are: of small ones many are equal, and what is wrong can no longer be told from them.
    """
    values, optimizer = scenario.values, scenario.optimizer
    plain = Values(Domain.EXACT, values.max_k, 0)
    yield replace(scenario, values=plain, optimizer=AdamW())
    yield replace(scenario, values=plain)
    yield replace(scenario, values=Values(Domain.EXACT, values.max_k, values.exponent))
    sign = 1 if values.exponent > 0 else -1
    changes: list[dict[str, Any]] = [
        {"nonfinite": False},
        {"special": 0, "nonfinite": False},
        *({"special": special} for special in lower(values.special)),
        {"cancel": False},
        *({"spread": spread} for spread in (0, *lower(values.spread))),
        *({"exponent": sign * exponent} for exponent in (0, *lower(abs(values.exponent)))),
    ]
    for change in changes:
        yield replace(scenario, values=replace(values, **change))
    yield replace(scenario, optimizer=AdamW())
    for name, value in asdict(AdamW()).items():
        yield replace(scenario, optimizer=replace(optimizer, **{name: value}))


def _details(scenario: Scenario) -> Iterator[Scenario]:
    """Plain operations, contributors and seeds."""
    operations = scenario.operations
    yield replace(scenario, operations=_counted(scenario.world, map(_plain, operations)), seed=0)
    yield replace(scenario, operations=_counted(scenario.world, operations))
    yield replace(scenario, seed=0)
    for index, operation in enumerate(operations):
        yield _with_operation(scenario, index, _plain(operation))


def _plain(operation: Operation) -> Operation:
    """The simplest operation of its kind, among those between which nothing above decides."""
    if isinstance(operation, Clip):
        return _PLAIN_CLIP
    if isinstance(operation, Rate):
        return _PLAIN_RATE
    return _PLAIN_LOAD if isinstance(operation, Load) else operation


def _counted(world: int, operations: Iterator[Operation] | Sequence[Operation]) -> tuple[Operation, ...]:
    """With contributors that count up from 0 in each step."""
    counted: list[Operation] = []
    first = 0
    for operation in operations:
        if isinstance(operation, Part):
            counted.append(replace(operation, contributors=tuple(range(first, first + world))))
            first += world
        else:
            counted.append(operation)
            first = 0
    return tuple(counted)


# --- faults


# Nothing of what is corrupted but its rank: it must be something that shows.
_PLAIN_DETAILS: Final = {"signal": 9, "code": 0, "how": "sleep", "milliseconds": 1}


def _faults(scenario: Scenario) -> Iterator[Scenario]:
    """Faults on a lower rank, in an earlier stage, with plainer details."""
    for index, fault in enumerate(scenario.faults):
        stages = [] if isinstance(fault, Mute | Corrupt) else list(Stage)[: STAGE_ORDER[fault.stage]]
        changes: list[dict[str, Any]] = [
            *({"rank": rank} for rank in range(fault.rank)),
            *({"stage": stage} for stage in stages),
            *({name: value} for name, value in _PLAIN_DETAILS.items() if hasattr(fault, name)),
        ]
        for change in changes:
            faults = (*scenario.faults[:index], replace(fault, **change), *scenario.faults[index + 1 :])
            yield replace(scenario, faults=faults)


def _moved(fault: Fault, places: dict[int, int]) -> Fault:
    """In the step that has gone to another place."""
    step = _step(fault)
    return fault if step is None or isinstance(fault, Mute) else replace(fault, step=places[step])


def _step(fault: Fault) -> int | None:
    """The step in which it strikes; None: the construction, or after the scenario."""
    return None if isinstance(fault, Mute) else fault.step


def _strikes(fault: Fault, scenario: Scenario) -> bool:
    """Whether there is what the fault needs to strike: ranks that speak to each other."""
    if isinstance(fault, Mute):
        return True
    collective = isinstance(fault, Slow) or getattr(fault, "collective", None) is not None
    return not collective or (scenario.world > 1 and fault.stage in (Stage.REDUCE, Stage.NORM, Stage.GATHER))


def _complexity(fault: Fault) -> tuple[int, ...]:
    stage = 0 if isinstance(fault, Mute) else STAGE_ORDER[fault.stage]
    details = sum(getattr(fault, name, plain) != plain for name, plain in _PLAIN_DETAILS.items())
    return fault.rank, _step(fault) or 0, stage, details


_PASSES: dict[str, tuple[Callable[[Scenario], Iterator[Scenario]], ...]] = {
    "zero_master": (
        _worlds,
        _steps,
        _operations,
        _parameters,
        _sizes,
        _buckets,
        _shapes,
        _gradients,
        _values,
        _faults,
        _details,
    ),
    "muon": (
        _worlds,
        _steps,
        _operations,
        _parameters,
        muon_smaller.colors,
        _buckets,
        muon_smaller.shapes,
        _gradients,
        muon_smaller.options,
        muon_smaller.marks,
        _values,
        _faults,
        _details,
    ),
    "strategy": (
        _worlds,
        _steps,
        _operations,
        _parameters,
        strategy_smaller.blocks,
        _buckets,
        strategy_smaller.shapes,
        _gradients,
        strategy_smaller.options,
        strategy_smaller.places,
        _values,
        _faults,
        _details,
    ),
}


def _with_operation(scenario: Scenario, index: int, operation: Operation) -> Scenario:
    return replace(scenario, operations=(*scenario.operations[:index], operation, *scenario.operations[index + 1 :]))


def _requests(scenario: Scenario) -> list[int]:
    """The requested bucket sizes."""
    return [operation.bucket for operation in scenario.operations if isinstance(operation, Build)]


def _lies(operations: Sequence[Operation]) -> int:
    """Parts whose announcement does not come true."""
    pairs = itertools.pairwise(operations)
    return sum(isinstance(part, Part) and part.more is not isinstance(after, Part) for part, after in pairs)
