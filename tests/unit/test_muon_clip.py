"""Both clips against their formulas in Python's fp64, which are the same operations: equal, without tolerance."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

from zero2core.muon import ClipGradByAdaptiveNorm, ClipGradByGlobalNorm
from zero2core.muon.clip import GradClip, joint_squared_norm, squared_norm

NAMES = ["a", "b", "c"]


def squares(*norms: float) -> Tensor:
    return torch.tensor([norm * norm for norm in norms], dtype=torch.float64)


def factors(clip: GradClip, norms: list[float], need_clip: tuple[bool, ...] = (True, True, True)) -> list[float]:
    """Of parameters a, b, c with these norms."""
    sq_norms = squares(*norms)
    found = clip.factors(NAMES, sq_norms, joint_squared_norm(sq_norms, need_clip), need_clip)
    assert found.dtype == torch.float64
    return [float(factor) for factor in found]


def joint(*norms: float) -> float:
    return math.sqrt(sum(norm * norm for norm in norms))


def test_global_scales_all_alike_and_never_up() -> None:
    clip = ClipGradByGlobalNorm(2.0)
    assert factors(clip, [3.0, 4.0, 12.0]) == [2.0 / (13.0 + 1e-6)] * 3
    assert factors(clip, [0.5, 0.25, 0.0]) == [1.0] * 3
    assert factors(clip, [0.0, 0.0, 0.0]) == [1.0] * 3


def test_global_leaves_excluded_ones_out_of_norm_and_scaling() -> None:
    assert factors(ClipGradByGlobalNorm(1.0), [3.0, 1000.0, 4.0], (True, False, True)) == [
        1.0 / (5.0 + 1e-6),
        1.0,
        1.0 / (5.0 + 1e-6),
    ]
    assert factors(ClipGradByGlobalNorm(1.0), [3.0, 4.0, 5.0], (False, False, False)) == [1.0] * 3


def test_global_passes_on_what_is_not_finite() -> None:
    assert factors(ClipGradByGlobalNorm(1.0), [3.0, math.inf, 4.0]) == [0.0] * 3
    assert all(map(math.isnan, factors(ClipGradByGlobalNorm(1.0), [3.0, math.nan, 4.0])))
    assert factors(ClipGradByGlobalNorm(1.0), [3.0, math.nan, 4.0], (True, False, True))[1] == 1.0


def test_adaptive_against_its_formula() -> None:
    """Norms of binary fractions: their squares and roots are exact."""
    clip = ClipGradByAdaptiveNorm(ratio=1.5, warmup_steps=2, beta=0.75, eps=1e-8)
    seen = [[3.0, 0.25, 8.0], [2.0, 0.5, 16.0], [2.5, 1.0, 8.0], [100.0, 0.125, 8.5], [0.0, 0.5, 20.0]]
    tracked = list(seen[0])
    for step, norms in enumerate(seen, start=1):
        expected = []
        for k, norm in enumerate(norms):
            if step <= 2:
                expected.append(min(1.0, 1 / (joint(*norms) + 1e-8)))
                tracked[k] = min(tracked[k], norm)
                continue
            most = 1.5 * tracked[k]
            expected.append(most / norm if norm > most else 1.0)
            if norm == 0.0:
                continue  # moves nothing
            tracked[k] = 0.75 * tracked[k] + (1 - 0.75) * min(norm, most)
        assert factors(clip, norms) == expected
        assert clip.state_dict() == {"step": step, "norms": dict(zip(NAMES, tracked, strict=True))}


def test_adaptive_never_scales_up_while_warming_up() -> None:
    clip = ClipGradByAdaptiveNorm()
    assert factors(clip, [0.5, 0.25, 0.0]) == [1.0] * 3
    assert factors(clip, [0.0, 0.0, 0.0]) == [1.0] * 3
    assert clip.state_dict() == {"step": 2, "norms": dict(zip(NAMES, [0.5, 0.25, 0.0], strict=True))}


def test_adaptive_without_warm_up_starts_at_the_first_norm() -> None:
    clip = ClipGradByAdaptiveNorm(ratio=2.0, warmup_steps=0, beta=0.5)
    assert factors(clip, [4.0, 1.0, 0.0]) == [1.0, 1.0, 1.0]
    assert factors(clip, [16.0, 1.0, 0.0]) == [0.5, 1.0, 1.0]
    assert clip.state_dict()["norms"] == {"a": 0.5 * 4 + 0.5 * 8, "b": 1.0, "c": 0.0}


def test_adaptive_neither_scales_nor_tracks_excluded_ones() -> None:
    clip = ClipGradByAdaptiveNorm(ratio=1.0, warmup_steps=1)
    assert factors(clip, [3.0, 1000.0, 4.0], (True, False, True)) == [1 / (5 + 1e-8), 1.0, 1 / (5 + 1e-8)]
    assert factors(clip, [6.0, 9000.0, 4.0], (True, False, True)) == [0.5, 1.0, 1.0]
    assert set(clip.state_dict()["norms"]) == {"a", "c"}
    assert factors(clip, [6.0, 9000.0, 4.0], (False, False, False)) == [1.0] * 3
    assert clip.state_dict()["step"] == 3


def test_adaptive_starts_a_parameter_when_it_first_has_a_gradient() -> None:
    clip = ClipGradByAdaptiveNorm(ratio=1.0, warmup_steps=0)
    clip.factors(["a"], squares(4.0), squares(4.0)[0], [True])
    assert clip.factors(["b", "a"], squares(8.0, 8.0), squares(8.0)[0], [True, True]).tolist() == [1.0, 0.5]


def test_adaptive_keeps_a_finite_tracked_norm_of_infinite_ones_but_not_of_nan() -> None:
    clip = ClipGradByAdaptiveNorm(ratio=1.5, warmup_steps=0, beta=0.5)
    factors(clip, [4.0, 4.0, 4.0])
    found = factors(clip, [math.inf, math.nan, 4.0])
    assert found[0] == 0.0
    assert found[2] == 1.0
    norms = clip.state_dict()["norms"]
    assert norms["a"] == 0.5 * 4 + 0.5 * 6
    assert math.isnan(norms["b"])
    assert norms["c"] == 4.0


@pytest.mark.parametrize("through", ["state_dict", "deepcopy", "pickle"])
def test_adaptive_goes_on_from_its_state(through: str) -> None:
    clip = ClipGradByAdaptiveNorm(ratio=1.1, warmup_steps=2, beta=0.9)
    for norms in ([1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [7.0, 0.1, 2.0]):
        factors(clip, norms)
    if through == "state_dict":
        saved = clip.state_dict()
        given = copy.deepcopy(saved)
        other = ClipGradByAdaptiveNorm(ratio=1.1, warmup_steps=2, beta=0.9)
        other.load_state_dict(saved)
        factors(other, [5.0, 6.0, 7.0])
        assert saved == given
        other.load_state_dict(saved)
    else:
        other = copy.deepcopy(clip) if through == "deepcopy" else pickle.loads(pickle.dumps(clip))  # noqa: S301
    for norms in ([5.0, 1.5, 1.0], [9.0, 9.0, 9.0]):
        assert factors(other, norms) == factors(clip, norms)
    assert other.state_dict() == clip.state_dict()


def test_global_has_no_state() -> None:
    clip = ClipGradByGlobalNorm(1.0)
    assert clip.state_dict() == {}
    clip.load_state_dict({})


def test_states_of_other_clips_are_refused() -> None:
    adaptive = ClipGradByAdaptiveNorm()
    with pytest.raises(ValueError, match="ClipGradByGlobalNorm has keys"):
        ClipGradByGlobalNorm(1.0).load_state_dict(adaptive.state_dict())
    with pytest.raises(ValueError, match="ClipGradByAdaptiveNorm has keys"):
        adaptive.load_state_dict({})


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_max_norm_must_be_positive(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm="):
        ClipGradByGlobalNorm(max_norm)


@pytest.mark.parametrize(
    "setting", [{"ratio": 0.0}, {"warmup_steps": -1}, {"beta": 1.5}, {"beta": -0.1}, {"eps": -1.0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))}={next(iter(setting.values()))}"):
        ClipGradByAdaptiveNorm(**setting)  # type: ignore[arg-type]


def test_norms_are_fp64_one_for_each_name() -> None:
    clip = ClipGradByGlobalNorm(1.0)
    with pytest.raises(TypeError, match=r"torch\.float32"):
        clip.factors(NAMES, torch.ones(3), torch.ones(()).double(), [True] * 3)
    with pytest.raises(ValueError, match="3 names"):
        clip.factors(NAMES, squares(1.0, 2.0), squares(1.0)[0], [True] * 3)
    with pytest.raises(ValueError, match="2 of need_clip"):
        clip.factors(NAMES, squares(1.0, 2.0, 3.0), squares(1.0)[0], [True] * 2)


def test_squares_are_exact_where_fp32_would_not_be() -> None:
    gradient = torch.tensor([[2.0**12 + 2.0**-10, 2.0**100], [0.0, -1.0]])[:, :1]
    assert float(squared_norm(gradient)) == (2.0**12 + 2.0**-10) ** 2
    assert float(squared_norm(torch.tensor([2.0**100]))) == 2.0**200  # beyond fp32
    with pytest.raises(TypeError, match="bfloat16"):
        squared_norm(gradient.bfloat16())


def test_adaptive_is_not_started_by_a_gradient_that_is_missing() -> None:
    """A parameter without a gradient while warming up counts as zeros: its later ones must not be scaled to 0."""
    clip = ClipGradByAdaptiveNorm(ratio=2.0, warmup_steps=1, beta=0.5)
    absent, there = torch.zeros(1, dtype=torch.float64), torch.full((1,), 9.0, dtype=torch.float64)
    clip.factors(["w"], absent, absent[0], [True])
    assert clip.factors(["w"], there, there[0], [True]).tolist() == [1.0]
    assert clip.factors(["w"], 16 * there, 16 * there[0], [True]).tolist() == [0.5]  # norm 12, tracked 3
    tracked = clip.state_dict()["norms"]
    clip.factors(["w"], absent, absent[0], [True])
    assert clip.state_dict()["norms"] == tracked
