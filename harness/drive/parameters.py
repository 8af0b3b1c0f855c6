"""The compute weights a subject is given, laid so that a stray write shows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harness.oracles.compare import FEW, dense, raw
from harness.scenario import values
from harness.scenario.model import Parameter, Scenario, sources

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Elements before and after each parameter in its storage. 32 of any dtype keep 64-byte alignment, so that a subject's
# kernels see what a plain allocation would give them.
_GUARD = 32
_GUARD_VALUE = 1.5


class Pristine:
    """The trainable parameters of a scenario as they are at the start; to be copied from, never changed.

    Attributes:
        weights: one tensor a parameter, of its dtype and shape, between two guards in a storage of its own.
    """

    def __init__(self, scenario: Scenario, device: torch.device, version: int = 0) -> None:
        """``version``: of the weights, as in :class:`harness.scenario.model.Load`."""
        self.weights: list[Tensor] = []
        self.storages: list[Tensor] = []
        seed = values.weights_seed(scenario.seed, version)
        for index, parameter in enumerate(scenario.parameters):
            storage, weights = _guarded(parameter, seed, index, device)
            self.storages.append(storage)
            self.weights.append(weights)


class ComputeWeights:
    """The trainable parameters of a scenario on one rank, each in a storage of its own between two guards.

    Beside them lies one frozen parameter that the subject is never given: like the guards, it must stay as it is.

    Attributes:
        parameters: one ``nn.Parameter`` per scenario parameter, with its dtype, strides and initial weights.
        initial: the same weights as detached copies, for the reference.
        as_expected: the last look at them (:meth:`problem`) found all weights with the very bytes that :meth:`expect`
            was given, or that they started with, so that they need no closer look. Also False where there are many
            elements: looking in this way would be no quicker.
    """

    def __init__(self, scenario: Scenario, device: torch.device, pristine: Pristine | None = None) -> None:
        """``pristine``: what they are copied from, where that is there already."""
        self._scenario = scenario
        self._pristine = pristine or Pristine(scenario, device)
        self.initial = self._pristine.weights
        self._storages = [storage.clone() for storage in self._pristine.storages]
        self._listed = scenario.parameters
        self.parameters = [
            nn.Parameter(_inside(storage, listed)) for storage, listed in zip(self._storages, self._listed, strict=True)
        ]
        self._frozen = torch.full((17,), _GUARD_VALUE, dtype=torch.bfloat16, device=device)
        self._wanted = _forms(self.parameters)
        self._few = device.type == "cpu" and scenario.numel <= FEW
        self._edges = {storage.dtype: raw(storage, 0, _GUARD) for storage in self._storages if self._few}
        # Where everything lies and which bytes are expected there, for a look at it without calls of torch's.
        watched = [*self._storages, self._frozen] if self._few else []
        self._places = [(tensor.data_ptr(), tensor.nbytes) for tensor in watched]
        self._expected = self._bytes()
        self.as_expected = False

    def problem(self) -> tuple[int | None, str] | None:
        """``(parameter index, what is wrong)`` when storage moved or something outside the weights was written."""
        forms = _forms(self.parameters)
        if forms != self._wanted:
            for index, (now, wanted) in enumerate(zip(forms, self._wanted, strict=True)):
                address, requires_grad, dtype, shape, strides = now
                if address != wanted[0]:
                    return index, "the parameter has another storage than at construction: references to it are stale"
                if not requires_grad:
                    return index, "the parameter no longer requires a gradient: the next backward would pass it over"
                if now != wanted:
                    return index, f"the parameter became {dtype}{list(shape)} with strides {strides}"
        self.as_expected = self._few and self._bytes() == self._expected
        if self.as_expected:
            return None
        guards = [guard for storage in self._storages for guard in (storage[:_GUARD], storage[-_GUARD:])]
        if not bool((torch.cat([*guards, self._frozen]) == _GUARD_VALUE).all()):
            for number, guard in enumerate(guards):
                if not bool((guard == _GUARD_VALUE).all()):
                    return number // 2, "memory next to the parameter was written: a copy ran over its edge"
            return None, "a frozen parameter that was never handed over was written"
        return None

    def load(self, version: int) -> list[Tensor]:
        """Write other weights into the parameters, in place; returns these weights (not kept)."""
        loaded = Pristine(self._scenario, self._frozen.device, version).weights
        with torch.no_grad():
            for parameter, weights in zip(self.parameters, loaded, strict=True):
                parameter.copy_(weights)
        return loaded

    def expect(self, weights: Sequence[Tensor]) -> None:
        """From now on the weights should have the bytes of ``weights``, one tensor a parameter."""
        self.expect_bytes(self.laid_out(weights))

    def laid_out(self, weights: Sequence[Tensor]) -> bytes | None:
        """The bytes of all parameters with their guards, and the frozen one, with ``weights`` in them; None: many."""
        if not self._few:
            return None
        pieces = []
        for number, (storage, wanted) in enumerate(zip(self._storages, weights, strict=True)):
            numel = storage.numel() - 2 * _GUARD
            if self._listed[number].strides == "transposed" and wanted.shape == self._listed[number].shape:
                wanted = wanted.permute(_reversed(wanted.dim())).contiguous()
            if wanted.dtype != storage.dtype or not dense(wanted, numel):
                raise ValueError(f"weight {number} is not a dense tensor of {storage.dtype} and {numel} elements")
            edge = self._edges[storage.dtype]
            pieces += [edge, raw(wanted, 0, numel), edge]
        return b"".join([*pieces, self._expected[-self._frozen.nbytes :]])

    def expect_bytes(self, laid_out: bytes | None) -> None:
        """The same, given what :meth:`laid_out` of equal parameters gave."""
        if laid_out is not None:
            self._expected = laid_out

    def _bytes(self) -> bytes:
        """All parameters with their guards, and the frozen one."""
        return b"".join([ctypes.string_at(address, size) for address, size in self._places])

    def tensors(self) -> Sequence[Tensor]:
        """Everything this object keeps alive."""
        return [*self.parameters, *self._pristine.storages, *self._storages, self._frozen]


# Address, requires_grad, and what follows.
_Form = tuple[int, bool, torch.dtype, torch.Size, tuple[int, ...]]


def _forms(parameters: Sequence[Tensor]) -> list[_Form]:
    return [(one.data_ptr(), one.requires_grad, one.dtype, one.shape, one.stride()) for one in parameters]


def _guarded(parameter: Parameter, seed: int, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(whole storage, the weights inside it)``."""
    numel = parameter.numel
    whole = np.full(numel + 2 * _GUARD, _GUARD_VALUE, np.float32)
    drawn = values.initial_weight_of(seed, parameter, index)
    if parameter.strides == "transposed":
        drawn = drawn.reshape(parameter.shape).T.reshape(-1)
    whole[_GUARD : _GUARD + numel] = drawn
    # A copy: torch will not resize a storage that numpy made, and a subject may do with its weights what it likes.
    storage = torch.from_numpy(whole).to(device=device, dtype=DTYPES[parameter.dtype], copy=True)
    return storage, _inside(storage, parameter)


