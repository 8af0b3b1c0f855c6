"""What pictures are drawn from: forged observations of a small layout, of which every number can be said by hand."""

from __future__ import annotations

import numpy as np
import pytest

from harness.diagnosis import picture
from harness.diagnosis.picture import evidence_of
from harness.report.evidence import Map, MapBucket, MapParameter, Place, RankUlps, State, Timeline, WrongRun
from harness.scenario.model import AdamW, Build, Discard, Domain, Parameter, Part, Scenario, Step, Values
from harness.verdict import Divergence, Observation, Property, Quantity, Stage

PART = Part(more=False, contributors=(0, 1), none=((), ()))
SCENARIO = Scenario(
    world=2,
    seed=1,
    parameters=(Parameter("a", (3,)), Parameter("none", (0,)), Parameter("b", (4,))),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(4), PART, Step(), PART, Discard(), PART, Step()),
)
# Seven elements in buckets of 4: rank 0 holds 0, 1 and 4, 5; rank 1 holds 2, 3 and 6 and a place of padding.
BUCKETS = ((0, 4, 4), (4, 7, 4))
EXPECTED = np.arange(1, 8, dtype=np.float32)
FOUND = Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, step=0, rank=0, message="differs")


def seen(actual: list[float], quantity: Quantity = Quantity.GRADIENT, expected: np.ndarray = EXPECTED) -> Observation:
    return Observation(
        quantity=quantity,
        step=0,
        stage=Stage.REDUCE,
        buckets=BUCKETS,
        expected=expected.tobytes(),
        actual=np.array(actual, np.float32).tobytes(),
    )


def map_of(observations: dict[int, Observation | None], scenario: Scenario = SCENARIO) -> Map:
    found = evidence_of(scenario, FOUND, observations, ()).map
    assert found is not None
    return found


def after(value: float, steps: int) -> float:
    """So many fp32 values further up."""
    found = np.float32(value)
    for _ in range(steps):
        found = np.nextafter(found, np.float32(np.inf))
    return float(found)


def test_pieces_that_are_wrong_are_runs_in_the_buckets_of_their_ranks() -> None:
    """Rank 0 is wrong in both of its places in bucket 0 and in the first of bucket 1; rank 1 in its padding."""
    found = map_of({0: seen([after(1, 1), after(2, 6), after(5, 4), 6]), 1: seen([3, 4, 7, 9])})
    assert found.parameters == (MapParameter("a", 0, 3), MapParameter("b", 3, 4))
    assert found.buckets == (MapBucket(0, 0, 4, 4, wrong=2), MapBucket(1, 4, 7, 4, wrong=2))
    assert found.runs == (WrongRun(0, 0, 0, 2), WrongRun(0, 1, 0, 1), WrongRun(1, 1, 3, 1))
    assert (found.compared, found.wrong, found.wrong_padding, found.whole) == (7, 3, 1, False)
    assert found.ulps[0] == RankUlps(rank=0, bins={0: 1, 2: 2})
    assert [(each.rank, each.parameter, each.element, each.ulps) for each in found.values] == [
        (0, "a", 0, 1), (0, "a", 1, 6), (0, "b", 1, 4), (1, None, 7, found.values[3].ulps)
    ]  # fmt: skip
    assert (found.values[0].expected, found.unit) == ("1.0", "fp32")


def test_a_rank_to_which_all_was_equal_has_no_run() -> None:
    found = map_of({0: None, 1: seen([3, -4, 7, 0])})
    assert found.runs == (WrongRun(1, 0, 3, 1),)
    assert found.ulps == (RankUlps(rank=1, bins={31: 1}),)  # the other sign: twice 0x40800000


def test_what_is_not_finite_is_counted_apart() -> None:
    found = map_of({0: seen([float("nan"), float("inf"), 5, after(6, 2)]), 1: None})
    assert found.ulps == (RankUlps(rank=0, bins={1: 1}, not_finite=2),)
    assert [each.ulps for each in found.values] == [None, None, 2]


@pytest.mark.parametrize("alike", [True, False])
def test_weights_are_whole_on_every_rank_and_counted_in_steps_of_bf16(alike: bool) -> None:
    """3.0 and 3.015625 are neighbours in bf16. Ranks that hold the same are one line of the map."""
    wrong = seen([1, 2, 3.015625, 4, 5, 6, 7], Quantity.WEIGHTS)
    found = map_of({0: wrong, 1: wrong if alike else None})
    assert found.whole
    assert found.unit == "bf16"
    assert found.runs == (WrongRun(None if alike else 0, 0, 2, 1),)
    assert found.ulps == (RankUlps(rank=None if alike else 0, bins={0: 1}),)
    assert found.compared == (7 if alike else 14)


def test_what_is_too_much_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has wrong values is kept before what has none."""
    for name in ("MOST_PARAMETERS", "MOST_BUCKETS", "MOST_RUNS", "MOST_VALUES"):
        monkeypatch.setattr(picture, name, 1)
    found = map_of({0: seen([1, 2, 50, 6]), 1: seen([3, 4, 70, 0])})
    assert [bucket.index for bucket in found.buckets] == [1]
    assert [parameter.name for parameter in found.parameters] == ["b"]
    assert (found.buckets_left_out, found.parameters_left_out, found.runs_left_out) == (1, 1, 1)
    assert len(found.runs) == len(found.values) == 1
    assert found.wrong == 2


def test_of_too_many_runs_each_bucket_keeps_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket that is wrong looks clean because another has so many."""
    monkeypatch.setattr(picture, "MOST_RUNS", 2)
    found = map_of({0: seen([9, 2, 50, 60]), 1: seen([9, 4, 70, 0])})
    assert found.runs == (WrongRun(0, 0, 0, 1), WrongRun(0, 1, 0, 2))
    assert [bucket.wrong for bucket in found.buckets] == [2, 3]
    assert found.runs_left_out == 2


