"""What the ranks of test_strategies.py do: a task is JSON ``{"do": name, **arguments}``, the reply JSON.

The model's loss is linear in its parameters, so that any gradient can be had; gradients are small multiples of the
world, whose sums and means are exact, also in bf16. A check that fails raises; replies count what was compared.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.optimizer import _global_optimizer_pre_hooks

from harness.launch.rank import RankContext
from zero2core import (
    DDPStrategy,
    DistributionStrategy,
    FSDPStrategy,
    GradientStateError,
    RankMismatchError,
    build_strategy,
)
from zero2core.clipping import OwnedGradients, clip_, joint_norm
from zero2core.strategies.mesh import device_mesh

CPU = torch.device("cpu")
NAMES = ["root", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "blocks.1.plain"]
Gradients = Mapping[str, Tensor]


class CheckFailedError(Exception):
    """What a rank saw is not what it should have seen."""


def require(holds: object, what: str) -> None:
    """Raise unless ``holds``; unlike an assert also under -O, and with a message where pytest rewrites nothing."""
    if not holds:
        raise CheckFailedError(what)


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""
    torch.set_num_threads(1)

    def work(task: bytes) -> bytes:
        order = json.loads(task)
        function = globals()[order.pop("do")]
        return json.dumps(function(context, **order)).encode()

    return work


def linear(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A loss whose gradient is ``gradient``."""
    return (parameter * gradient.to(parameter.dtype)).float().sum()


class Block(nn.Module):
    """Parameters of its own, through whose loss a gradient always flows."""

    def __init__(self, prefix: str, **parameters: Tensor) -> None:
        super().__init__()
        self.prefix = prefix
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, loss: Tensor, gradients: Gradients) -> Tensor:
        for name, parameter in self.named_parameters(recurse=False, remove_duplicate=False):
            if self.prefix + name in gradients:
                loss = loss + linear(parameter, gradients[self.prefix + name])
        return loss


class Model(nn.Module):
    """Two blocks and a root; ``gradients`` says which parameters a forward uses, and what their gradients are."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.root = nn.Parameter(values((6, 3), 1) + offset)
        self.blocks = nn.ModuleList(
            [
                Block("blocks.0.", first=values((5, 2), 2) + offset, second=values((3,), 3) + offset),
                Block(
                    "blocks.1.",
                    first=values((4, 2), 4) + offset,
                    second=values((7,), 5) + offset,
                    plain=values((3, 2), 6) + offset,
                ),
            ]
        )

    def forward(self, gradients: Gradients, flow: Tensor) -> Tensor:
        loss = flow + linear(self.root, gradients["root"]) if "root" in gradients else flow
        for block in self.blocks:
            loss = block(loss, gradients)
        return loss


class Converting(Model):
    """Shards its blocks itself and leaves one parameter plain; the root too, where it is ``bare``."""

    bare = False

    def convert_to_fsdp(
        self, *, mesh: DeviceMesh, mp_policy: Any, offload_policy: Any, reshard_after_forward: bool, use_dmuon: bool
    ) -> None:
        require(use_dmuon is False, "convert_to_fsdp is told that Muon has nothing")
        settings = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}
        ignored = {self.blocks[1].plain}
        for block in self.blocks:
            fully_shard(block, reshard_after_forward=reshard_after_forward, ignored_params=ignored, **settings)
        if not self.bare:
            fully_shard(self, ignored_params=ignored, **settings)


class Bare(Converting):
    """The root is no unit of FSDP2."""

    bare = True


MODELS: dict[str, type[Model]] = {"default": Model, "converts": Converting, "bare": Bare}


def values(shape: Sequence[int], *seed: int) -> Tensor:
    """Small integers, never 0 alone; the same for the same seed."""
    generator = torch.Generator().manual_seed(int("1" + "".join(f"{part:03d}" for part in seed)))
    return torch.randint(-3, 4, tuple(shape), generator=generator).float()


def gradients_of(world: int, rank: int, step: int, part: int, use: str) -> dict[str, Tensor]:
    """What one rank's part contributes: multiples of the world, of the parameters that it uses.

    ``use``: ``all``; ``parts``: what is used changes from part to part, alike on all ranks; ``ranks``: from rank to
    rank as well. Then nobody uses ``blocks.0.second`` in step 1, and ``blocks.1.second`` before part 2.
    """
    made = {}
    for index, (name, parameter) in enumerate(Model().named_parameters()):
        mix = {"all": 0, "parts": part + index, "ranks": part + index + rank}[use]
        absent = mix % 3 == 1
        if use != "all":
            absent |= (name == "blocks.0.second" and step == 1) or (name == "blocks.1.second" and part < 2)
        if not absent:
            made[name] = values(parameter.shape, rank, step, part, index) * world
    return made


def bits(tensor: Tensor) -> Tensor:
    """The bits of a whole tensor; of a DTensor, gathered."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().contiguous().view(torch.int32)


