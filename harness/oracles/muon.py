"""The unsharded Muon trainer: what a system that shards Muon must equal, stage by stage.

It keeps whole matrices and whole vectors, each as one tensor, and shares no code with any system. A parameter of a
colour has, in each of the colour's groups of ranks, a :class:`Life` of its own: the same initial weights, gradients of
that group's ranks alone.

Nothing that was handed out is ever changed: a step makes new tensors. So the ranks of a simulated world, each at a
point of its own, can share what they have in common (:class:`Lineage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from harness.oracles import newton_schulz
from harness.oracles.bounds import SquaredNorm, squared_norm
from harness.oracles.contributions import Share, reduced
from harness.oracles.muon_bound import Judged, judge_update
from harness.scenario.model import Domain, Scenario, StepPlan, muon_of, steps
from harness.scenario.muon import AdaptiveClip, GlobalClip, Mark, MuonSettings
from harness.scenario.situations import Situation

T = TypeVar("T")

MOMENTS = {True: ("momentum",), False: ("exp_avg", "exp_avg_sq")}
"""What the state of a parameter holds for each element; by whether it is orthogonalised."""


class Life(NamedTuple):
    """One parameter as the ranks of one group train it. ``ranks``: ascending; ``divisor``: of the averaged gradient."""

    parameter: int
    ranks: tuple[int, ...]
    divisor: float


def lives(scenario: Scenario) -> tuple[Life, ...]:
    """All of them, by parameter, then by group as the colour lists them."""
    muon = muon_of(scenario)
    everyone = tuple(range(scenario.world))
    found = []
    for parameter, mark in enumerate(muon.marks):
        if mark.color is None:
            found.append(Life(parameter, everyone, float(scenario.world)))
            continue
        color = muon.colors[mark.color]
        for ranks in color.groups:
            divisor = float(len(ranks)) if color.divisor is None else color.divisor
            found.append(Life(parameter, tuple(ranks), divisor))
    return tuple(found)


@dataclass(frozen=True)
class State:
    """A life at one point in time; all tensors whole, in the parameter's shape. Never changed.

    ``master`` and ``moments`` (:data:`MOMENTS`) are fp32, ``weight`` has the parameter's dtype.
    """

    weight: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    num_steps: int = 0


def initial_state(weight: Tensor, mark: Mark) -> State:
    """Begin with these weights (copied)."""
    own = weight.detach().clone(memory_format=torch.contiguous_format)
    master = own.to(torch.float32, copy=True)
    return State(own, master, tuple(torch.zeros_like(master) for _ in MOMENTS[mark.muon]))


class Lineage:
    """A point in the history of trainers that did the same so far. Whoever does the same next comes to the same point.

    Old points live as long as somebody holds them.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, tuple[Any, Lineage]] = {}

    def follow(self, what: Hashable, work_out: Callable[[], T]) -> tuple[T, Lineage]:
        """What ``work_out`` gave to the first who did ``what`` here, and where it leads."""
        if what not in self._next:
            self._next[what] = work_out(), Lineage()
        value, lineage = self._next[what]
        return value, lineage


@dataclass(frozen=True)
class Gradients:
    """A step's reduced gradients: of each life fp32 in the parameter's shape; ``missing``: those no rank had any of."""

    of: Mapping[Life, Tensor]
    missing: frozenset[Life]
    shows: frozenset[Situation]


@dataclass(frozen=True)
class Clipping:
    """What the clip did to a step's gradients.

    Attributes:
        norm: the joint squared norm, of the lives whose marks say ``need_clip``.
        factors: of each life, in fp64; 1.0 where nothing is done. To be rounded to fp32 once.
    """

    norm: SquaredNorm
    factors: Mapping[Life, float]


@dataclass
class _Tracked:
    """The adaptive clip's memory: steps so far, and of each life the norm that it tracks."""

    num_steps: int = 0
    norms: dict[Life, float] = field(default_factory=dict)


