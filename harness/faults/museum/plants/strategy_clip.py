"""Plants: how a distribution strategy takes the joint norm of all gradients, and scales them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.faults.museum.plain_strategies import PlainAllReduce, PlainFSDP2, PlainHSDP, local_of

# --- one norm for all kinds


class ClipsEachKindAlone(PlainFSDP2):
    """Scales sharded gradients by their own norm, and plain ones by theirs; what it returns is the joint norm."""

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, float("inf"))
        gradients = self._gradients(model)
        for sharded in (True, False):
            kind = [g for g in gradients if isinstance(g, DTensor) == sharded]
            self._scale(kind, self._coefficient(self._norm(kind), max_norm))
        return norm


class LeavesPlainOutOfNorm(PlainFSDP2):
    """Takes the norm of sharded gradients alone, and scales all by it."""

    def _of_plain(self, total: Tensor) -> Tensor:
        return torch.zeros_like(total)


class LeavesPlainUnscaled(PlainFSDP2):
    """Scales the pieces of sharded gradients alone."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        super()._scale([g for g in gradients if isinstance(g, DTensor)], coefficient)


class AddsNormsOfKinds(PlainFSDP2):
    """Adds the norm of sharded gradients and that of plain ones."""

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        kinds = [[g for g in gradients if isinstance(g, DTensor) == sharded] for sharded in (True, False)]
        return sum((super(AddsNormsOfKinds, self)._norm(kind) for kind in kinds), torch.zeros(()))


# --- over which ranks


class NormOfLocalShard(PlainFSDP2):
    """Forgets that a DTensor's squares are those of a rank's own piece."""

    def _over_shards(self, total: Tensor) -> Tensor:
        return total


class CountsReplicasTwice(PlainHSDP):
    """Sums squares over the whole mesh, replicas too."""

    def _over_shards(self, total: Tensor) -> Tensor:
        dist.all_reduce(total)
        return total


class CountsPlainOnEachRank(PlainFSDP2):
    """Sums the squares of plain gradients over ranks too, which all hold the same."""

    def _of_plain(self, total: Tensor) -> Tensor:
        return self._over_shards(total)


class CountsWholeGradientsOnEachRank(PlainAllReduce):
    """Sums squares over ranks although nothing is sharded."""

    def _of_plain(self, total: Tensor) -> Tensor:
        dist.all_reduce(total)
        return total


class SumsNormsOverRanks(PlainFSDP2):
    """Takes the root on each rank, and sums roots."""

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        sharded = self._squares([g.to_local() for g in gradients if isinstance(g, DTensor)]).sqrt()
        plain = self._squares([g for g in gradients if not isinstance(g, DTensor)])
        return (self._over_shards(sharded).square() + plain).sqrt().float()


class EachRankItsOwnCoefficient(PlainFSDP2):
    """Returns the joint norm, and scales by the norm of what the rank holds."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        held = list(gradients)
        own = self._squares(map(local_of, held)).sqrt().float()
        super()._scale(held, self._coefficient(own, self._bound))

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        self._bound = max_norm
        return super().clip_grad_norm(model, max_norm)


class EachRankAddsInItsOwnOrder(PlainFSDP2):
    """Gathers the norms of all ranks, and joins them in fp32 from its own on: bits differ from rank to rank."""

    def _over_shards(self, total: Tensor) -> Tensor:
        norms = [torch.zeros((), dtype=torch.float32) for _ in range(self.world)]
        dist.all_gather(norms, total.sqrt().float())
        joined = torch.zeros((), dtype=torch.float32)
        for number in range(self.world):
            joined = torch.hypot(joined, norms[(self.rank + number) % self.world])
        return joined.double().square()


# --- the coefficient


class ScalesSmallGradientsUp(PlainAllReduce):
    """Divides by the norm whether or not it is above the bound."""

    def _coefficient(self, norm: Tensor, max_norm: float) -> Tensor:
        return max_norm / (norm + 1e-6)


class SubtractsExcess(PlainAllReduce):
    """Takes off what is above the bound in proportion to the bound: beyond twice the bound the sign is another."""

    def _coefficient(self, norm: Tensor, max_norm: float) -> Tensor:
        return (1 - (norm - max_norm) / max_norm).clamp(max=1.0)


class SquaredCoefficient(PlainFSDP2):
    """Compares the bound with the squared norm, of which nobody took the root; what it returns is right."""

    def _coefficient(self, norm: Tensor, max_norm: float) -> Tensor:
        return super()._coefficient(norm.square(), max_norm)


class ScalesCopies(PlainFSDP2):
    """Scales whole gradients, which it has gathered: copies of what the optimizer will see."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        super()._scale([g.full_tensor() if isinstance(g, DTensor) else g for g in gradients], coefficient)


class ReturnsNormAfterClipping(PlainFSDP2):
    """Takes the norm that it returns after it has scaled."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        super().clip_grad_norm(model, max_norm)
        return super().clip_grad_norm(model, float("inf"))


class ClipsOnlyTheFirstRank(PlainAllReduce):
    """Scales on the rank that logs the norm."""

    def _scale(self, gradients: Iterable[Tensor], coefficient: Tensor) -> None:
        if self.rank == 0:
            super()._scale(gradients, coefficient)


# --- of which gradients, in which precision


class SquaresInBf16(PlainFSDP2):
    """Squares and sums in bf16."""

    def _square(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16().square().sum().double()


class NormOfHiddenParameters(PlainFSDP2):
    """Looks at parameters that were listed before the wrap: those have no gradient, and the norm is 0."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self._listed = list(model.parameters())
        return super().wrap(model)

    def _parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return self._listed


class ConsumesItsGradients(PlainAllReduce):
    """Hands an iterator to the norm; nothing is left of it where gradients are scaled."""

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        gradients = self._each(model)
        norm = self._squares(gradients).sqrt().float()
        self._scale(gradients, self._coefficient(norm, max_norm))
        return norm

    def _each(self, model: nn.Module) -> Iterator[Tensor]:
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield parameter.grad


class CountsTiedTwice(PlainAllReduce):
    """Walks over names, of which a tied weight has two."""

    def _parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return [p for _, p in model.named_parameters(remove_duplicate=False)]


class LeavesRootOut(PlainFSDP2):
    """Looks at the blocks alone."""

    def _parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len).parameters()
