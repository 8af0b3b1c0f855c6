"""What lies where: owners of whole matrices, fused buffers, and their order. Pure arithmetic, no tensors.

Buffers are filled from the last parameter backwards, since a backward gives the last gradients first, and stand in the
order in which all ranks communicate them: by colour (the default one first), whole matrices before the rest, then so
that the buffer that a backward completes first comes first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zero2core.muon.config import DEFAULT_COLOR, MuonShardingConfig
from zero2core.muon.ownership import Load, Whole, assign_owners, lower_bound, newton_schulz_cost

__all__ = ["BufferPlan", "ColorPlan", "MuonShardingPlan", "Slot", "TrainedParameter", "make_plan"]

_MB = 2**20
_FP32_BYTES = 4
_ALIGN_BYTES = 64
"""Where a parameter begins in a buffer: as torch's allocator on a CPU, so that matrix products of a model whose
parameters lie in buffers take the same path through the same kernels."""


@dataclass(frozen=True)
class TrainedParameter:
    """What the plan needs to know of a parameter; ``color`` is its normalised key."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    use_muon: bool
    color: Hashable = DEFAULT_COLOR

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in a buffer (elements)."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class BufferPlan:
    """One fused buffer.

    Attributes:
        color: key of the colour.
        index: in the order of the colour's buffers of this kind.
        dtype: of the compute weights; gradients are fp32.
        owner: of whole matrices, the rank in the colour's group; None: the buffer is cut into equal pieces.
        slots: the parameters, in the order in which they lie.
        numel: elements, with padding (to a multiple of the group's size where it is cut).
    """

    color: Hashable
    index: int
    dtype: torch.dtype
    owner: int | None
    slots: tuple[Slot, ...]
    numel: int


@dataclass(frozen=True)
class ColorPlan:
    """The buffers of one colour on the ranks of one group.

    ``ranks``: of the group, as the default group counts them. ``divisor``: of the summed gradient.
    """

    key: Hashable
    ranks: tuple[int, ...]
    divisor: float
    buffers: tuple[BufferPlan, ...]


