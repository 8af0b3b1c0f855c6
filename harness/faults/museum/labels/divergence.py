"""Labels of the plants in ``plants/divergence.py``."""

from __future__ import annotations

from typing import Final

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum.exhibit import SPECIAL, Kind, Plant, known, part, properties, stages
from harness.faults.museum.places import first_rank, if_named, lacks_gradients, last_rank, not_first_rank
from harness.scenario.model import Step

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="SkipsWithoutGradient",
        module="divergence",
        bugs=("lightseekorg/TorchSpec#32", "facebookresearch/optimizers#149"),
        kind=Kind.DIVERGENCE,
        why="A rank that has no gradient returns before the reduction: its next collective, the norm's, meets the "
        "others' first bucket.",
        properties=properties("traffic"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.ZERO}),  # of that rank: what shows where nothing tells of the calls
        known=known(2, [1], bucket=2, operations=(part(none={1: [0]}), Step())),
        place=if_named(lacks_gradients),
        processes=True,
    ),
    Plant(
        name="EmptyShardSitsOut",
        module="divergence",
        bugs=("facebookresearch/optimizers#149",),
        kind=Kind.DIVERGENCE,
        why="A rank whose pieces are all padding returns early from the gather, in which it would receive its weights.",
        properties=properties("traffic"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),  # of that rank, as above
        known=known(2, [1], bucket=2),
        place=not_first_rank,
        own=True,
        processes=True,
    ),
    Plant(
        name="SkipsNormOnOverflow",
        module="divergence",
        bugs=("hpcaitech/ColossalAI#1175",),
        kind=Kind.DIVERGENCE,
        why="Where inf or nan lies in one shard alone its owner leaves the norm's all-reduce out, for which the others "
        "wait.",
        properties=properties("traffic"),
        stages=stages("norm"),
        known=known(2, [1], bucket=2, values=SPECIAL),
        own=True,
        processes=True,
    ),
    Plant(
        name="RefusesAlone",
        module="divergence",
        bugs=("radixark/miles#2516",),
        kind=Kind.DIVERGENCE,
        why="A check that one rank alone fails is made before the collective in which the others wait: here of the "
        "layout at construction, where the bug checked a checkpoint on rank 0.",
        properties=properties("progress"),
        stages=stages("build"),
        known=known(2, [1], bucket=2),
        place=not_first_rank,
        own=True,
        processes=True,
    ),
    Plant(
        name="MeetsNobodyInItsEnd",
        module="divergence",
        bugs=("pytorch/pytorch#190396",),
        kind=Kind.DIVERGENCE,
        why="Cleaning up is collective on one rank alone, here a barrier for the communicators of the bug: it waits "
        "for ranks that are done, after the last stage whichever that was.",
        properties=properties("traffic"),
        stages=stages("build collect norm gather"),
        known=known(2, [1], bucket=2),
        place=if_named(last_rank),
        processes=True,
    ),
    Plant(
        name="SkipsBucketsWithoutGradient",
        module="divergence",
        bugs=("KellerJordan/Muon#37",),
        kind=Kind.DIVERGENCE,
        why="A rank goes on to the next bucket where it has no gradient in one, and meets the others a bucket too "
        "early.",
        properties=properties("traffic"),
        stages=stages("reduce"),
        known=known(2, [1], bucket=2, operations=(part(none={1: [0]}), Step())),
        place=if_named(lacks_gradients),
        processes=True,
    ),
    Plant(
        name="PacksPresentGradients",
        module="divergence",
        bugs=("pytorch/pytorch#158719",),
        kind=Kind.DIVERGENCE,
        why="What is reduced is made of the gradients that a rank has, so lengths differ; where they do not, other "
        "elements are added to each other.",
        properties=properties("traffic gradient spill"),
        stages=stages("reduce"),
        known=known(2, [1], bucket=2, operations=(part(none={1: [0]}), Step())),
        place=if_named(lacks_gradients),
        processes=True,
    ),
    Plant(
        name="ZeroFillInParameterDtype",
        module="divergence",
        bugs=("pytorch/pytorch#196996",),
        kind=Kind.DIVERGENCE,
        why="The zeros of a rank without gradients have the parameters' dtype, and the others' gradients that of the "
        "sum.",
        properties=properties("traffic"),
        stages=stages("reduce"),
        known=known(2, [1], bucket=2, operations=(part(none={1: [0]}), Step())),
        place=if_named(lacks_gradients),
        processes=True,
    ),
    Plant(
        name="RebuildsBucketsLocally",
        module="divergence",
        bugs=("pytorch/pytorch#35137",),
        kind=Kind.DIVERGENCE,
        why="The buckets of all steps follow the order in which gradients first came on this rank, which was another "
        "where some were None: other lengths, or other parameters of the same length.",
        properties=properties("traffic gradient spill"),
        stages=stages("reduce"),
        # Of one element each, they are added to each other without a word.
        known=known(2, [1, 2], bucket=4, operations=(part(none={1: [0]}), Step())),
        processes=True,
    ),
    Plant(
        name="StacksNormsOfOwnBuckets",
        module="divergence",
        bugs=("NVIDIA/nccl#1394",),
        kind=Kind.DIVERGENCE,
        why="A rank whose last piece is all padding hands in one norm less than the others, and no backend compares "
        "lengths.",
        properties=properties("traffic"),
        stages=stages("norm"),
        known=known(2, [1], bucket=2),
        place=if_named(not_first_rank),
        processes=True,
    ),
    Plant(
        name="SwapsEqualBuckets",
        module="divergence",
        bugs=("NVIDIA/Megatron-LM#2218",),
        kind=Kind.DIVERGENCE,
        why="Two buckets of equal length in another order on one rank: each is added to the other, no backend "
        "notices, and all ranks agree on the wrong sums.",
        properties=properties("traffic"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.OTHER_BUCKET}),
        known=known(2, [4], bucket=2),
        place=last_rank,
        processes=True,
    ),
    Plant(
        name="IteratesOverASet",
        module="divergence",
        bugs=("NVIDIA/Megatron-LM#2218",),
        kind=Kind.DIVERGENCE,
        why="Each rank but the first reduces its buckets in an order of its own: lengths differ where a shorter last "
        "one meets another; equal ones are added to each other.",
        properties=properties("traffic"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.OTHER_BUCKET}),  # where the lengths are equal
        known=known(2, [5], bucket=4),  # [3] in buckets of 2: as above
        place=not_first_rank,
        own=True,
        processes=True,
    ),
    Plant(
        name="SwapsEqualBucketsInGather",
        module="divergence",
        bugs=("pytorch/pytorch#75902",),
        kind=Kind.DIVERGENCE,
        why="Gathers of the same type and length run in another order on one rank: each rank gets the other's piece "
        "for its own bucket.",
        properties=properties("traffic weights"),  # one that is nan from end to end could be any
        stages=stages("gather"),
        symptoms=frozenset({Symptom.OTHER_BUCKET}),
        known=known(2, [4], bucket=2),
        place=last_rank,
        processes=True,
    ),
    Plant(
        name="MakesOwnGroupOnly",
        module="divergence",
        bugs=("pytorch/pytorch#130102",),
        kind=Kind.DIVERGENCE,
        why="Making a group is collective over the world; each rank passes its own half's list, and calls pair by "
        "order whatever is in them.",
        properties=properties("traffic"),
        stages=stages("build"),
        known=known(2, [1], bucket=2),
        processes=True,
    ),
    Plant(
        name="MembersMakeTheGroup",
        module="divergence",
        bugs=("cornstarch-org/Cornstarch#76",),
        kind=Kind.DIVERGENCE,
        why="Only the ranks of a group make it, and wait for those that are in none.",
        properties=properties("traffic"),
        stages=stages("build"),
        known=known(3, [1], bucket=3),
        place=if_named(first_rank),
        processes=True,
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
