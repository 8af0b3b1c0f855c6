"""The states of a process that a class under test may change, each with how to read it and how to put it back.

A table, so that one loop serves all of them. What is not here: random generators (seeded before each scenario), and
the standard streams and descriptors (:class:`Streams`: there is one right state of them, whatever a class prefers).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from harness.launch import process


@dataclass(frozen=True)
class State:
    """One state of the process.

    Attributes:
        name: For people, in the plural where there are several.
        read: The present value, to be compared by ``==``; a copy, so that it does not change with the state.
        write: Put a value back that was read before.
        arithmetic: What the harness itself computes or calls may depend on it: put back whenever the class returns to
            the harness, dozens of times in a scenario. For others it takes care (it names devices and an errstate).
        thread: Each thread has its own, so a rank that is a thread shares it with no other.
        inherited: Setting it also says what threads begin with that are started later.
        of_rank: What the classes of two ranks put there differs, and one cannot do with the other's.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    arithmetic: bool = False
    thread: bool = False
    inherited: bool = False
    of_rank: bool = False


# Positive unless the processor takes subnormal numbers for zeros; torch can set that, but not tell.
_SUBNORMAL = 5e-324

# Those that programs and faulthandler use; to ask for all 64 would take 60 us.
_SIGNAL_NAMES = (
    "SIGHUP SIGINT SIGQUIT SIGILL SIGTRAP SIGABRT SIGBUS SIGFPE SIGUSR1 SIGSEGV SIGUSR2 SIGPIPE SIGALRM SIGTERM "
    "SIGCHLD SIGCONT SIGTSTP SIGVTALRM SIGPROF SIGIO SIGSYS"
)
_SIGNALS = (*(int(getattr(signal, name)) for name in _SIGNAL_NAMES.split()), int(process.STACKS_SIGNAL))
# Those that would keep the harness from its own files, memory and time.
_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}") for name in ("NOFILE", "FSIZE", "AS", "DATA", "STACK", "CPU", "NPROC")
)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Guards of inference mode, which lose their effect when they are no longer referred to.
_inference_guards: list[torch.inference_mode] = []


def _set_default_device(device: torch.device) -> None:
    # None, since a default device, also the ordinary one, makes every call of torch's slower.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_inference(mode: bool) -> None:
    guard = torch.inference_mode(mode)
    guard.__enter__()
    _inference_guards.append(guard)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _set_grad_mode(enabled: bool) -> None:
    torch.set_grad_enabled(enabled)


def _set_flush_denormal(flush: bool) -> None:
    torch.set_flush_denormal(flush)


def _set_errstate(errstate: Mapping[str, str]) -> None:
    np.seterr(**errstate)  # type: ignore[arg-type]


def _set_umask(mask: int) -> None:
    os.umask(mask)


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in (("cpu", "cuda") if _cuda_in_use() else ("cpu",))
    )


