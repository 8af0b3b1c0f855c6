"""Bitwise comparison and digests of tensors.

Bits are compared through integer views, never with a tolerance. Two things are one pattern each: every nan (which
payload a conversion leaves depends on the build), and, where the caller says so, the two zeros.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Elements looked at in one go: the temporaries of a comparison stay near 10 MiB whatever its size.
_CHUNK = 2**20

FEW = 2**14
"""Up to this many elements :func:`raw` is the quick way to look at a tensor: a call of torch's takes longer."""


class _Format(NamedTuple):
    """The binary layout of a floating dtype; every pattern above ``infinity`` (the one of +inf) is a nan."""

    integer: torch.dtype
    width: int  # bits
    infinity: int
    quiet_nan: int
    tag: bytes

    @property
    def magnitude(self) -> int:
        """Mask of everything but the sign."""
        return (1 << (self.width - 1)) - 1


_FORMATS = {
    torch.bfloat16: _Format(torch.int16, 16, 0x7F80, 0x7FC0, b"bf16"),
    torch.float16: _Format(torch.int16, 16, 0x7C00, 0x7E00, b"fp16"),
    torch.float32: _Format(torch.int32, 32, 0x7F800000, 0x7FC00000, b"fp32"),
    torch.float64: _Format(torch.int64, 64, 0x7FF << 52, 0xFFF << 51, b"fp64"),
}


@dataclass(frozen=True)
class Mismatch:
    """Where two tensors differ: the first place, and in how many.

    ``index`` is flat. ``*_bits`` are hex strings of the raw value. ``ulps`` is the distance on the line of ordered
    values, on which both zeros are one point; None when either side is nan.
    """

    index: int
    count: int
    expected: float
    actual: float
    expected_bits: str
    actual_bits: str
    ulps: int | None


class Comparison(NamedTuple):
    """Outcome of one comparison. ``compared`` elements were looked at: 0 is no evidence of anything."""

    compared: int
    mismatch: Mismatch | None

    @property
    def equal(self) -> bool:
        """Nothing differed, and there was something to compare."""
        return self.mismatch is None and self.compared > 0


