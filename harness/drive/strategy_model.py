"""The model of a scenario of system ``"strategy"``: its loss is linear in the parameters, so any gradient can be had.

One forward is told by a :class:`Work` which gradient each parameter is to get from it, and shows the weights that it
computes with, then and in its backward, to whoever looks. A parameter's attribute is named after its index in the
scenario (``p3``; under a second name ``p3_tied``), so that it is found again under whatever prefixes wrapping adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.scenario.model import Scenario, StepPlan, strategy_of
from harness.scenario.strategy import ROOT, Place

See = Callable[[int, Tensor, bool], None]
"""``(index of a parameter, the weights as they are used, whether in a backward)``."""

_TIED = "_tied"


class Work:
    """What one forward and its backward do. Of a plain class, so that no wrapper takes it apart for tensors.

    Attributes:
        gradients: which parameter gets what, in its shape; what is not listed is not used.
        idle: blocks that are not run, since no rank uses anything of them.
        see: is shown the weights of all parameters of what is run.
    """

    __slots__ = ("gradients", "idle", "see")

    def __init__(self, gradients: Mapping[int, Tensor], idle: frozenset[int], see: See) -> None:
        self.gradients = gradients
        self.idle = idle
        self.see = see


class _Term(torch.autograd.Function):
    """``(parameter * gradient).sum()`` of shape ``[1]``, which shows the weights that its backward finds, too."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor, index: int, see: See) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(parameter, gradient)
        ctx.index, ctx.see = index, see
        return (parameter * gradient).sum().reshape(1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        parameter, gradient = ctx.saved_tensors
        ctx.see(ctx.index, parameter, True)
        return gradient * upstream, None, None, None


class _Used(nn.Module):
    """Holds parameters, and adds the terms of those that are used to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.ties: dict[int, bool] = {}  # by index, whether it has a second name: what wrapping puts there may be none

    def hold(self, index: int, parameter: nn.Parameter, *, tied: bool) -> None:
        """Register a parameter, ``tied`` under a second name as well."""
        self.ties[index] = tied
        self.register_parameter(name_of(index), parameter)
        if tied:
            self.register_parameter(f"{name_of(index)}{_TIED}", parameter)

    def held(self) -> list[tuple[int, Tensor, Tensor | None]]:
        """``(index, parameter, the same under its second name)`` of its own, as they are now, by index."""
        return [
            (index, getattr(self, name_of(index)), getattr(self, f"{name_of(index)}{_TIED}") if tied else None)
            for index, tied in sorted(self.ties.items())
        ]

    def add_terms(self, total: Tensor, work: Work, indices: Sequence[int] | None = None) -> Tensor:
        """``total`` and the terms of all of these, or of all it holds."""
        for index, parameter, tied in self.held():
            if indices is not None and index not in indices:
                continue
            uses = [parameter] if tied is None else [parameter, tied]
            for use in uses:
                work.see(index, use, False)
            gradient = work.gradients.get(index)
            if gradient is None:
                continue
            for each, share in zip(uses, shares(gradient.to(parameter.dtype), len(uses)), strict=True):
                total = total + _Term.apply(each, share, index, work.see)  # type: ignore[no-untyped-call]
        return total


class Block(_Used):
    """A block of parameters: ``forward(total, work)`` gives ``total`` of shape ``[1]`` and its own terms."""

    def forward(self, total: Tensor, work: Work) -> Tensor:
        """Add the terms of what is used; a new tensor, as of any module that computes, where nothing is."""
        return self.add_terms(total * 1.0, work)


class Model(_Used):
    """Blocks, and parameters of the root: every other one of these is used before the blocks, the rest after them."""

    def __init__(self, scenario: Scenario, weights: Sequence[Tensor], mark: Callable[[nn.Parameter], None]) -> None:
        """``weights``: copied; ``mark`` marks a parameter for Muon."""
        super().__init__()
        self.places = strategy_of(scenario).places
        num_blocks = 1 + max((place.block for place in self.places), default=ROOT)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        for index, (place, weight) in enumerate(zip(self.places, weights, strict=True)):
            parameter = nn.Parameter(weight.detach().clone(), requires_grad=not place.frozen)
            if place.dedicated:
                mark(parameter)
            self._module(place).hold(index, parameter, tied=place.tied)

    def _module(self, place: Place) -> _Used:
        return self if place.block == ROOT else cast("_Used", self.blocks[place.block])

    def forward(self, total: Tensor, work: Work) -> Tensor:
        """``total`` of shape ``[1]`` and all terms."""
        own = sorted(self.ties)
        total = self.add_terms(total, work, own[1::2])
        for number, block in enumerate(self.blocks):
            if number not in work.idle:
                total = block(total, work)
        return self.add_terms(total * 1.0, work, own[0::2])

    def plain_parameters(self, module: _Used) -> set[nn.Parameter]:
        """Those of one module that are to be left out of FSDP2."""
        named = module.named_parameters(recurse=False)
        return {parameter for name, parameter in named if self.places[index_of(name) or 0].plain}


class ConvertingModel(Model):
    """A model that says itself how FSDP2 shards it. ``bare_root``: the root is no FSDP module."""

    def __init__(
        self, scenario: Scenario, weights: Sequence[Tensor], mark: Callable[[nn.Parameter], None], *, bare_root: bool
    ) -> None:
        super().__init__(scenario, weights, mark)
        self.bare_root = bare_root

    def convert_to_fsdp(
        self,
        *,
        mesh: Any,  # noqa: ANN401 (a DeviceMesh)
        mp_policy: Any,  # noqa: ANN401
        offload_policy: Any,  # noqa: ANN401
        reshard_after_forward: bool | None,
        use_dmuon: bool = False,
    ) -> None:
        """Shard each block, then the root; plain parameters stay as they are."""
        from torch.distributed.fsdp import fully_shard  # a rank that never drives this system need not import it

        plain: set[nn.Parameter] = set()
        for module in (*self.blocks, self):
            if isinstance(module, _Used):
                plain |= self.plain_parameters(module)
        for block in self.blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                reshard_after_forward=reshard_after_forward,
                ignored_params=plain,
            )
        if not self.bare_root:
            fully_shard(
                self,
                mesh=mesh,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                reshard_after_forward=None if reshard_after_forward else reshard_after_forward,
                ignored_params=plain,
            )


def build_model(scenario: Scenario, weights: Sequence[Tensor]) -> Model:
    """The model of a scenario with these weights (copied), on their device."""
    strategy = strategy_of(scenario)
    if strategy.converts:
        return ConvertingModel(scenario, weights, _mark, bare_root=strategy.bare_root)
    return Model(scenario, weights, _mark)


def _mark(parameter: nn.Parameter) -> None:
    from zero2core.strategies.dedicated import mark_muon  # a rank that never drives this system need not import it

    mark_muon(parameter)


def name_of(index: int) -> str:
    """The attribute of the parameter at this index of the scenario's list."""
    return f"p{index}"


def index_of(name: str) -> int | None:
    """The index of the parameter that a name, with whatever prefixes, means, under either of its names; else None."""
    last = name.rpartition(".")[2].removesuffix(_TIED)
    return int(last[1:]) if last[:1] == "p" and last[1:].isdecimal() else None


def shares(gradient: Tensor, num_uses: int) -> list[Tensor]:
    """What each use of a parameter contributes, so that autograd's sum of them is ``gradient``, bit for bit.

    Half of a subnormal may be rounded; what is left then is exact. What is not finite comes from both uses.
    """
    if num_uses == 1:
        return [gradient]
    half = gradient / 2
    return [half, torch.where(gradient.isfinite(), gradient - half, gradient)]


def idle_blocks(scenario: Scenario, plan: StepPlan, part: int) -> frozenset[int]:
    """The blocks of which no rank uses anything in this part of a step."""
    places = strategy_of(scenario).places
    none = plan.parts[part].none
    unused = {index for index in range(len(places)) if all(index in missing for missing in none)}
    used = {place.block for index, place in enumerate(places) if index not in unused and not place.frozen}
    return frozenset({place.block for place in places if place.block != ROOT} - used)


def needs_input_gradient(scenario: Scenario, plan: StepPlan, part: int) -> bool:
    """Whether the input has to take a gradient: on some rank a module that is run has nothing that does.

    The same on all ranks, and so must it be for what each module is given: FSDP2 reduces those whose input takes no
    gradient at the end of a backward, the root first, and all others as the backward comes to them. Ranks that differ
    in what they use could differ in that, so there the input takes one, too.
    """
    if len({tuple(sorted(each)) for each in plan.parts[part].none}) > 1:
        return True
    places = strategy_of(scenario).places
    idle = idle_blocks(scenario, plan, part)
    modules = {place.block for place in places} - idle
    for missing in plan.parts[part].none:
        used = {place.block for index, place in enumerate(places) if index not in missing and not place.frozen}
        if modules - used or not used:
            return True
    return False
