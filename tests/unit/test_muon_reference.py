"""The unsharded Muon trainer: against the inner optimizer that shares no code with it, and against formulas."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.drive import muon_build
from harness.drive.parameters import Pristine
from harness.oracles import contributions
from harness.oracles.contributions import Share, divided
from harness.oracles.muon import Life, Lineage, UnshardedMuon, exact_squares, lives
from harness.oracles.newton_schulz import scale_of
from harness.scenario.model import Domain, Scenario, StepPlan, steps
from harness.scenario.muon import AdaptiveClip
from tests.muon_cases import MODEL, Color, GlobalClip, Mark, MuonSettings, Sharding, scenario, step
from zero2core import MuonAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


def start_of(given: Scenario) -> list[Tensor]:
    return Pristine(given, torch.device("cpu")).weights


def whole_step(reference: UnshardedMuon, plan: StepPlan) -> None:
    reference.begin(plan)
    if reference.muon.clip is not None:
        reference.clip(reference.clipping())
    reference.step()


def by_parameter(reference: UnshardedMuon) -> dict[int, Life]:
    return {life.parameter: life for life in reference.lives}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": "fp32", "settings": MuonSettings(ns_dtype="fp32", coefficients="aol", nesterov=False)},
    {"settings": MuonSettings(coefficients="quintic", scale="original", ns_steps=7)},
    {"settings": MuonSettings(coefficients="polar_express", scale="spectral", beta=0.0, weight_decay=0.0)},
    {"settings": MuonSettings(ns_steps=0, ns_eps=1e-3)},
    {"clip": GlobalClip(0.5)},
    {"clip": AdaptiveClip(ratio=0.25, warmup_steps=1, beta=0.5)},
    {"sharding": Sharding(skip_missing=True), "clip": GlobalClip(0.5)},
]


@pytest.mark.parametrize("muon", SETTINGS, ids=[str(number) for number in range(len(SETTINGS))])
def test_it_equals_the_inner_optimizer_bit_for_bit(muon: dict[str, Any]) -> None:
    """Two implementations of one specification, on the gradient that one rank reduces: its own."""
    given = scenario(1, [*step(1), *step(1, missing={0: (0, 1)}), *step(1, 2), *step(1)], **muon)
    reference = UnshardedMuon(given, start_of(given))
    parameters = [nn.Parameter(weight.clone()) for weight in start_of(given)]
    names = [parameter.name for parameter in given.parameters]
    inner = MuonAdamW(zip(names, parameters, strict=True), **muon_build.inner_arguments(given, reference.rates))

    for plan in steps(given):
        for life, gradient in reference.begin(plan).of.items():
            parameter = parameters[life.parameter]
            missing = life in reference.gradients.missing
            parameter.main_grad = None if missing else gradient  # type: ignore[attr-defined]
        inner.step()
        whole_step(reference, plan)

        for index, life in by_parameter(reference).items():
            state, expected = reference.state(life), inner.state[parameters[index]]
            assert torch.equal(state.weight, parameters[index].detach())
            assert torch.equal(state.master, expected.get("master", parameters[index].detach()))
            for name, moment in zip(
                ("momentum",) if given.muon.marks[index].muon else ("exp_avg", "exp_avg_sq"),  # type: ignore[union-attr]
                state.moments,
                strict=True,
            ):
                assert torch.equal(moment, expected[name])


def test_a_matrix_of_one_element_moves_by_the_polynomial_of_one() -> None:
    """Without decay and momentum: by the learning rate, the scale, and p(p(1)) times the gradient's sign."""
    settings = MuonSettings(lr=0.5, beta=0.0, nesterov=False, weight_decay=0.0, ns_steps=2, ns_dtype="fp32", ns_eps=0)
    given = scenario(1, step(1), model=[("one", (1, 1), Mark(muon=True))], dtype="fp32", settings=settings, seed=8)
    reference = UnshardedMuon(given, start_of(given))
    (life,) = reference.lives
    before = float(reference.state(life).master)

    gradient = float(reference.begin(next(steps(given))).of[life])
    reference.step()

    value = math.copysign(1.0, gradient)
    for _ in range(2):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    assert gradient != 0.0
    assert float(reference.state(life).master) == pytest.approx(before - 0.5 * 0.2 * value, rel=1e-6)


