"""Functions of tests on every rank: the test process's side. Sends them, and says what came of it as pytest has it."""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import xfailed_key

from harness.errors import UsageError, exception_text
from harness.launch import machine
from harness.launch.pool import Outcome, PoolError, RankEnd, RankPool, RankReport
from harness.plugin import messages, pools, settings
from harness.plugin.messages import Reply, Task

CURRENT = pytest.StashKey[pytest.Item]()
"""The test that runs."""

_DIED = (RankEnd.EXITED, RankEnd.KILLED, RankEnd.SPOILT, RankEnd.RAISED)
_OWN = (*(f'File "{Path(__file__).parents[1] / each}{os.sep}' for each in ("launch", "plugin")), 'File "<string>"')
_numbers = itertools.count()


class RanksFailed(AssertionError):  # noqa: N818 (what a test came to, not an error of the program)
    """A function failed on a rank, or on several; the text says on which, the first that failed first.

    Attributes:
        expected: each that raised anything raised what ``xfail(raises=...)`` of the test names.
    """

    def __init__(self, text: str, *, expected: bool = False) -> None:
        super().__init__(text)
        self.expected = expected


class Ranks:
    """What a test that has no marker gets as ``ranks``: runs a function on every rank of a world."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def __call__(
        self,
        function: Callable[..., Any],
        /,
        *args: object,
        world: int = settings.DEFAULT_WORLD,
        backend: str | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; returns what each returned, in order of rank.

        The function is one of a module, arguments and results are pickled. The default process group is there.

        Args:
            world: number of ranks.
            backend: of the group; None: as ``--ranks-backend`` has it, else gloo.
            timeout: in seconds; None: as ``--ranks-timeout`` has it.

        Raises:
            RanksFailed: it raised on a rank, or a rank crashed, ended or hung.
            ValueError: ``world``, ``backend`` or ``timeout`` is none.
            TypeError: the function or an argument cannot be sent.
        """
        __tracebackhide__ = True
        item = self._config.stash[CURRENT]
        asked = settings.checked(world, backend, timeout)
        if asked.several:
            raise ValueError(f"ranks(world={world!r}): a call runs on one world; call it for each")
        where, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        if where is None or "<" in name or not name:
            raise TypeError(f"ranks(): expected a function of a module, which ranks can import, got {function!r}")
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"ranks(): {name} is async, expected an ordinary function")
        payload = _pickled({f"argument {number}": value for number, value in enumerate(args)}, {}, {})
        replies = _run(item, asked, asked.worlds[0], where, name, payload, is_test=False, wants_rank=False)
        return [pickle.loads(reply.result) for reply in replies]  # noqa: S301 (from this session's own processes)


def run_test(item: pytest.Function) -> None:
    """Run the body of a marked test on its ranks, and end as it does: passed, failed, skipped or xfailed."""
    asked = settings.asked(item.iter_markers(settings.MARKER))
    chosen: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    world: int = chosen.get(settings.WORLD, asked.worlds[0])
    names = [name for name in item._fixtureinfo.argnames if name != "ranks"]
    if not isinstance(item.parent, pytest.Class | pytest.Module):
        pytest.fail(f"a test of {type(item.parent).__name__} cannot run on ranks", pytrace=False)
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    name = ".".join([*classes, item.originalname])
    attributes = dict(vars(item.instance)) if classes else {}
    expected = None if item.config.getoption("runxfail") else item.stash.get(xfailed_key, None)
    problem: str | None = None
    as_expected = False
    replies: list[Reply] = []
    try:
        payload = _pickled({}, {name: item.funcargs[name] for name in names}, attributes)
        wants_rank = "ranks" in item._fixtureinfo.argnames
        raises = b"" if expected is None or expected.raises is None else _raises(expected.raises)
        replies = _run(item, asked, world, None, name, payload, is_test=True, wants_rank=wants_rank, raises=raises)
    except (RanksFailed, TypeError) as error:
        problem = str(error)
        as_expected = isinstance(error, RanksFailed) and error.expected
    if expected is not None and as_expected:
        pytest.xfail(expected.reason)  # pytest sees no exception of the kind that the marker names
    if problem is not None:
        pytest.fail(problem, pytrace=False)  # here: the text is all there is to say
    if all(reply.outcome == "skipped" for reply in replies):
        pools.skip(replies[0].summary)
    if all(reply.outcome == "xfailed" for reply in replies):
        pytest.xfail(replies[0].summary)


