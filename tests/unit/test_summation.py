"""Which orders of addition are tried, in which order, and how seldom a second instance is probed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from harness.drive import summation as summation_module
from harness.drive.shard import ShardMap
from harness.drive.summation import Summation, Summations, calls_of_step, fingerprint
from harness.oracles.contributions import Nesting
from harness.oracles.order import Order, Rule, fold, gloo, in_rank_order, rule, uniform
from harness.oracles.prediction import Call, predict
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, StepPlan, Values, check
from harness.scenario.partition import Partition
from harness.verdict import Collective

NUMEL = 12
INSIDE, ACROSS = Nesting.PARTS_INSIDE, Nesting.RANKS_INSIDE
CALLS = frozenset({("reduce_scatter", NUMEL)})


class Probe:
    """Answers in turn (the last answer again and again), and remembers in which steps it was asked."""

    def __init__(self, *answers: Order | None) -> None:
        self.answers = answers
        self.plans: list[StepPlan] = []

    def during(self, plan: StepPlan) -> Callable[[], Order | None]:
        def ask() -> Order | None:
            self.plans.append(plan)
            return self.answers[min(len(self.plans), len(self.answers)) - 1]

        return ask


class Searches:
    """The candidates of one subject, with one probe for all steps."""

    def __init__(self, world: int, probe: Probe, rule: Rule = gloo) -> None:
        scenario = Scenario(
            world,
            0,
            (Parameter("a", (5,)), Parameter("b", (NUMEL - 5,))),
            Values(Domain.GENERAL, 255, 0, 8),
            AdamW(),
            (Build(NUMEL), *plan_of(world, False).parts, Step()),
        )
        assert check(scenario) is None
        partition = Partition.from_request(NUMEL, world, NUMEL)
        self.summations = Summations(scenario, ShardMap(scenario, partition, 0, torch.device("cpu")), rule)
        self.explained_by = self.summations.explained_by
        self._probe = probe

    def candidates(self, plan: StepPlan, calls: frozenset[Call]) -> Iterator[Summation]:
        return self.summations.candidates(plan, calls, self._probe.during(plan))


def plan_of(world: int, *more: bool, index: int = 0) -> StepPlan:
    """A step of parts that are announced like this."""
    parts = [
        Part(one, tuple(range(number * world, (number + 1) * world)), ((),) * world) for number, one in enumerate(more)
    ]
    return StepPlan(index, tuple(parts), None, False)


def said(candidates: Iterator[Summation]) -> list[tuple[tuple[object, ...], Nesting]]:
    return [(order.signature, nesting) for order, nesting in candidates]


def backward(world: int) -> Order:
    return uniform(fold(range(world)[::-1]), NUMEL)


PREDICTED = gloo("reduce_scatter", NUMEL, 3).signature
REVEALED = backward(3).signature


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_the_predicted_order_goes_before_the_revealed_one() -> None:
    probe = Probe(backward(3))
    plan = plan_of(3, False)
    assert said(Searches(3, probe).candidates(plan, CALLS)) == [(PREDICTED, INSIDE), (REVEALED, INSIDE)]
    assert probe.plans == [plan]


def test_several_parts_are_tried_in_both_nestings() -> None:
    probe = Probe(backward(3))
    assert said(Searches(3, probe).candidates(plan_of(3, True, False), CALLS)) == [
        (PREDICTED, INSIDE),
        (PREDICTED, ACROSS),
        (REVEALED, INSIDE),
        (REVEALED, ACROSS),
    ]


def test_the_prediction_is_that_of_the_calls_and_the_layout() -> None:
    partition = Partition.from_request(NUMEL, 3, NUMEL)
    summations = Searches(3, Probe(None))
    for calls in (CALLS, frozenset({("reduce", 4)}), frozenset({("all_reduce", 1)}), frozenset(), CALLS):
        first = next(summations.candidates(plan_of(3, False), calls))
        assert first.order.signature == predict(calls, partition).signature
        assert first.order.labels.size == NUMEL
    assert next(summations.candidates(plan_of(3, False), frozenset())).order.signature != PREDICTED


def test_the_prediction_is_by_the_rule_of_the_backend() -> None:
    tree, ring = (Searches(4, Probe(None), rule(name)) for name in ("tree", "ring"))
    first = next(tree.candidates(plan_of(4, False), CALLS)).order
    assert first.signature == rule("tree")("reduce_scatter", NUMEL, 4, "fp32").signature
    assert first.signature != next(ring.candidates(plan_of(4, False), CALLS)).order.signature
    assert tree.summations.predicted(CALLS).order.signature == first.signature


def test_what_explained_a_step_is_tried_first_in_all_later_ones() -> None:
    """Whatever the calls and the parts; the rest follows as before."""
    summations = Searches(3, Probe(backward(3)))
    found = Summation(in_rank_order(3, NUMEL), ACROSS)
    rest = said(summations.candidates(plan_of(3, True, False), CALLS))
    summations.explained_by(found)
    assert next(summations.candidates(plan_of(3, True, False), CALLS)) is found
    assert next(summations.candidates(plan_of(3, False), frozenset())) is found
    first = (found.order.signature, ACROSS)
    assert said(summations.candidates(plan_of(3, True, False), CALLS)) == [first, *rest]
    later = Summation(backward(3), INSIDE)
    summations.explained_by(later)
    assert next(summations.candidates(plan_of(3, False), CALLS)) is later


@pytest.mark.parametrize("parts", [(False,), (True, False)])
def test_a_probe_that_says_nothing_new_adds_no_candidate(parts: tuple[bool, ...]) -> None:
    """None, or the predicted order under other names of its trees."""
    order = gloo("reduce_scatter", NUMEL, 3)
    renamed = Order(order.trees[::-1], np.array([2, 1, 0], np.intp)[order.labels])
    for answer in (None, order, renamed):
        probe = Probe(answer)
        candidates = said(Searches(3, probe).candidates(plan_of(3, *parts), CALLS))
        assert candidates == [(PREDICTED, INSIDE), (PREDICTED, ACROSS)][: len(parts)]
        assert len(probe.plans) == 1


# --- when it is probed ------------------------------------------------------------------------------------------------


def test_nothing_is_probed_before_all_predictions_are_refused() -> None:
    probe = Probe(backward(3))
    summations = Searches(3, probe)
    candidates = summations.candidates(plan_of(3, True, False), CALLS)
    assert [next(candidates).nesting, next(candidates).nesting] == [INSIDE, ACROSS]
    assert not probe.plans
    next(candidates)
    assert len(probe.plans) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_sums_of_two_are_never_probed(world: int) -> None:
    probe = Probe(backward(world))
    predicted = gloo("reduce_scatter", NUMEL, world).signature
    for parts in ((False,), (True, False), (False, False, True)):
        candidates = said(Searches(world, probe).candidates(plan_of(world, *parts), CALLS))
        assert candidates == [(predicted, INSIDE), (predicted, ACROSS)][: min(len(parts), 2)]
    assert not probe.plans


@pytest.mark.parametrize("answer", [backward(3), None])
def test_each_way_of_announcing_parts_is_probed_once(answer: Order | None) -> None:
    """Whatever the step, the contributors and the calls; an answer of None is an answer too."""
    probe = Probe(answer)
    summations = Searches(3, probe)
    ways: Sequence[tuple[bool, ...]] = ((False,), (True,), (True, False), (False, False), (True, True, False))
    for index in range(3):
        for way in ways:
            list(summations.candidates(plan_of(3, *way, index=index), CALLS))
            list(summations.candidates(plan_of(3, *way, index=index), frozenset()))
    assert [tuple(part.more for part in plan.parts) for plan in probe.plans] == list(ways)


def test_each_way_has_the_order_that_was_revealed_for_it() -> None:
    summations = Searches(3, Probe(backward(3), in_rank_order(3, NUMEL)))
    held, spilled = plan_of(3, False), plan_of(3, True, False)
    for _ in range(2):
        assert said(summations.candidates(held, CALLS))[-1] == (REVEALED, INSIDE)
        assert said(summations.candidates(spilled, CALLS))[-1] == (in_rank_order(3, NUMEL).signature, ACROSS)


def test_a_step_asks_its_own_probe_and_none_of_an_earlier_step() -> None:
    """What probing needs, the gradient of the step for one, may be another in each step."""
    summations = Searches(3, Probe(None)).summations
    asked: list[int] = []

    def probe(step: int) -> Callable[[], Order | None]:
        return lambda: asked.append(step)

    first = summations.candidates(plan_of(3, False), CALLS, probe(0))
    next(first)  # explained at once: never asked
    list(summations.candidates(plan_of(3, False, index=1), CALLS, probe(1)))
    list(summations.candidates(plan_of(3, True, False, index=2), CALLS, probe(2)))
    list(summations.candidates(plan_of(3, False, index=3), CALLS, probe(3)))
    assert asked == [1, 2]


def test_a_probe_that_raises_ends_the_search_and_told_nothing() -> None:
    summations = Searches(3, Probe(None)).summations

    def fails() -> Order | None:
        raise RuntimeError("no second instance")

    with pytest.raises(RuntimeError, match="no second instance"):
        list(summations.candidates(plan_of(3, False), CALLS, fails))
    later = said(summations.candidates(plan_of(3, False), CALLS, lambda: backward(3)))
    assert later == [(PREDICTED, INSIDE), (REVEALED, INSIDE)]


@pytest.mark.parametrize(("most", "probed"), [(NUMEL - 1, False), (NUMEL, True)])
def test_a_scenario_too_large_for_a_second_instance_is_not_probed(
    most: int, probed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summation_module, "MAX_PROBED", most)
    probe = Probe(backward(3))
    candidates = said(Searches(3, probe).candidates(plan_of(3, False), CALLS))
    assert candidates == [(PREDICTED, INSIDE), (REVEALED, INSIDE)][: 1 + probed]
    assert len(probe.plans) == probed


@pytest.mark.parametrize(("most", "probed"), [(2, False), (3, True)])
def test_a_world_of_too_many_pairs_is_not_probed(most: int, probed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summation_module, "MAX_PROBED_WORLD", most)
    probe = Probe(backward(3))
    candidates = said(Searches(3, probe).candidates(plan_of(3, False), CALLS))
    assert candidates == [(PREDICTED, INSIDE), (REVEALED, INSIDE)][: 1 + probed]
    assert len(probe.plans) == probed


# --- the calls of a step ----------------------------------------------------------------------------------------------


def test_the_calls_of_a_step_are_those_since_it_began() -> None:
    whole = (0, 1, 2)

    def call(step: int | None, length: int, dtype: str = "fp32", kind: str = "all_reduce") -> Collective:
        return Collective(kind, dtype, length, whole, step, "reduce")

    log = (call(None, 1), call(0, 2), call(1, 3), call(1, 4, "bf16"), call(1, 5, kind="reduce"), call(1, 3))
    assert calls_of_step(log, 1, 3) == {("all_reduce", 3), ("reduce", 5)}
    assert calls_of_step(log, 2, 3) == frozenset()
    assert calls_of_step(log[:2], 0, 3) == {("all_reduce", 2)}
    assert calls_of_step(log[:1], None, 3) == {("all_reduce", 1)}
    assert calls_of_step((), 0, 3) == frozenset()


class Backwards(frozenset[tuple[str, int]]):
    """The same set in another order, as another process may have it."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(list(super().__iter__())[::-1])


def test_equal_calls_have_equal_fingerprints_in_whatever_order_a_process_has_them() -> None:
    calls = frozenset({("reduce_scatter", 12), ("all_reduce", 12), ("all_reduce", 3), ("reduce", 4)})
    assert list(Backwards(calls)) != list(calls)
    assert fingerprint(Backwards(calls)) == fingerprint(calls)
    others = [calls - {call} for call in calls] + [frozenset(), calls | {("reduce", 5)}]
    assert len({fingerprint(other) for other in [calls, *others]}) == 7
    assert all(0 <= fingerprint(other) < 2**32 for other in [calls, *others])
