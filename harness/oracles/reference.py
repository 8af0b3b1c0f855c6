"""The unsharded trainer: what a sharded system must equal, stage by stage.

It keeps whole, separate tensors per parameter and shares no code with any subject. AdamW over separate tensors equals
AdamW over a flat shard bit for bit, whatever the cut, for ``foreach=False`` and ``True`` (`harness doctor` measures it
on the machine at hand); every variant for which that does not hold is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from harness.oracles.bounds import SquaredNorm, squared_norm
from harness.oracles.compare import FEW, flat_bytes
from harness.scenario.model import AdamW

T = TypeVar("T")

_REFUSED = {
    "fused": "its vector tail rounds unlike its body, so the bits depend on where an element lies in the vector",
    "capturable": "it computes the bias corrections on the device, in another precision and order",
    "differentiable": "it runs other operations than the optimizer that is verified",
}


class NotComparableError(ValueError):
    """The optimizer's settings allow no bitwise comparison; the message says which and why."""


def build_adamw(parameters: Sequence[Tensor], settings: AdamW, **flags: bool) -> torch.optim.AdamW:
    """The optimizer as both sides run it; ``flags`` are further switches of ``torch.optim.AdamW``.

    Raises:
        NotComparableError: a flag is on that makes bits depend on the layout or runs another algorithm.
        TypeError: an unknown flag.
    """
    for flag, on in flags.items():
        if flag not in _REFUSED:
            raise TypeError(f"build_adamw() knows no flag {flag!r}; known are {', '.join(_REFUSED)}")
        if on:
            raise NotComparableError(f"AdamW with {flag}=True cannot be compared bit for bit: {_REFUSED[flag]}")
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=settings.foreach,
        amsgrad=settings.amsgrad,
        maximize=settings.maximize,
        fused=False,
    )