def _filters(item: pytest.Item) -> list[str]:
    """In the order in which pytest sets them."""
    if not item.config.pluginmanager.has_plugin("warnings"):
        return []
    return [str(each) for marker in item.iter_markers("filterwarnings") for each in marker.args]


def _raises(kinds: object) -> bytes:
    """What ``xfail(raises=...)`` names, for the ranks; what cannot be sent is met by nothing."""
    try:
        return pickle.dumps(kinds)
    except Exception:  # noqa: BLE001 (whatever its __reduce__ raises)
        return b""


def _pickled(positional: dict[str, object], keywords: dict[str, object], attributes: dict[str, object]) -> bytes:
    """Raises TypeError: one of them stays in the test process."""
    for name, value in [*positional.items(), *keywords.items(), *attributes.items()]:
        ours = type(value).__module__.split(".")[0] == "_pytest"
        try:
            if not ours:
                pickle.dumps(value)
                continue
            problem = "it works on the test process alone"
        except Exception as error:  # noqa: BLE001 (whatever its __reduce__ raises)
            problem = exception_text(error)
        raise TypeError(
            f"{name!r} ({type(value).__name__}) cannot be sent to the ranks: {problem}; the body of a test on ranks "
            "takes plain data, and makes everything else itself"
        )
    return pickle.dumps((list(positional.values()), keywords, attributes))


def _run(
    item: pytest.Item,
    asked: settings.Asked,
    world: int,
    where: str | None,
    function: str,
    arguments: bytes,
    *,
    is_test: bool,
    wants_rank: bool,
    raises: bytes = b"",
) -> list[Reply]:
    """Raises RanksFailed."""
    __tracebackhide__ = True
    config = item.config
    backend = asked.backend or settings.backend(config) or settings.DEFAULT_BACKEND
    limit_s = asked.timeout_s or settings.timeout_s(config) or settings.DEFAULT_TIMEOUT_S * machine.patience()
    item.user_properties += [("world", world), ("backend", backend)]
    module = inspect.getmodule(getattr(item, "obj", None)) if not isinstance(item, pytest.Function) else item.module
    task = Task(
        module=str(item.path),
        name=module.__name__ if module is not None else item.path.stem,
        where=where if module is None or where != module.__name__ else None,
        function=function,
        arguments=arguments,
        is_test=is_test,
        wants_rank=wants_rank,
        filters=_filters(item),
        raises=raises,
        number=next(_numbers),
        directory=os.fspath(Path.cwd()),
        path=[os.path.abspath(entry) for entry in sys.path],  # noqa: PTH100 (no link is to be resolved)
    )
    try:
        pool = pools.of(config).bodies(backend, world)
        outcome = pool.run(world, messages.encode(task), timeout_s=limit_s)
    except UsageError as error:
        raise RanksFailed(f"world {world} on {backend}: {error}") from None
    except PoolError as error:
        pools.of(config).drop(backend)
        raise RanksFailed(f"world {world} on {backend}: {error}") from None
    return _judged(item, pool, outcome, limit_s)


