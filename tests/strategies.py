"""What is offered by subjects of system ``"strategy"``, for tests of what is drawn for them."""

from __future__ import annotations

from typing import Any

from harness.scenario.model import Extension
from harness.scenario.strategy import Offer

_BOTH = ("fp32", "bf16")
_FSDP: dict[str, Any] = {
    "reduce": _BOTH,
    "compute": _BOTH,
    "offload": True,
    "unused": True,
    "tied": True,
    "plain": True,
    "unequal_start": True,
    "deferred": True,
    "flush": True,
    "rounds": True,
    "configurable": True,
}

OFFERS: dict[str, Offer] = {
    "class": Offer(),
    "declared": Offer(
        unused=True, tied=True, plain=True, unequal_start=True, deferred=True, flush=True, dedicated=True
    ),
    "ddp": Offer(
        "none",
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
    ),
    "fsdp2": Offer("full", **_FSDP),
    "hybrid": Offer("hybrid", **_FSDP),
    "hybrid of two": Offer("hybrid", 2, **_FSDP),
    "dmuon": Offer("full", dedicated=True, **_FSDP),
    "dmuon hybrid": Offer("hybrid", dedicated=True, **_FSDP),
    "bf16 alone": Offer("full", reduce=("bf16",), compute=("bf16",), configurable=True),
}

EXTENSIONS: dict[str, Extension] = {name: Extension(strategy=offer) for name, offer in OFFERS.items()}
