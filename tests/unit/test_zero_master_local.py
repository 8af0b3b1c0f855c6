"""ZeroMaster in one process: world 1, simulated ranks, and collectives replaced by fakes. No process is started.

World 1 goes through the same layout, staging-free, and must already equal an unsharded AdamW trainer bit for bit.
What only real ranks show is in tests/ranks/test_zero_master.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero2core import GradientStateError, SimulationError, ZeroMaster, broadcast_module, collectives
from zero2core.agreement import first_difference

SHAPES = [(5, 3), (), (0,), (7,), (2, 3, 0), (4, 3, 2, 2), (1,)]  # 72 elements
DTYPES = {
    "bf16": [torch.bfloat16],
    "fp32": [torch.float32],
    "mixed": [torch.bfloat16, torch.float32, torch.float16, torch.float64],
}


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Multiples of 2**-7 that are exact in bf16, with sums of a few that are not."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-255, 256, tuple(shape), generator=generator).float() * 2**-7


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    *,
    strided: bool = False,
) -> list[nn.Parameter]:
    """Parameters of these shapes; ``strided``: matrices transposed, four dimensions channels-last."""
    made = []
    for index, shape in enumerate(shapes):
        weight = values(shape, index).to(dtypes[index % len(dtypes)])
        if strided and weight.dim() == 2:
            weight = weight.t().contiguous().t()
        elif strided and weight.dim() == 4:
            weight = weight.to(memory_format=torch.channels_last)
        made.append(nn.Parameter(weight))
    return made


def fill_grads(params: Sequence[nn.Parameter], seed: int, none: Sequence[int] = ()) -> list[Tensor]:
    """Set ``.grad`` of every parameter but those in ``none``; returns what the gradients count as (zeros for None)."""
    counted = []
    for index, param in enumerate(params):
        grad = values(param.shape, 1000 * seed + index).to(param.dtype)
        param.grad = None if index in none else torch.empty_like(param, requires_grad=False).copy_(grad)
        counted.append(torch.zeros(param.shape) if index in none else grad.float())
    return counted


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """End to end, row-major, fp32."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (actual, expected)]
    return torch.equal(*bits)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("bucket", [1, 8, 72, 1000])
def test_world_1_trains_bit_for_bit_like_an_unsharded_trainer(
    bucket: int, dtypes: list[torch.dtype], strided: bool, foreach: bool
) -> None:
    params, twins = parameters(dtypes=dtypes, strided=strided), parameters(dtypes=dtypes, strided=strided)
    storages = [param.data_ptr() for param in params]
    zero = ZeroMaster(params, 0, 1, bucket=bucket)
    masters = [nn.Parameter(twin.detach().float()) for twin in twins]
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "foreach": foreach}
    optimizer, reference = torch.optim.AdamW([zero.master], **settings), torch.optim.AdamW(masters, **settings)
    for step, num_parts in enumerate([1, 3, 1, 2]):
        sums = [torch.zeros(param.shape) for param in params]
        for part in range(num_parts):
            for total, grad in zip(sums, fill_grads(params, 10 * step + part, none=(part, 3)), strict=True):
                total += grad
            zero.collect(more=part + 1 < num_parts)
        zero.reduce_scatter()

        assert same_bits(zero.grad_buf, flat(sums))
        assert zero.master.grad is zero.grad_buf
        assert zero.grad_sq_norm().item() == flat(sums).double().square().sum().item()

        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        optimizer.step()
        reference.step()
        zero.gather_params()
        with torch.no_grad():
            for twin, master in zip(twins, masters, strict=True):
                twin.copy_(master)

        assert same_bits(zero.full_master(), flat(masters))
        assert all(same_bits(param, twin) for param, twin in zip(params, twins, strict=True))
    assert [param.data_ptr() for param in params] == storages
    assert [param.stride() for param in params] == [twin.stride() for twin in twins]


# Gradients that wait


