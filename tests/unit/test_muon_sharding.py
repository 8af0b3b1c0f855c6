"""The sharded Muon optimizer in one process: its configuration, its plan, and what it is as an optimizer."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness.sim.world import SimWorld
from tests.ranks.muon_training import (
    INFO,
    SHAPES,
    Setup,
    Trainer,
    Unsharded,
    elements,
    require_every_element_once,
    same_bits,
    train,
)
from zero2core import (
    GradientStateError,
    MuonAdamW,
    MuonParamInfo,
    MuonShardingConfig,
    MuonShardingOptimizer,
)
from zero2core.muon import get_same_card_rank, get_trainer_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


# Configuration


def test_defaults_are_those_of_the_specification() -> None:
    expected: dict[str, Any] = {
        "comm_buffer_size_mb": 256,
        "owner_rule": "newton_schulz",
        "owner_cap": 1.3,
        "use_reduce_avg": True,
        "comm_overlap": False,
        "accumulate_steps": 1,
        "release_gradients": False,
        "fuse_optimizer_states": False,
        "two_hop": False,
        "local_world_size": None,
        "skip_missing": False,
        "colors": {},
        "color_divisors": {},
    }
    config = MuonShardingConfig()
    assert {name: getattr(config, name) for name in expected} == expected
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.two_hop = True  # type: ignore[misc]
    with pytest.raises(TypeError, match="overlap"):
        MuonShardingConfig(overlap=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("comm_buffer_size_mb", ["256", None, math.nan, math.inf, -math.inf, True]),
        ("owner_rule", ["cost", None, "", 0, []]),
        ("owner_cap", [0.99, 0, -1, None, "1.3", math.nan, math.inf, True]),
        ("accumulate_steps", [0, -1, 1.5, None, "2", True]),
        ("local_world_size", [0, -1, 2.0, "2", True]),
        ("use_reduce_avg", [None, 1, "yes"]),
        ("comm_overlap", [None, 0]),
        ("release_gradients", [None, 1]),
        ("fuse_optimizer_states", [None, 1]),
        ("two_hop", [None, 1]),
        ("skip_missing", [None, 1]),
        ("colors", [None, [("a", 1, None)], {"a": 1}, {"a": ("k",)}, {"a": ("k", None, None)}, {"a": ["k", None]}]),
        ("colors", [{"a": (["unhashable"], None)}, {1: ("k", None)}, {"a": ("k", "group")}, {"a": (math.nan, None)}]),
        ("color_divisors", [None, {"k": 0}, {"k": -1}, {"k": math.nan}, {"k": math.inf}, {"k": None}, {"k": True}]),
    ],
)
def test_values_that_cannot_be_are_refused(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises((ValueError, TypeError), match=field):
            MuonShardingConfig(**{field: value})


@pytest.mark.parametrize("field", [{"comm_buffer_size_mb": 0}, {"comm_buffer_size_mb": -5}, {"owner_cap": 1}])
def test_values_at_the_edge_are_taken(field: dict[str, Any]) -> None:
    assert MuonShardingConfig(**field)


def test_parallelisms_that_do_not_go_are_refused_with_the_size() -> None:
    with pytest.raises(NotImplementedError, match="4"):
        MuonShardingConfig(tensor_parallel_size=4)
    with pytest.raises(NotImplementedError, match="pipeline"):
        MuonShardingConfig(pipeline_overlap=True)


def test_names_of_the_default_color_are_one() -> None:
    divisors = [{None: 2.0}, {-1: 2.0}]
    plans = []
    for colors in ({}, {"tall": None}, {"tall": (None, None)}, {"tall": (-1, None)}):
        for color_divisors in divisors:
            params = Setup().parameters()
            config = MuonShardingConfig(colors=colors, color_divisors=color_divisors)
            plans.append(str(MuonShardingOptimizer(MuonAdamW(params.items(), INFO), config=config).plan))
    assert len(set(plans)) == 1


def test_two_divisors_of_the_default_color_are_refused() -> None:
    config = MuonShardingConfig(color_divisors={None: 2.0, -1: 3.0})
    with pytest.raises(ValueError, match="color_divisors"):
        MuonShardingOptimizer(MuonAdamW(Setup().parameters().items(), INFO), config=config)


# Routes


@pytest.mark.parametrize(
    ("ranks", "rank", "size", "expected"),
    [
        ([0, 2, 5], 4, 4, 5),
        ([0, 2, 5], 3, 2, 2),
        ([0, 2, 5], 6, 2, -1),
        ([], 0, 2, -1),
        ([1], 1, 1, 1),
        ([0, 8, 16], 15, 8, 8),
        ([3, 1], 0, 4, 3),
    ],
)
def test_the_member_on_the_same_node(ranks: list[int], rank: int, size: int, expected: int) -> None:
    assert get_same_card_rank(ranks, rank, size) == expected


def test_the_ranks_of_a_node() -> None:
    assert get_trainer_ranks(5, 4) == (1, range(4, 8))
    assert get_trainer_ranks(0, 1) == (0, range(1))
    for rank, size in [(-1, 4), (0, 0), (0, -2)]:
        with pytest.raises(ValueError, match="local_world_size"):
            get_trainer_ranks(rank, size)


# One process, and odd models


MATRIX, VECTOR = MuonParamInfo(use_muon=True), MuonParamInfo()


@pytest.mark.parametrize(
    ("shapes", "info"),
    [
        ({"w": (6, 4)}, {"w": MATRIX}),
        ({"b": (5,)}, {"b": VECTOR}),
        ({"b": ()}, {"b": VECTOR}),
        ({"b": (1,), "w": (1, 1)}, {"b": VECTOR, "w": MATRIX}),
        ({"w": (4, 4), "none": (0,), "b": (3,)}, {"w": MATRIX, "none": VECTOR, "b": VECTOR}),
        ({"none": (0, 4), "b": (3,)}, {"none": VECTOR, "b": VECTOR}),
        ({"none": (0, 4), "w": (4, 2)}, {"none": MATRIX, "w": MATRIX}),
        ({"none": (0,)}, {"none": VECTOR}),
        ({"deep": (2, 3, 4, 5)}, {"deep": MATRIX}),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_odd_models(shapes: dict[str, tuple[int, ...]], info: dict[str, MuonParamInfo], world: int) -> None:
    """Single parameters, parameters without elements, more ranks than parameters."""
    configs = [{}, {"comm_overlap": True, "skip_missing": True, "fuse_optimizer_states": True}]
    for config in configs:
        setup = Setup(shapes, info, config, parts=(1, 2), dtypes=(torch.float32, torch.bfloat16))
        replies = SimWorld(world).run(train(setup, world)).values()
        require_every_element_once(setup, [reply["held"] for reply in replies])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_process_without_a_group(dtype: torch.dtype) -> None:
    setup = Setup(dtypes=(dtype,), config={"comm_buffer_size_mb": elements(100), "comm_overlap": True})
    assert train(setup, 1)(0)["moved"]


def test_two_hops_and_colors_in_one_process() -> None:
    params = Setup().parameters()
    config = MuonShardingConfig(two_hop=True, local_world_size=1, colors={"tall": ("e", None)}, color_divisors={"e": 2})
    opt = MuonShardingOptimizer(MuonAdamW(params.items(), INFO), config=config)
    params["tall"].grad = torch.full_like(params["tall"], 4)
    opt.reduce_gradients()
    tall = next(shard for shard in opt.local_shards() if shard.name == "tall")
    assert tall.gradient is not None
    assert (tall.gradient == 2).all()


# As an optimizer


def trainer(**fields: Any) -> Trainer:
    return Trainer(0, Setup(**fields))


def test_it_is_an_optimizer_with_the_inner_ones_groups() -> None:
    made = trainer()
    opt = made.opt
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups[0] is made.inner.param_groups[0]
    assert opt.state is made.inner.state
    assert opt.defaults == made.inner.defaults
    with pytest.raises((TypeError, NotImplementedError)):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(opt.param_groups) == 2


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 3),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, [0.1, 0.2], 6, cycle_momentum=False),
        lambda opt: torch.optim.lr_scheduler.SequentialLR(
            opt,
            [torch.optim.lr_scheduler.LinearLR(opt, 0.1), torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)],
            [1],
        ),
    ],
    ids=["lambda", "cosine", "one cycle", "sequence"],
)
def test_schedulers_steer_it(scheduler: Any) -> None:
    made = trainer()
    reference = Unsharded(made.setup, 1)
    schedulers = [scheduler(made.opt), scheduler(reference.optimizer)]
    rates = []
    for step in range(3):
        made.step(step)
        reference.step(step)
        reference.require_same(made, f"step {step}")
        for each in schedulers:
            each.step()
        rates.append(made.opt.param_groups[0]["lr"])
    assert len(set(rates)) > 1


def test_hooks_of_torch_are_called() -> None:
    made = trainer()
    called: list[str] = []
    made.opt.register_step_pre_hook(lambda *_: called.append("pre"))
    made.opt.register_step_post_hook(lambda *_: called.append("post"))
    made.step(0)
    assert called == ["pre", "post"]


def test_a_closure_is_refused() -> None:
    made = trainer()
    made.accumulate(0)
    made.opt.reduce_gradients()
    with pytest.raises(NotImplementedError, match="closure"):
        made.opt.step(lambda: 0.0)


@pytest.mark.parametrize("action", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_clearly(action: Any) -> None:
    made = trainer()
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        action(made.opt)


def test_it_says_what_it_is() -> None:
    made = trainer()
    assert "MuonShardingOptimizer" in repr(made.opt)
    assert len(repr(made.opt)) < 500
    plan = str(made.opt.plan)
    assert all(name in plan for name in SHAPES)


def test_the_load_is_reported_once_at_construction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        SimWorld(3).run(lambda rank: Trainer(rank, Setup())).values()
    reports = [record.getMessage() for record in caplog.records if "load" in record.getMessage()]
    assert len(reports) == 1
    assert all(f"rank {rank}" in reports[0] for rank in range(3))
    assert "MB" in reports[0]
    assert "(max - min) / max" in reports[0]


def test_parameters_are_found_by_name() -> None:
    made = trainer()
    assert {shard.name for shard in made.opt.filter_parameters(["tall", "bias"])} == {"tall", "bias"}
    assert list(made.opt.filter_parameters([])) == []
    assert {shard.name for shard in made.opt.filter_parameters(iter(["norm"]))} == {"norm"}
    with pytest.raises(ValueError, match="tal"):
        made.opt.filter_parameters(["tal"])


def test_parameters_without_elements_or_outside_are_left_out_of_what_is_found() -> None:
    def ranks(rank: int) -> set[str]:
        return {shard.name for shard in Trainer(rank, Setup()).opt.filter_parameters(["tall", "norm", "bias"])}

    found = SimWorld(4).run(ranks).values()
    assert sum("tall" in names for names in found) == 1
    assert sum("bias" in names for names in found) == 1
    assert set().union(*found) == {"tall", "norm", "bias"}


# Frozen parameters


def test_frozen_parameters_are_left_alone() -> None:
    params = Setup().parameters()
    params["tall"].requires_grad_(False)
    params["norm"].requires_grad_(False)
    before = {name: param.detach().clone() for name, param in params.items()}
    places = {name: params[name].data_ptr() for name in ("tall", "norm")}
    opt = MuonShardingOptimizer(MuonAdamW(params.items(), INFO))
    assert not {shard.name for shard in opt.local_shards()} & {"tall", "norm"}
    for _ in range(2):
        sum(param.sum() for param in params.values()).backward()
        opt.reduce_gradients()
        opt.step()
        opt.clear_grad()
    kept = {name for name, param in params.items() if same_bits(param, before[name])}
    assert kept == {"tall", "norm"}
    assert all(params[name].data_ptr() == place for name, place in places.items())


@pytest.mark.parametrize("when", ["before reduction", "before step"])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_or_thawed_later_raises(frozen: bool, when: str) -> None:
    params = Setup().parameters()
    params["tall"].requires_grad_(not frozen)
    params["wide"].requires_grad_(frozen)
    opt = MuonShardingOptimizer(MuonAdamW(params.items(), INFO))
    params["qkv"].sum().backward()
    if when == "before step":
        opt.reduce_gradients()
    name = "wide" if frozen else "tall"
    params[name].requires_grad_(not params[name].requires_grad)
    with pytest.raises(GradientStateError, match=name):
        (opt.reduce_gradients if when == "before reduction" else opt.step)()


def _converted(params: nn.ParameterDict) -> None:
    params.to(torch.float32)


def _replaced(params: nn.ParameterDict) -> None:
    params["tall"].data = torch.zeros_like(params["tall"].detach(), memory_format=torch.contiguous_format)


@pytest.mark.parametrize("when", ["before reduction", "before step"])
@pytest.mark.parametrize(("move", "freed"), [(_converted, False), (_replaced, False), (_replaced, True)])
def test_parameters_that_were_given_other_memory_raise(
    move: Callable[[nn.ParameterDict], None], freed: bool, when: str
) -> None:
    """They would keep their weights for good, as updates go to the buffers."""
    params = nn.ParameterDict(Setup(dtypes=(torch.float16,)).parameters())
    opt = MuonShardingOptimizer(MuonAdamW(params.items(), INFO))
    if when == "before step":
        opt.reduce_gradients()
    if freed:
        opt.clear_param_storage()
    move(params)
    before = params["tall"].detach().clone()
    with pytest.raises(GradientStateError, match="memory"):
        (opt.reduce_gradients if when == "before reduction" else opt.step)()
    assert same_bits(params["tall"], before)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_share_memory_are_refused(frozen: bool) -> None:
    """Pointed into buffers they would no longer be one."""
    params = Setup().parameters()
    params["bias"] = nn.Parameter(params["norm"].detach()[3:4], requires_grad=not frozen)
    with pytest.raises(ValueError, match=r"norm and bias share memory"):
        MuonShardingOptimizer(MuonAdamW(params.items(), INFO))


def test_parameters_side_by_side_in_one_memory_are_taken() -> None:
    fused, columns = torch.arange(20.0), torch.arange(24.0).view(4, 6)
    params = {
        "first": nn.Parameter(fused[:12].view(3, 4)),
        "second": nn.Parameter(fused[12:16]),
        "frozen": nn.Parameter(fused[16:], requires_grad=False),
        "as frozen": nn.Parameter(fused[17:], requires_grad=False),
        "left": nn.Parameter(columns[:, :2]),
        "right": nn.Parameter(columns[:, 2:]),
    }
    before = {name: param.detach().clone() for name, param in params.items()}
    info = {name: MuonParamInfo(use_muon=name != "second") for name in params}
    MuonShardingOptimizer(MuonAdamW(params.items(), info))
    assert all(torch.equal(params[name], before[name]) for name in params)


# The end


def test_hooks_end_with_the_optimizer() -> None:
    made = trainer(config={"comm_overlap": True})
    made.accumulate(0)
    params, setup = made.params, made.setup
    del made
    gc.collect()
    (params["tall"] * 2).sum().backward()
    assert params["tall"].grad is not None
    for param in params.values():
        param.grad = None
    start = {name: param.detach().clone() for name, param in params.items()}

    opt = MuonShardingOptimizer(setup.optimizer(params, INFO))
    reference = {name: nn.Parameter(weight.clone()) for name, weight in start.items()}
    unsharded = setup.optimizer(reference, INFO)
    for step in range(2):
        for name in SHAPES:
            gradient = setup.gradient(step, 0, 0, name)
            (params[name] * gradient).sum().backward()
            reference[name].grad = gradient
        opt.reduce_gradients()
        opt.step()
        opt.clear_grad()
        unsharded.step()
    assert all(same_bits(params[name], reference[name]) for name in SHAPES)


def test_a_second_optimizer_takes_the_place_of_a_living_one() -> None:
    """The first one's hooks would take the gradients, and the second would train with zeros."""
    first = trainer()
    second = trainer()
    second.params = first.params
    second.opt = MuonShardingOptimizer(first.setup.optimizer(first.params, INFO))
    reference = Unsharded(first.setup, 1)
    second.step(0)
    reference.step(0)
    reference.require_same(second, "the second")
    for call in (first.opt.reduce_gradients, first.opt.step):
        with pytest.raises(GradientStateError, match="another"):
            call()


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_parameters_live_in_buffers_from_the_start(size: int) -> None:
    made = trainer(config={"comm_buffer_size_mb": elements(size)})
    names = [name for name in SHAPES if INFO[name].use_muon]
    storages = [made.params[name].untyped_storage().data_ptr() for name in names]
    assert len(set(storages)) == (1 if size == 10_000 else len(names))
    aliases = {name: param.detach() for name, param in made.params.items()}
    for step in range(2):
        made.step(step)
    assert all(same_bits(aliases[name], made.params[name]) for name in SHAPES)


