"""What the test process and the ranks of a test say to each other. No torch.

Arguments and results are pickled: both ends are this session's own processes, and nothing is kept.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

Outcome = Literal["passed", "failed", "skipped", "xfailed"]


class Setup(Struct, frozen=True, kw_only=True):
    """How pytest imports and shows things in this session, for the ranks to do the same.

    Attributes:
        filters: of warnings, those of the ini file; ``option_filters``: those of ``-W``.
    """

    rootdir: str
    import_mode: str
    namespace_packages: bool
    assertions: str
    python_files: list[str]
    verbosity: int
    style: str
    show_locals: bool
    filters: list[str]
    option_filters: list[str]


class Task(Struct, frozen=True, kw_only=True):
    """A function for every rank of a world.

    Attributes:
        module: the file of tests, imported as pytest does; ``name``: of the module that it is.
        where: the module that has the function, if it is not in that file.
        function: its qualified name.
        arguments: pickled: positional ones, keyword ones, and what the instance of a class holds.
        is_test: it is the body of a test; its result is not wanted.
        wants_rank: it takes a :class:`harness.plugin.rank.Rank` as ``ranks``.
        filters: of warnings, of the test's markers, in the order in which they are set.
        raises: pickled: what ``xfail(raises=...)`` of the test names; empty: nothing.
        number: of this task in this session.
    """

    module: str
    name: str
    where: str | None
    function: str
    arguments: bytes
    is_test: bool
    wants_rank: bool
    filters: list[str]
    raises: bytes
    number: int
    directory: str
    path: list[str]


class Reply(Struct, frozen=True, kw_only=True):
    """What came of it on one rank.

    Attributes:
        summary: the exception in a line, or the reason of a skip.
        text: the exception as pytest shows it.
        place: file and line of it.
        ended_s: when, on the clock that all processes of a machine share.
        collectives: what the whole world had to take part in, in order.
        expected: the exception is one of ``Task.raises``.
        spoilt: why this process cannot run another test; None: it can.
        result: pickled, of a function that is no test.
    """

    outcome: Outcome
    summary: str = ""
    text: str = ""
    place: str = ""
    ended_s: float = 0.0
    collectives: list[str] = []
    expected: bool = False
    spoilt: str | None = None
    result: bytes = b""


def encode(message: Struct) -> bytes:
    """As bytes, for the other side."""
    return msgspec.msgpack.encode(message)


def reply(data: bytes) -> Reply:
    """What a rank sent."""
    return msgspec.msgpack.decode(data, type=Reply)


def task(data: bytes) -> Task:
    """What a rank was sent."""
    return msgspec.msgpack.decode(data, type=Task)


def setup(data: bytes) -> Setup:
    """What a rank was set up with."""
    return msgspec.msgpack.decode(data, type=Setup)
