"""What a simulated world tells of a class that gloo says nothing of: races, and ranks that part ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.report.result import Failure
from tests.support import Campaigns

WORLDS = (2, 3, 4)


def _failure(simulated: Campaigns, subject: str, worlds: tuple[int, ...] = WORLDS) -> Failure:
    result = simulated.run(subject, worlds=worlds, examples=60, shrink_s=0.5)
    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    return result.failure


@pytest.mark.parametrize(
    ("subject", "stage", "words"),
    [
        ("museum:reads-before-wait", "gather", ("read output", "all_gather", "before wait()", "in gather_params")),
        ("racing.py:ReusesInputBeforeWait", "reduce", ("changed the input", "reduce_scatter", "before wait()")),
        ("racing.py:WritesOutputBeforeWait", "reduce", ("wrote the output", "reduce_scatter", "before wait()")),
        ("racing.py:NeverWaits", "reduce", ("read the output", "reduce_scatter", "before wait()")),
        (
            "racing.py:GivesOutputOtherMemory",
            "reduce",
            ("moved the memory of the output", "reduce_scatter", "before wait()"),
        ),
        ("racing.py:ReadsThroughNumpyBeforeWait", "reduce", ("holds until wait()",)),
    ],
)
def test_a_buffer_that_is_used_before_the_wait_is_named(
    subject: str, stage: str, words: tuple[str, ...], simulated: Campaigns
) -> None:
    failure = _failure(simulated, subject, worlds=(2,))

    assert failure.stage == stage
    assert failure.rank == 1  # the last one
    assert all(word in failure.message for word in words), failure.message


@pytest.mark.parametrize("name", ["PreparesViewsBeforeWait", "PollsUntilDone"])
def test_a_buffer_that_is_left_alone_holds(name: str, simulated: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every operation is looked at."""
    monkeypatch.setattr("harness.runner.CLOSELY_EVERY", 12)
    result = simulated.run(f"racing.py:{name}", worlds=WORLDS, examples=12)

    assert result.verdict == "holds", (result.reason, result.failure)


def test_a_collective_in_a_finaliser_meets_those_of_the_others(simulated: Campaigns) -> None:
    failure = _failure(simulated, "museum:meets-nobody-in-its-end", worlds=(2,))

    assert failure.property == "traffic"
    assert "rank 1 called barrier" in failure.message
    assert "rank 0 called nothing" in failure.message


def test_what_can_be_imported_only_once_holds_in_several_worlds(simulated: Campaigns) -> None:
    result = simulated.run("registering.py:RegistersAnOperator", worlds=WORLDS, examples=16)

    assert result.verdict == "holds", (result.reason, result.failure)


def test_a_class_that_leaves_no_descriptors_to_the_other_ranks_holds(simulated: Campaigns) -> None:
    result = simulated.run("rude.py:Rude", worlds=(2,), examples=10, args={"how": "descriptor limit"})

    assert result.verdict == "holds", (result.reason, result.failure)


def test_a_class_that_interrupts_the_harness_is_to_blame(simulated: Campaigns) -> None:
    failure = _failure(simulated, "rude.py:InterruptsTheHarness")

    assert failure.property == "progress"
    assert "code of the class that nobody had called" in failure.message


def test_equal_buckets_in_another_order_are_named(simulated: Campaigns) -> None:
    failure = _failure(simulated, "museum:swaps-equal-buckets")

    assert (failure.property, failure.stage) == ("traffic", "reduce")
    assert failure.rank is not None
    assert "two collectives of equal size in another order" in failure.message


def test_a_collective_that_a_rank_without_gradient_skips_is_named(simulated: Campaigns) -> None:
    failure = _failure(simulated, "museum:skips-without-gradient", (3,))

    assert failure.property == "traffic"
    assert failure.rank is not None
    # How many ranks skip it depends on the case, and so, on how small that was made, who of them is told.
    assert "skipped that collective" in failure.message or "unless the others left it out" in failure.message
    assert "--stall" not in failure.message


def test_a_rank_that_does_not_take_the_end_for_an_answer_is_left_behind(simulated: Campaigns) -> None:
    """It goes on calling for ever; the verdict does not wait for it, and the next scenario has another process."""
    result = simulated.run("stubborn.py:SwallowsEverything", worlds=(3,), examples=5)

    assert result.verdict == "violated"
    assert result.failure is not None
    assert (result.failure.property, result.failure.rank) == ("traffic", 2)
    assert "skipped that collective" in result.failure.message
    assert simulated.run("zero2", worlds=(3,), examples=5).verdict == "holds"


def test_what_an_import_left_in_context_variables_is_there_in_every_scenario(simulated: Campaigns) -> None:
    result = simulated.run("stubborn.py:KeepsContext", worlds=(1, 3), examples=6)

    assert result.verdict == "holds", (result.reason, result.failure)


@pytest.mark.parametrize(
    ("subject", "call"), [("stubborn.py:CallsFromAThread", "all_reduce"), ("racing.py:WaitsInAThread", "wait()")]
)
def test_what_a_simulated_world_cannot_do_is_no_violation(subject: str, call: str, simulated: Campaigns) -> None:
    """Nothing can be said of the class, and that is what is said, whatever became of the exception."""
    result = simulated.run(subject, worlds=(3,), examples=5)

    assert result.verdict == "unknown"
    assert f"{call} was called from a thread that is not the rank's own" in (result.reason or "")
    assert "--backend gloo" in (result.reason or "")


def test_a_read_that_spoils_nothing_is_found_by_looking_closely(
    simulated: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scenario in so many is run once more, operation by operation; its case fails again when it is replayed."""
    monkeypatch.setattr("harness.runner.CLOSELY_EVERY", 12)
    result = simulated.run("racing.py:PeeksBeforeWait", worlds=(3,), examples=12)

    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    assert (result.failure.property, result.failure.stage, result.failure.rank) == ("traffic", "reduce", 2)
    assert "read the output of its 1st collective, reduce_scatter" in result.failure.message
    assert "before wait()" in result.failure.message
    assert "in _reduce" in result.failure.message
    again = simulated.replay(Path(result.failure.case or ""), "racing.py:PeeksBeforeWait")
    assert again.failure is not None
    # Whether there was time to make it as small as can be is said too.
    assert result.failure.message.startswith(again.failure.message or "nothing")
