"""Labels of the plants in ``plants/layout.py``."""

from __future__ import annotations

from typing import Final

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum.exhibit import ONE, TWO, Kind, Plant, known, part, properties, stages
from harness.faults.museum.places import (
    behind_an_empty_parameter,
    behind_another_parameter,
    crossing_parameter,
    every,
    last_bucket,
    not_first_bucket,
    not_first_rank,
    parameter_on_one_rank,
    strided_parameter,
)
from harness.scenario.model import Build, Load, Step

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="PiecesOfTheSmallerGroup",
        module="layout",
        bugs=("NVIDIA/Megatron-LM#6048",),
        kind=Kind.LAYOUT,
        why=(
            "With two replicas of W/2 shards, ranks of the second get the gradients of pieces that the first "
            "has; nobody gets those of the second half of a bucket."
        ),
        properties=properties("gradient spill ownership"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.OTHER_RANK, Symptom.PADDING}),
        place=not_first_rank,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="OffsetsOfTheWrongWidth",
        module="layout",
        bugs=("deepspeedai/DeepSpeed#1318",),
        kind=Kind.LAYOUT,
        why=(
            "Offsets in elements of four bytes on bf16 data: from the second bucket on, pieces come from "
            "twice as far, from another bucket or from behind the end."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.OTHER_BUCKET, Symptom.ZERO}),
        place=not_first_bucket,
        known=known(1, [2], bucket=1),
    ),
    Plant(
        name="RestOfParameterLost",
        module="layout",
        bugs=("deepspeedai/DeepSpeed#6351",),
        kind=Kind.LAYOUT,
        why=(
            "Of a parameter across an edge between buckets only the first bucket has gradients, so that the "
            "result depends on the bucket size."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.ZERO}),
        place=every(crossing_parameter, not_first_bucket),
        own=True,
        known=known(1, [2], bucket=1),
    ),
    Plant(
        name="FillCounterNeverCleared",
        module="layout",
        bugs=("deepspeedai/DeepSpeed#7415",),
        kind=Kind.RESOURCES,
        why=(
            "The count of what is in a bucket is not cleared when it is sent, so that from the second on each "
            "element is a bucket: all values are right, in far too many collectives. (Here in the gather.)"
        ),
        properties=properties("traffic"),
        stages=stages("gather"),
        own=True,
        known=known(2, [7], bucket=4),
    ),
    Plant(
        name="ExportsInOrderOfSize",
        module="layout",
        bugs=("deepspeedai/DeepSpeed#1240",),
        kind=Kind.LAYOUT,
        why=(
            "The order in which training has the parameters is not the one by which the exported vector is "
            "read, so that values stand under other names."
        ),
        properties=properties("master"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.SHIFTED}),
        own=True,
        known=known(1, [2, 1], 3, ()),
    ),
    Plant(
        name="GuessesWholeFromShard",
        module="layout",
        bugs=("pytorch/torchtitan#4593",),
        kind=Kind.PADDING,
        why=(
            "The last bucket is cut unevenly, so that W times a rank's own elements are too many on the first "
            "ranks and too few on the last."
        ),
        properties=properties("master"),
        stages=stages("gather"),
        own=True,
        known=known(2, [1], 2, ()),
    ),
    Plant(
        name="NarrowWhereWhole",
        module="layout",
        bugs=("pytorch/pytorch#92874",),
        kind=Kind.ROUNDING,
        why=(
            "As long as its rank's shard, a parameter is taken for unsharded and its gradients are left in "
            "bf16, which shows in a sum over parts."
        ),
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.BF16_BEFORE}),
        place=parameter_on_one_rank,
        own=True,
        known=known(1, [1], 1, TWO, seed=6),
    ),
    Plant(
        name="StagingNotZeroed",
        module="layout",
        bugs=("Lightning-AI/lightning-thunder#415",),
        kind=Kind.PADDING,
        why=(
            "What was in the buffer before, here the bucket before, stays behind the elements of the last "
            "bucket and is reduced as its padding."
        ),
        properties=properties("ownership"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PADDING}),
        place=not_first_rank,
        known=known(2, [3], bucket=2),
    ),
    Plant(
        name="PadsOnlyTheLastBucket",
        module="layout",
        bugs=("NVIDIA/Megatron-LM#561",),
        kind=Kind.PADDING,
        why=(
            "A bucket size that W does not divide is taken as it is, and pieces are rounded down, so that the "
            "last elements of every bucket but one have no owner."
        ),
        properties=properties("ownership"),
        stages=stages("build"),
        known=known(2, [4], 3, ()),
    ),
    Plant(
        name="PadsByTheRemainder",
        module="layout",
        bugs=("awslabs/ratex#52",),
        kind=Kind.PADDING,
        why=(
            "n % W in place of -n % W: from three ranks on, pieces are too short for the bucket, or its "
            "padded length is no multiple of W and the reduction refuses it."
        ),
        properties=properties("ownership progress"),
        stages=stages("build reduce"),
        known=known(3, [1], 3, ()),
    ),
    Plant(
        name="HostOffsetsWithPads",
        module="layout",
        bugs=("deepspeedai/DeepSpeed#8277",),
        kind=Kind.SPILL,
        why=(
            "On the host a parameter begins at a multiple of four, but its sum is read from where it begins "
            "in the flat vector: what is behind the first comes from too early, or is padding."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.SHIFTED, Symptom.PADDING, Symptom.ZERO}),
        place=behind_another_parameter,
        known=known(1, [1, 1], 2, (part(more=True), Step())),
    ),
    Plant(
        name="GathersRealPieces",
        module="layout",
        bugs=("pytorch/ao#3983",),
        kind=Kind.PADDING,
        why=(
            "The ranks whose piece has padding send fewer elements than the others, for which their own "
            "gather has no room."
        ),
        properties=properties("progress traffic"),
        stages=stages("gather"),
        place=not_first_rank,
        own=True,
        processes=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="EmptyShardLeftOut",
        module="layout",
        bugs=("ISEEKYAN/Megatron-LM#148",),
        kind=Kind.ODD,
        why=(
            "A shard without elements is sorted out in one of two places. (There from the optimizer on the host; "
            "here with what its rank has summed on the host, which is missing where it belongs.)"
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.RANK_MISSING, Symptom.LOCAL}),
        place=not_first_rank,
        own=True,
        known=known(2, [1], 2, (part(more=True), Step())),
    ),
    Plant(
        name="ReadsStridedInMemoryOrder",
        module="layout",
        bugs=("NVIDIA/Fuser#2245",),
        kind=Kind.ODD,
        why="A transposed gradient is handed to the reduction as it lies in memory, column by column.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        place=strided_parameter,
        own=True,
        known=known(1, [(2, 2)], 4, parameters={0: {"strides": "transposed"}}),
    ),
    Plant(
        name="WritesStridedInMemoryOrder",
        module="layout",
        bugs=("bitsandbytes-foundation/bitsandbytes#1187",),
        kind=Kind.ODD,
        why="The kernel that writes weights takes every parameter for row-major.",
        properties=properties("weights"),
        stages=stages("gather"),
        place=strided_parameter,
        own=True,
        known=known(1, [(2, 2)], 4, parameters={0: {"strides": "transposed"}}),
    ),
    Plant(
        name="GathersIntoTemporary",
        module="layout",
        bugs=("PaddlePaddle/Paddle#65693",),
        kind=Kind.ODD,
        why=(
            "What arrives in the contiguous copy of a transposed parameter is not copied back; there at the "
            "first broadcast, here in the gather."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),
        place=strided_parameter,
        own=True,
        known=known(1, [(2, 2)], 4, parameters={0: {"strides": "transposed"}}),
    ),
    Plant(
        name="ForgetsEmptyParameters",
        module="layout",
        bugs=("deepspeedai/DeepSpeed#6771",),
        kind=Kind.ODD,
        why=(
            "Two lists of parameters, one of them filtered: behind one that was left out, values go to the "
            "wrong parameter and the last gets none. There frozen ones are left out, here empty ones."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER, Symptom.SHIFTED}),
        place=behind_an_empty_parameter,
        known=known(1, [0, 1], bucket=1),
    ),
    Plant(
        name="ExportsPadding",
        module="layout",
        bugs=("NVIDIA/Megatron-LM#5898",),
        kind=Kind.PADDING,
        why=(
            "The exported vector has the padding of the last bucket at its end, and so another length at another world."
        ),
        properties=properties("master"),
        stages=stages("gather"),
        known=known(2, [1], 2, ()),
    ),
    Plant(
        name="FullMasterWithPadding",
        module="layout",
        bugs=("ROCm/Megatron-LM#63",),
        kind=Kind.CHECKPOINT,
        why=(
            "Shards are joined by rank and not by what they mean: with several buckets, pieces lie in another "
            "order, and padding between them."
        ),
        properties=properties("master"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.OTHER_RANK, Symptom.OTHER_BUCKET, Symptom.PADDING}),
        known=known(2, [3], 2, ()),
    ),
    Plant(
        name="ExportsFromOldHandle",
        module="layout",
        bugs=("NVIDIA-NeMo/RL#4183",),
        kind=Kind.CHECKPOINT,
        why=(
            "The writer keeps a handle to where the state was before it moved; weights are right, and what is "
            "exported is out of date."
        ),
        properties=properties("master"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),
        known=known(1, [1], bucket=1),
    ),
    Plant(
        name="MasterOutlivesIt",
        module="layout",
        bugs=("NVIDIA/Megatron-LM#7162",),
        kind=Kind.CHECKPOINT,
        why=(
            "State is found by the identity of a parameter: after a rebuild it is that of the instance "
            "before, not made from the weights."
        ),
        properties=properties("master"),
        stages=stages("build"),
        symptoms=frozenset({Symptom.EARLIER}),
        known=known(1, [1], 1, (*ONE, Build(1), *ONE)),
    ),
    Plant(
        name="SkipsShortPieces",
        module="layout",
        bugs=("ServiceNow/Fast-LLM#436",),
        kind=Kind.LOADING,
        why=(
            "A piece that does not have the expected length is not loaded, and nothing is said: the master "
            "stays as it was where the last bucket has padding."
        ),
        properties=properties("master"),
        stages=stages("build"),
        symptoms=frozenset({Symptom.EARLIER}),
        place=every(last_bucket, not_first_rank),
        own=True,
        known=known(2, [3], 4, (Load(1), *ONE)),
    ),
    Plant(
        name="LoadsGroupByGroup",
        module="layout",
        bugs=("facebookresearch/fairscale#380",),
        kind=Kind.LOADING,
        why="What is loaded comes in the order of parameter groups, and is taken for the order of the list.",
        properties=properties("master"),
        stages=stages("build"),
        symptoms=frozenset({Symptom.SHIFTED}),
        own=True,
        known=known(1, [1, (1, 1)], 2, (Load(1), *ONE)),
    ),
    Plant(
        name="LoadsAsManyAsRankZero",
        module="layout",
        bugs=("radixark/Megatron-LM#66",),
        kind=Kind.LOADING,
        why=(
            "The number of parameters in a shard differs between ranks, but all go by that of rank 0: what "
            "others have beyond it is not loaded."
        ),
        properties=properties("master"),
        stages=stages("build"),
        symptoms=frozenset({Symptom.EARLIER}),
        place=not_first_rank,
        own=True,
        known=known(2, [3, 1], 4, (Load(1), *ONE)),
    ),
    Plant(
        name="StepOfIdleShardNotCounted",
        module="layout",
        bugs=("NVIDIA/TransformerEngine#1986",),
        kind=Kind.CHECKPOINT,
        why=(
            "The count of steps stays behind where there was nothing to do, so that the next step corrects "
            "its bias by the wrong power."
        ),
        properties=properties("master"),
        stages=stages("update"),
        known=known(1, [1], 1, (part(none={0: [0]}), Step(), *ONE)),
    ),
    Plant(
        name="OneCounterForAllParameters",
        module="layout",
        bugs=("pytorch/pytorch#96251",),
        kind=Kind.CHECKPOINT,
        why=(
            "Several parameters add to the same count of steps, so that the second step corrects its bias by "
            "the wrong power."
        ),
        properties=properties("master"),
        stages=stages("update"),
        known=known(1, [1, 1], 2, (*ONE, *ONE)),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {
    "areal-project/AReaL#1468": (
        "Moments are the caller's optimizer and nothing saves or loads them yet; that state is passed "
        "over without a word is planted as skips-short-pieces."
    ),
    "facebookresearch/fairscale#1083": ("The type of a step count in a saved state: there is no checkpoint yet."),
    "huggingface/accelerate#3971": (
        "A load that fails with an error on its first try, in a checkpoint format: there is no checkpoint yet."
    ),
    "pytorch/pytorch#60284": (
        "A load that fails with an error because saving never writes the key: there is no checkpoint yet."
    ),
    "NVIDIA/Megatron-LM#844": (
        "Needs tied weights on two pipeline stages: a parameter is listed once, and there are no pipelines."
    ),
    "deepspeedai/DeepSpeed#3090": (
        "Frozen weights are never handed to the class and there is no checkpoint yet that could lose them."
    ),
    "pytorch/pytorch#129252": (
        "Names of tied weights in a saved file: a parameter is listed once, and there is no checkpoint yet."
    ),
}
"""Public bugs of these kinds that no plant was made of, and why."""
