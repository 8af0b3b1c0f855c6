"""One backward of a scenario of system ``"muon"``: how gradients reach the parameters of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.scenario.muon import Use


class Used(NamedTuple):
    """A parameter, the gradient that it is to get (of its dtype and shape), and how often it is used for that."""

    parameter: nn.Parameter
    gradient: Tensor
    use: Use


def loss_of(used: Mapping[int, Used]) -> Tensor | None:
    """A loss whose backward gives every parameter exactly its gradient; None for no parameters.

    Used twice, each use gives one half, which must be exact: the halves of a dyadic number are. Two uses in one graph
    are added by autograd. Two re-entrant checkpoints that capture the parameter each have a backward of their own, so
    that its hooks are called twice.
    """
    with torch.enable_grad():
        terms = [_term(each).float() for each in used.values()]
        return torch.stack(terms).sum() if terms else None


def _term(used: Used) -> Tensor:
    parameter, gradient, use = used
    if use == "once":
        return (parameter * gradient).sum()
    half = gradient / 2

    def product(one: Tensor) -> Tensor:
        return (parameter * half).sum() * one

    if use == "twice":
        return (parameter * half).sum() + (parameter * half).sum()
    # A checkpoint needs an input that requires a gradient, or it would have no backward.
    one = torch.ones((), dtype=torch.float32, device=parameter.device, requires_grad=True)
    first: Tensor = checkpoint(product, one, use_reentrant=True, preserve_rng_state=False)
    second: Tensor = checkpoint(product, one, use_reentrant=True, preserve_rng_state=False)
    return first + second
