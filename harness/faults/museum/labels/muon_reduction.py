"""Labels of the plants in ``plants/muon_reduction.py``."""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import INTEGERS, ONE, TWO, Kind, Plant, part, properties, stages
from harness.faults.museum.muon import known_muon
from harness.scenario.model import Discard, Skip, Step
from harness.scenario.muon import AdaptiveClip, Color, GlobalClip, Mark, Sharding

_EACH_ALONE: Final = Color(groups=((0,), (1,)))
"""Each of two ranks is a group of its own."""

_ON_FIRE: Final = Sharding(comm_overlap=True)

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="RestOfMatrixStaysLocal",
        module="muon_reduction",
        bugs=("deepspeedai/DeepSpeed#7807",),
        kind=Kind.REDUCTION,
        why=(
            "The owner of a matrix has the sum over ranks in its own piece of it alone, and what it has itself in the "
            "rest: Newton-Schulz gets a matrix that is partly reduced."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(2, [(1, 2)]),
    ),
    Plant(
        name="OrthogonalisesEachPart",
        module="muon_reduction",
        bugs=("deepspeedai/DeepSpeed#8600",),
        kind=Kind.ACCUMULATION,
        why=(
            "Newton-Schulz runs where gradients come in, part by part, and not on their sum: it is not linear, so "
            "that a step of four parts is another one than a step of one."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [(1, 2)], TWO),
    ),
    Plant(
        name="DividesTwice",
        module="muon_reduction",
        bugs=(),
        kind=Kind.REDUCTION,
        why="The collective gives a mean, and it is divided by the number of ranks once more.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(2, [(1, 1)]),
    ),
    Plant(
        name="SlicesAreNotAveraged",
        module="muon_reduction",
        bugs=(),
        kind=Kind.REDUCTION,
        why="Whole matrices are averaged, and of slices the sum is taken: the flag is read in one of two paths.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(2, [1]),
    ),
    Plant(
        name="AveragesOverTheWorld",
        module="muon_reduction",
        bugs=("pytorch/torchtitan#1551",),
        kind=Kind.OWNERS,
        why=(
            "Gradients of a parameter that has a group of its own are divided by the number of all ranks, of which "
            "only that group's have added anything."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(2, [(1, 1)], marks={0: Mark(muon=True, color=0)}, colors=[_EACH_ALONE]),
    ),
    Plant(
        name="IgnoresDivisor",
        module="muon_reduction",
        bugs=("pytorch/torchtitan#1551",),
        kind=Kind.OWNERS,
        why="Experts are averaged over the ranks of their group, where a divisor was given: as many as sent tokens.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(
            2, [(1, 1)], marks={0: Mark(muon=True, color=0)}, colors=[Color(groups=((0,), (1,)), divisor=2.0)]
        ),
    ),
    Plant(
        name="AddsToLastStepsGradient",
        module="muon_reduction",
        bugs=("NVIDIA/Megatron-LM#4609",),
        kind=Kind.STALE,
        why="The fused buffer is not cleared: a step's gradients are added to those of the step before.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [(1, 1)], ONE * 2),
    ),
    Plant(
        name="MissingKeepsLastGradient",
        module="muon_reduction",
        bugs=(),
        kind=Kind.MISSING,
        why="What nothing was added to in a step is not zeroed: the gradient of the step before is reduced again.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [(1, 1)], (*ONE, part(none={0: [0]}), Step())),
    ),
    Plant(
        name="KeepsClearedGradients",
        module="muon_reduction",
        bugs=(),
        kind=Kind.ACCUMULATION,
        why="What was gathered is forgotten in ``.grad``, and stays in the fp32 buffer that it was added to.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [(1, 1)], (part(), Discard(), *ONE), backward=True),
    ),
    Plant(
        name="ReplacesWhatFiredBefore",
        module="muon_reduction",
        bugs=(),
        kind=Kind.ACCUMULATION,
        why=(
            "A weight in two re-entrant checkpoints has its hook fire twice in a backward, with a part of the "
            "gradient each time, and the second one takes the place of the first."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [(1, 1)], marks={0: Mark(muon=True, use="reentrant")}, backward=True),
    ),
    Plant(
        name="LaunchesTwice",
        module="muon_reduction",
        bugs=(),
        kind=Kind.REDUCTION,
        why="A hook that fires again launches its buffer again, and what was summed over ranks is summed once more.",
        properties=properties("gradient spill traffic progress"),
        stages=stages("collect reduce"),
        own=True,
        known=known_muon(2, [(1, 1)], marks={0: Mark(muon=True, use="reentrant")}, sharding=_ON_FIRE, backward=True),
    ),
    Plant(
        name="LosesLateGradient",
        module="muon_reduction",
        bugs=(),
        kind=Kind.ACCUMULATION,
        why="What arrives when the collective of its buffer is under way is dropped.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [(1, 1)], marks={0: Mark(muon=True, use="reentrant")}, sharding=_ON_FIRE, backward=True),
    ),
    Plant(
        name="ShortWindowStaysLocal",
        module="muon_reduction",
        bugs=(),
        kind=Kind.REDUCTION,
        why=(
            "A collective starts after as many backward passes as a step has, and the last step of an epoch has "
            "fewer: its gradients are used as they are on each rank."
        ),
        properties=properties("gradient spill traffic progress"),
        stages=stages("collect reduce"),
        own=True,
        known=known_muon(2, [(1, 1)], sharding=Sharding(comm_overlap=True, accumulate_steps=2), backward=True),
    ),
    Plant(
        name="MeanOfMeans",
        module="muon_reduction",
        bugs=(),
        kind=Kind.REDUCTION,
        why=(
            "The mean over ranks is made of the means of nodes, which is it only where all nodes have as many of the "
            "group's ranks."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(3, [(1, 1)]),
    ),
    Plant(
        name="ReducesInsideNodesOnly",
        module="muon_reduction",
        bugs=(),
        kind=Kind.REDUCTION,
        why="The second of two hops, across the nodes, is left out.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(4, [(1, 1)]),
    ),
    Plant(
        name="RoundsBetweenHops",
        module="muon_reduction",
        bugs=(),
        kind=Kind.ROUNDING,
        why=(
            "What goes across nodes is rounded to bf16, to halve the slow traffic: the sum of a node's ranks needs "
            "more digits than what each of them has."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(
            4,
            [(2, 4)],
            sharding=Sharding(two_hop=True, local_world_size=2),
            values=INTEGERS,
            multiple=1,
        ),
    ),
    Plant(
        name="PiecesInOrderOfRanks",
        module="muon_reduction",
        bugs=(),
        kind=Kind.LAYOUT,
        why=(
            "A buffer that goes in two hops is dealt out in blocks, so that the piece a rank ends up with has not its "
            "own number; it is taken for that one."
        ),
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(4, [4]),
    ),
    Plant(
        name="MainGradStays",
        module="muon_reduction",
        bugs=(),
        kind=Kind.ACCUMULATION,
        why="Gradients that are added up elsewhere stay there after they were taken, and count in the next step too.",
        properties=properties("gradient spill intake"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(1, [1], ONE * 2, marks={0: Mark(main_grad=True)}),
    ),
    Plant(
        name="SkipsBufferWithoutGradient",
        module="muon_reduction",
        bugs=("KellerJordan/Muon#37",),
        kind=Kind.DIVERGENCE,
        why="A rank without gradient for any parameter of a buffer goes on to the next one; the others wait for it.",
        properties=properties("traffic progress"),
        stages=stages("reduce norm update gather"),
        own=True,
        processes=True,
        known=known_muon(2, [(1, 1)], (part(none={1: [0]}), Step())),
    ),
    Plant(
        name="WalksBackwardOnOneRank",
        module="muon_reduction",
        bugs=(),
        kind=Kind.DIVERGENCE,
        why="One rank communicates its buffers in another order, and each meets a buffer that is not its own.",
        properties=properties("traffic progress gradient spill"),
        stages=stages("reduce"),
        own=True,
        processes=True,
        known=known_muon(2, [(1, 1), (1, 1)], bucket=1),
    ),
    Plant(
        name="DropsWhatIsNotClipped",
        module="muon_reduction",
        bugs=(),
        kind=Kind.NORM,
        why="A parameter that is excluded from clipping is left out of what the clip gives back: nobody updates it.",
        properties=properties("clip moments"),  # where clipped gradients are released, moments show it
        stages=stages("norm update"),
        own=True,
        known=known_muon(1, [1], marks={0: Mark(need_clip=False)}, clip=GlobalClip(1.0)),
    ),
    Plant(
        name="ClipsWhatIsExcluded",
        module="muon_reduction",
        bugs=(),
        kind=Kind.NORM,
        why="The mark that excludes a parameter from clipping is not read: it counts in the norm and is scaled.",
        properties=properties("norm clip"),
        stages=stages("norm"),
        own=True,
        known=known_muon(1, [1], marks={0: Mark(need_clip=False)}, clip=GlobalClip(1.0)),
    ),
    Plant(
        name="CountsGarbageInNorm",
        module="muon_reduction",
        bugs=("pytorch/pytorch#21480",),
        kind=Kind.NORM,
        why="After a reduce to the owner the others' buffers hold garbage, and they count it.",
        properties=properties("norm"),
        stages=stages("norm"),
        own=True,
        known=known_muon(2, [(1, 1)], clip=GlobalClip(1.0)),
    ),
    Plant(
        name="CountsPaddingInNorm",
        module="muon_reduction",
        bugs=(),
        kind=Kind.PADDING,
        why="Padding of a fused buffer is not zero (it was never written), and is summed with the rest of it.",
        properties=properties("norm"),
        stages=stages("norm"),
        own=True,
        known=known_muon(2, [3], clip=GlobalClip(1.0)),
    ),
    Plant(
        name="NormOfOneSet",
        module="muon_reduction",
        bugs=(),
        kind=Kind.NORM,
        why="The norm that all is clipped by is that of the whole matrices: slices are not in it.",
        properties=properties("norm"),
        stages=stages("norm"),
        own=True,
        known=known_muon(1, [1], clip=GlobalClip(1.0)),
    ),
    Plant(
        name="NormOverOneColour",
        module="muon_reduction",
        bugs=("NVIDIA/Megatron-LM#6470",),
        kind=Kind.NORM,
        why=(
            "The norms of all parameters are summed over the group of one colour, and those of another one's group "
            "are missing, or counted as often as there are ranks."
        ),
        properties=properties("norm traffic progress"),
        stages=stages("norm"),
        own=True,
        known=known_muon(2, [(1, 1)], marks={0: Mark(muon=True, color=0)}, colors=[_EACH_ALONE], clip=GlobalClip(1.0)),
    ),
    Plant(
        name="AdaptsToNormsOfSlices",
        module="muon_reduction",
        bugs=(),
        kind=Kind.NORM,
        why="Each rank tracks the norm of its own slice, and scales it by that, not by the norm of the parameter.",
        properties=properties("clip moments"),  # where clipped gradients are released, moments show it
        stages=stages("norm update"),
        own=True,
        known=known_muon(2, [4], ONE * 2, clip=AdaptiveClip(warmup_steps=0, ratio=0.5)),
    ),
    Plant(
        name="MomentumMovesBeforeStep",
        module="muon_reduction",
        bugs=("deepspeedai/DeepSpeed#8432",),
        kind=Kind.MISSING,
        why=(
            "Momentum takes in a gradient where it is reduced, before anybody knows whether the step will be skipped: "
            "one that is not finite stays in it for ever."
        ),
        properties=properties("moments"),
        stages=stages("reduce update"),
        own=True,
        known=known_muon(1, [(1, 1)], (part(), Skip(), *ONE)),
    ),
    Plant(
        name="DecaysMissingMatrices",
        module="muon_reduction",
        bugs=("KellerJordan/Muon#54",),
        kind=Kind.DECAY,
        why="Parameters without a gradient are to be skipped: slices are, and matrices decay.",
        properties=properties("moments master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)], (part(none={0: [0]}), Step()), sharding=Sharding(skip_missing=True)),
    ),
    Plant(
        name="DecidesMissingByItself",
        module="muon_reduction",
        bugs=(),
        kind=Kind.MISSING,
        why="A rank skips what it has no gradient for itself, though others have one.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        own=True,
        known=known_muon(2, [(1, 1)], (part(none={0: [0]}), Step()), sharding=Sharding(skip_missing=True)),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