def test_the_scale_is_that_of_outputs_and_inputs() -> None:
    wide, tall = (4, 16), (16, 4)
    scales = {
        name: [scale_of(*shape, MuonSettings(scale=name)) for shape in (wide, tall)]
        for name in ("original", "spectral", "match_rms_adamw")
    }

    assert scales == {"original": [1.0, 2.0], "spectral": [0.5, 2.0], "match_rms_adamw": [0.8, 0.8]}


def test_each_group_of_a_color_has_a_life_of_its_own() -> None:
    colors = (Color(((0, 1), (2, 3))), Color(((1, 2),), divisor=8.0))
    model = [("all", (2, 3), Mark()), ("pairs", (3, 2), Mark(muon=True, color=0)), ("few", (2,), Mark(color=1))]
    given = scenario(4, model=model, colors=colors, multiple=8)
    reference = UnshardedMuon(given, start_of(given))

    assert lives(given) == (
        Life(0, (0, 1, 2, 3), 4.0), Life(1, (0, 1), 2.0), Life(1, (2, 3), 2.0), Life(2, (1, 2), 8.0)
    )  # fmt: skip
    plan = next(steps(given))
    gradients = reference.begin(plan).of
    for life in lives(given):
        own = [contributions.contribution(given, plan, rank, 0, life.parameter) for rank in life.ranks]
        expected = np.sum(own, axis=0) / life.divisor
        assert np.array_equal(gradients[life].numpy().reshape(-1), expected)
    assert not torch.equal(gradients[lives(given)[1]], gradients[lives(given)[2]])


def test_it_moves_no_life_that_it_is_not_to_train_but_knows_all_gradients() -> None:
    colors = (Color(((0,), (1,))),)
    model = [("own", (3, 2), Mark(muon=True, color=0))]
    given = scenario(2, model=model, colors=colors, clip=GlobalClip(0.5))
    every, one = UnshardedMuon(given, start_of(given)), UnshardedMuon(given, start_of(given), lives(given)[:1])
    plan = next(steps(given))
    for reference in (every, one):
        reference.begin(plan)

    assert one.clipping().norm == every.clipping().norm
    assert one.clipping().norm.num_elements == 12
    with pytest.raises(KeyError):
        one.state(lives(given)[1])


def test_the_global_clip_is_of_those_that_are_to_be_clipped() -> None:
    model = [("clipped", (40,), Mark()), ("not", (40,), Mark(need_clip=False))]
    given = scenario(1, step(1), model=model, clip=GlobalClip(0.125))
    reference = UnshardedMuon(given, start_of(given))
    first, second = reference.lives
    before = dict(reference.begin(next(steps(given))).of)

    clipping = reference.clipping()
    reference.clip(clipping)

    norm = math.sqrt(float(before[first].double().square().sum()))
    assert clipping.norm.value == float(before[first].double().square().sum())
    assert clipping.factors == {first: 0.125 / (norm + 1e-6), second: 1.0}
    factor = np.float32(0.125 / (norm + 1e-6))
    assert np.array_equal(reference.gradients.of[first].numpy(), before[first].numpy() * factor)
    assert torch.equal(reference.gradients.of[second], before[second])


