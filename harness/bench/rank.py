"""What a rank of a bench runs: scenarios as a campaign drives them, with a clock, and their calls alone."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from harness.bench.clock import Clock, TimedDriver
from harness.bench.messages import BareReport, DoNothing, RunBare, TimedVerdict, decode_task, encode
from harness.drive.calls import Around
from harness.drive.driver import clip_coefficient
from harness.drive.handler import LoadedSubjects, run_isolated
from harness.drive.isolation import Isolation
from harness.drive.parameters import ComputeWeights, gradient_like
from harness.drive.tasks import CheckSubject
from harness.drive.trail import Trail
from harness.errors import sendable
from harness.launch.rank import RankBroken, RankContext
from harness.oracles import contributions
from harness.oracles.reference import build_adamw, set_rate
from harness.scenario.model import Build, Load, Rate, Scenario, StepPlan, steps
from harness.subjects.builtin import capabilities
from harness.verdict import RankStatus


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used: each task names its subject."""
    trail = Trail(context.directory, context.world, context.rank)
    isolation = Isolation(context.rank, context.rearm)
    subjects = LoadedSubjects(isolation.importing)

    def answer(message: bytes) -> bytes:
        clock = Clock()
        task = decode_task(message)
        if isinstance(task, DoNothing):
            return b""
        if isinstance(task, CheckSubject):
            return encode(subjects.check(task.subject))
        cls, args = subjects.load(task.subject), task.subject.args
        if isinstance(task, RunBare):
            report = run_bare(context, cls, args, task.scenario)
            if report.problem is not None:
                raise RankBroken(encode(report))
            return encode(report)
        capable = capabilities(task.subject.path, task.subject.config)

        def build(around: Around) -> TimedDriver:
            driver = TimedDriver(
                context, cls, args, capable, task.scenario, trail, exchanges=task.exchanges, around=around
            )
            driver.clock = clock
            return driver

        verdict = run_isolated(isolation, task.subject.path, task.scenario, build)
        payload = encode(
            TimedVerdict(**{name: getattr(verdict, name) for name in verdict.__struct_fields__}, parts=clock.read())
        )
        if verdict.status is RankStatus.DONE:
            return payload
        raise RankBroken(payload, reusable=not context.collectives.entries)

    return answer


def run_bare(context: RankContext, cls: Callable[..., Any], args: dict[str, Any], scenario: Scenario) -> BareReport:
    """Make the calls of a scenario, with gradients that lie ready, and look at nothing. Collective."""
    device = torch.device(context.device)
    weights = ComputeWeights(scenario, device)
    plans = list(steps(scenario))
    gradients = [_gradients(scenario, plan, context.rank, weights) for plan in plans]
    context.collectives.mirror = None
    with context.collectives.paused():
        dist.all_reduce(torch.zeros(1, device=device))  # from here on no rank waits for another's gradients
    began = time.perf_counter()
    try:
        _drive(context, cls, args, scenario, weights, plans, gradients)
    except BaseException as error:  # noqa: BLE001  (the subject's, whatever it is)
        return BareReport(problem=sendable("".join(traceback.format_exception(error))))
    seconds = time.perf_counter() - began
    called = tuple((entry.kind, entry.length) for entry in context.collectives.entries)
    return BareReport(seconds=seconds, collectives=called)


Gradients = list[list[Tensor | None]]  # of each part, of each parameter


def _gradients(scenario: Scenario, plan: StepPlan, rank: int, weights: ComputeWeights) -> Gradients:
    ready: Gradients = []
    for number in range(len(plan.parts)):
        part: list[Tensor | None] = []
        for index, parameter in enumerate(weights.parameters):
            values = contributions.contribution(scenario, plan, rank, number, index)
            part.append(None if values is None else gradient_like(parameter, values))
        ready.append(part)
    return ready


def _drive(
    context: RankContext,
    cls: Callable[..., Any],
    args: dict[str, Any],
    scenario: Scenario,
    weights: ComputeWeights,
    plans: list[StepPlan],
    gradients: list[Gradients],
) -> None:
    """The order of calls is that of :class:`harness.drive.driver.Driver`."""

    def build(bucket: int) -> Any:  # noqa: ANN401 (whatever the class makes)
        return cls(list(weights.parameters), context.rank, scenario.world, bucket=bucket, **args)

    subject = build(scenario.bucket)
    optimizer = build_adamw([subject.master], scenario.optimizer)
    settings = scenario.optimizer
    for plan, ready in zip(plans, gradients, strict=True):
        for operation in plan.before:
            match operation:
                case Rate():
                    settings = replace(settings, lr=operation.lr)
                    set_rate(optimizer, operation.lr)
                case Load():
                    weights.load(operation.version)
                    subject.refresh_from_weights()
                case Build():
                    del subject, optimizer
                    subject = build(operation.bucket)
                    optimizer = build_adamw([subject.master], settings)
        for part in plan.parts:
            for parameter, gradient in zip(weights.parameters, ready.pop(0), strict=True):
                if gradient is not None:
                    parameter.grad = gradient
            del gradient  # the subject's alone, as after a backward pass
            subject.collect(part.more)
        if plan.discard:
            subject.discard()
            optimizer.step()
            continue
        subject.reduce_scatter()
        squared = float(subject.grad_sq_norm())
        if plan.clip is not None:
            subject.master.grad.mul_(clip_coefficient(squared, plan.clip.max_norm))
            float(subject.grad_sq_norm())
        if plan.skip:
            continue
        optimizer.step()
        subject.gather_params()
