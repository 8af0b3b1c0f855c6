"""Trainings of the sharded Muon optimizer, and the unsharded trainer that they must equal bit for bit.

Gradients are small whole numbers times :data:`MULTIPLE`: exact in bf16 and fp16, their sums exact in fp32 in any order,
their means exact for every divisor of :data:`MULTIPLE`, and the squares of these exact in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.sim.world import SimWorld
from zero2core import MuonAdamW, MuonParamInfo, MuonShardingConfig, MuonShardingOptimizer

MULTIPLE = 24

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (10, 8),
    "qkv": (16, 8),
    "norm": (7,),
    "tall": (20, 4),
    "wide": (6, 12),
    "experts": (3, 6, 8),
    "bias": (1,),
}
INFO = {
    "embedding": MuonParamInfo(weight_decay=0.0),
    "qkv": MuonParamInfo(use_muon=True, split="qkv", sizes=(8, 4, 4), lr_scale=0.5),
    "norm": MuonParamInfo(need_clip=False, lr_scale=2.0),
    "tall": MuonParamInfo(use_muon=True, split="gate_up"),
    "wide": MuonParamInfo(use_muon=True, split="heads", num_heads=2, need_clip=False),
    "experts": MuonParamInfo(use_muon=True, weight_decay=0.25),
    "bias": MuonParamInfo(),
}
MIB = 2**20
INNER: dict[str, Any] = {"lr": 0.0625, "adamw_lr": 0.03125}

Colors = Mapping[str, tuple[Any, Sequence[Sequence[int]]]]
"""Parameter -> key, and the ranks of each of its groups."""


class CheckFailedError(Exception):
    """What a rank saw is not what it should have seen."""


def require(holds: object, what: str) -> None:
    """Raise unless ``holds``; unlike an assert also where pytest rewrites nothing."""
    if not holds:
        raise CheckFailedError(what)


def elements(count: int) -> float:
    """``comm_buffer_size_mb`` of so many fp32 elements."""
    return count * 4 / MIB


def values(shape: Sequence[int], *seed: int) -> Tensor:
    """Whole numbers from -8 to 8, fp32."""
    generator = torch.Generator().manual_seed(int("1" + "".join(f"{part:03d}" for part in seed)))
    return torch.randint(-8, 9, tuple(shape), generator=generator).float()


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (actual, expected)]
    return torch.equal(*bits)


def nobody(step: int, part: int, rank: int, name: str) -> bool:
    """No gradient is missing."""
    return False


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Attributes:
        config: fields of ``MuonShardingConfig`` other than colours.
        missing: of (step, part, rank, name), whether there is no gradient.
        parts: backward passes of each step.
        dtypes: of the parameters in turn.
        strided: matrices are transposed in memory.
        announced: parts but the last are marked by ``no_sync()``.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    info: Mapping[str, MuonParamInfo] = field(default_factory=lambda: INFO)
    config: Mapping[str, Any] = field(default_factory=dict)
    colors: Colors = field(default_factory=dict)
    inner: Mapping[str, Any] = field(default_factory=dict)
    clip: Callable[[], Any] = lambda: None
    missing: Callable[[int, int, int, str], bool] = nobody
    parts: tuple[int, ...] = (2, 1, 3)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    strided: bool = False
    announced: bool = False

    def parameters(self) -> dict[str, nn.Parameter]:
        made = {}
        for index, (name, shape) in enumerate(self.shapes.items()):
            weight = (values(shape, index) / 16).to(self.dtypes[index % len(self.dtypes)])
            if self.strided and weight.dim() >= 2:
                weight = weight.transpose(-1, -2).contiguous().transpose(-1, -2)
            made[name] = nn.Parameter(weight)
        return made

    def optimizer(self, params: Mapping[str, nn.Parameter], info: Mapping[str, MuonParamInfo]) -> MuonAdamW:
        settings = INNER | {"skip_missing": self.config.get("skip_missing", False)} | dict(self.inner)
        return MuonAdamW(params.items(), info, grad_clip=self.clip(), **settings)

    def gradient(self, step: int, part: int, rank: int, name: str) -> Tensor | None:
        if self.missing(step, part, rank, name):
            return None
        return values(self.shapes[name], step, part, rank, list(self.shapes).index(name)) * MULTIPLE

    def groups(self, name: str, world: int) -> list[tuple[int, ...]]:
        """The groups in each of which this parameter has a life of its own."""
        if name not in self.colors or self.colors[name][0] in (None, -1):
            return [tuple(range(world))]
        return [tuple(ranks) for ranks in self.colors[name][1]]

    def divisor(self, name: str, ranks: Sequence[int]) -> float:
        key = self.colors[name][0] if name in self.colors else -1
        return self.config.get("color_divisors", {}).get(-1 if key is None else key, len(ranks))


class Unsharded:
    """One ``MuonAdamW`` of all lives of all parameters."""

    def __init__(self, setup: Setup, world: int) -> None:
        self._setup = setup
        self.initial = setup.parameters()
        self.lives: dict[str, tuple[str, tuple[int, ...]]] = {}
        params, info = {}, {}
        for name, param in self.initial.items():
            for ranks in setup.groups(name, world):
                life = f"{name}@{ranks}"
                self.lives[life] = (name, ranks)
                params[life] = nn.Parameter(param.detach().clone())
                info[life] = setup.info[name]
        self.params = params
        self.optimizer = setup.optimizer(params, info)

    def step(self, step: int) -> None:
        for life, (name, ranks) in self.lives.items():
            total = torch.zeros(self._setup.shapes[name])
            some = False
            for part in range(self._setup.parts[step]):
                for rank in ranks:
                    gradient = self._setup.gradient(step, part, rank, name)
                    if gradient is not None:
                        total += gradient
                        some = True
            self.params[life].main_grad = total / self._setup.divisor(name, ranks) if some else None
        self.optimizer.step()

    def life_of(self, name: str, rank: int) -> str | None:
        """The life of a parameter that a rank takes part in."""
        return next((life for life, (of, ranks) in self.lives.items() if of == name and rank in ranks), None)

    def require_same(self, trainer: Trainer, what: str) -> None:
        for name, param in trainer.params.items():
            life = self.life_of(name, trainer.rank)
            expected = self.initial[name] if life is None else self.params[life]
            require(same_bits(param, expected), f"{what}: weights of {name} on rank {trainer.rank}")
        for shard in trainer.opt.local_shards():
            life = self.life_of(shard.name, trainer.rank)
            require(life is not None, f"{what}: rank {trainer.rank} owns of {shard.name}, outside its group")
            state = self.optimizer.state[self.params[life]]
            expected = {"master": state.get("master", self.params[life]), **state}
            for key, actual in {"master": shard.master, **shard.state}.items():
                part = expected[key].detach().contiguous().flatten()[shard.start : shard.stop]
                require(same_bits(actual.flatten(), part), f"{what}: {key} of {shard.name} on rank {trainer.rank}")


class Trainer:
    """One rank's parameters and their sharded optimizer."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self.rank = rank
        self.setup = setup
        self.params = setup.parameters()
        self.inner = setup.optimizer(self.params, setup.info)
        self.opt = MuonShardingOptimizer(self.inner, config=MuonShardingConfig(colors=self._colors(), **setup.config))

    def _colors(self) -> dict[str, Any]:
        made: dict[tuple[int, ...], Any] = {}
        colors = {}
        for name, (key, groups) in self.setup.colors.items():
            mine = None if key in (None, -1) else dist.GroupMember.NON_GROUP_MEMBER
            for ranks in map(tuple, groups):
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks))
                if self.rank in ranks:
                    mine = made[ranks]
            colors[name] = (key, mine)
        return colors

    def loss(self, step: int, part: int) -> Tensor:
        """Its gradients are those of :meth:`Setup.gradient`."""
        loss = torch.zeros(())
        for name, param in self.params.items():
            gradient = self.setup.gradient(step, part, self.rank, name)
            if gradient is not None:
                loss = loss + (param * gradient.to(param.dtype)).float().sum()
        return loss

    def backward(self, step: int, part: int) -> None:
        loss = self.loss(step, part)
        if loss.requires_grad:
            loss.backward()

    def accumulate(self, step: int) -> None:
        for part in range(self.setup.parts[step]):
            if self.setup.announced and part + 1 < self.setup.parts[step]:
                with self.opt.no_sync():
                    self.backward(step, part)
            else:
                self.backward(step, part)

    def step(self, step: int) -> None:
        self.accumulate(step)
        self.opt.reduce_gradients()
        self.opt.step()
        self.opt.clear_grad()


