"""What the ranks of test_zero_master.py do: a task is JSON ``{"do": name, **arguments}``, the reply JSON.

A check that fails raises; each reply counts what was really compared, so that the test can refuse an empty pass.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.launch.rank import RankContext
from zero2core import ZeroMaster, broadcast_module

SHAPES = [(5, 3), (), (0,), (7,), (2, 3, 0), (4, 3, 2, 2), (1,)]  # 72 elements
DTYPES = {
    "bf16": [torch.bfloat16],
    "fp32": [torch.float32],
    "mixed": [torch.bfloat16, torch.float32, torch.float16, torch.float64],
}


class CheckFailedError(Exception):
    """What a rank saw is not what it should have seen."""


def require(holds: object, what: str) -> None:
    """Raise unless ``holds``; unlike an assert also under -O, and with a message where pytest rewrites nothing."""
    if not holds:
        raise CheckFailedError(what)


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""

    def work(task: bytes) -> bytes:
        order = json.loads(task)
        function = globals()[order.pop("do")]
        return json.dumps(function(context, **order)).encode()

    return work


def parameters(
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    *,
    strided: bool = False,
) -> list[nn.Parameter]:
    """The same on every rank; ``strided``: matrices transposed, four dimensions channels-last."""
    made = []
    for index, shape in enumerate(shapes):
        weight = values(shape, index).to(dtypes[index % len(dtypes)])
        if strided and weight.dim() == 2:
            weight = weight.t().contiguous().t()
        elif strided and weight.dim() == 4:
            weight = weight.to(memory_format=torch.channels_last)
        made.append(nn.Parameter(weight))
    return made


def values(shape: Sequence[int], *seed: int) -> Tensor:
    """Multiples of 2**-7, exact in bf16; sums of a few are exact in fp32 in any order, but not in bf16."""
    generator = torch.Generator().manual_seed(int("1" + "".join(f"{part:03d}" for part in seed)))
    return torch.randint(-255, 256, tuple(shape), generator=generator).float() * 2**-7


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """End to end, row-major, fp32."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (actual, expected)]
    return torch.equal(*bits)


class Unsharded:
    """The trainer that ZeroMaster must equal: fp32 copies of all weights, one AdamW over them."""

    def __init__(self, params: Sequence[nn.Parameter], settings: dict[str, Any]) -> None:
        self.weights = [param.detach().clone() for param in params]
        self.masters = [nn.Parameter(param.detach().float()) for param in params]
        self.optimizer = torch.optim.AdamW(self.masters, **settings)

    def step(self, grads: Sequence[Tensor]) -> None:
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.clone()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master.detach())


