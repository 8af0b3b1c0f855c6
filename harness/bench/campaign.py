"""Measure what scenarios cost: full and bare runs in turn on the same warm ranks. The parent's side: no torch.

[Note: what is measured]
*Full* is the parent's time for one scenario of a campaign: from the sending of the task, while the next scenario is
drawn, until all verdicts are judged and the next scenario is there. *Bare* is the time of the same scenario's
constructor, collects, reductions, norms, clips, optimizer steps, gathers and discards on the same ranks, with
gradients that lie ready and nothing observed: the longest of the ranks', begun together. What sending a task costs is
so the harness's, not bare's. Each scenario is run ``rounds`` times either way, in turn; its run of median time counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from harness.bench.messages import (
    RANK_PARTS,
    BareReport,
    DoNothing,
    RunBare,
    RunTimed,
    decode_bare,
    decode_timed,
    encode,
)
from harness.drawing import Drawer
from harness.drive import trail
from harness.drive.tasks import SubjectName
from harness.ending import raise_if_interrupted
from harness.errors import UsageError
from harness.evaluate import PRELOAD, Conclusion, Evaluator, UndecidedError, conclude
from harness.launch.pool import Outcome, PoolError, RankPool
from harness.report.result import SCHEMA, Verdict, versions
from harness.scenario import generate
from harness.scenario.model import AdamW, Build, Clip, Domain, Parameter, Part, Scenario, Step, Values
from harness.scenario.situations import reached
from harness.subjects.source import SubjectSource

HANDLER = "harness.bench.rank:start"
BACKEND = "gloo"
AIM = 1.5
TIMEOUT_S = 120.0

PARENT_PARTS = ("draw", "send", "judge", "rest")
PARTS = (*RANK_PARTS, *PARENT_PARTS)

TABLE_WORLD = 2
TABLE_NUMELS = (1_000, 10_000, 100_000, 1_000_000)
TABLE_BUCKETS = (1, 4, 16, 64)
FIXED_BUCKETS = 4
FIXED_NUMEL = 100_000
_TABLE_PARAMETERS = 8


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        examples: scenarios at each world.
        rounds: how often each is run, full and bare.
        table_numels, table_buckets: of the two tables of costs; empty for none.
    """

    subject: SubjectSource
    worlds: tuple[int, ...] = (2, 3, 4)
    examples: int = 60
    seed: int = 0
    rounds: int = 3
    table_numels: tuple[int, ...] = TABLE_NUMELS
    table_buckets: tuple[int, ...] = TABLE_BUCKETS


class WorldCost(Struct, frozen=True, kw_only=True):
    """Seconds a scenario at one world; see [Note: what is measured].

    Attributes:
        scenarios: how many were measured; ``discarded``: drawn, but outside the subject's space.
        ratio: ``full / bare``; ``lowest`` and ``highest``: the same of single rounds.
        parts: where ``full`` goes, by name; they add up to it. In the ranks (mean over them): ``subject`` (its calls,
            which also wait for ranks that are still comparing), ``gradients``, ``reference``, ``compare``, ``notes``
            (all else there). In the parent: ``draw`` (waiting for the next scenario), ``send`` (of an empty task, its
            round trip), ``judge``; ``rest`` is the difference.
        drawing: seconds of drawing beside the ranks, of which ``draw`` is what was waited for.
    """

    scenarios: int
    discarded: int
    bare: float
    full: float
    ratio: float
    lowest: float
    highest: float
    parts: dict[str, float]
    drawing: float


class SizeCost(Struct, frozen=True, kw_only=True):
    """Seconds of one scenario of two steps, three parts and a clip, of a given size."""

    numel: int
    buckets: int
    bare: float
    full: float
    ratio: float


class BenchResult(Struct, frozen=True, kw_only=True):
    """The outcome; fields that :class:`harness.report.result.Result` has too mean the same here.

    ``aim`` is the ratio to stay below; above it the verdict is no other. ``violation`` says what the subject did wrong.
    """

    verdict: Verdict
    subject: str
    backend: str
    worlds: tuple[int, ...]
    seed: int
    examples: int
    rounds: int
    seconds: float
    aim: float = AIM
    per_world: dict[int, WorldCost] = {}
    table_world: int | None = None
    by_elements: tuple[SizeCost, ...] = ()
    by_buckets: tuple[SizeCost, ...] = ()
    versions: dict[str, str] = {}
    violation: str | None = None
    reason: str | None = None
    interrupted: bool = False
    schema: int = SCHEMA