def _inside(storage: Tensor, parameter: Parameter) -> Tensor:
    """A view of what lies between the guards, with the parameter's shape and strides."""
    inside = storage[_GUARD : storage.numel() - _GUARD]
    if parameter.strides == "contiguous":
        return inside.view(parameter.shape)
    return inside.view(parameter.shape[::-1]).permute(_reversed(len(parameter.shape)))


def _reversed(num_dims: int) -> list[int]:
    return list(range(num_dims))[::-1]


def gradient_like(parameter: Tensor, drawn: NDArray[np.float32]) -> Tensor:
    """A gradient as autograd makes it: with the dtype, shape and strides of the parameter; ``drawn`` is row-major."""
    gradient = torch.empty_like(parameter, requires_grad=False)
    gradient.copy_(torch.from_numpy(drawn).view(parameter.shape))
    return gradient


def by_stream(scenario: Scenario, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What lies in the parameters, put back into the streams that their values come from, one tensor a stream.

    So it is the same for lists of parameters into which the same streams were cut. Where nothing is said of sources
    these are the parameters themselves.
    """
    if not any(parameter.sources for parameter in scenario.parameters):
        return tensors
    slices: list[tuple[int, int, int, Tensor]] = []
    for index, (parameter, tensor) in enumerate(zip(scenario.parameters, tensors, strict=True)):
        flat, at = tensor.detach().reshape(-1), 0
        for source in sources(parameter, index):
            length = source.stop - source.start
            slices.append((source.stream, source.start, len(slices), flat[at : at + length]))
            at += length
    found: dict[int, list[Tensor]] = {}
    for stream, _, _, values_ in sorted(slices, key=itemgetter(0, 1, 2)):
        found.setdefault(stream, []).append(values_)
    # Those of one stream may have several dtypes, in a case that somebody wrote.
    return [
        torch.cat(each) if len({one.dtype for one in each}) == 1 else torch.cat([one.float() for one in each])
        for each in found.values()
    ]
