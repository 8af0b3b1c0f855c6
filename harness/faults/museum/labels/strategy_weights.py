"""Labels of the plants in ``plants/strategy_weights.py``."""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import ONE, VISIBLE, Kind, Plant, part, properties, stages
from harness.faults.museum.places import not_first_rank
from harness.faults.museum.strategies import PLAIN, known_strategy
from harness.scenario.model import Rate, Step
from harness.scenario.strategy import Place

_TIED: Final = {0: Place(tied=True)}
_FROZEN: Final = {1: Place(frozen=True)}
_AT_START: Final = properties("master weights agreement")
_STEPPED: Final = properties("master weights")
"""What a rank holds is a master and, where nothing is cast, what a forward computes with as well."""

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="StartsAsEachRankIs",
        module="strategy_weights",
        bugs=(),
        kind=Kind.LOADING,
        why="Pieces of one parameter come from models that started apart: the whole was nobody's.",
        properties=_AT_START,
        stages=stages("build"),
        known=known_strategy(2, [2], unequal_start=True),
    ),
    Plant(
        name="SendsInsideNodes",
        module="strategy_weights",
        bugs=(),
        kind=Kind.LOADING,
        why="Each node has weights of its own: the broadcast began at its first rank, and ended with it.",
        properties=_AT_START,
        stages=stages("build"),
        place=not_first_rank,
        known=known_strategy(3, [1], unequal_start=True),
    ),
    Plant(
        name="SendsInsideReplicas",
        module="strategy_weights",
        bugs=(),
        kind=Kind.LOADING,
        why="Weights are made equal over the axis that shards, and replicas start apart.",
        properties=_AT_START,
        stages=stages("build"),
        place=not_first_rank,
        known=known_strategy(2, [2], unequal_start=True),
    ),
    Plant(
        name="SendsTrainableOnly",
        module="strategy_weights",
        bugs=(),
        kind=Kind.LOADING,
        why="What takes no gradient is not sent, and every rank keeps frozen weights of its own.",
        properties=properties("master weights agreement storage"),
        stages=stages("build"),
        place=not_first_rank,
        known=known_strategy(2, [1, 1], places=_FROZEN, unequal_start=True),
    ),
    Plant(
        name="SendsShards",
        module="strategy_weights",
        bugs=(),
        kind=Kind.LOADING,
        why="Weights are sent when they are pieces already: each rank overwrites its own with that of rank 0.",
        properties=_AT_START,
        stages=stages("build"),
        known=known_strategy(2, [2]),
    ),
    Plant(
        name="MakesMastersBf16",
        module="strategy_weights",
        bugs=("NVIDIA/apex#1728",),
        kind=Kind.ROUNDING,
        why="The parameters that the optimizer steps are bf16 themselves: small updates are lost for ever.",
        properties=properties("master weights storage"),
        stages=stages("build"),
        known=known_strategy(1, [2]),
    ),
    Plant(
        name="RoundsWeightsToBf16",
        module="strategy_weights",
        bugs=(),
        kind=Kind.ROUNDING,
        why="Masters are fp32, and hold what is left of the weights after a cast to bf16 on the way.",
        properties=_AT_START,
        stages=stages("build"),
        known=known_strategy(1, [2]),
    ),
    Plant(
        name="UntiesWeights",
        module="strategy_weights",
        bugs=(),
        kind=Kind.WRAP,
        why="What was one parameter under two names is two, each with a part of the gradient.",
        properties=properties("gradient spill storage ownership weights"),
        stages=stages("build reduce"),
        known=known_strategy(1, [1], places=_TIED),
    ),
    Plant(
        name="ThawsFrozen",
        module="strategy_weights",
        bugs=(),
        kind=Kind.WRAP,
        why="Wrapping lets frozen parameters take gradients, and the optimizer is made of whatever takes one.",
        properties=properties("storage gradient master weights"),
        stages=stages("build collect reduce update gather"),
        known=known_strategy(1, [1, 1], places=_FROZEN),
    ),
    Plant(
        name="NeverReshards",
        module="strategy_weights",
        bugs=(),
        kind=Kind.STALE,
        why=(
            "Gathered weights are kept over the step, which changes the pieces: gradients are not to be found on what "
            "the module shows, and the next forward computes with old weights."
        ),
        properties=properties("gradient spill norm weights"),
        stages=stages("collect reduce norm gather"),
        known=known_strategy(2, [2], ONE * 2),
    ),
    Plant(
        name="EvaluatesOldWeights",
        module="strategy_weights",
        bugs=(),
        kind=Kind.STALE,
        why="A forward without grad computes with a copy from before the step.",
        properties=properties("weights"),
        stages=stages("gather"),
        known=known_strategy(1, [1]),
    ),
    Plant(
        name="StepsOldParameters",
        module="strategy_weights",
        bugs=("pytorch/pytorch#149205",),
        kind=Kind.STALE,
        why="The optimizer has the parameters from before the wrap; those that train are never stepped, nor cleared.",
        properties=properties("master weights moments intake"),
        stages=stages("update gather"),
        known=known_strategy(2, [2]),
    ),
    Plant(
        name="LeavesPlainUnstepped",
        module="strategy_weights",
        bugs=(),
        kind=Kind.WRAP,
        why="The optimizer is made of DTensors; what FSDP2 was told to ignore stays at its first values.",
        properties=properties("master weights moments"),
        stages=stages("update gather"),
        known=known_strategy(1, [1, 1], places={1: PLAIN}),
    ),
    Plant(
        name="DecaysFrozen",
        module="strategy_weights",
        bugs=(),
        kind=Kind.DECAY,
        why="Frozen parameters are in the optimizer, and a gradient of zeros is enough for decay.",
        properties=properties("storage master weights gradient"),
        stages=stages("update gather"),
        known=known_strategy(1, [1, 1], places=_FROZEN),
    ),
    Plant(
        name="DecaysNoVectors",
        module="strategy_weights",
        bugs=(),
        kind=Kind.DECAY,
        why="Groups of the strategy's own leave out the decay of vectors that was asked for.",
        properties=_STEPPED,
        stages=stages("update"),
        known=known_strategy(1, [1], optimizer=VISIBLE),
    ),
    Plant(
        name="FillsMissingWithZeros",
        module="strategy_weights",
        bugs=(),
        kind=Kind.MISSING,
        why="What no rank used gets a gradient of zeros: it decays, and its moments shrink, where it is to stay.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        known=known_strategy(1, [1, 1], (part(none={0: [0]}), Step())),
    ),
    Plant(
        name="ZerosInsteadOfNone",
        module="strategy_weights",
        bugs=(),
        kind=Kind.MISSING,
        why="Gradients are zeroed and stay: what a later step does not use has one of zeros, and decays.",
        properties=properties("gradient spill"),
        stages=stages("reduce"),
        known=known_strategy(1, [1, 1], (*ONE, part(none={0: [0]}), Step())),
    ),
    Plant(
        name="KeepsFirstRate",
        module="strategy_weights",
        bugs=(),
        kind=Kind.STALE,
        why="The optimizer steps by the learning rate that it was built with, whatever the schedule says.",
        properties=_STEPPED,
        stages=stages("update"),
        known=known_strategy(1, [1], (*ONE, Rate(0.01), *ONE)),
    ),
    Plant(
        name="RoundsMoments",
        module="strategy_weights",
        bugs=(),
        kind=Kind.ROUNDING,
        why="Moments are kept in eight bits: of the second one most updates are lost.",
        properties=properties("moments"),
        stages=stages("update"),
        known=known_strategy(1, [2]),
    ),
    Plant(
        name="DecaysByGradient",
        module="strategy_weights",
        bugs=(),
        kind=Kind.DECAY,
        why="Decay goes through the gradient and its moments: Adam, where AdamW was asked for.",
        properties=properties("moments master"),
        stages=stages("update"),
        known=known_strategy(1, [1]),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
