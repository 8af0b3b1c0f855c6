"""What the gloo ranks of test_muon_sharding.py do: a task is the name of a case, the reply JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from harness.launch.rank import RankContext
from tests.ranks.muon_training import Setup, elements, train
from zero2core import ClipGradByAdaptiveNorm, ClipGradByGlobalNorm


def unused_on_rank_1(step: int, part: int, rank: int, name: str) -> bool:
    """``bias`` and ``wide`` have no gradient on rank 1, ``norm`` and ``tall`` none anywhere in step 1."""
    return (rank == 1 and name in ("bias", "wide")) or (step == 1 and name in ("norm", "tall"))


CASES: dict[str, Setup] = {
    "overlap": Setup(
        config={"comm_overlap": True, "accumulate_steps": 2, "comm_buffer_size_mb": elements(100)},
        missing=unused_on_rank_1,
        dtypes=(torch.bfloat16, torch.float32),
    ),
    "two hops": Setup(
        config={"two_hop": True, "local_world_size": 2, "comm_overlap": True},
        clip=lambda: ClipGradByAdaptiveNorm(ratio=0.5, warmup_steps=1),
    ),
    "colors": Setup(
        config={"skip_missing": True, "release_gradients": True},
        colors={"experts": ("e", [(0, 1), (2, 3)]), "bias": ("e", [(0, 1), (2, 3)]), "tall": ("f", [(1, 3)])},
        clip=lambda: ClipGradByGlobalNorm(100.0),
        missing=unused_on_rank_1,
    ),
}


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""

    def work(task: bytes) -> bytes:
        reply: dict[str, Any] = train(CASES[task.decode()], context.world)(context.rank)
        return json.dumps(reply).encode()

    return work
