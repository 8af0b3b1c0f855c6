"""Labels of the plants in ``plants/reduction.py``."""

from __future__ import annotations

from typing import Final

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum import places
from harness.faults.museum.exhibit import Kind, Plant, known, properties, stages

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="MeanForSum",
        module="reduction",
        bugs=("meta-pytorch/torchtune#2172",),
        kind=Kind.REDUCTION,
        why="The caller's scale and the collective's 1/W are both applied: all gradients are 1/W of their sum.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.FACTOR_ONE_OVER_WORLD}),
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="TimesWorld",
        module="reduction",
        bugs=("pytorch/pytorch#162338",),
        kind=Kind.REDUCTION,
        why="The backend was asked for a mean and gave the sum; what should make a sum of that is W times too large.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.FACTOR_WORLD}),
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="FastPathAverages",
        module="reduction",
        bugs=("ROCm/rocm-systems#10322",),
        kind=Kind.REDUCTION,
        why=(
            "A fast path that was chosen by size alone does another operation: there, a sum for a mean; here, a mean "
            "for a sum. All other buckets are right."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.FACTOR_ONE_OVER_WORLD}),
        place=places.bucket_of_one_each,
        own=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="DividesByElements",
        module="reduction",
        bugs=("meta-pytorch/torchcomms#287",),
        kind=Kind.REDUCTION,
        why=(
            "The divisor of the mean is the number of elements, which is hidden where that is W. The factor is that "
            "of no number of ranks or parts, but where they happen to be as many."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known(1, [2], bucket=2),
    ),
    Plant(
        name="MeanOfSmallerGroup",
        module="reduction",
        bugs=("pytorch/torchtitan#1551",),
        kind=Kind.REDUCTION,
        why=(
            "Parameters of experts (here: matrices) are divided by the size of their own group, not by the number of "
            "ranks whose data contributed: too large by W / (W // 2), which is W at worlds 2 and 3 but "
            "not at 4."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.FACTOR_WORLD}),  # true at worlds 2 and 3; world 4 refutes it
        place=places.matrix,
        own=True,
        known=known(2, [(1, 1)], bucket=2),
    ),
    Plant(
        name="OwnInputMissing",
        module="reduction",
        bugs=("meta-pytorch/torchcomms#477",),
        kind=Kind.REDUCTION,
        why=(
            "The output is zeroed before the owner's own input was taken from it: each piece lacks its owner's "
            "contribution, and is zero where nobody else has one."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.RANK_MISSING, Symptom.ZERO}),
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="NeverReduces",
        module="reduction",
        bugs=("pytorch/pytorch#60118",),
        kind=Kind.REDUCTION,
        why=(
            "The hook that would have reduced is bypassed, on all ranks alike, and no collective is missed by anyone. "
            "With the same data on all ranks a mean would hide it."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.LOCAL, Symptom.RANK_MISSING}),
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="LoneBucketStaysLocal",
        module="reduction",
        bugs=("verl-project/verl#7493",),
        kind=Kind.REDUCTION,
        why=(
            "A degenerate layout (there, a mesh with an axis of one; here, one bucket) takes the branch that was made "
            "for a group of one: nothing is sent, and each rank goes on with what it has."
        ),
        properties=properties("gradient spill traffic"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.LOCAL, Symptom.RANK_MISSING}),
        own=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="WrongPieceAtWorldThree",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#966",),
        kind=Kind.REDUCTION,
        why=(
            "The reduce-scatter is off by one piece, in one of the configurations only, while the gather is right. "
            "Where the neighbour's piece is longer, a gradient lands in padding."
        ),
        properties=properties("gradient spill ownership"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.OTHER_RANK}),
        known=known(3, [1], bucket=3),
    ),
    Plant(
        name="RestBehindBorderStaysLocal",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#7807",),
        kind=Kind.REDUCTION,
        why=(
            "After a reduce-scatter only the own piece is summed. There, Muon takes a whole matrix from the bucket; "
            "here, what lies behind the border between pieces is taken from the unreduced one."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.LOCAL, Symptom.RANK_MISSING}),
        place=places.behind_piece_edge,
        own=True,
        known=known(2, [2], bucket=2),
    ),
    Plant(
        name="KeepsTheGradientInBf16",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#6485",),
        kind=Kind.ROUNDING,
        why=(
            "What the step computes with was not widened: the reduced gradient has eight bits, whatever it was summed "
            "in, and widening it afterwards brings none back."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.BF16_AFTER}),
        known=known(2, [1], bucket=2, seed=6),  # a sum of nine bits
    ),
    Plant(
        name="RoundsPartialSumAtWorldThree",
        module="reduction",
        bugs=("pytorch/pytorch#190626",),
        kind=Kind.ROUNDING,
        why="A sum in two hops, of which only one is in fp32: the partial sum between them is rounded to bf16.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.BF16_BEFORE}),
        known=known(3, [1], bucket=3, seed=6),  # a partial sum of nine bits
    ),
    Plant(
        name="StagingReusedInFlight",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#5606",),
        kind=Kind.RACE,
        why=(
            "Nobody waits for the reduction that reads a staging buffer before the next bucket but one is written to "
            "it. There, a stream that was slower than the other."
        ),
        properties=properties("traffic"),
        stages=stages("reduce"),
        own=True,
        timing=True,
        known=known(2, [5], bucket=2),
    ),
    Plant(
        name="TurnStartsOverInFlight",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#7805",),
        kind=Kind.RACE,
        why=(
            "Two buffers take turns, but which is next is forgotten when the rest is flushed: with an even number of "
            "buckets the last goes into the buffer that is in flight."
        ),
        properties=properties("traffic"),
        stages=stages("reduce"),
        own=True,
        timing=True,
        known=known(2, [3], bucket=2),
    ),
    Plant(
        name="InputFreedInFlight",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#7965",),
        kind=Kind.RACE,
        why=(
            "The flat input is temporary, and its memory is given back while the collective reads it. There, a caching "
            "allocator and a second stream; here, the storage itself."
        ),
        properties=properties("traffic"),
        stages=stages("reduce"),
        own=True,
        timing=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="OutputRecycledInFlight",
        module="reduction",
        bugs=("pytorch/pytorch#180665",),
        kind=Kind.RACE,
        why=(
            "The output of a reduction is given out again before it was copied to where it belongs. There, by the "
            "allocator, under a copy to the host; here, as output of the next reduction."
        ),
        properties=properties("traffic"),
        stages=stages("reduce"),
        own=True,
        timing=True,
        known=known(2, [3], bucket=2),
    ),
    Plant(
        name="StartedBeforeWritten",
        module="reduction",
        bugs=("deepspeedai/DeepSpeed#8061",),
        kind=Kind.RACE,
        why=(
            "The reduction does not wait for whoever writes the bucket. There, writers on other streams than the one "
            "that was waited for; here, the input of an asynchronous collective is written after its launch."
        ),
        properties=properties("traffic"),
        stages=stages("reduce"),
        own=True,
        timing=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="LastNotAwaited",
        module="reduction",
        bugs=("facebookresearch/fairscale#729", "pytorch/pytorch#98667"),
        kind=Kind.RACE,
        why=(
            "The step begins before the gradient is there. There, a copy to the host that nobody synchronised with; "
            "here, a reduction that nobody waited for: the gradient is whatever lies in its output."
        ),
        properties=properties("traffic gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="ReadsBeforeWait",
        module="reduction",
        bugs=("pytorch/pytorch#180666",),
        kind=Kind.RACE,
        why=(
            "What a transfer brings is read first and waited for afterwards. There, a copy into pinned memory that a "
            "hook was shown; here, an all-gather on the last rank."
        ),
        properties=properties("traffic"),
        stages=stages("gather"),
        place=places.last_rank,
        timing=True,
        known=known(2, [1], bucket=2),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
