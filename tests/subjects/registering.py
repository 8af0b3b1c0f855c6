"""A file that can be imported only once in a process."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.faults.museum.plain import PlainZero

_library = torch.library.Library("zero2_tests", "DEF")
_library.define("doubled(Tensor x) -> Tensor")
_library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")


class RegistersAnOperator(PlainZero):
    """Right: computes with an operator that this file registers with torch."""

    def _local_sq_norm(self, grad: Tensor) -> Tensor:
        return torch.ops.zero2_tests.doubled(super()._local_sq_norm(grad)) / 2
