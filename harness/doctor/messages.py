"""What the parent and the ranks of `doctor` say to each other: plain data, no torch."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec
from msgspec import Struct

# --- tasks ------------------------------------------------------------------------------------------------------------


class Describe(Struct, frozen=True, tag=True):
    """Which torch this is."""


class MeasureAdamW(Struct, frozen=True, tag=True):
    """Step AdamW on a flat vector and on its pieces, over ``num_cases`` random settings and cuts."""

    num_cases: int
    seed: int


class MeasureRounding(Struct, frozen=True, tag=True):
    """Convert fp32 to bf16: all exponents, ties, subnormals, nan, and ``num_random`` random patterns."""

    num_random: int
    seed: int


class MeasureSubnormals(Struct, frozen=True, tag=True):
    """Compute with subnormal numbers."""


class MeasureLatency(Struct, frozen=True, tag=True):
    """Time ``num_calls`` small all-reduces."""

    num_calls: int


class MeasureOrder(Struct, frozen=True, tag=True):
    """Reveal the order of addition of every summing collective, and add random values in the predicted one."""

    seed: int


class MeasureSpecials(Struct, frozen=True, tag=True):
    """All-reduce subnormal numbers and infinities of both signs."""


class MeasureAverage(Struct, frozen=True, tag=True):
    """Compare ``ReduceOp.AVG`` with what it might be."""

    num_elements: int
    seed: int


class MeasureRepeats(Struct, frozen=True, tag=True):
    """The same collectives, and the same forward and backward pass, ``num_repeats`` times."""

    num_repeats: int
    seed: int


class MeasureProducts(Struct, frozen=True, tag=True):
    """Multiply matrices as Newton-Schulz does, under each :class:`Condition`."""

    seed: int


class MeasureStrided(Struct, frozen=True, tag=True):
    """All-reduce views that are not contiguous. Leaves the group in doubt: the last task of a world."""


Task: TypeAlias = (
    Describe
    | MeasureAdamW
    | MeasureRounding
    | MeasureSubnormals
    | MeasureLatency
    | MeasureOrder
    | MeasureSpecials
    | MeasureAverage
    | MeasureRepeats
    | MeasureProducts
    | MeasureStrided
)

# --- replies ----------------------------------------------------------------------------------------------------------


class Description(Struct, frozen=True, tag=True, kw_only=True):
    """Of the torch in a rank; ``threads`` are what a rank computes with, ``gpus`` those that it sees (on the CPU none).

    ``versions``: see :mod:`harness.drive.accelerator`.
    """

    torch: str
    numpy: str
    gloo: bool
    nccl: bool
    gpus: int
    cpu_capability: str
    threads: int
    versions: dict[str, str] = {}


class ModeReport(Struct, frozen=True, kw_only=True):
    """AdamW in one mode, a flat vector against its pieces; the reference of ``against_single`` is ``foreach=False``.

    Attributes:
        error: why it could not be run, else None.
        differing: elements whose weight or a moment differs, in ``cases`` cases; ``largest``: between two weights.
        against_single: elements, of flat vectors, that differ from those of ``foreach=False``.
        special_differing, special_against_single: the same on gradients with inf, nan, 3e38 and subnormals (nan equals
            nan).
    """

    error: str | None = None
    differing: int = 0
    cases: int = 0
    largest: float = 0.0
    against_single: int = 0
    special_differing: int = 0
    special_against_single: int = 0


class AdamWReport(Struct, frozen=True, tag=True, kw_only=True):
    """Over ``elements`` elements in ``cases`` cases; ``modes`` by their keyword argument, as ``"foreach=True"``.

    ``on_cpu``: of a GPU how it compares with the CPU; of the CPU itself None.
    """

    cases: int
    elements: int
    steps: int
    special_elements: int
    modes: dict[str, ModeReport]
    on_cpu: CpuReport | None = None


class CpuReport(Struct, frozen=True, kw_only=True):
    """AdamW with ``foreach=False`` on a GPU against the same on the CPU: elements that differ, in ``cases`` cases.

    ``special_differing``: on gradients with inf, nan, 3e38 and subnormals.
    """

    differing: int = 0
    cases: int = 0
    largest: float = 0.0
    special_differing: int = 0


class RoundingReport(Struct, frozen=True, tag=True, kw_only=True):
    """Conversions of fp32 to bf16.

    Attributes:
        patterns, ties, subnormals: how many patterns, how many halfway between two bf16, how many subnormal.
        wrong: not rounded to nearest, ties to even. ``example``: the first of them, in hex.
        placed: patterns that come out otherwise (nan apart) when converted as part of a shorter run.
        nans: how many nan patterns were tried; ``lost``: how many came out as a number.
        nan_patterns: bf16 bits that nan became, in long runs; ``nan_patterns_alone``: converted one at a time.
        nan_made: fp32 bits of inf - inf.
    """

    patterns: int
    ties: int
    subnormals: int
    wrong: int
    example: str | None
    placed: int
    nans: int
    lost: int
    nan_patterns: tuple[str, ...]
    nan_patterns_alone: tuple[str, ...]
    nan_made: str


class SubnormalReport(Struct, frozen=True, tag=True, kw_only=True):
    """Operation -> how many of ``elements`` results were not the exact subnormal; ``zeros``: how many became zero."""

    elements: int
    wrong: dict[str, int]
    zeros: dict[str, int]


class LatencyReport(Struct, frozen=True, tag=True, kw_only=True):
    """One rank's median of the time an all-reduce of ``elements`` fp32 took."""

    elements: int
    median_ms: float


