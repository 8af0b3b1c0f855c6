"""The record of collectives, where no group is needed: what it leaves out is told all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.launch import tap


def all_reduce(tensor: Tensor, group: object = None) -> Tensor:
    """Stands for the backend's."""
    return tensor


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = tap._log
    yield
    tap.use(before)


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tapped(function: Callable[..., object]) -> Callable[..., object]:
    return tap._tapped(function, "all_reduce", "all_reduce", "tensor")


def lengths(log: tap.CollectiveLog) -> list[int]:
    return [entry.length for entry in log.entries]


def test_a_call_that_is_not_recorded_is_told() -> None:
    """Or a rank that is slow in what the harness asks of its subject would seem to hang."""
    log = tap.CollectiveLog()
    told: list[int] = []
    log.unrecorded = lambda: told.append(len(log.entries))
    tap.use(log)
    call = tapped(all_reduce)

    with log.paused():
        call(torch.zeros(3))
        call(torch.zeros(3))

    assert told == [0, 0]
    assert log.entries == []


@pytest.mark.usefixtures("_group_of_one")
def test_each_call_is_recorded_in_the_log_in_use() -> None:
    logs = [tap.CollectiveLog(), tap.CollectiveLog()]
    call = tapped(all_reduce)
    for turn, length in ((0, 1), (1, 2), (1, 3), (0, 4)):
        tap.use(logs[turn])
        call(torch.zeros(length))

    assert [lengths(log) for log in logs] == [[1, 4], [2, 3]]


@pytest.mark.usefixtures("_group_of_one")
def test_a_call_belongs_to_the_log_in_use_when_it_was_made() -> None:
    """Another rank has its turn while the call waits; label, mirror and who intercepts are those of the first."""
    one, other = tap.CollectiveLog(), tap.CollectiveLog()
    seen: list[tuple[str, object]] = []
    one.mark("of one")
    one.mirror = lambda entry, _: seen.append(("one", entry.label))
    other.mirror = lambda entry, _: seen.append(("other", entry.label))
    one.intercept = lambda pending: [pending.call(), pending.call()]

    def waits(tensor: Tensor, group: object = None) -> None:
        tap.use(other)  # the others' turn
        tap.use(one)

    tap.use(one)
    tapped(waits)(torch.zeros(2))

    assert (lengths(one), lengths(other)) == ([2, 2], [])
    assert seen == [("one", "of one")] * 2
    tap.use(other)
    tapped(all_reduce)(torch.zeros(5))
    assert (lengths(one), lengths(other)) == ([2, 2], [5])
    assert seen[2:] == [("other", None)]
