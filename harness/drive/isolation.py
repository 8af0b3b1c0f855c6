"""What a class does to its process stays with its scenario: states are put back, and what piles up is counted.

Three environments. *Home* is the process as it was before any class was imported; the harness itself works in it. A
class's *own* is home with what importing the class changed: the one in which its scenarios begin. And there is what
the class has made of it since. The harness and the class take turns many times in a scenario; states that the
harness's arithmetic depends on are then exchanged each time, all others once, at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from harness.drive.growth import Growth, default_group
from harness.drive.states import STATES, Streams, seed_generators
from harness.scenario.model import Scenario

_ARITHMETIC = tuple(index for index, state in enumerate(STATES) if state.arithmetic)
# What the harness and the classes of several ranks in one process exchange whenever they take turns.
_EXCHANGED = tuple(index for index, state in enumerate(STATES) if state.arithmetic or state.of_rank)
_OF_PROCESS = tuple(index for index in _EXCHANGED if not STATES[index].thread)
_OF_THREAD = tuple(index for index, state in enumerate(STATES) if state.thread)
_INHERITED = tuple(index for index in _OF_THREAD if STATES[index].inherited)
_READ_OF_PROCESS = tuple(STATES[index].read for index in _OF_PROCESS)
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


class Environment:
    """The states of the process as the class of one rank has them. Made by :class:`Isolation`, for one scenario.

    A rank that is a process needs :meth:`around` alone. Where the ranks of a world are threads of one process, of which
    one runs at a time, each is to be in its :meth:`on_thread` from beginning to end, and calls, on its own thread,
    :meth:`leave` when it hands its turn on and :meth:`come_back` when it has it again.
    """

    def __init__(self, home: Sequence[Any], own: Mapping[int, Any], exchanged: Sequence[int], group: object) -> None:
        """``home`` and ``own``: by index of state, where the harness works and what the class begins with instead."""
        self._home = list(home)
        self._own = own
        self._exchanged = exchanged
        self._group = group
        self._present = {index: own[index] for index in own if index in exchanged}  # as the class has them now
        self._inside = False
        self._aside: dict[int, Any] = {}  # those of the process, while others have their turn
        self._of_process = [home[index] for index in _OF_PROCESS]

    @property
    def group_is_gone(self) -> bool:
        """The default process group was destroyed, or replaced by another; to be asked in the rank's turn."""
        return default_group() is not self._group

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around each call of the class: inside, its own states; outside, the harness's."""
        for index, value in self._present.items():
            _write(index, value)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._present = {}
            for index in self._exchanged:
                value = _read(index)
                if not _equal(value, self._home[index]):
                    self._present[index] = value
                    _write(index, self._home[index])

    def leave(self) -> None:
        """The rank hands its turn on: what its class, if it is in a call of it, made of the process goes aside."""
        if not self._inside:
            return
        with suppress(Exception):  # a class may have broken even that
            if [read() for read in _READ_OF_PROCESS] == self._of_process:
                return
        for index in _OF_PROCESS:
            value = _read(index)
            if not _equal(value, self._home[index]):
                self._aside[index] = value
                _write(index, self._home[index])

    def come_back(self) -> None:
        """The rank has its turn again; to be called also when it is to raise at once."""
        if self._aside:
            for index, value in self._aside.items():
                _write(index, value)
            self._aside = {}

    @contextmanager
    def on_thread(self) -> Iterator[None]:
        """Around all that the thread of this rank does, in its turns; the default group is there and its own.

        Outside, the thread's own states are as they were; what the class changed of them is reported as all else.
        """
        self._group = default_group()
        for index in _OF_THREAD:
            if index in _INHERITED:  # from whichever class had a turn before
                _write(index, self._home[index])
            self._home[index] = _read(index)  # a thread inherits when it asks for the first time: now
            if index in self._own and index not in self._exchanged:
                _write(index, self._own[index])
        try:
            yield
        finally:
            for index in _OF_THREAD:
                value = _read(index)
                if not _equal(value, self._home[index]):
                    self._present.setdefault(index, value)
                    _write(index, self._home[index])

    def changed(self, now: Mapping[int, Any]) -> set[int]:
        """Which states the class changed; ``now``: of the process, where they are not home."""
        away = {**now, **self._present}
        return {
            index
            for index in self._own.keys() | away.keys()
            if not _equal(away.get(index, self._home[index]), self._own.get(index, self._home[index]))
        }

    @property
    def present(self) -> Mapping[int, Any]:
        """What the class has now in place of home, of the states that are exchanged."""
        return self._present