def _set_autocast(value: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    for kind, enabled, dtype in value:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _limits() -> tuple[int, ...]:
    return tuple(resource.getrlimit(limit)[0] for limit in _LIMITS)


def _set_limits(value: tuple[int, ...]) -> None:
    for limit, soft in zip(_LIMITS, value, strict=True):
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # also tells the interpreter that they changed
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


def _set_recursion_limit(limit: int) -> None:
    with contextlib.suppress(RecursionError):  # lower than where the program is: seen by whoever compares
        sys.setrecursionlimit(limit)


def _set_collectives(functions: tuple[Any, Any]) -> None:
    dist.all_reduce, dist.all_gather = functions


# The functions of torch.distributed, as they are recorded or as a class replaced them.
_PUBLIC = {name: value for name, value in vars(dist).items() if type(value) is FunctionType}
_NAMES = {
    module: tuple(name for name, value in _PUBLIC.items() if vars(module).get(name) is value)
    for module in (dist, distributed_c10d)
}
_IN_DIST, _IN_C10D = (itemgetter(*names) for names in _NAMES.values())


def _functions() -> tuple[tuple[Any, ...], ...]:
    return _IN_DIST(vars(dist)), _IN_C10D(vars(distributed_c10d))


def _set_functions(value: tuple[tuple[Any, ...], ...]) -> None:
    for (module, names), functions in zip(_NAMES.items(), value, strict=True):
        vars(module).update(zip(names, functions, strict=True))


def _set_environment(environment: Mapping[bytes, bytes]) -> None:
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    for name, value in environment.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 (a Path takes longer)
    except FileNotFoundError:  # it was deleted
        return None


def _set_working_directory(path: str | None) -> None:
    if path is not None:
        os.chdir(path)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _set_list(target: Callable[[], list[str]]) -> Callable[[tuple[str, ...]], None]:
    def write(value: tuple[str, ...]) -> None:
        target()[:] = value

    return write


def _handlers() -> tuple[Any, ...]:
    return tuple(signal.getsignal(number) for number in _SIGNALS)


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _mask() -> frozenset[int]:
    return frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _set_mask(mask: frozenset[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _timers() -> tuple[bool, ...]:
    """Which run; when they end changes by itself."""
    return tuple(any(signal.getitimer(timer)) for timer in _TIMERS)


def _stop_timers(running: tuple[bool, ...]) -> None:
    """A timer that was stopped cannot be put back, as nobody knows what was left of it; none of the harness's runs."""
    for timer, runs in zip(_TIMERS, running, strict=True):
        if not runs:
            signal.setitimer(timer, 0.0)


def _tracing() -> tuple[Any, Any]:
    return sys.gettrace(), sys.getprofile()


def _set_tracing(value: tuple[Any, Any]) -> None:
    sys.settrace(value[0])
    sys.setprofile(value[1])


def _hooks() -> tuple[Any, Any, Any]:
    return sys.excepthook, sys.unraisablehook, threading.excepthook


def _set_hooks(value: tuple[Any, Any, Any]) -> None:
    sys.excepthook, sys.unraisablehook, threading.excepthook = value


def _collector() -> tuple[bool, tuple[int, int, int]]:
    return gc.isenabled(), gc.get_threshold()


def _set_collector(value: tuple[bool, tuple[int, int, int]]) -> None:
    gc.set_threshold(*value[1])
    (gc.enable if value[0] else gc.disable)()


def _cudnn() -> tuple[bool, bool]:
    return torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark


def _set_cudnn(value: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = value


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


STATES = (
    State("default dtype", torch.get_default_dtype, torch.set_default_dtype, arithmetic=True),
    # An empty tensor tells in a third of the time that torch.get_default_device() takes.
    State("default device", lambda: torch.empty(0).device, _set_default_device, thread=True),
    # Before the grad mode, which it changes too.
    State("inference mode", torch.is_inference_mode_enabled, _set_inference, thread=True),
    State("grad mode", torch.is_grad_enabled, _set_grad_mode, arithmetic=True, thread=True),
    State("autocast", _autocast, _set_autocast, thread=True),
    State(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    State("flush-denormal mode", lambda: not _SUBNORMAL > 0.0, _set_flush_denormal, arithmetic=True, thread=True),
    State("numpy errstate", np.geterr, _set_errstate, thread=True),
    State("warnings filters", lambda: list(warnings.filters), _set_filters, arithmetic=True),
    State("recursion limit", sys.getrecursionlimit, _set_recursion_limit, arithmetic=True),
    State(
        "functions of torch.distributed",  # those that the harness calls
        lambda: (dist.all_reduce, dist.all_gather),
        _set_collectives,
        arithmetic=True,
    ),
    State("functions of torch.distributed", _functions, _set_functions, of_rank=True),
    State("number of threads", torch.get_num_threads, torch.set_num_threads, thread=True, inherited=True),
    State("cudnn flags", _cudnn, _set_cudnn),
    State("matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    State("anomaly mode", _anomaly, _set_anomaly),
    State("garbage collector", _collector, _set_collector),
    State("environment", lambda: dict(os.environb), _set_environment),
    State("working directory", _working_directory, _set_working_directory),
    State("umask", _umask, _set_umask),
    State("resource limits", _limits, _set_limits),
    State("sys.path", lambda: tuple(sys.path), _set_list(lambda: sys.path)),
    State("sys.argv", lambda: tuple(sys.argv), _set_list(lambda: sys.argv)),
    State("signal handlers", _handlers, _set_handlers),
    State("signal mask", _mask, _set_mask, thread=True),
    State("timers", _timers, _stop_timers),
    State("trace functions", _tracing, _set_tracing, thread=True),
    State("exception hooks", _hooks, _set_hooks),
    State("faulthandler", faulthandler.is_enabled, lambda on: faulthandler.enable(file=2) if on else None),
)


class Streams:
    """Descriptors 0 to 2 and the two output streams, as they were when this object was made."""

    name = "standard streams"

    def __init__(self) -> None:
        # High numbers, where a class that closes all it can think of is least likely to find them.
        self._copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 512) for number in range(3)]
        self._files = [_file(number) for number in range(3)]
        self._streams: list[TextIO] = [sys.stdout, sys.stderr]

    def intact(self) -> bool:
        """Nothing of it was closed, redirected or replaced."""
        return (
            sys.stdout is self._streams[0]
            and sys.stderr is self._streams[1]
            and not (sys.stdout.closed or sys.stderr.closed)
            and [_file(number) for number in range(3)] == self._files
        )

    def put_back(self) -> None:
        """Make it so again; raises OSError when the copies were closed too."""
        for number, copy in enumerate(self._copies):
            if _file(number) != self._files[number]:
                os.dup2(copy, number)
        for index, stream in enumerate(self._streams):
            if stream.closed:
                # Not closed with the object: a class that keeps it must not close the descriptor later on.
                self._streams[index] = open(  # noqa: SIM115 (stays open)
                    index + 1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
                )
        sys.stdout, sys.stderr = self._streams


def _file(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def seed_generators(seed: int, rank: int) -> None:
    """Give every global generator the state that follows from a scenario and a rank, so that a replay draws the same.

    As under a launcher that seeds nothing: torch starts every process with one and the same seed, Python and numpy
    start each with one of its own. So ranks draw equal numbers from torch, and different ones from the other two.
    """
    own = (seed * 0x9E3779B97F4A7C15 + rank + 1) % 2**64
    random.seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002 (the generator that a class may use)
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)
