"""What Linux must be told about a process: who it dies with, whose orphans it adopts, which environment it gets."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

# Has a process write the stacks of its threads. A real-time signal: the ordinary ones are the subject's (SIGUSR1 is
# what batch systems announce a preemption with); off the first of them, which libraries take.
STACKS_SIGNAL = signal.SIGRTMIN + 11

# Set before numpy and torch are imported: a thread pool that exists at the time of a fork hangs the child.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}
DEVICES = ("cpu", "cuda")
# So that what asks torch for an accelerator finds none there, and no rank on the CPU makes a context on a GPU.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def rank_environment(rank: int, world: int, master_port: int) -> dict[str, str]:
    """The variables torchrun sets for a worker of a single-node job (``torch/distributed/run.py``)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "zero2-harness",
    }


def default_device(backend: str) -> str:
    """Where the tensors of ranks on this backend belong, one of :data:`DEVICES`, unless somebody says otherwise."""
    return "cuda" if backend == "nccl" else "cpu"


def pool_environment(extra: Mapping[str, str], device: str = "cpu", *, one_machine: bool = True) -> dict[str, str]:
    """This process's environment for the processes of a pool: one thread each, loopback, no outer launcher's rank.

    ``device``: one of :data:`DEVICES`; on ``"cpu"`` GPUs are hidden, unless ``extra`` shows some. ``one_machine``:
    false where ranks of other machines join: then which interface they use is left to whoever set it.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_") and name not in rank_environment(0, 1, 0)
    }
    hidden = _NO_GPU if device == "cpu" else {}
    return inherited | SINGLE_THREADED | (LOOPBACK if one_machine else {}) | hidden | dict(extra)


def command(module: str, path: list[str], descriptor: int) -> list[str]:
    """The command line that runs ``module.main(descriptor)`` in a fresh interpreter with ``path`` as its ``sys.path``.

    Not ``-m module``: that would load the module a second time under the name ``__main__``, with other classes of the
    same name, and put the current directory before the standard library.
    """
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); descriptor = int(sys.argv[2]); "
        f"sys.argv[1:] = []; from {module} import main; main(descriptor)"
    )
    return [sys.executable, "-P", "-c", code, json.dumps(path), str(descriptor)]


def import_path() -> list[str]:
    """This process's ``sys.path``, absolute, with the current directory at its end if it was not there."""
    entries = [str(Path(entry).absolute()) for entry in sys.path]
    return list(dict.fromkeys([*entries, str(Path.cwd())]))


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; end now if ``parent`` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can escape being killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Show ``name`` (15 bytes of it) in process listings."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def free_port() -> int:
    """A port nobody listens on now, for MASTER_PORT; the pool itself uses none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