def train(context: RankContext, bucket: int, dtypes: str, strided: bool, foreach: bool) -> dict[str, int]:
    """Steps of one and of several parts, a rank without gradients, a discard, a clip: against the unsharded trainer."""
    rank, world = context.rank, context.world
    params = parameters(dtypes=DTYPES[dtypes], strided=strided)
    storages = [param.data_ptr() for param in params]
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "foreach": foreach, "eps": 1e-8}
    reference = Unsharded(params, settings)
    log = Traffic(context)
    zero = ZeroMaster(params, rank, world, bucket=bucket)
    log.require("__init__", zero)
    optimizer = torch.optim.AdamW([zero.master], **settings)
    compared = 0
    # (parts, announced as the last, discarded, clipped)
    for step, (num_parts, early, discarded, clipped) in enumerate(
        [(1, False, False, False), (3, False, False, True), (2, True, True, False), (2, True, False, False)]
    ):
        sums = [torch.zeros(param.shape) for param in params]
        for part in range(num_parts):
            for contributor in range(world):
                for index, (param, total) in enumerate(zip(params, sums, strict=True)):
                    # The last rank never has a gradient, parameter 3 nobody has, others come and go.
                    absent = contributor == world - 1 or index == 3 or (contributor + part + index) % 3 == 0
                    grad = values(param.shape, contributor, step, part, index)
                    if not absent:
                        total += grad
                    if contributor == rank:
                        param.grad = None if absent else grad.to(param.dtype)
            zero.collect(more=part + 1 < num_parts and not early)
        require(zero.has_grad == (rank != world - 1), "has_grad is local")
        log.begin()
        require(zero.has_grad_anywhere(), "some rank has a gradient")
        log.require("has_grad_anywhere", zero)
        if discarded:
            zero.discard()
            require(not zero.has_grad_anywhere(), "nobody has a gradient after a discard")
            before = zero.master.detach().clone()
            optimizer.step()
            require(same_bits(zero.master, before), f"step {step}: a discarded step moved the master")
            continue
        log.begin()
        zero.reduce_scatter()
        log.require("reduce_scatter", zero)
        compared += compare_shard(zero, zero.grad_buf, flat(sums), f"step {step}: gradient")
        norm = zero.grad_sq_norm()
        log.require("grad_sq_norm", zero)
        require(norm.item() == flat(sums).double().square().sum().item(), f"step {step}: norm {norm.item()}")
        if clipped:
            coefficient = min(1.0, 1.0 / (float(norm) ** 0.5 + 1e-6))
            require(coefficient < 1.0 and zero.master.grad is not None, "the clip has something to do")
            zero.grad_buf.mul_(coefficient)
            sums = [total * coefficient for total in sums]
            require(zero.grad_sq_norm() < norm, "the norm sees the clipped gradient")
        optimizer.step()
        reference.step(sums)
        log.begin()
        zero.gather_params()
        log.require("gather_params", zero)
        for index, (param, weight) in enumerate(zip(params, reference.weights, strict=True)):
            require(same_bits(param, weight), f"step {step}: weights of parameter {index}")
        compare_shard(zero, zero.master.detach(), flat(reference.masters), f"step {step}: master")
        for key in ("exp_avg", "exp_avg_sq"):
            moment = flat([reference.optimizer.state[master][key] for master in reference.masters])
            compare_shard(zero, optimizer.state[zero.master][key], moment, f"step {step}: {key}")
        log.begin()
        require(same_bits(zero.full_master(), flat(reference.masters)), f"step {step}: full master")
        log.require("full_master", zero)
    require([param.data_ptr() for param in params] == storages, "the weights keep their storage")
    return {"compared": compared, "spills": zero.spills, "collectives": log.num_required}


def compare_shard(zero: ZeroMaster, shard: Tensor, whole: Tensor, what: str) -> int:
    """Bitwise: this rank's elements, and zeros in the padding; returns how many elements were compared."""
    compared = 0
    for start, stop, offset in zero.layout.segments(zero.rank):
        require(same_bits(shard[offset : offset + stop - start], whole[start:stop]), f"{what} in [{start}, {stop})")
        compared += stop - start
    require(not shard[compared:].any(), f"{what}: padding is zero")
    return compared


class Traffic:
    """Holds what ZeroMaster says it communicates against what the rank really called."""

    def __init__(self, context: RankContext) -> None:
        self._log = context.collectives
        self.num_required = 0
        self.begin()

    def begin(self) -> None:
        self._log.begin()

    def require(self, call: Any, zero: ZeroMaster) -> None:
        """The calls since ``begin`` or the last ``require`` are the expected ones."""
        actual = [(entry.kind, entry.dtype, entry.length) for entry in self._log.entries]
        expected = [(kind, str(dtype).removeprefix("torch."), n) for kind, dtype, n in zero.expected_collectives(call)]
        require(actual == expected, f"{call}: expected collectives {expected}, got {actual}")
        self.num_required += len(actual)
        self.begin()


def padding(context: RankContext, eps: float) -> dict[str, float]:
    """AdamW with eps=0 makes nan of zeros: the padding is zero again after the next gather, and counts nowhere."""
    params = parameters([(2 * context.world + 1,)])
    zero = ZeroMaster(params, context.rank, context.world, bucket=2 * context.world)
    optimizer = torch.optim.AdamW([zero.master], lr=0.1, eps=eps, foreach=False)
    params[0].grad = torch.ones_like(params[0])
    zero.collect(more=False)
    zero.reduce_scatter()
    optimizer.step()
    made_nan = int(zero.master.isnan().sum())
    zero.gather_params()
    require(not params[0].isnan().any(), "the weights are finite")
    require(not zero.master.isnan().any(), "the master is finite, its padding too")
    zero.grad_buf[zero.layout.num_owned(context.rank) :] = torch.nan
    return {"nan": made_nan, "norm": zero.grad_sq_norm().item(), "full": zero.full_master().isnan().sum().item()}


