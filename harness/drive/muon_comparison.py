"""What a driver of system ``"muon"`` compares again and again: what a rank holds, and its compute weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn

from harness.drive.calls import CannotGoOnError, InterfaceLacksError, RankDriver
from harness.drive.muon_shards import Held, Range, compare, read_shards
from harness.drive.muon_storage import Places
from harness.drive.parameters import by_stream
from harness.drive.shard import Difference
from harness.oracles.compare import compare_bits, digest
from harness.oracles.muon import MOMENTS, Life, UnshardedMuon
from harness.scenario.model import sources
from harness.scenario.muon import Muon
from harness.verdict import Property


class MuonComparison(RankDriver):
    """Of one subject on one rank.

    Attributes:
        muon: of the scenario.
        names, index_of: of its parameters.
        initial: compute weights at the start of the scenario.
        parameters: those of the subject, by index.
        places: where these lie.
        reference: the unsharded trainer.
        own: the life of each parameter on this rank; one of a colour that has no group with it is not there.
        ranges: what this rank holds, as it was told at construction; empty before.
        owners: what all ranks hold.
    """

    muon: Muon
    names: list[str]
    index_of: dict[str, int]
    initial: Sequence[Tensor]
    parameters: list[nn.Parameter]
    places: Places
    reference: UnshardedMuon
    own: dict[int, Life]
    ranges: tuple[Range, ...]
    owners: list[tuple[Range, int]]
    subject: Any

    def _held(self) -> list[Held]:
        """What this rank holds, as the subject tells it; where that cannot be, nothing can be compared any more."""
        with self._subject("local_shards"):
            shards = read_shards(self.subject.local_shards())
        try:
            held = [Held.of(shard, self.scenario, self.index_of, self.device) for shard in shards]
        except InterfaceLacksError as lacks:
            if self.record.clean:
                self.record.diverge(Property.OWNERSHIP, str(lacks))
            raise CannotGoOnError from lacks
        held = [each for each in held if each.range.length]
        if self.ranges and tuple(each.range for each in held) != self.ranges and self.record.clean:
            self.record.diverge(Property.OWNERSHIP, "local_shards() holds other ranges than after construction")
        if not self.record.clean:
            return []
        foreign = [each for each in held if each.parameter not in self.own]
        if foreign:
            name = self.names[foreign[0].parameter]
            message = "local_shards() holds something of a parameter of a colour whose groups this rank is in none of"
            self.record.diverge(Property.OWNERSHIP, message, parameter=name, index=foreign[0].parameter)
            return []
        return held

    def _all_gathered(self, mine: Any, what: str) -> list[Any]:  # noqa: ANN401 (plain data or tensors)
        """What every rank gives. Collective; not in the log."""
        if self.scenario.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.scenario.world
        with self._exchange(what):
            dist.all_gather_object(everyone, mine)
        return everyone

    def _assembled(self, everyone: Sequence[Sequence[tuple[Range, Tensor]]], like: Any) -> dict[Life, Tensor]:  # noqa: ANN401
        """All ranks' pieces put together, by life; where nobody gave a piece, what is in ``like``."""
        found: dict[Life, Tensor] = {}
        for life in self.reference.lives:
            pieces = [
                (piece, values)
                for rank in life.ranks
                for piece, values in everyone[rank]
                if piece.parameter == life.parameter
            ]
            if not pieces:
                continue
            whole = like[life].clone()
            for piece, values in pieces:
                whole.view(-1)[piece.start : piece.stop] = values.to(whole.device)
            found[life] = whole
        return found

    def _wanted_gradients(self, held: Sequence[Held]) -> Iterator[tuple[Held, Tensor, Tensor | None]]:
        """What is held, the gradient that is expected there, and the one that is there."""
        for each in held:
            life = self.own[each.parameter]
            if self.reference.skipped(life) and each.gradient is None:
                continue
            yield each, self.reference.gradients.of[life], each.gradient

    def _compare_moments(self, held: Sequence[Held], prefix: str) -> None:
        for each in held:
            life = self.own[each.parameter]
            names = MOMENTS[self.muon.marks[each.parameter].muon]
            for name, wanted in zip(names, self.reference.state(life).moments, strict=True):
                if not self.record.clean:
                    return
                if name not in each.state:
                    message = f"{prefix}the state in local_shards() has no {name!r} (it has {sorted(each.state)})"
                    self.record.diverge(
                        Property.MOMENTS, message, parameter=self.names[each.parameter], index=each.parameter
                    )
                    return
                self._compare_each(Property.MOMENTS, f"{prefix}{name}", [(each, wanted, each.state[name])])

    def _compare_each(self, prop: Property, what: str, pairs: Any) -> None:  # noqa: ANN401
        """Bit for bit, zeros of either sign alike; ``pairs``: what is held, what is expected (whole), what is there."""
        for each, wanted, seen in pairs:
            if not self.record.clean:
                return
            if seen is None:
                self._diverge_missing(prop, each, what)
                return
            difference = compare(each, wanted, seen, self.rank, signed_zeros=False)
            self.record.checked(prop, difference.compared)
            if difference.mismatch is not None:
                self.record.diverge(prop, f"{what} differs", difference)

    def _diverge_missing(self, prop: Property, each: Held, what: str) -> None:
        name = self.names[each.parameter]
        self.record.diverge(prop, f"{what} of what this rank owns is None", parameter=name, index=each.parameter)

    def _wanted_weights(self) -> list[Tensor]:
        """The compute weights of this rank as they should be: outside a colour's groups as at the start."""
        return [
            self.reference.state(self.own[index]).weight if index in self.own else self.initial[index]
            for index in range(len(self.parameters))
        ]

    def _compare_weights(self, when: str) -> None:
        self.record.checked(Property.STORAGE)
        problem = self.places.problem()
        if problem is not None:
            index, message = problem
            name = None if index is None else self.names[index]
            self.record.diverge(Property.STORAGE, f"{when} {message}", parameter=name, index=index)
            raise CannotGoOnError  # there may be no place any more for the next part's gradients
        if not self.record.clean:
            return
        for index, (parameter, wanted) in enumerate(zip(self.parameters, self._wanted_weights(), strict=True)):
            seen = parameter.detach().contiguous().view(-1)
            outcome = compare_bits(wanted.reshape(-1), seen, signed_zeros=True)
            self.record.checked(Property.WEIGHTS, outcome.compared)
            if outcome.mismatch is not None:
                found = outcome.mismatch
                owner = self._owner(index, found.index)
                difference = Difference(outcome.compared, found, index, found.index, owner=owner)
                self.record.diverge(Property.WEIGHTS, f"{when} the compute weights differ", difference)
                return

    def _owner(self, parameter: int, element: int) -> int | None:
        """The rank of this one's group that owns an element."""
        ranks = self.own[parameter].ranks if parameter in self.own else ()
        for piece, rank in self.owners:
            if piece.parameter == parameter and piece.start <= element < piece.stop and rank in ranks:
                return rank
        return None

    def _digests(self) -> None:
        """Of the compute weights, together of those that the same ranks have."""
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for index, life in self.own.items():
            by_ranks.setdefault(life.ranks, []).append(index)
        everyone = tuple(range(self.scenario.world))
        for ranks, indices in sorted(by_ranks.items()):
            weights = [self.parameters[index].detach() for index in indices]
            listed = [self.scenario.parameters[index] for index in indices]
            traced = [replace(one, sources=sources(one, index)) for one, index in zip(listed, indices, strict=True)]
            cut = any(one.sources for one in self.scenario.parameters)
            some = replace(self.scenario, parameters=tuple(traced if cut else listed))
            self.record.weights(digest(by_stream(some, weights)), () if ranks == everyone else ranks)

    def _check_cleared(self, after: str) -> None:
        """No ``.grad`` is left, and every ``main_grad`` is zeros."""
        if not self.record.clean:
            return
        self.record.checked(Property.INTAKE, len(self.own))
        for index, parameter in enumerate(self.parameters):
            if index not in self.own:
                continue
            main_grad = getattr(parameter, "main_grad", None)
            left = None
            if parameter.grad is not None:
                left = "a parameter still has its .grad: the next backward would add to it"
            elif main_grad is not None and bool(main_grad.count_nonzero()):
                left = "a main_grad is not zeros: the next backward would add to it"
            if left is not None:
                self.record.diverge(Property.INTAKE, f"after {after} {left}", parameter=self.names[index], index=index)
                return
