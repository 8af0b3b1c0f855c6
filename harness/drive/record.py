"""What one rank notes down while it drives a scenario, and its verdict at the end."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from harness.drive import tasks
from harness.drive.inspection import Inspection
from harness.drive.shard import Difference
from harness.drive.trail import Trail
from harness.errors import sendable
from harness.launch.rank import RankContext
from harness.launch.tap import LoggedCollective
from harness.scenario.model import Scenario
from harness.scenario.muon_situations import MuonSituation
from harness.scenario.situations import Situation
from harness.scenario.strategy_situations import StrategySituation
from harness.verdict import (
    Collective,
    Divergence,
    Handed,
    NormObservation,
    Observation,
    Oracle,
    Property,
    RankStatus,
    RankVerdict,
    Stage,
    WeightsObservation,
)

_SHORT_DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}


class Record:
    """One rank's notes on one scenario. Only the first divergence counts; later ones are its consequences.

    ``staging``: where one call of the subject's is several stages, the stage that begins with the next collective, by
    its kind.
    """

    def __init__(self, context: RankContext, scenario: Scenario, trail: Trail) -> None:
        self.divergence: Divergence | None = None
        self.step: int | None = None
        self.stage = Stage.BUILD
        self.unresolved = False
        self.searched = False
        self.inspection: Inspection | None = None
        self._handed: list[Handed] = []
        self.margin: float | None = None
        self._context = context
        self._scenario = scenario
        self._trail = trail
        self._checks: dict[Property, int] = {}
        self._oracle: dict[str, int] = {}
        self._situations: set[str] = set()
        self._norms: list[NormObservation] = []
        self._weights: list[WeightsObservation] = []
        self._collectives: list[Collective] = []
        self._hits: list[int] = []
        self._driven = False
        self._observed: Observation | None = None
        self.staging: Callable[[str], Stage | None] | None = None
        trail.begin()
        context.collectives.mirror = self._called
        context.collectives.unrecorded = trail.move

    def enter(self, step: int | None, stage: Stage) -> None:
        """From here on everything belongs to this step and stage."""
        self.step, self.stage = step, stage
        self._trail.enter(step, stage)

    def advance(self, kind: str) -> None:
        """A collective is about to be called: where ``staging`` says so, that is the beginning of another stage."""
        stage = None if self.staging is None else self.staging(kind)
        if stage is not None and stage is not self.stage:
            self.enter(self.step, stage)

    def _called(self, call: LoggedCollective, contribution: object) -> None:
        self.advance(call.kind)
        dtype = _SHORT_DTYPES.get(call.dtype, call.dtype)
        collective = Collective(call.kind, dtype, call.length, call.group_ranks, self.step, self.stage.value, call.how)
        self._collectives.append(collective)
        self._trail.call(collective)
        if self.inspection is not None:
            self.inspection.called(self.stage, call.kind, contribution)

    def move(self) -> None:
        """The rank makes progress: a call into the subject begins or has returned."""
        self._trail.move()

    def hit(self, fault: int) -> None:
        """A fault of the scenario, by its index, is about to strike; it may be the last thing this rank does."""
        if fault not in self._hits:
            self._hits.append(fault)
            self._trail.hit(fault)

    def end_inspection(self) -> None:
        """The subject whose collectives are looked at goes; what was found stays."""
        if self.inspection is not None:
            self._handed += self.inspection.found
            self.inspection = None

    def drive(self) -> None:
        """All operations of the scenario are done."""
        self._driven = True
        self._trail.drive()

    def finish(self) -> None:
        """There is only the verdict to send."""
        self._trail.finish()

    @property
    def clean(self) -> bool:
        """Nothing has diverged so far, and the reference is known: what follows is worth comparing."""
        return self.divergence is None and not self.unresolved

    def diverge(
        self,
        prop: Property,
        message: str,
        difference: Difference | None = None,
        observe: Callable[[], Observation | None] | None = None,
        **fields: Any,  # noqa: ANN401
    ) -> None:
        """Record the first divergence, and tell the parent at once: this rank may not live to send its verdict.

        ``observe`` gives what was seen, for the verdict; ``fields`` are further fields of
        :class:`harness.verdict.Divergence`.
        """
        if self.divergence is not None:
            return
        self._observed = None if observe is None else observe()
        found = {} if difference is None else difference.fields(self._scenario)
        self.divergence = Divergence(
            property=prop,
            stage=self.stage,
            step=self.step,
            rank=self._context.rank,
            message=sendable(message),
            **{**found, **fields},
        )
        self._context.emit(tasks.encode(self.divergence))

    def checked(self, prop: Property, compared: int = 1) -> None:
        """A property was held against ``compared`` values; against none is no check."""
        if compared:
            self._checks[prop] = self._checks.get(prop, 0) + 1

    def judged(self, rule: Oracle) -> None:
        """Count by which rule something was judged."""
        self._oracle[rule.value] = self._oracle.get(rule.value, 0) + 1

    def within(self, margin: float | None) -> None:
        """The error of a comparison with a bound, in terms of that bound."""
        if margin is not None:
            self.margin = margin if self.margin is None else max(self.margin, margin)

    def reached(self, situation: Situation | MuonSituation | StrategySituation) -> None:
        """A situation that only running shows."""
        self._situations.add(situation.value)

    def norm(self, call: int, bits: str) -> None:
        """What the subject returned as squared norm; the parent compares the ranks'."""
        self._norms.append(NormObservation(self.step or 0, call, bits))

    def weights(self, digest: str, group: tuple[int, ...] = ()) -> None:
        """Digest of all compute weights after a gather; the parent compares the ranks', those of ``group`` if any."""
        self._weights.append(WeightsObservation(self.step or 0, digest, group))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the subject called so far."""
        return tuple(self._collectives)

    def verdict(self, status: RankStatus, detail: str | None) -> RankVerdict:
        """Everything above, to be sent."""
        return RankVerdict(
            rank=self._context.rank,
            status=status,
            divergence=self.divergence,
            checks={prop.value: count for prop, count in self._checks.items()},
            oracle=self._oracle,
            situations=tuple(sorted(self._situations)),
            norms=tuple(self._norms),
            weights=tuple(self._weights),
            collectives=self.collectives,
            detail=None if detail is None else sendable(detail),
            unresolved=self.unresolved,
            searched=self.searched,
            driven=self._driven,
            hits=tuple(self._hits),
            margin=self.margin,
            handed=(*self._handed, *(self.inspection.found if self.inspection is not None else ())),
            handings=self.inspection.num_compared if self.inspection is not None else 0,
            observed=self._observed,
        )


NORM_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CODES = {torch.float64: ">d", torch.float32: ">f", torch.bfloat16: ">f", torch.float16: ">e"}


def norm_of(returned: object, what: str) -> tuple[float, torch.dtype]:
    """The value and the dtype of a norm that a subject returned.

    Raises:
        TypeError: it is none, called ``what``.
    """
    if not isinstance(returned, torch.Tensor) or returned.numel() != 1 or returned.dtype not in NORM_DTYPES:
        shown = f"{returned.dtype}{list(returned.shape)}" if isinstance(returned, torch.Tensor) else type(returned)
        raise TypeError(f"{what} must be a floating tensor of one element, it is {shown}")
    return float(returned.detach()), returned.dtype


def bits_of(value: float, dtype: torch.dtype) -> str:
    """The bits of a value that ``dtype``, one of :data:`NORM_DTYPES`, holds exactly, in hex; every nan is ``"nan"``."""
    if math.isnan(value):
        return "nan"
    packed = struct.pack(_CODES[dtype], value)
    return f"0x{packed[: dtype.itemsize].hex()}"  # bf16 is the first half of fp32
