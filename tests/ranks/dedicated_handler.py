"""What the ranks of test_dedicated.py do: a task is JSON ``{"do": name, **arguments}``, the reply JSON."""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harness.launch.rank import RankContext
from tests.ranks.dedicated_model import ADAMW, INFO, MUON, Model, Reference, require, same_bits
from zero2core import collectives
from zero2core.errors import GradientStateError
from zero2core.strategies import dedicated
from zero2core.strategies.dmuon import DMuonFSDPStrategy

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def serve(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Handler of the pool."""
    torch.set_num_threads(1)

    def work(task: bytes) -> bytes:
        order = json.loads(task)
        function = globals()[order.pop("do")]
        return json.dumps(function(context, **order)).encode()

    return work


def unused(step: int, part: int, rank: int, name: str) -> bool:
    """Two matrices are unused on all ranks but 0, one on all in step 1, one in the first part."""
    return (
        (name in ("blocks.1.wide", "top") and rank > 0)
        or (name == "blocks.0.stack" and step == 1)
        or (name == "blocks.2.wide" and part == 0)
        or (name == "blocks.2.stack" and rank == 0)
    )


def strategy(context: RankContext, **config: Any) -> DMuonFSDPStrategy:
    config = {"use_fsdp": True, "use_mixed_precision": False} | config
    return DMuonFSDPStrategy(config, device=CPU, local_rank=context.rank)


def train(
    context: RankContext,
    *,
    accumulation: str = "sync",
    max_norm: float | None = None,
    missing: bool = False,
    dtype: str = "fp32",
    remat: bool | None = None,
    **config: Any,
) -> dict[str, int]:
    """Three steps of two parts with FSDP2, each stage compared with the unsharded trainer."""
    mixed = config.get("use_mixed_precision", False)
    # Sums over four ranks and two parts of multiples of four have to fit bf16's 8 bits, or fp32's 24.
    most = 7 if "bf16" in (config.get("fsdp_reduce_dtype"), dtype) or mixed else 63
    reference = Reference(context.world, most=most, missing=unused if missing else None, dtype=DTYPES[dtype])
    wrapper = strategy(context, **config, unused_parameters=missing)
    model = cast(Model, wrapper.wrap(Model(seed=context.rank, dtype=DTYPES[dtype], remat=remat)))
    held = wrapper.dedicated(model)
    optimizer = wrapper.build_optimizer(model, muon=MUON, foreach=False, **ADAMW)
    compared = shown = 0
    for step in range(3):
        for part in range(2):
            waits = accumulation != "sync" and (part == 0 or accumulation == "flush")
            defer = "all_reduce" if accumulation == "deferred" else "gradients"
            with wrapper.no_sync(model, defer=defer) if waits else nullcontext():  # type: ignore[arg-type]
                with wrapper.no_sync(model) if waits and accumulation == "nested" else nullcontext():
                    pass
                model(reference.contribution(step, part, context.rank)).backward()
            shown += compare_shown(model, reference, torch.bfloat16 if mixed else DTYPES[dtype])
        if accumulation == "flush":
            wrapper.flush(model)
        mean = reference.mean(step, 2)
        compared += compare_gradients(model, held, mean)
        norm = wrapper.clip_grad_norm(model, max_norm, optimizer=optimizer)
        compared += same_bits("the norm", norm, reference.step(mean, max_norm))
        compared += compare_gradients(model, held, reference.clipped)
        optimizer.step()
        optimizer.zero_grad()
        compared += reference.compare(held, context.rank)
        if dtype == "fp32":  # FSDP2 steps bf16 parameters without fp32 masters
            for name, parameter in model.named_parameters():
                compared += same_bits(name, cast("DTensor", parameter).full_tensor(), reference.parameters[name])
    return {"compared": compared, "shown": shown, "owned": sum(p.is_owner for p in held.values())}


def compare_shown(model: Model, reference: Reference, dtype: torch.dtype) -> int:
    """What forwards computed with since the last call; the dedicated weights are those of the master, rounded once."""
    shown, model.shown = model.shown, []
    return sum(same_bits(f"{name} in a forward", weight, reference.master(name).to(dtype))
               for name, weight in shown if name in INFO)  # fmt: skip


def compare_gradients(model: Model, held: Any, expected: Any) -> int:
    """Of everything, after a reduction."""
    compared = 0
    for name, parameter in held.items():
        require(parameter.waiting is None, f"{name} was not let go of")
        if expected[name] is None or not parameter.is_owner:
            require(parameter.grad is None, f"{name} has a gradient on a rank where it should have none")
        else:
            require(parameter.grad is not None, f"{name} has no gradient")
            compared += same_bits(f"gradient of {name}", parameter.grad, expected[name].float())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        require((gradient is None) == (expected[name] is None), f"{name} has {gradient} for {expected[name]}")
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            compared += same_bits(f"gradient of {name}", whole, expected[name].to(whole.dtype))
    return compared


def bare(
    context: RankContext, *, keep: str, remat: bool | None = None, order: list[int] | None = None, tie: bool = False
) -> dict[str, int]:
    """Without FSDP2: recomputation, blocks used twice or not at all, a tied matrix, evaluation between the parts."""
    order = order or [0, 1, 2]
    reference = Reference(context.world, most=15)
    model = Model(seed=0, remat=remat)
    model.order = order
    if tie:
        model.blocks[2].wide = model.blocks[0].wide
    runtime = dedicated.dedicate(model, keep=keep)  # type: ignore[arg-type]
    held = runtime.parameters
    optimizer = dedicated.build_optimizer(model, torch.optim.SGD, muon=MUON, lr=0.0)

    def times(name: str) -> int:
        return order.count(int(name.split(".")[1])) if name.startswith("blocks") else 1

    compared = 0
    for step in range(2):
        for part in range(2):
            with dedicated.no_sync(model) if part == 0 else nullcontext():
                given = reference.contribution(step, part, context.rank)
                model(given).backward()
            with torch.no_grad():
                model(given)
            if not tie:
                compared += compare_shown(model, reference, torch.float32)
            stored = {name for name, parameter in held.items() if parameter.has_storage}
            require(not stored if keep == "z3" else "top" in stored, f"{keep}: {sorted(stored)} have storage")
        mean = reference.mean(step, 2, times)
        if tie:
            first, second = mean["blocks.0.wide"], mean["blocks.2.wide"]
            assert first is not None
            assert second is not None
            mean["blocks.0.wide"] = first + second
            require("blocks.2.wide" not in held, "a tied matrix is dedicated twice")
            for name, parameter in held.items():
                if parameter.is_owner:
                    compared += same_bits(name, parameter.grad, mean[name])  # type: ignore[arg-type]
            optimizer.zero_grad()
            continue
        for name, parameter in held.items():
            if mean[name] is None or not parameter.is_owner:
                require(parameter.grad is None, f"{name} has a gradient")
            else:
                compared += same_bits(name, parameter.grad, mean[name])  # type: ignore[arg-type]
        reference.step(mean, None)
        optimizer.step()
        optimizer.zero_grad()
        stored = {name for name, parameter in held.items() if parameter.has_storage}
        require(not stored, f"{sorted(stored)} have storage after a step")
        compared += reference.compare(held, context.rank)
    return {"compared": compared}


def clip(context: RankContext, *, dedicated_norm: float, other_norm: float) -> dict[str, Any]:
    """One dedicated gradient of a norm, and one of FSDP2 of another; joint norm, and apart."""
    wrapper = strategy(context)
    model = cast("Model", wrapper.wrap(Model(seed=0)))
    held = wrapper.dedicated(model)
    optimizer = wrapper.build_optimizer(model, muon=MUON, **ADAMW)
    gradients = dict.fromkeys([*INFO, *dict(model.named_parameters())])
    gradients["top"], gradients["blocks.1.bias"] = torch.zeros(8, 6), torch.zeros(7)
    gradients["top"][3, 2], gradients["blocks.1.bias"][5] = dedicated_norm, other_norm  # type: ignore[index]
    model(gradients).backward()
    try:
        wrapper.clip_grad_norm(model, 1.0)
    except GradientStateError as error:
        refused = str(error)
    alone = dedicated.clip_grad_norm_(optimizer, float("inf"))
    before = wrapper.clip_grad_norm(model, None, optimizer=optimizer)
    norm = wrapper.clip_grad_norm(model, 1.0, optimizer=optimizer)
    after = wrapper.clip_grad_norm(model, None, optimizer=optimizer)
    other = cast("DTensor", model.blocks[1].bias.grad).full_tensor()[5].item()
    own = held["top"].grad
    stats = cast("dict[str, Any]", wrapper.last_grad_clip_stats)["norms"]
    own = None if own is None else own.clone()

    # What is not finite on one owner is dropped everywhere.
    weights = dedicated.full_state(model)
    gradients["top"][0, 0] = float("inf")  # type: ignore[index]
    model(gradients).backward()
    wrapper.clip_grad_norm(model, 1.0, optimizer=optimizer, on_nonfinite="skip")
    skipped = cast("dict[str, Any]", wrapper.last_grad_clip_stats)["skipped"]
    optimizer.step()
    left = [name for name, parameter in held.items() if parameter.grad is not None]
    moved = [n for n, w in dedicated.full_state(model).items() if not torch.equal(w, weights[n])]
    # What waits can be forgotten, also where FSDP2 has nothing that does.
    gradients["blocks.1.bias"] = None
    with wrapper.no_sync(model):
        model(gradients).backward()
    waits = wrapper.has_pending(model)
    wrapper.discard(model)
    forgotten = not wrapper.has_pending(model)
    wrapper.flush(model)
    left += [name for name, parameter in held.items() if parameter.grad is not None or parameter.waiting is not None]
    return {
        "dropped": [skipped, left, moved, waits, forgotten],
        "refused": refused,
        "alone": alone.as_dict()["total_norm"].item(),
        "norms": [before.item(), norm.item(), after.item()],
        "kinds": [type(norm) is Tensor, norm.dtype == torch.float32, norm.dim() == 0],
        "own": None if own is None else own[3, 2].item(),
        "other": other,
        "stats": {name: norm.item() for name, norm in stats.items()},
    }


def memory(context: RankContext, *, keep: str) -> dict[str, int]:
    """Bytes of every dedicated matrix that are live on this rank, at rest and in a forward."""
    model = Model(seed=0)
    elements = sum(model.get_parameter(name).numel() for name in INFO)
    old = [model.get_parameter(name) for name in INFO]
    runtime = dedicated.dedicate(model, keep=keep, compute_dtype=torch.bfloat16)  # type: ignore[arg-type]
    optimizer = dedicated.build_optimizer(model, torch.optim.SGD, lr=0.0)
    registered = {id(parameter) for parameter in model.parameters()}
    require(not any(id(parameter) in registered for parameter in old), "a dedicated parameter is still registered")

    def live() -> int:
        tensors = [
            tensor
            for parameter in runtime.parameters.values()
            for tensor in (*vars(parameter).values(),)
            if isinstance(tensor, Tensor)
        ]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for pointer, size in storages.items() if pointer)

    def weights() -> int:
        return sum(parameter.leaf.untyped_storage().nbytes() for parameter in runtime.parameters.values())

    rest = live()
    reference = Reference(context.world, most=15)
    peaks: list[int] = []
    for parameter in runtime.parameters.values():
        parameter.leaf.register_hook(lambda gradient: peaks.append(weights()))
    model(reference.contribution(0, 0, context.rank)).backward()
    reduced = live()
    optimizer.zero_grad()
    cleared = live()
    optimizer.step()
    return {
        "elements": elements,
        "owned": sum(p.shape.numel() for p in runtime.parameters.values() if p.is_owner),
        "rest": rest,
        "reduced": reduced,
        "cleared": cleared,
        "stepped": live(),
        "peak": max(peaks),
    }


def life(context: RankContext) -> dict[str, Any]:
    """What else a trainer does: schedules, saves and loads, fails in a backward, asks for single gradients."""
    model = Model(seed=0)
    runtime = dedicated.dedicate(model)
    optimizer = dedicated.build_optimizer(model, torch.optim.AdamW, muon=MUON, **ADAMW)
    reference = Reference(context.world, most=15)

    def given(step: int) -> Any:
        return reference.contribution(step, 0, context.rank)

    def run(step: int) -> None:
        model(given(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    said: dict[str, Any] = {}
    run(0)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = dedicated.full_state(model)
    others = copy.deepcopy(model.state_dict())
    run(1)
    once = dedicated.full_state(model)
    optimizer.load_state_dict(saved)
    model.load_state_dict(others)
    require(all(torch.equal(w, weights[n]) for n, w in dedicated.full_state(model).items()), "loading lost weights")
    run(1)
    again = dedicated.full_state(model)
    said["compared"] = sum(same_bits(name, again[name], once[name]) for name in once)
    require(not any(torch.equal(once[name], weights[name]) for name in once), "a step changed nothing")

    dedicated.load_full_state(model, weights)
    model.shown.clear()
    with torch.no_grad():
        model(given(2))
    shown = dict(model.shown)
    said["compared"] += sum(same_bits(name, shown[name], weights[name]) for name in weights)

    # A learning rate of 0 in the last group stops Muon alone.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch == 0))
    schedule.step()
    said["rates"] = [group["lr"] for group in optimizer.param_groups]
    run(2)
    still = dedicated.full_state(model)
    said["compared"] += sum(same_bits(name, still[name], weights[name]) for name in weights)

    # A backward that fails halfway, alike on all ranks, then a whole one.
    loss = model(given(3))
    handle = runtime.parameters["blocks.0.stack"].leaf.register_hook(fail)
    said["failed"] = told(loss.backward)
    handle.remove()
    said["unended"] = told(optimizer.step)
    optimizer.zero_grad()
    model(given(3)).backward()
    compared = {name: parameter for name, parameter in runtime.parameters.items() if parameter.is_owner}
    mean = reference.mean(3, 1)
    for name, parameter in compared.items():
        said["compared"] += same_bits(name, parameter.grad, mean[name])  # type: ignore[arg-type]

    # The gradient of something else, inside a loop: nothing is lost of what is there.
    probe = model(given(4))
    torch.autograd.grad(probe, [model.scale])
    for name, parameter in compared.items():
        said["compared"] += same_bits(name, parameter.grad, mean[name])  # type: ignore[arg-type]

    with dedicated.no_sync(model):
        with dedicated.no_sync(model):
            pass
        model(given(5)).backward()
    said["waiting"] = [told(optimizer.step), told(lambda: dedicated.clip_grad_norm_(optimizer, 1.0))]
    dedicated.flush(model)
    optimizer.step()
    # Of dedicated matrices alone: what the other optimizer changes in place, autograd finds by itself.
    old = model({name: gradient if name in INFO else None for name, gradient in given(6).items()})
    optimizer.step()
    said["old"] = told(old.backward)
    optimizer.zero_grad()
    model(given(6))
    said["outside"] = told(lambda: torch.ones(6) @ model.blocks[0].wide)
    said["shape"] = list(model.blocks[0].wide.shape)
    said["attribute"] = told(lambda: model.blocks[0].wide.T)
    said["twice"] = told(lambda: dedicated.dedicate(model))
    return said


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("a hook of the user's")


def told(function: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        function()
    except (RuntimeError, ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ranks_differ(context: RankContext) -> str:
    """Another mark on the last rank."""
    model = Model(seed=0)
    if context.rank == context.world - 1:
        del model.top
        model.top = nn.Parameter(torch.randn(8, 6))
    return told(lambda: dedicated.dedicate(model))


def package(context: RankContext) -> dict[str, Any]:
    """A stand-in for an installed package, which clips by its own norm: asked for stats, the joint factor is ours."""
    calls: list[str] = []
    module = types.ModuleType("dmuon")

    def clip_grad_norm_(optimizer: Any, max_norm: float) -> Any:
        calls.append(f"clip {max_norm}")
        return dedicated.clip_grad_norm_(optimizer, max_norm)

    def no_sync(model: nn.Module) -> Any:
        calls.append("no_sync")
        return dedicated.no_sync(model)

    def build_optimizer(*args: Any, **settings: Any) -> Any:
        optimizer = dedicated.build_optimizer(*args, **settings)
        optimizer.dedicated_gradients = optimizer.runtime.clipped_gradients  # type: ignore[attr-defined]
        return optimizer

    module.dedicate, module.no_sync = dedicated.dedicate, no_sync  # type: ignore[attr-defined]
    module.clip_grad_norm_, module.build_optimizer = clip_grad_norm_, build_optimizer  # type: ignore[attr-defined]
    sys.modules["dmuon"] = module
    try:
        wrapper = DMuonFSDPStrategy(
            {"use_fsdp": True, "use_mixed_precision": False}, device=CPU, local_rank=context.rank, runtime="dmuon"
        )
        reference = Reference(context.world, most=15)
        model = cast("Model", wrapper.wrap(Model(seed=0)))
        optimizer = wrapper.build_optimizer(model, muon=MUON, foreach=False, **ADAMW)
        with wrapper.no_sync(model):
            model(reference.contribution(0, 0, context.rank)).backward()
        model(reference.contribution(0, 1, context.rank)).backward()
        mean = reference.mean(0, 2)
        without = told(lambda: wrapper.clip_grad_norm(model, 8.0))
        norm = wrapper.clip_grad_norm(model, 8.0, optimizer=optimizer)
        compared = same_bits("the norm", norm, reference.step(mean, 8.0))
        compared += compare_gradients(model, dedicated.dedicated_of(model), reference.clipped)
        optimizer.step()
        optimizer.zero_grad()
        compared += reference.compare(dedicated.dedicated_of(model), context.rank)
        stats = cast("dict[str, Any]", wrapper.last_grad_clip_stats)
        return {
            "calls": calls,
            "compared": compared,
            "without": without,
            "flush": told(lambda: wrapper.flush(model)),
            "own": float(stats["dmuon"]["total_norm"]) == float(stats["norms"]["owned"]),
        }
    finally:
        del sys.modules["dmuon"]


class Converts(Model):
    """Shards its blocks, and not its root; matrices of ``INFO`` are all that blocks train."""

    def convert_to_fsdp(
        self, *, mesh: Any, mp_policy: Any, offload_policy: Any, reshard_after_forward: bool, use_dmuon: bool
    ) -> None:
        require(use_dmuon, "convert_to_fsdp was not told of dedicated parameters")
        for block in self.blocks:
            require("wide" not in dict(block.named_parameters()), "a dedicated matrix is in a block still")
            del block.bias
            block.register_buffer("bias", torch.zeros(7))
            fully_shard(block, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)


def converts(context: RankContext) -> dict[str, int]:
    """Units without parameters, and a plain one in the root."""
    reference = Reference(context.world, most=15, missing=lambda step, part, rank, name: "bias" in name)
    wrapper = strategy(context)
    model = cast("Model", wrapper.wrap(Converts(seed=context.rank)))
    optimizer = wrapper.build_optimizer(model, muon=MUON, foreach=False, **ADAMW)
    held = wrapper.dedicated(model)
    compared = 0
    for step in range(2):
        model(reference.contribution(step, 0, context.rank)).backward()
        mean = reference.mean(step, 1)
        norm = wrapper.clip_grad_norm(model, 8.0, optimizer=optimizer)
        compared += same_bits("the norm", norm, reference.step(mean, 8.0))
        compared += compare_gradients(model, held, reference.clipped)
        optimizer.step()
        optimizer.zero_grad()
        compared += reference.compare(held, context.rank)
        compared += same_bits("scale", model.scale, reference.parameters["scale"])
    return {"compared": compared}


class Shell(nn.Module):
    """What :class:`Returns` becomes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, gradients: Any) -> Tensor:
        return cast("Tensor", self.inner(gradients))