def test_one_part_holds_the_very_tensors_and_reducing_releases_them() -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1, bucket=8)
    fill_grads(params, 1, none=(3,))
    grads = [weakref.ref(param.grad) for param in params if param.grad is not None]
    expected = [param.grad for param in params]
    zero.collect(more=False)

    assert zero.held is not None
    assert all(held is grad for held, grad in zip(zero.held, expected, strict=True))
    assert zero.host is None
    assert all(param.grad is None for param in params)

    del expected
    zero.reduce_scatter()

    assert len(grads) == len(params) - 1
    assert all(grad() is None for grad in grads)


def test_spilled_gradients_are_released_at_once() -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    fill_grads(params, 1)
    grads = [weakref.ref(param.grad) for param in params if param.grad is not None]
    zero.collect(more=True)

    assert zero.held is None
    assert all(param.grad is None for param in params)
    assert len(grads) == len(params)
    assert all(grad() is None for grad in grads)


@pytest.mark.parametrize(
    ("parts", "spills"),
    [
        ([("some", False)], 0),
        ([("none", True), ("some", False)], 0),
        ([("none", True), ("some", False), ("none", True), ("none", False)], 0),
        ([("some", True)], 1),
        ([("some", True), ("some", True), ("some", False)], 1),
        ([("some", False), ("some", False)], 1),
        ([("none", False)], 0),
    ],
)
def test_spills_count_steps_that_moved_to_the_host(parts: list[tuple[str, bool]], spills: int) -> None:
    """A part without gradients is no part; one may follow the part announced as the last."""
    params = parameters()
    zero = ZeroMaster(params, 0, 1, bucket=8)
    for _ in range(2):
        total = torch.zeros(zero.N)
        for seed, (kind, more) in enumerate(parts):
            if kind == "some":
                total += flat(fill_grads(params, seed))
            zero.collect(more)

        assert zero.has_grad == zero.has_grad_anywhere() == any(kind == "some" for kind, _ in parts)

        zero.reduce_scatter()

        assert torch.equal(zero.grad_buf, total)
        assert not zero.has_grad
    assert zero.spills == 2 * spills


def test_the_host_vector_is_allocated_at_the_first_spill_and_kept() -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    seen = []
    for seed in range(2):
        fill_grads(params, seed)
        zero.collect(more=True)
        assert zero.host is not None
        seen.append(zero.host)
        zero.reduce_scatter()

    assert seen[0] is seen[1] is zero.host
    assert seen[0].dtype == torch.float32
    assert seen[0].shape == (zero.N,)


def test_the_host_vector_is_not_written_while_a_queued_copy_may_read_it() -> None:
    """On CUDA the copies of the last reduction are still queued when the next step begins; here an event stands in."""

    class Event:
        """Records what the host vector held when it was waited for."""

        def __init__(self, host: Tensor) -> None:
            self.host, self.seen = host, torch.empty(0)

        def synchronize(self) -> None:
            self.seen = self.host.clone()

    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    first = flat(fill_grads(params, 1))
    zero.collect(more=True)
    zero.reduce_scatter()
    assert zero.host is not None
    zero._host_read = event = Event(zero.host)  # type: ignore[assignment]
    second = flat(fill_grads(params, 2))
    zero.collect(more=True)

    assert torch.equal(event.seen, first)
    assert torch.equal(zero.host, second)
    assert zero._host_read is None


def test_a_parameter_absent_from_this_steps_spill_does_not_inherit_the_last_steps_sum() -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    for none in ((), (0,)):
        expected = fill_grads(params, 1, none)
        zero.collect(more=True)
        zero.reduce_scatter()

        assert torch.equal(zero.grad_buf, flat(expected))


