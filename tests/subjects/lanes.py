"""Classes that misbehave only in a process that runs scenarios beside others, told by its name, and not at first."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torch import nn

from harness.faults.museum.plain import PlainZero

# Rank 0 of a set of one is the process that runs scenarios by themselves.
_ALONE = "z2-rank0/1"
_SCENARIO = 3  # of one world in a process: the first in which it happens


class _AmongOthers(PlainZero):
    num_built = 0  # kept from scenario to scenario, by the module of each rank

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        type(self).num_built += 1

    def gather_params(self) -> None:
        super().gather_params()
        if self.num_built >= _SCENARIO and Path("/proc/self/comm").read_text().strip() != _ALONE:
            self._misbehave()

    def _misbehave(self) -> None:
        raise NotImplementedError


class DiesAmongOthers(_AmongOthers):
    """Ends the process."""

    def _misbehave(self) -> None:
        os._exit(3)


class HangsAmongOthers(_AmongOthers):
    """Waits for ever."""

    def _misbehave(self) -> None:
        threading.Event().wait()


class KeepsThreads(PlainZero):
    """Leaves a thread behind for each scenario; so does each rank."""

    def gather_params(self) -> None:
        super().gather_params()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
