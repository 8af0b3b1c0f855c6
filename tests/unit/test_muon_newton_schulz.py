"""Newton-Schulz against arithmetic on single numbers, exactly, and against singular values.

A diagonal matrix needs no tolerance: each element of each product is one rounded product beside zeros, so the iteration
is that of its diagonal, number by number, in the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero2core.muon import COEFFICIENTS, newton_schulz

DTYPES = [torch.bfloat16, torch.float32]
DIAGONAL = torch.tensor([3.0, 1.0, 0.25, 2.0, 0.125])


pytestmark = pytest.mark.usefixtures("one_thread")


def iterated(numbers: Tensor, triples: Sequence[Sequence[float]], steps: int, dtype: torch.dtype) -> Tensor:
    """The iteration of each of ``numbers``, which are divided by a norm already, as fp32."""
    x = numbers.to(dtype)
    for step in range(steps):
        a, b, c = triples[step % len(triples)]
        square = x * x
        x = a * x + (b * square + c * (square * square)) * x
    return x.float()


def diagonal(numbers: Tensor, rows: int, cols: int) -> Tensor:
    matrix = torch.zeros(rows, cols)
    matrix[range(len(numbers)), range(len(numbers))] = numbers
    return matrix


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_coefficients_are_those_that_were_published() -> None:
    """In units of 1e-4: as written there, not as rounded by anyone."""
    written = {
        name: [tuple(round(1e4 * coefficient) for coefficient in triple) for triple in triples]
        for name, triples in COEFFICIENTS.items()
    }
    assert written == {
        "simple": [(34445, -47750, 20315)],
        "quintic": [
            (40848, -68946, 29270), (39505, -63029, 26377), (37418, -55913, 23037), (28769, -31427, 12046),
            (28366, -30525, 12012),
        ],
        "polar_express": [
            (82051, -229019, 164607), (40664, -28612, 5184), (39096, -28234, 5250), (32856, -24153, 4853),
            (22779, -16198, 3985), (18726, -12307, 3585), (18564, -12132, 3568), (18750, -12500, 3750),
        ],
        "aol": [(40098, -70585, 24635), (34585, -55479, 25959), (27573, -32939, 14254), (27215, -30494, 13169)],
    }  # fmt: skip


class Products(TorchDispatchMode):
    """Collects the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_products_are_as_small_as_they_can_be(shape: tuple[int, int], stack: tuple[int, ...]) -> None:
    with Products() as products:
        newton_schulz(torch.ones(*stack, *shape))
    assert products.shapes == {(*stack, 3, 3), (*stack, 3, 7)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [0, 1, 5, 11])
@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(5, 5), (5, 9), (9, 5)])
def test_diagonal_matrices_are_iterated_number_by_number(
    shape: tuple[int, int], name: str, steps: int, dtype: torch.dtype
) -> None:
    matrix = diagonal(DIAGONAL, *shape)
    given = matrix.clone()
    norm = torch.linalg.vector_norm(matrix) + 1e-7
    expected = diagonal(iterated(DIAGONAL / norm, COEFFICIENTS[name], steps, dtype), *shape)
    result = newton_schulz(matrix, coefficients=name, steps=steps, dtype=dtype)
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)
    assert torch.equal(matrix, given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_coefficients_of_the_users_own_and_another_eps(dtype: torch.dtype) -> None:
    triples = [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]
    norm = torch.linalg.vector_norm(diagonal(DIAGONAL, 5, 5)) + 0.5
    result = newton_schulz(diagonal(DIAGONAL, 5, 5), coefficients=triples, steps=3, eps=0.5, dtype=dtype)
    assert torch.equal(result, diagonal(iterated(DIAGONAL / norm, triples, 3, dtype), 5, 5))


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1, 1), (1, 16), (16, 1)])
def test_one_row_or_one_column(shape: tuple[int, int]) -> None:
    """Equal elements that are powers of two: sums of bf16 squares are exact in fp32, so all is one number's."""
    numel = shape[0] * shape[1]
    share = numel**-0.5  # of the norm, a power of two as numel is one of four
    result = newton_schulz(torch.full(shape, 2.0))
    expected = share * iterated(torch.tensor(1.0), COEFFICIENTS["simple"], 5, torch.bfloat16)
    assert torch.equal(result, expected.expand(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 5), (5, 1), (2, 3, 4), (0, 3), (3, 0), (0, 2, 2)])
