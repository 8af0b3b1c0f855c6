"""What one rank holds of one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """A whole tensor, or a slice that is not empty: a view of the optimizer's own state, no copy.

    Attributes:
        name: of the parameter.
        start, stop: the flat range of it, in row-major order of its shape.
        master: fp32 ``[stop - start]``: what the update moves.
        gradient: fp32 ``[stop - start]``, reduced and averaged, after a step also clipped; None where there is none:
            before a reduction, after a release, of a parameter that is skipped as missing.
        state: ``"momentum"`` of a matrix, ``"exp_avg"`` and ``"exp_avg_sq"`` of the rest, fp32 ``[stop - start]`` each.
    """

    name: str
    start: int
    stop: int
    master: Tensor
    gradient: Tensor | None
    state: Mapping[str, Tensor]
