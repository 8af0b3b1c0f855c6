"""What the sharded Muon optimizer communicates and when, on simulated ranks: every collective is recorded."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.muon_training import (
    INFO,
    SHAPES,
    Call,
    Recorder,
    Setup,
    Trainer,
    Unsharded,
    elements,
    recorded,
    require,
    simulate,
    values,
)
from zero2core import MuonAdamW, MuonParamInfo, MuonShardingConfig, MuonShardingOptimizer

MATRICES = {name: shape for name, shape in SHAPES.items() if INFO[name].use_muon}
REST = {name: shape for name, shape in SHAPES.items() if not INFO[name].use_muon}
PAIRS = {"experts": ("expert", [(0, 1), (2, 3)]), "bias": ("expert", [(0, 1), (2, 3)])}
REDUCES = ("reduce", "reduce_scatter_tensor", "reduce_scatter_single")
ALIGN = 16
"""Elements of fp32 in the 64 bytes at whose multiples a parameter begins."""
GATHERS = ("broadcast", "all_gather_into_tensor", "all_gather_single")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls() -> Iterator[Recorder]:
    with recorded() as recorder:
        yield recorder


def numel(name: str) -> int:
    return math.prod(SHAPES[name])


def one_step(calls: Recorder, setup: Setup) -> Callable[[int], dict[str, Any]]:
    """Each rank's calls while constructing, reducing and stepping, and what it owns."""

    def ranks(rank: int) -> dict[str, Any]:
        trainer = Trainer(rank, setup)
        calls.clear()
        trainer.accumulate(0)
        trainer.opt.reduce_gradients()
        reduced = list(calls.mine)
        calls.clear()
        trainer.opt.step()
        stepped = list(calls.mine)
        return {
            "reduce": reduced,
            "step": stepped,
            "owned": [shard.name for shard in trainer.opt.local_shards() if INFO[shard.name].use_muon],
        }

    return ranks


def of(kinds: tuple[str, ...], issued: list[Call]) -> list[Call]:
    return [call for call in issued if call.kind in kinds]


def test_matrices_that_are_not_fused_are_reduced_to_their_owners_one_by_one(calls: Recorder) -> None:
    replies = simulate(4, one_step(calls, Setup(config={"comm_buffer_size_mb": 0})))
    owner = {name: rank for rank, reply in enumerate(replies) for name in reply["owned"]}

    assert set(owner) == set(MATRICES)
    assert len(set(owner.values())) == 4
    for reply in replies:
        reduces = of(("reduce",), reply["reduce"])
        assert sorted((call.numel, call.root) for call in reduces) == sorted(
            (numel(name), rank) for name, rank in owner.items()
        )
        broadcasts = of(("broadcast",), reply["step"])
        assert sorted((call.numel, call.root) for call in broadcasts) == sorted(
            (numel(name), rank) for name, rank in owner.items()
        )


