"""The only module of the package that calls ``torch.distributed``.

Functions are looked up on ``torch.distributed`` at each call, so whoever replaces one there (a test, a profiler) sees
every collective of this package. torch 2.13 renamed the tensor forms: ``reduce_scatter_single`` and
``all_gather_single`` are used where they exist, else ``reduce_scatter_tensor`` and ``all_gather_into_tensor``.

Tensors must be contiguous: gloo reads a strided view as the first elements of its storage, without an error.
A wait is bounded by the group's own time-out.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Collective",
    "Work",
    "all_gather",
    "all_reduce_max",
    "all_reduce_sum",
    "broadcast",
    "default_group",
    "group_device",
    "group_rank",
    "group_ranks",
    "group_size",
    "group_world",
    "has_average",
    "launch_broadcast",
    "reduce",
    "reduce_scatter",
    "served_devices",
    "subgroup",
]


class Collective(NamedTuple):
    """One collective as a rank issues it.

    Attributes:
        kind: ``reduce_scatter``, ``all_gather``, ``all_reduce``, ``broadcast`` or ``reduce``.
        dtype: of the tensor that is handed in.
        length: elements of the tensor that is handed in (what this rank contributes).
    """

    kind: str
    dtype: torch.dtype
    length: int


class Work(Protocol):
    """Handle of a collective in flight."""

    def wait(self) -> object:
        """Block until the result may be used: on CPU the host, on CUDA the current stream."""


def group_world(group: dist.ProcessGroup | None) -> int | None:
    """Number of ranks of ``group`` (None: the default group), -1 outside it; None where no default group exists."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_world_size(group)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks that work together with this one: 1 also outside ``group``, and where no default group exists."""
    return max(group_world(group) or 1, 1)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in ``group``, -1 outside it."""
    return dist.get_rank(group)


def default_group() -> dist.ProcessGroup:
    """The default process group; ``ValueError`` where there is none."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        raise ValueError("there is no default process group: call torch.distributed.init_process_group first")
    return group


def served_devices(group: dist.ProcessGroup | None) -> frozenset[str]:
    """Types of the devices whose tensors ``group`` can communicate."""
    # By device and not by the backend's name, which can be "cpu:gloo,cuda:nccl" or "undefined".
    return frozenset(entry.split(":")[0] for entry in dist.get_backend_config(group).split(","))


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors ``group`` can communicate: the accelerator where it serves one, else the CPU."""
    served = served_devices(group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in served:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def group_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of ``group``, as the default group counts them, in the group's order; none outside it."""
    if group_world(group) in (None, -1):
        return ()
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def has_average(group: dist.ProcessGroup | None) -> bool:
    """Whether the backend of ``group`` averages in a collective (``ReduceOp.AVG``): NCCL; gloo from torch 2.13 on."""
    backends = {entry.rpartition(":")[2] for entry in dist.get_backend_config(group).split(",")}
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return backends <= ({"nccl", "gloo"} if version >= (2, 13) else {"nccl"})


# Groups are dear (threads, connections) and live as long as the default group: made once for the same ranks. By the
# default group, which in a process that ended one and made another is not the same.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def subgroup(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks of the default group; collective over *all* of its ranks, in one order on each.

    Made at the first call for these ranks, and given again at later ones.
    """
    default = default_group()
    made = _subgroups.setdefault(default, {})
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks))
    return made[ranks]


def reduce_scatter(output: Tensor, source: Tensor, *, group: dist.ProcessGroup | None, average: bool = False) -> Work:
    """Start summing ``source`` (world times the length of ``output``) over ranks; rank r gets the r-th part.

    Asynchronous: neither tensor may be touched before ``wait()``. ``average``: the mean, where :func:`has_average`.
    """
    _require_contiguous(output, source)
    function = _named("reduce_scatter_single", "reduce_scatter_tensor")
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    work: Work = function(output, source, op=op, group=group, async_op=True)
    return work


def reduce(tensor: Tensor, *, dst: int, group: dist.ProcessGroup | None, average: bool = False) -> Work:
    """Start summing ``tensor`` over ranks into that of rank ``dst``, counted within ``group``.

    Asynchronous. On all other ranks the tensor holds garbage afterwards. ``average``: see :func:`reduce_scatter`.
    """
    _require_contiguous(tensor)
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    work: Work = dist.reduce(tensor, op=op, group=group, async_op=True, group_dst=dst)
    return work


def all_gather(output: Tensor, source: Tensor, *, group: dist.ProcessGroup | None) -> Work:
    """Start putting the ``source`` of every rank end to end, in rank order, into ``output`` on every rank.

    Asynchronous: neither tensor may be touched before ``wait()``.
    """
    _require_contiguous(output, source)
    function = _named("all_gather_single", "all_gather_into_tensor")
    work: Work = function(output, source, group=group, async_op=True)
    return work


def all_reduce_sum(tensor: Tensor, *, group: dist.ProcessGroup | None) -> None:
    """Sum ``tensor`` over ranks, in place."""
    _require_contiguous(tensor)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)


def all_reduce_max(tensor: Tensor, *, group: dist.ProcessGroup | None) -> None:
    """Largest value of ``tensor`` over ranks, element by element, in place."""
    _require_contiguous(tensor)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def broadcast(tensor: Tensor, *, src: int, group: dist.ProcessGroup | None) -> None:
    """Overwrite ``tensor`` with that of rank ``src``, counted within ``group``."""
    _require_contiguous(tensor)
    dist.broadcast(tensor, group=group, group_src=src)


def launch_broadcast(tensor: Tensor, *, src: int, group: dist.ProcessGroup | None) -> Work:
    """Start overwriting ``tensor`` with that of rank ``src``, counted within ``group``. Asynchronous."""
    _require_contiguous(tensor)
    work: Work = dist.broadcast(tensor, group=group, async_op=True, group_src=src)
    return work


def _named(new: str, old: str) -> Any:  # noqa: ANN401 (torch declares neither)
    """The tensor form of a collective under the name this torch gives no warning for."""
    return getattr(dist, new, None) or getattr(dist, old)


def _require_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a collective needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: communicate tensor.contiguous() and copy the result back"
            )
