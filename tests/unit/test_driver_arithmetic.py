"""The driver's own arithmetic, the clipping coefficient and the bits of a norm; and what a rank notes down."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import msgspec
import pytest
import torch

from harness.drive.driver import clip_coefficient
from harness.drive.record import Record, bits_of
from harness.drive.trail import Trail
from harness.launch.rank import RankContext
from harness.launch.tap import CollectiveLog
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.verdict import Divergence, Property, RankStatus, Stage

# --- the clipping coefficient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("squared_norm", "max_norm", "expected"),
    [
        (4.0, 1.0, 1.0 / (2.0 + 1e-6)),
        (1e-4, 1.0, 1.0),  # would be almost 100: gradients are never scaled up
        (0.0, 1.0, 1.0),
        (0.0, 1e-7, 1e-7 / 1e-6),  # the 1e-6 counts where there is no norm
        (1.0, 1.0, 1.0 / (1.0 + 1e-6)),  # a norm of just max_norm is scaled, by a hair
        (4.0, 2.0 + 1e-6, 1.0),
        (math.inf, 1.0, 0.0),
        (1e300, 1.0, 1.0 / (1e150 + 1e-6)),
        (5e-324, 1.0, 1.0),
    ],
)
def test_the_coefficient_by_hand(squared_norm: float, max_norm: float, expected: float) -> None:
    assert clip_coefficient(squared_norm, max_norm) == expected


@pytest.mark.parametrize("squared_norm", [math.nan, -1.0, -5e-324, -math.inf])
def test_a_norm_that_is_none_gives_nan(squared_norm: float) -> None:
    """It must reach the gradient: a coefficient of 1 would hide it."""
    assert math.isnan(clip_coefficient(squared_norm, 1.0))


def test_the_coefficient_is_the_one_of_torch() -> None:
    """``torch.nn.utils.clip_grad_norm_`` computes in fp32; in fp64 it gives the same bits."""
    for gradient in ([3.0, 4.0], [0.1, 0.2], [0.0, 0.0], [1e-9, 1e-12]):
        for max_norm in (0.1, 1.0, 6.0):
            parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
            parameter.grad = torch.tensor(gradient, dtype=torch.float64)
            norm = float(torch.nn.utils.clip_grad_norm_([parameter], max_norm, foreach=False))
            scaled = torch.tensor(gradient, dtype=torch.float64) * clip_coefficient(norm * norm, max_norm)

            torch.testing.assert_close(parameter.grad, scaled, rtol=1e-14, atol=0)


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 2.0**-149, -(2.0**-126), math.inf, -math.inf, 3.4e38])
def test_bits_are_those_of_the_value(value: float) -> None:
    """fp32 and fp64 as struct packs them, bf16 as the upper half of fp32, with leading zeros and without a sign."""
    single = f"0x{struct.pack('>f', value).hex()}"

    assert bits_of(float(torch.tensor(value, dtype=torch.float32)), torch.float32) == single
    assert bits_of(value, torch.float64) == f"0x{struct.pack('>d', value).hex()}"
    if torch.tensor(value).bfloat16().float() == value:
        assert bits_of(float(torch.tensor(value, dtype=torch.bfloat16)), torch.bfloat16) == single[:6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_nan_has_the_same_bits(dtype: torch.dtype) -> None:
    """Which payload and sign a nan has depends on the machine."""
    assert bits_of(math.nan, dtype) == "nan"
    assert bits_of(-math.nan, dtype) == "nan"


# --- what a rank notes down -------------------------------------------------------------------------------------------


@pytest.fixture
def emitted() -> list[bytes]:
    return []


@pytest.fixture
def record(tmp_path: Path, emitted: list[bytes]) -> Record:
    scenario = Scenario(
        world=1,
        seed=0,
        parameters=(Parameter("w", (1,)),),
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(1), Part(False, (0,), ((),)), Step()),
    )
    context = RankContext(0, 1, "gloo", "cpu", tmp_path, CollectiveLog(), emitted.append)
    return Record(context, scenario, Trail(tmp_path, 1, 0))


def test_the_first_divergence_stays_and_is_told_at_once(record: Record, emitted: list[bytes]) -> None:
    record.enter(2, Stage.NORM)
    before = record.clean
    record.diverge(Property.NORM, "first", expected=1.0)
    record.enter(2, Stage.GATHER)
    record.diverge(Property.WEIGHTS, "a consequence")

    assert (before, record.clean) == (True, False)
    assert record.divergence == Divergence(
        property=Property.NORM, stage=Stage.NORM, step=2, rank=0, message="first", expected=1.0
    )
    assert [msgspec.msgpack.decode(event, type=Divergence) for event in emitted] == [record.divergence]
    assert record.verdict(RankStatus.DONE, None).divergence == record.divergence


def test_comparing_nothing_is_no_check(record: Record) -> None:
    record.checked(Property.MASTER, 0)
    record.checked(Property.WEIGHTS, 12)
    record.checked(Property.WEIGHTS)

    assert record.verdict(RankStatus.DONE, None).checks == {"weights": 2}