def test_a_state_that_is_loaded_goes_on_with_the_same_bits() -> None:
    first, second = trainer(dtypes=(torch.bfloat16,)), trainer(dtypes=(torch.bfloat16,))
    first.step(0)
    saved = copy.deepcopy(first.opt.state_dict())
    second.opt.load_state_dict(saved)
    for name, param in second.params.items():
        param.data.copy_(first.params[name].data)
    for made in (first, second):
        made.step(1)
    assert all(same_bits(first.params[name], second.params[name]) for name in SHAPES)


def test_weights_that_are_loaded_later_become_the_masters() -> None:
    """Else the masters of before would overwrite them at the next step."""
    for make in (lambda inner: inner, MuonShardingOptimizer):
        params = {"w": nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), "b": nn.Parameter(torch.ones(3))}
        info = {"w": MuonParamInfo(use_muon=True), "b": MuonParamInfo()}
        optimizer = make(MuonAdamW(params.items(), info, lr=0.0))
        with torch.no_grad():
            params["w"].fill_(3.0)
        optimizer.refresh_from_weights()
        if isinstance(optimizer, MuonShardingOptimizer):
            optimizer.reduce_gradients()
        optimizer.step()
        assert params["w"].tolist() == [[3.0] * 3] * 2
        assert params["b"].tolist() == [1.0] * 3


def test_masters_cannot_be_made_of_weights_that_are_freed() -> None:
    params = {"w": nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))}
    optimizer = MuonShardingOptimizer(MuonAdamW(params.items(), {"w": MuonParamInfo(use_muon=True)}))
    optimizer.clear_param_storage(None)
    with pytest.raises(GradientStateError, match="without weights"):
        optimizer.refresh_from_weights()
