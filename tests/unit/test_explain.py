"""What is done about a violation, above all about one that hangs, over an evaluator that answers as it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest

from harness.evaluate import Conclusion, Evaluation, Evaluator, UndecidedError
from harness.explain import REPLAYS, SHORT_STALL_S, Explainer, Found, repeated
from harness.scenario import generate
from harness.scenario.model import Scenario
from harness.verdict import Divergence, Property, Stage

FIRST = generate.draw(1, 0, (2,))


def smaller_ones(count: int) -> list[Scenario]:
    return [msgspec.structs.replace(FIRST, seed=number) for number in range(count)]


def violated(prop: Property = Property.MASTER, *, hung: bool = False) -> Evaluation:
    found = Divergence(property=prop, stage=Stage.UPDATE, message="planted", rank=0)
    return Evaluation(Conclusion.VIOLATED, found, fingerprint=(prop,), hung=hung)


HOLDS = Evaluation(Conclusion.HOLDS)
HANGS = violated(Property.PROGRESS, hung=True)


class Canned:
    """An evaluator: what it says depends on the scenario and on how long it waits (None: as long as it takes)."""

    def __init__(self, answer: Callable[[Scenario, float | None], Evaluation], *, simulated: bool = True) -> None:
        self.answer = answer
        self.simulated = simulated
        self.stall_s: float | None = None
        self.ran: list[tuple[Scenario, float | None]] = []

    def evaluate(self, scenario: Scenario) -> Evaluation:
        self.ran.append((scenario, self.stall_s))
        return self.answer(scenario, self.stall_s)

    def attributed(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        return evaluation

    @contextmanager
    def stalling_within(self, stall_s: float) -> Iterator[None]:
        self.stall_s = stall_s
        try:
            yield
        finally:
            self.stall_s = None


class Observer:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def shrinking(self, tried: int, best: Scenario) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def explainer(canned: Canned, observer: Observer | None = None, **fields: Any) -> Explainer:
    return Explainer(observer or Observer(), cast(Evaluator, canned), Counter(), **fields)


def offers(*scenarios: Scenario) -> Callable[[Callable[[Scenario], bool]], None]:
    def smaller(fails: Callable[[Scenario], bool]) -> None:
        for scenario in scenarios:
            fails(scenario)

    return smaller


def test_a_hang_of_a_simulated_world_is_made_smaller_with_little_patience_and_confirmed_with_all() -> None:
    one, other, third = smaller_ones(3)
    canned = Canned(lambda scenario, _: HOLDS if scenario == third else HANGS)

    found = explainer(canned).explain(FIRST, HANGS, offers(one, other, third))

    assert found == Found(other, HANGS)
    assert canned.ran == [(one, SHORT_STALL_S), (other, SHORT_STALL_S), (third, SHORT_STALL_S), (other, None)]


def test_what_is_only_slow_is_no_smaller_hang() -> None:
    (one,) = smaller_ones(1)
    observer = Observer()
    canned = Canned(lambda _, stall_s: HOLDS if stall_s is None else HANGS)

    found = explainer(canned, observer).explain(FIRST, HANGS, offers(one))

    assert found == Found(FIRST, HANGS, cut_short=found.cut_short)
    assert "only slow" in observer.notes[-1]


def test_a_crash_is_no_smaller_hang() -> None:
    (one,) = smaller_ones(1)
    canned = Canned(lambda *_: violated(Property.PROGRESS))

    assert explainer(canned).explain(FIRST, HANGS, offers(one)) == Found(FIRST, HANGS)


@pytest.mark.parametrize(("simulated", "limit_s"), [(False, 1e6), (True, 3.0)])
def test_a_hang_is_left_as_it_is_on_real_ranks_and_when_there_is_no_time(simulated: bool, limit_s: float) -> None:
    observer = Observer()
    canned = Canned(lambda *_: HANGS, simulated=simulated)

    found = explainer(canned, observer).explain(FIRST, HANGS, offers(*smaller_ones(2)), limit_s=limit_s)

    assert (found, canned.ran) == (Found(FIRST, HANGS, cut_short=found.cut_short), [])
    assert len(observer.notes) == 1


def test_everything_that_is_better_is_told_at_once() -> None:
    one, other = smaller_ones(2)
    bad = violated()
    told: list[Scenario] = []

    explainer(Canned(lambda *_: bad), better=lambda found: told.append(found.scenario)).explain(
        FIRST, bad, offers(one, other)
    )

    # As seen, confirmed, smaller, smaller still, whose doing, what it looks like.
    assert told == [FIRST, FIRST, one, other, other, other]


@pytest.mark.parametrize(("limit_s", "times"), [(0.0, 1), (1e6, REPLAYS)])
def test_without_time_a_violation_is_confirmed_by_one_more_run(limit_s: float, times: int) -> None:
    bad = violated()
    canned = Canned(lambda *_: bad)

    explainer(canned).explain(FIRST, bad, offers(), limit_s=limit_s)

    assert [scenario for scenario, _ in canned.ran] == [FIRST] * times


def test_without_time_a_violation_that_does_not_come_again_is_still_one_of_determinism() -> None:
    found = explainer(Canned(lambda *_: HOLDS)).explain(FIRST, violated(), offers(), limit_s=0.0)

    assert found.evaluation.divergence is not None
    assert found.evaluation.divergence.property is Property.DETERMINISM


def test_without_time_nothing_smaller_is_tried_and_that_is_said() -> None:
    bad = violated()
    explains = explainer(Canned(lambda *_: bad))

    found = explains.explain(FIRST, bad, offers(*smaller_ones(2)), limit_s=0.0)

    assert found == Found(FIRST, bad, cut_short=found.cut_short)
    assert "may not be the smallest" in (explains.cut_short or "")


def test_an_error_leaves_the_best_so_far() -> None:
    one, other = smaller_ones(2)
    bad = violated()

    def answer(scenario: Scenario, _: float | None) -> Evaluation:
        if scenario == other:
            raise UndecidedError("no ranks")
        return bad

    explains = explainer(Canned(answer))
    with pytest.raises(UndecidedError):
        explains.explain(FIRST, bad, offers(one, other))
    assert explains.best == Found(one, bad)


def test_what_comes_and_goes_is_not_made_smaller() -> None:
    answers = iter([violated(), HOLDS, violated(), violated()])
    checks: Counter[str] = Counter()
    explains = Explainer(Observer(), cast(Evaluator, Canned(lambda *_: next(answers))), checks)

    found = explains.explain(FIRST, violated(), offers(*smaller_ones(2)))

    assert found.evaluation.divergence is not None
    assert found.evaluation.divergence.property is Property.DETERMINISM
    assert checks == {"determinism": 2}
    assert REPLAYS > 2


def test_a_case_that_may_not_be_the_smallest_says_so() -> None:
    bad = violated()
    one, other = smaller_ones(2)
    whole = explainer(Canned(lambda *_: bad)).explain(FIRST, bad, offers(one, other))
    assert whole.cut_short is None
    cut = explainer(Canned(lambda *_: bad), shrink_s=-1.0).explain(FIRST, bad, offers(one, other))
    assert "may not be the smallest" in (cut.cut_short or "")


def traced(*runs: tuple[str, str], settling: int = 1) -> Evaluation:
    """What is said of a scenario whose runs gave these bits, and whose ranks waited in these places."""
    first, *again = (Evaluation(Conclusion.HOLDS, fingerprint=run) for run in runs)
    answers = iter(again)
    runs_them = cast(Evaluator, Canned(lambda scenario, stall_s: next(answers)))
    said = repeated(runs_them, FIRST, first, Counter(), times=1, settling=settling)
    assert next(answers, None) is None, "it was not run as often as there are answers"
    return said


def test_a_first_run_may_set_up_what_is_kept() -> None:
    assert traced(("bits", "makes groups"), ("bits", "has them"), ("bits", "has them")).conclusion is Conclusion.HOLDS


def test_what_is_kept_may_have_been_there_in_another_process() -> None:
    runs = [("bits", "has them"), ("bits", "makes groups"), ("bits", "has them"), ("bits", "has them")]
    assert traced(*runs, settling=2).conclusion is Conclusion.HOLDS
    other = traced(*runs[:3], ("bits", "elsewhere"), settling=2)
    assert other.divergence is not None
    assert traced(("bits", "here"), ("other bits", "here"), settling=2).divergence is not None


@pytest.mark.parametrize(
    "runs",
    [
        [("bits", "here"), ("bits", "there"), ("bits", "here")],
        [("bits", "here"), ("bits", "there"), ("bits", "elsewhere")],
        [("bits", "here"), ("other bits", "here")],
        [("bits", "here"), ("other bits", "there")],
        [("bits", "here"), ("bits", "there"), ("other bits", "there")],
    ],
)
def test_what_changes_from_run_to_run_is_no_setting_up(runs: list[tuple[str, str]]) -> None:
    said = traced(*runs)
    assert said.divergence is not None
    assert said.divergence.property is Property.DETERMINISM
