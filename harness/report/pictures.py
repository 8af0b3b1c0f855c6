"""What the pictures of a page consist of: shares of a width in percent, counts, words. Nothing is drawn here."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from harness.museum.score import MuseumResult, PlantOutcome
from harness.report.evidence import Evidence, Map, MapBucket, RankUlps, State, Timeline, WrongRun
from harness.scenario.model import MAX_WORLD

MOST_ROWS: Final = 24
"""Buckets that are drawn: those with wrong values first."""

MOST_LANES: Final = 8
NARROWEST: Final = 0.2  # percent
_LABELLED = 7.0  # percent of the width: below, a word has no room
_WORDED = 15.0
_NUMBERED = 3.0


@dataclass(frozen=True)
class Bar:
    """A stretch of a width: ``x`` and ``width`` in percent. ``label``: what has room in it, ``title``: in full."""

    x: float
    width: float
    title: str
    label: str = ""
    odd: bool = False


@dataclass(frozen=True)
class Lane:
    """Wrong values of one rank (or of all alike) in a bucket."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class BucketRow:
    """One bucket: its parameters, its pieces, its padding, what is wrong in it. ``width``: percent of the widest."""

    index: int
    title: str
    width: float
    wrong: int
    parameters: tuple[Bar, ...]
    pieces: tuple[Bar, ...]
    padding: Bar | None
    lanes: tuple[Lane, ...]
    lanes_left_out: int = 0


def elements(start: int, length: int) -> str:
    """``element 3``, ``elements 3 to 7``."""
    return f"element {start:,}" if length == 1 else f"elements {start:,} to {start + length - 1:,}"


def bucket_rows(found: Map, world: int) -> list[BucketRow]:
    """At most :data:`MOST_ROWS` buckets in order."""
    wrong = Counter[int]()
    for run in found.runs:
        wrong[run.bucket] += run.length
    for bucket in found.buckets:  # some runs may have been left out
        wrong[bucket.index] = max(wrong[bucket.index], bucket.wrong)
    usable = [bucket for bucket in found.buckets if bucket.end >= bucket.start >= 0 < bucket.padded]
    first = sorted(usable, key=lambda bucket: (not wrong[bucket.index], bucket.index))[:MOST_ROWS]
    widest = max((bucket.padded for bucket in first), default=1)
    return [
        _bucket_row(found, world, bucket, widest, wrong[bucket.index])
        for bucket in sorted(first, key=lambda bucket: bucket.index)
    ]


def _bucket_row(found: Map, world: int, bucket: MapBucket, widest: int, wrong: int) -> BucketRow:
    length, scale = bucket.end - bucket.start, 100 / bucket.padded
    width = max(100 * bucket.padded / widest, 2.0)
    parameters = []
    for number, one in enumerate(found.parameters):
        start, end = max(one.offset, bucket.start), min(one.offset + one.numel, bucket.end)
        if start < end:
            title = f"{one.name}: {elements(start - one.offset, end - start)} of {one.numel:,}"
            share = (end - start) * scale
            label = one.name if share * width / 100 >= _LABELLED else ""
            parameters.append(Bar((start - bucket.start) * scale, share, title, label, odd=number % 2 == 1))
    span = bucket.padded / max(world, 1)
    pieces = []
    for rank in range(world if world <= min(bucket.padded, MAX_WORLD) else 0):
        room = span * scale * width / 100
        label = f"rank {rank}" if room >= _WORDED else f"{rank}" if room >= _NUMBERED else ""
        pieces.append(Bar(rank * span * scale, span * scale, f"piece of rank {rank}", label, odd=rank % 2 == 1))
    padding = None
    if bucket.padded > length:
        padding = Bar(length * scale, (bucket.padded - length) * scale, f"{bucket.padded - length} of padding")
    padded = f", padded to {bucket.padded:,}" if padding is not None else ""
    title = f"bucket {bucket.index}: {elements(bucket.start, length)} ({length:,}{padded})"
    lanes = _lanes(found, bucket, scale)
    drawn, more = lanes[:MOST_LANES], len(lanes[MOST_LANES:])
    return BucketRow(bucket.index, title, width, wrong, tuple(parameters), tuple(pieces), padding, drawn, more)