class ViolatedError(Exception):
    """The subject failed or is wrong: what its scenarios cost says nothing."""


def start_pool() -> RankPool:
    """Ranks for benches; a context manager that ends them on every path."""
    return RankPool(HANDLER, backend=BACKEND, preload=(*PRELOAD, "harness.bench.rank"))


def run_bench(options: BenchOptions, say: Callable[[str], None], *, pool: RankPool | None = None) -> BenchResult:
    """Measure every world, then the tables; ``say`` is told what is measured now.

    ``pool`` is one of :func:`start_pool` that is left running; without it the bench has ranks of its own.

    Raises:
        UsageError: the subject cannot be imported, lacks the interface, or is of another system.
    """
    began = time.monotonic()
    per_world: dict[int, WorldCost] = {}
    tables: dict[str, tuple[SizeCost, ...]] = {}
    table_world = TABLE_WORLD if TABLE_WORLD in options.worlds else options.worlds[0]
    violation: str | None = None
    reason: str | None = None
    interrupted = False
    try:
        with nullcontext(pool) if pool is not None else start_pool() as ranks:
            say(f"starting ranks, world {', '.join(map(str, options.worlds))}")
            ranks.warm(options.worlds)
            for world in options.worlds:
                per_world[world] = Bench(options.subject, ranks, world).campaign(options, say)
            bench = Bench(options.subject, ranks, table_world)
            by_elements = [(numel, FIXED_BUCKETS) for numel in options.table_numels]
            by_buckets = [(FIXED_NUMEL, buckets) for buckets in options.table_buckets]
            for name, sizes in (("by_elements", by_elements), ("by_buckets", by_buckets)):
                say(f"{name.replace('_', ' ')}, world {table_world}")
                tables[name] = bench.table(sizes, options.rounds)
    except ViolatedError as error:
        violation = str(error)
    except (PoolError, UndecidedError) as error:
        reason = str(error)
    except KeyboardInterrupt:
        interrupted, reason = True, "interrupted"
    return BenchResult(
        verdict="violated" if violation else "unknown" if reason else "holds",
        subject=options.subject.given,
        backend=BACKEND,
        worlds=options.worlds,
        seed=options.seed,
        examples=options.examples,
        rounds=options.rounds,
        seconds=time.monotonic() - began,
        per_world=per_world,
        table_world=table_world,
        by_elements=tables.get("by_elements", ()),
        by_buckets=tables.get("by_buckets", ()),
        versions=versions(),
        violation=violation,
        reason=reason,
        interrupted=interrupted,
    )


class Full(Struct, frozen=True):
    """One full run: seconds of the whole, of its parts, and of the drawing beside it."""

    seconds: float
    parts: dict[str, float]
    drawing: float


class Drawing:
    """Draws the scenarios of one world; to be closed."""

    def __init__(self, seed: int, world: int) -> None:
        self._seed, self._world = seed, world
        self._drawer = Drawer()
        self._seconds = 0.0
        self._next: tuple[int, Future[Scenario]] | None = None

    def scenario(self, index: int) -> Scenario:
        """Scenario number ``index``: the one begun last, or drawn now."""
        if self._next is None or self._next[0] != index:
            return self._draw(index)
        return self._next[1].result()

    def begin(self, index: int) -> None:
        """Start drawing scenario number ``index``."""
        self._next = index, self._drawer.begin(self._draw, index)

    def finish(self) -> float:
        """Wait for it; the seconds that drawing it took."""
        if self._next is not None:
            self._next[1].result()
        return self._seconds

    def close(self) -> None:
        """End the thread."""
        self._drawer.close()

    def _draw(self, index: int) -> Scenario:
        began = time.perf_counter()
        scenario = generate.draw(self._seed, index, (self._world,))
        self._seconds = time.perf_counter() - began
        return scenario


