"""The joint norm and the clip of gradients that one process has; sharded ones are in tests/ranks/test_strategies.py."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero2core.clipping import OwnedGradients, clip_, joint_norm
from zero2core.errors import GradientStateError


def test_one_norm_and_one_factor_for_gradients_of_every_holder() -> None:
    plain, owned = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])

    clipped = clip_([plain], 1.0, owned=[OwnedGradients([owned])])

    assert clipped.norm == 5.0
    assert (clipped.norm.dtype, clipped.norm.dim()) == (torch.float32, 0)
    factor = torch.tensor(1.0) / (torch.tensor(5.0) + 1e-6)
    assert torch.equal(plain, torch.tensor([3.0, 0.0]) * factor)
    assert torch.equal(owned, torch.tensor([[0.0], [4.0]]) * factor)
    assert clipped.stats["coefficient"] == factor
    assert clipped.stats["num_gradients"] == 2
    assert {name: value.item() for name, value in clipped.stats["norms"].items()} == {
        "plain": 3.0,
        "sharded": 0.0,
        "owned": 4.0,
    }


def test_segments_are_clipped_apart_and_the_joint_norm_is_returned_all_the_same() -> None:
    plain, owned = torch.tensor([3.0]), torch.tensor([0.5])

    clipped = clip_([plain], 1.0, owned=[OwnedGradients([owned])], clip_mode="segments")

    assert clipped.norm == torch.tensor(math.sqrt(9.25))
    assert plain.item() == pytest.approx(1.0, rel=1e-6)
    assert owned.item() == 0.5  # within the bound by itself
    assert set(clipped.stats["coefficient"]) == {"plain", "sharded", "owned"}


@pytest.mark.parametrize("bound", [None, math.inf, 6.0])
def test_no_bound_or_a_wide_one_changes_no_bit(bound: float | None) -> None:
    gradient = torch.tensor([3.0, -0.0, 4.0])

    clipped = clip_([gradient], bound)

    assert clipped.norm == 5.0
    assert torch.equal(gradient.view(torch.int32), torch.tensor([3.0, -0.0, 4.0]).view(torch.int32))
    assert clipped.stats["coefficient"] == 1.0


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, -math.inf])
def test_a_bound_that_would_turn_or_lose_gradients_is_refused(bound: float) -> None:
    gradient = torch.tensor([3.0])

    with pytest.raises(ValueError, match="max_norm"):
        clip_([gradient], bound)
    assert gradient == 3.0


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        ("1", "'1', a str"),
        (True, "True, a bool"),
        (1j, "a complex"),
        (torch.tensor([1.0, 2.0]), r"shape \(2,\)"),
        (torch.tensor(True), "a Tensor"),
        (10**400, "too large for a float"),
        (1e-300, "is 0 in fp32"),
        (2.0**-150, "is 0 in fp32"),
    ],
)
def test_a_bound_that_is_no_positive_fp32_number_is_refused(bound: Any, says: str) -> None:
    gradient = torch.tensor([3.0])

    with pytest.raises(ValueError, match="max_norm") as refusal:
        clip_([gradient], bound)
    assert re.search(says, str(refusal.value))
    assert gradient == 3.0


@pytest.mark.parametrize("bound", [2.0**-149, 1, torch.tensor(0.5), 1e300])
def test_any_positive_number_is_a_bound(bound: Any) -> None:
    gradient = torch.tensor([3.0])
    assert clip_([gradient], bound).norm == 3.0
    # The factor, the product and the bound are rounded once each; below 2**-126 by half of 2**-149, which times 3 is 2.
    assert gradient.item() == pytest.approx(min(float(bound), 3.0), rel=1e-6, abs=2 * 2.0**-149)


@pytest.mark.parametrize("words", [{"on_nonfinite": "ignore"}, {"clip_mode": "each"}])
def test_unknown_words_are_refused_with_the_known_ones(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'raise'|'joint'"):
        clip_([torch.ones(1)], 1.0, **words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_squares_are_added_up_in_fp64_whatever_the_dtype(dtype: torch.dtype) -> None:
    # 2**16 + 1 ones: bf16 stops counting at 256, fp16 at 2048, and the square of 1000 overflows fp16.
    gradient = torch.cat([torch.ones(2**16 + 1, dtype=dtype), torch.full((2,), 1000.0, dtype=dtype)])
    exact = float(gradient.double().square().sum())

    assert joint_norm([gradient]).item() == torch.tensor(math.sqrt(exact), dtype=torch.float32).item()


def test_norms_beyond_what_fp32_can_square_are_right() -> None:
    assert joint_norm([torch.full((4,), 1e30)]).item() == torch.tensor(2e30).item()
    assert joint_norm([torch.full((4,), 1e-30)]).item() == pytest.approx(2e-30, rel=2**-23)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    before = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient = before.clone()

    clipped = clip_([gradient], 0.7)

    factor = clipped.stats["coefficient"]
    assert torch.equal(gradient, (before.float() * factor).to(dtype))
    assert not torch.equal(gradient, before * factor.to(dtype))  # what two roundings give


def test_strided_and_empty_gradients_count_each_element_once() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    gradient = base.t()[::2]  # columns 0 and 2

    clipped = clip_([gradient, torch.empty(0, 3)], 1.0)

    assert clipped.norm == torch.tensor(math.sqrt(0 + 4 + 16 + 36 + 64 + 100))
    assert torch.equal(base[:, 1::2], torch.arange(12.0).reshape(3, 4)[:, 1::2])  # nothing between was touched


@pytest.mark.parametrize("gradient", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.int64)])
def test_gradients_without_a_norm_of_this_kind_are_refused(gradient: Tensor) -> None:
    with pytest.raises(ValueError, match="dense floating-point"):
        clip_([gradient], 1.0)


def test_nothing_at_all_has_norm_0_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        clipped = clip_([], 1.0)

    assert (clipped.norm.item(), clipped.stats["num_gradients"]) == (0.0, 0)
    assert "no parameter has a gradient" in caplog.text


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_raises_skips_or_propagates(value: float) -> None:
    def gradients() -> list[Tensor]:
        return [torch.tensor([1.0, value]), torch.tensor([2.0])]

    raised = gradients()
    with pytest.raises(GradientStateError, match="not finite"):
        clip_(raised, 1.0, on_nonfinite="raise")
    skipped = gradients()
    result = clip_(skipped, 1.0, on_nonfinite="skip")
    propagated = gradients()
    clip_(propagated, 1.0)

    assert raised[1] == skipped[1] == 2.0
    assert result.skipped
    assert result.stats["skipped"]
    assert propagated[0].isnan()[1]
    assert propagated[1].item() == 0.0 or propagated[1].isnan()


def test_a_finite_norm_is_neither_raised_nor_skipped() -> None:
    for what in ("raise", "skip"):
        gradient = torch.tensor([3.0])
        clipped = clip_([gradient], 1.0, on_nonfinite=what)  # type: ignore[arg-type]
        assert not clipped.skipped
        assert gradient < 1.0


class _Reads(TorchDispatchMode):
    """Counts how often the host asks a tensor for a number, for which it would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def _reads() -> Iterator[_Reads]:
    with _Reads() as mode:
        yield mode


def test_the_host_waits_only_for_a_decision() -> None:
    with _reads() as reads:
        clip_([torch.ones(3), torch.ones(2, dtype=torch.bfloat16)], 1.0, clip_mode="segments")
        clip_([torch.ones(3)], 1.0)
    assert reads.count == 0

    with _reads() as reads:
        clip_([torch.ones(3)], 1.0, on_nonfinite="skip")
    assert reads.count == 1
