"""What a driver of system ``"strategy"`` compares: what a rank holds, and the weights that a forward computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.drive.calls import CannotGoOnError, RankDriver
from harness.drive.parameters import DTYPES
from harness.drive.shard import Difference
from harness.drive.strategy_held import (
    Held,
    Region,
    UnreadableError,
    compare,
    entries,
    find,
    held_of,
    holders,
    is_distributed,
    local,
    owned,
)
from harness.drive.strategy_model import Model
from harness.oracles.compare import compare_bits
from harness.oracles.strategy import MOMENTS, UnshardedStrategy
from harness.oracles.strategy_sums import Sums
from harness.scenario.model import Scenario
from harness.scenario.strategy import ROOT, Strategy
from harness.verdict import Oracle, Property


class Seen:
    """Weights as one forward, or its backward, used them; compared when it is over, so that no exception gets lost."""

    def __init__(self) -> None:
        self.weights: list[tuple[int, Tensor, bool]] = []

    def look(self, index: int, weights: Tensor, in_backward: bool) -> None:
        """To be handed to the model."""
        self.weights.append((index, weights.detach().clone(), in_backward))


class StrategyComparison(RankDriver):
    """Of one subject on one rank.

    Attributes:
        strategy: of the scenario.
        names, shapes: of its parameters.
        model: as the subject wrapped it.
        optimizer: of it; ``own_optimizer``: the subject built it itself.
        reference: the unsharded trainer.
        held: what this rank holds, by parameter; filled once, after wrapping.
    """

    strategy: Strategy
    names: list[str]
    shapes: list[tuple[int, ...]]
    subject: Any
    inner: Model
    model: nn.Module
    optimizer: torch.optim.Optimizer
    own_optimizer: bool
    reference: UnshardedStrategy
    held: list[Held]

    # -- what is held --------------------------------------------------------------------------------------------

    def _find_held(self) -> list[Held]:
        """What this rank holds, in order of parameters; where that cannot be told, nothing can be compared."""
        dedicated: Mapping[str, Any] = {}
        if callable(getattr(self.subject, "dedicated", None)):
            with self._subject("dedicated"):
                dedicated = dict(self.subject.dedicated(self.model))
        index: int | None = None
        try:
            found, whole = find(self.model, len(self.names)), entries(dedicated)
            held = []
            for index, shape in enumerate(self.shapes):
                if index in whole:
                    held.append(owned(index, whole[index], shape, self.rank))
                elif index in found:
                    held.append(held_of(index, found[index], shape, self.rank))
                else:
                    raise UnreadableError("a parameter of the model is in the wrapped one no more")
        except UnreadableError as unreadable:
            self._diverge_at(Property.OWNERSHIP, str(unreadable), index)
            raise CannotGoOnError from unreadable
        return held

    def _diverge_at(self, prop: Property, message: str, index: int | None, **fields: Any) -> None:  # noqa: ANN401
        name = None if index is None else self.names[index]
        self.record.diverge(prop, message, parameter=name, index=index, **fields)

    def _all_gathered(self, mine: Any, what: str) -> list[Any]:  # noqa: ANN401 (plain data or tensors)
        """What every rank gives. Collective; not in the log."""
        if self.scenario.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.scenario.world
        with self._exchange(what):
            dist.all_gather_object(everyone, mine)
        return everyone

    def _check_owners(self) -> None:
        """Every element is held by as many ranks as the sharding says. Collective."""
        regions: list[list[Region]] = self._all_gathered([each.region for each in self.held], "who holds what")
        if not self.record.clean:
            return
        for each in self.held:
            index = each.parameter
            count = holders(regions, index, self.shapes[index])
            wanted = self._wanted_holders(index, dedicated=each.dedicated)
            wrong = count < 1 if wanted is None else count != wanted
            self.record.checked(Property.OWNERSHIP, count.size)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                by = int(count.reshape(-1)[at])
                says = "at least one" if wanted is None else str(wanted)
                message = f"element {at} is held by {by} of {self.scenario.world} ranks, expected {says}"
                self._diverge_at(Property.OWNERSHIP, message, index, element=at, mismatches=int(wrong.sum()))
                return

    def _wanted_holders(self, index: int, *, dedicated: bool) -> int | None:
        """How many ranks hold each element; None: one or more."""
        place = self.strategy.places[index]
        if dedicated:
            return 1
        if self.strategy.sharding == "any":
            return None
        if place.plain or (self.strategy.bare_root and place.block == ROOT) or self.strategy.sharding == "none":
            return self.scenario.world
        return self.strategy.replicas if self.strategy.sharding == "hybrid" else 1

    # -- weights that a forward computes with --------------------------------------------------------------------

    def _compare_seen(self, seen: Seen, when: str) -> dict[int, Tensor]:
        """Each is the reference's, rounded to the dtype that is computed in; returns the last seen of each."""
        last: dict[int, Tensor] = {}
        for index, weights, in_backward in seen.weights:
            last[index] = weights
            if not self.record.clean:
                continue
            place = "in the backward" if in_backward else "in the forward"
            if not self._right_form(index, weights, f"{place} {when}"):
                continue
            wanted = self.reference.weight(index, weights.dtype).to(weights.device)
            outcome = compare_bits(wanted, weights.contiguous(), signed_zeros=True)
            self.record.checked(Property.WEIGHTS, outcome.compared)
            if outcome.mismatch is not None:
                found = outcome.mismatch
                difference = Difference(outcome.compared, found, index, found.index)
                self.record.diverge(Property.WEIGHTS, f"{place} {when} the compute weights differ", difference)
        return last

    def _right_form(self, index: int, weights: Tensor, where: str) -> bool:
        """Shape and dtype of what is computed with; where the dtype is not known, any floating one will do."""
        place = self.strategy.places[index]
        own = DTYPES[self.scenario.parameters[index].dtype]
        dtypes = {own, torch.bfloat16, torch.float16, torch.float32}
        if self._known:
            cast = self.strategy.sharding != "none" and not place.plain
            dtypes = {DTYPES[self.strategy.compute] if cast and self.strategy.compute == "bf16" else own}
        if tuple(weights.shape) == self.shapes[index] and weights.dtype in dtypes:
            return True
        message = (
            f"{where} a parameter has dtype {weights.dtype} and shape {list(weights.shape)}, expected "
            f"{' or '.join(sorted(map(str, dtypes)))} and {list(self.shapes[index])}"
        )
        self._diverge_at(Property.WEIGHTS, message, index)
        return False

    @property
    def _known(self) -> bool:
        """What the subject does in which dtype is known: the harness configured it."""
        return self.capabilities.extension.strategy.configurable

    # -- masters, moments, gradients -----------------------------------------------------------------------------

    def _compare_tensor(
        self, prop: Property, what: str, held: Held, wanted: Tensor, seen: Tensor, *, signed_zeros: bool = False
    ) -> Difference | None:
        """Compare what is held with the whole that is wanted; None: not comparable, which is recorded."""
        if seen.dtype != wanted.dtype or tuple(seen.shape) != held.region.shape:
            message = f"{what} is {seen.dtype}{list(seen.shape)}, expected {wanted.dtype}{list(held.region.shape)}"
            self._diverge_at(prop, message, held.parameter)
            return None
        difference = compare(held.region, wanted, seen, self.rank, signed_zeros=signed_zeros)
        self.record.checked(prop, difference.compared)
        return difference

    def _compare_masters(self, what: str) -> None:
        """What the optimizer moves, of parameters that nothing but element-wise arithmetic moved."""
        for each in self.held:
            if not self.record.clean:
                return
            seen = each.master()
            if seen is None or not each.region.numel:
                continue
            frozen = self.strategy.places[each.parameter].frozen
            prop = Property.STORAGE if frozen else Property.MASTER
            wanted = self.reference.state(each.parameter).master
            difference = self._compare_tensor(prop, what, each, wanted, seen, signed_zeros=True)
            if difference is not None and difference.mismatch is not None:
                self.record.diverge(prop, f"{what} {'of a frozen parameter ' if frozen else ''}differs", difference)

    def _compare_moments(self, prefix: str) -> None:
        for each in self.held:
            if not self.record.clean:
                return
            state = self.reference.state(each.parameter)
            if self.strategy.places[each.parameter].frozen or not each.region.numel or not state.num_steps:
                continue
            for name, wanted in zip(MOMENTS[each.dedicated], state.moments, strict=True):
                seen = self._moment(each, name)
                if seen is None:
                    if self._must_have_state():
                        self._diverge_at(Property.MOMENTS, f"{prefix}the optimizer has no {name}", each.parameter)
                        return
                    continue
                difference = self._compare_tensor(Property.MOMENTS, f"{prefix}{name}", each, wanted, seen)
                if difference is None:
                    return
                if difference.mismatch is not None:
                    self.record.diverge(Property.MOMENTS, f"{prefix}{name} differs", difference)
                    return

    def _moment(self, held: Held, name: str) -> Tensor | None:
        if held.dedicated:
            momentum = held.tensor.momentum
            return None if momentum is None else local(momentum)
        for optimizer in (self.optimizer, getattr(self.optimizer, "optim", None)):
            state = getattr(optimizer, "state", {}).get(held.tensor)
            if state and name in state:
                return local(state[name])
        return None

    def _must_have_state(self) -> bool:
        """One that a subject builds itself may keep its state where it likes; one around another, on other ranks."""
        return not hasattr(self.optimizer, "optim") and (not self.own_optimizer or self._known)

    def _gradients(
        self, expected: Sequence[Tensor | None], prop: Property, what: str
    ) -> Iterator[tuple[Held, Tensor, Tensor]]:
        """What is held of trainable parameters, its wanted gradient (whole), the seen one; what lacks is recorded."""
        for each in self.held:
            if not self.record.clean:
                return
            if self.strategy.places[each.parameter].frozen:
                continue
            seen, wanted = each.gradient(), expected[each.parameter]
            if not each.region.numel:
                continue
            if wanted is None:
                self.record.checked(prop)
                if seen is not None:
                    message = f"{what} is there, of a parameter that no rank used: the optimizer would decay it"
                    self._diverge_at(prop, message, each.parameter)
                continue
            if seen is None:
                self._diverge_at(prop, f"{what} is None", each.parameter)
                return
            if is_distributed(each.tensor) != is_distributed(each.tensor.grad):
                kinds = [
                    "a DTensor" if is_distributed(one) else "a plain tensor" for one in (each.tensor, each.tensor.grad)
                ]
                self._diverge_at(prop, f"{what} is {kinds[1]}, its parameter {kinds[0]}", each.parameter)
                return
            yield each, wanted, seen

    def _compare_gradients(self, prop: Property, what: str) -> None:
        """Bit for bit with the reference's."""
        for each, wanted, seen in self._gradients(self.reference.gradients, prop, what):
            difference = self._compare_tensor(prop, what, each, wanted, seen)
            if difference is not None and difference.mismatch is not None:
                self.record.diverge(prop, f"{what} differs ({self._kind_of(each)})", difference)

    def _kind_of(self, held: Held) -> str:
        """How a parameter is held, and where it is, for people."""
        kind = "dedicated" if held.dedicated else "sharded" if is_distributed(held.tensor) else "plain"
        block = self.strategy.places[held.parameter].block
        return f"a {kind} parameter of {'the root' if block == ROOT else f'block {block}'}"

    def _adopt(
        self, what: str, take: Callable[[Held], Tensor | None], adopt: Callable[[dict[int, Tensor]], None]
    ) -> None:
        """Make what all ranks hold of something the reference's own. Collective; not in the log."""
        mine = []
        for each in self.held:
            seen = take(each) if each.region.numel else None
            if seen is not None and tuple(seen.shape) == each.region.shape:
                mine.append((each.region, seen.cpu().clone()))
        whole: dict[int, Tensor] = {}
        for pieces in self._all_gathered(mine, what):
            for region, values in pieces:
                if region.parameter not in whole:
                    whole[region.parameter] = torch.zeros(self.shapes[region.parameter], dtype=values.dtype)
                whole[region.parameter][region.slices] = values
        adopt({index: values.to(self.reference.device) for index, values in whole.items()})