def _lanes(found: Map, bucket: MapBucket, scale: float) -> tuple[Lane, ...]:
    """Where every rank holds everything a lane for each rank that is wrong; else one, since the piece says the rank."""
    runs = [run for run in found.runs if run.bucket == bucket.index]
    groups: dict[str, list[Bar]] = {}
    for run in runs:
        whose = "" if not found.whole else "every rank" if run.rank is None else f"rank {run.rank}"
        on = "on every rank alike" if run.rank is None else f"on rank {run.rank}"
        title = f"wrong {on}: {_held(bucket, run)}"
        bar = Bar(run.place * scale, max(run.length * scale, NARROWEST), title)
        groups.setdefault(whose, []).append(bar)
    return tuple(Lane(title, tuple(bars)) for title, bars in groups.items())


def _held(bucket: MapBucket, run: WrongRun) -> str:
    """What lies in a run: elements of the vector, or of the bucket's padding, which has none."""
    inside = max(0, min(run.length, bucket.end - bucket.start - run.place))
    texts = [elements(run.place + bucket.start, inside)] if inside else []
    if run.length > inside:
        texts.append(f"{run.length - inside:,} of padding")
    return " and ".join(texts)


# --- the timeline -----------------------------------------------------------------------------------------------------

GLYPHS: Final[Mapping[State, str]] = {
    "agreed": "✓",
    "differs": "✗",
    "raised": "!",
    "hung": "…",
    "ended": "■",
    "after": "",
}
MEANINGS: Final[Mapping[State, str]] = {
    "agreed": "no difference seen",
    "differs": "first difference",
    "raised": "raised an exception",
    "hung": "did not get on",
    "ended": "the process ended",
    "after": "not reached, or not compared any more",
}


@dataclass(frozen=True)
class StageRow:
    """One stage, and the state of each rank in it. ``opens``: it is the first of its step."""

    step: int | None
    stage: str
    opens: bool
    states: tuple[State, ...]


def stage_rows(timeline: Timeline) -> list[StageRow]:
    """Time runs downwards, a column is a rank; stages behind all that is known are left out."""
    rows: list[StageRow] = []
    for number, column in enumerate(timeline.columns):
        states = tuple(row.states[number] if number < len(row.states) else "after" for row in timeline.rows)
        opens = not rows or rows[-1].step != column.step
        rows.append(StageRow(column.step, column.stage, opens, states))
    while len(rows) > 1 and all(state == "after" for state in rows[-1].states) and rows[-1].step != rows[0].step:
        if rows[-1].opens:
            break
        rows.pop()
    return rows


# --- the histogram ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """A labelled bar: ``share`` in percent of the longest. ``note``: what is to be said of it besides."""

    label: str
    count: int
    share: float
    note: str = ""


def ulp_bars(ulps: Sequence[RankUlps]) -> list[Count]:
    """By how many units of the last place values are wrong: powers of two, from the smallest that came up to the
    largest, gaps included; all ranks together, and in the note each by itself."""
    total = Counter[int]()
    for each in ulps:
        total.update(each.bins)
    bins = range(min(total), min(max(total), min(total) + 70) + 1) if total else range(0)
    rows = [
        (power_words(power), total[power], {_whose(each): each.bins.get(power, 0) for each in ulps}) for power in bins
    ]
    not_finite = sum(each.not_finite for each in ulps)
    if not_finite:
        rows.append(("inf or nan", not_finite, {_whose(each): each.not_finite for each in ulps}))
    most = max((count for _, count, _ in rows), default=1) or 1
    bars = [
        Count(label, count, 100 * count / most, ", ".join(f"{whose} {n:,}" for whose, n in by.items() if n))
        for label, count, by in rows
    ]
    return _without_long_gaps(bars)


