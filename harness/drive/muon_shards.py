"""What a rank holds of a scenario of system ``"muon"``: read from ``local_shards()``, checked, compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.drive.calls import InterfaceLacksError
from harness.drive.shard import Difference
from harness.oracles.compare import compare_bits
from harness.oracles.contributions import Interval
from harness.scenario.model import Scenario


class Range(NamedTuple):
    """Elements ``[start, stop)`` of one flat parameter."""

    parameter: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Its number of elements."""
        return self.stop - self.start


class Raw(NamedTuple):
    """A shard's attributes, taken while the subject's own environment was in force."""

    name: object
    start: object
    stop: object
    master: object
    gradient: object
    state: object


def read_shards(shards: Iterable[Any]) -> list[Raw]:
    """The attributes of what ``local_shards()`` returned."""
    return [Raw(each.name, each.start, each.stop, each.master, each.gradient, each.state) for each in shards]


@dataclass(frozen=True)
class Held:
    """What a rank holds of one parameter; all tensors fp32, ``[length of the range]``."""

    range: Range
    master: Tensor
    gradient: Tensor | None
    state: Mapping[str, Tensor]

    @property
    def parameter(self) -> int:
        """Its index."""
        return self.range.parameter

    @classmethod
    def of(cls, raw: Raw, scenario: Scenario, index_of: Mapping[str, int], device: torch.device) -> Held:
        """Checked.

        Raises:
            InterfaceLacksError: it is no shard of any parameter, or one of its tensors has the wrong dtype or shape.
        """
        if not isinstance(raw.name, str) or raw.name not in index_of:
            raise InterfaceLacksError(f"local_shards() names {raw.name!r}, which is no parameter's name")
        parameter = index_of[raw.name]
        numel = scenario.parameters[parameter].numel
        start, stop = raw.start, raw.stop
        if not isinstance(start, int) or not isinstance(stop, int) or not 0 <= start <= stop <= numel:
            raise InterfaceLacksError(
                f"local_shards() holds [{start}, {stop}) of {raw.name}, which has {numel} elements"
            )
        where = Range(parameter, start, stop)
        state = dict(raw.state) if isinstance(raw.state, Mapping) else {}
        tensors = {"master": raw.master, **state}
        if raw.gradient is not None:
            tensors["gradient"] = raw.gradient
        for name, tensor in tensors.items():
            if not _is_vector(tensor, where.length, device):
                raise InterfaceLacksError(
                    f"local_shards(): {name} of {raw.name} is {_shown(tensor)}, expected fp32 [{where.length}]"
                )
        gradient = raw.gradient if isinstance(raw.gradient, Tensor) else None
        return cls(where, tensors["master"], gradient, state)


def _is_vector(tensor: object, length: int, device: torch.device) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype == torch.float32
        and tuple(tensor.shape) == (length,)
        and tensor.layout == torch.strided
        and tensor.device == device
        and (not length or tensor.untyped_storage().nbytes() >= 4 * (tensor.storage_offset() + length))
    )


def _shown(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    size = tensor.untyped_storage().nbytes()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}, {size} bytes of storage"


def owner_problem(pieces: Sequence[tuple[Range, int]], numel: int, whole: bool) -> str | None:
    """Why some ranks' pieces are not all elements once each, a ``whole`` parameter in one piece; None where they are.

    Args:
        pieces: of one parameter, with the rank that holds each.
        numel: of the parameter.
        whole: one rank must hold all of it.
    """
    at, last = 0, None
    for piece, rank in sorted(pieces):
        if piece.start < at:
            return f"element {piece.start} has two owners: rank {last} and rank {rank}"
        if piece.start > at:
            return f"element {at} has no owner: the next that is owned is {piece.start}, by rank {rank}"
        at, last = piece.stop, rank
    if at < numel:
        return f"element {at} has no owner among the ranks of its group"
    if whole and len(pieces) > 1:
        ranks = ", ".join(str(rank) for _, rank in sorted(pieces))
        return f"a matrix that is orthogonalised as a whole lies in {len(pieces)} pieces, on ranks {ranks}"
    return None


def compare(held: Held, wanted: Tensor, seen: Tensor, rank: int, *, signed_zeros: bool) -> Difference:
    """Compare a tensor of what is held, bit by bit, with its range of ``wanted``, which is whole."""
    expected = wanted.reshape(-1)[held.range.start : held.range.stop]
    outcome = compare_bits(expected, seen.detach(), signed_zeros=signed_zeros)
    found = outcome.mismatch
    if found is None:
        return Difference(outcome.compared)
    return Difference(outcome.compared, found, held.parameter, held.range.start + found.index, owner=rank)


def compare_within(held: Held, seen: Tensor, interval: Interval, rank: int) -> Difference:
    """Compare with what any order of addition can give: the first element outside its interval."""
    inside = slice(held.range.start, held.range.stop)
    center, bound = torch.from_numpy(interval.center[inside]), torch.from_numpy(interval.bound[inside])
    overflows = torch.from_numpy(interval.overflows[inside])
    values = seen.detach().cpu().double()
    same = (values == center) | (values.isnan() & center.isnan())
    overflowed = overflows & (values.isnan() | (values.isinf() & center.isfinite()))
    errors = (values - center).abs()
    outside = ~(same | overflowed | (errors <= bound))
    shares = (errors / bound)[(bound > 0) & errors.isfinite()]
    margin = float(shares.max()) if shares.numel() else 0.0
    count = int(outside.sum())
    if not count:
        return Difference(held.range.length, margin=margin)
    at = int(outside.to(torch.uint8).argmax())
    pair = [torch.tensor([float(value)], dtype=torch.float32) for value in (center[at], values[at])]
    found = compare_bits(pair[0], pair[1], signed_zeros=False).mismatch
    if found is None:  # off by less than an fp32 number shows, where nothing rounds
        return Difference(held.range.length, margin=margin)
    return Difference(
        held.range.length,
        dataclasses.replace(found, count=count),
        held.parameter,
        held.range.start + at,
        owner=rank,
        bound=float(bound[at]),
        margin=margin,
    )
