"""MuonAdamW: its arithmetic, bit for bit, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero2core import GradientStateError
from zero2core.muon import ClipGradByAdaptiveNorm, ClipGradByGlobalNorm, MuonAdamW, MuonParamInfo, newton_schulz
from zero2core.muon.clip import joint_squared_norm, squared_norm
from zero2core.muon.inner import SCALES

MUON = MuonParamInfo(use_muon=True)
MODEL = {
    "qkv": ((8, 3), MuonParamInfo(use_muon=True, split="qkv", sizes=(4, 1, 3))),
    "bias": ((7,), MuonParamInfo(need_clip=False)),
    "experts": ((2, 4, 6), MuonParamInfo(use_muon=True, split="gate_up", lr_scale=0.5)),
    "embedding": ((5, 4), MuonParamInfo(weight_decay=0.0, lr_scale=3.0)),
    "heads": ((6, 5), MuonParamInfo(use_muon=True, split="heads", num_heads=3, weight_decay=0.5)),
    "scalar": ((), MuonParamInfo()),
}
INFO = {name: info for name, (_, info) in MODEL.items()}


pytestmark = pytest.mark.usefixtures("one_thread")


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Weights that are exact in bf16."""
    return {
        name: nn.Parameter(normal(shape, seed).bfloat16().to(dtype))
        for seed, (name, (shape, _)) in enumerate(MODEL.items())
    }


def set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    """Of one step, exact in bf16."""
    for index, param in enumerate(params.values()):
        param.grad = normal(tuple(param.shape), 100 * (step + 1) + index).bfloat16().to(param.dtype)


def one(
    shape: tuple[int, ...], info: MuonParamInfo, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[nn.Parameter, MuonAdamW]:
    """One parameter with a gradient, and its optimizer."""
    param = nn.Parameter(normal(shape, 1).to(dtype))
    param.grad = normal(shape, 2).to(dtype)
    return param, MuonAdamW([("w", param)], {"w": info}, **settings)


def rows(*bounds: int, stack: int | None = None) -> list[Callable[[Tensor], Tensor]]:
    """What takes each block of rows, of this matrix of a stack, out of a tensor."""
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    return [lambda m, span=span: (m if stack is None else m[stack])[span] for span in spans]


BLOCKS: list[tuple[tuple[int, ...], MuonParamInfo, list[Callable[[Tensor], Tensor]]]] = [
    ((8, 3), MUON, rows(0, 8)),
    ((8, 3), INFO["qkv"], rows(0, 4, 5, 8)),
    ((6, 5), MuonParamInfo(use_muon=True, split="heads", num_heads=3), rows(0, 2, 4, 6)),
    ((6, 5), MuonParamInfo(use_muon=True, split="gate_up", sizes=(2, 4)), rows(0, 2, 6)),
    ((2, 3, 5), MUON, rows(0, 3, stack=0) + rows(0, 3, stack=1)),
    ((2, 4, 3), MuonParamInfo(use_muon=True, split="gate_up"), rows(0, 2, 4, stack=0) + rows(0, 2, 4, stack=1)),
    ((1, 4, 3), MuonParamInfo(use_muon=True, split="qkv", sizes=(1, 1, 2)), rows(0, 1, 2, 4, stack=0)),
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("shape", "info", "blocks"), BLOCKS)
def test_each_block_is_orthogonalised_and_scaled_on_its_own(
    shape: tuple[int, ...], info: MuonParamInfo, blocks: list[Callable[[Tensor], Tensor]], scale: Any
) -> None:
    """No steps of Newton-Schulz: what is left is the division by each block's own norm, and the scale.

    Gradients are signs: sums of their squares are exact in any order.
    """
    settings: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "ns_steps": 0, "scale": scale}
    param, optimizer = one(shape, info, ns_dtype=torch.float32, **settings)
    assert param.grad is not None
    param.grad.sign_()
    expected = param.detach().clone()
    for block in blocks:
        gradient = block(param.grad)
        outputs, inputs = gradient.shape
        factor = {
            "original": math.sqrt(max(1, outputs / inputs)),
            "spectral": math.sqrt(outputs / inputs),
            "match_rms_adamw": 0.2 * math.sqrt(max(outputs, inputs)),
        }[scale]
        block(expected).sub_(gradient / (torch.linalg.vector_norm(gradient) + 1e-7) * factor)
    optimizer.step()
    assert torch.equal(param, expected)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [{}, {"lr_scale": 0.25, "weight_decay": 0.75}, {"weight_decay": 0.0}])