class Returns(Model):
    """A conversion that gives another module back."""

    def convert_to_fsdp(self, *, mesh: Any, **_: Any) -> nn.Module:
        return Shell(fully_shard(self, mesh=mesh))


def another_module(context: RankContext) -> dict[str, Any]:
    """``zero_grad`` of the module that a conversion returned forgets dedicated gradients, reduced or not."""
    wrapper = strategy(context)
    model = wrapper.wrap(Returns(seed=0))
    held = wrapper.dedicated(model)
    gradients = Reference(context.world, most=15).contribution(0, 0, context.rank)
    model(gradients).backward()
    kept = [sum(parameter.grad is not None for parameter in held.values())]
    with wrapper.no_sync(model):
        model(gradients).backward()
    kept.append(sum(parameter.waiting is not None for parameter in held.values()))
    model.zero_grad()
    left = [name for name, parameter in held.items() if parameter.grad is not None or parameter.waiting is not None]
    return {"type": type(model).__name__, "kept": kept, "left": left}


def reductions(context: RankContext) -> dict[str, Any]:
    """How many reductions to owners are in flight at once; and one that fails leaves gradients that wait."""
    model = Model(seed=0)
    runtime = dedicated.dedicate(model)
    gradients = Reference(context.world, most=15).contribution(0, 0, context.rank)
    flying: list[int] = []
    counts: list[int] = []
    original = collectives.reduce

    class Counted:
        def __init__(self, work: Any, number: int) -> None:
            self.work, self.number = work, number

        def wait(self) -> None:
            self.work.wait()
            flying.remove(self.number)

    def counted(*args: Any, **options: Any) -> Any:
        flying.append(len(counts))
        counts.append(len(flying))
        return Counted(original(*args, **options), flying[-1])

    def failing(*args: Any, **options: Any) -> Any:
        raise ArithmeticError("a lost connection")

    try:
        collectives.reduce = counted
        model(gradients).backward()
        runtime.clear_gradients()
        collectives.reduce = failing
        failed = told(model(gradients).backward)
    finally:
        collectives.reduce = original
    return {"counts": counts, "left": flying, "failed": failed, "pending": runtime.pending}


