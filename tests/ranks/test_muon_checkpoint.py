"""State of MuonShardingOptimizer: saved by one world, loaded by another, as if training had never stopped.

Most of it runs in simulated worlds, which torch.distributed.checkpoint takes for real ones; once on gloo.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.launch.pool import RankPool
from harness.sim.world import SimWorld
from tests.ranks import muon_checkpoint_handler as trainings
from tests.ranks.muon_checkpoint_handler import CONTRIBUTIONS, INFO, SHAPES, Net, Training, differences, refused
from zero2core.muon import MuonParamInfo

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about its own checkpoints

UNFUSED = {"comm_buffer_size_mb": 0.0}
SMALL = {"comm_buffer_size_mb": 40 * 4 / 2**20, "fuse_optimizer_states": True, "owner_rule": "numel"}
TWO_HOPS = {"two_hop": True, "local_world_size": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


def on_ranks(world: int, function: Callable[[], Any]) -> list[Any]:
    """What every rank of a simulated world returned."""
    return SimWorld(world).run(lambda rank: function()).values()


def save(where: Path, world: int, steps: int, dtype: str = "bf16", **settings: Any) -> None:
    def work() -> None:
        training = Training(dtype, **settings)
        training.train(*range(steps))
        training.save(str(where))

    on_ranks(world, work)


# --- another world ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "dtype", "clip", "saved_by", "saved_with", "loaded_by", "loaded_with"),
    [
        (2, "bf16", "global", 4, {}, 2, UNFUSED),
        (2, "bf16", "adaptive", 4, UNFUSED, 3, SMALL),
        (2, "fp32", "adaptive", 4, SMALL, 2, {}),
        (2, "fp32", "global", 4, TWO_HOPS, 3, UNFUSED),
        (0, "bf16", None, 3, UNFUSED, 4, TWO_HOPS),
        (0, "fp32", "adaptive", 1, {}, 3, {"comm_overlap": True, "release_gradients": True}),
    ],
)
def test_training_goes_on_in_another_world_as_if_it_had_not_stopped(
    tmp_path: Path,
    steps: int,
    dtype: str,
    clip: str | None,
    saved_by: int,
    saved_with: dict[str, Any],
    loaded_by: int,
    loaded_with: dict[str, Any],
) -> None:
    expected = trainings.unsharded(steps + 3, dtype, clip=clip)

    def never_stopped() -> Any:
        training = Training(dtype, clip=clip, config=saved_with)
        training.train(*range(steps))
        training.save(str(tmp_path))
        training.train(*range(steps, steps + 3))
        return trainings.against_unsharded(training, *expected)

    def stopped() -> Any:
        # Other weights, and settings, than those that were saved.
        net = Net(trainings.DTYPES[dtype], seed=5)
        training = Training(dtype, net=net, clip=clip, config=loaded_with, lr=7.0, ns_coefficients="aol")
        training.load(str(tmp_path))
        training.train(*range(steps, steps + 3))
        return trainings.against_unsharded(training, *expected)

    elements = sum(param.numel() * (2 if INFO[name].use_muon else 3) for name, param in expected[1].named.items())
    for world, function in ((saved_by, never_stopped), (loaded_by, stopped)):
        replies = on_ranks(world, function)
        assert [wrong for _, wrong in replies] == [[]] * world
        assert sum(compared for compared, _ in replies) == elements


def test_on_real_ranks_saved_in_the_background(tmp_path: Path) -> None:
    settings = {"clip": "adaptive", "config": UNFUSED}
    with RankPool("tests.ranks.muon_checkpoint_handler:serve", preload=["tests.ranks.muon_checkpoint_handler"]) as pool:
        for world, do in ((4, "save_in_the_background"), (3, "go_on")):
            task = {"do": do, "where": str(tmp_path), "dtype": "bf16", "settings": settings}
            outcome = pool.run(world, json.dumps(task).encode(), timeout_s=200.0)
            assert outcome.replied, [report.error or report.output or report.stacks for report in outcome.ranks]
            replies = [json.loads(report.reply or b"null") for report in outcome.ranks]
            assert [wrong for _, wrong in replies] == [[]] * world
            assert sum(compared for compared, _ in replies) > sum(
                map(torch.Size.numel, map(torch.Size, SHAPES.values()))
            )


def test_a_checkpoint_holds_each_tensor_of_the_unsharded_state_whole_and_once(tmp_path: Path) -> None:
    _, inner = trainings.unsharded(2, "bf16")
    save(tmp_path / "saved", 4, 2)

    dcp_to_torch_save(str(tmp_path / "saved"), str(tmp_path / "whole.pt"))

    whole = torch.load(tmp_path / "whole.pt", weights_only=False)["optimizer"]
    found = {key: value for key, value in whole.items() if isinstance(value, Tensor)}
    expected = {
        f"state.{name}.{kind}": value if INFO[name].use_muon else value.reshape(-1)
        for name, param in inner.named.items()
        for kind, value in inner.state[param].items()
        if isinstance(value, Tensor) and value.numel()
    }
    assert differences(found, expected) == []
    scalars = {key for key in whole if key.endswith(".scalars")}
    assert set(whole) == {"index", *found, *scalars}
    assert scalars == {f"state.{name}.scalars" for name in SHAPES if name != "empty"}


def test_a_rank_saves_no_more_than_what_it_owns_and_copies_nothing() -> None:
    def work() -> int:
        optimizer = Training().optimizer
        state = optimizer.sharded_state_dict(Net(torch.bfloat16).state_dict())
        own = [
            value
            for shard in optimizer.local_shards()
            for value in optimizer.inner.state[optimizer.inner.named[shard.name]].values()
            if isinstance(value, Tensor)
        ]
        parts = [value.part for value in state.values() if not isinstance(value, bytes)]
        assert [part.data_ptr() for part in parts] == [value.data_ptr() for value in own]
        return sum(part.numel() for part in parts)

    elements = sum(torch.Size(shape).numel() * (2 if INFO[name].use_muon else 3) for name, shape in SHAPES.items())
    per_rank = on_ranks(4, work)
    assert sum(per_rank) == elements
    assert max(per_rank) < elements / 2


def test_rates_that_a_scheduler_set_and_its_own_settings_go_on(tmp_path: Path) -> None:
    def work(load: bool) -> Any:
        training = Training()
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1, gamma=0.5)
        if load:
            training.load(str(tmp_path))
            return [dict(group, params=None) for group in training.optimizer.param_groups]
        training.train(0)
        scheduler.step()
        training.save(str(tmp_path))
        return [dict(group, params=None) for group in training.optimizer.param_groups]

    saved, loaded = on_ranks(2, lambda: work(load=False)), on_ranks(3, lambda: work(load=True))
    assert loaded[0] == loaded[1] == loaded[2] == saved[0]
    assert (loaded[0][0]["lr"], loaded[0][0]["initial_lr"]) == (0.0625, 0.125)


# --- names ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight under two names, of which the first one is the optimizer's."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))
        tied = nn.Parameter(trainings.normal((4, 3), 1))
        for name in names:
            self.register_parameter(name, tied)


@pytest.mark.parametrize(
    ("saved_names", "names"),
    [
        (("embed", "head"), ("embed", "head")),
        (("embed", "head"), ("head", "embed")),
        (("embed",), ("head", "embed")),
        (("embed", "head"), ("head",)),
    ],
)
def test_tied_weights_are_saved_once_and_found_under_any_of_their_names(
    tmp_path: Path, saved_names: tuple[str, ...], names: tuple[str, ...]
) -> None:
    info = {"weight": MuonParamInfo(), "embed": MuonParamInfo(), "head": MuonParamInfo()}

    def work(*names: str, load: bool) -> Any:
        training = Training(net=Tied(*names), info=info, clip="adaptive")
        optimizer = training.optimizer
        assert list(optimizer.inner.named) == ["weight", names[0]]
        if load:
            training.load(str(tmp_path), model=False)  # a model's own state has no aliases
        else:
            for name, param in optimizer.inner.named.items():
                param.grad = torch.full_like(param, float(len(name)))
            optimizer.reduce_gradients()
            optimizer.step()
            assert [key for key in optimizer.sharded_state_dict(training.net.state_dict()) if "head" in key] == []
            training.save(str(tmp_path))
        held = training.everything()
        held = {key: value for key, value in held.items() if key != "groups" and "weight of" not in key}
        return json.loads(json.dumps(held, default=Tensor.tolist).replace("head", "embed"))

    saved = on_ranks(2, lambda: work(*saved_names, load=False))
    loaded = on_ranks(2, lambda: work(*names, load=True))
    assert loaded == saved
    assert saved[0]["clip"]["norms"]["embed"] > 0


def test_buffers_and_frozen_parameters_need_no_record_but_what_is_trained_does() -> None:
    training = on_ranks(1, Training)[0]
    optimizer, weights = training.optimizer, training.net.state_dict(keep_vars=True)
    assert {"frozen", "counts"} < set(weights)
    optimizer.sharded_state_dict(weights)
    given = dict(weights)

    for change, said in (
        ({"stranger": nn.Parameter(torch.ones(2))}, "trainable parameter stranger, which the optimizer does not know"),
        ({"qkv": torch.ones(6, 8).bfloat16()}, r"has qkv as torch.bfloat16 \(6, 8\), the optimizer trains .* \(8, 6\)"),
        ({"qkv": torch.ones(8, 6)}, r"has qkv as torch.float32 \(8, 6\), the optimizer trains torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.sharded_state_dict({**weights, **change})
    lacking = {f"module.{name}": value for name, value in weights.items()}
    with pytest.raises(ValueError, match="model_state_dict lacks embed"):
        optimizer.sharded_state_dict(lacking)
    with pytest.raises(ValueError, match="model_state_dict lacks embed"):
        optimizer.load_sharded_state_dict(lacking, lambda state: pytest.fail("nothing is to be read"))
    assert weights == given


# --- colours ----------------------------------------------------------------------------------------------------------


def colored(groups: list[list[int]], names: tuple[str, ...] = ("wide", "bias")) -> dict[str, Any]:
    """Settings by which some parameters belong to this rank's one of the groups."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next((group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks), made[0])
    divisors = {None: float(CONTRIBUTIONS), "few": 1.0}
    return {"colors": dict.fromkeys(names, ("few", mine)), "color_divisors": divisors}


