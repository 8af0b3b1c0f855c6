"""What `make lint` asks of workflows, Dockerfiles and pins: this repository has it, and each rule is broken once.

A workflow cannot be tried without GitHub, so a rule that says nothing would not be missed until a night is lost.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci import check

ROOT = Path(__file__).parents[2]
CPU = ".github/workflows/cpu.yml"
GPU = ".github/workflows/gpu.yml"
GATE = ".github/workflows/gpu-gate.yml"
FUZZ = ".github/workflows/fuzz.yml"
DO_CPU, DO_FUZZ, KEEP = (f"ci/{name}/action.yml" for name in ("cpu", "fuzz", "keep"))
ALWAYS = "expected `if: always()`"


@pytest.fixture(scope="module")
def usual() -> frozenset[str]:
    return frozenset(check.complaints(ROOT))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the rules look at."""
    for name in (".github", "ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", ".dockerignore"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_this_repository_keeps_its_rules(usual: frozenset[str]) -> None:
    assert not usual


def test_a_copy_is_judged_like_the_repository(copy: Path, usual: frozenset[str]) -> None:
    assert frozenset(check.complaints(copy)) == usual


BROKEN = [
    # Of workflows: the file itself, rights, and what strangers may do.
    (CPU, "jobs:", "jobs: [", "no YAML"),
    (CPU, "name: cpu\n", "name: cpu\nname: other\n", "the key 'name' is there twice"),
    (CPU, "jobs:\n", "works:\n", "neither a workflow with jobs nor an action"),
    (CPU, "permissions:\n  contents: read\n", "", "expected `permissions: {contents: read}`"),
    (CPU, "contents: read", "contents: write", "expected `permissions: {contents: read}`"),
    (CPU, "    runs-on:", "    permissions: write-all\n    runs-on:", "job test: `permissions` are those of"),
    (CPU, "  pull_request:", "  pull_request_target:", "the trigger pull_request_target runs with the rights"),
    (CPU, "  pull_request:", "  workflow_run:", "the trigger workflow_run runs with the rights"),
    (CPU, "    timeout-minutes: 45\n", "", "job test: expected `timeout-minutes`"),
    (CPU, "  cancel-in-progress: true\n", "", "expected `concurrency` with `group` and `cancel-in-progress`"),
    (GPU, "jobs:", "concurrency: {group: a, cancel-in-progress: true}\njobs:", "it would wait for its own caller"),
    (CPU, "    env:\n", "    env:\n      TOKEN: ${{ secrets.TOKEN }}\n", "no job here needs `secrets`"),
    (CPU, "runs-on: ubuntu-24.04", "runs-on: self-hosted", "job test: pull requests run on machines of one's own"),
    (GATE, "github.event.action == 'labeled' &&", "true &&", "job gpu: pull requests run on machines of one's own"),
    (CPU, "          persist-credentials: false", "          fetch-depth: 0", "expected `persist-credentials: false`"),
    # Of what they name.
    (CPU, "matrix.constraints", "matrix.pins", "`matrix.pins`: the matrix has no such column"),
    (FUZZ, "inputs.minutes", "inputs.hours", "`inputs.hours`: there is no such input"),
    (FUZZ, "uses: ./ci/fuzz", "uses: ./ci/fuz", "there is no such workflow or action"),
    (GATE, "workflows/gpu.yml\n", "workflows/cpu.yml\n", "has no trigger `workflow_call`"),
    (GATE, "      runner:", "      machine:", "takes no input 'machine'"),
    (FUZZ, "          minutes:", "          # minutes:", "the input 'minutes' is missing"),
    (DO_CPU, "make test-cpu", "make test-all", "no make target 'test-all'"),
    (DO_CPU, "make test-cpu", "pytest tests", "expected one make target"),
    (DO_CPU, "make test-cpu", "make test-cpu && rm -rf build", "expected one make target"),
    (DO_CPU, "make verify", "make verify VERIFY=${{ inputs.name }}", "expected one make target"),
    (DO_CPU, "make test-cpu", "make test-cpu verify typo", "no make target 'typo'"),
    (FUZZ, "matrix.subject }}\n    runs-on", "matrx.subject }}\n    runs-on", "got 'matrx'"),
    (KEEP, "name: ${{ inputs.name }}", "name: ${{ steps.none.outputs.name }}", "got 'steps'"),
    (FUZZ, "  museum:\n", "  museum:\n    if: env.CONSTRAINTS != ''\n", "`if` of a job cannot see `env`"),
    (DO_FUZZ, "MINUTES:", "MINUTE:", "MINUTE: the Makefile has no such variable"),
    (CPU, "CONSTRAINTS: ", "CONSTRAINT: ", "CONSTRAINT: the Makefile has no such variable"),
    # Of the order and the end of runs.
    (DO_CPU, "make test-cpu\n", "make test-cpu\n      continue-on-error: true\n", "must make the job red"),
    (FUZZ, "actions/checkout@", "actions/setup-python@", "expected actions/checkout before it"),
    (CPU, "group: cpu-${{ github.ref }}", "group: cpu", "expected a group by `github.ref`"),
    (FUZZ, "cancel-in-progress: false", "cancel-in-progress: true", "what runs for hours is not cut short"),
    # Of code of others.
    (CPU, "5f5447ce83dd # v6.0.2", "5f5447ce83dd", "expected the version of this commit behind it"),
    (CPU, "@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2", "@v6 # v6", "expected a full commit"),
    (CPU, "@de0fac2e4500dabe0009e67214ff5f5447ce83dd", "@de0fac2", "expected a full commit"),
    # Of what is kept.
    (KEEP, '"$GITHUB_STEP_SUMMARY"\n      if: always()', '"$GITHUB_STEP_SUMMARY"', ALWAYS),
    (KEEP, "make regressions\n      if: always()", "make regressions", ALWAYS),
    (KEEP, "# v7.0.0\n      if: always()", "# v7.0.0\n      if: success()", ALWAYS),
    (DO_FUZZ, "# v5.0.3\n      if: always()", "# v5.0.3", ALWAYS),
    (DO_CPU, "    - uses: ./ci/keep\n      if: always()", "    - uses: ./ci/keep", ALWAYS),
    (DO_FUZZ, "uses: ./ci/keep", "uses: ./ci/cpu", "what make finds is lost"),
    (DO_FUZZ, "-${{ github.run_id }}-${{ github.run_attempt }}", "", "no cache is replaced"),
    (DO_FUZZ, "        restore-keys: fuzz-${{ inputs.subject }}-\n", "", "expected a step that restores its path"),
    (DO_FUZZ, "restore-keys: fuzz-", "restore-keys: fuzzy-", "expected a step that restores its path"),
    (CPU, "name: py${{ matrix.python }}-torch${{ matrix.torch }}", "name: tests", "same name in each cell"),
    (DO_FUZZ, "name: fuzz-${{ inputs.subject }}\n", "name: fuzz\n", "same name in each cell"),
    # Of pins, and of the matrix that uses them.
    (CPU, 'python: "3.11"', 'python: "3.12"', "the oldest python is 3.12, pyproject.toml promises 3.11"),
    (CPU, 'torch: "2.11"', 'torch: "2.12"', "the oldest torch is 2.12, pyproject.toml promises 2.11"),
    ("pyproject.toml", '"torch>=2.11"', '"torch>=2.10"', "the oldest torch is 2.11, pyproject.toml promises 2.10"),
    ("pyproject.toml", 'requires-python = ">=3.11"', 'requires-python = ">=3.12"', "pyproject.toml promises 3.12"),
    ("pyproject.toml", 'requires-python = ">=3.11"', 'requires-python = ">=3.12"', "Python 3.11: pyproject"),
    (CPU, 'torch: "2.13"', 'torch: "2.1"', "torch 2.1 is called for, ci/constraints-cpu.txt pins 2.13.0"),
    (CPU, "ci/constraints-cpu-torch-2.11.txt", "ci/constraints-old.txt", "pins none, for there is no such file"),
    (CPU, "ci/constraints-cpu.txt", "ci/constraints-cpu-torch-2.11.txt", "no cell uses ci/constraints-cpu.txt"),
    (CPU, "        include:", "        others:", "expected a matrix whose cells have python, torch and constraints"),
    (GPU, "CONSTRAINTS: ci/constraints-cuda.txt", "CONSTRAINTS: ci/pins.txt", "ci/pins.txt: no such file"),
    ("ci/constraints-cuda.txt", "numpy==2.4.6", "numpy==2.4.5", "numpy is 2.4.5, in ci/constraints-cpu.txt 2.4.6"),
    ("ci/constraints-cuda.txt", "torch==2.11.0", "torch>=2.11.0", "expected NAME==VERSION"),
    ("ci/constraints-cuda.txt", "torch==2.11.0", "torch==2.10.0", "is not what pyproject.toml asks for"),
    ("ci/constraints-cpu.txt", "PyYAML==6.0.4\n", "", "PyYAML of pyproject.toml is not pinned"),
    # Of Dockerfiles.
    ("ci/Dockerfile.cpu", "@sha256:", "@sha512:", "expected NAME:TAG@sha256:DIGEST"),
    ("ci/Dockerfile.cuda", "FROM nvidia/cuda:12.8.1-base-ubuntu24.04@", "FROM nvidia/cuda@", "expected NAME:TAG"),
    ("ci/Dockerfile.cpu", "FROM python", "USER python", "expected one FROM"),
    ("ci/Dockerfile.cpu", "COPY ci/constraints-cpu.txt", "COPY ci/pins.txt", "COPY ci/pins.txt: no such file"),
    ("ci/Dockerfile.cpu", "COPY ci/constraints-cpu.txt", "COPY Makefile", ".dockerignore leaves it out"),
    ("ci/Dockerfile.cpu", '"make", "test-cpu"', '"make", "test"', "no make target 'test'"),
    ("ci/Dockerfile.cpu", "WORKDIR /work", "WORKDIR /work\nRUN make setup build", "no make target 'build'"),
    ("ci/Dockerfile.cpu", "ENV NO_VENV=1\n", "", "expected ENV NO_VENV=1"),
    # Of scripts.
    ("ci/test-cpu", "-n 3 --max-worker-restart=0 \\\n", "-n 3 \\\n", "ci/test-cpu: expected --max-worker-restart=0"),
    ("Makefile", "verify: $(READY) ##", "verify: $(READY) #", "no make target 'verify'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "right", "wrong", "expected"), BROKEN, ids=[f"{number}-{each[0]}" for number, each in enumerate(BROKEN)]
)
def test_each_rule_is_seen_broken(
    copy: Path, usual: frozenset[str], file: str, right: str, wrong: str, expected: str
) -> None:
    text = (copy / file).read_text()
    assert right in text
    (copy / file).write_text(text.replace(right, wrong))
    new = frozenset(check.complaints(copy)) - usual
    assert any(expected in complaint for complaint in new), new


def test_a_repository_without_workflows_is_told(copy: Path) -> None:
    shutil.rmtree(copy / ".github")
    assert any("no workflow found" in complaint for complaint in check.complaints(copy))


def test_a_version_instead_of_a_commit_needs_its_reason(copy: Path, usual: frozenset[str]) -> None:
    text = (copy / CPU).read_text()
    changed = re.sub(r"actions/checkout@\w+ # v6.0.2", "actions/checkout@v6.0.2 # by version: no commit is known", text)
    assert changed != text
    (copy / CPU).write_text(changed)
    assert frozenset(check.complaints(copy)) == usual


def test_what_is_listed_by_make_help_is_what_there_is() -> None:
    makefile = (ROOT / "Makefile").read_text()
    [phony] = re.findall(r"(?m)^\.PHONY: (.*)$", makefile)
    assert check.targets_of(makefile) == set(phony.split())


def test_github_s_own_schema_is_held_against_them(copy: Path) -> None:
    """By the same command as ci/lint's: a misspelt key is no workflow, and nothing else here would see it."""
    text = (copy / CPU).read_text()
    broken = copy / CPU
    broken.write_text(text.replace("timeout-minutes: 45", "timeout-minuets: 45"))
    lint = (ROOT / "ci" / "lint").read_text()
    options = "check_jsonschema --builtin-schema vendor.github-workflows"
    assert f"{options} .github/workflows/*.yml" in lint
    assert "$run ci.check ||" in lint
    command = [sys.executable, "-m", *options.split(), str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "'timeout-minuets' was unexpected" in done.stdout + done.stderr