def moment_names(settings: AdamW) -> tuple[str, ...]:
    """What the state of such an optimizer has for each element, by the names that torch gives it."""
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if settings.amsgrad else ()))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all its parameters, as a schedule does between two steps."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class UnshardedTrainer:
    """fp32 masters, AdamW moments and low-precision weights of all parameters, whole.

    Attributes:
        weights: the compute weights, each in its own dtype and shape; change in :meth:`gather` and :meth:`load`.
        num_steps: optimizer steps taken since it was made, or rebuilt.
    """

    def __init__(self, initial: Sequence[Tensor], settings: AdamW, device: torch.device | str = "cpu") -> None:
        """Start from the compute weights ``initial`` (copied): each master is its weight in fp32."""
        as_rows = torch.contiguous_format  # whatever the strides of the weights are
        self.weights = [weight.detach().to(device, copy=True, memory_format=as_rows) for weight in initial]
        self.num_steps = 0
        self._settings = settings
        self._masters = [torch.nn.Parameter(weight.to(torch.float32, copy=True)) for weight in self.weights]
        self._optimizer = build_adamw(self._masters, settings)
        self._gradients: list[Tensor] = []
        self._known: dict[str, Any] = {}

    def fork(self, *, gradients: bool = False, weights: bool = False, state: bool = False) -> UnshardedTrainer:
        """Another trainer at the same point; what is not asked for as a copy belongs to both.

        Args:
            gradients: Copy the gradients: :meth:`scale_gradients` may be called.
            weights: Copy the compute weights: :meth:`gather` may be called; with ``state``, :meth:`load`.
            state: Copy masters and moments: :meth:`step` may be called.

        :meth:`set_rate` and :meth:`rebuild` need no copies.
        """
        other = copy.copy(self)
        other._known = {}
        if gradients:
            other._gradients = [gradient.clone() for gradient in self.gradients]
        if weights:
            other.weights = [weight.clone() for weight in self.weights]
        if state:
            other._masters = [torch.nn.Parameter(master.detach().clone()) for master in self._masters]
            other._optimizer = build_adamw(other._masters, self._settings)
            for old, new in zip(self._masters, other._masters, strict=True):
                held = self._optimizer.state.get(old)
                if held:
                    other._optimizer.state[new] = {name: value.clone() for name, value in held.items()}
        return other

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Give every parameter its reduced gradient: fp32, the parameter's shape, on the trainer's device.

        None counts as zeros. The tensors are kept, not copied, and :meth:`scale_gradients` changes them.

        Raises:
            ValueError: another number, shape, dtype or device than the parameters'.
        """
        if len(gradients) != len(self._masters):
            raise ValueError(f"{len(gradients)} gradients for {len(self._masters)} parameters")
        taken = []
        for index, (master, gradient) in enumerate(zip(self._masters, gradients, strict=True)):
            if gradient is None:
                gradient = torch.zeros_like(master)
            if (gradient.shape, gradient.dtype, gradient.device) != (master.shape, torch.float32, master.device):
                raise ValueError(
                    f"gradient {index} is {gradient.dtype} {list(gradient.shape)} on {gradient.device}, "
                    f"expected torch.float32 {list(master.shape)} on {master.device}"
                )
            taken.append(gradient)
        self._gradients = taken
        self._known = {}

    def scale_gradients(self, coefficient: float) -> None:
        """Multiply all gradients by ``coefficient`` in fp32, in place: what clipping does to a shard."""
        for gradient in self.gradients:
            gradient.mul_(coefficient)
        self._known = {}

    def squared_norm(self) -> SquaredNorm:
        """Squared L2 norm of the gradients as they are now, with its error bound."""
        return self.once("squared norm", lambda: squared_norm([each.cpu().numpy() for each in self.gradients]))

    def once(self, what: str, work_out: Callable[[], T]) -> T:
        """What ``work_out`` gives, worked out once between two changes of this trainer."""
        if what not in self._known:
            self._known[what] = work_out()
        known: T = self._known[what]
        return known

    def step(self) -> None:
        """One AdamW step of every parameter from its gradient, which is dropped.

        Raises:
            RuntimeError: no gradients were set since the last step.
        """
        for master, gradient in zip(self._masters, self.gradients, strict=True):
            master.grad = gradient
        self._gradients = []
        set_rate(self._optimizer, self._settings.lr)
        self._optimizer.step()
        for master in self._masters:
            master.grad = None
        self._known = {}
        self.num_steps += 1

    def gather(self) -> None:
        """Round the masters to the compute weights."""
        for weight, master in zip(self.weights, self._masters, strict=True):
            weight.copy_(master.detach())
        self._known = {}

    def set_rate(self, lr: float) -> None:
        """The learning rate from the next step on."""
        # Put into the optimizer there: until then it may belong to another trainer as well.
        self._settings = replace(self._settings, lr=lr)

    def load(self, weights: Sequence[Tensor]) -> None:
        """Other compute weights (copied), of the same dtypes and shapes: masters become these, moments stay."""
        with torch.no_grad():
            for weight, master, new in zip(self.weights, self._masters, weights, strict=True):
                weight.copy_(new)
                master.copy_(weight)
        self._known = {}

    def rebuild(self) -> None:
        """Begin anew with the compute weights as they are: masters from them, no moments, the same learning rate."""
        self._masters = [torch.nn.Parameter(weight.to(torch.float32, copy=True)) for weight in self.weights]
        self._optimizer = build_adamw(self._masters, self._settings)
        self._gradients = []
        self._known = {}
        self.num_steps = 0

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients set for this step, fp32, by parameter; raises RuntimeError when there are none."""
        if not self._gradients:
            raise RuntimeError("the reference has no gradients: call set_gradients() first")
        return self._gradients

    def master(self, parameter: int) -> Tensor:
        """The fp32 master of one parameter, in its shape; not a copy."""
        return self._masters[parameter].detach()

    def tensors(self) -> list[Tensor]:
        """Everything this trainer keeps alive: weights, masters, gradients, the optimizer's state."""
        states = self._optimizer.state.values()
        state = [value for held in states for value in held.values() if isinstance(value, Tensor)]
        return [*self.weights, *self._masters, *self._gradients, *state]

    def flat_master(self, most: int = FEW) -> bytes | None:
        """The bytes of all masters, end to end; None where they are more than ``most``, or not on a CPU."""
        return self._flat("master", lambda: [master.detach() for master in self._masters], most)

    def flat_gradient(self, most: int = FEW) -> bytes | None:
        """The same of the gradients."""
        return self._flat("gradient", lambda: self.gradients, most)

    def flat_moments(self, most: int = FEW) -> tuple[bytes, ...] | None:
        """The same of each of the moments."""
        names = moment_names(self._settings)
        flat = [self._flat(name, partial(self._of_all, place), most) for place, name in enumerate(names)]
        found = tuple(each for each in flat if each is not None)
        return found if len(found) == len(flat) else None

    def _of_all(self, place: int) -> list[Tensor]:
        return [self.moments(index)[place] for index in range(len(self._masters))]

    def _flat(self, what: str, tensors: Callable[[], Sequence[Tensor]], most: int) -> bytes | None:
        few = self.once(what, lambda: flat_bytes(tensors()))
        return self.once(f"{what} of many", lambda: flat_bytes(tensors(), most)) if few is None and most > FEW else few

    def moments(self, parameter: int) -> tuple[Tensor, ...]:
        """The moments of one parameter (:func:`moment_names`), fp32, in its shape; not copies.

        Raises:
            RuntimeError: there are none before the first step.
        """
        state = self._optimizer.state.get(self._masters[parameter])
        if not state:
            raise RuntimeError("the reference has no moments before its first step")
        return tuple(state[name] for name in moment_names(self._settings))
