"""What tests on GPUs need, what a machine can run of them, and the sentences that say so. No torch is imported here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

WORLDS = (1, 2, 3, 4, 8)
"""Numbers of ranks on NCCL for which there are tests."""

_QUESTION = """
import torch
print("cuda:", torch.version.cuda)
print("gpus:", *[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], sep="\\n")
"""
_ANSWER_S = 120.0


class Visible(NamedTuple):
    """What torch sees: whether it was built for CUDA, and the names of GPUs."""

    built_for_cuda: bool
    names: tuple[str, ...]


class UnknownGpusError(Exception):
    """torch could not be asked for its GPUs, and why."""


def visible_gpus(python: str = sys.executable) -> Visible:
    """The GPUs that torch sees, asked in a process of its own: this one must be able to do without CUDA.

    Raises:
        UnknownGpusError: it did not answer.
    """
    try:
        answer = subprocess.run(
            [python, "-P", "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        raise UnknownGpusError(str((said or [error])[-1])) from error
    lines = answer.stdout.splitlines()  # an import may print lines of its own before
    return Visible("cuda: None" not in lines, tuple(lines[lines.index("gpus:") + 1 :]))


def worlds_of(num_gpus: int) -> tuple[int, ...]:
    """Of :data:`WORLDS`, those that have a GPU for each rank."""
    return tuple(world for world in WORLDS if world <= num_gpus)


def reason(needed: int, num_gpus: int) -> str:
    """Why a test is skipped."""
    return f"needs {counted(needed, 'GPU')}, this machine has {num_gpus}"


def counted(number: int, noun: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def not_covered(skipped: Mapping[int, int], num_gpus: int) -> str:
    """The line that says what was not run: ``skipped`` tests by the number of GPUs they need."""
    needs = [(needed, number) for needed, number in sorted(skipped.items()) if number]
    if not needs:
        return "covered: every test had the GPUs it needs"
    (first, number), *others = needs
    parts = [f"{counted(number, 'test')} {'needs' if number == 1 else 'need'} {counted(first, 'GPU')}"]
    parts += [f"{number} {'needs' if number == 1 else 'need'} {needed}" for needed, number in others]
    return f"not covered: {', '.join(parts)}; this machine has {num_gpus}"


class Counts(NamedTuple):
    """Of one run: tests that were run, and those that were not by how many GPUs they need; None: for another reason."""

    run: int
    skipped: Counter[int | None]


def counts(junit: Path) -> Counts:
    """What a JUnit file says of a run.

    Raises:
        ValueError: it is none.
    """
    try:
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{junit} cannot be read: {error}") from error
    skipped: Counter[int | None] = Counter()
    for case in cases:
        for found in case.iter("skipped"):
            skipped[_needed(found.get("message") or "")] += 1
    return Counts(len(cases) - skipped.total(), skipped)


def _needed(message: str) -> int | None:
    words = message.split()
    return int(words[1]) if message.startswith("needs ") and words[1].isdigit() else None


def verdict(found: Counts, num_gpus: int, status: int) -> tuple[int, list[str]]:
    """The exit code of a run whose pytest ended with ``status``, and its last lines. A run of no test is a failure."""
    by_gpus = {needed: number for needed, number in found.skipped.items() if needed is not None}
    lines = [f"{counted(found.run, 'test')} run on {counted(num_gpus, 'GPU')}", not_covered(by_gpus, num_gpus)]
    if found.skipped[None]:
        lines.append(f"skipped for other reasons: {found.skipped[None]}")
        status = status or 1
    if not found.run:
        lines.append("no test was run: nothing was shown")
        status = status or 1
    return status, lines


def missing(packages: Iterable[str]) -> list[str]:
    """Those of these modules that this interpreter does not have."""
    from importlib.util import find_spec

    return [name for name in packages if find_spec(name) is None]


def environment(num_gpus: int) -> dict[str, str]:
    """Of the tests: what was found here need not be asked again."""
    return {**os.environ, GPUS: str(num_gpus)}


GPUS = "ZERO2_VISIBLE_GPUS"
"""Variable that holds the number of GPUs, for the tests of a session that has counted them."""
