"""Orthogonalise matrices by Newton-Schulz iteration: all singular values near 1, singular vectors kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "NS_DTYPES", "Coefficients", "newton_schulz", "triples_of"]

Triple = tuple[float, float, float]
Coefficients = str | Sequence[Sequence[float]]
"""The name of a set, or triples (a, b, c) of the user's."""

NS_DTYPES = (torch.bfloat16, torch.float32)
"""What can be iterated in."""

COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
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
)
"""Triples (a, b, c) of each set: ``simple`` of Jordan 2024, ``polar_express`` of arXiv 2505.16932."""


def triples_of(coefficients: Coefficients) -> tuple[Triple, ...]:
    """The triples that ``coefficients`` names or is; ``ValueError`` for an unknown name and for what are no triples."""
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients {coefficients!r} are unknown: use one of {', '.join(map(repr, COEFFICIENTS))}, "
                "or a list of triples (a, b, c)"
            )
        return COEFFICIENTS[coefficients]
    triples = [tuple(map(float, triple)) for triple in coefficients]
    if not triples or any(len(triple) != 3 or not all(map(math.isfinite, triple)) for triple in triples):
        raise ValueError(f"coefficients {coefficients!r}: need at least one triple (a, b, c) of finite numbers")
    return tuple((a, b, c) for a, b, c in triples)


def newton_schulz(
    matrix: Tensor,
    *,
    coefficients: Coefficients = "simple",
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The nearest matrix of orthonormal rows (columns where there are fewer), roughly, of each of a stack of matrices.

    A matrix of zeros gives zeros, for any ``eps`` above 0; infinities and nans give nans, in their matrix alone.

    Args:
        matrix: ``[..., rows, cols]``, real; left as it is.
        coefficients: ``X`` becomes ``a X + (b A + c A²) X`` with ``A = X Xᵀ``; cycled when there are more steps.
        steps: iterations.
        eps: added to the Frobenius norm that each matrix is divided by.
        dtype: of the iteration, bf16 or fp32. The norm and the division are in fp32.

    Returns:
        fp32, same shape, a new tensor; the result of a matrix with more rows than columns is a transposed one.

    Raises:
        ValueError: arguments out of range, unknown coefficients, fewer than two dimensions.
    """
    if matrix.dim() < 2:
        raise ValueError(f"newton_schulz got shape {tuple(matrix.shape)}: needs matrices, [..., rows, cols]")
    if steps < 0 or eps < 0 or dtype not in NS_DTYPES:
        raise ValueError(f"newton_schulz got steps={steps}, eps={eps}, dtype={dtype}: need >= 0, >= 0, bf16 or fp32")
    triples = triples_of(coefficients)

    x: Tensor = matrix.to(torch.float32)
    transposed = matrix.shape[-2] > matrix.shape[-1]
    if transposed:
        x = x.mT  # the products are as small as they can be
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + eps)
    x = x.to(dtype)
    for a, b, c in islice(cycle(triples), steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.mT if transposed else x
    return x.to(torch.float32)
