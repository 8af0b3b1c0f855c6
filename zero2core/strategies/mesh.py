"""Where ranks stand: how many replicas of how many shards, and the device meshes that say so to FSDP2."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero2core import collectives
from zero2core.agreement import require_agreement
from zero2core.strategies.config import StrategyConfig

__all__ = ["AXES", "agreed_mesh_shape", "device_mesh", "local_world", "mesh_shape", "require_served"]

AXES = {1: ("dp",), 2: ("replicate", "shard")}
"""Names of the axes of a mesh, by their number."""


def local_world() -> int | None:
    """Ranks on this node as the launcher says in ``LOCAL_WORLD_SIZE``; None without it. ``ValueError`` if no number."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"LOCAL_WORLD_SIZE={text!r}: must be the number of ranks on this node; unset or correct it")
    return int(text)


def mesh_shape(config: StrategyConfig, world: int, local: int | None) -> tuple[int, ...]:
    """Shape of the mesh of ``world`` ranks: ``(world,)``, or ``(replicas, shards)`` of a hybrid one.

    Shards lie inside a node and replicas across nodes. By default there are ``world / local`` replicas; where the
    number of ranks on a node is not known, ``world / 8``, or 1 where 8 does not divide the world.

    Args:
        local: ranks on a node; None: not known.

    Raises:
        ValueError: the replicas, or the ranks on a node, do not divide the world.
    """
    if not config.hybrid:
        return (world,)
    replicas = config.fsdp_hsdp_replicate_size
    if replicas == 0:
        if local is None:
            replicas = world // 8 if world % 8 == 0 else 1
        elif world % local:
            raise ValueError(
                f"a world of {world} ranks cannot be cut into nodes of LOCAL_WORLD_SIZE={local} ranks: set "
                "fsdp_hsdp_replicate_size to the number of replicas"
            )
        else:
            replicas = world // local
    if world % replicas:
        raise ValueError(
            f"a world of {world} ranks cannot be cut into fsdp_hsdp_replicate_size={replicas} replicas of equal size: "
            f"it must divide {world}"
        )
    return (replicas, world // replicas)


def agreed_mesh_shape(what: str, config: StrategyConfig, world: int) -> tuple[int, ...]:
    """:func:`mesh_shape` by what the launcher says of this node, the same on every rank. Collective.

    Ranks that went on with meshes of other shapes would make other groups, and wait for each other.

    Args:
        what: the caller, which messages begin with.

    Raises:
        ValueError: on all ranks, where none has a shape, for the same reason.
        RankMismatchError: on all ranks, where they differ in shape or reason.
    """
    shape: tuple[int, ...] = ()
    refusal: ValueError | None = None
    try:
        shape = mesh_shape(config, world, local_world())
    except ValueError as error:
        refusal = error
    if world > 1:
        facts = [
            f"mesh of shape {shape}, by LOCAL_WORLD_SIZE and the configuration" if refusal is None else f"{refusal}"
        ]
        require_agreement(what, facts, group=None, device=collectives.group_device(None))
    if refusal is not None:
        raise refusal
    return shape


# Meshes own groups, which are dear and live as long as the default group.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def device_mesh(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of ``shape`` over all ranks, row by row; made at the first call, then given again. Collective.

    Raises:
        ValueError: there is no default process group, or its backend does not serve ``device``.
    """
    default = require_served(device)
    made = _meshes.setdefault(default, {})
    key = (device.type, shape)
    if key not in made:
        made[key] = init_device_mesh(device.type, shape, mesh_dim_names=AXES[len(shape)])
    return made[key]


def require_served(device: torch.device) -> dist.ProcessGroup:
    """The default process group; ``ValueError`` without one, or where its backend does not serve ``device``."""
    default = collectives.default_group()
    served = collectives.served_devices(default)
    if device.type not in served:
        raise ValueError(
            f"the default process group serves {', '.join(sorted(served))} and the strategy's device is {device}: "
            f"call init_process_group with a backend for {device.type}"
        )
    return default
