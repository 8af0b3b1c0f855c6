"""What test_sim_as_gloo.py runs on gloo's ranks and in a simulated world: random programs of collectives, by seed.

A program is a list of steps, the same for all ranks. No rank waits for another in a way that the order of launches does
not allow on a real backend: all launch in the order of the program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.renamed import all_gather_single, reduce_scatter_single

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")}


@dataclass
class Step:
    """One collective. ``group``: -1 is the default one. ``root``: by rank of the group."""

    kind: str
    group: int
    dtype: torch.dtype
    length: int
    op: str
    root: int
    asynchronous: bool
    number: int
    splits: list[list[int]] = field(default_factory=list)


@dataclass
class Program:
    """Sub-groups by their ranks, and steps."""

    groups: list[list[int]]
    steps: list[Step]
    seed: int


def draw(seed: int, world: int, num_steps: int) -> Program:
    """The program of a seed."""
    rng = random.Random(f"program {seed} {world}")
    groups = [sorted(rng.sample(range(world), rng.randint(1, world))) for _ in range(rng.randint(1, 3))]
    steps = []
    for number in range(num_steps):
        group = rng.randrange(-1, len(groups))
        size = world if group < 0 else len(groups[group])
        kind = rng.choice(sorted(KINDS))
        dtype = rng.choice(FLOATS if rng.random() < 0.7 else INTEGERS)
        op = rng.choice(sorted(OPS)) if rng.random() < 0.5 else "SUM"
        step = Step(
            kind=kind,
            group=group,
            dtype=dtype,
            length=rng.choice([0, 1, 2, 3, 5, 8, 13, 40, 333, 2500]),
            op="SUM" if op == "AVG" and dtype in INTEGERS else op,
            root=rng.randrange(size),
            asynchronous=rng.random() < 0.6,
            number=number,
        )
        if kind == "all_to_all_uneven":
            step.splits = [[rng.randrange(6) for _ in range(size)] for _ in range(size)]
        steps.append(step)
    return Program(groups, steps, seed)


class Run:
    """A program on one rank. ``results``: by step, in order, what it left on this rank and may be compared."""

    def __init__(self, program: Program, rank: int) -> None:
        self.results: list[tuple[str, Tensor]] = []
        self._program = program
        self._rank = rank
        self._rng = random.Random(f"waits {program.seed} {rank}")
        self._groups = [dist.new_group(members) for members in program.groups]
        self._pending: list[tuple[Any, str, list[Tensor]]] = []

    def run(self) -> list[tuple[str, Tensor]]:
        for step in self._program.steps:
            members = self._program.groups[step.group] if step.group >= 0 else list(range(dist.get_world_size()))
            if self._rank not in members:
                continue
            group = self._groups[step.group] if step.group >= 0 else dist.group.WORLD
            name = f"step {step.number}: {step.kind} {step.dtype} {step.length} {step.op} on {members}"
            work, results = KINDS[step.kind](self, step, group, len(members), members.index(self._rank))
            if work is None:
                self._keep(name, results)
            else:
                self._pending.append((work, name, results))
            if self._rng.random() < 0.3:
                self._wait()
        self._wait()
        return sorted(self.results, key=lambda result: result[0])

    def data(self, step: Step, length: int | None = None, salt: int = 0) -> Tensor:
        """This rank's contribution: floats that round, integers that may wrap around."""
        generator = torch.Generator().manual_seed(hash((self._program.seed, step.number, self._rank, salt)) % 2**31)
        length = step.length if length is None else length
        if step.dtype.is_floating_point:
            return torch.randn(length, generator=generator, dtype=torch.float64).to(step.dtype)
        return torch.randint(-100, 100, (length,), generator=generator).to(step.dtype)

    def _keep(self, name: str, results: list[Tensor]) -> None:
        self.results += [(f"{name}, {number}", tensor.clone()) for number, tensor in enumerate(results)]

    def _wait(self) -> None:
        self._rng.shuffle(self._pending)
        for work, name, results in self._pending:
            work.wait()
            self._keep(name, results)
        self._pending.clear()


Launched = tuple[Any, list[Tensor]]


