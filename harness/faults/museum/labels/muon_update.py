"""Labels of the plants in ``plants/muon_update.py``."""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import Kind, Plant, part, properties, stages
from harness.faults.museum.muon import VECTOR, known_muon
from harness.scenario.model import Step
from harness.scenario.muon import Mark, MuonSettings

_HEADS: Final = Mark(muon=True, split="heads", num_heads=2)

PLANTS: Final[tuple[Plant, ...]] = (
    Plant(
        name="OrthogonalisesRowPieces",
        module="muon_update",
        bugs=("MoonshotAI/Moonlight#27",),
        kind=Kind.ORTHOGONAL,
        why=(
            "Newton-Schulz runs on what a rank holds of a matrix, its rows, and not on the matrix: each piece is "
            "orthogonal, and the whole is not."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(2, [(2, 2)]),
    ),
    Plant(
        name="OrthogonalisesQkvAsOne",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="Query, key and value lie in one weight, and the cut between them is left out.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(3, 2)], marks={0: Mark(muon=True, split="qkv", sizes=(1, 1, 1))}),
    ),
    Plant(
        name="CutsQkvIntoEqualParts",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why=(
            "The weight of query, key and value is cut into thirds. With grouped queries there are more rows of "
            "queries than of keys, and the cuts go through the blocks."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(4, 2)], marks={0: Mark(muon=True, split="qkv", sizes=(1, 2, 1))}),
    ),
    Plant(
        name="OrthogonalisesHeadsAsOne",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="A matrix that is to be orthogonalised head by head is taken whole.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(2, 2)], marks={0: _HEADS}),
    ),
    Plant(
        name="CutsGateUpAlongColumns",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why=(
            "A weight is cut as where weights are [in, out]; here they are [out, in], and what is fused lies in rows."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(2, 2)], marks={0: Mark(muon=True, split="gate_up", sizes=(1, 1))}),
    ),
    Plant(
        name="OrthogonalisesExpertsAsOne",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="A stack of experts is flattened to one tall matrix, so that each expert's update depends on the others.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(2, 1, 2)]),
    ),
    Plant(
        name="NormalisesStackAsOne",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why=(
            "The norm that experts are divided by is taken over the whole stack: each begins smaller than it should, "
            "and after five steps has not come as far."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(2, 1, 1)]),
    ),
    Plant(
        name="MarksByDimensions",
        module="muon_update",
        bugs=("deepspeedai/DeepSpeed#8442", "deepspeedai/DeepSpeed#8438"),
        kind=Kind.ORTHOGONAL,
        why=(
            "What Newton-Schulz is for is guessed from the number of dimensions. There flat stand-ins hid the "
            "matrices from it, here an embedding becomes one, and has one owner where it should be split."
        ),
        properties=properties("ownership moments"),
        stages=stages("build"),
        own=True,
        known=known_muon(2, [(1, 2)], marks={0: VECTOR}),
    ),
    Plant(
        name="CutsCoefficientsOff",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="The iteration ends with the last row of coefficients, where it should begin with the first one again.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)]),
    ),
    Plant(
        name="RepeatsLastCoefficients",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="Where there are more steps than rows of coefficients the last row is used again and again.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)], settings=MuonSettings(lr=0.1, coefficients="aol")),
    ),
    Plant(
        name="ForgetsToTurnBack",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why=(
            "A matrix with more rows than columns is transposed for the iteration; the result has its shape again, "
            "and its elements in another order."
        ),
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(3, 2)]),
    ),
    Plant(
        name="DividesByZeroNorm",
        module="muon_update",
        bugs=("MoonshotAI/Moonlight#27",),
        kind=Kind.ORTHOGONAL,
        why="Nothing is added to the norm that a matrix is divided by, and zeros become nan.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)], (part(none={0: [0]}), Step())),
    ),
    Plant(
        name="ScalesByOtherSide",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="The scale of an update is made from the sides of the matrix, here the wrong way round.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(2, 1)], settings=MuonSettings(lr=0.1, scale="spectral")),
    ),
    Plant(
        name="ScalesByWholeMatrix",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="Heads are orthogonalised one by one, but scaled by the sides of the matrix that holds them all.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(2, 1)], marks={0: _HEADS}),
    ),
    Plant(
        name="NesterovIntoMomentum",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why="What Nesterov looks ahead to is written into the momentum, which the next step starts from.",
        properties=properties("moments"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)]),
    ),
    Plant(
        name="NormalisesMomentumInPlace",
        module="muon_update",
        bugs=(),
        kind=Kind.ORTHOGONAL,
        why=(
            "Without Nesterov the momentum itself is handed to Newton-Schulz, which normalises it in place (as "
            "torch.optim.Muon 2.13 does for bf16)."
        ),
        properties=properties("moments"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)], settings=MuonSettings(lr=0.1, nesterov=False)),
    ),
    Plant(
        name="RoundsMuonMaster",
        module="muon_update",
        bugs=("NVIDIA/apex#1728",),
        kind=Kind.ROUNDING,
        why="The master has no more bits than the weights, so that small updates are lost.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)]),
    ),
    Plant(
        name="IgnoresRateOfSlices",
        module="muon_update",
        bugs=(),
        kind=Kind.DECAY,
        why="The rate of a single parameter counts where a whole tensor is updated, and not for what is split.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [1], marks={0: Mark(lr_scale=0.5)}),
    ),
    Plant(
        name="IgnoresDecayOfParameter",
        module="muon_update",
        bugs=("verl-project/verl#5070",),
        kind=Kind.DECAY,
        why="All parameters of a set decay alike, also one whose record has a weight decay of its own.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [(1, 1)], marks={0: Mark(muon=True, weight_decay=0.0)}),
    ),
    Plant(
        name="OneRateForBothSets",
        module="muon_update",
        bugs=(),
        kind=Kind.DECAY,
        why="There is one learning rate, where Muon's set and the rest have one each.",
        properties=properties("master"),
        stages=stages("update"),
        own=True,
        known=known_muon(1, [1], settings=MuonSettings(lr=0.2)),
    ),
)

LEFT_OUT: Final[dict[str, str]] = {}
"""Public bugs of these kinds that no plant was made of, and why."""
