"""What a driver of strategies is made of: the model, what is held, the configuration, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from harness.drive.strategy_config import configuration
from harness.drive.strategy_held import Region, UnreadableError, entries, find, flat_index, held_of, holders
from harness.drive.strategy_model import (
    Work,
    build_model,
    idle_blocks,
    index_of,
    needs_input_gradient,
    shares,
)
from harness.errors import CaseError, UsageError
from harness.scenario import codec
from harness.scenario.codec import load_configuration
from harness.scenario.model import Extension, steps
from harness.scenario.strategy import Offer
from harness.subjects import strategy_offers
from harness.subjects.builtin import BUILTIN, capabilities
from harness.subjects.load import SubjectError, declared, system_of
from harness.subjects.source import from_case, parse, with_config
from tests.strategy_cases import ROOT, Place, placed, scenario, step
from tests.subjects.strategies import PlainDDP, PlainFSDP

# --- the model --------------------------------------------------------------------------------------------------------


def weights_of(given: Any) -> list[Tensor]:
    return [torch.full(parameter.shape, float(index)) for index, parameter in enumerate(given.parameters)]


def test_every_parameter_gets_the_gradient_it_is_given_also_where_it_has_two_names() -> None:
    tied = placed(first_weight=Place(0, tied=True), head=Place(ROOT, frozen=True))
    given = scenario(2, model=tied)
    model = build_model(given, weights_of(given))
    gradients = {
        index: torch.randn(parameter.shape)
        for index, parameter in enumerate(given.parameters)
        if index not in (3, 6)  # one that is not used, and the frozen one
    }
    seen: list[tuple[int, bool]] = []
    work = Work(gradients, frozenset(), lambda index, weights, backward: seen.append((index, backward)))

    model(torch.zeros(1), work).sum().backward()

    found = find(model, 7)
    for index, gradient in gradients.items():
        assert torch.equal(found[index].grad, gradient)  # type: ignore[arg-type]
    assert found[3].grad is None
    assert found[6].grad is None
    assert {index for index, backward in seen if not backward} == set(range(7))
    assert {index for index, backward in seen if backward} == set(gradients)
    assert seen.count((1, True)) == 2


def test_a_block_that_no_rank_uses_is_not_run() -> None:
    given = scenario(2, step(2, missing={0: (1, 2, 5), 1: (1, 2)}))
    (plan,) = steps(given)

    assert idle_blocks(given, plan, 0) == {0}

    seen: list[int] = []
    model = build_model(given, weights_of(given))
    model(torch.zeros(1), Work({}, frozenset({0}), lambda index, weights, backward: seen.append(index)))
    assert not {1, 2} & set(seen)


@pytest.mark.parametrize(
    ("missing", "needs"),
    [
        ({}, False),
        ({0: (1,), 1: (1,)}, False),  # another of its block is used
        ({0: (1, 2), 1: (1, 2)}, False),  # its block is not run
        ({0: (0, 6), 1: (0, 6)}, True),  # the root always is
        ({0: (1,)}, True),
    ],
)
def test_the_input_takes_a_gradient_where_a_module_that_is_run_has_none_to_give(
    missing: dict[int, tuple[int, ...]], needs: bool
) -> None:
    given = scenario(2, step(2, missing=missing))
    (plan,) = steps(given)

    assert needs_input_gradient(given, plan, 0) is needs


@pytest.mark.parametrize(
    "values", [[3.0, -1.0, 0.0], [2.0**-149, 3 * 2.0**-149], [torch.inf, -torch.inf], [3.4028234663852886e38]]
)
def test_two_uses_share_a_gradient_without_loss(values: list[float]) -> None:
    gradient = torch.tensor(values)

    first, second = shares(gradient, 2)

    assert torch.equal(first + second, gradient)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("p3", 3),
        ("module.blocks.0._fsdp_wrapped_module.p12", 12),
        ("_orig_mod.blocks.1.p0_tied", 0),
        ("blocks.0", None),
        ("pool", None),
        ("x.p", None),
    ],
)
def test_a_parameter_is_found_under_any_prefix(name: str, index: int | None) -> None:
    assert index_of(name) == index


# --- what is held -----------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    dim: int


class Replicate(NamedTuple):
    pass


class Partial(NamedTuple):
    pass


class Mesh(NamedTuple):
    mesh: Tensor


class Distributed:
    """As much of a DTensor as is read."""

    def __init__(self, shape: tuple[int, ...], here: Tensor, mesh: Tensor, placements: tuple[Any, ...]) -> None:
        self.shape = shape
        self._local_tensor = here
        self.device_mesh = Mesh(mesh)
        self.placements = placements


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9])
def test_shards_are_those_of_torch_chunk(rows: int) -> None:
    whole = torch.arange(rows * 2.0).view(rows, 2)
    mesh = torch.arange(4).view(2, 2)  # two replicas of two shards
    pieces = list(whole.chunk(2)) + [whole[:0]] * 2

    for rank in range(4):
        tensor = Distributed((rows, 2), pieces[rank % 2], mesh, (Replicate(), Shard(0)))
        held = held_of(0, tensor, (rows, 2), rank)  # type: ignore[arg-type]
        assert torch.equal(whole[held.region.slices], pieces[rank % 2])


def test_a_second_axis_cuts_what_the_first_has_left() -> None:
    whole = torch.arange(7.0)
    mesh = torch.arange(4).view(2, 2)
    pieces = [piece for half in whole.chunk(2) for piece in half.chunk(2)]

    regions = [
        held_of(0, Distributed((7,), pieces[rank], mesh, (Shard(0), Shard(0))), (7,), rank).region  # type: ignore[arg-type]
        for rank in range(4)
    ]

    assert [region.spans for region in regions] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 7),)]
    assert holders([[region] for region in regions], 0, (7,)).tolist() == [1] * 7


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (Distributed((4,), torch.zeros(2), torch.arange(2), (Partial(),)), "only Shard and Replicate"),
        (Distributed((4,), torch.zeros(3), torch.arange(2), (Shard(0),)), r"it is \[2\]"),
        (Distributed((4,), torch.zeros(2), torch.arange(2, 4), (Shard(0),)), "stands 0 times"),
        (torch.zeros(5), r"of shape \[4\] became one of shape \[5\]"),
    ],
)
def test_what_cannot_be_read_is_said(tensor: Any, says: str) -> None:
    with pytest.raises(UnreadableError, match=says):
        held_of(0, tensor, (4,), 0)


def test_a_broken_tie_is_said() -> None:
    module = nn.Module()
    module.p0, module.p0_tied = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    with pytest.raises(UnreadableError, match="a tie is broken"):
        find(module, 1)
    with pytest.raises(UnreadableError, match="no parameter"):
        entries({"blocks.0.weight": None})


def test_an_element_of_a_region_is_found_in_the_whole() -> None:
    whole = torch.arange(24).view(4, 6)
    region = Region(0, ((1, 3), (2, 5)))

    found = [flat_index(region, at, (4, 6)) for at in range(6)]

    assert found == whole[region.slices].reshape(-1).tolist()


# --- the configuration ------------------------------------------------------------------------------------------------


def test_the_scenario_decides_what_the_subject_lets_it() -> None:
    sharded = scenario(2, sharding="hybrid", replicas=2, reduce="bf16", max_k=1, offload=True)
    base: Mapping[str, Any] = {"use_fsdp": True, "fsdp_sharding_strategy": "hybrid_shard"}

    found = configuration(sharded, base, Offer(configurable=True))

    assert found == {
        **base,
        "use_mixed_precision": False,
        "fsdp_reduce_dtype": "bf16",
        "fsdp_cpu_offload": True,
        "unused_parameters": False,
        "fsdp_hsdp_replicate_size": 2,
    }
    assert configuration(sharded, base, Offer()) == base


def test_a_bucket_of_ddp_is_as_large_as_the_scenario_says() -> None:
    given = scenario(2, step(2, missing={0: (1,)}), sharding="none", bucket=2**18)

    found = configuration(given, {"use_fsdp": False}, Offer(configurable=True))

    assert found == {"use_fsdp": False, "bucket_cap_mb": 1.0, "find_unused_parameters": True}


@pytest.mark.parametrize(
    ("config", "sharding", "reduce", "compute", "replicas"),
    [
        ({}, "none", ("fp32",), ("fp32",), None),
        ({"use_fsdp": True}, "full", ("fp32",), ("bf16",), None),
        ({"use_fsdp": True, "fsdp_reduce_dtype": "bf16"}, "full", ("bf16",), ("bf16",), None),
        ({"use_fsdp": True, "use_mixed_precision": False}, "full", ("fp32",), ("fp32",), None),
        ({"use_fsdp": True, "fsdp_sharding_strategy": "hybrid_shard"}, "hybrid", ("fp32",), ("bf16",), 1),
        (
            {"use_fsdp": True, "fsdp_sharding_strategy": "_hybrid_shard_zero2", "fsdp_hsdp_replicate_size": 2},
            "hybrid",
            ("fp32",),
            ("bf16",),
            2,
        ),
        ({"use_fsdp": "yes", "fsdp_hsdp_replicate_size": "two"}, "full", ("fp32",), ("bf16",), None),
    ],
)
def test_a_configuration_says_what_may_be_drawn(
    config: dict[str, Any], sharding: str, reduce: tuple[str, ...], compute: tuple[str, ...], replicas: int | None
) -> None:
    offer = strategy_offers.offer_of(config)

    assert (offer.sharding, offer.reduce, offer.compute, offer.replicas) == (sharding, reduce, compute, replicas)
    assert not offer.configurable
    assert capabilities("strategy", config).extension == Extension(strategy=offer)
    assert capabilities("strategy", config).config == config


def test_a_class_is_given_the_configuration_as_it_is() -> None:
    assert capabilities("x.py:Strategy", {"any": 1}).config == {"any": 1}
    assert capabilities("x.py:Strategy", {"any": 1}).extension == Extension()


@pytest.mark.parametrize("config", [[], 3, None, "text", {1: 2}])
def test_a_configuration_is_an_object(config: object) -> None:
    with pytest.raises(UsageError, match="--config: expected a JSON object"):
        with_config(parse("strategy"), config)


def test_a_built_in_has_its_own_configuration() -> None:
    with pytest.raises(UsageError, match="give one to --subject strategy"):
        with_config(parse("fsdp2"), {})


def test_a_case_keeps_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"use_fsdp": True, "fsdp_reduce_dtype": "bf16"}
    given = scenario(2)

    loaded = codec.load(
        codec.save(codec.Case(given, codec.SubjectReference("strategy", "strategy", {}, config)), tmp_path)
    )

    assert loaded.subject is not None
    assert loaded.subject.config == config
    assert from_case(loaded.subject.given, loaded.subject.absolute, {}, loaded.subject.config).config == config
    without = codec.encode(codec.Case(given, codec.SubjectReference("zero2", "zero2")))
    assert b'"config"' not in without


# --- classes ----------------------------------------------------------------------------------------------------------


def test_a_class_of_ones_own_is_told_by_its_methods() -> None:
    assert system_of(PlainDDP) == "strategy"
    assert declared(PlainFSDP) == ("tied", "unequal_start")
    assert all(builtin.system == "strategy" for builtin in map(BUILTIN.__getitem__, ("ddp", "fsdp2", "dmuon")))

    class Collects(PlainDDP):
        def collect(self) -> None: ...

    assert system_of(Collects) == "zero_master"


@pytest.mark.parametrize(
    ("names", "says"),
    [(("refresh",), "names 'refresh', which is no extension"), (("flush",), "there is no method flush")],
)
def test_what_a_class_declares_is_checked(names: tuple[str, ...], says: str) -> None:
    class Declares(PlainDDP):
        verify_extensions = names  # type: ignore[assignment]

    with pytest.raises(SubjectError, match=says):
        declared(Declares)


def test_a_configuration_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    for text, said in (("[]", "an object of keys and values"), ('{"n": 1%s}' % ("0" * 30), "64 bits"), ("{", "JSON")):
        path.write_text(text)
        with pytest.raises(CaseError, match=said):
            load_configuration(path)
    path.write_text('{"use_fsdp": true}')
    assert load_configuration(path) == {"use_fsdp": True}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "DDP"),
        ({"fsdp_reduce_dtype": "bf16"}, "DDP (use_fsdp is not true, so fsdp_reduce_dtype mean nothing)"),
        ({"use_fsdp": True}, "FSDP2, full_shard"),
        (
            {"use_fsdp": True, "fsdp_sharding_strategy": "hybrid_shard", "use_dmuon": True},
            "FSDP2, hybrid_shard, Muon on dedicated owners",
        ),
    ],
)
def test_what_a_configuration_asks_for_is_said(config: dict[str, Any], said: str) -> None:
    assert strategy_offers.summary_of(config) == said


def test_dedicated_matrices_are_drawn_where_a_configuration_asks_for_them() -> None:
    assert strategy_offers.offer_of({"use_fsdp": True, "use_dmuon": True}).dedicated
    assert not strategy_offers.offer_of({"use_fsdp": True}).dedicated
