"""The optimizer of a model with dedicated matrices: Muon where this rank owns one, any other optimizer for the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from zero2core.muon.update import MUON_SETTINGS, muon_settings, update_muon
from zero2core.strategies.dedicated_runtime import DedicatedRuntime

__all__ = ["DedicatedOptimizer"]

_VERSION = 1
_KEYS = {"version", "inner", "muon", "dedicated"}


class DedicatedOptimizer(torch.optim.Optimizer):
    """Muon on the matrices that this rank owns, ``optimizer_class`` on ``others``; see ``build_optimizer``.

    A matrix of which no rank had a gradient is left as it is, state and all, as torch's own optimizers do. The
    arithmetic is that of :class:`~zero2core.muon.MuonAdamW`, bit for bit.

    ``others`` are groups of parameters, as ``optimizer_class`` takes them.

    Attributes:
        runtime: of the dedicated matrices.
        inner: of ``others``; None where there are none.
        param_groups: those of ``inner``, then one of Muon, without ``params``, with ``names`` of all dedicated
            matrices. Schedulers set ``lr`` there.

    Raises:
        TypeError: an unknown setting of Muon.
        ValueError: a setting of Muon that is out of range, or what ``optimizer_class`` refuses.
    """

    _constructing = False

    def __init__(
        self,
        runtime: DedicatedRuntime,
        others: Sequence[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        muon: Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        unknown = [key for key in muon or () if key not in MUON_SETTINGS]
        if unknown:
            raise TypeError(f"muon has no setting {', '.join(map(repr, unknown))}: it has {', '.join(MUON_SETTINGS)}")
        group = {"params": [], "names": list(runtime.parameters), "use_muon": True, **muon_settings(**(muon or {}))}
        self.runtime = runtime
        self.inner = optimizer_class(list(others), **settings) if others else None
        groups = [] if self.inner is None else self.inner.param_groups
        self._constructing = True
        # The group objects are shared: who sets a learning rate here sets it for the inner optimizer.
        super().__init__([*groups, group], {} if self.inner is None else self.inner.defaults)
        self._constructing = False
        self._share_state()
        for parameter in runtime.parameters.values():
            if parameter.weight is not None:
                parameter.momentum = torch.zeros_like(parameter.weight)

    def _share_state(self) -> None:
        if self.inner is not None:
            self.state = self.inner.state
            self.param_groups = [*self.inner.param_groups, self.param_groups[-1]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, by ``TypeError``: who owns what is settled at construction."""
        if not self._constructing:
            raise TypeError("DedicatedOptimizer takes no further parameter groups: build it when the model is complete")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of everything; call it on every rank. Returns what ``closure`` does.

        Raises:
            GradientStateError: gradients of dedicated matrices wait to be reduced. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runtime.require_reduced("step")
        if self.inner is not None:
            self.inner.step()
        for parameter in self.runtime.parameters.values():
            if parameter.weight is not None and parameter.grad is not None and parameter.momentum is not None:
                group = self.param_groups[-1]
                update_muon(parameter.weight, parameter.grad, parameter.momentum, parameter.info, group)
        self.runtime.weights_changed()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, of dedicated matrices also those that are not reduced (which become None in any case)."""
        if self.inner is not None:
            self.inner.zero_grad(set_to_none)
        self.runtime.clear_gradients()

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds: ``inner``'s state, Muon's settings, and masters and momenta of what it owns, by name.

        Tensors are the optimizer's own, no copies.
        """
        group = {key: value for key, value in self.param_groups[-1].items() if key not in ("params", "names")}
        return {
            "version": _VERSION,
            "inner": None if self.inner is None else self.inner.state_dict(),
            "muon": group,
            "dedicated": {
                parameter.name: {"master": parameter.weight, "momentum": parameter.momentum}
                for parameter in self.runtime.parameters.values()
                if parameter.is_owner
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on the same rank of as many ranks; call it on every rank.

        Tensors are copied. Weights of dedicated matrices become the masters of ``state_dict``.

        Raises:
            ValueError: it was saved by another optimizer, or holds other matrices. Nothing has changed.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != _KEYS or state_dict["version"] != _VERSION:
            got = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ValueError(f"the saved state has {got}, expected {sorted(_KEYS)} of version {_VERSION}")
        if (state_dict["inner"] is None) != (self.inner is None):
            raise ValueError(
                "the saved state and this optimizer are not of the same parameters beside the dedicated ones"
            )
        self._require_loadable(state_dict["muon"], state_dict["dedicated"])
        if self.inner is not None:
            self.inner.load_state_dict(state_dict["inner"])
            self._share_state()
        self.param_groups[-1].update(copy.deepcopy(dict(state_dict["muon"])))
        for name, saved in state_dict["dedicated"].items():
            parameter = self.runtime.parameters[name]
            if parameter.weight is not None and parameter.momentum is not None:
                parameter.weight.copy_(saved["master"])
                parameter.momentum.copy_(saved["momentum"])
        self.runtime.weights_changed()

    def _require_loadable(self, group: Mapping[str, Any], dedicated: Mapping[str, Mapping[str, Tensor]]) -> None:
        missing = [key for key in MUON_SETTINGS if key not in group]
        if missing:
            raise ValueError(f"the saved settings of Muon lack {', '.join(missing)}")
        owned = {name: parameter for name, parameter in self.runtime.parameters.items() if parameter.is_owner}
        for name in sorted({*owned} ^ {*dedicated}):
            where = "was owned by this rank in the saved state" if name in dedicated else "is owned by this rank now"
            raise ValueError(
                f"{name} {where}, and not in the other: load on the same rank of as many ranks, or use full_state and "
                "load_full_state for the weights"
            )
        for name, parameter in owned.items():
            for key in ("master", "momentum"):
                if key not in dedicated[name] or dedicated[name][key].shape != parameter.shape:
                    raise ValueError(f"the saved {key} of {name} is missing or not of shape {tuple(parameter.shape)}")
