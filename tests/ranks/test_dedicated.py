"""Dedicated matrices on real gloo ranks: bit for bit the unsharded trainer in every mode, whole on owners alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.launch.pool import RankPool

ELEMENTS = 3 * (4 * 6 + 2 * 6 * 5) + 8 * 6


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm ranks for all tests of this file."""
    preload = ["zero2core", "zero2core.strategies.dmuon", "torch._dynamo", "tests.ranks.dedicated_handler"]
    with RankPool("tests.ranks.dedicated_handler:serve", preload=preload) as ranks:
        yield ranks


def on_ranks(pool: RankPool, world: int, do: str, **arguments: Any) -> list[Any]:
    """What every rank replied; fails with the first failed rank's traceback."""
    outcome = pool.run(world, json.dumps({"do": do, **arguments}).encode(), timeout_s=60.0)
    if not outcome.replied:
        first = outcome.ranks[outcome.first_failed or 0]
        pytest.fail(
            f"rank {first.rank} of {world} {first.end.value}: {first.error}\n{first.output}{first.stacks or ''}"
        )
    return [json.loads(report.reply or b"null") for report in outcome.ranks]


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, {"accumulation": "sync"}),
        (2, {"accumulation": "nested", "fsdp_sharding_strategy": "shard_grad_op", "max_norm": 64.0}),
        (2, {"dtype": "bf16", "remat": False}),
        (3, {"accumulation": "no_sync", "max_norm": 64.0, "missing": True}),
        (3, {"accumulation": "flush", "fsdp_sharding_strategy": "shard_grad_op", "missing": True, "remat": True}),
        (3, {"use_mixed_precision": True, "fsdp_reduce_dtype": "bf16", "accumulation": "no_sync"}),
        (4, {"fsdp_sharding_strategy": "hybrid_shard", "fsdp_hsdp_replicate_size": 2, "accumulation": "deferred"}),
        (4, {"fsdp_sharding_strategy": "_hybrid_shard_zero2", "fsdp_hsdp_replicate_size": 2, "max_norm": 1e9}),
        (4, {"fsdp_sharding_strategy": "hybrid_shard", "fsdp_hsdp_replicate_size": 4, "accumulation": "flush"}),
        (4, {"use_mixed_precision": True, "fsdp_cpu_offload": True, "missing": True, "max_norm": 64.0}),
    ],
)
def test_trains_bit_for_bit_like_an_unsharded_trainer(pool: RankPool, world: int, config: dict[str, Any]) -> None:
    replies = on_ranks(pool, world, "train", **config)

    assert sum(reply["owned"] for reply in replies) == 7
    assert all(reply["owned"] for reply in replies)
    assert sum(reply["compared"] for reply in replies) > 3 * 2 * ELEMENTS  # weights and momenta in each step
    assert all(reply["shown"] >= 6 * ELEMENTS for reply in replies)  # more where blocks are recomputed


@pytest.mark.parametrize(
    ("world", "keep", "arguments"),
    [
        (2, "z3", {"remat": False}),
        (2, "z2", {"remat": True}),
        (3, "z3", {"order": [0, 1, 0, 2]}),
        (2, "z3", {"order": [0, 2, 2, 0, 0], "remat": False}),
        (2, "z3", {"order": [0, 2, 2, 0, 0], "remat": True}),
        (3, "z2", {"order": [1, 2, 1]}),
        (3, "z2", {"tie": True}),
        (2, "z3", {"tie": True, "remat": True}),
    ],
)
def test_recomputation_blocks_used_often_or_never_and_tied_matrices(
    pool: RankPool, world: int, keep: str, arguments: dict[str, Any]
) -> None:
    replies = on_ranks(pool, world, "bare", keep=keep, **arguments)

    assert sum(reply["compared"] for reply in replies) > ELEMENTS


@pytest.mark.parametrize("world", [2, 3])
def test_one_norm_and_one_factor_for_dedicated_and_sharded_gradients(pool: RankPool, world: int) -> None:
    replies = on_ranks(pool, world, "clip", dedicated_norm=3.0, other_norm=4.0)

    # 1 / (5 + 1e-6) in fp32, and two products: three roundings of 2**-24 each.
    factor = 1 / (5 + 1e-6)
    for reply in replies:
        assert reply["norms"][:2] == [5.0, 5.0]
        assert reply["norms"][2] == pytest.approx(5 * factor, rel=2**-21)
        assert reply["alone"] == 3.0
        assert reply["kinds"] == [True, True, True]
        assert reply["dropped"] == [True, [], [], True, True]
        assert reply["other"] == pytest.approx(4 * factor, rel=2**-22)
        assert "optimizer=" in reply["refused"]
        assert reply["stats"]["owned"] == pytest.approx(3 * factor, rel=2**-21)
    owned = [reply["own"] for reply in replies if reply["own"] is not None]
    assert owned == [pytest.approx(3 * factor, rel=2**-22)]


