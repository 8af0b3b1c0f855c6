"""Let the faults of one rank strike, while it drives its scenario.

What is recorded is what was really called: a fault strikes before its collective is noted. The hit is noted before it
strikes, since it may be the last thing this rank does.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from harness.drive.record import Record
from harness.faults.language import (
    Corrupt,
    Delay,
    Duplicate,
    Exit,
    Fault,
    Hang,
    Kill,
    Mute,
    Raise,
    Skip,
    Slow,
    Stop,
)
from harness.launch.tap import PendingCollective
from harness.verdict import Stage

SLICE_ELEMENTS = 16
"""How many elements ``corrupt`` of a ``slice`` changes at most."""

# These print the stacks of the process before they end it (faulthandler), which is worth having.
_TOLD_BY_FAULTHANDLER = frozenset({signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})


class InjectedFault(Exception):  # noqa: N818  (what a scenario asked for, not an error of the program)
    """Raised by the fault ``raise`` inside the subject's call."""


class Injector:
    """The faults of one rank.

    Args:
        faults: of the scenario, of all ranks.
        rank: this one.
        record: knows the step and the stage, and takes note of hits.
        sleep: what a rank does that is to be late (seconds); by default it sleeps.
    """

    def __init__(
        self, faults: Sequence[Fault], rank: int, record: Record, sleep: Callable[[float], None] | None = None
    ) -> None:
        self._faults = [(index, fault) for index, fault in enumerate(faults) if fault.rank == rank]
        self._record = record
        self._sleep = sleep or time.sleep
        self._struck: set[int] = set()
        self._place: tuple[int | None, Stage] | None = None
        self._next_collective = 0  # of this place
        self._alive: list[object] = []  # handed to collectives that may still be under way

    def subject_called(self) -> None:
        """The subject is being called: what waits for its first call in this stage strikes."""
        for index, fault in self._due(None):
            self._hit(index)
            self._strike(fault)

    def intercept(self, pending: PendingCollective) -> Any:  # noqa: ANN401  (what the collective returns)
        """Stand in for one call of a collective; see :attr:`harness.launch.tap.CollectiveLog.intercept`."""
        place = self._record.step, self._record.stage
        if place != self._place:
            self._place, self._next_collective = place, 0
        number = self._next_collective
        self._next_collective += 1
        times = 1
        for index, fault in self._due(number):
            if isinstance(fault, Corrupt):
                wrong = _corrupted(pending, fault.what)
                if wrong is None:
                    continue  # this rank contributes nothing that could be wrong
                pending.bound.arguments[pending.contribution or ""] = wrong
                self._alive.append(wrong)
            self._hit(index)
            match fault:
                case Skip():
                    times = 0
                case Duplicate():
                    times *= 2
                case _:
                    self._strike(fault)
        if times == 0:
            return _stand_in(pending)
        for _ in range(times - 1):
            self._alive.append(pending.call())
        return pending.call()

    def mutes(self) -> bool:
        """Whether this rank is not to send its verdict; noted as a hit."""
        found = [index for index, fault in self._faults if isinstance(fault, Mute)]
        for index in found:
            self._hit(index)
        return bool(found)

    def _due(self, collective: int | None) -> Iterator[tuple[int, Fault]]:
        """The faults that strike before the collective of this number, or (None) at a call of the subject."""
        for index, fault in self._faults:
            if isinstance(fault, Mute) or index in self._struck:
                continue
            if (fault.step, fault.stage) != (self._record.step, self._record.stage):
                continue
            if isinstance(fault, Slow):
                if collective is not None:
                    yield index, fault
            elif fault.collective == collective:
                self._struck.add(index)
                yield index, fault

    def _hit(self, index: int) -> None:
        self._record.hit(index)

    def _strike(self, fault: Fault) -> None:
        """All that does not change the collective itself."""
        match fault:
            case Kill():
                _end_by_signal(fault.signal)
            case Exit():
                os._exit(fault.code)
            case Raise():
                raise InjectedFault("a fault of the scenario")
            case Stop():
                signal.raise_signal(signal.SIGSTOP)
            case Hang():
                _HANGS[fault.how]()
            case Slow() | Delay():
                self._sleep(fault.milliseconds / 1000)


