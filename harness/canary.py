"""Two subjects that must fail, run before every long campaign: if one passes, no verdict could be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, UndecidedError
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.source import parse
from harness.verdict import Property, Stage


@dataclass(frozen=True)
class _Canary:
    """``name``: the built-in. Its last rank must be found at ``stage``, with one of ``properties``."""

    name: str
    properties: frozenset[Property]
    stage: Stage


class BrokenHarnessError(UndecidedError):
    """A subject that must fail did not, or not for what it does: nothing that this harness says could be trusted."""


CANARIES = (
    _Canary("canary-bit", frozenset({Property.GRADIENT, Property.OWNERSHIP}), Stage.REDUCE),
    _Canary("canary-exit", frozenset({Property.PROGRESS}), Stage.GATHER),
)


def check_canaries(pool: Pool, world: int) -> None:
    """Run both on the ranks of one world.

    Raises:
        BrokenHarnessError: one of them was not found out, or not for what it does.
        UndecidedError: they could not be run, which says nothing of the harness.
    """
    for canary in CANARIES:
        evaluation = Evaluator(parse(canary.name), pool).evaluate(scenario(world))
        problem = _problem(canary, evaluation, world - 1)
        if problem is not None:
            raise BrokenHarnessError(
                f"the harness is broken: {canary.name}, a subject that must fail, {problem}; "
                "no verdict could be trusted, so nothing was run"
            )


def scenario(world: int) -> Scenario:
    """A few elements in two buckets, one step, sums that are exact: what is wrong can only be the subject."""
    part = Part(False, tuple(range(world)), ((),) * world)
    parameters = (Parameter("w", (2 * world + 1,)), Parameter("b", ()))
    return Scenario(world, 7, parameters, Values(Domain.EXACT, 255, 0), AdamW(), (Build(world + 1), part, Step()))


def _problem(canary: _Canary, evaluation: Evaluation, rank: int) -> str | None:
    found = evaluation.divergence
    if evaluation.conclusion is not Conclusion.VIOLATED or found is None:
        return f"came out as {evaluation.conclusion.value}"
    if found.property not in canary.properties or (found.stage, found.rank) != (canary.stage, rank):
        wanted = " or ".join(sorted(prop.value for prop in canary.properties))
        return (
            f"should violate {wanted} at stage {canary.stage.value} of rank {rank}, but was found to violate "
            f"{found.property.value} at stage {found.stage.value} of rank {found.rank}"
        )
    return None
