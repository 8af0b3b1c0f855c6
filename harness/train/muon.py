"""A rank that trains with a system that shards Muon, beside the unsharded Muon trainer.

Hidden matrices are orthogonalised, query, key and value apart; embeddings, the head, norms and biases are AdamW's.

Text gives gradients whose sums round, so the unsharded side adds them in the order in which the subject does. That is
found out by probing an instance of its own, once (:mod:`harness.oracles.probing`): of each element on the rank that
holds it. Where no order explains what the subject reduced, it is compared within the rounding bound of all orders, and
both sides go on from what was observed; so it is with masters where a class of the user's has other products than the
reference. Then the step's weights are only equal to those of an unsharded trainer that took these over, which the
result tells.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from harness.drive import muon_build
from harness.drive.memory import HandedOver
from harness.drive.muon import MuonDriver
from harness.drive.muon_shards import Held, Range, compare, compare_within
from harness.drive.summation import MAX_PROBED, MAX_PROBED_WORLD, Summation
from harness.drive.trail import Trail
from harness.launch.rank import RankContext
from harness.oracles import contributions, probing
from harness.oracles.bounds import squared_norm
from harness.oracles.contributions import Nesting
from harness.oracles.muon import Gradients, Life, UnshardedMuon
from harness.oracles.order import Order, in_rank_order
from harness.scenario.model import Build, Domain, Parameter, Scenario, StepPlan, Values, muon_of, steps
from harness.scenario.muon import GlobalClip, Muon, MuonSettings
from harness.subjects.builtin import Capabilities
from harness.train.marks import mark_of
from harness.train.messages import TrainSetup
from harness.train.model import build_model
from harness.train.passes import TrainingRank, differing
from harness.train.unsharded import Gradients as OfPart
from harness.train.unsharded import UnshardedModel, backward
from harness.verdict import Oracle, Property, Stage

_NORM_EPS = 1e-6  # added to the norm that a clip divides by


class UnshardedMuonOfText(UnshardedMuon):
    """The unsharded trainer, given reduced gradients where others draw them."""

    def take(self, of: Mapping[Life, Tensor]) -> None:
        """This step's reduced gradients."""
        self._gradients = Gradients(dict(of), frozenset(), frozenset())


