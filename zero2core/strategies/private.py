"""The only module that touches what torch does not promise: FSDP2's units, and the end of a backward.

FSDP2 keeps what a trainer must be able to see out of sight: gradients that were added up and not reduced, and, where
parameters stay whole after a backward, the sharded ones with the gradients. And it mishandles parts of one step that do
not use the same parameters (measured with torch 2.13):

- a parameter used in an earlier part of ``no_sync`` beside one used in the last part alone: ``AssertionError``, for one
  gradient is of the dtype of the reduction and the other of the dtype of the computation;
- the same where only the sum over replicas was deferred: the sums over shards are kept end to end, without their
  names, so that sums of other lengths fail and sums of equal length would be added to those of other parameters;
- a unit used in a deferred part and not in the last: its gradients are never summed over replicas, and stay for the
  next step;
- a unit that never ran, in ``no_sync``: ``AttributeError``.

:class:`Unit` mends these: before a unit reduces, all of its gradients are brought to one dtype, and those that are
missing are zeros where the others need them. Who was filled with zeros and used by nobody is found by
:meth:`Unit.drop_unused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["Flags", "Unit", "at_end_of_backward", "backward_id", "require_supported", "units_of"]

_OLDEST = (2, 11)
# What :class:`Unit` uses of a group of parameters, and of one of them.
_OF_GROUP = (
    "post_backward", "finalize_backward", "fsdp_params", "reduce_grads", "all_reduce_grads", "reshard_after_backward",
    "comm_ctx", "_partial_reduce_output", "_training_state", "_is_hsdp",
)  # fmt: skip
_OF_PARAMETER = (
    "sharded_param", "unsharded_accumulated_grad", "accumulate_unsharded_grad_if_needed",
    "to_accumulated_grad_if_needed",
)  # fmt: skip


def require_supported() -> None:
    """Raise ``RuntimeError`` unless this torch has what the module uses."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    missing = [
        name
        for name, owner in (
            ("queue_callback", torch.autograd.Variable._execution_engine),
            ("_current_graph_task_id", torch._C),
            ("_get_fsdp_state", FSDPModule),
        )
        if not hasattr(owner, name)
    ]
    if version < _OLDEST or missing:
        raise _unsupported(missing)


def _unsupported(missing: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} does not have the FSDP2 that strategies were written for"
        + (f" (no {', '.join(missing)})" if missing else "")
        + f": use torch {_OLDEST[0]}.{_OLDEST[1]} or newer, or DDP"
    )


