"""The first process of a job of torchrun, as it talks with the others: orders out, answers and sightings in."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection

import msgspec

from harness.launch.board import Board, BoardGone, Heart, Pulses
from harness.launch.orders import CLOSED, Answer, Order, Sighting, answer_name, bye_name, order_name, sight_name
from harness.launch.outcome import PoolError
from harness.launch.torchrun import Launch

_LEAVE_S = 10.0

_encode = msgspec.msgpack.encode
_answer = msgspec.msgpack.Decoder(Answer).decode
_sighting = msgspec.msgpack.Decoder(Sighting).decode


class Job:
    """Connected to the store while it lives; shows that this process does. To be used from one thread.

    Args:
        launch: The place of this process, which is that of rank 0.

    Attributes:
        followers: The ranks that others look after.

    Raises:
        BoardGone: From every method but :meth:`close`.
    """

    def __init__(self, launch: Launch) -> None:
        self.followers = range(1, launch.world)
        self._launch = launch
        with contextlib.ExitStack() as stack:
            self._board = Board(launch)
            stack.enter_context(Heart(launch))
            self._pulses = Pulses(self._board, self.followers)
            self._stack = stack.pop_all()
        self._num_orders = self._num_removed = 0

    def tell(self, order: Order) -> int:
        """Give an order to all; returns its number."""
        number = self._num_orders
        self._num_orders += 1
        self._board.put(order_name(number), _encode(order))
        return number

    def wait(self, number: int, answers: Collection[int], timeout_s: float) -> None:
        """Until those who are not in ``answers`` have answered an order, at most so long."""
        names = [answer_name(number, rank) for rank in self.followers if rank not in answers]
        if names:
            self._board.wait(names, max(timeout_s, 0.0))

    def collect(self, number: int, answers: dict[int, Answer]) -> bool:
        """Take in who else has answered an order by now; whether all have."""
        missing = [rank for rank in self.followers if rank not in answers]
        for rank in missing:
            said = self._board.take(answer_name(number, rank))
            if said is not None:
                answers[rank] = _answer(said)
        return all(rank in answers for rank in self.followers)

    def sightings(self, number: int, answers: Collection[int]) -> dict[int, Sighting]:
        """What was last seen of the ranks that carry out an order, and are not in ``answers``."""
        found = {rank: self._board.get(sight_name(rank)) for rank in self.followers if rank not in answers}
        seen = {rank: _sighting(said) for rank, said in found.items() if said is not None}
        return {rank: sighting for rank, sighting in seen.items() if sighting.order == number}

    def tidy(self) -> None:
        """Take down all orders: everybody has carried them out."""
        for number in range(self._num_removed, self._num_orders):
            self._board.remove(order_name(number))
        self._num_removed = self._num_orders

    def require_alive(self) -> None:
        """See whether all others live; cheap.

        Raises:
            PoolError: One has left, or been silent for too long.
        """
        require_alive(self._pulses)

    def close(self) -> None:
        """Let the others end, and wait until they have, within a bound."""
        self._stack.close()
        with contextlib.suppress(BoardGone):
            _part(self._board, self._launch)


def require_alive(pulses: Pulses) -> None:
    """See whether others live.

    Raises:
        PoolError: One has left, or been silent for too long.
    """
    lost = pulses.lost()
    if lost is None:
        return
    rank, silent_s = lost
    what = f"rank {rank}: the process that torchrun launched for it"
    if silent_s is None:
        raise PoolError(f"{what} has left; it was asked to end, by a signal")
    raise PoolError(
        f"{what} has not been heard of for {silent_s:.0f} s; it was killed or stopped, or its machine is gone"
    )


def dismiss(launch: Launch) -> None:
    """Let the other processes of a job end that was never taken up; one that has been closed is left as it is."""
    with contextlib.suppress(BoardGone, OSError):
        # A launcher that has ended has taken its store along; torch would try for a minute.
        if not launch.hosts_store:
            socket.create_connection((launch.host, launch.port), _LEAVE_S).close()
        board = Board(launch)
        if board.get(CLOSED) is None:
            _part(board, launch)


def _part(board: Board, launch: Launch) -> None:
    """Say that it is over, and wait until the others have left, within a bound."""
    board.put(CLOSED, b"")
    board.wait([bye_name(rank) for rank in range(1, launch.world)], _LEAVE_S)
