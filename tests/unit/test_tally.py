"""Counts that are added up over processes and runs: nothing is lost on the way."""

from __future__ import annotations

import dataclasses

import msgspec

from harness.evaluate import Conclusion, Evaluation
from harness.scenario import generate
from harness.tally import Counts, Tally, larger

SCENARIO = generate.draw(1, 0, (2,))
EVALUATION = Evaluation(
    Conclusion.HOLDS,
    checks={"weights": 3},
    oracle={"exact": 2},
    situations=frozenset({"wide-reduced-value"}),
    seconds=0.25,
    changed=frozenset({"threads"}),
    recycled="rank 0: grew",
    margin=0.5,
)


def tally(*conclusions: Conclusion) -> Tally:
    counted = Tally()
    for conclusion in conclusions:
        counted.add(SCENARIO, dataclasses.replace(EVALUATION, conclusion=conclusion))
    return counted


def test_two_parts_add_up_to_the_whole_also_when_they_were_sent() -> None:
    whole = tally(Conclusion.HOLDS, Conclusion.UNSUPPORTED, Conclusion.HOLDS)
    total = Tally()
    for part in (tally(Conclusion.HOLDS), tally(Conclusion.UNSUPPORTED, Conclusion.HOLDS)):
        sent = msgspec.json.decode(msgspec.json.encode(part.plain()), type=Counts)
        total.merge(sent.tally())

    assert total.plain() == whole.plain()
    assert (total.num_run, total.discarded, total.seconds[2]) == (2, 1, 0.5)
    assert total.reached["wide-reduced-value"] == 2
    assert total.checks["weights"] == 6


def test_a_wrong_value_says_nothing_of_rounding() -> None:
    assert tally(Conclusion.VIOLATED).margin is None
    assert tally(Conclusion.HOLDS).margin == 0.5


def test_the_larger_of_two_margins_is_that_which_is_known() -> None:
    assert [larger(None, None), larger(None, 0.0), larger(0.5, None), larger(0.25, 0.5)] == [None, 0.0, 0.5, 0.5]
