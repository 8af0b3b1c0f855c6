"""What ranks find out together: orders of addition, AVG, repeats, strided views. Runs in a rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from harness.doctor import trees
from harness.doctor.messages import (
    AverageReport,
    CallReport,
    LatencyReport,
    MeasureAverage,
    MeasureLatency,
    MeasureOrder,
    MeasureRepeats,
    OrderReport,
    RepeatsReport,
    SpecialsReport,
    StridedReport,
    ViewReport,
)
from harness.errors import exception_text, one_line
from harness.launch.rank import RankContext
from harness.oracles import order, probing
from harness.oracles.compare import compare_bits, digest
from harness.oracles.order import Dtype, Rounding

_DTYPES: dict[Rounding, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SHOWN = "all_reduce fp32"
_SHOWN_PIECE = 8  # elements a rank of the call whose trees are shown
_PIECES = (1, _SHOWN_PIECE, 250, 900)  # elements a rank, as in a campaign
_ODD = 1  # a length that does not divide: this much more than a multiple of the world
_LONG_PIECE = 2**19 + 1_000  # more than 2 MiB of fp32: three segments
_SMALL = 256
_WARM_UP = 5
_SPECIAL_ELEMENTS = 120
_REPEATED_PIECES = (250, 20_000)
_STAGGER_S = 0.001


class _Held(NamedTuple):
    """This rank's part of a result: elements ``start`` and following of the whole."""

    start: int
    values: Tensor


def _call(kind: str, tensor: Tensor, context: RankContext) -> _Held:
    """One sum over all ranks, by one of :data:`harness.oracles.order.SUMMING_KINDS`."""
    rank, world = context.rank, context.world
    if kind == "all_reduce":
        dist.all_reduce(tensor)
        return _Held(0, tensor)
    if kind == "reduce":
        dist.reduce(tensor, 0)
        return _Held(0, tensor if rank == 0 else tensor[:0])  # what other ranks hold is partial sums
    piece = tensor.numel() // world
    output = tensor.new_empty(piece)
    if kind == "reduce_scatter_list":
        dist.reduce_scatter(output, list(tensor.chunk(world)))
    else:
        _reduce_scatter()(output, tensor)
    return _Held(rank * piece, output)


def _reduce_scatter() -> Callable[[Tensor, Tensor], object]:
    """The form for one tensor, by the name that this torch does not warn of."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return cast(Callable[[Tensor, Tensor], object], getattr(dist, name))


# --- order of addition ------------------------------------------------------------------------------------------------


def measure_order(context: RankContext, task: MeasureOrder) -> OrderReport:
    """Every kind, dtype and length: reveal the trees, then add values that round."""
    calls = []
    shown: list[str] = []
    for kind, dtype, num_elements in order_calls(context.world):
        revealed, start = _reveal(context, kind, dtype, num_elements)
        held = revealed.labels.size
        if context.backend == "gloo":
            rule = order.gloo(kind, num_elements, context.world, dtype).slice(start, start + held)
        else:  # nothing is known before; what was revealed must at least explain other sums
            rule = trees.as_order(revealed, context.world)
        found = trees.score(revealed, rule)
        fixed = torch.from_numpy(trees.fixed(revealed))
        rows = _rows(context.world, num_elements, dtype, task.seed)
        summed = _call(kind, _to(context, rows[context.rank].copy(), dtype), context).values.cpu()
        mine = [row[start : start + held] for row in rows]
        wanted = torch.from_numpy(order.add(rule, mine, dtype)).to(_DTYPES[dtype])
        naive = torch.from_numpy(order.add(order.in_rank_order(context.world, held), mine, dtype)).to(_DTYPES[dtype])
        calls.append(
            CallReport(
                kind=kind,
                dtype=dtype,
                num_elements=num_elements,
                held=held,
                predicted=found.predicted,
                no_tree=found.no_tree,
                probes=len(probing.pairs(context.world)),
                sums_wrong=_differing(wanted[fixed], summed[fixed]),
                order_shows=_differing(wanted, naive),
            )
        )
        if f"{kind} {dtype}" == _SHOWN and num_elements == _SHOWN_PIECE * context.world:
            shown = trees.lines(revealed)
    shown_name = f"{_SHOWN} of {_SHOWN_PIECE * context.world} elements"
    return OrderReport(calls=tuple(calls), shown=shown_name, trees=tuple(shown))


def order_calls(world: int) -> Iterator[tuple[str, Rounding, int]]:
    """The calls looked at: kind, dtype, length of the whole."""
    for kind in order.SUMMING_KINDS:
        for dtype in _DTYPES:
            yield from ((kind, dtype, piece * world) for piece in _PIECES)
            if kind in ("all_reduce", "reduce"):
                yield from ((kind, dtype, piece * world + _ODD) for piece in (1, 250))
    yield "reduce_scatter", "fp32", _LONG_PIECE * world


def _reveal(context: RankContext, kind: str, dtype: Dtype, num_elements: int) -> tuple[trees.Revealed, int]:
    """The trees of the elements this rank holds, and where these start."""
    sums = {}
    start = 0
    for pair in probing.pairs(context.world):
        contribution = torch.full(
            (num_elements,),
            probing.probe(pair, context.rank),
            dtype=_DTYPES[cast(Rounding, dtype)],
            device=context.device,
        )
        start, values = _call(kind, contribution, context)
        sums[pair] = values.to(torch.float32).cpu().numpy()
    return trees.reveal(sums, context.world), start


def _rows(world: int, num_elements: int, dtype: Rounding, seed: int) -> list[NDArray[np.float32]]:
    """What every rank contributes: values of many magnitudes, whose sums round."""
    rows = []
    for rank in range(world):
        rng = np.random.Generator(np.random.Philox(key=[seed, rank]))
        row = np.ldexp(rng.standard_normal(num_elements, np.float32), rng.integers(-6, 6, num_elements, np.int32))
        rows.append(order.round_bf16(row) if dtype == "bf16" else row)
    return rows


def _to(context: RankContext, values: NDArray[np.floating], dtype: Rounding) -> Tensor:
    """On the rank's device."""
    return torch.from_numpy(values).to(device=context.device, dtype=_DTYPES[dtype])


