"""Read and write ranges of a flat vector that is really a list of tensors, without a copy of any of them.

A tensor counts in row-major order of its shape, whatever its strides: a transposed or channels-last parameter lies
in the flat vector as ``tensor.flatten()`` would give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zero2core.layout import FlatLayout, blocks

__all__ = ["flat_views", "read_flat", "write_flat"]


def flat_views(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[Tensor, int]]:
    """Views that hold elements ``[start, stop)`` of ``tensor``, each with its offset in that range."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop], 0
        return
    for block in blocks(tuple(tensor.shape), start, stop):
        yield tensor[block.rows][block.start : block.stop], block.offset


def read_flat(layout: FlatLayout, tensors: Sequence[Tensor | None], start: int, out: Tensor) -> None:
    """``out[i]`` (1D) becomes flat element ``start + i``, converted to the dtype of ``out``; None reads as zeros."""
    for span in layout.spans(start, start + out.numel()):
        into = out[span.offset : span.offset + span.stop - span.start]
        tensor = tensors[span.parameter]
        if tensor is None:
            into.zero_()
            continue
        for view, offset in flat_views(tensor, span.start, span.stop):
            into[offset : offset + view.numel()].view(view.shape).copy_(view)


def write_flat(layout: FlatLayout, tensors: Sequence[Tensor], start: int, values: Tensor) -> None:
    """Flat element ``start + i`` becomes ``values[i]`` (1D), rounded to the dtype of the tensor it lies in."""
    for span in layout.spans(start, start + values.numel()):
        source = values[span.offset : span.offset + span.stop - span.start]
        for view, offset in flat_views(tensors[span.parameter].detach(), span.start, span.stop):
            view.copy_(source[offset : offset + view.numel()].view(view.shape))
