"""What an asynchronous collective holds from its launch to its wait: snapshots, poison, and what became of them.

Nothing here leaves a trace: no operation shows to autograd, version counters, or modes that are on, so that a class
cannot tell it from a backend that works on the bare memory. Strided tensors on any device; not sparse ones, and not
subclasses that only wrap others (DTensor), which no process group is handed either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.sim import binding
from harness.sim.memory import Extents, share

# Integers of a floating dtype's size, and in them its nan. A signaling one where there is one: whatever is computed
# from it is a quiet nan, so that also a multiplication in place changes the bits. An integer dtype's poison is a
# number nobody uses; as an index it is out of range (the unsigned ones are viewed as signed). A bool has none.
_POISON: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
    torch.float8_e5m2: (torch.uint8, 0x7D),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e8m0fnu: (torch.uint8, 0xFF),
    torch.float8_e5m2fnuz: (torch.uint8, 0x80),
    torch.float8_e4m3fnuz: (torch.uint8, 0x80),
    torch.uint8: (torch.uint8, 0xA5),
    torch.int8: (torch.int8, 0xA5 - 2**8),
    torch.int16: (torch.int16, 0xA5A5 - 2**16),
    torch.uint16: (torch.int16, 0xA5A5 - 2**16),
    torch.int32: (torch.int32, 0xA5A5A5A5 - 2**32),
    torch.uint32: (torch.int32, 0xA5A5A5A5 - 2**32),
    torch.int64: (torch.int64, 0xA5A5A5A5A5A5A5A5 - 2**64),
    torch.uint64: (torch.int64, 0xA5A5A5A5A5A5A5A5 - 2**64),
}
# How the poison of what the harness compares may look there: as it is, quiet, and a bf16 that was widened to fp32.
_SIGHTINGS = frozenset(
    f"0x{bits | quiet:0{digits}x}"
    for bits, digits, quiets in ((0x7FA5A5A5, 8, (0, 1 << 22)), (0x7FA5, 4, (0, 1 << 6)), (0x7FA50000, 8, (0, 1 << 22)))
    for quiet in quiets
)
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


class Unseen:
    """A context in which tensors are worked on unseen: by no mode, no subclass, and in no inference mode.

    Whatever the simulated world does with a class's tensors on the class's own thread belongs in one; on data taken
    with ``.data``, so that autograd and version counters do not see it either.
    """

    __slots__ = ("_dispatch", "_function", "_inference")

    def __enter__(self) -> None:
        self._function = binding.no_torch_function()
        self._function.__enter__()
        self._dispatch = binding.no_torch_dispatch()
        self._dispatch.__enter__()
        self._inference: Any = None
        if torch.is_inference_mode_enabled():  # what is made in one cannot be used everywhere later
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inference is not None:
            self._inference.__exit__(kind, error, trace)
        self._dispatch.__exit__(kind, error, trace)
        self._function.__exit__(kind, error, trace)


def is_poison(bits: str) -> bool:
    """Whether an element, ``"0x7fa5a5a5"``, is what an output holds until its wait, or was computed from that."""
    return bits in _SIGHTINGS


def deliver(values: Tensor, target: Tensor) -> None:
    """Write values into a tensor of as many elements, unseen: what a backend does with its result.

    Nothing is written where the memory was freed meanwhile (:meth:`Buffers.problem` says so).
    """
    with Unseen():
        data = target.data
        if data.untyped_storage().nbytes():
            data.copy_(values.data.reshape(data.shape))


def settle(tensors: Iterable[Tensor]) -> None:
    """Have the GPUs of these tensors finish what is queued: what one rank queued on its stream another's will read."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


