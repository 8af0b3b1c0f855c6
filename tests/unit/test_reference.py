"""The unsharded trainer and the gradients it is fed, against arithmetic written out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.oracles.bounds import squared_norm
from harness.oracles.compare import compare_bits
from harness.oracles.contributions import contribution, has_gradient, interval, reduced
from harness.oracles.reference import NotComparableError, UnshardedTrainer, build_adamw, moment_names, set_rate
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, StepPlan, Values, check, steps
from harness.scenario.situations import Situation
from harness.scenario.values import gradient

SHAPES = ((3, 4), (), (0, 7), (5,))


def make(
    world: int,
    none: tuple[tuple[tuple[int, ...], ...], ...],
    values: Values,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
) -> tuple[Scenario, StepPlan]:
    """A scenario of one step with one part for each entry of ``none``; every (part, rank) is its own contributor."""
    parts = [
        Part(part + 1 < len(none), tuple(part * world + rank for rank in range(world)), missing)
        for part, missing in enumerate(none)
    ]
    scenario = Scenario(
        world=world,
        seed=11,
        parameters=tuple(Parameter(f"p{index}", shape) for index, shape in enumerate(shapes)),
        values=values,
        optimizer=AdamW(),
        operations=(Build(4), *parts, Step()),
    )
    problem = check(scenario)
    if problem is not None:
        raise ValueError(problem)
    return scenario, next(steps(scenario))


EXACT = Values(Domain.EXACT, 255, -4)
GENERAL = Values(Domain.GENERAL, 255, -20, 40)


# --- contributions ----------------------------------------------------------------------------------------------------


def test_a_contribution_is_the_scenarios_own_value_or_none() -> None:
    scenario, plan = make(2, (((), (1,)), ((0, 1, 2, 3), ())), EXACT)

    seen = contribution(scenario, plan, 1, 0, 0)

    assert seen is not None
    assert np.array_equal(seen, gradient(11, 1, 0, 0, 12, EXACT))
    assert contribution(scenario, plan, 1, 0, 1) is None
    assert contribution(scenario, plan, 0, 1, 3) is None
    assert [has_gradient(scenario, plan, rank, part) for part in (0, 1) for rank in (0, 1)] == [True, True, False, True]


def test_contributions_differ_between_ranks_parts_and_steps() -> None:
    scenario, plan = make(2, (((), ()), ((), ())), EXACT)
    later = StepPlan(1, plan.parts, None, False)

    arrays = [
        contribution(scenario, step, rank, part, 0) for step in (plan, later) for rank in (0, 1) for part in (0, 1)
    ]

    assert len({array.tobytes() for array in arrays if array is not None}) == 8


def test_the_reduced_gradient_is_the_integer_sum_of_all_contributions() -> None:
    """Exact domain: bits equal a sum in Python integers, with missing parameters, parts and a rank without any."""
    everything = (0, 1, 2, 3)
    scenario, plan = make(3, (((), (1,), everything), ((0, 1), (), everything), ((), (1, 3), everything)), EXACT)

    for parameter, shape in enumerate(SHAPES):
        total = [0] * math.prod(shape)
        count = 0
        for rank, part in itertools.product(range(3), range(3)):
            array = contribution(scenario, plan, rank, part, parameter)
            if array is not None:
                count += 1
                total = [one + int(16 * value) for one, value in zip(total, array.tolist(), strict=True)]
        result = reduced(scenario, plan, parameter)
        assert result.value.dtype == np.float32
        assert [int(16 * value) for value in result.value.tolist()] == total
        assert result.num_contributions == count > 0


def test_a_parameter_without_any_gradient_reduces_to_zeros() -> None:
    scenario, plan = make(2, (((1,), (1,)),), EXACT)

    result = reduced(scenario, plan, 1)

    assert result.value.tolist() == [0.0]
    assert (result.num_contributions, result.shows) == (0, frozenset())
    assert interval(scenario, plan, 1).bound.tolist() == [0.0]


def test_general_values_are_added_parts_first_then_ranks_in_order() -> None:
    """Where rounding shows, the order is the trainer's own, and the other one gives other bits."""
    scenario, plan = make(3, (((), (), ()), ((), (), ())), GENERAL, shapes=((200,),))
    grid = [[contribution(scenario, plan, rank, part, 0) for part in range(2)] for rank in range(3)]

    def add(*arrays: NDArray[np.float32]) -> NDArray[np.float32]:
        total = arrays[0]
        for array in arrays[1:]:
            total = total + array
        return total

    result = reduced(scenario, plan, 0).value

    assert np.array_equal(result, add(*(add(*row) for row in grid)))  # type: ignore[arg-type]
    assert not np.array_equal(result, add(*(add(*column) for column in zip(*grid, strict=True))))


