"""`bench` on real ranks: bare runs make the calls of full ones, and a subject that fails ends it with a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.bench.campaign import PARTS, Bench, BenchOptions, BenchResult, ViolatedError, run_bench, start_pool
from harness.bench.messages import BareReport, RunBare, RunTimed, decode_bare, decode_timed, encode
from harness.drive.tasks import SubjectName
from harness.errors import UsageError
from harness.launch.pool import RankPool
from harness.scenario import generate
from tests.support import repetitions, sampled, subject

ZERO2 = SubjectName("zero2")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that stay for all benches here."""
    with start_pool() as ranks:
        yield ranks


def _bench(pool: RankPool, name: str = "zero2", world: int = 2, examples: int = 4) -> BenchResult:
    options = BenchOptions(
        subject=subject(name),
        worlds=(world,),
        examples=examples,
        seed=4,
        rounds=2,
        table_numels=(100,),
        table_buckets=(2,),
    )
    return run_bench(options, lambda text: None, pool=pool)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bare_run_issues_the_collectives_of_the_full_one(pool: RankPool, world: int) -> None:
    seen = set()
    for index in range(repetitions(6, 12)):
        scenario = generate.draw(6, index, (world,))
        full = pool.run(world, encode(RunTimed(ZERO2, scenario)), timeout_s=60)
        bare = pool.run(world, encode(RunBare(ZERO2, scenario)), timeout_s=60)

        for of_full, of_bare in zip(full.ranks, bare.ranks, strict=True):
            logged = decode_timed(of_full.reply or b"").collectives
            report: BareReport = decode_bare(of_bare.reply or b"")
            assert report.problem is None
            assert report.collectives == tuple((call.kind, call.length) for call in logged)
            seen |= {kind for kind, _ in report.collectives}
    assert seen == ({"all_gather", "all_reduce", "reduce_scatter"} if world > 1 else set())


def test_a_bench_has_every_world_every_part_and_both_tables(pool: RankPool) -> None:
    result = _bench(pool)

    assert (result.verdict, result.reason, result.violation) == ("holds", None, None)
    cost = result.per_world[2]
    assert cost.scenarios + cost.discarded == 4
    assert tuple(cost.parts) == PARTS
    assert sum(cost.parts.values()) == pytest.approx(cost.full)
    assert [(row.numel, row.buckets) for row in result.by_elements] == [(100, 4)]
    assert [row.buckets for row in result.by_buckets] == [2]


def test_scenarios_outside_the_subjects_space_are_left_out(pool: RankPool) -> None:
    cost = _bench(pool, "museum:refuses-third-part", examples=12).per_world[2]

    assert cost.discarded > 0
    assert cost.scenarios == 12 - cost.discarded


@pytest.mark.parametrize("name", sampled(["RaisesInGather", "LostOffsetAtBucketEdge"], every=2))
def test_a_subject_that_fails_is_a_violation_in_a_sentence(pool: RankPool, name: str) -> None:
    result = _bench(pool, f"broken.py:{name}", examples=12)

    assert result.verdict == "violated"
    assert result.violation is not None
    assert result.violation.startswith("world 2, rank")
    assert "\n" not in result.violation


def test_a_subject_that_raises_in_a_bare_run_is_one_too(pool: RankPool) -> None:
    bench = Bench(subject("broken.py:RaisesInGather"), pool, 2)
    scenario = next(
        scenario for scenario in (generate.draw(6, index, (2,)) for index in range(50)) if len(scenario.operations) > 9
    )

    with pytest.raises(ViolatedError, match=r"world 2, in a bare run: rank \d raised ValueError: planted"):
        bench.bare(scenario)


def test_a_class_without_the_interface_is_bad_usage(pool: RankPool) -> None:
    with pytest.raises(UsageError, match="discard"):
        _bench(pool, "unusual.py:LacksDiscard")
