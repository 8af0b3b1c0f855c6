"""A rank of a training run: the sharded trainer and, beside it, an unsharded one that reads all ranks' text.

Systems like :class:`zero2core.ZeroMaster` are trained here, those that shard Muon in :mod:`harness.train.muon`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from harness.drive.driver import Driver, clip_coefficient
from harness.drive.memory import HandedOver
from harness.drive.parameters import ComputeWeights
from harness.drive.summation import Summation
from harness.drive.trail import Trail
from harness.launch.rank import RankBroken, RankContext
from harness.oracles.contributions import Interval
from harness.scenario.model import Build, Domain, Parameter, Scenario, StepPlan, Values
from harness.subjects.builtin import Capabilities, capabilities
from harness.subjects.load import SubjectError, load_class, system_of
from harness.train.messages import StepReport, TrainSetup, decode_task, encode
from harness.train.model import build_model
from harness.train.muon import MuonTrainingDriver
from harness.train.passes import TrainingRank, differing
from harness.train.unsharded import Gradients, UnshardedModel, backward, take_gradients
from harness.verdict import RankStatus


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used: the first step brings its own.

    That function raises :class:`RankBroken` with the report when the subject ended the run.
    """
    trail = Trail(context.directory, context.world, context.rank)
    drivers: list[TrainingRank] = []

    def answer(message: bytes) -> bytes:
        task = decode_task(message)
        if task.setup is not None:
            subject = task.setup.subject
            drivers.clear()
            try:
                cls = load_class(subject.path, subject.args)
                if system_of(cls) == "strategy":
                    raise SubjectError(
                        f"{subject.path} is a distribution strategy, and training runs with optimizers alone: `verify` "
                        "compares it"
                    )
            except SubjectError as error:
                report = StepReport(rank=context.rank, status=RankStatus.INTERFACE, detail=str(error))
                raise RankBroken(encode(report)) from error
            driver = MuonTrainingDriver if system_of(cls) == "muon" else TrainingDriver
            drivers.append(driver(context, cls, capabilities(subject.path), task.setup, trail))
        report = drivers[0].run_step(task.step)
        if report.status is not RankStatus.DONE:
            raise RankBroken(encode(report))
        return encode(report)

    return answer


class TrainingDriver(TrainingRank, Driver):
    """With a system like :class:`zero2core.ZeroMaster`: AdamW, and gradients that are summed over ranks."""

    def __init__(
        self,
        context: RankContext,
        cls: Callable[..., Any],
        subject: Capabilities,
        setup: TrainSetup,
        trail: Trail,
    ) -> None:
        model = build_model(setup.size, setup.seed)
        scenario = Scenario(
            world=context.world,
            seed=setup.seed,
            parameters=tuple(Parameter(name, tuple(item.shape)) for name, item in model.named_parameters()),
            values=Values(Domain.GENERAL, max_k=1, exponent=0),  # stands for gradients that nobody draws
            optimizer=setup.optimizer,
            operations=(Build(setup.bucket),),
        )
        super().__init__(context, cls, setup.subject.args, subject, scenario, trail)
        self.begin_training(setup, model, trail)

    # -- where a training run differs from a campaign's scenario ---------------------------------------------------

    def _build(self) -> None:
        if self._next_step > 0:
            return
        super()._build()
        self.sample = None  # a second reference is for campaigns
        self._unsharded = UnshardedModel(build_model(self._setup.size, self._setup.seed), self.reference.weights)

    def _compute_weights(self) -> ComputeWeights:
        weights = super()._compute_weights()
        for parameter, initial, own in zip(weights.parameters, weights.initial, self._model.parameters(), strict=True):
            parameter.data.copy_(own.data)
            initial.copy_(own.data)
        self._use(weights.parameters)
        return weights

    def _live_memory(self) -> None:
        """What models keep alive is not told apart from what the subject keeps."""

    def _step(self, plan: StepPlan) -> None:
        super()._step(msgspec.structs.replace(plan, index=self._next_step))

    def _hand_over(self, plan: StepPlan, number: int, handed_over: HandedOver) -> bool:
        loss = backward(self._model, self._windows(plan, self.rank, number), self._scale(plan))
        self._losses.append(loss)
        gradients: list[Tensor | None] = []
        for parameter in self.weights.parameters:
            if parameter.grad is not None:
                handed_over.add(parameter.grad)
            # A copy: what the subject does to its own gradients later must not reach it.
            gradients.append(None if parameter.grad is None else parameter.grad.clone())
        self._observed.append(gradients)
        return True

    def _compare_gradient(self, plan: StepPlan) -> None:
        # As long as nothing differs, the subject's own `spills` has been found to say so.
        self._numbers["spilled"] = len(plan.parts) > 1 and self.record.clean
        self._run_unsharded(plan)
        super()._compare_gradient(plan)

    def _reduced(self, plan: StepPlan, summation: Summation | None) -> list[Tensor]:
        if summation is None:
            raise ValueError("gradients of a training run round: there is an order to their sum")
        return self._unsharded.reduced(summation)

    def _intervals(self, plan: StepPlan) -> Callable[[int], Interval]:
        return self._unsharded.interval

    def _norm(self, plan: StepPlan) -> None:
        self._numbers["unsharded_norm_squared"] = self.reference.squared_norm().value
        super()._norm(plan)
        self._numbers["norm_ok"] = self.record.clean

    def _squared_norm(self, call: int, bitwise: bool) -> float:
        observed = super()._squared_norm(call, bitwise)
        if call == 0:
            self._numbers["norm_squared"] = observed
            self._numbers["coefficient"] = clip_coefficient(observed, self._setup.max_norm)
        return observed

    def _finish(self) -> None:
        """A campaign's last checks are over a whole scenario; a training run has none."""

    # -- helpers -------------------------------------------------------------------------------------------------

    def _scale(self, plan: StepPlan) -> float:
        # Gradients are summed over ranks and parts: the mean over all of a step's text is the caller's business.
        return 1.0 / (self.scenario.world * len(plan.parts))

    def _repeats(self, plan: StepPlan, windows: Tensor, seen: Gradients) -> bool:
        backward(self._model, windows, self._scale(plan))
        return differing(seen, take_gradients(self.weights.parameters)) is None
