"""What mistakes in a sum over parts and ranks would have made of a reduced gradient, where sums are exact.

Values on the exact grid can be traced: which contributions are in a sum, and how often, is told by the sum itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.diagnosis.evidence import Evidence, Floats
from harness.diagnosis.hypotheses import Batch, Mover, subsets, truncated
from harness.diagnosis.symptoms import Symptom
from harness.oracles import order
from harness.oracles.order import round_bf16
from harness.oracles.sequence import ranks_text

_MOST_ENUMERATED = 10  # contributions of which every subset is tried
_MOST_COMBINATIONS = 2**10

_Own = NDArray[np.float64]  # [world, parts, N], or in slots [world, parts, n]
_Text = Callable[[Sequence[tuple[int, int]]], str]


_FACTORS = frozenset(
    {
        Symptom.FACTOR_WORLD,
        Symptom.FACTOR_ONE_OVER_WORLD,
        Symptom.FACTOR_PARTS,
        Symptom.FACTOR_ONE_OVER_PARTS,
    }
)
_COUNTED = frozenset({Symptom.RANK_MISSING, Symptom.RANK_TWICE, Symptom.PART_MISSING, Symptom.PART_TWICE})
_EARLIER = frozenset({Symptom.EARLIER, Symptom.EARLIER_ADDED})
_MISPLACED = frozenset({Symptom.OTHER_RANK, Symptom.OTHER_BUCKET, Symptom.SHIFTED})
_BF16 = frozenset({Symptom.BF16_BEFORE, Symptom.TOWARD_ZERO})


def batches(evidence: Evidence, asked: frozenset[Symptom]) -> Iterator[Batch]:
    """The hypotheses about the sum that are asked for, and more."""
    own = evidence.contributions
    for symptoms, make in ((_FACTORS, _factors), (_MISPLACED, _misplaced), (_BF16, _bf16)):
        if symptoms & asked:
            yield from make(evidence, own)
    in_slots = evidence.at(own)
    for symptoms, make in ((_COUNTED, _counted), (_EARLIER, _earlier)):
        if symptoms & asked:
            yield from make(evidence, in_slots)


def _at(evidence: Evidence, vectors: Sequence[NDArray[np.generic]] | NDArray[np.generic]) -> Floats:
    """``[guesses, N]`` in the slots."""
    return _single(evidence.at(np.asarray(vectors, np.float64)))


def _single(values: Sequence[NDArray[np.generic]] | NDArray[np.generic]) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values, np.float64).astype(np.float32)


# --- factors ----------------------------------------------------------------------------------------------------------


def _factors(evidence: Evidence, own: _Own) -> Iterator[Batch]:
    world, parts = own.shape[:2]
    total = own.sum(axis=(0, 1))
    of_ranks = own.sum(axis=1)
    # A factor of one is none; a mean of one value is that value.
    if world > 1:
        means = _means(evidence, of_ranks, world)
        in_their_dtype = round_bf16((own / world).astype(np.float32)).astype(np.float64).sum(axis=(0, 1))
        yield Batch(Symptom.FACTOR_WORLD, [""], _at(evidence, [total * world]))
        yield Batch(Symptom.FACTOR_ONE_OVER_WORLD, [""] * 5, _at(evidence, [*means, in_their_dtype]))
    if parts > 1:
        counts = np.maximum(np.any(own, axis=2).sum(axis=1), 1)
        of_those = (of_ranks / counts[:, None]).sum(axis=0)
        yield Batch(Symptom.FACTOR_PARTS, [""], _at(evidence, [total * parts]))
        means = [*_means(evidence, of_ranks, parts), of_those]
        yield Batch(Symptom.FACTOR_ONE_OVER_PARTS, [""] * len(means), _at(evidence, means))


def _means(evidence: Evidence, of_ranks: NDArray[np.float64], count: int) -> list[NDArray[np.float64]]:
    """A mean, divided after or before the sum, or multiplied by the reciprocal."""
    divided = (of_ranks.astype(np.float32) / np.float32(count)).astype(np.float32)
    total = of_ranks.sum(axis=0).astype(np.float32)
    world, numel = of_ranks.shape
    found = [
        total / np.float32(count),
        total * np.float32(1 / count),
        order.add(order.in_rank_order(world, numel), list(divided)),
        order.add(_in_rings(evidence), list(divided)),
    ]
    return [each.astype(np.float64) for each in found]


def _in_rings(evidence: Evidence, dtype: order.Dtype = "fp32") -> order.Order:
    """As gloo adds buckets that are reduced one by one."""
    world = evidence.partition.world
    cuts = sorted(evidence.partition.buckets)
    return order.joined(
        [order.gloo("reduce_scatter", cut.padded, world, dtype).slice(0, cut.length) for cut in cuts if cut.padded]
    )


# --- contributions that are missing, or counted twice -----------------------------------------------------------------


def _counted(evidence: Evidence, own: _Own) -> Iterator[Batch]:
    world, parts = own.shape[:2]
    total = own.sum(axis=(0, 1))
    of_ranks = own.sum(axis=1)
    ranks = [rank for rank in range(world) if of_ranks[rank].any() or own[rank].any()]
    sets = subsets(ranks, 6)
    if sets:
        sums = np.array([of_ranks[list(chosen)].sum(axis=0) for chosen in sets])
        texts = [ranks_text(chosen) for chosen in sets]
        whole = [len(chosen) == len(ranks) > 1 for chosen in sets]
        kept = [index for index, everything in enumerate(whole) if not everything]
        yield Batch(Symptom.RANK_MISSING, texts, _single(total - sums))
        # The only rank that has something, twice: as well the whole sum, twice.
        yield Batch(
            Symptom.RANK_TWICE, [texts[each] for each in kept], _single(total + sums[kept]), proves=len(ranks) > 1
        )
    yield Batch(Symptom.PART_TWICE, [""], _single([2 * total]), proves=False)
    if parts > 1:
        yield from _of_parts(evidence, own, total)


def _of_parts(evidence: Evidence, own: _Own, total: NDArray[np.float64]) -> Iterator[Batch]:
    """Sets of contributions (rank, part): each is missing, or each counted twice."""
    columns = [(int(rank), int(part)) for rank, part in np.argwhere(own.any(axis=2))]
    sets: dict[tuple[tuple[int, int], ...], str] = {}
    if len(columns) <= _MOST_ENUMERATED:
        for count in range(1, len(columns) + 1):
            for chosen in itertools.combinations(columns, count):
                sets.setdefault(chosen, _named(chosen, columns))
    else:
        ranks = sorted({rank for rank, _ in columns})
        numbers = sorted({part for _, part in columns})
        for of_ranks, of_parts in itertools.product(subsets(ranks, 4), subsets(numbers, 4)):
            chosen = tuple(each for each in columns if each[0] in of_ranks and each[1] in of_parts)
            sets.setdefault(chosen, _named(chosen, columns))
        for chosen in _by_turn(columns):
            sets.setdefault(chosen, _named(chosen, columns))
        decoded = _decoded(evidence, own, columns, total)
        if decoded is not None:
            sets.setdefault(decoded, _named(decoded, columns))
    sets.pop((), None)
    if not sets:
        return
    sums = np.array([sum(own[rank, part] for rank, part in chosen) for chosen in sets])
    texts = list(sets.values())
    yield Batch(Symptom.PART_MISSING, texts, _single(total - sums))
    kept = [index for index, chosen in enumerate(sets) if len(chosen) < len(columns)]
    if kept:
        yield Batch(Symptom.PART_TWICE, [texts[each] for each in kept], _single(total + sums[kept]))
    for weights in _repeated(evidence, own):
        # Where all that is there counts as often, it may as well be a factor.
        differ = np.unique(weights[own.any(axis=(0, 2))]).size > 1
        values = _single((own * weights[:, None]).sum(axis=(0, 1)))
        yield Batch(Symptom.PART_TWICE, ["again with each later part"], values[None], proves=differ)
    lasts = _last_of_each_element(evidence, own)
    yield Batch(Symptom.PART_MISSING, ["all but the last", "all but the first"], _single(lasts))


def _repeated(evidence: Evidence, own: _Own) -> list[NDArray[np.float64]]:
    """How often each part counts where the sum so far is reduced in every part: its results added up, or in place."""
    world, parts = own.shape[:2]
    announced = [part.more for part in evidence.plan.parts] if evidence.plan is not None else []
    found = []
    for reduced in (announced, [True] * (parts - 1) + [False]):
        later = np.cumsum(reduced[::-1])[::-1]
        found += [1.0 + later, float(world) ** later]
    return found


def _by_turn(columns: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Of each rank the first part with gradients, the last, all but the first, all but the last."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for rank, part in columns:
        by_rank.setdefault(rank, []).append((rank, part))
    cuts: tuple[Callable[[list[tuple[int, int]]], list[tuple[int, int]]], ...] = (
        lambda own: own[:1],
        lambda own: own[-1:],
        lambda own: own[1:],
        lambda own: own[:-1],
        lambda own: own[:1] if len(own) > 1 else [],
        lambda own: own[-1:] if len(own) > 1 else [],
    )
    for cut in cuts:
        yield tuple(each for own in by_rank.values() for each in cut(own))


def _last_of_each_element(evidence: Evidence, own: _Own) -> NDArray[np.float64]:
    """What is left where a later gradient of a parameter replaces the earlier ones, and the other way round."""
    there = ~evidence.nones
    last = own.shape[1] - 1 - np.argmax(there[:, ::-1], axis=1)
    first = np.argmax(there, axis=1)
    # Where a rank has none at all, every part of it is zero.
    return np.array([np.take_along_axis(own, each[:, None], axis=1).sum(axis=(0, 1)) for each in (last, first)])


def _decoded(
    evidence: Evidence, own: _Own, columns: Sequence[tuple[int, int]], total: NDArray[np.float64]
) -> tuple[tuple[int, int], ...] | None:
    """The set of contributions that is missing, or counted twice, read off the sums themselves."""
    real = ~evidence.slots.padding
    matrix = np.array([own[rank, part][real] for rank, part in columns]).T
    off = evidence.actual[real].astype(np.float64) - total[real]
    if not np.isfinite(off).all() or matrix.shape[0] < matrix.shape[1]:
        return None
    scale = np.abs(matrix).max() or 1.0
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, off / scale, rcond=None)
    whole = np.rint(solution)
    if rank < len(columns) or np.abs(solution - whole).max() > 2.0**-10 or not (matrix @ whole == off).all():
        return None
    if set(whole.tolist()) not in ({-1.0}, {-1.0, 0.0}, {1.0}, {1.0, 0.0}):
        return None
    return tuple(column for column, factor in zip(columns, whole.tolist(), strict=True) if factor)


def _named(chosen: Sequence[tuple[int, int]], columns: Sequence[tuple[int, int]]) -> str:
    """``part 0``, ``part 0 of rank 1``, several of these."""
    parts = sorted({part for _, part in chosen})
    if all(each in chosen for each in columns if each[1] in parts):
        return f"part {parts[0]}" if len(parts) == 1 else f"parts {', '.join(map(str, parts))}"
    texts = []
    for rank in sorted({rank for rank, _ in chosen}):
        own = sorted(part for each, part in chosen if each == rank)
        texts.append(f"part{'s' if len(own) > 1 else ''} {', '.join(map(str, own))} of rank {rank}")
    return "; ".join(texts)


# --- earlier steps, other places --------------------------------------------------------------------------------------


def _earlier(evidence: Evidence, own: _Own) -> Iterator[Batch]:
    total = own.sum(axis=(0, 1))
    of_ranks = own.sum(axis=1)
    world = own.shape[0]
    replaced, replaced_texts = [], []
    kept: dict[int, NDArray[np.float64]] = {}
    left: dict[int, list[tuple[int, NDArray[np.float64]]]] = {rank: [] for rank in range(world)}
    for step, earlier in evidence.earlier_contributions():
        then = evidence.at(earlier.sum(axis=1))
        kept[step] = then.sum(axis=0)
        for chosen in subsets(range(world), 4):
            replaced.append(total - of_ranks[list(chosen)].sum(axis=0) + then[list(chosen)].sum(axis=0))
            whose = "" if len(chosen) == world else f" on {ranks_text(chosen)}"
            replaced_texts.append(f"of step {step}{whose}")
        for rank in range(world):
            if then[rank].any():
                left[rank].append((step, then[rank]))
    if replaced:
        yield Batch(Symptom.EARLIER, replaced_texts, _single(replaced))
    yield from _added(total, left)
    several = [chosen for chosen in subsets(sorted(kept), 4) if len(chosen) > 1]
    if several:
        texts = [f"of steps {', '.join(map(str, chosen))}" for chosen in several]
        yield Batch(Symptom.EARLIER_ADDED, texts, _single([total + sum(kept[one] for one in each) for each in several]))


def _added(total: NDArray[np.float64], left: dict[int, list[tuple[int, NDArray[np.float64]]]]) -> Iterator[Batch]:
    """Each rank may have something of one earlier step left."""
    choices = [[(-1, np.zeros_like(total)), *of_rank] for of_rank in left.values()]
    number = int(np.prod([len(of_rank) for of_rank in choices], dtype=np.float64))
    if number > _MOST_COMBINATIONS:
        steps = sorted({step for of_rank in left.values() for step, _ in of_rank})
        combinations = [
            [next((one for one in of_rank if one[0] == step), of_rank[0]) for of_rank in choices] for step in steps
        ]
    else:
        combinations = [list(one) for one in itertools.product(*choices)]
    values, texts = [], []
    for combination in combinations:
        steps = sorted({step for step, _ in combination if step >= 0})
        if steps:
            values.append(total + sum(vector for _, vector in combination))
            texts.append(f"of step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}")
    if values:
        yield Batch(Symptom.EARLIER_ADDED, texts, _single(values))


def _misplaced(evidence: Evidence, own: _Own) -> Iterator[Batch]:
    """Some ranks' contributions are those of another place."""
    of_ranks = own.sum(axis=1)
    total = own.sum(axis=(0, 1))
    exchanged: list[Batch] = []
    yield from _closed_up(evidence, own)
    for chosen in subsets(range(own.shape[0]), 4):
        if len(chosen) == own.shape[0]:
            continue  # that is the whole sum
        moved = of_ranks[list(chosen)].sum(axis=0)
        mover = Mover(evidence, moved, total - moved, f" on {ranks_text(chosen)}")
        exchanged.extend(mover.buckets())
        yield from mover.batches()
    if exchanged:
        # A rank that takes buckets in another order than the others also takes what it gets for something else.
        yield Batch(
            Symptom.OTHER_BUCKET,
            [detail for batch in exchanged for detail in batch.details],
            np.concatenate([batch.values for batch in exchanged]),
            np.concatenate([batch.known for batch in exchanged if batch.known is not None]),
        )


