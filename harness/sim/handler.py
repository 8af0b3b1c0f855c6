"""What the process of a simulated world runs: one driver a rank, all ranks in this process, one at a time."""

from __future__ import annotations

import contextvars
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

from msgspec.structs import replace

from harness.drive import accelerator
from harness.drive.calls import Around, RankDriver
from harness.drive.generators import Generators
from harness.drive.handler import refused, run_driver, told_of_its_group
from harness.drive.isolation import Isolation
from harness.drive.shared import Shared
from harness.drive.systems import driver_of
from harness.drive.tasks import CheckSubject, RunMany, RunScenario, SubjectCheck, SubjectName, decode_sim_task, encode
from harness.drive.trail import Trail
from harness.launch import process, tap
from harness.launch.outcome import Told
from harness.launch.rank import RankBroken, RankContext
from harness.launch.tap import CollectiveLog
from harness.oracles.order import rule
from harness.scenario.model import Scenario
from harness.sim import binding, messages
from harness.sim.buffers import Buffers, is_poison
from harness.sim.choices import Schedule, SumOrder
from harness.sim.cores import on_one_core
from harness.sim.messages import LaneReply, RankEvent, RankPart, WorldReply
from harness.sim.printed import Log, Printed
from harness.sim.races import RaceDetector
from harness.sim.signals import Signals
from harness.sim.turn import Turn, lane_directory
from harness.sim.world import RankEnded, SimWorld, Watcher, WorldOutcome
from harness.subjects.builtin import BUILTIN, capabilities
from harness.subjects.copies import RankModules
from harness.subjects.load import SubjectError, declared, load_class, system_of
from harness.verdict import Property, RankStatus, RankVerdict

_MAX_GROUPS = 64  # of a rank: a class that makes some in each scenario gets new ranks now and then
_PORT = 29500  # of MASTER_PORT: nobody listens there, as in a real rank


# What differs from rank to rank of a launcher's variables; stored where `os.environ` looks, without the call of the
# system's, at every change of turn, that would have C code see them too.
_RANK_NAMES = (b"RANK", b"LOCAL_RANK", b"ROLE_RANK")
_environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]


class _MutedError(BaseException):
    """Raised in a rank that is never to send its verdict."""


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this process's tasks. ``setup`` is not used: each task names its subject."""
    return _Host(context).answer


@dataclass(frozen=True)
class _Place:
    """What outlasts a scenario as the processes of real ranks do: their groups, and what the class's modules keep."""

    sim: SimWorld
    modules: RankModules
    contexts: list[contextvars.Context]
    """Of each rank, what its import left in context variables: the precision of `decimal`, for example."""


