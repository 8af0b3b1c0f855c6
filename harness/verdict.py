"""What a rank reports about one scenario, and what the parent concludes: plain data, no torch.

Ranks compare their own state with the reference and send a :class:`RankVerdict`; the parent compares what only all
ranks together show (norm bits, weight digests, collectives) and merges (:mod:`harness.oracles.judge`).
"""

from __future__ import annotations

import builtins
import enum
import math
from typing import Any

import msgspec
from msgspec import Struct


class Property(enum.Enum):
    """What must hold (DESIGN.md, section 6)."""

    WEIGHTS = "weights"
    AGREEMENT = "agreement"
    MASTER = "master"
    MOMENTS = "moments"
    GRADIENT = "gradient"
    NORM = "norm"
    CLIP = "clip"
    SPILL = "spill"
    INTAKE = "intake"
    STORAGE = "storage"
    OWNERSHIP = "ownership"
    MEMORY = "memory"
    TRAFFIC = "traffic"
    PROGRESS = "progress"
    DETERMINISM = "determinism"
    INVARIANCE = "invariance"


PROPERTY_SUMMARIES = {
    Property.WEIGHTS: "the compute weights of every rank are the unsharded trainer's at every stage, bit for bit",
    Property.AGREEMENT: "after each gather all ranks hold the same compute weights",
    Property.MASTER: "the fp32 master is the unsharded trainer's, at construction and after each update",
    Property.MOMENTS: "so are the moments: both of AdamW, the momentum of Muon",
    Property.GRADIENT: "the reduced gradient is the sum over all ranks (ZeroMaster) or their mean (Muon)",
    Property.NORM: "the joint norm is right, and has the same bits on every rank",
    Property.CLIP: "the clipped gradient is the right one, and what the update sees",
    Property.SPILL: "the parts of a step of several parts add up",
    Property.INTAKE: ".grad is taken and cleared; what is said to wait does; a discarded step leaves nothing behind",
    Property.STORAGE: "parameters keep their storage, shape and dtype, and nothing beside them is written",
    Property.OWNERSHIP: "every element has one owner; padding is zero and enters nothing",
    Property.MEMORY: "consumed gradients are released; a built-in keeps no more alive than its formula says",
    Property.TRAFFIC: "all ranks call the same collectives in the same order; a built-in those its layout implies",
    Property.PROGRESS: "every rank finishes with a verdict: no exception, no crash, no hang",
    Property.DETERMINISM: "the same scenario gives the same bits every time",
    Property.INVARIANCE: "on exact sums other buckets, worlds, cuts, orders, owners, hops and overlap give equal bits",
}
"""One sentence for each property, for people."""


class Stage(enum.Enum):
    """Where in a step, in order of time; BUILD comes before the first step."""

    BUILD = "build"
    COLLECT = "collect"
    REDUCE = "reduce"
    NORM = "norm"
    UPDATE = "update"
    GATHER = "gather"


STAGE_ORDER = {stage: order for order, stage in enumerate(Stage)}


class Oracle(enum.Enum):
    """By which rule a gradient (or, for LOOSE, a norm) was judged.

    EXACT: bitwise, on data whose sums are exact in any order. ORDERED: bitwise, adding in the backend's own order.
    BOUND: not bitwise, but within the proven rounding bound. LOOSE: a norm, or a master after Newton-Schulz by other
    operations, whose bound is too wide to say much.
    """

    EXACT = "exact"
    ORDERED = "ordered"
    BOUND = "bound"
    LOOSE = "loose"


class Divergence(Struct, frozen=True, kw_only=True):
    """The first thing a rank found different. Steps, ranks, buckets count from 0; what does not apply is None.

    ``element`` is the flat index inside ``parameter``, whose index in the list is ``index``; ``offset`` the position in
    the vector of all elements. ``*_bits`` are hex strings of the raw value; ``ulps`` the distance in units of the last
    place; ``mismatches`` how many elements differ at this (step, stage) on this rank.

    What looking at all ranks together shows (:mod:`harness.diagnosis`): ``pattern`` says where the mismatches lie,
    ``inputs`` whether what this stage was given agreed, ``symptom`` what kind of mistake explains every one of them;
    ``symptoms_possible`` several kinds that the evidence does not tell apart.
    """

    property: Property
    stage: Stage
    message: str
    rank: int | None = None
    step: int | None = None
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

    @builtins.property  # `property` is a field here
    def when(self) -> tuple[int, int]:
        """Sort key: the build first, then by step and stage."""
        return (-1 if self.step is None else self.step, STAGE_ORDER[self.stage])

    def summary(self) -> dict[str, Any]:
        """What applies, as plain JSON; inf and nan, which JSON has no numbers for, are words."""
        fields = {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}
        for name in ("expected", "actual"):
            value = fields.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = str(value)
        return fields


class Collective(Struct, frozen=True, array_like=True):
    """One logged collective: what was called, on what, in which group (names the group's ranks), during which stage.

    ``how``: what else all ranks must agree on, as ``"with MAX"`` or ``"root 1"``; empty where nothing is to be said.
    """

    kind: str
    dtype: str
    length: int
    group: tuple[int, ...]
    step: int | None = None
    stage: str | None = None
    how: str = ""


