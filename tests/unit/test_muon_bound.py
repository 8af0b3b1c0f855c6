"""The bound of Newton-Schulz by other products: no right computation exceeds it, no wrong one stays within it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.oracles.muon_bound import Iterated, iterated, judge_update, steepest
from harness.oracles.newton_schulz import COEFFICIENTS, DTYPES, direction, newton_schulz, triples
from harness.scenario.muon import Mark, MuonSettings
from harness.verdict import Oracle

FP32 = MuonSettings(ns_dtype="fp32")


pytestmark = pytest.mark.usefixtures("one_thread")


def first_iterate(matrix: Tensor, settings: MuonSettings) -> Tensor:
    norm = matrix.flip(0).square().sum(0).sum().sqrt()
    return (matrix / (norm + settings.ns_eps)).to(DTYPES[settings.ns_dtype])


def fused(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """By addmm."""
    iterate = first_iterate(matrix, settings)
    for a, b, c in triples(settings):
        gram = iterate @ iterate.mT
        iterate = torch.addmm(iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.float()


def never_transposed(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """With the larger of the two Gram matrices, if there are more columns than rows."""
    iterate = first_iterate(matrix, settings)
    for a, b, c in triples(settings):
        gram = iterate.mT @ iterate
        iterate = a * iterate + iterate @ (b * gram + c * (gram @ gram))
    return iterate.float()


def batched(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """In a batch of two."""
    iterate = first_iterate(matrix, settings)[None].repeat(2, 1, 1)
    for a, b, c in triples(settings):
        gram = torch.bmm(iterate, iterate.mT)
        iterate = a * iterate + torch.bmm(b * gram + c * torch.bmm(gram, gram), iterate)
    return iterate[1].float()


def backwards(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """Sums that run the other way, one term at a time, and no fused multiplication."""
    iterate = first_iterate(matrix, settings)

    def product(left: Tensor, right: Tensor) -> Tensor:
        total = torch.zeros(left.shape[0], right.shape[1])
        for index in reversed(range(left.shape[1])):
            total = total + left[:, index : index + 1].float() * right[index : index + 1].float()
        return total.to(left.dtype)

    for a, b, c in triples(settings):
        gram = product(iterate, iterate.mT)
        iterate = a * iterate + product(b * gram + c * product(gram, gram), iterate)
    return iterate.float()


WAYS: list[Callable[[Tensor, MuonSettings], Tensor]] = [newton_schulz, fused, never_transposed, batched, backwards]


def matrices() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for rows, columns in ((1, 1), (1, 9), (9, 1), (2, 2), (5, 8), (12, 5), (16, 16), (6, 40), (33, 20), (3, 300)):
        yield f"{rows}x{columns}", torch.randn(rows, columns, generator=generator)
    yield "integers", torch.randint(-255, 256, (9, 12), generator=generator).float()
    yield "of rank one", torch.randn(10, 1, generator=generator) @ torch.randn(1, 14, generator=generator)
    yield "of rank three", torch.randn(20, 3, generator=generator) @ torch.randn(3, 8, generator=generator)
    yield "orthogonal", torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q
    yield "zeros", torch.zeros(4, 5)
    yield "tiny", torch.randn(6, 7, generator=generator) * 2.0**-80
    yield "subnormal", torch.full((3, 4), 2.0**-140)
    yield "large", torch.randn(6, 7, generator=generator) * 2.0**55
    yield "of many scales", torch.randn(8, 10, generator=generator) * torch.logspace(-12, 3, 10)


MATRICES = dict(matrices())


def off(computed: Tensor, exact: Iterated) -> float:
    return float(torch.linalg.vector_norm(computed.double() - exact.value))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("name", MATRICES)
def test_no_order_of_operations_exceeds_the_bound(name: str, coefficients: str, dtype: str) -> None:
    settings = MuonSettings(ns_dtype=dtype, coefficients=coefficients, ns_steps=6)  # type: ignore[arg-type]
    exact = iterated(MATRICES[name], settings)

    for way in WAYS:
        assert off(way(MATRICES[name], settings), exact) <= exact.error, way.__name__


@pytest.mark.parametrize("eps", [0.0, 1e-7, 1.0])
@pytest.mark.parametrize("name", ["5x8", "tiny", "zeros", "large"])
def test_whatever_is_added_to_the_norm(name: str, eps: float) -> None:
    settings = MuonSettings(ns_dtype="fp32", ns_eps=eps)
    exact = iterated(MATRICES[name], settings)

    if eps == 0.0 and name in ("zeros", "tiny"):
        assert exact.lost  # the squares of what is tiny underflow
        assert exact.loose
        return
    for way in WAYS:
        assert off(way(MATRICES[name], settings), exact) <= exact.error, way.__name__


@pytest.mark.parametrize("name", [name for name, each in MATRICES.items() if "x" in name and each.numel() <= 500])
def test_in_fp32_the_bound_of_a_small_matrix_says_something(name: str) -> None:
    """Of use, not only true: within 2**15 times what rounding really does (measured: 700 to 27,000), and not loose."""
    matrix = MATRICES[name]
    exact = iterated(matrix, FP32)

    assert not exact.loose
    assert exact.error < 2**15 * max(off(way(matrix, FP32), exact) for way in WAYS)


def test_a_perturbed_matrix_stays_within_the_derivative() -> None:
    """The heart of it, without any rounding: one step takes an error at most that many times further."""
    generator = torch.Generator().manual_seed(1)
    for a, b, c in {triple for row in COEFFICIENTS.values() for triple in row}:
        for _ in range(20):
            matrix = torch.randn(5, 7, generator=generator, dtype=torch.float64)
            matrix = matrix / torch.linalg.vector_norm(matrix) * (0.5 + torch.rand((), generator=generator).double())
            error = 1e-3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
            reach = max(float(torch.linalg.matrix_norm(each, 2)) for each in (matrix, matrix + error))

            def step(value: Tensor, a: float = a, b: float = b, c: float = c) -> Tensor:
                gram = value @ value.mT
                return a * value + (b * gram + c * gram @ gram) @ value

            grown = torch.linalg.vector_norm(step(matrix + error) - step(matrix))
            assert float(grown) <= steepest((a, b, c), reach) * float(torch.linalg.vector_norm(error)) * (1 + 1e-9)


@pytest.mark.parametrize("reach", [0.1, 0.6, 0.9, 1.2, 3.0])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_steepest_place_is_found(name: str, reach: float) -> None:
    for a, b, c in COEFFICIENTS[name]:
        places = np.linspace(0.0, reach, 100_001)
        slopes = np.abs(a + 3 * b * places**2 + 5 * c * places**4)

        # Between two places of the grid, h apart, a slope is at most h**2 / 8 * |p'''| larger: h is 3e-5 at most, and
        # |p'''| <= 6 |b| + 60 |c| reach**2, which is 1.2e-9 of the steepest slope at most.
        assert steepest((a, b, c), reach) == pytest.approx(slopes.max(), rel=1.3e-9)
        assert steepest((a, b, c), reach) >= slopes.max() * (1 - 1e-12)


# --- a whole update ---------------------------------------------------------------------------------------------------


MARKS = {
    "whole": ((6, 10), Mark(muon=True)),
    "qkv": ((12, 6), Mark(muon=True, split="qkv", sizes=(6, 4, 2))),
    "heads": ((8, 6), Mark(muon=True, split="heads", num_heads=2)),
    "experts": ((3, 4, 6), Mark(muon=True)),
}
RATE, DECAY = 0.05, 0.1


def updated(name: str, change: Callable[[Tensor], Tensor] = lambda value: value) -> tuple[Tensor, Tensor, Tensor, Mark]:
    """Observed master, the one before, the momentum, and the mark."""
    shape, mark = MARKS[name]
    generator = torch.Generator().manual_seed(9)
    master, momentum = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    observed = master * (1 - RATE * DECAY) - RATE * change(direction(momentum, mark, FP32))
    return observed, master, momentum, mark


def verdict(observed: Tensor, master: Tensor, momentum: Tensor, mark: Mark, settings: MuonSettings = FP32) -> bool:
    judged = judge_update(observed, master, momentum, mark, settings, lr=RATE, weight_decay=DECAY)
    assert judged.oracle is Oracle.BOUND
    assert (judged.margin <= 1.0) == judged.ok
    assert "bound" in judged.text
    return judged.ok


@pytest.mark.parametrize("name", MARKS)
def test_a_right_update_is_within_its_bound(name: str) -> None:
    assert verdict(*updated(name))


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value * 1.1,
        lambda value: value * 0.0,
        lambda value: value.mT.reshape(value.shape),
        lambda value: torch.cat([value.reshape(-1)[1:], value.reshape(-1)[:1]]).view(value.shape),
    ],
    ids=["scale", "nothing", "transposed", "shifted"],
)
@pytest.mark.parametrize("name", MARKS)
def test_a_wrong_update_is_not(name: str, change: Callable[[Tensor], Tensor]) -> None:
    assert not verdict(*updated(name, change))


@pytest.mark.parametrize("name", ["qkv", "heads", "experts"])
def test_newton_schulz_of_the_uncut_matrix_is_not(name: str) -> None:
    shape, mark = MARKS[name]
    _, master, momentum, _ = updated(name)
    flat = momentum.reshape(-1, shape[-1])
    uncut = direction(flat, Mark(muon=True), FP32).view(shape)

    assert not verdict(master * (1 - RATE * DECAY) - RATE * uncut, master, momentum, mark)


@pytest.mark.parametrize("steps", [4, 6])
def test_a_step_more_or_less_is_not(steps: int) -> None:
    observed, master, momentum, mark = updated("whole")

    assert not verdict(observed, master, momentum, mark, MuonSettings(ns_dtype="fp32", ns_steps=steps))


@pytest.mark.parametrize("name", [name for name in COEFFICIENTS if name != "simple"])
def test_another_set_of_coefficients_is_not(name: str) -> None:
    observed, master, momentum, mark = updated("whole")
    settings = MuonSettings(ns_dtype="fp32", coefficients=name)  # type: ignore[arg-type]

    assert not judge_update(observed, master, momentum, mark, settings, lr=RATE, weight_decay=DECAY).ok


def test_in_bf16_only_what_rounding_cannot_make_is_refused() -> None:
    observed, master, momentum, mark = updated("whole")
    settings = MuonSettings()
    judged = judge_update(observed, master, momentum, mark, settings, lr=RATE, weight_decay=DECAY)
    far = judge_update(observed + 1.0, master, momentum, mark, settings, lr=RATE, weight_decay=DECAY)

    assert (judged.oracle, judged.ok) == (Oracle.LOOSE, True)
    assert (far.oracle, far.ok) == (Oracle.LOOSE, False)


def test_of_what_is_not_finite_nothing_is_said() -> None:
    observed, master, momentum, mark = updated("whole")
    momentum[0, 0] = float("nan")

    judged = judge_update(observed * float("nan"), master, momentum, mark, FP32, lr=RATE, weight_decay=DECAY)

    assert (judged.oracle, judged.ok) == (Oracle.LOOSE, True)