@pytest.mark.parametrize("size", [1, 100, 180, 250, 10_000])
@pytest.mark.parametrize("world", [2, 3])
def test_fused_buffers_are_cut_by_size(calls: Recorder, size: int, world: int) -> None:
    replies = simulate(world, one_step(calls, Setup(config={"comm_buffer_size_mb": elements(size)})))

    for reply in replies:
        reduces = of(("reduce",), reply["reduce"])
        assert 0 <= sum(call.numel for call in reduces) - sum(map(numel, MATRICES)) < ALIGN * len(MATRICES)
        assert all(call.numel <= size or call.numel in map(numel, MATRICES) for call in reduces)
        roots = [call.root for call in reduces]
        if size == 10_000:  # one buffer an owner
            assert len(roots) == len(set(roots)) == world
        scatters = of(REDUCES[1:], reply["reduce"])
        sources = [call.numel for call in of(GATHERS[1:], reply["step"])]
        assert len(scatters) == len(sources)
        assert all(scatter.numel * world <= max(size, max(map(numel, REST))) + world - 1 for scatter in scatters)
        if size == 10_000:
            assert len(scatters) == 1


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_the_rest_is_padded_as_a_whole(calls: Recorder, world: int) -> None:
    shapes = {f"bias{index}": (1,) for index in range(5)} | {"norm": (7,)}
    info = {name: MuonParamInfo() for name in shapes}

    def ranks(rank: int) -> list[int]:
        trainer = Trainer(rank, Setup(shapes, info=info))
        calls.clear()
        trainer.accumulate(0)
        trainer.opt.reduce_gradients()
        return [call.numel for call in calls.mine if call.kind in REDUCES]

    for lengths in simulate(world, ranks):  # of the output, a rank's piece
        assert len(lengths) == 1
        assert lengths[0] * world < ALIGN * len(shapes) + world


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({}, {"AVG"}),
        ({"use_reduce_avg": False}, {"SUM"}),
        ({"color_divisors": {-1: 3}}, {"SUM"}),
        ({"color_divisors": {-1: 4}}, {"AVG"}),
        ({"two_hop": True, "local_world_size": 2}, {"SUM"}),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_one_averaging_rule_for_all_buffers(calls: Recorder, config: Any, ops: set[str], overlap: bool) -> None:
    for reply in simulate(4, one_step(calls, Setup(config=config | {"comm_overlap": overlap}))):
        reduces = of(REDUCES, reply["reduce"])
        assert {call.kind for call in reduces} >= {"reduce"}
        # With overlap what comes late is added to a sum: the backend's mean would be divided twice.
        expected = {"SUM"} if overlap else ops
        assert {call.op.rpartition(".")[2].strip("<>: 01234") for call in reduces} == expected


@pytest.mark.parametrize("config", [{}, {"comm_buffer_size_mb": 0}, {"two_hop": True, "local_world_size": 2}])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("colors", [{}, PAIRS | {"wide": ("w", [(0, 3)]), "norm": ("w", [(0, 3)])}])
def test_all_ranks_issue_collectives_in_one_order(calls: Recorder, config: Any, overlap: bool, colors: Any) -> None:
    setup = Setup(config=config | {"comm_overlap": overlap}, colors=colors)

    def ranks(rank: int) -> list[Call]:
        trainer = Trainer(rank, setup)
        calls.clear()
        for _ in range(2):
            # Gradients come in another order on each rank, and on one of them none of "tall".
            names = [name for name in SHAPES if (rank, name) != (2, "tall")]
            for name in sorted(names, key=lambda name: (len(name) * (rank + 3)) % 7):
                (trainer.params[name] * values(SHAPES[name], rank)).sum().backward()
            trainer.opt.reduce_gradients()
            trainer.opt.step()
        return calls.mine

    issued = simulate(4, ranks)
    assert all(rank in call.ranks for rank, mine in enumerate(issued) for call in mine)
    num_shared = 0
    for first, second in itertools.combinations(range(4), 2):
        sequences = [[call for call in issued[rank] if {first, second} <= set(call.ranks)] for rank in (first, second)]
        num_shared += len(sequences[0])
        assert sequences[0] == sequences[1]
    assert num_shared > 50


def test_a_rank_outside_a_group_issues_nothing_there(calls: Recorder) -> None:
    colors = {"experts": ("e", [(1, 2)]), "norm": ("e", [(1, 2)])}

    def ranks(rank: int) -> tuple[int, list[str]]:
        trainer = Trainer(rank, Setup(colors=colors))
        calls.clear()
        trainer.step(0)
        owned = [shard.name for shard in trainer.opt.local_shards()]
        return sum(call.ranks == (1, 2) for call in calls.mine), owned

    replies = simulate(3, ranks)
    assert [count for count, _ in replies] == [0, 4, 4]
    assert not {"experts", "norm"} & set(replies[0][1])


# Overlap


