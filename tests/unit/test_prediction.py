"""The order predicted from a log of collectives: for every layout, element by element, from kind, length and place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from harness.oracles.order import Order, Tree, fold, gloo, rule
from harness.oracles.prediction import Call, predict, summing_calls
from harness.scenario.partition import Partition
from harness.verdict import Collective

# Layouts that only a subject states, of 23 elements over 3 ranks: other orders, padding inside, empty buckets.
STATED: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((12, 23, 12), (0, 12, 12)),
    ((20, 23, 9), (9, 20, 15), (0, 9, 9)),
    ((0, 9, 12), (9, 16, 9), (16, 23, 12)),
    ((0, 0, 0), (9, 9, 3), (9, 23, 27), (0, 9, 9), (23, 23, 6)),
)


def stated(buckets: Sequence[tuple[int, int, int]], numel: int = 23, world: int = 3) -> Partition:
    partition = Partition.from_subject(numel, world, buckets)
    assert partition is not None
    assert partition.problem() is None
    return partition


PARTITIONS = [
    *(
        Partition.from_request(numel, world, bucket)
        for world, numel, bucket in itertools.product((1, 2, 3, 4, 5), (1, 7, 24, 61), (1, 9, 12, 20, 100))
    ),
    *map(stated, STATED),
]


def trees(order: Order) -> list[Tree]:
    """Of each element."""
    return [order.trees[label] for label in order.labels.tolist()]


def unordered(tree: Tree) -> object:
    """The same for two trees that differ in left and right alone: a sum of two commutes."""
    return tree if isinstance(tree, int) else frozenset(map(unordered, tree))


def check_elements(partition: Partition, calls: frozenset[Call], tree: Callable[[int, int, int, int], Tree]) -> None:
    """The prediction has exactly the partition's elements, each with the tree of (position, length, padded, world)."""
    found = trees(predict(calls, partition))
    assert len(found) == partition.numel
    for start, end, padded in partition.buckets:
        for position in range(end - start):
            assert found[start + position] == tree(position, end - start, padded, partition.world), (
                partition,
                start,
                position,
            )


def of_gloo(kind: str, length: int, world: int, position: int) -> Tree:
    return trees(gloo(kind, length, world))[position]


# --- what a bucket was added by ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reduce_scatter", "reduce_scatter_list", "all_reduce"])
def test_one_call_for_each_padded_bucket(kind: str) -> None:
    for partition in PARTITIONS:
        calls = frozenset((kind, padded) for _, _, padded in partition.buckets)
        check_elements(partition, calls, lambda position, _, padded, world: of_gloo(kind, padded, world, position))


def test_one_all_reduce_for_each_bucket_without_its_padding() -> None:
    """The order is that of the shorter call: what is behind the last element is not in it."""

    def tree(position: int, length: int, _: int, world: int) -> Tree:
        return of_gloo("all_reduce", length, world, position)

    differs = False
    for partition in PARTITIONS:
        calls = frozenset(("all_reduce", bucket.length) for bucket in partition.buckets)
        if not any(
            ("all_reduce", padded) in calls and padded > end - start for start, end, padded in partition.buckets
        ):
            check_elements(partition, calls, tree)
        padded_calls = frozenset(("all_reduce", padded) for _, _, padded in partition.buckets)
        differs |= trees(predict(calls, partition)) != trees(predict(padded_calls, partition))
    assert differs


