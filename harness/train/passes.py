"""What every training rank does, whatever it trains with: steps, passes on both sides, and whether these agree.

A step is driven and compared as in a campaign, except that gradients come from autograd: the sharded side's from this
rank's text on the weights the subject gathers, the unsharded side's from all ranks' text on the unsharded trainer's own
weights. Each rank does the unsharded passes over its own text, and the ranks exchange these gradients as they are; all
of the unsharded trainer's sums and steps are done whole on every rank.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import msgspec
import torch
from torch import Tensor

from harness.drive.calls import RankDriver
from harness.drive.record import Record
from harness.drive.trail import Trail
from harness.oracles.compare import compare_bits
from harness.scenario.model import Build, Clip, Operation, Part, Step, StepPlan
from harness.train.messages import StepReport, TrainSetup
from harness.train.model import ByteModel
from harness.train.text import draw_batch
from harness.train.unsharded import Gradients, UnshardedModel
from harness.verdict import Property


class TrainingRank(RankDriver):
    """Both trainers of one rank, driven step by step. Building the sharded one is collective, and so is every step.

    To be combined with the driver of a system. Its ``_unsharded`` is made when the sharded side is built.
    """

    _unsharded: UnshardedModel

    def begin_training(self, setup: TrainSetup, model: ByteModel, trail: Trail) -> None:
        """Before the first step; ``model``: of the sharded side."""
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
        clip = (Clip(self._setup.max_norm),) if self.scenario.muon is None else ()
        return Build(self._setup.bucket), *parts, *clip, Step()

    def _use(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make the sharded side's model compute on the very parameters that the subject is given."""
        for (name, _), parameter in zip(list(self._model.named_parameters()), parameters, strict=True):
            module, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(module), attribute, parameter)

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

    @abstractmethod
    def _scale(self, plan: StepPlan) -> float:
        """What a part's loss is multiplied by, so that the step's gradient is the mean over all of its text."""

    def _run_unsharded(self, plan: StepPlan) -> None:
        """The unsharded side's passes over the text of all ranks. Collective.

        Of those over this rank's own text autograd has to have given the sharded side the same gradients.
        """
        self._unsharded.begin(self.scenario.world)
        for part in range(len(plan.parts)):
            self._unsharded.run_part(self.rank, self._windows(plan, self.rank, part), self._scale(plan))
        if self.scenario.world > 1:
            self._exchange_passes()
        self._numbers["unsharded_losses"] = tuple(self._unsharded.losses)
        for part, (seen, wanted) in enumerate(zip(self._observed, self._unsharded.gradients[self.rank], strict=True)):
            if self.record.clean and differing(seen, wanted) is not None:
                self._explain(plan, part, seen, wanted)

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

    def _explain(self, plan: StepPlan, part: int, seen: Gradients, wanted: Gradients) -> None:
        """Two passes over equal weights and equal text differ: by chance, or does the subject change gradients?"""
        index = differing(seen, wanted) or 0
        name = self.scenario.parameters[index].name
        windows = self._windows(plan, self.rank, part)
        again, _ = self._unsharded.run_pass(windows, self._scale(plan))
        if differing(wanted, again) is None and self._repeats(plan, windows, seen):
            message = f"part {part}: autograd gave another gradient than on equal weights that the subject never saw"
            self.record.diverge(Property.GRADIENT, message, parameter=name)
        elif "unrepeatable" not in self._numbers:
            self._numbers["unrepeatable"] = (
                f"step {plan.index}, rank {self.rank}, part {part}: backward passes over equal weights and equal text "
                f"gave different gradients of {name}"
            )

    @abstractmethod
    def _repeats(self, plan: StepPlan, windows: Tensor, seen: Gradients) -> bool:
        """Whether another pass of the sharded side over ``windows`` gives the gradients that were ``seen``."""


def differing(one: Gradients, other: Gradients) -> int | None:
    """Index of the first gradient that differs; what a subject has already taken is not there to be compared."""
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if left is not None and right is not None and compare_bits(left, right, signed_zeros=True).mismatch is not None:
            return index
    return None