class Bench:
    """Full and bare runs at one world."""

    def __init__(self, subject: SubjectSource, pool: RankPool, world: int) -> None:
        self._subject = SubjectName(subject.absolute, subject.args, subject.config)
        self._pool = pool
        self._world = world
        self._exchanges = False
        evaluator = Evaluator(subject, pool)
        evaluator.prepare(world)
        if evaluator.system != "zero_master":
            raise UsageError(
                f"bench measures scenarios of classes like ZeroMaster, {subject.given} is of system "
                f"{evaluator.system!r}: `bench muon` measures a step of MuonShardingOptimizer"
            )

    def campaign(self, options: BenchOptions, say: Callable[[str], None]) -> WorldCost:
        """The scenarios of a campaign, each ``rounds`` times."""
        full: list[list[Full]] = [[] for _ in range(options.examples)]
        bare: list[list[float]] = [[] for _ in range(options.examples)]
        empty: list[float] = []
        with closing(Drawing(options.seed, self._world)) as drawing:
            if self.full(drawing.scenario(0)) is not None:  # what is done once a process is done now
                self.bare(drawing.scenario(0))
            for number in range(options.rounds):
                say(f"world {self._world}, round {number + 1} of {options.rounds}, {options.examples} scenarios")
                for index in range(options.examples):
                    raise_if_interrupted()
                    scenario = drawing.scenario(index)
                    bare_first = number % 2 == 1  # in turn: neither is always the one to find warm caches
                    if bare_first and full[index]:
                        bare[index].append(self.bare(scenario))
                    measured = self._among_others(drawing, index, scenario)
                    if measured is None:
                        continue  # outside the subject's space, in every round
                    full[index].append(measured)
                    if not bare_first:
                        bare[index].append(self.bare(scenario))
                    empty.append(self.empty())
        runs = [(fulls, bares) for fulls, bares in zip(full, bare, strict=True) if fulls]
        if not runs:
            raise UndecidedError(f"world {self._world}: no scenario lies inside the subject's space")
        return world_cost(runs, empty, discarded=options.examples - len(runs))

    def _among_others(self, drawing: Drawing, index: int, scenario: Scenario) -> Full | None:
        """A full run with the next scenario drawn beside it, as in a campaign."""
        began = time.perf_counter()
        drawing.begin(index + 1)
        measured = self.full(scenario)
        judged = time.perf_counter()
        seconds = drawing.finish()
        ended = time.perf_counter()
        if measured is None:
            return None
        return Full(ended - began, {**measured.parts, "draw": ended - judged}, seconds)

    def full(self, scenario: Scenario) -> Full | None:
        """One full run without drawing; None when the subject says that the scenario is outside its space.

        Raises:
            ViolatedError: the subject fails it.
        """
        began = time.perf_counter()
        task = RunTimed(self._subject, scenario, self._exchanges)
        outcome = self._pool.run(self._world, encode(task), timeout_s=TIMEOUT_S)
        ended = time.perf_counter()
        evaluation = conclude(outcome, partial(trail.read, self._pool.directory, self._world))
        reached(scenario)  # a campaign counts them
        judged = time.perf_counter()
        if evaluation.conclusion is Conclusion.UNSUPPORTED:
            return None
        if evaluation.conclusion is Conclusion.UNRESOLVED:
            self._exchanges = True
            return self.full(scenario)
        found = evaluation.divergence
        if found is not None:
            rank = "" if found.rank is None else f", rank {found.rank}"
            raise ViolatedError(f"world {self._world}{rank}: {found.property.value}: {found.message}")
        verdicts = [decode_timed(report.reply or b"") for report in outcome.ranks]
        parts = {name: statistics.fmean(verdict.parts[name] for verdict in verdicts) for name in RANK_PARTS}
        return Full(judged - began, {**parts, "judge": judged - ended}, 0.0)

    def bare(self, scenario: Scenario) -> float:
        """One bare run: the longest of the ranks' times.

        Raises:
            ViolatedError: the subject raised, or a rank did not come to its end.
        """
        return max(report.seconds for report in self.bare_reports(scenario))

    def bare_reports(self, scenario: Scenario) -> list[BareReport]:
        """One bare run, as each rank reports it."""
        outcome = self._pool.run(self._world, encode(RunBare(self._subject, scenario)), timeout_s=TIMEOUT_S)
        if not outcome.replied:
            raise ViolatedError(f"world {self._world}, in a bare run: {_problem(outcome)}")
        return [decode_bare(report.reply or b"") for report in outcome.ranks]

    def empty(self) -> float:
        """Seconds of a task with nothing in it."""
        began = time.perf_counter()
        self._pool.run(self._world, encode(DoNothing()), timeout_s=TIMEOUT_S)
        return time.perf_counter() - began

    def table(self, sizes: Sequence[tuple[int, int]], rounds: int) -> tuple[SizeCost, ...]:
        """The cost of scenarios of some ``(elements, buckets)``."""
        full: list[list[float]] = [[] for _ in sizes]
        bare: list[list[float]] = [[] for _ in sizes]
        for _ in range(rounds + 1):  # the first for nothing: memory is fetched from the system
            for index, (numel, buckets) in enumerate(sizes):
                raise_if_interrupted()
                scenario = sized_scenario(self._world, numel, buckets)
                measured = self.full(scenario)
                if measured is None:
                    raise UndecidedError(f"{numel} elements in {buckets} buckets lie outside the subject's space")
                full[index].append(measured.seconds)
                bare[index].append(self.bare(scenario))
        return tuple(
            SizeCost(
                numel=numel,
                buckets=buckets,
                bare=(least := statistics.median(bares[1:])),
                full=(most := statistics.median(fulls[1:])),
                ratio=most / least,
            )
            for (numel, buckets), fulls, bares in zip(sizes, full, bare, strict=True)
        )


