"""One rank: joins the default process group of its world, then answers tasks until its connection ends.

The handler, ``"package.module:function"``, is imported in the rank and called once, ``function(context, setup)``; what
it returns is called with each task's bytes and returns the reply's bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import fcntl
import gc
import importlib
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from harness.launch import process
from harness.launch.wire import Channel, FileMeeting, Hello, Kind

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from harness.launch.tap import CollectiveLog

Work = Callable[[bytes], bytes]

# The parent watches every wait and kills; a shorter time-out here would only blame another rank.
_GROUP_TIMEOUT = datetime.timedelta(days=1)
NO_GROUP = "none"
_MAX_TRACEBACK_CHARS = 32_768
_MAX_DESCRIPTOR = 4096  # The kernel keeps a table as long as the highest number in use.


class RankBroken(Exception):  # noqa: N818 (an outcome to report, not an error of the program)
    """Raised by a handler: this rank's part of the task failed, and the group may be out of step.

    Args:
        payload: What the parent gets in place of a reply.
        reusable: This rank knows that it has no collective pending. If every rank of the world says so for the same
            task, the processes are kept; else they are replaced.
    """

    def __init__(self, payload: bytes, *, reusable: bool = False) -> None:
        super().__init__(f"{len(payload)} bytes of report")
        self.payload = payload
        self.reusable = reusable


@dataclass(frozen=True)
class RankContext:
    """What a handler is given.

    Attributes:
        rank: Of this process in the default group.
        world: Size of the default group.
        backend: Of the default group: ``"gloo"`` or ``"nccl"``; ``"none"``: there is no group.
        device: Where this rank's tensors belong: ``"cpu"`` or ``"cuda:N"``.
        directory: The pool's private directory; removed with the pool.
        collectives: Every collective called since the task began.
        emit: Sends an interim message to the parent, where it is in the report also if this rank then ends badly. To be
            called from the thread that runs the handler.
        rearm: Makes the process show its stacks to the parent again, after what it ran may have taken the signal or
            the file away; ``rearm(True)`` if it may have installed handlers of its own for signals.
    """

    rank: int
    world: int
    backend: str
    device: str
    directory: Path
    collectives: CollectiveLog
    emit: Callable[[bytes], None]
    rearm: Callable[[bool], None] = lambda lost: None


def main(descriptor: int) -> NoReturn:
    """Serve the connection ``descriptor`` until it ends; the process ends with it."""
    channel = Channel(socket.socket(fileno=_moved_high(descriptor)))
    try:
        _serve(channel)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # The parent is gone: nobody to tell.
    except BaseException:  # noqa: BLE001 (said in the log and by the exit code)
        with contextlib.suppress(Exception):  # a subject may have closed or replaced the stream
            traceback.print_exc()
        os._exit(70)


def _moved_high(descriptor: int) -> int:
    """The same connection under a number above those that gloo's get.

    The kernel closes a dying process's files from the highest number down (task_work is last in, first out), so the
    parent sees this rank end before any other rank can notice, fail, and be taken for the first one that did.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTOR if soft == resource.RLIM_INFINITY else min(soft, _MAX_DESCRIPTOR)
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(limit - 64, limit // 2))
    os.close(descriptor)
    return high


def _serve(channel: Channel) -> NoReturn:
    own = os.getpid()
    first = channel.next_frame()
    if first is None:
        os._exit(0)
    hello = msgspec.msgpack.decode(first.payload, type=Hello)
    process.die_with_parent(hello.zygote)
    log, rearm = _redirect(hello)
    try:
        context = _join(hello, channel, rearm)
        work = _load(hello.handler)(context, hello.setup)
    except BaseException as error:  # noqa: BLE001 (passed on to the parent)
        channel.send(Kind.UNREADY, f"{summary(error)}\n".encode(errors="backslashreplace") + _traceback())
        os._exit(1)
    gc.collect()
    gc.freeze()
    channel.send(Kind.READY)
    while (frame := channel.next_frame()) is not None:
        if os.fstat(log).st_size:
            os.ftruncate(log, 0)
        context.collectives.begin()
        kind, payload = _answer(work, frame.payload)
        if os.getpid() != own:
            os._exit(0)  # A fork of the subject's that returned from its task.
        _flush()
        channel.send(kind, payload)
        del frame, payload
    os._exit(0)


def _answer(work: Work, task: bytes) -> tuple[Kind, bytes]:
    """Do one task; whatever happens is an answer, except a request to exit, which is granted."""
    try:
        reply = work(task)
        # Unreachable for checked handlers; a handler that returns None must not pass as one that replied.
        if not isinstance(reply, bytes):
            raise TypeError(f"the handler returned {type(reply).__name__}: it must return bytes")
    except RankBroken as broken:
        return (Kind.BROKEN_REUSABLE if broken.reusable else Kind.BROKEN), broken.payload
    except SystemExit as request:
        _exit_as_asked(request.code)
    except BaseException:  # noqa: BLE001 (passed on to the parent)
        return Kind.RAISED, _traceback()
    else:
        return Kind.REPLY, reply


def _exit_as_asked(code: object) -> NoReturn:
    """End as the interpreter would for ``sys.exit(code)``, but without its clean-up, which may wait for other ranks."""
    if code is not None and not isinstance(code, int):
        with contextlib.suppress(Exception):  # the stream may be closed, and the code an object that has no text
            sys.stderr.write(f"{code}\n")
        code = 1
    _flush()
    os._exit((code or 0) & 0xFF)


def _redirect(hello: Hello) -> tuple[int, Callable[[bool], None]]:
    """Output to the log, stacks on a signal to their file, input from nowhere.

    Returns the log's descriptor, and :attr:`RankContext.rearm`.
    """
    _flush()
    # Append mode: the log is cut to nothing while other descriptors of it are open.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    log = _moved_high(os.open(hello.log, flags, 0o600))
    os.dup2(log, 1)
    os.dup2(log, 2)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    stacks = _moved_high(os.open(hello.stacks, flags, 0o600))

    def rearm(lost: bool) -> None:
        if lost:  # or they would be thought to be in force, and left as they are
            faulthandler.disable()
            faulthandler.unregister(process.STACKS_SIGNAL)
        faulthandler.register(process.STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        # Who has no group may have hundreds of threads, of which the one that crashed would not be among those shown.
        faulthandler.enable(file=2, all_threads=hello.backend != NO_GROUP)

    rearm(False)
    process.set_name(f"z2-rank{hello.rank}/{hello.world}")
    sys.argv = ["harness-rank"]
    return log, rearm


def _join(hello: Hello, channel: Channel, rearm: Callable[[bool], None]) -> RankContext:
    """Collective: create the default group, unless there is to be none, and let every pair of ranks connect."""
    os.environ.update(hello.environment)
    import torch

    from harness.launch import tap

    torch.set_num_threads(1)
    collectives = tap.install()
    for module in hello.preload:
        importlib.import_module(module)
    device = "cpu"
    if hello.device == "cuda":
        index = gpu_of(hello.backend, torch.cuda.device_count(), os.environ)
        torch.cuda.set_device(index)
        device = f"cuda:{index}"
    if hello.backend != NO_GROUP:
        _form_group(hello, device)
    emit = _emitter(channel, os.getpid())
    return RankContext(hello.rank, hello.world, hello.backend, device, Path(hello.directory), collectives, emit, rearm)


def gpu_of(backend: str, num_gpus: int, environment: Mapping[str, str]) -> int:
    """Which of the visible GPUs a rank uses: by its place among the ranks of its machine, from the first one again.

    Raises:
        RuntimeError: there is none, or NCCL, which refuses two ranks on one GPU, has fewer than ranks.
    """
    local_rank, local_world = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    needed = local_world if backend == "nccl" else 1
    if num_gpus < needed:
        raise RuntimeError(
            f"backend {backend} on CUDA, {local_world} ranks on this machine: at least {needed} GPUs are needed, "
            f"torch.cuda.device_count() is {num_gpus}"
        )
    return local_rank % num_gpus


def _form_group(hello: Hello, device: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        hello.backend,
        store=_store(hello),
        rank=hello.rank,
        world_size=hello.world,
        timeout=_GROUP_TIMEOUT,
    )
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != hello.world:
        raise RuntimeError(f"the first all-reduce of ones gave {total.item()}: expected {hello.world}, the world")


def _store(hello: Hello) -> Store:
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    where = hello.meeting
    if isinstance(where, FileMeeting):
        return FileStore(where.path, hello.world)
    return PrefixStore(where.prefix, TCPStore(where.host, where.port, is_master=False, timeout=_GROUP_TIMEOUT))


def _emitter(channel: Channel, own: int) -> Callable[[bytes], None]:
    def emit(event: bytes) -> None:
        # A process that the subject forked must not speak in the rank's name.
        if os.getpid() == own:
            channel.send(Kind.EVENT, event)

    return emit


def _load(handler: str) -> Callable[[RankContext, bytes], Work]:
    module, _, name = handler.partition(":")
    return cast(Callable[[RankContext, bytes], Work], getattr(importlib.import_module(module), name))


def summary(error: BaseException) -> str:
    """The first line of what the traceback of ``error`` ends with."""
    return traceback.format_exception_only(error)[-1].split("\n", 1)[0]


def _traceback() -> bytes:
    return traceback.format_exc()[-_MAX_TRACEBACK_CHARS:].encode(errors="backslashreplace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A subject may have closed or replaced them, or the disk may be full; its results count all the same.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
