"""Drive one scenario of system ``"strategy"`` on one rank, and compare after every stage.

A model is wrapped and trained as a trainer would: forward and backward of each part, ``clip_grad_norm``, the
optimizer's step. What a rank holds is read from the parameters themselves, and compared with a reference of whole
tensors that shares no code with the subject; the weights that each forward, and its backward, computes with are shown
by the model.

Ranks exchange outside the log of collectives who holds what, after wrapping; in the general domain, where sums round,
the reduced gradients; and, of a class of the user's, clipped gradients and masters that only rounding made differ.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.drive.calls import CannotGoOnError
from harness.drive.parameters import Pristine, by_stream
from harness.drive.record import bits_of
from harness.drive.shard import Difference
from harness.drive.strategy_comparison import Seen, StrategyComparison, judge_sums, names_of
from harness.drive.strategy_config import adamw_arguments, configuration, muon_arguments
from harness.drive.strategy_held import Held, flat_index, is_distributed
from harness.drive.strategy_model import Work, build_model, idle_blocks, needs_input_gradient
from harness.oracles import bounds, contributions
from harness.oracles.compare import compare_bits, digest
from harness.oracles.muon import State
from harness.oracles.order import gloo
from harness.oracles.reference import set_rate
from harness.oracles.strategy import UnshardedStrategy, exact_squares
from harness.oracles.strategy_sums import sums
from harness.scenario.model import Rate, StepPlan, steps, strategy_of
from harness.scenario.situations import Situation
from harness.scenario.strategy_check import exact_means
from harness.scenario.strategy_situations import StrategySituation
from harness.verdict import Oracle, Property, Stage

_REDUCES = ("reduce_scatter", "reduce_scatter_list", "all_reduce", "reduce")
_FLOATING = ("fp16", "bf16", "fp32", "fp64")
# Between the right clipped gradient and a class's: coefficients of one's own arithmetic, in fp32 or better (a sum, a
# root, a quotient, a minimum), and a product.
_CLIP_ROUNDINGS = 8


class _LoopError(RuntimeError):
    """What a loop inside ``no_sync`` raises."""


class StrategyDriver(StrategyComparison):
    """One scenario on one rank; see the head of this module."""

    def drive(self) -> None:
        """As :class:`harness.drive.calls.RankDriver` says."""
        self._build()
        last = sum(1 for _ in steps(self.scenario)) - 1
        for plan in steps(self.scenario):
            for operation in plan.before:
                if isinstance(operation, Rate):
                    self._set_rate(operation.lr)
            self._step(plan, shows=plan.index % 2 == 1 or plan.index == last)
        self.record.drive()
        self.record.finish()

    # -- build ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.record.enter(None, Stage.BUILD)
        self.strategy = strategy_of(self.scenario)
        self.names = names_of(self.scenario)
        self.shapes = [parameter.shape for parameter in self.scenario.parameters]
        device = torch.device("cpu") if self.strategy.offload else self.device
        initial = self.shared.pristine(self.device).weights
        self.reference = UnshardedStrategy(self.scenario, initial, device)
        world = self.scenario.world  # FSDP2 averages over groups of it, one after the other
        self.keeps_means = contributions.keeps_exact_means(
            self.context.backend, [size for size in range(1, world + 1) if world % size == 0]
        )
        self.exact_norm = self.keeps_means and exact_squares(self.scenario)
        own = initial
        if self.strategy.unequal_start and self.rank:
            own = Pristine(self.scenario, self.device, version=1).weights
        self.inner = build_model(self.scenario, own)
        offer = self.capabilities.extension.strategy
        config = configuration(self.scenario, self.capabilities.config, offer)
        local_rank = self.device.index or 0
        with self._subject("__init__"):
            self.subject = self.cls(config, device=self.device, local_rank=local_rank, **self.args)
        with self._subject("wrap"):
            wrapped = self.subject.wrap(self.inner)
        if not isinstance(wrapped, nn.Module):
            self.record.diverge(Property.PROGRESS, f"wrap() returned {type(wrapped).__name__}, expected a Module")
            raise CannotGoOnError
        self.model = wrapped
        self.norms: list[tuple[Tensor, float]] = []
        self._build_optimizer()
        self.held = self._find_held()
        self._check_owners()
        self._check_kept()
        self._compare_masters("after wrapping what a parameter holds")
        self._show("after wrapping")

    def _build_optimizer(self) -> None:
        arguments = adamw_arguments(self.scenario)
        self.own_optimizer = callable(getattr(self.subject, "build_optimizer", None))
        if not self.own_optimizer:
            trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            # torch's foreach operations refuse lists of plain tensors and DTensors together.
            kinds = [[one for one in trainable if is_distributed(one) is kind] for kind in (True, False)]
            self.optimizer = torch.optim.AdamW([{"params": each} for each in kinds if each], **arguments)
            return
        if any(place.dedicated for place in self.strategy.places):
            arguments["muon"] = muon_arguments(self.strategy.muon)
        with self._subject("build_optimizer"):
            self.optimizer = self.subject.build_optimizer(self.model, torch.optim.AdamW, **arguments)

    def _check_kept(self) -> None:
        """What took a gradient still does, and nothing else; and the model is still in training."""
        self.record.checked(Property.STORAGE)
        if not all(module.training for module in self.model.modules()):
            message = "after wrapping the model is in evaluation mode, before it was in training"
            self.record.diverge(Property.STORAGE, message)
        for each in self.held:
            if each.dedicated or not self.record.clean:
                continue
            frozen = self.strategy.places[each.parameter].frozen
            self.record.checked(Property.STORAGE)
            if each.tensor.requires_grad == frozen:
                message = f"after wrapping requires_grad is {each.tensor.requires_grad}, before it was {not frozen}"
                self._diverge_at(Property.STORAGE, message, each.parameter)

    def _set_rate(self, lr: float) -> None:
        self.reference.set_rate(lr)
        with self._subject("optimizer's param_groups"):
            set_rate(self.optimizer, lr)

    # -- one step ------------------------------------------------------------------------------------------------

    def _step(self, plan: StepPlan, *, shows: bool) -> None:
        self.record.enter(plan.index, Stage.COLLECT)
        if plan.index % 2:
            self._fail_inside()
        self._collect(plan)
        self.record.enter(plan.index, Stage.REDUCE)
        if self.strategy.accumulation == "flush":
            with self._subject("flush"):
                self.subject.flush(self.model)
        self._compare_reduced(plan)
        self.record.enter(plan.index, Stage.NORM)
        self._norm(None if plan.clip is None else plan.clip.max_norm)
        self.record.enter(plan.index, Stage.UPDATE)
        self._update(skip=plan.skip)
        self._zero_grad()
        self.record.enter(plan.index, Stage.GATHER)
        if shows:
            self.record.weights(self._show("after the step"))

    def _collect(self, plan: StepPlan) -> None:
        """All parts, those that are not to be reduced inside ``no_sync``."""
        mode, last = self.strategy.accumulation, len(plan.parts) - 1
        if mode == "nested" and last > 0:
            with self._entered(self._no_sync):
                for number in range(last):
                    if number == 0:
                        with self._entered(self._no_sync):
                            self._part(plan, number, quiet=True)
                    else:
                        self._part(plan, number, quiet=True)
            self._part(plan, last, quiet=False)
            return
        for number in range(len(plan.parts)):
            quiet = mode == "flush" or (number < last and mode != "sync")
            if not quiet:
                self._part(plan, number, quiet=False)
                continue
            with self._entered(self._no_sync):
                self._part(plan, number, quiet=True)

    def _no_sync(self) -> AbstractContextManager[None]:
        if self.strategy.accumulation == "deferred":
            found: AbstractContextManager[None] = self.subject.no_sync(self.model, defer="all_reduce")
        else:
            found = self.subject.no_sync(self.model)
        return found

    @contextmanager
    def _entered(self, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside a context of the subject's, which is made, entered and left in its own environment."""
        with self._subject("no_sync"):
            context = make()
            context.__enter__()
        try:
            yield
        finally:
            with self._subject("no_sync"):
                context.__exit__(None, None, None)

    def _fail_inside(self) -> None:
        """Leave ``no_sync`` by an exception: it has to reach the trainer, and what follows is reduced as ever."""
        with self._subject("no_sync"):
            context = self._no_sync()
            context.__enter__()
            swallowed = context.__exit__(_LoopError, _LoopError("raised inside no_sync, to see what comes of it"), None)
        self.record.checked(Property.PROGRESS)
        if swallowed:
            self.record.diverge(Property.PROGRESS, "no_sync() swallows what is raised inside it")
            raise CannotGoOnError

    def _part(self, plan: StepPlan, number: int, *, quiet: bool) -> None:
        """One forward and its backward; ``quiet``: in ``no_sync``."""
        gradients = {}
        for index, shape in enumerate(self.shapes):
            values = contributions.contribution(self.scenario, plan, self.rank, number, index)
            if values is not None:
                gradients[index] = torch.from_numpy(values).view(shape).to(self.device)
        seen = Seen()
        work = Work(gradients, idle_blocks(self.scenario, plan, number), seen.look)
        num_before = len(self.record.collectives)
        needs = needs_input_gradient(self.scenario, plan, number)
        total = torch.zeros(1, device=self.device, requires_grad=needs)
        with self._subject("model, in its forward,"), torch.enable_grad():
            loss = self.model(total, work).float().sum()
        with self._subject("model, in its backward,"):
            loss.backward()
        self._compare_seen(seen, f"of part {number}")
        self._check_frozen()
        if quiet:
            self._check_quiet(plan, number, num_before)
        if number == 0 and len(plan.parts) > 1 and plan.index % 2:
            self._show("between two parts")  # as who evaluates there: gradients stay as they are

    def _check_frozen(self) -> None:
        for each in self.held:
            if self.record.clean and self.strategy.places[each.parameter].frozen:
                self.record.checked(Property.INTAKE)
                if each.tensor.grad is not None:
                    self._diverge_at(Property.INTAKE, "a frozen parameter got a gradient", each.parameter)

    def _check_quiet(self, plan: StepPlan, number: int, num_before: int) -> None:
        """In ``no_sync`` nothing is reduced; where only replicas are deferred, nothing is all-reduced."""
        if not self.record.clean or self.scenario.world == 1:
            return
        forbidden = ("all_reduce",) if self.strategy.accumulation == "deferred" else _REDUCES
        self.record.checked(Property.TRAFFIC)
        for call in self.record.collectives[num_before:]:
            if call.kind in forbidden and call.dtype in _FLOATING and len(call.group) > 1:
                message = f"in no_sync part {number} called {call.kind} {call.dtype}[{call.length}]"
                self.record.diverge(Property.TRAFFIC, message)
                return
        if self.strategy.accumulation != "deferred" and exact_means(self.scenario, len(plan.parts)):
            self._check_not_averaged(plan, number)

    def _check_not_averaged(self, plan: StepPlan, number: int) -> None:
        """A reduction that no log shows (of DDP, in C++) is told by its result: the mean instead of one's own sum."""
        everyone = range(self.scenario.world)
        for each in self.held:
            seen = None if each.dedicated or is_distributed(each.tensor) else each.gradient()
            if seen is None or tuple(seen.shape) != self.shapes[each.parameter]:
                continue
            of_ranks = [torch.zeros(self.shapes[each.parameter]) for _ in everyone]
            for rank in everyone:
                for part in range(number + 1):
                    values = contributions.contribution(self.scenario, plan, rank, part, each.parameter)
                    if values is not None:
                        of_ranks[rank] += torch.from_numpy(values).view(of_ranks[rank].shape)
            own, mean = of_ranks[self.rank], torch.stack(of_ranks).sum(0) / self.scenario.world
            observed = seen.float().cpu()
            if torch.equal(observed, mean) and not torch.equal(observed, own):
                message = f"in no_sync part {number} was reduced: a gradient is already the mean over all ranks"
                self._diverge_at(Property.TRAFFIC, message, each.parameter)
                return

    # -- reduce --------------------------------------------------------------------------------------------------

    def _compare_reduced(self, plan: StepPlan) -> None:
        prop = Property.SPILL if len(plan.parts) > 1 else Property.GRADIENT
        self.reference.begin(plan, look=self.rank == 0)  # every rank would see the same; one looks for all
        if Situation.WIDE_REDUCED_VALUE in self.reference.shows:
            self.record.reached(StrategySituation.WIDE_REDUCED_VALUE)
        if self.keeps_means and exact_means(self.scenario, len(plan.parts)):
            self._compare_gradients(prop, "the reduced gradient")
            if self.record.clean:
                self.record.judged(Oracle.EXACT)
        else:
            self._judge_sums(plan, prop)
            # What the reference has no gradient of is None here, or was told.
            self._adopt("gradients", Held.gradient, self.reference.adopt_gradients)
        if self.record.clean and prop is Property.SPILL:
            self.record.checked(Property.GRADIENT, sum(each.region.numel for each in self.held))

    def _judge_sums(self, plan: StepPlan, prop: Property) -> None:
        bitwise = self._order_known(plan)
        for each, wanted, seen in self._gradients(self.reference.gradients, prop, "the reduced gradient"):
            index = each.parameter
            if tuple(seen.shape) != each.region.shape or seen.dtype != wanted.dtype:
                self._compare_tensor(prop, "the reduced gradient", each, wanted, seen)
                continue
            possible = self.shared.once((plan.index, index), partial(sums, self.scenario, plan, index))
            rule, wrong, margin = judge_sums(
                each.region,
                seen,
                possible,
                self.shapes[index],
                bitwise=bitwise,
                averages=self.context.backend == "nccl",
            )
            self.record.checked(prop, each.region.numel)
            self.record.judged(rule)
            if rule is Oracle.BOUND:
                self.record.within(margin)
            if wrong is not None:
                right = torch.from_numpy(possible.possible[0]).view(self.shapes[index])[each.region.slices]
                pair = right.to(seen.dtype).reshape(-1)[wrong].reshape(1), seen.cpu().reshape(-1)[wrong].reshape(1)
                found = compare_bits(*pair, signed_zeros=False).mismatch
                element = flat_index(each.region, wrong, self.shapes[index])
                message = "the reduced gradient is what no schedule of this strategy's roundings gives"
                self.record.diverge(prop, message, Difference(seen.numel(), found, index, element, owner=self.rank))

    def _order_known(self, plan: StepPlan) -> bool:
        """Whether each element is added around a ring that begins at one rank of each group, of which all are tried.

        So it is where the backend adds like gloo, a subject that the harness configures keeps its schedule, and a step
        is reduced once: of several reductions each may have the element in another place of its buffer.
        """
        once = len(plan.parts) == 1 or self.strategy.accumulation in ("no_sync", "nested", "flush")
        return once and self._known and self.rule is gloo and self.device.type == "cpu"

    # -- norm ----------------------------------------------------------------------------------------------------

    def _norm(self, max_norm: float | None) -> None:
        bound = math.inf if max_norm is None else max_norm
        more = {"optimizer": self.optimizer} if _takes_optimizer(self.subject) else {}
        with self._subject("clip_grad_norm"):
            returned = self.subject.clip_grad_norm(self.model, bound, **more)
        norm = self._plain_norm(returned)
        if norm is None:
            return
        value = float(norm)
        self.record.norm(0, bits_of(value, torch.float32))
        self._check_earlier_norms(returned)
        exact = self.reference.squared_norm()
        self._judge_norm(value, exact)
        active, coefficient = False, torch.ones((), dtype=torch.float32)
        if max_norm is not None:
            coefficient = self.reference.coefficient(norm, max_norm)
            active = not float(coefficient) >= 1.0
            self.reference.clip(coefficient)
            if self.record.clean and exact.value > 0 and math.isfinite(exact.value):
                self.record.reached(
                    StrategySituation.CLIPPING_ACTIVE if active else StrategySituation.CLIPPING_INACTIVE
                )
        self._check_stats(norm, coefficient)
        self.clipped_by = f"the joint norm is {value:g}, so every gradient is scaled by {float(coefficient):g}"
        self._compare_clipped(active=active)

    def _check_earlier_norms(self, returned: Tensor) -> None:
        """Who logs norms after some steps reads each as it was returned."""
        for earlier, value in self.norms:
            self.record.checked(Property.NORM)
            if self.record.clean and repr(float(earlier)) != repr(value):
                message = f"a norm of an earlier step was {value!r} and is now {float(earlier)!r}: it is written over"
                self.record.diverge(Property.NORM, message, expected=value, actual=float(earlier))
        self.norms = [*self.norms[-1:], (returned, float(returned))]

    def _check_stats(self, norm: Tensor, coefficient: Tensor) -> None:
        """What our own say of a clip is what it did."""
        if not self.record.clean or self.capabilities.norm != "fp64":
            return
        with self._subject("last_grad_clip_stats"):
            stats = self.subject.last_grad_clip_stats
            said = None if stats is None else [float(stats[name]) for name in ("total_norm", "coefficient")]
        self.record.checked(Property.CLIP)
        wanted = [float(norm), float(coefficient)]
        if said is None or list(map(repr, said)) != list(map(repr, wanted)):  # of nan, too
            message = f"last_grad_clip_stats says {said} of norm and coefficient, expected {wanted}"
            self.record.diverge(Property.CLIP, message)

    def _plain_norm(self, returned: object) -> Tensor | None:
        """What was returned, if it is a plain 0-dim fp32 tensor; else that is recorded."""
        right = isinstance(returned, Tensor) and not is_distributed(returned)
        if isinstance(returned, Tensor) and right and returned.dtype is torch.float32 and returned.dim() == 0:
            return returned.detach()
        shown = type(returned).__name__
        if isinstance(returned, Tensor):
            shown = f"a {shown} of {returned.dtype}{list(returned.shape)}"
        message = f"clip_grad_norm() returned {shown}, expected a plain tensor of one fp32 number without dimensions"
        self.record.diverge(Property.NORM, message)
        raise CannotGoOnError

    def _judge_norm(self, observed: float, exact: bounds.SquaredNorm) -> None:
        if not self.record.clean:
            return
        own = self.capabilities.norm == "fp64"
        judged = bounds.judge_norm(
            observed,
            exact,
            kind=self.capabilities.norm,
            world=self.scenario.world,
            bitwise=own and self.exact_norm,
        )
        self.record.checked(Property.NORM, max(exact.num_elements, 1))
        if judged.bound and math.isfinite(judged.error):
            self.record.within(judged.error / judged.bound)
        if not judged.ok:
            expected = math.sqrt(exact.value) if exact.value >= 0 else math.nan
            self.record.diverge(
                Property.NORM,
                f"the norm before clipping is {observed!r}, expected {expected!r}",
                expected=expected,
                actual=observed,
                expected_bits=bits_of(float(torch.tensor(expected, dtype=torch.float32)), torch.float32),
                actual_bits=bits_of(observed, torch.float32),
            )

    def _compare_clipped(self, *, active: bool) -> None:
        """Bit for bit where the arithmetic is known or nothing is to be done; else within the bound of rounding."""
        what = "the clipped gradient" if active else "a gradient that was only measured, or is within the bound,"
        if self.capabilities.norm == "fp64" or not active:
            self._compare_gradients(Property.CLIP, what)
            return
        inexact = False
        for each, wanted, seen in self._gradients(self.reference.gradients, Property.CLIP, what):
            difference = self._compare_tensor(Property.CLIP, what, each, wanted, seen)
            if difference is None:
                return
            if difference.mismatch is None:
                continue
            if _within_clip_bound(each, wanted, seen):
                inexact = True
                continue
            message = f"{what} differs by more than rounding can explain ({self._kind_of(each)}; {self.clipped_by})"
            self.record.diverge(Property.CLIP, message, difference)
        self._adopt_where(inexact, "clipped gradients", Held.gradient, self.reference.adopt_gradients)

    def _adopt_where(
        self,
        inexact: bool,
        what: str,
        take: Callable[[Held], Tensor | None],
        adopt: Callable[[dict[int, Tensor]], None],
    ) -> None:
        """Go on with what was observed. Collective where this run exchanges; else it decides nothing."""
        if not self.exchanges:
            if inexact:
                self.record.unresolved = True
            return
        if any(self._all_gathered(inexact, f"whether {what} are inexact")):
            self.record.searched = True
            self._adopt(what, take, adopt)

    # -- update --------------------------------------------------------------------------------------------------

    def _update(self, *, skip: bool) -> None:
        if skip:
            self.reference.drop()
            self._compare_moments("after a skipped update ")
            self._compare_masters("after a skipped update the master")
            return
        dedicated = [each.parameter for each in self.held if each.dedicated]
        before = {index: (self.reference.state(index), self.reference.gradients[index]) for index in dedicated}
        with self._subject("optimizer's step"):
            self.optimizer.step()
        self.reference.step()
        self._compare_moments("")
        if dedicated and not self.capabilities.exact_products:
            self._judge_products(before)
        self._compare_masters("the master")
        if self.record.clean:
            self.record.judged(Oracle.EXACT)

    def _judge_products(self, before: dict[int, tuple[State, Tensor | None]]) -> None:
        """Where Newton-Schulz ran by other operations than the reference's: within the bound of rounding."""
        inexact = False
        for each in self.held:
            seen = each.master() if each.dedicated and self.record.clean else None
            if seen is None:
                continue
            state, gradient = before[each.parameter]
            wanted = self.reference.state(each.parameter).master
            difference = self._compare_tensor(Property.MASTER, "the master", each, wanted, seen, signed_zeros=True)
            if difference is None or difference.mismatch is None or gradient is None:
                continue  # without a gradient nothing may move: compared bit for bit with all others
            judged = self.reference.judge_master(each.parameter, state, gradient, seen)
            self.record.judged(judged.oracle)
            if judged.oracle is Oracle.BOUND:
                self.record.within(judged.margin)
            if judged.ok:
                inexact = True
                continue
            message = f"the master differs by more than rounding in Newton-Schulz can explain: {judged.text}"
            self.record.diverge(Property.MASTER, message, difference)
        self._adopt_where(inexact, "masters", _dedicated_master, self.reference.adopt_masters)

    def _zero_grad(self) -> None:
        with self._subject("optimizer's zero_grad"):
            self.optimizer.zero_grad()
        for each in self.held:
            if not self.record.clean:
                return
            gradient = each.gradient()
            self.record.checked(Property.INTAKE)
            if gradient is not None and bool(gradient.count_nonzero()):
                message = "after zero_grad() a gradient is still there: the next backward would add to it"
                self._diverge_at(Property.INTAKE, message, each.parameter)

    # -- gather --------------------------------------------------------------------------------------------------

    def _show(self, when: str) -> str:
        """A forward without gradients over everything; the digest of the weights that it computed with."""
        seen = Seen()
        work = Work({}, frozenset(), seen.look)
        with self._subject("model, in a forward without gradients,"), torch.no_grad():
            self.model(torch.zeros(1, device=self.device), work)
        weights = self._compare_seen(seen, when)
        hidden = next((index for index in range(len(self.names)) if index not in weights), None)
        if hidden is not None:
            self._diverge_at(Property.WEIGHTS, f"in the forward {when} a parameter of the model was not used", hidden)
            raise CannotGoOnError
        return digest(by_stream(self.scenario, [weights[index] for index in range(len(self.names))]))


