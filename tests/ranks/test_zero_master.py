"""ZeroMaster on real gloo ranks at worlds 2, 3 and 4: at 2 alone the order and the place of a sum cannot go wrong.

Gradients are multiples of 2**-7 whose sums are exact in fp32, so "equal" means every bit, with no tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.launch.pool import RankPool

WORLDS = [2, 3, 4]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm ranks for all tests of this file."""
    with RankPool("tests.ranks.zero_master_handler:serve", preload=["zero2core", "torch._dynamo"]) as ranks:
        yield ranks


def on_ranks(pool: RankPool, world: int, do: str, **arguments: Any) -> list[Any]:
    """What every rank replied; fails with the first failed rank's traceback."""
    outcome = pool.run(world, json.dumps({"do": do, **arguments}).encode(), timeout_s=60.0)
    if not outcome.replied:
        first = outcome.ranks[outcome.first_failed or 0]
        pytest.fail(
            f"rank {first.rank} of {world} {first.end.value}: {first.error}\n{first.output}{first.stacks or ''}"
        )
    return [json.loads(report.reply or b"null") for report in outcome.ranks]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("bucket", "dtypes", "strided", "foreach"),
    [
        (1, "bf16", False, False),  # buckets of `world` elements: every edge crosses everything
        (16, "bf16", False, True),
        (16, "mixed", True, False),  # buckets of one dtype and of several
        (72, "fp32", True, True),  # one bucket for all
        (1000, "mixed", False, True),
    ],
)
def test_trains_bit_for_bit_like_an_unsharded_trainer_and_communicates_what_it_says(
    pool: RankPool, world: int, bucket: int, dtypes: str, strided: bool, foreach: bool
) -> None:
    replies = on_ranks(pool, world, "train", bucket=bucket, dtypes=dtypes, strided=strided, foreach=foreach)

    assert sum(reply["compared"] for reply in replies) == 3 * 72
    assert [reply["spills"] for reply in replies] == [3] * (world - 1) + [0]
    assert len({reply["collectives"] for reply in replies}) == 1
    assert replies[0]["collectives"] > 10


@pytest.mark.parametrize("world", WORLDS)
def test_padding_that_adamw_made_nan_is_zero_after_the_gather_and_counts_nowhere(pool: RankPool, world: int) -> None:
    replies = on_ranks(pool, world, "padding", eps=0.0)
    numel = 2 * world + 1

    assert sum(reply["nan"] for reply in replies) == world - 1
    assert {reply["norm"] for reply in replies} == {numel * float(world) ** 2}
    assert {reply["full"] for reply in replies} == {0}


@pytest.mark.parametrize("world", WORLDS)
def test_the_norm_has_the_same_bits_on_every_rank(pool: RankPool, world: int) -> None:
    replies = on_ranks(pool, world, "norm_bits", numel=300_001)

    assert len({reply["bits"] for reply in replies}) == 1
    assert float.fromhex(replies[0]["bits"]) > 1.0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("odd", "lines"),
    [
        ({"shapes": [[3], [5]]}, ["params[1]: shape (4,), torch.bfloat16", "params[1]: shape (5,), torch.bfloat16"]),
        ({"shapes": [[3]]}, ["params[1]: shape (4,), torch.bfloat16", "nothing more"]),
        ({"shapes": [[3], [4], [1]]}, ["nothing more", "params[2]: shape (1,), torch.bfloat16"]),
        ({"dtypes": "fp32"}, ["params[0]: shape (3,), torch.bfloat16", "params[0]: shape (3,), torch.float32"]),
        ({"bucket": 9}, ["bucket 8", "bucket 9"]),
    ],
    ids=["shape", "fewer", "more", "dtype", "bucket"],
)
def test_ranks_that_differ_are_refused_on_all_ranks_with_the_first_difference(
    pool: RankPool, world: int, odd: dict[str, Any], lines: list[str]
) -> None:
    replies = on_ranks(pool, world, "refuse", odd={"rank": world - 1, **odd})

    assert len({reply["text"] for reply in replies}) == 1
    assert [reply["type"] for reply in replies] == ["RankMismatchError"] * world
    assert f"rank 0: {lines[0]}\n" in replies[0]["text"]
    assert f"rank {world - 1}: {lines[1]}\n" in replies[0]["text"]


@pytest.mark.parametrize("odd", [{"shapes": []}, {"frozen": True}, {"bucket": 0}], ids=["empty", "frozen", "bucket"])
def test_what_one_rank_refuses_the_others_do_not_wait_for(pool: RankPool, odd: dict[str, Any]) -> None:
    first, second, third = on_ranks(pool, 3, "refuse", odd={"rank": 1, **odd})

    assert second["type"] == "ValueError"
    assert first["type"] == third["type"] == "RankMismatchError"
    assert f"rank 1: refused: {second['text']}" in first["text"]
    assert first["text"] == third["text"]


def test_what_all_ranks_refuse_is_refused_as_at_world_1(pool: RankPool) -> None:
    replies = on_ranks(pool, 2, "refuse", odd={"frozen": True})

    assert [reply["type"] for reply in replies] == ["ValueError"] * 2
    assert replies[0]["text"].startswith("params[0], shape (3,), does not require gradients")


@pytest.mark.parametrize("claimed", [1, 4])
def test_another_world_than_the_groups_is_refused_with_both_numbers(pool: RankPool, claimed: int) -> None:
    replies = on_ranks(pool, 2, "refuse", odd={"world": claimed})

    assert f"rank=0, world={claimed}, but in the process group this process is rank 0 of 2" in replies[0]["text"]
    assert [reply["type"] for reply in replies] == ["ValueError"] * 2


@pytest.mark.parametrize("world", [3, 4])
def test_a_group_of_some_ranks_sums_over_these_only(pool: RankPool, world: int) -> None:
    replies = on_ranks(pool, world, "subgroup")

    assert replies[0] == {"compared": 0}
    assert sum(reply["compared"] for reply in replies) == 72


@pytest.mark.parametrize(("world", "src"), [(2, 0), (2, 1), (3, 2)])
def test_broadcast_overwrites_every_parameter_and_buffer_in_place(pool: RankPool, world: int, src: int) -> None:
    replies = on_ranks(pool, world, "broadcast", src=src)

    assert [reply["compared"] for reply in replies] == [21] * world
    assert [reply["kinds"] for reply in replies] == [["all_gather"] + ["broadcast"] * 14] * world


def test_broadcast_between_unlike_modules_is_refused_on_all_ranks(pool: RankPool) -> None:
    replies = on_ranks(pool, 2, "broadcast_unlike")

    assert [reply["type"] for reply in replies] == ["RankMismatchError"] * 2
    assert "rank 0: weight: shape (2, 2), torch.float32\n  rank 1: weight: shape (3, 2)" in replies[0]["text"]
