"""A launched process that is not the first: does with its rank what the first one orders, and is silent."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable

import msgspec

from harness.errors import UsageError
from harness.launch import process
from harness.launch.board import Board, BoardGone, Heart, Pulses
from harness.launch.orders import (
    CLOSED,
    Answer,
    Disband,
    Do,
    End,
    Form,
    Order,
    Stop,
    answer_name,
    bye_name,
    order_name,
    sight_name,
)
from harness.launch.outcome import PoolError
from harness.launch.post import Post
from harness.launch.torchrun import Launch
from harness.launch.watchdog import TICK_S

_LEADER = 0

_encode = msgspec.msgpack.encode
_order = msgspec.msgpack.Decoder(Order).decode


def follow(launch: Launch) -> str | None:
    """Obey until the first process says that it is over; whatever was started is ended then, on every path.

    Returns:
        None, or why this process ends before that.
    """
    process.set_name(f"z2-follow{launch.rank}")
    try:
        board = Board(launch)
        try:
            with contextlib.closing(_Follower(launch, board)) as follower, Heart(launch):
                return follower.obey_all()
        finally:
            board.put(bye_name(launch.rank), b"")
    except BoardGone as error:
        return str(error)


def be_silent() -> None:
    """Let what this process prints, torch too, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


class _Follower:
    """Obeys one order after the other, while it looks at the rank every ``TICK_S`` and tells what is seen."""

    def __init__(self, launch: Launch, board: Board) -> None:
        self._launch, self._board = launch, board
        self._pulses = Pulses(board, [_LEADER])
        self._post: Post | None = None
        self._number = -1  # of the last order
        self._order: Order | None = None  # that order
        self._answer: Answer | None = None  # to it, once there is one
        self._tick = 0.0

    def close(self) -> None:
        """End what was started."""
        if self._post is not None:
            self._post.close()

    def obey_all(self) -> str | None:
        """Until the end; why, if that is not the first process's doing."""
        while True:
            now = time.monotonic()
            if now >= self._tick:
                self._tick = now + TICK_S
                if self._board.get(CLOSED) is not None:
                    return None
                if self._pulses.lost() is not None:
                    return "the process of rank 0 has not been heard of for too long"
                self._carefully(self._look)
            self._carefully(self._go_on)

    def _carefully(self, do: Callable[[], None]) -> None:
        """What goes wrong is told to the first process, which says so."""
        try:
            do()
        except (PoolError, UsageError) as error:
            self._fail(str(error))
        except BoardGone:
            raise
        except Exception:  # noqa: BLE001 (told where it is read)
            self._fail(traceback.format_exc())

    def _look(self) -> None:
        if self._post is not None and self._post.waits and isinstance(self._order, Do):
            self._board.put(sight_name(self._launch.rank), _encode(self._post.look()))

    def _go_on(self) -> None:
        """Wait for the rank while it does something, else for the next order; at most until the next tick."""
        post, left_s = self._post, max(self._tick - time.monotonic(), 0.0)
        if post is not None and post.usable:  # else the next order is answered with what went wrong
            waits = post.waits
            post.attend(left_s if waits else 0.0)
            self._tell_what_became(post)
            if waits and not post.waits:
                return
        name = order_name(self._number + 1)
        if post is None or not post.waits:
            self._board.wait([name], left_s)
        said = self._board.get(name)
        if said is not None:
            self._number, self._order, self._answer = self._number + 1, _order(said), None
            self._obey(self._order)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Form):
            if self._post is None:
                self._post = Post(self._launch, order)
            self._post.form(order.generation)
        elif self._post is None:
            raise PoolError("there is no rank that could be told to do anything")
        else:
            self._tell(self._post, order)

    def _tell(self, post: Post, order: Do | Stop | End | Disband) -> None:
        post.attend(0.0)  # for what has happened while the order was waited for
        match order:
            case Do() if post.lost:
                post.disband()
                self._say(Answer(time.time(), lost=True))
            case Do():
                post.begin(order, self._number)
            case Stop():
                self._say(post.stop(order))
            case End():
                self._say(post.end())
            case Disband():
                post.disband()

    def _tell_what_became(self, post: Post) -> None:
        """Of the order to start the rank, or to have it do something; of the latter again, if the rank then ends."""
        if isinstance(self._order, Form) and post.joined and self._answer is None:
            self._say(Answer(time.time()))
        elif isinstance(self._order, Do) and post.finished:
            answer = post.answer()
            if self._answer is None or self._answer.report != answer.report:
                self._say(answer)

    def _fail(self, problem: str) -> None:
        where = f" on node {self._launch.node}" if self._launch.num_nodes > 1 else ""
        if self._answer is None or self._answer.problem is None:  # the first one counts
            self._say(Answer(time.time(), problem=f"rank {self._launch.rank}{where}: {problem}"))

    def _say(self, answer: Answer) -> None:
        self._answer = answer
        self._board.put(answer_name(self._number, self._launch.rank), _encode(answer))
