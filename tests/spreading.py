"""The processes of a job of torchrun without torchrun, whose start alone takes seconds: a store, and the followers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self

from harness.launch.torchrun import Launch, launched

ROOT = Path(__file__).parents[1]
END_S = 60.0


def environment_of(rank: int, world: int, port: int, *, num_nodes: int = 1, attempt: int = 0) -> dict[str, str]:
    """What torchrun sets for a process, of which each machine runs as many."""
    local = world // num_nodes
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(rank // local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "a-test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class Followers:
    """A store, and the processes of all ranks but the first; a context manager that ends them.

    Args:
        world: How many processes the job has.
        output: Where what the followers print goes.

    Attributes:
        launch: The place of this process.
        processes: One for each other rank.
    """

    def __init__(self, world: int, output: Path) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=END_S), wait_for_workers=False)
        self.environment = environment_of(0, world, self._store.port)
        launch = launched(self.environment)
        assert launch is not None
        self.launch: Launch = launch
        self.output = output
        self.processes: list[subprocess.Popen[bytes]] = []
        with output.open("ab") as file:
            for rank in range(1, world):
                self.processes.append(_start(environment_of(rank, world, self._store.port), file.fileno()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def kill(self, rank: int) -> None:
        """As the machine does that has no memory left."""
        self.processes[rank - 1].kill()
        self.processes[rank - 1].wait()

    def codes(self) -> list[int]:
        """The exit codes of the followers, once they have ended."""
        return [process.wait(END_S) for process in self.processes]


def _start(environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "verify"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
