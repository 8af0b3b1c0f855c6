"""Plants: what a Muon optimizer does to one matrix or slice: momentum, cut, Newton-Schulz, scale, decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from harness.faults.museum.plain_muon import ByHand
from zero2core.muon.info import MuonParamInfo
from zero2core.muon.inner import MuonAdamW
from zero2core.muon.newton_schulz import Coefficients, triples_of
from zero2core.muon.sharding import MuonShardingOptimizer

# --- which matrix is orthogonalised


class _RowPieces(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        pieces = block.chunk(dist.get_world_size(), dim=-2)
        return torch.cat([super(_RowPieces, self)._orthogonal(piece, group) for piece in pieces], dim=-2)


class OrthogonalisesRowPieces(MuonShardingOptimizer):
    """Splits a matrix into rows for each rank, as what shards parameters does, and orthogonalises each piece."""

    inner_class = _RowPieces


class _QkvAsOne(ByHand):
    def _cut(self, matrix: Tensor, info: MuonParamInfo) -> list[Tensor]:
        return [matrix] if info.split == "qkv" else super()._cut(matrix, info)


class OrthogonalisesQkvAsOne(MuonShardingOptimizer):
    """Query, key and value share a weight, and it is taken for one matrix."""

    inner_class = _QkvAsOne


class _EqualQkv(ByHand):
    def _cut(self, matrix: Tensor, info: MuonParamInfo) -> list[Tensor]:
        return list(matrix.tensor_split(3, dim=-2)) if info.split == "qkv" else super()._cut(matrix, info)


class CutsQkvIntoEqualParts(MuonShardingOptimizer):
    """Cuts the weight of query, key and value into thirds, where queries have more heads than keys and values."""

    inner_class = _EqualQkv


class _HeadsAsOne(ByHand):
    def _cut(self, matrix: Tensor, info: MuonParamInfo) -> list[Tensor]:
        return [matrix] if info.split == "heads" else super()._cut(matrix, info)


class OrthogonalisesHeadsAsOne(MuonShardingOptimizer):
    """Leaves out the cut into heads."""

    inner_class = _HeadsAsOne


class _Columns(ByHand):
    def _cut(self, matrix: Tensor, info: MuonParamInfo) -> list[Tensor]:
        return list(matrix.tensor_split(2, dim=-1)) if info.split == "gate_up" else super()._cut(matrix, info)


class CutsGateUpAlongColumns(MuonShardingOptimizer):
    """Cuts a weight as if it were [in, out], where it is [out, in]."""

    inner_class = _Columns


class _StackAsOne(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        return super()._orthogonal(block.flatten(0, -2), group).view(block.shape)


class OrthogonalisesExpertsAsOne(MuonShardingOptimizer):
    """Flattens a stack of experts (and of heads) to one tall matrix."""

    inner_class = _StackAsOne


class _StackNormalised(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        if block.dim() == 2:
            return super()._orthogonal(block, group)
        whole = torch.linalg.vector_norm(block)
        # Each matrix is divided by its norm plus this.
        rest = [float(whole - torch.linalg.vector_norm(matrix)) for matrix in block]
        return torch.stack(
            [
                self._orthogonal(each, {**group, "ns_eps": max(0.0, more)})
                for each, more in zip(block, rest, strict=True)
            ]
        )


class NormalisesStackAsOne(MuonShardingOptimizer):
    """Divides every matrix of a stack by the norm of the stack."""

    inner_class = _StackNormalised


class _MarksByDimensions(MuonAdamW):
    def __init__(
        self,
        named_params: Iterable[tuple[str, Parameter]],
        info: Mapping[str, MuonParamInfo],
        **settings: Any,  # noqa: ANN401 (whatever it takes)
    ) -> None:
        named = list(named_params)
        given = {name: replace(info[name], use_muon=param.dim() > 1) for name, param in named if name in info}
        super().__init__(named, given, **settings)


class MarksByDimensions(MuonShardingOptimizer):
    """Goes by the number of dimensions, and not by the mark: embeddings are orthogonalised too."""

    inner_class = _MarksByDimensions


# --- Newton-Schulz, and what its result is multiplied by


class _CutsCoefficientsOff(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        steps = min(group["ns_steps"], len(triples_of(group["ns_coefficients"])))
        return super()._orthogonal(block, {**group, "ns_steps": steps})


class CutsCoefficientsOff(MuonShardingOptimizer):
    """Ends with the last row of coefficients, and not after the steps that were asked for."""

    inner_class = _CutsCoefficientsOff


class _RepeatsLastCoefficients(ByHand):
    def _coefficients(self, given: Coefficients, steps: int) -> Coefficients:
        triples = triples_of(given)
        return triples + triples[-1:] * (steps - len(triples))


class RepeatsLastCoefficients(MuonShardingOptimizer):
    """Goes on with the last row of coefficients where there are more steps than rows, and does not begin anew."""

    inner_class = _RepeatsLastCoefficients


class _ForgetsToTurnBack(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        if block.shape[-2] <= block.shape[-1]:
            return super()._orthogonal(block, group)
        return super()._orthogonal(block.mT, group).reshape(block.shape)


class ForgetsToTurnBack(MuonShardingOptimizer):
    """Transposes a tall matrix, and in the end gives the result its shape back, but not its order."""

    inner_class = _ForgetsToTurnBack


class _NoEps(ByHand):
    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        return super()._orthogonal(block, {**group, "ns_eps": 0.0})


class DividesByZeroNorm(MuonShardingOptimizer):
    """Divides by the norm alone: a gradient of zeros gives nan."""

    inner_class = _NoEps


class _ScalesByOtherSide(ByHand):
    def _scale_of(self, rule: str, rows: int, columns: int) -> float:
        return super()._scale_of(rule, columns, rows)


class ScalesByOtherSide(MuonShardingOptimizer):
    """Takes rows for columns in the scale: a formula for weights [in, out], where they are [out, in]."""

    inner_class = _ScalesByOtherSide


class _ScalesByWholeMatrix(ByHand):
    def _scale(self, rule: str, block: Tensor, whole: Tensor) -> float:
        return self._scale_of(rule, *whole.shape[-2:])


class ScalesByWholeMatrix(MuonShardingOptimizer):
    """Scales each block by the sides of the matrix that it was cut from."""

    inner_class = _ScalesByWholeMatrix


# --- momentum


class _NesterovIntoMomentum(ByHand):
    def _direction(self, momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        direction = super()._direction(momentum, gradient, group)
        if group["nesterov"]:
            momentum.copy_(direction)
        return direction


class NesterovIntoMomentum(MuonShardingOptimizer):
    """Keeps what Nesterov looks ahead to as the momentum."""

    inner_class = _NesterovIntoMomentum


class _NormalisesMomentum(ByHand):
    def _direction(self, momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        direction = super()._direction(momentum, gradient, group)
        return direction if group["nesterov"] else momentum

    def _orthogonal(self, block: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not group["nesterov"]:
            block.div_(torch.linalg.vector_norm(block, dim=(-2, -1), keepdim=True) + group["ns_eps"])
        return super()._orthogonal(block, group)


class NormalisesMomentumInPlace(MuonShardingOptimizer):
    """Without Nesterov the momentum itself is what is normalised, in place."""

    inner_class = _NormalisesMomentum


# --- masters and rates


class _RoundsMaster(MuonAdamW):
    @torch.no_grad()
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        super().update(name, master, gradient, state)
        master.copy_(master.to(self.named[name].dtype))


class RoundsMuonMaster(MuonShardingOptimizer):
    """Has no master beside the weights: small updates are lost."""

    inner_class = _RoundsMaster


class _DecayOfGroup(MuonAdamW):
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        info = self.info[name]
        self.info[name] = replace(info, weight_decay=None)
        super().update(name, master, gradient, state)
        self.info[name] = info


class IgnoresDecayOfParameter(MuonShardingOptimizer):
    """Decays every parameter as its set does, whatever its record says."""

    inner_class = _DecayOfGroup


class _OneRate(MuonAdamW):
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        muon, adamw = self.param_groups
        rate, adamw["lr"] = adamw["lr"], muon["lr"]
        super().update(name, master, gradient, state)
        adamw["lr"] = rate


class OneRateForBothSets(MuonShardingOptimizer):
    """Takes the learning rate of the Muon set for slices too."""

    inner_class = _OneRate


class _NoScaleForSlices(MuonAdamW):
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        info = self.info[name]
        if not info.use_muon:
            self.info[name] = replace(info, lr_scale=1.0)
        super().update(name, master, gradient, state)
        self.info[name] = info


class IgnoresRateOfSlices(MuonShardingOptimizer):
    """The rate of a parameter is asked for where a whole tensor is updated, and not where a slice is."""

    inner_class = _NoScaleForSlices
