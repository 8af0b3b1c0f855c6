"""The unsharded trainer of a distribution strategy: what it must equal, stage by stage.

One process that sees the whole batch: every parameter whole, in its own dtype, torch's AdamW on each, Muon on those
that are dedicated, and one clip over all of them. A parameter that no rank used in a step has no gradient, and the
optimizer passes it over. Tensors that were handed out are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from harness.oracles.bounds import SquaredNorm, squared_norm
from harness.oracles.contributions import Share, reduced
from harness.oracles.muon import State, adamw_step, muon_step
from harness.oracles.muon_bound import Judged, judge_update
from harness.scenario.model import Scenario, StepPlan, steps, strategy_of
from harness.scenario.muon import Mark
from harness.scenario.muon_check import odd_part
from harness.scenario.situations import Situation
from harness.scenario.strategy_check import exact_means

MOMENTS = {True: ("momentum",), False: ("exp_avg", "exp_avg_sq")}
"""What the state of a parameter holds for each element; by whether it is dedicated."""

_MATRIX = Mark(muon=True)


class UnshardedStrategy:
    """The trainer. The order of calls in a step: :meth:`begin`, perhaps :meth:`clip`, :meth:`step` or :meth:`drop`.

    Attributes:
        gradients: of this step, in each parameter's shape and dtype (dedicated: fp32); None: nobody used it.
        shows: what a wrong sum of them would be seen by.
    """

    def __init__(self, scenario: Scenario, initial: Sequence[Tensor], device: torch.device) -> None:
        """Start from these weights (copied to ``device``)."""
        self.scenario = scenario
        self.strategy = strategy_of(scenario)
        self.device = device
        self.rates = self.strategy.muon.lr, scenario.optimizer.lr
        self.gradients: list[Tensor | None] = []
        self.shows: frozenset[Situation] = frozenset()
        self._states = [
            _initial(weight.to(device), dedicated=place.dedicated)
            for weight, place in zip(initial, self.strategy.places, strict=True)
        ]

    def state(self, parameter: int) -> State:
        """One parameter as it is now: ``master`` is what the optimizer moves."""
        return self._states[parameter]

    def weight(self, parameter: int, dtype: torch.dtype) -> Tensor:
        """What a forward that computes in this dtype sees of one parameter."""
        return self._states[parameter].master.to(dtype)

    # -- one step ------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, *, look: bool = False) -> None:
        """Take the mean of a step's gradients, added in any order; ``look``: find out what they show."""
        everyone = Share(tuple(range(self.scenario.world)), float(self.scenario.world))
        found: list[Tensor | None] = []
        shows: set[Situation] = set()
        for index, (parameter, state) in enumerate(zip(self.scenario.parameters, self._states, strict=True)):
            mean = reduced(self.scenario, plan, index, everyone, look=look)
            shows |= mean.shows
            if mean.num_contributions == 0:
                found.append(None)
                continue
            value = torch.from_numpy(mean.value).view(parameter.shape)
            found.append(value.to(device=self.device, dtype=state.master.dtype))
        self.gradients = found
        self.shows = frozenset(shows)

    def adopt_gradients(self, observed: Mapping[int, Tensor]) -> None:
        """Go on with gradients as they were seen, whole, where they may differ from those worked out here."""
        self.gradients = [observed.get(index, gradient) for index, gradient in enumerate(self.gradients)]

    def squared_norm(self) -> SquaredNorm:
        """Of all gradients together, as they are now."""
        return squared_norm([each.float().cpu().numpy() for each in self.gradients if each is not None])

    def coefficient(self, norm: Tensor, max_norm: float) -> Tensor:
        """What a clip multiplies by, worked out in fp32 from the norm that was seen (0-dim fp32)."""
        return (max_norm / (norm.to(self.device) + 1e-6)).clamp(max=1.0)

    def clip(self, coefficient: Tensor) -> None:
        """Multiply all gradients in fp32, and round each product to the gradient's dtype once."""
        self.gradients = [
            None if each is None else (each.float() * coefficient).to(each.dtype) for each in self.gradients
        ]

    def step(self) -> None:
        """Move everything that has a gradient; gradients are dropped."""
        self._states = [
            state if gradient is None else self._moved(index, state, gradient)
            for index, (state, gradient) in enumerate(zip(self._states, self.gradients, strict=True))
        ]
        self.gradients = []

    def _moved(self, index: int, state: State, gradient: Tensor) -> State:
        muon, adamw = self.strategy.muon, self.scenario.optimizer
        if self.strategy.places[index].dedicated:
            return muon_step(state, gradient, _MATRIX, muon, self.rates[0], muon.weight_decay)
        return adamw_step(
            state,
            gradient,
            lr=self.rates[1],
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
            foreach=adamw.foreach,
        )

    def judge_master(self, parameter: int, before: State, gradient: Tensor, observed: Tensor) -> Judged:
        """Judge a dedicated master after :meth:`step`, where it is not the one found here bit for bit.

        Args:
            parameter: its index.
            before: its state before the step.
            gradient: clipped, of the step.
            observed: the master now; fp32, whole.
        """
        muon = self.strategy.muon
        momentum = self._states[parameter].moments[0]
        return judge_update(
            observed.to(self.device).view(momentum.shape),
            before.master,
            gradient.lerp(momentum, muon.beta) if muon.nesterov else momentum,
            _MATRIX,
            muon,
            lr=self.rates[0],
            weight_decay=muon.weight_decay,
        )

    def adopt_masters(self, observed: Mapping[int, Tensor]) -> None:
        """Go on with masters as they were seen, whole."""
        for index, master in observed.items():
            self._states[index] = replace(self._states[index], master=master.to(self.device))

    def drop(self) -> None:
        """Forget this step's gradients: nothing moves."""
        self.gradients = []

    def set_rate(self, lr: float) -> None:
        """The learning rate of both sets from the next step on."""
        self.rates = (lr, lr)


def _initial(weight: Tensor, *, dedicated: bool) -> State:
    own = weight.detach().clone(memory_format=torch.contiguous_format)
    master = own.to(torch.float32 if dedicated else own.dtype, copy=True)
    return State(own, master, tuple(torch.zeros_like(master) for _ in MOMENTS[dedicated]))


def exact_squares(scenario: Scenario) -> bool:
    """Whether every squared norm of this scenario's reduced gradients is exact in fp64, in any order.

    The sum of all contributions to an element is an integer multiple of the odd part of the world, times a power of
    two; its mean is an integer of at most ``world * parts * max_k * multiple / odd part`` times another power of two.
    Squares of such integers, added up over all elements, must stay below ``2**53``; squares of fp32 values neither
    over- nor underflow in fp64.
    """
    if not all(exact_means(scenario, len(plan.parts)) for plan in steps(scenario)):
        return False
    num_parts = max((len(plan.parts) for plan in steps(scenario)), default=1)
    odd = odd_part(Fraction(scenario.world))
    multiple = strategy_of(scenario).multiple
    if multiple % odd:
        return False
    largest = scenario.world * num_parts * scenario.values.max_k * (multiple // odd)
    return scenario.numel * float(largest) ** 2 < 2.0**53
