"""The forward and backward passes of the unsharded trainer that a sharded one must equal: nothing of a subject here.

It runs on compute weights of its own, is given the passes over all ranks' text, and adds their gradients in fp32 in the
order that it is told: the backend's, from three ranks on. Masters, AdamW and rounding are those of
:class:`harness.oracles.reference.UnshardedTrainer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harness.drive.summation import Summation
from harness.oracles.contributions import Interval, Nesting, any_order
from harness.oracles.order import add
from harness.train.model import ByteModel

Gradients = Sequence[Tensor | None]  # of one part, by parameter


def backward(model: ByteModel, windows: Tensor, scale: float) -> float:
    """One part: add the gradient of ``scale`` times the loss to ``.grad``; returns the loss itself (nats a byte)."""
    loss = model.loss(windows)
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """The ``.grad`` of each parameter, which has none afterwards."""
    gradients: list[Tensor | None] = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


class UnshardedModel:
    """A model on the unsharded trainer's compute weights, and this step's passes by rank and part.

    Attributes:
        gradients: bf16, ``[rank][part][parameter]``.
    """

    def __init__(self, model: ByteModel, weights: Sequence[Tensor]) -> None:
        """Make ``model`` compute on ``weights`` themselves, whoever changes them."""
        self._model = model
        self._parameters = list(model.parameters())
        self.use(weights)
        self.begin(0)

    def use(self, weights: Sequence[Tensor]) -> None:
        """Compute on these from now on."""
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.data = weight

    def begin(self, world: int) -> None:
        """A new step on ``world`` ranks, without any pass yet."""
        self._losses: list[list[float]] = [[] for _ in range(world)]
        self.gradients: list[list[list[Tensor]]] = [[] for _ in range(world)]

    @property
    def losses(self) -> list[float]:
        """Of every pass of the step, by rank and then by part."""
        return [loss for of_rank in self._losses for loss in of_rank]

    def run_part(self, rank: int, windows: Tensor, scale: float) -> None:
        """The next part of a rank, on the weights as they are now."""
        gradients, loss = self.run_pass(windows, scale)
        self._losses[rank].append(loss)
        self.gradients[rank].append(gradients)

    def run_pass(self, windows: Tensor, scale: float) -> tuple[list[Tensor], float]:
        """Gradients and loss of one part, kept nowhere."""
        loss = backward(self._model, windows, scale)
        gradients = [gradient for gradient in take_gradients(self._parameters) if gradient is not None]
        if len(gradients) != len(self._parameters):
            raise RuntimeError("autograd left a parameter of the unsharded model without gradient")
        return gradients, loss

    def packed(self, rank: int) -> tuple[Tensor, Tensor]:
        """A rank's passes to be sent: gradients bf16 ``[parts, numel]``, losses fp64 ``[parts]``."""
        rows = [torch.cat([gradient.reshape(-1) for gradient in part]) for part in self.gradients[rank]]
        return torch.stack(rows), torch.tensor(self._losses[rank], dtype=torch.float64)

    def unpack(self, rank: int, gradients: Tensor, losses: Tensor) -> None:
        """Take over another rank's :meth:`packed` passes."""
        sizes = [parameter.numel() for parameter in self._parameters]
        self._losses[rank] = losses.tolist()
        self.gradients[rank] = [
            [
                flat.view(parameter.shape)
                for flat, parameter in zip(torch.split(row, sizes), self._parameters, strict=True)
            ]
            for row in gradients
        ]

    def reduced(self, summation: Summation) -> list[Tensor]:
        """The sum over all parts and ranks, fp32, by parameter, added as ``summation`` says."""
        reduced = []
        start = 0
        for index, parameter in enumerate(self._parameters):
            order = summation.order.slice(start, start + parameter.numel())
            start += parameter.numel()
            by_rank = [[_row(part[index]) for part in parts] for parts in self.gradients]
            if summation.nesting is Nesting.PARTS_INSIDE:
                total = add(order, [_fold(rows) for rows in by_rank])
            else:
                total = _fold([add(order, rows) for rows in zip(*by_rank, strict=True)])
            reduced.append(torch.from_numpy(total).view(parameter.shape))
        return reduced

    def interval(self, parameter: int) -> Interval:
        """Where any order of fp32 additions puts the sum of one parameter's gradients."""
        terms = [_row(part[parameter]) for parts in self.gradients for part in parts]
        return any_order(terms, self._parameters[parameter].numel())


def _row(gradient: Tensor) -> NDArray[np.float32]:
    row: NDArray[np.float32] = gradient.detach().float().view(-1).numpy()
    return row


def _fold(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The rows' sum in fp32, the first plus the second, plus the third, …"""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total