PAIRS = [[0, 2], [1, 3]]


def test_values_of_several_groups_do_not_meet_under_one_key(tmp_path: Path) -> None:
    def saved() -> Any:
        training = Training(clip="adaptive", config=colored(PAIRS))
        training.train(0, 1)
        training.save(str(tmp_path))
        training.train(2, 3)
        return training.everything()

    def loaded() -> Any:
        training = Training(clip="adaptive", config={**colored(PAIRS), **UNFUSED, "fuse_optimizer_states": True})
        training.train(7)
        training.load(str(tmp_path), model=False)
        return training

    def go_on() -> Any:
        training = loaded()
        for name, param in training.optimizer.inner.named.items():
            # What a rank's model has of a colour is its group's own: no checkpoint of one model for all holds it.
            state = training.optimizer.inner.state[param]
            if "master" in state and name in ("wide", "bias"):
                assert state["master"].isfinite().all()
        training.train(2, 3)
        return training.everything()

    before, after = on_ranks(4, saved), on_ranks(4, go_on)
    pieces = {key: value for key, value in before[0].items() if "wide" in key and isinstance(value, Tensor)}
    assert any(not trainings.same_bits(value, before[1][key]) for key, value in pieces.items())
    owned = [
        (one, other)
        for one, other in zip(before, after, strict=True)
        if any(key in one for key in ("momentum of wide", "exp_avg of bias"))
    ]
    assert len(owned) >= 2
    for one, other in zip(before, after, strict=True):
        wrong = [key for key in differences(one, other) if "wide" in key or "bias" in key or key == "clip"]
        assert wrong == []


