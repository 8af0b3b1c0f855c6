"""What `bench` makes of measurements, and what a person reads of it; nothing here is timed."""

from __future__ import annotations

import io
from typing import Any

import pytest

from harness.bench.campaign import PARTS, BenchResult, Full, SizeCost, WorldCost, sized_scenario, world_cost
from harness.bench.clock import Clock
from harness.bench.messages import COMPARE, NOTES, RANK_PARTS, SUBJECT
from harness.bench.show import print_result
from harness.scenario.model import check
from harness.scenario.partition import Partition


def _full(seconds: float, **parts: float) -> Full:
    return Full(seconds, {"subject": seconds / 2, **parts}, 0.001)


def test_parts_add_up_to_the_whole_and_the_rest_is_the_difference() -> None:
    runs = [
        ([_full(4.0, compare=1.0), _full(6.0), _full(5.0, draw=0.5)], [2.0, 3.0, 2.5]),
        ([_full(1.0)] * 3, [0.5] * 3),
    ]

    cost = world_cost(runs, [0.2, 0.1, 0.3], discarded=1)

    assert tuple(cost.parts) == PARTS
    assert sum(cost.parts.values()) == pytest.approx(cost.full)
    assert cost.full == (5.0 + 1.0) / 2  # of each scenario the run of median time, with its own parts
    assert cost.parts["draw"] == 0.25
    assert cost.parts["compare"] == 0.0
    assert cost.parts["send"] == 0.2
    assert cost.parts["rest"] == pytest.approx(3.0 - 1.5 - 0.25 - 0.2)


def test_the_ratio_is_that_of_the_sums_and_its_spread_that_of_the_rounds() -> None:
    cost = world_cost([([_full(4.0), _full(6.0), _full(5.0)], [2.0, 2.0, 2.5])], [0.0], discarded=0)

    assert (cost.bare, cost.full, cost.ratio) == (2.0, 5.0, 2.5)
    assert (cost.lowest, cost.highest) == (2.0, 3.0)
    assert (cost.scenarios, cost.discarded) == (1, 0)


def test_a_part_inside_another_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("harness.bench.clock.time.perf_counter", lambda: float(next(ticks)))
    clock = Clock()  # 0
    with clock.part(COMPARE), clock.part(SUBJECT):  # 1, 2
        pass  # 3, 4

    seconds = clock.read()  # 5

    assert seconds == {**dict.fromkeys(RANK_PARTS, 0.0), NOTES: 2.0, COMPARE: 2.0, SUBJECT: 1.0}
    assert sum(seconds.values()) == 5.0


def test_a_part_ends_with_an_exception_too() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="planted"), clock.part(SUBJECT):
        raise ValueError("planted")
    before = clock.read()[SUBJECT]
    assert clock.read()[SUBJECT] == before


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("numel", "buckets"), [(1000, 4), (1000, 1), (100_000, 64), (1_000_000, 4)])
def test_a_sized_scenario_has_its_size_and_number_of_buckets(world: int, numel: int, buckets: int) -> None:
    scenario = sized_scenario(world, numel, buckets)

    assert check(scenario) is None
    assert scenario.numel == numel
    assert len(Partition.from_request(numel, world, scenario.bucket).buckets) == buckets


def _result(**changes: Any) -> BenchResult:
    cost = WorldCost(
        scenarios=9, discarded=1, bare=0.01, full=0.02, ratio=2.0, lowest=1.9, highest=2.2,
        parts=dict.fromkeys(PARTS, 0.02 / len(PARTS)), drawing=0.005,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "verdict": "holds", "subject": "zero2", "backend": "gloo", "worlds": (2,), "seed": 3, "examples": 10,
        "rounds": 3, "seconds": 12.0, "per_world": {2: cost}, "table_world": 2,
        "by_elements": (SizeCost(numel=1000, buckets=4, bare=0.01, full=0.03, ratio=3.0),),
    }  # fmt: skip
    return BenchResult(**{**fields, **changes})


def _printed(result: BenchResult) -> list[str]:
    stream = io.StringIO()
    print_result(stream, result)
    return stream.getvalue().splitlines()


def test_the_ratio_is_printed_with_its_spread_and_every_part() -> None:
    lines = _printed(_result())

    assert lines[0] == "world 2: 2.00 times bare (rounds from 1.90 to 2.20), 9 scenarios, 1 outside the subject's space"
    assert [line.split()[0] for line in lines[3 : 3 + len(PARTS)]] == list(PARTS)
    assert "cost against elements, world 2" in lines
    assert "      1,000        4    10.00 ms    30.00 ms   3.00" in lines
    assert lines[-1] == "measured: zero2 on gloo, world 2 2.00 times bare (aim 1.5) in 12 s, seed 3"


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"verdict": "violated", "violation": "world 2: norm: off"}, "  violation    world 2: norm: off"),
        ({"verdict": "unknown", "reason": "no ranks", "per_world": {}}, "  reason       no ranks"),
    ],
    ids=["violated", "unknown"],
)
def test_what_went_wrong_is_the_last_line(changes: dict[str, Any], last: str) -> None:
    lines = _printed(_result(**changes))

    assert lines[-1] == last
    assert lines[-2].startswith(changes["verdict"])
