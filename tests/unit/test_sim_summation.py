"""Reductions in a chosen order: against the oracle's own adding, on data where the order matters and where it does not.

That the ring has the bits of gloo is for tests/ranks/test_sim_sums_as_gloo.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.oracles import order as orders
from harness.oracles.order import Rounding
from harness.sim.choices import SumOrder
from harness.sim.summation import reduce, supported

SUM = dist.ReduceOp.SUM
KINDS = orders.SUMMING_KINDS
ROUNDED: dict[torch.dtype, Rounding] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SUPPORTED = [*ROUNDED, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8]


def rows_that_round(world: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    exponents = torch.randint(-3, 4, (world, length), generator=generator)
    return list(torch.ldexp(torch.randn(world, length, generator=generator), exponents).to(dtype))


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("order", SumOrder)
@pytest.mark.parametrize("kind", KINDS)
def test_each_order_has_the_bits_of_the_oracles(kind: str, order: SumOrder, dtype: torch.dtype) -> None:
    """Lengths both below and above what is moved by an index."""
    for world, pieces in itertools.product((1, 2, 3, 7), (0, 1, 5, 60, 3001)):
        rows = rows_that_round(world, world * pieces, dtype)
        rule = orders.rule(order.value, 11)

        total = reduce(kind, rows, SUM, order, 11)

        given = rule(kind, world * pieces, world, ROUNDED[dtype])
        expected = orders.add(given, [row.float().numpy() for row in rows], ROUNDED[dtype])
        assert total.dtype == dtype
        assert bits(total) == bits(torch.from_numpy(expected).to(dtype)), (world, pieces)


def test_the_orders_are_told_apart() -> None:
    """So that the test above can fail."""
    rows = rows_that_round(5, 500, torch.float32)
    for kind in KINDS:
        totals = [reduce(kind, rows, SUM, order, seed) for order in SumOrder for seed in (0, 1)]
        ring, _, rank, _, tree, _, one, another = totals
        for total, other in itertools.combinations((ring, rank, tree, one, another), 2):
            assert int((total != other).sum()) > 25
        for order, total in ((SumOrder.RING, ring), (SumOrder.RANK, rank), (SumOrder.TREE, tree)):
            assert bits(reduce(kind, rows, SUM, order, 99)) == bits(total)  # only a random order has a seed


@pytest.mark.parametrize("world", [2, 3, 8, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_sums_have_the_same_bits_in_every_order(world: int, dtype: torch.dtype) -> None:
    """Integers below 2**15: 256 of them stay below 2**24. Zeros of a sum of different values are positive always."""
    generator = torch.Generator().manual_seed(world)
    rows = list(torch.randint(-(2**15), 2**15, (world, 2 * world), generator=generator).to(dtype) * 2.0**-9)
    expected = bits(torch.stack(rows).double().sum(0).to(dtype))
    for kind, order in itertools.product(KINDS, SumOrder):
        assert bits(reduce(kind, rows, SUM, order, world)) == expected


def test_integers_wrap_and_bits_combine_in_every_order() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (5, 50), generator=generator)
    rows = list(values.to(torch.int8))
    expected = {
        dist.ReduceOp.SUM: values.sum(0).to(torch.int8),
        dist.ReduceOp.PRODUCT: values.prod(0).to(torch.int8),
        dist.ReduceOp.MAX: values.amax(0).to(torch.int8),
        dist.ReduceOp.MIN: values.amin(0).to(torch.int8),
        dist.ReduceOp.BAND: rows[0] & rows[1] & rows[2] & rows[3] & rows[4],
        dist.ReduceOp.BOR: rows[0] | rows[1] | rows[2] | rows[3] | rows[4],
        dist.ReduceOp.BXOR: rows[0] ^ rows[1] ^ rows[2] ^ rows[3] ^ rows[4],
    }
    for (op, total), order in itertools.product(expected.items(), SumOrder):
        assert torch.equal(reduce("all_reduce", rows, op, order, 1), total)
        assert torch.equal(reduce("all_reduce", rows, dist.ReduceOp(op), order, 1), total)


def test_a_bool_is_the_byte_that_holds_it() -> None:
    """As in gloo: 256 times true is a byte of 0."""
    row = torch.tensor([True, False])
    for world, total in ((1, True), (255, True), (256, False)):
        summed = reduce("all_reduce", [row] * world, SUM, SumOrder.RING, 0)
        assert summed.dtype == torch.bool
        assert summed.tolist() == [total, False]


def test_what_a_rank_has_comes_before_what_it_received() -> None:
    """Around a ring of two, element 0 comes from rank 1 to rank 0, and the last from rank 0 to rank 1."""
    nan = float("nan")
    rows = [torch.tensor([nan, 1.0, 0.0, 3.0]), torch.tensor([2.0, nan, -0.0, nan])]
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        ring = reduce("all_reduce", rows, op, SumOrder.RING, 0)
        assert str(ring.tolist()) == "[nan, 1.0, -0.0, nan]"
        assert str(reduce("all_reduce", rows, op, SumOrder.RANK, 0).tolist()) == "[2.0, nan, -0.0, nan]"


@pytest.mark.parametrize("dtype", [torch.float64, *ROUNDED], ids=str)
def test_a_mean_is_the_rounded_sum_divided(dtype: torch.dtype) -> None:
    for world in (1, 3, 7):
        rows = rows_that_round(world, 100, dtype)
        total = reduce("all_reduce", rows, SUM, SumOrder.RING, 0)
        mean = reduce("all_reduce", rows, dist.ReduceOp.AVG, SumOrder.RING, 0)
        assert bits(mean) == bits((total.double() / world).to(torch.float32 if dtype in ROUNDED else dtype).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, *ROUNDED], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_factor_is_rounded_and_then_each_product(dtype: torch.dtype, as_tensor: bool) -> None:
    rows = rows_that_round(3, 100, dtype)
    factor = torch.tensor(0.3, dtype=dtype)
    op = dist._make_nccl_premul_sum(factor if as_tensor else 0.3)
    for order in SumOrder:
        total = reduce("reduce", rows, op, order, 5)
        assert bits(total) == bits(reduce("reduce", [row * factor for row in rows], SUM, order, 5))
    assert bits(total) != bits(reduce("reduce", rows, SUM, SumOrder.RANDOM, 5))


@pytest.mark.parametrize("dtype", [*SUPPORTED, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_inputs_stay_and_the_result_is_new(dtype: torch.dtype, world: int) -> None:
    for order in SumOrder:
        rows = [torch.ones(2, 3).to(dtype) for _ in range(world)]
        if dtype.is_floating_point or dtype.is_complex:
            rows = [row.requires_grad_() for row in rows]
        total = reduce("all_reduce", rows, SUM, order, 0)
        assert total.shape == (6,)
        assert not total.requires_grad
        kept = [row.detach().clone() for row in rows]
        total.zero_()
        assert all(torch.equal(row, before) for row, before in zip(rows, kept, strict=True))
        assert all(bool((row == 1).all()) for row in rows)


def test_autograd_and_the_warnings_of_numpy_are_left_alone() -> None:
    rows = [torch.full((3,), 3e38), torch.full((3,), 3e38)]
    with np.errstate(all="raise"), torch.inference_mode():
        assert reduce("all_reduce", rows, SUM, SumOrder.RING, 0).tolist() == [float("inf")] * 3
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


# --- what is not reduced ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype", "sentence"),
    [
        (dist.ReduceOp.SUM, torch.int16, "gloo reduces no int16; it takes"),
        (dist.ReduceOp.MAX, torch.float8_e4m3fn, "gloo reduces no float8_e4m3fn"),
        (dist.ReduceOp.BAND, torch.bfloat16, "gloo has no BAND of bfloat16"),
        (dist.ReduceOp.AVG, torch.int32, "gloo has no AVG of int32"),
        (dist.ReduceOp.AVG, torch.bool, "gloo has no AVG of bool"),
        (dist.ReduceOp.MAX, torch.complex64, "gloo has no MAX of complex64"),
        (dist._make_nccl_premul_sum(2.0), torch.int64, "there is no PREMUL_SUM of int64"),
    ],
)
def test_what_gloo_does_not_take_is_said(op: dist.ReduceOp, dtype: torch.dtype, sentence: str) -> None:
    said = supported(op, dtype)
    assert said is not None
    assert said.startswith(sentence)
    with pytest.raises(ValueError, match=sentence):
        reduce("all_reduce", [torch.ones(2).to(dtype)] * 2, op, SumOrder.RANK, 0)


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_what_it_takes_is_not_refused(dtype: torch.dtype) -> None:
    ops: Sequence[dist.ReduceOp.RedOpType] = (SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
    assert [supported(op, dtype) for op in ops] == [None] * 4
    assert (supported(dist.ReduceOp.AVG, dtype) is None) == dtype.is_floating_point
    assert (supported(dist.ReduceOp.BXOR, dtype) is None) != dtype.is_floating_point
    assert (supported(dist._make_nccl_premul_sum(0.5), dtype) is None) == dtype.is_floating_point


@pytest.mark.parametrize("order", SumOrder)
def test_a_kind_that_reduces_nothing_and_unequal_pieces_are_refused(order: SumOrder) -> None:
    rows = [torch.ones(4)] * 3
    with pytest.raises(ValueError, match="'all_gather' reduces nothing; known are all_reduce"):
        reduce("all_gather", rows, SUM, order, 0)
    with pytest.raises(ValueError, match="4 elements are no list of 3 equal pieces"):
        reduce("reduce_scatter_list", rows, SUM, order, 0)
