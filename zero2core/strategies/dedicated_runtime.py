"""Dedicated matrices at work in a model: broadcast before a forward, freed after use, gradients reduced to the owner.

[Note: what all ranks decide alike]
Whether a matrix is broadcast depends on which modules ran and which outputs got a gradient, never on whether this rank
used the matrix: so ranks may differ in the matrices that they use, as long as the same modules run in the same order on
all of them, which FSDP2 needs too. What only this rank knows (its gradient is there, so the weights are not needed any
more) decides when storage is given back, and nothing else.

[Note: backward]
Hooks on what a module returns tell that its backward begins. Under ``"z3"`` each of them broadcasts, also where the
storage is still there: another rank may have given it back. A module that runs again inside a backward (recomputed
under a checkpoint) keeps the weights until their gradient is there, or the backward ends. A reentrant checkpoint runs a
backward within the backward, which may have used the weights up before the module is recomputed once more.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from zero2core import collectives
from zero2core.collectives import Work
from zero2core.errors import GradientStateError
from zero2core.strategies.dedicated_parameter import Absent, DedicatedParameter
from zero2core.strategies.marks import Marked
from zero2core.strategies.prepare import tensors_in
from zero2core.strategies.private import at_end_of_backward, backward_id

__all__ = ["DedicatedRuntime", "Keep"]

Keep = Literal["z2", "z3"]
"""``"z3"``: weights are given back after each use, and broadcast again for the backward. ``"z2"``: kept from the first
forward until the step."""

_NO_BACKWARD = -1
_IN_FLIGHT = 4  # reductions at once: enough to keep a link busy, and each has a whole matrix in memory
_NO_TENSORS = (type(None), bool, int, float, complex, str, bytes)


class _Unit:
    """A module with dedicated parameters of its own.

    Attributes:
        module, attributes: where they are.
        depth: forwards of it that are running.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes: dict[str, DedicatedParameter] = {}
        self.depth = 0

    @property
    def parameters(self) -> list[DedicatedParameter]:
        return list({id(parameter): parameter for parameter in self.attributes.values()}.values())

    def show(self) -> None:
        """Give the module its weights."""
        for attribute, parameter in self.attributes.items():
            self.module.__dict__[attribute] = parameter.leaf

    def hide(self) -> None:
        """Put what has no values in their place."""
        for attribute, parameter in self.attributes.items():
            self.module.__dict__[attribute] = Absent(parameter)


