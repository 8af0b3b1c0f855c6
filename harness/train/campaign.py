"""Run a training campaign: drive the ranks step by step, compare what only all of them together show, and conclude.

The parent's side: no torch, and the subject's file is never imported here.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.drive import trail
from harness.drive.tasks import SubjectName
from harness.errors import UsageError
from harness.evaluate import PRELOAD, Evaluation, UndecidedError, conclude
from harness.launch.pool import Outcome, PoolError, RankPool, Watch
from harness.report.result import SCHEMA, Failure, Verdict, versions
from harness.scenario.model import AdamW
from harness.subjects.source import SubjectSource
from harness.train.messages import ModelSize, RunStep, StepReport, TrainSetup, decode_report, encode
from harness.train.text import Text, load_text, require_text
from harness.verdict import Divergence, Oracle, Property, Stage

HANDLER = "harness.train.trainer:start"
BACKEND = "gloo"
MAX_WORLD = 64
# No rank computes and none gets on: they wait for each other for ever.
STEP_BLOCKED_S = 15.0
DEFAULT_SUBJECT = SubjectSource("zero2", "zero2")
MAX_STEPS = 1_000_000
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, and how long.

    Attributes:
        text: file to train on; None: the text of Python's own help topics.
        bucket: elements; the default cuts the default model into five buckets.
        parts: how many parts (forward and backward passes of each rank) the steps have, in turn.
        max_norm: gradients are clipped to it; the default clips about half of the steps.
        step_timeout_s: a step that takes longer counts as hung. The first one also builds both trainers.
    """

    subject: SubjectSource = DEFAULT_SUBJECT
    world: int = 2
    steps: int = 60
    seed: int = 0
    text: Path | None = None
    bucket: int = 80_000
    parts: tuple[int, ...] = (1, 2, 3, 2)
    windows_per_part: int = 8
    max_norm: float = 0.5
    size: ModelSize = field(default_factory=ModelSize)
    optimizer: AdamW = field(default_factory=lambda: AdamW(lr=3e-3))
    step_timeout_s: float = 120.0


class StepRecord(Struct, frozen=True, kw_only=True):
    """One step as all ranks together saw it.

    Attributes:
        sharded_loss, unsharded_loss: mean over the text of all ranks and parts, before the update, in nats a byte.
        norm, unsharded_norm: of the gradient before clipping. ``norm_ok``: within its bound on every rank, before and
            after clipping, with the same bits on all.
        coefficient: 1.0 when the gradient was not clipped.
        spilled: the step's gradient was summed in host memory; None where that is never done (with Muon).
        equal_bits: all compute weights of every rank are the unsharded trainer's, and so was everything before them.
        within_bound: the reduced gradient, or with Muon a master, was only within the rounding bound, and the unsharded
            trainer took it over.
        divergence: the first thing that differed in this step.
    """

    step: int
    num_parts: int
    sharded_loss: float
    unsharded_loss: float
    norm: float
    unsharded_norm: float
    norm_ok: bool
    coefficient: float
    spilled: bool | None
    equal_bits: bool
    within_bound: bool = False
    divergence: Divergence | None = None


class TrainResult(Struct, frozen=True, kw_only=True):
    """The outcome of a run; fields that :class:`harness.report.result.Result` has too mean the same here.

    ``reached`` counts the steps that were held, spilled (with Muon: of one part, of several), clipped and unclipped.
    ``text`` names what was trained on, ``muon`` the parameters that were Muon's.
    """

    verdict: Verdict
    subject: str
    backend: str
    worlds: tuple[int, ...]
    seed: int
    steps: int
    text: str
    seconds: float
    muon: tuple[str, ...] = ()
    records: tuple[StepRecord, ...] = ()
    oracle: dict[str, int] = {}
    properties: dict[str, int] = {}
    reached: dict[str, int] = {}
    versions: dict[str, str] = {}
    failure: Failure | None = None
    reason: str | None = None
    interrupted: bool = False
    schema: int = SCHEMA


class _StoppedError(Exception):
    """The run ends without a record of its last step; where ``divergence`` is None, the text is the reason."""

    def __init__(self, reason: str, divergence: Divergence | None = None) -> None:
        super().__init__(reason)
        self.divergence = divergence


