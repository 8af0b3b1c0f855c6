"""``python -m tests.gpu.session JUNIT_DIR``: all tests on the GPUs of this machine, and what they could not cover.

Exit code: pytest's; 1 when no test was run; 2 without a GPU, or what the tests need.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu import needs

TIMEOUT_S = 3600.0
REQUIRED = ("torch", "numpy", "pytest", "pytest_timeout", "xdist", "hypothesis", "msgspec", "psutil", "click", "rich")


def main(junit_directory: str) -> int:
    """Run them; the exit code."""
    lacking = needs.missing(REQUIRED)
    if lacking:
        return _refuse(f"{sys.executable} cannot import {', '.join(lacking)}: {sys.executable} -m pip install -e .")
    try:
        visible = needs.visible_gpus()
    except needs.UnknownGpusError as error:
        return _refuse(f"torch cannot be asked for its GPUs: {error}")
    gpus = visible.names
    if not visible.built_for_cuda:
        return _refuse(
            f"the torch of {sys.executable} was built without CUDA: "
            "give the Python of one that was (NO_VENV=1 PYTHON=...)"
        )
    if not gpus:
        return _refuse("no GPU is visible to torch here: run it where there is one (make test-cpu needs none)")
    worlds = ", ".join(map(str, needs.worlds_of(len(gpus))))
    _say(f"{needs.counted(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(gpus))}): NCCL at world {worlds}")
    junit = Path(junit_directory) / "gpu.xml"
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)  # of another run
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--junit-xml", str(junit)]
    try:
        status = subprocess.run(
            command, env=needs.environment(len(gpus)), check=False, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
        ).returncode
        found = needs.counts(junit)
    except subprocess.TimeoutExpired:
        return _refuse(f"the tests had not ended after {TIMEOUT_S:g} s and were stopped", 1)
    except ValueError as error:
        return _refuse(f"what pytest did is not known: {error}", status or 1)
    status, lines = needs.verdict(found, len(gpus), status)
    _say(*lines)
    return status


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()  # before what pytest writes, and after


def _refuse(sentence: str, status: int = 2) -> int:
    sys.stderr.write(f"test-gpu: {sentence}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
