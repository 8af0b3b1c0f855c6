"""Drive one scenario of system ``"muon"`` on one rank, and compare after every stage.

Ownership is the subject's choice: what a rank holds is read from ``local_shards()`` and compared, range by range, with
a reference of whole matrices that shares no code with it. ``step()`` is norm, update and gather in one call: they are
told apart by the collectives that it calls, and compared in that order afterwards.

Ranks exchange outside the log of collectives who owns what, at each construction; in the general domain, where sums
round, the reduced gradients; and the masters, where Newton-Schulz ran by other operations than the reference's.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from harness.drive import muon_build
from harness.drive.calls import reference_to
from harness.drive.memory import HandedOver
from harness.drive.muon_backward import Used, loss_of
from harness.drive.muon_comparison import MuonComparison
from harness.drive.muon_reload import through_bytes
from harness.drive.muon_shards import Held, Range, compare, compare_within, owner_problem
from harness.drive.muon_storage import Places
from harness.drive.parameters import gradient_like
from harness.drive.record import bits_of, norm_of
from harness.drive.shard import Difference
from harness.oracles import bounds, contributions
from harness.oracles.contributions import Share
from harness.oracles.muon import Life, State, UnshardedMuon, exact_squares, lives
from harness.oracles.muon_bound import Judged
from harness.scenario.model import Build, Domain, Load, Rate, Reload, StepPlan, muon_of, steps
from harness.scenario.muon import AdaptiveClip
from harness.scenario.muon_situations import MuonSituation
from harness.scenario.situations import Situation
from harness.verdict import Oracle, Property, Stage

_GATHERS = ("broadcast", "all_gather")
# Roundings of a norm beside those of its sum: the root, and the square that is taken of it here.
_NORM_ROUNDINGS = 3


class MuonDriver(MuonComparison):
    """One scenario on one rank; see the head of this module."""

    def drive(self) -> None:
        """As :class:`RankDriver` says."""
        self._build()
        for plan in steps(self.scenario):
            self._between(plan)
            self._step(plan)
        self.record.drive()
        self.record.finish()

    # -- build ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.record.enter(None, Stage.BUILD)
        self.record.staging = self._stage_of
        if self.faults is not None:
            strike = self.faults.intercept

            def intercept(pending: Any) -> Any:  # noqa: ANN401 (as what it stands in for)
                self.record.advance(pending.kind)
                return strike(pending)

            self.context.collectives.intercept = intercept
        self.muon = muon_of(self.scenario)
        self.names = [parameter.name for parameter in self.scenario.parameters]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.initial = self.shared.pristine(self.device).weights
        self.own = {life.parameter: life for life in lives(self.scenario) if self.rank in life.ranks}
        # Ranks in one process share all lives; a process of its own follows those of its rank alone.
        lineage = self.shared.lineage()
        self.reference = UnshardedMuon(
            self.scenario, self.initial, list(self.own.values()) if lineage is None else None
        )
        if lineage is not None:
            self.reference.share(lineage)
        self.exact_means = self.scenario.values.domain is not Domain.GENERAL and contributions.keeps_exact_means(
            self.context.backend, {life.divisor for life in lives(self.scenario)}
        )
        self.exact_norm = self.exact_means and exact_squares(self.scenario)
        self.stepping = False
        self._construct(self.scenario.bucket, self.initial, self.reference.rates)

    def _stage_of(self, kind: str) -> Stage | None:
        """What a collective within ``step()`` belongs to."""
        if not self.stepping:
            return None
        return Stage.GATHER if kind in _GATHERS else None

    def _construct(
        self,
        bucket: int,
        weights: Sequence[Tensor],
        rates: tuple[float, float],
        state: Any = None,  # noqa: ANN401
    ) -> None:
        """Build both optimizers on new parameters with these weights; ``state``: to be loaded then.

        As in a process that was started anew: nothing of an earlier subject hangs on the parameters.
        """
        self.parameters = [nn.Parameter(weight.detach().clone()) for weight in weights]
        self.frozen = muon_build.frozen_parameter(self.device)
        named = [*zip(self.names, self.parameters, strict=True)]
        named.insert(len(named) // 2, (muon_build.frozen_name(self.names), self.frozen))
        with self._exchange("process groups"):
            config = muon_build.sharding_config(self.scenario, self.rank, bucket)
        arguments = muon_build.inner_arguments(self.scenario, rates)
        with self._subject("inner_class"):
            self.inner = muon_build.inner_class(self.cls)(named, **arguments)
        with self._subject("__init__"):
            self.subject = self.cls(self.inner, group=None, config=config, **self.args)
        self.places = Places(self.parameters, self.frozen, moves=self.muon.release_color is not None)
        if state is not None:
            with self._subject("load_state_dict"):
                self.subject.load_state_dict(state)
        self.ranges: tuple[Range, ...] = ()
        held = self._held()
        self.ranges = tuple(each.range for each in held)
        self._check_owners()
        self._compare_moments(held, "at construction ")
        self._compare_master(held, "the master at construction", None)
        self._compare_weights("after construction")

    def _check_owners(self) -> None:
        """Every element has one owner among the ranks of its group, a matrix as a whole. Collective."""
        everyone = self._all_gathered(list(self.ranges), "who owns what")
        self.owners = [(piece, rank) for rank, held in enumerate(everyone) for piece in held]
        if not self.record.clean:
            return
        for parameter, life in self.own.items():
            pieces = [(piece, rank) for rank in life.ranks for piece in everyone[rank] if piece.parameter == parameter]
            problem = owner_problem(pieces, self.scenario.parameters[parameter].numel, self.muon.marks[parameter].muon)
            if problem is not None:
                self.record.diverge(Property.OWNERSHIP, problem, parameter=self.names[parameter], index=parameter)
                return
        self.record.checked(Property.OWNERSHIP, len(self.own))

    # -- between two steps ---------------------------------------------------------------------------------------

    def _between(self, plan: StepPlan) -> None:
        """What comes before a step; construction and loading are told as the build of that step."""
        for operation in plan.before:
            match operation:
                case Rate():
                    self.reference.set_rate(operation.lr)
                    with self._subject("param_groups"):
                        for group in self.subject.param_groups:
                            group["lr"] = operation.lr
                case Build():
                    self.record.enter(plan.index, Stage.BUILD)
                    weights = self._let_go()
                    self.reference.rebuild()
                    self._construct(operation.bucket, weights, self.reference.rates)
                case Reload():
                    self._reload(plan)
                case Load():
                    raise ValueError("a scenario of system 'muon' has no load: check() refuses it")

    def _reload(self, plan: StepPlan) -> None:
        """As when a run ends and another goes on from what it saved."""
        self.record.enter(plan.index, Stage.BUILD)
        with self._subject("state_dict"):
            state = through_bytes(self.subject.state_dict())
        weights = self._let_go()
        self._construct(plan.bucket, weights, (self.muon.settings.lr, self.scenario.optimizer.lr), state)

    def _let_go(self) -> list[Tensor]:
        """Drop the subject and all that refers to it; returns the compute weights as they are."""
        weights = [parameter.detach().clone() for parameter in self.parameters]
        with self._subject("__del__"):
            left = reference_to(self.subject)
            del self.subject, self.inner
            self.parameters = []
            if left is None or left() is not None:
                gc.collect()
        return weights

    # -- one step ------------------------------------------------------------------------------------------------

    def _step(self, plan: StepPlan) -> None:
        self.record.enter(plan.index, Stage.COLLECT)
        handed_over = HandedOver()
        for parameter, mark in zip(self.parameters, self.muon.marks, strict=True):
            if mark.main_grad:
                parameter.main_grad = None  # type: ignore[attr-defined]  # until a part brings one
        for index, parameter in enumerate(self.parameters):
            if index not in self.own:
                parameter.grad = None
        for number in range(len(plan.parts)):
            self._part(plan, number, handed_over)
        self._compare_weights("after the last backward")
        if plan.discard:
            self._clear("of a discarded step")
            self._compare_unmoved("after a discarded step, ")
            return
        self._reduce(plan, handed_over)
        if plan.skip:
            self._clear("of a skipped update")
            self._compare_unmoved("after a skipped update, ")
            return
        self._give_storage_up()
        self._optimize()
        self._clear("after the step")
        self._compare_weights("after clear_grad()")

    def _part(self, plan: StepPlan, number: int, handed_over: HandedOver) -> None:
        """One backward on this rank; the last one of a step may be assigned instead."""
        last = number == len(plan.parts) - 1
        assigned = last and self.muon.backward == "assign"
        used: dict[int, Used] = {}
        for index, parameter in enumerate(self.parameters):
            mark = self.muon.marks[index]
            values = contributions.contribution(self.scenario, plan, self.rank, number, index)
            if values is None:
                continue
            gradient = gradient_like(parameter, values)
            if mark.main_grad:
                self._add_main_grad(parameter, gradient)
                continue
            used[index] = Used(parameter, gradient, mark.use)
            if assigned:
                if index in self.own:
                    handed_over.add(gradient)
                parameter.grad = gradient
        if not assigned:
            self._backward(used, synchronised=last or not self.muon.no_sync)
        self._check_taken(used, assigned)

    def _add_main_grad(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        before = getattr(parameter, "main_grad", None)
        total = gradient.float() if before is None else before + gradient.float()
        parameter.main_grad = total  # type: ignore[attr-defined]

    def _backward(self, used: dict[int, Used], *, synchronised: bool) -> None:
        loss = loss_of(used)
        if loss is None:
            return
        with self._subject("no_sync"):
            context = nullcontext() if synchronised else self.subject.no_sync()
            context.__enter__()
        try:
            with self._subject("hooks, called in a backward,"):
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            with self._subject("no_sync"):
                context.__exit__(None, None, None)

    def _check_taken(self, used: dict[int, Used], assigned: bool) -> None:
        """Hooks have taken every gradient; what was assigned waits for the reduction as it is."""
        if not self.record.clean:
            return
        self.record.checked(Property.INTAKE, len(used.keys() & self.own.keys()))
        for index, each in used.items():
            if index not in self.own:
                continue  # what becomes of it is nobody's matter, where its colour has no group with this rank
            waits = each.parameter.grad is each.gradient if assigned else each.parameter.grad is None
            if not waits:
                message = (
                    "a .grad that was assigned is another one before the reduction"
                    if assigned
                    else "after a backward a parameter still has its .grad: the next backward would add to it"
                )
                self.record.diverge(Property.INTAKE, message, parameter=self.names[index], index=index)
                return

    def _reduce(self, plan: StepPlan, handed_over: HandedOver) -> None:
        self.record.enter(plan.index, Stage.REDUCE)
        with self._subject("reduce_gradients"):
            self.subject.reduce_gradients()
        self._check_cleared("reduce_gradients()")
        if self.record.clean and len(handed_over):
            self.record.checked(Property.MEMORY)
            kept = handed_over.still_alive()
            if kept:
                message = f"{kept} of the {len(handed_over)} assigned gradients are still in memory after the reduction"
                self.record.diverge(Property.MEMORY, message, expected=0.0, actual=float(kept))
        self._compare_weights("after reduce_gradients()")
        self._compare_gradient(plan)

    def _compare_gradient(self, plan: StepPlan) -> None:
        prop = Property.SPILL if len(plan.parts) > 1 else Property.GRADIENT
        look = self.rank == 0 or self.shared.num_ranks > 1  # every rank would see the same; or one looks for all
        expected = self.reference.begin(plan, look=look)
        if Situation.WIDE_REDUCED_VALUE in expected.shows:
            self.record.reached(MuonSituation.WIDE_REDUCED_VALUE)
        held = self._held()
        if self.exact_means:
            self._compare_each(prop, "the reduced gradient", self._wanted_gradients(held))
            if self.record.clean:
                self.record.judged(Oracle.EXACT)
        else:
            self._compare_with_intervals(prop, plan, held)
            if self.record.clean:
                self.record.judged(Oracle.BOUND)
            self._adopt_gradients(held)
        if self.record.clean and prop is Property.SPILL:
            self.record.checked(Property.GRADIENT, sum(each.range.length for each in held))

    def _compare_with_intervals(self, prop: Property, plan: StepPlan, held: Sequence[Held]) -> None:
        for each in held:
            life = self.own[each.parameter]
            if not self.record.clean or (self.reference.skipped(life) and each.gradient is None):
                continue
            share = Share(life.ranks, life.divisor)
            averages = self.context.backend == "nccl"
            interval = contributions.interval(self.scenario, plan, each.parameter, share, averages=averages)
            if each.gradient is None:
                self._diverge_missing(prop, each, "the reduced gradient")
                return
            difference = compare_within(each, each.gradient, interval, self.rank)
            self.record.checked(prop, difference.compared)
            self.record.within(difference.margin)
            if difference.mismatch is not None:
                message = "the reduced gradient is what no order of addition and one division give"
                self.record.diverge(prop, message, difference)

    def _adopt_gradients(self, held: Sequence[Held]) -> None:
        """Make what all ranks hold the reference's gradient. Collective; not in the log."""
        mine = [(each.range, each.gradient.detach().cpu().clone()) for each in held if each.gradient is not None]
        everyone = self._all_gathered(mine, "gradients")
        self.reference.adopt_gradients(self._assembled(everyone, self.reference.gradients.of))

    def _in_odd_step(self) -> bool:
        """What can be done in two ways is done in one of them in every other step."""
        return (self.record.step or 0) % 2 == 1

    def _give_storage_up(self) -> None:
        """Between the reduction and the step, which gives it back; in every other step it is asked back before."""
        color = self.muon.release_color
        released = [index for index in self.own if muon_build.color_of_mark(self.muon.marks[index]) == color]
        if color is None or not released:
            return  # a rank in none of its groups has none to give up
        with self._subject("clear_param_storage"):
            self.subject.clear_param_storage(color)
        self._check_given_up(released)
        if self._in_odd_step():
            with self._subject("reset_param_storage"):
                self.subject.reset_param_storage()
            self._compare_weights("after reset_param_storage()")

    def _check_given_up(self, released: Sequence[int]) -> None:
        if not self.record.clean:
            return
        for index in released:
            parameter = self.parameters[index]
            self.record.checked(Property.STORAGE, parameter.numel())
            size = parameter.untyped_storage().nbytes()
            if size:
                message = f"after clear_param_storage() a parameter of that colour still has {size} bytes of storage"
                self.record.diverge(
                    Property.STORAGE,
                    message,
                    parameter=self.names[index],
                    index=index,
                    expected=0.0,
                    actual=float(size),
                )
                return

    # -- norm, update, gather ------------------------------------------------------------------------------------

    def _optimize(self) -> None:
        self.record.enter(self.record.step, Stage.UPDATE if self.muon.clip is None else Stage.NORM)
        self.stepping = True
        with self._subject("step"):
            self.subject.step()
        self.stepping = False
        self.record.enter(self.record.step, Stage.NORM)
        self._norm()
        self.record.enter(self.record.step, Stage.UPDATE)
        self._update()
        self.record.enter(self.record.step, Stage.GATHER)
        self._compare_weights("after step()")
        self._digests()

    def _norm(self) -> None:
        if self.muon.clip is None:
            return
        with self._subject("grad_norm"):
            observed, dtype = norm_of(self.subject.grad_norm, "after a clip grad_norm")
        self.record.norm(0, bits_of(observed, dtype))
        clipping = self.reference.clipping(observed)
        self._judge_norm(observed, dtype, clipping.norm)
        before = self.reference.gradients
        self.reference.clip(clipping)
        factors = [clipping.factors[life] for life in self.own.values()]
        if self.record.clean and clipping.norm.value > 0 and math.isfinite(clipping.norm.value):
            active = any(factor < 1.0 for factor in factors)
            adaptive = isinstance(self.muon.clip, AdaptiveClip) and self.reference.adapts
            self.record.reached(MuonSituation.CLIPPING_ACTIVE if active else MuonSituation.CLIPPING_INACTIVE)
            if active and adaptive:
                self.record.reached(MuonSituation.ADAPTIVE_CLIP_ACTIVE)
        self._compare_clipped(before.of)

    def _judge_norm(self, observed: float, dtype: torch.dtype, exact: bounds.SquaredNorm) -> None:
        if not self.record.clean:
            return
        judged = bounds.judge_squared_norm(
            observed * observed,
            exact,
            kind="fp64" if dtype is torch.float64 else "fp32",
            shard_len=self.scenario.numel,
            world=self.scenario.world + _NORM_ROUNDINGS,
            bitwise=False,
        )
        self.record.checked(Property.NORM, exact.num_elements)
        expected = math.sqrt(exact.value) if exact.value >= 0 else math.nan
        ok = judged.ok and (observed >= 0 or math.isnan(observed))
        if self.exact_norm and dtype is torch.float64:
            # The sum is exact. The root need not be rounded correctly: torch's, on a CPU, comes out of a library of
            # vector mathematics that promises less than one unit in the last place.
            ok = observed in (math.nextafter(expected, 0.0), expected, math.nextafter(expected, math.inf))
        elif judged.bound and math.isfinite(judged.error):
            self.record.within(judged.error / judged.bound)
        if not ok:
            self.record.diverge(
                Property.NORM,
                f"the joint norm is {observed!r}, expected {expected!r}",
                expected=expected,
                actual=observed,
                expected_bits=bits_of(float(torch.tensor(expected, dtype=dtype)), dtype),
                actual_bits=bits_of(observed, dtype),
            )

    def _compare_clipped(self, unclipped: Any) -> None:  # noqa: ANN401 (a mapping of lives to gradients)
        held = self._held()
        if self.muon.sharding.release_gradients or not self.record.clean:
            return
        wanted = self._wanted_gradients(held)
        self._compare_each(Property.CLIP, "the clipped gradient", wanted)

    def _update(self) -> None:
        held = self._held()
        before = {life: self.reference.state(life) for life in self.own.values()}
        gradients = self.reference.gradients.of
        self.reference.step()
        if self.record.clean and self.muon.sharding.release_gradients:
            kept = next((each for each in held if each.gradient is not None), None)
            self.record.checked(Property.MEMORY, len(held))
            if kept is not None:
                message = "after step() a gradient is still there, though release_gradients is on"
                self.record.diverge(
                    Property.MEMORY, message, parameter=self.names[kept.parameter], index=kept.parameter
                )
        self._compare_moments(held, "")
        self._compare_master(held, "the master", {life: (state, gradients[life]) for life, state in before.items()})

    def _compare_master(self, held: Sequence[Held], what: str, before: dict[Life, tuple[State, Tensor]] | None) -> None:
        """``before``: states and gradients that the last update began with; None: nothing was updated.

        Where Newton-Schulz ran by other operations than the reference's, its inputs are known to be right by now, and
        its result must be within the bound of rounding; then all go on with what was observed.
        """
        inexact: list[Held] = []
        for each in held:
            life = self.own[each.parameter]
            wanted = self.reference.state(life).master
            if not self.record.clean:
                break
            difference = compare(each, wanted, each.master, self.rank, signed_zeros=True)
            self.record.checked(Property.MASTER, difference.compared)
            if difference.mismatch is None:
                if before is not None:
                    self.record.judged(Oracle.EXACT)
                continue
            matrix = self.muon.marks[each.parameter].muon
            if before is None or not matrix or self.capabilities.exact_products:
                self.record.diverge(Property.MASTER, f"{what} differs", difference)
                break
            if self._beyond(self.reference.judge_master(life, *before[life], each.master), difference):
                break
            inexact.append(each)
        if before is not None and not self.capabilities.exact_products:
            self._adopt_masters(inexact)

    def _beyond(self, judged: Judged, difference: Difference) -> bool:
        """Whether a master is not within the bound of rounding, which is recorded then."""
        self.record.judged(judged.oracle)
        if judged.oracle is Oracle.BOUND:
            self.record.within(judged.margin)
        if judged.ok:
            return False
        message = f"the master differs by more than rounding in Newton-Schulz can explain: {judged.text}"
        self.record.diverge(Property.MASTER, message, difference)
        return True

    def _adopt_masters(self, inexact: Sequence[Held]) -> None:
        """Go on with masters as they were observed. Collective where this run exchanges; else it decides nothing."""
        if not self.exchanges:
            if inexact:
                self.record.unresolved = True
            return
        everyone = self._all_gathered([(each.range, each.master.detach().cpu().clone()) for each in inexact], "masters")
        if not any(everyone):
            return
        self.record.searched = True
        trained = {life: self.reference.state(life).master for life in self.reference.trained}
        observed = self._assembled(everyone, {life: trained.get(life) for life in self.reference.lives})
        self.reference.adopt_masters({life: master for life, master in observed.items() if life in trained})

    def _clear(self, when: str) -> None:
        to_zero = self._in_odd_step()
        with self._subject("clear_grad"):
            if to_zero:
                self.subject.clear_grad(set_to_zero=True)
            else:
                self.subject.clear_grad()
        self._check_cleared(f"clear_grad({'set_to_zero=True' if to_zero else ''}) {when}")
        if self.record.stage is not Stage.GATHER:
            self.reference.drop()

    def _compare_unmoved(self, prefix: str) -> None:
        """Nothing may have moved."""
        self.record.enter(self.record.step, Stage.UPDATE)
        self._compare_weights(prefix.rstrip(", "))
        held = self._held()
        self._compare_moments(held, prefix)
        self._compare_master(held, f"{prefix}the master", None)