@pytest.mark.parametrize("values", [GENERAL, Values(Domain.GENERAL, 255, 70, 30), Values(Domain.GENERAL, 255, -133, 9)])
def test_the_interval_holds_every_order_and_no_lost_contribution(values: Values) -> None:
    """Also at the largest exponents that a scenario may have, and in the subnormal range."""
    scenario, plan = make(3, (((), (), ()), ((), (), ())), values, shapes=((300,),))
    places = itertools.product(range(3), range(2))
    arrays = [array for place in places if (array := contribution(scenario, plan, *place, 0)) is not None]
    around = interval(scenario, plan, 0)

    def inside(orders: tuple[int, ...]) -> NDArray[np.bool_]:
        total = np.zeros(300, np.float32)
        for index in orders:
            total += arrays[index]
        return np.abs(total - around.center) <= around.bound

    assert all(inside(order).all() for order in itertools.permutations(range(6)))
    assert not inside((0, 1, 2, 3, 4)).all()
    assert inside((0, 1, 2, 3, 4, 4)).mean() < 0.9


def test_wide_sums_are_those_that_bf16_cannot_hold() -> None:
    """One rank and one part always fit; two parts show in the partial sum, two ranks only in the reduced value."""

    def wide(world: int, num_parts: int, max_k: int) -> tuple[bool, bool]:
        values = Values(Domain.EXACT, max_k, -133)
        scenario, plan = make(world, (((),) * world,) * num_parts, values, shapes=((400,),))
        result = reduced(scenario, plan, 0)
        rounded = torch.from_numpy(result.value).bfloat16().float().numpy()
        assert (Situation.WIDE_REDUCED_VALUE in result.shows) == (not np.array_equal(rounded, result.value))
        assert result.shows <= {Situation.WIDE_PARTIAL_SUM, Situation.WIDE_REDUCED_VALUE}
        return Situation.WIDE_PARTIAL_SUM in result.shows, Situation.WIDE_REDUCED_VALUE in result.shows

    assert wide(1, 1, 255) == (False, False)
    assert wide(2, 1, 255) == (False, True)
    assert wide(1, 2, 255) == (True, True)
    assert wide(2, 2, 1) == (False, False)


# --- the trainer ------------------------------------------------------------------------------------------------------


def trainer(**settings: float | bool) -> UnshardedTrainer:
    weights = [
        torch.linspace(-1, 1, 12).view(3, 4).bfloat16(),
        torch.tensor(0.5),
        torch.empty(0, 7),
        torch.ones(5).half(),
    ]
    return UnshardedTrainer(weights, AdamW(**settings))  # type: ignore[arg-type]


def test_it_starts_from_copies_of_the_weights_in_their_own_dtype() -> None:
    initial = torch.ones(3, dtype=torch.bfloat16)
    reference = UnshardedTrainer([initial], AdamW())
    initial.zero_()

    assert reference.weights[0].tolist() == [1.0] * 3
    assert reference.weights[0].dtype == torch.bfloat16
    assert reference.master(0).dtype == torch.float32
    assert [weight.dtype for weight in trainer().weights] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.float16,
    ]


