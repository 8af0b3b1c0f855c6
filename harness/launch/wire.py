"""What travels between the processes: frames on stream sockets, small control messages on packet sockets.

A frame is a header (magic, kind, length) and that many bytes. The parent and each rank talk in frames over one
``AF_UNIX`` stream socket; the parent's end does not block, the rank's end does. The parent and the zygote talk in
control messages, one packet each, because a packet keeps the file descriptors sent with it.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

MAX_FRAME_BYTES = 1 << 30
MAX_CONTROL_BYTES = 1 << 16
_HEADER = struct.Struct("<2sBQ")
_MAGIC = b"z2"
_CHUNK_BYTES = 1 << 16
# One call of receive() or flush() ends after this many system calls, so that a peer which never stops sending
# cannot keep the caller from its deadline.
_MAX_CALLS = 64


class WireError(Exception):
    """The bytes on a connection are not frames: somebody else wrote to it, or the two ends differ in version."""


class Kind(enum.IntEnum):
    """What a frame means."""

    HELLO = 1  # to the rank: its Hello, first on the connection
    TASK = 2  # to the rank: the task's bytes
    READY = 3  # from the rank: joined its group and called the handler's set-up
    UNREADY = 4  # from the rank: that raised; the traceback's text
    EVENT = 5  # from the rank: an interim message of the task
    REPLY = 6  # from the rank: the handler returned these bytes
    BROKEN = 7  # from the rank: the handler raised RankBroken with this payload
    BROKEN_REUSABLE = 8  # the same, but the group may still be in step
    RAISED = 9  # from the rank: the handler raised anything else; the traceback's text


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    payload: bytes


class FileMeeting(msgspec.Struct, tag="file"):
    """The ranks of a set meet in a file that all of them can open."""

    path: str


class StoreMeeting(msgspec.Struct, tag="store"):
    """The ranks of a set meet in a store that a launcher hosts, under names that begin with ``prefix``."""

    host: str
    port: int
    prefix: str


class Hello(msgspec.Struct):
    """Everything a rank must know to join: the first frame it reads."""

    rank: int
    world: int
    zygote: int
    backend: str
    device: str  # "cpu", or "cuda": which one, the rank's place on its machine says
    directory: str
    meeting: FileMeeting | StoreMeeting
    log: str
    stacks: str
    environment: dict[str, str]  # what a launcher sets for this rank
    handler: str
    setup: bytes
    preload: list[str]


class Channel:
    """One end of a connection that carries frames; blocks exactly if its socket does.

    Attributes:
        ended: The other end is closed: nothing more will arrive.
        num_bytes: Moved so far, either way.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ended = False
        self.num_bytes = 0
        self._outgoing: deque[memoryview] = deque()
        self._pending = bytearray()  # bytes of a header or of a short frame, not yet complete
        self._body: bytearray | None = None  # the long frame being filled
        self._body_kind = Kind.HELLO
        self._filled = 0

    def fileno(self) -> int:
        """The socket's descriptor, so that a selector takes the channel."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close this end; what was not yet written is dropped."""
        self._outgoing.clear()
        self.sock.close()

    def send(self, kind: Kind, payload: bytes = b"") -> bool:
        """Write one frame, or as much of it as the socket takes now.

        Returns:
            Whether all is written; if not, call :meth:`flush` when the socket is writable.

        Raises:
            OSError: On a blocking socket whose other end is closed.
            WireError: ``payload`` is longer than a frame may be.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise WireError(f"message of {len(payload)} bytes: at most {MAX_FRAME_BYTES} bytes can be sent at once")
        header = _HEADER.pack(_MAGIC, kind, len(payload))
        if len(payload) <= _CHUNK_BYTES:
            self._outgoing.append(memoryview(header + payload))
        else:
            self._outgoing.append(memoryview(header))
            self._outgoing.append(memoryview(payload))
        if self.sock.getblocking():
            while not self.flush():
                pass
            return True
        return self.flush()

    def flush(self) -> bool:
        """Write what is still queued, as far as the socket takes it; True when nothing is left."""
        for _ in range(_MAX_CALLS):
            if not self._outgoing:
                return True
            view = self._outgoing[0]
            try:
                sent = self.sock.send(view)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                if self.sock.getblocking():
                    raise
                # The reader is gone; receive() reports that, and there is nobody left to write to.
                self._outgoing.clear()
                return True
            self.num_bytes += sent
            if sent == len(view):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[sent:]
        return not self._outgoing

    def receive(self) -> list[Frame]:
        """Every frame that has arrived, in order, without waiting (on a socket that does not block).

        Sets :attr:`ended` when the other end is closed. A call reads a bounded amount; more may be waiting.

        Raises:
            WireError: What arrived is not a frame.
        """
        frames: list[Frame] = []
        for _ in range(_MAX_CALLS):
            if not self._read_some(frames):
                break
        return frames

    def next_frame(self) -> Frame | None:
        """Wait for one frame on a blocking socket whose peer sends one at a time; None when the other end is closed."""
        frames: list[Frame] = []
        while not frames:
            if not self._read_some(frames):
                return None
        if len(frames) > 1:
            raise WireError(f"{len(frames)} messages at once: one was expected")
        return frames[0]

    def _read_some(self, frames: list[Frame]) -> bool:
        """One read; appends the frames it completes. False when nothing was there, or the connection ended."""
        try:
            if self._body is None:
                data = self.sock.recv(_CHUNK_BYTES)
                count = len(data)
                self._pending += data
            else:
                count = self.sock.recv_into(memoryview(self._body)[self._filled :])
                self._filled += count
        except BlockingIOError:
            return False
        except ConnectionResetError:
            count = 0
        if count == 0:
            self.ended = True
            return False
        self.num_bytes += count
        if self._body is not None and self._filled == len(self._body):
            frames.append(Frame(self._body_kind, bytes(self._body)))
            self._body = None
        self._split(frames)
        return True

    def _split(self, frames: list[Frame]) -> None:
        """Cut complete frames off the pending bytes; start a body for a long frame that has only begun."""
        while len(self._pending) >= _HEADER.size:
            magic, number, length = _HEADER.unpack_from(self._pending)
            if magic != _MAGIC or number not in _KINDS or length > MAX_FRAME_BYTES:
                raise WireError(f"not a message of this program: it begins with {bytes(self._pending[:32])!r}")
            end = _HEADER.size + length
            if len(self._pending) < end:
                if length > _CHUNK_BYTES:
                    body = bytearray(length)
                    self._filled = len(self._pending) - _HEADER.size
                    body[: self._filled] = self._pending[_HEADER.size :]
                    self._body, self._body_kind = body, _KINDS[number]
                    self._pending.clear()
                return
            frames.append(Frame(_KINDS[number], bytes(self._pending[_HEADER.size : end])))
            del self._pending[:end]


class Configure(msgspec.Struct, tag=True):
    """To the zygote, first: whom to serve and what to import."""

    parent: int
    directory: str
    execute: bool  # start ranks as fresh interpreters, not as forks
    preload: list[str]
    bind_to_main_thread: bool  # while importing, die with the parent's thread; only right if that is its main one


class Fork(msgspec.Struct, tag=True):
    """To the zygote, with the rank's end of its connection: start one rank."""

    group: int
    rank: int