class _Tally:
    """What is summed up over the steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.oracle: Counter[str] = Counter()
        self.properties: Counter[str] = Counter()
        self.reached: Counter[str] = Counter(held=0, spilled=0, clipped=0, unclipped=0)
        self.output = ""
        self.muon: tuple[str, ...] = ()

    def count(self, evaluation: Evaluation) -> None:
        """What was compared in a step, finished or not."""
        self.oracle.update(evaluation.oracle)
        self.properties.update(evaluation.checks)
        self.output = evaluation.output

    def add(self, record: StepRecord) -> None:
        """One finished step."""
        self.records.append(record)
        if record.spilled is None:
            for name in ("held", "spilled"):
                self.reached.pop(name, None)
            self.reached["one part" if record.num_parts == 1 else "several parts"] += 1
        else:
            self.reached["spilled" if record.spilled else "held"] += 1
        self.reached["clipped" if record.coefficient != 1.0 else "unclipped"] += 1


def start_pool() -> RankPool:
    """Ranks for training runs, one after the other; a context manager that ends them on every path."""
    return RankPool(HANDLER, preload=(*PRELOAD, "harness.train.trainer"))


def run_training(
    options: TrainOptions, on_record: Callable[[StepRecord], None], *, pool: RankPool | None = None
) -> TrainResult:
    """Train step by step until the last one, the first difference, or Ctrl-C; ``on_record`` sees every finished step.

    ``pool`` is one of :func:`start_pool` that is left running; without it the run has ranks of its own.

    Raises:
        UsageError: an option out of range, an unusable text, or a subject that cannot be imported or lacks the
            interface.
    """
    _check(options)
    text = load_text(options.text)
    num_windows = options.world * max(options.parts) * options.windows_per_part
    require_text(text, num_windows * (options.size.context + 1))
    began = time.monotonic()
    tally = _Tally()
    reason: str | None = None
    divergence: Divergence | None = None
    interrupted = False
    try:
        with nullcontext(pool) if pool is not None else start_pool() as ranks:
            _run_steps(ranks, options, text, tally, on_record)
        divergence = tally.records[-1].divergence
    except _StoppedError as stopped:
        divergence = stopped.divergence
        reason = None if divergence else str(stopped)
    except (PoolError, UndecidedError) as error:
        reason = str(error)
    except KeyboardInterrupt:
        interrupted = True
        reason = f"interrupted after {len(tally.records)} of {options.steps} steps"
    return TrainResult(
        verdict="violated" if divergence else ("unknown" if reason else "holds"),
        subject=options.subject.given,
        backend=BACKEND,
        worlds=(options.world,),
        seed=options.seed,
        steps=options.steps,
        text=text.source,
        seconds=time.monotonic() - began,
        muon=tally.muon,
        records=tuple(tally.records),
        oracle={rule.value: tally.oracle[rule.value] for rule in Oracle},
        properties=dict(tally.properties),
        reached=dict(tally.reached),
        versions=versions(),
        failure=_failure(divergence, tally.output, options) if divergence else None,
        reason=reason,
        interrupted=interrupted,
    )


def replay_command(options: TrainOptions) -> str:
    """The command that repeats the run."""
    words = ["python", "-m", "harness", "train", "--world", str(options.world), "--steps", str(options.steps)]
    words += ["--seed", str(options.seed)]
    if options.text is not None:
        words += ["--text", str(options.text)]
    if options.subject != DEFAULT_SUBJECT:
        words += ["--subject", options.subject.absolute]
    for name, value in options.subject.args.items():
        words += ["--subject-arg", f"{name}={msgspec.json.encode(value).decode()}"]
    return shlex.join(words)


def _check(options: TrainOptions) -> None:
    if not 1 <= options.world <= MAX_WORLD:
        raise UsageError(f"--world {options.world}: expected 1 to {MAX_WORLD} ranks")
    if not 1 <= options.steps <= MAX_STEPS:
        raise UsageError(f"--steps {options.steps}: expected 1 to {MAX_STEPS}")
    if not 0 <= options.seed <= MAX_SEED:
        raise UsageError(f"--seed {options.seed}: expected 0 to {MAX_SEED}")


def _run_steps(
    pool: RankPool, options: TrainOptions, text: Text, tally: _Tally, on_record: Callable[[StepRecord], None]
) -> None:
    """Every step in order, up to the last or the first that differs; raises `_StoppedError` when it cannot go on."""
    setup = TrainSetup(
        subject=SubjectName(options.subject.absolute, dict(options.subject.args)),
        seed=options.seed,
        bucket=options.bucket,
        text=text.content,
        size=options.size,
        windows_per_part=options.windows_per_part,
        parts=options.parts,
        max_norm=options.max_norm,
        optimizer=options.optimizer,
    )
    moved = partial(trail.position, pool.directory, options.world)
    watch = Watch(moved, blocked_s=STEP_BLOCKED_S, computing_s=options.step_timeout_s)
    for step in range(options.steps):
        task = RunStep(step, setup if step == 0 else None)
        outcome = pool.run(options.world, encode(task), timeout_s=options.step_timeout_s, watch=watch)
        evaluation = conclude(outcome, partial(trail.read, pool.directory, options.world))
        tally.count(evaluation)
        reports = _reports(step, outcome, evaluation)
        tally.muon = tally.muon or reports[0].muon
        record = _record(setup, step, reports, evaluation.divergence)
        tally.add(record)
        on_record(record)
        if record.divergence is not None:
            return
        _require_evidence(record, reports)


def _reports(step: int, outcome: Outcome, evaluation: Evaluation) -> list[StepReport]:
    """All ranks' reports on a step that they finished and that can be judged; else raises `_StoppedError`."""
    reports = [decode_report(rank.reply) for rank in outcome.ranks if rank.reply is not None]
    divergence = evaluation.divergence
    if not outcome.replied:
        details = [report.detail for report in reports if report.detail]
        reason = f"step {step}: the subject does not support this run: {details[0] if details else 'no reason given'}"
        raise _StoppedError(reason, divergence)
    if divergence is None or divergence.stage not in (Stage.BUILD, Stage.COLLECT):
        _require_repeatable(reports)
    return reports


