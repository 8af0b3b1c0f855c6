"""Trainings that test_muon_checkpoint.py saves and loads; on real ranks a task is JSON ``{"do": name, **arguments}``.

Gradients are multiples of 12 times a power of two, in twelfths over the ranks of any world of 1, 2, 3, 4 or 6, so that
their sums (also in bf16), means and sums of squares are exact: every bit must equal the unsharded optimizer's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from harness.launch.rank import RankContext
from zero2core.muon import (
    ClipGradByAdaptiveNorm,
    ClipGradByGlobalNorm,
    MuonAdamW,
    MuonParamInfo,
    MuonShardingConfig,
    MuonShardingOptimizer,
)

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (11, 6),
    "qkv": (8, 6),
    "empty": (0, 3),
    "heads": (6, 6),
    "norm": (6,),
    "one": (),
    "experts": (2, 5, 6),
    "wide": (3, 7),
    "bias": (7,),
}
INFO = {
    "embed": MuonParamInfo(lr_scale=0.5),
    "qkv": MuonParamInfo(use_muon=True, split="qkv", sizes=(4, 2, 2)),
    "empty": MuonParamInfo(),
    "heads": MuonParamInfo(use_muon=True, split="heads", num_heads=2),
    "norm": MuonParamInfo(need_clip=False),
    "one": MuonParamInfo(weight_decay=0.0),
    "experts": MuonParamInfo(use_muon=True),
    "wide": MuonParamInfo(use_muon=True),
    "bias": MuonParamInfo(),
}
CONTRIBUTIONS = 12
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def clip_of(name: str | None) -> Any:
    """A new clip."""
    if name == "adaptive":
        return ClipGradByAdaptiveNorm(ratio=0.9, warmup_steps=1)
    return ClipGradByGlobalNorm(3.0) if name == "global" else None


def normal(shape: tuple[int, ...], *seed: int) -> Tensor:
    number = int("1" + "".join(f"{part:03d}" for part in seed))
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def contribution(name: str, step: int, number: int) -> Tensor:
    """fp32; one of the twelve whose mean is a step's gradient. ``bias`` has none in odd steps."""
    seed = int(f"1{step:03d}{number:03d}{list(SHAPES).index(name):03d}")
    drawn = torch.randint(-7, 8, SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return drawn.float() * (CONTRIBUTIONS * 2**-6)


def gradient_of(name: str, step: int, numbers: range) -> Tensor | None:
    """What a rank that has these contributions adds up."""
    if name == "bias" and step % 2:
        return None
    total = torch.zeros(SHAPES[name])
    for number in numbers:
        total += contribution(name, step, number)
    return total


class Net(nn.Module):
    """The parameters; ``empty`` and the frozen and tied ones are there to be looked after."""

    def __init__(self, dtype: torch.dtype, names: list[str] | None = None, seed: int = 0) -> None:
        super().__init__()
        for name in names or list(SHAPES):
            self.register_parameter(name, nn.Parameter(normal(SHAPES[name], seed, list(SHAPES).index(name)).to(dtype)))
        self.register_parameter("frozen", nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False))
        self.register_buffer("counts", torch.zeros(3))


def inner_of(net: nn.Module, **settings: Any) -> MuonAdamW:
    """The optimizer to be sharded, or the unsharded one."""
    clip = clip_of(settings.pop("clip", None))
    given = {"lr": 0.125, "adamw_lr": 0.0625, "ns_coefficients": "quintic", **settings}
    return MuonAdamW(net.named_parameters(), given.pop("info", INFO), grad_clip=clip, **given)


def unsharded(steps: int, dtype: str, **settings: Any) -> tuple[Net, MuonAdamW]:
    """Trained without ranks."""
    net = Net(DTYPES[dtype])
    inner = inner_of(net, **settings)
    for step in range(steps):
        for name, param in inner.named.items():
            gradient = gradient_of(name, step, range(CONTRIBUTIONS))
            param.main_grad = torch.zeros(SHAPES[name]) if gradient is None else gradient / CONTRIBUTIONS
        inner.step()
    return net, inner


