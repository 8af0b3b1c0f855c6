"""Which cells there are, and the scenarios that each is tried on. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Final, Literal, NamedTuple

from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Domain,
    Operation,
    Parameter,
    Part,
    Scenario,
    Step,
    Values,
)
from harness.scenario.muon_check import odd_part
from harness.scenario.strategy import ROOT, Accumulation, Offer, Place, Reduce, Strategy
from harness.scenario.strategy_check import LARGEST_BF16_SUM
from harness.scenario.strategy_situations import meshes

STRATEGIES: Final = ("ddp", "fsdp2", "fsdp2_zero2", "hsdp", "hsdp_zero2", "dmuon", "zero_redundancy")
"""Built-in subjects, in the order of the table's rows."""

REDUCTIONS: Final[tuple[Reduce, ...]] = ("fp32", "bf16")
NUM_STEPS: Final = 3
NUM_PARTS: Final = 3  # of a step that accumulates
_BUCKET: Final = 16  # elements of a bucket of DDP's: several of them

Gathering = Literal["none", "no_sync", "deferred"]
GATHERINGS: Final[tuple[Gathering, ...]] = ("none", "no_sync", "deferred")
"""How a step accumulates: one part; several, reduced in the last; several, whose all-reduce waits for the last."""


class Cell(NamedTuple):
    """One field of the table.

    Attributes:
        strategy: a built-in subject.
        reduce: dtype in which gradients are reduced.
        gathering: how parts are accumulated.
        clips: the gradients of each step are clipped, by a bound far below their norm.
        rounds: sums round, so that the order in which a backend adds decides; else they are exact.
    """

    strategy: str
    reduce: Reduce
    gathering: Gathering = "none"
    clips: bool = False
    rounds: bool = False


def exact_cells() -> list[Cell]:
    """Those in which every bit is promised, in the order of the table."""
    return [
        Cell(strategy, reduce, gathering, clips)
        for strategy in STRATEGIES
        for reduce in REDUCTIONS
        for gathering in GATHERINGS
        for clips in (False, True)
    ]


def rounding_cells() -> list[Cell]:
    """Those that show what is promised of sums that round."""
    return [Cell(strategy, reduce, rounds=True) for strategy in STRATEGIES for reduce in REDUCTIONS]


class _Listed(NamedTuple):
    shape: tuple[int, ...]
    place: Place


# Two blocks and a root. Dimensions that 2, 3 and 4 ranks do not divide, fewer rows than ranks, a frozen parameter.
_LISTED: Final = (
    _Listed((5, 3), Place(0)),
    _Listed((3,), Place(0)),
    _Listed((6, 4), Place(1)),
    _Listed((2, 2), Place(1, frozen=True)),
    _Listed((1,), Place(1)),
    _Listed((7, 2), Place(ROOT)),
)
_DEDICATED: Final = (_Listed((4, 6), Place(0, dedicated=True)), _Listed((5, 2), Place(1, dedicated=True)))


def scenarios(cell: Cell, world: int, offer: Offer, seed: int) -> Iterator[Scenario]:
    """What a cell is tried on at a world: one scenario for each mesh that its strategy can have there.

    Args:
        cell: of the table.
        world: number of ranks.
        offer: of the strategy.
        seed: of all values.
    """
    for replicas in meshes(world, offer):
        yield _scenario(cell, world, offer, seed, replicas)


def _scenario(cell: Cell, world: int, offer: Offer, seed: int, replicas: int) -> Scenario:
    # What is not cast is reduced in its own dtype.
    casts = offer.sharding in ("full", "hybrid")
    dtype: Reduce = "fp32" if casts else cell.reduce
    listed = (*_LISTED, *(_DEDICATED if offer.dedicated else ()))
    parameters = tuple(Parameter(f"p{index}", each.shape, dtype) for index, each in enumerate(listed))
    num_parts = 1 if cell.gathering == "none" else NUM_PARTS
    odd: int = odd_part(Fraction(world))
    values, multiple = _values(cell, world * num_parts, 1 if cell.rounds else odd)
    accumulation: dict[Gathering, Accumulation] = {"none": "sync", "no_sync": "no_sync", "deferred": "deferred"}
    return Scenario(
        world=world,
        seed=seed,
        parameters=parameters,
        values=values,
        optimizer=AdamW(lr=2e-2, weight_decay=0.1),
        operations=_operations(cell, world, num_parts),
        system="strategy",
        strategy=Strategy(
            places=tuple(each.place for each in listed),
            sharding=offer.sharding,
            replicas=replicas,
            reduce=cell.reduce,
            compute="bf16" if casts else "fp32",
            accumulation=accumulation[cell.gathering],
            multiple=multiple,
        ),
    )


def _values(cell: Cell, num_contributions: int, odd: int) -> tuple[Values, int]:
    if cell.rounds:
        return Values(Domain.GENERAL, max_k=255, exponent=-8, spread=12), 1
    most = 255 // odd
    if cell.reduce == "bf16":
        most = min(most, LARGEST_BF16_SUM // (num_contributions * odd))
    return Values(Domain.EXACT, max_k=most, exponent=-8), odd


def _operations(cell: Cell, world: int, num_parts: int) -> tuple[Operation, ...]:
    operations: list[Operation] = [Build(_BUCKET)]
    for _ in range(NUM_STEPS):
        for part in range(num_parts):
            first = part * world
            everybody: tuple[tuple[int, ...], ...] = ((),) * world
            operations.append(Part(part < num_parts - 1, tuple(range(first, first + world)), everybody))
        if cell.clips:
            operations.append(Clip(_BOUND))
        operations.append(Step())
    return tuple(operations)


_BOUND: Final = 2.0**-4
"""Far below the norm of any of these gradients, whose elements are multiples of 2**-8 and mostly many of them."""