def stay_silent() -> NoReturn:
    """Wait for the end of the process, which is for others to bring about."""
    while True:
        time.sleep(3600)


def _end_by_signal(number: int) -> None:
    if number not in _TOLD_BY_FAULTHANDLER:
        # Handled or ignored in every Python process: SIGINT, SIGPIPE, SIGXFSZ. Not by signal.signal(), which only the
        # main thread may call.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(number, None)
    signal.raise_signal(number)  # at this very thread, which so goes no further


def _loop_in_python() -> NoReturn:
    while True:
        pass


def _loop_in_c() -> None:
    """One call that never returns and never lets another thread run."""
    collections.deque(itertools.repeat(None), maxlen=0)


_HANGS: dict[str, Callable[[], None]] = {"sleep": stay_silent, "python": _loop_in_python, "native": _loop_in_c}


# --- a collective that is not called ----------------------------------------------------------------------------------


class _FinishedWork:
    """Stands for the handle of a collective that is not under way."""

    def wait(self, *_: object, **__: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


def _stand_in(pending: PendingCollective) -> Any:  # noqa: ANN401  (what the collective returns)
    if pending.kind == "new_group":
        return dist.GroupMember.NON_GROUP_MEMBER
    if pending.name in ("isend", "irecv") or pending.bound.arguments.get("async_op"):
        return _FinishedWork()
    return None


# --- a wrong contribution ---------------------------------------------------------------------------------------------


def _corrupted(pending: PendingCollective, what: Literal["bit", "slice", "nan"]) -> Tensor | list[Tensor] | None:
    """What this rank contributes, made wrong: in place where the collective writes it too, else in a copy.

    None where there is nothing to make wrong: no element, none of this rank, or nan in whole numbers.
    """
    given = pending.bound.arguments.get(pending.contribution or "")
    whole = given if isinstance(given, list | tuple) else [given]
    tensors = [tensor for tensor in whole if isinstance(tensor, Tensor)]
    first = next((index for index, tensor in enumerate(tensors) if tensor.numel()), None)
    if first is None or len(tensors) < len(whole) or not _contributes(pending):
        return None
    if what == "nan" and not tensors[first].is_floating_point():
        return None
    if _writes(pending):
        _make_wrong(tensors[first], what)
        return given
    tensors[first] = tensors[first].detach().clone(memory_format=torch.contiguous_format)
    _make_wrong(tensors[first], what)
    return tensors if isinstance(given, list | tuple) else tensors[first]


def _make_wrong(tensor: Tensor, what: Literal["bit", "slice", "nan"]) -> None:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().as_strided((1,), (1,))
    if what == "nan":
        flat[:1] = float("nan")
        return
    length = 1 if what == "bit" else SLICE_ELEMENTS
    bits = flat[:length].view(_WHOLE[tensor.element_size()])
    # Of floating-point numbers the bit below the sign: the highest of the exponent.
    bits.bitwise_xor_(1 << (8 * bits.element_size() - 2))


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _root(pending: PendingCollective, name: str) -> int | None:
    """The global rank that a ``src`` or ``dst`` names."""
    arguments = pending.bound.arguments
    inside = arguments.get(f"group_{name}")
    root = arguments.get(name) if inside is None else pending.group_ranks[inside]
    return 0 if root is None else root


def _contributes(pending: PendingCollective) -> bool:
    """Whether this rank's tensor is sent at all."""
    if pending.kind == "broadcast":
        return _root(pending, "src") == dist.get_rank()
    return pending.kind not in ("recv", "scatter")


def _writes(pending: PendingCollective) -> bool:
    """Whether the collective puts its result into the tensor that was contributed."""
    if pending.kind == "reduce":
        return _root(pending, "dst") == dist.get_rank()
    return pending.kind == "all_reduce"
