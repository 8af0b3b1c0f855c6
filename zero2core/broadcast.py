"""Give every rank the same module before training begins."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zero2core import collectives
from zero2core.agreement import require_agreement

__all__ = ["broadcast_module"]


@torch.no_grad()
def broadcast_module(module: nn.Module, src: int = 0, *, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every parameter and buffer of ``module``, in place, with those of rank ``src``. Collective.

    Nothing happens at world 1, or where no process group exists. Bits travel, not numbers: every dtype works, also
    those a backend cannot reduce. A non-contiguous tensor is sent as a row-major copy, one at a time. Ranks first
    compare names, shapes and dtypes (one all-gather of 32 bytes); then each tensor that has elements is one
    broadcast of uint8.

    Args:
        module: the same structure on every rank.
        src: the rank to copy from, counted within ``group``.
        group: the process group; the default group when None.

    Raises:
        ValueError: ``src`` is not a rank of the group, or this process is not in it.
        RankMismatchError: on all ranks, when the modules differ in a name, shape or dtype.
    """
    world = collectives.group_world(group)
    world = 1 if world is None else world
    if not 0 <= src < world:
        raise ValueError(f"src={src} is not a rank of the process group of {world} ranks (-1: this process is outside)")
    if world == 1:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    facts = [f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors]
    device = tensors[0][1].device if tensors else collectives.group_device(group)
    require_agreement("broadcast_module", facts, group=group, device=device)
    for _, tensor in tensors:
        if tensor.numel() == 0:
            continue
        here = tensor.detach()
        sent = here.contiguous()
        collectives.broadcast(sent.view(-1).view(torch.uint8), src=src, group=group)
        if sent is not here:
            here.copy_(sent)