@pytest.mark.parametrize(
    ("saved_by", "saved_groups", "loaded_by", "loaded_groups"),
    [(4, PAIRS, 2, [[0, 1]]), (4, PAIRS, 4, [[0, 1], [2, 3]]), (2, [[0, 1]], 4, PAIRS)],
)
def test_values_of_several_groups_are_loaded_by_the_same_groups_only(
    tmp_path: Path, saved_by: int, saved_groups: list[list[int]], loaded_by: int, loaded_groups: list[list[int]]
) -> None:
    def work() -> str:
        training = Training(config=colored(loaded_groups))
        before = training.everything()
        said = refused(lambda: training.load(str(tmp_path), model=False))
        assert differences(before, training.everything()) == []
        return said

    on_ranks(saved_by, lambda: Training(config=colored(saved_groups)).save(str(tmp_path)))
    for said in on_ranks(loaded_by, work):
        assert said.startswith(
            "NotImplementedError: wide has, in each of several groups of its colour, values of its own"
        )
        assert str(saved_groups if len(saved_groups) > 1 else loaded_groups) in said


def test_a_colour_of_one_group_is_loaded_by_any_other(tmp_path: Path) -> None:
    """Also without colours. Only two of the ranks that save hold anything of it."""

    def saved() -> Any:
        training = Training("fp32", clip="adaptive", config=colored([[1, 3]]))
        training.train(0, 1)
        training.save(str(tmp_path))
        held = training.everything()
        return held if dist.get_rank() in (1, 3) else None

    def loaded() -> Any:
        training = Training("fp32", clip="adaptive")
        training.load(str(tmp_path), model=False)
        return training.everything()

    before, after = on_ranks(4, saved), on_ranks(1, loaded)[0]
    (momentum,) = (held["momentum of wide"] for held in before if held and "momentum of wide" in held)
    assert trainings.same_bits(after["momentum of wide"], momentum)
    assert after["clip"] == before[1]["clip"]
    assert after["step of bias"] == 2


