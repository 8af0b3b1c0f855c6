"""What a rank holds of each parameter of a wrapped model: read from plain tensors, DTensors and dedicated entries.

Which elements a local shard holds is worked out here from mesh and placements, not asked of DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harness.drive.shard import Difference
from harness.drive.strategy_model import index_of
from harness.oracles.compare import compare_bits


class UnreadableError(Exception):
    """What a rank holds of a parameter cannot be told; the message says of which, and why."""


class Region(NamedTuple):
    """A box of elements of one parameter: ``[start, stop)`` in each dimension."""

    parameter: int
    spans: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(stop - start for start, stop in self.spans)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index a whole parameter with."""
        return tuple(slice(start, stop) for start, stop in self.spans)


@dataclass(frozen=True)
class Held:
    """What a rank holds of one parameter.

    Attributes:
        region: which elements.
        tensor: the parameter as the optimizer knows it (a plain tensor or a DTensor); of a dedicated one the entry.
        dedicated: it is held by one owner, whole; ``region`` is empty on all others.
    """

    region: Region
    tensor: Any
    dedicated: bool = False

    @property
    def parameter(self) -> int:
        """Its index."""
        return self.region.parameter

    def master(self) -> Tensor | None:
        """The weights that the optimizer moves, of the region's shape; None where there are none here."""
        if self.dedicated:
            weight = self.tensor.weight
            return None if weight is None else local(weight)
        return local(self.tensor)

    def gradient(self) -> Tensor | None:
        """The same of the gradient."""
        gradient = self.tensor.grad
        return None if gradient is None else local(gradient)


def local(tensor: Tensor) -> Tensor:
    """What is on this rank of a plain tensor (all of it) or of a DTensor, detached."""
    here = getattr(tensor, "_local_tensor", None)
    whole: Tensor = tensor if here is None else here
    return whole.detach()


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def find(model: nn.Module, num_parameters: int) -> dict[int, nn.Parameter]:
    """The parameters of a wrapped model, by index in the scenario.

    Raises:
        UnreadableError: two tensors go by the same name.
    """
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        index = index_of(name)
        if index is None or index >= num_parameters:
            continue
        if found.setdefault(index, parameter) is not parameter:
            raise UnreadableError(f"the wrapped model has two tensors for one parameter (at {name}): a tie is broken")
    return found


def entries(dedicated: Mapping[str, Any]) -> dict[int, Any]:
    """What ``dedicated(model)`` returned, by index in the scenario.

    Raises:
        UnreadableError: it names no parameter of the model.
    """
    found = {}
    for name, entry in dedicated.items():
        index = index_of(name)
        if index is None:
            raise UnreadableError(f"dedicated() names {name!r}, which is no parameter of the model")
        found[index] = entry
    return found


def held_of(index: int, tensor: Tensor, shape: Sequence[int], rank: int) -> Held:
    """What this rank holds of a parameter that is not dedicated.

    Raises:
        UnreadableError: it has another shape than the parameter, or placements other than Shard and Replicate.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise UnreadableError(f"a parameter of shape {list(shape)} became one of shape {list(tensor.shape)}")
    spans = [(0, size) for size in shape]
    if is_distributed(tensor):
        spans = _sharded(tensor, shape, rank)
    region = Region(index, tuple(spans))
    here = local(tensor)
    if tuple(here.shape) != region.shape:
        raise UnreadableError(
            f"a local shard has shape {list(here.shape)}; by mesh and placements of the DTensor it is "
            f"{list(region.shape)}"
        )
    return Held(region, tensor)


def _sharded(tensor: Any, shape: Sequence[int], rank: int) -> list[tuple[int, int]]:  # noqa: ANN401 (a DTensor)
    """The spans of a DTensor's local shard: each mesh axis in turn cuts what is left, by the rule of torch.chunk."""
    ranks = tensor.device_mesh.mesh
    where = (ranks == rank).nonzero()
    if where.shape[0] != 1:
        raise UnreadableError(f"rank {rank} stands {where.shape[0]} times in the mesh of a DTensor")
    spans = [(0, size) for size in shape]
    for axis, (place, placement) in enumerate(zip(where[0].tolist(), tensor.placements, strict=True)):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard":
            raise UnreadableError(f"placement {placement!r} of a DTensor: only Shard and Replicate can be read")
        dim = placement.dim % len(shape)
        start, stop = spans[dim]
        step = -(-(stop - start) // int(ranks.shape[axis]))
        spans[dim] = (min(start + place * step, stop), min(start + (place + 1) * step, stop))
    return spans


def owned(index: int, entry: Any, shape: Sequence[int], rank: int) -> Held:  # noqa: ANN401 (a DedicatedParameter)
    """What this rank holds of a dedicated parameter: all of it or nothing.

    Raises:
        UnreadableError: the entry contradicts itself or the scenario.
    """
    weight = entry.weight
    if (weight is not None) != (entry.owner == rank):
        has = "weights" if weight is not None else "no weights"
        raise UnreadableError(f"a dedicated parameter has {has} on rank {rank}, and names rank {entry.owner} its owner")
    if weight is not None and (tuple(weight.shape), weight.dtype) != (tuple(shape), torch.float32):
        raise UnreadableError(
            f"the weights of a dedicated parameter are {weight.dtype}{list(weight.shape)}, expected fp32{list(shape)}"
        )
    spans = tuple((0, size if weight is not None else 0) for size in shape)
    return Held(Region(index, spans), entry, dedicated=True)


def holders(regions: Sequence[Sequence[Region]], parameter: int, shape: Sequence[int]) -> NDArray[np.int64]:
    """How many ranks hold each element of a parameter, in its shape. ``regions``: those of each rank."""
    count = np.zeros(tuple(shape), np.int64)
    for of_rank in regions:
        for region in of_rank:
            if region.parameter == parameter:
                count[region.slices] += 1
    return count


def compare(region: Region, wanted: Tensor, seen: Tensor, rank: int, *, signed_zeros: bool) -> Difference:
    """Compare what is held, bit by bit, with its region of ``wanted``, which is whole and of the same dtype."""
    expected = wanted[region.slices].to(seen.device).contiguous()
    outcome = compare_bits(expected, seen.detach().contiguous(), signed_zeros=signed_zeros)
    found = outcome.mismatch
    if found is None:
        return Difference(outcome.compared)
    element = flat_index(region, found.index, tuple(wanted.shape))
    return Difference(outcome.compared, found, region.parameter, element, owner=rank)


def flat_index(region: Region, index: int, shape: tuple[int, ...]) -> int:
    """The flat index in a whole parameter of shape ``shape`` of the element at flat ``index`` of a region of it."""
    if not shape:
        return 0
    inside = np.unravel_index(index, region.shape)
    return int(
        np.ravel_multi_index([start + int(at) for (start, _), at in zip(region.spans, inside, strict=True)], shape)
    )
