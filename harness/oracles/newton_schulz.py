"""Newton-Schulz and the blocks of a matrix, as the reference computes them: the same operations in the same order.

Where a system runs the same products on the same shapes, its bits are these. Written from ``spec/muon_sharding.md``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.scenario.muon import Mark, MuonSettings

Triple = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def triples(settings: MuonSettings) -> list[Triple]:
    """The coefficients of each step, cycled."""
    return list(itertools.islice(itertools.cycle(COEFFICIENTS[settings.coefficients]), settings.ns_steps))


def newton_schulz(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """Orthogonalise the matrices in the last two dimensions; fp32, the shape of ``matrix``, which is not changed."""
    iterate = matrix.to(torch.float32)
    transposed = iterate.shape[-2] > iterate.shape[-1]
    if transposed:
        iterate = iterate.mT
    iterate = iterate / (torch.linalg.vector_norm(iterate, dim=(-2, -1), keepdim=True) + settings.ns_eps)
    iterate = iterate.to(DTYPES[settings.ns_dtype])
    for first, third, fifth in triples(settings):
        gram = iterate @ iterate.mT
        polynomial = third * gram + fifth * (gram @ gram)
        iterate = first * iterate + polynomial @ iterate
    result: Tensor = iterate.mT if transposed else iterate
    return result.to(torch.float32)


def blocks(tensor: Tensor, mark: Mark) -> list[Tensor]:
    """Views of what is orthogonalised as one each; of ``"heads"`` one view, with the heads as a dimension of it."""
    rows = tensor.shape[-2]
    if mark.split == "none":
        return [tensor]
    if mark.split == "heads":
        return [tensor.view(*tensor.shape[:-2], mark.num_heads, rows // mark.num_heads, tensor.shape[-1])]
    sizes: Sequence[int] = mark.sizes
    if mark.split == "gate_up" and not sizes:
        sizes = (rows // 2, rows // 2)
    return list(torch.split(tensor, list(sizes), dim=-2))


def scale_of(rows: int, columns: int, settings: MuonSettings) -> float:
    """What the orthogonalised block of this many rows and columns is multiplied by; 1 where there is no element."""
    if rows == 0 or columns == 0:
        return 1.0
    if settings.scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    if settings.scale == "spectral":
        return math.sqrt(rows / columns)
    return 0.2 * math.sqrt(max(rows, columns))


def direction(update: Tensor, mark: Mark, settings: MuonSettings) -> Tensor:
    """Each block of an update orthogonalised and scaled: fp32, a new tensor of its shape."""
    result = torch.empty_like(update, dtype=torch.float32, memory_format=torch.contiguous_format)
    for into, block in zip(blocks(result, mark), blocks(update, mark), strict=True):
        into.copy_(newton_schulz(block, settings)).mul_(scale_of(block.shape[-2], block.shape[-1], settings))
    return result
