"""Classes, and sources of whole files, for tests of bad or unusual input; docstrings say what should come of each."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from harness.faults.museum.plain import PlainZero

NOT_A_CLASS = 3

# Sources of files that cannot be imported, to be written to disk by a test. All of them are bad input.
SYNTAX_ERROR_SOURCE = "class Subject:\n    def collect(self, more)\n        pass\n"
MISSING_MODULE_SOURCE = "import a_module_that_does_not_exist_anywhere\n\n\nclass Subject:\n    pass\n"
RAISES_AT_IMPORT_SOURCE = "raise RuntimeError('planted: not importable')\n"
EXITS_AT_IMPORT_SOURCE = "import sys\n\nsys.exit(0)\n"


class LacksDiscard:
    """Has every method but ``discard``: bad input, found before it is constructed."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        raise RuntimeError("planted: must not be constructed")

    def collect(self, more: bool) -> None:
        raise RuntimeError("planted: must not be called")

    def reduce_scatter(self) -> None:
        raise RuntimeError("planted: must not be called")

    def grad_sq_norm(self) -> Tensor:
        raise RuntimeError("planted: must not be called")

    def gather_params(self) -> None:
        raise RuntimeError("planted: must not be called")


class NoBucketArgument(PlainZero):
    """Its constructor does not take ``bucket``: bad input, found before it is constructed."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int) -> None:
        super().__init__(params, rank, world)


class NeedsFactor(PlainZero):
    """Needs a keyword ``factor`` (a number, also as text): bad input without, right with 1, ``gradient`` with 2."""

    def __init__(
        self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25, *, factor: float | str
    ) -> None:
        super().__init__(params, rank, world, bucket)
        self._factor = float(factor)

    def _reduce(self, flat: Tensor) -> Tensor:
        return super()._reduce(flat) * self._factor


class LacksSpills(PlainZero):
    """Has no attribute ``spills`` once it is constructed: bad input."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        del self.spills


class MasterIsNoTensor(PlainZero):
    """Its ``master`` is a list of lists: not what the interface asks for; one clear line, no traceback."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        super().__init__(params, rank, world, bucket)
        self.master = [[1.0]]  # type: ignore[assignment]


class NormIsFloat(PlainZero):
    """Returns the right norm as a Python float where a 0-dim tensor is promised: a violation of ``norm``."""

    def grad_sq_norm(self) -> Tensor:
        return float(super().grad_sq_norm())  # type: ignore[return-value]


class RefusesEverything(PlainZero):
    """NotImplementedError for every scenario: nothing was verified, which must not read as "holds"."""

    def __init__(self, params: list[nn.Parameter], rank: int, world: int, bucket: int = 2**25) -> None:
        raise NotImplementedError("planted: nothing is supported")


class PrintsMegabytes(PlainZero):
    """Right, but writes 2 MiB to stdout and to stderr in every ``collect``: must pass, and must not block."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        for stream in (sys.stdout, sys.stderr):
            stream.write(("y" * 127 + "\n") * 2**14)
            stream.flush()


class PrintsOddBytes(PlainZero):
    """Right, but writes bytes that are no UTF-8, terminal escapes and nul bytes: must pass, must not break a report."""

    def collect(self, more: bool) -> None:
        super().collect(more)
        sys.stdout.buffer.write(b"\xff\xfe\x00\x1b[31m\x1b]0;title\x07 verdict: holds\r\n")
        sys.stdout.flush()


class RaisesOddMessage(PlainZero):
    """Raises in the reduction with a message of odd characters and 1 MiB: ``progress`` at reduce, message cut."""

    def reduce_scatter(self) -> None:
        raise ValueError("\x1b[31m\x00\udcff\n" + "long " * 2**18)


class RaisesUnpicklable(PlainZero):
    """Raises an exception that cannot be pickled or printed: ``progress`` at reduce, not an error of the harness."""

    def reduce_scatter(self) -> None:
        class LocalError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("planted: no text")

            def __reduce__(self) -> str:
                raise RuntimeError("planted: no pickle")

        raise LocalError(torch.zeros(1))
