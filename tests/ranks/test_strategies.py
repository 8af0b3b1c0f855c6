"""Strategies on real gloo ranks: against a single process that sees everything, and what each must not get wrong.

Gradients are small multiples of the world: sums, means and squares are exact, so that "equal" means every bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.launch.pool import RankPool
from tests.support import sampled

FSDP = {"use_fsdp": True}
HYBRID = {"use_fsdp": True, "fsdp_sharding_strategy": "hybrid_shard"}
DDP = {"bucket_cap_mb": 0.00001}  # a bucket for each parameter, or two


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm ranks for all tests of this file."""
    with RankPool("tests.ranks.strategies_handler:serve", preload=["zero2core.strategies", "torch._dynamo"]) as ranks:
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


def trains(pool: RankPool, world: int, **arguments: Any) -> Any:
    replies = on_ranks(pool, world, "train", **arguments)
    assert all(reply["compared"] > 100 for reply in replies)
    assert all(reply["norms"] == replies[0]["norms"] for reply in replies)
    assert max(replies[0]["norms"]) > 2.0  # so that the bound binds
    return replies[0]


@pytest.mark.parametrize("accumulation", sampled(["deferred", "sync", "no_sync", "nested", "flush"], every=2))
@pytest.mark.parametrize(
    ("world", "config", "model", "use"),
    [
        (2, DDP, "default", "all"),
        (3, {**DDP, "find_unused_parameters": True}, "default", "ranks"),
        (2, FSDP, "converts", "parts"),
        (3, {**FSDP, "use_mixed_precision": False}, "bare", "parts"),
        (3, {**FSDP, "fsdp_reduce_dtype": "bf16", "fsdp_sharding_strategy": "shard_grad_op"}, "default", "all"),
        (2, {**FSDP, "unused_parameters": True, "fsdp_cpu_offload": True}, "converts", "ranks"),
        (2, {**HYBRID, "fsdp_hsdp_replicate_size": 2}, "converts", "parts"),
        (4, {**HYBRID, "fsdp_hsdp_replicate_size": 2, "unused_parameters": True}, "bare", "ranks"),
    ],
    ids=["ddp", "ddp unused", "fsdp", "fp32 bare", "bf16 zero2", "offload unused", "2x1", "2x2 unused"],
)
def test_trains_bit_for_bit_like_a_single_process(
    pool: RankPool, world: int, config: dict[str, Any], model: str, use: str, accumulation: str
) -> None:
    reply = trains(pool, world, config=config, accumulation=accumulation, use=use, model=model)

    assert reply["sharded"] == config.get("use_fsdp", False)


@pytest.mark.parametrize("accumulation", ["no_sync", "deferred"])
@pytest.mark.parametrize(
    ("world", "config"),
    [
        (1, {**FSDP}),
        (1, DDP),
        (4, {**HYBRID, "fsdp_sharding_strategy": "_hybrid_shard_zero2", "fsdp_hsdp_replicate_size": 4}),
        (4, {**HYBRID, "fsdp_hsdp_replicate_size": 1, "reshard_after_backward": False}),
        (3, {**FSDP, "reshard_after_backward": False, "use_mixed_precision": False}),
        (2, {**FSDP, "bf16": False, "fsdp_reduce_dtype": "bf16"}),
    ],
    ids=["fsdp at world 1", "ddp at world 1", "4x1", "1x4", "whole between parts", "fp16"],
)
def test_every_shape_of_mesh_gives_the_same_weights(
    pool: RankPool, world: int, config: dict[str, Any], accumulation: str
) -> None:
    trains(
        pool,
        world,
        config=config,
        accumulation=accumulation,
        use="parts" if "use_fsdp" in config else "all",
    )