def train(setup: Setup, world: int) -> Callable[[int], dict[str, Any]]:
    """A rank's program: train, and compare every step; tells what it held."""

    def ranks(rank: int) -> dict[str, Any]:
        trainer = Trainer(rank, setup)
        reference = Unsharded(setup, world)
        places = {name: param.data_ptr() for name, param in trainer.params.items()}
        for step in range(len(setup.parts)):
            trainer.step(step)
            reference.step(step)
            reference.require_same(trainer, f"step {step}")
        require(
            places == {name: param.data_ptr() for name, param in trainer.params.items()}, "parameters stay in place"
        )
        moved = [name for name, param in trainer.params.items() if not same_bits(param, reference.initial[name])]
        return {
            "held": {shard.name: (shard.start, shard.stop) for shard in trainer.opt.local_shards()},
            "moved": moved,
            "plan": str(trainer.opt.plan),
        }

    return ranks


def simulate(world: int, function: Callable[[int], Any], seed: int = 0) -> list[Any]:
    """What ``function`` of a rank gives on each rank of a simulated world; ``seed``: of the order of their turns."""
    return SimWorld(world, seed=seed).run(function).values()


def require_every_element_once(setup: Setup, held: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """In each group of each parameter, the ranges of its ranks cover it; a whole tensor is one rank's."""
    for name, shape in setup.shapes.items():
        for ranks in setup.groups(name, len(held)):
            ranges = sorted(held[rank][name] for rank in ranks if name in held[rank])
            numel = torch.Size(shape).numel()
            covered = [index for start, stop in ranges for index in range(start, stop)]
            require(covered == list(range(numel)), f"{name} on ranks {ranks}: {ranges} of {numel}")
            if setup.info[name].use_muon and numel:
                require(len(ranges) == 1, f"{name} is whole on one of ranks {ranges}")


COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast_object_list",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "gather_object",
    "scatter",
    "barrier",
    "new_group",
    "send",
    "recv",
]


