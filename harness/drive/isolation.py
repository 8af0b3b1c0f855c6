"""What a class does to its process stays with its scenario: states are put back, and what piles up is counted.

Three environments. *Home* is the process as it was before any class was imported; the harness itself works in it. A
class's *own* is home with what importing the class changed: the one in which its scenarios begin. And there is what
the class has made of it since. The harness and the class take turns many times in a scenario; states that the
harness's arithmetic depends on are then exchanged each time, all others once, at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from harness.drive.growth import Growth, default_group
from harness.drive.states import STATES, Streams, seed_generators
from harness.scenario.model import Scenario

_ARITHMETIC = tuple(index for index, state in enumerate(STATES) if state.arithmetic)
_UNREADABLE = object()
_OURS = sys.stdlib_module_names | {"harness", "torch", "numpy", "msgspec"}


@dataclass(frozen=True)
class Left:
    """What a scenario left behind in its process.

    Attributes:
        changed: Names of the states that the class had changed.
        recycle: Why the process should not be used any further; None when it may.
    """

    changed: tuple[str, ...]
    recycle: str | None


class Isolation:
    """Of one rank; made before any class is imported. ``rearm`` is :attr:`harness.launch.rank.RankContext.rearm`."""

    def __init__(self, rank: int, rearm: Callable[[bool], None], growth: Growth | None = None) -> None:
        self._rank = rank
        self._rearm = rearm
        self._growth = growth or Growth()
        self._streams = Streams()
        self._group = default_group()
        self._home = [_read(index) for index in range(len(STATES))]
        self._own: dict[str, dict[int, Any]] = {}  # by class: the states (their indices) that its import changed
        self._present: dict[int, Any] = {}  # arithmetic states as the class has them now, where that is not home

    @property
    def group_is_gone(self) -> bool:
        """The default process group was destroyed, or replaced by another."""
        return default_group() is not self._group

    @contextmanager
    def importing(self, subject: str) -> Iterator[None]:
        """Around the import of a class: what it changes is its own from now on, and only in its scenarios."""
        seed_generators(0, self._rank)
        try:
            yield
        finally:
            now = [_read(index) for index in range(len(STATES))]
            self._own[subject] = {
                index: value for index, value in enumerate(now) if not _equal(value, self._home[index])
            }
            self._put_back(self._own[subject], not self._streams.intact())

    def begin(self, subject: str, scenario: Scenario) -> None:
        """Before a scenario: the class's own environment, and generators in a state that follows from the scenario."""
        own = self._own.get(subject, {})
        self._present = {index: value for index, value in own.items() if STATES[index].arithmetic}
        for index, value in own.items():
            if not STATES[index].arithmetic:
                _write(index, value)
        seed_generators(scenario.seed, self._rank)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around each call of the class: inside, its own arithmetic states; outside, the harness's."""
        for index, value in self._present.items():
            _write(index, value)
        try:
            yield
        finally:
            self._present = {}
            for index in _ARITHMETIC:
                value = _read(index)
                if not _equal(value, self._home[index]):
                    self._present[index] = value
                    _write(index, self._home[index])

    def end(self, subject: str, scenario: Scenario) -> Left:
        """After a scenario, with all objects of the class's gone: go home, and say what there was to put back."""
        own = self._own.get(subject, {})
        away = dict(self._present)
        for index, home in enumerate(self._home):
            if index not in away and not _equal(value := _read(index), home):
                away[index] = value
        changed = [
            STATES[index].name
            for index in sorted(own.keys() | away.keys())
            if not _equal(away.get(index, self._home[index]), own.get(index, self._home[index]))
        ]
        self._present = {}
        redirected = not self._streams.intact()
        if redirected:
            changed.append(Streams.name)
        stuck = self._put_back(away, redirected)
        recycle = self._growth.after(scenario)
        if self.group_is_gone:
            recycle = "the class destroyed the default process group"
            if default_group() is not None:
                recycle += " and made another"
        elif stuck:
            recycle = f"what the class changed could not be put back: {', '.join(dict.fromkeys(stuck))}"
        return Left(tuple(dict.fromkeys(changed)), recycle)

    def _put_back(self, away: dict[int, Any], redirected: bool) -> list[str]:
        """Put these states, and the streams, back home; returns the names of those that would not go."""
        stuck = []
        if redirected:
            with suppress(OSError):
                self._streams.put_back()
            if not self._streams.intact():
                stuck.append(Streams.name)
        for index in away:
            _write(index, self._home[index])
        stuck += [STATES[index].name for index in away if not _equal(_read(index), self._home[index])]
        names = {STATES[index].name for index in away}
        self._rearm("signal handlers" in names)
        return stuck


def interrupted(error: BaseException) -> bool:
    """Whether an exception that came out of the harness began in code of the class's, which nobody had called.

    Handlers of signals and trace functions run, and raise, wherever the program is just then.
    """
    roots = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__))
    return any(root not in _OURS for root in roots)


def _read(index: int) -> Any:  # noqa: ANN401 (a value of any state)
    try:
        return STATES[index].read()
    except Exception:  # noqa: BLE001 (a class may have broken even that)
        return _UNREADABLE


def _write(index: int, value: Any) -> None:  # noqa: ANN401
    with suppress(Exception):  # whoever needs to know reads again
        STATES[index].write(value)


def _equal(one: Any, other: Any) -> bool:  # noqa: ANN401
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 (an object of the class's with an == of its own)
        return one is other
