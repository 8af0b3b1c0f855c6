"""The compute weights a subject is given, laid so that a stray write shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.oracles.compare import FEW, dense, raw
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
        self._forms = [_form(weights) for weights in self.initial]
        self._guards = [guard for storage in self._storages for guard in (storage[:_GUARD], storage[-_GUARD:])]
        self._guards.append(self._frozen)
        self._few = device.type == "cpu" and scenario.numel <= FEW
        # Each guard's bytes, for a look at them without calls of torch's.
        self._edges = [raw(storage, 0, _GUARD) for storage in self._storages] if self._few else []
        self._untouched = raw(self._frozen, 0, self._frozen.numel()) if self._few else b""

    def problem(self) -> tuple[int | None, str] | None:
        """``(parameter index, what is wrong)`` when storage moved or something outside the weights was written."""
        for index, (parameter, address, form) in enumerate(
            zip(self.parameters, self._addresses, self._forms, strict=True)
        ):
            if parameter.data_ptr() != address:
                return index, "the parameter has another storage than at construction: references to it are stale"
            if not parameter.requires_grad:
                return index, "the parameter no longer requires a gradient: the next backward would pass it over"
            now = _form(parameter)
            if now != form:
                return index, f"the parameter became {now[0]}{list(now[1])} with strides {now[2]}"
        if self._few and self._edges_are_whole():
            return None
        if not bool((torch.cat(self._guards) == _GUARD_VALUE).all()):
            for number, guard in enumerate(self._guards[:-1]):
                if not bool((guard == _GUARD_VALUE).all()):
                    return number // 2, "memory next to the parameter was written: a copy ran over its edge"
            return None, "a frozen parameter that was never handed over was written"
        return None

    def _edges_are_whole(self) -> bool:
        for storage, edge in zip(self._storages, self._edges, strict=True):
            now = raw(storage, 0, storage.numel())
            if not (now.startswith(edge) and now.endswith(edge)):
                return False
        return raw(self._frozen, 0, self._frozen.numel()) == self._untouched

    def are(self, expected: Sequence[Tensor]) -> bool:
        """Whether the weights have the bytes of ``expected``, one tensor a parameter, and need no closer look.

        To be asked while :meth:`problem` finds none. Also False where this way of looking would be no quicker.
        """
        return self._few and all(
            dense(wanted, numel := parameter.numel())
            and wanted.dtype == parameter.dtype
            and raw(wanted, 0, numel) == raw(parameter, 0, numel)
            for wanted, parameter in zip(expected, self.parameters, strict=True)
        )

    def tensors(self) -> Sequence[Tensor]:
        """Everything this object keeps alive."""
        return [*self.parameters, *self.initial, *self._storages, self._frozen]


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _guarded(parameter: Parameter, seed: int, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(whole storage, the weights inside it)``."""
    dtype = DTYPES[parameter.dtype]
    numel = parameter.numel
    storage = torch.full((numel + 2 * _GUARD,), _GUARD_VALUE, dtype=dtype, device=device)
    weights = storage[_GUARD : _GUARD + numel]
    if numel:
        weights.copy_(torch.from_numpy(values.initial_weight(seed, index, numel, parameter.dtype)))
    return storage, weights.view(parameter.shape)
