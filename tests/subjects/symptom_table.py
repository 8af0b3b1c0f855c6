"""What symptom each class of ``symptoms.py`` has, and those of ``broken.py`` of which one can be known: plain data.

The entries are names of :class:`harness.diagnosis.symptoms.Symptom`, several where the same mistake may rightly be
called either; empty where none describes it, and naming any would be wrong.
"""

from __future__ import annotations

KNOWN: dict[str, frozenset[str]] = {
    name: frozenset(symptoms.split())
    for name, symptoms in {
        "DividesBeforeTheSum": "FACTOR_ONE_OVER_WORLD",
        "TimesParts": "FACTOR_PARTS",
        "DropsTheSecondPart": "PART_MISSING",
        "AddsTheLastAnnouncedTwice": "PART_TWICE",
        "RankZeroLeftOut": "RANK_MISSING",
        "LastRankTwice": "RANK_TWICE",
        "EverySecondReductionLost": "EARLIER",
        "AddsToTheLastGradient": "EARLIER_ADDED",
        "SpillKeptAfterASpill": "EARLIER_ADDED",
        "FirstBucketForAll": "OTHER_BUCKET",
        "ReadsOneTooFar": "SHIFTED",
        "PadsWithOnes": "PADDING",
        "CutsTheGradient": "TOWARD_ZERO",
        "SendsBf16": "BF16_BEFORE",
        "LastBucketZero": "ZERO",
        "ZeroWhereItHadNone": "ZERO",
        "NanBecomesZero": "NONFINITE",
        "MasterOneTooFar": "SHIFTED",
        "MasterStartsAtZero": "ZERO",
        "GathersTurned": "OTHER_RANK",
        "GathersTheFirstBucketTwice": "OTHER_BUCKET",
        "RankZeroNotWritten": "EARLIER",
        "JoinsWithPadding": "PADDING",
        "CutsTheWeights": "TOWARD_ZERO",
        "NormTimesWorld": "FACTOR_WORLD",
        "NormOfThisRank": "LOCAL",
        "NormNotSquared": "ROOT",
        "NormOfTheStepBefore": "EARLIER",
        "NormDoubled": "TWICE",
        "MasterOfMinusZeros": "SIGN_OF_ZERO",
        "PairsAtRandom": "ORDER",
        "HalvesTheGradient": "",
        "LargestOfTheRanks": "",
        "AddsOne": "",
        "NegatesTheGradient": "",
        "TurnsBucketsAround": "",
        "OverWorldLessOne": "",
        "RoundsToFp16": "",
        "AbsoluteGradient": "",
        "SubtractsTheMean": "",
        "WeightsOneUlpUp": "",
        "WeightsAwayFromZero": "",
        "NormOfMagnitudes": "",
        "NormWithoutTheFirstElement": "",
        "TransposesMatrices": "",
    }.items()
}

BROKEN: dict[str, frozenset[str]] = {
    name: frozenset(symptoms.split())
    for name, symptoms in {
        "WrongOwner": "OTHER_RANK",
        "ReducesInBf16": "BF16_BEFORE",
        "Bf16SumAtWorldThree": "BF16_BEFORE",
        "LostOffsetAtBucketEdge": "SHIFTED",
        "Nondeterministic": "",
        "LostFirstPart": "PART_MISSING",
        "OverwritesAfterLast": "PART_MISSING",
        "CountsHeldTwice": "PART_TWICE",
        "DiscardKeepsSpill": "EARLIER_ADDED",
        "DiscardKeepsMasterGrad": "",
        "ConstructorZeroesWeights": "ZERO",
        "CollectWritesWeights": "",
        "ReduceWritesWeights": "",
        "LocalNorm": "LOCAL",
        "NormCountsNeighbour": "",
        "NormOffByOneUlp": "",
        "TruncatingRound": "TOWARD_ZERO",
        "StaleWeights": "EARLIER",
        "GathersEverySecondStep": "EARLIER",
        "LastBucketNotGathered": "EARLIER",
        "LastRankStale": "EARLIER",
        "LostOffsetInGather": "SHIFTED",
        "GarbageInPadding": "PADDING",
        "MasterFromNeighbour": "OTHER_RANK",
        "ReplacesNonfinite": "NONFINITE",
        "ClampsLargeGradients": "",
        "FlushesSubnormals": "",
        "HostOverflowBecomesZero": "NONFINITE ZERO",
        "OverflowSaturates": "NONFINITE",
        "SkipsStepWithNan": "ZERO NONFINITE",
        "NormWithoutNan": "NONFINITE",
        "AlternatesOrders": "ORDER",
        "CompensatesWrongly": "",
        "NormWritesWeights": "",
    }.items()
}

JUDGED: dict[str, frozenset[str]] = {
    name: frozenset(symptoms.split())
    for name, symptoms in {
        "SpillStartsAtZero": "PART_MISSING",
        "FactorTwo": "",
        "CompactsGradients": "SHIFTED",
        "HalfWeightLaterParts": "",
        "SumToFp16": "",
        "AllReducesFirst": "FACTOR_WORLD",
        "MaxForSum": "",
        "ReversedParameters": "",
        "OwnTwice": "RANK_TWICE",
        "WritesOneLate": "SHIFTED",
        "FactorWorldSquared": "",
        "FactorRankPlusOne": "",
        "LastElementNotWritten": "EARLIER",
        "SumTruncated": "TOWARD_ZERO",
        "InfSaturates": "NONFINITE",
        "MasterShifted": "SHIFTED",
        "BufferOverwritten": "OTHER_BUCKET SHIFTED",
        "NormOfFirstBucket": "",
        "FirstChunkTwice": "OTHER_RANK SHIFTED",
        "RoundsAwayFromZero": "",
    }.items()
}
