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
        "harness.launch.spread",
        "harness.launch.follow",
        "harness.sim.pool",
        "harness.train.campaign",
        "harness.doctor.examination",
        "harness.bench.campaign",
        "harness.bench.muon.campaign",
        "harness.balance.owners",
        "harness.soak.campaign",
        "harness.fuzz.rounds",
        "harness.museum.campaign",
        "harness.plugin.bodies",
        "harness.plugin.items",
    ],
)
def test_the_waiting_process_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_the_command_line_begins_without_what_single_verbs_need() -> None:
    """Or each verb, and each complaint, would wait for it."""
    code = "import sys, harness.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, stdout=subprocess.PIPE, check=True)
    loaded = set(done.stdout.decode().split())
    assert "harness.cli.fuzz" in loaded
    single = ("recording", "runner", "fuzz", "museum", "report.events", "report.reading", "report.words")
    assert not loaded & {f"harness.{each}" for each in single}


def test_every_directory_of_tests_is_run_by_a_target() -> None:
    script = (ROOT / "ci" / "test-cpu").read_text()
    run = set(re.findall(r"tests/(\w+)", script))
    present = {path.parent.name for path in ROOT.glob("tests/**/test_*.py")}
    assert present == run | {"stress", "gpu"}
    assert "ci/test-gpu" in (ROOT / "Makefile").read_text()
    assert "pytest tests/stress" in (ROOT / "Makefile").read_text()


def test_nothing_lies_in_the_root_that_does_not_belong_there() -> None:
    """What a try leaves behind is easily committed."""
    files = {path.name for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")}
    assert files == {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in wanted}
    lines = (ROOT / "ci" / "constraints-cpu.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    assert names <= pinned


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    """In the code; files of tests that a test writes, for the plugin, may."""
    marks = re.compile(r"pytest\.(skip|xfail|importorskip)|pytest\.mark\.(skip|skipif|xfail)")
    assert marks.fullmatch("pytest.mark.skipif")
    # Tests on GPUs are skipped where there are too few, in one place, which counts and names them.
    apart = ROOT / "tests" / "gpu" / "conftest.py"
    found = [
        _title(path)
        for path in ROOT.glob("tests/**/*.py")
        if path != apart
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and marks.fullmatch(ast.unparse(node))
    ]
    assert not found
