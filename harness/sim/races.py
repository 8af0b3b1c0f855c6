"""Operations on buffers of pending collectives, caught as they happen: in runs that look closely, since it is slow."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from harness.sim import binding
from harness.sim.buffers import Buffers, Unseen
from harness.sim.frames import is_ours
from harness.sim.memory import Extents, has_memory

# Collectives, and the waits among them, look after their buffers themselves.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"})
# Ask a tensor for its form, or make another of that form. (What changes a tensor's own form has a tag.)
_FORM_PREFIXES = ("new_", "is_", "sym_")
_FORM = frozenset(
    {"record_stream", "requires_grad_", "retain_grad", "set_data", "size", "stride", "numel", "dim", "storage_offset",
     "output_nr", "_version", "result_type", "_has_compatible_shallow_copy_type", "_nested_tensor_size",
     "_is_zerotensor", "_debug_has_internal_overlap"}
)  # fmt: skip
_FORM_OF_OTHER = frozenset({"view_as", "expand_as", "reshape_as", "type_as", "to"})  # use only the form of `other`
_LIBRARY = f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}"
_PACKAGES = ("site-packages", "dist-packages")  # they lie inside the standard library's directory


class _Use(NamedTuple):
    """What one operation does with one tensor of pending buffers; ``given`` is what it was handed."""

    buffers: Buffers
    part: str
    number: int
    verb: str
    given: Tensor


class RaceDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of the thread that entered it, also those of autograd, and tells races with collectives.

    A race is to read or write an output of watched buffers, or to write an input. Making views and asking for a
    tensor's form is none, nor is work of another thread or inside :class:`harness.sim.buffers.Unseen`. Memory counts,
    not tensors: operations on views, on other tensors of the same memory, and on lists are seen. Not seen is what does
    not go through the dispatcher: ``tolist``, ``numpy`` and whatever NumPy then does, code in C++ with pointers, and an
    operator that writes what its schema says it only reads. The poison and the comparison of :class:`Buffers` remain.

    While it is on, ``torch.compile`` does not compile.
    """

    supports_higher_order_operators = True

    def __init__(self, report: Callable[[str], None]) -> None:
        """Be ready.

        Args:
            report: Called once for each buffers and each kind of race, with a sentence without its subject: ``"read
                the output of its 2nd collective, all_gather bf16[48], before wait(): aten.add at zero.py, line 40, in
                gather_params"``. The operation takes place all the same.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report
        self._watched: dict[int, Buffers] = {}
        self._told: set[tuple[int, str, str]] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch._dynamo, hundreds of modules, at the first operation: see below

    def watch(self, buffers: Buffers) -> None:
        """From now on, until :meth:`release`."""
        self._watched[id(buffers)] = buffers

    def release(self, buffers: Buffers) -> None:
        """No longer; also of buffers that are not watched. Before :meth:`Buffers.release`."""
        if self._watched.pop(id(buffers), None) is not None:
            self._told = {told for told in self._told if told[0] != id(buffers)}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (what the operation returns)
        """Let the operation happen, and report what it does with watched tensors."""
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # They wrap others, whose operations come here once they are unwrapped.
            return NotImplemented
        if not self._watched or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        with Unseen():
            uses = list(self._uses(func, args, kwargs))
        result = None
        try:
            result = func(*args, **kwargs)
        finally:
            for use in uses:
                if use.verb == "wrote" or not _view(result, use.given):
                    self._tell(use, func)
        return result

    def _uses(self, func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Use]:
        names = (argument.name for argument in func._schema.arguments)
        plan = _plan(func)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name not in plan:
                continue
            writes = plan[name] and not _spared(func, name, kwargs)
            for given in filter(has_memory, _tensors(value)):
                for buffers in self._watched.values():
                    for part, number in buffers.uses(given, writes):
                        yield _Use(buffers, part, number, "wrote" if writes else "read", given)

    def _tell(self, use: _Use, func: OpOverload[..., Any]) -> None:
        told = (id(use.buffers), use.verb, use.part)
        if told not in self._told:
            self._told.add(told)
            name = use.buffers.name(use.part, use.number)
            self._report(f"{use.verb} {name}, before wait(): {func._schema.name.replace('::', '.')}{_where()}")


# Neither the detector nor what it calls is code for torch.compile.
binding.leave_uncompiled(RaceDetector.__torch_dispatch__)


@functools.cache
def _plan(func: OpOverload[..., Any]) -> dict[str, bool]:
    """Of each argument whose elements matter, by name, whether it is written."""
    name = func._schema.name.rpartition("::")[2]
    if func.namespace in _COLLECTIVES or torch.Tag.inplace_view in func.tags:
        return {}
    if name in _FORM or name.endswith("_like") or (name.startswith(_FORM_PREFIXES) and name != "is_nonzero"):
        return {}
    return {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
        if not (argument.name == "other" and name in _FORM_OF_OTHER)
    }


def _spared(func: OpOverload[..., Any], name: str, kwargs: Mapping[str, Any]) -> bool:
    """A fused optimizer writes its gradients only to unscale them, whatever its schema says."""
    return name == "grads" and "_fused_" in func._schema.name and kwargs.get("grad_scale") is None


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _view(result: object, given: Tensor) -> bool:
    """Whether something an operation returned lies in the memory of what it was handed."""
    with Unseen():
        return Extents([given]).meet(Extents(filter(has_memory, _tensors(result))))


def _where() -> str:
    """Where the class is: the innermost frame of neither torch, the harness, nor the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (is_ours(file) or file.startswith("<frozen") or _in_library(file)):
            return f" at {Path(file).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ", called by torch itself"


def _in_library(file: str) -> bool:
    path = os.path.realpath(file)  # a virtual environment may have links to it
    return path.startswith(_LIBRARY) and not path[len(_LIBRARY) :].startswith(_PACKAGES)
