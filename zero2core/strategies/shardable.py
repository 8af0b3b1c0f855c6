"""What FSDP2 can shard: the blocks of a model that become units, and what is refused in a sentence of our own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zero2core.strategies import private

__all__ = ["blocks_of", "require_shardable", "require_sound"]


def blocks_of(model: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The blocks of the ModuleList with the most elements, the first of several; those that have a forward, once each.

    Elements are those that are not ``ignored``. An empty list where there is no such ModuleList.
    """

    def elements(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored)

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    largest = max(lists, key=elements)
    return [block for block in dict.fromkeys(largest) if not isinstance(block, containers) and elements(block)]


def require_shardable(what: str, model: nn.Module, blocks: Sequence[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuse by ``ValueError`` what FSDP2 refuses later, in other words, or does wrong."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"{what}: {type(model).__name__} has no forward: wrap the model that it is a part of")
    unit_of_module = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    units: dict[nn.Parameter, dict[int, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in ignored:
                continue
            full = f"{prefix}.{name}" if prefix else name
            units.setdefault(parameter, {}).setdefault(unit_of_module.get(id(module), -1), full)
            if parameter.dim() == 0:
                raise ValueError(f"{what}: {full} is a scalar, which FSDP2 cannot shard: give it shape (1,)")
    dtypes: dict[int, set[torch.dtype]] = {}
    for parameter, places in units.items():
        if len(places) > 1:
            names = " and ".join(places.values())
            raise ValueError(
                f"{what}: {names} are one tied parameter in two units of FSDP2, which would come apart: give the model "
                "a convert_to_fsdp that shards the modules that share it as one unit"
            )
        if parameter.requires_grad:
            dtypes.setdefault(next(iter(places)), set()).add(parameter.dtype)
    names_of_modules = {id(module): name for name, module in model.named_modules()}
    for index, found in dtypes.items():
        _require_one_dtype(what, names_of_modules[id(blocks[index])] if index >= 0 else "", found)


def _require_one_dtype(what: str, unit: str, dtypes: set[torch.dtype]) -> None:
    if len(dtypes) > 1:
        raise ValueError(
            f"{what}: the unit {unit or '(root)'} mixes parameters of {', '.join(sorted(map(str, dtypes)))}, which "
            "FSDP2 cannot reduce together: give all that take gradients one dtype"
        )


def require_sound(
    what: str, wrapped: nn.Module, units: Sequence[private.Unit], tied: Sequence[Sequence[str]], *, converts: bool
) -> None:
    """Look at what came out: units exist, each of one dtype, and what was tied still is."""
    # Units may be empty: of a strategy that has taken all of their parameters out.
    if converts and not any(isinstance(module, FSDPModule) for module in wrapped.modules()):
        raise ValueError(
            f"{what}: {type(wrapped).__name__}.convert_to_fsdp has made no FSDP2 unit: it must call fully_shard with "
            "the mesh it is given"
        )
    for unit in units:
        _require_one_dtype(what, unit.name, unit.dtypes)
    now = dict(wrapped.named_parameters(remove_duplicate=False))
    for names in tied:
        kept = [name for name in names if name in now]
        if len({id(now[name]) for name in kept}) > 1:
            raise ValueError(
                f"{what}: {' and '.join(names)} were one tied parameter and have come apart in convert_to_fsdp: shard "
                "the modules that share it as one unit"
            )
