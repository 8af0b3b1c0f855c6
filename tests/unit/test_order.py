"""The order of addition: gloo's rule as the specification writes it, adding by a tree, what probing reveals.

Sums are held against exact rational arithmetic, rounded once for each addition; trees are compared as nested sets,
since the two summands of an addition may be named in either order.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.oracles import order, probing
from harness.oracles.order import Order, Rounding, Tree
from harness.oracles.probing import Pair

F32 = NDArray[np.float32]
Unordered = int | frozenset["Unordered"]

FORMATS: Mapping[Rounding, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Bits of the significand; exponent of the smallest value above zero; largest finite value.
LIMITS: Mapping[Rounding, tuple[int, int, float]] = {
    "fp32": (24, -149, (2 - 2.0**-23) * 2.0**127),
    "bf16": (8, -133, (2 - 2.0**-7) * 2.0**127),
    "fp16": (11, -24, 65504.0),
}


def unordered(tree: Tree) -> Unordered:
    return tree if isinstance(tree, int) else frozenset(unordered(side) for side in tree)


def elements(given_order: Order) -> list[Unordered]:
    """The tree of each element."""
    trees = [unordered(tree) for tree in given_order.trees]
    return [trees[label] for label in given_order.labels.tolist()]


def chunks(given_order: Order, world: int) -> list[int]:
    """The lengths of a ring's chunks, which must lie one after the other, each with its own tree."""
    assert [unordered(tree) for tree in given_order.trees] == [unordered(tree) for tree in order.ring(world)]
    assert (np.diff(given_order.labels) >= 0).all()
    return np.bincount(given_order.labels, minlength=world).tolist()


def same(one: F32, other: F32) -> bool:
    """Equal in every bit, but nan equal to nan."""
    assert one.dtype == other.dtype == np.float32
    return one.shape == other.shape and bool(
        ((one.view(np.int32) == other.view(np.int32)) | (np.isnan(one) & np.isnan(other))).all()
    )


# --- a plain evaluator ------------------------------------------------------------------------------------------------


def nearest(value: Fraction, rounding: Rounding) -> float:
    """A dyadic fraction rounded once, ties to even."""
    precision, smallest, largest = LIMITS[rounding]
    if not value:
        return 0.0
    log2 = abs(value.numerator).bit_length() - value.denominator.bit_length()
    unit = Fraction(2) ** max(log2 - precision + 1, smallest)
    rounded = round(value / unit) * unit
    return float(rounded) if abs(rounded) <= largest else math.copysign(math.inf, value)


def plain_sum(one: float, other: float, rounding: Rounding) -> float:
    """One addition: exact, then rounded; where nothing is rounded (inf, nan, the sign of a zero) as Python has it."""
    if not math.isfinite(one) or not math.isfinite(other) or one == -other:
        return one + other
    return nearest(Fraction(one) + Fraction(other), rounding)


def plain(tree: Tree, values: Sequence[float], rounding: Rounding) -> float:
    if isinstance(tree, int):
        return values[tree]
    return plain_sum(plain(tree[0], values, rounding), plain(tree[1], values, rounding), rounding)


def plain_add(given_order: Order, rows: Sequence[F32], rounding: Rounding) -> F32:
    columns = zip(*(row.tolist() for row in rows), strict=True)
    return np.array(
        [
            plain(given_order.trees[label], column, rounding)
            for label, column in zip(given_order.labels.tolist(), columns, strict=True)
        ],
        np.float32,
    )


@pytest.mark.parametrize("rounding", FORMATS)
def test_the_plain_evaluator_rounds_as_torch_does(rounding: Rounding) -> None:
    """Values, halves between them and their neighbours, into the subnormals and beyond the largest."""
    rng = np.random.default_rng(3)
    values = random_rows(1, 2000, rounding, rng)[0].astype(np.float64)
    values = values[np.isfinite(values)] * (
        1 + rng.choice([0.0, 0.5, 0.75, 1.0], values.size)[np.isfinite(values)] / 256
    )

    expected = torch.from_numpy(values).to(FORMATS[rounding]).float().numpy()
    if rounding != "fp32":  # torch rounds fp64 by way of fp32.
        values = values.astype(np.float32).astype(np.float64)

    finite = np.isfinite(values)
    actual = np.array([nearest(Fraction(value), rounding) for value in values[finite].tolist()], np.float32)
    assert finite.sum() > 1000
    assert np.array_equal(actual, expected[finite])