def test_parts_are_summed_in_fp32_in_the_order_they_come() -> None:
    params = parameters([(3,)])
    zero = ZeroMaster(params, 0, 1)
    parts = [[1.0, 2.0**24, 1.0], [2.0**-8, 1.0, -1.0], [2.0**-9, 1.0, 2.0**-20]]
    total = torch.zeros(3)
    for part in parts:
        params[0].grad = torch.tensor(part, dtype=torch.bfloat16)
        total += torch.tensor(part)
        zero.collect(more=True)
    zero.reduce_scatter()

    assert total.tolist() == [1.0 + 2.0**-8 + 2.0**-9, 2.0**24, 2.0**-20]
    assert same_bits(zero.grad_buf, total)


def test_an_fp64_gradient_is_rounded_to_fp32_before_it_is_added() -> None:
    params = parameters([(1,)], [torch.float64])
    zero = ZeroMaster(params, 0, 1)
    first, second = 1.0, 2.0**-24 + 2.0**-49  # in fp64 the sum rounds up in fp32, after rounding it ties to even
    for part in (first, second):
        params[0].grad = torch.tensor([part], dtype=torch.float64)
        zero.collect(more=True)
    zero.reduce_scatter()

    assert torch.tensor(first + second, dtype=torch.float64).float().item() == 1.0 + 2.0**-23
    assert zero.grad_buf.item() == 1.0


@pytest.mark.parametrize("more", [False, True])
def test_a_gradient_may_have_another_dtype_and_other_strides_than_its_parameter(more: bool) -> None:
    params = parameters([(5, 3), (4,)])
    expected = [torch.randn(3, 5).t(), torch.randn(1).expand(4)]
    for param, grad in zip(params, expected, strict=True):
        param.grad_dtype = None
        param.grad = grad
    zero = ZeroMaster(params, 0, 1, bucket=4)
    zero.collect(more)
    zero.reduce_scatter()

    assert same_bits(zero.grad_buf, flat(expected))


def test_a_sparse_gradient_is_refused_and_nothing_is_taken() -> None:
    params = parameters([(4, 2), (3,)], [torch.float32])
    zero = ZeroMaster(params, 0, 1)
    fill_grads(params, 1)
    assert params[0].grad is not None
    params[0].grad = params[0].grad.to_sparse()

    with pytest.raises(ValueError, match=r"params\[0\], shape \(4, 2\), has layout torch.sparse_coo"):
        zero.collect(more=False)
    assert all(param.grad is not None for param in params)
    assert not zero.has_grad


@pytest.mark.parametrize("parts", [[False], [True], [False, True]])
def test_discard_forgets_what_waits_and_the_optimizer_then_moves_nothing(parts: list[bool]) -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    optimizer = torch.optim.AdamW([zero.master], lr=0.1, weight_decay=0.1)
    fill_grads(params, 0)
    zero.collect(more=False)
    zero.reduce_scatter()
    for more in parts:
        fill_grads(params, 1)
        zero.collect(more)
    fill_grads(params, 2)
    spills = zero.spills
    zero.discard()

    assert not zero.has_grad
    assert zero.held is None
    assert zero.spills == spills == (1 if True in parts else 0)
    assert all(param.grad is None for param in params)
    assert zero.master.grad is None

    before = zero.master.detach().clone()
    optimizer.step()

    assert same_bits(zero.master, before)

    expected = fill_grads(params, 3)
    zero.collect(more=False)
    zero.reduce_scatter()

    assert same_bits(zero.grad_buf, flat(expected))


# Calls out of order


def test_reducing_without_a_collect_since_the_last_reduction_or_discard_raises() -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    with pytest.raises(GradientStateError, match="without a collect"):
        zero.reduce_scatter()
    zero.collect(more=False)
    zero.reduce_scatter()
    reduced = zero.grad_buf.clone()

    with pytest.raises(GradientStateError, match="without a collect"):
        zero.reduce_scatter()
    assert zero.master.grad is zero.grad_buf
    assert same_bits(zero.grad_buf, reduced)

    zero.collect(more=False)
    zero.discard()
    with pytest.raises(GradientStateError, match="without a collect"):
        zero.reduce_scatter()


