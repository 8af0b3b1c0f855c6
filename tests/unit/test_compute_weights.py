"""The compute weights a subject is given: right values, storages of their own, and no stray write unnoticed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.drive import parameters
from harness.drive.memory import LiveMemory
from harness.drive.parameters import DTYPES, ComputeWeights, by_stream, gradient_like
from harness.oracles.compare import digest
from harness.scenario import values
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Source, Step, Values

PARAMETERS = (
    Parameter("matrix", (3, 5)),
    Parameter("scalar", (), "fp32"),
    Parameter("empty", (0, 2)),
    Parameter("half", (2, 2, 2), "fp16"),
    Parameter("vector", (4,)),
)
GUARD = 32  # elements beside each parameter that must be watched


@pytest.fixture(params=[2**14, 0], ids=["few", "many"], autouse=True)
def _few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How few elements are looked at as bytes: nothing but time may depend on it."""
    monkeypatch.setattr(parameters, "FEW", request.param)


def scenario_of(parameters: tuple[Parameter, ...], seed: int = 3) -> Scenario:
    return Scenario(
        world=1,
        seed=seed,
        parameters=parameters,
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(8), Part(False, (0,), ((),)), Step()),
    )


def weights_of(parameters: tuple[Parameter, ...] = PARAMETERS, seed: int = 3) -> ComputeWeights:
    return ComputeWeights(scenario_of(parameters, seed), torch.device("cpu"))


def storage_of(parameter: Tensor) -> Tensor:
    """All elements of the storage that a parameter lies in."""
    return torch.tensor([], dtype=parameter.dtype).set_(parameter.untyped_storage())


# --- what a subject is given ------------------------------------------------------------------------------------------


def test_parameters_hold_the_scenarios_initial_weights() -> None:
    weights = weights_of()

    for index, (made, wanted) in enumerate(zip(weights.parameters, PARAMETERS, strict=True)):
        drawn = torch.from_numpy(values.initial_weight(3, index, wanted.numel, wanted.dtype))
        assert isinstance(made, nn.Parameter)
        assert (made.shape, made.dtype) == (wanted.shape, DTYPES[wanted.dtype])
        assert torch.equal(made.detach().float().view(-1), drawn)
        assert made.requires_grad
        assert made.is_leaf
        assert made.is_contiguous()


def test_the_seed_decides_the_weights() -> None:
    assert not torch.equal(weights_of(seed=3).parameters[0], weights_of(seed=4).parameters[0])


def test_parameters_are_aligned_as_plain_allocations_and_share_no_storage() -> None:
    weights = weights_of()

    assert all(parameter.data_ptr() % 64 == 0 for parameter in weights.parameters)
    storages = {parameter.untyped_storage().data_ptr() for parameter in weights.parameters}
    assert len(storages) == len(PARAMETERS)


def test_the_reference_starts_from_copies() -> None:
    weights = weights_of()
    before = [initial.clone() for initial in weights.initial]

    for parameter in weights.parameters:
        parameter.detach().fill_(7)

    for parameter, initial, wanted in zip(weights.parameters, weights.initial, before, strict=True):
        assert torch.equal(initial, wanted)
        assert (initial.dtype, initial.shape) == (parameter.dtype, parameter.shape)


def test_everything_kept_alive_is_listed() -> None:
    """What is measured as the subject's must not hold the harness's own tensors."""
    gc.collect()
    memory = LiveMemory()
    weights = weights_of()

    assert memory.since([]) > 0
    assert memory.since(weights.tensors()) == 0
    for parameter in weights.parameters:
        parameter.data = parameter.data.clone()
    assert memory.since(weights.tensors()) == 0


# --- what must stay as it is ------------------------------------------------------------------------------------------


def test_a_right_gather_is_no_problem() -> None:
    weights = weights_of()
    assert weights.problem() is None

    for parameter in weights.parameters:
        parameter.detach().view(-1).copy_(torch.full((parameter.numel(),), math.inf))
        parameter.grad = torch.ones_like(parameter)

    assert weights.problem() is None


