"""The memory of the sharded Muon optimizer on simulated ranks: what holds gradients, and when it is allocated."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ranks.muon_training import Setup, Trainer, require, simulate
from zero2core import MuonParamInfo

pytestmark = pytest.mark.usefixtures("one_thread")


# The garbage of a reduction


def alive() -> list[Tensor]:
    """All fp32 tensors of this process that have a storage, every rank's."""
    gc.collect()
    tensors = (item for item in gc.get_objects() if type(item) is Tensor)
    return [item for item in tensors if item.dtype == torch.float32 and item.layout is torch.strided]


@pytest.mark.parametrize("config", [{}, {"comm_overlap": True}, {"two_hop": True, "local_world_size": 2}])
def test_after_the_reduction_no_rank_can_read_a_partial_sum(config: dict[str, Any]) -> None:
    shapes = dict.fromkeys(("a", "b", "c", "d"), (32, 32))
    info = {name: MuonParamInfo(use_muon=True) for name in shapes}

    def ranks(rank: int) -> Trainer:
        trainer = Trainer(rank, Setup(shapes, info=info, config=config))
        for param in trainer.params.values():
            (param * float(2**20 * (rank + 1))).sum().backward()
        trainer.opt.reduce_gradients()
        require(all(param.grad is None for param in trainer.params.values()), "nothing is left in .grad")
        found = [shard.gradient for shard in trainer.opt.local_shards()]
        require(all((gradient == 2**20 * 2.5).all() for gradient in found), "the mean")
        return trainer

    trainers = simulate(4, ranks)
    large = [item[item > 2**19] for item in alive()]
    assert sum(item.numel() for item in large) >= len(trainers) * 1024
    assert all((item == 2**20 * 2.5).all() for item in large)


# Memory


class Allocations(TorchDispatchMode):
    """The bytes of every storage that an operation makes. Only of the thread in which it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {item.untyped_storage().data_ptr() for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor) and item.untyped_storage().data_ptr() not in given:
                self.sizes.append(item.untyped_storage().nbytes())
        return result


SIXTEEN = {f"matrix{index}": (16, 16) for index in range(8)} | {f"rest{index}": (256,) for index in range(8)}
SIXTEEN_INFO = {name: MuonParamInfo(use_muon=len(shape) == 2) for name, shape in SIXTEEN.items()}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"comm_overlap": True},
        {"fuse_optimizer_states": True},
        {"two_hop": True, "local_world_size": 2},
        {"comm_overlap": True, "skip_missing": True, "use_reduce_avg": False},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_allocated_once(config: dict[str, Any], dtype: torch.dtype) -> None:
    """After the first step nothing larger than one parameter in fp32 is allocated."""

    def ranks(rank: int) -> int:
        trainer = Trainer(rank, Setup(SIXTEEN, info=SIXTEEN_INFO, config=config, parts=(1, 1, 1), dtypes=(dtype,)))
        trainer.step(0)
        losses = [trainer.loss(step, 0) for step in (1, 2)]
        with Allocations() as allocations:
            for loss in losses:
                loss.backward()
                trainer.opt.reduce_gradients()
                trainer.opt.step()
                trainer.opt.clear_grad()
        require(len(allocations.sizes) > 20, "operations are seen")
        return max(allocations.sizes)

    assert max(simulate(4, ranks)) <= 256 * 4


def storage_bytes() -> int:
    """Of all fp32 storages alive, of every rank."""
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in alive()}
    return sum(storages.values())


# With overlap the simulator keeps a copy of what is on its way: only what is freed can be told.
@pytest.mark.parametrize(("release", "overlap"), [(False, False), (True, False), (True, True)])
def test_gradients_are_released_after_the_step_and_rebuilt(release: bool, overlap: bool) -> None:
    config = {"release_gradients": release, "comm_overlap": overlap}
    seen: list[int] = []

    def count() -> None:
        """While all ranks stand still."""
        dist.barrier()
        if dist.get_rank() == 0:
            seen.append(storage_bytes())
        dist.barrier()

    def ranks(rank: int) -> None:
        trainer = Trainer(
            rank, Setup(SIXTEEN, info=SIXTEEN_INFO, config=config, dtypes=(torch.bfloat16,), parts=(1, 1))
        )
        for step in range(2):
            trainer.accumulate(step)
            count()
            trainer.opt.reduce_gradients()
            trainer.opt.step()
            count()
            require(all((shard.gradient is None) == release for shard in trainer.opt.local_shards()), "local_shards")
            trainer.opt.clear_grad()

    simulate(2, ranks)
    gradients = 2 * 16 * 256 * 4  # of two ranks
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        freed = before - after
        assert freed >= gradients if release else freed <= 0
    rebuilt = seen[2] - seen[1]
    assert rebuilt >= gradients if release else rebuilt <= 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_moments_of_a_rank_in_one_storage(fused: bool, dtype: torch.dtype) -> None:
    def ranks(rank: int) -> set[int]:
        trainer = Trainer(rank, Setup(config={"fuse_optimizer_states": fused}, dtypes=(dtype,)))
        trainer.step(0)
        trainer.opt.load_state_dict(trainer.opt.state_dict())
        trainer.step(1)
        shards = trainer.opt.local_shards()
        return {value.untyped_storage().data_ptr() for shard in shards for value in shard.state.values()}

    assert all((len(storages) == 1) == fused for storages in simulate(2, ranks))