@pytest.mark.parametrize("undo", [ZeroMaster.discard, lambda zero: setattr(zero.master, "grad", None)])
def test_the_norm_of_no_reduction_raises(undo: Callable[[ZeroMaster], None]) -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    with pytest.raises(GradientStateError, match="without a reduced gradient"):
        zero.grad_sq_norm()
    fill_grads(params, 1)
    zero.collect(more=False)
    with pytest.raises(GradientStateError, match="without a reduced gradient"):
        zero.grad_sq_norm()
    zero.reduce_scatter()
    assert zero.grad_sq_norm() > 0
    undo(zero)
    with pytest.raises(GradientStateError, match="without a reduced gradient"):
        zero.grad_sq_norm()


# Norm


def test_the_norm_is_fp64_and_sees_the_scaled_gradient() -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1)
    total = flat(fill_grads(params, 1)).double().square().sum().item()
    zero.collect(more=False)
    zero.reduce_scatter()
    norm = zero.grad_sq_norm()

    assert norm.shape == ()
    assert norm.dtype == torch.float64
    assert norm.item() == total > 0

    assert zero.master.grad is not None
    zero.master.grad.mul_(0.5)

    assert zero.grad_sq_norm().item() == total / 4


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2.0**127, 4 * 2.0**254), (2.0**-149, 4 * 2.0**-298), (float("inf"), float("inf"))],
    ids=["largest power", "smallest subnormal", "inf"],
)
def test_squares_neither_overflow_nor_vanish(value: float, expected: float) -> None:
    params = parameters([(4,)], [torch.float32])
    zero = ZeroMaster(params, 0, 1)
    params[0].grad = torch.full((4,), value)
    zero.collect(more=False)
    zero.reduce_scatter()

    assert zero.grad_sq_norm().item() == expected


@pytest.mark.parametrize("strided", [False, True])
def test_tensors_longer_than_the_chunks_they_are_converted_in_are_summed_whole(strided: bool) -> None:
    """Sums and squares in chunks of 2**18 elements: two full ones and a short one, in parameters of 2 and 1 chunks."""
    params = parameters([(3, 100_001), (250_000,)], strided=strided)
    zero = ZeroMaster(params, 0, 1, bucket=300_000)
    total = torch.zeros(zero.N)
    for seed in range(3):
        total += flat(fill_grads(params, seed))
        zero.collect(more=True)
    zero.reduce_scatter()

    assert 2 * 2**18 < zero.N < 3 * 2**18
    assert same_bits(zero.grad_buf, total)
    assert zero.grad_sq_norm().item() == total.double().square().sum().item()


# Weights


def test_gather_rounds_to_nearest_ties_to_even() -> None:
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8])
    params = parameters([(4,)])
    zero = ZeroMaster(params, 0, 1)
    with torch.no_grad():
        zero.master.copy_(ties)
    zero.gather_params()

    assert params[0].tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0]


def test_refresh_rebuilds_the_master_from_weights_that_were_changed_from_outside() -> None:
    params = parameters(dtypes=DTYPES["mixed"], strided=True)
    zero = ZeroMaster(params, 0, 1, bucket=8)
    with torch.no_grad():
        for param in params:
            param.mul_(-2)
    zero.refresh_from_weights()

    assert same_bits(zero.full_master(), flat(params))


