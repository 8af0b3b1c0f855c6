"""What ``ZeroMaster`` does when memory runs out while it spills, and in which order it touches what is still read.

The same on a GPU, with real streams: tests/gpu/test_zero_master_on_gpu.py. Here streams are stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero2core import ZeroMaster, zero_master
from zero2core.errors import GradientStateError

SHAPES = ((5, 3), (7,), (2, 4))


def built() -> ZeroMaster:
    return ZeroMaster([nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES], 0, 1, bucket=8)


def hand_over(master: ZeroMaster, part: int) -> None:
    for index, param in enumerate(master.params):
        param.grad = torch.full_like(param, float(10 * part + index + 1))


def reduced(master: ZeroMaster) -> Tensor:
    master.reduce_scatter()
    return master.grad_buf.clone()


def step(master: ZeroMaster, num_parts: int) -> Tensor:
    for part in range(num_parts):
        hand_over(master, part)
        master.collect(more=part < num_parts - 1)
    return reduced(master)


class OutOfMemory:
    """Raises at one call; ``num_calls`` so far."""

    def __init__(self, function: Callable[..., Any], at: int) -> None:
        self.function, self.at, self.num_calls = function, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.at:
            raise torch.OutOfMemoryError("no memory left")
        return self.function(*args, **kwargs)


def test_without_memory_for_the_host_vector_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    master = built()
    hand_over(master, 0)
    master.collect(more=False)
    held = master.held
    hand_over(master, 1)
    grads = [param.grad for param in master.params]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", OutOfMemory(torch.empty, 1))
        with pytest.raises(torch.OutOfMemoryError):
            master.collect(more=False)

    assert master.held is held
    assert master.host is None
    assert master.spills == 0
    assert all(param.grad is grad for param, grad in zip(master.params, grads, strict=True))

    master.collect(more=False)  # there is memory again
    assert torch.equal(reduced(master), step(built(), 2))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_fails_before_the_first_part_is_on_the_host_may_be_called_again(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = built()
    step(master, 2)  # what is left in the host vector must not be seen
    hand_over(master, 0)
    with monkeypatch.context() as patched:
        patched.setattr(zero_master, "flat_views", OutOfMemory(zero_master.flat_views, at))
        with pytest.raises(torch.OutOfMemoryError):
            master.collect(more=True)
    assert not master.has_grad

    master.collect(more=True)
    hand_over(master, 1)
    master.collect(more=False)
    assert torch.equal(reduced(master), step(built(), 2))


@pytest.mark.parametrize("at", range(1, 2 * len(SHAPES) + 1))
def test_what_is_held_stays_so_until_all_of_it_and_the_next_part_are_on_the_host(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = built()
    hand_over(master, 0)
    master.collect(more=False)
    held = master.held
    hand_over(master, 1)
    with monkeypatch.context() as patched:
        patched.setattr(zero_master, "flat_views", OutOfMemory(zero_master.flat_views, at))
        with pytest.raises(torch.OutOfMemoryError):
            master.collect(more=False)
    assert (master.held is held, master.spills) == (True, 0)

    master.collect(more=False)
    assert master.spills == 1
    assert torch.equal(reduced(master), step(built(), 2))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_sum_that_may_be_half_added_to_is_never_reduced(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    master = built()
    hand_over(master, 0)
    master.collect(more=True)
    hand_over(master, 1)
    with monkeypatch.context() as patched:
        patched.setattr(zero_master, "flat_views", OutOfMemory(zero_master.flat_views, at))
        with pytest.raises(torch.OutOfMemoryError):
            master.collect(more=False)

    assert not master.has_grad
    assert all(param.grad is not None for param in master.params)
    with pytest.raises(GradientStateError):
        master.reduce_scatter()
    assert torch.equal(step(master, 3), step(built(), 3))


# --- streams ----------------------------------------------------------------------------------------------------------


class Event:
    """``seen``: what the host vector held when somebody waited for the reads of it."""

    def __init__(self, master: ZeroMaster) -> None:
        self.master, self.seen = master, list[Tensor]()

    def synchronize(self) -> None:
        assert self.master.host is not None
        self.seen.append(self.master.host.clone())


class Streams:
    """Stands in for the streams of a GPU."""

    def __init__(self, master: ZeroMaster) -> None:
        self.master, self.events, self.recorded = master, list[Event](), list[Tensor]()

    def record_event(self) -> Event:
        self.events.append(Event(self.master))
        return self.events[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams(built())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: found)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _stream: found.recorded.append(tensor))
    return found


def test_the_host_vector_is_not_written_before_its_queued_reads_are_done(streams: Streams) -> None:
    master = streams.master
    step(master, 1)
    assert not streams.events  # on the CPU nothing is queued

    for part in range(2):
        hand_over(master, part)
        master.collect(more=part == 0)
    master.device = torch.device("cuda")
    master.reduce_scatter()
    assert master.host is not None
    before = master.host.clone()
    (event,) = streams.events
    assert not event.seen

    hand_over(master, 3)
    master.collect(more=True)
    assert torch.equal(event.seen[0], before)
    assert not torch.equal(master.host, before)
    hand_over(master, 4)
    master.collect(more=False)
    assert len(event.seen) == 1  # once is enough


def test_held_gradients_keep_their_memory_until_they_were_read(streams: Streams) -> None:
    master = streams.master
    hand_over(master, 0)
    master.params[1].grad = None
    grads = [param.grad for param in master.params if param.grad is not None]
    master.collect(more=False)
    master.device = torch.device("cuda")
    master.reduce_scatter()

    assert len(streams.recorded) == len(grads) == 2
    assert all(one is other for one, other in zip(streams.recorded, grads, strict=True))
