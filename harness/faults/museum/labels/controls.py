"""Labels of the negative controls, right in another way: never a violation.

Their classes are in ``controls`` and ``controls_wire``, variants of ``PlainZero``, and in ``controls_zero2``.
"""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import Control

CONTROLS: Final[tuple[Control, ...]] = (
    Control(
        "PlainZero",
        "A class as in a trainer, written from the specification alone: most others override a method of it",
    ),
    Control(
        "RoundsBucketUp",
        "Rounds the requested bucket up to a multiple of W instead of down, and says so in ``buckets``",
    ),
    Control(
        "PadsToEightPerRank",
        "Pads every bucket to a multiple of 8 W, so that full buckets have padding too; ``buckets`` are lists",
    ),
    Control(
        "BucketPerParameter",
        "Ignores the requested size: one bucket a parameter, padding between parameters, none for empty ones",
    ),
    Control("ReducesByAllReduce", "All-reduces the whole bucket and keeps its own piece"),
    Control(
        "ReducesByAllToAll",
        "Exchanges pieces by all-to-all and adds them in rank order: another order than the backend's ring",
    ),
    Control(
        "ReducesByList",
        "A reduce-scatter of a list of pieces, which gloo makes one ``reduce`` a rank: the chunks are those of pieces",
    ),
    Control(
        "AddsFromTheLastRank", "Exchanges pieces by all-to-all and adds them itself, from the last rank to the first"
    ),
    Control("AddsPairwise", "Adds neighbours, then neighbouring sums, and so on: a balanced tree"),
    Control("AddsOwnFirst", "Each rank starts with what it has itself: another order on every rank"),
    Control(
        "AddsHalvesOfTheWorld",
        "Sums over two halves of the world first, each a group of its own, then over the two sums: two hops",
    ),
    Control(
        "ChangesOrderEveryStep",
        "Adds in an order that is fixed for each step, and another one in the next: no single tree explains it",
    ),
    Control(
        "AddsInFloat64",
        "Adds in fp64 and rounds once: nearer to the exact sum than any order of fp32 additions, and equal to none",
    ),
    Control("AddsPartsBackward", "Keeps copies of a step's parts on the host and adds the last one first"),
    Control(
        "OneInstanceAProcess",
        "Adds from the last rank to the first, and cannot be built twice at a time: its order cannot be probed",
    ),
    Control(
        "SharesItsGradient",
        "Adds from the last rank to the first, into a buffer that all instances of a process share: not to be probed",
    ),
    Control(
        "ReducesEverythingAtOnce",
        "One all-reduce of the whole flat vector, buckets or not: chunks of the ring that no bucket shows",
    ),
    Control(
        "ReducesToOwner",
        "One ``reduce`` per piece to its owner; what the other ranks are left with is garbage and is not used",
    ),
    Control(
        "GathersByBroadcast", "Every owner broadcasts its piece; uses ``all_gather`` with a list for the full master"
    ),
    Control("GathersInFloat32", "All-gathers the fp32 shard and rounds on every rank"),
    Control("NormByVectorNorm", "fp32 norm of the shard, rooted and squared again"),
    Control("NormBySumOfSquares", "fp32 squares and sum; overflows where the square of the norm does not fit"),
    Control("NormByBucket", "Adds one fp32 norm per bucket in a Python float, as trainers with per-bucket hooks do"),
    Control(
        "AlwaysOnHost", "Moves every gradient to the host at once, but counts a spill only where the specification does"
    ),
    Control(
        "ReducesEveryPart",
        "Reduces in ``collect``, part by part, and adds the reduced shards: parts outside, ranks inside the sum",
    ),
    Control(
        "OverlapsCollectives",
        "Starts the collectives of all buckets asynchronously and waits for them in order; fresh gradient every step",
    ),
    Control(
        "WalksBackward",
        "Walks the buckets from last to first in both directions, as a backward pass would; the same on all ranks",
    ),
    Control("RefusesScalars", "Says NotImplementedError for scalar parameters: those scenarios are outside its space"),
    Control("RefusesThirdPart", "Says NotImplementedError, on every rank, at the third ``collect`` of a step"),
    Control("Refreshes", "Takes weights that were loaded from outside, and says so"),
    Control(
        "DealsOutBucket",
        "All-reduces each bucket with its elements in a drawn order, the same on all ranks, and puts them back",
        module="controls_wire",
    ),
    Control(
        "LastParameterFirst",
        "Sums parameters in the order in which a backward pass gives them, in one call, whatever the buckets are",
        module="controls_wire",
    ),
    Control(
        "OneCallForAllBuckets",
        "Interleaves the pieces of all buckets: one reduce-scatter fills a whole shard, one all-gather takes it",
        module="controls_wire",
    ),
    Control(
        "TwoCallsABucket",
        "Sums the first half of every piece of a bucket in one call, and the second half in another",
        module="controls_wire",
    ),
    Control(
        "ReducesToRootAndScatters", "One rank sums the whole bucket and hands the pieces out", module="controls_wire"
    ),
    Control(
        "SumsWhatItGathered",
        "Has the whole bucket of every rank and adds in rank order itself: the traffic of a debug build",
        module="controls_wire",
    ),
    Control(
        "PassesSumsAround",
        "A ring of its own, of messages from rank to rank: the sum of a piece comes round to its owner",
        module="controls_wire",
    ),
    Control("GathersToRoot", "One rank collects the pieces and broadcasts the whole", module="controls_wire"),
    Control(
        "SkipsWhatNobodyHas",
        "Asks first which buckets any rank has a gradient for, and sums only those: the same ones on all ranks",
        module="controls_wire",
    ),
    Control(
        "RoundsInIntegers",
        "Rounds to bf16 in integer arithmetic on the bits, as a kernel without a conversion would",
        module="controls_wire",
    ),
    Control(
        "NormByRankSums",
        "Gathers one number of every rank and adds them exactly, so that no order of ranks is in the norm",
        module="controls_wire",
    ),
    Control("NormFromRoot", "One rank sums the norm and tells the others", module="controls_wire"),
    Control(
        "KeepsShardsInOneArena",
        "Master and gradient are slices of one allocation, with nan before, between and behind them",
        module="controls_wire",
    ),
    Control(
        "StagesInFreshBuffers",
        "Fills and empties a new buffer for each bucket, full of nan before: nothing outlives a bucket in staging",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "OneBucketAtATime",
        "Waits for each collective where it is called: nothing overlaps, and one buffer would do",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "WaitsFromLastToFirst",
        "Starts the reduce-scatters of all buckets, each from a tensor of its own, and waits for the last one first",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "ReversesPieces",
        "Sends each piece of a bucket from its last element to its first, and turns back what it gets",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "DealsOutElements",
        "Sends the elements of each piece in a drawn order, the same on all ranks, and puts them back",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "NormByExactSum",
        "Adds the squares of its shard exactly and rounds once: nearer to the norm than any loop of additions",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "NormFromLastBucket",
        "Adds one fp64 norm a bucket, from the last bucket to the first, each of them a dot product",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "ZeroesHostFirst",
        "Zeroes the host vector when a step's first part comes, and adds this one too, instead of overwriting",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "AddsPartsWhenReduced",
        "Keeps copies of a spilled step's parts, and adds them on the host only when the sum is wanted",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "TalksInItsOwnGroup",
        "Hands the constructor a group of its own, of all ranks, made once a process",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "RefreshesFromWholeVector",
        "Lays all weights end to end in one fp32 vector and cuts its shard out of that",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "WritesWholeParameters",
        "Gathers all buckets into one fp32 vector first, and then writes each parameter with one copy",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "KeepsAllInOneArena",
        "Cuts master, gradient and staging out of one allocation: all of them are views that begin somewhere in it",
        module="controls_zero2",
        own=True,
    ),
    Control(
        "BucketsGrow",
        "A small first bucket, so that something travels early, and each further one twice as long; states them",
        module="controls_wire",
    ),
    Control("WaitsForFutures", "Waits for the future of each collective instead of its work", module="controls_wire"),
    Control("MeetsAtBarriers", "A barrier before and after everything that is sent", module="controls_wire"),
    Control(
        "ComparesShapesFirst",
        "Sends the shapes of its parameters around as Python objects when it is built",
        module="controls_wire",
    ),
    Control(
        "AddsInAThread",
        "Adds on the host in a thread, which ends before anything else is asked of the sum",
        module="controls_wire",
    ),
    Control(
        "HostSumsInFloat64",
        "Adds the parts of a step in fp64 on the host and rounds the sum once",
        module="controls_wire",
    ),
    Control(
        "CallsAtWorldOneToo",
        "Makes every call also where it is alone, without a look at the number of ranks",
        module="controls_wire",
    ),
    Control(
        "CallsOldNames",
        "Calls the collectives by the names they had before torch 2.13, which warn there",
        module="controls_wire",
    ),
    Control(
        "CallsFunctionally",
        "Calls collectives that return tensors, which are waited for when they are used, as compiled programs do",
        module="controls_wire",
    ),
    Control(
        "LeavesCyclesBehind",
        "Leaves as much as the whole master in a reference cycle after each gather: garbage, not collected yet",
        module="controls_zero2",
        own=True,
    ),
)
