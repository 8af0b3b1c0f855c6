"""Errors that are the user's to correct: shown as one line, without a traceback."""

from __future__ import annotations

_LONGEST = 2000  # characters of one line; more helps nobody


def one_line(text: str) -> str:
    """``text`` on one line that is safe to print: what is not printable is escaped, and too much is cut off."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 20]}… ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class UsageError(Exception):
    """Bad usage or bad input; the command line prints its one line and ends with ``exit_code``."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class CaseError(UsageError):
    """A file of input (a case, a list of parameters) that cannot be used, with the path of the field at fault."""