def test_gather_marks_weights_as_changed_for_autograd() -> None:
    params = parameters([(3,)], [torch.float32])
    zero = ZeroMaster(params, 0, 1)
    loss = (params[0] * params[0]).sum()
    zero.gather_params()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Simulated ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_simulated_rank_has_the_layout_of_rank_0_and_updates_only_its_own_pieces(world: int) -> None:
    params = parameters()
    zero = ZeroMaster(params, 0, 1, bucket=8, sim_world=world)

    assert (zero.sim, zero.comm, zero.rank, zero.world) == (True, False, 0, world)
    assert zero.shard_len == zero.layout.shard_len == zero.master.numel() < zero.N

    before, grads = flat(params), flat(fill_grads(params, 1))
    zero.collect(more=False)
    zero.reduce_scatter()
    norm = zero.grad_sq_norm().item()
    with torch.no_grad():
        zero.master.add_(1.0)
    zero.gather_params()
    after = flat(params)
    own = torch.zeros(zero.N, dtype=torch.bool)
    for start, stop, offset in zero.layout.segments(0):
        own[start:stop] = True
        assert torch.equal(zero.grad_buf[offset : offset + stop - start], grads[start:stop])

    assert norm == grads[own].double().square().sum().item()
    assert same_bits(after[own], (before[own] + 1).bfloat16().float())
    assert same_bits(after[~own], before[~own])


def test_a_simulated_rank_refuses_to_invent_the_other_pieces() -> None:
    zero = ZeroMaster(parameters(), 0, 1, sim_world=4)

    with pytest.raises(SimulationError, match="pieces of rank 0 of 4"):
        zero.full_master()


def test_world_1_and_simulated_ranks_issue_no_collective() -> None:
    for zero in (ZeroMaster(parameters(), 0, 1), ZeroMaster(parameters(), 0, 1, sim_world=3)):
        assert zero.expected_collectives("__init__") == zero.expected_collectives("reduce_scatter") == ()
        assert not zero.has_grad_anywhere()


# Refusals


def frozen() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 3), requires_grad=False)


def of_dtype(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 3, dtype=dtype), requires_grad=dtype.is_complex)


