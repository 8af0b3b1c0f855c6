"""A process that speaks for a simulated world whose ranks do as they are told; see :mod:`harness.sim.messages`.

A task is JSON, ``{"world": W, "do": name, "rank": R, ...}``: rank R does it in its turn, while all others wait for
theirs. Or ``{"world": W, "reply": ...}``: a WorldReply as plain data, which is what comes back.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist

from harness.launch.rank import RankBroken, RankContext
from harness.sim.messages import RankEvent, RankPart, WorldReply, encode
from harness.sim.turn import Turn

Order = dict[str, Any]


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    def work(task: bytes) -> bytes:
        order = json.loads(task)
        if "reply" in order:
            return encode(msgspec.convert(order["reply"], WorldReply))
        if "raw" in order:
            return order["raw"].encode()
        if order["do"] == "raise":
            raise ZeroDivisionError("planted")
        if "rank" in order:
            in_turn(context, order)
        if order["do"] == "break":
            raise RankBroken(replies([b"kept"] * order["world"]))
        if order["do"] == "group":
            return replies([f"{dist.is_initialized()} {context.backend} {context.device}".encode()])
        return replies([f"{os.getpid()} rank {rank}".encode() for rank in range(order["world"])])

    return work


def replies(payloads: list[bytes]) -> bytes:
    parts = tuple(RankPart(end="replied", payload=payload) for payload in payloads)
    return encode(WorldReply(ranks=parts, trace="a trace", first_failed=None, told=None))


def in_turn(context: RankContext, order: Order) -> None:
    """Every rank has a thread and has had its turn; the last to get it does what is ordered."""
    turn, entered, go = Turn(context.directory, order["world"]), threading.Semaphore(0), threading.Event()

    def rank_waits(rank: int) -> None:
        turn.enter(rank)
        entered.release()
        wait_for_turn()

    def rank_acts() -> None:
        entered.release()
        go.wait()
        turn.enter(order["rank"])
        if "event" in order:
            context.emit(encode(RankEvent(order["rank"], order["event"].encode())))
        if order.get("nobody"):
            turn.enter(None)
        ACTIONS[order["do"]]()

    for rank in range(order["world"]):
        act = rank_acts if rank == order["rank"] else functools.partial(rank_waits, rank)
        threading.Thread(target=act, daemon=True).start()
        entered.acquire()
    go.set()
    wait_for_turn()


def wait_for_turn() -> None:
    threading.Event().wait()


def exits() -> NoReturn:
    os.write(1, b"goodbye\n")
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)


def waits_alone() -> None:
    threading.Event().wait()


def loops() -> None:
    while True:
        pass


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTIONS: dict[str, Callable[[], None]] = {
    "exit": exits,
    "kill": is_killed,
    "crash": crashes,
    "wait": waits_alone,
    "loop": loops,
    "stop": is_stopped,
}
