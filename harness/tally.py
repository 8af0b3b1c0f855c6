"""What a campaign has seen so far, to be added up over scenarios, rounds and processes."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from harness.evaluate import Conclusion, Evaluation
from harness.report.result import FoundAfter
from harness.scenario.model import CONTRACT, Extension, Scenario, System
from harness.scenario.systems import reached


@dataclass
class Tally:
    """Counts of one campaign or a part of it.

    Attributes:
        began: on a monotonic clock.
        run: world -> scenarios judged; ``seconds``: world -> what they took.
        discarded: scenarios that the subject declined; ``declined``: situation -> how many of these had it.
        checks, oracle, reached, changed: as :class:`harness.report.result.Result` has them.
        recycled: why ranks were replaced.
        margin: the largest error in terms of its bound; None when nothing was held against a bound.
        system, extension: what kind of system the subject is, and what it takes beyond the contract's space.
        versions: of what the ranks compute with, beside what the waiting process knows.
        found_after: when a campaign first saw the violation that ends it.
    """

    began: float = field(default_factory=time.monotonic)
    run: Counter[int] = field(default_factory=Counter)
    seconds: Counter[int] = field(default_factory=Counter)
    discarded: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    oracle: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    recycled: list[str] = field(default_factory=list)
    margin: float | None = None
    system: System = "zero_master"
    extension: Extension = CONTRACT
    versions: dict[str, str] = field(default_factory=dict)
    found_after: FoundAfter | None = None

    @property
    def num_run(self) -> int:
        """Scenarios judged."""
        return sum(self.run.values())

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def add(self, scenario: Scenario, evaluation: Evaluation) -> None:
        """Count one scenario and what came of it."""
        self.changed.update(evaluation.changed)
        if evaluation.recycled is not None:
            self.recycled.append(evaluation.recycled)
        if evaluation.conclusion is Conclusion.UNSUPPORTED:
            self.discarded += 1
            self.declined.update(reached(scenario))
            return
        self.run[scenario.world] += 1
        self.seconds[scenario.world] += evaluation.seconds  # type: ignore[assignment]  # a Counter adds floats too
        self.checks.update(evaluation.checks)
        self.oracle.update(evaluation.oracle)
        self.reached.update(reached(scenario))
        self.reached.update(evaluation.situations)
        if evaluation.conclusion is Conclusion.HOLDS:  # a wrong value says nothing of rounding
            self.margin = larger(self.margin, evaluation.margin)

    def merge(self, other: Tally) -> None:
        """Add what another one counted; its time counts as what its scenarios took."""
        self.discarded += other.discarded
        self.recycled += other.recycled
        self.margin = larger(self.margin, other.margin)
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))

    def plain(self) -> Counts:
        """The same as plain data, without the clock."""
        return Counts(**{name: getattr(self, name) for name in Counts.__struct_fields__})


class Counts(Struct, frozen=True, kw_only=True):
    """A :class:`Tally` that can be sent and stored."""

    run: dict[int, int] = {}
    seconds: dict[int, float] = {}
    discarded: int = 0
    declined: dict[str, int] = {}
    checks: dict[str, int] = {}
    oracle: dict[str, int] = {}
    reached: dict[str, int] = {}
    changed: dict[str, int] = {}
    recycled: list[str] = []
    margin: float | None = None

    def tally(self) -> Tally:
        """As something to be added up."""
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        for name in _COUNTERS:
            fields[name] = Counter(fields[name])
        return Tally(**fields)


_COUNTERS = ("run", "seconds", "declined", "checks", "oracle", "reached", "changed")


def larger(one: float | None, other: float | None) -> float | None:
    """The larger of two margins, where there are any."""
    known = [margin for margin in (one, other) if margin is not None]
    return max(known, default=None)
