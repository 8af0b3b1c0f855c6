"""Which bytes tensors occupy, and whether they share any."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

_Spans = npt.NDArray[np.int64]  # (n, 2): addresses of a first byte and of the byte after the last; sorted, disjoint


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last; both 0 where it has none."""
    start = tensor.data_ptr()
    if not start or not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def has_memory(tensor: Tensor) -> bool:
    """Whether it has elements, and they have addresses: not sparse tensors, those on meta, and such as wrap others."""
    try:
        return tensor.numel() > 0 and tensor.data_ptr() != 0
    except RuntimeError:
        return False


class Extents:
    """Of several tensors, to be held against those of others in little time, however many they are."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._pairs = sorted(pair for pair in map(extent, tensors) if pair[1])
        self._starts = [start for start, _ in self._pairs]
        self._reach = list(itertools.accumulate((end for _, end in self._pairs), max))  # of all up to each

    def meet(self, others: Extents) -> bool:
        """Whether one of each side overlap; a wrong yes where tensors lie in each other's gaps."""
        few, many = sorted((self, others), key=lambda each: len(each._pairs))
        if not few._pairs or few._starts[0] >= many._reach[-1] or many._starts[0] >= few._reach[-1]:
            return False
        for start, end in few._pairs:
            before = bisect.bisect_left(many._starts, end)
            if before and many._reach[before - 1] > start:
                return True
        return False


def share(one: Tensor, other: Tensor, besides: Sequence[Tensor] = ()) -> bool:
    """Whether tensors have a byte in common that is in none of ``besides``: exact, and slow where there are gaps."""
    (start, end), (other_start, other_end) = extent(one), extent(other)
    if start >= other_end or other_start >= end:
        return False
    both = _spans(one), _spans(other)
    excluded = [_spans(tensor) for tensor in besides if tensor.numel()]
    # Between two of these addresses nothing begins or ends.
    addresses = np.unique(np.concatenate([spans.reshape(-1) for spans in (*both, *excluded)]))
    shared = _inside(addresses, both[0]) & _inside(addresses, both[1])
    for spans in excluded:
        shared &= ~_inside(addresses, spans)
    return bool(shared.any())


def _inside(addresses: npt.NDArray[np.int64], spans: _Spans) -> npt.NDArray[np.bool_]:
    index = np.searchsorted(spans[:, 0], addresses, side="right") - 1
    inside: npt.NDArray[np.bool_] = (index >= 0) & (addresses < spans[index, 1])
    return inside


def _spans(tensor: Tensor) -> _Spans:
    """Where exactly the elements are: columns of one matrix have nothing in common."""
    size = tensor.element_size()
    run = size
    starts = np.array([tensor.data_ptr()], np.int64)
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, length in sorted((stride * size, length) for stride, length in dimensions if stride and length > 1):
        if stride == run:
            run *= length
        else:
            starts = (starts[:, None] + stride * np.arange(length, dtype=np.int64)).reshape(-1)
    starts.sort()
    return _merge(np.stack([starts, starts + run], axis=1))


def _merge(spans: _Spans) -> _Spans:
    """Sorted spans of one length, with those joined that touch."""
    begins = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > spans[:-1, 1]]))
    ends = np.append(begins[1:], len(spans)) - 1
    return np.stack([spans[begins, 0], spans[ends, 1]], axis=1)