def _takes_optimizer(subject: Any) -> bool:  # noqa: ANN401 (any strategy)
    """Whether ``clip_grad_norm`` has a parameter of that name."""
    try:
        parameters = inspect.signature(subject.clip_grad_norm).parameters
    except (TypeError, ValueError):
        return False
    return "optimizer" in parameters


def _within_clip_bound(held: Held, wanted: Tensor, seen: Tensor) -> bool:
    """Whether a clipped gradient is off by no more than ``gamma`` of a few roundings, and a subnormal.

    The norm is the subject's own, so both sides round the same quotient and the same product: in fp32 or better, and
    where the gradient is bf16 once more, or twice where the coefficient is rounded as well.
    """
    expected = wanted[held.region.slices].to(seen.device)
    unit = bounds.U32 if seen.dtype is torch.float32 else 2.0**-8
    exact = expected.double()
    errors = (seen.double() - exact).abs()
    allowed = bounds.gamma(_CLIP_ROUNDINGS, bounds.U32) + bounds.gamma(2, unit)
    same = (seen == expected) | (seen.isnan() & expected.isnan())
    return bool((same | (errors <= allowed * exact.abs() + 2.0**-133)).all())


def _dedicated_master(held: Held) -> Tensor | None:
    return held.master() if held.dedicated else None
