"""What :class:`~zero2core.zero_master.ZeroMaster` refuses at construction, and how all ranks learn of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from zero2core import collectives
from zero2core.agreement import require_agreement

__all__ = ["parameters_problem", "require_place", "require_same_parameters"]


def require_place(rank: int, world: int, sim_world: int, group: dist.ProcessGroup | None) -> None:
    """Raise ``ValueError`` unless ``rank`` of ``world`` is this process's place in ``group``."""
    if world < 1:
        raise ValueError(f"world={world}: at least one rank is needed")
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is outside world={world}: ranks count from 0 to {world - 1}")
    if sim_world < 0:
        raise ValueError(f"sim_world={sim_world}: must be the number of simulated ranks, or 0 for none")
    if sim_world > 1:
        if world != 1:
            raise ValueError(f"sim_world={sim_world} simulates on one process: world must be 1, not {world}")
        return
    actual_world = collectives.group_world(group)
    if actual_world is None:
        if world > 1:
            raise ValueError(
                f"world={world} needs a process group and there is none: call torch.distributed.init_process_group "
                "first, or pass group="
            )
        return
    actual_rank = collectives.group_rank(group)
    if (rank, world) != (actual_rank, actual_world):
        raise ValueError(
            f"rank={rank}, world={world}, but in the process group this process is rank {actual_rank} of "
            f"{actual_world}: sums would run over other ranks than the shards. Pass the group that belongs to them"
        )


def parameters_problem(params: Sequence[nn.Parameter], bucket: int) -> str | None:
    """Why these arguments cannot be used; None when they can."""
    if bucket < 1:
        return f"bucket={bucket}: a bucket needs at least one element"
    if not params:
        return "params is empty: there is nothing to train"
    seen: dict[int, int] = {}
    for index, param in enumerate(params):
        name = f"params[{index}], shape {tuple(param.shape)},"
        if id(param) in seen:
            return f"{name} is params[{seen[id(param)]}] again: list tied weights once"
        seen[id(param)] = index
        if param.layout is not torch.strided:
            return f"{name} has layout {param.layout}: only dense parameters can be sharded"
        if not param.dtype.is_floating_point:
            kind = "complex" if param.dtype.is_complex else "not floating-point"
            return f"{name} has dtype {param.dtype}, which is {kind}: only real floating-point ones can be sharded"
        if param.device != params[0].device:
            return f"{name} is on {param.device}, but params[0] is on {params[0].device}: move all to one device"
        if not param.requires_grad:
            return f"{name} does not require gradients: leave frozen parameters out"
    if all(param.numel() == 0 for param in params):
        shapes = ", ".join(f"params[{index}] {tuple(param.shape)}" for index, param in enumerate(params[:3]))
        return f"params have no elements at all ({shapes}{', ...' if len(params) > 3 else ''}): nothing to train"
    return None


def require_same_parameters(
    params: Sequence[nn.Parameter], bucket: int, problem: str | None, group: dist.ProcessGroup | None
) -> None:
    """Collective: compare the arguments with those of the other ranks; also when this rank is about to refuse its own.

    A rank that refuses alone would leave the others waiting for it in their first collective.
    """
    if problem is not None:
        facts = [f"refused: {problem}"]
    else:
        facts = [f"bucket {bucket}"]
        facts += [f"params[{index}]: shape {tuple(p.shape)}, {p.dtype}" for index, p in enumerate(params)]
    device = params[0].device if params else collectives.group_device(group)
    try:
        require_agreement("ZeroMaster", facts, group=group, device=device)
    except ValueError as mismatch:
        if problem is not None:
            raise ValueError(problem) from mismatch
        raise
