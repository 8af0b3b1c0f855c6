"""Where a subject comes from: its name as given, resolved without importing anything (the parent never imports it)."""

from __future__ import annotations

import keyword
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UsageError
from harness.subjects.builtin import BUILTIN

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class SubjectSource:
    """A class to verify.

    Attributes:
        given: as the user wrote it: a built-in name, ``package.module:Class`` or ``path/to/file.py:Class``.
        absolute: the same with an absolute path where it is a file, so that a saved case replays from anywhere.
        args: further keyword arguments of the constructor.
    """

    given: str
    absolute: str
    args: dict[str, Scalar] = field(default_factory=dict)


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
            f"--subject {given!r}: no built-in system of that name (there are: {names}); "
            "name a class as package.module:Class or path/to/file.py:Class"
        )
    where, _, name = given.rpartition(":")
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


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
