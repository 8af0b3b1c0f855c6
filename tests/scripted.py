"""Workers that do what a test says, for coordinators that would start real ones (:mod:`harness.launch.crew`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from harness.launch.crew import Worker

Behaviour = Callable[["ScriptedCrew", Worker[Any], Any], list[Any]]
"""What a worker says to an order; None: it ends."""


class ScriptedCrew:
    """Stands for the crew: a worker answers an order the next time it is heard.

    Attributes:
        orders: What workers were told, set-ups apart.
        raises: What hearing raises, once.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.workers: list[Worker[Any]] = []
        self.orders: list[Any] = []
        self.setups: list[Any] = []
        self.said: list[tuple[Worker[Any], Any]] = []
        self.interrupted: list[int] = []
        self.ended = self.killed = False
        self.raises: BaseException | None = None

    def __enter__(self) -> ScriptedCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    def start(self, number: int, log: Path, setup: object) -> Worker[Any]:
        crew = self

        class Told(Worker[Any]):
            def tell(self, order: object) -> None:
                crew.orders.append(order)
                crew.said += [(self, report) for report in crew.behaviour(crew, self, order)]

        process = SimpleNamespace(returncode=-9, kill=lambda: crew.said.append((worker, None)))
        worker = Told(number, cast(Any, process), cast(Any, None), log)
        self.workers.append(worker)
        self.setups.append(setup)
        self.said += [(worker, report) for report in self.behaviour(self, worker, setup)]
        return worker

    def hear(self, timeout_s: float) -> Iterator[tuple[Worker[Any], Any]]:
        if self.raises is not None:
            raised, self.raises = self.raises, None
            raise raised
        if not self.said:
            time.sleep(min(timeout_s, 0.01))
        for worker, report in list(self.said):
            self.said.remove((worker, report))
            if report is None:
                self.workers.remove(worker)
            yield worker, report

    def interrupt(self, worker: Worker[Any]) -> None:
        self.interrupted.append(worker.number)

    def kill_all(self) -> None:
        self.killed = True
        self.workers.clear()