def test_the_histogram_has_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bars are the wrong values of the map, however many ranks there are."""
    monkeypatch.setattr(picture, "MOST_RANKS", 1)
    found = map_of({0: seen([9, 2, 5, 6]), 1: seen([9, 4, 7, 0])})
    assert sum(sum(each.bins.values()) for each in found.ulps) == found.wrong == 2


def test_a_long_name_is_cut() -> None:
    names = Scenario(
        world=2,
        seed=1,
        parameters=(Parameter("x" * 10_000, (7,)),),
        values=SCENARIO.values,
        optimizer=AdamW(),
        operations=SCENARIO.operations,
    )
    found = map_of({0: seen([9, 2, 5, 6]), 1: None}, names)
    assert found.parameters[0].name == found.values[0].parameter == "x" * 200 + "…"


@pytest.mark.parametrize(
    ("divergence", "observations", "says"),
    [
        (Divergence(property=Property.PROGRESS, stage=Stage.NORM, message=""), {}, "how the ranks ran"),
        (Divergence(property=Property.DETERMINISM, stage=Stage.NORM, message=""), {}, "digests"),
        (
            Divergence(property=Property.NORM, stage=Stage.NORM, message=""),
            {0: seen([], Quantity.NORM), 1: None},
            "one number",
        ),
        (Divergence(property=Property.INTAKE, stage=Stage.COLLECT, message=""), {}, "not one of values"),
    ],
)
def test_where_there_is_no_map_a_sentence_says_why(
    divergence: Divergence, observations: dict[int, Observation | None], says: str
) -> None:
    found = evidence_of(SCENARIO, divergence, observations, ())
    assert (found.map, found.timeline) == (None, None)
    assert says in (found.no_map or "")


# --- the timeline -----------------------------------------------------------------------------------------------------


def timeline_of(found: Divergence, *places: Place) -> Timeline:
    timeline = evidence_of(SCENARIO, found, {}, places).timeline
    assert timeline is not None
    return timeline


def at(timeline: Timeline, rank: int, step: int | None, stage: str) -> State:
    columns = [(column.step, column.stage) for column in timeline.columns]
    row = next(row for row in timeline.rows if row.rank == rank)
    assert len(row.states) == len(columns)
    return row.states[columns.index((step, stage))]


def test_before_its_place_a_rank_agreed_and_after_it_nothing_is_known() -> None:
    found = Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, step=2, rank=1, message="")
    timeline = timeline_of(found, Place(0, None, "build", "agreed"), Place(1, 2, "reduce", "differs"))
    assert [column.stage for column in timeline.columns if column.step == 1] == ["collect"]  # it is discarded
    assert (timeline.steps_left_out, timeline.ranks_left_out) == (0, 0)
    assert at(timeline, 1, 1, "collect") == "agreed"
    assert at(timeline, 1, 2, "reduce") == "differs"
    assert at(timeline, 1, 2, "norm") == "after"
    assert set(timeline.rows[0].states) == {"agreed"}


def test_a_hang_shows_where_each_rank_waits() -> None:
    found = Divergence(property=Property.PROGRESS, stage=Stage.NORM, step=0, rank=1, message="")
    timeline = timeline_of(found, Place(0, 0, "norm", "hung"), Place(1, 0, "reduce", "ended"))
    assert at(timeline, 0, 0, "norm") == "hung"
    assert at(timeline, 1, 0, "reduce") == "ended"
    assert at(timeline, 1, 0, "norm") == "after"


@pytest.mark.parametrize(("rank", "differing"), [(1, {1}), (None, {0, 1})])
def test_what_only_all_ranks_show_is_at_the_rank_named_or_at_all(rank: int | None, differing: set[int]) -> None:
    """Norms whose bits differ, say: each rank by itself saw nothing."""
    found = Divergence(property=Property.NORM, stage=Stage.NORM, step=0, rank=rank, message="")
    timeline = timeline_of(found, Place(0, None, "build", "agreed"), Place(1, None, "build", "agreed"))
    assert {row.rank for row in timeline.rows if "differs" in row.states} == differing


def test_of_many_steps_and_ranks_the_telling_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MOST_STEPS", 1)
    monkeypatch.setattr(picture, "MOST_RANKS", 1)
    found = Divergence(property=Property.GRADIENT, stage=Stage.REDUCE, step=2, rank=1, message="")
    timeline = timeline_of(found, Place(0, None, "build", "agreed"), Place(1, 2, "reduce", "differs"))
    assert [row.rank for row in timeline.rows] == [1]
    assert (timeline.steps_left_out, timeline.ranks_left_out) == (2, 1)
    assert {column.step for column in timeline.columns} == {None, 2}


def test_a_place_that_its_kind_of_step_is_not_known_to_have_is_shown_all_the_same() -> None:
    found = Divergence(property=Property.STORAGE, stage=Stage.GATHER, step=1, rank=0, message="")
    timeline = timeline_of(found, Place(0, 1, "gather", "differs"), Place(1, None, "build", "agreed"))
    assert at(timeline, 0, 1, "gather") == "differs"
    assert at(timeline, 0, 1, "collect") == "agreed"