class Training:
    """One rank's model and sharded optimizer."""

    def __init__(
        self, dtype: str = "bf16", *, config: Mapping[str, Any] | None = None, net: Net | None = None, **settings: Any
    ) -> None:
        self.net = Net(DTYPES[dtype]) if net is None else net
        inner = inner_of(self.net, **settings)
        given: dict[str, Any] = {"color_divisors": {None: float(CONTRIBUTIONS)}, **(config or {})}
        self.optimizer = MuonShardingOptimizer(inner, config=MuonShardingConfig(**given))

    def train(self, *steps: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for step in steps:
            for name, param in self.optimizer.inner.named.items():
                gradient = gradient_of(name, step, range(rank, CONTRIBUTIONS, world))
                param.grad = None if gradient is None else gradient.to(param.dtype)
            self.optimizer.reduce_gradients()
            self.optimizer.step()
            self.optimizer.clear_grad()

    def save(self, where: str) -> None:
        weights = self.net.state_dict()
        dcp.save({"model": weights, "optimizer": self.optimizer.sharded_state_dict(weights)}, checkpoint_id=where)

    def load(self, where: str, *, model: bool = True) -> None:
        if model:
            state = {"model": self.net.state_dict()}
            dcp.load(state, checkpoint_id=where)
        self.optimizer.load_sharded_state_dict(
            self.net.state_dict(), lambda state: dcp.load({"optimizer": state}, checkpoint_id=where)
        )

    def everything(self) -> dict[str, Any]:
        """All that this rank holds, copied."""
        inner = self.optimizer.inner
        held: dict[str, Any] = {f"weight of {name}": param.detach().clone() for name, param in inner.named.items()}
        for name, param in inner.named.items():
            for key, value in inner.state[param].items():
                held[f"{key} of {name}"] = value.clone() if isinstance(value, Tensor) else value
        held["groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
        ]
        held["clip"] = None if inner.grad_clip is None else inner.grad_clip.state_dict()
        return held


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both, bit for bit."""
    wrong = sorted(set(one) ^ set(other))
    for name in set(one) & set(other):
        left, right = one[name], other[name]
        same = same_bits(left, right) if isinstance(left, Tensor) else left == right
        if not same:
            wrong.append(name)
    return wrong


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def against_unsharded(training: Training, net: Net, inner: MuonAdamW) -> tuple[int, list[str]]:
    """How many elements of state this rank compared, and what of it, of the weights or of the clip differs."""
    wrong = [
        f"weight of {name}"
        for name, param in training.net.named_parameters()
        if not same_bits(param, net.get_parameter(name))
    ]
    compared = 0
    for shard in training.optimizer.local_shards():
        param, whole_param = training.optimizer.inner.named[shard.name], inner.named[shard.name]
        mine, whole = training.optimizer.inner.state[param], inner.state[whole_param]
        kinds = {"master": shard.master, **shard.state}
        for kind, value in kinds.items():
            expected = whole.get(kind, whole_param.detach()).reshape(-1)[shard.start : shard.stop]
            compared += value.numel()
            if not same_bits(value, expected):
                wrong.append(f"{kind} of {shard.name}[{shard.start}:{shard.stop}]")
        if mine.get("step") != whole.get("step"):
            wrong.append(f"step of {shard.name}: {mine.get('step')}, not {whole.get('step')}")
    clips = training.optimizer.inner.grad_clip, inner.grad_clip
    if clips[0] is not None and clips[1] is not None:
        states = [clip.state_dict() for clip in clips]
        states[1].get("norms", {}).pop("empty", None)  # nobody holds any of it
        if states[0] != states[1]:
            wrong.append(f"clip: {states[0]}, not {states[1]}")
    return compared, wrong


def refused(what: Callable[[], object]) -> str:
    """What it raised; of torch's checkpoints that is no ``Exception``."""
    try:
        what()
    except BaseException as error:  # noqa: BLE001 (torch's own is no Exception)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""
    torch.set_num_threads(1)

    def work(task: bytes) -> bytes:
        order = json.loads(task)
        return json.dumps(globals()[order.pop("do")](**order)).encode()

    return work


def save_in_the_background(where: str, dtype: str, settings: dict[str, Any]) -> list[Any]:
    """Two steps, saved while two more are done."""
    training = Training(dtype, **settings)
    training.train(0, 1)
    weights = training.net.state_dict()
    state = {"model": weights, "optimizer": training.optimizer.sharded_state_dict(weights)}
    # A group of its own: collectives of two threads in one group would be paired at random.
    saved = dcp.async_save(state, checkpoint_id=where, process_group=dist.new_group())
    training.train(2, 3)
    saved.result(timeout=100.0)
    return compare(training, 4, dtype, settings)


def go_on(where: str, dtype: str, settings: dict[str, Any]) -> list[Any]:
    """Loaded, and two steps more."""
    training = Training(dtype, **settings)
    training.load(where)
    training.train(2, 3)
    return compare(training, 4, dtype, settings)


def compare(training: Training, steps: int, dtype: str, settings: dict[str, Any]) -> list[Any]:
    of_inner = {key: value for key, value in settings.items() if key != "config"}
    compared, wrong = against_unsharded(training, *unsharded(steps, dtype, **of_inner))
    return [compared, wrong]
