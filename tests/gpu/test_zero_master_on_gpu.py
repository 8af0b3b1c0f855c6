"""``ZeroMaster`` on one GPU, in this process: streams, the pinned host vector, memory.

With stand-ins for streams, and memory that runs out, the same is in tests/unit/test_spill_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from zero2core import ZeroMaster, sharded_static_bytes

# Long enough for the host to do all that it does meanwhile: 2**30 cycles are half a second or more.
STALL = 2**30
LENGTH = 2**20
MIB = 2**20


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    """Nothing that another test left in torch's cache."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def parameters(num: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(LENGTH, dtype=torch.bfloat16, device="cuda")) for _ in range(num)]


def gradients(part: int, num: int = 3) -> list[Tensor | None]:
    """Of one part: another whole number for each parameter and part."""
    return [
        torch.full((LENGTH,), float(8 * part + index + 1), dtype=torch.bfloat16, device="cuda") for index in range(num)
    ]


def hand_over(master: ZeroMaster, grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(master.params, grads, strict=True):
        param.grad = grad


def spill(master: ZeroMaster, parts: Sequence[Sequence[Tensor | None]]) -> None:
    for number, grads in enumerate(parts):
        hand_over(master, grads)
        master.collect(more=number < len(parts) - 1)


def stall(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """Keep a stream busy; the event is done when it is not any more."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(STALL)
        return torch.cuda.current_stream().record_event()


class ForgetsReads(ZeroMaster):
    """Bug: nothing keeps the memory that is still read."""

    def _note_reads(self) -> None: ...


def expected(*sums: float) -> Tensor:
    return torch.cat([torch.full((LENGTH,), value) for value in sums])


# --- the pinned vector ------------------------------------------------------------------------------------------------


def test_the_host_vector_is_pinned() -> None:
    master = ZeroMaster(parameters(), 0, 1)
    spill(master, [gradients(0), gradients(1)])
    assert master.host is not None
    assert master.host.is_pinned()
    assert master.host.device.type == "cpu"


def _next_step_during_the_copies(cls: type[ZeroMaster], collect: Callable[[ZeroMaster], None]) -> Tensor:
    """The reduced gradient of a step whose copies out of the host vector are queued when the next step is collected."""
    master = cls(parameters(), 0, 1, bucket=LENGTH)
    spill(master, [gradients(0), gradients(1)])
    torch.cuda.synchronize()
    done = stall()
    master.reduce_scatter()
    assert not done.query(), "the stream was not stalled: this shows nothing, make STALL longer"
    collect(master)
    torch.cuda.synchronize()
    return master.grad_buf.cpu()


def _on_another_stream(master: ZeroMaster) -> None:
    ready = [gradients(4), gradients(5)]  # made on the stalled stream; their values do not matter
    with torch.cuda.stream(torch.cuda.Stream()):
        spill(master, ready)


def _with_a_parameter_unused(master: ZeroMaster) -> None:
    # Zeros are written for it, on the host, before any gradient is fetched.
    hand_over(master, [None, *gradients(4)[1:]])
    master.collect(more=True)


@pytest.mark.parametrize("collect", [_on_another_stream, _with_a_parameter_unused])
def test_the_next_step_does_not_write_what_queued_copies_still_read(collect: Callable[[ZeroMaster], None]) -> None:
    wanted = expected(1 + 9, 2 + 10, 3 + 11)
    assert torch.equal(_next_step_during_the_copies(ZeroMaster, collect), wanted)


def test_without_waiting_for_the_queued_copies_they_read_the_next_step() -> None:
    """That the test above can fail."""
    wanted = expected(1 + 9, 2 + 10, 3 + 11)
    assert not torch.equal(_next_step_during_the_copies(ForgetsReads, _with_a_parameter_unused), wanted)


# --- held gradients on another stream ---------------------------------------------------------------------------------


def _memory_used_again_meanwhile(cls: type[ZeroMaster]) -> Tensor:
    """The reduced gradient of a held step, reduced on a stalled stream while the ordinary one makes new tensors."""
    master = cls(parameters(), 0, 1, bucket=LENGTH)
    side = torch.cuda.Stream()
    hand_over(master, gradients(0))
    master.collect(more=False)
    torch.cuda.synchronize()
    done = stall(side)
    with torch.cuda.stream(side):
        master.reduce_scatter()
    assert not done.query(), "the stream was not stalled: this shows nothing, make STALL longer"
    garbage = [torch.full((LENGTH,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
    torch.cuda.synchronize()
    del garbage
    return master.grad_buf.cpu()


def test_held_gradients_that_another_stream_reads_keep_their_memory() -> None:
    assert torch.equal(_memory_used_again_meanwhile(ZeroMaster), expected(1, 2, 3))


def test_without_that_their_memory_is_used_again() -> None:
    """That the test above can fail."""
    assert not torch.equal(_memory_used_again_meanwhile(ForgetsReads), expected(1, 2, 3))


# --- memory -----------------------------------------------------------------------------------------------------------

NUM = 2**24
SLACK = 8 * MIB
"""For two chunks of the norm, step counters, and what torch's allocator rounds up."""


class Peak:
    """Most bytes of tensors on the GPU during a block, beyond what there was at construction."""

    def __init__(self) -> None:
        self.before = torch.cuda.memory_allocated()

    def during(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("world", range(1, 9))
def test_the_peak_of_a_step_is_what_the_formula_says(world: int, num_parts: int) -> None:
    peak = Peak()
    shape = (8, NUM // 8)
    params = [nn.Parameter(torch.zeros(shape[1], dtype=torch.bfloat16, device="cuda")) for _ in range(shape[0])]
    bucket = 2**20
    master = ZeroMaster(params, 0, 1, bucket=bucket, sim_world=world if world > 1 else 0)
    optimizer = torch.optim.AdamW([master.master], foreach=False)
    for param in params:
        param.grad = torch.ones_like(param)
    master.collect(more=False)
    master.reduce_scatter()
    optimizer.step()  # now there are moments

    def step() -> None:
        for part in range(num_parts):
            for param in params:
                param.grad = torch.ones_like(param)
            master.collect(more=part < num_parts - 1)
        master.reduce_scatter()
        master.grad_sq_norm()
        master.gather_params()

    weights = 2 * NUM
    staging = 2 * 4 * bucket if world > 1 else 0
    formula = sharded_static_bytes(NUM, 0, weights, world) + staging
    measured = peak.during(step)
    assert formula - SLACK <= measured <= formula + SLACK, (measured, formula)


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes beyond what torch has taken from the GPU so far."""

    def leave(num_bytes: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


class ConvertsOnTheGpu(ZeroMaster):
    """Bug: gradients become fp32 before they leave the GPU."""

    def collect(self, more: bool) -> None:
        for param in self.params:
            if param.grad is not None:
                param.grad.float().cpu()
        super().collect(more)


def _peak_of_spilling(cls: type[ZeroMaster]) -> int:
    master = cls(parameters(), 0, 1, bucket=LENGTH)
    parts = [gradients(0), gradients(1)]
    peak = Peak().during(lambda: spill(master, parts))
    assert master.host is not None
    assert torch.equal(master.host, expected(10, 12, 14))
    return peak


def test_spilling_takes_no_memory_on_the_gpu() -> None:
    assert _peak_of_spilling(ZeroMaster) == 0
    assert _peak_of_spilling(ConvertsOnTheGpu) >= 4 * LENGTH  # that the line above can fail


def test_memory_that_runs_out_while_spilling_leaves_a_usable_object(
    little_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = ZeroMaster(parameters(), 0, 1, bucket=LENGTH)
    # A strided gradient is gathered on the GPU, a chunk at a time: that needs memory, of which there is none.
    strided = torch.full((LENGTH, 64), 1.0, dtype=torch.bfloat16, device="cuda")[:, 0]
    first, second = gradients(0), [strided, *gradients(1)[1:]]
    hand_over(master, first)
    master.collect(more=True)
    hand_over(master, second)
    little_memory(0)
    real = torch.Tensor.to

    def to(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args == ("cpu",) and not tensor.is_contiguous():
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # what a larger chunk would take
        return real(tensor, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        master.collect(more=False)
    monkeypatch.undo()
    torch.cuda.set_per_process_memory_fraction(1.0)

    assert not master.has_grad
    assert all(param.grad is not None for param in master.params)
    spill(master, [gradients(0), gradients(1)])
    master.reduce_scatter()
    assert torch.equal(master.grad_buf.cpu(), expected(10, 12, 14))


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_gathered_weights_are_rounded_as_integers_say() -> None:
    """Ties, subnormals, the largest and inf: to nearest, ties to even. Of a nan that it is one."""
    from harness.oracles.order import round_bf16

    highs = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([highs | low for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).to(torch.int32)
    params = [nn.Parameter(torch.zeros(bits.numel(), dtype=torch.bfloat16, device="cuda"))]
    master = ZeroMaster(params, 0, 1)
    with torch.no_grad():
        master.master.copy_(bits.view(torch.float32))
    master.gather_params()
    seen = params[0].detach().float().cpu()
    wanted = torch.from_numpy(round_bf16(bits.view(torch.float32).numpy()))
    nan = wanted.isnan()
    assert torch.equal(seen.isnan(), nan)
    assert torch.equal(seen[~nan].view(torch.int32), wanted[~nan].view(torch.int32))
