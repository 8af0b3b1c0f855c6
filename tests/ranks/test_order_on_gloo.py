"""The rule for gloo's order of addition on real ranks: against what probing reveals, and bit for bit on random data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from harness.launch.pool import RankPool
from tests.support import paired

WORLDS = [2, 3, 4]
KINDS = ["all_reduce", "reduce_scatter", "reduce_scatter_list", "reduce"]
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm ranks for all tests of this file."""
    with RankPool("tests.ranks.order_handler:serve", preload=["harness.oracles.order"]) as ranks:
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


def fitting(kind: str, world: int, lengths: list[int]) -> list[int]:
    """Lengths that the collective takes: a reduce-scatter needs a multiple of the world, here of at least as much."""
    factor = world if kind.startswith("reduce_scatter") else 1
    return [-(-length // factor) * factor for length in lengths]


def expected_elements(kind: str, world: int, lengths: list[int], roots: list[int]) -> int:
    """How many sums all ranks get together."""
    return sum(lengths) * (world if kind == "all_reduce" else 1) * len(roots)


def roots_of(kind: str, world: int) -> list[int]:
    return list(range(world)) if kind == "reduce" else [0]


def beyond_two_segments(kind: str, world: int, dtype: str) -> int:
    """A length whose chunks are just above 2 MiB: the rules of ``reduce`` and of the others part there."""
    pieces = world if kind == "reduce_scatter_list" else 1
    return pieces * (world * (2 << 20) // ITEMSIZE[dtype] + world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "dtype"), paired(KINDS, ["fp32", "bf16"]))
def test_probing_reveals_the_rule(pool: RankPool, kind: str, dtype: str, world: int) -> None:
    lengths = fitting(kind, world, [1, 5, 9, 12, 64, 2001])
    roots = roots_of(kind, world)

    replies = on_ranks(pool, world, "probe", kind=kind, dtype=dtype, lengths=lengths, roots=roots, most=10_000)

    assert [reply["wrong"] for reply in replies] == [[]] * world
    compared = sum(reply["compared"] for reply in replies)
    assert compared == expected_elements(kind, world, lengths, roots)
    # Only at world 2 is everything in rank order. (At 3 the chunk that starts with 0 and 1 is.)
    in_rank_order = sum(reply["in_rank_order"] for reply in replies)
    assert in_rank_order == compared if world == 2 else in_rank_order < compared / 2


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce"])
def test_probing_reveals_the_rule_above_two_segments(pool: RankPool, kind: str) -> None:
    length = beyond_two_segments(kind, 3, "bf16")

    replies = on_ranks(pool, 3, "probe", kind=kind, dtype="bf16", lengths=[length], roots=[2], most=10_000)

    assert [reply["wrong"] for reply in replies] == [[]] * 3
    assert sum(reply["compared"] for reply in replies) == 10_000 * (1 if kind == "reduce" else 3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, dtype) for kind in KINDS for dtype in ("fp32", "bf16")), ("all_reduce", "fp16")],
)
def test_adding_by_the_rule_gives_gloos_bits(pool: RankPool, kind: str, dtype: str, world: int) -> None:
    """Random data that rounds, overflows, cancels and underflows; rank order gives other bits, but for world 2."""
    rng = random.Random(f"{kind} {dtype} {world}")
    lengths = fitting(kind, world, [1, world, 9, 12, 4096, *(rng.randint(1, 9000) for _ in range(8))])
    roots = roots_of(kind, world)

    replies = on_ranks(pool, world, "compare", kind=kind, dtype=dtype, lengths=lengths, roots=roots, seed=world)

    assert [reply["wrong"] for reply in replies] == [[]] * world
    compared = sum(reply["compared"] for reply in replies)
    assert compared == expected_elements(kind, world, lengths, roots)
    assert compared / 100 < sum(reply["nonfinite"] for reply in replies) < compared / 4
    by_rank = sum(reply["rank_order_differs"] for reply in replies)
    assert by_rank == 0 if world == 2 else by_rank > compared / 20


@pytest.mark.parametrize(
    ("kind", "dtype", "world"),
    [
        *((kind, "fp32", world) for kind in ("all_reduce", "reduce") for world in WORLDS),
        ("reduce_scatter", "bf16", 3),
        ("reduce", "bf16", 3),
    ],
)
def test_adding_by_the_rule_gives_gloos_bits_above_two_segments(
    pool: RankPool, kind: str, dtype: str, world: int
) -> None:
    length = beyond_two_segments(kind, world, dtype)

    replies = on_ranks(pool, world, "compare", kind=kind, dtype=dtype, lengths=[length], roots=[0], seed=1)

    assert [reply["wrong"] for reply in replies] == [[]] * world
    compared = sum(reply["compared"] for reply in replies)
    assert compared == expected_elements(kind, world, [length], [0])
    by_rank = sum(reply["rank_order_differs"] for reply in replies)
    assert by_rank == 0 if world == 2 else by_rank > compared / 20


def test_adding_by_the_rule_gives_gloos_bits_in_a_list_of_pieces_above_two_segments(pool: RankPool) -> None:
    """A list is one all-reduce for each piece, as the chunks show: 524289 elements, not the 786432 of a ``reduce``."""
    length = beyond_two_segments("reduce_scatter_list", 3, "fp32")

    replies = on_ranks(
        pool, 3, "compare", kind="reduce_scatter_list", dtype="fp32", lengths=[length], roots=[0], seed=2
    )

    assert [reply["wrong"] for reply in replies] == [[]] * 3
    assert [reply["compared"] for reply in replies] == [length // 3] * 3
    assert all(reply["rank_order_differs"] > length / 100 for reply in replies)