def test_zeros_give_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    result = newton_schulz(torch.zeros(shape), dtype=dtype)
    assert result.shape == shape
    assert torch.equal(result, torch.zeros(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_matrix_gives_the_transposed_result(dtype: torch.dtype) -> None:
    matrix = normal(6, 11)
    assert torch.equal(newton_schulz(matrix.mT, dtype=dtype), newton_schulz(matrix, dtype=dtype).mT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_a_stack_do_not_mix(dtype: torch.dtype) -> None:
    stack = torch.stack([diagonal(scale * DIAGONAL.roll(k), 7, 5) for k, scale in enumerate((1.0, 100.0, 0.01))])
    expected = torch.stack([newton_schulz(matrix, dtype=dtype) for matrix in stack])
    assert torch.equal(newton_schulz(stack, dtype=dtype), expected)
    stack[1, 0, 0] = float("inf")
    result = newton_schulz(stack, dtype=dtype)
    assert torch.equal(result[[0, 2]], expected[[0, 2]])
    assert result[1].isnan().any()


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(8, 8), (6, 13), (13, 6)])
def test_one_step_keeps_singular_vectors_and_maps_singular_values(shape: tuple[int, int], name: str) -> None:
    """Against the singular value decomposition in fp64, which has no error to speak of.

    With ``|X|_F = 1``, ``u = 2**-24``, and ``g = (numel + 2) u``, which bounds the error of a norm or a product of
    matrices of Frobenius norm 1: ``X`` is off by at most ``g``, which the step magnifies at most
    ``|a| + 3|b| + 5|c|`` times. ``A`` is off by ``g``, ``A A`` by ``3g``, the last product adds ``g`` to each term, and
    each scaling and sum ``u < g/10``: not more than ``g (2|a| + 6|b| + 10|c|)``, doubled for what is of second order.
    """
    matrix = normal(*shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (values.square().sum().sqrt() + 1e-7)
    a, b, c = COEFFICIENTS[name][0]
    expected = left @ torch.diag(a * values + b * values**3 + c * values**5) @ right
    result = newton_schulz(matrix, coefficients=name, steps=1, dtype=torch.float32)
    bound = 2 * (matrix.numel() + 2) * 2**-24 * (2 * abs(a) + 6 * abs(b) + 10 * abs(c))
    assert torch.linalg.vector_norm(result.double() - expected) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "steps"), [("simple", 5), ("quintic", 5), ("polar_express", 5), ("aol", 4)])
@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
def test_singular_values_end_near_one(shape: tuple[int, int], name: str, steps: int, dtype: torch.dtype) -> None:
    """Of a matrix whose smallest is a tenth of its largest: what the sets are made for, 0.5 to 1.5 at the widest."""
    left, values, right = torch.linalg.svd(normal(*shape), full_matrices=False)
    matrix = left @ torch.diag(torch.linspace(1, 0.1, len(values))) @ right
    singular = torch.linalg.svdvals(newton_schulz(matrix, coefficients=name, steps=steps, dtype=dtype))
    assert singular.min() > 0.5
    assert singular.max() < 1.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"coefficients": "cubic"}, "'cubic' are unknown: use one of 'simple'"),
        ({"coefficients": []}, "at least one triple"),
        ({"coefficients": [(1.0, 2.0)]}, "at least one triple"),
        ({"coefficients": [(1.0, 2.0, float("nan"))]}, "finite"),
        ({"steps": -1}, "steps=-1"),
        ({"eps": -1e-7}, "eps=-1e-07"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        newton_schulz(torch.ones(2, 2), **arguments)  # type: ignore[arg-type]


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\): needs matrices"):
        newton_schulz(torch.ones(3))
