"""Labels of the negative controls of distribution strategies, whose classes are in ``controls_strategies``: never a
violation."""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import Control


def _control(name: str, way: str) -> Control:
    return Control(name, way, module="controls_strategies", system="strategy")


CONTROLS: Final[tuple[Control, ...]] = (
    _control("PlainDDP", "Wraps by DistributedDataParallel, and clips by itself"),
    _control("PlainAllReduce", "Shards nothing, and averages gradients by hand at the end of a backward"),
    _control("PlainFSDP2", "Shards blocks and root by FSDP2, and averages by hand what that ignores"),
    _control("PlainHSDP", "Shards by FSDP2 inside two replicas"),
    _control("PlainDedicated", "Leaves matrices whole, each to an owner, which alone steps it"),
    _control("CoefficientInFloats", "Works out the coefficient of the clip in Python's floats"),
    _control("NormOfWholeGradients", "Gathers each gradient for the norm"),
    _control("NormInFp32", "Takes the norm of norms in fp32"),
    _control("ScalesOnlyWhereNeeded", "Does not touch gradients that are within the bound"),
    _control("PutsNewGradients", "Puts scaled gradients in the place of those that were there"),
    _control("ShardsRootOnly", "Makes one FSDP unit of the whole model"),
    _control("ShardsEveryLeaf", "Makes an FSDP unit of every module that has parameters"),
    _control("KeepsWeightsGathered", "Never reshards after a forward"),
    _control("SendsWeightsEndToEnd", "Sends initial weights end to end, as one vector"),
    _control("FlattensPlainGradients", "Averages plain gradients end to end, as one vector"),
    _control("FlattensAllGradients", "Averages all gradients end to end, as one vector"),
    _control("AveragesByHook", "Has DDP sum in a hook, and divides then"),
    _control("BucketViewsOfDDP", "Has DDP keep gradients in its buckets"),
    _control("SumsAndDividesByItself", "Has FSDP2 sum, and divides in a hook"),
    _control("ReplicasByHand", "Sums over replicas in a hook of its own"),
    _control("OneReplicaEach", "Has a mesh of two axes, of which one is of one rank"),
    _control("ScalesAllAtOnce", "Scales the pieces of all gradients in one call"),
    _control("DealsFromTheLastRank", "Deals dedicated matrices out from the last rank on"),
    _control("AllReducesDedicated", "Sums dedicated gradients on every rank, and uses the sum on their owners"),
)
