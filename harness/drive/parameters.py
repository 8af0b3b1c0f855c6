"""The compute weights a subject is given, laid so that a stray write shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.scenario import values
from harness.scenario.model import Parameter, Scenario

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Elements before and after each parameter in its storage. 32 of any dtype keep 64-byte alignment, so that a subject's
# kernels see what a plain allocation would give them.
_GUARD = 32
_GUARD_VALUE = 1.5


class ComputeWeights:
    """The trainable parameters of a scenario on one rank, each in a storage of its own between two guards.

    Beside them lies one frozen parameter that the subject is never given: like the guards, it must stay as it is.

    Attributes:
        parameters: one ``nn.Parameter`` per scenario parameter: contiguous, its own dtype, initial weights.
        initial: the same weights as detached copies, for the reference.
    """

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        self.parameters: list[nn.Parameter] = []
        self.initial: list[Tensor] = []
        self._storages: list[Tensor] = []
        for index, parameter in enumerate(scenario.parameters):
            storage, weights = _guarded(parameter, scenario.seed, index, device)
            self._storages.append(storage)
            self.initial.append(weights.detach().clone())
            self.parameters.append(nn.Parameter(weights))
        self._frozen = torch.full((17,), _GUARD_VALUE, dtype=torch.bfloat16, device=device)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._guards = [guard for storage in self._storages for guard in (storage[:_GUARD], storage[-_GUARD:])]

    def problem(self) -> tuple[int | None, str] | None:
        """``(parameter index, what is wrong)`` when storage moved or something outside the weights was written."""
        for index, (parameter, initial) in enumerate(zip(self.parameters, self.initial, strict=True)):
            if parameter.data_ptr() != self._addresses[index]:
                return index, "the parameter has another storage than at construction: references to it are stale"
            if not parameter.requires_grad:
                return index, "the parameter no longer requires a gradient: the next backward would pass it over"
            form = (parameter.dtype, parameter.shape, parameter.stride())
            if form != (initial.dtype, initial.shape, initial.stride()):
                return index, f"the parameter became {form[0]}{list(form[1])} with strides {form[2]}"
        if not bool((torch.cat(self._guards) == _GUARD_VALUE).all()):
            for number, guard in enumerate(self._guards):
                if not bool((guard == _GUARD_VALUE).all()):
                    return number // 2, "memory next to the parameter was written: a copy ran over its edge"
        if bool((self._frozen != _GUARD_VALUE).any()):
            return None, "a frozen parameter that was never handed over was written"
        return None

    def tensors(self) -> Sequence[Tensor]:
        """Everything this object keeps alive."""
        return [*self.parameters, *self.initial, *self._storages, self._frozen]


def _guarded(parameter: Parameter, seed: int, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(whole storage, the weights inside it)``."""
    dtype = DTYPES[parameter.dtype]
    numel = parameter.numel
    storage = torch.full((numel + 2 * _GUARD,), _GUARD_VALUE, dtype=dtype, device=device)
    weights = storage[_GUARD : _GUARD + numel]
    if numel:
        weights.copy_(torch.from_numpy(values.initial_weight(seed, index, numel, parameter.dtype)))
    return storage, weights.view(parameter.shape)