def _judged(item: pytest.Item, pool: RankPool, outcome: Outcome, limit_s: float) -> list[Reply]:
    """What all ranks replied; raises RanksFailed if that is no common end."""
    __tracebackhide__ = True
    for report in outcome.ranks:
        if report.output:
            item.add_report_section("call", f"rank {report.rank}", report.output)
    replies = [None if report.reply is None else messages.reply(report.reply) for report in outcome.ranks]
    known = [reply for reply in replies if reply is not None]
    failed = [rank for rank, reply in enumerate(replies) if reply is None or reply.outcome == "failed"]
    unequal = None if failed else _unequal(known)
    spoilt = next((f"rank {rank} {each.spoilt}" for rank, each in enumerate(known) if each.spoilt), None)
    if (outcome.replied and _unequal(known) is not None) or spoilt is not None:
        pool.recycle(outcome.world)
    if failed:
        expected = [reply.expected for rank in failed if (reply := replies[rank]) is not None]
        waited = all(outcome.ranks[rank].end is RankEnd.ABANDONED for rank in failed if replies[rank] is None)
        raise RanksFailed(
            _told(outcome, replies, failed, limit_s), expected=waited and bool(expected) and all(expected)
        )
    if unequal is not None:
        raise RanksFailed(unequal)
    ends = {reply.outcome for reply in known}
    if len(ends) > 1:
        lines = [f"rank {rank} {reply.outcome}: {reply.summary}".rstrip(": ") for rank, reply in enumerate(known)]
        raise RanksFailed("\n".join(["the ranks of a test must end alike", *lines]))
    return known


def _unequal(replies: Sequence[Reply]) -> str | None:
    """What is to be said where not all took part in the same collectives."""
    first = replies[0].collectives
    for rank, reply in enumerate(replies):
        if reply.collectives == first:
            continue
        place = next(
            (n for n, (one, two) in enumerate(zip(first, reply.collectives, strict=False)) if one != two),
            min(len(first), len(reply.collectives)),
        )
        theirs = [each[place] if place < len(each) else "none" for each in (first, reply.collectives)]
        return (
            f"the ranks called unequal collectives: number {place} is {theirs[0]} on rank 0 and {theirs[1]} on rank "
            f"{rank} ({len(first)} and {len(reply.collectives)} in all); every rank has to call each of them"
        )
    return None


def _told(outcome: Outcome, replies: Sequence[Reply | None], failed: Sequence[int], limit_s: float) -> str:
    """Every rank that failed, the first of them first."""
    first = _first(outcome, replies, failed)
    rank = f"rank {first} of {outcome.world}"
    cause = replies[first]
    if cause is not None:
        lines = [f"{rank}: {cause.summary}", cause.text]
    else:
        lines = [f"{rank}: {_ended(outcome.ranks[first], limit_s)}", *_stacks(outcome.ranks[first])]
    for other in failed:
        reply, report = replies[other], outcome.ranks[other]
        if other == first:
            continue
        if reply is None:
            lines += [f"rank {other}: {_ended(report, limit_s)}", *_stacks(report)]
        elif cause is not None and reply.place == cause.place:
            same = reply.summary == cause.summary
            lines.append(f"rank {other}: the same" if same else f"rank {other}, at the same place: {reply.summary}")
        elif cause is None:  # what the end of that process had done to the others
            lines.append(f"rank {other}: {reply.summary} ({reply.place})")
        else:
            lines += [f"rank {other}: {reply.summary}", reply.text]
    for other, reply in enumerate(replies):
        if reply is not None and reply.outcome != "failed":
            lines.append(f"rank {other}: {reply.outcome}{f': {reply.summary}' if reply.summary else ''}")
    return "\n".join(line for line in lines if line)


def _first(outcome: Outcome, replies: Sequence[Reply | None], failed: Sequence[int]) -> int:
    told = outcome.first_failed
    if told is not None and outcome.ranks[told].end in _DIED:
        return told
    said = [(reply.ended_s, rank) for rank in failed if (reply := replies[rank]) is not None]
    if said:
        return min(said)[1]
    return failed[0] if told is None else told


def _ended(report: RankReport, limit_s: float) -> str:
    match report.end:
        case RankEnd.TIMED_OUT:
            return f"had not ended after {limit_s:g} s (--ranks-timeout, or timeout= of the marker)"
        case RankEnd.ABANDONED:
            return "was still running when another rank had failed, and was ended"
        case _:
            return f"its process ended in the middle of the test: {report.error or report.end.value}"


def _stacks(report: RankReport) -> list[str]:
    """Where a rank was, without what of this package called the function."""
    if report.stacks is None:
        return []
    lines = [line for line in report.stacks.splitlines() if not any(each in line for each in _OWN)]
    return ["  it was here:", *(f"  {line}" for line in lines)]
