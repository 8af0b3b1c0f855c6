"""Muon for the matrices that are marked, AdamW for all else, on fp32 masters: unsharded, and one tensor at a time.

[Note: masters]
A parameter that is no fp32 has an fp32 master in the state. The master is updated and then rounded once into the
parameter: updates too small to change the rounded weight add up. The master is taken from the weights at construction:
load weights before, or load the state of the optimizer too.

[Note: one tensor at a time]
:meth:`MuonAdamW.update` is the arithmetic and nothing else: whoever shards the optimizer calls it for the matrices and
the slices that a rank holds, with bits equal to those of :meth:`MuonAdamW.step`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from zero2core.errors import GradientStateError
from zero2core.muon.clip import GradClip, joint_squared_norm, squared_norm
from zero2core.muon.info import MuonParamInfo, info_problem
from zero2core.muon.newton_schulz import Coefficients
from zero2core.muon.update import (
    MUON_SETTINGS,
    SCALES,
    Scale,
    muon_settings,
    rate_and_decay,
    require_at_least_0,
    require_below_1,
    update_muon,
)

__all__ = ["SCALES", "MuonAdamW", "Scale"]

_MUON, _ADAMW = 0, 1
"""Index of each set in ``param_groups``."""

_SETTINGS = (MUON_SETTINGS, ("lr", "betas", "eps", "weight_decay"))
"""What each group has beside ``params``, ``names`` and ``use_muon``; schedulers may add to it."""


_log = logging.getLogger("zero2core")


class MuonAdamW(torch.optim.Optimizer):
    """Muon for parameters whose record says ``use_muon``, AdamW for the others; see the notes of this module.

    A parameter without gradient counts as one of zeros: decay and momentum move. A parameter may carry ``main_grad``,
    fp32 of its shape, filled by the caller; then its ``.grad`` must be None. Frozen parameters are left out.

    Args:
        named_params: (name, parameter) pairs, ``model.named_parameters()``.
        info: a record for each trainable parameter by name; others are ignored.
        lr, momentum, nesterov, weight_decay: of Muon; the momentum is ``momentum * m + (1 - momentum) * gradient``.
        ns_steps, ns_eps, ns_coefficients, ns_dtype: of :func:`~zero2core.muon.newton_schulz.newton_schulz`. With
            ``ns_eps=0`` a momentum of zeros gives nans.
        scale: name of a rule of :data:`SCALES`, applied to each block that is orthogonalised.
        adamw_lr: None: ``lr``.
        adamw_betas, adamw_eps, adamw_weight_decay: of AdamW.
        grad_clip: applied to all gradients of a step before any parameter moves.
        skip_missing: a parameter without gradient is left as it is, state and all.
        defer_state: create no state at construction, only where a step needs it.

    Attributes:
        param_groups: the Muon set and the other one, both always there; ``"names"`` beside ``"params"``.
        named: trainable parameters by name, in the given order.
        info: their records.
        state: of each parameter: ``master`` (unless it is fp32) and ``momentum``; or ``master``, ``exp_avg``,
            ``exp_avg_sq`` and ``step`` (int). Tensors are fp32, of the parameter's shape, contiguous.
        grad_clip, skip_missing: as given.

    Raises:
        TypeError: parameter groups, or parameters without names; a record or a clip that is none.
        ValueError: a setting out of range; a parameter (named) without record, whose record does not fit its shape,
            that is listed twice, or that is not dense and real floating-point; no trainable parameter at all.
    """

    _constructing = False  # of a copy too

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        info: Mapping[str, MuonParamInfo],
        *,
        lr: float = 2e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        ns_coefficients: Coefficients = "simple",
        ns_dtype: torch.dtype = torch.bfloat16,
        scale: Scale = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-9,
        adamw_weight_decay: float = 0.1,
        grad_clip: GradClip | None = None,
        skip_missing: bool = False,
        defer_state: bool = False,
    ) -> None:
        adamw_lr = lr if adamw_lr is None else adamw_lr
        muon = muon_settings(
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, ns_steps=ns_steps, ns_eps=ns_eps,
            ns_coefficients=ns_coefficients, ns_dtype=ns_dtype, scale=scale,
        )  # fmt: skip
        require_at_least_0(adamw_lr=adamw_lr, adamw_eps=adamw_eps, adamw_weight_decay=adamw_weight_decay)
        require_below_1(adamw_beta1=adamw_betas[0], adamw_beta2=adamw_betas[1])
        if grad_clip is not None and (isinstance(grad_clip, type) or not isinstance(grad_clip, GradClip)):
            raise TypeError(f"grad_clip={grad_clip!r} is no clip: pass ClipGradByGlobalNorm(max_norm), or None")

        params = _pairs(named_params)
        self.named = {name: param for name, param in params.items() if param.requires_grad}
        self.frozen = {name: param for name, param in params.items() if not param.requires_grad}
        self.info = _records(self.named, info)
        unknown = [name for name in info if name not in params]
        if unknown:
            # No error: it may be another name of a tied weight.
            _log.warning("MuonAdamW: info has records of no parameter, which say nothing: %s", ", ".join(unknown))
        self.grad_clip = grad_clip
        self.skip_missing = skip_missing
        self._constructing = True

        adamw = {"lr": adamw_lr, "betas": tuple(adamw_betas), "eps": adamw_eps, "weight_decay": adamw_weight_decay}
        groups = [self._group(use_muon=True, settings=muon), self._group(use_muon=False, settings=adamw)]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._constructing = False
        if not defer_state:
            for name, param in self.named.items():
                self.state[param] = self.init_state(name, param)

    def _group(self, *, use_muon: bool, settings: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in self.named if self.info[name].use_muon == use_muon]
        return {"params": [self.named[name] for name in names], "names": names, "use_muon": use_muon, **settings}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, by ``TypeError``: every parameter needs a name and a record, at construction."""
        if not self._constructing:
            raise TypeError("MuonAdamW takes no further parameter groups: pass all named parameters at construction")
        super().add_param_group(param_group)

    def init_state(self, name: str, weight: Tensor) -> dict[str, Any]:
        """What :meth:`update` needs of ``name`` before its first step.

        Args:
            name: of a parameter.
            weight: its weights, in its dtype: the whole tensor or, where it is element-wise, any part of it.

        Raises:
            ValueError: a part of a tensor that is orthogonalised whole.
        """
        state: dict[str, Any] = {}
        if weight.dtype != torch.float32:
            state["master"] = weight.detach().to(torch.float32, memory_format=torch.contiguous_format)
        if self.info[name].use_muon:
            if weight.shape != self.named[name].shape:
                raise ValueError(
                    f"{name} is orthogonalised as a whole, {tuple(self.named[name].shape)}, but its state was asked "
                    f"for with shape {tuple(weight.shape)}"
                )
            return state | {"momentum": _zeros_like(weight)}
        return state | {"exp_avg": _zeros_like(weight), "exp_avg_sq": _zeros_like(weight), "step": 0}

    @torch.no_grad()
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        """One step of one whole tensor or, where it is element-wise, of any part of it, in place.

        Clips nothing and rounds nothing.

        Args:
            name: of the parameter; its record and its group say how.
            master: fp32, becomes the new weights.
            gradient: fp32, same shape, left as it is.
            state: of :meth:`init_state`, same shape; ``step`` is counted here.
        """
        info = self.info[name]
        group = self.param_groups[_MUON if info.use_muon else _ADAMW]
        if info.use_muon:
            update_muon(master, gradient, state["momentum"], info, group)
        else:
            _update_adamw(master, gradient, state, group, *rate_and_decay(info, group))

    @torch.no_grad()
    def refresh_from_weights(self) -> None:
        """Rebuild the masters from the weights, after they were changed from outside; moments stay."""
        for param in self.named.values():
            if "master" in self.state.get(param, {}):
                self.state[param]["master"].copy_(param)

    def require_same_trainable(self) -> None:
        """Raise ``GradientStateError`` naming a parameter that was frozen or thawed since construction."""
        for name, param in (self.named | self.frozen).items():
            if param.requires_grad != (name in self.named):
                now, then = ("trainable", "frozen") if param.requires_grad else ("frozen", "trainable")
                raise GradientStateError(
                    f"{name} is {now} but was {then} when the optimizer was constructed: construct another one"
                )

    def waiting(self, name: str) -> Tensor | None:
        """The gradient that waits for ``name``, in ``main_grad`` or ``.grad``, as it is; None when there is none.

        Raises:
            ValueError: both are there, ``main_grad`` is not fp32 of the parameter's shape, ``.grad`` is sparse.
        """
        param = self.named[name]
        main_grad: Tensor | None = getattr(param, "main_grad", None)
        if main_grad is None:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ValueError(
                    f"{name} has a gradient of layout {param.grad.layout}: only dense ones can be used. Embeddings "
                    "give those with sparse=False"
                )
            return None if param.grad is None else param.grad.detach()
        if param.grad is not None:
            raise ValueError(f"{name} has main_grad and .grad: one of them would be lost. Set .grad to None")
        if main_grad.dtype != torch.float32 or main_grad.shape != param.shape:
            raise ValueError(
                f"{name} has main_grad {main_grad.dtype} {tuple(main_grad.shape)}: "
                f"must be torch.float32 {tuple(param.shape)}"
            )
        return main_grad.detach()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of all parameters from the gradients that wait; they stay. Returns what ``closure`` does.

        Raises:
            GradientStateError: a parameter was frozen or thawed since construction. Nothing has changed.
            ValueError: a gradient that cannot be used, see :meth:`waiting`. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.require_same_trainable()
        gradients: dict[str, Tensor] = {}
        for name, param in self.named.items():
            gradient = self.waiting(name)
            if gradient is not None:
                gradients[name] = gradient.to(torch.float32)
            elif not self.skip_missing:
                gradients[name] = _zeros_like(param)
        self._clip(gradients)
        for name in list(gradients):
            param = self.named[name]
            if param not in self.state:
                self.state[param] = self.init_state(name, param)
            state = self.state[param]
            self.update(name, state.get("master", param.detach()), gradients.pop(name), state)
            if "master" in state:
                param.copy_(state["master"])
        return loss

    def _clip(self, gradients: dict[str, Tensor]) -> None:
        """Replace ``gradients`` by clipped ones; the tensors in it are left as they are."""
        if self.grad_clip is None:
            return
        names = list(gradients)
        device = next(iter(self.named.values())).device
        sq_norms = torch.zeros(len(names), dtype=torch.float64, device=device)
        for index, gradient in enumerate(gradients.values()):
            sq_norms[index] = squared_norm(gradient)
        need_clip = [self.info[name].need_clip for name in names]
        total = joint_squared_norm(sq_norms, need_clip)
        factors = self.grad_clip.factors(names, sq_norms, total, need_clip).to(torch.float32)
        for name, factor in zip(names, factors, strict=True):
            gradients[name] = gradients[name] * factor.to(gradients[name].device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; a ``main_grad`` stays and is filled with zeros."""
        super().zero_grad(set_to_none)
        for param in self.named.values():
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None:
                main_grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """As every ``torch.optim.Optimizer``'s, and ``grad_clip``: the clip's state, where there is one."""
        saved = super().state_dict()
        return saved if self.grad_clip is None else saved | {"grad_clip": self.grad_clip.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``, of an optimizer of the same parameters; it stays as it is, tensors are copied.

        Unlike torch's own, keeps fp32 what is fp32, matches parameters by name, whatever their order, and changes
        nothing when it raises. Settings of the groups, the learning rate too, become those of ``state_dict``.

        Raises:
            ValueError: parameters, state, shapes, or settings of a group are missing or others than this optimizer's.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(f"the saved state has {len(saved_groups)} parameter groups, not two: another optimizer's")
        states: dict[str, dict[str, Any]] = {}
        groups = []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            _require_same_names(group, saved)
            kept = {key: group[key] for key in ("params", "names", "use_muon")}
            groups.append({**group, **copy.deepcopy(saved), **kept})
            for name, index in zip(saved["names"], saved["params"], strict=True):
                if index in state_dict["state"] or self.named[name] in self.state:
                    states[name] = self._loaded(name, state_dict["state"].get(index, {}))
        if self.grad_clip is not None:
            self.grad_clip.load_state_dict(state_dict.get("grad_clip", {}))
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        for name, state in states.items():
            self.state[self.named[name]] = state
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded(self, name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``saved``, checked to be the state of ``name``."""
        param = self.named[name]
        expected = {"momentum"} if self.info[name].use_muon else {"exp_avg", "exp_avg_sq", "step"}
        if param.dtype != torch.float32:
            expected.add("master")
        if set(saved) != expected:
            raise ValueError(f"the saved state of {name} has {sorted(saved)}, expected {sorted(expected)}")
        state: dict[str, Any] = {}
        for key, value in saved.items():
            if key == "step":
                state[key] = int(value)
                continue
            if value.shape != param.shape:
                raise ValueError(f"the saved {key} of {name} is {tuple(value.shape)}, expected {tuple(param.shape)}")
            state[key] = _zeros_like(param).copy_(value)
        return state

    def __getstate__(self) -> dict[str, Any]:
        own = ("named", "info", "grad_clip", "skip_missing", "frozen")
        return super().__getstate__() | {key: self.__dict__[key] for key in own}


def _update_adamw(
    master: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any], lr: float, weight_decay: float
) -> None:
    """The operations of ``torch.optim.AdamW(foreach=False, fused=False)``, in their order: equal bits."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    step, mean, mean_sq = state["step"], state["exp_avg"], state["exp_avg_sq"]
    master.mul_(1 - lr * weight_decay)
    mean.lerp_(gradient, 1 - beta1)
    mean_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (mean_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    master.addcdiv_(mean, denominator, value=-(lr / (1 - beta1**step)))


def _zeros_like(weight: Tensor) -> Tensor:
    """fp32, contiguous, whatever the strides of ``weight``."""
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _pairs(named_params: Iterable[Any]) -> dict[str, nn.Parameter]:
    """``named_params`` by name, checked."""
    if isinstance(named_params, (Mapping, Tensor)):
        raise TypeError(f"named_params is a {type(named_params).__name__}: pass model.named_parameters()")
    params: dict[str, nn.Parameter] = {}
    names: dict[int, str] = {}
    for item in named_params:
        pair = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
        if not (isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            kind = "a parameter group" if isinstance(item, dict) else f"a {type(item).__name__}"
            raise TypeError(f"named_params has {kind}: needs (name, parameter) pairs, pass model.named_parameters()")
        name, param = item
        if name in params:
            raise ValueError(f"{name} is the name of two parameters: each needs its own")
        if id(param) in names:
            raise ValueError(f"{name} is {names[id(param)]} again: list tied weights once")
        params[name], names[id(param)] = param, name
    return params


def _records(named: Mapping[str, nn.Parameter], info: Mapping[str, MuonParamInfo]) -> dict[str, MuonParamInfo]:
    """The record of each parameter, checked against it."""
    if not named:
        raise ValueError("named_params has no trainable parameter: there is nothing to train")
    if not isinstance(info, Mapping):
        raise TypeError(f"info is a {type(info).__name__}: pass a dict from names to MuonParamInfo")
    for name, param in named.items():
        if param.layout is not torch.strided or not param.dtype.is_floating_point:
            raise ValueError(f"{name} is {param.layout}, {param.dtype}: must be dense and real floating-point")
        if name not in info:
            raise ValueError(f"{name} has no record in info: add info[{name!r}] = MuonParamInfo(use_muon=...)")
        if not isinstance(info[name], MuonParamInfo):
            raise TypeError(f"info[{name!r}] is a {type(info[name]).__name__}: must be a MuonParamInfo")
        problem = info_problem(name, param.shape, info[name])
        if problem:
            raise ValueError(problem)
    return {name: info[name] for name in named}


def _require_same_names(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    kind = "Muon" if group["use_muon"] else "AdamW"
    settings = _SETTINGS[_MUON if group["use_muon"] else _ADAMW]
    missing = [key for key in ("params", "names", *settings) if key not in saved]
    if missing:
        raise ValueError(f"the saved group of {kind} has no {', '.join(missing)}: was it saved by MuonAdamW?")
    if len(saved["names"]) != len(saved["params"]):
        raise ValueError(f"the saved group of {kind} has {len(saved['names'])} names of {len(saved['params'])} params")
    for name in sorted({*group["names"]} ^ {*saved["names"]}):
        where = "the saved state" if name in saved["names"] else "this optimizer"
        raise ValueError(f"{name} is of the {kind} set in {where} only: construct the optimizer that was saved")
