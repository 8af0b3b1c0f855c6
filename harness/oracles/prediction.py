"""The order in which a subject's gradient was added, as the log of its collectives tells. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

from harness.oracles.order import Order, Rule, gloo, in_rank_order, joined
from harness.scenario.partition import Bucket, Partition
from harness.verdict import Collective

Call = tuple[str, int]
"""Kind and elements of one rank's input."""

# Of a whole bucket, padded or not, or, by `reduce`, of a piece of it: which of two buckets of equal length a call was
# for does not matter, since the order depends on kind, length and position alone.
_WHOLE = ("reduce_scatter", "reduce_scatter_list", "all_reduce")


def summing_calls(collectives: Sequence[Collective], world: int) -> frozenset[Call]:
    """The calls among these that may have added gradients: fp32, over all ranks."""
    whole = tuple(range(world))
    return frozenset(
        (call.kind, call.length)
        for call in collectives
        if call.dtype == "fp32" and call.group == whole and call.kind in (*_WHOLE, "reduce")
    )


def predict(calls: frozenset[Call], partition: Partition, rule: Rule = gloo) -> Order:
    """The order in which each flat element's ranks were added, ``[numel]``, if the backend's rule and the calls tell.

    A bucket is taken to have been summed by one call of its length, or by one ``reduce`` for each piece. Where no call
    fits, and where there are none (pieces exchanged and added locally), rank order is assumed. Whether the prediction
    is right only a comparison shows.
    """
    buckets = sorted(partition.buckets)
    return joined([_of_bucket(calls, bucket, partition.world, rule).slice(0, bucket.length) for bucket in buckets])


def _of_bucket(calls: frozenset[Call], bucket: Bucket, world: int, rule: Rule) -> Order:
    """Of the bucket's elements, and maybe of the padding behind them."""
    for length in (bucket.padded, bucket.length):
        for kind in _WHOLE:
            if (kind, length) in calls and (kind == "all_reduce" or length % world == 0):
                return rule(kind, length, world, "fp32")
    piece = bucket.padded // world
    if ("reduce", piece) in calls:
        return joined([rule("reduce", piece, world, "fp32")] * world)
    return in_rank_order(world, bucket.length)
