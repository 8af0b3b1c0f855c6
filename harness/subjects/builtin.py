"""The systems of our own that can be verified by name, and what may be asked of a subject. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.scenario.model import CONTRACT, Extension, System


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
    """

    norm: Literal["fp64", "fp32"] = "fp32"
    traffic: bool = False
    static_memory: bool = False
    strict_padding_rule: bool = False
    exact_products: bool = False
    extension: Extension = CONTRACT


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


def capabilities(subject: str) -> Capabilities:
    """What may be asked of the subject (as ``SubjectSource.absolute`` has it): a built-in's own promises, the same for
    its variants in the bug museum, else the class contract."""
    builtin = BUILTIN.get(subject)
    if builtin is not None:
        return builtin.capabilities
    if subject.startswith(_MUSEUM):
        from harness.faults.museum import catalogue  # made when it is needed: it takes as long as all else here

        variant_of = catalogue.builtin_of(subject)
        if variant_of is not None:
            return BUILTIN[variant_of].capabilities
    return CLASS_SUBJECT
