"""What becomes of the buffers of a pending collective: snapshots, poison, comparisons, and races as they happen."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.cond import cond_op
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.sim import races
from harness.sim.buffers import Buffers, Unseen, deliver
from harness.sim.memory import Extents, share
from harness.sim.races import RaceDetector

WHAT = "2nd collective, all_gather fp32[4]"
FLOATING = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
)
INTEGER = (*(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),)
DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))


def numbers(length: int, dtype: torch.dtype = torch.float32, start: int = 1) -> Tensor:
    return torch.arange(start, start + length, dtype=torch.float32).to(dtype)


def pair() -> tuple[Tensor, Tensor]:
    return numbers(4), torch.zeros(8)


# --- snapshot and poison ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_floating_output_is_nan_until_it_is_delivered(dtype: torch.dtype, device: str) -> None:
    given, output = numbers(4, dtype).to(device), numbers(8, dtype).to(device)
    buffers = Buffers(WHAT, [given], [output])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert output.to(wide).isnan().all()
    assert torch.equal(buffers.inputs[0].to(wide), given.to(wide))
    assert buffers.problem() is None
    deliver(numbers(8, dtype).to(device), output)
    assert torch.equal(output.to(wide), numbers(8, dtype).to(device, wide))
    assert "wrote the output" in str(buffers.problem())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGER)
def test_an_integer_output_holds_a_number_nobody_uses(dtype: torch.dtype, device: str) -> None:
    output = torch.zeros(3, dtype=dtype, device=device)
    buffers = Buffers(WHAT, [], [output])
    (value,) = set(output.tolist())
    limits = torch.iinfo(dtype)
    assert value not in (0, 1, -1, limits.min, limits.max)
    assert buffers.problem() is None
    deliver(torch.tensor([value, 1, 0], dtype=dtype), output)
    assert buffers.problem() == f"wrote the output of its {WHAT}, before wait(): element 1 is 1"


def test_a_bool_keeps_its_values_and_a_change_of_them_is_seen() -> None:
    given, output = torch.tensor([True, False]), torch.tensor([True, False, True, False])
    buffers = Buffers(WHAT, [given], [output])
    assert output.tolist() == [True, False, True, False]
    assert buffers.problem() is None
    output[3] = True
    assert buffers.problem() == f"wrote the output of its {WHAT}, before wait(): element 3 was {False}, is {True}"


def test_the_snapshot_is_of_the_launch() -> None:
    given, output = pair()
    given = given.reshape(2, 2).t()
    buffers = Buffers(WHAT, [given], [output])
    assert buffers.inputs[0].is_contiguous()
    assert buffers.inputs[0].tolist() == [[1, 3], [2, 4]]
    given.zero_()
    assert buffers.inputs[0].tolist() == [[1, 3], [2, 4]]


# --- what is seen at the wait -----------------------------------------------------------------------------------------


def test_a_changed_input_is_named_with_its_element() -> None:
    given, output = pair()
    buffers = Buffers(WHAT, [given], [output])
    given[2] = 1.5
    assert buffers.problem() == f"changed the input of its {WHAT}, before wait(): element 2 was 3, is 1.5"


def test_of_several_the_tensor_is_named_too() -> None:
    inputs, outputs = [numbers(2), numbers(2)], [torch.zeros(2), torch.zeros(2)]
    buffers = Buffers(WHAT, inputs, outputs)
    inputs[1][0] = 7
    assert buffers.problem() == f"changed input[1] of its {WHAT}, before wait(): element 0 was 1, is 7"
    inputs[1][0] = 1
    assert buffers.problem() is None
    outputs[1][1] = 7
    assert buffers.problem() == f"wrote output[1] of its {WHAT}, before wait(): element 1 is 7"


def test_bits_are_compared() -> None:
    """Neither a nan that stays nor a zero that changes its sign is a matter of equal values."""
    given = torch.tensor([float("nan"), 0.0])
    buffers = Buffers(WHAT, [given], [torch.zeros(4)])
    assert buffers.problem() is None
    given[1] = -0.0
    assert buffers.problem() == f"changed the input of its {WHAT}, before wait(): element 1 was 0, is -0"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 8, 37])
def test_arithmetic_on_the_poison_leaves_another_nan(dtype: torch.dtype, length: int) -> None:
    """The mean taken before the wait: a race, though nan times a half is nan."""
    for compute in (lambda t: t.mul_(0.5), lambda t: t.div_(4), lambda t: t.add_(1), lambda t: t.copy_(t + 0)):
        output = torch.zeros(length, dtype=dtype)
        buffers = Buffers(WHAT, [], [output])
        compute(output)
        assert "element 0 is nan (bits 0x" in str(buffers.problem())


def test_an_element_of_a_complex_tensor_counts_once() -> None:
    output = torch.zeros(4, dtype=torch.complex64)
    buffers = Buffers(WHAT, [], [output])
    output[3] = 2 + 1j
    assert buffers.problem() == f"wrote the output of its {WHAT}, before wait(): element 3 is (2+1j)"


@pytest.mark.parametrize("part", ["input", "output"])
def test_memory_that_was_freed_is_a_problem(part: str) -> None:
    given, output = pair()
    buffers = Buffers(WHAT, [given], [output])
    freed = given if part == "input" else output
    freed.untyped_storage().resize_(0)
    assert buffers.problem() == f"freed or moved the memory of the {part} of its {WHAT}, before wait()"
    deliver(numbers(8), output)
    if part == "input":
        assert output.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_references_may_be_dropped() -> None:
    given, output = pair()
    buffers = Buffers(WHAT, [given], [output])
    del given, output
    assert buffers.problem() is None
    buffers.release()
    assert buffers.problem() is None
    assert buffers.inputs == buffers.sources == buffers.outputs == []


@pytest.mark.parametrize("part", ["input", "output"])
def test_a_tensor_is_not_given_other_memory(part: str) -> None:
    given, output = pair()
    buffers = Buffers(WHAT, [given], [output])
    if part == "input":
        given.data = given.detach().clone()
    else:
        output.set_(torch.ones(8))
    assert buffers.problem() == f"freed or moved the memory of the {part} of its {WHAT}, before wait()"


# --- in place ---------------------------------------------------------------------------------------------------------


def test_the_tensor_of_an_all_reduce_is_poisoned_whole() -> None:
    tensor = numbers(4)
    buffers = Buffers(WHAT, [tensor], [tensor], in_place=True)
    assert tensor.isnan().all()
    assert buffers.inputs[0].tolist() == [1, 2, 3, 4]
    assert buffers.problem() is None
    tensor[1] = 5
    assert buffers.problem() == f"wrote the output of its {WHAT}, before wait(): element 1 is 5"


@pytest.mark.parametrize("own", [slice(0, 2), slice(2, 4), slice(0, 6)], ids=["first", "middle", "alone"])
def test_an_all_gather_in_place_keeps_the_own_piece(own: slice) -> None:
    output = numbers(6)
    buffers = Buffers(WHAT, [output[own]], [output])
    values = numbers(6)
    assert torch.equal(output[own], values[own])
    assert int(output.isnan().sum()) == 6 - len(values[own])
    assert buffers.problem() is None
    output[own][0] = 9
    expected = f"wrote the output of its {WHAT}, before wait(): element {own.start} was {own.start + 1}, is 9"
    assert buffers.problem() == expected


def test_a_reduce_scatter_into_its_own_input_replaces_only_that_piece() -> None:
    given = numbers(6)
    buffers = Buffers(WHAT, [given], [given[2:4]], in_place=True)
    assert given.isnan().tolist() == [False, False, True, True, False, False]
    assert torch.equal(buffers.inputs[0], numbers(6))
    assert buffers.problem() is None
    given[5] = 0
    assert buffers.problem() == f"changed the input of its {WHAT}, before wait(): element 5 was 6, is 0"


def test_neighbours_in_one_flat_buffer_are_no_overlap() -> None:
    flat = numbers(8)
    buffers = Buffers(WHAT, [flat[2:4]], [flat[:2], flat[4:6]])
    assert flat.isnan().tolist() == [True, True, False, False, True, True, False, False]
    flat[6:] = 0
    assert buffers.problem() is None
    flat[5] = 0
    assert buffers.problem() == f"wrote output[1] of its {WHAT}, before wait(): element 1 is 0"


@pytest.mark.parametrize(
    ("inputs", "outputs", "what"),
    [
        ([2], [], "the output"),  # a shard that is still to come goes on to the others
        ([], [2], "the output"),
        ([], [0], "the input"),
        ([1, 2], [3], "the output"),
    ],
)
def test_a_collective_on_what_another_holds_is_named(inputs: list[int], outputs: list[int], what: str) -> None:
    flat = torch.zeros(8)
    pieces = flat.split(2)
    buffers = Buffers(WHAT, [pieces[0]], [pieces[2]])
    told = buffers.clash(
        "3rd collective, broadcast fp32[2]", *([pieces[i] for i in part] for part in (inputs, outputs))
    )
    assert told == f"handed {what} of its {WHAT}, to its 3rd collective, broadcast fp32[2], before wait()"


def test_collectives_side_by_side_do_not_clash() -> None:
    """Of one input, of neighbours in one buffer, and from the own piece of what is gathered."""
    flat = torch.zeros(8)
    pieces = flat.split(2)
    assert Buffers(WHAT, [pieces[0]], [pieces[2]]).clash("3rd", [pieces[0]], [pieces[1], pieces[3]]) is None
    assert Buffers(WHAT, [pieces[1]], [flat]).clash("3rd", [pieces[1]], [torch.zeros(2)]) is None
    assert Buffers(WHAT, [pieces[0]], [pieces[0]], in_place=True).clash("3rd", [pieces[1]], [pieces[1]]) is None


# --- invisible --------------------------------------------------------------------------------------------------------


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionListener(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def life(given: Tensor, output: Tensor) -> None:
    buffers = Buffers(WHAT, [given], [output])
    assert buffers.problem() is None
    deliver(torch.ones(output.numel()), output)
    buffers.release()


def test_autograd_and_versions_see_nothing() -> None:
    weight = torch.nn.Parameter(numbers(4))
    product = weight * weight  # saves the weight for backward
    output = torch.zeros(8, requires_grad=True)
    versions = weight._version, output._version
    life(weight, output)
    assert (weight._version, output._version) == versions
    assert output.is_leaf
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 4, 6, 8]
    buffers = Buffers(WHAT, [product], [output])
    assert not buffers.inputs[0].requires_grad


def test_modes_see_nothing() -> None:
    given, output = pair()
    ones = torch.ones(8)
    with Listener() as operations, FunctionListener() as functions:
        buffers = Buffers(WHAT, [given], [output])
        problem = buffers.problem()
        deliver(ones, output)
        late = buffers.problem()
        clash = buffers.clash("3rd", [output], [])
        assert operations.heard == functions.heard == []
        torch.add(given, 1)
    assert (len(operations.heard), len(functions.heard)) == (1, 1)
    assert problem is None
    assert late is not None
    assert clash is not None


def test_inference_tensors_and_inference_mode() -> None:
    with torch.inference_mode():
        inside = pair()
        life(*inside)
        buffers = Buffers(WHAT, [inside[0]], [inside[1]])
    life(*inside)
    outside = pair()
    with torch.inference_mode():
        life(*outside)
        buffers = Buffers(WHAT, [outside[0]], [outside[1]])
    assert not buffers.inputs[0].is_inference()
    assert not outside[1].is_inference()
    buffers.inputs[0].requires_grad_().mul(2).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_views_with_gaps_and_nothing_at_all(device: str) -> None:
    matrix = torch.zeros(4, 3, device=device)
    empty = torch.zeros(0, device=device)
    buffers = Buffers(WHAT, [empty, matrix[:, 1]], [matrix[:, 0], empty, matrix[:0]])
    assert matrix[:, 0].isnan().all()
    assert not matrix[:, 1:].isnan().any()
    assert buffers.problem() is None
    matrix[3, 0] = 1
    assert buffers.problem() == f"wrote output[0] of its {WHAT}, before wait(): element 3 is 1"
    deliver(numbers(4, start=5).to(device), matrix[:, 0])
    assert matrix[:, 0].tolist() == [5, 6, 7, 8]
    life(empty, empty)


# --- which memory -----------------------------------------------------------------------------------------------------


def test_shared_bytes_are_found_exactly() -> None:
    """Against sets of bytes, over views of all forms: with gaps, transposed, expanded, overlapping in themselves."""
    draw = random.Random(0)
    flat = torch.zeros(64, dtype=torch.int16)

    def view() -> Tensor:
        base = flat.view(torch.int8) if draw.random() < 0.3 else flat
        shape = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        strides = [draw.randint(0, 9) for _ in shape]
        return base.as_strided(shape, strides, draw.randint(0, 9))

    def bytes_of(tensor: Tensor) -> set[int]:
        size = tensor.element_size()
        offsets = itertools.product(*map(range, tensor.shape))
        elements = (sum(map(operator.mul, place, tensor.stride())) + tensor.storage_offset() for place in offsets)
        return {element * size + byte for element in elements for byte in range(size)}

    answers = set()
    for _ in range(3000):
        one, other, *besides = (view() for _ in range(draw.choice((2, 2, 3, 4))))
        common = (bytes_of(one) & bytes_of(other)).difference(*map(bytes_of, besides))
        assert share(one, other, besides) == bool(common), (one.stride(), other.stride())
        assert Extents([one]).meet(Extents([other])) or not common
        answers.add((bool(common), Extents([one]).meet(Extents([other])), bool(besides)))
    assert len(answers) == 6  # shared; near but not; far: each with and without others


# --- races as they happen ---------------------------------------------------------------------------------------------


@contextmanager
def watching(buffers: Buffers) -> Iterator[list[str]]:
    told: list[str] = []
    with RaceDetector(told.append) as detector:
        detector.watch(buffers)
        yield told


READS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda out: out + 1,
    "copy from": lambda out: torch.zeros(8).copy_(out),
    "clone": lambda out: out.clone(),
    "item": lambda out: out[3].item(),
    "is_nonzero": lambda out: out[0].is_nonzero(),
    "truth": lambda out: bool(out[0] > 0),
    "data": lambda out: out.data.sum(),
    "detach": lambda out: out.detach().float().mul(2),
    "cat": lambda out: torch.cat([torch.zeros(2), out]),
    "stack": lambda out: torch.stack([out[:4], out[4:]]),
    "foreach": lambda out: torch._foreach_add([torch.zeros(1), out[4:]], 1),
    "foreach copy": lambda out: torch._foreach_copy_([torch.zeros(8)], [out]),
    "view": lambda out: out.view(2, 4).t()[1].exp(),
    "reshape that copies": lambda out: out.view(2, 4).t().reshape(-1),
    "contiguous that copies": lambda out: out.view(2, 4).t().contiguous(),
    "to another dtype": lambda out: out.to(torch.bfloat16),
    "out=": lambda out: torch.add(out, 1, out=torch.zeros(8)),
    "index": lambda out: out[torch.tensor([0, 2])],
    "norm": lambda out: torch.linalg.vector_norm(out),
    "equal": lambda out: torch.equal(out, torch.zeros(8)),
    "memory of NumPy's": lambda out: torch.from_numpy(out.numpy()).sum(),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "copy to": lambda out: out.copy_(torch.ones(8)),
    "mul": lambda out: out.mul_(0.5),
    "zero a view": lambda out: out.view(2, 4)[1].zero_(),
    "set item": lambda out: out.__setitem__(2, 1.0),
    "index put": lambda out: out.__setitem__(torch.tensor([0, 2]), 1.0),
    "data": lambda out: out.data.fill_(1),
    "out=": lambda out: torch.add(torch.ones(8), 1, out=out),
    "foreach": lambda out: torch._foreach_mul_([torch.ones(2), out[:4]], 2.0),
    "uniform": lambda out: torch.nn.init.uniform_(out),
}
NEITHER: dict[str, Callable[[Tensor], object]] = {
    "split": lambda out: [piece.view(2, 2) for piece in out.split(4)],
    "chunk": lambda out: out.chunk(2),
    "unbind": lambda out: out.view(2, 4).unbind(),
    "tensor_split": lambda out: out.tensor_split(3),
    "narrow": lambda out: out.narrow(0, 2, 4).t(),
    "slice": lambda out: out[2:6].detach(),
    "index by numbers": lambda out: out[3],
    "expand": lambda out: out[None].expand(3, 8).unfold(1, 2, 2),
    "reshape": lambda out: out.reshape(2, 4).flatten().contiguous().ravel().movedim(0, 0),
    "to what it is": lambda out: out.to(torch.float32).float().cpu(),
    "in place form": lambda out: out.view(2, 4).t_().squeeze_().unsqueeze_(0),
    "as_strided": lambda out: out.as_strided((2,), (4,)),
    "other dtype's view": lambda out: out.view(torch.int32),
    "likes": lambda out: [torch.zeros_like(out), torch.empty_like(out), torch.randn_like(out), out.new_ones(2)],
    "form": lambda out: (out.shape, out.numel(), out.is_contiguous(), out.data_ptr(), out.dtype, len(out), out.dim()),
    "form of the other": lambda out: (torch.ones(8).view_as(out), torch.ones(1).expand_as(out)),
    "type of the other": lambda out: (torch.ones(8).to(out), torch.ones(8, dtype=torch.int64).type_as(out)),
    "requires_grad": lambda out: out.detach().requires_grad_(),
    "parameter": lambda out: torch.nn.Parameter(out),
    "numpy": lambda out: out.numpy(),
    "data": lambda out: setattr(torch.zeros(8), "data", out),
    "neighbours": lambda out: torch.zeros(8).copy_(torch.ones(8)),
    "broadcast": lambda out: torch.broadcast_tensors(out, torch.ones(2, 1)),
    "grad": lambda out: setattr(torch.zeros(8, requires_grad=True), "grad", out),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("use", READS.values(), ids=READS)
def test_a_read_of_an_output_is_told(use: Callable[[Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference):
        given, output = numbers(8), torch.zeros(8)
        with watching(Buffers(WHAT, [given], [output])) as told:
            use(output)
            use(output)
    assert len(told) == 1
    assert told[0].startswith(f"read the output of its {WHAT}, before wait(): aten.")


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("use", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("part", ["output", "input"])
def test_a_write_is_told(use: Callable[[Tensor], object], part: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        tensors = {"input": numbers(8), "output": torch.zeros(8)}
        with watching(Buffers(WHAT, [tensors["input"]], [tensors["output"]])) as told:
            use(tensors[part])
            use(tensors[part])
    assert len(told) == 1
    assert told[0].startswith(f"wrote the {part} of its {WHAT}, before wait(): aten.")


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("use", NEITHER.values(), ids=NEITHER)
def test_views_and_form_are_no_races(use: Callable[[Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference):
        given, output = numbers(8), torch.zeros(8)
        with watching(Buffers(WHAT, [given], [output])) as told:
            use(output)
            use(given)
    assert told == []


@pytest.mark.parametrize("use", READS.values(), ids=READS)
def test_an_input_may_be_read(use: Callable[[Tensor], object]) -> None:
    given = numbers(8)
    with watching(Buffers(WHAT, [given], [torch.zeros(16)])) as told:
        use(given)
    assert told == []


def gather_params(output: Tensor) -> Tensor:
    return torch.zeros(8).copy_(output)


def test_the_text_says_where() -> None:
    given, output = pair()
    with watching(Buffers(WHAT, [given], [output])) as told:
        gather_params(output)
    line = inspect.getsourcelines(gather_params)[1] + 1
    place = f"aten.copy_ at test_sim_buffers.py, line {line}, in gather_params"
    assert told == [f"read the output of its {WHAT}, before wait(): {place}"]


def test_frames_of_torch_and_of_the_standard_library_are_passed_over() -> None:
    given, output = pair()

    with watching(Buffers(WHAT, [given], [output])) as told:
        copy.deepcopy(output)
    assert told[0].endswith(", in test_frames_of_torch_and_of_the_standard_library_are_passed_over")


def test_backward_and_optimizers_count() -> None:
    weight = torch.nn.Parameter(numbers(8))
    weight.grad = torch.ones(8)
    optimizers = [torch.optim.AdamW([weight], foreach=True), torch.optim.SGD([weight], lr=0.1, foreach=False)]
    for optimizer in optimizers:
        with watching(Buffers(WHAT, [weight], [torch.zeros(16)])) as told:
            optimizer.step()
        assert [text.partition(" of its")[0] for text in told] == ["wrote the input"]
    with watching(Buffers(WHAT, [torch.zeros(4)], [weight.grad])) as told:
        (weight * weight).sum().backward()
    assert [text.partition(" of its")[0] for text in told] == ["wrote the output"]
    assert told[0].endswith(", in test_backward_and_optimizers_count")
    saved = torch.zeros(8)
    loss = (weight * saved).sum()
    with watching(Buffers(WHAT, [torch.zeros(4)], [saved])) as told:
        loss.backward()
    assert [text.partition(" of its")[0] for text in told] == ["read the output"]


def test_a_fused_optimizer_only_reads_its_gradients() -> None:
    weight = torch.nn.Parameter(numbers(8))
    weight.grad = torch.ones(8)
    with watching(Buffers(WHAT, [weight.grad], [torch.zeros(16)])) as told:
        torch.optim.AdamW([weight], fused=True).step()
    assert told == []


def test_each_kind_is_told_once_for_each_buffers() -> None:
    told: list[str] = []
    with RaceDetector(told.append) as detector:
        for ordinal in ("1st", "2nd"):
            given, output = pair()
            buffers = Buffers(ordinal, [given], [output])
            detector.watch(buffers)
            for _ in range(2):
                output + 1
                output.zero_()
                given.zero_()
            detector.release(buffers)
            output + 1
            given.zero_()
            detector.release(buffers)
        detector.watch(buffers)
        output + 1
        assert told.pop().startswith("read the output of its 2nd")
    beginnings = [text.partition(",")[0] for text in told]
    kinds = ("read the output", "wrote the output", "wrote the input")
    assert beginnings == [f"{kind} of its {ordinal}" for ordinal in ("1st", "2nd") for kind in kinds]


def test_an_operation_that_fails_on_the_poison_is_told() -> None:
    output = torch.zeros(2, dtype=torch.int64)
    with watching(Buffers(WHAT, [], [output])) as told, pytest.raises(IndexError):
        numbers(4)[output]
    assert len(told) == 1


def test_what_holds_no_memory_passes() -> None:
    given, output = pair()
    with watching(Buffers(WHAT, [given], [output])) as told:
        sparse = torch.eye(3).to_sparse()
        assert (sparse + sparse).to_dense().sum() == 6
        torch.empty(3, device="meta").add_(1)
        output.untyped_storage().resize_(0)
        numbers(1000).mul_(2)
    assert told == []


def test_a_tensor_inside_a_wrapper_counts() -> None:
    given, output = pair()
    with watching(Buffers(WHAT, [given], [output])) as told:
        TwoTensor(torch.zeros(8), torch.zeros(8)) + 1
        assert told == []
        TwoTensor(torch.zeros(8), output) + 1
    assert len(told) == 1


def test_compiled_and_checkpointed_code_runs_in_the_detector() -> None:
    given, output = pair()
    with watching(Buffers(WHAT, [given], [output])) as told:
        compiled = torch.compile(lambda tensor: tensor * 2, backend="eager")
        assert compiled(given).tolist() == [2, 4, 6, 8]
        leaf = numbers(2).requires_grad_()
        torch.utils.checkpoint.checkpoint(torch.exp, leaf, use_reentrant=False).sum().backward()
        assert cond_op(torch.tensor(True), torch.exp, torch.sin, (torch.zeros(1),)).tolist() == [1]
        assert told == []
        compiled(output)
    assert len(told) == 1


# --- right programs ---------------------------------------------------------------------------------------------------


def test_work_on_another_buffer_while_one_is_pending() -> None:
    """Also between two buffers of one allocation, and with memory that was freed meanwhile."""
    told: list[str] = []
    flat = torch.zeros(16)
    first, second = flat[:8], flat[8:]
    with RaceDetector(told.append) as detector:
        for step in range(4):
            busy, free = (first, second) if step % 2 else (second, first)
            buffers = Buffers(f"{step}", [busy], [busy], in_place=True)
            detector.watch(buffers)
            free.copy_(numbers(8)).mul_(2).sum().item()
            del free
            torch.cat([numbers(8), numbers(8)]).add_(1)
            assert buffers.problem() is None
            detector.release(buffers)
            deliver(numbers(8), busy)
            buffers.release()
            busy.sum()
    assert told == []


def test_the_own_piece_of_an_all_gather_in_place_may_be_read() -> None:
    flat = numbers(12)
    output = flat[2:10]
    own = output[2:4]
    buffers = Buffers(WHAT, [own], [output])
    with watching(buffers) as told:
        own + 1
        flat[:2].add_(1)
        flat[10:].sum()
        output[2:4].clone()
        assert own.tolist() == [5, 6]
        assert told == []
        flat[2:7].clone()
        own.add_(1)
        flat[1:3].add_(1)
    assert [text.partition(" of its")[0] for text in told] == ["read the output", "wrote the input", "wrote the output"]


def test_the_rest_of_an_input_that_is_reduced_in_place_may_be_read() -> None:
    given = numbers(6)
    with watching(Buffers(WHAT, [given], [given[2:4]], in_place=True)) as told:
        given[:2].sum()
        given[4:].sum()
        assert told == []
        given[1:3].sum()
        given[3:4].zero_()
        assert len(told) == 2
        given[5:].zero_()
    assert [text.partition(" of its")[0] for text in told] == ["read the output", "wrote the output", "wrote the input"]


def test_disjoint_pieces_of_one_buffer_are_not_confused() -> None:
    matrix = torch.zeros(4, 6)
    columns = [matrix[:, index] for index in range(6)]
    with watching(Buffers(WHAT, [columns[0]], [columns[2], matrix[1:3, 4:]])) as told:
        columns[1].zero_()
        columns[3].zero_()
        columns[0].sum()
        matrix[3, 3:].add_(1)
        matrix[0:4:3, 4:].sum()
        assert told == []
        matrix[3].sum()
        matrix[2, 5:].zero_()
    assert [text.partition(" of its")[0] for text in told] == ["read output[0]", "wrote output[1]"]


def test_another_rank_in_its_own_thread_is_not_listened_to() -> None:
    given, output = pair()
    with watching(Buffers(WHAT, [given], [output])) as told:
        other = threading.Thread(target=given.zero_)
        other.start()
        other.join(60)
        assert told == []
        given.zero_()
    assert len(told) == 1


def test_what_the_world_does_unseen_is_no_race() -> None:
    given, output = pair()
    buffers = Buffers(WHAT, [given], [output])
    with watching(buffers) as told:
        with Unseen():
            output.data.copy_(torch.ones(8))
        deliver(numbers(8), output)
        buffers.problem()
        assert told == []
        output.sum()
    assert len(told) == 1


def test_extents_of_many_meet_exactly_where_two_of_them_overlap() -> None:
    flat = torch.zeros(400)
    generator = random.Random(0)
    seen = set()
    for _ in range(300):
        sides = [
            [flat[start : start + generator.randint(0, 6)] for start in generator.sample(range(390), size)]
            for size in (generator.randint(0, 4), generator.randint(0, 20))
        ]
        overlap = any(one.numel() and other.numel() and share(one, other) for one in sides[0] for other in sides[1])
        assert Extents(sides[0]).meet(Extents(sides[1])) == Extents(sides[1]).meet(Extents(sides[0])) == overlap
        seen.add(overlap)
    assert seen == {True, False}


def test_what_an_operation_made_on_both_sides_of_a_buffer_is_no_view_of_it() -> None:
    """Two results lie in memory before and after the output that one of them was computed from."""
    around = [torch.zeros(64) for _ in range(64)]
    around.sort(key=Tensor.data_ptr)
    low, middle, high = around[0], around[32], around[-1]

    assert not races._view([low, high], middle)
    assert races._view([low, middle[3:5]], middle)
