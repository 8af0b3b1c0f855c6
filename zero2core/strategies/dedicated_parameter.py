"""One dedicated matrix as a rank sees it: whole and in fp32 on its owner, a place to receive it on all others.

[Note: one leaf for life]
The tensor that forwards compute with (:attr:`DedicatedParameter.leaf`) is the same object in every forward, so that
autograd, and recomputation under a checkpoint, see one weight. Between uses its storage is emptied; it is filled again
through a second tensor with a version counter of its own, so that a refill with the same weights is not taken for a
change. New weights do count as one: a backward of a forward from before them is refused by autograd itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero2core.errors import GradientStateError
from zero2core.muon.info import MuonParamInfo

__all__ = ["Absent", "DedicatedParameter"]


class DedicatedParameter:
    """A matrix that one rank owns.

    Attributes:
        name: in the model, as it was before it was taken out.
        shape: ``[..., rows, cols]``.
        owner: rank in the default group.
        info: its record.
        weight: fp32, whole, the master; None on all other ranks.
        grad: fp32, mean over ranks, parts added up; None on all other ranks and before the first reduction of a step.
        momentum: fp32, from the construction of the optimizer on; None on all other ranks.
        compute_dtype: of :attr:`leaf`.
        leaf: what modules compute with; without storage except where it is filled.
    """

    def __init__(self, name: str, value: Tensor, info: MuonParamInfo, *, owner: int, src: int, is_owner: bool,
                 compute_dtype: torch.dtype) -> None:  # fmt: skip
        self.name, self.shape, self.info, self.owner = name, value.shape, info, owner
        self.compute_dtype = compute_dtype
        self.src = src
        self.weight: Tensor | None = None
        if is_owner:
            self.weight = torch.empty(value.shape, dtype=torch.float32, device=value.device).copy_(value.detach())
        self.grad: Tensor | None = None
        self.momentum: Tensor | None = None
        self.waiting: Tensor | None = None
        """fp32, of this rank: gradients that are not reduced yet."""
        self._buffer = torch.empty(value.shape, dtype=compute_dtype, device=value.device)
        self._num_bytes = self._buffer.untyped_storage().nbytes()
        self._version = 0
        # .data: other than detach(), a tensor whose version counter is its own.
        self.leaf = self._buffer.data.requires_grad_()
        self.leaf.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]
        self.on_gradient: Callable[[], None] = _nothing
        self.free()

    @property
    def is_owner(self) -> bool:
        """Whether this rank owns it."""
        return self.weight is not None

    @property
    def has_storage(self) -> bool:
        """Whether :attr:`leaf` has storage."""
        return self._num_bytes == 0 or self._buffer.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def prepare(self, version: int) -> Tensor:
        """Storage for the weights of ``version``, filled on the owner; to be broadcast from it."""
        if not self.has_storage:
            self._buffer.untyped_storage().resize_(self._num_bytes)
        if version != self._version:
            torch.autograd.graph.increment_version(self.leaf)
            self._version = version
        if self.weight is not None:
            self._buffer.copy_(self.weight)
        return self._buffer

    def free(self) -> None:
        """Give the storage of :attr:`leaf` back."""
        self._buffer.untyped_storage().resize_(0)

    def _take_gradient(self, leaf: Tensor) -> None:
        """Add what a backward left to what waits."""
        gradient = leaf.grad
        leaf.grad = None
        if gradient is None:
            raise GradientStateError(f"{self.name}: autograd accumulated a gradient, and none is there")
        if gradient.layout is not torch.strided:
            raise ValueError(f"{self.name} has a gradient of layout {gradient.layout}: only dense ones can be reduced")
        gradient = gradient.detach().contiguous()
        if self.waiting is None:
            self.waiting = gradient.to(torch.float32)
        else:
            self.waiting.add_(gradient)
        self.on_gradient()

    def add_reduced(self, total: Tensor, world: int) -> None:
        """On the owner: the sum over ``world`` ranks becomes a mean in fp32, added to that of earlier parts."""
        mean = total.to(torch.float32).div_(world)
        self.grad = mean if self.grad is None else self.grad.add_(mean)

    def __repr__(self) -> str:
        where = "owned here" if self.is_owner else f"owned by rank {self.owner}"
        return f"DedicatedParameter({self.name}, {tuple(self.shape)}, {where})"


def _nothing() -> None:
    """What :attr:`DedicatedParameter.on_gradient` does until a runtime says otherwise."""


class Absent:
    """Stands where a module had its parameter, outside the module's forward: has a shape, and no values.

    Any computation with it raises :class:`~zero2core.GradientStateError`; it says so too when asked for an attribute it
    has not (as ``AttributeError``, for the sake of ``hasattr``).
    """

    def __init__(self, parameter: DedicatedParameter) -> None:
        self.name, self.shape, self.dtype = parameter.name, parameter.shape, parameter.compute_dtype
        self.device, self.requires_grad, self.grad, self.is_leaf = parameter.leaf.device, True, None, True
        self.ndim = len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Of the whole matrix, or of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{attribute}: {self.__dict__.get('name', 'a parameter')} {_WHY_ABSENT}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:  # fmt: skip
        names = [name for value in (*args, *(kwargs or {}).values()) for name in _names_in(value)]
        raise GradientStateError(f"{', '.join(names) or 'a parameter'} {_WHY_ABSENT}")

    def __repr__(self) -> str:
        return f"Absent({self.name}, {tuple(self.shape)})"


_WHY_ABSENT = (
    "is dedicated to one owner rank, and its values are here only while the forward of the module that has it runs. "
    "Use it in that forward, or unmark it; full_state(model) gives whole weights"
)


def _names_in(value: object) -> list[str]:
    if isinstance(value, Absent):
        return [value.name]
    return [name for item in value for name in _names_in(item)] if isinstance(value, (list, tuple)) else []
