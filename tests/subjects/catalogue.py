"""What the classes of ``broken.py`` are expected to come out as: plain data, no torch.

Those that stand for a public bug are plants of the bug museum (``harness.faults.museum``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from harness.faults.museum.catalogue import PLANTS


@dataclass(frozen=True)
class Broken:
    """One class of ``broken.py``.

    Attributes:
        name: The class.
        properties: A verifier must name one of these first ...
        stages: ... at one of these stages.
        min_world: The smallest world in which the bug can show.
        note: What a scenario must contain.
        only_world: The only world in which it can show, if there is just one.
    """

    name: str
    properties: frozenset[str]
    stages: frozenset[str]
    min_world: int
    note: str
    only_world: int | None = None


def _broken(
    name: str, properties: str, stages: str, min_world: int, note: str, only_world: int | None = None
) -> Broken:
    return Broken(name, frozenset(properties.split("|")), frozenset(stages.split("|")), min_world, note, only_world)


BROKEN: tuple[Broken, ...] = (
    _broken("WrongOwner", "gradient|spill|ownership", "reduce", 2, "pieces 0 and 1 differ"),
    _broken("ReducesInBf16", "gradient|spill", "reduce", 2, "a sum of more than 8 bits"),
    _broken("Bf16SumAtWorldThree", "spill", "reduce", 3, "a sum of one rank's parts of more than 8 bits", 3),
    # One that is nan from end to end could be any, so that nobody can say that it was taken for another.
    _broken("LostOffsetAtBucketEdge", "gradient|spill", "reduce", 1, "held step, a parameter across a bucket edge"),
    _broken("Nondeterministic", "determinism", "reduce", 1, "any step, one in three"),
    _broken("LostFirstPart", "spill", "reduce", 1, "two parts with gradients on a rank"),
    _broken("OverwritesAfterLast", "spill", "reduce", 1, "a part with gradients after the announced last"),
    _broken("CountsHeldTwice", "spill", "reduce", 1, "a part with gradients after a held one"),
    _broken("DiscardKeepsSpill", "gradient|spill", "reduce", 1, "discard of a spilled step, then a spilled step"),
    _broken("DiscardKeepsHeld", "intake", "collect", 1, "discard of a held step"),
    _broken("DiscardKeepsMasterGrad", "intake|master|moments", "collect|update", 1, "a discard after a completed step"),
    _broken("OneNoneIsAllNone", "intake|spill", "collect|reduce", 1, "a part with some None and some not"),
    _broken("GradNotCleared", "intake", "collect", 1, "a spilled part"),
    _broken("SpillsPerPart", "intake", "collect", 1, "a part with gradients after a spilled one"),
    _broken("HasGradAfterReduce", "intake", "reduce", 1, "a step with a gradient"),
    _broken("KeepsGradients", "memory", "reduce|norm|update|gather", 1, "a held step with a gradient"),
    _broken("DiscardKeepsGradients", "memory", "collect", 1, "discard of a held step"),
    _broken("ConstructorZeroesWeights", "weights", "build", 1, "any"),
    _broken("CollectWritesWeights", "weights", "collect", 1, "any"),
    _broken("ReduceWritesWeights", "weights", "reduce", 1, "a completed step"),
    _broken("FreezesItsParameters", "storage", "gather", 1, "a completed step"),
    _broken("LocalNorm", "norm", "norm", 2, "gradients on two shards"),
    _broken("NormCountsNeighbour", "norm", "norm", 2, "a piece whose first gradient is not negligible"),
    _broken("NormOffByOneUlp", "norm", "norm", 2, "a finite norm"),
    _broken("TruncatingRound", "weights", "gather", 1, "an updated weight that rounds away from zero"),
    _broken("StaleWeights", "weights", "gather", 1, "a visible update"),
    _broken("GathersEverySecondStep", "weights", "gather", 1, "two completed steps, a visible update"),
    _broken("LastBucketNotGathered", "weights", "gather", 1, "a visible update in the last bucket"),
    _broken("LastRankStale", "weights|agreement", "gather", 2, "a visible update"),
    _broken("LostOffsetInGather", "weights", "gather", 1, "a parameter across a bucket edge"),
    _broken("WritesPastTheEnd", "storage", "gather", 1, "a completed step, memory behind the parameters"),
    _broken("GarbageInPadding", "ownership", "build", 2, "padding"),
    _broken("MasterFromNeighbour", "master|ownership", "build", 2, "pieces differ"),
    _broken("BucketsDoNotCover", "ownership", "build", 1, "any"),
    _broken("RefusesFewElements", "progress", "build", 2, "N < W"),
    _broken("OtherCollectiveOnOneRank", "traffic", "reduce", 2, "any step"),
    _broken("RaisesInGather", "progress", "gather", 1, "two completed steps"),
    _broken("SystemExitInGather", "progress", "gather", 1, "a completed step"),
    _broken("ExitsInReduce", "progress", "reduce", 1, "two completed steps"),
    _broken("ReplacesNonfinite", "gradient|spill", "reduce", 1, "a sum that is inf or nan"),
    _broken("ClampsLargeGradients", "gradient|spill", "reduce", 1, "a gradient beyond 65,504"),
    _broken("FlushesSubnormals", "gradient|spill", "reduce", 1, "a sum that is subnormal"),
    _broken("HostOverflowBecomesZero", "spill", "reduce", 1, "finite parts whose sum overflows"),
    _broken("OverflowSaturates", "gradient|spill", "reduce", 3, "finite contributions whose sum overflows"),
    _broken("SkipsStepWithNan", "gradient|spill", "reduce", 1, "a sum that is nan, another on the shard that is not"),
    _broken("NormWithoutNan", "norm", "norm", 1, "a gradient that is nan, none that is inf"),
    _broken("AlternatesOrders", "determinism", "reduce", 3, "a sum of three ranks that rounds"),
    _broken("CompensatesWrongly", "gradient|spill", "reduce", 3, "a sum of three ranks that rounds"),
    _broken("NormWritesWeights", "weights", "norm", 1, "a completed step"),
    _broken("OneRankRefusesInNorm", "progress", "norm", 2, "any step"),
    _broken("CrashesWhenIdle", "progress|determinism", "collect|reduce|norm|update|gather|build", 1, "any"),
    _broken("CastsItsParameters", "storage", "build", 1, "any"),
    _broken("FrozenUntilGather", "storage", "build", 1, "any"),
    _broken("FlattensUntilGather", "storage", "collect", 1, "a parameter of other than one dimension"),
    _broken("StatesHugeBuckets", "ownership", "build", 1, "any"),
    _broken("RateOfTheFirstStep", "master", "update", 1, "a new rate after a step, an update that shows it"),
    _broken("LayoutOutlivesIt", "ownership|master|gradient|spill", "build|reduce", 1, "a rebuild, other buckets"),
    _broken("SpillsOutliveIt", "intake", "collect", 1, "a spill, then a rebuild"),
    _broken("HangsInNorm", "progress", "norm", 1, "any step; costs a whole time-out"),
)


def on_real_ranks(broken: Broken) -> bool:
    """Whether a class must be run on processes: its bug ends or stops one; and each twelfth of the others."""
    return "progress" in broken.properties or BROKEN.index(broken) % 12 == 0


def simulated(broken: Broken) -> bool:
    """Whether a class must be run in simulated worlds: it is neither run on processes nor by its saved case."""
    return not on_real_ranks(broken) and broken.name not in SAVED.values()


SAVED = {
    "bf16-sum-at-world-three": "Bf16SumAtWorldThree",
    "clamps-large-gradients": "ClampsLargeGradients",
    "counts-held-twice": "CountsHeldTwice",
    "counts-seen-gradients": "CountsSeenGradients",
    "discard-keeps-held": "DiscardKeepsHeld",
    "discard-keeps-master-grad": "DiscardKeepsMasterGrad",
    "discard-keeps-spill": "DiscardKeepsSpill",
    "flushes-subnormals": "FlushesSubnormals",
    "host-not-zeroed": "HostNotZeroed",
    "host-sums-in-bf16": "HostSumsInBf16",
    "keeps-gradients": "KeepsGradients",
    "last-rank-stale": "LastRankStale",
    "local-norm": "LocalNorm",
    "lost-first-part": "LostFirstPart",
    "lost-offset-at-bucket-edge": "LostOffsetAtBucketEdge",
    "master-rounded": "MasterRounded",
    "max-of-norms": "MaxOfNorms",
    "mean-for-sum": "MeanForSum",
    "no-step-without-gradients": "NoStepWithoutGradients",
    "norm-of-saved-copy": "NormOfSavedCopy",
    "one-none-is-all-none": "OneNoneIsAllNone",
    "only-last-parts-parameters": "OnlyLastPartsParameters",
    "overwrites-after-last": "OverwritesAfterLast",
    "raises-in-gather": "RaisesInGather",
    "reduces-in-bf16": "ReducesInBf16",
    "refuses-few-elements": "RefusesFewElements",
    "rounds-partial-sum-at-world-three": "RoundsPartialSumAtWorldThree",
    "staging-not-zeroed": "StagingNotZeroed",
    "stale-weights": "StaleWeights",
    "swaps-equal-buckets": "SwapsEqualBuckets",
    "wrong-piece-at-world-three": "WrongPieceAtWorldThree",
}
"""The cases of harness/regressions, and the class that each came from, made small by a campaign: see :func:`wrong`."""


class Wrong(NamedTuple):
    """A class that must be caught: as ``--subject`` (or a test) names it, and where."""

    subject: str
    properties: frozenset[str]
    stages: frozenset[str]


def wrong(name: str) -> Wrong:
    """The class of this name, of ``broken.py`` or of the museum."""
    for broken in BROKEN:
        if broken.name == name:
            return Wrong(f"broken.py:{name}", broken.properties, broken.stages)
    [plant] = [plant for plant in PLANTS if plant.name == name]
    properties, stages = ({each.value for each in values} for values in (plant.properties, plant.stages))
    return Wrong(plant.subject, frozenset(properties), frozenset(stages))