class UnshardedMuon:
    """The trainer. The order of calls in a step: :meth:`begin`, perhaps :meth:`clip`, :meth:`step`, :meth:`gather`."""

    def __init__(self, scenario: Scenario, initial: Sequence[Tensor], trained: Sequence[Life] | None = None) -> None:
        """Start from the compute weights ``initial`` (copied), and compute on their device.

        ``trained``: the lives that :meth:`step` moves; None: all. Gradients and norms are of all lives anyway.
        """
        self.scenario = scenario
        self.muon = muon_of(scenario)
        self.lives = lives(scenario)
        self._device = initial[0].device
        self.trained = self.lives if trained is None else tuple(trained)
        self.rates = self.muon.settings.lr, scenario.optimizer.lr
        self._states = {life: initial_state(initial[life.parameter], self._mark(life)) for life in self.trained}
        self._tracked = _Tracked()
        self._gradients: Gradients | None = None
        self._lineage: Lineage | None = None

    def share(self, lineage: Lineage) -> None:
        """From here on, look there for what others have worked out: trainers of one scenario, at the same point."""
        self._lineage = lineage

    def _mark(self, life: Life) -> Mark:
        return self.muon.marks[life.parameter]

    def _follow(self, what: Hashable, work_out: Callable[[], T]) -> T:
        if self._lineage is None:
            return work_out()
        value, self._lineage = self._lineage.follow(what, work_out)
        return value

    # -- one step ------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, *, look: bool = False) -> Gradients:
        """Take a step's gradients, reduced in any order; ``look``: find out what they show."""
        self._gradients = self._follow(("gradients", plan.index), lambda: self._reduced(plan, look=look))
        return self._gradients

    def _reduced(self, plan: StepPlan, *, look: bool) -> Gradients:
        of: dict[Life, Tensor] = {}
        missing: set[Life] = set()
        shows: set[Situation] = set()
        for life in self.lives:
            found = reduced(self.scenario, plan, life.parameter, Share(life.ranks, life.divisor), look=look)
            shape = self.scenario.parameters[life.parameter].shape
            of[life] = torch.from_numpy(found.value).view(shape).to(self._device)
            shows |= found.shows
            if found.num_contributions == 0:
                missing.add(life)
        return Gradients(of, frozenset(missing), frozenset(shows))

    @property
    def gradients(self) -> Gradients:
        """Of this step; raises RuntimeError when there are none."""
        if self._gradients is None:
            raise RuntimeError("the reference has no gradients: call begin() first")
        return self._gradients

    def adopt_gradients(self, observed: Mapping[Life, Tensor]) -> None:
        """Go on with gradients as they were seen, where they may differ from those worked out here."""
        self._leave()
        self._gradients = replace(self.gradients, of={**self.gradients.of, **observed})

    def _leave(self) -> None:
        """What follows is this trainer's own."""
        self._lineage = None if self._lineage is None else Lineage()

    def skipped(self, life: Life) -> bool:
        """Nothing of this life moves in this step: no rank has a gradient, and such are skipped."""
        return self.muon.sharding.skip_missing and life in self.gradients.missing

    def clipping(self, observed_norm: float | None = None) -> Clipping:
        """What the clip is to do, which moves its memory: once a step.

        Args:
            observed_norm: the joint norm that the system saw, where it need not be exactly the one found here.
        """
        seen = None if observed_norm is None else observed_norm.hex()  # nan is not equal to itself
        clipping, self._tracked = self._follow(("clip", seen), lambda: self._clipping(observed_norm))
        return clipping

    def _clipping(self, observed_norm: float | None) -> tuple[Clipping, _Tracked]:
        concerned = [life for life in self.lives if self._mark(life).need_clip and not self.skipped(life)]
        arrays = {life: self.gradients.of[life].cpu().numpy() for life in concerned}
        norm = squared_norm(list(arrays.values()))
        joint = math.sqrt(norm.value) if observed_norm is None else observed_norm
        factors = dict.fromkeys(self.lives, 1.0)
        clip, tracked = self.muon.clip, self._tracked
        match clip:
            case GlobalClip():
                factors.update(dict.fromkeys(concerned, _at_most_1(_ratio(clip.max_norm, joint + 1e-6))))
            case AdaptiveClip():
                norms = {life: math.sqrt(squared_norm([array]).value) for life, array in arrays.items()}
                tracked, adaptive = _adapted(clip, tracked, norms, joint)
                factors.update(adaptive)
        return Clipping(norm, factors), tracked

    def clip(self, clipping: Clipping) -> None:
        """Scale the gradients: each factor rounded to fp32, one product in fp32."""
        self._gradients = self._follow("scale", lambda: self._scaled(clipping))

    def _scaled(self, clipping: Clipping) -> Gradients:
        of = {}
        for life, gradient in self.gradients.of.items():
            factor = torch.tensor(clipping.factors[life], dtype=torch.float32, device=gradient.device)
            of[life] = gradient * factor
        return replace(self.gradients, of=of)

    def step(self) -> None:
        """Move masters and moments of all trained lives by their gradients, which are dropped then."""
        self._states = self._follow("step", self._stepped)
        self._gradients = None

    def _stepped(self) -> dict[Life, State]:
        return {
            life: state if self.skipped(life) else self._moved(life, state, self.gradients.of[life])
            for life, state in self._states.items()
        }

    def _moved(self, life: Life, state: State, gradient: Tensor) -> State:
        mark, settings, adamw = self._mark(life), self.muon.settings, self.scenario.optimizer
        if mark.muon:
            decay = settings.weight_decay if mark.weight_decay is None else mark.weight_decay
            moved = muon_step(state, gradient, mark, settings, self.rates[0] * mark.lr_scale, decay)
        else:
            decay = adamw.weight_decay if mark.weight_decay is None else mark.weight_decay
            moved = adamw_step(
                state,
                gradient,
                lr=self.rates[1] * mark.lr_scale,
                betas=(adamw.beta1, adamw.beta2),
                eps=adamw.eps,
                weight_decay=decay,
            )
        return replace(moved, weight=moved.master.to(state.weight.dtype, copy=True))

    def judge_master(self, life: Life, before: State, gradient: Tensor, observed: Tensor) -> Judged:
        """Judge the master of a matrix after :meth:`step`, where it is not the one found here bit for bit.

        Args:
            life: of a matrix that is orthogonalised.
            before: its state before the step.
            gradient: clipped, of the step.
            observed: the master now; fp32, whole, of any shape.
        """
        mark, settings = self._mark(life), self.muon.settings
        momentum = self._states[life].moments[0]
        return judge_update(
            observed.view(momentum.shape),
            before.master,
            gradient.lerp(momentum, settings.beta) if settings.nesterov else momentum,
            mark,
            settings,
            lr=self.rates[0] * mark.lr_scale,
            weight_decay=settings.weight_decay if mark.weight_decay is None else mark.weight_decay,
        )

    @property
    def adapts(self) -> bool:
        """The last clip of the adaptive kind was not one of its first steps, in which all are scaled alike."""
        clip = self.muon.clip
        return isinstance(clip, AdaptiveClip) and self._tracked.num_steps > clip.warmup_steps

    def drop(self) -> None:
        """Forget this step's gradients: nothing moves."""
        self._gradients = None

    # -- between two steps ---------------------------------------------------------------------------------------

    def set_rate(self, lr: float) -> None:
        """The learning rate of both sets from the next step on."""
        self.rates = self._follow(("rate", lr), lambda: (lr, lr))

    def rebuild(self) -> None:
        """Begin anew with the compute weights as they are: no moments, nothing tracked; the same learning rate."""
        self._states = self._follow("rebuild", self._rebuilt)
        self._tracked = _Tracked()

    def _rebuilt(self) -> dict[Life, State]:
        return {life: initial_state(state.weight, self._mark(life)) for life, state in self._states.items()}

    def adopt_masters(self, observed: Mapping[Life, Tensor]) -> None:
        """Go on with masters as they were seen, where rounding may have made them differ; weights are rounded anew."""
        self._leave()
        states = dict(self._states)
        for life, master in observed.items():
            old = states[life]
            states[life] = replace(old, master=master, weight=master.to(old.weight.dtype, copy=True))
        self._states = states

    def state(self, life: Life) -> State:
        """Of one of the trained lives, as it is now."""
        return self._states[life]


