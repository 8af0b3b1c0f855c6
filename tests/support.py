"""What several tests share: campaigns over the subjects of tests/subjects on ranks that stay warm."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness.evaluate import Pool
from harness.report.result import Result
from harness.runner import CampaignOptions, replay_case, run_campaign
from harness.scenario import codec, systems
from harness.scenario.model import CONTRACT, Extension, Scenario, System
from harness.subjects import source

SUBJECTS = Path(__file__).parent / "subjects"

FULL_TABLE = bool(os.environ.get("FULL_TABLE"))
"""With FULL_TABLE=1 in the environment (`make stress`) every class is tried in both kinds of world, every way to fail
on every rank, every case of what is sampled below. Else each class in one kind of world, or by its saved case.
"""

T = TypeVar("T")
U = TypeVar("U")


def sampled(items: Iterable[T], every: int) -> list[T]:
    """Each so-manieth of what differs only in details; all with FULL_TABLE."""
    return list(items)[:: 1 if FULL_TABLE else every]


def paired(first: Iterable[T], second: Sequence[U]) -> list[tuple[T, U]]:
    """Each of the first with one of the second, in turn; with FULL_TABLE with all of them."""
    return [
        (one, other)
        for index, one in enumerate(first)
        for number, other in enumerate(second)
        if FULL_TABLE or index % len(second) == number
    ]


def repetitions(few: int, many: int) -> int:
    """How often something is tried that one time shows nearly as well: ``many`` times with FULL_TABLE."""
    return many if FULL_TABLE else few


def subject(name: str, args: dict[str, source.Scalar] | None = None) -> source.SubjectSource:
    """``FILE.py:Class`` of tests/subjects, or any other name as ``--subject`` has it."""
    return source.parse(f"{SUBJECTS / name}" if ".py:" in name else name, args)


class Silent:
    """An observer that shows nothing."""

    def started(self, options: CampaignOptions) -> None: ...

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None: ...

    def shrinking(self, tried: int, best: Scenario) -> None: ...

    def note(self, text: str) -> None: ...


class Campaigns:
    """Runs campaigns and replays on one pool, of ``backend`` and ``device``; failing cases go to ``report``."""

    def __init__(self, pool: Pool, report: Path, backend: str = "gloo", device: str | None = None) -> None:
        self.pool = pool
        self.report = report
        self.backend = backend
        self.device = device

    def run(
        self,
        name: str,
        *,
        worlds: tuple[int, ...],
        examples: int,
        seed: int = 5,
        timeout_s: float | None = None,
        shrink_s: float = 0.5,
        args: dict[str, source.Scalar] | None = None,
    ) -> Result:
        """A campaign over a subject, given as :func:`subject` has it."""
        options = self._options(name, worlds, seed, timeout_s, examples=examples, shrink_s=shrink_s, args=args)
        return run_campaign(options, Silent(), self.pool)

    def replay(self, case: Path, name: str) -> Result:
        """One saved case, on a subject given in the same way."""
        loaded = codec.load(case)
        options = self._options(name, (loaded.scenario.world,), 0, None, examples=1, shrink_s=0.0)
        return replay_case(loaded, case, options, Silent(), self.pool)

    def _options(
        self,
        name: str,
        worlds: tuple[int, ...],
        seed: int,
        timeout_s: float | None,
        *,
        examples: int,
        shrink_s: float,
        args: dict[str, source.Scalar] | None = None,
    ) -> CampaignOptions:
        return CampaignOptions(
            subject=subject(name, args),
            worlds=worlds,
            backend=self.backend,
            device=self.device,
            seed=seed,
            examples=examples,
            seconds=None,
            bucket=None,
            parameters=None,
            report=self.report,
            timeout_s=timeout_s,
            shrink_s=shrink_s,
        )


def required(
    worlds: Sequence[int], bucket: int | None = None, extension: Extension = CONTRACT, system: System = "zero_master"
) -> frozenset[Any]:
    """What a full campaign over these worlds must reach, as a set."""
    return frozenset(systems.required(worlds, systems.Space(system, bucket, extension)))
