"""The warm pool of rank processes: sends a task to every rank of a world and reports how each of them ended.

Bytes in, bytes out. For each world size that is used there is one set of ranks whose default process group is exactly
that world. They stay alive from task to task; after any end other than a reply the whole set is replaced.

The parent (this module) imports no torch and joins no group. It only waits on sockets, always with a bound.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from harness.launch import evidence, machine, process, wire
from harness.launch.link import ZygoteGone, ZygoteLink
from harness.launch.outcome import Activity, Outcome, PoolError, RankEnd, RankReport, Watch
from harness.launch.private import PrivateDirectory
from harness.launch.rankset import Member, Phase, RankSet, describe_code, tail
from harness.launch.torchrun import Launch
from harness.launch.watchdog import TICK_S, Stall, Watchdog

__all__ = ["Activity", "Outcome", "PoolError", "RankEnd", "RankPool", "RankReport", "Watch"]

_START_METHODS = ("fork", "exec")
_KILL_TIMEOUT_S = 10.0
# For what a subject, or torch, does at a SIGTERM; whatever it is, it goes on the log.
_LAST_WORDS_S = 0.3
_PAUSE_S = 1.0  # What this process oversleeps beyond that is not counted against the ranks.
_MAX_WAIT_S = 1.0  # between two looks at the load of the machine
_MAX_QUOTED_BYTES = 8192


class RankPool:
    """Processes that answer tasks; a context manager. To be used from one thread.

    Args:
        handler: ``"package.module:function"``, called in every rank; see :mod:`harness.launch.rank`.
        setup: Passed to the handler's function.
        backend: Of the default groups: ``"gloo"``, or ``"nccl"`` with a GPU for each rank. ``"none"``: there are none.
        device: Where the ranks' tensors belong: ``"cpu"``, and then they see no GPU; or ``"cuda"``, and then rank r of
            a machine has its GPU number r, again from the first where there are fewer. By default ``"cuda"`` for nccl.
        start: ``"fork"``: ranks are forks of a process that has torch imported. ``"exec"``: each is a fresh interpreter
            (seconds), which CUDA requires. By default ``"exec"`` on CUDA, else ``"fork"``.
        preload: Modules imported once, before ranks are forked (with ``"exec"``: by each rank).
        join_timeout_s: For the imports, and again for the ranks of a set to join their group and set up the handler. On
            a machine with more to do than it has cores, so many times longer, at most ten.
        grace_s: How long the other ranks may go on once one has failed.
        env: Added to the environment of the ranks.
        launch: Under torchrun: where the other ranks are. The pool then holds the rank of this process alone.

    Attributes:
        backend: As given.
        directory: Private, holds the stores and logs; removed when the pool closes.
        incidents: What happened to ranks between tasks, one line each; they were replaced.

    Raises:
        ValueError: An argument is not one of those listed.
        PoolError: Its directory cannot be written, or its first process not started.
    """

    def __init__(
        self,
        handler: str,
        setup: bytes = b"",
        *,
        backend: str = "gloo",
        device: str | None = None,
        start: str | None = None,
        preload: Sequence[str] = (),
        join_timeout_s: float = 60.0,
        grace_s: float = 2.0,
        env: Mapping[str, str] | None = None,
        launch: Launch | None = None,
    ) -> None:
        device = device or process.default_device(backend)
        start = start or ("exec" if device == "cuda" else "fork")
        if start not in _START_METHODS:
            raise ValueError(f"start={start!r}: expected one of {', '.join(_START_METHODS)}")
        if device not in process.DEVICES:
            raise ValueError(f"device={device!r}: expected one of {', '.join(process.DEVICES)}")
        if backend == "nccl" and device != "cuda":
            raise ValueError(f"backend='nccl' with device={device!r}: NCCL moves CUDA tensors only, use device='cuda'")
        if device == "cuda" and start == "fork":
            raise ValueError("device='cuda' with start='fork': CUDA does not survive a fork, use start='exec'")
        module, _, name = handler.partition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"handler={handler!r}: expected 'package.module:function'")
        self.incidents: list[str] = []
        self.backend = backend
        self._handler, self._setup, self._preload = handler, setup, list(preload)
        self._device = device
        self._execute = start == "exec"
        self._join_timeout_s, self._grace_s = join_timeout_s, grace_s
        self._launch = launch
        self._sets: dict[int, RankSet] = {}  # by world
        self._by_identity: dict[int, RankSet] = {}
        self._num_started = 0
        self._warmed = False
        self._broken: str | None = None
        self._closed = False
        self._owner = os.getpid()
        self._private = PrivateDirectory()
        self.directory = self._private.path
        one_machine = launch is None or launch.num_nodes == 1
        environment = process.pool_environment(env or {}, device, one_machine=one_machine)
        try:
            self._zygote = ZygoteLink(
                self.directory, execute=self._execute, preload=self._preload, environment=environment
            )
        except (OSError, ZygoteGone) as error:
            output = tail(self.directory / "zygote.log", _MAX_QUOTED_BYTES)
            self._private.remove()
            problem = machine.describe_refusal(error) if isinstance(error, OSError) else str(error)
            raise PoolError(_with_output(problem, output)) from error
        except BaseException:
            self._private.remove()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._zygote, selectors.EVENT_READ)
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def warm(self, worlds: Iterable[int]) -> None:
        """Start the ranks of these worlds now, all at once, rather than each at its first task.

        Raises:
            PoolError: They did not start or join.
        """
        with self._failing_with_the_zygote():
            for world in dict.fromkeys(worlds):
                if world not in self._sets:
                    self._start_set(world)
            for ranks in list(self._sets.values()):
                if ranks.phase is Phase.JOINING:
                    self._await_joined(ranks)

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        """Send ``task`` to every rank of ``world`` and wait until each has ended, at most ``timeout_s``.

        The time that this process is stopped does not count. With a ``watch`` the wait ends earlier if no rank gets on.

        Whatever the ranks do is an outcome, not an exception. If any of them does not reply, all processes of this
        world are ended, and the next call starts others.

        Raises:
            PoolError: The pool itself could not work.
        """
        if len(task) > wire.MAX_FRAME_BYTES:
            raise ValueError(f"a task of {len(task)} bytes: expected at most {wire.MAX_FRAME_BYTES}")
        with self._failing_with_the_zygote():
            ranks = self._usable_set(world)
            try:
                return self._supervise(ranks, task, timeout_s, watch)
            except (PoolError, ZygoteGone):
                raise
            except BaseException:
                # Interrupted: the ranks are somewhere in the task. If this is too, the next run() does it.
                self._discard(ranks)
                raise

    def home(self, world: int) -> int:
        """The world by whose number the processes go that run this one: each has its own."""
        return world

    def recycle(self, world: int) -> None:
        """End the ranks of a world, if there are any; the next task there starts fresh ones. Between tasks.

        Raises:
            PoolError: The pool itself could not work.
        """
        with self._failing_with_the_zygote():
            self._pump(0.0)
            ranks = self._sets.get(world)
            if ranks is not None:
                self._note_lost(ranks)
                self._discard(ranks)

    def log_path(self, world: int, rank: int) -> Path:
        """Where a rank's output goes; emptied when it begins a task."""
        return self.directory / f"world{world}-rank{rank}.log"

    def close(self) -> None:
        """End and reap every process and remove the directory. Idempotent, also after a failure."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        # A fork of this process that ends in the ordinary way comes here as well; nothing is its own.
        owned = os.getpid() == self._owner
        for ranks in self._by_identity.values():
            for member in ranks.members:
                member.channel.close()
        self._selector.close()
        if not owned:
            self._zygote.abandon()
            self._private.release()
            return
        try:
            self._zygote.close(serving=self._warmed)
        finally:
            self._private.remove()

    # Starting

    def _usable_set(self, world: int) -> RankSet:
        """The ranks of a world, alive and joined, started if need be."""
        self._pump(0.0)
        ranks = self._sets.get(world)
        if ranks is not None and self._note_lost(ranks):
            self._discard(ranks)
            ranks = None
        elif ranks is not None and ranks.phase not in (Phase.IDLE, Phase.JOINING):
            self._discard(ranks)  # Left over from an interruption.
            ranks = None
        if ranks is None:
            ranks = self._start_set(world)
        if ranks.phase is Phase.JOINING:
            self._await_joined(ranks)
        return ranks

    def _note_lost(self, ranks: RankSet) -> bool:
        """Whether ranks have ended between tasks."""
        if ranks.phase is not Phase.IDLE or not ranks.lost:
            return False
        gone = ", ".join(str(member.rank) for member in ranks.lost)
        self.incidents.append(f"world {ranks.world}: rank {gone} ended after its reply, before the next task")
        return True

    def _start_set(self, world: int) -> RankSet:
        """Have the zygote start the ranks of a world; they have not joined yet."""
        if world < 1:
            raise ValueError(f"world={world}: expected at least 1")
        self._await_warm()
        self._num_started += 1
        ranks = RankSet(self._num_started, world, None if self._launch is None else [self._launch.rank])
        self._sets[world] = self._by_identity[ranks.identity] = ranks
        port = process.free_port()
        for rank in ranks.held:
            log = self.log_path(world, rank)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            member = Member(rank, wire.Channel(ours), log, log.with_suffix(".stacks"))
            ranks.members.append(member)
            self._selector.register(member.channel, selectors.EVENT_READ, (ranks, member))
            with theirs:
                self._zygote.tell(wire.Fork(ranks.identity, rank), theirs)
            member.forked = True
            hello = wire.Hello(
                rank=rank,
                world=world,
                zygote=self._zygote.pid,
                backend=self.backend,
                device=self._device,
                directory=str(self.directory),
                meeting=self._meeting(ranks),
                log=str(member.log),
                stacks=str(member.stacks),
                environment=self._environment(rank, world, port),
                handler=self._handler,
                setup=self._setup,
                preload=self._preload if self._execute else [],
            )
            if not member.channel.send(wire.Kind.HELLO, msgspec.msgpack.encode(hello)):
                self._flush_later(ranks, member)
            self._pump(0.0)  # Or, in a large world, the zygote's reports would fill its connection.
        ranks.phase = Phase.JOINING
        return ranks

    def _environment(self, rank: int, world: int, port: int) -> dict[str, str]:
        launch = self._launch
        return process.rank_environment(rank, world, port) if launch is None else dict(launch.environment)

    def _await_warm(self) -> None:
        """Wait until the zygote has imported what it should."""
        started = time.monotonic()
        while not self._warmed:
            left = self._join_time_left(started)
            if left <= 0:
                self._zygote.ask_for_stacks()
                evidence.wait_for_texts([self._zygote.log])
                modules = ", ".join(["torch", *self._preload])
                self._fail(f"importing {modules} took longer than {self._join_limit()}")
            self._pump(left)

    def _join_time_left(self, started: float) -> float:
        """Until the ranks must have joined as things are now; at most so long that the load is looked at again."""
        limit_s = self._join_timeout_s * machine.patience()
        return min(started + limit_s - time.monotonic(), _MAX_WAIT_S)

    def _join_limit(self) -> str:
        factor = machine.patience()
        load = f" ({factor:.1f} times that, for the load of the machine)" if factor > 1.0 else ""
        return f"join_timeout_s={self._join_timeout_s}{load}"

    def _await_joined(self, ranks: RankSet) -> None:
        """Wait until every rank is ready; if one cannot be, end them all.

        Raises:
            PoolError: With what the rank said.
        """
        started = time.monotonic()
        while not (ranks.joined or ranks.failures) and (left := self._join_time_left(started)) > 0:
            self._pump(left)
        if ranks.joined and not ranks.failures:
            ranks.phase = Phase.IDLE
            return
        raise PoolError(self._end_unjoined(ranks))

    def _end_unjoined(self, ranks: RankSet) -> str:
        """End ranks of which one did not join; returns what that one said, or where it was."""
        if ranks.failures:
            member = ranks.member(ranks.failures[0])
        else:
            late = [member for member in ranks.members if not member.joined]
            evidence.collect_stacks(ranks, partial(self._ask_for_stacks, ranks), late, late)
            member = late[0]
            numbers = ", ".join(str(member.rank) for member in late)
            member.start_error = (
                f"rank {numbers} had not joined after {self._join_limit()}; rank {member.rank} was "
                f"here:\n{(member.where or '')[-_MAX_QUOTED_BYTES:]}"
            )
        self._kill(ranks)
        problem = member.start_error or f"its process ended: {describe_code(member.code)}"
        output = tail(member.log, _MAX_QUOTED_BYTES)
        # The first that failed may have done so because another had met the limits of the machine.
        said = "\n".join(f"{each.start_error}\n{tail(each.log, _MAX_QUOTED_BYTES)}" for each in ranks.members)
        self._forget(ranks)
        problem = f"world {ranks.world}: rank {member.rank} did not start: {problem}"
        if (refusal := machine.refusal_in(said)) is not None:
            problem = f"{refusal}\n{problem}"
        return _with_output(self._with_cause(problem), output)

    # Running

    def _supervise(self, ranks: RankSet, task: bytes, timeout_s: float, watch: Watch | None) -> Outcome:
        started = time.monotonic()
        for member in ranks.begin(task):
            self._flush_later(ranks, member)
        watchdog = None
        if watch is not None:
            watchdog = Watchdog(watch, ranks, partial(self._ask_for_stacks, ranks), started)
        stall = self._wait(ranks, started, started + timeout_s, watchdog)
        keep = ranks.finished and ranks.reusable
        if not keep:
            doing = watchdog.doing if watchdog is not None else lambda _rank: None
            self._end(ranks, self._decide(ranks, stall, doing, look=bool(ranks.unfinished)))
        reports = tuple(member.report() for member in ranks.members)
        first_failed = ranks.failures[0] if ranks.failures else None
        outcome = Outcome(ranks.world, reports, time.monotonic() - started, first_failed)
        ranks.phase = Phase.IDLE
        if not keep:
            self._forget(ranks)
            ended_badly = any(report.end in (RankEnd.EXITED, RankEnd.KILLED, RankEnd.RAISED) for report in reports)
            # A disk that is full makes ranks fail in many ways (a mapped file that cannot grow kills them).
            if ended_badly and (problem := self._private.problem()) is not None:
                raise PoolError(problem)
        return outcome

    def _wait(self, ranks: RankSet, started: float, deadline: float, watchdog: Watchdog | None) -> Stall | None:
        """Until the task has ended on every rank, at most until the deadline or the end of the grace, or a stall."""
        tick = started + TICK_S
        expected = started
        while not ranks.finished:
            now = time.monotonic()
            if now > expected + _PAUSE_S:
                # This process was stopped, or got no processor, and could not hear that a rank had ended.
                deadline += now - expected
            end = (
                deadline
                if ranks.failed_at is None
                else min(deadline, ranks.failed_at + self._grace_s * machine.patience())
            )
            if now >= end:
                break
            if now >= tick:
                ranks.bound_logs()
                tick = now + TICK_S
                # Once a rank has failed the others have their time of grace.
                if watchdog is not None and ranks.failed_at is None and (stall := watchdog.tick(now)) is not None:
                    return stall
            expected = max(now, min(end, tick))
            self._pump(expected - now)
        return None

    def _decide(
        self,
        ranks: RankSet,
        stall: Stall | None,
        known: Callable[[int], Activity | None],
        *,
        look: bool,
        first: int | None = None,
    ) -> list[Member]:
        """A task has failed: decide what is said of every rank.

        Args:
            ranks: The set.
            stall: If the task has stalled.
            known: What a rank did in the time before, as far as it was looked at.
            look: Take down what the ranks do and where they are: there are some that have not ended.
            first: The rank that failed first, if that is one that others hold.

        Returns:
            Those that can be spoken to, if there was a look.
        """
        running: list[Member] = []
        if look:
            running = evidence.look(ranks, stall, known)
            living = [member for member in ranks.members if member.code is None]
            evidence.collect_stacks(ranks, partial(self._ask_for_stacks, ranks), living, running)
        told = None
        if stall is not None:
            told = {member.rank: stall.describe(member.rank, member.activity) for member in ranks.unfinished}
        ranks.give_up(told, first)
        return running

    def _end(self, ranks: RankSet, running: Sequence[Member]) -> None:
        """End every rank of a task that failed, with a moment for the last words of those that can be spoken to."""
        if running:
            self._zygote.tell(wire.Terminate(ranks.identity))
            deadline = time.monotonic() + _LAST_WORDS_S
            while any(member.code is None for member in running) and time.monotonic() < deadline:
                self._pump(deadline - time.monotonic())
        self._kill(ranks)

    def _ask_for_stacks(self, ranks: RankSet) -> None:
        self._zygote.tell(wire.Dump(ranks.identity))

    def _flush_later(self, ranks: RankSet, member: Member) -> None:
        """Have the selector say when a socket that did not take a whole message is writable again."""
        self._selector.modify(member.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, (ranks, member))

    def _pump(self, timeout_s: float) -> None:
        """Wait for something to happen, and take in all of it."""
        arrived: dict[RankSet, list[Member]] = {}
        reports = False
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                reports = True
                continue
            ranks, member = key.data
            if events & selectors.EVENT_WRITE and member.channel.flush():
                self._selector.modify(member.channel, selectors.EVENT_READ, key.data)
            if events & selectors.EVENT_READ:
                arrived.setdefault(ranks, []).append(member)
        for ranks, members in arrived.items():
            ranks.receive(members)
            for member in members:
                if member.channel.ended:
                    self._ignore(member)
        while reports and (report := self._zygote.hear()) is not None:
            self._note(report)

    def _ignore(self, member: Member) -> None:
        """Take a connection out of the selector, which would report its end for ever. Idempotent."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.channel)

    # The zygote

    def _note(self, report: wire.Control) -> None:
        match report:
            case wire.Warmed():
                self._warmed = True
            case wire.Unusable(reason):
                self._fail(f"its zygote process cannot work: {reason}")
            case wire.Forked() | wire.Ended() if report.group in self._by_identity:
                ranks = self._by_identity[report.group]
                member = ranks.member(report.rank)
                if isinstance(report, wire.Forked):
                    member.pid = report.pid
                else:
                    ranks.ended(member, report.code)

    def _kill(self, ranks: RankSet) -> None:
        """End every rank of a set and wait until the zygote has reaped them all."""
        ranks.phase = Phase.ENDING
        self._zygote.tell(wire.Kill(ranks.identity))
        started = time.monotonic()
        while any(member.forked and member.code is None for member in ranks.members):
            left = started + _KILL_TIMEOUT_S * machine.patience() - time.monotonic()
            if left <= 0:
                self._fail(f"world {ranks.world}: killed ranks have not ended after {_KILL_TIMEOUT_S} s")
            self._pump(min(left, _MAX_WAIT_S))

    def _discard(self, ranks: RankSet) -> None:
        self._kill(ranks)
        self._forget(ranks)

    def _forget(self, ranks: RankSet) -> None:
        """Drop a set whose processes have all been reaped."""
        for member in ranks.members:
            self._ignore(member)
            member.channel.close()
        self._file(ranks).unlink(missing_ok=True)
        self._by_identity.pop(ranks.identity, None)
        if self._sets.get(ranks.world) is ranks:
            del self._sets[ranks.world]

    def _meeting(self, ranks: RankSet) -> wire.FileMeeting | wire.StoreMeeting:
        """Where the ranks of a set meet."""
        if self._launch is None:
            return wire.FileMeeting(str(self._file(ranks)))
        prefix = f"{self._launch.prefix}/group{ranks.identity}"
        return wire.StoreMeeting(self._launch.host, self._launch.port, prefix)

    def _file(self, ranks: RankSet) -> Path:
        return self.directory / f"store{ranks.identity}"

    @contextlib.contextmanager
    def _failing_with_the_zygote(self) -> Iterator[None]:
        if self._broken is not None:
            raise PoolError(f"this pool has failed before: {self._broken}")
        if self._closed:
            raise PoolError("this pool is closed")
        try:
            yield
        except ZygoteGone as error:
            # What it said before it went is the better reason.
            with contextlib.suppress(ZygoteGone):
                while (report := self._zygote.hear()) is not None:
                    self._note(report)
            self._fail(str(error))
        except OSError as error:
            raise PoolError(self._with_cause(machine.describe_refusal(error))) from error

    def _fail(self, problem: str) -> NoReturn:
        """The pool is beyond use: end what is left of it and say why.

        Raises:
            PoolError: Always.
        """
        self._broken = problem
        # The kernel kills the ranks of a dead zygote, but not what these had started.
        for ranks in self._by_identity.values():
            for member in ranks.members:
                if member.pid is not None and member.code is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(member.pid, signal.SIGKILL)
        output = tail(self._zygote.log, _MAX_QUOTED_BYTES)
        problem = self._with_cause(problem)
        self.close()
        raise PoolError(_with_output(problem, output))

    def _with_cause(self, problem: str) -> str:
        """After a line on the directory, if that cannot be written: few who meet it say so themselves."""
        cause = self._private.problem()
        return problem if cause is None else f"{cause}\n{problem}"


def _with_output(problem: str, output: str) -> str:
    return f"{problem}\nIts output:\n{output}" if output else problem
