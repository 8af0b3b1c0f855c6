"""Distribution strategies as somebody writes them who never saw this project: plain DDP and plain FSDP2.

The right ones. Each takes a configuration that it does not look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def scale(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """What torch's own clipping does."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient)


class PlainDDP:
    """Whole parameters on every rank."""

    verify_extensions = ("unused", "tied", "unequal_start")

    def __init__(self, config: Mapping[str, Any], *, device: torch.device, local_rank: int) -> None:
        self.device = device

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model.to(self.device), find_unused_parameters=True, gradient_as_bucket_view=True)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
        scale(gradients, norm, max_norm)
        return norm

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync()


class PlainFSDP:
    """Every block and the root sharded over all ranks."""

    verify_extensions: tuple[str, ...] = ("tied", "unequal_start")

    def __init__(self, config: Mapping[str, Any], *, device: torch.device, local_rank: int) -> None:
        self.device = device
        self.depth = 0

    def mesh(self) -> Any:
        return init_device_mesh(self.device.type, (dist.get_world_size(),))

    def wrap(self, model: nn.Module) -> nn.Module:
        for tensor in model.parameters():
            dist.broadcast(tensor.data, src=0)
        mesh = self.mesh()
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        for block in max(lists, key=len, default=()):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            for module in modules:
                module.set_requires_gradient_sync(self.depth == 0, recurse=False)


class PlainHSDP(PlainFSDP):
    """Two replicas of what PlainFSDP does, where the world can be halved; a mesh of its own in each construction."""

    def mesh(self) -> Any:
        world = dist.get_world_size()
        replicas = 2 if world % 2 == 0 else 1
        return init_device_mesh(self.device.type, (replicas, world // replicas), mesh_dim_names=("replicas", "shards"))