def test_the_adaptive_clip_remembers_what_norms_were() -> None:
    clip = AdaptiveClip(ratio=0.5, warmup_steps=2, beta=0.75, eps=1e-8)
    model = [("a", (20,), Mark()), ("b", (30,), Mark())]
    given = scenario(1, [*step(1), *step(1), *step(1), *step(1)], model=model, clip=clip)
    reference = UnshardedMuon(given, start_of(given))
    tracked: dict[Life, float] = {}

    for number, plan in enumerate(steps(given)):
        gradients = reference.begin(plan).of
        norms = {life: math.sqrt(float(gradients[life].double().square().sum())) for life in reference.lives}
        joint = math.sqrt(sum(norm**2 for norm in norms.values()))
        factors = reference.clipping().factors
        for life, norm in norms.items():
            if number < 2:
                assert factors[life] == pytest.approx(min(1.0, 1 / (joint + 1e-8)), rel=1e-12)
                tracked[life] = min(tracked.get(life, norm), norm)
            else:
                most = 0.5 * tracked[life]
                assert norm > most
                assert factors[life] == pytest.approx(most / norm, rel=1e-12)
                tracked[life] = 0.75 * tracked[life] + 0.25 * most
        reference.drop()
        assert reference.adapts is (number >= 2)


def test_a_norm_of_zero_neither_starts_nor_moves_what_is_remembered() -> None:
    clip = AdaptiveClip(ratio=0.5, warmup_steps=1, beta=0.75)
    operations = [*step(1, missing={0: (0,)}), *step(1), *step(1, missing={0: (0,)}), *step(1)]
    given = scenario(1, operations, model=[("a", (20,), Mark()), ("b", (30,), Mark())], clip=clip)
    reference = UnshardedMuon(given, start_of(given))
    life = reference.lives[0]
    factors, norms = [], []
    for plan in steps(given):
        norms.append(math.sqrt(float(reference.begin(plan).of[life].double().square().sum())))
        factors.append(reference.clipping().factors[life])

    assert (norms[0], norms[2]) == (0.0, 0.0)
    assert factors[1] == 0.5, "the first norm seen is the one that it is held against"
    assert factors[2] == 1.0
    assert factors[3] == pytest.approx(min(1.0, 0.5 * (0.75 + 0.25 * 0.5) * norms[1] / norms[3]), rel=1e-12)


@pytest.mark.parametrize("skipped", [False, True])
def test_what_no_rank_has_counts_as_zeros_or_is_skipped(skipped: bool) -> None:
    missing = {0: (0, 1), 1: (0, 1, 2)}
    operations = [*step(2), *step(2, missing=missing)]
    given = scenario(2, operations, model=MODEL[:3], sharding=Sharding(skip_missing=skipped))
    reference = UnshardedMuon(given, start_of(given))
    first, second = steps(given)
    whole_step(reference, first)
    before = {life: reference.state(life) for life in reference.lives}
    whole_step(reference, second)

    moved = [reference.state(life) is not before[life] for life in reference.lives]
    assert moved == [not skipped, not skipped, True]


def test_a_rebuilt_one_begins_with_the_weights_as_they_are() -> None:
    given = scenario(1)
    reference = UnshardedMuon(given, start_of(given))
    whole_step(reference, next(steps(given)))
    reference.set_rate(0.25)
    before = [reference.state(life) for life in reference.lives]

    reference.rebuild()

    after = [reference.state(life) for life in reference.lives]
    assert reference.rates == (0.25, 0.25)
    assert any(not torch.equal(one.master, other.master) for one, other in zip(before, after, strict=True))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(other.master, one.weight.float())
        assert all(not moment.any() for moment in other.moments)


def test_those_that_share_come_to_the_same_and_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scenario(2, clip=AdaptiveClip(warmup_steps=0, ratio=0.5))
    alone = UnshardedMuon(given, start_of(given))
    shared = [UnshardedMuon(given, start_of(given)) for _ in range(3)]
    start = Lineage()
    for reference in shared:
        reference.share(start)
    counted: list[object] = []
    moved = UnshardedMuon._moved

    def count(self: UnshardedMuon, *args: Any) -> Any:
        counted.append(args)
        return moved(self, *args)

    monkeypatch.setattr(UnshardedMuon, "_moved", count)
    for plan in steps(given):
        for reference in shared:
            whole_step(reference, plan)
    assert len(counted) == 3 * len(MODEL)
    for plan in steps(given):
        whole_step(alone, plan)
    for reference in shared:
        for life in reference.lives:
            assert torch.equal(reference.state(life).master, alone.state(life).master)
            assert reference.state(life) is shared[0].state(life)


