"""What the parent and the ranks of a training run say to each other: plain data, no torch."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from harness.drive.tasks import SubjectName
from harness.scenario.model import AdamW
from harness.verdict import RankVerdict


class ModelSize(Struct, frozen=True):
    """Sizes of :class:`harness.train.model.ByteModel`; about 390 thousand parameters by default."""

    width: int = 96
    num_layers: int = 3
    num_heads: int = 4
    context: int = 64


class TrainSetup(Struct, frozen=True, kw_only=True):
    """Everything a rank needs for a whole run.

    Attributes:
        text: what is trained on.
        windows_per_part: batch size of one forward and backward pass.
        parts: how many parts the steps have, in turn.
        max_norm: gradients with a larger norm are clipped to it.
    """

    subject: SubjectName
    seed: int
    bucket: int
    text: bytes
    size: ModelSize
    windows_per_part: int
    parts: tuple[int, ...]
    max_norm: float
    optimizer: AdamW

    def num_parts(self, step: int) -> int:
        """Parts of a step, the same on every rank."""
        return self.parts[step % len(self.parts)]


class RunStep(Struct, frozen=True):
    """Train one step; reply with a :class:`StepReport`. Steps come in order; step 0 begins a run and brings a setup."""

    step: int
    setup: TrainSetup | None = None


class StepReport(RankVerdict, frozen=True, kw_only=True):
    """One rank's verdict on one step, as on a scenario of this one step, and the numbers of the step.

    When the subject ended the run, numbers may be missing.

    Attributes:
        unrepeatable: why a difference would be nobody's fault on this machine, else None.
        losses: of this rank's parts, from the sharded trainer, in nats a byte.
        unsharded_losses: of all parts of rank 0, then all of rank 1, and so on.
        norm_squared: of the gradient before clipping, from the subject; ``unsharded_norm_squared``: in fp64.
        norm_ok: nothing had differed when the norm had been checked, before and after clipping.
        coefficient: what the gradient was multiplied with; 1.0 when the norm was small enough.
        spilled: the subject moved this step's sum to the host; None: its kind never does.
        muon: names of the parameters that are Muon's.
        adopted: masters of this rank were only within their bound, and the unsharded trainer took them over.
    """

    unrepeatable: str | None = None
    losses: tuple[float, ...] = ()
    unsharded_losses: tuple[float, ...] = ()
    norm_squared: float = 0.0
    unsharded_norm_squared: float = 0.0
    norm_ok: bool = False
    coefficient: float = 1.0
    spilled: bool | None = False
    muon: tuple[str, ...] = ()
    adopted: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(RunStep).decode
decode_report = msgspec.msgpack.Decoder(StepReport).decode
