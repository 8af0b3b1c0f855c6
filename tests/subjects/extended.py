"""Classes that take more than the contract's space: parameters of several dtypes, and of any strides."""

from __future__ import annotations

import torch

from zero2core import ZeroMaster


class TakesAll(ZeroMaster):
    """Right."""

    verify_extensions = ("dtypes", "strides")


class RoundsToFirstDtype(TakesAll):
    """Rounds every parameter to the dtype of the first one too."""

    @torch.no_grad()
    def gather_params(self) -> None:
        super().gather_params()
        for param in self.params:
            param.copy_(param.to(self.params[0].dtype))


class WritesInMemoryOrder(TakesAll):
    """Takes a transposed parameter's elements for its memory, in that order."""

    @torch.no_grad()
    def gather_params(self) -> None:
        super().gather_params()
        for param in self.params:
            flat = param.detach().reshape(-1).clone()
            param.detach().permute(list(range(param.dim()))[::-1]).reshape(-1).copy_(flat)


class MisspellsAnExtension(ZeroMaster):
    """Says that it takes something that nobody knows."""

    verify_extensions = ("dtypes", "stride")