def test_one_that_saw_something_else_goes_on_alone() -> None:
    given = scenario(1, clip=GlobalClip(0.5))
    one, other = (UnshardedMuon(given, start_of(given)) for _ in range(2))
    start = Lineage()
    for reference in (one, other):
        reference.share(start)
        reference.begin(next(steps(given)))
    life = one.lives[0]
    other.adopt_gradients({life: torch.zeros_like(other.gradients.of[life])})
    for reference in (one, other):
        reference.clip(reference.clipping())
        reference.step()

    assert one.state(life).moments[0].any()
    assert not other.state(life).moments[0].any()
    masters = {life: torch.ones_like(one.state(life).master)}
    one.adopt_masters(masters)
    assert torch.equal(one.state(life).weight, torch.ones_like(one.state(life).weight))


# --- what is exact ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        (scenario(4), True),
        (scenario(4, multiple=6), False),
        (scenario(4, max_k=2**20, multiple=4), False),
        (scenario(2, domain=Domain.GENERAL, spread=3), False),
        (scenario(2, model=[("a", (3,), Mark(color=0))], colors=(Color(((0, 1),), divisor=0.5),)), False),
        (scenario(2, model=[("a", (3,), Mark(color=0))], colors=(Color(((0, 1),), divisor=4.0),)), True),
    ],
    ids=["multiples of the world", "no multiples", "too large", "general", "a fraction", "a divisor of its own"],
)
def test_squares_are_exact_where_means_are_whole_and_few(given: Scenario, exact: bool) -> None:
    assert exact_squares(given) is exact


def test_a_scenario_of_another_system_is_refused() -> None:
    with pytest.raises(ValueError, match="says nothing of Muon"):
        lives(msgspec.structs.replace(scenario(1), system="zero_master", muon=None))


# --- sums that are divided --------------------------------------------------------------------------------------------


def sums_in_any_order(terms: list[np.ndarray[Any, Any]], seed: int) -> np.ndarray[Any, Any]:
    order = np.random.default_rng(seed).permutation(len(terms))
    total = np.zeros_like(terms[0])
    for index in order:
        total = (total + terms[index]).astype(np.float32)
    return total


@pytest.mark.parametrize("divisor", [3.0, 0.3, 7.5, 2.0**30])
def test_quotients_of_sums_in_any_order_lie_in_their_interval(divisor: float) -> None:
    random = np.random.default_rng(7)
    terms = [
        (random.standard_normal(4000) * 2.0 ** random.integers(-140, 60, 4000)).astype(np.float32) for _ in "12345"
    ]
    interval = divided(contributions.any_order(terms, 4000), divisor, exact=False)

    for seed in range(8):
        quotient = sums_in_any_order(terms, seed) / np.float32(divisor)
        assert (np.abs(quotient.astype(np.float64) - interval.center) <= interval.bound).all()
    twice = (sums_in_any_order(terms, 0) / np.float32(divisor) / np.float32(3)).astype(np.float64)
    assert (np.abs(twice - interval.center) > interval.bound).mean() > 0.9


def test_quotients_of_two_terms_are_known_exactly() -> None:
    given = scenario(2, domain=Domain.GENERAL, spread=6, multiple=1, max_k=255)
    plan = next(steps(given))
    share = Share((0, 1), 3.0)

    interval = contributions.interval(given, plan, 0, share)

    assert not interval.bound.any()
    assert np.array_equal(interval.center, contributions.reduced(given, plan, 0, share).value.astype(np.float64))


def test_quotients_may_overflow_where_sums_do_not() -> None:
    terms = [np.full(1, 2.0**126, np.float32)] * 3
    interval = divided(contributions.any_order(terms, 1), 0.25, exact=False)

    assert interval.overflows.tolist() == [True]