def random_rows(world: int, length: int, rounding: Rounding, rng: np.random.Generator) -> list[F32]:
    """Of the format, held in fp32: near each other in exponent, or anything (inf, nan, subnormals, the largest)."""
    _, smallest, largest = LIMITS[rounding]
    highest = math.frexp(largest)[1]
    exponents = rng.integers(smallest, highest - 3, length) + rng.integers(-4, 5, (world, length))
    values = np.ldexp(rng.uniform(-2, 2, (world, length)), exponents)
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, largest, -largest, 2.0**smallest, -(2.0**smallest)]
    chosen = rng.random((world, length)) < rng.choice([0.0, 0.2, 1.0], length)
    values = np.where(chosen, rng.choice(special, (world, length)), values)
    return list(torch.from_numpy(values).to(FORMATS[rounding]).float().numpy())


@st.composite
def trees(draw: st.DrawFn, world: int) -> Tree:
    """Any tree over all ranks."""
    nodes: list[Tree] = list(range(world))
    while len(nodes) > 1:
        one = nodes.pop(draw(st.integers(0, len(nodes) - 1)))
        nodes.append((one, nodes.pop(draw(st.integers(0, len(nodes) - 1)))))
    return nodes[0]


@st.composite
def orders(draw: st.DrawFn, min_world: int = 2) -> tuple[int, Order]:
    """A world, and an order of a few elements with one to four trees."""
    world = draw(st.integers(min_world, 8))
    some = draw(st.lists(trees(world), min_size=1, max_size=4, unique_by=unordered))
    labels = draw(st.lists(st.integers(0, len(some) - 1), min_size=1, max_size=12))
    return world, Order(tuple(some), np.array(labels, np.intp))


# --- the rule for gloo ------------------------------------------------------------------------------------------------


def test_the_ring_is_the_specifications() -> None:
    written: dict[int, list[Tree]] = {
        1: [0],
        2: [(0, 1), (0, 1)],
        3: [((1, 2), 0), ((0, 2), 1), ((0, 1), 2)],
        4: [(((2, 3), 1), 0), (((0, 3), 2), 1), (((0, 1), 3), 2), (((1, 2), 0), 3)],
    }
    assert {world: [unordered(tree) for tree in order.ring(world)] for world in written} == {
        world: [unordered(tree) for tree in written[world]] for world in written
    }


def test_a_longer_ring_starts_with_the_rank_before_the_chunk_and_goes_back() -> None:
    assert unordered(order.ring(6)[2]) == unordered((((((1, 0), 5), 4), 3), 2))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce"])
