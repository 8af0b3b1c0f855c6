"""What the machine has to give: how busy it is, and in plain words what it refused."""

from __future__ import annotations

import errno
import os
import resource

_MAX_PATIENCE = 10.0
_SIGNS = {
    errno.EMFILE: (os.strerror(errno.EMFILE),),
    # Its own text also stands for a socket that has nothing to say.
    errno.EAGAIN: ("can't start new thread", "pthread_create", f"what():  {os.strerror(errno.EAGAIN)}"),
    errno.ENOMEM: (os.strerror(errno.ENOMEM),),
}


def patience() -> float:
    """By what factor things may take longer now than on an idle machine: processes that want a core, at most 10."""
    return min(_MAX_PATIENCE, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def describe_refusal(error: OSError) -> str:
    """One line: what was refused, its limit, and what to do about it."""
    match error.errno:
        case errno.EAGAIN:
            limit = _limit(resource.RLIMIT_NPROC)
            return (
                f"the machine starts no more processes (at most {limit} of this user, see ulimit -u; a container may "
                "allow fewer): end others, or use fewer ranks"
            )
        case errno.EMFILE | errno.ENFILE:
            limit = _limit(resource.RLIMIT_NOFILE)
            return f"too many open files (at most {limit}): raise the limit with ulimit -n, or use fewer ranks"
        case errno.ENOMEM:
            return "the machine has no memory for another process: end others, or use fewer ranks"
        case _:
            return f"the machine refuses what the ranks need: {error}"


def refusal_in(text: str) -> str | None:
    """The same for what libraries and other processes say that met it; None if they did not."""
    for number, signs in _SIGNS.items():
        if any(sign in text for sign in signs):
            return describe_refusal(OSError(number, os.strerror(number)))
    return None


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