class MuonTrainingDriver(TrainingRank, MuonDriver):
    """See the head of this module."""

    reference: UnshardedMuonOfText

    def __init__(
        self,
        context: RankContext,
        cls: Callable[..., Any],
        subject: Capabilities,
        setup: TrainSetup,
        trail: Trail,
    ) -> None:
        model = build_model(setup.size, setup.seed)
        named = [(name, tuple(item.shape)) for name, item in model.named_parameters()]
        settings = MuonSettings(
            lr=setup.optimizer.lr,
            weight_decay=setup.optimizer.weight_decay,
            # Of a class that may compute products in a way of its own, the bound on bf16 ones says next to nothing.
            ns_dtype="bf16" if subject.exact_products else "fp32",
        )
        scenario = Scenario(
            world=context.world,
            seed=setup.seed,
            parameters=tuple(Parameter(name, shape) for name, shape in named),
            values=Values(Domain.GENERAL, max_k=1, exponent=0),  # stands for gradients that nobody draws
            optimizer=setup.optimizer,
            operations=(Build(setup.bucket),),
            system="muon",
            muon=Muon(tuple(mark_of(*each) for each in named), settings, clip=GlobalClip(setup.max_norm)),
        )
        super().__init__(context, cls, setup.subject.args, subject, scenario, trail)
        self.begin_training(setup, model, trail)
        self._order: Order | None = None
        self._nesting = Nesting.PARTS_INSIDE

    def drive(self) -> None:
        """One step."""
        if self._next_step == 0:
            self._build()
        self.record.staging = self._stage_of
        (plan,) = steps(self.scenario)
        self._step(msgspec.structs.replace(plan, index=self._next_step))
        self.record.drive()
        self.record.finish()

    def _build(self) -> None:
        self.record.enter(None, Stage.BUILD)
        self.muon = muon_of(self.scenario)
        self.names = [parameter.name for parameter in self.scenario.parameters]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.initial = [parameter.detach().clone() for parameter in self._model.parameters()]
        self.reference = UnshardedMuonOfText(self.scenario, self.initial)
        self.own = {life.parameter: life for life in self.reference.lives}
        self.exact_norm = False
        self.stepping = False
        self._construct(self._setup.bucket, self.initial, self.reference.rates)
        self._use(self.parameters)
        for index, parameter in enumerate(self.parameters):
            # What autograd gives, before a hook of the subject's takes it.
            parameter.register_hook(partial(self._saw, index))  # type: ignore[no-untyped-call]
        self._unsharded = UnshardedModel(build_model(self._setup.size, self._setup.seed), self._weights())
        if self.scenario.world <= 2:
            self._order = in_rank_order(self.scenario.world, self.scenario.numel)  # a sum of two commutes
        else:
            self._order = self._probed()

    def _saw(self, index: int, gradient: Tensor) -> None:
        self._seen[index] = gradient.detach().clone()

    def _weights(self) -> list[Tensor]:
        return [self.reference.state(life).weight for life in self.reference.lives]

    # -- one step ------------------------------------------------------------------------------------------------

    def _scale(self, plan: StepPlan) -> float:
        # Gradients are added over parts, and averaged over ranks by the subject.
        return 1.0 / len(plan.parts)

    def _part(self, plan: StepPlan, number: int, handed_over: HandedOver) -> None:
        self._seen: list[Tensor | None] = [None] * len(self.parameters)
        with self._subject("hooks, called in a backward,"):
            loss = backward(self._model, self._windows(plan, self.rank, number), self._scale(plan))
        self._losses.append(loss)
        self._observed.append(self._seen)
        self.record.checked(Property.INTAKE, len(self.parameters))
        left = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if left and self.record.clean:
            message = "after a backward a parameter still has its .grad: the next backward would add to it"
            self.record.diverge(Property.INTAKE, message, parameter=self.names[left[0]], index=left[0])

    def _compare_gradient(self, plan: StepPlan) -> None:
        prop = Property.SPILL if len(plan.parts) > 1 else Property.GRADIENT
        self._numbers["spilled"] = None
        self._numbers["muon"] = tuple(name for name, mark in zip(self.names, self.muon.marks, strict=True) if mark.muon)
        self._unsharded.use(self._weights())
        self._run_unsharded(plan)
        held = self._held()
        for each in held:
            if each.gradient is None and self.record.clean:
                self._diverge_missing(prop, each, "the reduced gradient")
        found = self._explained(plan, held)
        if found is not None:
            self.reference.take(found)
            for each in held:
                self.record.checked(prop, each.range.length)
            if self.record.clean:
                self.record.judged(Oracle.ORDERED)
        else:
            self._go_on_as_observed(prop, held)
        if self.record.clean and prop is Property.SPILL:
            self.record.checked(Property.GRADIENT, sum(each.range.length for each in held))

    def _explained(self, plan: StepPlan, held: list[Held]) -> dict[Life, Tensor] | None:
        """The mean gradient in an order in which all ranks hold just these bits; None: there is none. Collective."""
        if self._order is None:
            return None
        nestings = sorted(Nesting, key=lambda nesting: nesting is not self._nesting)
        for nesting in nestings if len(plan.parts) > 1 else nestings[:1]:
            of = self._means(Summation(self._order, nesting))
            same = all(
                each.gradient is not None
                and compare(each, of[self.own[each.parameter]], each.gradient, self.rank, signed_zeros=False).mismatch
                is None
                for each in held
            )
            if all(self._all_gathered(same, "whether an order of addition explains the gradients")):
                self._nesting = nesting
                return of
        return None

    def _means(self, summation: Summation) -> dict[Life, Tensor]:
        divisor = torch.tensor(float(self.scenario.world))
        totals = self._unsharded.reduced(summation)
        return {life: total / divisor for life, total in zip(self.reference.lives, totals, strict=True)}

    def _go_on_as_observed(self, prop: Property, held: list[Held]) -> None:
        """Compare within the bound of any order, and take over what all ranks hold. Collective."""
        num_terms = sum(len(parts) for parts in self._unsharded.gradients)
        for each in held:
            if not self.record.clean or each.gradient is None:
                break
            sums = self._unsharded.interval(each.parameter)
            interval = contributions.divided(sums, float(self.scenario.world), exact=num_terms <= 2)
            difference = compare_within(each, each.gradient, interval, self.rank)
            self.record.checked(prop, difference.compared)
            self.record.within(difference.margin)
            if difference.mismatch is not None:
                message = "the reduced gradient is what no order of addition and one division give"
                self.record.diverge(prop, message, difference)
        if self.record.clean:
            self.record.judged(Oracle.BOUND)
        self.reference.take(
            self._means(Summation(in_rank_order(self.scenario.world, self.scenario.numel), self._nesting))
        )
        self._adopt_gradients(held)

    def _adopt_masters(self, inexact: Sequence[Held]) -> None:
        self._numbers["adopted"] = bool(inexact)
        super()._adopt_masters(inexact)

    def _norm(self) -> None:
        gradients = [self.reference.gradients.of[life].numpy() for life in self.reference.lives]
        self._numbers["unsharded_norm_squared"] = squared_norm(gradients).value
        super()._norm()
        observed = float(self.subject.grad_norm)
        self._numbers["norm_squared"] = observed * observed
        self._numbers["coefficient"] = min(1.0, self._setup.max_norm / (observed + _NORM_EPS))
        self._numbers["norm_ok"] = self.record.clean

    def _repeats(self, plan: StepPlan, windows: Tensor, seen: OfPart) -> bool:
        # The subject's own hooks must not fire again: another model, on copies of the weights that it gathered.
        apart = UnshardedModel(
            build_model(self._setup.size, self._setup.seed), [each.detach().clone() for each in self.parameters]
        )
        again, _ = apart.run_pass(windows, self._scale(plan))
        return differing(seen, again) is None

    # -- in which order it adds ----------------------------------------------------------------------------------

    def _probed(self) -> Order | None:
        """How an instance of the subject adds over ranks, for all elements of the model. Collective; not in the log."""
        world = self.scenario.world
        if self.scenario.numel > MAX_PROBED or world > MAX_PROBED_WORLD:
            return None
        with self._exchange("probes"):
            pieces = list(self._probes())
            everyone: list[Any] = [None] * world
            torch.distributed.all_gather_object(everyone, pieces)
        gc.collect()
        starts = np.cumsum([0, *(parameter.numel for parameter in self.scenario.parameters)])
        sums = {pair: np.zeros(self.scenario.numel, np.float32) for pair in probing.pairs(world)}
        for of_rank in everyone:
            for number, (where, values) in of_rank:
                pair = probing.pairs(world)[number]
                start = int(starts[where.parameter])
                # The mean of whole numbers below 32, rounded once: their sum, times the world, is the nearest of them.
                sums[pair][start + where.start : start + where.stop] = (values * world).round().numpy()
        return probing.reveal(sums, world)

    def _probes(self) -> Iterator[tuple[int, tuple[Range, Tensor]]]:
        """By the number of the probe, what this rank holds of the mean gradient."""
        parameters = [nn.Parameter(weight.clone()) for weight in self.initial]
        inner = muon_build.inner_class(self.cls)(
            list(zip(self.names, parameters, strict=True)),
            **muon_build.inner_arguments(self.scenario, self.reference.rates),
        )
        config = muon_build.sharding_config(self.scenario, self.rank, self._setup.bucket)
        instance = self.cls(inner, group=None, config=config, **self.args)
        for number, pair in enumerate(probing.pairs(self.scenario.world)):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, probing.probe(pair, self.rank))
            instance.reduce_gradients()
            for shard in instance.local_shards():
                if shard.gradient is not None:
                    where = Range(self.index_of[shard.name], shard.start, shard.stop)
                    yield number, (where, shard.gradient.detach().clone())
            instance.clear_grad()
