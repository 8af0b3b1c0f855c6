"""A small world in one process, for tests of the driver: each rank is a thread, and one of them runs at a time.

Only what the tests' subjects and the driver call of ``torch.distributed`` is there, on the default group alone. Sums
are added in the order of gloo's ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from harness.launch import tap
from harness.launch.rank import RankContext
from harness.launch.tap import CollectiveLog, LoggedCollective
from harness.oracles.order import add, gloo

_WAIT_S = 600.0


class PeerGoneError(RuntimeError):
    """A rank waits in a collective to which not all others come."""


class _Done:
    """The work of a collective that is over."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Lockstep:
    """Runs one function on each rank; ``contexts`` are what the ranks' drivers are given."""

    def __init__(self, world: int, directory: Path) -> None:
        self.world = world
        self.contexts = [
            RankContext(rank, world, "gloo", "cpu", directory, CollectiveLog(), lambda event: None)
            for rank in range(world)
        ]
        self._turns = [threading.Semaphore(0) for _ in range(world)]
        self._over = threading.Semaphore(0)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function gives for each rank, or the exception that it raises there."""
        self._results: list[Any] = [None] * self.world
        self._running = set(range(self.world))
        self._waiting: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self._rank = 0
        threads = [threading.Thread(target=self._live, args=(rank, function)) for rank in range(self.world)]
        with self._functions():
            for thread in threads:
                thread.start()
            self._turns[0].release()
            assert self._over.acquire(timeout=_WAIT_S)
            for thread in threads:
                thread.join(_WAIT_S)
        return self._results

    def _live(self, rank: int, function: Callable[[int], Any]) -> None:
        self._turns[rank].acquire()
        try:
            self._results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 (told to the test)
            self._results[rank] = error
        self._running.discard(rank)
        self._next(rank)

    def _next(self, rank: int) -> None:
        """Hand the turn to the next rank that can run; when all wait, they have met, or never will."""
        if not self._running:
            self._over.release()
            return
        ready = [other for other in sorted(self._running) if other not in self._waiting]
        if not ready:
            self._meet()
            ready = sorted(self._running)
        self._rank = next((other for other in ready if other > rank), ready[0])
        self._turns[self._rank].release()

    def _meet(self) -> None:
        waiting, self._waiting = self._waiting, {}
        kinds = {kind for kind, _ in waiting.values()}
        self._gone = len(waiting) < self.world or len(kinds) > 1
        if not self._gone:
            _COLLECTIVES[kinds.pop()]([waiting[rank][1] for rank in range(self.world)])

    def _collective(self, kind: str, tensor: Tensor, *args: Any) -> Any:
        rank = self._rank
        log = self.contexts[rank].collectives
        if not tap._per_thread.inside:
            how = f"with {args[-1]}" if kind == "all_reduce" and args[-1] != dist.ReduceOp.SUM else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            log.entries.append(LoggedCollective(kind, dtype, tensor.numel(), tuple(range(self.world)), None, how))
            if log.mirror is not None:
                log.mirror(log.entries[-1], tensor)
        self._waiting[rank] = kind, (tensor, *args)
        if self._running - set(self._waiting) or len(self._running) > 1:
            self._next(rank)
            self._turns[rank].acquire()
        else:
            self._meet()
        if self._gone:
            raise PeerGoneError("connection closed by peer")
        return _Done()

    @contextmanager
    def _functions(self) -> Iterator[None]:
        call = self._collective
        replaced: dict[str, Callable[..., Any]] = {
            "is_initialized": lambda: True,
            "get_rank": lambda group=None: self._rank,
            "get_world_size": lambda group=None: self.world,
            "get_backend_config": lambda group=None: "cpu:gloo",
            "all_reduce": lambda tensor, op=dist.ReduceOp.SUM, group=None: call("all_reduce", tensor, op),
            "broadcast": lambda tensor, src=0, group=None, group_src=None: call("broadcast", tensor, group_src or src),
            "all_gather": lambda out, tensor, group=None: call("all_gather", tensor, out),
            "all_to_all_single": lambda out, source: call("all_to_all", source, out),
        }
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            replaced[name] = lambda out, source, op=None, group=None, async_op=False: call(
                "reduce_scatter", source, out
            )
        for name in ("all_gather_single", "all_gather_into_tensor"):
            replaced[name] = lambda out, source, group=None, async_op=False: call("all_gather", source, out)
        patches = [mock.patch.object(dist, name, function, create=True) for name, function in replaced.items()]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def _sum(kind: str, tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].dtype != torch.float32:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total
    order = gloo(kind, tensors[0].numel(), len(tensors))
    return torch.from_numpy(add(order, [tensor.detach().reshape(-1).numpy() for tensor in tensors]))


def _all_reduce(calls: Sequence[tuple[Any, ...]]) -> None:
    tensors = [tensor for tensor, _ in calls]
    op = calls[0][1]
    if op == dist.ReduceOp.SUM:
        total = _sum("all_reduce", tensors)
    else:
        total = torch.stack(tensors).amax(0) if op == dist.ReduceOp.MAX else torch.stack(tensors).amin(0)
    for tensor in tensors:
        tensor.copy_(total.view(tensor.shape))


def _reduce_scatter(calls: Sequence[tuple[Any, ...]]) -> None:
    total = _sum("reduce_scatter", [source for source, _ in calls])
    for (_, out), piece in zip(calls, total.chunk(len(calls)), strict=True):
        out.copy_(piece)


def _all_gather(calls: Sequence[tuple[Any, ...]]) -> None:
    sources = [source.detach().clone() for source, _ in calls]
    for _, out in calls:
        pieces = out if isinstance(out, list) else list(out.view(len(calls), *sources[0].shape))
        for piece, source in zip(pieces, sources, strict=True):
            piece.copy_(source)


def _all_to_all(calls: Sequence[tuple[Any, ...]]) -> None:
    sources = [source.clone().chunk(len(calls)) for source, _ in calls]
    for rank, (_, out) in enumerate(calls):
        out.copy_(torch.cat([pieces[rank] for pieces in sources]))


def _broadcast(calls: Sequence[tuple[Any, ...]]) -> None:
    source = calls[calls[0][1]][0].clone()
    for tensor, _ in calls:
        tensor.copy_(source)


_COLLECTIVES: dict[str, Callable[[Sequence[tuple[Any, ...]]], None]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
