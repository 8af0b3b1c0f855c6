"""Which rank owns which whole matrix: pure arithmetic over names and shapes. No tensors, no process groups.

A whole matrix is the unit of work, since Newton-Schulz needs all of it. Its cost is what one iteration multiplies,
``max(rows, columns) * min(rows, columns) ** 2``: two matrices of as many elements can differ in it many times over, so
ranks that hold the same number of elements need not work for the same time::

    shape        elements       cost    of 2 ranks, by elements    by cost
    (16, 1024)      16384     262144                          0          0
    (128, 128)      16384    2097152                          1          0
    (16, 1024)      16384     262144                          0          1
    (128, 128)      16384    2097152                          1          1
    largest load                                        4194304    2359296
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

__all__ = [
    "DEFAULT_BUFFER_MB",
    "Load",
    "OwnerRule",
    "Whole",
    "assign_owners",
    "load_of",
    "lower_bound",
    "newton_schulz_cost",
]

OwnerRule = Literal["newton_schulz", "numel"]

DEFAULT_BUFFER_MB = 256.0
"""MiB of fp32 gradient in a fused buffer."""

_MB = 2**20
_FP32_BYTES = 4


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Multiplications of one matrix product of Newton-Schulz, up to a factor that is the same for all matrices.

    Args:
        shape: ``[rows, columns]``, or a stack of matrices ``[..., rows, columns]``; however the matrix is cut.

    Raises:
        ValueError: fewer than two dimensions.
    """
    if len(shape) < 2:
        raise ValueError(f"shape {tuple(shape)}: Newton-Schulz needs a matrix, so at least two dimensions")
    *stack, rows, columns = shape
    return math.prod(stack) * max(rows, columns) * min(rows, columns) ** 2


@dataclass(frozen=True)
class Whole:
    """A parameter that one rank owns whole: a matrix, or a stack of them."""

    name: str
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @cached_property
    def cost(self) -> int:
        """:func:`newton_schulz_cost`."""
        return newton_schulz_cost(self.shape)