def muon_step(
    state: State, gradient: Tensor, mark: Mark, settings: MuonSettings, lr: float, weight_decay: float
) -> State:
    """One step of Muon of a whole matrix, or of a stack of them; ``weight`` stays as it was."""
    momentum = state.moments[0].lerp(gradient, 1 - settings.beta)
    update = gradient.lerp(momentum, settings.beta) if settings.nesterov else momentum.clone()
    master = state.master.mul(1 - lr * weight_decay)
    master.add_(newton_schulz.direction(update, mark, settings), alpha=-lr)
    return State(state.weight, master, (momentum,), state.num_steps + 1)


def adamw_step(
    state: State,
    gradient: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    foreach: bool = False,
) -> State:
    """One step of torch's own AdamW on copies, in the dtype of the master; ``weight`` stays as it was.

    ``foreach``: matters where that dtype is not fp32: the two ways then round other intermediate values.
    """
    master = torch.nn.Parameter(state.master.clone())
    optimizer = torch.optim.AdamW(
        [master], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach, fused=False
    )
    moments = [moment.clone() for moment in state.moments]
    held = dict(zip(MOMENTS[False], moments, strict=True))
    optimizer.state[master] = {"step": torch.tensor(float(state.num_steps)), **held}
    master.grad = gradient.clone()
    optimizer.step()
    return State(state.weight, master.detach(), tuple(moments), state.num_steps + 1)


