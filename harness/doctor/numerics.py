"""What one rank computes by itself: AdamW, rounding, subnormal numbers. Runs in a rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from harness.doctor.messages import (
    AdamWReport,
    CpuReport,
    Description,
    MeasureAdamW,
    MeasureRounding,
    ModeReport,
    RoundingReport,
    SubnormalReport,
)
from harness.drive import accelerator
from harness.errors import exception_text, one_line
from harness.launch.rank import RankContext
from harness.oracles import order
from harness.oracles.compare import compare_bits

MODES: dict[str, dict[str, bool]] = {
    "foreach=False": {"foreach": False},
    "foreach=True": {"foreach": True},
    "fused=True": {"fused": True},
}
_STEPS = 3
_CPU = torch.device("cpu")
_SHORTEST, _LONGEST = 50_000, 80_000  # elements of one case
_SPECIAL_ELEMENTS = 20_000
_SPECIAL_GRADIENTS = (float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-40, -1e-45, 1.2e-38, 0.0, -0.0)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
# An odd number: vector instructions take most of them, and what is left over goes another way.
_NUM_SUBNORMALS = 1_021

# The first optimizer of a process makes torch import its compiler, a second of work. This module is imported before
# ranks are forked: done here, it is done once.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def describe(context: RankContext) -> Description:
    """The torch of this rank."""
    return Description(
        torch=str(torch.__version__),
        numpy=np.__version__,
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        gpus=torch.cuda.device_count(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        versions=accelerator.versions(context),
    )


# --- AdamW ------------------------------------------------------------------------------------------------------------


class _Trained:
    """Weights and moments after the steps, flat."""

    def __init__(
        self, mode: str, weights: list[Tensor], gradients: list[list[Tensor]], settings: dict[str, Any]
    ) -> None:
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        optimizer = torch.optim.AdamW(parameters, **(settings | MODES[mode]))
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        self.weights = torch.cat([parameter.detach() for parameter in parameters])
        states = [optimizer.state[parameter] for parameter in parameters]
        self.moments = [torch.cat([state[name] for state in states]) for name in _MOMENTS]

    def differing(self, other: _Trained) -> int:
        """Elements whose bits differ in the weight or, signs of zeros apart, in a moment."""
        # Only where something differs at all is it worth finding out where.
        pairs = [(self.weights, other.weights, True)]
        pairs += [(mine, others, False) for mine, others in zip(self.moments, other.moments, strict=True)]
        if all(compare_bits(one, two, signed_zeros=signed).mismatch is None for one, two, signed in pairs):
            return 0
        found = torch.zeros(self.weights.numel(), dtype=torch.bool, device=self.weights.device)
        for one, two, signed in pairs:
            unequal = (one.view(torch.int32) != two.view(torch.int32)) & ~(one.isnan() & two.isnan())
            found |= unequal if signed else unequal & (one != two)
        return int(found.sum())

    def on_cpu(self) -> _Trained:
        """The same there."""
        other = copy.copy(self)
        other.weights, other.moments = self.weights.cpu(), [moment.cpu() for moment in self.moments]
        return other


class _Totals:
    """What has been counted of one mode."""

    def __init__(self) -> None:
        self.differing = self.cases = self.against_single = 0
        self.special_differing = self.special_against_single = 0
        self.largest = 0.0
        self.error: str | None = None

    def count(self, one: _Trained, other: _Trained) -> None:
        """One more case: what should be equal."""
        differing = one.differing(other)
        self.differing += differing
        self.cases += differing > 0
        self.largest = max(self.largest, float((one.weights - other.weights).abs().max()))

    def beside_cpu(self) -> CpuReport:
        """What was counted of a GPU beside the CPU."""
        return CpuReport(
            differing=self.differing,
            cases=self.cases,
            largest=self.largest,
            special_differing=self.special_differing,
        )

    def report(self) -> ModeReport:
        """As it is sent; of a mode that could not be run only the error."""
        return ModeReport(**vars(self)) if self.error is None else ModeReport(error=self.error)


def measure_adamw(task: MeasureAdamW, device: torch.device = _CPU) -> AdamWReport:
    """Random settings, random weights and gradients, random cuts; the same for every mode, and on a GPU for the CPU."""
    totals = {mode: _Totals() for mode in MODES}
    on_cpu = None if device.type == "cpu" else _Totals()
    num_elements = 0
    for case in range(task.num_cases):
        rng = np.random.Generator(np.random.Philox(key=[task.seed, case]))
        length = int(rng.integers(_SHORTEST, _LONGEST))
        num_elements += length
        gradients = [torch.from_numpy(_wide(rng, length)) for _ in range(_STEPS)]
        for total, flat, pieces, single in _trained(totals, rng, gradients, device):
            total.count(flat, pieces)
            total.against_single += single.differing(flat)
        if on_cpu is not None:
            on_cpu.count(*_on_gpu_and_cpu(task.seed, case, gradients, device))
    rng = np.random.Generator(np.random.Philox(key=[task.seed, 2**32]))
    gradients = [torch.from_numpy(_extreme(rng, _SPECIAL_ELEMENTS)) for _ in range(_STEPS)]
    for total, flat, pieces, single in _trained(totals, rng, gradients, device):
        total.special_differing = flat.differing(pieces)
        total.special_against_single = single.differing(flat)
    if on_cpu is not None:
        there, here = _on_gpu_and_cpu(task.seed, 2**32, gradients, device)
        on_cpu.special_differing = there.differing(here)
    return AdamWReport(
        cases=task.num_cases,
        elements=num_elements,
        steps=_STEPS,
        special_elements=_SPECIAL_ELEMENTS,
        modes={mode: total.report() for mode, total in totals.items()},
        on_cpu=None if on_cpu is None else on_cpu.beside_cpu(),
    )


def _trained(
    totals: dict[str, _Totals], rng: np.random.Generator, gradients: list[Tensor], device: torch.device
) -> Iterator[tuple[_Totals, _Trained, _Trained, _Trained]]:
    """For each mode that can be run: its totals, the flat vector, its pieces, and the flat vector of the first mode."""
    length = gradients[0].numel()
    settings, sizes = _settings(rng), _sizes(rng, length)
    weights = torch.from_numpy(rng.standard_normal(length, np.float32)).to(device)
    gradients = [gradient.to(device) for gradient in gradients]
    single: _Trained | None = None
    for mode, total in totals.items():
        if total.error is not None:
            continue
        try:
            flat, pieces = _flat_and_pieces(mode, weights, gradients, sizes, settings)
        except (RuntimeError, ValueError, TypeError) as error:
            total.error = one_line(exception_text(error))
            continue
        single = single or flat
        yield total, flat, pieces, single


def _on_gpu_and_cpu(seed: int, case: int, gradients: list[Tensor], device: torch.device) -> tuple[_Trained, _Trained]:
    """The same flat vector trained on a GPU, brought to the CPU, and trained there."""
    rng = np.random.Generator(np.random.Philox(key=[seed + 1, case]))
    settings = _settings(rng)
    weights = torch.from_numpy(rng.standard_normal(gradients[0].numel(), np.float32))
    mode = next(iter(MODES))
    there = _Trained(mode, [weights.to(device)], [[gradient.to(device)] for gradient in gradients], settings)
    return there.on_cpu(), _Trained(mode, [weights], [[gradient] for gradient in gradients], settings)


def _extreme(rng: np.random.Generator, length: int) -> NDArray[np.float32]:
    """Gradients half of which are extreme."""
    extreme = np.array(_SPECIAL_GRADIENTS, np.float32)[rng.integers(0, len(_SPECIAL_GRADIENTS), length)]
    return np.where(rng.random(length) < 0.5, extreme, rng.standard_normal(length, np.float32))


def _flat_and_pieces(
    mode: str, weights: Tensor, gradients: list[Tensor], sizes: list[int], settings: dict[str, Any]
) -> tuple[_Trained, _Trained]:
    flat = _Trained(mode, [weights], [[gradient] for gradient in gradients], settings)
    cut = [list(torch.split(gradient, sizes)) for gradient in gradients]
    return flat, _Trained(mode, list(torch.split(weights, sizes)), cut, settings)


def _settings(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "lr": float(10.0 ** rng.uniform(-4.0, -1.0)),
        "betas": (float(rng.uniform(0.0, 0.99)), float(rng.uniform(0.9, 0.9999))),
        "eps": float(10.0 ** rng.uniform(-10.0, -3.0)),
        "weight_decay": float(rng.choice([0.0, 0.01, 0.1])),
    }


def _sizes(rng: np.random.Generator, length: int) -> list[int]:
    """Random pieces that make up ``length``: separate tensors start anew where the flat vector goes on."""
    cuts = np.unique(rng.integers(1, length, size=int(rng.integers(3, 40))))
    return [int(size) for size in np.diff([0, *cuts.tolist(), length])]


def _wide(rng: np.random.Generator, length: int) -> NDArray[np.float32]:
    return np.ldexp(rng.standard_normal(length, np.float32), rng.integers(-12, 4, length)).astype(np.float32)


# --- rounding ---------------------------------------------------------------------------------------------------------


def measure_rounding(task: MeasureRounding, device: torch.device = _CPU) -> RoundingReport:
    """fp32 to bf16 against integer arithmetic."""
    rng = np.random.Generator(np.random.Philox(key=[task.seed, 0]))
    highs = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    chosen = [highs | np.uint32(low) for low in _LOW_HALVES]
    bits = np.concatenate([*chosen, rng.integers(0, 2**32, task.num_random, dtype=np.uint32)])
    values = bits.view(np.float32)
    nan = np.isnan(values)
    converted = _to_bf16(values, device)
    wanted = (order.round_bf16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    came_nan = (converted & 0x7FFF) > 0x7F80
    wrong = np.where(nan, False, converted != wanted)
    first = int(wrong.argmax())
    example = f"0x{bits[first]:08x} became 0x{converted[first]:04x}, expected 0x{wanted[first]:04x}"
    sizes = _sizes(rng, bits.size)
    pieces = np.concatenate([_to_bf16(part, device) for part in np.split(values, np.cumsum(sizes)[:-1])])
    numbers = ~nan
    some_nans = values[nan][:: max(1, int(nan.sum()) // 40)]
    infinity = torch.full((_NUM_SUBNORMALS,), float("inf"), device=device)
    return RoundingReport(
        patterns=int(bits.size),
        ties=int((((bits & np.uint32(0xFFFF)) == 0x8000) & numbers).sum()),
        subnormals=int((((bits & np.uint32(0x7F800000)) == 0) & ((bits & np.uint32(0x7FFFFF)) != 0)).sum()),
        wrong=int(wrong.sum()),
        example=example if wrong.any() else None,
        placed=int(((pieces != converted) & numbers).sum()),
        nans=int(nan.sum()),
        lost=int((nan & ~came_nan).sum()),
        nan_patterns=_hex16(converted[nan]),
        nan_patterns_alone=_hex16(
            np.concatenate([_to_bf16(one, device) for one in np.split(some_nans, some_nans.size)])
        ),
        nan_made=f"0x{int((infinity - infinity)[0].view(torch.int32)) % 2**32:08x}",
    )


def _to_bf16(values: NDArray[np.float32], device: torch.device) -> NDArray[np.uint16]:
    converted = torch.from_numpy(np.array(values)).to(device).to(torch.bfloat16)
    found: NDArray[np.uint16] = converted.view(torch.int16).cpu().numpy().view(np.uint16)
    return found


def _hex16(patterns: NDArray[np.uint16]) -> tuple[str, ...]:
    """The commonest four distinct patterns."""
    distinct, counts = np.unique(patterns, return_counts=True)
    return tuple(f"0x{distinct[index]:04x}" for index in np.argsort(-counts, kind="stable")[:4])


# --- subnormal numbers ------------------------------------------------------------------------------------------------


def measure_subnormals(device: torch.device = _CPU) -> SubnormalReport:
    """Sums, products and conversions of subnormals; what is right is known in integers: k * 2^-149 has the bits k."""
    count = torch.arange(1, _NUM_SUBNORMALS + 1, dtype=torch.int32, device=device)
    small = count.view(torch.float32)
    root = torch.full((_NUM_SUBNORMALS,), 2.0**-70, device=device)
    scaled = (count << 16).view(torch.float32)  # subnormal while bits 16 to 22 hold all of it
    fits = count < 2**7
    short = (count[fits]).to(torch.int16)
    shift = torch.full_like(short, 1)
    results: dict[str, tuple[Tensor, Tensor]] = {
        "fp32 sum": ((small + small).view(torch.int32), count * 2),
        "fp32 difference": ((small * 2 - small).view(torch.int32), count),
        "fp32 product": ((small * 2.0).view(torch.int32), count * 2),
        "fp32 product of normals": ((root * root).view(torch.int32), torch.full_like(count, 2**9)),
        "fp32 to bf16": (scaled[fits].to(torch.bfloat16).view(torch.int16), short),
        "bf16 to fp32": (short.view(torch.bfloat16).to(torch.float32).view(torch.int32), count[fits] << 16),
        "bf16 sum": (
            ((short >> shift).view(torch.bfloat16) + (short >> shift).view(torch.bfloat16)).view(torch.int16),
            (short >> shift) << shift,
        ),
    }
    return SubnormalReport(
        elements=_NUM_SUBNORMALS,
        wrong={name: int((got != wanted).sum()) for name, (got, wanted) in results.items()},
        zeros={name: int(((got == 0) & (wanted != 0)).sum()) for name, (got, wanted) in results.items()},
    )
