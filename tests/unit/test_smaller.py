"""Scenarios are made smaller: as far as can be, in few tries, each of which is valid and smaller."""

from __future__ import annotations

import functools
import itertools
import typing
from collections.abc import Callable

import pytest

from harness.faults.language import Corrupt, Fault, Mute, Slow
from harness.scenario import presets
from harness.scenario.generate import draw
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Domain,
    Extension,
    Load,
    Part,
    Rate,
    Scenario,
    Skip,
    check,
    steps,
)
from harness.scenario.situations import Situation, reached
from harness.scenario.smaller import smallest
from harness.verdict import Stage

WORLDS = (1, 2, 3, 4)
EVERYTHING = Extension(refresh=True, dtypes=True, strides=True)


@functools.cache
def drawn() -> tuple[Scenario, ...]:
    return tuple(draw(11, index, WORLDS, extension=EVERYTHING) for index in range(250))


def has(kind: type) -> Callable[[Scenario], bool]:
    return lambda scenario: any(isinstance(operation, kind) for operation in scenario.operations[1:])


# What fails; the shape of what is left: world, steps, operations, parameters, elements, bucket.
CASES: dict[str, tuple[Callable[[Scenario], bool], tuple[int, int, int, int, int, int]]] = {
    "anything": (lambda s: True, (1, 0, 1, 1, 1, 1)),
    "a world": (lambda s: s.world >= 3, (3, 0, 1, 1, 1, 1)),
    "elements": (lambda s: s.numel > 100, (1, 0, 1, 1, 101, 1)),
    "a large bucket": (lambda s: s.bucket > 40, (1, 0, 1, 1, 1, 41)),
    "parameters": (lambda s: len(s.parameters) > 2 and s.numel > 2, (1, 0, 1, 3, 3, 1)),
    "steps": (lambda s: len(list(steps(s))) > 2, (1, 3, 7, 1, 1, 1)),
    "parts": (lambda s: any(len(plan.parts) > 2 for plan in steps(s)), (1, 1, 5, 1, 1, 1)),
    "a clip": (has(Clip), (1, 1, 4, 1, 1, 1)),
    "a skip": (has(Skip), (1, 1, 3, 1, 1, 1)),
    "a rate": (has(Rate), (1, 1, 4, 1, 1, 1)),
    "loaded": (has(Load), (1, 1, 4, 1, 1, 1)),
    "rebuilt": (has(Build), (1, 1, 4, 1, 1, 1)),
    "none somewhere": (lambda s: any(any(p.none) for p in s.operations if isinstance(p, Part)), (1, 1, 3, 1, 1, 1)),
    "fp32": (lambda s: any(p.dtype == "fp32" for p in s.parameters), (1, 0, 1, 1, 1, 1)),
    "transposed": (lambda s: any(p.strides == "transposed" and p.numel for p in s.parameters), (1, 0, 1, 1, 1, 1)),
    "special": (lambda s: s.values.special > 0, (1, 0, 1, 1, 1, 1)),
    "amsgrad": (lambda s: s.optimizer.amsgrad, (1, 0, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_makes_it_fail_is_left(name: str) -> None:
    fails, wanted = CASES[name]
    first = [scenario for scenario in drawn() if fails(scenario)][:3]
    assert first
    for scenario in first:
        tried: list[Scenario] = []

        def once(candidate: Scenario, tried: list[Scenario] = tried) -> bool:
            assert check(candidate) is None
            assert candidate not in tried
            tried.append(candidate)
            return fails(candidate)

        found = smallest(scenario, once)
        assert fails(found)
        ends = len(list(steps(found)))
        shape = (found.world, ends, len(found.operations), len(found.parameters), found.numel)
        # The bucket that counts is the one of the last build.
        assert (*shape, found.bucket) == wanted
        assert len(tried) < 400


def test_what_is_left_is_plain() -> None:
    found = smallest(draw(11, 3, WORLDS, extension=EVERYTHING), lambda scenario: True)
    assert (found.values.domain, found.values.exponent, found.values.spread) == (Domain.EXACT, 0, 0)
    assert found.optimizer == AdamW()
    assert found.seed == 0


@pytest.mark.parametrize(
    ("kind", "plain"), [(Clip, Clip(1.0)), (Rate, Rate(1e-2)), (Load, Load(1))], ids=["clip", "rate", "load"]
)
def test_operations_that_are_left_are_plain_and_contributors_count_up(kind: type, plain: object) -> None:
    first = next(scenario for scenario in drawn() if scenario.world > 2 and has(kind)(scenario))
    found = smallest(first, lambda scenario: scenario.world > 1 and has(kind)(scenario))
    assert plain in found.operations
    assert [part.contributors for part in found.operations if isinstance(part, Part)] == [(0, 1)]


def crosses(scenario: Scenario) -> bool:
    return scenario.world >= 3 and Situation.PARAMETER_CROSSES_BUCKET_EDGE in reached(scenario)


def spills_after_discard(scenario: Scenario) -> bool:
    return any(earlier.discard and len(later.parts) > 1 for earlier, later in itertools.pairwise(steps(scenario)))


def test_what_several_changes_together_lead_to_is_found() -> None:
    """One parameter over an edge, where none of three can be left out; a discard and a spill, and no third step."""
    for scenario in [one for one in drawn() if crosses(one)][:8]:
        found = smallest(scenario, crosses)
        assert (found.world, len(found.parameters), found.numel, found.bucket) == (3, 1, 4, 1)
    for scenario in [one for one in drawn() if spills_after_discard(one)][:8]:
        found = smallest(scenario, spills_after_discard)
        assert (found.world, found.numel, [len(plan.parts) for plan in steps(found)]) == (1, 1, [1, 2])


def test_values_that_cannot_be_plain_are_as_low_as_can_be() -> None:
    def fails(scenario: Scenario) -> bool:
        values = scenario.values
        return values.exponent <= -20 and values.max_k > 90

    found = smallest(next(scenario for scenario in drawn() if fails(scenario)), fails)
    assert (found.values.domain, found.values.exponent) == (Domain.EXACT, -20)
    assert found.values.max_k > 90


def test_only_worlds_and_buckets_that_were_asked_for_are_tried() -> None:
    tried: list[Scenario] = []

    def fails(scenario: Scenario) -> bool:
        tried.append(scenario)
        return True

    first = draw(11, 3, (4,), bucket=50)
    found = smallest(first, fails, worlds=(2, 4), keep_bucket=True)
    assert (found.world, found.numel) == (2, 1)
    assert {scenario.world for scenario in tried} == {2}  # as all fail, the first try has the fewest
    assert {operation.bucket for one in tried for operation in one.operations if isinstance(operation, Build)} == {50}


@functools.cache
def with_faults() -> tuple[Scenario, ...]:
    return tuple(draw(3, index, (2, 3), fault=True) for index in range(120))


def test_faults_are_kept_and_go_where_their_rank_and_step_go() -> None:
    """Every try is a scenario in which the same kind of fault can strike."""
    kinds = set()
    for scenario in with_faults():
        (fault,) = scenario.faults
        kind = type(fault)
        kinds.add(kind)
        collective = isinstance(fault, Slow) or getattr(fault, "collective", None) is not None

        def once(candidate: Scenario, kind: type = kind, collective: bool = collective) -> bool:
            assert check(candidate) is None
            assert [type(each) for each in candidate.faults] == [kind]
            assert candidate.world > 1 or not collective
            return True

        found = smallest(scenario, once)
        assert (found.world, found.numel) == (2 if collective else 1, 1)
        assert len(list(steps(found))) == (not isinstance(fault, Mute) and fault.step is not None)
        assert found.faults[0].rank == 0
        if isinstance(fault, Corrupt):
            assert isinstance(found.faults[0], Corrupt)
            assert (found.faults[0].stage, found.faults[0].what) == (fault.stage, fault.what)
        elif not isinstance(fault, Mute) and fault.step is not None:
            assert found.faults[0].stage is (Stage.REDUCE if collective else Stage.COLLECT)
    assert kinds == set(typing.get_args(Fault))


def test_a_fault_of_the_last_rank_follows_it() -> None:
    """What fails there and nowhere else gets small too."""

    def fails(scenario: Scenario) -> bool:
        return scenario.world >= 2 and scenario.faults[0].rank == scenario.world - 1

    first = next(scenario for scenario in with_faults() if scenario.world == 3 and fails(scenario))
    found = smallest(first, fails)
    assert (found.world, found.faults[0].rank) == (2, 1)


def test_a_long_list_gets_shorter_before_all_else() -> None:
    """Each try of it takes seconds."""
    parameters = presets.parameters("gpt2")
    (first,) = presets.campaign(parameters, 4, 2**20, seed=1, examples=1)
    tried: list[int] = []

    def fails(scenario: Scenario) -> bool:
        tried.append(scenario.numel)
        return any(parameter.numel > 100 for parameter in scenario.parameters)

    found = smallest(first, fails)
    assert (found.world, len(found.parameters), found.numel) == (1, 1, 101)
    assert tried[0] < first.numel / 50
    assert found.parameters[0].name in {parameter.name for parameter in parameters}


def test_what_is_raised_ends_the_search() -> None:
    def stops(_candidate: Scenario) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smallest(draw(11, 3, WORLDS), stops)


def test_what_does_not_get_smaller_stays() -> None:
    scenario = draw(11, 3, WORLDS)
    assert smallest(scenario, lambda candidate: False) is scenario