@dataclass(frozen=True)
class Call:
    """A collective that a rank issued. ``numel``: of the first tensor. ``root``: source or destination, or None."""

    kind: str
    ranks: tuple[int, ...]
    dtype: torch.dtype | None
    numel: int
    op: str
    root: int | None


class Recorder:
    """What each rank called of ``torch.distributed``, in order; other marks may be put between."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Any]] = {}

    def mark(self, what: Any) -> None:
        self.calls.setdefault(dist.get_rank(), []).append(what)

    def clear(self) -> None:
        self.calls.pop(dist.get_rank(), None)

    @property
    def mine(self) -> list[Any]:
        return self.calls.get(dist.get_rank(), [])

    def record(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensors = [item for item in [*arguments, *options.values()] if isinstance(item, Tensor)]
        group = options.get("group")
        ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        root = next((options[key] for key in ("group_src", "group_dst", "src", "dst") if key in options), None)
        first = tensors[0] if tensors else None
        self.mark(
            Call(
                kind,
                ranks,
                None if first is None else first.dtype,
                0 if first is None else first.numel(),
                str(options.get("op")),
                root,
            )
        )


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Every collective of :data:`COLLECTIVES` that this torch has is recorded."""
    recorder = Recorder()
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def recording(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            recorder.record(name, arguments, options)
            return original(*arguments, **options)

        return call

    try:
        for name, original in originals.items():
            setattr(dist, name, recording(name, original))
        yield recorder
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
