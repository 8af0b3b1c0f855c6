"""Where ``python -m harness`` and the installed script ``zero2-harness`` begin: quiet before anything is loaded."""

from __future__ import annotations

# Only what Python has loaded by itself: anything else could be a file of this name in the current directory.
import os
import sys


def main() -> int:
    """Run the command line of this process and return its exit code."""
    _look_here_last()
    _leave_when_interrupted()
    from harness import cli

    return cli.main()


def _look_here_last() -> None:
    """Put the current directory at the end of ``sys.path``, where ``-m`` puts it first.

    A ``random.py`` or ``torch.py`` of the user's would else be imported, here and in every rank, in place of the real
    one. What ``PYTHONPATH`` names stays first: that is asked for.
    """
    try:
        here = os.getcwd()  # noqa: PTH109 (pathlib is not loaded yet)
    except OSError:  # it has been deleted, and is not in the path then
        return
    if not sys.flags.safe_path and sys.path[:1] == [here]:
        sys.path.append(sys.path.pop(0))


def _leave_when_interrupted() -> None:
    """Until the command line takes over, end at once on Ctrl-C: Python would print a stack of imports."""
    import signal
    from contextlib import suppress

    def leave(*_: object) -> None:
        with suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)


if __name__ == "__main__":
    sys.exit(main())
