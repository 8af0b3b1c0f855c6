"""A rank's GPU: how it is used, and what a rank computes with (CUDA, the driver, NCCL and what that was told)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from harness.launch.rank import RankContext

UNSET = "unset: NCCL chooses"
"""Of a variable of NCCL's that nobody has set. It then chooses call by call, by length, world and wiring."""

_CHOICES = ("NCCL_ALGO", "NCCL_PROTO")
_DRIVER = Path("/sys/module/nvidia/version")


def versions(context: RankContext) -> dict[str, str]:
    """By name; nothing of a rank on the CPU."""
    device = torch.device(context.device)
    if device.type != "cuda":
        return {}
    found = {
        "cuda": str(torch.version.cuda),
        "driver": _driver(),
        "gpu": torch.cuda.get_device_name(device),
    }
    if context.backend == "nccl":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found.update({name: os.environ.get(name) or UNSET for name in _CHOICES})
    return found


def prepare(device: str) -> None:
    """Have products of bf16 matrices on a GPU summed in fp32: the bound that they are held against is one of that."""
    if device != "cpu":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def on_thread(device: str) -> Iterator[None]:
    """In a thread that is one rank of several in this process: its device is the current one, and its backward its own.

    torch would call the hooks of all ranks on one thread for each GPU: a rank that waits there for the others would
    keep them from ever coming.
    """
    if device == "cpu":
        yield
        return
    torch.accelerator.set_device_index(torch.device(device).index)  # each thread has a current one
    with torch.autograd.set_multithreading_enabled(False):
        yield


def _driver() -> str:
    try:
        return _DRIVER.read_text().strip()
    except OSError:
        return "unknown"