class Chain(nn.Module):
    """A chain of linear layers: in backward the last layer's gradients come first."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        for index, param in enumerate(self.parameters()):
            param.data = values(param.shape, index) / 16

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def optimizer(self, **config: Any) -> MuonShardingOptimizer:
        info = {name: MuonParamInfo(use_muon=param.dim() == 2) for name, param in self.named_parameters()}
        inner = MuonAdamW(self.named_parameters(), info, lr=0.125)
        return MuonShardingOptimizer(inner, config=MuonShardingConfig(**config))


def backward_of(model: Chain, calls: Recorder, rank: int) -> tuple[int, int]:
    """Reduces before the first layer's gradient, and in the whole backward."""
    calls.clear()
    handle = model.layers[0].weight.register_hook(lambda _: calls.mark("first layer"))
    calls.mark("start")
    model(values((3, 4), rank)).sum().backward()
    handle.remove()
    before = calls.mine[: calls.mine.index("first layer")]
    reduces = [
        [item for item in items if isinstance(item, Call) and item.kind in REDUCES] for items in (before, calls.mine)
    ]
    return len(reduces[0]), len(reduces[1])


@pytest.mark.parametrize("size", [0, elements(17)])
def test_with_overlap_collectives_start_inside_backward(calls: Recorder, size: float) -> None:
    def ranks(rank: int) -> tuple[tuple[int, int], int]:
        model = Chain()
        opt = model.optimizer(comm_overlap=True, comm_buffer_size_mb=size)
        started = backward_of(model, calls, rank)
        opt.reduce_gradients()
        return started, sum(isinstance(item, Call) and item.kind in REDUCES for item in calls.mine)

    for (before, inside), total in simulate(2, ranks):
        assert total >= 5  # four matrices, and biases
        assert before >= 1
        assert inside == total


@pytest.mark.parametrize(
    ("config", "parts", "inside"),
    [
        ({"comm_overlap": False}, 1, [0]),
        ({"comm_overlap": True, "accumulate_steps": 3}, 3, [0, 0, 1]),
        ({"comm_overlap": True, "accumulate_steps": 3}, 2, [0, 0]),
    ],
)
def test_collectives_start_in_the_last_part_only(
    calls: Recorder, config: dict[str, Any], parts: int, inside: list[int]
) -> None:
    def ranks(rank: int) -> list[list[int]]:
        model = Chain()
        opt = model.optimizer(**config)
        steps = []
        for _ in range(2):
            steps.append([min(backward_of(model, calls, rank)[1], 1) for _ in range(parts)])
            opt.reduce_gradients()
            opt.step()
            opt.clear_grad()
        return steps

    assert simulate(2, ranks) == [[inside, inside]] * 2


def test_no_sync_says_which_part_is_not_the_last(calls: Recorder) -> None:
    def ranks(rank: int) -> list[int]:
        model = Chain()
        opt = model.optimizer(comm_overlap=True)
        started = []
        for _ in range(2):
            with opt.no_sync():
                started.append(min(backward_of(model, calls, rank)[1], 1))
            with contextlib.suppress(ZeroDivisionError), opt.no_sync():
                started.append(min(backward_of(model, calls, rank)[1], 1))
                raise ZeroDivisionError
            started.append(min(backward_of(model, calls, rank)[1], 1))
            opt.reduce_gradients()
            opt.step()
            opt.clear_grad()
        return started

    assert simulate(2, ranks) == [[0, 0, 1, 0, 0, 1]] * 2