class _Host:
    """What outlasts a task: the classes, their modules, and the files that the parent reads."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        accelerator.prepare(context.device)
        binding.install()  # before what is taken for this process's own states
        self.lane = context.rank if context.world > 1 else None
        self.directory = context.directory if self.lane is None else lane_directory(context.directory, self.lane)
        self.directory.mkdir(exist_ok=True)
        self.signals = Signals()
        self.log = Log()
        self.isolation = Isolation(None, context.rearm)
        self.generators = Generators()
        self._places: dict[tuple[str, int, str, str], _Place] = {}
        self._imported: dict[str, RankModules] = {}  # by subject, what was imported first
        self._trails: dict[tuple[int, int], Trail] = {}
        self._turns: dict[int, Turn] = {}

    def answer(self, message: bytes) -> bytes:
        task = decode_sim_task(message)
        if isinstance(task, CheckSubject):
            check = replace(self._check(task.subject), versions=accelerator.versions(self.context))
            return messages.encode(_reply_of_one(encode(check)))
        if isinstance(task, RunMany):
            self._run_lane(task.lanes[self.context.rank])
            return b""
        world = _World(self, task)
        reply = messages.encode(world.run())
        if world.left_behind:
            raise RankBroken(reply)  # another process takes this one's place
        return reply

    def _run_lane(self, tasks: Sequence[RunScenario]) -> None:
        """Not further than to a scenario after which this process is not to be trusted: the parent sees that itself."""
        for task in tasks:
            began = time.perf_counter()
            world = _World(self, task)
            reply = world.run()
            seconds = time.perf_counter() - began
            self.context.emit(messages.encode(LaneReply(seconds=seconds, reply=reply)))
            if reply.told is not None or world.recycle is not None or world.left_behind:
                break

    def place(self, task: RunScenario) -> _Place:
        """Where scenarios of this subject, world and choices run, one after the other."""
        scenario = task.scenario
        key = task.subject.path, scenario.world, task.order, task.schedule
        if key not in self._places:
            sim = SimWorld(scenario.world, order=SumOrder(task.order), schedule=Schedule(task.schedule))
            contexts = [contextvars.copy_context() for _ in range(scenario.world)]
            self._places[key] = _Place(sim, self._modules(task.subject, contexts[0]), contexts)
        return self._places[key]

    def abandon(self, place: _Place) -> None:
        """What is half done there, and what the class's modules remember of it, is not to meet the next scenario."""
        self._places = {key: other for key, other in self._places.items() if other is not place}

    def _modules(self, subject: SubjectName, context: contextvars.Context) -> RankModules:
        """The subject's modules, imported for the first rank.

        What can be imported only once in a process, since it registers operators with torch for example, is what it was
        the first time, and one copy for all ranks.

        Raises:
            SubjectError: It cannot be imported at all.
        """
        modules = RankModules(
            subject.path,
            lambda: load_class(subject.path, subject.args),
            lambda rank: self.isolation.importing(subject.path, rank),
        )
        try:
            context.run(modules.load, 0)
        except SubjectError:
            if subject.path not in self._imported:
                raise
            return self._imported[subject.path]
        finally:
            modules.use(None)
        self._imported.setdefault(subject.path, modules)
        return modules

    def trail(self, world: int, rank: int) -> Trail:
        """Where the parent reads what became of a rank."""
        if (world, rank) not in self._trails:
            self._trails[world, rank] = Trail(self.directory, world, rank)
        return self._trails[world, rank]

    def turn(self, world: int) -> Turn:
        """Where the parent reads whose turn it is."""
        if world not in self._turns:
            self._turns[world] = Turn(self.directory, world)
        return self._turns[world]

    def _check(self, subject: SubjectName) -> SubjectCheck:
        try:
            modules = self._modules(subject, contextvars.copy_context())
            cls = modules.load(0)
            modules.use(None)
            return SubjectCheck(refused(subject, self.context.device, None), declared(cls), system_of(cls))
        except SubjectError as error:
            return SubjectCheck(str(error))


