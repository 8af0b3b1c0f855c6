"""The rank's side of a test on ranks: imports the file of tests as pytest does, runs the function, tells its end.

Assertions are rewritten here too, by the same hook of pytest, so that a failure shows the values.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from _pytest import assertion
from _pytest._code.code import TerminalRepr
from _pytest._io import TerminalWriter
from _pytest.config import apply_warning_filters, parse_warning_filter
from _pytest.outcomes import XFailed
from _pytest.pathlib import import_path

from harness.errors import exception_text, sendable
from harness.launch.rank import RankBroken, RankContext
from harness.plugin import messages
from harness.plugin.messages import Outcome, Reply, Setup, Task

OTHERS_S = 1.0
"""How long a rank that failed waits for the others to end: if they do, all processes go on."""

_POLL_S = 0.002
_OWN = tuple(f"{Path(__file__).parents[1] / each}{os.sep}" for each in ("launch", "plugin"))
# Not every rank need take part in these.
_NOT_OF_ALL = frozenset({"send", "recv", "send_object_list", "recv_object_list", "destroy_process_group"})


@dataclass(frozen=True)
class Rank:
    """What the body of a test on ranks gets as ``ranks``.

    Attributes:
        rank: of this process in the default group.
        world: size of the default group.
        backend: of the default group.
        device: where its tensors belong: ``"cpu"`` or ``"cuda:N"``.
    """

    rank: int
    world: int
    backend: str
    device: str


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """What :class:`harness.launch.pool.RankPool` calls in each rank."""
    return _Worker(context, messages.setup(setup)).answer


class _Worker:
    def __init__(self, context: RankContext, setup: Setup) -> None:
        self._context = context
        self._setup = setup
        self._group = dist.group.WORLD
        self._pytest: pytest.Config | None = None
        self._comparing: Iterator[object] | None = None
        self._last: Path | None = None

    def answer(self, data: bytes) -> bytes:
        task = messages.task(data)
        if self._last is not None:
            self._last.unlink(missing_ok=True)
        reply = self._run(task)
        self._last = self._marker(task, self._context.rank)
        self._last.touch()
        if reply.outcome == "failed" and not self._others_ended(task):
            # They may wait for this rank; the pool gives them its time of grace, and takes the processes away.
            raise RankBroken(messages.encode(reply))
        return messages.encode(reply)

    def _marker(self, task: Task, rank: int) -> Path:
        return self._context.directory / f"ended-{task.number}-{rank}"

    def _others_ended(self, task: Task) -> bool:
        left = set(range(self._context.world))
        until = time.monotonic() + OTHERS_S
        while time.monotonic() < until:
            left = {rank for rank in left if not self._marker(task, rank).exists()}
            if not left:
                return True
            time.sleep(_POLL_S)
        return False

    def _run(self, task: Task) -> Reply:
        code: list[CodeType] = []
        result = b""
        try:
            result = self._call(task, code)
        except SystemExit:
            raise  # granted, and told
        except BaseException as error:  # noqa: BLE001 (that is what the test came to)
            ended_s = time.monotonic()
            outcome, summary = _outcome(error)
            # A skip or an expected failure is told by its reason alone.
            text, place = self._shown(error, code) if outcome == "failed" else ("", "")
            expected = outcome == "failed" and bool(task.raises) and _expected(task.raises, error)
            return self._reply(outcome, ended_s, summary=summary, text=text, place=place, expected=expected)
        return self._reply("passed", time.monotonic(), result=result)

    def _reply(self, outcome: Outcome, ended_s: float, **fields: Any) -> Reply:  # noqa: ANN401 (those of Reply)
        spoilt = None
        if not dist.is_initialized():
            spoilt = "destroyed the default process group"
        elif dist.group.WORLD is not self._group:
            spoilt = "replaced the default process group"
        every = tuple(range(self._context.world))
        collectives = [
            f"{entry.kind} {entry.how}".strip()
            for entry in self._context.collectives.entries
            if entry.group_ranks == every and entry.kind not in _NOT_OF_ALL
        ]
        return Reply(outcome=outcome, ended_s=ended_s, collectives=collectives, spoilt=spoilt, **fields)

    def _call(self, task: Task, code: list[CodeType]) -> bytes:
        os.chdir(task.directory)
        sys.path[:] = task.path
        self._configure()
        if task.name not in sys.modules:
            pytest.register_assert_rewrite(task.name)
        module = import_path(
            task.module,
            mode=self._setup.import_mode,
            root=Path(self._setup.rootdir),
            consider_namespace_packages=self._setup.namespace_packages,
        )
        if task.where is not None:
            module = importlib.import_module(task.where)
        args, kwargs, attributes = pickle.loads(task.arguments)  # noqa: S301 (from the process that started this one)
        if task.wants_rank:
            context = self._context
            kwargs["ranks"] = Rank(context.rank, context.world, context.backend, context.device)
        function = _resolved(module, task.function, attributes)
        code.append(_code(function))
        with warnings.catch_warnings():
            apply_warning_filters(self._setup.filters, self._setup.option_filters)
            for each in task.filters:
                warnings.filterwarnings(*parse_warning_filter(each, escape=False))
            result = function(*args, **kwargs)
        if task.is_test:
            if hasattr(result, "__await__"):
                raise TypeError("the test returned something to be awaited: a test on ranks cannot be async")
            return b""
        try:
            return pickle.dumps(result)
        except Exception as error:
            raise TypeError(
                f"what {task.function} returned cannot be sent back ({exception_text(error)}): return plain data"
            ) from error

    def _configure(self) -> None:
        """A configuration as pytest has it in the other process: nothing is loaded, and nothing is captured."""
        if self._pytest is None:
            setup = self._setup
            patterns = " ".join(setup.python_files)
            args = [
                "-c",
                os.devnull,
                "--rootdir",
                setup.rootdir,
                "--noconftest",
                "--color=no",
                "-s",
                "-p",
                "no:cacheprovider",
            ]
            args += [f"--assert={setup.assertions}", "-o", f"python_files={patterns}", f"--verbosity={setup.verbosity}"]
            with _alone():
                self._pytest = pytest.Config.fromdictargs({}, args)
            # pytest before 9.1 asks it how to write a comparison.
            reporter = pytest.TerminalReporter(self._pytest, io.StringIO())
            self._pytest.pluginmanager.register(reporter, "terminalreporter")
            # As around each test: so that a comparison of two lists says where they differ.
            item = cast(pytest.Item, SimpleNamespace(ihook=self._pytest.hook, config=self._pytest))
            self._comparing = assertion.pytest_runtest_protocol(item)
            next(self._comparing)

    def _shown(self, error: BaseException, code: list[CodeType]) -> tuple[str, str]:
        """The exception as pytest shows it, from the function on, and where it was raised."""
        info = pytest.ExceptionInfo.from_exception(error)
        if code:
            info.traceback = info.traceback.cut(path=code[0].co_filename, firstlineno=code[0].co_firstlineno - 1)
        last = info.traceback[-1]
        place = f"{last.path}:{last.lineno + 1}"
        if isinstance(error, pytest.fail.Exception) and not error.pytrace:
            return sendable(str(error).partition("\n")[2]), place  # the first line is the summary
        # What of this package called the function is of no interest.
        info.traceback = info.traceback.filter(lambda entry: not str(entry.path).startswith(_OWN))
        style = "long" if self._setup.style == "auto" else self._setup.style
        if style == "no" or not info.traceback:
            return "", place
        try:
            shown = _plain(info.getrepr(style=cast(Any, style), showlocals=self._setup.show_locals))
        except Exception as second:  # noqa: BLE001 (the text of a user's exception may raise)
            shown = f"{exception_text(error)}\n(it cannot be shown: {exception_text(second)})"
        return sendable(shown), place


def _plain(shown: TerminalRepr) -> str:
    """As text; its own str() would take the indentation of the first line away."""
    stream = io.StringIO()
    shown.toterminal(TerminalWriter(stream))
    return stream.getvalue().rstrip()


def _outcome(error: BaseException) -> tuple[Outcome, str]:
    """What an exception means, and in a line what it says."""
    lines = exception_text(error).splitlines() or [type(error).__name__]
    first = sendable(lines[0])
    if isinstance(error, pytest.skip.Exception):
        return "skipped", sendable(str(error))
    if isinstance(error, XFailed):
        return "xfailed", sendable(str(error))
    if isinstance(error, AssertionError | pytest.fail.Exception):
        first = sendable(str(error).split("\n", 1)[0]) or first
    return "failed", first


def _expected(raises: bytes, error: BaseException) -> bool:
    """Whether an exception is what ``xfail(raises=...)`` names: a class, several, or ``pytest.RaisesExc``."""
    try:
        kinds = pickle.loads(raises)  # noqa: S301 (from the process that started this one)
        return isinstance(error, kinds) if isinstance(kinds, type | tuple) else bool(kinds.matches(error))
    except Exception:  # noqa: BLE001 (a class that cannot be had here is not that of the exception)
        return False


def _resolved(module: object, name: str, attributes: dict[str, Any]) -> Callable[..., object]:
    """The function of this qualified name; of a class, the method of a new instance that holds ``attributes``."""
    found = module
    *classes, last = name.split(".")
    for each in classes:
        found = getattr(found, each)
    if isinstance(found, type):
        found = found()
        vars(found).update(attributes)
    return cast(Callable[..., object], getattr(found, last))


def _code(function: object) -> CodeType:
    inner = function
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    inner = getattr(inner, "__func__", inner)
    return cast(CodeType, getattr(inner, "__code__", _resolved.__code__))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without what the environment would have pytest load."""
    names = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS", "PYTEST_ADDOPTS")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
