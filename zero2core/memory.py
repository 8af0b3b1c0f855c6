"""Static memory of a sharded trainer, as a formula."""

from __future__ import annotations

__all__ = ["sharded_static_bytes"]


def sharded_static_bytes(trainable_backbone: float, heads: float, weights: float, world: int) -> float:
    """Bytes one rank holds between the steps when the backbone is sharded and the heads are not.

    ``weights + 2 T + 16 T / world + 16 heads``: all weights; a bf16 gradient of every trainable element of the
    backbone; a rank's share of fp32 master (4), gradient (4) and two moments (8); and the same 16 bytes, unsharded,
    for every element of the heads. Staging is not in it: :class:`~zero2core.zero_master.ZeroMaster` adds
    two buckets of fp32 for ``world > 1``, and a host vector of ``4 N`` bytes once a step has several parts.

    Args:
        trainable_backbone: T, elements that are trained and sharded.
        heads: elements that are trained and not sharded.
        weights: bytes of all compute weights, frozen ones included.
        world: number of ranks.

    Raises:
        ValueError: a negative amount, or ``world < 1``.
    """
    for name, amount in (("trainable_backbone", trainable_backbone), ("heads", heads), ("weights", weights)):
        if amount < 0:
            raise ValueError(f"{name}={amount}: must not be negative")
    if world < 1:
        raise ValueError(f"world={world}: at least one rank is needed")
    return weights + 2 * trainable_backbone + 16 * trainable_backbone / world + 16 * heads
