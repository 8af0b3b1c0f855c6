"""What ranks on a GPU say they compute with, and how the parent puts it together. No GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.drive import accelerator
from harness.evaluate import _together
from harness.launch.rank import RankContext, gpu_of
from harness.launch.tap import CollectiveLog


def context(device: str, backend: str) -> RankContext:
    return RankContext(0, 1, backend, device, Path(), CollectiveLog(), lambda _event: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Has torch tell of a GPU that is not there; the driver's version is to be written into this file."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(accelerator, "_DRIVER", tmp_path / "version")
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "version"


def test_a_rank_on_the_cpu_has_nothing_to_say() -> None:
    assert accelerator.versions(context("cpu", "gloo")) == {}


def test_what_nccl_may_choose_is_told_also_where_nobody_chose(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.write_text("580.1\n")
    monkeypatch.setenv("NCCL_ALGO", "Ring")

    assert accelerator.versions(context("cuda:3", "nccl")) == {
        "cuda": "12.8",
        "driver": "580.1",
        "gpu": "GPU number 3",
        "nccl": "2.27.5",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "unset: NCCL chooses",
    }


def test_ranks_that_do_not_use_nccl_say_nothing_of_it(gpu: Path) -> None:
    found = accelerator.versions(context("cuda:0", "gloo"))

    assert found == {"cuda": "12.8", "driver": "unknown", "gpu": "GPU number 0"}


def test_ranks_are_told_of_together() -> None:
    ranks = [{"cuda": "12.8", "gpu": "L4"}] * 3
    assert _together(ranks) == {"cuda": "12.8", "gpu": "3 x L4"}
    assert _together([*ranks, {"cuda": "12.9", "gpu": "H200"}]) == {
        "cuda": "3 x 12.8, 1 x 12.9",
        "gpu": "3 x L4, 1 x H200",
    }
    assert _together([{}, {}]) == {}


@pytest.mark.parametrize(
    ("backend", "num_gpus", "place", "expected"),
    [
        ("nccl", 4, (3, 4), 3),
        ("nccl", 2, (0, 4), "at least 4 GPUs are needed, torch.cuda.device_count() is 2"),
        ("gloo", 1, (3, 4), 0),
        ("gloo", 2, (3, 4), 1),
        ("gloo", 0, (0, 1), "at least 1 GPUs are needed, torch.cuda.device_count() is 0"),
    ],
)
def test_each_rank_has_the_gpu_of_its_place(backend: str, num_gpus: int, place: tuple[int, int], expected: Any) -> None:
    environment = {"LOCAL_RANK": str(place[0]), "LOCAL_WORLD_SIZE": str(place[1])}
    if isinstance(expected, int):
        assert gpu_of(backend, num_gpus, environment) == expected
        return
    with pytest.raises(RuntimeError) as raised:
        gpu_of(backend, num_gpus, environment)
    assert expected in str(raised.value)


def test_a_thread_of_a_simulated_rank_has_its_device_and_its_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    enabled = torch._C._is_multithreading_enabled
    assert enabled()
    with accelerator.on_thread("cpu"):
        assert enabled()
    with accelerator.on_thread("cuda:3"):
        assert not enabled()
    assert enabled()
    assert chosen == [3]


def test_products_are_summed_in_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Products:
        allow_bf16_reduced_precision_reduction = True

    monkeypatch.setattr(torch.backends.cuda, "matmul", Products)
    accelerator.prepare("cpu")
    assert Products.allow_bf16_reduced_precision_reduction
    accelerator.prepare("cuda:0")
    assert not Products.allow_bf16_reduced_precision_reduction
