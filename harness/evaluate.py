"""Run one scenario on the warm ranks and conclude: holds, violated (where first), or outside the subject's space.

The parent's side of :mod:`harness.drive`. What ranks send is judged together (:mod:`harness.oracles.judge`); a rank
that sends no verdict is a violation of ``progress``, whatever its exit code, unless another difference came before.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from msgspec.structs import replace

from harness import blame
from harness.drive import traffic, trail
from harness.drive.tasks import CheckSubject, RunScenario, SubjectCheck, SubjectName, encode
from harness.drive.trail import Left
from harness.errors import UsageError
from harness.faults import expect
from harness.launch import machine
from harness.launch.pool import Outcome, PoolError, RankEnd, RankPool, RankReport, Watch
from harness.launch.process import default_device
from harness.oracles import judge, sequence
from harness.oracles.order import UNKNOWN
from harness.report.evidence import Place
from harness.scenario.model import EXTENSIONS, Extension, Scenario, Step, System
from harness.scenario.muon_check import newton_schulz_work
from harness.scenario.relations import NOTHING_OBSERVED, Observed
from harness.scenario.strategy import DECLARABLE, Offer
from harness.sim.lanes import Batch
from harness.sim.pool import SimPool
from harness.subjects.builtin import CLASS_SUBJECT, capabilities, known_system
from harness.subjects.source import SubjectSource
from harness.verdict import Divergence, Observation, Property, RankAccount, RankStatus, RankVerdict, Stage

HANDLER = "harness.drive.handler:start"
PRELOAD = ("torch.optim", "harness.drive.handler", "zero2core")
SIM_PRELOAD = (*PRELOAD, "harness.sim.handler")

# The last resort, for a subject that gets on for ever: a scenario of this size or less gets the base time, each element
# that is generated and summed on each rank adds some, and a machine with more to do than it has cores gives so many
# times more.
BASE_TIMEOUT_S = 30.0
TIMEOUT_S_PER_ELEMENT = 1e-6
# The ranks of a simulated world take turns.
SIM_TIMEOUT_S_PER_RANK = 1.0
# A hang is told by this (see harness.launch.outcome.Watch). The longest that the ranks of a right class were seen to
# wait, with nobody computing, is a fraction of a second.
BLOCKED_S = 5.0
BLOCKED_S_PER_ELEMENT = 1e-8
COMPUTING_S = 6.0
IMPORT_BLOCKED_S = 15.0
IMPORT_COMPUTING_S = 20.0
IMPORT_TIMEOUT_S = 180.0
# What the scenarios of a batch may take beside the one that takes longest: whoever makes batches aims at a fraction.
BATCH_S = 20.0
# Of the time that a simulated world takes, measured with ZeroMaster: one operation on one rank is as much as so many
# elements. The two operations that are added to each scenario's stand for what ranks do before and after.
_OPERATION_COST = 3000
# How long the others may go on once a rank has failed: to say what they saw themselves. They mostly wait for it.
GRACE_S = 1.0

_verdict = msgspec.msgpack.Decoder(RankVerdict)
_divergence = msgspec.msgpack.Decoder(Divergence)
_check = msgspec.msgpack.Decoder(SubjectCheck)


# A rank that ended so was stopped somewhere.
_STOPPED = (RankEnd.STALLED, RankEnd.TIMED_OUT, RankEnd.DEADLOCKED, RankEnd.ABANDONED)
# What a wrong value that one rank handed to a collective shows as.
_ATTRIBUTABLE = (Property.GRADIENT, Property.SPILL, Property.OWNERSHIP, Property.NORM, Property.WEIGHTS)


class Pool(Protocol):
    """Where scenarios run: a :class:`harness.launch.pool.RankPool`, a :class:`harness.launch.spread.SpreadPool`, or a
    :class:`harness.sim.pool.SimPool`."""

    @property
    def backend(self) -> str:
        """Of the ranks' groups: ``"gloo"``, ``"nccl"`` or ``"sim"``."""

    @property
    def directory(self) -> Path:
        """Private to the pool; what ranks leave behind lies there."""

    @property
    def incidents(self) -> Sequence[str]:
        """What happened to processes between tasks, one line each."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def home(self, world: int) -> int:
        """The world by whose number the processes go that run this one."""

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        """Have every rank of a world do a task; raises :class:`harness.launch.outcome.PoolError`."""

    def recycle(self, world: int) -> None:
        """End the processes that run a world; the next task starts fresh ones. Raises the same."""


class UndecidedError(Exception):
    """The harness itself failed: nothing can be said about the subject (exit code 3)."""


class Conclusion(enum.Enum):
    """HOLDS: all compared equal. VIOLATED: ``divergence`` says where first. UNSUPPORTED: not judged.

    UNHIT: a fault of the scenario never struck, and nothing else differed: the run shows nothing.
    UNRESOLVED: a sum was added in another order than predicted, and the ranks have to search for it together: nothing
    is decided by this run.
    """

    HOLDS = "holds"
    VIOLATED = "violated"
    UNSUPPORTED = "unsupported"
    UNHIT = "unhit"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True)
class Evaluation:
    """One run of one scenario.

    Attributes:
        fingerprint: equal for two runs of one scenario when everything observed has the same bits.
        hung: a rank was still running at the time-out, or did not get on. A deadlock of a simulated world is none: it
            is known at once.
        output: the end of what the rank of the divergence printed, and what it raised.
        searched: a sum was not added in the predicted order, and the ranks searched for the order together.
        accounts: what each rank was doing, where that is what matters.
        hits: rank -> which of the scenario's faults struck it (their indices).
        changed: what the subject changed in its processes beside its own, put back since.
        recycled: why the ranks were replaced after this run; None if they go on.
        observed: norms and digests of weights that rank 0 saw.
        margin: the largest error in terms of its bound; None when nothing was held against a bound.
        observations: rank -> what it saw at the first difference, None where all was equal there; of the ranks of
            which that is known.
        places: how far each rank came, of a violation.
    """

    conclusion: Conclusion
    divergence: Divergence | None = None
    checks: dict[str, int] = field(default_factory=dict)
    oracle: dict[str, int] = field(default_factory=dict)
    situations: frozenset[str] = frozenset()
    fingerprint: tuple[object, ...] = ()
    hung: bool = False
    output: str = ""
    seconds: float = 0.0
    searched: bool = False
    accounts: tuple[RankAccount, ...] = ()
    hits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    recycled: str | None = None
    observed: Observed = NOTHING_OBSERVED
    margin: float | None = None
    observations: Mapping[int, Observation | None] = field(default_factory=dict)
    places: tuple[Place, ...] = ()


def start_pool(backend: str = "gloo", lanes: int = 1, device: str | None = None) -> Pool:
    """Warm ranks for scenarios of any subject; a context manager that ends them on every path.

    ``lanes``: how many simulated worlds :meth:`Evaluator.evaluate_many` may run side by side (sim). ``device``: where
    tensors belong, see :func:`harness.launch.process.default_device`.
    """
    if backend == "sim":
        return SimPool(preload=SIM_PRELOAD, lanes=lanes, device=device or default_device(backend))
    return RankPool(HANDLER, backend=backend, device=device, preload=PRELOAD, grace_s=GRACE_S)


class Evaluator:
    """Runs scenarios of one subject on the ranks of a pool (:func:`start_pool`)."""

    def __init__(
        self,
        subject: SubjectSource,
        pool: Pool,
        *,
        timeout_s: float | None = None,
        stall_s: float | None = None,
        order: str = "ring",
        schedule: str = "random",
        rule: str = "",
    ) -> None:
        """``timeout_s``: how long a scenario may take; ``stall_s``: how long without progress; None: by its size.
        ``order``, ``schedule``, ``rule``: see :class:`harness.drive.tasks.RunScenario`. Of NCCL no rule is known
        (:data:`harness.oracles.order.UNKNOWN`): then every scenario begins with the search for the order."""
        if pool.backend == "nccl":
            rule = UNKNOWN
        self.timeout_s = timeout_s
        self.stall_s = stall_s
        self._subject = SubjectName(subject.absolute, subject.args, subject.config)
        self._capabilities = capabilities(subject.absolute, subject.config)
        self._is_class = capabilities(subject.absolute) is CLASS_SUBJECT
        self._pool = pool
        self._order, self._schedule, self._rule = order, schedule, rule
        self._extension = self._capabilities.extension
        self._system = known_system(subject.absolute)
        self.versions: dict[str, str] = {}  # as the ranks prepared last told them
        self._imported: set[int] = set()  # the homes of worlds
        self._exchanges = rule == UNKNOWN
        self._lanes_ready = False
        self._closely = False
        # The process of a simulated world outlives what its ranks raise, and their deadlocks.
        survived = (RankEnd.REPLIED, RankEnd.BROKEN, RankEnd.DEADLOCKED, RankEnd.ABANDONED)
        self._ends_processes = set(RankEnd) - set(survived if isinstance(pool, SimPool) else (RankEnd.REPLIED,))

    @property
    def extension(self) -> Extension:
        """What the subject takes beyond the contract's space; known after :meth:`prepare`."""
        return self._extension

    @property
    def system(self) -> System:
        """What kind of system the subject is: of a built-in always known, of a class after :meth:`prepare`.

        Raises:
            ValueError: it was asked for before.
        """
        if self._system is None:
            raise ValueError("what kind of system a class is is known only after prepare()")
        return self._system

    @property
    def exact_norms(self) -> bool:
        """Whether a squared norm is exact where its terms and their sum are exact in fp64."""
        return self._capabilities.norm == "fp64"

    @property
    def lanes(self) -> int:
        """How many scenarios :meth:`evaluate_many` runs at the same time."""
        return self._pool.lanes if isinstance(self._pool, SimPool) else 1

    @property
    def simulated(self) -> bool:
        """Whether all ranks live in one process."""
        return isinstance(self._pool, SimPool)

    @contextmanager
    def stalling_within(self, stall_s: float) -> Iterator[None]:
        """Inside, a scenario counts as hung after at most so long without progress."""
        before = self.stall_s
        self.stall_s = stall_s if before is None else min(before, stall_s)
        try:
            yield
        finally:
            self.stall_s = before

    def prepare(self, world: int) -> None:
        """Start the ranks of one world and import the subject there, unless that is done.

        Raises:
            UsageError: the subject cannot be imported or lacks the interface.
            UndecidedError: the ranks could not be started.
        """
        home = self._pool.home(world)
        if home in self._imported:
            return
        outcome = self._check(home)
        _require_working(outcome)
        if not outcome.replied:
            report = _first_failed(outcome)
            raise UsageError(
                f"importing the subject ended rank {report.rank}: {report.error or report.end.value}{_tail(report)}"
            )
        checks = [_check.decode(report.reply or b"") for report in outcome.ranks]
        for check in checks:
            if check.problem is not None:
                raise UsageError(check.problem)
            if self._system is not None and check.system != self._system:
                raise UsageError(
                    f"rank {checks.index(check)} imported a class of system {check.system!r}, "
                    f"where others are of system {self._system!r}"
                )
            self._system = check.system
        if not self._imported and self._is_class:
            # What some ranks declare and others do not is not drawn.
            known = DECLARABLE if self._system == "strategy" else EXTENSIONS
            declared: dict[str, Any] = {name: all(name in check.declares for check in checks) for name in known}
            if self._system == "strategy":
                self._extension = Extension(strategy=Offer(**declared))
            else:
                self._extension = Extension(**declared)
        self._imported.add(home)
        self.versions.update(_together([check.versions for check in checks]))

    def evaluate(self, scenario: Scenario) -> Evaluation:
        """Run a scenario once.

        Raises:
            UsageError: the built subject lacks an attribute of the contract.
            UndecidedError: the harness failed, not the subject.
        """
        evaluation = self._evaluate(scenario)
        if evaluation.conclusion is Conclusion.UNRESOLVED:
            # It adds in an order of its own, in other scenarios too: from now on they begin with the search.
            self._exchanges = True
            evaluation = self._evaluate(scenario)
            if evaluation.conclusion is Conclusion.HOLDS and not evaluation.searched:
                return _changed_its_sum(evaluation)
        return evaluation

    def evaluate_many(self, scenarios: Sequence[Scenario]) -> Iterator[Evaluation]:
        """What :meth:`evaluate` gives for each, in order, at the same time where the pool has lanes.

        Side by side is only the fast way to what holds: a scenario of which anything else came is run again by itself
        when its turn comes, and what comes of that counts. To be called again once this one is exhausted, or closed.

        Raises:
            UsageError, UndecidedError: see :meth:`evaluate`.
        """
        if isinstance(self._pool, SimPool) and self.lanes > 1 and len(scenarios) > 1:
            yield from self._side_by_side(self._pool, scenarios)
        else:
            yield from map(self.evaluate, scenarios)

    def _side_by_side(self, pool: SimPool, scenarios: Sequence[Scenario]) -> Iterator[Evaluation]:
        before, exchanges = len(pool.incidents), self._exchanges
        batch = self._batch(pool, scenarios)
        known = [self._holding(*pair) for pair in zip(scenarios, batch.outcomes, strict=True)]
        if not batch.kept:
            self._lanes_ready = False
        elif any(evaluation is not None and evaluation.recycled is not None for evaluation in known):
            with _undecided():
                pool.recycle_lanes()
            self._lanes_ready = False
        crashed = _crashed(pool.incidents[before:])
        if crashed is not None:
            known[0] = crashed
        for index, (scenario, evaluation) in enumerate(zip(scenarios, known, strict=True)):
            # From the first sum in an order of its own on, all scenarios begin with the search.
            if evaluation is None or self._exchanges is not exchanges:
                evaluation = self.evaluate(scenario)
                if index in batch.died and evaluation.conclusion is not Conclusion.VIOLATED:
                    evaluation = _died_among_others(batch.died[index])
            yield evaluation

    def _batch(self, pool: SimPool, scenarios: Sequence[Scenario]) -> Batch:
        with _undecided():
            if not self._lanes_ready:
                self._lanes_ready = self._check_lanes(pool)
            if not self._lanes_ready:
                return Batch((None,) * len(scenarios), {}, kept=False)
            watches = [self._watch(scenario) for scenario in scenarios]
            return pool.run_many(
                [self._task(scenario) for scenario in scenarios],
                [cost(scenario) for scenario in scenarios],
                timeout_s=max(map(self._timeout_s, scenarios)) + BATCH_S * machine.patience(),
                blocked_s=max(watch.blocked_s for watch in watches),
                computing_s=max(watch.computing_s for watch in watches),
            )

    def _holding(self, scenario: Scenario, outcome: Outcome | None) -> Evaluation | None:
        """What came of a scenario beside others; None: something other than that it holds, or is not supported."""
        if outcome is None or outcome.told is not None or any(report.reply is None for report in outcome.ranks):
            return None
        try:
            evaluation = self._concluded(scenario, outcome, lambda _rank: Left())
        except (UsageError, UndecidedError):
            return None  # as it will be told once more
        return evaluation if evaluation.conclusion in (Conclusion.HOLDS, Conclusion.UNSUPPORTED) else None

    def _check_lanes(self, pool: SimPool) -> bool:
        watch = Watch(lambda _lane: None, self.stall_s or IMPORT_BLOCKED_S, self.stall_s or IMPORT_COMPUTING_S)
        timeout_s = self.timeout_s or IMPORT_TIMEOUT_S
        return pool.check_lanes(encode(CheckSubject(self._subject)), timeout_s=timeout_s, watch=watch)

    def _evaluate(self, scenario: Scenario) -> Evaluation:
        return self._ran(scenario, inspect=self._closely)[1]

    def closely(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        """What holds, looked at once more in a simulated world, operation by operation, which takes its time.

        A buffer that is read before its collective was waited for is found otherwise by what that spoils, which may be
        nothing. Once one was found so, whatever is evaluated is looked at like this.
        """
        if not isinstance(self._pool, SimPool) or evaluation.conclusion is not Conclusion.HOLDS:
            return evaluation
        _, again = self._ran(scenario, inspect=True)
        found = again.divergence
        if again.conclusion is not Conclusion.VIOLATED or found is None or found.property is not Property.TRAFFIC:
            return evaluation
        self._closely = True
        return again

    def _ran(self, scenario: Scenario, *, inspect: bool = False) -> tuple[Outcome, Evaluation]:
        self.prepare(scenario.world)
        if scenario.system != self.system:
            raise UsageError(f"the scenario is of system {scenario.system!r}, the subject of {self.system!r}")
        before = len(self._pool.incidents)
        task = self._task(scenario, inspect=inspect)
        home = self._pool.home(scenario.world)
        outcome = self._run(scenario.world, encode(task), self._timeout_s(scenario), self._watch(scenario))
        if any(report.end in self._ends_processes for report in outcome.ranks):
            self._imported.discard(home)  # the next run starts fresh ranks
        crashed = _crashed(self._pool.incidents[before:])
        if crashed is not None:
            return outcome, crashed
        evaluation = self._concluded(scenario, outcome, self._lefts(scenario.world))
        if evaluation.recycled is not None:
            self._pool.recycle(scenario.world)
            self._imported.discard(home)
        return outcome, evaluation

    def _task(self, scenario: Scenario, *, inspect: bool = False) -> RunScenario:
        return RunScenario(self._subject, scenario, self._exchanges, inspect, self._order, self._schedule, self._rule)

    def _concluded(self, scenario: Scenario, outcome: Outcome, lefts: Callable[[int], Left]) -> Evaluation:
        evaluation = conclude(outcome, lefts, self._implied(scenario))
        if evaluation.conclusion is Conclusion.HOLDS and expect.unhit(scenario, evaluation.hits):
            evaluation = dataclasses.replace(evaluation, conclusion=Conclusion.UNHIT)
        return evaluation

    def _lefts(self, world: int) -> Callable[[int], Left]:
        """Reads each rank's trail once, when it is asked for."""
        return functools.cache(lambda rank: trail.read(self._pool.directory, world, rank))

    def _implied(self, scenario: Scenario) -> sequence.Implied | None:
        return traffic.implied(scenario) if self._capabilities.traffic else None

    def attributed(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        """A violation with the rank whose doing it is, where one more run can tell; else as it is."""
        found = evaluation.divergence
        if found is None or found.property not in _ATTRIBUTABLE:
            return evaluation
        if scenario.world == 1 and not isinstance(self._pool, SimPool):
            return evaluation  # there is no other, and no asynchronous collective to be looked at
        outcome, again = self._ran(scenario, inspect=True)
        if again.divergence is None or again.divergence.when > found.when or not outcome.replied:
            return evaluation
        verdicts = [_verdict.decode(report.reply or b"") for report in outcome.ranks]
        if again.divergence.property is Property.TRAFFIC:
            # What a simulated world sees of the buffers of collectives when it looks closely.
            attributed = blame.raced(found, again.divergence)
        elif again.divergence.when == found.when:
            attributed = blame.attributed(found, verdicts)
        else:
            return evaluation
        attributed = replace(attributed, inputs=_handed(again.divergence, verdicts))
        sent = {verdict.rank: verdict for verdict in verdicts}
        accounts = _accounts(outcome, attributed, sent, self._lefts(scenario.world))
        return dataclasses.replace(evaluation, divergence=attributed, accounts=accounts)

    def crashed_when_idle(self, world: int) -> Evaluation | None:
        """A violation when a rank of this world, if there is any, ended after it had sent its last verdict.

        Of simulated worlds: also when the process of a lane did.
        """
        home = self._pool.home(world)
        if home not in self._imported:
            return None
        before = len(self._pool.incidents)
        self._check(home)
        if self._lanes_ready and isinstance(self._pool, SimPool):
            with _undecided():
                self._check_lanes(self._pool)
        return _crashed(self._pool.incidents[before:])

    def _check(self, world: int) -> Outcome:
        """Have the ranks import the subject; nothing but their stacks shows how far they are."""
        watch = Watch(lambda _rank: None, self.stall_s or IMPORT_BLOCKED_S, self.stall_s or IMPORT_COMPUTING_S)
        return self._run(world, encode(CheckSubject(self._subject)), self.timeout_s or IMPORT_TIMEOUT_S, watch)

    def _run(self, world: int, task: bytes, timeout_s: float, watch: Watch) -> Outcome:
        with _undecided():
            return self._pool.run(world, task, timeout_s=timeout_s, watch=watch)

    def _timeout_s(self, scenario: Scenario) -> float:
        if self.timeout_s is not None:
            return self.timeout_s
        base_s = BASE_TIMEOUT_S
        if self._pool.home(scenario.world) != scenario.world:
            base_s += SIM_TIMEOUT_S_PER_RANK * scenario.world
        return (base_s + TIMEOUT_S_PER_ELEMENT * _work(scenario)) * machine.patience()

    def _watch(self, scenario: Scenario) -> Watch:
        directory, world = self._pool.directory, scenario.world
        work = _work(scenario)
        return Watch(
            moved=lambda rank: trail.position(directory, world, rank),
            blocked_s=self.stall_s or BLOCKED_S + BLOCKED_S_PER_ELEMENT * work,
            computing_s=self.stall_s or COMPUTING_S + TIMEOUT_S_PER_ELEMENT * work,
        )


@contextmanager
def _undecided() -> Iterator[None]:
    """Raises UndecidedError: what is done inside raised PoolError."""
    try:
        yield
    except PoolError as error:
        raise UndecidedError(str(error)) from error


def cost(scenario: Scenario) -> float:
    """About how long a simulated world takes for a scenario, compared with others."""
    return _OPERATION_COST * scenario.world * (len(scenario.operations) + 2) + _work(scenario)


def _work(scenario: Scenario) -> int:
    """Elements that are generated, summed or compared, over all ranks; products of matrices as so many elements."""
    return scenario.numel * scenario.world * len(scenario.operations) + _products(scenario)


# Multiplications and additions of Newton-Schulz that take as long as one element; of the slowest, in bf16 without
# instructions for it.
_OPERATIONS = 3000


def _products(scenario: Scenario) -> int:
    """Newton-Schulz of all matrices, by the reference of each rank and by their owners."""
    if scenario.muon is None:
        return 0
    num_steps = sum(isinstance(operation, Step) for operation in scenario.operations)
    return newton_schulz_work(scenario, scenario.muon) * num_steps * (scenario.world + 1) // _OPERATIONS


def conclude(outcome: Outcome, lefts: Callable[[int], Left], implied: sequence.Implied | None = None) -> Evaluation:
    """What all ranks' reports on one task mean together.

    Args:
        outcome: Of the task.
        lefts: What a rank left behind.
        implied: The collectives that the subject's layout implies, where it promises them.

    Raises:
        UsageError, UndecidedError: see :meth:`Evaluator.evaluate`.
    """
    _require_working(outcome)
    if outcome.told is not None and outcome.told.kind == "refusal":
        raise UndecidedError(f"a simulated world cannot run this class: {outcome.told.message}")
    try:
        verdicts = [_verdict.decode(report.reply) for report in outcome.ranks if report.reply is not None]
        if any(verdict.unresolved for verdict in verdicts):
            return Evaluation(Conclusion.UNRESOLVED, seconds=outcome.seconds)
        silent = [_left_behind(report, lefts(report.rank)) for report in outcome.ranks if report.reply is None]
        judgement = judge.merge([*verdicts, *silent], outcome.world, implied)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UndecidedError(f"the ranks' reports make no sense: {error}") from error
    if judgement.interface is not None:
        raise UsageError(judgement.interface)
    sent = {verdict.rank: verdict for verdict in verdicts}
    if silent or outcome.told is not None:
        judgement = dataclasses.replace(judgement, divergence=blame.cause(outcome, judgement.divergence, sent, lefts))
    if judgement.divergence is not None:
        conclusion = Conclusion.VIOLATED
    elif judgement.unsupported:
        conclusion = Conclusion.UNSUPPORTED
    else:
        conclusion = Conclusion.HOLDS
    checks = dict(judgement.checks)
    checks[Property.PROGRESS.value] = checks.get(Property.PROGRESS.value, 0) + len(verdicts)
    oracle: dict[str, int] = {}
    for verdict in verdicts:
        _add(checks, verdict.checks)
        _add(oracle, verdict.oracle)
    return Evaluation(
        conclusion=conclusion,
        divergence=judgement.divergence,
        checks=checks,
        oracle=oracle,
        situations=frozenset(situation for verdict in verdicts for situation in verdict.situations),
        fingerprint=(*_fingerprint(verdicts, judgement.divergence), outcome.trace),
        hung=any(report.end in (RankEnd.TIMED_OUT, RankEnd.STALLED) for report in outcome.ranks),
        output=_output(outcome, verdicts, judgement.divergence),
        seconds=outcome.seconds,
        searched=any(verdict.searched for verdict in verdicts),
        accounts=_accounts(outcome, judgement.divergence, sent, lefts),
        hits={said.rank: said.hits for said in (*verdicts, *silent) if said.hits},
        changed=frozenset(name for verdict in verdicts for name in verdict.changed),
        observed=next((Observed(said.norms, said.weights) for said in verdicts if said.rank == 0), NOTHING_OBSERVED),
        recycled=next((f"rank {said.rank}: {said.recycle}" for said in verdicts if said.recycle is not None), None),
        margin=max((said.margin for said in verdicts if said.margin is not None), default=None),
        observations=_observations(judgement.divergence, verdicts),
        places=() if judgement.divergence is None else _places(outcome, sent, lefts),
    )


def _observations(found: Divergence | None, verdicts: Sequence[RankVerdict]) -> dict[int, Observation | None]:
    """What each rank saw where the first difference is."""
    known: dict[int, Observation | None] = {}
    for verdict in verdicts:
        own = verdict.divergence
        if found is None or (verdict.status is not RankStatus.DONE and own is None):
            continue
        if own is None or own.when > found.when:
            known[verdict.rank] = None
        elif verdict.observed is not None and own.when == found.when:
            known[verdict.rank] = verdict.observed
    return known if any(known.values()) else {}


def _places(outcome: Outcome, sent: Mapping[int, RankVerdict], lefts: Callable[[int], Left]) -> tuple[Place, ...]:
    """How far each rank came, by its own verdict or by what it left behind."""
    return tuple(
        blame.place(report, sent.get(report.rank), lefts(report.rank) if report.rank not in sent else None)
        for report in outcome.ranks
    )


def _handed(found: Divergence, verdicts: Sequence[RankVerdict]) -> str | None:
    """Whether the reduction was given the right values, as far as the ranks could tell."""
    if found.stage is not Stage.REDUCE or found.property is Property.TRAFFIC:
        return None
    at = found.step, Stage.REDUCE
    wrong = [verdict.rank for verdict in verdicts if any((note.step, note.stage) == at for note in verdict.handed)]
    if wrong:
        return f"{sequence.ranks_text(wrong)} handed something else than the sum of its parts to the reduction"
    if all(verdict.handings for verdict in verdicts):
        return "agreed: every rank handed the sum of its own parts to the reduction"
    return None


def _accounts(
    outcome: Outcome, found: Divergence | None, sent: dict[int, RankVerdict], lefts: Callable[[int], Left]
) -> tuple[RankAccount, ...]:
    """Of all ranks, where how they ended is what matters."""
    if found is None or found.property not in (Property.PROGRESS, Property.TRAFFIC):
        return ()
    return blame.accounts(outcome, found, sent, lefts)


def _together(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What ranks compute with, as one: where they differ, each with how many have it."""
    found = {}
    for name in dict.fromkeys(name for versions in of_ranks for name in versions):
        counted = Counter(versions.get(name, "none") for versions in of_ranks)
        alone = len(counted) == 1 and name != "gpu"
        found[name] = ", ".join(value if alone else f"{count} x {value}" for value, count in counted.items())
    return found


def _changed_its_sum(second: Evaluation) -> Evaluation:
    """The sum that the first run could not explain was as predicted in the second."""
    found = Divergence(
        property=Property.DETERMINISM,
        stage=Stage.REDUCE,
        message="of two runs of this scenario one gave a reduced gradient that is not the sum in the predicted order, "
        "and the other gave that sum",
    )
    return dataclasses.replace(second, conclusion=Conclusion.VIOLATED, divergence=found, fingerprint=(found.property,))


def _crashed(incidents: Sequence[str]) -> Evaluation | None:
    """What a subject leaves running in a rank may end it between two scenarios: a crash, with every verdict there."""
    if not incidents:
        return None
    found = Divergence(property=Property.PROGRESS, stage=Stage.GATHER, message=f"after a scenario, {incidents[0]}")
    return Evaluation(Conclusion.VIOLATED, found, fingerprint=(Property.PROGRESS,))


def _died_among_others(error: str) -> Evaluation:
    """The process of a lane ended; what it ran is fine by itself, and so is what ran before."""
    found = Divergence(
        property=Property.PROGRESS,
        stage=Stage.GATHER,
        message=f"the process that ran this scenario after others ended: {error}; by itself it does not fail",
    )
    return Evaluation(Conclusion.VIOLATED, found, fingerprint=(Property.PROGRESS,))


def _require_working(outcome: Outcome) -> None:
    """A handler that raised is a mistake of the harness, about which the subject says nothing."""
    for report in outcome.ranks:
        if report.end is RankEnd.RAISED:
            raise UndecidedError(f"the harness failed on rank {report.rank}:\n{report.error}")


def _fingerprint(verdicts: list[RankVerdict], divergence: Divergence | None) -> tuple[object, ...]:
    """Everything observed that must be the same in a second run. After a crash only that there was one: which rank a
    broken connection reaches first is chance. Of memory only that there was too much: how many bytes are alive beside
    the subject's depends on what ran before."""
    if divergence is not None and divergence.property in (Property.PROGRESS, Property.TRAFFIC, Property.MEMORY):
        return (divergence.property,)
    # Encoded, since nan is not equal to itself.
    return (encode(divergence), *((verdict.rank, verdict.norms, verdict.weights) for verdict in verdicts))


def _left_behind(report: RankReport, left: Left) -> RankVerdict:
    """What is known of a rank that sent no verdict: what it reported on the way, and the trail of its calls."""
    events = [_divergence.decode(event) for event in report.events]
    return RankVerdict(
        rank=report.rank,
        status=RankStatus.SILENT,
        divergence=events[0] if events else None,
        collectives=left.collectives,
        driven=left.driven,
        hits=left.hits,
    )


def _first_failed(outcome: Outcome) -> RankReport:
    return outcome.ranks[outcome.first_failed or 0]


def _output(outcome: Outcome, verdicts: list[RankVerdict], divergence: Divergence | None) -> str:
    """What the rank of the divergence printed and raised; where no rank is named, what the first rank with any did."""
    if divergence is None:
        return ""
    details = {verdict.rank: verdict.detail or "" for verdict in verdicts}
    texts = [
        "\n".join(
            part
            for part in (blame.without_harness(report.output), details.get(report.rank, ""), _stacks(report))
            if part
        )
        for report in outcome.ranks
    ]
    if divergence.rank is not None:
        return texts[divergence.rank]
    return next((text for text in texts if text), "")


def _stacks(report: RankReport) -> str:
    if not report.stacks or report.end not in _STOPPED:
        return ""  # a rank that has replied only waits for its next task
    return f"where rank {report.rank} was when it was stopped:\n{blame.without_harness(report.stacks)}"


def _tail(report: RankReport) -> str:
    lines = report.output.strip().splitlines() if report.output else []
    # What a crash prints last is a list of all modules.
    said = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else None)
    return f" ({said})" if said else ""


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