@pytest.mark.parametrize("keep", ["z2", "z3"])
def test_a_rank_that_does_not_own_a_matrix_holds_none_of_its_bytes(pool: RankPool, keep: str) -> None:
    replies = on_ranks(pool, 3, "memory", keep=keep)

    assert sum(reply["owned"] for reply in replies) == ELEMENTS
    for reply in replies:
        assert reply["rest"] == 8 * reply["owned"]  # master and momentum
        kept = 2 * ELEMENTS if keep == "z2" else 0  # in bf16
        assert reply["reduced"] == 12 * reply["owned"] + kept
        assert reply["cleared"] == 8 * reply["owned"] + kept
        assert reply["stepped"] == 8 * reply["owned"]
        # Weights in a backward, in bf16: of the block that it is in; the one before was freed when this one began.
        assert reply["peak"] == 2 * (ELEMENTS if keep == "z2" else 4 * 6 + 2 * 6 * 5)


def test_saves_loads_schedules_and_says_what_it_refuses(pool: RankPool) -> None:
    replies = on_ranks(pool, 2, "life")

    assert sum(reply["compared"] for reply in replies) == (2 * 3 + 2) * ELEMENTS
    for reply in replies:
        assert reply["rates"] == [0.0, 0.0]
        assert reply["failed"] == "ArithmeticError: a hook of the user's"
        assert "has not ended" in reply["unended"]
        assert all(text.startswith("GradientStateError") and "flush(model)" in text for text in reply["waiting"])
        assert reply["old"].startswith("RuntimeError")
        assert "inplace" in reply["old"]
        assert reply["outside"].startswith("GradientStateError: blocks.0.wide is dedicated")
        assert reply["attribute"].startswith("AttributeError: T: blocks.0.wide is dedicated")
        assert reply["shape"] == [4, 6]
        assert reply["twice"].startswith("ValueError")
        assert "already" in reply["twice"]


def test_ranks_with_other_marks_are_refused_on_all(pool: RankPool) -> None:
    said = on_ranks(pool, 3, "ranks_differ")

    assert len(set(said)) == 1
    assert said[0].startswith("RankMismatchError: dedicate: ")


def test_what_a_rank_uses_changes_nothing_of_what_it_broadcasts(pool: RankPool) -> None:
    first, *others = on_ranks(pool, 3, "groups")

    assert all(other == first for other in others)
    assert len(first["seen"]) == 2 * 7  # forward and backward


def test_a_model_that_converts_itself_and_leaves_fsdp2_nothing_but_a_plain_parameter(pool: RankPool) -> None:
    replies = on_ranks(pool, 2, "converts")

    assert sum(reply["compared"] for reply in replies) > 2 * 3 * ELEMENTS


def test_zero_grad_of_what_a_conversion_returned_forgets_dedicated_gradients(pool: RankPool) -> None:
    replies = on_ranks(pool, 2, "another_module")

    assert sum(reply["kept"][0] for reply in replies) == 7  # each on its owner
    for reply in replies:
        assert (reply["type"], reply["kept"][1], reply["left"]) == ("Shell", 7, [])


def test_few_reductions_to_owners_are_in_flight_and_one_that_fails_is_not_forgotten(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "reductions"):
        assert reply["counts"] == [1, 2, 3, 4, 4, 4, 4]
        assert reply["left"] == []
        assert reply["failed"] == "ArithmeticError: a lost connection"
        assert reply["pending"]


def test_a_refused_model_keeps_its_matrices(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "refused"):
        scalar, tied, dtypes = reply["said"]
        assert "blocks.2.temperature is a scalar" in scalar
        assert "blocks.0.bias and blocks.2.bias are one tied parameter" in tied
        assert "the unit blocks.2 mixes parameters of torch.bfloat16, torch.float32" in dtypes


def test_zero_grad_forgets_what_waits_where_all_is_dedicated(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "all_dedicated"):
        assert reply["waits"].startswith("GradientStateError")
        assert reply["norm"] == 0.0


def test_an_installed_package_is_asked_for_stats_and_the_joint_factor_is_ours(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "package"):
        assert reply["calls"] == ["no_sync", "clip inf"]
        assert reply["compared"] > 0
        assert reply["without"].startswith("GradientStateError")
        assert reply["flush"].startswith("NotImplementedError")
        assert reply["own"]
