"""The systems of our own that can be verified by name, and what may be asked of a subject. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.scenario.model import CONTRACT, Extension, System
from harness.scenario.strategy import Offer
from harness.subjects import strategy_offers


@dataclass(frozen=True)
class Capabilities:
    """What a subject promises beyond the class contract (DESIGN.md, section 7).

    Attributes:
        norm: how it accumulates the squared norm: ``"fp64"`` is judged bitwise on norm-exact data and within
            n 2**-53 elsewhere; ``"fp32"`` within the any-order fp32 bound.
        traffic: number, kind and bytes of its collectives are what the layout implies.
        static_memory: what it keeps alive follows the formula of ``spec/zero_master.md``.
        strict_padding_rule: it rounds the bucket as the specification says; else any valid rounding will do.
        exact_products: of system ``"muon"``: it runs Newton-Schulz by the very operations of the reference, on the same
            shapes, so that masters are compared bit for bit; else within a bound where they are not equal.
        extension: what it takes beyond the contract's space. A class of the user's says so itself
            (:func:`harness.subjects.load.declared`).
        config: of system ``"strategy"``: the configuration that its constructor is given, or what that is made from
            (``harness.drive.strategy_config``).
    """

    norm: Literal["fp64", "fp32"] = "fp32"
    traffic: bool = False
    static_memory: bool = False
    strict_padding_rule: bool = False
    exact_products: bool = False
    extension: Extension = CONTRACT
    config: Mapping[str, Any] = field(default_factory=dict)


CLASS_SUBJECT = Capabilities()

_MUSEUM = f"{Path(__file__).parents[1] / 'faults' / 'museum'}{os.sep}"


@dataclass(frozen=True)
class Builtin:
    """A built-in system: where its class is and what it promises."""

    target: str
    capabilities: Capabilities
    summary: str
    system: System = "zero_master"


_ZERO_MASTER = Capabilities(
    norm="fp64",
    traffic=True,
    static_memory=True,
    strict_padding_rule=True,
    extension=Extension(refresh=True, dtypes=True, strides=True),
)

MUON = Capabilities(norm="fp64", exact_products=True, extension=Extension(dtypes=True))
"""What ``zero2core.MuonShardingOptimizer`` promises, and so its variants in the bug museum."""

CONFIGURED = "strategy"
"""The built-in subject that a configuration of the user's decides about."""


def _strategy(offer: Offer, **config: Any) -> Capabilities:  # noqa: ANN401
    return Capabilities(norm="fp64", exact_products=True, extension=Extension(strategy=offer), config=config)


_HYBRID = msgspec.structs.replace(strategy_offers.FULL, sharding="hybrid")
_FSDP = "zero2core.strategies.fsdp:FSDPStrategy"

BUILTIN: dict[str, Builtin] = {
    "zero2": Builtin(
        target="zero2core.zero_master:ZeroMaster",
        capabilities=_ZERO_MASTER,
        summary="zero2core.ZeroMaster: fp32 masters, AdamW moments and gradients sharded (ZeRO-2)",
    ),
    "muon": Builtin(
        target="zero2core.muon.sharding:MuonShardingOptimizer",
        capabilities=MUON,
        summary="zero2core.MuonShardingOptimizer: whole matrices on owner ranks, the rest split element by element",
        system="muon",
    ),
    "ddp": Builtin(
        target="zero2core.strategies.ddp:DDPStrategy",
        capabilities=_strategy(strategy_offers.DDP, use_fsdp=False),
        summary="zero2core.DDPStrategy: whole parameters on every rank, gradients averaged in buckets",
        system="strategy",
    ),
    "fsdp2": Builtin(
        target=_FSDP,
        capabilities=_strategy(strategy_offers.FULL, use_fsdp=True, fsdp_sharding_strategy="full_shard"),
        summary="zero2core.FSDPStrategy: parameters, gradients and moments sharded over all ranks",
        system="strategy",
    ),
    "fsdp2_zero2": Builtin(
        target=_FSDP,
        capabilities=_strategy(strategy_offers.FULL, use_fsdp=True, fsdp_sharding_strategy="shard_grad_op"),
        summary="fsdp2 that keeps parameters whole between forward and backward",
        system="strategy",
    ),
    "hsdp": Builtin(
        target=_FSDP,
        capabilities=_strategy(_HYBRID, use_fsdp=True, fsdp_sharding_strategy="hybrid_shard"),
        summary="zero2core.FSDPStrategy on a mesh of replicas and shards",
        system="strategy",
    ),
    "hsdp_zero2": Builtin(
        target=_FSDP,
        capabilities=_strategy(_HYBRID, use_fsdp=True, fsdp_sharding_strategy="_hybrid_shard_zero2"),
        summary="hsdp that keeps parameters whole between forward and backward",
        system="strategy",
    ),
    "dmuon": Builtin(
        target="zero2core.strategies.dmuon:DMuonFSDPStrategy",
        capabilities=_strategy(
            msgspec.structs.replace(strategy_offers.FULL, dedicated=True),
            use_fsdp=True,
            fsdp_sharding_strategy="full_shard",
        ),
        summary="zero2core.DMuonFSDPStrategy: fsdp2, and matrices of Muon whole on one owner each",
        system="strategy",
    ),
    "zero_redundancy": Builtin(
        target="harness.subjects.zero_redundancy:ZeroRedundancyStrategy",
        capabilities=_strategy(strategy_offers.ZERO_REDUNDANCY, use_fsdp=False),
        summary="zero2core.DDPStrategy with torch's ZeroRedundancyOptimizer: moments sharded by whole parameters",
        system="strategy",
    ),
    CONFIGURED: Builtin(
        target="harness.subjects.configured:Configured",
        capabilities=_strategy(strategy_offers.offer_of({})),
        summary="what zero2core.build_strategy makes of --config FILE.json",
        system="strategy",
    ),
    "canary-bit": Builtin(
        target="harness.faults.canary:WrongBit",
        capabilities=_ZERO_MASTER,
        summary="zero2 with one wrong bit in one reduced gradient: must be caught",
    ),
    "canary-exit": Builtin(
        target="harness.faults.canary:Silent",
        capabilities=_ZERO_MASTER,
        summary="zero2 of which one rank ends with exit code 0 in the gather: must be caught",
    ),
}


def known_system(subject: str) -> System | None:
    """What kind of system the subject is (as ``SubjectSource.absolute`` has it); None: it has to be imported first."""
    builtin = BUILTIN.get(subject)
    return None if builtin is None else builtin.system


def capabilities(subject: str, config: Mapping[str, Any] | None = None) -> Capabilities:
    """What may be asked of the subject (as ``SubjectSource.absolute`` has it): a built-in's own promises, the same for
    its variants in the bug museum, else the class contract.

    Args:
        subject: its name.
        config: of the user's, for the subject ``strategy`` and for classes; None: none was given.
    """
    found = _capabilities(subject)
    if config is None:
        return found
    if subject == CONFIGURED:
        found = replace(found, extension=Extension(strategy=strategy_offers.offer_of(config)))
    return replace(found, config=config)


def _capabilities(subject: str) -> Capabilities:
    builtin = BUILTIN.get(subject)
    if builtin is not None:
        return builtin.capabilities
    if subject.startswith(_MUSEUM):
        from harness.faults.museum import catalogue  # made when it is needed: it takes as long as all else here

        variant_of = catalogue.builtin_of(subject)
        if variant_of is not None:
            return BUILTIN[variant_of].capabilities
    return CLASS_SUBJECT
