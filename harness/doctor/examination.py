"""A run of `doctor`: which measurement when, on which ranks, and what becomes of those that fail.

The parent's side: no torch. Every wait is bounded, and whatever goes wrong in a rank is a finding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from msgspec import Struct

from harness.doctor import machine, product_readings, readings
from harness.doctor.findings import DoctorResult, Finding, Verdict, by_reason, over_worlds, overall, unmeasured
from harness.doctor.messages import (
    AdamWReport,
    AverageReport,
    Describe,
    Description,
    LatencyReport,
    MeasureAdamW,
    MeasureAverage,
    MeasureLatency,
    MeasureOrder,
    MeasureProducts,
    MeasureRepeats,
    MeasureRounding,
    MeasureSpecials,
    MeasureStrided,
    MeasureSubnormals,
    OrderReport,
    ProductsReport,
    RepeatsReport,
    RoundingReport,
    SpecialsReport,
    StridedReport,
    SubnormalReport,
    Task,
    decode_report,
    encode,
)
from harness.launch.pool import Outcome, PoolError, RankEnd, RankPool
from harness.launch.process import default_device
from harness.report.result import versions

HANDLER = "harness.doctor.ranks:start"
# Far more than a quiet machine needs, so that a busy one is not called broken.
JOIN_TIMEOUT_S = 45.0
CUDA_JOIN_TIMEOUT_S = 120.0  # each rank imports torch, and makes a context on its GPU
TASK_TIMEOUT_S = 60.0
STRIDED_TIMEOUT_S = 20.0
# Any would do. With this one fused AdamW depends on position in 128 of 128 cases (AVX2, AVX512; in none without).
SEED = 20_260
_NUM_ADAMW_CASES = 128
_NUM_RANDOM_PATTERNS = 1_000_000
_NUM_LATENCY_CALLS = 40
_NUM_AVERAGED = 4_096
_NUM_REPEATS = 20

R = TypeVar("R", bound=Struct)


class Observer(Protocol):
    """Whoever shows a run while it goes on."""

    def measuring(self, what: str) -> None:
        """``what`` is measured from now on."""

    def found(self, finding: Finding) -> None:
        """One more finding."""


def run_doctor(
    worlds: Sequence[int], observer: Observer, backend: str = "gloo", device: str | None = None
) -> DoctorResult:
    """Examine the machine, and these worlds; Ctrl-C leaves the findings made so far.

    ``device``: where ranks compute, ``"cpu"`` or ``"cuda"``; None: as goes with the backend.
    """
    device = device or default_device(backend)
    began = time.monotonic()
    findings: list[Finding] = []
    interrupted = False

    def add(finding: Finding) -> None:
        findings.append(finding)
        observer.found(finding)

    try:
        for finding in machine.examine():
            add(finding)
        observer.measuring("starting ranks")
        try:
            with RankPool(
                HANDLER,
                backend=backend,
                device=device,
                preload=("harness.doctor.ranks",),
                join_timeout_s=JOIN_TIMEOUT_S if device == "cpu" else CUDA_JOIN_TIMEOUT_S,
            ) as pool:
                Examination(pool, worlds, observer, add, backend, device).run()
        except (PoolError, OSError) as error:
            add(cannot_start(str(error)))
    except KeyboardInterrupt:
        interrupted = True
    return DoctorResult(
        verdict=overall(findings, interrupted=interrupted),
        backend=backend,
        device=device,
        worlds=tuple(worlds),
        seconds=time.monotonic() - began,
        findings=tuple(findings),
        versions=versions(),
        interrupted=interrupted,
    )


def cannot_start(reason: str) -> Finding:
    """Ranks cannot be started, at all or at some world."""
    return Finding(
        name="ranks",
        verdict=Verdict.PROBLEM,
        measured=f"cannot be started: {reason}",
        meaning="Nothing can be verified here until ranks start; what follows of them is not measured.",
        relied_on=True,
        values={"reason": reason},
    )


def reason_of(text: str) -> str:
    """A pool's or a rank's account in one line: of a traceback the last line, which says what it was."""
    lines = [line.strip() for line in text.partition("\nIts output:")[0].strip().splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    head = lines[0].removesuffix("Traceback (most recent call last):").rstrip(": ")
    parts = [part for part in (head, lines[-1]) if part]
    return parts[0] if len(lines) == 1 else ": ".join(parts)


def why_unanswered(outcome: Outcome, timeout_s: float) -> str:
    """Which rank failed first, and how."""
    index = outcome.first_failed
    if index is None:
        index = next(rank.rank for rank in outcome.ranks if rank.end is not RankEnd.REPLIED)
    rank = outcome.ranks[index]
    if rank.end is RankEnd.TIMED_OUT:
        return f"rank {rank.rank} had not answered after {timeout_s:g} s"
    return f"rank {rank.rank} {rank.end.value}: {reason_of(rank.error or '')}"


class Examination:
    """The measurements that need ranks. A world that failed once is not asked again: each wait may be long."""

    def __init__(
        self,
        pool: RankPool,
        worlds: Sequence[int],
        observer: Observer,
        add: Callable[[Finding], None],
        backend: str = "gloo",
        device: str = "cpu",
    ) -> None:
        self._backend, self._device = backend, device
        self._pool = pool
        self._worlds = tuple(worlds)
        self._observer = observer
        self._add = add
        self._failed: dict[int, str] = {}  # why
        self._failed_at: dict[int, str] = {}  # what was asked of it then
        self._seconds: dict[int, float] = {}

    def run(self) -> None:
        """Everything, in the order in which it is shown."""
        described = self._ask_one("torch", Describe(), Description)
        self._ranks()
        installed = versions()["torch"]
        self._one("torch", described, lambda found: readings.read_torch(found, installed))
        self._collectives()
        self._numerics()
        if self._device == "cpu":  # on a GPU the harness never takes two products for equal
            self._products()
        # Last: it leaves each group in doubt.
        strided = self._ask("strided views", MeasureStrided(), StridedReport, timeout_s=STRIDED_TIMEOUT_S)
        self._add(over_worlds("strided views", *strided, readings.read_strided, relied_on=False))
        if self._pool.incidents:
            self._add(lost_ranks(self._pool.incidents))

    def _ranks(self) -> None:
        reports, missing = self._ask("ranks", MeasureLatency(_NUM_LATENCY_CALLS), LatencyReport)
        if failed := {**missing, **self._failed}:
            self._add(cannot_start(by_reason(failed)))
        else:
            self._add(readings.read_ranks(reports, self._seconds))

    def _collectives(self) -> None:
        orders: dict[int, list[OrderReport]] = {}
        missing: dict[int, str] = {}
        for world in self._worlds:
            name = f"order at world {world}"
            answered, unanswered = self._ask(name, MeasureOrder(SEED), OrderReport, worlds=(world,))
            orders.update(answered)
            missing.update(unanswered)
            if world in answered:
                self._add(readings.read_order(world, answered[world], self._backend))
            else:
                self._add(unmeasured(name, unanswered[world], relied_on=True))
        read_sums = partial(readings.read_sums, backend=self._backend)
        self._add(over_worlds("sums", orders, missing, read_sums, relied_on=True))
        repeats = self._ask("repeats", MeasureRepeats(_NUM_REPEATS, SEED), RepeatsReport)
        self._add(over_worlds("repeats", *repeats, readings.read_repeats, relied_on=True))
        self._add(over_worlds("forward, backward", *repeats, readings.read_passes, relied_on=True))
        averages = self._ask("AVG", MeasureAverage(_NUM_AVERAGED, SEED), AverageReport)
        self._add(over_worlds("AVG", *averages, readings.read_average, relied_on=False))

    def _numerics(self) -> None:
        adamw = self._ask_one("AdamW", MeasureAdamW(_NUM_ADAMW_CASES, SEED), AdamWReport)
        for mode in readings.MODES:
            self._one(
                f"AdamW {mode}",
                adamw,
                partial(readings.read_adamw_mode, mode=mode),
                relied_on=mode != readings.FUSED,
            )
        self._one("AdamW modes", adamw, readings.read_adamw_agreement)
        if self._device != "cpu":
            self._one("AdamW on CPU and GPU", adamw, readings.read_adamw_on_cpu, relied_on=False)
        rounding = self._ask_one("rounding", MeasureRounding(_NUM_RANDOM_PATTERNS, SEED), RoundingReport)
        self._one("rounding to bf16", rounding, readings.read_rounding)
        specials, missing = self._ask("subnormal sums", MeasureSpecials(), SpecialsReport)
        self._one("nan", rounding, lambda report: readings.read_nan(report, specials))
        subnormals = self._ask_one("subnormals", MeasureSubnormals(), SubnormalReport)
        self._one("subnormals", subnormals, readings.read_subnormals)
        self._add(over_worlds("subnormal sums", specials, missing, readings.read_subnormal_sums, relied_on=True))

    def _products(self) -> None:
        products = self._ask_one("matrix products", MeasureProducts(SEED), ProductsReport)
        self._one(product_readings.SAME, products, product_readings.read_same)
        for condition, name in product_readings.NAMES.items():
            self._one(name, products, partial(product_readings.read_condition, condition=condition), relied_on=False)

    def _one(self, name: str, answer: R | str, read: Callable[[R], Finding], *, relied_on: bool = True) -> None:
        """Add the finding of a measurement by one process, or that there is none and why."""
        if isinstance(answer, str):
            self._add(unmeasured(name, answer, relied_on=relied_on))
        else:
            self._add(read(answer))

    def _ask_one(self, what: str, task: Task, kind: type[R]) -> R | str:
        """The report of a process by itself, or why there is none."""
        reports, missing = self._ask(what, task, kind, worlds=(1,))
        return reports[1][0] if 1 in reports else missing[1]

    def _ask(
        self,
        what: str,
        task: Task,
        kind: type[R],
        *,
        worlds: Sequence[int] | None = None,
        timeout_s: float = TASK_TIMEOUT_S,
    ) -> tuple[dict[int, list[R]], dict[int, str]]:
        """Reports by world and rank, and for the worlds without any the reason."""
        reports: dict[int, list[R]] = {}
        missing: dict[int, str] = {}
        for world in self._worlds if worlds is None else worlds:
            self._observer.measuring(what if world == 1 or what.endswith(str(world)) else f"{what} at world {world}")
            if world in self._failed:
                missing[world] = f"its ranks had failed before ({self._failed_at[world]})"
                continue
            began = time.monotonic()
            try:
                outcome = self._pool.run(world, encode(task), timeout_s=timeout_s)
            except PoolError as error:
                missing[world] = self._give_up(world, what, reason_of(str(error)).removeprefix(f"world {world}: "))
                continue
            self._seconds.setdefault(world, time.monotonic() - began)
            replies: list[object] = [decode_report(rank.reply) for rank in outcome.ranks if rank.reply is not None]
            answers = [reply for reply in replies if isinstance(reply, kind)]
            if outcome.replied and len(answers) == world:
                reports[world] = answers
                continue
            missing[world] = why_unanswered(outcome, timeout_s)
            if any(rank.end is RankEnd.TIMED_OUT for rank in outcome.ranks):
                self._give_up(world, what, missing[world])
        return reports, missing

    def _give_up(self, world: int, what: str, reason: str) -> str:
        self._failed[world], self._failed_at[world] = reason, what
        return reason


def lost_ranks(incidents: Sequence[str]) -> Finding:
    """Ranks that ended while nothing was asked of them."""
    seen = Counter(incidents)
    return Finding(
        name="lost ranks",
        verdict=Verdict.PROBLEM,
        measured="; ".join(f"{text} ({count} times)" if count > 1 else text for text, count in seen.items()),
        meaning="Something ends processes on this machine (memory, a person): campaigns will report violations.",
        relied_on=True,
        values={"incidents": list(incidents)},
    )
