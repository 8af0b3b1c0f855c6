"""Records of parameters: cuts of matrices and stacks, and what does not fit is refused by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from zero2core.muon import MuonParamInfo
from zero2core.muon.info import cut, info_problem

QKV = MuonParamInfo(use_muon=True, split="qkv", sizes=(4, 1, 3))


def info(**fields: object) -> MuonParamInfo:
    return MuonParamInfo(use_muon=True, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize(
    ("record", "bounds"),
    [
        (info(), [(0, 8)]),
        (QKV, [(0, 4), (4, 5), (5, 8)]),
        (info(split="gate_up"), [(0, 4), (4, 8)]),
        (info(split="gate_up", sizes=(2, 6)), [(0, 2), (2, 8)]),
    ],
)
def test_blocks_are_views_of_rows(record: MuonParamInfo, bounds: list[tuple[int, int]], stack: tuple[int, ...]) -> None:
    matrix = torch.arange(stack[0] * 24 if stack else 24.0).reshape(*stack, 8, 3)
    assert info_problem("w", matrix.shape, record) is None
    blocks = cut(matrix, record)
    assert len(blocks) == len(bounds)
    for index, (block, (start, stop)) in enumerate(zip(blocks, bounds, strict=True)):
        assert torch.equal(block, matrix[..., start:stop, :])
        block.fill_(-index)
        assert torch.equal(matrix[..., start:stop, :], torch.full_like(block, -index))


@pytest.mark.parametrize("stack", [(), (3,)])
def test_heads_are_a_batch(stack: tuple[int, ...]) -> None:
    matrix = torch.arange(24.0 * (3 if stack else 1)).reshape(*stack, 8, 3)
    (block,) = cut(matrix, info(split="heads", num_heads=4))
    assert block.shape == (*stack, 4, 2, 3)
    for head in range(4):
        assert torch.equal(block[..., head, :, :], matrix[..., 2 * head : 2 * head + 2, :])
    block.zero_()
    assert not matrix.any()


def test_heads_of_a_matrix_that_is_not_contiguous() -> None:
    matrix = torch.arange(24.0).reshape(3, 8).mT
    (block,) = cut(matrix, info(split="heads", num_heads=2))
    assert torch.equal(block[1], matrix[4:])


@pytest.mark.parametrize(
    ("shape", "record", "said"),
    [
        ((8,), info(), "no matrix"),
        ((), info(), "no matrix"),
        ((8, 3), info(split="rows"), "split='rows': must be one of 'none'"),
        ((8, 3), MuonParamInfo(split="rows"), "split='rows'"),  # type: ignore[arg-type]
        ((8, 3), info(split="qkv"), "needs the rows of 3 blocks"),
        ((8, 3), info(split="qkv", sizes=(4, 4)), "needs the rows of 3 blocks"),
        ((8, 3), info(split="qkv", sizes=(4, 1, 2)), "sum 7: must be positive and add up to its 8 rows"),
        ((8, 3), info(split="qkv", sizes=(9, -2, 1)), "must be positive"),
        ((3, 8), QKV, "add up to its 3 rows"),
        ((7, 3), info(split="gate_up"), "7 rows have no halves"),
        ((8, 3), info(split="gate_up", sizes=(3, 4)), "sum 7"),
        ((8, 3), info(split="gate_up", sizes=(2, 2, 4)), "needs the rows of 2 blocks"),
        ((8, 3), info(split="heads", num_heads=3), "does not divide its 8 rows"),
        ((8, 3), info(split="heads", num_heads=0), "does not divide"),
        ((8, 3), info(split="heads", num_heads=2, sizes=(4, 4)), "give num_heads only"),
        ((8, 3), info(sizes=(4, 4)), "say what they are of"),
        ((8, 3), info(num_heads=2), "of split='heads' only"),
        ((8, 3), info(lr_scale=-1.0), "lr_scale=-1.0"),
        ((8,), MuonParamInfo(lr_scale=float("nan")), "lr_scale=nan"),
        ((8,), MuonParamInfo(weight_decay=-0.5), "weight_decay=-0.5"),
    ],
)
def test_what_does_not_fit_is_named(shape: tuple[int, ...], record: MuonParamInfo, said: str) -> None:
    problem = info_problem("blk.0.weight", shape, record)
    assert problem is not None
    assert problem.startswith(f"blk.0.weight, shape {shape},")
    assert said in problem


@pytest.mark.parametrize("shape", [(), (8,), (8, 3), (2, 8, 3)])
def test_without_a_mark_every_shape_fits(shape: tuple[int, ...]) -> None:
    assert info_problem("w", shape, MuonParamInfo()) is None


def test_records_are_copied_and_pickled_as_they_are() -> None:
    assert copy.deepcopy(QKV) == QKV
    assert pickle.loads(pickle.dumps(QKV)) == QKV  # noqa: S301
    with pytest.raises(AttributeError):
        QKV.use_muon = False  # type: ignore[misc]
