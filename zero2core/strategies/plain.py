"""Gradients that no wrapper reduces: the mean over ranks, and the parameters that FSDP2 ignores.

FSDP2 leaves gradients of parameters that it ignores as each rank has them, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2core import collectives
from zero2core.strategies import private

__all__ = ["PlainGradients", "mean_over_ranks"]

_CHUNK = 2**22  # elements that travel together


def mean_over_ranks(
    gradients: Sequence[Tensor | None], like: Sequence[Tensor], *, group: dist.ProcessGroup | None
) -> list[Tensor | None]:
    """The mean of each gradient over the ranks of ``group``, where a missing one counts as zeros. Collective.

    Summed over ranks and divided once, in fp32 (fp64 for fp64). One that is missing on all ranks is None. One
    all-reduce for each 2**22 elements of a dtype. The host waits for the device only on a rank where one is missing.

    Args:
        gradients: one for each of ``like``, of its shape; they are not changed.
        like: what the gradients are of; the same on every rank.
        group: of all that have such gradients; None: the default group.

    Returns:
        One for each of ``like``, of its shape, fp32 or fp64. Same bits on every rank.
    """
    world = collectives.group_size(group)
    means: list[Tensor | None] = [None] * len(like)
    for indices in _chunks(like):
        dtype, device = _sum_dtype(like[indices[0]]), like[indices[0]].device
        parts = [
            torch.zeros(like[i].numel(), dtype=dtype, device=device)
            if (gradient := gradients[i]) is None
            else gradient.detach().reshape(-1).to(dtype)
            for i in indices
        ]
        present = torch.tensor([gradients[i] is not None for i in indices], dtype=dtype, device=device)
        buffer = torch.cat([*parts, present])
        sent = buffer.to(collectives.group_device(group)) if world > 1 else buffer
        if world > 1:
            collectives.all_reduce_sum(sent, group=group)
        summed = sent.to(device)
        # Read back only where this rank cannot know: whoever has all gradients knows that each is somewhere.
        somewhere = [True] * len(indices)
        if any(gradients[i] is None for i in indices):
            somewhere = [count > 0 for count in summed[-len(indices) :].tolist()]
        start = 0
        for i, found in zip(indices, somewhere, strict=True):
            mean = summed[start : start + like[i].numel()].div_(world)
            start += like[i].numel()
            means[i] = mean.view(like[i].shape) if found else None
    return means


class PlainGradients:
    """Parameters that every rank has whole and nobody reduces: their ``.grad`` is, at any time, what is reduced of it.

    What a backward of this rank adds is taken out of ``.grad`` as it arrives and added up apart, in fp32, until
    :meth:`reduce` adds the mean over ranks to ``.grad``. So a gradient that is a mean already is never averaged again.

    Args:
        parameters: by name; the same on every rank, in one order.
        group: the ranks that train together; None: the default group.
        arrived: called in a backward, whenever a gradient of this rank arrives.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        group: dist.ProcessGroup | None,
        arrived: Callable[[], None],
    ) -> None:
        self.parameters = dict(parameters)
        self._group = group
        self._arrived = arrived
        self._local: dict[str, Tensor] = {}
        # What ``.grad`` was, and the backward that it was taken out for; until what that adds has arrived.
        self._kept: dict[str, tuple[int, Tensor | None]] = {}
        self._backward: int | None = None
        for name, parameter in self.parameters.items():
            parameter.register_hook(self._before(name, parameter))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self._after(name))  # type: ignore[no-untyped-call]

    @property
    def pending(self) -> bool:
        """Whether this rank has gradients that are not reduced."""
        return bool(self._local)

    def discard(self) -> None:
        """Forget gradients of this rank that are not reduced."""
        self._local.clear()
        self._kept.clear()

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the mean over ranks of what has arrived to ``.grad``, in the parameter's dtype. Collective."""
        if not self.parameters:
            return
        self._give_back(self._backward)
        parameters = list(self.parameters.values())
        means = mean_over_ranks([self._local.get(name) for name in self.parameters], parameters, group=self._group)
        self._local.clear()
        for parameter, mean in zip(parameters, means, strict=True):
            if mean is None:
                continue
            if parameter.grad is None:
                parameter.grad = mean.to(parameter.dtype)
            else:
                parameter.grad.add_(mean.to(parameter.dtype))

    def _before(self, name: str, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            backward = private.backward_id()
            if backward != self._backward:
                self._backward = backward
                private.at_end_of_backward(partial(self._give_back, backward))
            self._kept[name], parameter.grad = (backward, parameter.grad), None

        return hook

    def _give_back(self, backward: int | None) -> None:
        """Put back what was taken out for a backward that added nothing: ``torch.autograd.grad`` hands it out."""
        for name, (taken_for, gradient) in list(self._kept.items()):
            if taken_for == backward:
                self.parameters[name].grad = gradient
                del self._kept[name]

    def _after(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            _, before = self._kept.pop(name, (None, None))
            arrived, parameter.grad = parameter.grad, before
            if arrived is None:
                return
            arrived = arrived.to(_sum_dtype(parameter))
            self._local[name] = self._local[name].add_(arrived) if name in self._local else arrived.clone()
            self._arrived()

        return hook


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(like: Sequence[Tensor]) -> list[list[int]]:
    """Indices that travel together: of one dtype and device, in order, up to ``_CHUNK`` elements or a single tensor."""
    chunks: list[list[int]] = []
    filled: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(like):
        key = (_sum_dtype(tensor), tensor.device)
        chunk, length = filled.get(key, ([], 0))
        if not chunk or length + tensor.numel() > _CHUNK:
            chunk, length = [], 0
            chunks.append(chunk)
        chunk.append(index)
        filled[key] = (chunk, length + tensor.numel())
    return chunks
