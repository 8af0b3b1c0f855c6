"""What torchrun tells a process that it launched: its place in the job, and where the job's store is. No torch.

``torchrun --nproc-per-node=4 -m harness verify`` starts this program four times. Each of these processes looks after
one rank, which it starts itself; the first leads, the others follow (:mod:`harness.launch.spread`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError

# By these two a process is known to be torchrun's: RANK and the like are also set by others, and by us for our ranks.
_SIGNS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# What it sets for a worker, and a rank of ours is given (torch/distributed/run.py).
_GIVEN = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    *_SIGNS,
)
_MAX_PORT = 65_535


@dataclass(frozen=True)
class Launch:
    """The place of this process in a job of torchrun.

    Attributes:
        rank, world: of the rank that it looks after, and how many there are.
        local_world: how many of these one machine runs.
        node, num_nodes: which launcher started it, and how many there are.
        host, port: of the store.
        hosts_store: the launcher hosts no store, and this process is to.
        attempt: how often the launcher has started the whole job again.
        prefix: begins the names of everything this attempt of the job keeps in the store.
        environment: what the launcher set, for the rank.
    """

    rank: int
    world: int
    local_world: int
    node: int
    num_nodes: int
    host: str
    port: int
    hosts_store: bool
    attempt: int
    prefix: str
    environment: Mapping[str, str]


def launched(environment: Mapping[str, str] | None = None) -> Launch | None:
    """How torchrun launched this process (or the one with this environment); None where it did not.

    Raises:
        UsageError: what it set is not complete, or makes no sense.
    """
    given = os.environ if environment is None else environment
    if not all(name in given for name in _SIGNS):
        return None
    world = _number(given, "WORLD_SIZE", 1)
    num_nodes = _number(given, "GROUP_WORLD_SIZE", 1, world)
    rank = _number(given, "RANK", 0, world - 1)
    local_world = _number(given, "LOCAL_WORLD_SIZE", 1, world)
    _number(given, "LOCAL_RANK", 0, local_world - 1)
    attempt = _number(given, "TORCHELASTIC_RESTART_COUNT", 0)
    host = given.get("MASTER_ADDR")
    if not host:
        raise _unusable("MASTER_ADDR", host, "the address of the launcher's store")
    return Launch(
        rank=rank,
        world=world,
        local_world=local_world,
        node=_number(given, "GROUP_RANK", 0, num_nodes - 1),
        num_nodes=num_nodes,
        host=host,
        port=_number(given, "MASTER_PORT", 1, _MAX_PORT),
        hosts_store=rank == 0 and given["TORCHELASTIC_USE_AGENT_STORE"] != "True",
        attempt=attempt,
        # A restarted job may meet in the store of the attempt before it.
        prefix=f"zero2-harness/{given['TORCHELASTIC_RUN_ID']}/{attempt}",
        environment={name: given[name] for name in _GIVEN if name in given},
    )


def _number(given: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = given.get(name)
    wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    if text is None or not (text.isascii() and text.isdigit()):
        raise _unusable(name, text, wanted)
    number = int(text[:20])
    if number < least or (most is not None and number > most):
        raise _unusable(name, text, wanted)
    return number


def _unusable(name: str, text: str | None, wanted: str) -> UsageError:
    got = "it is not set" if text is None else f"got {text!r}"
    return UsageError(
        f"torchrun's {name}: expected {wanted}, {got}; start this with torchrun, or unset {' and '.join(_SIGNS)}"
    )


def leave_word(message: str) -> None:
    """Write why this process will fail where its launcher reads it, which prints that; nothing without a launcher.

    The first word counts. It is what ``torch.distributed.elastic.multiprocessing.errors`` reads: whatever stands under
    ``py_callstack`` is printed.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    told = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    with suppress(OSError), Path(path).open("x", encoding="utf-8") as file:
        json.dump({"message": told}, file)
