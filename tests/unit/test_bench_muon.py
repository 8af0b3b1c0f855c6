"""What `bench muon` makes of its ranks' reports, and what a person reads of it; nothing here is timed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harness.bench.muon import campaign
from harness.bench.muon.campaign import (
    MuonBenchOptions,
    MuonBenchResult,
    check_memory,
    run_muon_bench,
    system_cost,
    timeout_s,
)
from harness.bench.muon.messages import SYSTEMS, RunSystem, SystemReport, Trained, decode_task, encode
from harness.bench.muon.show import print_result
from harness.errors import UsageError
from harness.launch.pool import Outcome, PoolError, RankEnd, RankReport
from harness.scenario.model import Parameter

REPORT = SystemReport(
    seconds=(2.0, 4.0, 3.0),
    cpu_seconds=(1.0, 1.0, 1.0),
    sent=(100, 100, 100),
    kept=1000,
    peak=5000,
    cost=30,
    elements=10,
    lower_bound=20.0,
    digest="a",
)


def changed(report: SystemReport, **fields: Any) -> SystemReport:
    return msgspec.structs.replace(report, **fields)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_quickest_step_counts() -> None:
    other = changed(REPORT, seconds=(5.0, 1.0, 1.0), cpu_seconds=(0.5, 2.0, 2.0))
    cost = system_cost([REPORT, other], None)
    assert cost.seconds == 3.0  # of 5, 4, 3
    assert cost.cpu_seconds == 1.0  # of 1, 2, 2


def test_of_sizes_and_loads_the_largest_counts() -> None:
    idle = changed(REPORT, cost=0, elements=0, sent=(300, 500, 400), kept=1, peak=2)
    cost = system_cost([REPORT, idle], None)
    assert (cost.sent, cost.kept, cost.peak, cost.balance, cost.idle) == (400, 1000, 5000, 1.5, 1)


def test_the_ratios_are_against_unsharded() -> None:
    unsharded = system_cost([REPORT], None)
    assert [getattr(unsharded, f"{name}_ratio") for name in ("seconds", "cpu", "sent", "kept", "peak")] == [1.0] * 5
    half = changed(REPORT, seconds=(1.0,), cpu_seconds=(0.25,), sent=(75,), kept=500, peak=1000)
    cost = system_cost([half], unsharded)
    assert (cost.seconds_ratio, cost.cpu_ratio, cost.sent_ratio) == (0.5, 0.25, 0.75)
    assert (cost.kept_ratio, cost.peak_ratio) == (0.5, 0.2)


def test_what_the_kernel_does_not_count_is_left_out() -> None:
    untold = changed(REPORT, sent=None, peak=None)
    cost = system_cost([REPORT, untold], system_cost([REPORT], None))
    assert (cost.sent, cost.sent_ratio, cost.peak, cost.peak_ratio) == (None, None, None, None)
    assert system_cost([changed(REPORT, sent=(0, 0, 0))], None).sent_ratio is None  # world 1 sends nothing


def test_a_list_too_large_for_the_machine_is_refused_with_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "available_memory", lambda: 2**30)
    listed = [Parameter("w", (2**10, 2**13)), Parameter("b", (2**10,))]
    check_memory(listed, 2)
    with pytest.raises(UsageError, match=r"^8,389,632 elements on 4 unsharded ranks need about 1\.5 GiB"):
        check_memory(listed, 4)


def test_the_time_a_run_may_take_grows_with_its_work() -> None:
    tiny, huge = Trained("w", (8, 8), muon=True), Trained("w", (4096, 4096), muon=True)
    apart = Trained("e", (10**6, 4096), muon=False)
    assert timeout_s([tiny], 1, 1) == pytest.approx(300.0, rel=1e-3)
    assert timeout_s([huge], 1, 1) == 300.0 + 6.0 * 5 * 4096**3 * 2 / 2e9
    assert timeout_s([huge, apart], 1, 1) == timeout_s([huge], 1, 1)
    assert timeout_s([huge], 4, 3) - 300.0 == 8 * (timeout_s([huge], 1, 1) - 300.0)


# --- a whole run, on ranks that need no process -----------------------------------------------------------------------


class CannedPool:
    """Replies with :data:`REPORT`, except for what ``bad`` does with a task."""

    directory = None

    def __init__(self, bad: Callable[[int, RunSystem], Outcome | None] = lambda world, task: None) -> None:
        self.asked: list[tuple[int, str]] = []
        self._bad = bad

    def __enter__(self) -> CannedPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def recycle(self, world: int) -> None:
        self.asked.append((world, "fresh"))

    def run(self, world: int, task: bytes, *, timeout_s: float) -> Outcome:
        decoded = decode_task(task)
        self.asked.append((world, decoded.system))
        return self._bad(world, decoded) or replied(*[REPORT] * world)


def replied(*reports: SystemReport) -> Outcome:
    ends = (RankReport(i, RankEnd.REPLIED, encode(report), (), None, "", None) for i, report in enumerate(reports))
    return Outcome(len(reports), tuple(ends), 1.0, None)


def run(pool: CannedPool, **options: Any) -> MuonBenchResult:
    given = MuonBenchOptions(**{"preset": "tiny-gpt", "worlds": (1, 2), "steps": 3, **options})
    return run_muon_bench(given, lambda text: None, pool=pool)  # type: ignore[arg-type]


def test_every_system_is_measured_at_every_world_on_fresh_ranks() -> None:
    pool = CannedPool()
    result = run(pool)
    assert (result.verdict, result.violation, result.reason) == ("holds", None, None)
    assert (result.matrices, result.elements) == (8, 7_872)
    assert {world: tuple(costs) for world, costs in result.per_world.items()} == {1: SYSTEMS, 2: SYSTEMS}
    assert pool.asked == [
        entry
        for world in (1, 2)
        for entry in (*(each for system in SYSTEMS for each in ((world, "fresh"), (world, system))), (world, "fresh"))
    ]


def test_other_bits_are_a_violation_that_names_both() -> None:
    pool = CannedPool(
        lambda world, task: (
            replied(REPORT, changed(REPORT, digest="b")) if (world, task.system) == (2, "numel") else None
        )
    )
    result = run(pool)
    assert result.verdict == "violated"
    assert result.violation == "world 2: numel on rank 1 has other weights than unsharded on rank 0"


def test_a_rank_that_fails_is_a_violation_in_a_sentence() -> None:
    def fail(world: int, task: RunSystem) -> Outcome | None:
        if task.system != "newton_schulz":
            return None
        error = "Traceback (most recent call last):\n  File ...\nValueError: planted"
        return Outcome(1, (RankReport(0, RankEnd.RAISED, None, (), error, "", None),), 1.0, 0)

    result = run(CannedPool(fail))
    assert result.violation == "world 1, newton_schulz: rank 0 raised: ValueError: planted"
    assert list(result.per_world[1]) == ["unsharded"]


@pytest.mark.parametrize(
    ("raised", "interrupted", "reason"),
    [(PoolError("no ranks"), False, "no ranks"), (KeyboardInterrupt(), True, "interrupted")],
)
def test_what_was_measured_before_the_end_is_kept(raised: BaseException, interrupted: bool, reason: str) -> None:
    def stop(world: int, task: RunSystem) -> Outcome | None:
        if world == 2:
            raise raised
        return None

    result = run(CannedPool(stop))
    assert (result.verdict, result.interrupted, result.reason) == ("unknown", interrupted, reason)
    assert tuple(result.per_world[1]) == SYSTEMS


# --- what is printed --------------------------------------------------------------------------------------------------


def test_each_world_has_a_table_of_ratios() -> None:
    stream = io.StringIO()
    print_result(stream, run(CannedPool(), worlds=(2,)))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "world 2, ratios to unsharded"
    rows = {line[2:26].strip(): " ".join(line[26:].split()) for line in lines[2:5]}
    assert list(rows) == ["unsharded", "sharded, default rule", "sharded, original rule"]
    assert rows["unsharded"] == "2.00 s 1.00 1.00 s 1.00 0.0 1.00 0.0 1.00 0.0 1.00 1.50 0"
    assert lines[-1].startswith("measured: tiny-gpt (8 matrices of 7,872 elements in all) on gloo, world 2 1.00 of an")


def test_what_went_wrong_is_the_last_line() -> None:
    stream = io.StringIO()
    pool = CannedPool(lambda world, task: replied(changed(REPORT, digest=task.system)))
    print_result(stream, run(pool, worlds=(1,)))
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "  violation    world 1: newton_schulz on rank 0 has other weights than unsharded on rank 0"
    assert lines[-2].startswith("violated: ")
