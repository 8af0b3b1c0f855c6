"""Which parameters of a model are marked for Muon: a record on the parameter itself, set where the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from zero2core.muon.info import MuonParamInfo, info_problem

__all__ = ["Marked", "mark_muon", "marked_parameters"]

_ATTRIBUTE = "zero2core_muon"


def mark_muon(parameter: nn.Parameter, info: MuonParamInfo | None = None) -> nn.Parameter:
    """Mark ``parameter`` for Muon, to be kept whole by one owner; returns it.

    A mark lies on the object: what makes a new parameter of it (``to_empty`` of a model without storage, pickling)
    loses it, so mark after that.

    Args:
        parameter: a matrix ``[..., rows, cols]``; its shape is checked where it is taken out of the model.
        info: how its matrix is cut, and what it has of its own; None: one block, the settings of the group.

    Raises:
        TypeError: ``parameter`` is no parameter, ``info`` no record.
        ValueError: ``info`` says ``use_muon=False``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"mark_muon got a {type(parameter).__name__}: pass the torch.nn.Parameter itself")
    setattr(parameter, _ATTRIBUTE, _checked("mark_muon", info))
    return parameter


@dataclass(frozen=True)
class Marked:
    """A marked parameter, and where modules have it.

    Attributes:
        name: the first one that ``model.named_parameters()`` has for it.
        parameter, info: of :func:`mark_muon`.
        sites: (module, attribute) of every registration, more than one where it is tied.
    """

    name: str
    parameter: nn.Parameter
    info: MuonParamInfo
    sites: tuple[tuple[nn.Module, str], ...]


def marked_parameters(model: nn.Module, infos: Mapping[str, MuonParamInfo | None] | None = None) -> list[Marked]:
    """Every trainable marked parameter of ``model``, in the order of ``model.named_parameters()``.

    One that is frozen stays where it is: it has no gradient, so that nothing is to be orthogonalised.

    Args:
        infos: take these by name, instead of the marks.

    Raises:
        TypeError: a mark or a record that is no :class:`~zero2core.muon.MuonParamInfo`.
        ValueError: none at all; an unknown name; a parameter that is no dense floating-point matrix, that has no
            storage yet, or whose record does not fit its shape.
    """
    named = dict(model.named_parameters())
    for name in infos or ():
        if name not in named:
            near = get_close_matches(name, named, n=1)
            raise ValueError(f"{name!r} is no parameter of the model{f'; did you mean {near[0]!r}?' if near else ''}")
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            sites.setdefault(id(parameter), []).append((module, attribute))
    found = []
    for name, parameter in named.items():
        if not (hasattr(parameter, _ATTRIBUTE) if infos is None else name in infos) or not parameter.requires_grad:
            continue
        info = _checked(name, getattr(parameter, _ATTRIBUTE) if infos is None else infos[name])
        problem = info_problem(name, parameter.shape, info) or _storage_problem(name, parameter)
        if problem:
            raise ValueError(problem)
        found.append(Marked(name, parameter, info, tuple(sites[id(parameter)])))
    if not found:
        raise ValueError(
            f"no trainable parameter of {type(model).__name__} is marked for Muon: call mark_muon(parameter) for each "
            "matrix when the model is built (and not before to_empty, which makes new parameters), or use FSDPStrategy"
        )
    return found


def _storage_problem(name: str, parameter: nn.Parameter) -> str | None:
    if parameter.is_meta:
        return f"{name} is on the meta device: give the model its weights (to_empty, then initialise) before wrapping"
    if hasattr(parameter, "placements"):
        return f"{name} is a DTensor already: dedicated parameters are taken out before FSDP2 shards the model"
    if parameter.layout is not torch.strided or not parameter.dtype.is_floating_point:
        return f"{name} is {parameter.layout}, {parameter.dtype}: must be dense and real floating-point"
    return None


def _checked(where: str, info: MuonParamInfo | None) -> MuonParamInfo:
    if info is None:
        return MuonParamInfo(use_muon=True)
    if not isinstance(info, MuonParamInfo):
        raise TypeError(
            f"{where}: the record is a {type(info).__name__}: must be a MuonParamInfo, or None for the default"
        )
    if not info.use_muon:
        raise ValueError(f"{where}: marked for Muon, with a record that says use_muon=False: leave the mark out")
    return info
