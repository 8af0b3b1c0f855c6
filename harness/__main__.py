"""Where ``python -m harness`` and the installed script ``zero2-harness`` begin: quiet before anything is loaded."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Run the command line of this process and return its exit code."""
    _look_here_last()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Nothing has been started that would have to be ended; a KeyboardInterrupt would print a stack of imports.
        signal.signal(signal.SIGINT, _leave)
    from harness import cli

    return cli.main()


def _look_here_last() -> None:
    """Put the current directory at the end of ``sys.path``, where ``-m`` puts it first.

    A ``random.py`` or ``torch.py`` of the user's would else be imported, here and in every rank, in place of the real
    one. What ``PYTHONPATH`` names stays first: that is asked for.
    """
    with suppress(FileNotFoundError):  # the directory has been deleted, and is not in the path then
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 (nothing more is loaded yet)
            sys.path.append(sys.path.pop(0))


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