def _without_long_gaps(bars: Sequence[Count]) -> list[Count]:
    """Of three empty ones or more side by side one is left, for all."""
    kept: list[Count] = []
    for empty, group in itertools.groupby(bars, lambda bar: bar.count == 0):
        some = list(group)
        if empty and len(some) > 2:
            some = [Count(f"{len(some)} steps between", 0, 0.0)]
        kept += some
    return kept


def _whose(each: RankUlps) -> str:
    return "alike on every rank" if each.rank is None else f"rank {each.rank}:"


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_words(power: int) -> str:
    """The bin of ``2**power`` to ``2**(power + 1) - 1``."""
    if power <= 0:
        return "1"
    if power < 10:
        return f"{2**power:,} to {2 ** (power + 1) - 1:,}"
    return f"2{str(power).translate(_RAISED)} to 2{str(power + 1).translate(_RAISED)}"


# --- situations -------------------------------------------------------------------------------------------------------


def situation_bars(reached: Mapping[str, int], missing: Iterable[str]) -> list[Count]:
    """What is missing first, then what came up least; shares on a logarithmic scale, since counts differ so much."""
    absent = set(missing)
    top = math.log1p(max(reached.values(), default=0)) or 1.0
    names = sorted(set(reached) | absent, key=lambda name: (name not in absent, reached.get(name, 0), name))
    return [
        Count(
            name,
            reached.get(name, 0),
            100 * math.log1p(max(reached.get(name, 0), 0)) / top,
            "missing" if name in absent else "" if reached.get(name) else "did not come up",
        )
        for name in names
    ]


# --- the museum -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wing:
    """Plants of one kind: how many of them were caught, missed, undecided."""

    kind: str
    caught: int
    missed: int
    undecided: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.caught + self.missed + self.undecided


def wings(result: MuseumResult) -> list[Wing]:
    """By kind."""
    kinds: dict[str, list[PlantOutcome]] = {}
    for plant in result.plants:
        kinds.setdefault(plant.kind, []).append(plant)
    return [
        Wing(
            kind,
            sum(each.caught for each in plants),
            sum(each.missed for each in plants),
            sum(each.undecided for each in plants),
        )
        for kind, plants in sorted(kinds.items())
    ]


def catch_bars(result: MuseumResult) -> list[Count]:
    """How long it took to catch plants: seconds by powers of two."""
    found = [plant.found_after.seconds for plant in result.plants if plant.found_after is not None]
    powers = Counter(max(-6, math.ceil(math.log2(max(seconds, 1e-6)))) for seconds in found)
    if not powers:
        return []
    most = max(powers.values())
    return [
        Count(f"up to {2.0**power:.3g} s", powers[power], 100 * powers[power] / most)
        for power in range(min(powers), max(powers) + 1)
    ]


# --- bits -------------------------------------------------------------------------------------------------------------


def bit_pairs(expected: str | None, actual: str | None) -> list[tuple[str, str]] | None:
    """Both values bit by bit, most significant first; None where one has no bits or they are of different widths."""
    one, other = _bits(expected), _bits(actual)
    if one is None or other is None or len(one) != len(other):
        return None
    return list(zip(one, other, strict=True))


def _bits(text: str | None) -> str | None:
    if text is None or not text.startswith("0x") or not 2 < len(text) <= 18:
        return None
    try:
        return f"{int(text, 16):0{4 * (len(text) - 2)}b}"
    except ValueError:
        return None


def timeline_words(evidence: Evidence) -> str:
    """The timeline in a sentence, for whoever cannot see it."""
    timeline = evidence.timeline
    if timeline is None:
        return ""
    texts = []
    for row in timeline.rows:
        for column, state in zip(timeline.columns, row.states, strict=False):
            if state not in ("agreed", "after"):
                step = "the build" if column.step is None else f"step {column.step}, {column.stage}"
                texts.append(f"rank {row.rank}: {MEANINGS[state]} at {step}")
    return "; ".join(texts) or "no rank is known to differ by itself"
