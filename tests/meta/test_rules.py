"""Rules of the project that no linter knows, held as tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
from tests.subjects.catalogue import BROKEN

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("zero2core/**/*.py"), *ROOT.glob("harness/**/*.py")])


def _imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it, as dotted names (``from a import b`` gives ``a`` and ``a.b``)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _title(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", sorted(ROOT.glob("harness/oracles/*.py")), ids=_title)
def test_an_oracle_never_communicates(path: Path) -> None:
    """The contracts of import-linter cannot name a part of an external package."""
    assert not [name for name in _imports(path) if name.startswith("torch.distributed")]


def _calls_of(name: str, tree: ast.AST) -> Iterator[str]:
    """What is called of a module that is known as ``name``, however deep in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.startswith(f"{name}."):
                yield called


@pytest.mark.parametrize("path", sorted(ROOT.glob("zero2core/**/*.py")), ids=_title)
def test_one_module_of_the_core_calls_torch_distributed(path: Path) -> None:
    """Others name its types. What writes files (``torch.distributed.checkpoint``) is called by who uses the core."""
    tree, imported = ast.parse(path.read_text()), set(_imports(path))
    calls = [*_calls_of("dist", tree), *_calls_of("torch.distributed", tree)]
    if path == ROOT / "zero2core" / "collectives.py":
        assert calls
        return
    assert not calls
    # DTensor, meshes and FSDP2 are torch's own systems: strategies put them to use, the clip looks into a DTensor.
    allowed = {"checkpoint"}
    if path.parent.name == "strategies":
        allowed |= {"fsdp", "device_mesh", "tensor"}
    elif path.name == "clipping.py":
        allowed |= {"tensor"}
    parts = {name.removeprefix("torch.distributed.") for name in imported if name.startswith("torch.distributed.")}
    assert {name.split(".")[0] for name in parts} <= allowed


@pytest.mark.parametrize("path", [path for path in SOURCES if "museum" not in path.parts], ids=_title)
def test_no_module_imports_a_private_name_of_ours(path: Path) -> None:
    """Exhibits of the museum do: they are a system with one thing in it changed."""
    ours = [name for name in _imports(path) if name.split(".")[0] in ("harness", "zero2core")]
    assert not [name for name in ours if any(part[0] == "_" and part != "__main__" for part in name.split("."))]


def test_few_modules_draw_with_hypothesis() -> None:
    """Ranks must not depend on Hypothesis, and the handling of its seed is in two places."""
    importers = {_title(path) for path in SOURCES if any(name.split(".")[0] == "hypothesis" for name in _imports(path))}
    assert importers == {
        "harness/scenario/generate.py",
        "harness/fuzz/machine.py",
        "harness/fuzz/rounds.py",
        "harness/profiles.py",
    }


@pytest.mark.parametrize("path", SOURCES, ids=_title)
def test_checks_survive_python_o(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize(
    "module",
    [
        "harness.cli",
        "harness.runner",
        "harness.launch.pool",
        "harness.sim.pool",
        "harness.train.campaign",
        "harness.doctor.examination",
        "harness.bench.campaign",
        "harness.bench.muon.campaign",
        "harness.balance.owners",
        "harness.soak.campaign",
        "harness.fuzz.rounds",
        "harness.museum.campaign",
    ],
)
def test_the_waiting_process_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_every_directory_of_tests_is_run_by_make_test_cpu_or_make_stress() -> None:
    script = (ROOT / "ci" / "test-cpu").read_text()
    run = set(re.findall(r"tests/(\w+)", script))
    present = {path.parent.name for path in ROOT.glob("tests/**/test_*.py")}
    assert present == run | {"stress"}
    assert "pytest tests/stress" in (ROOT / "Makefile").read_text()


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in wanted}
    lines = (ROOT / "ci" / "constraints-cpu.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    assert names <= pinned


def test_the_readme_counts_the_subjects_right() -> None:
    counts = re.search(
        r"holds (\d+) broken ZeRO classes.*?and (\d+)\s+right ones", (ROOT / "README.md").read_text(), re.S
    )
    assert counts is not None
    assert (int(counts[1]), int(counts[2])) == (len(BROKEN), len(CONTROLS))


def test_the_readme_counts_the_museum_right() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    bugs = {bug for plant in PLANTS for bug in plant.bugs}
    for said in (
        f"{len(bugs) + len(LEFT_OUT)} public bugs",
        f"{len(bugs)} of them are planted here, as {len(PLANTS)} small wrong classes",
        f"{len(CONTROLS)} *controls*",
        f"Of {len(LEFT_OUT)} bugs none was made",
    ):
        assert said in text


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    marks = re.compile(r"pytest\.(skip|xfail|importorskip)|mark\.(skip|skipif|xfail)")
    here = Path(__file__)
    found = [_title(path) for path in ROOT.glob("tests/**/*.py") if path != here and marks.search(path.read_text())]
    assert not found
