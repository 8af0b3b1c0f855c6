"""What is kept alive: gradients that were handed over, and bytes of storage, each counted once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.drive.memory import HandedOver, LiveMemory, static_bytes_limit

# --- gradients --------------------------------------------------------------------------------------------------------


def handed_over(*gradients: Tensor) -> HandedOver:
    watched = HandedOver()
    for gradient in gradients:
        watched.add(gradient)
    return watched


def test_gradients_that_nobody_holds_are_gone() -> None:
    watched = handed_over(torch.ones(3), torch.ones(2, 2))

    assert len(watched) == 2
    assert watched.still_alive() == 0


def test_watching_keeps_nothing_alive_and_a_kept_gradient_is_seen() -> None:
    kept, dropped = torch.ones(3), torch.ones(3)
    watched = handed_over(kept, dropped)
    assert watched.still_alive() == 2

    del dropped

    assert len(watched) == 2
    assert watched.still_alive() == 1
    del kept
    assert watched.still_alive() == 0


@pytest.mark.parametrize("view", ["detach", "flat", "slice"])
def test_a_view_keeps_the_whole_gradient(view: str) -> None:
    gradient = torch.ones(4, 4)
    watched = handed_over(gradient)
    kept = {"detach": gradient.detach(), "flat": gradient.view(-1), "slice": gradient[0, :1]}[view]
    del gradient

    assert watched.still_alive() == 1
    del kept
    assert watched.still_alive() == 0


def test_a_copy_keeps_nothing() -> None:
    gradient = torch.ones(4)
    watched = handed_over(gradient)
    copy = gradient.clone()
    del gradient

    assert watched.still_alive() == 0
    assert copy.sum() == 4


def test_garbage_in_a_cycle_is_not_held_against_anyone() -> None:
    """It would be freed at the next collection anyway: it is collected before it is counted."""
    watched = HandedOver()
    gc.disable()
    try:
        cycle: list[object] = [torch.ones(3)]
        cycle.append(cycle)
        watched.add(cycle[0])  # type: ignore[arg-type]
        del cycle
        assert watched.still_alive() == 0
    finally:
        gc.enable()


def test_a_gradient_without_bytes_is_not_watched() -> None:
    """The gradient of an empty parameter holds no memory, whoever keeps it."""
    empty = torch.ones(0, 3)

    watched = handed_over(empty)

    assert len(watched) == 0
    assert watched.still_alive() == 0


# --- live storages ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """What was there before is frozen, as in a rank: fewer objects to look at, and no address of theirs comes free."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def memory(quiet: None) -> LiveMemory:
    """From here on only what the test makes is new."""
    return LiveMemory()


def test_bytes_of_new_tensors_are_counted_as_long_as_they_live(memory: LiveMemory) -> None:
    assert memory.since([]) == 0
    one = torch.ones(1000)
    other = torch.ones(50, dtype=torch.bfloat16)

    assert memory.since([]) == 4100
    del one
    assert memory.since([]) == 100
    assert other.numel() == 50


def test_a_storage_counts_once_and_whole(memory: LiveMemory) -> None:
    """Two views of one storage are its bytes, and a small view keeps all of them."""
    base = torch.ones(1000)
    views = [base[:10], base.view(10, 100), base.detach()]
    del base

    assert memory.since([]) == 4000
    del views[1:]
    assert memory.since([]) == 4000


@pytest.mark.usefixtures("quiet")
def test_what_lies_where_something_was_freed_counts() -> None:
    """An allocator often gives an address again at once; here both tensors are given the same memory."""
    memory_of_both = bytearray(4000)
    before = torch.frombuffer(memory_of_both, dtype=torch.float32)
    address = before.data_ptr()
    memory = LiveMemory()
    assert memory.since([]) == 0
    del before
    after = torch.frombuffer(memory_of_both, dtype=torch.float32)

    assert after.data_ptr() == address
    assert memory.since([]) == 4000


@pytest.mark.usefixtures("quiet")
def test_what_was_there_before_does_not_count() -> None:
    before = torch.ones(1000)
    memory = LiveMemory()
    view = before[:1]

    assert memory.since([]) == 0
    assert view.numel() == 1


def test_garbage_in_a_cycle_is_collected_before_it_is_too_much(memory: LiveMemory) -> None:
    gc.disable()
    try:
        cycle: list[object] = [torch.ones(1000)]
        cycle.append(cycle)
        del cycle
        assert memory.since([], limit=4000) == 4000
        assert memory.since([], limit=3999) == 0
    finally:
        gc.enable()


def test_what_is_named_does_not_count_whichever_view_names_it(memory: LiveMemory) -> None:
    named, other = torch.ones(1000), torch.ones(10)

    assert memory.since([named[3:5]]) == 40
    assert memory.since(iter([named, other])) == 0


def test_parameters_gradients_and_optimizer_state_are_seen(memory: LiveMemory) -> None:
    """Everything ZeRO shards: a subclass of Tensor, its .grad, and what lies in dictionaries as a state does."""
    master = torch.nn.Parameter(torch.zeros(1000))
    assert memory.since([]) == 4000
    master.grad = torch.ones(1000)
    assert memory.since([]) == 8000
    state = {master: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(1000), "exp_avg_sq": torch.zeros(1000)}}

    assert memory.since([]) == 16_004
    assert len(state) == 1


@pytest.mark.parametrize(
    ("shard_len", "numel", "largest", "spilled", "expected"),
    [
        (1000, 3000, 96, False, 16_000 + 768),
        (1000, 3000, 96, True, 16_000 + 768 + 12_000),
        (1, 1, 1, False, 16 + 8),
    ],
)
def test_the_limit_by_hand(shard_len: int, numel: int, largest: int, spilled: bool, expected: int) -> None:
    """Master, gradient, two moments; two buckets of staging; the host vector after a spill; two KiB of small things."""
    limit = static_bytes_limit(shard_len=shard_len, numel=numel, largest_bucket=largest, spilled=spilled)

    assert limit == expected + 2048


def test_tensors_that_only_stand_for_shapes_have_no_memory() -> None:
    """DTensor keeps such ones for as long as its process lives."""
    before = LiveMemory()
    with FakeTensorMode():
        fake = torch.empty(1000)
    kept = torch.ones(10)
    assert before.since(()) == kept.untyped_storage().nbytes()
    assert fake.shape == (1000,)


class Wrapper(Tensor):
    """As a DTensor: it has a shape, and no memory of its own."""

    @staticmethod
    def __new__(cls: type[Tensor], inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError


def test_a_wrapper_has_the_memory_of_what_is_in_it() -> None:
    before = LiveMemory()
    wrapped = Wrapper(torch.ones(10))
    assert before.since(()) == 40
    assert wrapped.inner.numel() == 10
