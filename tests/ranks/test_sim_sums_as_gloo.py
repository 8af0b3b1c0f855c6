"""What a simulated world computes in ring order has the bits of gloo: real ranks, all kinds, operations and dtypes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from harness.drive.tasks import RunScenario, SubjectName, encode
from harness.launch.pool import RankPool
from harness.scenario import presets
from harness.verdict import RankVerdict
from tests.support import Campaigns, paired, sampled, subject

KINDS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list"]
FLOATING = ["float64", "float32", "bfloat16", "float16"]
INTEGER = ["int64", "int32", "int8", "uint8", "bool"]
COMPLEX = ["complex64", "complex128"]
NONE = ["int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"]
BITWISE = ["BAND", "BOR", "BXOR"]
OPS = ["SUM", "PRODUCT", "MAX", "MIN"]
PAIRS = [
    *((dtype, op) for dtype in FLOATING for op in (*OPS, "AVG")),
    *((dtype, op) for dtype in INTEGER for op in (*OPS, *BITWISE)),
    *((dtype, op) for dtype in COMPLEX for op in ("SUM", "AVG")),
]
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "complex64": 8}

Case = tuple[str, str, str, int, int]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm ranks for all tests of this file."""
    with RankPool("tests.ranks.sums_handler:serve", preload=["harness.sim.summation"]) as ranks:
        yield ranks


def on_ranks(pool: RankPool, world: int, do: str, **arguments: Any) -> list[Any]:
    """What every rank replied; fails with the first failed rank's traceback."""
    outcome = pool.run(world, json.dumps({"do": do, **arguments}).encode(), timeout_s=120.0)
    if not outcome.replied:
        first = outcome.ranks[outcome.first_failed or 0]
        pytest.fail(
            f"rank {first.rank} of {world} {first.end.value}: {first.error}\n{first.output}{first.stacks or ''}"
        )
    return [json.loads(report.reply or b"null") for report in outcome.ranks]


def length_for(rng: random.Random, kind: str, world: int) -> int:
    """From one element to some thousands, half of them where a chunk begins or ends; what the collective divides."""
    edge = 2 * world * rng.randint(1, 2400 // world) + rng.choice([-1, 0, 1])
    length = rng.choice([rng.randint(1, 5000), rng.randint(1, 4 * world), edge, edge])
    return -(-length // world) * world if kind.startswith("reduce_scatter") else length


def own_elements(cases: list[Case], world: int) -> int:
    """How many elements all ranks together get."""
    return sum(length * (world if kind == "all_reduce" else 1) for kind, _, _, length, _ in cases)


def check(replies: list[Any], cases: list[Case], world: int) -> None:
    """All ranks found equal bits in all elements of the cases."""
    assert [reply["wrong"] for reply in replies] == [[]] * world
    assert sum(reply["compared"] for reply in replies) == own_elements(cases, world)


@pytest.mark.parametrize("world", sampled(range(2, 9), every=3))
def test_every_operation_on_every_dtype_has_gloos_bits(pool: RankPool, world: int) -> None:
    rng = random.Random(world)
    num_kinds = 4 if world < 4 else 2 if world < 6 else 1  # collectives of many ranks are slow
    cases = [
        (kind, dtype, op, length_for(rng, kind, world), rng.randrange(world))
        for dtype, op in PAIRS
        for kind in rng.sample(KINDS, num_kinds)
    ]

    replies = on_ranks(pool, world, "compare", cases=cases, seed=1000 * world)

    check(replies, cases, world)
    assert sum(reply["nans"] for reply in replies) > 100


@pytest.mark.parametrize(("dtype", "world"), paired(FLOATING, [3, 5, 8]))
def test_the_ring_and_not_another_order_has_gloos_bits(pool: RankPool, dtype: str, world: int) -> None:
    """Rank order, or a maximum that keeps nan, is told apart by these very comparisons."""
    for op in ("SUM", "PRODUCT", "MAX", "MIN"):
        rng = random.Random(f"{world} {dtype} {op}")
        cases = [(kind, dtype, op, length_for(rng, kind, world), rng.randrange(world)) for kind in KINDS * 2]

        replies = on_ranks(pool, world, "compare", cases=cases, seed=world, others=True)

        check(replies, cases, world)
        assert sum(reply["otherwise"] for reply in replies) > own_elements(cases, world) / 100, op


@pytest.mark.parametrize(
    ("kind", "dtype", "op", "world"),
    sampled(
        [
            ("all_reduce", "float32", "SUM", 3),
            ("reduce", "float64", "MIN", 2),
            ("reduce", "bfloat16", "PRODUCT", 4),
            ("all_reduce", "complex64", "SUM", 3),
            ("reduce_scatter", "bfloat16", "SUM", 3),
            ("reduce", "float32", "SUM", 3),
            ("reduce_scatter_list", "float64", "AVG", 3),
        ],
        every=2,
    ),
)
def test_chunks_of_more_than_two_segments_have_gloos_bits(
    pool: RankPool, kind: str, dtype: str, op: str, world: int
) -> None:
    """A segment has at most 1 MiB of the dtype: beyond two the rule is another, and ``reduce`` has its own."""
    pieces = world if kind == "reduce_scatter_list" else 1
    length = pieces * (world * (2 << 20) // ITEMSIZE[dtype] + world)

    replies = on_ranks(pool, world, "compare", cases=[(kind, dtype, op, length, 0)], seed=1)

    check(replies, [(kind, dtype, op, length, 0)], world)


@pytest.mark.parametrize("kind", KINDS)
def test_what_gloo_refuses_is_refused_and_nothing_else(pool: RankPool, kind: str) -> None:
    ops = [*OPS, "AVG", *BITWISE]
    dtypes = [*FLOATING, *INTEGER, *COMPLEX, *NONE]

    replies = on_ranks(pool, 2, "refusals", kind=kind, dtypes=dtypes, ops=ops)

    assert [reply["wrong"] for reply in replies] == [[], []]
    assert [reply["refused"] for reply in replies] == [len(dtypes) * len(ops) - len(PAIRS)] * 2


@pytest.mark.parametrize(("order", "unresolved"), [("ring", False), ("tree", True), ("random", True)])
def test_the_reference_starts_from_the_order_of_the_task(campaigns: Campaigns, order: str, unresolved: bool) -> None:
    """gloo adds in a ring: a reference that was told another order does not explain sums that round."""
    scenario = presets.campaign(presets.parameters("tiny-mlp"), world=4, bucket=1000, seed=3)[1]
    task = RunScenario(SubjectName(subject("museum:plain-zero").absolute), scenario, order=order)

    outcome = campaigns.pool.run(4, encode(task), timeout_s=120.0)

    assert outcome.replied, [report.error or report.output for report in outcome.ranks]
    verdicts = [msgspec.msgpack.decode(report.reply or b"", type=RankVerdict) for report in outcome.ranks]
    assert [verdict.divergence for verdict in verdicts] == [None] * 4
    assert any(verdict.unresolved for verdict in verdicts) == unresolved