def test_hybrid_shards_inside_a_node_and_replicates_across(pool: RankPool) -> None:
    one_node = on_ranks(pool, 4, "layout", config=HYBRID, local_world="4")[0]
    two_nodes = on_ranks(pool, 4, "layout", config=HYBRID, local_world="2")[0]
    unknown = on_ranks(pool, 4, "layout", config=HYBRID, local_world=None)[0]

    assert one_node["mesh"] == unknown["mesh"] == [1, 4]
    assert one_node["names"] == ["replicate", "shard"]
    assert one_node["placements"] == ["R", "S(0)"] or "Replicate" in one_node["placements"][0]
    assert one_node["local"] == [2, 3]  # of 6 rows: four shards, one replica
    assert one_node["axes"] == ["shard"]
    assert one_node["groups"] == [False, True, True, True]
    assert one_node["sizes"] == [None, 4, 1, 4]
    assert two_nodes["mesh"] == [2, 2]
    assert two_nodes["local"] == [3, 3]
    assert one_node["same mesh"]


def test_one_dimensional_layout_and_its_policies(pool: RankPool) -> None:
    full = on_ranks(pool, 3, "layout", config=FSDP, local_world=None)[0]
    config = {"fsdp_sharding_strategy": "shard_grad_op", "use_mixed_precision": False, "fsdp_reduce_dtype": "bf16"}
    zero2 = on_ranks(pool, 3, "layout", config=config, local_world="2")[0]
    alone = on_ranks(pool, 4, "layout", config={**HYBRID, "fsdp_hsdp_replicate_size": 4}, local_world=None)[0]

    assert (full["mesh"], full["names"], full["axes"]) == ([3], ["dp"], ["dp"])
    assert full["groups"] == [True, False, False, True]
    assert (full["after forward"], zero2["after forward"]) == (True, False)
    assert full["policy"] == ["torch.bfloat16", "torch.float32"]
    assert zero2["policy"] == ["None", "torch.bfloat16"]
    assert full["units"] == ["FSDPModel", "FSDPBlock", "FSDPBlock"]
    assert alone["axes"] == []  # an axis of one rank shards nothing


def test_world_1_has_no_group_of_its_own(pool: RankPool) -> None:
    assert on_ranks(pool, 1, "one_group") == [{"group": True, "axes": [], "world": 1}]


def test_no_sync_reaches_every_unit_nests_and_restores_what_it_found(pool: RankPool) -> None:
    for seen in on_ranks(pool, 2, "flags"):
        found = [[True, False], [True, True]]  # the user's own flag of the first block
        assert seen["before"] == seen["after"] == seen["after an exception"] == found
        assert [reduces for reduces, _ in seen["inside"]] == [False, False]
        assert [reduces for reduces, _ in seen["deferred within"]] == [False, False]
        assert seen["inside again"] == seen["inside"]
        assert seen["deferred"] == [[True, False], [True, False]]


@pytest.mark.parametrize(
    ("world", "case", "words"),
    [
        (3, "replicas", ["3 ranks", "fsdp_hsdp_replicate_size=2"]),
        (2, "configurations", ["RankMismatchError", "cast_forward_inputs"]),
        (2, "device", ["meta", "init_process_group"]),
        (2, "scalar", ["blocks.0.temperature", "(1,)"]),
        (2, "tied", ["blocks.0.first", "blocks.1.first", "tied"]),
        (2, "comes apart", ["blocks.0.first", "blocks.1.first", "come apart"]),
        (2, "dtypes", ["blocks.0", "torch.bfloat16", "torch.float32"]),
        (2, "empty", ["Identity", "nothing to train"]),
        (2, "frozen", ["nothing to train"]),
        (2, "ddp frozen", ["nothing to train"]),
        (2, "meta", ["root", "meta device", "to_empty"]),
        (2, "models", ["RankMismatchError", "root: shape (6, 3)", "(2,)"]),
        (2, "ddp models", ["RankMismatchError", "root: shape (6, 3)", "(2,)"]),
        (2, "nothing", ["convert_to_fsdp", "no FSDP2 unit"]),
        (2, "clip before wrap", ["GradientStateError", "wrap(model) first"]),
        (2, "ddp clip before wrap", ["GradientStateError", "wrap(model) first"]),
        (2, "twice", ["already"]),
        (2, "ddp twice", ["already"]),
        (2, "wrapped by another", ["distributed already"]),
        (2, "ddp wrapped by another", ["distributed already"]),
        (2, "another model", ["what wrap returned"]),
        (2, "pending", ["GradientStateError", "flush(model)"]),
        (2, "ddp pending", ["GradientStateError", "flush(model)"]),
        (2, "ddp clip of a half", ["GradientStateError", "clip_grad_norm", "did not end"]),
        (2, "ddp flush of a half", ["GradientStateError", "flush", "did not end"]),
        (2, "flush inside", ["GradientStateError", "no_sync"]),
        (2, "defer", ["'everything'", "'all_reduce'"]),
        (2, "ddp unused", ["blocks.0.first", "find_unused_parameters"]),
        (2, "bound -1", ["max_norm=-1.0"]),
        (2, "ddp bound 0", ["max_norm=0.0"]),
        (2, "bound nan", ["max_norm=nan"]),
    ],
)
def test_refuses_in_one_sentence_on_every_rank(pool: RankPool, world: int, case: str, words: list[str]) -> None:
    for sentence in on_ranks(pool, world, "refused", case=case):
        for word in words:
            assert word in sentence