REFUSED: dict[str, tuple[Callable[[], list[nn.Parameter]], str]] = {
    "none": (list, "params is empty"),
    "no elements": (
        lambda: parameters([(0,), (3, 0)]),
        r"no elements at all \(params\[0\] \(0,\), params\[1\] \(3, 0\)",
    ),
    "twice": (
        lambda: [*(twice := parameters([(2, 3), (1,)])), twice[0]],
        r"params\[2\], shape \(2, 3\), is params\[0\]",
    ),
    "sparse": (
        lambda: [*parameters([(1,)]), nn.Parameter(torch.zeros(2, 3).to_sparse())],
        r"params\[1\], shape \(2, 3\), has layout torch.sparse_coo",
    ),
    "complex": (
        lambda: [of_dtype(torch.complex64)],
        r"params\[0\], shape \(2, 3\), has dtype torch.complex64.*complex",
    ),
    "integer": (lambda: [of_dtype(torch.int32)], r"params\[0\], shape \(2, 3\), has dtype torch.int32"),
    "other device": (
        lambda: [*parameters([(1,)]), nn.Parameter(torch.zeros(2, 3, device="meta"))],
        r"params\[1\], shape \(2, 3\), is on meta, but params\[0\] is on cpu",
    ),
    "frozen": (lambda: [frozen()], r"params\[0\], shape \(2, 3\), does not require gradients"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_parameters_that_cannot_be_sharded_are_refused_by_index_and_shape(
    make: Callable[[], list[nn.Parameter]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroMaster(make(), 0, 1)


@pytest.mark.parametrize(
    ("rank", "world", "more", "message"),
    [
        (0, 0, {}, "world=0"),
        (1, 1, {}, "rank=1 is outside world=1"),
        (-1, 2, {}, "rank=-1 is outside world=2"),
        (0, 2, {}, "world=2 needs a process group and there is none"),
        (0, 1, {"bucket": 0}, "bucket=0"),
        (0, 1, {"sim_world": -2}, "sim_world=-2"),
        (0, 2, {"sim_world": 4}, "sim_world=4 simulates on one process: world must be 1, not 2"),
    ],
)
def test_places_that_do_not_exist_are_refused(rank: int, world: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroMaster(parameters(), rank, world, **more)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default process group whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_rank_and_world_that_are_not_the_groups_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="rank=1, world=2, but in the process group this process is rank 0 of 1"):
        ZeroMaster(parameters(), 1, 2)
    assert ZeroMaster(parameters(), 0, 1).comm is False


@pytest.mark.usefixtures("group_of_one")
def test_the_groups_device_is_found_without_asking_for_the_backends_name() -> None:
    assert collectives.group_device(None) == torch.device("cpu")


def test_the_first_line_in_which_any_rank_differs_is_named() -> None:
    message = first_difference([["a", "b"], ["a", "b", "c"], ["a", "x"]])

    assert "rank 0: b" in message
    assert "rank 2: x" in message
    assert "rank 0: nothing more" in first_difference([["a"], ["a", "c"]])


def test_broadcast_does_nothing_without_a_group_and_refuses_a_rank_that_does_not_exist() -> None:
    module = nn.Linear(2, 2)
    before = flat(list(module.parameters()))
    broadcast_module(module)

    assert same_bits(flat(list(module.parameters())), before)
    with pytest.raises(ValueError, match="src=1 is not a rank of the process group of 1"):
        broadcast_module(module, src=1)


# Cost


class Allocations(TorchDispatchMode):
    """Records the bytes of every storage that an operation newly allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.num_bytes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("sim_world", [0, 2])
def test_a_step_allocates_nothing_of_the_size_of_a_shard_a_bucket_or_a_parameter(sim_world: int) -> None:
    """But for the host vector, once; the fp64 chunks of the norm are 2 MiB, here a quarter of the shard's bytes."""
    numel = 2**21 * max(sim_world, 1)  # a shard of 2**21 elements, 8 MiB
    params = [nn.Parameter(torch.zeros(2, numel // 2, dtype=torch.bfloat16).t()), *parameters([(3,)])]
    zero = ZeroMaster(params, 0, 1, bucket=numel // 4, sim_world=sim_world)
    for step in range(2):
        for more in (True, False):
            fill_grads(params[1:], 1)
            params[0].grad = torch.ones_like(params[0])
            with Allocations() as collecting:
                zero.collect(more)
            spilled_now = [size for size in collecting.num_bytes if size == 4 * zero.N]
            assert len(spilled_now) == (1 if step == 0 and more else 0)
            assert max(size for size in collecting.num_bytes if size != 4 * zero.N) <= 4 * 2**18
        with Allocations() as reducing:
            zero.reduce_scatter()
        with Allocations() as norm:
            zero.grad_sq_norm()
        with Allocations() as gathering:
            zero.gather_params()

        assert max(reducing.num_bytes, default=0) <= 8
        assert max(gathering.num_bytes, default=0) <= 8
        assert max(norm.num_bytes) == 8 * 2**18 <= 4 * zero.shard_len // 4


class InFlight:
    """A collective that reads its input and writes its output only when it is waited for, as a slow network would."""

    def __init__(self, log: list[str], name: str, output: Tensor, source: Tensor, finish: Callable[[], None]) -> None:
        self._log, self._name, self._source, self._finish = log, name, source, finish
        self._sent = source.clone()
        log.append(f"start {name}")
        output.fill_(torch.nan)

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")
        if not same_bits(self._source, self._sent):
            raise RuntimeError(f"{self._name}: its input was overwritten while it was in flight")
        self._finish()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[ZeroMaster, list[nn.Parameter], list[str]]:
    """Rank 0 of 2 over fake collectives in which the other rank always holds the same as this one."""
    log: list[str] = []

    def reduce_scatter(output: Tensor, source: Tensor, *, group: object) -> InFlight:
        sent = source.clone()
        return InFlight(log, f"reduce {log_index('reduce')}", output, source, lambda: finish(output, 2 * sent))

    def all_gather(output: Tensor, source: Tensor, *, group: object) -> InFlight:
        sent = source.clone()
        return InFlight(log, f"gather {log_index('gather')}", output, source, lambda: finish(output, sent.repeat(2)))

    def finish(output: Tensor, whole: Tensor) -> None:
        output.copy_(whole[: output.numel()])

    def log_index(kind: str) -> int:
        return sum(entry.startswith(f"start {kind}") for entry in log)

    monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(collectives, "all_gather", all_gather)
    params = parameters()
    zero = ZeroMaster(params, 0, 1, bucket=16, sim_world=2)
    zero.comm = True
    return zero, params, log


@pytest.mark.parametrize("more", [False, True])
def test_one_bucket_is_filled_while_the_last_is_in_flight_and_none_is_overwritten(
    two_ranks: tuple[ZeroMaster, list[nn.Parameter], list[str]], more: bool
) -> None:
    """gloo hides an input that is overwritten too early; a collective that works only when waited for does not."""
    zero, params, log = two_ranks
    expected = 2 * flat(fill_grads(params, 1))
    zero.collect(more)
    zero.reduce_scatter()

    assert len(zero.buckets) == 5
    assert log == [
        *("start reduce 0", "start reduce 1", "wait reduce 0", "start reduce 2", "wait reduce 1"),
        *("start reduce 3", "wait reduce 2", "start reduce 4", "wait reduce 3", "wait reduce 4"),
    ]
    for start, stop, offset in zero.layout.segments(0):
        assert same_bits(zero.grad_buf[offset : offset + stop - start], expected[start:stop])


def test_gathered_weights_are_read_only_after_their_wait(
    two_ranks: tuple[ZeroMaster, list[nn.Parameter], list[str]],
) -> None:
    zero, params, log = two_ranks
    zero.gather_params()
    received = flat(params)

    assert log == [
        *("start gather 0", "start gather 1", "wait gather 0", "start gather 2", "wait gather 1"),
        *("start gather 3", "wait gather 2", "start gather 4", "wait gather 3", "wait gather 4"),
    ]
    for number, (start, end, _) in enumerate(zero.buckets):
        offset, length = zero.layout.piece_start(number), zero.layout.piece_len(number)
        piece = zero.master.detach()[offset : offset + length].bfloat16().float()
        assert same_bits(received[start:end], piece.repeat(2)[: end - start])


# Collectives


@pytest.mark.parametrize(
    ("call", "new", "old"),
    [
        (collectives.reduce_scatter, "reduce_scatter_single", "reduce_scatter_tensor"),
        (collectives.all_gather, "all_gather_single", "all_gather_into_tensor"),
    ],
)
def test_a_replaced_function_is_seen_under_the_name_this_torch_has(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., object], new: str, old: str
) -> None:
    calls = []
    monkeypatch.setattr(dist, new, lambda *args, **more: calls.append(new), raising=False)
    monkeypatch.setattr(dist, old, lambda *args, **more: calls.append(old))
    call(torch.zeros(1), torch.zeros(2), group=None)
    monkeypatch.delattr(dist, new)
    call(torch.zeros(1), torch.zeros(2), group=None)

    assert calls == [new, old]


def test_strided_tensors_are_refused_by_every_collective() -> None:
    strided, whole = torch.zeros(4, 2)[:, 0], torch.zeros(4)
    for call in (
        lambda: collectives.reduce_scatter(whole, strided, group=None),
        lambda: collectives.reduce_scatter(strided, whole, group=None),
        lambda: collectives.all_gather(whole, strided, group=None),
        lambda: collectives.all_gather(strided, whole, group=None),
        lambda: collectives.all_reduce_sum(strided, group=None),
        lambda: collectives.all_reduce_max(strided, group=None),
        lambda: collectives.broadcast(strided, src=0, group=None),
    ):
        with pytest.raises(ValueError, match=r"contiguous tensor, got shape \(4,\) with strides \(2,\)"):
            call()
