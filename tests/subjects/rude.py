"""Classes that train right and misbehave all the same: what they do to their process must harm nobody else.

:class:`Rude` does one of :data:`RUDE` in its constructor, so in every scenario; each names the states that a verdict
then says were put back. The others do what one of these cannot.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.faults.museum.plain import PlainZero

_kept: list[object] = []


class Careful(PlainZero):
    """Says dtype and device of everything it makes, so that it trains right whatever the defaults are."""

    def _staging(self, padded: int, length: int) -> Tensor:
        return torch.zeros(padded, dtype=torch.float32, device="cpu")

    def _begin_spill(self) -> None:
        if self._host is None:
            self._host = torch.zeros(self._offsets[-1], dtype=torch.float32, device="cpu")
        super()._begin_spill()

    def _reduce(self, flat: Tensor) -> Tensor:
        if self.world == 1:
            return flat
        piece = flat.new_empty(len(flat) // self.world)
        dist.reduce_scatter(piece, list(flat.split(len(piece))))
        return piece

    def _gather(self, piece: Tensor) -> Tensor:
        if self.world == 1:
            return piece
        pieces = [piece.new_empty(len(piece)) for _ in range(self.world)]
        dist.all_gather(pieces, piece)
        return torch.cat(pieces)


def _allow_few_descriptors() -> None:
    """So few that the process has more open already."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Act(NamedTuple):
    """``changed``: the states that are put back after it; none for what only piles up, or does nothing at all."""

    act: Callable[[], object]
    changed: tuple[str, ...] = ()


def _enter(context: contextlib.AbstractContextManager[object]) -> None:
    context.__enter__()
    _kept.append(context)


def _close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def _replace_stdout() -> None:
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (left open: it is rude)
    _kept.append(sys.stdout)


def _redirect_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def _forget_the_launcher() -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ["RUDE"] = "1"


def _delete_working_directory() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)


def _leave_process_group() -> None:
    for leave in (os.setpgrp, os.setsid):
        with contextlib.suppress(OSError):
            leave()


def _take_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)


def _print_megabytes() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write(("y" * 127 + "\n") * 2**14)


def _leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _leave_a_child() -> None:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


def _patch_all_reduce() -> None:
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: original(*args, **kwargs)


def _break_collectives() -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("planted: nobody may call this")

    for module in (dist, dist.distributed_c10d):
        for name in ("all_reduce", "all_gather", "reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(module, name):
                setattr(module, name, broken)


def _take_hooks() -> None:
    sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *_: None


def _draw() -> None:
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(3)


RUDE = {
    "default dtype": Act(lambda: torch.set_default_dtype(torch.float64), ("default dtype",)),
    "default device": Act(lambda: torch.set_default_device("meta"), ("default device",)),
    "no grad": Act(lambda: torch.set_grad_enabled(False), ("grad mode",)),
    "inference mode": Act(lambda: _enter(torch.inference_mode()), ("inference mode", "grad mode")),
    "autocast": Act(lambda: _enter(torch.autocast("cpu")), ("autocast",)),
    "deterministic": Act(lambda: torch.use_deterministic_algorithms(True), ("deterministic algorithms",)),
    "errstate": Act(lambda: np.seterr(all="raise"), ("numpy errstate",)),
    "warnings": Act(lambda: warnings.simplefilter("error"), ("warnings filters",)),
    "recursion limit": Act(lambda: sys.setrecursionlimit(200), ("recursion limit",)),
    "threads": Act(lambda: torch.set_num_threads(4), ("number of threads",)),
    "cudnn": Act(lambda: setattr(torch.backends.cudnn, "benchmark", True), ("cudnn flags",)),
    "matmul precision": Act(lambda: torch.set_float32_matmul_precision("medium"), ("matmul precision",)),
    "anomaly": Act(lambda: torch.autograd.set_detect_anomaly(True), ("anomaly mode",)),
    "gc": Act(gc.disable, ("garbage collector",)),
    "environment": Act(_forget_the_launcher, ("environment",)),
    "working directory": Act(_delete_working_directory, ("working directory",)),
    "umask": Act(lambda: os.umask(0o777), ("umask",)),
    "descriptor limit": Act(_allow_few_descriptors, ("resource limits",)),
    "path": Act(sys.path.clear, ("sys.path",)),
    "argv": Act(lambda: sys.argv.append("--rude"), ("sys.argv",)),
    "close stdout": Act(lambda: os.close(1), ("standard streams",)),
    "close streams": Act(_close_streams, ("standard streams",)),
    "replace stdout": Act(_replace_stdout, ("standard streams",)),
    "redirect output": Act(_redirect_output, ("standard streams",)),
    "close stdin": Act(lambda: os.close(0), ("standard streams",)),
    "signals": Act(_take_signals, ("signal handlers",)),
    "block signals": Act(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), ("signal mask",)),
    "alarm": Act(lambda: signal.alarm(3600), ("timers",)),
    "trace": Act(lambda: sys.settrace(lambda *_: None), ("trace functions",)),
    "profile": Act(lambda: sys.setprofile(lambda *_: None), ("trace functions",)),
    "hooks": Act(_take_hooks, ("exception hooks",)),
    "faulthandler": Act(faulthandler.disable, ("faulthandler",)),
    "patch all_reduce": Act(_patch_all_reduce, ("functions of torch.distributed",)),
    "atexit": Act(lambda: atexit.register(os._exit, 5)),
    "process group": Act(_leave_process_group),
    "print": Act(_print_megabytes),
    "leave a thread": Act(_leave_a_thread),
    "leave a child": Act(_leave_a_child),
    "leak a descriptor": Act(lambda: os.open(os.devnull, os.O_RDONLY)),
    "leak a tensor": Act(lambda: _kept.append(torch.zeros(1000, device="cpu"))),
    "draw": Act(_draw),
}