class DedicatedRuntime:
    """Runs the dedicated matrices of one model; made by :func:`zero2core.strategies.dedicated.dedicate`.

    Attributes:
        parameters: by name, in the order in which they are reduced; the same on every rank.
        group: of all ranks that hold the model; None: the default group.
        world: its size.
        reduce_dtype: in which gradients are summed over ranks.
        keep: see :data:`Keep`.
        synchronise: whether the end of a backward reduces.
        pending: whether a backward has run whose gradients are not reduced; the same on every rank.
        reduced: whether owners have gradients; the same on every rank.
        driver: None: the end of a backward outside :meth:`no_sync` reduces. Else it is called in each backward, and
            whoever gave it calls :meth:`reduce` when that has ended, or later.
    """

    def __init__(
        self,
        parameters: Mapping[str, DedicatedParameter],
        *,
        group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype,
        keep: Keep,
    ) -> None:
        self.parameters = dict(parameters)
        self.group, self.reduce_dtype, self.keep = group, reduce_dtype, keep
        self.world = collectives.group_size(group)
        self.synchronise = True
        self.pending = False
        self.reduced = False
        self.driver: Callable[[], None] | None = None
        self._units: list[_Unit] = []
        self._version = 1  # of the weights
        self._current: set[DedicatedParameter] = set()  # broadcast, and of this version
        self._uses: dict[DedicatedParameter, int] = dict.fromkeys(self.parameters.values(), 0)  # by running forwards
        self._in_backward: dict[DedicatedParameter, int] = {}  # the backward (of nested ones) that used it last
        self._done: set[DedicatedParameter] = set()  # this rank has their gradient
        self._backward = _NO_BACKWARD
        self._before_backward: tuple[dict[DedicatedParameter, int], list[int]] = ({}, [])
        for parameter in self.parameters.values():
            parameter.on_gradient = self._noting(parameter)

    def attach(self, model: nn.Module, marked: Sequence[Marked]) -> None:
        """Take the parameters out of the modules of ``model`` and put hooks in their place. To be called once."""
        units: dict[nn.Module, _Unit] = {}
        for found in marked:
            for module, attribute in found.sites:
                del module._parameters[attribute]
                units.setdefault(module, _Unit(module)).attributes[attribute] = self.parameters[found.name]
        self._units = list(units.values())
        for unit in self._units:
            unit.hide()
            unit.module.register_forward_pre_hook(self._opening(unit))
            unit.module.register_forward_hook(self._closing(unit))
        model.register_forward_hook(self._model_ran)
        self.clear_with(model)

    def clear_with(self, model: nn.Module) -> None:
        """From now on ``model.zero_grad()`` forgets gradients of the dedicated parameters, too."""
        zero_grad = model.zero_grad

        @functools.wraps(zero_grad)
        def zero_all(set_to_none: bool = True) -> None:
            # Module.zero_grad goes over parameters, and would leave gradients to be added to those of the next step.
            zero_grad(set_to_none)
            self.clear_gradients()

        model.__dict__["zero_grad"] = zero_all

    # Forward

    def _opening(self, unit: _Unit) -> Any:  # noqa: ANN401 (a hook)
        def opens(module: nn.Module, args: Any) -> None:  # noqa: ANN401
            self._forget_failed_backward()
            # Recomputed by a reentrant checkpoint, after a backward within this one has used the weights.
            self._doubt(p for p in unit.parameters if self._in_backward.get(p, backward_id()) != backward_id())
            self._fill(unit.parameters)
            for parameter in unit.parameters:
                self._uses[parameter] += 1
            unit.depth += 1
            unit.show()

        return opens

    def _closing(self, unit: _Unit) -> Any:  # noqa: ANN401 (a hook)
        def closes(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
            unit.depth -= 1
            if unit.depth == 0:
                unit.hide()
            for parameter in unit.parameters:
                self._uses[parameter] -= 1
            if torch.is_grad_enabled():
                self._hook_outputs(unit, output)
            if self.keep == "z3":
                self._let_go(p for p in unit.parameters if not self._uses[p] and p not in self._in_backward)

        return closes

    def _hook_outputs(self, unit: _Unit, output: Any) -> None:  # noqa: ANN401
        tensors = list(tensors_in(output))
        if not tensors and self.keep == "z3" and not isinstance(output, _NO_TENSORS):
            raise TypeError(
                f"{type(unit.module).__name__} has dedicated parameters and returns a {type(output).__name__}, in "
                "which no tensor is found, so that its backward would find no weights: return tensors, in tuples, "
                'lists, dicts or dataclasses, or use keep="z2"'
            )
        self._on_gradient_of(tensors, unit.parameters)

    def _model_ran(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        """Make the end of a backward known on every rank, whatever this one uses."""
        if torch.is_grad_enabled():
            self._on_gradient_of(list(tensors_in(output)), ())

    def _on_gradient_of(self, tensors: Sequence[Tensor], parameters: Sequence[DedicatedParameter]) -> None:
        if any(tensor.requires_grad for tensor in tensors):
            register_multi_grad_hook(tensors, lambda gradient: self._backward_begins(parameters), mode="any")

    def _fill(self, parameters: Sequence[DedicatedParameter]) -> None:
        """Broadcast what is not current. Collective."""
        started: list[Work] = []
        for parameter in parameters:
            if parameter in self._current:
                if not parameter.has_storage:
                    raise GradientStateError(
                        f"{parameter.name} is used again in a backward that has computed its gradient already: a "
                        'recomputation uses it outside the gradient\'s path (detached, say). Use keep="z2"'
                    )
                continue
            buffer = parameter.prepare(self._version)
            self._current.add(parameter)
            if self.world > 1:
                started.append(collectives.launch_broadcast(buffer, src=parameter.src, group=self.group))
        for work in started:
            work.wait()

    def _doubt(self, parameters: Iterable[DedicatedParameter]) -> None:
        """Some rank may have given back what is current: it is to be broadcast again."""
        if self.keep == "z3":
            self._current.difference_update(parameter for parameter in parameters if not self._uses[parameter])

    def _let_go(self, parameters: Iterable[DedicatedParameter]) -> None:
        for parameter in parameters:
            self._current.discard(parameter)
            parameter.free()

    # Backward

    def _backward_begins(self, parameters: Sequence[DedicatedParameter]) -> None:
        """Of a module with ``parameters``, or of all."""
        if self._backward == _NO_BACKWARD:
            self._backward = backward_id()
            self._before_backward = (dict(self._uses), [unit.depth for unit in self._units])
            self.pending = True
            at_end_of_backward(self._backward_ends)
            if self.driver is not None:
                self.driver()
        for parameter in self._done - set(parameters):
            if not self._uses[parameter]:
                parameter.free()  # and still "current": whether a rank has its gradient is known to it alone
        self._done.clear()
        self._doubt(p for p in parameters if p in self._in_backward)
        self._in_backward.update(dict.fromkeys(parameters, backward_id()))
        self._fill(parameters)

    def _noting(self, parameter: DedicatedParameter) -> Any:  # noqa: ANN401
        def has_gradient() -> None:
            if self.keep == "z3":
                self._done.add(parameter)
            if self._backward == _NO_BACKWARD:
                self._backward_begins(())

        return has_gradient

    def _backward_ends(self) -> None:
        self._close_backward()
        if self.synchronise and self.driver is None:
            self.reduce()

    def _close_backward(self) -> None:
        """Give storage back; forwards that began in the backward and were broken off (recomputation) have ended."""
        uses, depths = self._before_backward
        self._uses.update(uses)
        for unit, depth in zip(self._units, depths, strict=True):
            unit.depth = depth
            if depth == 0:
                unit.hide()
        self._backward = _NO_BACKWARD
        self._in_backward.clear()
        self._done.clear()
        if self.keep == "z3":
            self._let_go(p for p in self.parameters.values() if not self._uses[p])

    def _forget_failed_backward(self) -> None:
        """A backward that raised has not called its end."""
        if self._backward != _NO_BACKWARD and backward_id() == _NO_BACKWARD:
            self._close_backward()

    # Gradients and weights

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what waits to the owners, and let go of it elsewhere. Collective.

        A matrix of which no rank has a gradient is left as it is; where only some have one, the others give zeros.
        Where this fails, gradients count as waiting, until they are cleared.
        """
        parameters = list(self.parameters.values())
        in_flight: deque[tuple[DedicatedParameter, Tensor, Work | None]] = deque()
        for parameter, used in zip(parameters, self._used_by_any(parameters), strict=True):
            if not used:
                continue
            self.reduced = True
            if len(in_flight) == _IN_FLIGHT:
                self._arrived(*in_flight.popleft())
            part, parameter.waiting = parameter.waiting, None
            if part is None:
                source = torch.zeros(parameter.shape, dtype=self.reduce_dtype, device=parameter.leaf.device)
            else:
                source = part.to(self.reduce_dtype)
            del part  # where the sum is of another dtype, its bytes are free from here on
            work = None
            if self.world > 1:
                work = collectives.reduce(source, dst=parameter.src, group=self.group)
            in_flight.append((parameter, source, work))
            del source
        while in_flight:
            self._arrived(*in_flight.popleft())
        self.pending = False

    def _arrived(self, parameter: DedicatedParameter, total: Tensor, work: Work | None) -> None:
        if work is not None:
            work.wait()
        if parameter.is_owner:  # elsewhere it is garbage
            parameter.add_reduced(total, self.world)

    def _used_by_any(self, parameters: Sequence[DedicatedParameter]) -> list[bool]:
        used = [parameter.waiting is not None for parameter in parameters]
        if self.world > 1:
            flags = torch.tensor(used, dtype=torch.uint8, device=collectives.group_device(self.group))
            collectives.all_reduce_max(flags, group=self.group)
            used = [flag > 0 for flag in flags.tolist()]
        return used

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards add up gradients without reducing them; what held before holds again after."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def flush(self) -> None:
        """Reduce what was added up in :meth:`no_sync` and is not reduced; nothing where nothing waits. Collective."""
        if self.pending:
            self.reduce()

    def require_reduced(self, what: str) -> None:
        """Raise ``GradientStateError`` where gradients wait to be reduced; alike on every rank."""
        if self._backward != _NO_BACKWARD:
            raise GradientStateError(
                f"{what}: the last backward has not ended, so gradients of dedicated parameters are not reduced. If it "
                "raised, run zero_grad() and the step again"
            )
        if self.pending:
            raise GradientStateError(
                f"{what}: gradients of dedicated parameters were added up in no_sync and never reduced. Run the last "
                "backward outside no_sync, or call flush(model); or zero_grad() to drop them"
            )

    def clipped_gradients(self) -> list[Tensor]:
        """Reduced gradients of this rank that are to be clipped (all but those of records with ``need_clip=False``)."""
        owned = [parameter for parameter in self.parameters.values() if parameter.info.need_clip]
        return [parameter.grad for parameter in owned if parameter.grad is not None]

    def clear_gradients(self) -> None:
        """Forget gradients, reduced or not."""
        self._forget_failed_backward()
        self.pending = self.reduced = False
        for parameter in self.parameters.values():
            parameter.grad = parameter.waiting = None

    def discard(self) -> None:
        """Forget what is not reduced."""
        self._forget_failed_backward()
        self.pending = False
        for parameter in self.parameters.values():
            parameter.waiting = None

    def drop_reduced(self) -> None:
        """Forget what is reduced."""
        self.reduced = False
        for parameter in self.parameters.values():
            parameter.grad = None

    def weights_changed(self) -> None:
        """To be called on every rank after an owner changed a weight: it is broadcast anew by the next forward."""
        self._version += 1
        # No forward runs now; one that seems to has raised.
        self._uses = dict.fromkeys(self._uses, 0)
        for unit in self._units:
            unit.depth = 0
            unit.hide()
        self._let_go(self.parameters.values())

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """Whole fp32 weights of all matrices by name, on every rank: new tensors. Collective."""
        state = {}
        for name, parameter in self.parameters.items():
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.leaf.device)
            if parameter.weight is not None:
                whole.copy_(parameter.weight)
            if self.world > 1:
                collectives.broadcast(whole, src=parameter.src, group=self.group)
            state[name] = whole
        return state

    @torch.no_grad()
    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Owners take their weights from ``state``, of :meth:`full_state`; to be called on every rank.

        Raises:
            ValueError: a name or a shape is missing or another. Nothing has changed.
        """
        for name in sorted({*state} ^ {*self.parameters}):
            where = "the state" if name in state else "the model"
            raise ValueError(f"{name} is dedicated in {where} only: pass what full_state gave for the same model")
        for name, parameter in self.parameters.items():
            if state[name].shape != parameter.shape:
                got, expected = tuple(state[name].shape), tuple(parameter.shape)
                raise ValueError(f"{name} has shape {got} in the state, expected {expected}")
        for name, parameter in self.parameters.items():
            if parameter.weight is not None:
                parameter.weight.copy_(state[name])
        self.weights_changed()
