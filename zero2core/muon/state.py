"""Saving and loading what one rank of a :class:`~zero2core.muon.sharding.MuonShardingOptimizer` holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zero2core.muon.sharding import MuonShardingOptimizer

__all__ = ["load_into", "load_local_state", "local_state", "require_groups", "saved_settings"]

_VERSION = 1
_KEYS = {"version", "plan", "rank", "state", "param_groups", "grad_clip"}
_NOT_SAVED = ("params", "names", "use_muon")


def local_state(optimizer: MuonShardingOptimizer) -> dict[str, Any]:
    """See :meth:`MuonShardingOptimizer.state_dict`. Tensors are the optimizer's own, no copies."""
    inner = optimizer.inner
    return {
        "version": _VERSION,
        "plan": optimizer.plan.digest,
        "rank": optimizer.rank,
        "state": {name: dict(inner.state[param]) for name, param in inner.named.items() if inner.state.get(param)},
        "param_groups": saved_settings(inner.param_groups),
        "grad_clip": None if inner.grad_clip is None else inner.grad_clip.state_dict(),
    }


@torch.no_grad()
def load_local_state(optimizer: MuonShardingOptimizer, saved: Mapping[str, Any]) -> None:
    """See :meth:`MuonShardingOptimizer.load_state_dict`. Changes nothing when it raises."""
    inner = optimizer.inner
    if not isinstance(saved, Mapping) or set(saved) != _KEYS:
        got = sorted(saved) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"the saved state has {got}, expected {sorted(_KEYS)}: it was not saved by this optimizer")
    if saved["version"] != _VERSION:
        raise ValueError(f"the saved state is of version {saved['version']!r}, this one reads {_VERSION}")
    here = optimizer.plan.digest, optimizer.rank
    if (saved["plan"], saved["rank"]) != here:
        raise ValueError(
            f"the saved state is of plan {saved['plan']}, rank {saved['rank']}, this is plan {here[0]}, rank {here[1]}"
            ": another world, other parameters, owners or buffers. Save sharded_state_dict() to go on with another plan"
        )
    own = {name: inner.state[param] for name, param in inner.named.items() if inner.state.get(param)}
    if set(saved["state"]) != set(own):
        raise ValueError(
            f"the saved state has {sorted(saved['state'])}, this rank holds {sorted(own)}: it is another optimizer's"
        )
    for name, state in own.items():
        _require_alike(name, state, saved["state"][name])
    require_groups(inner.param_groups, saved["param_groups"])
    if (inner.grad_clip is None) != (saved["grad_clip"] is None):
        has, had = ("no", "a") if inner.grad_clip is None else ("a", "no")
        raise ValueError(f"this optimizer has {has} clip, the saved one had {had} one: construct it alike")
    if inner.grad_clip is not None:
        inner.grad_clip.load_state_dict(saved["grad_clip"])
    for name, state in own.items():
        load_into(state, saved["state"][name])
    for group, new in zip(inner.param_groups, saved["param_groups"], strict=True):
        group.update(copy.deepcopy(dict(new)))


def saved_settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of what is saved of each parameter group: everything but its parameters."""
    return [{name: copy.deepcopy(value) for name, value in group.items() if name not in _NOT_SAVED} for group in groups]


def load_into(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy values into a state's own tensors, where they are; numbers are taken as they are."""
    for key, value in saved.items():
        if isinstance(value, Tensor):
            state[key].copy_(value)
        else:
            state[key] = value


def _require_alike(name: str, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if set(saved) != set(state):
        raise ValueError(f"the saved state of {name} has {sorted(saved)}, expected {sorted(state)}")
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        given = saved[key]
        if not isinstance(given, Tensor) or given.shape != value.shape or given.dtype != value.dtype:
            shown = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"the saved {key} of {name} is {shown}, expected {value.dtype} {tuple(value.shape)}")


def require_groups(groups: list[dict[str, Any]], saved: list[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless all settings of ``groups`` are in ``saved`` too."""
    if len(saved) != len(groups):
        raise ValueError(f"the saved state has {len(saved)} parameter groups, expected {len(groups)}")
    for index, (group, given) in enumerate(zip(groups, saved, strict=True)):
        expected = set(group) - set(_NOT_SAVED)
        missing = sorted(expected - set(given))
        if missing:
            raise ValueError(f"the saved settings of parameter group {index} lack {', '.join(missing)}")