class Shared(nn.Module):
    """A weight used in two re-entrant checkpoints: its hook fires twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values((4, 4), 1) / 16)
        self.bias = nn.Parameter(values((4,), 2) / 16)
        self.other = nn.Parameter(values((4, 4), 3) / 16)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=True) if reentrant else block(x)
        return x @ self.other


@pytest.mark.parametrize("config", [{}, {"comm_buffer_size_mb": 0}, {"accumulate_steps": 2}, {"use_reduce_avg": False}])
def test_a_hook_that_fires_twice_is_counted_twice(config: dict[str, Any]) -> None:
    info = {"weight": MuonParamInfo(use_muon=True), "bias": MuonParamInfo(), "other": MuonParamInfo(use_muon=True)}

    def ranks(rank: int) -> dict[str, Tensor]:
        fired = 0

        def count(_: Tensor) -> None:
            nonlocal fired
            fired += 1

        model = Shared()
        model.weight.register_post_accumulate_grad_hook(count)
        inner = MuonAdamW(model.named_parameters(), info)
        opt = MuonShardingOptimizer(inner, config=MuonShardingConfig(comm_overlap=True, **config))
        for part in range(2):
            model(values((2, 4), rank, part).requires_grad_(), True).sum().backward()
        require(fired == 4, f"the hook fired {fired} times in two backward passes")
        opt.reduce_gradients()
        return {shard.name: shard.gradient.clone() for shard in opt.local_shards() if info[shard.name].use_muon}

    model = Shared()
    for rank, part in itertools.product(range(2), range(2)):
        model(values((2, 4), rank, part), False).sum().backward()
    found = {}
    for owned in simulate(2, ranks):
        found |= owned
    assert set(found) >= {"weight", "other"}
    for name, gradient in found.items():
        # Products and sums of whole numbers over 2**8 and 2**4, below 2**24 of their unit: exact in any order.
        assert torch.equal(gradient, getattr(model, name).grad.flatten() / 2), name


LATE: dict[str, Callable[[int, int, int, str], bool]] = {
    "everywhere": lambda step, part, rank, name: False,
    "on one rank": lambda step, part, rank, name: part > 0 and rank != 1,
    "one parameter on one rank": lambda step, part, rank, name: part > 0 and (rank, name) != (2, "tall"),
    "one parameter everywhere": lambda step, part, rank, name: part > 0 and name != "bias",
    "first on one rank": lambda step, part, rank, name: part == 0 and rank == 1,
    "one rank never": lambda step, part, rank, name: rank == 2,
    "nobody never": lambda step, part, rank, name: True,
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(
    "config",
    [
        {"comm_buffer_size_mb": 0},
        {"comm_buffer_size_mb": elements(200), "two_hop": True, "local_world_size": 1},
        {"use_reduce_avg": False, "skip_missing": True},
    ],
)
def test_gradients_that_come_late_count(late: str, config: dict[str, Any]) -> None:
    """The announced number of parts is over, collectives run; then more gradients come, not on every rank."""
    setup = Setup(config=config | {"comm_overlap": True}, missing=LATE[late], parts=(2, 3))

    def ranks(rank: int) -> int:
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 3)
        for step in range(2):
            trainer.step(step)
            reference.step(step)
            reference.require_same(trainer, f"step {step}")
        return trainer.rank

    assert simulate(3, ranks) == [0, 1, 2]


@pytest.mark.parametrize("forget", ["clear_grad", "clear_to_zero", "zero_grad"])
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_cleared_before_the_reduction_leaves_nothing(forget: str, late: str, overlap: bool) -> None:
    setup = Setup(config={"comm_overlap": overlap, "comm_buffer_size_mb": elements(150)}, missing=LATE[late])

    def ranks(rank: int) -> int:
        trainer, reference = Trainer(rank, setup), Unsharded(setup, 3)
        trainer.backward(7, 0)
        trainer.backward(7, 1)
        if forget == "zero_grad":
            trainer.opt.zero_grad()
        else:
            trainer.opt.clear_grad(set_to_zero=forget == "clear_to_zero")
        for step in range(2):
            trainer.step(step)
            reference.step(step)
            reference.require_same(trainer, f"step {step}")
        return trainer.rank

    assert simulate(3, ranks) == [0, 1, 2]
