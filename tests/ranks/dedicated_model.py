"""A model whose gradients are what one asks for, and the unsharded trainer that one with dedicated matrices must equal.

The loss is linear in the parameters, ``(p * g).sum()``, so that the gradient of ``p`` is ``g`` exactly: integers, and
multiples of the number of ranks, so that sums and means are exact in every order. "Equal" means every bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero2core import MuonAdamW, MuonParamInfo
from zero2core.strategies.dedicated import DedicatedParameter, mark_muon

INFO = {
    "blocks.0.wide": MuonParamInfo(use_muon=True),
    "blocks.0.stack": MuonParamInfo(use_muon=True, lr_scale=0.5),
    "blocks.1.wide": MuonParamInfo(use_muon=True, weight_decay=0.0),
    "blocks.1.stack": MuonParamInfo(use_muon=True, split="heads", num_heads=3),
    "blocks.2.wide": MuonParamInfo(use_muon=True),
    "blocks.2.stack": MuonParamInfo(use_muon=True),
    "top": MuonParamInfo(use_muon=True, split="qkv", sizes=(2, 2, 4)),
}
"""What is dedicated."""

MUON = {"lr": 0.0625, "momentum": 0.75, "weight_decay": 0.125}
ADAMW = {"lr": 0.03125, "betas": (0.5, 0.75), "eps": 1e-9, "weight_decay": 0.125}

Gradients = Mapping[str, Tensor | None]


class CheckFailedError(Exception):
    """What a rank saw is not what it should have seen."""


def require(holds: object, what: str) -> None:
    """Raise unless ``holds``; unlike an assert also under -O, and with a message where pytest rewrites nothing."""
    if not holds:
        raise CheckFailedError(what)


def same_bits(name: str, got: Tensor, expected: Tensor) -> int:
    """Raise unless they are equal bit for bit (as integers, so that signs of zeros count); how many were compared."""
    require(got.dtype == expected.dtype and got.shape == expected.shape, f"{name}: {got.dtype} {tuple(got.shape)}")
    kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
    differ = got.detach().contiguous().view(kind) != expected.detach().contiguous().view(kind)
    require(not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} differ\n{got}\n{expected}")
    return differ.numel()


class Block(nn.Module):
    """Two matrices (one of them a stack) and a vector; shows the weights that it computes with."""

    def __init__(self, prefix: str, show: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.prefix, self.show = prefix, show
        self.wide = nn.Parameter(torch.randn(4, 6))
        self.stack = nn.Parameter(torch.randn(2, 6, 5))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor, gradients: Gradients) -> Tensor:
        return x + linear_loss(self.prefix, self, gradients, self.show, x)


class Model(nn.Module):
    """Blocks, and a root with a matrix and a vector of its own."""

    def __init__(self, *, seed: int, remat: bool | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shown: list[tuple[str, Tensor]] = []
        self.blocks = nn.ModuleList(Block(f"blocks.{i}.", self.show) for i in range(3))
        self.top = nn.Parameter(torch.randn(8, 6))
        self.scale = nn.Parameter(torch.randn(5))
        self.order = [0, 1, 2]
        self.remat = remat  # None, or use_reentrant of checkpoints
        self.to(dtype)
        for name, info in INFO.items():
            mark_muon(self.get_parameter(name), info)

    def show(self, name: str, weight: Tensor) -> None:
        self.shown.append((name, weight.detach().clone()))

    def forward(self, gradients: Gradients) -> Tensor:
        x = torch.zeros((), requires_grad=torch.is_grad_enabled())
        for index in self.order:
            block = self.blocks[index]
            x = block(x, gradients) if self.remat is None else checkpoint(block, x, gradients, use_reentrant=self.remat)
        return x + linear_loss("", self, gradients, self.show, x)


def linear_loss(
    prefix: str, module: nn.Module, gradients: Gradients, show: Callable[[str, Tensor], None], x: Tensor
) -> Tensor:
    """The sum over what a module has and ``gradients`` names; what these give None is not used."""
    loss = x * 0  # so that a gradient flows through every module, whatever is used
    names = ["wide", "stack", "bias"] if isinstance(module, Block) else ["top", "scale"]
    for name in names:
        gradient = gradients[prefix + name]
        weight = getattr(module, name)
        show(prefix + name, weight)
        if gradient is not None:
            # The factor makes a backward need the weights, as that of a matrix product does; it is 1 for any weight.
            loss = loss + (weight * gradient.to(weight.dtype) * _one(weight)).sum()
    return loss


class _One(torch.autograd.Function):
    """1, computed from a weight that is saved and looked at in the backward too."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seen = weight.detach().clone()
        return weight.new_ones(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        (weight,) = ctx.saved_tensors
        same_bits("a weight in the backward", weight, ctx.seen)
        return None


def _one(weight: Tensor) -> Tensor:
    one: Tensor = _One.apply(weight)
    return one


def integers(name: str, shape: tuple[int, ...], *, step: int, part: int, rank: int, most: int, multiple: int) -> Tensor:
    """What one rank adds to the gradient of ``name`` in one part: the same wherever it is computed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {part} {rank}".encode()))
    return torch.randint(-most, most + 1, shape, generator=generator).float() * multiple


class Reference:
    """The unsharded trainer: all of the batch in one process.

    Args:
        missing: says for (step, part, rank, name) whether a rank does not use a parameter.
    """

    def __init__(self, world: int, *, most: int, missing: Callable[[int, int, int, str], bool] | None = None,
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        self.world, self.most, self.missing = world, most, missing
        self.model = Model(seed=0, dtype=dtype)
        names = [name for name, _ in self.model.named_parameters()]
        infos = {name: INFO.get(name, MuonParamInfo()) for name in names}
        adamw = {f"adamw_{key}": value for key, value in ADAMW.items()}
        self.optimizer = MuonAdamW(
            self.model.named_parameters(),
            infos,
            **MUON,
            **adamw,
            skip_missing=True,  # type: ignore[arg-type]
        )
        self.parameters = dict(self.model.named_parameters())

    def contribution(self, step: int, part: int, rank: int) -> Gradients:
        """What a rank is to have as gradients in a part."""
        return {
            name: None
            if self.missing is not None and self.missing(step, part, rank, name)
            else integers(name, tuple(p.shape), step=step, part=part, rank=rank, most=self.most, multiple=self.world)
            for name, p in self.parameters.items()
        }

    def mean(self, step: int, parts: int, times: Callable[[str], int] = lambda name: 1) -> dict[str, Tensor | None]:
        """The gradient of each parameter: parts added up, mean over ranks."""
        gradients: dict[str, Tensor | None] = dict.fromkeys(self.parameters)
        for part in range(parts):
            for rank in range(self.world):
                for name, gradient in self.contribution(step, part, rank).items():
                    if gradient is not None and times(name):
                        before = gradients[name]
                        gradients[name] = gradient * times(name) + (0 if before is None else before)
        return {name: None if total is None else total / self.world for name, total in gradients.items()}

    def step(self, gradients: Mapping[str, Tensor | None], max_norm: float | None) -> Tensor:
        """Clip and step; the joint norm before."""
        squares = [g.double().square().sum() for g in gradients.values() if g is not None]
        norm = torch.stack(squares).sum().sqrt().float()
        factor = torch.ones(()) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, gradient in gradients.items():
            self.parameters[name].grad = (
                None if gradient is None else (gradient * factor).to(self.parameters[name].dtype)
            )
        self.clipped = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.optimizer.step()
        return norm

    def master(self, name: str) -> Tensor:
        """fp32 weights."""
        parameter = self.parameters[name]
        master: Tensor = self.optimizer.state[parameter].get("master", parameter.detach())
        return master

    def compare(self, dedicated: Mapping[str, DedicatedParameter], rank: int) -> int:
        """Weights and momenta on owners; nothing elsewhere."""
        compared = 0
        require(set(dedicated) == set(INFO), f"dedicated are {sorted(dedicated)}")
        for name, held in dedicated.items():
            require(held.name == name and held.is_owner == (held.owner == rank), f"owner of {name}")
            if not held.is_owner:
                require(held.weight is held.grad is held.momentum is None, f"rank {rank} holds something of {name}")
                continue
            require(held.weight is not None and held.momentum is not None, f"{name} has no state on its owner")
            assert held.weight is not None
            assert held.momentum is not None
            compared += same_bits(f"weight of {name}", held.weight, self.master(name))
            momentum = self.optimizer.state[self.parameters[name]]["momentum"]
            compared += same_bits(f"momentum of {name}", held.momentum, momentum)
        return compared