def _all_reduce(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    tensor = run.data(step)
    return dist.all_reduce(tensor, OPS[step.op], group, step.asynchronous), [tensor]


def _reduce(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    tensor = run.data(step)
    work = dist.reduce(tensor, op=OPS[step.op], group=group, async_op=step.asynchronous, group_dst=step.root)
    return work, [tensor] if index == step.root else []


def _broadcast(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    tensor = run.data(step)
    return dist.broadcast(tensor, group=group, async_op=step.asynchronous, group_src=step.root), [tensor]


def _all_gather(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    pieces = [torch.empty(step.length, dtype=step.dtype) for _ in range(size)]
    return dist.all_gather(pieces, run.data(step), group, step.asynchronous), pieces


def _all_gather_single(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    whole = torch.empty(step.length * size, dtype=step.dtype)
    return all_gather_single(whole, run.data(step), group, step.asynchronous), [whole]


def _reduce_scatter_single(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    piece, whole = torch.empty(step.length, dtype=step.dtype), run.data(step, step.length * size)
    return reduce_scatter_single(piece, whole, OPS[step.op], group, step.asynchronous), [piece]


def _reduce_scatter(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    piece = torch.empty(step.length, dtype=step.dtype)
    pieces = [run.data(step, salt=other) for other in range(size)]
    return dist.reduce_scatter(piece, pieces, OPS[step.op], group, step.asynchronous), [piece]


def _all_to_all_single(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    output, source = torch.empty(step.length * size, dtype=step.dtype), run.data(step, step.length * size)
    return dist.all_to_all_single(output, source, group=group, async_op=step.asynchronous), [output]


def _all_to_all_uneven(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    sent, received = step.splits[index], [of[index] for of in step.splits]
    source = run.data(step, sum(sent) * 3).reshape(-1, 3)
    output = torch.empty(sum(received), 3, dtype=step.dtype)
    return dist.all_to_all_single(output, source, received, sent, group, step.asynchronous), [output]


def _all_to_all(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    outputs = [torch.empty(step.length, dtype=step.dtype) for _ in range(size)]
    sources = [run.data(step, salt=other) for other in range(size)]
    return dist.all_to_all(outputs, sources, group, step.asynchronous), outputs


def _gather(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    pieces = [torch.empty(step.length, dtype=step.dtype) for _ in range(size)] if index == step.root else None
    work = dist.gather(run.data(step), pieces, group=group, async_op=step.asynchronous, group_dst=step.root)
    return work, pieces or []


def _scatter(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    own = torch.empty(step.length, dtype=step.dtype)
    pieces = [run.data(step, salt=other) for other in range(size)] if index == step.root else None
    return dist.scatter(own, pieces, group=group, async_op=step.asynchronous, group_src=step.root), [own]


def _barrier(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    return dist.barrier(group, step.asynchronous), []


def _ring(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    """Each rank sends to the next of the group, with a tag; a group of one has nobody to send to."""
    if size == 1:
        return None, []
    received = torch.empty(step.length, dtype=step.dtype)
    sent = dist.isend(run.data(step), group=group, tag=step.number, group_dst=(index + 1) % size)
    works = [sent, dist.irecv(received, group=group, tag=step.number, group_src=(index - 1) % size)]
    return _All(works if step.number % 2 else works[::-1]), [received]


def _batch(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    others = [other for other in range(size) if other != index]
    received = [torch.empty(step.length, dtype=step.dtype) for _ in others]
    operations = [
        *(dist.P2POp(dist.isend, run.data(step, salt=other), group=group, group_peer=other) for other in others),
        *(
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=other)
            for tensor, other in zip(received, others, strict=True)
        ),
    ]
    return _All(dist.batch_isend_irecv(operations) if operations else []), received


def _objects(run: Run, step: Step, group: Any, size: int, index: int) -> Launched:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, run.data(step, min(step.length, 9)).tolist(), group=group)
    return None, [torch.tensor(each, dtype=torch.float64) for each in everyone]


class _All:
    """Waits for several."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


KINDS: dict[str, Callable[[Run, Step, Any, int, int], Launched]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_all_reduce, _reduce, _broadcast, _all_gather, _all_gather_single, _reduce_scatter_single, _reduce_scatter),
        *(_all_to_all_single, _all_to_all_uneven, _all_to_all, _gather, _scatter, _barrier, _ring, _batch, _objects),
    )
}