def _closed_up(evidence: Evidence, own: _Own) -> Iterator[Batch]:
    """Gradients lie end to end, without room for those that are None: everywhere, on the host alone, or held alone."""
    parameters = evidence.scenario.parameters
    of_parameter = np.repeat(np.arange(len(parameters)), [each.numel for each in parameters])
    apart = own.sum(axis=1)
    together = np.zeros_like(apart)
    spilled = np.zeros((len(own), 1), np.bool_)
    parts = list(enumerate(evidence.plan.parts if evidence.plan is not None else ()))
    for rank in range(len(own)):
        filled = [(number, part) for number, part in parts if len(part.none[rank]) < len(parameters)]
        spilled[rank] = len(filled) > 1 or any(part.more for _, part in filled)
        for number, part in filled:
            values = own[rank, number, ~np.isin(of_parameter, part.none[rank])]
            together[rank, : values.size] += values
    found = [np.where(where, together, apart).sum(axis=0) for where in (True, spilled, ~spilled)]
    yield Batch(Symptom.SHIFTED, ["into the room of gradients that are None"] * len(found), _at(evidence, found))


# --- rounding ---------------------------------------------------------------------------------------------------------


def _bf16(evidence: Evidence, own: _Own) -> Iterator[Batch]:
    world, parts, numel = own.shape
    exact = [row.astype(np.float32) for row in own.sum(axis=1)]
    rounded = [round_bf16(row) for row in exact]
    on_host = [np.zeros(numel, np.float32) for _ in range(world)]
    for rank, part in itertools.product(range(world), range(parts)):
        on_host[rank] = round_bf16(on_host[rank] + own[rank, part].astype(np.float32))
    found = {}
    for name, rows in (("", rounded), (", after every part", on_host)):
        found[f"each rank's{name}"] = np.sum(np.array(rows, np.float64), axis=0)
    for rows in (exact, rounded, on_host):
        for ordered in (order.in_rank_order(world, numel), _in_rings(evidence, "bf16"), _in_rings(evidence)):
            values = order.add(ordered, rows, "bf16")
            found[f"every partial sum ({len(found)})"] = values.astype(np.float64)
    for ranks in itertools.permutations(range(world)) if 2 < world <= 4 else ():
        # The last addition is not rounded: an earlier one was.
        *first, last = ranks
        head = order.add(order.uniform(order.fold(range(len(first))), numel), [exact[rank] for rank in first], "bf16")
        found[f"a partial sum ({len(found)})"] = head.astype(np.float64) + exact[last]
    texts = [name.partition(" (")[0] for name in found]
    yield Batch(Symptom.BF16_BEFORE, texts, _at(evidence, list(found.values())))
    cut = np.sum(np.array([truncated(row) for row in exact], np.float64), axis=0)
    yield Batch(Symptom.TOWARD_ZERO, ["to bf16, each rank's"], _at(evidence, [cut]))