def backward_id() -> int:
    """A number that tells the backward in progress in this thread from all others; -1 outside one."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Run ``function`` once, when the backward in progress has computed all gradients and FSDP2 has reduced them.

    To be called inside a backward (from a hook); ``RuntimeError`` elsewhere. Not run where the backward fails.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    # FSDP2's own work is a callback, too, and may be queued after this one. Those that are queued by callbacks come
    # last, and FSDP2 queues its own from hooks alone.
    queue(lambda: queue(function))


@dataclass(frozen=True)
class Flags:
    """What a unit does at the end of a backward.

    Attributes:
        reduce: gradients, over shards and replicas.
        all_reduce: over replicas, where ``reduce``.
        reshard: parameters.
    """

    reduce: bool
    all_reduce: bool
    reshard: bool


def units_of(module: nn.Module) -> list[Unit]:
    """A new :class:`Unit` for each group of parameters that FSDP2 communicates together, in the order of modules.

    Raises:
        RuntimeError: FSDP2 is not the one that this was written for.
    """
    require_supported()
    found: dict[int, Unit] = {}
    for name, child in module.named_modules():
        if not isinstance(child, FSDPModule):
            continue
        state = child._get_fsdp_state()
        groups: Sequence[Any]
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        else:  # one group for each state, before torch allowed several
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            found.setdefault(id(group), Unit(group, name))
    return list(found.values())


class Unit:
    """One group of parameters of FSDP2, whose gradients can be looked for, reduced without a backward and told apart.

    Args:
        group: FSDP2's ``FSDPParamGroup``.
        name: of the module it belongs to.

    Attributes:
        name: of the module; empty for the root.
        fills: a parameter that this rank does not use counts as zeros, so that ranks may differ in what they use.

    Raises:
        RuntimeError: FSDP2 is not the one that this was written for.
    """

    def __init__(self, group: Any, name: str) -> None:  # noqa: ANN401 (private to torch)
        missing = [each for each in _OF_GROUP if not hasattr(group, each)]
        if not missing:
            missing = [each for each in _OF_PARAMETER for held in group.fsdp_params[:1] if not hasattr(held, each)]
        if missing:
            raise _unsupported(missing)
        self.name = name
        self.fills = False
        self._group = group
        self._reduce: Callable[..., None] = group.post_backward
        self._used: set[int] = set()  # had a gradient since the last reduction
        self._filled: set[int] = set()  # zeros were reduced for it, into a gradient that was None

    def mend(self) -> None:
        """From now on do what the module says of parts that do not use the same parameters. To be called once."""
        self._group.post_backward = self._after_backward

    @property
    def flags(self) -> Flags:
        """What it does at the end of a backward; can be set."""
        group = self._group
        return Flags(group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward)

    @flags.setter
    def flags(self, flags: Flags) -> None:
        group = self._group
        group.reduce_grads, group.all_reduce_grads = flags.reduce, flags.all_reduce
        group.reshard_after_backward = flags.reshard

    @property
    def defers(self) -> bool:
        """Whether the end of a backward leaves gradients unreduced, or over shards alone."""
        group = self._group
        return not group.reduce_grads or (group._is_hsdp and not group.all_reduce_grads)

    @property
    def sharded(self) -> list[nn.Parameter]:
        """Its parameters as an optimizer has them, also while the module shows whole ones."""
        return [held.sharded_param for held in self._group.fsdp_params]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of its parameters that take gradients, of which FSDP2 allows one."""
        return {parameter.dtype for parameter in self.sharded if parameter.requires_grad}

    @property
    def pending(self) -> bool:
        """Whether gradients were added up here and are not reduced (or not over replicas)."""
        return self._group._partial_reduce_output is not None or any(map(_has_gradient, self._group.fsdp_params))

    def discard(self) -> None:
        """Forget gradients that were added up and not reduced."""
        self._group._partial_reduce_output = None
        for held in self._group.fsdp_params:
            held.unsharded_accumulated_grad = None
            if _ran(held):
                held._unsharded_param.grad = None
        self._used.clear()
        self._filled.clear()

    def flush(self) -> None:
        """Reduce what was added up, over shards and replicas, outside a backward. Collective if the unit ever ran."""
        group = self._group
        if not any(map(_ran, group.fsdp_params)) or not (self.fills or self.pending):
            return
        before = self.flags
        self.flags = Flags(reduce=True, all_reduce=True, reshard=True)
        try:
            self._after_backward()
            group.finalize_backward()
        finally:
            self.flags = before
            group._training_state = type(group._training_state).IDLE
        # The buffers of the reductions, which are done: the end of a backward would let go of them.
        states = getattr(group.comm_ctx, "reduce_scatter_states", None)
        if states is not None:
            states.clear()
        else:
            group.comm_ctx.reduce_scatter_state = None

    def used(self) -> list[bool]:
        """For each parameter, whether this rank has had a gradient of it since the last :meth:`drop_unused`."""
        return [index in self._used for index in range(len(self._group.fsdp_params))]

    @property
    def filled(self) -> bool:
        """Whether zeros were reduced for some parameter that had no gradient."""
        return bool(self._filled)

    def drop_unused(self, used: Sequence[bool]) -> None:
        """Set to None what is the sum of zeros alone: gradients of parameters that no rank has ``used``.

        A unit that waits to be summed over replicas is left as it is.
        """
        if self._group._partial_reduce_output is not None:
            return
        for index in self._filled:
            if not used[index]:
                self.sharded[index].grad = None
        self._used.clear()
        self._filled.clear()

    def _after_backward(self, *unused: Any) -> None:  # noqa: ANN401 (handed on)
        """What takes the place of FSDP2's own end of a unit's backward."""
        group = self._group
        if not any(map(_ran, group.fsdp_params)):
            return
        for index, held in enumerate(group.fsdp_params):
            if _ran(held) and held.sharded_param.requires_grad:
                held.accumulate_unsharded_grad_if_needed()
                if _has_gradient(held):
                    self._used.add(index)
        if group.reduce_grads:
            self._complete()
        self._reduce(*unused)

    def _complete(self) -> None:
        """Bring all gradients to one dtype, with zeros for those that are missing where the others need them."""
        group = self._group
        held = [(i, p) for i, p in enumerate(group.fsdp_params) if _ran(p) and p.sharded_param.requires_grad]
        deferred = group._partial_reduce_output is not None
        defers = group._is_hsdp and not group.all_reduce_grads and any(_has_gradient(p) for _, p in held)
        filling = self.fills or deferred or defers
        missing = [(i, p) for i, p in held if not _has_gradient(p)] if filling else []
        for index, parameter in missing:
            if parameter.sharded_param.grad is None:
                self._filled.add(index)
            parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
        if any(parameter.unsharded_accumulated_grad is not None for _, parameter in held):
            for _, parameter in held:
                parameter.to_accumulated_grad_if_needed()


def _ran(held: Any) -> bool:  # noqa: ANN401 (private to torch)
    """Whether the whole parameter was ever made."""
    return hasattr(held, "_unsharded_param")


def _has_gradient(held: Any) -> bool:  # noqa: ANN401 (private to torch)
    """Whether a gradient of the whole parameter is here, which nobody has reduced."""
    if held.unsharded_accumulated_grad is not None:
        return True
    whole: Tensor | None = getattr(held, "_unsharded_param", None)
    return whole is not None and whole.grad is not None
