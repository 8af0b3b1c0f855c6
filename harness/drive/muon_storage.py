"""Where the parameters of one subject lie, and whether they stay there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Place(NamedTuple):
    storage: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    trainable: bool
    address: int


class Places:
    """Taken once, after construction: from then on no parameter may get another storage.

    ``moves``: storages are given up and given back in between, which may change their address, but not which they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], frozen: nn.Parameter, *, moves: bool) -> None:
        self._parameters = parameters
        self._moves = moves
        self._places = [self._place(parameter) for parameter in parameters]
        self._frozen, self._content = frozen, frozen.detach().clone()
        self._frozen_place = self._place(frozen)

    def problem(self) -> tuple[int | None, str] | None:
        """``(index of the parameter, what became of it)``; None for a frozen one that is listed beside the others."""
        for index, (parameter, before) in enumerate(zip(self._parameters, self._places, strict=True)):
            now = self._place(parameter)
            if now == before:
                continue
            if (now.storage, now.offset, now.address) != (before.storage, before.offset, before.address):
                return index, "a parameter has another storage than after construction: references to it are stale"
            if now.trainable != before.trainable:
                return index, "a parameter no longer requires a gradient: the next backward would pass it over"
            return index, f"a parameter became {now.dtype}{list(now.shape)} with strides {now.strides}"
        touched = self._place(self._frozen) != self._frozen_place or self._frozen.grad is not None
        if touched or not torch.equal(self._frozen.detach(), self._content):
            return None, "the frozen parameter that is listed beside the others is not as it was"
        return None

    def _place(self, tensor: Tensor) -> _Place:
        return _Place(
            tensor.untyped_storage()._cdata,
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
            0 if self._moves else tensor.data_ptr(),
        )
