"""The state machine: what it draws is valid and has everything in it, and it shrinks under Hypothesis alone."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.stateful import run_state_machine_as_test

from harness.fuzz.machine import RULES, ScenarioFailed, state_machine
from harness.oracles.intake import IntakeModel
from harness.scenario.generate import nothing_stored, quietly
from harness.scenario.model import Discard, Extension, Load, Scenario, check, steps
from harness.scenario.situations import Situation, reached

WORLDS = (1, 2, 3, 4)


def runs(examples: int, extension: Extension, seed: int = 0) -> list[Scenario]:
    examined: list[Scenario] = []

    def examine(scenario: Scenario) -> bool:
        examined.append(scenario)
        return False

    machine = hypothesis.seed(seed)(state_machine(examine, worlds=WORLDS, extension=extension))
    with nothing_stored():
        run_state_machine_as_test(machine, settings=quietly(examples, (Phase.generate,), RULES))
    return examined


def test_runs_are_valid_and_have_every_operation_and_every_sequence() -> None:
    examined = runs(100, Extension(refresh=True))
    assert len(examined) > 60
    assert all(check(scenario) is None for scenario in examined)
    operations = Counter(type(operation).__name__ for scenario in examined for operation in scenario.operations[1:])
    assert set(operations) == {"Part", "Step", "Clip", "Discard", "Skip", "Rate", "Load", "Build"}
    shown = {situation for scenario in examined for situation in reached(scenario)}
    assert shown >= {
        Situation.DISCARD_HELD,
        Situation.DISCARD_SPILLED,
        Situation.LATER_SPILL,
        Situation.PART_AFTER_LAST,
        Situation.PARTS_CHANGE,
        Situation.SKIP_THEN_STEP,
        Situation.REBUILT,
        Situation.LOADED,
        Situation.LR_CHANGED,
    }


def test_weights_are_loaded_only_where_the_subject_takes_that() -> None:
    examined = runs(30, Extension())
    assert not [op for scenario in examined for op in scenario.operations if isinstance(op, Load)]


def test_what_was_announced_and_never_comes_is_discarded() -> None:
    for scenario in runs(30, Extension()):
        for plan in steps(scenario):
            assert plan.discard or not plan.parts[-1].more


def test_a_wrong_intake_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntakeModel, "discard", lambda self: None)
    with pytest.raises(RuntimeError, match="internal error: the intake model of rank 0"):
        runs(60, Extension())


def test_a_failing_run_is_made_small_by_hypothesis_alone() -> None:
    smallest: list[Scenario] = []

    def examine(scenario: Scenario) -> bool:
        failed = scenario.world > 2 and any(isinstance(operation, Discard) for operation in scenario.operations)
        if failed:
            smallest.append(scenario)
        return failed

    machine = hypothesis.seed(1)(state_machine(examine, worlds=WORLDS))
    settings = quietly(200, (Phase.generate, Phase.shrink), RULES)
    with nothing_stored(), pytest.raises(ScenarioFailed, match="operations at world 3 fails"):
        run_state_machine_as_test(machine, settings=settings)
    first, last = smallest[0], smallest[-1]
    assert (last.world, len(last.parameters), last.numel) == (3, 1, 1)
    assert len(last.operations) < len(first.operations)


class OwnError(AssertionError):
    """What a test says of its own."""


def _told(_scenario: Scenario) -> bool:
    raise OwnError


def test_under_pytest_a_test_case_fails_with_its_own_words() -> None:
    case = state_machine(_told, worlds=WORLDS).TestCase()
    case.settings = quietly(5, (Phase.generate,), RULES)
    with nothing_stored(), pytest.raises(OwnError):
        case.runTest()
