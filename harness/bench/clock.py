"""A campaign's driver and reference with a clock beside them: which part of a rank's time each call takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.bench.messages import COMPARE, GRADIENTS, NOTES, RANK_PARTS, REFERENCE, SUBJECT
from harness.drive.driver import Driver
from harness.oracles.reference import UnshardedTrainer

_DRIVER_PARTS = {
    "_compute_weights": GRADIENTS,
    "_hand_over": GRADIENTS,
    "_load": GRADIENTS,
    "_reduced": REFERENCE,
    **dict.fromkeys(
        (
            "_live_memory", "_partition", "_check_intake", "_check_released", "_compare_gradient", "_squared_norm",
            "_norm", "_compare_state", "_check_formula", "_gather", "_check_full_master", "_finish",
            "_skip", "_compare_shard", "_compare_weights", "_compare_padding",
        ),
        COMPARE,
    ),
}  # fmt: skip
_REFERENCE_METHODS = (
    "set_gradients",
    "scale_gradients",
    "squared_norm",
    "step",
    "gather",
    "set_rate",
    "load",
    "rebuild",
)
# What the harness asks of a subject only to look at it; a bare run does not.
_OBSERVING = frozenset({"attributes", "buckets", "has_grad", "full_master"})


class Clock:
    """Seconds by part. A part inside another interrupts it, so that all of them add up to the time since the start."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(RANK_PARTS, 0.0)
        self._part = NOTES
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block belongs to this part."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def read(self) -> dict[str, float]:
        """Seconds by part until now."""
        self._switch(self._part)
        return dict(self._seconds)

    def _switch(self, name: str) -> str:
        now = time.perf_counter()
        before = self._part
        self._seconds[before] += now - self._since
        self._part, self._since = name, now
        return before


class TimedDriver(Driver):
    """A campaign's driver; ``clock`` is given the part of everything it does."""

    clock: Clock

    def _reference(self) -> UnshardedTrainer:
        with self.clock.part(REFERENCE):
            trainer = TimedTrainer(self.weights.initial, self.scenario.optimizer, self.device)
        trainer.clock = self.clock
        return trainer

    @contextmanager
    def _subject(self, call: str) -> Iterator[None]:
        with self.clock.part(COMPARE if call in _OBSERVING else SUBJECT), super()._subject(call):
            yield


class TimedTrainer(UnshardedTrainer):
    """A campaign's reference, timed in the same way."""

    clock: Clock


def _timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
    def timed(self: TimedDriver | TimedTrainer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as the method)
        with self.clock.part(part):
            return method(self, *args, **kwargs)

    return timed


# On the classes, not on the instances: bound methods kept by an instance would keep a whole scenario alive, and the
# memory of the next one would be judged beside it.
for _name, _part in _DRIVER_PARTS.items():
    setattr(TimedDriver, _name, _timed(getattr(Driver, _name), _part))
for _name in _REFERENCE_METHODS:
    setattr(TimedTrainer, _name, _timed(getattr(UnshardedTrainer, _name), REFERENCE))
