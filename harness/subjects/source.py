"""Where a subject comes from: its name as given, resolved without importing anything (the parent never imports it)."""

from __future__ import annotations

import difflib
import importlib.util
import keyword
import sysconfig
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.subjects.builtin import BUILTIN, CONFIGURED

_MUSEUM = "museum"
"""``museum:NAME`` is an exhibit of the bug museum."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class SubjectSource:
    """A class to verify.

    Attributes:
        given: as the user wrote it: a built-in name, ``package.module:Class``, ``path/to/file.py:Class``, or
            ``museum:NAME`` for an exhibit of the bug museum.
        absolute: the same with an absolute path where it is a file, so that a saved case replays from anywhere.
        args: further keyword arguments of the constructor.
        config: of a distribution strategy, plain JSON; None: none was given. See :func:`with_config`.
    """

    given: str
    absolute: str
    args: dict[str, Scalar] = field(default_factory=dict)
    config: dict[str, Any] | None = field(default=None, repr=False)


def with_config(source: SubjectSource, config: object) -> SubjectSource:
    """The same subject with a configuration, as it was read from JSON.

    Raises:
        UsageError: it is no JSON object, or the subject takes none.
    """
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"--config: expected a JSON object of keys and values, got {type(config).__name__}")
    if not takes_config(source):
        raise UsageError(
            f"--config: {source.given!r} has a configuration of its own; "
            f"give one to --subject {CONFIGURED}, or to a class"
        )
    return replace(source, config=config)


def takes_config(source: SubjectSource) -> bool:
    """Whether a configuration of the user's means anything to this subject: of a class it may."""
    return source.absolute not in BUILTIN or source.absolute == CONFIGURED


def parse(given: str, args: dict[str, Scalar] | None = None) -> SubjectSource:
    """Resolve a ``--subject``; a file must exist, a module's existence is only seen in the ranks.

    Raises:
        UsageError: unknown form or name, missing file, or a class name that is none.
    """
    arguments = dict(args or {})
    for name in arguments:
        if not _is_identifier(name) or name in {"params", "rank", "world", "bucket", "self"}:
            raise UsageError(f"--subject-arg {name}: not a further keyword argument of a constructor")
    if ":" not in given:
        if given in BUILTIN:
            return SubjectSource(given, given, arguments)
        names = ", ".join(sorted(BUILTIN))
        raise UsageError(
            f"--subject {given!r}: no built-in system of that name (there are: {names}; exhibits of the museum are "
            "museum:NAME); name a class as package.module:Class or path/to/file.py:Class"
        )
    where, _, name = given.rpartition(":")
    if where == _MUSEUM and (found := _exhibit(given, name)) is not None:
        return SubjectSource(given, found, arguments)
    if not where or not _is_identifier(name):
        raise UsageError(
            f"--subject {given!r}: expected package.module:Class or path/to/file.py:Class, got class name {name!r}"
        )
    if where.endswith(".py"):
        try:
            path = Path(where).expanduser().absolute()
            str(path).encode()  # the name has to reach the ranks as text
            is_file = path.is_file()
        except (OSError, RuntimeError, UnicodeError) as error:
            raise UsageError(f"--subject {given!r}: not a usable path: {error}") from None
        if not is_file:
            raise UsageError(f"--subject {given!r}: no such file: {path}")
        return SubjectSource(given, f"{path}:{name}", arguments)
    if not all(_is_identifier(part) for part in where.split(".")):
        raise UsageError(f"--subject {given!r}: {where!r} is neither a module name nor a path that ends in .py")
    return SubjectSource(given, given, arguments)


def _exhibit(given: str, name: str) -> str | None:
    """Where the class of an exhibit of the bug museum is; None: a module of the user's is meant.

    Raises:
        UsageError: there is no such exhibit, nor such a module.
    """
    from harness.faults.museum import catalogue  # made when it is needed
    from harness.faults.museum.exhibit import kebab

    exhibit = catalogue.exhibit(kebab(name))
    if exhibit is not None:
        return exhibit.target
    if _places(_MUSEUM):
        return None
    near = difflib.get_close_matches(kebab(name), catalogue.names(), n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else "; `museum --list` shows them"
    raise UsageError(f"--subject {given!r}: no exhibit of that name in the museum{hint}")


def from_case(
    given: str, absolute: str, args: dict[str, Scalar], config: dict[str, Any] | None = None
) -> SubjectSource:
    """The subject that a case file names, if it may run for no other reason than that.

    Importing runs code, and a case file may come from anybody: only what is built in, or lies in the current directory
    or below (links resolved; not in an environment's packages), is the user's own, whatever the file says. All else he
    has to name himself.

    Args:
        given, absolute: as :class:`SubjectSource` has them. What runs is ``absolute``, so ``given`` is shown only where
            it means the same.
        args: further keyword arguments of the constructor.
        config: of a distribution strategy.

    Raises:
        UsageError: as :func:`parse` and :func:`with_config`; or it lies elsewhere.
    """
    source = parse(absolute, args)
    if not is_local(source):
        raise UsageError(
            f"{absolute!r} is not in the current directory or below, and no case alone can have it imported"
        )
    try:
        same = parse(given).absolute == source.absolute
    except UsageError:
        same = False
    named = SubjectSource(given if same else absolute, source.absolute, source.args)
    return named if config is None else with_config(named, config)


def is_local(source: SubjectSource) -> bool:
    """Whether a case that names this subject runs by itself in the current directory: see :func:`from_case`."""
    where, colon, _ = source.absolute.rpartition(":")
    if not colon:
        return True
    here = Path.cwd().resolve()
    packages = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    files = [Path(where)] if where.endswith(".py") else _places(where.partition(".")[0])
    found = [file.resolve() for file in files]
    return bool(found) and all(
        file.is_relative_to(here) and not any(file.is_relative_to(place) for place in packages) for file in found
    )


def _places(module: str) -> list[Path]:
    """Where a rank would find a top-level module, which this does not import; empty when it cannot be told."""
    try:
        spec = importlib.util.find_spec(module) or PathFinder.find_spec(module, [str(Path.cwd())])
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    if spec.has_location and spec.origin is not None:
        return [Path(spec.origin)]
    return [Path(place) for place in spec.submodule_search_locations or ()]  # a package without __init__.py


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