class CallReport(Struct, frozen=True, kw_only=True):
    """One length of one collective, as far as this rank holds its result.

    Attributes:
        num_elements: of the whole call. ``held``: what this rank got of it, and looked at.
        predicted: held elements added in the order the rule says; ``no_tree``: in none that is fixed.
        probes: calls made to reveal the order.
        sums_wrong: held elements whose sum of random values is not what the predicted order gives.
        order_shows: held elements whose sum in rank order would have other bits.
    """

    kind: str
    dtype: str
    num_elements: int
    held: int
    predicted: int
    no_tree: int
    probes: int
    sums_wrong: int
    order_shows: int


class OrderReport(Struct, frozen=True, tag=True, kw_only=True):
    """Every call, and the trees of the one named ``shown`` in words (on rank 0)."""

    calls: tuple[CallReport, ...]
    shown: str
    trees: tuple[str, ...]


class SpecialsReport(Struct, frozen=True, tag=True, kw_only=True):
    """Per dtype: wrong sums of subnormals, and the bits that inf + -inf became."""

    elements: int
    wrong: dict[str, int]
    nans: dict[str, str]


class AverageReport(Struct, frozen=True, tag=True, kw_only=True):
    """Per dtype, elements of AVG that differ from: the sum / W, the sum * (1/W), the sum of x / W.

    ``distinct``: elements in which the first and the last of these differ from each other: without any, equality
    with one says nothing against the other.
    """

    error: str | None = None
    elements: int = 0
    divided: dict[str, int] = {}
    multiplied: dict[str, int] = {}
    scaled_before: dict[str, int] = {}
    distinct: dict[str, int] = {}


class RepeatsReport(Struct, frozen=True, tag=True, kw_only=True):
    """Digests seen: by name of the collective, and of the forward and backward passes."""

    repeats: int
    collectives: dict[str, tuple[str, ...]]
    passes: dict[str, tuple[str, ...]]


class ViewReport(Struct, frozen=True, kw_only=True):
    """An all-reduce of one view: ``wrong`` of its ``elements``, ``changed`` of the ``outside`` ones beside it."""

    error: str | None = None
    elements: int = 0
    wrong: int = 0
    outside: int = 0
    changed: int = 0


class StridedReport(Struct, frozen=True, tag=True, kw_only=True):
    """By layout of the view."""

    views: dict[str, ViewReport]


class Condition(enum.StrEnum):
    """What is otherwise than with one contiguous matrix on one thread.

    REPEAT: nothing. PLACE: it begins elsewhere in memory. BATCH: it is one of a stack, at some place in it. COLUMNS: it
    is stored by columns. THREADS: there are several.
    """

    REPEAT = "repeat"
    PLACE = "place"
    BATCH = "batch"
    COLUMNS = "columns"
    THREADS = "threads"


class ProductsReport(Struct, frozen=True, tag=True, kw_only=True):
    """Operations of Newton-Schulz on the same matrices under other conditions.

    Attributes:
        shapes: as ``"3x5"``; ``threads``: of :attr:`Condition.THREADS`.
        differing: operation -> condition -> shapes of which a result had other bits.
        left_out: operation -> shapes that took too long here.
    """

    shapes: tuple[str, ...]
    threads: tuple[int, ...]
    differing: dict[str, dict[Condition, tuple[str, ...]]]
    left_out: dict[str, tuple[str, ...]]


Report: TypeAlias = (
    Description
    | AdamWReport
    | RoundingReport
    | SubnormalReport
    | LatencyReport
    | OrderReport
    | SpecialsReport
    | AverageReport
    | RepeatsReport
    | ProductsReport
    | StridedReport
)


encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
