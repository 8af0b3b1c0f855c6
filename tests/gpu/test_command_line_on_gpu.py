"""The command line on a machine with a GPU, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def harness(*arguments: str, cwd: Path, timeout_s: float = 240.0) -> tuple[int, dict[str, Any], str]:
    """The exit code, the JSON, and what was written beside it."""
    command = [sys.executable, "-m", "harness", *arguments, "--json", "-"]
    run = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
    )
    return run.returncode, json.loads(run.stdout) if run.stdout else {}, run.stderr


def test_verify_on_nccl(tmp_path: Path) -> None:
    code, result, said = harness("verify", "--backend", "nccl", "--world", "1", "--examples", "12", cwd=tmp_path)
    assert code == 0, said
    assert (result["backend"], result["device"]) == ("nccl", "cuda")
    assert result["versions"]["nccl"].count(".") == 2


def test_more_ranks_than_gpus_are_refused_in_one_line(tmp_path: Path) -> None:
    code, _, said = harness("verify", "--backend", "nccl", "--world", "200", cwd=tmp_path)
    assert code == 2
    assert "world 200 needs 200 GPUs" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "where",
    [
        ("--device", "cuda", "--world", "2,3"),
        pytest.param(("--backend", "nccl", "--world", "2"), marks=pytest.mark.gpus(2)),
        pytest.param(("--backend", "nccl", "--world", "2,3,4"), marks=pytest.mark.gpus(4)),
    ],
)
def test_doctor_finds_what_verdicts_rest_on(where: tuple[str, ...], tmp_path: Path) -> None:
    code, result, said = harness("doctor", *where, cwd=tmp_path)
    findings = {each["name"]: each for each in result["findings"]}
    assert code == 0, said + json.dumps([each for each in findings.values() if each["verdict"] != "ok"], indent=1)
    for name in ("AdamW foreach=False", "AdamW modes", "AdamW on CPU and GPU", "rounding to bf16", "subnormals"):
        assert findings[name]["verdict"] in ("ok", "note"), findings[name]


def test_a_case_that_was_found_on_the_gpu_is_replayed_there(tmp_path: Path) -> None:
    subject = f"{Path(__file__).parent / 'subjects.py'}:WrongLastBit"
    code, result, said = harness(
        "verify", "--device", "cuda", "--subject", subject, "--world", "1", "--examples", "3", cwd=tmp_path
    )
    assert code == 1, said
    words = result["failure"]["replay"].split()[3:]
    assert words[-2:] == ["--device", "cuda"]
    code, again, said = harness(*words, cwd=tmp_path)
    assert code == 1, said
    assert again["device"] == "cuda"
