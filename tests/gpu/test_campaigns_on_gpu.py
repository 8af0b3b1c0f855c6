"""Campaigns on GPUs: right systems hold on NCCL at every world, on gloo and simulated; broken ones are caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.report.result import Result
from tests.gpu.needs import WORLDS
from tests.support import Campaigns

HERE = Path(__file__).parent
SYSTEMS = ("zero2", "muon", "ddp", "fsdp2", "fsdp2_zero2", "dmuon")
OWN = f"{HERE / 'subjects.py'}:"

nccl = pytest.mark.parametrize("on", ["nccl"], indirect=True)
shared = pytest.mark.parametrize("on", ["sim", "gloo"], indirect=True)
worlds = pytest.mark.parametrize("world", [pytest.param(world, marks=pytest.mark.gpus(world)) for world in WORLDS])


def holds(result: Result) -> None:
    failure = result.failure
    assert result.verdict == "holds", result.reason if failure is None else (failure.property, failure.message)
    assert result.examples.run > 0
    assert result.device == "cuda"
    assert " x " in result.versions["gpu"]


# --- right ------------------------------------------------------------------------------------------------------------


@nccl
@worlds
@pytest.mark.parametrize("name", SYSTEMS)
def test_our_systems_hold_on_nccl(on: Campaigns, world: int, name: str) -> None:
    result = on.run(name, worlds=(world,), examples=16)
    holds(result)
    assert set(result.versions) >= {"cuda", "driver", "gpu", "nccl", "NCCL_ALGO", "NCCL_PROTO"}


@nccl
@pytest.mark.gpus(4)
def test_sums_that_round_are_explained_or_bounded_on_nccl(on: Campaigns) -> None:
    """No rule is known; each of them is judged, and counted by what it was judged by."""
    result = on.run("zero2", worlds=(3, 4), examples=80)
    holds(result)
    assert result.oracle["ordered"] + result.oracle["bound"] > 0


@shared
@pytest.mark.parametrize("name", [*SYSTEMS, "hsdp", "zero_redundancy"])
def test_our_systems_hold_where_ranks_share_a_gpu(on: Campaigns, name: str) -> None:
    holds(on.run(name, worlds=(2, 3) if on.backend == "gloo" else (2, 3, 4), examples=12))


@pytest.mark.parametrize("on", ["sim"], indirect=True)
def test_a_long_campaign_in_simulated_worlds_of_up_to_eight_ranks(on: Campaigns) -> None:
    result = on.run("zero2", worlds=(1, 2, 3, 4, 8), examples=60)
    holds(result)
    assert result.oracle["exact"] > 0
    assert result.oracle["ordered"] > 0


@pytest.mark.parametrize("on", ["sim", "gloo", "nccl"], indirect=True)
def test_what_is_queued_on_another_stream_is_seen(on: Campaigns) -> None:
    holds(on.run(f"{OWN}OnSideStream", worlds=(1,) if on.backend == "nccl" else (2, 3), examples=16))


@nccl
@pytest.mark.gpus(2)
def test_what_is_queued_on_another_stream_is_seen_on_two_gpus(on: Campaigns) -> None:
    holds(on.run(f"{OWN}OnSideStream", worlds=(2,), examples=16))


# --- broken -----------------------------------------------------------------------------------------------------------


def violated(result: Result, properties: set[str], stages: set[str]) -> None:
    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    assert (result.failure.property in properties, result.failure.stage in stages) == (True, True), result.failure
    assert "--device cuda" in (result.failure.replay or "") or "--backend nccl" in (result.failure.replay or "")


@pytest.mark.parametrize("on", ["sim", "gloo", "nccl"], indirect=True)
def test_a_wrong_bit_is_found(on: Campaigns) -> None:
    result = on.run(f"{OWN}WrongLastBit", worlds=(1,), examples=6)
    violated(result, {"gradient", "spill", "ownership"}, {"reduce"})


@pytest.mark.parametrize("on", ["sim", "gloo", "nccl"], indirect=True)
def test_a_gradient_that_is_read_before_it_is_there_is_found(on: Campaigns) -> None:
    result = on.run(f"{OWN}ReadsBeforeItIsThere", worlds=(1,), examples=6)
    violated(result, {"gradient", "spill", "ownership", "determinism"}, {"reduce"})


@pytest.mark.parametrize(
    ("name", "properties", "stage"),
    [
        ("ReducesInBf16", "gradient|spill", "reduce"),
        ("LocalNorm", "norm", "norm"),
        ("LastRankStale", "weights", "gather"),
    ],
)
@pytest.mark.parametrize(
    ("on", "world"),
    [
        ("sim", 3),
        ("gloo", 3),
        pytest.param("nccl", 2, marks=pytest.mark.gpus(2)),
        pytest.param("nccl", 3, marks=pytest.mark.gpus(3)),
    ],
    indirect=["on"],
)
def test_broken_classes_are_caught(on: Campaigns, world: int, name: str, properties: str, stage: str) -> None:
    result = on.run(f"broken.py:{name}", worlds=(world,), examples=60)
    violated(result, set(properties.split("|")) | {"agreement"}, {stage})


@pytest.mark.parametrize("on", ["sim", "gloo", pytest.param("nccl", marks=pytest.mark.gpus(3))], indirect=True)
def test_a_sum_outside_the_bound_of_any_order_is_found(on: Campaigns) -> None:
    result = on.run("broken.py:CompensatesWrongly", worlds=(3,), examples=60)
    violated(result, {"gradient", "spill"}, {"reduce"})


@pytest.mark.parametrize("on", ["gloo", "nccl"], indirect=True)
def test_a_gpu_that_is_never_done_is_told_of(on: Campaigns) -> None:
    result = on.run(f"{OWN}NeverEnds", worlds=(1,), examples=1, timeout_s=60.0, shrink_s=0.0)
    violated(result, {"progress"}, {"norm"})


@nccl
@pytest.mark.gpus(2)
def test_a_rank_that_waits_in_nccl_is_told_of(on: Campaigns) -> None:
    result = on.run(f"{OWN}WaitsForNobody", worlds=(2,), examples=1, timeout_s=60.0, shrink_s=0.0)
    violated(result, {"progress", "traffic"}, {"gather"})
