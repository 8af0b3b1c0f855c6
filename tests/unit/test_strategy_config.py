"""What a strategy's configuration accepts, and how ranks are laid out. No process group anywhere."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

import zero2core
from zero2core.strategies.build import build_strategy
from zero2core.strategies.config import StrategyConfig
from zero2core.strategies.mesh import local_world, mesh_shape

CPU = torch.device("cpu")


def test_an_empty_configuration_means_the_defaults() -> None:
    config = StrategyConfig.of({})

    assert config == StrategyConfig()
    assert (config.use_fsdp, config.fsdp_sharding_strategy, config.fsdp_reduce_dtype) == (False, "full_shard", "fp32")
    assert (config.compute_dtype, config.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_the_configuration_is_a_copy() -> None:
    given = {"use_fsdp": True}
    config = StrategyConfig.of(given)
    given["use_fsdp"] = False

    assert config.use_fsdp
    assert StrategyConfig.of(config) == config
    assert StrategyConfig.of(config) is not config
    with pytest.raises(FrozenInstanceError):
        config.use_fsdp = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("strategy", "hybrid", "reshards"),
    [
        ("full_shard", False, True),
        ("shard_grad_op", False, False),
        ("hybrid_shard", True, True),
        ("_hybrid_shard_zero2", True, False),
    ],
)
def test_each_sharding_strategy_says_mesh_and_resharding(strategy: str, hybrid: bool, reshards: bool) -> None:
    config = StrategyConfig.of({"fsdp_sharding_strategy": strategy})

    assert (config.hybrid, config.reshard_after_forward) == (hybrid, reshards)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fsdp_sharding_strategy": "hybrid_shrad"}, ["'hybrid_shrad'", "did you mean 'hybrid_shard'", "'full_shard'"]),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, ["'FULL_SHARD'", "'shard_grad_op'"]),
        ({"fsdp_shardingstrategy": "full_shard"}, ["did you mean 'fsdp_sharding_strategy'", "'use_fsdp'"]),
        ({"fsdp_reduce_dtype": "fp16"}, ["'fp16'", "'fp32', 'bf16'"]),
        ({"fsdp_reduce_dtype": torch.float32}, ["torch.float32", "'fp32'"]),
        ({"use_fsdp": "false"}, ["use_fsdp='false'", "True or False"]),
        ({"use_fsdp": 1}, ["use_fsdp=1"]),
        ({"reshard_after_backward": None}, ["reshard_after_backward=None"]),
        ({"bf16": False}, ["fp16", "grad_scaler"]),
        ({"bf16": False, "grad_scaler": 65536.0}, ["torch.amp.GradScaler"]),
        ({"fsdp_hsdp_replicate_size": -1}, ["fsdp_hsdp_replicate_size=-1"]),
        ({"fsdp_hsdp_replicate_size": 2.0}, ["fsdp_hsdp_replicate_size=2.0"]),
        ({"fsdp_hsdp_replicate_size": True}, ["fsdp_hsdp_replicate_size=True"]),
        ({"bucket_cap_mb": 0}, ["bucket_cap_mb=0"]),
        ({"bucket_cap_mb": math.nan}, ["bucket_cap_mb=nan"]),
        ({"bucket_cap_mb": math.inf}, ["bucket_cap_mb=inf"]),
        ([("use_fsdp", True)], ["list", "mapping"]),
    ],
)
def test_what_means_nothing_is_refused_with_what_would_mean_something(config: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        build_strategy(config, device=CPU, local_rank=0)
    for word in words:
        assert word in str(refusal.value)


def test_fp16_goes_with_a_scaler_and_without_mixed_precision_nothing_is_cast() -> None:
    scaler = torch.amp.GradScaler("cpu")

    assert StrategyConfig.of({"bf16": False, "grad_scaler": scaler}).compute_dtype == torch.float16
    assert StrategyConfig.of({"bf16": False, "use_mixed_precision": False}).compute_dtype is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, None),
        (StrategyConfig(), None),
        ({"bf16": True}, "bf16=True is ignored"),
        ({"use_mixed_precision": True, "bf16": True}, "use_mixed_precision=True and bf16=True is ignored"),
        ({"use_mixed_precision": False, "bf16": True}, None),
        (StrategyConfig(bf16=False, grad_scaler=torch.amp.GradScaler("cpu")), "bf16=False is ignored"),
        ({"use_fsdp": True, "bf16": True}, None),
    ],
)
def test_ddp_says_once_that_it_casts_nothing(config: Any, said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    build_strategy(config, device=CPU, local_rank=0)

    assert [record.getMessage().split(":")[0] for record in caplog.records] == ([] if said is None else [said])


def test_muon_needs_fsdp2() -> None:
    with pytest.raises(NotImplementedError, match="use_fsdp=True"):
        build_strategy({}, device=CPU, local_rank=0, use_dmuon=True)


@pytest.mark.parametrize(
    ("world", "replicas", "local", "shape"),
    [
        (8, 2, None, (2, 4)),
        (8, 2, 8, (2, 4)),  # what is said goes before what the launcher says
        (4, 0, 4, (1, 4)),
        (16, 0, 8, (2, 8)),
        (4, 0, 1, (4, 1)),  # one rank a node still reduces over replicas
        (16, 0, None, (2, 8)),
        (8, 0, None, (1, 8)),
        (12, 0, None, (1, 12)),
        (1, 0, 1, (1, 1)),
        (6, 6, 2, (6, 1)),
    ],
)
def test_shards_lie_in_a_node_and_replicas_across(
    world: int, replicas: int, local: int | None, shape: tuple[int, int]
) -> None:
    config = StrategyConfig.of({"fsdp_sharding_strategy": "hybrid_shard", "fsdp_hsdp_replicate_size": replicas})

    assert mesh_shape(config, world, local) == shape


def test_a_mesh_of_one_axis_has_no_replicas() -> None:
    assert mesh_shape(StrategyConfig.of({"fsdp_hsdp_replicate_size": 3}), 4, 2) == (4,)


@pytest.mark.parametrize(
    ("world", "replicas", "local", "words"),
    [
        (6, 4, 3, ["6 ranks", "fsdp_hsdp_replicate_size=4"]),
        (2, 4, None, ["2 ranks", "fsdp_hsdp_replicate_size=4"]),
        (6, 0, 4, ["6 ranks", "LOCAL_WORLD_SIZE=4", "fsdp_hsdp_replicate_size"]),
    ],
)
def test_a_world_that_cannot_be_cut_is_refused_with_both_numbers(
    world: int, replicas: int, local: int | None, words: list[str]
) -> None:
    config = StrategyConfig.of({"fsdp_sharding_strategy": "hybrid_shard", "fsdp_hsdp_replicate_size": replicas})

    with pytest.raises(ValueError, match=words[1]) as refusal:
        mesh_shape(config, world, local)
    for word in words:
        assert word in str(refusal.value)


def test_the_launcher_says_how_many_ranks_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_world() is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_world() == 8
    for wrong in ("0", "eight", "-1", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
            local_world()


@pytest.mark.parametrize("config", [{}, {"use_fsdp": True}])
def test_without_a_process_group_wrapping_says_what_to_call(config: dict[str, Any]) -> None:
    strategy = build_strategy(config, device=CPU, local_rank=0)

    with pytest.raises(ValueError, match="init_process_group"):
        strategy.wrap(torch.nn.Linear(2, 2))


def test_the_package_gives_strategies_by_name_and_nothing_else() -> None:
    assert zero2core.build_strategy is build_strategy
    assert {"DDPStrategy", "FSDPStrategy", "StrategyConfig"} <= set(zero2core.__all__)
    with pytest.raises(AttributeError, match="build_strategie"):
        zero2core.build_strategie  # noqa: B018


def test_every_key_is_documented() -> None:
    text = StrategyConfig.__doc__ or ""

    assert [field.name for field in fields(StrategyConfig) if field.name not in text] == []