def assign_owners(
    wholes: Sequence[Whole],
    world: int,
    *,
    rule: OwnerRule = "newton_schulz",
    cap: float = 1.3,
    buffer_mb: float = DEFAULT_BUFFER_MB,
    loads: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The owner of each of ``wholes``, in their order; a function of the arguments alone, so the same on every rank.

    - ``newton_schulz``: longest processing time first. In order of falling cost (equals in list order), each goes to
      the rank of least cost so far (of equals the lowest) among those whose elements then are at most ``cap`` times
      the mean, or that have nothing yet. Where there is none, among all.
    - ``numel``: the rule of other implementations, kept to compare with. In order of falling element count, each goes
      to the rank of fewest elements so far, of as many of the first ranks as there are buffers of ``buffer_mb`` begun.

    Args:
        wholes: in an order that all ranks share.
        world: number of ranks.
        cap: of ``newton_schulz``; at least 1.
        buffer_mb: of ``numel``; ``<= 0`` means :data:`DEFAULT_BUFFER_MB`.
        loads: what each rank has already (of other colours or dtypes), in what the rule balances: costs, or elements.

    Raises:
        ValueError: an unknown rule, ``world < 1``, ``cap < 1``, a number of loads other than ``world``.
    """
    if world < 1:
        raise ValueError(f"world={world}: at least one rank is needed")
    if not cap >= 1:  # nan too
        raise ValueError(f"cap={cap}: below 1 not even equal ranks could hold all elements")
    taken = [0] * world if loads is None else list(loads)
    if len(taken) != world:
        raise ValueError(f"{len(taken)} loads for {world} ranks: one a rank is needed")
    match rule:
        case "newton_schulz":
            return _by_cost(wholes, taken, cap)
        case "numel":
            return _by_numel(wholes, taken, buffer_mb)
        case _:
            raise ValueError(f"rule {rule!r}: expected 'newton_schulz' or 'numel'")


def _by_cost(wholes: Sequence[Whole], loads: list[int], cap: float) -> tuple[int, ...]:
    ranks = range(len(loads))
    elements = [0] * len(loads)
    most = cap * sum(whole.numel for whole in wholes) / len(loads)
    owners = [0] * len(wholes)
    for index in _falling([whole.cost for whole in wholes]):
        whole = wholes[index]
        open_to = [rank for rank in ranks if elements[rank] == 0 or elements[rank] + whole.numel <= most]
        owner = min(open_to or ranks, key=loads.__getitem__)
        loads[owner] += whole.cost
        elements[owner] += whole.numel
        owners[index] = owner
    return tuple(owners)


def _by_numel(wholes: Sequence[Whole], loads: list[int], buffer_mb: float) -> tuple[int, ...]:
    total_mb = sum(whole.numel for whole in wholes) * _FP32_BYTES / _MB
    buffers_begun = math.floor(total_mb / (buffer_mb if buffer_mb > 0 else DEFAULT_BUFFER_MB)) + 1
    ranks = range(min(len(loads), buffers_begun))
    owners = [0] * len(wholes)
    for index in _falling([whole.numel for whole in wholes]):
        owner = min(ranks, key=loads.__getitem__)
        loads[owner] += wholes[index].numel
        owners[index] = owner
    return tuple(owners)


def _falling(sizes: Sequence[int]) -> list[int]:
    """Indices, the largest size first; equals keep their order."""
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


def lower_bound(costs: Sequence[int], world: int) -> float:
    """A load that the busiest of ``world`` ranks cannot be below, however the matrices are dealt out.

    The largest of: the mean over ranks; the largest cost; and for k = 1, 2, ...: of the ``k * world + 1`` largest, some
    rank has at least k + 1, so at least the k + 1 smallest of them.

    Raises:
        ValueError: ``world < 1``.
    """
    if world < 1:
        raise ValueError(f"world={world}: at least one rank is needed")
    if not costs:
        return 0.0
    falling = sorted(costs, reverse=True)
    sums = list(accumulate(falling, initial=0))
    crowded = (sums[end] - sums[end - end // world - 1] for end in range(world + 1, len(falling) + 1, world))
    return float(max(sums[-1] / world, falling[0], *crowded))


@dataclass(frozen=True)
class Load:
    """What each rank has.

    Attributes:
        elements, cost: by rank.
        lower_bound: :func:`lower_bound` of the costs of the matrices.
    """

    elements: tuple[int, ...]
    cost: tuple[int, ...]
    lower_bound: float

    @property
    def megabytes(self) -> tuple[float, ...]:
        """Of the elements in fp32, by rank, in units of ``2**20`` bytes."""
        return tuple(elements * _FP32_BYTES / _MB for elements in self.elements)

    @property
    def balance(self) -> float:
        """The largest cost in units of the lower bound: 1.0 is perfect."""
        return max(self.cost) / self.lower_bound if self.lower_bound else 1.0

    @property
    def max_over_mean(self) -> float:
        """The largest cost in units of the mean, which whole matrices may not allow to be near 1."""
        return max(self.cost) * len(self.cost) / sum(self.cost) if any(self.cost) else 1.0

    @property
    def spread(self) -> float:
        """``(max - min) / max`` of the elements."""
        return (max(self.elements) - min(self.elements)) / max(self.elements) if any(self.elements) else 0.0

    @property
    def num_idle(self) -> int:
        """Ranks without any element."""
        return self.elements.count(0)


def load_of(wholes: Sequence[Whole], owners: Sequence[int], world: int) -> Load:
    """The load of ranks ``0`` to ``world - 1`` when ``owners`` are the owners of ``wholes``."""
    elements, cost = [0] * world, [0] * world
    for whole, owner in zip(wholes, owners, strict=True):
        elements[owner] += whole.numel
        cost[owner] += whole.cost
    return Load(tuple(elements), tuple(cost), lower_bound([whole.cost for whole in wholes], world))
