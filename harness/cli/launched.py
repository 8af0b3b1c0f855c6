"""The command line under torchrun: the first process works and speaks, the others follow in silence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from harness.errors import UsageError
from harness.launch.torchrun import Launch, launched, leave_word
from harness.report import result as results

if TYPE_CHECKING:
    from harness.launch.spread import SpreadPool

SPREADING = ("verify", "replay")
"""Verbs that run on the ranks that torchrun starts."""

_SHOWING = ("list", "report")
_HELP = ("-h", "--help")


def follow(launch: Launch, args: Sequence[str]) -> int:
    """Be a process other than the first: silent; the exit code, 0 once the first one is done."""
    from harness.launch.follow import be_silent
    from harness.launch.follow import follow as obey

    be_silent()
    if launch.attempt or not _spreads(args):
        return results.EXIT_HOLDS
    try:
        problem = obey(launch)
    except KeyboardInterrupt:
        problem = None  # the launcher ends all when one has failed, and names that one
    if problem is None:
        return results.EXIT_HOLDS
    leave_word(problem)
    return results.EXIT_UNKNOWN


def refuse_again(launch: Launch | None) -> None:
    """Do nothing a second time: what began with a violation could end with exit code 0.

    Raises:
        UsageError: the launcher has started the job again.
    """
    if launch is not None and launch.attempt:
        raise UsageError(
            "torchrun started this again (--max-restarts): what the first attempt said stands; leave --max-restarts out"
        )


@contextlib.contextmanager
def leading(launch: Launch | None, args: Sequence[str]) -> Iterator[None]:
    """Whatever becomes of the command, the other processes end; without torchrun there are none.

    Raises:
        UsageError: the command is none for several processes.
    """
    if launch is None or launch.world == 1:
        yield
        return
    if not _spreads(args):
        if args and not args[0].startswith("-") and args[0] not in _SHOWING and not _asks_for_help(args):
            raise UsageError(
                f"{args[0]}: only {' and '.join(SPREADING)} run on the ranks of torchrun; start it without torchrun"
            )
        yield
        return
    try:
        yield
    finally:
        from harness.launch.job import dismiss

        dismiss(launch)


def ranks_given(backend: str, worlds: Sequence[int] | None, what: str) -> Launch | None:
    """The place of this process among those whose ranks are to be used; None where it starts ranks as it likes.

    Args:
        backend: Where ranks are to run.
        worlds: Of the ranks that are asked for; None: as many as there are.
        what: Who asks for them.

    Raises:
        UsageError: the processes of torchrun cannot run that.
    """
    launch = launched()
    if launch is None or (launch.world == 1 and backend == "sim"):
        return None
    started = f"torchrun started {launch.world} processes" if launch.world > 1 else "torchrun started 1 process"
    if backend == "sim":
        raise UsageError(f"--backend sim: all its ranks live in one process, and {started}; start it without torchrun")
    if worlds is not None and tuple(worlds) != (launch.world,):
        asked = ",".join(map(str, worlds))
        raise UsageError(
            f"{what} {asked}: {started} (--nproc-per-node times --nnodes), and each looks after one rank; "
            f"{f'start {asked} of them' if len(worlds) == 1 else 'leave --world out'}, or do without torchrun"
        )
    return launch


def start_pool(launch: Launch, backend: str, device: str) -> SpreadPool:
    """Ranks for scenarios, as :func:`harness.evaluate.start_pool`, one in the care of each process."""
    from harness.evaluate import GRACE_S, HANDLER, PRELOAD
    from harness.launch.spread import SpreadPool

    return SpreadPool(launch, HANDLER, backend=backend, device=device, preload=PRELOAD, grace_s=GRACE_S)


def speaks() -> bool:
    """Whether this process is one to say what is wrong with the launcher's variables: one of several is enough."""
    rank = os.environ.get("RANK", "")
    return not (rank.isascii() and rank.isdigit() and int(rank[:20]) > 0)


def _spreads(args: Sequence[str]) -> bool:
    return bool(args) and args[0] in SPREADING and not _asks_for_help(args)


def _asks_for_help(args: Sequence[str]) -> bool:
    return any(arg in _HELP for arg in args)
