"""The wheel holds the two packages and their data, and what it is called in pytest; nothing else of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tests.plugin.conftest import ROOT

_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "harness", "zero2core", "tests", "ci", "docs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left beside the sources; offline."""
    place = tmp_path_factory.mktemp("wheel")
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "-w", str(place / "dist"), str(place)], check=True, timeout=240, cwd=place)
    (built,) = (place / "dist").glob("*.whl")
    return built


def test_it_holds_the_two_packages_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
    assert {name.parts[0] for name in names} == {"harness", "zero2core", "zero2_harness-0.1.0.dist-info"}
    packed = {str(name) for name in names if "dist-info" not in name.parts[0]}
    # Every source, the marks of typed packages, and whatever data lies beside them.
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("harness", "zero2core")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == here
    assert {"harness/py.typed", "zero2core/py.typed", "harness/regressions/local-norm.json"} <= packed


def test_pytest_finds_the_plugin_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        points = archive.read("zero2_harness-0.1.0.dist-info/entry_points.txt").decode()
    assert "[pytest11]\nzero2_harness = harness.pytest_plugin" in points