class NormObservation(Struct, frozen=True, array_like=True):
    """One squared norm as a rank saw it: ``call`` 0 before, 1 after clipping; bits in hex, nan as ``"nan"``."""

    step: int
    call: int
    bits: str


class WeightsObservation(Struct, frozen=True, array_like=True):
    """Digest of all compute weights of a rank after the gather of a step (nan counted as one pattern).

    ``group``: of those that belong to a group of these ranks alone; empty: of those that all ranks have.
    """

    step: int
    digest: str
    group: tuple[int, ...] = ()


class Quantity(enum.Enum):
    """What is compared element by element, and the norm."""

    GRADIENT = "gradient"
    CLIPPED = "clipped gradient"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MAX_EXP_AVG_SQ = "max_exp_avg_sq"
    WEIGHTS = "weights"
    FULL_MASTER = "full_master"
    NORM = "norm"


class Observation(Struct, frozen=True, kw_only=True):
    """What a rank held when it found the first difference, and what was expected: not of the largest scenarios.

    All bytes are fp32, in the machine's order.

    Attributes:
        buckets: the layout, as ``(start, end, padded length)`` each.
        actual: its shard with padding; of weights and of ``full_master`` all N elements; of a norm nothing.
        expected: all N elements; of a norm those of the gradient that it is taken of.
        before: what was expected of the same at earlier points, the latest first; ``(name, all N elements)`` each.
        norm: the squared norm that it got; ``before_norms`` what was expected of it earlier, by name.
        bound: relative, of the norm.
        master: of weights, the master that they are rounded from.
    """

    quantity: Quantity
    step: int | None
    stage: Stage
    buckets: tuple[tuple[int, int, int], ...]
    expected: bytes
    actual: bytes = b""
    before: tuple[tuple[str, bytes], ...] = ()
    master: bytes | None = None
    norm: float = 0.0
    bound: float = 0.0
    before_norms: tuple[tuple[str, float], ...] = ()

    @builtins.property
    def when(self) -> tuple[int, int]:
        """As :attr:`Divergence.when`."""
        return (-1 if self.step is None else self.step, STAGE_ORDER[self.stage])


class Handed(Struct, frozen=True, kw_only=True):
    """Something that a rank handed to a collective and that is not what it should have handed over.

    ``bucket`` is the one that was due, ``instead`` the one that was handed over, where it was another one.
    """

    step: int
    stage: Stage
    message: str
    bucket: int | None = None
    instead: int | None = None
    parameter: str | None = None
    element: int | None = None


class RankStatus(enum.Enum):
    """How the scenario ended on a rank.

    DONE: driven to its end (with or without a divergence). RAISED: the subject raised; ``divergence`` says where.
    UNSUPPORTED: the subject raised NotImplementedError. INTERFACE: the built object lacks what the contract asks for.
    SILENT: the rank sent no verdict; the parent put together what it left behind.
    """

    DONE = "done"
    RAISED = "raised"
    UNSUPPORTED = "unsupported"
    INTERFACE = "interface"
    SILENT = "silent"


class RankVerdict(Struct, frozen=True, kw_only=True):
    """One rank's explicit verdict on one scenario. A missing one is never a pass.

    ``checks``: property -> how many times it was compared on non-empty data. ``oracle``: rule -> count.
    ``situations``: what only running shows (``scenario.situations.Situation`` values). ``detail``: message and
    traceback of what was raised. ``unresolved``: a sum was not added in the predicted order, and from there on nothing
    was compared: what all ranks say about this run decides nothing. ``searched``: such a sum came up, and the ranks
    searched for its order together. ``driven``: all operations were done, so a call that is missing was not made.
    ``hits``: which of the scenario's faults struck here (their indices).
    ``changed``: what the subject changed in the process beside its own, since put back (``"default dtype"``).
    ``recycle``: why this process should not be used any further, None when it may. ``handed``: what it handed to
    collectives wrongly, where that was looked at; ``handings`` at how many. ``observed``: with ``divergence``.
    ``margin``: the largest error in terms of its bound (1.0: as large as rounding can make it), None when nothing was
    held against a bound.
    """

    rank: int
    status: RankStatus
    divergence: Divergence | None = None
    checks: dict[str, int] = {}
    oracle: dict[str, int] = {}
    situations: tuple[str, ...] = ()
    norms: tuple[NormObservation, ...] = ()
    weights: tuple[WeightsObservation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    detail: str | None = None
    unresolved: bool = False
    searched: bool = False
    driven: bool = False
    hits: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()
    recycle: str | None = None
    handed: tuple[Handed, ...] = ()
    margin: float | None = None
    handings: int = 0
    observed: Observation | None = None


class RankAccount(Struct, frozen=True, kw_only=True):
    """What is known of one rank of a run that failed.

    ``cause``: it is the rank that the failure names. ``end``: how it ended, in words. ``step``, ``stage``: where it
    was, or ended. ``num_collectives``: how many it called; ``last_collectives``: the last of these, in words.
    ``where``: the subject's line that it was in when it was stopped, ``stacks`` all its threads then. ``output``: the
    end of what it printed.
    """

    rank: int
    cause: bool
    end: str
    step: int | None
    stage: str
    num_collectives: int
    last_collectives: tuple[str, ...] = ()
    where: str | None = None
    stacks: str | None = None
    output: str | None = None