@pytest.mark.parametrize(("config", "name"), [(DDP, "DDPStrategy"), (FSDP, "FSDPStrategy")])
def test_settings_of_muon_that_change_nothing_are_told_once(pool: RankPool, config: dict[str, Any], name: str) -> None:
    for said in on_ranks(pool, 2, "muon_for_nothing", config=config):
        assert len(said) == 1
        assert said[0].startswith(f"build_optimizer: muon={{'lr': 0.5}} is ignored: {name} dedicates no matrices")


def test_tied_weights_of_one_unit_stay_tied(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "tied"):
        assert reply == {"names": 5, "compared": 18 + 10}


@pytest.mark.parametrize(("config", "model"), [(DDP, "default"), (FSDP, "converts"), (HYBRID, "bare")])
def test_a_discarded_part_is_in_no_later_step(pool: RankPool, config: dict[str, Any], model: str) -> None:
    for reply in on_ranks(pool, 2, "discard", config=config, model=model):
        assert reply["compared"] == 52  # all elements


@pytest.mark.parametrize("by", ["model", "optimizer"])
@pytest.mark.parametrize(("config", "model"), [(DDP, "default"), (FSDP, "converts"), (HYBRID, "bare")])
def test_zero_grad_drops_what_waits(pool: RankPool, config: dict[str, Any], model: str, by: str) -> None:
    for reply in on_ranks(pool, 2, "abandoned", config=config, model=model, by=by, whole=False):
        assert reply["compared"] == 52  # all elements


def test_zero_grad_of_the_model_drops_what_whole_parameters_hide(pool: RankPool) -> None:
    config = {**FSDP, "use_mixed_precision": False}
    for reply in on_ranks(pool, 2, "abandoned", config=config, model="default", by="model", whole=True):
        assert reply["compared"] == 52


@pytest.mark.parametrize(
    ("world", "config", "model", "name", "defer"),
    [
        (2, FSDP, "converts", "blocks.1.plain", "all_reduce"),
        (3, {**FSDP, "unused_parameters": True}, "default", "root", "gradients"),
        (
            2,
            {**HYBRID, "fsdp_hsdp_replicate_size": 2, "unused_parameters": True},
            "bare",
            "blocks.0.first",
            "all_reduce",
        ),
        (2, {**DDP, "find_unused_parameters": True}, "default", "root", "gradients"),
    ],
    ids=["plain", "unused", "replicas", "ddp"],
)
def test_what_only_one_rank_has_added_up_stops_the_clip_on_all(
    pool: RankPool, world: int, config: dict[str, Any], model: str, name: str, defer: str
) -> None:
    replies = on_ranks(pool, world, "uneven", config=config, model=model, name=name, defer=defer)

    assert all("flush(model)" in reply["said"] for reply in replies)
    assert all(reply["compared"] > 0 and reply["again"] == 0 for reply in replies)


def test_nothing_waits_where_there_are_no_replicas_to_defer(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "nothing_deferred"):
        assert reply["compared"] == 2 * 18


