"""The harness's own layout: exhaustive for small sizes, against an element by element model."""

from __future__ import annotations

import itertools

import pytest

from harness.scenario.partition import Bucket, Partition, Segment, round_bucket


def owners(partition: Partition) -> list[list[int | None]]:
    """For each rank the flat element at every position of its shard, None for padding; one element at a time."""
    shards: list[list[int | None]] = [[] for _ in range(partition.world)]
    for start, end, padded in partition.buckets:
        for position in range(padded):
            flat = start + position if start + position < end else None
            shards[position // (padded // partition.world)].append(flat)
    return shards


def check_against_model(partition: Partition) -> None:
    shards = owners(partition)
    owned = sorted(flat for shard in shards for flat in shard if flat is not None)
    assert owned == list(range(partition.numel))
    assert [len(shard) for shard in shards] == [partition.shard_len] * partition.world
    for rank, shard in enumerate(shards):
        from_segments = {
            position + offset: start + offset
            for start, stop, position in partition.segments(rank)
            for offset in range(stop - start)
        }
        assert from_segments == {position: flat for position, flat in enumerate(shard) if flat is not None}
        assert all(start < stop for start, stop, _ in partition.segments(rank))
        padding = [position for start, stop in partition.padding(rank) for position in range(start, stop)]
        assert padding == [position for position, flat in enumerate(shard) if flat is None]
        assert all(start < stop for start, stop in partition.padding(rank))
        for flat in from_segments.values():
            bucket, owner = partition.owner(flat)
            assert owner == rank
            start, stop = partition.piece(bucket, rank)
            assert start <= flat < stop


def test_every_small_layout_is_right_element_by_element() -> None:
    for world, numel, bucket in itertools.product(range(1, 6), range(1, 20), range(1, 12)):
        partition = Partition.from_request(numel, world, bucket)
        assert partition.problem() is None
        size = max(bucket // world * world, world)
        assert [cut.length for cut in partition.buckets[:-1]] == [size] * (len(partition.buckets) - 1)
        assert all(cut.padded == size for cut in partition.buckets[:-1])
        assert partition.buckets[-1].padded - partition.buckets[-1].length < world
        check_against_model(partition)


def test_a_worked_example() -> None:
    """Seven elements, two ranks, buckets of 5: rounded down to 4; the last one has 3 elements and one of padding."""
    partition = Partition.from_request(7, 2, 5)
    assert partition.buckets == (Bucket(0, 4, 4), Bucket(4, 7, 4))
    assert partition.shard_len == 4
    assert [partition.piece(bucket, rank) for bucket in (0, 1) for rank in (0, 1)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert partition.segments(0) == [Segment(0, 2, 0), Segment(4, 6, 2)]
    assert partition.segments(1) == [Segment(2, 4, 0), Segment(6, 7, 2)]
    assert [partition.padding(rank) for rank in (0, 1)] == [[], [(3, 4)]]
    assert [partition.owner(flat) for flat in range(7)] == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1)]


def test_a_piece_that_is_all_padding_is_empty() -> None:
    partition = Partition.from_request(1, 3, 100)
    assert partition.buckets == (Bucket(0, 1, 3),)
    assert partition.piece(0, 2) == (1, 1)
    assert partition.segments(2) == []
    assert partition.padding(2) == [(0, 1)]


@pytest.mark.parametrize(
    ("bucket", "world", "size"), [(1, 3, 3), (2, 3, 3), (3, 3, 3), (5, 3, 3), (6, 3, 6), (7, 1, 7)]
)
def test_the_requested_bucket_is_rounded_down_but_not_below_the_world(bucket: int, world: int, size: int) -> None:
    assert round_bucket(bucket, world) == size


def test_large_layouts_are_exact() -> None:
    """Integer arithmetic only: nothing is lost beyond 2**53."""
    numel = 2**60 + 1
    partition = Partition.from_request(numel, 3, 2**59)
    assert partition.problem() is None
    assert partition.buckets[-1].end == numel
    assert sum(stop - start for rank in range(3) for start, stop, _ in partition.segments(rank)) == numel
    assert partition.owner(numel - 1)[0] == len(partition.buckets) - 1


@pytest.mark.parametrize("request_", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_request_below_one_is_refused(request_: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Partition.from_request(*request_)


@pytest.mark.parametrize("flat", [-1, 7])
def test_an_element_outside_is_refused(flat: int) -> None:
    with pytest.raises(ValueError, match=f"element {flat} of 7"):
        Partition.from_request(7, 2, 4).owner(flat)


@pytest.mark.parametrize(
    "buckets",
    [
        [(0, 3, 4), (3, 7, 4)],  # padding inside
        [(4, 7, 4), (0, 4, 4)],  # another order
        [[0, 7, 100]],  # lists, much padding
        ((0, 0, 0), (0, 7, 8), (7, 7, 2)),  # empty buckets
    ],
)
def test_other_valid_layouts_of_a_subject_are_taken(buckets: object) -> None:
    partition = Partition.from_subject(7, 2, buckets)
    assert partition is not None
    assert partition.problem() is None
    check_against_model(partition)


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ([], "no bucket holds the elements from 0 to 7"),
        ([(0, 4, 4)], "no bucket holds the elements from 4 to 7"),
        ([(0, 2, 2), (4, 7, 4)], "no bucket holds the elements from 2 to 4"),
        ([(0, 4, 4), (3, 7, 4)], "bucket 1 starts at 3, but buckets hold the elements below 4 already"),
        ([(0, 4, 4), (0, 7, 8)], "bucket 1 starts at 0, but buckets hold the elements below 4 already"),
        ([(0, 8, 8)], "the buckets end at 8, but there are 7 elements"),
        ([(0, 7, 7)], "bucket 0 has a padded length of 7, no multiple of 2 ranks"),
        ([(0, 7, 6)], "bucket 0 has 7 elements, but a padded length of 6"),
        ([(-2, 7, 10)], "bucket 0 runs from -2 to 7"),
        ([(0, 7, 8), (7, 5, 8)], "bucket 1 runs from 7 to 5"),
    ],
)
def test_a_subject_layout_that_is_none_is_explained(buckets: object, problem: str) -> None:
    partition = Partition.from_subject(7, 2, buckets)
    assert partition is not None
    assert partition.problem() == problem


@pytest.mark.parametrize(
    "buckets", [None, 3, "abc", b"abcd", {"a": 1}, [(0, 7)], [0, 7, 8], [(0.0, 7.0, 8.0)], ["abc"], [(0, 7, None)]]
)
def test_what_is_no_sequence_of_three_integers_is_no_layout(buckets: object) -> None:
    assert Partition.from_subject(7, 2, buckets) is None
