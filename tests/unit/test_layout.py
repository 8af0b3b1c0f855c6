"""The layout, exhaustively for small sizes: every rule is checked against counting elements one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from zero2core.layout import FlatLayout, Owner, blocks

# Zero-size parameters at the ends and between others; sums from 1 to 13 straddle every bucket size below.
LISTS = [(1,), (2, 3), (0, 5, 0, 0, 4, 0), (1, 1, 1, 1, 1, 1, 1), (13,), (7, 0, 1)]


def layouts() -> Iterator[FlatLayout]:
    """Every small layout."""
    for numel, world, bucket in itertools.product(LISTS, range(1, 6), range(1, 16)):
        yield FlatLayout(numel, world, bucket)


def test_buckets_cover_the_vector_once_and_only_the_last_is_short_or_padded() -> None:
    for layout in layouts():
        covered = [element for start, end, _ in layout.buckets for element in range(start, end)]

        assert covered == list(range(sum(layout.numel))), layout
        for start, end, padded in layout.buckets[:-1]:
            assert end - start == padded == layout.bucket_len, layout
        start, end, padded = layout.buckets[-1]
        assert 0 < end - start <= padded <= layout.bucket_len, layout
        assert padded % layout.world == 0, layout
        assert padded - (end - start) < layout.world, layout


@pytest.mark.parametrize(
    ("bucket", "world", "expected"),
    [(1, 1, 1), (1, 4, 4), (3, 4, 4), (4, 4, 4), (7, 4, 4), (8, 4, 8), (2**25, 3, 2**25 - 2)],
)
def test_requested_bucket_is_rounded_down_to_the_world_but_never_below_it(
    bucket: int, world: int, expected: int
) -> None:
    layout = FlatLayout((3 * expected + 1,), world, bucket)

    assert layout.bucket_len == expected
    assert layout.buckets[0] == (0, expected, expected)
    assert len(layout.buckets) == 4


def test_every_element_has_exactly_one_owner_at_the_place_its_piece_says() -> None:
    for layout in layouts():
        owners: dict[int, Owner] = {}
        for number, (start, _, padded) in enumerate(layout.buckets):
            for position in range(padded):
                rank, inside = divmod(position, padded // layout.world)
                before = sum(bucket.padded // layout.world for bucket in layout.buckets[:number])
                owners[start + position] = Owner(number, rank, before + inside)

        assert [layout.owner(element) for element in range(layout.N)] == [owners[e] for e in range(layout.N)], layout


def test_segments_list_each_ranks_elements_and_leave_out_padding() -> None:
    for layout in layouts():
        for rank in range(layout.world):
            listed = {
                start + step: shard_offset + step
                for start, stop, shard_offset in layout.segments(rank)
                for step in range(stop - start)
            }
            owned = {e: layout.owner(e).shard_index for e in range(layout.N) if layout.owner(e).rank == rank}

            assert listed == owned, (layout, rank)
            assert all(start < stop for start, stop, _ in layout.segments(rank)), (layout, rank)


def test_shards_are_equally_long_and_end_with_their_padding() -> None:
    for layout in layouts():
        padding = layout.buckets[-1].padded - (layout.N - layout.buckets[-1].start)

        assert layout.shard_len * layout.world == layout.N + padding, layout
        assert sum(layout.num_owned(rank) for rank in range(layout.world)) == layout.N, layout
        for rank in range(layout.world):
            used = sorted(owner.shard_index for owner in map(layout.owner, range(layout.N)) if owner.rank == rank)
            assert used == list(range(layout.num_owned(rank))), (layout, rank)


def test_spans_of_any_range_are_its_elements_in_order() -> None:
    for numel in LISTS:
        layout = FlatLayout(numel, 2, 4)
        places = [(parameter, element) for parameter, count in enumerate(numel) for element in range(count)]
        for start, stop in itertools.combinations_with_replacement(range(layout.N + 1), 2):
            spans = list(layout.spans(start, stop))

            assert [(s.parameter, e) for s in spans for e in range(s.start, s.stop)] == places[start:stop]
            lengths = itertools.accumulate((s.stop - s.start for s in spans), initial=0)
            assert [s.offset for s in spans] == list(lengths)[: len(spans)]


@pytest.mark.parametrize("shape", [(6,), (1, 1), (3, 4), (4, 1, 3), (2, 3, 4), (2, 1, 3, 2)])
def test_blocks_of_any_range_are_its_elements_in_row_major_order(shape: tuple[int, ...]) -> None:
    order = list(itertools.product(*map(range, shape)))
    for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
        cut = list(blocks(shape, start, stop))
        elements = []
        for block in cut:
            assert block.offset == len(elements)
            inner = shape[len(block.rows) + 1 :]
            for row in range(block.start, block.stop):
                elements += [(*block.rows, row, *rest) for rest in itertools.product(*map(range, inner))]

        assert elements == order[start:stop]
        assert len(cut) <= 2 * len(shape) - 1


def test_offsets_are_the_prefix_sums() -> None:
    assert FlatLayout((4, 0, 3), 2, 2).offsets == (0, 4, 4, 7)


def test_a_layout_is_frozen_and_equal_by_value() -> None:
    layout = FlatLayout((4,), 2, 2)

    with pytest.raises(AttributeError):
        layout.world = 3  # type: ignore[misc]
    assert layout == FlatLayout((4,), 2, 2)
    assert layout != FlatLayout((4,), 2, 3)


def test_a_layout_of_a_trillion_elements_costs_only_its_buckets() -> None:
    layout = FlatLayout((10**12, 7), 64, 2**35)

    assert len(layout.buckets) == 30
    assert layout.owner(10**12 + 6).bucket == 29


@pytest.mark.parametrize(
    ("numel", "world", "bucket", "message"),
    [
        ((), 1, 1, "no elements at all"),
        ((0, 0), 1, 1, "no elements at all in 2 parameters"),
        ((4, -1), 1, 1, "negative"),
        ((4,), 0, 1, "world=0"),
        ((4,), 1, 0, "bucket=0"),
    ],
)
def test_impossible_layouts_are_refused(numel: tuple[int, ...], world: int, bucket: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatLayout(numel, world, bucket)


@pytest.mark.parametrize("element", [-1, 7])
def test_an_element_outside_the_vector_has_no_owner(element: int) -> None:
    with pytest.raises(IndexError, match="flat vector of 7 elements"):
        FlatLayout((7,), 2, 4).owner(element)