def compare_bits(expected: Tensor, actual: Tensor, *, signed_zeros: bool) -> Comparison:
    """Compare two tensors of one shape, dtype (bf16, fp16, fp32, fp64) and device bit by bit.

    nan equals nan. With ``signed_zeros=False`` +0.0 equals -0.0. Allocates a few MiB at most, except for the copy that
    a non-contiguous tensor needs.

    Raises:
        ValueError: shapes, dtypes or devices differ.
        TypeError: a dtype that has no bits to compare here.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype or expected.device != actual.device:
        raise ValueError(f"cannot compare: expected is {_describe(expected)}, actual is {_describe(actual)}")
    layout = _FORMATS.get(expected.dtype)
    if layout is None:
        raise TypeError(f"cannot compare {expected.dtype}: supported are {', '.join(map(str, _FORMATS))}")
    numel = expected.numel()
    expected_bits = expected.detach().view(layout.integer)
    actual_bits = actual.detach().view(layout.integer)
    if numel <= _CHUNK and torch.equal(expected_bits, actual_bits):
        return Comparison(numel, None)
    return Comparison(numel, _find(layout, expected_bits.reshape(-1), actual_bits.reshape(-1), signed_zeros, expected))


def raw(tensor: Tensor, start: int, length: int) -> bytes:
    """A copy of the bytes of some elements of a :func:`dense` tensor, which must have them.

    Not through numpy: a tensor whose memory numpy has seen cannot be resized any more, and what a subject does with its
    tensors must not depend on having been looked at.
    """
    size = tensor.element_size()
    return ctypes.string_at(tensor.data_ptr() + size * start, size * length)


def flat_bytes(tensors: Sequence[Tensor], most: int = FEW) -> bytes | None:
    """A copy of the bytes of some tensors, end to end; None where they are not :func:`dense`, or more than ``most``.

    Those on another device are copied from there first.
    """
    numels = [tensor.numel() for tensor in tensors]
    if sum(numels) > most:
        return None
    tensors = [tensor if tensor.is_cpu else tensor.detach().cpu() for tensor in tensors]
    if not all(dense(tensor, numel) for tensor, numel in zip(tensors, numels, strict=True)):
        return None
    return b"".join([raw(tensor, 0, numel) for tensor, numel in zip(tensors, numels, strict=True)])


def same_bytes(one: Tensor, one_start: int, other: Tensor, other_start: int, length: int) -> bool:
    """Whether some elements of two :func:`dense` tensors of one dtype, which must have them, have the same bytes."""
    size = one.element_size()
    one_address, other_address = one.data_ptr() + size * one_start, other.data_ptr() + size * other_start
    return length == 0 or _memcmp(one_address, other_address, size * length) == 0


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def dense(tensor: Tensor, numel: int) -> bool:
    """Whether :func:`raw` can read it: ``numel`` elements in row-major order, in memory that was not freed."""
    if not (tensor.is_cpu and tensor.numel() == numel and tensor.is_contiguous()):
        return False
    return tensor.untyped_storage().nbytes() >= tensor.element_size() * (tensor.storage_offset() + numel)


def _find(
    layout: _Format, expected_bits: Tensor, actual_bits: Tensor, signed_zeros: bool, like: Tensor
) -> Mismatch | None:
    """First and number of differing elements of two flat integer vectors."""
    first = -1
    count = 0
    for start in range(0, expected_bits.numel(), _CHUNK):
        wanted = expected_bits[start : start + _CHUNK]
        seen = actual_bits[start : start + _CHUNK]
        if torch.equal(wanted, seen):
            continue
        differs = wanted != seen
        wanted_magnitude = wanted & layout.magnitude
        seen_magnitude = seen & layout.magnitude
        differs &= (wanted_magnitude <= layout.infinity) | (seen_magnitude <= layout.infinity)
        if not signed_zeros:
            differs &= (wanted_magnitude | seen_magnitude) != 0
        in_chunk = int(differs.sum())
        if in_chunk and first < 0:
            first = start + int(differs.to(torch.uint8).argmax())
        count += in_chunk
    if count == 0:
        return None
    return _mismatch(layout, first, count, expected_bits[first], actual_bits[first], like)


def _mismatch(layout: _Format, index: int, count: int, wanted: Tensor, seen: Tensor, like: Tensor) -> Mismatch:
    expected = float(wanted.view(like.dtype))
    actual = float(seen.view(like.dtype))
    wanted_bits = int(wanted) % (1 << layout.width)
    seen_bits = int(seen) % (1 << layout.width)
    nan = expected != expected or actual != actual
    digits = layout.width // 4
    return Mismatch(
        index=index,
        count=count,
        expected=expected,
        actual=actual,
        expected_bits=f"0x{wanted_bits:0{digits}x}",
        actual_bits=f"0x{seen_bits:0{digits}x}",
        ulps=None if nan else abs(_ordered(layout, wanted_bits) - _ordered(layout, seen_bits)),
    )


def _ordered(layout: _Format, bits: int) -> int:
    """The position of a non-nan value among all values of its format; both zeros are 0."""
    magnitude = bits & layout.magnitude
    return magnitude if bits == magnitude else -magnitude


def digest(tensors: Iterable[Tensor]) -> str:
    """Hex digest of the bits of some floating tensors, in order, with every nan as one pattern.

    Sizes and dtypes enter too, shapes do not. Equal digests mean equal bits; signed zeros count as different.
    """
    state = hashlib.blake2b(digest_size=16)
    for run in _runs(tensors):
        layout = _FORMATS[run[0].dtype]
        for tensor in run:
            state.update(b"%s %d;" % (layout.tag, tensor.numel()))
        for bits in _integers(run, layout):
            magnitude = bits & layout.magnitude
            if magnitude.size and magnitude.max() > layout.infinity:
                bits = np.where(magnitude > layout.infinity, bits.dtype.type(layout.quiet_nan), bits)
            state.update(bits)  # type: ignore[arg-type]
    return state.hexdigest()


_Integers = np.ndarray[tuple[int], np.dtype[np.signedinteger]]


def _integers(run: Sequence[Tensor], layout: _Format) -> Iterator[_Integers]:
    """The bits of some tensors of one dtype, end to end, a chunk at a time."""
    if sum(tensor.numel() for tensor in run) <= FEW and all(dense(tensor, tensor.numel()) for tensor in run):
        yield np.frombuffer(b"".join(raw(tensor, 0, tensor.numel()) for tensor in run), f"i{layout.width // 8}")
        return
    for tensor in run:
        flat = tensor.detach().contiguous().view(-1).view(layout.integer)
        for start in range(0, flat.numel(), _CHUNK):
            yield flat[start : start + _CHUNK].cpu().numpy()


def _runs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, looked at together while they are small."""
    run: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.dtype not in _FORMATS:
            raise TypeError(f"cannot digest {tensor.dtype}: supported are {', '.join(map(str, _FORMATS))}")
        if run and (run[0].dtype != tensor.dtype or size + tensor.numel() > FEW):
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.numel()
    if run:
        yield run


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