def _differing(one: Tensor, other: Tensor) -> int:
    mismatch = compare_bits(one, other, signed_zeros=False).mismatch
    return 0 if mismatch is None else mismatch.count


# --- the rest ---------------------------------------------------------------------------------------------------------


def measure_latency(context: RankContext, task: MeasureLatency) -> LatencyReport:
    """Small all-reduces, one after the other."""
    tensor = torch.zeros(_SMALL, device=context.device)
    times = []
    for call in range(_WARM_UP + task.num_calls):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        if call >= _WARM_UP:
            times.append(time.perf_counter() - began)
    return LatencyReport(elements=_SMALL, median_ms=1e3 * statistics.median(times))


def measure_specials(context: RankContext) -> SpecialsReport:
    """The bits of a subnormal are an integer, of which the ranks' sum is known exactly; inf - inf is nan."""
    count = torch.arange(1, _SPECIAL_ELEMENTS + 1, dtype=torch.int32, device=context.device)
    # bf16 has seven bits below its normal range: the sum over ranks must fit them.
    short = (count % (2**7 // context.world)).to(torch.int16)
    wrong, nans = {}, {}
    for name, integers, dtype in (("fp32", count, torch.float32), ("bf16", short, torch.bfloat16)):
        total = integers.view(dtype).clone()
        dist.all_reduce(total)
        wrong[name] = int((total.view(integers.dtype) != integers * context.world).sum())
        infinity = float("inf") if context.rank else float("-inf")
        opposed = torch.full((_SPECIAL_ELEMENTS,), infinity, dtype=dtype, device=context.device)
        dist.all_reduce(opposed)
        digits = 2 * integers.element_size()
        bits = int(opposed[0].view(integers.dtype)) % 16**digits
        nans[name] = f"0x{bits:0{digits}x}" if bool(opposed.isnan().all()) else f"{float(opposed[0])}, no nan"
    return SpecialsReport(elements=_SPECIAL_ELEMENTS, wrong=wrong, nans=nans)


def measure_average(context: RankContext, task: MeasureAverage) -> AverageReport:
    """AVG against the backend's own sum, divided or scaled."""
    world = context.world
    divided: dict[str, int] = {}
    multiplied: dict[str, int] = {}
    before: dict[str, int] = {}
    distinct: dict[str, int] = {}
    for name in _DTYPES:
        own = _to(context, _rows(world, task.num_elements, name, task.seed)[context.rank], name)
        average, total, scaled = own.clone(), own.clone(), own / world
        try:
            dist.all_reduce(average, dist.ReduceOp.AVG)
        except (RuntimeError, ValueError) as error:  # refused before anything is sent, on all ranks alike
            return AverageReport(error=one_line(exception_text(error)))
        dist.all_reduce(total)
        dist.all_reduce(scaled)
        divided[name] = _differing(total / world, average)
        multiplied[name] = _differing(total * (1.0 / world), average)
        before[name] = _differing(scaled, average)
        distinct[name] = _differing(total / world, scaled)
    return AverageReport(
        elements=task.num_elements, divided=divided, multiplied=multiplied, scaled_before=before, distinct=distinct
    )


def measure_repeats(context: RankContext, task: MeasureRepeats) -> RepeatsReport:
    """Each time another rank comes late, which must not matter."""
    collectives = {}
    for kind in ("all_reduce", "reduce_scatter"):
        for name in _DTYPES:
            for piece in _REPEATED_PIECES:
                length = piece * context.world
                own = _to(context, _rows(context.world, length, name, task.seed)[context.rank], name)
                seen = []
                for repeat in range(task.num_repeats):
                    if repeat % context.world == context.rank:
                        time.sleep(_STAGGER_S)
                    seen.append(digest([_call(kind, own.clone(), context).values]))
                collectives[f"{kind} {name} of {length}"] = tuple(sorted(set(seen)))
    passes: dict[str, tuple[str, ...]] = {name: _passes(context, name, task) for name in _DTYPES}
    return RepeatsReport(repeats=task.num_repeats, collectives=collectives, passes=passes)


def _passes(context: RankContext, dtype: Rounding, task: MeasureRepeats) -> tuple[str, ...]:
    """Digests of the gradients of a small network on the same data, which is the same on every rank of every world."""
    rng = np.random.Generator(np.random.Philox(key=[task.seed, 2**32]))
    inputs, hidden, outputs = 96, 131, 67
    sizes = ((hidden, inputs), (hidden,), (outputs, hidden))
    drawn = [_to(context, rng.standard_normal(size, np.float32) / 8, dtype) for size in sizes]
    batch = _to(context, rng.standard_normal((48, inputs), np.float32), dtype)
    seen = set()
    for _ in range(task.num_repeats):
        first, bias, second = (weight.clone().requires_grad_() for weight in drawn)
        activations = torch.nn.functional.layer_norm(torch.nn.functional.linear(batch, first, bias), (hidden,))
        result = torch.nn.functional.linear(torch.nn.functional.gelu(activations), second).softmax(-1)
        gradients = torch.autograd.grad(result.square().sum(), [first, bias, second])
        seen.add(digest([result, *gradients]))
    return tuple(sorted(seen))


def measure_strided(context: RankContext) -> StridedReport:
    """Views that are not contiguous; the transposed one at least covers its tensor without gaps."""
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "every second column": lambda base: base[:, ::2],
        "half of each row": lambda base: base[:, :10],
        "transposed": lambda base: base.t(),
    }
    return StridedReport(views={name: _view(context, view) for name, view in layouts.items()})


def _view(context: RankContext, view_of: Callable[[Tensor], Tensor]) -> ViewReport:
    """All-reduce a view of a matrix of which rank r holds r + 1 times what rank 0 holds."""
    numbers = torch.arange(12 * 20, dtype=torch.float32, device=context.device).reshape(12, 20)
    base = numbers * (context.rank + 1)
    wanted = view_of(numbers) * (context.world * (context.world + 1) // 2)
    inside = torch.zeros_like(base, dtype=torch.bool)
    view_of(inside).fill_(True)
    try:
        dist.all_reduce(view_of(base))
    except (RuntimeError, ValueError) as error:  # a refusal is the best that could happen
        return ViewReport(error=one_line(exception_text(error)))
    return ViewReport(
        elements=wanted.numel(),
        wrong=int((view_of(base) != wanted).sum()),
        outside=int((~inside).sum()),
        changed=int(((base != numbers * (context.rank + 1)) & ~inside).sum()),
    )
