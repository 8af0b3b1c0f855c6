"""What the ranks of test_sim_as_gloo.py do: a task is JSON ``{"do": name, **arguments}``, the reply a list of results.

A result is a name, a digest of all bits, and the first values for whoever looks at a difference.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.launch.rank import RankContext
from tests.ranks import sim_programs, sim_trainings

Result = list[Any]


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""
    torch.set_num_threads(1)

    def work(task: bytes) -> bytes:
        return json.dumps(perform(json.loads(task), context.rank, context.world)).encode()

    return work


def perform(task: dict[str, Any], rank: int, world: int) -> list[Result]:
    """One rank's part; on gloo and in a simulated world alike."""
    if task["do"] == "programs":
        named = []
        for seed in task["seeds"]:
            program = sim_programs.draw(seed, world, task["num_steps"])
            named += [(f"{seed} {name}", tensor) for name, tensor in sim_programs.Run(program, rank).run()]
    else:
        os.environ["LOCAL_RANK"] = str(rank)
        tensors = sim_trainings.TRAININGS[task["training"]](rank)
        named = [(f"{task['training']} {number}", tensor) for number, tensor in enumerate(tensors)]
    return [[name, *described(tensor)] for name, tensor in named]


def described(tensor: Tensor) -> tuple[str, str, list[float]]:
    """Type and shape, digest of the bits, the first values."""
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    digest = hashlib.blake2b(data, digest_size=12).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)}", digest, tensor.reshape(-1)[:4].double().tolist()