@pytest.mark.parametrize("value", [0.0, -1.5, math.nan])
@pytest.mark.parametrize("index", range(len(PARAMETERS)), ids=[parameter.name for parameter in PARAMETERS])
def test_a_write_next_to_a_parameter_is_found_beside_the_right_one(index: int, value: float) -> None:
    """Each of the 32 elements before and behind it, also beside an empty one, in parameters of several dtypes."""
    weights = weights_of()
    storage = storage_of(weights.parameters[index])
    assert storage.numel() == PARAMETERS[index].numel + 2 * GUARD
    for distance in range(GUARD):
        for place in (GUARD - 1 - distance, storage.numel() - GUARD + distance):
            before = float(storage[place])
            storage[place] = value
            problem = weights.problem()
            storage[place] = before

            assert problem is not None
            assert problem[0] == index
            assert "next to the parameter" in problem[1]
    assert weights.problem() is None


def test_of_several_overrun_parameters_the_first_is_named() -> None:
    weights = weights_of()
    for index in (4, 1, 3):
        storage_of(weights.parameters[index])[-1] = 0

    problem = weights.problem()

    assert problem is not None
    assert problem[0] == 1


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_another_storage_is_found(index: int) -> None:
    weights = weights_of()
    weights.parameters[index].data = weights.parameters[index].data.clone()

    problem = weights.problem()

    assert problem is not None
    assert problem[0] == index
    assert "another storage" in problem[1]


def test_exchanged_storages_are_found() -> None:
    """Both parameters look right for themselves: same size, still in one of the storages that were handed over."""
    weights = weights_of((Parameter("one", (4,)), Parameter("other", (4,))))
    one, other = weights.parameters
    one.data, other.data = other.data, one.data

    problem = weights.problem()

    assert problem is not None
    assert problem[0] == 0


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def as_half(tensor: Tensor) -> Tensor:
    return tensor.view(torch.float16)


def cut_short(tensor: Tensor) -> Tensor:
    return tensor[:2]


def flattened(tensor: Tensor) -> Tensor:
    return tensor.view(-1)


@pytest.mark.parametrize("changed", [transposed, as_half, cut_short, flattened])
def test_another_shape_stride_or_dtype_over_the_same_storage_is_found(changed: Callable[[Tensor], Tensor]) -> None:
    weights = weights_of()
    weights.parameters[0].data = changed(weights.parameters[0].data)

    problem = weights.problem()

    assert problem is not None
    assert problem[0] == 0


def test_a_write_to_the_frozen_parameter_is_found() -> None:
    """It belongs to no parameter of the scenario, so none is named."""
    for element in range(17):
        weights = weights_of()
        frozen = weights.tensors()[-1]
        assert all(frozen is not parameter for parameter in weights.parameters)
        assert frozen.shape == (17,)
        frozen[element] = math.nan

        problem = weights.problem()

        assert problem is not None
        assert problem[0] is None
        assert "frozen" in problem[1]


def test_a_moved_storage_is_told_before_what_was_written() -> None:
    """The write beside the old storage is the consequence."""
    weights = weights_of()
    storage_of(weights.parameters[0])[0] = 0
    weights.parameters[4].data = weights.parameters[4].data.clone()

    problem = weights.problem()

    assert problem is not None
    assert problem[0] == 4


# --- are they what they should be? ------------------------------------------------------------------------------------


def looked_at(weights: ComputeWeights) -> bool:
    assert weights.problem() is None
    return weights.as_expected


def test_weights_are_as_expected_in_every_element_or_need_a_closer_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.drive.parameters.FEW", 2**14)
    weights = weights_of()
    assert looked_at(weights)

    for wanted in (weights.initial, [initial * 2 + 1 for initial in weights.initial]):
        weights.expect(wanted)
        for parameter, initial in zip(weights.parameters, wanted, strict=True):
            parameter.detach().copy_(initial)
        assert looked_at(weights)
        for parameter in weights.parameters:
            flat = parameter.detach().view(-1)
            for element in range(flat.numel()):
                before = flat[element].clone()
                flat[element] = -before if before else before + 1
                assert not looked_at(weights)
                flat[element] = before
        assert looked_at(weights)