@pytest.mark.parametrize("foreach", [False, True])
def test_a_first_step_is_adamw_by_hand(foreach: bool) -> None:
    """m = (1 - b1) g, v = (1 - b2) g^2, p = p (1 - lr wd) - lr g / (|g| + eps): decay and moments of zeros included."""
    reference = trainer(lr=0.5, weight_decay=0.25, beta1=0.5, beta2=0.75, eps=0.0625, foreach=foreach)
    gradients = [torch.full((3, 4), 2.0), None, None, torch.full((5,), -1.0)]
    before = [reference.master(index).clone() for index in range(4)]

    reference.set_gradients(gradients)
    reference.step()

    assert torch.allclose(reference.master(0), before[0] * 0.875 - 0.5 * 2 / 2.0625, rtol=1e-6)
    assert reference.master(1).item() == 0.5 * 0.875
    assert torch.allclose(reference.master(3), before[3] * 0.875 + 0.5 / 1.0625, rtol=1e-6)
    assert [moment[0, 0].item() for moment in reference.moments(0)] == [1.0, 1.0]
    assert [moment.item() for moment in reference.moments(1)] == [0.0, 0.0]
    assert reference.moments(2)[0].shape == (0, 7)
    assert reference.num_steps == 1


def test_foreach_gives_the_same_bits() -> None:
    both = [trainer(foreach=False), trainer(foreach=True)]
    for seed in range(3):
        torch.manual_seed(seed)
        gradients = [torch.randn(shape) for shape in SHAPES]
        for reference in both:
            reference.set_gradients([one.clone() for one in gradients])
            reference.step()

    for index in (0, 1, 3):
        assert compare_bits(both[0].master(index), both[1].master(index), signed_zeros=True).equal
        assert compare_bits(both[0].moments(index)[1], both[1].moments(index)[1], signed_zeros=True).equal


def test_the_same_bits_on_a_flat_vector_with_amsgrad_maximize_and_a_new_rate() -> None:
    """What makes a shard comparable at all: it does not matter where an element lies."""
    for foreach in (False, True):
        reference = trainer(foreach=foreach, amsgrad=True, maximize=True)
        flat = torch.nn.Parameter(torch.cat([reference.master(index).reshape(-1) for index in range(4)]))
        optimizer = build_adamw([flat], AdamW(foreach=foreach, amsgrad=True, maximize=True))
        for seed, scale in enumerate((1.0, 2.0**-20, 2.0**-70, 2.0**40)):
            torch.manual_seed(seed)
            gradients = [torch.randn(shape) * scale for shape in SHAPES]
            flat.grad = torch.cat([one.reshape(-1) for one in gradients])
            if seed == 2:
                reference.set_rate(0.25)
                set_rate(optimizer, 0.25)
            reference.set_gradients(gradients)
            reference.step()
            optimizer.step()

        state = optimizer.state[flat]
        assert moment_names(AdamW(amsgrad=True)) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        seen = [flat.detach(), *(state[name] for name in moment_names(AdamW(amsgrad=True)))]
        wanted = [[reference.master(index), *reference.moments(index)] for index in range(4)]
        for place, vector in enumerate(seen):
            whole = torch.cat([of_parameter[place].reshape(-1) for of_parameter in wanted])
            assert compare_bits(whole, vector, signed_zeros=True).equal
        largest, last = state["max_exp_avg_sq"], state["exp_avg_sq"]
        assert bool((largest >= last).all())


def test_a_new_rate_holds_from_the_next_step_on() -> None:
    """As in an optimizer that was made with it, from the same moments."""
    one, other = trainer(lr=0.5), trainer(lr=0.125)
    for number in range(2):
        for reference in (one, other):
            reference.set_gradients([torch.full(shape, 1.0 + number) for shape in SHAPES])
        if number == 0:
            one.set_rate(0.125)
        for reference in (one, other):
            reference.step()

    assert all(torch.equal(one.master(index), other.master(index)) for index in range(4))


def test_loaded_weights_become_the_masters_and_moments_stay() -> None:
    reference = trainer()
    reference.set_gradients([torch.ones(shape) for shape in SHAPES])
    reference.step()
    reference.gather()
    before = [moment.clone() for moment in reference.moments(0)]
    loaded = [torch.full(shape, 0.5 + index).to(weight.dtype) for index, (shape, weight) in
              enumerate(zip(SHAPES, reference.weights, strict=True))]  # fmt: skip

    reference.load(loaded)
    loaded[0].zero_()

    assert reference.weights[0].eq(0.5).all()
    assert reference.master(3).tolist() == [3.5] * 5
    assert all(torch.equal(one, other) for one, other in zip(before, reference.moments(0), strict=True))
    assert reference.num_steps == 1