class _Held(NamedTuple):
    """One tensor of the class's that must stay as it is.

    Attributes:
        part: ``"input"`` or ``"output"``; ``number`` in their list.
        own: The tensor as the class has it, which may be given other memory.
        data: The same elements, apart from autograd.
        address: Where its elements are.
        expected: What it holds; None where that is all poison.
    """

    part: str
    number: int
    own: Tensor
    data: Tensor
    address: int
    expected: Tensor | None

    def moved(self) -> bool:
        elsewhere = self.data.data_ptr() != self.address or self.own.data_ptr() != self.address
        return elsewhere and self.data.numel() > 0

    def wanted(self) -> Tensor:
        """Its bits as they should be."""
        if self.expected is not None:
            return _bits(self.expected)
        return _pattern(self.data.dtype, self.data.device, self.data.shape)

    def changed(self) -> bool:
        return not torch.equal(_bits(self.data), self.wanted())


class Buffers:
    """The tensors of one asynchronous request on one rank, from launch to wait.

    Until the wait the class may neither read nor write an output, nor write an input. Outputs are filled with poison
    (nan; in integers an unlikely number; bool is left as it is), and all is compared at the wait. Not seen: a read
    whose result is thrown away or does not show the poison, a write of the very bits that were there. For more, see
    :class:`harness.sim.races.RaceDetector`.

    Attributes:
        inputs: What the inputs held at the launch: contiguous copies of the same shapes, to compute from.
        sources: The inputs themselves, apart from autograd.
        outputs: Likewise the outputs.
        in_place: As given.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        in_place: bool = False,
    ) -> None:
        """Take snapshots of the inputs, then poison the outputs.

        Args:
            what: The collective in words, or what finds them: mostly nobody asks.
            inputs: What this rank contributes. Not poisoned, except as ``in_place`` says.
            outputs: What this rank gets results in; on ranks that get none, such as the root of a broadcast, empty.
            in_place: What is to happen where an output overlaps an input. True: the result takes the input's place
                (all_reduce, reduce on its root, broadcast on all but its root, a reduce-scatter into its own input),
                so that it is an output like any other. False: it holds there what it is to hold afterwards anyway
                (all_gather from a piece of its own output), keeps it, and may be read, but not written.
        """
        self._what = what
        self.in_place = in_place
        with Unseen():
            self.sources = sources = [tensor.data for tensor in inputs]
            self.outputs = [tensor.data for tensor in outputs]
            self.inputs = [source.clone(memory_format=torch.contiguous_format) for source in sources]
            overlapping = Extents(sources).meet(Extents(self.outputs))
            self._held = []
            poisoned = [_poison(output) for output in self.outputs]
            if overlapping and not in_place:
                for source, snapshot in zip(sources, self.inputs, strict=True):
                    source.copy_(snapshot)
            for index, output in enumerate(self.outputs):
                alone = poisoned[index] and (in_place or not overlapping)
                expected = None if alone else output.clone()
                self._held.append(_Held("output", index, outputs[index], output, output.data_ptr(), expected))
            replaced = {_place(output) for output in self.outputs} if overlapping and in_place else ()
            for index, source in enumerate(sources):
                if replaced and _place(source) in replaced:  # held as an output
                    continue
                snapshot = source.clone() if replaced else self.inputs[index]
                self._held.append(_Held("input", index, inputs[index], source, source.data_ptr(), snapshot))

    @property
    def what(self) -> str:
        """The collective in words."""
        return self._what if isinstance(self._what, str) else self._what()

    def problem(self) -> str | None:
        """What the class did with the buffers since the launch, seen at the wait, before the result is delivered.

        Returns:
            None, or a sentence without its subject: ``"changed the input of its 2nd collective, all_gather bf16[48],
            before wait(): element 3 was 1, is 2"``. Elements are counted in the flattened tensor.
        """
        with Unseen():
            for held in self._held:
                if held.moved():
                    return f"freed or moved the memory of {self.name(held.part, held.number)}, before wait()"
                if held.changed():
                    return self._describe(held)
        return None

    def name(self, part: str, number: int) -> str:
        """``"the output of its 2nd collective, …"``; ``"output[1] of …"`` where there are several."""
        several = len(self.outputs if part == "output" else self.sources) > 1
        return f"{f'{part}[{number}]' if several else f'the {part}'} of its {self.what}"

    def uses(self, tensor: Tensor, writes: bool) -> Iterator[tuple[str, int]]:
        """What of the buffers it would be a race to use a tensor for: parts and their numbers, as :meth:`name` takes.

        Args:
            tensor: Any that has memory; asked for its form only. To be called in an :class:`Unseen`.
            writes: Whether it is written; otherwise it is read.
        """
        for number, output in enumerate(self.outputs):
            if share(tensor, output, () if self.in_place else self.sources):
                yield "output", number
        for number, source in enumerate(self.sources if writes else ()):
            if share(tensor, source, self.outputs if self.in_place else ()):
                yield "input", number

    @functools.cached_property
    def extents(self) -> Extents:
        """Of all its tensors."""
        return Extents([*self.sources, *self.outputs])

    def clash(
        self,
        what: str | Callable[[], str],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        extents: Extents | None = None,
    ) -> str | None:
        """Whether another collective that is launched meanwhile uses the same memory; asked before its own Buffers.

        ``extents``: of its tensors, for whoever asks several.

        Returns:
            None, or a sentence without its subject: ``"handed the output of its 2nd collective, reduce_scatter
            fp32[48], to its 3rd collective, all_gather fp32[12], before wait()"``.
        """
        with Unseen():
            if not (extents or Extents([*inputs, *outputs])).meet(self.extents):
                return None
            for tensors, writes in ((inputs, False), (outputs, True)):
                for tensor in tensors:
                    for part, number in self.uses(tensor, writes):
                        to = what if isinstance(what, str) else what()
                        return f"handed {self.name(part, number)}, to its {to}, before wait()"
        return None

    def release(self) -> None:
        """Let go of all tensors; :meth:`problem` finds none from now on."""
        self.inputs, self.sources, self.outputs, self._held = [], [], [], []

    def _describe(self, held: _Held) -> str:
        is_, was = _bits(held.data), held.wanted()
        position = int(torch.nonzero((is_ != was).reshape(-1))[0])
        element = position // (is_.numel() // held.data.numel())
        verb = "wrote" if held.part == "output" else "changed"
        poison = _POISON.get(_component(held.data.dtype))
        known = poison is None or int(was.reshape(-1)[position]) != poison[1]
        before = f"was {_element(was, held.data.dtype, element)}, " if known else ""
        now = _element(is_, held.data.dtype, element)
        return f"{verb} {self.name(held.part, held.number)}, before wait(): element {element} {before}is {now}"


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _component(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _bits(data: Tensor) -> Tensor:
    """The same memory as integers, two for a complex number."""
    if data.dtype.is_complex:
        data = torch.view_as_real(data.conj() if data.is_conj() else data)
    poison = _POISON.get(data.dtype)
    return data.view(_INTEGER[data.dtype.itemsize] if poison is None else poison[0])


def _poison(data: Tensor) -> bool:
    """Fill with poison; False where the dtype has none."""
    poison = _POISON.get(_component(data.dtype))
    if poison is None:
        return False
    _bits(data).fill_(poison[1])
    return True


@functools.lru_cache(maxsize=1024)
def _pattern(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """The bits of a tensor of poison, one integer expanded; kept, because making it costs more than a comparison."""
    integer, pattern = _POISON[_component(dtype)]
    return torch.full((), pattern, dtype=integer, device=device).expand((*shape, 2) if dtype.is_complex else shape)


def _element(bits: Tensor, dtype: torch.dtype, element: int) -> str:
    """One element in words; of a nan also which."""
    per_element = 2 if dtype.is_complex else 1
    own = bits.reshape(-1)[element * per_element :][:per_element].contiguous()
    value = own.view(dtype)[0].item()
    if value == value:  # of complex numbers too
        return f"{value:.9g}" if dtype.is_floating_point else str(value)
    size = 8 * own.element_size()
    return f"nan (bits {' '.join(f'0x{int(part) & (2**size - 1):0{size // 4}x}' for part in own)})"
