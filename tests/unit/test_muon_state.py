"""MuonAdamW as a torch.optim.Optimizer: state dicts, schedulers, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from zero2core.muon import ClipGradByAdaptiveNorm, MuonAdamW, MuonParamInfo

INFO = {
    "bias": MuonParamInfo(),
    "qkv": MuonParamInfo(use_muon=True, split="qkv", sizes=(2, 1, 1)),
    "norm": MuonParamInfo(lr_scale=2.0),
    "out": MuonParamInfo(use_muon=True),
}
SHAPES = {"bias": (5,), "qkv": (4, 3), "norm": (), "out": (2, 6)}
SETTINGS: dict[str, Any] = {"lr": 0.125, "ns_coefficients": [(2.0, -1.5, 0.5)], "scale": "spectral"}


pytestmark = pytest.mark.usefixtures("one_thread")


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Trainer:
    """Parameters and their optimizer; steps have fixed gradients."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, names: Any = SHAPES, **settings: Any) -> None:
        self.params = {name: nn.Parameter(normal(SHAPES[name], len(name)).to(dtype)) for name in names}
        clip = ClipGradByAdaptiveNorm(ratio=0.9, warmup_steps=2)
        self.optimizer = MuonAdamW(self.params.items(), INFO, grad_clip=clip, **(SETTINGS | settings))

    def train(self, *steps: int) -> None:
        for step in steps:
            for name, param in self.params.items():
                param.grad = normal(SHAPES[name], 100 * step + len(name)).to(param.dtype)
            self.optimizer.step()

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        for name, param in self.params.items():
            param.data.copy_(weights[name])
        self.optimizer.load_state_dict(state)

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}


def assert_same(one: Trainer, other: Trainer) -> None:
    """Weights, state with its dtypes, the clip's and the groups'."""
    for name, param in one.params.items():
        assert torch.equal(param, other.params[name]), name
        mine, theirs = one.optimizer.state[param], other.optimizer.state[other.params[name]]
        assert set(mine) == set(theirs)
        for key, value in mine.items():
            if key == "step":
                assert value == theirs[key]
                continue
            assert value.dtype == theirs[key].dtype == torch.float32
            assert torch.equal(value, theirs[key]), (name, key)
    assert one.optimizer.grad_clip.state_dict() == other.optimizer.grad_clip.state_dict()  # type: ignore[union-attr]
    for mine, theirs in zip(one.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        assert {key: value for key, value in mine.items() if key not in ("params", "names")} == {
            key: value for key, value in theirs.items() if key not in ("params", "names")
        }


@pytest.mark.parametrize("names", [list(SHAPES), list(reversed(SHAPES))], ids=["same order", "another order"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(
    dtype: torch.dtype, steps: int, names: list[str], tmp_path: Path
) -> None:
    trainer = Trainer(dtype)
    trainer.train(*range(steps))
    torch.save((trainer.weights(), trainer.optimizer.state_dict()), tmp_path / "saved.pt")
    trainer.train(*range(steps, steps + 4))

    other = Trainer(dtype, names, lr=7.0, scale="original", ns_coefficients="aol")
    other.load(*torch.load(tmp_path / "saved.pt"))
    other.train(*range(steps, steps + 4))
    assert_same(trainer, other)


def test_masters_are_not_rounded_on_load() -> None:
    trainer, other = Trainer(), Trainer()
    trainer.train(0, 1)
    masters = {name: trainer.optimizer.state[param]["master"] for name, param in trainer.params.items()}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    other.load(trainer.weights(), trainer.optimizer.state_dict())
    for name, param in other.params.items():
        assert torch.equal(other.optimizer.state[param]["master"], masters[name])


def test_what_was_loaded_is_a_copy() -> None:
    trainer, other = Trainer(torch.float32), Trainer(torch.float32)
    trainer.train(0)
    state, weights = trainer.optimizer.state_dict(), trainer.weights()
    given = copy.deepcopy(state)
    other.load(weights, state)
    other.train(1, 2)
    other.optimizer.param_groups[0]["lr"] = 3.0
    assert state.keys() == given.keys()
    assert state["param_groups"] == given["param_groups"]
    assert state["grad_clip"] == given["grad_clip"]
    assert state["state"].keys() == given["state"].keys()
    for index, of_one in state["state"].items():
        assert of_one.keys() == given["state"][index].keys()
        for key, value in of_one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(given["state"][index][key]))


def test_a_state_dict_has_torchs_form() -> None:
    trainer = Trainer()
    state = trainer.optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "grad_clip"}
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert [group["names"] for group in state["param_groups"]] == [["qkv", "out"], ["bias", "norm"]]
    assert {index: set(value) for index, value in state["state"].items()} == {
        0: {"master", "momentum"},
        1: {"master", "momentum"},
        2: {"master", "exp_avg", "exp_avg_sq", "step"},
        3: {"master", "exp_avg", "exp_avg_sq", "step"},
    }
    assert set(MuonAdamW(trainer.params.items(), INFO).state_dict()) == {"state", "param_groups"}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    trainer = Trainer()
    trainer.train(5)
    state = copy.deepcopy(trainer.optimizer.state_dict())
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["param_groups"].pop(), "has 1 parameter groups, not two"),
        (lambda s: s["param_groups"].reverse(), "the saved group of Muon has no momentum"),
        (lambda s: s["param_groups"][1].pop("eps"), "the saved group of AdamW has no eps"),
        (lambda s: s["param_groups"][0]["names"].__setitem__(0, "kvq"), "kvq is of the Muon set in the saved"),
        (lambda s: s["param_groups"][0]["names"].pop(), "1 names of 2 params"),
        (lambda s: s["state"].pop(1), r"saved state of out has \[\], expected \['master', 'momentum'\]"),
        (lambda s: s["state"][0].pop("master"), r"saved state of qkv has \['momentum'\]"),
        (lambda s: s["state"][0].update(momentum=torch.zeros(3, 4)), r"saved momentum of qkv is \(3, 4\), .* \(4, 3\)"),
        (lambda s: s["state"][2].update(momentum=torch.zeros(5)), "saved state of bias has"),
        (lambda s: s.pop("grad_clip"), "ClipGradByAdaptiveNorm has keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(
    change: Callable[[dict[str, Any]], object], said: str
) -> None:
    trainer, untouched = Trainer(), Trainer()
    for each in (trainer, untouched):
        each.train(0)
    with pytest.raises(ValueError, match=said):
        trainer.optimizer.load_state_dict(changed(change))
    assert_same(trainer, untouched)
    for each in (trainer, untouched):
        each.train(1)
    assert_same(trainer, untouched)


