"""Labels of the plants in ``plants/gather.py``."""

from __future__ import annotations

from typing import Final

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum.exhibit import ONE, Kind, Plant, known, part, properties, stages
from harness.faults.museum.places import (
    every,
    last_bucket,
    not_first_bucket,
    not_the_owner,
    parameter_beyond_bf16,
    vector_parameter,
)
from harness.scenario.model import Build, Discard, Load

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="SynchronousGatherNotWritten",
        module="gather",
        bugs=("NVIDIA/Megatron-LM#4563",),
        kind=Kind.STALE,
        why=(
            "What is to be done with a gathered bucket hangs on its handle, and a gather that is not asynchronous "
            "has none: weights stay those of the step before. There a second copy of them did, which only some "
            "steps read."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),
        own=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="SkipsMissingHandles",
        module="gather",
        bugs=("NVIDIA/Megatron-LM#950",),
        kind=Kind.STALE,
        why=(
            "Buckets are used in another order than they are gathered in, and one whose gather was not launched "
            "yet has no handle to wait for: it is read as it was before the step."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),
        place=not_first_bucket,
        own=True,
        known=known(2, [5], bucket=2),
    ),
    Plant(
        name="ReturnsBeforeLastBucket",
        module="gather",
        bugs=("pytorch/torchtitan#930", "Lightning-AI/pytorch-lightning#21079"),
        kind=Kind.RACE,
        why=(
            "The call returns before what it was asked for is done. There a save goes on reading while the next "
            "step changes what is saved; here the last bucket arrives when the weights were used already."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),
        place=last_bucket,
        own=True,
        known=known(1, [2], bucket=1),
    ),
    Plant(
        name="SendsFromStorageStart",
        module="gather",
        bugs=("pytorch/pytorch#20421",),
        kind=Kind.STALE,
        why=(
            "A slice is sent from the start of its storage instead of its own: each bucket gets what the first one "
            "has. There it was the backend's reading of a chunk."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.OTHER_BUCKET}),
        place=not_first_bucket,
        own=True,
        known=known(2, [3], bucket=2),
    ),
    Plant(
        name="VectorsNotGathered",
        module="gather",
        bugs=("NVIDIA/TransformerEngine#441",),
        kind=Kind.DIVERGENCE,
        why=(
            "Weights of norms and biases drift apart: what is split between ranks is taken for replicated, so that "
            "a rank has its own part up to date and the rest as it was. (There the reverse: what is replicated was "
            "reduced as if it were split.)"
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        symptoms=frozenset({Symptom.EARLIER}),
        place=every(vector_parameter, not_the_owner),
        own=True,
        known=known(2, [1], bucket=2),
    ),
    Plant(
        name="GatherBufferIsGradBuffer",
        module="gather",
        bugs=("NVIDIA/Megatron-LM#4609",),
        kind=Kind.STALE,
        why="Weights are gathered into the buffer that the next step's gradients are added to, and it is not zeroed.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        known=known(1, [1], 1, ONE * 2),
    ),
    Plant(
        name="ZeroFromStepTwo",
        module="gather",
        bugs=("PaddlePaddle/Paddle#66472",),
        kind=Kind.STALE,
        why=(
            "Clearing gradients cuts the link between them and the buffer that is reduced: from the second step on "
            "it holds zeros."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        symptoms=frozenset({Symptom.ZERO}),
        known=known(1, [1], 1, ONE * 2),
    ),
    Plant(
        name="NewStorage",
        module="gather",
        bugs=("pytorch/pytorch#149205",),
        kind=Kind.STALE,
        why=(
            "Parameters are swapped for others, and who holds the old ones (there an optimizer that was built after "
            "a first forward) is left with what nobody uses."
        ),
        properties=properties("storage"),
        stages=stages("gather"),
        known=known(1, [1], bucket=1),
    ),
    Plant(
        name="KeepsMasterOnLoad",
        module="gather",
        bugs=("NovaSky-AI/SkyRL#2149", "deepspeedai/DeepSpeed#762"),
        kind=Kind.LOADING,
        why=(
            "Weights are loaded without the state of the optimizer, and masters stay what they were made from "
            "before: the next gather undoes the load."
        ),
        properties=properties("master"),
        stages=stages("build"),
        symptoms=frozenset({Symptom.EARLIER}),
        own=True,
        known=known(1, [1], 1, (Load(1), *ONE)),
    ),
    Plant(
        name="StepsFromHiddenCopy",
        module="gather",
        bugs=("NVIDIA/Megatron-LM#5071",),
        kind=Kind.LOADING,
        why=(
            "A load refreshes one of several copies of the master. The next update starts from another: what it "
            "should be plus or minus the difference; where the rate is 0, what was there before the load."
        ),
        properties=properties("master"),
        stages=stages("update"),
        symptoms=frozenset({Symptom.EARLIER}),
        own=True,
        known=known(1, [1], 1, (Load(1), *ONE)),
    ),
    Plant(
        name="LoadsThroughBf16",
        module="gather",
        bugs=("NVIDIA/Megatron-LM#1359",),
        kind=Kind.CHECKPOINT,
        why=(
            "What is loaded passes through a buffer whose dtype is bf16, whatever it was saved as, and the copy "
            "says nothing of the bits it loses. Weights of fp16 and fp32 have such bits."
        ),
        properties=properties("master"),
        stages=stages("build"),
        symptoms=frozenset({Symptom.BF16_AFTER}),
        place=parameter_beyond_bf16,
        own=True,
        known=known(1, [1], 1, (Load(1), *ONE), parameters={0: {"dtype": "fp32"}}),
    ),
    Plant(
        name="RollsBackToWeights",
        module="gather",
        bugs=("TensorAuto/OpenTau#185",),
        kind=Kind.CHECKPOINT,
        why=(
            "Masters are made from the weights where they should be those that were kept, and lose what the weights "
            "do not have. There at each resume, here when a step is given up, after which nothing may have moved."
        ),
        properties=properties("intake"),
        stages=stages("update"),
        symptoms=frozenset({Symptom.BF16_AFTER}),
        own=True,
        known=known(1, [1], 1, (*ONE, part(), Discard())),
    ),
    Plant(
        name="MasterRounded",
        module="gather",
        bugs=("NVIDIA/apex#1728",),
        kind=Kind.ROUNDING,
        why=(
            "There is no master beside the weights, so that the next update starts from a rounded one (it is seen "
            "there, or when the whole master is exported), and small updates are lost."
        ),
        properties=properties("master intake"),
        stages=stages("update gather"),
        symptoms=frozenset({Symptom.BF16_AFTER}),
        known=known(1, [1], 1, ONE * 2),
    ),
    Plant(
        name="ResumesWithoutMaster",
        module="gather",
        bugs=("NVIDIA/Model-Optimizer#2322",),
        kind=Kind.CHECKPOINT,
        why=(
            "Masters are made in a branch that a run which goes on does not take: from a rebuild on, each update is "
            "rounded to bf16."
        ),
        properties=properties("master"),
        stages=stages("update"),
        symptoms=frozenset({Symptom.BF16_AFTER}),
        own=True,
        known=known(1, [1], 1, (*ONE, Build(1), *ONE)),
    ),
    Plant(
        name="DecaysTwice",
        module="gather",
        bugs=("dylanyunlon/Neuron_SP#13",),
        kind=Kind.DECAY,
        why="Weights decay by the class and by its optimizer, so that the factor is squared.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known(1, [1], bucket=1),
    ),
    Plant(
        name="DecayOfFirstParameter",
        module="gather",
        bugs=("verl-project/verl#5070",),
        kind=Kind.DECAY,
        why=(
            "In a flat vector the kinds of parameters cannot be told apart any more, so that all have one weight "
            "decay: there biases decay that should not, here (where all should) matrices behind a bias do not."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known(1, [1], bucket=1),
    ),
    Plant(
        name="ClassifiesAfterFlattening",
        module="gather",
        bugs=(
            "deepspeedai/DeepSpeed#8438",
            "deepspeedai/DeepSpeed#8442",
            "yandex-research/tabular-dl-tabr#19",
        ),
        kind=Kind.DECAY,
        why=(
            "A rule that goes by the number of dimensions is asked of something flat, and all parameters land in "
            "one list. There it chose what Muon is for (and once a slip of the pen did the same), here what decays."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known(1, [(1, 1)], bucket=1),
    ),
    Plant(
        name="KeepsExtraLargeGradient",
        module="gather",
        bugs=("deepspeedai/DeepSpeed#3306",),
        kind=Kind.RESOURCES,
        why=(
            "A parameter larger than a bucket is remembered in an attribute on a path that does not clear it: its "
            "gradient stays in memory when it was reduced."
        ),
        properties=properties("memory"),
        stages=stages("reduce"),
        own=True,
        known=known(1, [2], bucket=1),
    ),
    Plant(
        name="KeepsLargestParameter",
        module="gather",
        bugs=("deepspeedai/DeepSpeed#3306",),
        kind=Kind.RESOURCES,
        why=(
            "A reference to what was only needed for a moment stays in an attribute, for as long as the run takes: "
            "more is alive in the end than the formula allows."
        ),
        properties=properties("memory"),
        stages=stages("update gather"),
        own=True,
        known=known(1, [520], bucket=1),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
