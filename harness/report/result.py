"""The outcome of a campaign or a replay: what ``--json`` writes and every rendering starts from. No torch.

The fields are those of DESIGN.md, section 7, "Result". JSON has no nan and no infinity: they are written as the strings
``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from typing import Any, Literal

import msgspec
from msgspec import Struct

import harness
from harness.report.evidence import Evidence
from harness.scenario.model import System
from harness.verdict import RankAccount

SCHEMA = 1

EXIT_HOLDS = 0
EXIT_VIOLATED = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3
EXIT_INTERRUPTED = 130

Verdict = Literal["holds", "violated", "unknown"]
Verb = Literal["verify", "replay", "fuzz"]

_PACKAGES = ("torch", "numpy", "hypothesis", "msgspec")


class WorldExamples(Struct, frozen=True, forbid_unknown_fields=True):
    """Examples run at one world size, and how many of them per second of their own time.

    Of examples that ran side by side each has a share of the time that all of them took, by what its process spent on
    it: so that all examples' time together is no more than that of the campaign.
    """

    count: int
    rate: float


class Examples(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``run`` were judged; ``discarded`` were drawn but lie outside the subject's declared space."""

    run: int
    discarded: int = 0
    per_world: dict[int, WorldExamples] = {}


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first divergence of the smallest failing case. What does not apply is None.

    Steps, ranks and buckets count from 0, ``element`` is the flat index inside ``parameter``, ``index`` the place of
    that parameter in the list, ``offset`` the position in the vector of all elements, ``*_bits`` are hex strings.
    ``pattern`` says where the mismatches lie, ``inputs`` whether what the stage was given agreed, ``symptom`` the one
    kind of mistake that explains all of them (``symptoms_possible``: several that do). ``message`` is one sentence,
    ``scenario`` the case in a few words, ``output`` the end of what the ranks printed, ``case`` the saved case's path,
    ``test`` a file of tests that runs it, ready to paste, ``replay`` the command that runs it again. ``ranks`` says of
    each rank how it ended and where it was, where that is what failed (progress, traffic). ``cut_short``: why it may
    not be the smallest. ``evidence``: what the pictures of `report` are drawn from.
    """

    property: str
    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    parameter: str | None = None
    element: int | None = None
    bucket: int | None = None
    owner: int | None = None
    expected: float | str | None = None
    actual: float | str | None = None
    expected_bits: str | None = None
    actual_bits: str | None = None
    ulps: int | None = None
    mismatches: int | None = None
    index: int | None = None
    offset: int | None = None
    pattern: str | None = None
    inputs: str | None = None
    symptom: str | None = None
    symptoms_possible: tuple[str, ...] | None = None
    message: str | None = None
    scenario: str | None = None
    output: str | None = None
    case: str | None = None
    test: str | None = None
    replay: str | None = None
    ranks: tuple[RankAccount, ...] | None = None
    cut_short: str | None = None
    evidence: Evidence | None = None


class FoundAfter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the violation was first seen: seconds since the search began, the ranks being there; scenarios judged up to
    and with that which showed it."""

    seconds: float
    examples: int


class Slowest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scenario that took longest: its id, in a few words, and seconds."""

    id: str
    scenario: str
    seconds: float


class FuzzSummary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only `fuzz` has.

    ``rounds``: done in all, ``resumed`` of them by earlier runs of this campaign; ``workers``: how many ran rounds.
    ``ids_digest``: of the ids of all scenarios of the rounds done, in order: equal for two campaigns of one seed that
    did the same rounds. ``findings``: distinct violations, of which `failure` is the first. ``directory``: where it
    resumes from. ``required``: how many situations a full campaign must reach, without those that the subject
    declined.
    """

    rounds: int
    workers: int
    resumed: int
    ids_digest: str
    findings: tuple[Failure, ...]
    slowest: Slowest | None
    required: int
    directory: str


class Result(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One campaign's or replay's result; ``seconds`` is wall time, rates are examples per second.

    ``verb``: what made it. ``system``: what kind of system the subject is. ``device``: where the ranks' tensors were,
    ``cpu`` or ``cuda``.
    ``order``, ``schedule``: of simulated worlds (backend sim), in what order sums were added and how ranks took turns.
    ``oracle``: rule -> comparisons judged by it. ``properties``: name -> how many times it was really checked.
    ``reached``: situation -> scenarios that had it. ``changed``: what the subject changed in its processes beside its
    own (and what was put back) -> scenarios in which it did. ``recycled``: for each time that ranks were replaced
    because of what had piled up in them, why. ``reason`` says why the verdict is unknown, else None. ``margin``: the
    largest error of a comparison with a bound in terms of that bound; None when there was none. ``missing``: situations
    that a full campaign must reach and that did not come up. ``found_after``: what it took `verify` to see the
    violation; what became of it since (confirmed, made smaller, explained) is in ``seconds`` alone.
    """

    verdict: Verdict
    subject: str
    backend: str
    worlds: tuple[int, ...]
    seed: int
    examples: Examples
    seconds: float
    examples_per_second: float
    oracle: dict[str, int] = {}
    properties: dict[str, int] = {}
    reached: dict[str, int] = {}
    changed: dict[str, int] = {}
    recycled: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    failure: Failure | None = None
    found_after: FoundAfter | None = None
    reason: str | None = None
    interrupted: bool = False
    device: str = "cpu"
    order: str | None = None
    schedule: str | None = None
    margin: float | None = None
    missing: tuple[str, ...] = ()
    fuzz: FuzzSummary | None = None
    system: System = "zero_master"
    verb: Verb = "verify"
    schema: int = SCHEMA

    @property
    def exit_code(self) -> int:
        """What the process exits with."""
        return exit_code(self.verdict, interrupted=self.interrupted)


def exit_code(verdict: Verdict, *, interrupted: bool) -> int:
    """0, 1 or 3 by the verdict; an interrupted run is 130 whatever it had found (the verdict tells)."""
    if interrupted:
        return EXIT_INTERRUPTED
    return {"holds": EXIT_HOLDS, "violated": EXIT_VIOLATED, "unknown": EXIT_UNKNOWN}[verdict]


def versions() -> dict[str, str]:
    """Versions of what a result depends on, read from package metadata; nothing is imported for it."""
    found = {"zero2-harness": harness.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def to_json(value: Any) -> bytes:  # noqa: ANN401  (any tree of structs, dicts, lists and scalars)
    """Indented JSON, ending in a newline, of a :class:`Result` or any other tree of structs and plain data.

    What does not print is escaped, also where JSON would not ask for it: standard output may be a terminal.
    """
    text = msgspec.json.format(msgspec.json.encode(plain(value)), indent=2).decode()
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text).encode() + b"\n"


def plain(value: Any) -> Any:  # noqa: ANN401
    """The same tree of dicts, lists and scalars that JSON can carry."""
    return _jsonable(msgspec.to_builtins(value, str_keys=True))


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _jsonable(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        # Paths and captured output may hold bytes that are no text (lone surrogates): JSON cannot carry them.
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_jsonable(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value
