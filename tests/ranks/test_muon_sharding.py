"""The sharded Muon optimizer on simulated ranks, and a few on gloo: bit for bit the unsharded one, in every mode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness.launch.pool import RankPool
from tests.ranks.muon_handler import CASES, unused_on_rank_1
from tests.ranks.muon_training import SHAPES, Setup, elements, require_every_element_once, simulate, train
from tests.support import paired
from zero2core import ClipGradByAdaptiveNorm, ClipGradByGlobalNorm

pytestmark = pytest.mark.usefixtures("one_thread")


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "small buffers": {"comm_buffer_size_mb": elements(200)},
    "one element a buffer": {"comm_buffer_size_mb": elements(1)},
    "unfused": {"comm_buffer_size_mb": 0},
    "negative": {"comm_buffer_size_mb": -1},
    "overlap": {"comm_overlap": True, "accumulate_steps": 2, "comm_buffer_size_mb": elements(100)},
    "overlap unfused": {"comm_overlap": True, "comm_buffer_size_mb": 0},
    "overlap long": {"comm_overlap": True, "accumulate_steps": 3},
    "sum": {"use_reduce_avg": False},
    "release": {"release_gradients": True},
    "fused states": {"fuse_optimizer_states": True},
    "skip": {"skip_missing": True},
    "numel": {"owner_rule": "numel", "comm_buffer_size_mb": elements(100)},
    "everything": {
        "comm_overlap": True,
        "accumulate_steps": 2,
        "release_gradients": True,
        "fuse_optimizer_states": True,
        "skip_missing": True,
        "use_reduce_avg": False,
        "comm_buffer_size_mb": elements(90),
    },
}
CLIPS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: ClipGradByGlobalNorm(100.0),
    lambda: ClipGradByAdaptiveNorm(ratio=0.5, warmup_steps=1),
]


@pytest.mark.parametrize(("mode", "world"), paired(MODES, [4, 3, 1, 2]))
def test_trains_bit_for_bit_like_the_unsharded_optimizer(mode: str, world: int) -> None:
    index = list(MODES).index(mode) + world
    dtypes = [
        (torch.float32,),
        (torch.bfloat16,),
        (torch.bfloat16, torch.float32, torch.float16),
    ][index % 3]
    setup = Setup(
        config=MODES[mode],
        dtypes=dtypes,
        clip=CLIPS[index % 3 if mode != "skip" else 1 + world % 2],
        missing=unused_on_rank_1,
        strided=index % 2 == 0,
        announced=index % 4 < 2,
    )
    replies = simulate(world, train(setup, world))
    require_every_element_once(setup, [reply["held"] for reply in replies])
    assert all(set(reply["moved"]) == set(setup.shapes) for reply in replies)
    assert len({reply["plan"] for reply in replies}) == 1


PAIRS = {"experts": ("expert", [(0, 1), (2, 3)]), "bias": ("expert", [(0, 1), (2, 3)])}
"""One key, two disjoint groups."""


@pytest.mark.parametrize(
    ("world", "colors", "config"),
    [
        (4, PAIRS, {}),
        (4, PAIRS, {"color_divisors": {"expert": 8}}),
        (4, PAIRS, {"color_divisors": {"expert": 0.5, -1: 3}, "use_reduce_avg": False}),
        (4, {"experts": ("expert", [(1, 3)]), "norm": ("expert", [(1, 3)])}, {}),  # ranks outside
        (4, {"experts": ("a", [(0,)]), "norm": ("a", [(0,)]), "tall": ("b", [(3, 1, 2)])}, {"skip_missing": True}),
        (3, {"experts": (None, []), "norm": (-1, []), "tall": (0, [(2, 0)]), "bias": (1, [(1, 2)])}, {}),
        (4, {name: ("all", [(0, 1, 2, 3)]) for name in ("qkv", "norm", "experts")}, {"comm_buffer_size_mb": 0}),
        (4, PAIRS | {"wide": ((1, "x"), [(0, 2)])}, {"comm_overlap": True, "comm_buffer_size_mb": elements(100)}),
        (5, dict.fromkeys(("experts", "embedding"), ("e", [(0, 3), (1, 2, 4)])), {"release_gradients": True}),
        (2, {name: (index, [(index % 2,)]) for index, name in enumerate(SHAPES)}, {}),  # nothing of the default colour
    ],
)  # fmt: skip
@pytest.mark.parametrize("clip", range(3))
def test_each_color_trains_in_its_own_group(world: int, colors: Any, config: dict[str, Any], clip: int) -> None:
    dtypes = (torch.bfloat16,) if clip % 2 else (torch.float32, torch.bfloat16)
    setup = Setup(config=config, colors=colors, clip=CLIPS[clip], dtypes=dtypes, missing=unused_on_rank_1)
    replies = simulate(world, train(setup, world), seed=clip)
    require_every_element_once(setup, [reply["held"] for reply in replies])


TWO_HOP_SHAPES = {name: SHAPES[name] for name in ("qkv", "norm", "tall", "bias")}


def hops_of(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


HOPS = [(world, size) for world in (4, 6, 8, 12) for size in hops_of(world)]


@pytest.mark.parametrize(("hops", "overlap"), paired(HOPS, [False, True]))
def test_two_hops_have_the_bits_of_one(hops: tuple[int, int], overlap: bool) -> None:
    world, size = hops
    config = {"two_hop": True, "local_world_size": size, "comm_overlap": overlap, "use_reduce_avg": size % 2 == 0}
    config |= {"comm_buffer_size_mb": elements(100)} if overlap else {}
    setup = Setup(TWO_HOP_SHAPES, config=config, clip=CLIPS[size % 3], parts=(1, 2), missing=unused_on_rank_1)
    replies = simulate(world, train(setup, world))
    require_every_element_once(setup, [reply["held"] for reply in replies])


@pytest.mark.parametrize(
    ("world", "size", "colors"),
    [
        (4, 2, {"qkv": ("e", [(0, 1, 2)]), "norm": ("e", [(0, 1, 2)])}),  # nodes of 2 and of 1
        (6, 3, {"qkv": ("e", [(0, 1, 2, 4), (3, 5)]), "norm": ("e", [(0, 1, 2, 4), (3, 5)])}),
        (6, 2, {"qkv": ("e", [(5, 0, 1, 4)]), "norm": ("e", [(5, 0, 1, 4)])}),  # in another order
        (8, 4, {"qkv": ("e", [(0, 4), (1, 5)]), "tall": ("f", [(2, 3)]), "norm": ("f", [(2, 3)])}),
        (4, 2, {"qkv": ("e", [(0, 2), (1, 3)]), "bias": ("e", [(0, 2), (1, 3)])}),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_two_hops_in_colors_that_are_irregular_over_nodes(world: int, size: int, colors: Any, overlap: bool) -> None:
    config = {"two_hop": True, "local_world_size": size, "comm_overlap": overlap}
    setup = Setup(TWO_HOP_SHAPES, config=config, colors=colors, clip=CLIPS[world % 3], dtypes=(torch.bfloat16,))
    replies = simulate(world, train(setup, world))
    require_every_element_once(setup, [reply["held"] for reply in replies])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm gloo ranks for the test below."""
    with RankPool("tests.ranks.muon_handler:serve", preload=["zero2core"]) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_gloo_ranks_train_bit_for_bit_like_the_unsharded_optimizer(pool: RankPool, case: str) -> None:
    outcome = pool.run(4, case.encode(), timeout_s=240.0)
    if not outcome.replied:
        first = outcome.ranks[outcome.first_failed or 0]
        pytest.fail(f"rank {first.rank} {first.end.value}: {first.error}\n{first.output}{first.stacks or ''}")
    held = [json.loads(report.reply or b"{}")["held"] for report in outcome.ranks]
    require_every_element_once(CASES[case], held)