class _World(Watcher):
    """One scenario."""

    def __init__(self, host: _Host, task: RunScenario) -> None:
        self._host = host
        self._task = task
        self._scenario: Scenario = task.scenario
        self._subject = task.subject
        # A built-in draws nothing, prints nothing, and changes no state of the process.
        self._ours = task.subject.path in BUILTIN
        self._capabilities = capabilities(task.subject.path, task.subject.config)
        world = self._scenario.world
        self._place = host.place(task)
        self._sim, self._modules = self._place.sim, self._place.modules
        self._turn = host.turn(world)
        # Before the class of any rank runs, which may leave the process no descriptors.
        self._trails = [host.trail(world, rank) for rank in range(world)]
        self._classes = []
        for rank, of_rank in enumerate(self._place.contexts):
            self._classes.append(of_rank.run(self._modules.load, rank))
            self._turn.enter(None)  # progress: of many ranks all imports together take their time
        self._logs = [CollectiveLog() for _ in range(world)]
        self._drivers: list[RankDriver | None] = [None] * world
        self._detectors: list[RaceDetector | None] = [None] * world
        self._seeded: set[int] = set()
        self._printed = Printed(host.log, world)
        self._first_failed: int | None = None
        # After the run: why this process should not be used any further, and whether a rank's thread is still there.
        self.recycle: str | None = None
        self.left_behind = False

    def run(self) -> WorldReply:
        """Drive it, and leave the process as it was."""
        world, path = self._scenario.world, self._subject.path
        isolation = self._host.isolation
        isolation.begin(path, self._scenario)
        self._environments = [isolation.environment(rank) for rank in range(world)]
        environment = dict(os.environ)
        os.environ.update(process.rank_environment(0, world, _PORT))
        self._shared = Shared(self._scenario, world, static_memory=self._capabilities.static_memory)
        log = tap.install()
        self._host.signals.world = self._sim
        try:
            self._sim.watcher = self
            with on_one_core(self._host.lane):
                outcome = self._sim.run(self._live, seed=self._scenario.seed)
            self._let_go()
        finally:
            self._host.signals.world = None
            tap.use(log)
            self._host.generators.use(None)
            for name in process.rank_environment(0, world, _PORT):
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    os.environ.pop(name, None)
        left = isolation.end(path, self._scenario)
        self.recycle, self.left_behind = left.recycle, outcome.left_behind
        if outcome.stop is not None or self._first_failed is not None or self._sim.num_groups > _MAX_GROUPS:
            self._host.abandon(self._place)
        reply = self._reply(outcome, left.changed, self.recycle)
        # If a rank closed the connection too, this will not be sent, and that is its doing.
        self._turn.enter(self._printed.closed_by)
        return reply

    def _drop_subject(self, rank: int) -> None:
        """In its turn: what a finaliser does belongs to its rank; collectives in it have to meet the others'."""
        with self._environments[rank].around():
            self._drivers[rank] = None

    def _let_go(self) -> None:
        """Drop the subjects of ranks that were stopped."""
        for rank in range(self._scenario.world):
            if self._drivers[rank] is None:
                continue
            self.enter(rank)
            try:
                self._drop_subject(rank)
            finally:
                self.leave(rank)

    def _live(self, rank: int) -> RankVerdict:
        """In the thread of a rank."""
        return self._place.contexts[rank].run(self._drive, rank)

    def _drive(self, rank: int) -> RankVerdict:
        """Its part of the scenario."""
        environment = self._environments[rank]
        if not self._ours:
            self._host.generators.seed(self._scenario.seed, rank)
            self._seeded.add(rank)
        context = RankContext(
            rank,
            self._scenario.world,
            "gloo",
            self._host.context.device,
            self._host.directory,
            self._logs[rank],
            lambda event: self._emit(rank, event),
        )
        detector = self._detectors[rank] = (
            RaceDetector(functools.partial(self.raced, rank)) if self._task.inspect else None
        )

        @contextmanager
        def watched() -> Iterator[None]:
            with environment.around(), detector or nullcontext():
                yield
            self._sim.raise_foreign(rank)

        around: Around = nullcontext if self._ours and detector is None else watched
        with environment.on_thread(), accelerator.on_thread(context.device):
            driver = driver_of(self._scenario.system)(
                context,
                self._classes[rank],
                self._subject.args,
                self._capabilities,
                self._scenario,
                self._trails[rank],
                exchanges=self._task.exchanges,
                inspect=self._task.inspect,
                around=around,
                shared=self._shared,
                rule=rule(self._task.rule or self._task.order, self._scenario.seed),
                silence=_silence,
                sleep=lambda _seconds: self._sim.step_aside(),
            )
            self._drivers[rank] = driver
            verdict = told_of_its_group(run_driver(driver), destroyed=environment.group_is_gone)
            if verdict.status is not RankStatus.DONE and self._first_failed is None:
                self._first_failed = rank
            del driver
            if not self._shared.watches_memory:  # or what each keeps alive is counted when all have come
                self._drop_subject(rank)
        return _explained(verdict, self._modules.shared)

    def _emit(self, rank: int, event: bytes) -> None:
        if self._sim.was_stopped(rank):
            return  # what it says of its end is not its own
        if self._host.lane is not None:
            return  # it would tell of a difference, and then the scenario is run again by itself
        self._host.context.emit(messages.encode(RankEvent(rank, event)))

    # In the thread of the rank, at changes of turn

    def enter(self, rank: int) -> None:
        self._turn.enter(rank)
        tap.use(self._logs[rank])
        if not self._ours:
            self._modules.use(rank)
            for name in _RANK_NAMES:
                _environment[name] = str(rank).encode()
            if rank in self._seeded:
                self._host.generators.use(rank)
            self._environments[rank].come_back()

    def leave(self, rank: int) -> None:
        if not self._ours:
            self._environments[rank].leave()
            self._printed.turn_ends(rank)

    def stopped(self, rank: int) -> None:
        log = self._logs[rank]
        log.mirror = log.unrecorded = log.intercept = None  # what it calls while it unwinds is not its own

    # What happens to buffers

    def launched(self, rank: int, buffers: Buffers) -> None:
        detector = self._detectors[rank]
        if detector is not None:
            detector.watch(buffers)

    def waited(self, rank: int, buffers: Buffers) -> None:
        detector = self._detectors[rank]
        if detector is not None:
            detector.release(buffers)

    def raced(self, rank: int, text: str) -> None:
        driver = self._drivers[rank]
        if driver is not None:
            driver.record.diverge(Property.TRAFFIC, f"rank {rank} {text}")

    # The reply

    def _reply(self, outcome: WorldOutcome, changed: tuple[str, ...], recycle: str | None) -> WorldReply:
        stop = outcome.stop
        told = None
        if outcome.refusals:
            told = Told(kind="refusal", message=outcome.refusals[0], ranks=())
        elif stop is not None:
            told = Told(
                kind="mismatch" if stop.kind == "mismatch" else "deadlock", message=stop.message, ranks=stop.ranks
            )
        parts = tuple(self._part(rank, ended, outcome, changed, recycle) for rank, ended in enumerate(outcome.ranks))
        first = self._first_failed
        if first is None:
            first = next((rank for rank, part in enumerate(parts) if part.end != "replied"), None)
        return WorldReply(ranks=parts, trace=outcome.trace, first_failed=first, told=told)

    def _part(
        self, rank: int, ended: RankEnded, outcome: WorldOutcome, changed: tuple[str, ...], recycle: str | None
    ) -> RankPart:
        output = self._printed.of(rank)
        if ended.stopped:
            stop = outcome.stop
            waits = stop.waits.get(rank) if stop is not None else None
            return RankPart(
                end="abandoned" if waits is None else "deadlocked",
                error="was stopped before it could go on" if waits is None else f"waits {waits}",
                output=output,
                stacks=None if stop is None else stop.stacks.get(rank),
            )
        if isinstance(ended.error, _MutedError):
            return RankPart(end="muted", output=output)
        if ended.error is not None:
            raise ended.error  # of the harness's own
        verdict: RankVerdict = ended.value
        if rank == 0:
            verdict = replace(verdict, changed=changed, recycle=recycle)
        end = "replied" if verdict.status is RankStatus.DONE else "broken"
        return RankPart(end=end, payload=encode(verdict), output=output)  # type: ignore[arg-type]


def _reply_of_one(payload: bytes) -> WorldReply:
    return WorldReply(ranks=(RankPart(end="replied", payload=payload),), trace="", first_failed=None, told=None)


def _explained(verdict: RankVerdict, shared: str | None) -> RankVerdict:
    """With what only a simulated world adds to what was found.

    A read before the wait that no operation of torch's made (``tolist``, NumPy) shows in the value alone. ``shared``:
    why the ranks have one copy of the class's modules, so that what one keeps there meets the others.
    """
    found = verdict.divergence
    if found is None:
        return verdict
    message = found.message
    if is_poison(found.actual_bits or ""):
        message += "; these are the bits that the output of an asynchronous collective holds until wait()"
    if shared is not None:
        message += f" ({shared}; with --backend gloo each has its own)"
    return replace(verdict, divergence=replace(found, message=message))


def _silence() -> NoReturn:
    raise _MutedError
