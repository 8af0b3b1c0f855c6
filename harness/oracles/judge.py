"""The parent's part of a verdict: merge what the ranks say, and compare what only all ranks together show.

No torch: this runs in the process that waits on the ranks.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from harness.oracles import sequence
from harness.oracles.sequence import ranks_text
from harness.verdict import Divergence, Property, RankStatus, RankVerdict, Stage

# What a rank says whose peer has gone, or did not come: it did nothing wrong itself.
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "caused pair closure",
)
_PEER_LATE = ("timed out waiting", "failed to pass monitoredbarrier", "wait timeout", "socket timeout")
# Nothing of this is what a backend raises: the subject has connections of its own, to a server of metrics, say.
_NO_BACKEND = re.compile(
    r"(?:^|raised )(?:[\w.]+\.)?(?:Connection\w*Error|BrokenPipeError|TimeoutError|OSError)\b", re.M
)
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line \d+, in .*\n(?P<source> {4}.*\n)?', re.M)
_RAISE = re.compile(r"(?:^ *|[:;] *)raise\b")
_CHAINED = re.compile(r"\n\n(?:The above exception was the direct|During handling of the above)[^\n]*\n\n")


@dataclass(frozen=True)
class Judgement:
    """What all ranks together say about one scenario.

    Attributes:
        divergence: the first thing that differs, None when nothing does.
        checks: comparisons across ranks made here, by property; those the ranks made are not in it.
        unsupported: every rank said that the scenario is outside the subject's space, and nothing differed before.
        interface: what every rank found missing in the built object; None when it has what the contract asks for.
    """

    divergence: Divergence | None
    checks: Mapping[str, int]
    unsupported: bool = False
    interface: str | None = None


def merge(verdicts: Sequence[RankVerdict], world: int, implied: sequence.Implied | None = None) -> Judgement:
    """Merge the verdicts of all ranks of one scenario.

    The earliest (step, stage) wins. Within one, a difference in the sequence of collectives comes first (wrong values
    are its consequence), then what ranks found themselves by rank (those last whose peer had gone), then what differs
    between ranks. ``implied``: see :func:`harness.oracles.sequence.differences`.

    Raises:
        ValueError: not exactly one verdict per rank, or ranks that finished without a divergence observed different
            steps: the harness itself is wrong, and nothing was decided.
    """
    by_rank = {verdict.rank: verdict for verdict in verdicts}
    if len(verdicts) != world or set(by_rank) != set(range(world)):
        raise ValueError(f"verdicts of ranks {sorted(v.rank for v in verdicts)}, expected one of each of {world} ranks")
    ordered = [by_rank[rank] for rank in range(world)]
    checks: Counter[str] = Counter()
    logs = [sequence.Log(said.collectives, said.driven or said.status is RankStatus.DONE) for said in ordered]
    traffic, num_compared = sequence.differences(logs, implied)
    if num_compared:
        checks[Property.TRAFFIC.value] = num_compared
    own = [divergence for verdict in ordered if (divergence := _own(verdict)) is not None]
    own.extend(_split_status(ordered))
    across = [*_norms(ordered, checks), *_weights(ordered, checks)]
    candidates = [*((0, found) for found in traffic), *((1, found) for found in own), *((2, found) for found in across)]
    lost = {verdict.rank for verdict in ordered if peer_lost(verdict)}
    first = min(
        candidates,
        key=lambda entry: (entry[1].when, entry[0], entry[0] == 1 and entry[1].rank in lost, entry[1].rank or 0),
        default=None,
    )
    if first is not None:
        return Judgement(first[1], dict(checks))
    statuses = {verdict.status for verdict in ordered}
    if statuses == {RankStatus.INTERFACE}:
        return Judgement(None, dict(checks), interface=ordered[0].detail or "part of the interface is missing")
    return Judgement(None, dict(checks), unsupported=statuses == {RankStatus.UNSUPPORTED})


def _own(verdict: RankVerdict) -> Divergence | None:
    """What a rank itself found: a difference, or that the subject raised."""
    found = verdict.divergence
    refused = verdict.status in (RankStatus.UNSUPPORTED, RankStatus.INTERFACE)
    # What a rank found before it met a refusal counts; where it met the refusal is no fault when all ranks did.
    if found is not None and not (refused and found.property is Property.PROGRESS):
        return found if found.rank is not None else replace(found, rank=verdict.rank)
    if verdict.status is RankStatus.RAISED:
        return Divergence(
            property=Property.PROGRESS,
            stage=Stage.BUILD,
            rank=verdict.rank,
            message=f"rank {verdict.rank} raised: {verdict.detail or 'no detail'}",
        )
    return None


def _split_status(verdicts: Sequence[RankVerdict]) -> list[Divergence]:
    """A scenario is outside the subject's space, or its interface incomplete, on all ranks or on none."""
    found = []
    for status, said in (
        (RankStatus.UNSUPPORTED, "raised NotImplementedError"),
        (RankStatus.INTERFACE, "built an object that lacks part of the interface"),
    ):
        ranks = [verdict.rank for verdict in verdicts if verdict.status is status]
        others = [verdict.rank for verdict in verdicts if verdict.status is not status]
        if not ranks or not others:
            continue
        where = verdicts[ranks[0]].divergence
        detail = (verdicts[ranks[0]].detail or "").strip().rpartition("\n")[2]
        found.append(
            Divergence(
                property=Property.PROGRESS,
                stage=where.stage if where else Stage.BUILD,
                step=where.step if where else None,
                rank=ranks[0],
                message=f"{ranks_text(ranks)} {said} while {ranks_text(others)} did not"
                + (f": {detail}" if detail else ""),
            )
        )
    return found