@pytest.mark.parametrize(
    ("local_worlds", "words"),
    [
        (["1", "2"], ["RankMismatchError", "(2, 1)", "(1, 2)", "LOCAL_WORLD_SIZE"]),
        (["2", "none"], ["RankMismatchError", "LOCAL_WORLD_SIZE='none'"]),
        (["3", "3"], ["ValueError", "LOCAL_WORLD_SIZE=3"]),
    ],
)
def test_ranks_agree_on_the_mesh_before_any_is_made(pool: RankPool, local_worlds: list[str], words: list[str]) -> None:
    for sentence in on_ranks(pool, 2, "launched", local_worlds=local_worlds):
        for word in words:
            assert word in sentence


@pytest.mark.parametrize(
    ("config", "model", "before", "words"),
    [
        (DDP, "default", True, "freeze what is not to be trained before wrap"),
        (DDP, "default", False, "requires_grad_(True) before wrap"),
        ({**DDP, "find_unused_parameters": True}, "default", False, "requires_grad_(True) before wrap"),
        (FSDP, "converts", False, "requires_grad_(True) before wrap"),
    ],
    ids=["ddp freezes", "ddp", "ddp unused", "beside fsdp"],
)
def test_what_is_frozen_is_settled_when_wrapped(
    pool: RankPool, config: dict[str, Any], model: str, before: bool, words: str
) -> None:
    for sentence in on_ranks(pool, 2, "thawed", config=config, model=model, before=before):
        assert sentence.partition(" ")[0].removeprefix("module.") == "blocks.1.plain"
        assert words in sentence


def test_freezing_all_for_the_gradient_of_the_input(pool: RankPool) -> None:
    assert on_ranks(pool, 2, "for_the_input") == [{"flow": 1.0, "compared": 52}] * 2


@pytest.mark.parametrize("config", [DDP, {**DDP, "find_unused_parameters": True}])
def test_a_backward_that_ddp_does_not_reduce_is_refused(pool: RankPool, config: dict[str, Any]) -> None:
    for reply in on_ranks(pool, 2, "several", config=config):
        assert reply["compared"] == 2 * 52
        assert [sentence.partition(": ")[0] for sentence in reply["said"]] == ["apart", "retained"]
        assert all("DDP has not reduced the gradients of this backward" in sentence for sentence in reply["said"])


@pytest.mark.parametrize(("config", "model"), [(FSDP, "default"), (FSDP, "converts"), (HYBRID, "bare")])
def test_a_backward_that_failed_is_in_no_later_step(pool: RankPool, config: dict[str, Any], model: str) -> None:
    for reply in on_ranks(pool, 2, "fails", config=config, model=model):
        assert reply["compared"] == 2 * (52 + (0 if model == "default" else 6))  # all elements, and the plain ones
        assert "discard(model)" in reply["said"]


def test_parameters_that_stayed_whole_are_neither_old_nor_of_norm_0(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "hidden"):
        assert reply["compared"] == 2 * 18


def test_a_step_of_the_trainers_own_optimizer_reshards(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "own_optimizer"):
        assert reply == {"compared": 18, "gone": True, "hooks": [1, 0]}


@pytest.mark.parametrize("config", [DDP, FSDP])
def test_a_step_without_any_gradient_has_norm_0_and_says_so(pool: RankPool, config: dict[str, Any]) -> None:
    assert on_ranks(pool, 2, "nothing", config=config) == [{"norm": 0.0, "num_gradients": 0}] * 2


def test_checkpointing_is_enabled_before_wrapping(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "checkpointing"):
        assert reply["calls"] == [False, False]
        assert len(reply["warnings"]) == 1
        assert "Model has no gradient_checkpointing_enable" in reply["warnings"][0]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_clips_plain_and_sharded_gradients_by_one_joint_norm(pool: RankPool, world: int) -> None:
    for reply in on_ranks(pool, world, "clip_mixed"):
        assert reply["norm"] == 5.0
        # The factor is 1 / 5.000001, rounded a few times in fp32 (2**-24 each).
        assert reply["after"] == pytest.approx(5.0 / 5.000001, rel=4 * 2**-24)
        assert reply["sharded"][1:] == [0.0] * 4
        assert reply["plain"][0] == 0.0
        assert reply["sharded"][0] / reply["plain"][1] == pytest.approx(0.75, rel=2 * 2**-24)
        assert reply["plain tensor"]
        assert reply["norms"] == {"plain": 4.0, "sharded": 3.0, "owned": 0.0}


