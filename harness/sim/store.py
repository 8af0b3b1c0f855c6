"""The store of a simulated world: shared by all ranks, and whoever waits for a key lets the others run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from harness.sim.scheduler import Scheduler

_Timeout = datetime.timedelta | None


class _Keys:
    """A rank waits for keys, or asks for them. A Wait."""

    late = False

    def __init__(self, store: SimStore, keys: Sequence[str]) -> None:
        self._store = store
        self.keys = tuple(keys)

    def happen(self) -> None:
        """Keys are set by ranks, not by themselves."""

    def describe(self, rank: int) -> str:
        absent = [key for key in self.keys if not self._store.has([key])] or self.keys
        return f"for the {'key' if len(absent) == 1 else 'keys'} {', '.join(absent)} of the store"

    def missing(self) -> tuple[int, ...]:
        return ()


class SimStore(Store):
    """In memory; torch calls it from C++ too, in the thread of the rank.

    What only reads lets the other ranks run first: a rank may ask for a key again and again, until another sets it.
    """

    _scheduler: Scheduler

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[int, _Keys] = {}

    def begin(self, scheduler: Scheduler) -> None:
        """A run begins; keys stay."""
        self._scheduler = scheduler
        self._waiting = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, for everybody."""
        self._scheduler.begin("set() of the store")
        self._set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to the number that a key holds."""
        if value == 0:
            self._ask([key])
        else:
            self._scheduler.begin("add() of the store")
        total = int(self._values.get(key, b"0")) + value
        self._set(key, str(total).encode())
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Put this behind what a key holds."""
        self._scheduler.begin("append() of the store")
        self._set(key, self._values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it holds what is expected, or, where nothing is expected, if it is not there."""
        self._ask([key])
        wanted = _bytes(expected)
        present = self._values.get(key)
        if present == wanted or (present is None and not wanted):
            self._scheduler.begin("compare_set() of the store")
            self._set(key, _bytes(desired))
        return self._values.get(key, wanted)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there."""
        self._ask(keys)
        return self.has(keys)

    def wait(self, keys: Sequence[str], timeout: _Timeout = None) -> None:
        """Until all these keys are there; nothing times out here."""
        self._ask(keys)
        if self.has(keys):
            return
        rank = self._scheduler.check_thread("wait() of the store")
        wait = self._waiting[rank] = _Keys(self, keys)
        try:
            self._scheduler.wait(wait, lambda: self.has(keys))
        finally:
            del self._waiting[rank]

    def delete_key(self, key: str) -> bool:
        """Whether the key was there."""
        self._scheduler.begin("delete_key() of the store")
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        self._ask(())
        return len(self._values)

    def has_extended_api(self) -> bool:
        """No."""
        return False

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Nothing times out here."""

    def has(self, keys: Sequence[str]) -> bool:
        """As :meth:`check`, for the simulator itself: nobody else runs meanwhile."""
        return all(key in self._values for key in keys)

    def _ask(self, keys: Sequence[str]) -> None:
        self._scheduler.check_thread("the store")
        self._scheduler.give_way(_Keys(self, keys))

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for rank, wait in self._waiting.items():
            if self.has(wait.keys):
                self._scheduler.wake(rank)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