def test_expected_weights_are_of_the_parameters_sizes_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.drive.parameters.FEW", 2**14)
    weights = weights_of()
    for wrong in (
        [initial.to(torch.float64) for initial in weights.initial],
        [torch.cat([initial.view(-1), initial.view(-1)[:1]]) for initial in weights.initial],
    ):
        with pytest.raises(ValueError, match="weight 0 is not a dense tensor"):
            weights.expect(wrong)


def test_many_weights_always_need_a_closer_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.drive.parameters.FEW", 0)
    weights = weights_of()

    assert not looked_at(weights)
    weights.expect(weights.initial)
    assert not looked_at(weights)


# --- other strides, and values from elsewhere

STRIDED = (
    Parameter("matrix", (3, 5), strides="transposed"),
    Parameter("scalar", (), strides="transposed"),
    Parameter("empty", (0, 2), strides="transposed"),
    Parameter("half", (2, 3, 4), "fp16", strides="transposed"),
    Parameter("row", (1, 4), "fp32", strides="transposed"),
)


def test_a_transposed_parameter_has_the_same_values_in_the_reverse_order_in_memory() -> None:
    weights = weights_of(STRIDED)

    for index, (made, wanted) in enumerate(zip(weights.parameters, STRIDED, strict=True)):
        drawn = torch.from_numpy(values.initial_weight(3, index, wanted.numel, wanted.dtype))
        assert torch.equal(made.detach().float().reshape(-1), drawn)
        assert made.permute(list(range(made.dim()))[::-1]).is_contiguous()
    assert not weights.parameters[0].is_contiguous()
    assert weights.parameters[0].stride() == (1, 3)
    assert weights.parameters[3].stride() == (1, 2, 6)


def test_transposed_weights_are_expected_as_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.drive.parameters.FEW", 2**14)
    weights = weights_of(STRIDED)
    for wanted in (weights.initial, [(initial * 2 + 1).contiguous() for initial in weights.initial]):
        weights.expect(wanted)
        for parameter, each in zip(weights.parameters, wanted, strict=True):
            parameter.detach().copy_(each)
        assert looked_at(weights)
        weights.parameters[0].detach()[0, 1] += 1
        assert not looked_at(weights)


def test_gradients_lie_as_autograd_would_lay_them() -> None:
    for parameter, listed in zip(weights_of(STRIDED).parameters, STRIDED, strict=True):
        drawn = values.gradient(1, 0, 0, 0, listed.numel, Values(Domain.EXACT, 255, 0))
        (parameter.float() * torch.from_numpy(drawn).view(listed.shape)).sum().backward()
        made = gradient_like(parameter, drawn)
        assert parameter.grad is not None
        assert (made.dtype, made.shape) == (parameter.grad.dtype, parameter.grad.shape)
        # Of a dimension of one element the stride says nothing.
        assert all(
            dim == 1 or one == other
            for dim, one, other in zip(made.shape, made.stride(), parameter.grad.stride(), strict=True)
        )
        assert torch.equal(made, parameter.grad)
        assert not made.requires_grad


def test_weights_are_put_back_into_their_streams() -> None:
    """Two cuts of two streams, in another order and with other strides, give what the plain list has."""
    plain = (Parameter("a", (2, 3)), Parameter("b", (4,), "fp32"))
    moved = (
        Parameter("b1", (1,), "fp32", sources=(Source(1, 0, 1),)),
        Parameter("a", (3, 2), strides="transposed", sources=(Source(0, 2, 6), Source(0, 0, 2))),
        Parameter("b2", (3,), "fp32", sources=(Source(1, 1, 4),)),
    )
    found = by_stream(scenario_of(moved), weights_of(moved).parameters)
    wanted = weights_of(plain).parameters
    assert digest(found) == digest(wanted)
    assert [each.tolist() for each in found] == [each.reshape(-1).tolist() for each in wanted]
    untouched = weights_of(plain).parameters
    assert by_stream(scenario_of(plain), untouched) is untouched