def test_one_reduce_for_each_piece() -> None:

    def tree(position: int, _: int, padded: int, world: int) -> Tree:
        return of_gloo("reduce", padded // world, world, position % (padded // world))

    for partition in PARTITIONS:
        calls = frozenset(("reduce", padded // partition.world) for _, _, padded in partition.buckets)
        check_elements(partition, calls, tree)


@pytest.mark.parametrize(
    "calls",
    [
        (),
        (("all_reduce", 1),),  # a norm
        (("reduce", 10**6), ("all_reduce", 10**6), ("reduce_scatter", 10**6)),
        (("all_gather", 9), ("all_to_all", 9), ("broadcast", 12)),
    ],
)
def test_without_a_call_that_fits_ranks_are_added_in_their_order(calls: tuple[Call, ...]) -> None:
    for partition in PARTITIONS:
        lengths = {length for bucket in partition.buckets for length in (bucket.padded, bucket.length)}
        if 1 not in lengths:
            check_elements(partition, frozenset(calls), lambda *place: fold(range(place[-1])))


def test_the_rings_of_three_and_four_ranks_as_they_were_measured() -> None:
    """guarantees.md, "Summation order of a backend": nine elements over three ranks are chunks of 4, 4 and 1."""
    calls = frozenset({("reduce_scatter", 9)})
    three = [unordered(tree) for tree in trees(predict(calls, Partition.from_request(9, 3, 9)))]
    chunks: list[Tree] = [((1, 2), 0), ((0, 2), 1), ((0, 1), 2)]
    assert three == [unordered(chunks[chunk]) for chunk in (0, 0, 0, 0, 1, 1, 1, 1, 2)]
    calls = frozenset({("reduce_scatter", 12)})
    four = [unordered(tree) for tree in trees(predict(calls, Partition.from_request(12, 4, 12)))]
    chunks = [(((2, 3), 1), 0), (((0, 3), 2), 1), (((0, 1), 3), 2)]
    assert four == [unordered(chunks[chunk]) for chunk in (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)]


# --- which call it was ------------------------------------------------------------------------------------------------


def test_each_bucket_finds_a_call_of_its_own_length() -> None:
    """Different calls for different buckets, one of them without any."""
    partition = stated(((0, 9, 9), (9, 15, 6), (15, 23, 9)))
    calls = frozenset({("reduce_scatter", 6), ("all_reduce", 8)})
    found = trees(predict(calls, partition))
    assert found[:9] == [fold(range(3))] * 9
    assert found[9:15] == trees(gloo("reduce_scatter", 6, 3))
    assert found[15:] == trees(gloo("all_reduce", 8, 3))


def test_a_call_for_the_padded_bucket_goes_before_one_without_padding() -> None:
    partition = stated(((0, 7, 15),), 7)
    both = frozenset({("all_reduce", 15), ("all_reduce", 7)})
    assert trees(predict(both, partition)) == trees(gloo("all_reduce", 15, 3))[:7]
    assert trees(gloo("all_reduce", 15, 3))[:7] != trees(gloo("all_reduce", 7, 3))


def test_a_call_for_the_whole_bucket_goes_before_one_for_a_piece() -> None:
    partition = Partition.from_request(24, 4, 24)
    whole = frozenset({("reduce_scatter", 24)})
    assert trees(predict(whole | {("reduce", 6)}, partition)) == trees(predict(whole, partition))
    assert trees(predict(whole, partition)) != trees(predict(frozenset({("reduce", 6)}), partition))


@pytest.mark.parametrize("kind", ["reduce_scatter", "reduce_scatter_list"])
def test_a_reduce_scatter_of_what_does_not_divide_was_for_something_else(kind: str) -> None:
    partition = Partition.from_request(7, 3, 9)
    assert trees(predict(frozenset({(kind, 7)}), partition)) == [fold(range(3))] * 7


def test_buckets_out_of_order_are_put_where_they_belong() -> None:
    """The same buckets in any order give the same prediction."""
    for buckets in STATED:
        calls = frozenset(("all_reduce", padded) for _, _, padded in buckets[::2])
        expected = trees(predict(calls, stated(sorted(buckets))))
        assert len(set(expected)) > 1
        for permuted in itertools.permutations(buckets):
            assert trees(predict(calls, stated(permuted))) == expected


def test_no_mix_of_calls_gives_more_or_fewer_elements_than_there_are() -> None:
    kinds = ("reduce_scatter", "reduce_scatter_list", "all_reduce", "reduce")
    for partition in PARTITIONS:
        lengths = {bucket.padded for bucket in partition.buckets} | {bucket.length for bucket in partition.buckets}
        lengths |= {bucket.padded // partition.world for bucket in partition.buckets}
        for kind in kinds:
            order = predict(frozenset((kind, length) for length in lengths), partition)
            assert order.labels.shape == (partition.numel,)
            assert set(order.labels.tolist()) <= set(range(len(order.trees)))


# --- which calls add gradients ----------------------------------------------------------------------------------------


def test_only_fp32_sums_over_all_ranks_count() -> None:
    whole = (0, 1, 2)
    logged = [
        Collective("reduce_scatter", "fp32", 9, whole, 0, "reduce"),
        Collective("reduce_scatter", "fp32", 9, whole, 0, "reduce"),
        Collective("reduce_scatter_list", "fp32", 12, whole),
        Collective("all_reduce", "fp32", 15, whole),
        Collective("reduce", "fp32", 3, whole),
        Collective("reduce_scatter", "bf16", 18, whole),
        Collective("all_reduce", "fp64", 1, whole),
        Collective("all_reduce", "fp16", 21, whole),
        Collective("all_reduce", "fp32", 24, (0, 1)),
        Collective("reduce_scatter", "fp32", 27, (1, 2)),
        Collective("reduce", "fp32", 30, (0,)),
        Collective("all_gather", "fp32", 33, whole),
        Collective("broadcast", "fp32", 36, whole),
        Collective("all_to_all", "fp32", 39, whole),
        Collective("barrier", "", 0, whole),
    ]
    counted = {("reduce_scatter", 9), ("reduce_scatter_list", 12), ("all_reduce", 15), ("reduce", 3)}
    assert summing_calls(logged, 3) == counted
    assert summing_calls(logged[::-1], 3) == counted
    assert summing_calls(logged, 2) == {("all_reduce", 24)}
    assert summing_calls(logged, 4) == frozenset()
    assert summing_calls([], 3) == frozenset()


def test_calls_that_do_not_count_leave_rank_order() -> None:
    partition = Partition.from_request(12, 3, 12)
    for call in (
        Collective("reduce_scatter", "bf16", 12, (0, 1, 2)),
        Collective("all_reduce", "fp32", 12, (0, 1)),
        Collective("all_reduce", "fp64", 12, (0, 1, 2)),
    ):
        assert trees(predict(summing_calls([call], 3), partition)) == [fold(range(3))] * 12
    counted = summing_calls([Collective("all_reduce", "fp32", 12, (0, 1, 2))], 3)
    assert trees(predict(counted, partition)) != [fold(range(3))] * 12


def test_another_rule_of_the_backend_gives_the_order_of_each_call() -> None:
    """Whole buckets and pieces; what no call explains stays in rank order."""
    partition = Partition.from_request(24, 3, 12)
    for backend in ("rank", "tree", "random"):
        added = rule(backend, 5)
        whole = predict(frozenset({("reduce_scatter", 12)}), partition, added)
        assert trees(whole) == trees(added("reduce_scatter", 12, 3, "fp32")) * 2
        pieces = predict(frozenset({("reduce", 4)}), partition, added)
        assert trees(pieces) == trees(added("reduce", 4, 3, "fp32")) * 6
        assert trees(predict(frozenset(), partition, added)) == [fold(range(3))] * 24
    ring = predict(frozenset({("reduce_scatter", 12)}), partition, rule("ring"))
    assert trees(ring) == trees(predict(frozenset({("reduce_scatter", 12)}), partition))
    assert trees(ring) != trees(predict(frozenset({("reduce_scatter", 12)}), partition, rule("random", 5)))
