"""MuonShardingOptimizer with one thing wrong in each; and right ones that compute in another way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero2core import MuonAdamW, MuonShardingOptimizer
from zero2core.muon.clip import squared_norm
from zero2core.muon.info import cut
from zero2core.muon.inner import SCALES
from zero2core.muon.newton_schulz import triples_of
from zero2core.muon.shard import Shard

# --- other products ---------------------------------------------------------------------------------------------------


class OtherProducts(MuonAdamW):
    """Newton-Schulz by fused operations, never transposed."""

    def _triples(self) -> list[tuple[float, float, float]]:
        group = self.param_groups[0]
        return list(islice(cycle(triples_of(group["ns_coefficients"])), group["ns_steps"]))

    def _iterate(self, matrix: Tensor) -> Tensor:
        group = self.param_groups[0]
        iterate = (matrix / (matrix.square().sum().sqrt() + group["ns_eps"])).to(group["ns_dtype"])
        for a, b, c in self._triples():
            gram = iterate.mT @ iterate
            iterate = torch.addmm(iterate, iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), beta=a)
        return iterate.float()

    @torch.no_grad()
    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        info, group = self.info[name], self.param_groups[0]
        if not info.use_muon:
            super().update(name, master, gradient, state)
            return
        lr = group["lr"] * info.lr_scale
        decay = group["weight_decay"] if info.weight_decay is None else info.weight_decay
        momentum, beta = state["momentum"], group["momentum"]
        momentum.lerp_(gradient, 1 - beta)
        update = gradient.lerp(momentum, beta) if group["nesterov"] else momentum.clone()
        master.mul_(1 - lr * decay)
        for block, into in zip(cut(update, info), cut(master, info), strict=True):
            rows, columns = block.shape[-2:]
            for one, place in zip(
                block.reshape(-1, rows, columns).unbind(0), into.view(-1, rows, columns).unbind(0), strict=True
            ):
                place.sub_(self._iterate(one) * (lr * SCALES[group["scale"]](rows, columns)))


class WrongCoefficient(OtherProducts):
    """One coefficient is off by a few percent, in one step."""

    def _triples(self) -> list[tuple[float, float, float]]:
        (a, b, c), *rest = super()._triples()
        return [(a, 0.9 * b, c), *rest]


class MissingStep(OtherProducts):
    """It iterates once too little."""

    def _triples(self) -> list[tuple[float, float, float]]:
        return super()._triples()[1:]


class Right(MuonShardingOptimizer):
    """As a class of the user's."""


class WithOtherProducts(MuonShardingOptimizer):
    """Right, but for the order in which products add up."""

    inner_class = OtherProducts


class WithWrongCoefficient(MuonShardingOptimizer):
    inner_class = WrongCoefficient


class WithMissingStep(MuonShardingOptimizer):
    inner_class = MissingStep


# --- construction -----------------------------------------------------------------------------------------------------


class HidesAMatrix(MuonShardingOptimizer):
    """Nobody says that he owns the first matrix."""

    def local_shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in super().local_shards() if shard.name != "wide")


class TwoOwners(MuonShardingOptimizer):
    """The last rank also says that it owns the first element of the bias."""

    def local_shards(self) -> tuple[Shard, ...]:
        shards = super().local_shards()
        if dist.get_rank() < dist.get_world_size() - 1:
            return shards
        return (*shards, Shard("bias", 0, 1, torch.zeros(1), None, {}))


class MasterOfZeros(MuonShardingOptimizer):
    """A master does not begin with the weights."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for shard in self.local_shards():
            if shard.name == "qkv":
                shard.master.zero_()


class NoState(MuonShardingOptimizer):
    """State comes only with the first step."""

    def local_shards(self) -> tuple[Shard, ...]:
        return tuple(replace(shard, state={}) for shard in super().local_shards())


# --- gradients --------------------------------------------------------------------------------------------------------


class MeanTwice(MuonShardingOptimizer):
    """What was averaged is divided once more."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for shard in self.local_shards():
            if shard.gradient is not None:
                shard.gradient.div_(dist.get_world_size())


class OneMatrixUnreduced(MuonShardingOptimizer):
    """The owner of one matrix uses twice what he should, if there is more than one rank."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for shard in self.local_shards():
            if shard.name == "tall" and shard.gradient is not None and dist.get_world_size() > 1:
                shard.gradient.mul_(2)


class KeepsGrad(MuonShardingOptimizer):
    """After the reduction a ``.grad`` is still there."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        parameter = self.inner.named["qkv"]
        parameter.grad = torch.zeros_like(parameter)


class NeverForgets(MuonShardingOptimizer):
    """What was gathered before clear_grad() counts in the next step."""

    _kept: dict[str, Tensor] | None = None

    def clear_grad(self, set_to_zero: bool = False) -> None:
        kept = {}
        for name, parameter in self.inner.named.items():
            member = self._members[name]
            if member.fired and name == "bias":
                kept[name] = torch.ones_like(parameter)
        super().clear_grad(set_to_zero)
        self._kept = kept or self._kept

    def reduce_gradients(self) -> None:
        for name, gradient in (self._kept or {}).items():
            parameter = self.inner.named[name]
            parameter.grad = gradient
        self._kept = None
        super().reduce_gradients()


