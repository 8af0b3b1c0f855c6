"""The configuration that a distribution strategy is given, and the settings of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.scenario.model import Part, Scenario, strategy_of
from harness.scenario.muon import MuonSettings
from harness.scenario.strategy import Offer

_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def configuration(scenario: Scenario, base: Mapping[str, Any], offer: Offer) -> dict[str, Any]:
    """What the constructor is given, a new dictionary: ``base``, with the keys that the scenario decides.

    Args:
        scenario: of system ``"strategy"``.
        base: of a built-in, or what the user gave.
        offer: of the subject; where it is not ``configurable`` the base is handed over as it is.
    """
    config = dict(base)
    if not offer.configurable:
        return config
    strategy = strategy_of(scenario)
    unused = any(any(operation.none) for operation in scenario.operations if isinstance(operation, Part))
    if strategy.sharding == "none":
        itemsize = 2 if scenario.parameters[0].dtype == "bf16" else 4
        return config | {
            "bucket_cap_mb": max(1, scenario.bucket) * itemsize / 2**20,
            "find_unused_parameters": unused,
        }
    config |= {
        "use_mixed_precision": strategy.compute == "bf16",
        "fsdp_reduce_dtype": strategy.reduce,
        "fsdp_cpu_offload": strategy.offload,
        "unused_parameters": unused,
    }
    if strategy.sharding == "hybrid":
        config["fsdp_hsdp_replicate_size"] = strategy.replicas
    return config


def adamw_arguments(scenario: Scenario) -> dict[str, Any]:
    """Keyword arguments of ``torch.optim.AdamW``."""
    settings = scenario.optimizer
    return {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "foreach": settings.foreach,
    }


def muon_arguments(settings: MuonSettings) -> dict[str, Any]:
    """What ``build_optimizer`` is given as ``muon``."""
    return {
        "lr": settings.lr,
        "momentum": settings.beta,
        "nesterov": settings.nesterov,
        "weight_decay": settings.weight_decay,
        "ns_steps": settings.ns_steps,
        "ns_eps": settings.ns_eps,
        "ns_coefficients": settings.coefficients,
        "ns_dtype": _NS_DTYPES[settings.ns_dtype],
        "scale": settings.scale,
    }
