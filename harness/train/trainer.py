"""A rank of a training run: the sharded trainer and, beside it, an unsharded one that reads all ranks' text.

A step is driven and compared as in a campaign (:class:`harness.drive.driver.Driver`), except that gradients come from
autograd: the sharded side's from this rank's text on the weights the subject gathers, the unsharded side's from all
ranks' text on the unsharded trainer's own weights. Each rank does the unsharded passes over its own text, and the ranks
exchange these gradients as they are; all of the unsharded trainer's sums and steps are done whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from harness.drive.driver import Driver, clip_coefficient
from harness.drive.memory import HandedOver
from harness.drive.parameters import ComputeWeights
from harness.drive.record import Record
from harness.drive.summation import Summation
from harness.drive.trail import Trail
from harness.launch.rank import RankBroken, RankContext
from harness.oracles.compare import compare_bits
from harness.oracles.contributions import Interval
from harness.scenario.model import Build, Clip, Domain, Operation, Parameter, Part, Scenario, Step, StepPlan, Values
from harness.subjects.builtin import Capabilities, capabilities
from harness.subjects.load import SubjectError, load_class
from harness.train.messages import StepReport, TrainSetup, decode_task, encode
from harness.train.model import build_model
from harness.train.text import draw_batch
from harness.train.unsharded import Gradients, UnshardedModel, backward, take_gradients
from harness.verdict import Property, RankStatus


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used: the first step brings its own.

    That function raises :class:`RankBroken` with the report when the subject ended the run.
    """
    trail = Trail(context.directory, context.world, context.rank)
    drivers: list[TrainingDriver] = []

    def answer(message: bytes) -> bytes:
        task = decode_task(message)
        if task.setup is not None:
            subject = task.setup.subject
            drivers.clear()
            try:
                cls = load_class(subject.path, subject.args)
            except SubjectError as error:
                report = StepReport(rank=context.rank, status=RankStatus.INTERFACE, detail=str(error))
                raise RankBroken(encode(report)) from error
            drivers.append(TrainingDriver(context, cls, capabilities(subject.path), task.setup, trail))
        report = drivers[0].run_step(task.step)
        if report.status is not RankStatus.DONE:
            raise RankBroken(encode(report))
        return encode(report)

    return answer


class TrainingDriver(Driver):
    """Both trainers of one rank, driven step by step. Building the sharded one is collective, and so is every step."""

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
        self._trail = trail
        self._setup = setup
        self._model = model
        self._next_step = 0

    def run_step(self, step: int) -> StepReport:
        """Train and compare one step. Steps come in order from 0, and the first one also builds."""
        if step != self._next_step:
            raise ValueError(f"step {step} was asked for, but this rank's next step is {self._next_step}")
        self.record = Record(self.context, self.scenario, self._trail)
        self.scenario = msgspec.structs.replace(self.scenario, operations=self._operations(step))
        self._observed: list[Gradients] = []
        self._losses: list[float] = []
        self._numbers: dict[str, Any] = {}
        verdict = self.run()
        self._next_step += 1
        return StepReport(**msgspec.structs.asdict(verdict), losses=tuple(self._losses), **self._numbers)

    def _operations(self, step: int) -> tuple[Operation, ...]:
        num_parts = self._setup.num_parts(step)
        world = self.context.world
        parts = [
            Part(part + 1 < num_parts, tuple(part * world + rank for rank in range(world)), ((),) * world)
            for part in range(num_parts)
        ]
        return Build(self._setup.bucket), *parts, Clip(self._setup.max_norm), Step()

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

    def _use(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make the sharded side's model compute on the very parameters that the subject is given."""
        for (name, _), parameter in zip(list(self._model.named_parameters()), parameters, strict=True):
            module, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(module), attribute, parameter)

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
        self._unsharded.begin(self.scenario.world)
        for part in range(len(plan.parts)):
            self._unsharded.run_part(self.rank, self._windows(plan, self.rank, part), self._scale(plan))
        if self.scenario.world > 1:
            self._exchange_passes()
        self._numbers["unsharded_losses"] = tuple(self._unsharded.losses)
        for part, (seen, wanted) in enumerate(zip(self._observed, self._unsharded.gradients[self.rank], strict=True)):
            if self.record.clean and _differing(seen, wanted) is not None:
                self._explain(plan, part, seen, wanted)
        super()._compare_gradient(plan)

    def _reduced(self, plan: StepPlan, summation: Summation | None) -> list[Tensor]:
        if summation is None:
            raise ValueError("gradients of a training run round: there is an order to their sum")
        return self._unsharded.reduced(summation)

    def _exchange_passes(self) -> None:
        """Give every rank's unsharded trainer the passes of all ranks' text. Collective; not in the log."""
        own, losses = self._unsharded.packed(self.rank)
        gradients = [torch.empty_like(own) for _ in range(self.scenario.world)]
        all_losses = [torch.empty_like(losses) for _ in range(self.scenario.world)]
        with self._exchange("passes"):
            torch.distributed.all_gather(gradients, own)
            torch.distributed.all_gather(all_losses, losses)
        for rank in range(self.scenario.world):
            self._unsharded.unpack(rank, gradients[rank], all_losses[rank])

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

    def _windows(self, plan: StepPlan, rank: int, part: int) -> Tensor:
        """int64 (windows, context + 1): what a rank reads in this part."""
        batch = draw_batch(
            self._setup.text,
            seed=self._setup.seed,
            contributor=plan.parts[part].contributors[rank],
            step=plan.index,
            num_windows=self._setup.windows_per_part,
            length=self._setup.size.context + 1,
        )
        return torch.from_numpy(batch)

    def _scale(self, plan: StepPlan) -> float:
        # Gradients are summed over ranks and parts: the mean over all of a step's text is the caller's business.
        return 1.0 / (self.scenario.world * len(plan.parts))

    def _explain(self, plan: StepPlan, part: int, seen: Gradients, wanted: Gradients) -> None:
        """Two passes over equal weights and equal text differ: by chance, or does the subject change gradients?"""
        index = _differing(seen, wanted) or 0
        name = self.scenario.parameters[index].name
        windows = self._windows(plan, self.rank, part)
        again, _ = self._unsharded.run_pass(windows, self._scale(plan))
        backward(self._model, windows, self._scale(plan))
        seen_again = take_gradients(self.weights.parameters)
        if _differing(wanted, again) is None and _differing(seen, seen_again) is None:
            message = f"part {part}: autograd gave another gradient than on equal weights that the subject never saw"
            self.record.diverge(Property.GRADIENT, message, parameter=name)
        elif "unrepeatable" not in self._numbers:
            self._numbers["unrepeatable"] = (
                f"step {plan.index}, rank {self.rank}, part {part}: backward passes over equal weights and equal text "
                f"gave different gradients of {name}"
            )


def _differing(one: Gradients, other: Gradients) -> int | None:
    """Index of the first gradient that differs; what a subject has already taken is not there to be compared."""
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if left is not None and right is not None and compare_bits(left, right, signed_zeros=True).mismatch is not None:
            return index
    return None
