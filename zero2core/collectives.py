"""The only module of the package that calls ``torch.distributed``.

Functions are looked up on ``torch.distributed`` at each call, so whoever replaces one there (a test, a profiler) sees
every collective of this package. torch 2.13 renamed the tensor forms: ``reduce_scatter_single`` and
``all_gather_single`` are used where they exist, else ``reduce_scatter_tensor`` and ``all_gather_into_tensor``.

Tensors must be contiguous: gloo reads a strided view as the first elements of its storage, without an error.
A wait is bounded by the group's own time-out.
"""

from __future__ import annotations

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
    "group_device",
    "group_rank",
    "group_world",
    "reduce_scatter",
]


class Collective(NamedTuple):
    """One collective as a rank issues it.

    Attributes:
        kind: ``reduce_scatter``, ``all_gather``, ``all_reduce`` or ``broadcast``.
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


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in ``group``, -1 outside it."""
    return dist.get_rank(group)


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors ``group`` can communicate: the accelerator where it serves one, else the CPU."""
    # By device and not by the backend's name, which can be "cpu:gloo,cuda:nccl" or "undefined".
    served = {entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in served:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def reduce_scatter(output: Tensor, source: Tensor, *, group: dist.ProcessGroup | None) -> Work:
    """Start summing ``source`` (world times the length of ``output``) over ranks; rank r gets the r-th part.

    Asynchronous: neither tensor may be touched before ``wait()``.
    """
    _require_contiguous(output, source)
    function = _named("reduce_scatter_single", "reduce_scatter_tensor")
    work: Work = function(output, source, op=dist.ReduceOp.SUM, group=group, async_op=True)
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