def _record(setup: TrainSetup, step: int, reports: Sequence[StepReport], divergence: Divergence | None) -> StepRecord:
    first = reports[0]
    taken_over = any(report.adopted or report.oracle.get(Oracle.BOUND.value) for report in reports)
    within_bound = divergence is None and taken_over
    return StepRecord(
        step=step,
        num_parts=setup.num_parts(step),
        sharded_loss=_mean([loss for report in reports for loss in report.losses]),
        unsharded_loss=_mean(first.unsharded_losses),
        norm=_root(first.norm_squared),
        unsharded_norm=_root(first.unsharded_norm_squared),
        norm_ok=all(report.norm_ok for report in reports) and len({report.norms for report in reports}) == 1,
        coefficient=first.coefficient,
        spilled=None if first.spilled is None else any(report.spilled for report in reports),
        equal_bits=divergence is None and not within_bound,
        within_bound=within_bound,
        divergence=divergence,
    )


def _require_repeatable(reports: Sequence[StepReport]) -> None:
    """Raise when a difference after the unsharded passes would be nobody's fault."""
    for report in reports:
        if report.unrepeatable is not None:
            raise _StoppedError(
                f"{report.unrepeatable}; on this machine sharded and unsharded training cannot be compared"
            )


def _require_evidence(record: StepRecord, reports: Sequence[StepReport]) -> None:
    """Raise when the equal bits of a step prove nothing."""
    for report in reports:
        for prop in (Property.SPILL if record.num_parts > 1 else Property.GRADIENT, Property.NORM, Property.WEIGHTS):
            if not report.checks.get(prop.value):
                raise _StoppedError(f"step {record.step}: rank {report.rank} compared nothing for {prop.value}")
    if not (math.isfinite(record.sharded_loss) and math.isfinite(record.unsharded_loss) and math.isfinite(record.norm)):
        raise _StoppedError(
            f"step {record.step}: the training itself diverged on both sides (loss {record.sharded_loss}, norm "
            f"{record.norm}); from here on nan would be compared with nan"
        )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _failure(divergence: Divergence, output: str, options: TrainOptions) -> Failure:
    return Failure(**divergence.summary(), output=output or None, replay=replay_command(options))


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if losses else math.nan
