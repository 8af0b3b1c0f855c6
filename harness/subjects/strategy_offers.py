"""What may be drawn for a distribution strategy: of the built-in ones, and of a configuration of the user's. No torch.

Nothing is validated here: what a configuration cannot say is told by the strategy that is built from it, in the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.scenario.strategy import Offer, Reduce

USE_DMUON = "use_dmuon"
"""The argument of ``build_strategy`` that may stand in a configuration's file."""

_BOTH: tuple[Reduce, ...] = ("fp32", "bf16")

DDP = Offer(
    sharding="none",
    reduce=("fp32",),
    compute=("fp32",),
    dtypes=_BOTH,
    unused=True,
    tied=True,
    unequal_start=True,
    deferred=True,
    flush=True,
    rounds=True,
    configurable=True,
)
"""Of DDP as the harness configures it."""

FULL = Offer(
    sharding="full",
    reduce=_BOTH,
    compute=_BOTH,
    offload=True,
    unused=True,
    tied=True,
    plain=True,
    unequal_start=True,
    deferred=True,
    flush=True,
    rounds=True,
    configurable=True,
)
"""Of FSDP2 on a one-dimensional mesh as the harness configures it."""

ZERO_REDUNDANCY = Offer(
    sharding="none",
    reduce=("fp32",),
    compute=("fp32",),
    unused=True,
    unequal_start=True,
    rounds=True,
    configurable=True,
)
"""Of DDP with an optimizer whose state is sharded: what DDP is asked for, but for what only the optimizer's own dtype
or the strategy's own methods could matter to."""


def offer_of(config: Mapping[str, Any]) -> Offer:
    """What ``build_strategy`` of this configuration takes; the configuration is handed over as it is."""
    if not config.get("use_fsdp", False):
        return Offer(
            sharding="none",
            reduce=("fp32",),
            compute=("fp32",),
            dtypes=_BOTH,
            unused=bool(config.get("find_unused_parameters", False)),
            tied=True,
            unequal_start=True,
            deferred=True,
            flush=True,
            rounds=True,
        )
    hybrid = config.get("fsdp_sharding_strategy", "full_shard") in ("hybrid_shard", "_hybrid_shard_zero2")
    # Ranks of one machine are one node, which by default is one replica.
    replicas = config.get("fsdp_hsdp_replicate_size", 0) or 1
    return Offer(
        sharding="hybrid" if hybrid else "full",
        replicas=replicas if hybrid and isinstance(replicas, int) else None,
        reduce=("bf16",) if config.get("fsdp_reduce_dtype", "fp32") == "bf16" else ("fp32",),
        compute=("bf16",) if config.get("use_mixed_precision", True) else ("fp32",),
        unused=bool(config.get("unused_parameters", False)),
        tied=True,
        plain=True,
        unequal_start=True,
        deferred=True,
        flush=True,
        dedicated=bool(config.get(USE_DMUON, False)),
        rounds=True,
    )


def summary_of(config: Mapping[str, Any]) -> str:
    """What this configuration asks for, in a few words."""
    if not config.get("use_fsdp", False):
        ignored = sorted(key for key in config if key.startswith("fsdp_"))
        return "DDP" + (f" (use_fsdp is not true, so {', '.join(ignored)} mean nothing)" if ignored else "")
    words = [f"FSDP2, {config.get('fsdp_sharding_strategy', 'full_shard')}"]
    words += ["Muon on dedicated owners"] if config.get(USE_DMUON, False) else []
    return ", ".join(words)
