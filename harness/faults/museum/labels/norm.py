"""Labels of the plants in ``plants/norm.py``."""

from __future__ import annotations

from typing import Final

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum import places
from harness.faults.museum.exhibit import ONE, ROUNDING, SPECIAL, TWO, Kind, Plant, known, part, properties, stages
from harness.scenario.model import Clip, Domain, Step, Values

_CLIPPED: Final = (part(), Clip(2.0**-10), Step())
"""A step of one part whose gradient is clipped."""

_LARGE: Final = Values(Domain.EXACT, max_k=255, exponent=60)
"""Squares do not fit into fp32."""

_NORM: Final = properties("norm")
_AT_NORM: Final = stages("norm")

PLANTS: Final[tuple[Plant, ...]] = (
    # Over which ranks it is summed.
    Plant(
        name="MaxOfNorms",
        module="norm",
        bugs=("facebookresearch/fairscale#167",),
        kind=Kind.NORM,
        why="The largest of the ranks' squared norms passes for their sum: too small as soon as two shards hold any.",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [2], bucket=2),
    ),
    Plant(
        name="NormReducedTwice",
        module="norm",
        bugs=("PaddlePaddle/Paddle#35691",),
        kind=Kind.NORM,
        why="The total that all ranks have already is summed over ranks once more: W times too large, and the same on "
        "every rank.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.FACTOR_WORLD}),
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="NormOverReplicasToo",
        module="norm",
        bugs=("ByteDance-Seed/VeOmni#184",),
        kind=Kind.NORM,
        why="The sum goes over both axes of a mesh of two rows, though each row has the whole: counted twice. (Here "
        "at even worlds from 4 on: both halves of the world hold the total, and it is added up over them.)",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.TWICE}),
        known=known(4, [1], bucket=4),
    ),
    Plant(
        name="UnreducedOnFlatMesh",
        module="norm",
        bugs=("ByteDance-Seed/VeOmni#862",),
        kind=Kind.NORM,
        why="Where one axis of the mesh has length 1 the gradient is believed not to be sharded, and the norm is not "
        "reduced: right in a world of 4, two by two, and of each rank alone in worlds of 2 and 3.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.LOCAL}),
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="NormOnRootOnly",
        module="norm",
        bugs=("pytorch/pytorch#77562",),
        kind=Kind.DIVERGENCE,
        why="A reduce stands where an all-reduce is meant, so only rank 0 has the total; the others clip by whatever "
        "their buffer is left with.",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [1], bucket=2),
        place=places.not_first_rank,
        processes=True,
    ),
    Plant(
        name="NormByColour",
        module="norm",
        bugs=("NVIDIA/Megatron-LM#6470",),
        kind=Kind.NORM,
        why="Two colours of parameters are reduced over two groups, and one of these is not the one that its elements "
        "are dealt out to: what other ranks own of every second parameter is left out, on each rank something else.",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [1, 1], bucket=2),
        own=True,
    ),
    Plant(
        name="ReadsNormBeforeWait",
        module="norm",
        bugs=("pytorch/pytorch#115710",),
        kind=Kind.RACE,
        why="The total is copied while its all-reduce is under way: a simulated world sees the read, real ranks may "
        "see the value from before the sum, or may not.",
        properties=properties("traffic norm"),
        stages=_AT_NORM,
        known=known(2, [1], bucket=2),
        own=True,
    ),
    # What is counted.
    Plant(
        name="CountsReplicasInNorm",
        module="norm",
        bugs=("pytorch/pytorch#88955", "PaddlePaddle/Paddle#35713", "NVIDIA-NeMo/RL#3788"),
        kind=Kind.NORM,
        why="What is the same on all ranks is summed over ranks together with what is dealt out, and so counts W "
        "times. (Here a last bucket that is shorter than the others is what each rank has whole.)",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [3], bucket=2),
    ),
    Plant(
        name="CountsVectorsOnRankZero",
        module="norm",
        bugs=("ROCm/TransformerEngine#715",),
        kind=Kind.NORM,
        why="The mark that says which parameters are replicated is wrong. (There it was missing, and the norm too "
        "large; here vectors have it that should not: what ranks other than 0 own of them is not in the norm.)",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [2], bucket=2),
        own=True,
    ),
    Plant(
        name="CountsTiedWeightTwice",
        module="norm",
        bugs=("NVIDIA/Megatron-LM#7227",),
        kind=Kind.NORM,
        why="The mark of a tied weight was lost, so that it counts at both of its places. (Parameters are listed once "
        "here: the first one is walked again.)",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.TWICE}),
        known=known(1, [1], bucket=1),
        own=True,
    ),
    Plant(
        name="NormSkipsLastBucket",
        module="norm",
        bugs=("facebookresearch/fairscale#518",),
        kind=Kind.NORM,
        why="The last bucket, partly filled, is not there yet when the norm is taken: its elements are not in it.",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(1, [2], bucket=1),
    ),
    Plant(
        name="FirstBucketDecidesFinite",
        module="norm",
        bugs=("facebookresearch/fairscale#890",),
        kind=Kind.NORM,
        why="The search for inf and nan returns after the first tensor, and what is believed to be finite is summed "
        "without them: a nan in a later bucket does not reach the norm.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.NONFINITE}),
        known=known(1, [2], bucket=1, values=SPECIAL),
    ),
    Plant(
        name="CountsLeftoversOfReduce",
        module="norm",
        bugs=("pytorch/pytorch#21480",),
        kind=Kind.NORM,
        why="After a reduce only the owner's buffer is defined, and what is left in the others' (on gloo partial "
        "sums) is counted as well.",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [1], bucket=2),
        processes=True,
    ),
    Plant(
        name="NormOfAGenerator",
        module="norm",
        bugs=("areal-project/AReaL#335",),
        kind=Kind.NORM,
        why="The first pass consumes the generator, the second has nothing. (There the norm was the first and the clip "
        "the second; here a second norm is that of no piece: zero.)",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.ZERO}),
        known=known(1, [1], bucket=1, operations=_CLIPPED),
        own=True,
    ),
    # Powers, roots, scales.
    Plant(
        name="NormOfTheMean",
        module="norm",
        bugs=("NVIDIA/apex#1512",),
        kind=Kind.NORM,
        why="A scale that the gradient does not have (here 1 over the number of parts) is applied to the norm, so "
        "that the factor of the clip is that of another gradient.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.FACTOR_ONE_OVER_PARTS}),
        known=known(1, [1], bucket=1, operations=TWO),
        own=True,
    ),
    Plant(
        name="InfinityRoot",
        module="norm",
        bugs=("meta-pytorch/torchrec#3199",),
        kind=Kind.NORM,
        why="The p-th root that a p-norm ends with is taken for p infinite too: whatever the gradient, the norm is 1.",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(1, [1], bucket=1),
        own=True,
    ),
    Plant(
        name="NormRoot",
        module="norm",
        bugs=("meta-pytorch/torchrec#3199",),
        kind=Kind.NORM,
        why="A root at the end where none belongs, with an exponent that makes sense: the norm where its square is "
        "asked for.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.ROOT}),
        known=known(1, [1], bucket=1),
    ),
    Plant(
        name="NormalisesByLargest",
        module="norm",
        bugs=("MoonshotAI/Moonlight#27",),
        kind=Kind.NORM,
        why="A shard is divided by its own size, and one that is all zeros or all padding by zero: nan, on all ranks "
        "after the sum. (There it was the normalisation of a matrix.)",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(2, [1], bucket=2),
    ),
    # How it is rounded, and in which order it is added.
    Plant(
        name="SquaresInFloat32",
        module="norm",
        bugs=("NVIDIA-NeMo/Speech#637",),
        kind=Kind.ROUNDING,
        why="A sum of finite values overflows and passes for one that is not finite. (There losses, added up to find "
        "that out; here squares in fp32; smaller ones are rounded more than an fp64 norm may be.)",
        properties=_NORM,
        stages=_AT_NORM,
        known=known(1, [1], bucket=1, values=_LARGE),
        own=True,
    ),
    Plant(
        name="SumsSquaresInBf16",
        module="norm",
        bugs=("pytorch/pytorch#90028",),
        kind=Kind.ROUNDING,
        why="Squares and their sum have 8 bits: each is rounded, and what is less than half a unit of the sum so far "
        "adds nothing.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.BF16_BEFORE, Symptom.BF16_AFTER}),
        known=known(1, [1], bucket=1),
        own=True,
    ),
    Plant(
        name="NormRoundedToBf16",
        module="norm",
        bugs=("PaddlePaddle/Paddle#36555",),
        kind=Kind.ROUNDING,
        why="What the factor of the clip is made from is cast to the weights' dtype once for all: right to 8 bits, "
        "and the same on every rank.",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.BF16_AFTER}),
        known=known(1, [1], bucket=1),
        own=True,
    ),
    Plant(
        name="AddsOwnNormFirst",
        module="norm",
        bugs=("NVIDIA/Megatron-LM#657",),
        kind=Kind.DETERMINISM,
        why="The order of addition follows from how a rank lists the others, and differs between ranks: from three "
        "on, so do the last bits. (There it differed between two versions of the code.)",
        properties=_NORM,
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.ORDER}),
        known=known(3, [3], bucket=3, values=ROUNDING, seed=5),
    ),
    Plant(
        name="NormInArrivalOrder",
        module="norm",
        bugs=("microsoft/onnxruntime#5027",),
        kind=Kind.DETERMINISM,
        why="Threads add in the order in which they come. Each result is right, within what rounding allows, and two "
        "runs of one case differ.",
        properties=properties("determinism"),
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.ORDER}),
        known=known(1, [3], bucket=3, operations=(*ONE, *ONE), values=ROUNDING, seed=273),
    ),
    # What a clip changes.
    Plant(
        name="NormOfSavedCopy",
        module="norm",
        bugs=("PaddlePaddle/Paddle#59611",),
        kind=Kind.NORM,
        why="There are two copies of the reduced gradient, and a clip reaches one of them: the norm afterwards is "
        "that from before.",
        properties=properties("norm clip"),
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.UNCLIPPED}),
        known=known(1, [1], bucket=1, operations=_CLIPPED),
    ),
    Plant(
        name="ClipUndone",
        module="norm",
        bugs=("deepspeedai/DeepSpeed#3790",),
        kind=Kind.NORM,
        why="The clip is without effect: norm and factor are right, and the optimizer is given the gradient from "
        "before it.",
        properties=properties("clip"),
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.UNCLIPPED}),
        known=known(1, [1], bucket=1, operations=_CLIPPED),
    ),
    Plant(
        name="ClipsOnRankZeroOnly",
        module="norm",
        bugs=("deepspeedai/DeepSpeed#1801",),
        kind=Kind.DIVERGENCE,
        why="The factor is applied on one rank, the others update with unclipped gradients: all ranks agree on every "
        "norm, and what the others own moves as if there were no clip.",
        properties=properties("clip"),
        stages=_AT_NORM,
        symptoms=frozenset({Symptom.UNCLIPPED}),
        known=known(2, [2], bucket=2, operations=_CLIPPED),
        place=places.not_first_rank,
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