def judge_sums(
    region: Region, seen: Tensor, sums: Sums, shape: tuple[int, ...], *, bitwise: bool, averages: bool = False
) -> tuple[Oracle, int | None, float]:
    """Whether a reduced gradient is one that the schedule can give, else within the bound of any order.

    Args:
        region: of the parameter, that is held.
        seen: what is held of it.
        sums: what the whole of it may be.
        shape: of the parameter.
        bitwise: there is no order but those of ``sums``, so that the bound excuses nothing.
        averages: the backend may divide each summand in a way of its own, so that it excuses also where there is one.

    Returns:
        ``(by which rule, flat index in the region of the first element that is wrong or None, the largest error in
        terms of its bound)``.
    """
    values = seen.detach().float().cpu().contiguous().view(-1)
    found = torch.zeros(values.numel(), dtype=torch.bool)
    for candidate in sums.possible:
        wanted = torch.from_numpy(candidate).view(shape)[region.slices].reshape(-1).to(seen.dtype).float()
        found |= (wanted == values) | (wanted.isnan() & values.isnan())
    if bool(found.all()):
        return Oracle.ORDERED, None, 0.0
    if bitwise or (len(sums.possible) == 1 and not averages):
        return Oracle.ORDERED, int((~found).to(torch.uint8).argmax()), 0.0
    center, bound, overflows = (
        torch.from_numpy(each).view(shape)[region.slices].reshape(-1)
        for each in (sums.interval.center, sums.interval.bound, sums.interval.overflows)
    )
    errors = (values.double() - center).abs()
    allowed = found | (errors <= bound) | (overflows & ~values.isfinite())
    shares = (errors / bound)[(bound > 0) & errors.isfinite()]
    margin = float(shares.max()) if shares.numel() else 0.0
    if bool(allowed.all()):
        return Oracle.BOUND, None, margin
    return Oracle.BOUND, int((~allowed).to(torch.uint8).argmax()), margin


def names_of(scenario: Scenario) -> list[str]:
    """Of its parameters."""
    return [parameter.name for parameter in scenario.parameters]
