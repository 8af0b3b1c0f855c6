"""Gradients of plain parameters in one process, where there is no group: what is reduced stays what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero2core.strategies.plain import PlainGradients


def watched() -> tuple[nn.Parameter, nn.Parameter, PlainGradients]:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    plain = PlainGradients({"first": first, "second": second}, group=None, arrived=lambda: None)
    return first, second, plain


def loss(parameter: Tensor, factor: float) -> Tensor:
    return (parameter * factor).sum()


def test_what_arrives_waits_apart_from_what_is_reduced() -> None:
    first, second, plain = watched()
    loss(first, 2.0).backward()
    assert first.grad is None
    assert plain.pending

    plain.reduce()
    loss(first, 3.0).backward()

    assert torch.equal(first.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    plain.reduce()
    assert torch.equal(first.grad, torch.full((3,), 5.0))  # type: ignore[arg-type]
    assert second.grad is None
    assert not plain.pending


def test_gradients_that_somebody_asks_for_by_themselves_take_nothing_away() -> None:
    first, second, plain = watched()
    loss(first, 2.0).backward()
    plain.reduce()

    (asked,) = torch.autograd.grad(loss(first, 7.0), [first])

    assert torch.equal(asked, torch.full((3,), 7.0))
    assert torch.equal(first.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert not plain.pending

    # What such a call took out is given back before a reduction at its end, too, and not again after it.
    loss(second, 3.0).backward()
    probe = loss(first, 7.0)
    probe.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(plain.reduce))
    torch.autograd.grad(probe, [first])
    assert torch.equal(first.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert torch.equal(second.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]
