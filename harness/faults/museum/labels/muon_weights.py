"""Labels of the plants in ``plants/muon_weights.py``."""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import ONE, Kind, Plant, part, properties, stages
from harness.faults.museum.muon import known_muon
from harness.scenario.model import Reload, Step
from harness.scenario.muon import AdaptiveClip, Color, Mark, Sharding

_RELOADED: Final = (*ONE, Reload(), *ONE)

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="NobodyOwnsTheRest",
        module="muon_weights",
        bugs=(),
        kind=Kind.PADDING,
        why=(
            "A buffer is padded so that pieces are long enough, and their length is rounded down: elements at the "
            "end of each are nobody's."
        ),
        properties=properties("ownership"),
        stages=stages("build"),
        own=True,
        known=known_muon(2, [3]),
    ),
    Plant(
        name="BroadcastsFromNextRank",
        module="muon_weights",
        bugs=(),
        kind=Kind.STALE,
        why="A matrix is sent by another rank than its owner, which has it as it was before the step.",
        properties=properties("weights"),
        stages=stages("gather"),
        own=True,
        known=known_muon(2, [(1, 1)]),
    ),
    Plant(
        name="CountsOwnersInTheWorld",
        module="muon_weights",
        bugs=(),
        kind=Kind.OWNERS,
        why=(
            "A rank is counted in the world on one side and in its group on the other: in a group that does not "
            "begin with rank 0 somebody else sends."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        own=True,
        known=known_muon(3, [(1, 1)], marks={0: Mark(muon=True, color=0)}, colors=[Color(groups=((1, 2),))]),
    ),
    Plant(
        name="SendsInsideOwnersNode",
        module="muon_weights",
        bugs=(),
        kind=Kind.STALE,
        why="The first of two hops, across the nodes, is left out: other nodes keep the weights of the step before.",
        properties=properties("weights"),
        stages=stages("gather"),
        own=True,
        known=known_muon(4, [(1, 1)]),
    ),
    Plant(
        name="LastBufferLags",
        module="muon_weights",
        bugs=("pytorch/torchtitan#930",),
        kind=Kind.RACE,
        why="A step returns with its last buffer under way, and the next forward reads old weights.",
        properties=properties("weights"),
        stages=stages("gather"),
        own=True,
        known=known_muon(1, [(1, 1)]),
    ),
    Plant(
        name="ReadsFromBufferStart",
        module="muon_weights",
        bugs=("pytorch/pytorch#20421",),
        kind=Kind.STALE,
        why="A tensor of a fused buffer is read from where the buffer begins, and not from its own place in it.",
        properties=properties("weights master"),  # of fp32, which is its own master
        stages=stages("update gather"),
        own=True,
        known=known_muon(1, [(1, 1), (1, 1)]),
    ),
    Plant(
        name="NewStorageEveryStep",
        module="muon_weights",
        bugs=("pytorch/pytorch#149205",),
        kind=Kind.STALE,
        why="Parameters are pointed at other tensors after each step, which breaks aliases and captured graphs.",
        properties=properties("storage"),
        stages=stages("gather"),
        own=True,
        known=known_muon(1, [(1, 1)]),
    ),
    Plant(
        name="MissingStaysReleased",
        module="muon_weights",
        bugs=(),
        kind=Kind.STALE,
        why=(
            "Only what had a gradient is sent. Without one a parameter decays too, and where its storage was given up "
            "it comes back as zeros that nobody fills."
        ),
        properties=properties("weights"),
        stages=stages("gather"),
        own=True,
        known=known_muon(
            1, [(1, 1)], (part(none={0: [0]}), Step()), sharding=Sharding(skip_missing=True), release_color=-1
        ),
    ),
    Plant(
        name="GivesBackOldWeights",
        module="muon_weights",
        bugs=(),
        kind=Kind.STALE,
        why="Weights whose storage was given up come back as they were, and not from the masters.",
        properties=properties("weights"),
        stages=stages("gather"),
        own=True,
        known=known_muon(1, [(1, 1)], release_color=-1),
    ),
    Plant(
        name="CounterWaitsForOwnGradient",
        module="muon_weights",
        bugs=("facebookresearch/optimizers#149",),
        kind=Kind.MISSING,
        why=(
            "A rank without a gradient of its own does not count the step, though it updates its slice from what the "
            "others sent: from then on ranks correct the bias of moments differently."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(2, [1], (part(none={0: [0]}), Step(), *ONE)),
    ),
    Plant(
        name="SavesMomentumOfRankZero",
        module="muon_weights",
        bugs=(),
        kind=Kind.CHECKPOINT,
        why="Only the owner of a matrix has its momentum, and only that of rank 0 gets into what is saved.",
        properties=properties("moments"),
        stages=stages("build"),
        own=True,
        known=known_muon(2, [(1, 1), (1, 1)], _RELOADED),
    ),
    Plant(
        name="ResumesFromRoundedMaster",
        module="muon_weights",
        bugs=("NVIDIA/Model-Optimizer#2322",),
        kind=Kind.CHECKPOINT,
        why="Masters are made from the weights where a run goes on, and lose the bits that they were kept for.",
        properties=properties("master"),
        stages=stages("build"),
        own=True,
        known=known_muon(1, [(1, 1)], _RELOADED),
    ),
    Plant(
        name="LosesClipState",
        module="muon_weights",
        bugs=(),
        kind=Kind.CHECKPOINT,
        why="The norms that the adaptive clip has tracked are not saved: it warms up once more.",
        properties=properties("clip moments"),  # where clipped gradients are released, moments show it
        stages=stages("norm update"),
        own=True,
        known=known_muon(1, [1], _RELOADED, clip=AdaptiveClip(warmup_steps=0, ratio=0.5)),
    ),
    Plant(
        name="RestartsCounter",
        module="muon_weights",
        bugs=(),
        kind=Kind.CHECKPOINT,
        why="The number of steps is no tensor, and is not loaded with those: moments are corrected as in a first step.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [1], _RELOADED),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
