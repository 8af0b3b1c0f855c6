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


def exception_text(error: BaseException) -> str:
    """``Type: message`` of an exception of somebody else's code, whose ``__str__`` may itself raise."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 (whatever it raises, SystemExit too, there is no text)
        text = "<its text cannot be had: __str__ raises>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def sendable(text: str, longest: int = 64 * 1024) -> str:
    """``text`` as valid UTF-8: what is none (lone surrogates) escaped, the middle of what is too long left out."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}\n[... {len(text) - longest} characters ...]\n{text[-longest // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


class UsageError(Exception):
    """Bad usage or bad input; the command line prints its one line and ends with ``exit_code``."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class CaseError(UsageError):
    """A file of input (a case, a list of parameters) that cannot be used, with the path of the field at fault."""