def require_same(actual: Tensor | None, expected: Tensor | None, what: str) -> int:
    """Both None, or equal in every bit but the sign of zeros (a sum with zeros turns -0 to 0); returns the elements."""
    require((actual is None) == (expected is None), f"{what}: {actual} instead of {expected}")
    if actual is None or expected is None:
        return 0
    require(actual.dtype == expected.dtype, f"{what}: {actual.dtype}")
    require(torch.equal(bits(actual + 0.0), bits(expected + 0.0)), f"{what}: {actual} instead of {expected}")
    return expected.numel()


class Unsharded:
    """A single process that sees all parts of all ranks."""

    def __init__(self, bound: float | None) -> None:
        self.model = Model()
        self.bound = bound
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.125, weight_decay=0.1, foreach=False)

    def collect(self, world: int, step: int, parts: int, use: str, multiple: int = 1) -> None:
        for rank in range(world):
            for part in range(parts):
                for name, gradient in gradients_of(world, rank, step, part, use).items():
                    parameter = self.model.get_parameter(name)
                    gradient = gradient * multiple
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world

    def clip(self) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().float()
        if self.bound is not None:
            factor = (self.bound / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(
    context: RankContext,
    config: dict[str, Any],
    accumulation: str = "sync",
    use: str = "all",
    model: str = "default",
    bound: float | None = 2.0,
    steps: int = 2,
    parts: int = 3,
) -> dict[str, Any]:
    """Steps of several parts against the single process: every gradient, norm and weight, bit for bit."""
    world, rank = context.world, context.rank
    if config.get("bf16") is False:
        config["grad_scaler"] = torch.amp.GradScaler("cpu")
    strategy = build_strategy(config, device=CPU, local_rank=rank)
    reference = Unsharded(bound)
    # DDP divides by the world before it sums, and divides what is a mean already together with each further part.
    multiple = 1 if strategy.params_sharded else world ** (parts - 1)
    # Other weights on ranks other than 0, which wrapping must make equal.
    wrapped = strategy.wrap(MODELS[model](offset=float(rank)))
    optimizer = strategy.build_optimizer(wrapped, torch.optim.AdamW, lr=0.125, weight_decay=0.1, foreach=False)
    compared = 0
    norms = []
    for step in range(steps):
        reference.collect(world, step, parts, use, multiple)
        for part in range(parts):
            inside = accumulating(strategy, wrapped, accumulation, last=part == parts - 1, first=part == 0)
            with inside:
                flow = torch.zeros((), requires_grad=True)
                gradients = gradients_of(world, rank, step, part, use)
                wrapped({name: gradient * multiple for name, gradient in gradients.items()}, flow).backward()
        if accumulation == "flush":
            strategy.flush(wrapped)
        with torch.no_grad():  # what a trainer does to log a loss: it must not leave old weights behind
            wrapped({}, torch.zeros(()))
        for name, expected in named(reference.model).items():
            compared += require_same(named(wrapped)[name].grad, expected.grad, f"step {step}: gradient of {name}")
        norm = strategy.clip_grad_norm(wrapped, bound)
        require(type(norm) is Tensor and norm.dtype == torch.float32 and norm.dim() == 0, f"norm {norm!r}")
        compared += require_same(norm, reference.clip(), f"step {step}: norm")
        norms.append(norm.item())
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for name, expected in named(reference.model).items():
            compared += require_same(named(wrapped)[name], expected, f"step {step}: weight {name}")
    stats = strategy.last_grad_clip_stats or {}
    require(torch.equal(stats["total_norm"], norm), "the stats have the norm")
    return {
        "compared": compared,
        "norms": norms,
        "sharded": strategy.params_sharded,
        "axes": strategy.shard_axes,
        "num_gradients": stats["num_gradients"],
    }


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def accumulating(
    strategy: DistributionStrategy, model: nn.Module, accumulation: str, *, last: bool, first: bool
) -> Iterator[None]:
    """In which of its blocks a part runs."""
    if accumulation == "sync" or (last and accumulation != "flush"):
        yield
    elif accumulation == "deferred":
        with strategy.no_sync(model, defer="all_reduce"):
            yield
    else:
        with strategy.no_sync(model):
            if accumulation == "nested" and first:
                with strategy.no_sync(model):
                    pass
            yield


def layout(context: RankContext, config: dict[str, Any], local_world: str | None) -> dict[str, Any]:
    """Where parameters lie, with ``LOCAL_WORLD_SIZE`` as given."""
    before = os.environ.pop("LOCAL_WORLD_SIZE", None)
    try:
        if local_world is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world
        strategy = FSDPStrategy(config, device=CPU, local_rank=0)
        require(strategy.layout is None, "no layout before wrapping")
        model = strategy.wrap(Model())
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
    made = strategy.layout
    require(made is not None, "wrapping makes the layout")
    assert made is not None
    again = device_mesh(CPU, tuple(made.mesh.shape))
    root = model.root
    return {
        "mesh": list(made.mesh.shape),
        "names": list(made.mesh.mesh_dim_names or ()),
        "same mesh": again is made.mesh,
        "groups": [group is not None for group in made[1:5]],
        "sizes": [group and group.size() for group in made[1:5]],
        "placements": [str(placement) for placement in root.placements],
        "local": list(root.to_local().shape),
        "axes": list(strategy.shard_axes),
        "after forward": made.reshard_after_forward,
        "policy": [str(made.mp_policy.param_dtype), str(made.mp_policy.reduce_dtype)],
        "units": [type(module).__name__ for module in model.modules() if type(module).__name__.startswith("FSDP")],
    }


def flags(context: RankContext) -> dict[str, Any]:
    """``no_sync`` reaches every unit of a tree whose root is none, nests, and puts back what it found."""
    strategy = FSDPStrategy({"fsdp_sharding_strategy": "hybrid_shard"}, device=CPU, local_rank=0)
    model = strategy.wrap(Bare())
    model.blocks[0].set_requires_all_reduce(False)

    def now() -> list[list[bool]]:
        groups = [block._get_fsdp_state()._fsdp_param_group for block in model.blocks]
        return [[group.reduce_grads, group.all_reduce_grads] for group in groups]

    seen = {"before": now()}
    with strategy.no_sync(model):
        seen["inside"] = now()
        with strategy.no_sync(model, defer="all_reduce"):
            seen["deferred within"] = now()
        seen["inside again"] = now()
    seen["after"] = now()
    with strategy.no_sync(model, defer="all_reduce"):
        seen["deferred"] = now()
    with contextlib.suppress(ZeroDivisionError), strategy.no_sync(model):
        raise ZeroDivisionError
    seen["after an exception"] = now()
    return seen


def refused(context: RankContext, case: str) -> str:
    """The sentence with which something is refused, on every rank."""
    rank = context.rank
    strategies: dict[str, Any] = {"use_fsdp": True, "fsdp_reduce_dtype": "fp32"}
    if case.startswith("ddp "):
        strategies, case = {}, case.removeprefix("ddp ")
    if case == "replicas":
        strategies |= {"fsdp_sharding_strategy": "hybrid_shard", "fsdp_hsdp_replicate_size": 2}
    if case == "configurations":
        strategies |= {"cast_forward_inputs": rank == 1}
    strategy = build_strategy(strategies, device=torch.device("meta") if case == "device" else CPU, local_rank=0)
    model: nn.Module = Model()
    unwrapped = ("scalar", "tied", "dtypes", "empty", "frozen", "meta", "models", "nothing", "comes apart")
    if case == "scalar":
        model.blocks[0].temperature = nn.Parameter(torch.ones(()))
    elif case == "tied":
        model.blocks[0].first = model.blocks[1].first
    elif case == "comes apart":
        model = Bare()
        model.blocks[0].first = model.blocks[1].first
    elif case == "dtypes":
        model.blocks[0].second.data = model.blocks[0].second.data.bfloat16()
    elif case == "empty":
        model = nn.Identity()
    elif case == "frozen":
        model.requires_grad_(requires_grad=False)
    elif case == "meta":
        model.to("meta")
    elif case == "models" and rank == 1:
        model.root = nn.Parameter(torch.ones(2))
    elif case == "nothing":
        model = Bare()
        model.convert_to_fsdp = lambda **_: None
    try:
        if case == "clip before wrap":
            strategy.clip_grad_norm(model, 1.0)
        wrapped = strategy.wrap(model)
        if case == "twice":
            strategy.wrap(model)
        if case == "wrapped by another":
            build_strategy(strategies, device=CPU, local_rank=0).wrap(wrapped)
        if case == "another model":
            strategy.clip_grad_norm(Model(), 1.0)
        if case == "pending":
            with strategy.no_sync(wrapped):
                backward(context, wrapped)
            strategy.clip_grad_norm(wrapped, 1.0)
        if case in ("clip of a half", "flush of a half"):
            model.blocks[0].register_full_backward_hook(fail)
            with contextlib.suppress(ArithmeticError):
                backward(context, wrapped)
            require(model.blocks[1].first.grad is not None, "the backward failed before there was anything")
            if case == "flush of a half":
                strategy.flush(wrapped)
            strategy.clip_grad_norm(wrapped, 1.0)
        if case == "flush inside":
            with strategy.no_sync(wrapped):
                strategy.flush(wrapped)
        if case == "defer":
            with strategy.no_sync(wrapped, defer="everything"):  # type: ignore[arg-type]
                pass
        if case == "unused":
            with strategy.no_sync(wrapped):
                backward(context, wrapped)
            wrapped({"root": torch.ones(6, 3)}, torch.zeros((), requires_grad=True)).backward()
        if case.startswith("bound "):
            strategy.clip_grad_norm(wrapped, float(case.removeprefix("bound ")))
    except (ValueError, RankMismatchError, GradientStateError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    raise CheckFailedError(f"{case} was not refused (it would be {unwrapped})")


def fail(*_: object) -> None:
    raise ArithmeticError("a hook of the user's")


def backward(context: RankContext, model: nn.Module, scale: float = 1.0) -> None:
    """One part in which every parameter is used."""
    gradients = gradients_of(context.world, context.rank, 0, 0, "all")
    model({name: g * scale for name, g in gradients.items()}, torch.zeros((), requires_grad=True)).backward()


def muon_for_nothing(context: RankContext, config: dict[str, Any]) -> list[str]:
    """What the log says of two optimizers of a strategy that dedicates nothing; Muon is given to the second."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero2core")
    logger.addHandler(handler)
    try:
        strategy = build_strategy(config, device=CPU, local_rank=0)
        model = strategy.wrap(Model())
        strategy.build_optimizer(model, torch.optim.SGD, lr=1.0)
        strategy.build_optimizer(model, torch.optim.SGD, muon={"lr": 0.5}, lr=1.0)
    finally:
        logger.removeHandler(handler)
    return said


def tied(context: RankContext) -> dict[str, Any]:
    """An embedding tied to the head in the root, and two names within a block, stay one parameter with one gradient."""
    strategy = FSDPStrategy({"use_mixed_precision": False}, device=CPU, local_rank=0)
    model = Model()
    model.head = Block("head.", first=torch.ones(1))
    model.head.first = model.root
    model.blocks[0].second = model.blocks[0].first
    wrapped = strategy.wrap(model)
    names = len(list(wrapped.named_parameters()))
    gradient = values((6, 3), 9) * context.world
    inner = values((5, 2), 9) * context.world
    flow = torch.zeros((), requires_grad=True)

    def forward(gradients: Gradients, loss: Tensor) -> Tensor:
        return wrapped.head(Model.forward(wrapped, gradients, loss), gradients)

    wrapped.forward = forward
    used = {"root": gradient, "head.first": gradient, "blocks.0.first": inner, "blocks.0.second": inner}
    wrapped(used, flow).backward()
    require(wrapped.head.first is wrapped.root, "the head is the root's parameter")
    require(wrapped.blocks[0].second is wrapped.blocks[0].first, "two names in one block")
    compared = require_same(wrapped.root.grad, 2 * gradient, "both uses add up")
    compared += require_same(wrapped.blocks[0].first.grad, 2 * inner, "both uses in a block add up")
    return {"names": names, "compared": compared}


def discard(context: RankContext, config: dict[str, Any], model: str) -> dict[str, Any]:
    """What was added up in ``no_sync`` and discarded is in no later step."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    wrapped = strategy.wrap(MODELS[model]())
    with strategy.no_sync(wrapped):
        backward(context, wrapped, 0.5)
    strategy.discard(wrapped)
    require(strategy.clip_grad_norm(wrapped, None).item() == 0, "nothing is there")
    backward(context, wrapped)
    compared = 0
    total = Unsharded(None)
    total.collect(context.world, 0, 1, "all")
    for name, expected in named(total.model).items():
        compared += require_same(named(wrapped)[name].grad, expected.grad, name)
    return {"compared": compared}


def abandoned(context: RankContext, config: dict[str, Any], model: str, by: str, whole: bool) -> dict[str, Any]:
    """A part in ``no_sync`` that is given up by ``zero_grad()`` of ``by`` alone is in no later step."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    wrapped = strategy.wrap(MODELS[model]())
    optimizer = strategy.build_optimizer(wrapped, torch.optim.SGD, lr=1.0)
    if whole:  # the module shows whole parameters, which hide sharded ones with gradients
        wrapped.set_reshard_after_backward(False)
        backward(context, wrapped, 0.5)
    with strategy.no_sync(wrapped):
        backward(context, wrapped, 0.5)
    (wrapped if by == "model" else optimizer).zero_grad()
    require(strategy.clip_grad_norm(wrapped, None).item() == 0, "nothing is there")
    backward(context, wrapped)
    compared = 0
    total = Unsharded(None)
    total.collect(context.world, 0, 1, "all")
    strategy.clip_grad_norm(wrapped, None)
    for name, expected in named(total.model).items():
        compared += require_same(named(wrapped)[name].grad, expected.grad, name)
    return {"compared": compared}


def uneven(context: RankContext, config: dict[str, Any], model: str, name: str, defer: Any) -> dict[str, Any]:
    """Only rank 0 uses ``name`` in ``no_sync``, and nobody anything else: all ranks refuse to clip, and flush once."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    wrapped = strategy.wrap(MODELS[model]())
    gradient = values(Model().get_parameter(name).shape, 7) * context.world
    with strategy.no_sync(wrapped, defer=defer):
        wrapped({name: gradient} if context.rank == 0 else {}, torch.zeros((), requires_grad=True)).backward()
    try:
        strategy.clip_grad_norm(wrapped, 1.0)
    except GradientStateError as refusal:
        said = str(refusal)
    issued: list[dict[str, int]] = []
    strategy.flush(wrapped)
    with counted(issued):
        strategy.flush(wrapped)
    strategy.clip_grad_norm(wrapped, None)
    compared = sum(
        require_same(parameter.grad, gradient / context.world if name == each else None, each)
        for each, parameter in named(wrapped).items()
    )
    return {"said": said, "compared": compared, "again": sum(issued[0].values())}


def nothing_deferred(context: RankContext) -> dict[str, Any]:
    """``defer="all_reduce"`` without replicas, also after a part that was deferred: everything is reduced."""
    strategy = build_strategy({"use_fsdp": True, "unused_parameters": True}, device=CPU, local_rank=0)
    wrapped = strategy.wrap(Model())
    gradient = values((6, 3), 7) * context.world
    used = {"root": gradient} if context.rank == 0 else {}
    compared = 0
    for first in ("all_reduce", "gradients"):
        for defer in (first, "all_reduce"):
            with strategy.no_sync(wrapped, defer=defer):  # type: ignore[arg-type]
                wrapped(used, torch.zeros((), requires_grad=True)).backward()
        strategy.clip_grad_norm(wrapped, None)
        for name, parameter in wrapped.named_parameters():
            compared += require_same(parameter.grad, gradient * 2 / context.world if name == "root" else None, name)
        wrapped.zero_grad()
    return {"compared": compared}


def several(context: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    """Backwards of several forwards by DDP: one for all is reduced, and a second one is refused, not left as it is."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    wrapped = strategy.wrap(Model())
    gradients = gradients_of(context.world, context.rank, 0, 0, "all")
    total = Unsharded(None)
    total.collect(context.world, 0, 1, "all")

    def forward() -> Tensor:
        loss: Tensor = wrapped(gradients, torch.zeros((), requires_grad=True))
        return loss

    compared, said = 0, []
    for case in ("sum", "apart", "retained", "parts"):
        try:
            if case == "sum":
                (forward() + forward()).backward()
            elif case == "apart":
                first, second = forward(), forward()
                second.backward()
                first.backward()
            elif case == "retained":
                loss = forward()
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                with strategy.no_sync(wrapped):
                    inside = forward()
                    inside.backward(retain_graph=True)
                    inside.backward()
                forward().backward()
        except GradientStateError as refusal:
            said.append(f"{case}: {refusal}")
        else:
            times = 2 if case == "sum" else 3
            for name, expected in named(total.model).items():
                require(expected.grad is not None, name)
                compared += require_same(named(wrapped)[name].grad, times * expected.grad, f"{case}: {name}")
        wrapped.zero_grad()
    return {"said": said, "compared": compared}


def thawed(context: RankContext, config: dict[str, Any], model: str, before: bool) -> str:
    """``requires_grad`` of a plain parameter is switched after wrapping; what is said of it, on every rank."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    made = MODELS[model]()
    made.blocks[1].plain.requires_grad_(before)
    wrapped = strategy.wrap(made)
    made.blocks[1].plain.requires_grad_(not before)
    try:
        backward(context, wrapped)
    except GradientStateError as refusal:
        return str(refusal)
    raise CheckFailedError("a gradient that is not reduced was not refused")


def for_the_input(context: RankContext) -> dict[str, Any]:
    """All parameters frozen for a while, to have the gradient of the input alone, are in nobody's way."""
    strategy = DDPStrategy({}, device=CPU, local_rank=0)
    wrapped = strategy.wrap(Model())
    flow = torch.zeros((), requires_grad=True)
    wrapped.requires_grad_(requires_grad=False)
    wrapped(gradients_of(context.world, context.rank, 0, 0, "all"), flow).backward()
    wrapped.requires_grad_(requires_grad=True)
    backward(context, wrapped)
    total = Unsharded(None)
    total.collect(context.world, 0, 1, "all")
    grads = named(total.model)
    compared = sum(require_same(p.grad, grads[name].grad, name) for name, p in named(wrapped).items())
    return {"flow": None if flow.grad is None else flow.grad.item(), "compared": compared}


def launched(context: RankContext, local_worlds: list[str]) -> str:
    """Ranks whose launcher says other things of their nodes; the sentence on every rank."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = local_worlds[context.rank]
    config = {"use_fsdp": True, "fsdp_sharding_strategy": "hybrid_shard"}
    try:
        build_strategy(config, device=CPU, local_rank=0).wrap(Model())
    except (ValueError, RankMismatchError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
    raise CheckFailedError("ranks that differ in LOCAL_WORLD_SIZE were not refused")


def own_optimizer(context: RankContext) -> dict[str, Any]:
    """A trainer's own optimizer steps while the module shows whole parameters: the next forward has the new ones."""
    gc.collect()  # strategies of other tasks
    before = len(_global_optimizer_pre_hooks)
    strategy, compared = _steps_whole(context)
    gone, during = weakref.ref(strategy), len(_global_optimizer_pre_hooks)
    del strategy
    gc.collect()
    return {
        "compared": compared,
        "gone": gone() is None,
        "hooks": [during - before, len(_global_optimizer_pre_hooks) - before],
    }


def _steps_whole(context: RankContext) -> tuple[FSDPStrategy, int]:
    config = {"use_mixed_precision": False, "fsdp_sharding_strategy": "shard_grad_op"}
    strategy = FSDPStrategy(config, device=CPU, local_rank=0)
    model = strategy.wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.root.full_tensor().clone()
    backward(context, model)
    model({}, torch.zeros((), requires_grad=True))  # a validation that forgot no_grad
    require(not isinstance(model.root, DTensor), "the root stays whole after a forward")
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    require(not isinstance(model.root, DTensor), "the step of another model is none of this one's")
    optimizer.step()
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(model.root.detach().clone()))
    model({}, torch.zeros((), requires_grad=True))
    expected = Unsharded(None)
    expected.collect(context.world, 0, 1, "all")
    grad = expected.model.root.grad
    assert grad is not None
    return strategy, require_same(seen[0], before - grad, "the next forward computes with the new weights")


def hidden(context: RankContext) -> dict[str, Any]:
    """Sharded parameters that whole ones hide (resharding switched off by hand) are measured and clipped alike."""
    strategy = FSDPStrategy({"use_mixed_precision": False}, device=CPU, local_rank=0)
    model = strategy.wrap(Model())
    optimizer = strategy.build_optimizer(model, torch.optim.SGD, lr=1.0)
    before = model.root.full_tensor().clone()
    model.set_reshard_after_backward(False)
    backward(context, model)
    require(not isinstance(model.root, DTensor), "the model shows whole parameters")
    require(model.root.grad is None, "which have no gradients")
    norm = strategy.clip_grad_norm(model, 1.0)
    optimizer.step()
    seen: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(model.root.detach().clone()))
    with torch.no_grad():
        model({}, torch.zeros(()))
    handle.remove()
    expected = Unsharded(1.0)
    expected.collect(context.world, 0, 1, "all")
    require_same(norm, expected.clip(), "norm")
    grad = expected.model.root.grad
    assert grad is not None
    compared = require_same(seen[0], before - grad, "the next forward computes with the new weights")
    # A forward that no backward follows, and whole parameters of it, when a step comes:
    model({}, torch.zeros((), requires_grad=True))
    require(not isinstance(model.root, DTensor), "the root stays whole after a forward")
    optimizer.step()
    seen.clear()
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(model.root.detach().clone()))
    model({}, torch.zeros((), requires_grad=True))
    handle.remove()
    compared += require_same(seen[0], before - grad - grad, "again")
    return {"compared": compared}


