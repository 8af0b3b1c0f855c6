"""Which round comes next: so that the rounds of a campaign are the same ones whoever runs them, and when. No clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Rounded(Protocol):
    """What has to be known of a round that is done."""

    @property
    def limit(self) -> int: ...  # noqa: D102

    @property
    def num_examples(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Next:
    """A round to run, at most ``limit`` scenarios of it."""

    index: int
    limit: int


class Schedule:
    """Hands out rounds, the lowest first.

    A round has at most as many scenarios as its size. With a number of examples, that many are run in all: the last
    round is cut short there, which is known only once all before it are done.

    Args:
        done: The rounds that are done; grows as they are.
        size: Of a round.
        examples: How many scenarios in all; None: without end.
        first: Rounds to be run before all others, because of what was seen in them.
    """

    def __init__(
        self,
        done: Mapping[int, Rounded],
        size: Callable[[int], int],
        examples: int | None,
        first: tuple[int, ...] = (),
    ) -> None:
        self._done = done
        self._size = size
        self._examples = examples
        self._first = [index for index in dict.fromkeys(first) if index not in done]
        self._running: set[int] = set()
        self._base, self._before = 0, 0  # whole rounds that are done from the first on, and how many scenarios they had

    def next(self) -> Next | None:
        """What to run now; None: nothing, until something that runs is done, or (:attr:`finished`) for ever."""
        found = self._urgent() or self._lowest()
        if found is not None:
            self._running.add(found.index)
        return found

    def ended(self, index: int, *, urgent: bool = False) -> None:
        """A round does not run any more: it is among those done, or has to be run again, at once where it is urgent."""
        self._running.discard(index)
        if urgent:
            self._first.append(index)

    @property
    def finished(self) -> bool:
        """Whether all examples that were asked for are done."""
        return self._lowest() is None and not self._running

    def _urgent(self) -> Next | None:
        if not self._first:
            return None
        index = self._first.pop(0)
        return Next(index, self._size(index))

    def _lowest(self) -> Next | None:
        index, before = self._base, self._before
        settled = True  # all rounds up to here are done
        while True:
            size = self._size(index)
            limit = size if self._examples is None else min(size, self._examples - before)
            if limit <= 0 or (limit < size and not settled):
                return None
            record = self._done.get(index)
            if record is not None and record.limit >= limit:
                before += min(record.num_examples, limit)
                if settled and limit == size:
                    self._base, self._before = index + 1, before
            elif index in self._running:
                settled = False
                before += size
            else:
                return Next(index, limit)
            index += 1
