"""The memory formula, by hand and against the bytes that ZeroMaster and AdamW really hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero2core import ZeroMaster, sharded_static_bytes


@pytest.mark.parametrize(
    ("backbone", "heads", "weights", "world", "expected"),
    [
        (1000, 0, 0, 1, 18_000),  # bf16 gradient 2, master 4, gradient 4, moments 8
        (1000, 0, 0, 4, 6_000),  # 2000 + 16000 / 4
        (1000, 10, 2_400, 4, 8_560),  # + weights 2400 + heads 160
        (0, 10, 20, 8, 180),  # heads are not sharded
        (10, 0, 0, 3, 20 + 160 / 3),
    ],
)
def test_the_formula_by_hand(backbone: int, heads: int, weights: int, world: int, expected: float) -> None:
    assert sharded_static_bytes(backbone, heads, weights, world) == expected


def test_sharding_over_four_lets_a_two_billion_parameter_model_fit_a_24_gb_card() -> None:
    """1.4e9 trainable elements are 22 GB of fp32 state; with the weights of the whole model that does not fit."""
    trainable, weights = 1.4e9, 2 * 2e9

    assert sharded_static_bytes(trainable, 0, weights, 1) > 24e9
    assert sharded_static_bytes(trainable, 0, weights, 4) < 16e9


@pytest.mark.parametrize("name", ["trainable_backbone", "heads", "weights"])
def test_a_negative_amount_is_refused_by_name(name: str) -> None:
    amounts = {"trainable_backbone": 1, "heads": 1, "weights": 1, "world": 1, name: -1}

    with pytest.raises(ValueError, match=f"{name}=-1"):
        sharded_static_bytes(**amounts)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="world=0"):
        sharded_static_bytes(1, 0, 0, 0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_rank_holds_what_the_formula_says_and_two_buckets_of_staging(world: int) -> None:
    """12 divides by every world, so there is no padding; a step in between has allocated nothing that stays."""
    backbone = [nn.Parameter(torch.zeros(12, 50, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(600).bfloat16())]
    zero = ZeroMaster(backbone, 0, 1, bucket=120, sim_world=world)
    optimizer = torch.optim.AdamW([zero.master])
    for step in range(2):
        for param in backbone:
            param.grad = torch.ones_like(param)
        zero.collect(more=False)
        if step == 0:
            zero.reduce_scatter()
            optimizer.step()
            zero.gather_params()
    if zero.held is None:
        raise ValueError("the gradients of the last step are held")
    state = optimizer.state[zero.master]
    held = [tensor for tensor in zero.held if tensor is not None]
    counted = [*backbone, *held, zero.master, zero.grad_buf, state["exp_avg"], state["exp_avg_sq"]]
    others = [tensor for tensor in everything(zero) if all(tensor is not other for other in counted)]
    staging = [4 * 120, 4 * 120] if world > 1 else []

    assert sum(num_bytes(tensor) for tensor in counted) == sharded_static_bytes(1200, 0, 2 * 1200, world)
    assert [num_bytes(tensor) for tensor in others] == staging


def num_bytes(tensor: torch.Tensor) -> int:
    """Of the whole storage, not of the view."""
    return tensor.untyped_storage().nbytes()


def everything(zero: ZeroMaster) -> list[torch.Tensor]:
    """Every tensor the object holds, in attributes and in lists of them."""
    values = [item for value in vars(zero).values() for item in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in values if isinstance(value, torch.Tensor)]
