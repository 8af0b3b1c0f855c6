"""The second AdamW reference: torch's optimizer always lies inside its bound, wrong formulas lie outside.

Settings are drawn at random, edges included, with a fixed seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.oracles.adamw_fp64 import AdamWFp64, FormulaJudgement, choose
from harness.oracles.reference import build_adamw, moment_names, set_rate
from harness.scenario.model import AdamW
from tests.support import repetitions

F32 = NDArray[np.float32]


def torch_adamw(settings: AdamW, weights: F32, gradients: list[F32]) -> list[tuple[F32, ...]]:
    """Master and moments after each step of ``torch.optim.AdamW``."""
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if settings.amsgrad else ("exp_avg", "exp_avg_sq")
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=settings.foreach,
        amsgrad=settings.amsgrad,
        maximize=settings.maximize,
    )
    states = []
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        state = optimizer.state[parameter]
        tensors = (parameter.detach(), *(state[name] for name in names))
        states.append(tuple(tensor.numpy().copy() for tensor in tensors))
    return states


def draw_settings(rng: random.Random) -> AdamW:
    return AdamW(
        lr=rng.choice([0.0, 1e-6, 1e-3, 0.1, 10.0, rng.uniform(0, 10)]),
        beta1=rng.choice([0.0, 0.9, 0.5, rng.random(), 1 - 2**-53]),
        beta2=rng.choice([0.0, 0.95, 0.999, rng.random(), 1 - 1e-9]),
        eps=rng.choice([0.0, 1e-30, 1e-8, 1e-3, 1.0]),
        weight_decay=rng.choice([0.0, 0.1, 10.0]),
        foreach=rng.random() < 0.5,
        amsgrad=rng.random() < 0.3,
        maximize=rng.random() < 0.3,
    )


def draw_gradients(rng: np.random.Generator, num: int, num_steps: int, exponent: int, spread: int) -> list[F32]:
    gradients = []
    for _ in range(num_steps):
        scale = 2.0 ** (exponent + rng.integers(0, spread + 1, num))
        gradients.append((rng.integers(-255, 256, num) * scale).astype(np.float32))
    return gradients


def judge_all(
    settings: AdamW, weights: F32, gradients: list[F32], states: Sequence[tuple[F32, ...]]
) -> list[FormulaJudgement]:
    reference = AdamWFp64(settings, weights)
    judgements = []
    for gradient, state in zip(gradients, states, strict=True):
        reference.step(gradient)
        judgements.append(reference.judge(*state))
    return judgements


def test_torch_is_always_inside_the_bound() -> None:
    """Random settings and scales from subnormal to overflowing squares; most elements are really judged."""
    rng = random.Random(1)
    numbers = np.random.default_rng(1)
    judged = unjudged = 0
    for _ in range(repetitions(150, 400)):
        settings = draw_settings(rng)
        weights = numbers.standard_normal(16).astype(np.float32)
        exponent = rng.choice([-133, -100, -80, -60, -20, -5, 0, 5, 60])
        gradients = draw_gradients(numbers, 16, rng.randint(1, 6), exponent, rng.choice([0, 0, 20]))
        for judgement in judge_all(settings, weights, gradients, torch_adamw(settings, weights, gradients)):
            assert judgement.violation is None, settings
            judged += judgement.num_judged
            unjudged += judgement.num_unjudged

    assert judged > unjudged > 0


def formula(
    settings: AdamW,
    weights: F32,
    gradients: list[F32],
    *,
    coupled: bool = False,
    bias1: bool = True,
    bias2: bool = True,
    eps_inside: bool = False,
    swapped: bool = False,
    late_decay: bool = False,
    sum_not_mean: bool = False,
    sign: float = -1.0,
    largest: bool = False,
) -> list[tuple[F32, ...]]:
    """AdamW in fp32, or one of the formulas it is often confused with."""
    beta1, beta2 = (settings.beta2, settings.beta1) if swapped else (settings.beta1, settings.beta2)
    decay, lr, eps = settings.weight_decay, settings.lr, settings.eps
    master = weights.copy()
    first, second, most = np.zeros_like(master), np.zeros_like(master), np.zeros_like(master)
    states: list[tuple[F32, ...]] = []
    for step, gradient in enumerate(gradients, start=1):
        if coupled:
            gradient = gradient + np.float32(decay) * master
        elif not late_decay:
            master = master * np.float32(1 - lr * decay)
        first = np.float32(beta1) * first + np.float32(1.0 if sum_not_mean else 1 - beta1) * gradient
        second = np.float32(beta2) * second + np.float32(1 - beta2) * gradient * gradient
        correction1 = 1 - beta1**step if bias1 else 1.0
        correction2 = 1 - beta2**step if bias2 else 1.0
        most = np.maximum(most, second)
        corrected = (most if largest else second) / np.float32(correction2)
        denominator = np.sqrt(corrected + np.float32(eps)) if eps_inside else np.sqrt(corrected) + np.float32(eps)
        master = master + np.float32(sign * lr / correction1) * first / denominator
        if late_decay:
            master = master * np.float32(1 - lr * decay)
        states.append((master.copy(), first.copy(), second.copy(), *([most.copy()] if settings.amsgrad else [])))
    return states


def telling(rng: random.Random) -> AdamW:
    """Settings under which every wrong formula really computes something else."""
    return AdamW(
        lr=rng.uniform(1e-2, 1e-1),
        beta1=rng.uniform(0.5, 0.9),
        beta2=rng.uniform(0.93, 0.999),
        eps=10.0 ** rng.uniform(-4, -2),
        weight_decay=rng.uniform(0.01, 1.0),
    )


WRONG: dict[str, dict[str, object]] = {
    "coupled decay": {"coupled": True},
    "no first bias correction": {"bias1": False},
    "no second bias correction": {"bias2": False},
    "eps inside the root": {"eps_inside": True},
    "betas swapped": {"swapped": True},
    "decay after the update": {"late_decay": True},
    "momentum without damping": {"sum_not_mean": True},
    "ascent": {"sign": 1.0},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_formulas_are_outside_the_bound(name: str) -> None:
    """Under each of 60 random settings the wrong formula is found, and the right one written the same way is not."""
    rng = random.Random(name)
    numbers = np.random.default_rng(7)
    for _ in range(60):
        settings = telling(rng)
        weights = numbers.uniform(0.5, 2.0, 16).astype(np.float32)
        gradients = draw_gradients(numbers, 16, 4, -10, 0)
        right = judge_all(settings, weights, gradients, formula(settings, weights, gradients))
        wrong = judge_all(settings, weights, gradients, formula(settings, weights, gradients, **WRONG[name]))  # type: ignore[arg-type]
        assert all(judgement.violation is None and judgement.num_judged >= 15 for judgement in right)
        assert any(judgement.violation is not None for judgement in wrong)


def test_a_largest_moment_that_is_kept_but_not_used_is_outside_the_bound() -> None:
    """Where a large gradient is followed by small ones: else the largest moment is the last one."""
    rng, numbers = random.Random(3), np.random.default_rng(3)
    for _ in range(60):
        settings = replace(telling(rng), amsgrad=True, beta2=0.5)
        weights = numbers.uniform(0.5, 2.0, 16).astype(np.float32)
        gradients = [draw_gradients(numbers, 16, 1, exponent, 0)[0] for exponent in (-2, -10, -10)]
        right = judge_all(settings, weights, gradients, formula(settings, weights, gradients, largest=True))
        wrong = judge_all(settings, weights, gradients, formula(settings, weights, gradients))
        assert all(judgement.violation is None and judgement.num_judged >= 15 for judgement in right)
        assert [judgement.violation is None for judgement in wrong] == [True, False, False]


def test_a_gradient_that_enters_with_the_wrong_sign_is_outside_the_bound() -> None:
    rng, numbers = random.Random(4), np.random.default_rng(4)
    settings = replace(telling(rng), maximize=True)
    weights = numbers.uniform(0.5, 2.0, 16).astype(np.float32)
    gradients = draw_gradients(numbers, 16, 2, -10, 0)
    minimised = torch_adamw(replace(settings, maximize=False), weights, gradients)

    assert judge_all(settings, weights, gradients, torch_adamw(settings, weights, gradients))[1].violation is None
    assert judge_all(settings, weights, gradients, minimised)[1].violation is not None


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_new_rate_and_loaded_weights_are_followed(amsgrad: bool) -> None:
    """And an optimizer that does not follow them is found."""
    numbers = np.random.default_rng(5)
    settings = AdamW(lr=0.01, amsgrad=amsgrad)
    weights, loaded = (numbers.uniform(0.5, 2.0, 16).astype(np.float32) for _ in range(2))
    gradients = draw_gradients(numbers, 16, 3, -5, 0)
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = build_adamw([parameter], settings)
    references = {name: AdamWFp64(settings, weights) for name in ("both", "no new rate", "nothing loaded")}
    for step, gradient in enumerate(gradients):
        if step == 1:
            set_rate(optimizer, 0.1)
            references["both"].set_rate(0.1)
            references["nothing loaded"].set_rate(0.1)
        if step == 2:
            parameter.data.copy_(torch.from_numpy(loaded))
            references["both"].load(loaded)
            references["no new rate"].load(loaded)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        for reference in references.values():
            reference.step(gradient)

    state = optimizer.state[parameter]
    seen = [parameter.detach().numpy(), *(state[name].numpy() for name in moment_names(settings))]
    judged = {name: reference.judge(*seen) for name, reference in references.items()}
    assert {name: found.violation is None for name, found in judged.items()} == {
        "both": True,
        "no new rate": False,
        "nothing loaded": False,
    }
    assert judged["both"].num_judged == 16


def test_a_violation_names_what_it_found() -> None:
    settings = AdamW()
    weights = np.array([1.0, 2.0, 3.0], np.float32)
    gradients = [np.array([0.5, 1.0, -0.5], np.float32)]
    master, first, second = torch_adamw(settings, weights, gradients)[0]
    reference = AdamWFp64(settings, weights)
    reference.step(gradients[0])
    spoiled = first.copy()
    spoiled[1] *= 1 + 2.0**-18

    violation = reference.judge(master, spoiled, second).violation

    assert violation is not None
    assert (violation.name, violation.sample, violation.actual) == ("exp_avg", 1, float(spoiled[1]))
    assert 0 < violation.bound < abs(violation.actual - violation.expected)
    spoiled[1] = math.nan
    assert reference.judge(spoiled, first, second).violation is not None
    assert reference.judge(master, first, second).violation is None


@pytest.mark.parametrize(
    ("gradient", "eps"),
    [
        (2.0**70, 1e-8),  # the square leaves fp32's range
        (math.inf, 1e-8),
        (math.nan, 1e-8),
        (0.0, 0.0),  # 0 / 0
        (2.0**-100, 0.0),  # the square vanishes, the denominator with it
    ],
)
def test_what_cannot_be_judged_is_counted_and_stays_so(gradient: float, eps: float) -> None:
    """One such element does not hide the others, which are still judged."""
    settings = AdamW(eps=eps)
    weights = np.ones(3, np.float32)
    gradients = [np.array([1.0, gradient, 2.0], np.float32), np.ones(3, np.float32)]
    states = torch_adamw(settings, weights, gradients)

    judgements = judge_all(settings, weights, gradients, states)

    assert [(found.violation, found.num_judged, found.num_unjudged) for found in judgements] == [(None, 2, 1)] * 2
    states[1][0][2] += 1e-3
    assert judge_all(settings, weights, gradients, states)[1].violation is not None


def test_a_zero_gradient_with_eps_is_judged_tightly() -> None:
    """Zero gradients only decay: the bound is a few units in the last place."""
    settings = AdamW(weight_decay=0.5, lr=0.1)
    weights = np.ones(2, np.float32)
    gradients = [np.zeros(2, np.float32)] * 3
    states = torch_adamw(settings, weights, gradients)

    assert all(
        found.violation is None and found.num_judged == 2 for found in judge_all(settings, weights, gradients, states)
    )
    states[2][0][0] *= np.float32(1 + 2.0**-20)
    assert judge_all(settings, weights, gradients, states)[2].violation is not None


SIZES: list[list[int]] = [
    [1],
    [0, 5, 0],
    [10, 10],
    [1] * 100,
    [1000] * 3,
    [0, 1, 10**9],
    [7] * 40,
    [1, 0, 63],
    [3] * 32,
]


@pytest.mark.parametrize("numels", SIZES)
def test_the_sample_is_small_valid_and_has_the_ends(numels: list[int]) -> None:
    chosen = choose(numels)

    assert len(chosen) == len(numels)
    assert 0 < sum(indices.size for indices in chosen) <= 64
    for numel, indices in zip(numels, chosen, strict=True):
        assert np.all(np.diff(indices) > 0)
        assert np.all((indices >= 0) & (indices < numel))
        if sum(map(bool, numels)) <= 32 and numel:
            assert {0, numel - 1} <= set(indices.tolist())
    filled = [indices for numel, indices in zip(numels, chosen, strict=True) if numel]
    assert filled[0].size > 0
    assert filled[-1].size > 0


def test_the_sample_takes_everything_when_there_is_little() -> None:
    assert [indices.tolist() for indices in choose([3, 0, 2])] == [[0, 1, 2], [], [0, 1]]