# --- norm, clip, update -----------------------------------------------------------------------------------------------


class LocalNorm(MuonShardingOptimizer):
    """The joint norm is that of what this rank owns."""

    def step(self, closure: Any = None) -> None:
        gradients = [shard.gradient for shard in self.local_shards() if shard.gradient is not None]
        own = torch.stack([squared_norm(gradient) for gradient in gradients]).sum().sqrt() if gradients else None
        super().step(closure)
        if self.grad_norm is not None:
            self.grad_norm = torch.zeros((), dtype=torch.float64) if own is None else own


class ClipsTheExcluded(MuonShardingOptimizer):
    """A parameter that is not to be clipped is scaled all the same."""

    def _clip(self) -> None:
        super()._clip()
        for shard in self.local_shards():
            if not self.inner.info[shard.name].need_clip and shard.gradient is not None:
                shard.gradient.mul_(0.5)


class ForgetsMomentum(MuonShardingOptimizer):
    """The momentum of one matrix is lost after each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for shard in self.local_shards():
            if shard.name == "tall":
                shard.state["momentum"].zero_()


class RoundsTheMaster(MuonShardingOptimizer):
    """Masters are kept as bf16 values."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for shard in self.local_shards():
            shard.master.copy_(shard.master.bfloat16())


class UpdatesWhatIsMissing(MuonShardingOptimizer):
    """Nobody's gradient counts as zeros though it is to be skipped."""

    def __init__(self, inner: MuonAdamW, group: Any = None, config: Any = None, **named: Any) -> None:
        super().__init__(inner, group=group, config=replace(config, skip_missing=False), **named)


class WrongScale(MuonAdamW):
    """One matrix moves by the learning rate alone."""

    def update(self, name: str, master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        before = master.clone()
        super().update(name, master, gradient, state)
        if self.info[name].use_muon:
            master.add_(master - before, alpha=0.25)


class WithWrongScale(MuonShardingOptimizer):
    inner_class = WrongScale


# --- weights ----------------------------------------------------------------------------------------------------------


class StaleOnLastRank(MuonShardingOptimizer):
    """The last rank's weights of one parameter are those of before."""

    def step(self, closure: Any = None) -> None:
        parameter = self.inner.named["embedding"]
        before = parameter.detach().clone()
        super().step(closure)
        if dist.get_rank() == dist.get_world_size() - 1:
            parameter.data.copy_(before)


class Repoints(MuonShardingOptimizer):
    """A parameter gets other memory in each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        parameter = self.inner.named["embedding"]
        parameter.data = parameter.detach().clone()


class TouchesTheFrozen(MuonShardingOptimizer):
    """Weight decay of a frozen parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.inner.frozen.values():
            parameter.data.mul_(0.5)


class GivesNothingUp(MuonShardingOptimizer):
    """The compute weights stay in memory."""

    def clear_param_storage(self, color: Any = None) -> None:
        pass


class GivesZerosBack(MuonShardingOptimizer):
    """Weights that are asked back are not filled from the masters."""

    def reset_param_storage(self) -> None:
        self._restore_storage()
        self._cleared.clear()


class KeepsWhatIsSetToZero(MuonShardingOptimizer):
    """Only one way of forgetting gradients does."""

    def clear_grad(self, set_to_zero: bool = False) -> None:
        if not set_to_zero:
            super().clear_grad()


class KeepsGradients(MuonShardingOptimizer):
    """Gradients are there after the step whatever the settings say."""

    def __init__(self, inner: MuonAdamW, group: Any = None, config: Any = None, **named: Any) -> None:
        super().__init__(inner, group=group, config=replace(config, release_gradients=False), **named)


# --- state ------------------------------------------------------------------------------------------------------------


class LosesMomentum(MuonShardingOptimizer):
    """What is loaded has no momentum."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for shard in self.local_shards():
            for name, value in shard.state.items():
                if name == "momentum":
                    value.zero_()


class LosesTheRate(MuonShardingOptimizer):
    """The learning rate is that of the construction."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, lr in zip(self.param_groups, rates, strict=True):
            group["lr"] = lr


# --- everything else --------------------------------------------------------------------------------------------------


class OneMoreCollective(MuonShardingOptimizer):
    """A rank asks one question too many."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))


class RaisesInStep(MuonShardingOptimizer):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no step today")


class Refuses(MuonShardingOptimizer):
    def __init__(self, *args: Any, **named: Any) -> None:
        raise NotImplementedError("no colours here")


class NoShards:
    """Has a part of the interface only."""

    def reduce_gradients(self) -> None: ...
    def step(self) -> None: ...
    def clear_grad(self) -> None: ...


class NoStateDict(NoShards):
    def local_shards(self) -> Iterable[Shard]:
        return ()


class TakesNoConfig(MuonShardingOptimizer):
    def __init__(self, inner: MuonAdamW, group: Any = None) -> None:
        super().__init__(inner, group)