def peer_lost(verdict: RankVerdict) -> bool:
    """Whether all that went wrong on a rank is that another one was no longer there, or did not come in time."""
    return _backend_says(verdict, _PEER_GONE + _PEER_LATE)


def peer_late(verdict: RankVerdict) -> bool:
    """Whether it is that another one did not come in time, by a time-out of the subject's own."""
    return _backend_says(verdict, _PEER_LATE)


def _backend_says(verdict: RankVerdict, phrases: Sequence[str]) -> bool:
    """Whether what a rank raised, or an exception behind it, is the backend's and holds one of these phrases."""
    found = verdict.divergence
    if verdict.status is not RankStatus.RAISED or found is None or found.property is not Property.PROGRESS:
        return False
    for error in _CHAINED.split(verdict.detail or found.message):
        *_, last = [None, *_FRAME.finditer(error)]
        said = error if last is None else error[last.end() :]
        raised_there = last is not None and _RAISE.search(last["source"] or "")
        if _NO_BACKEND.search(said) or (last is not None and raised_there and "/torch/" not in last["file"]):
            continue
        if any(phrase in said.lower() for phrase in phrases):
            return True
    return False


# --- the same value on every rank -------------------------------------------------------------------------------------


def _norms(verdicts: Sequence[RankVerdict], checks: Counter[str]) -> list[Divergence]:
    observed: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for verdict in verdicts:
        for norm in verdict.norms:
            observed[norm.step, norm.call][verdict.rank] = norm.bits
    _same_steps(verdicts, observed.values(), "squared norms")
    found = []
    for (step, call), by_rank in observed.items():
        if len(by_rank) < 2:
            continue
        checks[Property.NORM.value] += 1
        split = _split(by_rank)
        if split is None:
            continue
        (expected, agreeing), (actual, differing) = split
        which = "before clipping" if call == 0 else "after clipping"
        found.append(
            Divergence(
                property=Property.NORM,
                stage=Stage.NORM,
                step=step,
                rank=differing[0],
                expected=_number(expected),
                actual=_number(actual),
                expected_bits=expected,
                actual_bits=actual,
                ulps=_ulps(expected, actual),
                message=f"the norm {which} is not the same on all ranks: "
                f"{ranks_text(agreeing)} got {expected}, {ranks_text(differing)} {actual}",
            )
        )
    return found


def _weights(verdicts: Sequence[RankVerdict], checks: Counter[str]) -> list[Divergence]:
    observed: dict[tuple[int, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for verdict in verdicts:
        for weights in verdict.weights:
            observed[weights.step, weights.group][verdict.rank] = weights.digest
    _same_steps(verdicts, [by_rank for (_, group), by_rank in observed.items() if not group], "weights")
    found = []
    for (step, _), by_rank in observed.items():
        if len(by_rank) < 2:
            continue
        checks[Property.AGREEMENT.value] += 1
        split = _split(by_rank)
        if split is not None:
            (expected, agreeing), (actual, differing) = split
            found.append(
                Divergence(
                    property=Property.AGREEMENT,
                    stage=Stage.GATHER,
                    step=step,
                    rank=differing[0],
                    expected=expected,
                    actual=actual,
                    message=f"the compute weights are not the same on all ranks: {ranks_text(agreeing)} have digest "
                    f"{expected}, {ranks_text(differing)} {actual}",
                )
            )
    return found


def _same_steps(verdicts: Sequence[RankVerdict], observed: Iterable[Mapping[int, str]], what: str) -> None:
    """Ranks that were driven to the end and found nothing must all have looked at the same steps."""
    if any(verdict.status is not RankStatus.DONE or verdict.divergence is not None for verdict in verdicts):
        return
    for by_rank in observed:
        missing = [verdict.rank for verdict in verdicts if verdict.rank not in by_rank]
        if missing:
            raise ValueError(
                f"{ranks_text(missing)} finished without observing {what} that {ranks_text(sorted(by_rank))} saw"
            )


def _split(by_rank: Mapping[int, str]) -> tuple[tuple[str, list[int]], tuple[str, list[int]]] | None:
    """What most ranks have (in a tie: the lowest rank), and what the lowest rank that differs has; None: all agree."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        holders[by_rank[rank]].append(rank)
    if len(holders) == 1:
        return None
    expected = max(holders, key=lambda value: (len(holders[value]), -holders[value][0]))
    actual = min((value for value in holders if value != expected), key=lambda value: holders[value][0])
    return (expected, holders[expected]), (actual, holders[actual])


def _number(bits: str) -> float | None:
    """The float behind a hex pattern of 32 or 64 bits; nan for ``"nan"``."""
    if bits == "nan":
        return math.nan
    digits = bits.removeprefix("0x")
    code = {8: ">f", 16: ">d"}.get(len(digits))
    return None if code is None else float(struct.unpack(code, bytes.fromhex(digits))[0])


def _ulps(expected: str, actual: str) -> int | None:
    if "nan" in (expected, actual) or len(expected) != len(actual):
        return None
    sign = 1 << (4 * len(expected.removeprefix("0x")) - 1)
    ordered = [bits if bits < sign else sign - bits for bits in (int(expected, 16), int(actual, 16))]
    return abs(ordered[0] - ordered[1])
