"""An installed package ``dmuon`` in place of this project's own runtime: what is asked of it, and what it is told.

It must have, as functions of the module:

- ``dedicate(model, *, compute_dtype, reduce_dtype, keep)``: takes the marked matrices out of FSDP2 (each has a record,
  see :func:`~zero2core.strategies.marks.mark_muon`), and reduces their gradients by itself, at the end of a backward;
- ``clip_grad_norm_(optimizer, max_norm)``: returns stats with ``total_norm`` and ``as_dict()``;
- ``no_sync(model)``: a context manager.

Its clip knows the norm of its own gradients alone. So it is asked with an infinite bound, for the stats, and the joint
factor is applied here, to ``optimizer.dedicated_gradients()``: the reduced gradients that this rank owns, as live
tensors. (Where there is no such method: ``_reduced_grad`` of ``optimizer._dedicated_params``, as ``dmuon`` 0.2 has it.)

``build_optimizer(model, optimizer_class, *, muon, **settings)`` and ``flush(model)`` are used where it has them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

__all__ = ["DMuonPackage", "DMuonUnavailableError"]

_NAME = "dmuon"
_FUNCTIONS = ("dedicate", "clip_grad_norm_", "no_sync")


class DMuonUnavailableError(ImportError):
    """The package was asked for, and is not installed, does not import, or lacks a function."""


class DMuonPackage:
    """What a strategy uses of the package ``dmuon``."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    @classmethod
    def load(cls) -> Self:
        """Import it.

        Raises:
            DMuonUnavailableError: it cannot be used; says why.
        """
        try:
            module = importlib.import_module(_NAME)
        except ImportError as error:
            raise DMuonUnavailableError(
                f"runtime='dmuon' needs the package {_NAME}, which does not import here ({error}): install it, or use "
                "runtime='own', which needs nothing"
            ) from error
        missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
        if missing:
            where = getattr(module, "__file__", None) or "no file"
            raise DMuonUnavailableError(
                f"the package {_NAME} ({where}, version {getattr(module, '__version__', 'unknown')}) has no function "
                f"{', '.join(missing)}, and {', '.join(_FUNCTIONS)} are needed: install one that has them, or use "
                "runtime='own'"
            )
        return cls(module)

    def dedicate(self, model: nn.Module, **settings: Any) -> None:  # noqa: ANN401
        """Take the marked matrices out. Collective."""
        self._module.dedicate(model, **settings)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Its own."""
        return cast("AbstractContextManager[Any]", self._module.no_sync(model))

    def flush(self, model: nn.Module) -> None:
        """Its own; ``NotImplementedError`` where it has none."""
        if not callable(getattr(self._module, "flush", None)):
            raise NotImplementedError(
                f"the package {_NAME} has no flush(model): run the last backward outside no_sync, or use runtime='own'"
            )
        self._module.flush(model)

    def build_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        muon: Mapping[str, Any] | None,
        **settings: Any,  # noqa: ANN401
    ) -> torch.optim.Optimizer:
        """Its own; ``NotImplementedError`` where it has none."""
        if not callable(getattr(self._module, "build_optimizer", None)):
            raise NotImplementedError(
                f"the package {_NAME} has no build_optimizer: make its optimizer by its own documentation, and hand it "
                "to clip_grad_norm"
            )
        made = self._module.build_optimizer(model, optimizer_class, muon=muon, **settings)
        return cast("torch.optim.Optimizer", made)

    def stats(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What its clip measures; scales nothing. Collective."""
        return dict(self._module.clip_grad_norm_(optimizer, math.inf).as_dict())

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Reduced gradients that this rank owns; they are the package's own tensors.

        Raises:
            NotImplementedError: ``optimizer`` has them nowhere that is known.
        """
        offered = getattr(optimizer, "dedicated_gradients", None)
        if callable(offered):
            return list(offered())
        held = getattr(optimizer, "_dedicated_params", None)
        if held is None:
            raise NotImplementedError(
                f"the optimizer of {_NAME}, a {type(optimizer).__name__}, has no dedicated_gradients(), so that the "
                "joint norm cannot be had: use runtime='own'"
            )
        return [one._reduced_grad for one in held if getattr(one, "_reduced_grad", None) is not None]