def nothing(context: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    """A step in which nothing has a gradient: norm 0, and the stats say why."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    model = strategy.wrap(Model())
    norm = strategy.clip_grad_norm(model, 1.0)
    stats = strategy.last_grad_clip_stats or {}
    return {"norm": norm.item(), "num_gradients": stats["num_gradients"]}


def checkpointing(context: RankContext) -> dict[str, Any]:
    """``gradient_checkpointing_enable`` is called before wrapping; its lack is a warning that names the class."""
    calls: list[bool] = []
    model = Model()
    model.gradient_checkpointing_enable = lambda: calls.append(isinstance(model.root, DTensor))
    for use_fsdp in (True, False):
        build_strategy({"use_fsdp": use_fsdp, "use_gradient_checkpointing": True}, device=CPU, local_rank=0).wrap(
            model if use_fsdp else with_enable(calls)
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DDPStrategy({"use_gradient_checkpointing": True}, device=CPU, local_rank=0).wrap(Model())
    return {"calls": calls, "warnings": [str(warning.message) for warning in caught]}


def with_enable(calls: list[bool]) -> Model:
    model = Model()
    model.gradient_checkpointing_enable = lambda: calls.append(isinstance(model.root, DTensor))
    return model


def clip_mixed(context: RankContext) -> dict[str, Any]:
    """One DTensor and one plain gradient of norms 3 and 4, bound 1: norm 5, joint norm 1 after, same direction."""
    mesh = device_mesh(CPU, (context.world,))
    sharded = DTensor.from_local(
        shard_of(torch.tensor([3.0, 0, 0, 0, 0]), context),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size([5]),
        stride=(1,),
    )
    plain = torch.tensor([0.0, 4.0])
    clipped = clip_([sharded, plain], 1.0)
    after = joint_norm([sharded, plain])
    return {
        "norm": clipped.norm.item(),
        "after": after.item(),
        "sharded": sharded.full_tensor().tolist(),
        "plain": plain.tolist(),
        "plain tensor": type(clipped.norm) is Tensor,
        "norms": {name: value.item() for name, value in clipped.stats["norms"].items()},
    }


def shard_of(whole: Tensor, context: RankContext) -> Tensor:
    """This rank's rows, as ``Shard(0)`` cuts them: the last may have fewer, or none."""
    chunks = list(torch.chunk(whole, context.world))
    return chunks[context.rank] if context.rank < len(chunks) else whole[:0]


def clip_placements(context: RankContext) -> dict[str, Any]:
    """Hybrid, replicated, partial, twice sharded and owned gradients: each element counted once. At world 4."""
    rank = context.rank
    hybrid = device_mesh(CPU, (2, 2))
    flat = device_mesh(CPU, (4,))
    whole = torch.arange(1.0, 9.0)  # squares: 204
    pieces = {
        "hybrid": DTensor.from_local(whole.chunk(2)[rank % 2].clone(), hybrid, [Replicate(), Shard(0)]),
        "replicated": DTensor.from_local(whole.clone(), hybrid, [Replicate(), Replicate()]),
        "flat": DTensor.from_local(whole.chunk(4)[rank].clone(), flat, [Shard(0)]),
        "partial": DTensor.from_local(whole / 4, flat, [Partial()]),
        "mean": DTensor.from_local(whole.clone(), flat, [Partial("avg")]),
        "partial shard": DTensor.from_local(whole.chunk(2)[rank % 2] / 2, hybrid, [Partial(), Shard(0)]),
        "both": DTensor.from_local(whole.chunk(4)[rank].clone(), hybrid, [Shard(0), Shard(0)]),
    }
    alone = {name: joint_norm([piece]).double().square().item() for name, piece in pieces.items()}
    owned = OwnedGradients([whole.clone()] if rank == 2 else [])
    mine = joint_norm([], [owned]).double().square().item()
    gradients = [*pieces.values(), whole.clone().bfloat16()]
    clipped = clip_(gradients, 1.0, owned=[owned])
    after = joint_norm(gradients, [owned])
    segments = clip_([pieces["flat"], whole.clone()], 0.5, clip_mode="segments")
    return {
        "alone": alone,
        "owned": mine,
        "squares": clipped.norm.double().square().item(),
        "norm": clipped.norm.item(),
        "after": after.item(),
        "segments": {name: value.item() for name, value in segments.stats["coefficient"].items()},
    }


def nonfinite(context: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    """One rank's gradient is infinite: all ranks decide alike."""
    seen: dict[str, Any] = {}
    for what in ("raise", "skip", "propagate"):
        strategy = build_strategy(config, device=CPU, local_rank=0)
        model = strategy.wrap(Model())
        backward(context, model, float("inf") if context.rank == context.world - 1 else 1.0)
        try:
            norm = strategy.clip_grad_norm(model, 1.0, on_nonfinite=what)  # type: ignore[arg-type]
        except GradientStateError as refusal:
            seen[what] = str(refusal)[:40]
            continue
        stats = strategy.last_grad_clip_stats or {}
        kept = sum(parameter.grad is not None for parameter in model.parameters())
        seen[what] = [bool(norm.isfinite()), stats["skipped"], kept]
    return seen


def same_bits(context: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    """Norms of any values have the same bits on every rank; replies them."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    model = strategy.wrap(Model())
    norms = []
    for step in range(5):
        generator = torch.Generator().manual_seed(step * 10 + context.rank)
        gradients = {name: torch.randn(p.shape, generator=generator) for name, p in Model().named_parameters()}
        model(gradients, torch.zeros((), requires_grad=True)).backward()
        norms.append(strategy.clip_grad_norm(model, 0.1).view(torch.int32).item())
    return {"norms": norms}


def other_mesh(context: RankContext) -> dict[str, Any]:
    """Gradients on a mesh that does not span the world (two meshes of two) are put together over their own alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    local = torch.tensor([3.0]) if context.rank % 2 == 0 else torch.tensor([4.0])
    return {"norm": joint_norm([DTensor.from_local(local, mesh, [Shard(0)])]).item()}


def one_group(context: RankContext) -> dict[str, Any]:
    """World 1 has no trainer's group, and nothing to share; training goes on all the same."""
    strategy = FSDPStrategy({}, device=CPU, local_rank=0)
    strategy.wrap(Model())
    assert strategy.layout is not None
    return {
        "group": strategy.layout.trainer_process_group is None,
        "axes": list(strategy.shard_axes),
        "world": dist.get_world_size(),
    }


def traffic(context: RankContext, config: dict[str, Any], defer: str, model: str) -> list[dict[str, int]]:
    """Reductions that each of three parts issues: two inside ``no_sync``, one outside; then a clip."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    wrapped = strategy.wrap(MODELS[model]())
    backward(context, wrapped)  # whatever is made at the first time
    issued: list[dict[str, int]] = []
    with counted(issued), strategy.no_sync(wrapped, defer=defer):  # type: ignore[arg-type]
        backward(context, wrapped)
    with counted(issued), strategy.no_sync(wrapped, defer=defer):  # type: ignore[arg-type]
        backward(context, wrapped)
    with counted(issued):
        backward(context, wrapped)
    with counted(issued):
        strategy.clip_grad_norm(wrapped, 1.0)
    return issued


@contextlib.contextmanager
def counted(issued: list[dict[str, int]]) -> Iterator[None]:
    """Append how often each kind of reduction, and the gathering of parameters, was called on ``torch.distributed``."""
    kinds = {
        "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
        "all_reduce": ("all_reduce",),
        "all_gather": ("all_gather_into_tensor", "all_gather_single"),
    }
    counts = dict.fromkeys(kinds, 0)
    originals = {name: getattr(dist, name) for names in kinds.values() for name in names if hasattr(dist, name)}

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return function(*args, **kwargs)

        return call

    for kind, names in kinds.items():
        for name in names:
            if name in originals:
                setattr(dist, name, counting(kind, originals[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
        issued.append(counts)


def skipped(context: RankContext) -> dict[str, Any]:
    """A block that no rank ever runs has no gradients, and is in nobody's way."""
    strategy = FSDPStrategy({}, device=CPU, local_rank=0)
    wrapped = strategy.wrap(Model())
    blocks = wrapped.blocks
    wrapped.forward = lambda gradients, flow: blocks[0](flow + linear(wrapped.root, gradients["root"]), gradients)
    gradient = values((6, 3), 9) * context.world
    for part in range(2):
        with strategy.no_sync(wrapped) if part == 0 else contextlib.nullcontext():
            wrapped({"root": gradient}, torch.zeros((), requires_grad=True)).backward()
    strategy.flush(wrapped)
    return {
        "compared": require_same(wrapped.root.grad, 2 * gradient, "both parts"),
        "none": [name for name, parameter in wrapped.named_parameters() if parameter.grad is None],
    }


def buffers(context: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    """Buffers are rank 0's after wrapping, and frozen parameters too."""
    model = Model(offset=float(context.rank))
    model.register_buffer("table", torch.full((4,), float(context.rank)))
    model.blocks[0].second.requires_grad_(requires_grad=False)
    wrapped = build_strategy(config, device=CPU, local_rank=0).wrap(model)
    frozen = named(wrapped)["blocks.0.second"]
    require_same(frozen, values((3,), 3), "the frozen parameter")
    return {"table": dict(wrapped.named_buffers()).popitem()[1].tolist(), "takes gradients": frozen.requires_grad}


def fails(context: RankContext, config: dict[str, Any], model: str) -> dict[str, Any]:
    """A backward that raises halfway, alike on all ranks; what is discarded then is in no later step."""
    strategy = build_strategy(config, device=CPU, local_rank=0)
    wrapped = strategy.wrap(MODELS[model]())
    gradients = gradients_of(context.world, context.rank, 0, 0, "all")

    handle = wrapped.blocks[0].register_full_backward_hook(fail)
    loss = wrapped(gradients, torch.zeros((), requires_grad=True))
    try:
        loss.backward()
    except ArithmeticError:
        handle.remove()
    else:
        raise CheckFailedError("the backward did not fail")
    try:
        strategy.clip_grad_norm(wrapped, 1.0)
    except GradientStateError as refusal:
        said = str(refusal)
    strategy.discard(wrapped)
    wrapped.zero_grad()
    require(strategy.clip_grad_norm(wrapped, None).item() == 0, "nothing is left of it")
    total = Unsharded(None)
    total.collect(context.world, 0, 1, "all")
    compared = 0
    for _ in range(2):
        loss = wrapped(gradients, torch.zeros(()))  # as of tokens: the input takes no gradient
        if model != "default":
            # A backward that does not pass the model's output is the first after the one that failed.
            plain = named(wrapped)["blocks.1.plain"]
            linear(plain, gradients["blocks.1.plain"]).backward()
            compared += require_same(plain.grad, total.model.blocks[1].plain.grad, "the plain parameter")
            plain.grad = None
        loss.backward()
        for name, expected in named(total.model).items():
            compared += require_same(named(wrapped)[name].grad, expected.grad, name)
        wrapped.zero_grad()
    return {"compared": compared, "said": said}
