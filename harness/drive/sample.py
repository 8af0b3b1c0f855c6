"""The second reference beside the first: a sample of elements of the unsharded trainer, followed in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.oracles.adamw_fp64 import AdamWFp64, choose
from harness.oracles.reference import UnshardedTrainer, moment_names
from harness.scenario.model import AdamW, Scenario


class FormulaSample:
    """Follows up to 64 elements of a reference trainer; call :meth:`step` before each of its steps."""

    def __init__(self, scenario: Scenario, reference: UnshardedTrainer, settings: AdamW | None = None) -> None:
        """``settings``: of the optimizer, where they are no longer those that the scenario begins with."""
        numels = [parameter.numel for parameter in scenario.parameters]
        self._names = [parameter.name for parameter in scenario.parameters]
        self._elements = [
            (index, torch.from_numpy(elements)) for index, elements in enumerate(choose(numels)) if elements.size
        ]
        starts = [0, *accumulate(numels)]
        self._flat_elements = np.concatenate([starts[index] + elements.numpy() for index, elements in self._elements])
        self._reference = reference
        self._num_moments = len(moment_names(scenario.optimizer))
        self._adamw = AdamWFp64(settings or scenario.optimizer, self._take(reference.master, reference.flat_master()))

    def step(self) -> None:
        """Take the gradients that the reference is about to use, and make the same step in fp64."""
        self._adamw.step(self._take(self._reference.gradients.__getitem__, self._reference.flat_gradient()))

    def set_rate(self, lr: float) -> None:
        """The reference's learning rate from the next step on."""
        self._adamw.set_rate(lr)

    def load(self) -> None:
        """The reference has loaded other weights."""
        self._adamw.load(self._take(self._reference.master, self._reference.flat_master()))

    def problem(self) -> str | None:
        """What lies outside the rounding bound after the reference's step; None when nothing does."""
        reference = self._reference
        flat = reference.flat_moments()
        violation = self._adamw.judge(
            self._take(reference.master, reference.flat_master()),
            *(
                self._take(partial(_moment, reference, place), None if flat is None else flat[place])
                for place in range(self._num_moments)
            ),
        ).violation
        if violation is None:
            return None
        position = violation.sample
        for index, elements in self._elements:
            if position < len(elements):
                where = f"{self._names[index]}[{int(elements[position])}]"
                return (
                    f"{violation.name} of {where} is {violation.actual!r}, fp64 gives {violation.expected!r} "
                    f"with a rounding bound of {violation.bound:.3g}"
                )
            position -= len(elements)
        raise AssertionError(f"position {violation.sample} lies outside the sample")

    def _take(self, values: Callable[[int], Tensor], flat: bytes | None) -> NDArray[np.float32]:
        """The sampled elements, from what is given by parameter or, where that is there, as all bytes end to end."""
        taken: NDArray[np.float32]
        if flat is not None:
            taken = np.frombuffer(flat, np.float32)[self._flat_elements]
            return taken
        parts = [values(index).detach().view(-1).cpu()[elements] for index, elements in self._elements]
        taken = torch.cat(parts).numpy()
        return taken


def _moment(reference: UnshardedTrainer, place: int, parameter: int) -> Tensor:
    return reference.moments(parameter)[place]