def test_muon_against_its_formula(own: dict[str, float], ns_dtype: torch.dtype, nesterov: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.875, "nesterov": nesterov}
    ns: dict[str, Any] = {"coefficients": "quintic", "steps": 3, "eps": 1e-6, "dtype": ns_dtype}
    param, optimizer = one(
        (6, 4), MuonParamInfo(use_muon=True, **own), scale="original", ns_coefficients="quintic", ns_steps=3,
        ns_eps=1e-6, ns_dtype=ns_dtype, **settings,
    )  # fmt: skip
    weight, momentum = param.detach().clone(), torch.zeros(6, 4)
    lr, decay = 0.5 * own.get("lr_scale", 1.0), own.get("weight_decay", 0.25)
    for step in range(4):
        gradient = normal((6, 4), 10 + step)
        param.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(param.grad, gradient)
        momentum.lerp_(gradient, 0.125)
        direction = gradient.lerp(momentum, 0.875) if nesterov else momentum
        weight = weight * (1 - lr * decay)
        weight.add_(newton_schulz(direction, **ns) * math.sqrt(1.5), alpha=-lr)
        assert torch.equal(param, weight)
        assert torch.equal(optimizer.state[param]["momentum"], momentum)


def test_momentum_is_left_as_it_is_without_nesterov() -> None:
    """In torch 2.13 it is normalised in place where parameters are bf16."""
    param, optimizer = one((4, 4), MUON, torch.bfloat16, momentum=0.5, nesterov=False)
    assert param.grad is not None
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum"], 0.5 * param.grad.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (1, 6), (6, 1), (2, 3, 3), (0, 4), (4, 0)])
def test_a_gradient_of_zeros_leaves_decay_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    param, optimizer = one(shape, MUON, lr=0.5, weight_decay=0.5, ns_dtype=dtype)
    weight = param.detach().clone()
    for _ in range(3):
        param.grad = torch.zeros(shape)
        optimizer.step()
        weight *= 0.75
    assert torch.equal(param, weight)
    assert not optimizer.state[param]["momentum"].any()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.999)])
@pytest.mark.parametrize("shape", [(), (7,), (33, 5), (1031,)])
def test_the_other_set_is_torchs_adamw(shape: tuple[int, ...], betas: tuple[float, float], decay: float) -> None:
    settings = {"adamw_lr": 3e-3, "adamw_betas": betas, "adamw_eps": 1e-7, "adamw_weight_decay": decay}
    param, optimizer = one(shape, MuonParamInfo(), lr=7.0, **settings)
    twin = nn.Parameter(param.detach().clone())
    adamw = torch.optim.AdamW([twin], lr=3e-3, betas=betas, eps=1e-7, weight_decay=decay, foreach=False, fused=False)
    for step in range(6):
        param.grad = normal(shape, 20 + step)
        twin.grad = param.grad.clone()
        optimizer.step()
        adamw.step()
        assert torch.equal(param, twin)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][moment], adamw.state[twin][moment])


def test_adamw_has_its_own_rate_and_decay_of_a_parameter() -> None:
    param, optimizer = one((9,), MuonParamInfo(lr_scale=0.5, weight_decay=0.25), lr=0.125)
    twin = nn.Parameter(param.detach().clone())
    twin.grad = normal((9,), 2)
    optimizer.step()
    torch.optim.AdamW([twin], lr=0.0625, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.25, foreach=False).step()
    assert torch.equal(param, twin)


