"""What one collective means: whether all ranks mean the same, and what each of them gets. Tensors in, tensors out.

The rules are gloo's, measured with torch 2.13 (``tests/ranks`` holds each against real gloo).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.sim.choices import SumOrder
from harness.sim.summation import reduce

Results = list[list[Tensor | None]]
"""By rank of the group, what goes into each of its outputs; None: nothing that means anything (it gets nan)."""

# Those that gloo's collectives take that do not reduce; for those that do, see `supported`. Messages take all.
_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_ROOTED = frozenset({"gather", "broadcast", "scatter", "reduce"})
_SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(eq=False)
class Request:
    """One rank's part of one collective.

    Attributes:
        kind: As in :data:`PERFORM`.
        inputs: What it contributes.
        outputs: Where the results belong.
        op: Of those that reduce.
        root: By its rank in the group, of those that have one.
        splits: Elements for, and from, each rank: of an all-to-all.
        agree: What must be the same on all ranks besides the kind and what :meth:`text` says.
        asynchronous: The caller goes on before it waits.
        in_place: An output is an input as a whole.
    """

    kind: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    op: Any = None
    root: int | None = None
    splits: tuple[list[int], list[int]] | None = None
    agree: tuple[object, ...] = ()
    asynchronous: bool = False
    in_place: bool = False

    def text(self) -> str:
        """``all_reduce fp32[4] with MAX``."""
        tensors = self.inputs or self.outputs
        words = [self.kind]
        if tensors and self.kind != "barrier":
            sizes = "+".join(str(tensor.numel()) for tensor in tensors[:3]) + ("+…" if len(tensors) > 3 else "")
            if len({tensor.numel() for tensor in tensors}) == 1 and len(tensors) > 1:
                sizes = f"{len(tensors)} x {tensors[0].numel()}"
            words.append(f"{dtype_name(tensors[0].dtype)}[{sizes}]")
        name = op_name(self.op)
        if name not in ("", "SUM"):
            words.append(f"with {name}")
        if self.root is not None:
            words.append(f"root {self.root}")
        words += [str(part) for part in self.agree]
        return " ".join(words)

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        tensors = self.inputs or self.outputs
        if len(self.inputs) == 1 and self.kind not in _ROOTED and self.splits is None:
            return self.kind, self.inputs[0].dtype, self.inputs[0].numel(), op_key(self.op), self.agree
        lengths: tuple[int, ...] = tuple(tensor.numel() for tensor in tensors)
        if self.splits is not None:
            lengths = ()
        elif self.kind in _ROOTED:
            lengths = (min(tensor.numel() for tensor in (*self.inputs, *self.outputs)),)
        dtypes = frozenset(tensor.dtype for tensor in tensors)
        return self.kind, dtypes, lengths, op_key(self.op), self.root, self.agree


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def op_name(op: Any) -> str:  # noqa: ANN401 (torch's ReduceOp has two forms)
    """``SUM``; empty where there is none."""
    return "" if op is None else _NAMES[op if isinstance(op, dist.ReduceOp.RedOpType) else op.op]


def op_key(op: Any) -> object:  # noqa: ANN401
    """Equal for equal operations."""
    name = op_name(op)
    return (name, float(op.__getstate__()[1])) if name == "PREMUL_SUM" else name


_NAMES: dict[object, str] = {value: name for name, value in dist.ReduceOp.RedOpType.__members__.items()}


def refusal(request: Request) -> str | None:
    """Why gloo would not do this, as a sentence; None when it would."""
    for tensor in (*request.inputs, *request.outputs):
        if request.op is None and tensor.dtype not in _DTYPES:
            return f"{request.kind} of {tensor.dtype}: gloo's collectives do not take this type"
    if request.kind in ("all_reduce", "reduce", "broadcast"):
        for tensor in (*request.inputs, *request.outputs):
            if not tensor.is_contiguous():
                return (
                    f"{request.kind} of a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}: gloo "
                    "would take the first elements of its storage instead; communicate tensor.contiguous()"
                )
    return None


def disagreement(requests: Sequence[Request | None], ranks: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """What the ranks of a group do not agree on, and who differs from most; None when all is well.

    Args:
        requests: By rank of the group; None of a rank that has not called anything.
        ranks: The global rank of each.
    """
    present = [(rank, request) for rank, request in zip(ranks, requests, strict=True) if request is not None]
    if len(present) == len(ranks):
        first = present[0][1].signature
        if all(request.signature == first for _, request in present[1:]):
            return _splits_problem(present)
    counts = Counter(request.signature for _, request in present)
    if len(counts) <= 1:
        return _splits_problem(present) if len(present) == len(ranks) else None
    (usual, most), *others = counts.most_common()
    differing = tuple(rank for rank, request in present if request.signature != usual)
    by_text: dict[str, list[int]] = {}
    for rank, request in present:
        by_text.setdefault(request.text(), []).append(rank)
    parts = [f"{_ranks(members)} {_call(members)} {text}" for text, members in by_text.items()]
    tie = most == others[0][1]
    return f"the ranks call different collectives: {', '.join(parts)}", () if tie else differing


def _splits_problem(present: Sequence[tuple[int, Request]]) -> tuple[str, tuple[int, ...]] | None:
    if not present or present[0][1].splits is None:
        return None
    for sender, (one, sent) in enumerate(present):
        for receiver, (other, received) in enumerate(present):
            if sent.splits is None or received.splits is None:
                continue
            if sent.splits[0][receiver] != received.splits[1][sender]:
                text = (
                    f"the ranks' splits do not fit: rank {one} sends {sent.splits[0][receiver]} elements to rank "
                    f"{other}, which expects {received.splits[1][sender]}"
                )
                return text, ()
    return None


def _ranks(members: Sequence[int]) -> str:
    listed = ", ".join(map(str, members))
    return f"{'rank' if len(members) == 1 else 'ranks'} {listed}"


def _call(members: Sequence[int]) -> str:
    return "calls" if len(members) == 1 else "call"


# --- what each rank gets ----------------------------------------------------------------------------------------------


def perform(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    """The results for every rank of the group, in new memory.

    Args:
        requests: Of all ranks, which agree.
        inputs: What each contributes: the tensors of its request, or copies.
        order: Of sums.
        seed: Of random orders.
    """
    return PERFORM[requests[0].kind](requests, inputs, order, seed)


def _everyone(requests: Sequence[Request], results: list[Tensor | None]) -> Results:
    return [list(results) for _ in requests]


def _all_reduce(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    return _everyone(requests, [reduce("all_reduce", _flat(inputs), requests[0].op, order, seed)])


def _all_reduce_coalesced(
    requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int
) -> Results:
    # gloo puts the tensors end to end and reduces that.
    total = reduce(
        "all_reduce",
        [torch.cat([tensor.reshape(-1) for tensor in own]) for own in inputs],
        requests[0].op,
        order,
        seed,
    )
    return _everyone(requests, list(torch.split(total, [tensor.numel() for tensor in inputs[0]])))


def _reduce(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    total = reduce("reduce", _flat(inputs), requests[0].op, order, seed)
    # What the others are left with are partial sums on gloo.
    return [[total if rank == request.root else None] for rank, request in enumerate(requests)]


def _broadcast(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    root = requests[0].root or 0
    sent = [tensor.clone() for tensor in inputs[root]]
    return [[] if rank == root else list(sent) for rank in range(len(requests))]


def _all_gather(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    """Into one tensor, or into one for each rank: ranks may do this one way or the other."""
    whole = torch.cat(_flat(inputs))
    return [[whole] if len(request.outputs) == 1 else list(whole.chunk(len(requests))) for request in requests]


def _all_gather_coalesced(
    requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int
) -> Results:
    """Of several tensors: rank by rank."""
    return _everyone(requests, [tensor.clone() for own in inputs for tensor in own])


def _all_gather_single_coalesced(
    requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int
) -> Results:
    """Of several tensors: one after the other."""
    columns = zip(*inputs, strict=True)
    return _everyone(requests, [torch.cat([tensor.reshape(-1) for tensor in column]) for column in columns])


def _reduce_scatter(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    world = len(requests)
    totals = [
        reduce("reduce_scatter", [tensor.reshape(-1) for tensor in column], requests[0].op, order, seed)
        for column in zip(*inputs, strict=True)
    ]
    return [
        [total[rank * (total.numel() // world) :][: total.numel() // world] for total in totals]
        for rank in range(world)
    ]


def _reduce_scatter_list(
    requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int
) -> Results:
    if len({tensor.numel() for tensor in inputs[0]}) == 1:
        joined = [torch.cat([tensor.reshape(-1) for tensor in own]) for own in inputs]
        total = reduce("reduce_scatter_list", joined, requests[0].op, order, seed)
        return [[piece] for piece in total.chunk(len(requests))] if total.numel() else [[total] for _ in requests]
    columns = zip(*inputs, strict=True)
    return [
        [reduce("all_reduce", [tensor.reshape(-1) for tensor in column], requests[0].op, order, seed)]
        for column in columns
    ]


def _all_to_all_single(
    requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int
) -> Results:
    pieces = [
        torch.split(own[0].reshape(-1), request.splits[0]) if request.splits is not None else ()
        for own, request in zip(inputs, requests, strict=True)
    ]
    return [[torch.cat([sent[rank] for sent in pieces])] for rank in range(len(requests))]


def _all_to_all(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    return [[own[rank].clone() for own in inputs] for rank in range(len(requests))]


def _gather(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    return [[own[0].clone() for own in inputs] if rank == request.root else [] for rank, request in enumerate(requests)]


def _scatter(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    sent = inputs[requests[0].root or 0]
    return [[sent[rank].clone()] for rank in range(len(requests))]


def _nothing(requests: Sequence[Request], inputs: Sequence[list[Tensor]], order: SumOrder, seed: int) -> Results:
    return [[] for _ in requests]


def _flat(inputs: Sequence[list[Tensor]]) -> list[Tensor]:
    return [own[0].reshape(-1) for own in inputs]


PERFORM: dict[str, Callable[[Sequence[Request], Sequence[list[Tensor]], SumOrder, int], Results]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_coalesced": _reduce_scatter,
    "reduce_scatter_list": _reduce_scatter_list,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _nothing,
    "new_group": _nothing,
}
