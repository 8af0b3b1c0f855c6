"""Drive one scenario on one rank: the subject, the unsharded reference, and a comparison after every stage.

The order of calls is that of ``spec/guarantees.md`` ("The step as the harness drives it"). Only the subject
communicates; a rank compares its own pieces with a reference that it computes whole. The exception is the general
domain, where sums round: the ranks tell each other whether the reference added as the subject did, and exchange what
was observed when no order explains it (outside the log of collectives).
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from harness.drive import traffic
from harness.drive.calls import CannotGoOnError, InterfaceLacksError, RankDriver, reference_to
from harness.drive.inspection import Inspection
from harness.drive.memory import HandedOver, LiveMemory, static_bytes_limit
from harness.drive.observation import MOMENTS, Witness
from harness.drive.parameters import ComputeWeights, by_stream, gradient_like
from harness.drive.record import bits_of, norm_of
from harness.drive.sample import FormulaSample
from harness.drive.shard import Difference, ShardMap
from harness.drive.shared import Kept
from harness.drive.summation import Prober, Summation, Summations, calls_of_step, fingerprint
from harness.oracles import bounds, contributions
from harness.oracles.compare import compare_bits, digest
from harness.oracles.intake import IntakeModel
from harness.oracles.order import Order
from harness.oracles.prediction import Call
from harness.oracles.reference import UnshardedTrainer, build_adamw, moment_names, set_rate
from harness.scenario.model import Build, Domain, Load, Rate, StepPlan, steps
from harness.scenario.partition import Partition
from harness.scenario.situations import Situation
from harness.subjects.load import has_full_master, missing_attributes
from harness.verdict import Observation, Oracle, Property, Quantity, Stage

_FORMULA_EVERY = 4
_FULL_MASTER_EVERY = 3


class Driver(RankDriver):
    """One scenario of system ``"zero_master"`` on one rank."""

    def drive(self) -> None:
        """As :class:`RankDriver` says."""
        self._build()
        for plan in steps(self.scenario):
            self._between(plan)
            self._step(plan)
        self.record.drive()
        self._finish()
        self.record.finish()

    # -- build ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.record.enter(None, Stage.BUILD)
        scenario = self.scenario
        self.weights = self._compute_weights()
        # The reference is made first, so that what comes alive from here on is the subject's.
        self.reference = self._reference()
        self.memory = self._live_memory()
        self.settings = scenario.optimizer
        self._construct(scenario.bucket)

    def _construct(self, bucket: int, master: bytes | None = None) -> None:
        """Build the subject on the compute weights as they are, and all that belongs to this one instance of it.

        ``master``: of the instance before.
        """
        scenario = self.scenario
        self.bucket = bucket
        build = self._constructor()
        with self._subject("__init__"):
            self.subject = build(list(self.weights.parameters))
        self.master = self._contract_master()
        self.shard = ShardMap(scenario, self._partition(), self.rank, self.device)
        if self.inspect:
            self.record.inspection = self._inspection()
        # Every rank's reference is the same, and a wrong formula is wrong in every scenario: one rank holds the second
        # reference against the first, in a part of the scenarios.
        follows = self.rank == 0 and scenario.seed % _FORMULA_EVERY == 0
        self.sample = FormulaSample(scenario, self.reference, self.settings) if follows else None
        self.intake = IntakeModel()
        self.optimizer = build_adamw([self.master], self.settings)
        self.summations = Summations(scenario, self.shard, self.rule, self.shared.predictions)
        self.prober = Prober(self.context, build, scenario, self.shard)
        reference = self.reference
        self.witness = Witness(self.shard.partition, reference, master)
        self._compare_shard(
            Property.MASTER,
            Quantity.MASTER,
            "the initial master",
            self.master,
            reference.master,
            reference.flat_master(),
        )
        self._compare_padding("the initial master", Quantity.MASTER, self.master)
        self.witness.start()
        self._compare_weights("after construction")

    def _constructor(self) -> Callable[[list[torch.nn.Parameter]], Any]:
        """What builds a subject. No method of this driver's: a cycle would keep it, and all it drives, alive."""
        cls, rank, world, bucket, args = self.cls, self.rank, self.scenario.world, self.bucket, self.args
        return lambda parameters: cls(parameters, rank, world, bucket=bucket, **args)

    def _inspection(self) -> Inspection:
        # Of these alone: what it holds lives on in the log of collectives until the next scenario.
        master, reference, num_parameters = self.master, self.reference, len(self.scenario.parameters)
        return Inspection(
            self.scenario,
            self.shard.partition,
            self.rank,
            gradient=lambda: master.grad,
            masters=lambda: [reference.master(index) for index in range(num_parameters)],
        )

    def _compute_weights(self) -> ComputeWeights:
        return ComputeWeights(self.scenario, self.device, self.shared.pristine(self.device))

    def _reference(self) -> UnshardedTrainer:
        return self.shared.trainer(self.weights.initial, self.device)

    def _live_memory(self) -> LiveMemory | None:
        # Going through all objects of a process takes its time: in each scenario one rank does, each in its turn.
        judged = self.shared.num_ranks == 1 and self.scenario.seed % self.scenario.world == self.rank
        return LiveMemory() if self.capabilities.static_memory and judged else None

    def _contract_master(self) -> torch.nn.Parameter:
        with self._subject("attributes"):
            missing = missing_attributes(self.subject)
            master = getattr(self.subject, "master", None)
        if missing:
            raise InterfaceLacksError(f"{self.cls.__name__} has no attribute {', '.join(missing)} after construction")
        if not isinstance(master, torch.nn.Parameter) or master.dtype != torch.float32 or master.dim() != 1:
            shown = f"{master.dtype} of shape {list(master.shape)}" if isinstance(master, Tensor) else type(master)
            raise InterfaceLacksError(f"{self.cls.__name__}.master must be a 1-D fp32 nn.Parameter, it is {shown}")
        return master

    def _partition(self) -> Partition:
        """The layout the subject states in ``buckets``, else the one of the specification."""
        scenario, bucket = self.scenario, self.bucket
        prescribed = self.shared.once(
            ("partition", bucket), lambda: Partition.from_request(scenario.numel, scenario.world, bucket)
        )
        with self._subject("buckets"):
            buckets = getattr(self.subject, "buckets", None)
            stated = Partition.from_subject(scenario.numel, scenario.world, buckets)
        partition, origin = prescribed, "the specification's layout (the class states no `buckets`)"
        if stated is not None:
            partition, origin = stated, "its `buckets`"
            problem = stated.problem()
            if problem is not None:
                self.record.diverge(Property.OWNERSHIP, f"`buckets` is no layout of the flat vector: {problem}")
                partition = prescribed
            elif self.capabilities.strict_padding_rule and stated != prescribed:
                self.record.diverge(Property.OWNERSHIP, "`buckets` is not the layout that the specification prescribes")
        if self.record.clean and self.master.numel() != partition.shard_len:
            self.record.diverge(
                Property.OWNERSHIP,
                f"master has {self.master.numel()} elements, a shard of {origin} has {partition.shard_len}",
                expected=str(partition.shard_len),
                actual=str(self.master.numel()),
            )
        if not self.record.clean:
            raise CannotGoOnError  # where elements lie is not known; a stated length may also be of any size
        self.record.checked(Property.OWNERSHIP)
        return partition

    # -- between two steps ---------------------------------------------------------------------------------------

    def _between(self, plan: StepPlan) -> None:
        """What comes before a step; construction and loading are told as the build of that step."""
        for operation in plan.before:
            match operation:
                case Rate():
                    self._set_rate(operation.lr)
                case Load():
                    self._load(plan.index, operation.version)
                case Build():
                    self._rebuild(plan.index, operation.bucket)

    def _set_rate(self, lr: float) -> None:
        self.settings = replace(self.settings, lr=lr)
        set_rate(self.optimizer, lr)
        self.reference.set_rate(lr)
        if self.sample is not None:
            self.sample.set_rate(lr)

    def _load(self, step: int, version: int) -> None:
        """As when a checkpoint is loaded: the weights change from outside, on all ranks alike, then a refresh."""
        self.record.enter(step, Stage.BUILD)
        loaded = self.weights.load(version)
        self.reference.load(loaded)
        if self.sample is not None:
            self.sample.load()
        self._expect_weights()
        with self._subject("refresh_from_weights"):
            refresh = getattr(self.subject, "refresh_from_weights", None)
            if refresh is None:
                raise NotImplementedError("the class has no refresh_from_weights(), which the scenario asks for")
            refresh()
        self._check_intake("refresh_from_weights()")
        self._compare_weights("after refresh_from_weights()")
        if self.record.clean:
            self._compare_state(Property.MASTER, Property.MOMENTS, "after refresh_from_weights() ")
        self.witness.start()

    def _rebuild(self, step: int, bucket: int) -> None:
        """As when a run goes on from its weights alone: neither the subject nor the optimizer of before is there."""
        self.record.enter(step, Stage.BUILD)
        self._let_go()
        self.reference.rebuild()
        self._construct(bucket, self.witness.master)

    def _let_go(self) -> None:
        """Drop the subject and all that refers to it: a class may well allow one instance at a time."""
        self.record.end_inspection()
        with self._subject("__del__"):
            left = reference_to(self.subject)
            del self.subject, self.master, self.optimizer, self.prober
            if left is None or left() is not None:
                gc.collect()

    # -- one step ------------------------------------------------------------------------------------------------

    def _step(self, plan: StepPlan) -> None:
        self.record.enter(plan.index, Stage.COLLECT)
        if self.record.inspection is not None:
            self.record.inspection.begin(plan)
        handed_over = HandedOver()
        for number, part in enumerate(plan.parts):
            any_gradient = self._hand_over(plan, number, handed_over)
            with self._subject("collect"):
                self.subject.collect(part.more)
            self.intake.part(part.more, any_gradient)
            self._check_intake(f"collect({part.more}) of part {number}")
        if plan.discard:
            self._discard(handed_over)
            return
        self._compare_weights("after collect()")
        self._reduce(plan, handed_over)
        self._norm(plan)
        self._compare_weights("after grad_sq_norm()")
        if plan.skip:
            self._skip()
            return
        self._update()
        self._gather()

    def _hand_over(self, plan: StepPlan, number: int, handed_over: HandedOver) -> bool:
        """Fill this part's ``.grad`` and keep no reference to them; whether there was any gradient."""
        found = False
        for index, parameter in enumerate(self.weights.parameters):
            values = contributions.contribution(self.scenario, plan, self.rank, number, index)
            if values is None:
                continue
            found = True
            gradient = gradient_like(parameter, values)
            handed_over.add(gradient)
            parameter.grad = gradient
        return found

    def _check_intake(self, after: str) -> None:
        if not self.record.clean:
            return
        self.record.checked(Property.INTAKE)
        for index, parameter in enumerate(self.weights.parameters):
            if parameter.grad is not None:
                self.record.diverge(
                    Property.INTAKE,
                    f"after {after} a parameter still has its .grad: the next backward would add to it",
                    parameter=self.scenario.parameters[index].name,
                    index=index,
                )
                return
        with self._subject("has_grad"):
            has_grad, spills = bool(self.subject.has_grad), int(self.subject.spills)
        if has_grad != self.intake.has_grad:
            self.record.diverge(
                Property.INTAKE,
                f"after {after} has_grad is {has_grad}, expected {self.intake.has_grad}",
                expected=str(self.intake.has_grad),
                actual=str(has_grad),
            )
        elif spills != self.intake.spills:
            self.record.diverge(
                Property.INTAKE,
                f"after {after} spills is {spills if abs(spills) < 2**53 else 'out of range'}, "
                f"expected {self.intake.spills}",
                expected=float(self.intake.spills),
                actual=float(spills) if abs(spills) < 2**53 else "out of range",
            )

    def _discard(self, handed_over: HandedOver) -> None:
        with self._subject("discard"):
            self.subject.discard()
        self.intake.discard()
        self._check_intake("discard()")
        self._check_released(handed_over, "discard()")
        self._compare_weights("after discard()")
        self.record.enter(self.record.step, Stage.UPDATE)
        with self._blamed("master.grad"):
            self.optimizer.step()
        if self.record.clean:
            # Nothing may be left: an optimizer step after a discard must not move anything.
            self._compare_state(Property.INTAKE, Property.INTAKE, "after a discard and an optimizer step, ")

    def _skip(self) -> None:
        """No update and no gather, as when a norm is not finite: nothing may have moved, nor may it move later."""
        self.record.enter(self.record.step, Stage.UPDATE)
        if self.record.clean:
            self._compare_state(Property.MASTER, Property.MOMENTS, "after a skipped update, ")
        self.witness.updating()

    def _reduce(self, plan: StepPlan, handed_over: HandedOver) -> None:
        self.record.enter(self.record.step, Stage.REDUCE)
        with self._subject("reduce_scatter"):
            self.subject.reduce_scatter()
        self.intake.reduce()
        self._check_intake("reduce_scatter()")
        self._check_released(handed_over, "reduce_scatter()")
        self._compare_weights("after reduce_scatter()")
        self._compare_gradient(plan)
        self._compare_padding("master.grad", Quantity.GRADIENT, self._gradient())
        self.witness.reduced()

    def _reduced(self, plan: StepPlan, summation: Summation | None) -> list[Tensor]:
        """The step's reduced gradients, by parameter; without a summation (exact domains) in any order."""
        look = self.rank == 0  # every rank would see the same situations
        sums = self.shared.sums(plan, summation, self.device, look=look)
        if look:
            for situation in sums.shows:
                self.record.reached(situation)
        return sums.gradients

    def _check_released(self, handed_over: HandedOver, after: str) -> None:
        if not self.record.clean or len(handed_over) == 0:
            return
        self.record.checked(Property.MEMORY)
        kept = handed_over.still_alive()
        if kept:
            self.record.diverge(
                Property.MEMORY,
                f"{kept} of the step's {len(handed_over)} gradients are still in memory after {after}",
                expected=0.0,
                actual=float(kept),
            )

    def _gradient(self) -> Tensor:
        gradient = self.master.grad
        if gradient is None:
            self.record.diverge(Property.GRADIENT, "master.grad is None: the optimizer would skip the step")
            raise CannotGoOnError
        return gradient

    def _compare_gradient(self, plan: StepPlan) -> None:
        """Bit for bit, in the general domain with sums added as the subject adds.

        There a sum that no known order explains must be within the any-order bound; later stages are then as observed.
        Collective in the general domain, so every rank comes here, whatever it has found before.
        """
        observed = self._gradient()
        prop = Property.SPILL if len(plan.parts) > 1 else Property.GRADIENT
        self._require_shard(prop, "master.grad", observed)
        if self.record.clean:
            self.record.checked(Property.GRADIENT, self.shard.num_elements)
            if len(plan.parts) > 1:
                self.record.checked(Property.SPILL, self.shard.num_elements)
        if self.scenario.values.domain is not Domain.GENERAL:
            self.reference.set_gradients(self._reduced(plan, None))
            self.record.judged(Oracle.EXACT)
            difference = self._gradient_difference(observed)
            if difference.mismatch is not None:
                self.record.diverge(
                    prop, "the reduced gradient differs", difference, self._seen(Quantity.GRADIENT, observed)
                )
        elif self._explained(plan, observed):
            self.record.judged(Oracle.ORDERED)
        else:
            if self.record.clean:
                self._compare_with_bound(prop, plan, observed)
            if self.record.clean:
                self.record.judged(Oracle.BOUND)
            self._adopt(observed)

    def _explained(self, plan: StepPlan, observed: Tensor) -> bool:
        """Whether an order of addition gives all ranks' gradients bit for bit, and is the reference's now. Collective.

        A rank that had found something wrong before ends the search: nothing is decided here any more.
        """
        calls = calls_of_step(self.record.collectives, self.record.step, self.scenario.world)
        if not self.exchanges:
            return self._as_predicted(plan, calls, observed)
        for summation in self.summations.candidates(plan, calls, lambda: self._probe(plan)):
            self.reference.set_gradients(self._reduced(plan, summation))
            differs = self._gradient_difference(observed).mismatch is not None
            wrong, over = self._over_ranks(differs, not self.record.clean, fingerprint(calls))
            if not wrong:
                self.summations.explained_by(summation)
                return True
            if over:
                return False
            self.record.searched = True
        return False

    def _as_predicted(self, plan: StepPlan, calls: frozenset[Call], observed: Tensor) -> bool:
        """Take the first order for the right one; where it is not, this run can decide nothing more."""
        summation = self.summations.predicted(calls)
        self.reference.set_gradients(self._reduced(plan, summation))
        if self._gradient_difference(observed).mismatch is not None:
            self.record.unresolved = True
        return True

    def _compare_with_bound(self, prop: Property, plan: StepPlan, observed: Tensor) -> None:
        beyond = self.shard.beyond(observed, self._intervals(plan))
        self.record.within(beyond.margin)
        if beyond.mismatch is None:
            return
        off = abs(beyond.mismatch.actual - beyond.mismatch.expected)
        message = "the reduced gradient is what no order of addition gives"
        if beyond.bound and math.isfinite(off):
            message = (
                "the reduced gradient differs by more than any order of addition can: "
                f"off by {off:.3g}, bound {beyond.bound:.3g}"
            )
        self.record.diverge(prop, message, beyond, self._seen(Quantity.GRADIENT, observed))

    def _probe(self, plan: StepPlan) -> Order | None:
        """What probing a second instance tells, which must leave the first as it was. Collective."""
        gradient = self._gradient()
        before = gradient.detach().clone()
        with self._subject("reduce_scatter, called on a second instance to find its order of addition,"):
            order = self.prober(plan)
        # Two instances that share a gradient: right as long as there is one, and not to be probed. A rank that owns
        # nothing but padding does not see it.
        shared = (
            self.master.grad is not gradient or compare_bits(before, gradient, signed_zeros=True).mismatch is not None
        )
        if shared:
            gradient.data.copy_(before)
            self.master.grad = gradient
        self._compare_weights("after a second instance was built and asked to reduce")
        anywhere, _ = self._over_ranks(shared, False, 0)
        return None if anywhere else order

    def _gradient_difference(self, observed: Tensor) -> Difference:
        if not self.record.clean:
            return Difference(0)
        reference = self.reference
        return self.shard.compare(
            observed, reference.gradients.__getitem__, signed_zeros=False, flat=reference.flat_gradient()
        )

    def _intervals(self, plan: StepPlan) -> Callable[[int], contributions.Interval]:
        """For each parameter, what its reduced gradient may be in any order of addition."""
        return functools.cache(lambda index: self.shared.interval(plan, index))

    def _over_ranks(self, differs: bool, over: bool, calls: int) -> tuple[bool, bool]:
        """Whether any rank found a difference, and whether the search is over: on one, or since they saw other calls.

        Ranks that saw other calls predict other orders, and would not even try equally many.
        """
        if self.scenario.world == 1:
            return differs, over
        found = torch.tensor([int(differs), int(over), calls, -calls], device=self.device)
        with self._exchange("what was compared"):
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        any_differs, any_over, most, least = found.tolist()
        same_calls = most == -least
        return bool(any_differs) or not same_calls, bool(any_over) or not same_calls

    def _adopt(self, observed: Tensor) -> None:
        """Make what all ranks observed the reference's gradient. Collective; not in the log."""
        shards = [torch.empty_like(observed) for _ in range(self.scenario.world)]
        if self.scenario.world == 1:
            shards = [observed]
        else:
            with self._exchange("gradients"):
                torch.distributed.all_gather(shards, observed.contiguous())
        self.reference.set_gradients(self.shard.assemble(shards, self.reference.weights))

    def _norm(self, plan: StepPlan) -> None:
        self.record.enter(self.record.step, Stage.NORM)
        exact_norm = self.scenario.values.domain is Domain.NORM_EXACT
        observed = self._squared_norm(0, exact_norm)
        if plan.clip is None:
            return
        coefficient = clip_coefficient(observed, plan.clip.max_norm)
        active = coefficient < 1.0
        if 0.0 < coefficient <= 1.0:  # what an infinite norm, or none at all, leaves shows nothing
            self.record.reached(Situation.CLIPPING_ACTIVE if active else Situation.CLIPPING_INACTIVE)
        with self._blamed("master.grad"):
            self._gradient().mul_(coefficient)
        self.reference.scale_gradients(coefficient)
        self._compare_clipped(f"the gradient scaled by {coefficient!r} differs")
        self._squared_norm(1, exact_norm and not active)
        self._compare_clipped("after grad_sq_norm() the clipped gradient is another one")

    def _compare_clipped(self, message: str) -> None:
        if not self.record.clean:
            return
        difference = self._gradient_difference(self._gradient())
        self.record.checked(Property.CLIP, difference.compared)
        if difference.mismatch is not None:
            observe = self._seen(Quantity.CLIPPED, self._gradient())
            self.record.diverge(Property.CLIP, message, difference, observe)

    def _squared_norm(self, call: int, bitwise: bool) -> float:
        with self._subject("grad_sq_norm"):
            observed, dtype = norm_of(self.subject.grad_sq_norm(), "the squared norm")
            bits = bits_of(observed, dtype)
        self.record.norm(call, bits)
        if self.record.clean:
            exact = self.reference.squared_norm()
            judged = bounds.judge_squared_norm(
                observed,
                exact,
                kind=self.capabilities.norm,
                shard_len=self.shard.partition.shard_len,
                world=self.scenario.world,
                bitwise=bitwise and self.capabilities.norm == "fp64",
            )
            self.record.checked(Property.NORM, exact.num_elements)
            if judged.oracle is Oracle.LOOSE:
                self.record.judged(Oracle.LOOSE)
            elif judged.bound and math.isfinite(judged.error):
                self.record.within(judged.error / judged.bound)
            self.witness.normed(call, exact.value)
            if not judged.ok:
                step, stage = self.record.step, self.record.stage
                self.record.diverge(
                    Property.NORM,
                    f"squared norm {'after' if call else 'before'} clipping: {observed!r}, expected {exact.value!r}, "
                    f"relative error {judged.error:.3g}, bound {judged.bound:.3g} ({judged.oracle.value})",
                    observe=lambda: self.witness.norm(call, observed, judged.bound, step, stage),
                    expected=exact.value,
                    actual=observed,
                    expected_bits=bits_of(float(torch.tensor(exact.value, dtype=dtype)), dtype),
                    actual_bits=bits,
                )
        return observed

    def _update(self) -> None:
        self.record.enter(self.record.step, Stage.UPDATE)
        if self.sample is not None:
            self.sample.step()
        self.witness.updating()
        with self._blamed("master.grad"):
            self.optimizer.step()
        self.reference.step()
        if self.record.clean:
            self._compare_state(Property.MASTER, Property.MOMENTS, "")
        if self.record.clean and self.sample is not None:
            self._check_formula(self.sample)

    def _compare_state(self, master: Property, moments: Property, prefix: str) -> None:
        reference = self.reference
        self._compare_shard(
            master, Quantity.MASTER, f"{prefix}the master", self.master, reference.master, reference.flat_master()
        )
        state = self.optimizer.state.get(self.master)
        if state:
            flat = reference.flat_moments()
            names = moment_names(self.settings)
            for position, (quantity, name) in enumerate(zip(MOMENTS, names, strict=False)):
                wanted = [reference.moments(index)[position] for index in range(len(self.weights.parameters))]
                self._compare_shard(
                    moments,
                    quantity,
                    f"{prefix}{name}",
                    state[name],
                    wanted.__getitem__,
                    None if flat is None else flat[position],
                )

    def _check_formula(self, sample: FormulaSample) -> None:
        """Guard against an error that the subject's optimizer and the reference's share: both are torch's."""
        problem = sample.problem()
        if problem is not None:
            message = f"AdamW as computed here lies outside the rounding of fp32 (subnormals flushed?): {problem}"
            self.record.diverge(Property.MASTER, message)

    def _gather(self) -> None:
        self.record.enter(self.record.step, Stage.GATHER)
        with self._subject("gather_params"):
            self.subject.gather_params()
        self.reference.gather()
        reference = self.reference
        self._expect_weights()
        self._compare_weights("after gather_params()")
        if self.weights.as_expected:
            self.record.weights(reference.once("digest", lambda: self._digest(reference.weights)))
        else:
            self.record.weights(self._digest(self.weights.parameters))
        if self.record.clean:
            self.witness.stepped()

    def _digest(self, weights: Sequence[Tensor]) -> str:
        """Equal for equal values, however they were cut into parameters."""
        return digest(by_stream(self.scenario, weights))

    def _expect_weights(self) -> None:
        """From here on the compute weights should be the reference's."""
        reference = self.reference
        self.weights.expect_bytes(reference.once("laid out", lambda: self.weights.laid_out(reference.weights)))

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._check_full_master()
        if not self.record.clean:
            return
        if self.capabilities.traffic:
            self.record.checked(Property.TRAFFIC)
            plan = self.shared.once("traffic", lambda: traffic.planned(self.scenario))
            problem = traffic.problem(self.scenario, self.record.collectives, plan)
            if problem is not None:
                step, stage, message = problem
                self.record.enter(step, stage)
                self.record.diverge(Property.TRAFFIC, message)
        self._check_static_memory()

    def _check_full_master(self) -> None:
        """``full_master`` is optional. Collective where the class has it, so called whatever was found before."""
        if not has_full_master(self.cls) or self.scenario.seed % _FULL_MASTER_EVERY:
            return
        self.record.enter(self.record.step, Stage.GATHER)  # whatever the last step ended with
        with self._subject("full_master"), self.context.collectives.paused():
            try:
                flat = self.subject.full_master()
            except NotImplementedError:
                return
        if not self.record.clean:
            return
        if not isinstance(flat, Tensor) or flat.dtype != torch.float32 or flat.shape != (self.scenario.numel,):
            shown = f"{flat.dtype}{list(flat.shape)}" if isinstance(flat, Tensor) else type(flat)
            self.record.diverge(Property.MASTER, f"full_master() is {shown}, expected fp32[{self.scenario.numel}]")
            return
        wanted = [self.reference.master(index) for index in range(len(self.weights.parameters))]
        pieces = torch.split(flat.detach(), [master.numel() for master in wanted])
        difference = self.shard.compare_whole(pieces, wanted)
        self.record.checked(Property.MASTER, difference.compared)
        if difference.mismatch is not None:
            step, stage = self.record.step, self.record.stage
            self.record.diverge(
                Property.MASTER,
                "full_master() differs",
                difference,
                lambda: self.witness.whole(Quantity.FULL_MASTER, [flat], step, stage),
            )

    def _check_static_memory(self) -> None:
        if self.memory is None and not self.shared.watches_memory:
            return
        with self._subject("__del__"):
            self.prober.forget()
        partition = self.shard.partition
        limit = static_bytes_limit(
            shard_len=partition.shard_len,
            numel=partition.numel,
            largest_bucket=max(bucket.padded for bucket in partition.buckets),
            spilled=self.intake.spills > 0,
            num_moments=len(moment_names(self.settings)),
        )
        own = [*self.weights.tensors(), *self.reference.tensors()]
        if self.memory is None:
            kept = self.shared.kept(self, limit, own)
        else:
            kept = Kept(self.memory.since(own, limit=limit), limit)
        if kept is None:
            return
        self.record.checked(Property.MEMORY)
        if kept.alive > kept.limit:
            self.record.diverge(
                Property.MEMORY,
                f"{kept.alive} bytes are kept alive, the formula allows {kept.limit}",
                expected=float(kept.limit),
                actual=float(kept.alive),
            )

    # -- comparisons ---------------------------------------------------------------------------------------------

    def _seen(self, quantity: Quantity, shard: Tensor) -> Callable[[], Observation | None]:
        step, stage = self.record.step, self.record.stage
        return lambda: self.witness.shard(quantity, shard, step, stage)

    def _compare_shard(
        self,
        prop: Property,
        quantity: Quantity,
        what: str,
        actual: Tensor,
        expected: Callable[[int], Tensor],
        flat: bytes | None,
    ) -> None:
        if not self.record.clean:
            return
        self._require_shard(prop, what, actual)
        signed = prop is Property.MASTER
        difference = self.shard.compare(actual.detach(), expected, signed_zeros=signed, flat=flat)
        self.record.checked(prop, difference.compared)
        if difference.mismatch is not None:
            self.record.diverge(prop, f"{what} differs", difference, self._seen(quantity, actual))

    def _require_shard(self, prop: Property, what: str, shard: Tensor) -> None:
        """A vector of the subject's must be readable as one before it can be compared."""
        whole = (self.shard.partition.shard_len,)
        if (
            shard.dtype != torch.float32
            or shard.shape != whole
            or shard.layout != torch.strided
            or shard.device != self.device
        ):
            found = f"{shard.layout} {shard.dtype} {list(shard.shape)} on {shard.device}".replace("torch.", "")
            wanted = f"strided float32 {list(whole)} on {self.device}"
            self.record.diverge(prop, f"{what} is {found}, expected {wanted}")
            raise CannotGoOnError
        last = shard.storage_offset() + (shard.numel() - 1) * shard.stride(0)
        if shard.numel() and shard.untyped_storage().nbytes() < 4 * (last + 1):
            self.record.diverge(prop, f"the memory of {what} was freed")
            raise CannotGoOnError

    def _compare_weights(self, when: str) -> None:
        """The compute weights are the unsharded trainer's at all times: only a gather may change them."""
        self._check_storage()
        if not self.record.clean:
            return
        if self.weights.as_expected:
            self.record.checked(Property.WEIGHTS, self.shard.partition.numel)
            return
        difference = self.shard.compare_whole(self.weights.parameters, self.reference.weights)
        self.record.checked(Property.WEIGHTS, difference.compared)
        if difference.mismatch is not None:
            step, stage = self.record.step, self.record.stage
            self.record.diverge(
                Property.WEIGHTS,
                f"{when} the compute weights differ",
                difference,
                lambda: self.witness.whole(Quantity.WEIGHTS, self.weights.parameters, step, stage),
            )

    def _check_storage(self) -> None:
        """The parameters are where and what they were at all times, not only after a gather has put them right."""
        self.record.checked(Property.STORAGE)
        problem = self.weights.problem()
        if problem is not None:
            index, message = problem
            name = None if index is None else self.scenario.parameters[index].name
            self.record.diverge(Property.STORAGE, message, parameter=name, index=index)
            raise CannotGoOnError  # there may be no place any more for the next part's gradients

    def _compare_padding(self, what: str, quantity: Quantity, shard: Tensor) -> None:
        """Padding belongs to no parameter: it is zero at the start and sums to zero.

        Not asked after an update: with eps = 0 a right AdamW divides its zeros by zero there.
        """
        if not self.record.clean:
            return
        position = self.shard.nonzero_padding(shard.detach())
        if position is not None:
            value = float(shard.detach()[position])
            self.record.diverge(
                Property.OWNERSHIP,
                f"{what} holds {value!r} in its padding, at element {position} of the shard",
                observe=self._seen(quantity, shard),
                expected=0.0,
                actual=value,
            )


def clip_coefficient(squared_norm: float, max_norm: float) -> float:
    """``min(1, max_norm / (norm + 1e-6))`` in Python floats, as in ``torch.nn.utils.clip_grad_norm_``; nan stays."""
    if math.isnan(squared_norm) or squared_norm < 0:
        return math.nan
    coefficient = max_norm / (math.sqrt(squared_norm) + 1e-6)
    return 1.0 if coefficient >= 1.0 else coefficient
