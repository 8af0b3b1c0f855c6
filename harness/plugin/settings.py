"""Options of the pytest plugin and arguments of its marker, checked where they come from. Standard library and pytest.

What counts, first to last: the marker, the option of the command line, the environment, the ini file, the default.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

BACKENDS = ("gloo", "nccl")
DEFAULT_BACKEND = "gloo"
DEFAULT_WORLD = 2
DEFAULT_TIMEOUT_S = 60.0
MAX_WORLD = 256
MARKER = "ranks"
WORLD = "_ranks_world"
"""The fixture by which a test of several worlds is parametrised."""

_ARGUMENTS = ("world", "backend", "timeout")


class Origin(NamedTuple):
    """A value as it was given, and where."""

    value: object
    where: str


@dataclass(frozen=True)
class Asked:
    """What a marker asks for; None: nothing, so that an option decides."""

    worlds: tuple[int, ...] = (DEFAULT_WORLD,)
    several: bool = False
    backend: str | None = None
    timeout_s: float | None = None


def add_options(parser: pytest.Parser) -> None:
    """The options and their ini equivalents."""
    group = parser.getgroup("ranks", "tests on ranks (zero2-harness)")
    group.addoption(
        "--ranks-backend",
        metavar="NAME",
        help=f"backend of tests on ranks ({', '.join(BACKENDS)}) that name none; also runs harness.conformance on it",
    )
    group.addoption(
        "--ranks-timeout",
        metavar="SECONDS",
        help=f"how long a test may take on its ranks that names no timeout (default {DEFAULT_TIMEOUT_S:g}); "
        "then every rank's stacks are shown, and the ranks are replaced",
    )
    group.addoption(
        "--ranks-scenario",
        metavar="FILE",
        help="run this saved case alone in place of the battery of every harness.conformance; where none is collected, "
        "run it over the subject that it names",
    )
    parser.addini("ranks_backend", "as --ranks-backend", default=None)
    parser.addini("ranks_timeout", "as --ranks-timeout", type="float", default=None)
    parser.addini(
        "ranks_auto_world",
        "with -n auto, one worker for so many cores (default: as pytest-xdist has it)",
        type="int",
        default=None,
    )


def check_options(config: pytest.Config) -> None:
    """Refuse what no test could use.

    Raises:
        pytest.UsageError: in one line, with where it comes from.
    """
    backend(config)
    timeout_s(config)
    auto_world(config)


def backend(config: pytest.Config) -> str | None:
    """The backend that option, environment or ini file asks for; None: none does.

    Raises:
        pytest.UsageError: there is none of that name.
    """
    given = _given(config, "--ranks-backend", "PYTEST_RANKS_BACKEND", "ranks_backend")
    if given is None:
        return None
    return _one_of(given.value, given.where)


def timeout_s(config: pytest.Config) -> float | None:
    """The limit that option, environment or ini file asks for, in seconds; None: none does.

    Raises:
        pytest.UsageError: it is no number of seconds above zero.
    """
    given = _given(config, "--ranks-timeout", "PYTEST_RANKS_TIMEOUT", "ranks_timeout")
    return None if given is None else _seconds(given.value, given.where)


def auto_world(config: pytest.Config) -> int | None:
    """For how many cores ``-n auto`` starts one worker; None: pytest-xdist decides.

    Raises:
        pytest.UsageError: it is no whole number above zero.
    """
    value = _ini(config, "ranks_auto_world")
    if value is None:
        return None
    if not isinstance(value, int) or value < 1:
        raise pytest.UsageError(f"ranks_auto_world in {_file(config)}: expected a whole number above zero, got {value}")
    return value


def asked(markers: Iterable[pytest.Mark]) -> Asked:
    """What the markers of a test ask for, closest first: each argument is taken from the closest that has it.

    Raises:
        ValueError: an argument is not what the marker takes; one sentence.
    """
    found: dict[str, Any] = {}
    for mark in markers:
        if len(mark.args) > 1:
            raise ValueError(f"{_shown(mark)}: expected at most one argument without a name, the world")
        arguments = {**({"world": mark.args[0]} if mark.args else {}), **mark.kwargs}
        if mark.args and "world" in mark.kwargs:
            raise ValueError(f"{_shown(mark)}: the world is given twice")
        for name in arguments:
            if name not in _ARGUMENTS:
                raise ValueError(f"{_shown(mark)}: no argument {name!r}, expected {', '.join(_ARGUMENTS)}")
        found = {**arguments, **found}
    return checked(**found)


def checked(world: object = DEFAULT_WORLD, backend: object = None, timeout: object = None) -> Asked:
    """What is asked for by these arguments, of a marker or of a call.

    Raises:
        ValueError: one of them is not what it should be; one sentence.
    """
    several = isinstance(world, tuple | list)
    worlds = tuple(world) if isinstance(world, tuple | list) else (world,)
    for each in worlds:
        if not isinstance(each, int) or isinstance(each, bool) or not 1 <= each <= MAX_WORLD:
            raise ValueError(f"ranks(world={world!r}): expected a whole number from 1 to {MAX_WORLD}, or several")
    if not worlds or len(set(worlds)) < len(worlds):
        raise ValueError(f"ranks(world={world!r}): expected at least one world, each once")
    try:
        return Asked(
            worlds,
            several,
            None if backend is None else _one_of(backend, "ranks(backend=...)"),
            None if timeout is None else _seconds(timeout, "ranks(timeout=...)"),
        )
    except pytest.UsageError as error:
        raise ValueError(str(error)) from None


def misuse(function: object) -> str | None:
    """Why a test function cannot run on ranks; None: it can."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "an async function cannot run on ranks: make it an ordinary one"
    if hasattr(function, "hypothesis"):
        return (
            "each rank would draw examples of its own: draw in a test without the marker, "
            "and call ranks(function, example, world=...) in it"
        )
    return None


def _given(config: pytest.Config, option: str, variable: str, ini: str) -> Origin | None:
    value = config.getoption(option)
    if value is not None:
        return Origin(value, option)
    if variable in os.environ:
        return Origin(os.environ[variable], f"{variable} in the environment")
    value = _ini(config, ini)
    return None if value is None else Origin(value, f"{ini} in {_file(config)}")


def _ini(config: pytest.Config, name: str) -> object:
    try:
        return config.getini(name)
    except (TypeError, ValueError, pytest.UsageError) as error:
        raise pytest.UsageError(f"{name} in {_file(config)}: {str(error).splitlines()[0]}") from None


def _file(config: pytest.Config) -> str:
    return "the ini file" if config.inipath is None else config.inipath.name


def _one_of(value: object, where: str) -> str:
    if value not in BACKENDS:
        raise pytest.UsageError(f"{where}: expected one of {', '.join(BACKENDS)}, got {value!r}")
    return str(value)


def _seconds(value: object, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise pytest.UsageError(f"{where}: expected a number of seconds above zero, got {value!r}")
    return number


def _shown(mark: pytest.Mark) -> str:
    words = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"ranks({', '.join(words)})"
