"""What :class:`~zero2core.muon.MuonShardingOptimizer` refuses at construction, and how all ranks learn of it."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero2core import collectives
from zero2core.agreement import gather_texts, require_agreement
from zero2core.errors import RankMismatchError
from zero2core.muon.config import DEFAULT_COLOR, MuonShardingConfig, color_key
from zero2core.muon.inner import MuonAdamW

__all__ = [
    "agree_or_refuse",
    "arguments_problem",
    "local_world_size",
    "require_same_groups",
    "shared_facts",
    "wrong_type",
]

_SHARED_SETTINGS = (
    "comm_buffer_size_mb",
    "owner_rule",
    "owner_cap",
    "use_reduce_avg",
    "comm_overlap",
    "release_gradients",
    "two_hop",
    "skip_missing",
)


def wrong_type(inner: object, group: object, config: object) -> Exception | None:
    """Why these cannot even be looked at."""
    if not isinstance(inner, MuonAdamW):
        return TypeError(f"inner must be a MuonAdamW, it is {type(inner).__name__}")
    if not isinstance(config, MuonShardingConfig):
        return TypeError(f"config must be a MuonShardingConfig, it is {type(config).__name__}")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return ValueError("group does not have this rank: construct the optimizer on the ranks of the group only")
    return None


def arguments_problem(
    inner: MuonAdamW, group: dist.ProcessGroup | None, config: MuonShardingConfig, world: int
) -> str | None:
    """Why this rank of ``world`` refuses its arguments; None: it does not."""
    named = inner.named
    if not named:
        return "inner has no trainable parameters: there is nothing to train"
    first_name, first = next(iter(named.items()))
    for name, param in named.items():
        if param.device != first.device:
            return f"{name} is on {param.device}, but {first_name} is on {first.device}: move all to one device"
    shared = _shared_memory(named, inner.frozen)
    if shared is not None:
        return (
            f"{shared[0]} and {shared[1]} share memory, which two buffers cannot: to tie weights, make both "
            "attributes the same Parameter; else give one of them a clone()"
        )
    groups: dict[Hashable, object] = {}
    for name, entry in config.colors.items():
        if name not in named:
            return f"colors names {name!r}, which is no trainable parameter of inner"
        if entry is None:
            continue
        key, of_color = color_key(entry[0]), entry[1]
        if key == DEFAULT_COLOR and of_color not in (None, group):
            return f"colors[{name!r}]: the default colour belongs to the default group, not to another one"
        if groups.setdefault(key, of_color) is not of_color:
            return f"colors[{name!r}]: colour {key!r} has two groups; give its parameters one and the same"
    for key in config.color_divisors:
        if color_key(key) not in {DEFAULT_COLOR, *groups}:
            return f"color_divisors names colour {key!r}, which no parameter has"
        if config.color_divisors[key] != config.color_divisors.get(color_key(key), config.color_divisors[key]):
            return f"color_divisors has two divisors of the default colour, under None and {DEFAULT_COLOR}"
    if config.two_hop:
        size = local_world_size(config)
        if size < 1:
            said = os.environ.get("LOCAL_WORLD_SIZE")
            return f"two_hop: local_world_size is None and LOCAL_WORLD_SIZE is {said!r}: give ranks of a node"
        if world % size:
            return f"two_hop: a world of {world} ranks is not divisible by local_world_size {size}"
    return None


def local_world_size(config: MuonShardingConfig) -> int:
    """Ranks of a node; 0: not known."""
    size = config.local_world_size
    if size is None:
        said = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(said) if said.isdecimal() else 0
    return size


def shared_facts(inner: MuonAdamW, config: MuonShardingConfig) -> list[str]:
    """What all ranks of the group must have alike; of colours not the ranks, which may be other ones elsewhere."""
    shown = {name: getattr(config, name) for name in _SHARED_SETTINGS}
    facts = [f"{name}: {value!r}" for name, value in shown.items()]
    facts.append(f"local_world_size: {local_world_size(config) if config.two_hop else None!r}")
    for name, param in inner.named.items():
        color = config.color_of(name)
        facts.append(f"{name}: shape {tuple(param.shape)}, {param.dtype}, {inner.info[name]}, colour {color!r}")
    divisors = {repr(color_key(key)): value for key, value in config.color_divisors.items()}
    return [*facts, f"color_divisors: {sorted(divisors.items())}", f"grad_clip: {_shown(inner.grad_clip)}"]


def agree_or_refuse(
    facts: Sequence[str], problem: Exception | None, group: dist.ProcessGroup | None, device: torch.device | None
) -> None:
    """Raise on all ranks of ``group`` when facts differ or some rank has a problem, there that. Collective."""
    if collectives.group_size(group) > 1:
        facts = facts if problem is None else [f"refused: {problem}"]
        try:
            require_agreement("MuonShardingOptimizer", facts, group=group, device=device or torch.device("cpu"))
        except ValueError as mismatch:
            if problem is not None:
                raise problem from mismatch
            raise
    if problem is not None:
        raise problem


def require_same_groups(
    ranks_of: Mapping[Hashable, tuple[int, ...]], *, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Every rank of a colour's group was given that group: else some would wait in it for others. Collective."""
    lines = [f"colour {key!r} on ranks {list(ranks)}" for key, ranks in ranks_of.items()]
    texts = gather_texts("\n".join(lines), group=group, device=device)
    everyone = collectives.group_ranks(group)
    said = {rank: set(text.split("\n")) for rank, text in zip(everyone, texts, strict=True)}
    for rank in everyone:
        for line in sorted(said[rank]):
            for member in map(int, line.rpartition("[")[2].rstrip("]").split(",")):
                if line not in said.get(member, ()):
                    raise RankMismatchError(
                        f"MuonShardingOptimizer: rank {rank} has {line}, rank {member} does not. Give all ranks of "
                        "a colour's group that group, which must be of ranks of the optimizer's group"
                    )


def _shared_memory(trainable: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Two that have elements in common, one of them trainable; None: there are none.

    Looks only at tensors that fill their memory: others may lie between each other's elements, as columns do.
    """
    found: list[tuple[int, int, str]] = []
    for name, param in (*trainable.items(), *frozen.items()):
        steps = zip(param.shape, param.stride(), strict=True)
        if param.numel() and sum((size - 1) * stride for size, stride in steps) + 1 == param.numel():
            start = param.data_ptr()  # 0: its storage was freed
            found += [(start, start + param.numel() * param.itemsize, name)] if start else []
    last_stop, last_name = 0, ""
    for start, stop, name in sorted(found):
        if start < last_stop and not (name in frozen and last_name in frozen):
            return last_name, name
        if stop > last_stop:
            last_stop, last_name = stop, name
    return None


def _shown(clip: object) -> str:
    """A clip and its settings."""
    settings = {name: value for name, value in vars(clip).items() if name[0] != "_"} if clip is not None else {}
    return f"{type(clip).__name__} {settings}"
