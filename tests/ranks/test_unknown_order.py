"""Sums of a backend whose order of addition no rule tells, as NCCL's: in simulated worlds that add in several ways.

What is right holds, explained by probing or within the bound of any order; what is wrong is found all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, start_pool
from harness.oracles.order import UNKNOWN
from harness.scenario.generate import draw
from harness.scenario.model import Domain, Scenario, steps
from harness.sim.choices import SumOrder
from harness.verdict import Oracle
from tests.support import subject

OWN = str(Path(__file__).parents[1] / "subjects" / "adding.py")
NUM = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with start_pool("sim") as found:
        yield found


def scenarios(world: int, domain: Domain, num: int = NUM) -> list[Scenario]:
    """Some whose sums are reduced, of one domain."""
    found: list[Scenario] = []
    for index in range(400):
        scenario = draw(9, index, (world,))
        if scenario.values.domain is domain and not scenario.faults and any(not p.discard for p in steps(scenario)):
            found.append(scenario)
        if len(found) == num:
            return found
    raise AssertionError(f"{len(found)} of {num} scenarios")


Run = Callable[..., tuple[list[Evaluation], Counter[str]]]


@pytest.fixture
def run(pool: Pool) -> Run:
    def run(
        name: str, world: int, order: SumOrder = SumOrder.RING, domain: Domain = Domain.GENERAL
    ) -> tuple[list[Evaluation], Counter[str]]:
        evaluator = Evaluator(subject(name), pool, order=order.value, rule=UNKNOWN)
        evaluations = [evaluator.evaluate(scenario) for scenario in scenarios(world, domain)]
        oracle: Counter[str] = Counter()
        for evaluation in evaluations:
            oracle.update(evaluation.oracle)
        return evaluations, oracle

    return run


def all_hold(evaluations: list[Evaluation]) -> bool:
    return all(evaluation.conclusion is Conclusion.HOLDS for evaluation in evaluations)


@pytest.mark.parametrize("order", list(SumOrder))
@pytest.mark.parametrize("world", [3, 4])
def test_probing_explains_every_fixed_order(run: Run, order: SumOrder, world: int) -> None:
    evaluations, oracle = run("zero2", world, order)
    assert all_hold(evaluations)
    assert oracle[Oracle.ORDERED.value] > 0
    assert oracle[Oracle.BOUND.value] == 0
    if order is not SumOrder.RANK and (order, world) != (SumOrder.TREE, 3):  # both are the first guess
        assert any(evaluation.searched for evaluation in evaluations)


def test_a_sum_of_two_needs_no_order(run: Run) -> None:
    evaluations, oracle = run("zero2", 2)
    assert all_hold(evaluations)
    assert oracle[Oracle.ORDERED.value] > 0
    assert not any(evaluation.searched for evaluation in evaluations)


@pytest.mark.parametrize("name", ["AnotherOrderEachCall", "AnotherOrderEachElement"])
def test_what_is_added_in_no_fixed_order_is_held_against_the_bound(run: Run, name: str) -> None:
    evaluations, oracle = run(f"{OWN}:{name}", 4)
    assert all_hold(evaluations)
    assert oracle[Oracle.BOUND.value] > 0


@pytest.mark.parametrize("name", ["AnotherOrderEachCall", "AnotherOrderEachElement"])
def test_sums_that_are_exact_must_have_every_bit_whatever_the_order(run: Run, name: str) -> None:
    evaluations, oracle = run(f"{OWN}:{name}", 4, domain=Domain.EXACT)
    assert all_hold(evaluations)
    assert oracle[Oracle.EXACT.value] > 0
    evaluations, _ = run(f"{OWN}:WrongLastBitInAnyOrder", 4, domain=Domain.EXACT)
    assert any(evaluation.conclusion is Conclusion.VIOLATED for evaluation in evaluations)


def test_a_lost_contribution_is_outside_every_bound(run: Run) -> None:
    evaluations, _ = run(f"{OWN}:LosesARankInAnyOrder", 4)
    found = [each.divergence for each in evaluations if each.conclusion is Conclusion.VIOLATED]
    assert found
    assert all(each is not None and each.property.value in ("gradient", "spill") for each in found)


def test_without_a_rule_every_scenario_begins_with_the_search(pool: Pool) -> None:
    assert Evaluator(subject("zero2"), pool, rule=UNKNOWN)._task(scenarios(3, Domain.GENERAL, 1)[0]).exchanges
    assert not Evaluator(subject("zero2"), pool)._task(scenarios(3, Domain.GENERAL, 1)[0]).exchanges