@pytest.mark.parametrize(
    ("num_elements", "world", "expected"),
    [
        (9, 3, [4, 4, 1]),
        (12, 4, [4, 4, 4, 0]),
        (1, 4, [1, 0, 0, 0]),
        (3, 2, [2, 1]),
        (1572864, 3, [524288, 524288, 524288]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_chunks_of_at_most_two_segments_are_the_same_for_all_kinds(
    kind: str, num_elements: int, world: int, expected: list[int]
) -> None:
    assert chunks(order.gloo(kind, num_elements, world), world) == expected


@pytest.mark.parametrize(
    ("kind", "dtype", "num_elements", "world", "expected"),
    [
        ("all_reduce", "fp32", 2**23, 3, [2796211, 2796211, 2796186]),
        ("reduce_scatter", "fp32", 2**23, 3, [2796211, 2796211, 2796186]),
        ("reduce", "fp32", 1572865, 3, [786432, 786432, 1]),
        ("reduce", "fp32", 2097229, 3, [786432, 786432, 524365]),
        ("reduce", "fp32", 2097153, 4, [786432, 786432, 524289, 0]),
        ("all_reduce", "fp32", 1572865, 3, [524289, 524289, 524287]),
        ("reduce", "bf16", 3145729, 3, [1572864, 1572864, 1]),
        ("all_reduce", "bf16", 3145729, 3, [1048578, 1048578, 1048573]),
        ("reduce", "fp16", 3145729, 3, [1572864, 1572864, 1]),
        ("all_reduce", "fp16", 3145729, 3, [1048578, 1048578, 1048573]),
    ],
)
def test_chunks_above_two_segments_are_the_measured_ones(
    kind: str, dtype: order.Dtype, num_elements: int, world: int, expected: list[int]
) -> None:
    assert sum(expected) == num_elements
    assert chunks(order.gloo(kind, num_elements, world, dtype), world) == expected
    # The length of a chunk is that of the first.
    assert order.chunk_length(kind, num_elements, world, dtype) == expected[0]


def test_fp64_segments_hold_half_as_many_elements() -> None:
    assert chunks(order.gloo("reduce", 786433, 3, "fp64"), 3) == [393216, 393216, 1]


def test_the_dtype_is_fp32_unless_named() -> None:
    assert order.chunk_length("reduce", 1572865, 3) == order.chunk_length("reduce", 1572865, 3, "fp32")
    assert order.chunk_length("reduce", 1572865, 3) != order.chunk_length("reduce", 1572865, 3, "bf16")


@pytest.mark.parametrize(("piece", "world"), [(9, 3), (12, 4), (1, 2), (0, 3), (5, 1)])
def test_a_list_is_added_piece_by_piece(piece: int, world: int) -> None:
    alone = elements(order.gloo("all_reduce", piece, world))

    assert elements(order.gloo("reduce_scatter_list", piece * world, world)) == alone * world


def test_a_list_of_pieces_above_two_segments_has_the_measured_chunks() -> None:
    """*Measured*: pieces of 1572865 fp32 elements at world 3 change trees at 524289 and 1048578, as an all-reduce."""
    listed = order.gloo("reduce_scatter_list", 3 * 1572865, 3)

    for rank in range(3):
        piece = listed.slice(rank * 1572865, (rank + 1) * 1572865)
        assert chunks(piece, 3) == [524289, 524289, 524287]


@pytest.mark.parametrize("kind", ["all_gather", "broadcast", "reduce_scatter_tensor", ""])
def test_what_does_not_add_has_no_order(kind: str) -> None:
    with pytest.raises(ValueError, match=r"adds nothing; known are all_reduce, reduce, reduce_scatter"):
        order.gloo(kind, 12, 3)


def test_a_list_of_unequal_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="10 elements are no list of 3 equal pieces"):
        order.gloo("reduce_scatter_list", 10, 3)


@pytest.mark.parametrize("kind", order.SUMMING_KINDS)
def test_every_summing_kind_has_an_order(kind: str) -> None:
    assert order.gloo(kind, 12, 3).labels.size == 12


# --- orders -----------------------------------------------------------------------------------------------------------


def test_a_fold_adds_one_after_the_other() -> None:
    assert order.fold([2]) == 2
    assert unordered(order.fold([2, 0, 3, 1])) == unordered((((2, 0), 3), 1))


def test_uniform_gives_every_element_the_tree() -> None:
    tree: Tree = ((2, 0), 1)

    assert elements(order.uniform(tree, 3)) == [unordered(tree)] * 3
    assert order.uniform(tree, 0).labels.size == 0


def test_in_rank_order_starts_with_rank_0() -> None:
    assert elements(order.in_rank_order(4, 2)) == [unordered((((0, 1), 2), 3))] * 2
    assert elements(order.in_rank_order(1, 2)) == [0, 0]


@given(st.lists(orders(), max_size=4))
@settings(max_examples=15, database=None, deadline=None)
def test_joined_is_the_elements_end_to_end(parts: list[tuple[int, Order]]) -> None:
    whole = order.joined([part for _, part in parts])

    assert elements(whole) == [tree for _, part in parts for tree in elements(part)]
    assert len(set(whole.trees)) == len(whole.trees)
    assert whole.labels.dtype == np.intp


@given(orders(), st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=15, database=None, deadline=None)
def test_a_slice_has_the_elements_from_start_to_stop(drawn: tuple[int, Order], start: int, stop: int) -> None:
    _, whole = drawn

    assert elements(whole.slice(start, stop)) == elements(whole)[start:stop]


def test_the_signature_does_not_depend_on_names() -> None:
    """Trees numbered otherwise, joined from other runs, or named without being used: the same signature."""
    one, other, unused = ((0, 1), 2), ((1, 2), 0), ((0, 2), 1)
    whole = Order((one, other), np.array([0, 0, 1, 1, 0]))

    assert whole.signature == Order((unused, other, one), np.array([2, 2, 1, 1, 2])).signature
    assert whole.signature == order.joined([whole.slice(0, 1), whole.slice(1, 3), whole.slice(3, 5)]).signature
    assert hash(whole.signature) == hash(order.joined([whole]).signature)
    assert order.uniform(one, 0).signature == order.uniform(other, 0).signature == ()


@pytest.mark.parametrize(
    "other",
    [
        [0, 0, 1, 1],  # shorter
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1],
        [0, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
        [],
    ],
)
def test_the_signature_differs_where_an_element_does(other: list[int]) -> None:
    two: tuple[Tree, Tree] = (((0, 1), 2), ((1, 2), 0))

    assert Order(two, np.array([0, 0, 1, 1, 0])).signature != Order(two, np.array(other, np.intp)).signature


# --- adding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", FORMATS)
@given(drawn=orders(min_world=1), seed=st.integers(0, 2**32))
@settings(max_examples=30, database=None, deadline=None)
def test_adding_rounds_every_addition_of_the_tree(rounding: Rounding, drawn: tuple[int, Order], seed: int) -> None:
    world, given_order = drawn
    rows = random_rows(world, given_order.labels.size, rounding, np.random.default_rng(seed))
    before = [row.copy() for row in rows]

    assert same(order.add(given_order, rows, rounding), plain_add(given_order, rows, rounding))
    assert all(same(row, old) for row, old in zip(rows, before, strict=True))


@pytest.mark.parametrize("rounding", FORMATS)
def test_the_order_changes_what_is_added_up(rounding: Rounding) -> None:
    """So that the test above, and everything that rests on adding, can fail."""
    rows = random_rows(3, 500, rounding, np.random.default_rng(0))
    sums = [order.add(order.uniform(tree, 500), rows, rounding) for tree in order.ring(3)]
    by_ring = order.add(Order(order.ring(3), np.arange(500) % 3), rows, rounding)

    for one, other in itertools.combinations(sums, 2):
        assert np.count_nonzero((one != other) & ~np.isnan(one)) > 20
    for chunk in range(3):
        assert same(by_ring[chunk::3].copy(), sums[chunk][chunk::3].copy())
        assert not same(by_ring, sums[chunk])


def test_fp32_is_the_rounding_unless_named() -> None:
    rows = random_rows(3, 300, "fp32", np.random.default_rng(1))
    ranked = order.in_rank_order(3, 300)

    assert same(order.add(ranked, rows), order.add(ranked, rows, "fp32"))
    assert not same(order.add(ranked, rows), order.add(ranked, rows, "bf16"))


@pytest.mark.parametrize(("rounding", "largest"), [(rounding, largest) for rounding, (_, _, largest) in LIMITS.items()])
def test_overflow_on_the_way_gives_inf_as_in_a_backend(rounding: Rounding, largest: float) -> None:
    rows = [np.array([value], np.float32) for value in (largest, largest, -largest)]

    assert order.add(order.uniform(((0, 1), 2), 1), rows, rounding).tolist() == [math.inf]
    assert order.add(order.uniform(((1, 2), 0), 1), rows, rounding).tolist() == [rows[0].item()]


def test_nothing_is_added_to_no_elements() -> None:
    empty = [np.zeros(0, np.float32)] * 3

    assert order.add(order.gloo("all_reduce", 0, 3), empty).shape == (0,)
    assert order.add(order.in_rank_order(3, 0), empty).shape == (0,)


@pytest.mark.parametrize("world", [256, 3000])
@pytest.mark.parametrize("rounding", ["fp32", "bf16"])
def test_a_long_fold_is_added_without_recursion(world: int, rounding: Rounding) -> None:
    """3000 is beyond Python's limit."""
    rng = np.random.default_rng(world)
    rows = list(torch.from_numpy(rng.uniform(-1, 1, (world, 2))).to(FORMATS[rounding]).float().numpy())
    expected = []
    for column in zip(*(row.tolist() for row in rows), strict=True):
        total = column[0]
        for value in column[1:]:
            total = plain_sum(total, value, rounding)
        expected.append(total)

    assert order.add(order.in_rank_order(world, 2), rows, rounding).tolist() == expected


def test_bf16_rounding_is_torchs() -> None:
    """All upper halves with lower halves around the ties, and a million patterns."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    patterns = np.random.default_rng(7).integers(0, 2**32, 10**6, np.uint32)
    values = np.concatenate([(upper[:, None] | lower).reshape(-1), patterns]).view(np.float32)
    before = values.copy()

    rounded = order.round_bf16(values)

    assert same(rounded, torch.from_numpy(values).to(torch.bfloat16).float().numpy())
    assert np.array_equal(np.isnan(rounded), np.isnan(values))
    assert np.array_equal(values.view(np.uint32), before.view(np.uint32))
    assert np.isinf(rounded).sum() > np.isinf(values).sum() > 0


def test_bf16_rounding_of_single_values() -> None:
    half = 2.0**-8
    pairs = {
        1 + half: 1.0,  # ties to even: down
        1 + 3 * half: 1 + 4 * half,  # and up
        1 + half + 2.0**-23: 1 + 2 * half,
        -(1 + 3 * half): -(1 + 4 * half),
        2.0**-134: 0.0,
        3 * 2.0**-134: 2 * 2.0**-133,
        2.0**-133: 2.0**-133,
        float(np.finfo(np.float32).max): math.inf,
        math.inf: math.inf,
        -math.inf: -math.inf,
    }
    assert order.round_bf16(np.array(list(pairs), np.float32)).tolist() == list(pairs.values())
    assert math.copysign(1.0, order.round_bf16(np.array([-0.0], np.float32)).item()) == -1.0


def test_bf16_rounding_takes_every_second_value() -> None:
    values = np.random.default_rng(2).uniform(-1, 1, 100).astype(np.float32)

    assert same(order.round_bf16(values[::2]), order.round_bf16(values)[::2].copy())


# --- probing ----------------------------------------------------------------------------------------------------------


def probed(given_order: Order, world: int, rounding: Rounding = "fp32") -> dict[Pair, F32]:
    """What a backend that adds in this order would answer to the probes of the specification."""
    return probed_by(world, given_order, lambda tree, values: plain(tree, values, rounding))


def probed_by(world: int, given_order: Order, evaluate: Callable[[Tree, Sequence[float]], float]) -> dict[Pair, F32]:
    sums = {}
    for low, high in itertools.combinations(range(world), 2):
        values = [1.0] * world
        values[low], values[high] = 2.0**120, -(2.0**120)
        by_tree = np.array([evaluate(tree, values) for tree in given_order.trees], np.float32)
        sums[low, high] = by_tree[given_order.labels]
    return sums


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_probes_are_the_specifications(world: int) -> None:
    assert probing.pairs(world) == [(low, high) for low in range(world) for high in range(low + 1, world)]
    for low, high in probing.pairs(world):
        contributions = [1.0] * world
        contributions[low], contributions[high] = 2.0**120, -(2.0**120)
        assert [probing.probe((low, high), rank) for rank in range(world)] == contributions


@pytest.mark.parametrize("rounding", ["fp32", "bf16"])
@given(drawn=orders())
@settings(max_examples=30, database=None, deadline=None)
def test_probing_reveals_any_trees(rounding: Rounding, drawn: tuple[int, Order]) -> None:
    world, given_order = drawn

    revealed = probing.reveal(probed(given_order, world, rounding), world)

    assert revealed is not None
    assert elements(revealed) == elements(given_order)
    assert revealed.labels.dtype == np.intp


@pytest.mark.parametrize("world", [3, 4, 32])
def test_probes_that_fp16_can_hold_reveal_the_same(world: int) -> None:
    """Also where all other ranks are added to the probe one by one, or as one sum."""
    inner = order.fold(range(2, world))
    trees: tuple[Tree, ...] = (order.fold(range(world)), ((0, inner), 1), ((1, 0), inner), order.ring(world)[1])
    given_order = Order(trees, np.arange(len(trees)))
    sums = {}
    for pair in probing.pairs(world):
        values = [probing.probe(pair, rank, probing.HALF) for rank in range(world)]
        assert [float(np.float16(value)) for value in values] == values
        sums[pair] = np.array([plain(tree, values, "fp32") for tree in trees], np.float32) / probing.HALF.one

    revealed = probing.reveal(sums, world)

    assert revealed is not None
    assert elements(revealed) == elements(given_order)


@given(orders())
@settings(max_examples=15, database=None, deadline=None)
def test_what_was_revealed_adds_the_same_bits(drawn: tuple[int, Order]) -> None:
    world, given_order = drawn
    rows = random_rows(world, given_order.labels.size, "fp32", np.random.default_rng(world))

    revealed = probing.reveal(probed(given_order, world), world)

    assert revealed is not None
    assert same(order.add(revealed, rows), order.add(given_order, rows))


def test_sixteen_ranks_are_revealed() -> None:
    rng = random.Random(5)
    nodes: list[Tree] = list(range(16))
    while len(nodes) > 1:
        rng.shuffle(nodes)
        nodes.append((nodes.pop(), nodes.pop()))
    given_order = Order((nodes[0], order.ring(16)[5]), np.array([0, 1, 0]))

    revealed = probing.reveal(probed(given_order, 16), 16)

    assert revealed is not None
    assert elements(revealed) == elements(given_order)


def test_no_elements_have_no_trees() -> None:
    revealed = probing.reveal({pair: np.zeros(0, np.float32) for pair in probing.pairs(3)}, 3)

    assert revealed is not None
    assert revealed.labels.size == 0


def test_one_rank_has_no_order_to_reveal() -> None:
    with pytest.raises(ValueError, match="a sum over one rank has no order"):
        probing.reveal({}, 1)


@pytest.mark.parametrize(("world", "num_trees"), [(2, 1), (3, 3), (4, 15)])
def test_only_sums_of_a_tree_are_explained(world: int, num_trees: int) -> None:
    """Every combination of sums from below 0 to above what a tree can give: as many fit as there are trees."""
    pairs = probing.pairs(world)
    found = set()
    for combination in itertools.product(range(-1, world) if world < 4 else range(world - 1), repeat=len(pairs)):
        sums = {pair: np.array([value], np.float32) for pair, value in zip(pairs, combination, strict=True)}
        revealed = probing.reveal(sums, world)
        if revealed is not None:
            (tree,) = elements(revealed)
            found.add(tree)
            assert {pair: row.tolist() for pair, row in sums.items()} == {
                pair: row.tolist() for pair, row in probed(revealed, world).items()
            }
    assert len(found) == num_trees


@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_an_exact_sum_fits_no_tree(world: int) -> None:
    exact = probed_by(world, order.in_rank_order(world, 2), lambda _, values: math.fsum(values))

    assert probing.reveal(exact, world) is None


def test_three_summands_rounded_once_fit_no_tree() -> None:
    def three_at_once(_: Tree, values: Sequence[float]) -> float:
        return plain_sum(nearest(sum(map(Fraction, values[:3]), Fraction(0)), "fp32"), values[3], "fp32")

    assert probing.reveal(probed_by(4, order.in_rank_order(4, 1), three_at_once), 4) is None


@given(orders(min_world=3), st.data())
@settings(max_examples=15, database=None, deadline=None)
def test_a_sum_without_or_with_twice_a_contribution_fits_no_tree(drawn: tuple[int, Order], data: st.DataObject) -> None:
    world, given_order = drawn
    odd = data.draw(st.integers(0, world - 1))
    factor = data.draw(st.sampled_from([0.0, 2.0]))

    def evaluate(tree: Tree, values: Sequence[float]) -> float:
        return plain(tree, [value * factor if rank == odd else value for rank, value in enumerate(values)], "fp32")

    assert probing.reveal(probed_by(world, given_order, evaluate), world) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5, -1.0, 100.0, 2.0**120])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_bad_sum_of_one_element_and_nothing_is_explained(world: int, bad: float) -> None:
    sums = probed(order.gloo("all_reduce", 12, world), world)
    assert probing.reveal(sums, world) is not None
    for pair, element in itertools.product(sums, (0, 5, 11)):
        changed = {**sums, pair: sums[pair].copy()}
        changed[pair][element] = bad

        assert probing.reveal(changed, world) is None


@given(st.integers(3, 8), st.integers(0, 2**32))
@settings(max_examples=15, database=None, deadline=None)
def test_garbage_fits_no_tree(world: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    assert probing.reveal({pair: rng.normal(size=4).astype(np.float32) for pair in probing.pairs(world)}, world) is None


def test_subtree_sizes_of_a_tree() -> None:
    tree: Tree = ((3, (0, 4)), (2, 1))

    assert probing.subtree_sizes(tree) == {
        (0, 4): 2,
        (1, 2): 2,
        (0, 3): 3,
        (3, 4): 3,
        **{(min(pair), max(pair)): 5 for pair in itertools.product((0, 3, 4), (1, 2))},
    }
    assert probing.subtree_sizes(7) == {}


@given(orders())
@settings(max_examples=15, database=None, deadline=None)
def test_subtree_sizes_are_what_the_probes_do_not_count(drawn: tuple[int, Order]) -> None:
    world, given_order = drawn
    tree = given_order.trees[0]

    sums = probed(order.uniform(tree, 1), world)

    assert probing.subtree_sizes(tree) == {pair: world - row.item() for pair, row in sums.items()}


def test_subtree_sizes_of_sixteen_and_of_256_ranks() -> None:
    for world in (16, 256):
        sizes = probing.subtree_sizes(order.fold(range(world)))
        assert sizes == {(low, high): high + 1 for low, high in itertools.combinations(range(world), 2)}


def test_the_signature_does_not_depend_on_names_or_on_which_summand_comes_first() -> None:
    tree: Tree = ((0, 2), 1)
    twice = Order((tree, (1, (2, 0))), np.array([0, 1, 0]))

    assert twice.signature == order.uniform(tree, 3).signature
    assert twice.signature != order.uniform(((0, 1), 2), 3).signature
    assert order.uniform(tree, 3).signature != order.uniform(tree, 4).signature
    assert order.gloo("all_reduce", 4, 2).signature == order.in_rank_order(2, 4).signature


def test_rows_of_another_length_are_refused() -> None:
    rows = [np.zeros(3, np.float32), np.zeros(1, np.float32)]
    with pytest.raises(ValueError, match="cannot be added"):
        order.add(order.in_rank_order(2, 3), rows)


# --- rules by name, and deep trees ------------------------------------------------------------------------------------

NAMES = ("ring", "rank", "tree", "random")


def of_rule(name: str, num_elements: int, world: int, seed: int = 0, kind: str = "all_reduce") -> Order:
    return order.rule(name, seed)(kind, num_elements, world, "fp32")


def test_the_rules_are_the_named_ones() -> None:
    assert order.RULES == NAMES
    assert order.rule("ring") is order.gloo
    assert of_rule("rank", 5, 4).signature == order.in_rank_order(4, 5).signature
    assert elements(of_rule("tree", 2, 4)) == [unordered(((0, 1), (2, 3)))] * 2
    assert elements(of_rule("tree", 1, 5)) == [unordered((((0, 1), (2, 3)), 4))]
    assert elements(of_rule("tree", 1, 6)) == [unordered((((0, 1), (2, 3)), (4, 5)))]
    with pytest.raises(ValueError, match="'butterfly'; known are ring, rank, tree, random"):
        order.rule("butterfly")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_every_rank_is_added_once_in_every_element(name: str, world: int) -> None:
    for num_elements in (0, 1, 40):
        found = of_rule(name, num_elements, world, seed=num_elements)
        assert found.labels.size == num_elements
        for tree in found.trees:
            assert sorted(node for node in order.bottom_up(tree) if isinstance(node, int)) == list(range(world))


def test_random_orders_are_a_function_of_seed_kind_elements_and_group_alone() -> None:
    calls = list(itertools.product((0, 1), ("all_reduce", "reduce"), (300, 301), (7, 8)))
    found = {call: of_rule("random", call[2], call[3], call[0], call[1]).signature for call in calls}
    assert len(set(found.values())) == len(calls)
    for seed, kind, num_elements, world in calls:
        other_dtype = order.rule("random", seed)(kind, num_elements, world, "bf16")
        assert other_dtype.signature == found[seed, kind, num_elements, world]


def test_random_orders_have_a_few_runs_of_several_shapes() -> None:
    found = [of_rule("random", 1000, 4, seed) for seed in range(60)]
    assert {len(one.runs) for one in found} == {1, 2, 3, 4}
    shapes = {tree for one in found for tree in map(unordered, one.trees)}
    assert len(shapes) == 15  # all trees over four ranks that there are (1 * 3 * 5)


@pytest.mark.parametrize("rounding", FORMATS)
@pytest.mark.parametrize(("world", "length"), [(3, 20), (5, 499), (5, 501), (17, 100), (256, 700)])
def test_a_ring_has_the_same_bits_whether_its_chunks_are_added_together(
    rounding: Rounding, world: int, length: int
) -> None:
    rows = random_rows(world, length, rounding, np.random.default_rng(length))
    ring = order.gloo("all_reduce", length, world)
    renamed = Order(ring.trees[::-1], world - 1 - ring.labels)

    assert same(order.add(ring, rows, rounding), order.add(renamed, rows, rounding))
    if world < 256:
        assert same(order.add(ring, rows, rounding), plain_add(ring, rows, rounding))


@pytest.mark.parametrize("name", NAMES)
def test_256_ranks_are_added_signed_and_revealed(name: str) -> None:
    found = of_rule(name, 3, 256, seed=2)
    rows = [np.full(3, 2.0 ** (rank % 3), np.float32) for rank in range(256)]

    assert order.add(found, rows).tolist() == [float(86 + 2 * 85 + 4 * 85)] * 3
    revealed = probing.reveal(sums_by_sizes(found, 256), 256)
    assert revealed is not None
    assert revealed.signature == found.signature


def sums_by_sizes(given_order: Order, world: int) -> Mapping[Pair, F32]:
    """What probes must give, without adding 32,640 times."""
    sizes = [probing.subtree_sizes(given_order.trees[label]) for label in given_order.labels.tolist()]
    return {
        pair: np.array([world - of_element[pair] for of_element in sizes], np.float32) for pair in probing.pairs(world)
    }


@pytest.mark.parametrize("side", ["left", "right"])
def test_trees_deeper_than_the_stack_of_python_are_no_matter(side: str) -> None:
    num = sys.getrecursionlimit() + 200
    tree: Tree = 0
    for rank in range(1, num):
        tree = (tree, rank) if side == "left" else (rank, tree)
    rows = [np.ones(2, np.float32)] * num

    assert order.add(order.uniform(tree, 2), rows).tolist() == [num, num]
    (signed, length), *others = order.uniform(tree, 2).signature
    assert length == 2
    assert not others
    leaves = [node for node in order.bottom_up(signed) if isinstance(node, int)]
    assert leaves == list(range(num))
    sizes = probing.subtree_sizes(tree)
    assert (sizes[0, 1], sizes[0, num - 1]) == (2, num)