class Kill(msgspec.Struct, tag=True):
    """To the zygote: end every rank of a set, and whatever they started."""

    group: int


class Terminate(msgspec.Struct, tag=True):
    """To the zygote: ask every living rank of a set to end, with SIGTERM."""

    group: int


class Dump(msgspec.Struct, tag=True):
    """To the zygote: let every living rank of a set write its stacks."""

    group: int


class Warmed(msgspec.Struct, tag=True):
    """From the zygote: imported everything, serving."""


class Unusable(msgspec.Struct, tag=True):
    """From the zygote: it could not import everything, or cannot go on, and why."""

    reason: str


class Forked(msgspec.Struct, tag=True):
    """From the zygote: a rank runs."""

    group: int
    rank: int
    pid: int


class Ended(msgspec.Struct, tag=True):
    """From the zygote: a rank has ended and was reaped; a negative code is minus the signal's number."""

    group: int
    rank: int
    code: int


Control = Configure | Fork | Kill | Terminate | Dump | Warmed | Unusable | Forked | Ended
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Control).decode


def send_control(sock: socket.socket, message: Control, descriptors: Sequence[int] = ()) -> None:
    """Send one control message as one packet, with copies of ``descriptors``.

    Raises:
        OSError: The other end is closed, or the packet is too long.
    """
    socket.send_fds(sock, [_encode(message)], descriptors)


def receive_control(sock: socket.socket) -> tuple[Control, list[int]] | None:
    """Wait for one control message and its descriptors (not inheritable); None when the other end is closed.

    Raises:
        BlockingIOError: The socket does not block and nothing is there.
        WireError: The packet is not a control message.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, MAX_CONTROL_BYTES, 1)
    except ConnectionResetError:
        return None
    if not data:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # recv_fds does not pass on the flag that would have it so at once.
    try:
        return _decode(data), list(descriptors)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a control message: {error}") from error
