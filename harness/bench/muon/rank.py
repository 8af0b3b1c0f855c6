"""What a rank of a bench of Muon runs: some steps of one system, timed, and nothing beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.bench.muon.messages import RunSystem, SystemReport, Trained, decode_task, encode
from harness.drive.memory import LiveMemory
from harness.launch.rank import RankContext
from harness.oracles.compare import digest
from zero2core.muon import MuonAdamW, MuonParamInfo, MuonShardingConfig, MuonShardingOptimizer
from zero2core.muon.ownership import lower_bound, newton_schulz_cost

_CHUNK = 2**26  # elements: 256 MiB of fp32, as much as a fused buffer has
_LARGEST = 255  # gradients are whole multiples of 2**-12 up to this many: their sums are exact, in any order
_UNIT = 2.0**-12

Named = Mapping[str, nn.Parameter]

# The first optimizer of a process makes torch import its compiler, a second of work and 90 MB. This module is imported
# before ranks are forked: done here, it is done once.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used."""

    def answer(message: bytes) -> bytes:
        with context.collectives.paused():  # nobody reads the log of these
            return encode(run(context, decode_task(message)))

    return answer


class _System(Protocol):
    """What is measured."""

    def step(self) -> None:
        """From gradients in ``.grad`` to new weights on every rank, and no gradients."""

    def owned(self) -> set[str]:
        """Names of the parameters of which this rank holds a part."""


class _Unsharded:
    """What a data-parallel trainer without sharding does: gradients averaged in fp32, every rank updates everything."""

    def __init__(self, named: Named, info: Mapping[str, MuonParamInfo], world: int) -> None:
        self._named, self._world = named, world
        self._inner = MuonAdamW(named.items(), info)
        self._gradient = torch.zeros(sum(param.numel() for param in named.values()) if world > 1 else 0)
        if world > 1:
            pieces = torch.split(self._gradient, [param.numel() for param in named.values()])
            for param, piece in zip(named.values(), pieces, strict=True):
                param.main_grad = piece.view(param.shape)  # type: ignore[attr-defined]

    def step(self) -> None:
        if self._world > 1:
            for param in self._named.values():
                param.main_grad.copy_(param.grad)  # type: ignore[attr-defined]
                param.grad = None
            for chunk in torch.split(self._gradient, _CHUNK):
                dist.all_reduce(chunk)
            self._gradient.div_(self._world)
        self._inner.step()
        for param in self._named.values():
            param.grad = None

    def owned(self) -> set[str]:
        return set(self._named)


class _Sharded:
    """MuonShardingOptimizer with one of its owner rules."""

    def __init__(self, named: Named, info: Mapping[str, MuonParamInfo], config: MuonShardingConfig) -> None:
        self._optimizer = MuonShardingOptimizer(MuonAdamW(named.items(), info, defer_state=True), config=config)

    def step(self) -> None:
        self._optimizer.reduce_gradients()
        self._optimizer.step()
        self._optimizer.clear_grad()

    def owned(self) -> set[str]:
        return {shard.name for shard in self._optimizer.local_shards()}


def run(context: RankContext, task: RunSystem) -> SystemReport:
    """Build the system, make the steps; collective."""
    before = _status("VmRSS")
    memory = LiveMemory()
    named = _weights(task)
    system = _build(task, named, context.world)
    costs = {item.name: newton_schulz_cost(item.shape) for item in task.parameters if item.muon}
    seconds, cpu_seconds, sent = [], [], []
    signal = torch.zeros(1)
    for step in range(task.steps):
        _fill_gradients(named, task.seed, step, context.rank)
        dist.all_reduce(signal)  # from here on no rank waits for another's gradients
        written, cpu, began = _written(), time.process_time(), time.perf_counter()
        system.step()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu)
        dist.all_reduce(signal)  # what is still being sent is counted too, with a few bytes of this
        sent.append(None if written is None else (_written() or 0) - written)
    owned = system.owned()
    peak = _status("VmHWM")
    counted = [count for count in sent[1:] if count is not None]
    return SystemReport(
        seconds=tuple(seconds[1:]),
        cpu_seconds=tuple(cpu_seconds[1:]),
        sent=tuple(counted) if len(counted) == task.steps - 1 else None,
        kept=memory.since([signal]),
        peak=None if peak is None or before is None else peak - before,
        cost=sum(cost for name, cost in costs.items() if name in owned),
        elements=sum(named[name].numel() for name in costs if name in owned),
        lower_bound=lower_bound(list(costs.values()), context.world),
        digest=digest([param.detach() for param in named.values()]),
    )


def _build(task: RunSystem, named: Named, world: int) -> _System:
    info = {item.name: MuonParamInfo(use_muon=item.muon) for item in task.parameters}
    if task.system == "unsharded":
        return _Unsharded(named, info, world)
    return _Sharded(named, info, MuonShardingConfig(owner_rule=task.system))


def _weights(task: RunSystem) -> dict[str, nn.Parameter]:
    """The same on every rank and for every system."""
    generator = torch.Generator().manual_seed(task.seed)
    return {item.name: nn.Parameter(_drawn(item, generator)) for item in task.parameters}


def _drawn(item: Trained, generator: torch.Generator) -> Tensor:
    return torch.empty(item.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)


def _fill_gradients(named: Named, seed: int, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed((seed + 2**32 * (1 + step) + 2**48 * rank) % 2**63)
    for param in named.values():
        drawn = torch.randint(-_LARGEST, _LARGEST + 1, param.shape, dtype=torch.int16, generator=generator)
        param.grad = drawn.to(torch.bfloat16).mul_(_UNIT)


def _status(field: str) -> int | None:
    """A size from this process's status, in bytes."""
    return _number("/proc/self/status", field, 1024)


def _written() -> int | None:
    """Bytes that this process has written: on gloo those it sent, which no other call of a step adds to."""
    return _number("/proc/self/io", "wchar", 1)


def _number(path: str, field: str, unit: int) -> int | None:
    """A number of the kernel's; None where it does not say it."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * unit if found else None
