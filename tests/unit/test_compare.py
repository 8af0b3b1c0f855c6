"""Bitwise comparison: what counts as different, what does not, and where the first difference is reported."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.oracles import compare
from harness.oracles.compare import compare_bits, digest

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def flipped(tensor: Tensor, index: int, bit: int = 0) -> Tensor:
    """A copy with one bit of one element flipped."""
    copy = tensor.clone()
    copy.view(INTEGERS[tensor.dtype]).view(-1)[index] ^= 1 << bit
    return copy


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_tensors_are_equal_and_counted(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, dtype=torch.float64).to(dtype)

    assert compare_bits(tensor, tensor.clone(), signed_zeros=True) == (15, None)
    assert compare_bits(tensor, tensor.clone(), signed_zeros=True).equal


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [0, 7, 14])
def test_one_flipped_bit_is_found_where_it_is(dtype: torch.dtype, index: int) -> None:
    tensor = torch.arange(1, 16, dtype=torch.float64).to(dtype)

    comparison = compare_bits(tensor, flipped(tensor, index), signed_zeros=False)

    assert comparison.mismatch is not None
    assert not comparison.equal
    assert (comparison.mismatch.index, comparison.mismatch.count, comparison.mismatch.ulps) == (index, 1, 1)
    assert comparison.mismatch.expected == index + 1
    assert comparison.mismatch.actual != index + 1


def test_every_single_bit_of_a_value_counts() -> None:
    """No bit of a bf16 is masked away: each of the 16 flips of 1.5 is a difference."""
    tensor = torch.tensor([1.5], dtype=torch.bfloat16)

    assert all(compare_bits(tensor, flipped(tensor, 0, bit), signed_zeros=False).mismatch for bit in range(15))
    assert compare_bits(tensor, -tensor, signed_zeros=False).mismatch is not None


def test_the_report_names_values_and_raw_bits() -> None:
    expected = torch.tensor([1.0, -2.0, 0.5])
    actual = torch.tensor([1.0, 2.0, 0.25])

    mismatch = compare_bits(expected, actual, signed_zeros=True).mismatch

    assert mismatch == compare.Mismatch(
        index=1,
        count=2,
        expected=-2.0,
        actual=2.0,
        expected_bits="0xc0000000",
        actual_bits="0x40000000",
        ulps=2 * 0x40000000,
    )


def test_nothing_to_compare_is_not_equal() -> None:
    """An empty comparison finds no mismatch, but is no evidence."""
    comparison = compare_bits(torch.empty(0, 3), torch.empty(0, 3), signed_zeros=True)

    assert not comparison.equal
    assert comparison == (0, None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_equals_nan_whatever_its_payload_or_sign(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, float("nan"), 3.0], dtype=dtype)
    other = flipped(tensor, 1, 0)
    other.view(INTEGERS[dtype])[1] ^= -(1 << (torch.finfo(dtype).bits - 1))

    assert not torch.equal(tensor.view(INTEGERS[dtype]), other.view(INTEGERS[dtype]))
    assert compare_bits(tensor, other, signed_zeros=True) == (3, None)


@pytest.mark.parametrize("value", [0.0, 1.0, float("inf")])
def test_nan_differs_from_every_number(value: float) -> None:
    expected = torch.tensor([5.0, float("nan")])
    actual = torch.tensor([5.0, value])

    for pair in ((expected, actual), (actual, expected)):
        mismatch = compare_bits(*pair, signed_zeros=False).mismatch
        assert mismatch is not None
        assert (mismatch.index, mismatch.count, mismatch.ulps) == (1, 1, None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_signed_zeros_differ_only_where_the_caller_says_so(dtype: torch.dtype) -> None:
    plus = torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
    minus = torch.tensor([-0.0, 1.0, -0.0], dtype=dtype)

    assert compare_bits(plus, minus, signed_zeros=False).equal
    mismatch = compare_bits(plus, minus, signed_zeros=True).mismatch
    assert mismatch is not None
    assert (mismatch.index, mismatch.count, mismatch.ulps) == (0, 2, 0)


def test_zero_differs_from_the_smallest_subnormal() -> None:
    tiny = torch.tensor([2.0**-149])

    mismatch = compare_bits(torch.zeros(1), tiny, signed_zeros=False).mismatch

    assert mismatch is not None
    assert mismatch.ulps == 1


def test_ulps_count_across_zero_and_up_to_infinity() -> None:
    small = torch.tensor([-(2.0**-149), torch.finfo(torch.float32).max])
    other = torch.tensor([2.0**-149, float("inf")])

    first = compare_bits(small[:1], other[:1], signed_zeros=True).mismatch
    last = compare_bits(small[1:], other[1:], signed_zeros=True).mismatch

    assert first is not None
    assert first.ulps == 2
    assert last is not None
    assert last.ulps == 1


def test_non_contiguous_and_scalar_tensors_compare_in_logical_order() -> None:
    matrix = torch.arange(12.0).view(3, 4)

    assert compare_bits(matrix.t(), matrix.t().contiguous(), signed_zeros=True).equal
    mismatch = compare_bits(matrix.t().contiguous(), flipped(matrix, 4).t(), signed_zeros=True).mismatch
    assert mismatch is not None
    assert mismatch.index == 1
    assert compare_bits(torch.tensor(2.0), torch.tensor(3.0), signed_zeros=True).mismatch is not None


def test_parameters_that_require_gradients_compare() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))

    assert compare_bits(parameter, torch.ones(3), signed_zeros=True).equal


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, device="meta")])
def test_what_cannot_be_compared_is_refused_with_both_sides(other: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected is float32\[3\] on cpu, actual is "):
        compare_bits(torch.ones(3), other, signed_zeros=True)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        compare_bits(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), signed_zeros=True)


def test_chunks_give_the_same_report_as_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """First index and count span chunks, also where a chunk in between is equal or holds only tolerated pairs."""
    expected = torch.arange(1.0, 24.0)
    actual = expected.clone()
    expected[2], actual[2] = float("nan"), -float("nan")
    expected[3], actual[3] = 0.0, -0.0
    actual[[9, 10, 22]] += 1
    whole = compare_bits(expected, actual, signed_zeros=False)
    monkeypatch.setattr(compare, "_CHUNK", 4)

    chunked = compare_bits(expected, actual, signed_zeros=False)

    assert chunked == whole
    assert chunked.mismatch is not None
    assert (chunked.mismatch.index, chunked.mismatch.count) == (9, 3)


def test_digest_depends_on_every_bit_order_size_and_dtype() -> None:
    tensors = [torch.arange(6.0), torch.ones(2, dtype=torch.bfloat16)]
    reference = digest(tensors)

    assert digest([tensor.clone() for tensor in tensors]) == reference
    others = [
        [flipped(tensors[0], 3), tensors[1]],
        tensors[::-1],
        [tensors[0][:3], tensors[0][3:], tensors[1]],
        [tensors[0], tensors[1].half()],
        [tensors[0], -tensors[1]],
        tensors[:1],
    ]
    digests = [digest(other) for other in others]
    assert reference not in digests
    assert len(set(digests)) == len(digests)


def test_digest_counts_all_nans_as_one_but_keeps_zero_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK", 2)
    for dtype in FLOATS:
        tensor = torch.tensor([0.0, 1.0, float("nan"), 3.0], dtype=dtype)
        assert digest([flipped(tensor, 2)]) == digest([tensor])
        infinite = torch.tensor([0.0, 1.0, float("inf"), 3.0], dtype=dtype)
        negative = torch.tensor([-0.0, 1.0, float("nan"), 3.0], dtype=dtype)
        assert len({digest([tensor]), digest([infinite]), digest([negative])}) == 3


def test_digest_of_a_view_is_that_of_its_copy() -> None:
    matrix = torch.randn(4, 3)

    assert digest([matrix.t()]) == digest([matrix.t().contiguous()])
    assert digest([matrix.t()]) != digest([matrix])
    assert digest([torch.empty(0)]) != digest([])


@pytest.mark.parametrize("few", [0, 4, 2**14])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_digest_is_the_same_however_the_tensors_are_read(
    dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "FEW", few)
    tensors = [torch.tensor([1.0, math.nan, -0.0]), torch.empty(0), torch.ones(2, 2)]
    tensors = [tensor.to(dtype) for tensor in tensors]
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in tensors]

    assert digest(strided) == digest(tensors)


def test_digest_refuses_what_has_no_float_bits() -> None:
    with pytest.raises(TypeError, match="int32"):
        digest([torch.ones(2, dtype=torch.int32)])


def test_a_digest_allocates_no_copy_of_what_it_reads() -> None:
    """numpy reports its allocations: reading 64 MiB must peak far below that."""
    large = torch.zeros(2**24)
    large[12345] = float("nan")
    tracemalloc.start()
    try:
        digest([large])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert 0 < peak < large.numel() * np.dtype(np.float32).itemsize / 4