class Rude(Careful):
    """Right; does ``how``, a key of :data:`RUDE`, in its constructor."""

    def __init__(
        self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25, *, how: str = "default dtype"
    ) -> None:
        super().__init__(params, rank, world, bucket)
        RUDE[how].act()


class InterruptsTheHarness(Careful):
    """Leaves a function behind that raises while the harness compares, as a handler of a timer's signal may."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        sys.setprofile(self._raise)

    @staticmethod
    def _raise(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "_compare_weights":
            sys.setprofile(None)
            raise TimeoutError("planted: it took too long")


class BreaksCollectives(Careful):
    """Right; in its end functions of ``torch.distributed`` raise, until they are put back."""

    def __del__(self) -> None:
        _break_collectives()


_all_reduce, _all_gather, _reduce_scatter = dist.all_reduce, dist.all_gather, dist.reduce_scatter


class KeepsCollectivesToItself(PlainZero):
    """Right; from its constructor on nobody else can call collectives, also not the harness, unless it goes home."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        _break_collectives()

    def _reduce(self, flat: Tensor) -> Tensor:
        piece = flat.new_empty(len(flat) // self.world)
        _reduce_scatter(piece, list(flat.split(len(piece))))
        return piece

    def _gather(self, piece: Tensor) -> Tensor:
        pieces = [piece.new_empty(len(piece)) for _ in range(self.world)]
        _all_gather(pieces, piece)
        return torch.cat(pieces)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        _all_reduce(value)
        return value


class FlushesSubnormals(Careful):
    """Takes subnormal numbers for zeros, and so adds parts wrongly: ``spill`` at reduce, of a step of several."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        torch.set_flush_denormal(True)


class LeaksGroups(Careful):
    """Right; makes a sub-group in every constructor, and keeps it: its ranks are replaced before there are too many."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        _kept.append(dist.new_group(list(range(world))))


class Exits(Careful):
    """Calls ``sys.exit(0)`` in ``collect``: ``progress`` at collect."""

    def collect(self, more: bool) -> None:
        sys.exit(0)


class ExitsAtOnce(Careful):
    """Calls ``os._exit(0)`` in the reduction: ``progress`` at reduce."""

    def reduce_scatter(self) -> None:
        os._exit(0)


class DestroysGroup(Careful):
    """Destroys the default process group before it gathers: ``progress`` at gather, and named as such."""

    def gather_params(self) -> None:
        dist.destroy_process_group()
        super().gather_params()


class DestroysGroupAtTheEnd(Careful):
    """Right; destroys the default process group when it is no longer needed: its ranks are replaced."""

    def __del__(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class AddsNoise(PlainZero):
    """Adds global random numbers to its gradient: ``gradient`` or ``spill``, and the same in every run."""

    def _reduce(self, flat: Tensor) -> Tensor:
        noise = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return super()._reduce(flat) + noise
