"""What `doctor` says: findings, and the verdict over all of them. No torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from msgspec import Struct

from harness.report.result import EXIT_HOLDS, EXIT_INTERRUPTED, EXIT_UNKNOWN, SCHEMA


class Verdict(enum.StrEnum):
    """How one finding bears on the harness's verdicts.

    OK: as the harness relies on. NOTE: worth knowing; the harness copes. PROBLEM: its verdicts on this machine cannot
    be trusted, or it will fail. UNKNOWN: could not be measured; ``measured`` says why.
    """

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was measured.

    Attributes:
        name: the same in every run over the same worlds.
        measured: what was found, with figures.
        meaning: what that means for the user.
        relied_on: verdicts of the harness rest on it: when it is unknown, so is whether they can be trusted.
        details: further lines for a person (the trees of a sum).
        values: the same as data, for programs.
    """

    name: str
    verdict: Verdict
    measured: str
    meaning: str
    relied_on: bool = False
    details: tuple[str, ...] = ()
    values: dict[str, Any] = {}


T = TypeVar("T")
OverallVerdict = Literal["ok", "problem", "unknown"]


class DoctorResult(Struct, frozen=True, kw_only=True):
    """The outcome of a run. ``seconds`` is the whole run's, ``interrupted`` leaves the findings made so far."""

    verdict: OverallVerdict
    backend: str
    worlds: tuple[int, ...]
    seconds: float
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    device: str = "cpu"
    interrupted: bool = False
    schema: int = SCHEMA

    @property
    def exit_code(self) -> int:
        """What the process exits with: 0 when all is ok, 3 for a problem or an unknown, 130 when interrupted."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_HOLDS if self.verdict == "ok" else EXIT_UNKNOWN


def overall(findings: Iterable[Finding], *, interrupted: bool = False) -> OverallVerdict:
    """``problem`` if any finding is one; ``unknown`` if something verdicts rest on is, or was not reached."""
    findings = tuple(findings)
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        return "problem"
    if interrupted or any(finding.verdict is Verdict.UNKNOWN and finding.relied_on for finding in findings):
        return "unknown"
    return "ok"


def unmeasured(name: str, reason: str, *, relied_on: bool) -> Finding:
    """The finding for something that could not be measured."""
    meaning = (
        "Verdicts rest on this: trust none of them until it can be measured here."
        if relied_on
        else "No verdict of the harness rests on this."
    )
    return Finding(
        name=name,
        verdict=Verdict.UNKNOWN,
        measured=f"not measured: {reason}",
        meaning=meaning,
        relied_on=relied_on,
    )


def over_worlds(
    name: str,
    reports: Mapping[int, T],
    missing: Mapping[int, str],
    read: Callable[[Mapping[int, T]], Finding],
    *,
    relied_on: bool,
) -> Finding:
    """What the worlds that answered show; ``unknown`` when others did not, unless there is a problem already."""
    finding = read(reports) if reports else None
    if not missing or (finding is not None and finding.verdict is Verdict.PROBLEM):
        if finding is None:
            raise ValueError(f"{name}: neither a report nor a reason why there is none")
        return finding
    return unmeasured(name, by_reason(missing), relied_on=relied_on)


def by_reason(missing: Mapping[int, str]) -> str:
    """``world 3, 4: it was cold; world 8: too many``: each reason once."""
    worlds: dict[str, list[str]] = {}
    for world, reason in missing.items():
        worlds.setdefault(reason, []).append(str(world))
    return "; ".join(f"world {', '.join(named)}: {reason}" for reason, named in worlds.items())


def counted(number: int, noun: str) -> str:
    """``1 element``, ``2,000 elements``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
