"""What a rank of `doctor` runs: one measurement a task."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.doctor import collectives, numerics, products
from harness.doctor.messages import (
    Describe,
    MeasureAdamW,
    MeasureAverage,
    MeasureLatency,
    MeasureOrder,
    MeasureProducts,
    MeasureRepeats,
    MeasureRounding,
    MeasureSpecials,
    MeasureStrided,
    MeasureSubnormals,
    Report,
    Task,
    decode_task,
    encode,
)
from harness.launch.rank import RankContext


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used."""

    def answer(message: bytes) -> bytes:
        with context.collectives.paused():  # nobody reads the log of these
            return encode(measure(context, decode_task(message)))

    return answer


def measure(context: RankContext, task: Task) -> Report:
    """Carry out one task."""
    match task:
        case Describe():
            return numerics.describe(context)
        case MeasureAdamW():
            return numerics.measure_adamw(task, torch.device(context.device))
        case MeasureRounding():
            return numerics.measure_rounding(task, torch.device(context.device))
        case MeasureSubnormals():
            return numerics.measure_subnormals(torch.device(context.device))
        case MeasureProducts():
            return products.measure_products(task)
        case MeasureLatency():
            return collectives.measure_latency(context, task)
        case MeasureOrder():
            return collectives.measure_order(context, task)
        case MeasureSpecials():
            return collectives.measure_specials(context)
        case MeasureAverage():
            return collectives.measure_average(context, task)
        case MeasureRepeats():
            return collectives.measure_repeats(context, task)
        case MeasureStrided():
            return collectives.measure_strided(context)
