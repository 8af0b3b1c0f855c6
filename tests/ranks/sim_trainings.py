"""Small trainings with torch's own data parallelism, for test_sim_as_gloo.py: by name, on any process group."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It compiles what torch no longer recommends to compile.
    import torch.distributed.checkpoint as checkpoint
    import torch.distributed.nn.functional as differentiable_collectives
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS = 3
PARTS = 2


class Linear(nn.Linear):
    """Without a matrix product, whose bits depend on some machines on where in memory its factors lie (`doctor`)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as torch names it)
        return (input.unsqueeze(-2) * self.weight).sum(-1) + self.bias


class Net(nn.Module):
    """Widths that do not divide evenly over four ranks; a buffer; one layer that odd ranks and steps do without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(10, 33)
        self.sometimes = Linear(33, 33)
        self.last = Linear(33, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Tensor, skip: bool = False) -> Tensor:
        hidden = nn.functional.gelu(self.first(batch))
        if not skip:
            hidden = hidden + self.sometimes(hidden)
        self.seen += batch.detach().mean()
        result: Tensor = self.norm(self.last(hidden))
        return result


def model() -> Net:
    torch.manual_seed(11)
    return Net()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(5, 10, generator=generator), torch.randn(5, 6, generator=generator)) for _ in range(STEPS * PARTS)
    ]


def whole(tensor: Tensor) -> Tensor:
    """Without its distribution."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(
    net: nn.Module,
    rank: int,
    *,
    optimizer: Any = None,
    clip: bool = False,
    accumulate: Callable[[bool], Any] = lambda last: contextlib.nullcontext(),
    skip: Callable[[int], bool] = lambda step: False,
    around: Callable[[], Any] = contextlib.nullcontext,
    num_steps: int = STEPS,
) -> list[Tensor]:
    """Losses, norms and weights of a few steps of AdamW, each of two parts."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-2)
    told: list[Tensor] = []
    data = batches(rank)
    with around():
        for step in range(num_steps):
            for part in range(PARTS):
                source, target = data[step * PARTS + part]
                with accumulate(part == PARTS - 1):
                    output = net(source, True) if skip(step) else net(source)
                    loss = ((output - target) ** 2).mean()
                    loss.backward()
                told.append(loss.detach())
            if clip:
                told.append(whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    return told + [whole(parameter) for parameter in net.parameters()]


def ddp(rank: int, *, clip: bool = True, hook: Any = None, net: nn.Module | None = None, **options: Any) -> Any:
    wrapped = DistributedDataParallel(net or model(), bucket_cap_mb=0.002, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def no_sync(wrapped: Any) -> Callable[[bool], Any]:
    return lambda last: contextlib.nullcontext() if last else wrapped.no_sync()


def ddp_plain(rank: int) -> list[Tensor]:
    return trained(ddp(rank), rank, clip=True)


def ddp_no_sync(rank: int) -> list[Tensor]:
    wrapped = ddp(rank)
    return trained(wrapped, rank, accumulate=no_sync(wrapped))


def ddp_bucket_view(rank: int) -> list[Tensor]:
    wrapped = ddp(rank, gradient_as_bucket_view=True)
    return trained(wrapped, rank, accumulate=no_sync(wrapped))


def ddp_static_graph(rank: int) -> list[Tensor]:
    return trained(ddp(rank, static_graph=True), rank)


def ddp_unused(rank: int) -> list[Tensor]:
    return trained(ddp(rank, find_unused_parameters=True), rank, skip=lambda step: (rank + step) % 2 == 1)


def ddp_hook(rank: int) -> list[Tensor]:
    return trained(ddp(rank, hook=default_hooks.allreduce_hook), rank)


def ddp_fp16_hook(rank: int) -> list[Tensor]:
    return trained(ddp(rank, hook=default_hooks.fp16_compress_hook), rank)


def ddp_join(rank: int) -> list[Tensor]:
    """Ranks with fewer batches shadow the others' collectives."""
    wrapped = ddp(rank)
    return trained(wrapped, rank, around=lambda: Join([wrapped]), num_steps=STEPS - rank % 2)


def ddp_then_zero(rank: int) -> list[Tensor]:
    wrapped = ddp(rank)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2)
    result = trained(wrapped, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        moments = optimizer.state_dict()["state"]
        result += [moments[key]["exp_avg"].clone() for key in sorted(moments)]
    return result


def ddp_zero_bucket_view(rank: int) -> list[Tensor]:
    wrapped = ddp(rank)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-2
    )
    return trained(wrapped, rank, optimizer=optimizer)