def test_a_rebuild_begins_anew_with_the_weights_and_the_rate_that_are_set() -> None:
    reference = trainer(lr=0.5)
    reference.set_rate(0.125)
    reference.set_gradients([torch.ones(shape) for shape in SHAPES])
    reference.step()
    reference.gather()

    reference.rebuild()

    fresh = UnshardedTrainer(reference.weights, AdamW(lr=0.125))
    with pytest.raises(RuntimeError, match="first step"):
        reference.moments(0)
    for one in (reference, fresh):
        one.set_gradients([torch.ones(shape) for shape in SHAPES])
        one.step()
    assert all(torch.equal(reference.master(index), fresh.master(index)) for index in range(4))
    assert reference.num_steps == 1


def test_gather_rounds_the_masters_and_nothing_else_changes_weights() -> None:
    reference = trainer(lr=1.0)
    before = [weight.clone() for weight in reference.weights]
    reference.set_gradients([torch.ones(shape) for shape in SHAPES])
    reference.step()
    assert all(torch.equal(one, other) for one, other in zip(before, reference.weights, strict=True))

    reference.gather()

    assert not torch.equal(before[0], reference.weights[0])
    for index, weight in enumerate(reference.weights):
        assert torch.equal(weight, reference.master(index).to(weight.dtype))


def test_scaling_multiplies_in_fp32_and_shows_in_the_norm() -> None:
    reference = trainer()
    reference.set_gradients([torch.full((3, 4), 3.0), None, None, torch.full((5,), -2.0)])
    assert reference.squared_norm().value == 12 * 9 + 5 * 4
    assert reference.squared_norm().num_elements == 18

    reference.scale_gradients(0.1)

    tenth = np.float32(3) * np.float32(0.1)
    assert reference.gradients[0][0, 0].item() == tenth
    assert reference.squared_norm() == squared_norm([one.numpy() for one in reference.gradients])
    reference.scale_gradients(math.nan)
    assert math.isnan(reference.squared_norm().value)


def test_a_step_needs_fresh_gradients() -> None:
    reference = trainer()
    with pytest.raises(RuntimeError, match="set_gradients"):
        reference.step()
    reference.set_gradients([None] * 4)
    reference.step()

    with pytest.raises(RuntimeError, match="set_gradients"):
        reference.step()


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([None] * 3, "3 gradients for 4 parameters"),
        (
            [torch.ones(4, 3), None, None, None],
            r"gradient 0 is torch.float32 \[4, 3\].*expected torch.float32 \[3, 4\]",
        ),
        ([None, torch.ones((), dtype=torch.bfloat16), None, None], "gradient 1 is torch.bfloat16"),
    ],
)
def test_gradients_of_another_kind_are_refused(gradients: list[torch.Tensor | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer().set_gradients(gradients)


def test_there_are_no_moments_before_the_first_step() -> None:
    with pytest.raises(RuntimeError, match="first step"):
        trainer().moments(0)


@pytest.mark.parametrize("flag", ["fused", "capturable", "differentiable"])
def test_what_cannot_be_compared_is_refused_with_a_reason(flag: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))

    with pytest.raises(NotComparableError, match=f"{flag}=True cannot be compared bit for bit: .*"):
        build_adamw([parameter], AdamW(), **{flag: True})
    assert not build_adamw([parameter], AdamW(), **{flag: False}).param_groups[0][flag]


@pytest.mark.parametrize("foreach", [False, True])
def test_every_setting_reaches_the_optimizer_and_nothing_is_left_to_torch(foreach: bool) -> None:
    """What is None in torch's options, it chooses by device: both sides must state it."""
    settings = AdamW(lr=0.5, beta1=0.25, beta2=0.75, eps=0.125, weight_decay=0.0625, foreach=foreach)

    group = build_adamw([torch.nn.Parameter(torch.ones(2))], settings).param_groups[0]

    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.25, 0.75), 0.125, 0.0625)
    assert (group["foreach"], group["fused"]) == (foreach, False)


def test_unknown_flags_are_refused() -> None:
    with pytest.raises(TypeError, match="'nesterov'"):
        build_adamw([torch.nn.Parameter(torch.ones(2))], AdamW(), nesterov=False)
