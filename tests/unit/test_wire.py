"""Framing: what is sent arrives whole, in order and once, however the bytes are cut, or an error says so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from harness.launch import wire
from harness.launch.wire import Channel, Frame, Kind, WireError

SIZES = [0, 1, 10, 11, 65_525, 65_536, 65_537, 300_000]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """A sender that blocks and a receiver that does not."""
    left, right = socket.socketpair()
    right.setblocking(False)
    with left, right:
        yield Channel(left), Channel(right)


def message(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


def send_in_background(sender: Channel, frames: list[Frame]) -> threading.Thread:
    def send_all() -> None:
        for frame in frames:
            sender.send(frame.kind, frame.payload)
        sender.close()

    thread = threading.Thread(target=send_all)
    thread.start()
    return thread


def test_messages_of_all_sizes_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    """Empty, short, just as long as a chunk, and longer ones, several of them in one read."""
    sender, receiver = ends
    frames = [Frame(kind, message(size)) for size in SIZES for kind in (Kind.EVENT, Kind.REPLY)]

    thread = send_in_background(sender, frames)
    received: list[Frame] = []
    while not receiver.ended:
        received += receiver.receive()
    thread.join()

    assert received == frames


@pytest.mark.parametrize("cut", range(1, 30))
def test_messages_arrive_however_they_are_cut(ends: tuple[Channel, Channel], cut: int) -> None:
    """A header or a payload may come in pieces; nothing is delivered before it is whole."""
    sender, receiver = ends
    copy_from, copy_to = socket.socketpair()
    with copy_from, copy_to:
        Channel(copy_from).send(Kind.EVENT, b"first")
        Channel(copy_from).send(Kind.REPLY, b"and then")
        data = copy_to.recv(1000)

    sender.sock.sendall(data[:cut])
    early = receiver.receive()
    sender.sock.sendall(data[cut:])
    late = receiver.receive()

    assert early + late == [Frame(Kind.EVENT, b"first"), Frame(Kind.REPLY, b"and then")]
    assert len(early) == (cut >= len(data) - len(b"and then") - 11)


def test_a_long_message_comes_in_many_reads_after_a_short_one(ends: tuple[Channel, Channel]) -> None:
    """The tail of one read is the beginning of a long message; the next message follows at once."""
    sender, receiver = ends
    frames = [Frame(Kind.EVENT, b"short"), Frame(Kind.REPLY, message(5_000_000)), Frame(Kind.READY, b"")]

    thread = send_in_background(sender, frames)
    received: list[Frame] = []
    while not receiver.ended:
        received += receiver.receive()
    thread.join()

    assert received == frames


def test_a_sender_that_does_not_block_keeps_what_was_not_taken(ends: tuple[Channel, Channel]) -> None:
    """send() says that not all went out, and flush() sends the rest bit by bit as the reader makes room."""
    reader, writer = ends[0], ends[1]
    reader.sock.setblocking(False)
    first, second = message(3_000_000), message(100)

    complete = writer.send(Kind.TASK, first)
    writer.send(Kind.TASK, second)
    received: list[Frame] = []
    while len(received) < 2:
        received += reader.receive()
        writer.flush()

    assert not complete
    assert received == [Frame(Kind.TASK, first), Frame(Kind.TASK, second)]
    assert writer.flush()


def test_one_call_reads_a_bounded_amount(ends: tuple[Channel, Channel]) -> None:
    """A peer that always has more to say cannot keep the caller from its deadline."""
    sender, receiver = ends
    stop = threading.Event()

    def send_without_end() -> None:
        while not stop.is_set():
            try:
                sender.send(Kind.EVENT, bytes(60_000))
            except (BrokenPipeError, ConnectionResetError):
                return

    thread = threading.Thread(target=send_without_end)
    thread.start()
    try:
        returned = [receiver.receive() for _ in range(20)]
    finally:
        stop.set()
        receiver.close()
        thread.join()

    assert all(len(frames) <= wire._MAX_CALLS * 2 for frames in returned)


def test_the_end_of_the_other_side_is_seen_after_its_last_words(ends: tuple[Channel, Channel]) -> None:
    """Messages sent before the connection ended still arrive."""
    sender, receiver = ends
    sender.send(Kind.REPLY, b"last words")
    sender.close()

    assert receiver.receive() == [Frame(Kind.REPLY, b"last words")]
    assert receiver.ended


def test_a_message_cut_off_by_the_end_is_not_delivered(ends: tuple[Channel, Channel]) -> None:
    """Half a message is none."""
    sender, receiver = ends
    sender.sock.sendall(wire._HEADER.pack(wire._MAGIC, Kind.REPLY, 100) + b"half")
    sender.close()

    assert receiver.receive() == []
    assert receiver.ended


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request",
        wire._HEADER.pack(wire._MAGIC, 99, 0),
        wire._HEADER.pack(wire._MAGIC, Kind.REPLY, wire.MAX_FRAME_BYTES + 1),
    ],
    ids=["other text", "unknown kind", "too long"],
)
def test_what_is_no_message_is_refused(ends: tuple[Channel, Channel], data: bytes) -> None:
    """Bytes of another origin are an error, not a long wait."""
    sender, receiver = ends
    sender.sock.sendall(data)

    with pytest.raises(WireError, match="not a message of this program"):
        receiver.receive()


def test_a_message_too_long_to_send_is_refused(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of it is written."""
    sender, receiver = ends
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)

    with pytest.raises(WireError, match="message of 11 bytes"):
        sender.send(Kind.REPLY, bytes(11))

    assert receiver.receive() == []


def test_writing_to_a_closed_end(ends: tuple[Channel, Channel]) -> None:
    """A side that blocks gets the error; a side that does not, learns of the end when it reads."""
    blocking, other = ends
    other.close()
    with pytest.raises(BrokenPipeError):
        blocking.send(Kind.REPLY, b"x")

    left, right = socket.socketpair()
    right.close()
    left.setblocking(False)
    with left:
        channel = Channel(left)
        assert channel.send(Kind.TASK, b"x")
        assert channel.receive() == []
        assert channel.ended


def test_next_frame_waits_for_one_and_sees_the_end(ends: tuple[Channel, Channel]) -> None:
    """The blocking side's way to read: a frame, then None at the end."""
    reader, writer = ends
    writer.send(Kind.TASK, b"one")

    first = reader.next_frame()
    writer.close()

    assert first == Frame(Kind.TASK, b"one")
    assert reader.next_frame() is None


def test_control_messages_keep_their_bounds_and_descriptors() -> None:
    """Two packets are two messages; a descriptor goes with its own, and is not inherited by programs started later."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed, other = socket.socketpair()
    with left, right, passed, other:
        wire.send_control(left, wire.Fork(7, 1), [passed.fileno()])
        wire.send_control(left, wire.Kill(7))
        first, second = wire.receive_control(right), wire.receive_control(right)
        assert first is not None
        with socket.socket(fileno=first[1][0]) as received:
            received.sendall(b"through")
            through = other.recv(100)
            inheritable = received.get_inheritable()

    assert first[0] == wire.Fork(7, 1)
    assert second == (wire.Kill(7), [])
    assert through == b"through"
    assert not inheritable


def test_control_connections_end_and_refuse_other_bytes() -> None:
    """None at the end; bytes that are no message are an error."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.send(b"\x93hello")
        with pytest.raises(WireError, match="not a control message"):
            wire.receive_control(right)
        left.close()

        assert wire.receive_control(right) is None