def sharded(**options: Any) -> Any:
    net = model()
    for layer in (net.first, net.sometimes, net.last):
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return net


def fsdp2_plain(rank: int) -> list[Tensor]:
    return trained(sharded(), rank, clip=True)


def fsdp2_two_dimensions(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return trained(sharded(mesh=mesh), rank, clip=True)


def fsdp2_mixed(rank: int) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(sharded(mp_policy=policy), rank)


def fsdp2_bf16_sums(rank: int) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return trained(sharded(mp_policy=policy), rank)


def fsdp2_kept(rank: int) -> list[Tensor]:
    return trained(sharded(reshard_after_forward=False), rank)


def fsdp2_resharded_to_two(rank: int) -> list[Tensor]:
    return trained(sharded(reshard_after_forward=2), rank)


def fsdp2_accumulates(rank: int) -> list[Tensor]:
    net = sharded()

    def accumulate(last: bool) -> Any:
        net.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return trained(net, rank, accumulate=accumulate, clip=True)


def fsdp2_offloaded(rank: int) -> list[Tensor]:
    return trained(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), rank)


def tensor_parallel(rank: int) -> list[Tensor]:
    """Over two of four ranks each, with data parallelism over the other dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 6))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    # All ranks of one tensor-parallel group work on the same batch.
    return trained(net, rank // 2)


def pipeline(rank: int) -> list[Tensor]:
    """One layer a rank, forward and backward by messages."""
    torch.manual_seed(rank)
    stage = PipelineStage(nn.Linear(8, 8), rank, dist.get_world_size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, 6, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)))
    elif stage.is_last:
        schedule.step(target=torch.zeros(6, 8), losses=losses)
    else:
        schedule.step()
    gradients = [parameter.grad for parameter in stage.submod.parameters() if parameter.grad is not None]
    return [*gradients, *losses, torch.tensor(float(rank)), torch.zeros(1)]


def loss_over_shards(rank: int) -> list[Tensor]:
    """A context manager that changes what operators do, for the whole process, while the ranks take turns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    scores = distribute_tensor(torch.randn(6, 8, generator=generator), mesh, [Shard(1)]).requires_grad_()
    targets = distribute_tensor(torch.randint(0, 8, (6,), generator=generator), mesh, [Replicate()])
    with loss_parallel():
        loss = nn.functional.cross_entropy(scores, targets)
        loss.backward()
    return [whole(loss), whole(scores.grad), scores.grad.to_local(), torch.tensor(float(rank))]


def differentiable(rank: int) -> list[Tensor]:
    """Collectives of torch.distributed.nn, whose backward passes are collectives too."""
    source = torch.randn(7, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    total = differentiable_collectives.all_reduce(source * 2)
    pieces = differentiable_collectives.all_gather(source)
    (total.sum() * (rank + 1) + sum((number + 1) * piece.sum() for number, piece in enumerate(pieces))).backward()
    return [source.detach(), total.detach(), *(piece.detach() for piece in pieces), source.grad]


def checkpointed(rank: int) -> list[Tensor]:
    """Saved by all ranks, and loaded into another model."""
    net, other = sharded(), sharded()
    trained(net, rank, num_steps=1)
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where, 0)
    try:
        checkpoint.save({"net": get_model_state_dict(net)}, checkpoint_id=where[0])
        loaded = {"net": get_model_state_dict(other)}
        checkpoint.load(loaded, checkpoint_id=where[0])
        set_model_state_dict(other, loaded["net"])
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(where[0], ignore_errors=True)
    own = [parameter.to_local().detach().clone() for parameter in other.parameters()]
    return own + [whole(parameter) for parameter in other.parameters()]


TRAININGS: dict[str, Callable[[int], list[Tensor]]] = {
    function.__name__: function
    for function in (
        *(ddp_plain, ddp_no_sync, ddp_bucket_view, ddp_static_graph, ddp_unused, ddp_hook, ddp_fp16_hook, ddp_join),
        *(ddp_then_zero, ddp_zero_bucket_view, fsdp2_plain, fsdp2_two_dimensions, fsdp2_mixed, fsdp2_bf16_sums),
        *(fsdp2_kept, fsdp2_resharded_to_two, fsdp2_accumulates, fsdp2_offloaded, tensor_parallel),
        *(pipeline, loss_over_shards, differentiable, checkpointed),
    )
}