def _adapted(
    clip: AdaptiveClip, before: _Tracked, norms: Mapping[Life, float], joint: float
) -> tuple[_Tracked, dict[Life, float]]:
    """AdaGC (arXiv 2502.11034): its memory after one more step, and the factors."""
    num_steps = before.num_steps + 1
    tracked, factors = dict(before.norms), {}
    for life, norm in norms.items():
        known = tracked.get(life, norm)
        if norm == 0.0:  # neither starts nor moves a tracked norm
            factors[life] = _at_most_1(_ratio(1.0, joint + clip.eps)) if num_steps <= clip.warmup_steps else 1.0
            continue
        if num_steps <= clip.warmup_steps:
            factors[life] = _at_most_1(_ratio(1.0, joint + clip.eps))
            tracked[life] = norm if math.isnan(norm) else min(known, norm)
            continue
        most = clip.ratio * known
        exceeds = norm > most
        factors[life] = _ratio(most, norm) if exceeds else 1.0
        tracked[life] = clip.beta * known + (1 - clip.beta) * (most if exceeds else norm)
    return _Tracked(num_steps, tracked), factors


def _ratio(numerator: float, denominator: float) -> float:
    """As IEEE divides."""
    if denominator == 0.0:
        return math.nan if numerator == 0.0 or math.isnan(numerator) else math.copysign(math.inf, numerator)
    return numerator / denominator


def _at_most_1(factor: float) -> float:
    return min(factor, 1.0) if not math.isnan(factor) else factor


def exact_squares(scenario: Scenario) -> bool:
    """Whether every squared norm of this scenario's reduced gradients is exact in fp64, in any order.

    Every reduced gradient is then an integer times one power of two: the integers of all contributions are multiples
    of ``Muon.multiple``, which all divisors are to divide. Squares of such integers, added up over all lives, must
    stay below ``2**53``. fp32 gradients' squares neither over- nor underflow in fp64.
    """
    if scenario.values.domain is Domain.GENERAL:
        return False
    muon, all_lives = muon_of(scenario), lives(scenario)
    num_parts = max((len(plan.parts) for plan in steps(scenario)), default=1)
    total = 0.0
    for life in all_lives:
        if not life.divisor.is_integer() or muon.multiple % int(life.divisor):
            return False
        largest = scenario.values.max_k * (muon.multiple // int(life.divisor)) * len(life.ranks) * num_parts
        total += scenario.parameters[life.parameter].numel * float(largest) ** 2
    return total < 2.0**53