def world_cost(
    runs: Sequence[tuple[Sequence[Full], Sequence[float]]], empty: Sequence[float], *, discarded: int
) -> WorldCost:
    """Cost of the mean scenario from the full and bare runs of each; ``empty``: seconds of empty tasks."""
    # The median run and not the median of each part: the parts of one run add up.
    typical = [sorted(fulls, key=lambda run: run.seconds)[len(fulls) // 2] for fulls, _ in runs]
    bare = statistics.fmean(statistics.median(bares) for _, bares in runs)
    full = statistics.fmean(run.seconds for run in typical)
    parts = {name: statistics.fmean(run.parts.get(name, 0.0) for run in typical) for name in PARTS}
    parts["send"] = statistics.median(empty)
    parts["rest"] = full - sum(seconds for name, seconds in parts.items() if name != "rest")
    ratios = [
        sum(fulls[number].seconds for fulls, _ in runs) / sum(bares[number] for _, bares in runs)
        for number in range(min(len(fulls) for fulls, _ in runs))
    ]
    return WorldCost(
        scenarios=len(runs),
        discarded=discarded,
        bare=bare,
        full=full,
        ratio=full / bare,
        lowest=min(ratios),
        highest=max(ratios),
        parts=parts,
        drawing=statistics.fmean(run.drawing for run in typical),
    )


def sized_scenario(world: int, numel: int, buckets: int) -> Scenario:
    """One held step and one spilled, clipped step of eight parameters in a given number of buckets."""
    sizes = [numel * (index + 1) // _TABLE_PARAMETERS - numel * index // _TABLE_PARAMETERS
             for index in range(_TABLE_PARAMETERS)]  # fmt: skip
    none = ((),) * world
    contributors = [tuple(range(part * world, (part + 1) * world)) for part in range(2)]
    return Scenario(
        world=world,
        seed=0,  # of those seeds with which every check is made
        parameters=tuple(Parameter(f"p{index}", (size,)) for index, size in enumerate(sizes) if size),
        values=Values(Domain.EXACT, max_k=255, exponent=-10),
        optimizer=AdamW(),
        operations=(
            Build(-(-numel // buckets // world) * world),
            Part(False, contributors[0], none),
            Step(),
            Part(True, contributors[0], none),
            Part(False, contributors[1], none),
            Clip(1.0),
            Step(),
        ),
    )


def _problem(outcome: Outcome) -> str:
    """What ended a bare run, in a sentence."""
    report = outcome.ranks[outcome.first_failed or 0]
    if report.reply is not None:
        problem = decode_bare(report.reply).problem or "no reason given"
        return f"rank {report.rank} raised {problem.strip().splitlines()[-1]}"
    return f"rank {report.rank} sent no report: {report.error or report.end.value}"
