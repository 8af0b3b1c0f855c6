"""A class that trains right on all ranks but one, which dies, hangs or calls other collectives than the rest.

:data:`WAYS` are what ``how`` may be. What is done once is done at the second collective of its stage, so that ranks
have been in step before.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.faults.museum.plain import PlainZero


def _raise() -> None:
    raise ValueError("planted")


def _loop() -> None:
    while True:
        pass


def _loop_in_c() -> None:
    """Without end, and without once giving up the interpreter's lock."""
    deque(itertools.repeat(None), maxlen=0)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(1e6)


def _close_descriptors() -> None:
    """The streams are left; among the others is the connection to whoever drives this class."""
    os.closerange(3, 2**16)


def _hang_up() -> None:
    """Close the connection to whoever drives this class, and live on; those to the other ranks are TCP."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (numbers, not paths)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family is socket.AF_UNIX:
                os.close(number)
    _sleep()


def _exit_with(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


# Done before a collective.
ACTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "exit-0": _exit_with(0),
    "exit-3": _exit_with(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "stop": _stop,
    "loop": _loop,
    "loop-in-c": _loop_in_c,
    "close-descriptors": _close_descriptors,
    "hang-up": _hang_up,
}

# Done when the object goes, after its last call.
LATE_ACTS: dict[str, Callable[[], object]] = {
    "late-sleep": _sleep,
    "late-loop": _loop,
    "late-loop-in-c": _loop_in_c,
    "late-stop": _stop,
    "late-exit-0": _exit_with(0),
    "late-exit-3": _exit_with(3),
    "late-kill": ACTS["kill"],
    "late-close-descriptors": _close_descriptors,
    "late-hang-up": _hang_up,
}

# Left running when the last call returns, in the rank that then should send its verdict.
TRAPS = ("trap-in-timer", "trap-in-thread")

REDUCE, NORM, GATHER = "reduce-scatter", "all-reduce", "all-gather"
MISMATCHES = (
    *(f"{what}-{kind}" for kind in (REDUCE, NORM, GATHER) for what in ("never-call", "call-alone", "skip-first")),
    *(f"{what}-{kind}" for kind in (REDUCE, GATHER) for what in ("skip-middle", "skip-last", "swap-equal", "reverse")),
    *(f"wrong-{what}-{kind}" for kind in (REDUCE, NORM, GATHER) for what in ("kind", "dtype", "length")),
    "wrong-reduction-reduce-scatter",
    "wrong-bits-all-gather",
    *(f"call-alone-{kind}" for kind in ("barrier", "broadcast", "recv", "new-group")),
)

WAYS = (*ACTS, *LATE_ACTS, *TRAPS, *MISMATCHES)


class Failing(PlainZero):
    """``how``: one of :data:`WAYS`, on rank ``at`` alone; other ranks, and a rank -1, are right."""

    def __init__(
        self,
        params: list[nn.Parameter],
        rank: int,
        world: int,
        bucket: int = 2**25,
        how: str = "raise",
        at: int = -1,
    ) -> None:
        if how not in WAYS:
            raise ValueError(f"how={how!r}: expected one of {', '.join(WAYS)}")
        self._how = how if rank == at else ""
        self._called: Counter[str] = Counter()
        super().__init__(params, rank, world, bucket)

    def __del__(self) -> None:
        LATE_ACTS.get(self._how, lambda: None)()

    def _reduce_order(self) -> Sequence[int]:
        return self._order(REDUCE)

    def _gather_order(self) -> Sequence[int]:
        return self._order(GATHER)

    def _order(self, kind: str) -> Sequence[int]:
        order = list(range(len(self._cuts)))
        if self._how == f"swap-equal-{kind}":
            order[:2] = reversed(order[:2])
        elif self._how == f"reverse-{kind}":
            order.reverse()
        return order

    def reduce_scatter(self) -> None:
        super().reduce_scatter()
        if self._how == "call-alone-reduce-scatter":
            PlainZero._reduce(self, self._staging(self._cuts[-1][2], 0))
        elif self._how.startswith("call-alone-"):
            self._call_alone()

    def _call_alone(self) -> None:
        match self._how.removeprefix("call-alone-"):
            case "barrier":
                dist.barrier()
            case "broadcast":
                dist.broadcast(torch.zeros(1), src=self.rank)
            case "recv":
                dist.recv(torch.zeros(1), src=(self.rank + 1) % self.world)
            case "new-group":
                dist.new_group(list(range(self.world)))

    def grad_sq_norm(self) -> Tensor:
        norm = super().grad_sq_norm()
        if self._how == "call-alone-all-reduce" and self._called[NORM] == 2:
            dist.all_reduce(torch.zeros_like(norm))
        return norm

    def gather_params(self) -> None:
        super().gather_params()
        if self._how == "call-alone-all-gather":
            PlainZero._gather(self, self._round(self.master.detach()[self._shard(len(self._cuts) - 1)]))
        elif self._how == "trap-in-timer":
            signal.signal(signal.SIGALRM, lambda *_: _sleep())
            signal.setitimer(signal.ITIMER_REAL, 1e-6)
        elif self._how == "trap-in-thread":
            threading.Thread(target=_loop_in_c, daemon=True).start()

    def _reduce(self, flat: Tensor) -> Tensor:
        own = flat[self._piece(len(flat))].clone()
        if self._acts_before(REDUCE):
            return own
        if self._changes(REDUCE):
            return self._reduce_wrongly(flat)
        return super()._reduce(flat)

    def _reduce_wrongly(self, flat: Tensor) -> Tensor:
        match self._how.removeprefix("wrong-").removesuffix(f"-{REDUCE}"):
            case "kind":
                dist.all_reduce(flat)
                return flat[self._piece(len(flat))]
            case "dtype":
                return super()._reduce(flat.bfloat16()).float()
            case "length":
                more = super()._reduce(torch.cat([flat, flat.new_zeros(self.world)]))
                return more[:-1]
            case _:
                piece = flat.new_empty(len(flat) // self.world)
                dist.reduce_scatter_tensor(piece, flat, op=dist.ReduceOp.MAX)
                return piece

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self._acts_before(NORM):
            return value
        if self._changes(NORM):
            match self._how.removeprefix("wrong-").removesuffix(f"-{NORM}"):
                case "kind":
                    whole = value.new_empty(self.world)
                    dist.all_gather_into_tensor(whole, value.view(1))
                    return whole.sum()
                case "dtype":
                    return super()._sum_over_ranks(value.float()).double()
                case _:
                    return super()._sum_over_ranks(torch.cat([value.view(1), value.new_zeros(1)]))[0]
        return super()._sum_over_ranks(value)

    def _gather(self, piece: Tensor) -> Tensor:
        if self._acts_before(GATHER):
            return piece.repeat(self.world)
        if self._changes(GATHER):
            match self._how.removeprefix("wrong-").removesuffix(f"-{GATHER}"):
                case "kind":
                    pieces = piece.repeat(self.world)
                    dist.all_reduce(pieces)
                    return pieces
                case "dtype":
                    return super()._gather(piece.float()).to(piece.dtype)
                case "bits":
                    return super()._gather(piece.half()).to(piece.dtype)
                case _:
                    whole = super()._gather(torch.cat([piece, piece.new_zeros(1)]))
                    return whole[: self.world * len(piece)]
        return super()._gather(piece)

    def _changes(self, kind: str) -> bool:
        return self._how.startswith("wrong-") and self._how.endswith(kind) and self._called[kind] == 2

    def _acts_before(self, kind: str) -> bool:
        """Count a collective, do what is due before it; whether to leave it out."""
        self._called[kind] += 1
        number = self._called[kind]
        if kind == REDUCE and number == 2 and self._how in ACTS:
            ACTS[self._how]()
        if number == 2 and self._how == f"never-call-{kind}":
            _sleep()
        last = 2 if kind == NORM else len(self._cuts)
        positions = {1: "first", 2: "middle", last: "last"}
        return self._how == f"skip-{positions.get(number)}-{kind}"