def test_counts_every_element_once_whatever_its_placement(pool: RankPool) -> None:
    replies = on_ranks(pool, 4, "clip_placements")

    for reply in replies:
        assert reply == replies[0]
        # Squares of fp32 norms: two roundings of 2**-24.
        for name, squares in {**reply["alone"], "owned": reply["owned"]}.items():
            assert squares == pytest.approx(204.0, rel=3 * 2**-24), name
        assert reply["squares"] == pytest.approx(9 * 204.0, rel=3 * 2**-24)
        assert reply["after"] == pytest.approx(1.0, rel=2**-9)  # one of the nine is rounded to bf16
        assert reply["segments"]["plain"] == pytest.approx(0.5 / 204**0.5, rel=1e-6)
        assert reply["segments"]["sharded"] == 1.0  # a norm of a third by now, within the bound by itself


def test_a_mesh_of_a_part_of_the_world_is_its_own(pool: RankPool) -> None:
    assert on_ranks(pool, 4, "other_mesh") == [{"norm": 5.0}] * 4


@pytest.mark.parametrize("config", [DDP, FSDP])
def test_an_infinite_gradient_of_one_rank_is_decided_alike_on_all(pool: RankPool, config: dict[str, Any]) -> None:
    for reply in on_ranks(pool, 2, "nonfinite", config=config):
        assert reply["raise"].startswith("the norm of all gradients is")
        assert reply["skip"] == [False, True, 0]
        assert reply["propagate"] == [False, False, 6]


@pytest.mark.parametrize("config", [{**HYBRID, "fsdp_hsdp_replicate_size": 2}, FSDP, DDP])
def test_norms_have_the_same_bits_on_every_rank(pool: RankPool, config: dict[str, Any]) -> None:
    replies = on_ranks(pool, 4, "same_bits", config=config)

    assert all(reply == replies[0] for reply in replies)
    assert len(set(replies[0]["norms"])) == 5


def test_no_sync_communicates_no_gradient_and_deferring_only_what_shards_need(pool: RankPool) -> None:
    """Three units, and one plain parameter; a part gathers each unit for its forward, and the two blocks again."""
    config = {**HYBRID, "fsdp_hsdp_replicate_size": 2}
    for defer, scattered in (("gradients", 0), ("all_reduce", 3)):
        inside, again, outside, clip = on_ranks(pool, 4, "traffic", config=config, defer=defer, model="converts")[3]

        assert inside == again == {"reduce_scatter": scattered, "all_reduce": 0, "all_gather": 5}
        assert outside == {"reduce_scatter": 3, "all_reduce": 3 + 1, "all_gather": 5}
        assert clip == {"reduce_scatter": 0, "all_reduce": 0, "all_gather": 1}


def test_whole_parameters_between_parts_are_gathered_once(pool: RankPool) -> None:
    config = {**FSDP, "reshard_after_backward": False, "fsdp_sharding_strategy": "shard_grad_op"}
    inside, again, outside, _ = on_ranks(pool, 2, "traffic", config=config, defer="gradients", model="default")[0]

    assert [part["all_gather"] for part in (inside, again, outside)] == [3, 0, 0]


def test_a_block_that_nobody_runs_is_in_nobodys_way(pool: RankPool) -> None:
    for reply in on_ranks(pool, 2, "skipped"):
        assert reply["compared"] == 18
        assert len(reply["none"]) == 5


@pytest.mark.parametrize("config", [{**DDP, "broadcast_buffers": False}, FSDP])
def test_buffers_and_frozen_parameters_start_equal(pool: RankPool, config: dict[str, Any]) -> None:
    assert on_ranks(pool, 2, "buffers", config=config) == [{"table": [0.0] * 4, "takes gradients": False}] * 2
