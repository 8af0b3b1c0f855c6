"""Labels of the negative controls of Muon, whose classes are in ``controls_muon``: never a violation."""

from __future__ import annotations

from typing import Final

from harness.faults.museum.exhibit import Control


def _control(name: str, way: str, *, own: bool = True) -> Control:
    """``own``: it computes the products of Newton-Schulz by the very operations of ours; else they are held against
    the bound."""
    return Control(name, way, module="controls_muon", own=own, system="muon")


CONTROLS: Final[tuple[Control, ...]] = (
    _control("UpdatesByHand", "Updates matrices by code of its own, written from the specification"),
    _control(
        "OrthogonalisesOneByOne", "Orthogonalises heads and experts in a loop: products have another shape", own=False
    ),
    _control("OrthogonalisesColumnsFirst", "Hands Newton-Schulz a matrix whose columns lie end to end", own=False),
    _control(
        "OrthogonalisesTallMatrices",
        "Does not transpose a matrix with more rows than columns: the same polynomial by larger products",
        own=False,
    ),
    _control("MovesMomentumOutOfPlace", "Makes the new momentum beside the old one"),
    _control("OneBufferAMatrix", "Fuses no matrices, whatever size of buffers is asked for"),
    _control("StartsFromHooks", "Always starts collectives from hooks"),
    _control("DividesAfterTheSum", "Never averages in a collective"),
    _control("OwnsFromTheLastRank", "Gives matrices to ranks that are counted from the last one"),
    _control("FreshBuffersEveryStep", "Takes new memory, full of nan, for the gradients of each step"),
    _control("WalksBuffersBackward", "Communicates the last buffer first, on every rank"),
    _control("SendsOneByOne", "Waits for the weights of each buffer before the next one is sent"),
    _control("AllReducesMatrices", "Sums matrices on every rank, and uses the sum on their owners"),
    _control("AlwaysTwoHops", "Goes in two hops wherever there are several nodes of two ranks"),
    _control("GathersSlicesByBroadcast", "Every rank broadcasts its piece of a buffer of slices"),
    _control("NormOfElements", "Adds squares from the last element to the first"),
    _control("SavesToAFile", "Saves what ``torch.save`` writes and ``torch.load`` reads"),
    _control("SavesCopies", "Saves copies, which stay as they are while training goes on"),
)