def test_the_state_of_bf16_parameters_is_not_that_of_fp32_ones() -> None:
    with pytest.raises(ValueError, match=r"saved state of qkv has \['master', 'momentum'\], expected \['momentum'\]"):
        Trainer(torch.float32).optimizer.load_state_dict(Trainer().optimizer.state_dict())


def test_a_deferred_state_may_be_loaded() -> None:
    trainer, other = Trainer(), Trainer(defer_state=True)
    trainer.train(0, 1, 2)
    other.load(trainer.weights(), trainer.optimizer.state_dict())
    for each in (trainer, other):
        each.train(3)
    assert_same(trainer, other)


def test_hooks_of_loading_and_stepping_run() -> None:
    trainer, calls = Trainer(), []
    optimizer = trainer.optimizer
    saved = optimizer.state_dict()

    def double(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = copy.deepcopy(state["param_groups"])
        groups[0]["lr"] *= 2
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    optimizer.load_state_dict(saved)
    trainer.train(0)
    assert calls == ["loaded", "stepped"]
    assert optimizer.param_groups[0]["lr"] == 2 * saved["param_groups"][0]["lr"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike_and_apart(how: str) -> None:
    trainer = Trainer()
    trainer.train(0, 1)
    before = trainer.weights()
    copied = copy.deepcopy(trainer) if how == "deepcopy" else pickle.loads(pickle.dumps(trainer))  # noqa: S301
    assert all(copied.optimizer.named[name] is param for name, param in copied.params.items())
    copied.train(2, 3)
    assert all(torch.equal(param, before[name]) for name, param in trainer.params.items())
    trainer.train(2, 3)
    assert_same(trainer, copied)
    with pytest.raises(TypeError, match="no further parameter groups"):
        copied.optimizer.add_param_group({"params": []})


def test_schedulers_set_the_rate_of_each_set() -> None:
    scheduled, by_hand = Trainer(adamw_lr=0.5), Trainer(adamw_lr=0.5)
    rates = (lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch))
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled.optimizer, list(rates))
    for step in range(4):
        for group, rate, base in zip(by_hand.optimizer.param_groups, rates, (0.125, 0.5), strict=True):
            group["lr"] = base * rate(step)
        scheduled.train(step)
        by_hand.train(step)
        scheduler.step()
        assert all(torch.equal(param, by_hand.params[name]) for name, param in scheduled.params.items())


def test_a_scheduled_optimizer_is_saved_and_loaded_with_its_scheduler() -> None:
    def scheduled() -> tuple[Trainer, torch.optim.lr_scheduler.LRScheduler]:
        trainer = Trainer()
        return trainer, torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=1, gamma=0.5)

    (trainer, scheduler), (other, other_scheduler) = scheduled(), scheduled()
    trainer.train(0)
    scheduler.step()
    other.load(trainer.weights(), trainer.optimizer.state_dict())
    other_scheduler.load_state_dict(scheduler.state_dict())
    assert other.optimizer.param_groups[0]["lr"] == 0.0625
    for step in (1, 2):
        for each, its in ((trainer, scheduler), (other, other_scheduler)):
            each.train(step)
            its.step()
    assert other.optimizer.param_groups[1]["lr"] == 0.125 * 0.5**3
    assert_same(trainer, other)


def test_a_state_saved_before_there_was_a_scheduler_leaves_its_settings() -> None:
    state = Trainer().optimizer.state_dict()
    trainer = Trainer()
    torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=1)
    trainer.optimizer.load_state_dict(state)
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [0.125, 0.125]


def test_torchs_own_helpers_for_checkpoints_go_through() -> None:
    """They know the state by the names that the model gives, and nothing of clips."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16() for _ in range(2)]
    optimizers = []
    for model in models:
        info = {name: MuonParamInfo(use_muon=param.dim() == 2) for name, param in model.named_parameters()}
        optimizers.append(MuonAdamW(model.named_parameters(), info))

    def train(index: int, step: int) -> None:
        for name, param in models[index].named_parameters():
            param.grad = normal(tuple(param.shape), 10 * step + len(name)).bfloat16()
        optimizers[index].step()

    train(0, 0)
    saved = copy.deepcopy(get_state_dict(models[0], optimizers[0]))
    train(0, 1)
    set_state_dict(models[1], optimizers[1], model_state_dict=saved[0], optim_state_dict=saved[1])
    train(1, 1)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
