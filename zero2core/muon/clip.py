"""Gradient clipping from norms alone: what to multiply each gradient by. Nothing here communicates.

Norms come squared, in fp64, of whole parameters; whoever holds gradients in pieces adds up the squares first.
Infinite or nan norms are the caller's to look for. Passed on, they give factors of 0 or nan: the infinite elements of a
gradient become nan, and so do all weights of a model whose joint norm is nan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["ClipGradByAdaptiveNorm", "ClipGradByGlobalNorm", "GradClip", "joint_squared_norm", "squared_norm"]


@runtime_checkable
class GradClip(Protocol):
    """What an optimizer asks of a clip."""

    def factors(
        self, names: Sequence[str], sq_norms: Tensor, total_sq_norm: Tensor, need_clip: Sequence[bool]
    ) -> Tensor:
        """What each gradient is to be multiplied by, fp64 ``[P]``; called once a step, it may move the clip's state.

        Args:
            names: of the ``P`` parameters that have a gradient.
            sq_norms: fp64 ``[P]``: squared norm of each parameter's whole gradient, before scaling.
            total_sq_norm: fp64, 0-dim: joint squared norm of all parameters with ``need_clip``, over all ranks.
            need_clip: which are clipped; the factor of the others is 1.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next call depends on."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` said."""
        ...


_CHUNK = 2**18  # elements that are squared at a time: no fp64 copy of a whole gradient


def squared_norm(gradient: Tensor) -> Tensor:
    """Sum of the squares of an fp32 ``gradient``: fp64, 0-dim. Squares of fp32 are exact in fp64, their sum may not be.

    Raises:
        TypeError: another dtype; norms are those of the masters' gradients.
    """
    if gradient.dtype != torch.float32:
        raise TypeError(f"a gradient to be clipped has dtype {gradient.dtype}: must be torch.float32, convert it first")
    flat = gradient.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for start in range(0, flat.numel(), _CHUNK):
        total += flat[start : start + _CHUNK].double().square_().sum()
    return total


def joint_squared_norm(sq_norms: Tensor, need_clip: Sequence[bool]) -> Tensor:
    """Sum of those of ``sq_norms`` (fp64 ``[P]``) that are clipped, in the order of the list: fp64, 0-dim."""
    return sq_norms[_mask(need_clip, sq_norms)].sum()


class ClipGradByGlobalNorm:
    """Scale all gradients alike where their joint norm exceeds ``max_norm``; ``ValueError`` unless that is positive."""

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: must be positive")
        self.max_norm = float(max_norm)

    def factors(
        self, names: Sequence[str], sq_norms: Tensor, total_sq_norm: Tensor, need_clip: Sequence[bool]
    ) -> Tensor:
        """See :class:`GradClip`; ``max_norm / (norm + 1e-6)``, never above 1."""
        _require_norms(names, sq_norms, total_sq_norm, need_clip)
        factor = (self.max_norm / (total_sq_norm.sqrt() + 1e-6)).clamp(max=1.0)
        return torch.where(_mask(need_clip, sq_norms), factor, torch.ones_like(sq_norms))

    def state_dict(self) -> dict[str, Any]:
        """Empty: no call depends on those before."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what is another clip's, by ``ValueError``."""
        _require_keys("ClipGradByGlobalNorm", state_dict, set())