def refused(context: RankContext) -> dict[str, Any]:
    """What FSDP2 cannot shard is refused while the model still has its matrices: mended, it can be wrapped."""
    said = []
    for case in ("scalar", "tied", "dtypes"):
        model = Model(seed=0)
        second = model.blocks[2]
        if case == "scalar":
            second.temperature = nn.Parameter(torch.ones(()))
        elif case == "tied":
            second.bias = model.blocks[0].bias
        else:
            second.extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        said.append(told(lambda model=model: strategy(context).wrap(model)))
        require(set(INFO) <= set(dict(model.named_parameters())), f"{case}: a refusal has taken matrices out")
        if case == "tied":
            second.bias = nn.Parameter(torch.ones(7))
        else:
            delattr(second, "temperature" if case == "scalar" else "extra")
        wrapper = strategy(context)
        require(set(wrapper.dedicated(wrapper.wrap(model))) == set(INFO), f"{case}: mended, it is not dedicated")
    return {"said": said}


def all_dedicated(context: RankContext) -> dict[str, Any]:
    """Nothing is left to FSDP2: ``zero_grad`` then forgets all there is."""
    model = Model(seed=0)
    for module, name in [*((block, "bias") for block in model.blocks), (model, "scale")]:
        delattr(module, name)
        module.register_buffer(name, torch.zeros(7))
    wrapper = strategy(context)
    wrapped = cast("Model", wrapper.wrap(model))
    optimizer = wrapper.build_optimizer(wrapped, muon=MUON)
    gradients = Reference(context.world, most=15).contribution(0, 0, context.rank)
    with wrapper.no_sync(wrapped, defer="all_reduce"):
        wrapped({name: g if name in INFO else None for name, g in gradients.items()}).backward()
    waits = told(lambda: wrapper.clip_grad_norm(wrapped, 1.0, optimizer=optimizer))
    optimizer.zero_grad()
    norm = wrapper.clip_grad_norm(wrapped, 1.0, optimizer=optimizer).item()
    return {"waits": waits, "norm": norm}


def groups(context: RankContext) -> dict[str, list[str]]:
    """Which blocks a rank's collectives came in: the same on every rank, whatever it uses."""
    seen: list[str] = []
    original = dist.broadcast

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"broadcast {tuple(tensor.shape)} from {options.get('group_src')}")
        return original(tensor, *args, **options)

    reference = Reference(context.world, most=15, missing=unused)
    model = Model(seed=0)
    dedicated.dedicate(model, keep="z3")
    dist.broadcast = counted  # type: ignore[assignment]
    try:
        model(reference.contribution(0, 0, context.rank)).backward()
    finally:
        dist.broadcast = original
    return {"seen": seen}