# --- what is not to be loaded -----------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[], Training], str]] = {
    "fewer": (
        lambda: Training(net=Net(torch.bfloat16, [name for name in SHAPES if name != "wide"])),
        "ValueError: the checkpoint has wide, which this optimizer does not train",
    ),
    "dtype": (
        lambda: Training("fp32"),
        "ValueError: the checkpoint has embed as torch.bfloat16 (11, 6) with use_muon=False, this optimizer trains "
        "torch.float32",
    ),
    "mark": (
        lambda: Training(info={**INFO, "embed": MuonParamInfo(use_muon=True)}),
        "ValueError: the checkpoint has embed as torch.bfloat16 (11, 6) with use_muon=False, this optimizer trains "
        "torch.bfloat16 (11, 6) with use_muon=True",
    ),
    "name": (
        lambda: Training(net=Tied("embed"), info={"weight": MuonParamInfo(), "embed": MuonParamInfo()}),
        "ValueError: the checkpoint has no parameter weight; it has bias, embed, empty",
    ),
    "no clip": (lambda: Training(clip=None), "ValueError: this optimizer has no clip, the saved one had a one"),
    "clip": (lambda: Training(clip="global"), "ValueError: state of ClipGradByGlobalNorm has keys ['norms', 'step']"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, other: str) -> None:
    make, expected = OTHERS[other]

    def work() -> str:
        training = make()
        before = training.everything()
        said = refused(lambda: training.load(str(tmp_path), model=False))
        assert differences(before, training.everything()) == []
        return said

    save(tmp_path, 2, 1, clip="adaptive")
    for said in on_ranks(3, work):
        assert said.startswith(expected), said


def cut_short(where: Path) -> None:
    for file in where.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_one(where: Path) -> None:
    sorted(where.glob("*.distcp"))[-1].unlink()


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (cut_short, "EOFError"),
        (lose_one, "No such file or directory: .*distcp"),
        (lambda where: (where / ".metadata").unlink(), "No such file or directory: .*[.]metadata"),
        (lambda where: (where / ".metadata").write_bytes(b"?"), "metadata read failed"),
    ],
    ids=["cut short", "a file is missing", "no metadata", "broken metadata"],
)
def test_files_that_are_missing_or_cut_short_are_told_on_all_ranks_and_change_nothing(
    tmp_path: Path, harm: Callable[[Path], object], expected: str
) -> None:
    def work() -> str:
        training = Training(clip="adaptive")
        before = training.everything()
        said = refused(lambda: training.load(str(tmp_path), model=False))
        assert differences(before, training.everything()) == []
        return said

    save(tmp_path, 4, 1, clip="adaptive")
    harm(tmp_path)
    for said in on_ranks(3, work):
        assert said.startswith("RuntimeError: the state of the optimizer cannot be read (rank "), said
        assert said.endswith("are all files there, and whole? The optimizer is as it was")
        assert re.search(expected, said), said


def test_a_checkpoint_without_the_state_of_such_an_optimizer_is_refused(tmp_path: Path) -> None:
    def work() -> list[str]:
        training = Training()
        weights = training.net.state_dict()
        dcp.save({"model": weights, "other": {"index": 3}}, checkpoint_id=str(tmp_path))

        def load(key: str) -> str:
            def read(state: dict[str, Any]) -> None:
                dcp.load({key: state}, checkpoint_id=str(tmp_path))

            return refused(lambda: training.optimizer.load_sharded_state_dict(weights, read))

        return [load("optimizer"), load("other")]

    for missing, foreign in on_ranks(2, work):
        assert missing.startswith("RuntimeError: the state of the optimizer cannot be read (rank ")
        assert "Missing key in checkpoint state_dict: optimizer.index" in missing
        assert foreign.startswith("ValueError: the checkpoint's 'index' is no index of a MuonShardingOptimizer")


