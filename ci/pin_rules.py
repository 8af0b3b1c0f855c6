"""What `make lint` asks of pins: of constraints, of the matrix that uses them, of Dockerfiles and of test scripts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ci.workflow_rules import WORKFLOWS, File

CONSTRAINTS = Path("ci/constraints-cpu.txt")
MATRIX = WORKFLOWS / "cpu.yml"


def project_of(root: Path) -> dict[str, Any]:
    """The table ``project`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return table


def constraints(root: Path) -> Iterator[str]:
    """Every file pins the same, but for torch, and all that pyproject.toml names, within its bounds."""
    project = project_of(root)
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    wanted = [Requirement(each) for each in [*project["dependencies"], *extras]]
    first = pins(root / CONSTRAINTS)
    for path in sorted(root.glob("ci/constraints-*.txt")):
        name, found = path.relative_to(root), pins(path)
        for line in _lines(path):
            if not re.fullmatch(r"[\w.-]+==[\w.]+", line):
                yield f"{name}: expected NAME==VERSION, got {line!r}"
        for requirement in wanted:
            version = found.get(_canonical(requirement.name))
            if version is None:
                yield f"{name}: {requirement.name} of pyproject.toml is not pinned"
            elif version not in requirement.specifier:
                yield f"{name}: {requirement.name}=={version} is not what pyproject.toml asks for, {requirement}"
        for package in sorted((first.keys() | found.keys()) - {"torch"}):
            if first.get(package) != found.get(package):
                yield f"{name}: {package} is {found.get(package)}, in {CONSTRAINTS} {first.get(package)}"


def pins(path: Path) -> dict[str, str]:
    """Versions by canonical name."""
    return {_canonical(name): version for name, _, version in (line.partition("==") for line in _lines(path))}


def matrix(root: Path, files: dict[Path, File]) -> Iterator[str]:
    """The jobs on CPUs reach from the oldest Python and torch that are promised to the torch of the usual pins."""
    project = project_of(root)
    file = files.get(MATRIX)
    cells = [] if file is None else _cells(file)
    if not cells:
        yield f"{MATRIX}: expected a matrix whose cells have python, torch and constraints"
        return
    [torch] = [each for each in map(Requirement, project["dependencies"]) if each.name == "torch"]
    oldest = {"python": _lower(SpecifierSet(project["requires-python"])), "torch": _lower(torch.specifier)}
    for column, bound in oldest.items():
        lowest = min((cell[column] for cell in cells), key=Version)
        if lowest != bound:
            yield f"{MATRIX}: the oldest {column} is {lowest}, pyproject.toml promises {bound}"
    if str(CONSTRAINTS) not in [cell["constraints"] for cell in cells]:
        yield f"{MATRIX}: no cell uses {CONSTRAINTS}, which everybody else does"
    for cell in cells:
        path = root / cell["constraints"]
        version = pins(path).get("torch", "none") if path.is_file() else "none, for there is no such file"
        if not f"{version}.".startswith(f"{cell['torch']}."):
            yield f"{MATRIX}: torch {cell['torch']} is called for, {cell['constraints']} pins {version}"
    for each in files.values():
        for name in re.findall(r"CONSTRAINTS: (\S+\.txt)", each.text):
            if not (root / name).is_file():
                yield f"{each.path}: {name}: no such file"
        for python in re.findall(r"python-version: \"([\d.]+)\"", each.text):
            if Version(python) not in SpecifierSet(project["requires-python"]):
                yield f"{each.path}: Python {python}: pyproject.toml asks for {project['requires-python']}"


def dockerfiles(root: Path, targets: frozenset[str]) -> Iterator[str]:
    """Bases are pinned, what is copied exists and reaches the build, and what is run by make is a target."""
    for path in sorted(root.glob("ci/Dockerfile.*")):
        name = path.relative_to(root)
        text = re.sub(r"(?m)^#.*\n", "", path.read_text()).replace("\\\n", " ")
        commands = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
        if [word for word, _ in commands].count("FROM") != 1:
            yield f"{name}: expected one FROM"
        for word, rest in commands:
            if word == "FROM" and not re.fullmatch(r"\S+:[\w.-]+@sha256:[0-9a-f]{64}", rest):
                yield f"{name}: FROM {rest}: expected NAME:TAG@sha256:DIGEST"
            if word == "COPY":
                yield from _of_copy(name, rest.split()[:-1], root)
            called = re.findall(r"\bmake ((?:[a-z-]+ ?)+)", rest) if word == "RUN" else []
            if word == "CMD":
                called = re.findall(r'"make", "([a-z-]+)"', rest)
            for target in " ".join(called).split() if "apt-get" not in rest else []:
                if target not in targets:
                    yield f"{name}: {word} {rest}: no make target {target!r}"
        if "ENV NO_VENV=1" not in text:
            yield f"{name}: expected ENV NO_VENV=1: what is installed there is used as it is"


def _of_copy(name: Path, sources: list[str], root: Path) -> Iterator[str]:
    ignore = root / ".dockerignore"
    kept = [line[1:] for line in _lines(ignore) if line.startswith("!")] if ignore.is_file() else []
    for source in sources:
        if not (root / source).exists():
            yield f"{name}: COPY {source}: no such file"
        elif not any(Path(source).match(pattern) for pattern in kept):
            yield f"{name}: COPY {source}: .dockerignore leaves it out"


def scripts(root: Path) -> Iterator[str]:
    """A worker of xdist that dies is a finding: one that takes its place has been seen to hang for good."""
    for path in sorted(root.glob("ci/test-*")):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if "pytest" in line and re.search(r" -n \S", line) and "--max-worker-restart=0" not in line:
                yield f"{path.relative_to(root)}: expected --max-worker-restart=0 beside -n: {' '.join(line.split())}"


def _cells(file: File) -> list[dict[str, str]]:
    return [
        cell
        for job in file.jobs.values()
        for cell in job.get("strategy", {}).get("matrix", {}).get("include", [])
        if set(cell) == {"python", "torch", "constraints"} and all(isinstance(each, str) for each in cell.values())
    ]


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _lower(specifiers: SpecifierSet) -> str:
    return next(each.version for each in specifiers if each.operator == ">=")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
