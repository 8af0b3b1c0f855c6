"""Marks, refusals and the life of dedicated matrices in one process, where there is no group at all."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero2core import GradientStateError, MuonAdamW, MuonParamInfo
from zero2core.strategies.dedicated import build_optimizer, clip_grad_norm_, dedicate, dedicated_of, runtime_of
from zero2core.strategies.dmuon import DMuonFSDPStrategy
from zero2core.strategies.dmuon_package import DMuonUnavailableError
from zero2core.strategies.marks import mark_muon, marked_parameters


def marked_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for layer in (model[0], model[2]):
        mark_muon(layer.weight)  # type: ignore[arg-type]
    return model


def test_marks_are_found_once_with_all_sites_and_frozen_ones_stay() -> None:
    model = marked_model()
    model.append(nn.Linear(6, 3))
    model[3].weight = model[2].weight
    model[0].weight.requires_grad_(False)

    (found,) = marked_parameters(model)

    assert found.name == "2.weight"
    assert found.info == MuonParamInfo(use_muon=True)
    assert found.sites == ((model[2], "weight"), (model[3], "weight"))


def meta(model: nn.Module) -> None:
    model.to("meta")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            mark_muon(parameter)


def mark(index: int, name: str, info: Any = None) -> Callable[[nn.Sequential], object]:
    return lambda model: mark_muon(getattr(model[index], name), info)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (mark(0, "bias"), "0.bias, shape (6,), has use_muon=True, but is no matrix"),
        (mark(0, "weight", MuonParamInfo(use_muon=True, split="qkv")), "needs the rows of 3 blocks"),
        (meta, "0.weight is on the meta device"),
        (lambda model: model[0].register_parameter("weight", nn.Parameter(torch.ones(6, 4))), None),
        (lambda model: model.requires_grad_(False), "no trainable parameter of Sequential is marked"),
        (lambda model: mark_muon(model[0].weight.detach()), "mark_muon got a Tensor"),
        (mark(0, "weight", MuonParamInfo()), "use_muon=False"),
        (mark(0, "weight", {"use_muon": True}), "the record is a dict"),
    ],
)
def test_what_cannot_be_dedicated_is_refused(spoil: Callable[[nn.Sequential], object], says: str | None) -> None:
    model = marked_model()
    if says is None:
        spoil(model)
        assert [found.name for found in marked_parameters(model)] == ["2.weight"]
        return

    def spoil_and_dedicate() -> None:
        spoil(model)
        dedicate(model)

    with pytest.raises((ValueError, TypeError), match=r".*") as raised:
        spoil_and_dedicate()
    assert says in str(raised.value)
    assert isinstance(model[2].weight, nn.Parameter)  # nothing was taken out


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"infos": {"0.weigth": None}}, "did you mean '0.weight'?"),
        ({"infos": {"0.weight": "muon"}}, "the record is a str"),
        ({"keep": "z1"}, "must be 'z2' or 'z3'"),
        ({"compute_dtype": torch.int8}, "compute_dtype=torch.int8"),
        ({"reduce_dtype": torch.int64}, "reduce_dtype=torch.int64"),
    ],
)
def test_settings_of_dedicate_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r".*") as raised:
        dedicate(marked_model(), **settings)
    assert says in str(raised.value)


def test_dedicated_matrices_are_no_parameters_and_step_as_in_muon_adamw() -> None:
    model, reference = marked_model(), marked_model()
    runtime = dedicate(model, keep="z2")
    adamw = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-9, "weight_decay": 0.1}
    optimizer = build_optimizer(model, torch.optim.AdamW, muon={"lr": 0.02}, foreach=False, **adamw)
    info = {name: MuonParamInfo(use_muon="weight" in name) for name, _ in reference.named_parameters()}
    whole = MuonAdamW(reference.named_parameters(), info, lr=0.02, adamw_lr=0.01)

    for _ in range(3):
        x = torch.randn(5, 4)
        for one, stepped in ((model, optimizer), (reference, whole)):
            one(x).square().sum().backward()
            stepped.step()
            one.zero_grad()

    assert [name for name, _ in model.named_parameters()] == ["0.bias", "2.bias"]
    assert set(model.state_dict()) == {"0.bias", "2.bias"}
    assert list(dedicated_of(model)) == ["0.weight", "2.weight"]
    for name, expected in reference.named_parameters():
        held = runtime.parameters.get(name)
        got = model.get_parameter(name) if held is None else held.weight
        assert got is not None
        assert torch.equal(got, expected)
        assert held is None or held.grad is None  # Module.zero_grad knows of them


def test_what_no_loss_has_used_is_left_as_it_is() -> None:
    model = marked_model()
    runtime = dedicate(model)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
    before = runtime.full_state()

    model[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()

    after = runtime.full_state()
    assert not torch.equal(before["0.weight"], after["0.weight"])
    assert torch.equal(before["2.weight"], after["2.weight"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("keep", ["z2", "z3"])
def test_a_forward_without_gradients_computes_with_the_weights_of_the_last_step(keep: Any, mode: Any) -> None:
    model = marked_model()
    runtime = dedicate(model, keep=keep)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.0)
    x = torch.randn(3, 4)
    with mode():
        first = model(x)
    model(x).sum().backward()
    optimizer.step()

    with mode():
        second = model(x)

    weights = runtime.full_state()
    hidden = torch.relu(x @ weights["0.weight"].T + model[0].bias)
    # Two products of at most six terms, summed in an order of the library's: ten roundings are plenty.
    torch.testing.assert_close(second, hidden @ weights["2.weight"].T + model[2].bias, rtol=10 * 2**-24, atol=1e-6)
    assert not torch.equal(first, second)


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = mark_muon(nn.Parameter(torch.ones(2, 2)))

    def forward(self, x: Tensor) -> Any:
        hidden = types.SimpleNamespace()
        hidden.value = x @ self.weight
        return hidden


def test_an_output_in_which_no_tensor_is_found_is_refused_where_the_backward_needs_it() -> None:
    kept, freed = Hides(), Hides()
    dedicate(kept, keep="z2")
    dedicate(freed, keep="z3")

    kept(torch.ones(2, 2)).value.sum().backward()
    assert runtime_of(kept).parameters["weight"].grad is not None
    with pytest.raises(TypeError, match="returns a SimpleNamespace, in which no tensor is found"):
        freed(torch.ones(2, 2))


def test_the_optimizer_says_what_it_does_not_take() -> None:
    model = marked_model()
    dedicate(model)
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=0.1)
    saved = optimizer.state_dict()

    assert set(saved["dedicated"]) == {"0.weight", "2.weight"}
    for wrong, says in [
        ({"state": {}}, "expected"),
        (saved | {"inner": None}, "not of the same parameters"),
        (saved | {"muon": {}}, "lack lr"),
        (saved | {"dedicated": {}}, "0.weight is owned by this rank now"),
        (saved | {"dedicated": {key: {"master": torch.ones(1)} for key in saved["dedicated"]}}, "saved master"),
    ]:
        with pytest.raises(ValueError, match=r".*") as raised:
            optimizer.load_state_dict(wrong)
        assert says in str(raised.value)
    with pytest.raises(TypeError, match="no setting 'rate'"):
        build_optimizer(model, torch.optim.AdamW, muon={"rate": 0.1})
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        build_optimizer(model, torch.optim.AdamW, muon={"momentum": 1.5})
    with pytest.raises(TypeError, match="no further parameter groups"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(TypeError, match="clip_grad_norm_ got a SGD"):
        clip_grad_norm_(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    with pytest.raises(ValueError, match="max_norm=-1"):
        clip_grad_norm_(optimizer, -1)
    with pytest.raises(ValueError, match="has no dedicated parameters"):
        dedicated_of(nn.Linear(2, 2))


def test_a_model_of_dedicated_matrices_alone_has_an_optimizer_and_a_clip() -> None:
    model = nn.Linear(2, 2, bias=False)
    mark_muon(model.weight)
    runtime = dedicate(model)
    optimizer = build_optimizer(model, torch.optim.AdamW, muon={"lr": 0.5}, lr=0.1)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()

    stats = clip_grad_norm_(optimizer, 1.0)

    grad = runtime.parameters["weight"].grad
    assert grad is not None
    assert stats.total_norm.item() == pytest.approx(50**0.5, rel=2**-23)
    assert grad.norm().item() == pytest.approx(1.0, abs=1e-6)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


# The strategy, before it wraps anything


def strategy(runtime: Any = "own", **config: Any) -> DMuonFSDPStrategy:
    return DMuonFSDPStrategy(config, device=torch.device("cpu"), local_rank=0, runtime=runtime)


def test_the_strategy_needs_fsdp2_and_no_fp16() -> None:
    with pytest.raises(NotImplementedError, match="use_fsdp=True"):
        strategy()
    with pytest.raises(NotImplementedError, match="bf16=True"):
        strategy(use_fsdp=True, bf16=False, grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="valid values are 'own', 'dmuon'"):
        strategy("theirs", use_fsdp=True)
    with pytest.raises(GradientStateError, match="wrap"):
        strategy(use_fsdp=True).dedicated(nn.Linear(2, 2))


def test_a_package_that_is_missing_or_lacks_a_function_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dmuon", None)
    with pytest.raises(DMuonUnavailableError, match="runtime='own'") as raised:
        strategy("dmuon", use_fsdp=True)
    assert isinstance(raised.value, ImportError)

    module = types.ModuleType("dmuon")
    module.dedicate = dedicate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dmuon", module)
    with pytest.raises(DMuonUnavailableError, match="has no function clip_grad_norm_, no_sync"):
        strategy("dmuon", use_fsdp=True)