class Isolation:
    """Of one rank, or of all the ranks of a world in one process; made before any class is imported."""

    def __init__(self, rank: int | None, rearm: Callable[[bool], None], growth: Growth | None = None) -> None:
        """Take the present states for home.

        Args:
            rank: Whose process this is; None for a world in one process, whose ranks are threads.
            rearm: :attr:`harness.launch.rank.RankContext.rearm`.
            growth: What counts what piles up; with the usual limits if None.
        """
        self._rank = rank
        self._rearm = rearm
        self._growth = growth or Growth()
        self._streams = Streams()
        self._group = default_group()
        self._home = [_read(index) for index in range(len(STATES))]
        # By class and rank: the states (their indices) that its import changed.
        self._own: dict[tuple[str, int], dict[int, Any]] = {}
        self._environments: dict[int, Environment] = {}

    @property
    def group_is_gone(self) -> bool:
        """The default group of this process was destroyed, or replaced; of a world: :class:`Environment`."""
        return default_group() is not self._group

    @contextmanager
    def importing(self, subject: str, rank: int | None = None) -> Iterator[None]:
        """Around the import of a class: what it changes is its own from now on, and only in its scenarios.

        ``rank``: for which it is imported; may be left out where this process is one rank.
        """
        rank = self._rank if rank is None else rank
        if rank is None:
            raise ValueError(f"import of {subject}: for which rank? This process holds a world of them")
        seed_generators(0, rank)
        own: dict[int, Any] = {}
        try:
            yield
            self._own[subject, rank] = own
        finally:
            now = [_read(index) for index in range(len(STATES))]
            own.update((index, value) for index, value in enumerate(now) if not _equal(value, self._home[index]))
            self._put_back(own, not self._streams.intact())

    def begin(self, subject: str, scenario: Scenario) -> None:
        """Before a scenario: the class's own environment, and generators in a state that follows from the scenario.

        Of a world in one process this is called once, before its threads start, and its ranks see to their generators.
        """
        if self._rank is not None:
            self._environments = {self._rank: self._environment(subject, self._rank)}
            for index, value in self._own.get((subject, self._rank), {}).items():
                if not STATES[index].arithmetic:
                    _write(index, value)
            seed_generators(scenario.seed, self._rank)
            return
        self._environments = {rank: self._environment(subject, rank) for rank in range(scenario.world)}
        for index, value in self._own.get((subject, 0), {}).items():
            if index not in _EXCHANGED and index not in _OF_THREAD:
                _write(index, value)

    def environment(self, rank: int) -> Environment:
        """The states as the class of this rank has them in this scenario; from :meth:`begin` to :meth:`end`."""
        return self._environments[rank]

    def around(self) -> AbstractContextManager[None]:
        """:meth:`Environment.around` of the only rank."""
        (environment,) = self._environments.values()
        return environment.around()

    def end(self, subject: str, scenario: Scenario) -> Left:
        """After a scenario, with all objects of the class's gone: go home, and say what there was to put back.

        Of a world in one process this is called once, after all its threads have ended, on the thread that had begun.
        """
        environments = self._environments or {0: self._environment(subject, self._rank or 0)}
        self._environments = {}
        now = {index: value for index, home in enumerate(self._home) if not _equal(value := _read(index), home)}
        indices: set[int] = set()
        away: dict[int, Any] = {}
        for environment in environments.values():
            indices |= environment.changed(now)
            away |= environment.present
        changed = [STATES[index].name for index in sorted(indices)]
        redirected = not self._streams.intact()
        if redirected:
            changed.append(Streams.name)
        stuck = self._put_back(away | {index: now[index] for index in now if index not in away}, redirected)
        recycle = self._growth.after(scenario)
        if self._rank is not None and self.group_is_gone:  # those of a world are made for each scenario
            recycle = "the class destroyed the default process group"
            if default_group() is not None:
                recycle += " and made another"
        elif stuck:
            recycle = f"what the class changed could not be put back: {', '.join(dict.fromkeys(stuck))}"
        return Left(tuple(dict.fromkeys(changed)), recycle)

    def _environment(self, subject: str, rank: int) -> Environment:
        if self._rank is not None:
            return Environment(self._home, self._own.get((subject, rank), {}), _ARITHMETIC, self._group)
        # What the whole process has but once begins as the import of the first rank's class left it, and so does all
        # else of a rank whose class is the first's.
        first = self._own.get((subject, 0), {})
        own = self._own.get((subject, rank), first)
        apart = {*_EXCHANGED, *_OF_THREAD}
        once = {index: value for index, value in first.items() if index not in apart}
        return Environment(
            self._home, once | {index: value for index, value in own.items() if index in apart}, _EXCHANGED, None
        )

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
