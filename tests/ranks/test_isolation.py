"""What a class does to its process harms no later scenario: campaigns over rude classes and a polite one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.drive.tasks import RunScenario, SubjectName, encode
from harness.launch.pool import RankPool
from harness.report.result import Result
from harness.scenario import presets
from harness.subjects.source import Scalar
from harness.verdict import RankStatus, RankVerdict
from tests.subjects.rude import RUDE
from tests.support import Campaigns, repetitions, sampled, subject

TIMEOUT_S = 120.0  # of one scenario of a few milliseconds
PLAIN = "museum:plain-zero"
# One step of two parts, whose sums round.
SCENARIO = presets.campaign(presets.parameters("tiny-mlp"), world=2, bucket=1000, seed=3)[1]


def verdicts(
    pool: RankPool, name: str, args: dict[str, Scalar] | None = None, *, exchanges: bool = False
) -> list[RankVerdict]:
    """What the ranks say about one scenario of a subject; none may fail to answer."""
    task = RunScenario(SubjectName(subject(name).absolute, args or {}), SCENARIO, exchanges)
    outcome = pool.run(SCENARIO.world, encode(task), timeout_s=TIMEOUT_S)
    assert outcome.replied, [report.error or report.output for report in outcome.ranks]
    return [msgspec.msgpack.decode(report.reply or b"", type=RankVerdict) for report in outcome.ranks]


@pytest.fixture
def fresh(scenario_pool: RankPool) -> Iterator[RankPool]:
    """The shared pool with ranks of world 2 that have done nothing yet, and that are replaced in the end."""
    scenario_pool.recycle(SCENARIO.world)
    yield scenario_pool
    scenario_pool.recycle(SCENARIO.world)


def require_polite(pool: RankPool) -> None:
    """A class that does nothing but train is judged as on fresh ranks, and nothing is left to put back."""
    for verdict in verdicts(pool, PLAIN):
        assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None)
        assert (verdict.changed, verdict.recycle) == ((), None)
        assert [call.kind for call in verdict.collectives].count("all_reduce") == 1  # of the one norm


@pytest.mark.parametrize("how", sampled(RUDE, every=6))
def test_what_a_class_changes_is_put_back(how: str, campaigns: Campaigns) -> None:
    result = campaigns.run("rude.py:Rude", worlds=(2,), examples=repetitions(2, 4), args={"how": how})
    for verdict in verdicts(campaigns.pool, "rude.py:Rude", {"how": how}):
        assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None)
        assert (verdict.changed, verdict.recycle) == (RUDE[how].changed, None)
    require_polite(campaigns.pool)

    assert_holds(result)


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("Exits", "collect", "SystemExit"),
        ("ExitsAtOnce", "reduce", "exit code 0"),
        ("InterruptsTheHarness", "collect", "nobody had called"),
        ("DestroysGroup", "gather", "destroyed the default process group"),
    ],
)
def test_a_class_that_ends_its_rank_is_violated_and_the_next_holds(
    name: str, stage: str, message: str, campaigns: Campaigns
) -> None:
    result = campaigns.run(f"rude.py:{name}", worlds=(2,), examples=10)
    after = campaigns.run(PLAIN, worlds=(2,), examples=4)

    assert result.verdict == "violated", result.reason
    assert result.failure is not None
    assert (result.failure.property, result.failure.stage) == ("progress", stage)
    assert message in (result.failure.message or "")
    assert_holds(after)


def test_functions_of_torch_that_were_broken_in_the_end_work_in_the_next_scenario(scenario_pool: RankPool) -> None:
    for verdict in verdicts(scenario_pool, "rude.py:BreaksCollectives"):
        assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None)
        assert verdict.changed == ("functions of torch.distributed",)
    require_polite(scenario_pool)


def test_the_harness_itself_calls_the_functions_of_torch(scenario_pool: RankPool) -> None:
    for verdict in verdicts(scenario_pool, "rude.py:KeepsCollectivesToItself", exchanges=True):
        assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None), verdict.detail
        assert verdict.changed == ("functions of torch.distributed",)
    require_polite(scenario_pool)


def test_the_reference_does_not_flush_what_the_class_flushes(campaigns: Campaigns) -> None:
    """In one process: else both would be wrong in the same way, or the reference be blamed."""
    result = campaigns.run("rude.py:FlushesSubnormals", worlds=(1,), examples=80)

    assert result.failure is not None
    assert (result.failure.property, result.failure.stage) == ("spill", "reduce")


def test_a_process_that_lost_its_group_is_not_to_be_used_again(fresh: RankPool) -> None:
    for verdict in verdicts(fresh, "rude.py:DestroysGroupAtTheEnd"):
        assert (verdict.status, verdict.divergence) == (RankStatus.DONE, None)
        assert verdict.recycle == "the class destroyed the default process group"


def test_a_rank_shows_where_it_hangs_though_an_earlier_class_took_all_signals(fresh: RankPool) -> None:
    verdicts(fresh, "rude.py:Rude", {"how": "signals"})
    task = RunScenario(SubjectName(subject("broken.py:HangsInNorm").absolute), SCENARIO)
    outcome = fresh.run(2, encode(task), timeout_s=3.0)

    hung = [report for report in outcome.ranks if report.stacks is not None]
    assert hung
    assert all("most recent call first" in (report.stacks or "") for report in hung)


def test_sub_groups_that_pile_up_end_in_fresh_ranks(fresh: RankPool) -> None:
    """They are made of threads, connections and entries in a register: whichever limit is reached first."""
    for _ in range(80):
        reasons = {verdict.recycle for verdict in verdicts(fresh, "rude.py:LeaksGroups")}
        if None not in reasons:
            break
    assert all("more" in (reason or "") for reason in reasons)


def test_global_generators_give_the_same_numbers_in_every_run(campaigns: Campaigns) -> None:
    result = campaigns.run("rude.py:AddsNoise", worlds=(2,), examples=10)

    assert result.failure is not None
    assert result.failure.property in ("gradient", "spill", "ownership")  # and not `determinism`


@pytest.mark.parametrize(
    "line",
    sampled(
        [
            "torch.set_default_dtype(torch.float64)",
            "torch.set_default_device('meta')",
            "torch.set_grad_enabled(False)",
            "torch.use_deterministic_algorithms(True)",
            "import numpy; numpy.seterr(all='raise')",
            "import warnings; warnings.simplefilter('error')",
            "import sys; sys.stdout.close()",
            "import os; os.environ['ADDED'] = '1'; del os.environ['MASTER_ADDR']",
            "import os; os.chdir('/')",
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        ],
        every=4,
    ),
)
def test_what_the_import_changes_is_the_environment_of_this_class_alone(
    line: str, tmp_path: Path, campaigns: Campaigns
) -> None:
    file = tmp_path / "at_import.py"
    file.write_text(f"import torch\nfrom tests.subjects.rude import Careful as Subject\n{line}\n")
    result = campaigns.run(f"{file}:Subject", worlds=(2,), examples=repetitions(3, 10))
    for verdict in verdicts(campaigns.pool, f"{file}:Subject"):
        assert (verdict.status, verdict.divergence, verdict.changed) == (RankStatus.DONE, None, ())
    require_polite(campaigns.pool)

    assert_holds(result)


def test_the_environment_of_the_import_is_there_in_every_scenario(tmp_path: Path, scenario_pool: RankPool) -> None:
    """Also after another class had its turn, and without being reported as a change."""
    file = tmp_path / "needs_its_environment.py"
    file.write_text(
        "import os, torch\nfrom tests.subjects.rude import Careful\n"
        "torch.set_default_dtype(torch.float64)\nos.environ['MINE'] = '1'\n"
        "class Subject(Careful):\n"
        "    def collect(self, more):\n"
        "        assert torch.get_default_dtype() == torch.float64 and os.environ['MINE'] == '1'\n"
        "        super().collect(more)\n"
    )
    for _ in range(2):
        for verdict in verdicts(scenario_pool, f"{file}:Subject"):
            assert (verdict.status, verdict.divergence, verdict.changed) == (RankStatus.DONE, None, ())
        require_polite(scenario_pool)


def assert_holds(result: Result) -> None:
    assert result.verdict == "holds", (result.reason, result.failure)


def test_ranks_without_their_group_are_replaced_and_the_campaign_goes_on(campaigns: Campaigns) -> None:
    """A class that destroys the default group after its last step: each scenario holds, the next has fresh ranks."""
    result = campaigns.run("rude.py:DestroysGroupAtTheEnd", worlds=(2,), examples=4)
    after = campaigns.run(PLAIN, worlds=(2,), examples=4)

    assert_holds(result)
    assert len(result.recycled) == 4
    assert all("group" in reason for reason in result.recycled)
    assert_holds(after)
    assert after.recycled == ()