@dataclass(frozen=True)
class MuonShardingPlan:
    """Owners, buffers and loads of the colours that a rank belongs to; ``str()`` prints it.

    Attributes:
        colors: in the order in which they are communicated.
        owners: name of a whole matrix -> its owner, as the default group counts ranks.
        costs: name -> cost of its Newton-Schulz (:func:`zero2core.muon.ownership.newton_schulz_cost`).
    """

    colors: tuple[ColorPlan, ...]
    owners: Mapping[str, int]
    costs: Mapping[str, int]

    @property
    def cost_of_rank(self) -> dict[int, int]:
        """Rank -> cost of the matrices it owns."""
        loads = {rank: 0 for color in self.colors for rank in color.ranks}
        for name, owner in self.owners.items():
            loads[owner] += self.costs[name]
        return loads

    @property
    def elements_of_rank(self) -> dict[int, int]:
        """Rank -> elements that it updates: its whole matrices, and its pieces with padding."""
        loads = {rank: 0 for color in self.colors for rank in color.ranks}
        for color in self.colors:
            for buffer in color.buffers:
                if buffer.owner is not None:
                    loads[color.ranks[buffer.owner]] += sum(slot.stop - slot.start for slot in buffer.slots)
                else:
                    for rank in color.ranks:
                        loads[rank] += buffer.numel // len(color.ranks)
        return loads

    @property
    def digest(self) -> str:
        """The same for two plans that place everything alike."""
        return hashlib.sha256("\n".join(self.facts()).encode()).hexdigest()[:32]

    def facts(self) -> list[str]:
        """One line for each thing that all ranks of a colour's group must have alike."""
        lines = []
        for color in self.colors:
            lines.append(f"color {color.key!r}: ranks {list(color.ranks)}, divisor {color.divisor!r}")
            for buffer in color.buffers:
                place = "cut into pieces" if buffer.owner is None else f"owner {buffer.owner}"
                head = f"color {color.key!r}, buffer {buffer.index}, {place}, {buffer.dtype}, {buffer.numel} elements"
                lines.append(head)
                lines += [f"{head}: {slot.name} {slot.shape} at {slot.start}" for slot in buffer.slots]
        return lines

    def report(self) -> str:
        """Load of each rank: elements, MB of as many fp32 numbers, Newton-Schulz cost."""
        elements, cost = self.elements_of_rank, self.cost_of_rank
        bound = lower_bound(list(self.costs.values()), len(cost))
        load = Load(tuple(elements.values()), tuple(cost.values()), bound)
        ratio = f"{load.balance:.3f}" if self.costs else "none"
        lines = [f"elements (max - min) / max {load.spread:.3f}; Newton-Schulz max / lower bound {ratio}"]
        for rank, mb in sorted(zip(elements, load.megabytes, strict=True)):
            lines.append(f"  rank {rank}: {elements[rank]:,} elements, {mb:.1f} MB of fp32, cost {cost[rank]:.3g}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """All of it, a line for each buffer."""
        lines = [self.report()]
        for color in self.colors:
            lines.append(f"color {color.key!r} on ranks {list(color.ranks)}, divided by {color.divisor:g}")
            for buffer in color.buffers:
                place = "pieces on every rank" if buffer.owner is None else f"rank {color.ranks[buffer.owner]}"
                names = ", ".join(slot.name for slot in buffer.slots)
                lines.append(f"  {place}: {buffer.numel:,} elements of {buffer.dtype}: {names}")
        return "\n".join(lines)


def make_plan(
    parameters: Sequence[TrainedParameter],
    groups: Mapping[Hashable, tuple[int, ...]],
    divisors: Mapping[Hashable, float],
    config: MuonShardingConfig,
) -> MuonShardingPlan:
    """The plan of a rank.

    Args:
        parameters: in the order of the model.
        groups: key -> ranks of the colour's group; only those that this rank is in.
        divisors: key -> what the sum of gradients is divided by.
        config: owner rule, sizes.
    """
    owners: dict[str, int] = {}
    colors = []
    common: dict[int, int] = {}
    # What ranks have of the default colour counts for the others too. Of others it does not: two ranks of one group
    # may be in different groups of another colour, and would not agree.
    for key in sorted(groups, key=lambda key: (key != DEFAULT_COLOR, repr(key))):
        ranks = groups[key]
        mine = [parameter for parameter in parameters if parameter.color == key and parameter.numel]
        loads = [common.get(rank, 0) for rank in ranks]
        by_name = _owners(mine, loads, config)
        owners.update({name: ranks[owner] for name, owner in by_name.items()})
        if key == DEFAULT_COLOR:
            common = dict(zip(ranks, loads, strict=True))
        buffers = (*_whole_buffers(mine, by_name, key, config), *_flat_buffers(mine, key, len(ranks), config))
        colors.append(ColorPlan(key, ranks, divisors[key], buffers))
    costs = {item.name: newton_schulz_cost(item.shape) for item in parameters if item.name in owners}
    return MuonShardingPlan(tuple(colors), owners, costs)


def _owners(parameters: Sequence[TrainedParameter], loads: list[int], config: MuonShardingConfig) -> dict[str, int]:
    """Owner of each whole matrix, as the group counts ranks; adds to ``loads``, what each rank has already."""
    owners: dict[str, int] = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        wholes = [Whole(p.name, p.shape) for p in parameters if p.use_muon and p.dtype == dtype]
        assigned = assign_owners(
            wholes,
            len(loads),
            rule=config.owner_rule,
            cap=config.owner_cap,
            buffer_mb=config.flat_buffer_mb,
            loads=loads,
        )
        for whole, owner in zip(wholes, assigned, strict=True):
            owners[whole.name] = owner
            loads[owner] += whole.cost if config.owner_rule == "newton_schulz" else whole.numel
    return owners


def _whole_buffers(
    parameters: Sequence[TrainedParameter], owners: Mapping[str, int], key: Hashable, config: MuonShardingConfig
) -> list[BufferPlan]:
    runs: list[tuple[int, list[TrainedParameter]]] = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        for owner in sorted(set(owners.values())):
            mine = [p for p in parameters if p.use_muon and p.dtype == dtype and owners[p.name] == owner]
            runs += [(owner, run) for run in _runs(mine, config.whole_buffer_mb)]
    return _buffers(runs, parameters, key, multiple=1)


def _flat_buffers(
    parameters: Sequence[TrainedParameter], key: Hashable, world: int, config: MuonShardingConfig
) -> list[BufferPlan]:
    runs: list[tuple[None, list[TrainedParameter]]] = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        mine = [p for p in parameters if not p.use_muon and p.dtype == dtype]
        runs += [(None, run) for run in _runs(mine, config.flat_buffer_mb)]
    return _buffers(runs, parameters, key, multiple=world)


def _runs(parameters: Sequence[TrainedParameter], size_mb: float) -> list[list[TrainedParameter]]:
    """Cut into buffers, from the last parameter backwards; one that is larger than a buffer has its own."""
    most = size_mb * _MB / _FP32_BYTES
    runs: list[list[TrainedParameter]] = []
    taken = 0
    for parameter in reversed(parameters):
        if not runs or taken + parameter.numel > most:
            runs.append([])
            taken = 0
        runs[-1].append(parameter)
        taken = _aligned(taken + parameter.numel, parameter.dtype)
    return runs


def _aligned(at: int, dtype: torch.dtype) -> int:
    """Where the next parameter may begin."""
    align = _ALIGN_BYTES // dtype.itemsize
    return -(-at // align) * align


def _buffers(
    runs: Sequence[tuple[int | None, list[TrainedParameter]]],
    parameters: Sequence[TrainedParameter],
    key: Hashable,
    *,
    multiple: int,
) -> list[BufferPlan]:
    place = {parameter.name: index for index, parameter in enumerate(parameters)}
    # The one whose first parameter comes last is the first that a backward completes.
    ordered = sorted(runs, key=lambda run: -min(place[parameter.name] for parameter in run[1]))
    buffers = []
    for index, (owner, run) in enumerate(ordered):
        dtype = run[0].dtype
        slots = []
        at = 0
        for parameter in run:
            at = _aligned(at, dtype)
            slots.append(Slot(parameter.name, parameter.shape, at, at + parameter.numel))
            at += parameter.numel
        buffers.append(BufferPlan(key, index, dtype, owner, tuple(slots), -(-at // multiple) * multiple))
    return buffers
