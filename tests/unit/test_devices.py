"""Where ranks keep their tensors: what the command line takes, what ranks are started with, what is printed again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import inputs
from harness.canary import scenario
from harness.errors import UsageError
from harness.evaluate import Evaluator
from harness.failures import pasted_test, replay_command
from harness.launch import process
from harness.launch.pool import RankPool
from harness.launch.spread import SpreadPool
from harness.oracles.order import UNKNOWN
from harness.runner import CampaignOptions
from harness.scenario import codec
from harness.subjects.source import SubjectSource


@pytest.mark.parametrize(
    ("backend", "given", "expected"),
    [
        ("gloo", None, "cpu"),
        ("sim", None, "cpu"),
        ("nccl", None, "cuda"),
        ("gloo", "cuda", "cuda"),
        ("sim", "cuda", "cuda"),
        ("nccl", "cuda", "cuda"),
        ("gloo", "cpu", "cpu"),
    ],
)
def test_the_device_goes_with_the_backend_unless_it_is_given(backend: str, given: str | None, expected: str) -> None:
    assert inputs.chosen_device(backend, given) == expected


def test_nccl_on_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cpu: nccl moves tensors of GPUs only"):
        inputs.chosen_device("nccl", "cpu")
    with pytest.raises(ValueError, match="NCCL moves CUDA tensors only"):
        RankPool("a:b", backend="nccl", device="cpu")


def test_a_rank_on_a_gpu_is_never_forked() -> None:
    with pytest.raises(ValueError, match="CUDA does not survive a fork"):
        RankPool("a:b", device="cuda", start="fork")
    with pytest.raises(ValueError, match="device='tpu'"):
        RankPool("a:b", device="tpu")


def test_ranks_on_the_cpu_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    assert process.pool_environment({})["CUDA_VISIBLE_DEVICES"] == ""
    assert process.pool_environment({}, "cuda")["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert process.pool_environment({"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says what a torch in another process would answer: whether it has NCCL, and its number of GPUs."""

    def answer(text: str) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))

    return answer


@pytest.mark.parametrize(
    ("backend", "device", "answer", "worlds", "refusal"),
    [
        ("gloo", "cuda", "0 0", (1,), "--device cuda: no GPU is visible"),
        ("sim", "cuda", "0 0", (1,), "--device cuda: no GPU is visible"),
        ("gloo", "cuda", "0 1", (1, 2), None),
        ("sim", "cuda", "0 1", (1, 4), None),
        ("nccl", "cuda", "0 4", (1,), "--backend nccl: this torch was built without NCCL"),
        ("nccl", "cuda", "1 1", (1, 2), "world 2 needs 2 GPUs, one a rank, but 1 GPU is visible"),
        ("nccl", None, "1 0", (1,), "world 1 needs 1 GPUs, one a rank, but no GPU is visible"),
        ("nccl", "cuda", "1 4", (1, 2, 4), None),
    ],
)
def test_gpus_are_asked_for_where_they_are_needed(
    backend: str,
    device: str | None,
    answer: str,
    worlds: tuple[int, ...],
    refusal: str | None,
    visible: Callable[[str], None],
) -> None:
    visible(answer)
    if refusal is None:
        inputs.check_backend(backend, worlds, device)
        return
    with pytest.raises(UsageError) as raised:
        inputs.check_backend(backend, worlds, device)
    assert refusal in str(raised.value)


def test_nobody_is_asked_for_gpus_that_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    inputs.check_backend("gloo", (1, 2), "cpu")
    inputs.check_backend("sim", (1, 2))


@pytest.mark.parametrize(
    ("backend", "device", "words", "keywords"),
    [
        ("gloo", None, "", ""),
        ("gloo", "cpu", "", ""),
        ("nccl", "cuda", "--backend nccl", ""),
        ("gloo", "cuda", "--device cuda", "device='cuda'"),
        ("sim", "cuda", "--backend sim --device cuda", "device='cuda'"),
    ],
)
def test_what_a_failure_tells_to_run_is_on_the_same_device(
    backend: str, device: str | None, words: str, keywords: str
) -> None:
    options = CampaignOptions(
        subject=SubjectSource("zero2", "zero2"),
        worlds=(2,),
        backend=backend,
        seed=1,
        examples=1,
        seconds=None,
        bucket=None,
        parameters=None,
        report=Path(),
        timeout_s=None,
        device=device,
    )
    command = replay_command(options, Path("case.json"), name_subject=False)
    assert command == " ".join(filter(None, ["python -m harness replay case.json", words]))

    text = pasted_test(options, codec.Case(scenario(2)), None)
    assert text is not None
    assert keywords in text
    assert ("device=" in text) is bool(keywords)


def test_a_process_told_of_no_gpu_finds_none() -> None:
    """What torch makes of an empty CUDA_VISIBLE_DEVICES; on a machine with GPUs this is more than on one without."""
    environment = {**os.environ, **process.pool_environment({})}
    command = [process.command("x", [], 0)[0], "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120)
    assert answer.stdout.split() == ["0"]


@pytest.mark.parametrize(("backend", "searches"), [("nccl", True), ("gloo", False)])
@pytest.mark.parametrize("kind", [RankPool, SpreadPool])
def test_whoever_drives_ranks_on_nccl_expects_no_order(
    kind: type[RankPool | SpreadPool], backend: str, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = object.__new__(kind)  # no process is started
    monkeypatch.setattr(pool, "backend", backend, raising=False)
    task = Evaluator(SubjectSource("zero2", "zero2"), pool)._task(scenario(3))
    assert (task.rule == UNKNOWN, task.exchanges) == (searches, searches)
