"""What our own systems must send: number, kind, dtype and length of each collective, as the layout implies.

Computed from ``spec/zero_master.md`` alone. A class subject is only asked that all ranks issue the same sequence
(:mod:`harness.oracles.judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from harness.scenario.model import Scenario, StepPlan, steps
from harness.scenario.partition import Bucket, Partition
from harness.verdict import Collective, Stage

Expected = tuple[str, str, int]
"""Kind, dtype, and elements of this rank's input."""

Problem = tuple[int | None, Stage, str]
"""Step, stage, and what is wrong there."""


Plan = list[tuple[int, Stage, list[Expected]]]
"""Step, stage, and what is called there, in order."""


def problem(scenario: Scenario, observed: Sequence[Collective], plan: Plan | None = None) -> Problem | None:
    """The first collective that the layout does not imply; None: no such.

    What construction sends (the comparison of layout digests) is not fixed here. ``plan``: what :func:`planned` gives.
    """
    by_place: dict[tuple[int | None, str | None], list[Collective]] = {}
    for entry in observed:
        by_place.setdefault((entry.step, entry.stage), []).append(entry)
    for step, stage, wanted in planned(scenario) if plan is None else plan:
        seen = by_place.get((step, stage.value), [])
        for number, (want, got) in enumerate(zip_longest(wanted, seen)):
            shown = None if got is None else (got.kind, got.dtype, got.length)
            if shown != want:
                message = f"collective {number} of this stage is {_text(shown)}, expected {_text(want)}"
                return step, stage, message
    return None


def planned(scenario: Scenario) -> Plan:
    """What is called in each stage of each step."""
    return [
        (plan.index, stage, _implied(scenario, plan, stage))
        for plan in steps(scenario)
        for stage in (Stage.COLLECT, Stage.REDUCE, Stage.NORM, Stage.UPDATE, Stage.GATHER)
    ]


def implied(scenario: Scenario) -> Callable[[int | None, str | None], list[Expected] | None]:
    """What is called in a ``(step, stage)`` of a scenario; None for a construction, which is not fixed here."""
    plans = {plan.index: plan for plan in steps(scenario)}

    def of(step: int | None, stage: str | None) -> list[Expected] | None:
        plan = None if step is None else plans.get(step)
        if plan is None or stage is None or stage == Stage.BUILD.value:
            return None
        return _implied(scenario, plan, Stage(stage))

    return of


def _implied(scenario: Scenario, plan: StepPlan, stage: Stage) -> list[Expected]:
    if scenario.world == 1 or plan.discard or (plan.skip and stage is Stage.GATHER):
        return []
    partition = Partition.from_request(scenario.numel, scenario.world, plan.bucket)
    if stage is Stage.REDUCE:
        return [("reduce_scatter", "fp32", bucket.padded) for bucket in partition.buckets]
    if stage is Stage.NORM:
        return [("all_reduce", "fp64", 1)] * (1 if plan.clip is None else 2)
    if stage is Stage.GATHER:
        return [
            ("all_gather", _gathered_dtype(scenario, bucket), bucket.padded // scenario.world)
            for bucket in partition.buckets
        ]
    return []


def _gathered_dtype(scenario: Scenario, bucket: Bucket) -> str:
    """In the parameters' own dtype where all that reach into the bucket have one of two bytes, else unrounded."""
    dtypes = set()
    start = 0
    for parameter in scenario.parameters:
        if max(start, bucket.start) < min(start + parameter.numel, bucket.end):
            dtypes.add(parameter.dtype)
        start += parameter.numel
    return dtypes.pop() if dtypes in ({"bf16"}, {"fp16"}) else "fp32"


def _text(entry: Expected | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {entry[1]}[{entry[2]}]"
