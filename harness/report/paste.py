"""A failure as a test to paste: whole, small, and red until the class is right. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.scenario import codec

LARGEST_INLINE = 4000
"""A case of up to so many characters stands in the test itself; a larger one is named by its path."""


def pytest_test(
    case: codec.Case, path: Path | None, subject: str, args: Mapping[str, codec.Scalar], options: Mapping[str, object]
) -> str | None:
    """The text of a file of tests that runs one case; None for a large case that lies in no file.

    Args:
        case: what failed. Subject and failure that it names are left out of the test, but for the subject's
            configuration.
        path: of its file, which large cases are read from.
        subject, args: as ``--subject`` and ``--subject-arg`` have them.
        options: further keyword arguments of :func:`harness.check_case`.
    """
    text = _ascii(codec.encode(msgspec.structs.replace(case, subject=None, failure=None)).decode())
    if len(text) <= LARGEST_INLINE:
        constant = f"CASE = r'''\n{text}'''"
    elif path is not None:
        constant = f"CASE = {os.fspath(path)!a}"
    else:
        return None
    config = None if case.subject is None else case.subject.config
    given: dict[str, object] = {"subject": subject, **({"subject_args": dict(args)} if args else {})}
    given |= {**({} if config is None else {"config": config}), **options}
    keywords = "".join(f", {name}={value!a}" for name, value in given.items())
    name = "case" if path is None else _identifier(path.stem)
    return f"from harness import check_case\n\n{constant}\n\n\ndef test_{name}():\n    check_case(CASE{keywords})\n"


def _ascii(text: str) -> str:
    """JSON that says the same, fit for a raw string between three single quotes."""
    return "".join(char if char.isascii() and char not in "'\x7f" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _identifier(stem: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in stem)