def norm_bits(context: RankContext, numel: int) -> dict[str, str]:
    """The squared norm of random gradients, as hex."""
    params = [nn.Parameter(torch.zeros(numel))]
    zero = ZeroMaster(params, context.rank, context.world, bucket=1024)
    params[0].grad = torch.randn(numel, generator=torch.Generator().manual_seed(context.rank))
    zero.collect(more=False)
    zero.reduce_scatter()
    return {"bits": float(zero.grad_sq_norm()).hex()}


def refuse(context: RankContext, odd: dict[str, Any]) -> dict[str, str]:
    """Build with one set of arguments, on ``odd["rank"]`` with another; returns what was raised."""
    arguments: dict[str, Any] = {"shapes": [[3], [4]], "dtypes": "bf16", "bucket": 8, "frozen": False}
    if context.rank == odd.pop("rank", context.rank):
        arguments |= odd
    params = parameters(arguments["shapes"], DTYPES[arguments["dtypes"]])
    for param in params:
        param.requires_grad_(not arguments["frozen"])
    try:
        ZeroMaster(params, context.rank, arguments.get("world", context.world), bucket=arguments["bucket"])
    except ValueError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "nothing", "text": ""}


def subgroup(context: RankContext) -> dict[str, int]:
    """All ranks but the first train in a group of their own; the sums must not contain the first one's."""
    members = list(range(1, context.world))
    group = dist.new_group(members)
    compared = 0
    if context.rank in members:
        params = parameters()
        zero = ZeroMaster(params, context.rank - 1, len(members), bucket=16, group=group)
        for param in params:
            param.grad = torch.full_like(param, 2.0**context.rank)
        zero.collect(more=False)
        zero.reduce_scatter()
        expected = torch.full((zero.N,), sum(2.0**member for member in members))
        compared = compare_shard(zero, zero.grad_buf, expected, "gradient")
        require(zero.grad_sq_norm().item() == zero.N * expected[0].item() ** 2, "norm over the group")
        zero.gather_params()
        require(same_bits(zero.full_master(), flat(params)), "weights over the group")
        module = nn.Linear(2, 2)
        nn.init.constant_(module.weight, context.rank)
        broadcast_module(module, src=len(members) - 1, group=group)
        require((module.weight == members[-1]).all(), "src counts within the group")
        dist.destroy_process_group(group)
    return {"compared": compared}


def broadcast(context: RankContext, src: int) -> dict[str, Any]:
    """Every parameter and buffer, whatever its dtype and strides, becomes that of ``src``, in place."""
    module = nn.Module()
    odd = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2]
    for index, (dtype, shape) in enumerate(itertools.product(odd, [(), (3, 2), (0,)])):
        filled = torch.full(shape, context.rank + 1.0 if dtype != torch.bool else context.rank == src).to(dtype)
        if len(shape) == 2:
            filled = filled.t().contiguous().t()
        if dtype.is_floating_point:
            module.register_parameter(f"weight{index}", nn.Parameter(filled))
        else:
            module.register_buffer(f"buffer{index}", filled, persistent=index % 2 == 0)
    tensors = [*module.parameters(), *module.buffers()]
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    context.collectives.begin()
    broadcast_module(module, src)
    require([(tensor.data_ptr(), tensor.stride()) for tensor in tensors] == places, "in place")
    for tensor in tensors:
        expected = torch.full(tensor.shape, True if tensor.dtype == torch.bool else src + 1.0).to(tensor.dtype)
        require(same_bits(tensor, expected), f"{tensor.dtype} {tuple(tensor.shape)}")
    return {"compared": len(tensors), "kinds": [entry.kind for entry in context.collectives.entries]}


def broadcast_unlike(context: RankContext) -> dict[str, str]:
    """Modules that differ are found before anything is overwritten."""
    try:
        broadcast_module(nn.Linear(2, 2 + context.rank))
    except ValueError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "nothing", "text": ""}
