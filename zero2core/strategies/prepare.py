"""What every strategy does with a model before it distributes it: look at it, move it, make ranks equal."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from zero2core import collectives
from zero2core.agreement import require_agreement
from zero2core.broadcast import broadcast_module
from zero2core.errors import GradientStateError
from zero2core.strategies.config import StrategyConfig

__all__ = [
    "before_steps",
    "names_of",
    "optimizer_groups",
    "prepare",
    "require_still_frozen",
    "tensors_in",
    "zero_grad_too",
]

_Owner = TypeVar("_Owner")


def prepare(what: str, model: nn.Module, config: StrategyConfig, device: torch.device) -> None:
    """Check ``model``, switch checkpointing on, move it to ``device`` and give every rank rank 0's weights. Collective.

    Args:
        what: the caller, which messages begin with.

    Raises:
        ValueError: the model is distributed already, has no parameter that takes a gradient, or lies on the meta
            device; ``device`` is not the current one of this process.
        RankMismatchError: on all ranks, where their models or configurations differ.
    """
    _require_wrappable(what, model)
    if device.type not in ("cpu", "meta") and device.index is not None:
        current = torch.accelerator.current_device_index()
        if current != device.index:
            raise ValueError(
                f"{what}: the strategy's device is {device} and the current one is {device.type}:{current}: "
                f"call torch.{device.type}.set_device({device.index}) first"
            )
    if config.use_gradient_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if callable(enable):
            enable()
        else:
            warnings.warn(
                f"{what}: use_gradient_checkpointing is set and {type(model).__name__} has no "
                "gradient_checkpointing_enable(): activations are kept",
                stacklevel=3,
            )
    model.to(device)
    if collectives.group_size(None) > 1:
        facts = [
            f"{' = '.join(names)}: shape {tuple(parameter.shape)}, {parameter.dtype}, requires_grad="
            f"{parameter.requires_grad}"
            for parameter, names in names_of(model).items()
        ]
        facts += [f"configuration: {key.name}={getattr(config, key.name)!r}" for key in fields(config) if key.repr]
        require_agreement(what, facts, group=None, device=device)
    broadcast_module(model)


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter once, with all names it has: tied ones have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def optimizer_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """All parameters that take gradients, as groups of an optimizer: plain ones apart from sharded ones.

    ``foreach``, which is the default of torch's optimizers on an accelerator, refuses both kinds in one group.
    """
    plain: list[nn.Parameter] = []
    sharded: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (sharded if isinstance(parameter, DTensor) else plain).append(parameter)
    return [{"params": kind} for kind in (plain, sharded) if kind]


def require_still_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """``GradientStateError`` where one of ``frozen`` takes a gradient by now, which nobody would reduce."""
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise GradientStateError(
                f"{name} took no gradient when the model was wrapped and does now: its gradient would not be reduced. "
                "Call requires_grad_(True) before wrap, and freeze by leaving it out of the optimizer"
            )


def before_steps(owner: _Owner, function: Callable[[_Owner, torch.optim.Optimizer], None]) -> bool:
    """From now on call ``function(owner, optimizer)`` before each step of any optimizer, as long as ``owner`` lives.

    The hook does not keep ``owner`` alive. False, and nothing is done, where torch has no hook for all optimizers.
    """
    register = getattr(optimizers, "register_optimizer_step_pre_hook", None)
    if register is None:
        return False
    alive = weakref.ref(owner)

    def hook(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        here = alive()
        if here is not None:
            function(here, optimizer)

    weakref.finalize(owner, register(hook).remove)
    return True


def zero_grad_too(owner: nn.Module | torch.optim.Optimizer, also: Callable[[bool], None]) -> None:
    """From now on ``owner.zero_grad(set_to_none)`` calls ``also(set_to_none)`` when it has done its own.

    Both kinds of ``zero_grad`` go over ``.grad`` alone, and gradients may wait to be reduced elsewhere.
    """
    zero_grad = owner.zero_grad

    @functools.wraps(zero_grad)
    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        also(set_to_none)

    owner.__dict__["zero_grad"] = zero_all


def tensors_in(output: object) -> Iterator[Tensor]:
    """The tensors in what a forward returned: also in mappings, sequences and the fields of objects."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from tensors_in(getattr(output, name, None))


def _require_wrappable(what: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, DistributedDataParallel)):
            raise ValueError(
                f"{what}: {name or type(model).__name__} is distributed already: wrap a model once, and before "
                "anything else distributes it"
            )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ValueError(f"{what}: {name} is a DTensor already: a strategy distributes ordinary tensors")
        if tensor.device.type == "meta":
            raise ValueError(
                f"{what}: {name} is on the meta device and has no values that ranks could share: give it values with "
                "model.to_empty(device=...) and an initialisation before wrapping"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{what}: {type(model).__name__} has no parameter that takes a gradient: there is nothing to train"
        )