class ClipGradByAdaptiveNorm:
    """Scale each gradient on its own where its norm outgrows what it has been (AdaGC, arXiv 2502.11034).

    Each parameter has a tracked norm, started at the first norm seen. In the first ``warmup_steps`` calls all gradients
    are scaled alike, to a joint norm of at most 1, and the tracked norm is the least seen. Later a gradient is scaled
    to ``ratio`` times its tracked norm where it exceeds that, and the tracked norm becomes
    ``beta * tracked + (1 - beta) * norm``, with the norm after scaling.

    A norm of 0 neither starts nor moves a tracked one: a parameter without a gradient while warming up would otherwise
    have all of its later ones scaled to 0. (The paper does not say.)

    An infinite norm leaves a tracked norm finite once warm, a nan makes it nan for good.

    Args:
        ratio: by which a norm may exceed the tracked one.
        warmup_steps: calls of the first kind; the first call is step 1.
        beta: of the tracked norm.
        eps: added to the joint norm while warming up.

    Raises:
        ValueError: ``ratio`` not positive, ``warmup_steps`` or ``eps`` negative, ``beta`` outside [0, 1].
    """

    def __init__(self, ratio: float = 1.04, warmup_steps: int = 100, beta: float = 0.99, eps: float = 1e-8) -> None:
        if not (ratio > 0 and warmup_steps >= 0 and 0 <= beta <= 1 and eps >= 0):
            raise ValueError(
                f"ratio={ratio}, warmup_steps={warmup_steps}, beta={beta}, eps={eps}: "
                "must be above 0, at least 0, in [0, 1], at least 0"
            )
        self.ratio, self.warmup_steps, self.beta, self.eps = float(ratio), warmup_steps, float(beta), float(eps)
        self._step = 0
        self._tracked: dict[str, Tensor] = {}  # fp64, 0-dim

    def factors(
        self, names: Sequence[str], sq_norms: Tensor, total_sq_norm: Tensor, need_clip: Sequence[bool]
    ) -> Tensor:
        """See :class:`GradClip`; counts the step and moves the tracked norms of those that are clipped."""
        _require_norms(names, sq_norms, total_sq_norm, need_clip)
        self._step += 1
        clipped = _mask(need_clip, sq_norms)
        factors = torch.ones_like(sq_norms)
        names = [name for name, needed in zip(names, need_clip, strict=True) if needed]
        if not names:
            return factors
        norms = sq_norms[clipped].sqrt()
        nothing = torch.zeros((), dtype=norms.dtype)
        before = torch.stack([self._tracked.get(name, nothing).to(norms.device) for name in names])
        tracked = torch.where(before == 0, norms, before)
        if self._step <= self.warmup_steps:
            factors[clipped] = (1 / (total_sq_norm.sqrt() + self.eps)).clamp(max=1.0)
            tracked = torch.minimum(tracked, norms)
        else:
            most = self.ratio * tracked
            exceeds = norms > most
            factors[clipped] = torch.where(exceeds, most / norms, torch.ones_like(norms))
            tracked = self.beta * tracked + (1 - self.beta) * torch.where(exceeds, most, norms)
        self._tracked.update(zip(names, torch.where(norms == 0, before, tracked), strict=True))
        return factors

    def state_dict(self) -> dict[str, Any]:
        """``step``: calls so far; ``norms``: tracked norm of each name, fp64 as a float."""
        return {"step": self._step, "norms": {name: norm.item() for name, norm in self._tracked.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``, which stays as it is; ``ValueError`` when it is another clip's."""
        _require_keys("ClipGradByAdaptiveNorm", state_dict, {"step", "norms"})
        norms = {name: torch.tensor(float(norm), dtype=torch.float64) for name, norm in state_dict["norms"].items()}
        self._step, self._tracked = int(state_dict["step"]), norms


def _mask(need_clip: Sequence[bool], like: Tensor) -> Tensor:
    return torch.tensor(need_clip, dtype=torch.bool, device=like.device)


def _require_norms(names: Sequence[str], sq_norms: Tensor, total: Tensor, need_clip: Sequence[bool]) -> None:
    if sq_norms.dtype != torch.float64 or total.dtype != torch.float64:
        raise TypeError(f"squared norms have dtypes {sq_norms.dtype}, {total.dtype}: both must be torch.float64")
    if tuple(sq_norms.shape) != (len(names),) or len(need_clip) != len(names) or total.dim():
        raise ValueError(
            f"{len(names)} names, {len(need_clip)} of need_clip, squared norms {tuple(sq_norms.shape)}, joint "
            f"{tuple(total.shape)}: need one of each for each name, and a joint one without dimensions"
        )


def _require_keys(clip: str, state_dict: Mapping[str, Any], expected: set[str]) -> None:
    if set(state_dict) != expected:
        raise ValueError(
            f"state of {clip} has keys {sorted(state_dict)}, expected {sorted(expected)}: "
            "it was saved with another clip, or none"
        )
