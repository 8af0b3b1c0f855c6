"""Measure what a step of Muon costs: unsharded, sharded, and by the original owner rule. The parent's side: no torch.

[Note: what is measured]
Each system runs on ranks of its own, started afresh, on the same weights and gradients, which lie ready in ``.grad``. A
step goes from there to new weights on every rank: reduction, update, weights out. Its time is that of the slowest rank,
begun together; the first step counts for nothing, and of the others the quickest counts, since other work on the
machine only adds to it. It adds to CPU seconds too: processes that take turns on a core find its caches cold.
*Unsharded* is what a data-parallel trainer does: gradients averaged by all-reduces in fp32, and every rank updates
everything. Ranks that share cores take longer than ranks that have one each: what a rank computes, in CPU seconds, is
said beside it. All systems must end with the same bits.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from msgspec import Struct

from harness.bench.muon.messages import (
    SYSTEMS,
    RunSystem,
    SystemReport,
    Trained,
    decode_report,
    encode,
)
from harness.capacity import available_memory, check_ranks
from harness.ending import raise_if_interrupted
from harness.errors import UsageError
from harness.launch.pool import Outcome, PoolError, RankPool
from harness.report.result import SCHEMA, Verdict, versions
from harness.scenario.model import Parameter
from harness.scenario.presets import PROCESS_BYTES, muon_matrices, parameters

HANDLER = "harness.bench.muon.rank:start"
BACKEND = "gloo"
_ITERATIONS = 5
_SLOWEST_FLOPS = 2e9  # a second, of all ranks together: bf16 on one old core
_LEAST_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class MuonBenchOptions:
    """What to measure: ``steps`` that count, after one that does not."""

    preset: str = "gpt2"
    worlds: tuple[int, ...] = (1, 2, 4)
    steps: int = 2
    seed: int = 0


class SystemCost(Struct, frozen=True, kw_only=True):
    """A step of one system at one world; ``*_ratio``: against unsharded at the same world.

    Attributes:
        seconds: of the slowest rank; ``cpu_seconds``: computed by the busiest. Of the quickest step.
        sent: bytes, by the rank that sends most; None: not counted on this system.
        kept: bytes of tensors between steps; ``peak``: bytes the process grew at its largest. Of the largest rank.
        balance: largest cost of a rank's matrices against what it cannot be below.
        idle: ranks without matrices.
    """

    seconds: float
    cpu_seconds: float
    sent: float | None
    kept: int
    peak: int | None
    balance: float
    idle: int
    seconds_ratio: float = 1.0
    cpu_ratio: float = 1.0
    sent_ratio: float | None = None
    kept_ratio: float = 1.0
    peak_ratio: float | None = None


class MuonBenchResult(Struct, frozen=True, kw_only=True):
    """The outcome; fields that :class:`harness.report.result.Result` has too mean the same here."""

    verdict: Verdict
    preset: str
    matrices: int
    elements: int
    backend: str
    worlds: tuple[int, ...]
    steps: int
    seed: int
    seconds: float
    per_world: dict[int, dict[str, SystemCost]] = {}
    versions: dict[str, str] = {}
    violation: str | None = None
    reason: str | None = None
    interrupted: bool = False
    schema: int = SCHEMA


class _ViolatedError(Exception):
    """A system failed, or ended with other bits than the others."""


def start_pool() -> RankPool:
    """Ranks for benches of Muon; a context manager that ends them on every path."""
    return RankPool(HANDLER, backend=BACKEND, preload=("harness.bench.muon.rank",))


def run_muon_bench(
    options: MuonBenchOptions, say: Callable[[str], None], *, pool: RankPool | None = None
) -> MuonBenchResult:
    """Measure every system at every world; ``say`` is told what is measured now.

    Args:
        pool: one of :func:`start_pool` that is left running; its ranks are replaced. Without it: one of its own.

    Raises:
        UsageError: no such preset, or the machine has too little memory for it.
    """
    began = time.monotonic()
    listed = parameters(options.preset)
    marked = {item.name for item in muon_matrices(options.preset)}
    check_memory(listed, max(options.worlds))
    per_world: dict[int, dict[str, SystemCost]] = {}
    violation = reason = None
    interrupted = False
    trained = tuple(Trained(item.name, item.shape, item.name in marked) for item in listed)
    try:
        with nullcontext(pool) if pool is not None else start_pool() as ranks:
            for world in options.worlds:
                per_world[world] = {}
                _measure(ranks, world, trained, options, per_world[world], say)
    except _ViolatedError as error:
        violation = str(error)
    except PoolError as error:
        reason = str(error)
    except KeyboardInterrupt:
        interrupted, reason = True, "interrupted"
    return MuonBenchResult(
        verdict="violated" if violation else "unknown" if reason else "holds",
        preset=options.preset,
        matrices=len(marked),
        elements=sum(item.numel for item in listed),
        backend=BACKEND,
        worlds=options.worlds,
        steps=options.steps,
        seed=options.seed,
        seconds=time.monotonic() - began,
        per_world=per_world,
        versions=versions(),
        violation=violation,
        reason=reason,
        interrupted=interrupted,
    )


def _measure(
    pool: RankPool,
    world: int,
    trained: tuple[Trained, ...],
    options: MuonBenchOptions,
    costs: dict[str, SystemCost],
    say: Callable[[str], None],
) -> None:
    """Run every system at one world, and put its cost into ``costs``.

    Raises:
        _ViolatedError: one failed, or two ended with different weights.
    """
    digests: dict[str, str] = {}
    limit_s = timeout_s(trained, world, options.steps)
    for system in SYSTEMS:
        raise_if_interrupted()
        say(f"world {world}, {system}, {options.steps} steps and one before them")
        pool.recycle(world)  # a process that has held another system is not as small as it was
        task = RunSystem(system=system, parameters=trained, steps=options.steps + 1, seed=options.seed)
        outcome = pool.run(world, encode(task), timeout_s=limit_s)
        reports = [decode_report(rank.reply) for rank in outcome.ranks if rank.reply is not None]
        if not outcome.replied:
            raise _ViolatedError(f"world {world}, {system}: {_problem(outcome)}")
        costs[system] = system_cost(reports, costs.get(SYSTEMS[0]))
        for rank, report in enumerate(reports):
            digests[f"{system} on rank {rank}"] = report.digest
            if report.digest != next(iter(digests.values())):
                raise _ViolatedError(
                    f"world {world}: {system} on rank {rank} has other weights than {next(iter(digests))}"
                )
    pool.recycle(world)


def system_cost(reports: Sequence[SystemReport], unsharded: SystemCost | None) -> SystemCost:
    """What the ranks' reports come to, and its ratios to ``unsharded`` (None: this is it)."""
    seconds = min(map(max, zip(*(report.seconds for report in reports), strict=True)))
    cpu_seconds = min(map(max, zip(*(report.cpu_seconds for report in reports), strict=True)))
    sents = [statistics.median(report.sent) for report in reports if report.sent is not None]
    sent = max(sents) if len(sents) == len(reports) else None
    peaks = [report.peak for report in reports if report.peak is not None]
    peak = max(peaks) if len(peaks) == len(reports) else None
    kept = max(report.kept for report in reports)
    costs = [report.cost for report in reports]
    bound = reports[0].lower_bound
    base = unsharded
    return SystemCost(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        sent=sent,
        kept=kept,
        peak=peak,
        balance=max(costs) / bound if bound else 1.0,
        idle=sum(report.elements == 0 for report in reports),
        seconds_ratio=1.0 if base is None else seconds / base.seconds,
        cpu_ratio=1.0 if base is None else cpu_seconds / base.cpu_seconds,
        sent_ratio=_ratio(sent, sent if base is None else base.sent),
        kept_ratio=1.0 if base is None else kept / base.kept,
        peak_ratio=_ratio(peak, peak if base is None else base.peak),
    )


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def check_memory(listed: Sequence[Parameter], world: int) -> None:
    """Refuse what this machine cannot hold.

    With N elements, an unsharded rank has weights and gradients in bf16 (``4 N``), the averaged gradient, master and at
    most two moments in fp32 (``16 N``), and a few fp32 tensors of the largest parameter; a sharded one has less.

    Raises:
        UsageError: the machine has less than that for every rank.
    """
    check_ranks((world,))
    numel, largest = sum(item.numel for item in listed), max(item.numel for item in listed)
    needed = world * (20 * numel + 6 * 4 * largest + PROCESS_BYTES)
    available = available_memory()
    if needed > available:
        raise UsageError(
            f"{numel:,} elements on {world} unsharded ranks need about {needed / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are available: use a smaller --preset or --world"
        )


def timeout_s(trained: Sequence[Trained], world: int, steps: int) -> float:
    """A bound that no machine needs: all ranks orthogonalise everything, one after the other, slowly."""
    cost = sum(math.prod(item.shape) * min(item.shape) for item in trained if item.muon)
    flops = 6.0 * _ITERATIONS * cost * world * (steps + 1)
    return _LEAST_TIMEOUT_S + flops / _SLOWEST_FLOPS


def _problem(outcome: Outcome) -> str:
    """What ended a run, in a sentence."""
    report = outcome.ranks[outcome.first_failed or 0]
    said = (report.error or "").strip().splitlines()
    return f"rank {report.rank} {report.end.value}: {said[-1] if said else 'it says no more'}"
