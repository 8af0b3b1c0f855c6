"""Sharded Muon from construction to deletion, on simulated ranks: what is refused, and what an optimizer's users do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.muon_training import INFO, SHAPES, Setup, Trainer, Unsharded, require, simulate
from zero2core import (
    ClipGradByGlobalNorm,
    GradientStateError,
    MuonAdamW,
    MuonParamInfo,
    MuonShardingConfig,
    MuonShardingOptimizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def refusal(construct: Callable[[], Any]) -> tuple[str, str]:
    try:
        construct()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# Refusals


def with_info(name: str, **fields: Any) -> dict[str, MuonParamInfo]:
    return INFO | {name: replace(INFO[name], **fields)}


def reordered() -> dict[str, tuple[int, ...]]:
    return dict(reversed(SHAPES.items()))


@pytest.mark.parametrize(
    ("odd", "first"),
    [
        (Setup(SHAPES | {"tall": (20, 6)}), "tall"),
        (Setup(SHAPES | {"bias": (2,)}), "bias"),
        (Setup({name: shape for name, shape in SHAPES.items() if name != "bias"}), "bias"),
        (Setup(reordered()), "bias"),
        (Setup(dtypes=(torch.bfloat16,)), "embedding"),
        (Setup(info=with_info("wide", use_muon=False)), "wide"),
        (Setup(info=with_info("experts", lr_scale=3.0)), "experts"),
        (Setup(config={"comm_buffer_size_mb": 1}), "comm_buffer_size_mb"),
        (Setup(config={"owner_rule": "numel"}), "owner_rule"),
        (Setup(config={"owner_cap": 2.0}), "owner_cap"),
        (Setup(config={"use_reduce_avg": False}), "use_reduce_avg"),
        (Setup(config={"comm_overlap": True}), "comm_overlap"),
        (Setup(config={"skip_missing": True}), "skip_missing"),
        (Setup(config={"two_hop": True, "local_world_size": 1}), "two_hop"),
        (Setup(config={"color_divisors": {-1: 5}}), "color_divisors"),
        (Setup(clip=lambda: ClipGradByGlobalNorm(1.0)), "grad_clip"),
    ],
)
@pytest.mark.parametrize("rank_of_odd", [0, 2])
def test_a_rank_with_another_list_or_setting_is_refused_on_all(odd: Setup, first: str, rank_of_odd: int) -> None:
    said = simulate(3, lambda rank: refusal(lambda: Trainer(rank, odd if rank == rank_of_odd else Setup())))

    assert {kind for kind, _ in said} == {"RankMismatchError"}
    assert len(set(said)) == 1
    assert first in said[0][1]


def other_clip() -> Any:
    return ClipGradByGlobalNorm(2.0)


def test_a_rank_with_another_norm_to_clip_to_is_refused_on_all() -> None:
    clips = [lambda: ClipGradByGlobalNorm(1.0), other_clip]
    said = simulate(2, lambda rank: refusal(lambda: Trainer(rank, Setup(clip=clips[rank]))))
    assert [kind for kind, _ in said] == ["RankMismatchError"] * 2


def construct(rank: int, change: Callable[[dict[str, Any]], None] | None) -> MuonShardingOptimizer:
    """An optimizer whose arguments ``change`` spoils."""
    arguments: dict[str, Any] = {"params": Setup().parameters(), "colors": {}, "config": {}, "group": None}
    arguments["sub"] = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    if change is not None:
        change(arguments)
    inner = arguments.get("inner") or MuonAdamW(arguments["params"].items(), INFO)
    config = arguments["config"]
    if isinstance(config, dict):
        config = MuonShardingConfig(colors=arguments["colors"], **config)
    return MuonShardingOptimizer(inner, arguments["group"], config)


def two_groups(arguments: dict[str, Any]) -> None:
    arguments["colors"] = {"tall": ("e", arguments["sub"][0]), "qkv": ("e", arguments["sub"][1])}


def unknown_color(arguments: dict[str, Any]) -> None:
    arguments["colors"] = {"tail": ("e", None)}


def default_elsewhere(arguments: dict[str, Any]) -> None:
    arguments["colors"] = {"tall": (-1, arguments["sub"][0])}


def unknown_divisor(arguments: dict[str, Any]) -> None:
    arguments["config"] = {"color_divisors": {"nobody": 2}}


def mixed_device(arguments: dict[str, Any]) -> None:
    arguments["params"]["tall"] = nn.Parameter(torch.empty(20, 4, device="meta"))


def no_muon(arguments: dict[str, Any]) -> None:
    arguments["inner"] = torch.optim.SGD(arguments["params"].values())


def config_as_dict(arguments: dict[str, Any]) -> None:
    arguments["config"] = 256


def not_divisible(arguments: dict[str, Any]) -> None:
    arguments["config"] = {"two_hop": True, "local_world_size": 2}


def no_nodes(arguments: dict[str, Any]) -> None:
    arguments["config"] = {"two_hop": True}


def outsider(arguments: dict[str, Any]) -> None:
    arguments["group"] = dist.GroupMember.NON_GROUP_MEMBER


REFUSED: list[tuple[Callable[[dict[str, Any]], None], str, list[str]]] = [
    (two_groups, "ValueError", ["qkv", "'e'", "two groups"]),
    (unknown_color, "ValueError", ["tail"]),
    (default_elsewhere, "ValueError", ["tall"]),
    (unknown_divisor, "ValueError", ["nobody"]),
    (mixed_device, "ValueError", ["tall", "meta"]),
    (no_muon, "TypeError", ["MuonAdamW", "SGD"]),
    (config_as_dict, "TypeError", ["MuonShardingConfig"]),
    (not_divisible, "ValueError", ["3", "2", "divisible"]),
    (no_nodes, "ValueError", ["LOCAL_WORLD_SIZE"]),
]


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED)
def test_what_all_ranks_refuse(change: Any, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for found, text in simulate(3, lambda rank: refusal(lambda: construct(rank, change))):
        assert (found, [word for word in words if word not in text]) == (kind, [])


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED)
def test_what_one_rank_refuses_all_do(
    change: Any, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    said = simulate(3, lambda rank: refusal(lambda: construct(rank, change if rank == 1 else None)))

    assert [found for found, _ in said] == ["RankMismatchError", kind, "RankMismatchError"]
    assert all(word in text for word in words for _, text in said)


def test_a_rank_that_is_not_in_the_group_is_refused_there() -> None:
    assert simulate(2, lambda rank: refusal(lambda: construct(rank, outsider))[0]) == ["ValueError"] * 2


@pytest.mark.parametrize("mine", [None, (0, 1, 2)])
def test_ranks_that_are_given_other_groups_of_a_color_are_refused_on_all(mine: Any) -> None:
    def ranks(rank: int) -> tuple[str, str]:
        def color(arguments: dict[str, Any]) -> None:
            group = arguments["sub"][0] if rank < 2 else dist.GroupMember.NON_GROUP_MEMBER
            if rank == 1:
                group = arguments["sub"][1] if mine else dist.GroupMember.NON_GROUP_MEMBER
            arguments["colors"] = {"tall": ("e", group)}

        return refusal(lambda: construct(rank, color))

    said = simulate(3, ranks)
    assert len(set(said)) == 1
    assert said[0][0] == "RankMismatchError"
    assert "'e'" in said[0][1]


@pytest.mark.parametrize("said", ["0", "many", "-2", ""])
def test_a_local_world_size_that_is_none_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    for kind, text in simulate(3, lambda rank: refusal(lambda: construct(rank, no_nodes))):
        assert kind == "ValueError"
        assert "LOCAL_WORLD_SIZE" in text


def test_local_world_size_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for kind, text in simulate(3, lambda rank: refusal(lambda: construct(rank, no_nodes))):
        assert kind == "ValueError"
        assert "3 ranks is not divisible by local_world_size 2" in text


# The order of calls


def test_the_order_of_calls_is_kept() -> None:
    def ranks(rank: int) -> int:
        trainer, reference = Trainer(rank, Setup()), Unsharded(Setup(), 2)
        opt = trainer.opt
        with pytest.raises(GradientStateError, match="not reduced"):
            opt.step()
        trainer.accumulate(0)
        with pytest.raises(GradientStateError, match="not reduced"):
            opt.step()
        opt.reduce_gradients()
        with pytest.raises(GradientStateError, match="twice"):
            opt.reduce_gradients()
        opt.step()
        with pytest.raises(GradientStateError, match="not reduced"):
            opt.step()
        opt.clear_grad()
        reference.step(0)
        reference.require_same(trainer, "refused calls change nothing")
        trainer.step(1)
        reference.step(1)
        reference.require_same(trainer, "and leave nothing")
        return rank

    assert simulate(2, ranks) == [0, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_between_reduction_and_step_is_refused(overlap: bool) -> None:
    def ranks(rank: int) -> int:
        trainer, reference = Trainer(rank, Setup(config={"comm_overlap": overlap})), Unsharded(Setup(), 2)
        trainer.accumulate(0)
        trainer.opt.reduce_gradients()
        with pytest.raises(GradientStateError, match="between"):
            trainer.backward(1, 0)
        for param in trainer.params.values():
            param.grad = None
        trainer.params["bias"].grad = torch.ones(1)
        with pytest.raises(GradientStateError, match="bias"):
            trainer.opt.step()
        trainer.params["bias"].grad = None
        trainer.opt.step()
        trainer.opt.clear_grad()
        reference.step(0)
        reference.require_same(trainer, "the step")
        return rank

    assert simulate(2, ranks) == [0, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_reduced_gradients_may_be_discarded(overlap: bool) -> None:
    def ranks(rank: int) -> int:
        setup = Setup(config={"comm_overlap": overlap})
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 2)
        trainer.backward(7, 0)
        trainer.opt.reduce_gradients()
        trainer.opt.clear_grad()
        for step in range(2):
            trainer.step(step)
            reference.step(step)
        reference.require_same(trainer, "after a discard")
        return rank

    assert simulate(2, ranks) == [0, 1]


def test_a_loop_that_never_clears_has_the_same_bits() -> None:
    def ranks(rank: int) -> int:
        setup = Setup(config={"comm_overlap": True}, missing=lambda step, part, rank, name: (step, rank) == (1, 1))
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 2)
        for step in range(2):
            trainer.accumulate(step)
            if step == 1:
                trainer.opt.clear_grad()  # rank 1 had no backward since its last step
                trainer.accumulate(step)
            trainer.opt.reduce_gradients()
            trainer.opt.step()
            reference.step(step)
        reference.require_same(trainer, "without clear_grad")
        return rank

    assert simulate(2, ranks) == [0, 1]


@pytest.mark.parametrize("colors", [{}, {"tall": ("e", [(0, 1)]), "bias": ("e", [(0, 1)])}])
def test_no_gradient_is_left_on_any_parameter(colors: Any) -> None:
    def ranks(rank: int) -> list[str]:
        trainer = Trainer(rank, Setup(SHAPES | {"empty": (0,)}, INFO | {"empty": MuonParamInfo()}, colors=colors))
        left = []
        for forget in (trainer.opt.reduce_gradients, trainer.opt.clear_grad):
            trainer.accumulate(0)
            forget()
            left += [name for name, param in trainer.params.items() if param.grad is not None]
            trainer.opt.clear_grad()
        return left

    assert simulate(3, ranks) == [[]] * 3


@pytest.mark.parametrize("late", [False, True])
def test_gradients_may_be_assigned_by_hand(late: bool) -> None:
    def ranks(rank: int) -> int:
        setup = Setup(parts=(1, 1), config={"comm_overlap": True}, dtypes=(torch.bfloat16,))
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 2)
        for step in range(2):
            for name, param in trainer.params.items():
                gradient = setup.gradient(step, 0, rank, name)
                if late and name != "tall":  # by a backward, then a part by hand
                    (param * (gradient * 2).to(param.dtype)).sum().backward()
                    gradient = -gradient
                param.grad = gradient.to(param.dtype)
            trainer.opt.reduce_gradients()
            trainer.opt.step()
            trainer.opt.clear_grad()
            reference.step(step)
            reference.require_same(trainer, f"step {step}")
        return rank

    assert simulate(2, ranks) == [0, 1]


# main_grad


@pytest.mark.parametrize("names", [list(SHAPES), ["tall", "bias"]])
@pytest.mark.parametrize("overlap", [False, True])
def test_main_grad_of_some_parameters(names: list[str], overlap: bool) -> None:
    setup = Setup(config={"comm_overlap": overlap}, dtypes=(torch.bfloat16,))

    def ranks(rank: int) -> int:
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 2)
        for name in names:
            trainer.params[name].main_grad = torch.zeros(SHAPES[name])
        for step, parts in enumerate(setup.parts):
            for part in range(parts):
                loss = torch.zeros(())
                for name, param in trainer.params.items():
                    gradient = setup.gradient(step, part, rank, name)
                    if name in names:
                        param.main_grad += gradient
                    else:
                        loss = loss + (param * gradient.to(param.dtype)).float().sum()
                if loss.requires_grad:
                    loss.backward()
            trainer.opt.reduce_gradients()
            require(not any(trainer.params[name].main_grad.any() for name in names), "main_grad is zero again")
            trainer.opt.step()
            trainer.opt.clear_grad()
            reference.step(step)
            reference.require_same(trainer, f"step {step}")
        return rank

    assert simulate(2, ranks) == [0, 1]


@pytest.mark.parametrize("spoil", ["both", "dtype", "shape"])
def test_main_grad_that_cannot_be_used_is_named(spoil: str) -> None:
    def ranks(rank: int) -> tuple[str, str]:
        trainer = Trainer(rank, Setup())
        param = trainer.params["tall"]
        param.main_grad = torch.zeros(20, 4, dtype=torch.bfloat16 if spoil == "dtype" else torch.float32)
        if spoil == "both":
            param.grad = torch.ones_like(param)
        if spoil == "shape":
            param.main_grad = torch.zeros(80)
        return refusal(trainer.opt.reduce_gradients)

    for kind, text in simulate(2, ranks):
        assert kind == "ValueError"
        assert "tall" in text


def test_main_grad_beside_a_backward_is_refused() -> None:
    def ranks(rank: int) -> tuple[str, str]:
        trainer = Trainer(rank, Setup())
        trainer.params["tall"].main_grad = torch.ones(20, 4)
        trainer.backward(0, 0)
        return refusal(trainer.opt.reduce_gradients)

    for kind, text in simulate(2, ranks):
        assert kind == "ValueError"
        assert "tall" in text


# Storage of compute weights


@pytest.mark.parametrize(
    ("colors", "key", "config"),
    [
        ({}, None, {}),
        ({}, -1, {"two_hop": True, "local_world_size": 2}),
        ({"experts": ("e", [(0, 1), (2, 3)]), "bias": ("e", [(0, 1), (2, 3)])}, "e", {"skip_missing": True}),
        ({"experts": ("e", [(1, 2)]), "bias": ("e", [(1, 2)])}, "e", {"comm_overlap": True}),
        ({"tall": ("e", [(0, 1)])}, None, {"fuse_optimizer_states": True, "comm_buffer_size_mb": 0}),
    ],
)
@pytest.mark.parametrize("when", ["before step", "before reset"])
def test_compute_weights_are_freed_and_come_back(colors: Any, key: Any, config: Any, when: str) -> None:
    setup = Setup(colors=colors, config=config, dtypes=(torch.bfloat16, torch.float16))
    setup = replace(setup, missing=lambda step, part, rank, name: step == 1 and name in ("experts", "bias"))

    def ranks(rank: int) -> int:
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 4)
        freed = [
            param
            for name, param in trainer.params.items()
            if colors.get(name, (None, []))[0] == (None if key == -1 else key)
            and (name not in colors or any(rank in group for group in colors[name][1]))
        ]
        for step in range(3):
            if when == "before reset":
                trainer.opt.clear_param_storage(key)
                require(all(param.untyped_storage().nbytes() == 0 for param in freed), "storage is freed")
                trainer.opt.reset_param_storage()
                reference.require_same(trainer, f"reset before step {step}")
            trainer.accumulate(step)
            trainer.opt.reduce_gradients()
            if when == "before step":
                trainer.opt.clear_param_storage(key)
                trainer.opt.clear_param_storage(key)
                require(all(param.untyped_storage().nbytes() == 0 for param in freed), "storage is freed")
            trainer.opt.step()
            trainer.opt.reset_param_storage()  # nothing is cleared any more
            trainer.opt.clear_grad()
            reference.step(step)
            reference.require_same(trainer, f"step {step}")
        return len(freed)

    assert sum(simulate(4, ranks)) > 3


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,) * 6 + (torch.float32,)])
def test_weights_without_masters_are_not_freed(dtypes: tuple[torch.dtype, ...]) -> None:
    def ranks(rank: int) -> str:
        trainer, reference = Trainer(rank, Setup(dtypes=dtypes)), Unsharded(Setup(dtypes=dtypes), 2)
        with pytest.raises(ValueError, match="fp32") as raised:
            trainer.opt.clear_param_storage(None)
        with pytest.raises(ValueError, match="nothing"):
            trainer.opt.clear_param_storage("nothing")
        reference.require_same(trainer, "nothing is freed")
        return str(raised.value)

    assert len(set(simulate(2, ranks))) == 1
