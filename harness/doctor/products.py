"""On what the bits of a matrix product depend, for the products and the norm of Newton-Schulz. Runs in a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from harness.doctor.messages import Condition, MeasureProducts, ProductsReport
from harness.oracles.compare import compare_bits

# Rows are the smaller side, as in Newton-Schulz. Kernels change with the size: at 8 rows, at 16, in the hundreds.
SHAPES = ((1, 64), (3, 5), (7, 256), (15, 513), (16, 16), (64, 256), (129, 515), (300, 301), (384, 1152), (768, 2304))
THREADS = (2, 3, 4)
_OFFSETS = (1, 8, 13)  # elements: of 2 or 4 bytes, none a multiple of a vector
_STACKS = ((1, 0), (2, 1), (3, 1))  # how many, and where among them
_TOO_SLOW_S = 2.0  # of one iteration: a machine without instructions for bf16
_A, _B, _C = 3.4445, -4.7750, 2.0315

Operation = Callable[[Tensor], Tensor]


def _norm(matrix: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm


def _iterate(matrix: Tensor) -> Tensor:
    gram = matrix @ matrix.mT
    return _A * matrix + (_B * gram + _C * (gram @ gram)) @ matrix


OPERATIONS: dict[str, tuple[Operation, torch.dtype]] = {
    "norm fp32": (_norm, torch.float32),
    "products fp32": (_iterate, torch.float32),
    "products bf16": (_iterate, torch.bfloat16),
}


def measure_products(task: MeasureProducts) -> ProductsReport:
    """Each operation on each shape: once plainly, then under every condition, one at a time, on one thread."""
    differing: dict[str, dict[Condition, tuple[str, ...]]] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    with _threads(1):
        for name, (operation, dtype) in OPERATIONS.items():
            found: dict[Condition, list[str]] = {condition: [] for condition in Condition}
            slow = []
            for index, shape in enumerate(SHAPES):
                text = "x".join(map(str, shape))
                matrices = _matrices(task.seed, index, shape, dtype)
                began = time.perf_counter()
                plain = operation(matrices[0])
                if time.perf_counter() - began > _TOO_SLOW_S:
                    slow.append(text)
                    continue
                for condition in Condition:
                    if any(not _equal(plain, other) for other in _under(condition, operation, matrices)):
                        found[condition].append(text)
            differing[name] = {condition: tuple(shapes) for condition, shapes in found.items()}
            left_out[name] = tuple(slow)
    return ProductsReport(
        shapes=tuple("x".join(map(str, shape)) for shape in SHAPES),
        threads=THREADS,
        differing=differing,
        left_out=left_out,
    )


def _under(condition: Condition, operation: Operation, matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """Results for the first of ``matrices`` under a condition; the others are to lie beside it."""
    matrix, *others = matrices
    match condition:
        case Condition.REPEAT:
            yield operation(matrix)
        case Condition.PLACE:
            yield from (operation(_placed(matrix, offset)) for offset in _OFFSETS)
        case Condition.BATCH:
            for length, position in _STACKS:
                stack = [*others[:position], matrix, *others[position : length - 1]]
                yield operation(torch.stack(stack))[position]
        case Condition.COLUMNS:
            yield operation(matrix.mT.contiguous().mT)
        case Condition.THREADS:
            for threads in THREADS:
                with _threads(threads):
                    yield operation(matrix)


def _matrices(seed: int, index: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """As many as the longest stack has, of norm 1 (as Newton-Schulz meets them), rounded to ``dtype``."""
    rng = np.random.Generator(np.random.Philox(key=[seed, index]))
    length = max(length for length, _ in _STACKS)
    drawn = torch.from_numpy(rng.standard_normal((length, *shape), np.float32))
    return [(matrix / torch.linalg.vector_norm(matrix)).to(dtype) for matrix in drawn]


def _placed(matrix: Tensor, offset: int) -> Tensor:
    """A copy that begins ``offset`` elements into its storage."""
    storage = torch.full((offset + matrix.numel(),), float("nan"), dtype=matrix.dtype)
    placed = storage[offset:].view(matrix.shape)
    return placed.copy_(matrix)


def _equal(one: Tensor, other: Tensor) -> bool:
    return compare_bits(one.contiguous(), other.contiguous(), signed_zeros=True).mismatch is None


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