@pytest.mark.parametrize("seed", range(5))
def test_slices_have_the_bits_of_the_whole(seed: int) -> None:
    numel = 203
    param, optimizer = one((numel,), MuonParamInfo(lr_scale=0.5), torch.bfloat16)
    cuts = sorted(torch.randint(0, numel, (4,), generator=torch.Generator().manual_seed(seed)).tolist())
    spans = list(zip([0, *cuts], [*cuts, numel], strict=True))
    buffer = torch.empty(numel + 3)[3:]  # slices start anywhere in memory
    weight = param.detach().clone()
    states = [optimizer.init_state("w", weight[start:stop]) for start, stop in spans]
    for step in range(4):
        param.grad = normal((numel,), 30 + step).bfloat16()
        buffer.copy_(param.grad)
        optimizer.step()
        for (start, stop), state in zip(spans, states, strict=True):
            optimizer.update("w", state["master"], buffer[start:stop], state)
    for key in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(torch.cat([state[key] for state in states]), optimizer.state[param][key])
    assert {state["step"] for state in states} == {4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_go_as_fp32_parameters_would(dtype: torch.dtype) -> None:
    half, full = model(dtype), model()
    optimizers = [MuonAdamW(params.items(), INFO, lr=1e-4) for params in (half, full)]
    for step in range(5):
        for params, optimizer in zip((half, full), optimizers, strict=True):
            set_gradients(params, step)
            optimizer.step()
        for name, param in full.items():
            master = optimizers[0].state[half[name]]["master"]
            assert master.dtype == torch.float32
            assert torch.equal(master, param)
            assert torch.equal(half[name], param.to(dtype))


def test_updates_below_half_a_unit_add_up() -> None:
    """Below 1, bf16 is spaced by 2**-8: a step of 2**-11 (of equal gradients, AdamW takes the rate) rounds away."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MuonAdamW([("w", param)], {"w": MuonParamInfo()}, lr=2**-11, adamw_weight_decay=0.0)
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(param, torch.ones_like(param))
    for _ in range(15):
        optimizer.step()
    assert torch.equal(param, torch.full_like(param, 1 - 16 * 2**-11))


def test_parameters_of_any_strides_go_as_contiguous_ones() -> None:
    shape = (66, 35)
    weight, gradients = normal(shape, 1), [normal(shape, 2 + step) for step in range(3)]
    plain, strided = nn.Parameter(weight.clone()), nn.Parameter(weight.t().contiguous().t())
    assert not strided.is_contiguous()
    for param in (plain, strided):
        optimizer = MuonAdamW([("w", param)], {"w": MUON}, ns_dtype=torch.float32)
        for gradient in gradients:
            param.grad = torch.empty_like(param, requires_grad=False).copy_(gradient)
            optimizer.step()
        assert optimizer.state[param]["momentum"].is_contiguous()
    assert torch.equal(plain, strided)


@pytest.mark.parametrize("clip", [ClipGradByGlobalNorm, ClipGradByAdaptiveNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipped_gradients_are_those_of_the_factors(dtype: torch.dtype, clip: Any) -> None:
    """Against an optimizer without clip that is given fp32 gradients already multiplied, in ``main_grad``."""
    arguments = (0.5,) if clip is ClipGradByGlobalNorm else (0.75, 2)
    clipped, plain = model(dtype), model(dtype)
    optimizer = MuonAdamW(clipped.items(), INFO, grad_clip=clip(*arguments))
    other, mirror = MuonAdamW(plain.items(), INFO), clip(*arguments)
    need_clip = [INFO[name].need_clip for name in plain]
    for step in range(5):
        set_gradients(clipped, step)
        given = [param.grad.float().clone() for param in clipped.values() if param.grad is not None]
        sq_norms = torch.stack([squared_norm(gradient) for gradient in given])
        factors = mirror.factors(list(plain), sq_norms, joint_squared_norm(sq_norms, need_clip), need_clip)
        assert (factors < 1).any()
        for param, gradient, factor in zip(plain.values(), given, factors, strict=True):
            param.main_grad = gradient * factor.float()  # type: ignore[attr-defined]
        optimizer.step()
        other.step()
        for name in plain:
            assert torch.equal(clipped[name], plain[name]), name
        for param, gradient in zip(clipped.values(), given, strict=True):
            assert torch.equal(param.grad.float(), gradient)  # type: ignore[union-attr]


def test_excluded_parameters_are_updated_all_the_same() -> None:
    params = model()
    optimizer = MuonAdamW(params.items(), INFO, grad_clip=ClipGradByGlobalNorm(1e-3))
    twin = nn.Parameter(params["bias"].detach().clone())
    set_gradients(params, 0)
    twin.grad = params["bias"].grad
    optimizer.step()
    torch.optim.AdamW([twin], lr=2e-3, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1, foreach=False).step()
    assert torch.equal(params["bias"], twin)


def test_an_infinite_gradient_under_a_clip_becomes_nan_in_its_place_alone() -> None:
    params = {name: nn.Parameter(torch.ones(3)) for name in "ab"}
    optimizer = MuonAdamW(params.items(), dict.fromkeys("ab", MuonParamInfo()), grad_clip=ClipGradByGlobalNorm(1.0))
    params["a"].grad, params["b"].grad = torch.tensor([1.0, math.inf, 1.0]), torch.ones(3)
    optimizer.step()
    assert params["a"].isnan().tolist() == [False, True, False]
    assert params["b"].isfinite().all()


def test_without_a_gradient_it_counts_as_zeros() -> None:
    params, twins = model(torch.bfloat16), model(torch.bfloat16)
    optimizers = [MuonAdamW(each.items(), INFO, grad_clip=ClipGradByGlobalNorm(1.0)) for each in (params, twins)]
    for step in range(3):
        set_gradients(params, step)
        set_gradients(twins, step)
        if step:
            params["qkv"].grad = params["bias"].grad = None
            twins["qkv"].grad, twins["bias"].grad = torch.zeros(8, 3).bfloat16(), torch.zeros(7).bfloat16()
        for optimizer in optimizers:
            optimizer.step()
    for name in params:
        assert torch.equal(params[name], twins[name])
        for key, value in optimizers[0].state[params[name]].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizers[1].state[twins[name]][key]))


def test_skip_missing_moves_nothing_of_it() -> None:
    params = model(torch.bfloat16)
    clip = ClipGradByAdaptiveNorm()
    optimizer = MuonAdamW(params.items(), INFO, skip_missing=True, grad_clip=clip)
    set_gradients(params, 0)
    gone = {"qkv", "scalar"}
    for name in gone:
        params[name].grad = None
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step()
    assert {name for name, param in params.items() if torch.equal(param, before[name])} == gone
    assert not optimizer.state[params["qkv"]]["momentum"].any()
    assert optimizer.state[params["scalar"]]["step"] == 0
    assert set(clip.state_dict()["norms"]) == set(MODEL) - gone - {"bias"}
    optimizer.zero_grad()
    optimizer.step()  # nothing at all has a gradient
    assert optimizer.state[params["bias"]]["step"] == 1
    assert clip.state_dict()["step"] == 2  # of its warm-up it is a step all the same


def test_main_grad_is_taken_and_zeroed() -> None:
    params, twins = model(), model()
    optimizers = [MuonAdamW(each.items(), INFO) for each in (params, twins)]
    set_gradients(twins, 0)
    for param, twin in zip(params.values(), twins.values(), strict=True):
        param.main_grad = twin.grad.clone()  # type: ignore[attr-defined, union-attr]
    for optimizer in optimizers:
        optimizer.step()
    for name in params:
        assert torch.equal(params[name], twins[name])
    optimizers[0].zero_grad()
    assert not any(param.main_grad.any() for param in params.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("main_grad", "grad", "said"),
    [
        (torch.zeros(8, 3), torch.zeros(8, 3), r"qkv has main_grad and \.grad"),
        (torch.zeros(8, 3).bfloat16(), None, r"qkv has main_grad torch\.bfloat16 \(8, 3\): must be torch\.float32"),
        (torch.zeros(24), None, r"qkv has main_grad torch\.float32 \(24,\)"),
        (None, torch.zeros(8, 3).to_sparse(), r"qkv has a gradient of layout torch\.sparse_coo"),
    ],
)
def test_gradients_that_cannot_be_used_change_nothing(main_grad: Tensor | None, grad: Tensor | None, said: str) -> None:
    params = dict(reversed(model().items()))
    optimizer = MuonAdamW(params.items(), INFO)
    set_gradients(params, 0)
    params["qkv"].main_grad, params["qkv"].grad = main_grad, grad  # type: ignore[attr-defined]
    before = {name: param.detach().clone() for name, param in params.items()}
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in params.items())


def test_frozen_parameters_are_left_out_everywhere() -> None:
    params = model()
    params["bias"].requires_grad_(False)
    optimizer = MuonAdamW(params.items(), {name: info for name, info in INFO.items() if name != "bias"})
    assert "bias" not in optimizer.named
    assert params["bias"] not in optimizer.state
    before = params["bias"].detach().clone()
    set_gradients(params, 0)
    optimizer.step()
    assert torch.equal(params["bias"], before)


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_or_thawed_later_raises(frozen: bool) -> None:
    params = model()
    params["heads"].requires_grad_(not frozen)
    optimizer = MuonAdamW(params.items(), INFO)
    set_gradients(params, 0)
    params["heads"].requires_grad_(frozen)
    before = {name: param.detach().clone() for name, param in params.items()}
    said = "heads is trainable but was frozen" if frozen else "heads is frozen but was trainable"
    with pytest.raises(GradientStateError, match=said):
        optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in params.items())


def test_groups_and_names_are_in_order() -> None:
    optimizer = MuonAdamW(model().items(), INFO, lr=0.5, ns_coefficients=[[2, -1.5, 0.5]])
    muon, adamw = optimizer.param_groups
    assert list(optimizer.named) == list(MODEL)
    assert (muon["names"], muon["use_muon"]) == (["qkv", "experts", "heads"], True)
    assert (adamw["names"], adamw["use_muon"], adamw["lr"]) == (["bias", "embedding", "scalar"], False, 0.5)
    assert muon["ns_coefficients"] == ((2.0, -1.5, 0.5),)
    for group in optimizer.param_groups:
        assert all(optimizer.named[name] is param for name, param in zip(group["names"], group["params"], strict=True))


@pytest.mark.parametrize("info", [MUON, MuonParamInfo()])
def test_either_set_may_be_empty(info: MuonParamInfo) -> None:
    param, optimizer = one((3, 3), info)
    before = param.detach().clone()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == ([1, 0] if info.use_muon else [0, 1])
    assert not torch.equal(param, before)


def test_deferred_state_is_made_where_a_step_needs_it() -> None:
    params, twins = model(torch.bfloat16), model(torch.bfloat16)
    deferred = MuonAdamW(params.items(), INFO, defer_state=True)
    assert not deferred.state
    for each, optimizer in ((params, deferred), (twins, MuonAdamW(twins.items(), INFO))):
        set_gradients(each, 0)
        optimizer.step()
    assert all(torch.equal(params[name], twins[name]) for name in params)


def test_state_of_a_part_of_a_matrix_is_refused() -> None:
    _, optimizer = one((4, 4), MUON)
    with pytest.raises(ValueError, match=r"w is orthogonalised as a whole, \(4, 4\)"):
        optimizer.init_state("w", torch.zeros(8))


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    param, optimizer = one((3,), MuonParamInfo())
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert calls == [True]
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize(
    "groups",
    [
        lambda p: [{"params": list(p.values())}],
        lambda p: {"params": list(p.values())},
        lambda p: p,
        lambda p: list(p.values()),
        lambda p: p["qkv"],
        lambda p: [("qkv",)],
        lambda p: [(p["qkv"], "qkv")],
    ],
    ids=["groups", "group", "dict", "parameters", "tensor", "short", "swapped"],
)
def test_what_is_no_list_of_named_parameters_is_refused(groups: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model\.named_parameters"):
        MuonAdamW(groups(model()), INFO)


def test_records_and_clips_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="info is a list"):
        MuonAdamW(model().items(), [MUON])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"info\['qkv'\] is a dict"):
        MuonAdamW(model().items(), {**INFO, "qkv": {"use_muon": True}})  # type: ignore[dict-item]
    for clip in (1.0, ClipGradByGlobalNorm):
        with pytest.raises(TypeError, match="is no clip"):
            MuonAdamW(model().items(), INFO, grad_clip=clip)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p, i: i.pop("bias"), "bias has no record in info"),
        (lambda p, i: i.update(bias=MUON), r"bias, shape \(7,\), has use_muon=True"),
        (lambda p, i: i.update(qkv=MuonParamInfo(True, "qkv", (1, 2, 3))), "qkv, .* add up to its 8 rows"),
        (lambda p, i: i.update(heads=MuonParamInfo(True, "heads", num_heads=4)), "heads, .* does not divide its 6"),
        (lambda p, i: i.update(bias=MuonParamInfo(split="rows")), "bias, .* split='rows'"),
        (lambda p, i: p.update(tied=p["bias"]), "tied is bias again"),
        (lambda p, i: p.update(bias=nn.Parameter(torch.zeros(7, dtype=torch.complex64))), "bias is .*complex64"),
        (lambda p, i: [param.requires_grad_(False) for param in p.values()], "no trainable parameter"),
    ],
)
def test_a_parameter_that_cannot_be_optimised_is_named(change: Callable[[Any, Any], Any], said: str) -> None:
    params, info = model(), dict(INFO)
    change(params, info)
    with pytest.raises(ValueError, match=said):
        MuonAdamW(params.items(), info)


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="w is the name of two parameters"):
        MuonAdamW([("w", nn.Parameter(torch.zeros(2))) for _ in range(2)], {"w": MuonParamInfo()})


@pytest.mark.parametrize(
    "setting",
    [
        {"lr": -1.0}, {"lr": math.nan}, {"lr": math.inf}, {"weight_decay": -1.0}, {"ns_steps": -1}, {"ns_eps": -1e-7},
        {"momentum": 1.0}, {"momentum": -0.5}, {"scale": "rms"}, {"ns_dtype": torch.float16}, {"adamw_lr": -1.0},
        {"adamw_eps": -1e-9}, {"adamw_weight_decay": -1.0},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}: must be"):
        MuonAdamW(model().items(), INFO, **setting)


def test_betas_and_coefficients_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"adamw_beta2=1\.0"):
        MuonAdamW(model().items(), INFO, adamw_betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"adamw_beta1=-0\.1"):
        MuonAdamW(model().items(), INFO, adamw_betas=(-0.1, 0.9))
    with pytest.raises(ValueError, match="'cubic' are unknown"):
        MuonAdamW(model().items(), INFO, ns_coefficients="cubic")
    with pytest.raises(ValueError, match="at least one triple"):
        MuonAdamW(model().items(), INFO, ns_coefficients=[(1.0, 2.0)])


def test_further_groups_are_refused() -> None:
    _, optimizer = one((3,), MuonParamInfo())
    with pytest.raises(TypeError, match="no further parameter groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_record_of_no_parameter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is misspelt, perhaps; or that of a tied weight."""
    param = nn.Parameter(torch.ones(2, 2))
    MuonAdamW([("weight", param)], {"weight": MuonParamInfo(), "wieght": MuonParamInfo(use_muon=True)})
    assert "records of no parameter, which say nothing: wieght" in caplog.text