def test_what_is_to_be_saved_is_not_filled_behind_the_optimizers_back(tmp_path: Path) -> None:
    """Tensors would be read, step counters and settings would not."""

    def work() -> str:
        training = Training()
        training.save(str(tmp_path))
        state = training.optimizer.sharded_state_dict(training.net.state_dict())
        return refused(lambda: dcp.load({"optimizer": state}, checkpoint_id=str(tmp_path)))

    assert all("load with load_sharded_state_dict()" in said for said in on_ranks(2, work))


# --- one rank's own state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "config"), [("bf16", {}), ("fp32", SMALL), ("bf16", {**UNFUSED, **TWO_HOPS, "release_gradients": True})]
)
def test_a_rank_goes_on_from_its_own_state(dtype: str, config: dict[str, Any]) -> None:
    def work() -> list[str]:
        training, other = (Training(dtype, clip="adaptive", config=config) for _ in range(2))
        training.train(0, 1)
        state = training.optimizer.state_dict()
        given = copy.deepcopy(state)
        other.net.load_state_dict(training.net.state_dict())
        other.optimizer.param_groups[0]["lr"] = 9.0
        other.optimizer.load_state_dict(state)
        other.train(2, 3)
        # The same as what was saved: nothing of it was changed by the other one's steps.
        wrong = differences(flat(state), flat(given))
        training.train(2, 3)
        return wrong + differences(training.everything(), other.everything())

    assert on_ranks(4, work) == [[]] * 4


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Every value of a nested dict under the path to it."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update({f"{key}/{inner}": one for inner, one in flat(value).items()})
        else:
            found[key] = value
    return found


def test_a_ranks_own_state_has_exact_keys() -> None:
    def work() -> Any:
        training = Training(clip="adaptive")
        state = training.optimizer.state_dict()
        owned = {shard.name for shard in training.optimizer.local_shards()}
        return state, owned

    for rank, (state, owned) in enumerate(on_ranks(3, work)):
        assert set(state) == {"version", "plan", "rank", "state", "param_groups", "grad_clip"}
        assert state["rank"] == rank
        assert set(state["state"]) == owned
        for name, of_one in state["state"].items():
            moments = {"momentum"} if INFO[name].use_muon else {"exp_avg", "exp_avg_sq", "step"}
            assert set(of_one) == {"master", *moments}
        assert all(not {"params", "names", "use_muon"} & set(group) for group in state["param_groups"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": UNFUSED}, "the saved state is of plan .* Save sharded_state_dict"),
        ({"dtype": "fp32"}, "the saved state is of plan .* Save sharded_state_dict"),
        ({"rank": 1}, "rank 0, this is plan .*, rank 1"),
        ({"clip": None}, "has no clip, the saved one had a one"),
        ({"clip": "global"}, "state of ClipGradByGlobalNorm has keys"),
        ({"drop": "qkv"}, "the saved state has .* this rank holds"),
        ({"drop": "version"}, "it was not saved by this optimizer"),
    ],
    ids=str,
)
def test_another_plans_own_state_is_refused_and_changes_nothing(change: dict[str, Any], said: str) -> None:
    def work() -> str:
        training = Training(clip="adaptive")
        training.train(0)
        settings = {"clip": "adaptive", **{key: value for key, value in change.items() if key not in ("rank", "drop")}}
        other = Training(settings.pop("dtype", "bf16"), **settings)
        before = other.everything()
        state = copy.deepcopy(training.optimizer.state_dict())
        if "rank" in change:
            states: list[Any] = [None] * 2
            dist.all_gather_object(states, state)
            state = states[0]
        if "drop" in change:
            name = next(iter(state["state"])) if change["drop"] == "qkv" else change["drop"]
            (state["state"] if change["drop"] == "qkv" else state).pop(name)
        text = refused(lambda: other.optimizer.load_state_dict(state))
        if "rank" not in change or dist.get_rank():  # rank 0 was given its own
            assert differences(before, other.everything()) == []
        return text

    replies = on_ranks(2, work)
    assert all(reply.startswith("ValueError") for reply in (replies[1:] if "rank" in change else replies)), replies
    assert re.search(said, replies[1]), replies[1]


def test_an_optimizer_of_another_world_is_refused_by_its_plan() -> None:
    states = on_ranks(4, lambda: copy.deepcopy(Training().optimizer.state_dict()))
    for rank, said in enumerate(on_ranks(2, lambda: refused_own(states))):
        assert said.startswith(f"ValueError: the saved state is of plan {states[rank]['plan']}, rank {rank}")
        assert "another world" in said


def refused_own(states: list[Any]) -> str:
    training = Training()
    return refused(lambda: training.optimizer.load_state_dict(states[dist.get_rank()]))
