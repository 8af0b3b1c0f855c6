"""Handlers for the tests of the pool: a task is JSON, ``{"do": name, ...}``; an empty one gets an empty reply.

``"ranks": [...]`` limits what is done to these ranks; the others do ``"otherwise"`` (by default they echo).
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_reduce as all_reduce_by_name

from harness.launch.process import STACKS_SIGNAL
from harness.launch.rank import RankBroken, RankContext

Order = dict[str, Any]


def simple(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Does what each task says."""

    def work(task: bytes) -> bytes:
        if not task:
            return b""
        if not task.startswith(b"{"):
            return task  # Large and opaque: comes back.
        order = json.loads(task)
        if context.rank not in order.get("ranks", range(context.world)):
            order = order.get("otherwise", {"do": "echo"})
        return _ORDERS[order["do"]](context, setup, order)

    return work


def difficult(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """At set-up its last rank raises in world 2 and hangs in world 3."""
    if context.rank == context.world - 1:
        if context.world == 2:
            raise LookupError("no such optimizer")
        if context.world == 3:
            _hang(context, setup, {})
    return simple(context, setup)


def _echo(context: RankContext, setup: bytes, order: Order) -> bytes:
    return json.dumps([context.rank, context.world, setup.decode()]).encode()


def _pid(context: RankContext, setup: bytes, order: Order) -> bytes:
    return str(os.getpid()).encode()


def _sum(context: RankContext, setup: bytes, order: Order) -> bytes:
    total = torch.full((4,), float(context.rank + 1))
    dist.all_reduce(total)
    return str(int(total[0].item())).encode()


def _sum_or_break(context: RankContext, setup: bytes, order: Order) -> bytes:
    try:
        return _sum(context, setup, order)
    except RuntimeError as error:
        raise RankBroken(str(error).encode()) from error


def _raise(context: RankContext, setup: bytes, order: Order) -> bytes:
    raise ZeroDivisionError("planted")


def _return_text(context: RankContext, setup: bytes, order: Order) -> Any:
    return "not bytes"


def _break(context: RankContext, setup: bytes, order: Order) -> bytes:
    raise RankBroken(f"rank {context.rank}".encode(), reusable=order["reusable"])


def _exit(context: RankContext, setup: bytes, order: Order) -> bytes:
    time.sleep(order.get("after_s", 0.0))
    os._exit(order["code"])


def _sys_exit(context: RankContext, setup: bytes, order: Order) -> bytes:
    sys.exit(order["code"])


def _signal_itself(context: RankContext, setup: bytes, order: Order) -> bytes:
    os.kill(os.getpid(), order["signal"])
    return b""


def _hang(context: RankContext, setup: bytes, order: Order) -> bytes:
    threading.Event().wait()
    return b""


def _sleep(context: RankContext, setup: bytes, order: Order) -> bytes:
    time.sleep(1000)
    return b""


def _poll(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Waits as a poor programmer would."""
    while True:
        time.sleep(0.002)


def _loop(context: RankContext, setup: bytes, order: Order) -> bytes:
    while True:
        pass


def _loop_in_c(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Never lets go of the interpreter's lock."""
    collections.deque(itertools.repeat(None), maxlen=0)
    return b""


def _stop(context: RankContext, setup: bytes, order: Order) -> bytes:
    os.kill(os.getpid(), signal.SIGSTOP)
    return b""


def _loop_deaf(context: RankContext, setup: bytes, order: Order) -> bytes:
    """With the signal taken away by which it is asked for its stacks: it would die of it."""
    signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
    return _loop(context, setup, order)


def _loop_farewell(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Has something to say when it is asked to end, and does not end."""
    signal.signal(signal.SIGTERM, lambda number, frame: print("last words"))  # noqa: T201
    return _loop(context, setup, order)


def _compute_cpu_s(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _compute_and_move(context: RankContext, setup: bytes, order: Order) -> bytes:
    """One function all the time; says in a file that it gets on."""
    for number in range(order["steps"]):
        (context.directory / "moved").write_text(str(number))
        _compute_cpu_s(order["step_s"])
    return b"done"


def _compute_in_new_functions(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Says nothing, and no function takes long; then meets those that wait for it."""
    for number in range(order["steps"]):
        names = {"compute": _compute_cpu_s}
        exec(f"def step_{number}(): compute({order['step_s']})", names)
        names[f"step_{number}"]()  # type: ignore[call-arg]
    return _sum(context, setup, order)


def _wait_for_child(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Its child computes; it waits."""
    code = f"import time\nwhile time.process_time() < {order['cpu_s']}: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    return b"done"


def _rest(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Until a while after the parent has said that it is there."""
    while not (context.directory / "resumed").exists():
        time.sleep(0.02)
    time.sleep(1.0)
    return b"rested"


def _print(context: RankContext, setup: bytes, order: Order) -> bytes:
    print("to stdout", context.rank)  # noqa: T201
    print("to stderr", file=sys.stderr)  # noqa: T201
    os.write(1, b"to descriptor 1\n")
    return b""


def _print_much(context: RankContext, setup: bytes, order: Order) -> bytes:
    for _ in range(4):
        sys.stdout.write("x" * (1 << 20))
    sys.stdout.write("the end")
    return b""


def _print_until_cut(context: RankContext, setup: bytes, order: Order) -> bytes:
    largest = 0
    while os.fstat(1).st_size >= largest:
        largest = os.fstat(1).st_size
        os.write(1, b"y" * 4096)
    return b"cut"


def _close_stdout(context: RankContext, setup: bytes, order: Order) -> bytes:
    sys.stdout.close()
    return b"closed"


def _emit(context: RankContext, setup: bytes, order: Order) -> bytes:
    for number in range(3):
        context.emit(f"event {number}".encode())
    return _ORDERS[order.get("then", "echo")](context, setup, order)


def _leave(context: RankContext, setup: bytes, order: Order) -> bytes:
    """A file in the pool's directory, with the zeros of one that is mapped into memory."""
    (context.directory / order["name"]).write_bytes(order["text"].encode() + bytes(4096))
    return _ORDERS[order.get("then", "echo")](context, setup, order)


def _interrupt(context: RankContext, setup: bytes, order: Order) -> bytes:
    os.kill(order["parent"], signal.SIGINT)
    return _hang(context, setup, order)


def _environment(context: RankContext, setup: bytes, order: Order) -> bytes:
    values = {name: os.environ.get(name) for name in order["names"]}
    return json.dumps([values, torch.get_num_threads(), os.getpid() == os.getpgrp() == os.getsid(0)]).encode()


def _start_sleepers(context: RankContext, setup: bytes, order: Order) -> bytes:
    """One ordinary child, and one that has left the rank's session and process group, and whose parent is gone."""
    child = subprocess.Popen(["sleep", "1000"])
    daemon = subprocess.run(["setsid", "sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], capture_output=True, check=True)
    context.emit(json.dumps([child.pid, int(daemon.stdout)]).encode())
    child.returncode = 0  # It is left running on purpose; no warning about that.
    os._exit(0)


def _fork_and_return(context: RankContext, setup: bytes, order: Order) -> bytes:
    """The child comes back from the task too, as careless code may."""
    child = os.fork()
    if child == 0:
        return b"child"
    os.waitpid(child, 0)
    return b"parent"


def _descriptors() -> list[int]:
    """The sockets of this process; the highest is the connection to the parent."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_socket()]
    return sorted(int(link.name) for link in links)


def _write_garbage(context: RankContext, setup: bytes, order: Order) -> bytes:
    os.write(_descriptors()[-1], b"GET / HTTP/1.1\r\n\r\n")
    return _hang(context, setup, order)


def _close_connection(context: RankContext, setup: bytes, order: Order) -> bytes:
    os.close(_descriptors()[-1])
    return _hang(context, setup, order) if order["hang"] else b""


def _digest(context: RankContext, setup: bytes, order: Order) -> bytes:
    return hashlib.sha256(order["text"].encode()).hexdigest().encode()


def _collectives(context: RankContext, setup: bytes, order: Order) -> bytes:
    """Calls a named series of collectives; replies with what the log has of it."""
    context.collectives.mark("series")
    _SERIES[order["series"]](context)
    return json.dumps([list(entry) for entry in context.collectives.entries]).encode()


def _log_reductions(context: RankContext) -> None:
    world = context.world
    dist.all_reduce(torch.ones(5))
    dist.all_reduce(tensor=torch.ones(6, dtype=torch.bfloat16), op=dist.ReduceOp.MAX)
    all_reduce_by_name(torch.ones(2, 3, dtype=torch.float64), dist.ReduceOp.SUM, None)
    dist.all_reduce(torch.ones(7), async_op=True).wait()
    dist.reduce(torch.ones(8), dst=0)
    dist.reduce_scatter(torch.ones(3), [torch.ones(3) for _ in range(world)])
    for name in ("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"):
        if hasattr(dist, name):
            getattr(dist, name)(torch.ones(4), torch.ones(4 * world))
    dist.distributed_c10d.reduce_scatter_tensor(output=torch.ones(2), input=torch.ones(2 * world))


def _log_gathers(context: RankContext) -> None:
    world, source = context.world, context.rank == 0
    dist.all_gather([torch.ones(3) for _ in range(world)], torch.ones(3))
    for name in ("all_gather_into_tensor", "_all_gather_base", "all_gather_single"):
        if hasattr(dist, name):
            getattr(dist, name)(torch.ones(4 * world), input_tensor=torch.ones(4))
    dist.broadcast(torch.ones(5), 0)
    dist.gather(torch.ones(6), [torch.ones(6) for _ in range(world)] if source else None, dst=0)
    dist.scatter(torch.ones(7), [torch.ones(7) for _ in range(world)] if source else None, src=0)
    dist.all_to_all_single(torch.ones(2 * world), torch.ones(2 * world))


def _log_objects(context: RankContext) -> None:
    dist.all_gather_object([None] * context.world, "object")
    dist.broadcast_object_list(["object"], src=0)
    dist.scatter_object_list([None], ["a"] * context.world if context.rank == 0 else None, src=0)
    dist.barrier()
    dist.monitored_barrier()


def _log_point_to_point(context: RankContext) -> None:
    if context.rank == 0:
        dist.send(torch.ones(3), 1)
        dist.isend(torch.ones(4), dst=1).wait()
    else:
        dist.recv(torch.ones(3), 0)
        dist.irecv(torch.ones(4), src=0).wait()
    to = dist.isend if context.rank == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(to, torch.ones(5), 1 - context.rank)]):
        work.wait()


def _log_groups(context: RankContext) -> None:
    backwards = dist.new_group([1, 0])
    alone = dist.new_group(ranks=[1])
    context.collectives.mark("group")
    dist.all_reduce(torch.ones(3), group=backwards)
    dist.all_reduce(torch.ones(4), dist.ReduceOp.SUM, dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns on the rank that is not in the group.
        dist.all_reduce(torch.ones(5), group=alone)


def _log_agreements(context: RankContext) -> None:
    group = dist.new_group([0, 1])
    dist.broadcast(torch.ones(2), 1)
    dist.broadcast(torch.ones(2), group=group, group_src=1)
    dist.reduce(torch.ones(2), 1, dist.ReduceOp.MIN)
    if context.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.destroy_process_group(group)  # not the default one
    context.collectives.mark("the end")
    dist.destroy_process_group()


def _log_failures(context: RankContext) -> None:
    for wrong in ({}, {"tensor": "text"}, {"tensor": torch.ones(3), "group": "text"}):
        try:
            dist.all_reduce(**wrong)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            continue
        raise RuntimeError(f"all_reduce accepted {wrong}")
    dist.all_reduce(torch.ones(1))


def _log_beginning(context: RankContext) -> None:
    dist.all_reduce(torch.ones(1))
    context.collectives.begin()
    dist.barrier()


_SERIES: dict[str, Callable[[RankContext], None]] = {
    "reductions": _log_reductions,
    "gathers": _log_gathers,
    "objects": _log_objects,
    "point to point": _log_point_to_point,
    "groups": _log_groups,
    "agreements": _log_agreements,
    "failures": _log_failures,
    "beginning": _log_beginning,
}


_ORDERS: dict[str, Callable[[RankContext, bytes, Order], bytes]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and not name.startswith(("__", "_log_")) and callable(function)
}
