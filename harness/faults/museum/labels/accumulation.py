"""Labels of the plants in ``plants/accumulation.py``."""

from __future__ import annotations

from typing import Final

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum import places
from harness.faults.museum.exhibit import ONE, TWO, Kind, Plant, known, part, properties, stages
from harness.scenario.model import Discard, Skip, Step

_SPILLED: Final = (part(more=True), Step())
"""A step of one part, which is moved to the host because another was announced."""

PLANTS: Final[tuple[Plant, ...]] = (
    # Parts that are lost.
    Plant(
        name="RebuildsTheHostSum",
        module="accumulation",
        bugs=("InfiniTensor/InfiniTrain#183",),
        kind=Kind.ACCUMULATION,
        why="Buckets are laid out anew once, between two parts, and the first part is not carried over: only the first "
        "sum of two parts on each rank lacks one.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_MISSING}),
        known=known(1, [1], bucket=1, operations=TWO),
        own=True,
    ),
    Plant(
        name="CountsPartsItself",
        module="accumulation",
        bugs=("Lightning-AI/pytorch-lightning#6170",),
        kind=Kind.ACCUMULATION,
        why="It counts parts beside its caller and clears the sum where it believes that a step begins: right until "
        "the number of parts changes from step to step.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_MISSING}),
        known=known(1, [1], bucket=1, operations=(*ONE, *TWO)),
        own=True,
    ),
    Plant(
        name="FinalisesEveryPart",
        module="accumulation",
        bugs=("NVIDIA/Megatron-LM#7186",),
        kind=Kind.ACCUMULATION,
        why="Every part passes for the last of its step, after which the sum is cleared: of several only the last is "
        "left, for all parameters.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_MISSING}),
        known=known(1, [1], bucket=1, operations=TWO),
        own=True,
    ),
    Plant(
        name="NewestOnly",
        module="accumulation",
        bugs=("pytorch/pytorch#73784",),
        kind=Kind.SPILL,
        why="The host copy of a gradient is overwritten where the new one should be added to it: of several parts "
        "the last that has the parameter is left.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_MISSING}),
        known=known(1, [1], bucket=1, operations=TWO),
    ),
    Plant(
        name="OverwritesAtWorldOne",
        module="accumulation",
        bugs=("ServiceNow/Fast-LLM#550",),
        kind=Kind.ACCUMULATION,
        why="A group of one rank has a branch of its own, which copies where the other one adds: nothing is wrong in "
        "any larger world.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_MISSING}),
        known=known(1, [1], bucket=1, operations=TWO),
    ),
    # The part in which ranks exchange gradients.
    Plant(
        name="ReducesInEveryPart",
        module="accumulation",
        bugs=("NVIDIA/cosmos-framework#161", "huggingface/accelerate#3762"),
        kind=Kind.RESOURCES,
        why="That more parts follow is not passed on, so that gradients are exchanged in every part: the result is "
        "right, and the traffic is that of so many steps.",
        properties=properties("traffic"),
        stages=stages("collect"),
        known=known(2, [1], bucket=2, operations=_SPILLED),
        own=True,
    ),
    Plant(
        name="BroadcastsInEveryPart",
        module="accumulation",
        bugs=("facebookresearch/fairscale#1049",),
        kind=Kind.RESOURCES,
        why="What is equal on all ranks already is broadcast in every part (here the weights, in the place of a "
        "module's buffers): all values are right, and collect communicates.",
        properties=properties("traffic"),
        stages=stages("collect"),
        known=known(2, [1], bucket=2),
        own=True,
    ),
    Plant(
        name="ReducesTheRunningSum",
        module="accumulation",
        bugs=("PaddlePaddle/Paddle#72902",),
        kind=Kind.ACCUMULATION,
        why="The reduction is started in every part over the sum so far, and the results add up: the first of two "
        "parts is counted twice, of three the first three times.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_TWICE}),
        known=known(1, [1], bucket=1, operations=_SPILLED),
    ),
    Plant(
        name="ReducesTheSumInPlace",
        module="accumulation",
        bugs=("hpcaitech/ColossalAI#247",),
        kind=Kind.ACCUMULATION,
        why="What was summed over ranks after one part is summed over them again after the next: W times the first of "
        "two parts, which at two ranks is that part twice.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_TWICE, Symptom.FACTOR_WORLD}),
        known=known(2, [1], bucket=2, operations=_SPILLED),
    ),
    Plant(
        name="ReadsTheFlagTooEarly",
        module="accumulation",
        bugs=("karpathy/build-nanogpt#30",),
        kind=Kind.ACCUMULATION,
        why="The flag that a part is the last is set when the decision to reduce has been made, so that after several "
        "parts each rank steps with its own gradients: values lack the other ranks, and reductions are not called.",
        properties=properties("gradient spill traffic"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.RANK_MISSING, Symptom.LOCAL}),
        known=known(2, [1], bucket=2, operations=TWO),
        own=True,
    ),
    # Scales.
    Plant(
        name="MeanOverParts",
        module="accumulation",
        bugs=("huggingface/transformers#35207",),
        kind=Kind.ACCUMULATION,
        why="The caller has scaled the loss for the number of parts, and so does this: the sum of several parts "
        "comes out divided by their number.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.FACTOR_ONE_OVER_PARTS}),
        known=known(1, [1], bucket=1, operations=TWO),
    ),
    Plant(
        name="UndoesAScaleThatWasNone",
        module="accumulation",
        bugs=("deepspeedai/DeepSpeed#7839",),
        kind=Kind.REDUCTION,
        why="The gradient is divided by a loss scale of 65,536 that never multiplied a loss: Adam hardly notices, the "
        "gradient itself is wrong in every step.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        known=known(1, [1], bucket=1),
        own=True,
    ),
    Plant(
        name="WeighsByLocalCounts",
        module="accumulation",
        bugs=("huggingface/transformers#34242",),
        kind=Kind.REDUCTION,
        why="The number that the sum is normalised by was summed over parts but not over ranks: right while all ranks "
        "have gradients in as many parts, and each one's weight is wrong when they do not.",
        properties=properties("spill"),
        stages=stages("reduce"),
        known=known(2, [1], bucket=2, operations=(part(more=True, none={1: [0]}), part(), Step())),
    ),
    # What outlives its step.
    Plant(
        name="HostNotZeroed",
        module="accumulation",
        bugs=("deepspeedai/DeepSpeed#7839",),
        kind=Kind.SPILL,
        why="The sum is not cleared when it was consumed, as that was tied to another setting: the next step that "
        "sums adds to the old one.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.EARLIER_ADDED}),
        known=known(1, [1], bucket=1, operations=(part(more=True), Discard(), *_SPILLED)),
    ),
    Plant(
        name="KeepsSkippedGradient",
        module="accumulation",
        bugs=("deepspeedai/DeepSpeed#8432",),
        kind=Kind.RACE,
        why="State takes in a gradient before it is known that the step will be skipped (there Muon's momentum, here "
        "the reduced gradient itself): the next step has it in it.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.EARLIER_ADDED}),
        known=known(1, [1], bucket=1, operations=(part(), Skip(), *ONE)),
    ),
    Plant(
        name="KeepsTheViewOfOldBuckets",
        module="accumulation",
        bugs=("pytorch/pytorch#43307",),
        kind=Kind.STALE,
        why="Buckets are created anew after the second reduction while the gradient that is used stays a view of the "
        "old ones: from the third step on it repeats the second.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.EARLIER}),
        known=known(1, [1], bucket=1, operations=(*ONE, *ONE, *ONE)),
    ),
    # How the sum is kept.
    Plant(
        name="HostSumsInBf16",
        module="accumulation",
        bugs=("pytorch/pytorch#194628",),
        kind=Kind.ROUNDING,
        why="What lives from part to part has the narrow dtype of what travels, so that each part is rounded: it shows "
        "when a rank's own sum needs more than 8 bits.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.BF16_BEFORE, Symptom.BF16_AFTER}),
        known=known(1, [1], bucket=1, operations=TWO, seed=6),
    ),
    Plant(
        name="SeeksHeldFloatsInTheSum",
        module="accumulation",
        bugs=("PaddlePaddle/Paddle#68911",),
        kind=Kind.ROUNDING,
        why="Only the path with an fp32 accumulator is right: fp32 gradients are looked for in it also in a step that "
        "holds them as they came, and count as zero there.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.ZERO, Symptom.RANK_MISSING, Symptom.PART_MISSING}),
        known=known(1, [1], bucket=1, parameters={0: {"dtype": "fp32"}}),
        place=places.of_dtype("fp32"),
        own=True,
    ),
    # Gradients that are missing.
    Plant(
        name="CountsSeenGradients",
        module="accumulation",
        bugs=("deepspeedai/DeepSpeed#545",),
        kind=Kind.MISSING,
        why="Gradients of a part are numbered as they are seen, so that what comes behind one that is None is added to "
        "the wrong place.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.SHIFTED}),
        known=known(1, [1, 1], bucket=2, operations=(part(more=True, none={0: [0]}), Step())),
    ),
    Plant(
        name="OnlyLastPartsParameters",
        module="accumulation",
        bugs=("pytorch/pytorch#69031",),
        kind=Kind.MISSING,
        why="Which parameters were used is noted in the last part only: what a rank had for the others in earlier "
        "parts is not reduced.",
        properties=properties("spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.PART_MISSING, Symptom.RANK_MISSING, Symptom.ZERO}),
        known=known(1, [1, 1], bucket=2, operations=(part(more=True), part(none={0: [0]}), Step())),
        place=places.without_gradient,
    ),
    Plant(
        name="ExposesZeros",
        module="accumulation",
        bugs=("pytorch/pytorch#87308",),
        kind=Kind.MISSING,
        why="A flat gradient exists as soon as one parameter has one, and the others see zeros of it as their own: "
        "theirs is not None after collect, and the next part would add it.",
        properties=properties("intake"),
        stages=stages("collect"),
        known=known(1, [1, 1], bucket=2, operations=(part(none={0: [0]}), Step())),
        place=places.without_gradient,
        own=True,
    ),
    Plant(
        name="NoStepWithoutGradients",
        module="accumulation",
        bugs=("KellerJordan/Muon#54",),
        kind=Kind.DECAY,
        why="Whether parameters without a gradient decay was not the same on all paths. (There one decayed that should "
        "not; here the reverse: without any gradient there is no step, where the rule is one of zeros.)",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        known=known(1, [1], bucket=1, operations=(part(none={0: [0]}), Step())),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
